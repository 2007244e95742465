"""The calls of a ring of virtual ranks (`Ring(virtual_size=)`): a process computes as each of its virtual ranks, in turns.

Rows are cut by virtual rank, each runs the plan and the loop that a process of its own would run, and the results are put one after
another. Sums over rows, which each rank returns as its share, are added in the order of virtual ranks over all processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringattn.dispatch import run_backward, run_forward
from ringattn.kernels.interface import Score
from ringattn.plan.attention_spec import split_rows
from ringattn.plan.sharding import Sharding
from ringattn.ring import Ring
from ringattn.schedule.execution_plan import BackwardCall, ExecutionPlan, Gradients
from ringattn.schedule.latents import Latents


def virtual_forward(
    ring: Ring,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: Score,
    plans: Sequence[ExecutionPlan],
    latents: Latents | None = None,
) -> tuple[Tensor, Tensor]:
    """Return o and lse of the rows of all virtual ranks of this process; takes arguments of `dispatch.run_forward`."""
    parts, contexts = _cut(q, k, v, score, plans, latents), ring.contexts(q.device)

    def run(i: int) -> tuple[Tensor, Tensor]:
        own, q, k, v, score = parts[i]
        return run_forward(q, k, v, score, plans[i], contexts[i], latents=own)[:2]

    found = ring.run_ranks(q.device, run)
    return torch.cat([o for o, _ in found], 1), torch.cat([lse for _, lse in found], 2)


def virtual_backward(ring: Ring, call: BackwardCall, plans: Sequence[ExecutionPlan]) -> Gradients:
    """Return the gradients of `virtual_forward`; shares of sums over rows are their total on rank 0, and zeros elsewhere."""
    parts = _cut(call.q, call.k, call.v, call.score, plans, call.latents)
    contexts, lens = ring.contexts(call.q.device), _row_counts(plans)[0]
    rows: Any = [split_rows(x, lens, dim) for x, dim in ((call.do, 1), (call.dlse, 2), (call.o, 1), (call.lse, 2))]

    def run(i: int) -> Gradients:
        latents, q, k, v, score = parts[i]
        do, dlse, o, lse = (x[i] for x in rows)
        given = BackwardCall(do, dlse, q, k, v, o, lse, score, plans[i], contexts[i], call.wanted, latents)
        return run_backward(given)

    found = ring.run_ranks(call.q.device, run)
    first, shares = found[0], [_shares(grads) for grads in found]
    if shares[0]:
        flat = ring.ordered_sum([torch.cat([x.flatten() for x in share]) for share in shares])
        for x, total in zip(shares[0], flat.split([x.numel() for x in shares[0]]), strict=True):
            x.copy_(total.view(x.shape))

    def joined(name: str, dim: int) -> Any:
        present = [x for grads in found if (x := getattr(grads, name)) is not None]
        return torch.cat(present, dim) if present else None

    rows_of = {"dq": 1, "dk": 1, "dv": 1, "dkey_bias": 1, "dbias": 2}
    return dataclasses.replace(first, **{name: joined(name, dim) for name, dim in rows_of.items()})


def _shares(grads: Gradients) -> list[Tensor]:
    """Return the gradients that are sums over rows."""
    found = [grads.dsinks, grads.dalibi]
    if grads.latents is not None:
        found += grads.latents.shares()
    return [x for x in found if x is not None]


def _row_counts(plans: Sequence[ExecutionPlan]) -> tuple[list[int], list[int]]:
    """Return the query rows and the keys of each virtual rank of this process."""
    return [plan.spec.sharding.shard_len for plan in plans], [plan.spec.kv_sharding.shard_len for plan in plans]


def _cut(
    q: Tensor, k: Tensor, v: Tensor, score: Score, plans: Sequence[ExecutionPlan], latents: Latents | None
) -> list[tuple[Any, ...]]:
    """Return latents, q, k, v and score of each virtual rank of this process."""
    lens, key_lens = _row_counts(plans)
    rows = None if latents is None else latents.rows
    cut = [split_rows(x, key_lens, 1) for x in (rows, k, v, score.key_bias)]
    found = []
    for i, (q_part, bias) in enumerate(zip(split_rows(q, lens, 1), split_rows(score.bias, lens, 2), strict=True)):
        own_rows, k_part, v_part, key_bias = (x[i] for x in cut)
        own = None if latents is None or own_rows is None else latents._replace(rows=own_rows.contiguous())
        found.append((own, q_part, k_part, v_part, dataclasses.replace(score, key_bias=key_bias, bias=bias)))
    return found


class _ExpandRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: Tensor, ring: Ring, lens: list[int]) -> Tensor:
        ctx.ring, ctx.lens = ring, lens
        return bias.expand(-1, -1, sum(lens), -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.ring.ordered_sum([part.sum(2, keepdim=True) for part in grad.split(ctx.lens, 2)]), None, None


def expand_rows(bias: Tensor, sharding: Sharding) -> Tensor:
    """Return a bias `b h 1 n` for all rows of this process; its gradient is summed by virtual rank, then in their order."""
    lens = [rows.shard_len for rows in sharding.hosted or (sharding,)]
    return _ExpandRows.apply(bias, sharding.ring, lens)  # pyright: ignore[reportReturnType]
