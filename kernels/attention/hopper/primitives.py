"""Parts of every Hopper kernel: named barriers, copies that add, tiles of the work plan, limits of visibility.

Triton gives the barriers 0, 1, 2, ... to the partitions of a kernel; 8 to 15 are free and are named by the kernels.

Note [Structs]
    Helpers of a kernel take named tuples: Triton 3.6 to 3.8 pass their tensors, constants and None on as single arguments.
    A tuple of constants is made in the call that it is passed to: assigned to a variable, its constants become run-time values,
    and the same holds for what a helper returns. Therefore `_specialize` starts the partitions.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false, reportOperatorIssue=false
from collections import namedtuple

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ringattn.kernels import constants
from ringattn.kernels.attention.arguments import RAISED_BITS

RAISING = gl.constexpr(2.0**RAISED_BITS)
LOWERING = gl.constexpr(2.0**-RAISED_BITS)
Plan = namedtuple(
    "Plan", "work segments starts heads group rows tiles near turns counters ticket limit_us", defaults=(None,) * 6
)
Score = namedtuple(
    "Score", "positions lo hi lo_sb hi_sb lo_st hi_st local_rows alibi_slopes key_bias key_bias_sb scale cap softmax_scale keys "
    "sinks",
    defaults=(None, None, None),
)  # fmt: skip
Inputs = namedtuple(
    "Inputs", "q do k v k_remote v_remote lse delta padded_queries flags error flag_steps flag_heads timeout_us board epochs"
)  # fmt: skip
"""Of the kernels of dk and dv."""

RUNTIME = (
    "o_sb", "o_ss", "o_sh", "acc_sb", "acc_ss", "acc_sh", "lse_sb", "lse_sh", "m_sb", "m_sh", "l_sb", "l_sh", "delta_sb",
    "delta_sh", "dq_sb", "dq_ss", "dq_sh", "dk_sb", "dk_ss", "dk_sh", "dv_sb", "dv_ss", "dv_sh", "dalibi_sb", "dalibi_sh",
    "lo_sb", "hi_sb", "lo_st", "hi_st", "key_bias_sb", "heads", "group", "rows", "keys", "queries", "padded_queries",
    "local_rows", "grad_buffer_rows", "flag_heads", "flag_steps", "timeout_us", "epochs", "near", "limit_us",
)  # fmt: skip
"""Integers of the kernels that multiply: none is specialised on one."""

LOG2E = gl.constexpr(constants.LOG2E)
LN2 = gl.constexpr(constants.LN2)
EPOCH = gl.constexpr(64)  # blocks between two looks at the board; see progress_barrier.py
LEFT = gl.constexpr(2**30)  # beyond every epoch


@gluon.constexpr_function
def _barrier(kind, threads):
    return f"bar.{kind} $1, {threads}; mov.u32 $0, 0;"


@gluon.jit
def sync(barrier, THREADS: gl.constexpr):
    """Waits until THREADS threads, this warpgroup's among them, have arrived at a named barrier."""
    asm: gl.constexpr = _barrier("sync", THREADS)
    gl.inline_asm_elementwise(asm, "=r,r", [gl.to_tensor(barrier)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def arrive(barrier, THREADS: gl.constexpr):
    """Counts the threads of this partition at a named barrier without waiting."""
    asm: gl.constexpr = _barrier("arrive", THREADS)
    gl.inline_asm_elementwise(asm, "=r,r", [gl.to_tensor(barrier)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_flag(flag, error, timeout_us):
    """Wait until *flag is 1, and return 1; the same to all threads of a warp.

    The load acquires at the scope of the system; bulk copies read through a proxy of their own, so a fence between the
    proxies follows it.

    A negative flag, or a timeout (patience, microseconds), sets *error and returns 0.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred p; .reg .s32 v; .reg .u64 began, now;
        mov.u64 began, %globaltimer;
        POLL:
        ld.acquire.sys.global.s32 v, [$1];
        setp.ne.s32 p, v, 0;
        @p bra SEEN;
        mov.u64 now, %globaltimer;
        sub.s64 now, now, began;
        setp.gt.s64 p, now, $3;
        @p bra SEEN;
        nanosleep.u32 64;
        bra POLL;
        SEEN:
        setp.le.s32 p, v, 0;
        vote.sync.any.pred p, p, -1;
        @p st.relaxed.sys.global.s32 [$2], 1;
        fence.proxy.async.global;
        selp.s32 $0, 0, 1, p;
        }""",
        "=r,l,l,l",
        [flag, error, gl.to_tensor(timeout_us).to(gl.int64) * 1000],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait_for_progress(board, epoch, epochs):
    """Report that this program has ended an epoch, and wait for those that are more than one behind.

    Args:
        board: `epochs` int32: how many programs have ended each epoch.
    """
    if epoch < LEFT:
        enough = gl.where(epoch > 0, gl.num_programs(0), 0)
        in_time = _check_in(board + epoch, board + gl.maximum(epoch - 1, 0), enough)
        epoch += 1
        if in_time == 0:
            exit_barrier(board, epoch, epochs)
            epoch = LEFT
    return epoch


@gluon.jit
def exit_barrier(board, epoch, epochs):
    """Report all remaining epochs at once, so that no program waits for this one."""
    for i in range(epoch, epochs):
        _check_in(board + i, board + i, 0)


@gluon.jit
def _check_in(place, awaited, enough):
    """Counts this program at a place, and waits until another place counts enough: 1, or after 20 ms 0."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred p; .reg .u32 lane; .reg .s32 v; .reg .u64 began, now;
        mov.u32 lane, %laneid;
        setp.eq.u32 p, lane, 0;
        @p red.relaxed.gpu.global.add.s32 [$1], 1;
        mov.u64 began, %globaltimer;
        POLL:
        ld.relaxed.gpu.global.s32 v, [$2];
        setp.ge.s32 p, v, $3;
        @p bra SEEN;
        mov.u64 now, %globaltimer;
        sub.s64 now, now, began;
        setp.gt.s64 p, now, 20000000;
        @p bra SEEN;
        nanosleep.u32 32;
        bra POLL;
        SEEN:
        setp.ge.s32 p, v, $3;
        vote.sync.all.pred p, p, -1;
        selp.s32 $0, 1, 0, p;
        }""",
        "=r,l,l,r",
        [place, awaited, gl.to_tensor(enough)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait_turn(counter, turn, limit_us):
    """Waits until *counter is `turn`, and bulk copies see what was added before; traps after `limit_us` microseconds."""
    asm: gl.constexpr = """{ .reg .pred p; .reg .s32 v; .reg .u64 began, now; mov.u64 began, %globaltimer;
        POLL: ld.acquire.gpu.global.s32 v, [$1]; setp.ge.s32 p, v, $2; @p bra SEEN;
        mov.u64 now, %globaltimer; sub.s64 now, now, began; setp.gt.s64 p, now, $3; @p trap; bra POLL;
        SEEN: fence.proxy.async.global; mov.u32 $0, 0; }"""
    limit = gl.to_tensor(limit_us).to(gl.int64) * 1000
    gl.inline_asm_elementwise(asm, "=r,l,r,l", [counter, turn, limit], dtype=gl.int32, is_pure=False, pack=1)


def _passing(left: int) -> gl.constexpr:
    return gl.constexpr(
        f"{{ .reg .pred p; .reg .u32 lane; cp.async.bulk.wait_group {left}; fence.proxy.async.global; bar.warp.sync -1; "
        "mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; @p red.release.gpu.global.add.s32 [$1], 1; mov.u32 $0, 0; }"
    )


PASS_LAST = _passing(0)
PASS_EARLIER = _passing(2)


@gluon.jit
def pass_turn(counter, how: gl.constexpr):
    """Adds 1 to *counter once sums of this warp's bulk copies are in memory, all (PASS_LAST) or but the last two (PASS_EARLIER).

    `tma.store_wait` is over earlier.
    """
    gl.inline_asm_elementwise(how, "=r,l", [counter], dtype=gl.int32, is_pure=False, pack=1)


@builtin
def reduce_add(descriptor, coordinates, source, _semantic=None):
    """Adds a tile of shared memory to global memory through the bulk copy engine; `tma.store_wait` waits for it."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, source.handle
    )


@gluon.jit
def opaque(x):
    """Return an int32 tensor that is computed in place: hoisted out of a loop it would hold registers through it."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pinned(x):
    """Return an fp32 tensor in registers of its own: the copy cannot move behind a product that needs it."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def packed(p):
    """Return 16-bit weights, two to a register: halves that a loop carries cost a permutation each in each round."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [p], dtype=p.dtype, is_pure=False, pack=2)


@gluon.jit
def reciprocal(x):
    """1 / x to the last bit or so; 0 for infinity."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def tanh(x):
    """Hyperbolic tangent."""
    return 1.0 - 2.0 / (1.0 + gl.exp2(x * (2.0 * LOG2E)))


@gluon.jit
def load_from(local, remote, step, place, full, target):
    """Loads a block from where its source lies: local, or remote (None: there is none) for steps above 0."""
    if remote is None:
        tma.async_copy_global_to_shared(local, place, full, target)
    elif step > 0:
        tma.async_copy_global_to_shared(remote, place, full, target)
    else:
        tma.async_copy_global_to_shared(local, place, full, target)


@gluon.jit
def load_panels(local, remote, step, b, h, row, full, buffer, stage, PANELS: gl.constexpr, MORE: gl.constexpr):
    """Loads a block of rows of a head as PANELS panels of columns; its barrier expects MORE bytes besides."""
    mbarrier.expect(full, PANELS * local.block_type.nbytes + MORE)
    for i in gl.static_range(PANELS):
        place = [b, h, row, i * local.block_type.shape[3]]
        load_from(local, remote, step, place, full, buffer.index(stage * PANELS + i))


@gluon.jit
def panel_of(buffer, i):
    """Return a panel of a buffer as rows x columns."""
    return buffer.index(i).reshape([buffer.shape[3], buffer.shape[4]])


@gluon.jit
def panels_of(buffer, stage, PANELS: gl.constexpr):
    """Return the panels of a stage as rows x columns each."""
    panels = ()
    for i in gl.static_range(PANELS):
        panels += (panel_of(buffer, stage * PANELS + i),)
    return panels


@gluon.jit
def held(panels, COLUMNS: gl.constexpr):
    """Return panels in registers, as first operands of products that are COLUMNS wide."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    return [x.load(gl.DotOperandLayout(0, layout, 2)) for x in panels]


@gluon.jit
def begin_scores(a, b, start, USE_START: gl.constexpr):
    """Begins a b^T, or a b^T + start; one product in flight for each panel."""
    token = warpgroup_mma(a[0], b[0].permute((1, 0)), start, use_acc=USE_START, is_async=True)
    for i in gl.static_range(1, len(a)):
        token = warpgroup_mma(a[i], b[i].permute((1, 0)), token, is_async=True)
    return token


@gluon.jit
def zero_sums(buffer, PANELS: gl.constexpr):
    """Return zeros for sums of 64 rows, as wide as each panel of a buffer."""
    COLUMNS: gl.constexpr = buffer.shape[4]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    sums = ()
    for _i in gl.static_range(PANELS):
        sums += (gl.zeros([64, COLUMNS], gl.float32, layout),)
    return sums


@gluon.jit
def operand_of(weights, buffer):
    """Return weights as the first operand of products with the panels of a buffer."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, buffer.shape[4], 16])
    return gl.convert_layout(weights, gl.DotOperandLayout(0, layout, 2))


@gluon.jit
def begin_sums(weights, b, sums):
    """Begins sums + weights b for each panel of b; `weights` as `operand_of` returns them."""
    tokens = ()
    for i in gl.static_range(len(sums)):
        tokens += (warpgroup_mma(weights, b[i], sums[i], is_async=True),)
    return tokens


@gluon.jit
def wait_for_sums(tokens):
    """Return sums when all products are done."""
    sums = warpgroup_mma_wait(0, deps=tokens)
    if len(tokens) == 1:
        sums = (sums,)
    return sums


@gluon.jit
def scaled(sums, factor):
    """Return each panel of sums times a factor."""
    return [x * factor for x in sums]


@gluon.constexpr_function
def _scaling(count):
    """(assembly, constraints) that multiply `count` registers by as many others unless no row of the warp changes."""
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count))
    # the elements 0 and 2 of an accumulator lie in the two rows of a thread
    changes = f"setp.neu.f32 p, ${2 * count}, 0f3F800000; setp.neu.or.f32 p, ${2 * count + 2}, 0f3F800000, p;"
    asm = f"{{ .reg .pred p; {changes} vote.sync.any.pred p, p, -1; @!p bra SAME; {products} SAME: }}"
    return asm, ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def scaled_unless_one(acc, alpha):
    """Return an accumulator times a number per row, skipped by warps in whose rows it is 1."""
    asm: gl.constexpr = _scaling(acc.shape[1] // 2)
    alpha, acc = gl.broadcast(gl.expand_dims(alpha, 1), acc)
    return gl.inline_asm_elementwise(
        asm[0], asm[1], [acc, alpha], dtype=gl.float32, is_pure=True, pack=acc.shape[1] // 2
    )


@gluon.jit
def rounded(p, DTYPE: gl.constexpr):
    """Return weights as first operands of dv; Note [Raised weights] of arguments.py."""
    if DTYPE == gl.float16:
        p = p * RAISING
    return p.to(DTYPE)


@gluon.jit
def lowered(x, DTYPE: gl.constexpr):
    """Undo Note [Raised weights] of arguments.py in what was made of weights of a dtype."""
    if DTYPE == gl.float16:
        x = x * LOWERING
    return x


@gluon.jit
def entry(work, at):
    """(head, row, segment, masked, full, masked_blocks, full_blocks, slot) of entry `at`; Note [Work] in tile_scheduler.py."""
    base = work + at * 8
    return (
        gl.load(base), gl.load(base + 1), gl.load(base + 2), gl.load(base + 3),
        gl.load(base + 4), gl.load(base + 5), gl.load(base + 6), gl.load(base + 7),
    )  # fmt: skip


@gluon.jit
def segment_of(segments, i):
    """(row, blocks, begin, end, origin, stride) of segment i; Note [Work] in tile_scheduler.py."""
    base = segments + i * 8
    return gl.load(base), gl.load(base + 1), gl.load(base + 2), gl.load(base + 3), gl.load(base + 4), gl.load(base + 5)


@gluon.jit
def slope_of(score, h):
    """ALiBi slope of a query head in log2 units."""
    return gl.load(score.alibi_slopes + h) * LOG2E


@gluon.jit
def rows_ahead(segments, i, local_rows):
    """Rows that stand before those of the buffer of segment i in tables of local and remote rows: none, or the local ones."""
    return gl.where(gl.load(segments + i * 8 + 6) > 0, local_rows, 0)


@gluon.jit
def starts_of(score, b):
    """Where the bounds of a batch element, in 64 bits, begin: (lo, hi)."""
    return score.lo + b * score.lo_sb, score.hi + b * score.hi_sb


@gluon.jit
def bounds_in(lo, hi, starts, score, segments, i, r, x, exists):
    """Return the bounds of rows in segment i.

    Those of the segment's term, and none for rows outside its piece (Note [Pieces] of tile_scheduler.py), where the mask has
    terms; else lo and hi themselves.

    Args:
        starts: See `starts_of`.
        r: Rows, counted from the first one of the tile.
        x: The same rows, as they are counted in the bounds.
        exists: Which rows exist.
    """
    if score.lo_st is not None:
        label = gl.load(segments + i * 8 + 7)
        term = gl.cast(label & 255, gl.int64)
        within = exists & (r >= ((label >> 8) & 4095)) & (r < (label >> 20))
        # products with strides are made here: made outside of a loop they would be spilled
        lo = gl.load(starts[0] + term * opaque(gl.to_tensor(score.lo_st)) + x, mask=within, other=0)
        hi = gl.load(starts[1] + term * opaque(gl.to_tensor(score.hi_st)) + x, mask=within, other=0)
    return lo, hi


@gluon.jit
def limits(lo, hi, begin, end, origin, stride):
    """(low, high): rows of the streamed buffer that a tile row with bounds lo, hi sees of a run.

    Comparing row numbers divides positions once per segment and not at every pair.
    """
    low = begin + _rows_before(lo, begin, end, origin, stride)
    high = begin + _rows_before(hi, begin, end, origin, stride)
    return low, high


@gluon.jit
def _rows_before(position, begin, end, origin, stride):
    start = origin + stride * begin
    distance = gl.minimum(gl.maximum(position - start, 0), (end - begin) * stride)
    return (distance + stride - 1) // stride


@gluon.jit
def _bits_from(limit):
    """Words with a bit per column of a thread, 2 i + j for column 8 i + j of 128, set for the columns from `limit` on."""
    limit = gl.minimum(gl.maximum(limit, 0), 127).to(gl.uint32)  # shifts of 30 and 2, since one by 32 is undefined
    return (0xFFFFFFFF << ((limit >> 3) * 2)) << gl.minimum(limit & 7, 2)


@gluon.jit
def hide(s, low, high, first, COLUMNS: gl.constexpr):
    """Return the scores of a block with the pairs outside [low, high) at -inf; `first`: row of the buffer in column 0.

    A word per row says which columns are visible; the assembler turns its bits into predicates six at a time.
    """
    column = gl.arange(0, s.shape[1], COLUMNS)
    # bits 1 and 2 of a column number are those of a thread, the others constants
    here, lane = gl.expand_dims(column & ~6, 0), gl.expand_dims(column & 6, 0)
    bits = _bits_from(gl.expand_dims(low, 1) - lane - first) & ~_bits_from(gl.expand_dims(high, 1) - lane - first)
    bit, bits = gl.broadcast(1 << ((here >> 2) | (here & 1)).to(gl.uint32), bits)
    # in assembly, because LLVM makes comparisons of the bits again
    return gl.inline_asm_elementwise(
        """{
        .reg .pred p; .reg .b32 t;
        and.b32 t, $2, $3;
        setp.ne.u32 p, t, 0;
        selp.f32 $0, $1, 0fFF800000, p;
        }""",
        "=f,f,r,r",
        [s, bits, bit],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def put(target, stride, value, y, rows, columns_s, WIDTH: gl.constexpr, COLUMNS: gl.constexpr, ADD: gl.constexpr):
    """Writes, or adds to what is there, the rows before `rows` of the 64 rows of an accumulator from row y on.

    `target` points at row 0; WIDTH of the COLUMNS columns exist. `columns_s`: their numbers in shared memory, or None.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    r = gl.expand_dims(opaque(gl.arange(0, 64, gl.SliceLayout(1, layout))), 1)
    c = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, layout)), 0)
    at = (target + gl.cast(y, gl.int64) * stride + r * stride) + c
    mask = r < rows - y
    if WIDTH < COLUMNS:
        if columns_s is not None:
            c = gl.expand_dims(columns_s.slice(0, COLUMNS).load(gl.SliceLayout(0, layout)), 0)
        mask = mask & (c < WIDTH)
    if ADD:
        value += gl.load(at, mask=mask, other=0.0)
    gl.store(at, value.to(target.dtype.element_ty), mask=mask)


@gluon.jit
def put_panels(target, stride, sums, y, rows, WIDTH: gl.constexpr, ADD: gl.constexpr):
    """`put` of all panels, of whose columns WIDTH exist."""
    for i in gl.static_range(len(sums)):
        place = target + i * sums[0].shape[1]
        put(place, stride, sums[i], y, rows, None, WIDTH - i * sums[0].shape[1], sums[0].shape[1], ADD)


@gluon.jit
def send_grads(
    target, stride, value, y, rows, buffer, FIRST: gl.constexpr, WIDTH: gl.constexpr, COLUMNS: gl.constexpr,
    CHUNK: gl.constexpr,
):  # fmt: skip
    """Writes the rows before `rows` of the 64 rows of an accumulator from row y on, CHUNK columns at a time.

    `target` points at row 0; WIDTH of the columns exist, of which `value` holds COLUMNS from FIRST on. `buffer`: shared memory
    for 64 x CHUNK numbers; None: of the compiler's choice. See
    Note [Tiles of several owners] in backward.py.
    """
    if COLUMNS > CHUNK:
        left, right = gl.split(gl.permute(gl.reshape(value, [64, 2, COLUMNS // 2]), [0, 2, 1]))
        send_grads(target, stride, left, y, rows, buffer, FIRST, WIDTH, COLUMNS // 2, CHUNK)
        send_grads(target, stride, right, y, rows, buffer, FIRST + COLUMNS // 2, WIDTH, COLUMNS // 2, CHUNK)
    elif FIRST < WIDTH:
        layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // CHUNK, CHUNK // 4], [4, 1], [1, 0])
        if buffer is not None:
            buffer.store(value)
            value = buffer.load(layout)
        else:
            value = gl.convert_layout(value, layout)
        r = gl.expand_dims(opaque(gl.arange(0, 64, gl.SliceLayout(1, layout))), 1)
        c = gl.expand_dims(FIRST + gl.arange(0, CHUNK, gl.SliceLayout(0, layout)), 0)
        mask = r < rows - y
        if WIDTH < FIRST + CHUNK:
            mask = mask & (c < WIDTH)
        gl.store((target + gl.cast(y, gl.int64) * stride + r * stride) + c, value, mask=mask)


@gluon.jit
def grad_buffer_of(grad_buffers, side, row, width):
    """Address of row `row` of the region of a source, rows being `width` numbers."""
    region = gl.multiple_of(gl.cast(gl.load(grad_buffers + side), gl.pointer_type(gl.float32)), [16])
    return region + gl.cast(row, gl.int64) * width
