"""Where does the time of one step go? A trace per rank, with the ring steps named, and a summary.

Owns the profiled step and the arithmetic on the trace. Refuses to know what a ring step does: the library names them.

    torchrun --nproc_per_node 4 -m ringattn.launch.bench ring --trace --tokens 8192
    # then open runs/trace/rank0.json in https://ui.perfetto.dev or chrome://tracing

Note [Reading a trace]
    On a GPU, communication is what NCCL kernels and copies between devices take, computation every other kernel. On a
    CPU, communication is what gloo's sends and receives take from posting to arrival, computation every torch call.
    Both are unions of intervals, so that nothing is counted twice; hidden is their intersection, exposed is the
    communication that is left: time in which bytes moved and nothing was computed. A gathered ring is one kernel, which may
    wait for rows while it counts as computation: what it lost is its time minus that of the kernel alone (`bench ring`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import ringattn
from ringattn.launch.check.attention import DTYPES
from ringattn.launch.runtime.ring_variants import ScheduleName, check_schedules, make_ring
from ringattn.launch.runtime.session import Session, describe, machine, open_session, parse, table, write_json

Interval = tuple[float, float]


@dataclass(frozen=True)
class TraceArgs:
    """Profiles one forward and backward and writes a Chrome/Perfetto trace per rank.

    Attributes:
        tokens: Tokens per rank.
        layout: How positions are dealt out.
        causal: Hide later keys.
        window: Tokens to the left a query sees; None for all.
        heads: Query heads.
        kv_heads: Key/value heads.
        head_dim: Of q, k and v.
        batch: Batch elements.
        dtype: Of q, k and v.
        impl: Kernels: "auto", or the name of a kernel set.
        schedule: How keys move, as in `check`.
        warmup: Steps before the one that is profiled.
        device: GPUs where there are any, or the CPU.
        out: Folder for the traces.
    """

    tokens: int = 4096
    layout: Literal["contiguous", "striped", "zigzag", "balanced"] = "zigzag"
    causal: bool = True
    window: int | None = None
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    batch: int = 1
    dtype: Literal["bf16", "fp16", "fp32", "fp64"] = "bf16"
    impl: str = "auto"
    schedule: ScheduleName = "auto"
    warmup: int = 3
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path = Path("runs/trace")


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals, ascending.

    Example:
        >>> union([(4, 6), (0, 2), (1, 3)])
        [(0, 3), (4, 6)]
    """
    joined: list[Interval] = []
    for start, stop in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined


def intersection(these: Sequence[Interval], those: Sequence[Interval]) -> list[Interval]:
    """The points in both of two ascending lists of disjoint intervals.

    Example:
        >>> intersection([(0, 3), (5, 9)], [(2, 6)])
        [(2, 3), (5, 6)]
    """
    shared, x, y = [], 0, 0
    while x < len(these) and y < len(those):
        start, stop = max(these[x][0], those[y][0]), min(these[x][1], those[y][1])
        if start < stop:
            shared.append((start, stop))
        if these[x][1] < those[y][1]:
            x += 1
        else:
            y += 1
    return shared


def _length(intervals: Iterable[Interval]) -> float:
    return sum(stop - start for start, stop in intervals)


def is_communication(event: dict[str, Any]) -> bool:
    """Whether an event of a trace is bytes moving between ranks (Note [Reading a trace])."""
    name, kind = event["name"], event.get("cat", "")
    if kind == "kernel":
        return name.startswith("nccl")
    return (kind == "gpu_memcpy" and "PtoP" in name) or (kind == "user_annotation" and name.startswith("gloo:"))


def is_computation(event: dict[str, Any], gpu: bool) -> bool:
    """Whether an event of a trace is arithmetic (Note [Reading a trace])."""
    kind = event.get("cat", "")
    if gpu:
        return kind == "kernel" and not is_communication(event)
    return kind == "cpu_op" and event["name"].startswith("aten::")


def summarize(events: Sequence[dict[str, Any]], gpu: bool) -> dict[str, Any]:
    """Milliseconds of computation, communication and both, and the ring steps by name.

    Args:
        events: The "traceEvents" of a trace.
        gpu: Whether the work was done by a GPU.

    Returns:
        "compute_ms", "communication_ms", "hidden_ms", "exposed_ms", "step_ms", and "ring_steps": (name, ms) in order of
        time.
    """
    timed = [event for event in events if event.get("ph") == "X" and event.get("dur", 0) > 0]

    def spans(chosen: Iterable[dict[str, Any]]) -> list[Interval]:
        return union((event["ts"], event["ts"] + event["dur"]) for event in chosen)

    compute = spans(event for event in timed if is_computation(event, gpu))
    communication = spans(event for event in timed if is_communication(event))
    hidden = _length(intersection(compute, communication))
    whole = [*compute, *communication]
    step = max(stop for _, stop in whole) - min(start for start, _ in whole) if whole else 0.0
    kind = "gpu_user_annotation" if gpu else "user_annotation"
    named = [event for event in timed if event.get("cat") == kind and event["name"].startswith("ring ")]
    return {
        "step_ms": step / 1e3,
        "compute_ms": _length(compute) / 1e3,
        "communication_ms": _length(communication) / 1e3,
        "hidden_ms": hidden / 1e3,
        "exposed_ms": (_length(communication) - hidden) / 1e3,
        "ring_steps": [(event["name"], event["dur"] / 1e3) for event in sorted(named, key=lambda event: event["ts"])],
    }


def record(args: TraceArgs, session: Session) -> Path:
    """Profiles one step on this rank and returns its trace."""
    from torch.profiler import ProfilerActivity, profile, record_function, schedule

    sharding = make_ring(args.schedule).sharding(args.tokens * session.world_size, layout=args.layout)
    generator = torch.Generator(session.device).manual_seed(session.rank)
    q, k, v, do = (
        torch.randn(
            args.batch, sharding.shard_len, heads, args.head_dim, generator=generator, device=session.device
        ).to(DTYPES[args.dtype])
        for heads in (args.heads, args.kv_heads, args.kv_heads, args.heads)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    window = None if args.window is None else (args.window, 0 if args.causal else None)

    def step() -> None:
        """One step, whose work has ended."""
        with record_function("forward"):
            o = ringattn.ring_attention(q, k, v, sharding, causal=args.causal, window=window, impl=args.impl)
        with record_function("backward"):
            torch.autograd.grad(o, leaves, do)
        if session.device.type == "cuda":
            torch.cuda.synchronize(session.device)

    for _ in range(args.warmup):
        step()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if session.device.type == "cuda" else [])]
    # a profiler takes its time to begin, and kernels would wait for the last rank: so ranks meet first
    with profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=1, repeat=1)) as profiler:
        step()
        session.barrier()
        profiler.step()
        step()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"rank{session.rank}.json"
    profiler.export_chrome_trace(str(path))
    return path


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    args: TraceArgs = parse(TraceArgs, arguments, "bench ring --trace", (TraceArgs.__doc__ or "").split("\n")[0])
    with open_session(args.device) as session:
        line = machine(session)
        session.say(describe(line))
        check_schedules([args.schedule], session)
        path = record(args, session)
        events = json.loads(path.read_text())["traceEvents"]
        found = session.gather((str(path), summarize(events, session.device.type == "cuda")))
        if session.rank == 0:
            names = ["step_ms", "compute_ms", "communication_ms", "hidden_ms", "exposed_ms"]
            rows = [[rank, *(f"{one[name]:.3f}" for name in names)] for rank, (_, one) in enumerate(found)]
            table("one forward and backward", ["rank", *(name.replace("_ms", " ms") for name in names)], rows)
            steps = [[rank, name, f"{ms:.3f}"] for rank, (_, one) in enumerate(found) for name, ms in one["ring_steps"]]
            table("ring steps, in order of time", ["rank", "step", "ms"], steps)
            write_json(args.out / "summary.json", {"machine": line, "ranks": [one for _, one in found]})
            print("traces, for https://ui.perfetto.dev or chrome://tracing:")
            for trace, _ in found:
                print(f"  {trace}")
    return 0
