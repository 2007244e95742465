"""`bench inference`: every part has its rows, their numbers agree with each other, and nothing wrong has a speed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ringattn import Ring
from ringattn.inference import attend
from ringattn.launch.bench import __main__ as bench
from ringattn.launch.bench import inference
from ringattn.launch.bench.inference import InferenceFlags
from ringattn.launch.bench.inference_model import fill_at_random, local_bytes, make_cache, pages_for
from ringattn.launch.check import inference as scenarios
from ringattn.launch.common.session import open_session
from ringattn.sizing.shapes import ModelShape

SHAPE = ModelShape("test", dim=32, layers=2, heads=4, kv_heads=2, head_dim=16, mlp_dim=48, vocab_size=61)
WORDS = ["--dim", "32", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--mlp-dim", "48", "--vocab-size", "61"]
WORDS += ["--layers", "2", "--dtype", "fp32", "--chunk", "200", "--tokens", "3", "--rounds", "1", "--device", "cpu"]


def _bench(out: str, *words: str) -> int:
    return bench.main(["inference", *WORDS, *words, "--out", out])


def _rows(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "inference.json").read_text())["rows"]


def test_every_part_of_attention_has_its_rows_and_their_numbers_agree(pool, tmp_path: Path) -> None:
    words = ["--lengths", "130", "260", "--batches", "1", "2", "--parts", "prefill", "attention"]
    assert pool(2).run(_bench, str(tmp_path), *words) == [0, 0]
    bandwidth, *rows = _rows(tmp_path)
    assert bandwidth["part"] == "bandwidth"
    assert bandwidth["read_gbps"] == max(bandwidth["all_gbps"].values()) > 0
    assert all(row["world_size"] == 2 and row["bench"] == "inference" for row in rows)
    parts = {part: [row for row in rows if row["part"] == part] for part in ("prefill", "attention")}
    assert sum(map(len, parts.values())) == len(rows)

    assert [(row["seq_len"], row["who"]) for row in parts["prefill"]] == [
        (130, "ring"), (130, "attend"), (260, "ring"), (260, "attend"), (260, "attend_chunked"),
    ]  # fmt: skip
    for row in parts["prefill"]:
        n = row["seq_len"]
        assert row["tflops"] * row["ms"] * 1e9 * 2 == pytest.approx(4 * 4 * 16 * n * (n + 1) / 2)
        assert math.isfinite(row["percent_of_training"])

    assert [(row["seq_len"], row["batch"]) for row in parts["attention"]] == [(130, 1), (130, 2), (260, 1), (260, 2)]
    for row in parts["attention"]:
        assert row["how"] == "calls"
        assert "GPU" in row["graph_refused"]
        # of two ranks the fuller has at least half
        assert row["kv_bytes"] >= row["batch"] * (row["seq_len"] + 1) / 2 * 2 * 2 * 16 * 4
        assert row["bound_us"] == pytest.approx(row["kv_bytes"] / bandwidth["read_gbps"] / 1e3)
        assert row["ratio"] == pytest.approx(row["us_per_layer"] / row["bound_us"])
        assert row["ratio_with_15us"] == pytest.approx(row["us_per_layer"] / (row["bound_us"] + 15))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_attention_over_fp8_is_right_at_its_size(dtype: str, tmp_path: Path) -> None:
    words = ["--lengths", "130", "--parts", "attention", "--kv-dtype", "fp8", "--dtype", dtype, "--batches", "2"]
    assert _bench(str(tmp_path), *words) == 0
    last = _rows(tmp_path)[-1]
    assert last["error"] < 0.01
    assert last["kv_bytes"] == 2 * 131 * 2 * (2 * 16 + 2 * 4)  # a scale for each row of K and of V


def test_measurements_beyond_the_budget_have_a_row_with_the_reason(tmp_path: Path) -> None:
    assert _bench(str(tmp_path), "--lengths", "64", "--parts", "prefill", "attention", "--budget-s", "0") == 0
    first, *others = _rows(tmp_path)
    assert first["part"] == "bandwidth"
    assert {row["part"] for row in others} == {"prefill", "attention"}
    assert all("left out" in row["refused"] for row in others)


def _forgetful(step, layer, q, k, v, **options):
    """Attention over the new tokens alone."""
    return attend(step, layer, q, torch.zeros_like(k), v, **options)


def test_wrong_attention_has_no_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenarios, "attend", _forgetful)
    assert _bench(str(tmp_path), "--lengths", "64", "--parts", "attention") == 1
    assert not (tmp_path / "inference.json").exists()


def test_a_wrong_answer_at_the_measured_size_has_no_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "attend", lambda *inputs: torch.mul(attend(*inputs), 1.1))
    assert _bench(str(tmp_path), "--lengths", "64", "--parts", "attention", "--batches", "1") == 0
    last = _rows(tmp_path)[-1]
    assert last["error"] == pytest.approx(0.1, rel=1e-3)
    assert last["refused"].startswith("wrong answer")
    assert "us_per_layer" not in last


def test_generate_is_timed_for_a_single_token(tmp_path: Path) -> None:
    assert _bench(str(tmp_path), "--lengths", "9", "--parts", "generate", "--tokens", "1", "--layers", "1") == 0
    assert [row["ms_per_token"] > 0 for row in _rows(tmp_path) if row["part"] == "generate"] == [True, True]


def test_a_full_cache_is_full_of_finite_numbers_on_all_its_pages() -> None:
    with open_session("cpu") as session, torch.no_grad():
        cache = make_cache(Ring(), SHAPE, pages_for(2, 104, 1), torch.bfloat16, session.device)
        requests = fill_at_random(cache, 2, 100, 4)
        assert [cache.length(request) for request in requests] == [100, 100]
        assert all(pool.isfinite().all() and (pool != 0).float().mean() > 0.99 for pool in (cache.k, cache.v))
        step = cache.extend(requests, [1, 1], mode="decode")
        assert local_bytes(step) == 2 * 101 * 2 * 2 * 16 * 2


def test_layers_belong_to_lengths() -> None:
    assert InferenceFlags(lengths=(8, 16), layers=(3, 4)).contexts == {8: 3, 16: 4}
    assert InferenceFlags(lengths=(8, 16), layers=(3,)).contexts == {8: 3, 16: 3}
    with pytest.raises(ValueError, match="layers must be one number or one per length"):
        InferenceFlags(lengths=(1, 2, 3), layers=(4, 5))
    with pytest.raises(ValueError, match="chunk must be at least 1"):
        InferenceFlags(chunk=0)
