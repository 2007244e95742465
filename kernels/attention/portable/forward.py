"""The forward kernel: one tile of queries against every run of a key buffer, from carry (or nothing) to carry (or output).

Owns the online softmax of Note [Softmax state] over the tiles of Note [Tile ranges]. A program owns BLOCK_M rows of one head and is
the only one to write their carry.
"""

# pyright: reportGeneralTypeIssues=false
from collections import namedtuple

import triton
import triton.language as tl

from ringattn.kernels.attention.arguments import RAISED_BITS as _RAISED_BITS
from ringattn.kernels.attention.portable.scores import LN2, LOG2E, Score, dropout_key, kept, score_of_keys
from ringattn.kernels.attention.portable.tiles import (
    RUNTIME,
    Cuts,
    Rows,
    bias_rows,
    head_of,
    load_bounds,
    load_rows,
    masked_row,
    reduce_bounds,
    run_of,
    shows,
    store_rows,
    swizzle,
    visible_pairs,
)

RAISED_BITS = tl.constexpr(_RAISED_BITS)
Keys = namedtuple("Keys", "k v b h k_ss v_ss")
Config = namedtuple("Config", "BLOCK_M BLOCK_N D D_WIDTH DV DV_WIDTH DOT_ONLY SOFTCAP DROPOUT TMA PRECISION")


@triton.jit
def _absorb(q_tile, m_i, l_i, acc, row, run, own, keys, score, cuts, c, MASKED: tl.constexpr):
    """One step of the online softmax: q . k of a tile of keys goes into (m_i, l_i, acc)."""
    k_tile = load_rows(keys.k, keys.b, keys.h, row, run.end, keys.k_ss, c.BLOCK_N, c.D, c.D_WIDTH, MASKED, c.TMA)
    qk = tl.dot(q_tile, tl.trans(k_tile), input_precision=c.PRECISION)
    y = row + tl.arange(0, c.BLOCK_N)
    inside = y < run.end
    k_pos = run.origin + run.stride * y
    s = qk
    if not c.DOT_ONLY:
        s, _ = score_of_keys(qk, k_pos, y, inside, own, score, c.SOFTCAP, q_tile.dtype == tl.float32)
    if MASKED:
        s = tl.where(visible_pairs(run, own, k_pos, inside, cuts, c.BLOCK_M), s, float("-inf"))
    # Note [Raised weights] of arguments.py; the factor of dropout would exceed float16
    RAISED: tl.constexpr = RAISED_BITS if q_tile.dtype == tl.float16 and not c.DROPOUT else 0
    if c.DOT_ONLY:
        m_new = tl.maximum(m_i, tl.max(s, 1) * score.scale - RAISED)
    else:
        m_new = tl.maximum(m_i, tl.max(s, 1) - RAISED)
    m_ref = m_new
    if MASKED or score.key_bias is not None or score.bias is not None:
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that saw nothing so far: all weights are 2^-inf
    if c.DOT_ONLY:
        p = tl.exp2(s * score.scale - m_ref[:, None])
    else:
        p = tl.exp2(s - m_ref[:, None])
    alpha = tl.exp2(m_i - m_ref)
    l_i = l_i * alpha + tl.sum(p, 1)
    if c.DROPOUT:
        keep = kept(score.dropout_key, own.positions[:, None], k_pos[None, :], score.drop_threshold)
        p = tl.where(keep, p * score.drop_factor, 0.0)
    acc = acc * alpha[:, None]
    v_tile = load_rows(keys.v, keys.b, keys.h, row, run.end, keys.v_ss, c.BLOCK_N, c.DV, c.DV_WIDTH, MASKED, c.TMA)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=c.PRECISION)
    return m_new, l_i, acc


@triton.jit
def _attend(part, q_tile, m_i, l_i, acc, runs, lo_ptr, hi_ptr, seen, own, keys, score, cuts, c):
    """Absorbs the keys of a part of the work: masked tiles, then full ones."""
    run = run_of(part, runs, lo_ptr, hi_ptr, own, seen, cuts, c.BLOCK_M, c.BLOCK_N)
    for j in tl.range(0, run.full_first + run.tiles - run.full_end):
        row = masked_row(run, j, c.BLOCK_N)
        y = row + tl.arange(0, c.BLOCK_N)
        if shows(run, own, run.origin + run.stride * y, y < run.end, cuts, c.BLOCK_M):
            m_i, l_i, acc = _absorb(q_tile, m_i, l_i, acc, row, run, own, keys, score, cuts, c, True)
    for row in tl.range(run.first + run.full_first * c.BLOCK_N, run.first + run.full_end * c.BLOCK_N, c.BLOCK_N):
        m_i, l_i, acc = _absorb(q_tile, m_i, l_i, acc, row, run, own, keys, score, cuts, c, False)
    return m_i, l_i, acc


@triton.jit(do_not_specialize=list(RUNTIME))
def forward_kernel(
    q, k, v, o, lse, carry_m, carry_l, carry_acc, positions, lo_ptr, hi_ptr, runs, sinks, alibi_slopes, key_bias, bias,
    q_sb, q_ss, q_sh, k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, o_sb, o_ss, o_sh, acc_sb, acc_ss, acc_sh,
    lse_sb, lse_sh, m_sb, m_sh, l_sb, l_sh, lo_sb, hi_sb, key_bias_sb, bias_sb, bias_sh, bias_ss, bias_sn,
    heads, num_heads, group, rows, num_runs, tiles, sweep, scale, cap, seed_low, seed_high, drop_threshold, drop_factor,
    term_count, lo_st, hi_st, tables, of_term, table_size, table_width, block_size,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, D_WIDTH: tl.constexpr, DV: tl.constexpr,
    DV_WIDTH: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, DOT_ONLY: tl.constexpr, SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr, TMA: tl.constexpr, SAME_STRIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to the keys of `runs`. Strides are in elements; last dims are contiguous; absent tensors are None.

    DOT_ONLY: the score is q . k times a positive scale, so that the scale is folded into the exponent. With several terms (`term_count`),
    whose bounds lie lo_st and hi_st apart, num_runs counts each run once per term. `tables`: `table_size` entries each, lines of
    table_width; `of_term`: index of each term's table or -1.
    """
    if SAME_STRIDE:
        v_ss = k_ss  # one set of offsets in registers serves both
    tile, head = swizzle(tiles, heads, sweep)
    row0 = (tiles - 1 - tile) * BLOCK_M  # under a causal mask the last rows see most: longest first
    b = head // num_heads
    h = head % num_heads
    h_kv = h // group
    # where memory holds heads first, those before this one may be more than 2^31 numbers
    b64, h64, h_kv64 = b.to(tl.int64), h.to(tl.int64), h_kv.to(tl.int64)
    x = row0 + tl.arange(0, BLOCK_M)
    row_exists = x < rows
    lo_ptr += b64 * lo_sb
    hi_ptr += b64 * hi_sb
    lo, hi = load_bounds(lo_ptr, hi_ptr, row0, rows, BLOCK_M)
    seen = reduce_bounds(lo, hi, row_exists)
    cuts = Cuts(term_count, lo_st, hi_st, tables, of_term, table_size, table_width, block_size)
    if term_count is None and not (FIRST or LAST):
        if seen[0] >= seen[1]:
            return

    m_base = carry_m + b64 * m_sb + h64 * m_sh if carry_m is not None else None
    l_base = carry_l + b64 * l_sb + h64 * l_sh if carry_l is not None else None
    acc_base = carry_acc + b64 * acc_sb + h64 * acc_sh if carry_acc is not None else None
    if FIRST:
        acc = tl.zeros([BLOCK_M, DV], tl.float32)
        if sinks is not None:
            m_i = tl.full([BLOCK_M], 0.0, tl.float32) + tl.load(sinks + h) * LOG2E
            l_i = tl.full([BLOCK_M], 1.0, tl.float32)
        else:
            m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
            l_i = tl.zeros([BLOCK_M], tl.float32)
    else:
        m_i = tl.load(m_base + x, mask=row_exists, other=float("-inf"))
        l_i = tl.load(l_base + x, mask=row_exists, other=0.0)
        acc = load_rows(acc_base, b, h, row0, rows, acc_ss, BLOCK_M, DV, DV_WIDTH, True, False)

    q_tile = load_rows(q + b64 * q_sb + h64 * q_sh, b, h, row0, rows, q_ss, BLOCK_M, D, D_WIDTH, True, False)
    q_pos = tl.load(positions + x, mask=row_exists, other=0)
    k_base = head_of(k, b64, h_kv64, k_sb, k_sh, TMA)
    v_base = head_of(v, b64, h_kv64, v_sb, v_sh, TMA)
    key_bias_base = key_bias + b64 * key_bias_sb if key_bias is not None else None
    bias_base = bias_rows(bias, b64, h64, row0, bias_sb, bias_sh, bias_ss, BLOCK_M)
    slope = tl.load(alibi_slopes + h) if alibi_slopes is not None else None
    key = dropout_key(head, seed_low, seed_high) if DROPOUT else None

    own = Rows(row0, rows, row_exists, q_pos)
    keys = Keys(k_base, v_base, b, h_kv, k_ss, v_ss)
    score = Score(scale, cap, slope, key_bias_base, bias_base, bias_sn, key, drop_threshold, drop_factor)
    for part in tl.range(0, num_runs):
        m_i, l_i, acc = _attend(
            part, q_tile, m_i, l_i, acc, runs, lo_ptr, hi_ptr, seen, own, keys, score, cuts,
            Config(BLOCK_M, BLOCK_N, D, D_WIDTH, DV, DV_WIDTH, DOT_ONLY, SOFTCAP, DROPOUT, TMA, PRECISION),
        )  # fmt: skip

    if LAST:
        divisor = tl.where(l_i > 0.0, l_i, 1.0)
        acc = acc / divisor[:, None]
        lse_i = tl.where(l_i > 0.0, LN2 * (m_i + tl.log2(divisor)), float("-inf"))
        tl.store(lse + b64 * lse_sb + h64 * lse_sh + x, lse_i, mask=row_exists)
        store_rows(o + b64 * o_sb + h64 * o_sh, acc, row0, rows, o_ss, BLOCK_M, DV, DV_WIDTH, False)
    else:
        tl.store(m_base + x, m_i, mask=row_exists)
        tl.store(l_base + x, l_i, mask=row_exists)
        store_rows(acc_base, acc, row0, rows, acc_ss, BLOCK_M, DV, DV_WIDTH, False)
