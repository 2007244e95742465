"""Decoding by CUDA graphs of whole models: what plain calls give, batches that change, refusals that leave nothing behind.

python -m pytest -m gpu tests/gpu/test_graphs.py
torchrun --nproc_per_node 4 tests/gpu/test_graphs.py
"""

from __future__ import annotations

import copy
import os
import random
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import Ring
from ringattn.inference import PagedKVCache
from ringattn.integrations.transformers import RingCache, apply_tensor_parallel, compile_for_decode, run_step
from ringattn.integrations.transformers.cuda_graph_runner import (
    CUDAGraphCapturer,
    CUDAGraphRunner,
    batch_sizes,
    capture_obstacle,
    select_capturer,
)
from ringattn.launch.bench.inference_model import make_cache, make_model
from ringattn.sizing.shapes import ModelShape
from tests.gpu.test_copy_engine import RANKS, SHARED, run
from tests.integrations.transformers.models import make, tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BF16, SHORT = torch.bfloat16, timedelta(seconds=3)
SHAPE = ModelShape("narrow", dim=512, layers=4, heads=8, kv_heads=2, head_dim=64, mlp_dim=1024, vocab_size=1000)
WIDE = ModelShape("wide", dim=1024, layers=4, heads=16, kv_heads=4, head_dim=64, mlp_dim=8192, vocab_size=1000)
"""With wide MLPs, whose shards differ most."""


def here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def rings(world_size: int) -> dict[str, Ring]:
    """Both ways that partials are exchanged; alone there is none."""
    if world_size == 1:
        return {"alone": Ring()}
    both = {"one_shot": Ring(transport="copy_engine")}
    return both if SHARED else both | {"group": Ring(transport="process_group")}


def fill(model: Any, cache: PagedKVCache, lengths: Sequence[int], reserve: int = 2000) -> list[int]:
    requests = [cache.add_request(reserve) for _ in lengths]
    for seed, (request, length) in enumerate(zip(requests, lengths, strict=True)):
        ids = torch.randint(1000, (length,), generator=torch.Generator().manual_seed(seed))
        run_step(model, cache.extend([request], [length], mode="prefill"), ids, wanted=[])
    return requests


def apart(x: Tensor, y: Tensor) -> float:
    return float((x.float() - y.float()).square().mean().sqrt() / y.float().square().mean().sqrt())


def twins(ring: Ring, lengths: Sequence[int], **how: Any) -> tuple[Any, CUDAGraphRunner, CUDAGraphRunner, list[int]]:
    """A model, two caches with the same requests, decoded by graphs and by plain calls, and the requests."""
    model = make_model(SHAPE, 4096, BF16, here())
    caches = [make_cache(ring, SHAPE, 400, BF16, here()) for _ in range(2)]
    requests, _ = [fill(model, cache, lengths) for cache in caches]
    assert capture_obstacle(model, caches[0]) is None
    return (
        model,
        CUDAGraphRunner(model, caches[0], CUDAGraphCapturer(here()), **how),
        CUDAGraphRunner(model, caches[1], None),
        requests,
    )


def _batches(rank: int, world_size: int) -> None:
    """Requests come and go; each step is a replay of the smallest batch that has room, before and after other work."""
    for name, ring in rings(world_size).items():
        model, graphs, plain, requests = twins(ring, (700, 90, 333, 1500, 64, 65), batches=batch_sizes(8))
        graphs.prepare()
        assert (graphs.captured, graphs.refusal) == (4, None)
        draw, found = random.Random(0), torch.empty(0)
        for seed in range(40):
            chosen = draw.sample(requests, draw.randint(1, 6))
            ids = torch.randint(1000, (len(chosen), 1), generator=torch.Generator().manual_seed(seed))
            found, wanted = (one.run(chosen, ids).logits for one in (graphs, plain))
            assert found.shape == wanted.shape
            assert apart(found, wanted) < 0.03, f"rank {rank}, {name}, step {seed}: {apart(found, wanted)}"
            if seed == 20:
                # prompts between replays
                late, _ = [fill(model, one._cache, (1000,)) for one in (graphs, plain)]
                requests += late
        assert (graphs.captured, graphs.refusal) == (4, None)
        # what ranks hold must be the same bits, or they would go on with other tokens
        bits = found.contiguous().view(torch.uint8)
        if world_size > 1:
            both = [torch.empty_like(bits) for _ in range(world_size)]
            dist.all_gather(both, bits)
            assert all(torch.equal(bits, x) for x in both), f"rank {rank}, {name}"


def _prompts(rank: int, world_size: int) -> None:
    """Short prompts, ends of longer ones and turns are replayed in pieces, between decoding steps, as the ring computes them."""
    for name, ring in rings(world_size).items():
        model, graphs, plain, requests = twins(ring, (700, 90, 333, 64), pieces=(2, 8, 32), batches=batch_sizes(8))
        graphs.prepare()
        assert (graphs.captured, graphs.most_pieces, graphs.refusal) == (7, 32, None)
        draw = random.Random(0)
        for seed in range(24):
            if seed % 3 == 0:
                late, _ = [one._cache.add_request(900) for one in (graphs, plain)]
                requests.append(late)
            chosen = draw.sample(requests[-8:], draw.randint(1, 4))
            counts = [draw.choice((1, 3, 16, 33, 100, 128)) for _ in chosen]
            ids = torch.randint(1000, (sum(counts),), generator=torch.Generator().manual_seed(seed))
            found = graphs.run_mixed(chosen, counts, ids)
            assert found is not None
            found = found.clone()
            wanted = run_step(model, plain._cache.extend(chosen, counts, mode="prefill"), ids)
            assert found.shape == wanted.shape
            assert apart(found, wanted) < 0.03, f"rank {rank}, {name}, step {seed}: {apart(found, wanted)}"
            assert apart(graphs._cache.k, plain._cache.k) < 0.03, f"rank {rank}, {name}, keys of step {seed}"
            ids = ids[: len(chosen), None]  # any tokens will do
            found_next, wanted_next = (one.run(chosen, ids).logits for one in (graphs, plain))
            assert apart(found_next, wanted_next) < 0.03, f"rank {rank}, {name}, token after step {seed}"
        assert (graphs.captured, graphs.refusal) == (7, None)


def _changed(rank: int, world_size: int) -> None:
    """A tensor parallel and compiled model is as near to fp32 as the one it was, and all ranks hold the same bits."""
    for name, ring in rings(world_size).items():
        model = make_model(WIDE, 4096, BF16, here())
        exact, changed = copy.deepcopy(model).float(), copy.deepcopy(model)
        assert apply_tensor_parallel(changed, ring) == (0 if world_size == 1 else 4 + 1)
        assert compile_for_decode(changed, ring) == 4 + 1
        caches = [make_cache(ring, WIDE, 400, dtype, here()) for dtype in (BF16, BF16, torch.float32)]
        made = [
            CUDAGraphRunner(changed, caches[0], CUDAGraphCapturer(here()), batches=batch_sizes(4), rows=(64,)),
            CUDAGraphRunner(model, caches[1], None),
            CUDAGraphRunner(exact, caches[2], None),
        ]
        made[0].prepare()
        assert (made[0].captured, made[0].refusal) == (4, None)
        requests, _, _ = [fill(one._forward, one._cache, (700, 90, 333)) for one in made]
        errors = []
        for seed in range(12):
            ids = torch.randint(1000, (3, 1), generator=torch.Generator().manual_seed(seed))
            found, plain, truth = (one.run(requests, ids).logits for one in made)
            errors.append((apart(found, truth), apart(plain, truth)))
            if seed == 6:
                packed = made[0].run_mixed(requests, [20, 1, 30], torch.arange(51), piece=1)
                assert packed is not None
                packed = packed.clone()
                for model_of, one in zip((model, exact), made[1:], strict=True):
                    step = one._cache.extend(requests, [20, 1, 30], mode="prefill")
                    plain = run_step(model_of, step, torch.arange(51))
                errors.append((apart(packed, plain), 0.02))
            bits = found.contiguous().view(torch.uint8)
            if world_size > 1:
                both = [torch.empty_like(bits) for _ in range(world_size)]
                dist.all_gather(both, bits)
                assert all(torch.equal(bits, x) for x in both), f"rank {rank}, {name}"
        ours, before = (sum(one) / len(errors) for one in zip(*errors, strict=True))
        assert ours < 1.25 * before, f"rank {rank}, {name}: {ours:.4f} from fp32, and {before:.4f} before"


def _generation(rank: int, world_size: int) -> None:
    """Greedy, sampled, padded on the left, beams, and guesses that are taken back: token by token the same."""
    prompts = {"input_ids": tokens(21, rows=3).cuda()}
    prompts["attention_mask"] = (torch.arange(21) >= torch.tensor([[4], [2], [0]])).long().cuda()
    greedy: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None}
    sampled = {**greedy, "do_sample": True, "temperature": 1.5, "top_k": 20}
    guessed = {"input_ids": tokens(9).repeat(1, 3).cuda(), "attention_mask": torch.ones(1, 27).long().cuda()}
    calls = [{**prompts, **greedy}, {**prompts, **sampled}, {**prompts, **greedy, "num_beams": 3}]
    calls += [{**guessed, **greedy, "eos_token_id": 2, "prompt_lookup_num_tokens": 4}]
    for kind in ("llama", "gemma3"):
        model = make(kind, "ringattn", torch.float32, head_dim=32).cuda().eval()
        for name, ring in rings(world_size).items():
            answers = []
            for graphs in (False, True):
                torch.manual_seed(0)
                with RingCache(model, ring, max_tokens=128, batch=9, page_size=16, graphs=graphs) as cache:
                    for call in calls:
                        answers.append(model.generate(**call, past_key_values=cache).tolist())
                        cache.reset()
                    assert cache._runner is not None
                    assert (cache._runner.captured > 0) == graphs
            half = len(calls)
            assert answers[:half] == answers[half:], f"rank {rank}, {kind}, {name}"


def _refusals(rank: int, world_size: int) -> None:
    """A model that waits for the device in its forward goes on by plain calls, and generators and streams are as before."""

    def looks(module: Any, given: Any, out: Any) -> None:
        float(out.flatten()[0])

    def waits(module: Any, given: Any, out: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()

    def remembers(module: Any, given: Any, out: Any) -> Tensor:
        # a number that the host knows, and a graph keeps
        module.calls = getattr(module, "calls", 0) + 1
        return out * module.calls

    for hook, why in ((looks, "synchronizing"), (waits, ""), (remembers, "wrong answer")):
        ring = Ring()
        model, graphs, plain, requests = twins(ring, (100, 50))
        norm = model.model.layers[1].mlp
        handle = norm.register_forward_hook(hook)
        stream, ids = torch.cuda.current_stream(), torch.ones(2, 1, dtype=torch.int64)
        for seed in range(3):
            ids.random_(1000, generator=torch.Generator().manual_seed(seed))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = graphs.run(requests, ids).logits
            told = [str(one.message) for one in caught if "CUDA graphs" in str(one.message)]
            assert len(told) == (seed == 0), f"rank {rank}, {hook.__name__}: {told}"
            if hook is not remembers:
                assert apart(found, plain.run(requests, ids).logits) < 0.03
        assert graphs.captured == 0
        assert graphs.refusal is not None
        assert why in graphs.refusal, graphs.refusal
        assert torch.cuda.current_stream() == stream
        assert not torch.cuda.is_current_stream_capturing()
        handle.remove()
        x = torch.randn(1000, device="cuda")
        assert float(x.std()) > 0.5
        torch.cuda.empty_cache()  # an error while a capture is under way
        again = CUDAGraphRunner(model, graphs._cache, select_capturer(None, model, graphs._cache))
        again.run(requests, ids)
        assert again.captured == 1, f"after {hook.__name__}: {again.refusal}"


def _lost(rank: int, world_size: int) -> None:
    """The last rank stops to come: the others say so by name, after a replay."""
    ids, absent = torch.ones(2, 1, dtype=torch.int64), world_size - 1
    # kernels are compiled under the long timeout of this ring
    warm = Ring(transport="copy_engine")
    _, graphs, _, requests = twins(warm, (100, 50))
    graphs.run(requests, ids)
    dist.barrier()
    _, graphs, _, requests = twins(Ring(transport="copy_engine", timeout=SHORT), (100, 50))
    # until ranks have compared who decodes: the next calls are replays alone
    for _ in range(5):
        graphs.run(requests, ids)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    if rank == absent:
        time.sleep(SHORT.total_seconds() + 3)
    with pytest.raises(
        RuntimeError, match="have failed" if rank == absent else rf"ring ranks \[{absent}\] did not come"
    ):
        graphs.run(requests, ids)


ALONE: list[Callable[[int, int], None]] = [_batches, _prompts, _changed, _generation, _refusals]
BODIES = [*ALONE, _lost]


@pytest.mark.parametrize("body", ALONE, ids=[body.__name__.strip("_") for body in ALONE])
def test_one_gpu_decodes_by_graphs_as_without(body: Callable[[int, int], None]) -> None:
    body(0, 1)


@pytest.mark.skipif(RANKS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("body", BODIES, ids=[body.__name__.strip("_") for body in BODIES])
def test_several_gpus_decode_by_graphs_as_without(body: Callable[[int, int], None]) -> None:
    run(body, min(RANKS, 4))


def main() -> None:
    """All bodies, on the ranks of torchrun."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank), timeout=timedelta(seconds=60))
    for body in BODIES:
        began = time.monotonic()
        body(rank, dist.get_world_size())
        torch.cuda.synchronize()
        dist.barrier()
        if rank == 0:
            os.write(1, f"{body.__name__.strip('_')}: green, {time.monotonic() - began:.1f} s\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
