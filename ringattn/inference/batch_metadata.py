"""Integers of a batch that kernels read: their layout in one upload, and which of them the device already has.

Shapes: `n` batch rows, `new` tokens of each.

Note [Block updates]
    All integers of a batch are in one piece of pinned host memory, copied to the device at once and asynchronously. The block
    tables of eight requests of a million tokens, in pages of 64 on 4 ranks, take 393,216 bytes on each rank, and a new
    token changes one block of a request, on one rank. So only the first upload has whole tables. They stay on the device, and
    later uploads have only the blocks that changed, with their places: 20 bytes each. The host remembers for each row which
    request it holds, since which change of the page allocator, and how long the request was. Of its tokens that no change
    has moved since then, blocks that ended before the last one are on the device already.

    Memory on the device: block updates | integers of rows | block tables
    The first upload writes the last two, each later one the end of the first and the second: one copy each.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat
from typing import Any

import torch
from torch import Tensor

from ringattn.inference.block_table import BlockTable, CachedRequest
from ringattn.kernels.decode.dispatch import PageTable

_INT = 4
"""Bytes of an int32: offsets count these."""
_ALIGNMENT = 8
"""Each tensor begins at a multiple of 32 bytes: Triton compiles a kernel again for a pointer of another alignment."""


@dataclass(frozen=True, slots=True)
class _BlockUpdates:
    """Blocks to be written into the block tables on the device.

    places: Index of each block among those of all rows, int64; other fields are int32.
    """

    places: array[int] = field(default_factory=lambda: array("q"))
    pages: array[int] = field(default_factory=lambda: array("i"))
    starts: array[int] = field(default_factory=lambda: array("i"))
    lengths: array[int] = field(default_factory=lambda: array("i"))

    def add(self, table: BlockTable, begin: int, row_starts: range) -> None:
        blocks = range(begin, len(table))
        for row_start in row_starts if blocks else ():
            self.places.extend(range(row_start + blocks.start, row_start + blocks.stop))
        for ours, theirs in ((self.pages, table.pages), (self.starts, table.starts), (self.lengths, table.lengths)):
            ours.extend(theirs[begin:] * len(row_starts))

    def data(self) -> bytearray:
        count = len(self.places)
        gaps = [bytes(_INT * (_aligned(n) - n)) for n in (2 * count, 3 * count)]
        return bytearray().join((self.places, gaps[0], self.pages, self.starts, self.lengths, gaps[1]))

    def views(self, ints: Tensor) -> tuple[Tensor, Tensor]:
        """Return the places and the blocks, `3 n`, as views of an upload that begins with `data`."""
        count = len(self.places)
        blocks = _aligned(2 * count)
        return ints[: 2 * count].view(torch.int64), ints[blocks : blocks + 3 * count].view(3, count)


class BatchMetadata:
    """Integers of a decode batch on the device, at fixed addresses, and the upload that writes them.

    Attributes:
        max_blocks: Maximum number of blocks of a row on this rank.
    """

    def __init__(
        self, batch: int, new: int, max_blocks: int, *, page_size: int, rank: int, device: torch.device
    ) -> None:
        self.max_blocks = max_blocks
        self._batch, self._new, self._page_size, self._rank = batch, new, page_size, rank
        long, short = _aligned(2 * batch * new), _aligned(batch * new)
        # positions, slots, positions32, starts, ends, causal_ends, number of blocks, block tables
        self._offsets = tuple(accumulate((long, long, short, short, short, short, _aligned(batch)), initial=0))
        blocks = batch * max_blocks
        self._width = _aligned(blocks)
        self._begin = _aligned(2 * blocks) + _aligned(3 * blocks)
        size = self._begin + self._offsets[-1] + 3 * self._width
        self._memory = torch.zeros(size, dtype=torch.int32, device=device)
        self._blocks = self._memory[self._begin + self._offsets[-1] :].view(3, self._width)[:, :blocks]
        self._empty = bytearray(_INT * self._offsets[-1])
        slots = self._offsets[1] // 2
        memoryview(self._empty).cast("q")[slots : slots + batch * new] = array("q", (-1,)) * (batch * new)
        self.forget()

    def forget(self) -> None:
        """Forget which blocks the device has: the next upload has whole tables."""
        self._is_first = True
        # of each row: the layout of its request; the request and the last change; tokens of the request
        self._layouts = [-1] * self._batch
        self._held: list[tuple[int, int] | None] = [None] * self._batch
        self._lengths = [0] * self._batch

    def tensors(self, shape: tuple[int, int]) -> dict[str, Any]:
        """Return views of the integers by the names of `ForwardBatch`; shape: batch and rows of the model's input."""
        x, at, n, rows = self._memory[self._begin :], self._offsets, self._batch * self._new, (self._batch, self._new)
        positions, slots = (x[begin : begin + 2 * n].view(torch.int64).view(shape) for begin in at[:2])
        positions32, starts, ends, causal_ends = (x[begin : begin + n].view(rows) for begin in at[2:6])
        blocks = self._blocks.view(3, self._batch, self.max_blocks)
        return {
            "positions": positions,
            "slots": slots,
            "positions32": positions32,
            "starts": starts,
            "ends": ends,
            "causal_ends": causal_ends,
            "table": PageTable(blocks[0], blocks[1], blocks[2], x[at[6] : at[6] + self._batch]),
            "taken": torch.arange(shape[1], device=x.device),
        }

    def write(self, requests: Sequence[CachedRequest], counts: Sequence[int], rows: Sequence[int], change: int) -> None:
        """Write the new tokens of requests, in stream order; rows behind them see nothing and are not stored.

        Args:
            requests: Requests, their new tokens included.
            counts: New tokens of each request.
            rows: Rows of each request: its new tokens fill them in order, the last one perhaps in part.
            change: `PageAllocator.changes`.
        """
        data = bytearray(self._empty)
        self._write_tokens(data, requests, counts, rows)
        updates = self._find_updates(requests, rows, change)
        if self._is_first:
            data += self._tables(requests, rows)
        upload = updates.data() + data
        begin = self._begin - (len(upload) - len(data)) // _INT
        try:
            copy_to_device(upload, self._memory[begin:])
            if updates.places:
                self._blocks.index_copy_(1, *updates.views(self._memory[begin:]))
            self._is_first = False
        except BaseException:
            # the device may have any part of it
            self.forget()
            raise

    def _write_tokens(
        self, data: bytearray, requests: Sequence[CachedRequest], counts: Sequence[int], rows: Sequence[int]
    ) -> None:
        ints, longs, new, used = memoryview(data).cast("i"), memoryview(data).cast("q"), self._new, sum(rows)
        positions, slots, positions32, starts, ends, causal_ends, num_blocks, _ = self._offsets
        positions, slots = positions // 2, slots // 2
        tables = [one.tables[self._rank] for one in requests]
        blocks = chain.from_iterable(map(repeat, [len(table.pages) for table in tables], rows))
        ints[num_blocks : num_blocks + used] = array("i", blocks)
        is_uniform = used == len(rows) and counts.count(new) == len(counts)
        if is_uniform:
            # token x of every row at once
            firsts, lengths = array("i", [one.first for one in requests]), array("i", [one.length for one in requests])
            for x in range(new):
                places = [length - new + x for length in lengths]
                causal = array("i", [max(place + 1, first) for place, first in zip(places, firsts, strict=True)])
                longs[positions + x : positions + used * new : new] = array("q", places)
                columns = (positions32, array("i", places)), (starts, firsts), (ends, lengths), (causal_ends, causal)
                for begin, column in columns:
                    ints[begin + x : begin + used * new : new] = column
        stop = 0
        for one, table, count, height in zip(requests, tables, counts, rows, strict=True):
            at, stop, before = stop, stop + height * new, one.length - count
            if not is_uniform:
                end, places = at + count, range(before, one.length)
                longs[positions + at : positions + end] = array("q", places)
                ints[positions32 + at : positions32 + end] = array("i", places)
                ints[starts + at : starts + end] = array("i", (one.first,)) * count
                ints[ends + at : ends + end] = array("i", (one.length,)) * count
                ints[causal_ends + at : causal_ends + end] = array("i", [max(place + 1, one.first) for place in places])
            if not table.starts or table.starts[-1] + table.lengths[-1] <= before:
                continue  # its new tokens are on other ranks
            if count == 1:
                longs[slots + at] = table.pages[-1] * self._page_size + before - table.starts[-1]
            else:
                longs[slots + at : slots + at + count] = _slots(table, self._page_size, before, count)

    def _tables(self, requests: Sequence[CachedRequest], rows: Sequence[int]) -> bytearray:
        data, width, begin = bytearray(_INT * 3 * self._width), self._width, 0
        ints = memoryview(data).cast("i")
        for one, height in zip(requests, rows, strict=True):
            table = one.tables[self._rank]
            blocks = len(table)
            for _ in range(height):
                ints[begin : begin + blocks] = table.pages
                ints[begin + width : begin + width + blocks] = table.starts
                ints[begin + 2 * width : begin + 2 * width + blocks] = table.lengths
                begin += self.max_blocks
        return data

    def _find_updates(self, requests: Sequence[CachedRequest], rows: Sequence[int], change: int) -> _BlockUpdates:
        """Return the blocks that the device lacks, and record them as uploaded (Note [Block updates])."""
        updates, rank, max_blocks, end = _BlockUpdates(), self._rank, self.max_blocks, 0
        layouts, held, lengths = self._layouts, self._held, self._lengths
        for one, height in zip(requests, rows, strict=True):
            table, begin, end = one.tables[rank], end, end + height
            if height == 1 and one.layout == layouts[begin]:
                # most rows of most batches: the last block of the request is longer, here or on another rank
                if one.last is table:
                    i = len(table.pages) - 1
                    updates.places.append(begin * max_blocks + i)
                    updates.pages.append(table.pages[i])
                    updates.starts.append(table.starts[i])
                    updates.lengths.append(table.lengths[i])
                lengths[begin] = one.length
                continue
            if not self._is_first:
                these = range(begin, end)
                kept = min([_kept_blocks(one, table, held[row], lengths[row]) for row in these])
                updates.add(table, kept, range(begin * max_blocks, end * max_blocks, max_blocks))
            layouts[begin:end], held[begin:end] = [one.layout] * height, [(one.name, change)] * height
            lengths[begin:end] = [one.length] * height
        return updates


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _slots(table: BlockTable, page_size: int, before: int, count: int) -> array[int]:
    """Return page * page_size + row of a request's last `count` tokens, from `before` on; -1: on another rank."""
    found = array("q", (-1,)) * count
    for page, start, length in zip(*map(reversed, (table.pages, table.starts, table.lengths)), strict=True):
        if start + length <= before:
            break
        begin = max(start, before)
        slot = page * page_size + begin - start
        found[begin - before : start + length - before] = array("q", range(slot, slot + start + length - begin))
    return found


def _kept_blocks(one: CachedRequest, table: BlockTable, held: tuple[int, int] | None, length: int) -> int:
    """Return how many first blocks of a request a row has on the device; held: its request and last change then, of that length."""
    if held is None or held[0] != one.name:
        return 0
    length = length if held[1] >= one.moved_at else min(length, one.kept)
    blocks = bisect_left(table.starts, length)
    # the block that ends with them may have been longer, or shorter
    return blocks - (blocks > 0 and table.starts[blocks - 1] + table.lengths[blocks - 1] >= length)


@dataclass(frozen=True)
class PackedBlocks:
    """Blocks of several requests, which the device expands to the integers of each row; for prefill.

    Attributes:
        ints: Pages, starts and lengths of all blocks, then further fields.
        fields: Integers of each block.
    """

    ints: array[int]
    fields: int

    @classmethod
    def of(cls, tables: Sequence[BlockTable], skipped: Sequence[int] = (), shifts: Sequence[int] = ()) -> PackedBlocks:
        """Pack block tables one after another, optionally with a number that each table's first block, or each block, gets."""
        ints = array("i")
        for name in ("pages", "starts", "lengths"):
            for table in tables:
                ints += getattr(table, name)
        for table, number in zip(tables, skipped, strict=False):
            ints += array("i", (0,)) * len(table)
            if number:
                ints[-len(table)] = number
        for table, number in zip(tables, shifts, strict=False):
            ints += array("i", (number,)) * len(table)
        return cls(ints, 3 + bool(skipped) + bool(shifts))

    def expand(self, ints: Tensor, total: int) -> tuple[Tensor, ...]:
        """Return `total` int64 of each field, one per row, with the row's index in its block in place of the length.

        Args:
            ints: An upload that begins with these integers.
            total: Rows of all blocks.
        """
        blocks = len(self.ints) // self.fields
        fields = ints[: len(self.ints)].view(self.fields, blocks).long()
        block = torch.repeat_interleave(fields[2], output_size=total)
        row = torch.arange(total, device=ints.device) - (fields[2].cumsum(0) - fields[2])[block]
        pages, starts, _, *others = fields[:, block]
        return pages, starts, row, *others


def to_device(ints: array[int], device: torch.device) -> Tensor:
    """Return int32 numbers as a tensor on the device."""
    found = torch.empty(len(ints), dtype=torch.int32, device=device)
    copy_to_device(bytearray(ints), found)
    return found


def copy_to_device(data: bytearray, out: Tensor) -> None:
    """Write the int32 in `data` to the beginning of a tensor, in stream order."""
    if not data:
        return
    ints = torch.frombuffer(data, dtype=torch.int32)
    if out.is_cuda:
        ints = torch.empty(len(ints), dtype=torch.int32, pin_memory=True, device="cpu").copy_(ints)
    out[: len(ints)].copy_(ints, non_blocking=True)
