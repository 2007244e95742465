"""Shards between the GPUs of one host by copy engine: whoever owns keys pushes them into the memory of who reads them.

Owns the protocol: in which order words are written and waited for, and which bytes are copied. Refuses to know where words and
rows lie (stations.py), and devices: it speaks to `Streams` and `Memory`, so that the whole protocol also runs on a CPU, in any
interleaving.

Note [A gather]
    Every rank has one slot, where it packs its k and v, and one far, which its peers write into.
    The caller's stream packs, which lowers the flags as well, and starts the side stream, which pushes: group by group
    and reader by reader in ring order, it waits for its turn at the reader (`room`), copies rows of the slot to their
    place in the reader's far, says `full`, and `room` to whoever is next there: the next owner, and behind the last one
    the first, for the next group. So one owner writes to a reader at a time, and no two share its link. Nobody waits in
    a circle: each waits for a push of the same reader or the same owner that stands before it in the order of groups
    and ring steps, or for a call that came before. Behind the join, when nobody reads far any more, the caller's stream
    gives the nearest owner the turn of the next call. So rows go to a reader that is late, and it holds up nobody whom
    others could serve meanwhile. Turns are counted by taking part: a nearest owner that has nothing for a reader which
    fetches takes its turn all the same and hands it to the first one, or it would take the next call's turn for this
    one's. A rank that fetches nothing leaves its far to the next call, so it keeps nothing there.
    A third stream, the herald, raises the flags of this rank in the order of groups and ring steps: it waits for the owner's
    `full`, and writes the flag. So flags rise in order, whatever order pushes end in.
    A bias of keys stands behind the rows of the slot, and comes in front of the first group of an owner's heads, into the
    table behind the rows of far.
    All of this is enqueued before the caller launches the kernel, and nothing of it needs an SM: the kernel may hold all of
    them while it waits. Packing, and zeroing the guard rows of far, do need SMs: they stand on the caller's stream in front
    of the kernel. `close` joins all three streams. So the slot is free when it has returned, as is what was lent; and `room`
    and `full` of a call have been taken by all before anybody says them again: an owner takes each `room` before it says the
    `full` of that push, and the reader says `room` again once it has taken every `full`, whereupon the others follow in turn.
    Why pushes: reads queue their requests behind rows that the GPU sends at the same time, writes are posted (kernels/hopper/
    NOTES.md has the numbers). Why one stream of them: several share the link, and the first rows come later. And why turns:
    halves of shards are of different lengths, owners drift apart, and two that meet at one reader go at less than half the
    speed each.

Note [Kept rows]
    What a gather keeps lands in far like all rows, where its kernel reads it. Behind the last flag the herald copies it into a
    tensor of the call's own, from torch's allocator: no flag waits for that, should such a copy need an SM. The only program
    that knows its address is the herald's: there is one per address, and addresses come back, since an allocator does the same
    in every step of a training. The caller's stream joins the herald before the gather is closed, and the herald passes the
    gate once more: what it has copied was not overwritten (Note [A push that was let go] of watch.py), and whoever is given
    the memory later finds nobody writing. A backward that has kept its rows finds flags that are always raised; a failure of
    the ring makes them negative before it lets anybody go, so that no kernel that starts later stores a number at a peer.

Note [A post]
    What goes out waits in an outbox of this rank until its reader has pulled it. There are four, however many ranks there
    are: one for plain parcels and one for replies, by turns. A post of all ranks takes one turn, also on ranks that move
    nothing in it: so a reader knows where a sender's message lies. Whoever was last sent what the box held, the sender
    waits for the words of all peers, which leave the box to it, and takes back the word of the next reader alone. A rank
    in post n waits for what its peers' side streams pull in earlier posts, and these wait for nothing later than n - 1.

Note [Seen before]
    Whatever follows from shapes and plans alone is made at first sight: programs, views, tables of addresses. A later call
    finds it by one look into a table and enqueues it: a gather costs the host five driver calls and a launch, a post one
    driver call per copy and one or two more. Growing buffers forget the table, so what is found there fits.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from ringattn.kernels.contract import Arrivals
from ringattn.kernels.pack import Cleared, pack
from ringattn.schedule import Collection, Fetch, Reader, Rows
from ringattn.transport.base import Done, Gathering, Homecoming, Parcel, Pending, Reply, Transport
from ringattn.transport.one_shot import OneShotExchange
from ringattn.transport.process_group import Agreement
from ringattn.transport.stations import MOST_GROUPS, PAYLOAD_ALIGNMENT, Far, Station, padded, say, take, view_bytes
from ringattn.transport.streams import MAX_PITCH, Copy, Op, Program, Streams, Wait, Write, Write64
from ringattn.transport.symmetric import Memory, aligned
from ringattn.transport.watch import (
    CROSSING,
    DEVICE_WORDS,
    DONE,
    ELSEWHERE,
    ENTERING,
    ERROR,
    FETCHING,
    GATE,
    HERALD,
    HERALD_AT,
    HERALD_DONE,
    HERALD_START,
    HOST_WORDS,
    JOINING,
    KERNEL,
    PLACE,
    PLACES,
    POSTED,
    POSTS,
    PROCEED,
    QUIET,
    RECEIVING,
    SIDE,
    SIDE_AT,
    START,
    STARTING,
    Course,
    Watch,
)

T = TypeVar("T")
S = TypeVar("S", bound="Station")

COURSES = 256
"""Constant programs that a ring keeps."""
AIMED = 256
"""Addresses of kept rows for which one gather has its copies ready."""
RECEIVED = 256
"""Tensors that posts received into which the way out of a failure remembers."""
PAYLOADS = 16
"""Tensors of one kind that one post may send beyond what it reserved, as padding: 16 bytes each."""
PLAIN, REPLIES = KINDS = range(2)
"""Kinds of parcels; each has outboxes of its own."""
BOX_NAMES = ("outboxes", "outboxes of replies")


@dataclass(frozen=True)
class _Bias:
    """Where a bias of keys is put and pushed.

    Attributes:
        slot: `b slot_rows`, behind the slot of this rank.
        table: `b t+far_rows`, for kernels.
        near: Rows of this rank, t.
    """

    slot: Tensor
    table: Tensor
    near: int

    def places(self, *, published: bool) -> tuple[Tensor | None, Tensor, Tensor]:
        """See `_Gather.bias`."""
        return self.slot[:, : self.near] if published else None, self.table[:, : self.near], self.table

    def pushes(self, table: int, reader: Reader) -> list[Op]:
        """The copies to one reader, whose table is at an address."""
        b, size = self.slot.shape[0], self.slot.element_size()
        pitches = size * (reader.near_rows + reader.far_rows), size * self.slot.stride(0)
        at, found = reader.near_rows + reader.at, []
        for offset, length in reader.rows:
            found.append(Copy(table + at * size, self.slot.data_ptr() + offset * size, length * size, b, *pitches))
            at += length
        return found


@dataclass(eq=False)
class _Lent:
    """A slot that the caller fills itself, or that rows of another node come into."""

    slot: Tensor
    k: Tensor
    v: Tensor


@dataclass(eq=False)
class _Gather:
    """The constant part of a gather: one collection, slot, shape and far buffer."""

    course: Course
    pushing: Course
    start: Program
    cleared: tuple[Cleared, Cleared] | None
    """What is cleared where packing does it, without rows of far and with them; None: the start does it, or nothing is fetched."""
    announce: Program | None
    push: Program | None
    """None where nobody reads, and nobody is skipped."""
    herald: Program | None
    """None where nothing is fetched, and where rows are kept: then it depends on the address."""
    joining: Program
    join: Program
    packed: Tensor | None
    """Where this rank's rows are packed; None where nobody reads them or the caller has put them there."""
    bias: tuple[Tensor | None, Tensor, Tensor] | None
    """Where this rank's bias of keys goes, in the slot (None: nobody reads it) and in the table, and the table."""
    far: tuple[Tensor, Tensor, Tensor]
    """All of it, with the keys and the values in it."""
    guards: list[tuple[int, int]]
    layout: object
    arrivals: Arrivals | None
    keep: Any
    aim: Callable[[int], list[Op]] | None
    """What the herald does for rows that are kept at an address."""
    aimed: OrderedDict[int, Program]


@dataclass(eq=False)
class _Home:
    """The constant part of a homecoming."""

    course: Course
    start: Program
    receive: Program
    close: Program
    addresses: Tensor
    own: Tensor
    regions: list[Tensor]
    bias: tuple[Tensor, Tensor, list[Tensor]] | None
    """Addresses, own and regions of the bias of keys; None: it has no gradient."""
    keep: Any


@dataclass(eq=False)
class _Post:
    """What is constant about a post between the same peers: words; the copies between them are of the call."""

    course: Course
    begin: Program
    end: Program
    boxes: list[int]
    """Where what goes out is put, by (peer, kind)."""
    sides: list[Program]
    """One in front of the copies from each peer, and one behind the last."""
    sources: list[int]
    fetching: Program
    join: Program


class CopyEngineTransport:
    """One rank's end: its slots, its programs, and the watch over them.

    Args:
        rank: This rank within the ring.
        members: The ranks of the ring that reach each other's memory, in the order of the regions' addresses: all, or those
            of a node.
        name: The ring's name.
        streams: The way to the device.
        memory: Where regions come from.
        timeout: Seconds that the ring may stand still.
        watched: Look after the ring in a thread.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        name: str,
        streams: Streams,
        memory: Memory,
        timeout: float,
        *,
        watched: bool = True,
    ) -> None:
        self._rank = rank
        self._members = tuple(members)
        self._peers = tuple(peer for peer in members if peer != rank)
        self._name = name
        self._streams = streams
        self._memory = memory
        self._timeout = timeout
        # the watch comes first: it says what is missing. Twice as long: also without it a kernel ends
        self._patience = int(2 * timeout * 1e9)
        self._host = memory.host_words(HOST_WORDS)
        self._control = memory.region(aligned(4 * DEVICE_WORDS), "words")
        control = self._control.local[: 4 * DEVICE_WORDS].view(torch.int32)
        control[[GATE, PROCEED]] = 1
        self._error = control[ERROR : ERROR + 1]
        memory.meet("words begin")
        place = self._members.index(rank)
        self._nearest = self._members[place - 1]
        words = tuple(self._control.addresses[place] + 4 * i for i in range(DEVICE_WORDS))
        self._words = words
        self.watch = Watch(rank, name, self._host, words, streams, timeout)
        others = [address for other, address in enumerate(self._control.addresses) if other != place]
        self.watch.territory.gates.update(address + 4 * GATE for address in others)
        self.watch.territory.errors.update(address + 4 * ERROR for address in others)
        self._fars: list[Far] = []
        self._homes: list[Station] = []
        self._boxes: tuple[list[Station], ...] = tuple([] for _ in KINDS)
        self._lent: dict[tuple[str, tuple[Any, ...]], _Lent] = {}
        self._lent_at: dict[int, _Lent] = {}  # by the address of their memory
        self._home_turn = self._post_turn = 0
        self._reserved = [0 for _ in KINDS]
        self._posted = 0
        self._slot = self._flags = self._own = self._nothing = torch.empty(0, dtype=torch.uint8, device=memory.device)
        self._guests = [self._nothing, self._nothing]
        self._far_layout: object = None
        self._stretches: OrderedDict[tuple[tuple[int, int], ...], Tensor] = OrderedDict()
        self._raised: dict[int, Tensor] = {}  # by head groups: flags of rows that are there
        self._courses: OrderedDict[Any, Any] = OrderedDict()
        self._captured = False
        self._lane: int | None = None
        self._gathering: _Arriving | None = None
        self._homecoming: _Coming | None = None
        self._posts: list[_Fetching | None] = [None] * POSTS
        if watched:
            self.watch.start()

    def __del__(self) -> None:
        watch = getattr(self, "watch", None)
        if watch is not None:
            watch.retire()

    def gatherer(self) -> CopyEngineTransport:
        """See `Transport.gatherer`."""
        return self

    def num_bytes(self) -> int:
        """Bytes of device memory held now."""
        lent = (lent.slot for lent in self._lent.values())
        local = (self._slot, self._flags, self._own, *self._guests, *lent, *self._raised.values())
        stations = sum(station.region.local.numel() for station in self._places())
        return stations + sum(x.untyped_storage().nbytes() for x in local)

    def _places(self) -> list[Station]:
        """Wherever rows wait for peers or come from them."""
        return [*self._fars, *self._homes, *chain(*self._boxes)]

    def make_room(self, slot_bytes: int, far_bytes: int, *, guests: bool = False) -> None:
        """See `Gatherer.make_room`."""
        far_there = self._fars[0].num_bytes if self._fars else 0
        guests_there = min(x.numel() for x in self._guests) if guests else slot_bytes
        if slot_bytes > min(self._slot.numel(), guests_there) or far_bytes > far_there:
            self._enter()
            self._make_slot(slot_bytes)
            for turn in range(2 * guests):
                self._make_guest(turn, slot_bytes)
            self._make_far(far_bytes)

    def gather(
        self,
        k: Tensor,
        v: Tensor,
        collection: Collection,
        groups: int,
        what: str,
        *,
        key_bias: Tensor | None = None,
        keep: bool = False,
    ) -> Gathering:
        """See `Gatherer.gather`."""
        assert key_bias is None or not keep, "what is kept has no room for a bias"
        lane, capturing = self._enter()
        # what was lent has no room for a bias either: such keys are packed like others
        lent = self._find_lent(k, v) if self._lent_at and key_bias is None else None
        of_bias = None if key_bias is None else key_bias.dtype
        key = (id(collection), k.shape, k.dtype, v.shape[-1], groups, id(lent), capturing, keep, of_bias)
        found: _Gather | None = self._find(key)
        if found is None:
            found = self._keep(key, self._prepare_gather(k, v, collection, groups, lent, what, of_bias, keep=keep))
        found.course.what = found.pushing.what = what

        launch, streams = self._streams.launch, self._streams
        far, herald, kept = found.far[0], found.herald, None
        places = []
        if self._captured or (found.layout is not self._far_layout and found.layout != self._far_layout):
            places.append(far)
        if keep:
            kept = self._make_kept(tuple(far.shape), k.dtype)
            herald = self._aimed(found, kept.data_ptr())
            places.append(kept)
        launch(found.start, lane)
        cleared = None
        if found.cleared is not None:
            cleared = found.cleared[far is next(iter(places), None)]
            places = [place for place in places if place is not far]
        for place in places:
            for start, end in found.guards:
                streams.call(place[:, start:end].zero_)
        self._far_layout = found.layout
        if found.packed is not None:
            slot = found.packed
            streams.call(lambda: pack(slot, k, v, cleared))
        if found.bias is not None and key_bias is not None:
            for target in found.bias[:2]:
                if target is not None:
                    streams.call(functools.partial(target.copy_, key_bias))
        if found.announce is not None:
            launch(found.announce, lane)
        if found.push is not None:
            if capturing:
                streams.order(lane, streams.side)
            launch(found.push, streams.side)
        # behind the push: where they share a queue, nobody's rows wait for those of others
        if herald is not None:
            if capturing:
                streams.order(lane, streams.herald)
            launch(herald, streams.herald)
        self._gathering = gathering = _Arriving(self, found, kept, heralded=herald is not None)
        return gathering

    def guest(
        self,
        turn: int,
        shape: tuple[int, int, int],
        rows: int,
        dims: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """See `Gatherer.guest`."""
        del device  # that of this transport
        self._enter()
        key = ("guest", turn, shape, rows, dims, dtype)
        found: _Lent | None = self._find(key)
        if found is None:
            whole, (d, _) = (*shape, sum(dims)), dims
            slot = view_bytes(self._make_guest(turn, math.prod(whole) * dtype.itemsize), whole, dtype)
            found = self._keep(key, _Lent(slot, slot[:, :rows, :, :d], slot[:, :rows, :, d:]))
        self._lent_at[found.slot.untyped_storage().data_ptr()] = found
        return found.slot[:, :rows]

    def arrived(self, collection: Collection, groups: int, device: torch.device) -> Arrivals | None:
        """See `Gatherer.arrived`."""
        del device  # that of this transport
        if not collection.fetches:
            return None
        flags = self._raised.get(groups)
        if flags is None:
            self._refuse_in_capture("keep_keys")
            self.watch.check()
            flags = torch.ones(groups, len(self._members), dtype=torch.int32, device=self._memory.device)
            self.watch.territory.raised.add((flags.data_ptr(), flags.numel()))
            self._raised[groups] = flags
        return Arrivals(flags, self._error, self._patience)

    def homecoming(
        self,
        shape: tuple[int, int, int],
        collection: Collection,
        device: torch.device,
        what: str,
        *,
        biased: bool = False,
    ) -> Homecoming:
        """See `Gatherer.homecoming`."""
        del device  # that of this transport
        if self._homecoming is not None:
            self._homecoming.receive()
            self._homecoming.close()
        lane, _ = self._enter(closing=False)
        key = (id(collection), shape, biased)
        plans: tuple[_Home, _Home] | None = self._find(key)
        if plans is None:
            plans = self._keep(key, self._prepare_home(collection, shape, what, biased=biased))
        chosen = plans[self._home_turn]
        self._home_turn = 1 - self._home_turn
        chosen.course.what = what
        self._streams.launch(chosen.start, lane)
        self._homecoming = coming = _Coming(self, chosen)
        return coming

    def one_shot(self, agreement: Agreement, why: str) -> OneShotExchange:
        """An exchange through memory that is mapped as this transport's is. Every member calls it.

        Args:
            agreement: How ranks compare.
            why: Why this exchange was chosen.
        """
        return OneShotExchange(
            self._members.index(self._rank),
            len(self._members),
            self._name,
            self._streams,
            self._memory,
            agreement,
            self.watch,
            self._timeout,
            why,
        )

    def reserve(self, num_bytes: int, replies: int = 0) -> None:
        """See `Transport.reserve`."""
        for kind, size in zip(KINDS, (num_bytes, replies), strict=True):
            if size > self._reserved[kind]:
                self._enter()
                capacity = aligned(size + PAYLOADS * PAYLOAD_ALIGNMENT)
                self._stations(self._boxes[kind], capacity, BOX_NAMES[kind])
                self._reserved[kind] = size

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel], what: str) -> Pending:
        """See `Transport.post`, and Note [A post]."""
        out, into = self._payloads(sends, what), self._payloads(receives, what)
        if len({kind for _, kind in out}) < len(out):
            raise RuntimeError(
                f"ring rank {self._rank}: {what}: a post must send parcels of one kind to one peer at most, got ring ranks "
                f"{[peer for peer, _ in out]}; make more posts"
            )
        turn = self._post_turn
        self._post_turn = 1 - turn
        if not out and not into:
            return Done()
        lane, capturing = self._enter()
        index = next((i for i, pending in enumerate(self._posts) if pending is None), None)
        if index is None:  # the oldest is joined a little early
            oldest = min((pending for pending in self._posts if pending is not None), key=lambda pending: pending.order)
            oldest.wait()
            index = oldest.index
        key = (tuple(out), tuple(into), turn, index, capturing)
        found: _Post | None = self._find(key)
        if found is None:
            found = self._keep(key, self._plan_post(tuple(out), tuple(into), turn, index, what))
        found.course.what = what
        streams = self._streams
        streams.launch(found.begin, lane)
        for box, parcels in zip(found.boxes, out.values(), strict=True):
            for _, address, num_bytes in parcels:
                streams.copy(box, address, num_bytes, lane)
                box += padded(num_bytes)
        streams.launch(found.end, lane)
        if not into:
            return Done()
        if capturing:
            streams.order(lane, streams.side)
        side, received = streams.side, self.watch.territory.received
        for program, box, parcels in zip(found.sides, found.sources, into.values(), strict=False):
            streams.launch(program, side)
            for x, address, num_bytes in parcels:
                if (address, num_bytes) not in received:
                    self._remember_received(x, address, num_bytes)
                streams.copy(address, box, num_bytes, side)
                box += padded(num_bytes)
        streams.launch(found.sides[-1], side)
        self._posted += 1
        pending = _Fetching(self, index, found, self._posted)
        self._posts[index] = pending
        return pending

    def watched(self, link: Transport) -> Transport:
        """A link between nodes whose waits the watch over this node sees and names.

        Args:
            link: What crosses.
        """
        return _Watched(self, link)

    def lend(
        self, name: str, batch: int, rows: int, mine: int, heads: int, dims: tuple[int, int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """A slot that the caller fills itself, so that a gather of exactly these tensors packs nothing.

        Joins a gather that the caller has left open, so that nobody reads what was there before.

        Args:
            name: Which slot.
            batch: Batch elements.
            rows: Rows of the longest shard.
            mine: Rows of this rank's shard.
            heads: Key heads.
            dims: Head dims of k and of v.
            dtype: Of both.

        Returns:
            K `b t hk d` and v `b t hk dv`, views of one buffer.
        """
        self._enter()
        d, dv = dims
        shape = (batch, rows, heads, d + dv)
        key = (name, (shape, d, dtype))
        lent = self._lent.get(key)
        if lent is None:
            self._refuse_in_capture(f"kv_buffer {name!r}")
            for old in [other for other in self._lent if other[0] == name]:
                self._streams.synchronize()
                self._drop_lent(old)
            slot = torch.empty(shape, dtype=dtype, device=self._memory.device)
            lent = self._lent[key] = _Lent(slot, slot[:, :mine, :, :d], slot[:, :mine, :, d:])
            self._lent_at[slot.untyped_storage().data_ptr()] = lent
        if lent.k.shape[1] != mine:
            # another sharding of as many rows on the longest shard
            lent.k, lent.v = lent.slot[:, :mine, :, :d], lent.slot[:, :mine, :, d:]
        return lent.k, lent.v

    def poison(self) -> None:
        """Sets all bits wherever rows are kept between two calls; every rank calls it. What was lent is left alone."""
        if self._streams.capturing():
            raise RuntimeError("poison must be called outside of a capture, got one; poison between replays")
        self._enter()
        self._finish()
        # twice: nothing is left here, and then nothing is left anywhere that may read what is overwritten
        self._memory.meet("poison comes")
        self._memory.meet("poison begins")
        for station in self._places():
            self._streams.call(station.poison)
        for local in (self._slot, self._own, *self._guests):
            self._streams.call(lambda local=local: local.fill_(255))
        self._far_layout = None
        self._memory.meet("poison ends")

    def close(self) -> None:
        """Lets go of all memory; every rank of the ring calls it. A later call makes what it needs anew."""
        self._finish()
        if self.watch.failure is None:
            self._memory.meet("close")
        else:
            self._streams.synchronize()
        self._courses.clear()
        self._fars, self._homes, self._boxes = [], [], tuple([] for _ in KINDS)
        self._lent, self._lent_at = {}, {}
        self._reserved = [0 for _ in KINDS]
        self._home_turn = self._post_turn = 0
        self._slot = self._flags = self._own = self._nothing
        self._guests = [self._nothing, self._nothing]
        self._far_layout = None
        self._raised = {}
        here = self.watch.territory
        words = here.free, here.full, here.room, here.home
        for known in (*words, here.flags, here.raised, here.own, here.received, here.kept):
            known.clear()

    def _finish(self) -> None:
        """Joins whatever the caller has left open."""
        if self._gathering is not None:
            self._gathering.close()
        if self._homecoming is not None:
            self._homecoming.receive()
            self._homecoming.close()
        for pending in self._posts:
            if pending is not None:
                pending.wait()

    def _enter(self, *, closing: bool = True) -> tuple[int, bool]:
        """The beginning of every call: refuses on a failed ring and orders the call behind the one before.

        Returns:
            The caller's stream, and whether it is being captured.
        """
        if self._gathering is not None and (closing or self.watch.failure is not None):
            self._gathering.close()
        if self.watch.failure is not None:
            self.watch.check()
        lane, capturing = self._streams.main(), self._streams.capturing()
        if capturing:
            self._captured = True
        elif lane != self._lane:
            if self._lane is not None:
                self._streams.order(self._lane, lane)
            self._lane = lane
        return lane, capturing

    def _find(self, key: Any) -> Any:
        found = self._courses.get(key)
        if found is not None:
            self._courses.move_to_end(key)
        return found

    def _keep(self, key: Any, made: T) -> T:
        self._courses[key] = made
        if len(self._courses) > COURSES:
            _, old = self._courses.popitem(last=False)
            self._retire(old)
        return made

    def _drop_courses(self) -> None:
        self._retire(list(self._courses.values()))
        self._courses.clear()

    def _retire(self, old: Any) -> None:
        """Lets go, unless a captured graph may use it (Note [Old memory] of symmetric.py)."""
        if self._captured:
            self.watch.territory.kept.append(old)

    def _refuse_in_capture(self, what: str) -> None:
        if self._streams.capturing():
            raise RuntimeError(
                f"{what} must have its buffers before a capture begins, got a larger or new shape in a capture; "
                "make the same call once before capturing it"
            )

    def _stations(
        self, kind: list[S], num_bytes: int, what: str, make: Callable[..., S] = Station, turns: int = 2
    ) -> list[S]:
        """The stations of a kind, at least so large. `num_bytes` is the same on all ranks, and so is growing."""
        if not kind or kind[0].num_bytes < num_bytes:
            self._refuse_in_capture(what)
            if kind:
                # whoever still reads the old ones is let finish, on all ranks
                self._memory.meet(f"{what} grow")
                for station in kind:
                    self._forget(station)
            self._drop_courses()
            kind[:] = [make(self._memory, self._members, num_bytes, f"{what} {turn}") for turn in range(turns)]
            for station in kind:
                self._know(station)
        return kind

    def _know(self, station: Station) -> None:
        here, me, peers = self.watch.territory, self._rank, self._peers
        (here.room if isinstance(station, Far) else here.free).update(station.free(me, peer) for peer in peers)
        full = here.home if station in self._homes else here.full
        full.update(station.full(me, peer, g) for peer in peers for g in range(station.groups))

    def _forget(self, station: Station) -> None:
        if self._captured:
            self._retire(station)
            return
        here = self.watch.territory
        for peer in self._peers:
            for words in (here.free, here.room):
                words.discard(station.free(self._rank, peer))
            for words in (here.full, here.home):
                words.difference_update(station.full(self._rank, peer, g) for g in range(station.groups))

    def _local(self, old: Tensor, num_bytes: int, known: set[tuple[int, int]] | None, unit: int) -> Tensor:
        """A plain buffer of at least so many bytes; the old one where it is large enough."""
        if old.numel() >= num_bytes:
            return old
        self._refuse_in_capture("a buffer")
        if old.numel():
            self._streams.synchronize()
            self._drop_courses()
            if self._captured:
                self._retire(old)
            elif known is not None:
                known.discard((old.data_ptr(), old.numel() // unit))
        new = torch.empty(aligned(num_bytes), dtype=torch.uint8, device=self._memory.device)
        if known is not None:
            known.add((new.data_ptr(), new.numel() // unit))
        return new

    def _make_far(self, num_bytes: int) -> Far:
        before = self._fars[:]
        (far,) = self._stations(self._fars, num_bytes, "far", functools.partial(Far, self._rank), turns=1)
        if far not in before:
            self._far_layout = None
        return far

    def _make_slot(self, num_bytes: int) -> Tensor:
        self._slot = self._local(self._slot, num_bytes, None, 1)
        return self._slot

    def _make_guest(self, turn: int, num_bytes: int) -> Tensor:
        before = self._guests[turn]
        flat = self._guests[turn] = self._local(before, num_bytes, None, 1)
        if flat is not before:
            self._lent_at.pop(before.untyped_storage().data_ptr(), None)
        return flat

    def _make_kept(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._memory.device)

    def _make_flags(self, count: int) -> Tensor:
        self._flags = self._local(self._flags, 4 * count, self.watch.territory.flags, 4)
        return self._flags.view(torch.int32)[:count]

    def _make_own(self, num_bytes: int) -> Tensor:
        self._own = self._local(self._own, num_bytes, self.watch.territory.own, 1)
        return self._own

    def _at(self, number: int, place: int) -> Write:
        return self._note(PLACE, number * PLACES + place)

    def _both(self, word: int, value: int) -> Write64:
        """A note, and 0 in the word behind it."""
        return Write64(self._host.data_ptr() + 4 * word, value, 0)

    def _note(self, word: int, value: int) -> Write:
        """What the watch reads."""
        return Write(self._host.data_ptr() + 4 * word, value)

    def _leave(self) -> list[Op]:
        return [self._both(PLACE, ELSEWHERE)]

    # Inside a capture events order the streams, and words must not: the side stream of a graph is not the ring's own,
    # whose next work may be enqueued while the graph still runs, and each would take the other's signals.

    def _lane_begins(self, start: int, lane: int, number: int) -> list[Op]:
        started = [] if self._streams.capturing() else take(self._words[start])
        return [*started, self._both(lane, number)]

    def _lane_ends(self, lane: int, done: int) -> list[Op]:
        return [
            Wait(self._words[GATE], 1),
            self._note(QUIET, 0),
            self._note(lane, 0),
            *([] if self._streams.capturing() else [Write(self._words[done], 1)]),
        ]

    def _side_is_free(self) -> list[Op]:
        return [] if self._streams.capturing() else [Wait(self._words[START], 0)]

    def _start(self, start: int) -> list[Op]:
        return [] if self._streams.capturing() else [Write(self._words[start], 1)]

    def _take_done(self, done: int) -> list[Op]:
        return [] if self._streams.capturing() else take(self._words[done])

    def _prepare_gather(
        self,
        k: Tensor,
        v: Tensor,
        collection: Collection,
        groups: int,
        lent: _Lent | None,
        what: str,
        of_bias: torch.dtype | None,
        *,
        keep: bool,
    ) -> _Gather:
        b, t, hk, d = k.shape
        width = d + v.shape[-1]
        if hk % groups or groups > MOST_GROUPS:
            raise ValueError(f"groups must divide the {hk} key heads, and be at most {MOST_GROUPS}, got {groups}")
        row, slot_rows = hk * width * k.element_size(), collection.slot_rows
        # a bias stands behind the rows; what peers write is as large on all ranks, so that growing is collective
        size = 0 if of_bias is None else of_bias.itemsize
        slot_bytes = b * slot_rows * row
        most = collection.most_far_rows
        most_bytes = b * most * row
        if size:
            most_bytes = padded(most_bytes) + b * (slot_rows + most) * size
        station = self._make_far(most_bytes)
        shape = (b, collection.far_rows, hk, width)
        far, bias, of_slot = station.view(shape, k.dtype), None, None
        if lent is not None:
            slot = lent.slot
        else:
            behind = padded(slot_bytes) if size else slot_bytes
            flat = self._make_slot(behind + b * slot_rows * size)
            slot = view_bytes(flat, (b, slot_rows, hk, width), k.dtype)
            of_slot = None if of_bias is None else view_bytes(flat[behind:], (b, slot_rows), of_bias)
        if of_slot is not None and of_bias is not None:
            of_all = (b, t + collection.far_rows)
            if collection.fetches:
                table = station.view(of_all, of_bias, padded(far.numel() * far.element_size()))
            else:  # far may be written to meanwhile: it is not this call's turn to read it
                table = torch.empty(of_all, dtype=of_bias, device=self._memory.device)
            bias = _Bias(slot=of_slot, table=table, near=t)
        flags = self._make_flags(groups * len(self._members)).view(groups, len(self._members))
        packed = slot[:, :t] if lent is None and collection.readers else None
        layout = (tuple((fetch.at, fetch.rows) for fetch in collection.fetches), shape, k.dtype)
        return self._plan_gather(
            collection, station, slot, (far, d), flags, packed, bias, layout, (collection, lent), what, keep=keep
        )

    def _plan_gather(
        self,
        collection: Collection,
        station: Far,
        slot: Tensor,
        where: tuple[Tensor, int],
        flags: Tensor,
        packed: Tensor | None,
        bias: _Bias | None,
        layout: object,
        alive: Any,
        what: str,
        *,
        keep: bool,
    ) -> _Gather:
        """Note [A gather]."""
        me, words, compile_ = self._rank, self._words, self._streams.compile
        fetches, readers, skipped = collection.fetches, collection.readers, collection.skipped
        sides = bool(readers) or skipped is not None
        far, dim = where
        groups = flags.shape[0]
        b, far_rows, hk, width = far.shape
        row = hk * width * slot.element_size()
        first = collection.first
        owners = [fetch.owner for fetch in fetches]
        peers = tuple(dict.fromkeys((*owners, *(reader.peer for reader in readers))))
        stops = tuple((first + fetch.step, fetch.owner) for fetch in fetches)
        course = Course(what, peers, first + 1, stops)
        number = self.watch.number(course)
        stops = tuple((first + reader.step, reader.peer) for reader in readers)
        stops = stops if skipped is None else ((first + 1, skipped[0]), *stops)
        pushing = Course(what, peers, first + 1, stops, "waiting for its turn at")
        push_number = self.watch.number(pushing)

        def flag(g: int, step: int) -> int:
            return flags.data_ptr() + 4 * (g * flags.shape[1] + step)

        # what packs lowers the flags and the error word: each takes longer in stream order
        lowered: list[Op] = [Write(flag(g, fetch.step), 0) for g in range(groups) for fetch in fetches]
        lowered += [Write(words[ERROR], 0)] if fetches else []
        starts = [*(self._start(HERALD_START) if fetches else []), *(self._start(START) if sides else [])]
        start: list[Op] = [*(self._side_is_free() if sides else []), *(lowered if packed is None else [])]
        start += [Wait(words[PROCEED], 1), self._both(PLACE, number * PLACES + KERNEL)]
        start += starts if packed is None else []

        push = self._lane_begins(START, SIDE, push_number)
        if skipped is not None:
            peer, owner = skipped
            push += [*take(station.room(me, peer)), Write(station.room(owner, peer), 1), self._note(SIDE_AT, 1)]
        for g in range(groups):
            for i, reader in enumerate(readers):
                theirs = station.rows(reader.peer)
                turns = len(reader.owners)
                if g == 0 or turns > 1:
                    push += take(station.room(me, reader.peer))
                if g == 0 and bias is not None:
                    push += bias.pushes(theirs + padded(b * reader.far_rows * row), reader)
                places = slot.data_ptr(), theirs, (slot.shape[1], reader.far_rows)
                push += _copies(*places, b, row, reader.rows, reader.at, g, groups)
                push.append(Write(station.full(reader.peer, me, g), 1))
                last = reader.owners[-1] == me
                if turns > 1 and not (last and g == groups - 1):
                    follower = reader.owners[0 if last else reader.owners.index(me) + 1]
                    push.append(Write(station.room(follower, reader.peer), 1))
                if g == 0:
                    push.append(self._note(SIDE_AT, i + 1 + (skipped is not None)))
        push += self._lane_ends(SIDE, DONE)

        # between a peer's word and the flag stands nothing that can wait until the last flag
        begins, ends = self._lane_begins(HERALD_START, HERALD, number), self._lane_ends(HERALD, HERALD_DONE)
        passed = [self._note(HERALD_AT, i + 1) for i in range(len(fetches))]
        mine = station.rows(me)

        # what is kept with the programs of a transport must not hold the transport
        def aim(address: int | None) -> list[Op]:
            herald = [*begins]
            for g in range(groups):
                for i, fetch in enumerate(fetches):
                    herald.append(Wait(station.full(me, fetch.owner, g), 1))
                    herald += [Wait(words[GATE], 1), Write(flag(g, fetch.step), 1)]
                    if g == 0:
                        herald.append(passed[i])
            herald += [Write(station.full(me, fetch.owner, g), 0) for g in range(groups) for fetch in fetches]
            if address is not None:
                for fetch in fetches:
                    rows = ((fetch.at, _num_rows(fetch.rows)),)
                    herald += _copies(mine, address, (far_rows, far_rows), b, row, rows, fetch.at, 0, 1)
            return [*herald, *ends]

        joining = [self._at(number, JOINING)]
        join = [*(self._take_done(DONE) if sides else []), *(self._take_done(HERALD_DONE) if fetches else [])]
        turn = [station.room(self._nearest, me)] if fetches else []
        join += [Wait(words[PROCEED], 1), *say(turn), *self._leave()]
        if not fetches and not sides:
            start, joining, join = [], [], []
        return _Gather(
            course,
            pushing,
            start=compile_(start),
            cleared=None if packed is None or not fetches else self._make_cleared(flags, far, fetches),
            announce=compile_(starts) if packed is not None else None,
            push=compile_(push) if sides else None,
            herald=compile_(aim(None)) if fetches and not keep else None,
            joining=compile_(joining),
            join=compile_([*joining, *join]),
            packed=packed,
            bias=None if bias is None else bias.places(published=packed is not None),
            far=_parts(far, dim),
            guards=_guards(far_rows, fetches),
            layout=layout,
            arrivals=Arrivals(flags, self._error, self._patience) if fetches else None,
            keep=(alive, station, slot, flags),
            aim=aim if fetches and keep else None,
            aimed=OrderedDict(),
        )

    def _make_cleared(self, flags: Tensor, far: Tensor, fetches: Sequence[Fetch]) -> tuple[Cleared, Cleared]:
        """What is cleared without rows of far, and with them."""
        stretches = tuple(_guards(far.shape[1], fetches))
        there = self._stretches.get(stretches)
        if there is None:
            self._refuse_in_capture("guards")
            there = torch.tensor(stretches, dtype=torch.int32, pin_memory=flags.is_cuda).to(
                flags.device, non_blocking=True
            )
            self._stretches[stretches] = there
            if len(self._stretches) > COURSES:
                self._retire(self._stretches.popitem(last=False)[1])
        else:
            self._stretches.move_to_end(stretches)
        longest = max(end - start for start, end in stretches)
        words = Cleared(flags, self._error, far, there, longest, stretches=False)
        return words, dataclasses.replace(words, stretches=True)

    def _aimed(self, plan: _Gather, address: int) -> Program | None:
        """What the herald does for a gather whose rows are kept, to where they are kept."""
        if plan.aim is None:
            return None
        aimed = plan.aimed
        found = aimed.get(address)
        if found is None:
            found = aimed[address] = self._streams.compile(plan.aim(address))
            if len(aimed) > AIMED:
                _, old = aimed.popitem(last=False)
                self._retire(old)
        else:
            aimed.move_to_end(address)
        return found

    def _prepare_home(
        self, collection: Collection, shape: tuple[int, int, int], what: str, *, biased: bool
    ) -> tuple[_Home, _Home]:
        b, hk, width = shape
        size = b * collection.slot_rows * hk * (width + biased) * 4
        homes = self._stations(self._homes, len(self._peers) * aligned(size), "homes")
        own = self._make_own(size)
        # both at once: a capture may begin at either
        first, second = (self._plan_home(collection, station, own, shape, what, biased=biased) for station in homes)
        return first, second

    def _plan_home(
        self,
        collection: Collection,
        station: Station,
        own: Tensor,
        shape: tuple[int, int, int],
        what: str,
        *,
        biased: bool,
    ) -> _Home:
        self._refuse_in_capture("homecoming")
        me, compile_ = self._rank, self._streams.compile
        b, hk, width = shape
        whole, of_bias = (b, collection.slot_rows, hk, width), (b, hk, collection.slot_rows)
        behind = 4 * math.prod(whole)  # a bias of keys stands behind the sums
        # of the station, not of the call: the region of a pair never overlaps what another shape gave to another pair
        stride = station.num_bytes // len(self._peers)
        owners = [fetch.owner for fetch in collection.fetches]
        readers = [send.peer for send in collection.readers]
        course = Course(what, tuple(dict.fromkeys((*owners, *readers))), collection.first + 1)
        number = self.watch.number(course)
        start: list[Op] = [self._at(number, ENTERING)]
        for owner in owners:
            start += take(station.free(me, owner))
        start += [Wait(self._words[PROCEED], 1), self._both(PLACE, number * PLACES + KERNEL)]
        start = start if owners or readers else []
        receive = [*say([station.full(owner, me) for owner in owners]), self._at(number, RECEIVING)]
        for reader in readers:
            receive += take(station.full(me, reader))
        receive += [Wait(self._words[PROCEED], 1), *self._leave()]
        receive = receive if owners or readers else []
        close = say([station.free(reader, me) for reader in readers])
        addresses = [own.data_ptr()]
        addresses += [station.rows(fetch.owner) + (fetch.step - 1) * stride for fetch in collection.fetches]
        table = torch.tensor([addresses, [x + behind for x in addresses]], dtype=torch.int64).to(self._memory.device)
        places = [(send.step - 1) * stride for send in collection.readers]
        bias = None
        if biased:
            parts = [station.view(of_bias, torch.float32, place + behind) for place in places]
            bias = table[1], view_bytes(own[behind:], of_bias, torch.float32), parts
        return _Home(
            course,
            start=compile_(start),
            receive=compile_(receive),
            close=compile_(close),
            addresses=table[0],
            own=view_bytes(own, whole, torch.float32),
            regions=[station.view(whole, torch.float32, place) for place in places],
            bias=bias,
            keep=(collection, station, own),
        )

    def _plan_post(
        self, out: Sequence[tuple[int, int]], into: Sequence[tuple[int, int]], turn: int, index: int, what: str
    ) -> _Post:
        """Note [A post]; `out` and `into` are (peer, kind) each."""
        me, words, compile_ = self._rank, self._words, self._streams.compile
        waits = self._peers if out else ()
        course = Course(what, waits, stops=tuple((None, peer) for peer, _ in into))
        number = self.watch.number(course)
        begin: list[Op] = [self._at(number, STARTING)]
        for peer, kind in out:
            for other in self._peers:
                if other == peer:
                    begin += take(self._boxes[kind][turn].free(me, peer))
                else:
                    begin.append(Wait(self._boxes[kind][turn].free(me, other), 1))
        begin += self._side_is_free() if into else []
        begin += [Wait(words[PROCEED], 1)]
        end: list[Op] = [Write(self._boxes[kind][turn].full(peer, me), 1) for peer, kind in out]
        end += [*self._leave(), *(self._start(START) if into else [])]
        if not out:
            begin, end = [*begin, *end], []
        sides: list[Program] = []
        side = self._lane_begins(START, SIDE, number)
        for i, (peer, kind) in enumerate(into):
            sides.append(compile_([*side, *take(self._boxes[kind][turn].full(me, peer))]))
            side = [Wait(words[GATE], 1), Write(self._boxes[kind][turn].free(peer, me), 1)]
            side += [self._note(SIDE_AT, i + 1)]
        if into:
            sides.append(compile_([*side, *self._lane_ends(SIDE, POSTED + index)]))
        fetching = [self._at(number, FETCHING)]
        join = [*fetching, *self._take_done(POSTED + index), Wait(words[PROCEED], 1), *self._leave()]
        return _Post(
            course,
            begin=compile_(begin),
            end=compile_(end),
            boxes=[self._boxes[kind][turn].rows(me) for _, kind in out],
            sides=sides,
            sources=[self._boxes[kind][turn].rows(peer) for peer, kind in into],
            fetching=compile_(fetching),
            join=compile_(join),
        )

    def _payloads(self, parcels: Sequence[Parcel], what: str) -> dict[tuple[int, int], list[tuple[Tensor, int, int]]]:
        """(tensor, address, bytes) of what is not empty, by (peer, kind)."""
        found: dict[tuple[int, int], list[tuple[Tensor, int, int]]] = {}
        for parcel in parcels:
            peer, x = parcel
            num_bytes = x.numel() * x.element_size()
            if not num_bytes:
                continue
            if not x.is_contiguous():
                raise RuntimeError(f"ring rank {self._rank}: {what}: what is posted must be contiguous, got strides")
            kind = REPLIES if isinstance(parcel, Reply) else PLAIN
            found.setdefault((peer, kind), []).append((x, x.data_ptr(), num_bytes))
        for (peer, kind), tensors in found.items():
            total, reserved = sum([num_bytes for _, _, num_bytes in tensors]), self._reserved[kind]
            capacity = self._boxes[kind][0].num_bytes if reserved else 0
            if total > reserved or sum([padded(num_bytes) for _, _, num_bytes in tensors]) > capacity:
                raise RuntimeError(
                    f"ring rank {self._rank}: {what}: a post must move at most the {reserved} bytes per peer that were "
                    f"reserved, got {total} in {len(tensors)} tensors with ring rank {peer}; reserve more before the loop"
                )
        return found

    def _remember_received(self, x: Tensor, address: int, num_bytes: int) -> None:
        received = self.watch.territory.received
        received[address, num_bytes] = x
        if len(received) > RECEIVED and not self._captured:
            received.pop(next(iter(received)), None)

    def _find_lent(self, k: Tensor, v: Tensor) -> _Lent | None:
        lent = self._lent_at.get(k.untyped_storage().data_ptr())
        return lent if lent is not None and _same(k, lent.k) and _same(v, lent.v) else None

    def _drop_lent(self, key: tuple[str, tuple[Any, ...]]) -> None:
        lent = self._lent.pop(key)
        del self._lent_at[lent.slot.untyped_storage().data_ptr()]
        self._retire(lent)


class _Arriving:
    """See `Gathering`."""

    __slots__ = ("_heralded", "_plan", "_transport", "arrivals", "far", "k", "kept", "key_bias", "v")

    def __init__(self, transport: CopyEngineTransport, plan: _Gather, kept: Tensor | None, *, heralded: bool) -> None:
        self._transport = transport
        self._plan: _Gather | None = plan
        self._heralded = heralded
        self.far, self.k, self.v = plan.far
        self.kept = kept
        self.key_bias = None if plan.bias is None else plan.bias[2]
        self.arrivals = plan.arrivals

    def close(self) -> None:
        plan, self._plan = self._plan, None
        if plan is None:
            return
        here = self._transport
        if here._gathering is self:
            here._gathering = None
        streams = here._streams
        lane = streams.main()
        if streams.capturing():
            # a graph knows dependencies by events only; the place is written in front of the join (Note [The way out])
            streams.launch(plan.joining, lane)
            if plan.push is not None:
                streams.order(streams.side, lane)
            if self._heralded:
                streams.order(streams.herald, lane)
        streams.launch(plan.join, lane)


class _Coming:
    """See `Homecoming`."""

    __slots__ = (
        "_closed", "_plan", "_received", "_transport", "addresses", "bias_addresses", "own", "own_bias", "rows",
    )  # fmt: skip

    def __init__(self, transport: CopyEngineTransport, plan: _Home) -> None:
        self._transport = transport
        self._plan = plan
        self._received = self._closed = False
        self.addresses = plan.addresses
        self.own = plan.own
        self.rows = plan.own.shape[1]
        self.bias_addresses, self.own_bias = (None, None) if plan.bias is None else plan.bias[:2]

    def receive(self) -> tuple[list[Tensor], list[Tensor]]:
        if not self._received:
            self._received = True
            streams = self._transport._streams
            streams.launch(self._plan.receive, streams.main())
        bias = self._plan.bias
        return self._plan.regions, [] if bias is None else bias[2]

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._transport._homecoming is self:
                self._transport._homecoming = None
            streams = self._transport._streams
            streams.launch(self._plan.close, streams.main())


class _Fetching:
    """See `Pending`."""

    __slots__ = ("_plan", "_transport", "_waited", "index", "order")

    def __init__(self, transport: CopyEngineTransport, index: int, plan: _Post, order: int) -> None:
        self._transport = transport
        self.index = index
        self._plan = plan
        self._waited = False
        self.order = order

    def wait(self) -> None:
        if self._waited:
            return
        self._waited = True
        here = self._transport
        if here._posts[self.index] is self:
            here._posts[self.index] = None
        streams = here._streams
        lane = streams.main()
        if streams.capturing():
            streams.launch(self._plan.fetching, lane)
            streams.order(streams.side, lane)
        streams.launch(self._plan.join, lane)
        if here.watch.failure is not None:
            here.watch.check()


class _Watched:
    """See `CopyEngineTransport.watched`."""

    def __init__(self, here: CopyEngineTransport, link: Transport) -> None:
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

    def __init__(self, here: CopyEngineTransport, pending: Pending, peers: tuple[int, ...], what: str) -> None:
        self._here = here
        self._pending = pending
        self._peers = peers
        self._what = what

    def wait(self) -> None:
        here = self._here
        streams = here._streams
        key = ("crossing", self._peers)
        found: tuple[Course, Program, Program] | None = here._find(key)
        if found is None:
            course = Course(self._what, self._peers, since=None)
            number = here.watch.number(course)
            begin, end = streams.compile([here._at(number, CROSSING)]), streams.compile(here._leave())
            found = here._keep(key, (course, begin, end))
        found[0].what = self._what
        lane = streams.main()
        streams.launch(found[1], lane)
        self._pending.wait()
        streams.launch(found[2], lane)
        if here.watch.failure is not None:
            here.watch.check()


def _copies(
    source: int,
    target: int,
    between: tuple[int, int],
    b: int,
    row: int,
    rows: Rows,
    at: int,
    group: int,
    groups: int,
) -> list[Op]:
    """The copies of one group of heads of rows from one address to another, where they stand together from a row on.

    Args:
        source: Where row 0 is.
        target: Likewise.
        between: Rows from batch element to batch element, there and there.
        b: Batch elements.
        row: Bytes of a row.
        rows: Of the source.
        at: The first of them in the target.
        group: Which group.
        groups: How many.
    """
    part, found = row // groups, list[Op]()
    source_pitch, target_pitch = (x * row for x in between)
    for offset, length in rows:
        start, end = source + offset * row + group * part, target + at * row + group * part
        if groups > 1:
            for i in range(b):
                found.append(Copy(end + i * target_pitch, start + i * source_pitch, part, length, row, row))
        elif b > 1 and max(source_pitch, target_pitch) <= MAX_PITCH:
            found.append(Copy(end, start, length * row, b, target_pitch, source_pitch))
        else:
            for i in range(b):
                found.append(Copy(end + i * target_pitch, start + i * source_pitch, length * row))
        at += length
    return found


def _guards(far_rows: int, fetches: Sequence[Fetch]) -> list[tuple[int, int]]:
    """First and last row of what no owner has in far."""
    ends = [fetch.at for fetch in fetches[1:]] + [far_rows]
    return [(fetch.at + _num_rows(fetch.rows), end) for fetch, end in zip(fetches, ends, strict=False)]


def _parts(far: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """All of far, the keys in it, and the values."""
    return far, far[..., :dim], far[..., dim:]


def _num_rows(rows: Rows) -> int:
    return sum(length for _, length in rows)


def _same(x: Tensor, y: Tensor) -> bool:
    # an empty tensor has no address, but it has a storage
    return bool(
        x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
        and x.storage_offset() == y.storage_offset()
        and x.shape == y.shape
        and x.stride() == y.stride()
        and x.dtype == y.dtype
    )
