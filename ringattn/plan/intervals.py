"""Intervals of keys per query: bounds, the terms of a mask that they make, and counts of the pairs that terms show.

Note [Mask terms]
    A mask is a union of disjoint *terms*. A term is one interval of keys per query, [lower, upper), neither of which
    decreases with the query, perhaps cut by a table of blocks. Partials over disjoint sets of keys merge in any order
    (`numerics/partial.py`), so terms are computed like further ring steps and nothing is counted twice.
    The intersection of two terms is one. A union keeps the terms it has and adds of each new one what none of them shows:
    the pairs before and after their interval. Terms that overlap or touch on every row become one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, combinations, pairwise
from operator import sub
from typing import NamedTuple

from ringattn.plan.block_pattern import BlockPattern
from ringattn.plan.layouts import Run, Shard

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
        kept, term = _merge_one(found, term)
        # what has grown may touch terms that did not touch it before
        while len(kept) < len(found):
            found = kept
            kept, term = _merge_one(found, term)
        if not term.is_empty:
            found.append(term)
    return found


def _merge_one(disjoint: list[Term], new: Term) -> tuple[list[Term], Term]:
    """Return the terms that a new one does not touch, and the new one joined with the others."""
    kept = []
    for term in disjoint:
        joined = merge_touching(term.bounds, new.bounds) if term.pattern == new.pattern else None
        if joined is None:
            kept.append(term)
        else:
            new = Term(joined, new.pattern)
    return kept, new


def count_term(term: Term, a: int, b: int) -> int:
    """Visible pairs of the queries [a, b)."""
    if term.pattern is None:
        lower, upper = term.bounds
        return upper.total(b) - upper.total(a) - lower.total(b) + lower.total(a)
    every = (Run(0, 1, term.pattern.columns * term.pattern.block_size),)
    return count_term_pairs(term, [(Run(a, 1, b - a),)], [every])[0][0]


def both(a: Term, b: Term) -> Term:
    """The pairs that two terms show."""
    pattern = a.pattern if b.pattern is None else b.pattern if a.pattern is None else a.pattern.both(b.pattern)
    return Term(intersect(a.bounds, b.bounds), pattern)


def united(disjoint: list[Term], new: Term) -> list[Term]:
    """Add to disjoint terms what they do not show of another."""
    kept, new = _merge_one(disjoint, new)
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
            some = min(number, max(0, ceil_div(run.start + 1 - position, step)))
            if some == number:
                break
            full = min(number, max(some, ceil_div(run.last + 1 - position, step)))
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

    def spans(self, run: Run) -> list[tuple[int, int]]:
        """The rows of a run from the first to the last that is seen, as (offset, length); none when none is."""
        first = self._first(run)
        return [] if first is None else [(first, self._last(run) - first + 1)]

    def intervals(self) -> Iterator[tuple[int, int]]:
        """All positions that are seen, as [first, end); gaps narrower than a stride of rows count as seen."""
        return ((first, end) for first, end, _, _ in self._intervals_from(0))

    def _first(self, run: Run) -> int | None:
        for first, end, step, width in self._intervals_from(self._bounds[1].first_above(run.start)):
            if first > run.last:
                return None
            y = max(0, ceil_div(first - run.start, run.stride))
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
            x = max(0, ceil_div(row - run.start, run.stride))
            while x < run.length:
                begin = run.start + run.stride * x
                k, m = lower.piece(begin), upper.piece(begin)
                x = min(run.length, ceil_div(min(lower.starts[k + 1], upper.starts[m + 1]) - run.start, run.stride))
                yield from self._interval(begin, run.start + run.stride * (x - 1), run.stride, k, m)

    def _intervals_to(self, row: int) -> Iterator[tuple[int, int, int, int]]:
        """`_intervals_from` backwards, from the last row of the shard at or before a row on."""
        lower, upper = self._bounds
        for run in reversed(self._shard[: bisect_right(self._starts, row)]):
            x = min(run.length - 1, (row - run.start) // run.stride)
            while x >= 0:
                last = run.start + run.stride * x
                k, m = lower.piece(last), upper.piece(last)
                x = max(0, ceil_div(max(lower.starts[k], upper.starts[m]) - run.start, run.stride))
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


class SeenRows:
    """The positions that one shard sees through the terms of a mask, as disjoint intervals."""

    def __init__(self, of_mask: Sequence[Term], shard: Shard) -> None:
        found = sorted(span for term in of_mask for span in _seen(term, shard))
        self._firsts: list[int] = []
        self._ends: list[int] = []
        for first, end in found:
            if self._ends and first <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._firsts.append(first)
                self._ends.append(end)

    def spans(self, run: Run) -> list[tuple[int, int]]:
        """The rows of a run that are seen, as (offset, length)."""
        found = []
        for k in range(bisect_right(self._ends, run.start), bisect_right(self._firsts, run.last)):
            begin = max(0, ceil_div(self._firsts[k] - run.start, run.stride))
            end = min(run.length, ceil_div(self._ends[k] - run.start, run.stride))
            if begin < end:
                found.append((begin, end - begin))
        return found


def _seen(term: Term, shard: Shard) -> Iterator[tuple[int, int]]:
    if term.pattern is None:
        yield from VisibleSpan(term.bounds, shard).intervals()
        return
    for index, part in _by_block(shard, term.pattern.block_size):
        for first, end in VisibleSpan(term.bounds, (part,)).intervals():
            for begin, stop in term.pattern.spans[index]:
                if begin < end and first < stop:
                    yield max(first, begin), min(end, stop)


def _by_block(shard: Shard, size: int) -> Iterator[tuple[int, Run]]:
    """Cut runs where blocks of positions end; (block, part of a run)."""
    for run in shard:
        x = 0
        while x < run.length:
            index = run.position(x) // size
            end = min(run.length, ceil_div((index + 1) * size - run.start, run.stride))
            yield index, Run(run.position(x), run.stride, end - x)
            x = end


def count_term_pairs(term: Term, rows: Sequence[Shard], others: Sequence[Shard]) -> list[list[int]]:
    """Count the visible pairs of one term between every shard of rows and every shard of the other side.

    Returns:
        `counts[r][o]`: pairs between `rows[r]` and `others[o]`.
    """
    if term.pattern is None:
        return count_pairs(term.bounds, rows, others)
    counts = [[0] * len(others) for _ in rows]
    lower, upper = term.bounds
    tallies = [Tally(shard) for shard in others]
    within = [(shard[0].start, shard[-1].last + 1) if shard else (0, 0) for shard in others]
    for shard, row in zip(rows, counts, strict=True):
        for index, part in _by_block(shard, term.pattern.block_size):
            lows = [lower.at(part.position(x)) for x in range(part.length)]
            highs = [upper.at(part.position(x)) for x in range(part.length)]
            for begin, end in term.pattern.spans[index]:
                if begin >= highs[-1] or end <= lows[0]:
                    continue
                whole = lows[-1] <= begin and end <= highs[0]
                for o, (tally, (first, stop)) in enumerate(zip(tallies, within, strict=True)):
                    if first >= end or stop <= begin:
                        continue
                    if whole:
                        row[o] += part.length * (tally.below(end) - tally.below(begin))
                    else:
                        row[o] += sum(
                            max(0, tally.below(min(high, end)) - tally.below(max(low, begin)))
                            for low, high in zip(lows, highs, strict=True)
                        )
    return counts


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
            number = ceil_div(length - first, modulus) if first < length else 0
            if number:
                value = begin + ahead + slope * first - 1 + modulus
                rest = wholes * number + times * ramp(0, slope, number)
                for o, least in enumerate(classes):
                    row[o] += sign * (times * number * ((value - least) // modulus) + rest)


def _add_pieces(
    counts: list[list[int]], sign: int, bound: PiecewiseBound, rows: Sequence[Shard], others: Sequence[Shard]
) -> None:
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
        total += ramp(0, whole, number)
        whole, offset = divmod(offset, modulus)
        total += whole * number
        height, rest = divmod(slope * number + offset, modulus)
        number, modulus, slope, offset = height, slope, modulus, rest
    return total
