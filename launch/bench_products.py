"""How fast are the products of a layer with few rows, beside torch's and beside the bandwidth of memory?

Owns which products these are, their check, and who is compared. Refuses to know how kernels work.

Note [Weights]
    A product of few rows reads its weight, and little else: GB/s are the bytes of weights per time. Layers follow each other in a
    model, so nothing is in a cache when a product begins: calls go round over weights that together are larger than the cache.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ringattn.kernels import few_rows
from ringattn.launch.bench_decode import CACHED, bandwidth
from ringattn.launch.check import DTYPES
from ringattn.launch.problems import DTypeName
from ringattn.launch.session import Keep, Session, check_numbers
from ringattn.launch.turns import reason, time_calls

READ = 2**29
"""Bytes whose sum says what the device reads."""


@dataclass(frozen=True)
class Products:
    """One GPU: the products of a layer of a model with few rows.

    Attributes:
        rows: Of each product.
        dim: Width of the residual stream.
        heads: Query heads.
        kv_heads: Key/value heads.
        head_dim: Of q, k and v.
        mlp_dim: Hidden width of SwiGLU.
        sharing: Ranks that read a slice each of MLPs; the last product of a slice gives fp32.
        dtype: Of rows and weights.
        rounds: Rounds in which contenders take turns; the median counts.
        budget_s: Seconds for everything; 0 for no limit.
        device: GPUs where there are any, or the CPU.
        out: Folder for the JSON.
        name: Of the JSON.
    """

    rows: tuple[int, ...] = (1, 4, 16, 64)
    dim: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    mlp_dim: int = 14336
    sharing: int = 2
    dtype: DTypeName = "bf16"
    rounds: int = 9
    budget_s: float = 0.0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path = Path("runs/bench")
    name: str = "products"

    def __post_init__(self) -> None:
        """Refuses slices of nothing."""
        check_numbers(self)
        if self.sharing > self.mlp_dim:
            raise ValueError(
                f"sharing must be at most mlp_dim, got {self.sharing} and {self.mlp_dim}; pass a smaller --sharing"
            )

    def cases(self) -> list[Case]:
        """The products of a layer, in their order."""
        inner, wide = self.mlp_dim // self.sharing, self.head_dim * self.heads
        return [
            Case("q, k and v", self.dim, self.head_dim * (self.heads + 2 * self.kv_heads)),
            Case("o", wide, self.dim),
            Case("gate and up", self.dim, inner, gated=True),
            Case("down", inner, self.dim, apart=self.mlp_dim - inner, wide=self.sharing > 1),
        ]


@dataclass(frozen=True)
class Case:
    """One product.

    Attributes:
        title: Which.
        inner: Numbers of a row.
        outer: Columns of the result.
        gated: There are two weights, with SiLU and a product between them.
        apart: Numbers between the rows of a weight.
        wide: The result is fp32.
    """

    title: str
    inner: int
    outer: int
    gated: bool = False
    apart: int = 0
    wide: bool = False

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """What it reads."""
        return (1 + self.gated) * self.inner * self.outer * dtype.itemsize

    def draw(self, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Its weights."""
        drawn = [
            torch.empty(self.outer, self.inner + self.apart, dtype=dtype, device=device) for _ in range(1 + self.gated)
        ]
        return [x.normal_(std=self.inner**-0.5)[:, : self.inner] for x in drawn]

    def by_torch(self, x: Tensor, weights: list[Tensor]) -> Tensor:
        """As torch makes it."""
        if self.gated:
            return F.silu(F.linear(x, weights[0])) * F.linear(x, weights[1])
        if not self.wide:
            return F.linear(x, weights[0])
        return torch.mm(x, weights[0].t(), out_dtype=torch.float32) if x.is_cuda else F.linear(x, weights[0]).float()

    def by_few_rows(self, x: Tensor, weights: list[Tensor]) -> Tensor:
        """As our kernel does."""
        if len(x) > (few_rows.MOST_GATED if self.gated else few_rows.MOST_ROWS):
            raise NotImplementedError(f"{len(x)} rows are left to torch")
        if not few_rows.has_kernel(*weights):
            raise NotImplementedError(f"there is no kernel for this weight on {x.device}")
        if self.gated:
            return few_rows.gate(x, weights[0], weights[1], "silu")
        return few_rows.multiply(x, weights[0], dtype=torch.float32 if self.wide else None)

    def wrong(self, found: Tensor, x: Tensor, weights: list[Tensor]) -> str | None:
        """What is wrong with a result, in words."""
        one, *two = (x.double() @ weight.double().t() for weight in weights)
        right = F.silu(one) * two[0] if two else one
        off = ((found.double() - right).square().mean().sqrt() / right.square().mean().sqrt()).item()
        # torch rounds both products of a gate, the activation and the end
        allowed = 3 * torch.finfo(x.dtype).eps
        return None if off <= allowed else f"wrong answer: off by {off:.2e} of its size, {allowed:.2e} allowed"


def bench_products(args: Products, session: Session, keep: Keep) -> list[dict[str, Any]]:
    """Rows of every product, number of rows and contender; a wrong answer has no time.

    Args:
        args: What.
        session: One process.
        keep: Who gets the rows.
    """
    if session.world_size > 1:
        raise SystemExit("bench products must run in one process; start it with python -m")
    rows: list[dict[str, Any]] = []
    # graphs cannot be captured from the default stream
    with (
        torch.cuda.stream(torch.cuda.Stream(session.device))
        if session.device.type == "cuda"
        else contextlib.nullcontext()
    ):
        for row in _rows(args, session):
            rows.append(row)
            keep(rows)
    return rows


def _rows(args: Products, session: Session) -> Iterator[dict[str, Any]]:
    began, gpu, dtype = time.monotonic(), session.device.type == "cuda", DTYPES[args.dtype]
    rates = bandwidth(session, READ, args.rounds)
    for case in args.cases():
        size = case.weight_bytes(dtype)
        layers = [case.draw(dtype, session.device) for _ in range(-(-CACHED // size) if gpu else 1)]
        for rows in args.rows:
            if args.budget_s and time.monotonic() - began > args.budget_s:
                session.say(f"left out for want of time: {case.title}, {rows} rows")
                continue
            x = torch.randn(rows, case.inner, device=session.device).to(dtype)
            common = {
                "bench": "products",
                "product": case.title,
                "rows": rows,
                "inner": case.inner,
                "outer": case.outer,
            }
            common |= {"weight_bytes": size, **rates, "dtype": args.dtype, "sharing": args.sharing}
            yield from _row(case, x, layers, session, args.rounds, common)


def _row(
    case: Case, x: Tensor, layers: list[list[Tensor]], session: Session, rounds: int, common: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """The rows of one product with so many rows: contenders checked, then timed in turns."""
    calls: dict[str, Callable[[Tensor, list[Tensor]], Tensor]] = {"torch": case.by_torch, "few rows": case.by_few_rows}
    runs: dict[str, Callable[[], Any]] = {}
    for who, call in calls.items():
        try:
            wrong = case.wrong(call(x, layers[0]), x, layers[0])
        except Exception as error:
            wrong = reason(error)
        if wrong is None:
            runs[who] = lambda call=call: [call(x, weights) for weights in layers]
        else:
            yield common | {"who": who, "refused": wrong}
    for who, taken in time_calls(runs, session, rounds, "graph").items():
        ms = taken.graph_ms or taken.calls_ms
        if ms is None:
            yield common | {"who": who, "refused": taken.refused}
            continue
        us = 1e3 * ms / len(layers)
        speed = {"us": us, "gbps": 1e-3 * common["weight_bytes"] / us, "timing": "graph" if taken.graph_ms else "calls"}
        yield common | {"who": who, **speed, "percent": 100 * speed["gbps"] / common["read_gbps"]}
