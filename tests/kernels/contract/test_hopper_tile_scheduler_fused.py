"""Plans whose tiles are rows of several owners: every visible pair once, no tile of two owners, in order of arrival."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringattn.kernels.attention.hopper.tile_scheduler import SHORT, Shape, WorkPlan, schedule_tiles
from tests.support.fused_cases import Sources, gather_sources, shards_of
from tests.support.kernel_conformance import Runs
from tests.support.random_masks import is_visible, layouts, masks
from tests.support.short_mask import ShortMask
from tests.support.term_masks import TermMask, any_term_mask


def assert_lawful(plan: WorkPlan, sources: Sources, shape: Shape, visible: Tensor, terms: Tensor | None = None) -> None:
    """Whatever must hold for any plan whose tiles are rows of the sources.

    Args:
        visible: `b n n`.
        terms: `terms b n n`: the intervals of each term, which are all that a masked block hides by; None: one term.
    """
    work, segments = plan.work.tolist(), plan.segments.tolist()
    sides, queries = sources.keys.sides, sources.rows.positions.tolist()
    ends = [(begin, begin + len(places)) for begin, places in zip(first_rows(sources), sources.places, strict=True)]
    counts = [torch.zeros(shape.batch * shape.heads, len(x), len(queries), dtype=torch.int64) for x in sources.places]
    tiles: dict[tuple[int, int, int], list[int]] = {}
    for line, (side, step, begin, end) in zip(work, plan.tiles.tolist(), strict=True):
        head, row, segment, masked, full, _, _, slot = line
        assert step == sources.keys.steps[side]
        assert (begin, end) == ends[side]
        assert begin <= row < end
        assert (row - begin) % shape.tile == 0
        own = slice(row - begin, min(row + shape.tile, end) - begin)
        sees = visible[head // shape.heads][queries][:, sources.places[side][own]].T.to(torch.int64)
        tiles.setdefault((head, side, row), []).append(slot)
        for k, line in enumerate(segments[segment : segment + masked + full]):
            first, number, low, high, origin, stride, _, label = line
            stop = first + number * shape.block
            piece, shown = own, sees
            if terms is not None:
                term, first_row, end_row = label & 255, label >> 8 & 4095, label >> 20
                piece = slice(own.start + first_row, min(own.start + end_row, own.stop))
                interval = terms[term, head // shape.heads][queries]
                shown = interval[:, sources.places[side][piece]].T.to(torch.int64)
            if k >= masked:
                assert low <= first < stop <= high
                assert sees[:, first:stop].all()
                assert piece == own
            for x in range(max(first, low), min(stop, high)):
                assert origin + stride * x == queries[x]
                counts[side][head, piece, x] += shown[:, x]
    for found, places in zip(counts, sources.places, strict=True):
        wanted = visible[:, queries][:, :, places].transpose(1, 2).to(torch.int64)
        assert torch.equal(found, wanted.repeat_interleave(shape.heads, 0)), "every visible pair is met exactly once"
    every = {
        (head, side, row)
        for head in range(shape.batch * shape.heads)
        for side, (begin, end) in enumerate(ends)
        for row in range(begin, end, shape.tile)
    }
    assert set(tiles) == every, "a tile that sees nothing is written too"

    of_splits = {
        (head, side, row): list(range(slot, slot + parts))
        for (head, row, slot, parts), (side, *_) in zip(plan.splits.tolist(), plan.split_tiles.tolist(), strict=True)
    }
    for tile, slots in tiles.items():
        assert sorted(slots) == of_splits.pop(tile, [-1]), "a tile is whole, or its parts have slots in a row"
    assert not of_splits
    for (side, step, begin, end), (_, row, *_) in zip(plan.split_tiles.tolist(), plan.splits.tolist(), strict=True):
        assert (step, begin, end) == (sources.keys.steps[side], *ends[side])
        assert begin <= row < end
    assert len(sides) == len(ends)


def assert_order_of_arrival(plan: WorkPlan, sources: Sources, shape: Shape) -> None:
    """Every program takes local rows, then remote ones as they arrive, then the rest of the local ones."""
    steps = max(sources.keys.steps) + 1
    flags = [
        head % shape.heads // (shape.heads // shape.groups) * steps + step if step else 0
        for head, step in zip(plan.work[:, 0].tolist(), plan.tiles[:, 1].tolist(), strict=True)
    ]
    for begin, end in pairwise(plan.starts.tolist()):
        mine = flags[begin:end]
        remote_kv = [k for k, flag in enumerate(mine) if flag]
        if remote_kv:
            assert all(mine[remote_kv[0] : remote_kv[-1] + 1]), "no local row is taken while remote ones are awaited"
            assert all(a <= b for a, b in pairwise(mine[remote_kv[0] : remote_kv[-1] + 1]))


def first_rows(sources: Sources) -> list[int]:
    return [side.run_list[0][0] if side.run_list else 0 for side in sources.keys.sides]


def runs_of(shards: object) -> tuple[Runs, ...]:
    return tuple(tuple((run.start, run.stride, run.length) for run in shard) for shard in shards)  # type: ignore[attr-defined]


@settings(max_examples=75, deadline=None)
@given(masks(max_len=40, cross=False), st.data())
def test_plans_of_any_sources_are_lawful(mask: ShortMask, data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 4))
    shards = runs_of(data.draw(layouts(mask.seq_len, world)))
    visible = torch.tensor(
        [
            [[is_visible(mask, i, j, b) for j in range(mask.seq_len)] for i in range(mask.seq_len)]
            for b in range(mask.batch_size)
        ]
    )
    rank = data.draw(st.integers(0, world - 1))
    sources = gather_sources(shards, rank, visible, everything=data.draw(st.booleans()))
    if not sources.rows.run_list:
        return
    groups = data.draw(st.sampled_from([1, 2]))
    align = data.draw(st.sampled_from([1, 4]))
    shape = Shape(
        batch=mask.batch_size if mask.batch_size > 1 else data.draw(st.integers(1, 2)),
        heads=groups * data.draw(st.integers(1, 2)),
        tile=data.draw(st.sampled_from([1, 4, 16])),
        block=align * data.draw(st.integers(1, 4)),
        programs=data.draw(st.integers(1, 12)),
        streamed_bytes=data.draw(st.sampled_from([0, 2**24, 2**26])),
        repeats=data.draw(st.integers(1, 3)),
        align=align,
        split=data.draw(st.booleans()),
        groups=groups,
    )
    plan = schedule_tiles(sources.keys, sources.rows, shape)
    assert_lawful(plan, sources, shape, visible.expand(shape.batch, -1, -1))
    assert_order_of_arrival(plan, sources, shape)


@settings(max_examples=50, deadline=None)
@given(any_term_mask(cross=False), st.data())
def test_plans_of_any_sources_under_any_union_are_lawful(mask: TermMask, data: st.DataObject) -> None:
    n, world = mask.terms.shape[-1], data.draw(st.integers(1, 4))
    shards = runs_of(data.draw(layouts(n, world)))
    sources = gather_sources(shards, data.draw(st.integers(0, world - 1)), mask, everything=data.draw(st.booleans()))
    if not sources.rows.run_list:
        return
    align = data.draw(st.sampled_from([1, 4]))
    shape = Shape(
        batch=mask.terms.shape[1] if mask.terms.shape[1] > 1 else data.draw(st.integers(1, 2)),
        heads=2,
        tile=data.draw(st.sampled_from([1, 4, 16])),
        block=align * data.draw(st.integers(1, 4)),
        programs=data.draw(st.integers(1, 12)),
        streamed_bytes=0,
        align=align,
        groups=data.draw(st.sampled_from([1, 2])),
    )
    plan = schedule_tiles(sources.keys, sources.rows, shape)
    several = len(mask.terms) > 1 or mask.tables is not None
    terms = mask.terms.expand(-1, shape.batch, -1, -1) if several else None
    assert_lawful(plan, sources, shape, mask.visible.expand(shape.batch, -1, -1), terms)
    assert_order_of_arrival(plan, sources, shape)


@pytest.mark.parametrize("split", [False, True])
def test_half_of_near_is_kept_for_the_end(split: bool) -> None:
    visible = torch.ones(1, 96, 96, dtype=torch.bool)
    sources = gather_sources(shards_of("contiguous", 96, 3), 1, visible)
    shape = Shape(1, 2, tile=8, block=8, programs=1, streamed_bytes=0, split=split, groups=2)
    plan = schedule_tiles(sources.keys, sources.rows, shape)
    order = list(zip(plan.work[:, 0].tolist(), plan.tiles[:, 1].tolist(), strict=True))
    local_kv = [(head, 0) for head in (0, 1)] * 2
    assert order[:4] == local_kv
    assert order[-4:] == local_kv
    assert order[4:-4] == [(head, step) for head in (0, 1) for step in (1, 2) for _ in range(4)]


def streamed_arrivals(plan: WorkPlan, shape: Shape) -> list[list[tuple[int, int]]]:
    """Group and ring step of the last rows that each entry of each program waits for; groups count from 1; (0, 0): none."""
    found = []
    for head, _, segment, masked, full, *_ in plan.work.tolist():
        step = int(plan.segments[segment : segment + masked + full, 6].max())
        found.append((1 + head % shape.heads // (shape.heads // shape.groups), step) if step else (0, 0))
    return [found[begin:end] for begin, end in pairwise(plan.starts.tolist())]


@settings(max_examples=50, deadline=None)
@given(masks(max_len=40, cross=False), st.data())
def test_tiles_take_rows_that_arrive_in_order_and_each_tile_once(mask: ShortMask, data: st.DataObject) -> None:
    world = data.draw(st.integers(2, 4))
    shards = runs_of(data.draw(layouts(mask.seq_len, world)))
    visible = torch.tensor(
        [
            [[is_visible(mask, i, j, b) for j in range(mask.seq_len)] for i in range(mask.seq_len)]
            for b in range(mask.batch_size)
        ]
    )
    sources = gather_sources(shards, data.draw(st.integers(0, world - 1)), visible)
    rows = len(sources.rows.positions)
    if not sources.rows.run_list or not any(sources.places):
        return
    groups = data.draw(st.sampled_from([1, 2]))
    shape = Shape(
        batch=mask.batch_size if mask.batch_size > 1 else data.draw(st.integers(1, 2)),
        heads=groups * data.draw(st.integers(1, 2)),
        tile=data.draw(st.sampled_from([1, 4, 16])),
        block=data.draw(st.integers(1, 4)),
        programs=data.draw(st.integers(1, 12)),
        streamed_bytes=data.draw(st.sampled_from([0, 2**24, 2**26])),
        split=data.draw(st.booleans()),
        groups=groups,
    )
    plan = schedule_tiles(sources.rows, sources.keys, shape)
    parts = [plan.work[begin:end, 7].tolist() for begin, end in pairwise(plan.starts.tolist())]
    for mine, slots in zip(streamed_arrivals(plan, shape), parts, strict=True):
        # a part of a split tile has the place of the tile, and may wait for less
        whole = [arrival for arrival, slot in zip(mine, slots, strict=True) if slot < 0]
        assert whole == sorted(whole)
    tiles = {(head, row) for head, row, *_, slot in plan.work.tolist() if slot < 0}
    split = {(head, row) for head, row, *_ in plan.splits.tolist()}
    assert not tiles & split
    assert len(tiles) == len(plan.work) - plan.slots
    assert tiles | split == {(h, x) for h in range(shape.batch * shape.heads) for x in range(0, rows, shape.tile)}


def test_no_program_has_two_tiles_of_the_last_rows_while_another_has_none() -> None:
    visible = torch.ones(512, 512, dtype=torch.bool).tril()[None]
    sources = gather_sources(shards_of("zigzag", 512, 2), 0, visible)
    shape = Shape(1, 8, tile=16, block=16, programs=34, streamed_bytes=2**23, groups=2)
    programs = streamed_arrivals(schedule_tiles(sources.rows, sources.keys, shape), shape)
    assert sum(len(mine) for mine in programs) == 8 * 16
    for group in (1, 2):
        assert {mine.count((group, 1)) for mine in programs} == {0, 1}, "32 tiles on 34 programs"


def test_long_tiles_are_taken_in_the_order_of_heads() -> None:
    visible = torch.ones(1536, 1536, dtype=torch.bool).tril()[None]
    sources = gather_sources(shards_of("zigzag", 1536, 2), 0, visible)
    shape = Shape(1, 4, tile=64, block=8, programs=1, streamed_bytes=2**25, groups=2)
    plan = schedule_tiles(sources.rows, sources.keys, shape)
    assert int((plan.work[:, 5] + plan.work[:, 6]).max()) > SHORT
    assert plan.work[:, 0].tolist() == sorted(plan.work[:, 0].tolist())


def test_a_gathered_plan_says_of_every_entry_whose_rows_it_holds_and_others_say_nothing() -> None:
    visible = torch.ones(1, 40, 40, dtype=torch.bool)
    sources = gather_sources(shards_of("contiguous", 40, 2), 0, visible)
    shape = Shape(1, 1, tile=16, block=8, programs=2, streamed_bytes=0)
    gathered = schedule_tiles(sources.keys, sources.rows, shape)
    assert gathered.tiles.shape == (len(gathered.work), 4)
    assert gathered.split_tiles.shape == (len(gathered.splits), 4)
    for other in (
        schedule_tiles(sources.rows, sources.keys, shape),
        schedule_tiles(sources.keys.sides[0], sources.rows, shape),
    ):
        assert other.tiles.shape[0] == other.split_tiles.shape[0] == 0
