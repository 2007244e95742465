"""Plans of persistent kernels: every visible pair once, no hidden pair unmasked, and nobody works much longer than others."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from itertools import pairwise, product
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringattn.kernels.attention.hopper import tile_scheduler as planning
from ringattn.kernels.attention.hopper.tile_scheduler import (
    EPILOGUE,
    MIN_PART,
    OVERHEAD,
    Shape,
    WorkPlan,
    schedule_tiles,
)
from ringattn.kernels.interface import PAD_ROWS, BlockPatterns, GatheredKeys, RowMetadata
from ringattn.kernels.runtime.table_cache import find
from ringattn.numerics.reference import visible_pairs
from ringattn.plan.device_tables import gathered_key, stationary_side
from ringattn.plan.layouts import contiguous, shard_len, zigzag
from ringattn.plan.mask import short_mask
from ringattn.plan.ring_plan import GatherPlan, make_gather_plan
from ringattn.plan.ring_plan import make_plan as make_ring
from tests.support.kernel_conformance import CASES, Case, make_side, positions_of
from tests.support.random_masks import is_visible, layouts, masks, positions, run_shards
from tests.support.short_mask import ShortMask
from tests.support.term_masks import TermMask, any_term_mask
from tests.support.timing import assert_quick

PROGRAMS = 132  # multiprocessors of the device these kernels are for


def assert_lawful(
    plan: WorkPlan,
    stationary: RowMetadata,
    streamed: RowMetadata,
    shape: Shape,
    visible: Tensor,
    terms: Tensor | None = None,
) -> None:
    """Whatever must hold for any plan.

    Args:
        visible: `b s t`, between the rows of both buffers.
        terms: `terms b s t`: the intervals of each term, which are all that a masked block hides by; None: one term.
    """
    assert all(x.dtype == torch.int32 for x in (plan.work, plan.segments, plan.starts, plan.splits))
    work, segments, splits = plan.work.tolist(), plan.segments.tolist(), plan.splits.tolist()
    rows, streamed_rows = visible.shape[1:]
    runs = [(offset, offset + length) for offset, length, _, _ in streamed.run_list]
    count = torch.zeros(shape.batch * shape.heads, rows, streamed_rows, dtype=torch.int64)
    tiles: dict[tuple[int, int], list[int]] = {}
    blocks = 0
    for head, row, segment, masked, full, masked_blocks, full_blocks, slot in work:
        assert row % shape.tile == 0
        assert masked_blocks + full_blocks > 0, "every entry has work"
        mine = slice(row, min(row + shape.tile, rows))
        sees = visible[head // shape.heads, mine].to(torch.int64)
        tiles.setdefault((head, row), []).append(slot)
        taken = segments[segment : segment + masked + full]
        assert sum(n for _, n, *_ in taken[:masked]) == masked_blocks
        assert sum(n for _, n, *_ in taken[masked:]) == full_blocks
        for k, (first, number, begin, end, origin, stride, step, label) in enumerate(taken):
            assert number > 0
            assert step == 0
            assert first >= 0
            assert first % shape.align == 0
            hidden = (begin, end) == (0, 0)
            stop = first + number * shape.block
            piece, shown = mine, sees
            if terms is None:
                assert label == 0
                assert hidden or (begin, end) in runs
            else:
                assert hidden or any(a <= begin <= end <= e for a, e in runs)
                term, first_row, end_row = label & 255, label >> 8 & 4095, label >> 20
                piece = slice(row + first_row, min(row + end_row, rows))
                shown = terms[term, head // shape.heads, piece].to(torch.int64)
                assert end_row <= shape.tile
            if k >= masked:
                assert begin <= first < stop <= end, "a full block lies inside its run"
                assert sees[:, first:stop].all(), "every pair of a full block is visible"
                assert piece == mine, "a full block is of the whole tile"
            for y in range(max(first, begin), min(stop, end)):
                assert origin + stride * y == streamed.positions[y]
                count[head, piece, y] += shown[:, y]
        blocks += masked_blocks + full_blocks
    wanted = visible.to(torch.int64).repeat_interleave(shape.heads, 0)
    assert torch.equal(count, wanted), "every visible pair is met once, on one program"
    assert plan.blocks == blocks

    every = {(head, row) for head in range(shape.batch * shape.heads) for row in range(0, rows, shape.tile)}
    seeing = {(head, row) for head, row in every if wanted[head, row : row + shape.tile].any()}
    assert set(tiles) <= every
    assert seeing <= set(tiles)
    if shape.every_tile:
        assert set(tiles) == every

    assert plan.starts[0] == 0
    assert plan.starts[-1] == len(work)
    assert plan.starts.shape == (plan.programs + 1,)
    assert (plan.starts.diff() > 0).all(), "no program without work"
    assert plan.programs <= shape.programs

    of_splits = {(head, row): list(range(slot, slot + parts)) for head, row, slot, parts in splits}
    for tile, slots in tiles.items():
        assert sorted(slots) == of_splits.pop(tile, [-1]), "a tile is whole, or its parts have slots in a row"
    assert not of_splits
    assert sum(parts for *_, parts in splits) == plan.slots
    assert all(parts > 1 for *_, parts in splits)
    assert_parts_are_worth_it(plan, shape)
    assert shape.split or not splits


def assert_parts_are_worth_it(plan: WorkPlan, shape: Shape) -> None:
    """No part is shorter than MIN_PART."""
    parts = plan.work[plan.work[:, 7] >= 0]
    assert ((parts[:, 5] + parts[:, 6]) * shape.repeats >= MIN_PART).all()


def excess(plan: WorkPlan, shape: Shape) -> float:
    """Cost of the most loaded program over the mean of all programs of the device, without what splitting adds."""
    blocks = (plan.work[:, 5] + plan.work[:, 6]).long() * shape.repeats
    cost = blocks + OVERHEAD + EPILOGUE * (plan.work[:, 7] >= 0)
    loads = [int(cost[a:e].sum()) for a, e in pairwise(plan.starts.tolist())]
    tiles = plan.work.shape[0] - plan.slots + plan.splits.shape[0]
    return max(loads) * shape.programs / (int(blocks.sum()) + tiles * OVERHEAD)


def make_sides(mask: ShortMask) -> tuple[RowMetadata, RowMetadata]:
    """(queries, keys) of a whole sequence."""
    shard = contiguous(mask.seq_len, 1)[0]
    return stationary_side(shard, mask, "cpu", "keys"), stationary_side(shard, mask, "cpu", "queries")


def device_shape(**options: int) -> Shape:
    """A shape of 128 x 128 blocks of head_dim 128 on the device."""
    return Shape(**{"batch": 1, "tile": 128, "block": 128, "programs": PROGRAMS, "streamed_bytes": 0, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plans_of_the_conformance_cases_are_lawful(case: Case) -> None:
    q_runs = ((0, 1, case.seq_len),) if case.q_runs is None else case.q_runs
    kv_len = case.kv_len or case.seq_len
    ring_steps = (((0, 1, kv_len),),) if case.ring_steps is None else case.ring_steps
    visible = visible_pairs(case.seq_len, kv_len, **case.mask)
    visible = visible.expand(case.batch, -1, -1) if visible.shape[0] == 1 else visible
    queries = make_side(q_runs, visible, "cpu")
    for runs in ring_steps:
        keys = make_side(runs, visible.transpose(1, 2), "cpu")
        pairs = visible[:, positions_of(q_runs)][:, :, positions_of(runs)]
        for stationary, streamed, seen in ((queries, keys, pairs), (keys, queries, pairs.transpose(1, 2))):
            for tile, block, align in ((16, 8, 4), (8, 16, 1), (128, 128, 4)):
                every_tile = bool(streamed.run_list)
                shape = Shape(case.batch, case.heads, tile, block, 5, 2**23, align=align, every_tile=every_tile)
                assert_lawful(schedule_tiles(stationary, streamed, shape), stationary, streamed, shape, seen)


@settings(max_examples=125, deadline=None)
@given(masks(max_len=40), st.data())
def test_plans_of_any_runs_are_lawful(mask: ShortMask, data: st.DataObject) -> None:
    visible = torch.tensor(
        [
            [[is_visible(mask, i, j, b) for j in range(mask.kv_len)] for i in range(mask.seq_len)]
            for b in range(mask.batch_size)
        ]
    )
    q_runs, k_runs = (
        tuple((run.start, run.stride, run.length) for run in data.draw(run_shards(length)))
        for length in (mask.seq_len, mask.kv_len)
    )
    sides = make_side(q_runs, visible, "cpu"), make_side(k_runs, visible.transpose(1, 2), "cpu")
    visible = visible[:, positions_of(q_runs)][:, :, positions_of(k_runs)]
    if data.draw(st.booleans()):
        sides, visible = (sides[1], sides[0]), visible.transpose(1, 2)
    align = data.draw(st.sampled_from([1, 2, 4]))
    shape = Shape(
        batch=mask.batch_size if mask.batch_size > 1 else data.draw(st.integers(1, 2)),
        heads=data.draw(st.integers(1, 3)),
        tile=data.draw(st.integers(1, 16)),
        block=align * data.draw(st.integers(1, 4)),
        programs=data.draw(st.integers(1, 12)),
        streamed_bytes=data.draw(st.sampled_from([0, 2**24, 2**26])),
        repeats=data.draw(st.integers(1, 3)),
        align=align,
        every_tile=data.draw(st.booleans()),
        split=data.draw(st.booleans()),
    )
    visible = visible.expand(shape.batch, -1, -1)
    assert_lawful(schedule_tiles(*sides, shape), *sides, shape, visible)


@settings(max_examples=125, deadline=None)
@given(any_term_mask(), st.data())
def test_plans_of_any_union_of_terms_meet_every_visible_pair_once(mask: TermMask, data: st.DataObject) -> None:
    q_runs, k_runs = (
        tuple((run.start, run.stride, run.length) for run in data.draw(run_shards(length)))
        for length in mask.terms.shape[-2:]
    )
    sides = make_side(q_runs, mask, "cpu"), make_side(k_runs, mask.transpose(), "cpu")
    visible, terms = (x[..., positions_of(q_runs), :][..., positions_of(k_runs)] for x in (mask.visible, mask.terms))
    if data.draw(st.booleans()):
        sides, visible, terms = (sides[1], sides[0]), visible.transpose(1, 2), terms.transpose(2, 3)
    align = data.draw(st.sampled_from([1, 2, 4]))
    shape = Shape(
        batch=visible.shape[0] if visible.shape[0] > 1 else data.draw(st.integers(1, 2)),
        heads=data.draw(st.integers(1, 2)),
        tile=data.draw(st.integers(1, 16)),
        block=align * data.draw(st.integers(1, 4)),
        programs=data.draw(st.integers(1, 12)),
        streamed_bytes=0,
        align=align,
        every_tile=data.draw(st.booleans()),
    )
    visible, terms = visible.expand(shape.batch, -1, -1), terms.expand(-1, shape.batch, -1, -1)
    one = len(mask.terms) == 1 and mask.tables is None
    assert_lawful(schedule_tiles(*sides, shape), *sides, shape, visible, None if one else terms)


def assert_turns_follow_the_order_of_tiles(plan: WorkPlan, shape: Shape, ends: Tensor) -> None:
    """Each contribution to a streamed block of a head comes when those before it have been made; ends: of each entry's source."""
    segments, turns, made = plan.segments.tolist(), plan.turns.tolist(), {}
    assert plan.starts.tolist() == list(range(plan.work.shape[0] + 1))
    assert plan.slots == 0
    for (head, row, segment, masked, full, *_), end in zip(plan.work.tolist(), ends.tolist(), strict=True):
        if row + shape.tile > end:
            masked, full = masked + full, 0
        parts = range(segment, segment + masked + full)
        for part in (*reversed(parts[masked:]), *parts[:masked]):
            first, blocks = segments[part][:2]
            for x in range(first, first + blocks * shape.block, shape.block):
                at = head, x // shape.block
                assert x % shape.block == 0
                assert turns[turns[part] + x // shape.block] == made.get(at, 0)
                made[at] = made.get(at, 0) + 1


@settings(max_examples=60, deadline=None)
@given(any_term_mask(cross=False), st.data())
def test_turns_of_ordered_plans_follow_the_order_of_tiles(mask: TermMask, data: st.DataObject) -> None:
    q_runs, k_runs = (
        tuple((run.start, run.stride, run.length) for run in data.draw(run_shards(length)))
        for length in mask.terms.shape[-2:]
    )
    keys, queries = make_side(k_runs, mask.transpose(), "cpu"), make_side(q_runs, mask, "cpu")
    batches = mask.visible.shape[0]
    shape = Shape(
        batch=batches if batches > 1 else data.draw(st.integers(1, 2)),
        heads=data.draw(st.sampled_from([2, 4])),
        tile=data.draw(st.integers(1, 16)),
        block=data.draw(st.integers(1, 12)),
        programs=data.draw(st.integers(1, 12)),
        streamed_bytes=data.draw(st.sampled_from([0, 2**24, 2**26])),
        every_tile=data.draw(st.booleans()),
        groups=data.draw(st.sampled_from([1, 2])),
        ordered=True,
    )
    shape = shape._replace(align=shape.block)
    if data.draw(st.booleans()):
        # the same rows as two sources, of which the second arrives
        rows = keys.positions.shape[0]
        there = replace(keys, derived=type(keys.derived)())
        keys = GatheredKeys((keys, there), (0, 1), rows, rows, keys.positions, keys.lo, keys.hi)
    plan = schedule_tiles(keys, queries, shape)
    ends = plan.tiles[:, 3] if plan.tiles.shape[0] else torch.full((plan.work.shape[0],), keys.lo.shape[1])
    assert_turns_follow_the_order_of_tiles(plan, shape, ends)


@pytest.mark.parametrize(
    ("options", "repeats", "programs", "expected"),
    [
        ({}, 4, 16, 1),  # long: side by side, the tiles of a head share what they stream
        ({}, 4, 128, 16),  # few blocks for each of many programs, which would wait for turns
        # as many blocks as in a long one, but tiles end before all programs could have begun
        ({"window": (100, 0)}, 64, 256, 32),
    ],
)
def test_ordered_launches_stay_on_a_head_where_tiles_wait_little(
    options: dict[str, Any], repeats: int, programs: int, expected: int
) -> None:
    mask = short_mask(8192, causal=True, **options)
    shard = contiguous(8192, 1)[0]
    keys, queries = (stationary_side(shard, mask, "cpu", axis) for axis in ("queries", "keys"))
    shape = device_shape(heads=32, programs=programs, repeats=repeats, align=128, streamed_bytes=2**25, ordered=True)
    plan = schedule_tiles(keys, queries, shape)
    assert plan.work[:16, 0].unique().numel() == min(expected, 16)
    assert plan.work[:32, 0].unique().numel() == expected


def block_sides(tokens: int, share: float) -> tuple[RowMetadata, RowMetadata]:
    """Whole sequences under a random table of blocks of 128 and no other mask."""
    blocks = tokens // 128
    table = (torch.rand(1, blocks, blocks, generator=torch.Generator().manual_seed(0)) < share).int()
    lo, hi = torch.zeros(1, tokens, dtype=torch.int32), torch.full((1, tokens), tokens, dtype=torch.int32)
    positions, run = torch.arange(tokens, dtype=torch.int32), (0, tokens, 0, 1)
    queries, keys = (
        RowMetadata(torch.tensor([run]), positions, lo, hi, (run,), lo, hi, 1, BlockPatterns(x, x, (0,), x, 128))
        for x in (table, table.transpose(1, 2))
    )
    return queries, keys


@pytest.mark.parametrize("share", [0.5, 0.125])
def test_a_table_of_blocks_that_fit_the_tiles_has_full_blocks_of_its_true_entries_alone(share: float) -> None:
    queries, keys = block_sides(16384, share)
    assert queries.patterns is not None
    plan = schedule_tiles(queries, keys, device_shape(heads=1, split=0))
    assert plan.work[:, 6].sum() == queries.patterns.tables_host.sum()
    assert plan.work[:, 5].sum() == 0


def test_a_plan_of_a_large_table_takes_seconds_at_most() -> None:
    queries, keys = block_sides(32768, 0.5)
    shape = device_shape(heads=32)
    assert_quick(lambda: planning._meet([(queries, 0)], [(keys, 0)], shape), 1)


@pytest.mark.parametrize("repeats", [1, 4])
@pytest.mark.parametrize(("rows", "keys"), [(8, 160), (40, 37), (67, 67)])
def test_parts_of_a_split_tile_cover_it(rows: int, keys: int, repeats: int) -> None:
    visible = visible_pairs(rows, keys, window=(30, None) if rows == keys else None).expand(2, -1, -1)
    queries, keys_side = (make_side(((0, 1, x.shape[1]),), x, "cpu") for x in (visible, visible.transpose(1, 2)))
    shape = Shape(2, 1, tile=16, block=1, programs=23, streamed_bytes=0, repeats=repeats)
    plan = schedule_tiles(queries, keys_side, shape)
    assert len(plan.splits)
    assert_lawful(plan, queries, keys_side, shape, visible)


@pytest.mark.parametrize(
    ("name", "mask", "options", "bound"),
    [
        ("2048 equal tiles", ShortMask(16384, 16384), {"heads": 16}, 1.006),
        ("150 equal tiles", ShortMask(150 * 128, 150 * 128), {"heads": 1}, 1.015),
        ("100 equal tiles", ShortMask(100 * 128, 100 * 128), {"heads": 1}, 1.05),
        ("causal", ShortMask(16384, 16384, causal=True), {"heads": 16}, 1.003),
        ("causal, few heads", ShortMask(16384, 16384, causal=True), {"heads": 1}, 1.04),
        ("causal, batch", ShortMask(4096, 4096, causal=True), {"heads": 16, "batch": 4}, 1.01),
        ("causal, repeats", ShortMask(16384, 16384, causal=True), {"heads": 4, "repeats": 4}, 1.015),
        ("window", ShortMask(32768, 32768, causal=True, window=(4095, None)), {"heads": 16}, 1.015),
        ("documents", ShortMask(32768, 32768, causal=True, documents=tuple(range(0, 32769, 4096))), {"heads": 16}, 1.01),
        (
            "one long document",
            ShortMask(65536, 65536, causal=True, documents=(*range(0, 32768, 512), 32768, 65536)),
            {"heads": 1},
            1.01,
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_no_program_works_much_longer_than_the_mean(name: str, mask: ShortMask, options: dict, bound: float) -> None:
    queries, keys = make_sides(mask)
    bytes_of_head = mask.seq_len * 2 * 128 * 2
    for block in (64, 128):
        shape = device_shape(**{**options, "block": block, "streamed_bytes": bytes_of_head})
        for stationary, streamed in ((queries, keys), (keys, queries)):
            plan = schedule_tiles(stationary, streamed, shape)
            assert excess(plan, shape) <= bound, name
            assert_parts_are_worth_it(plan, shape)


def test_few_tiles_with_long_key_ranges_are_spread_over_all_programs() -> None:
    tokens, rows = 131072, 128
    lo, hi = torch.zeros(1, rows, dtype=torch.int32), torch.full((1, rows), tokens, dtype=torch.int32)
    positions = torch.arange(rows, dtype=torch.int32)
    queries = RowMetadata(torch.tensor([[0, rows, 0, 1]]), positions, lo, hi, ((0, rows, 0, 1),), lo, hi)
    keys = make_sides(ShortMask(tokens, tokens))[1]
    shape = device_shape(heads=8)
    plan = schedule_tiles(queries, keys, shape)
    assert plan.programs >= PROGRAMS - 1
    assert excess(plan, shape) <= 1.05
    assert plan.splits[:, 3].max() <= 18, "parts are as long as the programs' shares"


def test_a_window_pays_for_its_boundaries_only() -> None:
    queries, keys = make_sides(ShortMask(16384, 16384, causal=True, window=(4095, None)))
    for align in (1, 4):
        plan = schedule_tiles(queries, keys, device_shape(heads=1, align=align, split=0))
        inner = plan.work[plan.work[:, 1] >= 4096]
        assert inner.shape[0] == 96
        assert (inner[:, 5] == 2).all(), "one masked block at either end"
        assert (inner[:, 6] == 31).all()


def test_the_phase_of_the_blocks_is_the_cheapest() -> None:
    tokens = 91
    for left, right in product(range(3, 40, 3), (0, 5, None)):
        visible = visible_pairs(tokens, window=(left, right))
        queries, keys = (make_side(((0, 1, tokens),), x, "cpu") for x in (visible, visible.transpose(1, 2)))
        plan = schedule_tiles(queries, keys, Shape(1, 1, 8, 8, 1, 0))
        for _, row, _, _, _, masked_blocks, full_blocks, _ in plan.work.tolist():
            tile = visible[0, row : row + 8]
            seen, by_all = tile.any(0).nonzero().flatten(), tile.all(0)
            first, end = int(seen[0]), int(seen[-1]) + 1

            def price(phase: int, tile: Tensor = tile, by_all: Tensor = by_all, e: int = end) -> tuple[int, int]:
                grid = range(phase, e, 8)
                return len(grid), sum(not (g + 8 <= tokens and bool(by_all[g : g + 8].all())) for g in grid)

            best = min(price(phase) for phase in range(max(0, first - 7), first + 1))
            assert (masked_blocks + full_blocks, masked_blocks) == best


def test_rows_that_do_not_exist_make_no_block_masked() -> None:
    plan = schedule_tiles(*make_sides(ShortMask(128 * 5 + 7, 128 * 5 + 7)), device_shape(heads=1, split=0))
    assert plan.work[:, 5:7].tolist() == [[1, 5]] * 6, "only the last block, which ends beyond the run"


def test_heads_that_fit_the_cache_together_come_before_others_and_longest_first() -> None:
    queries, keys = make_sides(ShortMask(4096, 4096, causal=True))
    plan = schedule_tiles(queries, keys, device_shape(heads=6, programs=1, streamed_bytes=2**24))
    heads, rows = plan.work[:, 0].tolist(), plan.work[:, 1].tolist()
    expected = [
        (head, 128 * tile) for group in (0, 2, 4) for tile in reversed(range(32)) for head in (group, group + 1)
    ]
    assert list(zip(heads, rows, strict=True)) == expected


@pytest.mark.parametrize(
    ("mask", "shares"),
    [
        (ShortMask(4096, 4096), True),
        (ShortMask(4001, 4001, causal=True), True),
        (ShortMask(4096, 4096, causal=True, documents=(0, 1100, 2300, 3000, 4096)), True),
        (ShortMask(4096, 4096, causal=True, window=(511, 0)), False),
        (ShortMask(4001, 4001, window=(300, 300)), False),
    ],
    ids=["full", "causal", "documents", "window", "window to both sides"],
)
def test_tiles_of_keys_share_their_last_rows_but_for_windows(mask: ShortMask, shares: bool) -> None:
    queries, keys = make_sides(mask)
    assert schedule_tiles(keys, queries, device_shape(heads=2, block=64)).shares_ends == shares


def test_a_tile_that_sees_nothing_has_one_hidden_block_or_is_left_out() -> None:
    visible = visible_pairs(20, causal=True)
    queries = make_side(((0, 1, 10),), visible, "cpu")
    keys = make_side(((10, 1, 10),), visible.transpose(1, 2), "cpu")
    plan = schedule_tiles(queries, keys, Shape(1, 2, 8, 8, 4, 0))
    assert plan.work[:, 3:].tolist() == [[1, 0, 1, 0, -1]] * 4
    assert plan.segments.tolist() == [[0, 1, 0, 0, 0, 1, 0, 0]] * 2
    assert schedule_tiles(queries, keys, Shape(1, 2, 8, 8, 4, 0, every_tile=False)).programs == 0


def test_a_launch_too_small_to_gain_is_not_split() -> None:
    queries, keys = make_sides(ShortMask(1024, 1024, causal=True))
    assert schedule_tiles(queries, keys, device_shape(heads=4)).slots == 0


def test_the_same_sides_have_the_same_plan_in_all_threads() -> None:
    queries, keys = make_sides(ShortMask(512, 512, causal=True))
    found: list[WorkPlan] = []
    ready = Barrier(4)

    def ask() -> None:
        ready.wait()
        found.append(schedule_tiles(queries, keys, device_shape(heads=2)))

    threads = [Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(plan) for plan in found}) == 1
    assert schedule_tiles(queries, keys, device_shape(heads=3)) is not found[0]
    assert schedule_tiles(keys, queries, device_shape(heads=2)) is not found[0]


def test_plans_and_sides_are_collected_when_the_sides_are_dropped() -> None:
    visible = visible_pairs(64, causal=True)
    queries, keys = (make_side(((0, 1, 64),), x, "cpu") for x in (visible, visible.transpose(1, 2)))
    plans = [
        weakref.ref(schedule_tiles(*pair, Shape(1, 1, 16, 16, 4, 0))) for pair in ((queries, keys), (keys, queries))
    ]
    sides = [weakref.ref(queries), weakref.ref(keys)]
    assert all(ref() is not None for ref in plans)
    del keys
    gc.collect()
    assert sides[0]() is not None
    assert [ref() for ref in (sides[1], *plans)] == [None] * 3, "a plan lives as long as both of its sides"
    del queries
    gc.collect()
    assert sides[0]() is None


def test_plans_made_under_inference_mode_serve_training() -> None:
    queries, keys = make_sides(ShortMask(256, 256))
    with torch.inference_mode():
        plan = schedule_tiles(queries, keys, device_shape(heads=1))
    assert not any(x.is_inference() for x in (plan.work, plan.segments, plan.starts, plan.splits))


def test_tables_begin_at_lines_of_128_bytes_of_one_buffer() -> None:
    plan = schedule_tiles(*make_sides(ShortMask(16384, 16384)), device_shape(heads=16))
    tables = (plan.work, plan.segments, plan.starts, plan.splits)
    assert all(x.numel() and x.is_contiguous() for x in tables)
    assert all(x.storage_offset() % 32 == 0 for x in tables)
    assert len({x.untyped_storage().data_ptr() for x in tables}) == 1


def test_a_zigzag_shard_is_planned_like_the_sequence_it_is_cut_from() -> None:
    mask = ShortMask(32768, 32768, causal=True)
    shard = zigzag(32768, 4)[1]
    queries, keys = (stationary_side(shard, mask, "cpu", reading) for reading in ("keys", "queries"))
    for stationary, streamed in ((queries, keys), (keys, queries)):
        plan = schedule_tiles(stationary, streamed, device_shape(heads=1))
        masked, full = (int(plan.work[:, k].sum()) for k in (5, 6))
        assert masked == 64, "the diagonal of both runs"
        assert full == 64 * 63 // 2


def test_a_tile_across_two_distant_runs_skips_what_lies_between_them() -> None:
    mask = ShortMask(8000, 8000, causal=True, window=(255, None))
    shard = zigzag(8000, 4)[0]  # chunks of 1000 rows: tile 7 holds rows of both
    queries = stationary_side(shard, mask, "cpu", "keys")
    keys = make_sides(mask)[1]
    for align in (1, 4):
        plan = schedule_tiles(queries, keys, device_shape(heads=1, align=align, split=0))
        (tile,) = plan.work[plan.work[:, 1] == 896].tolist()
        first, second = plan.segments[tile[2] : tile[2] + 2].tolist()
        assert tile[3:7] == [2, 0, 6, 0]
        assert (first[0], first[1]) == (640 if align == 4 else 641, 3), (
            "104 rows that end at position 1000 see 359 keys"
        )
        assert (second[0], second[1]) == (6744 if align == 4 else 6745, 3), "24 rows from position 7000 on see 279"


def test_65536_entries_are_planned_in_seconds() -> None:
    queries, keys = make_sides(ShortMask(131072, 131072, causal=True))
    shape = device_shape(heads=64, streamed_bytes=2**26)

    def plan() -> None:
        queries.derived.clear()
        assert schedule_tiles(queries, keys, shape).work.shape[0] == 65536

    assert_quick(plan, 1)


def assert_gathered_keys_are_met(
    plan: WorkPlan, queries: list[int], gather_plan: GatherPlan, keys: GatheredKeys, shape: Shape, mask: ShortMask
) -> None:
    """Every visible pair is met once, in ring order, and far is read where rows or guards are."""
    place_of = {0: (0, keys.local_rows, 0)}  # first row, rows, guards of each step
    for fetch in gather_plan.recvs:
        place_of[fetch.step] = (fetch.at, sum(length for _, length in fetch.rows), PAD_ROWS)
    assert tuple(place_of) == keys.steps
    at_row = {
        (step, row): int(keys.positions[row + (keys.local_rows if step else 0)])
        for step, (first, rows, _) in place_of.items()
        for row in range(first, first + rows)
    }
    met: dict[tuple[int, int, int], int] = {}
    segments = plan.segments.tolist()
    for head, row, segment, masked, full, _, _, _ in plan.work.tolist():
        mine = queries[row : row + shape.tile]
        for kind in (segments[segment : segment + masked], segments[segment + masked : segment + masked + full]):
            assert [x[6] for x in kind] == sorted(x[6] for x in kind), "what arrives last is met last"
        for k, (first, blocks, begin, end, origin, stride, step, nothing) in enumerate(
            segments[segment : segment + masked + full]
        ):
            assert nothing == 0
            from_row, rows, guards = place_of[step]
            stop = first + blocks * shape.block
            assert from_row <= first, "blocks begin inside their source"
            if (begin, end) == (0, 0):
                assert (step, first) == (0, 0), "hidden blocks wait for nobody"
                continue
            assert first < from_row + rows, "blocks begin inside their source"
            assert step == 0 or stop <= from_row + rows + guards, "nothing but guards is touched beyond a source"
            for y in range(max(first, begin), min(stop, end)):
                position = at_row[step, y]
                assert position == origin + stride * y
                for i in mine:
                    seen = is_visible(mask, i, position, head // shape.heads % mask.batch_size)
                    assert seen or k < masked, "every pair of a full block is visible"
                    if seen:
                        met[head, i, position] = met.get((head, i, position), 0) + 1
            assert k < masked or begin <= first < stop <= end, "a full block lies inside its run"
    wanted = {
        (head, i, j)
        for head in range(shape.batch * shape.heads)
        for i in queries
        for j in range(mask.kv_len)
        if is_visible(mask, i, j, head // shape.heads % mask.batch_size)
    }
    assert met == dict.fromkeys(wanted, 1), "every visible pair is met once"


@settings(max_examples=60, deadline=None)
@given(masks(max_len=40), st.data())
def test_plans_of_gathered_keys_are_lawful(mask: ShortMask, data: st.DataObject) -> None:
    world_size = data.draw(st.integers(2, min(4, max(2, mask.kv_len, mask.seq_len))))
    q_shards, k_shards = (data.draw(layouts(length, world_size)) for length in (mask.seq_len, mask.kv_len))
    rank = data.draw(st.integers(0, world_size - 1))
    assume(shard_len(k_shards[rank]) > 0)
    ring = make_ring(q_shards, k_shards, mask, "keys")
    gather_plan = make_gather_plan(ring, rank, PAD_ROWS)
    keys = find(gathered_key(ring.ranks[rank].ring_steps, gather_plan, mask, "cpu"))
    shape = Shape(
        batch=mask.batch_size if mask.batch_size > 1 else data.draw(st.integers(1, 2)),
        heads=data.draw(st.integers(1, 2)),
        tile=data.draw(st.integers(1, 16)),
        block=data.draw(st.sampled_from([1, 4, 16, 128])),
        programs=data.draw(st.integers(1, 12)),
        streamed_bytes=data.draw(st.sampled_from([0, 2**24, 2**26])),
        every_tile=data.draw(st.booleans()),
        split=data.draw(st.booleans()),
    )
    queries = stationary_side(q_shards[rank], mask, "cpu", "keys")
    plan = schedule_tiles(queries, keys, shape)
    rows = positions(q_shards[rank])
    assert_gathered_keys_are_met(plan, rows, gather_plan, keys, shape, mask)
    if shape.every_tile:
        written = {(head, row) for head, row, *_ in plan.work.tolist()}
        assert written == {
            (head, row) for head in range(shape.batch * shape.heads) for row in range(0, len(rows), shape.tile)
        }
