"""Answers on ranks with a small model: preempted or not, with pages back from host memory or still there, they are the same."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig

from ringattn.inference import PagedKVCache
from ringattn.integrations.transformers.sharded_weights.shard import use_slices
from ringattn.integrations.transformers.support import cache_sizes
from ringattn.launch.common.distributed import Session
from ringattn.launch.serve import model_runner as model_runner_module
from ringattn.launch.serve import scheduler as scheduler_module
from ringattn.launch.serve.config import TINY, ServeArgs
from ringattn.launch.serve.engine import Engine, worker_loop
from ringattn.launch.serve.kept_prefixes import KeptPrefixes
from ringattn.launch.serve.messages import Event, Stop
from ringattn.launch.serve.model_runner import ModelRunner
from ringattn.launch.serve.models import load_model
from ringattn.launch.serve.rank_channel import RankChannel
from ringattn.launch.serve.sampling import Sampling
from ringattn.launch.serve.scheduler import AnswerRequest, Scheduler
from ringattn.ring import Ring
from tests.launch.serve.test_model_runner import _Ahead
from tests.support.pool import Pools

CPU = torch.device("cpu")
PAGE = 4
LATENT_MODEL = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "q_lora_rank": 16, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 20, "head_dim": 8,
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip

Waves = list[list[tuple[list[int], int, Sampling]]]
Answers = list[tuple[list[int], list[float], int]]
"""Of each request its tokens, their logprobs, and how many tokens of its prompt were cached."""


def serve(
    path: str, waves: Waves, pages: int, slots: int, fp8: bool, ahead: bool, weights: Any = "whole"
) -> tuple[Answers, dict[str, Any]]:
    """Return the answers of rank 0 to requests of which each wave comes when the one before has ended, and the last state."""
    rank = Session(dist.get_rank(), dist.get_world_size(), CPU, "gloo", os.getppid())
    ring, channel = Ring(), RankChannel(rank, 60.0)
    served = load_model(ServeArgs(path, dtype="float32", weights=weights), CPU, rank.rank, rank.world_size)
    if served.plan is not None:
        use_slices(served.plan, ring)
    model: Any = served.model
    kv_dtype = torch.float8_e4m3fn if fp8 else None
    cache = PagedKVCache(
        ring, **cache_sizes(model), dtype=torch.float32, kv_dtype=kv_dtype, pages=pages, page_size=PAGE, device=CPU
    )
    before = scheduler_module.HEADROOM, model_runner_module.MOVED_BYTES
    scheduler_module.HEADROOM, model_runner_module.MOVED_BYTES = 0, 2 * cache.allocator.page_bytes
    try:
        inner = ModelRunner(model, cache, 8, False, host_bytes=slots * cache.allocator.page_bytes)
        runner: Any = _Ahead(inner) if ahead else inner
        if not rank.first:
            worker_loop(runner, channel)
            return [], {"free": cache.free_pages, "prefix": stored(cache, 48)}
        kept = KeptPrefixes(cache.allocator, inner.host_slots, inner.moves)
        engine = Engine(
            runner,
            Scheduler(cache.allocator, chunk=16, max_running=8, kept=kept),
            channel.broadcast,
            time_limit_s=300.0,
        )
        answers: Answers = [([], [], 0) for wave in waves for _ in wave]
        names, left, open_ = iter(range(len(answers))), list(waves), 0

        def deliver(events: list[Event], state: Any) -> None:
            nonlocal open_
            del state
            for event in events:
                assert event.failure is None, event.failure
                tokens, logprobs, _ = answers[event.request_id]
                tokens += [] if event.token is None else [event.token]
                logprobs += [] if event.details is None else [event.details.logprob]
                answers[event.request_id] = tokens, logprobs, event.num_cached
                open_ -= event.last
            if not open_ and not left:
                engine.stop(0.0)
            elif not open_:
                wave = left.pop(0)
                open_ = len(wave)
                engine.submit([AnswerRequest(next(names), prompt, most, sampling=how) for prompt, most, how in wave])

        engine.deliver = deliver
        deliver([], None)
        engine.run()
        channel.broadcast(Stop())
        return answers, {**engine.state(), "free": cache.free_pages, "prefix": stored(cache, 48)}
    finally:
        scheduler_module.HEADROOM, model_runner_module.MOVED_BYTES = before
        channel.close()


def stored(cache: PagedKVCache, length: int) -> list[tuple[int, list[bytes]]]:
    """Return what this rank stores of the newest request's first tokens: of each page its first token, and all its bytes."""
    table = cache.allocator.table(cache.allocator.requests[-1], cache.ring.rank)
    parts = [x.view(torch.uint8) for x in cache.stored]
    return [
        (start, [x[:, page].contiguous().numpy().tobytes() for x in parts])
        for page, start in zip(table.pages, table.starts, strict=True)
        if start < length
    ]


def sampled(seed: int) -> Sampling:
    """Options of which each depends on the tokens and the draws so far."""
    return Sampling(0.9, 0.95, seed=seed, logprobs=0, repetition_penalty=1.2, frequency_penalty=0.3, top_k=50)


def crowd() -> Waves:
    """Requests of one wave, greedy and sampled, some with a common beginning."""
    draw = random.Random(5)
    stem = [draw.randrange(97, 123) for _ in range(18)]
    found = []
    for name in range(5):
        prompt = stem[: 18 * (name % 2)] + [draw.randrange(97, 123) for _ in range(draw.choice([2, 9, 17]))]
        found.append((prompt, draw.choice([3, 14, 24]), sampled(name) if name % 3 else Sampling(0.0, logprobs=0)))
    return [found]


@pytest.fixture(scope="module")
def alone(pool: Pools) -> list[list[int]]:
    """Tokens of the requests of `crowd`, one after another on one rank."""
    answers, _ = pool(1).run(serve, TINY, [[one] for one in crowd()[0]], 200, 0, False, False)[0]
    return [tokens for tokens, _, _ in answers]


@pytest.mark.parametrize(
    ("world_size", "slots", "ahead", "weights"),
    [(1, 40, True, "whole"), (2, 0, True, "whole"), (2, 40, False, "whole"), (2, 0, True, "sharded")],
)
def test_preempted_answers_have_the_tokens_of_answers_alone_and_none_twice(
    pool: Pools, alone: list[list[int]], world_size: int, slots: int, ahead: bool, weights: str
) -> None:
    # 16 pages of 4 tokens for requests of up to 59
    given = crowd(), 16 // world_size, slots, False, ahead, weights
    (answers, state), *others = pool(world_size).run(serve, TINY, *given)
    assert [tokens for tokens, _, _ in answers] == alone
    assert state["totals"]["preemptions"] > 0
    assert not slots or state["host"]["saved_bytes"] > 0
    assert all(other["free"] == state["free"] for _, other in others)


@pytest.fixture(scope="module")
def latent_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The config of a small model of latents."""
    path: Path = tmp_path_factory.mktemp("latent") / "config.json"
    config: Any = AutoConfig.for_model("deepseek_v3", **LATENT_MODEL)
    config.to_json_file(path)
    return str(path)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", ["fp32", "fp8", "latent", "latent fp8"])
def test_a_prefix_from_host_memory_gives_the_bits_of_one_that_stayed(
    pool: Pools, latent_model: str, kind: str, world_size: int
) -> None:
    draw = random.Random(7)
    text, other = ([draw.randrange(97, 123) for _ in range(length)] for length in (48, 70))
    how = Sampling(0.0, logprobs=2)
    waves: Waves = [[(text, 3, how)], [(other, 2, how)], [([*text, 98, 99, 100], 8, sampled(1))]]
    model, fp8 = latent_model if "latent" in kind else TINY, "fp8" in kind
    found, prefixes = [], []
    for pages, slots in ((100, 0), (20, 40), (20, 0)):
        (answers, state), *others = pool(world_size).run(serve, model, waves, pages // world_size, slots, fp8, False)
        found.append(answers)
        prefixes.append([state["prefix"], *(other["prefix"] for _, other in others)])
        assert (state["host"]["loaded_bytes"] > 0) == (slots > 0)
        assert (state["totals"]["host_tokens"] > 0) == (slots > 0)
    there, back, again = found
    assert there[2][2] == back[2][2] == 48, "the whole prefix"
    assert again[2][2] < 48
    assert sum(map(len, prefixes[0])) == 12
    assert prefixes[0] == prefixes[1], "the same ranks have the same bits"
    assert [tokens for tokens, _, _ in there] == [tokens for tokens, _, _ in back]
    if world_size == 1:
        assert there == back, "the bits of logprobs"
    # on several ranks the pages of new tokens go where there is room, and partials are merged in another order
    torch.testing.assert_close(torch.tensor(there[2][1]), torch.tensor(back[2][1]), rtol=1e-5, atol=1e-5)
