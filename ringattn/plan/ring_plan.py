"""The plan: who visits whom, which rows move, and where they land. Pure integers.

Owns the ring order and what is skipped. Refuses to know tensors, groups, devices and how bytes move.

Note [Two directions]
    One side of the attention stays and the other travels. With moving="keys" a rank's queries stay and the keys of
    every owner come to them; with moving="queries" its keys stay and the queries come. The plan of the second is the
    plan of the first with the two readings of the mask exchanged. At step s, rank r visits owner (r - s) % world_size:
    every rank reads from one rank and is read by one, and nothing is forwarded.

Note [Double ring]
    Where some ranks share a node and the link between nodes is slow, the ring has two levels: N nodes of L ranks. Step
    s = o * L + i is inner step i of outer step o, and the rank at place l of node n visits the owner at place (l - i) % L
    of node (n - o) % N. Rows cross the slow link once per node: for outer step o, every rank sends its counterpart, at
    the same place of node n + o, the rows that anybody there needs. They are a *guest* in that node: the counterpart
    visits the whole guest at inner step 0, and at inner step i hands (l + i) % L the part that it needs. Contributions to
    gradients go the same way back: first to the holder, who adds those of its node to its own in the order of steps, and
    then home, once. The one-level ring is the double ring of one node.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from ringattn.plan.layouts import Shard
from ringattn.plan.layouts import shard_len as rows_of
from ringattn.plan.mask import Reach, Reading, Visibility, count_pairs

Rows = tuple[tuple[int, int], ...]
"""Row ranges of a shard, as (offset, length): ascending, disjoint, never empty, joined where they touch."""

Nodes = tuple[tuple[int, ...], ...]
"""Who shares a node: ranks by node and place; every rank once, equally many in each node."""


@dataclass(frozen=True)
class Visit:
    """One stationary shard meets the rows of one moving shard.

    Attributes:
        step: Ring step, 0 .. world_size - 1; within one node owner == (rank - step) % world_size.
        owner: The rank whose moving rows are visited.
        rows: The owner's rows that are needed here (per run: from the first to the last needed row). At step 0 the
            whole shard, which is at home; at inner step 0 of a guest, what the whole node needs (Note [Double ring]).
        runs: The same rows as a packed buffer: (offset in the buffer, length, start, stride) each.
        pairs: Visible (query, key) pairs of this visit, summed over batch elements when the mask has lengths.
        holder: The rank of this node that holds the rows as a guest; None where they come from their owner.
    """

    step: int
    owner: int
    rows: Rows
    runs: tuple[tuple[int, int, int, int], ...]
    pairs: int
    holder: int | None = None

    @cached_property
    def num_rows(self) -> int:
        """Rows that move."""
        return sum(length for _, length in self.rows)

    @cached_property
    def source(self) -> int:
        """The rank that sends the rows, and that contributions to their gradients are sent to."""
        return self.owner if self.holder is None else self.holder


@dataclass(frozen=True)
class Send:
    """What `peer` fetches from this rank at `step` (within one node peer == (rank + step) % world_size).

    The rows are those of the buffer that this rank holds: its own shard or, at inner steps of a guest, the guest.
    """

    step: int
    peer: int
    rows: Rows

    @cached_property
    def num_rows(self) -> int:
        """Rows that move."""
        return sum(length for _, length in self.rows)


@dataclass(frozen=True)
class RankPlan:
    """One rank's part. `visits[s]` and `sends[s]` belong to step s, `guests[o]` to outer step o.

    A visit is None where nothing is visible, at step 0 only where the rank's moving shard is empty. sends[0] is None;
    sends[o * local_size] crosses the slow link. guests[0] is None; a guest is there when anybody of the node needs it, and
    is the visit of inner step 0 when its holder needs it too.
    """

    rank: int
    visits: tuple[Visit | None, ...]
    sends: tuple[Send | None, ...]
    guests: tuple[Visit | None, ...] = (None,)

    @cached_property
    def local_size(self) -> int:
        """Ranks of a node, which is the number of inner steps."""
        return len(self.visits) // len(self.guests)

    def held(self, outer: int) -> Visit:
        """What this rank holds in an outer step: its own rows, or a guest, which may have none; seen by it or not."""
        found = self.guests[outer] if outer else self.visits[0]
        return Visit(outer * self.local_size, self.rank, (), (), 0) if found is None else found

    @property
    def received_rows(self) -> int:
        """Rows that this rank receives from others, over all steps."""
        inner = (visit for step, visit in enumerate(self.visits) if step % self.local_size)
        return sum(visit.num_rows for visit in (*inner, *self.guests) if visit is not None)


@dataclass(frozen=True)
class Plan:
    """Every rank's part.

    Attributes:
        moving: The side that travels: "keys" (forward; dk and dv go home) or "queries" (dq goes home).
        ranks: One part per rank.
        largest_send: The largest number of rows that a rank sends to a rank of its node in one step.
        largest_crossing: The largest number of rows that a rank sends over the slow link in one step.
    """

    moving: str
    ranks: tuple[RankPlan, ...]
    largest_send: int = 0
    largest_crossing: int = 0


@dataclass(frozen=True)
class Fetch:
    """Rows of one owner on their way into the far buffer of a gathered visit.

    Attributes:
        step: Inner step, which is the ring step where there is one level.
        owner: The rank that holds them: as its shard or, from outer step 1 on, as its guest.
        rows: Row ranges of what it holds.
        at: Where they begin in far.
    """

    step: int
    owner: int
    rows: Rows
    at: int


@dataclass(frozen=True)
class Reader(Send):
    """A `Send` and where its rows stand in the far buffer of the peer.

    Attributes:
        at: Where they begin there.
        far_rows: Rows of that buffer.
        near_rows: Rows that the peer holds itself.
        owners: Whose rows the peer fetches, in ring order; this rank is one of them.
    """

    at: int
    far_rows: int
    near_rows: int
    owners: tuple[int, ...]


@dataclass(frozen=True)
class Collection:
    """Who fetches which rows of whom when a rank's visits of one outer step are computed in one launch.

    Attributes:
        fetches: What this rank fetches, in ring order.
        readers: What others fetch from this rank, in ring order, and where they want it.
        far_rows: Rows of this rank's far buffer, guards included; 0 when nothing is fetched.
        slot_rows: Rows of the longest moving shard of all ranks.
        most_far_rows: The largest far_rows of all ranks, and of all outer steps.
        first: The ring step of what this rank holds.
        skipped: The rank whose nearest owner this rank is, and its first owner, where that is another one: the rank fetches, but
            nothing from here. None: there is no such rank.
    """

    fetches: tuple[Fetch, ...]
    readers: tuple[Reader, ...]
    far_rows: int
    slot_rows: int
    most_far_rows: int
    first: int = 0
    skipped: tuple[int, int] | None = None


@lru_cache(maxsize=256)
def collect(plan: Plan, rank: int, guard: int, outer: int = 0, nodes: Nodes | None = None) -> Collection:
    """The gathered form of an outer step of a plan for one rank; cached.

    Args:
        plan: The plan.
        rank: The rank.
        guard: What the first row of each owner in far is a multiple of, and the least number of rows between owners.
        outer: The outer step; a plan of one level has one.
        nodes: As for the plan.
    """
    steps = range(len(plan.ranks[rank].guests))
    most = max(_fetches(plan, part, step, guard)[1] for part in plan.ranks for step in steps)
    fetches, far_rows = _fetches(plan, plan.ranks[rank], outer, guard)
    size = plan.ranks[rank].local_size
    readers: list[Reader] = []
    for send in plan.ranks[rank].sends[outer * size + 1 : (outer + 1) * size]:
        if send is not None:
            theirs, room = _fetches(plan, plan.ranks[send.peer], outer, guard)
            at = next(fetch.at for fetch in theirs if fetch.owner == rank)
            near_rows = plan.ranks[send.peer].held(outer).num_rows
            owners = tuple(fetch.owner for fetch in theirs)
            readers.append(Reader(send.step % size, send.peer, send.rows, at, room, near_rows, owners))
    members = next(node for node in _check_nodes(nodes, len(plan.ranks)) if rank in node)
    after = members[(members.index(rank) + 1) % len(members)]
    theirs, _ = _fetches(plan, plan.ranks[after], outer, guard)
    skipped = (after, theirs[0].owner) if theirs and theirs[0].owner != rank else None
    homes = [visit for part in plan.ranks for visit in part.visits if visit is not None and visit.step == 0]
    slot_rows = max((visit.num_rows for visit in homes), default=0)
    return Collection(fetches, tuple(readers), far_rows, slot_rows, most, outer * size, skipped)


def _fetches(plan: Plan, part: RankPlan, outer: int, guard: int) -> tuple[tuple[Fetch, ...], int]:
    size, at = part.local_size, 0
    fetches: list[Fetch] = []
    for visit in part.visits[outer * size + 1 : (outer + 1) * size]:
        if visit is not None:
            send = plan.ranks[visit.source].sends[visit.step]
            assert send is not None, "what is visited is sent"
            fetches.append(Fetch(visit.step % size, visit.source, send.rows, at))
            at += -(-(visit.num_rows + guard) // guard) * guard
    return tuple(fetches), at


def make_nodes(world_size: int, num_nodes: int) -> Nodes:
    """Consecutive ranks in nodes of equal size.

    Args:
        world_size: Number of ranks.
        num_nodes: Number of nodes; divides world_size.

    Raises:
        ValueError: It does not.

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
    q_shards: tuple[Shard, ...],
    kv_shards: tuple[Shard, ...],
    visibility: Visibility,
    moving: str,
    nodes: Nodes | None = None,
) -> Plan:
    """The plan of one mask over one pair of shardings; cached on its arguments.

    Every visible pair belongs to exactly one visit of one rank. From step 1 on, a run of moving rows that no stationary
    row of the visitor sees is left out, and the others are cut to the first and last row that one of them sees (in any
    batch element).

    Args:
        q_shards: The queries of every rank.
        kv_shards: The keys of every rank.
        visibility: The mask.
        moving: The side that travels: "keys" or "queries".
        nodes: Who shares a node (Note [Double ring]); None: all.

    Raises:
        ValueError: `moving` is unknown, the shardings have different world sizes, the nodes do not hold every rank once
            and equally many each, or a shard leaves the sequence.
    """
    if moving not in ("keys", "queries"):
        raise ValueError(f"moving must be 'keys' or 'queries', got {moving!r}; 'keys' is the forward direction")
    if len(q_shards) != len(kv_shards):
        raise ValueError(
            f"kv_shards must have the world size of q_shards, {len(q_shards)}, got {len(kv_shards)}; "
            "shard both sequences for one ring"
        )
    _check_inside(q_shards, visibility.seq_len, "q_shards")
    _check_inside(kv_shards, visibility.kv_len, "kv_shards")

    stationary, travelling = (q_shards, kv_shards) if moving == "keys" else (kv_shards, q_shards)
    reading: Reading = "keys" if moving == "keys" else "queries"
    world_size = len(stationary)
    counts = [[0] * world_size for _ in stationary]
    reaches: list[list[Reach]] = [[] for _ in stationary]
    for extent, times in Counter(visibility.lengths or (None,)).items():
        bounds = visibility.bounds(reading, extent)
        for rank, row in enumerate(count_pairs(bounds, stationary, travelling)):
            counts[rank] = [count + times * more for count, more in zip(counts[rank], row, strict=True)]
            reaches[rank].append(Reach(bounds, stationary[rank]))

    nodes = _check_nodes(nodes, world_size)
    routes = [_route(rank, nodes) for rank in range(world_size)]
    guests = [
        (
            None,
            *(_guest(rank, outer, routes[rank], nodes, travelling, reaches, counts) for outer in range(1, len(nodes))),
        )
        for rank in range(world_size)
    ]
    size = len(nodes[0])
    visits = []
    for rank, stops in enumerate(routes):
        mine: list[Visit | None] = []
        for step, (owner, source) in enumerate(stops):
            guest = guests[rank][step // size] if step % size == 0 else None
            if guest is not None:
                mine.append(guest if guest.pairs else None)
                continue
            visit = _visit(step, owner, travelling[owner], reaches[rank], counts[rank][owner])
            holder = None if source == owner else source
            mine.append(visit if visit is None else replace(visit, holder=holder))
        visits.append(tuple(mine))

    sends: list[list[Send | None]] = [[None] * world_size for _ in range(world_size)]
    for rank, stops in enumerate(routes):
        for step, (_, source) in enumerate(stops):
            outer, inner = divmod(step, size)
            wanted = visits[rank][step] if inner else guests[rank][outer]
            if wanted is not None and step:
                held = guests[source][outer] if inner else None
                rows = wanted.rows if held is None else _within(wanted.rows, held.rows)
                sends[source][step] = Send(step, rank, rows)
    ranks = tuple(RankPlan(rank, visits[rank], tuple(sends[rank]), guests[rank]) for rank in range(world_size))
    most = [0, 0]
    for part in ranks:
        for send in part.sends:
            if send is not None:
                crossing = send.step % size == 0
                most[crossing] = max(most[crossing], send.num_rows)
    return Plan(moving, ranks, *most)


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
    """The owner that a rank visits at every step, and who sends it the rows."""
    n = next(n for n, node in enumerate(nodes) if rank in node)
    place, size = nodes[n].index(rank), len(nodes[n])
    stops = []
    for outer in range(len(nodes)):
        for inner in range(size):
            seat = (place - inner) % size
            owner = nodes[(n - outer) % len(nodes)][seat]
            stops.append((owner, nodes[n][seat] if inner else owner))
    return stops


def _guest(
    rank: int,
    outer: int,
    stops: list[tuple[int, int]],
    nodes: Nodes,
    travelling: tuple[Shard, ...],
    reaches: list[list[Reach]],
    counts: list[list[int]],
) -> Visit | None:
    """What a rank receives over the slow link for an outer step, for its whole node."""
    node = next(node for node in nodes if rank in node)
    step = outer * len(node)
    owner = stops[step][0]
    everyone = [reach for member in node for reach in reaches[member] if counts[member][owner]]
    visit = _visit(step, owner, travelling[owner], everyone, sum(counts[member][owner] for member in node))
    return None if visit is None else replace(visit, pairs=counts[rank][owner])


def _within(rows: Rows, held: Rows) -> Rows:
    """Row ranges of a shard as row ranges of a buffer that holds some of its rows."""
    found: list[tuple[int, int]] = []
    packed = 0
    for begin, length in held:
        for offset, count in rows:
            first, last = max(begin, offset), min(begin + length, offset + count)
            if first < last:
                at = packed + first - begin
                if found and sum(found[-1]) == at:
                    found[-1] = (found[-1][0], found[-1][1] + last - first)
                else:
                    found.append((at, last - first))
        packed += length
    return tuple(found)


def moved_rows(plan: Plan) -> int:
    """The rows that the busiest rank receives from others, over all steps."""
    return max(rank.received_rows for rank in plan.ranks)


def describe(plan: Plan) -> str:
    """The plan as a short table: per rank the rows received at each step, and its share of the work.

    Example:
        >>> from ringattn.plan.layouts import contiguous
        >>> shards = contiguous(8, 2)
        >>> print(describe(make_plan(shards, shards, Visibility(8, 8, causal=True), "keys")))
        2 ranks, keys move
        rank  step 1       pairs
           0       -          10
           1       4          26
        work max/mean 1.444, 4 rows received by the busiest rank
    """
    world_size = len(plan.ranks)
    work = [sum(visit.pairs for visit in rank.visits if visit is not None) for rank in plan.ranks]
    lines = [f"{world_size} ranks, {plan.moving} move"]
    lines.append("rank" + "".join(f"{f'step {step}':>8}" for step in range(1, world_size)) + f"{'pairs':>12}")
    for rank, pairs in zip(plan.ranks, work, strict=True):
        cells = "".join(f"{'-' if visit is None else visit.num_rows:>8}" for visit in rank.visits[1:])
        lines.append(f"{rank.rank:>4}{cells}{pairs:>12}")
    ratio = max(work) * world_size / sum(work) if sum(work) else 1.0
    lines.append(f"work max/mean {ratio:.3f}, {moved_rows(plan)} rows received by the busiest rank")
    return "\n".join(lines)


def draw(visibility: Visibility, shards: tuple[Shard, ...], b: int = 0) -> str:
    """A small mask as text: a line per query, a character per key; which rank computes the pair, or `.` where hidden.

    Args:
        visibility: The mask; best below a hundred tokens.
        shards: The queries of every rank, at most 36 (ranks are drawn as 0-9, a-z).
        b: The batch element.

    Raises:
        ValueError: There are more ranks than characters.

    Example:
        >>> from ringattn.plan.layouts import zigzag
        >>> print(draw(Visibility(4, 4, causal=True), zigzag(4, 2)))
        0...
        11..
        111.
        0000
    """
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    if len(shards) > len(digits):
        raise ValueError(f"shards must be at most {len(digits)} to be drawn, got {len(shards)}; draw a smaller ring")
    lines = ["." * visibility.kv_len] * visibility.seq_len
    for rank, shard in enumerate(shards):
        for run in shard:
            for i in range(run.start, run.last + 1, run.stride):
                lo, hi = visibility.keys_of(i, b)
                lines[i] = "." * lo + digits[rank] * (hi - lo) + "." * (visibility.kv_len - hi)
    return "\n".join(lines)


def _visit(step: int, owner: int, shard: Shard, reaches: list[Reach], pairs: int) -> Visit | None:
    if step == 0:
        return Visit(0, owner, ((0, rows_of(shard)),), pack(shard), pairs) if shard else None
    if not pairs:
        return None
    rows: list[tuple[int, int]] = []
    runs: list[tuple[int, int, int, int]] = []
    base = packed = 0
    for run in shard:
        spans = [span for reach in reaches if (span := reach.span(run)) is not None]
        if spans:
            first = min(offset for offset, _ in spans)
            length = max(offset + length for offset, length in spans) - first
            if rows and sum(rows[-1]) == base + first:
                rows[-1] = (rows[-1][0], rows[-1][1] + length)
            else:
                rows.append((base + first, length))
            runs.append((packed, length, run.position(first), run.stride))
            packed += length
        base += run.length
    return Visit(step, owner, tuple(rows), tuple(runs), pairs)


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
