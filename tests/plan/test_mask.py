"""The visible keys of a query are one interval that says what the definitions say, and pairs are counted exactly."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.plan.intervals import Bounds, Tally, VisibleSpan, count_pairs, floor_sum
from ringattn.plan.layouts import Run, striped
from ringattn.plan.mask import MaskAxis
from tests.support.random_masks import (
    is_visible,
    layouts,
    log_normal_documents,
    masks,
    positions,
    run_shards,
    runs,
    seen,
)
from tests.support.short_mask import ShortMask
from tests.support.timing import assert_quick


def bounds_of(mask: ShortMask, axis: MaskAxis, b: int = 0) -> Bounds:
    [term] = mask.intervals(axis, mask.variant_of[b])
    assert term.pattern is None
    return term.bounds


def assert_rows_see_what_the_definitions_allow(mask: ShortMask) -> None:
    for b in range(mask.batch_size):
        visible = [[is_visible(mask, i, j, b) for j in range(mask.kv_len)] for i in range(mask.seq_len)]
        tables: dict[MaskAxis, Any] = {"keys": visible, "queries": list(zip(*visible, strict=True))}
        for axis, table in tables.items():
            before, total = (0, 0), [[0], [0]]
            for x, row in enumerate(table):
                lo, hi = seen(mask, axis, x, b)
                assert list(range(lo, hi)) == [y for y, shown in enumerate(row) if shown], (mask, x, b)
                assert 0 <= lo <= hi <= len(row)  # where the row is empty, too
                assert before[0] <= lo
                assert before[1] <= hi
                before = (lo, hi)
                for sums, value in zip(total, before, strict=True):
                    sums.append(sums[-1] + value)
            for bound, sums in zip(bounds_of(mask, axis, b), total, strict=True):
                assert [bound.total(end) for end in range(len(table) + 1)] == sums, mask


@settings(max_examples=150, deadline=None)
@given(masks())
def test_rows_see_what_the_definitions_allow_and_bounds_never_decrease(mask: ShortMask) -> None:
    assert_rows_see_what_the_definitions_allow(mask)


def small_masks() -> Iterator[ShortMask]:
    """Every combination of features, each in a few sizes, of which a random draw would rarely meet the rarer ones."""
    for seq_len, kv_len in ((11, 11), (11, 8), (8, 11)):
        same = seq_len == kv_len
        for fields in itertools.product(
            ((False, 0), (True, 0), (True, 1), (True, 4)),
            (None, (0, 0), (1, 3), (4, None), (None, 2)),
            (None, (0, 5, 5, 11)) if same else (None,),
            ((None, False), (3, False), (3, True), (4, True)) if same else ((None, False), (3, False)),
            (None, ((2, 9), (4, 4))) if same else (None,),
        ):
            (causal, prefix_len), window, documents, (chunk_len, restart), lengths = fields
            yield ShortMask(seq_len, kv_len, causal, window, documents, prefix_len, chunk_len, lengths, restart)


def test_rows_see_what_the_definitions_allow_in_every_combination_of_features() -> None:
    for mask in small_masks():
        assert_rows_see_what_the_definitions_allow(mask)


def test_straight_bounds_are_one_piece() -> None:
    lower, upper = ShortMask(1000, 1000, causal=True, documents=(0, 10, 400, 1000)).intervals("keys", 0)[0].bounds
    assert (lower.values, lower.slopes) == ([0, 10, 400], [0, 0, 0])
    assert (upper.values, upper.slopes) == ([1], [1])


@settings(max_examples=100, deadline=None)
@given(masks(), st.data())
def test_pairs_of_a_stretch_are_counted_exactly(mask: ShortMask, data: st.DataObject) -> None:
    a = data.draw(st.integers(0, mask.seq_len))
    e = data.draw(st.integers(a, mask.seq_len))
    per_element = [
        sum(is_visible(mask, i, j, b) for i in range(a, e) for j in range(mask.kv_len)) for b in range(mask.batch_size)
    ]
    assert [mask.pairs(a, e, b) for b in range(mask.batch_size)] == per_element
    assert mask.work(a, e) == sum(per_element)


@settings(max_examples=75, deadline=None)
@given(masks(), st.data())
def test_pairs_between_two_runs_are_counted_exactly(mask: ShortMask, data: st.DataObject) -> None:
    q_run, k_run = data.draw(runs(mask.seq_len)), data.draw(runs(mask.kv_len))
    for b in range(mask.batch_size):
        visible = sum(is_visible(mask, i, j, b) for i in positions((q_run,)) for j in positions((k_run,)))
        assert count_pairs(bounds_of(mask, "keys", b), [(q_run,)], [(k_run,)]) == [[visible]]


@settings(max_examples=100, deadline=None)
@given(masks(), st.data(), st.integers(1, 6))
def test_both_readings_count_the_same_pairs(mask: ShortMask, data: st.DataObject, world_size: int) -> None:
    queries = data.draw(layouts(mask.seq_len, world_size))
    keys = data.draw(layouts(mask.kv_len, world_size))
    for b in range(mask.batch_size):
        forth = count_pairs(bounds_of(mask, "keys", b), queries, keys)
        back = count_pairs(bounds_of(mask, "queries", b), keys, queries)
        assert forth == [list(column) for column in zip(*back, strict=True)]


@settings(max_examples=75, deadline=None)
@given(masks(), st.data(), st.sampled_from(["keys", "queries"]))
def test_reach_spans_what_the_rows_of_a_shard_see(mask: ShortMask, data: st.DataObject, reading: MaskAxis) -> None:
    rows, limit = (mask.seq_len, mask.kv_len) if reading == "keys" else (mask.kv_len, mask.seq_len)
    shard, run = data.draw(run_shards(rows)), data.draw(runs(limit))
    for b in range(mask.batch_size):

        def sees(row: int, other: int, b: int = b) -> bool:
            return is_visible(mask, *((row, other) if reading == "keys" else (other, row)), b)

        seen = [y for y in range(run.length) if any(sees(p, run.position(y)) for p in positions(shard))]
        spans = [(seen[0], seen[-1] - seen[0] + 1)] if seen else []
        assert VisibleSpan(bounds_of(mask, reading, b), shard).spans(run) == spans


@pytest.mark.parametrize("window", [(0, 0), (1, 0), (0, 2), (2, 1)])
def test_reach_sees_the_gaps_that_strided_rows_leave(window: tuple[int, int]) -> None:
    left, right = window
    bounds = bounds_of(ShortMask(40, 40, window=window), "keys")
    for start, stride in itertools.product(range(4), range(1, 8)):
        row_run = Run(start, stride, (39 - start) // stride + 1 - start)
        held = {p for i in positions((row_run,)) for p in range(i - left, i + right + 1)}
        reach = VisibleSpan(bounds, (row_run,))
        for first, other, length in itertools.product(range(9), range(1, 8), (1, 2, 3, 4)):
            run = Run(first, other, length)
            seen = [y for y in range(length) if run.position(y) in held]
            assert reach.spans(run) == ([(seen[0], seen[-1] - seen[0] + 1)] if seen else []), (row_run, run)


def test_reach_begins_where_a_widening_interval_is_no_longer_empty() -> None:
    # before `start` rows see nothing at start; the upper bound climbs from there in one straight piece
    mask = ShortMask(8, 8, causal=True, lengths=((1, 8),))
    bounds = bounds_of(mask, "keys")
    assert VisibleSpan(bounds, (Run(0, 1, 3),)).spans(Run(0, 1, 8)) == [(1, 2)]
    assert VisibleSpan(bounds, (Run(0, 1, 1),)).spans(Run(0, 1, 8)) == []


@given(st.integers(0, 50), st.integers(1, 30), st.integers(0, 60), st.integers(0, 60))
def test_floor_sum_is_the_sum_of_floors(terms: int, modulus: int, slope: int, offset: int) -> None:
    assert floor_sum(terms, modulus, slope, offset) == sum((slope * x + offset) // modulus for x in range(terms))


@settings(deadline=None)
@given(st.data(), st.integers(0, 50), st.integers(1, 9), st.integers(1, 20))
def test_tally_counts_rows_below_a_position(data: st.DataObject, position: int, step: int, number: int) -> None:
    for shard in (data.draw(run_shards(40)), *data.draw(layouts(40, 3))):
        tally, held = Tally(shard), positions(shard)

        def below(p: int, held: list[int] = held) -> int:
            return sum(q < p for q in held)

        assert tally.below(1 << 40) == len(held)
        assert tally.below(position) == below(position)
        assert tally.sum_below(position, step, number) == sum(below(position + step * x) for x in range(number))


def test_counting_a_million_tokens_takes_no_pass_over_tokens() -> None:
    seq_len = 1 << 20
    documents = log_normal_documents(seq_len, 400, 1.5, seed=4)
    mask = ShortMask(seq_len, seq_len, causal=True, documents=documents, window=(4096, 0))

    def count() -> int:  # with a mask that has counted nothing yet
        mask = ShortMask(seq_len, seq_len, causal=True, documents=documents, window=(4096, 0))
        shards = striped(seq_len, 4)
        return sum(map(sum, count_pairs(bounds_of(mask, "keys"), shards, shards)))

    assert_quick(count, 1)  # about 60 ms on a quiet core
    total = count()
    assert total == mask.pairs(0, seq_len)
    lengths = [b - a for a, b in itertools.pairwise(documents)]
    assert total == sum(min(x, 4096) + 1 for length in lengths for x in range(length))


def test_masks_are_equal_by_content_and_copy_without_their_caches() -> None:
    mask = ShortMask(8, 8, causal=True, documents=(0, 3, 8))
    same = ShortMask(8, 8, causal=True, documents=(0, 3, 8))
    assert mask.pairs(0, 8) == 21
    assert mask == same
    assert hash(mask) == hash(same)
    for twin in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask)):
        assert twin == mask
        assert "_intervals" not in vars(twin)
    assert mask != ShortMask(8, 8, causal=True, documents=(0, 4, 8))


def test_wider_than_both_sequences_is_as_wide_as_the_longer() -> None:
    for seq_len, kv_len in ((5, 9), (9, 5)):
        wide = ShortMask(seq_len, kv_len, causal=True, window=(2**70, 9), prefix_len=2**63, chunk_len=2**63 - 1)
        assert [seen(wide, "keys", i) for i in range(seq_len)] == [(0, kv_len)] * seq_len


def test_fields_that_reach_no_further_hold_as_given() -> None:
    mask = ShortMask(9, 9, causal=True, window=(3, 2), prefix_len=4, chunk_len=5, lengths=((0, 9), (2, 7)))
    assert (mask.batch_size, ShortMask(9, 9).batch_size) == (2, 1)
    assert seen(mask, "keys", 8) == (5, 9)
    assert seen(mask, "queries", 8) == (8, 9)
    assert mask.pairs(0, 9) != mask.pairs(0, 9, 1)
    assert mask.work(0, 9) == mask.pairs(0, 9) + mask.pairs(0, 9, 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seq_len": 0}, "seq_len and kv_len must be from 1 to 2147483647, got 0 and 8"),
        ({"window": (-1, 0)}, r"window must have sides of at least 0 or None, got \(-1, 0\)"),
        ({"window": (1, 2, 3)}, r"window must be \(left, right\)"),
        ({"documents": (1, 8)}, "documents must be boundaries that start at 0 and end at seq_len 8, got 1, ..., 8"),
        ({"documents": (0, 7)}, "documents must be boundaries .* got 0, ..., 7"),
        ({"documents": ()}, "documents must be boundaries .* got nothing"),
        ({"documents": (0, 5, 4, 8)}, "documents must not decrease, got 5 then 4 at index 1"),
        ({"documents": (0, 8), "kv_len": 9}, "documents must divide one sequence, got 8 queries and 9 keys; cross"),
        ({"prefix_len": -1, "causal": True}, "prefix_len must be at least 0, got -1"),
        ({"prefix_len": 3}, "prefix_len must come with causal=True, got prefix_len=3 without"),
        ({"chunk_len": 0}, "chunk_len must be at least 1 or None, got 0"),
        ({"lengths": ()}, "lengths must have one .* per batch element, got none"),
        ({"lengths": ((0, 8), (5, 4))}, r"lengths must be 0 <= start <= stop <= seq_len 8, got \(5, 4\) for element 1"),
        ({"lengths": ((0, 8),), "kv_len": 9}, "lengths must bound one sequence, got 8 queries and 9 keys; mask padded"),
    ],
)
def test_fields_that_define_no_mask_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShortMask(**{"seq_len": 8, "kv_len": 8, **fields})


def test_a_run_of_one_position_counts_like_the_pair() -> None:
    mask = ShortMask(6, 6, causal=True, window=(2, None))
    for i in range(6):
        for j in range(6):
            row, key = (Run(i, 1, 1),), (Run(j, 1, 1),)
            assert count_pairs(bounds_of(mask, "keys"), [row], [key]) == [[is_visible(mask, i, j)]]
