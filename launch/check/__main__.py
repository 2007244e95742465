"""The command that checks answers on this machine: attention, inference, random kernel calls, and lost ranks.

python -m ringattn.launch.check
torchrun --nproc_per_node 4 -m ringattn.launch.check --full
torchrun --nproc_per_node 4 -m ringattn.launch.check --only inference
python -m ringattn.launch.check --fuzz 300 --impl hopper
torchrun --nproc_per_node 4 -m ringattn.launch.check --soak 1000 --delay --poison
python -m ringattn.launch.check faults --ranks 4 --times 50 --parallel 8 --timeout 5
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

from ringattn.launch.check import fault_injection, fuzz, stress
from ringattn.launch.check.attention import CheckArgs, check, compile_ahead, default_cases, full_cases, show
from ringattn.launch.check.inference import inference_cases
from ringattn.launch.common.ring_variants import check_nodes, check_schedule
from ringattn.launch.common.session import Session, describe, machine, open_session, parse, table, write_json

Outcome = tuple[bool, str, dict[str, Any]]
"""Whether all is right, the same on every rank; one line of text; and what is kept as JSON."""


def run_fuzz(args: CheckArgs, session: Session, line: dict[str, Any]) -> Outcome:
    """Run random kernel calls on every rank, each with its own seeds."""
    assert args.fuzz is not None, "seconds"

    def keep(tally: fuzz.Tally) -> None:
        if args.json is not None:
            path = args.json.with_name(f"{args.json.stem}-rank{session.rank}.red.json")
            write_json(path, {"machine": line, "impl": args.impl, **dataclasses.asdict(tally)})

    tally = fuzz.fuzz(args.fuzz, args.fuzz_seed + session.rank * 10**6, args.impl, session, keep)
    by_rank = session.gather(tally)
    cases, red = sum(one.cases for one in by_rank), [row for one in by_rank for row in one.red]
    names = dict.fromkeys(name for one in by_rank for name in one.worst)
    worst = {name: max(one.worst.get(name, (0.0, 0)) for one in by_rank) for name in names}
    if session.rank == 0:
        rows = [[name, f"{ratio:.2f}", seed] for name, (ratio, seed) in sorted(worst.items())]
        table("part of the error budget that is used up by the worst case", ["tensor", "ratio", "seed"], rows)
        for why, times in tally.skipped.items():
            print(f"not served: {times} x {why}")
    text = (
        f"{cases - len(red)} of {cases} random ring steps inside the budget, worst ratio "
        f"{max((ratio for ratio, _ in worst.values()), default=0.0):.2f}, {tally.seconds:.1f} s, seeds from {args.fuzz_seed}"
    )
    kept = {"impl": args.impl, "fuzz_seed": args.fuzz_seed, "cases": cases, "worst": worst, "red": red}
    return bool(cases) and not red, text, kept | {"ranks": [dataclasses.asdict(one) for one in by_rank]}


def run_soak(args: CheckArgs, session: Session) -> Outcome:
    """Make many calls on one ring."""
    tally = stress.soak(args, session)
    by_rank = session.gather(tally)
    red = [f"rank {rank}: {one}" for rank, tally in enumerate(by_rank) for one in tally.red]
    for one in red:
        session.say(f"RED: {one}")
    poisoned = f", poisoned {tally.poisoned} times" if args.poison else ""
    low, high = min(one.repeated for one in by_rank), max(one.repeated for one in by_rank)
    as_graphs = f", {low} to {high} by rank as graphs of earlier ones" if high else ""
    text = (
        f"{tally.calls} calls on one ring, {tally.backwards} with a backward, of {tally.cases} cases "
        f"({tally.equal_to_simulation} calm answers equal to the simulated ring to the bit), looked at "
        f"{tally.checks} times{poisoned}{as_graphs}; {tally.prepare_s:.1f} s to prepare, {tally.seconds:.1f} s, "
        f"seed {args.seed}"
    )
    kept = {"impl": args.impl, "schedule": args.schedule, "delay": args.delay}
    kept["ranks"] = [dataclasses.asdict(one) for one in by_rank]
    return not red and 0 < args.soak <= tally.calls, text, kept


def run_cases(args: CheckArgs, session: Session) -> Outcome:
    """Run the cases of attention and inference."""
    began = time.perf_counter()
    ranks = args.virtual_size or max(session.world_size, args.simulate if session.world_size == 1 else 0)
    make, kind = full_cases if args.full else default_cases, session.device.type
    cases = [
        case
        for case in (*make(ranks, kind), *inference_cases(full=args.full, device=kind, packed=not args.virtual_size))
        if args.only in case.name
    ]
    if args.ahead and kind == "cuda":
        compile_ahead(cases, args, ranks, session)
    verdict = check(session, cases, args, progress=True)
    if session.rank == 0:
        show(verdict)
    if not verdict.rows:
        why = "no case was served" if verdict.skipped else f"no case has {args.only!r} in its name"
        session.say(f"nothing was checked: {why}")
    text = (
        f"{verdict.summary} inside the budget, worst ratio "
        f"{max((row['ratio'] for row in verdict.rows), default=0.0):.2f}, {time.perf_counter() - began:.1f} s"
    )
    red = session.maximum([float(bool(verdict.red) or not verdict.rows)])[0]
    return not red, text, {"full": args.full, **dataclasses.asdict(verdict)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0 when every row is green on every rank."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["faults"]:
        return fault_injection.main(words[1:])
    args: CheckArgs = parse(CheckArgs, words, "check", (CheckArgs.__doc__ or "").split("\n")[0])
    # ranks wait for local rank 0 to compile
    with open_session(args.device, timeout_s=600) as session:
        simulates = session.world_size == 1 and args.fuzz is None and not args.soak
        ranks = args.virtual_size or ((args.simulate or 1) if simulates else session.world_size)
        if args.virtual_size % session.world_size:
            raise SystemExit(
                f"error: virtual_size must be a multiple of the {session.world_size} ranks, got {args.virtual_size}; pass another "
                "--virtual-size"
            )
        check_nodes(args.nodes, ranks)
        line = machine(session)
        session.say(describe(line))
        if args.fuzz is not None:
            green, text, kept = run_fuzz(args, session, line)
        else:
            if not args.virtual_size:
                check_schedule(args.schedule, session, nodes=args.nodes)
            green, text, kept = run_soak(args, session) if args.soak else run_cases(args, session)
        session.say(f"{'green' if green else 'red'}: {text}")
        if session.rank == 0 and args.json is not None:
            write_json(args.json, {"machine": line, "green": green, **kept})
    return int(not green)


if __name__ == "__main__":
    sys.exit(main())
