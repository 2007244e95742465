"""Merging and finishing packed parts in one Triton launch each (Note [Packed parts] of kernels.partials.packed)."""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.decode.configs import multiprocessors
from ringattn.kernels.partials.merge_triton import merge_into, merge_rows, merging, normalise
from ringattn.kernels.partials.packed import views
from ringattn.kernels.runtime import bound_launch


@triton.jit
def merge_tile(
    stack, parts, part_stride, rows, dv, first, r, c, row_ok, ok, CACHE: tl.constexpr, TOGETHER: tl.constexpr
):
    """(m, l, acc) of rows r over the packed parts of a stack; `first` as in `merge_rows`."""
    m = stack + rows.to(tl.int64) * dv
    acc_at = (r * dv)[:, None] + c[None, :]
    return merge_rows(
        m, m + rows, stack, r, r, acc_at, first, row_ok, ok, parts, part_stride, part_stride, part_stride, True, CACHE, TOGETHER
    )  # fmt: skip


@triton.jit
def first_of(sinks, r, heads, row_ok):
    """The m with which rows begin: of the sinks of their heads, or of nothing."""
    first = tl.full(r.shape, float("-inf"), tl.float32)
    if sinks is not None:
        first = tl.load(sinks + r % heads, mask=row_ok, other=float("-inf")) * 1.4426950408889634
    return first


@triton.jit
def store_finished(o, lse, values, total, heads, queries, dv, r, c, once, ok):
    """Writes columns c of rows r, in the order b, s, h, of o `b s h dv`, and those `once` of lse `b h s`."""
    token = r // heads
    at = ((token // queries) * heads + r % heads) * queries + token % queries
    tl.store(lse + at, total, mask=once)
    tl.store(o + (r * dv)[:, None] + c[None, :], values.to(o.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["parts", "rows", "heads", "queries"])
def _finish_parts_kernel(
    stack, sinks, o, lse, parts, part_stride, rows, heads, queries, dv,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """One program owns COLUMNS columns of ROWS rows."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row_ok = r < rows
    ok = row_ok[:, None] & (c < dv)[None, :]
    first = first_of(sinks, r, heads, row_ok)
    top, total, acc = merge_tile(stack, parts, part_stride, rows, dv, first, r, c, row_ok, ok, "", TOGETHER)
    values, logs = normalise(top, total, acc, True)
    store_finished(o, lse, values, logs, heads, queries, dv, r, c, row_ok & (tl.program_id(1) == 0), ok)


def merge_parts(stack: Tensor, out: Tensor, rows: int, dv: int) -> None:
    """`kernels.partials.packed.merge_parts` on a GPU."""
    merge_into(*views(stack, rows, dv), *views(out, rows, dv), log2=True, finish=False)


def finish_parts(stack: Tensor, rows: int, dv: int, sinks: Tensor | None, o: Tensor, lse: Tensor) -> None:
    """`kernels.partials.packed.finish_parts` on a GPU."""
    _, heads, queries = lse.shape
    tile = merging(stack.shape[0], rows, dv, multiprocessors(stack.device))
    if rows:
        bound_launch.launch(
            _finish_parts_kernel,
            tile.grid(rows, dv),
            (stack, sinks, o, lse, stack.shape[0], stack.stride(0), rows, heads, queries, dv),
            {"ROWS": tile.rows, "COLUMNS": tile.columns, "TOGETHER": tile.together},
            num_warps=tile.warps,
        )
