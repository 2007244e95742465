"""Launcher of the ranks of a command on one host, and their process group."""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import os
import signal
import sys
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn.transport.gpu_sharing import may_share_gpus

T = TypeVar("T")


REFUSED = 3
"""Exit code of a rank that has printed why it cannot go on: a restart would not help."""
CONTINUES = "the same command continues from the last checkpoint"
"""Advice after a training job was stopped."""
RESTARTS = "RINGATTN_RESTARTS"
"""Environment variable that counts the restarts of a run by `launch_ranks`."""


class Refusal(Exception):
    """A run cannot go on; raised on every rank, with a message for the user."""


@dataclass(frozen=True)
class Session:
    """This process among the ranks of a command.

    Attributes:
        backend: "nccl", "gloo", or None without a process group.
        launcher: Process id of the parent when the session began.
    """

    rank: int
    world_size: int
    device: torch.device
    backend: str | None
    launcher: int = 0

    @property
    def first(self) -> bool:
        """Whether this rank prints and writes for the run."""
        return self.rank == 0

    @property
    def orphaned(self) -> bool:
        """Whether the launcher of this rank is gone, which would have ended it."""
        return self.backend is not None and os.getppid() != self.launcher

    def check_count(self, nproc: int | None) -> None:
        """Raise Refusal if a flag wants another number of ranks than torchrun started."""
        if nproc not in (None, self.world_size):
            raise Refusal(
                f"nproc must be the number of ranks that torchrun started, got {nproc} and {self.world_size}; leave it out"
            )

    def lead(self, action: Callable[[], T]) -> T | None:
        """Call `action` on rank 0 only; return its result, or raise its Refusal, on every rank."""
        result, refusal = None, None
        if self.first:
            try:
                result = action()
            except Refusal as error:
                refusal = str(error)
        if refusal := self.broadcast(refusal):
            raise Refusal(refusal)
        return self.broadcast(result)

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.world_size == 1:
            return value
        box = [value if self.first else None]
        dist.broadcast_object_list(box, src=0, device=self.message_device)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in rank order, on every rank."""
        values: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def say(self, *words: object) -> None:
        """Print on rank 0 only."""
        if self.rank == 0:
            print(*words, flush=True)

    def barrier(self) -> None:
        """Wait for every rank, and for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.world_size > 1:
            flag = torch.zeros(1, device=self.device)
            dist.all_reduce(flag)
            flag.item()

    @property
    def message_device(self) -> torch.device:
        """Device of tensors that the process group itself sends: gloo, which ranks that share a GPU have, sends from the host."""
        return self.device if self.backend == "nccl" else torch.device("cpu")

    def maximum(self, values: Sequence[float]) -> list[float]:
        """The element-wise maximum over ranks; NaN counts as infinity, so that no rank can hide it."""
        clean = [float("inf") if value != value else float(value) for value in values]
        if self.world_size == 1 or not clean:
            return clean
        tensor = torch.tensor(clean, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.tolist()

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's tensor."""
        if self.world_size > 1:
            x = x.clone()
            dist.all_reduce(x)
        return x


def check_installed(packages: Sequence[str], command: str, extra: str) -> None:
    """Raise Refusal if a command lacks packages of an extra."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise Refusal(f"{command} needs {' and '.join(missing)}; install it with: pip install 'ringattn[{extra}]'")


def run_command(run: Callable[[], int]) -> int:
    """Return the exit code of a command that starts ranks or is one; print warnings, and why it cannot go on, as one line."""
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr, flush=True)
    try:
        return run()
    except (Refusal, FloatingPointError) as error:
        # raised on every rank alike
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        return REFUSED if is_rank() else 1


def is_rank() -> bool:
    """Whether this process was started as a rank (by torchrun or by `launch_ranks`)."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def was_restarted() -> bool:
    """Whether this rank was started in place of one that died, by torchrun or by `launch_ranks`."""
    return any(os.environ.get(name, "0") != "0" for name in (RESTARTS, "TORCHELASTIC_RESTART_COUNT"))


def default_ranks(device: str) -> int:
    """One rank per GPU; two ranks where there are none or none are wanted."""
    return 2 if device == "cpu" or not torch.cuda.is_available() else torch.cuda.device_count()


def resolve_device(device: str, local_rank: int, local_world_size: int) -> torch.device:
    """The device of one rank of this host for "auto", "cpu" or "cuda": a GPU of its own where there are GPUs, else the CPU.

    Ranks share GPUs where `may_share_gpus` allows it; otherwise fewer GPUs than ranks are a ValueError.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(
            f"device must be auto, cpu or cuda, got {device!r}; leave it out to take GPUs where there are any"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cpu" or (device == "auto" and count == 0):
        return torch.device("cpu")
    if local_world_size > count and not (count and may_share_gpus()):
        raise ValueError(
            f"the number of ranks on a host must be at most its number of GPUs, got {local_world_size} ranks "
            f"and {count} GPUs; start fewer with --nproc_per_node or pass --device cpu"
        )
    return torch.device("cuda", local_rank % count)


def choose_backend(device: torch.device, local_world_size: int) -> str:
    """Return "nccl" between GPUs; "gloo" between CPUs, and between ranks that share GPUs, which NCCL refuses."""
    alone = device.type == "cuda" and local_world_size <= torch.cuda.device_count()
    return "nccl" if alone else "gloo"


def disable_multicast() -> None:
    """Disable NVLink multicast, which is not used here, and has hung hosts whose fabric manager is set up differently."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")


@contextlib.contextmanager
def init_ranks(device: str, timeout_s: float) -> Iterator[Session]:
    """Context with the process group of the run, or without one when this process is the whole run.

    A process group that already exists is used and left as it is. Collectives raise after `timeout_s`. A host with too few of
    these devices is a Refusal.
    """
    disable_multicast()
    index, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_initialized():
        index, world_size = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ.get("LOCAL_RANK", index))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    try:
        chosen = resolve_device(device, local_rank, local_world_size)
    except ValueError as error:
        raise Refusal(str(error)) from None
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        # makes the context current in autograd's thread, which warns if its first call is a matrix product
        torch.ones((), device=chosen, requires_grad=True).square().backward()
    if dist.is_initialized():
        yield Session(index, world_size, chosen, dist.get_backend(), os.getppid())
        return
    if not is_rank():
        yield Session(0, 1, chosen, None, os.getppid())
        return
    backend = choose_backend(chosen, local_world_size)
    if backend == "gloo" and sys.platform == "linux" and os.environ.get("LOCAL_WORLD_SIZE") == str(world_size):
        # not every host can resolve its own name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = datetime.timedelta(seconds=timeout_s)
    options: dict[str, Any] = {"device_id": chosen if backend == "nccl" else None, "timeout": timeout}
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt != "0" and os.environ.get("LOCAL_WORLD_SIZE") == str(world_size):
        # the agent keeps one store over restarts, with addresses of ranks that died. Agents of several hosts count restarts
        # differently, so there the store is used as it is
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))  # pyright: ignore[reportPrivateImportUsage]
        own = dist.PrefixStore(f"restart {attempt}", store)  # pyright: ignore[reportPrivateImportUsage]
        options |= {"store": own, "rank": rank, "world_size": size}
    dist.init_process_group(backend, **options)
    try:
        yield Session(index, world_size, chosen, backend, os.getppid())
    finally:
        dist.destroy_process_group()


def launch_ranks(
    module: str,
    arguments: Sequence[str],
    nproc: int,
    again: Callable[[str], bool] = lambda _: False,
    hint: str = CONTINUES,
) -> int:
    """Run `python -m module arguments` as `nproc` ranks of this host and wait for them.

    When one rank dies the others are ended, and `again`, called with a description, decides whether all ranks are restarted;
    not after the exit code REFUSED. An interrupt is passed on, and the ranks have the time to save their work. `hint` is the
    advice when the run was stopped or killed. Returns the exit code: 0, 1 when a rank failed, 128 + n after signal n.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # ranks share the cores
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    starts = 0
    try:
        while True:
            os.environ[RESTARTS] = str(starts)
            try:
                _run_once(module, arguments, nproc)
            except ChildFailedError as error:
                what = describe_failures(error.failures, hint)
                refused = any(failure.exitcode == REFUSED for failure in error.failures.values())
                if not refused and again(what):
                    starts += 1
                    continue
                print(what, file=sys.stderr, flush=True)
                return 1
            return 0
    except SignalException as error:
        print(f"stopped by {error.sigval.name}; {hint}", flush=True)
        return 128 + int(error.sigval)
    finally:
        os.environ.pop(RESTARTS, None)


def _run_once(module: str, arguments: Sequence[str], nproc: int) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix="ringattn-") as reports:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=reports),
        )
        elastic_launch(config, sys.executable)("-u", "-m", module, *arguments)


def record_failure(run: Callable[[], int]) -> int:
    """Return what `run`, a rank's work, returns; an exception is written to the report that the launcher reads.

    The report appears whole: a launcher that ends its ranks may end this one while it writes, and cannot read half a report.
    """
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record

    class Handler(ErrorHandler):
        def record_exception(self, e: BaseException) -> None:
            if (report := os.environ.get("TORCHELASTIC_ERROR_FILE")) is None:
                return
            os.environ["TORCHELASTIC_ERROR_FILE"] = part = f"{report}.part"
            super().record_exception(e)
            os.replace(part, report)

    return record(run, Handler())() or 0


def describe_failures(failures: dict[int, Any], then: str = CONTINUES) -> str:
    """One line about the end of a run: names the rank that refused or was killed by a signal, else the one that failed first."""

    def order(rank: int) -> tuple[int, float, int]:
        # a peer's broken connection is an effect; a refusal or a kill is a cause, unless that is how survivors are ended
        code = failures[rank].exitcode
        cause = code == REFUSED or (code < 0 and code != -signal.SIGTERM)
        return (0 if cause else 1, failures[rank].timestamp, rank)

    rank = min(failures, key=order)
    code, pid = failures[rank].exitcode, failures[rank].pid
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
        hint = " (out of memory?)" if -code == signal.SIGKILL else ""
        hint += f"; {then}"
    else:
        how, hint = f"exited with code {code}", "; its message is above"
    return f"the run ended because rank {rank} (process {pid}) {how}{hint}"
