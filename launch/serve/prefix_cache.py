"""Indices of token prefixes, by which requests share pages of keys and values, on GPUs or in host memory. Standard library only."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

Digest = bytes
NOTHING: Digest = b""
"""Digest of no tokens."""


def prefix_digests(tokens: Sequence[int], size: int, before: Sequence[Digest] = ()) -> list[Digest]:
    """Return the digests of the whole blocks of `size` tokens; before: known digests of the first blocks.

    Digest i is a 16-byte BLAKE2b digest of digest i - 1 and of block i: prompts with the same digest have the same tokens.
    """
    found = list(before)
    for start in range(len(found) * size, len(tokens) - size + 1, size):
        found.append(_next_digest(found[-1] if found else NOTHING, tokens[start : start + size]))
    return found


def digest_at(tokens: Sequence[int], size: int, digests: Sequence[Digest], length: int) -> Digest:
    """Return the digest of the first `length` tokens, given those of whole blocks (`prefix_digests`)."""
    blocks, rest = divmod(length, size)
    before = digests[blocks - 1] if blocks else NOTHING
    return _next_digest(before, tokens[length - rest : length]) if rest else before


def _next_digest(before: Digest, tokens: Sequence[int]) -> Digest:
    maker = hashlib.blake2b(before, digest_size=16)
    maker.update(array("I", tokens).tobytes())
    return maker.digest()


class PrefixIndex:
    """Index from prefixes, in blocks of `size` tokens, to their owners.

    Example:
        >>> index = PrefixIndex(size=2)
        >>> index.add("a", prefix_digests([1, 2, 3, 4, 5], 2))
        >>> index.find(prefix_digests([1, 2, 3, 4, 9, 9], 2)), index.find(prefix_digests([7, 2], 2))
        (('a', 4), (None, 0))
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._owners: dict[Digest, dict[object, None]] = {}  # in the order in which they came
        self._digests: dict[object, list[Digest]] = {}

    def add(self, owner: object, digests: Sequence[Digest]) -> None:
        """Register the whole chain of digests of an owner; it extends the chain registered before."""
        mine = self._digests.setdefault(owner, [])
        for digest in digests[len(mine) :]:
            self._owners.setdefault(digest, {})[owner] = None
            mine.append(digest)

    def digests(self, owner: object) -> Sequence[Digest]:
        """Return the chain of digests of an owner."""
        return self._digests.get(owner, ())

    def cut(self, owner: object, blocks: int) -> None:
        """Keep the first digests of an owner."""
        mine = self._digests[owner]
        self._forget(owner, mine[blocks:])
        del mine[blocks:]

    def drop(self, owner: object) -> None:
        """Remove an owner, if it is registered."""
        self._forget(owner, self._digests.pop(owner, ()))

    def _forget(self, owner: object, digests: Sequence[Digest]) -> None:
        for digest in digests:
            owners = self._owners[digest]
            del owners[owner]
            if not owners:
                del self._owners[digest]

    def find(self, digests: Sequence[Digest]) -> tuple[object | None, int]:
        """Return the newest owner of the longest known prefix of a chain, and its length in tokens; (None, 0) for none."""
        # an owner is registered with its whole chain: known digests come first
        known = bisect_left(digests, True, key=lambda digest: digest not in self._owners)
        if known == 0:
            return None, 0
        return next(reversed(self._owners[digests[known - 1]])), known * self.size


@dataclass(eq=False, slots=True)
class HostBlock:
    """Copy of the tokens of one page in the host memory of the rank that had the page.

    Attributes:
        before: Digest of the tokens before it.
        end: Digest of all tokens up to its end.
        rank: The rank.
        slot: Page of that rank's host memory.
        start: Its first token.
        length: Its tokens.
        readers: Requests that it is about to be copied to.
    """

    before: Digest
    end: Digest
    rank: int
    slot: int
    start: int
    length: int
    readers: int = 0


class HostIndex:
    """Index of the pages in the host memory of all ranks, least recently used first. Rank 0 decides for all.

    A block is found by the digest of the tokens before it: so it serves every request that begins alike, wherever the pages of a
    request begin. A block without those before it is not found, and is overwritten in its turn.

    Example:
        >>> index = HostIndex(ranks=1, slots=2, size=2)
        >>> tokens, digests = [1, 2, 3, 4, 5], prefix_digests([1, 2, 3, 4, 5], 2)
        >>> [index.put(tokens, digests, 0, start, 2) for start in (2, 0)]  # slots to copy pages to
        [0, 1]
        >>> [block.slot for block in index.find(tokens, digests, 0)]
        [1, 0]
    """

    def __init__(self, ranks: int, slots: int, size: int) -> None:
        self.slots, self.size = slots, size
        self._free = [list(range(slots - 1, -1, -1)) for _ in range(ranks)]
        self._used: list[dict[HostBlock, None]] = [{} for _ in range(ranks)]  # least recently used first
        self._after: dict[Digest, dict[Digest, HostBlock]] = {}  # by `before`, then by `end`

    @property
    def used(self) -> list[int]:
        """Pages of each rank that hold a copy."""
        return list(map(len, self._used))

    def has(self, tokens: Sequence[int], digests: Sequence[Digest], start: int, length: int) -> bool:
        """Return whether there is a copy of some tokens of a prefix, which is then the most recently used one."""
        before, end = (digest_at(tokens, self.size, digests, at) for at in (start, start + length))
        if (known := self._after.get(before, {}).get(end)) is None:
            return False
        self.touch(known)
        return True

    def put(self, tokens: Sequence[int], digests: Sequence[Digest], rank: int, start: int, length: int) -> int | None:
        """Return the slot to which tokens of a prefix without a copy are to be copied; None: all slots are being read."""
        before, end = (digest_at(tokens, self.size, digests, at) for at in (start, start + length))
        slot = self._take_slot(rank)
        if slot is None:
            return None
        block = HostBlock(before, end, rank, slot, start, length)
        self._used[rank][block] = None
        self._after.setdefault(before, {})[end] = block
        return slot

    def find(self, tokens: Sequence[int], digests: Sequence[Digest], start: int) -> list[HostBlock]:
        """Return the blocks of a request from token `start` on, without a gap; at least one token is left to be computed."""
        found: list[HostBlock] = []
        before = digest_at(tokens, self.size, digests, start)
        while (candidates := self._after.get(before)) is not None:
            ends = {block.length for block in candidates.values()}
            fitting = [length for length in sorted(ends, reverse=True) if start + length < len(tokens)]
            known = (candidates.get(digest_at(tokens, self.size, digests, start + length)) for length in fitting)
            if (block := next(filter(None, known), None)) is None:
                break
            found.append(block)
            before, start = block.end, start + block.length
        return found

    def touch(self, block: HostBlock) -> None:
        """Make a block the most recently used one."""
        used = self._used[block.rank]
        used[block] = used.pop(block)

    def _take_slot(self, rank: int) -> int | None:
        """Return a slot of a rank that holds nothing, or whose block is forgotten."""
        if self._free[rank]:
            return self._free[rank].pop()
        block = next((block for block in self._used[rank] if not block.readers), None)
        if block is None:
            return None
        del self._used[rank][block], self._after[block.before][block.end]
        if not self._after[block.before]:
            del self._after[block.before]
        return block.slot
