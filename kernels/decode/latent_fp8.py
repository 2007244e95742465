"""Decode over fp8 latents on Hopper: latents in registers are the first operand of products, queries the second.

Owns the pipeline of four warps. Shares of blocks come from a kernel of decode_triton (Note [Division of work] there),
Note [Latents] of dispatch.py says what a latent is.

Note [Latents in registers]
    Widened on their way from shared memory to registers, fp8 latents are never written back in 16 bits. Products are transposed,

        scores (64 keys x rows) = k q^T,    sums (columns x rows) += v^T weights (64 keys x rows),

    so that rows are the narrow side, 16 or 32, and few heads are not padded to 64. Two programs share a multiprocessor: one
    multiplies while the other widens. A register holds pairs of columns, as Note [Halves] of paged_hopper.py says: q is cut into
    columns 4j, 4j + 1 and 4j + 2, 4j + 3 of panels of 128, and sums are those of even and of odd columns of a panel.
    Both keep numbers in fp16, which holds all of e4m3; q is divided by a power of two for each row before.
    Scales of rows are parts of scores and of weights, as in decode_triton.
    Weights pass through the columns that are no values: nobody reads those after the scores.
    The reference point of a row follows the maximum only once that has grown by GROWTH, so that sums are seldom scaled.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOptionalOperand=false, reportOptionalMemberAccess=false
# pyright: reportOperatorIssue=false
from collections import namedtuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ringattn.kernels.attention.arguments import scale_and_cap
from ringattn.kernels.attention.hopper.descriptors import Descriptors
from ringattn.kernels.attention.hopper.primitives import LOG2E, opaque, panel_of, sync
from ringattn.kernels.decode.configs import LATENT_HOPPER, row_tiles
from ringattn.kernels.decode.decode_triton import plan_shares
from ringattn.kernels.decode.dispatch import DecodeCall, check_decode
from ringattn.kernels.decode.paged_hopper import Outputs, Queries, numbers_of, sort_bytes, store_state
from ringattn.kernels.runtime import bound_launch

KEYS = gl.constexpr(64)
"""Rows of a tile; pairs of columns of a panel of products."""
OTHER = gl.constexpr(32)
"""Pairs of columns that are no values."""
THREADS = gl.constexpr(128)
TAKEN = gl.constexpr(8)  # named barriers: all warps have read the stage that is filled next,
CLEARED = gl.constexpr(9)  # and see what all of them wrote
GROWTH = gl.constexpr(8.0)  # weights stay below 2^8,
HEADROOM = gl.constexpr(6.0)  # times 2^6: small numbers of fp16 have few digits
_DESCRIPTORS = Descriptors()
_CONFIG = LATENT_HOPPER[1]

Work = namedtuple("Work", "shares pages starts lengths table_sb tiles heads rows")
Pools = namedtuple("Pools", "k k_other size")
Memory = namedtuple("Memory", "q q_other k k_other size full")
Config = namedtuple("Config", "PAGE STAGES M D DV SOFTCAP")
"""M: rows, padded; D, DV: columns of latents, and those that are values."""


@gluon.jit
def _fill(pools, mem, page, row, stage, c):
    """Starts the copies of a tile into a stage."""
    full = mem.full.index(stage)
    mbarrier.expect(full, pools.k.block_type.nbytes + pools.k_other.block_type.nbytes + pools.size.block_type.nbytes)
    tma.async_copy_global_to_shared(pools.k, [page, 0, row, 0], full, mem.k.index(stage))
    tma.async_copy_global_to_shared(pools.k_other, [page, 0, row, c.DV // 2], full, mem.k_other.index(stage))
    tma.async_copy_global_to_shared(pools.size, [page * c.PAGE + row], full, mem.size.index(stage))


@gluon.jit
def _load_q(queries, r, start, work, c, COLUMNS: gl.constexpr):
    """COLUMNS columns of q from `start` on, of the rows of this program; zeros where there are none."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    x = gl.program_id(0) % work.tiles * c.M + gl.arange(0, c.M, gl.SliceLayout(1, layout))
    column = start + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    at = gl.cast(r, gl.int64) * queries.q_sb + x // work.heads * queries.q_ss + x % work.heads * queries.q_sh
    there = gl.expand_dims(x < work.rows, 1) & gl.expand_dims(column < c.D, 0)
    return gl.load(queries.q + gl.expand_dims(at, 1) + gl.expand_dims(column, 0), mask=there, other=0.0)


@gluon.jit
def _store_halves(q, raised, one, other):
    """Writes columns 4j, 4j + 1 and 4j + 2, 4j + 3 of rows times a number, in fp16."""
    raised = gl.convert_layout(raised, gl.SliceLayout(1, q.type.layout))
    q = (q.to(gl.float32) * gl.expand_dims(raised, 1)).to(gl.float16)
    first, second = gl.split(gl.permute(gl.reshape(q, [q.shape[0], q.shape[1] // 4, 2, 2]), (0, 1, 3, 2)))
    one.store(gl.reshape(first, [q.shape[0], q.shape[1] // 2]))
    other.store(gl.reshape(second, [q.shape[0], q.shape[1] // 2]))


@gluon.jit
def _store_q(queries, mem, r, work, c):
    """Writes q to shared memory in fp16 and in halves, and returns the powers of two that rows were divided by."""
    values = (_load_q(queries, r, 0, work, c, 2 * KEYS),)
    for i in gl.static_range(1, c.DV // (2 * KEYS)):
        values += (_load_q(queries, r, i * 2 * KEYS, work, c, 2 * KEYS),)
    rest = _load_q(queries, r, c.DV, work, c, 2 * OTHER)
    rows: gl.constexpr = gl.SliceLayout(1, rest.type.layout)
    raised = gl.full([c.M], 1.0, gl.float32, rows)
    size = raised
    if rest.dtype != gl.float16:
        largest = gl.abs(values[0].to(gl.float32))
        for i in gl.static_range(1, len(values)):
            largest = gl.maximum(largest, gl.abs(values[i].to(gl.float32)))
        largest = gl.maximum(gl.convert_layout(gl.max(largest, 1), rows), gl.max(gl.abs(rest.to(gl.float32)), 1))
        top = largest.to(gl.int32, bitcast=True) & 0x7F800000
        raised = (0x7F000000 - top).to(gl.float32, bitcast=True)
        size = top.to(gl.float32, bitcast=True)
    for i in gl.static_range(len(values)):
        _store_halves(values[i], raised, mem.q.index(2 * i), mem.q.index(2 * i + 1))
    _store_halves(rest, raised, mem.q_other.index(0), mem.q_other.index(1))
    fence_async_shared()
    sync(CLEARED, THREADS)
    return size


@gluon.jit
def _scores(mem, stage, c, MMA: gl.constexpr):
    """Products of the keys of a stage with q, in halves of panels."""
    first: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    values = panel_of(mem.k, stage)
    s = gl.zeros([KEYS, c.M], gl.float32, MMA)
    for i in gl.static_range(c.DV // (2 * KEYS)):
        k = values.slice(i * KEYS, KEYS, dim=1).load(first)
        if i > 0:
            s = warpgroup_mma_wait(0, deps=[s])  # else registers of all panels would be held at once
        s = warpgroup_mma(numbers_of(k, False), mem.q.index(2 * i).permute((1, 0)), s, use_acc=i > 0, is_async=True)
        s = warpgroup_mma(numbers_of(k, True), mem.q.index(2 * i + 1).permute((1, 0)), s, is_async=True)
    k = panel_of(mem.k_other, stage).load(first)
    s = warpgroup_mma_wait(0, deps=[s])
    s = warpgroup_mma(numbers_of(k, False), mem.q_other.index(0).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma(numbers_of(k, True), mem.q_other.index(1).permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def _sum_in_threads(p, c):
    """The sums of keys of a tile that one thread holds, as warps x 8 x rows."""
    return gl.sum(gl.reshape(p, [KEYS // 16, 2, 8, c.M]), 1)


@gluon.jit
def _scaled(acc, alpha):
    """Return sums times a number per row."""
    found = ()
    for i in gl.static_range(len(acc)):
        found += (acc[i] * alpha,)
    return found


@gluon.jit
def _add_values(acc, weights, mem, stage, length, c, MMA: gl.constexpr):
    """Adds the values of a stage times weights to the sums of even and odd columns of all panels."""
    first: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    values = panel_of(mem.k, stage)
    if length < KEYS:
        clear_rows(values, length)
    second: gl.constexpr = gl.NVMMASharedLayout(2 * c.M, 16, rank=2)
    place = mem.k_other.index(stage)._reinterpret(gl.float16, [OTHER // c.M, KEYS, c.M], second).index(0)
    place.store(weights.to(gl.float16))
    fence_async_shared()
    sync(CLEARED, THREADS)
    done = ()
    begun = ()
    for i in gl.static_range(c.DV // (2 * KEYS)):
        v = values.slice(i * KEYS, KEYS, dim=1).permute((1, 0)).load(first)
        if i > 0:
            done += warpgroup_mma_wait(0, deps=begun)
        v = sort_bytes(v)
        begun = (
            warpgroup_mma(numbers_of(v, False), place, acc[2 * i], is_async=True),
            warpgroup_mma(numbers_of(v, True), place, acc[2 * i + 1], is_async=True),
        )
    return done + warpgroup_mma_wait(0, deps=begun)


@gluon.jit
def clear_rows(values, length):
    """Zeros in the rows of a panel from `length` on, which may be NaN: 0 * NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    inside = gl.expand_dims(gl.arange(0, KEYS, gl.SliceLayout(1, layout)) < length, 1)
    for i in gl.static_range(values.shape[1] // KEYS):
        columns = values.slice(i * KEYS, KEYS, dim=1)
        x = columns.load(layout)
        columns.store(gl.where(inside, x, gl.zeros_like(x)))


@gluon.jit
def _store_panel(home, at, exists, even, odd):
    """Stores the sums of a panel of columns; `at`: where each row begins."""
    both = gl.join(even, odd)
    rows: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, both.type.layout))
    pairs: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, both.type.layout))
    pair: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, both.type.layout))
    column = gl.expand_dims(gl.expand_dims(2 * gl.arange(0, KEYS, pairs), 1), 2)
    column += gl.expand_dims(gl.expand_dims(gl.arange(0, 2, pair), 0), 1)
    at = gl.expand_dims(gl.expand_dims(gl.convert_layout(at, rows), 0), 2)
    ok = gl.expand_dims(gl.expand_dims(gl.convert_layout(exists, rows), 0), 2)
    gl.store(home + (at + column), both, mask=ok)


@gluon.jit
def _bounds_of(work, queries, r, there, c, ROWS: gl.constexpr):
    """(row, whether it exists, lo, hi) of the rows of this program, in place: kept through the loop they would be spilled."""
    x = opaque(gl.program_id(0)) % work.tiles * c.M + gl.arange(0, c.M, ROWS)
    exists = x < work.rows * there
    token = x // work.heads
    lo = gl.load(queries.lo + r * queries.lo_sb + token, mask=exists, other=0)
    return x, exists, lo, gl.load(queries.hi + r * queries.hi_sb + token, mask=exists, other=0)


@gluon.jit
def _decode_share(work, queries, pools, out, mem, c):
    """The partial of a tile of rows over one share of blocks (Note [Latents in registers])."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.M, 16])
    keys: gl.constexpr = gl.SliceLayout(1, mma)
    rows: gl.constexpr = gl.SliceLayout(0, mma)
    TILES: gl.constexpr = c.PAGE // KEYS
    place = work.shares + gl.program_id(0) // work.tiles * 8
    r, split, mine = gl.load(place), gl.load(place + 1), gl.load(place + 2)
    first, last, there = gl.load(place + 3) * TILES, gl.load(place + 4) * TILES, gl.load(place + 5)
    pages = work.pages + gl.cast(r, gl.int64) * work.table_sb
    starts = work.starts + gl.cast(r, gl.int64) * work.table_sb
    lengths = work.lengths + gl.cast(r, gl.int64) * work.table_sb
    for t in gl.static_range(c.STAGES - 1):
        if first + t < last:
            page = gl.load(pages + (first + t) // TILES)
            _fill(pools, mem, page, (first + t) % TILES * KEYS, t, c)

    x, exists, lo, hi = _bounds_of(work, queries, r, there, c, rows)
    token = x // work.heads
    sees = exists & (lo < hi)
    # what lies between is seen by every row: nothing is, where a row sees nothing
    whole_lo = gl.max(gl.where(sees, lo, gl.where(exists, 2**31 - 1, 0)), 0)
    whole_hi = gl.min(gl.where(sees, hi, 2**31 - 1), 0)
    q_pos = lo
    slope = gl.zeros([c.M], gl.float32, rows)
    if queries.slopes is not None:
        q_pos = gl.load(queries.positions + r * queries.positions_sb + token, mask=exists, other=0)
        slope = gl.load(queries.slopes + x % work.heads, mask=exists, other=0.0).to(gl.float32) * LOG2E
    factor = gl.full([1, c.M], 1.0, gl.float32, mma)
    if first < last:
        size = _store_q(queries, mem, r, work, c)
        factor = gl.expand_dims(gl.convert_layout(size, rows) * queries.scale, 0)
    m_i = gl.full([c.M], -float("inf"), gl.float32, rows)
    l_i = _sum_in_threads(gl.zeros([KEYS, c.M], gl.float32, mma), c)  # of each thread: summed once, at the end
    columns: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, l_i.type.layout))
    acc = ()
    for _i in gl.static_range(c.DV // KEYS):
        acc += (gl.zeros([KEYS, c.M], gl.float32, mma),)
    n = gl.arange(0, KEYS, keys)
    # what a tile needs of the table is loaded a tile before
    start = gl.load(starts + first // TILES, mask=first < last, other=0)
    length = gl.load(lengths + first // TILES, mask=first < last, other=0)
    page = gl.load(pages + gl.minimum(first + c.STAGES - 1, last - 1) // TILES, mask=first < last, other=0)
    stage = 0
    phase = 0
    for t in range(first, last):
        mbarrier.wait(mem.full.index(stage), phase)
        sync(TAKEN, THREADS)
        ahead = t + c.STAGES - 1
        if ahead < last:
            _fill(pools, mem, page, ahead % TILES * KEYS, gl.where(stage == 0, c.STAGES, stage) - 1, c)
        page = gl.load(pages + gl.minimum(ahead + 1, last - 1) // TILES)
        begins = start + t % TILES * KEYS
        real = length - t % TILES * KEYS
        later = gl.minimum(t + 1, last - 1) // TILES
        start = gl.load(starts + later)
        length = gl.load(lengths + later)

        s = _scores(mem, stage, c, mma)
        sizes = gl.where(n < real, mem.size.index(stage).load(keys), 0.0)
        s *= gl.expand_dims(sizes, 1)
        if c.SOFTCAP:
            s = queries.cap - (2.0 * queries.cap) / (1.0 + gl.exp2(s * (2.0 * LOG2E * factor)))
        else:
            s *= factor
        if queries.slopes is not None:
            distance = gl.expand_dims(q_pos, 0) - gl.expand_dims(begins + n, 1)
            s -= gl.expand_dims(slope, 0) * gl.abs(distance).to(gl.float32)
        if (begins < whole_lo) | (begins + KEYS > whole_hi) | (real < KEYS):
            _x, _exists, low, high = _bounds_of(work, queries, r, there, c, rows)
            low = gl.expand_dims(low - begins, 0)
            high = gl.expand_dims(gl.minimum(high - begins, real), 0)
            s = gl.where((gl.expand_dims(n, 1) >= low) & (gl.expand_dims(n, 1) < high), s, -float("inf"))
        # weights times sizes are multiplied with values: the exponent of a size takes part in the reference point
        exponent = gl.maximum((sizes.to(gl.int32, bitcast=True) >> 23) - 127, -60).to(gl.float32)
        top = gl.max(s + gl.expand_dims(exponent, 1), 0)
        grown = top > m_i + GROWTH
        m_new = gl.where(grown, top, m_i)
        m_ref = gl.where(m_new == -float("inf"), 0.0, m_new)  # a row that saw nothing so far: all weights are 2^-inf
        p = gl.exp2(s - gl.expand_dims(m_ref - HEADROOM, 0))
        if gl.max(grown.to(gl.int32), 0) > 0:
            alpha = gl.exp2(m_i - m_ref)
            l_i *= gl.expand_dims(gl.expand_dims(gl.convert_layout(alpha, columns), 0), 0)
            acc = _scaled(acc, gl.expand_dims(alpha, 0))
        m_i = m_new
        l_i += _sum_in_threads(p, c)
        acc = _add_values(acc, p * gl.expand_dims(sizes, 1), mem, stage, real, c, mma)
        stage += 1
        if stage == c.STAGES:
            stage = 0
            phase ^= 1

    x = opaque(gl.program_id(0)) % work.tiles * c.M + gl.arange(0, c.M, rows)
    exists = x < work.rows * gl.load(place + 5)
    row = gl.cast(r * work.rows + x, gl.int64)
    home = out.parts + gl.cast(split, gl.int64) * out.parts_sp
    for i in gl.static_range(c.DV // (2 * KEYS)):
        _store_panel(home + i * (2 * KEYS), row * c.DV, exists, acc[2 * i], acc[2 * i + 1])
    total = gl.convert_layout(gl.sum(gl.sum(l_i, 0), 0), rows)
    store_state(out, row, m_i - HEADROOM, total, exists, split, mine, there, c.DV)


@gluon.jit(
    do_not_specialize=["table_sb", "lo_sb", "hi_sb", "positions_sb", "tiles", "heads", "rows", "splits", "all_rows"]
)
def latent_fp8_kernel(
    q, k, k_other, size, shares, pages, starts, lengths, lo, hi, positions, slopes, parts, parts_sp, q_sb, q_ss, q_sh, table_sb,
    lo_sb, hi_sb, positions_sb, tiles, heads, rows, splits, all_rows, scale, cap,
    PAGE: gl.constexpr, STAGES: gl.constexpr, M: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, SOFTCAP: gl.constexpr,
    num_warps: gl.constexpr,  # noqa: ARG001
):  # fmt: skip
    """`_decode_share` in shared memory of its own. Strides are in elements; `rows` are those of a request.

    k and k_other are descriptors of panels of pairs of columns (int16): of values, and of OTHER; size is that of scales.
    """
    q_s = gl.allocate_shared_memory(gl.float16, [DV // KEYS, M, KEYS], gl.NVMMASharedLayout(128, 16, rank=2))
    q_other_s = gl.allocate_shared_memory(gl.float16, [2, M, OTHER], gl.NVMMASharedLayout(64, 16, rank=2))
    k_s = gl.allocate_shared_memory(k.dtype, [STAGES] + k.block_type.shape, k.layout)  # noqa: RUF005
    k_other_s = gl.allocate_shared_memory(k.dtype, [STAGES] + k_other.block_type.shape, k_other.layout)  # noqa: RUF005
    size_s = gl.allocate_shared_memory(gl.float32, [STAGES, KEYS], size.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    _decode_share(
        Work(shares, pages, starts, lengths, table_sb, tiles, heads, rows),
        Queries(q, q_sb, q_ss, q_sh, lo, hi, lo_sb, hi_sb, positions, positions_sb, slopes, scale, cap),
        Pools(k, k_other, size),
        Outputs(parts, parts_sp, splits, all_rows),
        Memory(q_s, q_other_s, k_s, k_other_s, size_s, full),
        Config(PAGE, STAGES, M, D, DV, SOFTCAP),
    )


def plan_splits(call: DecodeCall, splits: int) -> Tensor | None:
    """`kernels.decode.dispatch.plan_splits`."""
    return plan_shares(call, splits, _CONFIG) if call.q.shape[0] else None


def decode(call: DecodeCall, parts: Tensor, *, split_plan: Tensor | None = None) -> None:
    """`kernels.decode.dispatch.decode`."""
    check_decode(call, parts)
    q, k, v, table, lo, hi, positions, score, k_scale, _ = call
    b, s, h, d = q.shape
    dv = v.shape[3]
    if b == 0:
        return
    for name, x in (("k", k), ("k_scale", k_scale)):
        if not (_DESCRIPTORS.describable(x) and (x.ndim == 4 or x.is_contiguous())):
            raise ValueError(
                f"{name} must have pages and an address and strides that are multiples of 16 bytes, and scales must be "
                f'contiguous, got {tuple(x.shape)} with {x.stride()}; make it contiguous, or use impl="portable"'
            )
    shares = plan_shares(call, parts.shape[0], _CONFIG) if split_plan is None else split_plan
    rows, tiles = row_tiles(s, h, _CONFIG.block_m)
    pool = k.view(torch.int16).transpose(1, 2)
    keys = _CONFIG.block_n
    bound_launch.launch(
        latent_fp8_kernel,
        (shares.shape[0] * tiles,),
        (
            q, _DESCRIPTORS.rows(pool, keys, dv // 2), _DESCRIPTORS.rows(pool, keys, 32), _DESCRIPTORS.numbers(k_scale, keys),
            shares, table.pages, table.starts, table.lengths, lo, hi, positions, score.alibi_slopes, parts, parts.stride(0),
            *q.stride()[:3], table.pages.stride(0), lo.stride(0), hi.stride(0), positions.stride(0), tiles, h, s * h,
            parts.shape[0], b * s * h, *scale_and_cap(score),
        ),
        {
            "PAGE": k.shape[2], "STAGES": _CONFIG.num_stages, "M": rows, "D": d, "DV": dv, "SOFTCAP": score.softcap > 0,
        },
        num_warps=_CONFIG.num_warps,
    )  # fmt: skip
