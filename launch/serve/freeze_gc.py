"""Garbage collection of the server's processes."""

import gc


def freeze_gc() -> None:
    """Exclude all existing objects, which live as long as the server, from garbage collection: it would stall the process."""
    gc.collect()
    gc.freeze()
