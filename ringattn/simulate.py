"""All ranks of a ring in one process, on whole sequences: the reference for distribution.

The loops of all ranks run in lockstep over a simulated transport, with the same plans and kernels in the same order: real ranks
must compute the same bits.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringattn.api import packed_latents
from ringattn.autograd import sum_expanded
from ringattn.dispatch import call_text, is_value, resolve_simulated, run_backward, run_forward
from ringattn.plan.attention_spec import AttentionSpec, ScoreTensors
from ringattn.plan.expressions import Mask
from ringattn.plan.options import EXPANDS, resolve_flag, resolve_integer, resolve_word
from ringattn.plan.ring_plan import make_nodes
from ringattn.plan.sharding import Sharding, resolve_shards
from ringattn.ring import sum_in_order
from ringattn.schedule.execution_plan import BackwardCall, ForwardCall, Gradients, WantedGrads
from ringattn.schedule.latents import Latents
from ringattn.schedule.validation import check_call, check_dims, check_latents, check_tensors, expand_bias
from ringattn.transport.base import RingContext
from ringattn.transport.gpu_sharing import ranks_per_gpu, sm_margin_of
from ringattn.transport.lockstep import run_ranks

LATENTS = ("latents", "rotary_keys", "k_up", "v_up")


@dataclass(frozen=True)
class Simulated:
    """Result of a simulated ring, as whole sequences.

    Attributes:
        o: `b n h dv`.
        lse: `b h n`.
        grads: By tensor name: q, k, v and, where given, sinks, alibi_slopes, key_bias, bias; None without cotangents.
            Unlike on real ranks, those of sinks and alibi_slopes are summed over ranks.
    """

    o: Tensor
    lse: Tensor
    grads: dict[str, Tensor] | None


_checked: dict[Hashable, tuple[list[Sharding], list[Sharding], dict[str, Any], list[int]]] = {}
"""Results of `_check`, by call."""


def simulate_ring(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    world_size: int,
    *,
    latents: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    nodes: int = 1,
    layout: str = "zigzag",
    documents: Sequence[int] | Tensor | None = None,
    balance: dict[str, Any] | Mask | None = None,
    segments: Sequence[int] | None = None,
    do: Tensor | None = None,
    dlse: Tensor | None = None,
    softmax_scale: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    key_bias: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_seed: int = 0,
    memory_budget: int = 0,
    save_gathered_kv: bool = False,
    **options: Any,
) -> Simulated:
    """Run all ranks of a ring in this process and concatenate their results.

    Args:
        q: Whole queries, `b n h d`.
        k: Whole keys, `b m hk d`; m differs from n in cross attention.
        v: Whole values, `b m hk dv`.
        world_size: Ranks to simulate.
        latents: Whole latents `b m r` and rotary_keys `b m dr`, and k_up and v_up, as in `latent_attention`; k and v are None.
            Their gradients have these names, summed over ranks.
        nodes: Nodes of equal size that they share, as in `Ring`.
        layout: Layout of both sequences.
        documents: As in `Ring.sharding`.
        balance: As in `Ring.sharding`.
        segments: As in `Ring.sharding`.
        do: Cotangent of o; with it (or dlse) the backward runs too.
        dlse: Cotangent of lse.
        softmax_scale: As in `ring_attention`, like the rest.
        sinks: `h`.
        alibi_slopes: `h`.
        key_bias: `b m`, whole.
        bias: Broadcastable to `b h n m`, whole.
        dropout_seed: Seed of the dropout mask.
        memory_budget: As in `Ring`: bytes that gathered keys may take on a rank; 0: step by step.
        save_gathered_kv: As in `Ring`.
        **options: causal, window, prefix_len, chunk_len, lengths, mask, softcap, dropout_p, deterministic, impl, backward; with
            latents also expand.

    Returns:
        Whole outputs and gradients.

    Raises:
        ValueError: As `ring_attention` and `Ring.sharding`, for whole tensors; or a cotangent has another shape.
        TypeError: A tensor is something else, or what counts is no integer.
        NotImplementedError: Meaningful but not supported; the message names the alternative.

    Example:
        >>> x = torch.ones(1, 8, 1, 16)
        >>> whole = simulate_ring(x, x, x, world_size=2, causal=True, do=x)
        >>> whole.o.shape, whole.lse.shape, sorted(whole.grads)
        (torch.Size([1, 8, 1, 16]), torch.Size([1, 1, 8]), ['k', 'q', 'v'])
    """
    whole = None
    if latents is not None:
        check_latents(q, *latents, rows=latents[0].shape[1])
        whole = Latents(*packed_latents(*latents))
        k, v = whole.stand_ins()
        columns = whole.rows.shape[2], whole.v_up.shape[2]
        options["latents"] = (*columns, resolve_word("expand", options.pop("expand", "auto"), EXPANDS))
    if k is None or v is None:
        raise TypeError(
            f"k and v must be tensors without latents, got {type(k).__name__} and {type(v).__name__}; give both"
        )
    tensors = {"sinks": sinks, "alibi_slopes": alibi_slopes, "key_bias": key_bias, "bias": bias, "do": do, "dlse": dlse}
    numbers = {"world_size": world_size, "nodes": nodes, "dropout_seed": dropout_seed, "memory_budget": memory_budget}
    layouts = {"layout": layout, "documents": documents, "balance": balance, "segments": segments}
    call = {"softmax_scale": softmax_scale, **options}
    values = (*numbers.items(), ("save_gathered_kv", save_gathered_kv), *layouts.items(), *call.items())
    facts = tuple(map(_fact, (q, k, v, *tensors.values()))), tuple((name, type(x), x) for name, x in values)
    usual = all(is_value(x) for _, x in values)
    checked = _checked.get(facts) if usual else None
    if checked is None:
        checked = _check(q, k, v, tensors, numbers, save_gathered_kv, layouts, call)
        if usual:
            _checked[facts] = checked
    shardings, kv_shardings, call, (world_size, nodes, dropout_seed, memory_budget) = checked
    b, _, h, _ = q.shape
    whole_bias = None if bias is None else bias.expand(b, h, q.shape[1], k.shape[1])

    def run(context: RingContext) -> tuple[Tensor, Tensor, Gradients | None]:
        mine, keys = shardings[context.rank], kv_shardings[context.rank]
        own_key_bias = None if key_bias is None else keys.cut(key_bias, 1)
        own_bias = None if whole_bias is None else mine.cut(whole_bias, 2)
        score_tensors = ScoreTensors(sinks, alibi_slopes, own_key_bias, own_bias)
        given = None if whole is None else whole._replace(rows=keys.cut(whole.rows, 1))
        local = mine.cut(q, 1), *((keys.cut(k, 1), keys.cut(v, 1)) if given is None else given.stand_ins())
        text = call_text(mine, None if keys is mine else keys, call)
        plan, score = resolve_simulated(*local, score_tensors, dropout_seed, context, text, given)
        backward = do is not None or dlse is not None
        forward = ForwardCall(*local, score, plan, context, given)
        o, lse, saved = run_forward(forward, keep=save_gathered_kv and backward)
        if not backward:
            return o, lse, None
        d_o = torch.zeros_like(o) if do is None else mine.cut(do, 1)
        d_lse = None if dlse is None else mine.cut(dlse, 2)
        wanted = WantedGrads(*(x is not None for x in score_tensors))
        backward_call = BackwardCall(d_o, d_lse, *local, o, lse, score, plan, context, wanted, given)
        return o, lse, run_backward(backward_call, saved=saved)

    with torch.no_grad():
        levels = None if nodes == 1 else make_nodes(world_size, nodes)
        # tiles are split by the number of programs: beside ranks that share a GPU it has as few as theirs
        sm_margin = sm_margin_of(q.device, ranks_per_gpu()) if memory_budget else 0
        parts = run_ranks(world_size, run, levels, budget=memory_budget, sm_margin=sm_margin, device=q.device)
        o = shardings[0].concatenate([part[0] for part in parts], 1)
        lse = shardings[0].concatenate([part[1] for part in parts], 2)
        found = [part[2] for part in parts if part[2] is not None]
        grads = _whole_grads(found, shardings[0], kv_shardings[0], bias, latents, q.dtype) if found else None
        return Simulated(o, lse, grads)


def _whole_grads(
    found: list[Gradients],
    queries: Sharding,
    keys: Sharding,
    bias: Tensor | None,
    latents: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Return the gradients of all ranks by tensor name: those of rows as whole sequences, the others summed over ranks."""
    grads: dict[str, Tensor] = {}
    for name, field, sharding in (
        ("q", "dq", queries),
        ("k", "dk", keys),
        ("v", "dv", keys),
        ("key_bias", "dkey_bias", keys),
        ("sinks", "dsinks", None),
        ("alibi_slopes", "dalibi", None),
    ):
        present = [x for grad in found if (x := getattr(grad, field)) is not None]
        if present:
            grads[name] = sum_in_order(present) if sharding is None else sharding.concatenate(present, 1)
    if latents is not None:
        shares = [grad.latents.shares() for grad in found if grad.latents is not None]
        k_up, v_up = map(sum_in_order, zip(*shares, strict=True))
        rows, _ = grads.pop("k"), grads.pop("v")
        r, dn = latents[0].shape[2], latents[2].shape[1]
        grads |= zip(LATENTS, (rows[..., :r], rows[..., r:], k_up[:, :dn, :r], v_up), strict=True)
    grads |= {name: grad.to(dtype) for name, grad in grads.items() if name in ("q", "k", "v", *LATENTS)}
    if bias is not None:
        is_shared = bias.shape[-2:-1] in ((), (1,))
        parts = [sum_expanded(grad.dbias, bias.shape, is_shared) for grad in found if grad.dbias is not None]
        grads["bias"] = sum_in_order(parts) if is_shared else queries.concatenate(parts, bias.dim() - 2)
    return grads


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: dict[str, Tensor | None],
    numbers: dict[str, Any],
    save_gathered_kv: Any,
    layouts: dict[str, Any],
    call: dict[str, Any],
) -> tuple[list[Sharding], list[Sharding], dict[str, Any], list[int]]:
    """Refuse whole tensors and options as `ring_attention` would; return both shardings of all ranks, options and numbers."""
    check_tensors({"q": q, "k": k, "v": v}, tensors)
    numbers = {name: resolve_integer(name, x) for name, x in numbers.items()}
    resolve_flag("save_gathered_kv", save_gathered_kv)
    check_dims(q, k, v)
    (b, n, h, d), m = q.shape, k.shape[1]
    bias = None if tensors["bias"] is None else expand_bias(tensors["bias"], q, m)
    score = ScoreTensors(tensors["sinks"], tensors["alibi_slopes"], tensors["key_bias"], bias)
    shardings = _shardings(numbers["world_size"], n, *layouts.values())
    kv_layouts = {**layouts, "documents": None}
    kv_shardings = shardings if m == n else _shardings(numbers["world_size"], m, *kv_layouts.values())
    if call["softmax_scale"] is None:
        call = {**call, "softmax_scale": d**-0.5 if d else 1.0}
    # a wrong tensor is named as it was given, before it is cut: as in a ring of one rank
    [rows] = _shardings(1, n, "contiguous", shardings[0].documents, None, None)
    keys = None if m == n else _shardings(1, m, "contiguous", None, None, None)[0]
    check_call(q, k, v, AttentionSpec.deserialize(call_text(rows, keys, call), 0), score)
    for name, shape in (("do", (b, n, h, v.shape[-1])), ("dlse", (b, h, n))):
        x = tensors[name]
        if x is not None and (tuple(x.shape) != shape or x.device != q.device):
            raise ValueError(f"{name} must have shape {shape} on {q.device}, got {tuple(x.shape)} on {x.device}")
    return shardings, kv_shardings, call, list(numbers.values())


def _shardings(
    world_size: int, seq_len: int, layout: str, documents: Any, balance: Any, segments: Any
) -> list[Sharding]:
    seq_len, boundaries, shards = resolve_shards(seq_len, layout, documents, balance, segments, world_size)
    return [Sharding(seq_len, layout, shards, rank, boundaries) for rank in range(world_size)]


def _fact(x: Any) -> Hashable:
    """Return the facts of a tensor that `_check` reads."""
    if not isinstance(x, Tensor) or x.is_nested:
        return type(x)
    return type(x), x.shape, x.dtype, x.device, x.layout
