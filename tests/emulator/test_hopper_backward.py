from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("triton")

from ringattn.kernels import eager
from ringattn.kernels.contract import KernelSet
from ringattn.kernels.hopper.backward_configs import BackwardConfig
from tests.kernel_conformance import CASES, Case, run_case

launch: Any = pytest.importorskip("ringattn.kernels.hopper.backward_launch")


def served(case: Case) -> bool:
    wide = max(case.head_dim, case.v_head_dim or 0) > 128
    return not (wide or case.dropout_p or case.bias)


def kernels(config: BackwardConfig | None = None) -> KernelSet:
    """The backward of this room behind a forward that needs no emulator."""

    def backward(*args: Any) -> None:
        launch.launch_backward(*args, config=config)

    return cast(KernelSet, SimpleNamespace(forward=eager.forward, delta=launch.launch_delta, backward=backward))


@pytest.mark.parametrize("case", [case for case in CASES if served(case)], ids=str)
def test_backward_stays_within_budget(case: Case):
    run_case(kernels(), case, torch.bfloat16, "cpu")
