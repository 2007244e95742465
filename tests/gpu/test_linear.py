"""The kernels of flash-linear-attention compute the recurrences of a rank as plain torch does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ringattn import Ring
from ringattn.integrations.linear import gated_delta_rule, mamba2_scan
from ringattn.integrations.linear.fla_scan import fla_kernels, fla_refusal, scan_rows_fla
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
    # its forward alone where it refuses to compute gradients
    gradients = fla_refusal(16, 32, torch.bfloat16, torch.device("cuda")) is None
    for name, error in scan_errors(scan_rows_fla, case, gated, "cuda", torch.bfloat16, gradients).items():
        # it rounds states, weights and outputs of each chunk to bf16
        assert error <= 4 * torch.finfo(torch.bfloat16).eps, (name, error)


@pytest.mark.parametrize("gated", [True, False])
def test_the_kernels_of_auto_train_in_bf16(gated: bool) -> None:
    sharding = Ring().sharding(150, "contiguous")
    x = torch.randn(1, 150, 4, 16, device="cuda", generator=torch.Generator("cuda").manual_seed(0))

    def run(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rows = x.to(torch.bfloat16).to(dtype).requires_grad_()
        gate = rows[..., 0].sigmoid()
        if gated:
            y = gated_delta_rule(rows, rows, rows, -gate, gate, sharding, normalize_qk=True)
        else:
            y = mamba2_scan(rows, gate, -torch.ones(4, device="cuda"), rows, rows, sharding)
        [grad] = torch.autograd.grad(y.square().sum(), rows)
        return y.detach().double(), grad.double()

    for found, exact in zip(run(torch.bfloat16), run(torch.float64), strict=True):
        assert float((found - exact).norm() / exact.norm()) <= 4 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_plain_torch_on_a_gpu_is_within_single_precision(
    case: tuple[int, str, int, int, tuple[int, ...] | None], gated: bool
) -> None:
    for name, error in scan_errors(scan_rows, case, gated, "cuda", torch.float32).items():
        assert error <= 64 * torch.finfo(torch.float32).eps, (name, error)
