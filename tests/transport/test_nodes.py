"""A copy engine per node and a link between nodes: nothing is read too early, nothing hangs, and who is missing is named."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringattn.kernels.attention.eager import EagerKernels
from ringattn.kernels.constants import COMM_SMS
from ringattn.plan.attention_spec import AttentionSpec, serialize
from ringattn.plan.layouts import Shard, make_shards
from ringattn.plan.ring_plan import GatherPlan, Nodes, RankPlan, make_gather_plan, make_nodes, make_plan
from ringattn.plan.sharding import Sharding
from ringattn.schedule.fused_hierarchical import _RemoteShards
from ringattn.simulate import simulate_ring
from ringattn.transport import select
from ringattn.transport.base import Buffers, Message, RingContext, Transport
from ringattn.transport.gpu_sharing import SHARE, ranks_per_gpu, sm_margin_of
from ringattn.transport.process_group import name_part, resolve_group
from ringattn.transport.select import find_obstacle, most_on_one_gpu
from tests.support.fake_streams import MAIN, OTHER, Item
from tests.support.pool import Pools
from tests.support.short_mask import ShortMask
from tests.transport.test_copy_engine import Ranks, Shape, letters, picked, reducer, reserve, run_kernel, send_home
from tests.transport.test_kv_gather import CASES, PLENTY, draw, gathering

__all__ = ["gathering"]  # a fixture

OUTER = OTHER  # the stream of the process group
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
        self.begun: dict[tuple[int, int], list[Message]] = {}  # by (number of the post, sender)
        self.taken: set[tuple[int, int]] = set()  # by (number of the post, receiver)

    def end(self, rank: int) -> LinkEnd:
        return LinkEnd(self, rank)


class LinkEnd(Transport):
    """One rank's end."""

    def __init__(self, link: Link, rank: int) -> None:
        self.link = link
        self.rank = rank

    def post(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> Any:
        link, me, streams = self.link, self.rank, self.link.ranks.streams[self.rank]
        number = link.posted[me]
        link.posted[me] += 1
        sends, receives = ([message for message in messages if message[1].numel()] for messages in (sends, receives))
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

    def reserve(self, num_bytes: int, grad_bytes: int = 0) -> None:
        pass

    def kv_gather(self) -> None:
        return


class Double:
    """Rings of two levels on fake devices, and attention calls on them by the library's own order of crossings and gathers."""

    def __init__(self, world_size: int, num_nodes: int, seed: int) -> None:
        self.nodes: Nodes = make_nodes(world_size, num_nodes)
        self.ranks = Ranks(world_size, seed, nodes=self.nodes)
        self.link = Link(self.ranks)
        self.links = [end.watch_transport(self.link.end(rank)) for rank, end in enumerate(self.ranks.ends)]

    def keys(self, shape: Shape, shards: Sequence[Shard], rank: int, salt: int) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(1000 * salt + rank)
        rows = sum(run.length for run in shards[rank])
        whole = torch.randn(shape.batch, rows, shape.heads, sum(shape.dims), generator=g).to(shape.dtype)
        return whole[..., : shape.dims[0]], whole[..., shape.dims[0] :]

    def attend(self, shape: Shape, shards: Sequence[Shard], mask: ShortMask, salt: int, backward: bool) -> None:
        world = len(shards)
        options = {"causal": mask.causal, "window": mask.window}
        n = mask.seq_len
        calls = [
            AttentionSpec.deserialize(
                serialize(Sharding(n, "contiguous", tuple(shards), rank), softmax_scale=1.0, **options), rank
            )
            for rank in range(world)
        ]
        plan = calls[0].plan("keys", self.nodes)
        assert plan == make_plan(tuple(shards), tuple(shards), mask, "keys", self.nodes)
        parts = plan.ranks
        levels = [
            tuple(make_gather_plan(plan, rank, 4, outer, self.nodes) for rank in range(world))
            for outer in range(len(self.nodes))
        ]

        def held(rank: int, outer: int) -> tuple[Tensor, Tensor]:
            remote_shard = parts[rank].remote_shards[outer]
            if outer == 0:
                return self.keys(shape, shards, rank, salt)
            k, v = self.keys(shape, shards, rank if remote_shard is None else remote_shard.owner, salt)
            rows = () if remote_shard is None else remote_shard.rows
            return (picked(k, rows), picked(v, rows)) if rows else (k[:, :0], v[:, :0])

        def one(rank: int) -> None:
            end, streams = self.ranks.ends[rank], self.ranks.streams[rank]
            context = RingContext(rank, world, end, nodes=self.nodes, between_nodes=self.links[rank])
            # what a caller may do to its rows once the call is enqueued
            k, v = (x.clone() for x in held(rank, 0))
            slot_rows = levels[0][rank].slot_rows
            remote_shards = _RemoteShards(k, v, parts[rank], slot_rows, context, end, Fresh(), f"call {salt}")
            for outer, gather_plans in enumerate(levels):
                here = Shape(
                    shape.batch, shape.heads, shape.dims, shape.groups, gather_plans, (), shape.dtype
                )  # fmt: skip
                rows = remote_shards.wait_for(outer)

                def gather(home: Any = None, rows: Any = rows, to: GatherPlan = gather_plans[rank]) -> Any:
                    k, v = rows
                    return end.gather(k, v, to, shape.groups, f"call {salt}", grad_return=home)

                def begin(rows: Any = rows, outer: int = outer) -> None:
                    self.link.holding.add(rank)
                    for x, y in zip(rows, held(rank, outer), strict=True):
                        assert self.ranks.ends[rank].watchdog.failure or torch.equal(x, y), f"rank {rank} holds {outer}"
                    self.ranks.done()

                keys = lambda owner, outer=outer: held(owner, outer)  # noqa: E731
                if backward:
                    send_home(self.ranks, rank, here, 10 * salt + outer, gather, keys, first=begin)
                else:
                    found = gather()
                    streams.call(begin)
                    run_kernel(self.ranks, rank, here, found, keys)
                    found.close()
                streams.call(lambda: self.link.holding.discard(rank))
            streams.call(lambda: [x.fill_(float("nan")) for x in (k, v)])

        self.ranks.each(one)


@st.composite
def calls(draw: st.DrawFn, ranks: int) -> tuple[Shape, tuple[Shard, ...], ShortMask]:
    n = draw(st.integers(ranks, 40))
    mask = ShortMask(seq_len=n, kv_len=n, **draw(st.sampled_from(MASKS)))
    shards = make_shards(draw(st.sampled_from(["contiguous", "striped", "zigzag"])), n, ranks, mask)
    heads = draw(st.sampled_from([1, 2, 4]))
    groups = draw(st.sampled_from([g for g in (1, 2) if heads % g == 0]))
    dims = draw(st.sampled_from([2, 3])), draw(st.sampled_from([2, 5]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    return Shape(draw(st.integers(1, 2)), heads, dims, groups, (), (), dtype), shards, mask


@settings(max_examples=20, deadline=None)
@given(data=st.data(), size=st.sampled_from(SHAPES), seed=st.integers(0, 2**32))
def test_every_kernel_reads_the_remote_shards_of_its_node_in_any_interleaving(
    data: st.DataObject, size: tuple[int, int], seed: int
) -> None:
    ring = Double(*size, seed)
    for salt in range(data.draw(st.integers(1, 3))):
        ring.attend(*data.draw(calls(size[0])), salt, data.draw(st.booleans()))
    ring.ranks.world.drain()
    assert ring.ranks.checked


def test_a_remote_shard_is_not_overwritten_before_all_readers_have_it() -> None:
    # a halo: who holds the guest fetches nothing from who reads it, so nothing but the slot's own words holds it back
    mask = ShortMask(seq_len=16, kv_len=16, causal=True, window=(3, 0))
    shards = make_shards("contiguous", 16, 4, mask)
    for seed in range(10):
        ring = Double(4, 2, seed)
        for salt in range(6):
            ring.attend(Shape(2, 1, (2, 2), 1, (), (), torch.float32), shards, mask, salt, backward=False)
        ring.ranks.world.drain()


def test_messages_within_nodes_reach_their_ranks() -> None:
    nodes = make_nodes(6, 2)
    for seed in range(6):
        ranks = Ranks(6, seed, nodes=nodes)
        reserve(ranks, 20)
        rounds = {
            node: [
                [replace(one, source=node[one.source], target=node[one.target]) for one in letters_of_a_post]
                for letters_of_a_post in letters(3, 7, seed, 20)
            ]
            for node in nodes
        }
        chance = random.Random(seed)
        ranks.each(
            lambda rank, rounds=rounds, ranks=ranks, chance=chance, seed=seed: reducer(
                ranks, rank, rounds[select.node_of(rank, nodes, 6)], chance, lambda: seed
            )
        )
        ranks.world.drain()
        assert ranks.checked == 6 * 7


def name_parts() -> tuple[int, int]:
    me = dist.get_rank()
    for _ in range(2):
        name_part(f"node {me // 2}", str(dist.group.WORLD.group_name), me % 2, 2)  # pyright: ignore[reportOptionalMemberAccess]
    part = resolve_group(f"node {me // 2}")
    return part.rank(), part.size()


def test_a_part_of_a_group_is_found_by_its_name(pool: Pools) -> None:
    assert pool(4).run(name_parts) == [(0, 2), (1, 2), (0, 2), (1, 2)]


def test_a_wait_for_a_lost_rank_of_another_node_is_named() -> None:
    ring = Double(4, 2, 0)
    n = 16
    mask = ShortMask(seq_len=n, kv_len=n)
    shards = make_shards("contiguous", n, 4, mask)
    shape = Shape(1, 2, (2, 2), 2, (), (), torch.float32)
    ring.attend(shape, shards, mask, 0, backward=True)
    ring.ranks.world.drain()
    ring.ranks.world.dead.add(3)
    ring.attend(shape, shards, mask, 1, backward=False)
    alive, now = [0, 1, 2], 0.0
    watches = [ring.ranks.ends[rank].watchdog for rank in alive]
    for _ in range(400):
        ring.ranks.world.some_steps(60)
        now += 0.5
        for watchdog in watches:
            watchdog.poll(now)
    failures = [watchdog.failure or "" for watchdog in watches]
    assert "call 1, keys for ring step 2, between nodes: waiting for ring ranks [3]: nothing has moved" in failures[1]
    assert "call 1: ring step 1, waiting for ring rank 3: nothing has moved" in failures[2]
    # it waits for either of these two
    assert "call 1" in failures[0]
    assert "waiting for ring rank" in failures[0]
    for rank in alive:
        with pytest.raises(RuntimeError, match="this ring can not be used any more"):
            ring.ranks.ends[rank].remote_shard_buffer(1, (1, 4, 2), 4, (2, 2), torch.float32)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), size=st.sampled_from([(4, 2), (6, 3), (6, 2), (4, 1)]))
def test_rows_fetched_in_a_node_step_are_those_of_its_ring_steps(data: st.DataObject, size: tuple[int, int]) -> None:
    _, shards, mask = data.draw(calls(size[0]))
    plan = make_plan(shards, shards, mask, "keys", make_nodes(*size))
    positions = [[run.position(x) for run in shard for x in range(run.length)] for shard in shards]

    def held(part: RankPlan, outer: int) -> list[int]:
        remote_shard = part.held(outer)
        return [x for _, n, start, stride in remote_shard.runs for x in range(start, start + n * stride, stride)]

    for outer in range(size[1]):
        level: list[GatherPlan] = [make_gather_plan(plan, rank, 4, outer) for rank in range(size[0])]
        sent = {(rank, to.peer, to.step): to.rows for rank, here in enumerate(level) for to in here.sends}
        fetched = {
            (fetch.owner, rank, fetch.step): fetch.rows for rank, here in enumerate(level) for fetch in here.recvs
        }
        assert sent == fetched
        for part, here in zip(plan.ranks, level, strict=True):
            assert here.first == outer * part.local_size
            assert {fetch.step for fetch in here.recvs} <= set(range(1, part.local_size))
            for fetch in here.recvs:
                ring_step = part.ring_steps[here.first + fetch.step]
                assert ring_step is not None
                there = held(plan.ranks[fetch.owner], outer)
                found = [there[x] for offset, n in fetch.rows for x in range(offset, offset + n)]
                assert found == [
                    x for _, n, start, stride in ring_step.runs for x in range(start, start + n * stride, stride)
                ]
                assert set(found) <= set(positions[ring_step.owner])
                assert fetch.at + len(found) + 4 <= here.remote_rows <= here.most_remote_rows
            assert part.held(outer).num_rows <= here.slot_rows


@pytest.mark.parametrize("size", SHAPES[:2], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_one_launch_per_node_step_equals_the_ring_steps(gathering: list[str], case: str, size: tuple[int, int]) -> None:
    layout = ["zigzag", "contiguous", "striped", "balanced"][list(CASES).index(case) % 4]
    q, k, v, do = draw(61, 4, 2)
    options = {"layout": layout, "do": do, "dlse": torch.ones(2, 4, 61), **CASES[case]}
    found = simulate_ring(q, k, v, size[0], nodes=size[1], memory_budget=PLENTY, **options)
    launches = gathering.count("forward_fused")
    assert size[0] <= launches == gathering.count("backward_fused") <= size[0] * size[1]
    expected = simulate_ring(q, k, v, size[0], nodes=size[1], **options)
    assert gathering.count("forward_fused") == launches
    assert found.grads is not None
    assert expected.grads is not None
    pairs = {"o": (found.o, expected.o), "lse": (found.lse, expected.lse)}
    for name, (x, y) in (pairs | {name: (found.grads[name], expected.grads[name]) for name in "qkv"}).items():
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_one_launch_per_node_step_makes_scores_alike(gathering: list[str]) -> None:
    q, k, v, do = draw(45, 4, 2)
    options = {"causal": True, "do": do, "softcap": 5.0, "sinks": torch.randn(4), "alibi_slopes": torch.rand(4) / 8}
    found, expected = (simulate_ring(q, k, v, 4, nodes=2, memory_budget=room, **options) for room in (PLENTY, 0))
    assert gathering.count("backward_fused") == 8
    assert found.grads is not None
    assert expected.grads is not None
    assert found.grads.keys() == {"q", "k", "v", "sinks", "alibi_slopes"}
    torch.testing.assert_close(found.o, expected.o, rtol=1e-5, atol=1e-5)
    for name, x in found.grads.items():
        torch.testing.assert_close(x, expected.grads[name], rtol=1e-4, atol=1e-5, msg=name)


def test_launches_leave_sms_for_transfers_between_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    found: Counter[tuple[str, int]] = Counter()
    for name in ("forward_fused", "backward_fused"):
        launch = getattr(EagerKernels, name)

        def noted(kernels: Any, step: Any, *rest: Any, name: str = name, call: Any = launch) -> Any:
            found[name, step.sm_margin] += 1
            return call(kernels, step, *rest)

        monkeypatch.setattr(EagerKernels, name, noted)
    q, k, v, do = draw(61, 4, 2)
    simulate_ring(q, k, v, 6, nodes=3, memory_budget=PLENTY, do=do, causal=True)
    # the last launch of a forward has nothing beside it; that of a backward has the sums of the one before
    assert found == {
        ("forward_fused", COMM_SMS): 12, ("forward_fused", 0): 6, ("backward_fused", COMM_SMS): 18,
    }  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [{"memory_budget": 1000}, {"backward": "queries"}, {"nodes": 4}],
    ids=["too small a budget", "queries move", "nodes of one rank"],
)
def test_calls_that_a_launch_per_node_step_cannot_serve_are_stepwise(
    gathering: list[str], options: dict[str, Any]
) -> None:
    q, k, v, do = draw(61, 4, 2)
    simulate_ring(q, k, v, 4, causal=True, do=do, **{"nodes": 2, "memory_budget": PLENTY, **options})
    assert "backward_fused" not in gathering
    assert ("forward_fused" in gathering) == (options.get("backward") == "queries")


def test_gpus_need_to_reach_those_of_their_node_only(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [SimpleNamespace(uuid=name) for name in "ab"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpus[index])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda x, y: True)
    device = torch.device("cuda", 0)
    found = [{"host": host, "missing": None, "uuid": uuid} for host in ("one", "two") for uuid in "ab"]
    pairs = ((0, 1), (2, 3))
    assert find_obstacle(0, device, found, pairs) is None
    assert find_obstacle(2, device, found, pairs) is None
    said = find_obstacle(0, device, found)
    assert said == 'ring ranks 0 and 2 are on different hosts; pass nodes="auto" for a ring of several hosts'
    assert find_obstacle(0, device, found, ((0, 2), (1, 3))) == "ring ranks 0 and 2 are on different hosts"
    assert find_obstacle(0, device, found, ((0,), (1,), (2,), (3,))) == "a node of one rank has no peers within"
    found[3]["missing"] = "it has an AMD GPU"
    assert find_obstacle(0, device, found, pairs) == "ring rank 3 can not take part: it has an AMD GPU"
    assert select.node_of(3, pairs, 4) == (2, 3)


def test_ranks_share_a_gpu_where_torch_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [SimpleNamespace(uuid=name) for name in "ab"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpus[index])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda x, y: y == 1)
    monkeypatch.delenv(SHARE, raising=False)
    device = torch.device("cuda", 0)
    found = [{"host": "one", "missing": None, "uuid": uuid} for uuid in "aba"]
    said = (
        "ring ranks 0 and 2 share a GPU; TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 allows it, to try a ring on one GPU"
    )
    assert find_obstacle(0, device, found) == said
    assert find_obstacle(0, device, found, ((0, 1), (2,))) is None
    monkeypatch.setenv(SHARE, "1")
    assert find_obstacle(0, device, found) is None
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda x, y: False)
    assert find_obstacle(0, device, found) == "the GPU of ring rank 0 has no access to that of ring rank 1"
    found = [one | {"ranks": 1} for one in found]
    assert most_on_one_gpu(found) == 2
    assert most_on_one_gpu(found[:2]) == 1
    # rings of others have the same GPUs
    assert most_on_one_gpu([found[0], found[1] | {"ranks": 3}]) == 3


def test_kernels_of_all_ranks_of_a_gpu_fit_at_once_beside_their_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    gpu = torch.device("cuda", 0)
    assert sm_margin_of(gpu, 1) == sm_margin_of(torch.device("cpu"), 4) == 0
    for ranks in (2, 3, 4, 7):
        assert ranks * (132 - sm_margin_of(gpu, ranks) + COMM_SMS) <= 132
    assert sm_margin_of(gpu, 2) == 70
    assert sm_margin_of(gpu, 60) == 131, "one program is left"


def test_ranks_of_a_gpu_are_those_of_all_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 6)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv(SHARE, "1")
    assert ranks_per_gpu() == 1, "nobody is there"
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert ranks_per_gpu() == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert ranks_per_gpu() == 2
    monkeypatch.delenv(SHARE)
    assert ranks_per_gpu() == 1
