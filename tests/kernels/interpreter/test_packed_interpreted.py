"""The Triton kernels of packed parts equal the plain ones."""

from __future__ import annotations

import math

import pytest
import torch

from ringattn.kernels.partials import packed
from tests.kernels.contract.test_packed import draw_parts, finish

SIZES = [(1, 1, 1, 1), (2, 3, 4, 40), (1, 16, 3, 128), (3, 1, 8, 64)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_parts_are_merged_alike(count: int, sizes: tuple[int, int, int, int]) -> None:
    from ringattn.kernels.partials import packed_triton

    b, s, h, dv = sizes
    stack, _, _ = draw_parts(count, count, *sizes)
    mine, theirs = torch.full_like(stack[0], math.nan), torch.full_like(stack[0], math.nan)
    packed_triton.merge_parts(stack, mine, b * s * h, dv)
    packed.merge_parts(stack, theirs, b * s * h, dv)
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_finish_alike(sizes: tuple[int, int, int, int], with_sinks: bool, dtype: torch.dtype) -> None:
    from ringattn.kernels.partials import packed_triton

    b, s, h, dv = sizes
    stack, _, _ = draw_parts(7, 3, *sizes)
    sinks = torch.randn(h, generator=torch.Generator().manual_seed(0)) * 4 if with_sinks else None
    o, lse = torch.full((b, s, h, dv), math.nan, dtype=dtype), torch.full((b, h, s), math.nan)
    packed_triton.finish_parts(stack, b * s * h, dv, sinks, o, lse)
    eps = torch.finfo(dtype).eps
    for x, y in zip((o, lse), finish(stack, sizes, sinks, dtype), strict=True):
        torch.testing.assert_close(x, y, rtol=eps if x is o else 1e-6, atol=1e-6)
