"""On a GPU heads are turned as complex numbers turn, whatever lies beside them."""

from __future__ import annotations

import pytest
import torch

from ringattn.kernels.rotate import MOST_ROWS, has_kernel, rotate
from tests.test_rotate import check, draw, halves

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "shape", [(1, 32, 8, 128), (64, 32, 8, 128), (3, 5, 1, 64), (MOST_ROWS, 2, 2, 256), (2, 4, 3, 2)]
)
@pytest.mark.parametrize("joined", [False, True])
def test_heads_are_turned(shape: tuple[int, int, int, int], dtype: torch.dtype, joined: bool):
    q, k, angles = (x.cuda() for x in draw(*shape, dtype, joined=joined))
    if joined:
        assert q.is_cuda
        both = torch.cat((q.flatten(1), k.flatten(1)), 1)
        q, k = both[:, : q[0].numel()].view_as(q), both[:, q[0].numel() :].view_as(k)
    cos, sin = halves(angles)
    for dtype_of_angles in (torch.float32, dtype):
        given = cos.to(dtype_of_angles), sin.to(dtype_of_angles)
        assert has_kernel(q, k, *given)
        found = rotate(q, k, *given)
        if dtype_of_angles == torch.float32:
            check(found, q, k, angles)
    one = [x[:1].expand(len(q), -1) for x in halves(angles)]
    check(rotate(q, k, *one), q, k, angles[:1].expand(len(q), -1))
