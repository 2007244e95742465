"""Block tables: the pages that hold a request's tokens on each rank.

A request's tokens are cut into blocks: runs of consecutive tokens at the beginning of one page of one rank, which may cover less
than the page. A fork shares its parent's pages, with the last block cut at the fork, so forking copies nothing.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ringattn.plan.layouts import MAX_SEQ_LEN

MAX_REQUEST_TOKENS = MAX_SEQ_LEN
"""Tokens of a request."""


class RankSpan(NamedTuple):
    """Tokens start .. stop - 1 of a request, all on one rank."""

    rank: int
    start: int
    stop: int


class PageCopy(NamedTuple):
    """Rows 0 .. rows - 1 of a page of a rank that must be copied to another page of it."""

    rank: int
    source: int
    target: int
    rows: int


@dataclass(slots=True)
class BlockTable:
    """A request's blocks on one rank, ascending.

    Attributes:
        pages: Page of each block, int32.
        starts: The first token of each block, int32.
        lengths: Tokens of each block, int32.
    """

    pages: array[int] = field(default_factory=lambda: array("i"))
    starts: array[int] = field(default_factory=lambda: array("i"))
    lengths: array[int] = field(default_factory=lambda: array("i"))

    def __len__(self) -> int:
        return len(self.pages)

    def head(self, blocks: int) -> BlockTable:
        """Return a copy of the first blocks."""
        return BlockTable(self.pages[:blocks], self.starts[:blocks], self.lengths[:blocks])

    def cut(self, blocks: int) -> None:
        """Remove all but the first blocks."""
        del self.pages[blocks:], self.starts[blocks:], self.lengths[blocks:]


@dataclass(eq=False, slots=True)
class CachedRequest:
    """State of a request in the page allocator; read-only elsewhere.

    Attributes:
        name: Number by which callers refer to it.
        reserved_tokens: Tokens it may grow to.
        first: Its first token that is not padding.
        length: Its tokens.
        tables: Its blocks by rank.
        spans: Ranks of its tokens, ascending: (rank, first token).
        pages_to_open: Its pages in the allocator's sum of reservations.
        moved_at: Number of the last change that removed or moved its tokens (`PageAllocator.changes`).
        kept: Fewest tokens that such a change has left in place.
        last: Its blocks on the rank that has the last one; none where it has no tokens.
        full: Tokens that it can grow to in its last block.
        max_blocks_after: Blocks on the rank where it has most.
        layout: Number that is unique to its current blocks; appending to the last block does not change it.
    """

    name: int
    reserved_tokens: int
    first: int
    length: int
    tables: list[BlockTable]
    spans: list[tuple[int, int]] = field(default_factory=list)
    pages_to_open: int = 0
    moved_at: int = 0
    kept: int = MAX_REQUEST_TOKENS
    last: BlockTable = field(default_factory=BlockTable)
    full: int = 0
    max_blocks_after: int = 0
    layout: int = -1


def truncate_spans(spans: Sequence[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """Return the spans of the first tokens."""
    return list(spans[: bisect_left(spans, length, key=lambda span: span[1])])


def common_blocks(a: BlockTable, b: BlockTable) -> int:
    """Return the number of equal blocks at the beginning of two tables, not counting their last ones."""
    low, high = 0, max(0, min(len(a), len(b)) - 1)
    while low < high:
        middle = (low + high + 1) // 2
        same = a.pages[low:middle] == b.pages[low:middle] and a.lengths[low:middle] == b.lengths[low:middle]
        low, high = (middle, high) if same else (low, middle - 1)
    return low
