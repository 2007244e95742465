"""Models of multi-head latent attention hand latents on: they learn and generate on a ring as on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import cpu_offload
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from ringattn import Ring, autograd
from ringattn.integrations.transformers import RingCache, register, shard_batch
from ringattn.integrations.transformers.latents import hands_latents_on, latent_sizes
from tests.integrations.transformers.models import VOCAB, gradients, tokens
from tests.support.pool import Pools

LATENT, ROTARY = 24, 8
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "q_lora_rank": 16, "kv_lora_rank": LATENT, "qk_rope_head_dim": ROTARY, "qk_nope_head_dim": 12, "v_head_dim": 20,
    "n_routed_experts": 4, "num_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "axk1": {},
    "deepseek_v2": {"head_dim": ROTARY},
    "deepseek_v3": {"head_dim": ROTARY},
    "glm4_moe_lite": {"head_dim": ROTARY},
    "longcat_flash": {
        "head_dim": ROTARY,
        "num_layers": 2,
        "ffn_hidden_size": 32,
        "expert_ffn_hidden_size": 16,
        "moe_topk": 2,
        "zero_expert_num": 2,
    },
    "mistral4": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "partial_rotary_factor": 0.4,
            "llama_4_scaling_beta": 0.1,  # queries are scaled by their position
        }
    },
    "minicpm3": {"scale_emb": 1, "dim_model_base": 32},
    "youtu": {},
}
LENGTH = 41
NEW_TOKENS = 7

pytestmark = pytest.mark.skipif(int(transformers.__version__[0]) < 5, reason="4.57 expands latents before its cache")


def make(kind: str, attention: str, **sizes: Any) -> Any:
    """Return a tiny model without dropout, whose weights depend on the kind alone."""
    register()
    config = AutoConfig.for_model(kind, **{**SIZES, **FAMILIES[kind], **sizes})
    config.attention_dropout = 0.0
    torch.manual_seed(7)
    # Mistral 4's causal model is no choice of AutoModel
    auto = transformers.Mistral4ForCausalLM._from_config if kind == "mistral4" else AutoModelForCausalLM.from_config
    return auto(config, attn_implementation=attention).float()


class Calls:
    """Counts of the two operators' forwards in this process."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.latents = self.expanded = 0
        original = autograd._forward

        def forward(*args: Any) -> Any:
            self.latents += len(args) == 11
            self.expanded += len(args) == 10
            return original(*args)

        patch.setattr(autograd, "_forward", forward)


def learn(kind: str, batch: int = 1) -> tuple[Tensor, dict[str, Tensor], int, int]:
    """Return loss and gradients of a ring, averaged over ranks, and the calls with latents and with expanded keys."""
    ring, ids = Ring(), tokens(LENGTH * batch).view(batch, LENGTH)
    model = make(kind, "ringattn").train()
    with pytest.MonkeyPatch.context() as patch:
        calls = Calls(patch)
        loss = model(**shard_batch({"input_ids": ids, "labels": ids}, ring)).loss
        loss.backward()
    grads = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in model.named_parameters()}
    loss = loss.detach()
    for x in (loss, *grads.values()):
        dist.all_reduce(x)
        x /= ring.world_size
    return loss, grads, calls.latents, calls.expanded


@pytest.mark.models
@pytest.mark.parametrize(("world_size", "batch"), [(2, 2), (3, 1)])
@pytest.mark.parametrize("kind", FAMILIES)
def test_families_learn_as_on_one_process(pool: Pools, kind: str, world_size: int, batch: int) -> None:
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip("this release has no such model")
    ids, one = tokens(LENGTH * batch).view(batch, LENGTH), make(kind, "eager").train()
    loss = one(input_ids=ids, labels=ids).loss
    loss.backward()
    for found, grads, latents, expanded in pool(world_size).run(learn, kind, batch):
        assert (latents, expanded) == (sum(map(hands_latents_on, one.modules())), 0)
        torch.testing.assert_close(found, loss.detach(), rtol=2e-6, atol=0)
        for name, grad in gradients(one).items():
            error = float((grads[name] - grad).abs().max()) / max(float(grad.abs().max()), 1e-6)
            assert error < 5e-5, f"{name}: relative error {error:.1e}"


def prompts() -> dict[str, dict[str, Any]]:
    """Calls of generate by name: greedy, a batch with padding, and with candidates of prompt lookup."""
    one, two = tokens(LENGTH).view(1, -1), tokens(2 * LENGTH).view(2, -1)
    padding = torch.ones_like(two)
    padding[1, :9] = 0
    repeated = one[:, :12].repeat(1, 3)
    return {
        "greedy": {"input_ids": one, "attention_mask": torch.ones_like(one)},
        "batch": {"input_ids": two, "attention_mask": padding},
        "assisted": {
            "input_ids": repeated,
            "attention_mask": torch.ones_like(repeated),
            "prompt_lookup_num_tokens": 3,
        },
    }


OPTIONS = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": -1}


def generate(kind: str, chunk: int | None) -> tuple[dict[str, Tensor], int | None]:
    """Return the tokens of a ring by name of the call, and the bytes per token of its cache."""
    ring, model, found = Ring(), make(kind, "ringattn").eval(), {}
    size = 0
    for name, inputs in prompts().items():
        with torch.no_grad(), RingCache(model, ring, max_tokens=64, batch=len(inputs["input_ids"])) as cache:
            assert cache.kv is not None
            size = cache.kv.bytes_per_token
            options = {**OPTIONS, **({} if chunk is None else {"prefill_chunk_size": chunk})}
            found[name] = model.generate(**inputs, past_key_values=cache, **options)
    return found, size


@pytest.mark.models
@pytest.mark.parametrize(("world_size", "chunk"), [(1, None), (2, None), (3, 16)])
@pytest.mark.parametrize("kind", FAMILIES)
def test_families_generate_as_with_the_cache_of_transformers(
    pool: Pools, kind: str, world_size: int, chunk: int | None
) -> None:
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip("this release has no such model")
    one = make(kind, "eager").eval()
    with torch.no_grad():
        expected = {name: one.generate(**inputs, **OPTIONS) for name, inputs in prompts().items()}
    layers = sum(map(hands_latents_on, one.modules()))
    for found, size in pool(world_size).run(generate, kind, chunk):
        assert size == layers * 4 * (LATENT + ROTARY)
        for name, ids in expected.items():
            assert torch.equal(found[name], ids), name


def test_without_shards_nothing_changes() -> None:
    ids = tokens(LENGTH).view(1, -1)
    plain, ours = make("deepseek_v3", "sdpa").eval(), make("deepseek_v3", "ringattn").eval()
    with torch.no_grad():
        expected = plain(input_ids=ids).logits
        torch.testing.assert_close(ours(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)
        # other implementations of attention get keys and values of all heads
        ours.set_attn_implementation("sdpa")
        assert torch.equal(ours(input_ids=ids).logits, expected)


@pytest.mark.parametrize("kind", ["adapter", "offloaded"])
def test_layers_with_other_projections_expand_for_themselves(kind: str) -> None:
    model = make("deepseek_v3", "ringattn").eval()
    assert latent_sizes(model) == (LATENT, ROTARY)
    ids = tokens(LENGTH).view(1, -1)
    with torch.no_grad():
        expected = model.generate(input_ids=ids, **OPTIONS, use_cache=False)
        layer = model.model.layers[0].self_attn
        assert hands_latents_on(layer)
        if kind == "adapter":
            layer.kv_b_proj = nn.Sequential(layer.kv_b_proj)
        else:  # the weight is there during the layer's own forward alone
            cpu_offload(layer.kv_b_proj, execution_device=torch.device("cpu"))
        assert latent_sizes(model) is None
        with RingCache(model, Ring(), max_tokens=64) as cache:
            assert cache.kv is not None
            assert cache.kv.latent is None
            assert torch.equal(model.generate(input_ids=ids, past_key_values=cache, **OPTIONS), expected)
