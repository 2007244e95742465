"""Exchanges between several GPUs: the same bits everywhere, in graphs, beside other traffic; and ranks that do not come.

python -m pytest -m gpu tests/gpu/test_reduce.py
torchrun --nproc_per_node 2 -m tests.gpu.test_reduce
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import Ring
from ringattn.kernels.partials import packed
from ringattn.transport.reduce.base import PartialReducer
from tests.gpu.test_copy_engine import RANKS, SHARED, run
from tests.gpu.test_ring import draw as draw_attention
from tests.gpu.test_ring import step
from tests.kernels.contract.test_packed import Sizes
from tests.transport.test_reduce import DTYPES, add, assert_bits, cut, draw_bits, draw_shares, lay, side_by_side, total

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(RANKS < 2, reason="needs two GPUs")]
PATIENCE = timedelta(seconds=20)
SHORT = timedelta(seconds=3)


def draw(seed: int, ranks: int, sizes: Sizes, most: int = 5) -> list[Tensor]:
    """Every rank's splits, 1 to `most` of them, the same on every rank; some hold nothing."""
    chooser = random.Random(seed)
    generator = torch.Generator("cuda").manual_seed(seed)
    rows, dv = math.prod(sizes[:3]), sizes[3]
    found = []
    for _ in range(ranks):
        stack = torch.randn(chooser.randint(1, most), packed.size(rows, dv), device="cuda", generator=generator)
        m, l, _ = packed.views(stack, rows, dv)  # noqa: E741
        m.mul_(8)
        l.abs_().add_(0.5)
        for part in stack:
            if chooser.random() < 0.2:
                packed.clear(part, rows, dv)
        found.append(stack)
    return found


def outputs(sizes: Sizes, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    b, s, h, dv = sizes
    o = torch.full((b, s, h, dv), math.nan, dtype=dtype, device="cuda")
    return [o, torch.full((b, h, s), math.nan, device="cuda")]


def exchange_once(
    reducer: PartialReducer, mine: Tensor, sizes: Sizes, sinks: Tensor | None, dtype: torch.dtype
) -> list[Tensor]:
    out = outputs(sizes, dtype)
    reducer.merge_partials(mine, *sizes, sinks, *out)
    return out


def expect(
    splits: list[Tensor], sizes: Sizes, sinks: Tensor | None = None, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """The same, of the kernels that make one step each."""
    rows, dv = math.prod(sizes[:3]), sizes[3]
    stack = torch.full((len(splits), packed.size(rows, dv)), math.nan, device="cuda")
    for part, brought in zip(stack, splits, strict=True):
        packed.merge_parts(brought, part, rows, dv)
    out = outputs(sizes, dtype)
    packed.finish_parts(stack, rows, dv, sinks, *out)
    return out


def assert_near(found: list[Tensor], expected: list[Tensor], about: str) -> None:
    """Equal but for roundings: compilers contract products and sums of one source differently in different kernels."""
    for name, x, y in zip(("o", "lse"), found, expected, strict=True):
        eps = torch.finfo(x.dtype).eps
        torch.testing.assert_close(x, y, rtol=4 * eps, atol=1e-6, msg=lambda text, of=name: f"{about}: {of}: {text}")


def bits(x: Tensor) -> bytes:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def assert_alike(found: list[Tensor], about: str) -> None:
    """The same bits on all ranks."""
    for name, x in zip(("o", "lse"), found, strict=True):
        mine = x.contiguous().view(torch.uint8).flatten()
        theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(theirs, mine)
        odd = [rank for rank, other in enumerate(theirs) if not torch.equal(mine, other)]
        assert not odd, f"{about}: {name} has other bits on ranks {odd}"


def open_exchange(transport: str = "copy_engine", timeout: timedelta = PATIENCE) -> tuple[Ring, PartialReducer]:
    ring = Ring(transport=transport, timeout=timeout)
    reducer = ring.partial_reducer("cuda")
    assert reducer.choice.name == {"copy_engine": "one_shot", "process_group": "group"}[transport], str(reducer)
    return ring, reducer


SIZES: list[Sizes] = [
    (1, 1, 32, 128), (8, 1, 32, 128), (2, 16, 8, 64), (1, 1, 4, 256), (3, 5, 7, 40), (8, 16, 32, 128), (1, 1, 1, 1),
]  # fmt: skip


def _bits(rank: int, world_size: int) -> None:
    for ring, reducer in (open_exchange(), open_exchange("process_group")):
        for seed, sizes in enumerate(SIZES):
            for dtype in (torch.bfloat16, torch.float32):
                splits = draw(seed, world_size, sizes, most=17)
                sinks = torch.linspace(-4, 9, sizes[2], device="cuda") if seed % 2 else None
                about = f"rank {rank}, {reducer}, {sizes}, {dtype}"
                found = exchange_once(reducer, splits[rank], sizes, sinks, dtype)
                assert_near(found, expect(splits, sizes, sinks, dtype), about)
                assert_alike(found, about)
                plain = [torch.empty_like(x, device="cpu") for x in found]
                stack = torch.cat(splits).cpu()
                packed.finish_parts(
                    stack, math.prod(sizes[:3]), sizes[3], None if sinks is None else sinks.cpu(), *plain
                )
                for x, y in zip(found, plain, strict=True):
                    eps = torch.finfo(x.dtype).eps
                    torch.testing.assert_close(x.cpu(), y, rtol=max(2 * eps, 1e-5), atol=1e-5)
        reducer.check()
        ring.close()


SHAPES = [(1, 4096), (64, 4096), (3, 5), (1, 32064), (37, 8016), (1, 1), (200, 4097)]


def _sums_and_columns(rank: int, world_size: int) -> None:
    for ring, reducer in (open_exchange(), open_exchange("process_group")):
        for seed, shape in enumerate(SHAPES):
            for dtype in DTYPES:
                about = f"rank {rank}, {reducer}, {shape}, {dtype}"
                shares = draw_shares(seed, world_size, shape, dtype)
                columns = [draw_bits(seed + peer, shape, dtype) for peer in range(world_size)]
                found = [total(reducer, shares[rank].cuda(), to).cpu() for to in DTYPES]
                widths = cut(shape[1], seed)
                found.append(side_by_side(reducer, columns[rank].cuda(), world_size, widths).cpu())
                for x, y in zip(found, [*(add(shares, to) for to in DTYPES), lay(columns, widths)], strict=True):
                    assert bits(x) == bits(y), about
        # an address between those of the widest words
        shares = draw_shares(0, world_size, (4096,), torch.bfloat16)
        room = torch.zeros(4097, dtype=torch.bfloat16, device="cuda")
        room[1:] = shares[rank].cuda()
        assert_bits(total(reducer, room[1:], torch.float32).cpu(), add(shares, torch.float32))
        reducer.check()
        ring.close()


def _mixed_trains(rank: int, world_size: int) -> None:
    """Partials, sums and columns that nobody waits for, called and replayed, while ranks run ahead of each other."""
    ring, reducer = open_exchange()
    chooser = random.Random(rank)
    sizes, (rows, hidden, width) = SIZES[1], (8, 4096, 2004)
    splits = draw(0, world_size, sizes)[rank]
    addends = [x.cuda() for x in draw_shares(1, world_size, (rows, hidden), torch.float32)]
    columns = [x.cuda() for x in draw_shares(2, world_size, (rows, width), torch.bfloat16)]
    wanted = [
        *exchange_once(reducer, splits, sizes, None, torch.bfloat16),
        add(addends, torch.bfloat16),
        torch.cat(columns, 1),
    ]

    def layer() -> list[Tensor]:
        return [
            *exchange_once(reducer, splits, sizes, None, torch.bfloat16),
            total(reducer, addends[rank], torch.bfloat16),
            side_by_side(reducer, columns[rank], world_size),
        ]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            captured = layer()
            with pytest.raises(RuntimeError, match="once before it is captured"):
                total(reducer, addends[rank], torch.float16)
        # larger ones, which give the graph mailboxes of its own
        large = draw_shares(3, world_size, (rows, 2**17), torch.float32)
        assert_bits(total(reducer, large[rank].cuda(), torch.float32).cpu(), add(large, torch.float32))
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for turn in range(1000):
            if chooser.random() < 0.02:
                torch.cuda._sleep(chooser.randrange(200_000))
            if turn % 3:
                for x in captured:
                    x.fill_(math.nan)
                graph.replay()
            found = captured if turn % 3 else layer()
            wrong += sum((x != y).sum() for x, y in zip(found, wanted, strict=True))
        assert wrong.item() == 0, f"rank {rank}: {wrong.item()} wrong numbers"
        reducer.check()
    del graph
    ring.close()


def _trains(rank: int, world_size: int) -> None:
    """Many exchanges that nobody waits for, while ranks run ahead of each other."""
    ring, reducer = open_exchange()
    chooser = random.Random(rank)
    cases = [(sizes, draw(seed, world_size, sizes)) for seed, sizes in enumerate(SIZES)]
    wanted = [exchange_once(reducer, splits[rank], sizes, None, torch.bfloat16) for sizes, splits in cases]
    for first, (sizes, splits) in zip(wanted, cases, strict=True):
        assert_near(first, expect(splits, sizes), f"rank {rank}, {sizes}")
        assert_alike(first, f"rank {rank}, {sizes}")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(3000):
        at = (turn * 7 + turn // 11) % len(cases)
        sizes, splits = cases[at]
        if chooser.random() < 0.02:
            torch.cuda._sleep(chooser.randrange(200_000))
        found = exchange_once(reducer, splits[rank], sizes, None, torch.bfloat16)
        wrong += sum((x != y).sum() for x, y in zip(found, wanted[at], strict=True))
    assert wrong.item() == 0, f"rank {rank}: {wrong.item()} wrong numbers"
    reducer.check()
    ring.close()


def _graphs(rank: int, world_size: int) -> None:
    shapes = SIZES[:3]
    for transport in ("copy_engine",) if SHARED else ("copy_engine", "process_group"):
        ring, reducer = open_exchange(transport)
        inputs = [torch.zeros(3, packed.size(math.prod(sizes[:3]), sizes[3]), device="cuda") for sizes in shapes]
        outs = [outputs(sizes) for sizes in shapes]

        def layers(reducer=reducer, inputs=inputs, outs=outs) -> None:
            for mine, out, sizes in zip(inputs, outs, shapes, strict=True):
                reducer.merge_partials(mine, *sizes, None, out[0], out[1])

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            layers()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            layers()
            with pytest.raises(RuntimeError, match="once before it is captured"):
                exchange_once(reducer, inputs[0], (1, 2, 16, 128), None, torch.bfloat16)
        together: list[list[Tensor]] = []
        for turn in range(40):
            together = []
            for seed, (mine, sizes) in enumerate(zip(inputs, shapes, strict=True)):
                splits = [x[:1].expand(3, -1).clone() for x in draw(100 * turn + seed, world_size, sizes)]
                mine.copy_(splits[rank])
                together.append(splits)
            graph.replay()
            if turn % 3 == 0:
                # others between replays; they make the mailboxes grow while the graph keeps its own
                sizes = SIZES[3 + turn // 3 % 3]
                splits = draw(turn, world_size, sizes)
                found = exchange_once(reducer, splits[rank], sizes, None, torch.bfloat16)
                assert_near(found, expect(splits, sizes), f"rank {rank}, {reducer}, call after replay {turn}")
            for out, splits, sizes in zip(outs, together, shapes, strict=True):
                assert_near(out, expect(splits, sizes), f"rank {rank}, {reducer}, replay {turn}")
        # replays one after the other, which nobody waits for
        for _ in range(200):
            graph.replay()
        for out, splits, sizes in zip(outs, together, shapes, strict=True):
            assert_near(out, expect(splits, sizes), f"rank {rank}, {reducer}, replays in a row")
            assert_alike(out, f"rank {rank}, {reducer}, replays in a row")
        reducer.check()
        # whoever closes lets go of memory that a graph names
        del graph
        ring.close()


def _beside_others(rank: int, world_size: int) -> None:
    """Two rings at once, each on a stream of its own, beside collectives and attention."""
    pairs = [open_exchange() for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in pairs]
    other, traffic = dist.new_group(), torch.cuda.Stream()
    assert isinstance(other, dist.ProcessGroup)
    weights = torch.full((2**20,), 1.0, device="cuda")
    gathered = torch.empty(world_size * weights.numel(), device="cuda")
    whole = draw_attention(0, 256 * world_size)
    first = step(pairs[0][0], whole, "zigzag", causal=True)
    cases = [(sizes, draw(seed, world_size, sizes)) for seed, sizes in enumerate(SIZES[:4])]
    wanted = [exchange_once(pairs[0][1], splits[rank], sizes, None, torch.bfloat16) for sizes, splits in cases]
    for about, (_, reducer) in enumerate(pairs):
        for known, (sizes, splits) in zip(wanted, cases, strict=True):
            assert_near(known, expect(splits, sizes), f"rank {rank}, {sizes}")
            again = exchange_once(reducer, splits[rank], sizes, None, torch.bfloat16)
            assert all(map(torch.equal, known, again)), f"rank {rank}, ring {about}, {sizes}"
    torch.cuda.synchronize()
    for turn in range(60):
        with torch.cuda.stream(traffic):
            dist.all_gather_into_tensor(gathered, weights, group=other)
        found = []
        for i, (_, reducer) in enumerate(pairs):
            with torch.cuda.stream(streams[i]):
                at = (turn + i) % len(cases)
                sizes, splits = cases[at]
                found.append((at, exchange_once(reducer, splits[rank], sizes, None, torch.bfloat16)))
        if turn % 10 == 0:
            again = step(pairs[0][0], whole, "zigzag", causal=True)
            assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True)), f"rank {rank}, turn {turn}"
        torch.cuda.synchronize()
        for at, out in found:
            assert all(map(torch.equal, out, wanted[at])), f"rank {rank}, turn {turn}"
    for ring, reducer in pairs:
        reducer.check()
        ring.close()


def _unlike(rank: int, world_size: int) -> None:
    ring, reducer = open_exchange()
    heads = 4 if rank else 8
    sizes = (1, 1, heads, 64)
    with pytest.raises(ValueError, match="an exchange must be the same on all ranks"):
        exchange_once(reducer, draw(0, 1, sizes)[0], sizes, None, torch.bfloat16)
    sizes = (1, 1, 8, 64)
    splits = draw(0, world_size, sizes)
    assert_near(
        exchange_once(reducer, splits[rank], sizes, None, torch.bfloat16), expect(splits, sizes), f"rank {rank}"
    )
    wrong = torch.zeros(4, 8 if rank else 16, device="cuda")
    with pytest.raises(ValueError, match="an exchange must be the same on all ranks"):
        total(reducer, wrong, torch.bfloat16)
    with pytest.raises(ValueError, match="an exchange must be the same on all ranks"):
        side_by_side(reducer, wrong, world_size)
    ones = torch.ones(4, 8, device="cuda")
    assert (total(reducer, ones, torch.bfloat16) == world_size).all()
    ring.close()


def _absent(rank: int, world_size: int) -> None:
    """The last rank stops to come: the others find NaN and its name, in time, also in a graph; it comes too late, and fails too."""
    _, reducer = open_exchange(timeout=SHORT)
    sizes, absent = SIZES[0], world_size - 1
    splits = draw(0, world_size, sizes)
    out = outputs(sizes)
    reducer.merge_partials(splits[rank], *sizes, None, *out)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(50):
            reducer.merge_partials(splits[rank], *sizes, None, *out)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    began = time.monotonic()
    if rank != absent:
        graph.replay()
        torch.cuda.synchronize()
        seconds = time.monotonic() - began
        assert SHORT.total_seconds() <= seconds + 0.5, f"rank {rank} gave up after {seconds:.1f} s"
        assert seconds < SHORT.total_seconds() + 2, (
            f"rank {rank} waited {seconds:.1f} s: every launch after the first must not"
        )
        named = rf"ring ranks \[{absent}\] did not come within 3 s"
        if SHARED:
            # ranks take turns on one GPU: who began later names a survivor that gave up first
            named = rf"{named}|ring ranks \[[0-{absent - 1}, ]+\] have failed"
    else:
        time.sleep(SHORT.total_seconds() + 2.5)
        reducer.merge_partials(splits[rank], *sizes, None, *out)
        torch.cuda.synchronize()
        named = rf"ring ranks {list(range(absent))} have failed".replace("[", r"\[").replace("]", r"\]")
    assert all(bool(x.isnan().all()) for x in out), f"rank {rank} holds numbers"
    for call in (reducer.check, lambda: reducer.merge_partials(splits[rank], *sizes, None, *out)):
        with pytest.raises(RuntimeError, match=named):
            call()


BODIES: list[Callable[[int, int], None]] = [
    _bits, _sums_and_columns, _trains, _mixed_trains, _graphs, _beside_others, _unlike, _absent,
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=[body.__name__.strip("_") for body in BODIES])
def test_exchanges_of_several_gpus(body: Callable[[int, int], None]) -> None:
    run(body, min(RANKS, 4))


if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=timedelta(seconds=60))
    for body in BODIES:
        began = time.monotonic()
        body(dist.get_rank(), dist.get_world_size())
        torch.cuda.synchronize()
        dist.barrier()
        if dist.get_rank() == 0:
            os.write(1, f"{body.__name__.strip('_')}: good, {time.monotonic() - began:.1f} s\n".encode())
    dist.destroy_process_group()
