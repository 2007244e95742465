"""Asserts the error budget (ringattn.budget) and says by how much it was missed."""

from __future__ import annotations

from torch import Tensor

from ringattn.budget import error, error_budget


def assert_within_budget(
    actual: Tensor, exact_fp64: Tensor, low_precision: Tensor, name: str, *, unit: float = 1.0
) -> None:
    """Fails unless `actual` is as close to the exact answer as Note [Budget] asks.

    Args:
        actual: What is judged.
        exact_fp64: The exact answer.
        low_precision: A plain low-precision computation from the same inputs.
        name: Said in the failure.
        unit: Factor on the budget. For fp64 results no lower precision is at hand: pass an fp32 `low_precision` and the
            ratio of both machine epsilons.
    """
    found, allowed = error(actual, exact_fp64), unit * error_budget(exact_fp64, low_precision)
    assert found <= allowed, f"{name} must be within {allowed:.3e} of the exact answer, got {found:.3e}"
