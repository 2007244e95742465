"""How long something takes at best: owns the clock of tests that say "quick"; knows nothing of what it times.

One measurement says little of the code: the collector of garbage may walk all that a test process holds just then (0.7 s once, in
a process of two thousand tests), and cores are shared. The least of a few says what the code needs. A loop of plain Python that
is timed beside each says how slow the machine is at that moment.
"""

import time
from collections.abc import Callable

LOOP_SECONDS = 0.055  # what `_loop` takes on a quiet core


def least_seconds(call: Callable[[], object], times: int = 3) -> float:
    """CPU seconds that the quickest of `times` calls takes on a quiet core; `call` must do all of its work anew each time."""
    taken = [(_seconds(call), _seconds(_loop)) for _ in range(times)]
    return min(seconds for seconds, _ in taken) * LOOP_SECONDS / min(loop for _, loop in taken)


def _loop() -> None:
    total = 0
    for i in range(1_000_000):
        total += i * i


def _seconds(call: Callable[[], object]) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin
