"""An OpenAI-compatible server whose contexts are sharded over the ranks of a ring.

    python -m ringattn.launch.serve --model PATH               starts its own ranks: one per GPU, or two on the CPU
    torchrun --nproc_per_node 4 -m ringattn.launch.serve --model PATH

Starts the ranks and returns the exit code. A rank is in run.py.
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

from ringattn.launch.runtime.distributed import REFUSED, Refusal, default_ranks, is_rank, launch_ranks, resolve_device
from ringattn.launch.serve.config import ENDED, check_model, parse

MODULE = "ringattn.launch.serve"
DESCRIPTION = """Serves a language model over an OpenAI-compatible HTTP interface, the cache of its contexts sharded over all ranks.

Starts its own ranks (one per GPU, or two on the CPU) unless torchrun did: torchrun --nproc_per_node 4 -m ringattn.launch.serve
The page at / is a chat and shows what the server does."""

PACKAGES = ("tyro", "fastapi", "uvicorn", "prometheus_client", "zmq", "msgspec")
"""Packages that a server needs beside transformers, which takes seconds to import."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the ranks of the server, or run one of them; return the exit code, 0 after an orderly shutdown."""
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
        # the launcher needs nothing that ranks import
        from ringattn.launch.serve.run import run_rank

        return run_rank(args)
    except Refusal as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        return REFUSED if is_rank() else 1


def _check_packages() -> None:
    """Refuse to start when a package is missing or cannot be imported."""
    why = {} if importlib.util.find_spec("transformers") else {"transformers": "it is not there"}
    for name in PACKAGES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            why[name] = str(error)
    if why:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in why.items())
        raise Refusal(
            f"{', '.join(why)} must be installed to serve, got none that works ({reasons}); pip install 'ringattn[serve]'"
        )


def _launch(arguments: Sequence[str], nproc: int) -> int:
    with tempfile.TemporaryDirectory(prefix="ringattn-") as folder:
        ended = Path(folder, "ended")
        os.environ[ENDED] = str(ended)
        code = launch_ranks(MODULE, arguments, nproc, hint="the same command starts the server again")
        del os.environ[ENDED]
        # servers are ended by signals: the file marks an orderly end
        return 0 if ended.exists() and code in (0, 128 + signal.SIGTERM, 128 + signal.SIGINT) else code or 1
