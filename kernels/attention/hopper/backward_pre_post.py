"""Kernels that run before and after the fused backward, in plain Triton: row statistics, zeroed sums, scaled and summed results.

Where `error` is set, a wait of a fused call has failed, and its sums become NaN; None: no kernel waits.
"""

# pyright: reportGeneralTypeIssues=false
from collections import namedtuple

import triton
import triton.language as tl

Tensor = namedtuple("Tensor", "data sb ss sh")


@triton.jit
def _place(program, rows, ROWS: tl.constexpr):
    """(first row, head) of a program, where each owns ROWS of the `rows` of a head.

    One number says both: a device has room for 65535 programs in any dimension but the first, which heads of a batch may exceed.
    """
    tiles = tl.cdiv(rows, ROWS)
    return program % tiles * ROWS, program // tiles


@triton.jit
def _offsets(row0, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Offsets of a tile of ROWS x COLUMNS whose columns are next to each other."""
    r = tl.arange(0, ROWS)[:, None]
    return tl.cast(row0, tl.int64) * stride + (r * stride + tl.arange(0, COLUMNS)[None, :])


@triton.jit
def _region(grad_buffers, side):
    return tl.multiple_of(tl.load(grad_buffers + side).to(tl.pointer_type(tl.float32)), 16)


@triton.jit(
    do_not_specialize=[
        "lse_sb", "lse_sh", "delta_sb", "delta_sh", "dlse_sb", "dlse_sh", "num_heads", "rows", "padded_rows", "factor", "raised",
        "empty",
    ]
)  # fmt: skip
def prepare_kernel(
    lse, delta, o, do, dlse, start_s, start_dp, dq, lse_sb, lse_sh, delta_sb, delta_sh, o_sb, o_ss, o_sh, do_sb, do_ss, do_sh,
    dlse_sb, dlse_sh, dq_sb, dq_ss, dq_sh, num_heads, rows, padded_rows, factor, raised, empty,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, V_COLUMNS: tl.constexpr, V_WIDTH: tl.constexpr,
):  # fmt: skip
    """Stores lse * factor - raised (`empty` where a row saw nothing) and -delta as `b h padded_rows`; dq, if any, becomes zero.

    delta is rowsum(o * do) - dlse, made and stored here, or, where o is None, given. A program owns ROWS rows of one head.
    """
    row0, head = _place(tl.program_id(0), padded_rows, ROWS)
    b = (head // num_heads).to(tl.int64)
    h = (head % num_heads).to(tl.int64)
    x = row0 + tl.arange(0, ROWS)
    inside = x < rows
    lse_i = tl.load(lse + b * lse_sb + h * lse_sh + x, mask=inside, other=0.0)
    deltas = delta + b * delta_sb + h * delta_sh + x
    if o is None:
        delta_i = tl.load(deltas, mask=inside, other=0.0)
    else:
        # rows of do may lie far apart, and so may heads
        x64, y = x.to(tl.int64)[:, None], tl.arange(0, V_COLUMNS)[None, :]
        there = inside[:, None] & (y < V_WIDTH)
        o_i = tl.load(o + b * o_sb + h * o_sh + x64 * o_ss + y, mask=there, other=0.0)
        do_i = tl.load(do + b * do_sb + h * do_sh + x64 * do_ss + y, mask=there, other=0.0)
        delta_i = tl.sum(o_i.to(tl.float32) * do_i.to(tl.float32), 1)
        if dlse is not None:
            delta_i -= tl.load(dlse + b * dlse_sb + h * dlse_sh + x, mask=inside, other=0.0)
        tl.store(deltas, delta_i, mask=inside)
    at = head.to(tl.int64) * padded_rows + x
    tl.store(start_s + at, tl.where(lse_i == float("-inf"), empty, lse_i * factor - raised), mask=x < padded_rows)
    tl.store(start_dp + at, -delta_i, mask=x < padded_rows)
    if dq is not None:
        ptrs = dq + b * dq_sb + h * dq_sh + _offsets(row0, dq_ss, ROWS, COLUMNS)
        mask = inside[:, None] & (tl.arange(0, COLUMNS) < WIDTH)[None, :]
        tl.store(ptrs, tl.zeros([ROWS, COLUMNS], tl.float32), mask=mask)


@triton.jit
def _finish_rows(
    program, total, dq, dalibi, error, dalibi_sb, dalibi_sh, num_heads, rows, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Writes, or under ADD adds, scale * total to dq in its dtype; a program owns ROWS rows of one head.

    dalibi, finished elsewhere, is touched only where `error` is set.
    """
    row0, head = _place(program, rows, ROWS)
    b = (head // num_heads).to(tl.int64)
    h = head % num_heads
    x = row0 + tl.arange(0, ROWS)
    inside = x < rows
    mask = inside[:, None] & (tl.arange(0, COLUMNS) < WIDTH)[None, :]
    ptrs = total.data + b * total.sb + h * total.sh + _offsets(row0, total.ss, ROWS, COLUMNS)
    value = tl.load(ptrs, mask=mask, other=0.0) * scale
    ptrs = dq.data + b * dq.sb + h * dq.sh + _offsets(row0, dq.ss, ROWS, COLUMNS)
    if ADD:
        value += tl.load(ptrs, mask=mask, other=0.0)
    if error is not None:
        lost = tl.load(error) != 0
        value = tl.where(lost, float("nan"), value)
        if dalibi is not None:
            tl.store(dalibi + b * dalibi_sb + h * dalibi_sh + x, float("nan"), mask=inside & lost)
    tl.store(ptrs, value.to(dq.data.dtype.element_ty), mask=mask)


@triton.jit
def _finish_part(
    parts, count, target, stride, row0, first, end, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Writes, or adds, the sum of `count` tiles SIZE numbers apart: ROWS rows, the first of them row `first` of a tile."""
    SPAN: tl.constexpr = triton.next_power_of_2(COLUMNS)
    there = (tl.arange(0, SPAN) < WIDTH)[None, :]
    ptrs = parts + _offsets(first, COLUMNS, ROWS, SPAN)
    total = tl.zeros([ROWS, SPAN], tl.float32)
    for _ in tl.range(0, count):
        total += tl.load(ptrs, mask=there, other=0.0)
        ptrs += SIZE
    mask = (row0 + tl.arange(0, ROWS) < end)[:, None] & there
    ptrs = target + _offsets(row0, stride, ROWS, SPAN)
    if ADD:
        total += tl.load(ptrs, mask=mask, other=0.0)
    tl.store(ptrs, total.to(ptrs.dtype.element_ty), mask=mask)


@triton.jit
def _finish_keys(
    program, splits, parts, dk, dv, sources, grad_buffers, num_heads, rows, TILE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, V_COLUMNS: tl.constexpr, V_WIDTH: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Adds up the parts of split tiles in the order of their slots, and writes or adds the sums.

    A slot holds TILE rows of COLUMNS numbers of dk, then TILE rows of V_COLUMNS numbers of dv (0: there is no dv). A program
    owns ROWS rows of a tile. Tiles of a fused call (`sources`: split_tiles of the plan) go to the fp32 region at the
    address that `grad_buffers` gives, dv behind dk in each row, in place of `dk` and `dv`.
    """
    PIECES: tl.constexpr = TILE // ROWS
    number = program // PIECES
    split = splits + number * 4
    head = tl.load(split)
    first = program % PIECES * ROWS
    row0 = tl.load(split + 1) + first
    slot = tl.load(split + 2).to(tl.int64)
    count = tl.load(split + 3)
    b = (head // num_heads).to(tl.int64)
    h = head % num_heads
    SIZE: tl.constexpr = TILE * (COLUMNS + V_COLUMNS)
    end = rows
    dk_out = dk.data
    dv_out = dv.data
    if grad_buffers is not None:
        source = sources + number * 4
        begin = tl.load(source + 2)
        end = tl.load(source + 3) - begin
        row0 -= begin
        dk_out = _region(grad_buffers, tl.load(source))
        dv_out = dk_out + WIDTH
    at = parts + slot * SIZE
    _finish_part(at, count, dk_out + b * dk.sb + h * dk.sh, dk.ss, row0, first, end, SIZE, ROWS, COLUMNS, WIDTH, ADD)
    if V_COLUMNS > 0:
        _finish_part(
            at + TILE * COLUMNS, count, dv_out + b * dv.sb + h * dv.sh, dv.ss, row0, first, end, SIZE, ROWS, V_COLUMNS,
            V_WIDTH, ADD,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "key_programs", "key_heads", "keys", "dalibi_sb", "dalibi_sh", "num_heads", "rows", "scale",
    ]
)  # fmt: skip
def finish_kernel(
    splits, parts, dk, dv, sources, grad_buffers, dk_sb, dk_ss, dk_sh, dv_sb, dv_ss, dv_sh, key_programs, key_heads, keys,
    total, dq, dalibi, error, total_sb, total_ss, total_sh, dq_sb, dq_ss, dq_sh, dalibi_sb, dalibi_sh, num_heads, rows, scale,
    TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, V_COLUMNS: tl.constexpr,
    V_WIDTH: tl.constexpr, ADD_KEYS: tl.constexpr, ADD_ROWS: tl.constexpr,
):  # fmt: skip
    """Finish sums: the first `key_programs` programs finish split tiles of keys, the others dq.

    Side by side, because neither fills a GPU and peers wait for the keys. `parts` is None where no tile was split, `total`
    where dq is not to be finished.
    """
    program = tl.program_id(0)
    if parts is not None:
        if program < key_programs:
            _finish_keys(
                program, splits, parts, Tensor(dk, dk_sb, dk_ss, dk_sh), Tensor(dv, dv_sb, dv_ss, dv_sh), sources, grad_buffers,
                key_heads, keys, TILE, ROWS, COLUMNS, WIDTH, V_COLUMNS, V_WIDTH, ADD_KEYS,
            )  # fmt: skip
    if total is not None:
        if program >= key_programs:
            _finish_rows(
                program - key_programs, Tensor(total, total_sb, total_ss, total_sh), Tensor(dq, dq_sb, dq_ss, dq_sh), dalibi, error,
                dalibi_sb, dalibi_sh, num_heads, rows, scale, ROWS, COLUMNS, WIDTH, ADD_ROWS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["side", "rows"])
def clear_grad_buffer_kernel(
    grad_buffers, side, rows, out_sb, out_ss, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr
):
    """Writes zeros to the first `rows` rows, of all heads together, of a region; a program owns ROWS of one batch element."""
    row0, element = _place(tl.program_id(0), rows, ROWS)
    mask = (row0 + tl.arange(0, ROWS) < rows)[:, None] & (tl.arange(0, COLUMNS) < WIDTH)[None, :]
    target = _region(grad_buffers, side) + element.to(tl.int64) * out_sb
    tl.store(target + _offsets(row0, out_ss, ROWS, COLUMNS), tl.zeros([ROWS, COLUMNS], tl.float32), mask=mask)
