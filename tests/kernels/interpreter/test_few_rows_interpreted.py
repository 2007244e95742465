"""The Triton kernel of products of few rows gives what fp64 gives, and each row what it gives alone (fp16: interpreted products of
bf16 are no numbers)."""

from __future__ import annotations

import pytest
import torch

from tests.test_few_rows import ACTIVATIONS, assert_rounded, draw, exact, exact_gate


def shapes(n: int, inner: int, gated: bool):
    from ringattn.kernels.few_rows_triton import Shape, shape_of

    return shape_of(n, 40, inner, gated=gated), Shape(max(16, 1 << (n - 1).bit_length()), 16, 128, 2)


@pytest.mark.parametrize(("n", "inner"), [(1, 512), (5, 384), (5, 896), (40, 384)])
@pytest.mark.parametrize("out", [None, torch.float32])
def test_products_are_rounded_once(n: int, inner: int, out: torch.dtype | None):
    from ringattn.kernels import few_rows_triton

    x, weight, _, bias, _ = draw(n, n, inner, 40, torch.float16, apart=8)
    for shape in shapes(n, inner, False):
        for given in (None, bias):
            found = few_rows_triton.multiply(x, weight, given, out or x.dtype, shape)
            assert found.dtype == (out or x.dtype)
            assert_rounded(found, exact(x, weight, given), inner)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_stand_between_two_products(activation: str):
    from ringattn.kernels import few_rows_triton

    x, weight, other, bias, other_bias = draw(1, 3, 384, 40, torch.float16)
    for shape in shapes(3, 384, True):
        for given in ((None, None), (bias, other_bias)):
            found = few_rows_triton.gate(x, weight, other, activation, given[0], given[1], shape)
            assert_rounded(found, exact_gate(x, weight, other, activation, *given), 384)


def test_a_row_is_what_it_is_alone():
    from ringattn.kernels import few_rows_triton

    x, weight, other, *_ = draw(2, 16, 256, 40, torch.float16)
    together = few_rows_triton.multiply(x, weight, None, x.dtype)
    gated = few_rows_triton.gate(x, weight, other, "silu", None, None)
    for i in (0, 7, 15):
        assert torch.equal(few_rows_triton.multiply(x[i : i + 1], weight, None, x.dtype)[0], together[i])
        assert torch.equal(few_rows_triton.gate(x[i : i + 1], weight, other, "silu", None, None)[0], gated[i])
