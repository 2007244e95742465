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
