"""Every refusal says what was given, what is needed and what to do; nothing is accepted and ignored."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.attention.flex_attention import create_block_mask

from ringattn import (
    Partial,
    Ring,
    RingMultiheadAttention,
    Sharding,
    attention_reference,
    finalize,
    merge,
    online_logsumexp,
    online_softmax,
    reduce_partials,
    replace_multihead_attention,
    ring_attention,
    ring_attention_with_lse,
    scaled_dot_product_attention,
    simulate_ring,
)
from ringattn.plan.attention_spec import AttentionSpec, ScoreTensors, serialize
from ringattn.plan.layouts import make_shards
from ringattn.schedule.validation import check_call
from tests.support.pool import Pools
from tests.support.short_mask import ShortMask

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
    "no heads": ((x(2, 8, 0, 16), K, K), {}, "must be a multiple of the key heads, got 0 and 2"),
    "sparse": ((Q.to_sparse(), K, K), {"causal": True}, "q must be a dense tensor, got layout torch.sparse_coo"),
    "meta": ((Q.to("meta"), K, K), {}, "q must have numbers, got a meta tensor"),
    "nested v": (
        (Q, K, torch.nested.as_nested_tensor([K[0]])),
        {},
        "v must be a dense tensor, got a nested one",
    ),
    "no dimensions": ((x(), K, K), {}, r"q must be 4-dimensional, `batch rows heads head_dim`, got shape \(\)"),
    "no head_dim": ((x(2, 8, 4, 0), x(2, 8, 2, 0), K), {}, "head_dim must be at least 1, got 0 for q"),
    "key rows alone": ((Q, x(2, 9, 2, 16), K), {}, "k must have the 8 rows that rank 0 holds of 8, got 9"),
    "heads": ((Q, x(2, 8, 3, 16), x(2, 8, 3, 16)), {}, "must be a multiple of the key heads, got 4 and 3"),
    "rows": ((x(2, 7, 4, 16), K, K), {}, "q must have the 8 rows that rank 0 holds of 8, got 7"),
    "key rows": ((Q, x(2, 9, 2, 16), x(2, 9, 2, 16)), {}, "k must have the 8 rows that rank 0 holds of 8, got 9"),
    "sinks": ((Q, K, K), {"sinks": x(2)}, r"sinks must have shape \(4,\) \(one logit per query head\), got \(2,\)"),
    "integer sinks": ((Q, K, K), {"sinks": x(4).long()}, "sinks must be floating point, got torch.int64"),
    "alibi": ((Q, K, K), {"alibi_slopes": x(1)}, r"alibi_slopes must have shape \(4,\)"),
    "key_bias": ((Q, K, K), {"key_bias": x(2, 9)}, r"key_bias must have shape \(2, 8\) \(this rank's keys\)"),
    "bias": ((Q, K, K), {"bias": x(2, 3, 8, 8)}, r"bias must be broadcastable to \(2, 4, 8, 8\)"),
    "scale": ((Q, K, K), {"softmax_scale": float("nan")}, "softmax_scale must be finite, got nan"),
    "a scale that learns": (
        (Q, K, K),
        {"softmax_scale": x().requires_grad_()},
        "multiply q by a scale that is learned",
    ),
    "softcap": ((Q, K, K), {"softcap": -1.0}, "softcap must be at least 0"),
    "a wide softcap": (
        (Q.half(), K.half(), K.half()),
        {"softcap": 8193},
        r"softcap must be from 7.89e-31 to 8192 for torch.float16, got 8193: .*\(0.0 is none\), or pass float32",
    ),
    "a wider softcap": (
        (Q.bfloat16(), K.bfloat16(), K.bfloat16()),
        {"softcap": 1e5},
        "softcap must be from .* to 65536 for torch.bfloat16, got 1e",
    ),
    "a softcap beyond fp32": ((Q, K, K), {"softcap": 3e38}, "softcap must be from .* for torch.float32, got 3e"),
    "a softcap below fp32": ((Q, K, K), {"softcap": 1e-40}, "softcap must be from .* for torch.float32, got 1e-40"),
    "dropout": ((Q, K, K), {"dropout_p": 1.0, "dropout_seed": 0}, r"dropout_p must be in \[0, 1\), got 1.0"),
    "seed": ((Q, K, K), {"dropout_p": 0.1}, "dropout_seed must be given when dropout_p is 0.1"),
    "long seed": ((Q, K, K), {"dropout_p": 0.1, "dropout_seed": 2**64}, "dropout_seed must have 64 bits, got 1844"),
    "lengths": ((Q, K, K), {"lengths": ((0, 3),)}, r"one \(start, stop\) per batch element, 2, got 1"),
    "counts as lengths": (
        (Q, K, K),
        {"lengths": [5, 8]},
        r"lengths must have one \(start, stop\) per batch element, got \[5, 8\]; \(0, n\) are the first n tokens",
    ),
    "a tensor of counts": ((Q, K, K), {"lengths": torch.tensor([5, 8])}, r"lengths must have .* got \[5, 8\]"),
    "triples as lengths": ((Q, K, K), {"lengths": [(0, 1, 2)] * 2}, "lengths must have one .* per batch element, got"),
    "a word as flag": ((Q, K, K), {"causal": "no"}, "causal must be True or False, got 'no'; convert it first"),
    "nothing as flag": ((Q, K, K), {"causal": None}, "causal must be True or False, got None"),
    "a number as flag": ((Q, K, K), {"deterministic": 2}, "deterministic must be True or False, got 2"),
    "no softcap": ((Q, K, K), {"softcap": None}, "softcap must be a number, got None; convert it first"),
    "a flag as softcap": ((Q, K, K), {"softcap": True}, "softcap must be a number, got True"),
    "a word as scale": ((Q, K, K), {"softmax_scale": "0.5"}, "softmax_scale must be a number, got '0.5'"),
    "several scales": ((Q, K, K), {"softmax_scale": torch.ones(4)}, "softmax_scale must be a number, got tensor"),
    "a huge cap": ((Q, K, K), {"softcap": 10**400}, "softcap must be a number, got 1000"),
    "a word as dropout": ((Q, K, K), {"dropout_p": "0.5", "dropout_seed": 1}, "dropout_p must be a number, got '0.5'"),
    "several flags": ((Q, K, K), {"causal": torch.ones(2, dtype=torch.bool)}, r"causal must be .*, got tensor\(\["),
    "several rates": ((Q, K, K), {"dropout_p": torch.ones(2)}, r"dropout_p must be a number, got tensor\(\["),
    "windows": (
        (Q, K, K),
        {"window": torch.tensor([1, 2])},
        r"window must be an int, \(left, right\) or None, got tensor",
    ),
    "prefix": ((Q, K, K), {"prefix_len": 3}, "prefix_len must come with causal=True"),
    "window": ((Q, K, K), {"window": (-1, 0)}, "window"),
    "fractions of a window": ((Q, K, K), {"window": (1.5, 0)}, r"window must be of integers, got \(1.5, 0\)"),
    "a flag as window": ((Q, K, K), {"window": True}, r"window must be an int, \(left, right\) or None, got True"),
    "fractions of a prefix": (
        (Q, K, K),
        {"causal": True, "prefix_len": 3.0},
        "prefix_len must be of integers, got 3.0",
    ),
    "no number as prefix": ((Q, K, K), {"prefix_len": None}, "prefix_len must be of integers, got None"),
    "a word as chunk": ((Q, K, K), {"chunk_len": "4"}, "chunk_len must be of integers, got '4'"),
    "endless window": ((Q, K, K), {"window": (float("inf"), 0)}, r"window must be of integers, got \(inf, 0\)"),
    "documents of keys": (
        (Q, K, K),
        {"kv_sharding": RING.sharding(8, documents=[0, 3, 8])},
        "kv_sharding must have no documents, or those of sharding",
    ),
    "chunk": ((Q, K, K), {"chunk_len": 0}, "chunk_len must be at least 1 or None, got 0"),
    "impl": ((Q, K, K), {"impl": "fast"}, "impl must be"),
    "a quoted impl": ((Q, K, K), {"impl": "a'b"}, """impl must be "auto" or one of .*, got "a'b\""""),
    "an impl of two lines": ((Q, K, K), {"impl": "a\nb"}, r"impl must be .*, got 'a\\nb'"),
    "a list as impl": ((Q, K, K), {"impl": ["eager"]}, r"impl must be .*, got \['eager'\]"),
    "a quoted backward": ((Q, K, K), {"backward": "a'b"}, """backward must be one of .*, got "a'b\""""),
    "no backward": ((Q, K, K), {"backward": None}, "backward must be one of .*, got None"),
    "backward": ((Q, K, K), {"backward": "both"}, "backward must be one of auto, keys, queries, got 'both'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_inconsistent_calls_are_refused(name: str) -> None:
    (q, k, v), options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        ring_attention(q, k, v, SHARDING, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [[0, 3.7], [0, 4]]}, "lengths must be of integers, got 3.7"),
        ({"lengths": torch.tensor([[0.0, 3.0]] * 2)}, "lengths must be of integers, got 0.0"),
        ({"lengths": [[False, True]] * 2}, "lengths must be of integers, got False"),
        ({"dropout_p": 0.5, "dropout_seed": 0.5}, "dropout_seed must be an integer, got 0.5"),
        ({"dropout_p": 0.5, "dropout_seed": True}, "dropout_seed must be an integer, got True"),
        ({"dropout_p": 0.5, "dropout_seed": torch.ones(2).int()}, r"dropout_seed must be an integer, got tensor\(\["),
    ],
)
def test_fractions_are_not_rounded(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ring_attention(Q, K, K, SHARDING, **options)


def test_an_argument_that_is_no_sharding_is_named() -> None:
    with pytest.raises(TypeError, match=r"sharding must be what ring.sharding\(seq_len\) gives, got Ring"):
        ring_attention(Q, K, K, RING)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"kv_sharding must be what .* gives, got bool"):
        ring_attention(Q, K, K, SHARDING, kv_sharding=True)  # pyright: ignore[reportArgumentType]


Z = Partial.identity((2,), 3)

OF_ANOTHER_KIND: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "fractions of documents": (RING.sharding, {"seq_len": 8, "documents": [0, 3.5, 8]}, "documents must be of integers, got 3.5"),
    "a fraction of a tensor": (
        RING.sharding,
        {"seq_len": 8, "documents": [0, torch.tensor(2.0), 8]},
        r"documents must be of integers, got tensor\(2.\)",
    ),
    "a flag among documents": (RING.sharding, {"seq_len": 8, "documents": [0, True, 8]}, "documents must be of integers, got True"),
    "one document": (RING.sharding, {"seq_len": 8, "documents": 8}, r"documents must be boundaries \(0, .*\), got 8"),
    "a whole float": (RING.sharding, {"seq_len": 8.0}, "seq_len must be an integer, got 8.0"),
    "a flag as length": (RING.sharding, {"seq_len": True}, "seq_len must be an integer, got True"),
    "an unknown mask": (
        RING.sharding,
        {"seq_len": 8, "layout": "balanced", "balance": {"foo": 1}},
        r"balance must have options among causal, window, .*, got \['foo'\]",
    ),
    "documents to balance": (
        RING.sharding,
        {"seq_len": 8, "layout": "balanced", "balance": {"documents": (0, 8)}},
        r"balance must have options among .*, got \['documents'\]",
    ),
    "a word to balance": (
        RING.sharding,
        {"seq_len": 8, "layout": "balanced", "balance": "causal"},
        "balance must be a dict of mask options, got 'causal'",
    ),
    "segments that are a number": (
        RING.sharding,
        {"seq_len": 8, "layout": "segments", "segments": 8},
        "segments must be a list of lengths, got 8",
    ),
    "a float among segments": (
        RING.sharding,
        {"seq_len": 8, "layout": "segments", "segments": [4.0, 4]},
        "segments must be of integers, got 4.0",
    ),
    "nothing to shard": (SHARDING.shard, {"x": None}, "x must be a tensor, got NoneType"),
    "a list to shard": (SHARDING.shard, {"x": [1] * 8, "dim": 0}, "x must be a tensor, got list"),
    "an array to shard": (SHARDING.shard, {"x": np.ones(8), "dim": 0}, "x must be a tensor, got ndarray"),
    "a whole float as dim": (SHARDING.shard, {"x": Q, "dim": 1.0}, "dim must be an integer, got 1.0"),
    "nothing to unshard": (SHARDING.unshard, {"x_local": None}, "x_local must be a tensor, got NoneType"),
    "nothing to assemble": (SHARDING.assemble, {"parts": None}, "parts must be a sequence of tensors, got NoneType"),
    "one tensor to assemble": (SHARDING.assemble, {"parts": Q}, "parts must be a sequence of tensors, got Tensor"),
    "parts of nothing": (SHARDING.assemble, {"parts": [None]}, r"parts\[0\] must be a tensor, got NoneType"),
    "no nodes": (Ring, {"nodes": None}, "nodes must be an integer, got None"),
    "a whole float of nodes": (Ring, {"nodes": 1.0}, "nodes must be an integer, got 1.0"),
    "a word as budget": (Ring, {"memory_budget": "1G"}, "memory_budget must be an integer, got '1G'"),
    "no number as budget": (Ring, {"memory_budget": float("nan")}, "memory_budget must be an integer, got nan"),
    "an unknown impl": (Ring, {"impl": "foo"}, 'impl must be "auto" or one of hopper, torch, portable, eager, got \'foo\''),
    "a word as permission": (Ring, {"save_gathered_kv": "no"}, "save_gathered_kv must be True or False, got 'no'"),
    "a word as limit": (Ring, {"nccl_max_ctas": "4"}, "nccl_max_ctas must be an integer, got '4'"),
    "no partial": (Partial, {"m": None, "l": x(2), "o": x(2, 3)}, "m must be a tensor, got NoneType"),
    "no scores": (Partial.from_scores, {"s": None, "v": x(2, 3)}, "s must be a tensor, got NoneType"),
    "a tuple to merge": (merge, {"a": (x(2), x(2), x(2, 3)), "b": Z}, "a must be a Partial, got tuple"),
    "a tuple to merge with": (merge, {"a": Z, "b": (x(2), x(2), x(2, 3))}, "b must be a Partial, got tuple"),
    "tuples to reduce": (reduce_partials, {"parts": [Z, (1, 2, 3)]}, r"parts\[1\] must be a Partial, got tuple"),
    "one partial to reduce": (reduce_partials, {"parts": Z}, "parts must be a sequence of partials, got Partial"),
    "a tuple to finalize": (finalize, {"p": (1, 2, 3)}, "p must be a Partial, got tuple"),
    "no logits": (online_softmax, {"x": None}, "x must be a tensor, got NoneType"),
    "a fraction as dim": (online_logsumexp, {"x": x(2), "dim": 0.5}, "dim must be an integer, got 0.5"),
    "a fraction as block": (online_softmax, {"x": x(2), "block_size": 2.0}, "block_size must be an integer, got 2.0"),
    "no model": (replace_multihead_attention, {"model": None}, "model must be a module, got NoneType"),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_ANOTHER_KIND)
def test_a_tensor_of_another_kind_is_named(name: str) -> None:
    call, options, message = OF_ANOTHER_KIND[name]
    with pytest.raises((TypeError, ValueError), match=message):
        call(**options)


WHOLE: dict[str, tuple[dict[str, Any], str]] = {
    "q 3-d": ({"q": Q[0]}, r"q must be 4-dimensional, .*, got shape \(8, 4, 16\)"),
    "no q": ({"q": None}, "q must be a tensor, got NoneType"),
    "v rows": ({"v": K[:, :7]}, r"v must have rows and heads \(8, 2\) like k, got \(7, 2\)"),
    "do rows": ({"do": Q[:, :7]}, r"do must have shape \(2, 8, 4, 16\) on cpu, got \(2, 7, 4, 16\)"),
    "do heads": ({"do": Q[:, :, :1]}, r"do must have shape \(2, 8, 4, 16\) on cpu, got \(2, 8, 1, 16\)"),
    "a list as do": ({"do": [1]}, "do must be a tensor, got list"),
    "dlse": ({"dlse": x(2, 4, 7)}, r"dlse must have shape \(2, 4, 8\) on cpu, got \(2, 4, 7\)"),
    "key_bias": ({"key_bias": x(2, 7)}, r"key_bias must have shape \(2, 8\) .*, got \(2, 7\)"),
    "bias": ({"bias": x(8, 7)}, r"bias must be broadcastable to \(2, 4, 8, 8\) .*, got \(8, 7\)"),
    "ranks": ({"world_size": 2.0}, "world_size must be an integer, got 2.0"),
    "nodes": ({"nodes": None}, "nodes must be an integer, got None"),
    "documents": ({"documents": (0, 3.0, 8)}, "documents must be of integers, got 3.0"),
    "seed": ({"dropout_p": 0.5, "dropout_seed": 1.5}, "dropout_seed must be an integer, got 1.5"),
    "save_gathered_kv": ({"save_gathered_kv": "no"}, "save_gathered_kv must be True or False, got 'no'"),
    "memory_budget": ({"memory_budget": "1G"}, "memory_budget must be an integer, got '1G'"),
    "balance": ({"balance": {"causal": True}}, "balance must be given with layout='balanced' only"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_simulated_ring_names_the_wrong_argument(name: str) -> None:
    options, message = WHOLE[name]
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        simulate_ring(**{"q": Q, "k": K, "v": K, "world_size": 2, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"q": None}, "q must be a tensor, got NoneType"),
        ({"q": Q[0]}, "q must be 4-dimensional"),
        ({"bias": [1]}, "bias must be a tensor, got list"),
        ({"causal": "no"}, "causal must be True or False, got 'no'"),
        ({"window": 1.5}, r"window must be an int, \(left, right\) or None, got 1.5"),
        ({"lengths": [(0.0, 3.0)] * 2}, "lengths must be of integers, got 0.0"),
        ({"documents": (0, 3.0, 8)}, "documents must be of integers, got 3.0"),
        ({"dropout_p": 2.0}, r"dropout_p must be in \[0, 1\), got 2.0"),
        ({"dropout_p": 0.5, "dropout_seed": 1.5}, "dropout_seed must be an integer, got 1.5"),
    ],
)
def test_the_reference_names_a_tensor_of_another_kind(options: dict[str, Any], message: str) -> None:
    given = {"q": Q, "k": K, "v": K, **options}
    with pytest.raises((TypeError, ValueError), match=message):
        attention_reference(given.pop("q"), given.pop("k"), given.pop("v"), **given)


BLOCKS = create_block_mask(lambda b, h, i, j: j <= i, 1, 1, 8, 8, "cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"query": None}, "query must be a tensor, got NoneType"),
        ({"key": [1]}, "key must be a tensor, got list"),
        ({"attn_mask": [[True]]}, "attn_mask must be a tensor, got list"),
        ({"attn_mask": np.ones((8, 8), dtype=bool)}, "attn_mask must be a tensor, got ndarray"),
        ({"attn_mask": BLOCKS}, "attn_mask must be a tensor, got BlockMask"),
        ({"is_causal": torch.ones(2, dtype=torch.bool)}, "is_causal must be True or False, got tensor"),
        ({"enable_gqa": "no"}, "enable_gqa must be True or False, got 'no'"),
        ({"dropout_p": torch.ones(2)}, "dropout_p must be a number, got tensor"),
    ],
)
def test_sdpa_names_a_tensor_of_another_kind(options: dict[str, Any], message: str) -> None:
    given = dict.fromkeys(("query", "key", "value"), Q.transpose(1, 2))
    with pytest.raises((TypeError, ValueError), match=message):
        scaled_dot_product_attention(**{**given, "sharding": SHARDING, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"query": None}, "query must be a tensor, got NoneType"),
        ({"attn_mask": [[0.0]]}, "attn_mask must be a tensor, got list"),
        ({"key_padding_mask": [[0.0]]}, "key_padding_mask must be a tensor, got list"),
        ({"is_causal": "no"}, "is_causal must be True or False, got 'no'"),
        ({"need_weights": "no"}, "need_weights must be True or False, got 'no'"),
    ],
)
def test_multihead_attention_names_a_tensor_of_another_kind(options: dict[str, Any], message: str) -> None:
    given = dict.fromkeys(("query", "key", "value"), x(1, 8, 16))
    with pytest.raises((TypeError, ValueError), match=message):
        RingMultiheadAttention(16, 2, batch_first=True)(**{**given, **options})


def odd_calls() -> list[str]:
    """Calls that are wrong on rank 1 only, and what each rank says of them."""
    ring = Ring(timeout=timedelta(seconds=5))
    sharding = ring.sharding(9)
    q, wrong = torch.randn(1, sharding.shard_len, 2, 8), ring.rank == 1
    calls: list[dict[str, Any]] = [
        {"dropout_p": 0.5, "dropout_seed": None if wrong else 1},
        {"softmax_scale": float("nan") if wrong else 0.5},
        {"window": "3" if wrong else 3},
        {"lengths": [0] if wrong else [[0, 3]]},
        {"bias": torch.zeros(5, 9)},  # of the rows that rank 0 has
        {"chunk_len": 3.0 if wrong else 3},
        {"causal": "no" if wrong else False},
        {"softcap": None if wrong else 0.0},
        {"window": (torch.tensor([1, 2]), 0) if wrong else 3},
        {"k": None if wrong else q},
        {"v": q.tolist() if wrong else q},
        {"v": torch.nested.as_nested_tensor([q[0]]) if wrong else q},
        {"sinks": [0.0, 0.0] if wrong else torch.zeros(2)},
    ]

    def derived(*options: Any) -> Any:
        return ring_attention(q, q, options[0], sharding)

    said = []
    if wrong:
        for derive in (lambda: torch.func.jvp(derived, (q,), (q,)), lambda: torch.func.vjp(derived, q)):
            with pytest.raises(NotImplementedError, match="must be differentiated") as caught:
                derive()
            said.append(str(caught.value))
    else:
        for _ in range(2):
            with pytest.raises(ValueError, match="ring rank 1 refused") as caught:
                derived(q)
            said.append(str(caught.value))
    for options in calls:
        with pytest.raises((ValueError, TypeError)) as caught:
            ring_attention(**{"q": q, "k": q, "v": q, "sharding": sharding, **options})
        said.append(str(caught.value))
    assert ring_attention(q, q, q, sharding).shape == q.shape
    return said


@pytest.mark.dist
def test_an_error_on_one_rank_is_raised_on_all_ranks_at_once(pool: Pools) -> None:
    for others, mine in zip(*pool(2).run(odd_calls), strict=True):
        assert others.startswith("ring rank 1 refused: ")
        assert mine in others


@pytest.mark.parametrize("seconds", [0, -1])
def test_every_wait_has_a_timeout(seconds: int) -> None:
    with pytest.raises(ValueError, match="timeout must be longer than 0, got"):
        Ring(timeout=timedelta(seconds=seconds))


def odd_gradients() -> str:
    """All ranks have evaluated a call; then they train, one of them its bias of keys, too. What each rank says of it."""
    ring = Ring(timeout=timedelta(seconds=5))
    sharding, wrong = ring.sharding(8), ring.rank == 1
    q, key_bias = torch.randn(1, sharding.shard_len, 2, 8), torch.zeros(1, sharding.shard_len)
    ring_attention(q, q, q, sharding, key_bias=key_bias)
    trained, odd = q.clone().requires_grad_(), key_bias.clone().requires_grad_(wrong)
    with pytest.raises(ValueError, match=r"got a different one on ring ranks \[1\] \(tensors") as caught:
        ring_attention(trained, q, q, sharding, key_bias=odd)
    return str(caught.value)


@pytest.mark.dist
def test_gradients_that_only_some_ranks_want_are_refused_after_an_evaluation(pool: Pools) -> None:
    here, there = pool(2).run(odd_gradients)
    assert here == there


def odd_gathers() -> list[str]:
    """What gathers rows of all ranks and differs on rank 1, and what each rank says of it."""
    ring = Ring(timeout=timedelta(seconds=5))
    sharding, wrong = ring.sharding(8), ring.rank == 1
    rows = torch.randn(2, sharding.shard_len, 8)
    attention = RingMultiheadAttention(8, 2, batch_first=True)
    said = []
    for call in (
        lambda: attention(rows, rows, rows, need_weights=not wrong, sharding=sharding),
        lambda: sharding.unshard(rows.int() if wrong else rows),
        lambda: sharding.unshard(rows.clone().requires_grad_(wrong)),
        lambda: sharding.unshard(rows[:, :1] if wrong else rows),
    ):
        with pytest.raises(ValueError, match=r"rank 1|shard_len") as caught:
            call()
        said.append(str(caught.value))
    assert sharding.unshard(rows).shape == (2, 8, 8)
    assert torch.equal(sharding.shard(sharding.unshard(rows)), rows)
    return said


@pytest.mark.dist
def test_rows_that_differ_are_not_gathered(pool: Pools) -> None:
    for _, mine in zip(*pool(2).run(odd_gathers), strict=True):
        assert "must be the same on all ranks of a ring" in mine or "must have shard_len 4 in dim 1, got 1" in mine


def attend(q: torch.Tensor) -> torch.Tensor:
    return ring_attention(q, K, K, SHARDING)


def dual() -> None:
    with forward_ad.dual_level():
        attend(forward_ad.make_dual(Q, Q))


def dual_option(name: str, *shape: int) -> None:
    with forward_ad.dual_level():
        option: dict[str, Any] = {name: forward_ad.make_dual(torch.ones(shape), torch.ones(shape))}
        ring_attention(Q, K, K, SHARDING, **option)


def batch_of_lse() -> None:
    q = Q.clone().requires_grad_()
    _, lse = ring_attention_with_lse(q, K, K, SHARDING)
    torch.autograd.grad(lse, q, torch.ones(3, *lse.shape), is_grads_batched=True)


def batch(how: Callable[[Callable[[torch.Tensor], Any], torch.Tensor], Any]) -> Any:
    """Gradients of one call for three cotangents at once."""
    q = Q.clone().requires_grad_()
    o = attend(q)
    return how(lambda do: torch.autograd.grad(o, q, do, is_grads_batched=do.dim() > o.dim()), torch.ones(3, *Q.shape))


@pytest.mark.parametrize(
    ("derive", "message"),
    [
        (dual, "must be differentiated backward"),
        (lambda: dual_option("sinks", 4), "must be differentiated backward"),
        (lambda: dual_option("alibi_slopes", 4), "must be differentiated backward"),
        (lambda: dual_option("key_bias", 1, 8), "must be differentiated backward"),
        (lambda: dual_option("bias", 1, 4, 8, 8), "must be differentiated backward"),
        (batch_of_lse, "must be given one gradient at a time"),
        (lambda: torch.func.jvp(attend, (Q,), (Q,)), "must be differentiated backward"),
        (lambda: torch.func.vjp(attend, Q), "must be differentiated by autograd"),
        (lambda: torch.func.grad(lambda q: attend(q).sum())(Q), "must be differentiated by autograd"),
        (lambda: batch(lambda grad, do: grad(do)), "must be given one gradient at a time"),
        (lambda: batch(lambda grad, do: torch.func.vmap(grad)(do)), "must be given one gradient at a time"),
        (lambda: torch.autograd.functional.jacobian(attend, Q, vectorize=True), "must be given one gradient at a time"),
    ],
)
def test_derivatives_that_are_not_there_are_refused(derive: Callable[[], Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        derive()


def test_tensors_on_different_devices_are_refused() -> None:
    call = AttentionSpec.deserialize(serialize(SHARDING, softmax_scale=1.0), rank=0)
    with pytest.raises(ValueError, match="k must be on the device of q, cpu, got meta"):
        check_call(Q, K.to("meta"), K, call, ScoreTensors())


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
    shards = make_shards("zigzag", 8, 2, ShortMask(8, 8))
    with pytest.raises(ValueError, match="must be that of rank 0 of 1, as its ring is here, got one for rank 0 of 2"):
        Sharding(8, "zigzag", shards, 0, ring=RING)
    with pytest.raises(
        ValueError, match="kv_sharding must be that of rank 0 of 1, like sharding, got one for rank 1 of 2"
    ):
        ring_attention(Q, x(1, 4, 2, 16), x(1, 4, 2, 16), SHARDING, kv_sharding=Sharding(8, "zigzag", shards, 1))


def test_numbers_and_flags_may_be_those_of_tensors() -> None:
    expected = ring_attention(Q, K, K, SHARDING, causal=True, softmax_scale=0.5, softcap=2.0)
    for flag, one in ((1, torch.tensor(0.5)), (torch.tensor(True), torch.tensor([0.5]))):
        found: Any = {"causal": flag, "softmax_scale": one, "softcap": 2, "deterministic": 0}
        assert torch.equal(ring_attention(Q, K, K, SHARDING, **found), expected)


def test_integers_that_are_tensors_are_integers() -> None:
    q, k = torch.randn_like(Q), torch.randn_like(K)
    expected = ring_attention(q, k, k, SHARDING, causal=True, window=4)
    for window in (torch.tensor(4), (torch.tensor(3), 0), [torch.tensor(3), torch.tensor(0).byte()]):
        found: Any = window
        assert torch.equal(ring_attention(q, k, k, SHARDING, causal=True, window=found), expected)


def test_a_mask_to_balance_is_given_as_to_a_call() -> None:
    def shards(**balance: Any) -> Any:
        return simulate_ring(Q, K, K, 2, layout="balanced", balance=balance), RING.sharding(
            8, "balanced", balance=balance
        )

    assert shards(causal=True, window=4)[1] == shards(causal=True, window=(3, 0))[1]
    with pytest.raises(ValueError, match="causal must be True or False, got 'no'"):
        RING.sharding(8, "balanced", balance={"causal": "no"})
    assert shards(lengths=[[0, 4], [2, 8]])[1] == shards(lengths=torch.tensor([[0, 4], [2, 8]]))[1]


def test_segments_are_given_to_the_simulated_ring_as_to_the_real_one() -> None:
    found = simulate_ring(Q, K, K, 2, layout="segments", segments=[3, 5], causal=True).o
    assert torch.equal(RING.sharding(8, "segments", segments=(3, 5)).positions, torch.arange(8))
    torch.testing.assert_close(found, simulate_ring(Q, K, K, 1, causal=True).o)


def test_balance_without_the_balanced_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="balance must be given with layout='balanced' only"):
        RING.sharding(8, balance={"causal": True})
