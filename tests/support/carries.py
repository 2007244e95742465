"""Carries and normalised partials of random scores, for tests of their merge."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ringattn.kernels.interface import SoftmaxState


def scores_of(b: int, s: int, h: int, t: int, dv: int) -> tuple[Tensor, Tensor]:
    """Return scores `b h s t` over a wide range, and values `b t h dv`, fp64."""
    generator = torch.Generator().manual_seed(t)
    scores = torch.randn(b, h, s, t, generator=generator, dtype=torch.float64) * 20
    return scores, torch.randn(b, t, h, dv, generator=generator, dtype=torch.float64)


def partial_of(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the normalised partial (o `b s h dv`, lse `b h s`) of some keys."""
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1), values), scores.logsumexp(-1)


def empty_state(b: int, s: int, h: int, dv: int, dtype: torch.dtype) -> SoftmaxState:
    """Return a carry full of NaN."""
    m, l = torch.full((2, b, h, s), math.nan, dtype=dtype)  # noqa: E741
    return SoftmaxState(m, l, torch.full((b, s, h, dv), math.nan, dtype=dtype))
