"""All visits of a rank in one launch: keys of all owners come while one kernel computes.

Owns the choice between this schedule and the visits one by one (`stepwise_forward.py`, `stepwise_backward.py`), and the order of gather,
launch and release. Refuses to know how bytes move and how a kernel waits for them.

Note [Two schedules]
    gathered  one launch forward, one backward (plus the sum of what came home). A query row stays in registers from its
              first key to its last, and no partial touches memory. The keys of all owners need room on every rank. In a ring
              of two levels one launch per outer step (fused_hierarchical.py).
    staged    one launch per ring step, partials in fp32 between them, two receive buffers: room for two shards, whatever the
              number of ranks (a copy engine adds four outboxes). Serves every kernel set, every option and every transport.
    Both give the same partials merged in ring order; they round at different places. Which one is taken follows from
    numbers that are equal on all ranks, so all ranks take the same.

Note [Kept keys]
    A gathered forward may leave what came in a tensor of the call's own, for as long as the caller likes. The backward that
    is given it says and fetches nothing: contributions alone travel. Nobody's rows are read from memory of another rank
    then, so either all ranks keep a call's keys or none does. Kernels, plans and head groups are those of a backward that
    gathers, and so are the bits: only the flags are raised from the start. A call with a bias of keys keeps nothing.

Note [Bias of keys]
    A bias is one fp32 number per key, whatever the heads: it travels with the keys, and kernels read it from one table of
    near and far. Its gradient is a sum over queries and heads. A kernel leaves one number per key and key head, which goes
    home behind dk and dv; the owner adds heads and visitors up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ringattn.kernels.contract import Arrivals, GatheringKernelSet, KernelSet, Reels, Score, accumulation_dtype
from ringattn.plan.attention_spec import Call
from ringattn.plan.layouts import shard_len
from ringattn.plan.ring_plan import Collection
from ringattn.schedule.fused_hierarchical import outer_backward, outer_forward
from ringattn.schedule.packed_message import message_bytes
from ringattn.schedule.stepwise_backward import Gradients, ring_backward, sinks_gradient
from ringattn.schedule.stepwise_forward import ring_forward
from ringattn.spans import span
from ringattn.transport.base import Gatherer, Gathering, Seat

PUSH_SECONDS = 50e-6
"""How long one push takes at least, over all heads of a group: shorter ones cost more to begin than they hide."""
PUSH_RATE = 335e9
"""Bytes per second of a push where the ring has not measured it."""
GROUP_HEADS = 8
"""Key heads of the smallest head group."""
BRIEF = 1e-3
"""Seconds of a kernel below which the host's time may show (Note [Repeats] of transport/repeats.py)."""
KERNEL_RATE = 5e14
"""Operations per second of a kernel, about."""


def forward(
    q: Tensor, k: Tensor, v: Tensor, score: Score, call: Call, kernels: KernelSet, seat: Seat, *, keep: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`ring_forward` by the schedule that suits the call, of the same arguments.

    Args:
        q: As there, like the next six.
        k: Likewise.
        v: Likewise.
        score: Likewise.
        call: Likewise.
        kernels: Likewise.
        seat: Likewise.
        keep: Keep the keys of others for `backward`, where both directions are gathered (Note [Kept keys]); the same on
            all ranks.

    Returns:
        o and lse as there, and what was kept, `b far_rows hk (d + dv)`; None: nothing.
    """
    found = _gathering(k, v, score, call, kernels, seat, backward=False)
    if found is None:
        return *ring_forward(q, k, v, score, call, kernels, seat), None
    gatherer, gathering_kernels, facts = found
    if seat.nodes is not None:
        found = outer_forward(q, k, v, score, call, gathering_kernels, seat, gatherer, facts.groups)
        return *found, None
    b, s, h, _ = q.shape
    o = torch.empty(b, s, h, v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty(b, h, s, dtype=accumulation_dtype(q.dtype), device=q.device)
    keep = keep and score.key_bias is None and _gathering(k, v, score, call, kernels, seat, backward=True) is not None
    kept: Tensor | None = None

    def enqueue() -> tuple[Any, ...]:
        nonlocal kept
        rows, keys = call.stationary("keys", q.device), call.gathered(q.device)
        gathering = gatherer.gather(k, v, facts.collection, facts.groups, "forward", key_bias=score.key_bias, keep=keep)
        near, far, arrivals = (k, v), (gathering.k, gathering.v), gathering.arrivals
        there = _with_bias(score, gathering)
        _replay(
            gathering_kernels,
            gathering.reels,
            ("forward",),
            lambda: gathering_kernels.forward_gathered(
                q, near, far, rows, keys, there, arrivals, o=o, lse=lse, spare=gatherer.spare
            ),
            there,
            given=(q, k, v),
            made=(o, lse),
            kept=(*far, *_words(arrivals)),
            held=(rows, keys),
        )
        gathering.close()
        kept = gathering.kept
        return rows, keys

    with span("ring forward: all visits in one launch"):
        if keep or not _is_brief(q, v, call, backward=False):
            enqueue()
        else:
            _repeat(gatherer, gathering_kernels, ("forward",), call, score, (q, k, v), (o, lse), enqueue)
    return o, lse, kept


def backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    score: Score,
    call: Call,
    kernels: KernelSet,
    seat: Seat,
    *,
    kept: Tensor | None = None,
    **wanted: bool,
) -> Gradients:
    """`ring_backward` by the schedule that suits the call; the same arguments and results, and what `forward` kept."""
    found = _gathering(k, v, score, call, kernels, seat, backward=True)
    if found is None:
        return ring_backward(do, dlse, q, k, v, o, lse, score, call, kernels, seat, **wanted)
    gatherer, gathering_kernels, facts = found
    if seat.nodes is not None:
        return outer_backward(
            do,
            dlse,
            q,
            k,
            v,
            o,
            lse,
            score,
            call,
            gathering_kernels,
            seat,
            gatherer,
            facts.groups,
            want_sinks=wanted.get("want_sinks", False),
            want_alibi=wanted.get("want_alibi", False),
        )
    if dlse is not None:
        dlse = dlse.masked_fill(lse == float("-inf"), 0.0)
    b, _, hk, d = k.shape
    biased = bool(wanted.get("want_key_bias"))
    is_brief = kept is None and _is_brief(q, v, call, backward=True)
    delta = torch.empty_like(lse, memory_format=torch.contiguous_format)
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    # later, they may have memory that the kernels between have used
    dk, dv = _like(k, v) if is_brief else (k, v)
    dalibi = torch.empty_like(lse) if wanted.get("want_alibi") else None
    dkey_bias = torch.empty(k.shape[:2], dtype=torch.float32, device=k.device) if biased else None

    def enqueue() -> tuple[Any, ...]:
        nonlocal dk, dv
        rows, keys, returning = call.stationary("keys", q.device), call.gathered(q.device), call.returning(k.device)
        home = gatherer.homecoming((b, hk, d + v.shape[-1]), facts.collection, q.device, "backward", biased=biased)
        gathering, far, there = None, (k, v), score
        if kept is None:
            gathering = gatherer.gather(
                k, v, facts.collection, facts.groups, "backward", key_bias=score.key_bias, home=home
            )
            far, arrivals, there = (gathering.k, gathering.v), gathering.arrivals, _with_bias(score, gathering)
        else:
            far, arrivals = (kept[..., :d], kept[..., d:]), gatherer.arrived(facts.collection, facts.groups, q.device)
            home.begin()

        def visit() -> None:
            gathering_kernels.backward_gathered(
                do,
                q,
                (k, v),
                far,
                lse,
                delta,
                rows,
                keys,
                there,
                arrivals,
                home.addresses,
                home.rows,
                dq=dq,
                dalibi=dalibi,
                bias_homes=home.bias_addresses,
                deterministic=call.deterministic,
                spare=gatherer.spare,
                o=o,
                dlse=dlse,
            )

        _replay(
            gathering_kernels,
            home.reels,
            ("backward", call.deterministic, dlse is None, dalibi is None, gathering is None),
            visit,
            there,
            given=(do, q, k, v, o, lse, *_present(dlse), *(far if gathering is None else ())),
            made=(delta, dq, *_present(dalibi)),
            kept=(
                home.addresses,
                *_present(home.bias_addresses),
                *_words(arrivals),
                *(() if gathering is None else far),
            ),
            held=(rows, keys),
        )
        if not is_brief:
            dk, dv = _like(k, v)
        parts, bias_parts = home.receive()
        _replay(
            gathering_kernels,
            home.reels,
            ("homes",),
            lambda: gathering_kernels.add_homes(dk, dv, home.own, parts, returning),
            given=(dk, dv),
            kept=(home.own, *parts, returning),
        )
        if dkey_bias is not None and home.own_bias is not None:
            gathering_kernels.add_bias_homes(dkey_bias, home.own_bias, bias_parts, returning)
        home.close()
        return rows, keys, returning

    with span("ring backward: all visits in one launch"):
        if not is_brief:
            enqueue()
        else:
            key = "backward", dlse is None, dalibi is None
            given, made = (do, q, k, v, o, lse, *_present(dlse)), (delta, dq, dk, dv, *_present(dalibi))
            _repeat(gatherer, gathering_kernels, key, call, score, given, made, enqueue)
    return Gradients(
        dq=dq,
        dk=dk,
        dv=dv,
        dsinks=sinks_gradient(score, lse, delta) if wanted.get("want_sinks") else None,
        dalibi=None if dalibi is None else dalibi.sum((0, 2)),
        dkey_bias=dkey_bias,
        dbias=None,
    )


def _repeat(
    gatherer: Gatherer,
    kernels: GatheringKernelSet,
    key: tuple[Hashable, ...],
    call: Call,
    score: Score,
    given: tuple[Tensor, ...],
    made: tuple[Tensor, ...],
    enqueue: Callable[[], object],
) -> None:
    """Enqueues a brief call, in one piece where it has come before and nobody wants to hear of its launches."""
    leased: Any = getattr(kernels, "leased", None)
    is_heard: Any = getattr(kernels, "is_heard", None)
    # the bias goes through torch's own launches, and a seed is another one each time
    if leased is None or is_heard is None or score.key_bias is not None or score.dropout_p > 0 or is_heard():
        enqueue()
        return
    key = (*key, id(call), id(kernels), score.sinks is None, score.alibi_slopes is None)
    given += _present(score.sinks) + _present(score.alibi_slopes)
    gatherer.repeat(key, given, made, enqueue, leased, (call, kernels))


def _is_brief(q: Tensor, v: Tensor, call: Call, *, backward: bool) -> bool:
    """Whether the device may be done with a call before the host is."""
    key = ("brief", q.shape, v.shape[-1])
    seconds = call.memo.get(key)
    if seconds is None:
        b, _, h, d = q.shape
        seconds = call.memo[key] = 2 * call.pairs(b) * h * (d + v.shape[-1]) / KERNEL_RATE
    return seconds * (2.5 if backward else 1.0) < BRIEF


def _replay(
    kernels: GatheringKernelSet,
    reels: Reels,
    key: tuple[Hashable, ...],
    run: Callable[[], object],
    score: Score | None = None,
    *,
    given: tuple[Tensor, ...],
    **others: tuple[Any, ...],
) -> None:
    """Runs launchers, or plays back what they came down to (`GatheringKernelSet.replay`); `score` is one of their arguments."""
    replay = getattr(kernels, "replay", None)
    if replay is None:
        run()
        return
    key = (*key, kernels)
    if score is not None:
        sinks, slopes, bias = score.sinks, score.alibi_slopes, score.key_bias
        key += (score.softmax_scale, score.softcap, sinks is None, slopes is None, bias is None)
        given += _present(sinks) + _present(slopes) + _present(bias)
    replay(reels, key, run, given=given, **others)


def _like(*tensors: Tensor) -> list[Tensor]:
    """Contiguous tensors like these."""
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]


def _present(x: Tensor | None) -> tuple[Tensor, ...]:
    return () if x is None else (x,)


def _words(arrivals: Arrivals | None) -> tuple[Tensor, ...]:
    """What kernels look at of arrivals."""
    return () if arrivals is None else (arrivals.flags, arrivals.error)


def _with_bias(score: Score, gathering: Gathering) -> Score:
    """The score of a gathered visit."""
    return score if score.key_bias is None else dataclasses.replace(score, key_bias=gathering.key_bias)


def reserve(
    k: Tensor,
    v: Tensor,
    score: Score,
    call: Call,
    kernels: KernelSet,
    seat: Seat,
    times: float,
    room: dict[str, tuple[int, ...]],
) -> None:
    """Makes room for this forward, and where there is not enough, for forwards that move up to so many times its keys.

    By the schedule that suits it, and where keys are gathered as far as the budget allows. Every rank calls it alike.

    Args:
        k: As in `forward`, like the next five.
        v: Likewise.
        score: Likewise.
        call: Likewise.
        kernels: Likewise.
        seat: Likewise.
        times: At least 1.
        room: Bytes for which earlier calls have made room; updated.
    """
    if seat.world_size == 1:
        return
    found = _gathering(k, v, score, call, kernels, seat, backward=False)
    if found is None:
        plan, moving = call.plan("keys", seat.nodes), [(k, 1), (v, 1)]
        sizes = tuple(message_bytes(moving, rows) for rows in (plan.largest_send, plan.largest_crossing))
        for transport, size in zip(
            (seat.transport, seat.slow_transport), _ahead("staged", sizes, times, room), strict=True
        ):
            if size:
                transport.reserve(size)
        return
    gatherer, _, facts = found
    b, _, hk, d = k.shape
    row, of_bias = b * hk * (d + v.shape[-1]) * k.element_size(), b * _bias_size(score)
    collection = facts.collection
    sizes = (
        collection.slot_rows * (row + of_bias) + 16 * bool(of_bias),
        collection.most_far_rows * (row + of_bias) + collection.slot_rows * of_bias + 16 * bool(of_bias),
    )
    most = max(1.0, min(times, seat.budget / max(1, facts.needed[False])))
    gatherer.make_room(*_ahead("gathered", sizes, most, room), guests=seat.nodes is not None)


def _ahead(what: str, sizes: tuple[int, ...], times: float, room: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    made = room.get(what, (0,) * len(sizes))
    if any(size > there for size, there in zip(sizes, made, strict=True)):
        made = room[what] = tuple(max(math.ceil(times * size), there) for size, there in zip(sizes, made, strict=True))
    return made


def choose_groups(k: Tensor, v: Tensor, collection: Collection, push_rate: float = 0.0) -> int:
    """Head groups in which keys come: more, so that the first tiles wait for less, as long as pushes stay long.

    From numbers that are equal on all ranks.

    Args:
        k: `b t hk d`.
        v: `b t hk dv`.
        collection: Who fetches what.
        push_rate: Bytes per second between two ranks; 0.0: not measured.
    """
    b, _, hk, d = k.shape
    shard = b * collection.slot_rows * hk * (d + v.shape[-1]) * k.element_size()
    most = min(hk // GROUP_HEADS, int(shard / (PUSH_SECONDS * (push_rate or PUSH_RATE))))
    return max((groups for groups in (1, 2, 4, 8) if groups <= most and hk % groups == 0), default=1)


def gathered_bytes(
    k: Tensor,
    v: Tensor,
    collection: Collection,
    members: int,
    *,
    backward: bool,
    of_bias: int = 0,
    guests: bool = False,
) -> int:
    """What the gathered schedule takes on the rank that needs most: far, a slot, and two sets of regions.

    With guests also their two places and what is sent, and in the backward two sums on their way home and one that lands.

    Args:
        k: `b t hk d`.
        v: `b t hk dv`.
        collection: Who fetches what.
        members: Ranks that fetch from each other.
        backward: Of a backward.
        of_bias: Bytes of the bias of a key; 0: there is none.
        guests: Of a ring of two levels.
    """
    b, _, hk, d = k.shape
    row = b * hk * (d + v.shape[-1])
    slots = collection.most_far_rows + (1 + 3 * guests) * collection.slot_rows
    keys = slots * (row * k.element_size() + b * of_bias)
    keys += collection.slot_rows * b * of_bias  # the table holds near too
    homes = (2 * (members - 1) + 1 + 3 * guests) * collection.slot_rows * (row + b * hk * bool(of_bias)) * 4
    return keys + homes * backward


def _bias_size(score: Score) -> int:
    """Bytes of the bias of a key; 0: there is none."""
    return 0 if score.key_bias is None else score.key_bias.element_size()


@dataclass(frozen=True)
class _Facts:
    """What follows from a call and the shapes of its keys.

    Attributes:
        collection: Who fetches what.
        groups: Head groups.
        needed: Bytes that a forward, and a backward, take.
        shared: Every rank has queries and keys.
    """

    collection: Collection
    groups: int
    needed: tuple[int, int]
    shared: bool


def _look(k: Tensor, v: Tensor, score: Score, call: Call, seat: Seat) -> _Facts:
    of_bias = _bias_size(score)
    key = (k.shape, v.shape[-1], k.dtype, of_bias, seat.world_size, seat.push_rate, seat.nodes)
    facts = call.memo.get(key)
    if facts is None:
        collection, guests = call.collection(seat.nodes), seat.nodes is not None
        members = seat.world_size if seat.nodes is None else len(seat.nodes[0])
        needed = (
            gathered_bytes(k, v, collection, members, backward=backward, of_bias=of_bias, guests=guests)
            for backward in (False, True)
        )
        shards = (*call.sharding.shards, *call.kv_sharding.shards)
        groups = choose_groups(k, v, collection, seat.push_rate)
        facts = _Facts(collection, groups, (*needed,), all(shard_len(shard) for shard in shards))  # pyright: ignore[reportArgumentType]
        call.memo[key] = facts
    return facts


def _gathering(
    k: Tensor, v: Tensor, score: Score, call: Call, kernels: KernelSet, seat: Seat, *, backward: bool
) -> tuple[Gatherer, GatheringKernelSet, _Facts] | None:
    """What serves the gathered schedule; None for visits one by one."""
    serves: Any = getattr(kernels, "gathers", None)
    # a node of one rank has nobody to gather from
    alone = seat.world_size == 1 or (seat.nodes is not None and len(seat.nodes[0]) == 1)
    # a guest comes without its bias
    alone |= seat.nodes is not None and score.key_bias is not None
    if alone or serves is None or (backward and call.backward == "queries"):
        return None
    gatherer = seat.transport.gatherer()
    if gatherer is None or not serves(k.shape[-1], v.shape[-1], score):
        return None
    if seat.nodes is not None and score.key_bias is not None:
        return None  # a bias of keys does not cross with a guest
    facts = _look(k, v, score, call, seat)
    if not facts.shared or facts.needed[backward] > seat.budget:
        return None
    return gatherer, cast(GatheringKernelSet, kernels), facts
