"""The mask of a call as a union of terms (Note [Mask terms]), for plans and tables."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import Any, Literal

from ringattn.plan.expressions import Documents, Frame, Mask
from ringattn.plan.intervals import MOST_TERMS, Term, count_term, empty, merged, transpose

MaskAxis = Literal["keys", "queries"]
"""The side that the rows of one side see: "keys" (the rows are queries) or "queries" (the rows are keys)."""


class MaskUnion:
    """An expression over two sequences; `AttentionMask` makes it of short forms.

    Attributes:
        expression: The mask; documents of the sharding are a part of it.
        lengths: Those of `AttentionMask`.
    """

    seq_len: int
    kv_len: int
    expression: Mask
    lengths: tuple[tuple[int, int], ...] | None = None

    def __init__(self, seq_len: int, kv_len: int, expression: Mask, documents: tuple[int, ...] | None = None) -> None:
        self.seq_len, self.kv_len = seq_len, kv_len
        self.expression = expression if documents is None else Documents(documents) & expression

    @property
    def _content(self) -> tuple[Any, ...]:
        return self.seq_len, self.kv_len, self.expression

    @cached_property
    def _hash(self) -> int:
        # plans are looked up on every call, and documents may be thousands of integers
        return hash(self._content)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, MaskUnion) and self._content == other._content)

    def __repr__(self) -> str:
        return f"MaskUnion({self.seq_len}, {self.kv_len}, {self.expression!r})"

    @cached_property
    def batch_size(self) -> int:
        """Batch elements with pairs of their own; 1 when all share one mask."""
        return self.expression.batch_size or 1

    @property
    def is_per_batch(self) -> bool:
        """Whether batch elements have pairs of their own."""
        return self.expression.batch_size is not None

    @cached_property
    def _intervals(self) -> dict[int, list[Term]]:
        """Disjoint terms of each variant: equally many, with the same tables."""
        found = {b: merged(self.expression.intervals(Frame(self.seq_len, self.kv_len, b))) for b in self.variants}
        most: dict[Any, int] = {}
        for terms in found.values():
            for pattern, number in Counter(term.pattern for term in terms).items():
                most[pattern] = max(most.get(pattern, 0), number)
        if not most:
            most[None] = 1
        if sum(most.values()) > MOST_TERMS:
            raise NotImplementedError(
                f"mask must have at most {MOST_TERMS} intervals per query, got {sum(most.values())} of {self.expression!r}; "
                "for a deep tree or an irregular mask use masks.blocks, or bias"
            )
        return {
            b: [term for pattern, number in most.items() for term in _padded(terms, pattern, number, self.seq_len)]
            for b, terms in found.items()
        }

    @property
    def is_union(self) -> bool:
        """Whether there is more than one interval, or a table of blocks."""
        terms = self._intervals[0]
        return len(terms) > 1 or terms[0].pattern is not None

    @property
    def has_pattern(self) -> bool:
        """Whether a table of blocks cuts the mask."""
        return any(term.pattern is not None for term in self._intervals[0])

    def variant(self, b: int) -> int:
        """Return the first batch element that is known to have the terms of element b."""
        return b

    @cached_property
    def variants(self) -> Counter[int]:
        """Batch elements by variant."""
        return Counter(map(self.variant, range(self.batch_size)))

    def intervals(self, axis: MaskAxis, variant: int) -> list[Term]:
        """Return the disjoint terms of a variant, seen from the rows of one side."""
        return (self._intervals if axis == "keys" else self._transposed)[variant]

    @cached_property
    def _transposed(self) -> dict[int, list[Term]]:
        return {b: [transpose(term, self.kv_len) for term in terms] for b, terms in self._intervals.items()}

    def pairs(self, a: int, b: int, b_index: int = 0) -> int:
        """Visible pairs of the queries [a, b) of one batch element, exactly."""
        return sum(count_term(term, a, b) for term in self._intervals[self.variant(b_index)])

    def work(self, a: int, b: int) -> int:
        """Visible pairs of the queries [a, b), summed over batch elements."""
        return sum(times * self.pairs(a, b, variant) for variant, times in self.variants.items())


def _padded(given: list[Term], pattern: Any, number: int, rows: int) -> list[Term]:
    found = [term for term in given if term.pattern == pattern]
    return found + [empty(rows, pattern)] * (number - len(found))
