"""Predictions for rows that the benches wrote: what the planner says of a measurement, beside it.

Rows of other implementations, of the CPU and of calls that were refused are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ringattn.launch.plan.fit import ROW_SCHEDULES, Row, ring_call
from ringattn.plan.layouts import shard_len
from ringattn.sizing.attention_launch import Heads
from ringattn.sizing.memory import Savings, attention_peak, training_memory
from ringattn.sizing.profile import Profile, load_profile
from ringattn.sizing.ring_time import RingCall, attention_time
from ringattn.sizing.shapes import ModelShape
from ringattn.sizing.step import prefill_s, token_ms, training_step
from tests.support.short_mask import ShortMask

ONE_SLOT_SINCE = "2026-11-22T08:01"
"""Rings of before 5567b57 had two send buffers."""
COMMUNICATOR = 0.21 * 2**30
"""Bytes of the NCCL communicator that a ring of four process-group ranks makes; plans have it in their reserve."""
FP32_LOGITS_BEFORE = "2026-11-29T03:40"
"""Steps until then made passes over logits in fp32: `MORE_LOSS_BYTES` per row and logit."""
MORE_LOSS_BYTES = 34
WHOLE_MLP_BEFORE, CHUNKED_MLP_BEFORE = "2026-11-22T01", "2026-11-28"
"""The bench of models of before ran SwiGLU over all rows at once, then over pieces that were checkpointed one by one."""
CHUNK_GRADIENTS_BEFORE = "2026-11-29T10"
"""Chunks of MLPs of before ran beside the gradients of weights of the chunk before them."""


@dataclass(frozen=True)
class Prediction:
    """One number of a row.

    Attributes:
        kind: "ring", "model", "prefill", "token" for times, or the same with " memory".
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


def read_rows(folder: Path, bench: str, files: str | None = None) -> Iterator[tuple[str, Row, Row]]:
    """Yield file, machine and row of all rows of a bench, in files that begin with its name or with `files`."""
    for path in sorted(folder.glob(f"{files or bench}*.json")):
        run = json.loads(path.read_text())
        for row in run["rows"]:
            if row["bench"] == bench:
                yield path.name, run["machine"], row


def profile_of(machine: Row) -> Profile:
    """Return the committed profile of the GPUs of a row: H100 or H200."""
    return load_profile("h100" if "H100" in machine["gpus"][0] else "h200")


def predict_rows(folder: Path) -> list[Prediction]:
    """Return the predictions for all rows of rings, memory, models and prompts in a folder."""
    found: list[Prediction] = []
    benches = ("ring", _ring), ("memory", _memory), ("model", _model), ("inference", _prompt)
    for (bench, predict), files in [(x, x[0]) for x in benches] + [(benches[2], "offload")]:
        for file, machine, row in read_rows(folder, bench, files):
            found += predict(file, machine, row, profile_of(machine))
    return found


def _shape(row: Row) -> ModelShape:
    names = ("dim", "layers", "heads", "kv_heads", "head_dim", "mlp_dim", "vocab_size")
    return ModelShape("bench", *(row[name] for name in names))


def _causal(tokens: int, world_size: int, shape: ModelShape) -> RingCall:
    mask = ShortMask(tokens, tokens, causal=True)
    return RingCall(mask, world_size, Heads(1, shape.heads, shape.kv_heads, shape.head_dim))


def _more_slots(machine: Row) -> int:
    """Return the send buffers beyond one of a fused ring of that time."""
    return int(machine["date"] <= ONE_SLOT_SINCE)


def _slot_bytes(call: RingCall) -> int:
    return max(shard_len(shard) for shard in call.shards) * call.heads.kv_bytes()


def _ring(file: str, machine: Row, row: Row, profile: Profile) -> Iterator[Prediction]:
    if not row.get("ours") or "forward_ms" not in row:
        return
    call = ring_call(row, row["world_size"], ROW_SCHEDULES[row["who"]])
    name = f"{row['world_size']} GPUs, {row['who']}, {row['mask']}, {row['tokens_per_rank']} tokens, {row['kv_heads']} KV heads"
    forward, backward = (attention_time(call, profile, direction) for direction in ("forward", "backward"))
    yield Prediction(file, f"{name}, forward", "ring", "ms", forward.ms, row["forward_ms"])
    both = max(forward.device_ms + backward.device_ms, forward.host_ms + backward.host_ms)
    yield Prediction(file, f"{name}, both", "ring", "ms", both, row["both_ms"])
    more = _more_slots(machine) - (row["who"] == "fused_kv_buffer")
    peak = attention_peak(call, profile) + more * _slot_bytes(call) + (row["who"] == "nccl") * COMMUNICATOR
    yield Prediction(file, f"{name}, peak", "ring memory", "GiB", peak / 2**30, row["peak_gib"])


def _memory(file: str, machine: Row, row: Row, profile: Profile) -> Iterator[Prediction]:
    call = ring_call(row, row["world_size"], ROW_SCHEDULES[row["who"]])
    name = f"{row['world_size']} GPUs, {row['mask']}, {row['seq_len']} tokens, peak"
    peak = attention_peak(call, profile) + _more_slots(machine) * _slot_bytes(call)
    yield Prediction(file, name, "ring memory", "GiB", peak / 2**30, row["peak_gib"])


def _model(file: str, machine: Row, row: Row, profile: Profile) -> Iterator[Prediction]:
    if row["who"] != "ring" or "step_s" not in row:
        return
    shape = _shape(row)
    world_size, tokens = row["world_size"], row["seq_len"]
    call, rows = _causal(tokens, world_size, shape), tokens // world_size
    savings = Savings(row.get("offload", 0), row.get("mlp_rows", 131072))
    name = f"{world_size} GPUs, {row['layers']} layers, {tokens} tokens"
    if "offload" in row:
        name += f", offload {savings.offload}, MLPs by {savings.mlp_rows} rows"
    machine_of = {"shards": world_size, "gpus_per_node": 8, "savings": savings}
    time = training_step(shape, rows, [(call, shape.layers)], profile, **machine_of)
    more = (
        (machine["date"] < FP32_LOGITS_BEFORE) * MORE_LOSS_BYTES * rows * shape.vocab_size / profile.memory_gbps / 1e9
    )
    yield Prediction(file, f"{name}, step", "model", "s", time.total + more, row["step_s"])
    if machine["date"] < WHOLE_MLP_BEFORE:
        savings = replace(savings, mlp_rows=rows)
    chunked = savings.mlp_rows < rows
    if chunked and machine["date"] < CHUNKED_MLP_BEFORE:
        return
    memory = training_memory(shape, rows, call, shards=world_size, savings=savings)
    if len(row["steps_s"]) == 1:
        memory = replace(memory, optimizer=0.0)  # AdamW makes its moments in the first step
    peak = memory.total + _more_slots(machine) * _slot_bytes(call)
    if chunked and machine["date"] < CHUNK_GRADIENTS_BEFORE:
        peak += 2 * shape.mlp_parameters(shape.experts)
    yield Prediction(file, f"{name}, peak", "model memory", "GiB", peak / 2**30, row["peak_gib"])


def _prompt(file: str, _: Row, row: Row, profile: Profile) -> Iterator[Prediction]:
    world_size, tokens = row["world_size"], row.get("seq_len", 0)
    name = f"{world_size} GPUs, {tokens} tokens"
    if row["part"] == "prefill" and "ms" in row:
        mask = ShortMask(tokens, tokens, causal=True)
        call = RingCall(mask, world_size, Heads(1, row["heads"], row["kv_heads"], row["head_dim"]))
        time = attention_time(call, profile, "forward")
        yield Prediction(file, f"{name}, {row['who']}", "prefill", "ms", time.ms, row["ms"])
    if row["part"] == "first" and row["who"] == "ringattn" and "ttft_s" in row:
        shape = _shape(row)
        calls = [(_causal(tokens, world_size, shape), shape.layers)]
        sharded = row.get("weights") == "sharded"
        time = prefill_s(shape, tokens, calls, profile, compiled=bool(row.get("fused")), sharded=sharded)
        yield Prediction(
            file, f"{name}, {row['layers']} layers, first token", "prefill", "s", time.total, row["ttft_s"]
        )
    # as `serve` decodes by default: CUDA graphs of compiled layers
    if row["part"] == "token" and row.get("how") == "graph" and row.get("fused") and "ms_per_token" in row:
        shape, batch = _shape(row), row["batch"]
        ms = token_ms(shape, tokens, batch, world_size, profile, sharded=row.get("weights") == "sharded")
        yield Prediction(
            file, f"{name}, {row['layers']} layers, token of {batch}", "token", "ms", ms, row["ms_per_token"]
        )
