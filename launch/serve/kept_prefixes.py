"""Pages of requests on all ranks, as rank 0 plans them: prefixes that are kept, their eviction, and copies in host memory.

Integers only. Every change is recorded for the other ranks, whose page allocators follow.

Note [Host memory]
    With slots in host memory a page of a kept prefix is copied there when it is evicted, unless a copy is there already. The copy
    is a part of the step (`StepCommand.saves`) that may overwrite the page, and reads it before. A request takes back what its
    prompt begins with (`StepCommand.loads`), to the ranks that have the copies, before the rest of its prompt is computed. A step
    moves at most `moves` pages of each rank, in both directions together, so that answers wait little: room for a request is made,
    and filled, over several steps. Only the next token of an answer, which needs one page, does not wait for that limit.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import repeat, takewhile
from operator import attrgetter
from typing import Any, NamedTuple

from ringattn.inference.block_table import BlockTable
from ringattn.inference.page_allocator import PageAllocator
from ringattn.launch.serve.prefix_cache import Digest, HostBlock, HostIndex, PrefixIndex, prefix_digests

MAX_KEPT = 1024  # maximum of kept prefixes of finished requests: each costs some bookkeeping


class _Block(NamedTuple):
    """Tokens start .. start + length - 1 of a request, in a page of a rank."""

    rank: int
    page: int
    start: int
    length: int


class KeptPrefixes:
    """The page allocator of rank 0, and the prefixes of requests that have ended.

    Args:
        allocator: Page allocator of this rank.
        slots: Pages of each rank's host memory; 0: there is none.
        moves: Pages of each rank that a step may copy to and from host memory.

    Attributes:
        tokens: Tokens of kept prefixes by cache id, least recently used first.
        index: Prefixes of running requests and kept ones by cache id.
        changes: Changes of the allocator since `take_changes`.
        saves: Copies of pages to host memory since then: rank, page and slot.
        loaded_pages: Pages that were copied back from host memory so far.
        saved_pages: Pages that were copied to host memory so far.
    """

    def __init__(self, allocator: PageAllocator, slots: int = 0, moves: int = 1) -> None:
        self.allocator, self._size = allocator, allocator.page_size
        self.tokens: dict[int, list[int]] = {}
        self.index = PrefixIndex(allocator.page_size)
        self.changes: list[tuple[Any, ...]] = []
        self.saves: list[tuple[int, int, int]] = []
        self.host = HostIndex(allocator.world_size, slots, allocator.page_size) if slots else None
        self.loaded_pages = self.saved_pages = 0
        self._moves = moves
        self._left = [moves] * allocator.world_size  # pages that this step may still copy, by rank

    def apply(self, what: str, *rest: Any) -> int:
        """Change the page allocator, record the change for the other ranks, and return the cache id."""
        result = getattr(self.allocator, what)(*rest)
        if result is None:
            self.changes.append((what, *rest))
            return rest[0]
        self.changes.append((what, result, *rest))
        return result

    def take_changes(self) -> tuple[list[tuple[Any, ...]], list[tuple[int, int, int]]]:
        """Return the changes and saves for a step; the next one may copy as many pages again."""
        found = self.changes, self.saves
        self.changes, self.saves = [], []
        self._left = [self._moves] * self.allocator.world_size
        return found

    def keep(self, cache_id: int, tokens: Sequence[int], digests: Sequence[Digest]) -> int:
        """Keep the first tokens of a request that ends, or free it if they fill no page; return how many are kept.

        Args:
            cache_id: The request.
            tokens: Its first tokens, all of them computed.
            digests: Digests of its first pages, as far as they are known.
        """
        length = len(tokens)
        if length < self._size:
            self.free(cache_id)
            return 0
        self.apply("truncate", cache_id, length, length)  # frees what it had reserved beyond
        self.tokens[cache_id] = list(tokens)
        self.index.add(cache_id, prefix_digests(tokens, self._size, digests[: length // self._size]))
        return length

    def use(self, cache_id: int) -> None:
        """Make a kept prefix the most recently used one."""
        if cache_id in self.tokens:
            self.tokens[cache_id] = self.tokens.pop(cache_id)

    def free(self, cache_id: int) -> None:
        """Free a request, or a kept prefix without a copy in host memory."""
        self.tokens.pop(cache_id, None)
        self.index.drop(cache_id)
        self.apply("free", cache_id)

    def evict(
        self, pages: int, spared: Mapping[int, int] | None = None, by_rank: Sequence[int] = (), *, urgent: bool = False
    ) -> bool:
        """Evict kept prefixes, least recently used first and each from its end, as far as a step may copy them.

        Args:
            pages: Pages that must be available.
            spared: Kept prefixes, and how many of their tokens stay.
            by_rank: Pages that must be free on each rank; as far as possible.
            urgent: Evict all that is needed, whatever must be copied.

        Returns:
            Whether there is room; if not, nothing is left to evict, or the next step may go on.
        """
        for cache_id in list(self.tokens):
            least = spared.get(cache_id, 0) if spared else 0
            while (need := self._lacking(pages, by_rank)) and len(self.tokens.get(cache_id, ())) > least:
                if not self._cut(cache_id, need, least, urgent):
                    return False
            if not need:
                return True
        return self.allocator.available >= pages

    def trim(self) -> None:
        """Evict the least recently used prefixes beyond MAX_KEPT, as far as a step may copy them."""
        every = self.allocator.pages * self.allocator.world_size
        while len(self.tokens) > MAX_KEPT and self._cut(next(iter(self.tokens)), every, 0, False):
            pass

    def hold(self, blocks: Sequence[HostBlock]) -> None:
        """Keep pages in host memory until they are taken or released, the first ones as the most recently used."""
        for block in reversed(blocks):
            block.readers += 1
            if self.host is not None:
                self.host.touch(block)

    def release(self, blocks: Iterable[HostBlock]) -> None:
        """Take back `hold`."""
        for block in blocks:
            block.readers -= 1

    def take_loads(self, blocks: list[HostBlock]) -> list[HostBlock]:
        """Take the pages out of a list that a step may still copy from host memory."""
        taken, rest = [], []
        for block in blocks:
            may = self._left[block.rank] > 0
            self._left[block.rank] -= may
            (taken if may else rest).append(block)
        self.loaded_pages += len(taken)
        self.release(taken)
        blocks[:] = rest
        return taken

    def pages_of(self, cache_ids: Iterable[int]) -> list[set[int]]:
        """Return the pages of requests by rank, each once."""
        ranks = range(self.allocator.world_size)
        return [set().union(*(self.allocator.table(cache_id, rank).pages for cache_id in cache_ids)) for rank in ranks]

    def first_pages(self, cache_id: int, length: int) -> list[set[int]]:
        """Return the pages of a request's first tokens, by rank."""
        return [set(table.pages[: bisect_left(table.starts, length)]) for table in self._tables(cache_id)]

    def _lacking(self, pages: int, by_rank: Collection[int]) -> int:
        """Return how many pages must still become free."""
        free = self.allocator.free_pages
        by_rank = by_rank or [0] * len(free)
        return max(0, pages - self.allocator.available, *(need - n for need, n in zip(by_rank, free, strict=True)))

    def _cut(self, cache_id: int, pages: int, least: int, urgent: bool) -> bool:
        """Evict the end of a kept prefix, with so many pages that become free, or down to `least` tokens.

        Returns:
            False if the step may not copy all of these pages to host memory, and some are left.
        """
        length, end, freed = len(self.tokens[cache_id]), least, []
        for block in self._from_end(cache_id, least):
            if self.allocator.users(block.rank, block.page) == 1:
                freed.append(block)
            if len(freed) == pages and block.start >= self._size:
                end = block.start
                break
        reached = end if self.host is None else self._save(self.host, cache_id, freed, urgent) or end
        if reached == 0:
            self.free(cache_id)
        elif reached < length:
            self.apply("truncate", cache_id, reached, reached)
            del self.tokens[cache_id][reached:]
            self.index.cut(cache_id, reached // self._size)
        return reached <= end

    def _save(self, host: HostIndex, cache_id: int, freed: list[_Block], urgent: bool) -> int:
        """Plan copies to host memory of pages that a cut frees; return the end of the last one that has none, 0 if all have.

        The last page comes first, because the first ones are to stay longest. Every rank copies as many as it may, also where
        pages of other ranks must wait.
        """
        tokens, digests, reached = self.tokens[cache_id], self.index.digests(cache_id), 0
        for rank, page, start, count in freed:
            if host.has(tokens, digests, start, count):
                continue
            if not urgent and self._left[rank] <= 0:
                reached = max(reached, start + count)
                if max(self._left) <= 0:
                    break
            elif (slot := host.put(tokens, digests, rank, start, count)) is not None:
                self.saves.append((rank, page, slot))
                self._left[rank] -= 1
                self.saved_pages += 1
        return reached

    def _from_end(self, cache_id: int, least: int) -> Iterator[_Block]:
        """Yield the pages of a request that begin at token `least` or later, the last one first."""
        by_rank = [
            map(_Block, repeat(rank), reversed(table.pages), reversed(table.starts), reversed(table.lengths))
            for rank, table in enumerate(self._tables(cache_id))
        ]
        every = heapq.merge(*by_rank, key=attrgetter("start"), reverse=True)
        return takewhile(lambda block: block.start >= least, every)

    def _tables(self, cache_id: int) -> list[BlockTable]:
        return [self.allocator.table(cache_id, rank) for rank in range(self.allocator.world_size)]
