"""Bands and tiles hold every visible pair of a ring step exactly once, as integers against a dense mask."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.kernels.attention.torch_ops.bands import Call, Line, Tile, calls, lines, tiles
from tests.support.random_masks import layouts, masks, positions
from tests.support.random_masks import seen as seen_by
from tests.support.short_mask import ShortMask

Pairs = list[tuple[int, int]]


def lines_of(lo: list[int], hi: list[int]) -> list[Line]:
    moves = list(
        zip((b - a for a, b in itertools.pairwise(lo)), (b - a for a, b in itertools.pairwise(hi)), strict=True)
    )
    return lines(lo, hi, [x for x in range(1, len(moves)) if moves[x] != moves[x - 1]])


def pairs_of_call(call: Call) -> Pairs:
    """The pairs that an operator with a window aligned to the last row and key computes, band by band."""
    left, right = call.window
    found: Pairs = []
    for band in call.bands:
        s, t = band.shape
        # operators read a side of as many keys as there are as unbounded, and an unbounded side of a window as so many keys
        most = max(one.shape[1] for one in call.bands)
        lower = None if left is None or left >= most else left
        upper = None if right is None or right >= most else right
        if lower is not None or upper not in (None, 0):
            lower, upper = (most if side is None else side for side in (lower, upper))
        for i, j in itertools.product(range(s), range(t)):
            at = j - (i + t - s)
            if (lower is None or at >= -lower) and (upper is None or at <= upper):
                found.append((band.rows[0] + i, band.keys[0] + j))
    return found


def pairs_of_tile(tile: Tile) -> Pairs:
    s, t = tile.rows[1] - tile.rows[0], tile.keys[1] - tile.keys[0]
    assert tile.kind == "full" or s == t, "triangles are square"
    seen = {"full": lambda i, j: True, "lower": lambda i, j: j <= i, "upper": lambda i, j: j >= i}[tile.kind]
    pairs = itertools.product(range(s), range(t))
    return [(tile.rows[0] + i, tile.keys[0] + j) for i, j in pairs if seen(i, j)]


def assert_exactly_once(lo: list[int], hi: list[int]) -> None:
    expected = [(x, y) for x, (a, e) in enumerate(zip(lo, hi, strict=True)) for y in range(a, e)]
    found = lines_of(lo, hi)
    assert sorted(pair for call in calls(found) for pair in pairs_of_call(call)) == expected
    assert sorted(pair for tile in tiles(found) for pair in pairs_of_tile(tile)) == expected
    for call in calls(found):
        for band in call.bands:
            for x in range(*band.rows):
                assert lo[x] < hi[x], "every row of a call sees a key"


@st.composite
def bounds(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Bounds that never decrease, mostly by even steps, and rows that see nothing."""
    lo, hi, a, e = [], [], draw(st.integers(0, 3)), draw(st.integers(0, 6))
    for _ in range(draw(st.integers(1, 5))):
        slopes = draw(st.tuples(st.sampled_from([0, 0, 1, 1, 2]), st.sampled_from([0, 0, 1, 1, 2])))
        for _ in range(draw(st.integers(1, 6))):
            e = max(a, e)
            lo.append(a)
            hi.append(e)
            a, e = a + slopes[0], e + slopes[1]
        a, e = a + draw(st.integers(0, 3)) - slopes[0], e + draw(st.integers(0, 3)) - slopes[1]
        a, e = max(a, lo[-1]), max(e, hi[-1])
    return lo, hi


@settings(max_examples=300, deadline=None)
@given(bounds())
def test_every_visible_pair_is_computed_exactly_once(drawn: tuple[list[int], list[int]]) -> None:
    assert_exactly_once(*drawn)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Bounds of the rows of one rank in the keys of another, under any mask and layout of the library."""
    mask: ShortMask = draw(masks(cross=False))
    world_size = draw(st.integers(1, 4))
    shards = draw(layouts(mask.seq_len, world_size))
    rows, keys = (positions(shards[draw(st.integers(0, world_size - 1))]) for _ in range(2))
    seen = [seen_by(mask, "keys", i) for i in rows]
    return ([sum(j < lo for j in keys) for lo, _ in seen], [sum(j < hi for j in keys) for _, hi in seen])


@settings(max_examples=150, deadline=None)
@given(steps())
def test_every_visible_pair_of_a_ring_step_is_computed_exactly_once(drawn: tuple[list[int], list[int]]) -> None:
    assert_exactly_once(*drawn)


@pytest.mark.parametrize(
    ("lo", "hi", "windows", "kinds"),
    [
        ([0] * 4, [4] * 4, [(None, None)], ["full"]),
        ([0] * 4, [1, 2, 3, 4], [(None, 0)], ["lower"]),
        ([0] * 4, [3, 4, 5, 6], [(None, 0)], ["full", "lower"]),
        ([0, 0, 0, 1, 2, 3], [1, 2, 3, 4, 5, 6], [(2, 0)], ["lower", "upper", "lower"]),
        ([0, 0, 1, 2, 3, 4], [2, 3, 4, 5, 6, 6], [(1, 1)], None),
        ([0, 0, 0, 3, 3, 5], [1, 2, 3, 4, 5, 6], [(None, 0)], ["lower", "lower", "full"]),
        ([0, 0, 2, 2, 2], [2, 2, 5, 5, 5], [(None, None)], ["full", "full"]),
        ([0] * 4 + [1], [2] * 5, [(None, None), (None, None)], ["full", "full"]),
        ([0, 0], [0, 0], [], []),
    ],
    ids=[
        "full",
        "causal",
        "more keys",
        "window",
        "both sides",
        "documents",
        "full documents",
        "few keys that leave",
        "nothing",
    ],
)
def test_common_masks_are_one_call(
    lo: list[int], hi: list[int], windows: list[tuple[int | None, int | None]], kinds: list[str] | None
) -> None:
    found = lines_of(lo, hi)
    assert [call.window for call in calls(found)] == windows
    if kinds is not None:
        assert [tile.kind for tile in tiles(found)] == kinds


def test_the_cost_is_in_lines_not_in_rows() -> None:
    num = 10**9
    assert len(calls(lines(range(num), range(1, num + 1), []))) == 1
    assert len(list(tiles([Line(0, num, 0, 0, 1, 1)]))) == 1
