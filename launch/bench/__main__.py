"""Speed of kernels on one GPU, of rings over several, of models, inference and a server; answers are checked first.

python -m ringattn.launch.bench kernels
python -m ringattn.launch.bench trainer
torchrun --nproc_per_node 4 -m ringattn.launch.bench ring
torchrun --nproc_per_node 4 -m ringattn.launch.bench model
torchrun --nproc_per_node 4 -m ringattn.launch.bench inference
python -m ringattn.launch.bench server --url http://127.0.0.1:8000
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ringattn.launch.bench.inference import InferenceFlags, bench_inference
from ringattn.launch.bench.kernels import KernelsFlags, bench_kernels
from ringattn.launch.bench.model import ModelFlags, bench_model
from ringattn.launch.bench.ring import RingFlags, bench_ring
from ringattn.launch.bench.rows import failures, print_tables
from ringattn.launch.bench.server import ServerFlags, bench_server, red_rows
from ringattn.launch.bench.trainer import TrainerFlags, bench_trainer
from ringattn.launch.common.distributed import Refusal
from ringattn.launch.common.session import Keep, Session, describe, keeper, machine, open_session, parse, write_json

FLAGS: dict[str, type] = {
    "kernels": KernelsFlags,
    "ring": RingFlags,
    "model": ModelFlags,
    "trainer": TrainerFlags,
    "inference": InferenceFlags,
    "server": ServerFlags,
}
BENCHES: dict[str, Callable[[Any, Session, Keep], list[dict[str, Any]] | None]] = {
    "kernels": bench_kernels,
    "ring": bench_ring,
    "model": bench_model,
    "trainer": bench_trainer,
    "inference": bench_inference,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 1 when a check is red, and then no speed is shown, or when nothing was timed."""
    argv = sys.argv[1:] if arguments is None else list(arguments)
    args: Any = parse(FLAGS, argv, "bench", "Measures speed; answers are checked first.")
    if isinstance(args, ServerFlags):
        return _run_server(args)
    with open_session(args.device) as session:
        line = machine(session)
        session.say(describe(line))
        return _run_ranks(args, session, line)


def _run_ranks(args: Any, session: Session, line: dict[str, Any]) -> int:
    bench = next(name for name, flags in FLAGS.items() if type(args) is flags)
    name = args.name or ("host" if isinstance(args, RingFlags) and args.host else bench)
    path = args.out / f"{name}.json"
    keep = keeper(path, session, line)
    try:
        rows = BENCHES[bench](args, session, keep)
    except Refusal as error:
        return _fail([str(error)], session)
    if rows is None:
        session.say("red: no speed is shown until the check is green")
        return 1
    if session.rank == 0:
        print_tables(rows)
        print(f"rows: {path}")
    return _fail(failures(rows) if rows and "ours" in rows[0] else [], session)


def _run_server(args: ServerFlags) -> int:
    path = args.out / f"{args.name}.json"
    session = Session(0, 1, torch.device("cpu"), None)
    try:
        rows = bench_server(args, session, machine(session), lambda content: write_json(path, content))
    except Refusal as error:
        return _fail([str(error)])
    print_tables(rows)
    print(f"rows: {path}")
    return _fail(red_rows(rows))


def _fail(reasons: Sequence[str], session: Session | None = None) -> int:
    """Print the reasons on rank 0; return the exit code, which is 0 without a reason."""
    if session is None or session.rank == 0:
        for reason in reasons:
            print(f"error: {reason}", file=sys.stderr, flush=True)
    return int(bool(reasons))


if __name__ == "__main__":
    sys.exit(main())
