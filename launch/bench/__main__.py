"""How fast is it, and beside what? Kernels on one GPU, the ring over several, models, inference and a server.

Owns the commands and what their tables show. Refuses to know what is measured, and prints no speed of an answer that was not
checked.

    python -m ringattn.launch.bench kernels
    torchrun --nproc_per_node 4 -m ringattn.launch.bench ring
    torchrun --nproc_per_node 4 -m ringattn.launch.bench model
    torchrun --nproc_per_node 4 -m ringattn.launch.bench inference
    python -m ringattn.launch.bench server --url http://127.0.0.1:8000

A flag behind a command measures one part of it closely, and has options of its own:

    python -m ringattn.launch.bench kernels --softmax                       online softmax beside torch's and a copy
    torchrun --nproc_per_node 4 -m ringattn.launch.bench ring --host        how long calls keep the host
    torchrun --nproc_per_node 4 -m ringattn.launch.bench ring --memory      peak memory against length
    torchrun --nproc_per_node 4 -m ringattn.launch.bench ring --trace       one step as a trace per rank
    torchrun --nproc_per_node 4 -m ringattn.launch.bench ring --profile     where the time of replayed calls goes
    python -m ringattn.launch.bench inference --decode                      the kernel of decoding beside the memory's bandwidth
    torchrun --nproc_per_node 4 -m ringattn.launch.bench inference --prefill --total 1048576 --chunks 32768
    torchrun --nproc_per_node 4 -m ringattn.launch.bench inference --reduce   merging partials across ranks

FLOPs are those of `workloads` (Note [FLOPs]), times those of `timing` (Note [Times]).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ringattn.launch.bench.details import graph_profile, softmax, step_trace
from ringattn.launch.bench.details.decode import Decode, bench_decode
from ringattn.launch.bench.details.host import Host, bench_host
from ringattn.launch.bench.details.memory import Memory, bench_memory
from ringattn.launch.bench.details.prefill import Prefill, bench_prefill
from ringattn.launch.bench.details.reduce import Reduce, bench_reduce
from ringattn.launch.bench.inference import Inference, bench_inference
from ringattn.launch.bench.kernels import Kernels, bench_kernels, describe_problem
from ringattn.launch.bench.model import Model, bench_model
from ringattn.launch.bench.ring import Ring, bench_ring, red_rings, verify
from ringattn.launch.bench.server import CannotBench, Server, bench_server, red_rows
from ringattn.launch.bench.workloads import Problem
from ringattn.launch.runtime.distributed import Refusal
from ringattn.launch.runtime.session import (
    Keep,
    Session,
    describe,
    keeper,
    machine,
    open_session,
    parse,
    table,
    write_json,
)

ANSWER_COLUMNS = {
    "ttft_ms": "{:.1f}",
    "ttft_p95_ms": "{:.1f}",
    "tpot_ms": "{:.2f}",
    "tpot_p95_ms": "{:.2f}",
    "gap_p95_ms": "{:.2f}",
    "gap_p99_ms": "{:.2f}",
    "failed": "{}",
    "cached_tokens": "{}",
}
LOAD_COLUMNS = {
    "answers": "{}",
    "requests_per_s": "{:.2f}",
    "tokens_per_s": "{:.0f}",
    **ANSWER_COLUMNS,
    "client_busy_percent": "{:.0f}%",
}
DECODED_COLUMNS = {
    "world_size": "{}",
    "seq_len": "{}",
    "layers": "{}",
    "batch": "{}",
    "how": "{}",
    "ms_per_token": "{:.3f}",
}
TOKEN_COLUMNS = {
    **DECODED_COLUMNS,
    "worst_ms": "{:.3f}",
    "tokens_per_s": "{:.1f}",
    "bound_ms": "{:.3f}",
    "ratio": "{:.2f}",
}
COLUMNS: dict[str, dict[str, str]] = {
    "ring": {
        "layout": "{}",
        "mask": "{}",
        "tokens_per_rank": "{}",
        "heads": "{}",
        "kv_heads": "{}",
        "who": "{}",
        "forward_ms": "{:.3f}",
        "forward_tflops": "{:.3g}",
        "forward_percent": "{:.0f}%",
        "forward_exposed_ms": "{:.3f}",
        "forward_host_us": "{:.0f}",
        "forward_graph_ms": "{:.3f}",
        "forward_graph_percent": "{:.0f}%",
        "both_ms": "{:.3f}",
        "both_tflops": "{:.3g}",
        "both_percent": "{:.0f}%",
        "both_exposed_ms": "{:.3f}",
        "both_host_us": "{:.0f}",
        "both_graph_ms": "{:.3f}",
        "both_graph_percent": "{:.0f}%",
        "peak_gib": "{:.2f}",
    },
    "memory": {
        "world_size": "{}",
        "who": "{}",
        "mask": "{}",
        "seq_len": "{}",
        "heads": "{}",
        "kv_heads": "{}",
        "tensors_gib": "{:.2f}",
        "predicted_gib": "{:.2f}",
        "peak_gib": "{:.2f}",
    },
    "model": {
        "world_size": "{}",
        "seq_len": "{}",
        "layers": "{}",
        "who": "{}",
        "recompute": "{}",
        "step_s": "{:.2f}",
        "tokens_per_s_per_gpu": "{:.0f}",
        "model_tflops_per_gpu": "{:.0f}",
        "mfu_percent": "{:.1f}%",
        "peak_gib": "{:.1f}",
    },
    "reduce": {
        "world_size": "{}",
        "who": "{}",
        "rows": "{}",
        "splits": "{}",
        "kib_per_rank": "{:.1f}",
        "call_us": "{:.1f}",
        "graph_us": "{:.1f}",
        "host_us": "{:.1f}",
    },
    "prefill": {
        "world_size": "{}",
        "seq_len": "{}",
        "who": "{}",
        "new_tokens": "{}",
        "moved": "{}",
        "layer_ms": "{:.3f}",
        "tflops": "{:.3g}",
        "percent": "{:.0f}%",
    },
    "decode": {
        "problem": "{}",
        "who": "{}",
        "config": "{}",
        "splits": "{}",
        "us": "{:.1f}",
        "gbps": "{:.0f}",
        "percent": "{:.0f}%",
        "kernel_us": "{:.1f}",
        "kernel_gbps": "{:.0f}",
        "kernel_percent": "{:.0f}%",
        "host_us": "{:.1f}",
    },
    "host": {
        "world_size": "{}",
        "mask": "{}",
        "seq_len": "{}",
        "inference_us": "{:.0f}",
        "forward_us": "{:.0f}",
        "both_us": "{:.0f}",
        "both_in_one_thread_us": "{:.0f}",
        "backward_operator_us": "{:.0f}",
        "layer_us": "{:.0f}",
        "layer_in_one_thread_us": "{:.0f}",
        "split_us": "{0[0]:.0f} + {0[1]:.0f} + {0[2]:.0f}",
        "split_in_one_thread_us": "{0[0]:.0f} + {0[1]:.0f} + {0[2]:.0f}",
    },
    "inference: bandwidth": {"who": "{}", "read_gbps": "{:.0f}"},
    "inference: prefill": {
        "world_size": "{}",
        "seq_len": "{}",
        "who": "{}",
        "chunk": "{}",
        "ms": "{:.2f}",
        "tflops": "{:.3g}",
        "percent_of_training": "{:.0f}%",
    },
    "inference: attention": {
        "world_size": "{}",
        "seq_len": "{}",
        "batch": "{}",
        "how": "{}",
        "us_per_layer": "{:.1f}",
        "bound_us": "{:.1f}",
        "ratio": "{:.2f}",
        "ratio_with_15us": "{:.2f}",
        "goal_us": "{:.1f}",
        "goal_met": "{}",
        "calls_us_per_layer": "{:.1f}",
        "host_us_per_layer": "{:.1f}",
    },
    "inference: first": {
        "world_size": "{}",
        "seq_len": "{}",
        "layers": "{}",
        "chunk": "{}",
        "ttft_s": "{:.3f}",
        "tokens_per_s": "{:.0f}",
        "tflops": "{:.3g}",
        "mfu_percent": "{:.1f}%",
        "peak_gib": "{:.1f}",
    },
    "inference: token": TOKEN_COLUMNS,
    "inference: written": TOKEN_COLUMNS,
    "inference: throughput": {
        **DECODED_COLUMNS,
        "tokens_per_s": "{:.1f}",
        "latency_ms": "{}",
        "within": "{}",
        "largest": "{}",
    },
    "inference: generate": {
        "world_size": "{}",
        "seq_len": "{}",
        "layers": "{}",
        "who": "{}",
        "batch": "{}",
        "ttft_s": "{:.3f}",
        "ms_per_token": "{:.3f}",
        "worst_ms": "{:.3f}",
    },
    "server: check": {"prompts": "{}", "clients": "{}", "differ": "{}", "failed": "{}", "cached_tokens": "{}"},
    "server: alone": {"context": "{}", "answers": "{}", **ANSWER_COLUMNS, "prompt_tokens_per_s": "{:.0f}"},
    "server: load": {"clients": "{}", **LOAD_COLUMNS},
    "server: latency": {"clients": "{}", "latency_ms": "{:g}", "within": "{}", "largest": "{}", **LOAD_COLUMNS},
}
"""What the table of each bench shows of its rows, and how."""
NOTHING_MEASURED = (
    "nothing was measured, and no file written: all was left out; pass more --budget-s, or smaller problems"
)


def tabulate(kind: str, rows: Sequence[dict[str, Any]]) -> None:
    """Prints the rows of one bench; below them, who has no speed or no graph, and why."""
    columns = {name: form for name, form in COLUMNS[kind].items() if any(row.get(name) is not None for row in rows)}
    cells = [
        [None if row.get(name) is None else form.format(row[name]) for name, form in columns.items()] for row in rows
    ]
    table(f"bench {kind}", [name.replace("_", " ") for name in columns], cells)
    reasons: dict[str, int] = {}
    for row in rows:
        for name in ("refused", "forward_graph_refused", "both_graph_refused", "graph_refused", "note"):
            if row.get(name):
                said = f"{row.get('who', kind)}, {name.replace('_', ' ')}: {row[name]}"
                reasons[said] = reasons.get(said, 0) + 1
    for said, times in reasons.items():
        print(f"{said} ({times} x)")


def show_kernels(rows: Sequence[dict[str, Any]]) -> None:
    """Prints a line per problem and direction, a column per contender: TFLOP/s, with a star where plain calls were timed.

    Below it, everything that was refused, and what the carry costs.
    """
    columns = list(dict.fromkeys(f"{row['who']} {row['level']}" for row in rows if "tflops" in row))
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    refusals: dict[str, list[str]] = {}
    for row in rows:
        shape = describe_problem(Problem(**{one.name: row[one.name] for one in dataclasses.fields(Problem)}))
        name = f"{row['who']} {row['level']}"
        line = lines.setdefault((row["direction"], shape), {})
        if "tflops" in row:
            line[name] = f"{row['tflops']:.3g}{'' if row['timing'] == 'graph' else '*'}"
        else:
            refusals.setdefault(f"{name} {row['direction']}: {row['refused']}", []).append(shape)
    table(
        "bench kernels: TFLOP/s over visible pairs",
        ["direction", "problem", *(name.removesuffix(" op") for name in columns)],
        [[*key, *(line.get(name) for name in columns)] for key, line in lines.items()],
    )
    for refusal, shapes in refusals.items():
        print(f"refused: {refusal} ({len(shapes)} x, first {shapes[0]})")
    for row in rows:
        if "cost_percent" in row:
            print(f"carry in and out: {row['who']}, {row['mask']} n{row['seq_len']}: {row['cost_percent']:+.1f}%")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 1 when a check is red, and then no speed is shown, or nothing of ours was timed."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    flags = FLAGS.get(words[0], {}) if words else {}
    flag = next((word for word in words[1:] if word in flags), None)
    if flag is not None:
        return flags[flag]([word for word in words[1:] if word != flag])
    listed = "; ".join(f"{command} {', '.join(flags)}" for command, flags in FLAGS.items())
    args: Kernels | Ring | Model | Inference | Server = parse(
        Kernels | Ring | Model | Inference | Server,
        words,
        "bench",
        f"Measures, after checking. Flags with options of their own, shown by --help behind them: {listed}.",
    )
    return run(args, words)


def run(
    args: Kernels | Decode | Ring | Memory | Model | Host | Reduce | Prefill | Inference | Server, words: Sequence[str]
) -> int:
    """Measures what one command line asks for; returns the exit code."""
    if isinstance(args, Server):
        return report_server(args)
    with open_session(args.device) as session:
        line = machine(session)
        session.say(describe(line))
        if isinstance(args, Kernels):
            return report_kernels(args, session, line, words)
        if isinstance(args, Decode):
            return report_decode(args, session, line)
        if isinstance(args, Host):
            return report_host(args, session, line)
        if isinstance(args, Inference):
            return report_inference(args, session, line)
        try:
            kind, rows = measure(args, session, keeper(args.out / f"{args.name}.json", session, line))
        except Refusal as error:
            return fail([str(error)], session)
        if rows is None:
            session.say("red: no speed is shown until the check is green")
            return 1
        if session.rank == 0:
            tabulate(kind, rows)
            print(f"rows: {args.out / args.name}.json")
        return fail(red_rings(rows), session) if isinstance(args, Ring) else 0


def _flag(kind: Any, command: str) -> Callable[[Sequence[str]], int]:
    """What runs a bench whose options are a dataclass."""
    description = (kind.__doc__ or "").split("\n")[0]
    return lambda words: run(parse(kind, words, f"bench {command}", description), words)


FLAGS: dict[str, dict[str, Callable[[Sequence[str]], int]]] = {
    "kernels": {"--softmax": softmax.main},
    "ring": {
        "--host": _flag(Host, "ring --host"),
        "--memory": _flag(Memory, "ring --memory"),
        "--trace": step_trace.main,
        "--profile": graph_profile.main,
    },
    "inference": {
        "--decode": _flag(Decode, "inference --decode"),
        "--prefill": _flag(Prefill, "inference --prefill"),
        "--reduce": _flag(Reduce, "inference --reduce"),
    },
}
"""What a flag behind a command runs with the words beside it; returns the exit code."""


def fail(reasons: Sequence[str], session: Session) -> int:
    """Says why a bench failed, on rank 0; returns the exit code, which is 0 where there is no reason."""
    if session.rank == 0:
        for reason in reasons:
            print(f"error: {reason}", file=sys.stderr, flush=True)
    return int(bool(reasons))


def measure(
    args: Ring | Memory | Model | Reduce | Prefill, session: Session, keep: Keep
) -> tuple[str, list[dict[str, Any]] | None]:
    """The name of a bench over ranks, and its rows, which it has kept; None when its check is red."""
    if isinstance(args, Ring):
        return "ring", bench_ring(args, session, keep)
    if isinstance(args, Reduce):
        rows = bench_reduce(args, session)
        if rows is not None:  # they are checked once more after they were timed
            keep(rows)
        return "reduce", rows
    if isinstance(args, Model):
        return "model", bench_model(args, session, keep)
    if isinstance(args, Prefill):
        return "prefill", bench_prefill(args, session, keep)
    return "memory", bench_memory(args, session, keep)


def report_kernels(args: Kernels, session: Session, line: dict[str, Any], words: Sequence[str]) -> int:
    """Measures kernels and shows what was found; returns the exit code: 1 when an answer of ours was wrong, or all were refused."""
    path = args.out / f"{args.name}.json"
    book = bench_kernels(args, session, line, words, path)
    if book is None:
        return 0
    show_kernels(book.rows)
    if book.left_out:
        seconds = sum(one["estimated_s"] for one in book.left_out)
        print(f"left out for want of time: {len(book.left_out)} problems, about {seconds:.0f} s")
    for one in book.red:
        print(f"red, and so without a speed: {one}")
    print(f"rows: {path}")
    if not book.red and book.rows and not any("tflops" in row for row in book.rows):
        return fail(["every contender was refused, so nothing was timed; --who takes others"], session)
    return int(bool(book.red))


def report_decode(args: Decode, session: Session, line: dict[str, Any]) -> int:
    """Measures decode and shows what was found; returns the exit code: 1 when an answer was wrong or nothing was measured."""
    path = args.out / f"{args.name}.json"
    rows = bench_decode(args, session, line, path)
    if not rows:
        return fail([NOTHING_MEASURED], session)
    tabulate("decode", rows)
    print(f"rows: {path}")
    ours = [row for row in rows if row["who"] == "decode"]
    if not any("us" in row for row in ours):
        return fail(["no configuration of ours was timed"], session)
    return int(any(str(row.get("refused")).startswith("wrong") for row in ours))


def report_host(args: Host, session: Session, line: dict[str, Any]) -> int:
    """Measures the host after a check; returns the exit code."""
    if not verify([args.problem(session.world_size)], ("zigzag",), session, args.impl):
        session.say("red: no speed is shown until the check is green")
        return 1
    rows = bench_host(args, session)
    if session.rank == 0:
        tabulate("host", rows)
        write_json(args.out / "host.json", {"machine": line, "rows": rows})
        print(f"rows: {args.out / 'host.json'}")
    return 0


def report_inference(args: Inference, session: Session, line: dict[str, Any]) -> int:
    """Measures inference, keeping rows as they come, and shows a table per part; returns the exit code."""
    path = args.out / f"{args.name}.json"
    rows = bench_inference(args, session, keeper(path, session, line))
    if rows is None:
        session.say("red: no speed is shown until the check is green")
        return 1
    if session.rank == 0:
        for part in dict.fromkeys(row["part"] for row in rows):
            tabulate(f"inference: {part}", [row for row in rows if row["part"] == part])
        print(f"rows: {path}")
    return 0


def report_server(args: Server) -> int:
    """Measures a running server and shows a table per part; returns the exit code: 1 when it cannot be measured, or failed."""
    path = args.out / f"{args.name}.json"
    line = machine(Session(0, 1, torch.device("cpu"), None))
    try:
        rows = bench_server(args, line, lambda content: write_json(path, content))["rows"]
    except CannotBench as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    for part in dict.fromkeys(row["part"] for row in rows):
        tabulate(f"server: {part}", [row for row in rows if row["part"] == part])
    print(f"rows: {path}")
    red = red_rows(rows)
    for one in red:
        print(f"error: {one}", file=sys.stderr, flush=True)
    return int(bool(red))


if __name__ == "__main__":
    sys.exit(main())
