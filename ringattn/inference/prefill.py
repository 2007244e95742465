"""Prefill: attention of new rows over all tokens of their requests; keys are sent around the ring, or queries are.

Note [What moves]
    A rank has s new rows and t stored keys per batch element, all ranks together N rows and T keys. It receives, in bytes,
        keys are sent:     T (P-1)/P * hk (d + dv) e                     the keys of all others
        queries are sent:  N (P-1)/P * h (d e + (dv + 2) a)              their queries, and partials of its own rows, a = 4
    and whichever is less on the busiest rank is sent. Counted in rows of a plan, so that under a window only its halo is sent.
    For bf16 and d = dv = 128 the sides are 512 hk T and 776 h N: queries are sent below N / T = 0.66 hk / h. The first chunk of a
    prompt has N = T and always sends keys. Keys are prefetched during attention as in training.

Note [Queries move]
    Every rank sends its new rows to the ranks that store keys that they see (one post per peer), computes all received rows over
    its own keys in one launch, and returns to each owner the partial of its rows. Rows of several owners are sorted by position,
    because kernels need ascending bounds. The owner merges partials in the order of ranks and normalises once, the sink first.
    A rank needs memory for N rows of q, N fp32 rows of (m, l, acc), as much again in messages, and P fp32 partials of its rows.
    Compute and bytes both grow with N: at R FLOP/s and B bytes/s messages take 1.5 (P-1) R / (B T) of the time of attention, on
    4 GPUs at 600 TFLOP/s and 350 GB/s 24% for T = 32K and 0.7% for 1M. Queries are sent before pages are copied, which hides them
    below N = T / 28. Hiding more needs several launches, each of which would end with idle multiprocessors.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ringattn.dispatch import run_forward
from ringattn.inference.forward_batch import ForwardBatch
from ringattn.inference.latent_weights import UpWeights, key_heads
from ringattn.inference.paged_prefill import PagedRows, plan_paged_rows
from ringattn.kernels.interface import RowMetadata, Score, SoftmaxState, Step, accumulation_dtype
from ringattn.kernels.partials.packed import clear, finish_parts, size, views
from ringattn.kernels.runtime.table_cache import Key, find
from ringattn.plan.attention_spec import AttentionSpec, ScoreTensors
from ringattn.plan.device_tables import side_key
from ringattn.plan.expressions import Mask
from ringattn.plan.ring_plan import RingPlan, Rows, pack
from ringattn.schedule.execution_plan import ExecutionPlan, ForwardCall
from ringattn.schedule.kv_rotation import message_bytes, slices
from ringattn.schedule.latents import pieces
from ringattn.transport.base import GradMessage, Message, RingContext, Work, span

COMM_MODES = ("auto", "keys", "queries")
FLOPS_PER_SENT_BYTE = 1700.0
"""FLOP of a matrix product in the time in which a byte is sent, as in Note [Queries move]."""
GROWTH_MARGIN = 1.05
"""Factor on reserved buffers for uneven shards of a longer request."""


class NewRows(NamedTuple):
    """New rows of this rank, the tensors of their score, and the weights that expand latents, if k and v are latents."""

    q: Tensor
    k: Tensor
    v: Tensor
    tensors: ScoreTensors
    up: UpWeights | None


@dataclass(frozen=True, eq=False)
class Prefill:
    """Resolved kind of call of a prefill; made at its first call.

    Attributes:
        fresh: No rows were stored before: the new rows are all there are.
        query_plan: Routing of queries, if they are sent.
        paged_rows: Rows that attend to this rank's pages in place, if any.
        growth_factor: Ratio by which the requests may become longer.
        ranks: In a ring of virtual ranks the calls of those of this process, of which this is the first; else empty.
    """

    plan: ExecutionPlan
    comm_mode: str
    kv_access: str
    fresh: bool
    query_plan: QueryPlan | None
    paged_rows: PagedRows | None
    growth_factor: float
    ranks: tuple[Prefill, ...] = ()
    _has_reserved: list[bool] = field(default_factory=list, init=False, repr=False)

    @property
    def contains(self) -> bool:
        """Whether the new rows are read as given, beside those of other requests, so that non-finite rows must be contained.

        See Note [Values that are not finite] of kernels/kv/pages.py.
        """
        documents = self.plan.spec.sharding.documents
        return self.fresh and self.kv_access == "copies" and documents is not None and len(documents) > 2

    def attend(self, step: ForwardBatch, layer: int, given: NewRows) -> Tensor:
        """Return o `b s h dv` of this rank's new rows, whose keys are in the cache; pages are read by q as it is."""
        q, k, v, tensors, up = given
        cache, plan, context = step.cache, self.plan, step.cache.ring.context
        dv = key_heads(cache, up)[2] if self.kv_access == "copies" else cache.v_head_dim
        q = _rows(q)
        score = plan.spec.score(q.dtype, 0, tensors)
        query_plan, in_flight = self.query_plan, None
        if query_plan is not None:
            # before pages are copied (Note [Queries move])
            in_flight = _post_queries(q.contiguous(), dv, context, query_plan)
        if self.kv_access == "pages":
            rows = self.paged_rows
            if in_flight is None:
                return q.new_empty(*q.shape[:3], dv) if rows is None else rows.attend(cache, layer, q, score)

            def attend_pages(queries: Tensor, carry: SoftmaxState) -> None:
                assert rows is not None, "received queries were planned"
                rows.write_partial(cache, layer, queries, score, carry)

            return _attend_and_merge(in_flight, dv, score, context, attend_pages)
        keys, values, latents = k, v, None
        if not self.fresh:
            assert step.kv_slots is not None, "a prefill has slots of stored keys"
            keys, values = cache.take(layer, step.kv_slots)
        if up is None:
            keys, values = _rows(keys), _rows(values)
        else:
            latents = up.latents(keys)
            keys, values = latents.stand_ins()
        if in_flight is None:
            if not self._has_reserved:
                moving = (keys, values) if latents is None or plan.expands_at_owner else (latents.rows,)
                _reserve_ahead(moving, plan, context, self.growth_factor, cache.reserved_bytes)
                self._has_reserved.append(True)
            return run_forward(ForwardCall(q, keys, values, score, plan, context, latents))[0]
        query_plan, take = in_flight.query_plan, context.buffers.take

        def attend_copies(queries: Tensor, carry: SoftmaxState) -> None:
            b, total, h, d = queries.shape
            # the sink is added once, where partials are merged
            own, whole = dataclasses.replace(score, sinks=None), find(query_plan.keys)
            # with last=False o and lse are not written
            o = queries if d == dv else take("prefill o", (b, total, h, dv), queries.dtype, queries.device)
            lse = take("prefill lse", (b, h, total), carry.m.dtype, queries.device)
            parts = [(slice(None), whole)] if latents is None else pieces(whole, latents.rows_at_once())
            for i, (part, side) in enumerate(parts):
                found = (keys, values) if latents is None else latents.expand(latents.rows[:, part], context.buffers)
                step = Step(queries, *found, query_plan.side, side, own, o, lse, carry, first=i == 0, last=False)
                plan.kernels.forward(step)

        return _attend_and_merge(in_flight, dv, score, context, attend_copies)


def find_paged_rows(
    step: ForwardBatch, spec: AttentionSpec, query_plan: QueryPlan | None, heads: int, mask: Mask
) -> PagedRows | None:
    """Return the rows that attend to this rank's pages: all new rows on one rank, or those that `query_plan` routes here.

    The mask has `bounds`.
    """
    documents = spec.sharding.documents
    new = [(length - count, count, i) for i, (length, count) in enumerate(zip(step.lengths, step.counts, strict=True))]
    if query_plan is not None:
        if documents is None:
            # requests of one batch: each has a batch element
            new = [(start, length, i) for i in range(len(step.requests)) for start, length in query_plan.side_runs]
        else:
            new = []
            for start, length in query_plan.side_runs:
                while length:
                    i = bisect_right(documents, start) - 1
                    some = min(length, documents[i + 1] - start)
                    new.append((start - documents[i], some, i))
                    start, length = start + some, length - some
    return plan_paged_rows(step, new, heads, mask)


def resolve_comm_mode(
    wanted: str, step: ForwardBatch, spec: AttentionSpec, q: Tensor, up: UpWeights | None, fresh: bool, kv_access: str
) -> str:
    """Return what is sent: as wanted, or by Note [What moves] from numbers that are equal on all ranks.

    Latents: Note [Expanded or absorbed]; kv_access is how queries read them.
    """
    if wanted != "auto":
        return wanted
    cache = step.cache
    if cache.ring.world_size == 1 or fresh:
        return "keys"
    nodes = cache.ring.context.nodes
    _, d, dv = key_heads(cache, up if kv_access == "copies" else None)
    element, wide = q.element_size(), accumulation_dtype(q.dtype).itemsize
    keys = max(part.received_rows for part in spec.plan("keys", nodes).ranks)
    per_key = cache.kv_heads * (cache.head_dim + cache.v_head_dim) * element
    if up is not None:
        dr = cache.head_dim - cache.v_head_dim
        per_key = cache.head_dim * element + up.expansion_flops(dr) / FLOPS_PER_SENT_BYTE
    queries = max(
        part.received_rows * d * element + sum(send.num_rows for send in part.sends if send) * (dv + 2) * wide
        for part in spec.plan("queries").ranks
    )
    return "keys" if keys * per_key <= queries * q.shape[2] else "queries"


def _reserve_ahead(
    keys: Sequence[Tensor],
    plan: ExecutionPlan,
    context: RingContext,
    growth_factor: float,
    reserved: dict[str, tuple[int, ...]],
) -> None:
    """Reserve buffers for this forward and, where they must grow, for forwards with up to `growth_factor` as many keys.

    Every chunk of a long prompt sees more keys than the one before, and making the ring's buffers anew stops the device. So the
    first chunk reserves for all tokens that its requests reserved, fused calls only as far as the memory budget allows.
    """
    if context.world_size == 1:
        return
    fused, kv_gather = plan.fused_forward, context.transport.kv_gather()
    if fused is None or kv_gather is None:
        moving = [(x, 1) for x in keys]
        rows = (plan.ring_plan.largest_send, plan.ring_plan.largest_remote_send)
        sizes = _reserved_bytes(reserved, "stepwise", tuple(message_bytes(moving, n) for n in rows), growth_factor)
        for transport, size in zip((context.transport, context.slow_transport), sizes, strict=True):
            if size:
                transport.reserve(size)
        return
    row, gather_plan = sum(x[:, :1].nbytes for x in keys), fused.gather_plan
    most = max(1.0, min(growth_factor, context.budget / max(1, fused.num_bytes)))
    sizes = _reserved_bytes(reserved, "fused", (gather_plan.slot_rows * row, gather_plan.most_remote_rows * row), most)
    kv_gather.reserve_gather(*sizes, remote_shards=context.nodes is not None)


def _reserved_bytes(
    reserved: dict[str, tuple[int, ...]], kind: str, sizes: tuple[int, ...], growth_factor: float
) -> tuple[int, ...]:
    """Return the reserved bytes of a kind of buffers, grown where they do not suffice."""
    there = reserved.get(kind, (0,) * len(sizes))
    if any(size > have for size, have in zip(sizes, there, strict=True)):
        there = tuple(max(math.ceil(growth_factor * size), have) for size, have in zip(sizes, there, strict=True))
        reserved[kind] = there
    return there


def growth_limit(step: ForwardBatch) -> float:
    """Return the ratio of the tokens that the requests reserved to those they have, times GROWTH_MARGIN."""
    reserved = sum(one.reserved_tokens for one in step.cache.allocator.get_requests(step.requests))
    return max(1.0, reserved / sum(step.lengths)) * GROWTH_MARGIN


@dataclass(frozen=True, eq=False)
class QuerySegment:
    """Rows of an owner that attend to this rank's keys; indices, `count` int64 on the device, are their places among all such."""

    rank: int
    rows: Rows
    count: int
    indices: Tensor


@dataclass(frozen=True, eq=False)
class QueryPlan:
    """Routing of the queries of a batch (Note [Queries move]), seen from this rank.

    Attributes:
        plan: Rows that every rank sends and receives.
        side: Metadata of all rows that attend here, sorted by position.
        segments: The same rows by owner.
        side_runs: (start, length) of their positions.
        keys: Key of the table of this rank's keys.
    """

    plan: RingPlan
    side: RowMetadata
    segments: dict[int, QuerySegment]
    total: int
    side_runs: tuple[tuple[int, int], ...]
    keys: Key[RowMetadata]


def plan_queries(spec: AttentionSpec, device: torch.device) -> QueryPlan:
    """Plan the routing of queries: integers, and tables on the device."""
    plan = spec.plan("queries")
    steps = [step for step in plan.ranks[spec.rank].ring_steps if step is not None and step.pairs]
    # (start, offset in the step's rows, length, step): spans of positions, which never overlap
    spans = sorted((run[2], run[0], run[1], i) for i, step in enumerate(steps) for run in step.runs)
    ends = list(accumulate((length for _, _, length, _ in spans), initial=0))
    runs = tuple((at, length, start, 1) for at, (start, _, length, _) in zip(ends, spans, strict=False))
    parts: list[list[tuple[int, int, int]]] = [[] for _ in steps]
    for at, (_, offset, length, i) in zip(ends, spans, strict=False):
        parts[i].append((offset, at, length))
    segments = {
        step.owner: QuerySegment(step.owner, step.rows, step.num_rows, _indices(mine, device))
        for step, mine in zip(steps, parts, strict=True)
    }
    side = find(side_key(runs, spec.mask, device, "keys"))
    keys = side_key(pack(spec.kv_sharding.shards[spec.rank]), spec.mask, device, None)
    return QueryPlan(plan, side, segments, ends[-1], tuple((start, length) for _, length, start, _ in runs), keys)


@dataclass(frozen=True, eq=False)
class InFlightQueries:
    """Queries that are being received, and this rank's queries that are being sent.

    Attributes:
        q: `b s h d`: this rank's rows, contiguous.
        arriving: Per ring step from 1 on: the owner's rows, `b count h d`, or None, and the works to wait for.
    """

    q: Tensor
    query_plan: QueryPlan
    arriving: list[tuple[Tensor | None, list[Work]]]


def _post_queries(q: Tensor, dv: int, context: RingContext, query_plan: QueryPlan) -> InFlightQueries:
    """Send this rank's rows q `b s h d` to the ranks whose keys they see, and receive theirs; returns at once."""
    b, _, h, d = q.shape
    largest = query_plan.plan.largest_send * b * h
    sizes = (largest * d * q.element_size(), size(largest, dv) * accumulation_dtype(q.dtype).itemsize)
    # in powers of two: lengths of prompts differ between batches
    sizes = [1 << (num_bytes - 1).bit_length() if num_bytes else 0 for num_bytes in sizes]
    for transport in {id(one): one for one in (context.transport, context.slow_transport)}.values():
        transport.reserve(*sizes)
    plan, arriving = query_plan.plan.ranks[context.rank], []
    for step in range(1, context.world_size):
        sends: list[Message] = []
        recvs: list[Message] = []
        part = None
        send, segment = plan.sends[step], query_plan.segments.get((context.rank - step) % context.world_size)
        if send is not None:
            sends = [(send.peer, _select_rows(q, send.rows))]
        if segment is not None:
            part = context.buffers.take(f"prefill received queries {step}", (b, segment.count, h, d), q.dtype, q.device)
            recvs = [(segment.rank, part)]
        arriving.append((part, _post(context, sends, recvs, f"prefill, queries for ring step {step}")))
    return InFlightQueries(q, query_plan, arriving)


def _attend_and_merge(
    posted: InFlightQueries, dv: int, score: Score, context: RingContext, attend: Callable[[Tensor, SoftmaxState], None]
) -> Tensor:
    """Return the finished attention `b s h dv` of this rank's query rows over the keys of all ranks.

    `attend` writes the partial of all rows that attend here, `b total h d`, over this rank's keys into a carry.
    """
    q, query_plan = posted.q, posted.query_plan
    b, s, h, _ = q.shape
    wide, take = accumulation_dtype(q.dtype), context.buffers.take
    rows = _gather_queries(posted, context)
    shape = (b, h, query_plan.total)
    carry = SoftmaxState(
        m=take("prefill m", shape, wide, q.device),
        l=take("prefill l", shape, wide, q.device),
        acc=take("prefill acc", (b, query_plan.total, h, dv), wide, q.device),
    )
    if query_plan.total:
        with span("attention of all queries to the keys of rank {}", context.rank):
            attend(rows, carry)
    stack = _return_partials(carry, s, context, query_plan)
    o = torch.empty(b, s, h, dv, dtype=q.dtype, device=q.device)
    if o.numel():
        finish_parts(stack, b * s * h, dv, score.sinks, o, take("prefill final lse", (b, h, s), wide, q.device))
    return o


def _gather_queries(in_flight: InFlightQueries, context: RingContext) -> Tensor:
    """Wait for the query rows of all ranks that see a key of this one, and sort them by position: `b total h d`."""
    q, query_plan = in_flight.q, in_flight.query_plan
    b, _, h, d = q.shape
    found = context.buffers.take("prefill queries", (b, query_plan.total, h, d), q.dtype, q.device)
    if (own := query_plan.segments.get(context.rank)) is not None:
        found.index_copy_(1, own.indices, _select_rows(q, own.rows))
    for step, (part, pending) in enumerate(in_flight.arriving, 1):
        for one in pending:
            one.wait()
        if part is not None:
            found.index_copy_(1, query_plan.segments[(context.rank - step) % context.world_size].indices, part)
    return found


def _return_partials(carry: SoftmaxState, s: int, context: RingContext, query_plan: QueryPlan) -> Tensor:
    """Exchange partials: return those of this rank's rows from all ranks, a stack of packed parts in the order of ranks."""
    # a maximum on the GPU passes over NaN: a row of NaN alone would have the m of a row that saw nothing
    carry = dataclasses.replace(carry, m=carry.m.where(carry.l == carry.l, carry.l))
    b, _, h, dv = carry.acc.shape
    wide, device, me = carry.acc.dtype, carry.acc.device, context.rank
    plan, returning = query_plan.plan.ranks[me], []
    stack = context.buffers.take("prefill partials", (context.world_size, size(b * s * h, dv)), wide, device)
    for step in range(1, context.world_size):
        sends: list[Message] = []
        recvs: list[Message] = []
        segment, send = query_plan.segments.get((me - step) % context.world_size), plan.sends[step]
        peer, part = (me + step) % context.world_size, None
        if segment is not None:
            made = context.buffers.take(
                f"prefill partials out {step}", (size(b * segment.count * h, dv),), wide, device
            )
            _pack_partial(carry, segment, made)
            sends = [GradMessage(segment.rank, made)]
        if send is not None and send.num_rows == s:
            recvs = [GradMessage(peer, stack[peer])]
        elif send is not None:
            part = context.buffers.take(f"prefill partials in {step}", (size(b * send.num_rows * h, dv),), wide, device)
            recvs = [GradMessage(peer, part)]
        returning.append((peer, send, part, _post(context, sends, recvs, f"prefill, partials of ring step {step}")))
    if me in query_plan.segments and s:
        _pack_partial(carry, query_plan.segments[me], stack[me])
    else:
        clear(stack[me], b * s * h, dv)
    for peer, send, part, pending in returning:
        if send is None or part is not None:
            clear(stack[peer], b * s * h, dv)
        for one in pending:
            one.wait()
        if send is not None and part is not None:
            _scatter_partial(part, stack[peer], send.rows, (b, s, h, dv))
    return stack


def _scatter_partial(part: Tensor, whole: Tensor, rows: Rows, shape: tuple[int, int, int, int]) -> None:
    b, s, h, dv = shape
    lengths = [length for _, length in rows]
    count = sum(lengths)
    targets, sources = views(whole, b * s * h, dv), views(part, b * count * h, dv)
    for target, source, tail in zip(targets, sources, ((), (), (dv,)), strict=True):
        pieces = source.view(b, count, h, *tail).split(lengths, 1)
        for x, y in zip(slices(target.view(b, s, h, *tail), 1, rows), pieces, strict=True):
            x.copy_(y)


def _pack_partial(carry: SoftmaxState, segment: QuerySegment, part: Tensor) -> None:
    b, _, h, dv = carry.acc.shape
    m, l, acc = views(part, b * segment.count * h, dv)  # noqa: E741
    torch.index_select(carry.acc, 1, segment.indices, out=acc.view(b, segment.count, h, dv))
    for packed, x in ((m, carry.m), (l, carry.l)):
        packed.view(b, segment.count, h).copy_(x.index_select(2, segment.indices).transpose(1, 2))


def _select_rows(q: Tensor, rows: Rows) -> Tensor:
    found = slices(q, 1, rows)
    if len(found) > 1:
        return torch.cat(found, 1)
    return found[0].contiguous()


def _post(context: RingContext, sends: Sequence[Message], recvs: Sequence[Message], what: str) -> list[Work]:
    """Post to each level of the ring: all ranks make the same posts."""
    if context.nodes is None:
        return [context.transport.post(sends, recvs, what)]
    node = next(set(node) for node in context.nodes if context.rank in node)
    works = []
    for transport, within in ((context.transport, True), (context.slow_transport, False)):
        send, recv = ([one for one in messages if (one[0] in node) == within] for messages in (sends, recvs))
        works.append(transport.post(send, recv, what))
    return works


def _indices(parts: list[tuple[int, int, int]], device: torch.device) -> Tensor:
    """Return the integers of (offset, start, length) spans in the order of offsets: `n` int64."""
    return torch.cat([torch.arange(start, start + length, device="cpu") for _, start, length in sorted(parts)]).to(
        device
    )


def _rows(x: Tensor) -> Tensor:
    """Return x with a contiguous last dimension, as kernels need it."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
