"""The Triton sum of gradients equals the eager one."""

from __future__ import annotations

import pytest
import torch

from ringattn.kernels.attention.torch_ops import carry as eager


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("spans", [[(0, 21)], [(0, 21), (7, 21), (3, 9)]], ids=["one", "three"])
def test_the_kernel_equals_plain_torch(spans: list[tuple[int, int]], accumulate: bool, dtype: torch.dtype) -> None:
    from ringattn.kernels.attention.torch_ops.rows_triton import add_rows

    parts = [(torch.randn(2, end - first, 3, 40).to(torch.float16), (first, end)) for first, end in spans]
    whole = torch.randn(3, 30, 3, 40).to(dtype)
    expected = whole.float()
    for one, add in ((whole, add_rows), (expected, eager.add_rows)):
        add(parts, one[1:, 5:26], accumulate=accumulate)
    torch.testing.assert_close(whole, expected.to(dtype))
