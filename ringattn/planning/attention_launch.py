"""Duration of one attention kernel launch, from the work that the tile scheduler assigns to its programs.

The plan of a launch is the library's own (`tile_scheduler.make_plan`). A program runs its tiles in order; a block of remote rows
waits for the time at which they arrive.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ringattn.kernels.attention.hopper.configs import FUSED_MAX_HEAD_DIM, choose_dkv, choose_forward, columns_of
from ringattn.kernels.attention.hopper.tile_scheduler import AnyRows, Shape, WorkPlan, make_plan
from ringattn.kernels.interface import GatheredKeys
from ringattn.planning.profile import KernelCost, Profile

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
class Launch:
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


def make_launch(
    rows: AnyRows, keys: AnyRows, heads: Heads, profile: Profile, direction: str, groups: int = 1, sm_margin: int = 0
) -> Launch | None:
    """Return the launch of a "forward" or "backward"; None: it has no rows."""
    if rows_of(rows) == 0 or rows_of(keys) == 0:
        return None
    heads, times = _fewer(heads, max(rows_of(rows), rows_of(keys)), groups)
    programs = max(1, profile.multiprocessors - sm_margin)
    group = heads.heads // heads.kv_heads
    if direction == "forward":
        config = choose_forward(heads.head_dim, heads.head_dim, True)
        shape = Shape(
            batch=heads.batch,
            heads=heads.heads,
            tile=64 * config.consumers,
            block=config.block_n,
            programs=programs,
            streamed_bytes=rows_of(keys) * heads.width * 2 // group,
        )
        return Launch(make_plan(rows, keys, shape), shape, False, profile.launch_us, times)
    tiles = choose_dkv(heads.head_dim, heads.head_dim, True)
    accumulates = heads.head_dim <= FUSED_MAX_HEAD_DIM
    shape = Shape(
        batch=heads.batch,
        heads=heads.kv_heads,
        tile=tiles.tile,
        block=tiles.block,
        programs=programs,
        streamed_bytes=group * rows_of(rows) * (heads.width * 2 + 4 * heads.head_dim * accumulates),
        repeats=group,
        align=4,
        split=tiles.split,
        groups=groups,
    )
    # the kernels before and after it stream o, do, dq and its fp32 sums once
    row_bytes = heads.batch * rows_of(rows) * heads.heads * times * 14 * heads.head_dim
    other_us = row_bytes / profile.memory_gbps / 1e3 + 3 * profile.launch_us
    return Launch(make_plan(keys, rows, shape), shape, True, other_us, times)


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
    arrivals: Tensor | None = None,
    sm_margin: int = 0,
) -> float:
    """Return the milliseconds of a launch; arrivals: `groups steps`, microseconds at which rows are there."""
    launch = make_launch(rows, keys, heads, profile, direction, 1 if arrivals is None else arrivals.shape[0], sm_margin)
    if launch is None:
        return 0.0
    costs = profile.forward if direction == "forward" else profile.backward
    us = programs_us(launch, costs[columns_of(heads.head_dim)], heads, keys, arrivals)
    ms = (us + launch.other_us) / 1e3
    return ms * profile.sustained_factor(ms)


def measure_programs(
    rows: AnyRows, keys: AnyRows, heads: Heads, profile: Profile, direction: str
) -> tuple[tuple[float, float, float], float]:
    """Return blocks, tiles and masked blocks of the program with most of them, and microseconds of the kernels beside it."""
    launch = make_launch(rows, keys, heads, profile, direction)
    assert launch is not None, "a measured launch has rows"
    owner, blocks, masked = _entries(launch)
    counts = torch.zeros(launch.work.programs, 3, dtype=torch.float64, device="cpu")
    counts.index_add_(0, owner, torch.stack((blocks, torch.ones_like(blocks), masked), 1))
    most = counts[int((counts[:, 0] + counts[:, 1]).argmax())].tolist()
    return (most[0] * launch.times, most[1] * launch.times, most[2] * launch.times), launch.other_us


def split_bytes(rows: AnyRows, keys: AnyRows, heads: Heads, profile: Profile) -> float:
    """Return the bytes of partial gradients of tiles that a backward splits among programs."""
    launch = make_launch(rows, keys, heads, profile, "backward")
    return 0.0 if launch is None else launch.work.slots * launch.shape.tile * heads.width * 4.0


def _entries(launch: Launch) -> tuple[Tensor, Tensor, Tensor]:
    """Return the program, the blocks and the masked blocks of every entry, repeats counted."""
    table = launch.work.work.to(torch.float64)
    counts = (launch.work.starts[1:] - launch.work.starts[:-1]).to(torch.int64)
    owner = torch.repeat_interleave(torch.arange(launch.work.programs, device="cpu"), counts)
    repeats = launch.shape.repeats
    return owner, (table[:, 5] + table[:, 6]) * repeats, table[:, 5] * repeats


def programs_us(launch: Launch, cost: KernelCost, heads: Heads, keys: AnyRows, arrivals: Tensor | None) -> float:
    """Return the microseconds of the program that ends last; see `launch_ms` for arrivals."""
    work, shape, stationary = launch.work, launch.shape, launch.stationary
    if work.work.shape[0] == 0:
        return 0.0
    owner, blocks, masked = _entries(launch)
    counts = (work.starts[1:] - work.starts[:-1]).to(torch.int64)
    entry_us = cost.tile + blocks * cost.block + masked * cost.masked
    total = torch.zeros(work.programs, dtype=torch.float64, device="cpu").index_add_(0, owner, entry_us)
    repeated = (launch.times - 1) * float(total.max())
    if arrivals is None or arrivals.numel() == 0 or not isinstance(keys, GatheredKeys):
        return float(total.max()) + repeated
    last = float(arrivals.max())
    kv_heads = heads.kv_heads // launch.times
    group_size = max(1, kv_heads // arrivals.shape[0])
    head = work.work[:, 0].to(torch.int64) % shape.heads
    kv_head = head if stationary else head * kv_heads // shape.heads
    group = (kv_head // group_size).clamp(max=arrivals.shape[0] - 1)
    now = torch.zeros(work.programs, dtype=torch.float64, device="cpu")
    done = torch.zeros_like(now)
    segments = work.segments.to(torch.int64)
    for turn in range(int(counts.max())):
        waiting = (turn < counts) & (now < last)
        if not bool(waiting.any()):
            break
        index = (work.starts[:-1].to(torch.int64) + turn).clamp(max=work.work.shape[0] - 1)
        now = torch.where(waiting, now + cost.tile, now)
        if stationary:
            step = work.tiles[index, 1].to(torch.int64)
            now = torch.where(waiting, torch.maximum(now, arrivals[group[index], step]), now)
            now = torch.where(waiting, now + entry_us[index] - cost.tile, now)
        else:
            first, number = work.work[index, 2].to(torch.int64), work.work[index, 3:5].sum(1)
            masked_of = work.work[index, 3]
            for k in range(int(number.max())):
                there = waiting & (k < number)
                line = segments[(first + k).clamp(max=segments.shape[0] - 1)]
                block_us = cost.block + (k < masked_of) * cost.masked
                begin = torch.maximum(now, arrivals[group[index], line[:, 6]])
                now = torch.where(there, begin + line[:, 1] * block_us, now)
        done = torch.where(waiting, done + entry_us[index], done)
    return float((now + total - done).max()) + repeated


def rows_of(side: AnyRows) -> int:
    """Return the rows of one side of a launch."""
    if isinstance(side, GatheredKeys):
        return side.local_rows + side.remote_rows
    return sum(length for _, length, _, _ in side.run_list)
