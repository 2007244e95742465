"""Kernels that are wrong by a thousandth."""

from __future__ import annotations

import pytest

from ringattn.kernels.attention.eager import EagerKernels
from ringattn.kernels.interface import BackwardStep, Grads


@pytest.fixture
def _wrong_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(kernels: EagerKernels, step: BackwardStep, grads: Grads) -> None:
        right(kernels, step, grads)
        assert grads.dv is not None
        grads.dv.mul_(1.001)

    right = EagerKernels.backward
    monkeypatch.setattr(EagerKernels, "backward", wrong)
