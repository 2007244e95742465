"""Places of a request's tokens, row by row, from the blocks of the page allocator."""

from __future__ import annotations

from typing import NamedTuple

from ringattn.inference.page_allocator import PageAllocator


class Block(NamedTuple):
    """Tokens start .. start + length - 1 of a request, in rows 0 .. length - 1 of a page of a rank."""

    rank: int
    page: int
    start: int
    length: int

    @property
    def stop(self) -> int:
        """One past the last token."""
        return self.start + self.length


def blocks_of(allocator: PageAllocator, request: int) -> tuple[Block, ...]:
    """Return a request's blocks, ascending; they cover its tokens."""
    found = [
        Block(rank, *block)
        for rank, table in enumerate(allocator.find(request).tables)
        for block in zip(table.pages, table.starts, table.lengths, strict=True)
    ]
    return tuple(sorted(found, key=lambda block: block.start))


class PageSpan(NamedTuple):
    """Tokens start .. start + length - 1 of a request, in rows row .. row + length - 1 of a page of a rank."""

    rank: int
    page: int
    row: int
    start: int
    length: int


def page_spans(allocator: PageAllocator, request: int, start: int = 0) -> list[PageSpan]:
    """Return the places of a request's tokens from `start` on, ascending."""
    found = []
    for block in blocks_of(allocator, request):
        skipped = max(0, start - block.start)
        if skipped < block.length:
            found.append(PageSpan(block.rank, block.page, skipped, block.start + skipped, block.length - skipped))
    return found
