"""What happens when a rank is lost: every survivor must say so in time, and leave the devices usable.

Owns the faults, the processes they happen to, and the verdict. Refuses to know how a ring notices.

    python -m ringattn.launch.check faults --ranks 4 --times 50 --parallel 8 --timeout 5
    python -m ringattn.launch.check faults --ranks 2 --times 3 --device cpu
    python -m ringattn.launch.check faults --what graph --faults kill --ranks 4 --times 20

Note [Faults]
    kill: one rank is killed (SIGKILL) at a random moment of a step. absent: one rank stops making calls, and lives. shape: one
    rank comes with other heads than the rest. Which rank, and after how many good steps (none is possible for the last two), is
    drawn from a seed per trial.

Note [Steps]
    training: attention over a sharded sequence, forward and backward. decode: a token more of a request that a cache holds, which
    is then forgotten, so that it goes on for ever. graph: the same from a CUDA graph, whose replays make no call of the host
    that could raise, and which no watchdog knows; after each the ring waits for it (`Ring.synchronize`).

Note [Verdict]
    A survivor is every rank that was not killed and did not stop. It must end with an exception or a non-zero code within the
    timeout, counted from the fault, and a grace for ending processes; and something that it wrote must name a rank and, unless
    ranks are compared before the first byte, a step. Processes are forked from a server that has imported everything and has
    touched no device. After each batch of trials a fresh process computes on every device.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import itertools
import math
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
from torch.distributed import distributed_c10d

from ringattn.launch.runtime.distributed import choose_backend, resolve_device
from ringattn.launch.runtime.ring_variants import SCHEDULES, ScheduleName, check_nodes
from ringattn.launch.runtime.session import parse, table, write_json
from ringattn.transport.gpu_sharing import may_share_gpus

if TYPE_CHECKING:
    import ringattn

Fault = Literal["kill", "absent", "shape"]
What = Literal["training", "decode", "graph"]
FAULTS: tuple[Fault, ...] = ("kill", "absent", "shape")
GRACE_S = 5.0
"""What ending a process may take beyond the timeout: aborting communicators, freeing memory."""
START_S = 120.0
"""What joining and the first good step may take: contexts, communicators, compilation."""
NAMES_A_RANK = re.compile(r"\branks? \[?\d", re.IGNORECASE)
NAMES_A_STEP = re.compile(
    r"\bsteps? \d|SeqNum=\d|an exchange of|did not make this attention call|all ranks must make the same call"
    r"|must be the same on all ranks of a ring"
)
"""A step, or a decode's exchange, or NCCL's number of an operation, or a comparison that comes before any step."""


@dataclass(frozen=True)
class FaultArgs:
    """Loses a rank in many ways, many times, and looks at what the others do.

    Attributes:
        ranks: Ranks of a ring.
        times: Trials of each fault.
        parallel: Trials at a time.
        timeout: Seconds after which a ring must have noticed.
        faults: Which.
        what: What ranks do when it happens: training, decode, or decode from a CUDA graph.
        schedule: How keys move, as in `check`.
        nodes: Nodes of equal size that the ranks share, as in `check`.
        tokens: Tokens of the whole sequence, or of the request.
        impl: Kernels: "auto", or the name of a kernel set.
        seed: Of the first trial.
        device: GPUs where there are any, or the CPU.
        out: Folder for what failed trials wrote, and the JSON.
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
    """One fault.

    Attributes:
        fault: Which.
        victim: The rank it happens to.
        steps: Good steps before it.
        moment_ms: For "kill": how far into the step.
    """

    fault: Fault
    victim: int
    steps: int
    moment_ms: float


@dataclass
class Outcome:
    """How one rank ended.

    Attributes:
        rank: The rank.
        code: Exit code; negative for a signal; None when it had to be killed by us.
        seconds: From the fault to its end; None when it did not end.
        said: What it wrote.
    """

    rank: int
    code: int | None
    seconds: float | None
    said: str


@dataclass
class Verdict:
    """What one trial showed.

    Attributes:
        trial: The trial.
        happened: Whether the fault happened at all: all ranks had made their good steps.
        ended: Every survivor ended with an error in time.
        named: Every survivor named a rank and a step.
        usable: Fresh processes computed on every device afterwards.
        slowest_s: The longest time a survivor took.
        outcomes: By rank.
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
    """The verdict over how all ranks ended (Note [Verdict])."""
    # a rank of another shape is told like everybody else
    survivors = [one for one in outcomes if one.rank != trial.victim or trial.fault == "shape"]
    ended = all(one.code not in (None, 0) and (one.seconds or 0.0) <= timeout + GRACE_S for one in survivors)
    named = all(NAMES_A_RANK.search(one.said) and NAMES_A_STEP.search(one.said) for one in survivors)
    slowest = max((one.seconds if one.seconds is not None else float("inf") for one in survivors), default=0.0)
    return Verdict(trial, happened, happened and ended, happened and named, slowest, list(outcomes))


def serve(args: FaultArgs, trial: Trial, rank: int, port: int, device: str, log: str, clock: Any, ready: Any) -> None:
    """One rank's life.

    Args:
        args: Of the command.
        trial: What will happen.
        rank: This rank.
        port: Of the store.
        device: "cpu" or "cuda".
        log: File for everything it writes.
        clock: Shared: when the fault happened, 0.0 before.
        ready: Counts ranks that made their good steps.
    """
    with open(log, "wb", buffering=0) as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
        faulthandler.register(signal.SIGUSR1, file)
        try:
            _live(args, trial, rank, port, device, clock, ready)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            # no goodbyes: destroying a group whose peers are gone may wait for them
            os._exit(1)
        os._exit(0)


def _live(args: FaultArgs, trial: Trial, rank: int, port: int, device: str, clock: Any, ready: Any) -> None:
    import ringattn

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=args.timeout)
    where = torch.device("cpu")
    if device == "cuda":
        where = resolve_device("cuda", rank, args.ranks)
        torch.cuda.set_device(where)
    backend = choose_backend(where, args.ranks)
    # as in `distributed`: multicast is of no use here and has hung hosts
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    if backend == "gloo" and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # joining, and compiling in the first step, take longer than any other
    patient = datetime.timedelta(seconds=START_S)
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        "127.0.0.1", port, is_master=False, timeout=patient
    )
    _meet(store, "joined", args.ranks)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("ring", store),  # pyright: ignore[reportPrivateImportUsage]
        rank=rank,
        world_size=args.ranks,
        # gloo keeps the timeout it starts with; between CPUs there is nothing to compile
        timeout=patient if backend == "nccl" else timeout,
        device_id=where if backend == "nccl" else None,
    )

    begin = _begin_training if args.what == "training" else _begin_decode
    warm = ringattn.Ring(timeout=patient, impl=args.impl, nodes=args.nodes, **SCHEDULES[args.schedule])
    begin(args, warm, where)()
    warm.close()
    if backend == "nccl":
        distributed_c10d._set_pg_timeout(timeout)
    ring = ringattn.Ring(timeout=timeout, impl=args.impl, nodes=args.nodes, **SCHEDULES[args.schedule])
    _meet(store, "warm", args.ranks)
    step = begin(args, ring, where)
    for _ in range(trial.steps):
        step()
    _meet(store, "ready", args.ranks)
    with ready.get_lock():
        ready.value += 1
    if rank == trial.victim:
        clock.value = time.monotonic()
        _fail(trial, step)
    # a step is not always the one in which a loss shows
    while True:
        step()


def _begin_training(args: FaultArgs, ring: ringattn.Ring, where: torch.device) -> Callable[..., None]:
    import ringattn

    sharding = ring.sharding(args.tokens)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32

    def step(kv_heads: int = 2) -> None:
        heads = (4, kv_heads, kv_heads)
        q, k, v = (torch.ones(1, sharding.shard_len, h, 64, device=where, requires_grad=True) for h in heads)
        o = ringattn.ring_attention(q.to(dtype), k.to(dtype), v.to(dtype), sharding, causal=True, impl=args.impl)
        torch.autograd.grad(o.sum(), (q, k, v))
        if where.type == "cuda":
            torch.cuda.synchronize(where)

    return step


@torch.no_grad()
def _begin_decode(args: FaultArgs, ring: ringattn.Ring, where: torch.device) -> Callable[..., None]:
    from ringattn.inference import ForwardBatch, PagedKVCache, attend

    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    sizes: dict[str, Any] = {
        "layers": 2,
        "kv_heads": 2,
        "head_dim": 64,
        "page_size": 16,
        "pages": args.tokens // 16 + 2,
    }
    cache = PagedKVCache(ring, dtype=dtype, device=where, **sizes)
    request = cache.add_request(args.tokens + 1)

    def layers(step: ForwardBatch, heads: int = 4) -> None:
        q, k, v = (torch.ones(step.batch, step.rows, h, 64, dtype=dtype, device=where) for h in (heads, 2, 2))
        for layer in range(cache.layers):
            attend(step, layer, q, k, v)

    layers(cache.extend([request], [args.tokens], mode="prefill"))
    static = cache.static_batch(1, max_tokens=args.tokens + 1) if args.what == "graph" else None

    def extend() -> ForwardBatch:
        cache.truncate(request, args.tokens)
        return cache.extend([request], [1], mode="decode", into=static)

    graph = None
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

    numbers = itertools.count()

    @torch.no_grad()
    def step(kv_heads: int = 2) -> None:
        said = extend()
        if graph is None or kv_heads != 2:
            # the cache has the heads that it has: those of queries are others
            layers(said, 2 * kv_heads)
        else:
            graph.replay()
        ring.synchronize(where, what=f"decoding step {next(numbers)}")

    return step


def _meet(store: Any, what: str, ranks: int) -> None:
    store.add(what, 1)
    deadline = time.monotonic() + START_S
    while store.add(what, 0) < ranks:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"all ranks must come to {what!r} within {START_S} s, got {store.add(what, 0)} of {ranks}"
            )
        time.sleep(0.002)


def _fail(trial: Trial, step: Callable[..., None]) -> None:
    if trial.fault == "kill":
        threading.Timer(trial.moment_ms / 1e3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        while True:
            step()
    if trial.fault == "absent":
        while True:
            time.sleep(60)
    step(kv_heads=4)


def compute_afresh(device: str) -> None:
    """What a fresh process does on every device."""
    count = torch.cuda.device_count() if device == "cuda" else 1
    for index in range(count):
        where = torch.device(device, index) if device == "cuda" else torch.device("cpu")
        x = torch.arange(64.0, device=where).view(8, 8)
        assert float((x @ torch.eye(8, device=where) - x).abs().sum()) == 0.0, f"device {index} computes wrong numbers"


class _Running:
    """The processes of one trial."""

    def __init__(self, args: FaultArgs, trial: Trial, device: str, context: Any, folder: Path) -> None:
        self.trial, self.timeout = trial, args.timeout
        self.clock, self.ready = context.Value("d", 0.0), context.Value("i", 0)
        # the store outlives every rank, as that of a launcher does; port 0: the system picks
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
        port = self.store.port
        self.logs = [folder / f"rank{rank}.txt" for rank in range(args.ranks)]
        folder.mkdir(parents=True, exist_ok=True)
        self.processes: list[BaseProcess] = []
        for rank, log in enumerate(self.logs):
            arguments = (args, trial, rank, port, device, str(log), self.clock, self.ready)
            self.processes.append(context.Process(target=serve, args=arguments, daemon=True))
            self.processes[-1].start()
        self.started = time.monotonic()
        self.ends: dict[int, float] = {}

    def over(self) -> bool:
        """Whether every survivor has ended, or had the time to."""
        now = time.monotonic()
        for rank, process in enumerate(self.processes):
            if rank not in self.ends and not process.is_alive():
                self.ends[rank] = now
        waited_for = [rank for rank in range(len(self.processes)) if self._must_end(rank)]
        if all(rank in self.ends for rank in waited_for):
            return True
        began = self.clock.value
        return now > (began + self.timeout + GRACE_S if began else self.started + 1.5 * START_S)

    def _must_end(self, rank: int) -> bool:
        return rank != self.trial.victim or self.trial.fault != "absent"

    def finish(self) -> Verdict:
        """Ends what still runs, and judges."""
        began, outcomes = self.clock.value, []
        alive = [process.is_alive() for process in self.processes]
        for process in self.processes:
            if process.is_alive() and process.pid is not None:
                # where it hangs belongs to what it said
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.1 if any(alive) else 0.0)
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for rank, (process, log) in enumerate(zip(self.processes, self.logs, strict=True)):
            process.join(10)
            code = None if alive[rank] else process.exitcode
            seconds = self.ends[rank] - began if rank in self.ends and began else None
            text = log.read_text(errors="replace") if log.exists() else ""
            outcomes.append(Outcome(rank, code, seconds, text))
        happened = bool(began) and self.ready.value == len(self.processes)
        return judge(self.trial, outcomes, happened, self.timeout)


def run_trials(args: FaultArgs, device: str, folder: Path) -> list[Verdict]:
    """All trials, `args.parallel` at a time; a batch is followed by a look at the devices, and recorded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ringattn.launch.check.fault_injection", "ringattn", "ringattn.inference"])
    trials = [
        draw_trial(fault, args.ranks, args.seed + number) for number in range(args.times) for fault in args.faults
    ]
    verdicts: list[Verdict] = []
    for first in range(0, len(trials), args.parallel):
        batch = trials[first : first + args.parallel]
        running = []
        try:
            for index, trial in enumerate(batch):
                running.append(_Running(args, trial, device, context, folder / f"{first + index:04d}-{trial.fault}"))
            while not all([one.over() for one in running]):
                time.sleep(0.01)
        finally:
            found = [one.finish() for one in running]
        probe = context.Process(target=compute_afresh, args=(device,), daemon=True)
        probe.start()
        probe.join(START_S)
        usable = probe.exitcode == 0
        if probe.is_alive():
            probe.kill()
        for verdict in found:
            verdict.usable = usable
        verdicts += found
        record(args, verdicts, found)
        print(f"{len(verdicts)} of {len(trials)} trials, {sum(not one.good for one in verdicts)} bad", flush=True)
    return verdicts


def record(args: FaultArgs, verdicts: Sequence[Verdict], new: Sequence[Verdict]) -> None:
    """Keeps all verdicts so far, and says which of the new ones are bad: a run that is cut off has said so.

    Args:
        args: Of the command.
        verdicts: All so far.
        new: The last of them.
    """
    for index, verdict in enumerate(verdicts):
        if verdict.good or index < len(verdicts) - len(new):
            continue
        ends = ", ".join(
            f"rank {one.rank} code {one.code}" + (f" after {one.seconds:.1f} s" if one.seconds is not None else "")
            for one in verdict.outcomes
        )
        facts = f"happened {verdict.happened}, ended {verdict.ended}, named {verdict.named}, usable {verdict.usable}"
        print(f"bad: {verdict.trial}: {facts}: {ends}", flush=True)
        for one in verdict.outcomes:
            path = args.out / f"{index}-{verdict.trial.fault}-rank{one.rank}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(one.said)
    rows = [asdict(one) for one in verdicts]
    for row in rows:
        for outcome in row["outcomes"]:
            outcome["said"] = outcome["said"][-300:]
    facts = {"ranks": args.ranks, "timeout": args.timeout, "what": args.what}
    write_json(args.out / "faults.json", facts | {"trials": rows})


def show(verdicts: Sequence[Verdict]) -> None:
    """Prints a line per fault."""
    lines = []
    for fault in FAULTS:
        found = [one for one in verdicts if one.trial.fault == fault]
        if found:
            counts = (
                sum(getattr(one, name) for one in found) for name in ("happened", "ended", "named", "usable", "good")
            )
            slowest = max(one.slowest_s for one in found)
            lines.append([fault, *(f"{count} of {len(found)}" for count in counts), f"{slowest:.1f}"])
    names = [
        "fault",
        "happened",
        "survivors ended in time",
        "rank and step named",
        "devices usable",
        "good",
        "slowest s",
    ]
    table("lost ranks", names, lines)


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code: 0 when every trial was good."""
    args: FaultArgs = parse(FaultArgs, arguments, "check faults", (FaultArgs.__doc__ or "").split("\n")[0])
    if args.ranks < 2:
        raise SystemExit(f"ranks must be at least 2, one to lose and one to survive, got {args.ranks}; pass --ranks")
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and torch.cuda.device_count() < args.ranks and not may_share_gpus():
        raise SystemExit(
            f"ranks must be at most the number of GPUs, got {args.ranks} ranks and {torch.cuda.device_count()} GPUs; "
            "pass --ranks or --device cpu"
        )
    if args.what == "graph" and device == "cpu":
        raise SystemExit("--what graph must have GPUs, which CUDA graphs are of, got the CPU; use --what decode")
    if device == "cpu" and SCHEDULES[args.schedule].get("transport") == "copy_engine":
        raise SystemExit(f"--schedule {args.schedule} must have GPUs, got the CPU; use --schedule process_group")
    if not 0 < args.timeout < math.inf:
        raise SystemExit(f"timeout must be above 0 and finite, got {args.timeout}; pass another --timeout")
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
