"""Assignment and order of work: one ring step cut into tiles that are assigned to persistent programs.

Owns the integers: the blocks that a tile of stationary rows meets, those that need a mask, and the order of tiles of each program.
Made once per pair of sides on the host and kept as long as the sides live.

Note [Work]
    The stationary side is cut into tiles (queries for the forward and dq, keys for dk and dv); a list of segments of blocks of
    `block` rows of the other side streams past a tile. Per tile, segments that need a mask come first, then those in which
    every pair is visible. Blocks of a full segment lie inside one run and are visible to every row of the tile; a masked block
    may hold hidden pairs, rows beyond its run, and rows beyond the buffer.

    work      `entries 8` int32: head, row, segment, masked, full, masked_blocks, full_blocks, slot
              head: index into batch x heads of the stationary side (b * heads + h). row: first row of the tile.
              segment: index of the tile's first segment; `masked` segments, then `full` segments follow one another,
              and hold masked_blocks and full_blocks blocks. slot: -1, or where this part of a tile that was split among
              programs leaves its partial result.
    segments  `n 8` int32: row, blocks, begin, end, origin, stride, step, label
              row: first streamed row of the first block. begin, end: the rows of the run that the segment lies in; row x
              sits at global position origin + stride * x. A masked block's rows outside [begin, end) are hidden.
              step: 0, or the ring step of a remote source; Note [Sources]. label: term + 2^8 first + 2^20 end;
              Note [Pieces].
    starts    `programs + 1` int32: program p takes entries starts[p] .. starts[p + 1] - 1, in order.
    splits    `tiles 4` int32: head, row, first slot, parts: the tiles whose partial results a second kernel adds up.
    tiles     `entries 4` int32, only when the stationary side is gathered: side, step, begin, end of each entry's source:
              its index among the sides, its ring step, and its rows in the local or the remote buffer.
    split_tiles  `tiles 4` int32: the same of each line of splits.

    Every tile in `work` has at least one block; a tile that sees nothing is left out, or, when its rows must be written
    (`every_tile`), has one masked block in which everything is hidden.

Note [Pieces]
    Of a mask of several terms (Note [Terms] of interface.py) a tile has a piece per term, whose segments stand in one list. A term
    that a table of blocks cuts has one per set of rows and stretch of consecutive true blocks, and [begin, end) of its segments
    ends with the stretch. The sets are the whole tile, with the blocks that all its rows have, and the rows of each row
    of the table, with the blocks that are left. A masked segment takes its limits from the bounds of its term, and rows of the tile
    outside [first, end) of its label see nothing in it. Only a piece of the whole tile has full segments. The label is 0 where
    there is one piece per tile: one term without a table.

Note [Sources]
    Either side may be gathered: the rows of several owners (Note [Fused call] of interface.py). Local rows and remote rows are
    each counted from zero: those of step 0 in the local buffer, those of other steps in the remote buffer. Blocks begin inside
    their source; where they leave it they meet pad rows. A tile never holds rows of two sources. Streamed sources come in ring
    order, among masked segments and among full ones. Stationary sources are taken in the order of arrival: the longer half of
    the local buffer first, then remote rows group by group and step by step, then the rest of the local buffer, while the last
    contributions are sent to their owners. Where streamed sources arrive, a program takes tiles that meet local rows alone first,
    then the others in the order in which their last rows arrive. Tiles of the last group are assigned first: no program then
    holds two of them while another one has none. The other groups follow in order, and tiles of local rows fill up the
    programs. Only launches of short tiles are so ordered (SHORT): long ones wait for a small part of their time, and share
    the level-two cache best in the order of heads. A launch of short tiles that finds all rows there, as that of dq alone in a
    fused call, has the same order.

Note [Turns]
    An ordered plan has a program per tile, in the order of `work`, which is the same for the tiles of every head. Blocks begin at
    multiples of `block`, so that they meet whole or not at all. turns[turns[segment] + row // block] counts the contributions to
    the block at `row` that come before that of a segment, in the order of Note [Order of sums] of backward.py.

Note [Assignment]
    Cost of a tile: its blocks (times `repeats`) + OVERHEAD for prologue and epilogue. Heads form groups that stream no more
    than L2_BYTES together; within a group the longest tiles come first, heads change fastest among equals, and each goes to the
    program that is free first (longest processing time first). If the most loaded program would still exceed the mean by more
    than SLACK, tiles are split along the streamed side: under a limit a little above the mean, a tile that no program can take
    whole fills up the least loaded programs one after another, and its rest goes where it fits most tightly. A part costs
    EPILOGUE more than a tile, for its partial result, and the second launch costs MERGE: a split that gains less is not made.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from dataclasses import dataclass
from heapq import heapreplace
from typing import NamedTuple

import torch
from torch import Tensor

from ringattn.kernels.interface import GatheredKeys, RowMetadata
from ringattn.kernels.runtime.table_cache import upload, wait_for_uploads

L2_BYTES = 32 * 2**20
"""Of the level-two cache, what one group of heads may stream."""
OVERHEAD = 1
"""Prologue and epilogue of a tile, in blocks."""
EPILOGUE = 1
"""What a part costs beyond that, because it leaves a partial result in fp32, in blocks."""
MERGE = 3
"""The launch that adds partial results up, in blocks."""
MIN_PART = 4
"""Work of the smallest part, in blocks."""
SLACK = 0.02
"""Excess of the most loaded program over the mean that is left alone."""
NEIGHBOURS = 8
"""Tiles of one head that run side by side in an ordered launch, if there are heads enough: each adds behind the one before."""
LAG = 2
"""Blocks that a tile of an ordered launch begins behind the one before it: under a window few tiles of a head run side by side."""
LONG = 24_000
"""Blocks of a program, times the query heads of a group, from which the tiles of an ordered launch do not wait long for others of
their head: then they all run side by side, and share what they stream in the level-two cache."""
SHORT = 128
"""Blocks of the longest tile of launches in which tiles of streamed sources are taken in the order of arrival."""

FILLED = 0.9
"""Of the programs that run side by side, what one or two rounds of tiles of an ordered launch must fill."""

_FINEST = 0.005  # the first step from the mean to the limit that splitting keeps
_BEYOND = 2**31 - 1  # beyond every position

AnyRows = RowMetadata | GatheredKeys
"""One side of a launch."""

_lock = threading.Lock()  # the ranks of a simulated ring are threads


@dataclass(frozen=True)
class WorkPlan:
    """The work of one kernel launch (Note [Work]); int32 tensors on the device of the sides.

    Attributes:
        work: `entries 8`.
        segments: `n 8`.
        starts: `programs + 1`.
        splits: `tiles 4`; no rows when nothing is split.
        tiles: `entries 4`; no rows unless the stationary side is gathered.
        split_tiles: `tiles 4`; no rows unless the stationary side is gathered.
        turns: Note [Turns]; empty unless the plan is ordered.
        longest: Blocks that the program with the most of them loads, `repeats` counted.
        deepest: Blocks of the longest tile.
        shares_ends: Whether most tiles end at the last streamed row of others, as under causal masks and not under windows.
    """

    work: Tensor
    segments: Tensor
    starts: Tensor
    splits: Tensor
    tiles: Tensor
    split_tiles: Tensor
    turns: Tensor
    programs: int
    slots: int
    blocks: int
    longest: int
    deepest: int
    shares_ends: bool


class Shape(NamedTuple):
    """Parameters of a plan besides its sides.

    Attributes:
        batch: Batch elements.
        heads: Heads of the stationary side (query heads over the group size where a group is packed into a tile).
        tile: Stationary rows of a tile.
        block: Streamed rows of a block.
        programs: Persistent programs: multiprocessors of the device.
        streamed_bytes: What one head streams if it sees everything, for grouping heads.
        repeats: How often a tile walks its segments (the query heads of a group, for dk and dv).
        align: Segments begin at multiples of this many rows (bulk loads of row statistics need 4).
        every_tile: Tiles that see nothing are written too.
        split: Whether tiles may be split.
        groups: Groups of heads in which rows of a gathered side arrive; divides heads.
        ordered: A program per tile, and Note [Turns]; `align` is `block` then, and nothing is split.
    """

    batch: int
    heads: int
    tile: int
    block: int
    programs: int
    streamed_bytes: int
    repeats: int = 1
    align: int = 1
    every_tile: bool = True
    split: bool = True
    groups: int = 1
    ordered: bool = False


def schedule_tiles(stationary: AnyRows, streamed: AnyRows, shape: Shape) -> WorkPlan:
    """The plan of a launch whose tiles are rows of `stationary` and whose blocks are rows of `streamed`; cached.

    Visibility is read from `stationary.lo_host` and `hi_host`, positions from both run lists. A plan without work has no
    programs. Must not be asked for tiles that are written in any case (`every_tile`) when nothing streams past them.
    """
    wait_for_uploads(_sources(stationary)[0][0].runs.device)
    with _lock:
        of_pair = stationary.derived.setdefault(streamed, {})
        plan = of_pair.get(shape)
        if plan is None:
            # a plan outlives the call that makes it: its tensors must be ordinary even when made under inference mode
            with torch.inference_mode(False):
                plan = of_pair[shape] = _make(stationary, streamed, shape)
        return plan


@dataclass(frozen=True)
class _Tiles:
    """Segments of every tile, before heads: int64 on the CPU, tiles of all batch elements that have bounds of their own.

    Attributes:
        segments: `n 8`, as in Note [Work].
        table: `tiles 5`: segment, masked, full, masked_blocks, full_blocks, as in Note [Work].
        source: `tiles 4` of one batch element: side, step, begin, end, as in Note [Work].
    """

    segments: Tensor
    table: Tensor
    row: Tensor
    source: Tensor


@dataclass(frozen=True)
class _Assignment:
    """Assignment of entries, by their index, to programs.

    Attributes:
        owners: The program of each entry; -1 for those that are split.
        parts: Of the entries that are split: first block, blocks and program of each part.
        makespan: Cost of the most loaded program.
    """

    owners: list[int]
    parts: dict[int, list[tuple[int, int, int]]]
    makespan: int


def _make(stationary: AnyRows, streamed: AnyRows, shape: Shape) -> WorkPlan:
    assert shape.block % shape.align == 0, "blocks must keep the alignment of their segment"
    tiles = _meet(_sources(stationary), _sources(streamed), shape)
    per_batch = tiles.row.shape[0]
    shared = tiles.table.shape[0] == per_batch
    blocks = tiles.table[:, 3] + tiles.table[:, 4]

    # entries: tiles of all heads, in the order of Note [Assignment]
    heads = shape.batch * shape.heads
    backwards = shape.ordered and not _shares_ends(tiles, shape.block)
    number, of_heads = (torch.arange(n, device="cpu") for n in (per_batch, heads))
    if backwards:
        number = number.flip(0)
    tile, head = (x.flatten() for x in torch.meshgrid(number, of_heads, indexing="ij"))
    index = tile if shared else tile + head // shape.heads * per_batch
    count = blocks[index]
    groups = max(1, min(heads, -(-heads * shape.streamed_bytes // L2_BYTES)))
    longest = int(count.max()) if count.numel() else 0
    # the blocks of a tile come once for each head of the group
    met, deepest = int(count.sum()) * shape.repeats // shape.programs, longest * shape.repeats
    if shape.ordered and (met * shape.repeats < LONG or deepest < LAG * shape.programs):
        groups = max(1, min(groups, heads * NEIGHBOURS // shape.programs))
    turn = head // -(-heads // groups)
    waits = isinstance(streamed, GatheredKeys) and len(streamed.sides) > 1 and 0 < longest <= SHORT
    if isinstance(stationary, GatheredKeys):
        turn += _wave(tile, head, count, tiles, shape) * groups
    first = turn
    if waits:
        wave, first = _streamed_waves(index, head, tiles, shape)
        turn = turn + wave * groups
    order = torch.argsort(first if backwards else first * (longest + 1) + longest - count, stable=True)
    order = order[count[order] > 0]
    index, head, tile, count, turn = index[order], head[order], tile[order], count[order], turn[order]
    source = tiles.source[tile] if isinstance(stationary, GatheredKeys) else None

    turns = torch.zeros(0, dtype=torch.int64, device="cpu")
    if shape.ordered:
        assigned = _Assignment(list(range(count.shape[0])), {}, 0)
        turns = _turns(tiles, index[head % (heads if shared else shape.heads) == 0], shape)
    else:
        assigned = _assign(count, shape)
    place = torch.argsort(torch.argsort(turn, stable=True))
    device = _sources(stationary)[0][0].runs.device
    return _assemble(tiles, index, head, tiles.row[tile], source, assigned, place, turns, shape, device)


def fill_programs(tiles: int, programs: int) -> bool:
    """Return whether the tiles of an ordered launch leave few of the programs that run side by side without one.

    Example:
        >>> [fill_programs(tiles, 132) for tiles in (64, 128, 140, 256, 264)]
        [False, True, False, True, True]
    """
    rounds = tiles / programs
    return rounds >= min(2, FILLED * math.ceil(rounds))


def _turns(tiles: _Tiles, order: Tensor, shape: Shape) -> Tensor:
    """Return the table of Note [Turns]; order: the tiles, as programs take those of one head."""
    per_batch, each = tiles.row.shape[0], tiles.table[:, 1] + tiles.table[:, 2]
    place = torch.zeros_like(each)
    place[order] = torch.arange(order.shape[0], device="cpu")
    tile = torch.repeat_interleave(torch.arange(each.shape[0], device="cpu"), each)
    part = torch.arange(tile.shape[0], device="cpu")
    cut = (tiles.row + shape.tile > tiles.source[:, 3])[tile % per_batch]
    masked = part < tiles.table[tile, 0] + tiles.table[tile, 1]
    walk = 3 * part.shape[0] * place[tile] + torch.where(masked | cut, part.shape[0] + part, -part)
    blocks, row = tiles.segments[:, 1], tiles.segments[:, 0] // shape.block
    first = blocks.cumsum(0) - blocks
    of = torch.repeat_interleave(part, blocks)
    streamed = row[of] + torch.arange(of.shape[0], device="cpu") - first[of]
    streamed += (tile // per_batch)[of] * (1 + int(streamed.max()) if of.numel() else 0)
    # sorted by streamed block, then in the order in which contributions are made
    made = torch.argsort(walk[of], stable=True)
    made = made[torch.argsort(streamed[made], stable=True)]
    times = torch.bincount(streamed)
    turn = torch.empty_like(of)
    turn[made] = torch.arange(of.shape[0], device="cpu") - (times.cumsum(0) - times)[streamed[made]]
    return torch.cat((part.shape[0] + first - row, turn))


def _sources(sides: AnyRows) -> list[tuple[RowMetadata, int]]:
    return list(zip(sides.sides, sides.steps, strict=True)) if isinstance(sides, GatheredKeys) else [(sides, 0)]


def _wave(tile: Tensor, head: Tensor, count: Tensor, tiles: _Tiles, shape: Shape) -> Tensor:
    """Return the place of each entry in the order of arrival of gathered sources (Note [Sources])."""
    step = tiles.source[tile, 1]
    steps = int(step.max()) + 1 if step.numel() else 1
    group = head % shape.heads // (shape.heads // shape.groups)
    last = shape.groups * steps
    here = (step == 0).nonzero()[:, 0]
    longest_first = here[torch.argsort(-count[here], stable=True)]
    done = count[longest_first].cumsum(0)
    late = longest_first[done * 2 > done[-1:]]
    wave = torch.where(step == 0, 0, group * steps + step)
    if not shape.ordered:  # there, tiles of all heads come in one order
        wave[late] = last
    return wave


def _streamed_waves(index: Tensor, head: Tensor, tiles: _Tiles, shape: Shape) -> tuple[Tensor, Tensor]:
    """Return the place of each entry in the order in which programs take theirs, and in that of assignment (Note [Sources])."""
    each = tiles.table[:, 1] + tiles.table[:, 2]
    tile = torch.repeat_interleave(torch.arange(each.shape[0], device="cpu"), each)
    last = torch.zeros_like(each).scatter_reduce_(0, tile, tiles.segments[:, 6], "amax")[index]
    group, steps = head % shape.heads // (shape.heads // shape.groups), int(last.max()) + 1
    wave = torch.where(last > 0, group * steps + last, 0)
    return wave, torch.where(last > 0, ((group + 1) % shape.groups + 1) * steps - last, shape.groups * steps)


def _meet(stationary: list[tuple[RowMetadata, int]], streamed: list[tuple[RowMetadata, int]], shape: Shape) -> _Tiles:
    """The segments of every tile of all stationary sources."""
    batches = max(side.lo_host.shape[0] // side.terms for side, _ in stationary)
    per_batch = sum(-(-side.lo_host.shape[1] // shape.tile) for side, _ in stationary)
    row, source, pieces, tiles = [], [], [], 0
    for number, (side, step) in enumerate(stationary):
        assert side.lo_host.shape[0] == batches * side.terms, "either all sources have bounds per batch element or none"
        first, rows = side.run_list[0][0] if side.run_list else 0, side.lo_host.shape[1]
        begin_of = first + torch.arange(-(-rows // shape.tile), device="cpu") * shape.tile
        pieces += _cut_pieces(side, shape, tiles + torch.arange(batches, device="cpu")[:, None] * per_batch)
        row.append(begin_of)
        source.append(torch.tensor([[number, step, first, first + rows]], device="cpu").expand(begin_of.shape[0], -1))
        tiles += begin_of.shape[0]
    segments, table = _stream(_Pieces.concatenate(pieces), batches * per_batch, streamed, shape)
    return _Tiles(segments, table, torch.cat(row), torch.cat(source))


@dataclass(frozen=True)
class _Pieces:
    """Parts of tiles (Note [Pieces]): int64 on the CPU, one number a piece.

    Attributes:
        bounds: (any_lo, any_hi, full_lo, full_hi, hole_lo, hole_hi) of its rows, in global positions.
        window: (lo, hi): the global positions that it may meet.
        tile: Index of its tile, those of all batch elements counted.
        label: Column 7 of its segments.
    """

    bounds: tuple[Tensor, ...]
    window: tuple[Tensor, Tensor]
    tile: Tensor
    label: Tensor

    @classmethod
    def concatenate(cls, parts: list[_Pieces]) -> _Pieces:
        bounds = tuple(torch.cat(x) for x in zip(*(part.bounds for part in parts), strict=True))
        lo, hi = (torch.cat(x) for x in zip(*(part.window for part in parts), strict=True))
        return cls(bounds, (lo, hi), *(torch.cat([getattr(x, name) for x in parts]) for name in ("tile", "label")))


def _cut_pieces(side: RowMetadata, shape: Shape, first_tile: Tensor) -> list[_Pieces]:
    """The pieces of each term of one source; first_tile: index of its first tile in each batch element, `batches 1`."""
    assert first_tile.shape[0] in (1, shape.batch), "bounds are per batch element or shared by all"
    lo, hi = torch.broadcast_tensors(side.lo_host.to(torch.int64), side.hi_host.to(torch.int64))
    batches, rows = first_tile.shape[0], lo.shape[1]
    begin = torch.arange(-(-rows // shape.tile), device="cpu") * shape.tile
    tile = torch.arange(begin.shape[0], device="cpu")
    everywhere = torch.zeros_like(begin), torch.full_like(begin, _BEYOND)
    whole = side.terms == 1 and side.patterns is None
    pieces = []
    for term in range(side.terms):
        lines = slice(term * batches, (term + 1) * batches)
        which = -1 if side.patterns is None else side.patterns.of_term[term]
        if side.patterns is None or which < 0:
            bounds = _reduce_bounds(lo[lines], hi[lines], begin, begin + shape.tile)
            index, window, end = tile, everywhere, torch.full_like(begin, shape.tile)
            label = torch.zeros_like(begin) if whole else _label(term, begin - begin, end)
        else:
            sets, window = _cut_by_blocks(side, which, begin, shape)
            set_of, tile_of, first, end, is_whole = sets
            bounds = _reduce_bounds(lo[lines], hi[lines], first, end)
            bounds = _clip(tuple(x[:, set_of] for x in bounds), window, is_whole[set_of])
            index = tile_of[set_of]
            label = _label(term, (first - begin[tile_of])[set_of], (end - begin[tile_of])[set_of])
        tiles = first_tile + index
        within = window[0].expand_as(tiles).flatten(), window[1].expand_as(tiles).flatten()
        bounds = tuple(x.flatten() for x in bounds)
        pieces.append(_Pieces(bounds, within, tiles.flatten(), label.expand_as(tiles).flatten()))
    return pieces


def _label(term: int, first: Tensor, end: Tensor) -> Tensor:
    """Column 7 of segments; Note [Work]."""
    return term + first * 2**8 + end * 2**20


def _cut_by_blocks(
    side: RowMetadata, which: int, begin: Tensor, shape: Shape
) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """Sets of rows, and for each stretch of true blocks its set and its positions (Note [Pieces]).

    Returns:
        ((set of each stretch, then of each set: tile, first row, end row, whether it is a whole tile), (lo, hi)).
    """
    patterns = side.patterns
    assert patterns is not None
    rows, size, tiles = side.lo_host.shape[1], patterns.block_size, begin.shape[0]
    runs = [torch.arange(start, start + stride * n, stride, device="cpu") for _, n, start, stride in side.run_list]
    block = torch.cat(runs) // size
    new = torch.ones(rows, dtype=torch.bool, device="cpu")
    new[1:] = block[1:] != block[:-1]
    new[begin] = True
    first = new.nonzero()[:, 0]
    tile = first // shape.tile
    # what all rows of a tile see, as if they had one block, then what is left of each block's
    seen = patterns.tables_host[which].bool()[block[first]]
    common = torch.zeros(tiles, seen.shape[1], dtype=torch.int32, device="cpu").index_add_(0, tile, (~seen).int()) == 0
    padded = torch.nn.functional.pad(torch.cat((common, seen & ~common[tile])), (1, 1))
    set_of, edge = (padded[:, 1:] != padded[:, :-1]).nonzero(as_tuple=True)
    stretch_lo, stretch_hi = edge[0::2] * size, edge[1::2] * size
    end = torch.cat((first[1:], first.new_tensor([rows])))
    sets = (
        set_of[0::2],
        torch.cat((torch.arange(tiles, device="cpu"), tile)),
        torch.cat((begin, first)),
        torch.cat((begin + shape.tile, end)),
        torch.arange(tiles + first.shape[0], device="cpu") < tiles,
    )
    return sets, (stretch_lo, stretch_hi)


def _clip(bounds: tuple[Tensor, ...], window: tuple[Tensor, Tensor], whole: Tensor) -> tuple[Tensor, ...]:
    """Bounds cut by a window of positions, narrowed where the hole reaches over its end; only whole tiles have full blocks."""
    any_lo, any_hi, full_lo, full_hi, hole_lo, hole_hi = bounds
    lo, hi = window
    any_lo, any_hi = torch.maximum(any_lo, lo), torch.minimum(any_hi, hi)
    any_lo, any_hi = (
        torch.where(hole_lo <= any_lo, torch.maximum(any_lo, hole_hi), any_lo),
        torch.where(hole_hi >= any_hi, torch.minimum(any_hi, hole_lo), any_hi),
    )
    full_lo = torch.where(whole, torch.maximum(full_lo, lo), _BEYOND)
    full_hi = torch.where(whole, torch.minimum(full_hi, hi), 0)
    return any_lo, any_hi, full_lo, full_hi, hole_lo, hole_hi


def _stream(
    pieces: _Pieces, tiles: int, streamed: list[tuple[RowMetadata, int]], shape: Shape
) -> tuple[Tensor, Tensor]:
    """(segments, table) of tiles with these pieces."""
    block, align = shape.block, shape.align
    runs = [(*run, side.run_list[0][0], step) for side, step in streamed for run in side.run_list]
    of_runs = torch.tensor(runs, dtype=torch.int64, device="cpu").reshape(-1, 6).unbind(1)
    any_lo, any_hi = (x[:, None] for x in pieces.bounds[:2])
    last = of_runs[2] + (of_runs[1] - 1) * of_runs[3]
    piece, run = ((any_lo <= last) & (any_hi > of_runs[2]) & (any_lo < any_hi)).nonzero(as_tuple=True)
    offset, length, start, stride, floor, step = (x[run] for x in of_runs)

    def row_from(position: Tensor) -> Tensor:
        """The first row of a run at or after a piece's position, as a row of the buffer."""
        distance = torch.minimum((position[piece] - start).clamp(min=0), length * stride)
        return offset + (distance + stride - 1) // stride

    first, end, full_first, full_end, hole_first, hole_end = (row_from(x) for x in pieces.bounds)
    seen, has_full = end > first, full_end > full_first

    # the grid of blocks may begin anywhere: the fewest blocks come from the first row that is seen, or from any row that the
    # slack of the last block allows; among those, the most full blocks come from one that begins where the rows that all see
    # begin, or, when the slack does not reach so far, as early as it allows
    def blocks_from(row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(blocks, head blocks, full blocks) of the grid that begins at a row."""
        count = -((row - end) // block)
        head = -((row - full_first).clamp(max=0) // block)
        full = torch.where(has_full, (full_end - row - head * block) // block, 0).clamp(min=0)
        return count, torch.where(full > 0, head, count), full

    at_first = first - first % align
    aligned = full_first + (-full_first) % align
    at_full = aligned - -((first - aligned) // block) * block
    earliest = end + (at_first - end) // block * block
    row = at_first
    count, head, full = blocks_from(row)
    for candidate in (at_full, earliest + (-earliest) % align):
        other = blocks_from(candidate)
        fewer = (other[0] < count) | ((other[0] == count) & (other[2] > full))
        better = fewer & (candidate >= floor) & (candidate <= first)
        row = torch.where(better, candidate, row)
        count, head, full = (torch.where(better, y, x) for x, y in zip((count, head, full), other, strict=True))
    # where nothing is full, head and tail may lie on either side of a hole
    before_hole = -((row - torch.minimum(hole_first, end)).clamp(max=0) // block)
    head = torch.where(full > 0, head, before_hole)
    tail_row = row + (head + full) * block
    tail_row = torch.where(full > 0, tail_row, torch.maximum(tail_row, hole_end - hole_end % align))
    tail = -((tail_row - end).clamp(max=0) // block)
    numbers = torch.where(seen, torch.stack((head, tail, full)), 0)
    rows = torch.stack((row, tail_row, row + head * block))

    # in the order of tiles: head and tail of every run, then what is full of every run
    columns = 3 * len(runs) + 1
    is_full = torch.tensor([[0], [0], [1]], device="cpu").expand_as(numbers)
    column = torch.stack((2 * run, 2 * run + 1, 2 * len(runs) + run)) + 1
    of_tile = pieces.tile[piece]
    of_run = (*map(row_from, pieces.window), start - stride * offset, stride, step, pieces.label[piece])
    kept = numbers > 0
    segments = torch.stack((rows, numbers, *(x.expand_as(numbers) for x in of_run)), 2)[kept]
    kinds = torch.stack(((of_tile * columns + column)[kept], of_tile.expand_as(numbers)[kept], is_full[kept]), 1)
    if shape.every_tile and tiles:
        assert sum(n for _, n, *_ in runs) > 0, "a tile that nothing streams past has no work to plan"
        # sees nothing, or has only a hole here
        hidden = (torch.bincount(kinds[:, 1], minlength=tiles) == 0).nonzero()
        segments = torch.cat((segments, segments.new_tensor([[0, 1, 0, 0, 0, 1, 0, 0]]).expand(hidden.shape[0], -1)))
        kinds = torch.cat((kinds, torch.cat((hidden * columns, hidden, torch.zeros_like(hidden)), 1)))
    order = torch.argsort(kinds[:, 0], stable=True)
    segments, of_tile, is_full = segments[order], kinds[order, 1], kinds[order, 2]
    table = torch.zeros(4, tiles, dtype=torch.int64, device="cpu")
    for line, number in enumerate((1 - is_full, is_full, segments[:, 1] * (1 - is_full), segments[:, 1] * is_full)):
        table[line].index_add_(0, of_tile, number)
    each = table[0] + table[1]
    return segments, torch.stack((each.cumsum(0) - each, *table), 1)


def _reduce_bounds(lo: Tensor, hi: Tensor, first: Tensor, end: Tensor) -> tuple[Tensor, ...]:
    """(any_lo, any_hi, full_lo, full_hi, hole_lo, hole_hi) of sets of rows as `batches sets`, in global positions.

    Rows that see nothing do not widen `any`, and empty `full`; rows past the end touch neither. The hole is the longest
    stretch within `any` that no row sees, as where a tile holds the end of one run and the beginning of a distant one;
    a set without a hole has it beyond every position.

    Args:
        lo: `batches rows`.
        hi: Like lo.
        first: First row of each set.
        end: One past its last row; may lie past the end.
    """
    width = int((end - first).max()) if first.numel() else 1
    row = first[:, None] + torch.arange(width, device="cpu")
    exists = row < end.clamp(max=lo.shape[1])[:, None]
    row = row.clamp(max=max(lo.shape[1] - 1, 0))
    lo, hi = lo[:, row], hi[:, row]
    sees = exists & (lo < hi)
    seen_lo, seen_hi = torch.where(sees, lo, _BEYOND), torch.where(sees, hi, 0)
    hole_lo = seen_hi.cummax(2).values[:, :, :-1]
    hole_hi = seen_lo.flip(2).cummin(2).values.flip(2)[:, :, 1:]
    real = (hole_lo > 0) & (hole_hi < _BEYOND) & (hole_lo < hole_hi)
    # one column more, so that sets of one row have a hole to choose
    hole_lo, hole_hi = (
        torch.nn.functional.pad(torch.where(real, x, _BEYOND), (0, 1), value=_BEYOND) for x in (hole_lo, hole_hi)
    )
    longest = (hole_hi - hole_lo).argmax(2, keepdim=True)
    return (
        seen_lo.amin(2),
        seen_hi.amax(2),
        torch.where(exists, lo, 0).amax(2),
        torch.where(exists, hi, _BEYOND).amin(2),
        hole_lo.gather(2, longest)[:, :, 0],
        hole_hi.gather(2, longest)[:, :, 0],
    )


def _assign(blocks: Tensor, shape: Shape) -> _Assignment:
    """Assign entries of so many blocks, in this order (Note [Assignment])."""
    counts = blocks.tolist()
    costs = (blocks * shape.repeats + OVERHEAD).tolist()
    whole = _assign_within(counts, costs, sum(costs), shape)
    mean = sum(costs) / shape.programs
    if not shape.split or whole.makespan <= mean * (1 + SLACK):
        return whole
    least = max(mean, MIN_PART + OVERHEAD + EPILOGUE)
    excess = 0.0
    while True:
        limit = int(least * (1 + excess)) + 1
        if limit + MERGE >= whole.makespan:
            return whole
        assigned = _assign_within(counts, costs, limit, shape)
        if assigned.makespan <= limit:
            return assigned
        excess = max(_FINEST, excess * 1.5)


def _assign_within(counts: list[int], costs: list[int], limit: int, shape: Shape) -> _Assignment:
    """Assign entries as `_assign`, but split those that would lift the least loaded program over a limit.

    The makespan exceeds the limit if that cannot be kept.
    """
    programs = shape.programs
    loads = list(range(programs))  # a heap of load * programs + program
    owners: list[int] = []
    parts: dict[int, list[tuple[int, int, int]]] = {}
    top = limit * programs + programs  # beyond every load that is within the limit
    for entry, cost in enumerate(costs):
        least = loads[0]
        if least + cost * programs < top:
            owners.append(least % programs)
            heapreplace(loads, least + cost * programs)
            continue
        loads.sort()  # stays a heap
        cut = _cut(loads, counts[entry], limit, shape)
        if len(cut) > 1:
            parts[entry] = cut
            owners.append(-1)
        else:
            owners.append(cut[0][2])
    return _Assignment(owners, parts, max(loads) // programs)


def _cut(loads: list[int], blocks: int, limit: int, shape: Shape) -> list[tuple[int, int, int]]:
    """Cuts one tile into (first block, blocks, program) and updates the sorted loads.

    What fits nowhere goes to the least loaded program all the same, over the limit.
    """
    programs, repeats = shape.programs, shape.repeats
    smallest = -(-MIN_PART // repeats)
    fixed = OVERHEAD + EPILOGUE
    parts: list[tuple[int, int, int]] = []
    first = 0
    while first < blocks:
        rest = blocks - first
        # the most loaded program that can still take the rest
        place = bisect_right(loads, (limit - rest * repeats - fixed) * programs + programs - 1) - 1
        number = rest
        if place < 0:
            place = 0
            room = (limit - loads[0] // programs - fixed) // repeats
            if room >= smallest and rest >= 2 * smallest:
                number = min(room, rest - smallest)
        load = loads.pop(place)
        parts.append((first, number, load % programs))
        load += (number * repeats + fixed) * programs
        loads.insert(bisect_right(loads, load), load)
        first += number
    return parts


def _assemble(
    tiles: _Tiles,
    index: Tensor,
    head: Tensor,
    row: Tensor,
    source: Tensor | None,
    assigned: _Assignment,
    place: Tensor,
    turns: Tensor,
    shape: Shape,
    device: torch.device,
) -> WorkPlan:
    """The tables of a plan from an assignment; index, head, row, source: of every entry, index into the tiles.

    place: of every entry in the order in which programs take theirs.
    """
    owners = torch.tensor(assigned.owners, dtype=torch.int64, device="cpu")
    entries = torch.cat((head[:, None], row[:, None], tiles.table[index], torch.full_like(head, -1)[:, None]), 1)
    # lines of work, each with its program and its entry
    lines = torch.cat((entries, owners[:, None], torch.arange(len(owners), device="cpu")[:, None]), 1)[owners >= 0]
    of_parts: list[list[int]] = []
    segments: list[list[int]] = []
    splits: list[tuple[int, int, int, int]] = []
    for entry, parts in assigned.parts.items():
        of_head, of_row, segment, masked, full = entries[entry, :5].tolist()
        own = tiles.segments[segment : segment + masked + full].tolist()
        splits.append((of_head, of_row, len(of_parts), len(parts)))
        for first, number, program in parts:
            cut = _cut_segments(own, first, number, masked, shape.block)
            following = tiles.segments.shape[0] + len(segments), len(cut[0]), len(cut[1])
            numbers = [sum(x[1] for x in cut[kind]) for kind in (0, 1)]
            of_parts.append([of_head, of_row, *following, *numbers, len(of_parts), program, entry])
            segments += cut[0] + cut[1]
    lines = torch.cat((lines, torch.tensor(of_parts, dtype=torch.int64, device="cpu").reshape(-1, 10)))
    table, owners, sequence = lines[:, :8], lines[:, 8], lines[:, 9]
    unsorted = table[:, 5:7].sum(1)
    order = torch.argsort(owners * head.shape[0] + place[sequence], stable=True)
    table = table[order]
    taken = torch.bincount(owners, minlength=1)
    taken = taken[taken > 0]
    starts = torch.cat((torch.zeros(1, dtype=torch.int64, device="cpu"), taken.cumsum(0)))
    merged, added = (
        torch.tensor(x, dtype=torch.int64, device="cpu").reshape(-1, n) for x, n in ((splits, 4), (segments, 8))
    )
    none = torch.zeros(0, 4, dtype=torch.int64, device="cpu")
    sources = (none, none) if source is None else (source[sequence[order]], source[list(assigned.parts)])
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the plan of a call must be on the device before it is captured, got a first call during a capture; "
            "make the call once outside it"
        )
    uploaded = upload((table, torch.cat((tiles.segments, added)), starts, merged, *sources, turns), device)
    met = torch.zeros(max(shape.programs, owners.shape[0]), dtype=torch.int64, device="cpu").index_add_(
        0, owners, unsorted
    )
    longest, deepest = int(met.max()) * shape.repeats, int(unsorted.max()) if unsorted.numel() else 0
    return WorkPlan(
        *uploaded,
        programs=taken.shape[0],
        slots=len(of_parts),
        blocks=int(unsorted.sum()),
        longest=longest,
        deepest=deepest,
        shares_ends=_shares_ends(tiles, shape.block),
    )


def _shares_ends(tiles: _Tiles, block: int) -> bool:
    """Return whether tiles have at least twice the number of their different last streamed rows."""
    of_tile = torch.repeat_interleave(torch.arange(tiles.table.shape[0], device="cpu"), tiles.table[:, 1:3].sum(1))
    end = tiles.segments[:, 0] + tiles.segments[:, 1] * block
    last = torch.zeros(tiles.table.shape[0], dtype=torch.int64, device="cpu").scatter_reduce(0, of_tile, end, "amax")
    return 2 * last.unique().numel() <= last.numel()


def _cut_segments(
    segments: list[list[int]], first: int, number: int, masked: int, block: int
) -> tuple[list[list[int]], list[list[int]]]:
    """(masked, full) segments of `number` blocks of a tile from its block `first` on."""
    cut: tuple[list[list[int]], list[list[int]]] = ([], [])
    begin = 0
    for k, (row, blocks, *run) in enumerate(segments):
        a, e = max(first, begin), min(first + number, begin + blocks)
        if a < e:
            cut[k >= masked].append([row + (a - begin) * block, e - a, *run])
        begin += blocks
    return cut
