"""The tensors that kernels read say what the plan and the mask say."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.kernels.interface import RowMetadata
from ringattn.kernels.runtime import table_cache
from ringattn.plan.device_tables import bounds_of, side_key, stationary_side
from ringattn.plan.layouts import contiguous, zigzag
from ringattn.plan.mask import MaskAxis
from ringattn.plan.ring_plan import make_plan
from tests.support.random_masks import layouts, masks, positions, seen
from tests.support.short_mask import ShortMask


@pytest.fixture(autouse=True)
def _fresh_cache() -> Iterator[None]:
    table_cache.clear()
    yield
    table_cache.clear()


@settings(max_examples=75, deadline=None)
@given(masks(), st.sampled_from(["keys", "queries"]))
def test_tensors_and_integers_obey_one_formula(mask: ShortMask, reading: MaskAxis) -> None:
    rows = mask.seq_len if reading == "keys" else mask.kv_len
    lo, hi = bounds_of(torch.arange(rows), mask, reading)
    expected = [[seen(mask, reading, x, b) for x in range(rows)] for b in range(mask.batch_size)]
    assert torch.stack([lo, hi], -1).tolist() == [[list(pair) for pair in element] for element in expected]


@settings(max_examples=50, deadline=None)
@given(masks(max_len=20), st.data(), st.integers(1, 5), st.sampled_from(["keys", "queries"]))
def test_sides_hold_the_runs_positions_and_intervals_of_a_visit(
    mask: ShortMask, data: st.DataObject, world_size: int, moving: str
) -> None:
    queries = data.draw(layouts(mask.seq_len, world_size))
    keys = data.draw(layouts(mask.kv_len, world_size))
    stay, of_stay, of_move = (queries, "keys", "queries") if moving == "keys" else (keys, "queries", "keys")
    for part in make_plan(queries, keys, mask, moving).ranks:
        mine = stationary_side(stay[part.rank], mask, "cpu", of_stay)
        checked: list[tuple[RowMetadata, list[int], MaskAxis]] = [(mine, positions(stay[part.rank]), of_stay)]
        for ring_step in part.ring_steps:
            if ring_step is not None:
                rows = [start + stride * x for _, length, start, stride in ring_step.runs for x in range(length)]
                side = table_cache.find(side_key(ring_step.runs, mask, "cpu", of_move))
                assert side.run_list == ring_step.runs
                checked.append((side, rows, of_move))
        for side, rows, axis in checked:
            assert side.positions.tolist() == rows
            assert side.runs.tolist() == [list(run) for run in side.run_list]
            assert sum(length for _, length, _, _ in side.run_list) == len(rows)
            assert side.lo.tolist() == [[seen(mask, axis, x, b)[0] for x in rows] for b in range(mask.batch_size)]
            assert side.hi.tolist() == [[seen(mask, axis, x, b)[1] for x in rows] for b in range(mask.batch_size)]


def test_sides_are_int32_contiguous_and_aligned() -> None:
    side = stationary_side(zigzag(50, 3)[0], ShortMask(50, 50, lengths=((0, 50), (3, 9))), "cpu")
    assert side.runs.shape == (2, 4)
    assert side.lo.shape == side.hi.shape == (2, 17)
    for tensor in (side.runs, side.positions, side.lo, side.hi):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()
        assert tensor.storage_offset() * 4 % 128 == 0


def test_equal_arguments_share_one_side() -> None:
    def side(length: int = 8, reading: MaskAxis = "keys"):
        return stationary_side(contiguous(8, 2)[1], ShortMask(8, length, causal=True), torch.device("cpu"), reading)

    assert side() is side()
    assert side() is not side(length=9)
    assert side() is not side(reading="queries")


def test_the_cache_keeps_the_latest_sides_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = contiguous(256, 4)
    mask = ShortMask(256, 256)
    first = stationary_side(shards[0], mask, "cpu")
    monkeypatch.setattr(table_cache, "CACHE_BYTES", 2 * first.runs.untyped_storage().nbytes())
    second = stationary_side(shards[1], mask, "cpu")
    assert stationary_side(shards[0], mask, "cpu") is first
    stationary_side(shards[2], mask, "cpu")
    assert stationary_side(shards[0], mask, "cpu") is first
    assert stationary_side(shards[1], mask, "cpu") is not second
    monkeypatch.setattr(table_cache, "CACHE_BYTES", 0)
    only = stationary_side(shards[3], mask, "cpu")
    assert stationary_side(shards[3], mask, "cpu") is only


def test_bytes_are_counted_as_tables_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_cache, "CACHE_BYTES", 1000)
    for size in (3, 4, 3, 2, 1, 5, 4, 12, 1):
        key: table_cache.Key[torch.Tensor] = table_cache.Key(
            "cpu", (size,), lambda _, size=size: torch.empty(100 * size).byte()
        )
        table_cache.find(key)
        sizes = [x.numel() for x in table_cache._cache.values()]
        assert table_cache._held == sum(sizes)
        assert table_cache._held <= 1000 or len(sizes) == 1
    table_cache.clear()
    assert table_cache._held == 0


def test_threads_may_make_tables_at_once() -> None:
    failed: list[BaseException] = []

    def find(thread: int) -> None:
        try:
            for i in range(3000):
                table_cache.find(table_cache.Key("cpu", (i % 1000, thread), lambda _: torch.empty(0)))
                table_cache.find(table_cache.Key("cpu", (i,), lambda _: torch.empty(0)))
        except BaseException as error:
            failed.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=find, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not failed


def test_sides_made_under_inference_mode_are_ordinary_tensors() -> None:
    with torch.inference_mode():
        side = stationary_side(contiguous(8, 2)[0], ShortMask(8, 8), "cpu")
    assert not side.lo.is_inference()


def test_a_shard_without_rows_has_an_empty_side() -> None:
    side = stationary_side((), ShortMask(2, 2), "cpu")
    assert side.runs.shape == (0, 4)
    assert side.lo.shape == (1, 0)
    assert side.run_list == ()
