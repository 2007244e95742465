"""Products of a model with its weights, which few rows take from a kernel of their own.

Owns when that kernel is taken, and which MLPs are a gate between products. Refuses to know which parts of a model are changed
(fusing.py, splitting.py), and how products are computed (`kernels.few_rows`).

Note [Gates]
    Most MLPs are down(activation(gate x) * (up x)), with gate and up two weights, or two halves of one. That one is so is found
    by trying, and by the names in its code: what else an MLP does between its products (clamps, sparsity) has a name, and need
    not show in the numbers that it is tried with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringattn.integrations.transformers.replacing import code_of, distance, is_product, is_watched
from ringattn.kernels import few_rows

APART = ("gate_proj", "up_proj")
"""Under which names an MLP has the products that it gates."""
JOINED = "gate_up_proj"
"""Under which name it has both as one."""
LAST = "down_proj"
"""Under which name it has the last one."""
BETWEEN = ("act_fn", "activation_fn")
"""Under which names it has its activation."""
NAMED = {*APART, JOINED, LAST, *BETWEEN, "chunk"}
"""What the code of an MLP names that is a gate and nothing else (Note [Gates])."""
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
        rows = x.reshape(-1, x.shape[-1])
        if self.has_kernel and 0 < len(rows) <= few_rows.MOST_ROWS and _is_plain(x, self._weight):
            found = few_rows.multiply(rows.contiguous(), self._weight, self._bias, dtype=self._dtype)
            return found.view(*x.shape[:-1], found.shape[-1])
        if self._dtype in (None, x.dtype):
            return F.linear(x, self._weight, self._bias)
        if x.is_cuda and self._dtype == torch.float32:
            found = torch.mm(rows, self._weight.t(), out_dtype=torch.float32)
        else:
            found = torch.mm(rows, self._weight.t()).to(self._dtype)
        if self._bias is not None:
            found += self._bias
        return found.view(*x.shape[:-1], found.shape[-1])


class Gate:
    """A gate between two products of any rows: activation(x weight^T + bias) * (x other^T + other_bias).

    Args:
        activation: Of `few_rows.ACTIVATIONS`.
        weights: Both, `inner columns`.
        biases: Both, or None twice.
        mine: Which inner columns.

    Attributes:
        last: The product that ends the MLP.
        joined: Both weights are halves of one.
    """

    def __init__(
        self,
        activation: str,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        mine: slice,
        last: nn.Linear,
        *,
        joined: bool,
    ) -> None:
        self._activation = activation
        self._weight, self._other = (one.detach()[mine] for one in weights)
        self._bias, self._other_bias = (None if one is None else one.detach()[mine] for one in biases)
        self._has_kernel = few_rows.has_kernel(self._weight, self._other)
        self.last = last
        self.joined = joined

    def has_kernel(self, x: Tensor) -> bool:
        """Whether there is one for rows x `... inner`."""
        few = 0 < x.numel() // x.shape[-1] <= few_rows.MOST_GATED
        return self._has_kernel and few and _is_plain(x, self._weight)

    def __call__(self, x: Tensor) -> Tensor:
        """Gated columns of x `... inner`."""
        if self.has_kernel(x):
            rows = x.reshape(-1, x.shape[-1]).contiguous()
            found = few_rows.gate(rows, self._weight, self._other, self._activation, self._bias, self._other_bias)
            return found.view(*x.shape[:-1], found.shape[-1])
        gated = few_rows.ACTIVATIONS[self._activation](F.linear(x, self._weight, self._bias))
        return gated * F.linear(x, self._other, self._other_bias)


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    """Whether nobody wants to know how rows made what follows, which kernels do not say, and nobody has to cast them."""
    return x.dtype == weight.dtype and not (x.requires_grad and torch.is_grad_enabled())


@torch.no_grad()
def find_gate(mlp: nn.Module, mine: slice | None = None) -> Gate | None:
    """The gate of an MLP, if it is one and nothing else (Note [Gates]).

    Args:
        mlp: Takes rows.
        mine: Which inner columns; None: all.
    """
    code = code_of(mlp)
    if code is None or not NAMED.issuperset(code.__code__.co_names):
        return None
    last = getattr(mlp, LAST, None)
    joined = hasattr(mlp, JOINED)
    found = [getattr(mlp, name, None) for name in ((JOINED,) if joined else APART)]
    between: Any = next((call for name in BETWEEN if callable(call := getattr(mlp, name, None))), None)
    alone = len(found) + 1 == sum(1 for one in mlp.children() if any(True for _ in one.parameters()))
    products = [one for one in found if is_product(one)]
    if not alone or between is None or not is_product(last) or len(products) < len(found):
        return None
    if isinstance(between, nn.Module) and is_watched(between):
        return None
    weights: Sequence[Tensor] = [one.weight for one in products]
    biases: Sequence[Tensor | None] = [one.bias for one in products]
    if joined:
        weights = weights[0].chunk(2)
        biases = (None, None) if products[0].bias is None else products[0].bias.chunk(2)
    if {one.shape for one in weights} != {(last.in_features, weights[0].shape[1])} or (biases[0] is None) != (
        biases[1] is None
    ):
        return None
    # far out some are cut off
    near, far = torch.linspace(-4, 4, 64, device="cpu"), 2.0 ** torch.arange(3, 41, device="cpu")
    x = torch.cat([near, far, -far]).to(last.weight.device)
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(3, weights[0].shape[1], generator=draw, device="cpu").to(last.weight.device, last.weight.dtype)
    try:
        y, expected = between(x), mlp(rows[None])[0]
    except Exception:  # an MLP that takes other rows is none of these
        return None
    names = [name for name, call in few_rows.ACTIVATIONS.items() if torch.allclose(call(x), y, atol=1e-6)]
    if not names:
        return None
    whole, gate = (
        Gate(names[0], weights, biases, part, last, joined=joined) for part in (slice(None), mine or slice(None))
    )
    apart, size = distance(F.linear(whole(rows), last.weight, last.bias), expected)
    return gate if apart <= ALIKE * size else None
