"""The host's wait for its device, which ends: with the work, or when a rank has not come within the ring's timeout.

Owns how the host looks, when it gives up, and what a ring says from then on. Refuses to know what was enqueued, and how what is
stuck is let go of.

Note [Replays have no watchdog]
    A plain collective of NCCL is known to torch's watchdog, which ends the process when it takes longer than the group's
    timeout. A replay of a CUDA graph passes no such call: collectives in it are known to nobody, and one whose peer has died
    would be waited for without end. The host needs what a replay has computed anyway. So it does not block in CUDA, from where
    nothing brings it back, but looks whether an event behind the replay has passed, for a bounded time. Time counts from when
    the device begins with the replay: what was enqueued before, a long prompt say, may take as long as it takes, and is bounded
    by what bounds plain calls.
    Kernels that give up by themselves (`OneShotReducer`, the watch of the copy engine) do so after the timeout and know more, so
    the host waits half as long again, and asks them before it says what it knows.

Note [Looking]
    A look costs a microsecond, and whoever looks without a pause keeps other threads of the process (those of a server) from
    running. A sleep costs no time of others, but lasts up to SLACK_S longer than it was told to. Replays of one graph last about
    equally long. So the host sleeps for most of the time that the last one took, in eighths, lest a shorter one be noticed late;
    looks without a pause around the time when it should end; and from then on ever more seldom.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch

GRACE_S = 2.0
"""What the host waits longer than the timeout, at most half of it (Note [Replays have no watchdog])."""
SLACK_S = 1e-4
"""What a sleep may last longer than it was told to."""
SPIN_S = 1e-3
"""How long the host looks without a pause after the time at which it expected the end."""
LEAST_PAUSE_S, MOST_PAUSE_S = 5e-5, 1e-3


class DeviceEvent(Protocol):
    """A place in the order of a stream: `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the device has passed it."""
        ...


@dataclass(eq=False)
class EventPair:
    """Where something that is enqueued, perhaps again and again, begins and ends.

    Attributes:
        begun: Before it; None: it has begun.
        ended: Behind it.
        lasted_s: Seconds that the last wait for it took.
    """

    begun: DeviceEvent | None
    ended: DeviceEvent
    lasted_s: float = 0.0


def record_events(device: torch.device) -> EventPair:
    """Marks of what the current stream of a GPU holds now."""
    ended = torch.cuda.Event()
    ended.record(torch.cuda.current_stream(device))
    return EventPair(None, ended)


def pause_s(elapsed_s: float, usual_s: float) -> float:
    """How long to sleep before the next look (Note [Looking]); 0: not at all.

    Args:
        elapsed_s: Seconds since the wait began.
        usual_s: Seconds that it should take; 0: unknown.

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


def wait_until_done(
    events: EventPair,
    bound_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> bool:
    """Waits until a mark has been passed; whether it was.

    Args:
        events: For whose end, and from when on time counts.
        bound_s: Seconds after which to give up.
        clock: Seconds.
        sleep: Lets others run for so many seconds.
    """
    start = clock()
    began = start if events.begun is None else math.inf
    while not events.ended.query():
        now = clock()
        if began == math.inf and events.begun is not None and events.begun.query():
            began = now
        if now - began > bound_s:
            return False
        pause = pause_s(now - start, events.lasted_s)
        if pause:
            sleep(pause)
    events.lasted_s = clock() - start
    return True


class BoundedWait:
    """How long a rank's host waits for its device, and that it does so once.

    Args:
        rank: This ring rank.
        world_size: Ranks of the ring.
        name: The ring's name.
        timeout: Seconds that a rank may be waited for.
        abort_communicators: Called, once, when the host gives up: lets go of what is stuck, as far as that can be; must not wait.
        clock: As in `wait_until_done`.
        sleep: Likewise.

    Attributes:
        failure: Why the ring has failed; None while it is healthy.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        name: str,
        timeout: float,
        abort_communicators: Callable[[torch.device], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._rank, self._world_size, self._name = rank, world_size, name
        self._timeout, self._abort_communicators, self._clock, self._sleep = timeout, abort_communicators, clock, sleep
        self.failure: str | None = None

    @property
    def bound_s(self) -> float:
        """Seconds that something may take which waits for ranks; whoever is alone waits for nobody else."""
        return math.inf if self._world_size == 1 else self._timeout + min(GRACE_S, self._timeout / 2)

    def check(self) -> None:
        """Raises if the host has given up.

        Raises:
            RuntimeError: It has; the message names this rank, the step and the peers.
        """
        if self.failure is not None:
            raise RuntimeError(self.failure)

    def wait(self, events: EventPair) -> bool:
        """Waits until something has ended, if it does in time; whether it has.

        Args:
            events: Of what.

        Raises:
            RuntimeError: The host has given up before.
        """
        self.check()
        return wait_until_done(events, self.bound_s, self._clock, self._sleep)

    def raise_timeout(self, what: str, device: torch.device) -> NoReturn:
        """Says that something has not ended in time.

        Args:
            what: What, for the message.
            device: Where it is stuck.

        Raises:
            RuntimeError: Always; from now on `check` raises it, too.
        """
        peers = [peer for peer in range(self._world_size) if peer != self._rank]
        self.failure = (
            f"ring rank {self._rank} of ring {self._name!r}: {what} has not ended {self.bound_s:g} s after it began, and ranks may "
            f"be waited for {self._timeout:g} s: one of ring ranks {peers} did not come; look for an earlier error on those ranks "
            "(what it was to compute is not there, and this ring can not be used any more: end the process)"
        )
        self._abort_communicators(device)
        raise RuntimeError(self.failure)
