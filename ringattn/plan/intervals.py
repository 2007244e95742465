"""Terms of a mask: intervals of which no two share a pair, and their unions and intersections.

Note [Mask terms]
    A mask is a union of disjoint *terms*. A term is one interval of keys per query, [lower, upper), neither of which
    decreases with the query, perhaps cut by a table of blocks. Partials over disjoint sets of keys merge in any order
    (`numerics/partial.py`), so terms are computed like further ring steps and nothing is counted twice.
    The intersection of two terms is one. A union keeps the terms it has and adds of each new one what none of them shows:
    the pairs before and after their interval. Terms that overlap or touch on every row become one.
"""

from __future__ import annotations

from typing import NamedTuple

from ringattn.plan.block_pattern import BlockPattern
from ringattn.plan.bounds import Bounds, constant, count, intersect, merge_touching, subtract

MOST_TERMS = 16
"""Terms of the largest mask: each is met by every tile of a kernel."""


class Term(NamedTuple):
    """One interval of keys per query, perhaps cut by a table of blocks."""

    bounds: Bounds
    pattern: BlockPattern | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no pair is visible in the interval."""
        lower, upper = self.bounds
        return lower.total(lower.rows) == upper.total(upper.rows) or (
            self.pattern is not None and not any(self.pattern.lines)
        )


def merged(given: list[Term]) -> list[Term]:
    """Return terms without those that show nothing, joined where the union is one interval."""
    found: list[Term] = []
    for term in given:
        while True:
            for k, other in enumerate(found):
                joined = merge_touching(other.bounds, term.bounds) if other.pattern == term.pattern else None
                if joined is not None:
                    term = Term(joined, found.pop(k).pattern)
                    break
            else:
                break
        if not term.is_empty:
            found.append(term)
    return found


def count_term(term: Term, a: int, b: int) -> int:
    """Visible pairs of the queries [a, b)."""
    if term.pattern is None:
        return count(term.bounds, a, b)
    size, total = term.pattern.block_size, 0
    lower, upper = term.bounds
    for index in range(a // size, -(-b // size)):
        first, last = max(a, index * size), min(b, (index + 1) * size)
        for begin, end in term.pattern.spans[index]:
            if lower.at(last - 1) <= begin and end <= upper.at(first):
                total += (last - first) * (end - begin)
            else:
                total += sum(max(0, min(upper.at(i), end) - max(lower.at(i), begin)) for i in range(first, last))
    return total


def both(a: Term, b: Term) -> Term:
    """The pairs that two terms show."""
    pattern = a.pattern if b.pattern is None else b.pattern if a.pattern is None else a.pattern.both(b.pattern)
    return Term(intersect(a.bounds, b.bounds), pattern)


def united(disjoint: list[Term], new: Term) -> list[Term]:
    """Add to disjoint terms what they do not show of another."""
    kept = []
    for term in disjoint:
        joined = merge_touching(term.bounds, new.bounds) if term.pattern == new.pattern else None
        if joined is None:
            kept.append(term)
        else:
            new = Term(joined, new.pattern)
    pieces = [new]
    for term in kept:
        pieces = [rest for piece in pieces for rest in _without(piece, term) if not rest.is_empty]
    return [*kept, *pieces]


def _without(a: Term, b: Term) -> list[Term]:
    found = [Term(bounds, a.pattern) for bounds in subtract(a.bounds, b.bounds)]
    if b.pattern is not None:
        rest = b.pattern.inverse if a.pattern is None else a.pattern.both(b.pattern.inverse)
        found.append(Term(intersect(a.bounds, b.bounds), rest))
    return found


def transpose(term: Term, kv_len: int) -> Term:
    """Return the same pairs as the interval of queries that see a key: between the first rows whose bounds lie above it."""
    lower, upper = term.bounds
    pattern = None if term.pattern is None else term.pattern.transposed
    return Term((upper.inverse(kv_len), lower.inverse(kv_len)), pattern)


def empty(rows: int, pattern: BlockPattern | None) -> Term:
    """Return a term that shows nothing."""
    return Term((constant(rows, 0), constant(rows, 0)), pattern)
