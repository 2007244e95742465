"""`bench kernels` gives a speed to right answers only, and says who was refused."""

from __future__ import annotations

import dataclasses
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import ringattn
from ringattn.kernels.attention.eager import EagerKernels
from ringattn.kernels.decode import eager as decode_eager
from ringattn.launch.bench import __main__ as bench
from ringattn.launch.bench import baselines, correctness, kernels, workloads
from ringattn.numerics.reference import visible_pairs
from tests.launch.common import _off_by_a_little

SMALL = ["kernels", "--device", "cpu", "--dtype", "fp32", "--rounds", "1", "--head-dims", "16", "--heads", "2"]


SMALL += ["--length", "64", "--lengths", "32", "64", "--batch", "2", "32"]


SMALL += ["--grouped", "4", "1", "--window", "15", "--document", "20", "--union-length", "64"]


def _rows(tmp_path: Path, *words: str) -> dict[str, Any]:
    assert bench.main([*SMALL, "--out", str(tmp_path), *words]) == 0
    return json.loads((tmp_path / "kernels.json").read_text())


def test_unsupported_contenders_have_a_row_with_the_reason(tmp_path: Path) -> None:
    groups = ["target", "masks", "grouped", "unions"]
    kept = _rows(tmp_path, "--who", "auto", "portable", *baselines.PEERS, "--groups", *groups)
    rows = kept["rows"]
    assert {(row["who"], row["level"]) for row in rows if "tflops" in row} == {("auto", "op"), ("auto", "kernel")}
    assert all(row["refused"] for row in rows if row["who"] != "auto")
    assert "device must be a CUDA" in next(row["refused"] for row in rows if row["who"] == "portable")
    assert {(row["group"], row["mask"], row["kv_heads"]) for row in rows} == {
        *(("target", mask, 2) for mask in ("full", "causal")),
        *(("masks", mask, 2) for mask in ("window", "documents")),
        *(("unions", mask, 2) for mask in workloads.UNIONS),
        *(("grouped", mask, 1) for mask in ("full", "causal")),
    }
    for row in rows:
        if "tflops" in row:
            work = 4 * row["heads"] * 16 * row["pairs"] * {"forward": 1, "backward": 2.5}[row["direction"]]
            assert row["tflops"] * row["ms"] * 1e9 == pytest.approx(work)
            assert (row["timing"], row["graph_refused"]) == ("calls", "NotImplementedError: graphs need a GPU")
            assert 0 < row["ratio"] <= 1
            assert row["kernels"] == "eager"


def test_a_narrower_v_is_checked_and_counts_its_own_products(tmp_path: Path) -> None:
    who = ["--who", "eager", "--levels", "op", "kernel", "steps", "--groups", "grouped", "--masks", "causal"]
    rows = _rows(tmp_path, *who, "--v-head-dim", "8")["rows"]
    assert len(rows) == 6
    for row in rows:
        assert 0 < row["ratio"] <= 1
        work = row["heads"] * row["pairs"] * {"forward": 2 * 16 + 2 * 8, "backward": 6 * 16 + 4 * 8}[row["direction"]]
        assert row["tflops"] * row["ms"] * 1e9 == pytest.approx(work)


def test_ring_steps_of_four_ranks_are_checked_and_timed(tmp_path: Path) -> None:
    rows = _rows(tmp_path, "--who", "torch", "eager", "--levels", "steps", "--groups", "masks")["rows"]
    assert {(row["who"], row["mask"], row["direction"]) for row in rows if "tflops" in row} == {
        (who, mask, direction)
        for who in ("torch", "eager")
        for mask in ("window", "documents")
        for direction in ("forward", "backward")
    }
    assert all(0 < row["ratio"] <= 1 and row["kernels"] == row["who"] for row in rows)


def test_bench_kernels_fails_when_nothing_was_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--who", "fa2", "portable", "--groups", "target", "--out", str(tmp_path)]
    assert bench.main([*SMALL, *words]) == 1
    assert capsys.readouterr().err.startswith(
        'error: portable: impl="portable" cannot serve this call: device must be a CUDA'
    )
    assert bench.main([*SMALL, *words, "--who", "fa2"]) == 1
    assert capsys.readouterr().err == "error: fa2: runs on GPUs only\n"
    assert bench.main([*SMALL, *words]) == 1
    rows = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    assert {row["who"] for row in rows if row["refused"]} == {"fa2", "portable"}
    # a window of 16 cuts no 16 tokens
    words = ["--groups", "lengths", "--masks", "window", "--lengths", "16", "--out", str(tmp_path / "none")]
    with pytest.raises(
        SystemExit, match=r"^error: bench kernels must have a problem to measure, got none; pass other --groups"
    ):
        bench.main([*SMALL, *words])
    assert not (tmp_path / "none").exists()


def test_problems_beyond_the_budget_have_a_row_with_the_reason(tmp_path: Path) -> None:
    assert bench.main([*SMALL, "--groups", "lengths", "--budget-s", "1e-9", "--out", str(tmp_path)]) == 1
    kept = json.loads((tmp_path / "kernels.json").read_text())
    assert {row["refused"] for row in kept["rows"]} == {"left out: 1e-09 s were over"}
    assert {(row["mask"], row["seq_len"]) for row in kept["rows"]} == {
        (mask, n) for mask in ("full", "causal", "window", "documents") for n in (32, 64)
    }


@pytest.mark.parametrize(("length", "warns"), [("64", False), ("8192", True)])
def test_a_cpu_is_warned_of_sizes_for_a_gpu_before_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], length: str, warns: bool
) -> None:
    words = ["--groups", "target", "--length", length, "--budget-s", "1e-9", "--out", str(tmp_path)]
    assert bench.main([*SMALL, *words]) == 1
    assert ("2 problems of up to 8,192 tokens are sized for a GPU" in capsys.readouterr().out) is warns


def test_wrong_kernels_have_no_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(EagerKernels, "forward", _off_by_a_little(EagerKernels.forward))
    words = ["--who", "auto", "--groups", "target", "--masks", "full", "--out", str(tmp_path)]
    assert bench.main([*SMALL, *words]) == 1
    kept = json.loads((tmp_path / "kernels.json").read_text())
    assert all("wrong answer: o " in row["refused"] and "ms" not in row for row in kept["rows"])
    assert "error: auto: wrong answer: o " in capsys.readouterr().err


def test_softmax_is_a_group_whose_wrong_answers_have_no_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = _rows(tmp_path, "--groups", "softmax")["rows"]
    assert [(row["dtype"], row["n"]) for row in rows] == [(x, n) for x in ("fp32", "bf16") for n in (1024, 2048, 4096)]
    for row in rows:
        size = row["n"] * row["m"] * {"fp32": 4, "bf16": 2}[row["dtype"]]
        assert row["ours_gbps"] * row["ours_ms"] * 1e6 == pytest.approx(3 * size)
        assert row["share_of_copy"] == pytest.approx(row["ours_gbps"] / row["copy_gbps"])
    monkeypatch.setattr(kernels, "online_softmax", lambda x, dim=-1: 1.001 * torch.softmax(x, dim))
    assert bench.main([*SMALL, "--groups", "softmax", "--out", str(tmp_path)]) == 1
    rows = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    assert all("wrong answer: y " in row["refused"] and "ours_gbps" not in row for row in rows)


def test_latents_are_a_group_whose_wrong_answers_have_no_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--groups", "latent", "--who", "eager", "fa2"]
    rows = _rows(tmp_path, *words)["rows"]
    assert [(row["pages"], row["who"], row["kernels"]) for row in rows] == [
        (pages, "eager", "eager") for pages in ("bfloat16", "float8_e4m3fn")
    ]
    for row in rows:
        data = row["batch"] * row["seq_len"] * {"bfloat16": 1152, "float8_e4m3fn": 580}[row["pages"]]
        assert row["gbps"] * row["ms"] * 1e6 == pytest.approx(data)
        assert row["tflops"] * row["ms"] * 1e9 == pytest.approx(row["batch"] * row["seq_len"] * row["heads"] * 2 * 1088)
    right = decode_eager._partial
    monkeypatch.setattr(decode_eager, "_partial", lambda scores, values: right(scores, values * 1.1))
    assert bench.main([*SMALL, *words, "--out", str(tmp_path)]) == 1
    rows = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    assert all("wrong answer: o " in row["refused"] and "gbps" not in row for row in rows)


def test_a_peer_that_raises_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(inputs: workloads.Inputs) -> baselines.Contender:
        raise AssertionError("only SM100 is supported")

    def half(inputs: workloads.Inputs) -> baselines.Contender:
        whole = baselines.prepare("auto", "op", inputs)

        def answers() -> Any:
            yield next(whole.answers())
            raise RuntimeError("no backward")

        def backward() -> None:
            raise RuntimeError("no backward")

        return dataclasses.replace(whole, backward=backward, answers=answers)

    monkeypatch.setattr(baselines, "prepare_fa4", breaks)
    monkeypatch.setattr(baselines, "prepare_flex", half)
    rows = _rows(tmp_path, "--who", "fa4", "flex", "auto", "--levels", "op", "--groups", "target")["rows"]
    said = {(row["who"], row["direction"]): row.get("refused") for row in rows}
    assert said == {
        ("fa4", "forward"): "AssertionError: only SM100 is supported",
        ("fa4", "backward"): "AssertionError: only SM100 is supported",
        ("flex", "forward"): None,
        ("flex", "backward"): "RuntimeError: no backward",
        ("auto", "forward"): None,
        ("auto", "backward"): None,
    }


def test_problems_are_ordered_by_importance() -> None:
    planned = kernels.schedule(bench.KernelsFlags())
    groups = [group for group, _ in planned]
    assert list(dict.fromkeys(groups)) == list(kernels.GROUPS)
    first = planned[0][1]
    assert (first.batch, first.heads, first.seq_len, first.head_dim, first.mask) == (1, 16, 16384, 128, "full")
    assert len(planned) == len(set(planned))
    assert {problem.seq_len for _, problem in planned} == {2**power for power in range(11, 18)}
    assert all(problem.seq_len > 4096 for _, problem in planned if problem.mask in ("window", "documents"))


@pytest.mark.parametrize("mask", ["full", "causal", "window", "documents", *workloads.UNIONS])
def test_the_expected_answer_of_a_problem_is_the_reference_on_its_last_heads(mask: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(correctness.CHUNK_ELEMENTS, "cpu", 300)
    monkeypatch.setattr(workloads, "BLOCK", 4)
    monkeypatch.setattr(workloads, "ANSWERS", 3)
    monkeypatch.setattr(workloads, "IMAGES", 4)
    problem = workloads.Problem(mask, 41, 2, 4, 2, 16, "fp32", window=7, document=9)
    inputs = workloads.Inputs(problem, torch.device("cpu"))
    expected = correctness.make_expected(inputs)
    leaves = [x.detach().double().requires_grad_() for x in inputs.take("bshd")[:3]]
    o = ringattn.attention_reference(*leaves, documents=problem.documents, **problem.options)
    grads = torch.autograd.grad(o, leaves, inputs.take("bshd")[3].double())
    for name, x in zip(("o", "dq", "dk", "dv"), (o, *grads), strict=True):
        head = slice(2, 4) if name in ("o", "dq") else slice(1, 2)
        torch.testing.assert_close(expected.tensors[name][0], x[-1:, :, head].detach())
        assert expected.ratio(name, x.detach().float()) < 1
        assert expected.ratio(name, x.detach().float() * 1.01) > 1
        assert expected.ratio(name, x.detach().float().index_fill(0, torch.tensor([0]), math.nan)) == math.inf


@pytest.mark.parametrize("mask", ["full", "causal", "window", "documents"])
@pytest.mark.parametrize("n", [1, 5, 64, 1000])
def test_counted_pairs_are_the_visible_ones(mask: Any, n: int) -> None:
    for document in (0, 6):
        problem = workloads.Problem(mask, n, 1, 1, 1, 16, "fp32", window=7, document=document)
        visible = visible_pairs(n, documents=problem.documents, **problem.options)
        assert problem.pairs == int(visible.sum())
        assert torch.equal(workloads.visible_rows(problem, 0, n, torch.device("cpu")), visible)


@pytest.mark.parametrize("mask", ["full", "causal", "window", "documents"])
@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_the_same_work_is_the_shortest_length_with_a_share_of_the_pairs(mask: Any, world_size: int) -> None:
    problem = workloads.Problem(mask, 5000, 1, 1, 1, 16, "fp32", window=100)
    share = workloads.same_work(problem, world_size)
    shorter = dataclasses.replace(share, seq_len=share.seq_len - 1)
    assert shorter.pairs < problem.pairs / world_size <= share.pairs
    assert (share == problem) == (world_size == 1)


def test_documents_are_the_same_at_every_length() -> None:
    long, short = workloads.pack_documents(100_000), workloads.pack_documents(10_000)
    assert long[: len(short) - 1] == short[:-1]
    assert (short[0], short[-1], long[-1]) == (0, 10_000, 100_000)
    assert all(a < b for a, b in pairwise(long))


def test_sampled_documents_have_the_lengths_of_the_table() -> None:
    """Most documents are short, most tokens are in long ones, which are cut."""
    cuts = workloads.sample_documents(20_000_000, 16_384)
    lengths = [b - a for a, b in pairwise(cuts)][:-1]
    middles = {sum(bounds) // 2 for bounds in workloads.LENGTHS}
    assert set(lengths) <= {min(one, 16_384) for one in middles} | {one % 16_384 for one in middles}
    count = sum(workloads.LENGTHS.values())
    for bounds in ((101, 200), (201, 500), (4097, 8192)):
        share = lengths.count(sum(bounds) // 2) / len(lengths)
        assert share == pytest.approx(workloads.LENGTHS[bounds] / count, rel=0.1)
    assert cuts[:100] == workloads.sample_documents(200_000, 16_384)[:100]
