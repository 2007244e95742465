"""Measures a profile of this machine: kernels, matrix products, memory, and between ranks the ring's own calls.

On one GPU kernels and memory; under torchrun links, semaphores, host times and slowdowns of rings too. Takes one to two minutes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ringattn.kernels.registry import select_kernels
from ringattn.launch.bench.baselines import make_sharding, prepare_ours
from ringattn.launch.bench.workloads import MaskName, Problem, free_memory, own_stream
from ringattn.launch.common.ring_variants import ScheduleName, display_name, open_rings, single_rank_ring
from ringattn.launch.common.session import Session
from ringattn.launch.common.timing import Time, time_together
from ringattn.launch.plan.fit import Row, kernel_costs, ring_costs
from ringattn.launch.train.metrics import peak_flops
from ringattn.ring import Ring
from ringattn.sizing.profile import Profile, load_profile

NEAREST = "h200"  # profile whose numbers stand for what is not measured


@dataclass(frozen=True)
class Sizes:
    """Problems that are measured."""

    # masks, tokens and head_dims of kernels
    kernels: tuple[tuple[MaskName, int, int], ...] = (
        *(("causal", n, 128) for n in (2048, 8192, 32768)),
        *(("full", n, 128) for n in (2048, 4096, 16384)),
        ("window", 16384, 128),
        ("documents", 16384, 128),
        *(("causal", 4096, d) for d in (64, 256)),
        *(("full", 8192, d) for d in (64, 256)),
        *(("window", 16384, d) for d in (64, 256)),
    )
    # tokens per rank of ring calls; the first ones are so short that plain calls show the host
    ring_tokens: tuple[int, ...] = (128, 2048, 8192, 16384)
    heads: int = 16
    matmul: tuple[int, int, int] = (16384, 14336, 4096)  # rows, columns and inner size of matrix products
    memory_bytes: int = 2**31  # bytes of both sides of a copy; a collective's result has a fourth of a side
    rounds: int = 5  # of which the median counts
    seconds: float = 4.0  # limit of one group of calls


def measure_profile(session: Session, sizes: Sizes | None = None) -> Profile:
    """Return the profile of this machine; collective over the ranks, the same on all of them."""
    sizes = sizes or Sizes()
    # before long matrix products, which lower the clock
    kernels = _kernel_rows(session, sizes)
    profile = dataclasses.replace(_device(session), **_device_rates(session, sizes))
    profile = kernel_costs(kernels, profile)
    if session.world_size > 1:
        profile = _rings(session, sizes, profile)
    else:
        rest = "links, semaphores, slowdowns and host times: those of an H200; start with torchrun to measure them"
        profile = dataclasses.replace(profile, assumed=(*profile.assumed, rest))
    # sums of equal times may round differently
    return session.gather(profile)[0]


def _device(session: Session) -> Profile:
    """Return the profile of the nearest known GPU with the datasheet of this one."""
    nearest = load_profile(NEAREST)
    network = "network: 48 GB/s between hosts, which was not measured; pass --link"
    if session.device.type != "cuda":
        return dataclasses.replace(nearest, name="CPU", assumed=(network,), fitted_from=("this machine",))
    gpu = torch.cuda.get_device_properties(session.device)
    peak = peak_flops(gpu.name, torch.bfloat16)
    choice = select_kernels(session.device, torch.bfloat16, 128, 128, impl="auto")
    return dataclasses.replace(
        nearest,
        name=gpu.name,
        peak_tflops=nearest.peak_tflops if peak is None else peak / 1e12,
        memory_gib=round(gpu.total_memory / 2**30, 1),
        multiprocessors=gpu.multi_processor_count,
        schedule="fused" if choice.name == "hopper" else "stepwise",
        assumed=(network, *(() if peak else (f"peak of {nearest.name}: the datasheet of {gpu.name} is not known",))),
        fitted_from=(f"doctor --profile on {session.world_size} x {gpu.name}, torch {torch.__version__}",),
    )


def _device_rates(session: Session, sizes: Sizes) -> dict[str, float]:
    """Return rates of matrix products and of memory: the slowest rank's."""
    rows, columns, inner = sizes.matmul
    dtype = torch.bfloat16 if session.device.type == "cuda" else torch.float32
    x = torch.randn(rows, inner, device=session.device, dtype=torch.float32).to(dtype)
    w = torch.randn(inner, columns, device=session.device, dtype=torch.float32).to(dtype)
    source = torch.zeros(sizes.memory_bytes // 2, dtype=torch.uint8, device=session.device)
    target = torch.empty_like(source)
    calls: dict[str, Callable[[], Any]] = {"product": lambda: torch.mm(x, w), "copy": lambda: target.copy_(source)}
    times = {name: time.eager_ms for name, time in time_together(calls, session, sizes.rounds, sizes.seconds).items()}
    rate, nearest = 2.0 * rows * columns * inner / times["product"] / 1e9, load_profile(NEAREST)
    return {
        "matmul_tflops": _rounded(rate),
        # the clock of a training step, of seconds, falls as on the nearest GPU
        "matmul_sustained_tflops": _rounded(rate * nearest.matmul_sustained_tflops / nearest.matmul_tflops),
        "memory_gbps": _rounded(2 * source.numel() / times["copy"] / 1e6),
    }


def _rounded(rate: float) -> float:
    """Return four digits of a rate; a slow one is not rounded to 0, by which nothing could be divided."""
    return float(f"{rate:.4g}")


def _kernel_rows(session: Session, sizes: Sizes) -> list[Row]:
    """Return rows as `bench kernels` writes them, of a ring of this rank alone."""
    ring, found = single_rank_ring(session), list[Row]()
    dtype = "bf16" if session.device.type == "cuda" else "fp32"
    with own_stream(session.device):
        for mask, tokens, d in sizes.kernels:
            window = max(1, tokens // 4 - 1)
            problem = Problem(mask, tokens, 1, sizes.heads, sizes.heads, d, dtype, window, tokens // 4)
            ms = {name: time.best_ms for name, time in _times(session, sizes, ring, problem, "contiguous").items()}
            row = dataclasses.asdict(problem)
            found.append(row | {"direction": "forward", "ms": ms["forward"]})
            found.append(row | {"direction": "backward", "ms": max(1e-3, ms["both"] - ms["forward"])})
            free_memory()
    ring.close()
    return found


def _times(session: Session, sizes: Sizes, ring: Ring, problem: Problem, layout: str) -> dict[str, Time]:
    """Return the times of the forward, and of "both" it and its backward, on GPUs as graphs too."""
    one = prepare_ours(problem, ring, layout, session.device, "auto", session.rank)
    calls = {"forward": one.forward, "both": one.both}
    captured = calls if session.device.type == "cuda" else ()
    return time_together(calls, session, sizes.rounds, sizes.seconds, captured)


def _rings(session: Session, sizes: Sizes, profile: Profile) -> Profile:
    """Return the profile with links, semaphores, slowdowns and host times of rings over all ranks."""
    names: tuple[ScheduleName, ...] = ("process_group", "stepwise", "fused")
    wanted = names[: 1 if session.device.type != "cuda" else 3 if profile.schedule == "fused" else 2]
    rings, schedules = open_rings(wanted, session), {display_name(name, session): name for name in wanted}
    found: list[Row] = []
    with own_stream(session.device):
        for tokens in sizes.ring_tokens:
            for who, ring in rings.items():
                found.append(_ring_row(session, sizes, ring, tokens) | {"who": schedules[who]})
                session.barrier()
                ring.close()
                free_memory()
    profile = dataclasses.replace(profile, collective_gbps=_collective_gbps(session, sizes))
    if rate := max(ring.context.push_rate for ring in rings.values()) / 1e9:
        engine = dataclasses.replace(profile.copy_engine, gbps=round(rate, 1))
        return ring_costs(found, dataclasses.replace(profile, copy_engine=engine))
    # no GPU pushes to another one here
    profile = ring_costs(found, profile)
    return dataclasses.replace(profile, schedule="process_group", copy_engine=profile.nccl)


def _collective_gbps(session: Session, sizes: Sizes) -> float:
    """Return the rate at which a rank receives the parts of others in an all-gather."""
    device = session.message_device
    part = torch.zeros(sizes.memory_bytes // 8 // session.world_size, dtype=torch.uint8, device=device)
    whole = torch.empty(part.numel() * session.world_size, dtype=torch.uint8, device=device)
    calls = {"gather": lambda: dist.all_gather_into_tensor(whole, part)}
    times = time_together(calls, session, sizes.rounds, sizes.seconds)
    return _rounded((whole.numel() - part.numel()) / times["gather"].eager_ms / 1e6)


def _ring_row(session: Session, sizes: Sizes, ring: Ring, tokens: int) -> Row:
    """Return a row as `bench ring` writes it."""
    dtype = "bf16" if session.device.type == "cuda" else "fp32"
    problem = Problem("causal", tokens * session.world_size, 1, 2 * sizes.heads, 2 * sizes.heads, 128, dtype, 1)
    times = _times(session, sizes, ring, problem, "zigzag")
    row = {**dataclasses.asdict(problem), "layout": make_sharding(problem, ring, "zigzag").layout}
    row |= {"world_size": session.world_size, "tokens_per_rank": tokens, "ours": True}
    for name, time in times.items():
        row |= {f"{name}_ms": time.eager_ms, f"{name}_graph_ms": time.graph_ms}
    return row
