"""The Triton packing equals the plain one."""

import pytest
import torch

from ringattn.kernels import pack as eager


@pytest.mark.parametrize(
    ("d", "dv", "dtype"), [(8, 8, torch.float32), (40, 24, torch.bfloat16), (1, 16, torch.float16)]
)
def test_the_kernel_equals_the_eager_packing(d: int, dv: int, dtype: torch.dtype) -> None:
    from ringattn.kernels import pack_triton

    k = torch.randn(2, 7, 3, d + 1).to(dtype)[..., :d]
    v = torch.randn(2, 3, 7, dv).to(dtype).transpose(1, 2)
    slots = [torch.zeros(2, 9, 3, d + dv, dtype=dtype) for _ in range(2)]
    pack_triton.pack(slots[0][:, :7], k, v)
    eager.pack(slots[1][:, :7], k, v)
    assert torch.equal(*slots)
