"""Places of tokens in diffusion transformers, as data: arguments, outputs and attention layers that hold them.

A denoiser is the transformer of a diffusion pipeline. Its sequence is joined from segments, as text and image, and each rank
holds a contiguous share of every segment (`layout="segments"`). Module names may have `*` in place of a part: `blocks.*.attn1`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import nn


@dataclass(frozen=True)
class TokenDim:
    """Dim of a tensor, or of each tensor in a list, along which the tokens of one segment lie; a rank keeps its own.

    Attributes:
        segment: Name of the segment.
        dim: The dim; negative counts from the end.
        ndim: Number of dims of tensors that have tokens; others are left whole. None: all.
    """

    segment: str
    dim: int
    ndim: int | None = None


@dataclass(frozen=True)
class TokenCount:
    """An integer n that stands for the first n tokens of a segment; a rank gets the number of those that it holds.

    Attributes:
        segment: Name of the segment.
    """

    segment: str


@dataclass(frozen=True)
class DenoiserSpec:
    """Division of the sequence of a denoiser between ranks.

    Attributes:
        lengths: Function of the model and the arguments of its forward that returns the number of tokens by segment, in the order
            in which attention joins them.
        inputs: By module name, the arguments of its forward that are cut; "" is the model.
        outputs: By module name, the outputs of its forward that are cut.
        attention: Names of the attention modules over the whole sequence, each with one call of scaled_dot_product_attention.
        local: Names of the attention modules that every rank runs alone: their keys are whole on every rank.
        gather: Name of the module whose output is put together on every rank, tokens in dim 1.
        gathered: Segment of that output.
        not_empty: Segments of which every rank must hold a token, because the model reshapes or slices each one alone.
    """

    lengths: Callable[[nn.Module, Mapping[str, Any]], dict[str, int]]
    inputs: Mapping[str, Mapping[str, TokenDim | TokenCount]]
    attention: tuple[str, ...]
    outputs: Mapping[str, tuple[TokenDim, ...]] = field(default_factory=dict)
    local: tuple[str, ...] = ()
    gather: str = "proj_out"
    gathered: str = "image"
    not_empty: tuple[str, ...] = ("image",)


def _patches(arguments: Mapping[str, Any], patch_size: tuple[int, int, int]) -> int:
    """Return the number of patches of a video of latents, `b c frames height width`."""
    return prod(size // patch for size, patch in zip(arguments["hidden_states"].shape[2:], patch_size, strict=True))


def _text_then_image(_: nn.Module, arguments: Mapping[str, Any]) -> dict[str, int]:
    return {"text": arguments["encoder_hidden_states"].shape[1], "image": arguments["hidden_states"].shape[1]}


def _wan_lengths(model: nn.Module, arguments: Mapping[str, Any]) -> dict[str, int]:
    config: Any = model.config
    return {"image": _patches(arguments, config.patch_size)}


def _hunyuan_video_lengths(model: nn.Module, arguments: Mapping[str, Any]) -> dict[str, int]:
    config: Any = model.config
    patch_size = (config.patch_size_t, config.patch_size, config.patch_size)
    return {"image": _patches(arguments, patch_size), "text": arguments["encoder_hidden_states"].shape[1]}


_IMAGE, _TEXT = TokenDim("image", 1), TokenDim("text", 1)

FLUX = DenoiserSpec(
    lengths=_text_then_image,
    inputs={
        "": {
            "hidden_states": _IMAGE,
            "encoder_hidden_states": _TEXT,
            "img_ids": TokenDim("image", -2),
            "txt_ids": TokenDim("text", -2),
            "controlnet_block_samples": _IMAGE,
            "controlnet_single_block_samples": _IMAGE,
        }
    },
    attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
)

# text is whole on every rank: its few keys cost less to project again in every layer than to send
WAN = DenoiserSpec(
    lengths=_wan_lengths,
    inputs={"": {"timestep": TokenDim("image", 1, ndim=2)}, "blocks.0": {"hidden_states": _IMAGE}},
    outputs={"rope": (_IMAGE, _IMAGE)},
    attention=("blocks.*.attn1",),
    local=("blocks.*.attn2",),
)

QWEN_IMAGE = DenoiserSpec(
    lengths=_text_then_image,
    inputs={
        "": {"controlnet_block_samples": _IMAGE},
        "transformer_blocks.0": {"hidden_states": _IMAGE, "encoder_hidden_states": _TEXT},
        "transformer_blocks.*": {"encoder_hidden_states_mask": _TEXT, "modulate_index": _IMAGE},
    },
    outputs={"pos_embed": (TokenDim("image", 0), TokenDim("text", 0))},
    attention=("transformer_blocks.*.attn",),
    not_empty=("image", "text"),
)

LTX = DenoiserSpec(
    lengths=lambda _, arguments: {"image": arguments["hidden_states"].shape[1]},
    inputs={"": {"hidden_states": _IMAGE, "timestep": TokenDim("image", 1, ndim=2)}},
    outputs={"rope": (_IMAGE, _IMAGE)},
    attention=("transformer_blocks.*.attn1",),
    local=("transformer_blocks.*.attn2",),
)

HUNYUAN_VIDEO = DenoiserSpec(
    lengths=_hunyuan_video_lengths,
    inputs={
        "transformer_blocks.0": {"hidden_states": _IMAGE, "encoder_hidden_states": _TEXT},
        # of models that replace the tokens of the first frame
        "transformer_blocks.*": {"num_tokens": TokenCount("image")},
        "single_transformer_blocks.*": {"num_tokens": TokenCount("image")},
    },
    outputs={"rope": (TokenDim("image", 0), TokenDim("image", 0))},
    attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
    local=("context_embedder.token_refiner.refiner_blocks.*.attn",),
    not_empty=("image", "text"),
)

DENOISERS = {
    "FluxTransformer2DModel": FLUX,
    "Flux2Transformer2DModel": FLUX,
    "ChronoEditTransformer3DModel": WAN,
    "LTXVideoTransformer3DModel": LTX,
    "WanTransformer3DModel": WAN,
    "QwenImageTransformer2DModel": QWEN_IMAGE,
    "HunyuanVideoTransformer3DModel": HUNYUAN_VIDEO,
}
"""Specs of the supported models, by class name."""


def find_spec(model: nn.Module) -> DenoiserSpec:
    """Return the spec of a model, by its class or a base class.

    Raises:
        NotImplementedError: There is none.
    """
    for cls in type(model).__mro__:
        if cls.__name__ in DENOISERS:
            return DENOISERS[cls.__name__]
    raise NotImplementedError(
        f"transformer must be one of {', '.join(DENOISERS)}, got {type(model).__name__}; pass spec= with a DenoiserSpec that "
        "names its tokens"
    )
