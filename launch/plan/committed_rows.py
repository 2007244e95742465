"""Predictions for rows that the benches wrote: what the planner says of a measurement, beside it.

Rows of other implementations, of the CPU and of calls that were refused are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ringattn.launch.bench.workloads import Problem, mask_of
from ringattn.launch.train.config import PRESETS
from ringattn.plan.mask import AttentionMask
from ringattn.planning.attention_launch import Heads
from ringattn.planning.memory import attention_peak, training_memory
from ringattn.planning.profile import Profile
from ringattn.planning.ring_time import RingCall, attention_time
from ringattn.planning.shapes import ModelShape
from ringattn.planning.step import prefill_s, training_step

Row = dict[str, Any]
SCHEDULES = {
    "auto": "fused",
    "fused": "fused",
    "fused_saved_kv": "fused",
    "fused_kv_buffer": "fused",
    "gathered": "fused",
    "in_place": "fused",
    "kept": "fused",
    "stepwise": "stepwise",
    "staged": "stepwise",
    "nccl": "process_group",
    "process_group": "process_group",
}
"""Schedules by the names of rows, those of before 1.0 included."""
ONE_SLOT_SINCE = "2026-11-22T08:01"
"""Rings of before 5567b57 had two send buffers."""
WHOLE_MLP_BEFORE = "2026-11-22T01"
"""The bench of models of before ran SwiGLU over all rows at once."""


@dataclass(frozen=True)
class Prediction:
    """One number of a row.

    Attributes:
        kind: "ring", "model", "training", "prefill" for times, or the same with " memory".
        unit: "ms", "s" or "GiB".
    """

    file: str
    name: str
    kind: str
    unit: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative error: 0.1 is 10% too much."""
        return self.predicted / self.measured - 1


def read_rows(folder: Path, bench: str) -> Iterator[tuple[str, Row, Row]]:
    """Yield file, machine and row of all rows of a bench."""
    for path in sorted(folder.glob(f"{bench}*.json")):
        run = json.loads(path.read_text())
        for row in run["rows"]:
            if row["bench"] == bench:
                yield path.name, run["machine"], row


def predict_rows(folder: Path, profile: Profile) -> list[Prediction]:
    """Return the predictions for all rows of rings, memory, models, training and prompts in a folder."""
    found: list[Prediction] = []
    for file, machine, row in read_rows(folder, "ring"):
        found += _ring(file, machine, row, profile)
    for file, machine, row in read_rows(folder, "memory"):
        found += _memory(file, machine, row)
    for file, machine, row in read_rows(folder, "model"):
        found += _model(file, machine, row, profile)
    for file, _, row in read_rows(folder, "train"):
        found += _training(file, row, profile)
    for file, _, row in read_rows(folder, "inference"):
        found += _prompt(file, row, profile)
    return found


def problem_of(row: Row) -> Problem:
    """Return the attention that a row measured."""
    names = ("mask", "seq_len", "batch", "heads", "kv_heads", "head_dim", "dtype", "window", "document")
    return Problem(**{name: row[name] for name in names})


def ring_call(row: Row, world_size: int, schedule: str = "fused") -> RingCall:
    """Return the call that a row measured."""
    problem = problem_of(row)
    heads = Heads(problem.batch, problem.heads, problem.kv_heads, problem.head_dim)
    saved = row["who"] in ("fused_saved_kv", "kept")
    layout = row.get("layout", "zigzag")
    return RingCall(mask_of(problem), world_size, heads, layout=layout, schedule=schedule, saved=saved)


def _causal(tokens: int, world_size: int, shape: ModelShape) -> RingCall:
    mask = AttentionMask(tokens, tokens, causal=True)
    return RingCall(mask, world_size, Heads(1, shape.heads, shape.kv_heads, shape.head_dim))


def _ring(file: str, machine: Row, row: Row, profile: Profile) -> Iterator[Prediction]:
    if not row.get("ours") or "forward_ms" not in row:
        return
    call = ring_call(row, row["world_size"], SCHEDULES[row["who"]])
    name = f"{row['world_size']} GPUs, {row['who']}, {row['mask']}, {row['tokens_per_rank']} tokens, {row['kv_heads']} KV heads"
    forward, backward = (attention_time(call, profile, direction) for direction in ("forward", "backward"))
    yield Prediction(file, f"{name}, forward", "ring", "ms", forward.ms, row["forward_ms"])
    both = max(forward.device_ms + backward.device_ms, forward.host_ms + backward.host_ms)
    yield Prediction(file, f"{name}, both", "ring", "ms", both, row["both_ms"])
    slots = 1 if machine["date"] > ONE_SLOT_SINCE else 2
    slots -= row["who"] in ("in_place", "fused_kv_buffer")
    peak = attention_peak(call, slots=slots, profile=profile) / 2**30
    yield Prediction(file, f"{name}, peak", "ring memory", "GiB", peak, row["peak_gib"])


def _memory(file: str, machine: Row, row: Row) -> Iterator[Prediction]:
    call = ring_call(row, row["world_size"], SCHEDULES[row["who"]])
    slots = 1 if machine["date"] > ONE_SLOT_SINCE else 2
    name = f"{row['world_size']} GPUs, {row['mask']}, {row['seq_len']} tokens, peak"
    yield Prediction(file, name, "ring memory", "GiB", attention_peak(call, slots=slots) / 2**30, row["peak_gib"])


def _model(file: str, machine: Row, row: Row, profile: Profile) -> Iterator[Prediction]:
    if row["who"] != "ring" or "step_s" not in row:
        return
    shape = ModelShape(
        "bench",
        row["dim"],
        row["layers"],
        row["heads"],
        row["kv_heads"],
        row["head_dim"],
        row["mlp_dim"],
        row["vocab_size"],
    )
    world_size, tokens = row["world_size"], row["seq_len"]
    call, rows = _causal(tokens, world_size, shape), tokens // world_size
    name = f"{world_size} GPUs, {row['layers']} layers, {tokens} tokens"
    time = training_step(shape, rows, call, profile, shards=world_size, gpus_per_node=8)
    yield Prediction(file, f"{name}, step", "model", "s", time.total, row["step_s"])
    memory = training_memory(
        shape,
        rows,
        call,
        shards=world_size,
        mlp_rows=rows if machine["date"] < WHOLE_MLP_BEFORE else 131072,
        has_moments=len(row["steps_s"]) > 1,
        slots=1 if machine["date"] > ONE_SLOT_SINCE else 2,
    )
    yield Prediction(file, f"{name}, peak", "model memory", "GiB", memory.total / 2**30, row["peak_gib"])


def _training(file: str, row: Row, profile: Profile) -> Iterator[Prediction]:
    """Yield the training job's rows, of a preset with one sequence per ring and micro-batch.

    Those with `replicated` are of the first trainer: autocast, whose residual stream is fp32, replicated parameters, and the
    portable kernels, because 0010419 gave training the Hopper kernels later.
    """
    tokens, world_size, cp = row["seq_len"], row["world_size"], row["cp"]
    first, preset = bool(row.get("replicated")), PRESETS[row.get("preset") or "gpu-128k"].shape()
    shape = ModelShape(
        "preset",
        preset.dim,
        preset.num_layers,
        preset.num_heads,
        preset.num_kv_heads,
        preset.head_dim,
        preset.mlp_dim,
        preset.vocab_size,
        tied=preset.tie_embeddings,
    )
    call, rows = _causal(tokens, cp, shape), tokens // cp
    if first:
        call = replace(call, heads=replace(call.heads, kernels="portable"))
    recompute, accumulate = row.get("recompute") or "selective", row.get("accumulate") or 1
    shards, stream_bytes = (1, 4) if first else (world_size, 2)
    time = training_step(
        shape,
        rows,
        call,
        profile,
        shards=shards,
        gpus_per_node=8,
        recompute=recompute,
        accumulate=accumulate,
        stream_bytes=stream_bytes,
    )
    name, measured = f"{world_size} GPUs, {tokens} tokens", row["dp"] * accumulate * tokens / row["tokens_per_s"]
    yield Prediction(file, f"{name}, step", "training", "s", time.total, measured)
    memory = training_memory(
        shape,
        rows,
        call,
        shards=shards,
        recompute=recompute,
        replicated=first,
        stream_bytes=stream_bytes,
        mlp_rows=rows,
    )
    # torch's allocator only, not the memory that ranks map into each other: send buffers and the local gradients
    ring = replace(memory, ring=(4 if first else 3) * rows * call.heads.kv_bytes() if cp > 1 else 0.0)
    peak = max(row["peak_memory_mib"]) / 1024
    yield Prediction(file, f"{name}, peak", "training memory", "GiB", ring.total / 2**30, peak)


def _prompt(file: str, row: Row, profile: Profile) -> Iterator[Prediction]:
    world_size, tokens = row["world_size"], row.get("seq_len", 0)
    name = f"{world_size} GPUs, {tokens} tokens"
    if row["part"] == "prefill" and "ms" in row:
        heads = Heads(1, row["heads"], row["kv_heads"], row["head_dim"])
        call = RingCall(AttentionMask(tokens, tokens, causal=True), world_size, heads)
        time = attention_time(call, profile, "forward")
        yield Prediction(file, f"{name}, {row['who']}", "prefill", "ms", time.ms, row["ms"])
    if row["part"] == "first" and row["who"] == "ringattn" and "ttft_s" in row:
        shape = ModelShape(
            "bench",
            row["dim"],
            row["layers"],
            row["heads"],
            row["kv_heads"],
            row["head_dim"],
            row["mlp_dim"],
            row["vocab_size"],
        )
        time = prefill_s(shape, tokens, _causal(tokens, world_size, shape), profile, compiled="fused" in row)
        yield Prediction(
            file, f"{name}, {row['layers']} layers, first token", "prefill", "s", time.total, row["ttft_s"]
        )
