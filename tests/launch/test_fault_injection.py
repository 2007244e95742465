"""Every survivor of a lost rank raises in time and names it; and trials where one does not are bad."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ringattn.launch.check import fault_injection as faults

NAMED = "RuntimeError: ring rank 0: forward, keys for ring step 1: the transfer with ring ranks [1] failed or timed out"


def _outcome(rank: int, code: int | None = 1, seconds: float | None = 2.0, output: str = NAMED) -> faults.Outcome:
    return faults.Outcome(rank, code, seconds, output)


@pytest.mark.dist
def test_every_survivor_of_every_fault_raises_in_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--ranks 2 --times 1 --parallel 3 --timeout 5 --tokens 48 --device cpu --impl eager"
    code = faults.main([*words.split(), "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert code == 0, said + (tmp_path / "faults.json").read_text()
    assert "green: 3 of 3 trials good" in said
    trials = json.loads((tmp_path / "faults.json").read_text())["trials"]
    assert [one["trial"]["fault"] for one in trials] == ["kill", "absent", "shape"]
    for one in trials:
        victim = one["outcomes"][one["trial"]["victim"]]
        assert victim["code"] == {"kill": -9, "absent": None, "shape": 1}[one["trial"]["fault"]]


@pytest.mark.dist
def test_a_rank_that_dies_while_decoding_is_named_by_all_others(tmp_path: Path) -> None:
    words = "--what decode --faults kill --ranks 3 --times 2 --parallel 2 --timeout 10 --tokens 48 --device cpu --impl eager"
    assert faults.main([*words.split(), "--out", str(tmp_path)]) == 0, (tmp_path / "faults.json").read_text()
    found = json.loads((tmp_path / "faults.json").read_text())
    assert found["what"] == "decode"
    for one in found["trials"]:
        assert [out["code"] for out in one["outcomes"] if out["rank"] != one["trial"]["victim"]] == [1, 1]


@pytest.mark.parametrize(
    ("wrong", "fails"),
    [
        ({"code": None, "seconds": None}, "ended"),
        ({"code": 0}, "ended"),
        ({"seconds": 2.0 + 5.0 + faults.GRACE_S}, "ended"),
        ({"output": "RuntimeError: connection closed"}, "named"),
        ({"output": "RuntimeError: ring rank 0 lost something"}, "named"),
        ({"output": "step 1 failed"}, "named"),
    ],
)
def test_a_survivor_that_hangs_or_succeeds_or_names_nothing_is_bad(wrong: dict[str, Any], fails: str) -> None:
    trial = faults.Trial("kill", 1, 1, 0.0)
    rest = [_outcome(1, -9, 0.0, ""), _outcome(2)]
    assert faults.judge(trial, [_outcome(0), *rest], True, 5.0).good
    verdict = faults.judge(trial, [_outcome(0, **wrong), *rest], True, 5.0)
    assert not verdict.good
    assert not getattr(verdict, fails)


def test_a_fault_that_did_not_happen_proves_nothing() -> None:
    trial = faults.Trial("kill", 1, 1, 0.0)
    assert not faults.judge(trial, [_outcome(0), _outcome(1, -9)], False, 5.0).good


def test_bad_trials_are_printed_and_written_before_the_next_begin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = faults.FaultArgs(out=tmp_path)
    good, bad = (
        faults.judge(faults.Trial("kill", 1, 1, 0.0), [_outcome(0, **wrong), _outcome(1, -9)], True, 5.0)
        for wrong in ({}, {"code": None, "seconds": None, "output": "still here"})
    )
    faults.record(args, [good, bad], [bad])
    assert "ended False" in capsys.readouterr().out
    assert (tmp_path / "1-kill-rank0.txt").read_text() == "still here"
    faults.record(args, [good, bad, good], [good])
    assert not capsys.readouterr().out
    assert len(json.loads((tmp_path / "faults.json").read_text())["trials"]) == 3


def test_a_rank_of_another_shape_must_raise_too() -> None:
    trial = faults.Trial("shape", 1, 0, 0.0)
    assert faults.judge(trial, [_outcome(0), _outcome(1)], True, 5.0).good
    assert not faults.judge(trial, [_outcome(0), _outcome(1, None, None)], True, 5.0).good


def test_trials_reach_every_rank_and_the_first_call() -> None:
    for fault in faults.FAULTS:
        trials = [faults.draw_trial(fault, 4, seed) for seed in range(50)]
        assert trials[3] == faults.draw_trial(fault, 4, 3)
        assert {trial.victim for trial in trials} == {0, 1, 2, 3}
        assert {trial.steps for trial in trials} == ({1, 2, 3} if fault == "kill" else {0, 1, 2, 3})


def test_more_ranks_than_gpus_are_refused() -> None:
    said = "ranks on a host must be at most its number of GPUs, got 1000 ranks .* GPUs; pass --ranks or --device cpu"
    with pytest.raises(SystemExit, match=said):
        faults.main(["--ranks", "1000", "--device", "cuda"])


def test_one_rank_is_refused_as_none_would_survive() -> None:
    with pytest.raises(SystemExit, match=r"^error: ranks must be at least 2, .*, got 1; pass --ranks"):
        faults.main(["--ranks", "1", "--device", "cpu"])


def test_graphs_are_refused_without_gpus() -> None:
    with pytest.raises(SystemExit, match=r"--what graph must have GPUs, .*, got the CPU; use --what decode"):
        faults.main(["--what", "graph", "--device", "cpu"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "3"], "nodes must divide the ring of 4 ranks, got 3"),
        (["--timeout", "0"], "timeout must be above 0, got 0"),
        (["--timeout", "inf"], "timeout must be above 0, got inf"),
        (["--schedule", "stepwise"], "--schedule stepwise must have GPUs, got the CPU; use --schedule process_group"),
    ],
)
def test_impossible_rings_are_refused_before_they_are_tried(words: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=said):
        faults.main([*words, "--device", "cpu", "--times", "1", "--out", str(tmp_path)])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("what", ["training", "decode", "graph"])
def test_lost_ranks_leave_usable_gpus(tmp_path: Path, what: str) -> None:
    words = ["--what", what, "--ranks", "2", "--times", "3", "--parallel", "9", "--out", str(tmp_path)]
    assert faults.main(words) == 0
