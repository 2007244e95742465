"""Duration of one attention call of a ring, forward and backward, by schedule.

The plan of a call is the library's own: shards, ring steps, gather plans and tables of rows. Transfers and launches are simulated
as events, on the ranks with the most and the least to receive:

    fused         Owners push to readers in ring order, one at a time and group by group; the tiles of the one launch wait for them,
                  and for the link that takes their gradients.
                  A hierarchical ring has one launch per node step, beside which the remote shards of the next one cross.
    stepwise      A step ends when its kernel and the transfer of the next step have ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from ringattn.kernels.constants import COMM_SMS
from ringattn.kernels.interface import PAD_ROWS, GatheredKeys, RowMetadata
from ringattn.kernels.runtime.table_cache import find
from ringattn.plan.buffers import count_groups
from ringattn.plan.device_tables import gathered_key, side_key, stationary_side
from ringattn.plan.expressions import Chunks, Window
from ringattn.plan.layouts import Shard, make_shards, shard_len
from ringattn.plan.mask import MaskAxis, MaskUnion
from ringattn.plan.ring_plan import GatherPlan, Nodes, RingPlan, make_gather_plan, make_nodes, make_plan
from ringattn.sizing.attention_launch import Exchange, Heads, launch_ms
from ringattn.sizing.profile import Profile

SCHEDULES = ("fused", "stepwise", "process_group")
MOST_RANKS = 16
"""Steps of larger rings of one level are those of a ring of this many ranks with shards as long, repeated."""
MOST_NODES = 3
"""The same of nodes of hierarchical rings."""


@dataclass(frozen=True)
class RingTime:
    """Milliseconds of one call on the slowest rank, and bytes that it receives.

    Attributes:
        device_ms: Time on the device, transfers included.
        kernel_ms: Kernels alone, with all rows there.
        host_ms: Time of the host for the call; of a fused one, where it is launched as a CUDA graph (copy_engine/graph_cache.py).
        bytes_received: Rows and gradients that the rank receives.
    """

    device_ms: float
    kernel_ms: float
    host_ms: float
    bytes_received: int

    @property
    def ms(self) -> float:
        """Time of a call by itself: the device's, or the host's where that is longer."""
        return max(self.device_ms, self.host_ms)

    @property
    def exposed_ms(self) -> float:
        """Time in which no kernel computes because rows or launches are late."""
        return max(0.0, self.ms - self.kernel_ms)


@dataclass(frozen=True)
class RingCall:
    """One attention call over a ring.

    Attributes:
        nodes: Nodes of the ring; ranks of a node are linked by the copy engine.
        schedule: "fused", "stepwise" over the copy engine, or "process_group".
        saved: The backward uses the keys that the forward gathered.
    """

    mask: MaskUnion
    world_size: int
    heads: Heads
    layout: str = "zigzag"
    nodes: int = 1
    schedule: str = "fused"
    saved: bool = False

    @cached_property
    def planned(self) -> RingCall:
        """The ring whose plan is made: this one, or a smaller one with shards as long whose steps are repeated."""
        nodes, world_size = self.nodes, self.world_size
        if nodes > MOST_NODES:
            nodes, world_size = MOST_NODES, world_size // nodes * MOST_NODES
        elif self.nodes == 1 and self.schedule != "fused" and world_size > MOST_RANKS:
            world_size = MOST_RANKS
        if world_size == self.world_size:
            return self
        if self.mask.is_union:
            raise NotImplementedError(
                f"a mask of several intervals must be on a ring of one node or of up to {MOST_NODES} nodes to be planned, got "
                f"{self.world_size} ranks on {self.nodes} nodes; plan a smaller ring"
            )
        mask = self.mask.shortened(max(world_size, self.mask.seq_len * world_size // self.world_size))
        return replace(self, mask=mask, world_size=world_size, nodes=nodes)

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """Every rank's shard."""
        return make_shards(self.layout, self.mask.seq_len, self.world_size, self.mask)

    @cached_property
    def node_ranks(self) -> Nodes | None:
        """Ranks by node; None: one node."""
        return None if self.nodes == 1 else make_nodes(self.world_size, self.nodes)

    @cached_property
    def plan(self) -> RingPlan:
        """The ring plan in which keys move."""
        return make_plan(self.shards, self.shards, self.mask, "keys", self.node_ranks)

    def gather_plan(self, rank: int, node_step: int = 0) -> GatherPlan:
        """Return the rows that a rank receives and sends in a node step of a fused call."""
        return make_gather_plan(self.plan, rank, PAD_ROWS, node_step, self.node_ranks)

    def moved(self, *, backward: bool) -> tuple[RingPlan, MaskAxis, int, int]:
        """Return the plan of a stepwise call, the side that moves, and the bytes of its rows and of their gradients.

        A backward moves the side with fewer bytes: keys and values, or q, o, do and two statistics of each query.
        """
        heads = self.heads
        keys = heads.kv_bytes(), heads.kv_bytes(4)
        queries = heads.batch * heads.heads * (4 * heads.head_dim + 8), heads.batch * heads.heads * heads.head_dim * 4
        if backward and sum(queries) < sum(keys):
            return make_plan(self.shards, self.shards, self.mask, "queries", self.node_ranks), "queries", *queries
        return self.plan, "keys", *keys


@lru_cache(maxsize=512)
def attention_time(call: RingCall, profile: Profile, direction: str) -> RingTime:
    """Return the time of a call's "forward" or "backward" on its slowest rank."""
    times = [_rank_time(call, profile, direction, rank) for rank in _ranks(call.planned)]
    return max(times, key=lambda time: time.device_ms)


def _grows(mask: MaskUnion) -> bool:
    """Return whether the work of a rank grows with the ranks at equal shards."""
    bounded = any(isinstance(x, Chunks) or (isinstance(x, Window) and x.left is not None) for x in mask.parts)
    return not bounded and mask.documents is None and not mask.is_union


def _ranks(call: RingCall) -> Iterator[int]:
    """Yield the ranks with most work, and with most and least rows to receive; one where all are about equal."""
    plan, order = call.plan, range(call.world_size)
    pairs = [sum(step.pairs for step in part.ring_steps if step is not None) for part in plan.ranks]
    rows = [part.received_rows for part in plan.ranks]
    yield (most := max(order, key=lambda r: (pairs[r], rows[r])))
    if max(pairs) > 1.02 * min(pairs):
        yield from {max(order, key=lambda r: rows[r]), min(order, key=lambda r: rows[r])} - {most}


def _rank_time(call: RingCall, profile: Profile, direction: str, rank: int) -> RingTime:
    """Return the time of one rank: the steps of its plan, the later ones repeated where the ring is larger."""
    planned = call.planned
    if call.world_size == 1:
        ms = launch_ms(*gathered(call, rank), call.heads, profile, direction)
        steps, tail_ms = [Step(ms, ms, 0)], 0.0
    elif call.schedule == "fused":
        steps, tail_ms = _fused(planned, profile, direction, rank)
    else:
        steps, tail_ms = _stepwise(planned, profile, direction, rank)
    repeated = 1.0
    inner: list[Step] = []
    if planned is not call and _grows(call.mask):
        # neither the steps of the first node nor those of the last one, which have no next to wait for
        edge = call.world_size // call.nodes if call.nodes > 1 and call.schedule != "fused" else 1
        inner = steps[edge:-edge]
        repeated = ((call.nodes if call.schedule == "fused" else call.world_size) - 2 * edge) / len(inner)
    device_ms, kernel_ms, received = (
        sum(getattr(step, name) for step in steps) + (repeated - 1) * sum(getattr(step, name) for step in inner)
        for name in ("ms", "kernel_ms", "received")
    )
    device_ms += tail_ms
    one, peer = (profile.host_us[f"{call.schedule}_{direction}{what}"] for what in ("", "_peer"))
    host_ms = (one + peer * (call.world_size - 1)) / 1e3
    return RingTime(device_ms, kernel_ms, host_ms, int(received))


@dataclass(frozen=True)
class Step:
    """A ring step or a node step of one rank: its duration, that of its kernels alone, and bytes that it receives."""

    ms: float
    kernel_ms: float
    received: float


def gathered(call: RingCall, rank: int, node_step: int = 0) -> tuple[RowMetadata, GatheredKeys]:
    """Return the tables of a fused launch: the rank's rows, and the keys of a node step."""
    steps = call.plan.ranks[rank].node_steps(node_step)
    keys = gathered_key(steps, call.gather_plan(rank, node_step), call.mask, "cpu")
    return stationary_side(call.shards[rank], call.mask, "cpu"), find(keys)


def _fused(call: RingCall, profile: Profile, direction: str, rank: int) -> tuple[list[Step], float]:
    """Return the node steps of a fused call, with pushes, gradient returns and crossings, and the milliseconds behind the last."""
    heads, part = call.heads, call.plan.ranks[rank]
    # keys move to the launch, and fp32 gradients of a backward from it
    key, grad = heads.kv_bytes(), heads.kv_bytes(4) if direction == "backward" else 0
    held = [part.held(node_step).num_rows for node_step in range(len(part.remote_shards))]
    crossing_ms = [profile.network.ms(own * (key + grad)) for own in held[1:]]
    steps: list[Step] = []
    for node_step, (own, crosses) in enumerate(zip(held, [*crossing_ms, 0.0], strict=True)):
        gather = call.gather_plan(rank, node_step)
        rows, keys = gathered(call, rank, node_step)
        margin = COMM_SMS if crosses else 0
        moved = sum(recv.num_rows for recv in gather.recvs)
        arrivals = torch.zeros(1, part.local_size, dtype=torch.float64, device="cpu")
        if moved and not (call.saved and grad):
            arrivals = _arrivals(call, profile, rank, node_step)
        returning_us = moved * grad / profile.copy_engine.gbps / 1e3
        exchange = Exchange(arrivals, profile.slowdown[f"fused_{direction}"], returning_us)
        alone = launch_ms(rows, keys, heads, profile, direction)
        ms = launch_ms(rows, keys, heads, profile, direction, exchange, margin)
        sent = sum(send.num_rows for send in gather.sends) * grad
        # own rows are packed; the owner adds the gradients of all readers, the last of which arrive late
        traffic, launches = 2 * own * key, 1
        if grad:
            traffic, launches = traffic + own * (grad + key) + sent, 2
        if len(held) > 1:
            # fp32 results of launches are written and merged
            traffic += rows.positions.shape[0] * heads.batch * heads.heads * heads.head_dim * 8
        ms += traffic / profile.memory_gbps / 1e6 + launches * profile.launch_us / 1e3
        ms += profile.semaphores_us.get(f"fused_{direction}", 0.0) / 1e3
        steps.append(Step(max(ms, crosses), alone, moved * key + sent))
    # the last sums return alone: two thirds of the bytes
    return steps, crossing_ms[-1] * 2 / 3 if grad and crossing_ms else 0.0


def _arrivals(call: RingCall, profile: Profile, rank: int, node_step: int) -> Tensor:
    """Return `groups steps`, microseconds from the launch at which pushed rows are there."""
    members = next(node for node in (call.node_ranks or (tuple(range(call.world_size)),)) if rank in node)
    mine = call.gather_plan(rank, node_step)
    heads, link = call.heads, profile.copy_engine
    groups = count_groups(heads.batch, heads.kv_heads, heads.width, 2, mine.slot_rows, link.gbps * 1e9)
    found = torch.zeros(groups, len(members), dtype=torch.float64, device="cpu")
    row, turn_us = heads.kv_bytes() / groups, profile.semaphores_us.get("turn", 0.0)
    if len(members) > MOST_RANKS:
        # rings of this size move equally many rows everywhere, so owners push in step
        now = 0.0
        for group in range(groups):
            for recv in mine.recvs:
                now += link.ms(recv.num_rows * row) * 1e3 + turn_us
                found[group, recv.step] = now
        return found
    sends = [
        (send.step, owner, send.peer, send.num_rows)
        for owner in members
        for send in call.gather_plan(owner, node_step).sends
    ]
    owner_free, reader_free = dict.fromkeys(members, 0.0), dict.fromkeys(members, 0.0)
    previous = dict[int, int]()
    for group in range(groups):
        for step, owner, peer, rows in sorted(sends):
            taken = turn_us if previous.get(peer, owner) != owner else 0.0
            end = max(owner_free[owner], reader_free[peer] + taken) + link.ms(rows * row) * 1e3
            owner_free[owner] = reader_free[peer] = end
            previous[peer] = owner
            if peer == rank:
                found[group, step] = end
    return found


def _stepwise(call: RingCall, profile: Profile, direction: str, rank: int) -> tuple[list[Step], float]:
    """Return the ring steps of a stepwise call, each as long as its kernel or the next transfer, and the time behind them."""
    heads = call.heads
    plan, moving, row, back = call.moved(backward=direction == "backward")
    part = plan.ranks[rank]
    stationary = stationary_side(call.shards[rank], call.mask, "cpu", moving)
    steps: list[Step] = []
    carried = heads.batch * heads.heads * (heads.head_dim + 2) * 8 * shard_len(call.shards[rank])
    inner = profile.nccl if call.schedule == "process_group" else profile.copy_engine
    for step, ring_step in enumerate(part.ring_steps):
        following = part.ring_steps[step + 1] if step + 1 < len(part.ring_steps) else None
        link = profile.network if call.nodes > 1 and (step + 1) % part.local_size == 0 else inner
        size = following.num_rows * row if following is not None else 0
        if direction == "backward" and ring_step is not None and step:
            size += ring_step.num_rows * back
        transfer = link.ms(size)
        ms = kernel_ms = 0.0
        if ring_step is not None and ring_step.pairs:
            side = find(side_key(ring_step.runs, call.mask, "cpu", "queries" if moving == "keys" else "keys"))
            rows, keys = (stationary, side) if moving == "keys" else (side, stationary)
            kernel_ms = launch_ms(rows, keys, heads, profile, direction)
            traffic = carried if direction == "forward" else ring_step.num_rows * back * 2
            launches = 0 if direction == "forward" else 2
            ms = kernel_ms + traffic / profile.memory_gbps / 1e6 + launches * profile.launch_us / 1e3
            ms *= profile.slowdown[f"{call.schedule}_{direction}"]
        steps.append(Step(max(ms, transfer), kernel_ms, size))
    if direction == "forward" or part.ring_steps[0] is None:
        return steps, 0.0
    return steps, inner.ms(part.ring_steps[0].num_rows * back)
