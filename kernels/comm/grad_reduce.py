"""Sum of the gradients of keys over the ranks that read them, in plain torch; `grad_reduce_triton` does it on GPUs.

Owns the sum over a rank's own contribution and those of the ranks that read its keys (Note [Fused call] of interface.py), in
a fixed order. Refuses to know how they arrived.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


def reduce_kv_grads(dk: Tensor, dv: Tensor, local_grads: Tensor, remote_grads: Sequence[Tensor], rows: Tensor) -> None:
    """Sum dk and dv of this rank's keys in fp32: its own contribution and, in order, those of other ranks.

    Args:
        dk: `b t hk d`, contiguous, any floating dtype; written.
        dv: `b t hk dv`, likewise.
        local_grads: `b grad_buffer_rows hk (d + dv)` fp32: row x belongs to key row x.
        remote_grads: Like local_grads, in the order of the sum.
        rows: int32 `remote_grads t`: the row of a part that belongs to a key row, or -1; rows that it names nowhere are not read.
    """
    total = local_grads[:, : dk.shape[1]].clone()
    for part, row in zip(remote_grads, rows, strict=True):
        there = row >= 0
        total[:, there] += part[:, row[there].long()]
    dk.copy_(total[..., : dk.shape[-1]])
    dv.copy_(total[..., dk.shape[-1] :])


def reduce_key_bias_grads(dkey_bias: Tensor, local_grads: Tensor, remote_grads: Sequence[Tensor], rows: Tensor) -> None:
    """Sum dkey_bias of this rank's keys: its own contribution and, in order, those of other ranks; heads in order in each.

    Args:
        dkey_bias: `b t` fp32, contiguous; written.
        local_grads: `b hk grad_buffer_rows` fp32: row x belongs to key row x.
        remote_grads: Like local_grads, in the order of the sum.
        rows: As in `reduce_kv_grads`.
    """
    total = _over_heads(local_grads[..., : dkey_bias.shape[1]]).clone()
    for part, row in zip(remote_grads, rows, strict=True):
        there = row >= 0
        total[:, there] += _over_heads(part[..., row[there].long()])
    dkey_bias.copy_(total)


def _over_heads(x: Tensor) -> Tensor:
    """The sum of `b hk t` over heads, in order."""
    return functools.reduce(torch.add, x.unbind(1))
