"""Index of token prefixes, by which requests share pages of keys and values. Standard library only.

Note [Digests]
    A prompt is cut into blocks of `size` tokens. Digest i stands for the tokens of blocks 0 .. i: a chain of 16-byte BLAKE2b
    digests, so two prompts with the same digest have the same tokens. An owner is in the index with its whole chain, so the
    longest common prefix is found by bisection.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

Digest = bytes


def prefix_digests(tokens: Sequence[int], size: int, before: Sequence[Digest] = ()) -> list[Digest]:
    """Return the digests of the whole blocks of tokens (Note [Digests]).

    Args:
        tokens: Numbers below 2**32.
        size: Tokens of a block.
        before: Known digests of the first blocks.
    """
    found = list(before)
    for start in range(len(found) * size, len(tokens) - size + 1, size):
        maker = hashlib.blake2b(found[-1] if found else b"", digest_size=16)
        maker.update(array("I", tokens[start : start + size]).tobytes())
        found.append(maker.digest())
    return found


class PrefixIndex:
    """Index from prefixes to their owners.

    Args:
        size: Tokens of a block.

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

    def __len__(self) -> int:
        return len(self._digests)

    def add(self, owner: object, digests: Sequence[Digest]) -> None:
        """Register the blocks of an owner; the chain extends the one registered before.

        Args:
            owner: Any key.
            digests: The whole chain.
        """
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
        """Return the newest owner of the longest known prefix, and its length in tokens; (None, 0) for none.

        Args:
            digests: The chain of a prompt.
        """
        low, high = 0, len(digests)
        while low < high:
            middle = (low + high + 1) // 2
            if digests[middle - 1] in self._owners:
                low = middle
            else:
                high = middle - 1
        if low == 0:
            return None, 0
        return next(reversed(self._owners[digests[low - 1]])), low * self.size
