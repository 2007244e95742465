"""Rows into pages and out of them, in one Triton launch for keys and values. `kernels.kv.pages` has the torch version."""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.kv.pages import FP8, LARGEST, SMALLEST_SCALE, Pool
from ringattn.kernels.runtime import bound_launch

BYTES = 8192
"""Bytes that one program moves of each tensor: enough in flight to keep memory busy, few enough rows to fill the device."""

_LARGEST = tl.constexpr(LARGEST)
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)


@triton.jit
def _encode(y):
    """The e4m3 codes of numbers within its range, as bytes; by integer arithmetic, for the same bits on every device.

    From 2^-6 on, rounding the mantissa of fp32 to three bits and moving the bias from 127 to 7 gives the code, carries
    included; below, |y| * 2^9 rounded to an integer (by adding 2^23) is the code.
    """
    bits = y.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    large = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    small = (tl.abs(y) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(size < 0x3C800000, small, large)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _decode(code):
    """The numbers that e4m3 codes stand for, as fp32."""
    code = code.to(tl.int32)
    size = code & 0x7F
    large = ((size + 960) << 20).to(tl.float32, bitcast=True)
    y = tl.where(size < 8, size.to(tl.float32) * 0.001953125, large)
    y = tl.where(size == 0x7F, float("nan"), y)
    return tl.where((code & 0x80) != 0, -y, y)


@triton.jit
def _rows_at(x, ok, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows that begin at x."""
    c = tl.arange(0, COLUMNS)[None, :]
    return tl.load(x[:, None] + c, mask=ok[:, None] & (c < WIDTH), other=0.0)


@triton.jit
def _put_rows(
    pool, scale, y, to, ok, FP8: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, LATENT: tl.constexpr = False
):
    """Writes rows y of one tensor to rows `to` of the pool, whose pages and heads are counted through."""
    c = tl.arange(0, COLUMNS)[None, :]
    mask = ok[:, None] & (c < WIDTH)
    if FP8:
        y = y.to(tl.float32)
        sizes = tl.abs(tl.where(y == y, y, 0.0)) if LATENT else tl.abs(y)
        s = tl.maximum(tl.div_rn(tl.max(sizes, 1), _LARGEST), _SMALLEST_SCALE)
        if not LATENT:
            # a maximum may pass over NaN, a sum does not
            s += tl.sum(tl.where(y == y, 0.0, y), 1)
        tl.store(scale + to, s, mask=ok)
        y = _encode(tl.div_rn(y, s[:, None] + tl.zeros_like(y)))
    tl.store((pool + to * WIDTH)[:, None] + c, y, mask=mask)


@triton.jit
def _are_bad(x):
    """Return which rows have a NaN or an infinity: `rows 1`."""
    wide = x if x.dtype == tl.float64 else x.to(tl.float32)
    bad = tl.sum(wide * 0.0, 1) != 0.0  # 0 times what is not finite is NaN
    return bad[:, None]


@triton.jit
def _nan_like(x):
    return tl.full(x.shape, float("nan"), tl.float32).to(x.dtype)


@triton.jit(do_not_specialize=["s", "rows"])
def _put_kernel(
    pool_k, pool_v, k_scale, v_scale, k, v, slots, k_contained, v_contained, s, rows,
    k_sb, k_ss, k_sh, v_sb, v_ss, v_sh,
    HK: tl.constexpr, SIZE: tl.constexpr, FP8: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    D_COLUMNS: tl.constexpr, DV_COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program owns ROWS of the b * s * hk rows, of k and of v; of k alone where v is None, for v is columns of it.

    Example: HK = 2, SIZE = 4: row 5 is token 2, head 1; with slot 9 it goes to page 2, row 1, which is row 21 of the pool.
    """
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = r < rows
    t, h = r // HK, (r % HK).to(tl.int64)
    slot = tl.load(slots + t, mask=ok, other=-1)
    b, x = (t // s).to(tl.int64), (t % s).to(tl.int64)
    # rows are loaded before their slots are known: one round trip
    k_rows = _rows_at(k + b * k_sb + x * k_ss + h * k_sh, ok, D, D_COLUMNS)
    # Note [Values that are not finite] of pages.py
    if v is None:
        instead = tl.where(tl.arange(0, D_COLUMNS)[None, :] < DV, tl.zeros_like(k_rows), _nan_like(k_rows))
        k_rows = tl.where(_are_bad(k_rows), instead, k_rows)
    else:
        v_rows = _rows_at(v + b * v_sb + x * v_ss + h * v_sh, ok, DV, DV_COLUMNS)
        bad = _are_bad(v_rows)
        k_rows, v_rows = tl.where(bad, _nan_like(k_rows), k_rows), tl.where(bad, tl.zeros_like(v_rows), v_rows)
    if k_contained is not None:
        _put_rows(k_contained, None, k_rows, r.to(tl.int64), ok, False, D, D_COLUMNS)
        if v is not None:
            _put_rows(v_contained, None, v_rows, r.to(tl.int64), ok, False, DV, DV_COLUMNS)
    ok = slot >= 0
    to = (slot // SIZE * HK + h) * SIZE + slot % SIZE
    _put_rows(pool_k, k_scale, k_rows, to, ok, FP8, D, D_COLUMNS, v is None)
    if v is not None:
        _put_rows(pool_v, v_scale, v_rows, to, ok, FP8, DV, DV_COLUMNS)


@triton.jit
def _take_rows(pool, scale, x, at, source, ok, FP8: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Reads rows of one tensor: row `source` of the pool, to x at `at`."""
    c = tl.arange(0, COLUMNS)[None, :]
    mask = ok[:, None] & (c < WIDTH)
    y = tl.load((pool + source * WIDTH)[:, None] + c, mask=mask)
    if FP8:
        y = _decode(y) * tl.load(scale + source, mask=ok)[:, None]
    tl.store((x + at)[:, None] + c, y.to(x.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["s", "tokens"])
def _take_kernel(
    pool_k, pool_v, k_scale, v_scale, k, v, slots, s, tokens,
    k_sb, k_ss, k_sh, v_sb, v_ss, v_sh,
    HK: tl.constexpr, SIZE: tl.constexpr, FP8: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    D_COLUMNS: tl.constexpr, DV_COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program owns one head of ROWS of the b * s tokens: it reads a page of a head in one piece, where slots follow.

    v is None where it is columns of k.
    """
    h = (tl.program_id(0) % HK).to(tl.int64)
    t = tl.program_id(0) // HK * ROWS + tl.arange(0, ROWS)
    ok = t < tokens
    slot = tl.load(slots + t, mask=ok, other=0)
    source = (slot // SIZE * HK + h) * SIZE + slot % SIZE
    b, x = (t // s).to(tl.int64), (t % s).to(tl.int64)
    _take_rows(pool_k, k_scale, k, b * k_sb + x * k_ss + h * k_sh, source, ok, FP8, D, D_COLUMNS)
    if v is not None:
        _take_rows(pool_v, v_scale, v, b * v_sb + x * v_ss + h * v_sh, source, ok, FP8, DV, DV_COLUMNS)


def put(pool: Pool, k: Tensor, v: Tensor, slots: Tensor, contained: tuple[Tensor, Tensor] | None = None) -> None:
    """Take the arguments of `kernels.kv.pages.put`."""
    b, s, hk, _ = k.shape
    rows, constants = b * s * hk, _constants(pool, k, v)
    constants["ROWS"] = min(constants["ROWS"], triton.next_power_of_2(rows))
    bound_launch.launch(
        _put_kernel,
        (-(-rows // constants["ROWS"]),),
        (*_tensors(pool, k, v), slots, *(contained or (None, None)), s, rows, *k.stride()[:3], *v.stride()[:3]),
        constants,
        num_warps=4,
    )


def take(pool: Pool, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Take the arguments of `kernels.kv.pages.take`."""
    b, s, hk, _ = k.shape
    constants = _constants(pool, k, v)
    bound_launch.launch(
        _take_kernel,
        (-(-b * s // constants["ROWS"]) * hk,),
        (*_tensors(pool, k, v), slots, s, b * s, *k.stride()[:3], *v.stride()[:3]),
        constants,
        num_warps=4,
    )


def _tensors(pool: Pool, k: Tensor, v: Tensor) -> tuple[Tensor | None, ...]:
    """Return the kernels' `pool_k` to `v`: fp8 is bytes to them."""
    pages = (x.view(torch.uint8) if x.dtype == FP8 else x for x in (pool.k, pool.v))
    return *pages, pool.k_scale, pool.v_scale, k, None if pool.latent else v


def _constants(pool: Pool, k: Tensor, v: Tensor) -> dict[str, Any]:
    d, dv = k.shape[-1], v.shape[-1]
    columns, v_columns = triton.next_power_of_2(d), triton.next_power_of_2(dv)
    rows = max(1, BYTES // (max(columns, v_columns) * k.element_size()))
    return {
        "HK": k.shape[2], "SIZE": pool.k.shape[2], "D": d, "DV": dv, "D_COLUMNS": columns, "DV_COLUMNS": v_columns, "ROWS": rows,
        "FP8": pool.k_scale is not None,
    }  # fmt: skip
