"""The kernels on one GPU, ours and those of others: which problems, in which order, and what is kept of them.

Owns the list of problems, the order in which a budget of seconds is spent, and the rows. Refuses to know how anybody
is called (`baselines`), how time is taken (`timing`), and to give a speed to a wrong answer.

Note [Rows]
    A row is one contender in one direction on one problem. `who` is a kernel set of ours or a peer; `level` is "op" for
    a function with autograd, "kernel" for our kernel set alone (forward; delta and backward), "carried" for our forward
    kernel with a partial carried in and out. `ms` is `graph_ms` where there is one and `calls_ms` otherwise, and
    `timing` says which; `tflops` counts visible pairs (`workloads`, Note [FLOPs]). `ratio` is the part of the error budget
    that the worst tensor of that direction uses up on the problem itself, against the definition in fp64. A contender
    that cannot, or is wrong, has `refused` in place of times. A carried row has `plain_ms`, the same kernel's time
    without a carry in the same rounds, and `cost_percent`.

Note [Order]
    What matters most comes first: the problems of the target table, then many short sequences, masks and head groups,
    the carry, and the lengths. With a budget, a problem that is expected to overrun it is left out, cheaper ones behind
    it are not, and what was left out is said. The JSON is written after every problem, so whatever ends the run, what
    was measured is there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import ringattn
from ringattn.launch.bench.baselines import PEERS, Contender, Inputs, Refused, Standard, make_standard, prepare
from ringattn.launch.bench.workloads import FACTORS, DTypeName, MaskName, Problem, teraflops
from ringattn.launch.runtime.session import Session, check_kernels, ended, share_of, write_json
from ringattn.launch.runtime.timing import Time, Timing, reason, time_calls

Group = Literal["target", "batch", "masks", "grouped", "carry", "lengths"]
Direction = Literal["forward", "backward"]
GROUPS: tuple[Group, ...] = ("target", "batch", "masks", "grouped", "carry", "lengths")
TENSORS = {"forward": ("o",), "backward": ("dq", "dk", "dv")}
PEER_ROOM = 4.0
"""How far outside our error budget a peer may be and still be timed: their accumulators are their business."""
GUESSED_TFLOPS = {"fa2": 250.0, "portable": 350.0, "flex": 350.0, "eager": 0.05}
"""For estimates only; 450 for the others."""
COMPILE_S = {"flex": 6.0, "fa4": 12.0}
"""What first calls may take per direction, for estimates only; 4 for the others."""


@dataclass(frozen=True)
class Kernels:
    """One GPU: our kernel sets beside cuDNN, FlashAttention-2 and FlexAttention as torch ships them, and FlashAttention-4.

    Attributes:
        groups: Which problems: the target table, many short sequences, masks, grouped heads, the carry, lengths.
        head_dims: Of q, k and v, most important first.
        masks: Which masks.
        directions: Forward, backward.
        who: Contenders: kernel sets of ours by name, or "auto"; cudnn, fa2, flex, fa4.
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
        budget_s: Seconds for everything; 0 for no limit.
        patience_s: A contender that does not answer for so long ends the run, and is named in its row.
        ahead: On GPUs, fill the compilers' caches from many processes first.
        device: GPUs where there are any, or the CPU.
        out: Folder for the JSON and the plot.
        name: Of the JSON and the plot.
        compile_share: "i/n": compile the i-th share of n and stop; what the bench starts by itself on GPUs.
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
    patience_s: float = 240.0
    ahead: bool = True
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path = Path("runs/bench")
    name: str = "kernels"
    compile_share: str = ""

    def __post_init__(self) -> None:
        """Refuses contenders that nobody knows, and heads that cannot be shared."""
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


def list_problems(args: Kernels) -> dict[Problem, Group]:
    """What is to be measured but for the carry, most important first, each with the first group that wants it."""
    wanted: dict[Problem, Group] = {}

    def add(group: Group, mask: MaskName, n: int, head_dim: int, batch: int = 1, heads: int = 0, kv: int = 0) -> None:
        heads = heads or args.heads
        problem = Problem(mask, n, batch, heads, kv or heads, head_dim, args.dtype, args.window, args.document)
        if group in args.groups and mask in args.masks:
            wanted.setdefault(problem, group)

    plain: tuple[MaskName, ...] = ("full", "causal")
    # under these masks a short sequence is just a causal one
    cut: dict[MaskName, int] = {"window": args.window + 1, "documents": args.document}
    for d in args.head_dims:
        for mask in plain:
            add("target", mask, args.length, d)
    for d in args.head_dims:
        for mask in plain:
            add("batch", mask, args.batch[1], d, batch=args.batch[0])
    for d in args.head_dims:
        for mask in cut:
            add("masks", mask, args.length, d)
    for d in args.head_dims:
        for mask in reversed(plain):
            add("grouped", mask, args.length, d, 1, *args.grouped)
    for masks in (tuple(reversed(plain)), tuple(cut)):
        for d in args.head_dims:
            for n in args.lengths:
                for mask in masks:
                    if n > cut.get(mask, 0):
                        add("lengths", mask, n, d)
    return wanted


def list_carries(args: Kernels) -> list[Problem]:
    """The problems of the carry: head_dim 128 (or the first there is), full and causal."""
    if "carry" not in args.groups or "forward" not in args.directions:
        return []
    d = 128 if 128 in args.head_dims else args.head_dims[0]
    shape = (args.carry_length, 1, args.heads, args.heads, d, args.dtype, args.window, args.document)
    return [Problem(mask, *shape) for mask in ("causal", "full") if mask in args.masks]


def schedule(args: Kernels) -> list[tuple[Group, Problem]]:
    """Everything in order; the carry stands before the lengths."""
    listed: list[tuple[Group, Problem]] = []
    listed.extend((group, problem) for problem, group in list_problems(args).items())
    listed.extend(("carry", problem) for problem in list_carries(args))
    return sorted(listed, key=lambda item: item[0] == "lengths")


def names(args: Kernels, group: Group) -> list[tuple[str, str]]:
    """(who, level) of everybody who is asked, in the order of their turns."""
    found = []
    for who in args.who:
        if group == "carry":
            found += [] if who in PEERS else [(who, "kernel"), (who, "carried")]
        else:
            found += [(who, "op")] if who in PEERS else [(who, level) for level in args.levels]
    return found


def estimate(args: Kernels, group: Group, problem: Problem, compiled: set[tuple[object, ...]]) -> float:
    """Seconds a problem will take, roughly; `compiled` is what was met before and is added to."""
    seconds, turns = (
        1.0 + 12.0 * problem.flops * problem.seq_len**2 / max(1, problem.pairs) / problem.kv_heads / 25e12,
        0.0,
    )
    for who, level in names(args, group):
        for direction in args.directions if group != "carry" else ("forward",):
            once = FACTORS[direction] * problem.flops / 1e12 / GUESSED_TFLOPS.get(who, 450.0)
            ways = 2 if args.timing == "both" and once < 0.1 else 1
            turns += ways * max(0.02, once)
            seconds += 5 * once + 0.1
            key = (
                who,
                level == "carried",
                direction,
                problem.mask,
                problem.head_dim,
                problem.heads == problem.kv_heads,
            )
            if who == "flex" or key not in compiled:
                compiled.add(key)
                seconds += COMPILE_S.get(who, 4.0) / (4 if args.ahead and who != "fa4" else 1)
    rounds = max(3, min(args.rounds, int(args.round_s / turns))) if turns else 0
    return seconds + rounds * turns


class Book:
    """The rows so far, on disk after every change.

    Attributes:
        rows: Note [Rows].
        left_out: Problems the budget did not reach.
        red: Contenders of ours whose answers were wrong.
    """

    def __init__(self, path: Path, machine: dict[str, Any]) -> None:
        self.rows: list[dict[str, Any]] = []
        self.left_out: list[dict[str, Any]] = []
        self.red: list[str] = []
        self._path, self._machine = path, machine
        self._lock = threading.Lock()

    def write(self) -> None:
        """Writes everything, whole or not at all."""
        with self._lock:
            content = {"machine": self._machine, "red": self.red, "left_out": self.left_out, "rows": self.rows}
            write_json(self._path, content)


class Watch:
    """Ends the process, with a row that says why, when a contender does not answer in time.

    A kernel that hangs cannot be interrupted from Python; so the rows are written and the process leaves.
    """

    def __init__(self, book: Book, patience_s: float) -> None:
        self._book, self._patience_s = book, patience_s
        self._timer: threading.Timer | None = None

    def expect(self, row: dict[str, Any], what: str) -> None:
        """Starts waiting for the contender of `row`."""
        self.rest()
        self._timer = threading.Timer(self._patience_s, self._leave, (row, what))
        self._timer.daemon = True
        self._timer.start()

    def rest(self) -> None:
        """Stops waiting."""
        if self._timer is not None:
            self._timer.cancel()

    def _leave(self, row: dict[str, Any], what: str) -> None:
        refusal = f"no answer in {self._patience_s:.0f} s: {what}"
        self._book.rows.append(row | {"refused": refusal})
        self._book.write()
        print(f"{row['who']} {row['level']} {row['mask']} {row['seq_len']}: {refusal}", file=sys.stderr, flush=True)
        os._exit(3)


@dataclass
class _Entry:
    """One contender on one problem, on its way to rows."""

    who: str
    level: str
    contender: Contender | None = None
    refused: str | None = None
    ratios: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def ours(self) -> bool:
        return self.who not in PEERS


def judge(entry: _Entry, standard: Standard, directions: Sequence[str]) -> None:
    """Asks a contender for its answers and refuses it when one is wrong."""
    assert entry.contender is not None, "somebody to judge"
    wanted = {name for direction in directions for name in TENSORS[direction]}
    room, wrong = 1.0 if entry.ours else PEER_ROOM, []
    for name, x in entry.contender.answers():
        if name in standard.tensors:
            ratio = entry.ratios[name] = standard.ratio(name, x)
            if not ratio <= room:
                wrong.append(f"{name} {ratio:.3g} x its budget")
                entry.refused = f"wrong answer: {', '.join(wrong)}"
        wanted.discard(name)
        if not wanted:
            break


def measure(
    args: Kernels, group: Group, problem: Problem, ring: ringattn.Ring, session: Session, book: Book, watch: Watch
) -> list[dict[str, Any]]:
    """The rows of one problem: everybody judged on it, then timed in turns."""
    directions: tuple[str, ...] = ("forward",) if group == "carry" else args.directions
    inputs = Inputs(problem, session.device)
    common = {"bench": "kernels", "group": group, **dataclasses.asdict(problem), "pairs": problem.pairs}
    everybody = common | {"who": "everybody", "level": "op", "direction": directions[0]}
    watch.expect(everybody, "the definition")
    standard = make_standard(inputs, backward="backward" in directions)
    entries = [_Entry(who, level) for who, level in names(args, group)]
    for entry in entries:
        asked = common | {"who": entry.who, "level": entry.level, "direction": directions[0]}
        watch.expect(asked, "first calls, compilation included")
        try:
            entry.contender = prepare(entry.who, entry.level, inputs, ring)
            judge(entry, standard, directions)
        except Refused as refusal:
            entry.refused = str(refusal)
        except Exception as error:
            # who fails in the backward still has a forward
            if not entry.ratios:
                entry.refused = reason(error)
            leave_if_lost(asked | {"refused": reason(error)}, session, book)
        if entry.refused and entry.ours and entry.refused.startswith("wrong answer"):
            book.red.append(f"{entry.who} {entry.level}, {describe_problem(problem)}: {entry.refused}")
    rows = []
    for direction in directions:
        calls = {
            f"{entry.who} {entry.level}": call
            for entry in entries
            if entry.refused is None and (call := getattr(entry.contender, direction)) is not None
        }
        asked = everybody | {"direction": direction}
        watch.expect(asked, "the rounds")
        times = time_calls(calls, session, args.rounds, args.timing, args.round_s)
        leave_if_lost(asked | {"refused": "the device was lost while turns were taken"}, session, book)
        for entry in entries:
            time_ = times.get(f"{entry.who} {entry.level}", Time(refused=entry.refused or f"no {direction}"))
            rows.append(make_row(common, problem, direction, entry, time_))
    watch.rest()
    if group == "carry":
        add_costs(rows)
    return rows


def make_row(common: dict[str, Any], problem: Problem, direction: str, entry: _Entry, time_: Time) -> dict[str, Any]:
    """One row (Note [Rows])."""
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
    assert ms is not None, "who is not refused has a time"
    flops = FACTORS[direction] * problem.flops
    row |= {"calls_ms": time_.calls_ms, "graph_ms": time_.graph_ms, "graph_refused": time_.graph_refused}
    return row | {
        "timing": "graph" if graphed else "calls",
        "rounds": time_.rounds,
        "ms": ms,
        "tflops": teraflops(flops, ms),
    }


def add_costs(rows: list[dict[str, Any]]) -> None:
    """What the carry costs over the same kernel without it, under the same way of timing."""
    plain = {row["who"]: row for row in rows if row["level"] == "kernel" and "ms" in row}
    for row in rows:
        beside = plain.get(row["who"])
        if row["level"] == "carried" and "ms" in row and beside is not None and beside["timing"] == row["timing"]:
            row["plain_ms"] = beside["ms"]
            row["cost_percent"] = 100 * (row["ms"] / beside["ms"] - 1)


def leave_if_lost(row: dict[str, Any], session: Session, book: Book) -> None:
    """Keeps a row and ends the run when the device no longer answers: what follows would be blamed on others."""
    if session.device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(session.device)
    except Exception as error:
        book.rows.append(row)
        book.write()
        raise SystemExit(
            f"the device must answer, got {reason(error)} after {row['who']}; start again without it"
        ) from error


def describe_problem(problem: Problem) -> str:
    """The sizes, for people."""
    heads = f"h{problem.heads}/{problem.kv_heads}" if problem.heads != problem.kv_heads else f"h{problem.heads}"
    return f"{problem.mask} b{problem.batch} n{problem.seq_len} {heads} d{problem.head_dim} {problem.dtype}"


def compile_ahead(args: Kernels, arguments: Sequence[str], session: Session) -> None:
    """Fills the compilers' caches on disk from many processes, because one process compiles one kernel at a time."""
    jobs = max(1, min((os.cpu_count() or 2) - 1, 12))
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ringattn.launch.bench", *arguments, "--compile-share"]
    shares = [
        subprocess.Popen(
            [*command, f"{job}/{jobs}"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for job in range(jobs)
    ]
    deadline = time.monotonic() + min(args.patience_s, args.budget_s / 3 if args.budget_s else args.patience_s)
    with ended(shares):
        for share in shares:
            with contextlib.suppress(subprocess.TimeoutExpired):
                share.wait(max(0.0, deadline - time.monotonic()))
    session.say(f"compiled ahead by {jobs} processes")


def share_of_compiling(args: Kernels) -> Iterator[tuple[str, str, Problem]]:
    """(who, level, problem) of every different kernel, most important first, that one process shall compile."""
    different: dict[tuple[object, ...], tuple[str, str, Problem]] = {}
    on_disk = os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED") == "1"
    for group, problem in schedule(args):
        for who, level in names(args, group):
            if who in ("cudnn", "fa2") or (who == "fa4" and not on_disk):
                continue
            kind = (problem.mask, problem.head_dim, problem.heads // problem.kv_heads)
            # FlexAttention compiles for the very shape; of ours the op runs the kernels of the level "kernel"
            level = level if level == "carried" or who in PEERS else "kernel"
            key = (who, level, *kind, problem) if who == "flex" else (who, level, *kind, problem.batch)
            different.setdefault(key, (who, level, problem))
    yield from share_of(list(different.values()), args.compile_share)


def compile_share(args: Kernels, session: Session) -> None:
    """What one process of `compile_ahead` does; whatever fails here will say so when it is measured."""
    ring = ringattn.Ring()
    for who, level, problem in share_of_compiling(args):
        try:
            contender = prepare(who, level, Inputs(problem, session.device), ring)
            if "backward" in args.directions and contender.backward is not None:
                contender.forward()
                contender.backward()
        except Exception as error:
            print(f"{who} {describe_problem(problem)}: {reason(error)}", file=sys.stderr)
        forget()


def forget() -> None:
    """Compiled graphs and saved tensors of one problem must not crowd the next."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def bench_kernels(
    args: Kernels, session: Session, machine: dict[str, Any], arguments: Sequence[str], path: Path
) -> Book | None:
    """Measures what the arguments ask for, as far as the budget goes.

    Args:
        args: What.
        session: One process.
        machine: The machine line, for the JSON.
        arguments: The command line, for processes that compile ahead.
        path: The JSON.

    Returns:
        The rows; None for a process that only compiles.
    """
    if session.world_size > 1:
        raise SystemExit("bench kernels must run in one process; start it with python -m, and bench ring with torchrun")
    if not schedule(args):
        raise SystemExit(
            "bench kernels must have a problem to measure, got none; pass other --groups, --masks or --lengths"
        )
    if args.compile_share:
        compile_share(args, session)
        return None
    began = time.monotonic()
    if args.ahead and session.device.type == "cuda":
        compile_ahead(args, arguments, session)
    if session.device.type != "cuda":
        return _measure_all(args, session, Book(path, machine), began)
    # graphs cannot be captured from the default stream
    with torch.cuda.stream(torch.cuda.Stream(session.device)):
        return _measure_all(args, session, Book(path, machine), began)


def _measure_all(args: Kernels, session: Session, book: Book, began: float) -> Book:
    ring = ringattn.Ring()
    watch = Watch(book, args.patience_s)
    compiled: set[tuple[object, ...]] = set()
    planned = schedule(args)
    slower, guessed, spent = 1.0, 0.0, 0.0
    for index, (group, problem) in enumerate(planned):
        ahead = estimate(args, group, problem, compiled)
        elapsed = time.monotonic() - began
        if args.budget_s and elapsed + slower * ahead > args.budget_s:
            book.left_out.append({"group": group, **dataclasses.asdict(problem), "estimated_s": slower * ahead})
            book.write()
            continue
        started = time.monotonic()
        try:
            rows = measure(args, group, problem, ring, session, book, watch)
        except torch.OutOfMemoryError as error:
            watch.rest()
            rows = [{"bench": "kernels", "group": group, **dataclasses.asdict(problem), "pairs": problem.pairs}]
            rows[0] |= {"who": "everybody", "level": "op", "direction": "forward", "refused": reason(error)}
        took = time.monotonic() - started
        guessed, spent = guessed + ahead, spent + took
        slower = min(3.0, max(0.3, spent / guessed))
        book.rows += [row | {"problem_s": round(took, 1)} for row in rows]
        book.write()
        session.say(f"{index + 1}/{len(planned)} {group}: {describe_problem(problem)}, {took:.0f} s")
        say_rows(rows, session.say)
        forget()
    return book


def say_rows(rows: Sequence[dict[str, Any]], say: Callable[..., None]) -> None:
    """One line per direction: who reaches what, in TFLOP/s."""
    for direction in FACTORS:
        found = [row for row in rows if row.get("direction") == direction]
        if found:
            cells = (
                f"{row['who']}{'' if row['level'] == 'op' else ' ' + row['level']} "
                + (f"{row['tflops']:.3g}{'' if row['timing'] == 'graph' else '*'}" if "ms" in row else "-")
                for row in found
            )
            say(f"  {direction:8} {', '.join(cells)}")
