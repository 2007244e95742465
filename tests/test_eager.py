from __future__ import annotations

import pytest
import torch

from ringattn.kernels import eager
from tests.kernel_conformance import CASES, Case, run_case


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_backward_stay_within_budget(case: Case, dtype: torch.dtype):
    run_case(eager, case, dtype, "cpu")
