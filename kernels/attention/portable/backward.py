"""The backward kernels: delta, then dk and dv by tiles of keys, then dq by tiles of queries.

Every output element has exactly one writer and every sum has a fixed order: the same bits from run to run. That costs q . k and
do . v twice (seven products instead of five). dk and dv hold a tile of keys and walk the runs of the query side; dq holds a tile
of queries and walks those of the key side; both are the loop of Note [Tile ranges]. A dk/dv program takes all query heads of its
key head in turn: a shared key head needs no atomics.
"""

# pyright: reportGeneralTypeIssues=false
from collections import namedtuple

import triton
import triton.language as tl

from ringattn.kernels.attention.arguments import RAISED_BITS
from ringattn.kernels.attention.portable.scores import LOG2E, Score, dropout_key, kept, score_of_keys
from ringattn.kernels.attention.portable.scores import score as score_of
from ringattn.kernels.attention.portable.tiles import (
    RUNTIME,
    Cuts,
    Rows,
    bias_rows,
    cut_pairs,
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

RAISED = tl.constexpr(RAISED_BITS)
LOWERING = tl.constexpr(2.0**-RAISED_BITS)

Queries = namedtuple("Queries", "q do lse2 delta stat_at b h q_ss do_ss")
Keys = namedtuple("Keys", "k v b h k_ss v_ss dbias dbias_sn")
Config = namedtuple("Config", "BLOCK_M BLOCK_N D D_WIDTH DV DV_WIDTH SOFTCAP DROPOUT TMA PRECISION WANT_SUMS")


@triton.jit(do_not_specialize=["dlse_sb", "dlse_sh", "rows", "num_heads"])
def delta_kernel(
    o, do, dlse, delta, o_sb, o_ss, o_sh, do_sb, do_ss, do_sh, dlse_sb, dlse_sh, num_heads, rows,
    BLOCK_M: tl.constexpr, DV: tl.constexpr, DV_WIDTH: tl.constexpr,
):  # fmt: skip
    """rowsum(o * do) - dlse into a contiguous `b h s`; a program owns BLOCK_M rows of one head."""
    tiles = tl.cdiv(rows, BLOCK_M)
    row0 = tl.program_id(0) % tiles * BLOCK_M
    head = tl.program_id(0) // tiles
    b = (head // num_heads).to(tl.int64)
    h = (head % num_heads).to(tl.int64)
    x = row0 + tl.arange(0, BLOCK_M)
    o_tile = load_rows(o + b * o_sb + h * o_sh, b, h, row0, rows, o_ss, BLOCK_M, DV, DV_WIDTH, True, False)
    do_tile = load_rows(do + b * do_sb + h * do_sh, b, h, row0, rows, do_ss, BLOCK_M, DV, DV_WIDTH, True, False)
    total = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    if dlse is not None:
        total -= tl.load(dlse + b * dlse_sb + h * dlse_sh + x, mask=x < rows, other=0.0)
    tl.store(delta + head.to(tl.int64) * rows + x, total, mask=x < rows)


@triton.jit
def _load_stat(src, at, row, x, inside, MASKED: tl.constexpr, TMA: tl.constexpr):
    """One number per row; `src` points at a head's row 0, or describes all heads end to end, this one from `at` on.

    Under TMA `at` and `row` are multiples of four: a bulk load must begin at a multiple of 16 bytes.
    """
    if TMA:
        value = src.load([at + row])
    elif MASKED:
        value = tl.load(src + x, mask=inside, other=0.0)
    else:
        value = tl.load(src + x)
    return value


@triton.jit
def _keys_step(dk, dv, dkey_bias, k_tile, v_tile, row, run, own, src, score, cuts, c, MASKED: tl.constexpr):
    """Adds what one tile of queries of one head sends to a tile of keys. Tiles of scores are keys x queries."""
    x = row + tl.arange(0, c.BLOCK_M)
    inside = x < run.end
    q_pos = run.origin + run.stride * x
    q_tile = load_rows(src.q, src.b, src.h, row, run.end, src.q_ss, c.BLOCK_M, c.D, c.D_WIDTH, MASKED, c.TMA)
    do_tile = load_rows(src.do, src.b, src.h, row, run.end, src.do_ss, c.BLOCK_M, c.DV, c.DV_WIDTH, MASKED, c.TMA)
    qk = tl.dot(k_tile, tl.trans(q_tile), input_precision=c.PRECISION)
    lse2_i = _load_stat(src.lse2, src.stat_at, row, x, inside, MASKED, c.TMA)
    bias_tile = None
    if score.bias is not None:
        at = tl.cast(row, tl.int64) * score.bias_stride + tl.arange(0, c.BLOCK_M).to(tl.int64) * score.bias_stride
        bias_tile = tl.load(score.bias + at[None, :], mask=inside[None, :] & own.exists[:, None], other=0.0)
    PRECISE: tl.constexpr = q_tile.dtype == tl.float32
    s, t = score_of(
        qk, q_pos[None, :], own.positions[:, None], score.slope, score.key_bias, bias_tile, score.scale, score.cap, c.SOFTCAP, PRECISE,
    )  # fmt: skip
    if score.key_bias is not None or score.bias is not None:
        lse2_i = tl.where(lse2_i == float("-inf"), float("inf"), lse2_i)  # a bias of -inf on all that a row sees
    if q_tile.dtype == tl.float16:
        lse2_i -= RAISED  # Note [Raised weights] of arguments.py
    p = tl.exp2(s - lse2_i[None, :])
    if MASKED:
        lo, hi = load_bounds(run.lo, run.hi, own.row0, own.rows, c.BLOCK_N)
        visible = (q_pos[None, :] >= lo[:, None]) & (q_pos[None, :] < hi[:, None])
        if c.TMA:
            # a bulk load brings rows outside the run, which belong to other positions; a guarded one brings zeros
            visible &= (inside & (x >= run.begin))[None, :]
        p = tl.where(cut_pairs(visible, run, own, q_pos, cuts), p, 0.0)
    dp = tl.dot(v_tile, tl.trans(do_tile), input_precision=c.PRECISION)
    # not before dp: that costs registers; not after dv: waiting for it would serialize the products in flight
    delta_i = _load_stat(src.delta, src.stat_at, row, x, inside, MASKED, c.TMA)
    weights = p
    if c.DROPOUT:
        keep = kept(score.dropout_key, q_pos[None, :], own.positions[:, None], score.drop_threshold)
        weights = tl.where(keep, p, 0.0)  # dv is multiplied in the end
        dp = tl.where(keep, dp * score.drop_factor, 0.0)
    dv = tl.dot(weights.to(do_tile.dtype), do_tile, dv, input_precision=c.PRECISION)
    if q_tile.dtype == tl.float16:
        ds = p * (dp * LOWERING - (delta_i * LOWERING)[None, :])
    else:
        ds = p * (dp - delta_i[None, :])
    if c.WANT_SUMS:
        dkey_bias += tl.sum(ds, 1)
    if c.SOFTCAP:
        ds = ds * (1.0 - t * t)
    dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=c.PRECISION)
    return dk, dv, dkey_bias


@triton.jit
def _keys_of_head(dk, dv, dkey_bias, k_tile, v_tile, run, own, src, score, cuts, c):
    """Adds what the queries of a run of one head send: masked tiles, then full ones."""
    for j in tl.range(0, run.full_first + run.tiles - run.full_end):
        row = masked_row(run, j, c.BLOCK_M)
        x = row + tl.arange(0, c.BLOCK_M)
        inside = (x >= run.begin) & (x < run.end)
        if shows(run, own, run.origin + run.stride * x, inside, cuts, c.BLOCK_N):
            dk, dv, dkey_bias = _keys_step(dk, dv, dkey_bias, k_tile, v_tile, row, run, own, src, score, cuts, c, True)
    for row in tl.range(run.first + run.full_first * c.BLOCK_M, run.first + run.full_end * c.BLOCK_M, c.BLOCK_M):
        dk, dv, dkey_bias = _keys_step(dk, dv, dkey_bias, k_tile, v_tile, row, run, own, src, score, cuts, c, False)
    return dk, dv, dkey_bias


@triton.jit(do_not_specialize=list(RUNTIME))
def keys_kernel(
    do, q, k, v, lse2, delta, dk_out, dv_out, dkey_bias_out, positions, lo_ptr, hi_ptr, runs, alibi_slopes, key_bias, bias,
    do_sb, do_ss, do_sh, q_sb, q_ss, q_sh, k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, dk_sb, dk_ss, dk_sh, dv_sb, dv_ss, dv_sh,
    queries, lo_sb, hi_sb, key_bias_sb, bias_sb, bias_sh, bias_ss, bias_sn,
    heads, num_heads, group, rows, num_runs, tiles, sweep, softmax_scale, scale, cap, seed_low, seed_high, drop_threshold,
    drop_factor, term_count, lo_st, hi_st, tables, of_term, table_size, table_width, block_size,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, D_WIDTH: tl.constexpr, DV: tl.constexpr,
    DV_WIDTH: tl.constexpr, ADD: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, TMA: tl.constexpr,
    SAME_STRIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk, dv of BLOCK_N keys (`rows` in all) of one key head; `runs` and num_runs are those of the query side.

    `lse2` (lse in log2 units) and `delta` are contiguous `b h queries`, or under TMA descriptors of that memory; `queries`
    is s, or under TMA s rounded up to a multiple of four.
    `heads` counts batch x key heads, `num_heads` key heads. `dkey_bias_out` is a contiguous `b hk t`: one sum per key head.
    """
    if SAME_STRIDE:
        do_ss = q_ss  # one set of offsets in registers serves both
    tile, head = swizzle(tiles, heads, sweep)
    row0 = tile * BLOCK_N  # under a causal mask the first keys are seen most: longest first
    b = head // num_heads
    h_kv = head % num_heads
    # where memory holds heads first, those before this one may be more than 2^31 numbers
    b64, h_kv64 = b.to(tl.int64), h_kv.to(tl.int64)
    y = row0 + tl.arange(0, BLOCK_N)
    key_exists = y < rows
    lo_ptr += b64 * lo_sb
    hi_ptr += b64 * hi_sb
    lo, hi = load_bounds(lo_ptr, hi_ptr, row0, rows, BLOCK_N)
    seen = reduce_bounds(lo, hi, key_exists)
    cuts = Cuts(term_count, lo_st, hi_st, tables, of_term, table_size, table_width, block_size)
    if term_count is None and ADD:
        if seen[0] >= seen[1]:
            return

    k_tile = load_rows(k + b64 * k_sb + h_kv64 * k_sh, b, h_kv, row0, rows, k_ss, BLOCK_N, D, D_WIDTH, True, False)
    v_tile = load_rows(v + b64 * v_sb + h_kv64 * v_sh, b, h_kv, row0, rows, v_ss, BLOCK_N, DV, DV_WIDTH, True, False)
    k_pos = tl.load(positions + y, mask=key_exists, other=0)
    key_bias_tile = None
    if key_bias is not None:
        key_bias_tile = tl.load(key_bias + b64 * key_bias_sb + y, mask=key_exists, other=0.0)[:, None]
    dk = tl.zeros([BLOCK_N, D], tl.float32)
    dv = tl.zeros([BLOCK_N, DV], tl.float32)
    dkey_bias = tl.zeros([BLOCK_N], tl.float32)

    own = Rows(row0, rows, key_exists, k_pos)
    for part in tl.range(0, num_runs):
        run = run_of(part, runs, lo_ptr, hi_ptr, own, seen, cuts, BLOCK_N, BLOCK_M, 4 if TMA else 1)
        if run.tiles > 0:
            for g in tl.range(0, group):
                h = h_kv * group + g
                h64 = h.to(tl.int64)
                stat_at = (b * num_heads * group + h) * queries
                # statistics are contiguous: heads of all batch elements follow one another
                lse2_base = head_of(lse2, b64 * num_heads * group + h, 0, queries, 0, TMA)
                delta_base = head_of(delta, b64 * num_heads * group + h, 0, queries, 0, TMA)
                q_base = head_of(q, b64, h64, q_sb, q_sh, TMA)
                do_base = head_of(do, b64, h64, do_sb, do_sh, TMA)
                bias_base = None
                if bias is not None:
                    bias_base = bias + b64 * bias_sb + h64 * bias_sh + (k_pos.to(tl.int64) * bias_sn)[:, None]
                slope = tl.load(alibi_slopes + h) if alibi_slopes is not None else None
                key = dropout_key(b * num_heads * group + h, seed_low, seed_high) if DROPOUT else None
                dk, dv, dkey_bias = _keys_of_head(
                    dk, dv, dkey_bias, k_tile, v_tile, run, own,
                    Queries(q_base, do_base, lse2_base, delta_base, stat_at, b, h, q_ss, do_ss),
                    Score(scale, cap, slope, key_bias_tile, bias_base, bias_ss, key, drop_threshold, drop_factor), cuts,
                    Config(
                        BLOCK_M, BLOCK_N, D, D_WIDTH, DV, DV_WIDTH, SOFTCAP, DROPOUT, TMA, PRECISION, dkey_bias_out is not None
                    ),
                )  # fmt: skip

    if DROPOUT:
        dv = dv * drop_factor
    if k_tile.dtype == tl.float16:
        dv = dv * LOWERING
    store_rows(dv_out + b64 * dv_sb + h_kv64 * dv_sh, dv, row0, rows, dv_ss, BLOCK_N, DV, DV_WIDTH, ADD)
    dk = dk * softmax_scale
    store_rows(dk_out + b64 * dk_sb + h_kv64 * dk_sh, dk, row0, rows, dk_ss, BLOCK_N, D, D_WIDTH, ADD)
    if dkey_bias_out is not None:
        tl.store(dkey_bias_out + head.to(tl.int64) * rows + y, dkey_bias, mask=key_exists)


@triton.jit
def _rows_step(dq, dalibi, q_tile, do_tile, lse2, delta_i, row, run, own, keys, score, cuts, c, MASKED: tl.constexpr):
    """Adds what one tile of keys sends to a tile of queries. Tiles of scores are queries x keys."""
    y = row + tl.arange(0, c.BLOCK_N)
    inside = y < run.end
    k_pos = run.origin + run.stride * y
    k_tile = load_rows(keys.k, keys.b, keys.h, row, run.end, keys.k_ss, c.BLOCK_N, c.D, c.D_WIDTH, MASKED, c.TMA)
    qk = tl.dot(q_tile, tl.trans(k_tile), input_precision=c.PRECISION)
    s, t = score_of_keys(qk, k_pos, y, inside, own, score, c.SOFTCAP, q_tile.dtype == tl.float32)
    p = tl.exp2(s - lse2[:, None])
    visible = own.exists[:, None]
    if MASKED:
        visible = visible_pairs(run, own, k_pos, inside, cuts, c.BLOCK_M)
        p = tl.where(visible, p, 0.0)
    v_tile = load_rows(keys.v, keys.b, keys.h, row, run.end, keys.v_ss, c.BLOCK_N, c.DV, c.DV_WIDTH, MASKED, c.TMA)
    dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=c.PRECISION)
    if c.DROPOUT:
        keep = kept(score.dropout_key, own.positions[:, None], k_pos[None, :], score.drop_threshold)
        dp = tl.where(keep, dp * score.drop_factor, 0.0)
    ds = p * (dp - delta_i[:, None])
    if keys.dbias is not None:
        tl.store(keys.dbias + (k_pos.to(tl.int64) * keys.dbias_sn)[None, :], ds, mask=visible)
    if c.WANT_SUMS:
        dalibi -= tl.sum(ds * tl.abs(own.positions[:, None] - k_pos[None, :]).to(tl.float32), 1)
    if c.SOFTCAP:
        ds = ds * (1.0 - t * t)
    dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=c.PRECISION)
    return dq, dalibi


@triton.jit
def _rows_of_run(
    part, dq, dalibi, q_tile, do_tile, lse2, delta_i, runs, lo_ptr, hi_ptr, seen, own, keys, score, cuts, c
):
    """Adds what the keys of a part of the work send: masked tiles, then full ones."""
    run = run_of(part, runs, lo_ptr, hi_ptr, own, seen, cuts, c.BLOCK_M, c.BLOCK_N)
    for j in tl.range(0, run.full_first + run.tiles - run.full_end):
        row = masked_row(run, j, c.BLOCK_N)
        y = row + tl.arange(0, c.BLOCK_N)
        if shows(run, own, run.origin + run.stride * y, y < run.end, cuts, c.BLOCK_M):
            dq, dalibi = _rows_step(
                dq, dalibi, q_tile, do_tile, lse2, delta_i, row, run, own, keys, score, cuts, c, True
            )
    for row in tl.range(run.first + run.full_first * c.BLOCK_N, run.first + run.full_end * c.BLOCK_N, c.BLOCK_N):
        dq, dalibi = _rows_step(dq, dalibi, q_tile, do_tile, lse2, delta_i, row, run, own, keys, score, cuts, c, False)
    return dq, dalibi


@triton.jit(do_not_specialize=list(RUNTIME))
def rows_kernel(
    do, q, k, v, lse, delta, dq_out, dalibi_out, dbias, positions, lo_ptr, hi_ptr, runs, alibi_slopes, key_bias, bias,
    do_sb, do_ss, do_sh, q_sb, q_ss, q_sh, k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, dq_sb, dq_ss, dq_sh,
    lse_sb, lse_sh, delta_sb, delta_sh, dalibi_sb, dalibi_sh, lo_sb, hi_sb, key_bias_sb, bias_sb, bias_sh, bias_ss, bias_sn,
    dbias_sb, dbias_sh, dbias_ss, dbias_sn,
    heads, num_heads, group, rows, num_runs, tiles, sweep, softmax_scale, scale, cap, seed_low, seed_high, drop_threshold,
    drop_factor, term_count, lo_st, hi_st, tables, of_term, table_size, table_width, block_size,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, D_WIDTH: tl.constexpr, DV: tl.constexpr,
    DV_WIDTH: tl.constexpr, ADD: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, TMA: tl.constexpr,
    SAME_STRIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Dq (and dalibi, dbias) of BLOCK_M queries of one head; `runs` and num_runs are those of the key side."""
    if SAME_STRIDE:
        v_ss = k_ss
    tile, head = swizzle(tiles, heads, sweep)
    row0 = (tiles - 1 - tile) * BLOCK_M
    b = head // num_heads
    h = head % num_heads
    h_kv = h // group
    b64, h64, h_kv64 = b.to(tl.int64), h.to(tl.int64), h_kv.to(tl.int64)
    x = row0 + tl.arange(0, BLOCK_M)
    row_exists = x < rows
    lo_ptr += b64 * lo_sb
    hi_ptr += b64 * hi_sb
    lo, hi = load_bounds(lo_ptr, hi_ptr, row0, rows, BLOCK_M)
    seen = reduce_bounds(lo, hi, row_exists)
    cuts = Cuts(term_count, lo_st, hi_st, tables, of_term, table_size, table_width, block_size)
    if term_count is None and ADD:
        if seen[0] >= seen[1]:
            return

    q_tile = load_rows(q + b64 * q_sb + h64 * q_sh, b, h, row0, rows, q_ss, BLOCK_M, D, D_WIDTH, True, False)
    do_tile = load_rows(do + b64 * do_sb + h64 * do_sh, b, h, row0, rows, do_ss, BLOCK_M, DV, DV_WIDTH, True, False)
    lse2 = tl.load(lse + b64 * lse_sb + h64 * lse_sh + x, mask=row_exists, other=float("-inf")) * LOG2E
    lse2 = tl.where(lse2 == float("-inf"), float("inf"), lse2)  # rows that saw nothing: all their weights are 0
    delta_i = tl.load(delta + b64 * delta_sb + h64 * delta_sh + x, mask=row_exists, other=0.0)
    q_pos = tl.load(positions + x, mask=row_exists, other=0)
    k_base = head_of(k, b64, h_kv64, k_sb, k_sh, TMA)
    v_base = head_of(v, b64, h_kv64, v_sb, v_sh, TMA)
    key_bias_base = key_bias + b64 * key_bias_sb if key_bias is not None else None
    bias_base = bias_rows(bias, b64, h64, row0, bias_sb, bias_sh, bias_ss, BLOCK_M)
    dbias_base = bias_rows(dbias, b64, h64, row0, dbias_sb, dbias_sh, dbias_ss, BLOCK_M)
    slope = tl.load(alibi_slopes + h) if alibi_slopes is not None else None
    key = dropout_key(head, seed_low, seed_high) if DROPOUT else None
    dq = tl.zeros([BLOCK_M, D], tl.float32)
    dalibi = tl.zeros([BLOCK_M], tl.float32)

    own = Rows(row0, rows, row_exists, q_pos)
    keys = Keys(k_base, v_base, b, h_kv, k_ss, v_ss, dbias_base, dbias_sn)
    score = Score(scale, cap, slope, key_bias_base, bias_base, bias_sn, key, drop_threshold, drop_factor)
    for part in tl.range(0, num_runs):
        dq, dalibi = _rows_of_run(
            part, dq, dalibi, q_tile, do_tile, lse2, delta_i, runs, lo_ptr, hi_ptr, seen, own, keys, score, cuts,
            Config(BLOCK_M, BLOCK_N, D, D_WIDTH, DV, DV_WIDTH, SOFTCAP, DROPOUT, TMA, PRECISION, dalibi_out is not None),
        )  # fmt: skip

    dq = dq * softmax_scale
    store_rows(dq_out + b64 * dq_sb + h64 * dq_sh, dq, row0, rows, dq_ss, BLOCK_M, D, D_WIDTH, ADD)
    if dalibi_out is not None:
        at = dalibi_out + b64 * dalibi_sb + h64 * dalibi_sh + x
        if ADD:
            dalibi += tl.load(at, mask=row_exists, other=0.0)
        tl.store(at, dalibi, mask=row_exists)
