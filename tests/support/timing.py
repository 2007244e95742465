"""Whether something is quick: owns the clock of tests that say so; knows nothing of what it times.

A limit is some ten times what a quiet core takes, which tells a pass over documents from one over tokens, and holds no speed:
cores are shared, and some are slow. One call may meet a burst of work of others, so a few are tried. The collector of garbage stays
out of it: it may walk all that a test process holds (0.7 s once, in a process of two thousand tests).
"""

import gc
import time
from collections.abc import Callable


def assert_quick(call: Callable[[], object], limit: float) -> None:
    """One of five calls takes less than `limit` CPU seconds; each must do all of its work anew."""
    taken: list[float] = []
    while len(taken) < 5 and min(taken, default=limit) >= limit:
        taken.append(_seconds(call))
    assert min(taken) < limit, f"{len(taken)} calls took {', '.join(f'{x:.3g}' for x in taken)} s each"


def _seconds(call: Callable[[], object]) -> float:
    gc.disable()
    try:
        begin = time.process_time()
        call()
        return time.process_time() - begin
    finally:
        gc.enable()
