"""Merge of a stack of fp32 partials in one Triton launch; `kernels.partials.merge` has the formula."""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

from __future__ import annotations

import functools
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.decode.configs import multiprocessors
from ringattn.kernels.runtime import bound_launch

LEAST, MOST = 32, 512
"""Numbers of acc that a program holds: a line of memory, and what 4 warps load in words of 16 bytes."""
IN_FLIGHT = 48
"""Numbers of acc for which a thread waits at once, in registers."""


@dataclass(frozen=True)
class Tile:
    """Rows and columns that a merging program owns."""

    rows: int
    columns: int
    warps: int
    together: int

    def grid(self, rows: int, dv: int) -> tuple[int, int]:
        """Programs for all rows and columns."""
        return -(-rows // self.rows), -(-dv // self.columns)


@functools.lru_cache(maxsize=4096)
def merging(parts: int, rows: int, dv: int, programs: int) -> Tile:
    """Division of a stack among programs: rows are cut into columns until every multiprocessor has a program.

    Merging waits for memory: a program reads m of all parts, then l and acc of all, loaded together.

    Example:
        >>> merging(33, 32, 128, programs=132)
        Tile(rows=1, columns=32, warps=1, together=40)
        >>> merging(4, 4096, 128, programs=132)
        Tile(rows=4, columns=128, warps=4, together=4)
    """
    width = _power(dv)
    numbers = min(max(_power(rows * width // programs), LEAST), MOST)
    columns = min(width, numbers)
    held = min(numbers // columns, _power(rows))
    warps = min(4, max(1, held * columns // 128))
    return Tile(held, columns, warps, together(parts, held * columns, warps))


def together(parts: int, numbers: int, warps: int) -> int:
    """Number of parts that a program reads at once, when it holds so many numbers of each.

    Few values, since each is a kernel of its own: powers of two up to 8, then multiples of 8.
    """
    most = max(1, IN_FLIGHT * 32 * warps // max(numbers, 32 * warps))
    even = -(-parts // -(-parts // most)) if parts else 1
    return min(most, _power(even) if even <= 8 else -(-even // 8) * 8)


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@triton.jit
def merge_rows(
    m_ptr, l_ptr, o_ptr, m_at, l_at, o_at, first, row_ok, ok, parts, m_sp, l_sp, o_sp,
    LOG2: tl.constexpr, CACHE: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """(m, l, acc) of some rows over all parts: the maximum of all, then the sums, part by part in their order.

    The pointers are those of the first part; `m_at`, `l_at`, `o_at` are offsets of the rows; `first` is the m of one more part
    (m, 1, 0) in front, -inf for none. CACHE is the cache modifier of loads of parts. TOGETHER parts are loaded at once, which
    changes no bit: beyond the last part stand identities.

    Example: parts (m, l) = (3, 2), (-inf, 0), (5, 1) of one row: top 5, total 2 e^-2 + 0 + 1 = 1.2707.
    """
    WIDE: tl.constexpr = triton.next_power_of_2(TOGETHER) if TOGETHER <= 4 else 32
    p = tl.arange(0, WIDE)
    tops = tl.full([m_at.shape[0], WIDE], float("-inf"), tl.float32)
    height = tl.zeros([m_at.shape[0], WIDE], tl.int32)  # what lies above holds nothing
    for base in tl.range(0, parts, WIDE):
        at = (m_ptr + m_at)[:, None] + ((base + p).to(tl.int64) * m_sp)[None, :]
        there = row_ok[:, None] & (base + p < parts)[None, :]
        tried = tl.load(at, mask=there, other=float("-inf"), cache_modifier=CACHE)
        tops = tl.maximum(tops, tried)
        height = tl.where(tried == float("-inf"), height, (base + p + 1)[None, :])
    parts = tl.max(tl.max(height, 1), 0)
    top = tl.maximum(first, tl.max(tops, 1))
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.exp2(first - shift) if LOG2 else tl.exp(first - shift)
    acc = tl.zeros(o_at.shape, tl.float32)
    for base in tl.range(0, parts, TOGETHER):
        asked = ()
        for i in tl.static_range(TOGETHER):
            there = base + i < parts
            m = tl.load(m_ptr + m_at, mask=row_ok & there, other=float("-inf"), cache_modifier=CACHE)
            l = tl.load(l_ptr + l_at, mask=row_ok & there, other=0.0, cache_modifier=CACHE)  # noqa: E741
            o = tl.load(o_ptr + o_at, mask=ok & there, other=0.0, cache_modifier=CACHE)
            asked = asked + ((m, l, o),)  # noqa: RUF005 (Triton unpacks nothing)
            m_ptr, l_ptr, o_ptr = m_ptr + m_sp, l_ptr + l_sp, o_ptr + o_sp
        for i in tl.static_range(TOGETHER):
            m, l, o = asked[i]  # noqa: E741
            scale = tl.exp2(m - shift) if LOG2 else tl.exp(m - shift)
            total += scale * l
            acc += tl.where((m == float("-inf"))[:, None], 0.0, scale[:, None] * o)
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
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LOG2: tl.constexpr, FINISH: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """One program owns COLUMNS columns of ROWS rows; those of the first columns write what a row has once."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row_ok = r < rows
    ok = row_ok[:, None] & (c < dv)[None, :]
    once = row_ok & (tl.program_id(1) == 0)
    nothing = tl.full([ROWS], float("-inf"), tl.float32)
    o_at = (r * o_sr)[:, None] + c[None, :]
    top, total, acc = merge_rows(
        m_ptr, l_ptr, o_ptr, r * m_sr, r * l_sr, o_at, nothing, row_ok, ok, parts, m_sp, l_sp, o_sp, LOG2, "", TOGETHER
    )  # fmt: skip
    if FINISH:
        acc, lse = normalise(top, total, acc, LOG2)
        tl.store(top_ptr + r, lse, mask=once)
    else:
        tl.store(top_ptr + r, top, mask=once)
        tl.store(total_ptr + r, total, mask=once)
    tl.store(acc_ptr + (r * acc_sr)[:, None] + c[None, :], acc.to(acc_ptr.dtype.element_ty), mask=ok)


def merge_into(
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
    """`kernels.partials.merge.merge_stack` for fp32 partials, into top `r` (lse, when finishing), total `r` and acc `r dv`."""
    parts, rows, dv = o.shape
    tile = merging(parts, rows, dv, multiprocessors(o.device))
    if rows:
        bound_launch.launch(
            _merge_stack_kernel,
            tile.grid(rows, dv),
            (m, l, o, top, total, acc, parts, rows, dv, *m.stride(), *l.stride(), *o.stride()[:2], acc.stride(0)),
            {"ROWS": tile.rows, "COLUMNS": tile.columns, "LOG2": log2, "FINISH": finish, "TOGETHER": tile.together},
            num_warps=tile.warps,
        )
