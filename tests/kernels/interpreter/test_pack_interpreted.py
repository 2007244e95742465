"""The Triton packing equals the plain one, and clears what it is told to and no more."""

import pytest
import torch

from ringattn.kernels.kv import pack as eager


@pytest.mark.parametrize(
    ("d", "dv", "dtype"), [(8, 8, torch.float32), (40, 24, torch.bfloat16), (1, 16, torch.float16)]
)
@pytest.mark.parametrize("clears", [None, "words", "rows"])
def test_the_kernel_equals_the_eager_packing(
    monkeypatch: pytest.MonkeyPatch, d: int, dv: int, dtype: torch.dtype, clears: str | None
) -> None:
    from ringattn.kernels.kv import pack_triton

    # stretches of several pieces, the last one shorter
    monkeypatch.setattr(pack_triton, "ZEROS", 64)
    k = torch.randn(2, 7, 3, d + 1).to(dtype)[..., :d]
    v = torch.randn(2, 3, 7, dv).to(dtype).transpose(1, 2)
    slots = [torch.zeros(2, 9, 3, d + dv, dtype=dtype) for _ in range(2)]
    fars = [torch.ones(2, 12, 3, d + dv, dtype=dtype) for _ in range(2)]
    words = [torch.ones(9, dtype=torch.int32) for _ in range(2)]
    stretches = torch.tensor([[2, 5], [9, 12], [7, 8]], dtype=torch.int32)
    cleared = [
        eager.Cleared(x[:6].view(2, 3), x[7:8], far, stretches, 3, clears == "rows")
        for x, far in zip(words, fars, strict=True)
    ]
    if clears is None:
        cleared = [None, None]
    pack_triton.pack(slots[0][:, :7], k, v, cleared[0])
    eager.pack(slots[1][:, :7], k, v, cleared[1])
    assert torch.equal(*slots)
    assert torch.equal(*fars)
    assert torch.equal(*words)
    assert words[0].tolist() == ([1] * 9 if clears is None else [0] * 6 + [1, 0, 1])
    rows = {2, 3, 4, 7, 9, 10, 11} if clears == "rows" else set()
    assert {row for row in range(12) if not bool(fars[0][:, row].any())} == rows
