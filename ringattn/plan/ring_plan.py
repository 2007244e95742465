"""The ring plan: ring steps of every rank, the rows that move, and their places. Pure integers.

One side of the attention stays and the other moves: with moving="keys" a rank's queries stay and receive the keys of every
owner; with moving="queries" the reverse, which exchanges the two axes of the mask. At step s, rank r computes with the rows
of owner (r - s) % world_size: every rank receives from one rank and sends to one, and nothing is forwarded.

Note [Double ring]
    Where some ranks share a node and the link between nodes is slow, the ring has two levels: N nodes of L ranks. Step
    s = o * L + i is inner step i of node step o, and the rank at place l of node n computes with the rows of the owner at
    place (l - i) % L of node (n - o) % N. Rows cross the slow link once per node: for node step o, every rank sends its
    counterpart, at the same place of node n + o, the rows that any rank there needs. They are a *remote shard* in that
    node: the counterpart, its local root, computes with all of it at inner step 0, and at inner step i sends rank
    (l + i) % L the part that it needs. Contributions to gradients return the same way: first to the local root, which adds
    those of its node to its own in the order of steps, and then to the owner, once. The one-level ring is the double ring
    of one node.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain

from ringattn.plan.intervals import SeenRows, VisibleSpan, count_term_pairs
from ringattn.plan.layouts import Shard
from ringattn.plan.mask import MaskAxis, MaskUnion

Rows = tuple[tuple[int, int], ...]
"""Row ranges of a shard, as (offset, length): ascending, disjoint, never empty, joined where they touch."""

Nodes = tuple[tuple[int, ...], ...]
"""Ranks by node and place; every rank once, equally many in each node."""


class _MovesRows:
    rows: Rows

    @cached_property
    def num_rows(self) -> int:
        """Rows that move."""
        return sum(length for _, length in self.rows)


@dataclass(frozen=True)
class RingStep(_MovesRows):
    """Computation of one stationary shard with rows of one moving shard.

    In the moves of processes (`share_moves`) `crossing` is the message that brings the rows, and `rows` are those of it.
    """

    step: int
    owner: int
    rows: Rows
    runs: tuple[tuple[int, int, int, int], ...]
    pairs: int
    local_root: int | None = None
    crossing: Send | None = None

    @cached_property
    def source(self) -> int:
        """The rank that sends the rows, and that contributions to their gradients are sent to."""
        return self.owner if self.local_root is None else self.local_root


@dataclass(frozen=True)
class Send(_MovesRows):
    """Rows that `peer` receives from this rank at `step` (within one node peer == (rank + step) % world_size).

    They are rows of the buffer that this rank holds: its own shard or, from node step 1 on, a remote shard.
    """

    step: int
    peer: int
    rows: Rows


@dataclass(frozen=True)
class RankPlan:
    """One rank's part. `ring_steps[s]` and `sends[s]` belong to step s, `remote_shards[o]` to node step o.

    A ring step is None where nothing is visible, at step 0 only where the rank's moving shard is empty. sends[0] is None;
    sends[o * local_size] crosses the slow link. remote_shards[0] is None; there is one when any rank of the node needs it,
    and it is the ring step of inner step 0 when its local root needs it too.
    """

    rank: int
    ring_steps: tuple[RingStep | None, ...]
    sends: tuple[Send | None, ...]
    remote_shards: tuple[RingStep | None, ...] = (None,)

    @cached_property
    def local_size(self) -> int:
        """Ranks of a node, which is the number of inner steps."""
        return len(self.ring_steps) // len(self.remote_shards)

    def held(self, node_step: int) -> RingStep:
        """Rows that this rank holds in a node step: its own or those of a remote shard, which may have none."""
        found = self.remote_shards[node_step] if node_step else self.ring_steps[0]
        return RingStep(node_step * self.local_size, self.rank, (), (), 0) if found is None else found

    def node_steps(self, node_step: int) -> tuple[RingStep | None, ...]:
        """Ring steps of a node step, that of the rows that this rank holds first."""
        first = node_step * self.local_size
        return self.held(node_step), *self.ring_steps[first + 1 : first + self.local_size]

    @property
    def received_rows(self) -> int:
        """Rows that this rank receives from others, over all steps."""
        inner = (ring_step for step, ring_step in enumerate(self.ring_steps) if step % self.local_size)
        return sum(ring_step.num_rows for ring_step in (*inner, *self.remote_shards) if ring_step is not None)


@dataclass(frozen=True)
class RingPlan:
    """Every rank's part.

    Attributes:
        moving: "keys" (forward; dk and dv return) or "queries" (dq returns).
        largest_send: Most rows that a rank sends to a rank of its node in one step.
        largest_remote_send: Most rows that a rank sends over the slow link in one step.
    """

    moving: str
    ranks: tuple[RankPlan, ...]
    largest_send: int = 0
    largest_remote_send: int = 0


@dataclass(frozen=True)
class RecvSpec(_MovesRows):
    """Rows that a fused launch receives from one owner; `at` is their first row in the remote buffer."""

    step: int
    owner: int
    rows: Rows
    at: int


@dataclass(frozen=True)
class SendSpec(Send):
    """A `Send` into the remote buffer of the peer.

    Attributes:
        at: First row in that buffer.
        remote_rows: Rows of that buffer.
        local_rows: Rows that the peer holds itself.
        owners: Owners that the peer receives from, in ring order; this rank is one of them.
    """

    at: int
    remote_rows: int
    local_rows: int
    owners: tuple[int, ...]


@dataclass(frozen=True)
class GatherPlan:
    """Rows that one rank receives and sends, in ring order, when a node step is computed in one launch.

    Attributes:
        remote_rows: Rows of this rank's remote buffer, pad rows included; 0 when nothing is received.
        slot_rows: Rows of the longest moving shard of all ranks.
        most_remote_rows: The largest remote_rows of all ranks and node steps.
        first: The ring step of the rows that this rank holds.
        skipped: The next rank and its first owner, where that is not this rank: it receives, but nothing from here.
    """

    recvs: tuple[RecvSpec, ...]
    sends: tuple[SendSpec, ...]
    remote_rows: int
    slot_rows: int
    most_remote_rows: int
    first: int = 0
    skipped: tuple[int, int] | None = None


@lru_cache(maxsize=256)
def make_gather_plan(
    plan: RingPlan, rank: int, pad_rows: int, node_step: int = 0, nodes: Nodes | None = None
) -> GatherPlan:
    """Return one rank's fused form of a node step of a plan; cached.

    Owners in the remote buffer begin at multiples of `pad_rows`, with at least as many rows between them.
    """
    steps = range(len(plan.ranks[rank].remote_shards))
    most = max(_recvs(plan, part, step, pad_rows)[1] for part in plan.ranks for step in steps)
    recvs, remote_rows = _recvs(plan, plan.ranks[rank], node_step, pad_rows)
    size = plan.ranks[rank].local_size
    sends: list[SendSpec] = []
    for send in plan.ranks[rank].sends[node_step * size + 1 : (node_step + 1) * size]:
        if send is not None:
            theirs, room = _recvs(plan, plan.ranks[send.peer], node_step, pad_rows)
            at = next(recv.at for recv in theirs if recv.owner == rank)
            local_rows = plan.ranks[send.peer].held(node_step).num_rows
            owners = tuple(recv.owner for recv in theirs)
            sends.append(SendSpec(send.step % size, send.peer, send.rows, at, room, local_rows, owners))
    members = next(node for node in _check_nodes(nodes, len(plan.ranks)) if rank in node)
    after = members[(members.index(rank) + 1) % len(members)]
    theirs, _ = _recvs(plan, plan.ranks[after], node_step, pad_rows)
    skipped = (after, theirs[0].owner) if theirs and theirs[0].owner != rank else None
    slot_rows = max(part.held(0).num_rows for part in plan.ranks)
    return GatherPlan(recvs, tuple(sends), remote_rows, slot_rows, most, node_step * size, skipped)


def _recvs(plan: RingPlan, part: RankPlan, node_step: int, pad_rows: int) -> tuple[tuple[RecvSpec, ...], int]:
    size, at = part.local_size, 0
    recvs: list[RecvSpec] = []
    for ring_step in part.node_steps(node_step)[1:]:
        if ring_step is not None:
            send = plan.ranks[ring_step.source].sends[ring_step.step]
            assert send is not None, "rows of a ring step are sent"
            recvs.append(RecvSpec(ring_step.step % size, ring_step.source, send.rows, at))
            at += -(-(ring_step.num_rows + pad_rows) // pad_rows) * pad_rows
    return tuple(recvs), at


def make_nodes(world_size: int, num_nodes: int) -> Nodes:
    """Consecutive ranks in nodes of equal size.

    Example:
        >>> make_nodes(4, 2)
        ((0, 1), (2, 3))
    """
    if num_nodes < 1 or world_size % num_nodes:
        raise ValueError(
            f"nodes must divide the ring of {world_size} ranks, got {num_nodes}; use nodes of equal size, or nodes=1"
        )
    size = world_size // num_nodes
    return tuple(tuple(range(first, first + size)) for first in range(0, world_size, size))


@lru_cache(maxsize=128)
def make_plan(
    q_shards: tuple[Shard, ...], kv_shards: tuple[Shard, ...], mask: MaskUnion, moving: str, nodes: Nodes | None = None
) -> RingPlan:
    """Return the plan of one mask over one pair of shardings; cached on its arguments.

    Every visible pair belongs to exactly one ring step of one rank. From step 1 on, a run of moving rows that no
    stationary row of the rank sees is left out, and the others are cut to the first and last row that one of them sees
    (in any batch element). Under a union of intervals only rows that are seen move.

    Args:
        moving: "keys" or "queries".
        nodes: Ranks that share a node (Note [Double ring]); None: all.
    """
    if moving not in ("keys", "queries"):
        raise ValueError(f"moving must be 'keys' or 'queries', got {moving!r}; 'keys' is the forward direction")
    if len(q_shards) != len(kv_shards):
        raise ValueError(
            f"kv_shards must have the world size of q_shards, {len(q_shards)}, got {len(kv_shards)}; "
            "shard both sequences for one ring"
        )
    _check_inside(q_shards, mask.seq_len, "q_shards")
    _check_inside(kv_shards, mask.kv_len, "kv_shards")

    stationary, moving_shards = (q_shards, kv_shards) if moving == "keys" else (kv_shards, q_shards)
    axis: MaskAxis = "keys" if moving == "keys" else "queries"
    world_size = len(stationary)
    counts = [[0] * world_size for _ in stationary]
    seen_by: list[list[VisibleSpan | SeenRows]] = [[] for _ in stationary]
    for variant, times in mask.variants.items():
        terms = mask.intervals(axis, variant)
        for term in terms:
            for rank, row in enumerate(count_term_pairs(term, stationary, moving_shards)):
                counts[rank] = [count + times * more for count, more in zip(counts[rank], row, strict=True)]
        for rank, shard in enumerate(stationary):
            seen_by[rank].append(SeenRows(terms, shard) if mask.is_union else VisibleSpan(terms[0].bounds, shard))

    nodes = _check_nodes(nodes, world_size)
    routes = [_route(rank, nodes) for rank in range(world_size)]
    size = len(nodes[0])
    remote_shards: list[tuple[RingStep | None, ...]] = []
    for rank, route in enumerate(routes):
        node = next(node for node in nodes if rank in node)
        received: list[RingStep | None] = [None]
        for step in range(size, world_size, size):
            owner = route[step][0]
            seen = [seen for member in node for seen in seen_by[member] if counts[member][owner]]
            pairs = sum(counts[member][owner] for member in node)
            ring_step = _ring_step(step, owner, moving_shards[owner], seen, pairs)
            received.append(None if ring_step is None else replace(ring_step, pairs=counts[rank][owner]))
        remote_shards.append(tuple(received))
    ring_steps = []
    for rank, route in enumerate(routes):
        mine: list[RingStep | None] = []
        for step, (owner, source) in enumerate(route):
            remote_shard = remote_shards[rank][step // size] if step % size == 0 else None
            if remote_shard is not None:
                mine.append(remote_shard if remote_shard.pairs else None)
                continue
            ring_step = _ring_step(step, owner, moving_shards[owner], seen_by[rank], counts[rank][owner])
            local_root = None if source == owner else source
            mine.append(ring_step if ring_step is None else replace(ring_step, local_root=local_root))
        ring_steps.append(tuple(mine))

    sends: list[list[Send | None]] = [[None] * world_size for _ in range(world_size)]
    for rank, route in enumerate(routes):
        for step, (_, source) in enumerate(route):
            node_step, inner_step = divmod(step, size)
            wanted = ring_steps[rank][step] if inner_step else remote_shards[rank][node_step]
            if wanted is not None and step:
                held = remote_shards[source][node_step] if inner_step else None
                rows = wanted.rows if held is None else within(wanted.rows, held.rows)
                sends[source][step] = Send(step, rank, rows)
    ranks = tuple(
        RankPlan(rank, ring_steps[rank], tuple(sends[rank]), remote_shards[rank]) for rank in range(world_size)
    )
    sizes = [(send.step % size == 0, send.num_rows) for part in ranks for send in part.sends if send is not None]
    most = [max((rows for crosses, rows in sizes if crosses == across), default=0) for across in (False, True)]
    return RingPlan(moving, ranks, *most)


def share_moves(plan: RingPlan, hosted: int) -> RingPlan:
    """Return a plan's moves where each process hosts so many consecutive ranks: rows cross to a process once for all of its ranks.

    The first of them that needs rows of a shard receives those that any of them needs, and the others find them there.
    """
    ring_steps, sends = [[*part.ring_steps] for part in plan.ranks], [[*part.sends] for part in plan.ranks]
    crossings: dict[tuple[int, int, int], list[Send]] = {}
    for source, part in enumerate(plan.ranks):
        for send in part.sends:
            if send is not None and send.step % part.local_size and send.peer // hosted != source // hosted:
                crossings.setdefault((source, send.step // part.local_size, send.peer // hosted), []).append(send)
    for (source, *_), readers in crossings.items():
        crossing = replace(readers[0], rows=union(send.rows for send in readers))
        for send in readers:
            ring_step = ring_steps[send.peer][send.step]
            assert ring_step is not None, "rows are sent for a ring step"
            ring_steps[send.peer][send.step] = replace(
                ring_step, rows=within(send.rows, crossing.rows), crossing=crossing
            )
            sends[source][send.step] = crossing if send is readers[0] else None
    ranks = (
        replace(part, ring_steps=tuple(ring_steps[part.rank]), sends=tuple(sends[part.rank])) for part in plan.ranks
    )
    return replace(plan, ranks=tuple(ranks))


def _check_nodes(nodes: Nodes | None, world_size: int) -> Nodes:
    if nodes is None:
        return (tuple(range(world_size)),)
    ranks = sorted(rank for node in nodes for rank in node)
    if ranks != list(range(world_size)) or len({len(node) for node in nodes}) != 1:
        raise ValueError(
            f"nodes must hold each of {world_size} ranks once and equally many each, got {nodes}; "
            "use nodes of equal size, or nodes=1"
        )
    return nodes


def _route(rank: int, nodes: Nodes) -> list[tuple[int, int]]:
    """Return, per step, the owner of the rows that a rank receives, and the rank that sends them."""
    n = next(n for n, node in enumerate(nodes) if rank in node)
    place, size = nodes[n].index(rank), len(nodes[n])
    route = []
    for node_step in range(len(nodes)):
        for inner_step in range(size):
            there = (place - inner_step) % size
            owner = nodes[(n - node_step) % len(nodes)][there]
            route.append((owner, nodes[n][there] if inner_step else owner))
    return route


def union(rows: Iterable[Rows]) -> Rows:
    """Return the rows that are in any of some row ranges of a shard."""
    return tuple(_united(sorted(chain.from_iterable(rows))))


def within(rows: Rows, held: Rows) -> Rows:
    """Return row ranges of a shard as row ranges of a buffer that holds some of its rows."""
    found: list[tuple[int, int]] = []
    packed = 0
    for begin, length in held:
        for offset, count in rows:
            first, last = max(begin, offset), min(begin + length, offset + count)
            if first < last:
                found.append((packed + first - begin, last - first))
        packed += length
    return tuple(_united(found))


def moved_rows(plan: RingPlan) -> int:
    """The rows that the busiest rank receives from others, over all steps."""
    return max(rank.received_rows for rank in plan.ranks)


def describe(plan: RingPlan) -> str:
    """Return a plan as a short table: per rank the rows received at each step, and its share of the work.

    Example:
        >>> from ringattn.plan.layouts import contiguous
        >>> from ringattn.plan.mask import short_mask
        >>> shards = contiguous(8, 2)
        >>> print(describe(make_plan(shards, shards, short_mask(8, causal=True), "keys")))
        2 ranks, keys move
        rank  step 1       pairs
           0       -          10
           1       4          26
        work max/mean 1.444, 4 rows received by the busiest rank
    """
    world_size = len(plan.ranks)
    work = [sum(ring_step.pairs for ring_step in rank.ring_steps if ring_step is not None) for rank in plan.ranks]
    lines = [f"{world_size} ranks, {plan.moving} move"]
    lines.append("rank" + "".join(f"{f'step {step}':>8}" for step in range(1, world_size)) + f"{'pairs':>12}")
    for rank, pairs in zip(plan.ranks, work, strict=True):
        cells = "".join(f"{'-' if ring_step is None else ring_step.num_rows:>8}" for ring_step in rank.ring_steps[1:])
        lines.append(f"{rank.rank:>4}{cells}{pairs:>12}")
    ratio = max(work) * world_size / sum(work) if sum(work) else 1.0
    lines.append(f"work max/mean {ratio:.3f}, {moved_rows(plan)} rows received by the busiest rank")
    return "\n".join(lines)


def _ring_step(
    step: int, owner: int, shard: Shard, visible: list[VisibleSpan | SeenRows], pairs: int
) -> RingStep | None:
    if step == 0:
        return RingStep(0, owner, ((0, sum(run.length for run in shard)),), pack(shard), pairs) if shard else None
    if not pairs:
        return None
    rows: list[tuple[int, int]] = []
    runs: list[tuple[int, int, int, int]] = []
    base = packed = 0
    for run in shard:
        spans = sorted(span for rows_seen in visible for span in rows_seen.spans(run))
        exact = isinstance(visible[0], SeenRows)
        for first, length in _united(spans, with_gaps=exact):
            rows.append((base + first, length))
            runs.append((packed, length, run.position(first), run.stride))
            packed += length
        base += run.length
    return RingStep(step, owner, tuple(_united(rows)), tuple(runs), pairs)


def _united(spans: list[tuple[int, int]], with_gaps: bool = True) -> list[tuple[int, int]]:
    """Return sorted (offset, length) without overlaps, or as one from the first to the last row."""
    found: list[tuple[int, int]] = []
    for offset, length in spans:
        if found and (not with_gaps or offset <= sum(found[-1])):
            begin = found[-1][0]
            found[-1] = begin, max(sum(found[-1]), offset + length) - begin
        else:
            found.append((offset, length))
    return found


def pack(shard: Shard) -> tuple[tuple[int, int, int, int], ...]:
    """The whole shard as a packed buffer: (offset in the buffer, length, start, stride) per run."""
    runs, offset = [], 0
    for run in shard:
        runs.append((offset, run.length, run.start, run.stride))
        offset += run.length
    return tuple(runs)


def _check_inside(shards: tuple[Shard, ...], length: int, name: str) -> None:
    for rank, shard in enumerate(shards):
        if shard and not 0 <= shard[0].start <= shard[-1].last < length:
            raise ValueError(
                f"{name} must hold positions below {length}, got {shard[-1].last} on rank {rank}; "
                "make the sharding and the mask for the same sequence"
            )
