"""The fused backward kernel for sm_90: one pass over the scores makes dq, dk and dv (five products instead of seven).

It makes the gradients of one ring step for head dims up to 128. `tile_scheduler.py` assigns its work; kernels of
`backward_pre_post.py` run before and after it.

A tile is 128 keys of one key head: two consumer warpgroups of 64 keys each. Blocks of BM queries of every query head of
the group stream past it in the order of Note [Order of blocks]. Per block, in keys x queries:

    s  = k q^T            p  = 2^(scale * s - lse)         S and P of 64 x BM in registers
    dp = v do^T           ds = p * (dp - delta)
    dv += p do            dk += ds q                       64 x D in registers through the whole tile
    dq = ds^T k                                            of both warpgroups together, each makes half of it

ds goes through shared memory, so that dq leaves the program once per block: in fp32, added to global memory by the
bulk copy engine, which a warp of its own drives.
Start values: S starts from -lse / softmax_scale (hidden pairs: from -1e30) and dP from -delta, so that
p = 2^(scale * S) and ds = p * dP need no subtraction, mask or register. Scores that are more than a scaled product
(softcap, ALiBi, key bias, a scale that is not positive) start from zero instead.
In a tile that the end of the buffer cuts, every block is masked: p of a key that does not exist could overflow, and
infinity times the zeros read in its place would reach dq.

Note [Order of blocks]
    Blocks come in runs. A run is one segment of one head, or of all heads of the group side by side, the head changing fastest.
    Blocks that need a mask come first, head by head, so that the others are one loop without a mask.
    Where the heads of a group have more than L2_BYTES of rows and tiles share their last rows (`near`), full blocks come with
    heads side by side, from the last row to the first in every other tile of a program. Under a causal mask this keeps programs
    at the same rows: tiles that start together share their last rows, and of tiles that start when shorter ones have ended, each
    is at its first row when the others reach that row. Otherwise one head follows another: what programs stream at a time is in
    the level-two cache. Under a window that is the rows of one head that neighbouring tiles see; those of all heads would not fit.

Note [Order of sums]
    With `turns` the contributions to a block of dq are added in the order of tiles, and of the blocks of a tile. A counter per
    block and query head says whose turn it is (Note [Turns] of tile_scheduler.py). The storer waits for its turn and adds; once
    the sums are in memory it increments the counter. That takes 1.2 us, so it adds those of the next block before it looks, unless
    it must wait for that block's turn: then it increments first, so nobody waits for a program that waits.
    No deadlock, however few programs run at a time: a program has one tile, and takes it from a counter when it starts, not by its
    program_id. So each earlier tile has been taken by a program that runs or has ended. Contributions wait for those of earlier
    tiles, or earlier ones of their own, so the first tile that is not done waits for nobody. Remote rows do not wait for this
    launch. A wait beyond `limit_us` ends the kernel with a trap.
    Waits are short if neighbouring tiles reach a block one after another. Tiles with the most blocks come first. All go from the
    last rows to the first, heads side by side, and meet blocks with a mask at the end: under a causal mask, those that no later
    tile sees. Under a window tiles come from the last keys to the first.

Note [Tiles of several owners]
    In a fused call (Note [Fused call] of interface.py) a tile holds rows of one source, given by `tiles`. Its K and V come
    from the local or the remote buffer, and it ends with its source; zeros follow in the remote buffer. The producer waits for
    the flag of a source before its first tile; flags rise in order. A bias of keys arrives before the flag, and consumers read
    it when K is there. dk and dv go to the address of the owner's region.
    An accumulator gives a thread two neighbouring columns: stores of 32 bytes in each of eight rows, of which most of the link
    would carry headers. So returned sums change their layout first, through the buffer of dq where there is one: 16 bytes a
    thread, whole lines of 128 bytes or more. The storer hands each half of the buffer over once more for that.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false
from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ringattn.kernels.attention.hopper import primitives as hp

TILE = gl.constexpr(128)  # keys
HALF = gl.constexpr(64)  # keys of a consumer
HIDDEN = gl.constexpr(-1.0e30)  # start value of a score whose weight is zero
NEVER = gl.constexpr(2**30)  # beyond every flag
STAGES = gl.constexpr(2)  # blocks of queries in shared memory
DS_STORED = gl.constexpr(8)
STAGE_FREE = gl.constexpr(9)
DQ_FREE = gl.constexpr(12)
DQ_FULL = gl.constexpr(14)

# arguments of the partitions; Note [Structs] of primitives.py
Outputs = namedtuple(
    "Outputs", "dq_desc dk_desc dv_desc dk dv grad_buffers grad_buffer_rows error parts dkey_bias dkey_bias_parts dalibi queries "
    "dk_sb dk_ss dk_sh dv_sb dv_ss dv_sh dalibi_sb dalibi_sh",
)  # fmt: skip
Memory = namedtuple("Memory", "q do k v lse delta ds dq columns kv_full kv_free q_full do_full")
Config = namedtuple(
    "Config", "D DV D_WIDTH DV_WIDTH BM DOT_ONLY SOFTCAP ADD WANT_DQ WANT_KEY_BIAS SCALE_DQ LATE_ADDRESSES UNIT HELD MASK_BITS "
    "SCORED V_SCORED ORDERED",
)  # fmt: skip
Keys = namedtuple("Keys", "positions bias v_held queries")


@gluon.jit
def _end(plan, at):
    """One past the last key of the tile's source, or of the buffer."""
    end = plan.rows
    if plan.tiles is not None:
        end = gl.load(plan.tiles + at * 4 + 3)
    return end


@gluon.jit
def _tile(plan, at):
    """(head, row, segment, masked, full, masked_blocks, full_blocks, slot); all blocks of a tile that the end cuts are masked."""
    head, row, segment, masked, full, masked_blocks, full_blocks, slot = hp.entry(plan.work, at)
    cut = row + TILE > _end(plan, at)
    masked = gl.where(cut, masked + full, masked)
    full = gl.where(cut, 0, full)
    masked_blocks = gl.where(cut, masked_blocks + full_blocks, masked_blocks)
    full_blocks = gl.where(cut, 0, full_blocks)
    return head, row, segment, masked, full, masked_blocks, full_blocks, slot


@gluon.jit
def _entries(plan):
    """[first, end) of the entries of this program."""
    if plan.turns is None:
        at = gl.load(plan.starts + gl.program_id(0))
        last = gl.load(plan.starts + gl.program_id(0) + 1)
    else:
        at = plan.ticket
        last = at + 1
    return at, last


@gluon.jit
def _turned(near, taken):
    """-1: full blocks of one head after another; else heads side by side, and 1: the last full block comes first."""
    return gl.where(near != 0, 1 - taken % 2, -1)


@gluon.jit
def _runs(masked, full, group, turned):
    """Number of runs of a tile; Note [Order of blocks]."""
    return masked * group + gl.where(turned < 0, full * group, full)


@gluon.jit
def _walked(plan, number, masked, full):
    """The number of the run that is taken as number `number`: those with a mask come last under Note [Order of sums]."""
    if plan.turns is not None:
        number = gl.where(number < full, number + masked * plan.group, number - full)
    return number


@gluon.jit
def _run(plan, number, segment, masked, full, turned, BM: gl.constexpr):
    """(segment, query head of the group, heads, first row, step, blocks) of run `number`; Note [Order of blocks]."""
    group = plan.group
    late = number - masked * group
    of_mask, of_full = gl.maximum(masked, 1), gl.maximum(full, 1)
    aside = (late >= 0) & (turned >= 0)
    back = (late >= 0) & (turned == 1)
    part = segment + gl.where(
        late < 0, number % of_mask, masked + gl.where(back, full - 1 - late, gl.where(aside, late, late % of_full))
    )
    head = gl.where(late < 0, number // of_mask, gl.where(aside, 0, late // of_full))
    heads = gl.where(aside, group, 1)
    row = gl.load(plan.segments + part * 8)
    blocks = gl.load(plan.segments + part * 8 + 1)
    return part, head, heads, gl.where(back, row + (blocks - 1) * BM, row), gl.where(back, -BM, BM), blocks * heads


@gluon.jit
def _next(x, h, first_head, heads, step):
    """(row, query head) of the next block of a run: of the next head, or of the next row behind the last head."""
    last = h == first_head + heads - 1
    return gl.where(last, x + step, x), gl.where(last, first_head, h + 1)


@gluon.jit
def _producer(plan, src, mem, BM: gl.constexpr):
    at, last = _entries(plan)
    count = 0
    taken = 0
    seen = 0
    met = 0
    epoch = 0
    for i in range(at, last):
        head, row, segment, masked, full, _masked_blocks, _full_blocks, _slot = _tile(plan, i)
        b = head // plan.heads
        h_kv = head % plan.heads
        step = 0
        if plan.tiles is not None:
            step = gl.load(plan.tiles + i * 4 + 1)
        if src.flags is not None:
            if plan.turns is not None:
                # a wait that failed in another program is not waited for again by each that starts later
                seen = gl.where(gl.load(src.error, volatile=True) == 0, 0, NEVER)
            flag = h_kv // src.flag_heads * src.flag_steps + step
            if step > 0 and flag > seen:
                there = hp.wait_flag(src.flags + flag, src.error, src.timeout_us)
                seen = gl.where(there == 1, flag, NEVER)  # what is lost is lost: no more waiting
        if taken > 0:
            mbarrier.wait(mem.kv_free.index(0), (taken & 1) ^ 1)
        kv_full = mem.kv_full
        mbarrier.expect(kv_full.index(0), src.k.block_type.nbytes)
        hp.load_from(src.k, src.k_remote, step, [b, h_kv, row, 0], kv_full.index(0), mem.k.index(0))
        fresh = True
        turned = _turned(plan.near, taken)
        for number in range(_runs(masked, full, plan.group, turned)):
            number = _walked(plan, number, masked, full)
            _part, g, span, x, pace, blocks = _run(plan, number, segment, masked, full, turned, BM)
            h = h_kv * plan.group + g
            for _j in range(blocks):
                if src.board is not None:
                    met += 1
                    if met == hp.EPOCH:
                        met = 0
                        epoch = hp.wait_for_progress(src.board, epoch, src.epochs)
                st = count & 1
                if count >= STAGES:
                    hp.sync(STAGE_FREE + st, 288)
                stat = (b * plan.heads * plan.group + h) * src.padded_queries + x
                q_full = mem.q_full.index(st)
                do_full = mem.do_full.index(st)
                mbarrier.expect(q_full, src.q.block_type.nbytes + BM * 8)
                tma.async_copy_global_to_shared(src.q, [b, h, x, 0], q_full, mem.q.index(st))
                tma.async_copy_global_to_shared(src.lse, [stat], q_full, mem.lse.index(st))
                tma.async_copy_global_to_shared(src.delta, [stat], q_full, mem.delta.index(st))
                mbarrier.expect(do_full, src.do.block_type.nbytes)
                tma.async_copy_global_to_shared(src.do, [b, h, x, 0], do_full, mem.do.index(st))
                if fresh:
                    # after the first block: S needs K and Q, and only then does dP need V and dO
                    mbarrier.expect(kv_full.index(1), src.v.block_type.nbytes)
                    hp.load_from(src.v, src.v_remote, step, [b, h_kv, row, 0], kv_full.index(1), mem.v.index(0))
                    fresh = False
                x, h = _next(x, h, h_kv * plan.group + g, span, pace)
                count += 1
        taken += 1
    if src.board is not None:
        hp.exit_barrier(src.board, epoch, src.epochs)


@gluon.jit
def _storer(plan, out, dq_s, D: gl.constexpr, DV: gl.constexpr, BM: gl.constexpr):
    dq_desc, dk_desc, dv_desc = out.dq_desc, out.dk_desc, out.dv_desc
    at, last = _entries(plan)
    for i in range(at, last):
        head, row, segment, masked, full, _masked_blocks, _full_blocks, slot = _tile(plan, i)
        b = head // plan.heads
        h_kv = head % plan.heads
        turned = _turned(plan.near, i - at)
        before = -1
        for number in range(_runs(masked, full, plan.group, turned)):
            number = _walked(plan, number, masked, full)
            part, g, span, x, pace, blocks = _run(plan, number, segment, masked, full, turned, BM)
            h = h_kv * plan.group + g
            if plan.turns is not None:
                first = gl.load(plan.turns + part)
            for _j in range(blocks):
                tma.store_wait(1)
                hp.arrive(DQ_FREE, 160)
                tma.store_wait(0)
                hp.arrive(DQ_FREE + 1, 160)
                if plan.turns is not None:
                    place = 1 + (b * plan.heads * plan.group + h) * gl.cdiv(out.queries, BM) + x // BM
                    turn = gl.load(plan.turns + first + x // BM)
                    if before >= 0:
                        if gl.load(plan.counters + place, volatile=True) < turn:
                            hp.pass_turn(plan.counters + before, hp.PASS_LAST)
                            before = -1
                    hp.wait_turn(plan.counters + place, turn, plan.limit_us)
                hp.sync(DQ_FULL, 160)
                hp.reduce_add(dq_desc, [b, h, x, 0], dq_s.index(0))
                hp.sync(DQ_FULL + 1, 160)
                if BM == 64:
                    hp.reduce_add(dq_desc, [b, h, x, D * BM // 128], dq_s.index(1))
                else:
                    hp.reduce_add(dq_desc, [b, h, x + 64, 0], dq_s.index(1))
                if plan.turns is not None:
                    if before >= 0:
                        hp.pass_turn(plan.counters + before, hp.PASS_EARLIER)
                    before = place
                x, h = _next(x, h, h_kv * plan.group + g, span, pace)
        if plan.turns is not None:
            if before >= 0:
                hp.pass_turn(plan.counters + before, hp.PASS_LAST)
        if out.grad_buffers is not None:
            if slot < 0:
                # no full half follows, so that the meeting itself keeps this warp from running ahead
                tma.store_wait(0)
                hp.sync(DQ_FREE, 160)
                hp.sync(DQ_FREE + 1, 160)
        if dk_desc is not None:
            DTYPE: gl.constexpr = dk_desc.dtype
            LAYOUT: gl.constexpr = dk_desc.layout
            if slot < 0:
                for n in gl.static_range(2):
                    tma.store_wait(1)
                    hp.arrive(DQ_FREE, 160)
                    tma.store_wait(0)
                    hp.arrive(DQ_FREE + 1, 160)
                    for which in gl.static_range(2):
                        hp.sync(DQ_FULL + which, 160)
                        place = [b, h_kv, row + which * HALF, 0]
                        if n == 0:
                            tma.async_copy_shared_to_global(dk_desc, place, _sums(dq_s.index(which), DTYPE, LAYOUT, D))
                        else:
                            tma.async_copy_shared_to_global(dv_desc, place, _sums(dq_s.index(which), DTYPE, LAYOUT, DV))
    tma.store_wait(0)


@gluon.jit
def _sums(half, DTYPE: gl.constexpr, LAYOUT: gl.constexpr, WIDTH: gl.constexpr):
    """Half of the buffer of dq as 64 x WIDTH sums of 16 bits."""
    FIT: gl.constexpr = half.shape[3] * 2 // WIDTH  # Triton 3.8 reinterprets the whole of a buffer only
    return half._reinterpret(DTYPE, [FIT, 1, 1, HALF, WIDTH], LAYOUT).index(0)


@gluon.jit
def _tanh(x):
    return 1.0 - 2.0 * hp.reciprocal(1.0 + gl.exp2(x * (2.0 * hp.LOG2E)))


@gluon.jit
def _away(i_pos, k_pos):
    """|i - j| of keys x queries."""
    away = gl.expand_dims(i_pos, 0) - gl.expand_dims(k_pos, 1)
    return gl.maximum(away, -away).to(gl.float32)


@gluon.jit
def _spread(numbers_s, BM: gl.constexpr):
    """One number per query as keys x queries, from which a product may start."""
    s_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    numbers = gl.expand_dims(numbers_s.load(gl.SliceLayout(0, s_l)), 0)
    start, _zero = gl.broadcast(numbers, gl.zeros([HALF, BM], gl.float32, s_l))
    return start


@gluon.jit
def _scored(x, COLUMNS: gl.constexpr):
    if COLUMNS == x.shape[1]:
        return (x,)
    else:
        return x.slice(0, 64, 1), x.slice(64, COLUMNS - 64, 1)


@gluon.jit
def _send(
    WHICH: gl.constexpr, st, weights, ds, dk, dv, q, do, k_h, ds_s, D: gl.constexpr, DV: gl.constexpr, BM: gl.constexpr
):  # fmt: skip
    """Issues dv += p do, dq = ds^T k and dk += ds q in this order; dq once both warpgroups have stored their ds."""
    dk_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dv_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    dq_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D * BM // 128, 16])
    ds_block = ds_s.index(st)
    ds_block.slice(WHICH * HALF, HALF, 0).store(ds)
    dv_token = warpgroup_mma(gl.convert_layout(weights, gl.DotOperandLayout(0, dv_l, 2)), do, dv, is_async=True)
    fence_async_shared()
    hp.sync(DS_STORED, 256)
    if BM == 64:
        ds_t = ds_block.permute((1, 0))
    else:
        ds_t = ds_block.slice(WHICH * 64, 64, 1).permute((1, 0))
    dq_zero = gl.zeros([64, D * BM // 128], gl.float32, dq_l)
    dq_token = warpgroup_mma(ds_t, k_h, dq_zero, use_acc=False, is_async=True)
    dk_token = warpgroup_mma(gl.convert_layout(ds, gl.DotOperandLayout(0, dk_l, 2)), q, dk, is_async=True)
    return dv_token, dq_token, dk_token


@gluon.jit
def _put_dq(WHICH: gl.constexpr, dq, dq_half, softmax_scale, SCALE_DQ: gl.constexpr):
    """Hands this warpgroup's half of dq to the storer."""
    if SCALE_DQ:
        dq = dq * softmax_scale
    hp.sync(DQ_FREE + WHICH, 160)
    dq_half.store(dq)
    fence_async_shared()
    hp.arrive(DQ_FULL + WHICH, 160)


@gluon.jit
def _put_sums(WHICH: gl.constexpr, sums, half, DTYPE: gl.constexpr, LAYOUT: gl.constexpr, WIDTH: gl.constexpr):
    """Hands 64 x WIDTH sums to the storer through the buffer of dq."""
    hp.sync(DQ_FREE + WHICH, 160)
    _sums(half, DTYPE, LAYOUT, WIDTH).reshape([HALF, WIDTH]).store(sums.to(DTYPE))
    fence_async_shared()
    hp.arrive(DQ_FULL + WHICH, 160)


@gluon.jit
def _step(
    WHICH: gl.constexpr, count, dk, dv, dkey_bias, low, high, x, origin, stride, keys, slope, dalibi, dq_half, mem,
    score, c, MASKED: gl.constexpr,
):  # fmt: skip
    """Adds what one block of queries sends to 64 keys, and makes this warpgroup's half of the block's dq.

    `low`, `high`: limits of each key (`limits` of primitives.py). `x`: first query row of the block; row y sits at the
    global position origin + stride * y. `slope` and `keys.bias` are in log2 units.
    """
    dtype: gl.constexpr = mem.q.dtype
    s_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.BM, 16])
    dk_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.D, 16])
    dv_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.DV, 16])
    columns_l: gl.constexpr = gl.SliceLayout(0, s_l)
    st = count & 1
    phase = (count >> 1) & 1
    COLUMNS: gl.constexpr = c.D * c.BM // 128
    # K and V stay, so the compiler would keep descriptors of all their slices in registers that the products need; an index
    # that it cannot see through makes them where they are used
    tile = hp.opaque(gl.to_tensor(0)) if c.LATE_ADDRESSES else 0
    k = mem.k.index(tile).reshape([TILE, c.D])
    k_w = k.slice(WHICH * HALF, HALF, 0)
    v_w = mem.v.index(tile).reshape([TILE, c.DV]).slice(WHICH * HALF, HALF, 0)
    k_h = k.slice(WHICH * COLUMNS, COLUMNS, 1) if c.BM == 64 else k
    q = mem.q.index(st).reshape([c.BM, c.D])
    do = mem.do.index(st).reshape([c.BM, c.DV])

    mbarrier.wait(mem.q_full.index(st), phase)
    if MASKED and not c.MASK_BITS:
        column = x + gl.expand_dims(mem.columns.slice(0, c.BM).load(columns_l), 0)
        visible = (column >= gl.expand_dims(low, 1)) & (column < gl.expand_dims(high, 1))
    start_s = _spread(mem.lse.index(st), c.BM)
    start_dp = _spread(mem.delta.index(st), c.BM)
    if c.DOT_ONLY:
        if MASKED:
            start_s = hp.hide(start_s, low, high, x, columns_l) if c.MASK_BITS else gl.where(visible, start_s, HIDDEN)
        if MASKED or c.ORDERED:
            # behind the selects of a mask, and in the first loop of a tile, the compiler would wait for S before it issues dP
            start_s = hp.pinned(start_s)
            start_dp = hp.pinned(start_dp)
        s_token = hp.begin_scores(_scored(k_w, c.SCORED), _scored(q, c.SCORED), start_s, True)
    else:
        zero = gl.zeros([HALF, c.BM], gl.float32, s_l)
        s_token = hp.begin_scores(_scored(k_w, c.SCORED), _scored(q, c.SCORED), zero, False)
    mbarrier.wait(mem.do_full.index(st), phase)
    if c.HELD == 0:
        dp_token = hp.begin_scores(_scored(v_w, c.V_SCORED), _scored(do, c.V_SCORED), start_dp, True)
    elif c.HELD >= c.DV:
        dp_token = hp.begin_scores((keys.v_held,), (do,), start_dp, True)
    else:
        v_panels = keys.v_held, v_w.slice(c.HELD, c.V_SCORED - c.HELD, 1)
        do_panels = do.slice(0, c.HELD, 1), do.slice(c.HELD, c.V_SCORED - c.HELD, 1)
        dp_token = hp.begin_scores(v_panels, do_panels, start_dp, True)
    s = warpgroup_mma_wait(1, deps=[s_token])
    if c.DOT_ONLY:
        p = gl.exp2(s * score.scale)
    else:
        s = s * score.scale
        if c.SOFTCAP:
            t = _tanh(s)
            s = t * score.cap
        if slope is not None:
            s -= slope * _away(origin + stride * (x + mem.columns.slice(0, c.BM).load(columns_l)), keys.positions)
        if keys.bias is not None:
            s += gl.expand_dims(keys.bias, 1)
        p = gl.exp2(s - start_s)
        if MASKED:
            p = gl.where(visible, p, 0.0)
    weights = hp.rounded(p, dtype)
    if c.SOFTCAP:
        if c.WANT_KEY_BIAS or dalibi is not None:
            steepness = 1.0 - t * t
        else:
            p = p * (1.0 - t * t)  # now, so that the tanh is not kept until dp is there
    dp = warpgroup_mma_wait(0, deps=[dp_token])
    ds = p * dp
    if c.WANT_KEY_BIAS:
        dkey_bias += gl.sum(ds, 1)
    if dalibi is not None:
        column = x + mem.columns.slice(0, c.BM).load(columns_l)
        # distances once more: kept until dp is there they would not fit into registers
        away = _away(origin + stride * column, hp.opaque(keys.positions))
        gl.atomic_add(dalibi + column, -gl.sum(ds * away, 0), mask=column < keys.queries, sem="relaxed")
    if c.SOFTCAP:
        if c.WANT_KEY_BIAS or dalibi is not None:
            ds = ds * steepness
    ds = ds.to(dtype)
    if c.WANT_DQ:
        dv_token, dq_token, dk_token = _send(WHICH, st, weights, ds, dk, dv, q, do, k_h, mem.ds, c.D, c.DV, c.BM)
        dv = warpgroup_mma_wait(2, deps=[dv_token])
        dq = warpgroup_mma_wait(1, deps=[dq_token])
        _put_dq(WHICH, dq, dq_half, score.softmax_scale, c.SCALE_DQ)
    else:
        dv_token = warpgroup_mma(gl.convert_layout(weights, gl.DotOperandLayout(0, dv_l, 2)), do, dv, is_async=True)
        dk_token = warpgroup_mma(gl.convert_layout(ds, gl.DotOperandLayout(0, dk_l, 2)), q, dk, is_async=True)
        dv = warpgroup_mma_wait(1, deps=[dv_token])
    dk = warpgroup_mma_wait(0, deps=[dk_token])
    hp.arrive(STAGE_FREE + st, 288)
    return dk, dv, dkey_bias


@gluon.jit
def _keys_at(plan, score, at, y, LAYOUT: gl.constexpr):
    """(rows, the same in tables, which exist) of 64 keys from row y on."""
    y_own = y + hp.opaque(gl.arange(0, HALF, LAYOUT))
    exists = y_own < _end(plan, at)
    y_table = y_own
    if plan.tiles is not None:
        # positions and bounds of local and remote rows stand behind one another
        y_table = y_own + gl.where(gl.load(plan.tiles + at * 4 + 1) > 0, score.local_rows, 0)
    return y_own, y_table, exists


@gluon.jit
def _bounds(score, b, y_table, exists):
    lo = gl.load(score.lo + gl.cast(b, gl.int64) * score.lo_sb + y_table, mask=exists, other=0)
    hi = gl.load(score.hi + gl.cast(b, gl.int64) * score.hi_sb + y_table, mask=exists, other=0)
    return lo, hi


@gluon.jit
def _dalibi(out, b, h):
    return out.dalibi + gl.cast(b, gl.int64) * out.dalibi_sb + gl.cast(h, gl.int64) * out.dalibi_sh


@gluon.jit
def _store_sums(WHICH: gl.constexpr, at, dk, dv, dkey_bias, y_own, exists, dq_half, plan, out, score, mem, c):
    """Scales the sums of a tile and stores them where they belong: as a part, to the storer, to their owner, or as results."""
    COLUMNS: gl.constexpr = c.D * c.BM // 128
    # read again: kept through the loops it would cost registers there
    again = hp.opaque(gl.to_tensor(at))
    head, row, _, _, _, _, _, slot = hp.entry(plan.work, again)
    b = head // plan.heads
    h_kv = head % plan.heads
    y = row + WHICH * HALF
    dv = hp.lowered(dv, mem.q.dtype)
    if out.error is not None:
        health = gl.where(gl.load(out.error, volatile=True) == 0, 1.0, float("nan"))
        dk = dk * (score.softmax_scale * health)
        dv = dv * health
        dkey_bias = dkey_bias * health
    else:
        dk = dk * score.softmax_scale
    if slot >= 0:
        part_out = out.parts + gl.cast(slot, gl.int64) * (TILE * (c.D + c.DV))
        hp.put(part_out, c.D, dk, WHICH * HALF, TILE, mem.columns, c.D, c.D, False)
        hp.put(part_out + TILE * c.D, c.DV, dv, WHICH * HALF, TILE, mem.columns, c.DV, c.DV, False)
    elif out.dk_desc is not None:
        SUMS_LAYOUT: gl.constexpr = out.dk_desc.layout
        _put_sums(WHICH, dk, mem.dq.index(WHICH), mem.q.dtype, SUMS_LAYOUT, c.D)
        _put_sums(WHICH, dv, mem.dq.index(WHICH), mem.q.dtype, SUMS_LAYOUT, c.DV)
    elif out.grad_buffers is not None:
        side = plan.tiles + again * 4
        begin = gl.load(side + 2)
        own_rows = gl.load(side + 3) - begin
        first_row = gl.cast(b, gl.int64) * out.grad_buffer_rows * plan.heads + h_kv
        WIDTH: gl.constexpr = c.D_WIDTH + c.DV_WIDTH
        grad_buffer = hp.grad_buffer_of(out.grad_buffers, gl.load(side), first_row, WIDTH)
        stride = plan.heads * WIDTH
        if c.WANT_DQ:
            hp.sync(DQ_FREE + WHICH, 160)
        CHUNK: gl.constexpr = COLUMNS if c.WANT_DQ else 32
        hp.send_grads(grad_buffer, stride, dk, y - begin, own_rows, dq_half, 0, c.D_WIDTH, c.D, CHUNK)
        hp.send_grads(grad_buffer + c.D_WIDTH, stride, dv, y - begin, own_rows, dq_half, 0, c.DV_WIDTH, c.DV, CHUNK)
    else:
        dk_at = out.dk + (gl.cast(b, gl.int64) * out.dk_sb + gl.cast(h_kv, gl.int64) * out.dk_sh) * c.UNIT
        dv_at = out.dv + (gl.cast(b, gl.int64) * out.dv_sb + gl.cast(h_kv, gl.int64) * out.dv_sh) * c.UNIT
        hp.put(dk_at, out.dk_ss * c.UNIT, dk, y, plan.rows, mem.columns, c.D_WIDTH, c.D, c.ADD)
        hp.put(dv_at, out.dv_ss * c.UNIT, dv, y, plan.rows, mem.columns, c.DV_WIDTH, c.DV, c.ADD)
    if c.WANT_KEY_BIAS:
        if slot >= 0:
            gl.store(out.dkey_bias_parts + slot * TILE + (y_own - row), dkey_bias)
        elif out.grad_buffers is not None:
            side = plan.tiles + again * 4
            line = hp.grad_buffer_of(out.dkey_bias, gl.load(side), head, out.grad_buffer_rows)
            gl.store(line + (y_own - gl.load(side + 2)), dkey_bias, mask=exists)
        else:
            gl.store(out.dkey_bias + gl.cast(head, gl.int64) * plan.rows + y_own, dkey_bias, mask=exists)


@gluon.jit
def _consumer(WHICH: gl.constexpr, plan, out, score, mem, c):
    COLUMNS: gl.constexpr = c.D * c.BM // 128
    s_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.BM, 16])
    dk_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.D, 16])
    dv_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.DV, 16])
    rows_l: gl.constexpr = gl.SliceLayout(1, s_l)
    at, last = _entries(plan)
    count = 0
    taken = 0
    dq_half = mem.dq.index(WHICH).reshape([64, COLUMNS]) if c.WANT_DQ else None
    for i in range(at, last):
        head, row, segment, masked, full, _masked_blocks, full_blocks, _slot = _tile(plan, i)
        b = head // plan.heads
        h_kv = head % plan.heads
        y = row + WHICH * HALF
        dk = gl.zeros([HALF, c.D], gl.float32, dk_l)
        dv = gl.zeros([HALF, c.DV], gl.float32, dv_l)
        y_own, y_table, exists = _keys_at(plan, score, i, y, rows_l)
        dkey_bias = gl.zeros([HALF], gl.float32, rows_l)
        key_bias = None
        if score.key_bias is not None:
            bias_at = score.key_bias + gl.cast(b, gl.int64) * score.key_bias_sb + y_table
            if plan.tiles is None:
                key_bias = gl.load(bias_at, mask=exists, other=0.0) * hp.LOG2E
        k_pos = None
        if score.alibi_slopes is not None:
            k_pos = gl.load(score.positions + y_table, mask=exists, other=0)
        if plan.turns is None:
            lo, hi = _bounds(score, b, y_table, exists)
        mbarrier.wait(mem.kv_full.index(0), taken & 1)
        mbarrier.wait(mem.kv_full.index(1), taken & 1)
        v_held = None
        if c.HELD > 0:
            v_own = mem.v.index(0).reshape([TILE, c.DV]).slice(WHICH * HALF, HALF, 0)
            if c.HELD < c.DV:
                v_own = v_own.slice(0, c.HELD, 1)
            v_held = v_own.load(gl.DotOperandLayout(0, s_l, 2))
        if score.key_bias is not None:
            if plan.tiles is not None:
                key_bias = gl.load(bias_at, mask=exists, other=0.0) * hp.LOG2E
        keys = Keys(k_pos, key_bias, v_held, out.queries)

        for late in gl.static_range(2):
            if (late == 0) == (plan.turns is None):
                if plan.turns is not None:
                    # read again, as below
                    head, row, segment, masked, full, _masked_blocks, full_blocks, _slot = _tile(
                        plan, hp.opaque(gl.to_tensor(i))
                    )
                    b = head // plan.heads
                    h_kv = head % plan.heads
                    y_own, y_table, exists = _keys_at(plan, score, i, row + WHICH * HALF, rows_l)
                    lo, hi = _bounds(score, b, y_table, exists)
                for g in range(plan.group):
                    slope = hp.slope_of(score, h_kv * plan.group + g) if score.alibi_slopes is not None else None
                    dalibi = _dalibi(out, b, h_kv * plan.group + g) if out.dalibi is not None else None
                    for part in range(segment, segment + masked):
                        x, blocks, begin, end, origin, stride = hp.segment_of(plan.segments, part)
                        starts = hp.starts_of(score, gl.cast(b, gl.int64))
                        own_lo, own_hi = hp.bounds_in(
                            lo, hi, starts, score, plan.segments, part, y_own - row, y_table, exists
                        )
                        low, high = hp.limits(own_lo, own_hi, begin, end, origin, stride)
                        for _j in range(blocks):
                            dk, dv, dkey_bias = _step(
                                WHICH, count, dk, dv, dkey_bias, low, high, x, origin, stride, keys, slope, dalibi, dq_half, mem,
                                score, c, True,
                            )  # fmt: skip
                            x += c.BM
                            count += 1
            else:
                if c.DOT_ONLY:
                    for _j in range(full_blocks * plan.group):
                        dk, dv, dkey_bias = _step(
                            WHICH, count, dk, dv, dkey_bias, None, None, 0, 0, 0, keys, None, None, dq_half, mem, score, c, False
                        )  # fmt: skip
                        count += 1
                else:
                    turned = _turned(plan.near, taken)
                    for number in range(masked * plan.group, _runs(masked, full, plan.group, turned)):
                        part, g, span, x, pace, blocks = _run(plan, number, segment, masked, full, turned, c.BM)
                        _row, _blocks, begin, end, origin, stride = hp.segment_of(plan.segments, part)
                        h = h_kv * plan.group + g
                        for _j in range(blocks):
                            slope = hp.slope_of(score, h) if score.alibi_slopes is not None else None
                            dalibi = _dalibi(out, b, h) if out.dalibi is not None else None
                            dk, dv, dkey_bias = _step(
                                WHICH, count, dk, dv, dkey_bias, None, None, x, origin, stride, keys, slope, dalibi, dq_half, mem,
                                score, c, False,
                            )  # fmt: skip
                            x, h = _next(x, h, h_kv * plan.group + g, span, pace)
                            count += 1

        mbarrier.arrive(mem.kv_free.index(0), count=1)
        _store_sums(WHICH, i, dk, dv, dkey_bias, y_own, exists, dq_half, plan, out, score, mem, c)
        taken += 1


@gluon.jit
def _specialize(plan, src, out, score, mem, c):
    if c.WANT_DQ:
        gl.warp_specialize([
            (_consumer, (gl.constexpr(0), plan, out, score, mem, c)),
            (_consumer, (gl.constexpr(1), plan, out, score, mem, c)),
            (_producer, (plan, src, mem, c.BM)),
            (_storer, (plan, out, mem.dq, c.D, c.DV, c.BM)),
        ], [4, 1, 1], [240, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (gl.constexpr(0), plan, out, score, mem, c)),
            (_consumer, (gl.constexpr(1), plan, out, score, mem, c)),
            (_producer, (plan, src, mem, c.BM)),
        ], [4, 1], [240, 24])  # fmt: skip


@gluon.jit(do_not_specialize=list(hp.RUNTIME))
def backward_kernel(
    work, segments, starts, tiles, q_desc, do_desc, k_desc, v_desc, k_remote, v_remote, lse_desc, delta_desc, dq_desc, dk_desc,
    dv_desc, dk_out, dv_out, grad_buffers, flags, error, board, parts, dkey_bias_out, dkey_bias_parts,
    dalibi_out, positions, lo_ptr, hi_ptr, alibi_slopes, key_bias,
    dk_sb, dk_ss, dk_sh, dv_sb, dv_ss, dv_sh, lo_sb, hi_sb, key_bias_sb, dalibi_sb, dalibi_sh,
    heads, group, rows, queries, padded_queries, local_rows, grad_buffer_rows, flag_steps, flag_heads, timeout_us,
    epochs, lo_st, hi_st, near, turns, counters, limit_us, scale, cap, softmax_scale,
    D: gl.constexpr, DV: gl.constexpr, D_WIDTH: gl.constexpr, DV_WIDTH: gl.constexpr, BM: gl.constexpr,
    DOT_ONLY: gl.constexpr, SOFTCAP: gl.constexpr, ADD: gl.constexpr,
    WANT_DQ: gl.constexpr, SCALE_DQ: gl.constexpr, LATE_ADDRESSES: gl.constexpr, UNIT: gl.constexpr,
    DS_LAYOUT: gl.constexpr, HELD: gl.constexpr, MASK_BITS: gl.constexpr, SCORED: gl.constexpr, V_SCORED: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """dq, dk and dv of one ring step, or dk and dv alone; `rows` are keys, `heads` key heads.

    q, do, k and v are described as rows of one head (`descriptors.rows_of`), lse and delta as lists with heads of
    `padded_queries` numbers: start values of the products, or for scores that are not plain lse in log2 units and
    -delta. dq is fp32 and added to, times softmax_scale under SCALE_DQ. dk and dv are written (under ADD: added to) in
    the dtype of their tensors, whose strides are in units of UNIT elements, or, where the tensors of the dtype of q are
    described by `dk_desc` and `dv_desc`, stored by the copy engine; `parts` takes those of split tiles, `slots
    128 D` and `slots 128 DV` for each slot, fp32. `dkey_bias_out` is `b hk t`, one sum per key head (of a fused call the
    addresses of regions `b hk grad_buffer_rows`), and `dkey_bias_parts` `slots 128`.

    Of a fused call only (Note [Tiles of several owners]; otherwise None): `tiles` of the plan, `k_remote` and `v_remote`, and
    `grad_buffers`, the addresses of regions of `grad_buffer_rows` rows, in place of dk_out and dv_out; bounds and positions of
    the remote buffer begin at `local_rows`. Where remote rows may still be on their way: `flags`, `error` and `timeout_us`,
    with `flag_steps` flags for each `flag_heads` key heads.

    `near` chooses between the orders of Note [Order of blocks]. `turns`, `counters` and `limit_us` (microseconds) fix the order
    in which dq is added (Note [Order of sums]); None: any. HELD: columns of V that stay in registers.
    SCORED, V_SCORED: columns of q and of do that are not zero; scores are products over these.
    MASK_BITS: a word of bits per key hides pairs (`hide` of primitives.py).
    """
    q_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BM, D], q_desc.layout)
    do_s = gl.allocate_shared_memory(do_desc.dtype, [STAGES, 1, 1, BM, DV], do_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [1, 1, 1, TILE, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [1, 1, 1, TILE, DV], v_desc.layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BM], lse_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BM], delta_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    kv_free = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # column numbers: as constants they would be computed before all loops and kept in registers through them
    columns_s = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    columns_s.store(gl.arange(0, 128, gl.BlockedLayout([1], [32], [num_warps], [0])))
    mbarrier.init(kv_free.index(0), count=2)
    for n in gl.static_range(2):
        mbarrier.init(kv_full.index(n), count=1)
        mbarrier.init(q_full.index(n), count=1)
        mbarrier.init(do_full.index(n), count=1)
    ticket = None
    if turns is not None:
        ticket = gl.atomic_add(counters, 1, sem="relaxed")
    ds_s = None
    dq_s = None
    if WANT_DQ:
        ds_s = gl.allocate_shared_memory(q_desc.dtype, [2, TILE, BM], DS_LAYOUT)
        dq_s = gl.allocate_shared_memory(gl.float32, [2, 1, 1, 64, D * BM // 128], dq_desc.layout)
    _specialize(
        hp.Plan(work, segments, starts, heads, group, rows, tiles, near, turns, counters, ticket, limit_us),
        hp.Inputs(
            q_desc, do_desc, k_desc, v_desc, k_remote, v_remote, lse_desc, delta_desc, padded_queries, flags, error, flag_steps,
            flag_heads, timeout_us, board, epochs,
        ),
        Outputs(
            dq_desc, dk_desc, dv_desc, dk_out, dv_out, grad_buffers, grad_buffer_rows, error, parts, dkey_bias_out,
            dkey_bias_parts, dalibi_out, queries, dk_sb, dk_ss, dk_sh, dv_sb, dv_ss, dv_sh, dalibi_sb, dalibi_sh,
        ),
        hp.Score(
            positions, lo_ptr, hi_ptr, lo_sb, hi_sb, lo_st, hi_st, local_rows, alibi_slopes, key_bias, key_bias_sb, scale,
            cap, softmax_scale,
        ),
        Memory(q_s, do_s, k_s, v_s, lse_s, delta_s, ds_s, dq_s, columns_s, kv_full, kv_free, q_full, do_full),
        Config(
            D, DV, D_WIDTH, DV_WIDTH, BM, DOT_ONLY, SOFTCAP, ADD, WANT_DQ, dkey_bias_out is not None, SCALE_DQ,
            LATE_ADDRESSES, UNIT, HELD, MASK_BITS, SCORED, V_SCORED, turns is not None,
        ),
    )  # fmt: skip
