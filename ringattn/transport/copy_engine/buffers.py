"""What one rank holds for its ring: memory that only grows, and what was made ready for it.

Owns making buffers and stations, giving up what they outgrow, telling the watch of every address that its way out must know, and
the table of what earlier calls have made. Refuses to know what is enqueued, and what a program says.

Note [Seen before]
    Whatever follows from shapes and plans alone is made at first sight: programs, views, tables of addresses. A later call
    finds it by one look into a table and enqueues it: a gather costs the host four driver calls and a launch, a homecoming that
    begins with it one more, a post one driver call per copy and one or two more. Growing buffers forget
    the table, so what is found there fits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from ringattn.kernels.pack import Cleared
from ringattn.transport.copy_engine.graph_cache import GraphCache
from ringattn.transport.copy_engine.peer_buffers import PAYLOAD_ALIGNMENT, Far, Station
from ringattn.transport.copy_engine.semaphores import Words
from ringattn.transport.copy_engine.streams import Streams
from ringattn.transport.copy_engine.symmetric_memory import Memory, aligned
from ringattn.transport.copy_engine.watchdog import DEVICE_WORDS, ERROR, GATE, HOST_WORDS, PROCEED, Watch

T = TypeVar("T")
S = TypeVar("S", bound=Station)

COURSES = 256
"""Constant programs that a ring keeps."""
PAYLOADS = 16
"""Tensors of one kind that one post may send beyond what it reserved, as padding."""
PLAIN, REPLIES = KINDS = range(2)
"""Kinds of parcels; each has outboxes of its own."""
BOX_NAMES = ("outboxes", "outboxes of replies")


@dataclass(eq=False)
class Lent:
    """A slot that the caller fills itself, or that rows of another node come into.

    Attributes:
        slot: `b rows hk (d + dv)`.
        k: The keys in it, of this rank's rows.
        v: Likewise the values.
        courses: Keys of what was made for it (`Holdings.keep`).
    """

    slot: Tensor
    k: Tensor
    v: Tensor
    courses: set[Any] = field(default_factory=set)


ordinary = torch.inference_mode(False)
"""Decorates what makes tensors that outlive a call: a call outside of inference mode must be able to write and to save them."""


class Holdings:
    """What a rank holds. A base and not a part of what calls are made on: these come many times per step, and look up little.

    Args:
        rank: This rank within the ring.
        members: The ranks of the ring that reach each other's memory, in the order of the regions' addresses: all, or those
            of a node.
        name: The ring's name.
        streams: The way to the device.
        memory: Where regions come from.
        timeout: Seconds that the ring may stand still.

    Attributes:
        watch: What looks after the ring.
        words: What programs of this rank say beside rows.
    """

    @ordinary
    def __init__(
        self, rank: int, members: Sequence[int], name: str, streams: Streams, memory: Memory, timeout: float
    ) -> None:
        self._rank = rank
        self._members = tuple(members)
        self._name = name
        self.streams = streams
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
        device = tuple(self._control.addresses[place] + 4 * i for i in range(DEVICE_WORDS))
        self.watch = Watch(rank, name, self._host, device, streams, timeout)
        others = [address for other, address in enumerate(self._control.addresses) if other != place]
        self.watch.territory.gates.update(address + 4 * GATE for address in others)
        self.watch.territory.errors.update(address + 4 * ERROR for address in others)
        self.words = Words(rank, self._members, device, self._host.data_ptr(), streams, self.watch)
        self._nothing = torch.empty(0, dtype=torch.uint8, device=memory.device)
        self._stretches: OrderedDict[tuple[tuple[int, int], ...], Tensor] = OrderedDict()
        self._courses: OrderedDict[Any, Any] = OrderedDict()
        self._captured = False
        self._let_go()

    def _let_go(self) -> None:
        """Holds nothing: at the beginning, and when all is given up."""
        self._courses.clear()
        self._graphs = GraphCache()
        self._fars: list[Far] = []
        self._homes: list[Station] = []
        self._boxes: tuple[list[Station], ...] = tuple([] for _ in KINDS)
        self._reserved = [0 for _ in KINDS]
        self._lent: dict[tuple[str, tuple[Any, ...]], Lent] = {}
        self._lent_at: dict[int, Lent] = {}  # by the address of their memory
        self._slot = self._flags = self._own = self._nothing
        self._guests = [self._nothing, self._nothing]
        self._raised: dict[int, Tensor] = {}  # by head groups: flags of rows that are there
        self._far_layout: object = None  # of the gather whose guard rows are zero in far
        here = self.watch.territory
        semaphores = here.free, here.full, here.room, here.home
        for known in (*semaphores, here.flags, here.raised, here.own, here.received, here.kept):
            known.clear()

    def num_bytes(self) -> int:
        """Bytes of device memory held now."""
        lent = (lent.slot for lent in self._lent.values())
        local = (self._slot, self._flags, self._own, *self._guests, *lent, *self._raised.values())
        stations = sum(station.region.local.numel() for station in self._stations())
        return stations + self.streams.graph_bytes() + sum(x.untyped_storage().nbytes() for x in local)

    def find(self, key: Any) -> Any:
        """What an earlier call has made (Note [Seen before]); None: nothing.

        Args:
            key: What that follows from.
        """
        found = self._courses.get(key)
        if found is not None:
            self._courses.move_to_end(key)
        return found

    def keep(self, key: Any, made: T) -> T:
        """Remembers it, and hands it back.

        Args:
            key: What it follows from.
            made: What was made.
        """
        self._courses[key] = made
        if len(self._courses) > COURSES:
            _, old = self._courses.popitem(last=False)
            self._retire(old)
        return made

    def _forget_courses(self) -> None:
        self._retire(list(self._courses.values()))
        self._courses.clear()
        self._graphs.clear()

    def _retire(self, old: Any) -> None:
        """Lets go, unless a captured graph may use it (Note [Old memory] of symmetric_memory.py)."""
        if self._captured:
            self.watch.territory.kept.append(old)

    def _refuse_in_capture(self, what: str) -> None:
        if self.streams.capturing():
            raise RuntimeError(
                f"{what} must have its buffers before a capture begins, got a larger or new shape in a capture; "
                "make the same call once before capturing it"
            )

    def _stations(self) -> list[Station]:
        """Wherever rows wait for peers or come from them."""
        return [*self._fars, *self._homes, *chain(*self._boxes)]

    @ordinary
    def _grow(
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
            self._forget_courses()
            kind[:] = [make(self._memory, self._members, num_bytes, f"{what} {turn}") for turn in range(turns)]
            for station in kind:
                self._know(station)
        return kind

    def _know(self, station: Station) -> None:
        here, me, peers = self.watch.territory, self._rank, self.words.peers
        (here.room if isinstance(station, Far) else here.free).update(station.free(me, peer) for peer in peers)
        full = here.home if station in self._homes else here.full
        full.update(station.full(me, peer, g) for peer in peers for g in range(station.groups))

    def _forget(self, station: Station) -> None:
        if self._captured:
            self._retire(station)
            return
        here = self.watch.territory
        for peer in self.words.peers:
            for addresses in (here.free, here.room):
                addresses.discard(station.free(self._rank, peer))
            for addresses in (here.full, here.home):
                addresses.difference_update(station.full(self._rank, peer, g) for g in range(station.groups))

    @ordinary
    def _local(self, old: Tensor, num_bytes: int, known: set[tuple[int, int]] | None, unit: int) -> Tensor:
        """A plain buffer of at least so many bytes; the old one where it is large enough."""
        if old.numel() >= num_bytes:
            return old
        self._refuse_in_capture("a buffer")
        if old.numel():
            self.streams.synchronize()
            self._forget_courses()
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
        (far,) = self._grow(self._fars, num_bytes, "far", functools.partial(Far, self._rank), turns=1)
        if far not in before:
            self._far_layout = None
        return far

    def _make_homes(self, num_bytes: int) -> list[Station]:
        return self._grow(self._homes, len(self.words.peers) * aligned(num_bytes), "homes")

    def _make_boxes(self, kind: int, num_bytes: int) -> None:
        self._grow(self._boxes[kind], aligned(num_bytes + PAYLOADS * PAYLOAD_ALIGNMENT), BOX_NAMES[kind])
        self._reserved[kind] = num_bytes

    def _make_slot(self, num_bytes: int) -> Tensor:
        self._slot = self._local(self._slot, num_bytes, None, 1)
        return self._slot

    def _make_guest(self, turn: int, num_bytes: int) -> Tensor:
        before = self._guests[turn]
        flat = self._guests[turn] = self._local(before, num_bytes, None, 1)
        if flat is not before:
            self._lent_at.pop(before.untyped_storage().data_ptr(), None)
        return flat

    def _make_own(self, num_bytes: int) -> Tensor:
        self._own = self._local(self._own, num_bytes, self.watch.territory.own, 1)
        return self._own

    def _make_flags(self, groups: int) -> Tensor:
        """`groups world_size` flags of rows that are to come."""
        count = groups * len(self._members)
        self._flags = self._local(self._flags, 4 * count, self.watch.territory.flags, 4)
        return self._flags.view(torch.int32)[:count].view(groups, len(self._members))

    @ordinary
    def _make_raised(self, groups: int) -> Tensor:
        """Likewise of rows that are there."""
        self._refuse_in_capture("keep_keys")
        self.watch.check()
        flags = torch.ones(groups, len(self._members), dtype=torch.int32, device=self._memory.device)
        self.watch.territory.raised.add((flags.data_ptr(), flags.numel()))
        self._raised[groups] = flags
        return flags

    def _make_cleared(
        self, flags: Tensor, far: Tensor, stretches: tuple[tuple[int, int], ...]
    ) -> tuple[Cleared, Cleared]:
        """What is cleared without stretches of far, and with them."""
        there = self._stretches.get(stretches)
        if there is None:
            self._refuse_in_capture("guards")
            there = torch.tensor(stretches, dtype=torch.int32, pin_memory=flags.is_cuda, device="cpu").to(
                flags.device, non_blocking=True
            )
            self._stretches[stretches] = there
            if len(self._stretches) > COURSES:
                self._retire(self._stretches.popitem(last=False)[1])
        else:
            self._stretches.move_to_end(stretches)
        longest = max(end - start for start, end in stretches)
        without = Cleared(flags, self._error, far, there, longest, stretches=False)
        return without, dataclasses.replace(without, stretches=True)

    def _make_kept(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._memory.device)

    @ordinary
    def _make_lent(self, key: tuple[str, tuple[Any, ...]], mine: int) -> Lent:
        name, (shape, d, dtype) = key
        self._refuse_in_capture(f"kv_buffer {name!r}")
        self._graphs.clear()  # they know these addresses as other tensors, or as a slot that goes
        for old in [other for other in self._lent if other[0] == name]:
            self.streams.synchronize()
            gone = self._lent.pop(old)
            del self._lent_at[gone.slot.untyped_storage().data_ptr()]
            self._retire((gone, [self._courses.pop(key, None) for key in gone.courses]))
        slot = torch.empty(shape, dtype=dtype, device=self._memory.device)
        lent = self._lent[key] = Lent(slot, slot[:, :mine, :, :d], slot[:, :mine, :, d:])
        self._lent_at[slot.untyped_storage().data_ptr()] = lent
        return lent

    def _find_lent(self, k: Tensor, v: Tensor) -> Lent | None:
        lent = self._lent_at.get(k.untyped_storage().data_ptr())
        return lent if lent is not None and _same(k, lent.k) and _same(v, lent.v) else None


def _same(x: Tensor, y: Tensor) -> bool:
    # an empty tensor has no address, but it has a storage
    return bool(
        x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
        and x.storage_offset() == y.storage_offset()
        and x.shape == y.shape
        and x.stride() == y.stride()
        and x.dtype == y.dtype
    )
