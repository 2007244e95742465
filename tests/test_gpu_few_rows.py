"""On a GPU products of few rows are rounded once, rows do not depend on each other, and launches can be replayed."""

from __future__ import annotations

import pytest
import torch

from ringattn.kernels import few_rows
from tests.test_few_rows import ACTIVATIONS, assert_rounded, draw, exact, exact_gate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def on_gpu(seed: int, n: int, inner: int, outer: int, dtype: torch.dtype, apart: int = 0) -> list[torch.Tensor]:
    """As `draw`, on the device; rows of weights lie apart there too."""
    x, *weights, bias, other_bias = draw(seed, n, inner, outer, dtype)
    wide = [torch.full((outer, inner + apart), torch.nan, dtype=dtype, device="cuda") for _ in weights]
    for one, drawn in zip(wide, weights, strict=True):
        one[:, :inner] = drawn.cuda()
    return [x.cuda(), *(one[:, :inner] for one in wide), bias.cuda(), other_bias.cuda()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 3, 16, 17, 64])
@pytest.mark.parametrize(
    ("inner", "outer", "apart"), [(4096, 6144, 0), (1024, 1000, 0), (896, 1152, 0), (3584, 4096, 3584)]
)
def test_products_are_rounded_once(dtype: torch.dtype, n: int, inner: int, outer: int, apart: int):
    x, weight, other, bias, other_bias = on_gpu(n, n, inner, outer, dtype, apart)
    assert few_rows.has_kernel(weight, other)
    for out in (None, torch.float32):
        for given in (None, bias):
            found = few_rows.multiply(x, weight, given, dtype=out)
            assert_rounded(found, exact(x, weight, given), inner)
    for activation in ACTIVATIONS if n == 3 else ("silu",):
        for given in ((None, None), (bias, other_bias)):
            found = few_rows.gate(x, weight, other, activation, *given)
            assert_rounded(found, exact_gate(x, weight, other, activation, *given), inner)


def test_a_row_is_what_it_is_alone():
    n = 16  # larger blocks of rows may use other instructions
    x, weight, other, *_ = on_gpu(2, n, 4096, 6144, torch.bfloat16)
    together, gated = few_rows.multiply(x, weight), few_rows.gate(x, weight, other, "silu")
    for i in range(0, n, 5):
        few = x[i : i + 1 + i % 3]
        of = slice(i, i + len(few))
        assert torch.equal(few_rows.multiply(few, weight), together[of])
        assert torch.equal(few_rows.gate(few, weight, other, "silu"), gated[of])


def test_chains_of_products_are_replayed():
    x, weight, other, *_ = on_gpu(3, 8, 4096, 4096, torch.bfloat16)

    def chain() -> torch.Tensor:
        y = x
        for _ in range(4):
            y = few_rows.gate(few_rows.multiply(y, weight), other, weight, "relu")
            y = y / (y.abs().mean() + 1e-3)
        return y

    expected = chain()
    assert bool(expected.isfinite().all())
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        chain()
        with torch.cuda.graph(graph, stream=stream):
            out = chain()
        for _ in range(3):
            out.zero_()
            graph.replay()
            assert torch.equal(out, expected)
