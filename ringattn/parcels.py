"""Packing rows of a shard for the way out and adding what comes home.

Owns row ranges on tensors. Refuses to know why rows move.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringattn.schedule import Rows
from ringattn.transport.base import Buffers


def pack(x: Tensor, dim: int, rows: Rows, buffers: Buffers, name: str) -> Tensor:
    """The rows of x along dim, contiguous: x itself where it already is, else a copy in a reused buffer.

    Args:
        x: Any tensor.
        dim: Its row dimension.
        rows: Row ranges.
        buffers: Where copies live.
        name: Names the copy.
    """
    parts = slices(x, dim, rows)
    if len(parts) == 1 and parts[0].is_contiguous():
        return parts[0]
    shape = list(x.shape)
    shape[dim] = sum(length for _, length in rows)
    return torch.cat(parts, dim, out=buffers.take(name, shape, x.dtype, x.device))


def add_rows_(x: Tensor, dim: int, rows: Rows, packed: Tensor) -> None:
    """x[rows] += packed, along dim."""
    lengths = [length for _, length in rows]
    for target, part in zip(slices(x, dim, rows), packed.split(lengths, dim), strict=True):
        target.add_(part)


def slices(x: Tensor, dim: int, rows: Rows) -> list[Tensor]:
    """Views of the row ranges along dim."""
    return [x.narrow(dim, offset, length) for offset, length in rows]
