"""The page of results and its figures show the rows in docs/results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.pages import load

ROOT = Path(__file__).parents[1]
Row = dict[str, Any]


def test_the_page_of_results_shows_the_stored_rows() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs/results.py"), "--check"], cwd=ROOT, check=False, timeout=240
    )
    assert done.returncode == 0, "run `python docs/results.py`"


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load("results")
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(module, "HERE", tmp_path)
    return module


def _keep(results: ModuleType, name: str, date: str, rows: list[Row], **machine: Any) -> None:
    line = {"date": date, "gpus": ["NVIDIA H100 80GB"], "torch": "2", "triton": "3", "commit": "0123456789abcdef"}
    content = {"machine": {**line, "command": "run", **machine}, "rows": rows}
    (results.HERE / "results" / name).write_text(json.dumps(content))


def _shown(results: ModuleType, title: str) -> str:
    """The section of a table."""
    [table] = [table for table in results.TABLES if table.title == title]
    return table.markdown()


def _kernel(who: str, direction: str, mask: str = "full", **other: Any) -> Row:
    """A row of `bench kernels` with made-up numbers."""
    row = {
        "who": who, "level": "op", "group": "target", "direction": direction, "mask": mask, "window": 4095,
        "document": 4096,
    }  # fmt: skip
    row |= {"seq_len": 16384, "batch": 1, "heads": 16, "kv_heads": 16, "head_dim": 128, "dtype": "bf16"}
    return {**row, "timing": "graph", "ms": 1.0, "tflops": 100.0, **other}


def _ring(who: str, world_size: int, tokens: int, **other: Any) -> Row:
    """A row of `bench ring` with made-up numbers."""
    row = {
        "who": who,
        "world_size": world_size,
        "tokens_per_rank": tokens,
        "seq_len": world_size * tokens,
        "mask": "causal",
    }
    row |= {
        "layout": "zigzag", "batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bf16", "window": 4095,
    }  # fmt: skip
    for way, speed in (("forward", 450.0), ("both", 400.0)):
        row |= {f"{way}_tflops": speed, f"{way}_percent": speed / 5, f"{way}_alone_tflops": 500.0}
    return row | other


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"rows": []}', '{"machine": {}, "rows": []}'])
def test_an_error_names_a_file_that_no_bench_wrote(results: ModuleType, content: str) -> None:
    (results.HERE / "results" / "check2.json").write_text(content)
    with pytest.raises(SystemExit, match=r"docs/results/check2\.json must be "):
        _shown(results, "Correctness")


def test_without_rows_there_is_no_table_and_no_figure(results: ModuleType) -> None:
    assert {table.markdown() for table in results.TABLES} == {""}
    results.draw_figures()
    assert results.figures_are_true()
    assert [path.name for path in results.HERE.iterdir()] == ["results"]


def test_a_run_of_check_is_a_line_with_the_worst_of_each_dtype(results: ModuleType) -> None:
    rows = [{"dtype": "bf16", "ratio": 0.5}, {"dtype": "bf16", "ratio": 1.5}, {"dtype": "fp32", "ratio": 0.25}]
    _keep(results, "check1.json", "2026-01-01", rows)
    machine = {"command": "check --schedule fused", "gpus": ["A", "A"], "commit": "0123456789abcdef+changes"}
    _keep(results, "check2.json", "2026-01-02", rows[:1], **machine)
    text = _shown(results, "Correctness")
    assert "| 1 | 1 | auto | 2 of 3 | 1.50 (2) | - | 0.25 (1) |" in text
    assert "| 2 | 2 | fused | 1 of 1 | 0.50 (1) | - | - |" in text
    assert "Run 2: 2 x A, torch 2, triton 3, commit 0123456789ab+changes: `check --schedule fused`" in text


def test_contenders_stand_beside_each_other_forward_and_backward(results: ModuleType) -> None:
    rows = [_kernel(who, way) for who in ("fa4", "hopper") for way in ("forward", "backward")]
    rows += [_kernel("hopper", "forward", "window", tflops=90.4, timing="calls", kv_heads=4)]
    rows += [_kernel("flex", "forward") | {"refused": "no"}]
    del rows[-1]["tflops"]
    rows += [_kernel("hopper", "forward", level="kernel", tflops=123.0)]
    _keep(results, "kernels.json", "2026-01-01", rows)
    _keep(results, "fa4-x.json", "2026-01-01", rows)
    text = _shown(results, "Kernels")
    assert "| head_dim | mask | tokens | heads | ringattn hopper | FlashAttention-4 |" in text
    assert "| 128 | full | 1 x 16384 | 16/16 | 100 / 100 | 100 / 100 |" in text
    assert "| 128 | window 4096 | 1 x 16384 | 16/4 | 90* / - | - |" in text
    assert "| ringattn hopper, H100 | FlashAttention-4, H100 |" in _shown(results, "Kernels beside FlashAttention-4")


def test_a_problem_is_shown_from_the_last_run_that_measured_it(results: ModuleType) -> None:
    _keep(results, "kernels-b.json", "2026-01-01", [_kernel("fa4", "forward", tflops=1.0), _kernel("cudnn", "forward")])
    _keep(results, "kernels-a.json", "2026-01-02", [_kernel("fa4", "forward", tflops=2.0)])
    text = _shown(results, "Kernels")
    assert "| 16/16 | 2 / - |" in text
    assert "cuDNN" not in text
    assert "Run 1" not in text


def test_rings_and_peers_stand_in_one_line_per_problem(results: ModuleType) -> None:
    rows = [_ring(who, 4, n) for n in (1024, 16384) for who in ("fused", "stepwise", "torch_cp_alltoall")]
    wrong = _ring("ring_flash_attn", 4, 1024, refused="wrong answer: differs from ours in dk by 9%")
    rows.append({key: value for key, value in wrong.items() if "_tflops" not in key})
    rows += [_ring("fused", 2, 1024, mask=mask, document=n) for mask, n in (("documents", 0), ("varlen", 512))]
    _keep(results, "ring4.json", "2026-01-01", rows)
    results.draw_figures()
    text = _shown(results, "Ring")
    assert "| kernel alone | ringattn fused | ringattn stepwise | torch CP all-to-all |" in text
    cells = "450 (90%) / 400 (80%)"
    assert f"| 4 | causal | zigzag | 32/8 | 1024 | 1 | 500 / 500 | {cells} | {cells} | {cells} |" in text
    assert "Without a number: ring_flash_attn, 4,096 tokens: wrong answer: differs from ours in dk by 9%." in text
    assert "| 2 | documents | zigzag |" in text
    assert "| 2 | documents of up to 512 | zigzag |" in text
    assert "](ring-speed.svg)" in text


def test_figures_are_drawn_from_the_rows_and_known_to_be(results: ModuleType) -> None:
    _keep(results, "kernels.json", "2026-01-01", [_kernel("fa4", "forward")])
    results.draw_figures()
    assert not (results.HERE / "kernels.svg").exists(), "one length is no line"
    assert results.figures_are_true()
    lines = [_kernel(who, "forward", seq_len=n, group="lengths") for who in ("hopper", "fa4") for n in (2048, 4096)]
    _keep(results, "kernels.json", "2026-01-01", lines)
    _keep(results, "ring4.json", "2026-01-01", [_ring("fused", size, n) for size in (2, 4) for n in (1024, 2048)])
    _keep(results, "model.json", "2026-01-01", [_model("ring", n) for n in (1024, 2048)])
    assert not results.figures_are_true()
    results.draw_figures()
    assert results.figures_are_true()
    for name, words in (
        ("kernels", ("ringattn hopper", "FlashAttention-4", "forward, full, head_dim 128", "2K")),
        ("ring-speed", ("ringattn fused", "forward + backward", "causal, 32/8 heads", "1K")),
        ("model", ("MFU", "2 GPUs")),
    ):
        text = (results.HERE / f"{name}.svg").read_text()
        assert all(word in text for word in words)
    _keep(results, "kernels.json", "2026-01-01", [*lines[:-1], lines[-1] | {"tflops": 101.0}])
    assert not results.figures_are_true()


def _model(who: str, n: int, **other: Any) -> Row:
    measured = {"step_s": 2.5, "tokens_per_s_per_gpu": 12345.6, "mfu_percent": 51.23, "peak_gib": 100.04}
    return {"world_size": 2, "seq_len": n, "layers": 8, "who": who, **measured, **other}


def test_whole_models_have_a_line_per_attention_and_reasons_of_those_that_did_not_run(results: ModuleType) -> None:
    refused = {"world_size": 2, "seq_len": 4096, "layers": 8, "who": "torch_cp_alltoall", "refused": "out of memory"}
    _keep(results, "model.json", "2026-01-01", [_model("ring", 2048, step_s=9.0)])
    _keep(results, "model-b.json", "2026-01-02", [_model("ring", 4096), refused, _model("ring", 2048)])
    text = _shown(results, "Whole models")
    assert "| 2 | 2,048 | 8 | ringattn | 2.50 | 12,346 | 51.2% | 100.0 | 2 |" in text
    assert "Without a number: torch_cp_alltoall, 4,096 tokens: out of memory." in text


def test_a_line_of_inference_has_first_token_and_time_per_token(results: ModuleType) -> None:
    shape = {"world_size": 4, "seq_len": 32768, "layers": 8, "batch": 1, "kv_dtype": "same"}
    rows: list[Row] = [{"part": "bandwidth", "world_size": 4, "who": "copy", "read_gbps": 4321.6}]
    rows.append({"part": "first", "who": "ringattn", "ttft_s": 1.234, "tokens_per_s": 26554.0, **shape})
    for how, ms in (("eager", 20.0), ("graph", 5.0)):
        speed = {"ms_per_token": ms, "tokens_per_s": 1e3 / ms, "bound_ms": 4.0}
        rows.append({"part": "token", "who": "ringattn", "how": how, **shape, **speed})
    for who in ("ringattn", "transformers"):
        rows.append({"part": "generate", "who": who, "ttft_s": 4.5, "ms_per_token": 12.5, **shape})
    rows.append({"part": "prefill", "ms": 250.0, **shape})
    _keep(results, "inference4-old.json", "2026-01-01", [rows[1] | {"ttft_s": 99.0}])
    _keep(results, "inference4.json", "2026-01-02", rows)
    text = _shown(results, "Inference")
    assert "| ringattn | 4 | 32,768 | 8 | same | 1 | 1.23 | 20.00 | 5.00 | 4.00 | 200.0 | 2 |" in text
    assert "| transformers | 1 | 32,768 | 8 | same | 1 | 4.50 | 12.50 | - | - | - | 2 |" in text
    assert text.count("| 32,768 |") == 2


def test_a_server_is_shown_by_requests_and_loads_with_its_flags(results: ModuleType) -> None:
    row = {"model": "llama", "world_size": 4, "tokens": 128, "failed": 0}
    times = {"ttft_ms": 1234.5, "ttft_p95_ms": 1500.0, "tpot_ms": 7.5, "tpot_p95_ms": 9.25}
    load = row | times | {"part": "load", "clients": 64, "prompt_lengths": [64, 256], "tokens_per_s": 7040.0}
    alone = row | times | {"part": "alone", "clients": 1, "context": 32768, "reuse": True}
    refused = row | {"part": "alone", "clients": 1, "context": 10**6, "reuse": False, "refused": "left out: too long"}
    _keep(results, "server4-old.json", "2026-01-01", [load | {"tokens_per_s": 1.0}])
    flags = {"flags": {"chunk": 4096}, "parameters": 8.03e9, "commit": None, "ringattn": "0.6.0"}
    _keep(results, "server4.json", "2026-01-02", [row | {"part": "check"}, load, alone, refused], **flags)
    text = _shown(results, "The server")
    assert "ringattn 0.6.0: `run`; the server: 8.03 billion parameters, chunk 4096" in text
    assert "| 4 | llama | 1 | 32,768 again | 128 | 2 | 1,234.5 / 1,500.0 | 7.50 / 9.25 | - | 0 |" in text
    assert "| 4 | llama | 64 | 64 to 256 | 128 | 2 | 1,234.5 / 1,500.0 | 7.50 / 9.25 | 7,040 | 0 |" in text
    assert text.count("| 4 | llama |") == 2


def test_training_runs_stand_in_one_table_and_the_latest_of_several_alike(results: ModuleType) -> None:
    row = {
        "world_size": 4,
        "seq_len": 131072,
        "parameters": 135_600_000,
        "losses": [5.32, 4.0],
        "peak_memory_mib": [2048.0, 1.0],
    }
    _keep(results, "train4-old.json", "2026-01-01", [row | {"tokens_per_s": 111.0, "mfu": None, "exposed_ms": None}])
    _keep(results, "train4.json", "2026-01-03", [row | {"tokens_per_s": 190_000.0, "mfu": 0.41, "exposed_ms": None}])
    text = _shown(results, "Training")
    assert "| 4 | 131,072 | 135,600,000 | 5.3200, 4.0000 | 190,000 | 41.0% | - | 2.0 | 2 |" in text
    assert "111" not in text
