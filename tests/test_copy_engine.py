"""The copy engine's protocol, in any interleaving of all streams of all ranks: nothing is read too early or torn, nothing hangs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringattn.layout import make_shards, shard_len
from ringattn.schedule import Collection, collect, make_plan
from ringattn.transport.base import Gathering
from ringattn.transport.copy_engine import CopyEngineTransport
from ringattn.visibility import Visibility
from tests.fake_streams import MAIN, FakeMemory, FakeStreams, Item, World, read

NAN = float("nan")


class Ranks:
    """All ranks of one ring on fake devices."""

    def __init__(self, ranks: int, seed: int, timeout: float = 10.0) -> None:
        self.world = World(ranks, seed)
        self.streams = [FakeStreams(self.world, rank) for rank in range(ranks)]
        self.memories = [FakeMemory(self.world, rank) for rank in range(ranks)]
        ends: dict[int, CopyEngineTransport] = {}

        def make(rank: int) -> None:
            streams, memory = self.streams[rank], self.memories[rank]
            ends[rank] = CopyEngineTransport(rank, ranks, "ring", streams, memory, timeout, watched=False)

        self.each(make)
        self.ends = [ends[rank] for rank in range(ranks)]
        self.checked = 0

    def each(self, call: Callable[[int], None]) -> None:
        """One call of every rank's host."""
        self.world.hosts(call)

    def done(self) -> None:
        self.checked += 1


@dataclass(frozen=True)
class Shape:
    """What a gather is about."""

    batch: int
    heads: int
    dims: tuple[int, int]
    groups: int
    collections: tuple[Collection, ...]
    lengths: tuple[int, ...]
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        return self.collections[0].slot_rows


@st.composite
def shapes(draw: st.DrawFn, ranks: int) -> Shape:
    n = draw(st.integers(1, 40))
    mask: dict[str, Any] = draw(
        st.sampled_from([{}, {"causal": True}, {"causal": True, "window": (3, 0)}, {"window": (6, 2)}])
    )
    cut = draw(st.integers(0, n))
    documents = (0, cut, n) if draw(st.booleans()) else None
    visibility = Visibility(seq_len=n, kv_len=n, documents=documents, **mask)
    shards = make_shards(draw(st.sampled_from(["contiguous", "striped", "zigzag"])), n, ranks, visibility)
    plan = make_plan(shards, shards, visibility, "keys")
    heads = draw(st.sampled_from([1, 2, 4]))
    return Shape(
        batch=draw(st.integers(1, 2)),
        heads=heads,
        dims=(draw(st.sampled_from([2, 3])), draw(st.sampled_from([2, 5]))),
        groups=draw(st.sampled_from([g for g in (1, 2, 4) if heads % g == 0])),
        collections=tuple(collect(plan, rank, 4) for rank in range(ranks)),
        lengths=tuple(shard_len(shard) for shard in shards),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
    )


def keys_of(shape: Shape, rank: int, salt: int) -> tuple[Tensor, Tensor]:
    """K and v of a rank; every element of every call is its own, and strides are not contiguous."""
    g = torch.Generator().manual_seed(1000 * salt + rank)
    whole = torch.randn(shape.batch, shape.lengths[rank], shape.heads, sum(shape.dims) + 1, generator=g).to(shape.dtype)
    return whole[..., : shape.dims[0]], whole[..., shape.dims[0] : -1]


def picked(x: Tensor, rows: tuple[tuple[int, int], ...]) -> Tensor:
    return torch.cat([x[:, offset : offset + length] for offset, length in rows], 1)


def run_kernel(
    ranks: Ranks, rank: int, shape: Shape, gathering: Gathering, keys: Callable[[int], tuple[Tensor, Tensor]]
) -> None:
    """Waits for each flag as a kernel does, and compares what came with what the owner has."""
    collection, streams = shape.collections[rank], ranks.streams[rank]
    far, arrivals = gathering.far, gathering.arrivals
    if arrivals is None:
        assert not collection.fetches
        return
    per = shape.heads // shape.groups
    for g in range(shape.groups):
        for fetch in collection.fetches:
            heads = slice(g * per, (g + 1) * per)
            end = fetch.at + sum(length for _, length in fetch.rows)

            def look(fetch=fetch, heads=heads, end=end, last=g == shape.groups - 1, g=g) -> None:
                assert arrivals.flags[g, fetch.step] == 1
                found = far[:, fetch.at : end, heads]
                expected = picked(torch.cat(keys(fetch.owner), -1), fetch.rows)[:, :, heads]
                assert torch.equal(found, expected), f"rank {rank} step {fetch.step} group {g}"
                found.fill_(NAN)
                if last:
                    ends = [other.at for other in collection.fetches if other.at > fetch.at] + [far.shape[1]]
                    assert ends[0] - end >= 4
                    assert not far[:, end : ends[0]].any(), "guard rows must be zero"
                ranks.done()

            flag = arrivals.flags[g, fetch.step].data_ptr()
            streams.enqueue(MAIN, lambda flag=flag, look=look: Item(lambda: read(flag) != 0, look, "flag"))


def gather(ranks: Ranks, shape: Shape, salt: int) -> None:
    keys = [keys_of(shape, rank, salt) for rank in range(ranks.world.ranks)]

    def one(rank: int) -> None:
        k, v = (x.clone() for x in keys[rank])
        found = ranks.ends[rank].gather(k, v, shape.collections[rank], shape.groups, f"gather {salt}")
        run_kernel(ranks, rank, shape, found, keys.__getitem__)
        found.close()

        def forget() -> None:
            k.fill_(NAN)
            v.fill_(NAN)

        ranks.streams[rank].call(forget)

    ranks.each(one)


def contribution(shape: Shape, visitor: int, step: int, rows: int, salt: int) -> Tensor:
    g = torch.Generator().manual_seed(97 * salt + 11 * visitor + step)
    return torch.randn(shape.batch, rows, shape.heads, sum(shape.dims), generator=g)


def come_home(ranks: Ranks, shape: Shape, salt: int, *, gathers: bool = True) -> None:
    width = sum(shape.dims)
    world_size = ranks.world.ranks
    keys = [keys_of(shape, rank, salt) for rank in range(world_size)]

    def one(rank: int) -> None:
        streams, end, collection = ranks.streams[rank], ranks.ends[rank], shape.collections[rank]
        found = end.gather(*keys[rank], collection, shape.groups, f"backward {salt}") if gathers else None
        coming = end.homecoming((shape.batch, shape.heads, width), collection, torch.device("cpu"), f"home {salt}")
        assert coming.rows == shape.rows
        assert coming.addresses[0] == coming.own.data_ptr()
        if found is not None:
            run_kernel(ranks, rank, shape, found, keys.__getitem__)
        for address, fetch in zip(coming.addresses[1:].tolist(), collection.fetches, strict=True):
            rows = sum(length for _, length in fetch.rows)
            region = torch.zeros(shape.batch, coming.rows, shape.heads, width)

            def send(region=region, address=address, fetch=fetch, rows=rows) -> None:
                region[:, :rows] = contribution(shape, rank, fetch.step, rows, salt)
                size = rows * shape.heads * width * 4
                for b in range(shape.batch):
                    ctypes.memmove(address + b * region[0].numel() * 4, region[b].data_ptr(), size)

            streams.call(send)
        if found is not None:
            found.close()
        regions = coming.receive()

        def add() -> None:
            for region, reader in zip(regions, collection.readers, strict=True):
                rows = sum(length for _, length in reader.rows)
                assert torch.equal(region[:, :rows], contribution(shape, reader.peer, reader.step, rows, salt))
                region.fill_(NAN)
                ranks.done()

        streams.call(add)
        coming.close()

    ranks.each(one)


def post(ranks: Ranks, salt: int, most: int) -> None:
    """Every rank sends some tensors to some peers; some posts overlap."""
    g = torch.Generator().manual_seed(salt)
    world_size = ranks.world.ranks
    sizes = torch.randint(0, most + 1, (2, world_size, world_size, 2), generator=g).tolist()
    capacity = 8 * most * 2

    def payload(part: int, source: int, target: int, i: int) -> Tensor:
        seed = torch.Generator().manual_seed(7 * salt + 1000 * part + 100 * source + 10 * target + i)
        dtype = (torch.float64, torch.bfloat16)[i]
        return torch.randn(sizes[part][source][target][i], generator=seed, dtype=torch.float64).to(dtype)

    def one(rank: int) -> None:
        end, streams = ranks.ends[rank], ranks.streams[rank]
        end.reserve(capacity)
        pending = []
        for part in (0, 1):
            peers = [peer for peer in range(world_size) if peer != rank]
            sends = [(peer, payload(part, rank, peer, i)) for i in (0, 1) for peer in peers]
            receives = [(peer, torch.full_like(payload(part, peer, rank, i), NAN)) for i in (0, 1) for peer in peers]
            pending.append((end.post(sends, receives, f"post {salt}"), sends, receives, part))
        for under_way, sends, receives, part in pending:
            under_way.wait()

            def look(receives=receives, part=part, sends=sends) -> None:
                for j, (peer, x) in enumerate(receives):
                    assert torch.equal(x, payload(part, peer, rank, j // (world_size - 1)))
                for _, x in sends:
                    x.fill_(NAN)
                ranks.done()

            streams.call(look)

    ranks.each(one)


def lend(ranks: Ranks, shape: Shape, salt: int, name: str) -> None:
    """A model writes its keys where peers read them; they are gathered in the forward and again in the backward."""
    keys = [keys_of(shape, rank, salt) for rank in range(ranks.world.ranks)]
    size = (shape.batch, shape.rows)

    def fill(rank: int) -> None:
        k, v = ranks.ends[rank].lend(name, *size, shape.lengths[rank], shape.heads, shape.dims, shape.dtype)
        ranks.streams[rank].call(lambda: (k.copy_(keys[rank][0]), v.copy_(keys[rank][1])))
        launched = ranks.streams[rank].launches
        for direction in ("forward", "backward"):
            found = ranks.ends[rank].gather(k, v, shape.collections[rank], shape.groups, f"{direction} {salt}")
            run_kernel(ranks, rank, shape, found, keys.__getitem__)
            found.close()
        assert ranks.streams[rank].launches - launched <= 6, "nothing is packed, so nothing is announced apart"

    ranks.each(fill)


def rounds(ranks: int) -> st.SearchStrategy[list[tuple[str, Shape]]]:
    kinds = st.sampled_from(["gather", "home", "post", "lend a", "lend b"])
    return st.lists(st.tuples(kinds, shapes(ranks)), min_size=1, max_size=8)


def play(ranks: Ranks, kind: str, shape: Shape, salt: int) -> None:
    if kind == "gather":
        gather(ranks, shape, salt)
    elif kind == "home":
        come_home(ranks, shape, salt)
    elif kind == "post":
        post(ranks, salt, shape.rows)
    else:
        lend(ranks, shape, salt, kind)


@settings(max_examples=120, deadline=None)
@given(data=st.data(), world_size=st.integers(2, 5), seed=st.integers(0, 2**32))
def test_every_kernel_sees_the_owners_rows_in_any_interleaving(data: st.DataObject, world_size: int, seed: int) -> None:
    ranks = Ranks(world_size, seed)
    for salt, (kind, shape) in enumerate(data.draw(rounds(world_size))):
        for again in range(data.draw(st.sampled_from([1, 1, 3]))):
            play(ranks, kind, shape, 10 * salt + again)
    ranks.world.drain()
