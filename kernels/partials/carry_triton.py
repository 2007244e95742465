"""Merge of a normalised partial into a carry in one Triton launch; `kernels.partials.carry` has the formula."""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportPossiblyUnboundVariable=false
# (powers of two may be constants of kernels; a partial or a carry that is absent is known to the compiler)

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.attention.arguments import padded, pair, strides
from ringattn.kernels.interface import SoftmaxState
from ringattn.kernels.partials.merge_triton import normalise
from ringattn.kernels.runtime import bound_launch

NUMBERS = 2048
"""Numbers of acc that a program holds."""


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
    if total_ptr is None:
        acc, top = normalise(tl.where(total == 0, 0.0, top), total, acc, True)
    else:
        tl.store(total_ptr + b * top_sb + head * top_sh + x, total, mask=ok)
    tl.store(top_ptr + b * top_sb + head * top_sh + x, top, mask=ok)
    out = out_ptr + (b * out_sb + x * out_ss + head * out_sh)[:, None] + c[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=inside)


def merge(
    carry: SoftmaxState | None, partial: tuple[Tensor, Tensor] | None, out: SoftmaxState | tuple[Tensor, Tensor]
) -> None:
    """`kernels.partials.carry.merge` for fp32 carries, whose last dims are contiguous, of which not both sides are empty."""
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
