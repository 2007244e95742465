"""Shards between the GPUs of one host by copy engine: whoever owns keys pushes them into the memory of who reads them.

Owns the calls: what each enqueues on which stream and in which order, what it leaves open, and how that is joined. Refuses to
know devices: it speaks to `Streams` and `Memory`, so that the whole protocol also runs on a CPU, in any interleaving. Which
words are said and waited for, and which bytes are copied, is in constant programs (kv_gather.py, grad_return.py,
send_recv.py); where they lie in peer_buffers.py and semaphores.py; who makes room for them in buffers.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ringattn.kernels.contract import Arrivals
from ringattn.kernels.pack import pack
from ringattn.plan.ring_plan import Collection
from ringattn.transport.base import Done, Gathering, Homecoming, Parcel, Pending, Reply, Transport
from ringattn.transport.consensus import Agreement
from ringattn.transport.copy_engine.buffers import KINDS, PLAIN, REPLIES, Holdings, Lent, ordinary
from ringattn.transport.copy_engine.grad_return import HomePrograms, Together, home_programs
from ringattn.transport.copy_engine.graph_cache import SEEN, CachedCall
from ringattn.transport.copy_engine.kv_gather import Bias, GatherMemory, GatherPrograms, gather_programs, guards
from ringattn.transport.copy_engine.peer_buffers import MOST_GROUPS, padded, view_bytes
from ringattn.transport.copy_engine.send_recv import PostPrograms, post_programs
from ringattn.transport.copy_engine.streams import Program, Streams
from ringattn.transport.copy_engine.symmetric_memory import Memory
from ringattn.transport.copy_engine.watchdog import POSTS
from ringattn.transport.copy_engine.watched_transport import WatchedLink
from ringattn.transport.reduce.one_shot import OneShotExchange

AIMED = 256
"""Addresses of kept rows for which one gather has its copies ready."""
RECEIVED = 256
"""Tensors that posts received into which the way out of a failure remembers."""


class CopyEngineTransport(Holdings):
    """One rank's end: the calls on what it holds. Takes the arguments of `Holdings`.

    Args:
        start_watchdog: Start the thread of the watchdog.
        spare: See `Gatherer.spare`.
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
        start_watchdog: bool = True,
        spare: int = 0,
    ) -> None:
        super().__init__(rank, members, name, streams, memory, timeout)
        self.spare = spare
        self._home_turn = self._post_turn = 0
        self._posted = 0
        self._kept: list[Any] | None = None  # by the graph that is being captured, so that it lives as long
        self._lane: int | None = None
        self._gathering: _Arriving | None = None
        self._homecoming: _Coming | None = None
        self._posts: list[_Fetching | None] = [None] * POSTS
        if start_watchdog:
            self.watch.start()

    def __del__(self) -> None:
        watch = getattr(self, "watch", None)
        if watch is not None:
            watch.retire()

    def gatherer(self) -> CopyEngineTransport:
        """See `Transport.gatherer`."""
        return self

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
        home: Homecoming | None = None,
    ) -> Gathering:
        """See `Gatherer.gather`."""
        assert key_bias is None or not keep, "what is kept has no room for a bias"
        assert home is None or isinstance(home, _Coming), "a homecoming of this transport"
        lane, capturing = self._enter()
        # what was lent has no room for a bias either: such keys are packed like others
        lent = self._find_lent(k, v) if self._lent_at and key_bias is None else None
        of_bias = None if key_bias is None else key_bias.dtype
        # a captured call is launched again without coming here, and keeps its name
        how = what if self._kept is not None else capturing
        key = (id(collection), k.shape, k.dtype, v.shape[-1], groups, id(lent), how, keep, of_bias)
        found: GatherPrograms | None = self.find(key)
        if found is None:
            found = self.keep(key, self._prepare_gather(k, v, collection, groups, lent, what, of_bias, keep=keep))
            if lent is not None:
                lent.courses.add(key)
            if home is not None:
                self.keep(home.key, home.plans)  # which growing for the gather has forgotten
        found.course.what = found.pushing.what = what
        if self._kept is not None:
            self._kept.append(found)

        launch, streams = self.streams.launch, self.streams
        far, herald, kept = found.far[0], found.herald, None
        together = None if home is None else home.plan.beside(found, streams)
        start = found.start if together is None else together.start
        places = []
        if self._captured or (found.layout is not self._far_layout and found.layout != self._far_layout):
            places.append(far)
        if keep:
            kept = self._make_kept(tuple(far.shape), k.dtype)
            herald = self._aimed(found, kept.data_ptr())
            places.append(kept)
        if not found.starts_last:
            launch(start, lane)
        if found.opening is not None:
            streams.order(lane, streams.side)
            launch(found.opening, streams.side)
        cleared = None
        if found.cleared is not None:
            cleared = found.cleared[far is next(iter(places), None)]
            places = [place for place in places if place is not far]
        for place in places:
            for first, last in found.guards:
                streams.call(place[:, first:last].zero_)
        self._far_layout = found.layout
        if found.packed is not None:
            slot = found.packed
            streams.call(lambda: pack(slot, k, v, cleared))
        if found.bias is not None and key_bias is not None:
            for target in found.bias[:2]:
                if target is not None:
                    streams.call(functools.partial(target.copy_, key_bias))
        if found.starts_last:
            launch(start, lane)
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
        if home is not None and together is not None:
            home.begun_with(gathering, together)
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
        found: Lent | None = self.find(key)
        if found is None:
            found = self.keep(key, self._prepare_guest(turn, (*shape, sum(dims)), rows, dims[0], dtype))
        self._lent_at[found.slot.untyped_storage().data_ptr()] = found
        return found.slot[:, :rows]

    def arrived(self, collection: Collection, groups: int, device: torch.device) -> Arrivals | None:
        """See `Gatherer.arrived`."""
        del device  # that of this transport
        if not collection.fetches:
            return None
        flags = self._raised.get(groups)
        if flags is None:
            flags = self._make_raised(groups)
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
        key = (id(collection), shape, biased)
        plans: tuple[HomePrograms, HomePrograms] | None = self.find(key)
        if plans is None:
            self._enter()
            plans = self.keep(key, self._prepare_home(collection, shape, what, biased=biased))
        plans[self._home_turn].course.what = what
        if self._kept is not None:
            self._kept.append(plans)
        return _Coming(self, key, plans)

    def repeat(
        self,
        key: tuple[Hashable, ...],
        given: Sequence[Tensor],
        made: Sequence[Tensor],
        enqueue: Callable[[], object],
        held: tuple[Any, ...],
    ) -> None:
        """See `Gatherer.repeat`, and Note [Graph cache] of graph_cache.py."""
        _, capturing = self._enter()
        if capturing or self._homecoming is not None:
            enqueue()
            return
        known = self._graphs.find(key, given, made, held)
        graph = self._graph_of(known, enqueue) if known.can_capture and known.seen >= SEEN else None
        if graph is not None:
            self._graphs.launched += 1
            self.streams.launch(graph, self.streams.main())
            return
        turn = self._home_turn
        enqueue()
        known.seen = min(known.seen + 1, SEEN)
        known.layout, known.takes_turn = self._far_layout, self._home_turn != turn

    def _graph_of(self, known: CachedCall, enqueue: Callable[[], object]) -> Program | None:
        """The graph of a call, made now or found; updates the state that the call changes. None: it cannot be captured."""
        turn, layout = self._home_turn, self._far_layout
        clears = self._captured or (known.layout is not layout and known.layout != layout)
        which = clears, turn if known.takes_turn else 0
        found = known.graphs.get(which)
        if found is not None:
            self._far_layout, self._home_turn = known.layout, 1 - turn if known.takes_turn else turn
            return found[0]
        if not self._graphs.may_capture():
            return None
        kept: list[Any] = []
        self._kept, graph = kept, None
        try:
            graph = self.streams.record(lambda: kept.append(enqueue()))
        except RuntimeError:
            pass  # piece by piece the call may succeed, or raise the error again
        finally:
            self._kept = None
            if graph is None:
                # nothing of it has run
                known.can_capture = False
                self._home_turn, self._far_layout = turn, layout
                self._gathering = self._homecoming = None
        if graph is not None:
            known.graphs[which] = graph, kept
            self._graphs.captured += 1
        return graph

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
            self.streams,
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
                self._make_boxes(kind, size)

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel], what: str) -> Pending:
        """See `Transport.post`, and Note [A post] of send_recv.py."""
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
        found: PostPrograms | None = self.find(key)
        if found is None:
            boxes = {kind: self._boxes[kind][turn] for _, kind in (*out, *into)}
            found = self.keep(key, post_programs(self.words, boxes, tuple(out), tuple(into), index, what))
        found.course.what = what
        streams = self.streams
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

    def watch_transport(self, link: Transport) -> Transport:
        """A link between nodes whose waits the watch over this node sees and names.

        Args:
            link: What crosses.
        """
        return WatchedLink(self, link)

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
            lent = self._make_lent(key, mine)
        if lent.k.shape[1] != mine:
            # another sharding of as many rows on the longest shard
            lent.k, lent.v = lent.slot[:, :mine, :, :d], lent.slot[:, :mine, :, d:]
        return lent.k, lent.v

    @property
    def repeated(self) -> int:
        """Calls that were launched as one graph since memory was made (Note [Graph cache] of graph_cache.py)."""
        return self._graphs.launched

    def poison(self) -> None:
        """Sets all bits wherever rows are kept between two calls; every rank calls it. What was lent is left alone."""
        if self.streams.capturing():
            raise RuntimeError("poison must be called outside of a capture, got one; poison between replays")
        self._enter()
        self._finish()
        # twice: nothing is left here, and then nothing is left anywhere that may read what is overwritten
        self._memory.meet("poison comes")
        self._memory.meet("poison begins")
        for station in self._stations():
            self.streams.call(station.poison)
        for local in (self._slot, self._own, *self._guests):
            self.streams.call(lambda local=local: local.fill_(255))
        self._far_layout = None
        self._memory.meet("poison ends")

    def close(self) -> None:
        """Lets go of all memory; every rank of the ring calls it. A later call makes what it needs anew."""
        self._finish()
        if self.watch.failure is None:
            self._memory.meet("close")
        else:
            self.streams.synchronize()
        self._home_turn = self._post_turn = 0
        self._let_go()

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

    def _enter(self) -> tuple[int, bool]:
        """The beginning of every call: refuses on a failed ring and orders the call behind the one before.

        Returns:
            The caller's stream, and whether it is being captured.
        """
        if self._gathering is not None:
            self._gathering.close()
        if self.watch.failure is not None:
            self.watch.check()
        lane, capturing = self.streams.main(), self.streams.capturing()
        if capturing:
            self._captured |= self._kept is None
        elif lane != self._lane:
            if self._lane is not None:
                self.streams.order(self._lane, lane)
            self._lane = lane
        return lane, capturing

    @ordinary
    def _prepare_gather(
        self,
        k: Tensor,
        v: Tensor,
        collection: Collection,
        groups: int,
        lent: Lent | None,
        what: str,
        of_bias: torch.dtype | None,
        *,
        keep: bool,
    ) -> GatherPrograms:
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
        far, bias, of_slot = station.view((b, collection.far_rows, hk, width), k.dtype), None, None
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
            bias = Bias(slot=of_slot, table=table, near=t)
        flags = self._make_flags(groups)
        packed = slot[:, :t] if lent is None and collection.readers else None
        cleared = None
        if packed is not None and collection.fetches:
            cleared = self._make_cleared(flags, far, tuple(guards(collection.far_rows, collection.fetches)))
        here = GatherMemory(
            station,
            far=far,
            dim=d,
            slot=slot,
            packed=packed,
            bias=bias,
            arrivals=Arrivals(flags, self._error, self._patience),
            cleared=cleared,
            keep=(collection, lent),
        )
        return gather_programs(self.words, here, collection, what, keep=keep)

    def _aimed(self, plan: GatherPrograms, address: int) -> Program | None:
        """What the herald does for a gather whose rows are kept, to where they are kept."""
        if plan.aim is None:
            return None
        aimed = plan.aimed
        found = aimed.get(address)
        if found is None:
            found = aimed[address] = self.streams.compile(plan.aim(address))
            if len(aimed) > AIMED:
                _, old = aimed.popitem(last=False)
                self._retire(old)
        else:
            aimed.move_to_end(address)
        return found

    @ordinary
    def _prepare_guest(self, turn: int, shape: tuple[int, ...], rows: int, d: int, dtype: torch.dtype) -> Lent:
        slot = view_bytes(self._make_guest(turn, math.prod(shape) * dtype.itemsize), shape, dtype)
        return Lent(slot, slot[:, :rows, :, :d], slot[:, :rows, :, d:])

    @ordinary
    def _prepare_home(
        self, collection: Collection, shape: tuple[int, int, int], what: str, *, biased: bool
    ) -> tuple[HomePrograms, HomePrograms]:
        b, hk, width = shape
        size = b * collection.slot_rows * hk * (width + biased) * 4
        homes, own = self._make_homes(size), self._make_own(size)
        self._refuse_in_capture("homecoming")
        # both at once: a capture may begin at either
        first, second = (
            home_programs(self.words, collection, station, own, shape, what, biased=biased) for station in homes
        )
        return first, second

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


class _Arriving:
    """See `Gathering`."""

    __slots__ = ("_heralded", "_plan", "_transport", "arrivals", "far", "k", "kept", "key_bias", "v")

    def __init__(
        self, transport: CopyEngineTransport, plan: GatherPrograms, kept: Tensor | None, *, heralded: bool
    ) -> None:
        self._transport = transport
        self._plan: GatherPrograms | None = plan
        self._heralded = heralded
        self.far, self.k, self.v = plan.far
        self.kept = kept
        self.key_bias = None if plan.bias is None else plan.bias[2]
        self.arrivals = plan.arrivals

    def close(self) -> None:
        self.finish()

    def finish(self, together: Together | None = None) -> bool:
        """As `close`, together with what a homecoming says; False: it was closed before, and nothing is said."""
        plan, self._plan = self._plan, None
        if plan is None:
            return False
        here = self._transport
        if here._gathering is self:
            here._gathering = None
        streams = here.streams
        lane = streams.main()
        if streams.capturing():
            # a graph holds event dependencies only; the place is written before the join (Note [The way out] of watchdog.py)
            streams.launch(plan.joining if together is None else together.joining, lane)
            if plan.push is not None:
                streams.order(streams.side, lane)
            if self._heralded:
                streams.order(streams.herald, lane)
        streams.launch(plan.join if together is None else together.receive, lane)
        return True


class _Coming:
    """See `Homecoming`."""

    __slots__ = (
        "_begun", "_closed", "_gathering", "_received", "_together", "_transport",
        "addresses", "bias_addresses", "key", "own", "own_bias", "plan", "plans", "rows",
    )  # fmt: skip

    def __init__(self, transport: CopyEngineTransport, key: Any, plans: tuple[HomePrograms, HomePrograms]) -> None:
        self._transport = transport
        self.key, self.plans = key, plans
        self.plan = plan = plans[transport._home_turn]
        self._begun = self._received = self._closed = False
        self._gathering: _Arriving | None = None
        self._together: Together | None = None
        self.addresses = plan.addresses
        self.own = plan.own
        self.rows = plan.own.shape[1]
        self.bias_addresses, self.own_bias = (None, None) if plan.bias is None else plan.bias[:2]

    def begin(self) -> None:
        lane, _ = self._transport._enter()
        self._begin()
        self._transport.streams.launch(self.plan.start, lane)

    def begun_with(self, gathering: _Arriving, together: Together) -> None:
        """It has begun with a gather, which is closed by what both say together."""
        self._begin()
        self._gathering, self._together = gathering, together

    def _begin(self) -> None:
        assert not self._begun, "a homecoming begins once"
        self._begun = True
        here = self._transport
        here._homecoming, here._home_turn = self, 1 - here._home_turn

    def receive(self) -> tuple[list[Tensor], list[Tensor]]:
        if not self._received:
            assert self._begun, "a homecoming begins in front of its backward"
            self._received = True
            gathering, together = self._gathering, self._together
            if gathering is None or together is None or not gathering.finish(together):
                streams = self._transport.streams
                streams.launch(self.plan.receive, streams.main())
        bias = self.plan.bias
        return self.plan.regions, [] if bias is None else bias[2]

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._transport._homecoming is self:
                self._transport._homecoming = None
            streams = self._transport.streams
            streams.launch(self.plan.close, streams.main())


class _Fetching:
    """See `Pending`."""

    __slots__ = ("_plan", "_transport", "_waited", "index", "order")

    def __init__(self, transport: CopyEngineTransport, index: int, plan: PostPrograms, order: int) -> None:
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
        streams = here.streams
        lane = streams.main()
        if streams.capturing():
            streams.launch(self._plan.fetching, lane)
            streams.order(streams.side, lane)
        streams.launch(self._plan.join, lane)
        if here.watch.failure is not None:
            here.watch.check()
