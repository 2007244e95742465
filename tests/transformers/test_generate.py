"""What a model generates on the ranks of a ring is what one process generates, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from ringattn import Ring
from ringattn.integrations.transformers import RingCache
from tests.pool import Pools
from tests.transformers.models import make, tokens

DECODERS = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss")
EAGER = ("gemma2", "gpt_oss")
"""Soft caps and sinks, which eager attention alone knows."""

GREEDY = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}
SAMPLED = {"do_sample": True, "temperature": 1.5, "top_k": 20, "max_new_tokens": 12, "eos_token_id": None}
BEAMS = {"num_beams": 3, **GREEDY}


def prompts(rows: int = 1, length: int = 37, padding: int = 0) -> dict[str, Tensor]:
    """Prompts of one length, all but the last of which begin with some padding."""
    ids = tokens(length, rows)
    mask = torch.ones_like(ids)
    for row in range(rows - 1):
        mask[row, : padding + row] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def alone(kind: str, calls: list[dict[str, Any]]) -> list[Tensor]:
    """What one process generates, with the cache of transformers, one call going on from the other."""
    model = make(kind, "eager" if kind in EAGER else "sdpa", torch.float32).eval()
    torch.manual_seed(0)
    cache = transformers.DynamicCache()
    return [model.generate(**call, past_key_values=cache).clone() for call in calls]


def on_ranks(kind: str, calls: list[dict[str, Any]], sizes: dict[str, Any]) -> tuple[list[Tensor], bool]:
    """What a rank generates, and whether all pages came home."""
    ring = Ring()
    model = make(kind, "ringattn", torch.float32).eval()
    # ranks that were seeded differently must draw alike all the same
    torch.manual_seed(ring.rank)
    with RingCache(model, ring, **{"max_tokens": 64, "batch": 4, "page_size": 4, **sizes}) as cache:
        found = [model.generate(**call, past_key_values=cache).clone() for call in calls]
        cache.reset()
        assert cache.kv is not None
        home = set(cache.kv.pages.free) == {cache.kv.pages.pages}
    return found, home and "forward" not in model.__dict__


def assert_same(pool: Pools, world_size: int, kind: str, *calls: dict[str, Any], **sizes: Any) -> None:
    expected = alone(kind, list(calls))
    for found, home in pool(world_size).run(on_ranks, kind, list(calls), sizes):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.tolist() == theirs.tolist()
        assert home


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("options", [GREEDY, SAMPLED, BEAMS], ids=["greedy", "sampled", "beams"])
@pytest.mark.parametrize("kind", DECODERS)
def test_ranks_generate_what_one_process_generates(
    pool: Pools, kind: str, options: dict[str, Any], world_size: int
) -> None:
    pages = {"page_size": 1, "max_tokens": 52} if "num_beams" in options else {}
    assert_same(pool, world_size, kind, {**prompts(), **options}, **pages)


PADDED = prompts(rows=3, length=29, padding=5)


@pytest.mark.dist
@pytest.mark.parametrize("options", [GREEDY, SAMPLED, BEAMS], ids=["greedy", "sampled", "beams"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt_oss"])
def test_batches_padded_on_the_left_are_generated_alike(pool: Pools, kind: str, options: dict[str, Any]) -> None:
    assert_same(pool, 2, kind, {**PADDED, **options}, batch=9, page_size=1 if "num_beams" in options else 4)


@pytest.mark.dist
@pytest.mark.parametrize("chunk", [8, 19])
@pytest.mark.parametrize("kind", ["mistral", "gemma2"])
def test_prompts_may_come_in_chunks(pool: Pools, kind: str, chunk: int) -> None:
    """Of few tokens, which every rank computes, and of more, which ranks share."""
    for world_size in (2, 4):
        assert_same(pool, world_size, kind, {**prompts(rows=2), **GREEDY, "prefill_chunk_size": chunk})


def several_turns(kind: str, implementation: str) -> list[Tensor]:
    """Three turns over one cache, of which the second is taken back and asked anew."""
    ring = Ring()
    model = make(kind, implementation, torch.float32).eval()
    torch.manual_seed(0)
    found = []

    def turn(cache: Any, ids: Tensor, said: Tensor) -> Tensor:
        ids = torch.cat([ids, said], 1)
        ids = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **GREEDY)
        found.append(ids)
        return ids

    def talk(cache: Any) -> list[Tensor]:
        ids = turn(cache, tokens(0, 2), tokens(23, 2))
        length = cache.get_seq_length()
        turn(cache, ids, tokens(5, 2, seed=1))
        cache.crop(length - cache.get_seq_length())
        assert cache.get_seq_length() == length
        turn(cache, ids, tokens(31, 2, seed=2))
        return found

    if implementation != "ringattn":
        return talk(transformers.DynamicCache())
    with RingCache(model, ring, max_tokens=120, batch=2, page_size=4) as cache:
        return talk(cache)


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_turns_go_on_where_the_last_one_ended(pool: Pools, kind: str) -> None:
    expected = several_turns(kind, "eager" if kind in EAGER else "sdpa")
    for found in pool(2).run(several_turns, kind, "ringattn"):
        assert [x.tolist() for x in found] == [x.tolist() for x in expected]


@pytest.mark.dist
def test_turns_after_beams_are_computed_one_after_another(pool: Pools) -> None:
    first = {**prompts(rows=1, length=19), **BEAMS, "num_return_sequences": 3, "max_new_tokens": 5}
    longer = {"input_ids": tokens(50, rows=3, seed=3), **GREEDY}
    model = make("llama", "sdpa", torch.float32).eval()
    cache = transformers.DynamicCache()
    ids = model.generate(**first, past_key_values=cache)
    longer["input_ids"] = torch.cat([ids, longer["input_ids"][:, ids.shape[1] :]], 1)
    longer["attention_mask"] = torch.ones_like(longer["input_ids"])
    assert_same(pool, 2, "llama", first, longer, batch=6, page_size=2)


@pytest.mark.dist
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_candidates_are_checked_in_one_call(pool: Pools, options: dict[str, Any]) -> None:
    """Assisted decoding asks for the logits of several tokens, and takes back the tokens it does not believe."""
    ids = tokens(9).repeat(1, 4)
    looked_up = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **options, "eos_token_id": 2}
    looked_up["prompt_lookup_num_tokens"] = 4
    assert_same(pool, 2, "qwen3", looked_up)


@pytest.mark.dist
def test_several_answers_to_one_prompt_are_drawn(pool: Pools) -> None:
    assert_same(pool, 2, "llama", {**prompts(), **SAMPLED, "num_return_sequences": 4})


def logits_of(keep: Any) -> Tensor:
    ring = Ring()
    model = make("llama", "ringattn", torch.float32).eval()
    with torch.no_grad(), RingCache(model, ring, max_tokens=64, batch=2, page_size=4) as cache:
        return model(tokens(40, rows=2), past_key_values=cache, logits_to_keep=keep).logits


@pytest.mark.dist
@pytest.mark.parametrize("keep", [0, 1, 7, torch.tensor([3, 39, 20])], ids=["all", "last", "seven", "some"])
def test_logits_of_any_rows_come_to_every_rank(pool: Pools, keep: Any) -> None:
    with torch.no_grad():
        expected = make("llama", "sdpa", torch.float32).eval()(tokens(40, rows=2), logits_to_keep=keep).logits
    results = pool(4).run(logits_of, keep)
    for found in results:
        assert torch.equal(found, results[0])
    torch.testing.assert_close(results[0], expected, rtol=1e-4, atol=1e-4)
