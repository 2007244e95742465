"""Softmax and log-sum-exp of rows of any length, with a fixed number of logits on chip, as public differentiable ops.

Owns the operators (fake, autograd, second derivatives) and the choice between `kernels.softmax.eager` (plain torch) and
`kernels.softmax.softmax_triton` (GPUs).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ringattn.kernels.interface import accumulation_dtype
from ringattn.kernels.softmax import eager
from ringattn.plan.options import resolve_integer
from ringattn.schedule.validation import DTYPES
from ringattn.tensor_checks import check_tensor, has_tangent

IMPLS = ("auto", "eager", "portable")


def online_softmax(x: Tensor, dim: int = -1, *, block_size: int | None = None, impl: str = "auto") -> Tensor:
    """Softmax along one dim in two passes over blocks, for rows of any length.

    The first pass keeps a running maximum and a running sum, the second writes: 2MN reads and MN writes for M rows of N
    logits, with O(block_size) of them on chip. Rows that fit one block are read once; rows that are too long for one
    program are split over programs and merged as partials. Sums are fp32 (fp64 for fp64 logits). Twice differentiable.

    A row that is -inf throughout gives zeros and gradient 0, as an attention row that sees nothing does (torch.softmax
    gives NaN). A row that holds +inf or NaN is NaN throughout.

    Args:
        x: Logits, fp16, bf16, fp32 or fp64, any strides.
        dim: The dim that sums to one.
        block_size: Logits of a row that are looked at together; None chooses. A power of two for "portable".
        impl: "eager" is plain torch. "portable" is Triton: a CUDA or ROCm tensor that is not fp64, or a CPU tensor in
            the Triton interpreter. "auto" takes "portable" for the tensors of a GPU that it can serve, else "eager".

    Returns:
        The softmax, with the shape, dtype and strides of x.

    Raises:
        ValueError: x is not floating or has no dims, dim is out of range, block_size or impl is not one of the above,
            or impl="portable" cannot serve x.
        TypeError: x is no tensor, or dim or block_size no integer.
        NotImplementedError: x has a tangent of forward-mode differentiation, or a meaning of its own, such as a masked tensor.

    Example:
        >>> online_softmax(torch.tensor([1.0, 2.0, 3.0, 10.0]), block_size=2)
        tensor([1.2324e-04, 3.3500e-04, 9.1063e-04, 9.9863e-01])
    """
    dim = _check(x, dim, block_size, impl)
    return torch.ops.ringattn.online_softmax(x, dim, block_size, impl)


def online_logsumexp(x: Tensor, dim: int = -1, *, block_size: int | None = None, impl: str = "auto") -> Tensor:
    """Log-sum-exp along one dim in one pass over blocks: the first half of `online_softmax`.

    Args:
        x: Logits, fp16, bf16, fp32 or fp64, any strides.
        dim: The dim that is reduced.
        block_size: See `online_softmax`; also impl.

    Returns:
        Natural log, x's shape without dim, fp32 (fp64 for fp64 logits). -inf for a row that is -inf throughout, with
        gradient 0; NaN for a row that holds +inf or NaN.

    Raises:
        ValueError: See `online_softmax`; also TypeError and NotImplementedError.

    Example:
        >>> online_logsumexp(torch.tensor([1.0, 2.0, 3.0, 10.0]))
        tensor(10.0014)
    """
    dim = _check(x, dim, block_size, impl)
    return torch.ops.ringattn.online_logsumexp(x, dim, block_size, impl)


def _tiles(block_size: int | None) -> bool:
    # Triton's tiles are powers of two, and a larger one does not fit the registers of a program
    return block_size is None or (block_size <= 1 << 15 and not block_size & (block_size - 1))


def _check(x: Tensor, dim: int, block_size: int | None, impl: str) -> int:
    check_tensor("x", x)
    if x.dtype not in DTYPES:
        raise ValueError(f"x must be fp16, bf16, fp32 or fp64, got {x.dtype}; cast it")
    if x.ndim == 0:
        raise ValueError("x must have at least one dim, got a scalar; unsqueeze it")
    dim = resolve_integer("dim", dim)
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim must be in [{-x.ndim}, {x.ndim}), got {dim}; x has shape {tuple(x.shape)}")
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(IMPLS)}, got {impl!r}; 'auto' always works")
    if block_size is not None and resolve_integer("block_size", block_size) < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}; None chooses one")
    if impl == "portable" and not _tiles(block_size):
        raise ValueError(
            f"block_size must be a power of two up to 32768 for impl='portable', got {block_size}; None chooses one"
        )
    if has_tangent(x):
        raise NotImplementedError(
            "x must be differentiated backward, got a tangent (torch.func.jvp or forward_ad); use torch.softmax or torch.logsumexp"
        )
    return dim % x.ndim


_has_triton = cache(lambda: importlib.util.find_spec("triton") is not None)


def _why_not_portable(x: Tensor) -> str | None:
    if not _has_triton():
        return "triton is not installed"
    if x.dtype == torch.float64:
        return "the Triton kernels keep fp32 sums and x is fp64"
    if x.device.type == "cuda":
        return None
    from triton import knobs

    return None if x.device.type == "cpu" and knobs.runtime.interpret else f"x is on {x.device}, not on a GPU"


def _implementation(x: Tensor, block_size: int | None, impl: str) -> ModuleType:
    if impl == "eager":
        return eager
    obstacle = _why_not_portable(x)
    if impl == "auto":
        # the interpreter is for tests that ask for it by name
        if obstacle is not None or x.device.type != "cuda" or not _tiles(block_size):
            return eager
    elif obstacle is not None:
        raise ValueError(f"impl must be 'eager' or 'auto' for this tensor, got 'portable'; {obstacle}")
    from ringattn.kernels.softmax import softmax_triton

    return softmax_triton


@torch.library.custom_op("ringattn::online_softmax", mutates_args=())
def _softmax(x: Tensor, dim: int, block_size: int | None, impl: str) -> Tensor:
    return _implementation(x, block_size, impl).softmax(x, dim, block_size)


@torch.library.custom_op("ringattn::online_softmax_backward", mutates_args=())
def _softmax_backward(dy: Tensor, y: Tensor, dim: int, block_size: int | None, impl: str) -> Tensor:
    return _implementation(y, block_size, impl).softmax_backward(dy, y, dim, block_size)


@torch.library.custom_op("ringattn::online_logsumexp", mutates_args=())
def _logsumexp(x: Tensor, dim: int, block_size: int | None, impl: str) -> Tensor:
    return _implementation(x, block_size, impl).logsumexp(x, dim, block_size)


@torch.library.custom_op("ringattn::online_logsumexp_backward", mutates_args=())
def _logsumexp_backward(g: Tensor, x: Tensor, lse: Tensor, dim: int, block_size: int | None, impl: str) -> Tensor:
    return _implementation(x, block_size, impl).logsumexp_backward(g, x, lse, dim, block_size)


_softmax.register_fake(lambda x, *_: torch.empty_like(x))
_softmax_backward.register_fake(lambda _, y, *__: torch.empty_like(y))
_logsumexp_backward.register_fake(lambda _, x, *__: torch.empty_like(x))


@_logsumexp.register_fake
def _(x: Tensor, dim: int, block_size: int | None, impl: str) -> Tensor:  # noqa: ARG001
    return x.new_empty([*x.shape[:dim], *x.shape[dim + 1 :]], dtype=accumulation_dtype(x.dtype))


def _saves(which: slice) -> Callable[[Any, tuple[Any, ...], Tensor], None]:
    """Return a function that saves some of the tensors of a call, its output last, and its options."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, dim, block_size, impl = inputs
        ctx.how = dim, block_size, impl
        ctx.save_for_backward(*(*tensors, output)[which])

    return setup_context


def _grad_softmax(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    (y,) = ctx.saved_tensors
    return torch.ops.ringattn.online_softmax_backward(dy, y, *ctx.how), None, None, None


def _grad_softmax_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    # dx = y (dy - sum y dy) is linear in dy with a symmetric matrix, so its transpose is the same op
    dy, y = ctx.saved_tensors
    dim = ctx.how[0]
    dot, cross = (y * dy).sum(dim, keepdim=True), (y * g).sum(dim, keepdim=True)
    return torch.ops.ringattn.online_softmax_backward(g, y, *ctx.how), g * (dy - dot) - dy * cross, None, None, None


def _grad_logsumexp(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    x, lse = ctx.saved_tensors
    return torch.ops.ringattn.online_logsumexp_backward(g, x, lse, *ctx.how), None, None, None


def _grad_logsumexp_backward(ctx: Any, h: Tensor) -> tuple[Any, ...]:
    # dx = g p with p = exp(x - lse): d/dg = sum h p, d/dx = h g p, d/dlse = -sum h g p
    g, x, lse, dx = ctx.saved_tensors
    dim = ctx.how[0]
    p = torch.ops.ringattn.online_logsumexp_backward(torch.ones_like(g), x, lse, *ctx.how)
    grad_x = h * dx
    return (h * p).sum(dim).to(g.dtype), grad_x, -grad_x.sum(dim).to(lse.dtype), None, None, None


_softmax.register_autograd(_grad_softmax, setup_context=_saves(slice(1, None)))
_softmax_backward.register_autograd(_grad_softmax_backward, setup_context=_saves(slice(2)))
_logsumexp.register_autograd(_grad_logsumexp, setup_context=_saves(slice(None)))
_logsumexp_backward.register_autograd(_grad_logsumexp_backward, setup_context=_saves(slice(None)))
