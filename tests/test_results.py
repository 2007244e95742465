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
LENGTHS = (2048, 4096)


def test_the_page_of_results_shows_the_stored_rows() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "docs/results.py"), "--check"], cwd=ROOT, check=False, timeout=60)
    assert done.returncode == 0, "run `python docs/results.py`"


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"rows": []}', '{"machine": {}, "rows": []}'])
def test_an_error_names_a_file_that_no_bench_wrote(results: ModuleType, content: str) -> None:
    (results.HERE / "results" / "check2.json").write_text(content)
    with pytest.raises(SystemExit, match=r"^error: docs/results/check2\.json must be "):
        results.correctness()


def test_a_line_of_correctness_has_the_schedule_and_the_worst_of_each_dtype(results: ModuleType) -> None:
    rows = [{"dtype": "bf16", "ratio": 0.5}, {"dtype": "bf16", "ratio": 1.5}, {"dtype": "fp32", "ratio": 0.25}]
    _keep(results, "check1.json", "2026-01-01", rows)
    assert "| 1 | auto | 2 of 3 | 1.50 (2) | 0.25 (1) | 1 |" in results.correctness()


def _row(who: str, direction: str, mask: str = "full", n: int = 16384, **other: Any) -> dict[str, Any]:
    shape = {"seq_len": n, "batch": 1, "heads": 16, "kv_heads": 16, "head_dim": 128, "dtype": "bf16"}
    row = {"who": who, "level": "op", "group": "target", "direction": direction, "mask": mask, "window": 4095}
    return {**row, "document": 4096, **shape, "timing": "graph", "ms": 1.0, "tflops": 100.0, **other}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load("results")
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(module, "HERE", tmp_path)
    return module


def _keep(results: ModuleType, name: str, date: str, rows: list[dict[str, Any]]) -> None:
    line = {"date": date, "gpus": ["X"], "torch": "2", "triton": "3", "commit": "0123456789abcdef", "command": "run"}
    (results.HERE / "results" / name).write_text(json.dumps({"machine": line, "rows": rows}))


def test_the_target_table_has_a_column_per_contender_and_full_beside_causal(results: ModuleType) -> None:
    rows = [_row(who, way, mask) for who in ("fa4", "hopper") for way in ("forward", "backward") for mask in ("full",)]
    rows += [_row("hopper", "forward", "causal", tflops=90.4, timing="calls")]
    rows += [_row("flex", "forward") | {"refused": "no"}]
    del rows[-1]["tflops"]
    rows += [_row("hopper", "forward", level="kernel", tflops=123.0)]
    rows += [_row("hopper", "forward", level="carried", group="carry", cost_percent=2.52)]
    _keep(results, "kernels.json", "2026-01-01", rows)
    text = results.kernels()
    assert "| full / causal | ringattn hopper | FA4 |" in text
    assert "| forward, head_dim 128 | 100 / 90* | 100 / - |" in text
    assert "| forward, head_dim 128 | 123 / - |" in text
    assert "hopper, full, 16384 tokens, head_dim 128: +2.5%" in text
    assert "FlexAttention" not in text


def test_a_problem_is_shown_from_the_last_run_that_measured_it(results: ModuleType) -> None:
    _keep(results, "kernels-b.json", "2026-01-01", [_row("fa4", "forward", tflops=1.0), _row("cudnn", "forward")])
    _keep(results, "kernels-a.json", "2026-01-02", [_row("fa4", "forward", tflops=2.0)])
    rows = results.kernel_rows(results.runs_of("kernels"))
    assert [(row["who"], row["tflops"], row["run"]) for row in rows] == [("fa4", 2.0, 1)]


def test_other_shapes_are_shown_with_mask_and_heads(results: ModuleType) -> None:
    rows = [_row("hopper", "forward", mask, group="masks") for mask in ("window", "documents")]
    rows += [_row("hopper", "backward", "causal", group="grouped", heads=32, kv_heads=4)]
    _keep(results, "kernels.json", "2026-01-01", rows)
    text = results.kernels()
    assert "| 128 | window 4096 | 1 x 16384 | 16 | 100 / - |" in text
    assert "| 128 | documents of 4096 | 1 x 16384 | 16 | 100 / - |" in text
    assert "| 128 | causal | 1 x 16384 | 32/4 | - / 100 |" in text


def test_the_figure_is_drawn_from_the_rows_and_known_to_be(results: ModuleType) -> None:
    _keep(results, "kernels.json", "2026-01-01", [_row("fa4", "forward")])
    results.draw_figures()
    assert not (results.HERE / "kernels.svg").exists(), "one length is no line"
    assert results.figures_are_true()
    lines = [_row(who, "forward", n=n, group="lengths") for who in ("hopper", "fa4") for n in LENGTHS]
    _keep(results, "kernels.json", "2026-01-01", lines)
    assert not results.figures_are_true()
    results.draw_figures()
    assert results.figures_are_true()
    text = (results.HERE / "kernels.svg").read_text()
    assert all(word in text for word in ("ringattn hopper", "FlashAttention-4", "forward, full, head_dim 128", "2K"))
    _keep(results, "kernels.json", "2026-01-01", [*lines[:-1], lines[-1] | {"tflops": 101.0}])
    assert not results.figures_are_true()


def _ring_row(who: str, world_size: int, tokens: int, **other: Any) -> dict[str, Any]:
    """A row of `bench ring` with made-up numbers: 100 ms of work per GPU at 500 TFLOP/s alone."""
    shape = {"batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bf16", "window": 4095}
    row = {"who": who, "ours": not who.startswith("torch"), "world_size": world_size, "tokens_per_rank": tokens}
    row |= {"seq_len": world_size * tokens, "mask": "causal", "layout": "zigzag", **shape, "peak_gib": 1.5}
    for way, speed in (("forward", 450.0), ("both", 400.0)):
        row |= {f"{way}_tflops": speed, f"{way}_percent": speed / 5, f"{way}_ms": 200.0 / world_size}
        row |= {
            f"{way}_exposed_ms": 0.25,
            f"{way}_host_us": 120.4,
            f"{way}_graph_percent": 95.0,
            f"{way}_alone_tflops": 500.0,
        }
    row["bytes_received"] = {"forward_most": 16_000_000, "backward_most": 48_000_000}
    return row | other


def test_without_rows_there_is_no_section_and_no_figure(results: ModuleType) -> None:
    assert results.ring() == results.memory() == ""
    results.draw_figures()
    assert results.figures_are_true()
    assert [path.name for path in results.HERE.iterdir()] == ["results"]


def test_rings_and_peers_stand_in_one_line_per_problem(results: ModuleType) -> None:
    rows = [_ring_row(who, 4, n) for n in (1024, 16384) for who in ("fused", "stepwise", "nccl", "torch_cp_alltoall")]
    wrong = _ring_row("ring_flash_attn", 4, 1024, refused="wrong answer: differs from ours in dk by 9%", ours=False)
    rows.append({key: value for key, value in wrong.items() if "_ms" not in key and "_tflops" not in key})
    _keep(results, "ring4.json", "2026-01-01", rows)
    results.draw_figures()
    text = results.ring()
    head = (
        "| mask | layout | tokens per GPU | heads | kernel alone | ringattn fused | ringattn stepwise | ringattn NCCL |"
    )
    assert f"{head} torch CP all-to-all |" in text
    cells = "450 (90%) / 400 (80%)"
    assert f"| causal | zigzag | 1024 | 32/8 | 500 / 500 | {cells} | {cells} | {cells} | {cells} |" in text
    assert "| causal, 1024, 32/8 | ringattn fused | 0.25 / 0.25 | 120 / 120 | 95% / 95% | 1.50 |" in text
    assert "Without a speed: ring_flash_attn: wrong answer: differs from ours in dk by 9%." in text
    assert "scaling" not in text
    assert results.figures_are_true()
    drawn = (results.HERE / "ring-speed.svg").read_text()
    names = ("ringattn fused", "ringattn stepwise", "ringattn NCCL", "torch CP all-to-all", "forward + backward")
    assert all(name in drawn for name in (*names, "causal, 32/8 heads", "16K"))
    assert "ring-flash-attention" not in drawn
    _keep(results, "ring4.json", "2026-01-01", rows[:-2])
    assert not results.figures_are_true()


def test_runs_of_several_numbers_of_gpus_are_merged_into_scaling(results: ModuleType) -> None:
    for size in (1, 2, 4):
        rows = [_ring_row("auto", size, 8192), _ring_row("auto", size, 16384 // size), _ring_row("nccl", size, 8192)]
        window = {"mask": "window", "layout": "contiguous"}
        rows.append(_ring_row("auto", size, 32768, **window))
        _keep(results, f"ring{size}.json", f"2026-01-0{size}", rows)
    results.draw_figures()
    text = results.ring()
    assert text.count("Run ") == 3
    weak, strong = text.split("#### Strong scaling")
    assert "| heads | tokens per GPU | 1 GPU | 2 GPUs | 4 GPUs |" in weak
    assert "| 32/8 | 8192 | 450 / 400 | 450 / 400 | 450 / 400 |" in weak
    assert (
        "| 32/8 | 16384 | 200.00 (1.00 x) / 200.00 (1.00 x) | 100.00 (2.00 x) / 100.00 (2.00 x) | 50.00 (4.00 x)"
        in strong
    )
    for size in (2, 4):
        moved = f"| window 4096 | contiguous | 32768 | 32/8 | {size} | 16.0 / 64.0 | 0.25 of {200 / size:.2f}"
        assert moved in text.split("#### Windows move their halo")[1]
    assert "8K tokens per GPU" in (results.HERE / "ring-scaling.svg").read_text()
    assert results.figures_are_true()


def test_rows_without_names_are_still_shown(results: ModuleType) -> None:
    row = _ring_row("", 4, 1024)
    for name in ("who", "ours", "forward_alone_tflops", "both_alone_tflops", "forward_host_us", "both_host_us"):
        del row[name]
    _keep(results, "ring.json", "2026-01-01", [row])
    text = results.ring()
    assert "| causal | zigzag | 1024 | 32/8 | 500 / 500 | 450 (90%) / 400 (80%) |" in text


def test_softmax_is_shown_from_rows_of_bench_kernels(results: ModuleType) -> None:
    names = ("share_of_copy", "torch_share_of_copy", "backward_share_of_copy", "torch_backward_share_of_copy")
    row = {"group": "softmax", "dtype": "bf16", "n": 1024, **dict.fromkeys(names, 0.873)}
    _keep(results, "kernels.json", "2026-01-01", [row, _row("hopper", "forward")])
    assert "| bf16 | 1024 | 87% | 87% | 87% | 87% |" in results.softmax()
    assert "softmax" not in results.kernels()


def test_memory_shows_the_prediction_beside_the_peak(results: ModuleType) -> None:
    row = _ring_row("fused", 4, 2**18, tensors_gib=20.0, predicted_gib=42.125, peak_gib=43.0)
    full = _ring_row("alone", 1, 2**20, tensors_gib=80.0, predicted_gib=200.0, peak_gib=float("inf"))
    _keep(results, "memory.json", "2026-01-01", [row, full])
    text = results.memory()
    assert "| 1,048,576 | 4 | 32/8 | ringattn fused | 20.00 | 42.12 | 43.00 |" in text
    assert "| 1,048,576 | 1 | 32/8 | alone | 80.00 | 200.00 | does not fit |" in text


def _model(who: str, n: int, **other: Any) -> dict[str, Any]:
    shape = {"dim": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "mlp_dim": 14336, "vocab_size": 128256}
    measured = {"step_s": 2.5, "tokens_per_s_per_gpu": 12345.6, "mfu_percent": 51.23, "peak_gib": 100.04}
    return {"world_size": 2, "seq_len": n, "layers": 8, "who": who, **shape, **measured, **other}


def test_whole_models_have_a_line_per_attention_and_reasons_of_those_that_did_not_run(results: ModuleType) -> None:
    assert results.models() == ""
    refused = {"world_size": 2, "seq_len": 4096, "layers": 8, "who": "torch_cp_alltoall", "refused": "out of memory"}
    refused |= {
        name: _model("ring", 1)[name] for name in ("dim", "heads", "kv_heads", "head_dim", "mlp_dim", "vocab_size")
    }
    _keep(results, "model.json", "2026-01-01", [_model("ring", 2048, step_s=9.0)])
    _keep(results, "model-b.json", "2026-01-02", [_model("ring", 4096), refused, _model("ring", 2048)])
    text = results.models()
    assert "| 2 | 2,048 | 8 | ringattn | 2.50 | 12,346 | 51.2% | 100.0 | 2 |" in text
    assert "| 2 | 4,096 | 8 | torch CP all-to-all | out of memory |  |  |  | 2 |" in text
    results.draw_figures()
    assert "MFU" in (results.HERE / "model.svg").read_text()
    assert results.figures_are_true()


def _inference(part: str, n: int, **other: Any) -> dict[str, Any]:
    shared = {
        "part": part,
        "world_size": 4,
        "seq_len": n,
        "heads": 32,
        "kv_heads": 8,
        "dtype": "bf16",
        "kv_dtype": "same",
    }
    return {**shared, **other}


def test_inference_stands_beside_its_bounds_and_transformers(results: ModuleType) -> None:
    assert results.inference() == ""
    shape = {"layers": 8, "batch": 1}
    rows = [{"part": "bandwidth", "world_size": 4, "who": "copy", "read_gbps": 4321.6}]
    for n in (32768, 65536):
        speed = {"ttft_s": 1.234, "tokens_per_s": 26554.0, "tflops": 456.7, "mfu_percent": 46.2, "peak_gib": 33.3}
        rows.append(_inference("first", n, who="ringattn", chunk=16384, **shape, **speed))
        for how, ms in (("eager", 20.0), ("graph", 5.0)):
            told = {"ms_per_token": ms, "tokens_per_s": 1e3 / ms, "bound_ms": 4.0, "ratio": ms / 4}
            rows.append(_inference("token", n, who="ringattn", how=how, **shape, **told))
        if n == 32768:
            slower = told | {"ms_per_token": 7.0}
            rows.append(_inference("written", n, who="ringattn", how="graph", **shape, **slower))
        for who, chunk, percent in (("ring", None, 100.0), ("attend", None, 98.0), ("attend_chunked", 16384, 93.4)):
            speed = {"ms": 250.0, "tflops": 6 * percent, "percent_of_training": percent, "layers": 1}
            rows.append(_inference("prefill", n, who=who, chunk=chunk, **speed))
        met = {"us_per_layer": 70.0, "bound_us": 50.0, "ratio": 1.4, "ratio_with_15us": 1.077, "goal_us": 77.5}
        rows.append(_inference("attention", n, how="graph", goal_met=True, batch=1, layers=16, **met))
    rows.append(_inference("generate", 32768, who="transformers", ttft_s=4.5, ms_per_token=12.5, **shape))
    rows.append(_inference("generate", 32768, who="ringattn", chunk=16384, ttft_s=1.5, ms_per_token=21.0, **shape))
    rows.append(_inference("generate", 65536, who="transformers", refused="out of memory", **shape))
    for batch, within in ((1, True), (2, False)):
        told = {"ms_per_token": 5.0 * batch, "tokens_per_s": 200.0, "within": within, "largest": within}
        rows.append(_inference("throughput", 32768, latency_ms=8.0, how="graph", layers=8, batch=batch, **told))
    _keep(results, "inference4-old.json", "2026-01-01", [rows[0], rows[1] | {"ttft_s": 99.0}])
    _keep(results, "inference4.json", "2026-01-02", rows)
    text = results.inference()
    assert "| 4 | 32,768 | 8 | 16,384 | 1.23 | 26,554 | 457 | 46.2% | 4.50 | 33.3 | 2 |" in text
    assert "99.00" not in text
    whole, chunked = "250.0 ms, 588 TFLOP/s (98%)", "chunks of 16,384: 250.0 ms, 560 TFLOP/s (93%)"
    assert f"| 4 | 32,768 | bf16 | 250.0 ms, 600 TFLOP/s | {whole} | {chunked} | 2 |" in text
    assert "| 4 | 32,768 | 8 | bf16 | 1 | 20.00 | 5.00 | 7.00 | 4.00 | 1.25 | 200.0 | 12.50 | 2 |" in text
    assert "| 4 | 65,536 | 8 | bf16 | 1 | 20.00 | 5.00 | - | 4.00 | 1.25 | 200.0 | - | 2 |" in text
    assert "| 4 | 32,768 | 8 | ringattn | 1.50 | 21.00 | 2 |" in text
    assert "| 1 | 32,768 | 8 | transformers, sdpa | 4.50 | 12.50 | 2 |" in text
    assert "| 4 | 32,768 | bf16 | 1 | 70.0 | 50.0 | 1.40 | 1.08 | 77.5, met | 2 |" in text
    assert "| 4 | 32,768 | 8 | **1** | 5.00 | 200 | yes (8 ms) | 2 |" in text
    assert "| 4 | 32,768 | 8 | 2 | 10.00 | 200 | no (8 ms) | 2 |" in text
    assert "generate, 4, 65536, 1, transformers: out of memory." in text
    assert "4,322 GB/s read (copy)" in text
    results.draw_figures()
    drawn = (results.HERE / "inference-speed.svg").read_text()
    assert all(word in drawn for word in ("time to first token", "attention of a prompt", "4 GPUs, batch 1", "32K"))
    assert results.figures_are_true()


def _server(part: str, clients: int, **other: Any) -> dict[str, Any]:
    """A row of `bench server` with made-up numbers."""
    row = {"part": part, "model": "llama", "world_size": 4, "clients": clients, "tokens": 128, "failed": 0}
    if part != "check":
        row |= {"ttft_ms": 1234.5, "ttft_p95_ms": 1500.0, "tpot_ms": 7.5, "tpot_p95_ms": 9.25, "gap_p99_ms": 30.0}
    if part in ("load", "latency"):
        row |= {"prompt_lengths": [64, 256], "requests_per_s": 5.5, "tokens_per_s": 7040.0}
    return row | other


def test_a_server_is_shown_by_requests_loads_and_latencies_with_its_flags(results: ModuleType) -> None:
    assert results.serving() == ""
    told = {"model": "llama", "parameters": 8.03e9, "dtype": "bfloat16", "graphs": 7, "flags": {"chunk": 4096}}
    rows = [_server("check", 64, prompts=8, differ=1)]
    rows += [_server("alone", 1, context=32768, reuse=False), _server("alone", 1, context=32768, reuse=True)]
    rows += [_server("alone", 1, context=10**6, reuse=False, refused="left out: too long", ttft_ms=None)]
    rows += [_server("load", n) for n in (1, 64)]
    for n, within in ((1, True), (2, True), (4, False)):
        rows.append(_server("latency", n, latency_ms=20.0, within=within, largest=n == 2))
    for name, date, kept in (("server4-old.json", "2026-01-01", [_server("load", 64, tokens_per_s=1.0)]),
                             ("server4.json", "2026-01-02", rows)):  # fmt: skip
        _keep(results, name, date, kept)
        content = json.loads((results.HERE / "results" / name).read_text())
        content["machine"] |= told
        (results.HERE / "results" / name).write_text(json.dumps(content))
    other = [_server("alone", 1, context=128, world_size=None, model="else")]
    _keep(results, "server-else.json", "2026-01-03", other)
    content = json.loads((results.HERE / "results/server-else.json").read_text())
    content["machine"] |= {"model": "else", "commit": None, "ringattn": "0.6.0"}
    (results.HERE / "results/server-else.json").write_text(json.dumps(content))
    text = results.serving()
    assert "Run 2, llama (8.03 billion parameters, bfloat16), 7 CUDA graphs, chunk 4096; 1 x X, torch 2" in text
    assert "Run 3, else, by a server that does not say more; 1 x X, torch 2, triton 3, ringattn 0.6.0: `run`" in text
    assert "1 of 8 differ among 64 (run 2)" in text
    assert "| 4 | llama | 32,768 | 1,234.5 / 1,500.0 | 7.50 / 9.25 | 30.00 | 2 |" in text
    assert "| 4 | llama | 32,768 again | 1,234.5 / 1,500.0 |" in text
    assert "| - | else | 128 | 1,234.5 / 1,500.0 | 7.50 / 9.25 | 30.00 | 3 |" in text
    load = "| 4 | llama | 64 | 64 to 256, 128 | 5.50 | 7,040 | 1,234.5 / 1,500.0 | 7.50 / 9.25 | 0 | 2 |"
    assert load in text
    assert "| 4 | llama | **2** | 9.25 | 7,040 | yes (20 ms) | 2 |" in text
    assert "| 4 | llama | 4 | 9.25 | 7,040 | no (20 ms) | 2 |" in text
    assert text.count("| 4 | llama | 64 |") == 1
    assert "Without a number: 1,000,000 tokens of prompt: left out: too long (run 2)." in text


def _trained(gpus: int, speed: float, **more: Any) -> dict[str, Any]:
    row = {"world_size": gpus, "seq_len": 131072, "parameters": 135_600_000, "steps": 8, "losses": [5.32, 4.0]}
    return row | {"tokens_per_s": speed, "mfu": 0.41, "exposed_ms": None, "peak_memory_mib": [2048.0, 1024.0]} | more


def test_training_runs_stand_in_one_table_and_the_latest_of_several_alike(results):
    assert results.training() == ""
    _keep(results, "train1.json", "2026-01-02", [_trained(1, 50_000.0, mfu=None)])
    _keep(results, "train4-old.json", "2026-01-01", [_trained(4, 111.0), _trained(2, 90_000.0)])
    _keep(results, "train4.json", "2026-01-03", [_trained(4, 190_000.0, exposed_ms=12.34)])
    text = results.training()
    assert "| 1 | 131,072 | 5.3200 | 4.0000 (8) | 50,000 | - | - | 2.0 | 2 |" in text
    assert "| 2 | 131,072 | 5.3200 | 4.0000 (8) | 90,000 | 41.0% | - | 2.0 | 1 |" in text
    assert "| 4 | 131,072 | 5.3200 | 4.0000 (8) | 190,000 | 41.0% | 12.3 | 2.0 | 3 |" in text
    assert "111" not in text
