"""Speed of kernels on one GPU, of rings over several, of models, inference and a server; answers are checked first.

python -m ringattn.launch.bench kernels
python -m ringattn.launch.bench trainer
torchrun --nproc_per_node 4 -m ringattn.launch.bench ring
torchrun --nproc_per_node 4 -m ringattn.launch.bench latent
torchrun --nproc_per_node 4 -m ringattn.launch.bench model
torchrun --nproc_per_node 4 -m ringattn.launch.bench inference
python -m ringattn.launch.bench server --url http://127.0.0.1:8000
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from ringattn.launch.bench.inference import InferenceFlags, bench_inference
from ringattn.launch.bench.kernels import KernelsFlags, bench_kernels
from ringattn.launch.bench.latent import LatentFlags, bench_latent
from ringattn.launch.bench.model import ModelFlags, TrainerFlags, bench_model, bench_trainer
from ringattn.launch.bench.ring import RingFlags, bench_ring
from ringattn.launch.bench.rows import failures, print_tables
from ringattn.launch.bench.server import ServerFlags, bench_server
from ringattn.launch.common.distributed import Refusal
from ringattn.launch.common.session import Keep, Session, describe, keeper, machine, open_session, parse

BENCHES: dict[str, tuple[type, Callable[[Any, Session, Keep], list[dict[str, Any]] | None]]] = {
    "kernels": (KernelsFlags, bench_kernels),
    "ring": (RingFlags, bench_ring),
    "latent": (LatentFlags, bench_latent),
    "model": (ModelFlags, bench_model),
    "trainer": (TrainerFlags, bench_trainer),
    "inference": (InferenceFlags, bench_inference),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 1 when a check is red, and then no speed is shown, or when nothing was timed."""
    argv = sys.argv[1:] if arguments is None else list(arguments)
    kinds = {name: flags for name, (flags, _) in BENCHES.items()} | {"server": ServerFlags}
    args: Any = parse(kinds, argv, "bench", "Measures speed; answers are checked first.")
    bench = next(name for name, flags in kinds.items() if type(args) is flags)
    path = args.out / f"{args.name or ('host' if args.host else bench)}.json"
    with open_session("cpu" if bench == "server" else args.device) as session:
        head = {"machine": machine(session)}
        keep = keeper(path, session, head)
        try:
            if bench == "server":
                rows = bench_server(args, session, head, keep)
            else:
                session.say(describe(head["machine"]))
                rows = BENCHES[bench][1](args, session, keep)
        except Refusal as error:
            return _fail([str(error)], session)
        if rows is None:
            session.say("red: no speed is shown until the check is green")
            return 1
        if session.first:
            print_tables(rows)
            print(f"rows: {path}")
        return _fail(failures(rows), session)


def _fail(reasons: Sequence[str], session: Session) -> int:
    """Print the reasons on rank 0; return the exit code, which is 0 without a reason."""
    for reason in reasons if session.first else ():
        print(f"error: {reason}", file=sys.stderr, flush=True)
    return int(bool(reasons))


if __name__ == "__main__":
    sys.exit(main())
