"""How long one exchange takes: the kernel over symmetric memory beside one collective, as calls and in CUDA graphs.

Owns what is exchanged (partials, addends, columns) and who is compared. Refuses to time an exchange whose answer is not the
same on all ranks, or not that of all shares put together in one process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import ringattn
from ringattn.kernels.partials import packed
from ringattn.launch.bench.workloads import DTypeName
from ringattn.launch.check.attention import DTYPES
from ringattn.launch.runtime.session import Session
from ringattn.launch.runtime.timing import time_together
from ringattn.transport.reduce.base import PartialReducer


@dataclass(frozen=True)
class Reduce:
    """All ranks: one exchange, as decoding makes them in every layer.

    Attributes:
        rows: Query rows of exchanges of partials: batch elements times heads.
        heads: Query heads; divides the rows.
        head_dim: Of the values.
        splits: Partials that each rank brings.
        sums: Rows of exchanges that sum fp32 addends.
        hidden: Numbers in each of them.
        gathers: Rows of exchanges that lay columns side by side.
        columns: Columns of a rank.
        dtype: Of the answer.
        rounds: Rounds in which the exchanges take turns; the median counts.
        device: GPUs where there are any, or the CPU.
        out: Folder for the JSON.
        name: Name of the JSON, without its ending.
    """

    rows: tuple[int, ...] = (32, 64, 128, 256, 512, 1024, 2048, 4096)
    heads: int = 32
    head_dim: int = 128
    splits: int = 8
    sums: tuple[int, ...] = (1, 64, 512)
    hidden: int = 4096
    gathers: tuple[int, ...] = (1, 64)
    columns: int = 32064
    dtype: DTypeName = "bf16"
    rounds: int = 15
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path = Path("runs/bench")
    name: str = "reduce"

    def __post_init__(self) -> None:
        """Refuses rows that are no batch elements times heads."""
        for rows in self.rows:
            if self.heads > 0 and rows % self.heads:
                raise ValueError(
                    f"rows must be multiples of the {self.heads} heads, got {rows}; pass others, or --heads"
                )


def draw_splits(rank: int, args: Reduce, rows: int, device: torch.device) -> Tensor:
    """The partials of a rank, the same wherever they are drawn."""
    generator = torch.Generator().manual_seed(rank)
    stack = torch.randn(args.splits, packed.size(rows, args.head_dim), generator=generator)
    m, l, _ = packed.views(stack, rows, args.head_dim)  # noqa: E741
    m.mul_(8)
    l.abs_().add_(0.5)
    return stack.to(device)


@dataclass(frozen=True)
class Case:
    """One exchange.

    Attributes:
        title: What it is, in words.
        facts: What its rows say of it.
        make: The call of an exchange, into tensors that are its own.
        expect: What it leaves, by name, with how far it may be off: all ranks' shares put together on the CPU.
    """

    title: str
    facts: dict[str, Any]
    make: Callable[[PartialReducer], Callable[[], list[Tensor]]]
    expect: Callable[[], dict[str, tuple[Tensor, float]]]


def finishing(args: Reduce, rows: int, session: Session) -> Case:
    """Partials of some query rows, merged and normalised."""
    b, h, dv = rows // args.heads, args.heads, args.head_dim
    splits = draw_splits(session.rank, args, rows, session.device)

    def outputs(device: torch.device) -> tuple[Tensor, Tensor]:
        o = torch.empty(b, 1, h, dv, dtype=DTYPES[args.dtype], device=device)
        return o, torch.empty(b, h, 1, device=device)

    def make(exchange: PartialReducer) -> Callable[[], list[Tensor]]:
        o, lse = outputs(session.device)

        def call() -> list[Tensor]:
            exchange.merge_partials(splits, b, 1, h, dv, None, o, lse)
            return [o, lse]

        return call

    def expect() -> dict[str, tuple[Tensor, float]]:
        cpu = torch.device("cpu")
        stack = torch.cat([draw_splits(rank, args, rows, cpu) for rank in range(session.world_size)])
        o, lse = outputs(cpu)
        packed.finish_parts(stack, rows, dv, None, o, lse)
        return {"o": (o, 2 * torch.finfo(o.dtype).eps), "lse": (lse, 2e-5)}

    facts = {"op": "finish", "rows": rows, "head_dim": dv, "splits": args.splits}
    return Case(f"{rows} rows", facts | {"kib_per_rank": 4 * packed.size(rows, dv) / 1024}, make, expect)


def draw_numbers(rank: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """The addends or columns of a rank, the same wherever they are drawn."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rank)).to(dtype)


def summing(args: Reduce, rows: int, session: Session) -> Case:
    """Addends in fp32, as all ranks' shares of a product."""
    x = draw_numbers(session.rank, rows, args.hidden, torch.float32).to(session.device)

    def make(exchange: PartialReducer) -> Callable[[], list[Tensor]]:
        out = torch.empty_like(x, dtype=DTYPES[args.dtype])

        def call() -> list[Tensor]:
            exchange.all_reduce(x, out)
            return [out]

        return call

    def expect() -> dict[str, tuple[Tensor, float]]:
        drawn = [draw_numbers(rank, rows, args.hidden, torch.float32) for rank in range(session.world_size)]
        return {"the sum": (functools.reduce(torch.add, drawn).to(DTYPES[args.dtype]), 0.0)}

    facts = {"op": "sum", "rows": rows, "width": args.hidden, "kib_per_rank": x.nbytes / 1024}
    return Case(f"a sum of {rows} x {args.hidden}", facts, make, expect)


def gathering(args: Reduce, rows: int, session: Session) -> Case:
    """Columns of all ranks side by side, as of an output head."""
    dtype = DTYPES[args.dtype]
    x = draw_numbers(session.rank, rows, args.columns, dtype).to(session.device)

    def make(exchange: PartialReducer) -> Callable[[], list[Tensor]]:
        out = x.new_empty(rows, session.world_size * args.columns)

        def call() -> list[Tensor]:
            exchange.all_gather_columns(x, out)
            return [out]

        return call

    def expect() -> dict[str, tuple[Tensor, float]]:
        drawn = [draw_numbers(rank, rows, args.columns, dtype) for rank in range(session.world_size)]
        return {"the whole": (torch.cat(drawn, 1), 0.0)}

    facts = {"op": "gather", "rows": rows, "width": args.columns, "kib_per_rank": x.nbytes / 1024}
    return Case(f"columns {rows} x {args.columns}", facts, make, expect)


def differs(name: str, found: list[Tensor], case: Case, session: Session) -> list[str]:
    """What is wrong with the answer of one exchange, in words, on any rank."""
    mine = [x.cpu() for x in found]
    wrong = []
    for x, (what, (y, tolerance)) in zip(mine, case.expect().items(), strict=True):
        if not torch.allclose(x.float(), y.float(), rtol=tolerance, atol=tolerance):
            worst = (x.float() - y.float()).abs().max()
            wrong.append(f"{name}, {case.title}: {what} is {worst:.2e} off on rank {session.rank}")
    digests = session.gather([hashlib.sha256(x.float().numpy().tobytes()).digest() for x in mine])
    if any(digest != digests[0] for digest in digests):
        wrong.append(f"{name}, {case.title}: ranks hold different bits")
    return [one for said in session.gather(wrong) for one in said]


def bench_reduce(args: Reduce, session: Session) -> list[dict[str, Any]] | None:
    """A row per case and exchange: microseconds of one, called and in a CUDA graph; None when a check is red."""
    rings = [ringattn.Ring()]
    if session.world_size > 1:
        rings.append(ringattn.Ring(transport="process_group"))
    exchanges: dict[str, PartialReducer] = {}
    for ring in rings:
        exchange = ring.partial_reducer(session.device)
        exchanges.setdefault(exchange.choice.name, exchange)
        session.say(exchange)
    found: list[dict[str, Any]] = []
    red: list[str] = []
    gpu = session.device.type == "cuda"
    # a stream that can be captured
    with torch.cuda.stream(torch.cuda.Stream()) if gpu else contextlib.nullcontext():
        kinds = (finishing, args.rows), (summing, args.sums), (gathering, args.gathers)
        for case in (make(args, rows, session) for make, sizes in kinds for rows in sizes):
            calls = {name: case.make(exchange) for name, exchange in exchanges.items()}
            red += [one for name, call in calls.items() for one in differs(name, call(), case, session)]
            if red:
                break
            times = time_together(calls, session, args.rounds, captured=list(calls) if gpu else ())
            for name, taken in times.items():
                found.append(
                    {
                        "bench": "reduce",
                        "who": name,
                        "world_size": session.world_size,
                        **case.facts,
                        "call_us": None if taken.calls_ms is None else 1e3 * taken.calls_ms,
                        "graph_us": None if taken.graph_ms is None else 1e3 * taken.graph_ms,
                        "graph_refused": taken.graph_refused,
                        "host_us": taken.host_us,
                    }
                )
            # of what was replayed, too: after many exchanges in a row the answer is still the same
            red += [one for name, call in calls.items() for one in differs(name, call(), case, session)]
    for exchange in exchanges.values():
        exchange.check()
    for ring in rings:
        ring.close()
    for one in red:
        session.say(one)
    return None if red else found
