"""Random kernel calls are repeatable, reach the edges, and are red when a kernel is wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from ringattn.kernels.attention.eager import EagerKernels
from ringattn.kernels.interface import BackwardStep, Grads, Step
from ringattn.launch.check import __main__ as check
from ringattn.launch.check import fuzz
from ringattn.launch.common.session import Session
from ringattn.plan.layouts import shard_len
from tests.support.short_mask import ShortMask

CPU = ["--device", "cpu", "--impl", "eager"]


HERE = Session(0, 1, torch.device("cpu"), None)


def _reds(seeds: Iterable[int], impl: str = "eager") -> dict[int, str]:
    tallies = [fuzz.fuzz(0.0, seed, impl, HERE) for seed in seeds]
    return {row["seed"]: row["why"] for tally in tallies for row in tally.red}


def test_random_calls_of_the_eager_kernels_are_inside_the_budget() -> None:
    assert _reds(range(1000, 1060)) == {}


def test_results_are_written_as_json(tmp_path: Path) -> None:
    assert check.main([*CPU, "--fuzz", "1", "--fuzz-seed", "7", "--json", str(tmp_path / "fuzz.json")]) == 0
    kept = json.loads((tmp_path / "fuzz.json").read_text())
    assert kept["green"]
    assert kept["cases"] >= 1
    assert set(kept["worst"]) >= {"o", "lse", "dq", "dk", "dv", "forward twice"}
    assert kept["ranks"][0]["served"] == {"eager": kept["cases"]}
    assert kept["ranks"][0]["next_seed"] == 7 + kept["cases"]


def _fuzz(path: str) -> int:
    return check.main([*CPU, "--fuzz", "0", "--fuzz-seed", "1", "--json", path])


def test_tensors_that_one_rank_alone_has_are_in_the_table(pool, tmp_path: Path) -> None:
    """The case of rank 1 has a bias of keys, that of rank 0 none."""
    assert pool(2).run(_fuzz, str(tmp_path / "fuzz.json")) == [0, 0]
    assert "dkey_bias" in json.loads((tmp_path / "fuzz.json").read_text())["worst"]


def _wrong(name: str, monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    right = getattr(EagerKernels, name)

    def wrong(kernels: EagerKernels, *args: Any) -> None:
        right(kernels, *args)
        change(*args)

    monkeypatch.setattr(EagerKernels, name, wrong)


def _last_row_of_o(step: Step) -> None:
    if step.last and step.o.numel() and step.q.dtype == torch.float32:
        step.o[:, -1] *= 1.01


def _noise_in_o(step: Step) -> None:
    step.o.mul_(1 + 1e-3 * torch.randn(()))


def _noise_in_dq(step: BackwardStep, grads: Grads) -> None:
    grads.dq.mul_(1 + 1e-3 * torch.randn(()))


def _unwritten_dk(step: BackwardStep, grads: Grads) -> None:
    assert grads.dk is not None
    grads.dk[:, :1] = torch.nan


@pytest.mark.parametrize(
    ("name", "change", "tensor"),
    [
        ("forward", _last_row_of_o, "o"),
        ("forward", _noise_in_o, "forward twice"),
        ("backward", _noise_in_dq, "backward twice"),
        ("backward", _unwritten_dk, "dk"),
    ],
)
def test_a_wrong_kernel_is_red_and_its_seed_replays_it(
    name: str, change: Any, tensor: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: Any
) -> None:
    with monkeypatch.context() as patch:
        _wrong(name, patch, change)
        red = [seed for seed, why in _reds(range(24)).items() if tensor in why]
        assert red
        again = ["--fuzz", "0", "--fuzz-seed", str(red[0]), "--json", str(tmp_path / "fuzz.json")]
        capfd.readouterr()
        assert check.main([*CPU, *again]) == 1
        assert f"--fuzz 0 --fuzz-seed {red[0]} --impl eager --device cpu" in capfd.readouterr().err
        for kept in ("fuzz.json", "fuzz-rank0.red.json"):
            assert tensor in json.loads((tmp_path / kept).read_text())["red"][0]["why"]
    assert check.main([*CPU, *again]) == 0


def test_rows_that_see_one_key_have_room_for_the_rounding_of_o_and_for_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, right = (2000335, 2003599, 2008432), EagerKernels.delta
    assert _reds(seeds, "auto") == {}

    def wrong(kernels: EagerKernels, o: torch.Tensor, *args: Any) -> torch.Tensor:
        return right(kernels, o * (1 + 4 * torch.finfo(o.dtype).eps), *args)

    monkeypatch.setattr(EagerKernels, "delta", wrong)
    assert set(_reds(seeds, "auto")) == set(seeds)


def test_a_kernel_that_raises_is_red(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(EagerKernels, "delta", broken)
    assert check.main([*CPU, "--fuzz", "0"]) == 1
    assert "no such instruction" in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_random_cases_reach_the_edges(kind: str) -> None:
    cases = [fuzz.draw_case(seed, kind) for seed in range(1200)]
    assert cases[7] == fuzz.draw_case(7, kind)
    lengths = {case.mask.seq_len for case in cases}
    tiles = (64, 128, 192) if kind == "cuda" else (16, 32)
    assert {1, *(tile + shift for tile in tiles for shift in (-1, 0, 1))} <= lengths
    documents = [case.mask.documents for case in cases if case.mask.documents]
    assert any(len(set(cuts)) < len(cuts) for cuts in documents)
    assert any(case.mask_options.get("lengths") for case in cases)
    assert {len(case.ring_steps) for case in cases} >= {1, 2, 3, 4}
    assert any(not keys for case in cases for keys in case.ring_steps)
    assert any(not case.rows for case in cases)
    assert any(run.stride > 1 for case in cases for run in case.rows)
    assert any(len(case.rows) > 5 for case in cases)
    met = {feature for case in cases for feature in case.features}
    assert met == {"softcap", "dropout", "sinks", "alibi", "key_bias", "bias", "per_batch_bounds", "deterministic"}
    assert {kind for case in cases for kind in case.strides} == set(fuzz.STRIDES)
    for case in cases:
        scores = case.batch * case.heads * shard_len(case.rows) * sum(shard_len(keys) for keys in case.ring_steps)
        assert scores <= fuzz.SCORES[kind]


def test_runs_ascend_and_keys_of_ring_steps_are_disjoint() -> None:
    for seed in range(300):
        rows, ring_steps = fuzz.draw_split(random.Random(seed), ShortMask(50, 61))
        for shard in (rows, *ring_steps):
            positions = fuzz.positions_of([shard], torch.device("cpu"))
            assert bool((positions.diff() > 0).all())
        keys = fuzz.positions_of(ring_steps, torch.device("cpu")).tolist()
        assert len(set(keys)) == len(keys)
        assert all(0 <= position < 61 for position in keys)


@pytest.mark.parametrize("kind", fuzz.STRIDES)
def test_strides_change_the_memory_layout_and_no_value(kind: str) -> None:
    x = torch.randn(2, 5, 3, 8)
    y = fuzz.lay_out(x, kind)
    assert torch.equal(x, y)
    assert y.stride(-1) == 1
    assert (y.stride() == x.stride()) == (kind == "plain")
