"""A link between nodes whose waits the watch over one node sees and names.

Owns the words around such a wait. Refuses to know how the link moves bytes, and who sits in the node.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringattn.transport.base import Parcel, Pending, Transport
from ringattn.transport.copy_engine.buffers import Holdings
from ringattn.transport.copy_engine.streams import Program
from ringattn.transport.copy_engine.watchdog import CROSSING, Course


class WatchedLink:
    """A `Transport` between nodes.

    Args:
        here: What this rank holds for its node.
        link: What crosses.
    """

    def __init__(self, here: Holdings, link: Transport) -> None:
        self._here = here
        self._link = link

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel], what: str) -> Pending:
        """See `Transport.post`."""
        pending = self._link.post(sends, receives, what)
        peers = tuple(sorted({peer for peer, x in (*sends, *receives) if x.numel()}))
        return _Crossing(self._here, pending, peers, what) if peers else pending

    def reserve(self, num_bytes: int, replies: int = 0) -> None:
        """See `Transport.reserve`."""
        self._link.reserve(num_bytes, replies)

    def gatherer(self) -> None:
        """See `Transport.gatherer`."""
        return


class _Crossing:
    """See `Pending`: the caller's stream says where it is as long as it waits."""

    __slots__ = ("_here", "_peers", "_pending", "_what")

    def __init__(self, here: Holdings, pending: Pending, peers: tuple[int, ...], what: str) -> None:
        self._here = here
        self._pending = pending
        self._peers = peers
        self._what = what

    def wait(self) -> None:
        here = self._here
        streams = here.streams
        key = ("crossing", self._peers)
        found: tuple[Course, Program, Program] | None = here.find(key)
        if found is None:
            course = Course(self._what, self._peers, since=None)
            number = here.watch.number(course)
            begin, end = streams.compile([here.words.report_place(number, CROSSING)]), streams.compile(here.words.exit_ring())
            found = here.keep(key, (course, begin, end))
        found[0].what = self._what
        lane = streams.main()
        streams.launch(found[1], lane)
        self._pending.wait()
        streams.launch(found[2], lane)
        if here.watch.failure is not None:
            here.watch.check()
