"""Arguments that the launchers of attention kernels share: strides, scales, and which scores are plain."""

from __future__ import annotations

from torch import Tensor

from ringattn.kernels.constants import LOG2E
from ringattn.kernels.interface import GatheredKeys, RowMetadata, Score

RAISED_BITS = 15
"""Note [Raised weights]
    Weights of float16 are multiplied by 2^15 before they are rounded for dv += p do: p <= 1, so that they stay below 65504, and
    keep all digits down to 2^-29 in place of 2^-14. dv is divided by it once, exactly. bfloat16 needs none. The portable forward
    has m 15 below the largest score for the same reason: l and the output, which are relative to m, grow alike.
"""
LEAST_SCALE = 1e-30  # a smaller softmax_scale may be 0 in fp32, which makes NaN of a hidden pair: -inf times 0


def strides(x: Tensor | None, unit: int = 1) -> tuple[int, int, int]:
    """Return the strides of batch, row and head of a `b s h d` tensor, in units of elements; zeros where it is absent."""
    return (0, 0, 0) if x is None else (x.stride(0) // unit, x.stride(1) // unit, x.stride(2) // unit)


def pair(x: Tensor | None) -> tuple[int, int]:
    """Return the first two strides of a tensor; zeros where it is absent."""
    return (0, 0) if x is None else (x.stride(0), x.stride(1))


def per_batch(x: Tensor | None) -> int:
    """Return the batch stride of a tensor with one row per batch element, or one row for all."""
    return 0 if x is None or x.shape[0] == 1 else x.stride(0)


def bound_strides(side: RowMetadata | GatheredKeys) -> tuple[int, int, int | None, int | None]:
    """Return the kernels' `lo_sb`, `hi_sb`, `lo_st` and `hi_st`: strides of batch elements, and of terms if there are several."""
    of, lo, hi = side.sides[0] if isinstance(side, GatheredKeys) else side, side.lo.stride(0), side.hi.stride(0)
    batches = side.lo.shape[0] // of.terms
    lo_sb, hi_sb = (0, 0) if batches == 1 else (lo, hi)
    if of.terms == 1 and of.patterns is None:
        return lo_sb, hi_sb, None, None
    return lo_sb, hi_sb, batches * lo, batches * hi


def scale_and_cap(score: Score) -> tuple[float, float]:
    """Return `scale` and `cap` of all kernels: in log2 units scores are q . k * scale, or cap * tanh(q . k * scale)."""
    if score.softcap > 0:
        return score.softmax_scale / score.softcap, score.softcap * LOG2E
    return score.softmax_scale * LOG2E, 0.0


def is_dot_only(score: Score, least: float = LEAST_SCALE) -> bool:
    """Return whether the score is q . k times a positive scale of at least `least`."""
    absent = score.alibi_slopes is None and score.key_bias is None and score.bias is None
    return absent and not score.softcap > 0 and score.dropout_p == 0 and score.softmax_scale >= least


def padded(head_dim: int) -> int:
    """Return the columns that a head dim takes in a tile: a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())
