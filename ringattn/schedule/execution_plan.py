"""The frozen record of a call: all that its options, its shapes and the ring decide before it runs.

    fused     One launch forward, one backward, plus the sum of the gradients that were returned. A query row stays in registers
              from its first key to its last, and no partial touches memory. The keys of all owners need space on every rank. In
              a hierarchical ring there is one launch per node step (fused_hierarchical.py).
    stepwise  One launch per ring step, fp32 partials between them, two receive buffers: space for two shards, whatever the
              number of ranks (a copy engine adds four outboxes). Serves every kernel set, every option and every transport.

Both merge the same partials in ring order; they round at different places. The choice follows from numbers that are equal
on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ringattn.kernels.interface import ACCUMULATION_DTYPES, CallShape, KernelSet, Score, accumulation_dtype
from ringattn.plan.attention_spec import AttentionSpec, ScoreTensors
from ringattn.plan.buffers import count_groups, gather_bytes
from ringattn.plan.device_tables import FusedTables, StepTables, fused_tables, step_tables
from ringattn.plan.layouts import shard_len
from ringattn.plan.ring_plan import GatherPlan, Nodes, RankPlan, RingPlan, moved_rows, share_moves
from ringattn.schedule.latents import EXPANDED_BYTES, LatentGrads, Latents
from ringattn.transport.base import RingContext, Transport
from ringattn.transport.call_order import CallMark

SHORT_SECONDS = 1e-3
"""Duration of a kernel below which the host's time may show, so that a call is worth a CUDA graph."""
KERNEL_RATE = 5e14
"""Operations per second of a kernel, about."""


@dataclass(frozen=True, eq=False)
class FusedPlan:
    """One direction of a call that is computed in one launch per node."""

    gather_plan: GatherPlan
    tables: FusedTables
    groups: int
    num_bytes: int


@dataclass(frozen=True, eq=False)
class ExecutionPlan:
    """A validated call, resolved once and found again at each later call of its kind.

    Attributes:
        wide: Dtype of lse and of gradient accumulators.
        score: The score, where it needs no tensor and no seed; None: it is made for each call.
        moves: This rank's part of ring_plan between processes (`share_moves`); backward_moves is that of backward_plan.
        first_step: The first ring step at which this rank computes; -1: it sees no key at all.
        fused_forward: None: the forward goes step by step; fused_backward is the same of the backward.
        backward_moving: The side that moves in a stepwise backward: "keys" or "queries".
        expands_at_owner: Of latent attention: each rank expands its own rows, and keys and values travel. Otherwise latent rows
            travel, step by step, and the rank that attends to them expands them.
        is_short_forward: The device may finish a forward before the host has enqueued it; is_short_backward: a backward.
        shares_seed: Ranks must have equal dropout seeds (Note [Seeds] in dropout.py).
        hosted: In a ring of virtual ranks the plans of those of this process, of which this is the first; else empty.
    """

    spec: AttentionSpec
    kernels: KernelSet
    wide: torch.dtype
    tables: StepTables
    score: Score | None
    ring_plan: RingPlan
    moves: RankPlan
    first_step: int
    last_step: int
    fused_forward: FusedPlan | None
    fused_backward: FusedPlan | None
    backward_moving: str
    backward_plan: RingPlan
    backward_moves: RankPlan
    backward_tables: StepTables
    is_short_forward: bool
    is_short_backward: bool
    expands_at_owner: bool = True
    mark: CallMark | None = None
    shares_seed: bool = False
    hosted: tuple[ExecutionPlan, ...] = ()


@dataclass(frozen=True)
class Gradients:
    """Gradients of this rank's tensors, in the accumulation dtype; None where not wanted.

    In a ring of one rank dq, dk and dv have the dtype of the inputs.

    Attributes:
        dk: `b t hk d`; of latent attention that of the latent rows, `b t c`.
        dv: `b t hk dv`; of latent attention nothing.
        dalibi: `h`: this rank's share; the sum over ranks is the gradient.
        dsinks: `h`: this rank's share; the sum over ranks is the gradient.
        dkey_bias: `b t`.
        dbias: `b h s n`.
        latents: Those of the weights of latent attention: this rank's share.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None
    dalibi: Tensor | None
    dkey_bias: Tensor | None
    dbias: Tensor | None
    latents: LatentGrads | None = None


class WantedGrads(NamedTuple):
    """Flags of the optional tensors of a score whose gradients are wanted."""

    sinks: bool = False
    alibi_slopes: bool = False
    key_bias: bool = False
    bias: bool = False


class ForwardCall(NamedTuple):
    """A forward of this rank's rows: q `b s h d`, k `b t hk d` and v `b t hk dv`.

    Attributes:
        score: Options of the score; key_bias holds this rank's keys.
        latents: Of latent attention, in which k and v are stand-ins.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    score: Score
    plan: ExecutionPlan
    context: RingContext
    latents: Latents | None = None

    def results(self) -> tuple[Tensor, Tensor]:
        """Return o `b s h dv` in q's dtype and lse `b h s`, which a schedule writes."""
        q, (b, s, h, _) = self.q, self.q.shape
        o = torch.empty(b, s, h, self.v.shape[-1], dtype=q.dtype, device=q.device)
        return o, torch.empty(b, h, s, dtype=self.plan.wide, device=q.device)


class BackwardCall(NamedTuple):
    """A backward: do `b s h dv` and dlse `b h s`, 0 on rows that saw nothing, and the arguments and results of its forward.

    Attributes:
        wanted: The gradients of optional tensors to compute.
        latents: Of latent attention, in which k and v are stand-ins.
    """

    do: Tensor
    dlse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor
    score: Score
    plan: ExecutionPlan
    context: RingContext
    wanted: WantedGrads
    latents: Latents | None = None

    def gradients(
        self,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        delta: Tensor,
        dalibi: Tensor | None,
        dkey_bias: Tensor | None = None,
        dbias: Tensor | None = None,
        latents: LatentGrads | None = None,
    ) -> Gradients:
        """Return the gradients; delta and dalibi, the gradient of alibi_slopes by row, are `b h s`."""
        dsinks = sinks_gradient(self.score, self.lse, delta) if self.wanted.sinks else None
        return Gradients(dq, dk, dv, dsinks, None if dalibi is None else dalibi.sum((0, 2)), dkey_bias, dbias, latents)


def sinks_gradient(score: Score, lse: Tensor, delta: Tensor) -> Tensor:
    """Return this rank's share of the gradient of sinks, `h`; lse and delta are `b h s`."""
    # a sink is a logit whose value row is zero: dp = 0, so ds = p * (0 - delta)
    assert score.sinks is not None, "a gradient of sinks needs sinks"
    # a row without keys and without a sink has no weight to give: exp(-inf + inf) would be NaN
    p = torch.exp(score.sinks.to(lse.dtype)[:, None] - lse).masked_fill(lse == float("-inf"), 0.0)
    return -(p * delta).sum((0, 2))


def make_execution_plan(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: ScoreTensors,
    kernels: type[KernelSet],
    context: RingContext,
    faster: tuple[str, str] | None = None,
) -> ExecutionPlan:
    """Return the plan of a validated call, bound to its kernels; of the tensors only shapes, dtypes and devices are read.

    faster is `CallShape.faster`.
    """
    score = spec.score(q.dtype, 0, tensors)
    dims = q.shape[2], k.shape[2], q.shape[3], v.shape[3]
    bound = kernels(CallShape(q.device, q.dtype, *dims, score, spec.deterministic, faster))
    ring_plan = spec.plan("keys", context.nodes)
    steps = [step for step, ring_step in enumerate(ring_plan.ranks[context.rank].ring_steps) if ring_step is not None]
    has_no_tensors = all(x is None for x in tensors)
    moving = resolve_moving(spec, q, k, v, has_bias=tensors.bias is not None, nodes=context.nodes)
    backward_plan = ring_plan if moving == "keys" else spec.plan(moving, context.nodes)

    def moves_of(plan: RingPlan) -> RankPlan:
        return (plan if context.hosted == 1 else share_moves(plan, context.hosted)).ranks[context.rank]

    fused = [_fuse(spec, q, k, v, tensors, bound, context, backward=backward) for backward in (False, True)]
    at_owner = _expands_at_owner(spec, fused, k, v, context)
    if not at_owner:
        fused = [None, None]
    tables = step_tables(spec, "keys", q.device, context.nodes, ring_plan)
    # pairs are counted for kernels that a graph can hold, now or once no hook listens to launches
    b, _, h, d = q.shape
    pairs = spec.pairs(b) if kernels.can_capture is not KernelSet.can_capture else float("inf")
    seconds = 2 * pairs * h * (d + v.shape[-1]) / KERNEL_RATE
    return ExecutionPlan(
        spec=spec,
        kernels=bound,
        wide=ACCUMULATION_DTYPES[q.dtype],
        tables=tables,
        score=score if has_no_tensors and spec.dropout_p == 0 else None,
        ring_plan=ring_plan,
        moves=moves_of(ring_plan),
        first_step=steps[0] if steps else -1,
        last_step=steps[-1] if steps else -1,
        fused_forward=fused[0],
        fused_backward=fused[1],
        backward_moving=moving,
        backward_plan=backward_plan,
        backward_moves=moves_of(backward_plan),
        backward_tables=tables if moving == "keys" else step_tables(spec, moving, q.device, context.nodes),
        is_short_forward=seconds < SHORT_SECONDS,
        is_short_backward=2.5 * seconds < SHORT_SECONDS,
        expands_at_owner=at_owner,
    )


def _expands_at_owner(
    spec: AttentionSpec, fused: list[FusedPlan | None], k: Tensor, v: Tensor, context: RingContext
) -> bool:
    """Return whether a rank expands its own rows, all at once; with "auto", where one launch gathers them within a host.

    On a ring of one rank also where they are few.

    The copy engine moves expanded rows beside the kernel at no cost of its own, and products cost each reader. Elsewhere a row
    of all heads costs more on the link than its product (docs/latent.md).
    """
    if spec.latents is None or spec.latents[2] != "auto":
        return spec.latents is None or spec.latents[2] == "owner"
    if context.world_size == 1:
        return (k.numel() + v.numel()) * k.element_size() <= EXPANDED_BYTES
    return context.nodes is None and None not in fused


def resolve_moving(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, *, has_bias: bool = False, nodes: Nodes | None = None
) -> str:
    """Return the side that a stepwise backward moves: the call's choice, or the one that costs fewer bytes on the busiest rank.

    Keys move with bias, whose rows cannot leave their rank, and with dropout unless the call says otherwise (Note [Seeds] in
    dropout.py).
    """
    if has_bias or len(spec.sharding.shards) == 1:
        return "keys"
    if spec.backward != "auto":
        return spec.backward
    if spec.dropout_p > 0:
        return "keys"
    e, wide = q.element_size(), accumulation_dtype(q.dtype).itemsize
    _, _, hk, d = k.shape
    h, dv = q.shape[2], v.shape[-1]
    latents = spec.latents
    per_key = (e + wide) * (hk * (d + dv) if latents is None or latents[2] == "owner" else latents[0])
    per_query = e * h * (d + dv) + wide * h * (d + 2)
    keys, queries = moved_rows(spec.plan("keys", nodes)), moved_rows(spec.plan("queries", nodes))
    return "keys" if per_key * keys <= per_query * queries else "queries"


def _fuse(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: ScoreTensors,
    kernels: KernelSet,
    context: RingContext,
    *,
    backward: bool,
) -> FusedPlan | None:
    """Return the fused plan of a direction; None: the stepwise schedule serves it."""
    nodes, key_bias = context.nodes, tensors.key_bias
    members = context.world_size if nodes is None else len(nodes[0])
    # a node of one rank has no peer to gather from, and a bias of keys does not cross between nodes
    if members == 1 or not kernels.can_fuse() or (nodes is not None and key_bias is not None):
        return None
    if (backward and spec.backward == "queries") or context.transport.kv_gather() is None:
        return None
    shards = (*spec.sharding.shards, *spec.kv_sharding.shards)
    if not all(shard_len(shard) for shard in shards):
        return None
    gather_plan = spec.gather_plan(nodes)
    bias_bytes = 0 if key_bias is None else accumulation_dtype(q.dtype).itemsize
    sizes = k.shape[0], k.shape[2], k.shape[3] + v.shape[3], k.element_size()
    extra = {"backward": backward, "bias_bytes": bias_bytes, "hierarchical": nodes is not None}
    num_bytes = gather_bytes(*sizes, gather_plan, members, **extra)
    if num_bytes > context.budget:
        return None
    groups = count_groups(*sizes, gather_plan.slot_rows, context.push_rate)
    tables = fused_tables(spec, q.device, nodes)
    return FusedPlan(gather_plan, tables, groups, num_bytes)


def enqueue_or_replay(
    transport: Transport,
    plan: ExecutionPlan,
    is_short: bool,
    key: tuple[Hashable, ...],
    score: Score,
    given: tuple[Tensor, ...],
    made: tuple[Tensor, ...],
    enqueue: Callable[[], object],
) -> None:
    """Enqueue one direction of a call, or replay it as a graph where it is short and its kernels and options allow it."""
    # biases are no part of the key, and a seed is another one each time
    varies = score.key_bias is not None or score.bias is not None or score.dropout_p > 0
    if not is_short or varies or not plan.kernels.can_capture():
        enqueue()
        return
    key = (*key, plan, score.sinks is None, score.alibi_slopes is None)
    given += present(score.sinks) + present(score.alibi_slopes)
    transport.replay_or_enqueue(key, given, made, enqueue)


def present(x: Tensor | None) -> tuple[Tensor, ...]:
    """Return the tensor as a tuple; empty where there is none."""
    return () if x is None else (x,)
