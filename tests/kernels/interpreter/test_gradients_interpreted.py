"""The Triton sum of gradients equals torch's."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("heads_first", [False, True])
def test_the_kernel_equals_plain_torch(heads_first: bool, accumulate: bool, dtype: torch.dtype) -> None:
    from ringattn.kernels.attention.torch_ops.rows_triton import add_rows

    found = torch.randn(2, 21, 3, 40).to(torch.float16)
    if heads_first:
        found = found.transpose(1, 2).contiguous().transpose(1, 2)
    whole = torch.randn(3, 30, 3, 40).to(dtype)
    expected = whole.clone()
    if accumulate:
        expected[1:, 5:26] += found
    else:
        expected[1:, 5:26] = found
    add_rows(found, whole[1:, 5:26], accumulate=accumulate)
    torch.testing.assert_close(whole, expected)
