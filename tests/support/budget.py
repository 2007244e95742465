"""Asserts the error budget (ringattn.numerics.error_budget) and says by how much it was missed."""

from __future__ import annotations

import torch
from torch import Tensor

from ringattn.numerics.error_budget import Budget, error


def assert_within_budget(
    actual: Tensor, exact_fp64: Tensor, low_precision: Tensor, name: str, dtype: torch.dtype | None = None
) -> None:
    """Fails unless `actual` is as close to the exact answer as Note [Budget] asks.

    Args:
        actual: What is judged.
        exact_fp64: The exact answer.
        low_precision: A plain low-precision computation from the same inputs.
        name: Said in the failure.
        dtype: The dtype under test, where it is wider than that of `low_precision`.
    """
    budget = Budget.of(exact_fp64, low_precision, dtype)
    ratio = budget.ratio(actual, exact_fp64)
    assert ratio <= 1, f"{name} uses {ratio:.2f} of {budget}: largest error {error(actual, exact_fp64):.3e}"
