"""The stepwise backward: one side stays, the other moves around the ring, and its gradients are returned to their owners.

Owns the loop, and what each step reads and writes. Refuses to know how rows and contributions move (kv_rotation.py), how a step
is computed, and what a mask means.

Note [Coming home]
    What moves is either keys (k, v; dk and dv go home in fp32) or queries (q, do, lse, delta; dq goes home in fp32),
    whichever moves fewer bytes. A visit writes its contribution into a buffer of its own, which travels straight to the
    owner (or to the holder of a guest) in the next step's group, so no gradient waits for another. Who receives adds
    contributions in step order: sums are fp32, in a fixed order, and the same in the simulated ring.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ringattn.kernels.interface import Grads, Score, accumulation_dtype
from ringattn.kernels.runtime.table_cache import find
from ringattn.schedule.execution_plan import ExecutionPlan
from ringattn.schedule.kv_rotation import GradReturner, KVPrefetcher, moving_tensors, reserve
from ringattn.transport.base import RingContext, span


@dataclass(frozen=True)
class Gradients:
    """Gradients of this rank's tensors; None where not wanted.

    In the accumulation dtype; in a ring of one rank dq, dk and dv are in the dtype of the inputs.

    Attributes:
        dq: `b s h d`.
        dk: `b t hk d`.
        dv: `b t hk dv`.
        dalibi: `h`: this rank's share; the sum over ranks is the gradient.
        dsinks: `h`: this rank's share, likewise.
        dkey_bias: `b t`.
        dbias: `b h s n`.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None
    dalibi: Tensor | None
    dkey_bias: Tensor | None
    dbias: Tensor | None


class WantedGrads(NamedTuple):
    """Which gradients of the optional tensors of a score are wanted.

    Attributes:
        sinks: That of sinks.
        alibi_slopes: That of alibi_slopes.
        key_bias: That of key_bias.
        bias: That of bias.
    """

    sinks: bool = False
    alibi_slopes: bool = False
    key_bias: bool = False
    bias: bool = False


def stepwise_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    score: Score,
    plan: ExecutionPlan,
    context: RingContext,
    wanted: WantedGrads,
) -> Gradients:
    """Return the gradients of `stepwise_forward`.

    Args:
        do: `b s h dv`, cotangent of o.
        dlse: `b h s`, cotangent of lse; ignored on rows that saw nothing.
        q: `b s h d`.
        k: `b t hk d`.
        v: `b t hk dv`.
        o: From the forward.
        lse: From the forward.
        score: As in the forward.
        plan: As in the forward.
        context: As in the forward.
        wanted: Which gradients of optional tensors to compute.
    """
    wide, kernels, moving = accumulation_dtype(q.dtype), plan.kernels, plan.backward_moving
    if dlse is not None:
        dlse = dlse.masked_fill(lse == float("-inf"), 0.0)
    everyone, mine = plan.backward_plan, plan.backward_plan.ranks[context.rank]
    delta = kernels.delta(o, do, dlse)
    stationary = find(plan.backward_tables.stationary)
    payload = moving_tensors(moving, q, k, v, score, do, lse, delta)
    b, s, h, _ = q.shape

    def wide_like(x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=wide, device=x.device)

    key_side = [wide_like(k), wide_like(v)] + ([wide_like(k[..., 0, 0])] if wanted.key_bias else [])
    query_side = [wide_like(q)] + ([wide_like(lse)] if wanted.alibi_slopes else [])
    dbias = torch.zeros(b, h, s, plan.spec.kv_sharding.seq_len, dtype=wide, device=q.device) if wanted.bias else None
    grad_return, stay = (key_side, query_side) if moving == "keys" else (query_side, key_side)
    row_dims = [1, 1, 1] if moving == "keys" else [1, 2]
    if mine.ring_steps[0] is None:
        for x in (*grad_return, *stay):
            x.zero_()

    def gradients() -> Gradients:
        return Gradients(
            dq=query_side[0],
            dk=key_side[0],
            dv=key_side[1],
            dsinks=sinks_gradient(score, lse, delta) if wanted.sinks else None,
            dalibi=query_side[1].sum((0, 2)) if wanted.alibi_slopes else None,
            dkey_bias=key_side[2] if wanted.key_bias else None,
            dbias=dbias,
        )

    def compute(step: int, held: list[Tensor], contribution: list[Tensor]) -> None:
        moved = plan.backward_tables.moving[step]
        assert moved is not None, "a ring step without visible pairs is never computed"
        remote_shard = find(moved)
        if moving == "keys":
            keys_out, rows_out = contribution, stay
            args = (do, q, held[0], held[1], lse, delta, stationary, remote_shard)
            here = score if score.key_bias is None else dataclasses.replace(score, key_bias=held[2])
        else:
            keys_out, rows_out = stay, contribution
            args = (held[1], held[0], k, v, held[2], held[3], remote_shard, stationary)
            here = score
        stay_started = step > 0
        kernels.backward(
            *args,
            here,
            Grads(
                dq=rows_out[0],
                dk=keys_out[0],
                dv=keys_out[1],
                dkey_bias=keys_out[2] if wanted.key_bias else None,
                dalibi=rows_out[1] if wanted.alibi_slopes else None,
                dbias=dbias,
                accumulate_rows=stay_started and moving == "keys",
                accumulate_keys=stay_started and moving == "queries",
                deterministic=plan.spec.deterministic,
            ),
        )

    returned = list(zip(grad_return, row_dims, strict=False))
    reserve(everyone, context, payload, returned)
    traffic = KVPrefetcher(payload, mine, context, f"backward, {moving}")
    homeward = GradReturner(returned, mine, context, "backward, gradients")
    # two steps past the last: one sends its contributions home, one adds them
    for step in range(context.world_size + 2):
        held = traffic.arrive(step)
        homeward.add(step)
        if step <= context.world_size:
            traffic.post(step, *homeward.parcels(step), f" and gradients of step {step - 1}")
        homeward.cross(step)
        ring_step = mine.ring_steps[step] if step < context.world_size else None
        if ring_step is None:
            continue
        with span("ring step {} backward: {} of rank {}", step, moving, ring_step.owner):
            compute(step, held, homeward.room(step))
    homeward.finish()
    return gradients()


def sinks_gradient(score: Score, lse: Tensor, delta: Tensor) -> Tensor:
    """This rank's share of the gradient of sinks, `h`; lse and delta `b h s`."""
    # a sink is a logit whose value row is zero: dp = 0, so ds = p * (0 - delta)
    assert score.sinks is not None, "a gradient of sinks needs sinks"
    # a row without keys and without a sink has no weight to give: exp(-inf + inf) would be NaN
    p = torch.exp(score.sinks.to(lse.dtype)[:, None] - lse).masked_fill(lse == float("-inf"), 0.0)
    return -(p * delta).sum((0, 2))
