"""How long something takes at best: owns the clock of tests that say "quick"; knows nothing of what it times.

One measurement says little of the code: the collector of garbage may walk all that a test process holds just then (0.7 s once, in
a process of two thousand tests), and cores are shared. The least of a few says what the code needs.
"""

import time
from collections.abc import Callable


def least_seconds(call: Callable[[], object], times: int = 3) -> float:
    """CPU seconds of the quickest of `times` calls; `call` must do all of its work anew each time."""
    taken = []
    for _ in range(times):
        begin = time.process_time()
        call()
        taken.append(time.process_time() - begin)
    return min(taken)
