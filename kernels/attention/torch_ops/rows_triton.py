"""Kernels around torch's operators, in one Triton launch each: the formulas are those of `carry` and `delta_output`.

torch's own `+=` and `copy_` fall short of the speed of memory where they convert between dtypes.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportPossiblyUnboundVariable=false
# (powers of two may be constants of kernels; a partial or a carry that is absent is known to the compiler)

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.attention.arguments import padded, pair, strides
from ringattn.kernels.attention.torch_ops.carry import PARTS, Merged, Part, Span
from ringattn.kernels.attention.torch_ops.delta_output import limits
from ringattn.kernels.interface import SoftmaxState
from ringattn.kernels.partials.merge_triton import normalise
from ringattn.kernels.runtime import bound_launch

NUMBERS = 2048
"""Numbers of each tensor that a program holds."""


@triton.jit
def _store_merged(top, total, acc, top_ptr, total_ptr, out_ptr, at, out_at, c, ok, inside):
    """Store a merged carry; without a pointer to totals, o and lse of finished rows."""
    if total_ptr is None:
        acc, top = normalise(tl.where(total == 0, 0.0, top), total, acc, True)
    else:
        tl.store(total_ptr + at, total, mask=ok)
    tl.store(top_ptr + at, top, mask=ok)
    tl.store(out_ptr + out_at[:, None] + c[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _merge_kernel(
    o_ptr, lse_ptr, m_ptr, l_ptr, acc_ptr, top_ptr, total_ptr, out_ptr, o_sb, o_ss, o_sh, lse_sb, lse_sh, lse_ss,
    m_sb, m_sh, acc_sb, acc_ss, acc_sh, top_sb, top_sh, out_sb, out_ss, out_sh, h, rows, dv,
    ROWS: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Merge ROWS rows of (s, h), in this order, of a batch element.

    None: no partial (o, lse), no carry (m, l, acc), or no total, as at the end. Statistics of one carry have equal strides, 1
    along s.
    """
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = r < rows
    b, x, head = tl.program_id(1).to(tl.int64), (r // h).to(tl.int64), r % h
    # numbers of one store, for loads too: wider loads of a narrower dtype pass through shared memory on their way to it
    c = tl.max_contiguous(tl.arange(0, DV), 128 // out_ptr.dtype.element_ty.primitive_bitwidth)
    inside = ok[:, None] & (c < dv)[None, :]
    if o_ptr is not None:
        lse = tl.load(lse_ptr + b * lse_sb + head * lse_sh + x * lse_ss, mask=ok, other=0.0)
        top = lse * 1.4426950408889634
        total = tl.where(top == float("-inf"), 0.0, 1.0)
        o_at = (b * o_sb + x * o_ss + head * o_sh)[:, None] + c[None, :]
        acc = tl.load(o_ptr + o_at, mask=inside, other=0.0).to(tl.float32)
    if m_ptr is not None:
        at = b * m_sb + head * m_sh + x
        m, l = tl.load(m_ptr + at, mask=ok, other=0.0), tl.load(l_ptr + at, mask=ok, other=0.0)  # noqa: E741
        acc_at = (b * acc_sb + x * acc_ss + head * acc_sh)[:, None] + c[None, :]
        before = tl.load(acc_ptr + acc_at, mask=inside, other=0.0)
        if o_ptr is not None:
            highest = tl.maximum(m, top)
            shift = tl.where(highest == float("-inf"), 0.0, highest)
            kept, added = tl.exp2(m - shift), tl.exp2(top - shift)
            top, total = highest, l * kept + added
            acc = before * kept[:, None] + acc * added[:, None]
        else:
            top, total, acc = m, l, before
    at = b * top_sb + head * top_sh + x
    _store_merged(
        top, total, acc, top_ptr, total_ptr, out_ptr, at, b * out_sb + x * out_ss + head * out_sh, c, ok, inside
    )


def merge(carry: SoftmaxState | None, partial: tuple[Tensor, Tensor] | None, out: Merged) -> None:
    """`carry.merge` for fp32 carries, whose last dims are contiguous, of which not both sides are empty."""
    acc, top, total = (out.acc, out.m, out.l) if isinstance(out, SoftmaxState) else (*out, None)
    m, l, before = (None, None, None) if carry is None else (carry.m, carry.l, carry.acc)  # noqa: E741
    o, lse = (None, None) if partial is None else partial
    b, s, h, dv = acc.shape
    for x, y in ((m, l), (top, total)):
        assert x is None or y is None or x.stride() == y.stride(), "both statistics of a carry have one layout"
    width = padded(dv)
    held = max(1, NUMBERS // width)
    if acc.numel():
        bound_launch.launch(
            _merge_kernel,
            (-(-s * h // held), b),
            (o, lse, m, l, before, top, total, acc, *strides(o), *strides(lse), *pair(m), *strides(before), *pair(top),
             *strides(acc), h, s * h, dv),
            {"ROWS": held, "DV": width},
            num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["first0", "end0", "first1", "end1", "first2", "end2", "first3", "end3"])
def _merge_parts_kernel(
    os, lses, m_ptr, l_ptr, acc_ptr, top_ptr, total_ptr, out_ptr, first0, end0, first1, end1, first2, end2, first3, end3,
    m_sb, m_sh, acc_sb, acc_ss, acc_sh, top_sb, top_sh, out_sb, out_ss, out_sh, h, rows, dv,
    ROWS: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Merge ROWS rows of (s, h) of a carry, or of nothing, with those of partials `b s h dv` that lie in [first, end).

    None: as in `_merge_kernel`.
    """
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = r < rows
    b, x, head = tl.program_id(1).to(tl.int64), (r // h).to(tl.int64), r % h
    c = tl.max_contiguous(tl.arange(0, DV), 128 // out_ptr.dtype.element_ty.primitive_bitwidth)
    inside = ok[:, None] & (c < dv)[None, :]
    if m_ptr is not None:
        at = b * m_sb + head * m_sh + x
        top, total = tl.load(m_ptr + at, mask=ok, other=0.0), tl.load(l_ptr + at, mask=ok, other=0.0)
        acc_at = (b * acc_sb + x * acc_ss + head * acc_sh)[:, None] + c[None, :]
        acc = tl.load(acc_ptr + acc_at, mask=inside, other=0.0)
    else:
        top, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, DV), tl.float32)
    firsts, ends = (first0, first1, first2, first3), (end0, end1, end2, end3)
    for i in tl.static_range(len(os)):
        num, row = ends[i] - firsts[i], x - firsts[i]
        seen = ok & (row >= 0) & (row < num)
        added = tl.load(lses[i] + (b * h + head) * num + row, mask=seen, other=float("-inf")) * 1.4426950408889634
        o_at = (((b * num + row) * h + head) * dv)[:, None] + c[None, :]
        o = tl.load(os[i] + o_at, mask=inside & seen[:, None], other=0.0).to(tl.float32)
        highest = tl.maximum(top, added)
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        kept, weight = tl.exp2(top - shift), tl.exp2(added - shift)
        top, total, acc = highest, total * kept + weight, acc * kept[:, None] + o * weight[:, None]
    at = b * top_sb + head * top_sh + x
    _store_merged(
        top, total, acc, top_ptr, total_ptr, out_ptr, at, b * out_sb + x * out_ss + head * out_sh, c, ok, inside
    )


def merge_parts(carry: SoftmaxState | None, parts: Sequence[Part], out: Merged) -> None:
    """`carry.merge_parts` for fp32 carries, whose last dims are contiguous; at least one partial."""
    acc, top, total = (out.acc, out.m, out.l) if isinstance(out, SoftmaxState) else (*out, None)
    m, l, before = (None, None, None) if carry is None else (carry.m, carry.l, carry.acc)  # noqa: E741
    b, s, h, dv = acc.shape
    width = padded(dv)
    held = max(1, NUMBERS // width)
    os, lses = zip(*(partial for partial, _ in parts), strict=True)
    bound_launch.launch(
        _merge_parts_kernel,
        (-(-s * h // held), b),
        (os, lses, m, l, before, top, total, acc, *_spans(parts), *pair(m), *strides(before), *pair(top), *strides(acc), h,
         s * h, dv),
        {"ROWS": held, "DV": width},
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _output_for_kernel(
    do_ptr, delta_ptr, o_ptr, used_ptr, do_sb, do_ss, do_sh, s, h, rows, d, most, least, root,
    ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Make ROWS rows of (b, s, h), in this order; o and the do to use (None: the given) are contiguous, and so is delta `b h s`."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = r < rows
    # divided in 32 bits, which hold the number of rows, and multiplied by strides in 64
    b, x, head = (r // (s * h)).to(tl.int64), (r // h % s).to(tl.int64), r % h
    c = tl.arange(0, D)
    inside = ok[:, None] & (c < d)[None, :]
    given = tl.load(do_ptr + (b * do_sb + x * do_ss + head * do_sh)[:, None] + c[None, :], mask=inside, other=0.0)
    do = given.to(tl.float32)
    wanted = tl.load(delta_ptr + (b * h + head) * s + x, mask=ok, other=0.0)
    # taken relative to the largest element: a square may have no room in fp32
    top = tl.max(tl.abs(do), 1)
    safe = tl.where(top > 0, top, 1.0)
    near = do / safe[:, None]
    norm = safe * tl.sqrt(tl.sum(near * near, 1))
    lost = tl.abs(wanted) > most * norm
    ratio = tl.where(lost | (norm == 0), 0.0, wanted / norm / norm)
    o = do * ratio[:, None]
    at = (r.to(tl.int64) * d)[:, None] + c[None, :]
    if used_ptr is not None:
        constant = tl.maximum(tl.exp2(tl.ceil(tl.log2(tl.abs(wanted) / (most * root)))), least)
        others = (wanted / constant / d).to(o_ptr.dtype.element_ty)
        first = wanted / constant - (d - 1) * others.to(tl.float32)
        o = tl.where(lost[:, None], tl.where((c == 0)[None, :], first[:, None], others.to(tl.float32)[:, None]), o)
        used = tl.where(lost[:, None], constant[:, None], do)
        tl.store(used_ptr + at, used.to(o_ptr.dtype.element_ty), mask=inside)
    tl.store(o_ptr + at, o.to(o_ptr.dtype.element_ty), mask=inside)


def output_for(do: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """`delta_output.output_for` for fp32 delta."""
    b, s, h, d = do.shape
    o = torch.empty(do.shape, dtype=do.dtype, device=do.device)
    used = None if do.dtype == torch.float16 else torch.empty_like(o)
    width, (most, least) = padded(d), limits(do.dtype)
    held = max(1, NUMBERS // width)
    if do.numel():
        bound_launch.launch(
            _output_for_kernel,
            (-(-b * s * h // held),),
            (do, delta.contiguous(), o, used, *strides(do), s, h, b * s * h, d, most, least, math.sqrt(d)),
            {"ROWS": held, "D": width},
            num_warps=4,
        )
    return o, do if used is None else used


@triton.jit(do_not_specialize=["first0", "end0", "first1", "end1", "first2", "end2", "first3", "end3"])
def _add_rows_kernel(
    found, target_ptr, first0, end0, first1, end1, first2, end2, first3, end3, target_sb, target_ss, target_sh, h, rows, d,
    ROWS: tl.constexpr, D: tl.constexpr, ADD: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Add the rows [first, end) that each of `found` has to ROWS rows of (s, h) of a batch element of target, or write their sums.

    EVEN: rows of (s, h) lie at equal distances in target, target_sh, and one found has all: no division tells where they are.
    """
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b = tl.program_id(1).to(tl.int64)
    # numbers of one store, for loads too: wider loads of a narrower dtype pass through shared memory on their way to it
    c = tl.max_contiguous(tl.arange(0, D), 128 // target_ptr.dtype.element_ty.primitive_bitwidth)
    inside = (r < rows)[:, None] & (c < d)[None, :]
    if EVEN:
        at = r.to(tl.int64) * target_sh
        found_at = (b * rows + r)[:, None] * d + c[None, :]
        total = tl.load(found[0] + found_at, mask=inside, other=0.0).to(tl.float32)
    else:
        x, head = (r // h).to(tl.int64), r % h
        at = x * target_ss + head * target_sh
        firsts, ends = (first0, first1, first2, first3), (end0, end1, end2, end3)
        total = tl.zeros((ROWS, D), tl.float32)
        for i in tl.static_range(len(found)):
            num, row = ends[i] - firsts[i], x - firsts[i]
            found_at = (((b * num + row) * h + head) * d)[:, None] + c[None, :]
            seen = inside & ((row >= 0) & (row < num))[:, None]
            total += tl.load(found[i] + found_at, mask=seen, other=0.0).to(tl.float32)
    at = at[:, None] + c[None, :]
    if ADD:
        total += tl.load(target_ptr + b * target_sb + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(target_ptr + b * target_sb + at, total.to(target_ptr.dtype.element_ty), mask=inside)


def add_rows(parts: Sequence[tuple[Tensor, Span]], target: Tensor, *, accumulate: bool) -> None:
    """`carry.add_rows` for fp32 targets, whose last dim is contiguous, and contiguous parts."""
    b, s, h, d = target.shape
    width = padded(d)
    held = max(1, NUMBERS // width)
    even = len(parts) == 1 and parts[0][1] == (0, s) and (s == 1 or target.stride(1) == h * target.stride(2))
    if target.numel() and parts:
        bound_launch.launch(
            _add_rows_kernel,
            (-(-s * h // held), b),
            (tuple(x for x, _ in parts), target, *_spans(parts), *strides(target), h, s * h, d),
            {"ROWS": held, "D": width, "ADD": accumulate, "EVEN": even},
            num_warps=4,
        )


def _spans(parts: Sequence[tuple[object, Span]]) -> list[int]:
    """The spans of at most PARTS parts, as arguments."""
    return [x for _, span in parts for x in span] + [0] * (2 * (PARTS - len(parts)))
