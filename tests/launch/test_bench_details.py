"""Flags of `bench` measure one part closely: host, memory, traces, replays, decoding, reductions."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringattn.kernels.decode import dispatch
from ringattn.kernels.interface import Score, accumulation_dtype
from ringattn.launch.bench import __main__ as bench
from ringattn.launch.bench import ring as ring_bench
from ringattn.launch.bench import workloads
from ringattn.launch.bench.details import graph_profile, memory, step_trace
from ringattn.plan.attention_spec import AttentionSpec, ScoreTensors, serialize
from ringattn.plan.sharding import Sharding
from ringattn.schedule.execution_plan import make_execution_plan
from ringattn.schedule.stepwise_backward import WantedGrads, stepwise_backward
from ringattn.schedule.stepwise_forward import stepwise_forward
from ringattn.transport import base
from tests.launch.common import TINY, FakeRing


def _bench_host(out: str) -> int:
    words = ["--tokens", "8", "--calls", "25", "--layers", "2", "--device", "cpu", "--out", out]
    return bench.main(["ring", "--host", *TINY, *words])


@pytest.mark.dist
def test_bench_host_times_every_direction(pool, tmp_path: Path) -> None:
    assert pool(2).run(_bench_host, str(tmp_path)) == [0, 0]
    (row,) = json.loads((tmp_path / "host.json").read_text())["rows"]
    assert row["world_size"] == 2
    # which takes longer is for a quiet machine to say
    times = ("inference", "forward", "both", "both_in_one_thread", "backward_operator", "layer", "layer_in_one_thread")
    assert min(row[f"{name}_us"] for name in times) > 0
    for split in (row["split_us"], row["split_in_one_thread_us"]):
        assert len(split) == 3
        assert min(split) > 0


SHARES = ["--sums", "3", "--hidden", "8", "--gathers", "2", "--columns", "5"]


def _bench_reduce(out: str) -> int:
    words = ["--rows", "4", "8", "--heads", "4", "--head-dim", "16", "--splits", "2", "--rounds", "2", *SHARES]
    return bench.main(["inference", "--reduce", *words, "--device", "cpu", "--out", out])


@pytest.mark.dist
def test_bench_reduce_times_every_exchange_that_is_right(pool, tmp_path: Path) -> None:
    assert pool(2).run(_bench_reduce, str(tmp_path)) == [0, 0]
    rows = json.loads((tmp_path / "reduce.json").read_text())["rows"]
    assert [(row["who"], row["op"], row["rows"], row["kib_per_rank"]) for row in rows] == [
        ("group", "finish", 4, 4 * 4 * 18 / 1024),
        ("group", "finish", 8, 4 * 8 * 18 / 1024),
        ("group", "sum", 3, 4 * 3 * 8 / 1024),
        ("group", "gather", 2, 2 * 2 * 5 / 1024),
    ]
    assert min(row["call_us"] for row in rows) > 0


def test_bench_reduce_gives_no_speed_to_a_wrong_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--rows", "4", "--heads", "4", "--head-dim", "16", "--rounds", "1", "--device", "cpu", *SHARES]
    for broken, said in (
        ("reduce.stacked.finish_parts", "alone, 4 rows: o is"),
        ("reduce.stacked.LocalReducer.all_reduce", "alone, a sum of 3 x 8: the sum is"),
        ("reduce.stacked.LocalReducer.all_gather_columns", "alone, columns 2 x 5: the whole is"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"ringattn.transport.{broken}", lambda *args: [x.fill_(0.5) for x in args[-2:]])
            assert bench.main(["inference", "--reduce", *words, "--out", str(tmp_path)]) == 1
        assert said in capsys.readouterr().out
        assert not (tmp_path / "reduce.json").exists()


class _NoKernels:
    """Kernels that write nothing: what is left is what the loops hold."""

    @staticmethod
    def forward(*args: Any, **kwargs: Any) -> None:
        """Nothing."""

    backward = forward

    @staticmethod
    def delta(o: torch.Tensor, do: torch.Tensor, dlse: Any) -> torch.Tensor:
        return torch.empty(o.shape[0], o.shape[2], o.shape[1], dtype=accumulation_dtype(o.dtype))


class _NoWire(base.NoTransport):
    def post(self, sends: Any, receives: Any, what: str) -> Any:
        return base.Done()


def _held(problem: Any, layout: str, world_size: int, rank: int) -> int:
    """Bytes that torch's allocator handed out at the peak of the second of two steps."""
    ring = FakeRing(world_size)
    dealt = ring_bench.deal(problem, ring, layout)  # pyright: ignore[reportArgumentType]
    sharding = Sharding(problem.seq_len, layout, dealt.shards, rank, problem.documents)
    spec = AttentionSpec.deserialize(serialize(sharding, softmax_scale=1.0, impl="eager", **problem.options), rank)
    context = base.RingContext(rank, world_size, _NoWire())
    kernels: Any = _NoKernels()

    def step() -> list[torch.Tensor]:
        q, k, v, do = (x.detach() for x in workloads.draw_inputs(problem, sharding.shard_len, torch.device("cpu")))
        plan = make_execution_plan(spec, q, k, v, ScoreTensors(), kernels, context)
        o, lse = stepwise_forward(q, k, v, Score(1.0), plan, context)
        grads = stepwise_backward(do, None, q, k, v, o, lse, Score(1.0), plan, context, WantedGrads())
        return [grads.dq.to(q.dtype), grads.dk.to(q.dtype), grads.dv.to(q.dtype)]

    step()
    kept = context.buffers.num_bytes()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        step()
    assert context.buffers.num_bytes() == kept
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    changes = [event["args"] for event in events if event["name"] == "[memory]"]
    before = changes[0]["Total Allocated"] - changes[0]["Bytes"]
    return kept + max(change["Total Allocated"] for change in changes) - before


@pytest.mark.parametrize(
    ("mask", "kv_heads", "batch", "dtype"),
    [("causal", 1, 1, "bf16"), ("causal", 4, 2, "bf16"), ("window", 2, 1, "fp16"), ("full", 4, 1, "fp32")],
)
def test_the_predicted_peak_is_what_the_allocator_saw(mask: Any, kv_heads: int, batch: int, dtype: Any) -> None:
    problem = workloads.Problem(mask, 1536, batch, 4, kv_heads, 32, dtype, window=100)
    for world_size in (1, 3):
        layout = ring_bench.best_layout(problem, world_size)
        held = max(_held(problem, layout, world_size, rank) for rank in range(world_size))
        predicted = sum(memory.predict_bytes(problem, world_size).values())
        assert held == pytest.approx(predicted, rel=0.01)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_predicted_outboxes_are_those_that_the_loops_reserve(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = workloads.Problem("causal", 1536, 1, 4, kv_heads, 32, "bf16", window=0)
    for world_size in (2, 4):
        asked = [0, 0]

        def reserve(self: Any, *sizes: int, asked: list[int] = asked) -> None:
            del self
            asked[:] = map(max, asked, sizes)

        monkeypatch.setattr(_NoWire, "reserve", reserve)
        _held(problem, ring_bench.best_layout(problem, world_size), world_size, 0)
        predicted = memory.predict_bytes(problem, world_size, boxes=memory.BOXES)
        assert predicted["outboxes"] == pytest.approx(2 * sum(asked), rel=0.01)


def test_a_million_tokens_on_four_gpus_are_predicted_to_fit() -> None:
    problem = workloads.Problem("causal", 2**20, 1, 32, 8, 128, "bf16", window=0)
    staged, gathered = (memory.predict_bytes(problem, 4, schedule) for schedule in ("staged", "gathered"))
    per_rank = 2**18 * 8 * 2 * 128
    assert gathered["far"] == pytest.approx(2 * 3 * per_rank, rel=0.01), "rank 0 holds the last rows"
    assert gathered["homes"] == 4 * (2 * 3 + 1) * per_rank
    assert sum(staged.values()) < sum(gathered.values()) + 2**33
    assert max(sum(staged.values()), sum(gathered.values())) < 100 * 2**30


DECODE = [
    "inference",
    "--decode",
    "--device",
    "cpu",
    "--tokens",
    "64",
    "--batch",
    "2",
    "--lengths",
    "40",
    "--new-tokens",
    "3",
]


DECODE += [
    "--page-size",
    "16",
    "--rounds",
    "3",
    "--round-s",
    "0.01",
    "--groups",
    "target",
    "lengths",
    "tokens",
    "fp8",
    "uneven",
]


def test_bench_decode_counts_the_bytes_of_k_and_v(tmp_path: Path) -> None:
    assert bench.main([*DECODE, "--out", str(tmp_path), "--configs", "chosen", "64,4,4,2"]) == 0
    rows = json.loads((tmp_path / "decode.json").read_text())["rows"]
    assert [row["requests"] for row in rows if row["config"] == "chosen"] == [
        *([64], [40], [64], [32, 32], [64], [32, 32], [64], [60, 4]),
    ]
    for row in rows:
        if row["config"] != "chosen":
            assert "refused" in row  # no Triton on a CPU
            continue
        assert row["kv_bytes"] == 2 * sum(row["requests"]) * 8 * {"bf16": 256, "fp8": 132}[row["pool"]]
        assert row["gbps"] * row["us"] == pytest.approx(1e-3 * row["kv_bytes"])
        assert row["percent"] == pytest.approx(100 * row["gbps"] / max(row["read_gbps"], row["copy_gbps"]))


def test_bench_decode_gives_no_speed_to_a_wrong_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = dispatch.decode

    def off_by_a_little(q: Tensor, *rest: Any, **options: Any) -> None:
        right(q * 1.1, *rest, **options)

    monkeypatch.setattr(dispatch, "decode", off_by_a_little)
    assert bench.main([*DECODE, "--groups", "target", "--out", str(tmp_path)]) == 1
    (row,) = json.loads((tmp_path / "decode.json").read_text())["rows"]
    assert row["refused"].startswith("wrong answer: o is off by")
    assert "us" not in row


def test_bench_decode_fails_when_nothing_of_ours_was_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--groups", "target", "--configs", "64,4,4,2", "--peers", "sdpa", "--out", str(tmp_path)]
    assert bench.main([*DECODE, *words]) == 1  # no Triton on a CPU
    said = capsys.readouterr()
    assert said.err == "error: no configuration of ours was timed\n"
    assert f"rows: {tmp_path / 'decode.json'}\n" in said.out


def test_a_bench_that_leaves_out_everything_fails_and_names_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main([*DECODE, "--budget-s", "1e-9", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("error: nothing was measured, and no file written: all was left out; ")
    assert "rows: " not in said.out
    assert not list(tmp_path.iterdir())


def _trace(out: str) -> int:
    return bench.main(["ring", "--trace", *TINY, "--tokens", "48", "--warmup", "1", "--device", "cpu", "--out", out])


@pytest.mark.dist
def test_traces_have_named_ring_steps(pool, tmp_path: Path) -> None:
    assert pool(2).run(_trace, str(tmp_path)) == [0, 0]
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

    a, b = step_trace.union(these), step_trace.union(those)
    assert moments(a) == sorted(set(moments(these)))
    assert moments(step_trace.intersection(a, b)) == sorted(set(moments(these)) & set(moments(those)))


def test_the_time_of_replayed_calls_is_alone_waiting_and_idle() -> None:
    """Three replays of four calls, each a copy, then two kernels that overlap, and a pause."""
    rows, at = [], 5.0
    for _ in range(3):
        for _ in range(4):
            rows += [("gpu_memcpy", at - 2, 4.0), ("kernel", at, 10.0), ("kernel", at + 8, 4.0)]
            at += 15.0
        at += 100.0
    trace = {
        "baseTimeNanoseconds": 1_000_000,
        "traceEvents": [{"ph": "X", "cat": c, "name": c, "ts": t, "dur": d} for c, t, d in rows]
        + [
            {"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 0.0, "dur": 1e6},
            {"ph": "M", "name": "process_name"},
        ],
    }
    events = graph_profile.read_trace(trace)
    assert len(events) == 36
    last = graph_profile.last_replay(events, 3)
    assert [event.kind for event in last[:3]] == ["copy", "kernel", "kernel"]
    assert last[1].start == 1000 + 5 + 2 * (60 + 100)
    assert len(last) == 12
    # of the first copy half is before the first call; a copy of the last call begins in the one before
    assert graph_profile.Spent.of(last, 4) == graph_profile.Spent(15.0, 12.0, (2 + 2 * 4 + 2) / 3)
    with pytest.raises(ValueError, match="as many kernels of each, got 24"):
        graph_profile.last_replay(events, 5)
    with pytest.raises(ValueError, match="5 calls must have as many kernels each, got 8"):
        graph_profile.Spent.of(last, 5)
    with pytest.raises(ValueError, match="calls must be at least 2"):
        graph_profile.ProfileArgs(calls=1)


def test_replays_refuses_what_has_no_gpus_without_naming_flags_that_it_lacks(monkeypatch: Any) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    with pytest.raises(
        SystemExit, match=r"each rank of a host must have a GPU.* got 1000 ranks and .*-nproc_per_node$"
    ):
        bench.main(["ring", "--profile"])
