"""Whole attention calls over several GPUs: every schedule to the bit, CUDA graphs, subgroups, other traffic, shared memory.

python -m pytest -m gpu tests/gpu/test_ring.py
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import Ring, ring_attention, simulate_ring
from tests.gpu.test_copy_engine import RANKS, run

IS_HOPPER = RANKS >= 2 and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(RANKS < 2, reason="needs two GPUs")]
PLENTY = 2**40
PATIENCE = timedelta(seconds=30)


def draw(seed: int, n: int, heads: int = 8, kv_heads: int = 4, dim: int = 128, batch: int = 1) -> list[Tensor]:
    """Whole q, k, v and do, the same on every rank."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = [(batch, n, heads, dim), (batch, n, kv_heads, dim), (batch, n, kv_heads, dim), (batch, n, heads, dim)]
    return [torch.randn(shape, device="cuda", generator=generator).bfloat16() for shape in shapes]


def draw_bias(seed: int, n: int) -> Tensor:
    """Whole key_bias of one batch element, -inf for some keys."""
    bias = torch.randn(1, n, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
    bias[:, n // 7 : n // 6] = -torch.inf
    return bias


def step(ring: Ring, whole: list[Tensor], layout: str, key_bias: Tensor | None = None, **mask: Any) -> list[Tensor]:
    """This rank's o, dq, dk, dv and, of a whole key_bias, dkey_bias."""
    sharding = ring.sharding(whole[0].shape[1], layout=layout)
    q, k, v, do = (sharding.shard(x, dim=1) for x in whole)
    bias = None if key_bias is None else sharding.shard(key_bias, dim=1)
    leaves = [x for x in (q, k, v, bias) if x is not None]
    for x in leaves:
        x.requires_grad_()
    o = ring_attention(q, k, v, sharding, deterministic=True, key_bias=bias, **mask)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def expect(ring: Ring, whole: list[Tensor], layout: str, budget: int, **mask: Any) -> list[Tensor]:
    """The same of the simulated ring."""
    q, k, v, do = whole
    found = simulate_ring(
        q, k, v, ring.world_size, layout=layout, do=do, deterministic=True, memory_budget=budget, **mask
    )
    assert found.grads is not None
    sharding = ring.sharding(q.shape[1], layout=layout)
    return [sharding.shard(found.o, dim=1), *(sharding.shard(x, dim=1) for x in found.grads.values())]


def assert_same(found: list[Tensor], expected: list[Tensor], about: str) -> None:
    assert len(found) == len(expected)
    for name, x, y in zip(("o", "dq", "dk", "dv", "dkey_bias"), found, expected, strict=False):
        assert torch.equal(x, y), f"{about}: {name} differs by {(x.float() - y.float()).abs().max().item()}"


def capture(step: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A graph of a step that was made a few times before, and what it writes at each replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        captured = step()
    return graph, captured


CASES: list[tuple[str, int, dict[str, Any], dict[str, int]]] = [
    ("zigzag", 1003, {"causal": True}, {}),
    ("contiguous", 777, {}, {"batch": 2, "dim": 64}),
    ("contiguous", 2048, {"causal": True, "window": 300}, {"kv_heads": 8}),
    ("striped", 900, {"causal": True, "softcap": 20.0}, {}),
    ("zigzag", 512, {"causal": True}, {"heads": 16, "kv_heads": 16}),
    ("balanced", 1003, {"causal": True}, {"heads": 4, "kv_heads": 1}),
    ("zigzag", 800, {"causal": True}, {"dim": 256}),
    ("zigzag", 1003, {"causal": True}, {"biased": 1}),
    ("contiguous", 700, {}, {"biased": 1, "dim": 192, "kv_heads": 8}),
]
"""Layout, tokens, mask, and sizes as in `draw`."""


def _bits(rank: int, world_size: int) -> None:
    budgets = {"gathered": PLENTY, "staged": 0}
    rings = {name: Ring(transport="copy_engine", memory_budget=budgets[name], timeout=PATIENCE) for name in budgets}
    rings["process_group"] = Ring(transport="process_group", timeout=PATIENCE)
    for case, (layout, n, options, sizes) in enumerate(CASES):
        # later calls of a kind play back what earlier ones have left: each has numbers of its own
        for seed in (case, case + 100, case + 200):
            whole = draw(seed, n, **{name: size for name, size in sizes.items() if name != "biased"})
            mask = options | ({"key_bias": draw_bias(seed, n)} if "biased" in sizes else {})
            expected = {budget: expect(rings["gathered"], whole, layout, budget, **mask) for budget in (PLENTY, 0)}
            for name, ring in rings.items():
                about = f"rank {rank}, {name}, {layout}, {list(mask)}, {seed}"
                assert_same(step(ring, whole, layout, **mask), expected[budgets.get(name, 0)], about)


def _graphs(rank: int, world_size: int) -> None:
    check_replays(Ring(transport="copy_engine", memory_budget=PLENTY, timeout=PATIENCE), expect, rank)


def check_replays(ring: Ring, expect: Callable[..., list[Tensor]], rank: int) -> None:
    """Training steps on a ring from a CUDA graph, beside plain ones, have the bits that are expected."""
    n = 256 * ring.world_size
    sharding = ring.sharding(n)
    q, k, v, do = (sharding.shard(x, dim=1) for x in draw(0, n))
    for x in (q, k, v):
        x.requires_grad_()

    def train() -> list[Tensor]:
        o = ring_attention(q, k, v, sharding, causal=True, deterministic=True)
        return [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]

    graph, captured = capture(train)
    for seed in range(1, 6):
        whole = draw(seed, n)
        with torch.no_grad():
            for x, y in zip((q, k, v, do), whole, strict=True):
                x.copy_(sharding.shard(y, dim=1))
        graph.replay()
        replayed = [x.clone() for x in captured]
        if seed % 2:
            # calls between replays take their turns with them
            assert_same(train(), replayed, f"rank {rank}, call after replay {seed}")
        assert_same(replayed, expect(ring, whole, "zigzag", PLENTY, causal=True), f"rank {rank}, replay {seed}")


def _subgroups(rank: int, world_size: int) -> None:
    if world_size < 4:
        return
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[rank // 2]
    assert isinstance(mine, dist.ProcessGroup)
    rings = [Ring(mine, transport="copy_engine", memory_budget=PLENTY, timeout=PATIENCE) for _ in range(2)]
    rings.append(Ring(transport="copy_engine", memory_budget=PLENTY, timeout=PATIENCE))
    for seed in range(6):
        ring = rings[seed % 3]
        # the groups compute different things at the same time
        whole = draw(seed + 10 * (rank // 2) * (ring.world_size == 2), 512 + 100 * (seed % 3))
        found = step(ring, whole, "zigzag", causal=True)
        assert_same(found, expect(ring, whole, "zigzag", PLENTY, causal=True), f"rank {rank}, ring {ring.name}")


def _beside_collectives(rank: int, world_size: int) -> None:
    ring = Ring(transport="copy_engine", memory_budget=PLENTY, timeout=PATIENCE)
    other, traffic = dist.new_group(), torch.cuda.Stream()
    assert isinstance(other, dist.ProcessGroup)
    whole = draw(0, 2048)
    expected = expect(ring, whole, "zigzag", PLENTY, causal=True)
    weights = torch.full((4 * 2**20,), float(rank + 1), device="cuda")
    gathered = torch.empty(world_size * weights.numel(), device="cuda")
    total = world_size * (world_size + 1) / 2
    for turn in range(30):
        with torch.cuda.stream(traffic):
            dist.all_gather_into_tensor(gathered, weights, group=other)
            summed = weights.clone()
            dist.all_reduce(summed, group=other)
        found = step(ring, whole, "zigzag", causal=True)
        assert_same(found, expected, f"rank {rank}, turn {turn}")
        traffic.synchronize()
        assert bool((summed == total).all())


def check_keys_in_place(ring: Ring, expect: Callable[..., list[Tensor]], rank: int) -> None:
    """Keys that a model writes where they leave from, in two buffers by turns."""
    n = 300 * ring.world_size + 1
    sharding = ring.sharding(n)
    for seed in range(4):
        q, k, v, do = draw(seed, n)
        held = ring.kv_buffer(sharding, 1, 4, 128, dtype=torch.bfloat16, name=f"layer {seed % 2}")
        for target, x in zip(held, (k, v), strict=True):
            target.copy_(sharding.shard(x, dim=1))
        mine = sharding.shard(q, dim=1).requires_grad_()
        keys, values = (x.detach().requires_grad_() for x in held)
        o = ring_attention(mine, keys, values, sharding, causal=True, deterministic=True)
        grads = torch.autograd.grad(o, (mine, keys, values), sharding.shard(do, dim=1))
        expected = expect(ring, [q, k, v, do], "zigzag", PLENTY, causal=True)
        assert_same([o.detach(), *grads], expected, f"rank {rank}, buffer {seed}")


def _keys_in_place(rank: int, world_size: int) -> None:
    check_keys_in_place(Ring(transport="copy_engine", memory_budget=PLENTY, timeout=PATIENCE), expect, rank)


def _keys_kept(rank: int, world_size: int) -> None:
    rings = [
        Ring(transport="copy_engine", memory_budget=PLENTY, timeout=PATIENCE, save_gathered_kv=keep)
        for keep in (False, True)
    ]
    n = 300 * world_size + 1

    def layers(ring: Ring, seed: int) -> list[Tensor]:
        """Two layers whose backwards come in the opposite order, the second twice, and one that nobody differentiates."""
        sharding = ring.sharding(n)
        q, k, v, do = (sharding.shard(x, dim=1) for x in draw(seed, n))
        for x in (q, k, v):
            x.requires_grad_()
        first = ring_attention(q, k, v, sharding, causal=True, deterministic=True)
        ring_attention(q, v, k, sharding, causal=True, deterministic=True)
        keys, values = first[:, :, :4].contiguous(), first[:, :, 4:].contiguous()
        o = ring_attention(q, keys, values, sharding, causal=True, deterministic=True)
        again = torch.autograd.grad(o, (keys, values), do, retain_graph=True)
        return [o.detach(), *again, *torch.autograd.grad(o, (q, k, v), do)]

    for seed in range(4):
        found = [layers(ring, seed) for ring in rings]
        for i, (x, y) in enumerate(zip(*found, strict=True)):
            assert torch.equal(x, y), (
                f"rank {rank}, call {seed}, tensor {i}: {(x.float() - y.float()).abs().max().item()}"
            )
    # captured together, replayed between other calls
    ring = rings[1]
    sharding = ring.sharding(n)
    leaves = [sharding.shard(x, dim=1) for x in draw(0, n)]
    for x in leaves[:3]:
        x.requires_grad_()

    def train() -> list[Tensor]:
        o = ring_attention(leaves[0], leaves[1], leaves[2], sharding, causal=True, deterministic=True)
        return [o.detach(), *torch.autograd.grad(o, leaves[:3], leaves[3])]

    graph, captured = capture(train)
    for seed in range(1, 5):
        whole = draw(seed, n)
        with torch.no_grad():
            for x, y in zip(leaves, whole, strict=True):
                x.copy_(sharding.shard(y, dim=1))
        graph.replay()
        replayed = [x.clone() for x in captured]
        if seed % 2:
            assert_same(train(), replayed, f"rank {rank}, call after replay {seed}")
        assert_same(replayed, expect(ring, whole, "zigzag", PLENTY, causal=True), f"rank {rank}, replay {seed}")


def _come_again(rank: int, world_size: int) -> None:
    """Steps of two shapes whose tensors come back to the same memory, on two streams in turns."""
    ring = Ring(transport="copy_engine", memory_budget=PLENTY, timeout=PATIENCE)
    kinds: list[tuple[int, dict[str, Any]]] = [
        (256 * world_size, {"causal": True}),
        (333 * world_size + 1, {"window": 200}),
    ]
    shardings = [ring.sharding(n) for n, _ in kinds]
    inputs = [[sharding.shard(x, dim=1) for x in draw(0, n)] for sharding, (n, _) in zip(shardings, kinds, strict=True)]
    for leaves in inputs:
        for x in leaves[:3]:
            x.requires_grad_()
    seeds, other = range(1, 13), torch.cuda.Stream()
    wholes = {(seed, kind): draw(seed, n) for seed in seeds for kind, (n, _) in enumerate(kinds)}
    parts = {key: [shardings[key[1]].shard(x, dim=1) for x in whole] for key, whole in wholes.items()}
    found = {
        (seed, kind): [torch.empty_like(x) for x in (inputs[kind][0], *inputs[kind][:3])]
        for seed in seeds
        for kind in range(2)
    }
    graphs: list[int] = []
    for seed in seeds:
        # one kind alone, then both in turns, then both on another stream
        for kind in range(1 if seed < 5 else 2):
            stream = other if seed in (10, 11) else torch.cuda.current_stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                with torch.no_grad():
                    for x, y in zip(inputs[kind], parts[seed, kind], strict=True):
                        x.copy_(y)
                q, k, v, do = inputs[kind]
                o = ring_attention(q, k, v, shardings[kind], deterministic=True, **kinds[kind][1])
                grads = torch.autograd.grad(o, (q, k, v), do)
                for x, y in zip(found[seed, kind], (o, *grads), strict=True):
                    x.copy_(y.detach())
                del o, grads
            torch.cuda.current_stream().wait_stream(stream)
        transport: Any = ring.context.transport
        graphs.append(sum(len(one.graphs) for one in transport._graphs._calls.values()))
    torch.cuda.synchronize()
    for (seed, kind), here in found.items():
        if kind == 0 or seed >= 5:
            expected = expect(ring, wholes[seed, kind], "zigzag", PLENTY, **kinds[kind][1])
            assert_same(here, expected, f"rank {rank}, seed {seed}, kind {kind}, graphs {graphs}")
    # where buffers grow all begin anew
    assert graphs[3] >= 2, f"a forward and a backward come again at the same addresses, got {graphs} graphs"
    assert graphs[-1] >= 4, f"of both kinds, got {graphs}"


BODIES: list[Callable[[int, int], None]] = [
    _bits, _graphs, _subgroups, _beside_collectives, _keys_in_place, _keys_kept, _come_again,
]  # fmt: skip


@pytest.mark.skipif(not IS_HOPPER, reason="needs compute capability 9.0")
@pytest.mark.parametrize("body", BODIES, ids=[body.__name__.strip("_") for body in BODIES])
def test_several_gpus_give_the_bits_of_the_simulated_ring(body: Callable[[int, int], None]) -> None:
    run(body, min(RANKS, 4))
