"""The Hopper kernel set: `GatheringKernelSet` of the contract in Gluon, for fp16 and bf16 on compute capability 9.0.

Owns the names and the choice between the fused backward and the pair of kernels that sums in a fixed order.
Products are of fp16 or bf16 operands, everything else is fp32. Refuses to know how any kernel is launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ringattn.kernels import homes as plain_homes
from ringattn.kernels import homes_triton, launch_triton
from ringattn.kernels.contract import Arrivals, Carry, Gathered, Grads, Score, Side
from ringattn.kernels.hopper.around_launch import Source
from ringattn.kernels.hopper.backward_launch import (
    MAX_HEAD_DIM,
    Away,
    launch_backward,
    launch_gathered,
    launch_keys,
    prefers_pair,
)
from ringattn.kernels.hopper.forward_launch import can_gather, launch_forward, launch_forward_gathered
from ringattn.kernels.hopper.rows_launch import launch_rows, launch_rows_gathered
from ringattn.kernels.hopper.wide_launch import launch_wide, launch_wide_gathered
from ringattn.kernels.portable.launch import launch_delta

__all__ = [
    "add_bias_homes", "add_homes", "backward", "backward_gathered", "can_capture", "delta", "forward", "forward_gathered",
    "gathers",
]  # fmt: skip


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Side,
    keys: Side,
    score: Score,
    *,
    carry: Carry | None,
    first: bool,
    last: bool,
    o: Tensor,
    lse: Tensor,
) -> None:
    """Visits one buffer of keys (`KernelSet.forward`)."""
    launch_forward(q, k, v, rows, keys, score, carry=carry, first=first, last=last, o=o, lse=lse)


def gathers(head_dim: int, v_head_dim: int, score: Score) -> bool:
    """Whether visits of this kind are also computed in one launch (`GatheringKernelSet.gathers`)."""
    return can_gather(head_dim, v_head_dim, score)


def can_capture() -> bool:
    """Whether a CUDA graph may stand for launches (`GatheringKernelSet.can_capture`): launch hooks would miss a replay."""
    return not launch_triton.is_hooked()


def forward_gathered(
    q: Tensor,
    near: tuple[Tensor, Tensor],
    far: tuple[Tensor, Tensor],
    rows: Side,
    keys: Gathered,
    score: Score,
    arrivals: Arrivals | None,
    *,
    o: Tensor,
    lse: Tensor,
    spare: int = 0,
) -> None:
    """The finished attention of q over all sources (`GatheringKernelSet.forward_gathered`)."""
    launch_forward_gathered(q, near, far, rows, keys, score, arrivals, o=o, lse=lse, spare=spare)


def delta(o: Tensor, do: Tensor, dlse: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Rowsum(o * do) - dlse (`KernelSet.delta`)."""
    return launch_delta(o, do, dlse, out)


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    rows: Side,
    keys: Side,
    score: Score,
    grads: Grads,
    *,
    o: Tensor | None = None,
    dlse: Tensor | None = None,
) -> None:
    """Gradients of one visit (`KernelSet.backward`).

    Beyond a head_dim of 128 sums are made in a fixed order always, up to it where `grads.deterministic` asks for it or the
    pair of kernels suits the score better.
    """
    args = (do, q, k, v, lse, delta, rows, keys, score, grads)
    source = None if o is None else Source(o, dlse)
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM:
        launch_wide(*args, source=source)
    elif grads.deterministic or prefers_pair(q, v, score, wants_terms=_wants_terms(grads)):
        launch_keys(*args, source=source)
        launch_rows(*args)
    else:
        launch_backward(*args, source=source)


def backward_gathered(
    do: Tensor,
    q: Tensor,
    near: tuple[Tensor, Tensor],
    far: tuple[Tensor, Tensor],
    lse: Tensor,
    delta: Tensor,
    rows: Side,
    keys: Gathered,
    score: Score,
    arrivals: Arrivals | None,
    homes: Tensor,
    home_rows: int,
    *,
    dq: Tensor,
    dalibi: Tensor | None,
    bias_homes: Tensor | None,
    deterministic: bool,
    spare: int = 0,
    o: Tensor | None = None,
    dlse: Tensor | None = None,
) -> None:
    """Dq of this rank's queries, and every source's dk, dv and dkey_bias sent home (`GatheringKernelSet.backward_gathered`).

    Regions of homes begin at multiples of 16 bytes. Where sums are made in a fixed order, the kernel by keys waits for what
    arrives and dq is made by the kernel by rows behind it.
    """
    away = Away(far, arrivals, homes, home_rows, bias_homes)
    source = None if o is None else Source(o, dlse)
    how: dict[str, Any] = {"dq": dq, "dalibi": dalibi, "spare": spare}
    if max(q.shape[-1], near[1].shape[-1]) > MAX_HEAD_DIM:
        launch_wide_gathered(do, q, near, lse, delta, rows, keys, score, away, source=source, **how)
        return
    wants_terms = dalibi is not None or bias_homes is not None
    pair = deterministic or prefers_pair(q, near[1], score, wants_terms=wants_terms)
    args = (do, q, near, lse, delta, rows, keys, score, away)
    launch_gathered(*args, want_rows=not pair, source=source, **how)
    if pair:
        error = None if arrivals is None else arrivals.error
        launch_rows_gathered(do, q, near, far, lse, delta, rows, keys, score, error, **how)


def add_bias_homes(dkey_bias: Tensor, own: Tensor, parts: Sequence[Tensor], rows: Tensor) -> None:
    """Dkey_bias of this rank's keys (`GatheringKernelSet.add_bias_homes`)."""
    (homes_triton if dkey_bias.is_cuda else plain_homes).add_bias_homes(dkey_bias, own, parts, rows)


def add_homes(dk: Tensor, dv: Tensor, own: Tensor, parts: Sequence[Tensor], rows: Tensor) -> None:
    """Dk and dv of this rank's keys (`GatheringKernelSet.add_homes`)."""
    (homes_triton if dk.is_cuda else plain_homes).add_homes(dk, dv, own, parts, rows)


def _wants_terms(grads: Grads) -> bool:
    return grads.dalibi is not None or grads.dkey_bias is not None
