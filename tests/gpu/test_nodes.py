"""Two nodes of two GPUs each, on one host: copy engines within, NCCL and a throttle between; every schedule to the bit.

python -m pytest -m gpu tests/gpu/test_nodes.py        # four GPUs
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import Ring, simulate_ring
from ringattn.launch.check.poison import poison_buffers
from ringattn.transport.copy_engine.transport import CopyEngineTransport
from tests.gpu.test_copy_engine import RANKS, SHARED, run
from tests.gpu.test_ring import PATIENCE, PLENTY, assert_same, check_keys_in_place, check_replays, draw, step
from tests.support.slow_link import slow_down

IS_HOPPER = RANKS >= 4 and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(RANKS < 4, reason="needs four GPUs")]
NODES = 2


def make(budget: int = PLENTY, transport: str = "copy_engine", gbps: float | None = None) -> Ring:
    ring = Ring(nodes=NODES, transport=transport, memory_budget=budget, timeout=PATIENCE)
    return ring if gbps is None else slow_down(ring, gbps)


def expect(ring: Ring, whole: list[Tensor], layout: str, budget: int, **mask: Any) -> list[Tensor]:
    """This rank's rows of the simulated ring of as many nodes, as `step` gives those of the real one."""
    q, k, v, do = whole
    found = simulate_ring(
        q, k, v, ring.world_size, nodes=NODES, layout=layout, do=do, deterministic=True, memory_budget=budget, **mask
    )
    assert found.grads is not None
    sharding = ring.sharding(q.shape[1], layout=layout)
    dtype = torch.bfloat16
    return [sharding.shard(x, dim=1).to(dtype) for x in (found.o, *(found.grads[name] for name in "qkv"))]


def _bits(rank: int, world_size: int) -> None:
    rings = {
        "one launch per node step": (make(), PLENTY),
        "one launch per node step, throttled": (make(gbps=200.0), PLENTY),
        "step by step": (make(0), 0),
        "process group": (make(0, "process_group"), 0),
    }
    cases: list[tuple[str, int, dict[str, Any], dict[str, int]]] = [
        ("zigzag", 1003, {"causal": True}, {}),
        ("contiguous", 777, {}, {"batch": 2, "dim": 64}),
        ("contiguous", 2048, {"causal": True, "window": 300}, {"kv_heads": 8}),
        ("striped", 900, {"causal": True, "softcap": 20.0}, {}),
        ("zigzag", 512, {"causal": True}, {"heads": 16, "kv_heads": 16, "batch": 2}),
        ("balanced", 1003, {"causal": True}, {"heads": 4, "kv_heads": 1}),
    ]
    for seed, (layout, n, mask, sizes) in enumerate(cases):
        whole = draw(seed, n, **sizes)
        for name, (ring, budget) in rings.items():
            expected = expect(ring, whole, layout, budget, **mask)
            for _ in range(3):
                assert_same(step(ring, whole, layout, **mask), expected, f"rank {rank}, {name}, {layout}, {mask}")
    for name, (ring, _) in rings.items():
        assert isinstance(ring.context.transport, CopyEngineTransport) == (name != "process group"), str(ring.transport)


def _queries_move(rank: int, world_size: int) -> None:
    ring, whole = make(), draw(0, 901)
    mask = {"causal": True, "backward": "queries"}
    expected = expect(ring, whole, "zigzag", PLENTY, **mask)
    for _ in range(3):
        assert_same(step(ring, whole, "zigzag", **mask), expected, f"rank {rank}, queries move")


def _graphs(rank: int, world_size: int) -> None:
    check_replays(make(), expect, rank)


def _alternating(rank: int, world_size: int) -> None:
    """Two rings of nodes and one of one level, calls of changing shapes, collectives of another group beside them."""
    rings = [(make(), PLENTY), (make(0), 0), (make(gbps=100.0), PLENTY)]
    flat = Ring(transport="copy_engine", memory_budget=PLENTY, timeout=PATIENCE)
    other, traffic = dist.new_group(), torch.cuda.Stream()
    assert isinstance(other, dist.ProcessGroup)
    weights = torch.full((4 * 2**20,), float(rank + 1), device="cuda")
    gathered = torch.empty(world_size * weights.numel(), device="cuda")
    sizes = [(700, {}), (1999, {"heads": 16, "kv_heads": 16}), (256, {"batch": 2})]
    expected = {
        (i, j): expect(ring, draw(j, n, **shape), "zigzag", budget, causal=True)
        for i, (ring, budget) in enumerate(rings)
        for j, (n, shape) in enumerate(sizes)
    }
    for turn in range(36):
        i, j = turn % len(rings), turn // 3 % len(sizes)
        n, shape = sizes[j]
        with torch.cuda.stream(traffic):
            dist.all_gather_into_tensor(gathered, weights, group=other)
        found = step(rings[i][0], draw(j, n, **shape), "zigzag", causal=True)
        assert_same(found, expected[i, j], f"rank {rank}, turn {turn}")
        if turn % 5 == 0:
            step(flat, draw(j, n, **shape), "zigzag", causal=True)
        if turn % 7 == 0:
            torch.cuda.synchronize()
            dist.barrier()
            poison_buffers(rings[i][0], gathered.device)
        traffic.synchronize()


def _keys_in_place(rank: int, world_size: int) -> None:
    check_keys_in_place(make(), expect, rank)


BODIES: list[Callable[[int, int], None]] = [_bits, _queries_move, _alternating, _keys_in_place]
if not SHARED:
    BODIES.append(_graphs)


@pytest.mark.skipif(not IS_HOPPER, reason="needs compute capability 9.0")
@pytest.mark.parametrize("body", BODIES, ids=[body.__name__.strip("_") for body in BODIES])
def test_two_nodes_give_the_bits_of_the_simulated_nodes(body: Callable[[int, int], None]) -> None:
    run(body, 4)
