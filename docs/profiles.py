"""Writes the committed profiles of the planner: H200 and H100 from docs/results, the rest scaled by datasheets.

python docs/profiles.py
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ringattn.launch.plan.fit import LONG_MS, WAYS, Row, kernel_costs, programs, ring_costs
from ringattn.sizing.profile import PROFILES, KernelCost, Link, Profile, write_profile
from ringattn.sizing.shapes import ModelShape
from ringattn.sizing.step import token_ms

RESULTS = Path(__file__).parent / "results"
KERNELS = ("kernels.json", "kernels-lengths.json")
H200_RINGS, H100_RINGS = ("ring2-peers.json",), ("short2.json", "short4.json", "ring4.json")
"""Rings of two H200, and of two and four H100, of which calls of 1,024 tokens per GPU and with 32 KV heads are fitted."""
H100_TOKENS = "inference4.json"
"""Tokens decoded on four H100, of which the one of the shortest context is fitted."""
H100_FILE, H100_GROUPS = "fa4-h100.json", ("target", "batch")
"""Rows that the kernels of the profile of H100 are fitted to: whole and causal masks."""


def sustained(rows: Sequence[Row], profile: Profile) -> Profile:
    """Return a profile whose factor of long kernels is fitted."""
    factors = []
    for row in rows:
        if row["ms"] < 4 * LONG_MS:
            continue
        counts, other = programs(row, profile)
        cost = getattr(profile, row["direction"])[row["head_dim"]]
        us = counts[0] * cost.block + counts[1] * cost.tile + other
        factors.append(row["ms"] * 1e3 / us)
    return replace(profile, sustained=round(max(1.0, statistics.median(factors) * 1.02), 4))


def datasheet_h200() -> Profile:
    """Return the numbers of an H200 that are not fitted: the datasheet, and rates measured for docs/transport.md."""
    ones = {d: KernelCost(1.0, 1.0) for d in (64, 128, 256)}
    return Profile(
        name="H200",
        peak_tflops=989.0,
        memory_gib=139.8,
        multiprocessors=132,
        forward=ones,
        backward=ones,
        launch_us=4.0,
        sustained=1.0,
        sustained_ms=50.0,
        matmul_tflops=650.0,
        matmul_sustained_tflops=600.0,
        memory_gbps=4300.0,
        copy_engine=Link(318.0, 6.0),
        nccl=Link(100.0, 25.0),
        collective_gbps=330.0,
        network=Link(48.0, 12.0),
        semaphores_us={"turn": 9.0},
        # of two GPUs; requests by inference2-tokens.json
        host_us={"decode_layer": 39.2, "decode_reduce": 13.0, "decode_request": 0.8},
        fitted_from=(
            "kernels.json",
            "kernels-lengths.json",
            f"{', '.join(H200_RINGS)}: 1024 tokens, 32 KV heads",
            "model2-128k.json",
        ),
        assumed=(
            "schedules that are not fused: host, slowdowns and NCCL's rate of four H100",
            "copy_engine: 318 GB/s per push between four GPUs (docs/transport.md)",
            "semaphores_us: a turn costs 15 us beyond its bytes, with the latency of a push (docs/kernel_notes.md)",
            "network: 400 Gb/s per GPU by its datasheet, 48 GB/s of it for messages",
        ),
    )


def read(folder: Path, *names: str) -> list[Row]:
    """Return the rows of some files."""
    return [row for name in names for row in json.loads((folder / name).read_text())["rows"]]


def fit_rings(folder: Path, names: Sequence[str], profile: Profile) -> Profile:
    """Return a profile whose rings are fitted to rows of files: the shortest for the host, 32 KV heads for the rest."""
    rows = [row for row in read(folder, *names) if row.get("ours")]
    return ring_costs([row for row in rows if row["tokens_per_rank"] == 1024 or row["kv_heads"] == 32], profile)


def reduce_us(rows: Sequence[Row], profile: Profile) -> float:
    """Return the microseconds of the exchange of a decoded layer: those of the shortest context of one request."""
    tokens = [row for row in rows if row["part"] == "token" and row["how"] == "graph" and row["batch"] == 1]
    row = min(tokens, key=lambda row: row["seq_len"])
    names = ("dim", "layers", "heads", "kv_heads", "head_dim", "mlp_dim", "vocab_size")
    shape = ModelShape("bench", *(row[name] for name in names))
    ms = token_ms(shape, row["seq_len"], 1, row["world_size"], profile)
    return round(profile.host_us["decode_reduce"] + (row["ms_per_token"] - ms) * 1e3 / shape.layers, 1)


def h100_rows(folder: Path) -> list[Row]:
    """Return the rows of the Hopper kernels on one H100."""
    return [row for row in read(folder, H100_FILE) if row["who"] == "hopper" and "ms" in row]


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


def scaled(
    base: Profile, name: str, peak: float, multiprocessors: int, memory: float, assumed: tuple[str, ...]
) -> Profile:
    """Return a profile of a GPU of another peak (TFLOP/s) and `memory` times the bandwidth, that runs the portable kernels."""
    faster, factors = peak / base.peak_tflops, portable_factors(read(RESULTS, *KERNELS))

    def costs(way: str) -> dict[int, KernelCost]:
        longer = factors[way] / faster * multiprocessors / base.multiprocessors
        found: dict[int, KernelCost] = getattr(base, way)
        return {d: KernelCost(*(round(x * longer, 4) for x in vars(cost).values())) for d, cost in found.items()}

    return replace(
        base,
        name=name,
        peak_tflops=peak,
        multiprocessors=multiprocessors,
        forward=costs("forward"),
        backward=costs("backward"),
        matmul_tflops=round(base.matmul_tflops * faster, 1),
        matmul_sustained_tflops=round(base.matmul_sustained_tflops * faster, 1),
        memory_gbps=round(base.memory_gbps * memory, 1),
        schedule="stepwise",
        fitted_from=(),
        assumed=(
            *assumed,
            "attention by the portable kernels at their share of the peak of an H200; auto takes those of torch first",
        ),
    )


def profiles() -> dict[str, Profile]:
    """Return the committed profiles by name."""
    kernels = [row for row in read(RESULTS, *KERNELS) if row["who"] == "hopper" and row["level"] == "op"]
    h200 = sustained(kernels, kernel_costs(kernels, datasheet_h200()))
    # datasheets of NVIDIA: H100 SXM 3.35 TB/s and 80 GB beside 4.8 TB/s and 141 GB, with the same multiprocessors and clocks
    h100 = replace(
        h200,
        name="H100",
        memory_gib=79.1,
        memory_gbps=round(h200.memory_gbps * 3.35 / 4.8, 1),
        fitted_from=(
            f"{H100_FILE}: {', '.join(H100_GROUPS)}",
            f"{', '.join(H100_RINGS)}: 1024 tokens, 32 KV heads",
            f"{H100_TOKENS}: a token of 32768 tokens",
        ),
        assumed=(
            "links, matrix products: those of an H200, which has the same multiprocessors and NVLink",
            "memory: 3.35 TB/s and 80 GB by the datasheet of the SXM module",
        ),
    )
    whole = [row for row in h100_rows(RESULTS) if row["group"] in H100_GROUPS]
    h100 = fit_rings(RESULTS, H100_RINGS, kernel_costs(whole, h100))
    rings = {name: getattr(h100, name) for name in ("host_us", "slowdown", "nccl")}
    h100 = replace(h100, host_us={**h100.host_us, "decode_reduce": reduce_us(read(RESULTS, H100_TOKENS), h100)})
    h200 = fit_rings(RESULTS, H200_RINGS, replace(h200, **rings))
    # A100 SXM: 312 TFLOP/s, 108 multiprocessors, 2.04 TB/s, NVLink of 600 GB/s in both directions, 80 GB
    a100 = replace(
        scaled(
            h200,
            "A100",
            312.0,
            108,
            2.04 / 4.8,
            (
                "not measured: an H200 scaled by 312 TFLOP/s, 108 multiprocessors, 2.04 TB/s and 600 GB/s of NVLink (datasheet)",
            ),
        ),
        memory_gib=79.1,
        copy_engine=Link(212.0, 6.0),
        collective_gbps=220.0,
        network=Link(24.0, 12.0),
    )
    # B200: 2,250 TFLOP/s, 148 multiprocessors, 8 TB/s, NVLink of 1.8 TB/s in both directions, 180 GB usable
    b200 = replace(
        scaled(
            h200,
            "B200",
            2250.0,
            148,
            8 / 4.8,
            (
                "not measured: an H200 scaled by 2,250 TFLOP/s, 148 multiprocessors, 8 TB/s and 1.8 TB/s of NVLink (datasheet)",
            ),
        ),
        memory_gib=178.0,
        copy_engine=Link(636.0, 6.0),
        collective_gbps=660.0,
    )
    return {"h200": h200, "h100": h100, "a100": a100, "b200": b200}


def main() -> None:
    """Write all profiles."""
    for name, profile in profiles().items():
        write_profile(profile, PROFILES / f"{name}.json")


if __name__ == "__main__":
    main()
