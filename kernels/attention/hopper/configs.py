"""Shapes of the Hopper kernels: tile sizes and pipeline depth. A measured choice is a changed number."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class ForwardConfig:
    """The shape of a forward launch.

    Attributes:
        consumers: Warpgroups of 64 query rows, 1 to 3.
        block_n: Key rows of a block.
        stages: Blocks of k, and of v, in shared memory; at most four.
        early: The first q . k of the next tile runs beneath the end of this one; q then takes two stages.
        store: o leaves through the shared memory of its q tile and the copy engine, where it fits and the engine can address it.
        ahead: The limits of the next tile are computed at the end of this one, beneath its products.
        lazy: The accumulator is scaled only in warps in which a maximum has grown by more than 2^8.
    """

    consumers: int
    block_n: int
    stages: int
    early: bool = False
    store: bool = False
    ahead: bool = False
    lazy: bool = False

    def __post_init__(self) -> None:
        """Refuse more stages than there are names."""
        assert self.stages <= 4, "named barriers must be at most eight; take fewer stages"

    @property
    def maxnreg(self) -> int:
        """Registers per thread at entry: what the register file holds for this many warps."""
        return {1: 232, 2: 168, 3: 128}[self.consumers]


@dataclass(frozen=True)
class DkvConfig:
    """The shape of a launch of the kernel that makes dk and dv, and may make dq.

    Attributes:
        block: Query rows of a block: 64 or 128, without dq also 32.
        late_addresses: Addresses of K and V are made where products use them, in uniform registers; else they are kept through all
            loops. Costs some 40 uniform instructions a block.
        held: Columns of V that dP reads from registers instead of shared memory, where the score is plain.
        tile: Keys of a tile.
    """

    block: int
    late_addresses: bool = True
    held: int = 0
    tile: ClassVar[int] = 128


@dataclass(frozen=True)
class WideDkvConfig:
    """The shape of a launch of the kernel that makes dk and dv of wide heads.

    Attributes:
        held: K and V stay in registers.
        stages: Blocks of q and do in shared memory, 2 to 4; from 3 on dv of a block is made beside the scores of the next.
        tile: Keys of a tile.
        block: Query rows of a block.
    """

    held: bool = False
    stages: int = 2
    tile: ClassVar[int] = 64
    block: ClassVar[int] = 64


@dataclass(frozen=True)
class DqConfig:
    """The shape of a launch of the kernel that makes dq alone.

    Attributes:
        block: Keys per step.
        k_stages: Blocks of K in flight.
        v_stages: Blocks of V in flight.
        late: dq of a block is made beneath the exponentials of the next; takes three stages of K.
    """

    block: int
    k_stages: int
    v_stages: int
    late: bool = False


BUCKETS = (64, 128, 256)  # columns of a head in one piece
FUSED_MAX_HEAD_DIM = 128
"""Largest head_dim of the kernel that makes dq, dk and dv."""

# (columns of q and k, columns of v) -> plain scores, other scores (their operands need registers, so fewer consumers)
_FORWARD: dict[tuple[int, int], tuple[ForwardConfig, ForwardConfig]] = {
    (64, 64): (ForwardConfig(3, 128, 4, early=True, store=True, ahead=True), ForwardConfig(2, 128, 4)),
    (64, 128): (ForwardConfig(2, 128, 4), ForwardConfig(2, 64, 4)),
    (64, 256): (ForwardConfig(2, 64, 4), ForwardConfig(2, 64, 4)),
    (96, 128): (ForwardConfig(2, 128, 3, early=True, store=True, ahead=True, lazy=True), ForwardConfig(2, 64, 4)),
    (128, 64): (ForwardConfig(2, 128, 3), ForwardConfig(2, 64, 4)),
    (128, 128): (ForwardConfig(2, 128, 2, early=True, store=True, ahead=True, lazy=True), ForwardConfig(2, 64, 4)),
    (128, 256): (ForwardConfig(2, 64, 3), ForwardConfig(2, 64, 3)),
    (192, 128): (ForwardConfig(2, 128, 2, store=True, ahead=True, lazy=True), ForwardConfig(2, 64, 4)),
    (192, 192): (ForwardConfig(2, 64, 3, store=True, ahead=True, lazy=True), ForwardConfig(2, 64, 3)),
    (256, 64): (ForwardConfig(2, 64, 4), ForwardConfig(2, 64, 4)),
    (256, 128): (ForwardConfig(2, 64, 3), ForwardConfig(2, 64, 3)),
    (256, 256): (ForwardConfig(2, 64, 2, store=True, ahead=True, lazy=True), ForwardConfig(2, 64, 2)),
}


PANELS = {64: 64, 96: 32, 128: 128, 192: 64, 256: 256}
"""Columns of a tile to those of the equal panels that it is made of, since the compiler wants powers of two."""
WIDE_COLUMNS = (64, 128, 192, 256)
"""Columns of a tile in the kernel of dk and dv of wide heads, whose panels have at least 64."""


def columns_of(head_dim: int, among: Iterable[int] = BUCKETS) -> int:
    """The columns that a head_dim takes in shared memory; the copy engine fills the rest with zeros."""
    return next(columns for columns in among if head_dim <= columns)


def choose_forward(head_dim: int, v_head_dim: int, dot_only: bool) -> tuple[tuple[int, int], ForwardConfig]:
    """The columns of q and k and of v of a forward launch, and its configuration.

    The table's narrowest pair of columns that holds both head dims; dot_only: the score is q . k times a positive scale.
    """
    columns = min((pair for pair in _FORWARD if head_dim <= pair[0] and v_head_dim <= pair[1]), key=sum)
    return columns, _FORWARD[columns][0 if dot_only else 1]


# (padded head_dim, padded v_head_dim) -> plain scores, other scores (their terms need registers, so smaller blocks)
_DKV: dict[tuple[int, int], tuple[DkvConfig, DkvConfig]] = {
    (64, 64): (DkvConfig(128), DkvConfig(64)),
    (128, 64): (DkvConfig(64, late_addresses=False, held=64), DkvConfig(64)),
    (128, 128): (DkvConfig(64, late_addresses=False, held=64), DkvConfig(64)),
}
_EVERY_TERM = DkvConfig(32)  # without dq at 128 columns: three terms spill in blocks of 64


def choose_dkv(
    head_dim: int, v_head_dim: int, dot_only: bool, extras: int = 0, *, want_dq: bool = True
) -> DkvConfig | WideDkvConfig:
    """The configuration of a launch that makes dk and dv."""
    if max(head_dim, v_head_dim) > FUSED_MAX_HEAD_DIM:
        held = max(head_dim, v_head_dim) <= 192
        both = columns_of(head_dim, WIDE_COLUMNS) + columns_of(v_head_dim, WIDE_COLUMNS)
        # with a soft cap, three stages of 192/192 columns keep two numbers of a loop in local memory
        return WideDkvConfig(held=held, stages=3 if both <= (320 if extras else 384) else 2)
    dims = padded_dims(head_dim, v_head_dim)
    if extras == 3 and dims[0] == 128 and not want_dq:
        return _EVERY_TERM
    # scores over 96 of 128 columns are two products, beside which addresses and V do not fit into registers
    whole = all(scored_columns(*head) == head[1] for head in zip((head_dim, v_head_dim), dims, strict=True))
    return _DKV[dims][0 if dot_only and whole else 1]


def choose_dq(columns: int, v_columns: int, extras: int) -> DqConfig:
    """The configuration of a launch that makes dq alone.

    Scores with a soft cap or terms of their own hold more numbers per pair: smaller blocks keep them in registers.
    """
    if columns == 192 and v_columns <= 128 and not extras:
        return DqConfig(64, 3, 3, late=True)
    columns = max(columns, v_columns)
    if columns <= 64:
        return DqConfig(64, 3, 3) if extras else DqConfig(128, 3, 3)
    if columns <= 128:
        return DqConfig(32, 3, 3) if extras == 3 else DqConfig(64, 3, 3) if extras else DqConfig(128, 2, 2)
    if columns <= 192:
        return DqConfig(32, 3, 3) if extras else DqConfig(64, 3, 2)
    return DqConfig(32, 3, 2) if extras else DqConfig(64, 2, 1)


def scored_columns(head_dim: int, columns: int) -> int:
    """Return how many columns of a head the scores of the fused kernel are sums over: not the last quarter where it is padding."""
    return 96 if columns == 128 and head_dim <= 96 else columns


def is_for_pair(head_dim: int, v_head_dim: int, extras: int, wants_extra_grads: bool) -> bool:
    """Return whether a pair of kernels takes a score that may be summed in any order.

    The fused kernel at 128 columns holds dk and dv (128 registers), S and dP (64) and half of dq. A soft cap, slopes or a key
    bias fit beside that. A sum over queries for the gradient of a key bias makes the assembler serialise the products (C7512);
    one over keys for the gradient of slopes spills in every block, and so do three terms at once.
    """
    return padded_dims(head_dim, v_head_dim)[0] == 128 and (wants_extra_grads or extras == 3)


def padded_dims(head_dim: int, v_head_dim: int) -> tuple[int, int]:
    """Pad two head dims of up to 128 as the kernel does; a narrow q beside a wide v is treated as wide."""
    dv = 64 if v_head_dim <= 64 else 128
    return (64 if head_dim <= 64 and dv == 64 else 128), dv
