"""Speed of prompts and tokens over a sharded cache by context, beside their bounds and beside transformers.

Latencies (the first token, a token) are of the host's clock, from the moment when all ranks are ready until the slowest rank has
the token on its host. Attention alone is timed on the device (Note [Times] of `timing`). Everything is a warm median.

Note [Bounds of tokens]
    The bandwidth is the best of summing 2 GiB as bf16, summing them as fp32, and copying them (read and written bytes), in the
    same run. bound us of attention = the bytes of a layer's keys and values on the rank that has most, over that bandwidth.
    "us per layer" is all that `attend` does for a layer: storing the new key, the kernel, the reduction across ranks. A pass goes
    over as many layers as make 2 GiB on a rank, so that no cache helps. ratio_with_15us = us / (bound us + 15); goal us = factor *
    bound us + 15, with the factor 1.25 for a batch below 8 and 1.15 from there on.
    bound ms of a token = (the parameters that a rank reads + keys and values on a rank) / the same bandwidth. With fewer layers
    than a model has, times do not simply scale: the head is read once whatever the layers.

"generate" and "written" use the model as transformers writes it. The others, on GPUs, use that of the server: tensor parallel and
compiled, checked once more.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

import ringattn
from ringattn.inference import CacheFull, PagedKVCache, attend
from ringattn.launch.bench.baselines import prepare_ours
from ringattn.launch.bench.correctness import check_attention, check_decoded, check_model
from ringattn.launch.bench.inference_model import (
    PAGE_SIZE,
    ContextArgs,
    Decoder,
    draw_tokens,
    fill_at_random,
    fill_by_prompt,
    local_bytes,
    make_cache,
    make_model,
    make_sharded_model,
    pages_for,
    use_attention,
)
from ringattn.launch.bench.rows import Rows
from ringattn.launch.bench.workloads import PeakMemory, Problem, free_memory, mfu_percent, own_stream, teraflops
from ringattn.launch.check.attention import DTYPES
from ringattn.launch.common.model_optimization import optimize_model
from ringattn.launch.common.session import Keep, Session
from ringattn.launch.common.timing import Time, reason, time_together
from ringattn.sizing.shapes import ModelShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Part = Literal["prefill", "attention", "first", "token", "throughput", "generate", "written"]
Built = TypeVar("Built")
Row = dict[str, Any]

OVERHEAD_US = 15.0
"""Allowance of a layer's attention beyond its bytes (Note [Bounds of tokens])."""
PASS_BYTES = 2 * 2**30
"""Keys and values of a pass over layers, on a rank."""
CHECKED_LAYERS = 4
"""Layers of the model whose weights are sharded by the check: every rank has all of them before."""
WARMUP_TOKENS = 3
"""Tokens before those that are timed."""
PEER_FLOPS = 2.5e14
"""FLOP/s of one GPU in a prompt of transformers, to leave out prompts that would take too long."""


@dataclass(frozen=True)
class InferenceFlags(ContextArgs):
    """All ranks: prompts and tokens over a sharded cache, by context.

    Attributes:
        batches: Requests that decode together.
        parts: "prefill": attention of a prompt beside the forward of training; "attention": attention of one new token over the
            cache, beside the bandwidth of memory; "first": time to first token; "token": time per token; "written": time per token
            of the model as transformers writes it; "throughput": tokens/s by batch at the shortest
            context; "generate": `generate` of transformers, with our cache on all ranks, and with its own on one GPU.
        chunk: Tokens of a prompt that go through the model at once, of all ranks together.
        latency_ms: "throughput": limit of the time per token.
        most_batch: "throughput": batches beyond this are not tried.
        kv_dtype: Store keys and values in fp8 ("fp8"), or in dtype ("same").
        fuse: Compile decoder layers for decode, as the server does.
        split: Apply tensor parallelism for decode, as the server does.
        weights: "sharded": each rank stores its slice of them, as in the server; the check then shards a model of at most 4 layers.
        tokens: Tokens that are timed one by one.
        rounds: Rounds of everything else; fewer where one takes long.
        max_prompt_s: A prompt that takes longer is timed once, and transformers does not run one that is expected to.
        budget_s: Measurements that would begin later than this are left out, with a row that says so.
        name: Of the JSON.
    """

    lengths: tuple[int, ...] = (32768, 131072, 262144, 524288, 1048576)
    batches: tuple[int, ...] = (1, 8)
    parts: tuple[Part, ...] = ("prefill", "attention", "first", "token", "throughput", "generate")
    chunk: int = 131072
    latency_ms: float = 50.0
    most_batch: int = 256
    kv_dtype: Literal["same", "fp8"] = "same"
    fuse: bool = True
    split: bool = True
    weights: Literal["whole", "sharded"] = "whole"
    tokens: int = 16
    rounds: int = 3
    max_prompt_s: float = 30.0
    budget_s: float = math.inf
    name: str = "inference"


def bench_inference(args: InferenceFlags, session: Session, keep: Keep) -> list[Row] | None:
    """Return the rows of all parts, the same on every rank; None when a check is red."""
    bench = _Bench(args, session, keep)
    contexts = args.contexts
    with torch.no_grad(), own_stream(session.device):
        for what, ratio in check_attention(args.shape(1), args.dtype, bench.ring, session).items():
            session.say(f"check: attention, {what}: {ratio:.2f} of the error budget")
            if ratio > 1:
                return None
        bench.rows.add(measure_bandwidth(args.rounds, session))
        if "prefill" in args.parts:
            for length in contexts:
                bench.add({"part": "prefill", "seq_len": length, "layers": 1}, _prefill_rows(bench, length))
        if "attention" in args.parts:
            for length, batch in itertools.product(contexts, args.batches):
                layers = bench.pass_layers(length, batch)
                case = {"part": "attention", "seq_len": length, "batch": batch, "layers": layers}
                bench.add(case, _attention_rows(bench, length, batch, layers))
        if {"first", "token", "throughput", "generate", "written"} & set(args.parts):
            for layers in dict.fromkeys(contexts.values()):
                if not _measure_model(bench, layers, [n for n, depth in contexts.items() if depth == layers]):
                    return None
    bench.ring.close()
    return bench.rows.rows


class _LeftOut(Exception):
    """A case cannot be measured; raised on every rank with the same reason."""


class _Bench:
    """State of a run: one way to build, time, keep and leave out each case."""

    def __init__(self, args: InferenceFlags, session: Session, keep: Keep) -> None:
        self.args, self.session, self.ring = args, session, ringattn.Ring()
        self.dtype = DTYPES[args.dtype]
        self.kv_dtype = torch.float8_e4m3fn if args.kv_dtype == "fp8" else None
        names = ("heads", "kv_heads", "head_dim", "dtype", "kv_dtype", "weights")
        common = {name: getattr(args, name) for name in names}
        self.rows = Rows(session, keep, {"bench": "inference", "world_size": session.world_size, **common})
        self.began = time.perf_counter()

    @property
    def gbps(self) -> float:
        """The measured bandwidth, 10^9 bytes per second."""
        return self.rows.rows[0]["read_gbps"]

    def pass_layers(self, length: int, batch: int) -> int:
        """Return the layers whose keys and values on a rank are PASS_BYTES."""
        args, itemsize = self.args, (self.kv_dtype or self.dtype).itemsize
        layer_bytes = 2 * itemsize * args.kv_heads * args.head_dim * batch * length // self.session.world_size
        return max(1, min(32, round(PASS_BYTES / layer_bytes))) if self.session.device.type == "cuda" else 2

    def is_over(self, case: Row) -> bool:
        """Return whether the budget is spent; then add a row that says so."""
        over = self.session.maximum([time.perf_counter() - self.began])[0] > self.args.budget_s
        if over:
            self.rows.add(case | {"refused": f"left out: {self.args.budget_s:.0f} s were over"})
        return over

    def build(self, build: Callable[[], Built]) -> Built:
        """Return something that takes memory, on every rank, or raise _LeftOut on every rank."""
        built, why = None, ""
        self.free()
        try:
            built = build()
        except (torch.OutOfMemoryError, CacheFull, ValueError) as error:
            why = "out of memory" if isinstance(error, torch.OutOfMemoryError) else reason(error)
        if reasons := [one for one in self.session.gather(why) if one]:
            built = None
            self.free()
            raise _LeftOut(reasons[0])
        assert built is not None, "what was built without a reason against it"
        return built

    def run(self, case: Row, numbers: Iterable[Row]) -> list[Row]:
        """Measure a case by drawing its numbers; return its rows, which are not added yet."""
        try:
            return [case | found for found in numbers]
        except _LeftOut as why:
            return [case | {"refused": str(why)}]
        except torch.OutOfMemoryError:
            # ranks hold equally much: when one is full they all are
            return [case | {"refused": "out of memory"}]

    def add(self, case: Row, numbers: Iterable[Row]) -> None:
        """Run a case within the budget and add its rows."""
        if not self.is_over(case):
            for row in self.run(case, numbers):
                self.rows.add(row)

    def make_cache(self, shape: ModelShape, batch: int, length: int) -> PagedKVCache:
        """Return an empty cache with room for requests of equal length."""
        pages = pages_for(batch, length, self.session.world_size)
        return make_cache(self.ring, shape, pages, self.dtype, self.session.device, self.kv_dtype)

    def full_cache(self, shape: ModelShape, batch: int, length: int, new_tokens: int) -> tuple[PagedKVCache, list[int]]:
        """Build a cache full of random numbers; return it and its requests."""

        def build() -> tuple[PagedKVCache, list[int]]:
            cache = self.make_cache(shape, batch, length + new_tokens)
            return cache, fill_at_random(cache, batch, length, new_tokens)

        return self.build(build)

    def host_ms(self, call: Callable[[], Any], count: int = 1) -> list[float]:
        """Return the milliseconds of each of some calls, by the clock of the slowest host."""
        taken = []
        self.session.barrier()
        for _ in range(count):
            began = time.perf_counter()
            call()
            taken.append((time.perf_counter() - began) * 1e3)
        return self.session.maximum(taken)

    def free(self) -> None:
        """Free the memory of the last measurement on all ranks."""
        self.session.barrier()
        free_memory()


@dataclass
class _Model:
    """A model, the seconds in which it was made, and how many of its modules were compiled and split."""

    shape: ModelShape
    model: PreTrainedModel
    load_s: float
    changed: dict[str, int] = field(default_factory=dict)

    def case(self, part: str, length: int, **more: Any) -> Row:
        names = ("layers", "dim", "mlp_dim", "vocab_size")
        facts = {name: getattr(self.shape, name) for name in names} | self.changed
        return {"part": part, "who": "ringattn", "seq_len": length, "batch": 1, **facts, **more}


def measure_bandwidth(rounds: int, session: Session) -> Row:
    """Return how fast memory is read, on the slowest rank (Note [Bounds of tokens])."""
    size = PASS_BYTES if session.device.type == "cuda" else 2**24
    x = torch.zeros(size // 2, dtype=torch.bfloat16, device=session.device).normal_()
    wide, (half, other) = x.view(torch.float32), x.chunk(2)
    calls = {"sum of bf16": x.sum, "sum of fp32": wide.sum, "copy": lambda: other.copy_(half)}
    times = time_together(calls, session, max(5, rounds))
    found = {name: size / time_.eager_ms / 1e6 for name, time_ in times.items()}
    best = max(found, key=lambda name: found[name])
    return {"part": "bandwidth", "who": best, "read_gbps": found[best], "all_gbps": found, "bytes": size}


def _prefill_rows(bench: _Bench, length: int) -> Iterator[Row]:
    """Yield numbers of one layer's attention of a prompt: at once, in chunks, and the forward of training ("ring").

    All make the same pairs over as many tokens; training's forward is causal, zigzag, and recorded for a backward.
    """
    args, session, world = bench.args, bench.session, bench.session.world_size
    problem = Problem("causal", length, 1, args.heads, args.kv_heads, args.head_dim, args.dtype, 0)
    sizes = [(1, -(-length // world) + 2 * PAGE_SIZE, h, args.head_dim) for h in (args.heads, *[args.kv_heads] * 2)]
    cache, (q, k, v), ours = bench.build(
        lambda: (
            bench.make_cache(args.shape(1), 1, length),
            [torch.randn(size, device=session.device, dtype=bench.dtype) for size in sizes],
            prepare_ours(problem, bench.ring, "zigzag", session.device, "auto", session.rank),
        )
    )

    def prefill(chunk: int) -> None:
        request = cache.add_request(reserve=length)
        for start in range(0, length, chunk):
            step = cache.extend([request], [min(chunk, length - start)], mode="prefill")
            attend(step, 0, q[:, : step.rows], k[:, : step.rows], v[:, : step.rows])
        cache.free(request)

    calls: dict[str, Callable[[], Any]] = {"ring": torch.enable_grad()(ours.forward), "attend": lambda: prefill(length)}
    if args.chunk < length:
        calls["attend_chunked"] = lambda: prefill(args.chunk)
    # each is called twice before the rounds
    expected = (args.rounds + 2) * len(calls) * problem.flops / world / PEER_FLOPS
    times = time_together(calls, session, 1 if expected > args.max_prompt_s else args.rounds)
    for who, time_ in times.items():
        yield {
            "who": who,
            "chunk": args.chunk if who == "attend_chunked" else None,
            "ms": time_.eager_ms,
            "tflops": teraflops(problem.flops / world, time_.eager_ms),
            "percent_of_training": 100 * times["ring"].eager_ms / time_.eager_ms,
            "rounds": time_.rounds,
        }


def _attention_rows(bench: _Bench, length: int, batch: int, layers: int) -> Iterator[Row]:
    """Yield numbers of one new token's attention over the cache (Note [Bounds of tokens])."""
    args, session = bench.args, bench.session
    cache, requests = bench.full_cache(args.shape(layers), batch, length, new_tokens=1)
    step = cache.extend(requests, [1] * batch, mode="decode")
    # the same on every rank, like everything that is computed in decode
    generator = torch.Generator().manual_seed(length)
    q, k, v = (
        torch.randn(batch, 1, heads, args.head_dim, generator=generator).to(session.device, bench.dtype)
        for heads in (args.heads, args.kv_heads, args.kv_heads)
    )

    def one_pass() -> None:
        for layer in range(layers):
            attend(step, layer, q, k, v)

    off = check_decoded(step, layers - 1, q, attend(step, layers - 1, q, k, v), session)
    if not off <= 4 * torch.finfo(bench.dtype).eps:
        yield {"error": off, "refused": f"wrong answer: differs from plain torch by {off:.2g} of its size"}
        return
    time_ = time_together({"pass": one_pass}, session, max(5, args.rounds), captured=["pass"])["pass"]
    kv_bytes = session.maximum([local_bytes(step)])[0]
    yield {"error": off, **attention_numbers(time_, layers, batch, kv_bytes, bench.gbps)}


def attention_numbers(time_: Time, layers: int, batch: int, kv_bytes: float, gbps: float) -> Row:
    """Return the numbers of a pass of attention over layers, each with `kv_bytes` on the rank that has most.

    Example:
        >>> found = attention_numbers(Time(graph_ms=0.5, calls_ms=2.0, host_us=800.0), 2, 1, 1e9, 5000.0)
        >>> found["us_per_layer"], found["bound_us"], found["ratio"], found["goal_us"], found["calls_us_per_layer"]
        (250.0, 200.0, 1.25, 265.0, 1000.0)
    """
    us, bound = time_.best_ms * 1e3 / layers, kv_bytes / gbps / 1e3
    goal = (1.25 if batch < 8 else 1.15) * bound + OVERHEAD_US
    return {
        "how": "calls" if time_.graph_ms is None else "graph",
        "us_per_layer": us,
        "calls_us_per_layer": time_.eager_ms * 1e3 / layers,
        "host_us_per_layer": None if time_.host_us is None else time_.host_us / layers,
        "graph_refused": time_.graph_refused,
        "kv_bytes": kv_bytes,
        "bound_us": bound,
        "ratio": us / bound,
        "ratio_with_15us": us / (bound + OVERHEAD_US),
        "goal_us": goal,
        "goal_met": us <= goal,
    }


def _measure_model(bench: _Bench, layers: int, lengths: Sequence[int]) -> bool:
    """Measure all parts that need a model, of so many layers; return whether it is right."""
    args, session = bench.args, bench.session
    shape = args.shape(layers)
    longest = max(*lengths, 1024) + 64 * args.tokens
    sharded = args.weights == "sharded"

    def is_right(model: PreTrainedModel, shape: ModelShape) -> bool:
        wrong = check_model(shape, bench.dtype, model, bench.ring, session, shard=sharded)
        if wrong:
            session.say(wrong)
        return not wrong

    try:
        if sharded:
            few = args.shape(min(layers, CHECKED_LAYERS))
            if not is_right(bench.build(lambda: make_model(few, longest, bench.dtype, session.device)), few):
                return False
        make = partial(make_sharded_model, ring=bench.ring) if sharded else make_model
        began = time.perf_counter()
        built = bench.build(lambda: make(shape, longest, bench.dtype, session.device))
    except _LeftOut as why:
        bench.rows.add({"part": "first", "layers": layers, "refused": f"the model does not fit: {why}"})
        return True
    model = _Model(shape, built, session.maximum([time.perf_counter() - began])[0])

    def measure_tokens(part: Literal["token", "written"]) -> None:
        for length, batch, way in itertools.product(lengths, args.batches, ("eager", "graph")):
            case = model.case(part, length, batch=batch, how=way)
            bench.add(case, _token_rows(bench, model, case))

    if not sharded and not is_right(built, shape):
        return False
    if "generate" in args.parts:
        for length in lengths:
            measure_generate(bench, model, length)
    if "written" in args.parts:
        measure_tokens("written")
    if session.device.type == "cuda":
        found = optimize_model(built, bench.ring, fused=args.fuse, split=args.split and not sharded)
        model.changed = {"fused": found.fused, "split": found.split}
        for line in found.messages:
            session.say(line)
        if not sharded and any(model.changed.values()) and not is_right(built, shape):
            return False
    if "first" in args.parts:
        for length in lengths:
            bench.add(model.case("first", length, chunk=args.chunk), _first_token_rows(bench, model, length))
    if "token" in args.parts:
        measure_tokens("token")
    if "throughput" in args.parts and layers == args.layers[0]:
        measure_throughput(bench, model, min(args.lengths))
    return True


def _first_token_rows(bench: _Bench, model: _Model, length: int) -> Iterator[Row]:
    """Yield numbers of the time from a prompt on the device to its first token on every host."""
    args, session, shape = bench.args, bench.session, model.shape
    cache = bench.build(lambda: bench.make_cache(shape, 1, length))
    prompt = draw_tokens(length, args.vocab_size, session.device)

    def first_token(count: int) -> float:
        request = cache.add_request(reserve=count)
        (ms,) = bench.host_ms(
            lambda: fill_by_prompt(model.model, cache, request, prompt[:count], args.chunk).argmax(-1).tolist()
        )
        cache.free(request)
        return ms / 1e3

    memory = PeakMemory(session)
    # both kinds of chunks: with nothing before them, and with something
    first_token(min(length, args.chunk + 1024))
    taken: list[float] = []
    while len(taken) < args.rounds and (not taken or sum(taken) + taken[0] <= args.max_prompt_s):
        taken.append(first_token(length))
    seconds, flops = statistics.median(taken), shape.prompt_flops(length)
    yield {
        "ttft_s": seconds,
        "all_s": taken,
        "tokens_per_s": length / seconds,
        "model_flops": flops,
        "attention_flops": shape.attention_flops(length * (length + 1) // 2),
        "tflops": flops / seconds / session.world_size / 1e12,
        "mfu_percent": mfu_percent(flops, seconds, session, bench.dtype),
        "peak_gib": memory.gib(),
        "load_s": model.load_s,
        **_memory_by_part(bench, model, cache),
    }


def _memory_by_part(bench: _Bench, model: _Model, cache: PagedKVCache) -> Row:
    """Return the GiB of a rank's weights, gathered layers and cache, and of all that is in use on its GPU, other ranks' too."""
    from ringattn.integrations.transformers.model_forward import SHARDED
    from ringattn.integrations.transformers.sharded_weights.shard import ShardedWeights

    device, sharded = bench.session.device, SHARDED.get(model.model)
    sizes = {
        "weights_gib": sum(x.nbytes for x in model.model.parameters()),
        "gathered_gib": 2 * sharded.gather.buffer_bytes if isinstance(sharded, ShardedWeights) else 0,
        "cache_gib": cache.allocator.pages * cache.allocator.page_bytes,
    }
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        sizes["device_gib"] = total - free
    return {name: size / 2**30 for name, size in sizes.items()}


def _token_rows(bench: _Bench, model: _Model, case: Row) -> Iterator[Row]:
    """Yield numbers of one token more for each of a batch; "how" is eager, graph, or fastest: a graph where there is one."""
    from ringattn.integrations.transformers import cuda_graph_runner

    args, session, shape, batch = bench.args, bench.session, model.shape, case["batch"]
    # a capture and its check take a token each, and so do the bytes
    cache, requests = bench.full_cache(shape, batch, case["seq_len"], WARMUP_TOKENS + args.tokens + 3)
    step = cache.extend(requests, [1] * batch, mode="decode")
    kv_bytes = shape.layers * session.maximum([local_bytes(step)])[0]
    sharded = args.weights == "sharded"
    ranks = session.world_size if sharded or model.changed.get("split") else 1
    weight_bytes = shape.decode_weight_bytes(ranks=ranks, itemsize=bench.dtype.itemsize, sharded=sharded)
    bound = (weight_bytes + kv_bytes) / bench.gbps / 1e6
    how, decoder = "eager", Decoder(model.model, cache, requests)
    if case["how"] != "eager":
        if not (refused := cuda_graph_runner.capture_obstacle(model.model, cache)):
            replayed = Decoder(model.model, cache, requests, cuda_graph_runner.CUDAGraphCapturer(cache.device))
            # which is captured, and compared with a plain call
            replayed.next_tokens()
            if not (refused := replayed.runner.refusal):
                how, decoder = "graph", replayed
        if refused and case["how"] == "graph":
            raise _LeftOut(refused)
    for _ in range(WARMUP_TOKENS):
        decoder.next_tokens()
    taken = bench.host_ms(decoder.next_tokens, args.tokens)
    ms = statistics.median(taken)
    numbers = {"ms_per_token": ms, "worst_ms": max(taken), "tokens_per_s": batch * 1e3 / ms, "ratio": ms / bound}
    yield {"how": how, **numbers, "kv_bytes": kv_bytes, "weight_bytes": weight_bytes, "bound_ms": bound}


def measure_throughput(bench: _Bench, model: _Model, length: int) -> None:
    """Rows by batch: doubled until a token takes too long or memory is full, then halved in between; the largest is marked."""
    args = bench.args
    found: dict[int, Row] = {}

    def case(batch: int) -> Row:
        return model.case("throughput", length, batch=batch, latency_ms=args.latency_ms, how="fastest")

    def fits(batch: int) -> bool:
        (row,) = bench.run(case(batch), _token_rows(bench, model, case(batch)))
        found[batch] = row | {"within": row.get("ms_per_token", math.inf) <= args.latency_ms}
        return found[batch]["within"]

    good, bad = 0, 1
    while bad <= args.most_batch and not bench.is_over(case(bad)) and fits(bad):
        good, bad = bad, 2 * bad
    # to an eighth is near enough
    while good and bad in found and bad - good > max(1, good // 8) and not bench.is_over(case(bad)):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    for batch in sorted(found):
        bench.rows.add(found[batch] | {"largest": batch == good})


def measure_generate(bench: _Bench, model: _Model, length: int) -> None:
    """Rows of `generate` with the same weights and prompt: ours on all ranks; on rank 0 sdpa and a cache of transformers."""
    from ringattn.integrations.transformers import RingCache

    args, session = bench.args, bench.session
    prompt = draw_tokens(length, args.vocab_size, session.device)[None]

    def ours() -> Iterator[Row]:
        tokens = length + max(args.tokens, WARMUP_TOKENS) + 1
        cache = bench.build(lambda: RingCache(model.model, bench.ring, max_tokens=tokens, kv_dtype=bench.kv_dtype))
        options: dict[str, Any] = {"past_key_values": cache, "prefill_chunk_size": args.chunk}
        with cache:
            time_generate(model.model, prompt[:, :1024], WARMUP_TOKENS + 1, **options)
            cache.reset()
            session.barrier()
            found = time_generate(model.model, prompt, 1 + args.tokens, **options)
        yield dict(zip(found, session.maximum(list(found.values())), strict=True))

    def theirs() -> Iterator[Row]:
        found: Row = {}
        bench.free()
        if session.rank == 0:
            try:
                with use_attention(model.model, "sdpa"):
                    time_generate(model.model, prompt[:, :1024], WARMUP_TOKENS + 1)
                    found = time_generate(model.model, prompt, 1 + args.tokens)
            except torch.OutOfMemoryError:
                found = {"refused": "out of memory"}
        yield session.gather(found)[0]

    bench.add(model.case("generate", length, chunk=args.chunk), ours())
    case = model.case("generate", length, who="transformers")
    expected = model.shape.prompt_flops(length) / PEER_FLOPS
    if session.device.type == "cuda" and expected > args.max_prompt_s:
        bench.rows.add(case | {"refused": f"not tried: a prompt would take about {expected:.0f} s on one GPU"})
    else:
        bench.add(case, theirs())
        bench.free()


def time_generate(model: PreTrainedModel, prompt: Tensor, tokens: int, **options: Any) -> dict[str, float]:
    """Return the seconds until the first token of `model.generate`, and the milliseconds of a later one (median, most)."""
    from transformers import StoppingCriteriaList

    times: list[float] = []

    def clock(input_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        input_ids[:, -1].tolist()  # on the host, like ours
        times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    if prompt.is_cuda:
        torch.cuda.synchronize(prompt.device)
    began = time.perf_counter()
    model.generate(  # pyright: ignore[reportCallIssue]
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([clock]),  # pyright: ignore[reportArgumentType]
        **options,
    )
    later = [1e3 * (b - a) for a, b in itertools.pairwise(times)]
    return {"ttft_s": times[0] - began, "ms_per_token": statistics.median(later), "worst_ms": max(later)}
