"""The ring over several GPUs: how fast, how much of it waits, and beside whom.

Owns what is measured of a ring and the rows. Refuses to know clocks (`timing`), who computes (`ring_baselines`) and how
rows are shown. Prints no speed of an answer that was not checked.

Note [Same work]
    The ring is held against a ring of one rank on the same GPUs, at the length n1 where the same mask lets
    pairs / world_size pairs through: one GPU with a rank's share of the work and nobody to wait for.
    percent = 100 * (TFLOP/s per GPU of the ring) / (TFLOP/s of that); exposed ms = time of the ring minus that time,
    both for the same number of FLOPs.

Note [Peak]
    Torch counts what its allocator hands out. Memory that ranks map into each other, and what NCCL keeps, lies outside: the
    growth of what the device holds beyond torch's share is added. Everything else that is alive is subtracted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import ringattn
from ringattn.launch.bench.ring_baselines import PeerName, Peers, RingContender, attempt, deal, judge, prepare_ours
from ringattn.launch.bench.workloads import DTypeName, MaskName, Problem, same_work, teraflops
from ringattn.launch.check.attention import DTYPES, Case, CheckArgs, check, show
from ringattn.launch.runtime.ring_variants import ScheduleName, lonely_ring, open_rings, shown_name
from ringattn.launch.runtime.session import Keep, Session
from ringattn.launch.runtime.timing import Time, time_together
from ringattn.plan.mask import AttentionMask
from ringattn.plan.ring_plan import make_plan, moved_rows

Layout = Literal["best", "contiguous", "striped", "zigzag", "balanced"]
GIB = 2**30
FACTORS = {"forward": 1.0, "both": 3.5}
"""What is timed, as multiples of the forward's FLOPs."""


@dataclass(frozen=True)
class Ring:
    """All ranks: the ring by tokens per GPU, as a share of the kernel alone at the same work.

    Attributes:
        tokens: Tokens per GPU; 1024 2048 4096 8192 16384 32768 65536 is the whole range.
        total: Tokens of the whole sequence instead, for strong scaling.
        masks: What is visible.
        layouts: How positions are dealt out; "best": zigzag, under a window zigzag or contiguous, whichever moves fewer
            rows, and balanced for documents.
        schedules: Our rings: "auto" as users get it; "fused": one launch; "fused_saved_kv": likewise, whose
            backward has the keys that the forward brought; "fused_kv_buffer": likewise, of keys
            that were written where they leave from; "stepwise": step by step over the copy engine;
            "process_group": step by step over NCCL or gloo.
        peers: Others in the same turns, under a causal mask.
        heads: Query heads.
        kv_heads: Key/value heads, one or more counts.
        head_dim: Of q, k and v.
        batch: Batch elements.
        window: Tokens to the left a query sees under the window mask.
        dtype: Of q, k and v.
        impl: Kernels: "auto", or the name of a kernel set.
        graphs: Also replay our calls from a CUDA graph, and time what they cost the host.
        rounds: Rounds; the median counts.
        seconds: What the rounds of one problem should take; long problems run fewer rounds, three at least.
        device: GPUs where there are any, or the CPU.
        out: Folder for the JSON and the plot.
        name: Of the files.
    """

    tokens: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    total: tuple[int, ...] = ()
    masks: tuple[MaskName, ...] = ("causal",)
    layouts: tuple[Layout, ...] = ("best",)
    schedules: tuple[ScheduleName, ...] = ("auto",)
    peers: tuple[PeerName, ...] = ()
    heads: int = 32
    kv_heads: tuple[int, ...] = (8, 32)
    head_dim: int = 128
    batch: int = 1
    window: int = 4095
    dtype: DTypeName = "bf16"
    impl: str = "auto"
    graphs: bool = True
    rounds: int = 9
    seconds: float = 3.0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path = Path("runs/bench")
    name: str = "ring"


def mask_of(problem: Problem) -> AttentionMask:
    """The mask of a problem."""
    return AttentionMask(problem.seq_len, problem.seq_len, documents=problem.documents, **problem.options)


def best_layout(problem: Problem, world_size: int) -> str:
    """The layout that "best" stands for.

    Example:
        >>> best_layout(Problem("window", 4096, 1, 1, 1, 16, "bf16", window=7), 4)
        'contiguous'
    """
    if problem.mask == "documents":
        return "balanced"
    if problem.mask != "window":
        return "zigzag"
    from ringattn.plan.layouts import make_shards

    mask = mask_of(problem)
    rows = {}
    for layout in ("contiguous", "zigzag"):
        shards = make_shards(layout, problem.seq_len, world_size, mask)
        rows[layout] = moved_rows(make_plan(shards, shards, mask, "keys"))
    return min(rows, key=lambda layout: rows[layout])


def verify(
    problems: Sequence[Problem],
    layouts: Sequence[str],
    session: Session,
    impl: str,
    schedules: Sequence[ScheduleName] = ("auto",),
) -> bool:
    """Checks the same dtypes, heads, head dims, masks, layouts and schedules at a length the definition can afford.

    Says nothing when all is green; shows the table when not.
    """
    n = 1021 if session.device.type == "cuda" else 67
    cases: dict[tuple[object, ...], Case] = {}
    for problem in problems:
        dealt = dict.fromkeys(best_layout(problem, session.world_size) if one == "best" else one for one in layouts)
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
            layouts=tuple(dealt),
        )
    green = True
    for schedule in schedules:
        verdict = check(session, list(cases.values()), CheckArgs(impl=impl, schedule=schedule))
        name = "" if schedule == "auto" else f" {shown_name(schedule, session)}"
        inside = len(verdict.rows) - len(verdict.red)
        session.say(f"check{name}: {inside} of {len(verdict.rows)} runs inside the error budget")
        if (verdict.red or verdict.skipped or not verdict.rows) and session.rank == 0:
            show(verdict)
        green &= not verdict.red and not verdict.skipped and bool(verdict.rows)
    return green


def bytes_received(problem: Problem, sharding: ringattn.Sharding) -> dict[str, int]:
    """Bytes each rank receives from others, on average and at most, in a forward and in a backward that goes step by step."""
    mask = mask_of(problem)
    element = DTYPES[problem.dtype].itemsize
    wide = 8 if problem.dtype == "fp64" else 4
    per_key = problem.batch * problem.kv_heads * problem.head_dim * 2
    # lse and delta travel with the queries, two numbers per row and head
    per_query = problem.batch * problem.heads * (problem.head_dim * (2 * element + wide) + 2 * wide)
    mean, most = {}, {}
    for moving in ("keys", "queries"):
        plan = make_plan(sharding.shards, sharding.shards, mask, moving)
        ring_steps = [
            ring_step
            for rank in plan.ranks
            for ring_step in rank.ring_steps
            if ring_step is not None and ring_step.step > 0
        ]
        mean[moving] = sum(ring_step.num_rows for ring_step in ring_steps) // len(plan.ranks)
        most[moving] = moved_rows(plan)
    found = {}
    for name, rows in (("", mean), ("_most", most)):
        found[f"forward{name}"] = rows["keys"] * per_key * element
        found[f"backward{name}"] = min(rows["keys"] * per_key * (element + wide), rows["queries"] * per_query)
    return found


def bench_ring(args: Ring, session: Session, keep: Keep) -> list[dict[str, Any]] | None:
    """Rows of the ring, one per problem, layout and contender; None when the check is red.

    Args:
        args: What.
        session: The ranks.
        keep: Who gets the rows.

    Raises:
        Refusal: None of the rings can be, on any rank alike.
    """
    lengths = args.total or tuple(tokens * session.world_size for tokens in args.tokens)
    problems = [
        Problem(mask, n, args.batch, args.heads, kv_heads, args.head_dim, args.dtype, args.window)
        for kv_heads in args.kv_heads
        for mask in args.masks
        for n in lengths
    ]
    rings = open_rings(args.schedules, session)
    able: list[ScheduleName] = [schedule for schedule in args.schedules if shown_name(schedule, session) in rings]
    if not verify(problems, args.layouts, session, args.impl, able):
        return None
    alone = lonely_ring(session)
    rows = []
    with Peers(session) as peers, _stream_of_its_own(session):
        for problem in problems:
            chosen = best_layout(problem, session.world_size)
            for layout in dict.fromkeys(chosen if one == "best" else one for one in args.layouts):
                found = measure(args, problem, layout, rings, alone, peers, session)
                for row in found:
                    session.say(_brief(row))
                rows += found
                keep(rows)
                _forget(rings, session)
    return rows


def red_rings(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Why rows of `bench_ring` are no good: each of our rings that answers wrongly, or all of them where none was timed.

    Example:
        >>> rows = [{"who": who, "ours": True, "refused": "no memory"} for who in ("auto", "stepwise")]
        >>> red_rings(rows[:1]), red_rings([*rows, {"who": "fused_saved_kv", "ours": True, "refused": "wrong answer: o"}])
        (['auto: no memory'], ['auto: no memory', 'stepwise: no memory', 'fused_saved_kv: wrong answer: o'])
        >>> red_rings([rows[0], {"who": "stepwise", "ours": True, "forward_ms": 1.0}])
        []
    """
    ours = [row for row in rows if row["ours"]]
    timed = any("refused" not in row for row in ours)
    reasons = [(row["who"], row["refused"]) for row in ours if "refused" in row]
    return list(dict.fromkeys(f"{who}: {why}" for who, why in reasons if not timed or why.startswith("wrong answer")))


def _stream_of_its_own(session: Session) -> contextlib.AbstractContextManager[Any]:
    # graphs cannot be captured from the default stream
    return (
        torch.cuda.stream(torch.cuda.Stream(session.device))
        if session.device.type == "cuda"
        else contextlib.nullcontext()
    )


def _forget(rings: dict[str, ringattn.Ring], session: Session) -> None:
    """Saved tensors and buffers of one problem must not crowd the next."""
    # nobody may still read what another rank lets go of
    session.barrier()
    for ring in rings.values():
        ring.close()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure(
    args: Ring,
    problem: Problem,
    layout: str,
    rings: dict[str, ringattn.Ring],
    alone: ringattn.Ring,
    peers: Peers,
    session: Session,
) -> list[dict[str, Any]]:
    """A row per contender for one problem: speeds of those whose answers agree, the reason for the others."""
    share = same_work(problem, session.world_size)
    seed = session.rank
    makers: dict[str, Callable[[], RingContender]] = {}
    for name, ring in rings.items():
        makers[name] = lambda ring=ring, kv_buffer=name == "fused_kv_buffer": prepare_ours(
            problem, ring, layout, session.device, args.impl, seed, kv_buffer=kv_buffer
        )
    if layout == "zigzag":
        for who in dict.fromkeys(args.peers):
            makers[who] = lambda who=who: peers.prepare(who, problem, seed)
    able: dict[str, RingContender] = {}
    refused: dict[str, str] = {}
    peaks: dict[str, float | None] = {}
    standard: list[torch.Tensor] = []
    for who, make in makers.items():
        contender, answers, why = attempt(make, session)
        if contender is None:
            refused[who] = why
            continue
        if who in rings:
            standard = standard or answers
        elif not standard:
            refused[who] = "no answer of ours to hold it against"
            continue
        if wrong := judge(answers, standard, problem.dtype, session):
            refused[who] = wrong
            continue
        del answers
        able[who] = contender
    for who in able:
        ring = rings.get(who)
        peaks[who] = peak_of(makers[who], [] if ring is None else [ring], session)
    lonely = prepare_ours(share, alone, "contiguous", session.device, args.impl, seed)
    calls = {(who, way): getattr(one, way) for who, one in [*able.items(), ("alone", lonely)] for way in FACTORS}
    named = {f"{who} {way}": call for (who, way), call in calls.items()}
    captured = [f"{who} {way}" for who, way in calls if who in rings or who == "alone"] if args.graphs else []
    times = time_together(named, session, args.rounds, args.seconds, captured)
    common: dict[str, Any] = {
        "bench": "ring",
        "world_size": session.world_size,
        "tokens_per_rank": problem.seq_len // session.world_size,
        "layout": layout,
        **dataclasses.asdict(problem),
        "pairs": problem.pairs,
    }
    factor = problem.pairs / session.world_size / share.pairs
    rows = []
    for who in makers:
        row = {**common, "who": who, "ours": who in rings}
        if who in refused:
            rows.append(row | {"refused": refused[who]})
            continue
        if who in rings:
            row["bytes_received"] = bytes_received(problem, deal(problem, rings[who], layout))
        if able[who].note:
            row["note"] = able[who].note
        for way in FACTORS:
            row |= _speeds(way, times[f"{who} {way}"], times[f"alone {way}"], factor, problem, session.world_size)
        rows.append(row | {"peak_gib": peaks[who]})
    return rows


def _speeds(
    way: str, found: Time, alone: Time, factor: float, problem: Problem, world_size: int
) -> dict[str, float | str | None]:
    """The numbers of one direction; those of graphs are held against the graph of the kernel alone."""
    assert found.calls_ms is not None, "plain calls are always timed"
    assert alone.calls_ms is not None, "plain calls are always timed"
    flops = FACTORS[way] * problem.flops / world_size
    same = alone.calls_ms * factor
    row: dict[str, float | str | None] = {
        f"{way}_ms": found.calls_ms,
        f"{way}_tflops": teraflops(flops, found.calls_ms),
        f"{way}_alone_ms": same,
        f"{way}_alone_tflops": teraflops(flops, same),
        f"{way}_percent": 100 * same / found.calls_ms,
        f"{way}_exposed_ms": found.calls_ms - same,
        f"{way}_host_us": found.host_us,
        f"{way}_graph_ms": found.graph_ms,
        f"{way}_graph_refused": found.graph_refused,
        f"{way}_rounds": found.rounds,
    }
    if found.graph_ms is not None:
        row[f"{way}_graph_tflops"] = teraflops(flops, found.graph_ms)
    if found.graph_ms is not None and alone.graph_ms is not None:
        row[f"{way}_graph_percent"] = 100 * alone.graph_ms * factor / found.graph_ms
    return row


def _brief(row: dict[str, Any]) -> str:
    problem = f"{row['mask']} {row['tokens_per_rank']} x {row['world_size']} {row['heads']}/{row['kv_heads']}"
    if "refused" in row:
        return f"  {problem} {row['who']}: {row['refused']}"
    speeds = (f"{way} {row[f'{way}_tflops']:.3g} TFLOP/s {row[f'{way}_percent']:.0f}%" for way in FACTORS)
    return f"  {problem} {row['who']}: {', '.join(speeds)}"


def outside_torch(device: torch.device) -> int:
    """Bytes in use on a GPU that are not torch's allocator's (Note [Peak])."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def peak_of(
    make: Callable[[], RingContender], rings: Sequence[ringattn.Ring], session: Session, steps: int = 2
) -> float | None:
    """GiB at the peak of one forward and backward, inputs and gradients included (Note [Peak]).

    Args:
        make: Draws the inputs and prepares the call.
        rings: Whose buffers belong to it.
        session: The ranks.
        steps: Steps to make; the last one counts.

    Returns:
        The peak of the rank that holds most; infinity when it does not fit; None on a CPU, where nobody counts.
    """
    if session.device.type != "cuda":
        return None
    session.barrier()
    for ring in rings:
        ring.close()
    gc.collect()
    torch.cuda.empty_cache()
    before, outside = torch.cuda.memory_allocated(session.device), outside_torch(session.device)
    try:
        contender = make()
        for _ in range(steps):
            session.barrier()
            torch.cuda.reset_peak_memory_stats(session.device)
            contender.both()
        torch.cuda.synchronize(session.device)
        peak = torch.cuda.max_memory_allocated(session.device) - before
        peak += max(0, outside_torch(session.device) - outside)
    except torch.OutOfMemoryError:
        peak = math.inf
    torch.cuda.empty_cache()
    return session.maximum([peak / GIB])[0]
