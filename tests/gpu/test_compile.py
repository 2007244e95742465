"""Compiled blocks on GPUs: CUDA graphs of the compiler around the ring, and captures by hand with the ring inside.

python -m pytest -m gpu tests/gpu/test_compile.py

`mode="reduce-overhead"` makes each of its graphs in three runs: an eager one in the graphs' own memory pool, one that is
captured, and replays from then on. The ring's operators are tagged so that they stay between the graphs (Note [Beside
compiled graphs] of autograd.py): tables, buffers and programs that a ring makes at first sight come from ordinary memory,
and a signature may be new in any step. The steps below are more than those runs, and change their length in the middle.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch.nn.functional import rms_norm, silu

from ringattn import Ring, Sharding, ring_attention
from tests.gpu.test_copy_engine import GPUS, RANKS, run
from tests.gpu.test_ring import capture

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), pytest.mark.skipif(GPUS < 1, reason="needs a GPU")]
PATIENCE = timedelta(minutes=5)  # ranks compile while others wait
WIDTH, HEADS, KV_HEADS, HEAD_DIM = 256, 4, 2, 64
STEPS = 6


class Block(nn.Module):
    """Norm, ring attention, norm, MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, sharding: Sharding) -> Tensor:
        b, s, _ = x.shape
        found = self.qkv(rms_norm(x, (WIDTH,))).view(b, s, -1, HEAD_DIM)
        q, k, v = found.split((HEADS, KV_HEADS, KV_HEADS), 2)
        o = ring_attention(q, k, v, sharding, causal=True, deterministic=True)
        x = x + self.out(o.reshape(b, s, -1))
        return x + self.down(silu(self.up(rms_norm(x, (WIDTH,)))))


def make_blocks() -> nn.Sequential:
    torch.manual_seed(1)  # the same weights on every rank
    return nn.Sequential(Block(), Block()).to("cuda", torch.bfloat16)


def rows_of(sharding: Sharding, seed: int) -> Tensor:
    g = torch.Generator("cuda").manual_seed(seed)
    whole = torch.randn(1, sharding.seq_len, WIDTH, device="cuda", generator=g).bfloat16()
    return sharding.shard(whole, 1).requires_grad_()


def train(blocks: nn.Module, forward: Callable[..., Tensor], x: Tensor, sharding: Sharding) -> list[Tensor]:
    """O, dx and the gradients of all weights; copies, because replays overwrite what they return."""
    torch.compiler.cudagraph_mark_step_begin()
    o = forward(x, sharding)
    (o.float() * o.detach().float().cos()).sum().backward()
    found = [o.detach().clone()]
    for leaf in (x, *blocks.parameters()):
        assert leaf.grad is not None
        found.append(leaf.grad.clone())
        leaf.grad = None
    return found


def assert_near(found: list[Tensor], exact: list[Tensor], eager: list[Tensor], about: str) -> None:
    """The error against fp32 blocks is at most twice that of eager bf16, and a rounding band."""
    for i, (x, y, z) in enumerate(zip(found, exact, eager, strict=True)):
        error, allowed = ((t.float() - y.float()).norm().item() for t in (x, z))
        band = 2**-8 * y.float().norm().item()
        assert error <= 2 * allowed + band, f"{about}, tensor {i}: error {error}, eager {allowed}, band {band}"


def _reduce_overhead(rank: int, world_size: int, transport: str = "auto", budget: int | None = None) -> None:
    ring = Ring(transport=transport, memory_budget=budget, timeout=PATIENCE)
    blocks = make_blocks()
    exact_blocks = make_blocks().float()

    def forward(x: Tensor, sharding: Sharding) -> Tensor:
        for block in blocks:
            x = block(x, sharding)
        return x

    def exact(x: Tensor, sharding: Sharding) -> Tensor:
        for block in exact_blocks:
            x = block(x, sharding)
        return x

    # what comes from a cache on disk is not counted
    inductor.force_disable_caches = True
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(forward, fullgraph=True, mode="reduce-overhead", dynamic=False)
    lengths = [512 * world_size] * STEPS + [384 * world_size + 1] * STEPS + [512 * world_size] * 2
    # one sharding per length as a training job has it; each signature is first seen by the compiled blocks
    shardings = {n: ring.sharding(n, device="cuda") for n in lengths}
    for step, n in enumerate(lengths):
        x = rows_of(shardings[n], step)
        found = train(blocks, compiled, x, shardings[n])
        eager = train(blocks, forward, x, shardings[n])
        wide = x.detach().float().requires_grad_()
        assert_near(
            found, train(exact_blocks, exact, wide, shardings[n]), eager, f"rank {rank}, step {step}, {n} tokens"
        )
    # graphs were made, in front of the ring, behind it and between two of them
    assert counters["inductor"]["cudagraph_skips"] == 0, dict(counters["inductor"])
    assert counters["inductor"]["cudagraph_partitions"] >= 3, dict(counters["inductor"])
    assert not counters["graph_break"]


def _staged(rank: int, world_size: int) -> None:
    _reduce_overhead(rank, world_size, budget=0)


def _process_group(rank: int, world_size: int) -> None:
    _reduce_overhead(rank, world_size, "process_group")


def _whole_step_by_hand(rank: int, world_size: int) -> None:
    """Compiled blocks without graphs of their own, captured with the ring inside: one launch per step."""
    transport = "copy_engine" if world_size > 1 else "auto"
    ring = Ring(transport=transport, memory_budget=2**40, timeout=PATIENCE)
    sharding = ring.sharding(512 * world_size, device="cuda")
    blocks = make_blocks()
    torch._dynamo.reset()
    for block in blocks:
        block.compile(fullgraph=True, dynamic=False)

    def forward(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x, sharding)
        return x

    x = rows_of(sharding, 0)
    do = torch.randn_like(x)
    leaves = [x, *blocks.parameters()]

    def step() -> list[Tensor]:
        o = forward(x)
        return [o.detach(), *torch.autograd.grad(o, leaves, do)]

    graph, captured = capture(step)
    for seed in range(1, 5):
        with torch.no_grad():
            x.copy_(rows_of(sharding, seed))
        graph.replay()
        replayed = [t.clone() for t in captured]
        for i, (a, b) in enumerate(zip(replayed, step(), strict=True)):
            # matrix products may choose other algorithms inside a capture
            error = (a.float() - b.float()).norm() / b.float().norm()
            assert error < 2**-7, f"rank {rank}, replay {seed}, tensor {i}: {error}"


BODIES: list[Callable[[int, int], Any]] = [_reduce_overhead, _staged, _process_group, _whole_step_by_hand]


@pytest.mark.parametrize("world_size", [1, RANKS] if RANKS > 1 else [1])
@pytest.mark.parametrize("body", BODIES, ids=[body.__name__.strip("_") for body in BODIES])
def test_compiled_blocks_equal_eager_with_cuda_graphs_around_the_ring(
    body: Callable[[int, int], Any], world_size: int
) -> None:
    if world_size == 1 and body in (_staged, _process_group):
        pytest.skip("a ring of one moves nothing")
    run(body, world_size)
