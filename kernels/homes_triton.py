"""Adding up contributions to gradients of keys that came home, in one Triton launch; the sums are those of `kernels.homes`.

Owns the kernels and their launchers. Runs on CUDA and ROCm devices, and on CPU tensors in the Triton interpreter.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
# (powers of two may be constants of kernels, says Triton)

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels import launch_triton


@triton.jit
def _add(
    out, own, parts, rows, own_at, head, heads, x, inside, t,
    FIRST: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Adds up D columns from FIRST on, of some rows of one head, and writes them to `out`."""
    c = tl.arange(0, COLUMNS)[None, :]
    mask = inside[:, None] & (c < D)
    at = own_at + head * WIDTH + FIRST + c
    total = tl.load(own + (at + x[:, None] * (heads * WIDTH)), mask=mask, other=0.0)
    for i in tl.static_range(len(parts)):
        row = tl.load(rows + i * t + x, mask=inside, other=-1)
        there = (row >= 0)[:, None] & mask
        total += tl.load(parts[i] + (at + row.to(tl.int64)[:, None] * (heads * WIDTH)), mask=there, other=0.0)
    tl.store(out + (x[:, None] * (heads * D) + (head * D + c)), total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["t", "home_rows"])
def _add_homes_kernel(
    dk, dv, own, parts, rows, t, home_rows, heads,
    ROWS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_COLUMNS: tl.constexpr, DV_COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program owns ROWS key rows of one head of one batch element.

    Example: own row 5 is 1, row 5 of the first part's table is 2, and row 2 of that part is 3; the second part's table
    says -1: the sum is 4.
    """
    head = tl.program_id(0) % heads
    x = tl.program_id(0) // heads * ROWS + tl.arange(0, ROWS)
    inside = x < t
    x = x.to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    WIDTH: tl.constexpr = D + DV
    own_at = b * home_rows * (heads * WIDTH)
    _add(dk + b * t * (heads * D), own, parts, rows, own_at, head, heads, x, inside, t, 0, D, WIDTH, D_COLUMNS)
    _add(dv + b * t * (heads * DV), own, parts, rows, own_at, head, heads, x, inside, t, D, DV, WIDTH, DV_COLUMNS)


@triton.jit
def _add_heads(part, row, there, home_rows, HEADS: tl.constexpr):
    """What all heads of a part say of some rows."""
    total = tl.zeros(row.shape, tl.float32)
    for h in range(HEADS):
        total += tl.load(part + h * home_rows + row, mask=there, other=0.0)
    return total


@triton.jit(do_not_specialize=["t", "home_rows"])
def _add_bias_homes_kernel(dkey_bias, own, parts, rows, t, home_rows, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """A program owns ROWS key rows of one batch element."""
    x = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = x < t
    x = x.to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    first = b * HEADS * home_rows
    total = _add_heads(own + first, x, inside, home_rows, HEADS)
    for i in tl.static_range(len(parts)):
        row = tl.load(rows + i * t + x, mask=inside, other=-1)
        total += _add_heads(parts[i] + first, row.to(tl.int64), row >= 0, home_rows, HEADS)
    tl.store(dkey_bias + b * t + x, total, mask=inside)


def add_bias_homes(dkey_bias: Tensor, own: Tensor, parts: Sequence[Tensor], rows: Tensor) -> None:
    """As `kernels.homes.add_bias_homes`."""
    b, t = dkey_bias.shape
    if b * t == 0:
        return
    launch_triton.launch(
        _add_bias_homes_kernel,
        (-(-t // 256), b),
        (dkey_bias, own, tuple(parts), rows, t, own.shape[2]),
        {"HEADS": own.shape[1], "ROWS": 256},
        num_warps=4,
    )


def add_homes(dk: Tensor, dv: Tensor, own: Tensor, parts: Sequence[Tensor], rows: Tensor) -> None:
    """As `kernels.homes.add_homes`; fp32 regions."""
    b, t, heads, d = dk.shape
    if dk.numel() + dv.numel() == 0:
        return
    columns, v_columns = triton.next_power_of_2(d), triton.next_power_of_2(dv.shape[-1])
    per_program = max(1, 2048 // max(columns, v_columns))
    launch_triton.launch(
        _add_homes_kernel,
        (-(-t // per_program) * heads, b),
        (dk, dv, own, tuple(parts), rows, t, own.shape[1], heads),
        {"ROWS": per_program, "D": d, "DV": dv.shape[-1], "D_COLUMNS": columns, "DV_COLUMNS": v_columns},
        num_warps=4,
    )
