"""Small kernels that do one thing right, and, asked to, one thing wrong."""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportUnusedExpression=false
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ringattn.kernels.attention.hopper.primitives import wait_flag

ROWS, BLOCK = 64, 32
BLOCK_ROWS = gl.constexpr(BLOCK)


@gluon.jit
def barrier(KIND: gl.constexpr, number, THREADS: gl.constexpr):
    asm: gl.constexpr = "bar." + KIND + " $1, " + str(THREADS) + "; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(asm, "=r,r", [gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def producer(a_desc, b_desc, a_s, b_s, a_full, full, empty, blocks, BUG: gl.constexpr):
    mbarrier.expect(a_full.index(0), a_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(a_desc, [0, 0], a_full.index(0), a_s)
    for j in range(blocks):
        st = j % 2
        ph = (j // 2) & 1
        if BUG == "producer's phase":
            ph = 1 - ph
        if BUG != "no wait for empty":
            mbarrier.wait(empty.index(st), ph ^ 1)
        if BUG == "too few bytes":
            mbarrier.expect(full.index(st), b_desc.block_type.nbytes - 16)
        elif BUG == "too many bytes":
            mbarrier.expect(full.index(st), b_desc.block_type.nbytes + 16)
        elif BUG == "no bytes":
            mbarrier.arrive(full.index(st), count=1)
        else:
            mbarrier.expect(full.index(st), b_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(b_desc, [j * BLOCK_ROWS, 0], full.index(st), b_s.index(st))
    if BUG == "a copy nobody waits for":
        st = blocks % 2
        mbarrier.wait(empty.index(st), (blocks // 2) & 1 ^ 1)
        mbarrier.expect(full.index(st), b_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(b_desc, [0, 0], full.index(st), b_s.index(st))
    if BUG == "an error of its own":
        gl.static_assert(False, "of its own")


@gluon.jit
def consumer(a_s, b_s, o_s, a_full, full, empty, blocks, BUG: gl.constexpr):
    """The running sum of a b_j^T over the blocks j of b; every sum on the way is handed to the storer."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_ROWS, 16])
    total = gl.zeros([64, BLOCK_ROWS], gl.float32, layout)
    mbarrier.wait(a_full.index(0), 0)
    for j in range(blocks):
        st = j % 2
        ph = (j // 2) & 1
        if BUG == "consumer's phase":
            ph = 1 - ph
        if BUG != "no wait for full":
            mbarrier.wait(full.index(st), ph)
        token = warpgroup_mma(a_s, b_s.index(st).permute((1, 0)), total, is_async=True)
        if BUG == "early release":
            mbarrier.arrive(empty.index(st), count=1)
        if BUG == "accumulator in flight":
            total = total * 2.0
        if BUG == "result in flight":
            total = token + 1.0
        if BUG == "waits for too few":
            total = warpgroup_mma_wait(1, deps=[token])
        else:
            total = warpgroup_mma_wait(0, deps=[token])
        if BUG == "too many arrivals":
            mbarrier.arrive(empty.index(st), count=2)
        elif BUG == "arrives twice":
            mbarrier.arrive(empty.index(st), count=1)
            mbarrier.arrive(empty.index(st), count=1)
        elif BUG != "no arrival" and BUG != "early release":
            mbarrier.arrive(empty.index(st), count=1)
        if BUG != "buffer not awaited":
            barrier("sync", 9, 160)
        o_s.store(total.to(gl.float16))
        if BUG != "no fence" and BUG != "late fence":
            fence_async_shared()
        barrier("arrive", 8, 160)
        if BUG == "late fence":
            fence_async_shared()
    if BUG == "product left in flight":
        token = warpgroup_mma(a_s, b_s.index(0).permute((1, 0)), total, use_acc=False, is_async=True)


@gluon.jit
def storer(o_desc, o_s, blocks, BUG: gl.constexpr):
    for j in range(blocks):
        if BUG != "buffer not awaited":
            barrier("arrive", 9, 160)
        if BUG == "named barrier of one warp":
            barrier("sync", 8, 32)
        elif BUG != "no wait for the result":
            barrier("sync", 8, 160)
        tma.async_copy_shared_to_global(o_desc, [j * 64, 0], o_s)
        if BUG != "no wait for the store" and BUG != "store left in flight":
            tma.store_wait(0)
        if BUG == "store left in flight" and j < blocks - 1:
            tma.store_wait(0)
    if BUG == "no wait for the store":
        tma.store_wait(0)


@gluon.jit
def pipeline(a_desc, b_desc, o_desc, blocks, D: gl.constexpr, BUG: gl.constexpr, num_warps: gl.constexpr):
    a_s = gl.allocate_shared_memory(a_desc.dtype, [64, D], a_desc.layout)
    b_s = gl.allocate_shared_memory(b_desc.dtype, [2, BLOCK_ROWS, D], b_desc.layout)
    o_s = gl.allocate_shared_memory(o_desc.dtype, [64, BLOCK_ROWS], o_desc.layout)
    a_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(a_full.index(0), count=1)
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        if BUG != "barrier not made":
            mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize([
        (consumer, (a_s, b_s, o_s, a_full, full, empty, blocks, BUG)),
        (producer, (a_desc, b_desc, a_s, b_s, a_full, full, empty, blocks, BUG)),
        (storer, (o_desc, o_s, blocks, BUG)),
    ], [1, 1], [24, 24])  # fmt: skip


def descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    dtype = {torch.float16: gl.float16, torch.float32: gl.float32}[x.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


def run_pipeline(bug: str = "", blocks: int = 5) -> tuple[Tensor, Tensor]:
    """What the kernel makes, and what it should: running sums of a b_j^T over blocks j."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(ROWS, 64, generator=generator).half()
    b = torch.randn(blocks * BLOCK, 64, generator=generator).half()
    o = torch.full((blocks * ROWS, BLOCK), float("nan")).half()
    descriptors = descriptor(a, [64, 64]), descriptor(b, [BLOCK, 64]), descriptor(o, [64, BLOCK])
    pipeline[(1,)](*descriptors, blocks, 64, bug, num_warps=4, maxnreg=168)
    sums = (a.float() @ b.float().T).view(ROWS, blocks, BLOCK).cumsum(1)
    return o.view(blocks, ROWS, BLOCK), sums.transpose(0, 1)


@gluon.jit
def copy_block(x_desc, y_desc, row, head, column, BLOCK_SHAPE: gl.constexpr, num_warps: gl.constexpr):
    smem = gl.allocate_shared_memory(x_desc.dtype, BLOCK_SHAPE, x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), count=1)
    mbarrier.expect(ready.index(0), x_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(x_desc, [0, head, row, column], ready.index(0), smem)
    mbarrier.wait(ready.index(0), 0)
    tma.async_copy_shared_to_global(y_desc, [0, head, row, column], smem)
    tma.store_wait(0)


@gluon.jit
def load_numbers(x_desc, o_ptr, at, N: gl.constexpr, num_warps: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    smem = gl.allocate_shared_memory(x_desc.dtype, [N], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), count=1)
    mbarrier.expect(ready.index(0), x_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(x_desc, [at], ready.index(0), smem)
    mbarrier.wait(ready.index(0), 0)
    gl.store(o_ptr + gl.arange(0, N, layout), smem.load(layout))


@gluon.jit
def scalars(o_ptr, a, b, num_warps: gl.constexpr):
    gl.store(o_ptr, a // b)
    gl.store(o_ptr + 1, a % b)
    gl.store(o_ptr + 2, gl.where(a < b, a, b))
    gl.store(o_ptr + 3, gl.cast(~(a < b), gl.int32))
    count = 0
    for i in range(b):
        count += i - 2 if i > 2 else (i - 2) // 2
    gl.store(o_ptr + 4, count)


@gluon.jit
def product(o_ptr, a, b, WIDE: gl.constexpr, VECTOR: gl.constexpr, num_warps: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    if WIDE:
        a = a.to(gl.int64)
    if VECTOR:
        gl.store(o_ptr + gl.arange(0, 4, layout), gl.arange(0, 4, layout) * a * b)
    else:
        gl.store(o_ptr, a * b)


@gluon.jit
def take(x_ptr, o_ptr, first, limit, MASKED: gl.constexpr, num_warps: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = first + gl.arange(0, 8, layout)
    if MASKED:
        x = gl.load(x_ptr + at, mask=at < limit)
    else:
        x = gl.load(x_ptr + at)
    gl.store(o_ptr + gl.arange(0, 8, layout), x)


@gluon.jit
def assemble(ASM: gl.constexpr, num_warps: gl.constexpr):
    gl.inline_asm_elementwise(ASM, "=r,r", [gl.to_tensor(1)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def values_stay(o_ptr, num_warps: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    x = gl.full([4], 1.0, gl.float32, layout)
    y = x
    y += 1.0
    gl.store(o_ptr + gl.arange(0, 4, layout), x)


@gluon.jit
def mixed_ranks(o_ptr, num_warps: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    gl.full([4, 4], 1.0, gl.float32, layout) + gl.full([4], 1.0, gl.float32, gl.SliceLayout(0, layout))


@gluon.jit
def _idle(o_ptr):
    gl.store(o_ptr, 0)


@gluon.jit
def _watch(x_ptr, o_ptr, flags, error, patience, n):
    for i in range(n):
        there = wait_flag(flags + i, error, patience)
        gl.store(o_ptr + i, gl.where(there == 1, gl.load(x_ptr + i), -1))


@gluon.jit
def watch(x_ptr, o_ptr, idle_ptr, flags, error, patience, n, num_warps: gl.constexpr):
    """One warp copies number i of n once flag i is there, or writes -1; the others have long been done."""
    gl.warp_specialize([
        (_idle, (idle_ptr,)),
        (_watch, (x_ptr, o_ptr, flags, error, patience, n)),
    ], [1], [24])  # fmt: skip
