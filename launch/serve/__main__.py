"""Command of the OpenAI-compatible server: starts the ranks and returns the exit code. A rank is in run.py."""

from __future__ import annotations

import math
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ringattn.launch.common.distributed import (
    Refusal,
    check_installed,
    default_ranks,
    is_rank,
    launch_ranks,
    resolve_device,
    run_command,
)
from ringattn.launch.serve.config import ENDED, EXIT_S, check_model, parse

MODULE = "ringattn.launch.serve"
DESCRIPTION = """Serves a language model over an OpenAI-compatible HTTP interface, the cache of its contexts sharded over all ranks.

Starts its own ranks (one per GPU, or two on the CPU) unless torchrun did: torchrun --nproc_per_node 4 -m ringattn.launch.serve
The page at / is a chat and shows what the server does."""

PACKAGES = ("tyro", "fastapi", "uvicorn", "prometheus_client", "zmq", "msgspec", "transformers", "accelerate")


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the ranks of the server, or run one of them; return the exit code, 0 after an orderly shutdown."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run_command(lambda: _run(words))


def _run(arguments: Sequence[str]) -> int:
    check_installed(PACKAGES, "serve", "serve")
    try:
        args = parse(arguments, f"python -m {MODULE}", DESCRIPTION)
        check_model(args.model)
        nproc = 1 if is_rank() else args.nproc or default_ranks(args.device)
        if not is_rank():
            resolve_device(args.device, 0, nproc)
    except ValueError as error:
        raise Refusal(str(error)) from None
    if nproc > 1:
        return _launch(arguments, nproc, args.grace)
    # the launcher needs nothing that ranks import
    from ringattn.launch.serve.run import run_rank

    return run_rank(args)


def _launch(arguments: Sequence[str], nproc: int, grace_s: float) -> int:
    from torch.distributed.launcher.api import LaunchConfig

    # torch's launcher kills ranks 30 s after it has passed a signal on, unless it is told otherwise
    if grace_s + EXIT_S > 30 and not hasattr(LaunchConfig, "shutdown_timeout"):
        raise Refusal(
            f"grace must be at most {30 - EXIT_S:g} s with this version of torch, got {grace_s}; update torch"
        )
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(max(30, math.ceil(grace_s + EXIT_S))))
    with tempfile.TemporaryDirectory(prefix="ringattn-") as folder:
        ended = Path(folder, "ended")
        os.environ[ENDED] = str(ended)
        code = launch_ranks(MODULE, arguments, nproc, hint="the same command starts the server again")
        del os.environ[ENDED]
        # servers are ended by signals: the file marks an orderly end
        return 0 if ended.exists() and code in (0, 128 + signal.SIGTERM, 128 + signal.SIGINT) else code or 1


if __name__ == "__main__":
    sys.exit(main())
