"""Products of a model with its weights, which few rows take from a kernel of their own.

Owns when that kernel is taken, and which MLPs are a gate between three products. Refuses to know which parts of a model are
changed (fusing.py, splitting.py), and how products are computed (`kernels.few_rows`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringattn.integrations.transformers.replacing import is_product
from ringattn.kernels import few_rows

GATED = ("gate_proj", "up_proj", "down_proj")
"""Under which names an MLP has the products that it gates, and the last one."""
ALIKE = 0.01
"""By what part of their size numbers may differ that are the same but for roundings."""


class Product:
    """A product of any rows: x weight^T + bias.

    Args:
        weight: `outer inner`; rows may lie apart.
        bias: `outer`, or None.
        dtype: Of the result; None: that of x.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> None:
        self._weight, self._bias, self._dtype = weight.detach(), None if bias is None else bias.detach(), dtype
        self.has_kernel = few_rows.has_kernel(self._weight)

    def __call__(self, x: Tensor) -> Tensor:
        """The product of x `... inner`."""
        rows = x.flatten(0, -2)
        if self.has_kernel and 0 < len(rows) <= few_rows.MOST_ROWS and not _differentiated(x):
            found = few_rows.multiply(rows.contiguous(), self._weight, self._bias, dtype=self._dtype)
            return found.unflatten(0, x.shape[:-1])
        if self._dtype in (None, x.dtype):
            return F.linear(x, self._weight, self._bias)
        if x.is_cuda and self._dtype == torch.float32:
            found = torch.mm(rows, self._weight.t(), out_dtype=torch.float32)
        else:
            found = torch.mm(rows, self._weight.t()).to(self._dtype)
        if self._bias is not None:
            found += self._bias
        return found.unflatten(0, x.shape[:-1])


class Gate:
    """A gate between two products of few rows: activation(x weight^T + bias) * (x other^T + other_bias).

    Args:
        activation: Of `few_rows.ACTIVATIONS`.
        products: The two.
        mine: Which columns of both.
    """

    def __init__(self, activation: str, products: list[nn.Linear], mine: slice) -> None:
        self._activation = activation
        self._weight, self._other = (one.weight.detach()[mine] for one in products)
        self._bias, self._other_bias = (None if one.bias is None else one.bias.detach()[mine] for one in products)
        self.has_kernel = few_rows.has_kernel(self._weight, self._other)

    def takes(self, x: Tensor) -> bool:
        """Whether there is a kernel for rows x `... inner`."""
        few = 0 < x.numel() // x.shape[-1] <= few_rows.MOST_GATED
        return self.has_kernel and few and not _differentiated(x)

    def __call__(self, x: Tensor) -> Tensor:
        """Gated columns of x `... inner`."""
        rows = x.flatten(0, -2).contiguous()
        found = few_rows.gate(rows, self._weight, self._other, self._activation, self._bias, self._other_bias)
        return found.unflatten(0, x.shape[:-1])


def _differentiated(x: Tensor) -> bool:
    """Whether somebody wants to know how x made what follows, which kernels do not say."""
    return x.requires_grad and torch.is_grad_enabled()


@torch.no_grad()
def find_gate(mlp: nn.Module, mine: slice | None = None) -> Gate | None:
    """The gate of an MLP, if it is one between three products and nothing else, and has a kernel; found by trying.

    Args:
        mlp: Takes rows.
        mine: Which inner columns; None: all.
    """
    found: list[Any] = [getattr(mlp, name, None) for name in GATED]
    alone = len(found) == sum(1 for one in mlp.children() if any(True for _ in one.parameters()))
    between: Any = getattr(mlp, "act_fn", None)
    if not alone or not callable(between) or not all(is_product(one) for one in found):
        return None
    if any(one.bias is None for one in found[:2]) != all(one.bias is None for one in found[:2]):
        return None
    weight = found[0].weight
    x = torch.linspace(-4, 4, 64, device=weight.device)
    y: Any = between(x)
    names = [name for name, call in few_rows.ACTIVATIONS.items() if torch.allclose(call(x), y, atol=1e-6)]
    if not names:
        return None
    gate = Gate(names[0], found[:2], mine or slice(None))
    if not gate.has_kernel:
        return None
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(3, weight.shape[1], generator=draw).to(weight.device, weight.dtype)
    try:
        expected = mlp(rows[None])[0].float()
    except Exception:  # an MLP that takes other rows is none of these
        return None
    gated = Gate(names[0], found[:2], slice(None))(rows)
    off = (F.linear(gated, found[2].weight, found[2].bias).float() - expected).square().mean().sqrt()
    return gate if bool(off <= ALIKE * expected.square().mean().sqrt()) else None
