"""Slices of weights: integers and copies, without communication."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ringattn.transport.copy_engine.streams import Copy

UNIT = 8
"""Numbers of which the first column of a slice is a multiple: 16 bytes of bf16, as matrix products read rows."""


def slice_width(columns: int, ranks: int) -> int:
    """Return the columns that each rank stores; the last ranks may have fewer, or none, and zeros behind them.

    Example:
        >>> slice_width(28672, 8), slice_width(100, 3)
        (3584, 40)
    """
    return -(-columns // (ranks * UNIT)) * UNIT


class Slice(NamedTuple):
    """Slice of a weight along one dim, which may hold several parts of equal length, as the two halves of a gate.

    Attributes:
        dim: Dim that is sliced.
        columns: Length of a part.
        width: Columns of each part that a rank stores, padded by zeros.
        parts: Number of parts, one behind the other in `dim`.
    """

    dim: int
    columns: int
    width: int
    parts: int = 1

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return the columns of a part that a rank holds, as (first, last + 1)."""
        return min(rank * self.width, self.columns), min((rank + 1) * self.width, self.columns)

    def shape(self, whole: tuple[int, ...] | torch.Size) -> tuple[int, ...]:
        """Return the shape of a rank's slice of a weight of this shape."""
        return (*whole[: self.dim], self.parts * self.width, *whole[self.dim + 1 :])

    def whole_shape(self, sliced: tuple[int, ...] | torch.Size) -> tuple[int, ...]:
        """Return the shape of the weight of which this is a slice's shape."""
        return (*sliced[: self.dim], self.parts * self.columns, *sliced[self.dim + 1 :])

    def cut(self, whole: Tensor, rank: int) -> Tensor:
        """Return a rank's slice, a new contiguous tensor."""
        first, end = self.bounds(rank)
        mine = whole.unflatten(self.dim, (self.parts, self.columns)).narrow(self.dim + 1, first, end - first)
        return self.pad(mine.flatten(self.dim, self.dim + 1))

    def pad(self, mine: Tensor) -> Tensor:
        """Return a new slice from its columns without padding, parts one behind the other."""
        found = mine.new_zeros(self.shape(mine.shape))
        held = mine.shape[self.dim] // self.parts
        # a rank may hold nothing
        given = mine.reshape(*mine.shape[: self.dim], self.parts, held, *mine.shape[self.dim + 1 :])
        found.unflatten(self.dim, (self.parts, self.width)).narrow(self.dim + 1, 0, held).copy_(given)
        return found

    def write(self, stack: Tensor, whole: Tensor) -> None:
        """Write the slices `ranks ...` of all ranks into the whole weight, in place."""
        parts = whole.unflatten(self.dim, (self.parts, self.columns))
        for rank, one in enumerate(stack):
            first, end = self.bounds(rank)
            if end > first:
                given = one.unflatten(self.dim, (self.parts, self.width)).narrow(self.dim + 1, 0, end - first)
                parts.narrow(self.dim + 1, first, end - first).copy_(given)

    def copies(self, mine: Tensor, rank: int, source: int, target: int) -> list[Copy]:
        """Return the copies of a rank's slice, like `mine` and at address `source`, into the whole weight at `target`."""
        first, end = self.bounds(rank)
        column = prod(mine.shape[self.dim + 1 :]) * mine.element_size()
        pitches = self.parts * self.columns * column, self.parts * self.width * column
        return [
            Copy(
                target + (part * self.columns + first) * column,
                source + part * self.width * column,
                (end - first) * column,
                prod(mine.shape[: self.dim]),
                *pitches,
            )
            for part in range(self.parts if end > first else 0)
        ]
