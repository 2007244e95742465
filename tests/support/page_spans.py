"""Places of a request's tokens, row by row, from the blocks of the page allocator."""

from __future__ import annotations

from typing import NamedTuple

from ringattn.inference.page_allocator import PageAllocator


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
    for block in allocator.blocks(request):
        skipped = max(0, start - block.start)
        if skipped < block.length:
            found.append(PageSpan(block.rank, block.page, skipped, block.start + skipped, block.length - skipped))
    return found
