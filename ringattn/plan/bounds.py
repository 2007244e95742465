"""Functions of rows that never decrease and are straight in pieces, and the arithmetic of pairs of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import accumulate, combinations, pairwise
from operator import sub

Bounds = tuple["PiecewiseBound", "PiecewiseBound"]
"""The interval [lower, upper) of each row; lower <= upper, and neither decreases."""


class PiecewiseBound:
    """A function of the rows 0 .. rows - 1 that does not decrease: pieces of slope 0 or 1."""

    def __init__(self) -> None:
        self.starts: list[int] = [0]
        self.values: list[int] = []
        self.slopes: list[int] = []

    def append(self, rows: int, first: int, slope: int) -> None:
        """Add rows to the end, straight from the value `first` on."""
        starts, values, slopes = self.starts, self.values, self.slopes
        if values:
            before = starts[-1] - starts[-2]
            step = first - values[-1] - slopes[-1] * (before - 1)
            # rows that continue the last piece lengthen it; one row alone is straight at any slope
            if 0 <= step <= 1 and (before == 1 or slopes[-1] == step) and (rows == 1 or slope == step):
                slopes[-1] = step
                starts[-1] += rows
                return
        values.append(first)
        slopes.append(slope if rows > 1 else 0)
        starts.append(starts[-1] + rows)

    @cached_property
    def _sums(self) -> list[int]:
        """The sum of the values of all rows before each piece."""
        lengths = map(sub, self.starts[1:], self.starts)
        return list(accumulate(map(ramp, self.values, self.slopes, lengths), initial=0))

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
        return self._sums[k] + ramp(self.values[k], self.slopes[k], end - self.starts[k])

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.starts[-1]

    def inverse(self, values: int) -> PiecewiseBound:
        """`first_above` as a function of the values 0 .. values - 1; values of this function are at most `values`."""
        found = PiecewiseBound()
        for start, end, value, slope in zip(self.starts, self.starts[1:], self.values, self.slopes, strict=False):
            if value > found.rows:
                found.append(value - found.rows, start, 0)
            if slope and end - start > 1:
                found.append(end - start - 1, start + 1, 1)
        if found.rows < values:
            found.append(values - found.rows, self.rows, 0)
        return found


def ramp(first: int, slope: int, number: int) -> int:
    """The sum of `number` values from `first` on."""
    return first * number + slope * (number * (number - 1) // 2)


def ceil_div(x: int, y: int) -> int:
    """The quotient, rounded up."""
    return -(-x // y)


def constant(rows: int, value: int) -> PiecewiseBound:
    """Return a function with one value."""
    return from_pieces([(rows, value, 0)])


def from_pieces(pieces: list[tuple[int, int, int]]) -> PiecewiseBound:
    """Return a function of (rows, first value, slope) in order; pieces without rows are left out."""
    found = PiecewiseBound()
    for rows, first, slope in pieces:
        if rows > 0:
            found.append(rows, first, slope)
    return found


def cells(*functions: PiecewiseBound) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """(rows, first values, slopes) of stretches on which all functions are straight and their order does not change."""
    places = [0] * len(functions)
    start, rows = 0, functions[0].rows
    while start < rows:
        end = min(f.starts[k + 1] for f, k in zip(functions, places, strict=True))
        slopes = tuple(f.slopes[k] for f, k in zip(functions, places, strict=True))
        values = [f.values[k] + f.slopes[k] * (start - f.starts[k]) for f, k in zip(functions, places, strict=True)]
        cuts = {0, end - start}
        for x, y in combinations(range(len(functions)), 2):
            if slopes[x] != slopes[y]:
                equal = abs(values[x] - values[y]) if (values[x] > values[y]) == (slopes[y] > slopes[x]) else 0
                cuts.update(cut for cut in (equal, equal + 1) if cut < end - start)
        for a, b in pairwise(sorted(cuts)):
            yield b - a, tuple(v + s * a for v, s in zip(values, slopes, strict=True)), slopes
        start = end
        places = [k + (f.starts[k + 1] == end) for f, k in zip(functions, places, strict=True)]


def larger(f: PiecewiseBound, g: PiecewiseBound) -> PiecewiseBound:
    """The larger of two functions, row by row."""
    return from_pieces([(n, max(v), s[v[1] > v[0]]) for n, v, s in cells(f, g)])


def smaller(f: PiecewiseBound, g: PiecewiseBound) -> PiecewiseBound:
    """The smaller of two functions, row by row."""
    return from_pieces([(n, min(v), s[v[1] < v[0]]) for n, v, s in cells(f, g)])


def clamp(f: PiecewiseBound, stretches: Iterable[tuple[int, int]]) -> PiecewiseBound:
    """A function whose values at the rows of each [a, e), which are all rows in order, are raised to a and lowered to e."""
    found, k = PiecewiseBound(), 0
    starts, values, slopes = f.starts, f.values, f.slopes
    for start, stop in stretches:
        a = start
        while start < stop:
            while starts[k + 1] <= start:
                k += 1
            value, slope, rows = (
                values[k] + slopes[k] * (start - starts[k]),
                slopes[k],
                min(stop, starts[k + 1]) - start,
            )
            if slope and value < a:
                rows, slope = min(rows, a - value), 0
            elif slope and value < stop:
                rows = min(rows, stop - value)
            else:
                slope = 0
            value = min(max(value, a), stop)
            found.append(rows, value, slope)
            start += rows
    return found


def intersect(a: Bounds, b: Bounds) -> Bounds:
    """The interval that both show."""
    lower = larger(a[0], b[0])
    return lower, larger(lower, smaller(a[1], b[1]))


def subtract(a: Bounds, b: Bounds) -> tuple[Bounds, Bounds]:
    """The pairs of a that b does not show: those before it and those after it."""
    after = larger(a[0], b[1])
    return (a[0], larger(a[0], smaller(a[1], b[0]))), (after, larger(after, a[1]))


def merge_touching(a: Bounds, b: Bounds) -> Bounds | None:
    """The union of two intervals where they overlap or touch on each row that sees both; None where they do not."""
    lower, upper = PiecewiseBound(), PiecewiseBound()
    lo_last = hi_last = 0
    for rows, (a_lo, a_hi, b_lo, b_hi), (sa_lo, sa_hi, sb_lo, sb_hi) in cells(*a, *b):
        if a_lo == a_hi and b_lo == b_hi:
            lo, hi = (hi_last, 0), (hi_last, 0)
        elif a_lo == a_hi or b_lo == b_hi:
            lo, hi = ((b_lo, sb_lo), (b_hi, sb_hi)) if a_lo == a_hi else ((a_lo, sa_lo), (a_hi, sa_hi))
        elif a_lo <= b_hi and b_lo <= a_hi:
            lo, hi = min((a_lo, sa_lo), (b_lo, sb_lo)), max((a_hi, sa_hi), (b_hi, sb_hi))
        else:
            return None
        if lo[0] < lo_last or hi[0] < hi_last:
            return None
        lo_last, hi_last = lo[0] + lo[1] * (rows - 1), hi[0] + hi[1] * (rows - 1)
        lower.append(rows, *lo)
        upper.append(rows, *hi)
    return lower, upper


def count(bounds: Bounds, a: int, b: int) -> int:
    """Pairs of the rows [a, b)."""
    lower, upper = bounds
    return upper.total(b) - upper.total(a) - lower.total(b) + lower.total(a)
