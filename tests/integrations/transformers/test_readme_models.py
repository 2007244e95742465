"""The models that the README's table names, beside those of test_models.py, work on a ring as on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from ringattn import Ring
from ringattn.integrations.transformers import RingCache, register, shard_batch
from tests.integrations.transformers.models import VOCAB, gradients, tokens
from tests.support.pool import Pools

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    **SIZES,
    **EXPERTS,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,  # keys have 24 columns
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
DECODERS: dict[str, dict[str, Any]] = {
    "qwen2": GROUPED,
    "qwen3_moe": {**GROUPED, **EXPERTS, "num_experts": 4},
    "mixtral": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "phi": GROUPED,
    "phi3": GROUPED,
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "glm4_moe": {**GROUPED, **EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1},
}
if Version(transformers.__version__) >= Version("5.24"):
    DECODERS["gptj"] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "rotary_dim": 4}
REFUSED = {
    "deepseek_v32": (
        {**LATENT, "index_topk": 8, "index_n_heads": 2, "index_head_dim": 16},
        "indexed_attention|computes attention itself",
    ),
    "qwen3_next": (
        {**GROUPED, **EXPERTS, "num_hidden_layers": 4, "num_experts": 4, "shared_expert_intermediate_size": 16},
        "linear_attention",
    ),
    "qwen3_5_text": ({**GROUPED, "num_hidden_layers": 4}, "linear_attention"),
    "falcon": (
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB},
        "attention classes of its own",
    ),
}
"""Configs of models that are refused, and a part of the message."""
ENCODERS: dict[str, dict[str, Any]] = {
    "distilbert": {"dim": 32, "hidden_dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": VOCAB, "pad_token_id": 0},
    "electra": {**SIZES, "embedding_size": 32},
    "xlm-roberta": SIZES,
}
GEMMA_4 = {
    **GROUPED,
    "head_dim": 8,
    "sliding_window": 6,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
}
LENGTH = 41
NEW_TOKENS = 6


def make(kind: str, attention: str) -> Any:
    """Return a tiny model of a kind without dropout; its weights depend on the kind alone."""
    register()
    sizes = REFUSED[kind][0] if kind in REFUSED else (DECODERS | ENCODERS | {"gemma4_text": GEMMA_4})[kind]
    config = AutoConfig.for_model(kind, **sizes)
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    auto = AutoModelForMaskedLM if kind in ENCODERS else AutoModelForCausalLM
    torch.manual_seed(5)
    return auto.from_config(config, attn_implementation=attention).float().train()


def decode_and_learn(kind: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the tokens that a ring generates, its loss and its gradients, averaged over ranks."""
    ring, ids = Ring(), tokens(LENGTH)
    model = make(kind, "ringattn").eval()
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": -1}
    with torch.no_grad(), RingCache(model, ring, max_tokens=64) as cache:
        answer = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **options)
    return answer, *learn(kind)


def learn(kind: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the gradients of a ring, averaged over ranks."""
    ring, ids = Ring(), tokens(LENGTH)
    model = make(kind, "ringattn")
    loss = model(**shard_batch({"input_ids": ids, "labels": ids}, ring)).loss
    loss.backward()
    # an expert that no token of a rank takes has no gradient there
    grads = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in model.named_parameters()}
    loss = loss.detach()
    for x in (loss, *grads.values()):
        dist.all_reduce(x)
        x /= ring.world_size
    return loss, grads


@pytest.mark.parametrize("kind", DECODERS)
def test_decoders_of_the_readme_learn_and_generate_as_on_one_process(pool: Pools, kind: str) -> None:
    ids = tokens(LENGTH)
    one = make(kind, "eager").eval()
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": -1}
    with torch.no_grad():
        expected = one.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    loss = one.train()(input_ids=ids, labels=ids).loss
    loss.backward()
    for answer, found, grads in pool(2).run(decode_and_learn, kind):
        assert torch.equal(answer, expected)
        torch.testing.assert_close(found, loss.detach(), rtol=2e-6, atol=0)
        for name, grad in gradients(one).items():
            error = float((grads[name] - grad).abs().max()) / max(float(grad.abs().max()), 1e-6)
            assert error < 5e-5, f"{name}: relative error {error:.1e}"


def encode(kind: str, begin: int) -> Tensor:
    """Return the logits of the whole sequence, computed on a ring."""
    ids, ring = tokens(LENGTH), Ring()
    positions = torch.arange(begin, begin + LENGTH)[None]
    batch = {"input_ids": ids} if kind != "xlm-roberta" else {"input_ids": ids, "position_ids": positions}
    part = shard_batch(batch, ring, "contiguous", shift_labels=False)
    return part["sharding"].unshard(make(kind, "ringattn").eval()(**part).logits.detach())


@pytest.mark.skipif(not transformers.__version__.startswith("5."), reason="4.x computes their attention itself")
@pytest.mark.parametrize("kind", ENCODERS)
def test_encoders_of_the_readme_give_what_one_process_gives(pool: Pools, kind: str) -> None:
    expected = make(kind, "eager").eval()(input_ids=tokens(LENGTH)).logits
    # RoBERTa counts from padding_idx + 1
    for found in pool(2).run(encode, kind, 1):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def learn_on_a_ring(kind: str) -> None:
    """Make a model and call it with a shard of a batch."""
    ids = tokens(LENGTH)
    make(kind, "ringattn")(**shard_batch({"input_ids": ids, "labels": ids}, Ring()))


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_the_readme_calls_refused_raise(pool: Pools, kind: str) -> None:
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip("this release has no such model")
    with pytest.raises(Exception, match=REFUSED[kind][1]):
        pool(2).run(learn_on_a_ring, kind)


@pytest.mark.skipif("gemma4_text" not in transformers.CONFIG_MAPPING, reason="this release has no such model")
def test_gemma_4_trains_on_a_ring_as_on_one_process(pool: Pools) -> None:
    ids = tokens(LENGTH)
    model = make("gemma4_text", "eager")
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    for found, grads in pool(2).run(learn, "gemma4_text"):
        torch.testing.assert_close(found, loss.detach(), rtol=1e-5, atol=0)
        for name, grad in gradients(model).items():
            error = float((grads[name] - grad).abs().max()) / max(float(grad.abs().max()), 1e-6)
            assert error < 1e-4, f"{name}: relative error {error:.1e}"
