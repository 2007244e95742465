"""Page allocator of a KV cache that is sharded over ranks: which page of which rank holds which tokens.

Every rank runs the same allocator: the same calls in the same order give the same result on all ranks, without messages.

Note [Page writers]
    A page with one user is written by it. A page with several users is written by the request that opened it, its writer, and
    only behind the rows that the others may see: a fork never writes in shared pages. So a row that another request sees is never
    overwritten, whatever is truncated. A page whose writer was freed is not written until it has one user left.

Note [Reservations]
    A request reserves its maximum length when it is added. Reserved for it are the pages that it may still have to open: those of
    all tokens to come, less the rows left in the page that it writes. A reservation is granted only while free pages cover all
    reservations, so a request that was accepted always fits: on some ranks, not on given ones.
    Servers read `available` whenever a request is added or freed, so reservations are summed as they change. Only a request whose
    last page has other users may need fewer pages when these are freed: such requests, few at a time, are computed at each read.
    Truncating into shared pages gives up rows that do not become free: the difference is reserved, or the call is refused.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import count

from ringattn.inference.block_table import (
    MAX_REQUEST_TOKENS,
    BlockTable,
    CachedRequest,
    PageCopy,
    RankSpan,
    common_blocks,
    truncate_spans,
)


class CacheFull(RuntimeError):
    """A request does not fit now; raised alike on all ranks, because they have equal allocators."""


class PageAllocator:
    """Assignment of pages to requests, equal on all ranks; a call that raises has changed nothing.

    Args:
        world_size: Ranks.
        pages: Pages of each rank.
        page_size: Tokens of a page.
        page_bytes: Bytes of a page; 0: unknown.

    Attributes:
        changes: Number of calls that removed or moved tokens.

    Example:
        >>> allocator = PageAllocator(world_size=2, pages=4, page_size=4)
        >>> request = allocator.add_request(reserve=12)
        >>> allocator.assign([request], [10])
        >>> [tuple(span) for span in allocator.rank_spans(request)]  # rank, first token, one past the last
        [(0, 0, 4), (1, 4, 8), (0, 8, 10)]
        >>> allocator.free_pages, allocator.available
        ((2, 3), 5)
    """

    def __init__(self, world_size: int, pages: int, page_size: int, page_bytes: int = 0) -> None:
        for name, value in (("world_size", world_size), ("pages", pages), ("page_size", page_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}; give the cache at least one page")
        self.world_size, self.pages, self.page_size = world_size, pages, page_size
        self.changes = 0
        self.page_bytes = page_bytes
        # the lowest page is handed out first: a list is a stack
        self._free = [list(range(pages - 1, -1, -1)) for _ in range(world_size)]
        self._users = [[0] * pages for _ in range(world_size)]
        self._writer = [[-1] * pages for _ in range(world_size)]
        # rows of shared pages that requests other than the writer may see
        self._seen = [[0] * pages for _ in range(world_size)]
        self._total_to_open = 0  # sum over requests whose last page is not shared
        self._with_shared_page: dict[int, CachedRequest] = {}  # the other requests
        self._requests: dict[int, CachedRequest] = {}
        self._names = count()
        self._layouts = count()

    @property
    def free_pages(self) -> tuple[int, ...]:
        """Unused pages of each rank."""
        return tuple(map(len, self._free))

    @property
    def available(self) -> int:
        """Pages of all ranks that are neither used nor reserved."""
        shared = sum(map(self._pages_to_open, self._with_shared_page.values()))
        return sum(map(len, self._free)) - self._total_to_open - shared

    @property
    def requests(self) -> tuple[int, ...]:
        """Requests, in the order in which they were added."""
        return tuple(self._requests)

    def find(self, request: int) -> CachedRequest:
        """Look up a request."""
        if request not in self._requests:
            raise ValueError(f"request must be one that was added and not freed, got {request!r}; add it first")
        return self._requests[request]

    def length(self, request: int) -> int:
        """Tokens of a request."""
        return self.find(request).length

    def table(self, request: int, rank: int) -> BlockTable:
        """A request's blocks on a rank."""
        return self.find(request).tables[rank]

    def get_requests(self, requests: Collection[int]) -> list[CachedRequest]:
        """Look up several requests at once."""
        try:
            return list(map(self._requests.__getitem__, requests))
        except KeyError:
            return list(map(self.find, requests))

    def rank_spans(self, request: int, start: int = 0) -> list[RankSpan]:
        """Return the ranks of a request's tokens from `start` on, ascending; neighbours are on different ranks."""
        one = self.find(request)
        stops = [begin for _, begin in one.spans[1:]] + [one.length]
        return [
            RankSpan(rank, max(begin, start), stop)
            for (rank, begin), stop in zip(one.spans, stops, strict=False)
            if stop > start
        ]

    def have_same_placement(self, requests: Sequence[int]) -> bool:
        """Whether requests are equally long and have each token on the same rank."""
        first, *others = self.get_requests(requests)
        return all(first.length == other.length and first.spans == other.spans for other in others)

    def max_blocks_after(self, requests: Collection[int], new: int) -> int:
        """Bound the blocks that one of some requests has on one rank after `new` more tokens; the same on every rank."""
        return max([one.max_blocks_after for one in self.get_requests(requests)], default=0) + self._pages_of(new)

    def add_request(self, reserve: int, first: int = 0) -> int:
        """Add a request that may grow to `reserve` tokens, with `first` tokens of padding in front, and return its name.

        Raises:
            ValueError: A number is out of range.
            CacheFull: Too few pages are free and not reserved for others; nothing has changed.
        """
        self._check_reserve(reserve, first)
        self._check_available(self._pages_of(reserve), "a request", reserve)
        one = self._admit(reserve, first)
        self._reserve(one)
        return one.name

    def add_batch(self, reserve: int, firsts: Sequence[int]) -> list[int]:
        """Add requests that are extended together, so that they stay one batch; return their names.

        Args:
            reserve: Tokens that each may grow to.
            firsts: Tokens of padding in front of each, one number per request.

        Raises:
            ValueError: See `add_request`; also CacheFull.
        """
        if not firsts:
            raise ValueError("firsts must have one number per request, got none; give 0 for a request without padding")
        for first in firsts:
            self._check_reserve(reserve, first)
        self._check_available(len(firsts) * self._pages_of(reserve), f"a batch of {len(firsts)} requests", reserve)
        return [self.add_request(reserve, first) for first in firsts]

    def fork(self, request: int, length: int | None = None, reserve: int | None = None) -> int:
        """Add a request that shares the first tokens of another one (None: all), with their pages; return its name.

        `reserve` is the number of tokens the new one may grow to; None: as many as the other one.

        Raises:
            ValueError: The request is unknown, or a number is out of range.
            CacheFull: Too few pages are free and not reserved for others; nothing has changed.
        """
        parent = self.find(request)
        length = parent.length if length is None else length
        reserve = parent.reserved_tokens if reserve is None else reserve
        if not 0 <= length <= parent.length or not max(length, 1) <= reserve <= MAX_REQUEST_TOKENS:
            raise ValueError(
                f"length must be from 0 to the {parent.length} tokens there are and reserve at least as long, "
                f"got {length} and {reserve}; share fewer tokens or reserve more"
            )
        self._check_available(self._pages_of(reserve - length), "a fork", reserve)
        child = self._admit(reserve, parent.first)
        child.length, child.spans = length, truncate_spans(parent.spans, length)
        for rank, table in enumerate(parent.tables):
            kept = child.tables[rank] = table.head(bisect_left(table.starts, length))
            if kept and kept.starts[-1] + kept.lengths[-1] > length:
                kept.lengths[-1] = length - kept.starts[-1]
            self._use(parent, rank, kept, 0, len(kept))
        self._find_end(child)
        self._reserve(child)
        return child.name

    def set_padding(self, request: int, first: int) -> None:
        """Change the padding in front of a request; ValueError if it has other tokens, or could not grow to its padding."""
        one = self.find(request)
        self._check_reserve(one.reserved_tokens, first)
        if first != one.first and min(first, one.first) < one.length:
            raise ValueError(
                f"padding of request {request} must stay {one.first} tokens, as it has {one.length} tokens, got {first}; "
                "truncate it first"
            )
        one.first = first

    def truncate(self, request: int, length: int, reserve: int | None = None) -> None:
        """Keep the first `length` tokens of a request, which may then grow to `reserve` tokens (None: as before).

        Raises:
            ValueError: The request is unknown, or length or reserve would grow.
            CacheFull: It gives up pages that forks use, and too few are free to grow again; nothing has changed.
        """
        one = self.find(request)
        reserve = one.reserved_tokens if reserve is None else reserve
        if not 0 <= length <= one.length or not max(length, 1) <= reserve <= one.reserved_tokens:
            raise ValueError(
                f"length must be from 0 to the {one.length} tokens there are and reserve from there to the {one.reserved_tokens} "
                f"that were reserved, got {length} and {reserve}; truncating cannot enlarge either"
            )
        kept = [bisect_left(table.starts, length) for table in one.tables]
        ends = list(zip(one.tables, kept, strict=True))
        freed = sum(self._users[rank][page] == 1 for rank, (table, n) in enumerate(ends) for page in table.pages[n:])
        spans = truncate_spans(one.spans, length)
        capacity = 0
        if spans:
            last = spans[-1][0]
            table, block = one.tables[last], kept[last] - 1
            capacity = self._free_rows_after(one, last, table.pages[block], length - table.starts[block])
        more = self._pages_of(reserve - length - capacity) - self._pages_to_open(one)
        there = self.available + freed
        if more > there:
            raise CacheFull(
                f"request {request} gives up pages that others use when it is truncated to {length} tokens, and needs {more} "
                f"pages more to grow to {reserve} again, got {there} that are neither used nor reserved; "
                "keep more tokens, wait until others are freed, or reserve less by truncate(..., reserve=)"
            )
        self.changes += 1
        if length < one.length:
            one.moved_at, one.kept = self.changes, min(one.kept, length)
        for rank, (table, blocks) in enumerate(ends):
            for page in reversed(table.pages[blocks:]):
                self._drop(one, rank, page)
            table.cut(blocks)
        if spans:
            table = one.tables[spans[-1][0]]
            table.lengths[-1] = length - table.starts[-1]
        one.length, one.reserved_tokens, one.spans = length, reserve, spans
        self._find_end(one)
        self._reserve(one)

    def reserve(self, request: int, tokens: int) -> None:
        """Let a request grow to `tokens` tokens, at least as many as before.

        Raises:
            ValueError: The request is unknown, or tokens is out of range.
            CacheFull: Too few pages are free and not reserved for others; nothing has changed.
        """
        one = self.find(request)
        if not one.reserved_tokens <= tokens <= MAX_REQUEST_TOKENS:
            raise ValueError(
                f"tokens must be from the {one.reserved_tokens} that are reserved to {MAX_REQUEST_TOKENS}, got {tokens}; "
                "reserve less by truncate(..., reserve=)"
            )
        free = self._free_rows(one)
        more = self._pages_of(tokens - one.length - free) - self._pages_to_open(one)
        self._check_available(more, f"request {request}", tokens)
        one.reserved_tokens, one.full = tokens, min(tokens, one.length + free)
        self._reserve(one)

    def place(self, request: int, ranks: Sequence[int], lengths: Sequence[int]) -> None:
        """Add tokens in a new page of each of some ranks, beyond what was reserved: pages that are copied from elsewhere.

        Args:
            request: The request.
            ranks: The rank of each page, in the order of the tokens.
            lengths: Tokens in each page.

        Raises:
            ValueError: The request is unknown, or a number is out of range.
            CacheFull: A rank has too few free pages, or all ranks too few that are not reserved for others; nothing has changed.
        """
        one = self.find(request)
        length = one.length + sum(lengths)
        if (
            len(ranks) != len(lengths)
            or not all(0 <= rank < self.world_size for rank in ranks)
            or not all(1 <= tokens <= self.page_size for tokens in lengths)
            or length > MAX_REQUEST_TOKENS
        ):
            raise ValueError(
                f"each page must have a rank below {self.world_size} and 1 to {self.page_size} tokens, and the request at most "
                f"{MAX_REQUEST_TOKENS}, got {list(ranks)} and {list(lengths)}; give a rank and a length for each page"
            )
        counts = [ranks.count(rank) for rank in range(self.world_size)]
        reserve = max(one.reserved_tokens, length)
        more = len(ranks) + self._pages_of(reserve - length) - self._pages_to_open(one)
        if any(count > free for count, free in zip(counts, self.free_pages, strict=True)):
            raise CacheFull(f"{counts} pages must be free by rank, got {self.free_pages}; wait until others are freed")
        self._check_available(more, f"request {request} in {len(ranks)} given pages", reserve)
        one.reserved_tokens = reserve
        for rank, tokens in zip(ranks, lengths, strict=True):
            self._open(one, tokens, [(rank, 1)])

    def owed_pages(self, requests: Collection[int]) -> int:
        """Return the pages that are reserved for some requests and not opened yet."""
        return sum(map(self._pages_to_open, self.get_requests(requests)))

    def users(self, rank: int, page: int) -> int:
        """Return the number of requests that use a page."""
        return self._users[rank][page]

    def free(self, request: int) -> None:
        """Free a request, and the pages that no other request uses. ValueError if it is unknown."""
        one = self.find(request)
        self.changes += 1
        for rank, table in enumerate(one.tables):
            for page in reversed(table.pages):
                self._drop(one, rank, page)
        self._unreserve(one)
        del self._requests[request]

    def assign(
        self, requests: Sequence[int], counts: Sequence[int], *, same_length: bool = False, one_by_one: bool = False
    ) -> None:
        """Assign pages to new tokens of requests.

        Args:
            requests: The requests, each once.
            counts: New tokens of each.
            same_length: Put each new token on the same rank for all requests, which are equally long and get equally many.
            one_by_one: Tokens of a decode step: they go where most pages are free, instead of in a zigzag.
        """
        if not requests or len(set(requests)) != len(requests) or len(counts) != len(requests) or min(counts) < 1:
            raise ValueError(
                f"requests must occur once each, with at least one new token, got {list(requests)} and {list(counts)}; "
                "name each once and give each its number of new tokens"
            )
        found = self.get_requests(requests)
        for one, new in zip(found, counts, strict=True):
            if one.length + new > one.reserved_tokens:
                raise ValueError(
                    f"request {one.name} must stay within the {one.reserved_tokens} tokens it reserved, got {one.length} and "
                    f"{new} more; reserve more when it is added"
                )
        if same_length and len(found) > 1:
            self._assign_same_length(found, counts, one_by_one)
            return
        for one, new in zip(found, counts, strict=True):
            length = one.length + new
            if length <= one.full:
                # most requests in most steps: `_append`, in place
                one.length = length
                one.last.lengths[-1] += new
                continue
            capacity = self._free_rows(one)
            if new > capacity:
                assigned = assign_pages(self._pages_of(new - capacity), self.free_pages, one_by_one)
                self._append(one, capacity)
                self._open(one, new - capacity, assigned)
            else:
                # others have left its last page
                self._append(one, new)
                self._find_end(one)

    def reorder(self, requests: Sequence[int], index: Sequence[int]) -> list[PageCopy]:
        """Make request i of a batch what request index[i] of it was, for beam search; names and reservations stay.

        Full pages are shared. Each request keeps its own last page, whose rows must be copied.

        Args:
            requests: A batch added by `add_batch` and always extended and truncated together.
            index: For each request the place in `requests` of the one that it becomes.

        Returns:
            Pages to copy, all at once: a page may be both source and target.
        """
        found = self.get_requests(requests)
        if len(index) != len(found) or not all(0 <= i < len(found) for i in index) or len(set(requests)) != len(found):
            raise ValueError(
                f"index must name one of {len(found)} different requests for each of them, got {list(index)} for "
                f"{list(requests)}; give a place in the batch for each"
            )
        ends = [end for one in found if (end := self._end(one)) is not None]
        partial = any(rows < self.page_size for _, _, rows in ends)
        alone = not partial or all(self._users[rank][page] == 1 for rank, page, _ in ends)
        if not alone or len({rows for _, _, rows in ends}) > 1 or (found and not self.have_same_placement(requests)):
            raise ValueError(
                "requests must have been added and extended together to be reordered, and share no page that truncating "
                f"has left in part, got {list(requests)} that do not; "
                "add them by add_batch, or fork one by one"
            )
        self.changes += 1
        before = [([table.head(len(table)) for table in one.tables], one.first) for one in found]
        common = [
            [common_blocks(mine, his) for mine, his in zip(before[i][0], before[j][0], strict=True)]
            for i, j in enumerate(index)
        ]
        last = ends[0][0] if partial else None
        # use new pages before dropping old ones: pages that stay in use must not become free in between
        for one, source, same in zip(found, index, common, strict=True):
            tables, one.first = before[source]
            if one is not found[source]:
                one.moved_at, one.kept = self.changes, 0
            one.tables = [table.head(len(table)) for table in tables]
            for rank, (table, begin) in enumerate(zip(tables, same, strict=True)):
                self._use(found[source], rank, table, begin, len(table) - (rank == last))
        moves = []
        for i, (one, source, same) in enumerate(zip(found, index, common, strict=True)):
            for rank, (table, begin) in enumerate(zip(before[i][0], same, strict=True)):
                for page in reversed(table.pages[begin : len(table) - (rank == last)]):
                    self._drop(one, rank, page)
            if partial:
                rank, page, rows = ends[i]
                one.tables[rank].pages[-1] = page
                if source != i:
                    moves.append(PageCopy(rank, ends[source][1], page, rows))
        for one in found:
            self._find_end(one)
        return moves

    def _assign_same_length(self, group: list[CachedRequest], counts: Sequence[int], one_by_one: bool) -> None:
        if len(set(counts)) != 1 or not self.have_same_placement([one.name for one in group]):
            raise ValueError(
                f"requests must be equally long, on the same ranks, and get equally many tokens with same_length, got "
                f"lengths {[one.length for one in group]} and {list(counts)} more; leave same_length out"
            )
        new = counts[0]
        # last pages may differ: rows that are free in all of them are filled, then all continue in new pages
        here = min(new, *map(self._free_rows, group))
        pages = self._pages_of(new - here)
        if not pages:
            for one in group:
                self._append(one, here)
            return
        limit = [free // len(group) for free in self.free_pages]
        # a request that leaves rows free needs more pages than it reserved, now or later
        rest = here + pages * self.page_size
        more = sum(pages + self._pages_of(one.reserved_tokens - one.length - rest) for one in group)
        more -= sum(map(self._pages_to_open, group))
        if pages > sum(limit) or more > self.available:
            raise CacheFull(
                f"{pages} pages must be free for each of {len(group)} requests on the same ranks, got {limit} by rank"
                f"{f' and {self.available} in all for {more} beyond those reserved' if more > 0 else ''}; "
                "leave same_length out, or add fewer requests"
            )
        assigned = assign_pages(pages, limit, one_by_one)
        for one in group:
            self._append(one, here)
            self._open(one, new - here, assigned)

    def _use(self, one: CachedRequest, rank: int, table: BlockTable, begin: int, end: int) -> None:
        """Count one more user of the pages of blocks begin .. end - 1 of a request (Note [Page writers])."""
        users, writer, seen = self._users[rank], self._writer[rank], self._seen[rank]
        for page, rows in zip(table.pages[begin:end], table.lengths[begin:end], strict=True):
            before = users[page]
            users[page] = before + 1
            if before == 1:
                writer[page], seen[page] = one.name, rows
            elif seen[page] < rows:
                seen[page] = rows

    def _append(self, one: CachedRequest, new: int) -> None:
        if new:
            one.last.lengths[-1] += new
            one.length += new

    def _open(self, one: CachedRequest, new: int, assigned: Sequence[tuple[int, int]]) -> None:
        """Add tokens in new pages, assigned as (rank, number of pages) in this order."""
        for rank, pages in assigned:
            here = min(new, pages * self.page_size)
            new -= here
            free, table = self._free[rank], one.tables[rank]
            opened = free[: -pages - 1 : -1]
            assert len(opened) == pages, f"{pages} reserved pages must be free on rank {rank}, got {len(opened)}"
            del free[-pages:]
            users, writer = self._users[rank], self._writer[rank]
            for page in opened:
                users[page] = 1
                writer[page] = one.name
            table.pages.extend(opened)
            table.starts.extend(range(one.length, one.length + here, self.page_size))
            table.lengths.extend([self.page_size] * (pages - 1))
            table.lengths.append(here - (pages - 1) * self.page_size)
            if not one.spans or one.spans[-1][0] != rank:
                one.spans.append((rank, one.length))
            one.length += here
        self._find_end(one)
        self._reserve(one)

    def _pages_of(self, tokens: int) -> int:
        return max(0, -(-tokens // self.page_size))

    def _end(self, one: CachedRequest) -> tuple[int, int, int] | None:
        if not one.spans:
            return None
        return one.spans[-1][0], one.last.pages[-1], one.last.lengths[-1]

    def _free_rows(self, one: CachedRequest) -> int:
        """Return the tokens that a request may add to its last page (Note [Page writers])."""
        end = self._end(one)
        return 0 if end is None else self._free_rows_after(one, *end)

    def _find_end(self, one: CachedRequest) -> None:
        """Update what follows from a request's blocks, once per change: decode adds a token to most requests in most steps."""
        one.layout = next(self._layouts)
        one.max_blocks_after = max([len(table.pages) for table in one.tables])
        one.last = one.tables[one.spans[-1][0]] if one.spans else BlockTable()
        one.full = min(one.reserved_tokens, one.length + self._free_rows(one))

    def _free_rows_after(self, one: CachedRequest, rank: int, page: int, rows: int) -> int:
        """Return `_free_rows` of a request whose last block is this one."""
        if self._users[rank][page] > 1 and (self._writer[rank][page] != one.name or rows < self._seen[rank][page]):
            return 0
        return self.page_size - rows

    def _pages_to_open(self, one: CachedRequest) -> int:
        return self._pages_of(one.reserved_tokens - one.length - self._free_rows(one))

    def _reserve(self, one: CachedRequest) -> None:
        """Update the sum of reservations after a change of a request (Note [Reservations])."""
        self._unreserve(one)
        if one.length == one.reserved_tokens:
            return
        end = self._end(one)
        if end is not None and self._users[end[0]][end[1]] > 1:
            self._with_shared_page[one.name] = one
            return
        one.pages_to_open = self._pages_to_open(one)
        self._total_to_open += one.pages_to_open

    def _unreserve(self, one: CachedRequest) -> None:
        self._total_to_open -= one.pages_to_open
        one.pages_to_open = 0
        self._with_shared_page.pop(one.name, None)

    def _check_reserve(self, reserve: int, first: int) -> None:
        if not 1 <= reserve <= MAX_REQUEST_TOKENS or not 0 <= first <= reserve:
            raise ValueError(
                f"reserve must be from 1 to {MAX_REQUEST_TOKENS} tokens and first from 0 to reserve, got {reserve} and {first}; "
                "reserve the prompt and all that may follow"
            )

    def _check_available(self, needed: int, what: str, reserve: int) -> None:
        there = self.available
        if needed > there:
            size = f" ({needed * self.page_bytes} bytes)" if self.page_bytes else ""
            raise CacheFull(
                f"{what} of up to {reserve} tokens needs {needed} pages of {self.page_size}{size}, got {there} of "
                f"{self.pages * self.world_size} on {self.world_size} ranks that are neither used nor reserved; "
                "wait until others are freed, reserve less, or give the cache more memory"
            )

    def _admit(self, reserve: int, first: int) -> CachedRequest:
        name = next(self._names)
        one = CachedRequest(name, reserve, first, 0, [BlockTable() for _ in range(self.world_size)])
        self._requests[name] = one
        return one

    def _drop(self, one: CachedRequest, rank: int, page: int) -> None:
        users, writer = self._users[rank], self._writer[rank]
        users[page] -= 1
        if writer[page] == one.name:
            writer[page] = -1
        if users[page] == 0:
            self._free[rank].append(page)


def assign_pages(pages: int, capacity: Sequence[int], one_by_one: bool) -> list[tuple[int, int]]:
    """Return the ranks of new pages in order, as (rank, number of pages).

    A page of a prompt is computed by the rank that stores it, and a causal row costs as many keys as lie before it. So pages of a
    prompt are assigned in a zigzag: one run per rank upwards, one downwards. Pages opened one by one go where most are free.
    """
    assert pages <= sum(capacity), f"{pages} reserved pages must be there, got {list(capacity)}"
    if one_by_one:
        left, assigned = list(capacity), []
        for _ in range(pages):
            rank = max(range(len(capacity)), key=left.__getitem__)
            left[rank] -= 1
            assigned.append((rank, 1))
        return assigned
    share = split_evenly(pages, capacity)
    up = [(held + 1) // 2 for held in share]
    ranks = range(len(capacity))
    order = [(r, up[r]) for r in ranks] + [(r, share[r] - up[r]) for r in reversed(ranks)]
    return [(rank, held) for rank, held in order if held]


def split_evenly(pages: int, capacity: Sequence[int]) -> list[int]:
    """Return how many pages each rank gets: equally many as far as its capacity allows, odd ones where most pages are free."""
    share = [0] * len(capacity)
    while pages:
        ranks = [rank for rank in range(len(capacity)) if share[rank] < capacity[rank]]
        each = pages // len(ranks)
        if not each:
            for rank in sorted(ranks, key=lambda r: (share[r] - capacity[r], r))[:pages]:
                share[rank] += 1
            return share
        for rank in ranks:
            more = min(each, capacity[rank] - share[rank])
            share[rank] += more
            pages -= more
    return share
