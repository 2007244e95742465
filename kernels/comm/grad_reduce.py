"""Sum of the gradients of keys over the ranks that read them, in a fixed order; plain torch, as `grad_reduce_triton` on GPUs."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


def reduce_kv_grads(dk: Tensor, dv: Tensor, local_grads: Tensor, remote_grads: Sequence[Tensor], rows: Tensor) -> None:
    """Sum dk and dv of this rank's keys in fp32: its own contribution and, in order, those of other ranks.

    Args:
        dk: `b t hk d`, contiguous, any floating dtype; written.
        dv: `b t hk dv`, in the same form.
        local_grads: `b grad_buffer_rows hk (d + dv)` fp32: row x belongs to key row x.
        rows: int32 `remote_grads t`: the row of a part that belongs to a key row, or -1; rows that it names nowhere are not read.
    """
    total = _sum_rows(local_grads[:, : dk.shape[1]], remote_grads, rows)
    dk.copy_(total[..., : dk.shape[-1]])
    dv.copy_(total[..., dk.shape[-1] :])


def reduce_key_bias_grads(dkey_bias: Tensor, local_grads: Tensor, remote_grads: Sequence[Tensor], rows: Tensor) -> None:
    """Sum dkey_bias of this rank's keys: its own contribution and, in order, those of other ranks; heads in order in each.

    Args:
        dkey_bias: `b t` fp32, contiguous; written.
        local_grads: `b hk grad_buffer_rows` fp32: row x belongs to key row x.
    """
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
