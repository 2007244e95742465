"""Online softmax and log-sum-exp in Triton: rows of any length with O(block) state on chip, forward and backward.

The launchers have the signatures of `kernels.softmax.eager`. A tensor and the dim to normalise are seen as `o n i`: `o` outer rows,
`n` logits of a row, `i` inner rows. The last dim of a contiguous tensor becomes `1 n i` with strides (0, 1, n).

A program owns ROWS adjacent inner rows, or one share of them, and walks its columns in tiles of LANES * VEC. Every lane is an
online softmax of its own, (m, l) over the columns that pass by it, so the loop has no reduction across threads: VEC is one 16-byte
load, reduced inside one thread. Lanes are partials and are merged once, at the end.
- A row that fits one tile is read once and written once, several rows to a program.
- A longer row is one program: a pass that reduces and a pass that writes, backwards, because the end of the row is still cached.
- A row too long for one program, or too few rows to fill the device, is split into shares: the first launch leaves one partial
  (m, l) per share, the second merges the partials of its row and writes its own share.
Rows that are adjacent in memory (softmax over a dim that is not the last) are loaded side by side, with ROWS > 1.

Example: n = 10, tile = 4, two shares. Program 0 reads columns 0-7 and stores (m, l) of them, program 1 columns 8-9; then program 0
merges both partials and writes columns 4-7 and 0-3, program 1 merges them too and writes 8-9.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# (a launch passes plain integers for constexpr parameters and num_warps beside them; device functions return tuples)

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.decode.configs import multiprocessors
from ringattn.kernels.interface import accumulation_dtype

MAX_BLOCK = 8192  # logits of the longest row that is held on chip whole: 16 registers a thread at 16 warps
MAX_SHARE = 65536  # logits one program walks; above it the second read comes from memory anyway, and shares balance
MAX_SPLITS = 1024


@triton.jit
def _place(program, inner, ROWS: tl.constexpr):
    # -> outer index, inner indices, which of them exist
    blocks = tl.cdiv(inner, ROWS)
    i = (program % blocks) * ROWS + tl.arange(0, ROWS)
    return (program // blocks).to(tl.int64), i.to(tl.int64), i < inner


@triton.jit
def _share_of(n, inner, shares, share, NEWEST_FIRST: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    # -> _place, and of this program's share its number, first column, whole tiles, and columns behind them
    program = tl.program_id(0)
    if NEWEST_FIRST:
        program = tl.num_programs(0) - 1 - program  # what the first launch read last is still in cache
    leading, i, row_ok = _place(program // shares, inner, ROWS)
    split = program % shares
    start = split.to(tl.int64) * share
    stop = tl.minimum(start + share, n)
    full_tiles = (stop - start) // TILE
    return leading, i, row_ok, split, start, full_tiles, (stop - start - full_tiles * TILE).to(tl.int32)


@triton.jit
def _tile(ptr, leading, i, so, sn, si, LANES: tl.constexpr, VEC: tl.constexpr):
    # pointers of the tile that starts at column 0: r lanes vec
    cols = (tl.arange(0, LANES) * VEC)[:, None] + tl.arange(0, VEC)[None, :]
    return (ptr + leading * so + i * si)[:, None, None] + (cols.to(tl.int64) * sn)[None, :, :]


@triton.jit
def _columns(LANES: tl.constexpr, VEC: tl.constexpr):
    return ((tl.arange(0, LANES) * VEC)[:, None] + tl.arange(0, VEC)[None, :])[None, :, :]


@triton.jit
def _load_full(ptrs, row_ok, EMPTY: tl.constexpr, ROWS: tl.constexpr, POLICY: tl.constexpr):
    if ROWS == 1:  # the grid is exact: an unmasked load is a plain vector load
        x = tl.load(ptrs, eviction_policy=POLICY)
    else:
        x = tl.load(ptrs, mask=row_ok[:, None, None], other=EMPTY, eviction_policy=POLICY)
    return x.to(tl.float32)


@triton.jit
def _store_full(ptrs, y, row_ok, ROWS: tl.constexpr, POLICY: tl.constexpr):
    y = y.to(ptrs.dtype.element_ty)
    if ROWS == 1:
        tl.store(ptrs, y, eviction_policy=POLICY)
    else:
        tl.store(ptrs, y, mask=row_ok[:, None, None], eviction_policy=POLICY)


@triton.jit
def _shift(m):
    # an empty row is shifted by 0: -inf - (-inf) would be NaN
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def _exp(x):
    # tl.exp guards against subnormal results with three more instructions per logit; exp2 flushes them to zero
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _absorb(m, l, x):  # noqa: E741
    # one online step of every lane; m, l: r lanes, x: r lanes vec
    m_new = tl.maximum(m, tl.max(x, axis=2))
    shift = _shift(m_new)
    l = l * _exp(m - shift) + tl.sum(_exp(x - shift[:, :, None]), axis=2)  # noqa: E741
    return m_new, l


@triton.jit
def _merge_lanes(m, l):  # noqa: E741
    # r p -> r: partials merged over the last dim
    top = tl.max(m, axis=1)
    return top, tl.sum(l * _exp(m - _shift(top)[:, None]), axis=1)


@triton.jit
def _partials(row, row_ok, splits, SPLITS: tl.constexpr):
    # offsets of the stored partials of the rows, r splits, and which of them exist
    s = tl.arange(0, SPLITS)
    return row[:, None] * splits + s[None, :], row_ok[:, None] & (s < splits)[None, :]


@triton.jit
def _uniform(x, ROWS: tl.constexpr):
    # a single row's statistic goes through a scalar, which no layout belongs to. As a tensor it would keep the layout
    # of the partials, and the compiler would turn its broadcast over a whole tile into the tile's, in shared memory
    if ROWS == 1:
        x = tl.sum(x, axis=0) + tl.zeros([1], tl.float32)
    return x


@triton.jit
def _softmax_block_kernel(
    x_ptr, y_ptr, lse_ptr, n, inner, x_so, x_sn, x_si, y_so, y_sn, y_si,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WANT_LSE: tl.constexpr,
):  # fmt: skip
    """Rows that fit one block: y = exp(x - m) / l, or lse = m + ln l; one read."""
    leading, i, row_ok = _place(tl.program_id(0), inner, ROWS)
    cols = tl.arange(0, BLOCK)
    ok = row_ok[:, None] & (cols < n)[None, :]
    offs = cols.to(tl.int64)[None, :]
    x = tl.load((x_ptr + leading * x_so + i * x_si)[:, None] + offs * x_sn, mask=ok, other=float("-inf")).to(tl.float32)
    m = tl.max(x, axis=1)
    e = _exp(x - _shift(m)[:, None])
    l = tl.sum(e, axis=1)  # noqa: E741
    if WANT_LSE:
        tl.store(lse_ptr + leading * inner + i, m + tl.log(tl.where(l == 0, 1.0, l)), mask=row_ok)
    else:
        y = e * (1.0 / tl.where(l == 0, 1.0, l))[:, None]
        tl.store((y_ptr + leading * y_so + i * y_si)[:, None] + offs * y_sn, y.to(y_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _softmax_rows_kernel(
    x_ptr, y_ptr, lse_ptr, m_ptr, l_ptr, n, inner, shares, share, splits, x_so, x_sn, x_si, y_so, y_sn, y_si,
    ROWS: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, SPLITS: tl.constexpr,
    REDUCE: tl.constexpr, WRITE: tl.constexpr, WANT_LSE: tl.constexpr,
):  # fmt: skip
    """One share of long rows. REDUCE: find (m, l) of the share, else merge the stored partials of the row.

    WRITE: normalise the share (or write lse), else store the partial. Both: the share is the whole row.
    """
    TILE: tl.constexpr = LANES * VEC
    leading, i, row_ok, split, start, full_tiles, rest = _share_of(n, inner, shares, share, not REDUCE, ROWS, TILE)
    x_tile = _tile(x_ptr, leading, i, x_so, x_sn, x_si, LANES, VEC)
    tail_ok = row_ok[:, None, None] & (_columns(LANES, VEC) < rest)
    row = leading * inner + i

    if REDUCE:
        m = tl.full([ROWS, LANES], float("-inf"), tl.float32)
        l = tl.zeros([ROWS, LANES], tl.float32)  # noqa: E741
        for t in range(0, full_tiles):
            x = _load_full(x_tile + (start + t * TILE) * x_sn, row_ok, float("-inf"), ROWS, "")
            m, l = _absorb(m, l, x)  # noqa: E741
        if rest > 0:
            x = tl.load(x_tile + (start + full_tiles * TILE) * x_sn, mask=tail_ok, other=float("-inf"))
            m, l = _absorb(m, l, x.to(tl.float32))  # noqa: E741
        m, l = _merge_lanes(m, l)  # noqa: E741
    else:
        stored, ok = _partials(row, row_ok, splits, SPLITS)
        m = tl.load(m_ptr + stored, mask=ok, other=float("-inf"))
        l = tl.load(l_ptr + stored, mask=ok, other=0.0)  # noqa: E741
        m, l = _merge_lanes(m, l)  # noqa: E741
        m, l = _uniform(m, ROWS), _uniform(l, ROWS)  # noqa: E741

    if not WRITE:
        tl.store(m_ptr + row * splits + split, m, mask=row_ok)
        tl.store(l_ptr + row * splits + split, l, mask=row_ok)
    elif WANT_LSE:
        tl.store(lse_ptr + row, m + tl.log(tl.where(l == 0, 1.0, l)), mask=row_ok)
    else:
        shift = _shift(m)[:, None, None]
        scale = (1.0 / tl.where(l == 0, 1.0, l))[:, None, None]
        y_tile = _tile(y_ptr, leading, i, y_so, y_sn, y_si, LANES, VEC)
        if rest > 0:
            at = start + full_tiles * TILE
            x = tl.load(x_tile + at * x_sn, mask=tail_ok, other=float("-inf")).to(tl.float32)
            tl.store(y_tile + at * y_sn, (_exp(x - shift) * scale).to(y_ptr.dtype.element_ty), mask=tail_ok)
        for t in range(0, full_tiles):
            at = start + (full_tiles - 1 - t) * TILE
            x = _load_full(x_tile + at * x_sn, row_ok, float("-inf"), ROWS, "evict_first")
            _store_full(y_tile + at * y_sn, _exp(x - shift) * scale, row_ok, ROWS, "evict_first")


@triton.jit
def _softmax_backward_block_kernel(
    dy_ptr, y_ptr, dx_ptr, n, inner, dy_so, dy_sn, dy_si, y_so, y_sn, y_si, dx_so, dx_sn, dx_si,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows that fit one block: dx = y * (dy - sum(y * dy)); one read of each."""
    leading, i, row_ok = _place(tl.program_id(0), inner, ROWS)
    cols = tl.arange(0, BLOCK)
    ok = row_ok[:, None] & (cols < n)[None, :]
    offs = cols.to(tl.int64)[None, :]
    y = tl.load((y_ptr + leading * y_so + i * y_si)[:, None] + offs * y_sn, mask=ok, other=0.0).to(tl.float32)
    dy = tl.load((dy_ptr + leading * dy_so + i * dy_si)[:, None] + offs * dy_sn, mask=ok, other=0.0).to(tl.float32)
    dx = y * (dy - tl.sum(y * dy, axis=1)[:, None])
    tl.store((dx_ptr + leading * dx_so + i * dx_si)[:, None] + offs * dx_sn, dx.to(dx_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _softmax_backward_rows_kernel(
    dy_ptr, y_ptr, dx_ptr, dot_ptr, n, inner, shares, share, splits,
    dy_so, dy_sn, dy_si, y_so, y_sn, y_si, dx_so, dx_sn, dx_si,
    ROWS: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, SPLITS: tl.constexpr,
    REDUCE: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """One share of long rows; REDUCE and WRITE as in the forward, the partial being sum(y * dy) of the share."""
    TILE: tl.constexpr = LANES * VEC
    leading, i, row_ok, split, start, full_tiles, rest = _share_of(n, inner, shares, share, not REDUCE, ROWS, TILE)
    y_tile = _tile(y_ptr, leading, i, y_so, y_sn, y_si, LANES, VEC)
    dy_tile = _tile(dy_ptr, leading, i, dy_so, dy_sn, dy_si, LANES, VEC)
    tail_ok = row_ok[:, None, None] & (_columns(LANES, VEC) < rest)
    row = leading * inner + i

    if REDUCE:
        acc = tl.zeros([ROWS, LANES], tl.float32)
        for t in range(0, full_tiles):
            at = start + t * TILE
            y = _load_full(y_tile + at * y_sn, row_ok, 0.0, ROWS, "")
            acc += tl.sum(y * _load_full(dy_tile + at * dy_sn, row_ok, 0.0, ROWS, ""), axis=2)
        if rest > 0:
            at = start + full_tiles * TILE
            y = tl.load(y_tile + at * y_sn, mask=tail_ok, other=0.0).to(tl.float32)
            acc += tl.sum(y * tl.load(dy_tile + at * dy_sn, mask=tail_ok, other=0.0).to(tl.float32), axis=2)
        dot = tl.sum(acc, axis=1)
    else:
        stored, ok = _partials(row, row_ok, splits, SPLITS)
        dot = _uniform(tl.sum(tl.load(dot_ptr + stored, mask=ok, other=0.0), axis=1), ROWS)

    if not WRITE:
        tl.store(dot_ptr + row * splits + split, dot, mask=row_ok)
    else:
        dot = dot[:, None, None]
        dx_tile = _tile(dx_ptr, leading, i, dx_so, dx_sn, dx_si, LANES, VEC)
        if rest > 0:
            at = start + full_tiles * TILE
            y = tl.load(y_tile + at * y_sn, mask=tail_ok, other=0.0).to(tl.float32)
            dy = tl.load(dy_tile + at * dy_sn, mask=tail_ok, other=0.0).to(tl.float32)
            tl.store(dx_tile + at * dx_sn, (y * (dy - dot)).to(dx_ptr.dtype.element_ty), mask=tail_ok)
        for t in range(0, full_tiles):
            at = start + (full_tiles - 1 - t) * TILE
            y = _load_full(y_tile + at * y_sn, row_ok, 0.0, ROWS, "evict_first")
            dy = _load_full(dy_tile + at * dy_sn, row_ok, 0.0, ROWS, "evict_first")
            _store_full(dx_tile + at * dx_sn, y * (dy - dot), row_ok, ROWS, "evict_first")


@triton.jit
def _logsumexp_backward_kernel(
    g_ptr, x_ptr, lse_ptr, dx_ptr, n, inner, shares, share, x_so, x_sn, x_si, dx_so, dx_sn, dx_si,
    ROWS: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """One share of rows of any length: dx = g * exp(x - lse), and 0 for a row that is -inf throughout."""
    TILE: tl.constexpr = LANES * VEC
    leading, i, row_ok, _split, start, full_tiles, rest = _share_of(n, inner, shares, share, False, ROWS, TILE)
    x_tile = _tile(x_ptr, leading, i, x_so, x_sn, x_si, LANES, VEC)
    dx_tile = _tile(dx_ptr, leading, i, dx_so, dx_sn, dx_si, LANES, VEC)
    row = leading * inner + i
    lse = tl.load(lse_ptr + row, mask=row_ok, other=0.0)
    g = tl.where(lse == float("-inf"), 0.0, tl.load(g_ptr + row, mask=row_ok, other=0.0))[:, None, None]
    shift = _shift(lse)[:, None, None]
    for t in range(0, full_tiles):
        at = start + t * TILE
        x = _load_full(x_tile + at * x_sn, row_ok, 0.0, ROWS, "")
        _store_full(dx_tile + at * dx_sn, g * _exp(x - shift), row_ok, ROWS, "")
    if rest > 0:
        at = start + full_tiles * TILE
        tail_ok = row_ok[:, None, None] & (_columns(LANES, VEC) < rest)
        x = tl.load(x_tile + at * x_sn, mask=tail_ok, other=0.0).to(tl.float32)
        tl.store(dx_tile + at * dx_sn, (g * _exp(x - shift)).to(dx_ptr.dtype.element_ty), mask=tail_ok)


@dataclass(frozen=True)
class Launch:
    """Division of rows among programs.

    Attributes:
        rows: Inner rows of one program; a power of two.
        lanes: Online softmaxes that run side by side over one row; a power of two.
        vec: Adjacent logits of a lane per tile; a power of two.
        splits: Shares of a row; 1 means one program walks the row.
        warps: Warps of a program.
    """

    rows: int
    lanes: int
    vec: int
    splits: int
    warps: int

    @property
    def tile(self) -> int:
        """Logits of one row that a program looks at together."""
        return self.lanes * self.vec


def choose_launch(
    leading: int,
    n: int,
    inner: int,
    *,
    unit_columns: bool,
    itemsize: int,
    num_sms: int,
    block_size: int | None = None,
    per_thread: int = 16,
) -> Launch:
    """The launch for a tensor seen as `o n i`: integers in, integers out.

    Args:
        itemsize: Bytes of a logit.

    Returns:
        The launch. `n <= tile` means one block per row.
    """
    vec = 16 // itemsize if unit_columns else 4
    most_rows = triton.next_power_of_2(inner)
    if unit_columns:
        # 16 logits per thread need 40 registers at most, so that three or four programs of 16 warps share an SM: 64 KiB
        # or more are then on their way at any time, about twice what covers the latency of its memory
        single = min(MAX_BLOCK, block_size or MAX_BLOCK)
        warps = 16 if n <= MAX_SHARE else 8
        tile = triton.next_power_of_2(max(n, vec)) if n <= single else block_size or 32 * warps * per_thread
        rows = min(max(4096 // tile, 1), most_rows) if n <= single else 1
    else:
        # rows are adjacent instead: 64 of them side by side are two full cache lines of fp32
        single = block_size or 128
        tile = triton.next_power_of_2(max(n, vec)) if n <= single else block_size or 2 * per_thread
        rows = min(64, most_rows, max(MAX_BLOCK // tile, 1))
    vec = min(vec, tile)
    warps = min(max(rows * tile // (32 * per_thread), 1), 16)
    programs = leading * -(-inner // rows)
    splits = 1
    if n > tile:
        wanted = max(-(-n // MAX_SHARE), -(-4 * num_sms // programs))
        splits = max(1, min(wanted, n // (2 * tile), MAX_SPLITS))
    return Launch(rows=rows, lanes=tile // vec, vec=vec, splits=splits, warps=1 << (int(warps).bit_length() - 1))


@dataclass(frozen=True)
class _View:
    """A tensor as `o n i`; `flat` is a view of it, or a contiguous copy where no view exists."""

    flat: Tensor
    leading: int
    n: int
    inner: int
    strides: tuple[int, int, int]


def _view(x: Tensor, dim: int) -> _View:
    dim = dim % x.ndim
    n, leading, inner = x.shape[dim], math.prod(x.shape[:dim]), math.prod(x.shape[dim + 1 :])
    flat = x.reshape(leading, n, inner)
    so, sn, si = flat.stride()
    if inner == 1:  # the last dim: outer rows can sit side by side in one program as well
        return _View(flat, 1, n, leading, (0, sn, so))
    return _View(flat, leading, n, inner, (so, sn, si))


def _launch(x: _View, block_size: int | None, per_thread: int = 16) -> tuple[Launch, int]:
    """The launch for a tensor, and how many programs hold all rows."""
    how = choose_launch(
        x.leading,
        x.n,
        x.inner,
        unit_columns=x.strides[1] == 1,
        itemsize=x.flat.element_size(),
        num_sms=multiprocessors(x.flat.device),
        block_size=block_size,
        per_thread=per_thread,
    )
    return how, x.leading * -(-x.inner // how.rows)


def _share(n: int, how: Launch) -> tuple[int, int]:
    # -> logits of a share (whole tiles), shares that are not empty
    share = -(-n // (how.splits * how.tile)) * how.tile
    return share, -(-n // share)


def _finish(out: Tensor, view: _View) -> Tensor:
    if view.flat.data_ptr() != out.data_ptr():
        out.copy_(view.flat.view(out.shape))
    return out


def _forward(x: Tensor, dim: int, block_size: int | None, want_lse: bool) -> Tensor:
    xv = _view(x, dim)
    if want_lse:
        shape = [size for d, size in enumerate(x.shape) if d != dim % x.ndim]
        out = lse = torch.full(shape, float("-inf"), dtype=accumulation_dtype(x.dtype), device=x.device)
        y, yv = xv.flat, xv
    else:
        out = torch.empty_like(x)
        yv = _view(out, dim)
        y = lse = yv.flat
    if x.numel() == 0:
        return out
    how, row_blocks = _launch(xv, block_size)
    strides = (*xv.strides, *yv.strides)
    with torch.cuda.device_of(x):
        if xv.n <= how.tile:
            _softmax_block_kernel[(row_blocks,)](
                xv.flat, y, lse, xv.n, xv.inner, *strides,
                ROWS=how.rows, BLOCK=how.tile, WANT_LSE=want_lse, num_warps=how.warps,
            )  # fmt: skip
            return _finish(out, yv) if not want_lse else out
        share, splits = _share(xv.n, how)
        if splits == 1:
            m = l = lse  # not touched  # noqa: E741
            phases = [(1, True, True)]
        else:
            m, l = torch.empty((2, xv.leading * xv.inner, splits), dtype=torch.float32, device=x.device)  # noqa: E741
            phases = [(splits, True, False), (1 if want_lse else splits, False, True)]
        for shares, reduce, write in phases:
            _softmax_rows_kernel[(row_blocks * shares,)](
                xv.flat, y, lse, m, l, xv.n, xv.inner, shares, share, splits, *strides,
                ROWS=how.rows, LANES=how.lanes, VEC=how.vec, SPLITS=triton.next_power_of_2(splits),
                REDUCE=reduce, WRITE=write, WANT_LSE=want_lse, num_warps=how.warps,
            )  # fmt: skip
    return _finish(out, yv) if not want_lse else out


def softmax(x: Tensor, dim: int, block_size: int | None = None) -> Tensor:
    """`kernels.softmax.eager.softmax` for fp16, bf16 and fp32."""
    return _forward(x, dim, block_size, False)


def logsumexp(x: Tensor, dim: int, block_size: int | None = None) -> Tensor:
    """`kernels.softmax.eager.logsumexp` for fp16, bf16 and fp32."""
    return _forward(x, dim, block_size, True)


def softmax_backward(dy: Tensor, y: Tensor, dim: int, block_size: int | None = None) -> Tensor:
    """`kernels.softmax.eager.softmax_backward`."""
    dx = torch.empty_like(y)
    if y.numel() == 0:
        return dx
    dyv, yv, dxv = _view(dy, dim), _view(y, dim), _view(dx, dim)
    how, row_blocks = _launch(yv, block_size, per_thread=8)  # of each of two tensors
    strides = (*dyv.strides, *yv.strides, *dxv.strides)
    with torch.cuda.device_of(y):
        if yv.n <= how.tile:
            _softmax_backward_block_kernel[(row_blocks,)](
                dyv.flat, yv.flat, dxv.flat, yv.n, yv.inner, *strides,
                ROWS=how.rows, BLOCK=how.tile, num_warps=how.warps,
            )  # fmt: skip
            return _finish(dx, dxv)
        share, splits = _share(yv.n, how)
        dots = torch.empty((yv.leading * yv.inner, splits), dtype=torch.float32, device=y.device)
        for reduce, write in [(True, True)] if splits == 1 else [(True, False), (False, True)]:
            _softmax_backward_rows_kernel[(row_blocks * splits,)](
                dyv.flat, yv.flat, dxv.flat, dots, yv.n, yv.inner, splits, share, splits, *strides,
                ROWS=how.rows, LANES=how.lanes, VEC=how.vec, SPLITS=triton.next_power_of_2(splits),
                REDUCE=reduce, WRITE=write, num_warps=how.warps,
            )  # fmt: skip
    return _finish(dx, dxv)


def logsumexp_backward(g: Tensor, x: Tensor, lse: Tensor, dim: int, block_size: int | None = None) -> Tensor:
    """`kernels.softmax.eager.logsumexp_backward`."""
    dx = torch.empty_like(x)
    if x.numel() == 0:
        return dx
    xv, dxv = _view(x, dim), _view(dx, dim)
    how, row_blocks = _launch(xv, block_size)
    share, splits = _share(xv.n, how)
    with torch.cuda.device_of(x):
        _logsumexp_backward_kernel[(row_blocks * splits,)](
            g.contiguous(), xv.flat, lse.contiguous(), dxv.flat, xv.n, xv.inner, splits, share,
            *xv.strides, *dxv.strides, ROWS=how.rows, LANES=how.lanes, VEC=how.vec, num_warps=how.warps,
        )  # fmt: skip
    return _finish(dx, dxv)
