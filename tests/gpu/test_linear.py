"""The kernels of flash-linear-attention compute the recurrences of a rank as plain torch does."""

from __future__ import annotations

import pytest
import torch

from ringattn.integrations.linear.fla_scan import fla_kernels, scan_rows_fla
from ringattn.integrations.linear.local_scan import scan_rows
from tests.support.linear_scan import CASES, scan_errors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fla_is_within_the_rounding_of_bf16(
    case: tuple[int, str, int, int, tuple[int, ...] | None], gated: bool
) -> None:
    if fla_kernels() is None:
        pytest.skip("flash-linear-attention is not installed")
    for name, error in scan_errors(scan_rows_fla, case, gated, "cuda", torch.bfloat16).items():
        # it rounds states, weights and outputs of each chunk to bf16
        assert error <= 4 * torch.finfo(torch.bfloat16).eps, (name, error)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_plain_torch_on_a_gpu_is_within_single_precision(
    case: tuple[int, str, int, int, tuple[int, ...] | None], gated: bool
) -> None:
    for name, error in scan_errors(scan_rows, case, gated, "cuda", torch.float32).items():
        assert error <= 64 * torch.finfo(torch.float32).eps, (name, error)
