"""`bench ring` times rings and peers that answer alike."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import ringattn
from ringattn.launch.bench import __main__ as bench
from ringattn.launch.bench import baselines, workloads
from ringattn.launch.bench import ring as ring_bench
from ringattn.launch.common import ring_variants, timing
from ringattn.launch.common.session import Session
from tests.launch.common import TINY, FakeRing


def _bench(out: str) -> int:
    words = [
        "--tokens", "24", "48", "--layouts", "zigzag", "balanced", "--rounds", "2", "--device", "cpu", "--out", out,
    ]  # fmt: skip
    return bench.main(["ring", *TINY, "--masks", "causal", "--no-graphs", *words])


def test_bench_ring_writes_rows(pool, tmp_path: Path) -> None:
    assert pool(2).run(_bench, str(tmp_path)) == [0, 0]
    kept = json.loads((tmp_path / "ring.json").read_text())
    assert kept["machine"]["world_size"] == 2
    assert [(row["tokens_per_rank"], row["layout"], row["who"]) for row in kept["rows"]] == [
        (tokens, layout, "auto") for tokens in (24, 48) for layout in ("zigzag", "balanced")
    ]
    for row in kept["rows"]:
        assert row["both_ms"] > 0
        assert row["forward_ms"] > 0
        assert row["forward_tflops"] * row["forward_ms"] * 1e9 == pytest.approx(4 * 4 * 16 * row["pairs"] / 2)
        assert row["forward_exposed_ms"] == pytest.approx(row["forward_ms"] - row["forward_alone_ms"])
        # rank 0 needs all 48 keys of rank 1, rank 1 only the first 24 of rank 0; k and v, 2 heads of 16, fp32
        if (row["tokens_per_rank"], row["layout"]) == (48, "zigzag"):
            assert row["bytes_received"]["forward"] == (48 + 24) // 2 * 2 * 16 * 2 * 4
            assert row["bytes_received"]["forward_most"] == 48 * 2 * 16 * 2 * 4


def _bench_with_others(out: str) -> int:
    """Two schedules, a third that cannot be, and peers: one right, one that mistakes its order, one that raises."""
    ring_variants.SCHEDULES.update(stepwise={}, process_group={})

    def refuse(schedule: str, group: Any = None) -> Any:
        if schedule == "fused":
            raise NotImplementedError("peers must reach each other's memory, got CPUs; use process_group")
        return make(schedule, group)

    def peer(self: Any, who: str, problem: Any, seed: int) -> baselines.Contender:
        if who == "ring_flash_attn":
            raise baselines.Unsupported("not installed")
        ring = peer_ring
        right = baselines.prepare_ours(problem, ring, "zigzag", torch.device("cpu"), "auto", seed)
        if who == "torch_cp_allgather":
            return right
        return dataclasses.replace(right, answers=lambda: ((name, x.flip(1)) for name, x in right.answers()))

    make, peer_ring = ring_variants.make_ring, ringattn.Ring()
    ring_variants.make_ring = refuse
    baselines.Peers.prepare = peer
    words = ["--schedules", "fused", "stepwise", "process_group", "--tokens", "24", "--rounds", "1", "--device", "cpu"]
    words += ["--peers", "torch_cp_allgather", "torch_cp_alltoall", "ring_flash_attn", "--no-graphs", "--out", out]
    words += ["--virtual-size", "4"]
    return bench.main(["ring", *TINY, *words])


def test_rings_and_peers_take_turns_and_a_wrong_one_has_no_speed(pool, tmp_path: Path) -> None:
    workers = pool(2)
    try:
        assert workers.run(_bench_with_others, str(tmp_path)) == [0, 0]
    finally:
        workers.close(kill=True)  # what was patched there ends with them
    rows = {row["who"]: row for row in json.loads((tmp_path / "ring.json").read_text())["rows"]}
    assert list(rows) == ["stepwise", "gloo", "virtual_4", "torch_cp_allgather", "torch_cp_alltoall", "ring_flash_attn"]
    timed = [who for who, row in rows.items() if "forward_ms" in row]
    assert timed == ["stepwise", "gloo", "virtual_4", "torch_cp_allgather"]
    assert all(rows[who]["backward_ms"] > 0 for who in timed)
    assert rows["torch_cp_alltoall"]["refused"].startswith("wrong answer: differs from ours in o by ")
    assert rows["ring_flash_attn"]["refused"] == "not installed"
    assert (rows["gloo"]["ours"], rows["torch_cp_allgather"]["ours"]) == (True, False)


def test_bench_ring_fails_when_none_of_its_rings_was_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no room for keys")

    monkeypatch.setattr(ringattn.Ring, "kv_buffer", refuse)
    words = ["ring", *TINY, "--tokens", "24", "--rounds", "1", "--no-graphs", "--device", "cpu", "--out", str(tmp_path)]
    assert bench.main([*words, "--schedules", "fused_kv_buffer"]) == 1
    assert capsys.readouterr().err.endswith("error: fused_kv_buffer: RuntimeError: no room for keys\n")
    assert bench.main([*words, "--schedules", "fused_kv_buffer", "auto"]) == 0
    assert "error:" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["ring", "ring --host"])
def test_a_bench_without_a_ring_fails_with_the_reasons(
    kind: str, monkeypatch: Any, tmp_path: Path, capsys: Any
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no GPUs")

    monkeypatch.setattr(ring_variants, "make_ring", refuse)
    assert (
        bench.main(
            [*kind.split(), *TINY, "--device", "cpu", "--schedules", "fused", "fused_saved_kv", "--out", str(tmp_path)]
        )
        == 1
    )
    said = capsys.readouterr()
    assert said.err.endswith(
        "error: one of the schedules must give a ring here, got none (fused: rank 0: RuntimeError: no GPUs; "
        "fused_saved_kv: rank 0: RuntimeError: no GPUs); choose another schedule\n"
    )
    assert "check is green" not in said.out


def _bench_host(out: str) -> int:
    words = ["--tokens", "8", "--kv-heads", "2", "--calls", "25", "--device", "cpu", "--out", out]
    return bench.main(["ring", "--host", *TINY, *words])


def test_bench_ring_host_times_every_direction(pool, tmp_path: Path) -> None:
    assert pool(2).run(_bench_host, str(tmp_path)) == [0, 0]
    (row,) = json.loads((tmp_path / "host.json").read_text())["rows"]
    assert (row["bench"], row["world_size"], row["who"]) == ("host", 2, "auto")
    # which takes longer is for a quiet machine to tell
    times = ("inference", "forward", "both", "both_in_one_thread", "layer", "layer_in_one_thread")
    assert min(row[f"{name}_us"] for name in times) > 0


def test_the_layout_of_a_window_moves_fewer_rows() -> None:
    wide = workloads.Problem("window", 4 * 32768, 1, 32, 8, 128, "bf16", window=4095)
    assert workloads.resolve_layouts(("best",), wide, 4) == ("contiguous",)
    moved = {}
    for world_size in (2, 4, 8):
        problem = dataclasses.replace(wide, seq_len=world_size * 32768)
        sharding = baselines.make_sharding(problem, FakeRing(world_size), "contiguous")  # pyright: ignore[reportArgumentType]
        moved[world_size] = ring_bench.bytes_received(problem, sharding)["forward_most"]
    assert set(moved.values()) == {4095 * 2 * 8 * 128 * 2}, "the halo, at any number of ranks"


def test_attention_inside_torch_serves_ring_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    with pytest.raises(baselines.Unsupported, match="not installed"):
        baselines.find_ring_flash_attn()
    baselines.provide_flash_attn()
    provided = sys.modules["flash_attn.flash_attn_interface"]
    dense, packed = (
        inspect.signature(one).parameters
        for one in (provided._flash_attn_backward, provided._flash_attn_varlen_backward)
    )
    assert {"dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", "causal"} <= set(dense)
    assert {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"} <= set(packed)
    with pytest.raises(NotImplementedError, match="window_size_left must be left out, got 5"):
        provided._flash_attn_forward(*torch.zeros(3, 1, 1, 1, 1), window_size_left=5)


@pytest.mark.parametrize(("seconds", "rounds"), [(math.inf, 5), (0.0, 3), (1e3, 5)])
def test_rounds_fit_into_the_seconds_but_three_at_least(seconds: float, rounds: int) -> None:
    here = Session(0, 1, torch.device("cpu"), None)
    found = timing.time_calls({"a": lambda: time.sleep(1e-3)}, here, 5, "calls", seconds)["a"]
    assert found.rounds == rounds
    assert found.calls_ms is not None
    assert found.calls_ms >= 1


def test_calls_of_several_ranks_are_timed_with_their_host() -> None:
    here = Session(0, 1, torch.device("cpu"), None)
    found = timing.time_together({"a": lambda: None, "b": lambda: time.sleep(1e-3)}, here, 3, math.inf, ["b"])
    assert found["a"].host_us is None
    assert found["b"].host_us is not None
    assert found["b"].host_us >= 1e3
    assert found["b"].calls_ms is not None
    assert found["b"].calls_ms >= 1
    assert found["b"].graph_refused == "NotImplementedError: graphs need a GPU"
