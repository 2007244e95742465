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

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate, pairwise
from operator import gt, sub
from typing import Any, Literal, Protocol

from ringattn.plan.layouts import Run, Shard

MaskAxis = Literal["keys", "queries"]
"""The side that the rows of one side see: "keys" (the rows are queries) or "queries" (the rows are keys)."""

Bounds = tuple["PiecewiseBound", "PiecewiseBound"]


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
        lower, upper = self.bounds("keys", self.extent(b_index))
        return upper.total(b) - upper.total(a) - lower.total(b) + lower.total(a)

    def work(self, a: int, b: int) -> int:
        """Visible pairs of the queries [a, b), summed over batch elements."""
        return sum(self.pairs(a, b, index) for index in range(self.batch_size))


class PiecewiseBound:
    """A function of the rows 0 .. rows - 1 that does not decrease: pieces of slope 0 or 1."""

    def __init__(self) -> None:
        self.starts: list[int] = [0]
        self.values: list[int] = []
        self.slopes: list[int] = []

    def append(self, rows: int, first: int, last: int) -> None:
        """Add rows, straight from the value `first` to the value `last`, to the end."""
        slope = int(last > first)
        assert last - first == slope * (rows - 1), "a bound bends inside a piece"
        if not self._lengthen(rows, first, slope):
            self.values.append(first)
            self.slopes.append(slope)
            self.starts.append(self.starts[-1] + rows)

    def extend(self, at: int, other: PiecewiseBound) -> None:
        """Add the rows and values of another function, both counted from `at`, to the end."""
        starts, values, slopes = other.starts, other.values, other.slopes
        joined = int(self._lengthen(starts[1], at + values[0], slopes[0]))
        if len(values) > joined:
            self.values.extend([at + value for value in values[joined:]])
            self.slopes.extend(slopes[joined:])
            self.starts.extend([at + start for start in starts[joined + 1 :]])

    def _lengthen(self, rows: int, first: int, slope: int) -> bool:
        """Lengthen the last piece by rows that continue it, if they do."""
        if not self.values:
            return False
        before = self.starts[-1] - self.starts[-2]
        step = first - (self.values[-1] + self.slopes[-1] * (before - 1))
        # one row alone is straight at any slope
        if 0 <= step <= 1 and (before == 1 or self.slopes[-1] == step) and (rows == 1 or slope == step):
            self.slopes[-1] = step
            self.starts[-1] += rows
            return True
        return False

    @cached_property
    def _sums(self) -> list[int]:
        """The sum of the values of all rows before each piece."""
        lengths = map(sub, self.starts[1:], self.starts)
        return list(accumulate(map(_ramp, self.values, self.slopes, lengths), initial=0))

    def piece(self, row: int) -> int:
        """The index of the piece that holds a row."""
        return bisect_right(self.starts, row, 0, len(self.values)) - 1

    def at(self, row: int) -> int:
        """The value at a row."""
        k = self.piece(row)
        return self.values[k] + self.slopes[k] * (row - self.starts[k])

    def first_above(self, value: int) -> int:
        """The first row whose value is greater than `value`; the number of rows when there is none."""
        k = bisect_right(self.values, value) - 1
        if k < 0:
            return 0
        inside = self.starts[k] + value - self.values[k] + 1 if self.slopes[k] else self.starts[k + 1]
        return min(inside, self.starts[k + 1])

    def total(self, end: int) -> int:
        """The sum of the values of the rows [0, end)."""
        if end == 0:
            return 0
        k = self.piece(end - 1)
        return self._sums[k] + _ramp(self.values[k], self.slopes[k], end - self.starts[k])


class Tally:
    """Number of rows of a shard below a position, and sums of that over positions."""

    def __init__(self, shard: Shard) -> None:
        self._runs = shard
        self._starts = [run.start for run in shard]
        self._before = [0]
        for run in shard:
            self._before.append(self._before[-1] + run.length)
        self._sums: list[int] = []
        for k, run in enumerate(shard):
            self._sums.append(self._sum_in(k - 1, run.start + 1) if k else 0)

    def below(self, position: int) -> int:
        """Rows at positions less than `position`."""
        k = bisect_left(self._starts, position) - 1
        if k < 0:
            return 0
        run = self._runs[k]
        return self._before[k] + min(run.length, (position - 1 - run.start) // run.stride + 1)

    def sum_below(self, position: int, step: int, number: int) -> int:
        """The sum of `below(position + step * x)` over 0 <= x < number, in closed form per run."""
        if number == 1:
            return self.below(position)
        if step == 1:
            return self._sum(position + number) - self._sum(position)
        nearest = max(0, bisect_left(self._starts, position) - 1)
        total = number * self._before[nearest]
        for run in self._runs[nearest:]:
            # positions up to the start of a run count none of it; those past its last row count all of it
            some = min(number, max(0, _ceil_div(run.start + 1 - position, step)))
            if some == number:
                break
            full = min(number, max(some, _ceil_div(run.last + 1 - position, step)))
            offset = position + step * some - 1 - run.start
            total += floor_sum(full - some, run.stride, step, offset) + (full - some) + (number - full) * run.length
        return total

    def sum_along(self, bound: PiecewiseBound, a: int, b: int) -> int:
        """The sum of `below(bound(x))` over a <= x < b, where runs have no gaps: in closed form between their ends."""
        total = 0
        while a < b:
            value = bound.at(a)
            k = bisect_left(self._starts, value) - 1
            if k >= 0 and value <= (run := self._runs[k]).last:
                # rises with the bound until that is beyond the run
                end = min(b, bound.first_above(run.last))
                total += bound.total(end) - bound.total(a) - (end - a) * (run.start - self._before[k])
            else:
                end = min(b, bound.first_above(self._starts[k + 1])) if k + 1 < len(self._starts) else b
                total += (end - a) * self._before[k + 1]
            a = end
        return total

    def _sum(self, end: int) -> int:
        k = bisect_left(self._starts, end) - 1
        return self._sum_in(k, end) if k >= 0 else 0

    def _sum_in(self, k: int, end: int) -> int:
        # over all positions u < end, where run k is the last one that starts below end
        run = self._runs[k]
        width = end - 1 - run.start
        rising = min(width, run.stride * run.length)
        whole, rest = divmod(rising, run.stride)
        inside = run.stride * (whole * (whole - 1) // 2) + whole * rest + rising + (width - rising) * run.length
        return self._sums[k] + width * self._before[k] + inside


class VisibleSpan:
    """The positions of the other side that at least one row of a shard sees.

    They are periodic intervals, in order of the rows that see them: positions p in [first, end) with
    `(p - first) % step < width`. Most are solid (step 1); strided rows under a window narrower than the stride leave
    gaps. Neither first nor end decreases from one to the next, so the first that meets a run has the smallest position
    of it, the last one the greatest. They are made on demand, from the rows that see the ends of a run.
    """

    def __init__(self, bounds: Bounds, shard: Shard) -> None:
        self._bounds = bounds
        self._shard = shard
        self._starts = [run.start for run in shard]
        self._lasts = [run.last for run in shard]

    def span(self, run: Run) -> tuple[int, int] | None:
        """The rows of a run from the first to the last that is seen, as (offset, length); None when none is."""
        first = self._first(run)
        return None if first is None else (first, self._last(run) - first + 1)

    def _first(self, run: Run) -> int | None:
        for first, end, step, width in self._intervals_from(self._bounds[1].first_above(run.start)):
            if first > run.last:
                return None
            y = max(0, _ceil_div(first - run.start, run.stride))
            # the run's place within the period repeats after at most `step` rows
            for row in range(y, min(y + step, run.length)):
                offset = run.start + run.stride * row - first
                if offset >= end - first:
                    break
                if offset % step < width:
                    return row
        return None

    def _last(self, run: Run) -> int:
        for first, end, step, width in self._intervals_to(self._bounds[0].first_above(run.last) - 1):
            y = min(run.length - 1, (end - 1 - run.start) // run.stride)
            for row in range(y, max(y - step, -1), -1):
                offset = run.start + run.stride * row - first
                if offset < 0:
                    break
                if offset % step < width:
                    return row
        raise AssertionError("a run with a first seen row has a last one")

    def _intervals_from(self, row: int) -> Iterator[tuple[int, int, int, int]]:
        """Positions that rows of the shard see, from the first one at or after a row on: (first, end, step, width)."""
        lower, upper = self._bounds
        for run in self._shard[bisect_left(self._lasts, row) :]:
            x = max(0, _ceil_div(row - run.start, run.stride))
            while x < run.length:
                begin = run.start + run.stride * x
                k, m = lower.piece(begin), upper.piece(begin)
                x = min(run.length, _ceil_div(min(lower.starts[k + 1], upper.starts[m + 1]) - run.start, run.stride))
                yield from self._interval(begin, run.start + run.stride * (x - 1), run.stride, k, m)

    def _intervals_to(self, row: int) -> Iterator[tuple[int, int, int, int]]:
        """`_intervals_from` backwards, from the last row of the shard at or before a row on."""
        lower, upper = self._bounds
        for run in reversed(self._shard[: bisect_right(self._starts, row)]):
            x = min(run.length - 1, (row - run.start) // run.stride)
            while x >= 0:
                last = run.start + run.stride * x
                k, m = lower.piece(last), upper.piece(last)
                x = max(0, _ceil_div(max(lower.starts[k], upper.starts[m]) - run.start, run.stride))
                yield from self._interval(run.start + run.stride * x, last, run.stride, k, m)
                x -= 1

    def _interval(self, begin: int, last: int, stride: int, k: int, m: int) -> Iterator[tuple[int, int, int, int]]:
        """Positions seen by the rows begin .. last of a run, which lie in piece k of the lower bound and m of the upper."""
        lower, upper = self._bounds
        down, up = lower.slopes[k], upper.slopes[m]
        low, high = lower.values[k] - down * lower.starts[k], upper.values[m] - up * upper.starts[m]
        # an interval that widens may be empty on its first row, one that narrows on its last
        if up > down and low + down * begin == high + up * begin:
            begin += stride
        elif up < down and low + down * last == high + up * last:
            last -= stride
        first, width = low + down * begin, high + up * begin - low - down * begin
        if begin <= last and width:
            gaps = down and up and width < stride and begin < last
            yield (first, high + up * last, stride, width) if gaps else (first, high + up * last, 1, 1)


def count_pairs(bounds: Bounds, rows: Sequence[Shard], others: Sequence[Shard]) -> list[list[int]]:
    """Count the visible pairs between every shard of rows and every shard of the other side.

    Row x of one side sees [lower(x), upper(x)) of the other, so its pairs with a shard are the shard's rows below
    upper(x) less those below lower(x): sums of tallies along the pieces of the bounds.

    Returns:
        `counts[r][o]`: pairs between `rows[r]` and `others[o]`.
    """
    counts = [[0] * len(others) for _ in rows]
    strides = {run.stride for shard in (*rows, *others) for run in shard}
    modulus = max(strides, default=1)
    if strides <= {1}:
        add = _add_stretches
    elif all(_is_class(s, modulus, bounds[0].starts[-1]) for s in rows) and all(
        _is_class(s, modulus, bounds[1].at(bounds[1].starts[-1] - 1)) for s in others
    ):
        add = _add_classes
    else:
        add = _add_pieces
    for sign, bound in zip((-1, 1), bounds, strict=True):
        add(counts, sign, bound, rows, others)
    return counts


def _is_class(shard: Shard, modulus: int, end: int) -> bool:
    """Return whether a shard holds all positions below `end` that are congruent by the modulus."""
    if len(shard) != 1:
        return False
    run = shard[0]
    return run.stride == modulus and run.start < modulus and run.last + modulus >= end


def _add_stretches(
    counts: list[list[int]], sign: int, bound: PiecewiseBound, rows: Sequence[Shard], others: Sequence[Shard]
) -> None:
    """Add the rows below a bound where no run has gaps: the cost grows with runs, not with pieces."""
    tallies = [Tally(shard) for shard in others]
    for shard, row in zip(rows, counts, strict=True):
        for run in shard:
            for o, tally in enumerate(tallies):
                row[o] += sign * tally.sum_along(bound, run.start, run.start + run.length)


def _add_classes(
    counts: list[list[int]], sign: int, bound: PiecewiseBound, rows: Sequence[Shard], others: Sequence[Shard]
) -> None:
    """Add the rows below a bound where shards are the classes of one modulus: pieces that are alike are counted once.

    A piece and its values may be moved by a multiple of the modulus: the count then changes by that many rows.
    """
    modulus = rows[0][0].stride
    alike: dict[tuple[int, int, int, int], list[int]] = {}
    for start, end, value, slope in zip(bound.starts, bound.starts[1:], bound.values, bound.slopes, strict=False):
        whole, begin = divmod(start, modulus)
        kind = begin, end - start, value - start, slope
        found = alike.setdefault(kind, [0, 0])
        found[0] += 1
        found[1] += whole
    classes = [shard[0].start for shard in others]
    for (begin, length, ahead, slope), (times, wholes) in alike.items():
        for shard, row in zip(rows, counts, strict=True):
            first = (shard[0].start - begin) % modulus
            number = _ceil_div(length - first, modulus) if first < length else 0
            if number:
                value = begin + ahead + slope * first - 1 + modulus
                rest = wholes * number + times * _ramp(0, slope, number)
                for o, least in enumerate(classes):
                    row[o] += sign * (times * number * ((value - least) // modulus) + rest)


def _add_pieces(
    counts: list[list[int]], sign: int, bound: PiecewiseBound, rows: Sequence[Shard], others: Sequence[Shard]
) -> None:
    """Add the rows below a bound, piece by piece."""
    tallies = [Tally(shard) for shard in others]
    columns: dict[int, list[int]] = {}
    starts, values, slopes = bound.starts, bound.values, bound.slopes
    for shard, row in zip(rows, counts, strict=True):
        for run in shard:
            x, k = 0, bound.piece(run.start)
            while x < run.length:
                begin = run.start + run.stride * x
                while starts[k + 1] <= begin:
                    k += 1
                x_end = min(run.length, -((run.start - starts[k + 1]) // run.stride))
                number = x_end - x
                if slopes[k]:
                    value = values[k] + begin - starts[k]
                    for o, tally in enumerate(tallies):
                        row[o] += sign * tally.sum_below(value, run.stride, number)
                else:
                    value = values[k]
                    column = columns.get(value)
                    if column is None:
                        column = columns[value] = [tally.below(value) for tally in tallies]
                    number *= sign
                    for o, below in enumerate(column):
                        row[o] += number * below
                x = x_end


def floor_sum(number: int, modulus: int, slope: int, offset: int) -> int:
    """The sum of `(slope * x + offset) // modulus` over 0 <= x < number; slope, offset >= 0; O(log modulus).

    Whole multiples of the modulus come out of slope and offset. What is left counts the lattice points under a line;
    counted by rows from the far end instead of by columns, slope and modulus swap, as in Euclid's algorithm.

    Example:
        >>> floor_sum(4, 3, 2, 1)  # 0 + 1 + 1 + 2
        4
    """
    total = 0
    while number > 0:
        whole, slope = divmod(slope, modulus)
        total += _ramp(0, whole, number)
        whole, offset = divmod(offset, modulus)
        total += whole * number
        height, rest = divmod(slope * number + offset, modulus)
        number, modulus, slope, offset = height, slope, modulus, rest
    return total


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


def _ramp(first: int, slope: int, number: int) -> int:
    return first * number + slope * (number * (number - 1) // 2)


def _ceil_div(x: int, y: int) -> int:
    return -(-x // y)
