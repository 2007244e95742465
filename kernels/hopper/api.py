"""The Hopper kernel set: `GatheringKernelSet` of the contract in Gluon, for fp16 and bf16 on compute capability 9.0.

Owns the names of the set's functions. Products are of fp16 or bf16 operands, everything else is fp32. Refuses to know how any
kernel is launched.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ringattn.kernels import homes as plain_homes
from ringattn.kernels import homes_triton, launch_triton
from ringattn.kernels.contract import Arrivals, Carry, Gathered, Grads, Score, Side
from ringattn.kernels.hopper.launcher import (
    BackwardInputs,
    GradOutputs,
    RemoteGradArgs,
    can_gather,
    launch_backward,
    launch_forward,
    launch_forward_gathered,
)
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
    """Gradients of one visit (`KernelSet.backward`)."""
    x = BackwardInputs(do, q, k, v, lse, delta, rows, keys, score, o=o, dlse=dlse)
    launch_backward(x, GradOutputs.of(grads), deterministic=grads.deterministic)


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
    remote = RemoteGradArgs(far, arrivals, homes, home_rows, bias_homes)
    x = BackwardInputs(do, q, *near, lse, delta, rows, keys, score, o=o, dlse=dlse, remote=remote, spare=spare)
    launch_backward(x, GradOutputs(dq, dalibi=dalibi), deterministic=deterministic)


def add_bias_homes(dkey_bias: Tensor, own: Tensor, parts: Sequence[Tensor], rows: Tensor) -> None:
    """Dkey_bias of this rank's keys (`GatheringKernelSet.add_bias_homes`)."""
    (homes_triton if dkey_bias.is_cuda else plain_homes).add_bias_homes(dkey_bias, own, parts, rows)


def add_homes(dk: Tensor, dv: Tensor, own: Tensor, parts: Sequence[Tensor], rows: Tensor) -> None:
    """Dk and dv of this rank's keys (`GatheringKernelSet.add_homes`)."""
    (homes_triton if dk.is_cuda else plain_homes).add_homes(dk, dv, own, parts, rows)
