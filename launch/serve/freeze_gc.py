"""Garbage collection of the server's processes."""

from __future__ import annotations

import gc


def freeze_gc() -> None:
    """Exclude all existing objects from garbage collection; a process calls it once it is ready.

    They live as long as the server. A full collection would visit every object of all imported modules and stall the process.
    """
    gc.collect()
    gc.freeze()
