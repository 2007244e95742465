"""Are answers right on this machine? The command, and what it prints.

    python -m ringattn.launch.check
    torchrun --nproc_per_node 4 -m ringattn.launch.check --full
    torchrun --nproc_per_node 4 -m ringattn.launch.check --only inference
    python -m ringattn.launch.check --fuzz 300 --impl hopper
    torchrun --nproc_per_node 4 -m ringattn.launch.check --soak 1000 --delay --poison
    python -m ringattn.launch.check faults --ranks 4 --times 50 --parallel 8 --timeout 5

Owns the exit code. Refuses to know how answers are judged (`attention`, `inference`, `fuzz`, `stress`, `fault_injection`).
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

from ringattn.launch.check import fault_injection, fuzz, stress
from ringattn.launch.check.attention import (
    CheckArgs,
    check,
    compile_ahead,
    compile_share,
    default_cases,
    full_cases,
    show,
)
from ringattn.launch.check.inference import inference_cases
from ringattn.launch.runtime.ring_variants import check_nodes, check_schedule
from ringattn.launch.runtime.session import Session, describe, machine, open_session, parse, table, write_json


def fuzz_all(args: CheckArgs, session: Session, line: dict[str, Any]) -> int:
    """Random visits on every rank, each with its own seeds; returns the exit code, the same on every rank."""
    assert args.fuzz is not None, "seconds"

    def keep(tally: fuzz.Tally) -> None:
        if args.json is not None:
            path = args.json.with_name(f"{args.json.stem}-rank{session.rank}.red.json")
            write_json(path, {"machine": line, "impl": args.impl, **dataclasses.asdict(tally)})

    tally = fuzz.fuzz(args.fuzz, args.fuzz_seed + session.rank * 10**6, args.impl, session, keep)
    found = session.gather(tally)
    cases, red = sum(one.cases for one in found), [row for one in found for row in one.red]
    code = int(bool(red) or not cases)
    if session.rank == 0:
        worst = {name: max(one.worst.get(name, (0.0, 0)) for one in found) for name in tally.worst}
        table(
            "part of the error budget that is used up by the worst case",
            ["tensor", "ratio", "seed"],
            [[name, f"{ratio:.2f}", seed] for name, (ratio, seed) in sorted(worst.items())],
        )
        for why, times in tally.skipped.items():
            print(f"not served: {times} x {why}")
        largest = max((ratio for ratio, _ in worst.values()), default=0.0)
        print(
            f"{'red' if code else 'green'}: {cases - len(red)} of {cases} random visits inside the budget, "
            f"worst ratio {largest:.2f}, {tally.seconds:.1f} s, seeds from {args.fuzz_seed}"
        )
        if args.json is not None:
            ranks = [dataclasses.asdict(one) for one in found]
            kept = {"machine": line, "impl": args.impl, "fuzz_seed": args.fuzz_seed, "green": not code}
            write_json(args.json, kept | {"cases": cases, "worst": worst, "red": red, "ranks": ranks})
    return code


def soak_all(args: CheckArgs, session: Session, line: dict[str, Any]) -> int:
    """Many calls on one ring; returns the exit code, the same on every rank."""
    tally = stress.soak(args, session)
    found = session.gather(tally)
    red = [f"rank {rank}: {one}" for rank, tally in enumerate(found) for one in tally.red]
    code = int(bool(red) or not tally.calls or tally.calls < args.soak)
    if session.rank == 0:
        for one in red:
            print(f"RED: {one}")
        poisoned = f", poisoned {tally.poisoned} times" if args.poison else ""
        repeated = min(one.repeated for one in found), max(one.repeated for one in found)
        as_graphs = f", {repeated[0]} to {repeated[1]} by rank as graphs of earlier ones" if repeated[1] else ""
        print(
            f"{'red' if code else 'green'}: {tally.calls} calls on one ring, {tally.backwards} with a backward, of {tally.cases} "
            f"cases ({tally.equal_to_simulation} calm answers equal to the simulated ring to the bit), looked at "
            f"{tally.checks} times{poisoned}{as_graphs}; {tally.prepare_s:.1f} s to prepare, {tally.seconds:.1f} s, "
            f"seed {args.seed}"
        )
        if args.json is not None:
            kept = {"machine": line, "impl": args.impl, "schedule": args.schedule, "green": not code}
            write_json(args.json, kept | {"delay": args.delay, "ranks": [dataclasses.asdict(one) for one in found]})
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0 when every row is green on every rank."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["faults"]:
        return fault_injection.main(words[1:])
    args: CheckArgs = parse(CheckArgs, words, "check", (CheckArgs.__doc__ or "").split("\n")[0])
    # ranks wait for local rank 0 to compile
    with open_session(args.device, timeout_s=600) as session:
        started = time.perf_counter()
        simulates = session.world_size == 1 and args.fuzz is None and not args.soak
        check_nodes(args.nodes, (args.simulate or 1) if simulates else session.world_size)
        line = machine(session)
        session.say(describe(line))
        if args.fuzz is not None:
            return fuzz_all(args, session, line)
        check_schedule(args.schedule, session, nodes=args.nodes)
        if args.soak:
            return soak_all(args, session, line)
        make = full_cases if args.full else default_cases
        ranks = max(session.world_size, args.simulate if session.world_size == 1 else 0)
        every = (*make(ranks, session.device.type), *inference_cases(full=args.full, device=session.device.type))
        cases = [case for case in every if args.only in case.name]
        if args.compile_share:
            compile_share(cases, args, session)
            return 0
        if args.ahead and session.device.type == "cuda":
            compile_ahead(cases, args, ranks, session)
        verdict = check(session, cases, args, progress=True)
        code = int(session.maximum([float(bool(verdict.red) or not verdict.rows)])[0])
        if session.rank == 0:
            show(verdict)
            worst = max((row["ratio"] for row in verdict.rows), default=0.0)
            colour = "red" if code else "green"
            if not verdict.rows:
                why = "no case was served" if verdict.skipped else f"no case has {args.only!r} in its name"
                print(f"nothing was checked: {why}")
            print(
                f"{colour}: {len(verdict.rows) - len(verdict.red)} of {len(verdict.rows)} runs inside the budget, "
                f"worst ratio {worst:.2f}, {time.perf_counter() - started:.1f} s"
            )
            if args.json is not None:
                kept = {"machine": line, "full": args.full, "green": not code}
                write_json(args.json, kept | dataclasses.asdict(verdict))
    return code


if __name__ == "__main__":
    sys.exit(main())
