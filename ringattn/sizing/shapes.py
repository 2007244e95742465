"""Shapes of decoder-only transformers: presets, and configurations of transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAYER_TYPES = {"attention", "chunked_attention", "full_attention", "sliding_attention"}
"""Kinds of layers in configurations of transformers that are planned; those with chunks count as if they saw all keys."""


@dataclass(frozen=True)
class ModelShape:
    """Numbers of a model from which parameters, operations and bytes follow.

    Attributes:
        mlp_dim: Hidden width of SwiGLU; of one expert where there are experts.
        tied: The output projection is the embedding.
        experts: Experts of a layer; 1: a dense model.
        active_experts: Experts that a token uses.
        shared_experts: Experts that every token uses besides.
        latent: Columns of the latents of multi-head latent attention, from which keys and values are made, and which a cache keeps
            with `rotary` columns; 0: it keeps keys and values.
        q_latent: Columns of the latent of queries; 0: they are made of the stream.
        v_head_dim: Head dim of values; 0: head_dim.
        dense_layers: First layers that have an MLP of dense_mlp_dim in place of experts.
        window: Tokens that a token sees in layers with a sliding window.
        window_layers: Layers with that window.
    """

    name: str
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_dim: int
    vocab_size: int
    tied: bool = False
    experts: int = 1
    active_experts: int = 1
    shared_experts: int = 0
    window: int | None = None
    window_layers: int = 0
    latent: int = 0
    rotary: int = 0
    q_latent: int = 0
    v_head_dim: int = 0
    dense_layers: int = 0
    dense_mlp_dim: int = 0

    def __post_init__(self) -> None:
        """Refuse numbers that no model has."""
        for name in ("dim", "layers", "heads", "kv_heads", "head_dim", "mlp_dim", "vocab_size", "experts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}; give the numbers of a model")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads, got {self.kv_heads} and {self.heads}; give a divisor")
        if not 1 <= self.active_experts <= self.experts:
            raise ValueError(
                f"active_experts must be from 1 to experts {self.experts}, got {self.active_experts}; give 1 for a dense model"
            )

    @property
    def attention_parameters(self) -> int:
        """Parameters of the projections of a layer."""
        values = self.v_head_dim or self.head_dim
        out = self.dim * self.heads * values
        if not self.latent:
            return self.dim * (self.heads * self.head_dim + self.kv_heads * (self.head_dim + values)) + out
        q = self.q_latent * self.dim + (self.q_latent or self.dim) * self.heads * self.head_dim
        ups = self.latent * self.kv_heads * (self.head_dim - self.rotary + values)
        return q + self.dim * (self.latent + self.rotary) + ups + out

    @property
    def mlp_width(self) -> int:
        """Columns of the MLPs that a token goes through."""
        return self.mlp_dim * (self.active_experts + self.shared_experts)

    def mlp_parameters(self, experts: int) -> int:
        """Parameters of so many experts, and of the shared ones."""
        return 3 * self.dim * self.mlp_dim * (experts + self.shared_experts)

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of what a bf16 cache keeps of a token, of all layers.

        Example:
            >>> load_shape("deepseek-v3").kv_token_bytes // 61, load_shape("deepseek-v3-dense").kv_token_bytes // 61
            (1152, 98304)
        """
        if self.latent:
            return 2 * self.layers * (self.latent + self.rotary)
        return 2 * self.layers * self.kv_heads * (self.head_dim + (self.v_head_dim or self.head_dim))

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer."""
        router = self.dim * self.experts if self.experts > 1 else 0
        return self.attention_parameters + self.mlp_parameters(self.experts) + router + 2 * self.dim

    @property
    def active_layer_parameters(self) -> int:
        """Parameters of a layer that multiply a token."""
        return self.attention_parameters + self.mlp_parameters(self.active_experts)

    @property
    def root_parameters(self) -> int:
        """Parameters outside of layers: embedding, head and last norm."""
        return self.vocab_size * self.dim * (1 if self.tied else 2) + self.dim

    @property
    def parameters(self) -> int:
        """All parameters."""
        experts = self.mlp_parameters(self.experts) + self.dim * self.experts
        less = self.dense_layers * (experts - 3 * self.dim * self.dense_mlp_dim)
        return self.layers * self.layer_parameters - less + self.root_parameters

    def step_flops(self, tokens: int, pairs: float) -> float:
        """Model FLOPs of a training step.

        6 per active parameter (the embedding's rows are looked up) and token, 12 heads head_dim per layer and visible pair
        (Chowdhery et al. 2022, "PaLM", appendix B, with pairs in place of all keys). `pairs` are the mean over layers.
        """
        head = 2.0 * self.vocab_size * self.dim * tokens
        return 3 * (self.layer_flops(tokens) + head + self.attention_flops(pairs))

    def prompt_flops(self, tokens: int) -> float:
        """FLOPs from a causal prompt to its first token, for which alone the head makes logits.

        Example:
            >>> ModelShape("x", 4, 1, 1, 1, 4, 8, 3).prompt_flops(2)
            712.0
        """
        head = 2.0 * self.vocab_size * self.dim
        return self.layer_flops(tokens) + head + self.attention_flops(tokens * (tokens + 1) // 2)

    def decode_weight_bytes(self, batch: int = 1, ranks: int = 1, itemsize: int = 2, *, sharded: bool = False) -> float:
        """Bytes of parameters that a rank reads in a decode step, in which `ranks` share the MLPs and the head; sharded: all.

        Example:
            >>> [load_shape("llama3-8b").decode_weight_bytes(ranks=ranks) for ranks in (1, 4)]
            [15009316864.0, 5765595136.0]
        """
        mlps = self.layers * self.mlp_parameters(min(self.experts, self.active_experts * batch))
        attention = self.layers * self.attention_parameters / (ranks if sharded else 1)
        return itemsize * (attention + (mlps + self.vocab_size * self.dim) / ranks)

    def layer_flops(self, tokens: int) -> float:
        """FLOPs of one pass of the matrix products of all layers."""
        return 2.0 * self.layers * self.active_layer_parameters * tokens

    def attention_flops(self, pairs: float) -> float:
        """FLOPs of the attention of one forward of all layers."""
        return 2.0 * self.layers * self.heads * (self.head_dim + (self.v_head_dim or self.head_dim)) * pairs


PRESETS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        # numbers of the published configurations of these models
        ModelShape("llama3-8b", 4096, 32, 32, 8, 128, 14336, 128256),
        ModelShape("llama3-70b", 8192, 80, 64, 8, 128, 28672, 128256),
        ModelShape("llama3-405b", 16384, 126, 128, 8, 128, 53248, 128256),
        ModelShape("qwen3-8b", 4096, 36, 32, 8, 128, 12288, 151936),
        ModelShape("qwen3-32b", 5120, 64, 64, 8, 128, 25600, 151936),
        ModelShape("qwen3-235b-a22b", 4096, 94, 64, 4, 128, 1536, 151936, experts=128, active_experts=8),
        # 7168 wide, 61 layers; MLA after its up-projection: 128 heads of 128 (+64 rotary, here 192 as 256 columns); a dense MLP
        # as wide as its 8 routed experts and the shared one
        ModelShape("deepseek-v3-dense", 7168, 61, 128, 128, 192, 18432, 129280),
        ModelShape(
            "deepseek-v3", 7168, 61, 128, 128, 192, 2048, 129280, experts=256, active_experts=8, shared_experts=1,
            latent=512, rotary=64, q_latent=1536, v_head_dim=128, dense_layers=3, dense_mlp_dim=18432,
        ),
        ModelShape(
            "glm-4.7-flash", 2048, 47, 20, 20, 256, 1536, 154880, experts=64, active_experts=4, shared_experts=1,
            latent=512, rotary=64, q_latent=768, v_head_dim=256, dense_layers=1, dense_mlp_dim=10240,
        ),
    )
}  # fmt: skip


def load_shape(model: str | Path | Mapping[str, Any] | ModelShape) -> ModelShape:
    """Return the shape of a preset, of a configuration file of transformers, or of its content.

    Args:
        model: A preset's name, the path of a `config.json` or its folder, or the content as a mapping.

    Raises:
        ValueError: There is no such preset or file, or a number is missing.

    Example:
        >>> load_shape("llama3-8b").parameters
        8030261248
    """
    if isinstance(model, ModelShape):
        return model
    if isinstance(model, Mapping):
        return _from_config(model, "model")
    if str(model) in PRESETS:
        return PRESETS[str(model)]
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"model must be one of {', '.join(PRESETS)} or a config.json, got {str(model)!r}; pass the path of a configuration"
        )
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"model must be a JSON configuration, got {error} in {path}; pass its config.json") from None
    return _from_config(content, path.parent.name or str(path))


def _from_config(content: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape of a configuration of a causal language model of transformers."""
    config = content.get("text_config") or content
    found: dict[str, int] = {}
    for field, keys in {
        "dim": ("hidden_size", "n_embd", "d_model"),
        "layers": ("num_hidden_layers", "n_layer"),
        "heads": ("num_attention_heads", "n_head"),
        "vocab_size": ("vocab_size",),
    }.items():
        value = next((config[key] for key in keys if config.get(key)), None)
        if value is None:
            raise ValueError(
                f"a configuration must have {keys[0]} above 0, got {sorted(config)[:8]}; pass that of a causal model"
            )
        found[field] = int(value)
    experts = next(
        (config[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(key)), 1
    )
    wide = config.get("intermediate_size") or 4 * found["dim"]
    kv_lora = config.get("kv_lora_rank")
    head_dim = config.get("head_dim") or found["dim"] // found["heads"]
    if kv_lora:  # multi-head latent attention, after its up-projection
        head_dim = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    types = config.get("layer_types") or ()
    if unknown := sorted(set(types) - LAYER_TYPES):
        raise ValueError(
            f"layer_types must be among {', '.join(sorted(LAYER_TYPES))}, got {', '.join(unknown)}; "
            "plan a model all of whose layers attend"
        )
    window = config.get("sliding_window")
    windowed = _windowed(config, types) if window else 0
    return ModelShape(
        name,
        **found,
        kv_heads=found["heads"] if kv_lora else int(config.get("num_key_value_heads") or found["heads"]),
        head_dim=int(head_dim),
        mlp_dim=int(config.get("moe_intermediate_size") or wide) if experts > 1 else int(wide),
        tied=bool(content.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        **(_latent_sizes(config) if kv_lora else {}),
        experts=int(experts),
        active_experts=int(config.get("num_experts_per_tok") or 1) if experts > 1 else 1,
        shared_experts=int(config.get("n_shared_experts") or 0) if experts > 1 else 0,
        window=window if windowed else None,
        window_layers=windowed,
    )


def _latent_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    names = {
        "latent": "kv_lora_rank",
        "rotary": "qk_rope_head_dim",
        "q_latent": "q_lora_rank",
        "v_head_dim": "v_head_dim",
    }
    return {field: int(config.get(name) or 0) for field, name in names.items()}


def _windowed(config: Mapping[str, Any], types: Any) -> int:
    if types:
        return sum(kind == "sliding_attention" for kind in types)
    return 0 if config.get("use_sliding_window") is False else int(config["num_hidden_layers"])
