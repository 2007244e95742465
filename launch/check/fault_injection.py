"""Fault injection: when a rank is lost, every survivor must raise in time, and the devices must stay usable.

    python -m ringattn.launch.check faults --ranks 4 --times 50 --parallel 8 --timeout 5
    python -m ringattn.launch.check faults --ranks 2 --times 3 --device cpu
    python -m ringattn.launch.check faults --what graph --faults kill --ranks 4 --times 20

kill: one rank is killed (SIGKILL) at a random moment of a step. absent: one rank stops making calls, but stays alive. shape:
one rank calls with other heads than the rest. The rank, and the number of good steps before, are drawn from a seed per trial.
The steps are attention, forward and backward; or one token of decode, which is then truncated; or the same from a CUDA graph,
whose replay makes no host call that could raise: the ring waits for it (`Ring.synchronize`).

Every rank that was not killed and did not stop is a survivor. It must end with an exception or a non-zero code within the
timeout, counted from the fault, and a grace for ending processes; and its output must name a rank and, unless ranks are
compared before the first byte, a step. After each batch of trials a fresh process computes on every device.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import itertools
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ringattn.launch.common.distributed import choose_backend, disable_multicast, resolve_device
from ringattn.launch.common.ring_variants import SCHEDULES, ScheduleName, check_nodes
from ringattn.launch.common.session import parse, table, write_json

if TYPE_CHECKING:
    import ringattn

Fault = Literal["kill", "absent", "shape"]
What = Literal["training", "decode", "graph"]
FAULTS: tuple[Fault, ...] = ("kill", "absent", "shape")
GRACE_S = 5.0
"""Time to end a process after the timeout: communicators are aborted, memory is freed."""
LATE_S = 20.0
"""Time beyond it that a process is given to tell one that ends late from one that never does."""
START_S = 120.0
"""Time to join and to make the first good step: contexts, communicators, compilation."""
NAMES_A_RANK = re.compile(r"\branks? \[?\d", re.IGNORECASE)
NAMES_A_STEP = re.compile(
    r"\bsteps? \d|SeqNum=\d|an exchange of|did not make this attention call|all ranks must make the same call"
    r"|must be the same on all ranks of a ring"
)
"""A step, or a decode's exchange, or NCCL's number of an operation, or a comparison before any step."""


@dataclass(frozen=True)
class FaultArgs:
    """Loses a rank in many ways, many times, and checks that the others raise.

    Attributes:
        ranks: Ranks of a ring.
        times: Trials of each fault.
        parallel: Trials at a time.
        timeout: Seconds after which a ring must have raised.
        faults: Faults to inject.
        what: Work of the ranks when it happens: training, decode, or decode from a CUDA graph.
        schedule: How keys move, as in `check`.
        nodes: Nodes of equal size that the ranks share, as in `check`.
        tokens: Tokens of the whole sequence, or of the request.
        impl: Kernels: "auto", or the name of a kernel set.
        seed: Of the first trial.
        device: GPUs where there are any, or the CPU.
        out: Folder for the output of failed trials, and the JSON.
    """

    ranks: int = 4
    times: int = 50
    parallel: int = 8
    timeout: float = 5.0
    faults: tuple[Fault, ...] = FAULTS
    what: What = "training"
    schedule: ScheduleName = "auto"
    nodes: int = 1
    tokens: int = 1024
    impl: str = "auto"
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path = Path("runs/faults")


@dataclass(frozen=True)
class Trial:
    """One fault of rank `victim`, after `steps` good steps; "kill" after another `moment_ms`."""

    fault: Fault
    victim: int
    steps: int
    moment_ms: float


@dataclass
class Outcome:
    """End of one rank: its output, its exit code and the seconds from the fault; None when it did not end."""

    rank: int
    code: int | None
    seconds: float | None
    output: str


@dataclass
class Verdict:
    """Result of one trial.

    Attributes:
        happened: All ranks had made their good steps, and then the fault happened.
        ended: Every survivor ended with an error in time.
        named: Every survivor named a rank and a step.
        usable: Fresh processes computed on every device afterwards.
    """

    trial: Trial
    happened: bool
    ended: bool
    named: bool
    slowest_s: float
    outcomes: list[Outcome] = field(default_factory=list)
    usable: bool = True

    @property
    def good(self) -> bool:
        """Whether all is as it should be."""
        return self.happened and self.ended and self.named and self.usable


def draw_trial(fault: Fault, ranks: int, seed: int) -> Trial:
    """The trial of a seed."""
    draw = random.Random(f"{fault} {seed}")
    least = 1 if fault == "kill" else 0
    return Trial(fault, draw.randrange(ranks), draw.randint(least, 3), draw.choice((0.0, draw.uniform(0, 8))))


def judge(trial: Trial, outcomes: Sequence[Outcome], happened: bool, timeout: float) -> Verdict:
    """Judge the ends of all ranks."""
    # a rank of another shape must raise like the others
    survivors = [one for one in outcomes if one.rank != trial.victim or trial.fault == "shape"]
    ended = all(one.code not in (None, 0) and (one.seconds or 0.0) <= timeout + GRACE_S for one in survivors)
    named = all(NAMES_A_RANK.search(one.output) and NAMES_A_STEP.search(one.output) for one in survivors)
    slowest = max((one.seconds if one.seconds is not None else float("inf") for one in survivors), default=0.0)
    return Verdict(trial, happened, happened and ended, happened and named, slowest, list(outcomes))


def run_rank(
    args: FaultArgs, trial: Trial, rank: int, port: int, device: str, log: str, clock: Any, ready: Any
) -> None:
    """Run one rank until it ends; its output goes to `log`.

    `clock` is shared: the time of the fault, 0.0 before. `ready` counts ranks that made their good steps.
    """
    with open(log, "wb", buffering=0) as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
        # the stacks of a rank that hangs, whatever holds the interpreter
        faulthandler.dump_traceback_later(START_S)
        try:
            _run_steps(args, trial, rank, port, device, clock, ready)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            # at once: destroying a group whose peers are gone may wait for them
            os._exit(1)
        os._exit(0)


def _run_steps(args: FaultArgs, trial: Trial, rank: int, port: int, device: str, clock: Any, ready: Any) -> None:
    import ringattn

    torch.set_num_threads(1)
    timeout, start = datetime.timedelta(seconds=args.timeout), datetime.timedelta(seconds=START_S)
    where = resolve_device(device, rank, args.ranks)
    if device == "cuda":
        torch.cuda.set_device(where)
    backend = choose_backend(where, args.ranks)
    disable_multicast()
    if backend == "gloo" and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=start)  # pyright: ignore[reportPrivateImportUsage]
    _barrier(store, "joined", args.ranks)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("ring", store),  # pyright: ignore[reportPrivateImportUsage]
        rank=rank,
        world_size=args.ranks,
        # gloo keeps the timeout it starts with; between CPUs there is nothing to compile
        timeout=start if backend == "nccl" else timeout,
        device_id=where if backend == "nccl" else None,
    )

    begin = _begin_training if args.what == "training" else _begin_decode
    options: dict[str, Any] = {"impl": args.impl, "nodes": args.nodes, **SCHEDULES[args.schedule]}
    warm = ringattn.Ring(timeout=start, **options)
    begin(args, warm, where)()
    warm.close()
    if backend == "nccl":
        distributed_c10d._set_pg_timeout(timeout)
    ring = ringattn.Ring(timeout=timeout, **options)
    _barrier(store, "warm", args.ranks)
    step = begin(args, ring, where)
    for _ in range(trial.steps):
        step()
    _barrier(store, "ready", args.ranks)
    with ready.get_lock():
        ready.value += 1
    if rank == trial.victim:
        clock.value = time.monotonic()
        if trial.fault == "kill":
            threading.Timer(trial.moment_ms / 1e3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        elif trial.fault == "absent":
            threading.Event().wait()
        else:
            step(kv_heads=4)
    faulthandler.dump_traceback_later(args.timeout + GRACE_S)
    # a survivor may need more than one step to see the fault
    while True:
        step()


def _draw(where: torch.device, batch: int, rows: int, *heads: int) -> list[Tensor]:
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    return [torch.ones(batch, rows, h, 64, dtype=dtype, device=where) for h in heads]


def _begin_training(args: FaultArgs, ring: ringattn.Ring, where: torch.device) -> Callable[..., None]:
    import ringattn

    sharding = ring.sharding(args.tokens)

    def step(kv_heads: int = 2) -> None:
        leaves = [x.requires_grad_() for x in _draw(where, 1, sharding.shard_len, 4, kv_heads, kv_heads)]
        o = ringattn.ring_attention(*leaves, sharding, causal=True, impl=args.impl)  # pyright: ignore[reportCallIssue]
        torch.autograd.grad(o.sum(), leaves)
        if where.type == "cuda":
            torch.cuda.synchronize(where)

    return step


@torch.no_grad()
def _begin_decode(args: FaultArgs, ring: ringattn.Ring, where: torch.device) -> Callable[..., None]:
    from ringattn.inference import ForwardBatch, PagedKVCache, attend

    sizes: dict[str, Any] = {
        "layers": 2, "kv_heads": 2, "head_dim": 64, "page_size": 16, "pages": args.tokens // 16 + 2,
    }  # fmt: skip
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    cache = PagedKVCache(ring, dtype=dtype, device=where, **sizes)
    request = cache.add_request(args.tokens + 1)

    def layers(step: ForwardBatch, heads: int = 4) -> None:
        q, k, v = _draw(where, step.batch, step.rows, heads, 2, 2)
        for layer in range(cache.layers):
            attend(step, layer, q, k, v)

    layers(cache.extend([request], [args.tokens], mode="prefill"))
    static = cache.static_batch(1, max_tokens=args.tokens + 1) if args.what == "graph" else None

    def extend() -> ForwardBatch:
        cache.truncate(request, args.tokens)
        return cache.extend([request], [1], mode="decode", into=static)

    graph, numbers = None, itertools.count()
    if static is not None:
        stream = torch.cuda.Stream(where)
        stream.wait_stream(torch.cuda.current_stream(where))
        with torch.cuda.stream(stream):
            layers(extend())
        torch.cuda.synchronize(where)
        graph = torch.cuda.CUDAGraph()
        extend()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            layers(static)

    @torch.no_grad()
    def step(kv_heads: int = 2) -> None:
        batch = extend()
        if graph is None or kv_heads != 2:
            # the KV heads of the cache are fixed; the query heads are not
            layers(batch, 2 * kv_heads)
        else:
            graph.replay()
        ring.synchronize(where, what=f"decoding step {next(numbers)}")

    return step


def _barrier(store: Any, what: str, ranks: int) -> None:
    store.add(what, 1)
    deadline = time.monotonic() + START_S
    while (count := store.add(what, 0)) < ranks:
        if time.monotonic() > deadline:
            raise TimeoutError(f"all ranks must reach {what!r} within {START_S} s, got {count} of {ranks}")
        time.sleep(0.002)


def compute_on_devices(device: str) -> None:
    """Multiply on every device, in a fresh process."""
    for index in range(torch.cuda.device_count() if device == "cuda" else 1):
        where = torch.device(device, index)
        x = torch.arange(64.0, device=where).view(8, 8)
        assert float((x @ torch.eye(8, device=where) - x).abs().sum()) == 0.0, f"device {index} computes wrong numbers"


class _TrialProcesses:
    """Processes of one trial."""

    def __init__(self, args: FaultArgs, trial: Trial, device: str, context: Any, folder: Path) -> None:
        self.trial, self.timeout = trial, args.timeout
        self.clock, self.ready = context.Value("d", 0.0), context.Value("i", 0)
        # outlives every rank, as the store of a launcher does; port 0: any free one
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
        self.logs = [folder / f"rank{rank}.txt" for rank in range(args.ranks)]
        folder.mkdir(parents=True, exist_ok=True)
        self.processes: list[BaseProcess] = []
        for rank, log in enumerate(self.logs):
            arguments = (args, trial, rank, self.store.port, device, str(log), self.clock, self.ready)
            self.processes.append(context.Process(target=run_rank, args=arguments, daemon=True))
            self.processes[-1].start()
        self.started = time.monotonic()
        self.ends: dict[int, float] = {}

    def over(self) -> bool:
        """Whether all that must end have ended, or had the time to."""
        now, began = time.monotonic(), self.clock.value
        for rank, process in enumerate(self.processes):
            if not process.is_alive():
                self.ends.setdefault(rank, now)
        absent = {self.trial.victim} if self.trial.fault == "absent" else set()
        if self.ends.keys() | absent == set(range(len(self.processes))):
            return True
        return now > (began + self.timeout + GRACE_S + LATE_S if began else self.started + 1.5 * START_S)

    def finish(self) -> Verdict:
        """Kill the processes that still run, and judge."""
        began, outcomes = self.clock.value, []
        alive = [process.is_alive() for process in self.processes]
        for process in self.processes:
            process.kill()
        for rank, (process, log) in enumerate(zip(self.processes, self.logs, strict=True)):
            process.join(10)
            seconds = self.ends[rank] - began if rank in self.ends and began else None
            text = log.read_text(errors="replace") if log.exists() else ""
            outcomes.append(Outcome(rank, None if alive[rank] else process.exitcode, seconds, text))
        return judge(self.trial, outcomes, bool(began) and self.ready.value == len(self.processes), self.timeout)


def run_trials(args: FaultArgs, device: str, folder: Path) -> list[Verdict]:
    """Run all trials, `args.parallel` at a time; after each batch check the devices and write the results."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ringattn.launch.check.fault_injection", "ringattn", "ringattn.inference"])
    trials = [
        draw_trial(fault, args.ranks, args.seed + number) for number in range(args.times) for fault in args.faults
    ]
    verdicts: list[Verdict] = []
    for first in range(0, len(trials), args.parallel):
        running = []
        try:
            for index, trial in enumerate(trials[first : first + args.parallel], start=first):
                running.append(_TrialProcesses(args, trial, device, context, folder / f"{index:04d}-{trial.fault}"))
            while not all([one.over() for one in running]):
                time.sleep(0.01)
        finally:
            found = [one.finish() for one in running]
        probe = context.Process(target=compute_on_devices, args=(device,), daemon=True)
        probe.start()
        probe.join(START_S)
        for verdict in found:
            verdict.usable = probe.exitcode == 0
        probe.kill()
        verdicts += found
        record(args, verdicts, found)
        print(f"{len(verdicts)} of {len(trials)} trials, {sum(not one.good for one in verdicts)} bad", flush=True)
    return verdicts


def record(args: FaultArgs, verdicts: Sequence[Verdict], new: Sequence[Verdict]) -> None:
    """Write all verdicts so far, and print the bad ones among `new`, the last of them, so that an aborted run has them."""
    for index, verdict in enumerate(new, start=len(verdicts) - len(new)):
        if verdict.good:
            continue
        ends = ", ".join(
            f"rank {one.rank} code {one.code}" + (f" after {one.seconds:.1f} s" if one.seconds is not None else "")
            for one in verdict.outcomes
        )
        facts = ", ".join(f"{name} {getattr(verdict, name)}" for name in ("happened", "ended", "named", "usable"))
        print(f"bad: {verdict.trial}: {facts}: {ends}", flush=True)
        args.out.mkdir(parents=True, exist_ok=True)
        for one in verdict.outcomes:
            (args.out / f"{index}-{verdict.trial.fault}-rank{one.rank}.txt").write_text(one.output)
    rows = [asdict(one) for one in verdicts]
    for outcome in (outcome for row in rows for outcome in row["outcomes"]):
        outcome["output"] = outcome["output"][-300:]
    facts = {"ranks": args.ranks, "timeout": args.timeout, "what": args.what}
    write_json(args.out / "faults.json", facts | {"trials": rows})


def show(verdicts: Sequence[Verdict]) -> None:
    """Print a line per fault."""
    columns = {"happened": "happened", "ended": "survivors ended in time", "named": "rank and step named"}
    columns |= {"usable": "devices usable", "good": "good"}
    lines = []
    for fault in FAULTS:
        if found := [one for one in verdicts if one.trial.fault == fault]:
            counts = (sum(getattr(one, name) for one in found) for name in columns)
            slowest = max(one.slowest_s for one in found)
            lines.append([fault, *(f"{count} of {len(found)}" for count in counts), f"{slowest:.1f}"])
    table("lost ranks", ["fault", *columns.values(), "slowest s"], lines)


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code: 0 when every trial was good."""
    args: FaultArgs = parse(FaultArgs, arguments, "check faults", (FaultArgs.__doc__ or "").split("\n")[0])
    if args.ranks < 2:
        raise SystemExit(
            f"error: ranks must be at least 2, one to lose and one to survive, got {args.ranks}; pass --ranks"
        )
    try:
        device = resolve_device(args.device, 0, args.ranks).type
    except ValueError as error:
        raise SystemExit(f"error: {str(error).partition(';')[0]}; pass --ranks or --device cpu") from None
    if args.what == "graph" and device == "cpu":
        raise SystemExit("error: --what graph must have GPUs, which CUDA graphs are of, got the CPU; use --what decode")
    if device == "cpu" and SCHEDULES[args.schedule].get("transport") == "copy_engine":
        raise SystemExit(f"error: --schedule {args.schedule} must have GPUs, got the CPU; use --schedule process_group")
    check_nodes(args.nodes, args.ranks)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ringattn-faults-") as folder:
        verdicts = run_trials(args, device, Path(folder))
    bad = [one for one in verdicts if not one.good]
    show(verdicts)
    colour = "red" if bad or not verdicts else "green"
    print(f"{colour}: {len(verdicts) - len(bad)} of {len(verdicts)} trials good, {time.perf_counter() - began:.1f} s")
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    return int(colour == "red")
