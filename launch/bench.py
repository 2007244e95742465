"""How fast is it, and beside what? Kernels on one GPU, the ring over several, and memory against length.

Owns the commands, what is timed of a ring, and what tables and plots show. Refuses to print a speed of an answer that
was not checked.

    python -m ringattn.launch.bench kernels
    torchrun --nproc_per_node 4 -m ringattn.launch.bench ring
    torchrun --nproc_per_node 4 -m ringattn.launch.bench memory
    torchrun --nproc_per_node 4 -m ringattn.launch.bench host

FLOPs are those of `problems` (Note [FLOPs]), times those of `turns` (Note [Times]).

Note [Same work]
    The ring is held against a ring of one rank on the same GPUs, at the length n1 where the same mask lets
    pairs / world_size pairs through: one GPU with a rank's share of the work and nobody to wait for.
    percent = 100 * (TFLOP/s per GPU of the ring) / (TFLOP/s of that); exposed ms = time of the ring minus that time,
    both for the same number of FLOPs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

import ringattn
from ringattn.launch.bench_host import Host, bench_host
from ringattn.launch.bench_kernels import Kernels, bench_kernels, describe_problem
from ringattn.launch.check import DTYPES, Case, CheckArgs, check, show
from ringattn.launch.figures import draw_lengths
from ringattn.launch.problems import DTypeName, MaskName, Problem, draw_inputs, same_work, teraflops
from ringattn.launch.session import Session, describe, machine, open_session, parse, table, write_json
from ringattn.launch.turns import take_turns

Layout = Literal["contiguous", "striped", "zigzag", "balanced"]
GIB = 2**30


@dataclass(frozen=True)
class Ring:
    """All ranks: the ring by tokens per GPU, as a share of the kernel alone at the same work.

    Attributes:
        tokens: Tokens per GPU.
        masks: What is visible.
        layouts: How positions are dealt out.
        heads: Query heads.
        kv_heads: Key/value heads, one or more counts.
        head_dim: Of q, k and v.
        batch: Batch elements.
        window: Tokens to the left a query sees under the window mask.
        dtype: Of q, k and v.
        impl: Kernels: "auto", or the name of a kernel set.
        rounds: Rounds; the median counts.
        device: GPUs where there are any, or the CPU.
        out: Folder for the JSON and the plot.
    """

    tokens: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    masks: tuple[MaskName, ...] = ("causal",)
    layouts: tuple[Layout, ...] = ("zigzag",)
    heads: int = 32
    kv_heads: tuple[int, ...] = (8, 32)
    head_dim: int = 128
    batch: int = 1
    window: int = 1024
    dtype: DTypeName = "bf16"
    impl: str = "auto"
    rounds: int = 9
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path = Path("runs/bench")


@dataclass(frozen=True)
class Memory:
    """All ranks: peak memory per GPU of one forward and backward, against the length of the whole sequence.

    Attributes:
        lengths: Tokens of the whole sequence.
        mask: What is visible.
        layout: How positions are dealt out.
        heads: Query heads.
        kv_heads: Key/value heads, one or more counts.
        head_dim: Of q, k and v.
        batch: Batch elements.
        window: Tokens to the left a query sees under the window mask.
        dtype: Of q, k and v.
        impl: Kernels: "auto", or the name of a kernel set.
        alone: Also measure one GPU with the whole sequence, where it fits.
        device: GPUs where there are any, or the CPU.
        out: Folder for the JSON and the plot.
    """

    lengths: tuple[int, ...] = (16384, 32768, 65536, 131072)
    mask: MaskName = "causal"
    layout: Layout = "zigzag"
    heads: int = 32
    kv_heads: tuple[int, ...] = (8,)
    head_dim: int = 128
    batch: int = 1
    window: int = 1024
    dtype: DTypeName = "bf16"
    impl: str = "auto"
    alone: bool = True
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path = Path("runs/bench")


Run = tuple[Callable[[], Any], Callable[[], Any]]
"""Forward alone, and backward alone (of a forward that was done once)."""


def deal(problem: Problem, ring: ringattn.Ring, layout: str) -> ringattn.Sharding:
    """Who holds which positions; "balanced" is balanced for the mask of the problem."""
    balance = problem.options if layout == "balanced" else None
    return ring.sharding(problem.seq_len, layout=layout, documents=problem.documents, balance=balance)


def prepare_ours(problem: Problem, ring: ringattn.Ring, layout: str, device: torch.device, impl: str) -> Run:
    """Our attention on this rank's rows of a problem, b s h d."""
    sharding = deal(problem, ring, layout)
    q, k, v, do = draw_inputs(problem, sharding.shard_len, device)

    def forward() -> Tensor:
        return ringattn.ring_attention(q, k, v, sharding, impl=impl, **problem.options)

    o = forward()
    return forward, lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)


def verify(problems: Sequence[Problem], layouts: Sequence[str], session: Session, impl: str) -> bool:
    """Checks the same dtypes, heads, head dims, masks and layouts at a length the definition can afford.

    Says nothing when all is green; shows the table when not.
    """
    n = 1021 if session.device.type == "cuda" else 67
    cases: dict[tuple[object, ...], Case] = {}
    for problem in problems:
        cases[problem.mask, problem.kv_heads, problem.head_dim, problem.dtype] = Case(
            problem.mask,
            problem.dtype,
            n,
            heads=problem.heads,
            kv_heads=problem.kv_heads,
            head_dim=problem.head_dim,
            v_head_dim=problem.head_dim,
            mask=dataclasses.replace(problem, window=n // 4).options,
            documents=(0, n // 7, n // 3, n) if problem.mask == "documents" else None,
            layouts=tuple(layouts),
        )
    verdict = check(session, list(cases.values()), CheckArgs(impl=impl))
    session.say(f"check: {len(verdict.rows) - len(verdict.red)} of {len(verdict.rows)} runs inside the error budget")
    if (verdict.red or verdict.skipped or not verdict.rows) and session.rank == 0:
        show(verdict)
    return not verdict.red and not verdict.skipped and bool(verdict.rows)


def lonely_ring(session: Session) -> ringattn.Ring:
    """A ring of this rank alone."""
    if session.world_size == 1:
        return ringattn.Ring()
    group, _ = dist.new_subgroups(group_size=1)
    assert isinstance(group, dist.ProcessGroup), "this rank belongs to the group made for it"
    return ringattn.Ring(group)


def bytes_received(problem: Problem, sharding: ringattn.Sharding) -> dict[str, int]:
    """Bytes each rank receives from others, on average, in a forward and in a backward."""
    from ringattn.schedule import make_plan
    from ringattn.visibility import Visibility

    visibility = Visibility(problem.seq_len, problem.seq_len, documents=problem.documents, **problem.options)
    element = DTYPES[problem.dtype].itemsize
    wide = 8 if problem.dtype == "fp64" else 4
    per_row = problem.batch * problem.head_dim
    rows = {}
    for moving in ("keys", "queries"):
        plan = make_plan(sharding.shards, sharding.shards, visibility, moving)
        visits = [visit for rank in plan.ranks for visit in rank.visits if visit is not None and visit.step > 0]
        rows[moving] = sum(visit.num_rows for visit in visits) // len(plan.ranks)
    keys = rows["keys"] * per_row * problem.kv_heads * 2 * (element + wide)
    # lse and delta travel with the queries, two numbers per row and head
    queries = rows["queries"] * problem.batch * problem.heads * (problem.head_dim * (2 * element + wide) + 2 * wide)
    return {"forward": rows["keys"] * per_row * problem.kv_heads * 2 * element, "backward": min(keys, queries)}


def bench_ring(args: Ring, session: Session) -> list[dict[str, Any]] | None:
    """Rows of the ring, one per problem and layout; None when the check is red."""
    problems = [
        Problem(
            mask, tokens * session.world_size, args.batch, args.heads, kv_heads, args.head_dim, args.dtype, args.window
        )
        for kv_heads in args.kv_heads
        for mask in args.masks
        for tokens in args.tokens
    ]
    if not verify(problems, args.layouts, session, args.impl):
        return None
    ring, alone = ringattn.Ring(), lonely_ring(session)
    rows = []
    for problem in problems:
        share = same_work(problem, session.world_size)
        peaks = {layout: peak_of_a_step(problem, ring, layout, session, args.impl) for layout in args.layouts}
        forward_alone, backward_alone = prepare_ours(share, alone, "contiguous", session.device, args.impl)
        for layout in args.layouts:
            forward, backward = prepare_ours(problem, ring, layout, session.device, args.impl)
            calls = {
                "forward": forward,
                "both": _both(forward, backward),
                "forward alone": forward_alone,
                "both alone": _both(forward_alone, backward_alone),
            }
            times = take_turns(calls, session, args.rounds)
            row: dict[str, Any] = {
                "bench": "ring",
                "world_size": session.world_size,
                "tokens_per_rank": problem.seq_len // session.world_size,
                "layout": layout,
                **dataclasses.asdict(problem),
                "pairs": problem.pairs,
                "bytes_received": bytes_received(problem, deal(problem, ring, layout)),
            }
            for name, factor in (("forward", 1.0), ("both", 3.5)):
                flops = factor * problem.flops / session.world_size
                same = times[f"{name} alone"] * problem.pairs / session.world_size / share.pairs
                row[f"{name}_ms"] = times[name]
                row[f"{name}_tflops"] = teraflops(flops, times[name])
                row[f"{name}_alone_ms"] = same
                row[f"{name}_percent"] = 100 * same / times[name]
                row[f"{name}_exposed_ms"] = times[name] - same
            rows.append(row | {"peak_gib": peaks[layout]})
    return rows


def _both(forward: Callable[[], Any], backward: Callable[[], Any]) -> Callable[[], None]:
    def both() -> None:
        forward()
        backward()

    return both


def bench_memory(args: Memory, session: Session) -> list[dict[str, Any]] | None:
    """Rows of memory, one per length, head count and ring; None when the check is red."""
    problems = [
        Problem(args.mask, n, args.batch, args.heads, kv_heads, args.head_dim, args.dtype, args.window)
        for kv_heads in args.kv_heads
        for n in args.lengths
    ]
    if not verify(problems, (args.layout,), session, args.impl):
        return None
    rings = {session.world_size: ringattn.Ring()}
    if args.alone and session.world_size > 1:
        rings[1] = lonely_ring(session)
    rows = []
    for problem in problems:
        for world_size, ring in rings.items():
            element, heads = DTYPES[problem.dtype].itemsize, 4 * problem.heads + 4 * problem.kv_heads
            row: dict[str, Any] = {
                "bench": "memory",
                "world_size": world_size,
                "layout": args.layout,
                **dataclasses.asdict(problem),
                "tensors_gib": problem.batch * problem.seq_len * heads * problem.head_dim * element / world_size / GIB,
            }
            rows.append(row | {"peak_gib": peak_of_a_step(problem, ring, args.layout, session, args.impl)})
    return rows


def peak_of_a_step(problem: Problem, ring: ringattn.Ring, layout: str, session: Session, impl: str) -> float | None:
    """GiB that torch holds at the peak of one forward and backward, inputs and gradients included.

    Args:
        problem: What is computed.
        ring: Where; its receive buffers count.
        layout: How positions are dealt out.
        session: The ranks.
        impl: Our kernels.

    Returns:
        The peak of the rank that holds most; infinity when it does not fit; None on a CPU, where nobody counts.
    """

    def step() -> None:
        sharding = deal(problem, ring, layout)
        q, k, v, do = draw_inputs(problem, sharding.shard_len, session.device)
        o = ringattn.ring_attention(q, k, v, sharding, impl=impl, **problem.options)
        torch.autograd.grad(o, (q, k, v), do)

    if session.device.type != "cuda":
        return step()
    try:
        step()
        session.barrier()
        torch.cuda.reset_peak_memory_stats(session.device)
        step()
        torch.cuda.synchronize(session.device)
        peak = torch.cuda.max_memory_allocated(session.device) / GIB
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        peak = math.inf
    return session.maximum([peak])[0]


COLUMNS: dict[str, dict[str, str]] = {
    "ring": {
        "layout": "{}",
        "mask": "{}",
        "tokens_per_rank": "{}",
        "heads": "{}",
        "kv_heads": "{}",
        "forward_ms": "{:.3f}",
        "forward_tflops": "{:.3g}",
        "forward_percent": "{:.0f}%",
        "forward_exposed_ms": "{:.3f}",
        "both_ms": "{:.3f}",
        "both_tflops": "{:.3g}",
        "both_percent": "{:.0f}%",
        "both_exposed_ms": "{:.3f}",
        "peak_gib": "{:.2f}",
    },
    "memory": {
        "world_size": "{}",
        "mask": "{}",
        "seq_len": "{}",
        "heads": "{}",
        "kv_heads": "{}",
        "tensors_gib": "{:.2f}",
        "peak_gib": "{:.2f}",
    },
    "host": {
        "world_size": "{}",
        "mask": "{}",
        "seq_len": "{}",
        "inference_us": "{:.0f}",
        "forward_us": "{:.0f}",
        "both_us": "{:.0f}",
    },
}
"""What the table of each bench shows of its rows, and how."""


def tabulate(kind: str, rows: Sequence[dict[str, Any]]) -> None:
    """Prints the rows of one bench."""
    columns = {name: form for name, form in COLUMNS[kind].items() if any(row.get(name) is not None for row in rows)}
    cells = [
        [None if row.get(name) is None else form.format(row[name]) for name, form in columns.items()] for row in rows
    ]
    table(f"bench {kind}", [name.replace("_", " ") for name in columns], cells)


def show_kernels(rows: Sequence[dict[str, Any]]) -> None:
    """Prints a line per problem and direction, a column per contender: TFLOP/s, with a star where plain calls were timed.

    Below it, everything that was refused, and what the carry costs.
    """
    columns = list(dict.fromkeys(f"{row['who']} {row['level']}" for row in rows if "tflops" in row))
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    refusals: dict[str, list[str]] = {}
    for row in rows:
        shape = describe_problem(Problem(**{one.name: row[one.name] for one in dataclasses.fields(Problem)}))
        name = f"{row['who']} {row['level']}"
        line = lines.setdefault((row["direction"], shape), {})
        if "tflops" in row:
            line[name] = f"{row['tflops']:.3g}{'' if row['timing'] == 'graph' else '*'}"
        else:
            refusals.setdefault(f"{name} {row['direction']}: {row['refused']}", []).append(shape)
    table(
        "bench kernels: TFLOP/s over visible pairs",
        ["direction", "problem", *(name.removesuffix(" op") for name in columns)],
        [[*key, *(line.get(name) for name in columns)] for key, line in lines.items()],
    )
    for refusal, shapes in refusals.items():
        print(f"refused: {refusal} ({len(shapes)} x, first {shapes[0]})")
    for row in rows:
        if "cost_percent" in row:
            print(f"carry in and out: {row['who']}, {row['mask']} n{row['seq_len']}: {row['cost_percent']:+.1f}%")


def plot(kind: str, rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Draws the rows of one bench into a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels = {
        "ring": [("tokens_per_rank", "forward_tflops"), ("tokens_per_rank", "both_tflops")],
        "memory": [("seq_len", "peak_gib")],
    }[kind]
    naming = {
        "ring": ("layout", "mask", "kv_heads"),
        "memory": ("world_size", "kv_heads"),
    }[kind]
    figure, axes = plt.subplots(1, len(panels), figsize=(7 * len(panels), 5), squeeze=False)
    for axis, (x, y) in zip(axes[0], panels, strict=True):
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row.get(y) is not None and math.isfinite(row[y]):
                label = ", ".join(f"{name.replace('_', ' ')} {row[name]}" for name in naming)
                lines.setdefault(label, []).append((row[x], row[y]))
        for label, points in lines.items():
            axis.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
        axis.set_xlabel(x.replace("_", " "))
        axis.set_ylabel(y.replace("both", "forward + backward").replace("tflops", "TFLOP/s per GPU").replace("_", " "))
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        if lines:
            axis.legend(fontsize=7)
    figure.suptitle(title, fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 1 when the check is red, and then no speed is shown."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    args: Kernels | Ring | Memory | Host = parse(
        Kernels | Ring | Memory | Host, words, "bench", "Measures, after checking."
    )
    with open_session(args.device) as session:
        line = machine(session)
        session.say(describe(line))
        if isinstance(args, Kernels):
            return report_kernels(args, session, line, words)
        if isinstance(args, Host):
            return report_host(args, session, line)
        kind = "ring" if isinstance(args, Ring) else "memory"
        rows = bench_ring(args, session) if isinstance(args, Ring) else bench_memory(args, session)
        if rows is None:
            session.say("red: no speed is shown until the check is green")
            return 1
        if session.rank == 0:
            tabulate(kind, rows)
            write_json(args.out / f"{kind}.json", {"machine": line, "rows": rows})
            drawn = f" and {args.out / kind}.png"
            with contextlib.suppress(ModuleNotFoundError):
                plot(kind, rows, describe(line), args.out / f"{kind}.png")
            print(f"rows: {args.out / kind}.json{drawn if (args.out / f'{kind}.png').exists() else ''}")
    return 0


def report_kernels(args: Kernels, session: Session, line: dict[str, Any], words: Sequence[str]) -> int:
    """Measures kernels and shows what was found; returns the exit code: 1 when one of our answers was wrong."""
    path = args.out / f"{args.name}.json"
    book = bench_kernels(args, session, line, words, path)
    if book is None:
        return 0
    show_kernels(book.rows)
    drawn = False
    with contextlib.suppress(ModuleNotFoundError):
        drawn = draw_lengths([row for row in book.rows if row["group"] != "carry"], path.with_suffix(".png"))
    if book.left_out:
        seconds = sum(one["estimated_s"] for one in book.left_out)
        print(f"left out for want of time: {len(book.left_out)} problems, about {seconds:.0f} s")
    for one in book.red:
        print(f"red, and so without a speed: {one}")
    picture = path.with_suffix(".png")
    print(f"rows: {path}{f' and {picture}' if drawn else ''}")
    return int(bool(book.red))


def report_host(args: Host, session: Session, line: dict[str, Any]) -> int:
    """Measures the host after a check; returns the exit code."""
    if not verify([args.problem(session.world_size)], ("zigzag",), session, args.impl):
        session.say("red: no speed is shown until the check is green")
        return 1
    rows = bench_host(args, session)
    if session.rank == 0:
        tabulate("host", rows)
        write_json(args.out / "host.json", {"machine": line, "rows": rows})
        print(f"rows: {args.out / 'host.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
