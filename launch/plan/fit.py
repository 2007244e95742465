"""Fits a profile to rows of `bench kernels`, `bench ring` and `bench model`; the committed profiles are made by this.

`docs/profiles.py` writes the committed profiles from docs/results with it, and `doctor --profile` one of the user's machine.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ringattn.launch.bench.workloads import mask_of
from ringattn.launch.plan.committed_rows import SCHEDULES, problem_of, ring_call
from ringattn.planning.attention_launch import Heads, measure_programs
from ringattn.planning.profile import KernelCost, Link, Profile
from ringattn.planning.ring_time import RingCall, attention_time, gathered

Row = dict[str, Any]
WAYS = ("forward", "backward")
LAUNCH_US = 4.0
"""A kernel launch in a CUDA graph, with its neighbours' prologue."""
LONG_TOKENS = 8192
"""Tokens per rank from which on a call of a ring is bound by the device."""
NCCL_GBPS = (2, 3, 4, 6, 8, 10, 12, 16, 20, 25, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120, 140, 170, 200, 250, 300, 400)
"""Rates among which that of NCCL's messages is the one that explains times of rings best, 10^9 bytes per second."""
LONG_MS = 20.0
"""Kernels that run longer are slowed by the clock, which falls."""
FITTED = (
    "kernels.json",
    "kernels-lengths.json",
    "ring2.json: 1024 tokens or 32 KV heads",
    "ring4.json: 1024 tokens or 32 KV heads",
    "model2-128k.json",
)
"""Rows that the committed profile of H200 is fitted to."""
H100_FILE, H100_GROUPS = "fa4-h100.json", ("target", "batch")
"""Rows that the kernels of the committed profile of H100 are fitted to: whole and causal masks."""


def kernel_costs(rows: Sequence[Row], profile: Profile) -> Profile:
    """Return a profile whose kernels are fitted to rows of `bench kernels`: least squares of relative errors, none negative."""
    found: dict[str, dict[int, KernelCost]] = {way: dict(getattr(profile, way)) for way in WAYS}
    for way in WAYS:
        for d in sorted({row["head_dim"] for row in rows}):
            chosen = [row for row in rows if row["direction"] == way and row["head_dim"] == d and row["ms"] < LONG_MS]
            if not chosen:
                continue
            lines = [_programs(row, profile) for row in chosen]
            counts = torch.tensor([line[0] for line in lines], dtype=torch.float64)
            times = [row["ms"] * 1e3 for row in chosen]
            # what is outside of programs is measured by itself, and on a busy host may come out above short kernels
            others = [min(line[1], time / 2) for line, time in zip(lines, times, strict=True)]
            us = torch.tensor(times, dtype=torch.float64) - torch.tensor(others, dtype=torch.float64)
            found[way][d] = _least_squares(counts, us)
    return replace(profile, forward=found["forward"], backward=found["backward"])


def _programs(row: Row, profile: Profile) -> tuple[tuple[float, float, float], float]:
    """Return blocks, tiles and masked blocks of the most loaded program of a row, and its other microseconds."""
    problem = problem_of(row)
    heads = Heads(problem.batch, problem.heads, problem.kv_heads, problem.head_dim)
    rows, keys = gathered(RingCall(mask_of(problem), 1, heads), 0)
    return measure_programs(rows, keys, heads, profile, row["direction"])


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


def sustained(rows: Sequence[Row], profile: Profile) -> Profile:
    """Return a profile whose factor of long kernels is fitted."""
    factors = []
    for row in rows:
        if row["ms"] < 4 * LONG_MS:
            continue
        counts, other = _programs(row, profile)
        cost = getattr(profile, row["direction"])[row["head_dim"]]
        us = counts[0] * cost.block + counts[1] * cost.tile + counts[2] * cost.masked + other
        factors.append(row["ms"] * 1e3 / us)
    if not factors:
        return profile
    return replace(profile, sustained=round(max(1.0, statistics.median(factors) * 1.02), 4))


def ring_costs(rows: Sequence[Row], profile: Profile) -> Profile:
    """Return a profile whose links, slowdowns and host times are fitted to rows of `bench ring`."""
    slowdown = {f"{schedule}_{way}": 1.0 for schedule in ("fused", "stepwise", "process_group") for way in WAYS}
    profile = replace(profile, slowdown=slowdown, host_us={**profile.host_us, **_host(rows)})
    groups = [row for row in rows if SCHEDULES[row["who"]] == "process_group" and row["tokens_per_rank"] >= 2048]
    if groups:
        errors = {
            rate: statistics.median(abs(x - 1) for x in _ratios(groups, _with_nccl(profile, rate)))
            for rate in NCCL_GBPS
        }
        profile = _with_nccl(profile, min(errors, key=lambda rate: errors[rate]))
    found = dict(slowdown)
    for schedule in ("fused", "stepwise", "process_group"):
        chosen = [row for row in rows if SCHEDULES[row["who"]] == schedule and row["tokens_per_rank"] >= LONG_TOKENS]
        if not chosen:
            continue
        for way in WAYS:
            ratio = statistics.median(_way_ratio(row, profile, way) for row in chosen)
            found[f"{schedule}_{way}"] = round(max(1.0, ratio), 4)
    return replace(profile, slowdown=found)


def _with_nccl(profile: Profile, rate: float) -> Profile:
    return replace(profile, nccl=replace(profile.nccl, gbps=rate))


def _times(row: Row, profile: Profile) -> tuple[float, float]:
    call = ring_call(row, row["world_size"], SCHEDULES[row["who"]])
    forward, backward = (attention_time(call, profile, way).device_ms for way in WAYS)
    return forward, backward


def _ratios(rows: Iterable[Row], profile: Profile) -> list[float]:
    """Return measured over predicted times of CUDA graphs, in which the host takes no part."""
    return [row["forward_graph_ms"] / _times(row, profile)[0] for row in rows if row.get("forward_graph_ms")]


def _way_ratio(row: Row, profile: Profile, way: str) -> float:
    forward, backward = _times(row, profile)
    if way == "forward":
        return row["forward_ms"] / forward
    return (row["both_ms"] - row["forward_ms"]) / backward


def _host(rows: Sequence[Row]) -> dict[str, float]:
    """Return host times of calls by schedule: a fixed part, and one per peer, from the shortest calls of rings of both sizes."""
    found: dict[str, float] = {}
    least = min(row["tokens_per_rank"] for row in rows)
    for schedule in ("fused", "stepwise", "process_group"):
        for way in WAYS:
            by_size: dict[int, list[float]] = {}
            for row in rows:
                if SCHEDULES[row["who"]] == schedule and row["tokens_per_rank"] == least:
                    ms = row["forward_ms"] if way == "forward" else row["both_ms"] - row["forward_ms"]
                    by_size.setdefault(row["world_size"], []).append(1e3 * ms)
            medians = {size: statistics.median(values) for size, values in by_size.items()}
            name = f"{schedule}_{way}"
            if len(medians) > 1:
                small, large = min(medians), max(medians)
                peer = max(0.0, (medians[large] - medians[small]) / (large - small))
                found[name], found[f"{name}_peer"] = medians[large] - peer * (large - 1), peer
            elif medians:
                ((size, value),) = medians.items()
                found[name], found[f"{name}_peer"] = 0.0, value / (size - 1)
    return {name: round(value, 1) for name, value in found.items()}


def _start() -> Profile:
    """Return the numbers of an H200 that are not fitted: the datasheet, and rates measured for docs/transport.md."""
    ones = {d: KernelCost(1.0, 1.0) for d in (64, 128, 256)}
    return Profile(
        name="H200",
        peak_tflops=989.0,
        memory_gib=139.8,
        multiprocessors=132,
        forward=ones,
        backward=ones,
        launch_us=LAUNCH_US,
        sustained=1.0,
        sustained_ms=50.0,
        matmul_tflops=650.0,
        matmul_sustained_tflops=600.0,
        memory_gbps=4300.0,
        copy_engine=Link(318.0, 6.0),
        nccl=Link(100.0, 25.0),
        collective_gbps=330.0,
        network=Link(48.0, 12.0),
        host_us={"decode_layer": 40.0, "decode_reduce": 13.0},
        fitted_from=FITTED,
        assumed=(
            "copy_engine: 318 GB/s per push between four GPUs (docs/transport.md)",
            "network: 400 Gb/s per GPU by its datasheet, 48 GB/s of it for messages",
        ),
    )


def read(folder: Path, *names: str) -> list[Row]:
    """Return the rows of some files."""
    return [row for name in names for row in json.loads((folder / name).read_text())["rows"]]


def fit_h200(folder: Path) -> Profile:
    """Return the profile of an H200 from the committed rows."""
    all_kernels = read(folder, "kernels.json", "kernels-lengths.json")
    kernels = [row for row in all_kernels if row["who"] == "hopper" and row["level"] == "op"]
    rings = [row for row in read(folder, "ring2.json", "ring4.json") if row.get("ours") and is_fitted(row)]
    profile = kernel_costs(kernels, _start())
    profile = sustained(kernels, profile)
    profile = replace(profile, portable=portable_factors(all_kernels))
    return ring_costs(rings, profile)


def fit_h100(folder: Path, profile: Profile) -> Profile:
    """Return a profile with the memory of an H100 whose kernels are fitted to the committed rows of one."""
    return kernel_costs([row for row in h100_rows(folder) if row["group"] in H100_GROUPS], profile)


def h100_rows(folder: Path) -> list[Row]:
    """Return the rows of the Hopper kernels on one H100."""
    return [row for row in read(folder, H100_FILE) if row["who"] == "hopper" and "ms" in row]


def is_fitted(row: Row) -> bool:
    """Return whether the committed profile is fitted to a row of a ring: shortest calls for the host, 32 KV heads for the rest."""
    return row["tokens_per_rank"] == 1024 or row["kv_heads"] == 32


def portable_factors(rows: Sequence[Row]) -> dict[str, float]:
    """Return the time of the portable kernels over that of the Hopper kernels by direction: the median of long kernels."""
    names = ("direction", "mask", "seq_len", "batch", "heads", "kv_heads", "head_dim")
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    times = {
        (row["who"], *(row[name] for name in names)): row["ms"]
        for row in rows
        if row.get("level") == "op" and "ms" in row
    }
    for (who, way, *problem), ms in times.items():
        other = times.get(("hopper", way, *problem))
        if who == "portable" and other is not None and other > LONG_MS:
            found[way].append(ms / other)
    return {way: round(statistics.median(ratios), 4) for way, ratios in found.items()}
