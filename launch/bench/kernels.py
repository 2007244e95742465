"""Speed of kernels on one GPU, ours and others, on a list of problems.

A row is one implementation in one direction on one problem. `who` is a kernel set of ours or a peer; `level` is "op" for a
function with autograd, "kernel" for our kernel set alone (forward; delta and backward), "steps" for all ring steps of four
ranks. `ms` is `graph_ms` where there is one and `calls_ms` otherwise, and `timing` says which. `ratio` is the part of the error
budget that the worst tensor of that direction uses up on the problem itself. A contender that is wrong or cannot compute the
problem has `refused` in place of times.

Rows of the online softmax have bytes per second, beside torch.softmax and a device copy. Counted for every implementation are 2
reads and 1 write of each element forward, 4 reads and 1 write backward: the traffic of a kernel with O(block) state. A kernel
that keeps a row on chip moves less, so short rows can be faster than the copy.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ringattn.launch.bench.baselines import PEERS, Contender, Unsupported, prepare
from ringattn.launch.bench.correctness import Expected, make_expected
from ringattn.launch.bench.inference import measure_bandwidth
from ringattn.launch.bench.latent_decode import latent_rows
from ringattn.launch.bench.log_probs import log_probs_rows
from ringattn.launch.bench.rows import BenchFlags, Rows
from ringattn.launch.bench.workloads import (
    UNIONS,
    DTypeName,
    Inputs,
    MaskName,
    Problem,
    free_memory,
    own_stream,
    teraflops,
)
from ringattn.launch.common.session import Keep, Session, check_kernels
from ringattn.launch.common.timing import Time, Timing, reason, time_calls
from ringattn.numerics.error_budget import Budget
from ringattn.numerics.softmax import online_logsumexp, online_softmax

Group = Literal["target", "batch", "masks", "grouped", "lengths", "unions", "softmax", "latent", "log_probs"]
GROUPS: tuple[Group, ...] = ("target", "batch", "masks", "grouped", "lengths")
TENSORS = {"forward": ("o",), "backward": ("dq", "dk", "dv")}
PEER_BUDGET = 4.0
"""Error budgets that a peer, which may accumulate in other dtypes, may use up and still be timed."""


@dataclass(frozen=True)
class KernelsFlags(BenchFlags):
    """One GPU: our kernel sets beside cuDNN, FlashAttention-2 and FlexAttention as torch ships them, and FlashAttention-4.

    Attributes:
        groups: Problems: the target table, many short sequences, masks, grouped heads, lengths; and by name only "unions", masks
            of several intervals and of blocks beside a causal one, "softmax", the online softmax, "latent", decode over latents,
            "log_probs", log-probabilities of given tokens.
        head_dims: Of q and k, most important first.
        v_head_dim: Of v; None: as q and k.
        masks: Masks.
        who: Implementations: kernel sets of ours by name, or "auto"; cudnn, fa2, flex, flex_flash, fa4.
        levels: Ours as functions with autograd ("op"), as kernels alone ("kernel"), or as the four ranks of a zigzag ring call
            them, one after the other and without transport ("steps"); peers are functions.
        length: Tokens of target, masks and grouped.
        lengths: Tokens of lengths.
        union_length: Tokens of unions.
        heads: Query heads, and as many key/value heads, but in grouped.
        grouped: Query heads and key/value heads of grouped.
        batch: Batch elements and tokens of batch.
        window: Tokens to the left a query sees under the window mask.
        document: Tokens of each document.
        dtype: Of q, k and v.
        timing: Plain calls, calls inside CUDA graphs, or both.
        rounds: Rounds; the median counts.
        round_s: Seconds that all rounds of one problem may take; there are three rounds at least.
        budget_s: Problems that would begin later than this are left out; 0 for no limit.
        name: Of the JSON.
    """

    groups: tuple[Group, ...] = GROUPS
    head_dims: tuple[int, ...] = (128, 64, 256)
    v_head_dim: int | None = None
    masks: tuple[MaskName, ...] = ("full", "causal", "window", "documents", *UNIONS)
    who: tuple[str, ...] = ("hopper", "portable", *PEERS)
    levels: tuple[Literal["op", "kernel", "steps"], ...] = ("op", "kernel")
    length: int = 16384
    lengths: tuple[int, ...] = (8192, 4096, 2048, 32768, 65536, 131072)
    union_length: int = 32768
    heads: int = 16
    grouped: tuple[int, int] = (32, 4)
    batch: tuple[int, int] = (4, 4096)
    window: int = 4095
    document: int = 4096
    dtype: DTypeName = "bf16"
    timing: Timing = "both"
    rounds: int = 9
    round_s: float = 4.0
    budget_s: float = 0.0
    name: str = "kernels"

    def __post_init__(self) -> None:
        """Raise for unknown contenders and for heads that cannot be grouped."""
        for who in self.who:
            try:
                check_kernels("auto" if who in PEERS else who)
            except ValueError as error:
                listed = ", ".join(PEERS)
                raise ValueError(f"who must be of {listed} and our kernel sets, got {who}: {error}") from None
        if self.grouped[1] > 0 and self.grouped[0] % self.grouped[1]:
            raise ValueError(
                f"grouped must be query heads and a divisor of them, got {self.grouped}; pass another --grouped"
            )


def schedule(args: KernelsFlags) -> list[tuple[Group, Problem]]:
    """Return the problems, most important first, each with the first group that lists it."""
    causal: tuple[MaskName, ...] = ("causal", "full")
    # under these masks a short sequence is just a causal one
    cut: dict[MaskName, int] = {"window": args.window + 1, "documents": args.document}
    heads = (args.heads, args.heads)
    cases: list[tuple[Group, tuple[MaskName, ...], tuple[int, ...], int, tuple[int, int]]] = [
        ("target", causal[::-1], (args.length,), 1, heads),
        ("batch", causal[::-1], args.batch[1:], args.batch[0], heads),
        ("masks", tuple(cut), (args.length,), 1, heads),
        ("grouped", causal, (args.length,), 1, args.grouped),
        ("lengths", causal, args.lengths, 1, heads),
        ("lengths", tuple(cut), args.lengths, 1, heads),
        ("unions", ("causal", *UNIONS), (args.union_length,), 1, heads),
    ]
    wanted: dict[Problem, Group] = {}
    for group, masks, lengths, batch, (h, hk) in cases:
        for d, n, mask in itertools.product(args.head_dims, lengths, masks):
            if group in args.groups and mask in args.masks and (group != "lengths" or n > cut.get(mask, 0)):
                problem = Problem(mask, n, batch, h, hk, d, args.dtype, args.window, args.document, args.v_head_dim)
                wanted.setdefault(problem, group)
    return [(group, problem) for problem, group in wanted.items()]


@dataclass
class _Entry:
    """One contender on one problem."""

    who: str
    level: str
    contender: Contender | None = None
    refused: str | None = None
    ratios: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def ours(self) -> bool:
        return self.who not in PEERS

    def prepare(self, inputs: Inputs, expected: Expected) -> None:
        """Make the contender and compare its answers; a wrong one becomes its reason for having no speed."""
        self.contender = prepare(self.who, self.level, inputs)
        budgets, wrong = 1.0 if self.ours else PEER_BUDGET, []
        for name, x in self.contender.answers():
            ratio = self.ratios[name] = expected.ratio(name, x)
            if not ratio <= budgets:
                wrong.append(f"{name} {ratio:.3g} x its budget")
                self.refused = f"wrong answer: {', '.join(wrong)}"

    def row(self, problem: Problem, direction: str, time_: Time) -> dict[str, Any]:
        """Return the row of one direction."""
        row: dict[str, Any] = {"who": self.who, "ours": self.ours, "level": self.level, "direction": direction}
        if self.contender is not None and self.contender.note:
            row["kernels"] = self.contender.note
        if ratios := [self.ratios[name] for name in TENSORS[direction] if name in self.ratios]:
            row["ratio"] = max(ratios)
        if time_.refused is not None:
            return row | {"refused": time_.refused}
        return row | {
            "calls_ms": time_.calls_ms,
            "graph_ms": time_.graph_ms,
            "graph_refused": time_.graph_refused,
            "timing": "calls" if time_.graph_ms is None else "graph",
            "rounds": time_.rounds,
            "ms": time_.best_ms,
            "tflops": teraflops(problem.flops if direction == "forward" else problem.backward_flops, time_.best_ms),
        }


def measure(args: KernelsFlags, problem: Problem, session: Session) -> Iterator[dict[str, Any]]:
    """Yield the rows of one problem: all contenders checked on it, then timed in turns.

    A device that no longer answers is a SystemExit: later errors would be blamed on other contenders.
    """
    inputs = Inputs(problem, session.device)
    expected = make_expected(inputs)
    entries = [_Entry(who, level) for who in args.who for level in (("op",) if who in PEERS else args.levels)]
    for entry in entries:
        try:
            entry.prepare(inputs, expected)
        except Exception as error:
            # one that fails in the backward still has a forward
            if not entry.ratios:
                refusals = Unsupported, NotImplementedError
                entry.refused = str(error) if isinstance(error, refusals) else reason(error)
            _check_device(entry.who, session)
    for direction in TENSORS:
        able = [entry for entry in entries if entry.refused is None]
        calls = {f"{entry.who} {entry.level}": getattr(entry.contender, direction) for entry in able}
        times = time_calls(calls, session, args.rounds, args.timing, args.round_s)
        _check_device("one of the contenders", session)
        for entry in entries:
            time_ = times.get(f"{entry.who} {entry.level}", Time(refused=entry.refused))
            yield {"pairs": problem.pairs, **entry.row(problem, direction, time_)}


def _check_device(who: str, session: Session) -> None:
    if session.device.type == "cuda":
        try:
            torch.cuda.synchronize(session.device)
        except Exception as error:
            raise SystemExit(
                f"error: the device must answer, got {reason(error)} after {who}; start again without it"
            ) from error


def bench_kernels(args: KernelsFlags, session: Session, keep: Keep) -> list[dict[str, Any]]:
    """Return the rows of all problems, measured in one process, as far as the budget goes."""
    if session.world_size > 1:
        raise SystemExit(
            "error: bench kernels must run in one process; start it with python -m, and bench ring with torchrun"
        )
    planned = schedule(args)
    if not planned and not {"softmax", "latent", "log_probs"} & set(args.groups):
        raise SystemExit(
            "error: bench kernels must have a problem to measure, got none; pass other --groups, --masks or --lengths"
        )
    most = max((problem.seq_len for _, problem in planned), default=0)
    if session.device.type == "cpu" and most > 4096:
        session.say(
            f"{len(planned)} problems of up to {most:,} tokens are sized for a GPU and take minutes each on a CPU; pass less, as "
            "--who eager --groups target --length 512 --heads 2"
        )
    rows, began = Rows(session, keep, {"bench": "kernels"}), time.monotonic()
    with own_stream(session.device):
        for group, problem in planned:
            case = {"group": group, **dataclasses.asdict(problem)}
            left_out = case | {"who": "all", "ours": False, "level": "op", "direction": "forward"}
            if args.budget_s and time.monotonic() - began > args.budget_s:
                rows.add(left_out | {"refused": f"left out: {args.budget_s:g} s were over"})
                continue
            try:
                for row in measure(args, problem, session):
                    rows.add(case | row)
            except torch.OutOfMemoryError as error:
                rows.add(left_out | {"refused": reason(error)})
            torch.compiler.reset()
            free_memory()
        if "softmax" in args.groups:
            for row in softmax_rows(session, args.rounds, args.round_s):
                rows.add(row)
        if "latent" in args.groups:
            bandwidth = measure_bandwidth(args.rounds, session)["read_gbps"]
            for row in latent_rows(session, args.who, args.rounds, args.timing, args.round_s, bandwidth):
                rows.add(row)
        if "log_probs" in args.groups:
            for row in log_probs_rows(session, args.rounds, args.round_s):
                rows.add(row)
    return rows.rows


LENGTHS = (1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 15, 1 << 17, 1 << 18, 1 << 20)
ELEMENTS = {"cuda": 1 << 28, "cpu": 1 << 12}
TRAFFIC = {"copy": 2, "ours": 3, "torch": 3, "lse": 1, "ours_backward": 5, "torch_backward": 5}
"""Reads and writes of each element."""


def softmax_rows(session: Session, rounds: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield a row per dtype and row length: GB/s and shares of a copy of the same tensor, or the wrong answers."""
    elements, device = ELEMENTS[session.device.type], session.device
    for dtype, n in itertools.product((torch.float32, torch.bfloat16), LENGTHS):
        if n > elements:
            continue
        m = max(elements // n, 2)
        x = torch.randn(m, n, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(0)) * 4
        x[1] = float("-inf")
        row = {"group": "softmax", "part": "softmax", "who": "online_softmax", "ours": True}
        row |= {"dtype": "fp32" if dtype == torch.float32 else "bf16", "n": n, "m": m}
        wrong = check_softmax(x)
        yield row | (
            {"refused": f"wrong answer: {'; '.join(wrong)}"} if wrong else _measure_softmax(x, session, rounds, seconds)
        )


def check_softmax(x: Tensor) -> list[str]:
    """Return what is wrong with softmax, log-sum-exp and their gradients of `x`, whose second row is -inf.

    Some rows against fp64 inside the error budget; the whole output, where an element might not have been written, against torch.
    """
    rows = sorted({0, 2 % len(x), len(x) // 3, len(x) // 2, len(x) - 1} - {1})
    generator = torch.Generator(x.device).manual_seed(1)
    dy = torch.randn(x.shape, device=x.device, dtype=x.dtype, generator=generator)

    def evaluate(
        x: Tensor, dy: Tensor, softmax: Callable[..., Tensor], logsumexp: Callable[..., Tensor]
    ) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        y, lse = softmax(leaf, -1), logsumexp(leaf, -1)
        (dx,), (dx_of_lse,) = torch.autograd.grad(y, leaf, dy), torch.autograd.grad(lse, leaf, torch.ones_like(lse))
        return [y.detach(), lse.detach(), dx, dx_of_lse]

    found = evaluate(x, dy, online_softmax, online_logsumexp)
    exact = evaluate(x[rows].double(), dy[rows].double(), torch.softmax, torch.logsumexp)
    low = evaluate(x[rows], dy[rows], torch.softmax, torch.logsumexp)
    wrong = []
    for name, value, a, b in zip(("y", "lse", "dx of y", "dx of lse"), found, exact, low, strict=True):
        ratio = Budget.of(a, b).ratio(value[rows], a)
        if not ratio <= 1:
            wrong.append(f"{name} {ratio:.3g} x its budget")
    whole = torch.softmax(x, -1)
    whole[1] = 0
    gap = (found[0] - whole).abs().max().item()
    # two sums of a million terms in different orders
    if not gap <= max(64 * torch.finfo(torch.float32).eps, torch.finfo(x.dtype).eps):
        wrong.append(f"y is {gap:.2e} from torch.softmax somewhere")
    if found[1][1].item() != float("-inf"):
        wrong.append("lse of a row of -inf must be -inf")
    return wrong


def _measure_softmax(x: Tensor, session: Session, rounds: int, seconds: float) -> dict[str, float]:
    y = online_softmax(x)
    dy, target = torch.randn_like(x), torch.empty_like(x)
    calls: dict[str, Callable[[], Any]] = {
        "copy": lambda: target.copy_(x),
        "ours": lambda: online_softmax(x),
        "torch": lambda: torch.softmax(x, -1),
        "lse": lambda: online_logsumexp(x),
        "ours_backward": lambda: torch.ops.ringattn.online_softmax_backward(dy, y, 1, None, "auto"),
        "torch_backward": lambda: torch.ops.aten._softmax_backward_data(dy, y, -1, x.dtype),
    }
    times = time_calls(calls, session, rounds, "calls", seconds)
    ms = {name: found.eager_ms for name, found in times.items() if found.refused is None}
    gbps = {name: TRAFFIC[name] * x.numel() * x.element_size() / 1e6 / value for name, value in ms.items()}
    return {
        **{f"{name}_ms": value for name, value in ms.items()},
        **{f"{name}_gbps": value for name, value in gbps.items()},
        "share_of_copy": gbps["ours"] / gbps["copy"],
        **{f"{name}_share_of_copy": gbps[name] / gbps["copy"] for name in ("torch", "torch_backward")},
        "backward_share_of_copy": gbps["ours_backward"] / gbps["copy"],
    }
