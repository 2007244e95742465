"""Writes the committed profiles of the planner: H200, and kernels of H100, from docs/results; the rest scaled by datasheets.

python docs/profiles.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ringattn.launch.plan.fit import H100_FILE, H100_GROUPS, fit_h100, fit_h200
from ringattn.planning.profile import PROFILES, KernelCost, Link, Profile, write_profile

RESULTS = Path(__file__).parent / "results"


def scaled(base: Profile, name: str, *, compute: float, memory: float, assumed: tuple[str, ...]) -> Profile:
    """Return a profile whose kernels take `compute` times as long, and whose memory has `memory` times the bandwidth."""

    def costs(way: str) -> dict[int, KernelCost]:
        found: dict[int, KernelCost] = getattr(base, way)
        return {
            d: KernelCost(round(x.block * compute, 4), round(x.tile * compute, 4), round(x.masked * compute, 4))
            for d, x in found.items()
        }

    return replace(
        base,
        name=name,
        forward=costs("forward"),
        backward=costs("backward"),
        matmul_tflops=round(base.matmul_tflops / compute, 1),
        matmul_sustained_tflops=round(base.matmul_sustained_tflops / compute, 1),
        memory_gbps=round(base.memory_gbps * memory, 1),
        fitted_from=(),
        assumed=assumed,
    )


def profiles() -> dict[str, Profile]:
    """Return the committed profiles by name."""
    h200 = fit_h200(RESULTS)
    # datasheets of NVIDIA: H100 SXM 3.35 TB/s and 80 GB beside 4.8 TB/s and 141 GB, with the same multiprocessors and clocks
    h100 = scaled(
        h200,
        "H100",
        compute=1.0,
        memory=3.35 / 4.8,
        assumed=(
            "links, host, matrix products and slowdowns: those of an H200, which has the same multiprocessors and NVLink",
            "memory: 3.35 TB/s and 80 GB by the datasheet of the SXM module",
        ),
    )
    h100 = fit_h100(RESULTS, h100)
    h100 = replace(h100, memory_gib=79.1, fitted_from=(f"{H100_FILE}: {', '.join(H100_GROUPS)}",))
    # A100 SXM: 312 TFLOP/s, 108 multiprocessors, 2.04 TB/s, NVLink of 600 GB/s in both directions, 80 GB
    a100 = scaled(
        h200,
        "A100",
        compute=989 / 312 * 108 / 132,
        memory=2.04 / 4.8,
        assumed=(
            "not measured: an H200 scaled by 312 TFLOP/s, 108 multiprocessors, 2.04 TB/s and 600 GB/s of NVLink (datasheet)",
            "attention by the portable kernels at their share of the peak of an H200; auto takes those of torch first",
        ),
    )
    a100 = replace(
        a100,
        peak_tflops=312.0,
        memory_gib=79.1,
        multiprocessors=108,
        matmul_tflops=round(h200.matmul_tflops * 312 / 989, 1),
        matmul_sustained_tflops=round(h200.matmul_sustained_tflops * 312 / 989, 1),
        kernels="portable",
        schedule="stepwise",
        copy_engine=Link(212.0, 6.0),
        collective_gbps=220.0,
        network=Link(24.0, 12.0),
    )
    # B200: 2,250 TFLOP/s, 148 multiprocessors, 8 TB/s, NVLink of 1.8 TB/s in both directions, 180 GB usable
    b200 = scaled(
        h200,
        "B200",
        compute=989 / 2250 * 148 / 132,
        memory=8 / 4.8,
        assumed=(
            "not measured: an H200 scaled by 2,250 TFLOP/s, 148 multiprocessors, 8 TB/s and 1.8 TB/s of NVLink (datasheet)",
            "attention by the portable kernels at their share of the peak of an H200; auto takes those of torch first",
        ),
    )
    b200 = replace(
        b200,
        peak_tflops=2250.0,
        memory_gib=178.0,
        multiprocessors=148,
        matmul_tflops=round(h200.matmul_tflops * 2250 / 989, 1),
        matmul_sustained_tflops=round(h200.matmul_sustained_tflops * 2250 / 989, 1),
        kernels="portable",
        schedule="stepwise",
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
