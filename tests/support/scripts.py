"""Scripts that users start with torchrun, on CPU ranks: owns their processes; knows nothing of what they compute.

Ranks are forked from the server of tests/support/pool.py, which has imported torch, and more where a conftest.py says so: torchrun
would import it in each rank and in itself, for seconds of a core each. They find the environment that torchrun sets.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

ROOT = Path(__file__).parents[2]
TIMEOUT = 240.0


def run_on_ranks(example: str, *flags: str, ranks: int = 2) -> str:
    """Return what a program of examples/ prints on CPU ranks, rank after rank."""
    return run_script(ROOT / f"examples/{example}.py", *flags, ranks=ranks)


def run_script(script: Path, *flags: str, ranks: int = 2) -> str:
    """Return what a script prints on CPU ranks, rank after rank."""
    return run_module(str(script), *flags, ranks=ranks)


def run_module(module: str, *flags: str, ranks: int = 2) -> str:
    """Return what `torchrun -m module flags` prints on CPU ranks, rank after rank; `module` may be a file, too."""
    context = multiprocessing.get_context("forkserver")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # port 0: the system picks
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "CUDA_VISIBLE_DEVICES": ""}
    deadline = time.monotonic() + TIMEOUT
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(ranks):
            mine = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            place = f"{folder}/{rank}"
            started.append(context.Process(target=_run_rank, args=([module, *flags], mine, place), daemon=True))
            started[-1].start()
        for one in started:
            one.join(max(0.0, deadline - time.monotonic()))
        codes = [one.exitcode for one in started]  # None: it still runs
        for one in started:
            one.kill()
        said, failed = (
            "".join(Path(f"{folder}/{rank}.{kind}").read_text() for rank in range(ranks)) for kind in ("out", "err")
        )
    assert codes == [0] * ranks, f"exit codes {codes}\n{failed}"
    return said


def _run_rank(argv: list[str], environment: dict[str, str], place: str) -> None:
    for descriptor, kind in ((1, "out"), (2, "err")):
        with open(f"{place}.{kind}", "wb") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.update(environment)
    os.chdir(ROOT)
    torch.set_num_threads(1)
    sys.argv = argv
    if argv[0].endswith(".py"):
        sys.path[0] = str(Path(argv[0]).parent)
        runpy.run_path(argv[0], run_name="__main__")
    else:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
