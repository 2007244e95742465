"""Kernels that are wrong by a thousandth."""

from __future__ import annotations

from typing import Any

import pytest

from ringattn.kernels.attention import eager


@pytest.fixture
def _wrong_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, **kwargs: Any) -> None:
        right(*args, **kwargs)
        args[9].dv.mul_(1.001)

    right = eager.backward
    monkeypatch.setattr(eager, "backward", wrong)
