"""The stepwise backward: one side stays, the other moves around the ring, and its gradients are returned to their owners.

Either keys move (k, v; dk and dv are returned in fp32) or queries (q, do, lse, delta; dq is returned in fp32), whichever
moves fewer bytes. A ring step writes its contribution into a buffer of its own, which is sent to the owner of the rows with the
posts of the next step. The owner adds contributions in step order, in fp32.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ringattn.kernels.interface import BackwardStep, Grads, accumulation_dtype
from ringattn.kernels.runtime.table_cache import find
from ringattn.schedule.execution_plan import BackwardCall, Gradients
from ringattn.schedule.kv_rotation import GradReturner, KVPrefetcher, moving_tensors, reserve
from ringattn.schedule.latents import LatentGrads, pieces
from ringattn.transport.base import span


def stepwise_backward(call: BackwardCall) -> Gradients:
    """Return the gradients of `stepwise_forward`."""
    do, dlse, q, k, v, o, lse, score, plan, context, wanted, latents = call
    wide, kernels, moving = accumulation_dtype(q.dtype), plan.kernels, plan.backward_moving
    mine = plan.backward_plan.ranks[context.rank]
    delta = kernels.delta(o, do, dlse)
    stationary = find(plan.backward_tables.stationary)
    payload = moving_tensors(moving, q, k, v, score, do, lse, delta, latents=latents)
    latent_grads, take = None if latents is None else LatentGrads(latents), context.buffers.take
    if latents is not None and moving == "queries":
        k, v = latents.expand(latents.rows, context.buffers)
    b, s, h, _ = q.shape

    def wide_like(x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=wide, device=x.device)

    keys = (k, v) if latents is None or moving == "queries" else (latents.rows,)
    key_side = [*map(wide_like, keys), *([wide_like(k[..., 0, 0])] if wanted.key_bias else [])]
    query_side = [wide_like(q)] + ([wide_like(lse)] if wanted.alibi_slopes else [])
    dbias = torch.zeros(b, h, s, plan.spec.kv_sharding.seq_len, dtype=wide, device=q.device) if wanted.bias else None
    moving_grads, stay = (key_side, query_side) if moving == "keys" else (query_side, key_side)
    row_dims = [1, 1, 1] if moving == "keys" else [1, 2]
    if mine.ring_steps[0] is None:
        for x in (*moving_grads, *stay):
            x.zero_()

    last_step = max((i for i, one in enumerate(mine.ring_steps) if one is not None), default=0)
    waiting = list[object]()

    def compute(step: int, held: list[Tensor], contribution: list[Tensor]) -> None:
        moved = plan.backward_tables.moving[step]
        assert moved is not None, "a ring step without visible pairs is never computed"
        side, begun = find(moved), step > 0
        if moving == "queries":
            given = BackwardStep(held[1], held[0], k, v, held[2], held[3], side, stationary, score)
            kernels.backward(given, outputs(contribution, stay, accumulate_keys=begun))
            return
        parts = [(slice(None), side)] if latents is None else pieces(side, latents.rows_at_once())
        for part, keys in parts:
            here = score if score.key_bias is None else dataclasses.replace(score, key_bias=held[-1][:, part])
            rows_here, keys_out = held[0][:, part], contribution
            k_here, v_here = held[:2] if latents is None else latents.expand(rows_here, context.buffers)
            if latents is not None:
                made = [take(name, x.shape, x.dtype, x.device) for name, x in (("dk", k_here), ("dv", v_here))]
                keys_out = [*made, *(x[:, part] for x in contribution[1:])]
            given = BackwardStep(do, q, k_here, v_here, lse, delta, stationary, keys, here, o, dlse, delta_made=True)
            held_dq = waiting if latents is None else None
            kernels.backward(
                given, outputs(stay, keys_out, accumulate_rows=begun, held=held_dq, last=step == last_step)
            )
            begun = True
            if latent_grads is not None:
                latent_grads.project(keys_out[0], keys_out[1], rows_here, contribution[0][:, part])

    def outputs(rows_out: list[Tensor], keys_out: list[Tensor], **more: Any) -> Grads:
        return Grads(
            dq=rows_out[0],
            dk=keys_out[0],
            dv=keys_out[1],
            dkey_bias=keys_out[2] if wanted.key_bias else None,
            dalibi=rows_out[1] if wanted.alibi_slopes else None,
            dbias=dbias,
            **more,
        )

    returned = list(zip(moving_grads, row_dims, strict=False))
    reserve(plan.backward_plan, context, payload, returned)
    prefetcher = KVPrefetcher(payload, plan.backward_moves, context, f"backward, {moving}")
    grad_returner = GradReturner(returned, mine, context)
    # two steps past the last: one returns its contributions, one adds them
    for step in range(context.world_size + 2):
        held = prefetcher.wait_for(step)
        grad_returner.add(step)
        if step <= context.world_size:
            prefetcher.post(step, *grad_returner.messages(step), f" and gradients of step {step - 1}")
        grad_returner.post_between_nodes(step)
        ring_step = mine.ring_steps[step] if step < context.world_size else None
        if ring_step is None:
            continue
        with span("ring step {} backward: {} of rank {}", step, moving, ring_step.owner):
            compute(step, held, grad_returner.contribution(step))
    grad_returner.finish()
    dalibi, dkey_bias = query_side[1] if wanted.alibi_slopes else None, key_side[-1] if wanted.key_bias else None
    dk, dv = key_side[0], key_side[len(keys) - 1]
    if latent_grads is not None and moving == "queries":
        dk = latent_grads.project(dk, dv)
    return call.gradients(query_side[0], dk, dv, delta, dalibi, dkey_bias, dbias, latent_grads)
