"""Inference over a sharded cache: what a prompt and a token take by context, beside what they must take and beside transformers.

Owns what is measured, and the rows. Refuses to know how caches and models are made (`inference_model`), and how rows are shown.
Prints no speed before answers are right: of attention, and of the whole model.

Note [Two kinds of time]
    Where latency is meant (the first token, a token) it is the host's clock from the moment when all ranks are ready until the
    token is on the host, of the slowest rank: bookkeeping, launches and sampling are in it. Where the device is meant (attention
    alone) it is the device's own clock, or a CUDA graph's where one can be captured (Note [Times] and Note [Graphs] of `timing`).
    Everything is a median, and warm.

Note [What attention must take]
    bound us = the bytes of a layer's keys and values that lie on a rank (on the one that has most) over the read bandwidth that
    was measured in the same run: the best of summing 2 GiB as bf16, summing them as fp32, and copying them (read and written
    bytes); the row "bandwidth" says which. "us per layer" is all that `attend` does for a layer: keeping the new key, the
    kernel, the exchange between ranks. A pass goes over as many layers as make 2 GiB on a rank, so that no cache helps.
    ratio = us / bound us; ratio_with_15us = us / (bound us + 15); goal us = factor * bound us + 15, factor 1.25 for a batch below
    8 and 1.15 from there on.

Note [What a token must take]
    bound ms = (the parameters that a rank reads + keys and values on a rank) / the same bandwidth: all parameters without the
    embedding, and of MLPs and the head a rank's slice where they are split. With fewer layers than a model has, times do not
    simply scale: the head is read once whatever the layers; the share of the bound stays comparable.

Note [Which model]
    "generate" and "written" are measured with the model as transformers writes it. Then, on GPUs, it is what the server computes
    with: tensor parallel and compiled, checked once more; a row says how many modules. `--no-split` and `--no-fuse` leave it.

Note [The same prompt]
    "attend" brings a prompt to a cache of one layer, whole or in chunks, bookkeeping included; "ring" is the forward of training
    (`ring_attention`, causal, zigzag, recorded for a backward) over as many tokens. Both make the same pairs, take turns, and are
    timed by the device's clock.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

import ringattn
from ringattn.inference import CacheFull, PagedKVCache, attend
from ringattn.launch.bench.inference_checks import check_attention, check_decoded, check_model
from ringattn.launch.bench.inference_model import (
    PAGE_SIZE,
    Decoder,
    Shape,
    attending,
    draw_tokens,
    fill_by_prompt,
    full_cache,
    local_bytes,
    make_cache,
    make_model,
    pages_for,
)
from ringattn.launch.bench.ring import GIB, outside_torch
from ringattn.launch.bench.ring_baselines import prepare_ours
from ringattn.launch.bench.workloads import Problem, teraflops
from ringattn.launch.check.attention import DTYPES
from ringattn.launch.runtime.model_optimization import change_model
from ringattn.launch.runtime.session import Keep, Session, check_numbers
from ringattn.launch.runtime.timing import Time, reason, time_together
from ringattn.launch.train.metrics import mfu, peak_flops

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Part = Literal["prefill", "attention", "first", "token", "throughput", "generate", "written"]
Made = TypeVar("Made")

OVERHEAD_US = 15.0
"""What a layer's attention may take beyond its bytes (Note [What attention must take])."""
PASS_BYTES = 2 * GIB
"""Keys and values of a pass over layers, on a rank."""
WARM_TOKENS = 3
"""Tokens before those that are timed."""
PEER_FLOPS = 2.5e14
"""FLOP/s of one GPU that a prompt of transformers is expected to reach, to leave out what would take too long."""


@dataclass(frozen=True)
class Inference:
    """All ranks: prompts and tokens over a sharded cache, by context.

    Attributes:
        lengths: Tokens of context, of all ranks together.
        tokens_per_gpu: Tokens of context per rank instead: what one of many GPUs would have.
        layers: Of the Llama-shaped model, at each length; one number for all. 32 is the whole 8B model.
        batches: Requests that decode together.
        parts: "prefill": attention of a prompt beside the forward of training; "attention": attention of one new token over the
            cache, beside the bandwidth of memory; "first": time to first token; "token": time per token; "throughput": tokens/s by
            batch; "generate": `generate` of transformers, with our cache on all ranks, and with its own on one GPU.
        chunk: Tokens of a prompt that go through the model at once, of all ranks together.
        latency_ms: "throughput": how long a token may take.
        throughput_lengths: "throughput": contexts; none: the shortest of lengths.
        most_batch: "throughput": batches beyond this are not tried.
        dim: Width of the residual stream.
        heads: Query heads.
        kv_heads: Key/value heads.
        head_dim: Of q, k and v.
        mlp_dim: Hidden width of SwiGLU.
        vocab_size: Tokens in the vocabulary.
        dtype: Of parameters, activations, keys and values.
        kv_dtype: Keep keys and values in fp8 ("fp8"), or in dtype ("same").
        fuse: Compile decoder layers for decode (Note [Which model]).
        split: Read a slice of MLPs and of the head on each rank in decoding (likewise).
        tokens: Tokens that are timed one by one.
        rounds: Rounds of everything else; fewer where one takes long.
        patience_s: A prompt that takes longer is timed once, and transformers is not asked for one that is expected to.
        budget_s: Measurements that would begin later than this are left out, with a row that says so.
        device: GPUs where there are any, or the CPU.
        out: Folder for the JSON and the plot.
        name: Of the files.
    """

    lengths: tuple[int, ...] = (32768, 131072, 262144, 524288, 1048576)
    tokens_per_gpu: tuple[int, ...] = ()
    layers: tuple[int, ...] = (32,)
    batches: tuple[int, ...] = (1, 8)
    parts: tuple[Part, ...] = ("prefill", "attention", "first", "token", "throughput", "generate")
    chunk: int = 131072
    latency_ms: float = 50.0
    throughput_lengths: tuple[int, ...] = ()
    most_batch: int = 256
    dim: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    mlp_dim: int = 14336
    vocab_size: int = 128256
    dtype: Literal["bf16", "fp32"] = "bf16"
    kv_dtype: Literal["same", "fp8"] = "same"
    fuse: bool = True
    split: bool = True
    tokens: int = 16
    rounds: int = 3
    patience_s: float = 30.0
    budget_s: float = math.inf
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path = Path("runs/bench")
    name: str = "inference"

    def __post_init__(self) -> None:
        """Gives every length its layers, and refuses numbers that mean nothing."""
        given = self.tokens_per_gpu or self.lengths
        if len(self.layers) not in (1, len(given)):
            raise ValueError(f"layers must be one number or one per length, got {self.layers} for {given}")
        check_numbers(self)
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}; rotary embedding turns pairs")

    def contexts(self, world_size: int) -> dict[int, int]:
        """Layers by tokens of context."""
        lengths = tuple(n * world_size for n in self.tokens_per_gpu) or self.lengths
        depths = self.layers if len(self.layers) > 1 else self.layers * len(lengths)
        return dict(zip(lengths, depths, strict=True))

    def shape(self, layers: int) -> Shape:
        """The shape of a model of so many layers."""
        return Shape(self.dim, layers, self.heads, self.kv_heads, self.head_dim, self.mlp_dim, self.vocab_size)


def bench_inference(args: Inference, session: Session, keep: Keep) -> list[dict[str, Any]] | None:
    """Measures the parts that are asked for.

    Args:
        args: What.
        session: The ranks.
        keep: Called with all rows so far, on every rank, after each measurement: a run that is cut off keeps what it has.

    Returns:
        The rows, the same on every rank; None when a check is red.
    """
    bench = _Bench(args, session, keep)
    with torch.no_grad(), stream_of_its_own(session):
        for what, ratio in check_attention(args.shape(1), bench.dtype, bench.ring, session).items():
            session.say(f"check: attention, {what}: {ratio:.2f} of the error budget")
            if ratio > 1:
                return None
        bench.add(measure_bandwidth(args, session))
        contexts = args.contexts(session.world_size)
        for part, measure in (("prefill", measure_prompt_attention), ("attention", measure_attention)):
            if part in args.parts:
                for length in contexts:
                    measure(bench, length)
        for layers in dict.fromkeys(contexts.values()):
            if not {"first", "token", "throughput", "generate", "written"} & set(args.parts):
                break
            if not _measure_model(bench, layers, [n for n, depth in contexts.items() if depth == layers]):
                return None
    bench.ring.close()
    return bench.rows


def stream_of_its_own(session: Session) -> contextlib.AbstractContextManager[Any]:
    """Not the default stream, from which no graph can be captured."""
    if session.device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(session.device))


@dataclass
class _Bench:
    """What all measurements share.

    Attributes:
        args: What is asked for.
        session: The ranks.
        keep: Who gets the rows.
        ring: All ranks.
        began: When.
        rows: So far.
        changed: How many parts of the model at hand were fused, and split (Note [Which model]).
    """

    args: Inference
    session: Session
    keep: Keep
    ring: ringattn.Ring = field(default_factory=ringattn.Ring)
    began: float = field(default_factory=time.perf_counter)
    rows: list[dict[str, Any]] = field(default_factory=list)
    changed: dict[str, int] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.args.dtype]

    @property
    def kv_dtype(self) -> torch.dtype | None:
        return torch.float8_e4m3fn if self.args.kv_dtype == "fp8" else None

    @property
    def gbps(self) -> float:
        """The read bandwidth, 10^9 bytes per second."""
        return self.rows[0]["read_gbps"]

    def add(self, row: dict[str, Any]) -> None:
        """Completes a row, says it and keeps it."""
        shared = {name: getattr(self.args, name) for name in ("heads", "kv_heads", "head_dim", "dtype", "kv_dtype")}
        self.rows.append({"bench": "inference", "world_size": self.session.world_size, **shared, **row})
        self.session.say(f"  {describe_row(self.rows[-1])}")
        self.keep(self.rows)

    def change(self, model: PreTrainedModel) -> None:
        """Makes a model what the server computes with (Note [Which model])."""
        if self.session.device.type != "cuda":
            return
        found = change_model(model, self.ring, fused=self.args.fuse, split=self.args.split)
        self.changed = {"fused": found.fused, "split": found.split}
        for line in found.said:
            self.session.say(line)

    def facts(self, shape: Shape) -> dict[str, int]:
        """What all rows say of the model at hand."""
        return {name: getattr(shape, name) for name in ("layers", "dim", "mlp_dim", "vocab_size")} | self.changed

    def is_over(self, row: dict[str, Any]) -> bool:
        """Whether the time is up; then the row says so."""
        elapsed = self.session.maximum([time.perf_counter() - self.began])[0]
        if elapsed > self.args.budget_s:
            self.add(row | {"refused": f"left out: {self.args.budget_s:.0f} s were over"})
        return elapsed > self.args.budget_s

    def make(self, make: Callable[[], Made]) -> tuple[Made | None, str]:
        """Something that takes memory, on every rank or on none, and why not."""
        self.forget()
        made, why = None, ""
        try:
            made = make()
        except (torch.OutOfMemoryError, CacheFull, ValueError) as error:
            why = "out of memory" if isinstance(error, torch.OutOfMemoryError) else reason(error)
        said = [one for one in self.session.gather(why) if one]
        if said:
            made = None
            self.forget()
        return made, said[0] if said else ""

    def forget(self) -> None:
        """What one measurement held must not crowd the next."""
        self.session.barrier()
        gc.collect()
        if self.session.device.type == "cuda":
            torch.cuda.empty_cache()


def describe_row(row: dict[str, Any]) -> str:
    """A row for people who wait."""
    name = {"first": "first token", "token": "a token", "written": "a token of the model as written"}.get(
        row["part"], row["part"]
    )
    where: list[str] = [str(name)]
    if "seq_len" in row:
        where.append(f"{row['seq_len']} tokens")
    for field_name, form in (("layers", "{} layers"), ("batch", "batch {}"), ("who", "{}"), ("how", "{}")):
        if row.get(field_name) is not None:
            where.append(form.format(row[field_name]))
    forms = {
        "read_gbps": "{:.0f} GB/s",
        "ttft_s": "{:.3f} s",
        "ms": "{:.3f} ms",
        "us_per_layer": "{:.1f} us per layer",
        "ms_per_token": "{:.3f} ms per token",
        "tokens_per_s": "{:.0f} tokens/s",
        "tflops": "{:.3g} TFLOP/s per GPU",
        "percent_of_training": "{:.0f}% of training's forward",
        "ratio": "{:.2f} x the bound",
        "graph_refused": "no graph: {}",
        "refused": "{}",
    }
    said = [form.format(row[key]) for key, form in forms.items() if row.get(key) is not None]
    return f"{', '.join(where)}: {', '.join(said)}"


def measure_bandwidth(args: Inference, session: Session) -> dict[str, Any]:
    """How fast memory is read, on the slowest rank (Note [What attention must take])."""
    size = 2 * GIB if session.device.type == "cuda" else 2**24
    x = torch.zeros(size // 2, dtype=torch.bfloat16, device=session.device).normal_()
    wide, half = x.view(torch.float32), x[: len(x) // 2]
    ways: dict[str, tuple[Callable[[], Any], int]] = {
        "sum of bf16": (x.sum, size),
        "sum of fp32": (wide.sum, size),
        "copy": (lambda: x[len(x) // 2 :].copy_(half), size),
    }
    times = time_together({name: call for name, (call, _) in ways.items()}, session, max(5, args.rounds))
    found = {name: ways[name][1] / _ms(time_) / 1e6 for name, time_ in times.items()}
    best = max(found, key=lambda name: found[name])
    return {"part": "bandwidth", "who": best, "read_gbps": found[best], "all_gbps": found, "bytes": size}


def measure_prompt_attention(bench: _Bench, length: int) -> None:
    """Rows of `attend` for a whole prompt, at once and in chunks, and of training's forward (Note [The same prompt])."""
    args, session, ring = bench.args, bench.session, bench.ring
    row = {"part": "prefill", "seq_len": length, "layers": 1}
    if bench.is_over(row):
        return
    shape, world = args.shape(1), session.world_size
    problem = Problem("causal", length, 1, args.heads, args.kv_heads, args.head_dim, args.dtype, 0)

    def make() -> tuple[PagedKVCache, list[Tensor], Callable[[], Any]]:
        cache = make_cache(ring, shape, pages_for(1, length, world), bench.dtype, session.device, bench.kv_dtype)
        rows = -(-length // world) + 2 * PAGE_SIZE
        drawn = [
            torch.randn(1, rows, heads, args.head_dim, device=session.device, dtype=bench.dtype)
            for heads in (args.heads, args.kv_heads, args.kv_heads)
        ]
        return cache, drawn, prepare_ours(problem, ring, "zigzag", session.device, "auto", session.rank).forward

    made, why = bench.make(make)
    if made is None:
        bench.add(row | {"who": "attend", "refused": why})
        return
    cache, (q, k, v), forward = made

    def bring(chunk: int) -> None:
        request = cache.add_request(reserve=length)
        for start in range(0, length, chunk):
            step = cache.extend([request], [min(chunk, length - start)], mode="prefill")
            attend(step, 0, q[:, : step.rows], k[:, : step.rows], v[:, : step.rows])
        cache.free(request)

    def train() -> None:
        with torch.enable_grad():
            forward()

    calls: dict[str, Callable[[], Any]] = {"ring": train, "attend": lambda: bring(length)}
    if args.chunk < length:
        calls["attend_chunked"] = lambda: bring(args.chunk)
    # each is called twice before the rounds
    expected = (args.rounds + 2) * len(calls) * problem.flops / world / PEER_FLOPS
    times = time_together(calls, session, 1 if expected > args.patience_s else args.rounds)
    base = _ms(times["ring"])
    flops = problem.flops / world
    for who, time_ in times.items():
        ms = _ms(time_)
        speed = {
            "ms": ms,
            "tflops": teraflops(flops, ms),
            "percent_of_training": 100 * base / ms,
            "rounds": time_.rounds,
        }
        bench.add(row | {"who": who, "chunk": args.chunk if who == "attend_chunked" else None, **speed})


def measure_attention(bench: _Bench, length: int) -> None:
    """Rows of one new token's attention over the cache (Note [What attention must take])."""
    for batch in bench.args.batches:
        row = {"part": "attention", "seq_len": length, "batch": batch}
        if not bench.is_over(row):
            bench.add(row | _attention_row(bench, length, batch))


def _attention_row(bench: _Bench, length: int, batch: int) -> dict[str, Any]:
    args, session = bench.args, bench.session
    of_layer = (
        2
        * (bench.kv_dtype or bench.dtype).itemsize
        * args.kv_heads
        * args.head_dim
        * batch
        * length
        // session.world_size
    )
    layers = max(1, min(32, round(PASS_BYTES / of_layer))) if session.device.type == "cuda" else 2
    made, why = bench.make(lambda: _full(bench, args.shape(layers), batch, length, room=1))
    if made is None:
        return {"layers": layers, "refused": why}
    cache, requests = made
    step = cache.extend(requests, [1] * batch, mode="decode")
    # the same on every rank, as all that is computed in decoding
    generator = torch.Generator().manual_seed(length)
    q, k, v = (
        torch.randn(batch, 1, heads, args.head_dim, generator=generator).to(session.device, bench.dtype)
        for heads in (args.heads, args.kv_heads, args.kv_heads)
    )

    def one_pass() -> None:
        for layer in range(layers):
            attend(step, layer, q, k, v)

    off = check_decoded(step, layers - 1, q, attend(step, layers - 1, q, k, v), session)
    row: dict[str, Any] = {"layers": layers, "error": off}
    if not off <= 4 * torch.finfo(bench.dtype).eps:
        return row | {"refused": f"wrong answer: differs from plain torch by {off:.2g} of its size"}
    time_ = time_together({"pass": one_pass}, session, max(5, args.rounds), captured=["pass"])["pass"]
    return row | attention_numbers(time_, layers, batch, session.maximum([local_bytes(step)])[0], bench.gbps)


def attention_numbers(time_: Time, layers: int, batch: int, kv_bytes: float, gbps: float) -> dict[str, Any]:
    """What is said of a pass of attention over layers (Note [What attention must take]).

    Args:
        time_: Of a pass.
        layers: Of it.
        batch: Requests.
        kv_bytes: A layer's keys and values, on the rank that has most.
        gbps: Read bandwidth.

    Example:
        >>> found = attention_numbers(Time(graph_ms=0.5, calls_ms=2.0, host_us=800.0), 2, 1, 1e9, 5000.0)
        >>> found["us_per_layer"], found["bound_us"], found["ratio"], found["goal_us"], found["calls_us_per_layer"]
        (250.0, 200.0, 1.25, 265.0, 1000.0)
    """
    assert time_.calls_ms is not None, "plain calls are always timed"
    ms = time_.calls_ms if time_.graph_ms is None else time_.graph_ms
    us, bound = ms * 1e3 / layers, kv_bytes / gbps / 1e3
    factor = 1.25 if batch < 8 else 1.15
    return {
        "how": "calls" if time_.graph_ms is None else "graph",
        "us_per_layer": us,
        "calls_us_per_layer": time_.calls_ms * 1e3 / layers,
        "host_us_per_layer": None if time_.host_us is None else time_.host_us / layers,
        "graph_refused": time_.graph_refused,
        "kv_bytes": kv_bytes,
        "bound_us": bound,
        "ratio": us / bound,
        "ratio_with_15us": us / (bound + OVERHEAD_US),
        "goal_us": factor * bound + OVERHEAD_US,
        "goal_met": us <= factor * bound + OVERHEAD_US,
    }


def _measure_model(bench: _Bench, layers: int, lengths: Sequence[int]) -> bool:
    """All parts that need a model, of so many layers; whether it is right."""
    args, session = bench.args, bench.session
    shape = args.shape(layers)
    longest = max(*lengths, *args.throughput_lengths, 1024) + 64 * args.tokens
    model, why = bench.make(lambda: make_model(shape, longest, bench.dtype, session.device))
    if model is None:
        bench.add({"part": "first", "layers": layers, "refused": f"the model does not fit: {why}"})
        return True

    def is_right() -> bool:
        wrong = check_model(shape, bench.dtype, model, bench.ring, session)
        if wrong:
            session.say(wrong)
        return not wrong

    bench.changed.clear()
    if not is_right():
        return False
    for length in lengths:
        if "generate" in args.parts:
            measure_generate(bench, shape, model, length)
        if "written" in args.parts:
            for batch in args.batches:
                measure_token(bench, shape, model, length, batch, "written")
    bench.change(model)
    if any(bench.changed.values()) and not is_right():
        return False
    for length in lengths:
        if "first" in args.parts:
            measure_first_token(bench, shape, model, length)
        if "token" in args.parts:
            for batch in args.batches:
                measure_token(bench, shape, model, length, batch, "token")
    if "throughput" in args.parts and layers == args.layers[0]:
        for length in args.throughput_lengths or (min(args.contexts(session.world_size)),):
            measure_throughput(bench, shape, model, length)
    return True


def measure_first_token(bench: _Bench, shape: Shape, model: PreTrainedModel, length: int) -> None:
    """A row: from a prompt on the device to its first token on every host."""
    args, session, cuda = bench.args, bench.session, bench.session.device.type == "cuda"
    row = {"part": "first", "who": "ringattn", "seq_len": length, "batch": 1, "chunk": args.chunk}
    row |= bench.facts(shape)
    if bench.is_over(row):
        return
    pages = pages_for(1, length, session.world_size)
    cache, why = bench.make(lambda: make_cache(bench.ring, shape, pages, bench.dtype, session.device, bench.kv_dtype))
    if cache is None:
        bench.add(row | {"refused": why})
        return
    prompt = draw_tokens(length, args.vocab_size, session.device)

    def first(count: int) -> float:
        request = cache.add_request(reserve=count)
        session.barrier()
        began = time.perf_counter()
        fill_by_prompt(model, cache, request, prompt[:count], args.chunk).argmax(-1).tolist()
        seconds = session.maximum([time.perf_counter() - began])[0]
        cache.free(request)
        return seconds

    outside = outside_torch(session.device) if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats(session.device)
    taken: list[float] = []
    try:
        first(min(length, args.chunk + 1024))  # both kinds of chunks: with nothing before them, and with something
        while len(taken) < args.rounds and (not taken or sum(taken) + taken[0] <= args.patience_s):
            taken.append(first(length))
    except torch.OutOfMemoryError:
        # ranks hold equally much: when one is full they all are
        bench.add(row | {"refused": "out of memory"})
        return
    seconds = statistics.median(taken)
    flops, world = shape.prompt_flops(length), session.world_size
    peak = peak_flops(torch.cuda.get_device_name(session.device) if cuda else "CPU", bench.dtype)
    share = mfu(flops, seconds, world, peak)
    held = (
        torch.cuda.max_memory_allocated(session.device) + max(0, outside_torch(session.device) - outside) if cuda else 0
    )
    bench.add(
        row
        | {
            "ttft_s": seconds,
            "all_s": taken,
            "tokens_per_s": length / seconds,
            "model_flops": flops,
            "attention_flops": shape.attention_flops(length),
            "tflops": flops / seconds / world / 1e12,
            "mfu_percent": None if share is None else 100 * share,
            "peak_gib": session.maximum([held / GIB])[0] if cuda else None,
        }
    )


def measure_token(
    bench: _Bench, shape: Shape, model: PreTrainedModel, length: int, batch: int, part: Literal["token", "written"]
) -> None:
    """Rows of one token more for each of a batch, eager and as a CUDA graph (Note [What a token must take])."""
    row = {"part": part, "who": "ringattn", "seq_len": length, "batch": batch, **bench.facts(shape)}
    if not bench.is_over(row):
        for found in _token_rows(bench, shape, model, length, batch, ("eager", "graph")):
            bench.add(row | found)


def _token_rows(
    bench: _Bench, shape: Shape, model: PreTrainedModel, length: int, batch: int, ways: Sequence[str]
) -> list[dict[str, Any]]:
    """What is found in each way: "eager", "graph", or "fastest" for a graph where there is one."""
    args, session = bench.args, bench.session
    # each way goes on where the other one ended; a capture and its check take a token each, and so do the bytes
    room = len(ways) * (WARM_TOKENS + args.tokens + 2) + 1
    made, why = bench.make(lambda: _full(bench, shape, batch, length, room))
    if made is None:
        return [{"refused": why}]
    cache, requests = made
    kv_bytes = shape.layers * session.maximum([local_bytes(cache.extend(requests, [1] * batch, mode="decode"))])[0]
    sharing = session.world_size if bench.changed.get("split") else 1
    weight_bytes = shape.weight_bytes(bench.dtype.itemsize, sharing)
    bound = (weight_bytes + kv_bytes) / bench.gbps / 1e6
    common = {"kv_bytes": kv_bytes, "weight_bytes": weight_bytes, "bound_ms": bound}
    rows: list[dict[str, Any]] = []
    for way in ways:
        try:
            how, call = "eager", Decoder(model, cache, requests).next_tokens
            if way != "eager":
                replayed, refused = _replayed(model, cache, requests)
                if replayed is None and way == "graph":
                    rows.append({"how": "graph", "refused": refused})
                    continue
                how, call = ("eager", call) if replayed is None else ("graph", replayed)
            for _ in range(WARM_TOKENS):
                call()
            session.barrier()
            taken = []
            for _ in range(args.tokens):
                began = time.perf_counter()
                call()
                taken.append((time.perf_counter() - began) * 1e3)
        except torch.OutOfMemoryError:
            rows.append({"how": way, "refused": "out of memory"})
            continue
        taken = session.maximum(taken)
        ms = statistics.median(taken)
        numbers = {"ms_per_token": ms, "worst_ms": max(taken), "tokens_per_s": batch * 1e3 / ms, "ratio": ms / bound}
        rows.append({"how": how, **numbers, **common})
    return rows


def _replayed(
    model: PreTrainedModel, cache: PagedKVCache, requests: Sequence[int]
) -> tuple[Callable[[], list[list[int]]] | None, str | None]:
    """The next tokens by CUDA graphs, on every rank or on none, and why not."""
    from ringattn.integrations.transformers import cuda_graph_runner

    if why := cuda_graph_runner.capture_obstacle(model, cache):
        return None, why
    decoder = Decoder(model, cache, requests, cuda_graph_runner.CUDAGraphCapturer(cache.device))
    # which is recorded, and checked beside a plain call
    decoder.next_tokens()
    return (decoder.next_tokens if decoder.refusal is None else None), decoder.refusal


def measure_throughput(bench: _Bench, shape: Shape, model: PreTrainedModel, length: int) -> None:
    """Rows by batch: doubled until a token takes too long or memory is full, then halved in between; the largest is marked."""
    args = bench.args
    common = {"part": "throughput", "who": "ringattn", "seq_len": length, "latency_ms": args.latency_ms}
    common |= bench.facts(shape)
    found: dict[int, dict[str, Any]] = {}

    def fits(batch: int) -> bool:
        row = _token_rows(bench, shape, model, length, batch, ("fastest",))[0]
        row["within"] = row.get("ms_per_token", math.inf) <= args.latency_ms
        found[batch] = common | {"batch": batch} | row
        return row["within"]

    good, bad = 0, 1
    while bad <= args.most_batch and not bench.is_over(common | {"batch": bad}) and fits(bad):
        good, bad = bad, 2 * bad
    # to an eighth is near enough
    while good and bad in found and bad - good > max(1, good // 8) and not bench.is_over(common):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    for batch in sorted(found):
        bench.add(found[batch] | {"largest": batch == good})


def measure_generate(bench: _Bench, shape: Shape, model: PreTrainedModel, length: int) -> None:
    """Rows of `generate` with the same weights and prompt: ours on all ranks; on rank 0 sdpa and a cache of transformers."""
    args, session = bench.args, bench.session
    row = {"part": "generate", "seq_len": length, "batch": 1, **bench.facts(shape)}
    if bench.is_over(row):
        return
    prompt = draw_tokens(length, args.vocab_size, session.device)[None]
    ours = _generate_ours(bench, model, prompt)
    bench.add(row | {"who": "ringattn", "chunk": args.chunk} | ours)
    row["who"] = "transformers"
    expected = shape.prompt_flops(length) / PEER_FLOPS
    if session.device.type == "cuda" and expected > args.patience_s:
        bench.add(row | {"refused": f"not tried: a prompt would take about {expected:.0f} s on one GPU"})
        return
    bench.forget()
    found: dict[str, Any] = {}
    if session.rank == 0:
        try:
            with attending(model, "sdpa"):
                time_generate(model, prompt[:, :1024], WARM_TOKENS + 1)
                found = time_generate(model, prompt, 1 + args.tokens)
        except torch.OutOfMemoryError:
            found = {"refused": "out of memory"}
    bench.forget()
    bench.add(row | session.gather(found)[0])


def _generate_ours(bench: _Bench, model: PreTrainedModel, prompt: Tensor) -> dict[str, Any]:
    from ringattn.integrations.transformers import RingCache

    args, session = bench.args, bench.session
    room = prompt.shape[1] + max(args.tokens, WARM_TOKENS) + 1
    made, why = bench.make(lambda: RingCache(model, bench.ring, max_tokens=room, kv_dtype=bench.kv_dtype))
    if made is None:
        return {"refused": why}
    chunked: dict[str, Any] = {"past_key_values": made, "prefill_chunk_size": args.chunk}
    with made:
        time_generate(model, prompt[:, :1024], WARM_TOKENS + 1, **chunked)
        made.reset()
        session.barrier()
        found = time_generate(model, prompt, 1 + args.tokens, **chunked)
    return dict(zip(found, session.maximum(list(found.values())), strict=True))


def time_generate(model: PreTrainedModel, prompt: Tensor, tokens: int, **options: Any) -> dict[str, float]:
    """Seconds until the first token of `model.generate`, and milliseconds of a later one (the median)."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Clock(StoppingCriteria):
        """Is asked after every token."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:  # noqa: ARG002
            input_ids[:, -1].tolist()  # on the host, like ours
            self.times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    clock = Clock()
    if prompt.is_cuda:
        torch.cuda.synchronize(prompt.device)
    began = time.perf_counter()
    model.generate(  # pyright: ignore[reportCallIssue]
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([clock]),
        **options,
    )
    later = [1e3 * (b - a) for a, b in itertools.pairwise(clock.times)]
    return {"ttft_s": clock.times[0] - began, "ms_per_token": statistics.median(later), "worst_ms": max(later)}


def _full(bench: _Bench, shape: Shape, batch: int, length: int, room: int) -> tuple[PagedKVCache, list[int]]:
    return full_cache(bench.ring, shape, batch, length, room, bench.dtype, bench.session.device, bench.kv_dtype)


def _ms(time_: Time) -> float:
    assert time_.calls_ms is not None, "plain calls are always timed"
    return time_.calls_ms
