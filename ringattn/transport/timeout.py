"""Bounded waits of the host for its device: with the work, or when a rank has not come within the ring's timeout.

Torch's watchdog does not know collectives in a replay of a CUDA graph, so the host does not block in CUDA, where a missing
peer would hold it for ever, but polls an event behind the replay. Time counts from when the device begins with the replay. Kernels
that give up by themselves (`OneShotReducer`, the watchdog of the copy engine) do so after the timeout and name more, so the host
waits half as long again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

GRACE_S = 2.0
"""Seconds that the host waits beyond the timeout, at most half of it."""
SLACK_S = 1e-4
"""Seconds that a sleep may last too long."""
SPIN_S = 1e-3
"""Seconds that the host polls without a pause after the expected end."""
LEAST_PAUSE_S, MOST_PAUSE_S = 5e-5, 1e-3


@dataclass(eq=False)
class EventPair:
    """Begin and end of work that is enqueued, perhaps repeatedly, as events of its stream (`torch.cuda.Event`).

    Attributes:
        begun: Before it; None: it has begun.
        lasted_s: Seconds that the last wait for it took.
    """

    begun: Any
    ended: Any
    lasted_s: float = 0.0


def record_events(device: torch.device) -> EventPair:
    """Return the end of all work that the current stream of a GPU holds now."""
    ended = torch.cuda.Event()
    ended.record(torch.cuda.current_stream(device))
    return EventPair(None, ended)


def pause_s(elapsed_s: float, usual_s: float) -> float:
    """Return the seconds to sleep before the next poll, after a wait of elapsed_s that should take usual_s (0: unknown); 0: none.

    A poll costs a microsecond, and polling without a pause keeps other threads of the process from running. A sleep lasts up to
    SLACK_S too long. Replays of one graph last about equally long. So the host sleeps for most of the time that the last one
    took, in eighths in case this one is shorter; polls without a pause around the expected end; and then ever more seldom.

    Example:
        >>> pause_s(0.002, 0.016), pause_s(0.015, 0.016), pause_s(0.0165, 0.016), pause_s(6.4, 0.016)
        (0.002, 0.0, 0.0, 0.001)
    """
    early = 0.9 * usual_s - elapsed_s - SLACK_S
    if early > 0:
        return min(early, usual_s / 8)
    if elapsed_s < 1.1 * usual_s + SPIN_S:
        return 0.0
    return min(max(elapsed_s / 64, LEAST_PAUSE_S), MOST_PAUSE_S)


def wait_until_done(events: EventPair, bound_s: float) -> bool:
    """Wait until the end of some work has been passed, for at most bound_s seconds; return whether it was."""
    start = time.monotonic()
    began = start if events.begun is None else math.inf
    while not events.ended.query():
        now = time.monotonic()
        if began == math.inf and events.begun is not None and events.begun.query():
            began = now
        if now - began > bound_s:
            return False
        pause = pause_s(now - start, events.lasted_s)
        if pause:
            time.sleep(pause)
    events.lasted_s = time.monotonic() - start
    return True


@dataclass(eq=False)
class BoundedWait:
    """The bounded waits of one rank's host for its device; calls abort_communicators, which must not wait, once at the timeout.

    Attributes:
        failure: The message of the failure; None while the ring is healthy.
    """

    rank: int
    world_size: int
    name: str
    timeout: float
    abort_communicators: Callable[[torch.device], None]
    failure: str | None = None

    @property
    def bound_s(self) -> float:
        """Seconds that work may take which waits for ranks; unbounded in a ring of one rank."""
        return math.inf if self.world_size == 1 else self.timeout + min(GRACE_S, self.timeout / 2)

    def check(self) -> None:
        """Raise RuntimeError if a wait has timed out."""
        if self.failure is not None:
            raise RuntimeError(self.failure)

    def wait(self, events: EventPair) -> bool:
        """Wait until some work has ended, if it does in time; return whether it has."""
        self.check()
        return wait_until_done(events, self.bound_s)

    def raise_timeout(self, what: str, device: torch.device) -> NoReturn:
        """Raise RuntimeError because the named work has not ended in time; from now on `check` raises it, too."""
        peers = [peer for peer in range(self.world_size) if peer != self.rank]
        self.failure = (
            f"ring rank {self.rank} of ring {self.name!r}: {what} has not ended {self.bound_s:g} s after it began, and ranks may "
            f"be waited for {self.timeout:g} s: one of ring ranks {peers} did not come; look for an earlier error on those ranks "
            "(what it was to compute is not there, and this ring can not be used any more: end the process)"
        )
        self.abort_communicators(device)
        raise RuntimeError(self.failure)
