"""Operations at the begin and the end of a rank's programs: they report the place of its streams, start and join them.

Inside a capture events order the streams, and semaphores must not: the copy stream of a graph is not the ring's own, whose next
work may be enqueued while the graph still runs, and each would take the other's signals. So programs that are built in a capture
have no semaphores that start and join streams.
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
    """The semaphores of one rank's own streams, and the peers of its programs.

    device are the addresses of the words of its device, by `GATE` ..., host that of the words in host memory, `PLACE` ...

    Attributes:
        gate: Passed before each signal: open while the ring is healthy (Note [Recovery] of watchdog.py).
        proceed: Passed by the caller's stream: open while the ring is healthy.
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
        """Report that the caller's stream is at a place of a numbered program."""
        return self.report(PLACE, number * PLACES + place)

    def enter_kernel(self, number: int) -> list[Op]:
        """Let the caller's stream go on to a kernel that may wait for rows."""
        return [self.proceed, self._both(PLACE, number * PLACES + KERNEL)]

    def exit_ring(self) -> list[Op]:
        """Report that the caller's stream has left the ring."""
        return [self._both(PLACE, ELSEWHERE)]

    def report(self, word: int, value: int) -> Op:
        """Write a word that the watchdog reads."""
        return Write(self._host + 4 * word, value)

    def clear_error(self) -> list[Op]:
        """Clear the error word of the kernels."""
        return [Write(self._device[ERROR], 0)]

    def wait_copy_stream_idle(self) -> list[Op]:
        """Make the caller's stream wait until the copy stream has begun the work that it was started for before."""
        return [] if self.streams.capturing() else [Wait(self._device[START], 0)]

    def start_stream(self, start: int) -> list[Op]:
        """Start, from the caller's stream, the stream that waits for this word."""
        return [] if self.streams.capturing() else [Write(self._device[start], 1)]

    def wait_stream(self, done: int) -> list[Op]:
        """Make the caller's stream join the one that ends with this word."""
        return [] if self.streams.capturing() else wait_and_reset(self._device[done])

    def begin_stream(self, start: int, progress: int, number: int) -> list[Op]:
        """Make a stream wait to be started, and report its program."""
        started = [] if self.streams.capturing() else wait_and_reset(self._device[start])
        return [*started, self._both(progress, number)]

    def end_stream(self, progress: int, done: int) -> list[Op]:
        """Report that a stream has done its work, and may be joined."""
        ended: list[Op] = [] if self.streams.capturing() else [Write(self._device[done], 1)]
        return [self.gate, self.report(QUIET, 0), self.report(progress, 0), *ended]

    def _both(self, word: int, value: int) -> Op:
        """Write a report, and 0 in the word behind it."""
        return Write64(self._host + 4 * word, value, 0)
