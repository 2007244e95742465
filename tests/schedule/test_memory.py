"""Memory of the stepwise schedule: buffers do not grow with the number of ranks, nor from call to call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ringattn.kernels.interface import KernelSet, Score, accumulation_dtype
from ringattn.plan.attention_spec import AttentionSpec, ScoreTensors, serialize
from ringattn.plan.layouts import make_shards
from ringattn.plan.sharding import Sharding
from ringattn.schedule.execution_plan import BackwardCall, ForwardCall, WantedGrads, make_execution_plan
from ringattn.schedule.stepwise_backward import stepwise_backward
from ringattn.schedule.stepwise_forward import stepwise_forward
from ringattn.transport.base import Done, RingContext, Transport

ROWS = 64
"""Rows of a shard."""


class NoKernels(KernelSet):
    """Kernels that write nothing: the loops' own tensors are left."""

    def forward(self, step: Any) -> None:
        """Write nothing."""

    def backward(self, step: Any, grads: Any) -> None:
        """Write nothing."""

    def delta(self, o: torch.Tensor, do: torch.Tensor, dlse: Any, out: Any = None) -> torch.Tensor:
        return torch.empty(o.shape[0], o.shape[2], o.shape[1], dtype=accumulation_dtype(o.dtype))


class NoWire(Transport):
    """Transport of a rank whose peers are not there."""

    def post(self, sends: Any, receives: Any, what: str) -> Any:
        return Done()

    def reserve(self, num_bytes: int, grad_bytes: int = 0) -> None:
        """Reserve nothing."""


def buffer_bytes(world_size: int, rank: int, kv_heads: int, calls: int) -> int:
    """Return the bytes of the ring's buffers after a number of forwards and backwards."""
    sharding = Sharding(ROWS * world_size, "zigzag", make_shards("zigzag", ROWS * world_size, world_size), rank)
    spec = AttentionSpec.deserialize(serialize(sharding, softmax_scale=1.0, impl="eager", causal=True), rank)
    context = RingContext(rank, world_size, NoWire())
    q, do = (torch.zeros(1, ROWS, 4, 16, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.zeros(1, ROWS, kv_heads, 16, dtype=torch.bfloat16) for _ in range(2))
    plan = make_execution_plan(spec, q, k, v, ScoreTensors(), NoKernels, context)
    for _ in range(calls):
        o, lse = stepwise_forward(ForwardCall(q, k, v, Score(1.0), plan, context))
        stepwise_backward(BackwardCall(do, None, q, k, v, o, lse, Score(1.0), plan, context, WantedGrads()))
    return context.buffers.num_bytes()


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_buffers_do_not_grow_with_ranks_or_calls(kv_heads: int) -> None:
    sizes = [buffer_bytes(world_size, 0, kv_heads, 1) for world_size in (4, 8, 16)]
    assert sizes[0] > 0
    assert sizes == [sizes[0]] * 3
    assert buffer_bytes(8, 3, kv_heads, 4) == buffer_bytes(8, 3, kv_heads, 1)
