"""Visibility of keys to a query: always one interval of global positions.

Owns the meaning of causal, window, documents, prefix_len, chunk_len and lengths for both sides: the keys of a query and the
queries of a key. Counts visible pairs.

Note [Interval]
    Every feature bounds the visible positions from below, from above, or both, and no bound decreases with the row. So an
    intersection of features is again one monotone interval per row. `AttentionMask.interval` is the only place where the
    bounds are written. It uses `+ - * //` and a small `Algebra`, so that integers and integer tensors go through the same
    lines.
    As a function of the row, each bound is piecewise linear with slopes 0 and 1, and it can bend only at rows that are
    known in advance: where a segment (document, attention chunk) begins, a window's width after that, and so on.
    `bounds` evaluates the interval there; sums come from the pieces in closed form, so the cost of counting grows with
    the number of pieces, never with the number of tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from operator import gt
from typing import Any, Literal, Protocol

from ringattn.plan.bounds import Bounds, PiecewiseBound, count
from ringattn.plan.intervals import Term

MaskAxis = Literal["keys", "queries"]
"""The side that the rows of one side see: "keys" (the rows are queries) or "queries" (the rows are keys)."""


class Algebra(Protocol):
    """Operations of `AttentionMask.interval` beyond arithmetic, on integers or on integer tensors."""

    def minimum(self, x: Any, y: Any, /) -> Any: ...  # noqa: D102
    def maximum(self, x: Any, y: Any, /) -> Any: ...  # noqa: D102
    def document(self, documents: tuple[int, ...], x: Any) -> tuple[Any, Any]:
        """First position and end of the (not empty) document that holds position x."""
        ...


class _Integers:
    """The algebra of Python integers."""

    minimum, maximum = staticmethod(min), staticmethod(max)

    @staticmethod
    def document(documents: tuple[int, ...], x: int) -> tuple[int, int]:
        k = bisect_right(documents, x)
        return documents[k - 1], documents[k]


_INTEGERS = _Integers()


@dataclass(frozen=True)
class AttentionMask:
    """The mask of one attention call.

    Query i sees key j when all of these hold: causal implies `j <= i` or `j < prefix_len`;
    `i - left <= j <= i + right`; i and j lie in the same document; `i // chunk_len == j // chunk_len`, where chunks_restart
    with i and j counted from the beginning of their document or from start, whichever is later; both lie in the batch
    element's [start, stop).

    Widths that reach beyond either sequence are kept as those that just do: sums with positions then fit any integer.

    Attributes:
        window: (left, right): i - left <= j <= i + right; None on a side means unbounded; None: no window.

    Example:
        >>> AttentionMask(8, 8, causal=True, window=(2, None)).keys_of(5)
        (3, 6)
        >>> AttentionMask(8, 8, causal=True, documents=(0, 3, 8)).pairs(0, 8)
        21
    """

    seq_len: int
    kv_len: int
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    documents: tuple[int, ...] | None = None
    prefix_len: int = 0
    chunk_len: int | None = None
    lengths: tuple[tuple[int, int], ...] | None = None
    chunks_restart: bool = False

    def __post_init__(self) -> None:
        """Refuse fields that define no mask."""
        widths = {"window": self.window or (), "prefix_len": (self.prefix_len,), "chunk_len": (self.chunk_len,)}
        for name, numbers in widths.items():
            if any(x is not None and type(x) is not int for x in numbers):
                raise ValueError(f"{name} must be of integers, got {getattr(self, name)!r}; convert it first")
        if self.seq_len < 1 or self.kv_len < 1:
            raise ValueError(
                f"seq_len and kv_len must be at least 1, got {self.seq_len} and {self.kv_len}; "
                "give the lengths of the whole sequences"
            )
        if self.window is not None and len(self.window) != 2:
            raise ValueError(f"window must be (left, right), got {self.window}; None on a side means unbounded")
        if any(side is not None and side < 0 for side in self.window or ()):
            raise ValueError(f"window must have sides of at least 0 or None, got {self.window}; None means unbounded")
        if self.documents is not None:
            if self.seq_len != self.kv_len:
                raise ValueError(
                    f"documents must divide one sequence, got {self.seq_len} queries and {self.kv_len} keys; "
                    "cross attention between sequences of different lengths takes no documents"
                )
            check_documents(self.documents, self.seq_len)
        if self.prefix_len < 0:
            raise ValueError(f"prefix_len must be at least 0, got {self.prefix_len}; 0 means no prefix")
        if self.prefix_len and not self.causal:
            raise ValueError(
                f"prefix_len must come with causal=True, got prefix_len={self.prefix_len} without; "
                "every key is visible already"
            )
        if self.chunk_len is not None and self.chunk_len < 1:
            raise ValueError(f"chunk_len must be at least 1 or None, got {self.chunk_len}; None means no chunks")
        if self.lengths is not None:
            _check_lengths(self.lengths, self.seq_len, self.kv_len)
        longest = max(self.seq_len, self.kv_len)
        if self.window is not None:
            window = tuple(None if side is None else min(side, longest) for side in self.window)
            object.__setattr__(self, "window", window)
        if self.chunk_len is not None:
            object.__setattr__(self, "chunk_len", min(self.chunk_len, longest))
        object.__setattr__(self, "prefix_len", min(self.prefix_len, longest))

    @cached_property
    def _fields(self) -> tuple[object, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    @cached_property
    def _hash(self) -> int:
        return hash(self._fields)

    def __hash__(self) -> int:
        return self._hash  # plans are looked up on every call, and documents may be thousands of integers

    def __reduce__(self) -> tuple[type[AttentionMask], tuple[object, ...]]:
        # copies have the fields alone: the hash of None, and so the cached one, differs from process to process
        return AttentionMask, self._fields

    @property
    def batch_size(self) -> int:
        """Batch elements with bounds of their own; 1 when all share one mask."""
        return len(self.lengths or (None,))

    def extent(self, b: int = 0) -> tuple[int, int] | None:
        """The (start, stop) of batch element b; None when the mask has no lengths."""
        return None if self.lengths is None else self.lengths[b]

    @property
    def is_per_batch(self) -> bool:
        """Whether batch elements have bounds of their own."""
        return self.lengths is not None

    @property
    def is_union(self) -> bool:
        """Whether there is more than one interval: never."""
        return False

    @property
    def has_pattern(self) -> bool:
        """Whether a table of blocks cuts the mask: never."""
        return False

    def variant(self, b: int) -> Hashable:
        """Return the key of the terms of batch element b."""
        return self.extent(b)

    @property
    def variants(self) -> Counter[Hashable]:
        """Batch elements by the key of their terms."""
        return Counter(self.lengths or (None,))

    def intervals(self, axis: MaskAxis, variant: Any) -> list[Term]:
        """Return the one term of some batch elements, seen from the rows of one side."""
        return [Term(self.bounds(axis, variant))]

    def keys_of(self, i: int, b: int = 0) -> tuple[int, int]:
        """The keys [lo, hi) visible to query i of batch element b; lo <= hi, neither decreases with i."""
        return self.interval(i, "keys", self.extent(b))

    def queries_of(self, j: int, b: int = 0) -> tuple[int, int]:
        """The queries [lo, hi) that see key j of batch element b; lo <= hi, neither decreases with j."""
        return self.interval(j, "queries", self.extent(b))

    def interval(
        self, x: Any, axis: MaskAxis, extent: tuple[Any, Any] | None, algebra: Algebra = _INTEGERS
    ) -> tuple[Any, Any]:
        """Return the visible positions [lo, hi) of the other side, for a row at global position x (Note [Interval]).

        A row that sees nothing has lo == hi, placed so that neither bound ever decreases: before `start` both are
        start, from `stop` on both are stop.

        Args:
            axis: "keys": x is a query and the interval holds keys; "queries": the reverse.
            extent: (start, stop) of the batch element: integers or tensors that broadcast with x; None: everything.
        """
        rows_are_queries = axis == "keys"
        limit = self.kv_len if rows_are_queries else self.seq_len
        smaller, greater = algebra.minimum, algebra.maximum
        lo, hi = x * 0, x * 0 + limit
        begin = x * 0
        if self.causal and rows_are_queries:
            hi = smaller(hi, greater(x + 1, self.prefix_len))
        elif self.causal:
            # the prefix is seen from position 0 on: x counts only from prefix_len on
            lo = greater(lo, x * smaller(greater(x - self.prefix_len + 1, 0), 1))
        if self.window is not None:
            left, right = self.window
            back, ahead = (left, right) if rows_are_queries else (right, left)
            if back is not None:
                lo = greater(lo, x - back)
            if ahead is not None:
                hi = smaller(hi, x + (ahead + 1))
        if self.documents is not None:
            begin, end = algebra.document(self.documents, x)
            lo, hi = greater(lo, begin), smaller(hi, end)
        if self.chunk_len is not None:
            if not self.chunks_restart:
                begin = x * 0
            elif extent is not None:
                begin = greater(begin, extent[0])
            first = begin + (x - begin) // self.chunk_len * self.chunk_len
            lo, hi = greater(lo, first), smaller(hi, first + self.chunk_len)
        if extent is not None:
            start, stop = extent
            # 0 for rows before start, then 1; 0 up to stop, then 1: rows outside collapse to start or to stop
            entered = smaller(greater(x - start + 1, 0), 1)
            left_it = smaller(greater(x - stop + 1, 0), 1)
            lo = smaller(greater(greater(lo, start), left_it * stop), stop)
            hi = smaller(greater(hi, start), start + entered * (stop - start))
        return smaller(lo, limit), greater(smaller(lo, limit), hi)

    def bounds(self, axis: MaskAxis, extent: tuple[int, int] | None = None) -> Bounds:
        """Both bounds of the interval as functions of the row (Note [Interval]); cached on the mask."""
        key = (axis, extent)
        if key not in self._bounds:
            self._bounds[key] = self._trace(axis, extent)
        return self._bounds[key]

    @cached_property
    def _bounds(self) -> dict[tuple[MaskAxis, tuple[int, int] | None], Bounds]:
        return {}

    def _trace(self, axis: MaskAxis, extent: tuple[int, int] | None) -> Bounds:
        rows, limit = (self.seq_len, self.kv_len) if axis == "keys" else (self.kv_len, self.seq_len)
        start, stop = (0, rows) if extent is None else extent
        edges = self._segments(rows, extent)
        lower, upper = PiecewiseBound(), PiecewiseBound()
        known: dict[tuple[int, int], Bounds] = {}
        for a, b in pairwise(edges):
            # segments of one length that lie alike to the prefix have one shape
            shape = b - a, min(max(self.prefix_len - a, 0), b - a)
            inside = rows == limit and start <= a and b <= stop
            found = known.get(shape) if inside else None
            if found is None:
                found = self._trace_segment(a, b, limit, axis, extent)
                if inside:
                    known[shape] = found
            lower.extend(a, found[0])
            upper.extend(a, found[1])
        return lower, upper

    def _segments(self, rows: int, extent: tuple[int, int] | None) -> list[int]:
        """Edges of documents, batch elements and attention chunks; rows see keys of their own segment."""
        edges = {0, rows}
        if self.documents is not None:
            edges.update(self.documents)
        if extent is not None:
            edges.update(extent)
        if self.chunk_len is not None:
            begins = sorted(edges) if self.chunks_restart else [0, rows]
            for a, b in pairwise(begins):
                edges.update(range(a, b, self.chunk_len))
        return sorted(edges)

    def _trace_segment(self, a: int, b: int, limit: int, axis: MaskAxis, extent: tuple[int, int] | None) -> Bounds:
        """Both bounds of the rows [a, b) of one segment, counted from a: rows and values."""
        back, ahead = (None, None) if self.window is None else self.window if axis == "keys" else self.window[::-1]
        bends = {a}
        # a window bends a bound its width after a segment begins and before it ends, beyond the rows perhaps
        for p in (a, b, a + (self.chunk_len or 0), limit, self.prefix_len - 1, self.prefix_len):
            bends.update((p, p + (back or 0), p - (ahead or 0) - 1))
        edges = sorted(p for p in bends if a <= p < b)
        lower, upper = PiecewiseBound(), PiecewiseBound()
        for begin, end in pairwise([*edges, b]):
            lo, hi = self.interval(begin, axis, extent)
            lo_last, hi_last = (lo, hi) if end - begin == 1 else self.interval(end - 1, axis, extent)
            lower.append(end - begin, lo - a, lo_last - a)
            upper.append(end - begin, hi - a, hi_last - a)
        return lower, upper

    def pairs(self, a: int, b: int, b_index: int = 0) -> int:
        """Visible pairs of the queries [a, b) of one batch element, exactly; O(log pieces)."""
        return count(self.bounds("keys", self.extent(b_index)), a, b)

    def work(self, a: int, b: int) -> int:
        """Visible pairs of the queries [a, b), summed over batch elements."""
        return sum(self.pairs(a, b, index) for index in range(self.batch_size))


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


def _check_lengths(lengths: tuple[tuple[int, int], ...], seq_len: int, kv_len: int) -> None:
    if seq_len != kv_len:
        raise ValueError(
            f"lengths must bound one sequence, got {seq_len} queries and {kv_len} keys; "
            "mask padded keys of cross attention with key_bias"
        )
    if not lengths:
        raise ValueError("lengths must have one (start, stop) per batch element, got none; None means no padding")
    for b, (start, stop) in enumerate(lengths):
        if not 0 <= start <= stop <= seq_len:
            raise ValueError(
                f"lengths must be 0 <= start <= stop <= seq_len {seq_len}, got ({start}, {stop}) for element {b}; "
                "give positions of the padded sequence"
            )
