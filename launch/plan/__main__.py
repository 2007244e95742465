"""Plans a job before it runs: memory and time by what takes them, and the best meshes. Needs no GPU.

python -m ringattn.launch.plan --model llama3-8b --tokens 1M --gpus 64
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from ringattn.launch.common.session import parse, table, write_json
from ringattn.plan.mask import short_mask
from ringattn.plan.options import resolve_window
from ringattn.sizing import Estimate, MeshEstimate, Savings, attention_estimate, estimate, load_profile
from ringattn.sizing.attention_launch import Heads
from ringattn.sizing.estimate import Job, best_layout, check_nodes, with_link
from ringattn.sizing.ring_time import SCHEDULES, RingCall

UNITS = {"K": 2**10, "M": 2**20}
MEMORY_NAMES = {"kv_cache": "KV cache", "ring": "ring buffers"}
TIME_NAMES = {
    "ring_exposed": "ring, exposed",
    "fsdp_exposed": "FSDP, exposed",
    "tp_exposed": "TP, exposed",
    "offload_exposed": "offload, exposed",
    "matmul": "matrix products",
}
OF_TRAINING = ("recompute", "offload", "mlp_rows", "chunked_loss")  # flags
FEW = 10  # meshes in the table without --all


@dataclass(frozen=True)
class PlanArgs:
    """Plans a job before it runs: memory and time by what takes them, and the best meshes. Needs no GPU."""

    # A preset (llama3-8b, llama3-70b, llama3-405b, qwen3-8b, qwen3-32b, qwen3-235b-a22b, deepseek-v3, glm-4.7-flash,
    # deepseek-v3-dense), or a config.json of transformers; left out, --heads, --kv-heads and --head-dim give one attention.
    model: str | None = None
    tokens: str = "128K"  # Tokens of a sequence; 128K and 1M are powers of two.
    # File of document lengths, one number after the other, which are packed into the sequence.
    documents: Path | None = None
    mask: Literal["causal", "full"] = "causal"  # causal or full.
    window: int | None = None  # Tokens that each token sees, itself the last of them.
    gpus: int = 8  # GPUs of the job.
    gpus_per_node: int = 8  # GPUs that NVLink connects.
    gpu: str = "h200"  # h100, h200, a100, b200, or a file that doctor --profile wrote.
    link: float | None = None  # 10^9 bytes per second of a GPU to another node; by default that of the profile.
    mode: Literal["train", "serve"] = "train"  # train or serve.
    batch: int | None = None  # Sequences of a step, or requests; by default one per data-parallel rank, or one request.
    recompute: Literal["auto", "none", "selective", "full"] = "auto"  # Recomputation of activations; auto tries all.
    # Layers whose checkpoints wait in host memory: a number, all, or auto: the fewest with which a rank fits.
    offload: int | Literal["all", "auto"] = 0
    mlp_rows: int = Savings.mlp_rows  # Rows of a rank that go through an MLP at a time.
    chunked_loss: bool = True  # Whether the loss is computed without the logits of all rows.
    # Layout of shards; auto is the best for the mask.
    layout: Literal["auto", "contiguous", "striped", "zigzag", "balanced"] = "auto"
    heads: int = 32  # Query heads of one attention.
    kv_heads: int = 8  # Key/value heads of one attention.
    head_dim: int = 128  # Of q, k and v of one attention.
    all: bool = False  # Print every mesh.
    longest: bool = True  # Find the longest sequence that fits.
    json: Path | None = None  # Where to write the estimate as JSON.
    # Where to draw memory and time of the best meshes, and a heat map over tokens and GPUs (SVG or PNG).
    picture: Path | None = None


def read_count(text: str) -> int:
    """Return a number of tokens; raise ValueError if it is none.

    Example:
        >>> read_count("128K"), read_count("1.5M"), read_count("1_000")
        (131072, 1572864, 1000)
    """
    unit = UNITS.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    try:
        number = float(digits.replace("_", "").replace(",", "")) * unit
    except ValueError:
        number = 0.5
    if number < 1 or number != int(number):
        raise ValueError(
            f"tokens must be a whole number such as 131072, 128K or 1M, got {text!r}; pass another --tokens"
        )
    return int(number)


def read_documents(path: Path, tokens: int) -> tuple[int, ...]:
    """Return bounds of documents that fill a sequence, by lengths of a file, which repeat; raise ValueError if there are none."""
    words = path.read_text().split() if path.is_file() else []
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"documents must be a file of lengths above 0, got {path}; write one number after the other")
    lengths = [int(word) for word in words]
    bounds = [0]
    while bounds[-1] < tokens:
        bounds += [min(tokens, bounds[-1] + x) for x in accumulate(lengths)]
    return tuple(dict.fromkeys(bounds))


def check_left_out(args: PlanArgs, names: Sequence[str], where: str, why: str) -> None:
    """Raise ValueError for a flag that was given, of those that mean nothing there."""
    for name in names:
        if (given := getattr(args, name)) != getattr(PlanArgs, name):
            raise ValueError(f"{name} must be left out {where}, got {given}; {why}")


def options_of(args: PlanArgs) -> dict[str, Any]:
    """Return the arguments of `estimate`."""
    if args.mode == "serve":
        check_left_out(args, OF_TRAINING, "when serving", "nothing is kept for a backward")
    tokens = read_count(args.tokens)
    names = ("model", "gpus", "gpus_per_node", "gpu", "mode", "batch", "window")
    return {name: getattr(args, name) for name in names} | {
        "tokens": tokens,
        "link_gbps": args.link,
        "documents": None if args.documents is None else read_documents(args.documents, tokens),
        "causal": args.mask == "causal",
        "recompute": None if args.recompute == "auto" else args.recompute,
        "layout": None if args.layout == "auto" else args.layout,
        "savings": Savings(args.offload, args.mlp_rows, args.chunked_loss),
    }


def describe(one: MeshEstimate) -> dict[str, Any]:
    """Return a candidate as JSON."""
    names = ("layout", "schedule", "recompute", "sequences", "token_ms", "mfu", "tokens_per_s", "reason")
    return {
        "mesh": {name: getattr(one.mesh, name) for name in ("dp", "cp", "tp", "nodes")},
        **{name: getattr(one, name) for name in names},
        "save_gathered_kv": one.keep,
        "offload": one.savings.offload,
        "host_gib": one.host_bytes / 2**30,
        "sharded_weights": one.sharded,
        "memory_gib": one.memory.gib() | {"total": one.memory.total / 2**30},
        "seconds": None if one.seconds is None else vars(one.seconds) | {"total": one.seconds.total},
    }


def show(found: Estimate, *, longest: bool, every: bool) -> None:
    """Print an estimate as text."""
    job, best = found.job, found.best
    step = "a step" if job.mode == "train" else "a prompt"
    print(
        f"{job.shape.name}: {job.shape.parameters / 1e9:.1f} billion parameters, {job.tokens:,} tokens, {job.gpus} x "
        f"{job.profile.name} ({job.profile.memory_gib:.0f} GiB), {job.gpus_per_node} per node"
    )
    if best is None:
        print("nothing fits\n")
    else:
        _show_best(job, best, step)
    rows = []
    for one in found.candidates if every else found.candidates[:FEW]:
        memory = f"{one.memory.total / 2**30:.0f}"
        time = None if one.seconds is None else f"{one.seconds.total:.3g}"
        mfu = None if one.mfu is None else f"{one.mfu:.1%}"
        rate = None if one.tokens_per_s is None else f"{one.tokens_per_s:,.0f}"
        keep = "keep" if one.keep else "refetch"
        how = f"{one.layout}, {one.schedule}, {one.recompute}, {keep}"
        how += f", offload {one.savings.offload}" if one.host_bytes else ""
        how += ", sharded weights" * one.sharded
        rows.append([one.mesh, one.mesh.nodes, how, one.sequences, memory, time, mfu, rate, one.reason or "best"])
    columns = ["mesh", "nodes of a ring", "how", "sequences", "GiB", "s", "MFU", "tokens/s", "why"]
    table("meshes", columns, rows)
    hidden = len(found.candidates) - len(rows)
    if hidden > 0:
        print(f"{hidden} more with --all")
    if longest:
        print(f"the longest sequence that fits: {found.longest:,} tokens")
    for text in job.profile.assumed:
        print(f"assumed: {text}")


def _show_best(job: Job, best: MeshEstimate, step: str) -> None:
    assert best.seconds is not None, "the best was simulated"
    memory = [[MEMORY_NAMES.get(name, name), f"{value:.2f}"] for name, value in best.memory.gib().items() if value]
    table("memory per GPU at its peak", ["what", "GiB"], [*memory, ["total", f"{best.memory.total / 2**30:.2f}"]])
    if best.host_bytes:
        node = best.host_bytes * min(best.mesh.gpus, job.gpus_per_node)
        rank_gib, node_gib = (f"{x / 2**30:.0f} GiB" for x in (best.host_bytes, node))
        layers = f"{best.savings.layers(job.shape)} of {job.shape.layers} layers"
        print(f"checkpoints of {layers} wait in host memory: {rank_gib} of a rank, {node_gib} of a node\n")
    times = [
        [TIME_NAMES.get(name, name), f"{value:.3f}", f"{value / best.seconds.total:.1%}"]
        for name, value in vars(best.seconds).items()
        if value
    ]
    table(f"time of {step}", ["what", "s", "share"], [*times, ["total", f"{best.seconds.total:.3f}", "100%"]])
    if best.token_ms is not None:
        print(f"first token {best.seconds.total:.2f} s, then {best.token_ms:.2f} ms per token\n")


def show_attention(args: PlanArgs) -> dict[str, Any]:
    """Print and return one attention on a ring of all GPUs, by schedule."""
    check_left_out(args, ("mode", *OF_TRAINING, "picture"), "for one attention", "pass --model to plan a job")
    check_nodes(args.gpus, args.gpus_per_node)
    tokens, profile = read_count(args.tokens), with_link(load_profile(args.gpu), args.link)
    nodes = max(1, args.gpus // args.gpus_per_node)
    documents = None if args.documents is None else read_documents(args.documents, tokens)
    window = resolve_window(args.window)
    mask = short_mask(tokens, causal=args.mask == "causal", window=window, documents=documents)
    layout = best_layout(mask) if args.layout == "auto" else args.layout
    rows, content = list[list[Any]](), dict[str, Any]()
    heads = Heads(args.batch or 1, args.heads, args.kv_heads, args.head_dim)
    for schedule in SCHEDULES[SCHEDULES.index(profile.schedule) :]:
        if nodes > 1 and schedule == "stepwise":
            continue
        found = attention_estimate(RingCall(mask, args.gpus, heads, layout, nodes, schedule), profile)
        content[schedule] = found
        times = [f"{found[f'{way}_{what}']:.3f}" for way in ("forward", "backward") for what in ("ms", "exposed_ms")]
        received = found["forward_bytes"] + found["backward_bytes"]
        rows.append([schedule, *times, f"{received / 2**20:.0f}", f"{found['peak_bytes'] / 2**30:.2f}"])
    columns = ["schedule", "forward ms", "exposed", "backward ms", "exposed", "MiB received", "peak GiB"]
    table(f"attention of {tokens:,} tokens on {args.gpus} x {profile.name}, {layout}", columns, rows)
    return content


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0 unless nothing fits."""
    args: PlanArgs = parse(PlanArgs, arguments, "plan", (PlanArgs.__doc__ or "").split("\n")[0])
    try:
        if args.model is None:
            found, content = None, show_attention(args)
        else:
            options = options_of(args)
            found = estimate(options.pop("model"), **options)
            show(found, longest=args.longest, every=args.all)
            content = {"candidates": [describe(one) for one in found.candidates]}
            content |= {"longest": found.longest} if args.longest else {}
            if args.picture is not None:
                from ringattn.launch.plan.picture import draw

                draw(found, args.picture)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    if args.json is not None:
        write_json(args.json, content)
    return int(found is not None and found.best is None)


if __name__ == "__main__":
    sys.exit(main())
