"""The portable kernel set: `KernelSet` of interface.py in plain Triton, for any GPU Triton serves and for its interpreter.

Owns nothing but the three names. Everything is computed in fp32 from fp16, bf16 or fp32 operands; the backward is
deterministic.
"""

from __future__ import annotations

from torch import Tensor

from ringattn.kernels.attention.portable.launcher import launch_backward, launch_delta, launch_forward
from ringattn.kernels.interface import Grads, RowMetadata, Score, SoftmaxState


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
    """Visits one buffer of keys (`KernelSet.forward`).

    Raises:
        NotImplementedError: The dtype is not fp16, bf16 or fp32, or head_dim exceeds 256.
    """
    launch_forward(q, k, v, rows, keys, score, carry=carry, first=first, last=last, o=o, lse=lse)


def delta(o: Tensor, do: Tensor, dlse: Tensor | None, out: Tensor | None = None) -> Tensor:
    """rowsum(o * do) - dlse as `b h s`, fp32 (`KernelSet.delta`)."""
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
    """Gradients of one ring step (`KernelSet.backward`), the same bits from run to run.

    Raises:
        NotImplementedError: The dtype is not fp16, bf16 or fp32, or head_dim exceeds 256.
    """
    if o is not None:
        launch_delta(o, do, dlse, delta)
    launch_backward(do, q, k, v, lse, delta, rows, keys, score, grads)
