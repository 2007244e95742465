"""Speed of kernels on one GPU, ours and others, on a list of problems.

A row is one implementation in one direction on one problem. `who` is a kernel set of ours or a peer; `level` is "op" for a
function with autograd, "kernel" for our kernel set alone (forward; delta and backward), "steps" for all ring steps of four
ranks. `ms` is `graph_ms` where there is one and `calls_ms` otherwise, and `timing` says which. `ratio` is the part of the error
budget that the worst tensor of that direction uses up on the problem itself. A contender that is wrong or cannot compute the
problem has `refused` in place of times.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import ringattn
from ringattn.launch.bench.baselines import PEERS, Contender, Unsupported, prepare
from ringattn.launch.bench.correctness import Expected, make_expected
from ringattn.launch.bench.inference import measure_bandwidth
from ringattn.launch.bench.kernel_parts import latent_rows, softmax_rows
from ringattn.launch.bench.rows import Rows
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

Group = Literal["target", "batch", "masks", "grouped", "lengths", "unions", "softmax", "latent"]
GROUPS: tuple[Group, ...] = ("target", "batch", "masks", "grouped", "lengths")
TENSORS = {"forward": ("o",), "backward": ("dq", "dk", "dv")}
PEER_BUDGET = 4.0
"""Error budgets that a peer, which may accumulate in other dtypes, may use up and still be timed."""


@dataclass(frozen=True)
class KernelsFlags:
    """One GPU: our kernel sets beside cuDNN, FlashAttention-2 and FlexAttention as torch ships them, and FlashAttention-4.

    Attributes:
        groups: Problems: the target table, many short sequences, masks, grouped heads, lengths; and by name only "unions", masks
            of several intervals and of blocks beside a causal one, "softmax", the online softmax, "latent", decode over latents.
        head_dims: Of q and k, most important first.
        v_head_dim: Of v; None: as q and k.
        masks: Masks.
        who: Implementations: kernel sets of ours by name, or "auto"; cudnn, fa2, flex, fa4.
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
        device: GPUs where there are any, or the CPU.
        out: Folder for the JSON.
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
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path = Path("runs/bench")
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


def check_answers(entry: _Entry, expected: Expected) -> None:
    """Compare the answers of a contender with the expected ones; a wrong one becomes its reason for having no speed."""
    assert entry.contender is not None, "a contender to check"
    budgets, wrong = 1.0 if entry.ours else PEER_BUDGET, []
    for name, x in entry.contender.answers():
        ratio = entry.ratios[name] = expected.ratio(name, x)
        if not ratio <= budgets:
            wrong.append(f"{name} {ratio:.3g} x its budget")
            entry.refused = f"wrong answer: {', '.join(wrong)}"


def measure(
    args: KernelsFlags, group: Group, problem: Problem, ring: ringattn.Ring, session: Session
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one problem: all contenders checked on it, then timed in turns.

    Raises:
        SystemExit: The device no longer answers: later errors would be blamed on other contenders.
    """
    inputs = Inputs(problem, session.device)
    expected = make_expected(inputs)
    entries = [_Entry(who, level) for who in args.who for level in (("op",) if who in PEERS else args.levels)]
    for entry in entries:
        try:
            entry.contender = prepare(entry.who, entry.level, inputs, ring)
            check_answers(entry, expected)
        except Unsupported as error:
            entry.refused = str(error)
        except Exception as error:
            # one that fails in the backward still has a forward
            if not entry.ratios:
                entry.refused = reason(error)
            _check_device(entry.who, session)
    for direction in TENSORS:
        able = [entry for entry in entries if entry.refused is None]
        calls = {f"{entry.who} {entry.level}": getattr(entry.contender, direction) for entry in able}
        times = time_calls(calls, session, args.rounds, args.timing, args.round_s)
        _check_device("one of the contenders", session)
        for entry in entries:
            time_ = times.get(f"{entry.who} {entry.level}", Time(refused=entry.refused))
            yield {"group": group, **dataclasses.asdict(problem), "pairs": problem.pairs} | make_row(
                problem, direction, entry, time_
            )


def make_row(problem: Problem, direction: str, entry: _Entry, time_: Time) -> dict[str, Any]:
    """Make the row of one contender in one direction."""
    row: dict[str, Any] = {"who": entry.who, "ours": entry.ours, "level": entry.level, "direction": direction}
    if entry.contender is not None and entry.contender.note:
        row["kernels"] = entry.contender.note
    ratios = [entry.ratios[name] for name in TENSORS[direction] if name in entry.ratios]
    if ratios:
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


def _check_device(who: str, session: Session) -> None:
    if session.device.type == "cuda":
        try:
            torch.cuda.synchronize(session.device)
        except Exception as error:
            raise SystemExit(
                f"the device must answer, got {reason(error)} after {who}; start again without it"
            ) from error


def bench_kernels(args: KernelsFlags, session: Session, keep: Keep) -> list[dict[str, Any]]:
    """Return the rows of all problems, measured in one process, as far as the budget goes."""
    if session.world_size > 1:
        raise SystemExit("bench kernels must run in one process; start it with python -m, and bench ring with torchrun")
    planned = schedule(args)
    if not planned and not {"softmax", "latent"} & set(args.groups):
        raise SystemExit(
            "bench kernels must have a problem to measure, got none; pass other --groups, --masks or --lengths"
        )
    rows, ring, began = Rows(session, keep, {"bench": "kernels"}), ringattn.Ring(), time.monotonic()
    with own_stream(session.device):
        for group, problem in planned:
            case = {"group": group, **dataclasses.asdict(problem), "who": "all", "ours": False, "level": "op"}
            if args.budget_s and time.monotonic() - began > args.budget_s:
                rows.add({**case, "direction": "forward", "refused": f"left out: {args.budget_s:g} s were over"})
                continue
            try:
                for row in measure(args, group, problem, ring, session):
                    rows.add(row)
            except torch.OutOfMemoryError as error:
                rows.add({**case, "direction": "forward", "refused": reason(error)})
            torch.compiler.reset()
            free_memory()
        if "softmax" in args.groups:
            for row in softmax_rows(session, args.rounds, args.round_s):
                rows.add(row)
        if "latent" in args.groups:
            bandwidth = measure_bandwidth(args.rounds, session)["read_gbps"]
            for row in latent_rows(session, args.who, args.rounds, args.timing, args.round_s, bandwidth):
                rows.add(row)
    return rows.rows
