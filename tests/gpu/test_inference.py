"""Attention over a cache on GPUs: every way that rows move, histories of all kinds, and prompts that need no new buffers.

python -m pytest -m gpu tests/gpu/test_inference.py
torchrun --nproc_per_node 4 tests/gpu/test_inference.py
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import Ring, masks, ring_attention
from ringattn.inference import PagedKVCache, attend
from ringattn.launch.check.inference import MOVES, OPTIONS, History, InferenceCase, Op, Sizes, examine_history, extend
from ringattn.launch.common.session import Session
from tests.gpu.test_copy_engine import RANKS, run
from tests.inference.test_attention import TREES, decode_trees
from tests.support.budget import assert_within_budget
from tests.support.device_bytes import transport_bytes
from tests.support.request_isolation import BAD, SPOILT, attend_beside

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PLENTY = 2**40
PATIENCE = timedelta(seconds=60)
BF16 = torch.bfloat16
# A kernel is compiled for every power of two of requests and of new tokens, for every head_dim and combination of scores: seconds
# each. So histories here keep to a few of them; launch/check/inference.py has some of all, where none need compile.
SIZES = Sizes(4, 2, 128, 128, page_size=16, pages=400, dtype=BF16)
SMALL = Sizes(4, 2, 64, 64, page_size=16, pages=60, dtype=BF16)
LIFE: tuple[Op, ...] = (
    ("add_request", 0, 2600, 0),
    ("add_request", 1, 900, 0),
    ("add_request", 2, 200, 0),
    extend((0,), (1100,)),
    extend((0,), (1,), "prefill"),
    extend((0, 1, 2), (611, 333, 41), "prefill"),
    ("fork", 3, 0, 1500, 2000),
    extend((3,), (40,), "prefill"),
    extend((0, 1, 2, 3), (1, 1, 1, 1)),
    extend((0, 1, 3), (4, 4, 4)),
    ("free", 1),
    ("truncate", 0, 1700),
    ("fork", 4, 2, 30, 100),
    extend((0, 3, 4), (301, 200, 9), "prefill"),
    extend((4, 2, 0), (4, 4, 4)),
    extend((0, 2, 3, 4), (1, 1, 1, 1)),
)
"""Prompts of many tiles, in chunks, packed, over turns and with shared beginnings; three or four requests decode."""
BATCH: tuple[Op, ...] = (
    ("add_request", 0, 500, 0),
    ("add_request", 1, 500, 7),
    ("add_request", 2, 500, 140),
    extend((0, 1, 2), (221, 221, 221), "prefill", True),
    extend((0, 1, 2), (1, 1, 1), same_length=True),
    extend((0, 1, 2), (4, 4, 4), same_length=True),
    extend((0, 1, 2), (119, 119, 119), "prefill", True),
    extend((0, 1, 2), (1, 1, 1)),
)
"""A batch with padding in front."""
PIECES: tuple[Op, ...] = (
    ("add_request", 0, 400, 0), extend((0,), (137,)), extend((0,), (1,), "prefill"), extend((0,), (64,)),
    extend((0,), (1,)), extend((0,), (16,), "prefill"), extend((0,), (1,)),
)  # fmt: skip
"""One request in pieces, both ways."""
EVERYTHING: dict[str, Any] = {
    "options": ({"window": (20, 0), "softcap": 2.0}, {"softcap": 2.0, "softmax_scale": 0.3}),
    "features": ("sinks", "alibi_slopes"),
}


def rings(world_size: int) -> dict[str, Ring]:
    """Every way that rows move; alone there is none."""
    if world_size == 1:
        return {"alone": Ring()}
    return {
        "gathered": Ring(transport="copy_engine", memory_budget=PLENTY, timeout=PATIENCE),
        "staged": Ring(transport="copy_engine", memory_budget=0, timeout=PATIENCE),
        "process_group": Ring(transport="process_group", timeout=PATIENCE),
    }


def session_of(rank: int, world_size: int) -> Session:
    return Session(
        rank, world_size, torch.device("cuda", torch.cuda.current_device()), "nccl" if world_size > 1 else None
    )


def judge(name: str, history: History, ring: Ring, session: Session, comm_mode: tuple[str, ...] = MOVES) -> None:
    case = InferenceCase(name, str(history.sizes.dtype), history)
    for moving in comm_mode if session.world_size > 1 else ("auto", "keys", "pages"):
        case = dataclasses.replace(
            case, dtype={BF16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[history.sizes.dtype]
        )
        found = examine_history(case, moving, ring, session)
        assert max(found.ratios.values()) <= 1, f"rank {session.rank}, {name}, {moving}: {found.ratios}"


def _histories(rank: int, world_size: int, names: tuple[str, ...] = ("alone", "gathered")) -> None:
    session = session_of(rank, world_size)
    for name, ring in rings(world_size).items():
        if name in names:
            for title, ops in (("life", LIFE), ("padded", BATCH)):
                for option, named in (("plain", OPTIONS["window"]), ("everything", EVERYTHING)):
                    judge(f"{name}, {title}, {option}", History(SIZES, ops, **named), ring, session)


def _staged_histories(rank: int, world_size: int) -> None:
    _histories(rank, world_size, ("staged",))


def _histories_by_the_group(rank: int, world_size: int) -> None:
    _histories(rank, world_size, ("process_group",))


def _options(rank: int, world_size: int) -> None:
    session = session_of(rank, world_size)
    name, ring = next(iter(rings(world_size).items()))
    # heads that share no keys: how many are packed into a tile is for others to vary
    sizes = dataclasses.replace(SMALL, kv_heads=SMALL.heads)
    for option, named in (OPTIONS | {"everything": EVERYTHING}).items():
        judge(f"{name}, {option}", History(sizes, PIECES, **named), ring, session)


def _shapes(rank: int, world_size: int) -> None:
    session = session_of(rank, world_size)
    name, ring = next(iter(rings(world_size).items()))
    for changes in (
        {"heads": 8, "kv_heads": 1, "dtype": torch.float16},
        {"heads": 3, "kv_heads": 3, "head_dim": 40, "v_head_dim": 40},
        {"head_dim": 192, "v_head_dim": 128},
        {"dtype": torch.float32},
        {"heads": 16, "kv_heads": 16, "head_dim": 192, "v_head_dim": 128, "latent": (512, 64), "page_size": 64},
        {"kv_heads": SMALL.heads, "head_dim": 96, "v_head_dim": 64, "latent": (128, 32), "dtype": torch.float16},
    ):
        judge(f"{name}, {changes}", History(dataclasses.replace(SMALL, **changes), PIECES), ring, session)


def draw(n: int, heads: int = 8, kv_heads: int = 2, dim: int = 128, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return [
        torch.randn(1, n, h, dim, device="cuda", generator=generator).bfloat16() for h in (heads, kv_heads, kv_heads)
    ]


def cache_of(ring: Ring, pages: int, **changes: Any) -> PagedKVCache:
    return PagedKVCache(
        ring, **({"layers": 1, "kv_heads": 2, "head_dim": 128, "dtype": BF16, "pages": pages} | changes)
    )


def _whole_prompts(rank: int, world_size: int) -> None:
    """A prompt at once is the forward of training, to the bit."""
    n = 1000 * world_size + 37
    for name, ring in rings(world_size).items():
        cache = cache_of(ring, 40)
        step = cache.extend([cache.add_request(n)], [n])
        q, k, v = (step.take(x) for x in draw(n))
        assert step.sharding is not None
        o = attend(step, 0, q, k, v)
        assert torch.equal(o, ring_attention(q, k, v, step.sharding, causal=True)), f"rank {rank}, {name}"


def _rooms(rank: int, world_size: int) -> None:
    """A long prompt in chunks makes its buffers once."""
    chunk, chunks = 512 * world_size, 8
    for name in ("gathered", "staged"):
        ring = rings(world_size)[name]
        cache = cache_of(ring, 8 * chunks + 8)
        request = cache.add_request(chunk * chunks)
        held: list[int] = []
        for index in range(chunks):
            step = cache.extend([request], [chunk])
            attend(step, 0, *(step.take(x) for x in draw(chunk, seed=index)), comm_mode="keys")
            transport: Any = ring.context.transport
            held.append(transport_bytes(transport))
        assert len(set(held)) == 1, f"rank {rank}, {name}: {held}"


def _graphs(rank: int, world_size: int) -> None:
    """A decode step that was captured answers as one that was not."""
    ring = next(iter(rings(world_size).values()))
    cache = cache_of(ring, 64, layers=2)
    requests = [cache.add_request(900), cache.add_request(700)]
    step = cache.extend(requests, [500, 303], mode="prefill")
    for layer in (0, 1):
        attend(step, layer, *(step.take(x) for x in draw(803, seed=layer)))
    twins = [cache.fork(request) for request in requests]
    static = cache.static_batch(2, max_tokens=900)
    inputs = [torch.zeros(2, 1, h, 128, device="cuda", dtype=BF16) for h in (8, 2, 2)]

    def layers(step: Any) -> list[Tensor]:
        return [attend(step, layer, *inputs, window=(200, 0) if layer else None) for layer in (0, 1)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            layers(cache.extend(requests, [1, 1], into=static))
    torch.cuda.synchronize()
    for request, twin in zip(requests, twins, strict=True):
        cache.truncate(request, cache.length(twin))
    graph = torch.cuda.CUDAGraph()
    cache.extend(requests, [1, 1], into=static)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        captured = layers(static)
    for request, twin in zip(requests, twins, strict=True):
        cache.truncate(request, cache.length(twin))
    for token in range(20):
        for x, y in zip(inputs, (x.view(2, 1, -1, 128) for x in draw(2, seed=100 + token)), strict=True):
            x.copy_(y)
        cache.extend(requests, [1, 1], into=static)
        graph.replay()
        replayed = [x.clone() for x in captured]
        expected = layers(cache.extend(twins, [1, 1]))
        for x, y in zip(replayed, expected, strict=True):
            assert torch.allclose(x.float(), y.float(), rtol=2e-2, atol=2e-3), f"rank {rank}, token {token}"


BODIES: list[Callable[[int, int], None]] = [
    _histories, _staged_histories, _histories_by_the_group, _options, _shapes, _whole_prompts, _rooms, _graphs,
]  # fmt: skip
ALONE = [_histories, _options, _shapes, _whole_prompts, _graphs]


@pytest.mark.parametrize("body", ALONE, ids=[body.__name__.strip("_") for body in ALONE])
def test_one_gpu_attends_as_defined(body: Callable[[int, int], None]) -> None:
    body(0, 1)


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("kv_access", ["copies", "pages"])
@pytest.mark.parametrize("impl", ["auto", "portable", "eager"])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("spoilt", SPOILT)
def test_non_finite_values_do_not_reach_other_requests(
    spoilt: str, bad: float, impl: str, kv_access: str, kv_dtype: torch.dtype | None
) -> None:
    """Three requests of 300 tokens in two chunks, then decoding."""
    healthy, found = (
        attend_beside(
            cache_of(Ring(impl=impl), 60, kv_dtype=kv_dtype),
            8,
            ((300, 300, 300), (70, 90, 33), (1, 1, 1), (4, 4, 4)),
            which,
            bad,
            kv_access=kv_access,
        )
        for which in (None, spoilt)
    )
    assert all(map(torch.equal, healthy, found))


@pytest.mark.skipif(RANKS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("body", BODIES, ids=[body.__name__.strip("_") for body in BODIES])
def test_several_gpus_attend_as_defined(body: Callable[[int, int], None]) -> None:
    run(body, min(RANKS, 4))


def main() -> None:
    """All bodies, on the ranks of torchrun."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    for body in BODIES:
        body(rank, dist.get_world_size())
        dist.barrier()
        if rank == 0:
            os.write(1, f"{body.__name__.strip('_')}: green\n".encode())
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_trees_of_speculative_tokens_see_their_prefix_and_ancestors(dtype: torch.dtype) -> None:
    for o, exact, rounded in decode_trees(masks.per_batch(TREES), dtype, "cuda"):
        assert_within_budget(o, exact, rounded, "o of a tree", dtype)


if __name__ == "__main__":
    main()
