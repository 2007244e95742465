"""The planner against every committed row: it is fitted to some, which are named and not counted."""

from __future__ import annotations

import itertools
import statistics
from functools import cache
from pathlib import Path

import pytest

from ringattn.launch.plan.fit import WAYS, ring_call
from ringattn.sizing.profile import Profile, load_profile
from ringattn.sizing.ring_time import attention_time
from tests.sizing.committed_rows import Prediction, predict_rows, read_rows
from tests.support.pages import load

RESULTS = Path(__file__).parents[2] / "docs" / "results"
FITTED_RINGS = {"ring2-peers.json", "ring4.json"}
"""Files of which the rows of 1,024 tokens per GPU and of 32 KV heads are fitted."""
FITTED_FILES = {"model2-128k.json"}
FITTED_TOKENS = {
    "inference2-32768.json: 2 GPUs, 32768 tokens, 32 layers, token of 1",
    "inference2-tokens.json: 2 GPUs, 1024 tokens, 8 layers, token of 64",
    "inference4.json: 4 GPUs, 32768 tokens, 32 layers, token of 1",
}
MISSED = {
    # the host of this machine takes a fourth less than that of the rows of 1,024 tokens, which it is fitted to
    "ring4-masks.json: 4 GPUs, fused, window, 2048 tokens, 8 KV heads, forward",
    "ring4-masks.json: 4 GPUs, fused, documents, 2048 tokens, 8 KV heads, forward",
    "ring4-masks.json: 4 GPUs, fused, documents, 2048 tokens, 8 KV heads, both",
    # another host: less for a forward, more with autograd
    "ring2.json: 2 GPUs, auto, causal, 1024 tokens, 8 KV heads, forward",
    "ring2.json: 2 GPUs, auto, causal, 1024 tokens, 8 KV heads, both",
    # its backward misses the level-two cache
    "ring4-masks.json: 4 GPUs, fused, documents, 32768 tokens, 8 KV heads, both",
    # the host's time, which differed by 20% between rows of one run
    "ring4.json: 4 GPUs, stepwise, causal, 4096 tokens, 8 KV heads, forward",
    "ring4.json: 4 GPUs, stepwise, causal, 4096 tokens, 8 KV heads, both",
    "ring4.json: 4 GPUs, stepwise, causal, 8192 tokens, 8 KV heads, forward",
    # NCCL's kernels and ours share multiprocessors
    "ring4.json: 4 GPUs, nccl, causal, 8192 tokens, 8 KV heads, forward",
    "ring4.json: 4 GPUs, nccl, causal, 8192 tokens, 8 KV heads, both",
}
"""Rows of times that are more than 15% off, each with the part of the model that is wrong."""
MISSED_PEAKS = {
    # tables, workspaces and graphs of 10 to 35 MiB, which peaks of 110 to 425 MiB show
    "ring2-peers.json: 2 GPUs, fused, causal, 1024 tokens, 8 KV heads, peak",
    "ring2-peers.json: 2 GPUs, fused, causal, 1024 tokens, 32 KV heads, peak",
    "ring2-peers.json: 2 GPUs, fused, causal, 2048 tokens, 32 KV heads, peak",
    "ring2.json: 2 GPUs, auto, causal, 1024 tokens, 8 KV heads, peak",
}
"""Peaks that are more than 5% off."""


def is_fitted(one: Prediction) -> bool:
    if one.file in FITTED_FILES:
        return one.kind == "model"
    if one.kind == "token":
        return name_of(one) in FITTED_TOKENS
    return one.kind == "ring" and one.file in FITTED_RINGS and (" 1024 tokens" in one.name or "32 KV heads" in one.name)


@cache
def predictions() -> list[Prediction]:
    return [x for folder in ("", "repeats", "weights") for x in predict_rows(RESULTS / folder)]


def held_out(*, memory: bool) -> list[Prediction]:
    return [x for x in predictions() if not is_fitted(x) and x.kind.endswith("memory") == memory]


def name_of(one: Prediction) -> str:
    return f"{one.file}: {one.name}"


def test_rows_of_all_kinds_are_predicted():
    kinds = {x.kind for x in held_out(memory=False)} | {x.kind for x in held_out(memory=True)}
    assert kinds == {"ring", "model", "prefill", "token", "ring memory", "model memory"}
    assert len(held_out(memory=False)) >= 123
    assert len(held_out(memory=True)) >= 83


def test_the_median_error_of_times_is_at_most_seven_percent():
    assert statistics.median(abs(x.error) for x in held_out(memory=False)) <= 0.07


def test_nine_of_ten_times_are_within_fifteen_percent():
    found = held_out(memory=False)
    missed = {name_of(x) for x in found if abs(x.error) > 0.15}
    assert len(missed) <= 0.1 * len(found)
    assert missed == MISSED, "rows that are missed are named with the part of the model that is wrong"


def test_peaks_of_memory_are_within_five_percent():
    missed = {name_of(x) for x in held_out(memory=True) if abs(x.error) > 0.05}
    assert missed == MISSED_PEAKS


def test_peaks_of_training_steps_are_counted():
    errors = sorted(abs(x.error) for x in held_out(memory=True) if x.kind == "model memory")
    assert len(errors) == 10
    # one is of a first step
    assert errors[-2] <= 0.003
    assert errors[-1] <= 0.025


def test_short_calls_without_the_host_are_predicted():
    """Graphs of 2,048 and 4,096 tokens per GPU on two and four H100; without semaphores and the link some are 20% off."""
    profile, errors = load_profile("h100"), dict[str, float]()
    for file, _, row in read_rows(RESULTS, "ring", "short"):
        if row["tokens_per_rank"] > 1024:
            ways = (attention_time(ring_call(row, row["world_size"]), profile, way).device_ms for way in WAYS)
            for name, ms in zip(("forward", "both"), itertools.accumulate(ways), strict=True):
                case = f"{file}: {row['tokens_per_rank']} tokens, {row['kv_heads']} KV heads, {name}"
                errors[case] = ms / row[f"{name}_graph_ms"] - 1
    assert len(errors) == 16
    assert statistics.median(map(abs, errors.values())) <= 0.05
    assert {case for case, error in errors.items() if abs(error) > 0.1} == {
        # pushes of four owners share links in ways that one rate for all does not say
        "short4.json: 2048 tokens, 32 KV heads, forward",
        "short4.json: 2048 tokens, 32 KV heads, both",
    }
    assert max(map(abs, errors.values())) <= 0.16


def test_kernels_under_masks_of_several_intervals_are_predicted():
    """None of these rows was fitted."""
    profile, errors = load_profile("h200"), dict[str, float]()
    for _, _, row in read_rows(RESULTS, "kernels"):
        if row["group"] == "unions" and row["who"] == "hopper":
            call, way = ring_call(row, 1), row["direction"]
            errors[f"{row['mask']}, {way}"] = attention_time(call, profile, way).device_ms / row["ms"] - 1
    assert len(errors) == 12
    assert max(map(abs, errors.values())) <= 0.1
    assert statistics.median(map(abs, errors.values())) <= 0.03


def errors_of_h100(profile: Profile) -> dict[str, float]:
    found = dict[str, float]()
    for row in load("profiles").h100_rows(RESULTS):
        if row["group"] not in load("profiles").H100_GROUPS:
            ms = attention_time(ring_call(row, 1), profile, row["direction"]).device_ms
            found[f"{row['group']}, {row['mask']}, {row['head_dim']}, {row['direction']}"] = ms / row["ms"] - 1
    return found


def test_kernels_of_one_h100_are_predicted():
    """Windows, documents and grouped heads were not fitted."""
    errors = [abs(x) for x in errors_of_h100(load_profile("h100")).values()]
    assert len(errors) == 24
    assert max(errors) <= 0.07
    assert statistics.median(errors) <= 0.02
    # kernels of an H200 in its place are half as far off again
    of_h200 = map(abs, errors_of_h100(load_profile("h200")).values())
    assert statistics.median(of_h200) > 1.5 * statistics.median(errors)


@pytest.mark.parametrize("kind", ["ring", "model", "prefill", "token"])
def test_no_kind_is_off_on_average(kind):
    errors = [x.error for x in held_out(memory=False) if x.kind == kind]
    assert abs(statistics.median(errors)) <= 0.07


def test_the_committed_profile_is_what_the_rows_give():
    assert {name: vars(profile) for name, profile in load("profiles").profiles().items()} == {
        name: vars(load_profile(name)) for name in ("h200", "h100", "a100", "b200")
    }
