"""Decode over latents on Hopper: two warpgroups share 64 rows, each with half of the value columns in registers.

Owns the pipeline between the copy engine, the tensor cores and the online softmax. Shares of blocks come from a kernel of
decode_triton (Note [Division of work] there), Note [Latents] of dispatch.py says what a latent is.

Note [Two warpgroups]
    A tile is 64 rows of one page: the value columns as two panels, a half each, and the other columns padded to 64. Two tiles fit
    beside q into shared memory: stages 0 and 1, of even and odd tiles. Warpgroup i owns the tiles of stage i: it computes their
    scores and weights. Both multiply the weights of every tile with their half of its values:

        warpgroup 0   | q . k (0) | softmax | p v (0) | p v (1)  q . k (2)  | softmax | p v (2) | ...
        warpgroup 1   | q . k (1)           | p v (0)  | softmax | p v (1)  | p v (2)  q . k (3)  | ...

    So one has products in flight beneath the exponentials of the other. Weights pass through the panel of the other columns,
    which nobody reads once q . k is done. The reference point m of a row goes from tile to tile, and so from one warpgroup to
    the other; it follows the maximum only once that has grown by GROWTH, so that accumulators are seldom scaled.
    A panel of values is released by the warpgroup that multiplied it, by a named barrier: that is its last use, because weights
    exist only after q . k. The panel of weights is refilled with the half that the other warpgroup releases.
    Rows behind the end of a block may be NaN: a warpgroup overwrites them with zeros in its half before it multiplies.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOptionalOperand=false, reportOptionalMemberAccess=false
# pyright: reportOperatorIssue=false
from collections import namedtuple

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
from ringattn.kernels.attention.hopper.primitives import (
    LOG2E,
    arrive,
    hide,
    opaque,
    operand_of,
    panel_of,
    scaled_unless_one,
    sync,
)
from ringattn.kernels.decode import latent_fp8
from ringattn.kernels.decode.configs import LATENT_HOPPER
from ringattn.kernels.decode.decode_triton import plan_shares
from ringattn.kernels.decode.dispatch import FP8, DecodeCall, check_decode
from ringattn.kernels.runtime import bound_launch

KEYS = gl.constexpr(64)
"""Rows of a tile of keys, and of queries; columns of the panel that is no value."""
QUERIES = gl.constexpr(4)  # barrier of q, behind those of the panels
EMPTY = gl.constexpr(8)  # named barriers: 2 * stage + half of the panels,
READY = gl.constexpr(12)  # weights of a stage,
CLEARED = gl.constexpr(14)  # and threads of a warpgroup
BOTH = gl.constexpr(256)  # threads
GROWTH = gl.constexpr(8.0)  # weights stay below 2^8,
HEADROOM = gl.constexpr(6.0)  # times 2^6 in fp16, whose small numbers have few digits
_DESCRIPTORS = Descriptors()

# arguments of the partitions; Note [Structs] of primitives.py
Work = namedtuple("Work", "shares pages starts lengths table_sb tiles rows heads")
Inputs = namedtuple("Inputs", "q q_other k k_other")
Score = namedtuple("Score", "lo hi lo_sb hi_sb positions positions_sb slopes scale cap")
Outputs = namedtuple("Outputs", "parts parts_sp splits all_rows")
Memory = namedtuple("Memory", "q q_other k k_other full tops sums")
Config = namedtuple("Config", "PAGE HALF DTYPE SOFTCAP")


@gluon.jit
def _share_of(work):
    """(request, split, shares of the request, first block, one past the last block, whether this program has a share)."""
    place = work.shares + gl.program_id(0) // work.tiles * 8
    return (
        gl.load(place), gl.load(place + 1), gl.load(place + 2), gl.load(place + 3), gl.load(place + 4), gl.load(place + 5),
    )  # fmt: skip


@gluon.jit
def _fill(src, mem, page, row, stage, half, used, OTHER: gl.constexpr, c):
    """Copies a half of a tile into its stage once it is free; OTHER: and the columns that are no values."""
    panel = 2 * stage + half
    full = mem.full.index(panel)
    if used:
        sync(EMPTY + panel, 160)
    if OTHER:
        mbarrier.expect(full, src.k.block_type.nbytes + src.k_other.block_type.nbytes)
    else:
        mbarrier.expect(full, src.k.block_type.nbytes)
    tma.async_copy_global_to_shared(src.k, [page, 0, row, half * c.HALF], full, mem.k.index(panel))
    if OTHER:
        tma.async_copy_global_to_shared(src.k_other, [page, 0, row, 2 * c.HALF], full, mem.k_other.index(stage))


@gluon.jit
def _producer(work, src, mem, c):
    """One warp that copies q and the tiles of this share, the half of a tile's owner first."""
    request, _split, _mine, begin, end, _there = _share_of(work)
    tiles: gl.constexpr = c.PAGE // KEYS
    row = gl.program_id(0) % work.tiles * KEYS
    pages = work.pages + gl.cast(request, gl.int64) * work.table_sb
    page = 0
    if begin < end:
        mbarrier.expect(mem.full.index(QUERIES), 2 * src.q.block_type.nbytes + src.q_other.block_type.nbytes)
        for half in gl.static_range(2):
            tma.async_copy_global_to_shared(
                src.q, [request, 0, row, half * c.HALF], mem.full.index(QUERIES), mem.q.index(half)
            )
        tma.async_copy_global_to_shared(
            src.q_other, [request, 0, row, 2 * c.HALF], mem.full.index(QUERIES), mem.q_other
        )
        page = gl.load(pages + begin)
    for t in range((end - begin) * tiles):
        stage = t % 2
        # the next page is loaded before a wait, so that no copy waits for it
        later = gl.load(pages + gl.minimum(begin + (t + 1) // tiles, end - 1))
        _fill(src, mem, page, t % tiles * KEYS, stage, stage, t >= 2, False, c)
        _fill(src, mem, page, t % tiles * KEYS, stage, 1 - stage, t >= 2, True, c)
        page = later


@gluon.jit
def _begin_scores(INDEX: gl.constexpr, parity, mem):
    """Begins q . k of the tile in this warpgroup's stage: three products, that of the half that it multiplies later first."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    nothing = gl.zeros([KEYS, KEYS], gl.float32, layout)
    zero = opaque(
        gl.to_tensor(0)
    )  # addresses of operands are computed here: kept through the loop they would be spilled
    mbarrier.wait(mem.full.index(3 * INDEX), parity)
    k = panel_of(mem.k, 3 * INDEX + zero)
    token = warpgroup_mma(panel_of(mem.q, INDEX + zero), k.permute((1, 0)), nothing, use_acc=False, is_async=True)
    zero = opaque(gl.to_tensor(0))  # as above
    mbarrier.wait(mem.full.index(1 + INDEX), parity)
    k = panel_of(mem.k, 1 + INDEX + zero)
    token = warpgroup_mma(panel_of(mem.q, 1 - INDEX + zero), k.permute((1, 0)), token, is_async=True)
    k = panel_of(mem.k_other, INDEX)
    q = mem.q_other.reshape([KEYS, KEYS])
    return warpgroup_mma(q, k.permute((1, 0)), token, is_async=True)


@gluon.jit
def _clear(INDEX: gl.constexpr, values, length):
    """Zeros in the rows of a panel from `length` on."""
    latent_fp8.clear_rows(values, length)
    fence_async_shared()
    sync(CLEARED + INDEX, 128)


@gluon.jit
def _begin_sums(INDEX: gl.constexpr, weights, values, length, acc, alpha):
    """Begins acc * alpha + weights values; `length`: rows of the tile that are real."""
    if length < KEYS:
        _clear(INDEX, values, length)
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))
    return warpgroup_mma(weights, values, scaled_unless_one(acc, alpha), is_async=True)


@gluon.jit
def _reference(m):
    """A row that saw nothing so far: all weights are 2^-inf."""
    return gl.where(m == -float("inf"), 0.0, m)


@gluon.jit
def _take_tile(INDEX: gl.constexpr, t, m_i, l_i, acc, table, mem, c):
    """Begins the sums over a tile of the other warpgroup: (product, m, l)."""
    STAGE: gl.constexpr = 1 - INDEX
    rows: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16]))
    _first, length = _tile_at(table, t, c)
    sync(READY + STAGE, BOTH)
    m_new = mem.tops.index(STAGE).load(rows)
    alpha = gl.exp2(m_i - _reference(m_new))
    mbarrier.wait(mem.full.index(2 * STAGE + INDEX), t // 2 & 1)
    values = panel_of(mem.k, 2 * STAGE + INDEX)
    product = _begin_sums(INDEX, panel_of(mem.k_other, STAGE), values, length, acc, alpha)
    return product, m_new, l_i * alpha


@gluon.jit
def _own_tile(INDEX: gl.constexpr, t, s, m_i, l_i, acc, bounds, score, table, mem, c):
    """Weights of a tile, handed to the other warpgroup, and this one's sums over it: (m, l, acc)."""
    first, length = _tile_at(table, t, c)
    lo, hi, whole_lo, whole_hi, q_pos, slope = bounds
    columns: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    if c.SOFTCAP:
        s = score.cap - (2.0 * score.cap) / (1.0 + gl.exp2(s * (2.0 * LOG2E * score.scale)))
    else:
        s = s * score.scale
    if score.slopes is not None:
        k_pos = first + gl.arange(0, KEYS, columns)
        distance = gl.expand_dims(q_pos, 1) - gl.expand_dims(k_pos, 0)
        s -= gl.expand_dims(slope, 1) * gl.abs(distance).to(gl.float32)
    if (first < whole_lo) | (first + KEYS > whole_hi) | (length < KEYS):
        s = hide(s, lo, gl.minimum(hi, first + length), first, columns)
    top = gl.max(s, 1)
    m_new = gl.where(top > m_i + GROWTH, top, m_i)
    m_ref = _reference(m_new)
    alpha = gl.exp2(m_i - m_ref)
    if c.DTYPE == gl.float16:
        m_ref -= HEADROOM
    p = gl.exp2(s - gl.expand_dims(m_ref, 1))
    weights = p.to(c.DTYPE)
    panel_of(mem.k_other, INDEX).store(weights)
    mem.tops.index(INDEX).store(m_new)
    fence_async_shared()
    arrive(READY + INDEX, BOTH)
    values = panel_of(mem.k, 3 * INDEX)
    product = _begin_sums(INDEX, operand_of(weights, mem.k), values, length, acc, alpha)
    l_i = l_i * alpha + gl.sum(p, 1)
    acc = warpgroup_mma_wait(0, deps=[product])
    arrive(EMPTY + 3 * INDEX, 160)
    return m_new, l_i, acc


@gluon.jit
def _tile_at(table, t, c):
    """(position of the first row of a tile, rows of it that are real: at most KEYS, or none)."""
    starts, lengths = table
    tiles: gl.constexpr = c.PAGE // KEYS
    row = t % tiles * KEYS
    return gl.load(starts + t // tiles) + row, gl.minimum(gl.load(lengths + t // tiles) - row, KEYS)


@gluon.jit
def _consumer(INDEX: gl.constexpr, work, score, out, mem, c):
    """One warpgroup (Note [Two warpgroups])."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.HALF, 16])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    request, split, mine, begin, end, there = _share_of(work)
    ahead = gl.cast(request, gl.int64) * work.table_sb + begin
    table = (work.starts + ahead, work.lengths + ahead)
    first_row = gl.program_id(0) % work.tiles * KEYS
    x = first_row + gl.arange(0, KEYS, s_rows)
    exists = x < work.rows * there
    token = x // work.heads
    lo = gl.load(score.lo + request * score.lo_sb + token, mask=exists, other=0)
    hi = gl.load(score.hi + request * score.hi_sb + token, mask=exists, other=0)
    sees = exists & (lo < hi)
    # what lies between is seen by every row: nothing is, where a row sees nothing
    whole_lo = gl.max(gl.where(sees, lo, gl.where(exists, 2**31 - 1, 0)), 0)
    whole_hi = gl.min(gl.where(sees, hi, 2**31 - 1), 0)
    q_pos = lo
    slope = gl.zeros([KEYS], gl.float32, s_rows)
    if score.slopes is not None:
        q_pos = gl.load(score.positions + request * score.positions_sb + token, mask=exists, other=0)
        slope = gl.load(score.slopes + x % work.heads, mask=exists, other=0.0).to(gl.float32) * LOG2E
    m_i = gl.full([KEYS], -float("inf"), gl.float32, s_rows)
    l_i = gl.zeros([KEYS], gl.float32, s_rows)
    acc = gl.zeros([KEYS, c.HALF], gl.float32, o_layout)
    count = (end - begin) * (c.PAGE // KEYS)
    if count > 0:
        mbarrier.wait(mem.full.index(QUERIES), 0)
        if INDEX == 0:
            s = warpgroup_mma_wait(0, deps=[_begin_scores(INDEX, 0, mem)])
            m_i, l_i, acc = _own_tile(
                INDEX, 0, s, m_i, l_i, acc, (lo, hi, whole_lo, whole_hi, q_pos, slope), score, table, mem, c
            )
        pairs = (count - 1 + INDEX) // 2
        for i in range(pairs):
            t = 2 * i + 1 - INDEX
            product, m_i, l_i = _take_tile(INDEX, t, m_i, l_i, acc, table, mem, c)
            parity = (t + 1) // 2 & 1
            scores = _begin_scores(INDEX, parity, mem)
            acc = warpgroup_mma_wait(3, deps=[product])
            arrive(EMPTY + 2 - INDEX, 160)
            s = warpgroup_mma_wait(0, deps=[scores])
            m_i, l_i, acc = _own_tile(
                INDEX, t + 1, s, m_i, l_i, acc, (lo, hi, whole_lo, whole_hi, q_pos, slope), score, table, mem, c
            )
        last = 2 * pairs + 1 - INDEX
        if last < count:
            product, m_i, l_i = _take_tile(INDEX, last, m_i, l_i, acc, table, mem, c)
            acc = warpgroup_mma_wait(0, deps=[product])

    row = gl.cast(request * work.rows, gl.int64) + x
    home = out.parts + gl.cast(split, gl.int64) * out.parts_sp
    rows = gl.convert_layout(row, gl.SliceLayout(1, o_layout))
    at = home + gl.expand_dims(rows * (2 * c.HALF), 1)
    column = gl.expand_dims(INDEX * c.HALF + gl.arange(0, c.HALF, gl.SliceLayout(0, o_layout)), 0)
    gl.store(at + column, acc, mask=gl.expand_dims(gl.convert_layout(exists, gl.SliceLayout(1, o_layout)), 1))
    # the barrier of the last tile may still be in its round: the other stage's is not
    ended = READY + count % 2
    if INDEX == 1:
        mem.sums.store(l_i)
        arrive(ended, BOTH)
    else:
        sync(ended, BOTH)
        l_i += mem.sums.load(s_rows)
        if c.DTYPE == gl.float16:
            m_i -= HEADROOM
        ml = out.parts + gl.cast(out.all_rows, gl.int64) * (2 * c.HALF) + row
        # a maximum passes over NaN: a row of NaN alone would have the m of a row that saw nothing
        gl.store(ml + gl.cast(split, gl.int64) * out.parts_sp, gl.where(l_i == l_i, m_i, l_i), mask=exists)
        gl.store(ml + gl.cast(split, gl.int64) * out.parts_sp + out.all_rows, l_i, mask=exists)
        # the identity of unused splits is written by all programs of this request in turns
        for unused in range(mine + split, out.splits, mine):
            spared = ml + gl.cast(unused, gl.int64) * out.parts_sp
            gl.store(spared, gl.full([KEYS], -float("inf"), gl.float32, s_rows), mask=exists)
            gl.store(spared + out.all_rows, gl.zeros([KEYS], gl.float32, s_rows), mask=exists)


@gluon.jit
def _specialize(work, src, score, out, mem, c):
    gl.warp_specialize([
        (_consumer, (gl.constexpr(0), work, score, out, mem, c)),
        (_consumer, (gl.constexpr(1), work, score, out, mem, c)),
        (_producer, (work, src, mem, c)),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon.jit(
    do_not_specialize=["table_sb", "lo_sb", "hi_sb", "positions_sb", "tiles", "rows", "heads", "splits", "all_rows"]
)
def latent_kernel(
    q, q_other, k, k_other, shares, pages, starts, lengths, lo, hi, positions, slopes, parts, parts_sp, table_sb, lo_sb, hi_sb,
    positions_sb, tiles, rows, heads, splits, all_rows, scale, cap,
    PAGE: gl.constexpr, HALF: gl.constexpr, SOFTCAP: gl.constexpr, num_warps: gl.constexpr,  # noqa: ARG001
):  # fmt: skip
    """The partial of 64 rows over one share of blocks. Strides are in elements.

    `rows` are those of a request, its tokens times `heads`. q and k are descriptors of panels of HALF columns, q_other and k_other
    of 64.
    """
    q_s = gl.allocate_shared_memory(q.dtype, [2] + q.block_type.shape, q.layout)  # noqa: RUF005
    q_other_s = gl.allocate_shared_memory(q.dtype, q_other.block_type.shape, q_other.layout)
    # panels of q and of tiles have one shape
    k_s = gl.allocate_shared_memory(q.dtype, [4] + q.block_type.shape, q.layout)  # noqa: RUF005
    k_other_s = gl.allocate_shared_memory(q.dtype, [2] + q_other.block_type.shape, q_other.layout)  # noqa: RUF005
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tops = gl.allocate_shared_memory(gl.float32, [2, KEYS], plain)
    sums = gl.allocate_shared_memory(gl.float32, [KEYS], plain)
    full = gl.allocate_shared_memory(gl.int64, [5, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(5):
        mbarrier.init(full.index(i), count=1)
    _specialize(
        Work(shares, pages, starts, lengths, table_sb, tiles, rows, heads),
        Inputs(q, q_other, k, k_other),
        Score(lo, hi, lo_sb, hi_sb, positions, positions_sb, slopes, scale, cap),
        Outputs(parts, parts_sp, splits, all_rows),
        Memory(q_s, q_other_s, k_s, k_other_s, full, tops, sums),
        Config(PAGE, HALF, q.dtype, SOFTCAP),
    )


def plan_splits(call: DecodeCall, splits: int) -> Tensor | None:
    """`kernels.decode.dispatch.plan_splits`."""
    return plan_shares(call, splits, LATENT_HOPPER[call.k.element_size()]) if call.q.shape[0] else None


def decode(call: DecodeCall, parts: Tensor, *, split_plan: Tensor | None = None) -> None:
    """`kernels.decode.dispatch.decode`."""
    if call.k.dtype == FP8:
        return latent_fp8.decode(call, parts, split_plan=split_plan)
    check_decode(call, parts)
    q, k, v, table, lo, hi, positions, score, *_ = call
    b, s, h, d = q.shape
    page_size, half, keys = k.shape[2], v.shape[3] // 2, LATENT_HOPPER[2].block_n
    if b == 0:
        return
    if not _DESCRIPTORS.describable(k):
        raise ValueError(
            f"k must have pages and an address and strides that are multiples of 16 bytes, got {tuple(k.shape)} with {k.stride()}; "
            'make it contiguous, or use impl="portable"'
        )
    shares = plan_shares(call, parts.shape[0], LATENT_HOPPER[2]) if split_plan is None else split_plan
    rows = _DESCRIPTORS.addressable(q).reshape(b, s * h, 1, d)
    tiles = -(-s * h // keys)
    bound_launch.launch(
        latent_kernel,
        (shares.shape[0] * tiles,),
        (
            *(_DESCRIPTORS.rows(x, keys, width) for x in (rows, k.transpose(1, 2)) for width in (half, keys)),
            shares, table.pages, table.starts, table.lengths, lo, hi, positions, score.alibi_slopes, parts, parts.stride(0),
            table.pages.stride(0), lo.stride(0), hi.stride(0), positions.stride(0), tiles, s * h, h, parts.shape[0], b * s * h,
            *scale_and_cap(score),
        ),
        {"PAGE": page_size, "HALF": half, "SOFTCAP": score.softcap > 0},
        num_warps=4,
        maxnreg=168,
    )  # fmt: skip
