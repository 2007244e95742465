"""The forward kernel: one tile of queries against every run of a key buffer, from carry (or nothing) to carry (or output).

Owns the online softmax of Note [Softmax state] over the tiles of Note [Tile ranges]. A program owns BLOCK_M rows of one head and is
the only one to write their carry.
"""

# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

from ringattn.kernels.attention.portable.scores import LN2, LOG2E, dropout_key, kept, score
from ringattn.kernels.attention.portable.tiles import (
    cut_pairs,
    load_bounds,
    load_rows,
    reduce_bounds,
    run_tiles,
    shows,
    store_rows,
    swizzle,
    term_bounds,
)


@triton.jit
def _absorb(
    q_tile, m_i, l_i, acc, k, v, b, h_kv, row, end, origin, stride, lo_ptr, hi_ptr, row0, rows, q_pos,
    row_exists, key_bias, bias, bias_sn, k_ss, v_ss, slope, scale, cap, key, drop_threshold, drop_factor, table, cuts,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, D_WIDTH: tl.constexpr, DV: tl.constexpr,
    DV_WIDTH: tl.constexpr, MASKED: tl.constexpr, DOT_ONLY: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: q . k of a tile of keys goes into (m_i, l_i, acc)."""
    k_tile = load_rows(k, b, h_kv, row, end, k_ss, BLOCK_N, D, D_WIDTH, MASKED, TMA)
    qk = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    y = row + tl.arange(0, BLOCK_N)
    inside = y < end
    k_pos = origin + stride * y
    if DOT_ONLY:
        s = qk
    else:
        key_bias_tile = None
        bias_tile = None
        if key_bias is not None:
            key_bias_tile = tl.load(key_bias + y, mask=inside, other=0.0)[None, :]
        if bias is not None:
            columns = (k_pos.to(tl.int64) * bias_sn)[None, :]
            bias_tile = tl.load(bias + columns, mask=row_exists[:, None] & inside[None, :], other=0.0)
        PRECISE: tl.constexpr = q_tile.dtype == tl.float32
        s, _ = score(qk, q_pos[:, None], k_pos[None, :], slope, key_bias_tile, bias_tile, scale, cap, SOFTCAP, PRECISE)
    if MASKED:
        lo, hi = load_bounds(lo_ptr, hi_ptr, row0, rows, BLOCK_M)
        visible = (k_pos[None, :] >= lo[:, None]) & (k_pos[None, :] < hi[:, None]) & inside[None, :]
        visible = cut_pairs(visible, q_pos[:, None], k_pos[None, :], table, cuts)
        s = tl.where(visible, s, float("-inf"))
    if DOT_ONLY:
        m_new = tl.maximum(m_i, tl.max(s, 1) * scale)
    else:
        m_new = tl.maximum(m_i, tl.max(s, 1))
    m_ref = m_new
    if MASKED or key_bias is not None or bias is not None:
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that saw nothing so far: all weights are 2^-inf
    if DOT_ONLY:
        p = tl.exp2(s * scale - m_ref[:, None])
    else:
        p = tl.exp2(s - m_ref[:, None])
    alpha = tl.exp2(m_i - m_ref)
    l_i = l_i * alpha + tl.sum(p, 1)
    if DROPOUT:
        p = tl.where(kept(key, q_pos[:, None], k_pos[None, :], drop_threshold), p * drop_factor, 0.0)
    acc = acc * alpha[:, None]
    v_tile = load_rows(v, b, h_kv, row, end, v_ss, BLOCK_N, DV, DV_WIDTH, MASKED, TMA)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
    return m_new, l_i, acc


@triton.jit(
    do_not_specialize=[
        "lse_sb", "lse_sh", "m_sb", "m_sh", "l_sb", "l_sh", "lo_sb", "hi_sb", "key_bias_sb", "rows", "num_runs", "tiles", "sweep",
        "heads", "seed_low", "seed_high", "drop_threshold", "term_count", "lo_st", "hi_st", "table_size", "table_width", "block_size",
    ]
)  # fmt: skip
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
    any_lo, any_hi, full_lo, full_hi = reduce_bounds(lo, hi, row_exists)
    cuts = (term_count, lo_st, hi_st, tables, of_term, table_size, table_width, block_size)
    if term_count is None and not (FIRST or LAST):
        if any_lo >= any_hi:
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
    if TMA:
        k_base = k
        v_base = v
    else:
        k_base = k + b64 * k_sb + h_kv64 * k_sh
        v_base = v + b64 * v_sb + h_kv64 * v_sh
    key_bias_base = key_bias + b64 * key_bias_sb if key_bias is not None else None
    bias_base = None
    if bias is not None:
        bias_base = (bias + b64 * bias_sb + h64 * bias_sh + row0.to(tl.int64) * bias_ss) + (
            tl.arange(0, BLOCK_M).to(tl.int64) * bias_ss
        )[:, None]
    slope = tl.load(alibi_slopes + h) if alibi_slopes is not None else None
    key = dropout_key(head, seed_low, seed_high) if DROPOUT else None

    for part in tl.range(0, num_runs):
        r, here_lo, here_hi, seen_lo, seen_hi, all_lo, all_hi, table = term_bounds(
            part, lo_ptr, hi_ptr, row0, rows, row_exists, any_lo, any_hi, full_lo, full_hi, cuts, BLOCK_M
        )
        _, first, end, count, head_end, tail, origin, stride = run_tiles(
            runs, r, seen_lo, seen_hi, all_lo, all_hi, BLOCK_N
        )
        for j in tl.range(0, head_end + count - tail):
            i = tl.where(j < head_end, j, j - head_end + tail)
            row = first + i * BLOCK_N
            y = row + tl.arange(0, BLOCK_N)
            if shows(here_lo, here_hi, row0, rows, q_pos, origin + stride * y, y < end, table, cuts, BLOCK_M):
                m_i, l_i, acc = _absorb(
                    q_tile, m_i, l_i, acc, k_base, v_base, b, h_kv, row, end, origin, stride, here_lo, here_hi, row0, rows, q_pos,
                    row_exists, key_bias_base, bias_base, bias_sn, k_ss, v_ss, slope, scale, cap, key, drop_threshold, drop_factor,
                    table, cuts, BLOCK_M, BLOCK_N, D, D_WIDTH, DV, DV_WIDTH, True, DOT_ONLY, SOFTCAP, DROPOUT, TMA, PRECISION,
                )  # fmt: skip
        for row in tl.range(first + head_end * BLOCK_N, first + tail * BLOCK_N, BLOCK_N):
            m_i, l_i, acc = _absorb(
                q_tile, m_i, l_i, acc, k_base, v_base, b, h_kv, row, end, origin, stride, here_lo, here_hi, row0, rows, q_pos,
                row_exists, key_bias_base, bias_base, bias_sn, k_ss, v_ss, slope, scale, cap, key, drop_threshold, drop_factor,
                table, cuts, BLOCK_M, BLOCK_N, D, D_WIDTH, DV, DV_WIDTH, False, DOT_ONLY, SOFTCAP, DROPOUT, TMA, PRECISION,
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
