"""The backward loop of one rank: one side stays, the other visits, and its gradients are sent home.

Owns the order of visits, what each is given and what it writes. Refuses to know how rows and contributions travel
(kv_rotation.py), how a visit is computed, and what a mask means.

Note [Coming home]
    What moves is either keys (k, v; dk and dv go home in fp32) or queries (q, do, lse, delta; dq goes home in fp32),
    whichever moves fewer bytes. A visit writes its contribution into a buffer of its own, which travels straight to the
    owner (or to the holder of a guest) in the next step's group, so no gradient waits for another. Who receives adds
    contributions in step order: sums are fp32, in a fixed order, and the same in the simulated ring.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from ringattn.kernels.contract import Grads, KernelSet, Score, accumulation_dtype
from ringattn.plan.attention_spec import Call
from ringattn.plan.ring_plan import Nodes
from ringattn.schedule.kv_rotation import Homeward, Traffic, reserve
from ringattn.schedule.stepwise_forward import travellers
from ringattn.spans import span
from ringattn.transport.base import Seat


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


def resolve_moving(call: Call, q: Tensor, k: Tensor, v: Tensor, score: Score, nodes: Nodes | None = None) -> str:
    """What the backward moves: the call's choice, or the side that costs fewer bytes on the busiest rank.

    bias is indexed by this rank's rows, so its rows cannot leave: keys move then. With dropout keys move, too, unless the call
    says otherwise (Note [Seeds] in dropout.py).
    """
    if score.bias is not None:
        return "keys"
    if call.backward != "auto":
        return call.backward
    if call.dropout_p > 0:
        return "keys"
    e, wide = q.element_size(), accumulation_dtype(q.dtype).itemsize
    _, _, hk, d = k.shape
    h, dv = q.shape[2], v.shape[-1]
    per_key = (e + wide) * hk * (d + dv)
    per_query = e * h * (d + dv) + wide * h * (d + 2)
    keys, queries = call.moved_rows(nodes)
    return "keys" if per_key * keys <= per_query * queries else "queries"


def ring_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    score: Score,
    call: Call,
    kernels: KernelSet,
    seat: Seat,
    *,
    want_sinks: bool = False,
    want_alibi: bool = False,
    want_key_bias: bool = False,
    want_bias: bool = False,
) -> Gradients:
    """Gradients of `ring_forward`.

    Args:
        do: `b s h dv`, cotangent of o.
        dlse: `b h s`, cotangent of lse; ignored on rows that saw nothing.
        q: `b s h d`.
        k: `b t hk d`.
        v: `b t hk dv`.
        o: From the forward.
        lse: From the forward.
        score: As in the forward.
        call: As in the forward.
        kernels: As in the forward.
        seat: As in the forward.
        want_sinks: Compute dsinks.
        want_alibi: Compute dalibi.
        want_key_bias: Compute dkey_bias.
        want_bias: Compute dbias.
    """
    wide = accumulation_dtype(q.dtype)
    if dlse is not None:
        dlse = dlse.masked_fill(lse == float("-inf"), 0.0)
    moving = resolve_moving(call, q, k, v, score, seat.nodes)
    everyone = call.plan(moving, seat.nodes)
    plan = everyone.ranks[seat.rank]
    # alone there is one visit, which makes delta beside what else it prepares
    alone = seat.world_size == 1 and plan.visits[0] is not None
    delta = torch.empty_like(lse, memory_format=torch.contiguous_format) if alone else kernels.delta(o, do, dlse)
    stationary = call.stationary(moving, q.device)
    payload = travellers(moving, q, k, v, score, do, lse, delta)
    b, s, h, _ = q.shape

    def wide_like(x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=wide, device=x.device)

    def grad_like(x: Tensor) -> Tensor:
        # alone there is one visit: nothing is added to what it writes, so it may round at once
        return torch.empty_like(x, memory_format=torch.contiguous_format) if seat.world_size == 1 else wide_like(x)

    key_side = [grad_like(k), grad_like(v)] + ([wide_like(k[..., 0, 0])] if want_key_bias else [])
    query_side = [grad_like(q)] + ([wide_like(lse)] if want_alibi else [])
    dbias = torch.zeros(b, h, s, call.kv_sharding.seq_len, dtype=wide, device=q.device) if want_bias else None
    home, stay = (key_side, query_side) if moving == "keys" else (query_side, key_side)
    row_dims = [1, 1, 1] if moving == "keys" else [1, 2]
    if plan.visits[0] is None:
        for x in (*home, *stay):
            x.zero_()

    def gradients() -> Gradients:
        return Gradients(
            dq=query_side[0],
            dk=key_side[0],
            dv=key_side[1],
            dsinks=sinks_gradient(score, lse, delta) if want_sinks else None,
            dalibi=query_side[1].sum((0, 2)) if want_alibi else None,
            dkey_bias=key_side[2] if want_key_bias else None,
            dbias=dbias,
        )

    def compute(step: int, held: list[Tensor], contribution: list[Tensor]) -> None:
        visit = plan.visits[step]
        assert visit is not None, "an empty visit is never computed"
        guest = call.moving(moving, visit, q.device)
        if moving == "keys":
            keys_out, rows_out = contribution, stay
            args = (do, q, held[0], held[1], lse, delta, stationary, guest)
            here = score if score.key_bias is None else dataclasses.replace(score, key_bias=held[2])
        else:
            keys_out, rows_out = stay, contribution
            args = (held[1], held[0], k, v, held[2], held[3], guest, stationary)
            here = score
        stay_started = step > 0
        kernels.backward(
            *args,
            here,
            Grads(
                dq=rows_out[0],
                dk=keys_out[0],
                dv=keys_out[1],
                dkey_bias=keys_out[2] if want_key_bias else None,
                dalibi=rows_out[1] if want_alibi else None,
                dbias=dbias,
                accumulate_rows=stay_started and moving == "keys",
                accumulate_keys=stay_started and moving == "queries",
                deterministic=call.deterministic,
            ),
            o=o if alone else None,
            dlse=dlse if alone else None,
        )

    if seat.world_size == 1:
        if plan.visits[0] is not None:
            with span("ring step 0 backward: {} of rank 0", moving):
                compute(0, [x for x, _ in payload], home)
        return gradients()
    returned = list(zip(home, row_dims, strict=False))
    reserve(everyone, seat, payload, returned)
    traffic = Traffic(payload, plan, seat, f"backward, {moving}")
    homeward = Homeward(returned, plan, seat, "backward, gradients")
    # two steps past the last: one sends its contributions home, one adds them
    for step in range(seat.world_size + 2):
        held = traffic.arrive(step)
        homeward.add(step)
        if step <= seat.world_size:
            traffic.post(step, *homeward.parcels(step), f" and gradients of step {step - 1}")
        homeward.cross(step)
        visit = plan.visits[step] if step < seat.world_size else None
        if visit is None:
            continue
        with span("ring step {} backward: {} of rank {}", step, moving, visit.owner):
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
