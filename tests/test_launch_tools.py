"""The commands that look, check and measure: they tell the truth, and they notice when it is not the truth."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.budget import Budget
from ringattn.kernels import eager
from ringattn.launch import bench, check, doctor, timeline
from ringattn.launch.distributed import resolve_device
from ringattn.launch.session import Session, open_session
from ringattn.reference import visible_pairs

ROOT = Path(__file__).parents[1]
TINY = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--dtype", "fp32"]


@pytest.fixture
def _wrong_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "forward", _off_by_a_little(eager.forward, "o"))


@pytest.fixture
def _wrong_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any) -> None:
        right(*args)
        args[9].dv.mul_(1.001)

    right = eager.backward
    monkeypatch.setattr(eager, "backward", wrong)


def _off_by_a_little(right: Any, name: str) -> Any:
    def wrong(*args: Any, **kwargs: Any) -> None:
        right(*args, **kwargs)
        kwargs[name].mul_(1.001)

    return wrong


def _torchrun(world_size: int, *words: str) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world_size)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*start, "-m", *words], env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def test_doctor_finds_this_box_healthy_and_says_why_a_kernel_is_not_used(tmp_path: Path) -> None:
    assert doctor.main(["--device", "cpu", "--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["faults"] == []
    assert report["machine"]["torch"] == torch.__version__
    assert {row["kernels"] for row in report["kernels"]} == {"eager"}
    assert all(row["why"] and row["rejected"].get("portable") for row in report["kernels"])


def test_doctor_finds_a_broken_kernel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(eager, "forward", broken)
    assert doctor.main(["--device", "cpu"]) == 1
    assert "no such instruction" in capsys.readouterr().out


def _doctor() -> dict[str, Any]:
    with open_session("cpu") as session:
        return doctor.examine(session)


@pytest.mark.dist
def test_doctor_measures_links_and_says_the_same_on_every_rank(pool) -> None:
    reports = pool(2).run(_doctor)
    assert reports[0]["faults"] == reports[1]["faults"] == []
    assert [row["mib"] for row in reports[0]["links"]] == [1, 8, 64]
    assert all(row["intact"] and row["gb_per_s"] > 0 for row in reports[0]["links"])


def test_check_is_green_in_one_process(tmp_path: Path) -> None:
    assert check.main(["--quick", "--device", "cpu", "--json", str(tmp_path / "check.json")]) == 0
    kept = json.loads((tmp_path / "check.json").read_text())
    assert kept["green"]
    layouts = {row["layout"] for row in kept["rows"] if row["case"] == "causal window"}
    assert layouts == {check.ALONE, *check.LAYOUTS}
    tensors = {name for row in kept["rows"] for name in row["ratios"]}
    gradients = {"dsinks", "dalibi_slopes", "dkey_bias", "dbias"}
    assert tensors == {"o", "lse", "dq", "dk", "dv", *gradients, "same bits twice"}


@pytest.mark.dist
def test_check_is_green_under_torchrun() -> None:
    done = _torchrun(2, "ringattn.launch.check", "--quick", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "green: " in done.stdout
    assert "2 rank(s), gloo" in done.stdout


@pytest.mark.usefixtures("_wrong_forward")
def test_check_is_red_when_the_forward_is_off_by_a_thousandth(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--quick", "--device", "cpu", "--only", "window"]) == 1
    said = capsys.readouterr().out
    assert "RED: causal window (fp32 b1 n37 h4/2 d16), zigzag, " in said
    assert "over budget: o " in said
    assert "green: " not in said


@pytest.mark.usefixtures("_wrong_backward")
def test_check_is_red_when_the_backward_is_off_by_a_thousandth(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--quick", "--device", "cpu", "--only", "window"]) == 1
    assert "zigzag, dv on rank " in capsys.readouterr().out


def _check_with_one_wrong_rank() -> int:
    right = eager.forward
    if dist.get_rank() == 1:
        eager.forward = _off_by_a_little(right, "o")
    try:
        return check.main(["--quick", "--device", "cpu", "--only", "full"])
    finally:
        eager.forward = right


@pytest.mark.dist
def test_every_rank_is_red_when_one_is_wrong(pool) -> None:
    assert pool(2).run(_check_with_one_wrong_rank) == [1, 1]


def test_check_is_red_when_nothing_was_checked() -> None:
    assert check.main(["--quick", "--device", "cpu", "--only", "no such case"]) == 1


def test_nan_is_outside_every_budget() -> None:
    case = check.Case("x", "fp32", 3)
    exact = torch.zeros(3, dtype=torch.float64)
    standard: check.Standard = {"o": (exact, Budget(1.0, 1.0))}
    for wrong in (math.nan, math.inf, -math.inf):
        x = torch.tensor([0.0, wrong, 0.0])
        finding = check.examine(case, "zigzag", lambda x=x: ({"o": x}, lambda x, name: x), standard)
        assert finding.ratios["o"] > 1
        verdict = check.agree(Session(0, 1, torch.device("cpu"), None), [finding], [])
        assert [row["tensor"] for row in verdict.red] == ["o"]
    assert Session(0, 1, torch.device("cpu"), None).maximum([math.nan, 1.0]) == [math.inf, 1.0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("make", [check.quick_cases, check.full_cases])
def test_every_layout_meets_every_mask_and_option(make: Any, world_size: int, device: str) -> None:
    cases = list(make(world_size, device))
    met = {(layout, option) for case in cases for layout in case.layouts for option in case.options}
    assert met == {(layout, option) for layout in check.LAYOUTS for option in check.OPTIONS}
    everywhere = [case.name for case in cases if case.layouts == check.LAYOUTS]
    assert set(check.masks(64)) <= set(everywhere)
    assert {case.dtype for case in cases} >= {"bf16", "fp16", "fp32"}
    assert {"keys", "queries"} <= {case.backward for case in cases}


def _bench(out: str) -> int:
    words = ["--tokens", "48", "--layouts", "zigzag", "balanced", "--rounds", "2", "--device", "cpu", "--out", out]
    return bench.main(["ring", *TINY, "--masks", "causal", "window", *words])


@pytest.mark.dist
def test_bench_ring_writes_rows_and_a_plot(pool, tmp_path: Path) -> None:
    assert pool(2).run(_bench, str(tmp_path)) == [0, 0]
    kept = json.loads((tmp_path / "ring.json").read_text())
    assert kept["machine"]["world_size"] == 2
    assert [(row["mask"], row["layout"]) for row in kept["rows"]] == [
        (mask, layout) for mask in ("causal", "window") for layout in ("zigzag", "balanced")
    ]
    for row in kept["rows"]:
        assert row["both_ms"] > 0
        assert row["forward_ms"] > 0
        assert row["forward_tflops"] * row["forward_ms"] * 1e9 == pytest.approx(4 * 4 * 16 * row["pairs"] / 2)
        assert row["forward_exposed_ms"] == pytest.approx(row["forward_ms"] - row["forward_alone_ms"])
        # rank 0 needs all 48 keys of rank 1, rank 1 only the first 24 of rank 0; k and v, 2 heads of 16, fp32
        if (row["mask"], row["layout"]) == ("causal", "zigzag"):
            assert row["bytes_received"]["forward"] == (48 + 24) // 2 * 2 * 16 * 2 * 4
    assert (tmp_path / "ring.png").read_bytes().startswith(b"\x89PNG")


def test_bench_kernels_says_who_was_refused(tmp_path: Path) -> None:
    sizes = ["--lengths", "64", "--heads", "2", "--kv-heads", "2", "1", "--head-dims", "16", "--dtype", "fp32"]
    assert bench.main(["kernels", *sizes, "--rounds", "1", "--device", "cpu", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    assert {row["who"] for row in rows} == {"ours", "cudnn", "fa2", "flex"}
    assert all(("refused" in row) == (row["who"] != "ours") for row in rows)
    assert {(row["kv_heads"], row["mask"]) for row in rows} >= {(2, "documents"), (1, "causal")}


@pytest.mark.usefixtures("_wrong_backward")
@pytest.mark.parametrize("kind", ["ring", "memory"])
def test_no_speed_is_shown_on_a_red_check(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([kind, *TINY, "--device", "cpu", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "red: no speed is shown" in said
    assert "tflops" not in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mask", ["full", "causal", "window", "documents"])
@pytest.mark.parametrize("n", [1, 5, 64, 1000])
def test_counted_pairs_are_the_visible_ones(mask: Any, n: int) -> None:
    problem = bench.Problem(mask, n, 1, 1, 1, 16, "fp32", window=7)
    assert problem.pairs == int(visible_pairs(n, documents=problem.documents, **problem.options).sum())


@pytest.mark.parametrize("mask", ["full", "causal", "window", "documents"])
@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_the_same_work_is_the_shortest_length_with_a_share_of_the_pairs(mask: Any, world_size: int) -> None:
    problem = bench.Problem(mask, 5000, 1, 1, 1, 16, "fp32", window=100)
    share = bench.same_work(problem, world_size)
    shorter = bench.dataclasses.replace(share, seq_len=share.seq_len - 1)
    assert shorter.pairs < problem.pairs / world_size <= share.pairs
    assert (share == problem) == (world_size == 1)


def test_documents_are_the_same_at_every_length() -> None:
    long, short = bench.pack_documents(100_000), bench.pack_documents(10_000)
    assert long[: len(short) - 1] == short[:-1]
    assert (short[0], short[-1], long[-1]) == (0, 10_000, 100_000)
    assert all(a < b for a, b in pairwise(long))


def _timeline(out: str) -> int:
    return timeline.main([*TINY, "--tokens", "48", "--warmup", "1", "--device", "cpu", "--out", out])


@pytest.mark.dist
def test_traces_have_named_ring_steps(pool, tmp_path: Path) -> None:
    assert pool(2).run(_timeline, str(tmp_path)) == [0, 0]
    summary = json.loads((tmp_path / "summary.json").read_text())
    for rank in range(2):
        events = json.loads((tmp_path / f"rank{rank}.json").read_text())["traceEvents"]
        names = {event["name"] for event in events}
        assert {f"ring step 0: keys of rank {rank}", f"ring step 1: keys of rank {1 - rank}"} <= names
        found = summary["ranks"][rank]
        assert found["compute_ms"] > 0
        assert found["communication_ms"] > 0
        assert found["hidden_ms"] + found["exposed_ms"] == pytest.approx(found["communication_ms"])


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)).map(lambda x: (x[0], x[0] + x[1])), max_size=8)


@given(spans, spans)
@settings(deadline=None)
def test_intervals_count_each_moment_once(these: list[Any], those: list[Any]) -> None:
    def moments(intervals: list[Any]) -> list[int]:
        return [t for start, stop in intervals for t in range(start, stop)]

    a, b = timeline.union(these), timeline.union(those)
    assert moments(a) == sorted(set(moments(these)))
    assert moments(timeline.intersection(a, b)) == sorted(set(moments(these)) & set(moments(those)))


def test_a_device_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match="device must be auto, cpu or cuda, got 'tpu'"):
        resolve_device("tpu", 0, 1)
    with pytest.raises(ValueError, match="start fewer with --nproc_per_node or pass --device cpu"):
        resolve_device("cuda", 0, 1000)
    assert resolve_device("cpu", 3, 4) == torch.device("cpu")


@pytest.mark.parametrize("module", [bench, check, timeline])
def test_examples_run(module: Any) -> None:
    import doctest

    found = doctest.testmod(module)
    assert found.failed == 0
