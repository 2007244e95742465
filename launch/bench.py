"""How fast is it, and beside what? Kernels on one GPU, the ring over several, and memory against length.

Owns what is timed, how, and the formula of FLOPs. Refuses to print a speed before the same shapes pass `check`.

    python -m ringattn.launch.bench kernels
    torchrun --nproc_per_node 4 -m ringattn.launch.bench ring
    torchrun --nproc_per_node 4 -m ringattn.launch.bench memory

Note [FLOPs]
    Forward: 4 * b * h * d * pairs (two matrix products, a multiplication and an addition each), backward 2.5 times that
    (five products), forward and backward 3.5 times. `pairs` counts the (query, key) pairs the mask lets through and
    nothing else. A rank's share is the total over the number of ranks, whatever the layout gives it.

Note [Times]
    One time is the median over rounds; in a round every contender runs once in its turn, several calls back to back
    between two CUDA events, so that a machine that slows down slows all of them. With ranks, a round is as slow as its
    slowest rank. On a CPU a clock takes the place of the events.

Note [Same work]
    The ring is held against a ring of one rank on the same GPUs, at the length n1 where the same mask lets
    pairs / world_size pairs through: one GPU with a rank's share of the work and nobody to wait for.
    percent = 100 * (TFLOP/s per GPU of the ring) / (TFLOP/s of that); exposed ms = time of the ring minus that time,
    both for the same number of FLOPs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import ringattn
from ringattn.launch.check import DTYPES, Case, CheckArgs, check, show
from ringattn.launch.session import Session, describe, machine, open_session, parse, table, write_json

MaskName = Literal["full", "causal", "window", "documents"]
DTypeName = Literal["bf16", "fp16", "fp32", "fp64"]
Layout = Literal["contiguous", "striped", "zigzag", "balanced"]
GIB = 2**30


@dataclass(frozen=True)
class Kernels:
    """One GPU: our kernels beside cuDNN, FlashAttention-2 and FlexAttention as torch ships them.

    Attributes:
        lengths: Tokens.
        masks: What is visible.
        head_dims: Of q, k and v.
        heads: Query heads.
        kv_heads: Key/value heads. The first meets every length and mask, the others the last length, causal.
        batch: Batch elements.
        window: Tokens to the left a query sees under the window mask.
        dtype: Of q, k and v.
        beside: Who else runs, of cudnn, fa2, flex.
        impl: Our kernels: "auto", or the name of a kernel set.
        rounds: Rounds; the median counts.
        device: GPUs where there are any, or the CPU.
        out: Folder for the JSON and the plot.
    """

    lengths: tuple[int, ...] = (4096, 16384)
    masks: tuple[MaskName, ...] = ("full", "causal", "window", "documents")
    head_dims: tuple[int, ...] = (64, 128)
    heads: int = 16
    kv_heads: tuple[int, ...] = (16, 2)
    batch: int = 1
    window: int = 1024
    dtype: DTypeName = "bf16"
    beside: tuple[Literal["cudnn", "fa2", "flex"], ...] = ("cudnn", "fa2", "flex")
    impl: str = "auto"
    rounds: int = 9
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path = Path("runs/bench")


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


@dataclass(frozen=True)
class Problem:
    """One attention: what everybody who is timed computes.

    Attributes:
        mask: One of the four kinds.
        seq_len: Tokens of the whole sequence.
        batch: Batch elements.
        heads: Query heads.
        kv_heads: Key/value heads.
        head_dim: Of q, k and v.
        dtype: Of q, k and v.
        window: Tokens to the left under the window mask.
    """

    mask: MaskName
    seq_len: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: DTypeName
    window: int

    @property
    def documents(self) -> tuple[int, ...] | None:
        """Boundaries of packed documents, if the mask has any."""
        return pack_documents(self.seq_len) if self.mask == "documents" else None

    @property
    def options(self) -> dict[str, Any]:
        """The mask as keywords of `ring_attention` (documents belong to the sharding)."""
        if self.mask == "full":
            return {}
        return {"causal": True} | ({"window": (self.window, 0)} if self.mask == "window" else {})

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs of one batch element."""
        return visible_pairs(self.mask, self.seq_len, self.window, self.documents)

    @property
    def flops(self) -> int:
        """Forward FLOPs (Note [FLOPs])."""
        return 4 * self.batch * self.heads * self.head_dim * self.pairs


def pack_documents(seq_len: int) -> tuple[int, ...]:
    """Boundaries of documents as packed training data has them: many short, a few long, 1850 tokens on average.

    Always the same documents; the last one is cut where the sequence ends.
    """
    draw, ends = random.Random(0), [0]
    while ends[-1] < seq_len:
        ends.append(min(seq_len, ends[-1] + 1 + int(draw.lognormvariate(math.log(900), 1.2))))
    return tuple(ends)


def visible_pairs(mask: MaskName, seq_len: int, window: int, documents: Sequence[int] | None = None) -> int:
    """Counts the (query, key) pairs a mask lets through.

    Args:
        mask: "full", or one of "causal", "window" and "documents", which are all causal.
        seq_len: Tokens.
        window: Under "window": a query at i sees keys i - window .. i.
        documents: Under "documents": their cumulative boundaries.

    Returns:
        The count.

    Example:
        >>> visible_pairs("causal", 4, 0)
        10
        >>> visible_pairs("window", 4, 1)
        7
    """
    if mask == "full":
        return seq_len * seq_len
    cuts = documents if mask == "documents" and documents is not None else (0, seq_len)
    reach = window + 1 if mask == "window" else seq_len
    lengths = [stop - start for start, stop in itertools.pairwise(cuts)]
    return sum(min(n, reach) * (min(n, reach) + 1) // 2 + max(0, n - reach) * reach for n in lengths)


def same_work(problem: Problem, world_size: int) -> Problem:
    """The shortest problem under the same mask with at least a rank's share of the pairs (Note [Same work])."""
    low, high = 1, problem.seq_len
    while low < high:
        middle = (low + high) // 2
        if dataclasses.replace(problem, seq_len=middle).pairs * world_size >= problem.pairs:
            high = middle
        else:
            low = middle + 1
    return dataclasses.replace(problem, seq_len=low)


class Refused(Exception):
    """A contender cannot compute a problem here; the message says why."""


Run = tuple[Callable[[], Any], Callable[[], Any]]
"""Forward alone, and backward alone (of a forward that was done once)."""


def deal(problem: Problem, ring: ringattn.Ring, layout: str) -> ringattn.Sharding:
    """Who holds which positions; "balanced" is balanced for the mask of the problem."""
    balance = problem.options if layout == "balanced" else None
    return ring.sharding(problem.seq_len, layout=layout, documents=problem.documents, balance=balance)


def prepare_ours(problem: Problem, ring: ringattn.Ring, layout: str, device: torch.device, impl: str) -> Run:
    """Our attention on this rank's rows of a problem, b s h d."""
    sharding = deal(problem, ring, layout)
    q, k, v, do = _draw(problem, sharding.shard_len, device, "bshd")

    def forward() -> Tensor:
        return ringattn.ring_attention(q, k, v, sharding, impl=impl, **problem.options)

    o = forward()
    return forward, lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)


def prepare_sdpa(problem: Problem, device: torch.device, which: str) -> Run:
    """scaled_dot_product_attention with one of its back ends, b h s d."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if device.type != "cuda":
        raise Refused("runs on GPUs only")
    if problem.mask in ("window", "documents"):
        raise Refused(f"no {problem.mask} mask")
    backend = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}[which]
    q, k, v, do = _draw(problem, problem.seq_len, device, "bhsd")

    def forward() -> Tensor:
        with sdpa_kernel(backend):
            grouped = problem.heads != problem.kv_heads
            return F.scaled_dot_product_attention(q, k, v, is_causal=problem.mask == "causal", enable_gqa=grouped)

    o = forward()
    return forward, lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)


def prepare_flex(problem: Problem, device: torch.device) -> Run:
    """FlexAttention, compiled, with a block mask, b h s d."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if device.type != "cuda":
        raise Refused("runs on GPUs only")
    q, k, v, do = _draw(problem, problem.seq_len, device, "bhsd")
    n, left, block_mask = problem.seq_len, problem.window, None
    cuts = torch.tensor(problem.documents or (0, n), device=device)
    owner = torch.bucketize(torch.arange(n, device=device), cuts[1:], right=True)
    rules = {
        "causal": lambda b, h, i, j: i >= j,  # noqa: ARG005
        "window": lambda b, h, i, j: (i >= j) & (i - j <= left),  # noqa: ARG005
        "documents": lambda b, h, i, j: (i >= j) & (owner[i] == owner[j]),  # noqa: ARG005
    }
    if problem.mask != "full":
        block_mask = create_block_mask(rules[problem.mask], None, None, n, n, device=str(device))
    compiled = torch.compile(flex_attention, dynamic=False)

    def forward() -> Tensor:
        return compiled(q, k, v, block_mask=block_mask, enable_gqa=problem.heads != problem.kv_heads)

    o = forward()
    return forward, lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)


def _draw(problem: Problem, rows: int, device: torch.device, layout: str) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    drawn = []
    for heads in (problem.heads, problem.kv_heads, problem.kv_heads, problem.heads):
        shape = (problem.batch, rows, heads, problem.head_dim)
        x = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(DTYPES[problem.dtype])
        drawn.append((x.transpose(1, 2).contiguous() if layout == "bhsd" else x).requires_grad_(len(drawn) < 3))
    return drawn


def clock(call: Callable[[], Any], calls: int, device: torch.device) -> float:
    """Milliseconds per call, over `calls` calls back to back."""
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - started) * 1e3 / calls
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / calls


def take_turns(calls: dict[str, Callable[[], Any]], session: Session, rounds: int) -> dict[str, float]:
    """Milliseconds per call of every contender (Note [Times]); the same on every rank."""
    repeats = {}
    for name, call in calls.items():
        call()
        session.barrier()
        once = session.maximum([clock(call, 1, session.device)])[0]
        repeats[name] = max(1, min(50, math.ceil(20 / once))) if session.device.type == "cuda" else 1
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            session.barrier()
            times[name].append(clock(call, repeats[name], session.device))
    return {name: statistics.median(session.maximum(found)) for name, found in times.items()}


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


def _teraflops(flops: float, ms: float) -> float:
    return flops / ms / 1e9


def bench_kernels(args: Kernels, session: Session) -> list[dict[str, Any]] | None:
    """Rows of one GPU, one per problem and contender; None when the check is red."""
    if session.world_size > 1:
        raise SystemExit("bench kernels must run in one process; start it with python -m, and bench ring with torchrun")
    first, *others = args.kv_heads
    combinations = [(first, args.lengths, args.masks), *((count, args.lengths[-1:], ("causal",)) for count in others)]
    problems: list[Problem] = [
        Problem(mask, n, args.batch, args.heads, kv_heads, head_dim, args.dtype, args.window)
        for head_dim in args.head_dims
        for kv_heads, lengths, masks in combinations
        for n in lengths
        for mask in masks
    ]
    if not verify(problems, ("contiguous",), session, args.impl):
        return None
    ring = ringattn.Ring()
    makers: dict[str, Callable[[Problem], Run]] = {
        "ours": lambda problem: prepare_ours(problem, ring, "contiguous", session.device, args.impl),
        "cudnn": lambda problem: prepare_sdpa(problem, session.device, "cudnn"),
        "fa2": lambda problem: prepare_sdpa(problem, session.device, "fa2"),
        "flex": lambda problem: prepare_flex(problem, session.device),
    }
    rows = []
    for problem in problems:
        calls: dict[str, Callable[[], Any]] = {}
        refusals: dict[str, str] = {}
        for name in ("ours", *args.beside):
            try:
                calls[f"{name} forward"], calls[f"{name} backward"] = makers[name](problem)
            except (Refused, RuntimeError) as refusal:
                if name == "ours":
                    raise
                refusals[name] = str(refusal).split("\n")[0]
        times = take_turns(calls, session, args.rounds)
        for name in ("ours", *args.beside):
            row: dict[str, Any] = {
                "bench": "kernels",
                "who": name,
                **dataclasses.asdict(problem),
                "pairs": problem.pairs,
            }
            if name in refusals:
                rows.append(row | {"refused": refusals[name]})
                continue
            forward, backward = times[f"{name} forward"], times[f"{name} backward"]
            speed = {
                "forward_ms": forward,
                "backward_ms": backward,
                "forward_tflops": _teraflops(problem.flops, forward),
                "backward_tflops": _teraflops(2.5 * problem.flops, backward),
            }
            rows.append(row | speed)
        # compiled graphs and saved tensors of one problem must not crowd the next
        del calls
        torch.compiler.reset()
    return rows


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
                row[f"{name}_tflops"] = _teraflops(flops, times[name])
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
        q, k, v, do = _draw(problem, sharding.shard_len, session.device, "bshd")
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
    "kernels": {
        "who": "{}",
        "mask": "{}",
        "seq_len": "{}",
        "heads": "{}",
        "kv_heads": "{}",
        "head_dim": "{}",
        "forward_ms": "{:.3f}",
        "forward_tflops": "{:.3g}",
        "backward_ms": "{:.3f}",
        "backward_tflops": "{:.3g}",
        "refused": "{}",
    },
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
}
"""What the table of each bench shows of its rows, and how."""


def tabulate(kind: str, rows: Sequence[dict[str, Any]]) -> None:
    """Prints the rows of one bench."""
    columns = {name: form for name, form in COLUMNS[kind].items() if any(row.get(name) is not None for row in rows)}
    cells = [
        [None if row.get(name) is None else form.format(row[name]) for name, form in columns.items()] for row in rows
    ]
    table(f"bench {kind}", [name.replace("_", " ") for name in columns], cells)


def plot(kind: str, rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Draws the rows of one bench into a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels = {
        "kernels": [("seq_len", "forward_tflops"), ("seq_len", "backward_tflops")],
        "ring": [("tokens_per_rank", "forward_tflops"), ("tokens_per_rank", "both_tflops")],
        "memory": [("seq_len", "peak_gib")],
    }[kind]
    naming = {
        "kernels": ("who", "mask", "head_dim", "kv_heads"),
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
    args: Kernels | Ring | Memory = parse(Kernels | Ring | Memory, arguments, "bench", "Measures, after checking.")
    with open_session(args.device) as session:
        line = machine(session)
        session.say(describe(line))
        if isinstance(args, Kernels):
            kind, rows = "kernels", bench_kernels(args, session)
        elif isinstance(args, Ring):
            kind, rows = "ring", bench_ring(args, session)
        else:
            kind, rows = "memory", bench_memory(args, session)
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


if __name__ == "__main__":
    sys.exit(main())
