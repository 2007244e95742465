"""Decode in Triton: one launch of split-KV attention over pages, and its launcher.

Note [Division of work]
    The rows that share a key head, s tokens x (h / hk) heads, are packed into one tile: keys are read once for all of them. A
    program owns a tile of rows of one key head and one slot: a share of one request's blocks. It computes its share, from the
    table and the bounds at run time (or `plan_splits` computed it once for all layers):
        weight of request r      w[r] = blocks of r, at most as many as [min lo, max hi) can touch
        blocks of a share        c = max(sum w / slots, max w / splits, least), rounded up
        shares of r              n[r] = max(1, w[r] / c), rounded up: the slots of r follow those of r - 1
    Rounding up may make more shares than slots, which then go in rounds. Three values of c are compared by an estimate of the
    time: c, c times the excess of shares over slots (one round of larger shares), and, with many requests, c / FINER (a shorter
    last round). A program takes its part of the blocks that some row of its request sees. A program without blocks writes the
    identity; so do the programs of a request, in turns, for the splits that it does not need, except for their acc, which is
    not read (Note [Packed parts] of kernels.partials.packed). Programs beyond the last slot return at once.

    Example: 100 and 4 blocks, 8 slots, 8 splits, least 2: with c = 13 n = (8, 1), one share more than slots; with c = 15
    n = (7, 1). The second request's only program also writes the identity for the splits 1 to 7.

    Tiles of K and V stream through shared memory, several ahead. The page, start and length of a tile are loaded one tile before
    it, so that no load waits for another. Rows behind the end of a block are not loaded: zeros take their place, because
    0 * NaN is NaN. Only tiles at an edge of the visible range, or of a block, are masked.

Note [Bytes in pairs]
    fp8 halves the bytes of a tile, and then the instructions of a warp are the bound. Pools are loaded as int16, which the
    matrix loads of shared memory can transpose; the bytes of a register's two elements are four numbers, of which one
    permutation and two conversions make those of even columns and those of odd ones. q is split alike, once, and products are
    taken of the halves: q . k = q_even . k_even + q_odd . k_odd, and (even, odd) columns of p v. Conversion is by
    "instructions", or by integer operations on two elements at once ("bits"), or by those that the interpreter knows
    ("portable"): the last two move sign and magnitude to where fp16 has them, which is the number over 2^8, because fp16's
    exponent is biased by 15 instead of 7. Scales are of rows, so they are part of scores and of p, never of a tile.

Note [Two tiles of latents]
    Where values are columns of the keys (LATENT; Note [Latents] of dispatch.py), k is the other columns alone, D of them or none,
    and the tile of v serves both products: q . k = q_value . v + q_other . k. So 576 columns are padded to 512 + 64.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.attention.arguments import padded, pair, scale_and_cap
from ringattn.kernels.attention.portable.configs import kind_of
from ringattn.kernels.attention.portable.scores import score as score_of
from ringattn.kernels.decode import configs as decode_configs
from ringattn.kernels.decode.configs import DecodeConfig
from ringattn.kernels.decode.dispatch import FP8, DecodeCall, check_decode
from ringattn.kernels.runtime import bound_launch

FAN = 128
"""Blocks that one step of a search looks at."""
FINER = 4
"""Into how many shares an even one is cut at most where there are rounds."""
SPARED = tl.constexpr(32)
"""Splits for which a program writes the identity at once."""
BEGIN = tl.constexpr(2)
"""What one more round costs, in blocks: programs begin and end."""


@triton.jit
def _bounds(lo_ptr, hi_ptr, lo_sb, hi_sb, requests, b, s, S: tl.constexpr):
    """(min lo, max hi) over the new tokens of each of `requests`; rows that see nothing do not count."""
    x = tl.arange(0, S)
    there = (requests < b)[:, None] & (x < s)[None, :]
    lo = tl.load(lo_ptr + requests[:, None] * lo_sb + x[None, :], mask=there, other=0)
    hi = tl.load(hi_ptr + requests[:, None] * hi_sb + x[None, :], mask=there, other=0)
    sees = lo < hi
    return tl.min(tl.where(sees, lo, 2**31 - 1), 1), tl.max(tl.where(sees, hi, 0), 1)


@triton.jit
def _divide(weight, there, share, slots, even):
    """Shares of every request when none is larger than `share`, and when they are done, in blocks, by an estimate.

    One round lasts as long as the largest share. More of them last until the last share has begun, and its time.
    """
    shares = tl.where(there, tl.maximum(tl.cdiv(weight, share), 1), 0)
    rounds = tl.cdiv(tl.sum(shares, 0), slots)
    longest = tl.max(tl.cdiv(weight, tl.maximum(shares, 1)), 0)
    return shares, longest + tl.where(rounds > 1, even + BEGIN * (rounds - 1), 0)


@triton.jit
def _find_ends(
    counts, lo_ptr, hi_ptr, lo_sb, hi_sb, b, s, slots, splits, least,
    PAGE: tl.constexpr, B: tl.constexpr, S: tl.constexpr, FINER: tl.constexpr,
):  # fmt: skip
    """The running sum of the shares of every request (Note [Division of work])."""
    r = tl.arange(0, B)
    there = r < b
    count = tl.load(counts + r, mask=there, other=0)
    lo, hi = _bounds(lo_ptr, hi_ptr, lo_sb, hi_sb, r, b, s, S)
    weight = tl.minimum(count, tl.where(lo < hi, (hi - lo) // PAGE + 2, 0))
    even = tl.cdiv(tl.sum(weight, 0), slots)
    least = tl.maximum(tl.cdiv(tl.max(weight, 0), splits), least)
    share = tl.maximum(even, least)
    shares, time = _divide(weight, there, share, slots, even)
    fewer, fewer_time = _divide(
        weight, there, tl.maximum(share, tl.cdiv(share * tl.sum(shares, 0), slots)), slots, even
    )
    if fewer_time < time:
        shares, time = fewer, fewer_time
    if FINER > 1:
        more, more_time = _divide(weight, there, tl.maximum(tl.cdiv(share, FINER), least), slots, even)
        if more_time < time:
            shares = more
    return tl.cumsum(shares, 0)


@triton.jit(do_not_specialize=["lo_sb", "hi_sb", "b", "s", "slots", "splits", "least"])
def _plan_splits_kernel(
    counts, lo_ptr, hi_ptr, split_plan, lo_sb, hi_sb, b, s, slots, splits, least,
    PAGE: tl.constexpr, B: tl.constexpr, S: tl.constexpr, FINER: tl.constexpr,
):  # fmt: skip
    """The running sum of shares, `B`: those past the last request are as the last one's."""
    ends = _find_ends(counts, lo_ptr, hi_ptr, lo_sb, hi_sb, b, s, slots, splits, least, PAGE, B, S, FINER)
    tl.store(split_plan + tl.arange(0, B), ends)


@triton.jit
def _how_many_before(starts, lengths, at, known, position):
    """Number of the blocks `at` end at a position or earlier; without lengths, how many begin earlier."""
    edge = tl.load(starts + at, mask=known, other=0)
    if lengths is not None:
        before = edge + tl.load(lengths + at, mask=known, other=0) <= position
    else:
        before = edge < position
    return tl.sum((known & before).to(tl.int32), 0)


@triton.jit
def _count_before(starts, lengths, count, position, FAN: tl.constexpr):
    """`_how_many_before` of the first `count` blocks, which ascend: the last of each of FAN stretches says which one to enter."""
    x = tl.arange(0, FAN)
    base = 0
    while count > FAN:
        step = tl.cdiv(count, FAN)
        last = x * step + step - 1
        whole = _how_many_before(starts, lengths, base + last, last < count, position)
        base += whole * step
        count = tl.minimum(step, count - whole * step)
    return base + _how_many_before(starts, lengths, base + x, x < count, position)


@triton.jit
def _request_of(ends, slot):
    """(request, its number of shares, which of them) of a slot; requests past the last have none, and come last."""
    before = ends <= slot
    begins = tl.max(tl.where(before, ends, 0), 0)
    mine = tl.min(tl.where(before, 2**31 - 1, ends), 0) - begins
    return tl.sum(before.to(tl.int32), 0), mine, slot - begins


@triton.jit
def _blocks_of(
    counts, starts, lengths, lo_ptr, hi_ptr, lo_sb, hi_sb, r, b, s, mine, split, S: tl.constexpr, SEARCH: tl.constexpr
):  # fmt: skip
    """The first block of a share, and one past the last, among those that some row of request r sees; `starts` are its own."""
    count = tl.load(counts + r)
    all_lo, all_hi = _bounds(lo_ptr, hi_ptr, lo_sb, hi_sb, r + tl.zeros([1], tl.int32), b, s, S)
    any_lo = tl.min(all_lo, 0)
    any_hi = tl.max(all_hi, 0)
    first = 0
    last = tl.where(any_lo < any_hi, count, 0)
    # both loads before either is used: one round trip
    start_of_first = tl.load(starts, mask=last > 0, other=0)
    start_of_last = tl.load(starts + last - 1, mask=last > 0, other=0)
    if last > 0:
        if any_lo > start_of_first:
            first = _count_before(starts, lengths, count, any_lo, SEARCH)
        if any_hi <= start_of_last:
            last = _count_before(starts, None, count, any_hi, SEARCH)
    chunk = tl.cdiv(tl.maximum(last - first, 0), mine)
    begin = tl.minimum(first + split * chunk, last)
    return begin, tl.minimum(begin + chunk, last)


@triton.jit(do_not_specialize=["table_sb", "lo_sb", "hi_sb", "b", "s", "slots", "splits", "least"])
def _plan_shares_kernel(
    starts, lengths, counts, lo_ptr, hi_ptr, shares, table_sb, lo_sb, hi_sb, b, s, slots, splits, least,
    PAGE: tl.constexpr, B: tl.constexpr, S: tl.constexpr, FINER: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """`slots 8`: request, split, shares of it, first block, one past the last, 1; of empty slots 0, 0, 1, 0, 0, 0."""
    slot = tl.program_id(0)
    ends = _find_ends(counts, lo_ptr, hi_ptr, lo_sb, hi_sb, b, s, slots, splits, least, PAGE, B, S, FINER)
    r, mine, split = _request_of(ends, slot)
    place = shares + slot * 8
    if slot < tl.max(ends, 0):
        starts += tl.cast(r, tl.int64) * table_sb
        lengths += tl.cast(r, tl.int64) * table_sb
        begin, end = _blocks_of(counts, starts, lengths, lo_ptr, hi_ptr, lo_sb, hi_sb, r, b, s, mine, split, S, SEARCH)
        tl.store(place, r)
        tl.store(place + 1, split)
        tl.store(place + 2, mine)
        tl.store(place + 3, begin)
        tl.store(place + 4, end)
        tl.store(place + 5, 1)
    else:
        tl.store(place + tl.arange(0, 8), (tl.arange(0, 8) == 2).to(tl.int32))


@triton.jit
def _load_tile(
    pool, page, h_kv, row0, length, sp, sh, ss, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr,
    DENSE: tl.constexpr,
):  # fmt: skip
    """Rows row0 .. row0 + ROWS - 1 of a page; those from `length` on are zero, and not read."""
    x = tl.arange(0, ROWS)
    c = tl.arange(0, COLS)
    stride = WIDTH if DENSE else ss
    at = (x * stride)[:, None] + c[None, :]
    pool += tl.cast(page, tl.int64) * sp + tl.cast(h_kv, tl.int64) * sh + row0 * stride
    mask = (x < length - row0)[:, None]
    if WIDTH != COLS:
        mask = mask & (c < WIDTH)[None, :]
    return tl.load(pool + at, mask=mask, other=0)


@triton.jit
def _pairs(x, HOW: tl.constexpr):
    """The two bytes of each int16 as e4m3 numbers in fp16, which holds all of them: (low, high) (Note [Bytes in pairs])."""
    if HOW == "instructions":
        low = tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $1, 0, 0x3120; mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $0, a; }",
            "=r,r", [x], tl.float16, True, 2,
        )  # fmt: skip
        high = tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $1, 0, 0x3120; mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $0, b; }",
            "=r,r", [x], tl.float16, True, 2,
        )  # fmt: skip
    elif HOW == "bits":
        low = tl.inline_asm_elementwise(
            "{ .reg .b32 s, t; mul.lo.u32 t, $1, 128; mul.lo.u32 s, $1, 256; and.b32 t, t, 0x3f803f80;"
            " lop3.b32 $0, s, 0x80008000, t, 0xea; }",
            "=r,r", [x], tl.float16, True, 2,
        )  # fmt: skip
        high = tl.inline_asm_elementwise(
            "{ .reg .b32 t; shr.b32 t, $1, 1; and.b32 t, t, 0x3f803f80; lop3.b32 $0, $1, 0x80008000, t, 0xea; }",
            "=r,r", [x], tl.float16, True, 2,
        )  # fmt: skip
    else:
        low = (((x & 0x80) << 8) | ((x & 0x7F) << 7)).to(tl.float16, bitcast=True)
        high = ((x & -32768) | ((x >> 1) & 0x3F80)).to(tl.float16, bitcast=True)
    return low, high


@triton.jit
def _unit(HOW: tl.constexpr):
    """Factor for the numbers of `_pairs`."""
    return 1.0 if HOW == "instructions" else 256.0


@triton.jit(
    do_not_specialize=["lo_sb", "hi_sb", "positions_sb", "table_sb", "b", "s", "slots", "splits", "least", "rows"]
)
def _decode_kernel(
    q, k, v, k_scale, v_scale, pages, starts, lengths, counts, lo_ptr, hi_ptr, positions, alibi_slopes, split_plan, parts,
    q_sb, q_ss, q_sh, k_sp, k_sh, k_ss, v_sp, v_sh, v_ss, k_scale_sp, k_scale_sh, v_scale_sp, v_scale_sh, parts_sp,
    lo_sb, hi_sb, positions_sb, table_sb, b, s, hk, group, tiles, slots, splits, least, rows, scale, cap,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, D_WIDTH: tl.constexpr,
    DV: tl.constexpr, DV_WIDTH: tl.constexpr, B: tl.constexpr, S: tl.constexpr, SOFTCAP: tl.constexpr, DENSE: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, SEARCH: tl.constexpr, FINER: tl.constexpr,
    K_BYTES: tl.constexpr, V_BYTES: tl.constexpr, LATENT: tl.constexpr,
):  # fmt: skip
    """The partial of one tile of rows over one share of blocks (Note [Division of work]). Strides are in elements."""
    pid = tl.program_id(0)
    tile = pid % tiles
    h_kv = (pid // tiles) % hk
    slot = pid // (tiles * hk)

    if split_plan is not None:
        ends = tl.load(split_plan + tl.arange(0, B))
    else:
        ends = _find_ends(counts, lo_ptr, hi_ptr, lo_sb, hi_sb, b, s, slots, splits, least, PAGE, B, S, FINER)
    if slot >= tl.max(ends, 0):
        return
    r, mine, split = _request_of(ends, slot)

    # the rows of this tile: new token, then query head of the group
    x = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = x < s * group
    token = x // group
    head = h_kv * group + x % group
    lo = tl.load(lo_ptr + r * lo_sb + token, mask=exists, other=0)
    hi = tl.load(hi_ptr + r * hi_sb + token, mask=exists, other=0)
    q_pos = tl.zeros([BLOCK_M], tl.int32)
    slope = None
    if alibi_slopes is not None:
        q_pos = tl.load(positions + r * positions_sb + token, mask=exists, other=0)
        slope = tl.load(alibi_slopes + head, mask=exists, other=0.0).to(tl.float32)[:, None]
    sees = exists & (lo < hi)
    # what lies between is seen by every row: nothing is, where a row sees nothing
    whole_lo = tl.max(tl.where(sees, lo, tl.where(exists, 2**31 - 1, 0)), 0)
    whole_hi = tl.min(tl.where(sees, hi, 2**31 - 1), 0)
    c = tl.arange(0, D)
    cv = tl.arange(0, DV)
    there_v = exists[:, None] & (cv < DV_WIDTH)[None, :]
    q_at = q + tl.cast(r, tl.int64) * q_sb + token * q_ss + head * q_sh
    q_value = None
    if LATENT:
        q_value = tl.load(q_at[:, None] + cv[None, :], mask=there_v, other=0.0)
        q_at += DV_WIDTH
    q_tile = tl.load(q_at[:, None] + c[None, :], mask=exists[:, None] & (c < D_WIDTH)[None, :], other=0.0)

    pages += tl.cast(r, tl.int64) * table_sb
    starts += tl.cast(r, tl.int64) * table_sb
    lengths += tl.cast(r, tl.int64) * table_sb
    begin, end = _blocks_of(counts, starts, lengths, lo_ptr, hi_ptr, lo_sb, hi_sb, r, b, s, mine, split, S, SEARCH)

    TILES: tl.constexpr = PAGE // BLOCK_N  # of a page
    FP8: tl.constexpr = k_scale is not None
    PACKED: tl.constexpr = 2 if FP8 else 1  # values of an element of the pool
    factor = scale
    if FP8:
        q_size = tl.full([BLOCK_M], 1.0, tl.float32)
        if q_tile.dtype == tl.bfloat16:
            # fp16 holds every e4m3 number, and q too once it is divided by a power of two near its largest element
            largest = tl.max(tl.abs(q_tile.to(tl.float32)), 1)
            if LATENT:
                largest = tl.maximum(largest, tl.max(tl.abs(q_value.to(tl.float32)), 1))
            top = largest.to(tl.int32, bitcast=True) & 0x7F800000
            raised = (0x7F000000 - top).to(tl.float32, bitcast=True)[:, None]
            q_tile = (q_tile.to(tl.float32) * raised).to(tl.float16)
            if LATENT:
                q_value = (q_value.to(tl.float32) * raised).to(tl.float16)
            q_size = top.to(tl.float32, bitcast=True)
        factor = (q_size * (scale * _unit(K_BYTES)))[:, None]
        q_even, q_odd = tl.split(tl.reshape(q_tile, [BLOCK_M, D // 2, 2]))
        if LATENT:
            value_even, value_odd = tl.split(tl.reshape(q_value, [BLOCK_M, DV // 2, 2]))
    HEADROOM: tl.constexpr = 14.0 if q_tile.dtype == tl.float16 else 0.0
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # per column of tiles: summed once, at the end
    acc = tl.zeros([BLOCK_M, DV // PACKED], tl.float32)
    n = tl.arange(0, BLOCK_N)
    odd = tl.zeros([BLOCK_M, DV // PACKED], tl.float32)
    page = tl.load(pages + begin, mask=begin < end, other=0)
    start = tl.load(starts + begin, mask=begin < end, other=0)
    length = tl.load(lengths + begin, mask=begin < end, other=0)
    for t in tl.range(begin * TILES, end * TILES, num_stages=STAGES):
        row0 = (t % TILES) * BLOCK_N
        k_tile = _load_tile(
            k, page, h_kv, row0, length, k_sp, k_sh, k_ss, BLOCK_N, D // PACKED, D_WIDTH // PACKED, DENSE
        )
        v_tile = _load_tile(
            v, page, h_kv, row0, length, v_sp, v_sh, v_ss, BLOCK_N, DV // PACKED, DV_WIDTH // PACKED, DENSE
        )
        real = row0 + n < length
        v_size = None
        if FP8:
            at = tl.cast(page, tl.int64) * k_scale_sp + h_kv * k_scale_sh + row0 + n
            k_size = tl.load(k_scale + at, mask=real, other=0.0)
            at = tl.cast(page, tl.int64) * v_scale_sp + h_kv * v_scale_sh + row0 + n
            v_size = tl.load(v_scale + at, mask=real, other=0.0)
            k_even, k_odd = _pairs(k_tile, K_BYTES)
            if LATENT and K_BYTES != "instructions":
                # rows of latents carry NaN in bytes and not in scales; the largest number is 1.75
                k_even = tl.where(tl.abs(k_even) == 1.875, float("nan"), k_even)
                k_odd = tl.where(tl.abs(k_odd) == 1.875, float("nan"), k_odd)
            qk = tl.dot(q_even, tl.trans(k_even.to(q_tile.dtype)), input_precision=PRECISION)
            qk = tl.dot(q_odd, tl.trans(k_odd.to(q_tile.dtype)), qk, input_precision=PRECISION)
            if LATENT:
                v_even, v_odd = _pairs(v_tile, V_BYTES)
                qk = tl.dot(value_even, tl.trans(v_even.to(q_tile.dtype)), qk, input_precision=PRECISION)
                qk = tl.dot(value_odd, tl.trans(v_odd.to(q_tile.dtype)), qk, input_precision=PRECISION)
            qk *= k_size[None, :]
        else:
            qk = tl.dot(q_tile, tl.trans(k_tile.to(q_tile.dtype)), input_precision=PRECISION)
            if LATENT:
                qk = tl.dot(q_value, tl.trans(v_tile), qk, input_precision=PRECISION)
        k_pos = start + row0 + n
        sc, _ = score_of(
            qk, q_pos[:, None], k_pos[None, :], slope, None, None, factor, cap, SOFTCAP, q_tile.dtype == tl.float32
        )
        begins = start + row0
        if (begins < whole_lo) | (start + row0 + BLOCK_N > whole_hi) | (row0 + BLOCK_N > length):
            visible = (k_pos[None, :] >= lo[:, None]) & (k_pos[None, :] < hi[:, None]) & real[None, :]
            sc = tl.where(visible, sc, float("-inf"))
        if FP8:
            # what is multiplied with v is p * v_size: the exponent of v_size takes part in the reference point
            exponent = tl.maximum((v_size.to(tl.int32, bitcast=True) >> 23) - 127, -60).to(tl.float32)
            m_new = tl.maximum(m_i, tl.max(sc + exponent[None, :], 1))
        else:
            m_new = tl.maximum(m_i, tl.max(sc, 1))
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that saw nothing so far: all weights are 2^-inf
        p = tl.exp2(sc - (m_ref - HEADROOM)[:, None])
        alpha = tl.exp2(m_i - m_ref)[:, None]
        l_i = l_i * alpha + p
        acc = acc * alpha
        if FP8:
            p = (p * v_size[None, :]).to(q_tile.dtype)
            if not LATENT:
                v_even, v_odd = _pairs(v_tile, V_BYTES)
            acc = tl.dot(p, v_even.to(q_tile.dtype), acc, input_precision=PRECISION)
            odd = tl.dot(p, v_odd.to(q_tile.dtype), odd * alpha, input_precision=PRECISION)
        else:
            acc = tl.dot(p.to(q_tile.dtype), v_tile, acc, input_precision=PRECISION)
        m_i = m_new
        later = tl.minimum((t + 1) // TILES, end - 1)
        page = tl.load(pages + later)
        start = tl.load(starts + later)
        length = tl.load(lengths + later)

    if FP8:
        acc = tl.interleave(acc, odd) * _unit(V_BYTES)
    row = (r * s + token) * (hk * group) + head
    acc_at = (tl.cast(row, tl.int64) * DV_WIDTH)[:, None] + cv[None, :]
    ml = parts + tl.cast(rows, tl.int64) * DV_WIDTH
    home = tl.cast(split, tl.int64) * parts_sp
    tl.store(parts + home + acc_at, acc, mask=there_v)
    total = tl.sum(l_i, 1)
    # a maximum on the GPU passes over NaN: a row of NaN alone would have the m of a row that saw nothing
    tl.store(ml + home + row, tl.where(total == total, m_i - HEADROOM, total), mask=exists)
    tl.store(ml + home + rows + row, total, mask=exists)
    # the identity of unused splits is written by all programs of this request in turns
    x = tl.arange(0, SPARED)
    for base in tl.range(mine // SPARED * SPARED, splits, SPARED):
        unused = base + x
        spared = ((unused >= mine) & (unused < splits) & (unused % mine == split))[:, None] & exists[None, :]
        at = ml + (tl.cast(unused, tl.int64) * parts_sp)[:, None] + row[None, :]
        tl.store(at, tl.full([SPARED, BLOCK_M], float("-inf"), tl.float32), mask=spared)
        tl.store(at + rows, tl.zeros([SPARED, BLOCK_M], tl.float32), mask=spared)


def _sharing(call: DecodeCall, splits: int, config: DecodeConfig | None) -> tuple[DecodeConfig, int, int, int]:
    """Return the division of all calls of the same shapes (Note [Division of work]).

    These are the configuration, the shares that fill the device, the smallest share in blocks, and the largest number of shares
    that an even one is cut into.
    """
    q, v = call.q, call.v
    b, s, h, d = q.shape
    _, hk, page_size, dv = v.shape
    if config is None:
        kind, rows = kind_of(q.device), s * h // hk
        config = decode_configs.choose(kind, v.element_size(), max(d, dv), rows, latent=call.latent)
    sms = decode_configs.multiprocessors(q.device)
    many = s * h // hk > decode_configs.MANY_ROWS
    # the caller of many rows has counted rounds already: the height of its stack is what it wants
    slots = b * splits if many else decode_configs.slots(s, h, hk, sms, config)
    # every share of a few requests begins at once
    finer = FINER if not many and 2 * b > slots else 1
    return config, slots, decode_configs.least_blocks(s, h // hk, page_size), finer


def plan_splits(call: DecodeCall, splits: int) -> Tensor | None:
    """`kernels.decode.dispatch.plan_splits`."""
    q, _, v, table, lo, hi, *_ = call
    b, s, _, _ = q.shape
    if not b:
        return None
    room: int = triton.next_power_of_2(b)
    split_plan = torch.empty(room, dtype=torch.int32, device=q.device)
    _, slots, least, finer = _sharing(call, splits, None)
    bound_launch.launch(
        _plan_splits_kernel,
        (1,),
        (table.counts, lo, hi, split_plan, lo.stride(0), hi.stride(0), b, s, slots, splits, least),
        {"PAGE": v.shape[2], "B": room, "S": triton.next_power_of_2(s), "FINER": finer},
        num_warps=4,
    )
    return split_plan


def plan_shares(call: DecodeCall, splits: int, config: DecodeConfig) -> Tensor:
    """Return `slots 8` int32: the share of every slot, as `_plan_shares_kernel` writes it."""
    q, _, v, table, lo, hi, *_ = call
    b, s, _, _ = q.shape
    _, slots, least, finer = _sharing(call, splits, config)
    shares = torch.empty(min(finer * slots + b, b * splits), 8, dtype=torch.int32, device=q.device)
    bound_launch.launch(
        _plan_shares_kernel,
        (shares.shape[0],),
        (
            table.starts, table.lengths, table.counts, lo, hi, shares, table.pages.stride(0), lo.stride(0), hi.stride(0), b, s,
            slots, splits, least,
        ),
        {
            "PAGE": v.shape[2], "B": triton.next_power_of_2(b), "S": triton.next_power_of_2(s), "FINER": finer, "SEARCH": FAN,
        },
        num_warps=4,
    )  # fmt: skip
    return shares


def decode(call: DecodeCall, parts: Tensor, *, split_plan: Tensor | None = None) -> None:
    """`kernels.decode.dispatch.decode`."""
    check_decode(call, parts)
    q, k, v, table, lo, hi, positions, score, k_scale, v_scale = call
    b, s, h, d = q.shape
    _, hk, page_size, dv = v.shape
    if b == 0:
        return
    kind, splits = kind_of(q.device), parts.shape[0]
    config, slots, least, finer = _sharing(call, splits, None)
    latent = call.latent
    if latent:
        k, d = k[..., dv:], d - dv  # Note [Two tiles of latents]
    # a product has 16 columns at least, of bytes in pairs 32
    columns, v_columns = (max(32 if k.dtype == FP8 else 16, padded(x)) for x in (d, dv))
    if k.dtype == FP8:
        for name, x in (("k", k), ("v", v)):
            if any(stride % 2 for stride in x.stride()[:3]) or x.data_ptr() % 2:
                raise ValueError(
                    f"{name} in {FP8} must have even strides and address, got {x.stride()}; make it contiguous"
                )
        k, v = k.view(torch.int16), v.view(torch.int16)  # Note [Bytes in pairs]
    block_m, tiles = decode_configs.row_tiles(s, h // hk, config.block_m)
    programs = min(finer * slots + b, b * splits) * hk * tiles
    options = {"num_warps": config.num_warps} | ({} if config.maxnreg is None else {"maxnreg": config.maxnreg})
    k_bytes, v_bytes = bytes_of(None if not q.is_cuda else torch.cuda.get_device_capability(q.device))
    fp32_on_gpu = q.dtype == torch.float32 and kind.startswith("sm")
    bound_launch.launch(
        _decode_kernel,
        (programs,),
        (
            q, k, v, k_scale, v_scale, table.pages, table.starts, table.lengths, table.counts, lo, hi, positions,
            score.alibi_slopes, split_plan, parts, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *pair(k_scale),
            *pair(v_scale), parts.stride(0), lo.stride(0), hi.stride(0), positions.stride(0), table.pages.stride(0),
            b, s, hk, h // hk, tiles, slots, splits, least, b * s * h, *scale_and_cap(score),
        ),
        {
            "PAGE": page_size, "BLOCK_M": block_m, "BLOCK_N": min(config.block_n, page_size), "D": columns, "D_WIDTH": d,
            "DV": v_columns, "DV_WIDTH": dv, "B": triton.next_power_of_2(b), "S": triton.next_power_of_2(s),
            "SOFTCAP": score.softcap > 0, "DENSE": k.stride(2) == k.shape[3] and v.stride(2) == v.shape[3],
            "PRECISION": "tf32x3" if fp32_on_gpu else "ieee", "STAGES": config.num_stages, "SEARCH": FAN,
            "FINER": finer, "K_BYTES": k_bytes, "V_BYTES": v_bytes,
            "LATENT": latent,
        },
        **options,
    )  # fmt: skip


def bytes_of(capability: tuple[int, int] | None) -> tuple[str, str]:
    """Return the conversion of bytes of k and of v on a device (Note [Bytes in pairs]); None: the interpreter."""
    if capability is None:
        return "portable", "portable"
    return ("instructions", "instructions") if capability >= (8, 9) else ("bits", "bits")
