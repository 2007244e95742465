"""Attention of a prompt's new rows over all that their requests have: keys go round the ring, or queries do.

Owns the choice of what moves, and the forward in which queries move. Refuses to know pages and requests (step.py, cache.py),
how keys move (`ringattn.schedule.fused`) and how a visit is computed.

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
    of the time, and pages are read in place instead, where no keys move (Note [In place or copied] of in_place.py). A prompt that
    begins has kept nothing yet: its rows are used as they are.

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
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ringattn.dispatch import run_forward
from ringattn.inference.in_place import InPlace, plan_in_place
from ringattn.kernels.contract import Carry, Score, Side, accumulation_dtype
from ringattn.kernels.parts import clear, finish_parts, size, views
from ringattn.plan.attention_spec import AttentionSpec, ScoreTensors
from ringattn.plan.device_tables import find, moving_key
from ringattn.plan.ring_plan import Plan, Rows, Visit
from ringattn.schedule.execution_plan import ExecutionPlan
from ringattn.schedule.kv_rotation import message_bytes, slices
from ringattn.transport.base import GradMessage, Message, RingContext, Work, span

if TYPE_CHECKING:
    from ringattn.inference.step import Step

MOVES = ("auto", "keys", "queries")
SLACK = 1.05
"""How uneven shards of a longer request may be."""


@dataclass(frozen=True, eq=False)
class Prefill:
    """What is decided about a kind of call when a step of prefill meets it first.

    Attributes:
        plan: The resolved spec.
        moves: "keys" or "queries".
        reads: "copies" or "pages".
        fresh: Nothing was kept before: the new rows are all there are.
        travel: How queries move, where they do.
        in_place: Which rows attend over this rank's pages where they lie, if they do and there are any.
        times: How many times as long the requests may become (Note [Room ahead]).
    """

    plan: ExecutionPlan
    moves: str
    reads: str
    fresh: bool
    travel: Travel | None
    in_place: InPlace | None
    times: float
    _begun: list[bool] = field(default_factory=list, init=False, repr=False)

    @property
    def contains(self) -> bool:
        """Whether the new rows are attended to as they are given, not as pages keep them, beside those of other requests.

        Then what is not finite must be contained (Note [Values that are not finite] of kernels/pages.py).
        """
        documents = self.call.sharding.documents
        return self.fresh and self.reads == "copies" and documents is not None and len(documents) > 2

    def attend(
        self,
        step: Step,
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
        guests = None if self.travel is None else _invite(q.contiguous(), cache.v_head_dim, context, self.travel)
        if self.reads == "pages":
            if guests is None:
                return (
                    q.new_empty(*q.shape[:3], cache.v_head_dim)
                    if self.in_place is None
                    else self.in_place.attend(cache, layer, q, score)
                )

            def over_pages(rows: Tensor, carry: Carry) -> None:
                assert self.in_place is not None, "rows that visit have rectangles"
                self.in_place.visit(cache, layer, rows, score, carry)

            return _receive(guests, cache.v_head_dim, score, context, over_pages)
        keys, values = k, v
        if not self.fresh:
            assert step.kept_slots is not None, "a step of prefill knows where keys are kept"
            keys, values = cache.take(layer, step.kept_slots)
        keys, values = _rows(keys), _rows(values)
        if guests is None:
            if not self._begun:
                _reserve_ahead(keys, values, plan, context, self.times, cache.room)
                self._begun.append(True)
            return run_forward(q, keys, values, score, plan, context)[0]
        travel = guests.travel

        def over_copies(rows: Tensor, carry: Carry) -> None:
            _visit_copies(rows, keys, values, score, plan, context, travel, carry)

        return _receive(guests, cache.v_head_dim, score, context, over_copies)


def rows_in_place(
    step: Step,
    spec: AttentionSpec,
    travel: Travel | None,
    heads: int,
) -> InPlace | None:
    """The rows that attend over this rank's pages: those that visit, or on one rank all new ones.

    Args:
        step: The step.
        spec: Shardings and mask.
        travel: How queries move, where they do.
        heads: Query heads.
    """
    mask = spec.visibility
    new = [(length - count, count, i) for i, (length, count) in enumerate(zip(step.lengths, step.counts, strict=True))]
    if travel is not None:
        visiting = travel.side_runs
        if mask.documents is None:
            # requests that are alike: each has a batch element
            new = [(start, length, i) for i in range(len(step.requests)) for start, length in visiting]
        else:
            new = []
            for start, length in visiting:
                while length:
                    i = bisect_right(mask.documents, start) - 1
                    some = min(length, mask.documents[i + 1] - start)
                    new.append((start - mask.documents[i], some, i))
                    start, length = start + some, length - some
    return plan_in_place(step, new, heads, mask.causal, mask.window, mask.chunk_len, step.cache.device)


def resolve_moves(wanted: str, step: Step, spec: AttentionSpec, q: Tensor, fresh: bool) -> str:
    """What moves: as wanted, or by Note [What moves] from numbers that are equal on all ranks.

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
    times: float,
    reserved: dict[str, tuple[int, ...]],
) -> None:
    """Reserve buffers for this forward and, where they must grow, for forwards that move up to `times` as many keys.

    Fused calls reserve as far as the memory budget allows. Every rank calls it alike.

    Args:
        k: `b t hk d`.
        v: `b t hk dv`.
        plan: The resolved call.
        context: This rank's place in the ring.
        times: At least 1.
        reserved: Bytes that earlier calls have reserved; updated.
    """
    if context.world_size == 1:
        return
    fused, kv_gather = plan.fused_forward, context.transport.kv_gather()
    if fused is None or kv_gather is None:
        moving = [(k, 1), (v, 1)]
        rows = (plan.ring_plan.largest_send, plan.ring_plan.largest_crossing)
        sizes = _grow(reserved, "stepwise", tuple(message_bytes(moving, n) for n in rows), times)
        for transport, size in zip((context.transport, context.slow_transport), sizes, strict=True):
            if size:
                transport.reserve(size)
        return
    b, _, hk, d = k.shape
    row, collection = b * hk * (d + v.shape[-1]) * k.element_size(), fused.collection
    most = max(1.0, min(times, context.budget / max(1, fused.num_bytes)))
    sizes = _grow(reserved, "fused", (collection.slot_rows * row, collection.most_far_rows * row), most)
    kv_gather.reserve_gather(*sizes, remote_shards=context.nodes is not None)


def _grow(reserved: dict[str, tuple[int, ...]], kind: str, sizes: tuple[int, ...], times: float) -> tuple[int, ...]:
    """Return the bytes of a kind of buffers: those that are there, or more where they do not suffice."""
    there = reserved.get(kind, (0,) * len(sizes))
    if any(size > have for size, have in zip(sizes, there, strict=True)):
        there = tuple(max(math.ceil(times * size), have) for size, have in zip(sizes, there, strict=True))
        reserved[kind] = there
    return there


def growth(step: Step) -> float:
    """How many times as many tokens the requests of a step may have as they have now, and SLACK."""
    books = step.cache.pages
    promised, there = sum(map(books.reserved, step.requests)), sum(step.lengths)
    return max(1.0, promised / there) * SLACK


@dataclass(frozen=True, eq=False)
class Stop:
    """An owner's rows that visit this rank's keys, or this rank's rows that visit an owner's.

    Attributes:
        rank: The owner.
        rows: Which of the owner's rows.
        count: How many.
        places: `count` int64 on the device: where they stand among all that visit here.
    """

    rank: int
    rows: Rows
    count: int
    places: Tensor


@dataclass(frozen=True, eq=False)
class Travel:
    """How the queries of a step move (Note [Queries move]), seen from this rank.

    Attributes:
        plan: Every rank's part.
        side: All rows that visit here, in the order of their positions.
        stops: Whose they are: this rank's own first, where they see its keys, then in ring order.
        total: Rows of side.
        side_runs: (start, length) of their positions, one stretch after another.
    """

    plan: Plan
    side: Side
    stops: tuple[Stop, ...]
    total: int
    side_runs: tuple[tuple[int, int], ...]


def plan_travel(spec: AttentionSpec, device: torch.device) -> Travel:
    """The integers and tables of a forward in which queries move."""
    plan = spec.plan("queries")
    visits = [visit for visit in plan.ranks[spec.rank].visits if visit is not None and visit.pairs]
    # (start, offset in the visit, length, visit): of stretches that never overlap
    stretches = sorted((run[2], run[0], run[1], i) for i, visit in enumerate(visits) for run in visit.runs)
    ends = list(accumulate((length for _, _, length, _ in stretches), initial=0))
    runs = tuple((at, length, start, 1) for at, (start, _, length, _) in zip(ends, stretches, strict=False))
    parts: list[list[tuple[int, int, int]]] = [[] for _ in visits]
    for at, (_, offset, length, i) in zip(ends, stretches, strict=False):
        parts[i].append((offset, at, length))
    stops = tuple(
        Stop(visit.owner, visit.rows, visit.num_rows, _ranges([part[1:] for part in sorted(mine)], device))
        for visit, mine in zip(visits, parts, strict=True)
    )
    side = find(moving_key(Visit(0, spec.rank, (), runs, 0), spec.visibility, device, "keys"))
    return Travel(plan, side, stops, ends[-1], tuple((start, length) for _, length, start, _ in runs))


@dataclass(frozen=True, eq=False)
class _Guests:
    """Query rows of other ranks on their way to this one's keys, and this rank's on their way to theirs.

    Attributes:
        q: `b s h d`: this rank's rows, contiguous.
        travel: From `plan_travel`.
        coming: Per ring step from 1 on: the owner's rows that come, `b count h d`, or None, and what is to be waited for.
    """

    q: Tensor
    travel: Travel
    coming: list[tuple[Tensor | None, list[Work]]]


def _invite(q: Tensor, dv: int, context: RingContext, travel: Travel) -> _Guests:
    """Sends this rank's rows to those who keep keys that they see, and lets theirs come; returns at once.

    Args:
        q: `b s h d`, this rank's rows, contiguous.
        dv: Width of values.
        context: This rank's place at the ring.
        travel: From `plan_travel`.
    """
    b, _, h, d = q.shape
    largest = travel.plan.largest_send * b * h
    _reserve(context, largest * d * q.element_size(), size(largest, dv) * accumulation_dtype(q.dtype).itemsize)
    visiting = {stop.rank: stop for stop in travel.stops}
    plan, coming = travel.plan.ranks[context.rank], []
    for step in range(1, context.world_size):
        gives: list[Message] = []
        fetches: list[Message] = []
        part = None
        send, stop = plan.sends[step], visiting.get((context.rank - step) % context.world_size)
        if send is not None:
            gives = [(send.peer, _cut(q, send.rows))]
        if stop is not None:
            part = context.buffers.take(f"visitors {step}", (b, stop.count, h, d), q.dtype, q.device)
            fetches = [(stop.rank, part)]
        coming.append((part, _post(context, gives, fetches, f"prefill, queries for ring step {step}")))
    return _Guests(q, travel, coming)


def _receive(
    guests: _Guests, dv: int, score: Score, context: RingContext, visit: Callable[[Tensor, Carry], None]
) -> Tensor:
    """The finished attention of this rank's query rows over the keys of all ranks.

    Args:
        guests: From `_invite`.
        dv: Head dim of the values.
        score: How scores are made.
        context: This rank's place at the ring.
        visit: Writes the partial of all rows that visit, `b total h d`, over this rank's keys into a carry.

    Returns:
        o `b s h dv` in q's dtype.
    """
    q, travel = guests.q, guests.travel
    b, s, h, _ = q.shape
    wide, take = accumulation_dtype(q.dtype), context.buffers.take
    rows = _line_up(guests, context)
    shape = (b, h, travel.total)
    carry = Carry(
        m=take("visitors m", shape, wide, q.device),
        l=take("visitors l", shape, wide, q.device),
        acc=take("visitors acc", (b, travel.total, h, dv), wide, q.device),
    )
    if travel.total:
        with span("all queries visit the keys of rank {}", context.rank):
            visit(rows, carry)
    stack = _return(carry, s, context, travel)
    o = torch.empty(b, s, h, dv, dtype=q.dtype, device=q.device)
    if o.numel():
        finish_parts(stack, b * s * h, dv, score.sinks, o, take("visitors end", (b, h, s), wide, q.device))
    return o


def _visit_copies(
    rows: Tensor,
    k: Tensor,
    v: Tensor,
    score: Score,
    plan: ExecutionPlan,
    context: RingContext,
    travel: Travel,
    carry: Carry,
) -> None:
    """The forward of training of rows `b total h d` over k `b t hk d` and v `b t hk dv`, as a carry."""
    b, total, h, d = rows.shape
    dv, take = v.shape[-1], context.buffers.take
    plan.kernels.forward(
        rows,
        k,
        v,
        travel.side,
        plan.tables.stationary("queries"),
        # one sink for all partials: where they meet
        dataclasses.replace(score, sinks=None),
        carry=carry,
        first=True,
        last=False,
        # not the last visit: nothing is written here
        o=rows if d == dv else take("visitors o", (b, total, h, dv), rows.dtype, rows.device),
        lse=take("visitors lse", (b, h, total), carry.m.dtype, rows.device),
    )


def _line_up(guests: _Guests, context: RingContext) -> Tensor:
    """The query rows of all ranks that see a key of this one, `b total h d`, by position."""
    q, travel = guests.q, guests.travel
    b, _, h, d = q.shape
    found = context.buffers.take("visitors", (b, travel.total, h, d), q.dtype, q.device)
    visiting = {stop.rank: stop for stop in travel.stops}
    if context.rank in visiting:
        own = visiting[context.rank]
        found.index_copy_(1, own.places, _cut(q, own.rows))
    for step, (part, pending) in enumerate(guests.coming, 1):
        for one in pending:
            one.wait()
        if part is not None:
            found.index_copy_(1, visiting[(context.rank - step) % context.world_size].places, part)
    return found


def _return(carry: Carry, s: int, context: RingContext, travel: Travel) -> Tensor:
    """The partials of this rank's rows from all ranks: a stack of packed parts in the order of ranks."""
    b, _, h, dv = carry.acc.shape
    wide, device, me = carry.acc.dtype, carry.acc.device, context.rank
    visiting = {stop.rank: stop for stop in travel.stops}
    plan, landing = travel.plan.ranks[me], []
    stack = context.buffers.take("visitors home", (context.world_size, size(b * s * h, dv)), wide, device)
    for step in range(1, context.world_size):
        gives: list[Message] = []
        fetches: list[Message] = []
        stop, send = visiting.get((me - step) % context.world_size), plan.sends[step]
        peer, part = (me + step) % context.world_size, None
        if stop is not None:
            made = context.buffers.take(f"visitors made {step}", (size(b * stop.count * h, dv),), wide, device)
            _pack(carry, stop, made)
            gives = [GradMessage(stop.rank, made)]
        if send is not None and send.num_rows == s:
            fetches = [GradMessage(peer, stack[peer])]
        elif send is not None:
            part = context.buffers.take(f"visitors back {step}", (size(b * send.num_rows * h, dv),), wide, device)
            fetches = [GradMessage(peer, part)]
        landing.append((peer, send, part, _post(context, gives, fetches, f"prefill, partials of ring step {step}")))
    if me in visiting and s:
        _pack(carry, visiting[me], stack[me])
    else:
        clear(stack[me], b * s * h, dv)
    for peer, send, part, pending in landing:
        if send is None or part is not None:
            clear(stack[peer], b * s * h, dv)
        for one in pending:
            one.wait()
        if send is not None and part is not None:
            _spread(part, stack[peer], send.rows, (b, s, h, dv))
    return stack


def _spread(part: Tensor, whole: Tensor, rows: Rows, shape: tuple[int, int, int, int]) -> None:
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


def _pack(carry: Carry, stop: Stop, part: Tensor) -> None:
    """The partial of some visitors as a packed part."""
    b, _, h, dv = carry.acc.shape
    m, l, acc = views(part, b * stop.count * h, dv)  # noqa: E741
    torch.index_select(carry.acc, 1, stop.places, out=acc.view(b, stop.count, h, dv))
    for packed, x in ((m, carry.m), (l, carry.l)):
        packed.view(b, stop.count, h).copy_(x.index_select(2, stop.places).transpose(1, 2))


def _cut(q: Tensor, rows: Rows) -> Tensor:
    found = slices(q, 1, rows)
    if len(found) > 1:
        return torch.cat(found, 1)
    return found[0].contiguous()


def _post(context: RingContext, gives: Sequence[Message], fetches: Sequence[Message], what: str) -> list[Work]:
    """One post per level of the ring: all ranks make the same ones."""
    if context.nodes is None:
        return [context.transport.post(gives, fetches, what)]
    near = next(set(node) for node in context.nodes if context.rank in node)
    posts = []
    for transport, within in ((context.transport, True), (context.slow_transport, False)):
        posts.append(
            transport.post(
                [one for one in gives if (one[0] in near) == within],
                [one for one in fetches if (one[0] in near) == within],
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


def _ranges(stretches: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """The integers of (start, length) stretches, one after another: `n` int64."""
    found = [torch.arange(start, start + length, device="cpu") for start, length in stretches]
    return (torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device="cpu")).to(device)


def _rows(x: Tensor) -> Tensor:
    """X with a contiguous last dimension, which is all that kernels ask of strides."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
