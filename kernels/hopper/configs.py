"""How each Hopper kernel is shaped: one table, so that a measured choice is a changed number.

Owns tile sizes, pipeline depth and the switches that are kept for measuring. Refuses to know tensors and kernels.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass


@dataclass(frozen=True)
class ForwardConfig:
    """The shape of a forward launch.

    Attributes:
        consumers: Warpgroups of 64 query rows, 1 to 3.
        block_n: Key rows of a block.
        stages: Blocks of k, and of v, in shared memory.
        named: "Stage is empty" goes through named barriers; needs at most four stages.
        early: The first q . k of the next tile runs beneath the end of this one; q then takes two stages.
        turns: Consumers issue their products in turn, so that one multiplies while another exponentiates.
        held: q stays in registers, which spares shared memory a third of the reads of q . k.
        store: o leaves through the shared memory of its q tile and the copy engine, where the engine can address it.
        ahead: The limits of the next tile are computed at the end of this one, beneath its products.
        lazy: The accumulator is scaled only in warps in which a maximum has grown by more than 2^8.
    """

    consumers: int
    block_n: int
    stages: int
    named: bool = True
    early: bool = False
    turns: bool = False
    held: bool = False
    store: bool = False
    ahead: bool = False
    lazy: bool = False

    @property
    def turn(self) -> int:
        """The first named barrier of the turns; 0: none."""
        if not self.turns or self.consumers == 1:
            return 0
        first = FIRST_BARRIER + 2 * self.stages * self.named
        assert first + self.consumers <= 16, "named barriers must be at most eight; take fewer stages"
        return first

    @property
    def maxnreg(self) -> int:
        """Registers per thread at entry: what the register file holds for this many warps."""
        return {1: 232, 2: 168, 3: 128}[self.consumers]


FIRST_BARRIER = 8  # Note [Named barriers] in pieces.py
BUCKETS = (64, 128, 256)  # columns of a head in shared memory
MAX_HEAD_DIM = BUCKETS[-1]

# (columns of q and k, columns of v) -> plain scores, other scores (their operands need registers, so fewer consumers)
_FORWARD: dict[tuple[int, int], tuple[ForwardConfig, ForwardConfig]] = {
    (64, 64): (ForwardConfig(3, 128, 4, early=True, store=True, ahead=True), ForwardConfig(2, 128, 4)),
    (64, 128): (ForwardConfig(2, 128, 4), ForwardConfig(2, 64, 4)),
    (64, 256): (ForwardConfig(2, 64, 4), ForwardConfig(2, 64, 4)),
    (128, 64): (ForwardConfig(2, 128, 3), ForwardConfig(2, 64, 4)),
    (128, 128): (ForwardConfig(2, 128, 2, early=True, store=True, ahead=True, lazy=True), ForwardConfig(2, 64, 4)),
    (128, 256): (ForwardConfig(2, 64, 3), ForwardConfig(2, 64, 3)),
    (256, 64): (ForwardConfig(2, 64, 4), ForwardConfig(2, 64, 4)),
    (256, 128): (ForwardConfig(2, 64, 3), ForwardConfig(2, 64, 3)),
    (256, 256): (ForwardConfig(2, 64, 2, lazy=True), ForwardConfig(2, 64, 2)),
}


def columns_of(head_dim: int) -> int:
    """The columns that a head_dim takes in shared memory; the copy engine fills the rest with zeros."""
    return next(bucket for bucket in BUCKETS if head_dim <= bucket)


@functools.lru_cache
def choose_forward(head_dim: int, v_head_dim: int, plain: bool) -> ForwardConfig:
    """The configuration of a forward launch; plain: the score is q . k times a positive scale."""
    return _FORWARD[columns_of(head_dim), columns_of(v_head_dim)][0 if plain else 1]
