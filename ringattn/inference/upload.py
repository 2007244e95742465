"""What the device is told of a step: how its numbers lie in one piece of memory, and how that gets there.

Owns the order of the numbers, how they are counted from the books, and the copy. Refuses to know which numbers are there already
(static.py), and what they are for (step.py).

Note [One upload]
    All that the device must know of a step is laid out in one piece of memory on the host and copied once; rows that can be
    counted from blocks are counted on the device. Memory on the host is pinned and the copy asynchronous: torch keeps it until
    the copy has been made. Each tensor of a decode step begins on a line of its own: a kernel is compiled anew for a pointer that
    is not aligned, and where the blocks begin would depend on how many there are.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, repeat
from typing import Any, TypeVar

import torch
from torch import Tensor

from ringattn.inference.blocks import Request, Table
from ringattn.kernels.decode.dispatch import PageTable

WORD = 4
"""Bytes of an int32: places of numbers are counted in these."""
_LINE = 8  # words: 32 bytes, which is what kernels may be told of a pointer
_Known = TypeVar("_Known")


@dataclass(frozen=True, slots=True)
class Lines:
    """New tokens of requests, in rows of so many tokens; each request begins in a row of its own.

    Attributes:
        requests: Whose they are.
        lengths: Of each how long it is with them.
        counts: Of each how many tokens.
        rows: Of each how many rows.
        rank: Whose blocks are asked for.
        new: Tokens of a row.
    """

    requests: Sequence[Request]
    lengths: Sequence[int]
    counts: Sequence[int]
    rows: Sequence[int]
    rank: int
    new: int

    @property
    def tables(self) -> list[Table]:
        """The blocks of each request."""
        return [one.tables[self.rank] for one in self.requests]

    def part(self, begin: int, end: int) -> Lines:
        """Those of some requests."""
        these = slice(begin, end)
        return Lines(
            self.requests[these], self.lengths[these], self.counts[these], self.rows[these], self.rank, self.new
        )

    def spread(self, known: Sequence[_Known]) -> Sequence[_Known]:
        """What is known of each request, for every row."""
        if max(self.rows) == 1:
            return known
        return list(chain.from_iterable(map(repeat, known, self.rows)))


@dataclass(frozen=True, slots=True)
class Changed:
    """Blocks that are to be put in their places among those of a static step.

    Attributes:
        at: Their places among all blocks of a step.
        pages: Of each block.
        starts: Of each block.
        lengths: Of each block.
    """

    at: array[int] = field(default_factory=lambda: array("q"))
    pages: array[int] = field(default_factory=lambda: array("i"))
    starts: array[int] = field(default_factory=lambda: array("i"))
    lengths: array[int] = field(default_factory=lambda: array("i"))

    def add(self, table: Table, begin: int, end: int, rows: range, columns: int) -> None:
        """Blocks begin .. end - 1 of a request, for each of some rows of so many columns."""
        if begin >= end:
            return
        begins, ends = (range(rows.start * columns + x, rows.stop * columns + x, columns) for x in (begin, end))
        self.at.extend(chain.from_iterable(map(range, begins, ends)))
        self.pages.extend(table.pages[begin:end] * len(rows))
        self.starts.extend(table.starts[begin:end] * len(rows))
        self.lengths.extend(table.lengths[begin:end] * len(rows))


@dataclass(frozen=True)
class Places:
    """Where the integers of a decode step are in its one upload (Note [One upload]); in words of 4 bytes.

    Attributes:
        batch: Requests, or pieces (Note [Pieces] of static.py).
        new: Tokens of each.
    """

    batch: int
    new: int

    def words(self, columns: int) -> int:
        """Words of a step with so many columns of blocks, which come last."""
        return self.begins[-1] + 3 * self.table_words(columns)

    def words_of_changes(self, count: int) -> int:
        """Words of a step with so many changed blocks, which come last (Note [Blocks that stay] of static.py)."""
        return self.begins[-1] + _aligned(2 * count) + _aligned(3 * count)

    def table_words(self, columns: int) -> int:
        """Words from one number of all blocks to the next one."""
        return _aligned(self.batch * columns)

    @property
    def rows(self) -> int:
        """Rows of the step."""
        return self.batch * self.new

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """Where positions, slots, positions32, starts, ends, causal_ends, counts and blocks begin."""
        long, short = _aligned(2 * self.rows), _aligned(self.rows)
        return tuple(accumulate((long, long, short, short, short, short, _aligned(self.batch)), initial=0))

    def table(self, words: Tensor, columns: int) -> Tensor:
        """Pages, starts and lengths of all blocks, `3 batch columns`, of the words that hold them."""
        return words.view(3, -1)[:, : self.batch * columns].view(3, self.batch, columns)

    def view(self, x: Tensor, blocks: Tensor, shape: tuple[int, int]) -> dict[str, Any]:
        """The tensors of a step, as parts of an upload; blocks: `table`; shape: of the model's rows."""
        at, rows, tiles = self.begins, self.rows, (self.batch, self.new)
        positions, slots = (x[begin : begin + 2 * rows].view(torch.int64).view(shape) for begin in at[:2])
        positions32, starts, ends, causal_ends = (x[begin : begin + rows].view(tiles) for begin in at[2:6])
        return {
            "positions": positions,
            "slots": slots,
            "positions32": positions32,
            "starts": starts,
            "ends": ends,
            "causal_ends": causal_ends,
            "table": PageTable(blocks[0], blocks[1], blocks[2], x[at[6] : at[6] + self.batch]),
            "taken": torch.arange(shape[1], device=x.device),
        }

    def changes(self, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Places of changed blocks among all of a step, and the blocks, `3 count`; parts of an upload."""
        begin = self.begins[-1]
        at = begin + _aligned(2 * count)
        return x[begin : begin + 2 * count].view(torch.int64), x[at : at + 3 * count].view(3, count)

    def fill(self, page_size: int, lines: Lines, columns: int) -> bytearray:
        """The upload of a step with so many columns of blocks."""
        data = bytearray(WORD * self.words(columns))
        ints = memoryview(data).cast("i")
        self.write(ints, memoryview(data).cast("q"), page_size, lines)
        width = self.table_words(columns)
        for i, table in enumerate(lines.tables):
            begin, blocks = self.begins[-1] + i * columns, len(table)
            ints[begin : begin + blocks] = table.pages
            ints[begin + width : begin + width + blocks] = table.starts
            ints[begin + 2 * width : begin + 2 * width + blocks] = table.lengths
        return data

    def with_changes(self, rows: bytearray, blocks: Changed) -> bytearray:
        """The upload of a step's rows and of blocks that have changed."""
        if not blocks.at:
            return rows
        words = 2 * len(blocks.at)
        gap = bytes(WORD * (_aligned(words) - words))
        return bytearray().join((rows, blocks.at, gap, blocks.pages, blocks.starts, blocks.lengths))

    def clear(self, ints: memoryview, longs: memoryview, begin: int, end: int) -> None:
        """Writes rows that hold no token: they see nothing and are kept nowhere."""
        positions, slots, *short, counts, _ = self.begins
        begins, count = begin * self.new, (end - begin) * self.new
        for first in (positions // 2, slots // 2):
            longs[first + begins : first + begins + count] = array("q", (0 if first == positions // 2 else -1,)) * count
        for first in short:
            ints[first + begins : first + begins + count] = array("i", (0,)) * count
        ints[counts + begin : counts + end] = array("i", (0,)) * (end - begin)

    def count(self, ints: memoryview, longs: memoryview, rows: int) -> None:
        """Writes by how much numbers grow with a token more of each of the first rows; slots of these: `grow`."""
        positions, slots, here, _, ends, causal_ends, _, _ = self.begins
        more, none = rows * self.new, self.rows - rows * self.new
        longs[positions // 2 : positions // 2 + self.rows] = array("q", (1,)) * more + array("q", (0,)) * none
        longs[slots // 2 + more : slots // 2 + self.rows] = array("q", (0,)) * none
        for first in (here, ends, causal_ends):
            ints[first : first + self.rows] = array("i", (1,)) * more + array("i", (0,)) * none

    def grow(self, longs: memoryview, row: int, here: bool) -> None:
        """Writes by how much a row's slots grow with a token more: those of tokens that are kept here."""
        at = self.begins[1] // 2 + row * self.new
        longs[at : at + self.new] = array("q", (here,)) * self.new

    def write(self, ints: memoryview, longs: memoryview, page_size: int, lines: Lines, row: int = 0) -> None:
        """Writes all of some rows, from this one on, but the blocks: what holds no token sees nothing and is kept nowhere."""
        new, tables = self.new, lines.tables
        place, slots, here, starts, ends, causal_ends, counts, _ = self.begins
        place, slots = place // 2, slots // 2
        last = row + sum(lines.rows)
        longs[slots + row * new : slots + last * new] = array("q", (-1,)) * ((last - row) * new)
        ints[counts + row : counts + last] = array("i", lines.spread([len(table.pages) for table in tables]))
        together = max(lines.rows) == 1 < len(lines.rows)
        if together:
            self._write_rows(ints, longs, lines, row)
        stop = row * new
        for one, table, count, rows in zip(lines.requests, tables, lines.counts, lines.rows, strict=True):
            at, stop, before = stop, stop + rows * new, one.length - count
            end = at + count
            if not together:
                numbers, nexts = range(before, one.length), range(before + 1, one.length + 1)
                longs[place + at : place + end] = array("q", numbers)
                ints[here + at : here + end] = array("i", numbers)
                ints[causal_ends + at : causal_ends + end] = array(
                    "i", (max(one.first, x) for x in nexts) if one.first else nexts
                )
                ints[starts + at : starts + end] = array("i", (one.first,)) * count
                ints[ends + at : ends + end] = array("i", (one.length,)) * count
            if end < stop:
                # the last row has fewer tokens
                nothing = array("i", (0,)) * (stop - end)
                longs[place + end : place + stop] = array("q", nothing)
                for first in (here, starts, ends, causal_ends):
                    ints[first + end : first + stop] = nothing
            if not table.starts or table.starts[-1] + table.lengths[-1] <= before:
                continue  # its new tokens are on other ranks
            if count == 1:
                longs[slots + at] = table.pages[-1] * page_size + before - table.starts[-1]
            else:
                longs[slots + at : slots + end] = _slots(table, page_size, before, count)

    def _write_rows(self, ints: memoryview, longs: memoryview, lines: Lines, row: int) -> None:
        """Writes what is known of the tokens of requests that have a row each, but where they are kept."""
        positions, _, here, starts, ends, causal_ends, _, _ = self.begins
        befores = [length - count for length, count in zip(lines.lengths, lines.counts, strict=True)]
        firsts, lengths = array("i", [one.first for one in lines.requests]), array("i", lines.lengths)
        stop = (row + len(befores)) * self.new
        for x in range(self.new):
            # token x of every row at once
            at, places = row * self.new + x, [before + x for before in befores]
            nexts = [max(before + x + 1, first) for before, first in zip(befores, firsts, strict=True)]
            longs[positions // 2 + at : positions // 2 + stop : self.new] = array("q", places)
            columns = (here, array("i", places)), (starts, firsts), (ends, lengths), (causal_ends, array("i", nexts))
            for first, column in columns:
                ints[first + at : first + stop : self.new] = column


def _aligned(words: int) -> int:
    return -(-words // _LINE) * _LINE


def _slots(table: Table, page_size: int, before: int, count: int) -> array[int]:
    """Where a request's last tokens are kept on this rank, from `before` on: page * page_size + row; -1: on another one."""
    found = array("q", (-1,)) * count
    for page, start, length in zip(*map(reversed, (table.pages, table.starts, table.lengths)), strict=True):
        if start + length <= before:
            break
        begin = max(start, before)
        slot = page * page_size + begin - start
        found[begin - before : start + length - before] = array("q", range(slot, slot + start + length - begin))
    return found


@dataclass(frozen=True)
class Rows:
    """Blocks whose rows are counted on the device (Note [One upload]).

    Attributes:
        words: Pages, starts and lengths of all blocks, then whatever else is known of each block.
        fields: How many numbers of each block.
    """

    words: array[int]
    fields: int

    @classmethod
    def of(cls, tables: Sequence[Table], skipped: Sequence[int] = (), shifts: Sequence[int] = ()) -> Rows:
        """Of the blocks of several requests, one after another.

        Args:
            tables: Of each request.
            skipped: A number of each request that only its first block has, the others 0; may be left out.
            shifts: A number of each request that all its blocks have; may be left out.
        """
        words = array("i")
        for name in ("pages", "starts", "lengths"):
            for table in tables:
                words += getattr(table, name)
        for table, here in zip(tables, skipped, strict=False):
            words += array("i", (0,)) * len(table)
            if here:
                words[-len(table)] = here
        for table, here in zip(tables, shifts, strict=False):
            words += array("i", (here,)) * len(table)
        return cls(words, 3 + bool(skipped) + bool(shifts))

    def data(self) -> bytes:
        """As it is uploaded."""
        return self.words.tobytes()

    def count(self, words: Tensor, total: int) -> tuple[Tensor, ...]:
        """What is known of each row's block, and which row of the block it is in place of lengths: `total` int64 each.

        Args:
            words: An upload that begins with `data`.
            total: How many rows there are.
        """
        blocks = len(self.words) // self.fields
        known = words[: len(self.words)].view(self.fields, blocks).long()
        block = torch.repeat_interleave(known[2], output_size=total)
        row = torch.arange(total, device=words.device) - (known[2].cumsum(0) - known[2])[block]
        pages, starts, _, *others = known[:, block]
        return pages, starts, row, *others


def uploaded(data: bytes | bytearray, device: torch.device) -> Tensor:
    """The words of a step on a device, as int32."""
    words = torch.empty(len(data) // WORD, dtype=torch.int32, device=device)
    upload(data, words)
    return words


def upload(data: bytes | bytearray, words: Tensor) -> None:
    """Writes the words of a step to the beginning of a tensor, in stream order."""
    if not data:
        return
    there = torch.frombuffer(data if isinstance(data, bytearray) else bytearray(data), dtype=torch.int32)
    if words.is_cuda:
        there = torch.empty(len(there), dtype=torch.int32, pin_memory=True, device="cpu").copy_(there)
    words[: len(there)].copy_(there, non_blocking=True)
