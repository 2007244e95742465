"""Layouts hold every position once, in equal shares, and balanced ones share the work as well."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.plan.layouts import (
    LAYOUTS,
    Run,
    Shard,
    balanced,
    contiguous,
    make_shards,
    segmented,
    shard_len,
    striped,
    zigzag,
)
from tests.support.random_masks import few_long_documents, layouts, log_normal_documents, positions, runs
from tests.support.short_mask import ShortMask
from tests.support.timing import assert_quick

MIXES = {
    "log-normal, mean 1000, sigma 1.2": lambda n: log_normal_documents(n, 1000, 1.2, seed=1),
    "log-normal, mean 4000, sigma 1.5": lambda n: log_normal_documents(n, 4000, 1.5, seed=2),
    "log-normal, mean 500, sigma 2": lambda n: log_normal_documents(n, 500, 2.0, seed=3),
    "many short, few long": lambda n: few_long_documents(n, seed=7),
}


def work_ratio(mask: ShortMask, shards: tuple[Shard, ...]) -> float:
    """Greatest over mean work of a rank."""
    work = [sum(mask.work(run.start, run.last + 1) for run in shard) for shard in shards]
    return max(work) * len(work) / sum(work)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 60), st.integers(1, 8))
def test_every_position_is_held_exactly_once(data: st.DataObject, seq_len: int, world_size: int) -> None:
    shards = data.draw(layouts(seq_len, world_size))
    assert len(shards) == world_size
    assert sorted(p for shard in shards for p in positions(shard)) == list(range(seq_len))


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 60), st.integers(1, 8))
def test_positions_ascend_and_runs_are_merged(data: st.DataObject, seq_len: int, world_size: int) -> None:
    for shard in data.draw(layouts(seq_len, world_size)):
        held = positions(shard)
        assert held == sorted(held)
        assert all(run.length > 0 for run in shard)
        assert all(run.stride == 1 for run in shard if run.length == 1)
        assert all(a.last + 1 < b.start for a, b in pairwise(shard))


@pytest.mark.parametrize("layout", [contiguous, striped, zigzag])
@pytest.mark.parametrize("world_size", range(1, 9))
def test_shard_lengths_differ_by_one_at_most(layout, world_size: int) -> None:
    for seq_len in range(1, 70):
        lengths = [shard_len(shard) for shard in layout(seq_len, world_size)]
        assert max(lengths) - min(lengths) <= 1, (seq_len, lengths)


def test_zigzag_pairs_the_first_chunk_with_the_last() -> None:
    assert zigzag(16, 4) == (
        (Run(0, 1, 2), Run(14, 1, 2)),
        (Run(2, 1, 2), Run(12, 1, 2)),
        (Run(4, 1, 2), Run(10, 1, 2)),
        (Run(6, 1, 4),),
    )


def test_one_rank_holds_one_run_and_ranks_may_hold_nothing() -> None:
    for name in LAYOUTS:
        parts, whole = ((4, 3), (1,)) if name == "segments" else (None, None)
        assert make_shards(name, 7, 1, ShortMask(7, 7), parts) == ((Run(0, 1, 7),),)
        assert [shard_len(shard) for shard in make_shards(name, 1, 3, ShortMask(1, 1), whole)] == [1, 0, 0]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.integers(1, 8))
def test_a_rank_holds_the_contiguous_share_of_every_segment(lengths: list[int], world_size: int) -> None:
    for rank, shard in enumerate(segmented(lengths, world_size)):
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        shares = [positions(contiguous(n, world_size)[rank]) for n in lengths]
        held = [start + p for start, share in zip(starts, shares, strict=True) for p in share]
        assert positions(shard) == held


def test_segments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"segments must be lengths .* sum to seq_len 9, got \(4, 4\), which sum to 8"):
        make_shards("segments", 9, 2, segments=(4, 4))
    with pytest.raises(ValueError, match="segments must be lengths of at least 1 token"):
        make_shards("segments", 4, 2, segments=(4, 0))
    with pytest.raises(ValueError, match="segments must be given with layout='segments' and only then"):
        make_shards("segments", 9, 2)
    with pytest.raises(ValueError, match="segments must be given with layout='segments' and only then"):
        make_shards("zigzag", 9, 2, segments=(4, 5))


@given(runs(200))
def test_last_is_the_position_of_the_last_row(run: Run) -> None:
    assert run.last == run.position(run.length - 1)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("world_size", [4, 8, 16])
def test_balanced_shares_the_work_of_packed_documents(mix: str, world_size: int) -> None:
    seq_len = 1 << 18
    mask = ShortMask(seq_len, seq_len, causal=True, documents=MIXES[mix](seq_len))
    shards = balanced(seq_len, world_size, mask.work)
    assert work_ratio(mask, zigzag(seq_len, world_size)) > 1.2
    assert work_ratio(mask, shards) <= 1.02
    lengths = [shard_len(shard) for shard in shards]
    assert max(lengths) - min(lengths) <= 16  # tokens: one per chunk
    full = ShortMask(seq_len, seq_len, documents=mask.documents, window=(4096, 4096))
    assert work_ratio(full, balanced(seq_len, world_size, full.work)) <= 1.02


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=200), st.integers(1, 8), st.integers(1, 16))
def test_balanced_gives_every_rank_the_same_number_of_chunks(weights: list[int], world_size: int, chunks: int) -> None:
    def work(a: int, b: int) -> int:
        return sum(weights[a:b])

    shards = balanced(len(weights), world_size, work, chunks_per_rank=chunks)
    dealt = min(chunks, max(1, len(weights) // world_size))
    chunk = -(-len(weights) // (world_size * dealt))
    lengths = [shard_len(shard) for shard in shards]
    if len(weights) >= world_size:
        assert all((chunk - 1) * dealt <= length <= chunk * dealt for length in lengths)
    loads = [sum(work(run.start, run.last + 1) for run in shard) for shard in shards]
    assert max(loads) - min(loads) <= 2 * max(work(a, min(len(weights), a + chunk)) for a in range(len(weights)))


def test_balanced_is_as_coarse_as_the_mask_allows() -> None:
    seq_len = 1 << 17
    window = ShortMask(seq_len, seq_len, causal=True, window=(1024, 0))
    assert balanced(seq_len, 8, window.work) == contiguous(seq_len, 8)
    causal = ShortMask(seq_len, seq_len, causal=True)
    assert set(balanced(seq_len, 8, causal.work)) == set(zigzag(seq_len, 8))


def test_balanced_begins_with_the_chunks_asked_for_and_refines_down_to_the_shortest() -> None:
    work = ShortMask(8, 8, causal=True).work
    assert balanced(8, 2, work) == contiguous(8, 2)
    assert balanced(8, 2, work, chunks_per_rank=2) == zigzag(8, 2)
    assert balanced(8, 2, work, min_chunk_len=2) == zigzag(8, 2)
    assert balanced(8, 2, work, min_chunk_len=3) == contiguous(8, 2)


def test_balanced_ranks_are_in_order_of_their_first_position() -> None:
    mask = ShortMask(1 << 14, 1 << 14, causal=True, documents=log_normal_documents(1 << 14, 700, 1.5, seed=5))
    firsts = [shard[0].start for shard in balanced(1 << 14, 8, mask.work)]
    assert firsts == sorted(firsts)


def test_balanced_is_fast_for_a_million_tokens() -> None:
    seq_len = 1 << 20
    documents = log_normal_documents(seq_len, 400, 1.5, seed=4)
    assert len(documents) > 2000

    def cut() -> tuple[Shard, ...]:  # for a mask that has counted nothing yet
        mask = ShortMask(seq_len, seq_len, causal=True, documents=documents)
        return make_shards("balanced", seq_len, 8, mask)

    assert_quick(cut, 0.25)  # about 15 ms on a quiet core
    assert work_ratio(ShortMask(seq_len, seq_len, causal=True, documents=documents), cut()) <= 1.02


def test_wrong_sizes_and_names_are_refused() -> None:
    with pytest.raises(ValueError, match="seq_len must be from 1 to 2147483647, got 0"):
        zigzag(0, 2)
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        make_shards("striped", 4, 0)
    with pytest.raises(
        ValueError, match="layout must be one of contiguous, striped, zigzag, balanced, segments, got 'ring'"
    ):
        make_shards("ring", 4, 2)
    with pytest.raises(ValueError, match="must be given the mask to balance"):
        make_shards("balanced", 4, 2)
