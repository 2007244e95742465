"""An OpenAI-compatible server whose contexts are sharded over the ranks of a ring.

    python -m ringattn.launch.serve --model PATH               starts its own ranks: one per GPU, or two on the CPU
    torchrun --nproc_per_node 4 -m ringattn.launch.serve --model PATH

Owns the command: its processes and its exit code. Refuses to know what a rank does (serving/run.py).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from ringattn.launch.distributed import REFUSED, Refusal, default_ranks, is_rank, launch_ranks, resolve_device
from ringattn.launch.serve.config import ENDED, check_model, parse

MODULE = "ringattn.launch.serve"
DESCRIPTION = """Serves a language model over an OpenAI-compatible HTTP interface, the cache of its contexts sharded over all ranks.

Starts its own ranks (one per GPU, or two on the CPU) unless torchrun did: torchrun --nproc_per_node 4 -m ringattn.launch.serve
The page at / is a chat and shows what the server does."""

PACKAGES = ("tyro", "fastapi", "uvicorn", "prometheus_client", "zmq", "msgspec")
"""What a server needs beside transformers, which takes seconds to import: ranks do it first of all."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Starts the ranks of the server, or is one of them.

    Args:
        arguments: The command line; by default this process's.

    Returns:
        The exit code: 0 when it was told to stop.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr, flush=True)
    try:
        _check_packages()
        try:
            args = parse(arguments, f"python -m {MODULE}", DESCRIPTION)
            check_model(args.model)
            nproc = 1 if is_rank() else args.nproc or default_ranks(args.device)
            if not is_rank():
                resolve_device(args.device, 0, nproc)
        except ValueError as error:
            raise Refusal(str(error)) from None
        if nproc > 1:
            return _launch(arguments, nproc)
        # not at the top: what starts the ranks needs none of what they load
        from ringattn.launch.serve.run import run_rank

        return run_rank(args)
    except Refusal as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        return REFUSED if is_rank() else 1


def _check_packages() -> None:
    """Refuses before anything is loaded when a package is missing, or lacks what it needs itself."""
    why = {} if importlib.util.find_spec("transformers") else {"transformers": "it is not there"}
    for name in PACKAGES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            why[name] = str(error)
    if why:
        said = "; ".join(f"{name}: {reason}" for name, reason in why.items())
        raise Refusal(
            f"{', '.join(why)} must be installed to serve, got none that works ({said}); pip install 'ringattn[serve]'"
        )


def _launch(arguments: Sequence[str], nproc: int) -> int:
    with tempfile.TemporaryDirectory(prefix="ringattn-") as folder:
        ended = Path(folder, "ended")
        os.environ[ENDED] = str(ended)
        code = launch_ranks(MODULE, arguments, nproc, hint="the same command starts the server again")
        del os.environ[ENDED]
        # a signal is how a server ends: what counts is whether it ended well
        return 0 if ended.exists() and code in (0, 128 + signal.SIGTERM, 128 + signal.SIGINT) else code or 1
