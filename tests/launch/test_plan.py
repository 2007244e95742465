"""`launch.plan` prints, writes and draws an estimate, and refuses what it cannot read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringattn.launch.plan.__main__ import main, read_count, read_documents


def test_a_plan_says_memory_time_and_meshes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    assert main(["--model", "llama3-8b", "--tokens", "1M", "--gpus", "8", "--json", str(out)]) == 0
    said = capsys.readouterr().out
    for words in (
        "memory per GPU at its peak",
        "matrix products",
        "time of a step",
        "best",
        "out of memory by",
        "longest sequence",
    ):
        assert words in said
    content = json.loads(out.read_text())
    best = content["candidates"][0]
    assert best["reason"] == ""
    assert best["memory_gib"]["total"] == pytest.approx(
        sum(value for name, value in best["memory_gib"].items() if name != "total")
    )
    assert content["longest"] > 2**20


def test_attention_alone_and_serving_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tokens", "64K", "--gpus", "4", "--heads", "32", "--kv-heads", "8"]) == 0
    assert "attention of 65,536 tokens on 4 x H200, zigzag" in capsys.readouterr().out
    assert main(["--gpus", "16", "--gpu", "a100", "--link", "1"]) == 0
    said = capsys.readouterr().out
    assert "process_group" in said
    assert "fused" not in said
    assert main(["--model", "llama3-8b", "--mode", "serve", "--gpus", "2", "--no-longest"]) == 0
    assert "ms per token" in capsys.readouterr().out


def test_checkpoints_in_host_memory_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "qwen3-8b", "--tokens", "1M", "--gpu", "h100", "--batch", "1", "--no-longest"]
    assert main([*words, "--offload", "auto", "--mlp-rows", "16384", "--recompute", "selective"]) == 0
    said = capsys.readouterr().out
    assert "layers wait in host memory: 18 GiB of a rank, 145 GiB of a node" in said
    assert "selective, refetch, offload 20" in said


def test_documents_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("1000\n3000 500\n")
    picture = tmp_path / "plan.svg"
    words = ["--model", "llama3-8b", "--tokens", "32K", "--gpus", "2", "--gpus-per-node", "2", "--no-longest"]
    assert main([*words, "--documents", str(lengths), "--picture", str(picture)]) == 0
    assert "balanced" in capsys.readouterr().out
    assert "<svg" in picture.read_text()[:500]


def test_nothing_that_fits_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "llama3-405b", "--gpus", "8", "--gpu", "a100", "--no-longest"]) == 1
    assert "nothing fits" in capsys.readouterr().out


def test_documents_fill_the_sequence(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("3 4")
    assert read_documents(tmp_path / "x", 12) == (0, 3, 7, 10, 12)


@pytest.mark.parametrize("text", ["", "x", "1.3", "0", "-4K", "K"])
def test_words_that_are_no_number_of_tokens_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="tokens must be a whole number such as 131072, 128K or 1M"):
        read_count(text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "nothing"], "model must be one of llama3-8b"),
        (["--model", "llama3-8b", "--documents", "missing"], "documents must be a file of lengths above 0"),
        (["--picture", "x.svg"], "picture must be left out for one attention"),
        (["--offload", "all"], "offload must be left out for one attention, got all; pass --model"),
        (["--mlp-rows", "512"], "mlp_rows must be left out for one attention, got 512"),
        (["--no-chunked-loss"], "chunked_loss must be left out for one attention, got False"),
        (["--mode", "serve"], "mode must be left out for one attention, got serve"),
        (
            ["--mode", "serve", "--model", "llama3-8b", "--offload", "all"],
            "offload must be left out when serving, got all",
        ),
        (["--mode", "serve", "--model", "llama3-8b", "--recompute", "full"], "recompute must be left out when serving"),
        (["--model", "llama3-8b", "--window", "0"], "window must be at least 1, got 0"),
        (["--gpus", "12"], "gpus must be a multiple of gpus_per_node 8, got 12"),
        (["--model", "llama3-8b", "--tokens", "many"], "tokens must be a whole number"),
    ],
)
def test_impossible_plans_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        main(words)
