"""The Hopper kernel set: `FusedKernelSet` of interface.py in Gluon, for fp16 and bf16 on compute capability 9.0.

Products are of fp16 or bf16 operands, everything else is fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ringattn.kernels.attention.hopper.launcher import BackwardInputs, GradOutputs, RemoteGradArgs, launch_backward
from ringattn.kernels.attention.hopper.launcher import can_fuse as can_fuse
from ringattn.kernels.attention.hopper.launcher import forward as forward
from ringattn.kernels.attention.hopper.launcher import forward_fused as forward_fused
from ringattn.kernels.attention.portable.api import delta as delta
from ringattn.kernels.comm import grad_reduce, grad_reduce_triton
from ringattn.kernels.interface import GatheredKeys, Grads, ReadyFlags, RowMetadata, Score
from ringattn.kernels.runtime import bound_launch


def can_capture() -> bool:
    """`FusedKernelSet.can_capture`: hooks on launches would miss a replay."""
    return not bound_launch.is_hooked()


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
    delta_made: bool = False,
) -> None:
    """`KernelSet.backward`."""
    x = BackwardInputs(do, q, k, v, lse, delta, rows, keys, score, o=None if delta_made else o, dlse=dlse)
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
    """`FusedKernelSet.backward_fused`; regions of grad_buffers begin at multiples of 16 bytes."""
    remote = RemoteGradArgs(remote_kv, ready_flags, grad_buffers, grad_buffer_rows, bias_grad_buffers)
    x = BackwardInputs(
        do, q, *local_kv, lse, delta, rows, keys, score, o=o, dlse=dlse, remote=remote, sm_margin=sm_margin
    )
    launch_backward(x, GradOutputs(dq, dalibi=dalibi), deterministic=deterministic)


def reduce_key_bias_grads(dkey_bias: Tensor, local_grads: Tensor, remote_grads: Sequence[Tensor], rows: Tensor) -> None:
    """`FusedKernelSet.reduce_key_bias_grads`."""
    module = grad_reduce_triton if dkey_bias.is_cuda else grad_reduce
    module.reduce_key_bias_grads(dkey_bias, local_grads, remote_grads, rows)


def reduce_kv_grads(dk: Tensor, dv: Tensor, local_grads: Tensor, remote_grads: Sequence[Tensor], rows: Tensor) -> None:
    """`FusedKernelSet.reduce_kv_grads`."""
    module = grad_reduce_triton if dk.is_cuda else grad_reduce
    module.reduce_kv_grads(dk, dv, local_grads, remote_grads, rows)
