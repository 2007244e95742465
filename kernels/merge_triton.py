"""Merging a stack of fp32 partials in one Triton launch; the formula is Note [Merging a stack] in `kernels.merge`.

Owns the kernel and its launcher. Runs on CUDA and ROCm devices, and on CPU tensors in the Triton interpreter.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
# (powers of two may be constants of kernels, says Triton)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.record_triton import Tape, recorded


@triton.jit
def merge_rows(
    m_ptr, l_ptr, o_ptr, m_at, l_at, o_at, first, row_ok, ok, parts, m_sp, l_sp, o_sp,
    LOG2: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """(m, l, acc) of some rows over all parts, which are walked twice: once for the maximum, once for the sums.

    The pointers are those of the first part, and `m_at`, `l_at`, `o_at` what lies between them and the rows; `first` is the m of
    one more part (m, 1, 0) in front, -inf for none. CACHE says how parts are read.

    Example: parts (m, l) = (3, 2), (-inf, 0), (5, 1) of one row: top 5, total 2 e^-2 + 0 + 1 = 1.2707.
    """
    top = first
    begin = m_ptr
    for _ in tl.range(0, parts, loop_unroll_factor=4):
        top = tl.maximum(top, tl.load(m_ptr + m_at, mask=row_ok, other=float("-inf"), cache_modifier=CACHE))
        m_ptr += m_sp
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.exp2(first - shift) if LOG2 else tl.exp(first - shift)
    acc = tl.zeros(o_at.shape, tl.float32)
    m_ptr = begin
    for _ in tl.range(0, parts, loop_unroll_factor=4):
        d = tl.load(m_ptr + m_at, mask=row_ok, other=float("-inf"), cache_modifier=CACHE) - shift
        scale = tl.exp2(d) if LOG2 else tl.exp(d)
        total += scale * tl.load(l_ptr + l_at, mask=row_ok, other=0.0, cache_modifier=CACHE)
        acc += scale[:, None] * tl.load(o_ptr + o_at, mask=ok, other=0.0, cache_modifier=CACHE)
        m_ptr += m_sp
        l_ptr += l_sp
        o_ptr += o_sp
    return top, total, acc


@triton.jit
def normalise(top, total, acc, LOG2: tl.constexpr):
    """(o, lse) of merged rows; empty ones are 0 and -inf."""
    empty = total == 0
    divisor = tl.where(empty, 1.0, total)
    lse = top * (0.6931471805599453 if LOG2 else 1.0) + tl.log(divisor)
    return acc / divisor[:, None], tl.where(empty, float("-inf"), lse)


@triton.jit
def _merge_stack_kernel(
    m_ptr, l_ptr, o_ptr, top_ptr, total_ptr, acc_ptr, parts, rows, dv, m_sp, m_sr, l_sp, l_sr, o_sp, o_sr, acc_sr,
    ROWS: tl.constexpr, DV: tl.constexpr, LOG2: tl.constexpr, FINISH: tl.constexpr,
):  # fmt: skip
    """One program owns ROWS rows."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, DV)
    row_ok = r < rows
    ok = row_ok[:, None] & (c < dv)[None, :]
    nothing = tl.full([ROWS], float("-inf"), tl.float32)
    o_at = (r * o_sr)[:, None] + c[None, :]
    top, total, acc = merge_rows(
        m_ptr, l_ptr, o_ptr, r * m_sr, r * l_sr, o_at, nothing, row_ok, ok, parts, m_sp, l_sp, o_sp, LOG2, ""
    )  # fmt: skip
    if FINISH:
        acc, lse = normalise(top, total, acc, LOG2)
        tl.store(top_ptr + r, lse, mask=row_ok)
    else:
        tl.store(top_ptr + r, top, mask=row_ok)
        tl.store(total_ptr + r, total, mask=row_ok)
    tl.store(acc_ptr + (r * acc_sr)[:, None] + c[None, :], acc.to(acc_ptr.dtype.element_ty), mask=ok)


def merge_stack(
    m: Tensor,
    l: Tensor,  # noqa: E741
    o: Tensor,
    *,
    log2: bool = False,
    finish: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """As `kernels.merge.merge_stack`, for fp32 partials."""
    _, rows, dv = o.shape
    top = torch.empty(rows, dtype=torch.float32, device=o.device)
    total = None if finish else torch.empty_like(top)
    acc = torch.empty((rows, dv), dtype=(out_dtype or o.dtype) if finish else o.dtype, device=o.device)
    merge_into(m, l, o, top, total, acc, log2=log2, finish=finish)
    return (acc, top) if total is None else (top, total, acc)


@recorded
def merge_into(
    tape: Tape,
    m: Tensor,
    l: Tensor,  # noqa: E741
    o: Tensor,
    top: Tensor,
    total: Tensor | None,
    acc: Tensor,
    *,
    log2: bool,
    finish: bool,
) -> None:
    """Merges into tensors that are given: top `r` (lse, when finishing), total `r` and acc `r dv`."""
    parts, rows, dv = o.shape
    block = triton.next_power_of_2(max(dv, 1))
    per_program = max(1, min(2048 // block, triton.next_power_of_2(max(rows, 1))))
    if rows:
        tape.launch(
            _merge_stack_kernel,
            (-(-rows // per_program),),
            (m, l, o, top, total, acc, parts, rows, dv, *m.stride(), *l.stride(), *o.stride()[:2], acc.stride(0)),
            {"ROWS": per_program, "DV": block, "LOG2": log2, "FINISH": finish},
            num_warps=4,
        )
