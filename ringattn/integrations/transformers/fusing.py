"""Parts of a model that treat each row by itself, compiled: norms and MLPs.

Owns which parts these are, how they are compiled, and that this changes their numbers by rounding only, alike on all ranks. Refuses
to know attention, caches and steps.

Note [Small kernels]
    Decoding reads all weights for few rows, and beside these products a layer of a model as transformers writes it has some 30
    small kernels, most of them in its norms and behind the first products of its MLP. torch.compile makes one of each norm and
    one between the products. Attention and what is around it stay as they are: they take steps, which are no tensors.

Note [Checked before use]
    One part of each kind is tried with a few rows: it must give what it gives uncompiled within rounding, and all ranks must get
    the same bits, because they go on from them separately. Inductor is asked to be deterministic: it then chooses how sums are
    made by rules and not by timing. Where a part fails on any rank, all parts of all ranks stay as they were.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from ringattn.ring import Ring

ENDINGS = ("Norm", "MLP")
"""How the class names of parts end that treat each row by itself."""
TRIED = (1, 5, 64)
"""Rows with which a part is tried: one is compiled by itself, the others share a kernel."""
SPAN = 4
"""Rounding errors by which compiled numbers may differ, in the mean: an MLP rounds between its products."""


class CannotFuse(RuntimeError):
    """The parts stay as they were; the message says why."""


@torch.no_grad()
def fuse(model: nn.Module, ring: Ring, *, backend: str | Callable = "inductor") -> int:
    """Compiles the parts of a model that treat each row by itself, for inference; every rank calls it alike.

    Args:
        model: Of transformers, whole on every rank, in eval mode.
        ring: The ranks that go on from the same numbers.
        backend: Of torch.compile.

    Returns:
        How many parts were compiled.

    Raises:
        CannotFuse: A part could not be compiled, or gave other numbers, on any rank; on every rank.
    """
    parts = [part for part in model.modules() if _is_row_wise(part)]
    kinds = {_kind(part): part for part in parts}
    why, digest = "", blake2b(digest_size=8)
    try:
        plain = {kind: [part(x) for x in _rows_for(part)] for kind, part in kinds.items()}
        for part in parts:
            part.forward = _compiled(part, backend)
        for kind, part in kinds.items():
            for x, expected in zip(_rows_for(part), plain[kind], strict=True):
                found = part(x)
                digest.update(found.cpu().contiguous().view(torch.uint8).numpy().tobytes())
                why = why or _difference(type(part).__name__, found, expected)
    except Exception as error:  # compilers raise what they like
        cause = getattr(error, "inner_exception", error)
        lines = str(cause).strip().splitlines() or ["no message"]
        why = f"{type(cause).__name__}: {lines[0]}"
    if ring.least(int(not why)):
        try:
            ring.agree("what compiled parts give", digest.hexdigest())
        except ValueError as error:
            why = str(error)
    else:
        why = why or "another rank could not"
    if why:
        for part in parts:
            vars(part).pop("forward", None)  # the class's own again
        raise CannotFuse(why)
    return len(parts)


def _is_row_wise(part: nn.Module) -> bool:
    """Whether a part takes rows alone, is written in small operations, and has weights that are numbers as they are."""
    name, kind = type(part).__name__, type(part)
    if not name.endswith(ENDINGS) or kind.__module__.startswith("torch.") or "forward" in vars(part):
        return False
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    needed = [one for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    plain = all(one.dtype in (torch.float32, torch.bfloat16, torch.float16) for one in part.parameters())
    return plain and len(needed) == 1 == len(parameters) and _width(part) is not None


def _width(part: nn.Module) -> int | None:
    """Columns of the rows that a part takes, if its weights say so."""
    if type(part).__name__.endswith("MLP"):
        products = [one for one in part.children() if isinstance(one, nn.Linear)]
        # the first one takes rows, the last one makes them
        square = products and products[0].in_features == products[-1].out_features
        return products[0].in_features if square else None
    weights = [one for one in part.parameters(recurse=False) if one.ndim == 1]
    return weights[0].shape[0] if len(weights) == 1 else None


def _kind(part: nn.Module) -> tuple[type, int | None]:
    return type(part), _width(part)


def _rows_for(part: nn.Module) -> list[Tensor]:
    """Rows to try a part with, the same on every rank."""
    weight, width = next(part.parameters()), _width(part)
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(1, n, width or 1, generator=draw).to(weight.device, weight.dtype) for n in TRIED]


def _compiled(part: nn.Module, backend: str | Callable) -> Callable[[Tensor], Tensor]:
    """The forward of a part, compiled for any number of rows; whatever the shape of a call is, it sees them in one line."""
    plain = part.forward
    call = torch.compile(plain, dynamic=True, backend=backend, options=_options() if backend == "inductor" else None)

    def forward(x: Tensor) -> Tensor:
        # an expert may get no rows, for which nothing need be compiled
        return call(x.flatten(0, -2)[None]).view(x.shape) if x.numel() else plain(x)

    return forward


def _options() -> dict[str, Any]:
    """Of inductor: sums made by rules, where it can, and no processes beside this one, which would outlive the few kernels."""
    import torch._inductor.config

    return {"compile_threads": 1} | (
        {"deterministic": True} if hasattr(torch._inductor.config, "deterministic") else {}
    )


def _difference(name: str, found: Tensor, expected: Tensor) -> str:
    """What is wrong with what a compiled part gave; empty when nothing is."""
    x, y = found.float(), expected.float()
    apart, size = (float(z.square().mean().sqrt()) for z in (x - y, y))
    if found.dtype == expected.dtype and apart <= SPAN * torch.finfo(expected.dtype).eps * size:
        return ""
    return f"{name} compiled differs by {apart:.2g} where numbers are of {size:.2g}"
