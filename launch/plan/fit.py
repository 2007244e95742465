"""Fits a profile to rows of `bench kernels` and `bench ring`: for `doctor --profile`, and the committed ones (docs/profiles.py)."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ringattn.launch.bench.workloads import Problem, mask_of
from ringattn.sizing.attention_launch import Heads, measure_programs
from ringattn.sizing.profile import KernelCost, Profile
from ringattn.sizing.ring_time import SCHEDULES, RingCall, attention_time, gathered

Row = dict[str, Any]
WAYS = ("forward", "backward")
LONG_TOKENS = 8192  # tokens per rank from which on a call of a ring is bound by the device
NCCL_GBPS = (2, 3, 4, 6, 8, 10, 12, 16, 20, 25, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120, 140, 170, 200, 250, 300, 400)
"""Rates among which that of NCCL's messages is the one that explains times of rings best, 10^9 bytes per second."""
LONG_MS = 20.0  # kernels that run longer are slowed by the clock, which falls
ROW_SCHEDULES = dict.fromkeys(("auto", "fused", "fused_saved_kv", "fused_kv_buffer"), "fused")
ROW_SCHEDULES |= {"stepwise": "stepwise", "nccl": "process_group", "process_group": "process_group"}
"""Schedules by the names of rows."""


def ring_call(row: Row, world_size: int, schedule: str = "fused") -> RingCall:
    """Return the call that a row measured."""
    names = ("mask", "seq_len", "batch", "heads", "kv_heads", "head_dim", "dtype", "window", "document")
    problem = Problem(**{name: row[name] for name in names})
    heads = Heads(problem.batch, problem.heads, problem.kv_heads, problem.head_dim)
    saved = row.get("who") == "fused_saved_kv"
    layout = row.get("layout", "zigzag")
    return RingCall(mask_of(problem), world_size, heads, layout=layout, schedule=schedule, saved=saved)


def kernel_costs(rows: Sequence[Row], profile: Profile) -> Profile:
    """Return a profile whose kernels are fitted to rows of `bench kernels`: least squares of relative errors, none negative."""
    found: dict[str, dict[int, KernelCost]] = {way: dict(getattr(profile, way)) for way in WAYS}
    for way in WAYS:
        for d in sorted({row["head_dim"] for row in rows}):
            chosen = [row for row in rows if row["direction"] == way and row["head_dim"] == d and row["ms"] < LONG_MS]
            if not chosen:
                continue
            lines = [programs(row, profile) for row in chosen]
            counts = torch.tensor([line[0] for line in lines], dtype=torch.float64)
            times = [row["ms"] * 1e3 for row in chosen]
            # what is outside of programs is measured by itself, and on a busy host may come out above short kernels
            others = [min(line[1], time / 2) for line, time in zip(lines, times, strict=True)]
            us = torch.tensor(times, dtype=torch.float64) - torch.tensor(others, dtype=torch.float64)
            found[way][d] = _least_squares(counts, us)
    return replace(profile, forward=found["forward"], backward=found["backward"])


def programs(row: Row, profile: Profile) -> tuple[tuple[float, float], float]:
    """Return blocks and tiles of the most loaded program of a row, and its other microseconds."""
    call = ring_call(row, 1)
    return measure_programs(*gathered(call, 0), call.heads, profile, row["direction"])


def _least_squares(counts: torch.Tensor, us: torch.Tensor) -> KernelCost:
    """Return the cost with the least relative errors; of blocks alone where a tile would take less than nothing."""
    for columns in ([0, 1], [0]):
        ones = torch.ones(len(us), 1, dtype=torch.float64)
        solution = torch.linalg.lstsq(counts[:, columns] / us[:, None], ones).solution
        if bool((solution >= 0).all()):
            return KernelCost(*(round(us, 4) for us in (*solution[:, 0].tolist(), 0.0)[:2]))
    raise ValueError("kernel rows must fit some cost, got none; measure them again")


def ring_costs(rows: Sequence[Row], profile: Profile) -> Profile:
    """Return a profile whose links, slowdowns, semaphores and host times are fitted to the schedules in rows of `bench ring`."""
    least = min(row["tokens_per_rank"] for row in rows)
    groups = {name: [row for row in rows if ROW_SCHEDULES[row["who"]] == name] for name in SCHEDULES}
    short = {name: [row for row in groups[name] if row["tokens_per_rank"] == least] for name in SCHEDULES}
    host_us = dict(profile.host_us)
    for schedule, way in itertools.product(SCHEDULES, WAYS):
        if short[schedule]:
            host_us |= _host_us(short[schedule], schedule, way)
    names = {f"{schedule}_{way}": schedule for schedule, way in itertools.product(SCHEDULES, WAYS)}
    slowdown = {name: 1.0 if groups[x] else profile.slowdown.get(name, 1.0) for name, x in names.items()}
    profile = replace(profile, slowdown=dict(slowdown), host_us=host_us)
    graphs = [x for x in groups["process_group"] if x["tokens_per_rank"] >= 2048 and x.get("forward_graph_ms")]
    if graphs:
        rated = [replace(profile, nccl=replace(profile.nccl, gbps=rate)) for rate in NCCL_GBPS]
        profile = min(rated, key=lambda one: _median_error(graphs, one))
    for schedule, way in itertools.product(SCHEDULES, WAYS):
        long = [row for row in groups[schedule] if row["tokens_per_rank"] >= LONG_TOKENS]
        if long:
            ratio = statistics.median(_measured_ms(row, way) / _way_ms(row, profile, way) for row in long)
            slowdown[f"{schedule}_{way}"] = round(max(1.0, ratio), 4)
    profile = replace(profile, slowdown=slowdown)
    return replace(profile, semaphores_us=_semaphores_us(short["fused"], profile))


def _host_us(rows: Sequence[Row], schedule: str, way: str) -> dict[str, float]:
    """Return the host's microseconds of a call and of each peer, from calls that it bounds.

    A fused call is launched as one CUDA graph, for any number of peers. The other schedules enqueue each ring step.
    """
    name, fused = f"{schedule}_{way}", schedule == "fused"
    us = statistics.median(1e3 * _measured_ms(row, way) / (1 if fused else row["world_size"] - 1) for row in rows)
    return {name: round(us, 1) if fused else 0.0, f"{name}_peer": 0.0 if fused else round(us, 1)}


def _semaphores_us(rows: Sequence[Row], profile: Profile) -> dict[str, float]:
    """Return the microseconds of a fused call's semaphores: CUDA graphs of rows, in which the host takes no part, less the rest."""
    graphs = [row for row in rows if row.get("forward_graph_ms") and row.get("both_graph_ms")]
    found = dict(profile.semaphores_us)
    without = replace(profile, semaphores_us={"turn": found["turn"]})
    for way in WAYS if graphs else ():
        us = (1e3 * (_measured_ms(row, way, "graph_ms") - _way_ms(row, without, way)) for row in graphs)
        found[f"fused_{way}"] = max(0.0, round(statistics.median(us), 1))
    return found


def _way_ms(row: Row, profile: Profile, way: str) -> float:
    return attention_time(ring_call(row, row["world_size"], ROW_SCHEDULES[row["who"]]), profile, way).device_ms


def _median_error(rows: Sequence[Row], profile: Profile) -> float:
    return statistics.median(abs(row["forward_graph_ms"] / _way_ms(row, profile, "forward") - 1) for row in rows)


def _measured_ms(row: Row, way: str, kind: str = "ms") -> float:
    """Return the milliseconds of a direction of a row, of plain calls or of CUDA graphs ("graph_ms")."""
    forward: float = row[f"forward_{kind}"]
    return forward if way == "forward" else row[f"both_{kind}"] - forward
