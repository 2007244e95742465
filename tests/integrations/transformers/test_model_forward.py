"""A model whose new tokens go to a sharded cache computes what one process computes from the whole prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from ringattn import Ring
from ringattn.inference import PagedKVCache
from ringattn.integrations.transformers import RingMask, describe_mask, masks, run_step
from ringattn.integrations.transformers.model_forward import forward_step
from tests.integrations.transformers.models import make, tokens
from tests.support.pool import Pools

DECODERS = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss")
EAGER = ("gemma2", "gpt_oss")
"""Soft caps and sinks, which eager attention alone knows."""


def _cache(pages: int = 64, page_size: int = 4) -> PagedKVCache:
    return PagedKVCache(
        Ring(), layers=2, kv_heads=2, head_dim=8, dtype=torch.float32, pages=pages, page_size=page_size, device="cpu"
    )


def through_cache(kind: str, lengths: Sequence[int], chunks: Sequence[Sequence[int]], decoded: int) -> list[Tensor]:
    """Logits of the last token of each request after each call: packed prefills in chunks, then batched decoding."""
    model = make(kind, "ringattn", torch.float32).eval()
    cache = _cache()
    prompts = [tokens(length, seed=i)[0] for i, length in enumerate(lengths)]
    requests = [cache.add_request(length) for length in lengths]
    found = []
    for counts in chunks:
        chosen = [i for i, count in enumerate(counts) if count]
        step = cache.extend([requests[i] for i in chosen], [counts[i] for i in chosen], mode="prefill")
        new = [prompts[i][cache.length(requests[i]) - counts[i] : cache.length(requests[i])] for i in chosen]
        found.append(run_step(model, step, torch.cat(new)))
    lasting = [i for i, length in enumerate(lengths) if cache.length(requests[i]) < length]
    for _ in range(decoded):
        step = cache.extend([requests[i] for i in lasting], [1] * len(lasting), mode="decode")
        new = torch.stack([prompts[i][cache.length(requests[i]) - 1] for i in lasting])
        found.append(run_step(model, step, new[:, None]))
    return found


def alone(kind: str, prompt: Tensor) -> Tensor:
    """Logits of every token, by one process: `n vocab`."""
    model = make(kind, "eager" if kind in EAGER else "sdpa", torch.float32).eval()
    with torch.no_grad():
        return model(prompt[None], use_cache=False).logits[0]


def assert_equal(found: Sequence[Tensor], kind: str, ends: Sequence[Sequence[tuple[int, int]]]) -> None:
    """Each call's logits are those of (request, tokens so far) by one process."""
    longest = {i: max(n for call in ends for j, n in call if j == i) for call in ends for i, _ in call}
    expected = {i: alone(kind, tokens(n, seed=i)[0]) for i, n in longest.items()}
    assert len(found) == len(ends)
    for logits, call in zip(found, ends, strict=True):
        whole = torch.stack([expected[i][n - 1] for i, n in call])
        torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("kind", DECODERS)
def test_packed_prompts_chunks_and_decoding_are_one_model(pool: Pools, kind: str, world_size: int) -> None:
    lengths = (37, 9, 22)
    chunks = ((19, 5, 0), (14, 0, 17), (0, 1, 2))
    results = pool(world_size).run(through_cache, kind, lengths, chunks, 3)
    ends = [[(0, 19), (1, 5)], [(0, 33), (2, 17)], [(1, 6), (2, 19)]]
    ends += [[(0, 33 + x), (1, 6 + x), (2, 19 + x)] for x in (1, 2, 3)]
    for found in results:
        assert all(torch.equal(a, b) for a, b in zip(found, results[0], strict=True)), "ranks differ"
    assert_equal(results[0], kind, ends)


def by_hand(kind: str) -> tuple[int, Tensor, Tensor, Tensor]:
    """A prefill whose rows a program takes itself, one without any logits, and a decoding call of five tokens."""
    model = make(kind, "ringattn", torch.float32).eval()
    cache = _cache()
    prompt = tokens(29)
    request = cache.add_request(40)
    with torch.no_grad():
        step = cache.extend([request], [24], mode="prefill")
        logits = model(step.take(prompt[:, :24]), position_ids=step.positions, step=step, use_cache=False).logits
        mine = step.positions[0]
        step = cache.extend([request], [5])
        drafted = model(prompt[:, 24:], position_ids=step.positions, step=step, use_cache=False).logits
    step = cache.extend([request], [3], mode="prefill")
    none = run_step(model, step, tokens(3)[0], wanted=[])
    assert none.shape[0] == 0
    return step.rows, mine, logits[0], drafted[0]


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt_oss"])
def test_programs_may_shard_batches_by_themselves(pool: Pools, kind: str) -> None:
    expected = alone(kind, tokens(29)[0])
    results = pool(2).run(by_hand, kind)
    assert sorted(torch.cat([mine for _, mine, _, _ in results]).tolist()) == list(range(24))
    assert min(rows for rows, _, _, _ in results) == 0, "one rank had nothing to do"
    for _, mine, logits, drafted in results:
        torch.testing.assert_close(logits, expected[mine], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(drafted, expected[24:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "llama4"])
def test_drafted_tokens_read_nothing_of_a_mask_that_a_graph_would_not_read_again(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A capture would fix whatever a forward decides by values: here nothing is."""
    prompt = tokens(29)
    expected = alone(kind, prompt[0])
    model = make(kind, "ringattn", torch.float32).eval()
    cache = _cache()
    request = cache.add_request(40)
    run_step(model, cache.extend([request], [20], mode="prefill"), prompt[:, :20])
    described: list[RingMask] = []

    def describe(*args: Any, **kwargs: Any) -> RingMask:
        described.append(describe_mask(*args, **kwargs))
        return described[-1]

    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "ringattn", describe)
    monkeypatch.setattr(masks, "_is_captured", lambda device: True)
    for start in (20, 24):
        step = cache.extend([request], [4], mode="decode")
        with torch.no_grad():
            out = forward_step(model, step, {"input_ids": prompt[:, start : start + 4]}, step.positions, None)
        torch.testing.assert_close(out.logits[0], expected[start : start + 4], rtol=1e-4, atol=1e-4)
    # in every forward once for each kind of layer
    kinds = 1 if kind == "llama" else 2
    assert [(mask.causal, mask.overlay) for mask in described] == [(True, "")] * 2 * kinds


def added_up() -> tuple[Tensor, bool]:
    ring = Ring()
    whole = torch.zeros(2, 3, dtype=torch.bfloat16)
    whole[:, ring.rank] = ring.rank + 0.1
    found = ring.sum(whole)
    return found, found is whole


def test_rows_that_one_rank_has_come_to_all_unchanged(pool: Pools) -> None:
    for found, in_place in pool(2).run(added_up):
        expected = torch.tensor([[0.1, 1.1, 0.0]] * 2, dtype=torch.bfloat16)
        assert torch.equal(found, expected)
        assert in_place


def _refused(
    match: str, error: type[Exception] = ValueError, implementation: str = "ringattn", **changes: object
) -> None:
    model = make("llama", implementation, torch.float32).eval()
    cache = _cache()
    settings: dict[str, object] = {"input_ids": tokens(20), "use_cache": False}
    step = cache.extend([cache.add_request(40)], [20], mode="prefill")
    settings |= {"step": step, "position_ids": step.positions, **changes}
    with torch.no_grad(), pytest.raises(error, match=match):
        model(**settings)


def test_calls_that_do_not_fit_a_step_are_refused() -> None:
    mask = torch.ones(1, 20, dtype=torch.long)
    mask[0, :3] = 0
    _refused("step must be a ForwardBatch, got str", step="decode")
    _refused("attention_mask must be left out of a call with a step", attention_mask=mask)
    _refused(r"this rank's rows, \(1, 20\), got \(1, 19\) queries", input_ids=tokens(19), position_ids=None)
    _refused("sharding and cu_seq_lens must be left out", sharding=Ring().sharding(20))
    model = make("llama", "ringattn", torch.float32)
    cache = _cache()
    step = cache.extend([cache.add_request(40)], [20], mode="prefill")
    with pytest.raises(ValueError, match="must not require gradients, which a cache does not serve"):
        model(tokens(20), position_ids=step.positions, step=step, use_cache=False)
    narrow = PagedKVCache(Ring(), layers=2, kv_heads=4, head_dim=8, dtype=torch.float32, pages=8, device="cpu")
    step = narrow.extend([narrow.add_request(40)], [20], mode="prefill")
    with pytest.raises(ValueError, match=r"k must have shape \(1, 20, 4, 8\).*got \(1, 20, 2, 8\)"):
        run_step(model, step, tokens(20))
    shallow = PagedKVCache(Ring(), layers=1, kv_heads=2, head_dim=8, dtype=torch.float32, pages=8, device="cpu")
    step = shallow.extend([shallow.add_request(40)], [20], mode="prefill")
    with pytest.raises(ValueError, match="layer must be from 0 to 0, got 1"):
        run_step(model, step, tokens(20))
    step = cache.extend([cache.add_request(40)], [20], mode="prefill")
    with pytest.raises(ValueError, match=r"tokens must be the 1 x 20 new tokens that the step counts, got \(1, 19\)"):
        run_step(model, step, tokens(19))
    with pytest.raises(RuntimeError, match="the model must attend with ringattn, got one that did not"):
        run_step(make("llama", "sdpa", torch.float32).eval(), step, tokens(20))


def test_dropout_with_a_step_is_refused() -> None:
    model = make("llama", "ringattn", torch.float32, attention_dropout=0.5)
    cache = _cache()
    step = cache.extend([cache.add_request(40)], [20], mode="prefill")
    with pytest.raises(ValueError, match=r"dropout must be 0 in a call with a step, got 0.5; call model.eval\(\)"):
        run_step(model, step, tokens(20))
