"""What every Hopper launch makes of a score and of optional tensors on its way to a kernel's arguments.

Owns the factors that kernels take in place of softmax_scale, softcap and patience, and strides of what may be absent.
Refuses to know which kernel they are for.
"""

from __future__ import annotations

import math

from torch import Tensor

from ringattn.kernels.contract import Arrivals, Score

LOG2E = math.log2(math.e)


def scale_and_cap(score: Score) -> tuple[float, float]:
    """The kernels' `scale` and `cap`."""
    if score.softcap > 0:
        return score.softmax_scale / score.softcap, score.softcap * LOG2E
    return score.softmax_scale * LOG2E, 0.0


def microseconds(arrivals: Arrivals) -> int:
    """How long kernels wait, in a unit in which every patience is of one width: a wider integer is another kernel."""
    return min(max(arrivals.patience // 1000, 1), 2**31 - 1)


def per_batch(x: Tensor | None) -> int:
    """The batch stride of a tensor with one row per batch element, or one row for all."""
    return 0 if x is None or x.shape[0] == 1 else x.stride(0)


def pair(x: Tensor | None) -> tuple[int, int]:
    """The strides of batch and head of a `b h s` tensor; zeros where it is absent."""
    return (0, 0) if x is None else (x.stride(0), x.stride(1))
