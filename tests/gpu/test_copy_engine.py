"""What only several GPUs can show of the copy engine: python -m pytest tests/gpu/test_copy_engine.py.

torchrun --nproc_per_node 4 -m tests.gpu.test_copy_engine        # host time per call
"""

# pyright: reportArgumentType=false
# (a launch passes plain integers for constexpr parameters)

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ringattn import Ring
from ringattn.launch.common.distributed import choose_backend, resolve_device
from ringattn.plan.ring_plan import GatherPlan, make_gather_plan, make_plan
from ringattn.transport.copy_engine.transport import CopyEngineTransport
from ringattn.transport.gpu_sharing import may_share_gpus
from tests.support.short_mask import ShortMask

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
RANKS = max(GPUS, 4) if GPUS and may_share_gpus() else GPUS
"""Ranks that there can be: one on each GPU, or four where torch is told that they may share one."""
SHARED = RANKS > GPUS
"""Whether ranks share a GPU, and so have no NCCL, without which the process group is not for CUDA graphs."""
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(RANKS < 2, reason="needs two GPUs")]
ROWS, HEADS, DIM, PAD_ROWS = 512, 8, 128, 128


def _start(rank: int, world_size: int, port: int, body: Callable[..., None]) -> None:
    device = resolve_device("cuda", rank, world_size)
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0)  # pyright: ignore[reportPrivateImportUsage]
    backend, timeout = choose_backend(device, world_size), timedelta(seconds=60)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        body(rank, world_size)
        torch.cuda.synchronize()
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run(body: Callable[..., None], world_size: int) -> None:
    probe = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore
    port = probe.port
    del probe
    mp.spawn(  # pyright: ignore[reportPrivateImportUsage]
        _start, (world_size, port, body), nprocs=world_size
    )


def settle(group: Any = None) -> tuple[Ring, CopyEngineTransport]:
    ring = Ring(group, transport="copy_engine", timeout=timedelta(seconds=20))
    ring._init_transport(torch.device("cuda", torch.cuda.current_device()))
    assert isinstance(ring.context.transport, CopyEngineTransport)
    return ring, ring.context.transport


def gather_plans(ring: Ring, **mask: Any) -> GatherPlan:
    n = ROWS * ring.world_size
    sharding = ring.sharding(n)
    plan = make_plan(sharding.shards, sharding.shards, ShortMask(seq_len=n, kv_len=n, **mask), "keys")
    return make_gather_plan(plan, ring.rank, PAD_ROWS)


def keys(rank: int, salt: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator("cuda").manual_seed(100 * salt + rank)
    whole = torch.randn(1, ROWS, HEADS, 2 * DIM, device="cuda", generator=g).bfloat16()
    return whole[..., :DIM], whole[..., DIM:]


def waiting_copy() -> Any:
    """A kernel that holds an SM until a flag is raised and then copies rows, as attention would read them."""
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(flag, far, out, n, BLOCK: tl.constexpr):
        raised = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        while raised == 0:
            raised = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(far + i, mask=i < n), mask=i < n)

    globals()["tl"] = tl

    def launch(flag: torch.Tensor, far: torch.Tensor, out: torch.Tensor) -> None:
        kernel[(triton.cdiv(far.numel(), 4096),)](flag, far, out, far.numel(), BLOCK=4096)

    return launch


def gather_and_check(
    ring: Ring, end: CopyEngineTransport, gather_plan: GatherPlan, groups: int, salt: int, copy: Any
) -> None:
    found = end.gather(*keys(ring.rank, salt), gather_plan, groups, "test")
    seen = []
    for fetch in gather_plan.recvs:
        rows = found.remote[0, fetch.at : fetch.at + sum(length for _, length in fetch.rows)]
        out = torch.full_like(rows, float("nan"))
        assert found.ready_flags is not None
        copy(found.ready_flags.flags[groups - 1, fetch.step :], rows, out)
        seen.append((fetch, out))
    found.close()
    for fetch, out in seen:
        whole = torch.cat(keys(fetch.owner, salt), -1)[0]
        assert torch.equal(out, torch.cat([whole[a : a + n] for a, n in fetch.rows]))


def _gathers(rank: int, world_size: int) -> None:
    ring, end = settle()
    copy = waiting_copy()
    for salt in range(12):
        mask = ({"causal": True}, {}, {"causal": True, "window": (100, 0)})[salt % 3]
        gather_and_check(ring, end, gather_plans(ring, **mask), (1, 4)[salt % 2], salt, copy)


def _grad_buffers(rank: int, world_size: int) -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(table, source, value, n, BLOCK: tl.constexpr):
        target = tl.load(table + source).to(tl.pointer_type(tl.float32))
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(target + i, tl.zeros([BLOCK], tl.float32) + value, mask=i < n)

    globals()["tl"] = tl
    ring, end = settle()
    gather_plan = gather_plans(ring, causal=True)
    for salt in range(6):
        coming = end.grad_return((1, HEADS, 2 * DIM), gather_plan, "test")
        coming.begin()
        size = ROWS * HEADS * 2 * DIM
        for source in range(1 + len(gather_plan.recvs)):
            kernel[(triton.cdiv(size, 4096),)](coming.addresses, source, float(10 * salt + rank), size, BLOCK=4096)
        parts, _ = coming.receive()
        for part, reader in zip(parts, gather_plan.sends, strict=True):
            assert bool((part == 10 * salt + reader.peer).all())
        assert bool((coming.local_grads == 10 * salt + rank).all())
        coming.close()


def _posts_and_rings(rank: int, world_size: int) -> None:
    rings = [settle(), settle()]
    for turn in range(10):
        for i, (ring, end) in enumerate(rings):
            end.reserve(4096)
            after, before = (rank + 1) % world_size, (rank - 1) % world_size
            x = torch.full((1000,), 100.0 * i + 10 * turn + rank, device="cuda")
            y = torch.full_like(x, float("nan"))
            end.post([(after, x)], [(before, y)], "test").wait()
            assert bool((y == 100.0 * i + 10 * turn + before).all())
            assert ring.transport.name == "copy_engine"


def _lends(rank: int, world_size: int) -> None:
    ring, end = settle()
    sharding = ring.sharding(ROWS * world_size)
    gather_plan, copy = gather_plans(ring), waiting_copy()
    for salt in range(4):
        k, v = ring.kv_buffer(sharding, 1, HEADS, DIM, dtype=torch.bfloat16, name="layer 0")
        for x, y in zip((k, v), keys(rank, salt), strict=True):
            x.copy_(y)
        found = end.gather(k, v, gather_plan, 1, "test")
        assert found.ready_flags is not None
        outs = []
        for fetch in gather_plan.recvs:
            rows = found.remote[0, fetch.at : fetch.at + ROWS]
            outs.append(torch.empty_like(rows))
            copy(found.ready_flags.flags[0, fetch.step :], rows, outs[-1])
        found.close()
        for fetch, out in zip(gather_plan.recvs, outs, strict=True):
            assert torch.equal(out, torch.cat(keys(fetch.owner, salt), -1)[0])


def _captures(rank: int, world_size: int) -> None:
    ring, end = settle()
    gather_plan, copy = gather_plans(ring), waiting_copy()
    gather_and_check(ring, end, gather_plan, 4, 0, copy)
    k, v = (x.clone() for x in keys(rank, 0))
    outs = [torch.empty(ROWS, HEADS, 2 * DIM, device="cuda", dtype=torch.bfloat16) for _ in gather_plan.recvs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = end.gather(k, v, gather_plan, 4, "captured")
        assert found.ready_flags is not None
        for fetch, out in zip(gather_plan.recvs, outs, strict=True):
            copy(found.ready_flags.flags[3, fetch.step :], found.remote[0, fetch.at : fetch.at + ROWS], out)
        found.close()
    for salt in range(1, 8):
        for x, y in zip((k, v), keys(rank, salt), strict=True):
            x.copy_(y)
        graph.replay()
        for fetch, out in zip(gather_plan.recvs, outs, strict=True):
            assert torch.equal(out, torch.cat(keys(fetch.owner, salt), -1)[0])
        gather_and_check(ring, end, gather_plan, 1, salt, copy)


@pytest.mark.parametrize("body", [_gathers, _grad_buffers, _posts_and_rings, _lends, _captures])
def test_on_real_devices(body: Callable[..., None]) -> None:
    run(body, min(RANKS, 4))


def host_times() -> None:
    """Prints microseconds of host time per call, the median of many."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    ring, end = settle()
    gather_plan, (k, v) = gather_plans(ring), keys(rank, 0)
    x, y = torch.zeros(2, 4096, device="cuda")
    end.reserve(x.numel() * 4)
    after, before = (rank + 1) % ring.world_size, (rank - 1) % ring.world_size
    calls: dict[str, Callable[[], None]] = {
        "gather, 1 group": lambda: end.gather(k, v, gather_plan, 1, "time").close(),
        "gather, 4 groups": lambda: end.gather(k, v, gather_plan, 4, "time").close(),
        "post": lambda: end.post([(after, x)], [(before, y)], "time").wait(),
    }
    for name, call in calls.items():
        times = []
        for _ in range(200):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
            torch.cuda.synchronize()
        if rank == 0:
            os.write(1, f"{name}: {sorted(times)[100] * 1e6:.1f} us\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    host_times()
