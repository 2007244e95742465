"""The forward loop of one rank: keys visit queries, step by step.

Owns the order of visits and what each is given. Refuses to know how rows travel (Note [Ring order] in kv_rotation.py), how a
visit is computed, and what a mask means.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ringattn.kernels.contract import Carry, KernelSet, Score, accumulation_dtype
from ringattn.plan.attention_spec import Call
from ringattn.plan.ring_plan import Visit
from ringattn.schedule.kv_rotation import Traffic, reserve
from ringattn.schedule.packed_message import Moving
from ringattn.spans import span
from ringattn.transport.base import Seat


def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, score: Score, call: Call, kernels: KernelSet, seat: Seat
) -> tuple[Tensor, Tensor]:
    """The finished attention of this rank's query rows over the keys of all ranks.

    Args:
        q: `b s h d`, this rank's rows.
        k: `b t hk d`, this rank's rows.
        v: `b t hk dv`, this rank's rows.
        score: How scores are made; key_bias holds this rank's keys.
        call: Shardings and mask.
        kernels: What computes a visit.
        seat: This rank's place at the ring.

    Returns:
        o `b s h dv` in q's dtype and lse `b h s` (natural log, accumulation dtype).
    """
    b, s, h, _ = q.shape
    o = torch.empty(b, s, h, v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty(b, h, s, dtype=accumulation_dtype(q.dtype), device=q.device)
    everyone = call.plan("keys", seat.nodes)
    plan = everyone.ranks[seat.rank]
    rows = call.stationary("keys", q.device)
    moving = travellers("keys", q, k, v, score)
    steps = [step for step, visit in enumerate(plan.visits) if visit is not None]
    carry = _carry(o, lse, seat) if len(steps) > 1 else None
    if not steps and s:
        # this rank sees no key at all: one visit to an empty buffer writes the empty rows
        keys = call.moving("keys", Visit(0, seat.rank, (), (), 0), q.device)
        kernels.forward(
            q, k[:, :0], v[:, :0], rows, keys, _local(score, 0), carry=None, first=True, last=True, o=o, lse=lse
        )
    traffic = None
    if seat.world_size > 1:
        reserve(everyone, seat, moving)
        traffic = Traffic(moving, plan, seat, "forward, keys")
    held = [x for x, _ in moving]
    for step in range(seat.world_size):
        if traffic is not None:
            held = traffic.arrive(step)
            traffic.post(step)
        visit = plan.visits[step]
        if visit is None or s == 0:
            continue
        here = score if score.key_bias is None else dataclasses.replace(score, key_bias=held[2])
        with span("ring step {}: keys of rank {}", step, visit.owner):
            kernels.forward(
                q,
                held[0],
                held[1],
                rows,
                call.moving("keys", visit, q.device),
                here,
                carry=carry,
                first=step == steps[0],
                last=step == steps[-1],
                o=o,
                lse=lse,
            )
    return o, lse


def travellers(moving: str, q: Tensor, k: Tensor, v: Tensor, score: Score, *rows: Tensor) -> Moving:
    """What travels when keys (k, v, key_bias) or queries (q and the given `b s h dv` and `b h s` rows) move."""
    if moving == "keys":
        bias = [] if score.key_bias is None else [(score.key_bias, 1)]
        return [(k.contiguous(), 1), (v.contiguous(), 1), *bias]
    return [(q.contiguous(), 1), *((x.contiguous(), 1 if x.dim() == 4 else 2) for x in rows)]


def _carry(o: Tensor, lse: Tensor, seat: Seat) -> Carry:
    take = seat.buffers.take
    return Carry(
        m=take("carry m", lse.shape, lse.dtype, lse.device),
        l=take("carry l", lse.shape, lse.dtype, lse.device),
        acc=take("carry acc", o.shape, lse.dtype, o.device),
    )


def _local(score: Score, length: int) -> Score:
    return dataclasses.replace(score, key_bias=None if score.key_bias is None else score.key_bias[:, :length])
