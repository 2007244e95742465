"""Fits a profile to rows of `bench kernels` and `bench ring`: for `doctor --profile`, and the committed ones (docs/profiles.py)."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ringattn.launch.bench.workloads import Problem, mask_of
from ringattn.planning.attention_launch import Heads, measure_programs
from ringattn.planning.profile import KernelCost, Profile
from ringattn.planning.ring_time import SCHEDULES, RingCall, attention_time, gathered

Row = dict[str, Any]
WAYS = ("forward", "backward")
LONG_TOKENS = 8192
"""Tokens per rank from which on a call of a ring is bound by the device."""
NCCL_GBPS = (2, 3, 4, 6, 8, 10, 12, 16, 20, 25, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120, 140, 170, 200, 250, 300, 400)
"""Rates among which that of NCCL's messages is the one that explains times of rings best, 10^9 bytes per second."""
LONG_MS = 20.0
"""Kernels that run longer are slowed by the clock, which falls."""
ROW_SCHEDULES = {
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


def ring_call(row: Row, world_size: int, schedule: str = "fused") -> RingCall:
    """Return the call that a row measured."""
    names = ("mask", "seq_len", "batch", "heads", "kv_heads", "head_dim", "dtype", "window", "document")
    problem = Problem(**{name: row[name] for name in names})
    heads = Heads(problem.batch, problem.heads, problem.kv_heads, problem.head_dim)
    saved = row.get("who") in ("fused_saved_kv", "kept")
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


def programs(row: Row, profile: Profile) -> tuple[tuple[float, float, float], float]:
    """Return blocks, tiles and masked blocks of the most loaded program of a row, and its other microseconds."""
    call = ring_call(row, 1)
    return measure_programs(*gathered(call, 0), call.heads, profile, row["direction"])


def _least_squares(counts: torch.Tensor, us: torch.Tensor) -> KernelCost:
    """Return the cost with the least relative errors, over subsets of columns until none is negative."""
    for columns in ([0, 1, 2], [0, 1], [0, 2], [0]):
        solution = torch.linalg.lstsq(
            counts[:, columns] / us[:, None], torch.ones(len(us), 1, dtype=torch.float64)
        ).solution
        if bool((solution >= 0).all()):
            cost = dict(zip(columns, solution[:, 0].tolist(), strict=True))
            return KernelCost(*(round(cost.get(column, 0.0), 4) for column in range(3)))
    raise ValueError("kernel rows must fit some cost, got none; measure them again")


def ring_costs(rows: Sequence[Row], profile: Profile) -> Profile:
    """Return a profile whose links, slowdowns and host times are fitted to rows of `bench ring`."""
    slowdown = {f"{schedule}_{way}": 1.0 for schedule in SCHEDULES for way in WAYS}
    least = min(row["tokens_per_rank"] for row in rows)
    groups = {name: [row for row in rows if ROW_SCHEDULES[row["who"]] == name] for name in SCHEDULES}
    host_us = dict(profile.host_us)
    for schedule, way in itertools.product(SCHEDULES, WAYS):
        short = [row for row in groups[schedule] if row["tokens_per_rank"] == least]
        if short:
            host_us |= _host(f"{schedule}_{way}", [(row["world_size"], 1e3 * _measured_ms(row, way)) for row in short])
    profile = replace(profile, slowdown=dict(slowdown), host_us=host_us)
    # times of CUDA graphs, in which the host takes no part
    graphs = [x for x in groups["process_group"] if x["tokens_per_rank"] >= 2048 and x.get("forward_graph_ms")]
    if graphs:
        rated = [replace(profile, nccl=replace(profile.nccl, gbps=rate)) for rate in NCCL_GBPS]
        profile = min(rated, key=lambda one: _forward_error(graphs, one))
    for schedule, way in itertools.product(SCHEDULES, WAYS):
        long = [row for row in groups[schedule] if row["tokens_per_rank"] >= LONG_TOKENS]
        if long:
            ratio = statistics.median(_measured_ms(row, way) / _way_ms(row, profile, way) for row in long)
            slowdown[f"{schedule}_{way}"] = round(max(1.0, ratio), 4)
    return replace(profile, slowdown=slowdown)


def _way_ms(row: Row, profile: Profile, way: str) -> float:
    return attention_time(ring_call(row, row["world_size"], ROW_SCHEDULES[row["who"]]), profile, way).device_ms


def _forward_error(rows: Sequence[Row], profile: Profile) -> float:
    """Return the median error of the forwards of rows in CUDA graphs."""
    return statistics.median(abs(row["forward_graph_ms"] / _way_ms(row, profile, "forward") - 1) for row in rows)


def _measured_ms(row: Row, way: str) -> float:
    return row["forward_ms"] if way == "forward" else row["both_ms"] - row["forward_ms"]


def _host(name: str, times: Sequence[tuple[int, float]]) -> dict[str, float]:
    """Return the host's microseconds per call and per peer, from times of rings of one size or of two."""
    sizes = sorted({size for size, _ in times})
    small, large = (statistics.median(us for size, us in times if size == one) for one in (sizes[0], sizes[-1]))
    peers = sizes[-1] - 1
    peer = max(0.0, large - small) / (sizes[-1] - sizes[0]) if len(sizes) > 1 else large / peers
    return {name: max(0.0, round(large - peer * peers, 1)), f"{name}_peer": round(peer, 1)}
