"""Token-wise modules, as MLPs, applied to chunks of rows, which the backward computes again.

An MLP of 12,288 columns on 131,072 rows has tensors of 3 GiB in bf16, of which its backward holds several. By chunks only those of
one chunk exist, in both passes. Gradients of parameters are added over chunks in fp32 (fp64 for fp64), so they round as one
product does.

Note [Recomputed once]
    A chunk's activations are computed in the forward and again in the backward. Within a checkpointed layer, whose second run would
    compute the module a third time, the rows are saved before the module runs, and nothing after: torch stops a second run when all
    saved tensors are there, so the module is not run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_current_graph_task_keep_graph as _keeps_graph
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

Function = Callable[[Tensor], Tensor]


def chunk_rows_(modules: Iterable[nn.Module], rows: int) -> None:
    """Make token-wise modules compute `rows` tokens at a time; changes their `forward`.

    Values and gradients are those of whole calls up to rounding. Calls of at most `rows` tokens are left as they are.

    Args:
        modules: Modules from one tensor `... dim` to one tensor, row by row, as MLPs. Dropout draws other
            numbers than in one piece.
        rows: Tokens of a chunk, at least 1.

    Raises:
        ValueError: rows is below 1. In a call: the input or the output is no tensor of rows.

    Example:
        >>> mlp = nn.Sequential(nn.Linear(4, 16), nn.SiLU(), nn.Linear(16, 4))
        >>> chunk_rows_([mlp], 2)
        >>> mlp(torch.ones(1, 5, 4)).shape
        torch.Size([1, 5, 4])
    """
    if rows < 1:
        raise ValueError(f"rows must be at least 1, got {rows}; 8192 is a good number at long context")
    for module in modules:
        module.forward = functools.wraps(module.forward)(
            functools.partial(_chunked_forward, module.forward, module, rows)
        )


def chunked_rows(function: Function, x: Tensor, rows: int, parameters: Sequence[Tensor] = ()) -> Tensor:
    """Return `function(x)`, computed for `rows` tokens at a time, in the backward again.

    Args:
        function: From `1 r dim` rows (`r dim` where x is) to as many rows; each depends on its own alone.
        x: `... dim`.
        rows: Tokens of a chunk.
        parameters: What else the function needs gradients of: the parameters of a module.
    """
    if x.dim() < 2:
        raise ValueError(
            f"rows must be ... x dim, got shape {tuple(x.shape)}; pass a tensor with a dimension of tokens"
        )
    flat = x if x.dim() == 2 else x.flatten(0, -2)[None]
    if flat.shape[-2] <= rows:
        return function(x)
    wanted = [p for p in parameters if p.requires_grad]
    saved: Any = None
    if torch.is_grad_enabled() and (x.requires_grad or wanted):
        saved = [_SaveRows.apply(torch.empty(0, device=x.device, requires_grad=True), flat)]
    found: Any = _ChunkedRows.apply(function, rows, saved, flat, *wanted)
    return found.view(*x.shape[:-1], found.shape[-1])


def _chunked_forward(forward: Function, module: nn.Module, rows: int, x: Tensor) -> Tensor:
    return chunked_rows(forward, x, rows, list(module.parameters()))


class _SaveRows(torch.autograd.Function):
    """Saves rows for a function that runs later (Note [Recomputed once])."""

    @staticmethod
    def forward(ctx: Any, unused: Tensor, rows: Tensor) -> Tensor:
        """Save."""
        ctx.save_for_backward(rows)
        return unused.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:  # noqa: ARG004
        """Never runs: nothing is made of the result."""
        raise AssertionError("no gradient leads here")


class _ChunkedRows(torch.autograd.Function):
    """Rows by chunks."""

    @staticmethod
    def forward(ctx: Any, function: Function, rows: int, saved: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        """Return the result of all rows, which the one result in `saved` has saved."""
        if saved is not None:
            # the tensor, without which torch 2.11 frees what its node has saved
            ctx.function, ctx.rows, ctx.saved, ctx.parameters, ctx.state = function, rows, saved, parameters, _State(x)
        result: Tensor | None = None
        for part, first in _parts(x, rows):
            y = function(part)
            if not isinstance(y, Tensor) or y.shape[:-1] != part.shape[:-1]:
                got = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
                raise ValueError(
                    f"a module by chunks must make {tuple(part.shape[:-1])} rows of as many, got {got}; leave this module whole"
                )
            if result is None:
                result = y.new_empty(*x.shape[:-1], y.shape[-1])
            result[..., first : first + part.shape[-2], :] = y
        assert result is not None, "there is more than one chunk"
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return gradients of x and of the parameters."""
        if ctx.saved is None:
            raise RuntimeError(
                "the backward of a module by chunks must run once, got a second time; pass retain_graph=True to the first"
            )
        (x,) = ctx.saved[0].grad_fn.saved_tensors
        if not _keeps_graph():
            ctx.saved = None  # frees the rows
        needs_x = ctx.needs_input_grad[3]
        dx = torch.empty_like(x) if needs_x else None
        sums: list[Tensor | None] = [None] * len(ctx.parameters)
        with ctx.state.again():
            for part, first in _parts(x, ctx.rows):
                here = (..., slice(first, first + part.shape[-2]), slice(None))
                part = part.detach().requires_grad_(needs_x)
                with torch.enable_grad():
                    y = ctx.function(part)
                inputs = [part, *ctx.parameters] if needs_x else list(ctx.parameters)
                made = list(torch.autograd.grad(y, inputs, grad[here], allow_unused=True))
                if dx is not None:
                    dx[here] = made.pop(0)
                sums = [_add(total, one) for total, one in zip(sums, made, strict=True)]
                del made  # not beside the activations of the next chunk
        ends = (None if s is None else s.to(p.dtype) for s, p in zip(sums, ctx.parameters, strict=True))
        return None, None, None, dx, *ends


def _parts(x: Tensor, rows: int) -> Iterable[tuple[Tensor, int]]:
    """Return chunks of `... r dim` rows, each with the number of its first row."""
    return zip(x.split(rows, -2), range(0, x.shape[-2], rows), strict=True)


def _add(so_far: Tensor | None, one: Tensor | None) -> Tensor | None:
    if one is None:
        return so_far
    if so_far is None:
        return one.to(torch.promote_types(one.dtype, torch.float32))
    return so_far.add_(one)


class _State:
    """Autocast and random numbers of a forward, for its second run."""

    def __init__(self, x: Tensor) -> None:
        kind = self._kind = x.device.type
        self._autocast = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        self._cpu = torch.get_rng_state()
        self._devices, self._states = get_device_states(x) if x.is_cuda else ([], [])

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context like that of the forward."""
        dtype, enabled = self._autocast
        with torch.random.fork_rng(self._devices), torch.autocast(self._kind, dtype=dtype, enabled=enabled):
            torch.set_rng_state(self._cpu)
            set_device_states(self._devices, self._states)
            yield
