"""The main job: trains a byte-level transformer on real text, every sequence split over all ranks of a ring.

    python -m ringattn.launch.train                            starts its own ranks: one per GPU, or two on the CPU
    torchrun --nproc_per_node 4 -m ringattn.launch.train       the same job, its ranks started by torchrun

Owns the command: its processes, its folder and its exit code. Refuses to know what happens in a run (training/run.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from ringattn.launch.distributed import Refusal, default_ranks, is_rank, join_ranks, launch_ranks, resolve_device
from ringattn.launch.training.config import Config, parse
from ringattn.launch.training.data import Batches, load_corpus
from ringattn.launch.training.run import Run

MODULE = "ringattn.launch.train"


@contextlib.contextmanager
def _only_run_in(folder: Path, patience_s: float = 30.0) -> Iterator[None]:
    """Holds the folder for this run; waits a while for the ranks of a killed run to notice and go."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Refusal(f"out must be a folder no other run uses, got {folder}; pass another --out") from None
                time.sleep(0.2)
        yield


def run_rank(config: Config) -> int:
    """One rank of the run.

    Returns:
        Its exit code: 0, or 130 when the run was interrupted.
    """
    with join_ranks(config.device, config.timeout) as rank, contextlib.ExitStack() as stack:
        if config.nproc not in (None, rank.world_size):
            raise Refusal(
                f"nproc must be the number of ranks that torchrun started, got {config.nproc} and {rank.world_size}; "
                "leave it out"
            )
        corpus = load_corpus(config.data)
        if len(set(rank.gather((corpus.fingerprint, dataclasses.astuple(config))))) > 1:
            raise Refusal("flags and data must be the same on every rank, got different ones; start all ranks alike")
        # one writer, so one lock; the others hear whether it is held
        rank.lead(lambda: stack.enter_context(_only_run_in(Path(config.out))))
        run = Run(config, rank, corpus)
        run.introduce()
        if run.start >= config.steps:
            run.say(f"all {config.steps} steps were done before; pass more --steps, or another --out to start afresh")
        elif not run.train():
            run.say(f"stopped after step {run.saved}, which is saved; the same command continues")
            return 130
        run.sample()
        run.conclude()
        return 0


def check(config: Config) -> None:
    """Refuses flags that no run can obey on this machine.

    Raises:
        Refusal: Says which flag, and what to pass instead.
    """
    try:
        Batches(load_corpus(config.data).text, config.seq_len, config.batch_size, config.seed)
        nproc = config.nproc or default_ranks(config.device)
        resolve_device(config.device, 0, nproc)
    except ValueError as error:
        raise Refusal(str(error)) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Starts the ranks of the run, or is one of them.

    Args:
        arguments: The command line; by default this process's.

    Returns:
        The exit code.
    """
    from torch.distributed.elastic.multiprocessing.errors import record

    arguments = list(sys.argv[1:] if arguments is None else arguments)
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr, flush=True)
    try:
        config = parse(arguments, prog=f"python -m {MODULE}", description=__doc__)
        if is_rank():
            return record(run_rank)(config) or 0
        # what the flags alone make impossible is said once, not by every rank
        check(config)
        nproc = config.nproc or default_ranks(config.device)
        return launch_ranks(MODULE, arguments, nproc) if nproc > 1 else run_rank(config)
    except (Refusal, FloatingPointError) as error:
        # raised on every rank alike
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
