"""Models whose rotary embeddings take other frequencies for longer calls: what one process computes, or an error on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from ringattn import Ring
from ringattn.inference import PagedKVCache
from ringattn.integrations.transformers import RingCache, register, run_step, shard_batch, use_long_factors
from tests.integrations.transformers.models import learn, make, tokens
from tests.support.pool import Pools

MOST = 32
"""Positions with the frequencies of short sequences."""
REFUSAL = f"rows of all ranks and requests must end by position {MOST} where rope_type is "


def rotation(kind: str) -> dict[str, Any]:
    """Entries of a config, as the release of transformers has them."""
    told: dict[str, Any] = {"rope_type": kind, "factor": 4.0}
    if kind == "longrope":
        told |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
    if transformers.__version__.startswith("5."):
        told |= {"rope_theta": 10000.0} | ({"original_max_position_embeddings": MOST} if kind == "longrope" else {})
        return {"rope_parameters": told, "max_position_embeddings": 128 if kind == "longrope" else MOST}
    if kind == "longrope":
        return {"rope_scaling": told, "max_position_embeddings": 128, "original_max_position_embeddings": MOST}
    return {"rope_scaling": told, "max_position_embeddings": MOST}


def batch(lengths: list[int]) -> dict[str, Tensor]:
    """One sequence, or packed documents."""
    ids = tokens(sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": ids, "labels": ids} | ({"position_ids": positions} if len(lengths) > 1 else {})


def loss(kind: str, lengths: list[int], layout: str, compiled: bool = False) -> float | str:
    """Gradients of a rank as a mean over the ranks, or the error."""
    ring, model = Ring(), make("llama", "ringattn", **rotation(kind))
    if compiled:
        for layer in model.model.layers:
            layer.compile(backend="eager", fullgraph=True)
    try:
        mine = learn(model, shard_batch(batch(lengths), ring, layout))
    except Exception as error:  # of the compiler, too
        return str(error)
    return float(torch.stack(ring.gather(mine.reshape(1), 0, [1] * ring.world_size)).mean())


@pytest.mark.parametrize(
    ("kind", "lengths", "layout", "served"),
    [
        ("dynamic", [32], "contiguous", True),
        ("dynamic", [48], "zigzag", False),
        ("dynamic", [48], "striped", False),
        ("dynamic", [24, 32, 28], "contiguous", True),
        ("dynamic", [24, 40, 20], "contiguous", False),
        ("longrope", [32], "zigzag", True),
        ("longrope", [48], "contiguous", False),
        ("longrope", [48], "zigzag", True),
        ("longrope", [72], "contiguous", True),
        ("longrope", [24, 32, 28], "zigzag", True),
        ("longrope", [24, 40, 20], "contiguous", False),
        ("longrope", [44, 12, 28], "contiguous", True),
    ],
)
def test_ranks_train_with_the_frequencies_of_one_process(
    pool: Pools, kind: str, lengths: list[int], layout: str, served: bool
) -> None:
    """Each rank took those for the last position of its own rows."""
    expected = float(learn(make("llama", "sdpa", use_cache=False, **rotation(kind)), batch(lengths)))
    for found in pool(2).run(loss, kind, lengths, layout):
        if served:
            assert found == pytest.approx(expected, rel=1e-6), "angles are fp32"
        else:
            assert str(found).startswith(f"{REFUSAL}{kind!r}")


def test_compiled_layers_refuse_frequencies_of_their_own_too(pool: Pools) -> None:
    for lengths in ([48], [40, 8]):
        for found in pool(2).run(loss, "longrope", lengths, "contiguous", True):
            assert REFUSAL in str(found)
    assert pool(2).run(loss, "longrope", [72], "contiguous", True) == pytest.approx(
        pool(2).run(loss, "longrope", [72], "contiguous"), rel=1e-6
    )


def answer(kind: str, implementation: str, length: int, page_size: int) -> list[int] | str:
    model = make("llama", implementation, torch.float32, **rotation(kind)).eval()
    asked: dict[str, Any] = {"input_ids": tokens(length), "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    if implementation != "ringattn":
        return model.generate(**asked)[0].tolist()
    with RingCache(model, Ring(), max_tokens=128, page_size=page_size) as cache:
        try:
            return model.generate(**asked, past_key_values=cache)[0].tolist()
        except NotImplementedError as error:
            return str(error)


@pytest.mark.parametrize(
    ("kind", "length", "page_size", "served"),
    [
        ("dynamic", 24, 4, True),
        ("dynamic", 30, 4, True),
        ("dynamic", 48, 16, False),
        ("longrope", 48, 4, True),
        ("longrope", 48, 16, False),
    ],
)
def test_ranks_generate_with_the_frequencies_of_one_process(
    pool: Pools, kind: str, length: int, page_size: int, served: bool
) -> None:
    expected = answer(kind, "sdpa", length, page_size)
    assert answer(kind, "ringattn", length, page_size) == expected, "one rank has all rows"
    for found in pool(2).run(answer, kind, "ringattn", length, page_size):
        assert found == expected if served else str(found).startswith(f"{REFUSAL}{kind!r}")


def test_requests_of_one_call_must_want_the_same_frequencies() -> None:
    model = make("llama", "ringattn", torch.float32, **rotation("longrope")).eval()
    cache = PagedKVCache(Ring(), layers=2, kv_heads=2, head_dim=8, dtype=torch.float32, pages=64, page_size=4)
    with pytest.raises(NotImplementedError, match=REFUSAL):
        run_step(
            model,
            cache.extend([cache.add_request(reserve=90), cache.add_request(reserve=20)], [80, 20]),
            tokens(100)[0],
        )
    requests, prompts = [cache.add_request(reserve=40), cache.add_request(reserve=50)], [tokens(40), tokens(50, seed=1)]
    found = run_step(model, cache.extend(requests, [40, 50]), torch.cat(prompts, 1)[0])
    for mine, prompt in zip(found, prompts, strict=True):
        torch.testing.assert_close(mine, model(prompt).logits[0, -1], rtol=1e-4, atol=1e-5)


def long_answer(kind: str, implementation: str) -> list[int]:
    """An answer to a prompt that ends beyond the original length; over a cache, of a model with the long factors alone."""
    register()
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, "pad_token_id": 0}
    if kind == "phi3":
        shape |= {"original_max_position_embeddings": MOST, "bos_token_id": 1, "eos_token_id": 2}
    told = rotation("longrope")
    if kind == "phi3" and "rope_scaling" in told:  # 4.57 takes three fields only
        told["rope_scaling"] = {name: told["rope_scaling"][name] for name in ("short_factor", "long_factor")} | {
            "type": "longrope"
        }
    config = transformers.AutoConfig.for_model(kind, **shape | told)
    if implementation == "ringattn":
        use_long_factors(config)
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    ids = torch.randint(1, 61, (1, 48), generator=torch.Generator().manual_seed(1))
    asked: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    if implementation != "ringattn":
        return model.generate(ids, **asked)[0].tolist()
    with RingCache(model, Ring(), max_tokens=128, page_size=16) as cache:
        return model.generate(ids, past_key_values=cache, **asked)[0].tolist()


@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_long_factors_generate_on_all_ranks_what_transformers_generates_beyond_the_original_length(
    pool: Pools, kind: str
) -> None:
    """Pages of 16 tokens put some rows of 48 below the original length on one rank, and Phi would drop the cache."""
    expected = long_answer(kind, "sdpa")
    assert long_answer(kind, "ringattn") == expected
    assert pool(2).run(long_answer, kind, "ringattn") == [expected, expected]
