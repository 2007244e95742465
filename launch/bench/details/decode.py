"""How fast is decode over pages on one GPU, beside the bandwidth of its memory?

Owns the problems, their check, and the formula of bytes. Refuses to know how kernels work: configurations are passed through.

Note [Bytes]
    A decode step reads the keys and values of every request once: GB/s are the bytes of K and V (scales included) per time,
    and nothing else counts. They stand beside what the same run reads (a sum over as many bytes) and copies (bytes read
    and written) per time. Layers follow each other in a model, so nothing is in a cache when a call begins: calls go round over
    pools that together are larger than the cache.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ringattn.kernels.decode import dispatch as contract
from ringattn.kernels.decode import eager as decode_eager
from ringattn.kernels.decode.dispatch import FP8, PageTable
from ringattn.kernels.interface import Score
from ringattn.kernels.partials.packed import finish_parts, size
from ringattn.launch.bench.details.host import host_us
from ringattn.launch.runtime.session import Session, check_numbers, write_json
from ringattn.launch.runtime.timing import Time, reason, time_calls

Group = Literal["target", "batch", "lengths", "tokens", "heads", "fp8", "uneven"]
GROUPS: tuple[Group, ...] = ("target", "batch", "lengths", "tokens", "heads", "fp8", "uneven")
CACHED = 256 * 2**20
"""Bytes of pools between which calls alternate, at least: five times the level-two cache of an H200."""
CANDIDATES = (
    "64,4,4,2", "64,4,3,3", "64,4,6,1", "64,8,4,2", "32,4,4,4", "32,4,6,2", "32,2,4,4", "64,4,4,4", "64,4,4,6", "64,8,3,3",
)  # fmt: skip
"""Configurations of a sweep: keys of a tile, warps, stages, programs for each multiprocessor."""
WRONG_O, WRONG_LSE = 2**-7, 1e-3


@dataclass(frozen=True)
class Decode:
    """One GPU: attention of a few new tokens over this rank's pages of a cache.

    Attributes:
        groups: Which problems: the target (one request, one new token), a batch, other lengths, more new tokens, other heads and
            head dims, fp8 pages, requests of very different lengths.
        tokens: Cached tokens of the target, and of all requests of the other groups together.
        lengths: Cached tokens of lengths.
        new_tokens: New tokens per request of tokens.
        batch: Requests of batch and uneven.
        page_size: Rows of a page.
        configs: Instead of the chosen configuration, these: "block_n,warps,stages,per_sm" each, or "chosen".
        sweep: The chosen configuration and a list of candidates.
        peers: Beside it, attention over the same keys in one piece, without pages: sdpa, flex.
        room_gib: What pools may take; larger problems are left out.
        rounds: Rounds; the median counts.
        round_s: Seconds that all rounds of one problem may take; there are three rounds at least.
        budget_s: Seconds for everything; 0 for no limit.
        device: GPUs where there are any, or the CPU.
        out: Folder for the JSON.
        name: Of the JSON.
    """

    groups: tuple[Group, ...] = GROUPS
    tokens: int = 262144
    lengths: tuple[int, ...] = (8192, 32768, 131072, 524288, 1048576)
    new_tokens: tuple[int, ...] = (4, 16)
    batch: int = 8
    page_size: int = 64
    configs: tuple[str, ...] = ("chosen",)
    sweep: bool = False
    peers: tuple[Literal["sdpa", "flex"], ...] = ()
    room_gib: float = 48.0
    rounds: int = 9
    round_s: float = 3.0
    budget_s: float = 0.0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path = Path("runs/bench")
    name: str = "decode"

    def __post_init__(self) -> None:
        """Refuses what is no configuration, and requests that do not even have their new tokens."""
        check_numbers(self)
        for config in self.configs:
            if config != "chosen" and not re.fullmatch(r"\d+,\d+,\d+,\d+", config):
                raise ValueError(
                    f"configs must be chosen or block_n,warps,stages,per_sm, got {config}; pass such as 64,4,4,2"
                )
        for problem in list_problems(self):
            if min(problem.requests) < problem.new_tokens:
                raise ValueError(
                    f"each request must have its new tokens, got {min(problem.requests)} tokens of which {problem.new_tokens} "
                    f"are new in group {problem.group}; pass more --tokens and --lengths, or a smaller --batch"
                )


@dataclass(frozen=True)
class Problem:
    """One decode call.

    Attributes:
        group: Why it is measured.
        requests: Cached tokens of each request.
        new_tokens: Of each request.
        heads: Query heads.
        kv_heads: Key/value heads.
        head_dim: Of q, k and v.
        pool: "bf16" or "fp8".
    """

    group: Group
    requests: tuple[int, ...]
    new_tokens: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    pool: Literal["bf16", "fp8"] = "bf16"

    @property
    def kv_bytes(self) -> int:
        """Note [Bytes]."""
        row = self.head_dim + 4 if self.pool == "fp8" else 2 * self.head_dim
        return 2 * sum(self.requests) * self.kv_heads * row

    def __str__(self) -> str:
        b, most = len(self.requests), max(self.requests)
        lengths = f"b{b} n{most}" if min(self.requests) == most else f"b{b} n{min(self.requests)}..{most}"
        return f"{lengths} s{self.new_tokens} h{self.heads}/{self.kv_heads} d{self.head_dim} {self.pool}"


@dataclass(frozen=True)
class Call:
    """The arguments of one decode call, up to the stack it leaves."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: PageTable
    lo: Tensor
    hi: Tensor
    positions: Tensor
    score: Score
    k_scale: Tensor | None
    v_scale: Tensor | None

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, PageTable, Tensor, Tensor, Tensor, Score]:
        """The positional ones of `decode` before parts."""
        return self.q, self.k, self.v, self.table, self.lo, self.hi, self.positions, self.score


def list_problems(args: Decode) -> list[Problem]:
    """What is to be measured, most important first, each once."""
    n, b = args.tokens, args.batch
    share = n // b
    long = n - (b - 1) * (share // 8)
    found: dict[Group, list[Problem]] = {
        "target": [Problem("target", (n,))],
        "batch": [Problem("batch", (share,) * b), Problem("batch", (n,) * b)],
        "lengths": [Problem("lengths", (length,)) for length in args.lengths],
        "tokens": [Problem("tokens", x, s) for s in args.new_tokens for x in ((n,), (share,) * b)],
        "heads": [
            Problem("heads", (n // 2,), 1, 32, hk, d)
            for hk, d in ((32, 128), (8, 64), (32, 64), (4, 256))
        ],
        "fp8": [Problem("fp8", x, s, pool="fp8") for x, s in (((n,), 1), ((share,) * b, 1), ((n,), 16))],
        "uneven": [Problem("uneven", (long, *(share // 8,) * (b - 1)))],
    }  # fmt: skip
    return list(dict.fromkeys(problem for group in args.groups for problem in found[group]))


def make_calls(problem: Problem, page_size: int, device: torch.device, layers: int) -> list[Call]:
    """A call for each of some layers, over pages in random order, causal among the new tokens, which are cached already."""
    generator = torch.Generator(device).manual_seed(0)
    b, s, hk, d = len(problem.requests), problem.new_tokens, problem.kv_heads, problem.head_dim
    counts = [-(-length // page_size) for length in problem.requests]
    pages, columns = sum(counts), max(counts)
    row = torch.arange(columns, dtype=torch.int32, device=device) * page_size
    total = torch.tensor(problem.requests, dtype=torch.int32, device=device)[:, None]
    hi = total - s + 1 + torch.arange(s, dtype=torch.int32, device=device)
    calls = []
    for _ in range(layers):
        order = torch.randperm(pages, device=device, generator=generator).to(torch.int32)
        table = torch.zeros(b, columns, dtype=torch.int32, device=device)
        for i, own in enumerate(order.split(counts)):
            table[i, : len(own)] = own
        lengths = (total - row).clamp(0, page_size).to(torch.int32)
        starts = row.expand(b, columns).contiguous()
        placed = PageTable(table, starts, lengths, torch.tensor(counts, dtype=torch.int32, device=device))
        pools, scales = [], []
        for _ in range(2):
            if problem.pool == "fp8":
                # every byte but the two NaNs of float8_e4m3fn
                raw = torch.empty(pages, hk, page_size, d, dtype=torch.uint8, device=device)
                raw.random_(0, 254, generator=generator)
                pools.append(raw.add_(raw >= 0x7F).view(FP8))
                scales.append(torch.rand(pages, hk, page_size, device=device, generator=generator) / 100)
            else:
                pool = torch.empty(pages, hk, page_size, d, dtype=torch.bfloat16, device=device)
                pools.append(pool.normal_(generator=generator))
                scales.append(None)
        q = torch.randn(b, s, problem.heads, d, device=device, generator=generator).bfloat16()
        score = Score(d**-0.5)
        (k, v), (k_scale, v_scale) = pools, scales
        calls.append(Call(q, k, v, placed, torch.zeros_like(hi), hi, hi - 1, score, k_scale, v_scale))
    return calls


def expected(call: Call, blocks: int = 256) -> tuple[Tensor, Tensor]:
    """(o, lse) in fp32 by eager decode, some blocks at a time."""
    b, s, h, _ = call.q.shape
    dv, rows = call.v.shape[-1], b * s * h
    columns = call.table.pages.shape[1]
    stack = call.q.new_empty(-(-columns // blocks), size(rows, dv), dtype=torch.float32)
    for i in range(stack.shape[0]):
        part = slice(i * blocks, (i + 1) * blocks)
        pages, starts, lengths = (
            x[:, part].contiguous() for x in (call.table.pages, call.table.starts, call.table.lengths)
        )
        counts = (call.table.counts - i * blocks).clamp(0, pages.shape[1])
        sub = dataclasses.replace(call, table=PageTable(pages, starts, lengths, counts))
        decode_eager.decode(*sub.arguments(), stack[i : i + 1], k_scale=call.k_scale, v_scale=call.v_scale)
    return finished(stack, call, torch.float32)


def finished(stack: Tensor, call: Call, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(o, lse) of a stack of parts."""
    b, s, h, _ = call.q.shape
    o = torch.empty(b, s, h, call.v.shape[-1], dtype=dtype, device=call.q.device)
    lse = torch.empty(b, h, s, dtype=torch.float32, device=call.q.device)
    finish_parts(stack, b * s * h, call.v.shape[-1], None, o, lse)
    return o, lse


class Contender:
    """Decode under one configuration, over all layers.

    Args:
        calls: One per layer.
        config: "chosen", or four numbers (see `Decode`).
    """

    def __init__(self, calls: Sequence[Call], config: str) -> None:
        self.calls = calls
        q, k, v, table = calls[0].arguments()[:4]
        b, s, h, d = q.shape
        hk, page_size, dv = v.shape[1:]
        blocks = table.pages.shape[1]
        wide = max(d, dv)
        self.splits = contract.num_splits(b, s, h, hk, blocks, page_size, q.device, head_dim=wide, kv_dtype=k.dtype)
        self.kernel: Callable[..., None] = contract.decode
        if config != "chosen":
            self.kernel, self.splits = configured(config, self.splits, (b, s, h, hk, blocks, page_size), q.device)
        self.stack = torch.empty(self.splits, size(b * s * h, dv), dtype=torch.float32, device=q.device)
        self.o = torch.empty(b, s, h, dv, dtype=q.dtype, device=q.device)
        self.lse = torch.empty(b, h, s, dtype=torch.float32, device=q.device)

    def decode(self, call: Call) -> None:
        """The kernel alone."""
        self.kernel(*call.arguments(), self.stack, k_scale=call.k_scale, v_scale=call.v_scale)

    def alone(self) -> None:
        """The kernel, for every layer."""
        for call in self.calls:
            self.decode(call)

    def merged(self) -> None:
        """The kernel and the merge of what it leaves, for every layer."""
        b, s, h, dv = self.o.shape
        for call in self.calls:
            self.decode(call)
            finish_parts(self.stack, b * s * h, dv, None, self.o, self.lse)


def configured(
    words: str, splits: int, sizes: tuple[int, int, int, int, int, int], device: torch.device
) -> tuple[Callable[..., None], int]:
    """The kernel under a configuration, and the height of its stack; `splits` is what the chosen one would have."""
    import functools

    from ringattn.kernels.decode import configs as decode_configs
    from ringattn.kernels.decode import decode_triton

    config = decode_configs.Config(*(int(word) for word in words.split(",")))
    if device.type == "cuda":
        splits = decode_configs.splits(*sizes, decode_configs.multiprocessors(device), config)
    return functools.partial(decode_triton.decode, config=config), splits


def check(contender: Contender, right: tuple[Tensor, Tensor]) -> str | None:
    """What is wrong with the first layer's answer, in words."""
    call = contender.calls[0]
    contender.stack.fill_(math.nan)
    contender.decode(call)
    o, lse = finished(contender.stack, call, torch.float32)
    found = ((o - right[0]).square().mean().sqrt() / right[0].square().mean().sqrt()).item()
    if not found <= WRONG_O:
        return f"wrong answer: o is off by {found:.2e} of its size, {WRONG_O:.2e} allowed"
    found = (lse - right[1]).abs().max().item()
    if not found <= WRONG_LSE:
        return f"wrong answer: lse is off by {found:.2e}, {WRONG_LSE:.2e} allowed"
    return None


def peer(name: str, problem: Problem, layers: int, device: torch.device) -> Callable[[], Any]:
    """Attention over keys in one piece, for every layer: what does not know pages, lengths and fp8.

    Raises:
        NotImplementedError: It does not serve the problem.
    """
    same = len(set(problem.requests)) == 1
    if not same or problem.new_tokens > 1 or problem.pool != "bf16":
        raise NotImplementedError(f"{name} is asked for one new token, requests of one length, and bf16 only")
    b, n, h, hk, d = len(problem.requests), problem.requests[0], problem.heads, problem.kv_heads, problem.head_dim
    q = torch.randn(b, h, 1, d, dtype=torch.bfloat16, device=device)
    kv = [torch.empty(2, b, hk, n, d, dtype=torch.bfloat16, device=device).normal_() for _ in range(layers)]
    attend: Callable[..., Any] = F.scaled_dot_product_attention
    if name == "flex":
        from torch.nn.attention.flex_attention import flex_attention

        attend = torch.compile(flex_attention, dynamic=False)

    def run() -> None:
        for k, v in kv:
            attend(q, k, v, enable_gqa=h != hk)

    return run


def bandwidth(session: Session, num_bytes: int, rounds: int, seconds: float = math.inf) -> dict[str, float]:
    """GB/s of a sum over so many bytes (a MiB on a CPU), and of a copy of as many (read and written)."""
    numbers = num_bytes // 4 if session.device.type == "cuda" else 2**18
    x = torch.ones(numbers, device=session.device)
    y = torch.empty_like(x)
    times = time_calls({"read": x.sum, "copy": lambda: y.copy_(x)}, session, rounds, "graph", seconds)
    found = {}
    for name, traffic in (("read", 1), ("copy", 2)):
        ms = times[name].graph_ms or times[name].calls_ms
        found[f"{name}_gbps"] = traffic * 4e-6 * numbers / ms if ms else math.nan
    return found


def measure(args: Decode, problem: Problem, session: Session, rates: dict[str, float]) -> Iterator[dict[str, Any]]:
    """The rows of one problem: everybody checked, then timed in turns."""
    gpu = session.device.type == "cuda"
    layers = min(16, max(1, -(-CACHED // problem.kv_bytes))) if gpu else 1
    calls = make_calls(problem, args.page_size, session.device, layers)
    right = expected(calls[0])
    common = {"bench": "decode", **dataclasses.asdict(problem), "problem": str(problem), "page_size": args.page_size}
    common |= {"layers": layers, "kv_bytes": problem.kv_bytes, **rates}
    contenders: dict[str, Contender] = {}
    refused: dict[str, str] = {}
    chosen = ("chosen", *CANDIDATES) if args.sweep else args.configs
    for config in dict.fromkeys(chosen):
        try:
            contenders[config] = Contender(calls, config)
            wrong = check(contenders[config], right)
        except Exception as error:
            wrong = reason(error)
        if wrong is not None:
            refused[config] = wrong
            contenders.pop(config, None)
    runs: dict[str, Callable[[], Any]] = {f"{name} alone": one.alone for name, one in contenders.items()}
    runs |= {f"{name} merged": one.merged for name, one in contenders.items()}
    for name in args.peers:
        try:
            runs[name] = peer(name, problem, layers, session.device)
        except NotImplementedError as error:
            refused[name] = reason(error)
    times = time_calls(runs, session, args.rounds, "graph", args.round_s)
    for name, one in contenders.items():
        row = common | {"who": "decode", "config": name, "splits": one.splits}
        row |= timed(times[f"{name} merged"], problem, layers, rates, "")
        row |= timed(times[f"{name} alone"], problem, layers, rates, "kernel_")
        if name == next(iter(contenders)):
            row["host_us"] = host_us(lambda one=one: one.decode(calls[0]), session, 100)
        yield row
    for name in args.peers:
        if name in runs:
            yield common | {"who": name, "config": "-"} | timed(times[name], problem, layers, rates, "")
    for name, why in refused.items():
        yield common | {"who": name if name in args.peers else "decode", "config": name, "refused": why}


def timed(found: Time, problem: Problem, layers: int, rates: dict[str, float], prefix: str) -> dict[str, Any]:
    """Microseconds per layer, GB/s of K and V, and percent of the faster of a read and a copy."""
    ms = found.graph_ms if found.graph_ms is not None else found.calls_ms
    if ms is None:
        return {f"{prefix}refused": found.refused}
    gbps = 1e-6 * problem.kv_bytes * layers / ms
    row = {f"{prefix}us": 1e3 * ms / layers, f"{prefix}gbps": gbps}
    return row | {
        f"{prefix}percent": 100 * gbps / max(rates.values()),
        f"{prefix}timing": "calls" if found.graph_ms is None else "graph",
    }


def bench_decode(args: Decode, session: Session, machine: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    """Measures what the arguments ask for, as far as room and budget go; the JSON is written after every problem.

    Args:
        args: What.
        session: One process.
        machine: The machine line, for the JSON.
        path: The JSON.
    """
    if session.world_size > 1:
        raise SystemExit("bench inference --decode must run in one process; start it with python -m")
    if session.device.type == "cuda":
        # graphs cannot be captured from the default stream
        with torch.cuda.stream(torch.cuda.Stream(session.device)):
            return _bench(args, session, machine, path)
    return _bench(args, session, machine, path)


def _bench(args: Decode, session: Session, machine: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    began = time.monotonic()
    rates = bandwidth(session, min(2**30, int(args.room_gib * 2**28)), args.rounds, args.round_s)
    session.say(f"this device reads {rates['read_gbps']:.0f} GB/s and copies {rates['copy_gbps']:.0f} GB/s")
    rows: list[dict[str, Any]] = []
    for problem in list_problems(args):
        if problem.kv_bytes * (1 + bool(args.peers)) > args.room_gib * 2**30:
            session.say(f"left out for want of room: {problem}, {problem.kv_bytes / 2**30:.0f} GiB")
            continue
        if args.budget_s and time.monotonic() - began > args.budget_s:
            session.say(f"left out for want of time: {problem}")
            continue
        for row in measure(args, problem, session, rates):
            rows.append(row)
            said = row.get("refused") or (
                f"{row['us']:.1f} us, {row['gbps']:.0f} GB/s, {row['percent']:.0f}%"
                + (f"; kernel {row['kernel_us']:.1f} us, {row['kernel_percent']:.0f}%" if "kernel_us" in row else "")
            )
            session.say(f"  {row['problem']} {row['who']} {row['config']}: {said}")
        write_json(path, {"machine": machine, "rows": rows})
        if session.device.type == "cuda":
            torch.cuda.empty_cache()
    return rows
