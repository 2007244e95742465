"""Tensors whose elements lie further apart than 2^31: where offsets need 64 bits, without the memory of a tensor so large."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

HALF_WAY = 2**30 + 16
"""Elements; twice this is beyond 2^31, and a kernel is given it as a number of 32 bits."""


def at_strides(x: Tensor, strides: Sequence[int]) -> Tensor:
    """A copy with other strides. No page between its elements is ever touched, so none is taken from the machine."""
    room = torch.empty(1 + sum((n - 1) * stride for n, stride in zip(x.shape, strides, strict=True)), dtype=x.dtype)
    return room.as_strided(x.shape, strides).copy_(x)


def heads_apart(x: Tensor) -> Tensor:
    """A copy of `b s h d` whose heads lie far apart, as in memory that holds heads of many rows first."""
    _, _, h, d = x.shape
    return at_strides(x, (h * HALF_WAY, d, HALF_WAY, 1))


def leave_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the interpreter from copying whole storages onto themselves after a launch: every page would be touched."""
    from triton.runtime.interpreter import GridExecutor

    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
