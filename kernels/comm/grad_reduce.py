"""Adding up contributions to gradients of keys that came back: plain torch. `homes_triton` has the same functions for GPUs.

Owns the sum over a rank's own contribution and those of the ranks that visited (Note [Fused call] of interface.py), in
a fixed order. Refuses to know how they came.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


def reduce_kv_grads(dk: Tensor, dv: Tensor, own: Tensor, parts: Sequence[Tensor], rows: Tensor) -> None:
    """Dk and dv of this rank's keys: its own contribution and, in order, those that came back, summed in fp32.

    Args:
        dk: `b t hk d`, contiguous, any floating dtype; written.
        dv: `b t hk dv`, likewise.
        own: `b grad_buffer_rows hk (d + dv)` fp32: row x belongs to key row x.
        parts: Like own, in the order of the sum.
        rows: int32 `parts t`: the row of a part that belongs to a key row, or -1; rows that it names nowhere are not read.
    """
    total = own[:, : dk.shape[1]].clone()
    for part, row in zip(parts, rows, strict=True):
        there = row >= 0
        total[:, there] += part[:, row[there].long()]
    dk.copy_(total[..., : dk.shape[-1]])
    dv.copy_(total[..., dk.shape[-1] :])


def reduce_key_bias_grads(dkey_bias: Tensor, own: Tensor, parts: Sequence[Tensor], rows: Tensor) -> None:
    """Dkey_bias of this rank's keys: of its own contribution and, in order, of those that came back, heads in order in each.

    Args:
        dkey_bias: `b t` fp32, contiguous; written.
        own: `b hk grad_buffer_rows` fp32: row x belongs to key row x.
        parts: Like own, in the order of the sum.
        rows: As in `reduce_kv_grads`.
    """
    total = _over_heads(own[..., : dkey_bias.shape[1]]).clone()
    for part, row in zip(parts, rows, strict=True):
        there = row >= 0
        total[:, there] += _over_heads(part[..., row[there].long()])
    dkey_bias.copy_(total)


def _over_heads(x: Tensor) -> Tensor:
    """The sum of `b hk t` over heads, in order."""
    return functools.reduce(torch.add, x.unbind(1))
