"""Clocks of tests: whether something is quick, and waits for other threads and processes; knows nothing of what it times.

A limit of what is quick is some ten times what a quiet core takes, which tells a pass over documents from one over tokens, and
holds no speed: cores are shared, and some are slow. One call may meet a burst of work of others, so a few are tried. The collector
of garbage stays out of it: it may walk all that a test process holds (0.7 s once, in a process of two thousand tests).
"""

import gc
import time
from collections.abc import Callable
from typing import Any

HANGS_S = 120.0
"""Seconds after which something hangs: nothing lasts as long, however busy the machine is."""


def wait_for(what: Callable[[], Any], say: Callable[[], object] = lambda: "") -> Any:
    """Return the first true result of a call; fail with what `say` returns if there is none for HANGS_S."""
    deadline = time.monotonic() + HANGS_S
    while not (found := what()):
        assert time.monotonic() < deadline, say()
        time.sleep(0.01)
    return found


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
