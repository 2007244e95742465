"""A transport between nodes whose waits the watchdog of a node sees and names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringattn.transport.base import Message, Transport, Work
from ringattn.transport.copy_engine.buffers import RankBuffers
from ringattn.transport.copy_engine.streams import Program
from ringattn.transport.copy_engine.watchdog import BETWEEN_NODES, ProgramInfo


@dataclass(eq=False)
class WatchedTransport(Transport):
    """A `Transport` between nodes that reports its waits to the watchdog of this rank's node."""

    buffers: RankBuffers
    link: Transport

    def post(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> Work:
        """See `Transport.post`."""
        work = self.link.post(sends, receives, what)
        peers = tuple(sorted({peer for peer, x in (*sends, *receives) if x.numel()}))
        return _WatchedWork(self.buffers, work, peers, what) if peers else work

    def reserve(self, num_bytes: int, grad_bytes: int = 0) -> None:
        """See `Transport.reserve`."""
        self.link.reserve(num_bytes, grad_bytes)


@dataclass(eq=False, slots=True)
class _WatchedWork:
    buffers: RankBuffers
    work: Work
    peers: tuple[int, ...]
    what: str

    def wait(self) -> None:
        here = self.buffers
        streams = here.streams
        key = ("between nodes", self.peers)
        found: tuple[ProgramInfo, Program, Program] | None = here.find(key)
        if found is None:
            info = ProgramInfo(self.what, self.peers, since=None)
            place = here.semaphores.report_place(here.watchdog.number(info), BETWEEN_NODES)
            found = here.keep(key, (info, streams.compile([place]), streams.compile(here.semaphores.exit_ring())))
        info, begin, end = found
        info.what = self.what
        stream = streams.main()
        streams.launch(begin, stream)
        self.work.wait()
        streams.launch(end, stream)
        if here.watchdog.failure is not None:
            here.watchdog.check()
