"""The cache on a GPU: rows to the bit, steps in pinned memory, and decoding captured once and replayed for other tokens.

python -m pytest -m gpu tests/gpu/test_kv_cache.py
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ringattn import Ring
from ringattn.inference import ForwardBatch, PagedKVCache, StaticBatch, attend
from ringattn.kernels.kv import pages
from ringattn.masks import causal, window
from tests.support.paging import CASES, Case, assert_put, assert_take

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

H, HK, D = 8, 2, 128


def make(kv_dtype: torch.dtype | None = None) -> PagedKVCache:
    return PagedKVCache(
        Ring(), layers=2, kv_heads=HK, head_dim=D, dtype=torch.bfloat16, pages=64, page_size=64, kv_dtype=kv_dtype
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_put_and_take_equal_their_definition(case: Case) -> None:
    assert_put(pages.put, case, "cuda")
    assert_take(pages.take, case, "cuda")


def test_put_and_take_reach_rows_beyond_two_billion_elements() -> None:
    keys = torch.zeros(2**31 // (8 * 64 * 128) + 2, 8, 64, 128, dtype=torch.uint8, device="cuda").view(
        torch.float8_e4m3fn
    )
    scale = torch.zeros(keys.shape[:3], device="cuda")
    pool = pages.Pool(keys, keys.clone(), scale, scale.clone())
    k = torch.randn(1, 3, 8, 128, device="cuda").bfloat16()
    slots = torch.tensor([[len(keys) * 64 - 1, 5, len(keys) * 64 - 64]], device="cuda")
    pages.put(pool, k, k, slots)
    found, values = torch.empty_like(k), torch.empty_like(k)
    pages.take(pool, slots, found, values)
    # of a CPU, which divides by numbers; torch's GPU kernels multiply by their reciprocals
    rows, factor = pages.quantise(k.cpu())
    for x in (found, values):
        assert torch.equal(x.cpu(), pages.dequantise(rows, factor, torch.bfloat16))


def draw(cache: PagedKVCache, step: ForwardBatch, seed: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return [
        torch.randn(step.batch, step.rows, heads, D, device="cuda", generator=generator).bfloat16()
        for heads in (H, HK, HK)
    ]


def test_batches_equal_those_on_a_cpu() -> None:
    here, there = (
        make(),
        PagedKVCache(Ring(), layers=1, kv_heads=1, head_dim=1, dtype=torch.float32, pages=64, device="cpu"),
    )
    for cache in (here, there):
        cache.add_request(3000)
        cache.add_request(500)
    for requests, counts in (([0, 1], [1900, 333]), ([1], [2]), ([1, 0], [7, 7]), ([0], [600])):
        a, b = here.extend(requests, counts), there.extend(requests, counts)
        assert torch.equal(a.positions.cpu(), b.positions)
        assert torch.equal(a.slots.cpu(), b.slots)
        assert torch.equal(a.taken.cpu(), b.taken)
        if b.kv_slots is not None and a.kv_slots is not None:
            assert torch.equal(a.kv_slots.cpu(), b.kv_slots)
        if b.table is not None and a.table is not None:
            for name in ("pages", "starts", "lengths", "counts"):
                assert torch.equal(getattr(a.table, name).cpu(), getattr(b.table, name))


def layers(step: ForwardBatch, x: list[Tensor]) -> Tensor:
    """Two layers, of which the second sees a window."""
    o = attend(step, 0, *x)
    return attend(step, 1, x[0] + o, x[1], x[2], window=100)


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
def test_a_replayed_graph_decodes_like_new_batches(kv_dtype: torch.dtype | None, warm: bool) -> None:
    caches = make(kv_dtype), make(kv_dtype)
    for cache in caches:
        for reserve, count in ((700, 500), (400, 63), (900, 129)):
            request = cache.add_request(reserve)
            step = cache.extend([request], [count], mode="prefill")
            attend(step, 0, *draw(cache, step, request))
            attend(step, 1, *draw(cache, step, request))
    plain, captured = caches
    static = captured.static_batch(3, max_tokens=1000)
    x = draw(captured, static, 0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        # a rehearsal with requests that leave again: kernels are compiled; cold: bounds are first asked for in the capture
        other = captured.add_request(2)
        rehearsal = captured.extend([other], [1], into=static if warm else captured.static_batch(3, max_tokens=1000))
        layers(rehearsal, x)
        captured.free(other)
        # what it wrote stays in the page until others write there
        other = plain.add_request(2)
        layers(plain.extend([other], [1]), [y[:1] for y in x])
        plain.free(other)
        captured.extend([0, 1], [1, 1], into=static)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            o = layers(static, x)
        addresses = [y.data_ptr() for y in (static.positions, static.slots, *static.bounds(causal() & window(99))[0])]
        plain_step = plain.extend([0, 1], [1, 1])
        for seed, requests in enumerate(([0, 1], [0, 1], [2], [1, 2, 0], [2, 0], *[[0, 1, 2]] * 70)):
            new = draw(captured, static, seed)
            for y, z in zip(x, new, strict=True):
                y.copy_(z)
            if seed:
                captured.extend(requests, [1] * len(requests), into=static)
                plain_step = plain.extend(requests, [1] * len(requests))
            graph.replay()
            expected = layers(plain_step, [y[: len(requests)] for y in new])
            # the table of a static step is wider, so its keys are divided among programs differently
            torch.testing.assert_close(o[: len(requests)], expected, atol=2e-2, rtol=2e-2)
            assert o[len(requests) :].eq(0).all()
            assert all(
                torch.equal(a.view(torch.uint8), b.view(torch.uint8))
                for a, b in ((captured.k, plain.k), (captured.v, plain.v))
            )
    assert addresses == [
        y.data_ptr() for y in (static.positions, static.slots, *static.bounds(causal() & window(99))[0])
    ]
    assert isinstance(static, StaticBatch)


def test_a_cache_takes_the_documented_share_of_free_memory() -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    cache = PagedKVCache(Ring(), layers=4, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    size = cache.k.nbytes + cache.v.nbytes
    assert math.isclose(size, 0.7 * free, rel_tol=0.02)
    assert size == cache.capacity_tokens * cache.bytes_per_token
    with pytest.raises(ValueError, match=r"bytes on each rank, got .* that are free on the fullest GPU"):
        PagedKVCache(Ring(), layers=4, kv_heads=8, head_dim=128, dtype=torch.bfloat16, memory=free)
