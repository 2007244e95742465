"""Every causal family of transformers as a tiny random model, and the verdict on it: a ring of ranks against one process.

Workers import this file. `python docs/families.py` runs all of it and writes the table of the page.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ringattn import Ring
from ringattn.integrations.transformers import RingCache, register, replace_recurrent_layers, shard_batch
from tests.integrations.transformers.models import VOCAB, gradients, tokens

MODES = ("plain", "padded", "packed")
EQUAL = "equal"
REFUSED = "refused: "
DIFFERS = "differs: "
NOT_TRIED = "not tried: "
TEXT_MODEL = "see its text model "

DOCUMENTS = (0, 17, 45)
MOST_PARAMETERS = 8_000_000
"""Of a tiny model; a family whose config ignores the sizes below is not tried."""
LOSS_BOUND, GRADIENT_BOUND = 4e-6, 1e-4
"""Relative: norms and rotary embeddings are computed in single precision whatever the dtype of a model."""

_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "word_embed_proj_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size", "ffn_hidden_size"), 32),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "expert_ffn_hidden_size", "d_inner", "dff"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "intermediate_size_mlp", "shared_intermediate_size"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "decoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads"), 2),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "decoder_layers", "encoder_layers", "n_layers"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_source_positions"), 128),
    **dict.fromkeys(("max_target_positions", "seq_length", "max_seq_len"), 128),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "local_attention", "window_size"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 8),
    **dict.fromkeys(("n_group", "topk_group", "mamba_n_groups", "n_groups"), 1),
    "n_shared_experts": 1,
    "vocab_size": VOCAB,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rotary_dim": 8,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "is_decoder": True,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_INKLING = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "rel_extent": 32}
_GEMMA = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}
_IMAGES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_IMAGES |= {"image_size": 28, "patch_size": 14}
_OWN: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "cpmant": {"dim_head": 8, "dim_ff": 32},
    "deepseek_v2": {"num_experts_per_tok": 2, "head_dim": 8},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {"per_layer_config": {}, "head_dim": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {**_GEMMA, "num_kv_shared_layers": 0, "laurel_rank": 8},
    "gemma4_text": {**_GEMMA, "per_layer_config": {}},
    "gemma4_unified_text": {**_GEMMA, "per_layer_config": {}},
    "git": {"vision_config": _IMAGES},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "inkling2_loop_text": _INKLING,
    "inkling2_text": _INKLING,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "minicpm3": {"scale_emb": 1, "dim_model_base": 32},
    "mistral4": {
        "head_dim": 20,
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 16},
            **{"mscale": 1.0, "mscale_all_dim": 1.0, "partial_rotary_factor": 0.4, "llama_4_scaling_beta": 0.1},
        },
    },
    "phi4_multimodal": {
        "vision_config": _IMAGES,
        "audio_config": {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1},
    },
    "qwen4_exp_text": {
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8},
        **{"indexer_compress_ratio": 4, "ngram_vocab_size_base": 64, "ple_embed_dim": 8, "hc_lowrank": 8},
    },
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_embds": False,
        "attention_head_size": 8,
        "feed_forward_size": 32,
    },
    "roc_bert": {
        **dict.fromkeys(("pronunciation_embed_dim", "shape_embed_dim"), 8),
        **dict.fromkeys(("pronunciation_vocab_size", "shape_vocab_size"), VOCAB),
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layer_types": 2 * ["linear_attention", "hybrid"],
        "num_hidden_layers": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_dt_rank": 2,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""Sizes of families whose own must fit each other."""
SINGLE = ("inkling2_loop_text", "inkling2_text", "xglm")
"""Families that cannot run in double precision."""
RANDOM = ("phimoe",)
"""Families whose routers draw experts at random in training: they are compared in eval mode."""
FAMILIES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LATENT_FAMILIES = (
    *(
        "axk1",
        "axk2",
        "bailing_hybrid",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "dots3_note_text",
        "glm4_moe_lite",
    ),
    *("glm_moe_dsa", "hy_v4", "kimi_linear", "longcat_flash", "minicpm3", "mistral4", "sarvam_mla", "youtu"),
)
"""Causal models whose attention is multi-head latent attention."""
CALLS = ("greedy", "batch", "padded", "assisted")
"""Calls of `generate`: of a row, of two, of two with padding on the left, and of a row with candidates of prompt lookup."""


def tiny_config(kind: str) -> Any:
    """A small config of a family: known sizes in place of its own, one layer of each type, no dropout."""
    own = _OWN.get(kind, {})
    # sizes that differ between layers are no attributes of the whole
    default = AutoConfig.for_model(kind, **(own if "per_layer_config" in own else {}))
    if kind != (text := getattr(default.get_text_config(), "model_type", kind)):
        raise ValueError(f"{TEXT_MODEL}{text}")
    computed = {name for name in _SIZES if isinstance(getattr(type(default), name, None), property)}
    changes = {name: size for name, size in _SIZES.items() if getattr(default, name, None) is not None}
    changes |= {name: _SIZES[name] for name in ("head_dim", "num_key_value_heads") if hasattr(default, name)}
    if hasattr(default, "kv_lora_rank"):  # latents are expanded to keys of all heads
        changes["num_key_value_heads"] = _SIZES["num_attention_heads"]
    changes = {name: size for name, size in changes.items() if name not in computed}
    if (types := getattr(default, "layer_types", None)) is not None:
        kept = list(dict.fromkeys(types))
        kept += kept[: max(0, 2 - len(kept))]
        places = [types.index(one) for one in kept]
        lists = {n: x for n, x in vars(default).items() if isinstance(x, (list, tuple)) and len(x) == len(types)}
        changes |= {name: [x[place] for place in places] for name, x in lists.items()}
        changes |= {"num_hidden_layers": len(kept)}
    dropouts = [name for name, x in vars(default).items() if "drop" in name and isinstance(x, float)]
    return AutoConfig.for_model(kind, **{**changes, **dict.fromkeys(dropouts, 0.0), **own})


def _model(config: Any, **options: Any) -> Any:
    # Mistral 4's causal model is no choice of AutoModel
    own = {"mistral4": "Mistral4ForCausalLM"}.get(config.model_type)
    return (getattr(transformers, own)._from_config if own else AutoModelForCausalLM.from_config)(config, **options)


def make(kind: str, attention: str) -> Any:
    """A model of a family with the same weights whatever the attention."""
    register()
    config = tiny_config(kind)
    with torch.device("meta"):
        count = sum(x.numel() for x in _model(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"its smallest model has {count} parameters")
    torch.manual_seed(5)
    # the other experts are computed in single precision only
    model: Any = _model(config, attn_implementation=attention, experts_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # attention is then far from an average
    return model.to(torch.float32 if kind in SINGLE else torch.float64).train(kind not in RANDOM)


def batch_of(mode: str) -> dict[str, Tensor]:
    """A batch of one mode: two whole rows, two rows of which one is padded on the right, or two documents in a row."""
    if mode == "packed":
        ids = tokens(DOCUMENTS[-1])
        positions = torch.cat([torch.arange(stop - start) for start, stop in pairwise(DOCUMENTS)])[None]
        return {"input_ids": ids, "position_ids": positions, "labels": _first_left_out(ids)}
    ids = tokens(41, rows=2)
    if mode == "plain":
        return {"input_ids": ids, "labels": ids}
    mask = torch.ones_like(ids)
    mask[0, 36:] = 0  # fewer than a window: eager attention makes NaN of rows that see nothing
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _first_left_out(ids: Tensor) -> Tensor:
    """Labels in which no document predicts the next one's first token."""
    return ids.index_fill(1, torch.tensor(DOCUMENTS[:-1]), -100)


def parts_alone(mode: str) -> Iterator[tuple[dict[str, Tensor], int]]:
    """The batches of one process, and the labels in each: packed documents are run each by itself."""
    if mode != "packed":
        whole = batch_of(mode)
        yield whole, int(whole["labels"][:, 1:].ne(-100).sum())
        return
    ids = tokens(DOCUMENTS[-1])
    for start, stop in pairwise(DOCUMENTS):
        part = ids[:, start:stop]
        yield {"input_ids": part, "labels": part}, stop - start - 1


def alone(kind: str, mode: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one process."""
    try:
        model = make(kind, "eager")
    except ValueError as error:
        if "attn_implementation" not in str(error):
            raise
        model = make(kind, "sdpa")
    parts = list(parts_alone(mode))
    count, total = sum(number for _, number in parts), torch.zeros((), dtype=torch.float64)
    for batch, number in parts:
        loss = model(**batch, use_cache=False).loss * number / count
        loss.backward()
        total += loss.detach().double()
    return total, gradients(model)


def on_ring(kind: str, mode: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of a ring, averaged over its ranks."""
    ring, model = Ring(), make(kind, "ringattn")
    try:
        replace_recurrent_layers(model)
    except ValueError as error:
        if "must have recurrent layers" not in str(error):
            raise
    loss = model(**shard_batch(batch_of(mode), ring)).loss
    loss.backward()
    grads = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in model.named_parameters()}
    average: Callable[[Tensor], Tensor] = lambda x: ring.sum(x.contiguous()) / ring.world_size  # noqa: E731
    return average(loss.detach().double()), {name: average(x) for name, x in grads.items()}


def judge(kind: str, mode: str) -> str:
    """Verdict of this rank on a family in a mode: EQUAL, or REFUSED, DIFFERS or NOT_TRIED with the reason."""
    transformers.logging.set_verbosity_error()
    try:
        expected = alone(kind, mode)
    except Exception as error:  # whatever a family raises without us is its reason
        return NOT_TRIED + shorten(error)
    try:
        found = on_ring(kind, mode)
    except Exception as error:
        return _verdict_on(error)
    return compare(found, expected)


def _verdict_on(error: Exception) -> str:
    """REFUSED where the message is ours, which says what must be and what was found, and DIFFERS otherwise."""
    message = shorten(error)
    refusal = (" must " in message and "got" in str(error)) or "ringattn" in str(error)
    if not isinstance(error, (NotImplementedError, ValueError, RuntimeError)):
        message = f"{type(error).__name__}: {message}"
    return (REFUSED if refusal else DIFFERS) + message


def judge_generation(kind: str, call: str) -> str:
    """Verdict of this rank on a call of `generate` with a RingCache, beside one with the cache of transformers."""
    transformers.logging.set_verbosity_error()
    options = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    ids = tokens(26, rows=1 + (call in ("batch", "padded")))
    mask = torch.ones_like(ids)
    if call == "padded":
        mask[1, :9] = 0
    if call == "assisted":
        ids = ids[:, :13].repeat(1, 2)
        options["prompt_lookup_num_tokens"] = 3
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, **options}
    try:
        expected = make(kind, "eager").float().eval().generate(**inputs)
    except Exception as error:  # whatever a family raises without us is its reason
        return NOT_TRIED + shorten(error)
    try:
        ring, model = Ring(), make(kind, "ringattn").float().eval()
        with torch.no_grad(), RingCache(model, ring, max_tokens=64, batch=len(ids)) as cache:
            found = model.generate(**inputs, past_key_values=cache)
    except Exception as error:
        return _verdict_on(error)
    return EQUAL if torch.equal(found, expected) else f"{DIFFERS}tokens {found.tolist()} for {expected.tolist()}"


def compare(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> str:
    """EQUAL or DIFFERS for loss and gradients."""
    if abs(found[0] - expected[0]) > LOSS_BOUND * abs(expected[0]):
        return f"{DIFFERS}loss {found[0]:.6f} for {expected[0]:.6f}"
    # a bias of keys has no gradient: what is found of it is rounding
    least = 1e-3 * max(float(x.norm()) for x in expected[1].values())
    for name, grad in expected[1].items():
        error = float((found[1][name] - grad).norm()) / max(float(grad.norm()), least)
        if not error < GRADIENT_BOUND:
            return f"{DIFFERS}gradient of {name} by {error:.1e}"
    return EQUAL


def shorten(error: Exception) -> str:
    """The first clause of a message, as a table shows it."""
    text = " ".join(str(error).split()) or type(error).__name__
    return textwrap.shorten(text.partition("; ")[0].replace("|", "/"), 200)
