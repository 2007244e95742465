"""Documents placed over ranks: all ranks finish together, and documents that stay on one rank move nothing."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from ringattn.launch.bench.workloads import pack_documents
from ringattn.plan.layouts import Run, shard_len
from ringattn.sizing.packing import compare, pack, place
from tests.support.pages import load


def lengths_of(mix: str, count: int) -> list[int]:
    return load("scaling").draw_lengths(mix, count, longest=65536, seed=0)


@pytest.mark.parametrize("mix", ["lognormal", "long-tail", "short"])
def test_ranks_finish_together_on_every_mix(mix):
    for batch in pack(lengths_of(mix, 200), tokens=8 * 32768, cp=8)[:-1]:
        assert batch.imbalance <= 1.05


@pytest.mark.parametrize("mix", ["short", "lognormal"])
def test_many_short_documents_move_few_rows(mix):
    batches = list(compare(lengths_of(mix, 300), tokens=8 * 16384, world_size=8))
    ours, fixed = (sum(both[side].rows_moved for both in batches) for side in (0, 1))
    assert ours <= 0.7 * fixed


@pytest.mark.parametrize("keep_order", [False, True])
@pytest.mark.parametrize(("cp", "dp"), [(1, 1), (4, 1), (3, 2), (2, 4)])
def test_every_token_is_placed_once(cp, dp, keep_order):
    lengths = random.Random(0).choices(range(1, 400), k=40)
    batch = place(lengths, cp=cp, dp=dp, pairs_per_token=50, keep_order=keep_order)
    assert sorted(index for one in batch.sequences for index in one.indices) == list(range(40))
    for one in batch.sequences:
        held = sorted(p for shard in one.shards for run in shard for p in range(run.start, run.last + 1))
        assert held == list(range(one.seq_len))
        sizes = [b - a for a, b in pairwise(one.documents)]
        assert sizes == [lengths[index] for index in one.indices]


def test_a_document_that_is_short_stays_on_one_rank_and_a_long_one_is_cut():
    batch = place([1000, *[10] * 30], cp=3, pairs_per_token=0)
    (one,) = batch.sequences
    held = [
        sum(any(run.start < b and run.last >= a for run in shard) for shard in one.shards)
        for a, b in pairwise(one.documents)
    ]
    assert held[0] == 3
    assert set(held[1:]) == {1}


def test_documents_of_a_rank_are_one_run():
    (one,) = place([4, 4, 4, 4], cp=2, pairs_per_token=0).sequences
    assert one.shards == ((Run(0, 1, 8),), (Run(8, 1, 8),))


def test_batches_take_documents_in_order_while_they_fit():
    batches = pack([6, 5, 5, 9, 1], tokens=10, cp=1)
    assert [batch.sequences[0].indices for batch in batches] == [(0,), (1, 2), (3, 4)]


def test_work_is_what_the_plan_counts():
    (one,) = place([30, 20, 10, 5], cp=2, pairs_per_token=3).sequences
    whole = sum(n * (n + 1) // 2 for n in (30, 20, 10, 5))
    assert sum(one.pairs) == whole
    batch = place([30, 20, 10, 5], cp=2, pairs_per_token=3)
    assert sum(batch.work) == whole + 3 * 65
    (one,) = place([30, 20, 10, 5], cp=2, window=8).sequences
    assert sum(one.pairs) == sum(8 * n - 28 for n in (30, 20, 10)) + 15


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("lengths must be from 1 to tokens 4, got 5 at index 1", {"lengths": [4, 5], "tokens": 4, "cp": 1}),
        ("tokens must be from 1 to 2147483647, got 0", {"lengths": [1], "tokens": 0, "cp": 1}),
        ("cp must be at least 1", {"lengths": [1], "tokens": 4, "cp": 0}),
        ("dp must be at least 1", {"lengths": [1], "tokens": 4, "cp": 1, "dp": 0}),
        ("tolerance must be at least 1", {"lengths": [1], "tokens": 4, "cp": 1, "tolerance": 0.9}),
    ],
)
def test_impossible_packings_are_refused(words, options):
    with pytest.raises(ValueError, match=words):
        pack(**options)


def test_the_mix_of_the_bench_is_the_lognormal_one():
    bounds = pack_documents(1_000_000)
    mean = 1_000_000 / (len(bounds) - 1)
    drawn = lengths_of("lognormal", 2000)
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.2)
    assert max(shard_len(shard) for shard in place(drawn[:50], cp=4).sequences[0].shards) > 0
