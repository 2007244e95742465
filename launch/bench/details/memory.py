"""Memory against length: the peak of one step as it is measured, beside what integers predict.

Owns the rows of `bench ring --memory` and the prediction. Refuses to know clocks, and the scratch of kernels.

Note [Prediction]
    What a forward and backward hold at once, in bytes, on the rank that holds most, in the second of two equal steps: the
    buffers that a ring keeps are then as large as they will be. Accumulators are fp32 (fp64 for fp64 inputs).
    Inputs (q, k, v, do), output, lse and gradients are the caller's, the rest is the ring's:
    step by step: dq, dk and dv in accumulators until they are rounded; the partial (m, l, acc) between visits; two buffers
        for what arrives and two for rows that leave packed; with keys moving, contributions to dk and dv of two steps and
        those that come home from one (to dq when queries move). Over the copy engine, outboxes: two for the largest message
        of any rank, and two for its contributions.
    gathered: the slot that rows leave from; far, as large as that of the rank that reads most (kept: besides, the rows of all
        others for every layer whose backward is to come; here there is one); a region of accumulators for this rank's own
        contribution and one per reader; dq in accumulators.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import ringattn
from ringattn.kernels.interface import PAD_ROWS, accumulation_dtype
from ringattn.launch.bench.ring import GIB, Layout, best_layout, mask_of, peak_of, verify
from ringattn.launch.bench.ring_baselines import prepare_ours
from ringattn.launch.bench.workloads import DTypeName, MaskName, Problem
from ringattn.launch.check.attention import DTYPES
from ringattn.launch.runtime.ring_variants import ScheduleName, lonely_ring, open_rings, shown_name
from ringattn.launch.runtime.session import Keep, Session
from ringattn.plan.attention_spec import AttentionSpec, serialize
from ringattn.plan.layouts import make_shards
from ringattn.plan.ring_plan import RankPlan, make_gather_plan, make_plan
from ringattn.plan.sharding import Sharding
from ringattn.schedule.execution_plan import resolve_moving

SLOTS = 1
"""Slots of a gathered ring."""
BOXES = 2
"""Outboxes of each kind of a ring that goes step by step over the copy engine: one is filled while the other may be read."""


@dataclass(frozen=True)
class Memory:
    """All ranks: peak memory per GPU of one forward and backward, against the length of the whole sequence.

    Attributes:
        lengths: Tokens of the whole sequence; 1048576 is the longest anybody has asked for.
        mask: What is visible.
        layout: How positions are dealt out; "best" as in `bench ring`.
        schedules: Our rings, as in `bench ring`.
        heads: Query heads.
        kv_heads: Key/value heads, one or more counts.
        head_dim: Of q, k and v.
        batch: Batch elements.
        window: Tokens to the left a query sees under the window mask.
        dtype: Of q, k and v.
        impl: Kernels: "auto", or the name of a kernel set.
        alone: Also measure one GPU with the whole sequence, where it fits.
        steps: Steps that each row makes, the last of which counts; 1 where steps take long: a first step may hold
            buffers twice while they grow.
        device: GPUs where there are any, or the CPU.
        out: Folder for the JSON and the plot.
        name: Of the files.
    """

    lengths: tuple[int, ...] = (16384, 32768, 65536, 131072)
    mask: MaskName = "causal"
    layout: Layout = "best"
    schedules: tuple[ScheduleName, ...] = ("auto",)
    heads: int = 32
    kv_heads: tuple[int, ...] = (8,)
    head_dim: int = 128
    batch: int = 1
    window: int = 4095
    dtype: DTypeName = "bf16"
    impl: str = "auto"
    alone: bool = True
    steps: int = 2
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path = Path("runs/bench")
    name: str = "memory"


def predict_bytes(
    problem: Problem,
    world_size: int,
    schedule: str = "stepwise",
    layout: str = "best",
    slots: int = SLOTS,
    boxes: int = 0,
) -> dict[str, int]:
    """Bytes by purpose at the peak of a step, on the rank that holds most (Note [Prediction]).

    Args:
        problem: What is computed.
        world_size: Ranks.
        schedule: "fused", "fused_saved_kv", or anything else for step by step.
        layout: How positions are dealt out.
        slots: Of a gathered ring.
        boxes: Outboxes of each kind, step by step; 0 where messages leave from where they are.

    Returns:
        Their sum is the prediction.

    Example:
        >>> problem = Problem("causal", 4096, 1, 8, 2, 64, "bf16", window=0)
        >>> predict_bytes(problem, 1)["inputs"] == 4096 * (8 + 2 + 2 + 8) * 64 * 2
        True
    """
    ranks = [_predict_rank(problem, world_size, rank, schedule, layout, slots, boxes) for rank in range(world_size)]
    return max(ranks, key=lambda found: sum(found.values()))


def _predict_rank(
    problem: Problem, world_size: int, rank: int, schedule: str, layout: str, slots: int, boxes: int
) -> dict[str, int]:
    layout = best_layout(problem, world_size) if layout == "best" else layout
    mask = mask_of(problem)
    balance = mask if layout == "balanced" else dataclasses.replace(mask, causal=True)
    shards = make_shards(layout, problem.seq_len, world_size, balance)
    sharding = Sharding(problem.seq_len, layout, shards, rank, problem.documents)
    dtype = DTYPES[problem.dtype]
    e, w = dtype.itemsize, accumulation_dtype(dtype).itemsize
    b, s, h, hk, d = problem.batch, sharding.shard_len, problem.heads, problem.kv_heads, problem.head_dim
    queries, keys, numbers = b * s * h * d, b * s * hk * d, b * h * s
    found = Counter({"inputs": e * 2 * (queries + keys), "output": e * queries, "lse": w * numbers})
    gradients, delta = e * (queries + 2 * keys), w * numbers
    if world_size == 1:
        found["gradients"] = max(gradients, delta + gradients)
        return dict(found)
    plan = make_plan(shards, shards, mask, "keys")
    if schedule in ("fused", "fused_saved_kv"):
        gather_plan = make_gather_plan(plan, rank, PAD_ROWS)
        per_row = b * hk * 2 * d
        found["slots"] = slots * e * gather_plan.slot_rows * per_row
        found["far"] = e * gather_plan.most_remote_rows * per_row
        found["fused_saved_kv"] = e * gather_plan.remote_rows * per_row * (schedule == "fused_saved_kv")
        found["homes"] = w * (2 * (world_size - 1) + 1) * gather_plan.slot_rows * per_row
        found["accumulators"] = w * queries if w > e else 0
        found["gradients"] = max(gradients, delta + 2 * e * keys)
        return dict(found)
    found["accumulators"] = w * (queries + 2 * keys)
    # what rounds them is made when delta is gone
    found["gradients"] = max(gradients, delta) if w > e else delta
    if sum(ring_step is not None for ring_step in plan.ranks[rank].ring_steps) > 1:
        found["partial"] = w * (queries + 2 * numbers)
    spec = AttentionSpec.deserialize(serialize(sharding, softmax_scale=1.0, impl="eager", **problem.options), rank)
    q, k = (torch.empty(b, s, heads, d, dtype=dtype, device="meta") for heads in (h, hk))
    moving = resolve_moving(spec, q, k, k)
    back = make_plan(shards, shards, mask, moving)
    part = back.ranks[rank]
    row = b * hk * d
    message = 2 * e * row * plan.largest_send
    buffers = _transfers(plan.ranks[rank], 2 * e * row, s)
    home = w * 2 * row
    if moving == "queries":
        row = b * h * d
        per_row = 2 * e * row + 2 * w * b * h
        for name, size in _transfers(part, per_row, s).items():
            buffers[name] = max(buffers.get(name, 0), size)
        message = max(message, per_row * back.largest_send)
        home = w * row
    if boxes:
        found["outboxes"] = boxes * (message + home * back.largest_send)
    for name, size in buffers.items():
        found[name.split()[0]] += size
    made: Counter[int] = Counter()
    for ring_step in part.ring_steps[1:]:
        if ring_step is not None:
            made[ring_step.step % 2] = max(made[ring_step.step % 2], ring_step.num_rows)
    returning = max((sum(n for _, n in send.rows) for send in part.sends if send is not None), default=0)
    found["contributions"] = home * (sum(made.values()) + returning)
    return dict(found)


def _transfers(part: RankPlan, per_row: int, own_rows: int) -> dict[str, int]:
    """The largest of every receive and send buffer, in bytes: each holds one message."""
    sizes: dict[str, int] = {}

    def grow(name: str, size: int) -> None:
        sizes[name] = max(sizes.get(name, 0), size)

    for ring_step, send in zip(part.ring_steps[1:], part.sends[1:], strict=True):
        if ring_step is not None:
            grow(f"arriving {ring_step.step % 2}", per_row * ring_step.num_rows)
        if send is not None:
            # the whole shard is packed once for all who want it
            grow("leaving whole" if send.rows == ((0, own_rows),) else "leaving", per_row * send.num_rows)
    return sizes


def bench_memory(args: Memory, session: Session, keep: Keep) -> list[dict[str, Any]] | None:
    """Rows of memory, one per length, head count and ring; None when the check is red.

    Args:
        args: What.
        session: The ranks.
        keep: Who gets the rows.

    Raises:
        Refusal: None of the rings can be, on any rank alike.
    """
    problems = [
        Problem(args.mask, n, args.batch, args.heads, kv_heads, args.head_dim, args.dtype, args.window)
        for kv_heads in args.kv_heads
        for n in args.lengths
    ]
    rings = open_rings(args.schedules, session)
    able: list[ScheduleName] = [schedule for schedule in args.schedules if shown_name(schedule, session) in rings]
    if not verify(problems, (args.layout,), session, args.impl, able):
        return None
    if args.alone and session.world_size > 1:
        rings["alone"] = lonely_ring(session)
    rows = []
    for problem in problems:
        for who, ring in rings.items():
            row = _memory_row(args, problem, who, ring, session)
            session.say(
                f"  {problem.seq_len} tokens, {who}: {_gib(row['peak_gib'])}, predicted {_gib(row['predicted_gib'])}"
            )
            rows.append(row)
            keep(rows)
    return rows


def _gib(size: float | None) -> str:
    return "not counted here" if size is None else f"{size:.2f} GiB"


def _memory_row(args: Memory, problem: Problem, who: str, ring: ringattn.Ring, session: Session) -> dict[str, Any]:
    layout = best_layout(problem, ring.world_size) if args.layout == "best" else args.layout
    kind = "stepwise"
    if who in ("auto", "fused", "fused_saved_kv") and session.device.type == "cuda":
        kind = "fused_saved_kv" if ring.save_gathered_kv else "fused"
    boxes = BOXES if ring.transport.name == "copy_engine" else 0
    parts = predict_bytes(problem, ring.world_size, kind, layout, boxes=boxes)
    return {
        "bench": "memory",
        "world_size": ring.world_size,
        "who": who,
        "layout": layout,
        **dataclasses.asdict(problem),
        "predicted": parts,
        "predicted_as": kind,
        "predicted_gib": sum(parts.values()) / GIB,
        "tensors_gib": (parts["inputs"] + parts["output"] + _gradients(problem, ring.world_size)) / GIB,
        "peak_gib": peak_of(
            lambda: prepare_ours(problem, ring, layout, session.device, args.impl, session.rank),
            [ring],
            session,
            args.steps,
        ),
    }


def _gradients(problem: Problem, world_size: int) -> float:
    heads = problem.heads + 2 * problem.kv_heads
    return problem.batch * problem.seq_len * heads * problem.head_dim * DTYPES[problem.dtype].itemsize / world_size
