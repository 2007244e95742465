"""Sums of what came home: `own` and every part, in order, and nothing that belongs to nobody."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ringattn.kernels.comm import grad_reduce

WIDTHS = [(0, 64, 64), (1, 64, 64), (3, 40, 96), (7, 128, 64)]
"""(parts, d, dv) of the tests."""


def contributions(parts: int, b: int, t: int, hk: int, width: int) -> tuple[Tensor, list[Tensor], Tensor]:
    """(own, parts, rows): rows of regions that no key row names are NaN."""
    generator = torch.Generator().manual_seed(parts)
    grad_buffer_rows = t + 5
    rows = torch.full((parts, t), -1, dtype=torch.int32)
    regions = [torch.full((b, grad_buffer_rows, hk, width), math.nan) for _ in range(parts + 1)]
    regions[0][:, :t] = torch.randn(b, t, hk, width, generator=generator)
    for region, row in zip(regions[1:], rows, strict=True):
        there = torch.randperm(t, generator=generator)[: t // 2].sort().values
        row[there] = torch.arange(len(there), dtype=torch.int32)
        region[:, : len(there)] = torch.randn(b, len(there), hk, width, generator=generator)
    return regions[0], regions[1:], rows


def assert_added_in_order(
    reduce_kv_grads: Callable[..., None], dtype: torch.dtype, parts: int, d: int, dv: int
) -> None:
    """Holds an implementation to the sum, row by row, to the bit."""
    b, t, hk = 2, 37, 3
    own, others, rows = contributions(parts, b, t, hk, d + dv)
    dk, dv_out = (torch.full((b, t, hk, x), math.nan, dtype=dtype) for x in (d, dv))
    reduce_kv_grads(dk, dv_out, own, others, rows)
    for x in range(t):
        total = own[:, x]
        for part, row in zip(others, rows[:, x].tolist(), strict=True):
            if row >= 0:
                total = total + part[:, row]
        assert torch.equal(dk[:, x], total[..., :d].to(dtype))
        assert torch.equal(dv_out[:, x], total[..., d:].to(dtype))


def assert_biases_are_added_in_order(reduce_key_bias_grads: Callable[..., None], parts: int) -> None:
    """Likewise, over heads too."""
    b, t, hk = 2, 300, 3
    own, others, rows = contributions(parts, b, t, hk, 1)
    own, *others = (x[..., 0].transpose(1, 2).contiguous() for x in (own, *others))
    found = torch.full((b, t), math.nan)
    reduce_key_bias_grads(found, own, others, rows)
    for x in range(t):
        total = own[:, 0, x] + own[:, 1, x] + own[:, 2, x]
        for part, row in zip(others, rows[:, x].tolist(), strict=True):
            if row >= 0:
                total = total + (part[:, 0, row] + part[:, 1, row] + part[:, 2, row])
        assert torch.equal(found[:, x], total)


@pytest.mark.parametrize("parts", [0, 1, 3])
def test_biases_are_added_in_order(parts: int) -> None:
    assert_biases_are_added_in_order(grad_reduce.reduce_key_bias_grads, parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("parts", "d", "dv"), WIDTHS)
def test_contributions_are_added_in_order(dtype: torch.dtype, parts: int, d: int, dv: int) -> None:
    assert_added_in_order(grad_reduce.reduce_kv_grads, dtype, parts, d, dv)


def test_a_rank_without_keys_has_nothing_to_add() -> None:
    dk = torch.empty(1, 0, 2, 64)
    grad_reduce.reduce_kv_grads(dk, dk.clone(), torch.empty(1, 4, 2, 128), [], torch.empty(0, 0, dtype=torch.int32))
    grad_reduce.reduce_key_bias_grads(torch.empty(1, 0), torch.empty(1, 2, 4), [], torch.empty(0, 0, dtype=torch.int32))
