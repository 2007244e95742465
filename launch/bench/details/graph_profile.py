"""What the devices do in calls that are replayed from a CUDA graph: kernels, copies and gaps of all ranks on one clock.

Owns the profiled replays and the arithmetic that says where their time goes. Refuses to know what a call does.

    torchrun --nproc_per_node 4 -m ringattn.launch.bench ring --profile --tokens 1024 2048 --kv-heads 8 32

Note [Where a call's time goes]
    The same work alone, a rank's share of the pairs under the same mask on one GPU, is replayed as well. A call's period is the
    time from the start of its first kernel to that of the next call's. Kernels of a ring wait for rows while they run, so
        period = alone + waiting + idle
    where idle is the time in which no kernel runs, before and between kernels (words that ranks write and wait for in stream order,
    launches, copies that a kernel must not begin before), and waiting is what kernels take longer than they do alone, with its
    gaps: rows that are awaited, blocks that do not come out even, kernels that only a ring has. Copies run beside kernels; how
    long any runs is said as well. A profiler lengthens short calls a little, so the period that is timed without one is
    said beside it.

Note [One clock]
    Times of all ranks of a host are on its clock, as far as the profiler's conversion from the device's is right: differences
    between ranks below some microseconds mean nothing.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ringattn.launch.bench.details.step_trace import union
from ringattn.launch.bench.ring_baselines import prepare_ours
from ringattn.launch.bench.workloads import DTypeName, MaskName, Problem, same_work
from ringattn.launch.runtime.ring_variants import ScheduleName, lonely_ring, make_ring
from ringattn.launch.runtime.session import Session, describe, keeper, machine, open_session, parse, table
from ringattn.launch.runtime.timing import capture_together, settle, time_together
from ringattn.transport.gpu_sharing import may_share_gpus
from ringattn.transport.timeout import record_events

REPLAYS = 3
"""Graphs that are replayed under the profiler; the last one is looked at."""


@dataclass(frozen=True)
class ProfileArgs:
    """Says where the time of replayed calls goes, and keeps what each device did in a few of them.

    Attributes:
        tokens: Tokens per GPU.
        kv_heads: Key/value heads.
        heads: Query heads.
        head_dim: Of q, k and v.
        batch: Batch elements.
        mask: What is visible.
        window: Tokens to the left under the window mask.
        layout: How positions are dealt out.
        ways: A forward alone, or a forward and backward.
        schedule: How keys move, as in `check`.
        calls: Calls in a row that a graph has.
        dtype: Of q, k and v.
        impl: Kernels: "auto", or the name of a kernel set.
        out: Folder for the JSON.
        name: Of the file.
    """

    tokens: tuple[int, ...] = (1024, 2048)
    kv_heads: tuple[int, ...] = (8, 32)
    heads: int = 32
    head_dim: int = 128
    batch: int = 1
    mask: MaskName = "causal"
    window: int = 4096
    layout: Literal["contiguous", "striped", "zigzag", "balanced"] = "zigzag"
    ways: tuple[Literal["forward", "both"], ...] = ("forward", "both")
    schedule: ScheduleName = "fused"
    calls: int = 4
    dtype: DTypeName = "bf16"
    impl: str = "auto"
    out: Path = Path("runs/replays")
    name: str = "replays"

    def __post_init__(self) -> None:
        """Refuses what has no period."""
        if self.calls < 2:
            raise ValueError(f"calls must be at least 2, from one to the next, got {self.calls}")


@dataclass(frozen=True)
class Event:
    """What a device did.

    Attributes:
        kind: "kernel" or "copy".
        name: Of the kernel, or what was copied from where to where.
        start: Microseconds on the clock of the host.
        length: Microseconds.
    """

    kind: str
    name: str
    start: float
    length: float

    @property
    def end(self) -> float:
        """When it was over."""
        return self.start + self.length


def read_trace(trace: dict[str, Any]) -> list[Event]:
    """Kernels and copies of a Chrome trace, by their start.

    Example:
        >>> rows = [{"ph": "X", "cat": "kernel", "name": "forward_kernel", "ts": 7.0, "dur": 2.0}]
        >>> rows += [{"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy PtoP (Device -> Device)", "ts": 1.0, "dur": 3.0}]
        >>> [(one.kind, one.start) for one in read_trace({"traceEvents": rows, "baseTimeNanoseconds": 2000})]
        [('copy', 3.0), ('kernel', 9.0)]
    """
    base = trace.get("baseTimeNanoseconds", 0) / 1e3
    kinds = {"kernel": "kernel", "gpu_memcpy": "copy"}
    found = [
        Event(kinds[event["cat"]], event["name"], base + event["ts"], event["dur"])
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in kinds
    ]
    return sorted(found, key=lambda event: event.start)


def last_replay(events: Sequence[Event], replays: int) -> list[Event]:
    """The events of the last of some replays of one graph, copies that began with it or since included.

    Raises:
        ValueError: The kernels cannot be shared out evenly: the trace is of something else.
    """
    kernels = [event for event in events if event.kind == "kernel"]
    each, rest = divmod(len(kernels), replays)
    if rest or not each:
        raise ValueError(f"a trace of {replays} replays must have as many kernels of each, got {len(kernels)} in all")
    before = kernels[-each - 1].end if len(kernels) > each else float("-inf")
    return [event for event in events if event.start >= before]


@dataclass(frozen=True)
class Spent:
    """Where the time of a call goes, in microseconds, on average over the calls of a replay.

    Attributes:
        period: From the start of a call to that of the next.
        busy: A kernel runs.
        copying: A copy runs.
    """

    period: float
    busy: float
    copying: float

    @classmethod
    def of(cls, events: Sequence[Event], calls: int) -> Spent:
        """Of a replay of so many equal calls.

        The last call has no next one, and is not counted.

        Raises:
            ValueError: Its kernels cannot be shared out evenly.

        Example:
            >>> found = [Event("kernel", "a", x, 6.0) for x in (0.0, 10.0, 20.0)] + [Event("copy", "b", 4.0, 3.0)]
            >>> Spent.of(found, 3)
            Spent(period=10.0, busy=6.0, copying=1.5)
        """
        kernels = [event for event in events if event.kind == "kernel"]
        each, rest = divmod(len(kernels), calls)
        if rest or not each:
            raise ValueError(f"{calls} calls must have as many kernels each, got {len(kernels)} in all")
        began, ended = kernels[0].start, kernels[-each].start
        spans = {
            kind: sum(
                min(stop, ended) - max(start, began)
                for start, stop in union((event.start, event.end) for event in events if event.kind == kind)
                if start < ended and stop > began
            )
            for kind in ("kernel", "copy")
        }
        count = calls - 1
        return cls((ended - began) / count, spans["kernel"] / count, spans["copy"] / count)


def profile(replay: Callable[[], Any], session: Session) -> list[Event]:
    """What this device does in the last of some replays, which all ranks make together."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler_of

    session.barrier()
    torch.cuda.synchronize(session.device)
    # the first are for ranks whose profilers took longer to begin; a ring's calls wait for each other by themselves
    with profiler_of(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPLAYS):
            replay()
            settle(record_events(session.device))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    return read_trace(trace)


def look(args: ProfileArgs, tokens: int, kv_heads: int, session: Session) -> list[dict[str, Any]]:
    """A row per way: where a call's time goes on every rank, and what each device did."""
    problem = Problem(
        args.mask, tokens * session.world_size, args.batch, args.heads, kv_heads, args.head_dim, args.dtype, args.window
    )
    share = same_work(problem, session.world_size)
    factor = problem.pairs / session.world_size / share.pairs
    ring, alone = make_ring(args.schedule), lonely_ring(session)
    ours = prepare_ours(problem, ring, args.layout, session.device, args.impl, session.rank)
    lonely = prepare_ours(share, alone, "contiguous", session.device, args.impl, session.rank)
    rows = []
    for way in args.ways:
        calls = {"ring": getattr(ours, way), "alone": getattr(lonely, way)}
        times = time_together(calls, session, 5, 0.5, captured=list(calls))
        spent: dict[str, Spent] = {}
        did: dict[str, list[Event]] = {}
        for name, call in calls.items():
            replay, why = capture_together(call, args.calls, session)
            if replay is None:
                raise RuntimeError(f"calls must be captured to be replayed, got a refusal: {why}")
            did[name] = last_replay(profile(replay, session), REPLAYS)
            spent[name] = Spent.of(did[name], args.calls)
        by_alone = spent["alone"].period * factor
        one = {
            "period_us": spent["ring"].period,
            "alone_us": by_alone,
            "waiting_us": spent["ring"].busy - by_alone,
            "idle_us": spent["ring"].period - spent["ring"].busy,
            "copying_us": spent["ring"].copying,
        }
        found = session.gather((one, [asdict(event) for event in did["ring"]]))
        began = min(event["start"] for _, events in found for event in events)
        for _, events in found:
            for event in events:
                event["start"] = round(event["start"] - began, 2)
                event["length"] = round(event["length"], 2)
        timed = {name: times[name].graph_ms for name in calls}
        rows.append(
            {
                "bench": "replays",
                "way": way,
                "world_size": session.world_size,
                "tokens_per_rank": tokens,
                "layout": args.layout,
                "schedule": args.schedule,
                **asdict(problem),
                "calls": args.calls,
                "timed_us": None if timed["ring"] is None else 1e3 * timed["ring"],
                "timed_alone_us": None if timed["alone"] is None else 1e3 * timed["alone"] * factor,
                "ranks": [numbers for numbers, _ in found],
                "events": [events for _, events in found],
            }
        )
        session.say(brief(rows[-1]))
    ring.close()
    alone.close()
    return rows


def brief(row: dict[str, Any]) -> str:
    """A row in a line: the mean over ranks.

    Example:
        >>> numbers = {"period_us": 40.0, "alone_us": 25.0, "waiting_us": 10.0, "idle_us": 5.0, "copying_us": 9.0}
        >>> row = {"way": "forward", "tokens_per_rank": 1024, "heads": 32, "kv_heads": 8, "ranks": [numbers], "timed_us": 39.0}
        >>> brief(row)
        'forward, 1024 tokens per GPU, 32/8 heads: 40.0 us = 25.0 alone + 10.0 waiting + 5.0 idle; copies 9.0; unprofiled 39.0'
    """
    mean = {
        name: sum(one[name] for one in row["ranks"]) / len(row["ranks"])
        for name in ("period_us", "alone_us", "waiting_us", "idle_us", "copying_us")
    }
    unprofiled = "-" if row["timed_us"] is None else f"{row['timed_us']:.1f}"
    return (
        f"{row['way']}, {row['tokens_per_rank']} tokens per GPU, {row['heads']}/{row['kv_heads']} heads: "
        f"{mean['period_us']:.1f} us = {mean['alone_us']:.1f} alone + {mean['waiting_us']:.1f} waiting + "
        f"{mean['idle_us']:.1f} idle; copies {mean['copying_us']:.1f}; unprofiled {unprofiled}"
    )


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    args: ProfileArgs = parse(
        ProfileArgs, arguments, "bench ring --profile", (ProfileArgs.__doc__ or "").split("\n")[0]
    )
    ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if ranks > gpus and not may_share_gpus():
        raise SystemExit(
            f"each rank of a host must have a GPU, which CUDA graphs are of, got {ranks} ranks and {gpus} GPUs; "
            "start it on GPUs, one rank on each, with torchrun --nproc_per_node"
        )
    with open_session("cuda") as session, torch.cuda.stream(torch.cuda.Stream(session.device)):
        line = machine(session)
        session.say(describe(line))
        path, rows = args.out / f"{args.name}.json", []
        keep = keeper(path, session, line)
        for tokens, kv_heads in itertools.product(args.tokens, args.kv_heads):
            rows += look(args, tokens, kv_heads, session)
            keep(rows)
        if session.rank == 0:
            names = ("period_us", "alone_us", "waiting_us", "idle_us", "copying_us")
            cells = [
                [row["way"], row["tokens_per_rank"], f"{row['heads']}/{row['kv_heads']}", rank]
                + [f"{one[name]:.1f}" for name in names]
                for row in rows
                for rank, one in enumerate(row["ranks"])
            ]
            table("a call", ["way", "tokens", "heads", "rank", *(name.replace("_us", " us") for name in names)], cells)
            print(f"rows: {path}")
    return 0
