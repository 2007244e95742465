"""The error budget of a result against an exact answer, for tests and for the check that users run.

Note [Budget]
    Let `exact` be the fp64 answer, `low` the same quantity computed from the same inputs by plain torch in the dtype under
    test on one device, eps the machine epsilon of that dtype and eps_acc that of the accumulators (fp32, or fp64 for fp64).
    With noise = 16 * eps_acc * max(1, max|exact|), a result passes when
        rms(x - exact) <= 2 * rms(low - exact) + eps * rms(exact) + noise            typical elements
        max|x - exact| <= 4 * max|low - exact| + 4 * eps * max|exact| + noise        no element is far out
    That is twice the error of plain torch, and one rounding. A few lucky or unlucky roundings do not move the root mean
    square; the maximum, a noisy statistic of small tensors, has twice the room and finds a single wrong element. The noise
    lets a result differ from a reference that happens to cancel exactly (one key: dp - delta = 0), where a blockwise
    order of operations leaves a rounding. Nothing in it grows with the number of ranks or ring steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Budget:
    """Allowed root mean square and largest absolute value of the error of one tensor (Note [Budget])."""

    rms: float
    largest: float

    @classmethod
    def of(cls, exact: Tensor, low: Tensor, dtype: torch.dtype | None = None) -> Budget:
        """Return the budget that follows from two references.

        dtype, the one under test, is that of `low` by default. For fp64, which has no wider exact answer, pass an fp32
        `low`: its error is scaled by the ratio of the epsilons.
        """
        accepted = _difference(low, exact)
        size = exact.detach().double().abs()
        size = size.masked_fill(size.isinf(), 0.0)
        eps = torch.finfo(dtype or low.dtype).eps
        unit = eps / torch.finfo(low.dtype).eps
        noise = 16 * min(eps, torch.finfo(torch.float32).eps) * max(1.0, _largest(size))
        return cls(
            rms=2 * unit * _rms(accepted) + eps * _rms(size) + noise,
            largest=4 * unit * _largest(accepted) + 4 * eps * _largest(size) + noise,
        )

    def ratio(self, actual: Tensor, exact: Tensor) -> float:
        """Return the used part of the budget; at most 1 passes; inf when an element is NaN or wrongly infinite."""
        found = _difference(actual, exact)
        if _largest(found) == math.inf:
            return math.inf
        return max(_rms(found) / self.rms, _largest(found) / self.largest)


def error(actual: Tensor, exact: Tensor) -> float:
    """Return the largest absolute difference, in fp64; 0.0 for empty tensors.

    Infinities agree with themselves, NaN agrees with nothing: the difference is inf where an element is NaN or only one of
    the two is infinite.
    """
    return _largest(_difference(actual, exact))


def _difference(actual: Tensor, exact: Tensor) -> Tensor:
    if actual.shape != exact.shape:
        raise ValueError(f"actual must have the shape of exact, {tuple(exact.shape)}, got {tuple(actual.shape)}")
    actual, exact = actual.detach().to(exact.device, torch.float64), exact.detach().double()
    return (actual - exact).abs().masked_fill(actual == exact, 0.0).nan_to_num(nan=math.inf, posinf=math.inf)


def _largest(x: Tensor) -> float:
    return x.max().item() if x.numel() else 0.0


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item() if x.numel() else 0.0
