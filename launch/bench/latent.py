"""Multi-head latent attention: a layer in training, with latents or expanded keys around the ring, and decode over a cache.

The layer begins with latents, rotary keys and the weights that expand them, and ends with o; its gradients are those of all five
inputs in training. "reader" and "owner" are `latent_attention` with this `expand`; "expanded" makes keys and values by torch and
calls `ring_attention`; torch's context parallelism gets the same keys and values. Decode calls `latent_attend` for a token in each
layer of a cache of random numbers, eagerly and as one CUDA graph, beside the bandwidth of the same run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

import ringattn
from ringattn.inference import ForwardBatch, PagedKVCache, latent_attend
from ringattn.launch.bench.baselines import Contender, Unsupported, attempt, torch_context_parallel, torch_cp_attention
from ringattn.launch.bench.correctness import disagreement
from ringattn.launch.bench.inference import measure_bandwidth
from ringattn.launch.bench.ring import WAYS, peak_gib
from ringattn.launch.bench.rows import BenchFlags, Rows
from ringattn.launch.bench.workloads import free_memory, own_stream
from ringattn.launch.common.ring_variants import ScheduleName, open_rings
from ringattn.launch.common.session import Keep, Session
from ringattn.launch.common.timing import time_together
from ringattn.numerics.error_budget import Budget

Shape = Literal["v2-lite", "v3", "tiny"]
SHAPES: dict[Shape, tuple[int, int, int, int, int]] = {
    "v2-lite": (16, 128, 64, 128, 512),
    "v3": (128, 128, 64, 128, 512),
    "tiny": (2, 16, 8, 16, 24),
}
"""Heads, dn, dr, dv and r: DeepSeek V2-Lite, DeepSeek V3, and one for CPUs."""
CHECK_TOKENS = 64
"""Tokens per rank at which every way is compared with the definition in fp64."""


@dataclass(frozen=True)
class LatentFlags(BenchFlags):
    """All ranks: a layer of latent attention in training, causal, by tokens per GPU; and decode over a cache.

    Attributes:
        parts: What is measured.
        decode_tokens: Tokens in the cache of "decode".
        layers: Layers of that cache.
        shapes: Shapes of a layer.
        tokens: Tokens per GPU.
        ways: Ways to expand; "torch_cp_allgather" and "torch_cp_alltoall" are torch's context parallelism.
        schedules: Our rings, as in `bench ring`; each runs each of our ways.
        rounds: Rounds; the median counts.
        seconds: Limit for the rounds of one problem.
        name: Of the JSON.
    """

    parts: tuple[Literal["training", "decode"], ...] = ("training",)
    decode_tokens: int = 1048576
    layers: int = 61
    shapes: tuple[Shape, ...] = ("v2-lite", "v3")
    tokens: tuple[int, ...] = (4096, 8192, 16384, 32768)
    ways: tuple[Literal["reader", "owner", "expanded", "torch_cp_allgather", "torch_cp_alltoall"], ...] = (
        "reader",
        "owner",
        "expanded",
    )
    schedules: tuple[ScheduleName, ...] = ("auto",)
    rounds: int = 7
    seconds: float = 2.0
    name: str = "latent"


def draw(shape: Shape, rows: int, device: torch.device, seed: int) -> list[Tensor]:
    """Return q, latents, rotary keys, k_up, v_up and do of `rows` tokens in bf16; weights are equal on all ranks."""
    h, dn, dr, dv, r = SHAPES[shape]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    mine, common = (torch.Generator(device).manual_seed(x) for x in (seed, 0))
    sizes = ((1, rows, h, dn + dr), (1, rows, r), (1, rows, dr), (h, dn, r), (h, dv, r), (1, rows, h, dv))
    found = []
    for i, size in enumerate(sizes):
        weight = i in (3, 4)
        x = torch.randn(size, generator=common if weight else mine, device=device) * (r**-0.5 if weight else 1)
        found.append(x.to(dtype).requires_grad_(i < 5))
    return found


def expand(latents: Tensor, rotary_keys: Tensor, k_up: Tensor, v_up: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys `b t h (dn + dr)` and values `b t h dv` as a model makes them: by one product."""
    h, dn, _ = k_up.shape
    both = latents @ torch.cat([k_up, v_up], 1).flatten(0, 1).T
    k, v = both.unflatten(2, (h, -1)).split([dn, v_up.shape[1]], 3)
    return torch.cat([k, rotary_keys[:, :, None].expand(*k.shape[:3], -1)], 3), v


def prepare(way: str, ring: ringattn.Ring, tensors: list[Tensor], sharding: ringattn.Sharding) -> Contender:
    """Prepare one way to compute a layer."""
    q, *keys, do = tensors

    def forward() -> Tensor:
        if way in ("reader", "owner"):
            return ringattn.latent_attention(q, *keys, sharding, causal=True, expand=way)  # pyright: ignore[reportCallIssue]
        k, v = expand(*keys)
        if way == "expanded":
            return ringattn.ring_attention(q, k, v, sharding, causal=True)
        if ring.world_size == 1 or not q.is_cuda:
            raise Unsupported("runs among several GPUs only")
        q_, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        return torch_cp_attention(way.removeprefix("torch_cp_"), q_, k, v).transpose(1, 2)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), (q, *keys), do)

    def answers() -> Iterator[tuple[str, Tensor]]:
        o = forward()
        yield "o", o.detach()
        yield from zip(("dq", "dlatents", "drotary"), torch.autograd.grad(o, (q, *keys[:2]), do), strict=True)

    return Contender(forward, both, both, answers)


def check(shape: Shape, way: str, ring: ringattn.Ring, session: Session) -> float:
    """Return the part of the error budget that o of a short layer uses up, on the worst rank."""
    sharding = ring.sharding(CHECK_TOKENS * ring.world_size)
    tensors = [x.detach() for x in draw(shape, sharding.shard_len, session.device, session.rank)]
    o = sharding.unshard(prepare(way, ring, tensors, sharding).forward())
    q, latents, rotary = (sharding.unshard(x) for x in tensors[:3])

    def define(dtype: torch.dtype) -> Tensor:
        keys = expand(*(x.to(dtype) for x in (latents, rotary, *tensors[3:5])))
        return ringattn.attention_reference(q.to(dtype), *keys, causal=True)

    exact = define(torch.float64)
    return session.maximum([Budget.of(exact, define(q.dtype)).ratio(o, exact)])[0]


def bench_latent(args: LatentFlags, session: Session, keep: Keep) -> list[dict[str, Any]] | None:
    """Return a row per shape, length, schedule and way; None when an answer of ours is wrong."""
    rows = Rows(session, keep, {"bench": "latent", "world_size": session.world_size})
    if "decode" in args.parts:
        bandwidth = measure_bandwidth(args.rounds, session)["read_gbps"]
        for shape in args.shapes:
            with own_stream(session.device):
                found = _decode(args, shape, session, bandwidth)
            rows.add({"part": "decode", "shape": shape, "who": "ringattn", "ours": True} | found)
    if "training" not in args.parts:
        return rows.rows
    rings = open_rings(args.schedules, session)
    ours = [way for way in args.ways if not way.startswith("torch")]
    for shape in args.shapes:
        for name, ring in rings.items():
            found = {way: check(shape, way, ring, session) for way in ours}
            session.say(f"check {shape}, {name}: " + ", ".join(f"{way} {x:.2f}" for way, x in found.items()))
            if not max(found.values()) <= 1:
                return None
    parallel = (
        any(way.startswith("torch") for way in args.ways) and session.world_size > 1 and session.device.type == "cuda"
    )
    with own_stream(session.device):
        for shape in args.shapes:
            for tokens in args.tokens:
                for row in _measure(args, shape, tokens, rings, session, parallel=parallel):
                    rows.add({"part": "training", "shape": shape, "tokens_per_rank": tokens, **row})
                session.barrier()
                for ring in rings.values():
                    ring.close()
                free_memory()
    return rows.rows


def _decode(args: LatentFlags, shape: Shape, session: Session, bandwidth: float) -> dict[str, Any]:
    """Return milliseconds per layer of a decode step, and its bytes and FLOPs per second by the graph where there is one."""
    h, _, dr, _, r = SHAPES[shape]
    n, device = args.decode_tokens, session.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    ring = ringattn.Ring()
    pages = -(-n // 64 // ring.world_size) + 2
    cache = PagedKVCache(
        ring, layers=args.layers, latent=(r, dr), dtype=dtype, pages=pages, page_size=64, device=device
    )
    request = cache.add_request(reserve=n + 64)
    cache.extend([request], [n], mode="prefill")  # pages whose rows are not computed but drawn
    generator = torch.Generator(device).manual_seed(0)  # not that of a graph that was captured
    for layer in cache.k:
        layer.normal_(generator=generator)
    q, latents, rotary, k_up, v_up, _ = (x.detach() for x in draw(shape, 1, device, 0))

    def attend(step: ForwardBatch) -> Tensor:
        return [latent_attend(step, layer, q, latents, rotary, k_up, v_up) for layer in range(args.layers)][-1]

    with torch.inference_mode():
        step = cache.extend([request], [1])
        if not session.maximum([float(not attend(step).isfinite().all())])[0] == 0:
            return {"refused": "wrong answer: o is not finite"}
        captured = ["attend"] if device.type == "cuda" else []
        time = time_together({"attend": lambda: attend(step)}, session, args.rounds, args.seconds, captured)["attend"]
    ms = (time.eager_ms if time.graph_ms is None else time.graph_ms) / args.layers
    size = n * cache.bytes_per_token / args.layers / ring.world_size
    found = {"tokens": n, "layers": args.layers, "cache_gib": cache.k.numel() * cache.k.element_size() / 2**30}
    found |= {
        "eager_ms_per_layer": time.eager_ms / args.layers,
        "graph_ms_per_layer": ms,
        "graph_refused": time.graph_refused,
    }
    found |= {"gbps": size / ms / 1e6, "share": size / ms / 1e6 / bandwidth}
    return found | {"tflops": 2.0 * h * n * (2 * r + dr) / ring.world_size / ms / 1e9}


def _measure(
    args: LatentFlags, shape: Shape, tokens: int, rings: dict[str, ringattn.Ring], session: Session, *, parallel: bool
) -> Iterator[dict[str, Any]]:
    tensors = draw(shape, tokens, session.device, session.rank)
    makers: dict[tuple[str, str], Callable[[], Contender]] = {}
    for name, ring in rings.items():
        sharding = ring.sharding(tokens * session.world_size)
        for way in args.ways:
            who = ("torch", way) if way.startswith("torch") else (name, way)
            makers[who] = lambda way=way, ring=ring, sharding=sharding: prepare(way, ring, tensors, sharding)
    able: dict[tuple[str, str], Contender] = {}
    refused: dict[tuple[str, str], str] = {}
    standard: list[Tensor] = []
    for who, make in makers.items():
        try:
            with _context(who, session, parallel=parallel):
                contender, answers = attempt(make, session)
            standard = standard or answers
            # as many roundings of bf16 as a second product has
            if wrong := disagreement([x / 2 for x in answers], [x / 2 for x in standard], "bf16", session):
                raise Unsupported(wrong)
            able[who] = contender
        except Unsupported as error:
            refused[who] = str(error)
        contender = answers = None
    standard.clear()
    peaks, times = {}, {}
    for who in able:
        with _context(who, session, parallel=parallel):
            peaks[who] = peak_gib(makers[who], rings.get(who[0]), session)
    mine = {who: one for who, one in able.items() if who[0] != "torch"}
    for group in (mine, {who: one for who, one in able.items() if who not in mine}):
        if group:
            with _context(next(iter(group)), session, parallel=parallel):
                calls = {f"{' '.join(who)} {way}": getattr(one, way) for who, one in group.items() for way in WAYS}
                times |= time_together(calls, session, args.rounds, args.seconds)
    for who in makers:
        row: dict[str, Any] = {"schedule": who[0], "who": who[1], "ours": who[0] != "torch"}
        if who in refused:
            yield row | {"refused": refused[who]}
            continue
        found = {f"{way}_ms": times[f"{' '.join(who)} {way}"].eager_ms for way in WAYS}
        yield row | found | {"peak_gib": peaks[who]}


def _context(who: tuple[str, str], session: Session, *, parallel: bool) -> Any:
    return torch_context_parallel(session) if parallel and who[0] == "torch" else contextlib.nullcontext()
