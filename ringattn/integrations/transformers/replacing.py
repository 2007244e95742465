"""Parts of a model whose forward is replaced, once the new one was found to give the same numbers, on all ranks.

Owns which parts treat each row by itself, the rows they are tried with, and that all ranks replace all or nothing. Refuses to know
what new forwards do: fusing.py compiles them, splitting.py reads weights in slices.

Note [Checked before use]
    One part of each kind is tried with a few rows: it must give what it gave before within rounding, and all ranks must get the
    same bits, because they go on from them separately. Where a part fails on any rank, all parts of all ranks stay as they were.
    Rounding is that of the numbers, a few times, and that of sums of n products in fp32, which come out sqrt(n) units apart
    when they are added up in another order: much less than a unit of bf16, and more than one of fp32.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from types import FunctionType
from typing import Any, NoReturn, SupportsIndex, TypeGuard

import torch
from torch import Tensor, nn

from ringattn.ring import Ring

ENDINGS = ("Norm", "MLP")
"""How the class names of parts end that treat each row by itself."""
TRIED = (1, 5, 64)
"""Rows with which a part is tried: one is compiled by itself, the others share a kernel."""
SPAN = 4
"""Rounding errors by which numbers may differ, in the mean: an MLP rounds between its products."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Held:
    """Products whose weights something else was made of, to be asked whether they are as they were.

    Args:
        products: These.
        owner: Whose children they are; None: that does not matter.
    """

    def __init__(self, products: Iterable[nn.Linear], owner: nn.Module | None = None) -> None:
        self._children = {} if owner is None else owner._modules
        self._were = tuple(self._children.values())
        self._weights = [
            (one._parameters, name, x, x.data_ptr())
            for one in products
            for name, x in one._parameters.items()
            if x is not None
        ]

    def is_plain(self) -> bool:
        """Whether no weight or child was put in the place of another one, and nobody wants to know weights' gradients."""
        return (
            all(own.get(name) is x and x.data_ptr() == address for own, name, x, address in self._weights)
            and tuple(self._children.values()) == self._were
            and not (torch.is_grad_enabled() and any(x.requires_grad for _, _, x, _ in self._weights))
        )


class OfOne:
    """A method of one module, which a copy of the module must not take along: it would run the first one's weights.

    Args:
        call: What is called.
        original: What it looks like.
        refusal: What whoever copies it is told.
    """

    def __init__(self, call: Callable[..., Any], original: Callable[..., Any], refusal: str) -> None:
        functools.update_wrapper(self, original)
        self._call, self._refusal = call, refusal

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The method."""
        return self._call(*args, **kwargs)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise RuntimeError(self._refusal)


@dataclass(eq=False)
class Replacement:
    """One part, and its new forward.

    Attributes:
        part: Whose forward is replaced.
        kind: Of those with the same kind, one is tried.
        forward: The new one.
        tried: What it is tried with: arguments of one call each, the same on every rank.
        before: What is called with them, and gives a tensor or some; None: the part.
        after: What must give the same; None: forward.
    """

    part: nn.Module
    kind: Hashable
    forward: Callable[..., Any]
    tried: Sequence[tuple[Tensor, ...]]
    before: Callable[..., Any] | None = None
    after: Callable[..., Any] | None = None


def replace(replacements: Sequence[Replacement], ring: Ring, what: str) -> str:
    """Gives parts their new forwards, if these are right on all ranks; every rank calls it alike.

    Args:
        replacements: Of this rank, the same on all.
        ring: The ranks that go on from the same numbers.
        what: For messages: what the parts have become, such as "compiled".

    Returns:
        Why all parts stay as they were; empty when they were replaced.
    """
    kinds = {one.kind: one for one in replacements}
    why, digest = "", blake2b(digest_size=8)
    try:
        for one in kinds.values():
            before, after = one.before or one.part, one.after or one.forward
            for given in one.tried:
                expected, found = _tensors(before(*given)), _tensors(after(*given))
                for x, y in zip(found, expected, strict=True):
                    digest.update(x.cpu().contiguous().view(torch.uint8).numpy().tobytes())
                    why = why or _difference(f"{type(one.part).__name__} {what}", x, y, _terms(one.part))
    except Exception as error:  # compilers raise what they like
        why = describe(error)
    why = agree(why, ring)
    if not why:
        try:
            ring.assert_equal_across_ranks(f"what {what} parts give", digest.hexdigest())
        except ValueError as error:
            why = str(error)
    if not why:
        refusal = f"a model must be copied or saved whole before parts of it are {what}, got one after; copy it before"
        for one in replacements:
            one.part.forward = OfOne(one.forward, one.part.forward, refusal)
    return why


def agree(why: str, ring: Ring) -> str:
    """What is wrong on this rank, or that something is on another one; empty when nothing is."""
    if ring.all_reduce_min(int(not why)):
        return ""
    return why or "another rank could not"


def describe(error: Exception) -> str:
    """An error in one line; of a compiler's, what it met."""
    cause = getattr(error, "inner_exception", error)
    lines = str(cause).strip().splitlines() or ["no message"]
    return f"{type(cause).__name__}: {lines[0]}"


def is_row_wise(part: nn.Module) -> bool:
    """Whether a part takes rows alone, is written in small operations, and has weights that are numbers as they are."""
    name, kind = type(part).__name__, type(part)
    if not name.endswith(ENDINGS) or kind.__module__.startswith("torch."):
        return False
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    needed = [one for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    plain = all(one.dtype in FLOATS for one in part.parameters())
    return plain and len(needed) == 1 == len(parameters) and width(part) is not None


def is_product(part: Any) -> TypeGuard[nn.Linear]:
    """Whether something is a product with a weight, of numbers as they are, and nothing else."""
    if type(part) is not nn.Linear or is_watched(part):
        return False
    # others, quantised ones say, tell the dtype that they are read as
    return type(part.weight) in (Tensor, nn.Parameter) and part.weight.dtype in FLOATS


def is_watched(part: nn.Module) -> bool:
    """Whether somebody looks on when a part is called, or has changed what it does."""
    changed = hasattr(part, "_hf_hook") or "forward" in vars(part)
    return changed or bool(part._forward_hooks or part._forward_pre_hooks)


def code_of(part: nn.Module) -> FunctionType | None:
    """The function in which a part's class says what its forward is; None where somebody has wrapped it to do something else."""
    found: Any = type(part).forward
    while hasattr(found, "__wrapped__"):
        # transformers wraps to rename arguments
        if not getattr(found, "__globals__", {}).get("__name__", "").startswith("transformers."):
            return None
        found = found.__wrapped__
    return found if isinstance(found, FunctionType) else None


def width(part: nn.Module) -> int | None:
    """Columns of the rows that a part takes, if its weights say so."""
    if type(part).__name__.endswith("MLP"):
        products = [one for one in part.children() if isinstance(one, nn.Linear)]
        # the first one takes rows, the last one makes them
        square = products and products[0].in_features == products[-1].out_features
        return products[0].in_features if square else None
    weights = [one for one in part.parameters(recurse=False) if one.ndim == 1]
    return weights[0].shape[0] if len(weights) == 1 else None


def rows_for(part: nn.Module, columns: int) -> list[tuple[Tensor]]:
    """Rows to try a part with, the same on every rank."""
    weight = next(part.parameters())
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(1, n, columns, generator=draw, device="cpu").to(weight.device, weight.dtype),) for n in TRIED]


def _tensors(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def distance(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """How far apart numbers are, and how large those that were expected are: root mean squares."""
    x, y = found.float(), expected.float()
    apart, size = (float(z.square().mean().sqrt()) for z in (x - y, y))
    return apart, size


def _terms(part: nn.Module) -> int:
    """Of the longest sum that a part makes, by its weights."""
    return max((size for one in part.parameters() for size in one.shape), default=1)


def _difference(name: str, found: Tensor, expected: Tensor, terms: int) -> str:
    """What is wrong with what a new forward gave, whose sums have so many terms; empty when nothing is."""
    if found.shape != expected.shape:
        return f"{name} has shape {tuple(found.shape)} where it was {tuple(expected.shape)}"
    apart, size = distance(found, expected)
    unit, of_sums = torch.finfo(expected.dtype).eps, terms**0.5 * torch.finfo(torch.float32).eps
    if found.dtype == expected.dtype and apart <= (SPAN * unit + of_sums) * size:
        return ""
    return f"{name} differs by {apart:.2g} where numbers are of {size:.2g}"
