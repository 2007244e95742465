"""Which requests begin alike, so that what one has computed serves the next.

Owns the index of token prefixes. Refuses to know caches and models. Standard library only.

Note [Digests]
    A prompt is cut into stretches of `size` tokens, and digest i stands for the tokens of stretches 0 .. i: a chain of 16-byte
    BLAKE2b digests, so two prompts with the same digest have the same tokens. Whoever is in the index is there with a whole chain,
    so the longest common one is found by bisection.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

Digest = bytes


def chain(tokens: Sequence[int], size: int, before: Sequence[Digest] = ()) -> list[Digest]:
    """The digests of whole stretches of tokens (Note [Digests]).

    Args:
        tokens: Numbers below 2**32.
        size: Tokens of a stretch.
        before: Digests of the first stretches, which are not made again.
    """
    found = list(before)
    for start in range(len(found) * size, len(tokens) - size + 1, size):
        maker = hashlib.blake2b(found[-1] if found else b"", digest_size=16)
        maker.update(array("I", tokens[start : start + size]).tobytes())
        found.append(maker.digest())
    return found


class Prefixes:
    """Who holds which prefix.

    Args:
        size: Tokens of a stretch.

    Example:
        >>> index = Prefixes(size=2)
        >>> index.add("a", chain([1, 2, 3, 4, 5], 2))
        >>> index.find(chain([1, 2, 3, 4, 9, 9], 2)), index.find(chain([7, 2], 2))
        (('a', 4), (None, 0))
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._holders: dict[Digest, dict[object, None]] = {}  # in the order in which they came
        self._chains: dict[object, list[Digest]] = {}

    def __len__(self) -> int:
        return len(self._chains)

    def add(self, holder: object, digests: Sequence[Digest]) -> None:
        """Says that a holder has these stretches; more than it said before, or the same.

        Args:
            holder: Any name.
            digests: The whole chain.
        """
        mine = self._chains.setdefault(holder, [])
        for digest in digests[len(mine) :]:
            self._holders.setdefault(digest, {})[holder] = None
            mine.append(digest)

    def drop(self, holder: object) -> None:
        """Forgets a holder, if it is known."""
        for digest in self._chains.pop(holder, ()):
            holders = self._holders[digest]
            del holders[holder]
            if not holders:
                del self._holders[digest]

    def find(self, digests: Sequence[Digest]) -> tuple[object | None, int]:
        """The holder of the longest prefix, the newest of several, and how many tokens it is; (None, 0) for none.

        Args:
            digests: The chain of a prompt.
        """
        low, high = 0, len(digests)
        while low < high:
            middle = (low + high + 1) // 2
            if digests[middle - 1] in self._holders:
                low = middle
            else:
                high = middle - 1
        if low == 0:
            return None, 0
        return next(reversed(self._holders[digests[low - 1]])), low * self.size
