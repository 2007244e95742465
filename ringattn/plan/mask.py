"""The mask of a call, and the terms that it compiles to (Note [Mask terms]), for plans and tables.

A call has one mask: an expression of `ringattn.masks`, or the short forms causal, window, prefix_len, chunk_len and lengths, which
are folded into one. Every short form bounds the visible positions from below, from above, or both, and no bound decreases with the
row. So an intersection of them compiles to one term.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from itertools import pairwise
from operator import gt
from typing import Any, Literal, TypedDict

from ringattn.plan.expressions import (
    Causal,
    Chunks,
    Documents,
    Frame,
    Intersection,
    Lengths,
    Mask,
    PerBatch,
    Prefix,
    Union,
    Window,
)
from ringattn.plan.intervals import MOST_TERMS, Term, count_term, empty, merged, transpose
from ringattn.plan.layouts import MAX_SEQ_LEN

MaskAxis = Literal["keys", "queries"]
"""The side that the rows of one side see: "keys" (the rows are queries) or "queries" (the rows are keys)."""


class ShortForms(TypedDict, total=False):
    """Short forms of a mask, as in `ring_attention`; a window is (left, right)."""

    causal: bool
    window: tuple[int | None, int | None] | None
    prefix_len: int
    chunk_len: int | None
    lengths: tuple[tuple[int, int], ...] | None


def fold_mask(
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    prefix_len: int = 0,
    chunk_len: int | None = None,
    lengths: tuple[tuple[int, int], ...] | None = None,
) -> Mask:
    """Return the mask that short forms define.

    Query i sees key j when all of these hold: causal implies `j <= i` or `j < prefix_len`; `i - left <= j <= i + right`;
    `i // chunk_len == j // chunk_len`; both lie in the batch element's [start, stop).

    Example:
        >>> fold_mask(causal=True, window=(3, 0))
        causal() & window(3, 0)
    """
    if window is not None and len(window) != 2:
        raise ValueError(f"window must be (left, right), got {window}; None on a side means unbounded")
    if any(side is not None and side < 0 for side in window or ()):
        raise ValueError(f"window must have sides of at least 0 or None, got {window}; None means unbounded")
    if prefix_len < 0:
        raise ValueError(f"prefix_len must be at least 0, got {prefix_len}; 0 means no prefix")
    if prefix_len and not causal:
        raise ValueError(
            f"prefix_len must come with causal=True, got prefix_len={prefix_len} without; every key is visible already"
        )
    if chunk_len is not None and chunk_len < 1:
        raise ValueError(f"chunk_len must be at least 1 or None, got {chunk_len}; None means no chunks")
    if lengths is not None and not lengths:
        raise ValueError("lengths must have one (start, stop) per batch element, got none; None means no padding")
    parts = [
        causal and (Causal() | Prefix(prefix_len) if prefix_len else Causal()),
        window is not None and Window(*window),
        chunk_len is not None and Chunks(chunk_len),
        lengths is not None and Lengths(lengths),
    ]
    found = tuple(part for part in parts if isinstance(part, Mask))
    return Intersection(found) if len(found) > 1 else found[0] if found else Window(None, None)


def restarting_chunks(
    seq_len: int, chunk_len: int, documents: tuple[int, ...] | None, lengths: tuple[tuple[int, int], ...] | None
) -> Mask:
    """Return the mask of chunks that are counted from the beginning of each document, or of a batch element's start if later."""

    def chunks_from(start: int) -> Mask:
        edges = {0, seq_len}
        for a, e in pairwise(documents or (0, seq_len)):
            edges.update((a, *range(max(a, start), e, chunk_len)))
        return Documents(tuple(sorted(edges)))

    if lengths is None:
        # a union: sinks beside it are those of documents, not of chunks
        return Chunks(chunk_len) if documents is None else Union((chunks_from(0),))
    return PerBatch(tuple(chunks_from(start) for start, _ in lengths))


class MaskUnion:
    """A mask over two sequences, as a union of terms.

    Attributes:
        mask: The mask as given; see `ringattn.masks`.
        documents: Boundaries of the documents of the sharding, which are a part of the mask; None: one sequence.
        expression: Both together.

    Example:
        >>> short_mask(8, causal=True, documents=(0, 3, 8)).pairs(0, 8)
        21
    """

    def __init__(self, seq_len: int, kv_len: int, mask: Mask, documents: tuple[int, ...] | None = None) -> None:
        if not 1 <= min(seq_len, kv_len) <= max(seq_len, kv_len) <= MAX_SEQ_LEN:
            raise ValueError(
                f"seq_len and kv_len must be from 1 to {MAX_SEQ_LEN}, got {seq_len} and {kv_len}; "
                "give the lengths of the whole sequences"
            )
        if documents is not None:
            if seq_len != kv_len:
                raise ValueError(
                    f"documents must divide one sequence, got {seq_len} queries and {kv_len} keys; "
                    "cross attention between sequences of different lengths takes no documents"
                )
            check_documents(documents, seq_len)
        mask.check(seq_len, kv_len)
        self.seq_len, self.kv_len, self.mask, self.documents = seq_len, kv_len, mask, documents
        self.expression = mask if documents is None else mask & Documents(documents)

    @cached_property
    def parts(self) -> tuple[Mask, ...]:
        """The masks whose intersection is the given one."""
        return self.mask.parts if isinstance(self.mask, Intersection) else (self.mask,)

    def shortened(self, seq_len: int) -> MaskUnion:
        """Return the mask over the first tokens of one sequence; documents are cut off at the end."""
        documents = self.documents and (*(x for x in self.documents if x < seq_len), seq_len)
        return MaskUnion(seq_len, seq_len, self.mask, documents)

    @property
    def _content(self) -> tuple[Any, ...]:
        return self.seq_len, self.kv_len, self.expression

    def __hash__(self) -> int:
        return hash(self._content)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, MaskUnion) and self._content == other._content)

    def __reduce__(self) -> tuple[type[MaskUnion], tuple[object, ...]]:
        # copies are small: without the terms
        return MaskUnion, (self.seq_len, self.kv_len, self.mask, self.documents)

    def __repr__(self) -> str:
        return f"MaskUnion({self.seq_len}, {self.kv_len}, {self.expression!r})"

    @cached_property
    def batch_size(self) -> int:
        """Batch elements with pairs of their own; 1 when all share one mask."""
        return self.expression.batch_size or 1

    @cached_property
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
        for one, other in pairwise(pattern for pattern in most if pattern is not None):
            one.both(other)  # raises for tables that cannot be one tensor, with one block size for all
        if not most:
            most[None] = 1
        if sum(most.values()) > MOST_TERMS:
            raise NotImplementedError(
                f"mask must have at most {MOST_TERMS} intervals per query, got {sum(most.values())} of {self.expression!r}; "
                "for a deep tree or an irregular mask use masks.blocks, or bias"
            )
        for terms in found.values():
            own = Counter(term.pattern for term in terms)
            terms += [empty(self.seq_len, x) for x in most for _ in range(most[x] - own[x])]
            terms.sort(key=lambda term: list(most).index(term.pattern))
        return found

    @cached_property
    def is_union(self) -> bool:
        """Whether there is more than one interval, or a table of blocks."""
        terms = self._intervals[0]
        return len(terms) > 1 or terms[0].pattern is not None

    @cached_property
    def has_pattern(self) -> bool:
        """Whether a table of blocks cuts the mask."""
        return any(term.pattern is not None for term in self._intervals[0])

    @cached_property
    def variant_of(self) -> list[int]:
        """For each batch element the first one that has its mask."""
        elements = [self.expression.of_element(b) for b in range(self.batch_size)]
        return list(map(elements.index, elements))

    @cached_property
    def variants(self) -> Counter[int]:
        """Batch elements by variant."""
        return Counter(self.variant_of)

    def intervals(self, axis: MaskAxis, variant: int) -> list[Term]:
        """Return the disjoint terms of a variant, seen from the rows of one side."""
        return (self._intervals if axis == "keys" else self._transposed)[variant]

    @cached_property
    def _transposed(self) -> dict[int, list[Term]]:
        return {b: [transpose(term, self.kv_len) for term in terms] for b, terms in self._intervals.items()}

    def pairs(self, a: int, b: int, b_index: int = 0) -> int:
        """Visible pairs of the queries [a, b) of one batch element, exactly."""
        return sum(count_term(term, a, b) for term in self._intervals[self.variant_of[b_index]])

    def work(self, a: int, b: int) -> int:
        """Visible pairs of the queries [a, b), summed over batch elements."""
        return sum(times * self.pairs(a, b, variant) for variant, times in self.variants.items())


def short_mask(
    seq_len: int, kv_len: int | None = None, documents: tuple[int, ...] | None = None, **forms: Any
) -> MaskUnion:
    """Return the mask that short forms (`fold_mask`) and documents define over a sequence, or over two."""
    return MaskUnion(seq_len, seq_len if kv_len is None else kv_len, fold_mask(**forms), documents)


def check_documents(documents: tuple[int, ...], seq_len: int) -> None:
    """Refuse boundaries that do not divide seq_len tokens."""
    if len(documents) < 2 or documents[0] != 0 or documents[-1] != seq_len:
        shown = f"{documents[0]}, ..., {documents[-1]}" if documents else "nothing"
        raise ValueError(
            f"documents must be boundaries that start at 0 and end at seq_len {seq_len}, got {shown}; "
            "pass cumulative lengths, and count padding as a document of its own"
        )
    decreasing = list(map(gt, documents, documents[1:]))
    if any(decreasing):
        k = decreasing.index(True)
        raise ValueError(
            f"documents must not decrease, got {documents[k]} then {documents[k + 1]} at index {k}; pass cumulative lengths"
        )
