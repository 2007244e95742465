"""Duration of one attention kernel launch, from the work that the tile scheduler assigns to its programs.

The plan of a launch is the library's own (`tile_scheduler.make_plan`). A program runs its tiles in order; a block of remote rows
waits for the time at which they arrive, and gradients of remote rows for the link.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ringattn.kernels.attention.hopper.configs import FUSED_MAX_HEAD_DIM, choose_dkv, choose_forward, columns_of
from ringattn.kernels.attention.hopper.tile_scheduler import AnyRows, Shape, WorkPlan, schedule_tiles
from ringattn.kernels.interface import GatheredKeys
from ringattn.sizing.profile import KernelCost, Profile

MOST_ROWS = 2**20
"""Rows times heads of a launch beyond which only a share of the heads is scheduled."""


@dataclass(frozen=True)
class Heads:
    """Heads of one attention on one rank, and batch elements; values are as wide as keys."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Columns of a key and a value together."""
        return 2 * self.head_dim

    def kv_bytes(self, element: int = 2) -> int:
        """Bytes of the keys and values of one row."""
        return self.batch * self.kv_heads * self.width * element


@dataclass(frozen=True)
class PredictedLaunch:
    """One launch: the work of its programs, and microseconds of the kernels beside it.

    Attributes:
        stationary: The gathered rows are the tiles' own, not those that stream past them.
        times: How often the work is repeated: of launches with many tiles only some heads are scheduled.
    """

    work: WorkPlan
    shape: Shape
    stationary: bool
    other_us: float
    times: int = 1


@dataclass(frozen=True)
class Exchange:
    """Transfers beside a fused launch.

    Attributes:
        arrivals: `groups steps`, microseconds from the launch at which remote rows are there.
        slowdown: Factor of the programs' work, but not of their waits.
        returning_us: Microseconds in which the link carries all gradients that the launch writes to other ranks.
    """

    arrivals: Tensor
    slowdown: float = 1.0
    returning_us: float = 0.0


def make_launch(
    rows: AnyRows, keys: AnyRows, heads: Heads, profile: Profile, direction: str, groups: int = 1, sm_margin: int = 0
) -> PredictedLaunch | None:
    """Return the launch of a "forward" or "backward"; None: it has no rows."""
    if rows_of(rows) == 0 or rows_of(keys) == 0:
        return None
    heads, times = _fewer(heads, max(rows_of(rows), rows_of(keys)), groups)
    programs = max(1, profile.multiprocessors - sm_margin)
    group = heads.heads // heads.kv_heads
    if direction == "forward":
        _, config = choose_forward(heads.head_dim, heads.head_dim, True)
        tile, streamed_bytes = 64 * config.consumers, rows_of(keys) * heads.width * 2 // group
        shape = Shape(heads.batch, heads.heads, tile, config.block_n, programs, streamed_bytes, groups=groups)
        return PredictedLaunch(schedule_tiles(rows, keys, shape), shape, False, profile.launch_us, times)
    tiles = choose_dkv(heads.head_dim, heads.head_dim, True)
    accumulates = heads.head_dim <= FUSED_MAX_HEAD_DIM
    streamed_bytes = group * rows_of(rows) * (heads.width * 2 + 4 * heads.head_dim * accumulates)
    sizes = heads.batch, heads.kv_heads, tiles.tile, tiles.block, programs, streamed_bytes
    shape = Shape(*sizes, repeats=group, align=4, groups=groups)
    # the kernels before and after it stream o, do, dq and its fp32 sums once
    row_bytes = heads.batch * rows_of(rows) * heads.heads * times * 14 * heads.head_dim
    other_us = row_bytes / profile.memory_gbps / 1e3 + 3 * profile.launch_us
    return PredictedLaunch(schedule_tiles(keys, rows, shape), shape, True, other_us, times)


def _fewer(heads: Heads, rows: int, groups: int) -> tuple[Heads, int]:
    """Return a share of the heads whose tiles keep programs busy, and how often it is repeated, for launches of many tiles."""
    times = 1
    while heads.kv_heads // times % (2 * groups) == 0 and rows * heads.heads // times > MOST_ROWS:
        times *= 2
    if times == 1:
        return heads, 1
    return replace(heads, heads=heads.heads // times, kv_heads=heads.kv_heads // times), times


def launch_ms(
    rows: AnyRows,
    keys: AnyRows,
    heads: Heads,
    profile: Profile,
    direction: str,
    exchange: Exchange | None = None,
    sm_margin: int = 0,
) -> float:
    """Return the milliseconds of a launch; exchange: of a fused call that fetches rows."""
    groups = 1 if exchange is None else exchange.arrivals.shape[0]
    launch = make_launch(rows, keys, heads, profile, direction, groups, sm_margin)
    if launch is None:
        return 0.0
    cost = cost_of(profile, direction, heads.head_dim)
    ms = (programs_us(launch, cost, heads, keys) + launch.other_us) / 1e3
    if exchange is None:
        return ms * profile.sustained_factor(ms)
    factor = exchange.slowdown * profile.sustained_factor(ms * exchange.slowdown)
    slower = KernelCost(*(us * factor for us in vars(cost).values()))
    return (programs_us(launch, slower, heads, keys, exchange) + launch.other_us * factor) / 1e3


def cost_of(profile: Profile, direction: str, head_dim: int) -> KernelCost:
    """Return the cost of the measured head_dim that holds this one; a block of the forward costs what its own columns do."""
    measured = columns_of(head_dim)
    cost = getattr(profile, direction)[measured]
    if direction != "forward":
        return cost
    columns, _ = choose_forward(head_dim, head_dim, True)
    return replace(cost, block=cost.block * sum(columns) / (2 * measured))


def measure_programs(
    rows: AnyRows, keys: AnyRows, heads: Heads, profile: Profile, direction: str
) -> tuple[tuple[float, float], float]:
    """Return blocks and tiles of the program with most of them, and microseconds of the kernels beside it."""
    launch = make_launch(rows, keys, heads, profile, direction)
    assert launch is not None, "a measured launch has rows"
    owner, blocks = _entries(launch)
    counts = torch.zeros(launch.work.programs, 2, dtype=torch.float64, device="cpu")
    counts.index_add_(0, owner, torch.stack((blocks, torch.ones_like(blocks)), 1))
    most = counts[int(counts.sum(1).argmax())].tolist()
    return (most[0] * launch.times, most[1] * launch.times), launch.other_us


def split_bytes(rows: AnyRows, keys: AnyRows, heads: Heads, profile: Profile) -> float:
    """Return the bytes of partial gradients of tiles that a backward splits among programs."""
    launch = make_launch(rows, keys, heads, profile, "backward")
    return 0.0 if launch is None else launch.work.slots * launch.shape.tile * heads.width * 4.0


def _entries(launch: PredictedLaunch) -> tuple[Tensor, Tensor]:
    """Return the program and the blocks of every entry, repeats counted."""
    table = launch.work.work.to(torch.float64)
    counts = (launch.work.starts[1:] - launch.work.starts[:-1]).to(torch.int64)
    owner = torch.repeat_interleave(torch.arange(launch.work.programs, device="cpu"), counts)
    return owner, (table[:, 5] + table[:, 6]) * launch.shape.repeats


def programs_us(
    launch: PredictedLaunch, cost: KernelCost, heads: Heads, keys: AnyRows, exchange: Exchange | None = None
) -> float:
    """Return the microseconds of the program that ends last."""
    work = launch.work
    if work.work.shape[0] == 0:
        return 0.0
    owner, blocks = _entries(launch)
    entry_us = cost.tile + blocks * cost.block
    total = torch.zeros(work.programs, dtype=torch.float64, device="cpu").index_add_(0, owner, entry_us)
    longest = float(total.max())
    if exchange is None or not isinstance(keys, GatheredKeys):
        return longest * launch.times
    kv_heads, groups = heads.kv_heads // launch.times, exchange.arrivals.shape[0]
    head = work.work[:, 0].to(torch.int64) % launch.shape.heads
    kv_head = head if launch.stationary else head * kv_heads // launch.shape.heads
    group = (kv_head // max(1, kv_heads // groups)).clamp(max=groups - 1)
    if launch.stationary:
        returning_us = exchange.returning_us / launch.times
        end = _stationary_us(
            work, cost, entry_us, exchange.arrivals[group, work.tiles[:, 1].to(torch.int64)], returning_us
        )
        return end + (launch.times - 1) * max(longest, returning_us)
    return _streamed_us(work, cost, entry_us, exchange.arrivals, group, total) + (launch.times - 1) * longest


def _streamed_us(
    work: WorkPlan, cost: KernelCost, entry_us: Tensor, arrivals: Tensor, group: Tensor, total: Tensor
) -> float:
    """Return the end of the last program, where each block of remote rows waits for their arrival; total: without waits."""
    counts = (work.starts[1:] - work.starts[:-1]).to(torch.int64)
    last, segments = float(arrivals.max()), work.segments.to(torch.int64)
    now = torch.zeros(work.programs, dtype=torch.float64, device="cpu")
    done = torch.zeros_like(now)
    for turn in range(int(counts.max())):
        waiting = (turn < counts) & (now < last)
        if not bool(waiting.any()):
            break
        index = (work.starts[:-1].to(torch.int64) + turn).clamp(max=work.work.shape[0] - 1)
        now = torch.where(waiting, now + cost.tile, now)
        first, number = work.work[index, 2].to(torch.int64), work.work[index, 3:5].sum(1)
        for k in range(int(number.max())):
            there = waiting & (k < number)
            line = segments[(first + k).clamp(max=segments.shape[0] - 1)]
            begin = torch.maximum(now, arrivals[group[index], line[:, 6]])
            now = torch.where(there, begin + line[:, 1] * cost.block, now)
        done = torch.where(waiting, done + entry_us[index], done)
    return float((now + total - done).max())


def _stationary_us(work: WorkPlan, cost: KernelCost, entry_us: Tensor, arrived: Tensor, returning_us: float) -> float:
    """Return the end of the last program, where each tile waits for its rows, and its gradients for the link.

    Gradients of remote tiles leave in the order in which tiles end, and hold up their programs.
    """
    remote = work.tiles[:, 1] > 0
    store_us = returning_us / max(1, int(remote.sum()))
    begins, busy_us = arrived.tolist(), (entry_us - cost.tile).tolist()
    stores, starts = remote.tolist(), work.starts.tolist()

    def end_of(entry: int, now: float) -> float:
        return max(now + cost.tile, begins[entry]) + busy_us[entry]

    # the end of each program's tile, its index, and the program's first index behind it
    ends = [(end_of(first, 0.0), first, stop) for first, stop in itertools.pairwise(starts) if first < stop]
    heapq.heapify(ends)
    last = link_free = 0.0
    while ends:
        now, entry, stop = ends[0]
        if stores[entry]:
            now = link_free = max(now, link_free) + store_us
        last = max(last, now)
        if entry + 1 < stop:
            heapq.heapreplace(ends, (end_of(entry + 1, now), entry + 1, stop))
        else:
            heapq.heappop(ends)
    return last


def rows_of(side: AnyRows) -> int:
    """Return the rows of one side of a launch."""
    if isinstance(side, GatheredKeys):
        return side.local_rows + side.remote_rows
    return sum(length for _, length, _, _ in side.run_list)
