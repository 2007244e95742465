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
    "q 3-d": ((x(8, 4, 16), K, K), {}, "q must"),
    "integer q": ((x(2, 8, 4, 16, dtype=torch.int64), K, K), {}, "q must"),
    "mixed dtypes": ((Q, K.half(), K), {}, "k must"),
    "batch": ((Q, K[:1], K), {}, "k and v must"),
    "head_dim": ((Q, x(2, 8, 2, 8), K), {}, "k must"),
    "v rows": ((Q, K, x(2, 7, 2, 16)), {}, "v must"),
    "no heads": ((x(2, 8, 0, 16), K, K), {}, "must be a multiple of the key heads, got 0 and 2"),
    "sparse": ((Q.to_sparse(), K, K), {"causal": True}, "q must"),
    "meta": ((Q.to("meta"), K, K), {}, "q must"),
    "nested v": ((Q, K, torch.nested.as_nested_tensor([K[0]])), {}, "v must"),
    "no dimensions": ((x(), K, K), {}, "q must"),
    "no head_dim": ((x(2, 8, 4, 0), x(2, 8, 2, 0), K), {}, "head_dim must"),
    "key rows alone": ((Q, x(2, 9, 2, 16), K), {}, "k must"),
    "heads": ((Q, x(2, 8, 3, 16), x(2, 8, 3, 16)), {}, "must be a multiple of the key heads, got 4 and 3"),
    "rows": ((x(2, 7, 4, 16), K, K), {}, "q must"),
    "key rows": ((Q, x(2, 9, 2, 16), x(2, 9, 2, 16)), {}, "k must"),
    "sinks": ((Q, K, K), {"sinks": x(2)}, "sinks must"),
    "integer sinks": ((Q, K, K), {"sinks": x(4).long()}, "sinks must"),
    "alibi": ((Q, K, K), {"alibi_slopes": x(1)}, "alibi_slopes must"),
    "key_bias": ((Q, K, K), {"key_bias": x(2, 9)}, "key_bias must"),
    "bias": ((Q, K, K), {"bias": x(2, 3, 8, 8)}, "bias must"),
    "a mask as bias": ((Q, K, K), {"bias": torch.ones(8, 8, dtype=torch.bool)}, "bias must .* bool mask to 0"),
    "scale": ((Q, K, K), {"softmax_scale": float("nan")}, "softmax_scale must"),
    "a scale that learns": (
        (Q, K, K),
        {"softmax_scale": x().requires_grad_()},
        "multiply q by a scale that is learned",
    ),
    "softcap": ((Q, K, K), {"softcap": -1.0}, "softcap must"),
    "a wide softcap": ((Q.half(), K.half(), K.half()), {"softcap": 8193}, "softcap must"),
    "a wider softcap": ((Q.bfloat16(), K.bfloat16(), K.bfloat16()), {"softcap": 1e5}, "softcap must"),
    "a softcap beyond fp32": ((Q, K, K), {"softcap": 3e38}, "softcap must"),
    "a softcap below fp32": ((Q, K, K), {"softcap": 1e-40}, "softcap must"),
    "dropout": ((Q, K, K), {"dropout_p": 1.0, "dropout_seed": 0}, "dropout_p must"),
    "seed": ((Q, K, K), {"dropout_p": 0.1}, "dropout_seed must"),
    "long seed": ((Q, K, K), {"dropout_p": 0.1, "dropout_seed": 2**64}, "dropout_seed must"),
    "lengths": ((Q, K, K), {"lengths": ((0, 3),)}, r"one \(start, stop\) per batch element, 2, got 1"),
    "counts as lengths": ((Q, K, K), {"lengths": [5, 8]}, "lengths must"),
    "a tensor of counts": ((Q, K, K), {"lengths": torch.tensor([5, 8])}, "lengths must"),
    "triples as lengths": ((Q, K, K), {"lengths": [(0, 1, 2)] * 2}, "lengths must"),
    "a word as flag": ((Q, K, K), {"causal": "no"}, "causal must"),
    "nothing as flag": ((Q, K, K), {"causal": None}, "causal must"),
    "a number as flag": ((Q, K, K), {"deterministic": 2}, "deterministic must"),
    "no softcap": ((Q, K, K), {"softcap": None}, "softcap must"),
    "a flag as softcap": ((Q, K, K), {"softcap": True}, "softcap must"),
    "a word as scale": ((Q, K, K), {"softmax_scale": "0.5"}, "softmax_scale must"),
    "several scales": ((Q, K, K), {"softmax_scale": torch.ones(4)}, "softmax_scale must"),
    "a huge cap": ((Q, K, K), {"softcap": 10**400}, "softcap must"),
    "a word as dropout": ((Q, K, K), {"dropout_p": "0.5", "dropout_seed": 1}, "dropout_p must"),
    "several flags": ((Q, K, K), {"causal": torch.ones(2, dtype=torch.bool)}, "causal must"),
    "several rates": ((Q, K, K), {"dropout_p": torch.ones(2)}, "dropout_p must"),
    "windows": ((Q, K, K), {"window": torch.tensor([1, 2])}, "window must"),
    "prefix": ((Q, K, K), {"prefix_len": 3}, "prefix_len must"),
    "window": ((Q, K, K), {"window": (-1, 0)}, "window"),
    "fractions of a window": ((Q, K, K), {"window": (1.5, 0)}, "window must"),
    "a flag as window": ((Q, K, K), {"window": True}, "window must"),
    "fractions of a prefix": ((Q, K, K), {"causal": True, "prefix_len": 3.0}, "prefix_len must"),
    "no number as prefix": ((Q, K, K), {"prefix_len": None}, "prefix_len must"),
    "a word as chunk": ((Q, K, K), {"chunk_len": "4"}, "chunk_len must"),
    "endless window": ((Q, K, K), {"window": (float("inf"), 0)}, "window must"),
    "documents of keys": ((Q, K, K), {"kv_sharding": RING.sharding(8, documents=[0, 3, 8])}, "kv_sharding must"),
    "chunk": ((Q, K, K), {"chunk_len": 0}, "chunk_len must"),
    "impl": ((Q, K, K), {"impl": "fast"}, "impl must be"),
    "a quoted impl": ((Q, K, K), {"impl": "a'b"}, "impl must"),
    "an impl of two lines": ((Q, K, K), {"impl": "a\nb"}, "impl must"),
    "a list as impl": ((Q, K, K), {"impl": ["eager"]}, "impl must"),
    "a quoted backward": ((Q, K, K), {"backward": "a'b"}, "backward must"),
    "no backward": ((Q, K, K), {"backward": None}, "backward must"),
    "backward": ((Q, K, K), {"backward": "both"}, "backward must"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_inconsistent_calls_are_refused(name: str) -> None:
    (q, k, v), options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        ring_attention(q, k, v, SHARDING, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [[0, 3.7], [0, 4]]}, "lengths must"),
        ({"lengths": torch.tensor([[0.0, 3.0]] * 2)}, "lengths must"),
        ({"lengths": [[False, True]] * 2}, "lengths must"),
        ({"dropout_p": 0.5, "dropout_seed": 0.5}, "dropout_seed must"),
        ({"dropout_p": 0.5, "dropout_seed": True}, "dropout_seed must"),
        ({"dropout_p": 0.5, "dropout_seed": torch.ones(2).int()}, "dropout_seed must"),
    ],
)
def test_fractions_are_not_rounded(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ring_attention(Q, K, K, SHARDING, **options)


def test_an_argument_that_is_no_sharding_is_named() -> None:
    with pytest.raises(TypeError, match="sharding must"):
        ring_attention(Q, K, K, RING)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="kv_sharding must"):
        ring_attention(Q, K, K, SHARDING, kv_sharding=True)  # pyright: ignore[reportArgumentType]


Z = Partial.identity((2,), 3)

OF_ANOTHER_KIND: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "fractions of documents": (RING.sharding, {"seq_len": 8, "documents": [0, 3.5, 8]}, "documents must"),
    "a fraction of a tensor": (
        RING.sharding,
        {"seq_len": 8, "documents": [0, torch.tensor(2.0), 8]},
        "documents must",
    ),
    "a flag among documents": (RING.sharding, {"seq_len": 8, "documents": [0, True, 8]}, "documents must"),
    "one document": (RING.sharding, {"seq_len": 8, "documents": 8}, "documents must"),
    "a whole float": (RING.sharding, {"seq_len": 8.0}, "seq_len must"),
    "a flag as length": (RING.sharding, {"seq_len": True}, "seq_len must"),
    "an unknown mask": (
        RING.sharding,
        {"seq_len": 8, "layout": "balanced", "balance": {"foo": 1}},
        "balance must",
    ),
    "documents to balance": (
        RING.sharding,
        {"seq_len": 8, "layout": "balanced", "balance": {"documents": (0, 8)}},
        "balance must",
    ),
    "a word to balance": (
        RING.sharding,
        {"seq_len": 8, "layout": "balanced", "balance": "causal"},
        "balance must",
    ),
    "segments that are a number": (
        RING.sharding,
        {"seq_len": 8, "layout": "segments", "segments": 8},
        "segments must",
    ),
    "a float among segments": (
        RING.sharding,
        {"seq_len": 8, "layout": "segments", "segments": [4.0, 4]},
        "segments must",
    ),
    "nothing to shard": (SHARDING.shard, {"x": None}, "x must"),
    "a list to shard": (SHARDING.shard, {"x": [1] * 8, "dim": 0}, "x must"),
    "an array to shard": (SHARDING.shard, {"x": np.ones(8), "dim": 0}, "x must"),
    "a whole float as dim": (SHARDING.shard, {"x": Q, "dim": 1.0}, "dim must"),
    "nothing to unshard": (SHARDING.unshard, {"x_local": None}, "x_local must"),
    "nothing to assemble": (SHARDING.assemble, {"parts": None}, "parts must"),
    "one tensor to assemble": (SHARDING.assemble, {"parts": Q}, "parts must"),
    "parts of nothing": (SHARDING.assemble, {"parts": [None]}, r"parts\[0\] must be a tensor, got NoneType"),
    "no nodes": (Ring, {"nodes": None}, "nodes must"),
    "a whole float of nodes": (Ring, {"nodes": 1.0}, "nodes must"),
    "a word as budget": (Ring, {"memory_budget": "1G"}, "memory_budget must"),
    "no number as budget": (Ring, {"memory_budget": float("nan")}, "memory_budget must"),
    "an unknown impl": (Ring, {"impl": "foo"}, "impl must"),
    "a word as permission": (Ring, {"save_gathered_kv": "no"}, "save_gathered_kv must"),
    "a word as limit": (Ring, {"nccl_max_ctas": "4"}, "nccl_max_ctas must"),
    "no partial": (Partial, {"m": None, "l": x(2), "o": x(2, 3)}, "m must"),
    "no scores": (Partial.from_scores, {"s": None, "v": x(2, 3)}, "s must"),
    "a tuple to merge": (merge, {"a": (x(2), x(2), x(2, 3)), "b": Z}, "a must"),
    "a tuple to merge with": (merge, {"a": Z, "b": (x(2), x(2), x(2, 3))}, "b must"),
    "tuples to reduce": (reduce_partials, {"parts": [Z, (1, 2, 3)]}, r"parts\[1\] must be a Partial, got tuple"),
    "one partial to reduce": (reduce_partials, {"parts": Z}, "parts must"),
    "a tuple to finalize": (finalize, {"p": (1, 2, 3)}, "p must"),
    "no logits": (online_softmax, {"x": None}, "x must"),
    "a fraction as dim": (online_logsumexp, {"x": x(2), "dim": 0.5}, "dim must"),
    "a fraction as block": (online_softmax, {"x": x(2), "block_size": 2.0}, "block_size must"),
    "no model": (replace_multihead_attention, {"model": None}, "model must"),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_ANOTHER_KIND)
def test_a_tensor_of_another_kind_is_named(name: str) -> None:
    call, options, message = OF_ANOTHER_KIND[name]
    with pytest.raises((TypeError, ValueError), match=message):
        call(**options)


WHOLE: dict[str, tuple[dict[str, Any], str]] = {
    "q 3-d": ({"q": Q[0]}, "q must"),
    "no q": ({"q": None}, "q must"),
    "v rows": ({"v": K[:, :7]}, "v must"),
    "do rows": ({"do": Q[:, :7]}, "do must"),
    "do heads": ({"do": Q[:, :, :1]}, "do must"),
    "a list as do": ({"do": [1]}, "do must"),
    "dlse": ({"dlse": x(2, 4, 7)}, "dlse must"),
    "key_bias": ({"key_bias": x(2, 7)}, "key_bias must"),
    "bias": ({"bias": x(8, 7)}, "bias must"),
    "ranks": ({"world_size": 2.0}, "world_size must"),
    "nodes": ({"nodes": None}, "nodes must"),
    "documents": ({"documents": (0, 3.0, 8)}, "documents must"),
    "seed": ({"dropout_p": 0.5, "dropout_seed": 1.5}, "dropout_seed must"),
    "save_gathered_kv": ({"save_gathered_kv": "no"}, "save_gathered_kv must"),
    "memory_budget": ({"memory_budget": "1G"}, "memory_budget must"),
    "balance": ({"balance": {"causal": True}}, "balance must"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_simulated_ring_names_the_wrong_argument(name: str) -> None:
    options, message = WHOLE[name]
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        simulate_ring(**{"q": Q, "k": K, "v": K, "world_size": 2, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"q": None}, "q must"),
        ({"q": Q[0]}, "q must"),
        ({"bias": [1]}, "bias must"),
        ({"causal": "no"}, "causal must"),
        ({"window": 1.5}, "window must"),
        ({"lengths": [(0.0, 3.0)] * 2}, "lengths must"),
        ({"documents": (0, 3.0, 8)}, "documents must"),
        ({"dropout_p": 2.0}, "dropout_p must"),
        ({"dropout_p": 0.5, "dropout_seed": 1.5}, "dropout_seed must"),
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
        ({"query": None}, "query must"),
        ({"key": [1]}, "key must"),
        ({"attn_mask": [[True]]}, "attn_mask must"),
        ({"attn_mask": np.ones((8, 8), dtype=bool)}, "attn_mask must"),
        ({"attn_mask": BLOCKS}, "attn_mask must"),
        ({"is_causal": torch.ones(2, dtype=torch.bool)}, "is_causal must"),
        ({"enable_gqa": "no"}, "enable_gqa must"),
        ({"dropout_p": torch.ones(2)}, "dropout_p must"),
    ],
)
def test_sdpa_names_a_tensor_of_another_kind(options: dict[str, Any], message: str) -> None:
    given = dict.fromkeys(("query", "key", "value"), Q.transpose(1, 2))
    with pytest.raises((TypeError, ValueError), match=message):
        scaled_dot_product_attention(**{**given, "sharding": SHARDING, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"query": None}, "query must"),
        ({"attn_mask": [[0.0]]}, "attn_mask must"),
        ({"key_padding_mask": [[0.0]]}, "key_padding_mask must"),
        ({"is_causal": "no"}, "is_causal must"),
        ({"need_weights": "no"}, "need_weights must"),
    ],
)
def test_multihead_attention_names_a_tensor_of_another_kind(options: dict[str, Any], message: str) -> None:
    given = dict.fromkeys(("query", "key", "value"), x(1, 8, 16))
    with pytest.raises((TypeError, ValueError), match=message):
        RingMultiheadAttention(16, 2, batch_first=True)(**{**given, **options})


def odd_calls() -> list[str]:
    """Calls that are wrong on rank 1 only, and what each rank says of them."""
    ring = Ring(timeout=timedelta(seconds=60))
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


def test_an_error_on_one_rank_is_raised_on_all_ranks_at_once(pool: Pools) -> None:
    for others, mine in zip(*pool(2).run(odd_calls), strict=True):
        assert others.startswith("ring rank 1 refused: ")
        assert mine in others


@pytest.mark.parametrize("seconds", [0, -1])
def test_every_wait_has_a_timeout(seconds: int) -> None:
    with pytest.raises(ValueError, match="timeout must"):
        Ring(timeout=timedelta(seconds=seconds))


def odd_gradients() -> str:
    """All ranks have evaluated a call; then they train, one of them its bias of keys, too. What each rank says of it."""
    ring = Ring(timeout=timedelta(seconds=60))
    sharding, wrong = ring.sharding(8), ring.rank == 1
    q, key_bias = torch.randn(1, sharding.shard_len, 2, 8), torch.zeros(1, sharding.shard_len)
    ring_attention(q, q, q, sharding, key_bias=key_bias)
    trained, odd = q.clone().requires_grad_(), key_bias.clone().requires_grad_(wrong)
    with pytest.raises(ValueError, match=r"got a different one on ring ranks \[1\] \(tensors") as caught:
        ring_attention(trained, q, q, sharding, key_bias=odd)
    return str(caught.value)


def test_gradients_that_only_some_ranks_want_are_refused_after_an_evaluation(pool: Pools) -> None:
    here, there = pool(2).run(odd_gradients)
    assert here == there


def odd_gathers() -> list[str]:
    """What gathers rows of all ranks and differs on rank 1, and what each rank says of it."""
    ring = Ring(timeout=timedelta(seconds=60))
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
    with pytest.raises(ValueError, match="k must"):
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
    with pytest.raises(ValueError, match="kv_sharding must"):
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
    with pytest.raises(ValueError, match="causal must"):
        RING.sharding(8, "balanced", balance={"causal": "no"})
    assert shards(lengths=[[0, 4], [2, 8]])[1] == shards(lengths=torch.tensor([[0, 4], [2, 8]]))[1]


def test_segments_are_given_to_the_simulated_ring_as_to_the_real_one() -> None:
    found = simulate_ring(Q, K, K, 2, layout="segments", segments=[3, 5], causal=True).o
    assert torch.equal(RING.sharding(8, "segments", segments=(3, 5)).positions, torch.arange(8))
    torch.testing.assert_close(found, simulate_ring(Q, K, K, 1, causal=True).o)


def test_balance_without_the_balanced_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="balance must"):
        RING.sharding(8, balance={"causal": True})
