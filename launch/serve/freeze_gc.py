"""When the garbage collector looks at what.

Owns the one call that each process of the server makes once it is ready. Refuses to know what they are.
"""

from __future__ import annotations

import gc


def settle() -> None:
    """What was made until now lives as long as the server: the garbage collector need not look at it again.

    A full collection looks at every object of all imported modules, and everybody waits for the process that makes it.
    """
    gc.collect()
    gc.freeze()
