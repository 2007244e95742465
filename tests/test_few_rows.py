"""Products of few rows, against fp64; which weights have a kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ringattn.kernels import few_rows

ACTIVATIONS = sorted(few_rows.ACTIVATIONS)


def draw(seed: int, n: int, inner: int, outer: int, dtype: torch.dtype, *, apart: int = 0) -> list[Tensor]:
    """Rows, two weights whose rows lie `apart` numbers apart beyond their length, and two biases."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (n, inner), (outer, inner + apart), (outer, inner + apart), (outer,), (outer,)
    x, *found = (torch.randn(one, generator=generator).to(dtype) for one in shapes)
    weights = [(one * inner**-0.5)[:, :inner] for one in found[:2]]
    return [x, *weights, *found[2:]]


def exact(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product in fp64."""
    out = x.double() @ weight.double().t()
    return out if bias is None else out + bias.double()


def exact_gate(x: Tensor, weight: Tensor, other: Tensor, activation: str, *biases: Tensor | None) -> Tensor:
    """The gated product in fp64."""
    bias, other_bias = biases or (None, None)
    return few_rows.ACTIVATIONS[activation](exact(x, weight, bias)) * exact(x, other, other_bias)


def assert_rounded(found: Tensor, expected: Tensor, terms: int) -> None:
    """What was found is expected but for a rounding, and for those of a sum of so many terms in fp32."""
    unit, noise = torch.finfo(found.dtype).eps / 2, 4 * terms**0.5 * torch.finfo(torch.float32).eps
    off = (found.double() - expected).abs()
    assert bool((off <= unit * 1.01 * expected.abs() + noise * (1 + expected.abs())).all()), off.max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out", [None, torch.float32])
def test_products_are_rounded_once(dtype: torch.dtype, out: torch.dtype | None):
    x, weight, other, bias, other_bias = draw(0, 5, 256, 48, dtype, apart=16)
    found = few_rows.multiply(x, weight, bias, dtype=out)
    assert found.dtype == (out or dtype)
    assert_rounded(found, exact(x, weight, bias), 256)
    assert_rounded(few_rows.multiply(x, weight), exact(x, weight), 256)
    for activation in ACTIVATIONS:
        found = few_rows.gate(x, weight, other, activation, bias, other_bias)
        assert_rounded(found, exact_gate(x, weight, other, activation, bias, other_bias), 256)


def test_rows_that_a_kernel_would_read_wrong_are_left_to_torch(monkeypatch: pytest.MonkeyPatch):
    """On a CPU that says it has a kernel: it gets the rows that are like the weights, and no others."""
    monkeypatch.setattr(few_rows, "has_kernel", lambda *_: True)
    monkeypatch.setattr(few_rows, "import_optional", lambda _: "the kernel")
    monkeypatch.setattr(Tensor, "is_cuda", True)
    x, weight, other, *_ = draw(0, 5, 256, 48, torch.bfloat16)
    assert few_rows._twin(x, weight, other) == "the kernel"
    for wrong in (x[:, :128].contiguous(), x.half(), x.to("meta"), x.repeat(1, 2)[:, :256], x[:, None], x[:0]):
        assert few_rows._twin(wrong, weight, other) is None
    assert few_rows._twin(x, weight, other[:16]) is None
    for narrow in (
        lambda: few_rows.multiply(x[:, :128], weight),
        lambda: few_rows.gate(x[0, :8], weight, other, "silu"),
    ):
        with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|size mismatch"):
            narrow()


def test_weights_without_a_kernel_are_known():
    big = torch.zeros(4096, 1024, dtype=torch.bfloat16)
    assert not few_rows.has_kernel(big), "on a CPU"
    fits = few_rows._fits
    assert fits(big)
    assert fits(big[:, :512]), "rows that lie apart"
    assert not fits(big.float()), "fp32 is left to torch"
    assert not fits(big[:64]), "small"
    assert not fits(big[:, :1000]), "not in whole blocks"
    assert not fits(big[:, 1:1009].as_strided((4096, 896), (1024, 1), 1)), "not in whole words"
    assert not fits(big.t()), "by columns"
