"""The copy engine's protocol, in any interleaving of all streams of all ranks: nothing is read too early or torn, nothing hangs."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringattn.kernels.interface import ReadyFlags
from ringattn.kernels.kv.pack import pack
from ringattn.launch.check.poison import poison_transport
from ringattn.plan.layouts import Run, Shard, make_shards, shard_len
from ringattn.plan.ring_plan import GatherPlan, Nodes, RecvSpec, make_gather_plan, make_plan
from ringattn.transport.base import GradMessage, KVGatherHandle
from ringattn.transport.copy_engine import cuda_driver, graph_cache, streams
from ringattn.transport.copy_engine import transport as copy_engine
from ringattn.transport.copy_engine.streams import Write
from ringattn.transport.copy_engine.transport import CopyEngineTransport
from ringattn.transport.copy_engine.watchdog import ERROR, HOST_INTS, KERNEL, PLACE, PLACES, Watchdog
from ringattn.transport.copy_engine.watchdog import FLAG as FLAGGING
from ringattn.transport.select import PROBE_BYTES, measure_push, node_of
from tests.support.device_bytes import transport_bytes
from tests.support.fake_streams import FLAG, MAIN, FakeMemory, FakeStreams, Item, Recording, World, read
from tests.support.short_mask import ShortMask

NAN = float("nan")


class Ranks:
    """All ranks of one ring on fake devices."""

    def __init__(self, ranks: int, seed: int, timeout: float = 10.0, nodes: Nodes | None = None) -> None:
        self.world = World(ranks, seed)
        self.streams = [FakeStreams(self.world, rank) for rank in range(ranks)]
        mates = [node_of(rank, nodes, ranks) for rank in range(ranks)]
        self.memories = [FakeMemory(self.world, rank, mates[rank]) for rank in range(ranks)]
        ends: dict[int, CopyEngineTransport] = {}

        def make(rank: int) -> None:
            streams, memory = self.streams[rank], self.memories[rank]
            ends[rank] = CopyEngineTransport(rank, mates[rank], "ring", streams, memory, timeout)

        self.each(make)
        self.ends = [ends[rank] for rank in range(ranks)]
        self.checked = 0

    def each(self, call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """One call of every rank's host, of the rank and what else is given."""
        self.world.hosts(lambda rank: call(rank, *args, **kwargs))

    def capture(self, call: Callable[..., None], *args: Any, **kwargs: Any) -> list[Recording]:
        """Likewise, captured into a graph of every rank."""
        recordings = [Recording() for _ in self.ends]

        def one(rank: int) -> None:
            self.streams[rank].recording = recordings[rank]
            call(rank, *args, **kwargs)
            self.streams[rank].recording = None

        self.each(one)
        return recordings

    def replay(self, recordings: list[Recording]) -> None:
        self.each(lambda rank: self.streams[rank].replay(recordings[rank]))

    def lose_one(self, late: int = 0) -> list[int]:
        """Lose the last rank after some steps of the devices; return the others."""
        for _ in range(late):
            self.world.step()
        *alive, lost = range(len(self.ends))
        self.world.dead.add(lost)
        return alive

    def done(self) -> None:
        self.checked += 1


@dataclass(frozen=True)
class Shape:
    """What a gather is about."""

    batch: int
    heads: int
    dims: tuple[int, int]
    groups: int
    gather_plans: tuple[GatherPlan, ...]
    lengths: tuple[int, ...]
    dtype: torch.dtype
    biased: bool = False

    @property
    def rows(self) -> int:
        return self.gather_plans[0].slot_rows


@st.composite
def shapes(draw: st.DrawFn, ranks: int) -> Shape:
    n = draw(st.integers(1, 40))
    options: dict[str, Any] = draw(
        st.sampled_from([{}, {"causal": True}, {"causal": True, "window": (3, 0)}, {"window": (6, 2)}])
    )
    cut = draw(st.integers(0, n))
    documents = (0, cut, n) if draw(st.booleans()) else None
    mask = ShortMask(seq_len=n, kv_len=n, documents=documents, **options)
    shards = make_shards(draw(st.sampled_from(["contiguous", "striped", "zigzag"])), n, ranks, mask)
    plan = make_plan(shards, shards, mask, "keys")
    heads = draw(st.sampled_from([1, 2, 4]))
    return Shape(
        batch=draw(st.integers(1, 2)),
        heads=heads,
        dims=(draw(st.sampled_from([2, 3])), draw(st.sampled_from([2, 5]))),
        groups=draw(st.sampled_from([g for g in (1, 2, 4) if heads % g == 0])),
        gather_plans=tuple(make_gather_plan(plan, rank, 4) for rank in range(ranks)),
        lengths=tuple(shard_len(shard) for shard in shards),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        biased=draw(st.booleans()),
    )


def keys_of(shape: Shape, rank: int, salt: int) -> tuple[Tensor, Tensor]:
    """K and v of a rank; every element of every call is its own, and strides are not contiguous."""
    g = torch.Generator().manual_seed(1000 * salt + rank)
    whole = torch.randn(shape.batch, shape.lengths[rank], shape.heads, sum(shape.dims) + 1, generator=g).to(shape.dtype)
    return whole[..., : shape.dims[0]], whole[..., shape.dims[0] : -1]


def bias_of(shape: Shape, rank: int, salt: int) -> Tensor:
    """The bias of a rank's keys, likewise."""
    g = torch.Generator().manual_seed(1000 * salt + rank + 500)
    return torch.randn(2, shape.lengths[rank], generator=g)[-1:].expand(shape.batch, -1)


def picked(x: Tensor, rows: tuple[tuple[int, int], ...]) -> Tensor:
    return torch.cat([x[:, offset : offset + length] for offset, length in rows], 1)


def read_tile(
    streams: FakeStreams, ready_flags: ReadyFlags, flag: int, rows: Tensor, end: Callable[[Any], None]
) -> None:
    """A tile of a kernel: it waits for a flag, reads rows bit by bit, and looks at the error word last.

    `end` is given what was read, and None by a tile that ends in NaN.
    """
    parts: list[Tensor] = []

    def begin() -> None:
        parts.clear()  # a captured kernel runs again
        if read(flag) < 0:
            ready_flags.error.fill_(1)

    def finish() -> None:
        end(None if int(ready_flags.error) else torch.cat(parts, 1))

    streams.enqueue(MAIN, lambda: Item(lambda: read(flag) != 0, begin, "flag"))
    for part in rows.split(max(1, rows.shape[1] // 2), 1):
        streams.call(lambda part=part: parts.append(part.clone()))
    streams.call(finish)


def run_kernel(
    ranks: Ranks,
    rank: int,
    shape: Shape,
    handle: Any,
    keys: Callable[[int], tuple[Tensor, Tensor]],
    *,
    spoil: bool = True,
    biases: Callable[[int], Tensor] | None = None,
) -> None:
    """Waits for each flag as a kernel does, and compares what came with what the owner has; then spoils it."""
    gather_plan, streams = shape.gather_plans[rank], ranks.streams[rank]
    far, ready_flags = handle.remote, handle.ready_flags
    if biases is not None:
        table, near = handle.key_bias, shape.lengths[rank]
        assert table.shape == (shape.batch, near + gather_plan.remote_rows)

        def look_near() -> None:
            assert torch.equal(table[:, :near], biases(rank))

        streams.call(look_near)
    if ready_flags is None:
        assert not gather_plan.recvs
        return
    per = shape.heads // shape.groups
    for g in range(shape.groups):
        for fetch in gather_plan.recvs:
            heads = slice(g * per, (g + 1) * per)
            end = fetch.at + sum(length for _, length in fetch.rows)

            def look(seen, fetch=fetch, heads=heads, end=end, last=g == shape.groups - 1, g=g) -> None:
                if seen is None:
                    assert any(other.watchdog.failure for other in ranks.ends)
                    return
                expected = picked(torch.cat(keys(fetch.owner), -1), fetch.rows)[:, :, heads]
                assert torch.equal(seen, expected), f"rank {rank} step {fetch.step} group {g}"
                if biases is not None:
                    begin = shape.lengths[rank] + fetch.at
                    there = handle.key_bias[:, begin : begin + end - fetch.at]
                    assert torch.equal(there, picked(biases(fetch.owner), fetch.rows)), f"bias of step {fetch.step}"
                    if spoil and last:
                        there.fill_(NAN)
                if spoil:
                    far[:, fetch.at : end, heads].fill_(NAN)
                if last:
                    ends = [other.at for other in gather_plan.recvs if other.at > fetch.at] + [far.shape[1]]
                    assert ends[0] - end >= 4
                    assert not far[:, end : ends[0]].any(), "guard rows must be zero"
                ranks.done()

            read_tile(
                streams, ready_flags, ready_flags.flags[g, fetch.step].data_ptr(), far[:, fetch.at : end, heads], look
            )


def gather(ranks: Ranks, shape: Shape, salt: int) -> None:
    keys = [keys_of(shape, rank, salt) for rank in range(ranks.world.ranks)]
    biases = [bias_of(shape, rank, salt) for rank in range(ranks.world.ranks)]

    def one(rank: int) -> None:
        k, v = (x.clone() for x in keys[rank])
        bias = biases[rank].clone() if shape.biased else None
        found = ranks.ends[rank].gather(k, v, shape.gather_plans[rank], shape.groups, f"gather {salt}", key_bias=bias)
        run_kernel(ranks, rank, shape, found, keys.__getitem__, biases=biases.__getitem__ if shape.biased else None)
        found.close()

        def forget() -> None:
            for x in (k, v, *(() if bias is None else (bias,))):
                x.fill_(NAN)

        ranks.streams[rank].call(forget)

    ranks.each(one)


def contribution(shape: Shape, visitor: int, step: int, rows: int, salt: int) -> Tensor:
    g = torch.Generator().manual_seed(97 * salt + 11 * visitor + step)
    return torch.randn(shape.batch, rows, shape.heads, sum(shape.dims), generator=g)


def send_home(
    ranks: Ranks,
    rank: int,
    shape: Shape,
    salt: int,
    found: Callable[[Any], Any],
    keys: Callable[[int], tuple[Tensor, Tensor]],
    *,
    first: Callable[[], object] | None = None,
) -> None:
    """A backward of one rank, whose far rows are what is found: a gather that the homecoming begins with, or rows that were kept.

    `first` is what the device does when the kernel starts.
    """
    width = sum(shape.dims)
    streams, end, gather_plan = ranks.streams[rank], ranks.ends[rank], shape.gather_plans[rank]
    size = (shape.batch, shape.heads, width)
    coming = end.grad_return(size, gather_plan, f"home {salt}", biased=shape.biased)
    assert coming.rows == shape.rows
    assert (coming.local_bias_grads is not None) == shape.biased
    assert coming.addresses[0] == coming.local_grads.data_ptr()
    far = found(coming)
    if first is not None:
        streams.call(first)
    run_kernel(ranks, rank, shape, far, keys)
    bias_addresses = [0 for _ in coming.addresses] if coming.bias_addresses is None else coming.bias_addresses.tolist()
    for address, of_bias, fetch in zip(
        coming.addresses[1:].tolist(), bias_addresses[1:], gather_plan.recvs, strict=True
    ):
        rows = sum(length for _, length in fetch.rows)
        region = torch.zeros(shape.batch, coming.rows, shape.heads, width)

        def send(region=region, address=address, of_bias=of_bias, fetch=fetch, rows=rows) -> None:
            sums = contribution(shape, rank, fetch.step, rows, salt)
            region[:, :rows] = sums
            size = rows * shape.heads * width * 4
            for b in range(shape.batch):
                ctypes.memmove(address + b * region[0].numel() * 4, region[b].data_ptr(), size)
            if shape.biased:
                lines = sums[..., 0].transpose(1, 2).reshape(-1, rows).contiguous()
                for i, line in enumerate(lines):
                    ctypes.memmove(of_bias + i * coming.rows * 4, line.data_ptr(), rows * 4)

        streams.call(send)
    close = getattr(far, "close", None)
    if close is not None and salt % 3 == 0:
        close()  # what has been closed before is received alike
    regions, biases = coming.receive()
    assert len(biases) == len(regions) * shape.biased

    def add() -> None:
        for i, (region, reader) in enumerate(zip(regions, gather_plan.sends, strict=True)):
            rows = sum(length for _, length in reader.rows)
            sums = contribution(shape, reader.peer, reader.step, rows, salt)
            assert torch.equal(region[:, :rows], sums)
            region.fill_(NAN)
            if shape.biased:
                assert torch.equal(biases[i][..., :rows], sums[..., 0].transpose(1, 2))
                biases[i].fill_(NAN)
            ranks.done()

    streams.call(add)
    coming.close()


def come_home(ranks: Ranks, shape: Shape, salt: int, name: str | None = None) -> None:
    """Backwards that gather, what lies in a lent slot if there is a name."""
    keys = [keys_of(shape, rank, salt) for rank in range(ranks.world.ranks)]

    def one(rank: int) -> None:
        end, gather_plan, place = ranks.ends[rank], shape.gather_plans[rank], keys[rank]
        if name is not None:
            size = shape.batch, shape.rows, shape.lengths[rank], shape.heads
            place = end.zero_copy_kv(name, *size, shape.dims, shape.dtype)
            ranks.streams[rank].call(lambda: [x.copy_(y) for x, y in zip(place, keys[rank], strict=True)])
        found = lambda home: end.gather(*place, gather_plan, shape.groups, f"backward {salt}", grad_return=home)  # noqa: E731
        send_home(ranks, rank, shape, salt, found, keys.__getitem__)

    ranks.each(one)


@dataclass(frozen=True)
class Letter:
    """What one rank sends another in a post: no, one or two tensors of a kind."""

    source: int
    target: int
    kind: Callable[[int, Tensor], Any]
    sizes: tuple[int, int]
    seed: int

    def tensors(self, salt: int) -> list[Tensor]:
        g = torch.Generator().manual_seed(1000 * salt + self.seed)
        dtypes = torch.float64, torch.bfloat16
        return [torch.randn(n, generator=g).to(dtype) for n, dtype in zip(self.sizes, dtypes, strict=True)]


def message(peer: int, x: Tensor) -> tuple[int, Tensor]:
    return peer, x


Round = list[Letter]
"""What all ranks send in one post: of each kind every rank sends to one peer at most."""


def letters(world_size: int, posts: int, seed: int, most: int) -> list[Round]:
    """Rounds in which any rank may send nothing, and any number of peers may send to one rank."""
    chance = random.Random(seed)
    found: list[Round] = []
    for n in range(posts):
        sends = [(rank, kind) for rank in range(world_size) for kind in (message, GradMessage) if chance.random() < 0.8]
        found.append(
            [
                Letter(
                    rank,
                    (rank + chance.randrange(1, world_size)) % world_size,
                    kind,
                    (chance.randint(0, most), chance.randint(0, most)),
                    100 * n + i,
                )
                for i, (rank, kind) in enumerate(sends)
            ]
        )
    return found


def reducer(ranks: Ranks, rank: int, rounds: list[Round], chance: random.Random, salt: Callable[[], int]) -> None:
    """One rank's posts; each is waited for before one of the next two, or after all. `salt` is asked on the device."""
    end, streams = ranks.ends[rank], ranks.streams[rank]
    under_way: list[Callable[[], None]] = []
    for n, letters in enumerate(rounds):
        out = [(letter, letter.tensors(0)) for letter in letters if letter.source == rank]
        into = [(letter, letter.tensors(0)) for letter in letters if letter.target == rank]

        def write(out=out, into=into) -> None:
            for letter, tensors in out:
                for x, y in zip(tensors, letter.tensors(salt()), strict=True):
                    x.copy_(y)
            for _, tensors in into:
                for x in tensors:
                    x.fill_(NAN)

        streams.call(write)
        sends = [letter.kind(letter.target, x) for letter, tensors in out for x in tensors]
        receives = [letter.kind(letter.source, x) for letter, tensors in into for x in tensors]
        pending = end.post(sends, receives, f"post {n}")

        def finish_it(pending=pending, out=out, into=into) -> None:
            pending.wait()

            def look() -> None:
                for letter, tensors in into:
                    for x, y in zip(tensors, letter.tensors(salt()), strict=True):
                        assert torch.equal(x, y), f"rank {rank} from {letter.source}"
                for _, tensors in out:
                    for x in tensors:
                        x.fill_(NAN)
                ranks.done()

            streams.call(look)

        under_way.append(finish_it)
        while len(under_way) > 2 or (under_way and chance.random() < 0.5):
            under_way.pop(0)()
    for finish in under_way:
        finish()


def exchange_all(ranks: Ranks, rounds: list[Round], salt: int) -> None:
    ranks.each(lambda rank: reducer(ranks, rank, rounds, random.Random(salt + rank), lambda: salt))


def reserve(ranks: Ranks, most: int, replies: int | None = None) -> None:
    sizes = (most, most if replies is None else replies)
    ranks.each(lambda rank: ranks.ends[rank].reserve(*(10 * n for n in sizes)))


def post(ranks: Ranks, salt: int, most: int) -> None:
    """Posts that overlap, to changing peers."""
    reserve(ranks, most)
    rounds = letters(ranks.world.ranks, 1 + salt % 7, salt, most)
    exchange_all(ranks, rounds, salt)


def zero_copy_kv(ranks: Ranks, shape: Shape, salt: int, name: str) -> None:
    """A model writes its keys where they leave from; they are gathered in the forward and again in the backward."""
    keys = [keys_of(shape, rank, salt) for rank in range(ranks.world.ranks)]
    size = (shape.batch, shape.rows)

    def fill(rank: int) -> None:
        k, v = ranks.ends[rank].zero_copy_kv(name, *size, shape.lengths[rank], shape.heads, shape.dims, shape.dtype)
        ranks.streams[rank].call(lambda: (k.copy_(keys[rank][0]), v.copy_(keys[rank][1])))
        launched = ranks.streams[rank].launches
        for direction in ("forward", "backward"):
            found = ranks.ends[rank].gather(k, v, shape.gather_plans[rank], shape.groups, f"{direction} {salt}")
            run_kernel(ranks, rank, shape, found, keys.__getitem__)
            found.close()
        assert ranks.streams[rank].launches - launched <= 8, "nothing is packed, so nothing is announced apart"

    ranks.each(fill)


class Allocator:
    """Memory of one rank as torch hands it out: what the host lets go is given to work that is enqueued later."""

    def __init__(self, seed: int) -> None:
        self._free: list[Tensor] = []
        self._given: dict[int, Tensor] = {}
        self._random = random.Random(seed)

    def make(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        large = [x for x in self._free if x.numel() >= size]
        if large and self._random.random() < 0.8:
            flat = self._random.choice(large)
            self._free = [x for x in self._free if x is not flat]
        else:
            flat = torch.full((size + 64,), 255, dtype=torch.uint8)
        if size:
            self._given[flat.data_ptr()] = flat
        return flat[:size].view(dtype).view(shape)

    def let_go(self, x: Tensor) -> None:
        if x.numel():
            self._free.append(self._given.pop(x.data_ptr()))


def kept(
    ranks: Ranks, layers: list[Shape], salt: int, name: str | None = None, between: Callable[[], object] = lambda: None
) -> None:
    """Layers that keep what they gather until their backward, which gathers nothing; the last layer's comes first.

    `between` comes in front of the backwards.
    """
    world_size = ranks.world.ranks
    held: list[list[KVGatherHandle]] = [[] for _ in range(world_size)]
    allocators = ranks.__dict__.setdefault("allocators", [Allocator(rank) for rank in range(world_size)])
    for end, allocator in zip(ranks.ends, allocators, strict=True):
        end._make_saved = allocator.make

    def keys_in(layer: int) -> Callable[[int], tuple[Tensor, Tensor]]:
        return lambda owner: keys_of(layers[layer], owner, 31 * salt + layer)

    def go(rank: int, layer: int) -> None:
        shape, end, streams = layers[layer], ranks.ends[rank], ranks.streams[rank]
        gather_plan = shape.gather_plans[rank]
        k, v = keys_in(layer)(rank)
        if name is not None:
            size = shape.batch, shape.rows, shape.lengths[rank], shape.heads
            place = end.zero_copy_kv(f"{name} {layer}", *size, shape.dims, shape.dtype)
            streams.call(lambda: [x.copy_(y) for x, y in zip(place, keys_in(layer)(rank), strict=True)])
            k, v = place
        found = end.gather(k, v, gather_plan, shape.groups, f"forward {layer}", keep=True)
        run_kernel(ranks, rank, shape, found, keys_in(layer), spoil=False)
        found.close()
        held[rank].append(found)

    def come_back(rank: int, layer: int) -> None:
        shape, end = layers[layer], ranks.ends[rank]
        found = held[rank].pop()
        far = dataclasses.make_dataclass("Handle", ["remote", "ready_flags"])(
            found.saved, end.saved_ready_flags(shape.gather_plans[rank], shape.groups)
        )
        launched = ranks.streams[rank].launches

        def begin(home: Any) -> Any:
            home.begin()
            return far

        send_home(ranks, rank, shape, 31 * salt + layer, begin, keys_in(layer))
        assert ranks.streams[rank].launches - launched == 3, (
            "a backward of kept keys says three things and fetches nothing"
        )
        allocators[rank].let_go(found.saved)

    for layer in range(len(layers)):
        ranks.each(go, layer)
    between()
    for layer in reversed(range(len(layers))):
        ranks.each(come_back, layer)


def rounds(ranks: int) -> st.SearchStrategy[list[tuple[str, Shape]]]:
    kinds = st.sampled_from(["gather", "home", "post", "lend a", "lend b", "kept", "kept in place", "poison"])
    return st.lists(st.tuples(kinds, shapes(ranks)), min_size=1, max_size=8)


def play(ranks: Ranks, kind: str, shape: Shape, salt: int) -> None:
    if kind == "gather":
        gather(ranks, shape, salt)
    elif kind == "home":
        come_home(ranks, shape, salt)
    elif kind == "post":
        post(ranks, salt, shape.rows)
    elif kind.startswith("kept"):
        kept(ranks, [shape] * (1 + salt % 3), salt, "kept" if kind == "kept in place" else None)
    elif kind == "poison":
        ranks.each(lambda rank: poison_transport(ranks.ends[rank]))
    else:
        zero_copy_kv(ranks, shape, salt, kind)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), world_size=st.integers(2, 5), seed=st.integers(0, 2**32))
def test_every_kernel_sees_the_owners_rows_in_any_interleaving(data: st.DataObject, world_size: int, seed: int) -> None:
    ranks = Ranks(world_size, seed)
    for salt, (kind, shape) in enumerate(data.draw(rounds(world_size))):
        for again in range(data.draw(st.sampled_from([1, 1, 3]))):
            play(ranks, kind, shape, 10 * salt + again)
    ranks.world.drain()


@settings(max_examples=20, deadline=None)
@given(data=st.data(), world_size=st.integers(2, 4), seed=st.integers(0, 2**32))
def test_a_captured_call_is_replayed_any_number_of_times_between_others(
    data: st.DataObject, world_size: int, seed: int
) -> None:
    ranks = Ranks(world_size, seed)
    shape, other = data.draw(shapes(world_size)), data.draw(shapes(world_size))
    gather(ranks, shape, 0)
    gather(ranks, other, 1)
    come_home(ranks, shape, 2)
    inputs = [keys_of(shape, rank, 0) for rank in range(world_size)]
    biases = [bias_of(shape, rank, 0).clone() for rank in range(world_size)]
    now = [0] * world_size

    def call(rank: int) -> None:
        end, gather_plan = ranks.ends[rank], shape.gather_plans[rank]
        bias = biases[rank] if shape.biased else None
        size = (shape.batch, shape.heads, sum(shape.dims))
        coming = end.grad_return(size, gather_plan, "captured", biased=shape.biased)
        found = end.gather(*inputs[rank], gather_plan, shape.groups, "captured", key_bias=bias, grad_return=coming)
        expected = (lambda owner: bias_of(shape, owner, now[rank])) if shape.biased else None
        run_kernel(ranks, rank, shape, found, lambda owner: keys_of(shape, owner, now[rank]), biases=expected)
        send_marks_home(ranks, rank, gather_plan, coming, now)

    recordings = ranks.capture(call)
    # branches of a graph that share a queue stand there in the order of their capture
    ranks.world.drain()
    ranks.world.shared = data.draw(st.booleans())
    for salt in range(3, 3 + data.draw(st.integers(1, 5))):
        if data.draw(st.booleans()):
            gather(ranks, other, salt)

        def refresh(rank: int, salt: int = salt) -> None:
            now[rank] = salt
            for x, y in zip(inputs[rank], keys_of(shape, rank, salt), strict=True):
                x.copy_(y)
            biases[rank].copy_(bias_of(shape, rank, salt))

        ranks.each(lambda rank, refresh=refresh: ranks.streams[rank].call(lambda: refresh(rank)))
        ranks.replay(recordings)
    gather(ranks, other, 50)
    ranks.world.drain()


def send_marks_home(ranks: Ranks, rank: int, gather_plan: GatherPlan, coming: Any, now: list[int]) -> None:
    """One number that tells its call, sender and step to every owner, in place of all gradients."""
    streams = ranks.streams[rank]
    for address, fetch in zip(coming.addresses[1:].tolist(), gather_plan.recvs, strict=True):
        mark = torch.zeros(1)

        def send(mark: Tensor = mark, address: int = address, step: int = fetch.step) -> None:
            mark.fill_(100 * now[rank] + 10 * rank + step)
            ctypes.memmove(address, mark.data_ptr(), 4)

        streams.call(send)
    regions, _ = coming.receive()

    def add() -> None:
        for region, reader in zip(regions, gather_plan.sends, strict=True):
            assert region.flatten()[0] == 100 * now[rank] + 10 * reader.peer + reader.step
            region.fill_(NAN)
        ranks.done()

    streams.call(add)
    coming.close()


class Again:
    """Forwards and backwards whose tensors stay where they are; what is in them is something else at each call."""

    def __init__(self, ranks: Ranks, shape: Shape) -> None:
        self.ranks = ranks
        self.shape = shape
        keys = [keys_of(shape, rank, 0) for rank in range(ranks.world.ranks)]
        self.inputs = [(k.clone(), v.clone()) for k, v in keys]
        self.now = [0] * ranks.world.ranks
        self.enqueued = [0] * ranks.world.ranks

    def reserve_gather(self) -> Again:
        """Buffers are large enough for all calls, which begin anew where one grows."""
        gather(self.ranks, self.shape, 60)
        come_home(self.ranks, self.shape, 61)
        return self

    def call(self, rank: int, salt: int, *, backward: bool) -> None:
        def refresh() -> None:
            self.now[rank] = salt
            for x, y in zip(self.inputs[rank], keys_of(self.shape, rank, salt), strict=True):
                x.copy_(y)

        self.ranks.streams[rank].call(refresh)
        enqueue = self.come_back if backward else self.forward
        self.ranks.ends[rank].replay_or_enqueue(("again", self, backward), self.inputs[rank], (), lambda: enqueue(rank))

    def forward(self, rank: int, home: Any = None) -> KVGatherHandle:
        self.enqueued[rank] += 1
        shape = self.shape
        found = self.ranks.ends[rank].gather(
            *self.inputs[rank], shape.gather_plans[rank], shape.groups, "again", grad_return=home
        )
        run_kernel(self.ranks, rank, shape, found, lambda owner: keys_of(shape, owner, self.now[rank]))
        if home is None:
            found.close()
        return found

    def come_back(self, rank: int) -> None:
        shape, gather_plan = self.shape, self.shape.gather_plans[rank]
        size = (shape.batch, shape.heads, sum(shape.dims))
        coming = self.ranks.ends[rank].grad_return(size, gather_plan, "again")
        self.forward(rank, coming)
        send_marks_home(self.ranks, rank, gather_plan, coming, self.now)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), world_size=st.integers(2, 4), seed=st.integers(0, 2**32))
def test_calls_that_come_again_are_right_whichever_ranks_repeat_them(
    data: st.DataObject, world_size: int, seed: int
) -> None:
    ranks = Ranks(world_size, seed)
    agains = [Again(ranks, data.draw(shapes(world_size))) for _ in range(data.draw(st.integers(1, 3)))]
    ways = st.tuples(st.sampled_from(agains), st.booleans())
    salt = 0
    for _ in range(data.draw(st.integers(1, 3))):
        steps = data.draw(st.lists(ways, min_size=1, max_size=3))
        for _ in range(data.draw(st.integers(1, 6))):
            for again, backward in steps:
                salt += 1
                ranks.each(again.call, salt, backward=backward)
            if data.draw(st.booleans()):
                # one rank begins anew
                ranks.ends[data.draw(st.integers(0, world_size - 1))]._graphs.clear()
        for kind, shape in data.draw(rounds(world_size))[: data.draw(st.integers(0, 2))]:
            salt += 1
            play(ranks, kind, shape, salt)
        if data.draw(st.booleans()):
            ranks.world.drain()
            ranks.world.shared = data.draw(st.booleans())
    ranks.world.drain()


@pytest.mark.parametrize("backward", [False, True])
def test_a_call_is_enqueued_piece_by_piece_twice_and_recorded_once_for_each_turn(backward: bool) -> None:
    ranks = Ranks(3, 0)
    again = Again(ranks, full(3)).reserve_gather()
    for salt in range(1, 9):
        ranks.each(again.call, salt, backward=backward)
    ranks.world.drain()
    assert again.enqueued == [2 + 1 + backward] * 3
    before = [streams.launches for streams in ranks.streams]
    ranks.each(again.call, 9, backward=backward)
    ranks.world.drain()
    assert [streams.launches for streams in ranks.streams] == [count + 1 for count in before]


@pytest.mark.parametrize(
    ("how", "enqueued"), [("nothing", 0), ("growing", 4), ("lending", 4), ("closing", 5), ("poison", 1), ("another", 1)]
)
def test_graphs_are_dropped_with_the_memory_they_use(how: str, enqueued: int) -> None:
    """Rows, guard rows and contributions are looked at in every call of these."""
    ranks = Ranks(3, 0)
    big = full(3, rows=6)
    Again(ranks, big).reserve_gather()
    again, salt = Again(ranks, full(3)), itertools.count(1)

    def some(count: int) -> list[int]:
        again.enqueued = [0] * 3
        for number in itertools.islice(salt, count):
            ranks.each(again.call, number, backward=True)
        ranks.world.drain()
        return again.enqueued

    assert some(6) == [4] * 3
    if how == "growing":
        gather(ranks, full(3, rows=100), 51)
    elif how == "lending":
        zero_copy_kv(ranks, big, 52, "buffer")
    elif how == "closing":
        ranks.each(lambda rank: ranks.ends[rank].close())
    elif how == "poison":
        ranks.each(lambda rank: poison_transport(ranks.ends[rank]))
    elif how == "another":
        gather(ranks, big, 53)
    # guard rows of another layout are cleared by one more graph; after closing the first call makes memory once more
    assert some(6) == [enqueued] * 3
    if how == "another":
        gather(ranks, big, 54)
        assert some(6) == [0] * 3


@pytest.mark.parametrize("early", [False, True])
def test_a_call_that_cannot_be_recorded_is_enqueued_piece_by_piece(
    monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    ranks = Ranks(2, 0)
    again = Again(ranks, full(2)).reserve_gather()
    receive = copy_engine._CopyEngineGradReturn.receive

    def refuse(work: Callable[[], object]) -> None:
        FakeStreams.record(ranks.streams[1], work)
        raise RuntimeError("no memory")

    def break_off(coming: Any) -> Any:
        if coming._transport is ranks.ends[1] and ranks.streams[1].capturing():
            raise RuntimeError("a call that no capture takes")
        return receive(coming)

    if early:
        monkeypatch.setattr(copy_engine._CopyEngineGradReturn, "receive", break_off)
    else:
        monkeypatch.setattr(ranks.streams[1], "record", refuse)
    for salt in range(1, 9):
        ranks.each(again.call, salt, backward=True)
    ranks.world.drain()
    assert again.enqueued == [4, 9]


def test_graphs_are_made_as_long_as_they_are_repaid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_cache, "FREE", 2)
    ranks = Ranks(2, 0)
    agains = [Again(ranks, full(2)).reserve_gather() for _ in range(4)]

    def some(again: Again, count: int) -> int:
        for _ in range(count):
            ranks.each(again.call, 1, backward=False)
        ranks.world.drain()
        return again.enqueued[0]

    # two are free; the third is made when both together were launched four times
    assert [some(agains[0], 3), some(agains[1], 3), some(agains[2], 5)] == [3, 3, 5]
    assert some(agains[0], 2) == 3
    assert some(agains[2], 3) == 6
    assert some(agains[3], 5) == 5


def test_an_open_gather_is_closed_outside_of_graphs() -> None:
    """Each launch of it would close it again."""
    ranks = Ranks(2, 0)
    again = Again(ranks, full(2)).reserve_gather()

    def leave_open(rank: int) -> None:
        ranks.ends[rank].grad_return((1, 2, 4), again.shape.gather_plans[rank], "left").begin()

    for salt in range(1, 9):
        if salt == 3:
            ranks.each(leave_open)
        ranks.each(again.call, salt, backward=True)
    ranks.world.drain()
    assert again.enqueued == [2 + 1 + 2] * 2


def test_a_callers_own_capture_enqueues_piece_by_piece() -> None:
    ranks = Ranks(2, 0)
    again = Again(ranks, full(2)).reserve_gather()
    for salt in range(1, 6):
        ranks.each(again.call, salt, backward=False)
    recordings = ranks.capture(again.call, 6, backward=False)
    for salt in range(7, 12):
        ranks.each(again.call, salt, backward=False)
        ranks.replay(recordings)
    ranks.world.drain()
    # once more: behind somebody's graph nobody knows which guard rows are zero
    assert again.enqueued == [3 + 1 + 1] * 2


@settings(max_examples=20, deadline=None)
@given(world_size=st.integers(2, 4), seed=st.integers(0, 2**32), backward=st.booleans(), late=st.integers(0, 150))
def test_survivors_of_a_rank_that_is_lost_in_a_call_that_came_again_end_in_nan(
    world_size: int, seed: int, backward: bool, late: int
) -> None:
    ranks = Ranks(world_size, seed)
    attention = Attention(ranks, full(world_size))

    def attend(rank: int) -> None:
        enqueue = lambda: attention.attend(rank, 1, backward=backward)  # noqa: E731
        ranks.ends[rank].replay_or_enqueue(("attend",), (), (), enqueue)

    for _ in range(5):
        ranks.each(attend)
    ranks.world.drain()
    for tiles in attention.results.values():
        tiles.clear()
    ranks.each(attend)
    alive = ranks.lose_one(late)
    for _ in range(2):
        ranks.each(attend)
    get_out(ranks, alive)
    for rank in alive:
        assert ranks.ends[rank].watchdog.failure is not None
        tiles = attention.results[rank, 1]
        assert len(tiles) % (world_size - 1) == 0
        assert tiles[-1] != tiles[-1]
        with pytest.raises(RuntimeError, match="rank"):
            attend(rank)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), world_size=st.integers(2, 6), seed=st.integers(0, 2**32), most=st.integers(1, 30))
def test_a_message_is_read_before_its_box_is_used_again(
    data: st.DataObject, world_size: int, seed: int, most: int
) -> None:
    ranks = Ranks(world_size, seed)
    graphs: list[tuple[list[Recording], list[int]]] = []
    reserve(ranks, most)
    kinds = st.lists(
        st.tuples(st.sampled_from(["post", "post", "capture", "replay", "gather"]), st.integers(0, 99)), max_size=12
    )
    for salt, (kind, plan) in enumerate(data.draw(kinds)):
        rounds = letters(world_size, 1 + plan % 6, plan, most)
        if kind == "post":
            exchange_all(ranks, rounds, salt)
        elif kind == "gather":
            gather(ranks, full(world_size), salt)
        elif kind == "capture":
            now = [0] * world_size

            def call(rank: int, now=now, rounds=rounds, plan=plan) -> None:
                reducer(ranks, rank, rounds, random.Random(plan + rank), lambda: now[rank])

            graphs.append((ranks.capture(call), now))
        elif graphs:
            recordings, now = graphs[plan % len(graphs)]
            for rank, streams in enumerate(ranks.streams):
                streams.call(lambda rank=rank, now=now, salt=salt: now.__setitem__(rank, salt))
            ranks.replay(recordings)
    ranks.world.drain()


@settings(max_examples=20, deadline=None)
@given(world_size=st.integers(2, 4), seed=st.integers(0, 2**32))
def test_a_gather_may_begin_between_a_post_and_its_wait(world_size: int, seed: int) -> None:
    """Both start the side stream by one word, which it must have taken in between."""
    ranks, shape = Ranks(world_size, seed), full(world_size)
    reserve(ranks, 5)
    gather(ranks, shape, 0)
    alive: list[Tensor] = []

    def one(rank: int, salt: int) -> None:
        end, before = ranks.ends[rank], (rank - 1) % world_size
        sent, received = torch.full((5,), float(10 * salt + rank)), torch.full((5,), NAN)
        alive.extend((sent, received))
        pending = end.post([((rank + 1) % world_size, sent)], [(before, received)], f"post {salt}")
        found = end.gather(*keys_of(shape, rank, salt), shape.gather_plans[rank], 1, f"gather {salt}")
        run_kernel(ranks, rank, shape, found, lambda owner: keys_of(shape, owner, salt))
        found.close()
        pending.wait()

        def look() -> None:
            assert bool((received == 10 * salt + before).all())

        ranks.streams[rank].call(look)

    for salt in range(1, 4):
        ranks.each(one, salt)
    ranks.world.drain()


def test_memory_of_posts_does_not_depend_on_the_number_of_ranks() -> None:
    held = []
    for world_size in (2, 4, 8):
        ranks = Ranks(world_size, 0)
        before = transport_bytes(ranks.ends[0])
        reserve(ranks, 10_000, 20_000)
        rounds = letters(world_size, 8, 1, 10_000)
        exchange_all(ranks, rounds, 1)
        ranks.world.drain()
        held.append(transport_bytes(ranks.ends[world_size - 1]) - before)
    assert held[0] == held[1] == held[2]
    assert 2 * (100_000 + 200_000) <= held[0] < 1.02 * 2 * (100_000 + 200_000)


def test_without_gradient_messages_only_plain_ones_have_outboxes() -> None:
    ranks = Ranks(2, 0)
    reserve(ranks, 10_000, 0)
    assert 2 * 100_000 <= transport_bytes(ranks.ends[0]) < 2.05 * 100_000


def test_a_post_to_two_peers_is_refused_before_anything_moves() -> None:
    ranks, x = Ranks(3, 0), torch.zeros(4)
    reserve(ranks, 10)
    for kind in (message, GradMessage):
        with pytest.raises(RuntimeError, match=r"to one peer at most, got ring ranks \[1, 2\]; make more posts"):
            ranks.ends[0].post([kind(1, x), kind(2, x)], [], "too many")
    assert not ranks.world.busy()


def full(ranks: int, groups: int = 1, rows: int = 4, **fields: Any) -> Shape:
    """Contiguous shards, of which everybody reads everybody's, but for what a mask of some fields hides."""
    n = rows * ranks
    return shape_over(make_shards("contiguous", n, ranks), ShortMask(n, n, **fields), groups)


def shape_over(shards: tuple[Shard, ...], mask: ShortMask, groups: int = 1) -> Shape:
    plan = make_plan(shards, shards, mask, "keys")
    gather_plans = tuple(make_gather_plan(plan, rank, 4) for rank in range(len(shards)))
    lengths = tuple(shard_len(shard) for shard in shards)
    return Shape(1, 2, (2, 2), groups, gather_plans, lengths, torch.float32)


def let_time_pass(ranks: Ranks, awake: list[int], rounds: int = 400) -> bool:
    """Time goes on until the devices of these ranks have nothing left to do, which may be never while another one sleeps."""
    now = 0.0
    for _ in range(rounds):
        if not any(ranks.world.busy(rank) for rank in awake):
            return True
        ranks.world.some_steps(30)
        # kernels always run while a ring stands still; here they are given the chance
        now += 1.0 if any(ranks.ends[rank].watchdog.failure is None for rank in awake) else 0.001
        for rank in awake:
            ranks.ends[rank].watchdog.poll(now)
    return False


def get_out(ranks: Ranks, alive: list[int]) -> None:
    assert let_time_pass(ranks, alive, 4000), [ranks.ends[rank].watchdog.failure for rank in alive]


@settings(max_examples=20, deadline=None)
@given(
    world_size=st.integers(2, 4),
    seed=st.integers(0, 2**32),
    groups=st.sampled_from([1, 2]),
    calls=st.integers(1, 3),
    backward=st.booleans(),
    late=st.integers(0, 120),
)
def test_survivors_of_a_lost_rank_end_in_nan_and_refuse_further_calls(
    world_size: int, seed: int, groups: int, calls: int, backward: bool, late: int
) -> None:
    ranks = Ranks(world_size, seed)
    shape = full(world_size, groups)
    come_home(ranks, shape, 0)
    ranks.world.drain()
    calls_of = Attention(ranks, shape)
    ranks.each(calls_of.attend, 1, backward=backward)
    alive = ranks.lose_one(late)
    for salt in range(2, 2 + calls):
        ranks.each(calls_of.attend, salt, backward=backward)
    get_out(ranks, alive)
    for rank in alive:
        failure = ranks.ends[rank].watchdog.failure
        assert failure is not None
        assert f"ring rank {rank} of ring 'ring'" in failure
        with pytest.raises(RuntimeError, match="this ring can not be used any more"):
            ranks.ends[rank].gather(*keys_of(shape, rank, 9), shape.gather_plans[rank], 1, "after")
    results = [total for (rank, salt), total in calls_of.results.items() if rank in alive and salt > 2]
    assert all(total[-1] != total[-1] for total in results), "later calls are NaN"


@dataclass
class Attention:
    """Calls on a ring that may fail: whatever they leave is right, or not a number.

    Attributes:
        results: What the tiles of a call ended in, by (rank, salt).
    """

    ranks: Ranks
    shape: Shape
    results: dict[tuple[int, int], list[float]] = dataclasses.field(default_factory=dict)

    def whole_of(self, rank: int, salt: int) -> float:
        """What the kernel of a healthy rank ends with: the sum over the heads of its last fetch's last group."""
        owner, groups = self.shape.gather_plans[rank].recvs[-1].owner, self.shape.groups
        heads = slice(2 * (groups - 1) // groups, 2)
        return float(torch.cat(keys_of(self.shape, owner, salt), -1)[:, :, heads].contiguous().sum())

    def attend(self, rank: int, salt: int, *, backward: bool = False) -> None:
        """A kernel whose tiles end in NaN where the error word is set, and else in the sum of what they read."""
        ranks, shape = self.ranks, self.shape
        streams, end, gather_plan, groups = (
            ranks.streams[rank],
            ranks.ends[rank],
            shape.gather_plans[rank],
            shape.groups,
        )
        coming = end.grad_return((1, 2, 4), gather_plan, "gradients") if backward else None
        found = end.gather(
            *keys_of(shape, rank, salt), gather_plan, shape.groups, f"attention {salt}", grad_return=coming
        )
        ready_flags = found.ready_flags
        assert ready_flags is not None
        total: list[float] = []
        for g in range(shape.groups):
            for fetch in gather_plan.recvs:
                heads = slice(g * 2 // groups, (g + 1) * 2 // groups)

                def look(seen: Tensor | None, heads: slice = heads, fetch: RecvSpec = fetch) -> None:
                    mine = torch.cat(keys_of(shape, fetch.owner, salt), -1)[:, :, heads]
                    assert seen is None or torch.equal(seen, mine), "a number that could be taken for a result"
                    total.append(NAN if seen is None else float(seen.sum()))

                rows = found.remote[:, fetch.at : fetch.at + 4, heads]
                read_tile(streams, ready_flags, ready_flags.flags[g, fetch.step].data_ptr(), rows, look)
        if coming is not None:

            def send() -> None:
                value = total[-1] if total else 0.0
                coming.local_grads.fill_(value)
                mark = torch.full((1,), value)
                for address in coming.addresses[1:].tolist():
                    ctypes.memmove(address, mark.data_ptr(), 4)

            streams.call(send)
        if coming is None:
            found.close()
        else:
            regions, _ = coming.receive()

            def add() -> None:
                parts = [float(coming.local_grads.flatten()[0]), *(float(region.flatten()[0]) for region in regions)]
                expected = [self.whole_of(reader.peer, salt) for reader in gather_plan.sends]
                whole = sum(parts)
                assert whole != whole or parts[1:] == expected, "a gradient that could be taken for a result"
                for region in regions:
                    region.fill_(0.5)

            streams.call(add)
            coming.close()
        self.results[rank, salt] = total


@settings(max_examples=20, deadline=None)
@given(
    world_size=st.integers(2, 4),
    seed=st.integers(0, 2**32),
    groups=st.sampled_from([1, 2]),
    backward=st.booleans(),
    late=st.integers(0, 150),
)
def test_survivors_of_a_rank_that_is_lost_in_a_replay_end_in_nan(
    world_size: int, seed: int, groups: int, backward: bool, late: int
) -> None:
    """As without graphs, whose streams are joined by events that no word lets go."""
    ranks = Ranks(world_size, seed)
    attention = Attention(ranks, full(world_size, groups))
    ranks.each(attention.attend, 1, backward=backward)
    ranks.world.drain()
    recordings = ranks.capture(attention.attend, 1, backward=backward)
    ranks.replay(recordings)
    alive = ranks.lose_one(late)
    ranks.replay(recordings)
    ranks.replay(recordings)
    get_out(ranks, alive)
    for rank in alive:
        assert ranks.ends[rank].watchdog.failure is not None
        tiles = attention.results[rank, 1]
        assert len(tiles) == 3 * groups * (world_size - 1), "every tile of every replay ends"
        assert tiles[-1] != tiles[-1]


@settings(max_examples=30, deadline=None)
@given(
    world_size=st.integers(2, 4),
    seed=st.integers(0, 2**32),
    groups=st.sampled_from([1, 2]),
    calls=st.integers(2, 4),
    late=st.integers(0, 250),
    loses=st.booleans(),
)
def test_rows_of_a_later_call_are_never_taken_for_those_of_this_one(
    world_size: int, seed: int, groups: int, calls: int, late: int, loses: bool
) -> None:
    """A reader sleeps in its kernel until others have given it up, let their pushes go, and overwritten what it reads."""
    ranks = Ranks(world_size, seed)
    world, shape, slow = ranks.world, full(world_size, groups), 0
    attention = Attention(ranks, shape)
    gather(ranks, shape, 0)
    world.drain()
    for salt in range(1, 1 + calls):
        ranks.each(attention.attend, salt)
    for _ in range(late):
        world.step()
    world.asleep.add((slow, MAIN))
    if loses and world_size > 2:
        world.dead.add(world_size - 1)
    awake = [rank for rank in range(1, world_size) if rank not in world.dead]
    let_time_pass(ranks, awake)
    assert ranks.ends[slow].watchdog.failure is None
    world.asleep.clear()
    get_out(ranks, [slow, *awake])
    for rank, salt in attention.results:
        if rank == slow or rank in awake:
            assert len(attention.results[rank, salt]) == groups * (world_size - 1), "every tile ends"


def test_a_transport_that_saved_rows_is_freed_when_it_is_dropped() -> None:
    ranks = Ranks(2, 0)
    shape, held = full(2), []

    def keep(rank: int) -> None:
        inputs = keys_of(shape, rank, 0)
        found = ranks.ends[rank].gather(*inputs, shape.gather_plans[rank], 1, "forward", keep=True)
        found.close()
        held.append((found.saved, inputs))

    ranks.each(keep)
    ranks.world.drain()
    gone = weakref.ref(ranks.ends[0])
    ranks.ends.clear()
    assert gone() is None


class Keeping:
    """Layers that keep what they gather, on a ring that may fail: a gradient is right, or not a number."""

    def __init__(self, ranks: Ranks, shape: Shape) -> None:
        self.ranks, self.shape = ranks, shape
        self._held: list[KVGatherHandle] = []
        self._brought: dict[tuple[int, int], Tensor] = {}
        kept(ranks, [shape], 0)
        ranks.world.drain()
        for end in ranks.ends:
            del end._make_saved

    def forward(self, rank: int, layer: int) -> None:
        shape, end = self.shape, self.ranks.ends[rank]
        found = end.gather(*keys_of(shape, rank, layer), shape.gather_plans[rank], 1, "forward", keep=True)
        assert found.saved is not None
        self._brought.setdefault((rank, layer), found.saved)
        self._held.append(found)  # alive until the end: here nothing of the device's work holds what it writes into
        run_kernel(self.ranks, rank, shape, found, lambda owner: keys_of(shape, owner, layer), spoil=False)
        found.close()

    def backward(self, rank: int, layer: int) -> None:
        shape, ranks = self.shape, self.ranks
        streams, end, gather_plan = ranks.streams[rank], ranks.ends[rank], shape.gather_plans[rank]
        ready_flags = end.saved_ready_flags(gather_plan, 1)
        assert ready_flags is not None
        coming = end.grad_return((1, 2, 4), gather_plan, "gradients")
        coming.begin()
        found: list[float] = []
        value = float(10 * layer + rank + 1)
        brought = self._brought[rank, layer]

        def look() -> None:
            lost_rows = bool((ready_flags.flags[0] < 0).any()) or bool(ready_flags.error)
            found.append(NAN if lost_rows else value)
            for fetch in gather_plan.recvs:
                rows = brought[:, fetch.at : fetch.at + 4]
                assert lost_rows or torch.equal(rows, torch.cat(keys_of(shape, fetch.owner, layer), -1))

        def send(address: int) -> None:
            mark = torch.tensor(found)
            ctypes.memmove(address, mark.data_ptr(), 4)

        streams.call(look)
        streams.call(lambda: coming.local_grads.fill_(found[0]))
        for address in coming.addresses[1:].tolist():
            streams.call(lambda address=address: send(address))
        regions, _ = coming.receive()

        def add() -> None:
            parts = [float(coming.local_grads.flatten()[0]), *(float(region.flatten()[0]) for region in regions)]
            expected = [value, *(float(10 * layer + reader.peer + 1) for reader in gather_plan.sends)]
            assert sum(parts) != sum(parts) or parts == expected, "a gradient that could be taken for a result"
            ranks.done()

        streams.call(add)
        coming.close()


@settings(max_examples=30, deadline=None)
@given(world_size=st.integers(2, 4), seed=st.integers(0, 2**32), layers=st.integers(1, 4), late=st.integers(0, 200))
def test_no_number_leaves_a_failed_ring_from_kept_rows(world_size: int, seed: int, layers: int, late: int) -> None:
    ranks = Ranks(world_size, seed)
    calls = Keeping(ranks, full(world_size))
    for layer in range(layers):
        ranks.each(calls.forward, layer)
    ranks.each(calls.backward, layers - 1)
    alive = ranks.lose_one(late)
    for layer in reversed(range(layers - 1)):
        ranks.each(calls.backward, layer)
    ranks.each(calls.forward, 0)
    get_out(ranks, alive)
    assert all(ranks.ends[rank].watchdog.failure for rank in alive)


@settings(max_examples=30, deadline=None)
@given(world_size=st.integers(2, 4), seed=st.integers(0, 2**32), steps=st.integers(1, 3), copied=st.integers(0, 3))
def test_kept_rows_that_were_overwritten_are_never_taken_for_a_layers_own(
    world_size: int, seed: int, steps: int, copied: int
) -> None:
    """A herald sleeps over its copy until others have given its rank up, let their pushes go, and overwritten the rows."""
    ranks = Ranks(world_size, seed)
    world, calls, slow = ranks.world, Keeping(ranks, full(world_size)), 0
    flag_stream = world.queues[slow, FLAG]
    ranks.each(calls.forward, 0)
    while flag_stream and flag_stream[0].what != "copy":
        world.step()
    for _ in range(min(copied, len(flag_stream))):
        flag_stream.popleft().run()
    world.asleep.add((slow, FLAG))
    ranks.each(calls.backward, 0)
    for layer in range(1, 1 + steps):
        ranks.each(calls.forward, layer)
        ranks.each(calls.backward, layer)
    let_time_pass(ranks, list(range(1, world_size)))
    world.asleep.clear()
    get_out(ranks, list(range(world_size)))


@settings(max_examples=20, deadline=None)
@given(world_size=st.integers(2, 4), seed=st.integers(0, 2**32))
def test_rows_that_a_lost_rank_never_sent_are_nan(world_size: int, seed: int) -> None:
    ranks = Ranks(world_size, seed)
    post(ranks, 0, 5)
    ranks.world.drain()
    alive, lost = ranks.lose_one(), world_size - 1
    received: dict[int, list[tuple[int, Tensor]]] = {}
    sent: list[Tensor] = []  # alive until it has left

    def one(rank: int) -> None:
        after, before = (rank + 1) % world_size, (rank - 1) % world_size
        empty = torch.zeros(2, 5, dtype=torch.float64)
        received[rank] = [(before, empty[0]), GradMessage(after, empty[1])]
        mine = torch.full((5,), float(rank), dtype=torch.float64)
        sent.append(mine)
        sends = [(after, mine), GradMessage(before, mine)]
        pending = ranks.ends[rank].post(sends, received[rank], "step 3")
        pending.wait()

        def look() -> None:
            for peer, x in received[rank]:
                assert x.isnan().all() or bool((x == peer).all())

        ranks.streams[rank].call(look)

    ranks.each(one)
    get_out(ranks, alive)
    for rank, messages in received.items():
        assert all(x.isnan().all() for peer, x in messages if peer == lost)
        failure = ranks.ends[rank].watchdog.failure
        # who neither sends to the lost rank nor receives from it may be through
        assert failure is not None or all(peer != lost for peer, _ in messages)
        assert failure is None or "step 3" in failure


@pytest.mark.parametrize("groups", [1, 2])
def test_the_missing_rank_and_step_are_named(groups: int) -> None:
    ranks, shape = Ranks(3, 0), full(3, groups)
    gather(ranks, shape, 0)
    ranks.world.drain()
    alive = ranks.lose_one()
    gather(ranks, shape, 1)
    get_out(ranks, alive)
    failures = [ranks.ends[rank].watchdog.failure or "" for rank in (0, 1)]
    assert "gather 1: ring step 1, waiting for ring rank 2" in failures[0]
    assert "gather 1: ring step 2, waiting for ring rank 2" in failures[1], "rank 0 is there"
    assert any("ring rank 2: nothing has moved for 10 s" in text for text in failures)


def test_a_reader_that_gives_no_turn_is_named_behind_those_that_gave_theirs() -> None:
    """Rank 0 reads nobody; it lets rank 1 begin with rank 2, and is read by ranks 2 and 3; nobody reads rank 3, which is lost."""
    mask = ShortMask(seq_len=16, kv_len=16, causal=True, documents=(0, 8, 16))
    starts = ((0, 2), (10, 12), (4, 8), (6, 14))
    shards = tuple(tuple(Run(start, 1, 2) for start in pair) for pair in starts)
    ranks, shape = Ranks(4, 0), shape_over(shards, mask)
    assert shape.gather_plans[0].skipped == (1, 2)
    assert [reader.peer for reader in shape.gather_plans[0].sends] == [2, 3]
    gather(ranks, shape, 0)
    ranks.world.drain()
    alive = ranks.lose_one()
    gather(ranks, shape, 1)  # for which rank 3 had made room
    gather(ranks, shape, 2)
    get_out(ranks, alive)
    assert "gather 2: ring step 3, waiting for its turn at ring rank 3" in (ranks.ends[0].watchdog.failure or "")


def test_a_kernel_that_gave_up_alone_leaves_the_next_call_alone() -> None:
    ranks, shape = Ranks(2, 0), full(2)
    for salt in range(3):
        for end in ranks.ends:
            end._error.fill_(1)
        gather(ranks, shape, salt)
        ranks.world.drain()
    assert ranks.checked == 6


@pytest.mark.parametrize("world_size", [2, 4])
def test_streams_that_share_a_queue_never_wait_for_later_work(world_size: int) -> None:
    for seed in range(5):
        ranks, shape = Ranks(world_size, seed), full(world_size, 2)
        ranks.world.shared = True
        for salt, kind in enumerate(("gather", "home", "kept", "lend a", "post", "gather", "kept in place", "home")):
            play(ranks, kind, shape, salt)
        ranks.world.drain()


@pytest.mark.parametrize(("captured", "forward", "backward"), [(False, 4, 5), (True, 6, 7)])
def test_a_call_costs_the_driver_few_batches_of_words(captured: bool, forward: int, backward: int) -> None:
    """What the caller's stream says next to each other is said at once; two streams beside it have one program each."""
    ranks, shape = Ranks(2, 0), full(2)
    come_home(ranks, shape, 1)
    ranks.world.drain()

    def count(rank: int) -> None:
        streams, end, gather_plan = ranks.streams[rank], ranks.ends[rank], shape.gather_plans[rank]
        streams.recording = Recording() if captured else None
        inputs = keys_of(shape, rank, 0)
        for home, expected in ((False, forward), (True, backward)):
            before = streams.launches
            coming = end.grad_return((1, 2, 4), gather_plan, "gradients") if home else None
            found = end.gather(*inputs, gather_plan, 1, "counted", grad_return=coming)
            if coming is None:
                found.close()
            else:
                coming.receive()
                coming.close()
            assert streams.launches - before == expected
        streams.recording = None

    ranks.each(count)


def test_a_rank_without_returned_gradients_passes_its_turn_on() -> None:
    """Rank 0 shares no document with others, and is the nearest owner of rank 1."""
    ranks, shape = Ranks(3, 0), full(3, documents=(0, 4, 12))
    alone = shape.gather_plans[0]
    assert (alone.recvs, alone.sends, alone.skipped) == ((), (), (1, 2))
    for salt in range(4):
        come_home(ranks, shape, salt)
        ranks.world.drain()
        assert not any(end.watchdog._progress[PLACE] % PLACES for end in ranks.ends), "nobody is on the ring any more"


def test_a_return_of_gradients_that_never_began_leaves_the_next_one_alone() -> None:
    ranks, shape = Ranks(3, 0), full(3)
    come_home(ranks, shape, 1)

    def forget(rank: int) -> None:
        ranks.ends[rank].grad_return((1, 2, 4), shape.gather_plans[rank], "forgotten")

    ranks.each(forget)
    for salt in range(2, 6):
        come_home(ranks, shape, salt)
    ranks.world.drain()


def test_a_busy_ring_never_fails() -> None:
    ranks, shape = Ranks(2, 0), full(2)
    for salt in range(40):
        gather(ranks, shape, salt)
        ranks.world.drain()
        for end in ranks.ends:
            end.watchdog.poll(9.0 * salt)
            assert end.watchdog.failure is None


def test_a_zero_copy_slot_has_the_rows_of_its_sharding() -> None:
    ranks = Ranks(2, 0)
    for salt, lengths in enumerate([(7, 6), (7, 7), (7, 6)]):
        found: dict[int, tuple[Tensor, Tensor]] = {}

        def ask(rank: int, found: dict[int, Any] = found, lengths: tuple[int, ...] = lengths) -> None:
            found[rank] = ranks.ends[rank].zero_copy_kv("layer", 1, 7, lengths[rank], 2, (2, 3), torch.float32)

        ranks.each(ask)
        for rank, (k, v) in found.items():
            assert (k.shape, v.shape) == ((1, lengths[rank], 2, 2), (1, lengths[rank], 2, 3)), salt


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_contributions_never_come_before_those_of_the_backward_before_last_are_added(seed: int) -> None:
    ranks = Ranks(2, seed)
    shape = full(2, causal=True)  # rank 0 reads nothing of rank 1, and so nothing but words holds rank 1 up
    kept(ranks, [shape] * 3, 0, between=lambda: come_home(ranks, shape, 100))
    ranks.world.drain()


def test_a_kernel_that_starts_after_the_failure_finds_the_error_word_set() -> None:
    """Its packing resets the word, and its flags rise once the watchdog lets the other streams run through."""
    ranks, ready = Ranks(1, 0), 7
    written: list[Any] = []
    streams, control, progress = ranks.streams[0], range(100, 120), torch.zeros(HOST_INTS, dtype=torch.int32)
    streams.rescue = written.extend  # type: ignore[method-assign]
    watchdog = Watchdog(0, "ring", progress, tuple(control), streams, 10.0)
    watchdog.recovery.ready.add(ready)
    progress[PLACE], progress[FLAGGING] = KERNEL, 1
    for seconds in (0.0, 1.0, 12.0, 13.0):
        watchdog.poll(seconds)
    assert watchdog.failure is not None
    assert Write(ready, 1) not in written
    written.clear()
    watchdog.poll(24.0)
    assert written.index(Write(control[ERROR], 1)) < written.index(Write(ready, 1))


@pytest.mark.parametrize("kept_keys", [True, False])
def test_a_long_backward_does_not_fail_the_ring(kept_keys: bool) -> None:
    ranks, shape = Ranks(2, 0), full(2)
    homes = {}

    def begin(rank: int) -> None:
        end, gather_plan = ranks.ends[rank], shape.gather_plans[rank]
        homes[rank] = end.grad_return((1, 2, 4), gather_plan, "gradients")
        if kept_keys:
            homes[rank].begin()
        else:
            end.gather(*keys_of(shape, rank, 0), gather_plan, 1, "backward", grad_return=homes[rank])

    ranks.each(begin)
    ranks.world.drain()
    # what is enqueued next is the kernel
    for end in ranks.ends:
        for seconds in (0.0, 50.0, 100.0):
            end.watchdog.poll(seconds)
        assert end.watchdog.failure is None

    def finish(rank: int) -> None:
        homes[rank].receive()
        homes[rank].close()

    ranks.each(finish)
    ranks.world.drain()


@settings(max_examples=25, deadline=None)
@given(world_size=st.integers(2, 3), seed=st.integers(0, 2**32))
def test_backwards_of_packed_and_of_zero_copy_keys_alternate(world_size: int, seed: int) -> None:
    ranks = Ranks(world_size, seed)
    # as many of each in front of the other as there are places to come home to
    for salt, name in enumerate([None, None, "layer", "layer", None, "layer"]):
        come_home(ranks, full(world_size), salt, name)
    ranks.world.drain()


def test_a_zero_copy_slot_is_released_when_its_name_gets_another_shape() -> None:
    ranks, shape = Ranks(2, 0), full(2)
    slots: list[weakref.ref[Tensor]] = []
    for more in range(4):

        def one(rank: int, more: int = more) -> None:
            end, size = ranks.ends[rank], (shape.batch, shape.rows + more, shape.lengths[rank], shape.heads)
            k, v = end.zero_copy_kv("layer", *size, shape.dims, shape.dtype)
            slots.append(weakref.ref(end._zero_copy_at[k.untyped_storage().data_ptr()].slot))
            end.gather(k, v, shape.gather_plans[rank], shape.groups, "forward").close()

        ranks.each(one)
        ranks.world.drain()
    assert [slot() is not None for slot in slots] == [False] * 6 + [True] * 2


def test_memory_that_a_backward_has_outgrown_goes() -> None:
    ranks, shape = Ranks(2, 0), full(2)
    come_home(ranks, dataclasses.replace(shape, dtype=torch.bfloat16), 0)
    far = weakref.ref(ranks.ends[0]._remote_buffers[0])
    come_home(ranks, shape, 1)
    ranks.world.drain()
    assert far() is None


def test_a_post_of_more_than_was_reserved_is_refused_before_anything_moves() -> None:
    ranks = Ranks(2, 0)
    ranks.each(lambda rank: ranks.ends[rank].reserve(64))
    for sends, receives in (([(1, torch.zeros(17))], []), ([], [(1, torch.zeros(9)), (1, torch.zeros(9))])):
        with pytest.raises(RuntimeError, match="at most the 64 bytes per peer that were reserved, got"):
            ranks.ends[0].post(sends, receives, "too much")
    assert not ranks.world.busy()


def test_a_new_shape_inside_a_capture_is_refused() -> None:
    ranks, shape = Ranks(2, 0), full(2)
    ranks.streams[0].recording = Recording()
    with pytest.raises(RuntimeError, match="make the same call once before capturing it"):
        ranks.ends[0].gather(*keys_of(shape, 0, 0), shape.gather_plans[0], 1, "captured")


def test_buffers_made_in_inference_mode_serve_other_calls() -> None:
    """The devices here write outside of inference mode, too."""
    ranks, shape = Ranks(2, 0), full(2)

    def evaluate(rank: int) -> None:
        end, gather_plan = ranks.ends[rank], shape.gather_plans[rank]
        with torch.inference_mode():
            end.zero_copy_kv("a", 1, 4, 4, 2, (2, 2), torch.float32)
            end.remote_shard_buffer(0, (1, 4, 2), 4, (2, 2), torch.float32)
            coming = end.grad_return((1, 2, 4), gather_plan, "gradients")
            end.gather(*keys_of(shape, rank, 0), gather_plan, 1, "an evaluation", grad_return=coming)
            coming.receive()
            coming.close()
            end.reserve(1000)

    ranks.each(evaluate)
    for kind in ("gather", "home", "post", "lend a", "poison"):
        play(ranks, kind, shape, 1)
    for end in ranks.ends:
        k, v = end.zero_copy_kv("a", 1, 4, 4, 2, (2, 2), torch.float32)
        remote_shard = end.remote_shard_buffer(0, (1, 4, 2), 4, (2, 2), torch.float32)
        local = (k, v, remote_shard, end._slot, end._local_grads, end._flags, end._error, *end._shard_buffers)
        assert not any(x.is_inference() for x in local if x.numel())


def test_poison_leaves_no_rows_of_earlier_calls_but_zero_copy_slots() -> None:
    ranks, shape = Ranks(2, 0), full(2)
    for kind in ("gather", "home", "post", "lend a"):
        play(ranks, kind, shape, 1)
    play(ranks, "poison", shape, 0)
    for rank, end in enumerate(ranks.ends):
        for station in (*end._remote_buffers, *end._grad_buffers, *end._boxes[0], *end._boxes[1]):
            rows = station.view((station.num_bytes,), torch.uint8)
            assert rows.numel()
            assert bool((rows == 255).all())
        for local in (end._slot, end._local_grads):
            assert local.numel()
            assert bool((local == 255).all())
        (lent,) = end._zero_copy.values()
        for x, y in zip((lent.k, lent.v), keys_of(shape, rank, 1), strict=True):
            assert torch.equal(x, y)
    gather(ranks, shape, 2)
    ranks.world.drain()


def test_all_ranks_keep_the_rate_of_the_slowest() -> None:
    world, found = World(3, 0), {}
    values: dict[int, float] = {}

    @dataclass
    class Table:
        rank: int

        def share(self, what: str, value: float) -> list[float]:
            del what
            values[self.rank] = value
            world.barrier(self.rank)
            return [values[rank] for rank in range(3)]

    def measure(rank: int) -> None:
        def time_copy(target: int, source: int, num_bytes: int) -> float:
            ctypes.memmove(target, source, num_bytes)
            return (1.0, 4.0, 2.0)[rank]

        table: Any = Table(rank)
        found[rank] = measure_push(rank, 3, time_copy, FakeMemory(world, rank), table)

    world.hosts(measure)
    assert found == dict.fromkeys(range(3), PROBE_BYTES / 4)


def test_buffers_are_made_once_grow_when_needed_and_go_when_closed() -> None:
    ranks, shape = Ranks(3, 0), full(3)
    large = dataclasses.replace(shape, batch=2)
    gather(ranks, shape, 0)
    held = transport_bytes(ranks.ends[0])
    gather(ranks, shape, 1)
    assert transport_bytes(ranks.ends[0]) == held
    gather(ranks, large, 2)
    grown = transport_bytes(ranks.ends[0])
    assert grown > held
    gather(ranks, shape, 3)
    assert transport_bytes(ranks.ends[0]) == grown
    ranks.each(lambda rank: ranks.ends[rank].close())
    assert transport_bytes(ranks.ends[0]) == 0
    gather(ranks, shape, 4)
    ranks.world.drain()


@settings(max_examples=25, deadline=None)
@given(data=st.data(), world_size=st.integers(2, 4), seed=st.integers(0, 2**32))
def test_owners_take_turns_at_a_reader(data: st.DataObject, world_size: int, seed: int) -> None:
    ranks = Ranks(world_size, seed)
    shape = data.draw(shapes(world_size))
    gather(ranks, shape, 0)
    ranks.world.drain()
    fars = [end._remote_buffers[0].view((end._remote_buffers[0].num_bytes,), torch.uint8) for end in ranks.ends]
    places = [range(far.data_ptr(), far.data_ptr() + far.numel()) for far in fars]
    slots = [range(end._slot.data_ptr(), end._slot.data_ptr() + end._slot.numel()) for end in ranks.ends]
    written: list[list[int]] = [[] for _ in ranks.ends]
    move = ctypes.memmove

    def see(target: int, source: int, num_bytes: int) -> int:
        owners = [owner for owner, slot in enumerate(slots) if source in slot]
        for reader, place in enumerate(places):
            if target in place:
                written[reader] += owners
        return move(target, source, num_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ctypes, "memmove", see)
        gather(ranks, shape, 1)
        ranks.world.drain()
    for gather_plan, found in zip(shape.gather_plans, written, strict=True):
        owners = [fetch.owner for fetch in gather_plan.recvs]
        assert [owner for owner, _ in itertools.groupby(found)] == owners * (shape.groups if len(owners) > 1 else 1)


@settings(max_examples=25, deadline=None)
@given(world_size=st.integers(2, 4), seed=st.integers(0, 2**32), groups=st.sampled_from([1, 2]))
def test_rows_go_to_a_reader_that_is_late(world_size: int, seed: int, groups: int) -> None:
    """What the nearest owner has for a rank lies there before the rank has begun; and the ring goes on as ever."""
    ranks = Ranks(world_size, seed)
    world, shape, late = ranks.world, full(world_size, groups), 0
    for salt in range(2):
        gather(ranks, shape, salt)
    world.drain()
    attention = Attention(ranks, shape)
    for rank in range(1, world_size):
        attention.attend(rank, 2)
    while world.step():
        pass
    nearest = shape.gather_plans[late].recvs[0]
    far = ranks.ends[late]._remote_buffers[0].view((1, shape.gather_plans[late].remote_rows, 2, 4), torch.float32)
    heads = slice(0, 2 // groups)
    there = far[:, nearest.at : nearest.at + sum(length for _, length in nearest.rows), heads]
    mine = picked(torch.cat(keys_of(shape, nearest.owner, 2), -1), nearest.rows)[:, :, heads]
    assert torch.equal(there, mine)
    attention.attend(late, 2)
    world.drain()


def test_room_that_is_made_ahead_is_not_made_again() -> None:
    ranks, shape = Ranks(3, 0), full(3)
    large = dataclasses.replace(shape, batch=2)
    row = large.batch * large.heads * sum(large.dims) * large.dtype.itemsize
    sizes = large.rows * row, large.gather_plans[0].most_remote_rows * row
    ranks.each(lambda rank: ranks.ends[rank].reserve_gather(*sizes))
    gather(ranks, shape, 0)
    held, regions = [transport_bytes(end) for end in ranks.ends], len(ranks.world.regions)
    for salt, one in enumerate((large, shape, large), start=1):
        ranks.each(lambda rank: ranks.ends[rank].reserve_gather(*sizes))
        gather(ranks, one, salt)
    assert [transport_bytes(end) for end in ranks.ends] == held
    assert len(ranks.world.regions) == regions
    ranks.world.drain()


@pytest.mark.parametrize("dims", [(4, 4), (40, 24)])
def test_packing_puts_keys_and_values_side_by_side(dims: tuple[int, int]) -> None:
    k, v = torch.randn(2, 3, 5, dims[0]), torch.randn(2, 5, 3, dims[1]).transpose(1, 2)
    slot = torch.full((2, 4, 5, sum(dims)), NAN)
    pack(slot[:, :3], k, v)
    assert torch.equal(slot[:, :3], torch.cat([k, v], -1))
    assert slot[:, 3:].isnan().all()


def test_a_pair_of_words_is_one_entry_of_64_bits_or_two_the_upper_one_first() -> None:
    pair = streams.Write64(64, -1, 7)
    (one,) = cuda_driver._entries(pair, pairs=True)
    assert (one.operation, one.address, one.value) == (5, 64, 7 << 32 | 0xFFFFFFFF)
    assert one.value.to_bytes(8, "little") == (0xFFFFFFFF).to_bytes(4, "little") + (7).to_bytes(4, "little")
    two = cuda_driver._entries(pair, pairs=False)
    assert [(word.operation, word.address, word.value) for word in two] == [(2, 68, 7), (2, 64, 0xFFFFFFFF)]
