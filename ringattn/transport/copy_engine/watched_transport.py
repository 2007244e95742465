"""A transport between nodes whose waits the watchdog of a node sees and names."""

from __future__ import annotations

from collections.abc import Sequence

from ringattn.transport.base import Message, Transport, Work
from ringattn.transport.copy_engine.buffers import RankBuffers
from ringattn.transport.copy_engine.streams import Program
from ringattn.transport.copy_engine.watchdog import BETWEEN_NODES, ProgramInfo


class WatchedTransport(Transport):
    """A `Transport` between nodes that reports its waits.

    Args:
        here: The buffers of this rank's node.
        link: The transport between nodes.
    """

    def __init__(self, here: RankBuffers, link: Transport) -> None:
        self._here = here
        self._link = link

    def post(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> Work:
        """See `Transport.post`."""
        work = self._link.post(sends, receives, what)
        peers = tuple(sorted({peer for peer, x in (*sends, *receives) if x.numel()}))
        return _WatchedWork(self._here, work, peers, what) if peers else work

    def reserve(self, num_bytes: int, grad_bytes: int = 0) -> None:
        """See `Transport.reserve`."""
        self._link.reserve(num_bytes, grad_bytes)


class _WatchedWork:
    """Work that reports its place while the caller's stream waits."""

    __slots__ = ("_here", "_peers", "_what", "_work")

    def __init__(self, here: RankBuffers, work: Work, peers: tuple[int, ...], what: str) -> None:
        self._here = here
        self._work = work
        self._peers = peers
        self._what = what

    def wait(self) -> None:
        here = self._here
        streams = here.streams
        key = ("between nodes", self._peers)
        found: tuple[ProgramInfo, Program, Program] | None = here.find(key)
        if found is None:
            info = ProgramInfo(self._what, self._peers, since=None)
            number = here.watchdog.number(info)
            begin, end = (
                streams.compile([here.semaphores.report_place(number, BETWEEN_NODES)]),
                streams.compile(here.semaphores.exit_ring()),
            )
            found = here.keep(key, (info, begin, end))
        found[0].what = self._what
        stream = streams.main()
        streams.launch(found[1], stream)
        self._work.wait()
        streams.launch(found[2], stream)
        if here.watchdog.failure is not None:
            here.watchdog.check()
