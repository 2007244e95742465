"""Attention of a prompt's new rows over all that their requests have: keys go round the ring, or queries do.

Owns the choice of what moves, and the forward in which queries move. Refuses to know pages and requests (forward_batch.py), how
keys move (`ringattn.schedule.fused`) and how a visit is computed.

Note [What moves]
    A rank has s new rows and t kept keys per batch element, all ranks together N rows and T keys. It receives, in bytes,
        keys move:     T (P-1)/P * hk (d + dv) e                         the keys of all others
        queries move:  N (P-1)/P * h (d e + (dv + 2) a)                  their queries, and partials of its own rows, a = 4
    and whichever is less on the busiest rank moves. Counted in rows of a plan, so that a window moves its halo only and what
    sees nothing stays. For bf16 and d = dv = 128 the sides are 512 hk T and 776 h N: queries move below N / T = 0.66 hk / h, a
    third of what their own bytes alone would say (2 hk / h), because partials go home in fp32. The first chunk of a
    prompt has N = T and moves keys always. Keys that move are hidden behind attention as in training, where there is enough of it;
    what is hidden of queries says Note [What queries wait for]. A rank whose rows are few, or that has none, computes its share all
    the same.

Note [Queries move]
    Every rank sends its new rows to those who keep keys that they see (one post per peer), visits them all with its own keys in one
    launch, and sends every owner the partial of its rows. Rows of several owners stand in the order of their positions, because
    kernels want bounds that ascend. The owner merges partials in the order of ranks and normalises once, the sink first. What a
    rank needs for it, beside its own rows and keys: N rows of q, N fp32 rows of (m, l, acc), as much again in messages, and
    P fp32 partials of its own rows.

Note [What queries wait for]
    A rank visits with N rows, N T/P h pairs of 4 d FLOPs, and receives 776 N (P-1)/P h bytes (bf16, d = 128): a third of them
    queries, two thirds partials. Both grow with N, so at R FLOP/s and B bytes/s the bytes take 1.5 (P-1) R / (B T) of the
    visit's time, however many rows there are. On 4 GPUs at 600 TFLOP/s and 350 GB/s: 24% of it for T = 32K, 6% for 128K, 0.7%
    for 1M.
    Queries leave before pages are copied (Note [Rows of pages]): 17 ns for each of N rows (32 heads) beside 2.4 ns for each of
    T / P keys (8 heads), so below N = T / 28 they are there by then. Partials leave owner by owner, each packed beside the one
    before it on its way, and are put in place likewise.
    More could be hidden only by visiting in several launches, by owner or by halves of the heads. That does not pay on one node:
    in tiles of 128 rows each of them fills 132 multiprocessors twice from N = 4K or 2K on (32 heads, P = 4), and ends with half
    a wave of idle ones, a quarter of its time there. But from N = (P-1) hk/h R/B on, 1.3K there, keys that move are hidden as a
    whole, so rows that are enough for several launches need none. Between nodes B is a seventh of that, and this count another.

Note [Rows of pages]
    Kernels of prefill want the keys of a rank in one piece, so its pages are copied for every layer. That reads and writes
    2 t hk (d + dv) e bytes, of which attention reads half again: for bf16, d = dv = 128, 8 key heads and 256K tokens on a rank
    2.1 GB, 0.6 ms at 3.35 TB/s. Attention over them makes 4 N t h d FLOPs: with 32 query heads at 600 TFLOP/s 7.3 us for each
    of the N new rows of all ranks. So the copy takes 8% of it beside 1K new rows and 0.25% beside 32K; beside few rows it is most
    of the time, and pages are read in place instead, where no keys move (Note [In place or copied] of paged_prefill.py). The first
    chunk of a prompt has no cached rows: its rows are used as they are.

Note [Room ahead]
    Every chunk of a long prompt sees more keys than the one before, and buffers of the ring that other ranks write to are made by
    all ranks together, which stops the device. So the first chunk makes them for as many tokens as its requests have
    reserved, as far as the ring's budget allows: a factor on the sizes of this chunk, and a little more for uneven shards.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from ringattn.dispatch import run_forward
from ringattn.inference.forward_batch import ForwardBatch
from ringattn.inference.paged_prefill import PagedRows, plan_paged_rows
from ringattn.kernels.interface import RowMetadata, Score, SoftmaxState, accumulation_dtype
from ringattn.kernels.partials.packed import clear, finish_parts, size, views
from ringattn.kernels.runtime.table_cache import Key, find
from ringattn.plan.attention_spec import AttentionSpec, ScoreTensors
from ringattn.plan.device_tables import side_key
from ringattn.plan.ring_plan import Plan, Rows, pack
from ringattn.schedule.execution_plan import ExecutionPlan
from ringattn.schedule.kv_rotation import message_bytes, slices
from ringattn.transport.base import GradMessage, Message, RingContext, Work, span

COMM_MODES = ("auto", "keys", "queries")
SLACK = 1.05
"""How uneven shards of a longer request may be."""


@dataclass(frozen=True, eq=False)
class Prefill:
    """Resolved kind of call of a prefill; found at its first call.

    Attributes:
        plan: The resolved spec.
        comm_mode: "keys" or "queries".
        kv_access: "copies" or "pages".
        fresh: Nothing was kept before: the new rows are all there are.
        query_plan: How queries move, where they do.
        paged_rows: Which rows attend over this rank's pages where they lie, if they do and there are any.
        growth_factor: How many times as long the requests may become (Note [Room ahead]).
    """

    plan: ExecutionPlan
    comm_mode: str
    kv_access: str
    fresh: bool
    query_plan: QueryPlan | None
    paged_rows: PagedRows | None
    growth_factor: float
    _has_reserved: list[bool] = field(default_factory=list, init=False, repr=False)

    @property
    def contains(self) -> bool:
        """Whether the new rows are attended to as they are given, not as pages keep them, beside those of other requests.

        Then what is not finite must be contained (Note [Values that are not finite] of kernels/kv/pages.py).
        """
        documents = self.plan.spec.sharding.documents
        return self.fresh and self.kv_access == "copies" and documents is not None and len(documents) > 2

    def attend(
        self,
        step: ForwardBatch,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        alibi_slopes: Tensor | None,
    ) -> Tensor:
        """O `b s h dv` of this rank's new rows, whose keys the cache has."""
        cache, plan, context = step.cache, self.plan, step.cache.ring.context
        q = _rows(q)
        score = plan.spec.score(q.dtype, 0, ScoreTensors(sinks, alibi_slopes))
        # Note [What queries wait for]
        in_flight = (
            None
            if self.query_plan is None
            else _post_queries(q.contiguous(), cache.v_head_dim, context, self.query_plan)
        )
        if self.kv_access == "pages":
            if in_flight is None:
                return (
                    q.new_empty(*q.shape[:3], cache.v_head_dim)
                    if self.paged_rows is None
                    else self.paged_rows.attend(cache, layer, q, score)
                )

            def over_pages(rows: Tensor, carry: SoftmaxState) -> None:
                assert self.paged_rows is not None, "rows that visit have rectangles"
                self.paged_rows.visit(cache, layer, rows, score, carry)

            return _attend_and_merge(in_flight, cache.v_head_dim, score, context, over_pages)
        keys, values = k, v
        if not self.fresh:
            assert step.kept_slots is not None, "a step of prefill knows where keys are kept"
            keys, values = cache.take(layer, step.kept_slots)
        keys, values = _rows(keys), _rows(values)
        if in_flight is None:
            if not self._has_reserved:
                _reserve_ahead(keys, values, plan, context, self.growth_factor, cache.reserved_bytes)
                self._has_reserved.append(True)
            return run_forward(q, keys, values, score, plan, context)[0]
        query_plan = in_flight.query_plan

        def over_copies(rows: Tensor, carry: SoftmaxState) -> None:
            _attend_copies(rows, keys, values, score, plan, context, query_plan, carry)

        return _attend_and_merge(in_flight, cache.v_head_dim, score, context, over_copies)


def find_paged_rows(
    step: ForwardBatch,
    spec: AttentionSpec,
    query_plan: QueryPlan | None,
    heads: int,
) -> PagedRows | None:
    """The rows that attend over this rank's pages: those that visit, or on one rank all new ones.

    Args:
        step: The step.
        spec: Shardings and mask.
        query_plan: How queries move, where they do.
        heads: Query heads.
    """
    mask = spec.mask
    new = [(length - count, count, i) for i, (length, count) in enumerate(zip(step.lengths, step.counts, strict=True))]
    if query_plan is not None:
        by_rank = query_plan.side_runs
        if mask.documents is None:
            # requests that are alike: each has a batch element
            new = [(start, length, i) for i in range(len(step.requests)) for start, length in by_rank]
        else:
            new = []
            for start, length in by_rank:
                while length:
                    i = bisect_right(mask.documents, start) - 1
                    some = min(length, mask.documents[i + 1] - start)
                    new.append((start - mask.documents[i], some, i))
                    start, length = start + some, length - some
    return plan_paged_rows(step, new, heads, mask.causal, mask.window, mask.chunk_len, step.cache.device)


def resolve_comm_mode(wanted: str, step: ForwardBatch, spec: AttentionSpec, q: Tensor, fresh: bool) -> str:
    """Return what is sent: as wanted, or by Note [What moves] from numbers that are equal on all ranks.

    Args:
        wanted: One of MOVES.
        step: The step.
        spec: Shardings and mask.
        q: `b s h d`.
        fresh: Nothing was kept before.
    """
    if wanted != "auto":
        return wanted
    cache = step.cache
    if cache.ring.world_size == 1 or fresh:
        return "keys"
    nodes = cache.ring.context.nodes
    _, _, h, d = q.shape
    element, wide = q.element_size(), accumulation_dtype(q.dtype).itemsize
    keys = max(part.received_rows for part in spec.plan("keys", nodes).ranks)
    per_key = cache.kv_heads * (d + cache.v_head_dim) * element
    queries = max(
        part.received_rows * d * element
        + sum(send.num_rows for send in part.sends if send) * (cache.v_head_dim + 2) * wide
        for part in spec.plan("queries").ranks
    )
    return "keys" if keys * per_key <= queries * h else "queries"


def _reserve_ahead(
    k: Tensor,
    v: Tensor,
    plan: ExecutionPlan,
    context: RingContext,
    growth_factor: float,
    reserved: dict[str, tuple[int, ...]],
) -> None:
    """Reserve buffers for this forward and, where they must grow, for forwards that move up to `growth_factor` as many keys.

    Fused calls reserve as far as the memory budget allows. Every rank calls it alike.

    Args:
        k: `b t hk d`.
        v: `b t hk dv`.
        plan: The resolved call.
        context: This rank's place in the ring.
        growth_factor: At least 1.
        reserved: Bytes that earlier calls have reserved; updated.
    """
    if context.world_size == 1:
        return
    fused, kv_gather = plan.fused_forward, context.transport.kv_gather()
    if fused is None or kv_gather is None:
        moving = [(k, 1), (v, 1)]
        rows = (plan.ring_plan.largest_send, plan.ring_plan.largest_remote_send)
        sizes = _reserved_bytes(reserved, "stepwise", tuple(message_bytes(moving, n) for n in rows), growth_factor)
        for transport, size in zip((context.transport, context.slow_transport), sizes, strict=True):
            if size:
                transport.reserve(size)
        return
    b, _, hk, d = k.shape
    row, gather_plan = b * hk * (d + v.shape[-1]) * k.element_size(), fused.gather_plan
    most = max(1.0, min(growth_factor, context.budget / max(1, fused.num_bytes)))
    sizes = _reserved_bytes(reserved, "fused", (gather_plan.slot_rows * row, gather_plan.most_remote_rows * row), most)
    kv_gather.reserve_gather(*sizes, remote_shards=context.nodes is not None)


def _reserved_bytes(
    reserved: dict[str, tuple[int, ...]], kind: str, sizes: tuple[int, ...], growth_factor: float
) -> tuple[int, ...]:
    """Return the bytes of a kind of buffers: those that are there, or more where they do not suffice."""
    there = reserved.get(kind, (0,) * len(sizes))
    if any(size > have for size, have in zip(sizes, there, strict=True)):
        there = tuple(max(math.ceil(growth_factor * size), have) for size, have in zip(sizes, there, strict=True))
        reserved[kind] = there
    return there


def growth_limit(step: ForwardBatch) -> float:
    """Return the ratio of the tokens that the requests of a step may have to those they have now, times SLACK."""
    allocator = step.cache.allocator
    reserved_tokens, there = sum(map(allocator.reserved, step.requests)), sum(step.lengths)
    return max(1.0, reserved_tokens / there) * SLACK


@dataclass(frozen=True, eq=False)
class QuerySegment:
    """An owner's rows that visit this rank's keys, or this rank's rows that visit an owner's.

    Attributes:
        rank: The owner.
        rows: Which of the owner's rows.
        count: How many.
        indices: `count` int64 on the device: where they stand among all that visit here.
    """

    rank: int
    rows: Rows
    count: int
    indices: Tensor


@dataclass(frozen=True, eq=False)
class QueryPlan:
    """Routing of the queries of a step (Note [Queries move]), seen from this rank.

    Attributes:
        plan: Every rank's part.
        side: All rows that visit here, in the order of their positions.
        segments: Whose they are: this rank's own first, where they see its keys, then in ring order.
        total: Rows of side.
        side_runs: (start, length) of their positions, one stretch after another.
        keys: The key of the table of this rank's keys.
    """

    plan: Plan
    side: RowMetadata
    segments: tuple[QuerySegment, ...]
    total: int
    side_runs: tuple[tuple[int, int], ...]
    keys: Key[RowMetadata]


def plan_queries(spec: AttentionSpec, device: torch.device) -> QueryPlan:
    """The integers and tables of a forward in which queries move."""
    plan = spec.plan("queries")
    visits = [visit for visit in plan.ranks[spec.rank].ring_steps if visit is not None and visit.pairs]
    # (start, offset in the visit, length, visit): of stretches that never overlap
    spans = sorted((run[2], run[0], run[1], i) for i, visit in enumerate(visits) for run in visit.runs)
    ends = list(accumulate((length for _, _, length, _ in spans), initial=0))
    runs = tuple((at, length, start, 1) for at, (start, _, length, _) in zip(ends, spans, strict=False))
    parts: list[list[tuple[int, int, int]]] = [[] for _ in visits]
    for at, (_, offset, length, i) in zip(ends, spans, strict=False):
        parts[i].append((offset, at, length))
    segments = tuple(
        QuerySegment(visit.owner, visit.rows, visit.num_rows, _ranges([part[1:] for part in sorted(mine)], device))
        for visit, mine in zip(visits, parts, strict=True)
    )
    side = find(side_key(runs, spec.mask, device, "keys"))
    keys = side_key(pack(spec.kv_sharding.shards[spec.rank]), spec.mask, device, None)
    return QueryPlan(plan, side, segments, ends[-1], tuple((start, length) for _, length, start, _ in runs), keys)


@dataclass(frozen=True, eq=False)
class InFlightQueries:
    """Query rows of other ranks on their way to this one's keys, and this rank's on their way to theirs.

    Attributes:
        q: `b s h d`: this rank's rows, contiguous.
        query_plan: From `plan_queries`.
        arriving: Per ring step from 1 on: the owner's rows that come, `b count h d`, or None, and what is to be waited for.
    """

    q: Tensor
    query_plan: QueryPlan
    arriving: list[tuple[Tensor | None, list[Work]]]


def _post_queries(q: Tensor, dv: int, context: RingContext, query_plan: QueryPlan) -> InFlightQueries:
    """Sends this rank's rows to those who keep keys that they see, and lets theirs come; returns at once.

    Args:
        q: `b s h d`, this rank's rows, contiguous.
        dv: Width of values.
        context: This rank's place at the ring.
        query_plan: From `plan_queries`.
    """
    b, _, h, d = q.shape
    largest = query_plan.plan.largest_send * b * h
    _reserve(context, largest * d * q.element_size(), size(largest, dv) * accumulation_dtype(q.dtype).itemsize)
    by_rank = {segment.rank: segment for segment in query_plan.segments}
    plan, arriving = query_plan.plan.ranks[context.rank], []
    for step in range(1, context.world_size):
        sends: list[Message] = []
        recvs: list[Message] = []
        part = None
        send, segment = plan.sends[step], by_rank.get((context.rank - step) % context.world_size)
        if send is not None:
            sends = [(send.peer, _select_rows(q, send.rows))]
        if segment is not None:
            part = context.buffers.take(f"visitors {step}", (b, segment.count, h, d), q.dtype, q.device)
            recvs = [(segment.rank, part)]
        arriving.append((part, _post(context, sends, recvs, f"prefill, queries for ring step {step}")))
    return InFlightQueries(q, query_plan, arriving)


def _attend_and_merge(
    in_flight: InFlightQueries,
    dv: int,
    score: Score,
    context: RingContext,
    visit: Callable[[Tensor, SoftmaxState], None],
) -> Tensor:
    """The finished attention of this rank's query rows over the keys of all ranks.

    Args:
        in_flight: From `_post_queries`.
        dv: Head dim of the values.
        score: How scores are made.
        context: This rank's place at the ring.
        visit: Writes the partial of all rows that visit, `b total h d`, over this rank's keys into a carry.

    Returns:
        o `b s h dv` in q's dtype.
    """
    q, query_plan = in_flight.q, in_flight.query_plan
    b, s, h, _ = q.shape
    wide, take = accumulation_dtype(q.dtype), context.buffers.take
    rows = _gather_queries(in_flight, context)
    shape = (b, h, query_plan.total)
    carry = SoftmaxState(
        m=take("visitors m", shape, wide, q.device),
        l=take("visitors l", shape, wide, q.device),
        acc=take("visitors acc", (b, query_plan.total, h, dv), wide, q.device),
    )
    if query_plan.total:
        with span("all queries visit the keys of rank {}", context.rank):
            visit(rows, carry)
    stack = _return_partials(carry, s, context, query_plan)
    o = torch.empty(b, s, h, dv, dtype=q.dtype, device=q.device)
    if o.numel():
        finish_parts(stack, b * s * h, dv, score.sinks, o, take("visitors end", (b, h, s), wide, q.device))
    return o


def _attend_copies(
    rows: Tensor,
    k: Tensor,
    v: Tensor,
    score: Score,
    plan: ExecutionPlan,
    context: RingContext,
    query_plan: QueryPlan,
    carry: SoftmaxState,
) -> None:
    """The forward of training of rows `b total h d` over k `b t hk d` and v `b t hk dv`, as a carry."""
    b, total, h, d = rows.shape
    dv, take = v.shape[-1], context.buffers.take
    plan.kernels.forward(
        rows,
        k,
        v,
        query_plan.side,
        find(query_plan.keys),
        # one sink for all partials: where they meet
        dataclasses.replace(score, sinks=None),
        carry=carry,
        first=True,
        last=False,
        # not the last visit: nothing is written here
        o=rows if d == dv else take("visitors o", (b, total, h, dv), rows.dtype, rows.device),
        lse=take("visitors lse", (b, h, total), carry.m.dtype, rows.device),
    )


def _gather_queries(in_flight: InFlightQueries, context: RingContext) -> Tensor:
    """The query rows of all ranks that see a key of this one, `b total h d`, by position."""
    q, query_plan = in_flight.q, in_flight.query_plan
    b, _, h, d = q.shape
    found = context.buffers.take("visitors", (b, query_plan.total, h, d), q.dtype, q.device)
    by_rank = {segment.rank: segment for segment in query_plan.segments}
    if context.rank in by_rank:
        own = by_rank[context.rank]
        found.index_copy_(1, own.indices, _select_rows(q, own.rows))
    for step, (part, pending) in enumerate(in_flight.arriving, 1):
        for one in pending:
            one.wait()
        if part is not None:
            found.index_copy_(1, by_rank[(context.rank - step) % context.world_size].indices, part)
    return found


def _return_partials(carry: SoftmaxState, s: int, context: RingContext, query_plan: QueryPlan) -> Tensor:
    """The partials of this rank's rows from all ranks: a stack of packed parts in the order of ranks."""
    b, _, h, dv = carry.acc.shape
    wide, device, me = carry.acc.dtype, carry.acc.device, context.rank
    by_rank = {segment.rank: segment for segment in query_plan.segments}
    plan, returning = query_plan.plan.ranks[me], []
    stack = context.buffers.take("visitors home", (context.world_size, size(b * s * h, dv)), wide, device)
    for step in range(1, context.world_size):
        sends: list[Message] = []
        recvs: list[Message] = []
        segment, send = by_rank.get((me - step) % context.world_size), plan.sends[step]
        peer, part = (me + step) % context.world_size, None
        if segment is not None:
            made = context.buffers.take(f"visitors made {step}", (size(b * segment.count * h, dv),), wide, device)
            _pack_partial(carry, segment, made)
            sends = [GradMessage(segment.rank, made)]
        if send is not None and send.num_rows == s:
            recvs = [GradMessage(peer, stack[peer])]
        elif send is not None:
            part = context.buffers.take(f"visitors back {step}", (size(b * send.num_rows * h, dv),), wide, device)
            recvs = [GradMessage(peer, part)]
        returning.append((peer, send, part, _post(context, sends, recvs, f"prefill, partials of ring step {step}")))
    if me in by_rank and s:
        _pack_partial(carry, by_rank[me], stack[me])
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
    """Writes the packed part of some rows of `b s h dv` into that of all of them."""
    b, s, h, dv = shape
    lengths = [length for _, length in rows]
    count = sum(lengths)
    for target, source, tail in zip(
        views(whole, b * s * h, dv), views(part, b * count * h, dv), ((), (), (dv,)), strict=True
    ):
        pieces = source.view(b, count, h, *tail).split(lengths, 1)
        for x, y in zip(slices(target.view(b, s, h, *tail), 1, rows), pieces, strict=True):
            x.copy_(y)


def _pack_partial(carry: SoftmaxState, segment: QuerySegment, part: Tensor) -> None:
    """The partial of some visitors as a packed part."""
    b, _, h, dv = carry.acc.shape
    m, l, acc = views(part, b * segment.count * h, dv)  # noqa: E741
    torch.index_select(carry.acc, 1, segment.indices, out=acc.view(b, segment.count, h, dv))
    # a maximum on the GPU passes over NaN: a row of NaN alone would have the m of a row that saw nothing
    for packed, x in ((m, carry.m.where(carry.l == carry.l, carry.l)), (l, carry.l)):
        packed.view(b, segment.count, h).copy_(x.index_select(2, segment.indices).transpose(1, 2))


def _select_rows(q: Tensor, rows: Rows) -> Tensor:
    found = slices(q, 1, rows)
    if len(found) > 1:
        return torch.cat(found, 1)
    return found[0].contiguous()


def _post(context: RingContext, sends: Sequence[Message], recvs: Sequence[Message], what: str) -> list[Work]:
    """One post per level of the ring: all ranks make the same ones."""
    if context.nodes is None:
        return [context.transport.post(sends, recvs, what)]
    near = next(set(node) for node in context.nodes if context.rank in node)
    posts = []
    for transport, within in ((context.transport, True), (context.slow_transport, False)):
        posts.append(
            transport.post(
                [one for one in sends if (one[0] in near) == within],
                [one for one in recvs if (one[0] in near) == within],
                what,
            )
        )
    return posts


def _reserve(context: RingContext, num_bytes: int, replies: int) -> None:
    # in powers of two: prompts differ in length from step to step
    for transport in {id(one): one for one in (context.transport, context.slow_transport)}.values():
        transport.reserve(_rounded(num_bytes), _rounded(replies))


def _rounded(num_bytes: int) -> int:
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def _ranges(spans: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """The integers of (start, length) stretches, one after another: `n` int64."""
    found = [torch.arange(start, start + length, device="cpu") for start, length in spans]
    return (torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device="cpu")).to(device)


def _rows(x: Tensor) -> Tensor:
    """X with a contiguous last dimension, which is all that kernels ask of strides."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
