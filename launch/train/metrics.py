"""Metrics of a training step (FLOPs, MFU, peak memory and exposed communication), their log, and a plot of the losses.

Note [Exposed communication]
    The additional time that the attention operators of a step take on the GPU, compared with the same kernels without a
    ring. On every tenth step CUDA events are recorded around each operator. The time of a visible pair without a ring is
    measured once: a causal call on this rank alone, with the same heads, head_dim and dtype, and with as many visible pairs
    as an average call of this rank. The difference includes waits, slower kernels during transfers, merging, and a few per
    cent of error either way. The largest of any rank is reported; there is none on CPUs and where blocks are compiled.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ringattn
from ringattn.plan.attention_spec import AttentionSpec
from ringattn.ring_registry import get_ring

# dense bfloat16 with fp32 accumulation, FLOP/s, from data sheets; the first name that is part of the device's counts
PEAKS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A10G": 70e12,
    "L40S": 362e12,
    "L4": 121e12,
    "MI325X": 1307e12,
    "MI300X": 1307e12,
}


def peak_flops(name: str, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of a GPU by its name, in bfloat16; None for unknown GPUs and other dtypes."""
    if dtype != torch.bfloat16:
        return None
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def mfu(flops: float, seconds: float, num_gpus: int, peak: float | None) -> float | None:
    """Return the share of the peak FLOP/s that a step reaches; None where the peak is unknown."""
    return None if peak is None else flops / (seconds * num_gpus * peak)


def peak_memory_mib(device: torch.device, so_far: float) -> float:
    """Return the peak memory of this rank in MiB: of the GPU, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    import psutil

    return max(so_far, psutil.Process().memory_info().rss / 2**20)


def count_flops(run: Callable[[], object]) -> tuple[int, int]:
    """Return the FLOPs of a call in this process: of attention, by visible pairs only (`ringattn.plan.flops`), and others."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        run()
    counts = counter.get_flop_counts().get("Global", {})
    attention = sum(count for op, count in counts.items() if "ringattn" in str(op))
    return attention, sum(counts.values()) - attention


class AttentionTimer(TorchDispatchMode):
    """Times the attention operators that run inside `with`, forward and backward, on the GPU (Note [Exposed communication]).

    `group` has this rank only. One timer serves the whole run: it caches the time of a visible pair without communication.
    """

    def __init__(self, group: Any) -> None:
        super().__init__()
        self._group = group
        self._calls: list[_Timed] = []
        self._ms_per_pair: dict[str, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator, between two events if it is attention."""
        del types
        schema = func._schema.name if getattr(func, "namespace", None) == "ringattn" else ""
        name = schema.removeprefix("ringattn::")
        if name not in ("forward", "backward"):
            return func(*args, **(kwargs or {}))
        q, k, v = args[:3] if name == "forward" else args[2:5]
        ring, text = args[-2:] if name == "forward" else args[-3:-1]
        pairs = AttentionSpec.deserialize(text, get_ring(ring).rank).pairs(q.shape[0])
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = func(*args, **(kwargs or {}))
        end.record()
        self._calls.append(_Timed(name, begin, end, pairs, (q.shape[2:], k.shape[2:], v.shape[2:]), q.dtype))
        return result

    def exposed_ms(self) -> float | None:
        """Return and reset the exposed communication in milliseconds; None when no operator ran."""
        calls, self._calls = self._calls, []
        if not any(one.pairs for one in calls):
            return None
        if not self._ms_per_pair:
            forwards = [one for one in calls if one.name == "forward" and one.pairs]
            average = sum(one.pairs for one in forwards) // len(forwards)
            self._ms_per_pair = _ms_per_pair(forwards[0].widths, forwards[0].dtype, average, self._group)
        torch.cuda.synchronize()
        return sum(one.begin.elapsed_time(one.end) - one.pairs * self._ms_per_pair[one.name] for one in calls)


@dataclass(frozen=True)
class _Timed:
    """One call of an operator: its visible pairs, and heads and head dim of q, k and v."""

    name: str
    begin: torch.cuda.Event
    end: torch.cuda.Event
    pairs: int
    widths: tuple[Sequence[int], ...]
    dtype: torch.dtype


def _ms_per_pair(widths: tuple[Sequence[int], ...], dtype: torch.dtype, pairs: int, group: Any) -> dict[str, float]:
    """Measure the forward and backward time per visible pair in a causal call on one rank: the minimum of several."""
    n = max(16, math.isqrt(2 * pairs))
    sharding = ringattn.Ring(group).sharding(n)
    device = torch.device("cuda", torch.cuda.current_device())
    q, k, v = (torch.randn(1, n, *width, device=device, dtype=dtype, requires_grad=True) for width in widths)
    fastest = {"forward": math.inf, "backward": math.inf}
    for _ in range(5):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        events[0].record()
        o = ringattn.ring_attention(q, k, v, sharding, causal=True)
        events[1].record()
        gradient = torch.ones_like(o)
        events[2].record()
        torch.autograd.grad(o, (q, k, v), gradient)
        events[3].record()
        torch.cuda.synchronize()
        for name, begin, end in (("forward", *events[:2]), ("backward", *events[2:])):
            fastest[name] = min(fastest[name], begin.elapsed_time(end))
    return {name: ms / (n * (n + 1) / 2) for name, ms in fastest.items()}


class MetricsLog:
    """The rows of `log.jsonl`, each with a "step": losses of training ("loss") and of validation ("validation_loss").

    Args:
        step: Rows of later steps are dropped, because the run repeats them.
    """

    def __init__(self, folder: Path, step: int, writes: bool) -> None:
        self.path, self.writes = folder / "log.jsonl", writes
        self.rows: list[dict[str, Any]] = []
        if not writes:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if step and self.path.exists():
            self.rows = [row for row in read_rows(self.path) if row["step"] <= step]
        part = self.path.with_suffix(".part")
        part.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        part.replace(self.path)

    def add(self, **row: Any) -> None:
        """Append one row and write it to the file."""
        self.rows.append(row)
        if self.writes:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def flush(self) -> None:
        """Sync the rows to disk."""
        if self.writes and self.rows:
            with self.path.open("a") as file:
                os.fsync(file.fileno())


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a log, without a truncated last line."""
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def summarise(rows: Sequence[dict[str, Any]], start: int = 0) -> dict[str, Any]:
    """Summarise the steps of a run.

    Tokens/s, seconds and MFU are medians of the steps after `start`, the last restart, without the first two, which compile
    kernels and allocate buffers; exposed communication, of all these steps; peak memory is by rank.
    """
    steps = [row for row in rows if "loss" in row]
    made = [row for row in steps if row["step"] > start]
    counted = made[2:] or made

    def median(rows: Sequence[dict[str, Any]], name: str) -> float | None:
        values = [row[name] for row in rows if row[name] is not None]
        return statistics.median(values) if values else None

    return {
        "steps": steps[-1]["step"],
        "losses": [row["loss"] for row in steps],
        "grad_norms": [row["grad_norm"] for row in steps],
        "steps_s": [row["step_s"] for row in steps],
        **{name: median(counted, name) for name in ("tokens_per_s", "step_s", "mfu")},
        "exposed_ms": median(made, "exposed_ms"),
        "peak_memory_mib": [max(column) for column in zip(*(row["peak_memory_mib"] for row in made), strict=True)],
    }


def plot_losses(rows: list[dict[str, Any]], path: Path, title: str, unit: str = "byte") -> None:
    """Plot training and validation loss over steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    training = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    validation = [(row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row]
    if training:
        axes.plot(*zip(*training, strict=True), color="tab:blue", linewidth=0.8, label="training")
    if validation:
        axes.plot(*zip(*validation, strict=True), color="tab:orange", marker="o", markersize=3, label="validation")
    axes.set(xlabel="step", ylabel=f"loss (nats per {unit})", title=title)
    axes.grid(alpha=0.3)
    if training or validation:
        axes.legend()
    part = path.with_name(f".{path.name}")
    figure.savefig(part, dpi=120, format=path.suffix[1:])
    part.replace(path)
