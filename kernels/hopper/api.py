"""The Hopper kernel set: `KernelSet` of the contract in Gluon, for fp16 and bf16 on compute capability 9.0.

Owns the three names and the choice between the fused backward and the deterministic pair. Products are of fp16 or bf16
operands, everything else is fp32.
"""

from __future__ import annotations

from torch import Tensor

from ringattn.kernels.contract import Carry, Grads, Score, Side
from ringattn.kernels.hopper.backward_launch import launch_backward
from ringattn.kernels.hopper.forward_launch import launch_forward
from ringattn.kernels.portable.launch import launch_delta


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


def delta(o: Tensor, do: Tensor, dlse: Tensor | None) -> Tensor:
    """Rowsum(o * do) - dlse (`KernelSet.delta`)."""
    return launch_delta(o, do, dlse)


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
) -> None:
    """Gradients of one visit (`KernelSet.backward`); in a fixed order of sums only when `grads.deterministic`."""
    launch_backward(do, q, k, v, lse, delta, rows, keys, score, grads)
