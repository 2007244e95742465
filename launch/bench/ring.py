"""Speed of the ring over several GPUs, beside other implementations and beside one GPU with the same work.

The ring is compared with a ring of one rank on the same GPUs, at the length where the same mask gives it a rank's share of the
pairs: one GPU with a rank's share of the work and no rank to wait for. percent = 100 * (TFLOP/s per GPU of the ring) / (TFLOP/s of
that); exposed ms = time of the ring minus that time, both for the same number of FLOPs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

import ringattn
from ringattn.launch.bench.baselines import (
    Contender,
    PeerName,
    Peers,
    Unsupported,
    attempt,
    make_sharding,
    prepare_ours,
)
from ringattn.launch.bench.correctness import check_rings, disagreement
from ringattn.launch.bench.rows import BenchFlags, Rows
from ringattn.launch.bench.workloads import (
    FACTORS,
    DTypeName,
    MaskName,
    PeakMemory,
    Problem,
    draw_inputs,
    free_memory,
    mask_of,
    own_stream,
    resolve_layouts,
    same_work,
    teraflops,
)
from ringattn.launch.check.attention import DTYPES
from ringattn.launch.common.ring_variants import ScheduleName, display_name, open_rings, single_rank_ring
from ringattn.launch.common.session import Keep, Session
from ringattn.launch.common.timing import Time, host_us, time_together
from ringattn.plan.ring_plan import RingPlan, make_plan, moved_rows

Layout = Literal["best", "contiguous", "striped", "zigzag", "balanced"]
WAYS = ("forward", "both")
CHAIN = 8
"""Layers that `--host` differentiates together."""


@dataclass(frozen=True)
class RingFlags(BenchFlags):
    """All ranks: the ring by tokens per GPU, as a share of the kernel alone at the same work.

    Attributes:
        tokens: Tokens per GPU; 1024 2048 4096 8192 16384 32768 65536 is the whole range.
        total: Tokens of the whole sequence instead, for strong scaling.
        masks: Masks.
        layouts: Layouts; "best": zigzag, under a window zigzag or contiguous, whichever moves fewer rows, and balanced for
            documents.
        schedules: Our rings: "auto" as users get it; "fused": one launch; "fused_saved_kv": one launch, and the backward uses the
            KV of the forward; "fused_kv_buffer": one launch, KV written into the ring's memory; "stepwise": step by step over the
            copy engine; "process_group": step by step over NCCL or gloo.
        virtual_size: Rings of so many virtual ranks beside them, each in the row virtual_N. Backwards are then timed alone, too.
        peers: Other implementations, under a causal mask in the zigzag layout; ring_flash_attn also for documents, in the
            contiguous one.
        heads: Query heads.
        kv_heads: Key/value heads, one or more counts.
        head_dim: Of q, k and v.
        batch: Batch elements.
        window: Tokens to the left a query sees under the window mask.
        dtype: Of q, k and v.
        impl: Kernels: "auto", or the name of a kernel set.
        graphs: Also replay our calls from a CUDA graph, and time what they cost the host.
        host: Time only how long calls keep the host, for --tokens so few that the device keeps up.
        calls: Calls of --host that are timed; the median counts.
        rounds: Rounds; the median counts.
        seconds: Limit for the rounds of one problem; long problems run fewer rounds, three at least.
        name: Of the JSON; "ring" by default, "host" with --host.
    """

    tokens: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    total: tuple[int, ...] = ()
    masks: tuple[MaskName, ...] = ("causal",)
    layouts: tuple[Layout, ...] = ("best",)
    schedules: tuple[ScheduleName, ...] = ("auto",)
    virtual_size: tuple[int, ...] = ()
    peers: tuple[PeerName, ...] = ()
    heads: int = 32
    kv_heads: tuple[int, ...] = (8, 32)
    head_dim: int = 128
    batch: int = 1
    window: int = 4095
    dtype: DTypeName = "bf16"
    impl: str = "auto"
    graphs: bool = True
    host: bool = False
    calls: int = 200
    rounds: int = 9
    seconds: float = 3.0
    name: str | None = None


def bytes_received(problem: Problem, sharding: ringattn.Sharding) -> dict[str, int]:
    """Return the bytes that a rank receives, on average and at most, in a forward and in a stepwise backward."""
    mask = mask_of(problem)
    element = DTYPES[problem.dtype].itemsize
    wide = 8 if problem.dtype == "fp64" else 4
    per_key = problem.batch * problem.kv_heads * problem.head_dim * 2
    # lse and delta travel with the queries, two numbers per row and head
    per_query = problem.batch * problem.heads * (problem.head_dim * (2 * element + wide) + 2 * wide)
    plans = {moving: make_plan(sharding.shards, sharding.shards, mask, moving) for moving in ("keys", "queries")}

    def mean(plan: RingPlan) -> int:
        ring_steps = (ring_step for rank in plan.ranks for ring_step in rank.ring_steps)
        return sum(one.num_rows for one in ring_steps if one and one.step) // len(plan.ranks)

    found = {}
    for name, count in (("", mean), ("_most", moved_rows)):
        keys, queries = (count(plans[moving]) for moving in ("keys", "queries"))
        found[f"forward{name}"] = keys * per_key * element
        found[f"backward{name}"] = min(keys * per_key * (element + wide), queries * per_query)
    return found


def bench_ring(args: RingFlags, session: Session, keep: Keep) -> list[dict[str, Any]] | None:
    """Return the rows of the ring, one per problem, layout and implementation; None when the check is red."""
    lengths = args.total or tuple(tokens * session.world_size for tokens in args.tokens)
    problems = [
        Problem(
            *(mask, n, args.batch, args.heads, kv_heads, args.head_dim, args.dtype, args.window),
            document=-(-n // 4) if mask == "varlen" else 0,
        )
        for kv_heads in args.kv_heads
        for mask in args.masks
        for n in lengths
    ]
    rings = open_rings(args.schedules, session)
    able: list[ScheduleName] = [schedule for schedule in args.schedules if display_name(schedule, session) in rings]
    if not check_rings(problems, args.layouts, session, args.impl, able, args.virtual_size):
        return None
    rings |= {f"virtual_{size}": ringattn.Ring(virtual_size=size) for size in args.virtual_size}
    alone = single_rank_ring(session)
    rows = Rows(session, keep, {"bench": "host" if args.host else "ring", "world_size": session.world_size})
    with Peers(session) as peers, own_stream(session.device):
        for problem in problems:
            for layout in resolve_layouts(args.layouts, problem, session.world_size):
                common = {"tokens_per_rank": problem.seq_len // session.world_size, "layout": layout}
                common |= {**dataclasses.asdict(problem), "pairs": problem.pairs}
                found = measure(args, problem, layout, rings, alone, peers, session)
                if args.host:
                    found = ({"who": who, **measure_host(args, problem, layout, rings[who], session)} for who in rings)
                for row in found:
                    rows.add(common | row)
                # no rank may still read memory that another one frees
                session.barrier()
                for ring in rings.values():
                    ring.close()
                free_memory()
    return rows.rows


def measure(
    args: RingFlags,
    problem: Problem,
    layout: str,
    rings: dict[str, ringattn.Ring],
    alone: ringattn.Ring,
    peers: Peers,
    session: Session,
) -> Iterator[dict[str, Any]]:
    """Yield a row per implementation of one problem: speeds where answers agree with our first ring, reasons elsewhere."""
    share = same_work(problem, session.world_size)
    makers: dict[str, Callable[[], Contender]] = {}
    for name, ring in rings.items():
        makers[name] = lambda ring=ring, kv_buffer=name == "fused_kv_buffer": prepare_ours(
            problem, ring, layout, session.device, args.impl, session.rank, kv_buffer=kv_buffer
        )
    if layout == ("contiguous" if problem.documents else "zigzag"):
        for who in dict.fromkeys(args.peers):
            makers[who] = lambda who=who: peers.prepare(who, problem, session.rank)
    plain = [name for name, ring in rings.items() if not ring.is_virtual]
    able: dict[str, Contender] = {}
    refused: dict[str, str] = {}
    standard: list[torch.Tensor] = []
    for who, make in makers.items():
        try:
            contender, answers = attempt(make, session)
            if who in plain:
                standard = standard or answers
            elif who in rings:
                answers = standard  # its rows have other positions; `check_rings` has compared it
            elif not standard:
                raise Unsupported("no answer of ours to compare with")
            if wrong := disagreement(answers, standard, problem.dtype, session):
                raise Unsupported(wrong)
            able[who] = contender
        except Unsupported as error:
            refused[who] = str(error)
        contender = answers = None
    peaks = {who: peak_gib(makers[who], rings.get(who), session) for who in able}
    single = prepare_ours(share, alone, "contiguous", session.device, args.impl, session.rank)
    ways = (*WAYS, "backward") if args.virtual_size else WAYS
    calls = {f"{who} {way}": getattr(one, way) for who, one in [*able.items(), ("alone", single)] for way in ways}
    captured = [name for name in calls if name.split()[0] in (*plain, "alone")] if args.graphs else []
    times = time_together(calls, session, args.rounds, args.seconds, captured)
    factor = problem.pairs / session.world_size / share.pairs
    for who in makers:
        row: dict[str, Any] = {"who": who, "ours": who in rings}
        if who in refused:
            yield row | {"refused": refused[who]}
            continue
        if who in plain:
            row["bytes_received"] = bytes_received(problem, make_sharding(problem, rings[who], layout))
        if able[who].note:
            row["note"] = able[who].note
        for way in ways:
            row |= _speeds(way, times[f"{who} {way}"], times[f"alone {way}"], factor, problem, session.world_size)
        yield row | {"peak_gib": peaks[who]}


def _speeds(
    way: str, found: Time, alone: Time, factor: float, problem: Problem, world_size: int
) -> dict[str, float | str | None]:
    """Return the numbers of one direction; those of graphs are compared with the graph of the kernel alone."""
    flops = FACTORS[way] * problem.flops / world_size
    same = alone.eager_ms * factor
    row: dict[str, float | str | None] = {
        "ms": found.eager_ms,
        "tflops": teraflops(flops, found.eager_ms),
        "alone_ms": same,
        "alone_tflops": teraflops(flops, same),
        "percent": 100 * same / found.eager_ms,
        "exposed_ms": found.eager_ms - same,
        "host_us": found.host_us,
        "graph_ms": found.graph_ms,
        "graph_refused": found.graph_refused,
        "rounds": found.rounds,
    }
    if found.graph_ms is not None:
        row["graph_tflops"] = teraflops(flops, found.graph_ms)
        if alone.graph_ms is not None:
            row["graph_percent"] = 100 * alone.graph_ms * factor / found.graph_ms
    return {f"{way}_{name}": value for name, value in row.items()}


def peak_gib(make: Callable[[], Contender], ring: ringattn.Ring | None, session: Session) -> float | None:
    """Return the peak of one forward and backward, inputs and gradients included, of the rank that holds most.

    The second of two steps counts: in the first, buffers grow. Infinity when it does not fit; None on a CPU.
    """
    session.barrier()
    if session.device.type != "cuda":
        return None
    if ring is not None:
        ring.close()
    free_memory()
    peak = PeakMemory(session, subtract_allocated=True)
    fits = True
    try:
        contender = make()
        for _ in range(2):
            session.barrier()
            peak.reset()
            contender.both()
        torch.cuda.synchronize(session.device)
    except torch.OutOfMemoryError:
        fits = False
    found = peak.gib()
    free_memory()
    return found if all(session.gather(fits)) else float("inf")


def measure_host(
    args: RingFlags, problem: Problem, layout: str, ring: ringattn.Ring, session: Session
) -> dict[str, float]:
    """Return the host's microseconds per call on an idle device.

    "inference" is a forward without autograd, "forward" one with it, "both" a forward and backward, "layer" one of a chain
    that is differentiated together. "_in_one_thread" is without autograd's own thread, whose core has a cold cache.
    """
    sharding = make_sharding(problem, ring, layout)
    *leaves, do = draw_inputs(problem, sharding.shard_len, session.device)
    layers = [[x.detach().requires_grad_() for x in leaves] for _ in range(CHAIN)]

    def forward(inputs: Sequence[torch.Tensor] = leaves) -> torch.Tensor:
        q, k, v = inputs
        return ringattn.ring_attention(q, k, v, sharding, impl=args.impl, **problem.options)

    def inference() -> None:
        with torch.no_grad():
            forward()

    def both() -> None:
        torch.autograd.grad(forward(), leaves, do)

    def layer() -> None:
        outputs = [forward(inputs) for inputs in layers]
        torch.autograd.grad(outputs, [x for inputs in layers for x in inputs], [do] * CHAIN)

    found: dict[str, float] = {}
    timed = ((inference, 1, True), (forward, 1, True), (both, 1, True), (both, 1, False))
    for call, count, threads in (*timed, (layer, CHAIN, True), (layer, CHAIN, False)):
        with torch.autograd.set_multithreading_enabled(threads):
            host_us(call, session, 10, 1)  # resolves the call
            us = host_us(call, session, max(1, args.calls // count), 1) / count
        found[f"{call.__name__}{'' if threads else '_in_one_thread'}_us"] = us
    return found
