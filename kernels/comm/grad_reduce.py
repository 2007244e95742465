"""Sum of the gradients of keys over the ranks that read them, in a fixed order: plain torch, or one Triton launch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


def reduce_kv_grads(dk: Tensor, dv: Tensor, local_grads: Tensor, remote_grads: Sequence[Tensor], rows: Tensor) -> None:
    """Sum dk and dv of this rank's keys in fp32: its own contribution and, in order, those of other ranks.

    Args:
        dk: `b t hk d`, contiguous, any floating dtype; written.
        dv: `b t hk dv`, as dk.
        local_grads: `b n hk (d + dv)` fp32, n at least t: row x belongs to key row x.
        remote_grads: As local_grads, one per rank that read these keys, in ring order.
        rows: int32 `remote_grads t` on the device: the row of a part that belongs to a key row, or -1. Others are not read.
    """
    if dk.is_cuda:
        from ringattn.kernels.comm.grad_reduce_triton import reduce_kv_grads_on_gpu

        reduce_kv_grads_on_gpu(dk, dv, local_grads, remote_grads, rows)
        return
    total = _sum_rows(local_grads[:, : dk.shape[1]], remote_grads, rows)
    dk.copy_(total[..., : dk.shape[-1]])
    dv.copy_(total[..., dk.shape[-1] :])


def reduce_key_bias_grads(dkey_bias: Tensor, local_grads: Tensor, remote_grads: Sequence[Tensor], rows: Tensor) -> None:
    """Sum dkey_bias `b t` fp32 of this rank's keys over ranks and key heads, heads in order in each contribution.

    Args:
        dkey_bias: Contiguous; written.
        local_grads: `b hk n` fp32: row x belongs to key row x.
        remote_grads: See `reduce_kv_grads`; also rows.
    """
    if dkey_bias.is_cuda:
        from ringattn.kernels.comm.grad_reduce_triton import reduce_key_bias_grads_on_gpu

        reduce_key_bias_grads_on_gpu(dkey_bias, local_grads, remote_grads, rows)
        return
    local = _over_heads(local_grads[..., : dkey_bias.shape[1]])
    dkey_bias.copy_(_sum_rows(local, [_over_heads(part) for part in remote_grads], rows))


def _sum_rows(local: Tensor, remote: Sequence[Tensor], rows: Tensor) -> Tensor:
    total = local.clone()
    for part, row in zip(remote, rows, strict=True):
        there = row >= 0
        total[:, there] += part[:, row[there].long()]
    return total


def _over_heads(x: Tensor) -> Tensor:
    return functools.reduce(torch.add, x.unbind(1))
