"""The stepwise forward: at each ring step one shard of K/V meets this rank's queries.

Holds the loop. How rows move is in kv_rotation.py.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ringattn.kernels.interface import Score, SoftmaxState, Step, accumulation_dtype
from ringattn.kernels.runtime.table_cache import find
from ringattn.schedule.execution_plan import ExecutionPlan
from ringattn.schedule.kv_rotation import KVPrefetcher, moving_tensors, reserve
from ringattn.transport.base import RingContext, span


def stepwise_forward(
    q: Tensor, k: Tensor, v: Tensor, score: Score, plan: ExecutionPlan, context: RingContext
) -> tuple[Tensor, Tensor]:
    """Return o and lse of this rank's query rows over the keys of all ranks; takes arguments of `dispatch.run_forward`."""
    b, s, h, _ = q.shape
    o = torch.empty(b, s, h, v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty(b, h, s, dtype=accumulation_dtype(q.dtype), device=q.device)
    rows, ring_steps = find(plan.tables.stationary), plan.ring_plan.ranks[context.rank].ring_steps
    take, state = context.buffers.take, None
    if plan.last_step > plan.first_step:
        state = SoftmaxState(
            m=take("carry m", lse.shape, lse.dtype, lse.device),
            l=take("carry l", lse.shape, lse.dtype, lse.device),
            acc=take("carry acc", o.shape, lse.dtype, o.device),
        )
    if plan.first_step < 0 and s:
        # this rank sees no key at all: one step over an empty buffer writes the empty rows
        empty = score if score.key_bias is None else dataclasses.replace(score, key_bias=score.key_bias[:, :0])
        keys = find(plan.tables.nothing)
        plan.kernels.forward(Step(q, k[:, :0], v[:, :0], rows, keys, empty, o, lse))
    moving = moving_tensors("keys", q, k, v, score)
    reserve(plan.ring_plan, context, moving)
    prefetcher = KVPrefetcher(moving, plan.ring_plan.ranks[context.rank], context, "forward, keys")
    for step, (ring_step, keys) in enumerate(zip(ring_steps, plan.tables.moving, strict=True)):
        held = prefetcher.wait_for(step)
        prefetcher.post(step)
        if ring_step is None or keys is None or s == 0:
            continue
        with span("ring step {}: keys of rank {}", step, ring_step.owner):
            here = score if score.key_bias is None else dataclasses.replace(score, key_bias=held[2])
            first, last = step == plan.first_step, step == plan.last_step
            plan.kernels.forward(Step(q, held[0], held[1], rows, find(keys), here, o, lse, state, first, last))
    return o, lse
