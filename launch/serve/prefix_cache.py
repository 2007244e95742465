"""Index of token prefixes, by which requests share pages of keys and values. Standard library only."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Sequence

Digest = bytes


def prefix_digests(tokens: Sequence[int], size: int, before: Sequence[Digest] = ()) -> list[Digest]:
    """Return the digests of the whole blocks of `size` tokens; before: known digests of the first blocks.

    Digest i is a 16-byte BLAKE2b digest of digest i - 1 and of block i: prompts with the same digest have the same tokens.
    """
    found = list(before)
    for start in range(len(found) * size, len(tokens) - size + 1, size):
        maker = hashlib.blake2b(found[-1] if found else b"", digest_size=16)
        maker.update(array("I", tokens[start : start + size]).tobytes())
        found.append(maker.digest())
    return found


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

    def drop(self, owner: object) -> None:
        """Remove an owner, if it is registered."""
        for digest in self._digests.pop(owner, ()):
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
