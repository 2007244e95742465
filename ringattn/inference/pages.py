"""Who holds which tokens of each request: blocks, pages and reservations.

Owns the bookkeeping of a sharded, paged cache. Every rank keeps the same books: the same calls in the same order give the same
answers everywhere, so nothing is ever said between ranks. Refuses to know tensors, layers and kernels. Standard library only.

Note [Blocks]
    A request's tokens 0 .. length-1 are cut into blocks. A block is a stretch of consecutive tokens at the beginning of one page
    of one rank. A block may cover less than its page: only the request that opened a page appends to it, and only while its
    last token is the request's last. A fork shares its parent's pages, each counted once per user, with the last block cut at
    the fork; what it adds goes to pages of its own. So joining, growing, forking and leaving copy nothing.

Note [Reservations]
    A request says at the beginning how long it may become. The pages it may still open are promised to it, and a promise is
    only made when the ring as a whole has the pages: what was accepted always fits. The promise is of pages anywhere, so a new page
    may be opened on any rank that has one.

Note [Even work]
    A page of a prompt is computed by the rank that keeps it, and a causal row costs what lies before it. So the new pages of a prompt are dealt
    in a zigzag: one stretch per rank on the way up, one on the way down, equally long as far as ranks have room. Tokens that come
    one by one go to the rank with most free pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count


class CacheFull(RuntimeError):
    """A request does not fit, now; the message has the numbers."""


@dataclass(frozen=True)
class Block:
    """Tokens start .. start + length - 1 of a request, in rows 0 .. length - 1 of a page of a rank."""

    rank: int
    page: int
    start: int
    length: int

    @property
    def stop(self) -> int:
        """One past the last token."""
        return self.start + self.length


@dataclass(frozen=True)
class Piece:
    """New tokens start .. start + length - 1 of a request and where they go: rows row .. row + length - 1 of a page."""

    rank: int
    page: int
    row: int
    start: int
    length: int


@dataclass
class _Request:
    length: int
    promised: int  # tokens it may grow to
    first: int
    blocks: list[Block]
    open: bool  # whether the last block's page may be appended to


class Pages:
    """The books of a cache that is spread over ranks.

    Args:
        world_size: Ranks.
        pages: Pages of each rank.
        page_size: Tokens of a page.

    Attributes:
        world_size: As given.
        pages: As given.
        page_size: As given.

    Raises:
        ValueError: A number is less than 1.

    Example:
        >>> books = Pages(world_size=2, pages=4, page_size=4)
        >>> request = books.join(reserve=12)
        >>> [(piece.rank, piece.start, piece.length) for piece in books.place([request], [10])[0]]
        [(0, 0, 4), (1, 4, 4), (0, 8, 2)]
        >>> books.free
        (2, 3)
    """

    def __init__(self, world_size: int, pages: int, page_size: int) -> None:
        for name, value in (("world_size", world_size), ("pages", pages), ("page_size", page_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.world_size, self.pages, self.page_size = world_size, pages, page_size
        # the lowest page is handed out first: a list is a stack
        self._free = [list(range(pages - 1, -1, -1)) for _ in range(world_size)]
        self._users = [[0] * pages for _ in range(world_size)]
        self._requests: dict[int, _Request] = {}
        self._names = count()

    @property
    def free(self) -> tuple[int, ...]:
        """Free pages of each rank."""
        return tuple(map(len, self._free))

    @property
    def available(self) -> int:
        """Free pages of all ranks that are promised to nobody."""
        return sum(self.free) - sum(map(self._owed, self._requests.values()))

    @property
    def requests(self) -> tuple[int, ...]:
        """Requests that are here, in the order in which they came."""
        return tuple(self._requests)

    def length(self, request: int) -> int:
        """Tokens of a request."""
        return self._find(request).length

    def first(self, request: int) -> int:
        """The first token of a request that anybody sees: what lies before it is padding."""
        return self._find(request).first

    def reserved(self, request: int) -> int:
        """Tokens that a request may grow to."""
        return self._find(request).promised

    def blocks(self, request: int) -> tuple[Block, ...]:
        """A request's blocks, ascending; they cover its tokens."""
        return tuple(self._find(request).blocks)

    def join(self, reserve: int, first: int = 0) -> int:
        """Lets a request in.

        Args:
            reserve: Tokens it may grow to, at least 1.
            first: Tokens of padding in front.

        Returns:
            Its name.

        Raises:
            ValueError: reserve or first is out of range.
            CacheFull: There is no room for so many tokens now.
        """
        if reserve < 1 or first < 0:
            raise ValueError(f"reserve must be at least 1 and first at least 0, got {reserve} and {first}")
        return self._admit(_Request(0, reserve, first, [], False), "a request")

    def fork(self, request: int, length: int | None = None, reserve: int | None = None) -> int:
        """Lets a request in that begins like another one and shares its pages.

        Args:
            request: The other one.
            length: How many of its tokens to share; None: all.
            reserve: Tokens the new one may grow to; None: as many as the other one.

        Raises:
            ValueError: length or reserve is out of range.
            CacheFull: There is no room for what it may add.
        """
        parent = self._find(request)
        length = parent.length if length is None else length
        reserve = parent.promised if reserve is None else reserve
        if not 0 <= length <= parent.length or reserve < max(length, 1):
            raise ValueError(
                f"length must be from 0 to the {parent.length} tokens there are and reserve at least as long, got {length} and {reserve}"
            )
        blocks = [replace(block, length=min(block.length, length - block.start)) for block in parent.blocks if block.start < length]
        child = self._admit(_Request(length, reserve, parent.first, blocks, False), "a fork")
        for block in blocks:
            self._users[block.rank][block.page] += 1
        return child

    def crop(self, request: int, length: int) -> None:
        """Forgets a request's last tokens.

        Args:
            request: Which one.
            length: Tokens to keep.

        Raises:
            ValueError: There are fewer tokens, or length is negative.
        """
        found = self._find(request)
        if not 0 <= length <= found.length:
            raise ValueError(f"length must be from 0 to the {found.length} tokens there are, got {length}")
        last = found.blocks[-1] if found.blocks else None
        while found.blocks and found.blocks[-1].start >= length:
            self._drop(found.blocks.pop())
        if found.blocks and found.blocks[-1].stop > length:
            found.blocks[-1] = replace(found.blocks[-1], length=length - found.blocks[-1].start)
        # rows behind a cut may be seen by forks: only the page that was open stays so, and only while nobody shares it
        kept = found.blocks[-1] if found.blocks else None
        same = kept is not None and last is not None and (kept.rank, kept.page) == (last.rank, last.page)
        shared = kept is not None and self._users[kept.rank][kept.page] > 1
        was_cut = length < found.length
        found.open = found.open and same and not (shared and was_cut)
        found.length = length

    def leave(self, request: int) -> None:
        """Lets a request go; pages that nobody else uses are free again."""
        for block in self._find(request).blocks:
            self._drop(block)
        del self._requests[request]

    def place(self, requests: Sequence[int], counts: Sequence[int], *, alike: bool = False, one_by_one: bool = False) -> list[list[Piece]]:
        """Makes room for new tokens of requests.

        Args:
            requests: Which ones, each once.
            counts: New tokens of each.
            alike: All requests' tokens go to the same ranks: they have the same length and get equally many.
            one_by_one: Tokens of a decoding step, which every rank computes: they go where most pages are free.

        Returns:
            The pieces of each request, ascending.

        Raises:
            ValueError: A request would outgrow its reservation, occurs twice, or they are not alike.
            CacheFull: alike: no rank has a page for each of the requests.
        """
        if len(set(requests)) != len(requests) or len(counts) != len(requests) or min(counts, default=1) < 1:
            raise ValueError(f"requests must occur once each, with at least one new token, got {requests} and {counts}")
        found = [self._find(request) for request in requests]
        for request, one, new in zip(requests, found, counts, strict=True):
            if one.length + new > one.promised:
                raise ValueError(
                    f"request {request} must stay within the {one.promised} tokens it reserved, got {one.length} and {new} more; "
                    "reserve more when it joins"
                )
        if alike:
            if len(set(counts)) != 1 or len({one.length for one in found}) != 1:
                raise ValueError(
                    f"requests must be equally long to be placed alike, got lengths {[one.length for one in found]} and {list(counts)} more"
                )
            return self._place(found, counts[0], one_by_one)
        return [self._place([one], new, one_by_one)[0] for one, new in zip(found, counts, strict=True)]

    def _place(self, group: list[_Request], new: int, one_by_one: bool) -> list[list[Piece]]:
        pieces: list[list[Piece]] = [[] for _ in group]
        ends = {(one.blocks[-1].rank, one.blocks[-1].length) if one.open else None for one in group}
        end = ends.pop() if len(ends) == 1 else None
        if end is None and len(group) > 1:
            for one in group:
                one.open = False
        room = 0 if end is None else self.page_size - end[1]
        if room:
            for one, mine in zip(group, pieces, strict=True):
                last = one.blocks[-1]
                here = min(room, new)
                mine.append(Piece(last.rank, last.page, last.length, last.stop, here))
                one.blocks[-1] = replace(last, length=last.length + here)
                one.length += here
        left = new - min(room, new)
        for rank in self._deal(-(-left // self.page_size), len(group), one_by_one):
            here = min(left, self.page_size)
            left -= here
            for one, mine in zip(group, pieces, strict=True):
                page = self._free[rank].pop()
                self._users[rank][page] = 1
                one.blocks.append(Block(rank, page, one.length, here))
                mine.append(Piece(rank, page, 0, one.length, here))
                one.length += here
                one.open = True
        return pieces

    def _deal(self, pages: int, each: int, one_by_one: bool) -> list[int]:
        """The rank of each new page, in order (Note [Even work])."""
        room = [len(free) // each for free in self._free]
        if pages > sum(room):
            raise CacheFull(
                f"{pages} pages must be free for each of {each} requests on the same ranks, got {room} by rank; "
                "let fewer requests begin at once"
            )
        if one_by_one:
            order = []
            for _ in range(pages):
                rank = max(range(self.world_size), key=lambda r: (room[r], -r))
                room[rank] -= 1
                order.append(rank)
            return order
        share = [0] * self.world_size
        while sum(share) < pages:
            # the rank with fewest so far, of those the emptiest
            rank = min((r for r in range(self.world_size) if share[r] < room[r]), key=lambda r: (share[r], share[r] - room[r], r))
            share[rank] += 1
        up = [(held + 1) // 2 for held in share]
        ranks = range(self.world_size)
        return [r for r in ranks for _ in range(up[r])] + [r for r in reversed(ranks) for _ in range(share[r] - up[r])]

    def _owed(self, one: _Request) -> int:
        """Pages that a request may still open."""
        last = one.blocks[-1] if one.blocks and one.open else None
        room = 0 if last is None else self.page_size - last.length
        return max(0, -(-(one.promised - one.length - room) // self.page_size))

    def _admit(self, one: _Request, what: str) -> int:
        needed, there = self._owed(one), self.available
        if needed > there:
            raise CacheFull(
                f"{what} of up to {one.promised} tokens needs {needed} pages of {self.page_size}, got {there} of "
                f"{self.pages * self.world_size} on {self.world_size} ranks that are neither used nor promised; "
                "wait until others leave, reserve less, or give the cache more memory"
            )
        name = next(self._names)
        self._requests[name] = one
        return name

    def _drop(self, block: Block) -> None:
        users = self._users[block.rank]
        users[block.page] -= 1
        if users[block.page] == 0:
            self._free[block.rank].append(block.page)

    def _find(self, request: int) -> _Request:
        found = self._requests.get(request)
        if found is None:
            raise ValueError(f"request must be one of those that joined and have not left, got {request}")
        return found
