"""The dq kernel: a tile of queries stays, keys and values stream past, and every sum has a fixed order.

It makes dq and dalibi of one ring step, the same bits from run to run: each row of dq has one writer (or, in a tile that was
split, one writer per part and one that adds the parts in order).

A program takes tiles of 128 rows of one query head, a consumer warpgroup 64 of them. Per block of keys:

    S  = Q K^T       P  = 2^(scale * S - lse2)      lse2, delta: two numbers per thread, in registers
    dP = dO V^T      dS = P * (dP - delta)
    dQ += dS K       dS from registers

Q and dO lie in shared memory for the whole tile; one producer warp streams K and V. The two warpgroups do not meet: while one
computes exponentials, the products of the other keep the tensor cores busy. Under LATE each issues dQ of a block behind S and dP of
the next, so that its own products run beneath its exponentials, too.
In a fused call the step of a segment says whether its rows are in the local or the remote buffer (Note [Sources] of
tile_scheduler.py). All of the remote buffer is there when this kernel runs; where another kernel waited for it in vain, `error`
is set and every result is NaN.
Named barriers: V_EMPTY + stage, K_EMPTY + stage, ROWS_EMPTY: both warpgroups have read the stage, or Q and dO.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
from collections import namedtuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from ringattn.kernels.attention.hopper import primitives as hp

V_EMPTY = gl.constexpr(8)
K_EMPTY = gl.constexpr(11)
ROWS_EMPTY = gl.constexpr(14)
TILE = gl.constexpr(128)  # rows of a tile
HALF = gl.constexpr(64)  # rows of a warpgroup

# arguments of the partitions; Note [Structs] of primitives.py
Inputs = namedtuple("Inputs", "q do k v k_remote v_remote lse delta lse_sb lse_sh delta_sb delta_sh board epochs")
Outputs = namedtuple("Outputs", "dq dalibi error part dalibi_part dq_sb dq_ss dq_sh dalibi_sb dalibi_sh")
Memory = namedtuple("Memory", "q do k v q_full do_full k_full v_full")
Config = namedtuple("Config", "D D_WIDTH DV BLOCK K_STAGES V_STAGES LATE SOFTCAP ADD UNIT")


@gluon.jit
def _produce(plan, src, mem, c):
    """Streams the tiles of this program: per block K then V; Q and dO of a tile behind its first K and V."""
    PANELS: gl.constexpr = c.D // src.q.block_type.shape[3]
    V_PANELS: gl.constexpr = c.DV // src.do.block_type.shape[3]
    segments = plan.segments
    first = gl.load(plan.starts + gl.program_id(0))
    last = gl.load(plan.starts + gl.program_id(0) + 1)
    count = 0
    epoch = 0
    for at in range(first, last):
        head, row, segment, masked, full, _m, _f, _s = hp.entry(plan.work, at)
        b = head // plan.heads
        h = head % plan.heads
        hk = h // plan.group
        fresh = 1
        for i in range(segment, segment + masked + full):
            y = gl.load(segments + i * 8)
            blocks = gl.load(segments + i * 8 + 1)
            step = 0
            if src.k_remote is not None:
                step = gl.load(segments + i * 8 + 6)
            for _j in range(blocks):
                if src.board is not None:
                    if count > 0 and count % hp.EPOCH == 0:
                        epoch = hp.wait_for_progress(src.board, epoch, src.epochs)
                stage = count % c.K_STAGES
                if count >= c.K_STAGES:
                    hp.sync(K_EMPTY + stage, 288)
                hp.load_panels(src.k, src.k_remote, step, b, hk, y, mem.k_full.index(stage), mem.k, stage, PANELS, 0)
                if fresh == 1:
                    if at > first:
                        hp.sync(ROWS_EMPTY, 288)
                    for w in gl.static_range(2):
                        hp.load_panels(src.q, None, 0, b, h, row + w * HALF, mem.q_full.index(w), mem.q, w, PANELS, 0)
                stage = count % c.V_STAGES
                if count >= c.V_STAGES:
                    hp.sync(V_EMPTY + stage, 288)
                hp.load_panels(src.v, src.v_remote, step, b, hk, y, mem.v_full.index(stage), mem.v, stage, V_PANELS, 0)
                if fresh == 1:
                    for w in gl.static_range(2):
                        hp.load_panels(
                            src.do, None, 0, b, h, row + w * HALF, mem.do_full.index(w), mem.do, w, V_PANELS, 0
                        )
                fresh = 0
                y += src.k.block_type.shape[2]
                count += 1
    if src.board is not None:
        hp.exit_barrier(src.board, epoch, src.epochs)


@gluon.jit
def _step(
    W: gl.constexpr, dq, before, began, dalibi, count, lse2, delta, q_pos, low, high, y, origin, stride, slope, key_bias, score,
    mem, c, MASKED: gl.constexpr, WANT_ALIBI: gl.constexpr,
):  # fmt: skip
    """Adds what a block of keys, rows `y` onwards of the buffer, sends to the 64 queries of a warpgroup: (dq, ds, dalibi).

    Under LATE it adds `before`, the ds of the block before, instead. `began`: number of the first block of the tile.
    """
    V_PANELS: gl.constexpr = c.DV // mem.do.shape[4]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.BLOCK, 16])
    columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    zero = gl.zeros([HALF, c.BLOCK], gl.float32, s_layout)
    k_stage = count % c.K_STAGES
    v_stage = count % c.V_STAGES
    # the same address, computed where it stands: held through the loop, the descriptors of all its slices fill 100 registers
    warpgroup = hp.opaque(gl.to_tensor(W))
    q = hp.panels_of(mem.q, warpgroup, len(dq))
    do = hp.panels_of(mem.do, warpgroup, V_PANELS)
    if c.V_STAGES == 1:
        v_stage = hp.opaque(v_stage)
    k = hp.panels_of(mem.k, k_stage, len(dq))
    v = hp.panels_of(mem.v, v_stage, V_PANELS)

    mbarrier.wait(mem.k_full.index(k_stage), (count // c.K_STAGES) & 1)
    s_token = hp.begin_scores(q, k, zero, False)
    mbarrier.wait(mem.v_full.index(v_stage), (count // c.V_STAGES) & 1)
    dp_token = hp.begin_scores(do, v, zero, False)
    x = gl.arange(0, c.BLOCK, columns)
    if slope is not None or key_bias is not None:
        x = hp.opaque(x)  # hoisted it would cost registers; masks alone are better off without
    x = y + x
    bias = zero
    if key_bias is not None:
        bias = gl.load(key_bias + x, mask=x < score.keys, other=0.0) * hp.LOG2E
    if c.LATE:
        # before the first block of a tile it adds ds of 0
        dq_tokens = _begin_dq(gl.maximum(count - 1, began), before, dq, mem, c)
        s = warpgroup_mma_wait(V_PANELS + len(dq), deps=[s_token])
    else:
        s = warpgroup_mma_wait(V_PANELS, deps=[s_token])

    s = s * score.scale
    tanh = s
    if c.SOFTCAP:
        tanh = hp.tanh(s)
        s = tanh * score.cap
    if slope is not None:
        k_pos = origin + stride * x
        distance = gl.abs(gl.expand_dims(q_pos, 1) - gl.expand_dims(k_pos, 0)).to(gl.float32)
        s = s - distance * (slope * hp.LOG2E)
    if key_bias is not None:
        s = s + gl.expand_dims(bias, 0)
    p = gl.exp2(s - gl.expand_dims(lse2, 1))
    if MASKED:
        column = gl.expand_dims(x, 0)
        visible = (column >= gl.expand_dims(low, 1)) & (column < gl.expand_dims(high, 1))
        p = gl.where(visible, p, 0.0)

    if c.LATE:
        # this wait is over: a branch, past which the compiler moves no exponentials
        mbarrier.wait(mem.k_full.index(k_stage), (count // c.K_STAGES) & 1)
    dp = warpgroup_mma_wait(len(dq) if c.LATE else 0, deps=[dp_token])
    hp.arrive(V_EMPTY + v_stage, 288)
    ds = p * (dp - gl.expand_dims(delta, 1))
    if WANT_ALIBI:
        # made again: held since the scores it would cost as many registers as they
        here = gl.expand_dims(hp.opaque(q_pos), 1)
        dalibi -= gl.sum(ds * gl.abs(here - gl.expand_dims(origin + stride * x, 0)).to(gl.float32), 1)
    if c.SOFTCAP:
        ds = ds * (1.0 - tanh * tanh)
    ds = ds.to(mem.k.dtype)
    if c.LATE:
        ds = hp.packed(ds)
        # as above: what makes ds stays before the wait, too
        mbarrier.wait(mem.k_full.index(k_stage), (count // c.K_STAGES) & 1)
        dq = hp.wait_for_sums(dq_tokens)
        if count > began:
            hp.arrive(K_EMPTY + (count - 1) % c.K_STAGES, 288)
    else:
        dq = _end_dq(count, ds, dq, mem, c)
    return dq, ds, dalibi


@gluon.jit
def _begin_dq(count, ds, dq, mem, c):
    k = hp.panels_of(mem.k, count % c.K_STAGES, len(dq))
    return hp.begin_sums(hp.operand_of(ds, mem.k), k, dq)


@gluon.jit
def _end_dq(count, ds, dq, mem, c):
    dq = hp.wait_for_sums(_begin_dq(count, ds, dq, mem, c))
    hp.arrive(K_EMPTY + count % c.K_STAGES, 288)
    return dq


@gluon.jit
def _consume(W: gl.constexpr, plan, src, out, score, mem, c):
    """Makes rows W * 64 .. W * 64 + 63 of every tile of this program."""
    segments = plan.segments
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.BLOCK, 16])
    of_s: gl.constexpr = gl.SliceLayout(1, s_layout)
    WANT_ALIBI: gl.constexpr = out.dalibi is not None
    first = gl.load(plan.starts + gl.program_id(0))
    last = gl.load(plan.starts + gl.program_id(0) + 1)
    count = 0
    for at in range(first, last):
        head, row, segment, masked, full, _m, _f, slot = hp.entry(plan.work, at)
        b = head // plan.heads
        h = head % plan.heads
        b64 = gl.cast(b, gl.int64)
        h64 = gl.cast(h, gl.int64)
        x = row + W * HALF + gl.arange(0, HALF, of_s)
        exists = x < plan.rows
        lse2 = gl.load(src.lse + b64 * src.lse_sb + h64 * src.lse_sh + x, mask=exists, other=float("-inf")) * hp.LOG2E
        # rows that saw nothing: all their weights are 0
        lse2 = gl.where(lse2 == float("-inf"), float("inf"), lse2)
        delta = gl.load(src.delta + b64 * src.delta_sb + h64 * src.delta_sh + x, mask=exists, other=0.0)
        q_pos = x
        slope = None
        if score.alibi_slopes is not None:
            q_pos = gl.load(score.positions + x, mask=exists, other=0)
            slope = gl.load(score.alibi_slopes + h)
        bias = None
        if score.key_bias is not None:
            bias = score.key_bias + b64 * score.key_bias_sb
        dq = hp.zero_sums(mem.k, c.D // mem.k.shape[4])
        dalibi = gl.zeros([HALF], gl.float32, of_s)
        ds = gl.zeros([HALF, c.BLOCK], mem.k.dtype, s_layout)
        if c.LATE:
            ds = hp.packed(ds)
        began = count

        mbarrier.wait(mem.q_full.index(W), (at - first) & 1)
        mbarrier.wait(mem.do_full.index(W), (at - first) & 1)
        for i in range(segment, segment + masked):
            y, blocks, begin, end, origin, stride = hp.segment_of(segments, i)
            lo = gl.load(score.lo + b64 * score.lo_sb + x, mask=exists, other=0)
            hi = gl.load(score.hi + b64 * score.hi_sb + x, mask=exists, other=0)
            lo, hi = hp.bounds_in(lo, hi, hp.starts_of(score, b64), score, segments, i, x - row, x, exists)
            low, high = hp.limits(lo, hi, begin, end, origin, stride)
            of_source = bias
            if score.local_rows is not None:
                of_source = bias + hp.rows_ahead(segments, i, score.local_rows)
            for _j in range(blocks):
                dq, ds, dalibi = _step(
                    W, dq, ds, began, dalibi, count, lse2, delta, q_pos, low, high, y, origin, stride, slope, of_source, score,
                    mem, c, True, WANT_ALIBI,
                )  # fmt: skip
                y += c.BLOCK
                count += 1
        for i in range(segment + masked, segment + masked + full):
            y, blocks, _begin, _end, origin, stride = hp.segment_of(segments, i)
            of_source = bias
            if score.local_rows is not None:
                of_source = bias + hp.rows_ahead(segments, i, score.local_rows)
            for _j in range(blocks):
                dq, ds, dalibi = _step(
                    W, dq, ds, began, dalibi, count, lse2, delta, q_pos, x, x, y, origin, stride, slope, of_source, score,
                    mem, c, False, WANT_ALIBI,
                )  # fmt: skip
                y += c.BLOCK
                count += 1
        hp.arrive(ROWS_EMPTY, 288)
        if c.LATE:
            if count > began:
                dq = _end_dq(count - 1, ds, dq, mem, c)
        if out.error is not None:
            health = gl.where(gl.load(out.error, volatile=True) == 0, 1.0, float("nan"))
            dq = hp.scaled(dq, health)
            dalibi = dalibi * health

        if slot >= 0:
            tile = gl.cast(slot, gl.int64) * TILE + W * HALF
            hp.put_panels(out.part + tile * c.D, c.D, dq, 0, HALF, c.D, False)
            if WANT_ALIBI:
                gl.store(out.dalibi_part + tile + gl.arange(0, HALF, of_s), dalibi)
        else:
            target = out.dq + (b64 * out.dq_sb + h64 * out.dq_sh) * c.UNIT
            hp.put_panels(
                target,
                out.dq_ss * c.UNIT,
                hp.scaled(dq, score.softmax_scale),
                row + W * HALF,
                plan.rows,
                c.D_WIDTH,
                c.ADD,
            )
            if WANT_ALIBI:
                sums = out.dalibi + b64 * out.dalibi_sb + h64 * out.dalibi_sh + x
                if c.ADD:
                    gl.store(sums, dalibi + gl.load(sums, mask=exists, other=0.0), mask=exists)
                else:
                    gl.store(sums, dalibi, mask=exists)


@gluon.jit
def _specialize(plan, src, out, score, mem, c):
    gl.warp_specialize([
        (_consume, (gl.constexpr(0), plan, src, out, score, mem, c)),
        (_consume, (gl.constexpr(1), plan, src, out, score, mem, c)),
        (_produce, (plan, src, mem, c)),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon.jit(do_not_specialize=list(hp.RUNTIME))
def backward_dq_kernel(
    work, starts, segments, q_desc, do_desc, k_desc, v_desc, k_remote, v_remote, lse, delta, dq_out, dalibi_out, error, board, part,
    dalibi_part, positions, lo, hi, alibi_slopes, key_bias, lse_sb, lse_sh, delta_sb, delta_sh, dq_sb, dq_ss, dq_sh, dalibi_sb,
    dalibi_sh, lo_sb, hi_sb, key_bias_sb, heads, group, rows, keys, local_rows, epochs, lo_st, hi_st, softmax_scale, scale, cap,
    SOFTCAP: gl.constexpr, ADD: gl.constexpr, UNIT: gl.constexpr, D: gl.constexpr, D_WIDTH: gl.constexpr, DV:
    gl.constexpr, BLOCK: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, LATE: gl.constexpr,
    num_warps: gl.constexpr,  # noqa: ARG001
):  # fmt: skip
    """Make dq and dalibi of the tiles of this program.

    `lse` (natural log), `delta` and `dalibi_out` are `b h s`; `dq_out` is `b s h d`, its strides counted in UNIT elements,
    so that the compiler sees when pairs of columns are aligned. `part` (`slots 128 D`) and `dalibi_part` take unscaled sums of
    tiles that were split.
    """
    PANELS: gl.constexpr = D // q_desc.block_type.shape[3]
    V_PANELS: gl.constexpr = DV // do_desc.block_type.shape[3]
    q_s = gl.allocate_shared_memory(q_desc.dtype, [2 * PANELS, 1, 1, HALF, D // PANELS], q_desc.layout)
    do_s = gl.allocate_shared_memory(do_desc.dtype, [2 * V_PANELS, 1, 1, HALF, DV // V_PANELS], do_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [K_STAGES * PANELS, 1, 1, BLOCK, D // PANELS], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [V_STAGES * V_PANELS, 1, 1, BLOCK, DV // V_PANELS], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
    for i in gl.static_range(K_STAGES):
        mbarrier.init(k_full.index(i), count=1)
    for i in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(i), count=1)
    _specialize(
        hp.Plan(work, segments, starts, heads, group, rows),
        Inputs(q_desc, do_desc, k_desc, v_desc, k_remote, v_remote, lse, delta, lse_sb, lse_sh, delta_sb, delta_sh, board, epochs),
        Outputs(dq_out, dalibi_out, error, part, dalibi_part, dq_sb, dq_ss, dq_sh, dalibi_sb, dalibi_sh),
        hp.Score(
            positions, lo, hi, lo_sb, hi_sb, lo_st, hi_st, local_rows, alibi_slopes, key_bias, key_bias_sb, scale, cap,
            softmax_scale, keys=keys,
        ),
        Memory(q_s, do_s, k_s, v_s, q_full, do_full, k_full, v_full),
        Config(D, D_WIDTH, DV, BLOCK, K_STAGES, V_STAGES, LATE, SOFTCAP, ADD, UNIT),
    )  # fmt: skip


@triton.jit(do_not_specialize=["dq_sb", "dq_ss", "dq_sh", "dalibi_sb", "dalibi_sh", "num_heads", "rows"])
def add_parts_kernel(
    splits, part, dalibi_part, dq_out, dalibi_out, dq_sb, dq_ss, dq_sh, dalibi_sb, dalibi_sh, num_heads, rows, softmax_scale,
    ADD: tl.constexpr, D: tl.constexpr, D_WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Adds the parts of a split tile in slot order; a program owns CHUNK rows of one tile."""
    base = splits + tl.program_id(1) * 4
    head = tl.load(base)
    row = tl.load(base + 1)
    slot = tl.load(base + 2)
    parts = tl.load(base + 3)
    b = (head // num_heads).to(tl.int64)
    h = (head % num_heads).to(tl.int64)
    r = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    SPAN: tl.constexpr = triton.next_power_of_2(D)
    c = tl.arange(0, SPAN)[None, :]
    dq = tl.zeros([CHUNK, SPAN], tl.float32)
    dalibi = tl.zeros([CHUNK], tl.float32)
    for i in range(parts):
        at = (slot + i).to(tl.int64) * 128 + r
        dq += tl.load(part + at[:, None] * D + c, mask=c < D, other=0.0)
        if dalibi_out is not None:
            dalibi += tl.load(dalibi_part + at)
    x = row + r
    mask = (x < rows)[:, None] & (c < D_WIDTH)
    target = dq_out + b * dq_sb + h * dq_sh + (x.to(tl.int64)[:, None] * dq_ss + c)
    dq = dq * softmax_scale
    if ADD:
        dq += tl.load(target, mask=mask, other=0.0)
    tl.store(target, dq.to(dq_out.dtype.element_ty), mask=mask)
    if dalibi_out is not None:
        target = dalibi_out + b * dalibi_sb + h * dalibi_sh + x
        if ADD:
            dalibi += tl.load(target, mask=x < rows, other=0.0)
        tl.store(target, dalibi, mask=x < rows)
