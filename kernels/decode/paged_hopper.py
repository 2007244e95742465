"""Decode of few rows on Hopper: programs of one warp, pages by the copy engine, keys and values as the first operand.

Owns the pipeline of a warp. Shares of blocks come from a kernel of decode_triton (Note [Division of work] there).

Note [One warp]
    Instructions bound decode over fp8 pages, not bytes: a program of four warps issues 1,932 for a tile of 64 keys, and its warps
    wait for each other three times. Here a warp computes alone, 821 of them, and transposed,

        scores (64 keys x rows) = k q^T,    sums (columns x rows) += v^T weights (64 keys x rows),

    so that rows are the narrow side of products, 8 or 16, and scores, weights and sums are a half or a quarter as many numbers.
    A tile has one wait, for its copies. As it begins a tile, the warp refills the stage of the tile before.

Note [Halves]
    Both products take a tile in two halves of its columns. In 16 bits they are two panels of shared memory. An fp8 tile is one
    panel of pairs of bytes (int16), which the matrix loads of shared memory can transpose. A register of k holds columns
    4j .. 4j + 3 of a key, of which two conversions make the halves 4j, 4j + 1 and 4j + 2, 4j + 3; q is cut alike, once. A
    register of v holds two columns of two keys, so a permutation comes before: the halves are even and odd columns.
    Scales of rows are parts of scores and of weights, as in decode_triton.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOptionalOperand=false, reportOptionalMemberAccess=false
# pyright: reportOperatorIssue=false
from collections import namedtuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ringattn.kernels.attention.arguments import scale_and_cap
from ringattn.kernels.attention.hopper.descriptors import Descriptors
from ringattn.kernels.attention.hopper.primitives import LOG2E, panel_of, sync
from ringattn.kernels.decode.configs import PAGED_HOPPER
from ringattn.kernels.decode.decode_triton import plan_shares
from ringattn.kernels.decode.dispatch import FP8, DecodeCall, check_decode
from ringattn.kernels.runtime import bound_launch

KEYS = gl.constexpr(64)
"""Rows of a tile."""
TAKEN = gl.constexpr(8)  # named barrier of the warp: all lanes have read the stage that is filled next
_DESCRIPTORS = Descriptors()

# arguments of helpers; Note [Structs] of primitives.py
Work = namedtuple("Work", "shares pages starts lengths table_sb hk group rows")
Queries = namedtuple("Queries", "q q_sb q_ss q_sh lo hi lo_sb hi_sb positions positions_sb slopes scale cap")
Pools = namedtuple("Pools", "k v k_size v_size")
Outputs = namedtuple("Outputs", "parts parts_sp splits all_rows")
Memory = namedtuple("Memory", "k v k_size v_size full")
Config = namedtuple("Config", "PAGE STAGES M D DV FP8 DTYPE SOFTCAP")
"""M: rows, padded; DTYPE: of products."""


@gluon.jit
def _fill(pools, mem, page, h_kv, hk, row, stage, c):
    """Starts the copies of a tile into a stage."""
    full = mem.full.index(stage)
    if c.FP8:
        mbarrier.expect(
            full, pools.k.block_type.nbytes + pools.v.block_type.nbytes + 2 * pools.k_size.block_type.nbytes
        )
        tma.async_copy_global_to_shared(pools.k, [page, h_kv, row, 0], full, mem.k.index(stage))
        tma.async_copy_global_to_shared(pools.v, [page, h_kv, row, 0], full, mem.v.index(stage))
        at = (page * hk + h_kv) * c.PAGE + row
        tma.async_copy_global_to_shared(pools.k_size, [at], full, mem.k_size.index(stage))
        tma.async_copy_global_to_shared(pools.v_size, [at], full, mem.v_size.index(stage))
    else:
        mbarrier.expect(full, 2 * (pools.k.block_type.nbytes + pools.v.block_type.nbytes))
        for half in gl.static_range(2):
            panel = 2 * stage + half
            tma.async_copy_global_to_shared(pools.k, [page, h_kv, row, half * (c.D // 2)], full, mem.k.index(panel))
            tma.async_copy_global_to_shared(pools.v, [page, h_kv, row, half * (c.DV // 2)], full, mem.v.index(panel))


@gluon.jit
def numbers_of(x, SECOND: gl.constexpr):
    """Of each two int16 the bytes of the first, or of the second, as e4m3 numbers in fp16, which holds all of them."""
    if SECOND:
        asm: gl.constexpr = "{ .reg .b16 a, b; mov.b32 {a, b}, $1; cvt.rn.f16x2.e4m3x2 $0, b; }"
    else:
        asm: gl.constexpr = "{ .reg .b16 a, b; mov.b32 {a, b}, $1; cvt.rn.f16x2.e4m3x2 $0, a; }"
    return gl.inline_asm_elementwise(asm, "=r,r", [x], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def sort_bytes(x):
    """Of each two int16 the lower bytes as the first and the upper ones as the second."""
    return gl.inline_asm_elementwise("prmt.b32 $0, $1, 0, 0x3120;", "=r,r", [x], dtype=gl.int16, is_pure=True, pack=2)


@gluon.jit
def store_state(out, row, m, total, exists, split, mine, there, DV: gl.constexpr):
    """Stores m and l of rows of a split, and the identity of splits that have no share: programs of a request write it in turns."""
    ml = gl.cast(out.all_rows, gl.int64) * DV + row
    home = out.parts + gl.cast(split, gl.int64) * out.parts_sp + ml
    # a maximum passes over NaN: a row of NaN alone would have the m of a row that saw nothing
    gl.store(home, gl.where(total == total, m, total), mask=exists)
    gl.store(home + out.all_rows, total, mask=exists)
    for unused in range(mine + split, out.splits * there, mine):
        spared = out.parts + gl.cast(unused, gl.int64) * out.parts_sp + ml
        gl.store(spared, gl.full(total.shape, -float("inf"), gl.float32, total.type.layout), mask=exists)
        # gl.zeros takes no layout of a tensor on Triton 3.6
        gl.store(spared + out.all_rows, gl.full(total.shape, 0.0, gl.float32, total.type.layout), mask=exists)


@gluon.jit
def _scores(q, mem, stage, c, MMA: gl.constexpr):
    """Products of the keys of a stage with q, in halves (Note [Halves])."""
    first: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    s = gl.zeros([KEYS, c.M], gl.float32, MMA)
    if c.FP8:
        k = panel_of(mem.k, stage).load(first)
        s = mma_v2(numbers_of(k, False), q[0], s)
        s = mma_v2(numbers_of(k, True), q[1], s)
    else:
        s = mma_v2(panel_of(mem.k, 2 * stage).load(first), q[0], s)
        s = mma_v2(panel_of(mem.k, 2 * stage + 1).load(first), q[1], s)
    return s


@gluon.jit
def _add_values(acc, weights, mem, stage, length, c, MMA: gl.constexpr):
    """Adds the values of a stage times weights to both halves of acc."""
    first: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    panels: gl.constexpr = 1 if c.FP8 else 2
    if length < KEYS:
        for i in gl.static_range(panels):
            _clear(panel_of(mem.v, panels * stage + i), length)
    weights = gl.convert_layout(weights.to(c.DTYPE), gl.DotOperandLayout(1, MMA, 2))
    if c.FP8:
        v = sort_bytes(panel_of(mem.v, stage).permute((1, 0)).load(first))
        one = mma_v2(numbers_of(v, False), weights, acc[0])
        other = mma_v2(numbers_of(v, True), weights, acc[1])
    else:
        one = mma_v2(panel_of(mem.v, 2 * stage).permute((1, 0)).load(first), weights, acc[0])
        other = mma_v2(panel_of(mem.v, 2 * stage + 1).permute((1, 0)).load(first), weights, acc[1])
    return one, other


@gluon.jit
def _clear(values, length):
    """Zeros in the rows of a panel from `length` on, which may be NaN: 0 * NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // values.shape[1], values.shape[1] // 8], [1, 1], [1, 0])
    inside = gl.expand_dims(gl.arange(0, KEYS, gl.SliceLayout(1, layout)) < length, 1)
    x = values.load(layout)
    values.store(gl.where(inside, x, gl.zeros_like(x)))
    fence_async_shared()


@gluon.jit
def _load_q(queries, r, h_kv, work, c, MMA: gl.constexpr):
    """The halves of q (Note [Halves]), and the power of two that they were divided by: fp16 then holds bf16."""
    second: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    x = gl.arange(0, c.M, gl.SliceLayout(0, second))
    d = gl.arange(0, c.D // 2, gl.SliceLayout(1, second))
    if c.FP8:
        column = d // 2 * 4 + d % 2
        apart: gl.constexpr = 2
    else:
        column = d
        apart: gl.constexpr = c.D // 2
    head = h_kv * work.group + x % work.group
    at = gl.expand_dims(x // work.group * queries.q_ss + head * queries.q_sh, 0) + gl.expand_dims(column, 1)
    at = queries.q + gl.cast(r, gl.int64) * queries.q_sb + at
    there = gl.expand_dims(x < work.rows, 0) & gl.expand_dims(d < c.D // 2, 1)
    one = gl.load(at, mask=there, other=0.0)
    other = gl.load(at + apart, mask=there, other=0.0)
    size = gl.full([c.M], 1.0, gl.float32, gl.SliceLayout(0, MMA))
    if one.dtype != c.DTYPE:
        largest = gl.max(gl.maximum(gl.abs(one.to(gl.float32)), gl.abs(other.to(gl.float32))), 0)
        top = largest.to(gl.int32, bitcast=True) & 0x7F800000
        raised = gl.expand_dims((0x7F000000 - top).to(gl.float32, bitcast=True), 0)
        one = (one.to(gl.float32) * raised).to(c.DTYPE)
        other = (other.to(gl.float32) * raised).to(c.DTYPE)
        size = gl.convert_layout(top.to(gl.float32, bitcast=True), gl.SliceLayout(0, MMA))
    return (one, other), size


@gluon.jit
def _decode_share(work, queries, pools, out, mem, c):
    """The partial of the rows of one key head over one share of blocks, by one warp (Note [One warp])."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    keys: gl.constexpr = gl.SliceLayout(1, mma)
    rows: gl.constexpr = gl.SliceLayout(0, mma)
    TILES: gl.constexpr = c.PAGE // KEYS
    HEADROOM: gl.constexpr = 14.0 if c.DTYPE == gl.float16 else 0.0
    h_kv = gl.program_id(0) % work.hk
    place = work.shares + gl.program_id(0) // work.hk * 8
    r, split, mine = gl.load(place), gl.load(place + 1), gl.load(place + 2)
    first, last, there = gl.load(place + 3) * TILES, gl.load(place + 4) * TILES, gl.load(place + 5)
    pages = work.pages + gl.cast(r, gl.int64) * work.table_sb
    starts = work.starts + gl.cast(r, gl.int64) * work.table_sb
    lengths = work.lengths + gl.cast(r, gl.int64) * work.table_sb
    for t in gl.static_range(c.STAGES - 1):
        if first + t < last:
            page = gl.load(pages + (first + t) // TILES)
            _fill(pools, mem, page, h_kv, work.hk, (first + t) % TILES * KEYS, t, c)

    # the rows of this key head: new token, then query head of the group
    x = gl.arange(0, c.M, rows)
    exists = x < work.rows * there
    token = x // work.group
    head = h_kv * work.group + x % work.group
    lo = gl.load(queries.lo + r * queries.lo_sb + token, mask=exists, other=0)
    hi = gl.load(queries.hi + r * queries.hi_sb + token, mask=exists, other=0)
    sees = exists & (lo < hi)
    # what lies between is seen by every row: nothing is, where a row sees nothing
    whole_lo = gl.max(gl.where(sees, lo, gl.where(exists, 2**31 - 1, 0)), 0)
    whole_hi = gl.min(gl.where(sees, hi, 2**31 - 1), 0)
    q_pos = lo
    slope = gl.zeros([c.M], gl.float32, rows)
    if queries.slopes is not None:
        q_pos = gl.load(queries.positions + r * queries.positions_sb + token, mask=exists, other=0)
        slope = gl.load(queries.slopes + head, mask=exists, other=0.0).to(gl.float32) * LOG2E
    q, q_size = _load_q(queries, r, h_kv, work, c, mma)
    factor = gl.expand_dims(q_size * queries.scale, 0)
    m_i = gl.full([c.M], -float("inf"), gl.float32, rows)
    l_i = gl.zeros([16, c.M], gl.float32, mma)  # per key of 16, which a thread has: summed once, at the end
    acc = (gl.zeros([c.DV // 2, c.M], gl.float32, mma), gl.zeros([c.DV // 2, c.M], gl.float32, mma))
    n = gl.arange(0, KEYS, keys)
    # what a tile needs of the table is loaded a tile before
    start = gl.load(starts + first // TILES, mask=first < last, other=0)
    length = gl.load(lengths + first // TILES, mask=first < last, other=0)
    page = gl.load(pages + gl.minimum(first + c.STAGES - 1, last - 1) // TILES, mask=first < last, other=0)
    stage = 0
    phase = 0
    for t in range(first, last):
        mbarrier.wait(mem.full.index(stage), phase)
        sync(TAKEN, 32)
        ahead = t + c.STAGES - 1
        if ahead < last:
            _fill(pools, mem, page, h_kv, work.hk, ahead % TILES * KEYS, gl.where(stage == 0, c.STAGES, stage) - 1, c)
        page = gl.load(pages + gl.minimum(ahead + 1, last - 1) // TILES)
        begins = start + t % TILES * KEYS
        real = length - t % TILES * KEYS
        later = gl.minimum(t + 1, last - 1) // TILES
        start = gl.load(starts + later)
        length = gl.load(lengths + later)

        s = _scores(q, mem, stage, c, mma)
        if c.FP8:
            s *= gl.expand_dims(gl.where(n < real, mem.k_size.index(stage).load(keys), 0.0), 1)
        if c.SOFTCAP:
            s = queries.cap - (2.0 * queries.cap) / (1.0 + gl.exp2(s * (2.0 * LOG2E * factor)))
        else:
            s *= factor
        if queries.slopes is not None:
            distance = gl.expand_dims(q_pos, 0) - gl.expand_dims(begins + n, 1)
            s -= gl.expand_dims(slope, 0) * gl.abs(distance).to(gl.float32)
        if (begins < whole_lo) | (begins + KEYS > whole_hi) | (real < KEYS):
            low = gl.expand_dims(lo - begins, 0)
            high = gl.expand_dims(gl.minimum(hi - begins, real), 0)
            s = gl.where((gl.expand_dims(n, 1) >= low) & (gl.expand_dims(n, 1) < high), s, -float("inf"))
        if c.FP8:
            # weights times sizes are multiplied with values: the exponent of a size takes part in the reference point
            v_size = gl.where(n < real, mem.v_size.index(stage).load(keys), 0.0)
            exponent = gl.maximum((v_size.to(gl.int32, bitcast=True) >> 23) - 127, -60).to(gl.float32)
            m_new = gl.maximum(m_i, gl.max(s + gl.expand_dims(exponent, 1), 0))
        else:
            m_new = gl.maximum(m_i, gl.max(s, 0))
        m_ref = gl.where(m_new == -float("inf"), 0.0, m_new)  # a row that saw nothing so far: all weights are 2^-inf
        p = gl.exp2(s - gl.expand_dims(m_ref - HEADROOM, 0))
        alpha = gl.expand_dims(gl.exp2(m_i - m_ref), 0)
        m_i = m_new
        l_i = l_i * alpha + gl.convert_layout(gl.sum(gl.reshape(p, [KEYS // 16, 16, c.M]), 0), mma)
        if c.FP8:
            p *= gl.expand_dims(v_size, 1)
        acc = _add_values((acc[0] * alpha, acc[1] * alpha), p, mem, stage, real, c, mma)
        stage += 1
        if stage == c.STAGES:
            stage = 0
            phase ^= 1

    row = gl.cast((r * (work.rows // work.group) + token) * (work.hk * work.group) + head, gl.int64)
    home = out.parts + gl.cast(split, gl.int64) * out.parts_sp
    column = gl.arange(0, c.DV // 2, keys)
    ok = gl.expand_dims(exists, 0) & gl.expand_dims(column < c.DV // 2, 1)
    for half in gl.static_range(2):
        at = 2 * column + half if c.FP8 else column + half * (c.DV // 2)
        gl.store(home + gl.expand_dims(row * c.DV, 0) + gl.expand_dims(at, 1), acc[half], mask=ok)
    store_state(out, row, m_i - HEADROOM, gl.sum(l_i, 0), exists, split, mine, there, c.DV)


@gluon.jit(
    do_not_specialize=["table_sb", "lo_sb", "hi_sb", "positions_sb", "hk", "group", "rows", "splits", "all_rows"]
)
def paged_kernel(
    q, k, v, k_size, v_size, shares, pages, starts, lengths, lo, hi, positions, slopes, parts, parts_sp, q_sb, q_ss, q_sh,
    table_sb, lo_sb, hi_sb, positions_sb, hk, group, rows, splits, all_rows, scale, cap,
    PAGE: gl.constexpr, STAGES: gl.constexpr, M: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, SOFTCAP: gl.constexpr,
    num_warps: gl.constexpr,  # noqa: ARG001
):  # fmt: skip
    """`_decode_share` in shared memory of its own. Strides are in elements; `rows` are those of a key head.

    k and v are descriptors of panels of D / 2 and DV / 2 numbers of 16 bits; k_size and v_size those of scales, or None.
    """
    panels: gl.constexpr = STAGES if k_size is not None else 2 * STAGES
    k_s = gl.allocate_shared_memory(k.dtype, [panels] + k.block_type.shape, k.layout)  # noqa: RUF005
    v_s = gl.allocate_shared_memory(v.dtype, [panels] + v.block_type.shape, v.layout)  # noqa: RUF005
    k_size_s = None
    v_size_s = None
    if k_size is not None:
        k_size_s = gl.allocate_shared_memory(gl.float32, [STAGES, KEYS], k_size.layout)
        v_size_s = gl.allocate_shared_memory(gl.float32, [STAGES, KEYS], v_size.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    _decode_share(
        Work(shares, pages, starts, lengths, table_sb, hk, group, rows),
        Queries(q, q_sb, q_ss, q_sh, lo, hi, lo_sb, hi_sb, positions, positions_sb, slopes, scale, cap),
        Pools(k, v, k_size, v_size),
        Outputs(parts, parts_sp, splits, all_rows),
        Memory(k_s, v_s, k_size_s, v_size_s, full),
        Config(PAGE, STAGES, M, D, DV, k_size is not None, gl.float16 if k_size is not None else k.dtype, SOFTCAP),
    )


def plan_splits(call: DecodeCall, splits: int) -> Tensor | None:
    """`kernels.decode.dispatch.plan_splits`."""
    return plan_shares(call, splits, PAGED_HOPPER[call.k.element_size()]) if call.q.shape[0] else None


def decode(call: DecodeCall, parts: Tensor, *, split_plan: Tensor | None = None) -> None:
    """`kernels.decode.dispatch.decode`."""
    check_decode(call, parts)
    q, k, v, table, lo, hi, positions, score, k_scale, v_scale = call
    b, s, h, d = q.shape
    _, hk, page_size, dv = v.shape
    if b == 0:
        return
    for name, x in (("k", k), ("v", v), ("k_scale", k_scale), ("v_scale", v_scale)):
        if x is not None and not (_DESCRIPTORS.describable(x) and (x.ndim == 4 or x.is_contiguous())):
            raise ValueError(
                f"{name} must have pages and an address and strides that are multiples of 16 bytes, and scales must be "
                f'contiguous, got {tuple(x.shape)} with {x.stride()}; make it contiguous, or use impl="portable"'
            )
    config = PAGED_HOPPER[k.element_size()]
    shares = plan_shares(call, parts.shape[0], config) if split_plan is None else split_plan
    pools = (x.view(torch.int16) if x.dtype == FP8 else x for x in (k, v))
    bound_launch.launch(
        paged_kernel,
        (shares.shape[0] * hk,),
        (
            q,
            *(_DESCRIPTORS.rows(x.transpose(1, 2), config.block_n, dim // 2) for x, dim in zip(pools, (d, dv), strict=True)),
            *(None if x is None else _DESCRIPTORS.numbers(x, config.block_n) for x in (k_scale, v_scale)),
            shares, table.pages, table.starts, table.lengths, lo, hi, positions, score.alibi_slopes, parts, parts.stride(0),
            *q.stride()[:3], table.pages.stride(0), lo.stride(0), hi.stride(0), positions.stride(0), hk, h // hk,
            s * h // hk, parts.shape[0], b * s * h, *scale_and_cap(score),
        ),
        {
            "PAGE": page_size, "STAGES": config.num_stages, "M": 8 if s * h // hk <= 8 else 16, "D": d, "DV": dv,
            "SOFTCAP": score.softcap > 0,
        },
        num_warps=config.num_warps,
    )  # fmt: skip
