"""The Hopper forward: a tile of queries stays in registers, blocks of keys and values stream past it.

Owns the pipeline between the copy engine, the tensor cores and the online softmax of Note [Softmax state]. The work plan says
which blocks a tile meets (tile_scheduler.py).

Note [Pipeline]
    One producer warp copies; each consumer warpgroup owns 64 rows of the tile and keeps q . k of block j and p v of
    block j - 1 in flight together, so that the tensor cores have work beneath the exponentials:

        q . k (j)      |====|          |====|
        p v (j - 1)         |====|          |====|
        softmax (j)         |---------|     |---------|

    The first block of a tile has no p v beneath it and the last p v no softmax above it: both stand outside the loops.
    Masked blocks come first, in a loop of their own, so that their registers are free during the full ones.
    Consumers release stages by named barriers, which count single warps without stopping them. A stage is never released
    twice before it is filled again. Eight names are enough for four stages of k and of v.
    A tile lies in shared memory as panels of equal width, PANELS of q and of k, V_PANELS of v: 192 columns are three panels of
    64, since the compiler wants powers of two. q . k is a sum over panels; each panel of v has an accumulator of its own.
    A carry passes through shared memory where there is a descriptor of it (TILED): it has carry_s, whose copy begins with the tile,
    and columns that carry_s lacks take the place of q once the last q . k has read it (HALVED).
    With PACK > 1, row r of a tile is query row r // PACK of head r % PACK among PACK neighbouring heads that share keys.
    Keys of other ranks are in k_remote and v_remote, which may fill while the kernel runs. Only the producer waits: by the
    ring step of a segment it chooses the buffer, and waits for the flag of its rows unless a later one was seen. After a
    wait that fails it stops waiting. Consumers read the error word at the end of each tile, behind its last copy, and then
    write NaN. A bias of keys arrives before their flag, and is read once a block of them is in shared memory.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOptionalOperand=false, reportOptionalMemberAccess=false
# pyright: reportOperatorIssue=false
from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from ringattn.kernels.attention.hopper import primitives as hp

EMPTY_K = gl.constexpr(8)  # the first free named barrier
GROWTH = gl.constexpr(8.0)  # weights stay below 2^8, which every dtype holds
# rows x the four threads that share a row: what they hold of an accumulator once its columns are added up
PER_THREAD = gl.constexpr(
    gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4])
)
ALL = gl.constexpr(2**31 - 1)  # beyond every place of a flag

# arguments of the partitions; Note [Structs] of primitives.py
Inputs = namedtuple("Inputs", "q k v k_remote v_remote flags error flag_heads flag_steps timeout_us board epochs")
Outputs = namedtuple(
    "Outputs", "o_desc acc_desc o lse m l acc part_m part_l part_acc error o_sb o_ss o_sh acc_sb acc_ss acc_sh lse_sb lse_sh "
    "m_sb m_sh l_sb l_sh",
)  # fmt: skip
Memory = namedtuple("Memory", "q k v q_full q_empty k_full v_full carry carry_full")
Config = namedtuple(
    "Config", "CONSUMERS BLOCK_N STAGES D DV PANELS V_PANELS DV_WIDTH PACK O_UNIT ACC_UNIT FIRST LAST DOT_ONLY SOFTCAP Q_STAGES "
    "EARLY STORE AHEAD LAZY",
)  # fmt: skip
Place = namedtuple("Place", "distance slopes bias ahead")
"""Of rows: their distance from the position of key row 0 of a run's buffer, slopes in log2 units, the bias of keys of the batch
element, and how many of its numbers stand before those of the buffer; None where absent."""


@gluon.jit
def _fill(
    desc, remote, step, b, h, row, smem, full, stage, used, name, COLUMNS: gl.constexpr, PANELS: gl.constexpr,
    THREADS: gl.constexpr,
):  # fmt: skip
    """Copies a block of k or v into a stage once every consumer has left it; `used`: it has been filled before.

    `name` is the named barrier of the first stage, by which consumers release it (Note [Pipeline]).

    From `remote` at ring steps beyond 0; None: there is nothing but the local buffer. (A branch instead of predicates made the
    consumers spill.)
    """
    if used:
        hp.sync(name + stage, THREADS)
    mbarrier.expect(full.index(stage), PANELS * desc.block_type.nbytes)
    for i in gl.static_range(PANELS):
        at = [b, h, row, i * (COLUMNS // PANELS)]
        panel = smem.index(stage * PANELS + i)
        if remote is None:
            tma.async_copy_global_to_shared(desc, at, full.index(stage), panel)
        else:
            tma.async_copy_global_to_shared(remote, at, full.index(stage), panel, pred=step > 0)
            tma.async_copy_global_to_shared(desc, at, full.index(stage), panel, pred=step == 0)


@gluon.jit
def _fill_queries(INDEX: gl.constexpr, desc, b, h, row, mem, place, parity, c):
    mbarrier.wait(mem.q_empty.index(place + INDEX), parity ^ 1)
    bar = mem.q_full.index(place + INDEX)
    mbarrier.expect(bar, c.PANELS * desc.block_type.nbytes)
    for i in gl.static_range(c.PANELS):
        corner = _corner(INDEX, b, h, row, i * (c.D // c.PANELS), c.PACK)
        tma.async_copy_global_to_shared(desc, corner, bar, mem.q.index((place + INDEX) * c.PANELS + i))


@gluon.jit
def _corner(INDEX: gl.constexpr, b, h, row, column, PACK: gl.constexpr):
    """Return where a panel of this warpgroup's rows begins in q or o."""
    if PACK == 1:
        return (b, h, row + INDEX * 64, column)
    else:
        return (b, row + INDEX * (64 // PACK), h, 0, column)


@gluon.jit
def _producer(plan, src, mem, c):
    """One warp that copies, in the order in which the consumers wait: q of the first, k, the other q, v, k, v, ..."""
    threads: gl.constexpr = 128 * c.CONSUMERS + 32
    v_empty: gl.constexpr = EMPTY_K + c.STAGES
    segments = plan.segments
    first = gl.load(plan.starts + gl.program_id(0))
    stop = gl.load(plan.starts + gl.program_id(0) + 1)
    stage = 0
    used = False
    step = 0
    seen = 0
    met = 0
    epoch = 0
    for at in range(first, stop):
        head, row, segment, masked, full, _masked_blocks, _full_blocks, _slot = hp.entry(plan.work, at)
        b = head // plan.heads
        h = head % plan.heads
        h_kv = h // plan.group
        place = (at - first) % c.Q_STAGES * c.CONSUMERS
        q_parity = (at - first) // c.Q_STAGES & 1
        _fill_queries(0, src.q, b, h, row, mem, place, q_parity, c)
        for i in range(segment, segment + masked + full):
            key = gl.load(segments + i * 8)
            blocks = gl.load(segments + i * 8 + 1)
            if src.k_remote is not None:
                step = gl.load(segments + i * 8 + 6)
            if src.flags is not None:
                if step > 0:
                    flag = h_kv // src.flag_heads * src.flag_steps + step
                    if flag > seen:
                        there = hp.wait_flag(src.flags + flag, src.error, src.timeout_us)
                        seen = gl.where(there == 1, flag, ALL)
            for j in range(blocks):
                if src.board is not None:
                    met += 1
                    if met == hp.EPOCH:
                        met = 0
                        epoch = hp.wait_for_progress(src.board, epoch, src.epochs)
                _fill(
                    src.k, src.k_remote, step, b, h_kv, key, mem.k, mem.k_full, stage, used, EMPTY_K, c.D, c.PANELS,
                    threads,
                )  # fmt: skip
                if i == segment:
                    if j == 0:
                        for other in gl.static_range(1, c.CONSUMERS):
                            _fill_queries(other, src.q, b, h, row, mem, place, q_parity, c)
                _fill(
                    src.v, src.v_remote, step, b, h_kv, key, mem.v, mem.v_full, stage, used, v_empty, c.DV, c.V_PANELS,
                    threads,
                )  # fmt: skip
                key += c.BLOCK_N
                stage += 1
                if stage == c.STAGES:
                    stage = 0
                    used = True
    if src.board is not None:
        hp.exit_barrier(src.board, epoch, src.epochs)


@gluon.jit
def _limits(lo, hi, begin, end, origin, stride):
    """Return `limits` of primitives.py; dense runs, which are most, need no division."""
    start = origin + stride * begin
    length = (end - begin) * stride
    low = gl.minimum(gl.maximum(lo - start, 0), length)
    high = gl.minimum(gl.maximum(hi - start, 0), length)
    if stride != 1:
        low = (low + stride - 1) // stride
        high = (high + stride - 1) // stride
    return begin + low, begin + high


@gluon.jit
def _limits_in(
    INDEX: gl.constexpr, at, segment, anything, plan, score, lo_sb, hi_sb, PACK: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """The limits of the rows of entry `at` in a segment, from memory alone; without `anything` nobody asks for them."""
    head = gl.load(plan.work + at * 8)
    x = gl.load(plan.work + at * 8 + 1) + (INDEX * 64 + gl.arange(0, 64, LAYOUT)) // PACK
    b = gl.cast(head // plan.heads, gl.int64)
    exists = (x < plan.rows) & anything
    lo = gl.load(score.lo + b * lo_sb + x, mask=exists, other=0)
    hi = gl.load(score.hi + b * hi_sb + x, mask=exists, other=0)
    starts = score.lo + b * lo_sb, score.hi + b * hi_sb
    r = (INDEX * 64 + gl.arange(0, 64, LAYOUT)) // PACK
    lo, hi = hp.bounds_in(lo, hi, starts, score, plan.segments, segment, r, x, exists)
    _key, _blocks, begin, end, origin, stride = hp.segment_of(plan.segments, segment)
    return _limits(lo, hi, begin, end, origin, stride)


@gluon.jit
def _first_limits(INDEX: gl.constexpr, at, plan, score, PACK: gl.constexpr, LAYOUT: gl.constexpr):
    """The limits of the rows of entry `at` in its first segment, if that is masked."""
    segment = gl.load(plan.work + at * 8 + 2)
    masked = gl.load(plan.work + at * 8 + 3)
    return _limits_in(INDEX, at, segment, masked > 0, plan, score, score.lo_sb, score.hi_sb, PACK, LAYOUT)


@gluon.jit
def _score(s, key, stride, place, score, SOFTCAP: gl.constexpr, COLUMNS: gl.constexpr):
    """Scores in log2 units from q . k."""
    if SOFTCAP:
        s = score.cap - (2.0 * score.cap) / (1.0 + gl.exp2(s * (2.0 * hp.LOG2E * score.scale)))
    else:
        s = s * score.scale
    if place.slopes is not None:
        # exact: what is subtracted stays below 2^24, and beyond that distance one position is less than a rounding
        y = (gl.arange(0, s.shape[1], COLUMNS) * stride).to(gl.float32)
        shift = (place.distance - stride * key).to(gl.float32)
        s -= gl.expand_dims(place.slopes, 1) * gl.abs(gl.expand_dims(shift, 1) - gl.expand_dims(y, 0))
    if place.bias is not None:
        if place.ahead is not None:
            key += place.ahead
        y = key + gl.arange(0, s.shape[1], COLUMNS)
        bias = gl.load(place.bias + y, mask=(y >= 0) & (y < score.keys), other=0.0)
        s += gl.expand_dims(bias * hp.LOG2E, 0)
    return s


@gluon.jit
def _softmax(s, m_i, l_i, scale, c, GUARD: gl.constexpr):
    """(p, m, l, alpha): weights of a block and what they make of the state; GUARD: a row may have seen nothing so far.

    l is that of `_thread_sums`. LAZY: m follows the maximum only once that has grown by GROWTH, so that alpha is 1 in most blocks.
    """
    rows: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    if c.CONSUMERS == 3:
        top = _row_max(s, rows)
    else:
        top = gl.max(s, 1)  # two consumers wait for other things, and lose by a tree
    if c.DOT_ONLY:
        top = top * scale
    m_new = gl.maximum(m_i, top)
    if c.LAZY:
        m_new = gl.where(m_new > m_i + GROWTH, m_new, m_i)
    m_ref = m_new
    if GUARD:
        m_ref = gl.where(m_new == -float("inf"), 0.0, m_new)
    alpha = gl.exp2(m_i - m_ref)
    if c.DOT_ONLY:
        p = gl.exp2(s * scale - gl.expand_dims(m_ref, 1))
    else:
        p = gl.exp2(s - gl.expand_dims(m_ref, 1))
    return p, m_new, l_i * _per_thread(alpha) + _thread_sums(p), alpha


@gluon.jit
def _row_max(s, ROWS: gl.constexpr):
    """The largest score of each row, through a tree: in one chain of comparisons each waits for the one before."""
    top = gl.max(gl.max(gl.max(gl.reshape(s, [64, 2, s.shape[1] // 16, 4, 2]), 4), 2), 1)
    return gl.convert_layout(gl.max(top, 1), ROWS, assert_trivial=True)


@gluon.jit
def _per_thread(x):
    """A number per row as one per row and thread: `rows 1` in the layout of `_thread_sums`."""
    return gl.convert_layout(gl.expand_dims(x, 1), PER_THREAD, assert_trivial=True)


@gluon.jit
def _thread_sums(p):
    """Sums of the columns that each thread has of a row, `rows 4`; the four threads of a row are added once per tile."""
    sums = gl.sum(gl.sum(gl.reshape(p, [64, p.shape[1] // 8, 4, 2]), 3), 1)
    return gl.convert_layout(sums, PER_THREAD, assert_trivial=True)


@gluon.jit
def _merge_sums(m_a, l_a, m_b, l_b):
    """(m, l, weight of a, weight of b) of the merge of two partials; merging two empty ones is empty."""
    m = gl.maximum(m_a, m_b)
    shift = gl.where(m == -float("inf"), 0.0, m)
    alpha = gl.exp2(m_a - shift)
    beta = gl.exp2(m_b - shift)
    return m, l_a * alpha + l_b * beta, alpha, beta


@gluon.jit
def _panels(buffer, tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr, PANELS: gl.constexpr):
    panels = ()
    for i in gl.static_range(PANELS):
        panels += (buffer.index(tile * PANELS + i).reshape([ROWS, COLUMNS // PANELS]),)
    return panels


@gluon.jit
def _waited(products, IN_FLIGHT: gl.constexpr):
    """Return what products made, once at most IN_FLIGHT later ones are in flight."""
    return [warpgroup_mma_wait(IN_FLIGHT, deps=[product]) for product in products]


@gluon.jit
def _times(acc, factor):
    return [x * gl.expand_dims(factor, 1) for x in acc]


@gluon.jit
def _plus(acc, other, factor):
    """Return the panels of an accumulator plus others times a number per row."""
    sums = ()
    for i in gl.static_range(len(acc)):
        sums += (acc[i] + other[i] * gl.expand_dims(factor, 1),)
    return sums


@gluon.jit
def _first_product(INDEX: gl.constexpr, mem, tile, stage, parity, there, c, S_LAYOUT: gl.constexpr):
    """Issues q . k of the first block of this program's tile number `tile`; of what lies there if it has no such tile."""
    place = tile % c.Q_STAGES * c.CONSUMERS + INDEX
    if there:
        mbarrier.wait(mem.q_full.index(place), tile // c.Q_STAGES & 1)
        mbarrier.wait(mem.k_full.index(stage), parity)
    zero = gl.zeros([64, c.BLOCK_N], gl.float32, S_LAYOUT)
    q = _panels(mem.q, place, 64, c.D, c.PANELS)
    return hp.begin_scores(q, _panels(mem.k, stage, c.BLOCK_N, c.D, c.PANELS), zero, False)


@gluon.jit
def _products(q, mem, stage, parity, p, acc, alpha, c, S_LAYOUT: gl.constexpr):
    """Issues q . k of the next block and p v of the block in `stage`; (s, p v in flight, next stage, its parity)."""
    v_stage = stage
    v_parity = parity
    stage += 1
    if stage == c.STAGES:
        stage = 0
        parity ^= 1
    k = _panels(mem.k, stage, c.BLOCK_N, c.D, c.PANELS)
    v = _panels(mem.v, v_stage, c.BLOCK_N, c.DV, c.V_PANELS)
    if c.LAZY:
        acc = [hp.scaled_unless_one(x, alpha) for x in acc]
    mbarrier.wait(mem.k_full.index(stage), parity)
    qk = hp.begin_scores(q, k, gl.zeros([64, c.BLOCK_N], gl.float32, S_LAYOUT), False)
    mbarrier.wait(mem.v_full.index(v_stage), v_parity)
    if not c.LAZY:
        acc = _times(acc, alpha)  # here, so that q . k does not wait for it
    products = hp.begin_sums(p, v, acc)
    s = warpgroup_mma_wait(c.V_PANELS, deps=[qk])
    hp.arrive(EMPTY_K + stage, 128 * c.CONSUMERS + 32)
    return s, products, stage, parity


@gluon.jit
def _operands(p, alpha, mem, c):
    """(weights as the first operand of p v, factors of the rows of acc)."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.DV // c.V_PANELS, 16])
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, layout))
    return gl.convert_layout(p.to(mem.q.dtype), gl.DotOperandLayout(0, layout, 2)), alpha


@gluon.jit
def _next_block(
    q, mem, stage, parity, p, acc, alpha, m_i, l_i, key, stride, place, low, high, score, c, S_LAYOUT: gl.constexpr,
    MASKED: gl.constexpr, GUARD: gl.constexpr,
):  # fmt: skip
    """P v of the block in `stage` beneath the softmax of the next one: (p, acc, alpha, m, l, its stage, its parity)."""
    columns: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    v_stage = stage
    s, products, stage, parity = _products(q, mem, stage, parity, p, acc, alpha, c, S_LAYOUT)
    if not c.DOT_ONLY:
        s = _score(s, key, stride, place, score, c.SOFTCAP, columns)
    if MASKED:
        s = hp.hide(s, low, high, key, columns)
    p, m_i, l_i, alpha = _softmax(s, m_i, l_i, score.scale, c, GUARD)
    acc = _waited(products, 0)
    hp.arrive(EMPTY_K + c.STAGES + v_stage, 128 * c.CONSUMERS + 32)
    p, alpha = _operands(p, alpha, mem, c)
    return p, acc, alpha, m_i, l_i, stage, parity


@gluon.jit
def _rows_of(INDEX: gl.constexpr, h, row, plan, PACK: gl.constexpr, ROWS: gl.constexpr):
    """(rows counted from the first one of the tile, rows, the head of each, which exist) of this warpgroup."""
    r = INDEX * 64 + gl.arange(0, 64, ROWS)
    x = row + r // PACK
    return r, x, h * PACK + r % PACK, x < plan.rows


@gluon.jit
def _finish_tile(
    INDEX: gl.constexpr, at, tile, q_place, products, m_i, l_i, v_stage, plan, out, score, mem, c, S_LAYOUT: gl.constexpr
):  # fmt: skip
    """Merges a tile with the carry or the sinks once its last p v is done, and stores it; `tile`: its number in this program."""
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.DV // c.V_PANELS, 16])
    s_rows: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    TILED: gl.constexpr = out.acc_desc is not None
    HALVED: gl.constexpr = TILED and c.DV > mem.carry.shape[-1]
    HAS_REGISTERS: gl.constexpr = c.DV <= 128 and not c.EARLY  # for what was carried beside the last p v
    # read again, so that it holds no registers through the loops
    head, row, _, _, _, _, _, slot = hp.entry(plan.work, at)
    b64 = gl.cast(head // plan.heads, gl.int64)
    h = head % plan.heads
    r, x, head_of_row, exists = _rows_of(INDEX, h, row, plan, c.PACK, s_rows)
    whole = slot < 0  # the parts of a split tile start from nothing; forward_combine.py lets the carry join
    if HALVED and not c.FIRST:
        carry_tile = _carry_tile(INDEX, mem.carry, mem.q, q_place, HALVED)
        corner = _corner(INDEX, head // plan.heads, h, row, c.DV // 2, c.PACK)
        tma.async_copy_global_to_shared(out.acc_desc, corner, mem.carry_full.index(INDEX), carry_tile[1])
    if not TILED and (not c.FIRST or not c.LAST):
        places = _places(INDEX, b64, h, row, plan.rows, out.acc_sb, out.acc_ss, out.acc_sh, o_layout, c, c.ACC_UNIT)
    if not c.FIRST:
        m_0 = gl.load(out.m + b64 * out.m_sb + head_of_row * out.m_sh + x, mask=exists & whole, other=-float("inf"))
        l_0 = gl.load(out.l + b64 * out.l_sb + head_of_row * out.l_sh + x, mask=exists & whole, other=0.0)
        if HAS_REGISTERS and not TILED:
            acc_0 = _load_panels(out.acc, places, whole)
    if out.error is not None:
        in_vain = gl.load(out.error, volatile=True) != 0
    acc = _waited(products, c.PANELS if c.EARLY else 0)
    hp.arrive(EMPTY_K + c.STAGES + v_stage, 128 * c.CONSUMERS + 32)
    if TILED and not c.FIRST:
        mbarrier.wait(mem.carry_full.index(INDEX), tile & 1)

    if whole:
        if c.FIRST:
            if score.sinks is not None:
                m_0 = gl.load(score.sinks + head_of_row) * hp.LOG2E
                m_i, l_i, mine, _sink = _merge_sums(m_i, l_i, m_0, 1.0)
                acc = _times(acc, gl.convert_layout(mine, o_rows))
        else:
            if TILED:
                acc_0 = (_carried(_carry_tile(INDEX, mem.carry, mem.q, q_place, HALVED), o_layout),)
            elif not HAS_REGISTERS:
                acc_0 = _load_panels(out.acc, places, True)
            m_i, l_i, mine, carried = _merge_sums(m_i, l_i, m_0, l_0)
            acc = _times(acc, gl.convert_layout(mine, o_rows))
            acc = _plus(acc, acc_0, gl.convert_layout(carried, o_rows))
        if c.LAST:
            divisor = gl.where(l_i > 0.0, l_i, 1.0)
            found = gl.where(l_i > 0.0, (m_i + gl.log2(divisor)) * hp.LN2, -float("inf"))
            if out.error is not None:
                divisor = gl.where(in_vain, float("nan"), divisor)
                found = gl.where(in_vain, float("nan"), found)
            acc = _times(acc, gl.convert_layout(1.0 / divisor, o_rows))
            if c.STORE:
                _store_tile(
                    INDEX, acc, mem.q, q_place * c.PANELS, out.o_desc, head // plan.heads, h, row, c.D // c.PANELS,
                    c.DV_WIDTH, c.PACK,
                )  # fmt: skip
            else:
                places = _places(INDEX, b64, h, row, plan.rows, out.o_sb, out.o_ss, out.o_sh, o_layout, c, c.O_UNIT)
                _store_panels(out.o, places, acc)
            gl.store(out.lse + b64 * out.lse_sb + head_of_row * out.lse_sh + x, found, mask=exists)
        else:
            gl.store(out.m + b64 * out.m_sb + head_of_row * out.m_sh + x, m_i, mask=exists)
            gl.store(out.l + b64 * out.l_sb + head_of_row * out.l_sh + x, l_i, mask=exists)
            if TILED:
                carry_tile = _carry_tile(INDEX, mem.carry, mem.q, q_place, HALVED)
                _store_carry(INDEX, acc[0], carry_tile, out.acc_desc, head // plan.heads, h, row, c.PACK)
            else:
                _store_panels(out.acc, places, acc)
    else:
        at_row = gl.cast(slot, gl.int64) * (64 * c.CONSUMERS) + r
        gl.store(out.part_m + at_row, m_i)
        gl.store(out.part_l + at_row, l_i)
        _store_part(out.part_acc, gl.convert_layout(at_row, o_rows), acc, c.DV)


@gluon.jit
def _consumer(INDEX: gl.constexpr, plan, out, score, mem, c):
    """One warpgroup: rows INDEX * 64 .. INDEX * 64 + 63 of every tile of this program; Note [Pipeline]."""
    segments = plan.segments
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.DV // c.V_PANELS, 16])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    s_columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    threads: gl.constexpr = 128 * c.CONSUMERS + 32
    # full blocks of other scores need to know where they are
    PLACED: gl.constexpr = score.alibi_slopes is not None or score.key_bias is not None
    GUARD: gl.constexpr = score.key_bias is not None
    TILED: gl.constexpr = out.acc_desc is not None
    HALVED: gl.constexpr = TILED and c.DV > mem.carry.shape[-1]

    first = gl.load(plan.starts + gl.program_id(0))
    stop = gl.load(plan.starts + gl.program_id(0) + 1)
    stage = 0
    parity = 0
    if c.EARLY:
        qk = _first_product(INDEX, mem, 0, stage, parity, first < stop, c, s_layout)
        s = warpgroup_mma_wait(0, deps=[qk])
        if first < stop:
            hp.arrive(EMPTY_K + stage, threads)
    if c.AHEAD:
        low, high = _first_limits(INDEX, first, plan, score, c.PACK, s_rows)
    for at in range(first, stop):
        head, row, segment, masked, _full, masked_blocks, full_blocks, _slot = hp.entry(plan.work, at)
        b64 = gl.cast(head // plan.heads, gl.int64)
        h = head % plan.heads

        if TILED and not c.FIRST:
            mbarrier.expect(mem.carry_full.index(INDEX), (2 if HALVED else 1) * out.acc_desc.block_type.nbytes)
            corner = _corner(INDEX, head // plan.heads, h, row, 0, c.PACK)
            tma.async_copy_global_to_shared(out.acc_desc, corner, mem.carry_full.index(INDEX), mem.carry.index(INDEX))
        # the first block; the limits arrive beneath its product
        if not c.EARLY:
            qk = _first_product(INDEX, mem, at - first, stage, parity, True, c, s_layout)
        _r, x, head_of_row, exists = _rows_of(INDEX, h, row, plan, c.PACK, s_rows)
        key, blocks, _begin, _end, origin, stride = hp.segment_of(segments, segment)
        if not c.AHEAD:
            low, high = _first_limits(INDEX, at, plan, score, c.PACK, s_rows)
        m_i = gl.full([64], -float("inf"), gl.float32, s_rows)
        l_i = gl.zeros([64, 4], gl.float32, PER_THREAD)
        acc = (gl.zeros([64, c.DV // c.V_PANELS], gl.float32, o_layout),) * c.V_PANELS
        slope = None
        distance = None
        position = None
        bias = None
        ahead = None
        if score.alibi_slopes is not None:
            slope = gl.load(score.alibi_slopes + head_of_row) * hp.LOG2E
            position = gl.load(score.positions + x, mask=exists, other=0)
            distance = position - origin
        if score.key_bias is not None:
            bias = score.key_bias + b64 * score.key_bias_sb
            if score.local_rows is not None:
                ahead = hp.rows_ahead(segments, segment, score.local_rows)
        if not c.EARLY:
            s = warpgroup_mma_wait(0, deps=[qk])
            hp.arrive(EMPTY_K + stage, threads)
        q = _panels(mem.q, (at - first) % c.Q_STAGES * c.CONSUMERS + INDEX, 64, c.D, c.PANELS)
        if not c.DOT_ONLY:
            s = _score(s, key, stride, Place(distance, slope, bias, ahead), score, c.SOFTCAP, s_columns)
        if masked > 0:
            s = hp.hide(s, low, high, key, s_columns)
        p, m_i, l_i, alpha = _softmax(s, m_i, l_i, score.scale, c, True)
        p, alpha = _operands(p, alpha, mem, c)

        left = blocks
        for _ in range(1, masked_blocks):
            key += c.BLOCK_N
            left -= 1
            if left == 0:
                segment += 1
                key, left, _begin, _end, origin, stride = hp.segment_of(segments, segment)
                # widened here: what is made of strides outside of the loop would be spilled beside wide heads
                of_lo = hp.opaque(gl.to_tensor(score.lo_sb))
                of_hi = hp.opaque(gl.to_tensor(score.hi_sb))
                low, high = _limits_in(INDEX, at, segment, True, plan, score, of_lo, of_hi, c.PACK, s_rows)
                if score.alibi_slopes is not None:
                    distance = position - origin
                if score.local_rows is not None:
                    ahead = hp.rows_ahead(segments, segment, score.local_rows)
            p, acc, alpha, m_i, l_i, stage, parity = _next_block(
                q, mem, stage, parity, p, acc, alpha, m_i, l_i, key, stride, Place(distance, slope, bias, ahead), low, high, score,
                c, s_layout, True, True,
            )  # fmt: skip

        p = hp.packed(p)
        for _ in range(gl.where(masked_blocks == 0, 1, 0), full_blocks):
            if PLACED:
                key += c.BLOCK_N
                left -= 1
                if left == 0:
                    segment += 1
                    key, left, _begin, _end, origin, stride = hp.segment_of(segments, segment)
                    if score.alibi_slopes is not None:
                        distance = position - origin
                    if score.local_rows is not None:
                        ahead = hp.rows_ahead(segments, segment, score.local_rows)
            p, acc, alpha, m_i, l_i, stage, parity = _next_block(
                q, mem, stage, parity, p, acc, alpha, m_i, l_i, key, stride, Place(distance, slope, bias, ahead), None, None, score,
                c, s_layout, False, GUARD,
            )  # fmt: skip

        l_i = gl.convert_layout(gl.sum(l_i, 1), s_rows, assert_trivial=True)
        # the last p v; what was carried arrives beneath it
        q_place = (at - first) % c.Q_STAGES * c.CONSUMERS + INDEX
        if not (c.STORE or HALVED):
            mbarrier.arrive(mem.q_empty.index(q_place), count=1)
        mbarrier.wait(mem.v_full.index(stage), parity)
        acc = _times(acc, alpha)
        products = hp.begin_sums(p, _panels(mem.v, stage, c.BLOCK_N, c.DV, c.V_PANELS), acc)
        v_stage = stage
        stage += 1
        if stage == c.STAGES:
            stage = 0
            parity ^= 1
        if c.EARLY:
            qk = _first_product(INDEX, mem, at + 1 - first, stage, parity, at + 1 < stop, c, s_layout)
        if c.AHEAD:
            low, high = _first_limits(INDEX, gl.minimum(at + 1, stop - 1), plan, score, c.PACK, s_rows)
        _finish_tile(INDEX, at, at - first, q_place, products, m_i, l_i, v_stage, plan, out, score, mem, c, s_layout)
        if c.EARLY:
            s = warpgroup_mma_wait(0, deps=[qk])
            if at + 1 < stop:
                hp.arrive(EMPTY_K + stage, threads)
        if c.STORE or (TILED and not c.LAST):
            tma.store_wait(0)
        if c.STORE or HALVED:
            mbarrier.arrive(mem.q_empty.index(q_place), count=1)


@gluon.jit
def _places(INDEX: gl.constexpr, b, h, row, rows, sb, ss, sh, LAYOUT: gl.constexpr, c, UNIT: gl.constexpr):
    """(offsets, which exist) per panel of this warpgroup's rows in a `b s h dv` tensor; strides in units of UNIT elements."""
    r = INDEX * 64 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    columns: gl.constexpr = c.DV // c.V_PANELS
    x = row + r // c.PACK
    offsets = (b * sb + gl.cast(x, gl.int64) * ss + gl.cast(h * c.PACK + r % c.PACK, gl.int64) * sh) * UNIT
    places = ()
    for i in gl.static_range(c.V_PANELS):
        column = gl.expand_dims(i * columns + gl.arange(0, columns, gl.SliceLayout(0, LAYOUT)), 0)
        inside = gl.expand_dims(x < rows, 1)
        if c.DV_WIDTH < (i + 1) * columns:
            inside = inside & (column < c.DV_WIDTH)
        places += ((gl.expand_dims(offsets, 1) + column, inside),)
    return places


@gluon.jit
def _load_panels(pointer, places, there):
    return [gl.load(pointer + place[0], mask=place[1] & there, other=0.0) for place in places]


@gluon.jit
def _store_panels(pointer, places, acc):
    for i in gl.static_range(len(acc)):
        gl.store(pointer + places[i][0], acc[i].to(pointer.dtype.element_ty), mask=places[i][1])


@gluon.jit
def _store_part(part_acc, at_row, acc, DV: gl.constexpr):
    columns: gl.constexpr = acc[0].shape[1]
    y = gl.expand_dims(at_row, 1) * DV
    for i in gl.static_range(len(acc)):
        column = i * columns + gl.arange(0, columns, gl.SliceLayout(0, acc[i].type.layout))
        gl.store(part_acc + y + gl.expand_dims(column, 0), acc[i])


@gluon.jit
def _store_tile(
    INDEX: gl.constexpr, acc, q_s, first, o_desc, b, h, row, COLUMNS: gl.constexpr, DV_WIDTH: gl.constexpr, PACK: gl.constexpr
):  # fmt: skip
    """Stores o through the panels of q from number `first` on, COLUMNS columns each, and the copy engine."""
    for i in gl.static_range(len(acc)):
        pieces = _pieces(acc[i], COLUMNS)
        for j in gl.static_range(len(pieces)):
            if (i * len(pieces) + j) * COLUMNS < DV_WIDTH:
                q_s.index(first + i * len(pieces) + j).reshape([64, COLUMNS]).store(pieces[j].to(q_s.dtype))
    fence_async_shared()
    for i in gl.static_range((DV_WIDTH + COLUMNS - 1) // COLUMNS):
        tma.async_copy_shared_to_global(o_desc, _corner(INDEX, b, h, row, i * COLUMNS, PACK), q_s.index(first + i))


@gluon.jit
def _carry_tile(INDEX: gl.constexpr, carry_s, q_s, place, HALVED: gl.constexpr):
    """Return shared memory for the carry of this warpgroup's tile: for all columns, or for the left and the right half."""
    own = carry_s.index(INDEX)
    if HALVED:
        return (own, q_s.index(place)._reinterpret(gl.float32, own.shape, own.layout))
    else:
        return (own,)


@gluon.jit
def _carried(tile, LAYOUT: gl.constexpr):
    columns: gl.constexpr = tile[0].shape[-1]
    if len(tile) == 1:
        return tile[0].reshape([64, columns]).load(LAYOUT)
    else:
        half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])
        acc = gl.join(tile[0].reshape([64, columns]).load(half), tile[1].reshape([64, columns]).load(half))
        acc = gl.reshape(gl.permute(acc, [0, 2, 1]), [64, 2 * columns])
        return gl.convert_layout(acc, LAYOUT, assert_trivial=True)


@gluon.jit
def _store_carry(INDEX: gl.constexpr, acc, tile, acc_desc, b, h, row, PACK: gl.constexpr):
    columns: gl.constexpr = tile[0].shape[-1]
    pieces = _pieces(acc, columns)
    for i in gl.static_range(len(tile)):
        tile[i].reshape([64, columns]).store(pieces[i])
    fence_async_shared()
    # in the opposite order, so that the compiler's barrier for the piece stored last stands in front of all copies
    for i in gl.static_range(len(tile) - 1, -1, -1):
        tma.async_copy_shared_to_global(acc_desc, _corner(INDEX, b, h, row, i * columns, PACK), tile[i])


@gluon.jit
def _pieces(x, COLUMNS: gl.constexpr):
    """Return a tile of 64 rows as tiles of COLUMNS columns."""
    if x.shape[1] > COLUMNS:
        left, right = gl.split(gl.permute(gl.reshape(x, [64, 2, x.shape[1] // 2]), [0, 2, 1]))
        return _pieces(left, COLUMNS) + _pieces(right, COLUMNS)
    else:
        return (x,)


@gluon.jit
def _specialize(plan, src, out, score, mem, c):
    # registers: of what a multiprocessor has, the workers name their share and the first consumer gets the rest
    if c.CONSUMERS == 1:
        gl.warp_specialize([
            (_consumer, (gl.constexpr(0), plan, out, score, mem, c)),
            (_producer, (plan, src, mem, c)),
        ], [1], [24])  # fmt: skip
    elif c.CONSUMERS == 2:
        gl.warp_specialize([
            (_consumer, (gl.constexpr(0), plan, out, score, mem, c)),
            (_consumer, (gl.constexpr(1), plan, out, score, mem, c)),
            (_producer, (plan, src, mem, c)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (gl.constexpr(0), plan, out, score, mem, c)),
            (_consumer, (gl.constexpr(1), plan, out, score, mem, c)),
            (_consumer, (gl.constexpr(2), plan, out, score, mem, c)),
            (_producer, (plan, src, mem, c)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip


@gluon.jit(do_not_specialize=list(hp.RUNTIME))
def forward_kernel(
    q, k, v, o_desc, acc_desc, work, segments, starts, o, lse, carry_m, carry_l, carry_acc, part_m, part_l, part_acc, positions,
    lo_ptr, hi_ptr, sinks, alibi_slopes, key_bias, k_remote, v_remote, flags, error, board,
    o_sb, o_ss, o_sh, acc_sb, acc_ss, acc_sh, lse_sb, lse_sh, m_sb, m_sh, l_sb, l_sh, lo_sb, hi_sb, key_bias_sb,
    heads, group, rows, keys, flag_heads, flag_steps, timeout_us, local_rows, epochs, lo_st, hi_st, scale, cap,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    PANELS: gl.constexpr, V_PANELS: gl.constexpr, DV_WIDTH: gl.constexpr, PACK: gl.constexpr, O_UNIT: gl.constexpr,
    ACC_UNIT: gl.constexpr, FIRST: gl.constexpr, LAST: gl.constexpr, DOT_ONLY: gl.constexpr, SOFTCAP: gl.constexpr,
    Q_STAGES: gl.constexpr, EARLY: gl.constexpr, STORE: gl.constexpr,
    AHEAD: gl.constexpr, LAZY: gl.constexpr, num_warps: gl.constexpr,  # noqa: ARG001
):  # fmt: skip
    """Works through starts[p] .. starts[p + 1] of `work`; absent tensors are None.

    DOT_ONLY: the score is q . k times a positive scale, which is folded into the exponent. Strides of o and carry_acc are counted
    in O_UNIT and ACC_UNIT elements, which tells the compiler how wide a store may be. `keys` are the numbers of key_bias for one
    batch element; where keys are gathered, those of the remote buffer begin at local_rows. Key heads come in groups of
    flag_heads; flags has flag_steps columns. Note [Pipeline].
    """
    q_s = gl.allocate_shared_memory(q.dtype, [Q_STAGES * CONSUMERS * PANELS] + q.block_type.shape, q.layout)  # noqa: RUF005
    k_s = gl.allocate_shared_memory(k.dtype, [STAGES * PANELS] + k.block_type.shape, k.layout)  # noqa: RUF005
    v_s = gl.allocate_shared_memory(v.dtype, [STAGES * V_PANELS] + v.block_type.shape, v.layout)  # noqa: RUF005
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES * CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES * CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    carry_s = q_s
    carry_full = q_full
    if acc_desc is not None:
        carry_s = gl.allocate_shared_memory(gl.float32, [CONSUMERS] + acc_desc.block_type.shape, acc_desc.layout)  # noqa: RUF005
        carry_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(CONSUMERS):
            mbarrier.init(carry_full.index(i), count=1)
    for i in gl.static_range(Q_STAGES * CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)

    _specialize(
        hp.Plan(work, segments, starts, heads, group, rows),
        Inputs(q, k, v, k_remote, v_remote, flags, error, flag_heads, flag_steps, timeout_us, board, epochs),
        Outputs(
            o_desc, acc_desc, o, lse, carry_m, carry_l, carry_acc, part_m, part_l, part_acc, error, o_sb, o_ss, o_sh, acc_sb,
            acc_ss, acc_sh, lse_sb, lse_sh, m_sb, m_sh, l_sb, l_sh,
        ),
        hp.Score(
            positions, lo_ptr, hi_ptr, lo_sb, hi_sb, lo_st, hi_st, local_rows, alibi_slopes, key_bias, key_bias_sb, scale, cap,
            keys=keys, sinks=sinks,
        ),
        Memory(q_s, k_s, v_s, q_full, q_empty, k_full, v_full, carry_s, carry_full),
        Config(
            CONSUMERS, BLOCK_N, STAGES, D, DV, PANELS, V_PANELS, DV_WIDTH, PACK, O_UNIT, ACC_UNIT, FIRST, LAST, DOT_ONLY, SOFTCAP,
            Q_STAGES, EARLY, STORE, AHEAD, LAZY,
        ),
    )  # fmt: skip
