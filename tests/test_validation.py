"""Every refusal says what was given, what is needed and what to do; nothing is accepted and ignored."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ringattn import Ring, Sharding, ring_attention
from ringattn.call import Call, describe
from ringattn.layout import make_shards
from ringattn.validation import check_call
from ringattn.visibility import Visibility

RING = Ring()
SHARDING = RING.sharding(8)


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


Q, K = x(2, 8, 4, 16), x(2, 8, 2, 16)

REFUSED: dict[str, tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], dict[str, Any], str]] = {
    "q 3-d": ((x(8, 4, 16), K, K), {}, r"q must be 4-dimensional, `batch rows heads head_dim`, got shape \(8, 4, 16\)"),
    "integer q": ((x(2, 8, 4, 16, dtype=torch.int64), K, K), {}, "q must be float16, bfloat16, float32 or float64"),
    "mixed dtypes": ((Q, K.half(), K), {}, "k must have the dtype of q, torch.float32, got torch.float16"),
    "batch": ((Q, K[:1], K), {}, "k and v must have batch 2 like q, got 1 and 2"),
    "head_dim": ((Q, x(2, 8, 2, 8), K), {}, "k must have head_dim 16 like q, got 8"),
    "v rows": ((Q, K, x(2, 7, 2, 16)), {}, r"v must have rows and heads \(8, 2\) like k, got \(7, 2\)"),
    "heads": ((Q, x(2, 8, 3, 16), x(2, 8, 3, 16)), {}, "must be a multiple of the key heads, got 4 and 3"),
    "rows": ((x(2, 7, 4, 16), K, K), {}, "q must have the 8 rows that rank 0 holds of 8, got 7"),
    "key rows": ((Q, x(2, 9, 2, 16), x(2, 9, 2, 16)), {}, "k must have the 8 rows that rank 0 holds of 8, got 9"),
    "sinks": ((Q, K, K), {"sinks": x(2)}, r"sinks must have shape \(4,\) \(one logit per query head\), got \(2,\)"),
    "integer sinks": ((Q, K, K), {"sinks": x(4).long()}, "sinks must be floating point, got torch.int64"),
    "alibi": ((Q, K, K), {"alibi_slopes": x(1)}, r"alibi_slopes must have shape \(4,\)"),
    "key_bias": ((Q, K, K), {"key_bias": x(2, 9)}, r"key_bias must have shape \(2, 8\) \(this rank's keys\)"),
    "scale": ((Q, K, K), {"softmax_scale": float("nan")}, "softmax_scale must be finite, got nan"),
    "softcap": ((Q, K, K), {"softcap": -1.0}, "softcap must be at least 0"),
    "dropout": ((Q, K, K), {"dropout_p": 1.0, "dropout_seed": 0}, r"dropout_p must be in \[0, 1\), got 1.0"),
    "seed": ((Q, K, K), {"dropout_p": 0.1}, "dropout_seed must be given when dropout_p is 0.1"),
    "lengths": ((Q, K, K), {"lengths": ((0, 3),)}, r"one \(start, stop\) per batch element, 2, got 1"),
    "prefix": ((Q, K, K), {"prefix_len": 3}, "prefix_len must come with causal=True"),
    "window": ((Q, K, K), {"window": (-1, 0)}, "window"),
    "chunk": ((Q, K, K), {"chunk_len": 0}, "chunk_len must be at least 1 or None, got 0"),
    "impl": ((Q, K, K), {"impl": "fast"}, "impl must be"),
    "backward": ((Q, K, K), {"backward": "both"}, "backward must be one of auto, keys, queries, got 'both'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_inconsistent_calls_are_refused(name: str) -> None:
    (q, k, v), options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        ring_attention(q, k, v, SHARDING, **options)


def test_tensors_on_different_devices_are_refused() -> None:
    call = Call.decode(describe(SHARDING, softmax_scale=1.0), rank=0)
    with pytest.raises(ValueError, match="k must be on the device of q, cpu, got meta"):
        check_call(Q, K.to("meta"), K, call, 0, 1)


def test_bias_cannot_travel_with_queries() -> None:
    with pytest.raises(NotImplementedError, match="use backward='keys' or 'auto'"):
        ring_attention(Q, K, K, SHARDING, bias=x(1, 4, 8, 8), backward="queries")


def test_a_kernel_set_that_cannot_serve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(NotImplementedError, match="eager"):
        ring_attention(Q, K, K, SHARDING, impl="portable")


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="window_size"):
        ring_attention(Q, K, K, SHARDING, window_size=3)  # pyright: ignore[reportCallIssue]


def test_a_sharding_of_another_ring_is_refused() -> None:
    shards = make_shards("zigzag", 8, 2, Visibility(8, 8))
    foreign = Sharding(8, "zigzag", shards, 0, ring=RING)
    with pytest.raises(ValueError, match="must be made by this ring"):
        ring_attention(x(1, 4, 4, 16), x(1, 4, 2, 16), x(1, 4, 2, 16), foreign)


def test_balance_without_the_balanced_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="balance must be given with layout='balanced' only"):
        RING.sharding(8, balance={"causal": True})
