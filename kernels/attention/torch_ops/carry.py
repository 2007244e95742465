"""Merge of a normalised partial (o, lse) into the carry (m, l, acc) of its rows, in plain torch; `rows_triton` does it on GPUs.

An operator that normalises gives o and lse of some keys, which are the partial (lse, 1, o). With M = max(m, lse):

    l = l 2^(m - M) + 2^(lse - M)        acc = acc 2^(m - M) + o 2^(lse - M)        m = M

where m and lse are in log2 units, as in kernels. An empty carry (-inf, 0, anything) contributes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ringattn.kernels.constants import LOG2E
from ringattn.kernels.interface import SoftmaxState
from ringattn.kernels.runtime.optional_triton import import_optional

Merged = SoftmaxState | tuple[Tensor, Tensor]
"""A carry, or o and lse of finished rows."""
PARTS = 4
"""Partials that one launch merges."""
Span = tuple[int, int]
"""Rows: [first, end)."""
Part = tuple[tuple[Tensor, Tensor], Span]
"""A partial, contiguous, and its rows."""


def of_sinks(sinks: Tensor, o: Tensor, lse: Tensor) -> SoftmaxState:
    """Return the carry of sinks `h`, in natural log units, for o `b s h dv` and lse `b h s`; acc is one row, expanded."""
    m = (sinks.to(lse.dtype) * LOG2E)[:, None].expand(lse.shape).contiguous()
    return SoftmaxState(m, (m > -math.inf).to(m.dtype), m.new_zeros(o.shape[-1]).expand(o.shape))


def merge(carry: SoftmaxState | None, partial: tuple[Tensor, Tensor] | None, out: Merged) -> None:
    """Merge a partial into a carry.

    Args:
        carry: m and l `b h s`, acc `b s h dv`; None: empty.
        partial: o `b s h dv`, normalised, any floating dtype, and lse `b h s`, natural log, the dtype of m; None: empty.
        out: Where the merged carry goes, which may be `carry`; or o and lse, where the finished rows go. A finished row that
            has seen nothing is 0 and -inf.
    """
    if carry is None and (partial is None or isinstance(out, tuple)):
        _copy(partial, out)
        return
    wide = carry.m if carry is not None else out.m if isinstance(out, SoftmaxState) else out[1]
    is_fast = wide.is_cuda and wide.dtype == torch.float32
    fast = import_optional("ringattn.kernels.attention.torch_ops.rows_triton") if is_fast else None
    if fast is not None:
        fast.merge(carry, partial, out)
        return
    merged = carry
    if partial is not None:
        o, lse = partial
        m = lse * LOG2E
        merged = SoftmaxState(m, (m > -math.inf).to(m.dtype), o.to(m.dtype))
        if carry is not None:
            top = torch.maximum(carry.m, m)
            shift = top.masked_fill(top == -math.inf, 0.0)
            kept, added = torch.exp2(carry.m - shift), torch.exp2(m - shift)
            acc = carry.acc * _per_row(kept) + merged.acc * _per_row(added)
            merged = SoftmaxState(top, carry.l * kept + added, acc)
    assert merged is not None, "two empty sides were copied"
    if isinstance(out, SoftmaxState):
        for target, x in zip((out.m, out.l, out.acc), (merged.m, merged.l, merged.acc), strict=True):
            target.copy_(x)
        return
    o, lse = out
    lse.copy_(merged.m.masked_fill(merged.m == -math.inf, 0.0) / LOG2E + merged.l.log())
    o.copy_(merged.acc / _per_row(merged.l.masked_fill(merged.l == 0, 1.0)))


def merge_parts(carry: SoftmaxState | None, parts: Sequence[Part], out: Merged) -> None:
    """Merge at most PARTS partials into a carry at once, as `merge` of each; an `out` that is the carry keeps its other rows."""
    if carry is not None and carry is out:
        low, high = min(first for _, (first, _) in parts), max(end for _, (_, end) in parts)
        carry = out = SoftmaxState(carry.m[:, :, low:high], carry.l[:, :, low:high], carry.acc[:, low:high])
        parts = [(partial, (first - low, end - low)) for partial, (first, end) in parts]
    acc, wide = (out.acc, out.m) if isinstance(out, SoftmaxState) else out
    is_fast = wide.is_cuda and wide.dtype == torch.float32
    fast = import_optional("ringattn.kernels.attention.torch_ops.rows_triton") if is_fast else None
    if fast is not None:
        fast.merge_parts(carry, parts, out)
        return
    state = SoftmaxState(torch.empty_like(wide), torch.empty_like(wide), torch.empty_like(acc, dtype=wide.dtype))
    merge(carry, None, state)
    for partial, (first, end) in parts:
        rows = SoftmaxState(state.m[:, :, first:end], state.l[:, :, first:end], state.acc[:, first:end])
        merge(rows, partial, rows)
    merge(state, None, out)


def add_rows(parts: Sequence[tuple[Tensor, Span]], target: Tensor, *, accumulate: bool) -> None:
    """Add at most PARTS gradients of some rows, contiguous, to those of all rows `b s h d`, or write their sums."""
    is_fast = target.is_cuda and target.dtype != torch.float64
    fast = import_optional("ringattn.kernels.attention.torch_ops.rows_triton") if is_fast else None
    if fast is not None:
        fast.add_rows(parts, target, accumulate=accumulate)
        return
    if not accumulate:
        target.zero_()
    for found, (first, end) in parts:
        target[:, first:end] += found


def _copy(partial: tuple[Tensor, Tensor] | None, out: Merged) -> None:
    """Write a partial, or nothing, where no carry was."""
    if isinstance(out, SoftmaxState):
        out.acc.zero_()
        out.l.zero_()
        out.m.fill_(-math.inf)
    elif partial is None:
        out[0].zero_()
        out[1].fill_(-math.inf)
    else:
        out[0].copy_(partial[0])
        out[1].copy_(partial[1])


def _per_row(x: Tensor) -> Tensor:
    """`b h s` -> `b s h 1`."""
    return x.transpose(1, 2)[..., None]
