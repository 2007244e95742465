"""The Triton kernel that makes an output for delta equals plain torch."""

from __future__ import annotations

import pytest
import torch

from ringattn.kernels.attention.torch_ops.delta_output import output_for


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_equals_plain_torch(dtype: torch.dtype) -> None:
    from ringattn.kernels.attention.torch_ops import rows_triton

    generator = torch.Generator().manual_seed(0)
    do, delta = torch.randn(2, 3, 11, 40, generator=generator).to(dtype), torch.randn(2, 3, 11, generator=generator)
    do = do.transpose(1, 2)  # heads before rows in memory
    do[:, ::4] = 0.0  # an output for these needs another do
    do[:, 1::4] *= 1e-5
    delta[:, :, ::8] = 0.0
    for x, y in zip(rows_triton.output_for(do, delta), output_for(do, delta), strict=True):
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(x, y, rtol=4 * eps, atol=torch.finfo(dtype).smallest_normal)
