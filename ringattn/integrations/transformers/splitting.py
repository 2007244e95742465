"""Products of which each rank makes a part, in calls whose rows all ranks have: MLPs and the output head of a model.

Owns which products these are, their slices, and how the parts of all ranks become one result. Refuses to know how slices travel
(exchanges do), which calls there are (steps.py says whose rows are everywhere), and whether a new part is right (replacing.py).

Note [Slices]
    In a step of decoding all ranks bring the same few rows to weights of which each has a copy, and the step takes as long as
    reading them does. So each rank reads a slice: of the inner columns of an MLP, whose results are addends of what the whole
    MLP gives, and of the tokens of the output head, whose logits are laid side by side. The slices are views, so that nothing
    more is kept: a prefill around the ring, where every rank has rows of its own, multiplies with all of the weights.
    An MLP is taken to be products that widen rows, something between them that treats each inner column by itself, and one product
    that ends it; or a gate whose two products are halves of one (Note [Gates] of products.py). That this is so is found by trying
    each: what is between the products may differ from layer to layer.

Note [One rounding]
    Addends are fp32 where the device can make them so, and are added in the order of the ranks: all ranks get the same bits, which
    are as near to the truth as those of the whole product.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ringattn.integrations.transformers.fusing import compiled
from ringattn.integrations.transformers.products import Product, find_gate
from ringattn.integrations.transformers.replacing import (
    Held,
    Replacement,
    agree,
    describe,
    is_product,
    is_row_wise,
    is_watched,
    replace,
    rows_for,
    width,
)
from ringattn.integrations.transformers.steps import rows_everywhere, whose_rows
from ringattn.ring import Ring

ALIGNED = 16
"""Bytes of which the beginning of a slice of a row is a multiple: products read rows so."""


class CannotSplit(RuntimeError):
    """The parts stay as they were; the message says why."""


@torch.no_grad()
def split(model: nn.Module, ring: Ring, *, backend: str | Callable | None = None) -> int:
    """Lets each rank read a slice of MLPs and of the output head in steps of decoding; every rank calls it alike.

    For inference. Calls outside of steps, and prefills around the ring, compute as before.

    Args:
        model: Of transformers, whole on every rank, in eval mode; maybe `fuse`d before.
        ring: All ranks, whose steps they will be.
        backend: Of torch.compile, by which the inner part of an MLP's slice is compiled; None: it is not.

    Returns:
        How many parts are split: none on a ring of one rank.

    Raises:
        CannotSplit: A slice could not be made, or gave other numbers, on any rank; on every rank.
    """
    if ring.world_size == 1:
        return 0
    why, replacements = "", list[Replacement]()
    try:
        for part in model.modules():
            if type(part).__name__.endswith("MLP") and is_row_wise(part) and _inner(part, ring.world_size) is not None:
                one = _split_mlp(part, ring, backend)
                replacements += [] if one is None else [one]
        head = getattr(model, "get_output_embeddings", lambda: None)()
        if head is not None and is_product(head) and head.out_features % ring.world_size == 0:
            replacements.append(_split_head(head, ring))
    except Exception as error:  # compilers raise what they like
        why = describe(error)
    if not (why := agree(why, ring)):
        with rows_everywhere(ring):
            why = replace(replacements, ring, "split")
    if why:
        raise CannotSplit(why)
    return len(replacements)


def _inner(mlp: nn.Module, ranks: int) -> int | None:
    """Inner columns of an MLP that can be cut into slices; None where it can not."""
    weighty = [one for one in mlp.children() if any(True for _ in one.parameters())]
    products = [one for one in weighty if is_product(one)]
    if len(products) < 2 or len(products) < len(weighty) or any(is_watched(one) for one in mlp.children()):
        return None
    *first, last = products
    inner = last.in_features
    sizes = [one.out_features for one in first]
    # or both products of a gate in one
    alike = (set(sizes) == {inner} or sizes == [2 * inner]) and all(one.in_features == width(mlp) for one in first)
    own = any(True for _ in mlp.parameters(recurse=False))
    fits = inner % ranks == 0 and inner // ranks * last.weight.element_size() % ALIGNED == 0
    return inner if alike and not own and fits else None


def _split_mlp(mlp: nn.Module, ring: Ring, backend: str | Callable | None) -> Replacement | None:
    """An MLP of which this rank makes its slice of inner columns (Note [Slices]); None: it is not known which these are."""
    columns, inner = width(mlp), _inner(mlp, ring.world_size)
    assert columns is not None, "an MLP takes rows"
    assert inner is not None, "an MLP that is split has inner columns"
    mine = _slice_of(inner, ring)
    *first, last = [name for name, one in mlp.named_children() if isinstance(one, nn.Linear)]
    addends_of, gate = _Addends(getattr(mlp, last), mine, ring.rank == 0), find_gate(mlp, mine)
    if any(getattr(mlp, name).out_features != inner for name in first) and gate is None:
        return None
    call: Callable[[Tensor], Tensor]
    if gate is not None and gate.joined:
        call = lambda x: addends_of(gate(x))  # noqa: E731
    else:
        thin = copy.copy(mlp)
        vars(thin).pop("forward", None)
        thin._modules = mlp._modules | {name: _rows_of(getattr(mlp, name), mine) for name in first} | {last: addends_of}
        call = thin.forward if backend is None else compiled(thin.forward, backend)
    whole = mlp.forward
    held = Held((one for one in mlp.children() if isinstance(one, nn.Linear)), mlp)
    rows = rows_for(mlp, columns)
    for (x,) in rows:
        call(x)  # what can fail by itself fails before ranks wait for each other

    def forward(x: Tensor) -> Tensor:
        if whose_rows() is not ring or not x.numel() or not held.is_plain():
            return whole(x)
        some = x.reshape(1, -1, x.shape[-1])
        addends = addends_of(gate(some)) if gate is not None and gate.has_kernel(some) else call(some)
        out = torch.empty(addends.shape, dtype=x.dtype, device=x.device)
        ring.partial_reducer(x.device).all_reduce(addends, out)
        return out.view(x.shape)

    # a kind of its own, so that each is tried (Note [Slices])
    return Replacement(mlp, mlp, forward, rows, before=whole)


def _split_head(head: nn.Linear, ring: Ring) -> Replacement:
    """An output head of which this rank makes its slice of tokens (Note [Slices])."""
    thin, whole = _rows_of(head, _slice_of(head.out_features, ring)), head.forward
    product, held = Product(thin.weight, thin.bias), Held([head])

    def forward(x: Tensor) -> Tensor:
        if whose_rows() is not ring or not x.numel() or not held.is_plain():
            return whole(x)
        part = product(x.reshape(-1, x.shape[-1]))
        out = torch.empty(part.shape[0], head.out_features, dtype=part.dtype, device=part.device)
        ring.partial_reducer(x.device).all_gather_columns(part, out)
        return out.view(*x.shape[:-1], -1)

    return Replacement(head, (type(head), "head"), forward, rows_for(head, head.in_features), before=whole)


def _slice_of(columns: int, ring: Ring) -> slice:
    """Which columns are this rank's."""
    size = columns // ring.world_size
    return slice(ring.rank * size, (ring.rank + 1) * size)


def _rows_of(product: nn.Linear, mine: slice) -> nn.Linear:
    """A product that gives some of the columns of another one, of whose weights it is a view."""
    part = copy.copy(product)
    part._parameters = {
        name: None if x is None else nn.Parameter(x[mine], requires_grad=False)
        for name, x in product._parameters.items()
    }
    part.out_features = mine.stop - mine.start
    return part


class _Addends(nn.Module):
    """The last product of an MLP over some inner columns: what this rank adds to it, in fp32 (Note [One rounding]).

    Args:
        product: The whole one, of whose weights it is a view.
        mine: Inner columns.
        biased: Whether this rank brings the bias.
    """

    def __init__(self, product: nn.Linear, mine: slice, biased: bool) -> None:
        super().__init__()
        bias = product.bias if biased else None
        add = Product(product.weight[:, mine], None if bias is None else bias.float(), torch.float32)
        # not all compilers know a product of another dtype
        self._add: Any = torch.compiler.disable(add)  # pyright: ignore[reportArgumentType]

    def forward(self, x: Tensor) -> Tensor:
        """Addends `... out` fp32 of x `... inner`."""
        return self._add(x)
