"""Sum of the gradients of keys over the ranks that read them, in one Triton launch; the sums are those of `grad_reduce`."""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.runtime import bound_launch


@triton.jit
def _add(
    out, local_grads, remote_grads, rows, local_at, head, heads, x, inside, t,
    FIRST: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Adds up D columns from FIRST on, of some rows of one head, and writes them to `out`."""
    c = tl.arange(0, COLUMNS)[None, :]
    mask = inside[:, None] & (c < D)
    at = local_at + head * WIDTH + FIRST + c
    total = tl.load(local_grads + (at + x[:, None] * (heads * WIDTH)), mask=mask, other=0.0)
    for i in tl.static_range(len(remote_grads)):
        row = tl.load(rows + i * t + x, mask=inside, other=-1)
        there = (row >= 0)[:, None] & mask
        total += tl.load(remote_grads[i] + (at + row.to(tl.int64)[:, None] * (heads * WIDTH)), mask=there, other=0.0)
    tl.store(out + (x[:, None] * (heads * D) + (head * D + c)), total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["t", "grad_buffer_rows"])
def _reduce_kv_grads_kernel(
    dk, dv, local_grads, remote_grads, rows, t, grad_buffer_rows, heads,
    ROWS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_COLUMNS: tl.constexpr, DV_COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program owns ROWS key rows of one head of one batch element.

    Example: local_grads row 5 is 1, row 5 of the first part's table is 2, and row 2 of that part is 3; the second part's table
    has -1: the sum is 4.
    """
    head = tl.program_id(0) % heads
    x = tl.program_id(0) // heads * ROWS + tl.arange(0, ROWS)
    inside = x < t
    x = x.to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    WIDTH: tl.constexpr = D + DV
    local_at = b * grad_buffer_rows * (heads * WIDTH)
    _add(
        dk + b * t * (heads * D), local_grads, remote_grads, rows, local_at, head, heads, x, inside, t,
        0, D, WIDTH, D_COLUMNS,
    )  # fmt: skip
    _add(
        dv + b * t * (heads * DV), local_grads, remote_grads, rows, local_at, head, heads, x, inside, t,
        D, DV, WIDTH, DV_COLUMNS,
    )  # fmt: skip


@triton.jit
def _add_heads(part, row, there, grad_buffer_rows, HEADS: tl.constexpr):
    total = tl.zeros(row.shape, tl.float32)
    for h in range(HEADS):
        total += tl.load(part + h * grad_buffer_rows + row, mask=there, other=0.0)
    return total


@triton.jit(do_not_specialize=["t", "grad_buffer_rows"])
def _reduce_key_bias_grads_kernel(
    dkey_bias, local_grads, remote_grads, rows, t, grad_buffer_rows, HEADS: tl.constexpr, ROWS: tl.constexpr
):
    """A program owns ROWS key rows of one batch element."""
    x = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = x < t
    x = x.to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    first = b * HEADS * grad_buffer_rows
    total = _add_heads(local_grads + first, x, inside, grad_buffer_rows, HEADS)
    for i in tl.static_range(len(remote_grads)):
        row = tl.load(rows + i * t + x, mask=inside, other=-1)
        total += _add_heads(remote_grads[i] + first, row.to(tl.int64), row >= 0, grad_buffer_rows, HEADS)
    tl.store(dkey_bias + b * t + x, total, mask=inside)


def reduce_key_bias_grads_on_gpu(
    dkey_bias: Tensor, local_grads: Tensor, remote_grads: Sequence[Tensor], rows: Tensor
) -> None:
    """`kernels.comm.grad_reduce.reduce_key_bias_grads` on a GPU."""
    b, t = dkey_bias.shape
    if b * t == 0:
        return
    bound_launch.launch(
        _reduce_key_bias_grads_kernel,
        (-(-t // 256), b),
        (dkey_bias, local_grads, tuple(remote_grads), rows, t, local_grads.shape[2]),
        {"HEADS": local_grads.shape[1], "ROWS": 256},
        num_warps=4,
    )


def reduce_kv_grads_on_gpu(
    dk: Tensor, dv: Tensor, local_grads: Tensor, remote_grads: Sequence[Tensor], rows: Tensor
) -> None:
    """`kernels.comm.grad_reduce.reduce_kv_grads` on a GPU; fp32 regions."""
    b, t, heads, d = dk.shape
    if dk.numel() + dv.numel() == 0:
        return
    columns, v_columns = triton.next_power_of_2(d), triton.next_power_of_2(dv.shape[-1])
    per_program = max(1, 2048 // max(columns, v_columns))
    bound_launch.launch(
        _reduce_kv_grads_kernel,
        (-(-t // per_program) * heads, b),
        (dk, dv, local_grads, tuple(remote_grads), rows, t, local_grads.shape[1], heads),
        {"ROWS": per_program, "D": d, "DV": dv.shape[-1], "D_COLUMNS": columns, "DV_COLUMNS": v_columns},
        num_warps=4,
    )
