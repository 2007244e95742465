"""What every program of a rank begins and ends with: where its streams are, and whether they may go on.

Owns the words of this rank alone: those of its device, by which its streams start and join each other and which the watch over
the ring closes, and those in host memory, which that watch reads. Refuses to know rows, and the words between ranks
(peer_buffers.py).

Inside a capture events order the streams, and words must not: the side stream of a graph is not the ring's own, whose next
work may be enqueued while the graph still runs, and each would take the other's signals. So what is built in a capture has
no words that start and join streams.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringattn.transport.copy_engine.peer_buffers import wait_and_reset
from ringattn.transport.copy_engine.streams import Op, Streams, Wait, Write, Write64
from ringattn.transport.copy_engine.watchdog import (
    ELSEWHERE,
    ERROR,
    GATE,
    KERNEL,
    PLACE,
    PLACES,
    PROCEED,
    QUIET,
    START,
    Watchdog,
)


class Semaphores:
    """The words of one rank, for those who build its programs.

    Args:
        rank: This rank.
        members: The ranks that share memory with it, in the order of the ring, itself among them.
        device: Addresses of the words of its device, by `GATE` ...
        host: Address of the words in host memory, `PLACE` ...
        streams: The way to the device.
        watchdog: What reads them.

    Attributes:
        peers: The other members.
        prev_rank: The member before this rank.
        gate: Nothing may be said behind it unless the ring is healthy (Note [The way out] of watchdog.py).
        proceed: Likewise, the caller's stream may not go on.
    """

    def __init__(
        self, rank: int, members: Sequence[int], device: Sequence[int], host: int, streams: Streams, watchdog: Watchdog
    ) -> None:
        self.rank = rank
        self.peers = tuple(peer for peer in members if peer != rank)
        self.prev_rank = members[members.index(rank) - 1]
        self.streams = streams
        self.watchdog = watchdog
        self.gate = Wait(device[GATE], 1)
        self.proceed = Wait(device[PROCEED], 1)
        self._device = tuple(device)
        self._host = host

    def report_place(self, number: int, place: int) -> Op:
        """The caller's stream is at a place of a numbered course."""
        return self.report(PLACE, number * PLACES + place)

    def enter_kernel(self, number: int) -> list[Op]:
        """The caller's stream goes on to a kernel that may wait for rows."""
        return [self.proceed, self._both(PLACE, number * PLACES + KERNEL)]

    def exit_ring(self) -> list[Op]:
        """The caller's stream is done with the ring."""
        return [self._both(PLACE, ELSEWHERE)]

    def report(self, word: int, value: int) -> Op:
        """What the watch reads."""
        return Write(self._host + 4 * word, value)

    def clear_error(self) -> list[Op]:
        """No kernel has failed."""
        return [Write(self._device[ERROR], 0)]

    def wait_copy_stream_idle(self) -> list[Op]:
        """The caller's stream waits until the side stream has begun what it was started for before."""
        return [] if self.streams.capturing() else [Wait(self._device[START], 0)]

    def start_stream(self, start: int) -> list[Op]:
        """The caller's stream starts the one that waits for this word."""
        return [] if self.streams.capturing() else [Write(self._device[start], 1)]

    def wait_stream(self, done: int) -> list[Op]:
        """The caller's stream joins the one that ends with this word."""
        return [] if self.streams.capturing() else wait_and_reset(self._device[done])

    def begin_stream(self, start: int, progress: int, number: int) -> list[Op]:
        """A stream beside the caller's waits to be started, and is on a numbered course."""
        started = [] if self.streams.capturing() else wait_and_reset(self._device[start])
        return [*started, self._both(progress, number)]

    def end_stream(self, progress: int, done: int) -> list[Op]:
        """It has done its work, and may be joined."""
        ended: list[Op] = [] if self.streams.capturing() else [Write(self._device[done], 1)]
        return [self.gate, self.report(QUIET, 0), self.report(progress, 0), *ended]

    def _both(self, word: int, value: int) -> Op:
        """A note, and 0 in the word behind it."""
        return Write64(self._host + 4 * word, value, 0)
