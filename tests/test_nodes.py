"""A copy engine per node and a link between nodes: nothing is read too early, nothing hangs, and who is missing is named."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringattn.call import Call, describe
from ringattn.layout import Shard, make_shards
from ringattn.outer import _Guests
from ringattn.schedule import Collection, Nodes, RankPlan, collect, make_nodes, make_plan
from ringattn.sharding import Sharding
from ringattn.simulate import simulate_ring
from ringattn.transport import choose
from ringattn.transport.base import Buffers, Parcel, Pending, Seat
from ringattn.transport.choose import find_obstacle
from ringattn.visibility import Visibility
from tests.fake_streams import MAIN, Item, read
from tests.test_copy_engine import Ranks, Shape, get_out, picked, run_kernel, send_home
from tests.test_gathered import CASES, PLENTY, draw, gathering

__all__ = ["gathering"]  # a fixture

OUTER = 3  # the stream of the process group
SHAPES = [(4, 2), (6, 3), (6, 2)]
"""Ranks and nodes."""
MASKS: list[dict[str, Any]] = [{}, {"causal": True}, {"causal": True, "window": (3, 0)}, {"window": (6, 2)}]


class Fresh(Buffers):
    """What a host writes at once must not lie where a device still reads."""

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full(tuple(shape), float("nan"), dtype=dtype, device=device)


class Link:
    """The process group of all ranks, on fake streams: like NCCL it needs room on a device to begin, which a kernel may deny.

    A transfer begins on a rank when its stream gets there and no kernel holds the device; it is over when both have begun.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.holding: set[int] = set()
        self.posted = [0] * ranks.world.ranks
        self.begun: dict[tuple[int, int], list[Parcel]] = {}  # by (number of the post, sender)
        self.taken: set[tuple[int, int]] = set()  # by (number of the post, receiver)

    def end(self, rank: int) -> LinkEnd:
        return LinkEnd(self, rank)


class LinkEnd:
    """One rank's end."""

    def __init__(self, link: Link, rank: int) -> None:
        self.link = link
        self.rank = rank

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel], what: str) -> Pending:
        link, me, streams = self.link, self.rank, self.link.ranks.streams[self.rank]
        number = link.posted[me]
        link.posted[me] += 1
        sends, receives = ([parcel for parcel in parcels if parcel[1].numel()] for parcels in (sends, receives))
        streams._order(MAIN, OUTER)

        def begin() -> None:
            link.begun[number, me] = list(sends)

        streams.enqueue(OUTER, lambda: Item(lambda: me not in link.holding, begin, f"{what} begins"))
        peers = {peer for peer, _ in receives}
        for source in peers:

            def take(source: int = source) -> None:
                mine = [x for peer, x in receives if peer == source]
                theirs = [x for peer, x in link.begun[number, source] if peer == me]
                for x, y in zip(mine, theirs, strict=True):
                    assert x.is_contiguous()
                    x.copy_(y.view(x.shape))
                link.taken.add((number, me))

            streams.enqueue(OUTER, lambda source=source, take=take: Item(
                lambda: (number, source) in link.begun, take, f"{what} from {source}"))  # fmt: skip
        for target in {peer for peer, _ in sends}:
            streams.enqueue(
                OUTER, lambda target=target: Item(lambda: (number, target) in link.taken, lambda: None, f"{what} sent")
            )
        reached: list[bool] = []
        streams.enqueue(OUTER, lambda: Item(lambda: True, lambda: reached.append(True), "crossed"))
        wait = lambda: streams.enqueue(MAIN, lambda: Item(lambda: bool(reached), lambda: None, f"{what} waits"))  # noqa: E731
        return SimpleNamespace(wait=wait)

    def reserve(self, num_bytes: int, replies: int = 0) -> None:
        pass

    def gatherer(self) -> None:
        return


class Double:
    """Rings of two levels on fake devices, and attention calls on them by the library's own order of crossings and gathers."""

    def __init__(self, world_size: int, num_nodes: int, seed: int) -> None:
        self.nodes: Nodes = make_nodes(world_size, num_nodes)
        self.ranks = Ranks(world_size, seed, nodes=self.nodes)
        self.link = Link(self.ranks)
        self.links = [end.watched(self.link.end(rank)) for rank, end in enumerate(self.ranks.ends)]

    def keys(self, shape: Shape, shards: Sequence[Shard], rank: int, salt: int) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(1000 * salt + rank)
        rows = sum(run.length for run in shards[rank])
        whole = torch.randn(shape.batch, rows, shape.heads, sum(shape.dims), generator=g).to(shape.dtype)
        return whole[..., : shape.dims[0]], whole[..., shape.dims[0] :]

    def attend(self, shape: Shape, shards: Sequence[Shard], visibility: Visibility, salt: int, backward: bool) -> None:
        world = len(shards)
        mask = {"causal": visibility.causal, "window": visibility.window}
        n = visibility.seq_len
        calls = [
            Call.decode(describe(Sharding(n, "contiguous", tuple(shards), rank), softmax_scale=1.0, **mask), rank)
            for rank in range(world)
        ]
        plan = calls[0].plan("keys", self.nodes)
        assert plan == make_plan(tuple(shards), tuple(shards), visibility, "keys", self.nodes)
        parts = plan.ranks
        levels = [tuple(collect(plan, rank, 4, outer) for rank in range(world)) for outer in range(len(self.nodes))]

        def held(rank: int, outer: int) -> tuple[Tensor, Tensor]:
            guest = parts[rank].guests[outer]
            if outer == 0:
                return self.keys(shape, shards, rank, salt)
            k, v = self.keys(shape, shards, rank if guest is None else guest.owner, salt)
            rows = () if guest is None else guest.rows
            return (picked(k, rows), picked(v, rows)) if rows else (k[:, :0], v[:, :0])

        def one(rank: int) -> None:
            end, streams = self.ranks.ends[rank], self.ranks.streams[rank]
            seat = Seat(rank, world, end, Fresh(), nodes=self.nodes, between_nodes=self.links[rank])
            # what a caller may do to its rows once the call is enqueued
            k, v = (x.clone() for x in held(rank, 0))
            guests = _Guests(k, v, calls[rank], seat, end, f"call {salt}")
            guests._slot_rows = levels[0][0].slot_rows
            for outer, collections in enumerate(levels):
                here = Shape(
                    shape.batch, shape.heads, shape.dims, shape.groups, collections, (), shape.dtype
                )  # fmt: skip
                rows = guests.arrive(outer)
                found = end.gather(*rows, collections[rank], shape.groups, f"call {salt}")

                def begin(rows: Any = rows, outer: int = outer) -> None:
                    self.link.holding.add(rank)
                    for x, y in zip(rows, held(rank, outer), strict=True):
                        assert self.ranks.ends[rank].watch.failure or torch.equal(x, y), f"rank {rank} holds {outer}"
                    self.ranks.done()

                keys = lambda owner, outer=outer: held(owner, outer)  # noqa: E731
                if backward:
                    send_home(self.ranks, rank, here, 10 * salt + outer, found, keys, first=begin)
                else:
                    streams.call(begin)
                    run_kernel(self.ranks, rank, here, found, keys)
                    found.close()
                streams.call(lambda: self.link.holding.discard(rank))
            streams.call(lambda: [x.fill_(float("nan")) for x in (k, v)])

        self.ranks.each(one)


@st.composite
def calls(draw: st.DrawFn, ranks: int) -> tuple[Shape, tuple[Shard, ...], Visibility]:
    n = draw(st.integers(ranks, 40))
    visibility = Visibility(seq_len=n, kv_len=n, **draw(st.sampled_from(MASKS)))
    shards = make_shards(draw(st.sampled_from(["contiguous", "striped", "zigzag"])), n, ranks, visibility)
    heads = draw(st.sampled_from([1, 2, 4]))
    groups = draw(st.sampled_from([g for g in (1, 2) if heads % g == 0]))
    dims = draw(st.sampled_from([2, 3])), draw(st.sampled_from([2, 5]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    return Shape(draw(st.integers(1, 2)), heads, dims, groups, (), (), dtype), shards, visibility


@settings(max_examples=25, deadline=None)
@given(data=st.data(), size=st.sampled_from(SHAPES), seed=st.integers(0, 2**32))
def test_every_kernel_sees_the_guests_of_its_node_in_any_interleaving(
    data: st.DataObject, size: tuple[int, int], seed: int
) -> None:
    ring = Double(*size, seed)
    for salt in range(data.draw(st.integers(1, 3))):
        ring.attend(*data.draw(calls(size[0])), salt, data.draw(st.booleans()))
    ring.ranks.world.drain()
    assert ring.ranks.checked
