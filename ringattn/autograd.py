"""The whole ring as one custom operator: forward, backward, fakes and FLOP counts.

Owns what is saved and what is handed back. One operator per direction, because communication cannot be traced through:
`torch.compile` sees two opaque calls, selective checkpointing can keep the one that is expensive, and FLOP counters see
the visible pairs. Groups travel by name (Note [Names] in ring.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringattn import gathered
from ringattn.call import Call
from ringattn.kernels.contract import KernelSet, Score, accumulation_dtype
from ringattn.kernels.select import pick
from ringattn.living import find_ring
from ringattn.ring import Ring
from ringattn.validation import check_call


def _resolve(
    q: Tensor, k: Tensor, v: Tensor, extras: dict[str, Tensor | None], seed: int, ring: str, call: str
) -> tuple[Ring, Call, KernelSet, Score]:
    """The ring, the decoded call, its kernels and score; every refusal happens here, on every rank."""
    here: Ring = find_ring(ring)
    with here.refusals(call, (q, k, v, *extras.values())):
        decoded = Call.decode(call, here.rank)
        check_call(q, k, v, decoded, here.rank, here.world_size, **extras)
        choice = pick(
            q.device, q.dtype, q.shape[-1], v.shape[-1], impl=decoded.impl, features=decoded.features(**extras)
        )
    score = decoded.score(q.dtype, seed, **extras)
    return here, decoded, choice.kernels, score


@torch.library.custom_op("ringattn::forward", mutates_args=())
def ring_attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    key_bias: Tensor | None,
    bias: Tensor | None,
    dropout_seed: int,
    ring: str,
    call: str,
) -> tuple[Tensor, Tensor]:
    """O `b s h dv` and lse `b h s` of this rank's rows; arguments as in `ring_attention`, ring and call as text."""
    extras = {"sinks": sinks, "alibi_slopes": alibi_slopes, "key_bias": key_bias, "bias": bias}
    with torch.autocast(q.device.type, enabled=False):
        here, decoded, kernels, score = _resolve(q, k, v, extras, dropout_seed, ring, call)
        return gathered.forward(_rows(q), _rows(k), _rows(v), score, decoded, kernels, here.seat)


@torch.library.custom_op("ringattn::backward", mutates_args=())
def ring_attention_backward_op(
    do: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    key_bias: Tensor | None,
    bias: Tensor | None,
    dropout_seed: int,
    ring: str,
    call: str,
    wanted: list[bool],
) -> list[Tensor]:
    """dq, dk, dv and those of dsinks, dalibi_slopes, dkey_bias, dbias that are wanted, each in its tensor's dtype."""
    extras = {"sinks": sinks, "alibi_slopes": alibi_slopes, "key_bias": key_bias, "bias": bias}
    options = list(extras.values())
    with torch.autocast(q.device.type, enabled=False):
        here, decoded, kernels, score = _resolve(q, k, v, extras, dropout_seed, ring, call)
        grads = gathered.backward(
            torch.zeros_like(o) if do is None else _rows(do.to(o.dtype)),
            dlse,
            _rows(q),
            _rows(k),
            _rows(v),
            o,
            lse,
            score,
            decoded,
            kernels,
            here.seat,
            want_sinks=wanted[0],
            want_alibi=wanted[1],
            want_key_bias=wanted[2],
            want_bias=wanted[3],
        )
    found = [grads.dsinks, grads.dalibi, grads.dkey_bias, grads.dbias]
    result = [grads.dq.to(q.dtype), grads.dk.to(k.dtype), grads.dv.to(v.dtype)]
    for grad, option in zip(found, options, strict=True):
        if grad is not None and option is not None:
            result.append(grad.to(option.dtype))
    return result


def _rows(x: Tensor) -> Tensor:
    """X with a contiguous last dimension, which is all that kernels ask of strides."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


@ring_attention_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    key_bias: Tensor | None,
    bias: Tensor | None,
    dropout_seed: int,
    ring: str,
    call: str,
) -> tuple[Tensor, Tensor]:
    del k, sinks, alibi_slopes, key_bias, bias, dropout_seed, ring, call
    b, s, h, _ = q.shape
    return q.new_empty(b, s, h, v.shape[-1]), q.new_empty(b, h, s, dtype=accumulation_dtype(q.dtype))


@ring_attention_backward_op.register_fake
def _(
    do: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    key_bias: Tensor | None,
    bias: Tensor | None,
    dropout_seed: int,
    ring: str,
    call: str,
    wanted: list[bool],
) -> list[Tensor]:
    del do, dlse, o, lse, dropout_seed, ring, call
    options = (sinks, alibi_slopes, key_bias, bias)
    kept = [x for x, want in zip(options, wanted, strict=True) if want and x is not None]
    return [x.new_empty(x.shape) for x in (q, k, v, *kept)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, dropout_seed, ring, call = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.dropout_seed, ctx.ring, ctx.call = dropout_seed, ring, call
    # the graph keeps the ring alive until it is used up
    ctx.living_ring = find_ring(ring)
    ctx.wanted = [tensor is not None and tensor.requires_grad for tensor in tensors[3:]]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, alibi_slopes, key_bias, bias, o, lse = ctx.saved_tensors
    grads = iter(
        torch.ops.ringattn.backward(
            do,
            dlse,
            q,
            k,
            v,
            o,
            lse,
            sinks,
            alibi_slopes,
            key_bias,
            bias,
            ctx.dropout_seed,
            ctx.ring,
            ctx.call,
            ctx.wanted,
        )
    )
    qkv = [next(grads) for _ in range(3)]
    return *qkv, *(next(grads) if want else None for want in ctx.wanted), None, None, None


ring_attention_op.register_autograd(_backward, setup_context=_setup_context)
