"""Tables of visible blocks: one bit per pair of blocks of positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

MOST_ENTRIES = 2**22
"""Entries of the largest table: 2,048 x 2,048 blocks, 262,144 tokens in blocks of 128."""


@dataclass(frozen=True)
class BlockPattern:
    """Visible blocks of queries x blocks of keys.

    Attributes:
        lines: Per block of queries an integer whose bit j says whether the block j of keys is visible.
        columns: Blocks of keys.
        block_size: Positions of a block, on both sides; the last block of a side may be shorter.
    """

    lines: tuple[int, ...]
    columns: int
    block_size: int

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[Any]], block_size: int) -> BlockPattern:
        """Return the pattern of rows of flags."""
        if not rows or not len(rows[0]) or any(len(row) != len(rows[0]) for row in rows):
            raise ValueError(
                f"pattern must be a matrix of flags, got {len(rows)} rows of {sorted({len(row) for row in rows})[:3]}; "
                "pass one flag per pair of blocks"
            )
        for row in rows:
            if not ({*map(type, row)} <= {bool, int} and {*row} <= {0, 1}):
                wrong = next(flag for flag in row if type(flag) not in (bool, int) or flag not in (0, 1))
                raise ValueError(
                    f"pattern must be of bool, or of integers 0 and 1, got {wrong!r}; compare first: pattern == 0 is what an "
                    "additive pattern shows"
                )
        if len(rows) * len(rows[0]) > MOST_ENTRIES:
            raise ValueError(
                f"pattern must have at most {MOST_ENTRIES:,} entries, got {len(rows)} x {len(rows[0])}; use larger blocks"
            )
        lines = tuple(int("".join("1" if flag else "0" for flag in reversed(row)), 2) for row in rows)
        return cls(lines, len(rows[0]), block_size)

    @cached_property
    def _hash(self) -> int:
        return hash((self.lines, self.columns, self.block_size))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockPattern, (self.lines, self.columns, self.block_size)

    def sees(self, i: int, j: int) -> bool:
        """Return whether the blocks of query i and key j are visible."""
        return bool(self.lines[i // self.block_size] >> (j // self.block_size) & 1)

    def both(self, other: BlockPattern) -> BlockPattern:
        """The blocks that `other` shows too."""
        mine, theirs = (len(x.lines) for x in (self, other))
        if (mine, self.columns, self.block_size) != (theirs, other.columns, other.block_size):
            raise ValueError(
                f"block patterns of one mask must have one shape and block_size, got {mine} x {self.columns} blocks of "
                f"{self.block_size} and {theirs} x {other.columns} of {other.block_size}; refine the coarser one"
            )
        lines = tuple(a & b for a, b in zip(self.lines, other.lines, strict=True))
        return BlockPattern(lines, self.columns, self.block_size)

    @cached_property
    def inverse(self) -> BlockPattern:
        """The blocks that this pattern hides."""
        every = (1 << self.columns) - 1
        return BlockPattern(tuple(every & ~line for line in self.lines), self.columns, self.block_size)

    @cached_property
    def transposed(self) -> BlockPattern:
        """The same pairs with the sides exchanged."""
        return BlockPattern.from_rows(list(zip(*self.rows(), strict=True)), self.block_size)

    def rows(self) -> list[list[bool]]:
        """The flags as rows."""
        return [[bit == "1" for bit in reversed(f"{line:0{self.columns}b}")] for line in self.lines]

    @cached_property
    def spans(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per block of queries the visible key positions as disjoint, ascending [begin, end) of whole blocks."""
        found = {line: _spans(line, self.block_size) for line in set(self.lines)}
        return tuple(map(found.__getitem__, self.lines))


def _spans(line: int, block_size: int) -> tuple[tuple[int, int], ...]:
    """Return the stretches of ones of an integer's bits, in positions."""
    found, at = [], 0
    while line:
        zeros = (line & -line).bit_length() - 1
        line >>= zeros
        ones = (~line & (line + 1)).bit_length() - 1
        found.append(((at + zeros) * block_size, (at + zeros + ones) * block_size))
        line >>= ones
        at += zeros + ones
    return tuple(found)
