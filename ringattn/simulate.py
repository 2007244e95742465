"""The whole ring in one process: the oracle for distribution.

Owns running the loops of all ranks in lockstep over a simulated transport, on whole sequences. Same plans, same loops,
same kernels in the same order: what real ranks compute must equal this to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringattn.kernels.select import pick
from ringattn.plan.attention_spec import Call, describe
from ringattn.plan.options import resolve_flag, resolve_integer
from ringattn.plan.ring_plan import make_nodes
from ringattn.plan.sharding import Sharding, resolve_shards
from ringattn.schedule import fused
from ringattn.schedule.stepwise_backward import Gradients
from ringattn.schedule.validation import check_call, check_tensors, expand_bias
from ringattn.transport.base import Seat
from ringattn.transport.simulated import run_ranks
from ringattn.transport.symmetric import ranks_per_gpu, spare_of


@dataclass(frozen=True)
class Simulated:
    """What a simulated ring computed, whole sequences put together again.

    Attributes:
        o: `b n h dv`.
        lse: `b h n`.
        grads: By tensor name: q, k, v and, where given, sinks, alibi_slopes, key_bias, bias; None without cotangents.
            Unlike on real ranks, those of sinks and alibi_slopes are summed over ranks.
    """

    o: Tensor
    lse: Tensor
    grads: dict[str, Tensor] | None


def simulate_ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    world_size: int,
    *,
    nodes: int = 1,
    layout: str = "zigzag",
    documents: Sequence[int] | Tensor | None = None,
    balance: dict[str, Any] | None = None,
    do: Tensor | None = None,
    dlse: Tensor | None = None,
    softmax_scale: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    key_bias: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_seed: int = 0,
    memory_budget: int = 0,
    keep_keys: bool = False,
    **options: Any,
) -> Simulated:
    """Runs all ranks of a ring in this process and puts the results together.

    Args:
        q: Whole queries, `b n h d`.
        k: Whole keys, `b m hk d`; m differs from n in cross attention.
        v: Whole values, `b m hk dv`.
        world_size: Ranks to simulate.
        nodes: Nodes of equal size that they share, as in `Ring`.
        layout: Layout of both sequences.
        documents: As in `Ring.sharding`.
        balance: As in `Ring.sharding`.
        do: Cotangent of o; with it (or dlse) the backward runs too.
        dlse: Cotangent of lse.
        softmax_scale: As in `ring_attention`, like the rest.
        sinks: `h`.
        alibi_slopes: `h`.
        key_bias: `b m`, whole.
        bias: Broadcastable to `b h n m`, whole.
        dropout_seed: Seed of the dropout mask.
        memory_budget: As in `Ring`: bytes that gathered keys may take on a rank; 0: visits one by one.
        keep_keys: As in `Ring`.
        **options: causal, window, prefix_len, chunk_len, lengths, softcap, dropout_p, impl, backward.

    Returns:
        Whole outputs and gradients.

    Raises:
        ValueError: What `ring_attention` or `Ring.sharding` raises, of whole tensors; or a cotangent has another shape.
        TypeError: A tensor is something else, or what counts is no integer.
        NotImplementedError: Meaningful but not supported; the message names the alternative.
    """
    small = {"sinks": sinks, "alibi_slopes": alibi_slopes, "key_bias": key_bias}
    check_tensors(q, k, v, **small, bias=bias, do=do, dlse=dlse)
    world_size, nodes = resolve_integer("world_size", world_size), resolve_integer("nodes", nodes)
    dropout_seed, keep_keys = resolve_integer("dropout_seed", dropout_seed), resolve_flag("keep_keys", keep_keys)
    memory_budget = resolve_integer("memory_budget", memory_budget)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} must be 4-dimensional, `batch rows heads head_dim`, got shape {tuple(x.shape)}")
    (b, n, h, d), m = q.shape, k.shape[1]
    whole_bias = None if bias is None else expand_bias(bias, q, m)
    shardings = _shardings(n, layout, documents, world_size, balance)
    kv_shardings = shardings if m == n else _shardings(m, layout, None, world_size, balance)
    scale = (d**-0.5 if d else 1.0) if softmax_scale is None else softmax_scale
    # what is wrong is named as it was given, before it is cut: as in a ring of one rank
    rows = _shardings(n, "contiguous", shardings[0].documents, 1, None)[0]
    keys = rows if m == n else _shardings(m, "contiguous", None, 1, None)[0]
    whole = Call.decode(describe(rows, None if m == n else keys, softmax_scale=scale, **options), 0)
    check_call(q, k, v, whole, 0, 1, **small, bias=whole_bias)
    for name, x, shape in (("do", do, (b, n, h, v.shape[-1])), ("dlse", dlse, (b, h, n))):
        if x is not None and (tuple(x.shape) != shape or x.device != q.device):
            raise ValueError(f"{name} must have shape {shape} on {q.device}, got {tuple(x.shape)} on {x.device}")

    def run(seat: Seat) -> tuple[Tensor, Tensor, Gradients | None]:
        mine, keys = shardings[seat.rank], kv_shardings[seat.rank]
        text = describe(mine, None if keys is mine else keys, softmax_scale=scale, **options)
        call = Call.decode(text, seat.rank)
        extras = {
            "sinks": sinks,
            "alibi_slopes": alibi_slopes,
            "key_bias": None if key_bias is None else keys.shard(key_bias, 1),
            "bias": None if whole_bias is None else mine.shard(whole_bias, 2),
        }
        local = mine.shard(q, 1), keys.shard(k, 1), keys.shard(v, 1)
        check_call(*local, call, **extras)
        choice = pick(q.device, q.dtype, d, v.shape[-1], impl=call.impl, features=call.features(**extras))
        kernels = choice.kernels
        score = call.score(q.dtype, dropout_seed, **extras)
        backward = do is not None or dlse is not None
        o, lse, kept = fused.forward(*local, score, call, kernels, seat, keep=keep_keys and backward)
        if not backward:
            return o, lse, None
        grads = fused.backward(
            torch.zeros_like(o) if do is None else mine.shard(do, 1),
            None if dlse is None else mine.shard(dlse, 2),
            *local,
            o,
            lse,
            score,
            call,
            kernels,
            seat,
            kept=kept,
            want_sinks=sinks is not None,
            want_alibi=alibi_slopes is not None,
            want_key_bias=key_bias is not None,
            want_bias=bias is not None,
        )
        return o, lse, grads

    with torch.no_grad():
        levels = None if nodes == 1 else make_nodes(world_size, nodes)
        # tiles are split by the number of programs: beside ranks that share a GPU it has as few as theirs
        spare = spare_of(q.device, ranks_per_gpu())
        parts = run_ranks(world_size, run, levels, budget=memory_budget, spare=spare)
        o = shardings[0].assemble([part[0] for part in parts], 1)
        lse = shardings[0].assemble([part[1] for part in parts], 2)
        found = [part[2] for part in parts if part[2] is not None]
        if not found:
            return Simulated(o, lse, None)
        queries, keys = shardings[0], kv_shardings[0]
        grads = {
            "q": queries.assemble([grad.dq for grad in found], 1).to(q.dtype),
            "k": keys.assemble([grad.dk for grad in found], 1).to(q.dtype),
            "v": keys.assemble([grad.dv for grad in found], 1).to(q.dtype),
        }
        shares = {"sinks": [g.dsinks for g in found], "alibi_slopes": [g.dalibi for g in found]}
        for name, share in shares.items():
            present = [x for x in share if x is not None]
            if present:
                grads[name] = torch.stack(present).sum(0)
        rows = {"key_bias": ([g.dkey_bias for g in found], keys, 1), "bias": ([g.dbias for g in found], queries, 2)}
        for name, (row_parts, sharding, dim) in rows.items():
            present = [x for x in row_parts if x is not None]
            if present:
                grads[name] = sharding.assemble(present, dim)
        if bias is not None:
            grads["bias"] = grads["bias"].sum_to_size(bias.shape)
        return Simulated(o, lse, grads)


def _shardings(
    seq_len: int,
    layout: str,
    documents: Sequence[int] | Tensor | None,
    world_size: int,
    balance: dict[str, Any] | None,
) -> list[Sharding]:
    seq_len, boundaries, shards = resolve_shards(seq_len, layout, documents, balance, world_size)
    return [Sharding(seq_len, layout, shards, rank, boundaries) for rank in range(world_size)]
