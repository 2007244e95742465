"""The stepwise forward: at each ring step one shard of K/V meets this rank's queries.

Holds the loop. How rows move is in kv_rotation.py.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from ringattn.kernels.interface import SoftmaxState, Step
from ringattn.kernels.runtime.table_cache import find
from ringattn.schedule.execution_plan import ForwardCall
from ringattn.schedule.kv_rotation import KVPrefetcher, moving_tensors, reserve
from ringattn.schedule.latents import pieces
from ringattn.transport.base import span


def stepwise_forward(call: ForwardCall) -> tuple[Tensor, Tensor]:
    """Return o and lse of this rank's query rows over the keys of all ranks.

    With latents, their rows travel in place of k and v, and are expanded once they are here.
    """
    q, k, v, score, plan, context, latents = call
    o, lse = call.results()
    s = q.shape[1]
    rows, ring_steps = find(plan.tables.stationary), plan.ring_plan.ranks[context.rank].ring_steps
    take, state = context.buffers.take, None
    if plan.last_step > plan.first_step or latents is not None:
        state = SoftmaxState(
            m=take("carry m", lse.shape, lse.dtype, lse.device),
            l=take("carry l", lse.shape, lse.dtype, lse.device),
            acc=take("carry acc", o.shape, lse.dtype, o.device),
            held=[],
        )
    if plan.first_step < 0 and s:
        # this rank sees no key at all: one step over an empty buffer writes the empty rows
        empty = score if score.key_bias is None else dataclasses.replace(score, key_bias=score.key_bias[:, :0])
        keys = find(plan.tables.nothing)
        plan.kernels.forward(Step(q, k[:, :0], v[:, :0], rows, keys, empty, o, lse))
    moving = moving_tensors("keys", q, k, v, score, latents=latents)
    reserve(plan.ring_plan, context, moving)
    prefetcher = KVPrefetcher(moving, plan.moves, context, "forward, keys")
    for step, (ring_step, keys) in enumerate(zip(ring_steps, plan.tables.moving, strict=True)):
        held = prefetcher.wait_for(step)
        prefetcher.post(step)
        if ring_step is None or keys is None or s == 0:
            continue
        with span("ring step {}: keys of rank {}", step, ring_step.owner):
            found = find(keys)
            parts = [(slice(None), found)] if latents is None else pieces(found, latents.rows_at_once())
            for i, (part, side) in enumerate(parts):
                here = score if score.key_bias is None else dataclasses.replace(score, key_bias=held[-1][:, part])
                k, v = held[:2] if latents is None else latents.expand(held[0][:, part], context.buffers)
                first, last = step == plan.first_step and i == 0, step == plan.last_step and i == len(parts) - 1
                plan.kernels.forward(Step(q, k, v, rows, side, here, o, lse, state, first, last))
    return o, lse
