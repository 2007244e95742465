"""Rotations, against complex numbers in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ringattn.kernels.rotate import has_kernel, rotate

SHAPES = [(1, 4, 1, 8), (5, 3, 3, 64), (3, 32, 8, 128), (2, 5, 2, 2)]


def draw(n: int, h: int, hk: int, d: int, dtype: torch.dtype, *, joined: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q and k, side by side in one tensor or each by itself, and angles `n d/2`."""
    generator = torch.Generator().manual_seed(n + h)
    both = torch.randn(n, (h + hk) * d, generator=generator).to(dtype)
    q, k = both[:, : h * d].unflatten(1, (h, d)), both[:, h * d :].unflatten(1, (hk, d))
    angles = 10 * torch.rand(n, d // 2, generator=generator)
    return (q, k, angles) if joined else (q.transpose(0, 1).contiguous().transpose(0, 1), k.contiguous(), angles)


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """X, whose halves are the real and imaginary parts of numbers, turned by angles."""
    points = (
        torch.complex(*x.double().chunk(2, -1))
        * torch.polar(torch.ones_like(angles.double()), angles.double())[:, None]
    )
    return torch.cat((points.real, points.imag), -1)


def check(found: tuple[Tensor, Tensor], q: Tensor, k: Tensor, angles: Tensor) -> None:
    """What was found is turned but for a rounding."""
    for x, y in zip(found, (q, k), strict=True):
        assert x.is_contiguous()
        assert x.dtype == y.dtype
        off = (x.double() - turned(y, angles)).abs()
        assert bool((off <= torch.finfo(x.dtype).eps * (y.double().norm(dim=-1, keepdim=True) + 1)).all())


def halves(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of both halves."""
    both = torch.cat((angles, angles), -1)
    return both.cos(), both.sin()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_turned(shape: tuple[int, int, int, int], dtype: torch.dtype):
    q, k, angles = draw(*shape, dtype, joined=True)
    cos, sin = halves(angles)
    assert not has_kernel(q, k, cos, sin), "on a CPU"
    check(rotate(q, k, cos, sin), q, k, angles)
