"""Speed of kernels on one GPU, ours and others, on a list of problems.

Note [Rows]
    A row is one implementation in one direction on one problem. `who` is a kernel set of ours or a peer; `level` is "op" for
    a function with autograd, "kernel" for our kernel set alone (forward; delta and backward), "carried" for our forward
    kernel with a partial carried in and out. `ms` is `graph_ms` where there is one and `calls_ms` otherwise, and
    `timing` says which. `ratio` is the part of the error budget that the worst tensor of that direction uses up on the
    problem itself. A contender that is wrong or cannot compute the problem has `refused` in place of times. A carried row has
    `plain_ms`, the time of the same kernel without a carry, and `cost_percent`.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import ringattn
from ringattn.launch.bench.baselines import PEERS, Contender, Unsupported, prepare
from ringattn.launch.bench.correctness import Expected, make_expected
from ringattn.launch.bench.rows import print_tables
from ringattn.launch.bench.softmax import softmax_rows
from ringattn.launch.bench.workloads import (
    FACTORS,
    DTypeName,
    Inputs,
    MaskName,
    Problem,
    free_memory,
    own_stream,
    teraflops,
)
from ringattn.launch.runtime.session import Session, check_kernels, table, write_json
from ringattn.launch.runtime.timing import Time, Timing, reason, time_calls

Group = Literal["target", "batch", "masks", "grouped", "carry", "lengths", "softmax"]
Direction = Literal["forward", "backward"]
GROUPS: tuple[Group, ...] = ("target", "batch", "masks", "grouped", "carry", "lengths")
TENSORS = {"forward": ("o",), "backward": ("dq", "dk", "dv")}
PEER_BUDGET = 4.0
"""Error budgets that a peer, which may accumulate in other dtypes, may use up and still be timed."""


@dataclass(frozen=True)
class Kernels:
    """One GPU: our kernel sets beside cuDNN, FlashAttention-2 and FlexAttention as torch ships them, and FlashAttention-4.

    Attributes:
        groups: Problems: the target table, many short sequences, masks, grouped heads, the carry, lengths; and by name only
            "softmax", the online softmax.
        head_dims: Of q, k and v, most important first.
        masks: Masks.
        directions: Forward, backward.
        who: Implementations: kernel sets of ours by name, or "auto"; cudnn, fa2, flex, fa4.
        levels: Ours as functions with autograd, as kernels alone, or both; peers are functions.
        length: Tokens of target, masks and grouped.
        lengths: Tokens of lengths.
        heads: Query heads, and as many key/value heads, but in grouped.
        grouped: Query heads and key/value heads of grouped.
        batch: Batch elements and tokens of batch.
        carry_length: Tokens of carry.
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
    masks: tuple[MaskName, ...] = ("full", "causal", "window", "documents")
    directions: tuple[Direction, ...] = ("forward", "backward")
    who: tuple[str, ...] = ("hopper", "portable", *PEERS)
    levels: tuple[Literal["op", "kernel"], ...] = ("op", "kernel")
    length: int = 16384
    lengths: tuple[int, ...] = (8192, 4096, 2048, 32768, 65536, 131072)
    heads: int = 16
    grouped: tuple[int, int] = (32, 4)
    batch: tuple[int, int] = (4, 4096)
    carry_length: int = 8192
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


def schedule(args: Kernels) -> list[tuple[Group, Problem]]:
    """Return the problems, most important first, each with the first group that lists it."""
    causal: tuple[MaskName, ...] = ("causal", "full")
    # under these masks a short sequence is just a causal one
    cut: dict[MaskName, int] = {"window": args.window + 1, "documents": args.document}
    heads, dims = (args.heads, args.heads), args.head_dims
    carried = (128,) if 128 in dims else dims[:1]
    cases: list[tuple[Group, tuple[MaskName, ...], tuple[int, ...], int, tuple[int, int], tuple[int, ...]]] = [
        ("target", causal[::-1], (args.length,), 1, heads, dims),
        ("batch", causal[::-1], args.batch[1:], args.batch[0], heads, dims),
        ("masks", tuple(cut), (args.length,), 1, heads, dims),
        ("grouped", causal, (args.length,), 1, args.grouped, dims),
        ("carry", causal if "forward" in args.directions else (), (args.carry_length,), 1, heads, carried),
        ("lengths", causal, args.lengths, 1, heads, dims),
        ("lengths", tuple(cut), args.lengths, 1, heads, dims),
    ]
    wanted: dict[tuple[bool, Problem], Group] = {}
    for group, masks, lengths, batch, (h, hk), head_dims in cases:
        for d, n, mask in itertools.product(head_dims, lengths, masks):
            if group in args.groups and mask in args.masks and (group != "lengths" or n > cut.get(mask, 0)):
                problem = Problem(mask, n, batch, h, hk, d, args.dtype, args.window, args.document)
                wanted.setdefault((group == "carry", problem), group)
    return [(group, problem) for (_, problem), group in wanted.items()]


def names(args: Kernels, group: Group) -> list[tuple[str, str]]:
    """Return (who, level) of all contenders of a group."""
    found = []
    for who in args.who:
        if group == "carry":
            found += [] if who in PEERS else [(who, "kernel"), (who, "carried")]
        else:
            found += [(who, "op")] if who in PEERS else [(who, level) for level in args.levels]
    return found


class Results:
    """Rows so far, on disk after every change.

    Attributes:
        rows: Note [Rows].
        left_out: Problems that the budget did not reach.
        red: Wrong answers of ours.
    """

    def __init__(self, path: Path, machine: dict[str, Any]) -> None:
        self.rows: list[dict[str, Any]] = []
        self.left_out: list[dict[str, Any]] = []
        self.red: list[str] = []
        self._path, self._machine = path, machine

    def write(self) -> None:
        """Write everything, whole or not at all."""
        content = {"machine": self._machine, "red": self.red, "left_out": self.left_out, "rows": self.rows}
        write_json(self._path, content)


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


def check_answers(entry: _Entry, expected: Expected, directions: Sequence[str]) -> None:
    """Compare the answers of a contender with the expected ones; a wrong one becomes its reason for having no speed."""
    assert entry.contender is not None, "a contender to check"
    wanted = {name for direction in directions for name in TENSORS[direction]}
    budgets, wrong = 1.0 if entry.ours else PEER_BUDGET, []
    for name, x in entry.contender.answers():
        if name in expected.tensors:
            ratio = entry.ratios[name] = expected.ratio(name, x)
            if not ratio <= budgets:
                wrong.append(f"{name} {ratio:.3g} x its budget")
                entry.refused = f"wrong answer: {', '.join(wrong)}"
        wanted.discard(name)
        if not wanted:
            break


def measure(
    args: Kernels,
    group: Group,
    problem: Problem,
    ring: ringattn.Ring,
    session: Session,
    results: Results,
) -> list[dict[str, Any]]:
    """Return the rows of one problem: all contenders checked on it, then timed in turns."""
    directions: tuple[str, ...] = ("forward",) if group == "carry" else args.directions
    inputs = Inputs(problem, session.device)
    common = {"bench": "kernels", "group": group, **dataclasses.asdict(problem), "pairs": problem.pairs}
    everybody = common | {"who": "everybody", "level": "op", "direction": directions[0]}
    expected = make_expected(inputs, backward="backward" in directions)
    entries = [_Entry(who, level) for who, level in names(args, group)]
    for entry in entries:
        asked = common | {"who": entry.who, "level": entry.level, "direction": directions[0]}
        try:
            entry.contender = prepare(entry.who, entry.level, inputs, ring)
            check_answers(entry, expected, directions)
        except Unsupported as error:
            entry.refused = str(error)
        except Exception as error:
            # one that fails in the backward still has a forward
            if not entry.ratios:
                entry.refused = reason(error)
            exit_if_device_lost(asked | {"refused": reason(error)}, session, results)
        if entry.refused and entry.ours and entry.refused.startswith("wrong answer"):
            results.red.append(f"{entry.who} {entry.level}, {describe_problem(problem)}: {entry.refused}")
    rows = []
    for direction in directions:
        calls = {
            f"{entry.who} {entry.level}": call
            for entry in entries
            if entry.refused is None and (call := getattr(entry.contender, direction)) is not None
        }
        asked = everybody | {"direction": direction}
        times = time_calls(calls, session, args.rounds, args.timing, args.round_s)
        exit_if_device_lost(asked | {"refused": "the device was lost while turns were taken"}, session, results)
        for entry in entries:
            time_ = times.get(f"{entry.who} {entry.level}", Time(refused=entry.refused or f"no {direction}"))
            rows.append(make_row(common, problem, direction, entry, time_))
    if group == "carry":
        add_costs(rows)
    return rows


def make_row(common: dict[str, Any], problem: Problem, direction: str, entry: _Entry, time_: Time) -> dict[str, Any]:
    """Make one row (Note [Rows])."""
    row = common | {"who": entry.who, "level": entry.level, "direction": direction}
    if entry.contender is not None and entry.contender.note:
        row["kernels"] = entry.contender.note
    ratios = [entry.ratios[name] for name in TENSORS[direction] if name in entry.ratios]
    if ratios:
        row["ratio"] = max(ratios)
    if time_.refused is not None:
        return row | {"refused": time_.refused}
    graphed = time_.graph_ms is not None
    ms = time_.graph_ms if time_.graph_ms is not None else time_.calls_ms
    assert ms is not None, "a contender without a reason has a time"
    flops = FACTORS[direction] * problem.flops
    row |= {"calls_ms": time_.calls_ms, "graph_ms": time_.graph_ms, "graph_refused": time_.graph_refused}
    return row | {
        "timing": "graph" if graphed else "calls",
        "rounds": time_.rounds,
        "ms": ms,
        "tflops": teraflops(flops, ms),
    }


def add_costs(rows: list[dict[str, Any]]) -> None:
    """Add the cost of the carry over the same kernel without it, timed in the same way."""
    plain = {row["who"]: row for row in rows if row["level"] == "kernel" and "ms" in row}
    for row in rows:
        beside = plain.get(row["who"])
        if row["level"] == "carried" and "ms" in row and beside is not None and beside["timing"] == row["timing"]:
            row["plain_ms"] = beside["ms"]
            row["cost_percent"] = 100 * (row["ms"] / beside["ms"] - 1)


def exit_if_device_lost(row: dict[str, Any], session: Session, results: Results) -> None:
    """Keep a row and exit if the device no longer answers: later errors would be blamed on other contenders."""
    if session.device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(session.device)
    except Exception as error:
        results.rows.append(row)
        results.write()
        raise SystemExit(
            f"the device must answer, got {reason(error)} after {row['who']}; start again without it"
        ) from error


def describe_problem(problem: Problem) -> str:
    """Return the sizes as text."""
    heads = f"h{problem.heads}/{problem.kv_heads}" if problem.heads != problem.kv_heads else f"h{problem.heads}"
    return f"{problem.mask} b{problem.batch} n{problem.seq_len} {heads} d{problem.head_dim} {problem.dtype}"


def bench_kernels(args: Kernels, session: Session, machine: dict[str, Any], path: Path) -> Results:
    """Measure the problems of `args` in one process, as far as the budget goes; `machine` is kept in the JSON at `path`."""
    if session.world_size > 1:
        raise SystemExit("bench kernels must run in one process; start it with python -m, and bench ring with torchrun")
    planned = schedule(args)
    if not planned and "softmax" not in args.groups:
        raise SystemExit(
            "bench kernels must have a problem to measure, got none; pass other --groups, --masks or --lengths"
        )
    began = time.monotonic()
    results = Results(path, machine)
    with own_stream(session.device):
        _measure_all(args, session, results, planned, began)
        if "softmax" in args.groups:
            for row in softmax_rows(session, args.rounds, args.round_s):
                results.rows.append(row)
                results.red += (
                    [f"softmax, {row['dtype']} rows of {row['n']}: {row['refused']}"] if "refused" in row else []
                )
                results.write()
    return results


def _measure_all(
    args: Kernels, session: Session, results: Results, planned: list[tuple[Group, Problem]], began: float
) -> None:
    ring = ringattn.Ring()
    for index, (group, problem) in enumerate(planned):
        if args.budget_s and time.monotonic() - began > args.budget_s:
            results.left_out.append({"group": group, **dataclasses.asdict(problem)})
            results.write()
            continue
        started = time.monotonic()
        try:
            rows = measure(args, group, problem, ring, session, results)
        except torch.OutOfMemoryError as error:
            rows = [{"bench": "kernels", "group": group, **dataclasses.asdict(problem), "pairs": problem.pairs}]
            rows[0] |= {"who": "everybody", "level": "op", "direction": "forward", "refused": reason(error)}
        took = time.monotonic() - started
        results.rows += [row | {"problem_s": round(took, 1)} for row in rows]
        results.write()
        session.say(f"{index + 1}/{len(planned)} {group}: {describe_problem(problem)}, {took:.0f} s")
        for direction in args.directions:
            if cells := [f"{_name(row)} {_speed(row) or '-'}" for row in rows if row["direction"] == direction]:
                session.say(f"  {direction:8} {', '.join(cells)}")
        torch.compiler.reset()
        free_memory()


def _name(row: dict[str, Any]) -> str:
    return f"{row['who']} {row['level']}".removesuffix(" op")


def _speed(row: dict[str, Any]) -> str | None:
    return f"{row['tflops']:.3g}{'' if row['timing'] == 'graph' else '*'}" if "tflops" in row else None


def print_results(results: Results) -> None:
    """Print a line per problem and direction, a column per contender: TFLOP/s, with a star where plain calls were timed.

    Below it are the reasons for missing speeds, the cost of the carry, and the problems that were left out.
    """
    rows = [row for row in results.rows if row["group"] != "softmax"]
    columns = list(dict.fromkeys(_name(row) for row in rows if "tflops" in row))
    lines: dict[tuple[str, ...], dict[str, str | None]] = {}
    refusals: dict[str, list[str]] = {}
    for row in rows:
        shape = describe_problem(Problem(**{one.name: row[one.name] for one in dataclasses.fields(Problem)}))
        lines.setdefault((row["direction"], shape), {})[_name(row)] = _speed(row)
        if "refused" in row:
            refusals.setdefault(f"{_name(row)} {row['direction']}: {row['refused']}", []).append(shape)
    if rows:
        table(
            "bench kernels: TFLOP/s over visible pairs",
            ["direction", "problem", *columns],
            [[*key, *(line.get(name) for name in columns)] for key, line in lines.items()],
        )
    print_tables([row for row in results.rows if row["group"] == "softmax"])
    for refusal, shapes in refusals.items():
        print(f"refused: {refusal} ({len(shapes)} x, first {shapes[0]})")
    for row in rows:
        if "cost_percent" in row:
            print(f"carry in and out: {row['who']}, {row['mask']} n{row['seq_len']}: {row['cost_percent']:+.1f}%")
    if results.left_out:
        print(f"left out for want of time: {len(results.left_out)} problems")
    for one in results.red:
        print(f"red, and so without a speed: {one}")
