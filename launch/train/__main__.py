"""Command of the training job: starts the ranks, restarts them when one dies, locks the output folder, returns the exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ringattn.launch.common.checkpoint_files import check_place
from ringattn.launch.common.distributed import (
    Refusal,
    default_ranks,
    init_ranks,
    is_rank,
    launch_ranks,
    record_failure,
    resolve_device,
    run_command,
)
from ringattn.launch.train.checkpoint import newest_step
from ringattn.launch.train.config import TrainConfig, parse
from ringattn.launch.train.data import Batches, load_corpus
from ringattn.launch.train.parallel import mesh_sizes, single_process_group
from ringattn.launch.train.run import Run

MODULE = "ringattn.launch.train"
DESCRIPTION = """Trains a transformer on real text, every sequence sharded over the ranks of a ring.

Starts its own ranks (one per GPU, or two on the CPU) unless torchrun did: torchrun --nproc_per_node 4 -m ringattn.launch.train
A run whose rank dies is restarted; the same command continues one that was stopped or killed."""


@contextlib.contextmanager
def _lock_folder(folder: Path, timeout_s: float = 30.0) -> Iterator[None]:
    """Locks the folder of a run; waits for the ranks of a killed run to exit."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = (folder / ".lock").open("w")
    except OSError as error:
        raise Refusal(f"out must be a folder that can be written, got {folder}: {error}; pass another --out") from None
    with opened as lock:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Refusal(f"out must be a folder no other run uses, got {folder}; pass another --out") from None
                time.sleep(0.2)
        yield


def run_rank(config: TrainConfig) -> int:
    """Run one rank; return its exit code: 0, or 130 when the run was interrupted."""
    with init_ranks(config.device, config.timeout) as session, contextlib.ExitStack() as stack:
        session.check_count(config.nproc)
        try:
            config.check_ranks(session.world_size)
            corpus = load_corpus(config.data, config.out)
        except ValueError as error:
            raise Refusal(str(error)) from None
        stack.enter_context(single_process_group(session.device))
        if len(set(session.gather((corpus.fingerprint, dataclasses.astuple(config))))) > 1:
            raise Refusal("flags and data must be the same on every rank, got different ones; start all ranks alike")
        # rank 0 alone writes, so it alone locks; the others get its error
        session.lead(lambda: stack.enter_context(_lock_folder(Path(config.out))))
        run = Run(config, session, corpus)
        run.print_summary()
        if run.start >= config.steps:
            run.print(f"all {config.steps} steps were done before; pass more --steps, or another --out to start afresh")
        elif not run.train():
            run.print(f"stopped after step {run.saved}, which is saved; the same command continues")
            return 130
        run.sample()
        run.report_results()
        return 0


def count_ranks(config: TrainConfig) -> int:
    """Return the number of ranks to start: --nproc, else the size of the mesh, else the default."""
    dp, cp = mesh_sizes(config.mesh, None)
    named = (config.mesh or "").count("=")
    return config.nproc or (dp * cp if named == 2 else default_ranks(config.device))


def check(config: TrainConfig) -> None:
    """Raise Refusal for flags that cannot work on this machine."""
    try:
        nproc = count_ranks(config)
        resolve_device(config.device, 0, nproc)
        config.check_ranks(nproc)
        if config.model is not None:
            check_place(config.model)
        else:
            Batches(load_corpus(config.data, config.out).text, config.seq_len, config.batch_size, config.seed)
    except ValueError as error:
        raise Refusal(str(error)) from None


class RestartPolicy:
    """Restarts a run as long as its newest checkpoint in `out` is of a later step, and `limit` times without such progress."""

    def __init__(self, out: Path, limit: int) -> None:
        self.out, self.limit = out, limit
        self.step, self.tries = newest_step(out), 0

    def __call__(self, what: str) -> bool:
        """Print the description of a failure, and return whether to restart."""
        step = newest_step(self.out)
        if step > self.step:
            self.step, self.tries = step, 0
        if self.tries >= self.limit:
            if self.limit:
                tried = f"started again {self.tries} time(s) without getting past the checkpoint of step {self.step}"
                print(f"{tried}: giving up", file=sys.stderr, flush=True)
            return False
        self.tries += 1
        again = f"starting all ranks again from step {self.step} (try {self.tries} of {self.limit})"
        print(f"{what}\n{again}", file=sys.stderr, flush=True)
        return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the ranks of the run, or run one of them; return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run_command(lambda: _run(words))


def _run(arguments: Sequence[str]) -> int:
    config = parse(arguments, prog=f"python -m {MODULE}", description=DESCRIPTION)
    if is_rank():
        return record_failure(lambda: run_rank(config))
    # check flags once, not on every rank
    check(config)
    nproc = count_ranks(config)
    if nproc == 1:
        return run_rank(config)
    return launch_ranks(MODULE, arguments, nproc, RestartPolicy(Path(config.out), config.max_restarts))


if __name__ == "__main__":
    sys.exit(main())
