"""On a GPU tokens are drawn as plain torch draws them, whatever else is in the batch."""

from __future__ import annotations

import math

import pytest
import torch

from ringattn.kernels.draw import draw_eager
from tests.test_draw import COLDEST, LAST, draw_logits, how

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SETTINGS = (
    (0.0, 1.0, 0.5), (1.0, 1.0, 0.3), (1.0, 0.9, LAST), (0.6, 0.95, 0.0), (100.0, 0.9, 0.7), (1.0, 0.0, 0.5),
    (COLDEST, 0.9, 0.4), (2.0, 0.999, 0.9),
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocab", [257, 128256])
@pytest.mark.parametrize(("scale", "ties", "masked"), [(1.0, False, 0.0), (4.0, False, 0.3), (2.0, True, 0.0)])
def test_tokens_are_drawn_alike(dtype: torch.dtype, vocab: int, scale: float, ties: bool, masked: float) -> None:
    from ringattn.kernels import draw_triton

    rows = 64
    x = draw_logits(vocab, rows, vocab, scale, ties=ties, masked=masked).to("cuda", dtype)
    settings = how(*(SETTINGS * (rows // len(SETTINGS)))).cuda()
    settings[:, 2] = (settings[:, 2] + torch.linspace(0, 0.2, rows, device="cuda").double()).clamp(max=LAST)
    mine, theirs = (torch.empty(rows, device="cuda") for _ in range(2))
    found = draw_triton.draw(x, settings, mine)
    assert found.tolist() == draw_eager(x, settings, theirs).tolist()
    torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=2e-6)
    assert draw_triton.draw(x, None).tolist() == draw_eager(x, None).tolist()
    alone = torch.cat([draw_triton.draw(x[i : i + 1], settings[i : i + 1]) for i in range(0, rows, 9)])
    assert found[::9].tolist() == alone.tolist()


def test_rows_without_a_largest_number_have_no_token() -> None:
    from ringattn.kernels import draw_triton

    x = torch.randn(4, 1000, device="cuda")
    x[0, 3], x[1, 999], x[2] = math.nan, math.inf, -math.inf
    found = draw_triton.draw(x, how(*[(1.0, 0.9, 0.5)] * 4).cuda()).tolist()
    assert found[:3] == [-1] * 3
    assert found[3] >= 0
