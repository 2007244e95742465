"""Who computes what, and in which order: the work of one visit cut into tiles and dealt to persistent programs.

Owns the integers: which blocks a tile of stationary rows meets, which of them need a mask, and which program takes which
tile when. Made once per pair of sides on the host and kept as long as the sides live. Refuses to know tensors of values.

Note [Work]
    The stationary side is cut into tiles (queries for the forward and dq, keys for dk and dv); what streams past a tile is
    a list of segments of blocks of `block` rows of the other side. Per tile, segments that need a mask come first, then
    those in which every pair is visible. Blocks of a full segment lie inside one run and are visible to every row of the
    tile; a masked block may hold hidden pairs, rows beyond its run, and rows beyond the buffer.

    work      `entries 8` int32: head, row, segment, masked, full, masked_blocks, full_blocks, slot
              head: index into batch x heads of the stationary side (b * heads + h). row: first row of the tile.
              segment: index of the tile's first segment; `masked` segments, then `full` segments follow one another,
              and hold masked_blocks and full_blocks blocks. slot: -1, or where this part of a tile that was split among
              programs leaves its partial result.
    segments  `n 8` int32: row, blocks, begin, end, origin, stride, 0, 0
              row: first streamed row of the first block. begin, end: the rows of the run that the segment lies in; row x
              sits at global position origin + stride * x. A masked block's rows outside [begin, end) are hidden.
    starts    `programs + 1` int32: program p takes entries starts[p] .. starts[p + 1] - 1, in order.
    splits    `tiles 4` int32: head, row, first slot, parts: the tiles whose partial results a second kernel adds up.

    Every tile in `work` has at least one block; a tile that sees nothing is left out, or, when its rows must be written
    all the same (`every_tile`), has one masked block in which everything is hidden.

Note [Dealing]
    Cost of a tile: its blocks + OVERHEAD for prologue and epilogue. Heads go in groups that stream no more than L2_BYTES
    together, so that what they stream stays in the level-two cache; within a group the longest tiles come first, and each
    goes to the program that is free first (the greedy longest-processing-time rule). If the most loaded program would
    still exceed the mean by more than SLACK, the longest or last tiles are split along the streamed side.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ringattn.kernels.contract import Side


@dataclass(frozen=True)
class WorkPlan:
    """The work of one kernel launch (Note [Work]); int32 tensors on the device of the sides.

    Attributes:
        work: `entries 8`.
        segments: `n 8`.
        starts: `programs + 1`.
        splits: `tiles 4`; no rows when nothing is split.
        programs: Persistent programs.
        slots: Partial results that the launch leaves.
        blocks: Blocks of all entries together, for tests and for judging balance.
    """

    work: Tensor
    segments: Tensor
    starts: Tensor
    splits: Tensor
    programs: int
    slots: int
    blocks: int


@dataclass(frozen=True)
class Shape:
    """What a plan depends on besides its sides.

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


def make_plan(stationary: Side, streamed: Side, shape: Shape) -> WorkPlan:
    """The plan of a launch whose tiles are rows of `stationary` and whose blocks are rows of `streamed`; cached.

    Visibility is read from `stationary.lo_host` and `hi_host`, positions from both run lists.
    """
    raise NotImplementedError
