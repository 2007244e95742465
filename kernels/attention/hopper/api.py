"""The Hopper kernel set: `FusedKernelSet` of interface.py in Gluon, for fp16 and bf16 on compute capability 9.0.

Owns the names of the set's functions. Products are of fp16 or bf16 operands, everything else is fp32. Refuses to know how any
kernel is launched.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ringattn.kernels.attention.hopper.launcher import (
    BackwardInputs,
    GradOutputs,
    RemoteGradArgs,
    launch_backward,
    launch_forward,
    launch_forward_fused,
    serves_fused,
)
from ringattn.kernels.attention.portable.launcher import launch_delta
from ringattn.kernels.comm import grad_reduce, grad_reduce_triton
from ringattn.kernels.interface import GatheredKeys, Grads, ReadyFlags, RowMetadata, Score, SoftmaxState
from ringattn.kernels.runtime import bound_launch

__all__ = [
    "backward",
    "backward_fused",
    "can_capture",
    "can_fuse",
    "delta",
    "forward",
    "forward_fused",
    "reduce_key_bias_grads",
    "reduce_kv_grads",
]  # fmt: skip


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: RowMetadata,
    keys: RowMetadata,
    score: Score,
    *,
    carry: SoftmaxState | None,
    first: bool,
    last: bool,
    o: Tensor,
    lse: Tensor,
) -> None:
    """Visits one buffer of keys (`KernelSet.forward`)."""
    launch_forward(q, k, v, rows, keys, score, carry=carry, first=first, last=last, o=o, lse=lse)


def can_fuse(head_dim: int, v_head_dim: int, score: Score) -> bool:
    """Whether visits of this kind are also computed in one launch (`FusedKernelSet.can_fuse`)."""
    return serves_fused(head_dim, v_head_dim, score)


def can_capture() -> bool:
    """Whether a CUDA graph may stand for launches (`FusedKernelSet.can_capture`): launch hooks would miss a replay."""
    return not bound_launch.is_hooked()


def forward_fused(
    q: Tensor,
    local_kv: tuple[Tensor, Tensor],
    remote_kv: tuple[Tensor, Tensor],
    rows: RowMetadata,
    keys: GatheredKeys,
    score: Score,
    ready_flags: ReadyFlags | None,
    *,
    o: Tensor,
    lse: Tensor,
    sm_margin: int = 0,
) -> None:
    """The finished attention of q over all sources (`FusedKernelSet.forward_fused`)."""
    launch_forward_fused(q, local_kv, remote_kv, rows, keys, score, ready_flags, o=o, lse=lse, sm_margin=sm_margin)


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
    rows: RowMetadata,
    keys: RowMetadata,
    score: Score,
    grads: Grads,
    *,
    o: Tensor | None = None,
    dlse: Tensor | None = None,
) -> None:
    """Gradients of one ring step (`KernelSet.backward`)."""
    x = BackwardInputs(do, q, k, v, lse, delta, rows, keys, score, o=o, dlse=dlse)
    launch_backward(x, GradOutputs.of(grads), deterministic=grads.deterministic)


def backward_fused(
    do: Tensor,
    q: Tensor,
    local_kv: tuple[Tensor, Tensor],
    remote_kv: tuple[Tensor, Tensor],
    lse: Tensor,
    delta: Tensor,
    rows: RowMetadata,
    keys: GatheredKeys,
    score: Score,
    ready_flags: ReadyFlags | None,
    grad_buffers: Tensor,
    grad_buffer_rows: int,
    *,
    dq: Tensor,
    dalibi: Tensor | None,
    bias_grad_buffers: Tensor | None,
    deterministic: bool,
    sm_margin: int = 0,
    o: Tensor | None = None,
    dlse: Tensor | None = None,
) -> None:
    """Dq of this rank's queries, and every source's dk, dv and dkey_bias sent to their owners (`FusedKernelSet.backward_fused`).

    Regions of grad_buffers begin at multiples of 16 bytes. Where sums are made in a fixed order, the kernel by keys waits for what
    arrives and dq is made by the kernel by rows behind it.
    """
    remote = RemoteGradArgs(remote_kv, ready_flags, grad_buffers, grad_buffer_rows, bias_grad_buffers)
    x = BackwardInputs(
        do, q, *local_kv, lse, delta, rows, keys, score, o=o, dlse=dlse, remote=remote, sm_margin=sm_margin
    )
    launch_backward(x, GradOutputs(dq, dalibi=dalibi), deterministic=deterministic)


def reduce_key_bias_grads(dkey_bias: Tensor, local_grads: Tensor, remote_grads: Sequence[Tensor], rows: Tensor) -> None:
    """Dkey_bias of this rank's keys (`FusedKernelSet.reduce_key_bias_grads`)."""
    (grad_reduce_triton if dkey_bias.is_cuda else grad_reduce).reduce_key_bias_grads(
        dkey_bias, local_grads, remote_grads, rows
    )


def reduce_kv_grads(dk: Tensor, dv: Tensor, local_grads: Tensor, remote_grads: Sequence[Tensor], rows: Tensor) -> None:
    """Dk and dv of this rank's keys (`FusedKernelSet.reduce_kv_grads`)."""
    (grad_reduce_triton if dk.is_cuda else grad_reduce).reduce_kv_grads(dk, dv, local_grads, remote_grads, rows)
