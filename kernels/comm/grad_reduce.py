"""Sum of the gradients of keys over the ranks that read them, in a fixed order; plain torch, as `grad_reduce_triton` on GPUs."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


def reduce_kv_grads(dk: Tensor, dv: Tensor, local_grads: Tensor, remote_grads: Sequence[Tensor], rows: Tensor) -> None:
    """`FusedKernelSet.reduce_kv_grads`, in fp32; rows of contributions that the table names nowhere are not read."""
    total = _sum_rows(local_grads[:, : dk.shape[1]], remote_grads, rows)
    dk.copy_(total[..., : dk.shape[-1]])
    dv.copy_(total[..., dk.shape[-1] :])


def reduce_key_bias_grads(dkey_bias: Tensor, local_grads: Tensor, remote_grads: Sequence[Tensor], rows: Tensor) -> None:
    """`FusedKernelSet.reduce_key_bias_grads`; heads are added in order in each contribution."""
    local = _over_heads(local_grads[..., : dkey_bias.shape[1]])
    dkey_bias.copy_(_sum_rows(local, [_over_heads(part) for part in remote_grads], rows))


def _sum_rows(local: Tensor, remote: Sequence[Tensor], rows: Tensor) -> Tensor:
    total = local.clone()
    for part, row in zip(remote, rows, strict=True):
        there = row >= 0
        total[:, there] += part[:, row[there].long()]
    return total


def _over_heads(x: Tensor) -> Tensor:
    """The sum of `b hk t` over heads, in order."""
    return functools.reduce(torch.add, x.unbind(1))
