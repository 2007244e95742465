"""Tiny random models of the kinds that ring attention serves, and what one process computes with them.

Every maker takes the name of an attention implementation and gives the same weights under each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from ringattn.integrations.transformers import register

VOCAB = 61

_COMMON = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BERT = {name: value for name, value in _COMMON.items() if name not in ("num_key_value_heads", "head_dim")}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_COMMON},
    "qwen3": {"model_type": "qwen3", **_COMMON},
    "mistral": {"model_type": "mistral", **_COMMON, "sliding_window": 7},
    "gemma2": {
        "model_type": "gemma2",
        **_COMMON,
        "sliding_window": 6,
        "attn_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **_COMMON,
        "sliding_window": 5,
        "query_pre_attn_scalar": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        **_COMMON,
        "sliding_window": 6,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "llama4": {
        "model_type": "llama4_text",
        **_COMMON,
        "intermediate_size_mlp": 32,
        "attention_chunk_size": 8,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        # the second layer goes without rotary embeddings, and tells places by the size of its queries
        "no_rope_layers": [1, 0],
        "attn_temperature_tuning": True,
        "floor_scale": 4,
        "attn_scale": 0.5,
        "layer_types": ["chunked_attention", "full_attention"],
        "moe_layers": [],
    },
    "mixtral": {
        "model_type": "mixtral",
        **_COMMON,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.3,
    },
    "gpt2": {
        "model_type": "gpt2",
        **{name: _COMMON[name] for name in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")},
        **{"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 256},
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    },
    "embedding_gemma": {
        "model_type": "gemma3_text",
        **_COMMON,
        "sliding_window": 8,
        "query_pre_attn_scalar": 4,
        "use_bidirectional_attention": True,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "bert": {"model_type": "bert", **_BERT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "modernbert": {
        "model_type": "modernbert",
        **_BERT,
        "local_attention": 8,
        "global_attn_every_n_layers": 2,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
}


def make(kind: str, implementation: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A model of a kind, in train mode; its weights depend on the kind alone."""
    register()
    settings = {**CONFIGS[kind], **changes}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    auto = {"embedding_gemma": AutoModel, "bert": AutoModelForMaskedLM, "modernbert": AutoModelForMaskedLM}
    torch.manual_seed(5)
    model = auto.get(kind, AutoModelForCausalLM).from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
            elif parameter.dim() > 1:
                # larger than the usual start, so that attention is far from an average
                parameter.mul_(8)
    return model.to(dtype).train()


def tokens(length: int, rows: int = 1, seed: int = 0) -> Tensor:
    """Tokens without any that a model treats specially: `rows length`."""
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradient of each parameter that has one."""
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def learn(model: nn.Module, batch: dict[str, Any], loss_of: Callable[[Any], Tensor] | None = None) -> Tensor:
    """One forward and backward; the loss."""
    out = model(**batch)
    loss = out.loss if loss_of is None else loss_of(out)
    loss.backward()
    return loss.detach()
