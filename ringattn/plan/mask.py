"""Which keys a query sees: always one interval of global positions.

Owns the meaning of causal, window, documents, prefix_len, chunk_len and lengths, and both readings of it: the keys of a
query and the queries of a key. Counts visible pairs. Refuses to know layouts, ranks and devices. Standard library only.

Note [Interval]
    Every feature bounds the visible positions from below, from above, or both; each bound does not decrease with the
    row, and so neither does the greatest lower bound or the least upper bound: an intersection of features is again one
    monotone interval per row. `Visibility.interval` is the only place where the bounds are written. It uses `+ - * //`
    and a small `Algebra` given by the caller, so Python integers and integer tensors go through the same lines.

Note [Pieces]
    As a function of the row, each bound is piecewise linear with slopes 0 and 1, and it can bend only at rows that are
    known in advance: where a segment (document, attention chunk) begins, a window's width after that, and so on.
    `bounds` evaluates the interval there, joins what is straight, and sums come from the pieces in closed form: the
    cost of counting grows with the number of pieces, never with the number of tokens.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, Protocol

from ringattn.plan.layouts import Run, Shard

Reading = Literal["keys", "queries"]
"""What the rows of one side see: "keys" (the rows are queries) or "queries" (the rows are keys)."""

Bounds = tuple["Staircase", "Staircase"]


class Algebra(Protocol):
    """What `Visibility.interval` needs beyond arithmetic. Operands are integers or integer tensors alike."""

    def minimum(self, x: Any, y: Any) -> Any:
        """The smaller of x and y, elementwise."""
        ...

    def maximum(self, x: Any, y: Any) -> Any:
        """The greater of x and y, elementwise."""
        ...

    def document(self, documents: tuple[int, ...], x: Any) -> tuple[Any, Any]:
        """First position and end of the (not empty) document that holds position x."""
        ...


class _Integers:
    """The algebra of Python integers."""

    @staticmethod
    def minimum(x: int, y: int) -> int:
        return x if x < y else y

    @staticmethod
    def maximum(x: int, y: int) -> int:
        return x if x > y else y

    @staticmethod
    def document(documents: tuple[int, ...], x: int) -> tuple[int, int]:
        k = bisect_right(documents, x)
        return documents[k - 1], documents[k]


_INTEGERS = _Integers()


@dataclass(frozen=True)
class Visibility:
    """The mask of one attention call.

    Query i sees key j when all of these hold: causal implies `j <= i` or `j < prefix_len`;
    `i - left <= j <= i + right`; i and j lie in the same document; `i // chunk_len == j // chunk_len`, where chunks_restart
    with i and j counted from the beginning of their document or from start, whichever is later; both lie in the batch
    element's [start, stop).

    Widths that reach beyond either sequence are kept as those that just do: sums with positions then fit any integer.

    Attributes:
        seq_len: Queries in the whole sequence.
        kv_len: Keys in the whole sequence (equals seq_len unless cross attention).
        causal: Keys j <= i.
        window: (left, right): i - left <= j <= i + right; None on a side means unbounded; None: no window.
        documents: Cumulative boundaries (0, ..., seq_len); i and j in the same one. Empty documents are allowed.
        prefix_len: With causal: keys j < prefix_len are visible to every row too.
        chunk_len: i // chunk_len == j // chunk_len.
        lengths: One (start, stop) per batch element: rows and keys outside see nothing and are seen by nobody.
        chunks_restart: Chunks are counted from where a document, and the batch element's tokens, begin.

    Raises:
        ValueError: A field is out of range, or documents or lengths are given for two sequences of different lengths.

    Example:
        >>> Visibility(8, 8, causal=True, window=(2, None)).keys_of(5)
        (3, 6)
        >>> Visibility(8, 8, causal=True, documents=(0, 3, 8)).pairs(0, 8)
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
        """Refuses fields that define no mask."""
        for name, numbers in (
            ("window", self.window or ()),
            ("prefix_len", (self.prefix_len,)),
            ("chunk_len", (self.chunk_len,)),
        ):
            if any(x is not None and type(x) is not int for x in numbers):
                raise ValueError(f"{name} must be of integers, got {getattr(self, name)!r}; convert it first")
        if self.seq_len < 1 or self.kv_len < 1:
            raise ValueError(
                f"seq_len and kv_len must be at least 1, got {self.seq_len} and {self.kv_len}; "
                "give the lengths of the whole sequences"
            )
        if self.window is not None:
            _check_window(self.window)
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
        self._bound_widths()

    def _bound_widths(self) -> None:
        longest = max(self.seq_len, self.kv_len)
        if self.window is not None:
            window = tuple(None if side is None else min(side, longest) for side in self.window)
            object.__setattr__(self, "window", window)
        if self.chunk_len is not None:
            object.__setattr__(self, "chunk_len", min(self.chunk_len, longest))
        object.__setattr__(self, "prefix_len", min(self.prefix_len, longest))

    @cached_property
    def _hash(self) -> int:
        return hash((self.seq_len, self.kv_len, self.causal, self.window, self.documents, self.prefix_len,
                     self.chunk_len, self.lengths, self.chunks_restart))  # fmt: skip

    def __hash__(self) -> int:
        return self._hash  # plans are looked up on every call, and documents may be thousands of integers

    def __reduce__(self) -> tuple[type[Visibility], tuple[object, ...]]:
        # copies carry the fields alone: the hash of None, and so the cached one, differs from process to process
        return Visibility, (self.seq_len, self.kv_len, self.causal, self.window, self.documents, self.prefix_len,
                            self.chunk_len, self.lengths, self.chunks_restart)  # fmt: skip

    @property
    def batch_size(self) -> int:
        """Batch elements with bounds of their own; 1 when all share one mask."""
        return 1 if self.lengths is None else len(self.lengths)

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
        self, x: Any, reading: Reading, extent: tuple[Any, Any] | None, algebra: Algebra = _INTEGERS
    ) -> tuple[Any, Any]:
        """The visible positions [lo, hi) of the other side, for a row at global position x (Note [Interval]).

        A row that sees nothing has lo == hi, placed so that neither bound ever decreases: before `start` both are
        start, from `stop` on both are stop.

        Args:
            x: Position of the row, below seq_len (or kv_len when it is a key): an integer or an integer tensor.
            reading: "keys": x is a query and the interval holds keys; "queries": the reverse.
            extent: (start, stop) of the batch element: integers or tensors that broadcast with x; None: everything.
            algebra: The operations for the type of x.
        """
        rows_are_queries = reading == "keys"
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

    def bounds(self, reading: Reading, extent: tuple[int, int] | None = None) -> Bounds:
        """Both bounds of the interval as functions of the row (Note [Pieces]); cached on the mask."""
        key = (reading, extent)
        if key not in self._bounds:
            self._bounds[key] = self._trace(reading, extent)
        return self._bounds[key]

    @cached_property
    def _bounds(self) -> dict[tuple[Reading, tuple[int, int] | None], Bounds]:
        return {}

    def _trace(self, reading: Reading, extent: tuple[int, int] | None) -> Bounds:
        rows, limit = (self.seq_len, self.kv_len) if reading == "keys" else (self.kv_len, self.seq_len)
        back, ahead = None, None
        if self.window is not None:
            back, ahead = self.window if reading == "keys" else self.window[::-1]
        segments = {0}
        if self.documents is not None:
            segments.update(self.documents)
        if extent is not None:
            segments.update(extent)
        if self.chunk_len is not None:
            begins = sorted(segments) if self.chunks_restart else [0]
            for a, b in pairwise([*begins, rows + self.chunk_len]):
                segments.update(range(a, b, self.chunk_len))
        bends = set(segments)
        # a window bends a bound its width after a segment begins and before it ends, in segments that are longer
        for a, b in pairwise([*sorted(segments), rows + limit]):
            if back is not None and a + back < b:
                bends.add(a + back)
            if ahead is not None and b - ahead - 1 > a:
                bends.add(b - ahead - 1)
        for p in (limit, self.prefix_len - 1, self.prefix_len):
            bends.update((p, p + (back or 0), p - (ahead or 0) - 1))
        edges = sorted(p for p in bends if 0 <= p < rows)
        lower, upper = Staircase(rows), Staircase(rows)
        for a, b in zip(edges, [*edges[1:], rows], strict=True):
            lo, hi = self.interval(a, reading, extent)
            lo_last, hi_last = (lo, hi) if b - a == 1 else self.interval(b - 1, reading, extent)
            lower.extend(a, b, lo, lo_last)
            upper.extend(a, b, hi, hi_last)
        return lower, upper

    def pairs(self, a: int, b: int, b_index: int = 0) -> int:
        """Visible pairs of the queries [a, b) of one batch element, exactly; O(log pieces).

        Args:
            a: First query.
            b: One past the last query.
            b_index: The batch element.
        """
        lower, upper = self.bounds("keys", self.extent(b_index))
        return upper.total(b) - upper.total(a) - lower.total(b) + lower.total(a)

    def work(self, a: int, b: int) -> int:
        """Visible pairs of the queries [a, b), summed over batch elements."""
        return sum(self.pairs(a, b, index) for index in range(self.batch_size))

    def count(self, q_run: Run, k_run: Run, b_index: int = 0) -> int:
        """Visible pairs between the queries of one run and the keys of another, exactly, for one batch element."""
        return count_pairs(self.bounds("keys", self.extent(b_index)), [(q_run,)], [(k_run,)])[0][0]


class Staircase:
    """A function of the rows 0 .. rows - 1 that does not decrease: pieces of slope 0 or 1.

    Attributes:
        starts: First row of each piece; one entry more at the end: the number of rows.
        values: Value at the first row of each piece.
        slopes: 0 or 1 per piece.
    """

    def __init__(self, rows: int) -> None:
        self.starts: list[int] = [rows]
        self.values: list[int] = []
        self.slopes: list[int] = []
        self._sums: list[int] = [0]

    def extend(self, a: int, b: int, first: int, last: int) -> None:
        """Adds the rows [a, b), straight from the value `first` to the value `last`, to the end."""
        slope = int(last > first)
        assert last - first == slope * (b - 1 - a), "a bound bends inside a piece"
        self._sums.append(self._sums[-1] + _ramp(first, slope, b - a))
        if self.values:
            rows = a - self.starts[-2]
            step = first - (self.values[-1] + self.slopes[-1] * (rows - 1))
            # one row alone is straight at any slope
            if 0 <= step <= 1 and (rows == 1 or self.slopes[-1] == step) and (b - a == 1 or slope == step):
                self.slopes[-1] = step
                del self._sums[-2]
                return
        self.starts.insert(-1, a)
        self.values.append(first)
        self.slopes.append(slope)

    def piece(self, row: int) -> int:
        """The index of the piece that holds a row."""
        return bisect_right(self.starts, row, 0, len(self.values)) - 1

    def at(self, row: int) -> int:
        """The value at a row."""
        k = self.piece(row)
        return self.values[k] + self.slopes[k] * (row - self.starts[k])

    def total(self, end: int) -> int:
        """The sum of the values of the rows [0, end)."""
        if end == 0:
            return 0
        k = self.piece(end - 1)
        return self._sums[k] + _ramp(self.values[k], self.slopes[k], end - self.starts[k])


class Tally:
    """How many rows of a shard lie below a position, and sums of that over positions."""

    def __init__(self, shard: Shard) -> None:
        self._runs = shard
        self._starts = [run.start for run in shard]
        self._before = [0]
        for run in shard:
            self._before.append(self._before[-1] + run.length)
        self._sums: list[int] = []
        for k, run in enumerate(shard):
            self._sums.append(self._sum_in(k - 1, run.start + 1) if k else 0)

    @property
    def rows(self) -> int:
        """Rows of the shard."""
        return self._before[-1]

    def below(self, position: int) -> int:
        """Rows at positions less than `position`."""
        k = bisect_left(self._starts, position) - 1
        if k < 0:
            return 0
        run = self._runs[k]
        return self._before[k] + min(run.length, (position - 1 - run.start) // run.stride + 1)

    def sum_below(self, position: int, step: int, terms: int) -> int:
        """The sum of `below(position + step * x)` over 0 <= x < terms, in closed form per run."""
        if terms == 1:
            return self.below(position)
        if step == 1:
            return self._sum(position + terms) - self._sum(position)
        nearest = max(0, bisect_left(self._starts, position) - 1)
        total = terms * self._before[nearest]
        for run in self._runs[nearest:]:
            # terms at positions up to the start of a run see none of it; those past its last row see all of it
            some = min(terms, max(0, _ceil_div(run.start + 1 - position, step)))
            if some == terms:
                break
            full = min(terms, max(some, _ceil_div(run.last + 1 - position, step)))
            offset = position + step * some - 1 - run.start
            total += floor_sum(full - some, run.stride, step, offset) + (full - some) + (terms - full) * run.length
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


class Reach:
    """The positions of the other side that at least one row of a shard sees.

    Kept as combs, in order of the rows that see them: positions p in [first, end) with `(p - first) % step < width`.
    Most are solid (step 1); strided rows under a window narrower than the stride leave gaps. Neither first nor end
    decreases from one comb to the next, and what earlier rows see begins no later: the first comb that meets a run has
    the smallest position of it, the last one the greatest.
    """

    def __init__(self, bounds: Bounds, shard: Shard) -> None:
        self._firsts: list[int] = []
        self._ends: list[int] = []
        self._teeth: list[tuple[int, int]] = []
        lower, upper = bounds
        for run in shard:
            x, k, m = 0, lower.piece(run.start), upper.piece(run.start)
            while x < run.length:
                begin = run.start + run.stride * x
                while lower.starts[k + 1] <= begin:
                    k += 1
                while upper.starts[m + 1] <= begin:
                    m += 1
                x = min(run.length, -((run.start - min(lower.starts[k + 1], upper.starts[m + 1])) // run.stride))
                last = run.start + run.stride * (x - 1)
                down, up = lower.slopes[k], upper.slopes[m]
                low, high = lower.values[k] - down * lower.starts[k], upper.values[m] - up * upper.starts[m]
                # an interval that widens may be empty on its first row, one that narrows on its last
                if up > down and low + down * begin == high + up * begin:
                    begin += run.stride
                elif up < down and low + down * last == high + up * last:
                    last -= run.stride
                first, width = low + down * begin, high + up * begin - low - down * begin
                if begin <= last and width:
                    gaps = down and up and width < run.stride and begin < last
                    self._add(first, high + up * last, (run.stride, width) if gaps else (1, 1))

    def _add(self, first: int, end: int, teeth: tuple[int, int]) -> None:
        solid = teeth == (1, 1)
        if solid and self._ends and self._teeth[-1] == teeth and first <= self._ends[-1]:
            self._ends[-1] = end
            return
        self._firsts.append(first)
        self._ends.append(end)
        self._teeth.append(teeth)

    def span(self, run: Run) -> tuple[int, int] | None:
        """The rows of a run from the first to the last that is seen, as (offset, length); None when none is."""
        first = self._first(run)
        return None if first is None else (first, self._last(run) - first + 1)

    def _first(self, run: Run) -> int | None:
        for k in range(bisect_right(self._ends, run.start), len(self._ends)):
            if self._firsts[k] > run.last:
                return None
            step, width = self._teeth[k]
            y = max(0, _ceil_div(self._firsts[k] - run.start, run.stride))
            # the run's place between the teeth repeats after at most `step` rows
            for row in range(y, min(y + step, run.length)):
                offset = run.start + run.stride * row - self._firsts[k]
                if offset >= self._ends[k] - self._firsts[k]:
                    break
                if offset % step < width:
                    return row
        return None

    def _last(self, run: Run) -> int:
        for k in range(bisect_right(self._firsts, run.last) - 1, -1, -1):
            step, width = self._teeth[k]
            y = min(run.length - 1, (self._ends[k] - 1 - run.start) // run.stride)
            for row in range(y, max(y - step, -1), -1):
                offset = run.start + run.stride * row - self._firsts[k]
                if offset < 0:
                    break
                if offset % step < width:
                    return row
        raise AssertionError("a run with a first seen row has a last one")


def count_pairs(bounds: Bounds, rows: Sequence[Shard], others: Sequence[Shard]) -> list[list[int]]:
    """Visible pairs between every shard of rows and every shard of the other side.

    Row x of one side sees [lower(x), upper(x)) of the other, so its pairs with a shard are the shard's rows below
    upper(x) less those below lower(x): sums of tallies along the pieces of the bounds.

    Args:
        bounds: The bounds of the rows (`Visibility.bounds`).
        rows: Shards of the side that the bounds belong to.
        others: Shards of the side that is seen.

    Returns:
        `counts[r][o]`: pairs between `rows[r]` and `others[o]`.
    """
    tallies = [Tally(shard) for shard in others]
    columns: dict[int, list[int]] = {}
    counts = [[0] * len(others) for _ in rows]
    for sign, bound in zip((-1, 1), bounds, strict=True):
        starts, values, slopes = bound.starts, bound.values, bound.slopes
        for shard, row in zip(rows, counts, strict=True):
            for run in shard:
                x, k = 0, bound.piece(run.start)
                while x < run.length:
                    begin = run.start + run.stride * x
                    while starts[k + 1] <= begin:
                        k += 1
                    x_end = min(run.length, -((run.start - starts[k + 1]) // run.stride))
                    terms = x_end - x
                    if slopes[k]:
                        value = values[k] + begin - starts[k]
                        for o, tally in enumerate(tallies):
                            row[o] += sign * tally.sum_below(value, run.stride, terms)
                    else:
                        value = values[k]
                        column = columns.get(value)
                        if column is None:
                            column = columns[value] = [tally.below(value) for tally in tallies]
                        terms *= sign
                        for o, below in enumerate(column):
                            row[o] += terms * below
                    x = x_end
    return counts


def floor_sum(terms: int, modulus: int, slope: int, offset: int) -> int:
    """The sum of `(slope * x + offset) // modulus` over 0 <= x < terms; slope, offset >= 0; O(log modulus).

    Whole multiples of the modulus come out of slope and offset. What is left counts the lattice points under a line;
    counted by rows from the far end instead of by columns, slope and modulus swap, as in Euclid's algorithm.

    Example:
        >>> floor_sum(4, 3, 2, 1)  # 0 + 1 + 1 + 2
        4
    """
    total = 0
    while terms > 0:
        whole, slope = divmod(slope, modulus)
        total += whole * (terms * (terms - 1) // 2)
        whole, offset = divmod(offset, modulus)
        total += whole * terms
        height, rest = divmod(slope * terms + offset, modulus)
        terms, modulus, slope, offset = height, slope, modulus, rest
    return total


def check_documents(documents: tuple[int, ...], seq_len: int) -> None:
    """Refuses boundaries that do not divide seq_len tokens."""
    if len(documents) < 2 or documents[0] != 0 or documents[-1] != seq_len:
        shown = f"{documents[0]}, ..., {documents[-1]}" if documents else "nothing"
        raise ValueError(
            f"documents must be boundaries that start at 0 and end at seq_len {seq_len}, got {shown}; "
            "pass cumulative lengths, and count padding as a document of its own"
        )
    for k in range(len(documents) - 1):
        if documents[k] > documents[k + 1]:
            raise ValueError(
                f"documents must not decrease, got {documents[k]} then {documents[k + 1]} at index {k}; "
                "pass cumulative lengths"
            )


def _check_window(window: tuple[int | None, int | None]) -> None:
    if len(window) != 2:
        raise ValueError(f"window must be (left, right), got {window}; None on a side means unbounded")
    for side in window:
        if side is not None and side < 0:
            raise ValueError(f"window must have sides of at least 0 or None, got {window}; None means unbounded")


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


def _ramp(first: int, slope: int, terms: int) -> int:
    return first * terms + slope * (terms * (terms - 1) // 2)


def _ceil_div(x: int, y: int) -> int:
    return -(-x // y)
