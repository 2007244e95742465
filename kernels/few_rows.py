"""Products of few rows with weights that are each read once. Plain torch; `few_rows_triton` has the same for GPUs.

Owns what the products are (with a bias, or gated), for which weights and how many rows there is a kernel, and
the choice between the two implementations. Refuses to know models, and which of their parts are such products.

Shape legend: `n` rows, `inner` numbers of each, `outer` columns of the result.

Note [One rounding]
    Products are summed up in fp32. Bias, activation and gate follow in fp32, and the result is rounded once. A
    row's result does not depend on the other rows: the kernel adds up its products in the same order whatever is beside it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ringattn.kernels.runtime.optional_triton import import_optional

MOST_ROWS = 16
"""Rows up to which the kernel is at least as fast as what torch calls, for one weight."""
MOST_GATED = 64
"""The same for two weights and a gate between them, which are three calls of torch."""
STEP = 128
"""Of which `inner` is a multiple where there is a kernel."""
LEAST_BYTES = 2**20
"""A weight smaller than this takes no time, and is left to torch."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
"""What may stand between two weights."""


def has_kernel(weight: Tensor, *others: Tensor) -> bool:
    """Whether there is a kernel for products with weights `outer inner` (each with these, one after another, or gated).

    Args:
        weight: One of them.
        *others: More.
    """
    if not weight.is_cuda or not all(_fits(one) for one in (weight, *others)):
        return False
    fast = import_optional("ringattn.kernels.few_rows_triton")
    return fast is not None and fast.serves(weight.device)


def _fits(weight: Tensor) -> bool:
    """Whether a weight is read in whole words, row by row."""
    words = weight.stride(0) * weight.element_size() % 16 == 0 and weight.data_ptr() % 16 == 0
    whole = weight.shape[1] % STEP == 0 and weight.nbytes >= LEAST_BYTES
    return weight.dtype in (torch.bfloat16, torch.float16) and weight.stride(1) == 1 and words and whole


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """One product: x weight^T + bias.

    On a GPU it is one launch, if `has_kernel(weight)` and there are at most MOST_GATED rows.

    Args:
        x: `n inner`, fp16 or bf16, contiguous.
        weight: `outer inner`, the dtype of x; rows may lie apart.
        bias: `outer`.
        dtype: Of the result; None: that of x.

    Returns:
        `n outer`.

    Example:
        >>> multiply(torch.ones(1, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.ones(2))
        tensor([[4., 8.]])
    """
    fast = _twin(x, weight)
    if fast is not None:
        return fast.multiply(x, weight, bias, dtype or x.dtype)
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(dtype or x.dtype)


def gate(
    x: Tensor,
    weight: Tensor,
    other: Tensor,
    activation: str,
    bias: Tensor | None = None,
    other_bias: Tensor | None = None,
) -> Tensor:
    """Two products and a gate: activation(x weight^T + bias) * (x other^T + other_bias).

    On a GPU it is one launch, if `has_kernel(weight, other)` and there are at most MOST_GATED rows.

    Args:
        x: `n inner`, fp16 or bf16, contiguous.
        weight: `outer inner`, the dtype of x; rows may lie apart.
        other: Likewise.
        activation: Of ACTIVATIONS.
        bias: `outer`.
        other_bias: `outer`; with bias, or none.

    Returns:
        `n outer`, the dtype of x.

    Example:
        >>> gate(torch.ones(1, 2), torch.tensor([[1.0, 2.0]]), torch.tensor([[-1.0, 3.0]]), "relu")
        tensor([[6.]])
    """
    fast = _twin(x, weight, other)
    if fast is not None:
        return fast.gate(x, weight, other, activation, bias, other_bias)
    one, two = (
        F.linear(x.float(), w.float(), None if b is None else b.float())
        for w, b in ((weight, bias), (other, other_bias))
    )
    return (ACTIVATIONS[activation](one) * two).to(x.dtype)


def _twin(x: Tensor, *weights: Tensor) -> Any:
    # what a kernel would read wrong is multiplied, or refused, by torch
    alike = all(_is_row_of(x, weight) and weight.shape == weights[0].shape for weight in weights)
    fits = x.is_cuda and alike and 0 < len(x) <= MOST_GATED and has_kernel(*weights)
    return import_optional("ringattn.kernels.few_rows_triton") if fits else None


def _is_row_of(x: Tensor, weight: Tensor) -> bool:
    alike = x.dtype == weight.dtype and x.device == weight.device
    return alike and x.dim() == 2 and x.shape[1] == weight.shape[1] and x.is_contiguous()
