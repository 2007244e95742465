"""The Triton kernel draws the tokens that the plain function draws."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from ringattn.kernels.draw import draw_eager
from tests.test_draw import COLDEST, LAST, draw_logits, exact_rows, how

SETTINGS = how(
    (0.0, 1.0, 0.5), (1.0, 1.0, 0.3), (1.0, 0.9, LAST), (0.7, 0.5, 0.0), (100.0, 0.95, LAST), (100.0, 0.3, 0.5),
    (COLDEST, 0.9, 0.4), (2.0, 0.0, 0.9),
)  # fmt: skip


@pytest.mark.parametrize(
    ("vocab", "most", "dtype"),
    [
        (1, 8192, torch.float32),
        (7, 8192, torch.bfloat16),
        (257, 128, torch.bfloat16),
        (257, 128, torch.float16),
        (1000, 8192, torch.bfloat16),
        (9000, 8192, torch.float32),
    ],
)
def test_tokens_are_drawn_alike(vocab: int, most: int, dtype: torch.dtype) -> None:
    from ringattn.kernels import draw_triton

    b = len(SETTINGS)
    x = draw_logits(vocab + most, b, vocab, 3.0, masked=0.1).to(dtype)
    mine, theirs = torch.full((b,), math.nan), torch.full((b,), math.nan)
    shape = draw_triton.shape_of(vocab, x.element_size(), most)
    assert draw_triton.draw(x, SETTINGS, mine, shape).tolist() == draw_eager(x, SETTINGS, theirs).tolist()
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    assert draw_triton.draw(x, None, shape=shape).tolist() == draw_eager(x, None).tolist()


@pytest.mark.parametrize(("temperature", "top_p"), [(0.5, 0.02), (1e-5, 0.98)])
def test_the_search_ends_where_a_sample_says_nothing(temperature: float, top_p: float) -> None:
    """Logits of all magnitudes, ties, and a few that only halving tells apart, with few tokens in registers."""
    from ringattn.kernels import draw_triton

    ups = torch.arange(-130.0, 1.0).exp2()
    steps = 1 + torch.arange(300.0) * torch.finfo(torch.float32).eps
    x = torch.cat((ups, -ups, torch.zeros(200), -torch.zeros(50), steps, torch.tensor([-30.0, 1.5])))[None]
    x = x[:, torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(0))]
    settings = how((temperature, top_p, 0.6))
    found = draw_triton.draw(x, settings, None, draw_triton.shape_of(x.shape[1], 4, 64))
    assert int(found) == int(draw_eager(x, settings))


def test_a_sum_that_just_comes_to_what_is_needed_is_enough() -> None:
    from ringattn.kernels import draw_triton

    x, settings, tokens = exact_rows()
    # registers hold a level, and a range is three spans
    shape = dataclasses.replace(draw_triton.shape_of(1152, 4, 128), span=32)
    assert draw_triton.draw(x, settings, None, shape).tolist() == tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_of_the_largest_is_taken(dtype: torch.dtype) -> None:
    from ringattn.kernels import draw_triton

    x = draw_logits(13, 8, 2000, 0.5, ties=True).to(dtype)
    shape = draw_triton.shape_of(2000, x.element_size(), 256)
    assert draw_triton.draw(x, None, shape=shape).tolist() == x.float().max(-1).indices.tolist()


def test_rows_may_be_apart_and_columns_too() -> None:
    from ringattn.kernels import draw_triton

    x = draw_logits(11, 4, 100, 2.0)
    settings = how(*((1.0, 0.8, i / 4) for i in range(4)))
    wanted = draw_eager(x, settings)
    assert torch.equal(draw_triton.draw(torch.stack((x * 0, x), 1)[:, -1], settings), wanted)
    assert torch.equal(draw_triton.draw(x.t().contiguous().t(), settings), wanted)
    assert torch.equal(draw_triton.draw(x.double(), settings), wanted)
    assert draw_triton.draw(x[:0], settings[:0]).tolist() == []


def test_what_is_no_number_is_found_wherever_it_is() -> None:
    from ringattn.kernels import draw_triton

    x = draw_logits(12, 6, 300, 1.0)
    x[0, 299], x[1, 0], x[2, 150], x[3] = math.nan, -math.nan, math.inf, -math.inf
    x[4, :299] = -math.inf
    for settings in (None, how(*[(1.0, 0.9, 0.5)] * 6)):
        found = draw_triton.draw(x, settings).tolist()
        assert found == draw_eager(x, settings).tolist()
        assert found[:5] == [-1, -1, -1, -1, 299]
