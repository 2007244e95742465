"""Decomposition of the visible pairs of a ring step into shapes that torch's attention operators compute, as integers.

Rows and keys are counted here in their buffers, not by positions. Row x sees the keys lo[x] <= y < hi[x], and neither bound
decreases. Rows whose bounds both move evenly, by 0 or 1 key per row, are a `Line`. Two decompositions begin from lines:

    bands  for operators with windows: lines are joined into bands, and adjacent bands with equal windows into one call of
           variable lengths.
    tiles  for operators without: each line is cut into full rectangles and triangles of as many keys as rows.

Both hold every visible pair exactly once. Their cost is in lines, not in rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Line:
    """Rows start <= x < stop that see lo + lo_slope * (x - start) <= y < hi + hi_slope * (x - start); slopes are 0 or 1."""

    start: int
    stop: int
    lo: int
    lo_slope: int
    hi: int
    hi_slope: int

    @property
    def last_hi(self) -> int:
        """The upper bound of the last row."""
        return self.hi + self.hi_slope * (self.stop - self.start - 1)

    def rows(self, first: int, end: int) -> Line:
        """The part of rows first to end - 1, counted from the first row of the line."""
        lo, hi = self.lo + self.lo_slope * first, self.hi + self.hi_slope * first
        return replace(self, start=self.start + first, stop=self.start + end, lo=lo, hi=hi)


@dataclass(frozen=True)
class Band:
    """Rows of a rectangle that see its keys between two diagonals.

    Row x of rows[0] <= x < rows[1] sees the keys max(keys[0], x + lower) <= y < min(keys[1], x + upper), at least one; None
    is no diagonal.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    lower: int | None = None
    upper: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and of keys."""
        return self.rows[1] - self.rows[0], self.keys[1] - self.keys[0]

    @property
    def window(self) -> tuple[int | None, int | None]:
        """(left, right) of a window that is aligned to the last row and the last key; None is unbounded.

        Row i of s sees the keys i + t - s - left <= j <= i + t - s + right of t.

        Example:
            >>> Band((0, 4), (0, 6), lower=None, upper=3).window  # causal: the last row sees all 6 keys
            (None, 0)
        """
        s, t = self.shape
        shift = self.rows[0] - self.keys[0]
        left = None if self.lower is None else t - s - self.lower - shift
        return left, None if self.upper is None else self.upper + shift - 1 - t + s


@dataclass(frozen=True)
class Call:
    """Bands with one window that adjoin in rows and in keys: one call, of variable lengths where there are several."""

    bands: tuple[Band, ...]
    window: tuple[int | None, int | None]

    @property
    def rows(self) -> tuple[int, int]:
        """First row, and one past the last."""
        return self.bands[0].rows[0], self.bands[-1].rows[1]

    @property
    def keys(self) -> tuple[int, int]:
        """First key, and one past the last."""
        return self.bands[0].keys[0], self.bands[-1].keys[1]


@dataclass(frozen=True)
class Tile:
    """A full rectangle, or a triangle of as many keys as rows.

    Attributes:
        kind: "full"; "lower": row i sees the keys j <= i of the tile; "upper": j >= i.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    kind: Literal["full", "lower", "upper"]


def lines(lo: Sequence[int], hi: Sequence[int], changes: Sequence[int]) -> list[Line]:
    """Return the lines of all rows that see a key.

    Args:
        lo: First visible key of each row, by index; read at few rows.
        hi: One past the last.
        changes: Ascending rows x at which (lo[x + 1] - lo[x], hi[x + 1] - hi[x]) differs from that of row x - 1.

    Example:
        >>> lines([0, 0, 0, 3], [1, 2, 3, 4], [2])
        [Line(start=0, stop=3, lo=0, lo_slope=0, hi=1, hi_slope=1), Line(start=3, stop=4, lo=3, lo_slope=0, hi=4, hi_slope=0)]
    """
    found, start, n, ahead = list[Line](), 0, len(lo), 0
    while start < n:
        while ahead < len(changes) and changes[ahead] <= start:
            ahead += 1
        slopes = (lo[start + 1] - lo[start], hi[start + 1] - hi[start]) if start + 1 < n else (0, 0)
        if start + 1 == n or max(slopes) > 1:
            slopes, stop = (0, 0), start + 1
        else:
            stop = changes[ahead] + 1 if ahead < len(changes) else n
        whole = Line(start, stop, lo[start], slopes[0], hi[start], slopes[1])
        if (seeing := _seeing(whole)) is not None:
            found.append(seeing)
        start = stop
    return found


def _seeing(line: Line) -> Line | None:
    num, width = line.stop - line.start, line.hi - line.lo
    if line.lo_slope == line.hi_slope:
        return line if width > 0 else None
    if line.hi_slope:
        first = max(0, 1 - width)
        return line.rows(first, num) if first < num else None
    end = min(num, width)
    return line.rows(0, end) if end > 0 else None


def calls(given: Sequence[Line]) -> list[Call]:
    """Return calls of operators that have windows and variable lengths.

    Example:
        >>> [call.window for call in calls([Line(0, 3, 0, 0, 1, 1), Line(3, 9, 0, 1, 4, 1)])]  # a causal window of 4 keys
        [(3, 0)]
    """
    found = list[Call]()
    for band in _bands(given):
        joined = _append(found[-1], band) if found else None
        if joined is None:
            found.append(Call((band,), band.window))
        else:
            found[-1] = joined
    return found


def _bands(given: Sequence[Line]) -> Iterator[Band]:
    """Lines joined into bands, as far as they continue each other."""
    band: Band | None = None
    for line in given:
        longer = None if band is None else _extend(band, line)
        if longer is None:
            if band is not None:
                yield band
            num = line.stop - line.start
            lower = line.lo - line.start if line.lo_slope and num > 1 else None
            upper = line.hi - line.start if line.hi_slope and num > 1 else None
            longer = Band((line.start, line.stop), (line.lo, line.last_hi), lower, upper)
        band = longer
    if band is not None:
        yield band


def _extend(band: Band, line: Line) -> Band | None:
    """The band with the rows of a line behind its own; None: together they are no band."""
    (first, end), (bottom, top) = band.rows, band.keys
    if line.start != end:
        return None
    single = line.stop - line.start == 1
    lower = band.lower
    if lower is None and (line.lo != bottom or (line.lo_slope and not single)):
        # the lower bound begins to move: row end - 1 still saw `bottom`
        lower = line.lo - line.start if line.lo in (bottom, bottom + 1) and (line.lo_slope or single) else None
        if lower is None:
            return None
    elif lower is not None and (line.lo != line.start + lower or not (line.lo_slope or single)):
        return None
    upper = band.upper
    if upper is None and end - first == 1 and line.hi == top + 1:
        upper = top - first
    at_diagonal = upper is not None and top == end - 1 + upper
    moves = at_diagonal and upper is not None and line.hi == line.start + upper and bool(line.hi_slope or single)
    stays = not (line.hi_slope and not single) and (line.hi == top or (at_diagonal and line.hi == top + 1))
    if not (moves or stays):
        return None
    longer = Band((first, line.stop), (bottom, line.last_hi), lower, upper)
    return longer if _has_exact_window((longer,), longer.window) else None


def _has_exact_window(bands: Sequence[Band], window: tuple[int | None, int | None]) -> bool:
    """Return whether a window has one meaning to the operators.

    To flash, a right side of at least the number of keys is unbounded, and an unbounded right side of a window with a left side
    is the number of keys.
    """
    left, right = window
    most = max(band.shape[1] for band in bands)
    if right is not None:
        return right < most
    return left is None or all(band.shape[0] <= most + 1 for band in bands)


def _append(call: Call, band: Band) -> Call | None:
    """The call with a band behind its own; None: it needs a call of its own."""
    if call.rows[1] != band.rows[0] or call.keys[1] != band.keys[0]:
        return None
    bands = (*call.bands, band)
    sides = list[int | None]()
    for side in (0, 1):
        exact = {one.window[side] for one in bands} - {None}
        # a band without a diagonal on this side bears any window that its corner lies within
        least = max((one.shape[1 - side] - 1 for one in bands if one.window[side] is None), default=0)
        if len(exact) > 1 or any(one is not None and one < least for one in exact):
            return None
        sides.append(exact.pop() if exact else None)
    window = sides[0], sides[1]
    return Call(bands, window) if _has_exact_window(bands, window) else None


def tiles(given: Sequence[Line]) -> Iterator[Tile]:
    """Yield tiles for operators that know a full rectangle and a square causal mask.

    Example:
        >>> [tile.kind for tile in tiles([Line(0, 4, 0, 0, 3, 1)])]  # causal, with 2 keys more than rows
        ['full', 'lower']
    """
    for line in given:
        num, width = line.stop - line.start, line.hi - line.lo
        # both bounds move: squares of the width, each an upper and a lower triangle
        step = width if line.lo_slope and line.hi_slope else num
        for first in range(0, num, step):
            yield from _cut(line.rows(first, min(num, first + step)))


def _cut(line: Line) -> Iterator[Tile]:
    """Tiles of a line of at most as many rows as its first row sees keys, where the lower bound moves."""
    num, rows = line.stop - line.start, (line.start, line.stop)
    begin, end = line.lo, line.hi - line.hi_slope
    if num == 1:
        yield Tile(rows, (line.lo, line.hi), "full")
        return
    if line.lo_slope:
        yield Tile(rows, (begin, begin + num), "upper")
        begin, end = begin + num, line.hi
    if end > begin:
        yield Tile(rows, (begin, end), "full")
    if line.hi_slope:
        skipped = line.lo_slope  # the first row of a window sees nothing beyond its width
        yield Tile((line.start + skipped, line.stop), (end, end + num - skipped), "lower")
