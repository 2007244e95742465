"""How wrong a result may be: the error budget against an exact answer.

Owns the one measure of error and the one rule for what is allowed, used by tests and by the check that users run on
their own machine. Knows nothing of attention.

Note [Budget]
    error(x)  = the largest absolute difference from the exact (fp64) answer
    budget    = 2 * error(low) + eps(low) * max |exact|
    where `low` is the same quantity computed from the same inputs by plain low-precision torch on one device, and eps
    the machine epsilon of its dtype: twice the error that everyone accepts already, and one rounding of the largest
    element.
    Nothing in it grows with the number of ranks or visits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def error(actual: Tensor, exact: Tensor) -> float:
    """The largest absolute difference, in fp64; infinities agree with themselves, NaN agrees with nothing.

    Args:
        actual: Any float dtype.
        exact: The same shape.

    Returns:
        The difference; inf when an element is NaN or only one of the two is infinite; 0.0 for empty tensors.

    Raises:
        ValueError: The shapes differ.
    """
    if actual.shape != exact.shape:
        raise ValueError(f"actual must have the shape of exact, {tuple(exact.shape)}, got {tuple(actual.shape)}")
    actual, exact = actual.detach().to(exact.device, torch.float64), exact.detach().double()
    difference = (actual - exact).abs().masked_fill(actual == exact, 0.0).nan_to_num(nan=math.inf)
    return difference.max().item() if difference.numel() else 0.0


def error_budget(exact: Tensor, low: Tensor) -> float:
    """The error that is allowed (Note [Budget]).

    Args:
        exact: The exact answer, fp64.
        low: The answer of a plain low-precision computation, in its own dtype.

    Returns:
        The largest absolute difference from `exact` that passes.
    """
    largest = exact.detach().double().abs().masked_fill(exact.isinf(), 0.0)
    largest = largest.max().item() if largest.numel() else 0.0
    return 2 * error(low, exact) + torch.finfo(low.dtype).eps * largest
