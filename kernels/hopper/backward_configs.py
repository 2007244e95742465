"""How the backward by keys is shaped: one table, so that a measured choice is a changed number.

Owns block sizes and schedules of the fused backward and of its keys half, and which scores the fused kernel is for.
Refuses to know tensors and kernels.

Note [Scores for the pair]
    The fused kernel at 128 columns holds dk and dv (128 registers), S and dP (64) and half of dq; what a score needs beyond
    that must fit into the rest. A soft cap, slopes or a key bias fit. A sum over queries for the gradient of a key bias makes
    the assembler serialise the products (C7512), one over keys for the gradient of slopes spills in every block, and so do
    three terms at once. These go to the keys half and the rows kernel instead: seven products instead of five, with all loops
    in registers. At 64 columns everything fits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass


@dataclass(frozen=True)
class BackwardConfig:
    """The shape of one launch.

    Attributes:
        block: Query rows of a block: 64 or 128, without dq also 32.
        pin: Start values get registers of their own before the first product, so that both products are in flight at once.
        persistent: As many programs as multiprocessors, which take several tiles each; else one tile per program.
        near: Addresses of K and V are made where products use them, in uniform registers; else they are kept through all
            loops. Costs some 40 uniform instructions a block.
        staged: dk and dv in fp32 leave through the buffer of dq and the bulk copy engine, not from registers.
    """

    block: int
    pin: bool = False
    persistent: bool = True
    near: bool = True
    staged: bool = False


# (padded head_dim, padded v_head_dim) -> plain scores, other scores (their terms need registers, so smaller blocks)
_BACKWARD: dict[tuple[int, int], tuple[BackwardConfig, BackwardConfig]] = {
    (64, 64): (BackwardConfig(128), BackwardConfig(64)),
    (128, 64): (BackwardConfig(64, near=False), BackwardConfig(64)),
    (128, 128): (BackwardConfig(64, near=False), BackwardConfig(64)),
}
_EVERY_TERM = BackwardConfig(32)  # keys half at 128 columns: three terms spill in blocks of 64


@functools.lru_cache
def choose_backward(
    head_dim: int, v_head_dim: int, plain: bool, terms: int = 0, *, rows: bool = True
) -> BackwardConfig:
    """The configuration of a launch.

    Args:
        head_dim: Of q and k, up to 128.
        v_head_dim: Of v, up to 128.
        plain: The score is q . k times a positive scale.
        terms: How many of soft cap, slopes and key bias the score has.
        rows: dq is made too.
    """
    dims = padded_dims(head_dim, v_head_dim)
    if terms == 3 and dims[0] == 128 and not rows:
        return _EVERY_TERM
    return _BACKWARD[dims][0 if plain else 1]


def is_for_pair(head_dim: int, v_head_dim: int, terms: int, wants_terms: bool) -> bool:
    """Whether the keys half and the rows kernel take a score that may be summed in any order; Note [Scores for the pair].

    Args:
        head_dim: Of q and k.
        v_head_dim: Of v.
        terms: How many of soft cap, slopes and key bias the score has.
        wants_terms: Whether a gradient of slopes or key bias is wanted.
    """
    return padded_dims(head_dim, v_head_dim)[0] == 128 and (wants_terms or terms == 3)


def padded_dims(head_dim: int, v_head_dim: int) -> tuple[int, int]:
    """What the kernel makes of two head dims of up to 128; a narrow q beside a wide v is treated as wide."""
    dv = 64 if v_head_dim <= 64 else 128
    return (64 if head_dim <= 64 and dv == 64 else 128), dv
