"""`bench inference` with a model: every part has its rows, their numbers agree, and a wrong model has no speed."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from ringattn.integrations.transformers import cuda_graph_runner
from ringattn.integrations.transformers.sharded_weights import forwards, shard
from ringattn.launch.bench import __main__ as bench
from ringattn.launch.bench import correctness, inference_model
from ringattn.sizing.shapes import ModelShape
from tests.support.graph_recorder import Reruns

SHAPE = ModelShape("test", dim=32, layers=2, heads=4, kv_heads=2, head_dim=16, mlp_dim=48, vocab_size=61)
WORDS = ["--dim", "32", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--mlp-dim", "48", "--vocab-size", "61"]
WORDS += ["--layers", "2", "--dtype", "fp32", "--chunk", "200", "--tokens", "3", "--rounds", "1", "--device", "cpu"]


def _bench(out: str, *words: str) -> int:
    return bench.main(["inference", *WORDS, *words, "--out", out])


def _rows(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "inference.json").read_text())["rows"]


def test_every_part_has_its_rows_and_their_numbers_agree(pool, tmp_path: Path) -> None:
    asked = ("first", "generate", "token", "throughput")
    words = ["--lengths", "130", "260", "--batches", "1", "2", "--most-batch", "2", "--latency-ms", "1e6"]
    assert pool(2).run(_bench, str(tmp_path), *words, "--parts", *asked) == [0, 0]
    rows = _rows(tmp_path)[1:]
    parts = {part: [row for row in rows if row["part"] == part] for part in asked}
    assert sum(map(len, parts.values())) == len(rows)

    assert [row["seq_len"] for row in parts["first"]] == [130, 260]
    for row in parts["first"]:
        assert row["layers"] == 2
        assert row["tflops"] * row["ttft_s"] * 1e12 * 2 == pytest.approx(SHAPE.prompt_flops(row["seq_len"]))
        assert row["tokens_per_s"] == pytest.approx(row["seq_len"] / row["ttft_s"])

    told = [(row["seq_len"], row["batch"], row["how"]) for row in parts["token"]]
    assert told == [(n, b, how) for n in (130, 260) for b in (1, 2) for how in ("eager", "graph")]
    for row in parts["token"]:
        if row["how"] == "graph":
            assert "GPU" in row["refused"]
            assert "ms_per_token" not in row
        else:
            assert row["tokens_per_s"] == pytest.approx(row["batch"] * 1e3 / row["ms_per_token"])
            assert row["ms_per_token"] <= row["worst_ms"]
            assert row["ratio"] == pytest.approx(row["ms_per_token"] / row["bound_ms"])

    assert [(row["seq_len"], row["batch"], row["within"], row["largest"]) for row in parts["throughput"]] == [
        (130, 1, True, False), (130, 2, True, True),
    ]  # fmt: skip
    told = [(row["seq_len"], row["who"]) for row in parts["generate"]]
    assert told == [(n, who) for n in (130, 260) for who in ("ringattn", "transformers")]
    assert all(row["ttft_s"] > 0 and row["ms_per_token"] > 0 for row in parts["generate"])


def _sharded(out: str, wrong: bool) -> int:
    def skip_a_sum(shard: Any, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return x.to(dtype)

    with pytest.MonkeyPatch.context() as patch:
        if wrong:
            patch.setattr(forwards.Exchange, "total", skip_a_sum)
            patch.setattr(shard.ShardedWeights, "compare", lambda _: "")
        words = ["--weights", "sharded", "--layers", "5", "--lengths", "130", "--batches", "1"]
        return _bench(out, *words, "--parts", "first", "token")


def test_sharded_weights_are_measured_when_they_answer_as_whole_ones(pool, tmp_path: Path) -> None:
    assert pool(2).run(_sharded, str(tmp_path), True) == [1, 1]
    assert pool(2).run(_sharded, str(tmp_path), False) == [0, 0]
    first, token, _ = _rows(tmp_path)[1:]
    shape = dataclasses.replace(SHAPE, layers=5)
    assert token["weight_bytes"] == shape.decode_weight_bytes(ranks=2, itemsize=4, sharded=True)
    # embeddings are stored and not read; whole norms and padding to 8 columns are read and not counted
    assert 0 < first["weights_gib"] * 2**30 - token["weight_bytes"] - 4 * 32 * 61 / 2 < 8000
    norms = 2 * 32
    assert first["gathered_gib"] * 2**30 == 2 * 4 * (shape.layer_parameters - norms)
    assert first["cache_gib"] * 2**30 == 4 * 64 * 5 * 2 * 2 * 16 * 4
    assert "device_gib" not in first


def test_throughput_ends_at_the_latency(tmp_path: Path) -> None:
    words = ["--lengths", "64", "--parts", "throughput", "--latency-ms", "1e-6"]
    assert _bench(str(tmp_path), *words) == 0
    last = _rows(tmp_path)[-1]
    assert (last["batch"], last["within"], last["largest"]) == (1, False, False)


@pytest.mark.parametrize("right", [True, False])
def test_a_graph_has_a_speed_when_it_serves_the_next_token_too(
    right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # in place of a graph: the call itself, or other numbers
    monkeypatch.setattr(cuda_graph_runner, "capture_obstacle", lambda *_: None)
    monkeypatch.setattr(cuda_graph_runner, "CUDAGraphCapturer", lambda _: Reruns(stuck=not right))
    warnings.simplefilter("ignore")
    assert _bench(str(tmp_path), "--lengths", "64", "--parts", "token", "--batches", "2") == 0
    eager, graph = _rows(tmp_path)[1:]
    assert (eager["how"], graph["how"]) == ("eager", "graph")
    if right:
        assert graph["ms_per_token"] > 0
        assert graph["bound_ms"] == eager["bound_ms"]
    else:
        assert graph["refused"].startswith("wrong answer")
        assert "ms_per_token" not in graph


def test_a_wrong_model_has_no_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def drop_a_chunk(model, cache, request, prompt, chunk):
        shorter = torch.cat((prompt[:1].expand(chunk), prompt[chunk:]))
        return inference_model.fill_by_prompt(model, cache, request, shorter, chunk)

    monkeypatch.setattr(correctness, "fill_by_prompt", drop_a_chunk)
    assert _bench(str(tmp_path), "--lengths", "64", "--parts", "first") == 1


def test_model_flops_and_bytes_are_those_of_the_parameters() -> None:
    model = inference_model.make_model(SHAPE, 64, torch.float32, torch.device("cpu"))
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed_tokens" not in name)
    assert SHAPE.decode_weight_bytes(itemsize=4) == 4 * matrices
    tokens, head = 10, 32 * 61
    assert SHAPE.prompt_flops(tokens) == 2 * (matrices - head) * tokens + 2 * head + 2 * (2 * 2 * 4 * 16) * 55
