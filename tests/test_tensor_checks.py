"""A tensor that means something else than its numbers is refused by its type, wherever one can be given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from ringattn import (
    Partial,
    Ring,
    RingMultiheadAttention,
    attention_reference,
    online_logsumexp,
    online_softmax,
    ring_attention,
    ring_attention_with_lse,
    scaled_dot_product_attention,
    simulate_ring,
)
from ringattn.inference import PagedKVCache
from ringattn.inference.attention import attend

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of", "ignore:.*quantiz", "ignore:.*is deprecated")

SHARDING = Ring().sharding(6)
X = torch.randn(1, 6, 2, 16, generator=torch.Generator().manual_seed(0))
HEADS = X.transpose(1, 2)
ROWS = X.flatten(2)
ATTENTION = RingMultiheadAttention(32, 2, batch_first=True)


def reference(q: Any, k: Any, v: Any, **options: Any) -> Tensor:
    return attention_reference(q, k, v, **options)


def cached(**given: Any) -> Tensor:
    cache = PagedKVCache(
        Ring(), dtype=torch.float32, device="cpu", layers=1, kv_heads=2, head_dim=16, pages=1, page_size=16
    )
    step = cache.extend([cache.add_request(reserve=6)], [6])
    return attend(step, 0, **{**dict.fromkeys("qkv", X), **given})


TAKERS: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    "ring_attention": (
        lambda given: ring_attention(**{"q": X, "k": X, "v": X, "sharding": SHARDING, **given}),
        ("q", "k", "v", "sinks", "alibi_slopes", "key_bias", "bias"),
    ),
    "ring_attention_with_lse": (
        lambda given: ring_attention_with_lse(**{"q": X, "k": X, "v": X, "sharding": SHARDING} | given),
        ("k", "bias"),
    ),
    "scaled_dot_product_attention": (
        lambda given: scaled_dot_product_attention(
            **{"query": HEADS, "key": HEADS, "value": HEADS, "sharding": SHARDING, **given}
        ),
        ("query", "key", "value", "attn_mask"),
    ),
    "RingMultiheadAttention": (
        lambda given: ATTENTION(**{"query": ROWS, "key": ROWS, "value": ROWS, "need_weights": False, **given}),
        ("query", "key", "value", "key_padding_mask", "attn_mask"),
    ),
    "shard": (lambda given: SHARDING.shard(**given), ("x",)),
    "unshard": (lambda given: SHARDING.unshard(**given), ("x_local",)),
    "assemble": (lambda given: SHARDING.assemble(list(given.values())), ("parts[0]",)),
    "simulate_ring": (
        lambda given: simulate_ring(**{"q": X, "k": X, "v": X, "world_size": 2, **given}),
        ("q", "k", "v", "sinks", "alibi_slopes", "key_bias", "bias", "do", "dlse"),
    ),
    "attention_reference": (
        lambda given: reference(**{"q": X, "k": X, "v": X, **given}),
        ("q", "k", "v", "sinks", "alibi_slopes", "key_bias", "bias"),
    ),
    "Partial": (
        lambda given: Partial(**{"m": torch.ones(2), "l": torch.ones(2), "o": torch.ones(2, 3), **given}),
        ("m", "l", "o"),
    ),
    "from_scores": (
        lambda given: Partial.from_scores(**{"s": torch.ones(6), "v": torch.ones(6, 6), **given}),
        ("s", "v"),
    ),
    "online_softmax": (lambda given: online_softmax(**given), ("x",)),
    "online_logsumexp": (lambda given: online_logsumexp(**given), ("x",)),
    "cache": (lambda given: cached(**given), ("q", "k", "v", "sinks", "alibi_slopes")),
}

KINDS: dict[str, tuple[Callable[[], Tensor], type[Exception], str]] = {
    "upper left": (lambda: causal_upper_left(6, 6), NotImplementedError, "a plain tensor, got a CausalBias"),
    "lower right": (lambda: causal_lower_right(6, 6), NotImplementedError, "a plain tensor, got a CausalBias"),
    "masked": (lambda: masked_tensor(X, X > 0), NotImplementedError, "a plain tensor, got a MaskedTensor"),
    "fake": (lambda: FakeTensorMode().from_tensor(X), NotImplementedError, "numbers, got a FakeTensor outside of tracing"),
    "nested": (lambda: torch.nested.nested_tensor([X[0]] * 2), ValueError, "a dense tensor, got a nested one"),
    "jagged": (
        lambda: torch.nested.nested_tensor([X[0]] * 2, layout=torch.jagged), ValueError, "a dense tensor, got a nested one"
    ),
    "sparse": (X.to_sparse, ValueError, "a dense tensor, got layout torch.sparse_coo"),
    "quantized": (
        lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), ValueError, "a dense tensor, got a quantized one"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("taker", TAKERS)
def test_a_tensor_with_a_meaning_of_its_own_is_refused(taker: str, kind: str) -> None:
    call, names = TAKERS[taker]
    make, error, message = KINDS[kind]
    for name in names:
        if (
            name == "attn_mask" and taker == "scaled_dot_product_attention" and kind in ("upper left", "lower right")
        ) or (name == "query" and taker == "RingMultiheadAttention" and kind in ("nested", "jagged")):
            continue  # which are served
        with pytest.raises(error) as caught:
            call({name: make()})
        assert str(caught.value).startswith(f"{name} must {'have' if kind == 'fake' else 'be'} {message}")


class _Ordinary(Tensor):
    """A subclass that means its numbers."""


@pytest.mark.parametrize("make", [lambda: X.as_subclass(_Ordinary), lambda: torch.nn.Parameter(X.clone())])
def test_tensors_that_mean_their_numbers_are_plain(make: Callable[[], Tensor]) -> None:
    x = make()
    expected = ring_attention(X, X, X, SHARDING, causal=True)
    assert torch.equal(ring_attention(x, x, x, SHARDING, causal=True).as_subclass(Tensor), expected)
    assert torch.equal(SHARDING.shard(x).as_subclass(Tensor), X)
    assert torch.equal(online_softmax(x).as_subclass(Tensor), online_softmax(X))


def test_fake_tensors_are_traced_inside_of_their_mode() -> None:
    with FakeTensorMode() as mode:
        x = mode.from_tensor(X)
        assert ring_attention(x, x, x, SHARDING).shape == X.shape
        assert SHARDING.shard(x).shape == X.shape
