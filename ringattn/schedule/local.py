"""The schedule of a ring of one rank: one launch forward, one backward, and nothing moves."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ringattn.kernels.interface import BackwardStep, Grads, Step
from ringattn.kernels.runtime.table_cache import find
from ringattn.schedule.execution_plan import BackwardCall, ForwardCall, Gradients, enqueue_or_replay, present
from ringattn.transport.base import span


def local_forward(call: ForwardCall) -> tuple[Tensor, Tensor]:
    """Return o and lse of all rows. See `stepwise_forward`."""
    q, k, v, score, plan, context, _ = call
    o, lse = call.results()
    keys_table = plan.tables.moving[0]
    if keys_table is None:
        # no row sees a key: a launch over an empty buffer writes the empty rows
        keys_table, k, v = plan.tables.nothing, k[:, :0], v[:, :0]
        score = dataclasses.replace(score, key_bias=None if score.key_bias is None else score.key_bias[:, :0])

    def enqueue() -> tuple[Any, ...]:
        rows, keys = find(plan.tables.stationary), find(keys_table)
        plan.kernels.forward(Step(q, k, v, rows, keys, score, o, lse))
        return rows, keys

    if q.shape[1]:
        with span("ring step 0: keys of rank 0"):
            enqueue_or_replay(
                context.transport, plan, plan.is_short_forward, ("forward",), score, (q, k, v), (o, lse), enqueue
            )
    return o, lse


def local_backward(call: BackwardCall) -> Gradients:
    """Return the gradients of `local_forward`."""
    do, dlse, q, k, v, o, lse, score, plan, context, wanted, _ = call
    wide = plan.wide
    # one step adds to no other, so gradients are rounded at once
    delta, dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (lse, q, k, v))
    dalibi = torch.empty_like(delta) if wanted.alibi_slopes else None
    dkey_bias = torch.empty(k.shape[:2], dtype=wide, device=k.device) if wanted.key_bias else None
    b, s, h, _ = q.shape
    dbias = torch.zeros(b, h, s, plan.spec.kv_sharding.seq_len, dtype=wide, device=q.device) if wanted.bias else None
    keys_table = plan.tables.moving[0]

    def enqueue() -> tuple[Any, ...]:
        assert keys_table is not None, "a call without visible pairs is never computed"
        rows, keys = find(plan.tables.stationary), find(keys_table)
        step = BackwardStep(do, q, k, v, lse, delta, rows, keys, score, o, dlse)
        plan.kernels.backward(step, Grads(dq, dk, dv, dkey_bias, dalibi, dbias))
        return rows, keys

    if keys_table is None:
        plan.kernels.delta(o, do, dlse, delta)
        for x in (dq, dk, dv, *present(dalibi), *present(dkey_bias)):
            x.zero_()
    else:
        key = "backward", dlse is None, dalibi is None
        given, made = (do, q, k, v, o, lse, *present(dlse)), (delta, dq, dk, dv, *present(dalibi))
        with span("ring step 0 backward: keys of rank 0"):
            enqueue_or_replay(context.transport, plan, plan.is_short_backward, key, score, given, made, enqueue)
    return call.gradients(dq, dk, dv, delta, dalibi, dkey_bias, dbias)
