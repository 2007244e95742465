"""A session-wide pool of gloo worker processes, so that a distributed test costs milliseconds.

Owns the life of the workers: start, one call at a time, timeouts, and their end, whatever happens to the test process.
Refuses to know what the tests compute.

    def rank_sum(x):
        dist.all_reduce(x)
        return x

    def test_sum(pool):
        assert pool(2).run(rank_sum, torch.ones(1)) == [2.0, 2.0]

A call that raises on any rank, or that does not answer, may leave messages on the wire, posted receives, or state
on one rank that the others do not have. Such workers are killed, never reused. To make that cheap the workers are
forked from a server process that has imported torch, started no thread and touched no device (multiprocessing's
forkserver): a new set takes a tenth of a second.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

DEFAULT_TIMEOUT = 240.0  # below that of pytest, which does not tell where ranks are
GROUP_TIMEOUT = 180.0
GRACE = 5.0  # seconds the other ranks get to report, once one rank has raised

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "pytest", "hypothesis", "ringattn"])


class RankError(RuntimeError):
    """One or more ranks raised, died or did not answer; the text has every rank's own traceback."""


class Pool:
    """The workers of one world size.

    Attributes:
        world_size: Ranks.
        timeout: Seconds a call may take.
    """

    def __init__(self, world_size: int, timeout: float = DEFAULT_TIMEOUT) -> None:
        self.world_size = world_size
        self.timeout = timeout
        self._workers: list[_Worker] = []
        self._store: TCPStore | None = None

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Calls `fn(*args, **kwargs)` once on every rank, inside a gloo group of `world_size`.

        Args:
            fn: A module-level function. It finds its place with `dist.get_rank()`; the random seed is 0 on every rank.
            args: Sent by pickle: tensors arrive as copies.
            kwargs: Likewise.

        Returns:
            What `fn` returned, by rank.

        Raises:
            RankError: A rank died or did not answer in time, or raised something that does not pickle.
            Exception: What the first failing rank raised, caused by a RankError with every rank's traceback.
        """
        call = pickle.dumps((*_address(fn), pickle.dumps((args, kwargs))))
        clean = False
        try:
            self._start()
            answers = self._collect(call)
            failed = sorted((a for a in answers.values() if not a.ok), key=lambda a: a.time)
            if failed or len(answers) < self.world_size:
                raise self._failure(answers, failed)
            clean = True
            return [pickle.loads(answers[rank].payload) for rank in range(self.world_size)]
        finally:
            if not clean:
                self.close(kill=True)

    def close(self, *, kill: bool = False) -> None:
        """Ends the workers: by closing their pipes (they leave the group and exit), or at once."""
        workers, self._workers, self._store = self._workers, [], None
        for worker in workers:
            if kill:
                worker.process.kill()
            worker.connection.close()
        deadline = time.monotonic() + GRACE
        for worker in workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.process.close()
            worker.stacks.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the live workers, by rank; empty before the first call and after a failed one."""
        return [worker.process.pid or 0 for worker in self._workers]

    def _start(self) -> None:
        if self._workers and all(worker.process.is_alive() for worker in self._workers):
            return
        self.close(kill=True)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # port 0: the system picks
        self._store = store
        self._workers = [_Worker(rank, self.world_size, store.port) for rank in range(self.world_size)]

    def _collect(self, call: bytes) -> dict[int, _Answer]:
        deadline = time.monotonic() + self.timeout
        answers: dict[int, _Answer] = {}
        waiting = {worker.connection: rank for rank, worker in enumerate(self._workers)}
        for connection in waiting:
            with contextlib.suppress(BrokenPipeError):  # a dead worker is reported below, by its end of file
                connection.send_bytes(call)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    process = self._workers[rank].process
                    process.join(GRACE)
                    answers[rank] = _Answer(False, b"", f"died with exit code {process.exitcode}", time.monotonic())
                if not answers[rank].ok:
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers

    def _failure(self, answers: dict[int, _Answer], failed: list[_Answer]) -> BaseException:
        silent = [rank for rank in range(self.world_size) if rank not in answers]
        lines = []
        if silent and not failed:
            lines.append(f"ranks {silent} of {self.world_size} did not answer in {self.timeout:g} s")
        for rank, answer in sorted(answers.items(), key=lambda item: item[1].time):
            if not answer.ok:
                lines.append(f"rank {rank} of {self.world_size} {answer.text}")
        for rank in silent:
            lines.append(f"rank {rank} of {self.world_size} is still at:\n{self._workers[rank].where()}")
        report = RankError("\n".join(lines))
        if failed and failed[0].payload:
            error = pickle.loads(failed[0].payload)
            error.__cause__ = report
            return error
        return report


class Pools:
    """One `Pool` per world size, each started at its first call."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def __call__(self, world_size: int, timeout: float = DEFAULT_TIMEOUT) -> Pool:
        """The pool of `world_size` ranks, whose next calls may take `timeout` seconds."""
        pool = self._pools.setdefault(world_size, Pool(world_size))
        pool.timeout = timeout
        return pool

    def close(self) -> None:
        """Ends all workers."""
        for pool in self._pools.values():
            pool.close()


class _Answer:
    """What one rank reports: a pickled result, or a pickled exception and its traceback."""

    def __init__(self, ok: bool, payload: bytes, text: str, when: float) -> None:
        self.ok, self.payload, self.text, self.time = ok, payload, text, when


class _Worker:
    """The test process's side of one rank."""

    def __init__(self, rank: int, world_size: int, port: int) -> None:
        self.stacks = tempfile.NamedTemporaryFile(prefix="ringattn-pool-")
        self.connection, theirs = _context.Pipe()
        self.process = _context.Process(
            target=_serve, args=(theirs, self.stacks.name, rank, world_size, port), daemon=True, name=f"rank {rank}"
        )
        self.process.start()
        theirs.close()

    def where(self) -> str:
        """The Python stacks of all threads of a worker that does not answer."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, signal.SIGUSR1)
        text, deadline = "", time.monotonic() + GRACE
        # written line by line, the main thread last
        while time.monotonic() < deadline and not text.endswith("in <module>\n"):
            time.sleep(0.02)
            text = Path(self.stacks.name).read_text()
        return text.rstrip() or "(no stack: the process does not take signals)"


def _address(fn: Callable[..., Any]) -> tuple[str, str, str]:
    """How a worker finds `fn`: module name, file, name."""
    name = getattr(fn, "__qualname__", repr(fn))
    module = sys.modules.get(getattr(fn, "__module__", ""))
    file = getattr(module, "__file__", None)
    if not name.isidentifier() or getattr(module, name, None) is not fn or module is None or file is None:
        raise ValueError(f"fn must be a module-level function, got {name}; move it to the top level of its file")
    return module.__name__, file, name


def _load(module: str, file: str) -> ModuleType:
    """The module of that name from that file: test files are not on the import path under every import mode."""
    with contextlib.suppress(ModuleNotFoundError):
        found = sys.modules.get(module) or importlib.import_module(module)
        if found.__file__ and Path(found.__file__).samefile(file):
            return found
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None, f"{file} is not a Python file"
    assert spec.loader is not None, f"{file} has no loader"
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def _serve(connection: Connection, stacks: str, rank: int, world_size: int, port: int) -> None:
    """A worker's life: join the group, answer calls until the pipe closes, leave the group."""
    gc.freeze()  # what the server has imported lives as long as this process
    threading.Thread(target=_die_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-c goes to the whole terminal; the test process decides
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file)
        torch.set_num_threads(1)
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # host names do not resolve on every build machine
        timeout = datetime.timedelta(seconds=GROUP_TIMEOUT)
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        while (call := _receive(connection)) is not None:
            answer = _answer(call)
            connection.send_bytes(pickle.dumps(answer))
            if not answer.ok:
                os._exit(1)  # its sockets close with it: peers that wait for this rank fail now, not at their timeout
        dist.destroy_process_group()


def _receive(connection: Connection) -> bytes | None:
    try:
        return connection.recv_bytes()
    except (EOFError, ConnectionResetError):
        return None


def _answer(call: bytes) -> _Answer:
    try:
        module, file, name, arguments = pickle.loads(call)
        fn = getattr(_load(module, file), name)  # before the arguments, which may be of types that it defines
        args, kwargs = pickle.loads(arguments)
        dist.barrier()  # tests with short timeouts begin together, whoever had to import their file first
        torch.manual_seed(0)
        return _Answer(True, pickle.dumps(fn(*args, **kwargs)), "", time.monotonic())
    except BaseException as error:
        return _Answer(False, _pickled(error), f"raised\n{traceback.format_exc()}", time.monotonic())


def _pickled(error: BaseException) -> bytes:
    """The exception as bytes, or nothing where it does not survive the trip."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return b""
    return data


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "workers are started by a Pool"
    parent.join()
    os._exit(1)
