"""The Triton kernel turns heads as complex numbers turn."""

from __future__ import annotations

import pytest
import torch

from tests.test_rotate import SHAPES, check, draw, halves


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "joined"), [(torch.float32, True), (torch.bfloat16, False)])
def test_heads_are_turned(shape: tuple[int, int, int, int], dtype: torch.dtype, joined: bool):
    from ringattn.kernels import rotate_triton

    q, k, angles = draw(*shape, dtype, joined=joined)
    check(rotate_triton.rotate(q, k, *halves(angles)), q, k, angles)
    # all rows by the angles of the first, as a batch of one position has them
    cos, sin = (x[:1].expand(len(q), -1) for x in halves(angles))
    check(rotate_triton.rotate(q, k, cos, sin), q, k, angles[:1].expand(len(q), -1))
