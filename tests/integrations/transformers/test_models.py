"""Loss and gradients of models on a ring equal those of one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from ringattn import Ring
from ringattn.integrations.transformers import shard_batch
from tests.integrations.transformers.models import gradients, learn, make, tokens
from tests.support.pool import Pools

FIVE = transformers.__version__.startswith("5.")
DECODERS = (
    "llama",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "gpt_oss",
    "llama4",
    "gpt2",
    *(("mixtral",) if FIVE else ()),
)
"""In 4.57 an expert that no row of a rank chose has no gradient there, so ranks have other lists of gradients."""
ENCODERS = ("bert", "modernbert") if FIVE else ()
"""These are on the attention interface in 5.x only; EmbeddingGemma, which has no head, is in both."""


EAGER = ("gemma2", "gpt_oss")
"""Their soft caps and sinks are known to eager attention only, which is computed in single precision."""


def _dtype(kind: str) -> torch.dtype:
    # so are the experts of 5.x
    return torch.float32 if kind in (*EAGER, "llama4", "mixtral") else torch.float64


def on_ranks(
    kind: str,
    batch: dict[str, Any],
    layout: str,
    options: dict[str, Any],
    checkpointing: bool | None = None,
    **changes: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the ring, averaged over its ranks as DDP does."""
    ring = Ring()
    model = make(kind, "ringattn", _dtype(kind), **changes)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    part = shard_batch(batch, ring, layout, **options)
    share = partial(share_of, part, part.pop("labels")) if kind == "bert" else None
    loss = learn(model, part, share)
    grads = gradients(model)
    for x in (loss, *grads.values()):
        dist.all_reduce(x)
        x /= ring.world_size
    return loss, grads


def share_of(part: dict[str, Any], labels: Tensor, out: Any) -> Tensor:
    """The loss of a model whose own one does not know of num_items_in_batch."""
    total = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / part["num_items_in_batch"]


def alone(
    kind: str, batch: dict[str, Any], implementation: str = "", **changes: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one process, with the attention that transformers trusts most."""
    model = make(kind, implementation or ("eager" if kind in EAGER else "sdpa"), _dtype(kind), **changes)
    return learn(model, {**batch, "use_cache": False}), gradients(model)


def assert_equal(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Equal up to the rounding of the parts that models compute in single precision whatever their dtype."""
    torch.testing.assert_close(found[0], expected[0], rtol=2e-6, atol=0)
    assert found[1].keys() == expected[1].keys()
    # a bias of keys has no gradient: what is found of it is rounding
    least = 1e-3 * max(float(grad.norm()) for grad in expected[1].values())
    for name, grad in expected[1].items():
        error = float((found[1][name] - grad).norm()) / max(float(grad.norm()), least)
        assert error < (5e-5 if grad.dtype == torch.float32 else 5e-6), f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize(
    "kind", [kind for kind in DECODERS if FIVE or kind != "gpt2"]
)  # whose layers of 4.57 pass no sharding on
def test_gradients_of_decoders_on_a_ring_equal_one_process(pool: Pools, kind: str) -> None:
    ids = tokens(37)
    batch = {"input_ids": ids, "labels": ids}
    for found in pool(2).run(on_ranks, kind, batch, "zigzag", {}):
        assert_equal(found, alone(kind, batch))


@pytest.mark.parametrize("layout", ["contiguous", "striped", "balanced", "zigzag"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_every_layout_and_world_size_is_the_same_model(pool: Pools, layout: str, implementation: str) -> None:
    ids = tokens(29, rows=2)
    batch = {"input_ids": ids, "labels": ids}
    world_size = 4 if layout == "zigzag" else 2
    assert_equal(
        pool(world_size).run(on_ranks, "mistral", batch, layout, {})[0], alone("mistral", batch, implementation)
    )


def test_experts_are_balanced_over_the_tokens_of_all_ranks(pool: Pools) -> None:
    """With padding, which the balance leaves out; gradients of the routers are those of one process."""
    batch = _padded("right")
    expected = alone("mixtral", batch)
    assert_equal(pool(2).run(on_ranks, "mixtral", batch, "zigzag", {})[0], expected)
    assert abs(expected[0] - alone("mixtral", batch, output_router_logits=False)[0]) > 0.1


def balance_reentrantly() -> str:
    ids, model = tokens(9), make("mixtral", "ringattn", torch.float32, use_cache=False)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(NotImplementedError, match=r"'use_reentrant': False") as raised:
        model(**shard_batch({"input_ids": ids, "labels": ids}, Ring()))
    return str(raised.value)


def test_a_balance_of_experts_without_gradients_is_refused(pool: Pools) -> None:
    """Reentrant checkpoints record the logits of routers in a forward without gradients."""
    for found in pool(2).run(balance_reentrantly):
        assert found.startswith("router logits must have gradients")


def train_above_routers() -> bool:
    ids, model = tokens(9), make("mixtral", "ringattn", torch.float32, use_cache=False).requires_grad_(False)
    model.model.norm.weight.requires_grad_(True)
    return model(**shard_batch({"input_ids": ids, "labels": ids}, Ring())).loss.requires_grad


def test_routers_may_be_frozen_with_all_below_them(pool: Pools) -> None:
    assert pool(2).run(train_above_routers) == [True, True]


@pytest.mark.skipif(not FIVE, reason="experts without a row have no gradient in 4.57")
@pytest.mark.parametrize("masked", [False, True])
def test_experts_are_balanced_over_the_tokens_of_a_batch_of_fewer_than_ranks(pool: Pools, masked: bool) -> None:
    ids = tokens(3, rows=2)
    batch = {"input_ids": ids, "labels": ids, **({"attention_mask": torch.ones_like(ids)} if masked else {})}
    assert_equal(pool(4).run(on_ranks, "mixtral", batch, "zigzag", {})[0], alone("mixtral", batch))


def _padded(side: str) -> dict[str, Tensor]:
    """Three rows of 23 tokens, of which one has padding on a side, or a hole, and one is whole."""
    ids = tokens(23, rows=3)
    mask = torch.ones_like(ids)
    if side == "left":
        mask[0, :9] = 0
        mask[2, :2] = 0
    elif side == "right":
        mask[0, 14:] = 0
        mask[2, 21:] = 0
    else:
        mask[0, 5:8] = 0
        mask[2, 14] = 0
    labels = ids.masked_fill(mask == 0, -100)
    # the token before a stretch of padding predicts nothing in it, the one at its end does
    labels[:, 1:] = labels[:, 1:].masked_fill(mask[:, :-1] == 0, -100)
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("side", ["left", "right", "hole"])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_padding_changes_no_output_and_no_gradient(pool: Pools, kind: str, side: str) -> None:
    batch = _padded(side)
    assert_equal(pool(2).run(on_ranks, kind, batch, "zigzag", {})[0], alone(kind, batch))


@pytest.mark.parametrize("side", ["left", "right", "hole"])
@pytest.mark.parametrize("kind", ENCODERS)
def test_gradients_of_encoders_on_a_ring_equal_one_process(pool: Pools, kind: str, side: str) -> None:
    batch = {**_padded(side), "token_type_ids": torch.zeros(3, 23, dtype=torch.long)}
    if kind == "modernbert":
        del batch["token_type_ids"]
    found = pool(2).run(on_ranks, kind, batch, "contiguous", {"shift_labels": False})[0]
    assert_equal(found, alone(kind, batch))


def embed(batch: dict[str, Any], implementation: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states of the whole batch, zero where padding is, and the gradients of their product with fixed numbers."""
    ring = Ring()
    model = make("embedding_gemma", implementation)
    sharded = implementation == "ringattn"
    part = shard_batch(batch, ring, "contiguous") if sharded else {**batch, "use_cache": False}
    hidden = model(**part).last_hidden_state
    tokens_here = batch["attention_mask"].bool()
    weights = torch.randn(
        *tokens_here.shape, hidden.shape[-1], dtype=hidden.dtype, generator=torch.Generator().manual_seed(1)
    )
    weights = weights * tokens_here[:, :, None]
    hidden = part["sharding"].unshard(hidden) if sharded else hidden
    # a gathered tensor hands its gradients to all ranks, each of which computes the whole loss
    loss = (hidden * weights).sum() / ring.world_size
    loss.backward()
    grads = gradients(model)
    if sharded and ring.world_size > 1:
        for x in grads.values():
            dist.all_reduce(x)
    return hidden.detach() * tokens_here[:, :, None], grads


@pytest.mark.parametrize("side", ["left", "right", "hole"])
def test_a_bidirectional_gemma_on_a_ring_equals_one_process(pool: Pools, side: str) -> None:
    batch = _padded(side)
    del batch["labels"]
    found, expected = pool(2).run(embed, batch, "ringattn")[0], embed(batch, "sdpa")
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    assert_equal((expected[0].sum(), found[1]), (expected[0].sum(), expected[1]))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_recomputes_the_same_ring(pool: Pools, reentrant: bool) -> None:
    batch = _padded("left")
    assert_equal(pool(2).run(on_ranks, "gemma2", batch, "zigzag", {}, reentrant)[0], alone("gemma2", batch))


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_dropout_on_a_ring_equals_one_process(pool: Pools, reentrant: bool | None) -> None:
    ids = tokens(26)
    batch = {"input_ids": ids, "labels": ids}
    torch.manual_seed(0)
    expected = alone("llama", batch, "ringattn", attention_dropout=0.3)
    assert_equal(pool(2).run(on_ranks, "llama", batch, "zigzag", {}, reentrant, attention_dropout=0.3)[0], expected)
    without = alone("llama", batch, "ringattn")
    assert not torch.equal(expected[0], without[0])


@pytest.mark.parametrize("kind", [*DECODERS, *ENCODERS])
@pytest.mark.parametrize("side", [None, "right", "left"])
def test_a_model_without_a_sharding_attends_to_all_it_is_given(kind: str, side: str | None) -> None:
    if kind == "llama4" and side == "left":
        pytest.skip("refused, as test_refusals shows")
    ids = tokens(19)
    batch = {"input_ids": ids, "labels": ids} if side is None else _padded(side)
    assert_equal(alone(kind, batch, "ringattn"), alone(kind, batch))


def test_rows_of_padding_are_zero_whatever_they_hold() -> None:
    outputs: list[Tensor] = []
    model = make("llama", "ringattn")
    model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda module, args: outputs.append(args[0]))
    for side in ("left", "right", "hole"):
        batch = _padded(side)
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)
        padding = batch["attention_mask"] == 0
        assert (outputs[-1][padding] == 0).all()
        assert outputs[-1][~padding].ne(0).any(-1).all()
        assert outputs[-1].isfinite().all()
