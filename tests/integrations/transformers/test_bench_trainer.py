"""`bench trainer`: every implementation trains the same model, and one with another first step has no speed."""

from __future__ import annotations

import doctest
import json
from pathlib import Path

import pytest

from ringattn.launch.bench import __main__ as bench
from ringattn.launch.bench import model as trainer_bench
from ringattn.launch.bench.model import TrainerFlags
from ringattn.launch.bench.rows import failures

SMALL = ["--layers", "1", "--dim", "16", "--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--mlp-dim", "24"]


def _bench(out: Path, *words: str) -> list[dict]:
    small = ["--vocab-size", "11", "--dtype", "fp32", "--steps", "2", "--device", "cpu", "--out", str(out)]
    bench.main(["trainer", *SMALL, *small, *words])
    return json.loads((out / "trainer.json").read_text())["rows"]


def test_every_implementation_has_a_speed_and_the_same_first_step(tmp_path: Path) -> None:
    rows = _bench(tmp_path, "--lengths", "33", "64")
    assert [(row["seq_len"], row["who"]) for row in rows] == [(n, who) for n in (33, 64) for who in TrainerFlags().who]
    assert not failures(rows)
    for row in rows:
        assert "refused" not in row
        assert row["steps"] == 2
        assert row["tokens_per_s"] == pytest.approx(row["seq_len"] / row["step_s"])
        assert ("overhead" in row) == (row["who"] == "ring_trainer")


def test_another_first_step_has_no_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = trainer_bench._measure_trainer

    def wrong(args, who, length, session):
        found = right(args, who, length, session)
        return found | {"grad_norm": 2 * found["grad_norm"]} if who == "ringattn" else found

    monkeypatch.setattr(trainer_bench, "_measure_trainer", wrong)
    sdpa, ours = _bench(tmp_path, "--lengths", "33", "--who", "sdpa", "ringattn")
    assert sdpa["ratio"] == 1
    assert ours["refused"].startswith("wrong answer: grad_norm")
    assert "step_s" not in ours


def test_examples_run() -> None:
    assert doctest.testmod(trainer_bench).failed == 0
