"""Slices of layers that GPUs read out of each other's memory: python -m pytest tests/gpu/test_sharded_weights.py.

With one GPU: TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ringattn import Ring
from ringattn.integrations.transformers import RingCache, shard_weights
from ringattn.integrations.transformers.model_forward import SHARDED
from ringattn.integrations.transformers.sharded_weights import shard
from tests.gpu.test_copy_engine import RANKS, run
from tests.integrations.transformers.models import tokens
from tests.integrations.transformers.test_sharded_weights import make

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(RANKS < 2, reason="needs two GPUs")]


def _both_ways(rank: int, world_size: int) -> None:
    ring, layers, answers = Ring(transport="copy_engine"), [], []
    prompt = tokens(37).cuda()
    call = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": 6, "eos_token_id": None}
    for way in ("all_gather", "auto"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(shard.GATHER, way)
            patch.setattr(shard, "rows_to_gather", lambda plan: 1)
            model = make("gpt_oss", head_dim=64).to(device="cuda", dtype=torch.bfloat16)
            shard_weights(model, ring)
        weights: Any = SHARDED[model]
        assert (weights.gather._reads is None) == (way == "all_gather")
        with weights.gather_ahead():
            layers.append(
                [
                    weights.gather.whole(layer, index).clone()
                    for layer, slots in enumerate(weights.gather._layers)
                    for index in range(len(slots))
                ]
            )
        with RingCache(model, ring, max_tokens=64, page_size=16) as cache:
            answers.append(model.generate(prompt, past_key_values=cache, **call).tolist())
    assert all(map(torch.equal, *layers)), f"rank {rank} of {world_size}"
    assert answers[0] == answers[1], f"rank {rank} of {world_size}"
    ring.close()


def test_gathered_weights_are_the_bits_of_the_all_gather_and_answers_are_equal() -> None:
    run(_both_ways, 2)
