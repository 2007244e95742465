"""Packed partials: a rank's attention over its own keys in one flat buffer, its merge with others, and the end as o and lse.

Triton merges on a GPU where it is installed, torch elsewhere; `kernels.partials.merge` is the definition.

Shape legend: `r` rows, one per batch element, query token and head, in the order b, s, h.

Note [Packed parts]
    The partial of r rows (Note [Softmax state] of interface.py: log2 units) is one flat fp32 buffer of r * (dv + 2) numbers:
    first acc `r dv`, then m `r`, then l `r`. The identity is (-inf, 0, 0). A stack of p of them is `p, r * (dv + 2)`. They are
    merged in the order of the stack, so all ranks have the same bits. A sink is the partial (sink, 1, 0) of its head and is
    merged once, first. Where m is -inf, acc is not read: a stack is as high as the longest request may need, and shorter ones
    do not write all of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringattn.kernels.constants import LOG2E
from ringattn.kernels.partials.merge import merge_stack
from ringattn.kernels.runtime.optional_triton import import_optional


def size(rows: int, dv: int) -> int:
    """Numbers in a packed part.

    Example:
        >>> size(32, 128)
        4160
    """
    return rows * (dv + 2)


def views(parts: Tensor, rows: int, dv: int) -> tuple[Tensor, Tensor, Tensor]:
    """M, l and acc of one part, or of a stack of them (Note [Packed parts]).

    Args:
        parts: `rows * (dv + 2)`, or `p, rows * (dv + 2)`; contiguous last dim.

    Returns:
        M `rows`, l `rows` and acc `rows dv`, with the dims of parts in front.
    """
    end = rows * dv
    return parts[..., end : end + rows], parts[..., end + rows :], parts[..., :end].unflatten(-1, (rows, dv))


def clear(parts: Tensor, rows: int, dv: int) -> None:
    """Sets parts to the identity."""
    parts.zero_()
    views(parts, rows, dv)[0].fill_(float("-inf"))


def _triton_for(stack: Tensor) -> Any:
    is_fast = stack.is_cuda and stack.dtype == torch.float32
    return import_optional("ringattn.kernels.partials.packed_triton") if is_fast else None


def merge_parts(stack: Tensor, out: Tensor, rows: int, dv: int) -> None:
    """Merges a stack of parts into one, in the order of the stack.

    Args:
        stack: `p, rows * (dv + 2)` fp32 (fp64 for fp64 inputs), contiguous last dim.
        out: `rows * (dv + 2)`, like a part; written. Not in stack.
    """
    fast = _triton_for(stack)
    if fast is not None:
        fast.merge_parts(stack, out, rows, dv)
        return
    for target, x in zip(views(out, rows, dv), merge_stack(*views(stack, rows, dv), log2=True), strict=True):
        target.copy_(x)


def finish_parts(stack: Tensor, rows: int, dv: int, sinks: Tensor | None, o: Tensor, lse: Tensor) -> None:
    """Merges a stack of parts in its order, the sinks before them, and normalises.

    A row of which no part has seen a key is o = 0 and lse = -inf, or the sink.

    Args:
        stack: `p, rows * (dv + 2)` fp32 (fp64 for fp64 inputs), contiguous last dim.
        sinks: `h`, the dtype of stack, natural log; None for none.
        o: `b s h dv`, contiguous, any floating dtype; written.
        lse: `b h s`, the dtype of stack, contiguous, natural log; written.
    """
    fast = _triton_for(stack)
    if fast is not None:
        fast.finish_parts(stack, rows, dv, sinks, o, lse)
        return
    m, l, acc = views(stack, rows, dv)  # noqa: E741
    b, h, s = lse.shape
    if sinks is not None:
        first = (sinks.to(m.dtype) * LOG2E).repeat(b * s)[None]
        m, l = torch.cat((first, m)), torch.cat((torch.ones_like(first), l))  # noqa: E741
        acc = torch.cat((torch.zeros_like(acc[:1]), acc))
    values, total = merge_stack(m, l, acc, log2=True, finish=True, out_dtype=o.dtype)
    o.copy_(values.view(o.shape))
    lse.copy_(total.view(b, s, h).transpose(1, 2))
