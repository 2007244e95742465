"""The fused schedule: the keys of all owners arrive while one kernel computes.

Holds the order of gather, launch and release.

Note [Saved K/V]
    A fused forward may save the gathered K/V in a tensor of the call's own. The backward that is given it gathers nothing; only
    gradient contributions move. Either all ranks save a call's K/V or none does. Kernels, plans and head groups are those of a
    backward that gathers, and so are the bits. A call with key_bias saves nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ringattn.kernels.comm.grad_reduce import reduce_key_bias_grads, reduce_kv_grads
from ringattn.kernels.interface import Arrivals, BackwardStep, Grads, Returns, Score, Step
from ringattn.kernels.runtime.table_cache import find
from ringattn.schedule.execution_plan import (
    BackwardCall,
    ForwardCall,
    FusedPlan,
    Gradients,
    enqueue_or_replay,
    present,
)
from ringattn.transport.base import KVGather, KVGatherHandle, RingContext, span


def fused_forward(call: ForwardCall, *, keep: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return o, lse and the saved K/V of this rank's query rows over the keys of all ranks, in one launch.

    See `dispatch.run_forward`.
    """
    q, k, v, score, plan, context, _ = call
    fused, kv_gather = gather_of(plan.fused_forward, context)
    o, lse = call.results()
    keep = keep and score.key_bias is None and plan.fused_backward is not None
    saved: Tensor | None = None

    def enqueue() -> tuple[Any, ...]:
        nonlocal saved
        rows, keys = find(fused.tables.rows), find(fused.tables.keys[0])
        handle = kv_gather.gather(k, v, fused.gather_plan, fused.groups, "forward", key_bias=score.key_bias, keep=keep)
        step = Step(q, k, v, rows, keys, _with_bias(score, handle), o, lse, sm_margin=kv_gather.sm_margin)
        plan.kernels.forward_fused(step, Arrivals(handle.k, handle.v, handle.ready_flags))
        handle.close()
        saved = handle.saved
        return rows, keys

    with span("ring forward: all ring steps in one launch"):
        is_short = plan.is_short_forward and not keep
        enqueue_or_replay(context.transport, plan, is_short, ("forward",), score, (q, k, v), (o, lse), enqueue)
    return o, lse, saved


def fused_backward(call: BackwardCall, *, saved: Tensor | None = None) -> Gradients:
    """Return the gradients of `fused_forward`.

    The gradient of bias is no part of this schedule. saved: the K/V that the forward saved; None: they are gathered again.
    """
    do, dlse, q, k, v, o, lse, score, plan, context, wanted, _ = call
    fused, kv_gather = gather_of(plan.fused_backward, context)
    b, _, hk, d = k.shape
    is_short = saved is None and plan.is_short_backward
    delta = torch.empty_like(lse, memory_format=torch.contiguous_format)
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    # allocated later, they may reuse memory of the kernels before
    dk, dv = _like(k, v) if is_short else (k, v)
    dalibi = torch.empty_like(lse) if wanted.alibi_slopes else None
    dkey_bias = torch.empty(k.shape[:2], dtype=torch.float32, device=k.device) if wanted.key_bias else None

    def enqueue() -> tuple[Any, ...]:
        nonlocal dk, dv
        tables = fused.tables
        rows, keys, returning = find(tables.rows), find(tables.keys[0]), find(tables.returning[0])
        shape = (b, hk, d + v.shape[-1])
        grad_return = kv_gather.grad_return(shape, fused.gather_plan, "backward", biased=wanted.key_bias)
        joint = score
        if saved is None:
            handle = kv_gather.gather(
                k, v, fused.gather_plan, fused.groups, "backward", key_bias=score.key_bias, grad_return=grad_return
            )
            arrivals, joint = Arrivals(handle.k, handle.v, handle.ready_flags), _with_bias(score, handle)
        else:
            ready_flags = kv_gather.saved_ready_flags(fused.gather_plan, fused.groups)
            arrivals = Arrivals(saved[..., :d], saved[..., d:], ready_flags)
            grad_return.begin()
        margin = kv_gather.sm_margin
        step = BackwardStep(do, q, k, v, lse, delta, rows, keys, joint, o, dlse, sm_margin=margin)
        returns = Returns(grad_return.addresses, grad_return.rows, grad_return.bias_addresses)
        plan.kernels.backward_fused(step, arrivals, returns, Grads(dq, dalibi=dalibi))
        if not is_short:
            dk, dv = _like(k, v)
        parts, bias_parts = grad_return.receive()
        reduce_kv_grads(dk, dv, grad_return.local_grads, parts, returning)
        if dkey_bias is not None and grad_return.local_bias_grads is not None:
            reduce_key_bias_grads(dkey_bias, grad_return.local_bias_grads, bias_parts, returning)
        grad_return.close()
        return rows, keys, returning

    with span("ring backward: all ring steps in one launch"):
        key = "backward", dlse is None, dalibi is None
        given, made = (do, q, k, v, o, lse, *present(dlse)), (delta, dq, dk, dv, *present(dalibi))
        enqueue_or_replay(context.transport, plan, is_short, key, score, given, made, enqueue)
    return call.gradients(dq, dk, dv, delta, dalibi, dkey_bias)


def gather_of(fused: FusedPlan | None, context: RingContext) -> tuple[FusedPlan, KVGather]:
    """Return the fused plan of a direction and the transport's gather, which are there when a call was resolved to it."""
    kv_gather = context.transport.kv_gather()
    assert fused is not None, "the fused schedule runs calls that were resolved to it"
    assert kv_gather is not None, "the fused schedule needs a transport that gathers"
    return fused, kv_gather


def _like(*tensors: Tensor) -> list[Tensor]:
    """Return contiguous tensors like these."""
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]


def _with_bias(score: Score, handle: KVGatherHandle) -> Score:
    """Return the score of a fused launch, whose bias table holds local and remote keys: one fp32 number per key."""
    return score if score.key_bias is None else dataclasses.replace(score, key_bias=handle.key_bias)
