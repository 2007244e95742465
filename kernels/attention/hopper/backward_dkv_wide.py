"""dk and dv for head dims beyond 128: the two consumers share a tile of keys by role, not by rows.

It makes dk, dv and dkey_bias of one ring step, or of all in one launch, in a fixed order of sums; `backward_dq.py` makes dq.

At 256 columns the accumulators of dk and dv of 64 keys fill the registers of two warpgroups, 128 each per thread. A tile is 64
keys of one key head; blocks of 64 queries of every query head of the group stream past it, first those that need a mask, then
those that do not. Per block, in keys x queries:

    warps 0-3   s  = k q^T    p  = 2^(scale * s - lse)    dv += p do     p from registers, and to the other warpgroup
    warps 4-7   dp = v do^T   ds = p * (dp - delta)       dk += ds q     ds from registers
    warp 8      loads K and V of a tile, and Q, dO, lse and delta of a block

Only p is passed on, rounded to the dtype of the inputs, through shared memory. lse2 is 15 less in float16, which makes p as in
Note [Raised weights] of arguments.py; dp takes it back. Exponentials of one warpgroup run under the
products of the other. With both products from registers a block reads 272 KiB of shared memory where halves of the columns or
rows for each warpgroup would read 312; see docs/kernel_notes.md.

Where three stages of q and do fit, warps 0-3 begin s of a block before they add to dv what the block before sends.
Named barriers, each + stage: FREE: both consumers are done with its q and do. P_FULL, P_FREE: between them.
Fused calls are those of Note [Tiles of several owners] in backward.py, but a tile that the end of its source cuts needs no mask,
because no sum over keys is made here. Returned sums change their layout through the shared memory of K and of V.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOptionalOperand=false
from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from ringattn.kernels.attention.hopper import primitives as hp

TILE = gl.constexpr(64)  # keys
BLOCK = gl.constexpr(64)  # queries
P_STAGES = gl.constexpr(2)
FREE = gl.constexpr(8)
P_FULL = gl.constexpr(12)
P_FREE = gl.constexpr(14)
NEVER = gl.constexpr(2**30)  # beyond every flag
CHUNK = gl.constexpr(32)  # columns that change their layout at a time on their way home

# arguments of the partitions; Note [Structs] of primitives.py
Outputs = namedtuple(
    "Outputs", "dk dv grad_buffers grad_buffer_rows error parts dkey_bias dkey_bias_parts dk_sb dk_ss dk_sh dv_sb dv_ss dv_sh"
)  # fmt: skip
Memory = namedtuple("Memory", "q do k v p lse delta k_full k_free v_full v_free q_full do_full")
Config = namedtuple("Config", "D DV D_WIDTH DV_WIDTH SOFTCAP WANT_KEY_BIAS STAGES HELD ADD UNIT GRAD_LAYOUT")


@gluon.jit
def _place(count, STAGES: gl.constexpr):
    """(stage, phase) of a block; two stages take fewer instructions by bits, since `count` has a sign."""
    st, phase = count & 1, (count >> 1) & 1
    if STAGES != 2:
        st, phase = count % STAGES, (count // STAGES) & 1
    return st, phase


@gluon.jit
def _beginning(tile_s, LAYOUT: gl.constexpr):
    """Shared memory of TILE x CHUNK fp32 numbers where a panel of 16-bit numbers begins."""
    # Triton from 3.8 on reinterprets nothing in part
    pieces = tile_s.index(0)._reinterpret(gl.float32, [tile_s.shape[4] // (2 * CHUNK), TILE, CHUNK], LAYOUT)
    return pieces.index(0)


@gluon.jit
def _produce(plan, src, mem, c):
    """Streams the tiles of this program; V of a tile follows its first Q."""
    PANELS: gl.constexpr = c.D // src.q.block_type.shape[3]
    V_PANELS: gl.constexpr = c.DV // src.do.block_type.shape[3]
    first = gl.load(plan.starts + gl.program_id(0))
    last = gl.load(plan.starts + gl.program_id(0) + 1)
    count = 0
    seen = 0
    epoch = 0
    for at in range(first, last):
        head, row, segment, masked, full, _m, _f, _slot = hp.entry(plan.work, at)
        b = head // plan.heads
        h_kv = head % plan.heads
        step = 0
        if plan.tiles is not None:
            step = gl.load(plan.tiles + at * 4 + 1)
        if src.flags is not None:
            flag = h_kv // src.flag_heads * src.flag_steps + step
            if step > 0 and flag > seen:
                there = hp.wait_flag(src.flags + flag, src.error, src.timeout_us)
                seen = gl.where(there == 1, flag, NEVER)  # what is lost is lost: no more waiting
        phase = ((at - first) & 1) ^ 1
        mbarrier.wait(mem.k_free, phase)
        hp.load_panels(src.k, src.k_remote, step, b, h_kv, row, mem.k_full, mem.k, 0, PANELS, 0)
        fresh = 1
        for turn in range(2 * plan.group):
            # masked segments of all heads come before full ones of all heads
            late = turn >= plan.group
            h = h_kv * plan.group + gl.where(late, turn - plan.group, turn)
            begin = gl.where(late, segment + masked, segment)
            stat = (b * plan.heads * plan.group + h) * src.padded_queries
            for part in range(begin, begin + gl.where(late, full, masked)):
                x = gl.load(plan.segments + part * 8)
                blocks = gl.load(plan.segments + part * 8 + 1)
                for _j in range(blocks):
                    if src.board is not None:
                        if count > 0 and count % hp.EPOCH == 0:
                            epoch = hp.wait_for_progress(src.board, epoch, src.epochs)
                    st, _phase = _place(count, c.STAGES)
                    if count >= c.STAGES:
                        hp.sync(FREE + st, 288)
                    hp.load_panels(src.q, None, 0, b, h, x, mem.q_full.index(st), mem.q, st, PANELS, BLOCK * 4)
                    tma.async_copy_global_to_shared(src.lse, [stat + x], mem.q_full.index(st), mem.lse.index(st))
                    if fresh == 1:
                        mbarrier.wait(mem.v_free, phase)
                        hp.load_panels(src.v, src.v_remote, step, b, h_kv, row, mem.v_full, mem.v, 0, V_PANELS, 0)
                    hp.load_panels(src.do, None, 0, b, h, x, mem.do_full.index(st), mem.do, st, V_PANELS, BLOCK * 4)
                    tma.async_copy_global_to_shared(src.delta, [stat + x], mem.do_full.index(st), mem.delta.index(st))
                    fresh = 0
                    x += BLOCK
                    count += 1
    if src.board is not None:
        hp.exit_barrier(src.board, epoch, src.epochs)


@gluon.jit
def _weigh(
    dv, weights, began, count, low, high, x, origin, stride, k_pos, slope, key_bias, k, score, mem, c, MASKED: gl.constexpr
):  # fmt: skip
    """Makes the weights of one block, hands them over, and adds what they send to dv: (dv, weights).

    With more than two stages it adds what `weights`, those of the block before, send. `began`: number of the first block of the
    tile. `low`, `high`: limits of each key (`limits` of primitives.py). `x`: first query row of the block; row y sits at the
    global position origin + stride * y. `slope` and `key_bias` are in log2 units.
    """
    dtype: gl.constexpr = mem.q.dtype
    s_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    columns_l: gl.constexpr = gl.SliceLayout(0, s_l)
    PANELS: gl.constexpr = c.D // mem.k.shape[4]
    zero = gl.zeros([TILE, BLOCK], gl.float32, s_l)
    st, phase = _place(count, c.STAGES)
    q = hp.panels_of(mem.q, st, PANELS)
    if k is None:
        # an index the compiler cannot see through: held through the loop, the addresses of all slices fill the registers
        k = hp.panels_of(mem.k, hp.opaque(gl.to_tensor(0)), PANELS)

    mbarrier.wait(mem.q_full.index(st), phase)
    s_token = hp.begin_scores(k, q, zero, False)
    lse2 = gl.expand_dims(mem.lse.index(st).load(columns_l), 0)
    if c.STAGES > 2:
        # dv of the block before runs beneath the exponentials of this one; before the first it adds weights of 0
        before = gl.maximum(count - 1, began)
        tokens = _begin_dv(before, weights, dv, mem, c.STAGES)
        s = warpgroup_mma_wait(len(dv), deps=[s_token])
    else:
        s = warpgroup_mma_wait(0, deps=[s_token])
    s = s * score.scale
    tanh = s
    if c.SOFTCAP:
        tanh = hp.tanh(s)
        s = tanh * score.cap
    row = x + hp.opaque(gl.arange(0, BLOCK, columns_l))
    if slope is not None:
        away = gl.expand_dims(origin + stride * row, 0) - gl.expand_dims(k_pos, 1)
        s -= slope * gl.abs(away).to(gl.float32)
    if key_bias is not None:
        s += gl.expand_dims(key_bias, 1)
    p = gl.exp2(s - lse2)
    if MASKED:
        column = gl.expand_dims(row, 0)
        visible = (column >= gl.expand_dims(low, 1)) & (column < gl.expand_dims(high, 1))
        p = gl.where(visible, p, 0.0)
    weights = p.to(dtype)
    p_st = count & 1
    if count >= P_STAGES:
        hp.sync(P_FREE + p_st, 256)
    if c.SOFTCAP:
        # ds has the derivative of the soft cap besides, the gradient of the key bias does not
        mem.p.index(p_st).store((p * (1.0 - tanh * tanh)).to(dtype))
        if c.WANT_KEY_BIAS:
            mem.p.index(p_st + P_STAGES).store(weights)
    else:
        mem.p.index(p_st).store(weights)
    hp.arrive(P_FULL + p_st, 256)
    if c.STAGES > 2:
        weights = hp.packed(weights)
        dv = hp.wait_for_sums(tokens)
        if count > began:
            hp.arrive(FREE + _place(before, c.STAGES)[0], 288)
    else:
        dv = hp.wait_for_sums(_begin_dv(count, weights, dv, mem, c.STAGES))
        hp.arrive(FREE + st, 288)
    return dv, weights


@gluon.jit
def _begin_dv(count, weights, dv, mem, STAGES: gl.constexpr):
    st, phase = _place(count, STAGES)
    mbarrier.wait(mem.do_full.index(st), phase)
    return hp.begin_sums(hp.operand_of(weights, mem.do), hp.panels_of(mem.do, st, len(dv)), dv)


@gluon.jit
def _make_dv(plan, out, score, mem, c):
    """Scores, weights and dv of every tile of this program."""
    s_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    PANELS: gl.constexpr = c.D // mem.k.shape[4]
    first = gl.load(plan.starts + gl.program_id(0))
    last = gl.load(plan.starts + gl.program_id(0) + 1)
    count = 0
    for at in range(first, last):
        head, row, segment, masked, full, _m, full_blocks, slot = hp.entry(plan.work, at)
        b = head // plan.heads
        h_kv = head % plan.heads
        b64 = gl.cast(b, gl.int64)
        dv = hp.zero_sums(mem.do, c.DV // mem.do.shape[4])
        weights = hp.packed(gl.zeros([TILE, BLOCK], mem.q.dtype, s_l))
        began = count
        y_tile = hp.opaque(gl.arange(0, TILE, gl.SliceLayout(1, s_l)))
        y = row + y_tile
        exists = y < plan.rows
        if plan.tiles is not None:
            exists = y < gl.load(plan.tiles + at * 4 + 3)
            # positions, bounds and biases of local and remote rows stand behind one another
            y += gl.where(gl.load(plan.tiles + at * 4 + 1) > 0, score.local_rows, 0)
        key_bias = None
        if score.key_bias is not None:
            bias_at = score.key_bias + b64 * score.key_bias_sb + y
            if plan.tiles is None:
                key_bias = gl.load(bias_at, mask=exists, other=0.0) * hp.LOG2E
        k_pos = None
        if score.alibi_slopes is not None:
            k_pos = gl.load(score.positions + y, mask=exists, other=0)
        lo = gl.load(score.lo + b64 * score.lo_sb + y, mask=exists, other=0)
        hi = gl.load(score.hi + b64 * score.hi_sb + y, mask=exists, other=0)
        mbarrier.wait(mem.k_full, (at - first) & 1)
        k = None
        if c.HELD:
            k = hp.held(hp.panels_of(mem.k, 0, PANELS), BLOCK)
            if out.grad_buffers is None:
                mbarrier.arrive(mem.k_free, count=1)
        if score.key_bias is not None:
            if plan.tiles is not None:
                key_bias = gl.load(bias_at, mask=exists, other=0.0) * hp.LOG2E

        for g in range(plan.group):
            slope = hp.slope_of(score, h_kv * plan.group + g) if score.alibi_slopes is not None else None
            for part in range(segment, segment + masked):
                x, blocks, begin, end, origin, stride = hp.segment_of(plan.segments, part)
                own_lo, own_hi = hp.bounds_in(
                    lo, hi, hp.starts_of(score, b64), score, plan.segments, part, y_tile, y, exists
                )
                low, high = hp.limits(own_lo, own_hi, begin, end, origin, stride)
                for _j in range(blocks):
                    dv, weights = _weigh(
                        dv, weights, began, count, low, high, x, origin, stride, k_pos, slope, key_bias, k, score, mem, c,
                        True,
                    )  # fmt: skip
                    x += BLOCK
                    count += 1
        if score.alibi_slopes is not None:
            for g in range(plan.group):
                slope = hp.slope_of(score, h_kv * plan.group + g) if score.alibi_slopes is not None else None
                for part in range(segment + masked, segment + masked + full):
                    x, blocks, _begin, _end, origin, stride = hp.segment_of(plan.segments, part)
                    for _j in range(blocks):
                        dv, weights = _weigh(
                            dv, weights, began, count, lo, hi, x, origin, stride, k_pos, slope, key_bias, k, score, mem, c,
                            False,
                        )  # fmt: skip
                        x += BLOCK
                        count += 1
        else:
            for _j in range(full_blocks * plan.group):
                dv, weights = _weigh(
                    dv, weights, began, count, lo, hi, 0, 0, 0, k_pos, None, key_bias, k, score, mem, c, False,
                )  # fmt: skip
                count += 1
        if c.STAGES > 2:
            dv = hp.wait_for_sums(_begin_dv(count - 1, weights, dv, mem, c.STAGES))
            hp.arrive(FREE + _place(count - 1, c.STAGES)[0], 288)
        if out.grad_buffers is None:
            if not c.HELD:
                mbarrier.arrive(mem.k_free, count=1)
        else:
            # read again: kept through the loops it would cost registers there
            again = hp.opaque(gl.to_tensor(at))
            head, row, _s, _masked, _full, _m, _f, slot = hp.entry(plan.work, again)
            b64 = gl.cast(head // plan.heads, gl.int64)
            h_kv = head % plan.heads
        dv = [hp.lowered(x, mem.q.dtype) for x in dv]
        if out.error is not None:
            dv = hp.scaled(dv, gl.where(gl.load(out.error, volatile=True) == 0, 1.0, float("nan")))
        if slot >= 0:
            part_out = out.parts + gl.cast(slot, gl.int64) * (TILE * (c.D + c.DV)) + TILE * c.D
            hp.put_panels(part_out, c.DV, dv, 0, TILE, c.DV, False)
        elif out.grad_buffers is not None:
            begin = gl.load(plan.tiles + again * 4 + 2)
            own_rows = gl.load(plan.tiles + again * 4 + 3) - begin
            first_row = b64 * out.grad_buffer_rows * plan.heads + h_kv
            WIDTH: gl.constexpr = c.D_WIDTH + c.DV_WIDTH
            grad_buffer = hp.grad_buffer_of(out.grad_buffers, gl.load(plan.tiles + again * 4), first_row, WIDTH)
            buffer = _beginning(mem.k, c.GRAD_LAYOUT)
            _send(grad_buffer + c.D_WIDTH, plan.heads * WIDTH, dv, row - begin, own_rows, buffer, c.DV_WIDTH)
        else:
            target = out.dv + (b64 * out.dv_sb + gl.cast(h_kv, gl.int64) * out.dv_sh) * c.UNIT
            hp.put_panels(target, out.dv_ss * c.UNIT, dv, row, plan.rows, c.DV_WIDTH, c.ADD)
        if out.grad_buffers is not None:
            # the buffer was that of K: what comes next comes through another proxy
            fence_async_shared()
            mbarrier.arrive(mem.k_free, count=1)


@gluon.jit
def _send(target, stride, sums, y, rows, buffer, WIDTH: gl.constexpr):
    for i in gl.static_range(len(sums)):
        hp.send_grads(target, stride, sums[i], y, rows, buffer, i * sums[0].shape[1], WIDTH, sums[0].shape[1], CHUNK)


@gluon.jit
def _slopes(count, v, mem, c):
    """Begins dp - delta of a block, a product that starts from -delta."""
    s_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    V_PANELS: gl.constexpr = c.DV // mem.do.shape[4]
    st, phase = _place(count, c.STAGES)
    do = hp.panels_of(mem.do, st, V_PANELS)
    if v is None:
        v = hp.panels_of(mem.v, hp.opaque(gl.to_tensor(0)), V_PANELS)
    mbarrier.wait(mem.do_full.index(st), phase)
    minus_delta = gl.expand_dims(mem.delta.index(st).load(gl.SliceLayout(0, s_l)), 0)
    start, _zero = gl.broadcast(minus_delta, gl.zeros([TILE, BLOCK], gl.float32, s_l))
    return hp.begin_scores(v, do, start, True)


@gluon.jit
def _take(count, dp, dkey_bias, mem, c):
    """(ds as an operand, dkey_bias) from the weights of a block, when they come."""
    s_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    st = count & 1
    dp = hp.lowered(dp, mem.q.dtype)
    hp.sync(P_FULL + st, 256)
    ds = mem.p.index(st).load(s_l).to(gl.float32) * dp
    if c.WANT_KEY_BIAS:
        if c.SOFTCAP:
            dkey_bias += gl.sum(mem.p.index(st + P_STAGES).load(s_l).to(gl.float32) * dp, 1)
        else:
            dkey_bias += gl.sum(ds, 1)
    hp.arrive(P_FREE + st, 256)
    return hp.operand_of(ds.to(mem.q.dtype), mem.q), dkey_bias


@gluon.jit
def _begin_dk(count, ds, dk, mem, STAGES: gl.constexpr):
    st, phase = _place(count, STAGES)
    mbarrier.wait(mem.q_full.index(st), phase)
    return hp.begin_sums(ds, hp.panels_of(mem.q, st, len(dk)), dk)


@gluon.jit
def _make_dk(plan, out, score, mem, c):
    """dp, ds and dk of every tile of this program; which pairs are hidden is known from their weights."""
    V_PANELS: gl.constexpr = c.DV // mem.do.shape[4]
    s_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    rows_l: gl.constexpr = gl.SliceLayout(1, s_l)
    first = gl.load(plan.starts + gl.program_id(0))
    last = gl.load(plan.starts + gl.program_id(0) + 1)
    count = 0
    for at in range(first, last):
        head, row, _s, _masked, _full, masked_blocks, full_blocks, slot = hp.entry(plan.work, at)
        dk = hp.zero_sums(mem.q, c.D // mem.q.shape[4])
        dkey_bias = gl.zeros([TILE], gl.float32, rows_l)
        mbarrier.wait(mem.v_full, (at - first) & 1)
        v = None
        if c.HELD:
            v = hp.held(hp.panels_of(mem.v, 0, V_PANELS), BLOCK)
            if out.grad_buffers is None:
                mbarrier.arrive(mem.v_free, count=1)
        blocks = (masked_blocks + full_blocks) * plan.group
        dp = warpgroup_mma_wait(0, deps=[_slopes(count, v, mem, c)])
        for _j in range(blocks - 1):
            ds, dkey_bias = _take(count, dp, dkey_bias, mem, c)
            dp_token = _slopes(count + 1, v, mem, c)
            dk_tokens = _begin_dk(count, ds, dk, mem, c.STAGES)
            dp = warpgroup_mma_wait(len(dk), deps=[dp_token])
            dk = hp.wait_for_sums(dk_tokens)
            hp.arrive(FREE + _place(count, c.STAGES)[0], 288)
            count += 1
        ds, dkey_bias = _take(count, dp, dkey_bias, mem, c)
        dk = hp.wait_for_sums(_begin_dk(count, ds, dk, mem, c.STAGES))
        hp.arrive(FREE + _place(count, c.STAGES)[0], 288)
        count += 1
        if out.grad_buffers is None:
            if not c.HELD:
                mbarrier.arrive(mem.v_free, count=1)
        else:
            again = hp.opaque(gl.to_tensor(at))
            head, row, _s, _masked, _full, _m, _f, slot = hp.entry(plan.work, again)

        b = gl.cast(head // plan.heads, gl.int64)
        h_kv = gl.cast(head % plan.heads, gl.int64)
        y = hp.opaque(gl.arange(0, TILE, rows_l))
        if out.error is not None:
            health = gl.where(gl.load(out.error, volatile=True) == 0, 1.0, float("nan"))
            dk = hp.scaled(dk, score.softmax_scale * health)
            dkey_bias = dkey_bias * health
        else:
            dk = hp.scaled(dk, score.softmax_scale)
        if slot >= 0:
            hp.put_panels(out.parts + gl.cast(slot, gl.int64) * (TILE * (c.D + c.DV)), c.D, dk, 0, TILE, c.D, False)
            if c.WANT_KEY_BIAS:
                gl.store(out.dkey_bias_parts + slot * TILE + y, dkey_bias)
        elif out.grad_buffers is not None:
            side = gl.load(plan.tiles + again * 4)
            begin = gl.load(plan.tiles + again * 4 + 2)
            own_rows = gl.load(plan.tiles + again * 4 + 3) - begin
            WIDTH: gl.constexpr = c.D_WIDTH + c.DV_WIDTH
            first_row = b * out.grad_buffer_rows * plan.heads + h_kv
            grad_buffer = hp.grad_buffer_of(out.grad_buffers, side, first_row, WIDTH)
            _send(
                grad_buffer, plan.heads * WIDTH, dk, row - begin, own_rows, _beginning(mem.v, c.GRAD_LAYOUT), c.D_WIDTH
            )
            if c.WANT_KEY_BIAS:
                line = hp.grad_buffer_of(out.dkey_bias, side, head, out.grad_buffer_rows) + (row - begin)
                gl.store(line + y, dkey_bias, mask=y < own_rows - (row - begin))
        else:
            target = out.dk + (b * out.dk_sb + h_kv * out.dk_sh) * c.UNIT
            hp.put_panels(target, out.dk_ss * c.UNIT, dk, row, plan.rows, c.D_WIDTH, c.ADD)
            if c.WANT_KEY_BIAS:
                at_row = out.dkey_bias + gl.cast(head, gl.int64) * plan.rows + row + y
                gl.store(at_row, dkey_bias, mask=row + y < plan.rows)
        if out.grad_buffers is not None:
            fence_async_shared()
            mbarrier.arrive(mem.v_free, count=1)


@gluon.jit
def _specialize(plan, src, out, score, mem, c):
    gl.warp_specialize([
        (_make_dv, (plan, out, score, mem, c)),
        (_make_dk, (plan, out, score, mem, c)),
        (_produce, (plan, src, mem, c)),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon.jit(do_not_specialize=list(hp.RUNTIME))
def backward_dkv_wide_kernel(
    work, segments, starts, tiles, q_desc, do_desc, k_desc, v_desc, k_remote, v_remote, lse_desc, delta_desc, dk_out, dv_out,
    grad_buffers, flags, error, board, parts, dkey_bias_out, dkey_bias_parts, positions, lo_ptr, hi_ptr, alibi_slopes, key_bias,
    dk_sb, dk_ss, dk_sh, dv_sb, dv_ss, dv_sh, lo_sb, hi_sb, key_bias_sb, heads, group, rows, padded_queries, local_rows,
    grad_buffer_rows, flag_steps, flag_heads, timeout_us, epochs, lo_st, hi_st, scale, cap, softmax_scale,
    D: gl.constexpr, DV: gl.constexpr, D_WIDTH: gl.constexpr, DV_WIDTH: gl.constexpr, SOFTCAP: gl.constexpr,
    STAGES: gl.constexpr, HELD: gl.constexpr, ADD: gl.constexpr, UNIT: gl.constexpr,
    P_LAYOUT: gl.constexpr, GRAD_LAYOUT: gl.constexpr,
    num_warps: gl.constexpr,  # noqa: ARG001
):  # fmt: skip
    """dk, dv and dkey_bias of one ring step; `rows` are keys, `heads` key heads.

    q, do, k and v are described as rows of one head (`descriptors.rows_of`); lse in log2 units (infinity where a row saw
    nothing; in float16 less RAISED_BITS) and -delta as lists with heads of `padded_queries` numbers. dk and dv are written
    (under ADD: added to) in the dtype of their tensors, whose strides are in units of UNIT elements; `parts` takes those of
    split tiles, `64 D` and `64 DV` numbers for each slot. `dkey_bias_out` is `b hk t`, one sum per key head (of a fused
    call the addresses of regions `b hk grad_buffer_rows`), `dkey_bias_parts` `slots 64`. What is of fused calls is as in
    `backward_kernel`. dP of the next block is made beside dk of this one.
    """
    P_TILES: gl.constexpr = 2 * P_STAGES if SOFTCAP and dkey_bias_out is not None else P_STAGES
    PANELS: gl.constexpr = D // q_desc.block_type.shape[3]
    V_PANELS: gl.constexpr = DV // do_desc.block_type.shape[3]
    q_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES * PANELS, 1, 1, BLOCK, D // PANELS], q_desc.layout)
    do_s = gl.allocate_shared_memory(do_desc.dtype, [STAGES * V_PANELS, 1, 1, BLOCK, DV // V_PANELS], do_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [PANELS, 1, 1, TILE, D // PANELS], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [V_PANELS, 1, 1, TILE, DV // V_PANELS], v_desc.layout)
    p_s = gl.allocate_shared_memory(q_desc.dtype, [P_TILES, TILE, BLOCK], P_LAYOUT)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], lse_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], delta_desc.layout)
    of_tile = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_full = of_tile.index(0)
    k_free = of_tile.index(1)
    v_full = of_tile.index(2)
    v_free = of_tile.index(3)
    for n in gl.static_range(4):
        mbarrier.init(of_tile.index(n), count=1)
    for n in gl.static_range(STAGES):
        mbarrier.init(q_full.index(n), count=1)
        mbarrier.init(do_full.index(n), count=1)
    _specialize(
        hp.Plan(work, segments, starts, heads, group, rows, tiles),
        hp.Inputs(
            q_desc, do_desc, k_desc, v_desc, k_remote, v_remote, lse_desc, delta_desc, padded_queries, flags, error, flag_steps,
            flag_heads, timeout_us, board, epochs,
        ),
        Outputs(
            dk_out, dv_out, grad_buffers, grad_buffer_rows, error, parts, dkey_bias_out, dkey_bias_parts, dk_sb, dk_ss, dk_sh,
            dv_sb, dv_ss, dv_sh,
        ),
        hp.Score(
            positions, lo_ptr, hi_ptr, lo_sb, hi_sb, lo_st, hi_st, local_rows, alibi_slopes, key_bias, key_bias_sb, scale, cap,
            softmax_scale,
        ),
        Memory(q_s, do_s, k_s, v_s, p_s, lse_s, delta_s, k_full, k_free, v_full, v_free, q_full, do_full),
        Config(D, DV, D_WIDTH, DV_WIDTH, SOFTCAP, dkey_bias_out is not None, STAGES, HELD, ADD, UNIT, GRAD_LAYOUT),
    )  # fmt: skip
