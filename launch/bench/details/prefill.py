"""Prefill over a cache: how fast beside the forward of training, at once, in chunks and in turns of a long conversation.

Owns what is measured of prefill and the rows. Refuses to know clocks (`timing`) and how rows are shown. Prints no speed of an
answer that was not checked.

Note [Prefill]
    Every contender does the attention of `layers` layers; times are per layer, and making steps counts with them, shared by the
    layers as in a model. The forward of training is `ring_attention` of the same rows, dealt zigzag. A prompt comes at once, or
    in chunks, of which all are timed together; a turn brings a few new tokens to a request that has all the others already.
    percent = 100 * (TFLOP/s per GPU) / (that of the forward of training on the whole prompt).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import ringattn
from ringattn.inference import PagedKVCache, attend
from ringattn.launch.bench.workloads import DTypeName, Problem, teraflops
from ringattn.launch.check.attention import DTYPES, CheckArgs, check, show
from ringattn.launch.check.inference import inference_cases
from ringattn.launch.runtime.ring_variants import ScheduleName, check_schedules, make_ring
from ringattn.launch.runtime.session import Keep, Session, check_numbers
from ringattn.launch.runtime.timing import time_together

IN_PLACE = 1024
"""New tokens of a turn up to which pages are read in place too: the kernel of decoding is not meant for more."""


@dataclass(frozen=True)
class Prefill:
    """All ranks: prefill over a cache beside the forward of training.

    Attributes:
        total: Tokens of the prompt.
        chunks: Lengths of chunks.
        turns: New tokens of a turn; each is timed with keys moving, with queries moving, both over copies of the pages, and
            where they are at most 1024 with the pages read in place.
        layers: Layers of the model; the cache has room for all of them.
        heads: Query heads.
        kv_heads: Key heads.
        head_dim: Of q, k and v.
        page_size: Tokens of a page.
        dtype: Of q, k and v.
        schedule: How keys move, as in `bench ring`.
        impl: Kernels: "auto", or the name of a kernel set.
        rounds: Rounds; the median counts.
        seconds: What the rounds should take; long prompts run fewer rounds, three at least.
        device: GPUs where there are any, or the CPU.
        out: Folder for the JSON.
        name: Of the file.
    """

    total: tuple[int, ...] = (1048576,)
    chunks: tuple[int, ...] = (32768,)
    turns: tuple[int, ...] = (32, 128, 1024, 8192)
    layers: int = 4
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64
    dtype: DTypeName = "bf16"
    schedule: ScheduleName = "auto"
    impl: str = "auto"
    rounds: int = 5
    seconds: float = 10.0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path = Path("runs/bench")
    name: str = "prefill"

    def __post_init__(self) -> None:
        """Refuses turns that are longer than a prompt."""
        check_numbers(self)
        for total, new in itertools.product(self.total, self.turns):
            if new > total:
                raise ValueError(
                    f"turns must be at most the tokens of each prompt, got {new} of {total}; pass other --turns"
                )


def bench_prefill(args: Prefill, session: Session, keep: Keep) -> list[dict[str, Any]] | None:
    """A row per prompt and contender; None when the check is red.

    Args:
        args: What.
        session: The ranks.
        keep: Who gets the rows.
    """
    check_schedules([args.schedule], session)
    cases = [case for case in inference_cases(full=False, device=session.device.type) if case.dtype == args.dtype]
    verdict = check(session, cases, CheckArgs(impl=args.impl, schedule=args.schedule, ahead=False))
    session.say(f"check: {len(verdict.rows) - len(verdict.red)} of {len(verdict.rows)} runs inside the error budget")
    if verdict.red or not verdict.rows:
        if session.rank == 0:
            show(verdict)
        return None
    alone = session.world_size == 1
    ring = ringattn.Ring(impl=args.impl) if alone else make_ring(args.schedule, impl=args.impl)
    rows = []
    for total in args.total:
        rows += measure(args, total, ring, session)
        keep(rows)
        ring.close()
    return rows


def measure(args: Prefill, total: int, ring: ringattn.Ring, session: Session) -> list[dict[str, Any]]:
    """The rows of one prompt."""
    problem = Problem("causal", total, 1, args.heads, args.kv_heads, args.head_dim, args.dtype, total)
    dtype, device = DTYPES[args.dtype], session.device
    cache = PagedKVCache(
        ring,
        layers=args.layers,
        kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        dtype=dtype,
        pages=-(-total // (args.page_size * ring.world_size)) + 2,
        page_size=args.page_size,
        device=device,
    )
    request = cache.add_request(total)
    sharding = ring.sharding(total)
    # the longest shard of any contender: rows are the same random ones for all
    most = min(total, max(sharding.shard_lens) + 2 * args.page_size * ring.world_size)
    generator = torch.Generator(device).manual_seed(ring.rank)
    q, k, v = (
        torch.randn(1, most, heads, args.head_dim, generator=generator, device=device).to(dtype)
        for heads in (args.heads, args.kv_heads, args.kv_heads)
    )
    moved: dict[str, str] = {}
    read: dict[str, str] = {}

    def extend(new: int, who: str, moves: str = "auto", reads: str = "auto") -> None:
        step = cache.extend([request], [new], mode="prefill")
        for layer in range(args.layers):
            attend(
                step, layer, q[:, : step.rows], k[:, : step.rows], v[:, : step.rows], comm_mode=moves, kv_access=reads
            )
        moved[who], read[who] = "/".join(step.comm_modes), "/".join(step.kv_accesses)

    def training() -> None:
        with torch.no_grad():
            for _ in range(args.layers):
                n = sharding.shard_len
                ringattn.ring_attention(q[:, :n], k[:, :n], v[:, :n], sharding, causal=True)

    def prompt(chunk: int, who: str) -> None:
        cache.truncate(request, 0)
        for start in range(0, total, chunk):
            extend(min(chunk, total - start), who)

    def turn(new: int, who: str, moves: str, reads: str) -> None:
        cache.truncate(request, total - new)
        extend(new, who, moves, reads)

    named: dict[str, tuple[int, Callable[[], None]]] = {
        "training forward": (total, training),
        "at once": (total, lambda: prompt(total, "at once")),
    }
    for chunk in args.chunks:
        who = f"chunks of {chunk}"
        named[who] = total, lambda chunk=chunk, who=who: prompt(chunk, who)
    for new in args.turns:
        hows = ("keys", "queries") if ring.world_size > 1 else ("keys",)
        for how in (*hows, "in place") if new <= IN_PLACE else hows:
            who = f"turn of {new}, {how}"
            ways = ("auto", "pages") if how == "in place" else (how, "copies")
            named[who] = new, lambda new=new, who=who, ways=ways: turn(new, who, *ways)
    # prompts are all there before turns are taken, and turns leave them as they were
    prompt(total, "at once")
    times = time_together({who: call for who, (_, call) in named.items()}, session, args.rounds, args.seconds, [])
    rows, standard = [], None
    for who, (new, _) in named.items():
        found = times[who]
        row: dict[str, Any] = {"bench": "prefill", "world_size": session.world_size, **dataclasses.asdict(problem)}
        row |= {"who": who, "new_tokens": new, "moved": moved.get(who), "read": read.get(who), "layers": args.layers}
        if found.calls_ms is None:
            rows.append(row | {"refused": found.refused})
            continue
        pairs = new * (total - new) + new * (new + 1) // 2
        flops = 4 * args.heads * args.head_dim * pairs / session.world_size
        ms = found.calls_ms / args.layers
        tflops = teraflops(flops, ms)
        standard = tflops if standard is None else standard
        rows.append(
            row | {"layer_ms": ms, "tflops": tflops, "percent": 100 * tflops / standard, "rounds": found.rounds}
        )
        session.say(f"  {total} tokens, {who}: {ms:.3f} ms per layer, {tflops:.3g} TFLOP/s per GPU")
    return rows
