"""The whole ring in one process: the oracle for distribution.

Owns running the loops of all ranks in lockstep over a simulated transport, on whole sequences. Same plans, same loops,
same kernels in the same order: what real ranks compute must equal this to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ringattn.dispatch import call_text, resolve_simulated, run_backward, run_forward
from ringattn.plan.attention_spec import ScoreTensors, resolve_mask
from ringattn.plan.layouts import make_shards
from ringattn.plan.mask import Visibility
from ringattn.plan.ring_plan import make_nodes
from ringattn.plan.sharding import Sharding
from ringattn.schedule.stepwise_backward import Gradients, WantedGrads
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
    documents: Sequence[int] | None = None,
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
    """
    (b, n, h, d), m = q.shape, k.shape[1]
    whole_bias = None if bias is None else bias.expand(b, h, n, m)
    documents = None if documents is None else tuple(documents)
    make = _usual_shardings if balance is None else partial(_shardings, balance=balance)
    shardings = make(n, layout, documents, world_size)
    kv_shardings = shardings if m == n else make(m, layout, None, world_size)
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    call = {"softmax_scale": scale, **options}

    def run(seat: Seat) -> tuple[Tensor, Tensor, Gradients | None]:
        mine, keys = shardings[seat.rank], kv_shardings[seat.rank]
        tensors = ScoreTensors(
            sinks,
            alibi_slopes,
            None if key_bias is None else keys.shard(key_bias, 1),
            None if whole_bias is None else mine.shard(whole_bias, 2),
        )
        local = mine.shard(q, 1), keys.shard(k, 1), keys.shard(v, 1)
        text = call_text(mine, None if keys is mine else keys, call)
        plan, score = resolve_simulated(*local, tensors, dropout_seed, seat, text)
        backward = do is not None or dlse is not None
        o, lse, saved = run_forward(*local, score, plan, seat, keep=keep_keys and backward)
        if not backward:
            return o, lse, None
        d_o = torch.zeros_like(o) if do is None else mine.shard(do, 1)
        d_lse = None if dlse is None else mine.shard(dlse, 2)
        wanted = WantedGrads(*(x is not None for x in tensors))
        return o, lse, run_backward(d_o, d_lse, *local, o, lse, score, plan, seat, wanted, saved=saved)

    with torch.no_grad():
        levels = None if nodes == 1 else make_nodes(world_size, nodes)
        # tiles are split by the number of programs: beside ranks that share a GPU it has as few as theirs
        spare = spare_of(q.device, ranks_per_gpu()) if memory_budget else 0
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
    seq_len: int, layout: str, documents: tuple[int, ...] | None, world_size: int, balance: dict[str, Any] | None
) -> list[Sharding]:
    mask = Visibility(seq_len=seq_len, kv_len=seq_len, documents=documents, **resolve_mask(balance or {"causal": True}))
    shards = make_shards(layout, seq_len, world_size, mask)
    return [Sharding(seq_len, layout, shards, rank, documents) for rank in range(world_size)]


_usual_shardings = lru_cache(maxsize=64)(partial(_shardings, balance=None))
