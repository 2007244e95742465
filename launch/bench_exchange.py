"""How long one exchange of partials takes: the kernel over symmetric memory beside one collective, as calls and in CUDA graphs.

Owns what is exchanged and who is compared. Refuses to time an exchange whose answer is not the same on all ranks, or not that
of all partials merged in one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import ringattn
from ringattn.kernels import parts as packed
from ringattn.launch.check import DTYPES
from ringattn.launch.problems import DTypeName
from ringattn.launch.session import Session
from ringattn.launch.turns import time_together
from ringattn.transport.exchange import Exchange as Exchanger


@dataclass(frozen=True)
class Exchange:
    """All ranks: one exchange of partials, as decoding makes one per layer.

    Attributes:
        rows: Query rows in all: batch elements times heads.
        heads: Query heads; divides the rows.
        head_dim: Of the values.
        splits: Partials that each rank brings.
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
    dtype: DTypeName = "bf16"
    rounds: int = 15
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path = Path("runs/bench")
    name: str = "exchange"


def draw_splits(rank: int, args: Exchange, rows: int, device: torch.device) -> Tensor:
    """The partials of a rank, the same wherever they are drawn."""
    generator = torch.Generator().manual_seed(rank)
    stack = torch.randn(args.splits, packed.size(rows, args.head_dim), generator=generator)
    m, l, _ = packed.views(stack, rows, args.head_dim)  # noqa: E741
    m.mul_(8)
    l.abs_().add_(0.5)
    return stack.to(device)


def make_call(exchange: Exchanger, splits: Tensor, args: Exchange, rows: int) -> Callable[[], list[Tensor]]:
    """One exchange, into tensors that are its own."""
    b, h, dv = rows // args.heads, args.heads, args.head_dim
    o = torch.empty(b, 1, h, dv, dtype=DTYPES[args.dtype], device=splits.device)
    lse = torch.empty(b, h, 1, device=splits.device)

    def call() -> list[Tensor]:
        exchange.finish(splits, b, 1, h, dv, None, o, lse)
        return [o, lse]

    return call


def differs(name: str, found: list[Tensor], args: Exchange, rows: int, session: Session) -> list[str]:
    """What is wrong with the answer of one exchange, in words, on any rank."""
    cpu = torch.device("cpu")
    stack = torch.cat([draw_splits(rank, args, rows, cpu) for rank in range(session.world_size)])
    o, lse = (torch.empty_like(x, device=cpu) for x in found)
    packed.finish_parts(stack, rows, args.head_dim, None, o, lse)
    mine = [x.cpu() for x in found]
    wrong = []
    for what, x, y, tolerance in zip(("o", "lse"), mine, (o, lse), (torch.finfo(o.dtype).eps, 1e-5), strict=True):
        if not torch.allclose(x.float(), y.float(), rtol=2 * tolerance, atol=2 * tolerance):
            wrong.append(
                f"{name}, {rows} rows: {what} is {(x.float() - y.float()).abs().max():.2e} off on rank {session.rank}"
            )
    digests = session.gather([x.float().numpy().tobytes() for x in mine])
    if any(digest != digests[0] for digest in digests):
        wrong.append(f"{name}, {rows} rows: ranks hold different bits")
    return [one for said in session.gather(wrong) for one in said]


def bench_exchange(args: Exchange, session: Session) -> list[dict[str, Any]] | None:
    """A row per number of rows and exchange: microseconds of one, called and in a CUDA graph; None when a check is red."""
    rings = [ringattn.Ring()]
    if session.world_size > 1:
        rings.append(ringattn.Ring(transport="process_group"))
    exchanges: dict[str, Exchanger] = {}
    for ring in rings:
        exchange = ring.exchange(session.device)
        exchanges.setdefault(exchange.choice.name, exchange)
        session.say(exchange)
    found: list[dict[str, Any]] = []
    red: list[str] = []
    gpu = session.device.type == "cuda"
    # a stream that can be captured
    with torch.cuda.stream(torch.cuda.Stream()) if gpu else contextlib.nullcontext():
        for rows in args.rows:
            if rows % args.heads:
                raise ValueError(f"rows must be a multiple of the {args.heads} heads, got {rows}; pass other rows")
            splits = draw_splits(session.rank, args, rows, session.device)
            calls = {name: make_call(exchange, splits, args, rows) for name, exchange in exchanges.items()}
            red += [one for name, call in calls.items() for one in differs(name, call(), args, rows, session)]
            if red:
                break
            times = time_together(calls, session, args.rounds, captured=list(calls) if gpu else ())
            for name, taken in times.items():
                found.append(
                    {
                        "bench": "exchange",
                        "who": name,
                        "world_size": session.world_size,
                        "rows": rows,
                        "head_dim": args.head_dim,
                        "splits": args.splits,
                        "kib_per_rank": 4 * packed.size(rows, args.head_dim) / 1024,
                        "call_us": None if taken.calls_ms is None else 1e3 * taken.calls_ms,
                        "graph_us": None if taken.graph_ms is None else 1e3 * taken.graph_ms,
                        "graph_refused": taken.graph_refused,
                        "host_us": taken.host_us,
                    }
                )
            # of what was replayed, too: after many exchanges in a row the answer is still the same
            red += [one for name, call in calls.items() for one in differs(name, call(), args, rows, session)]
    for exchange in exchanges.values():
        exchange.check()
    for ring in rings:
        ring.close()
    for one in red:
        session.say(one)
    return None if red else found
