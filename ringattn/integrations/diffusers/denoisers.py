"""Places of tokens in diffusion transformers, as data: arguments, outputs and attention layers that hold them.

A denoiser is the transformer of a diffusion pipeline. Its sequence is joined from segments, as text and image, and each rank
holds a contiguous share of every segment (`layout="segments"`). Module names may have `*` in place of a part: `blocks.*.attn1`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from torch import Tensor, nn

JOINT = "joint"
"""Name of the whole sequence: all segments, one after another."""


@dataclass(frozen=True)
class TokenDim:
    """Dim of a tensor, or of each tensor in a list, along which the tokens of one segment lie; a rank keeps its own.

    Attributes:
        segment: Name of the segment, or JOINT.
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


Cut = TokenDim | TokenCount | tuple[TokenDim, ...]
"""Tokens of an argument; a tuple has the dims of each tensor of a tuple."""


@dataclass(frozen=True)
class AttentionCall:
    """Segments of one call of scaled_dot_product_attention, or JOINT.

    Attributes:
        queries: Segment of the queries.
        keys: Segment of the keys and values.
    """

    queries: str = JOINT
    keys: str = JOINT


@dataclass(frozen=True)
class DenoiserSpec:
    """Division of the sequence of a denoiser between ranks.

    Attributes:
        lengths: Function of the model and the arguments of its forward that returns the number of tokens by segment, in the order
            in which attention joins them.
        inputs: By module name, the arguments of its forward that are cut, a tuple of dims for a tuple; "" is the model.
        outputs: By module name, the outputs of its forward that are cut.
        attention: Names of the attention modules over the whole sequence, each with one call of scaled_dot_product_attention.
        calls: By name, the calls of attention modules over some segments, in the order in which they are made.
        skip: Argument of attention modules that leave out their calls when it is true; "": they never do.
        local: Names of the attention modules that every rank runs alone: their keys are whole on every rank.
        gather: By name, modules whose output is put together on every rank; or one name, of an output with tokens in dim 1.
        gathered: Segment of the output of that one module.
        not_empty: Segments of which every rank must hold a token, because the model reshapes or slices each one alone.
        refused: Arguments of the model that must be None, with the reason and what to do.
    """

    lengths: Callable[[nn.Module, Mapping[str, Any]], dict[str, int]]
    inputs: Mapping[str, Mapping[str, Cut]]
    attention: tuple[str, ...] = ()
    outputs: Mapping[str, tuple[TokenDim, ...]] = field(default_factory=dict)
    calls: Mapping[str, tuple[AttentionCall, ...]] = field(default_factory=dict)
    skip: str = ""
    local: tuple[str, ...] = ()
    gather: str | Mapping[str, TokenDim] = "proj_out"
    gathered: str = "image"
    not_empty: tuple[str, ...] = ("image",)
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def outputs_gathered(self) -> Mapping[str, TokenDim]:
        """`gather` by name."""
        return {self.gather: TokenDim(self.gathered, 1)} if isinstance(self.gather, str) else self.gather


def _patches(latents: Tensor, patch_size: tuple[int, int, int], factor: int = 1) -> int:
    """Return the number of patches of latents, `b c frames height width`; up to factor ones of each dim are joined."""
    sizes = zip(latents.shape[2:], patch_size, strict=True)
    return prod(-(-(size // patch) // factor) for size, patch in sizes)


def _rows(**arguments_of: str) -> Callable[[nn.Module, Mapping[str, Any]], dict[str, int]]:
    """Return a function that reads the lengths of segments from dim 1 of one argument each."""
    return lambda _, arguments: {segment: arguments[name].shape[1] for segment, name in arguments_of.items()}


def _wan_lengths(model: nn.Module, arguments: Mapping[str, Any]) -> dict[str, int]:
    config: Any = model.config
    return {"image": _patches(arguments["hidden_states"], config.patch_size)}


def _helios_lengths(model: nn.Module, arguments: Mapping[str, Any]) -> dict[str, int]:
    config: Any = model.config
    history = 0
    for name, factor in (("short", 1), ("mid", 2), ("long", 4)):
        latents, indices = (arguments.get(f"{kind}latents_history_{name}") for kind in ("", "indices_"))
        if latents is not None and indices is not None:
            history += _patches(latents, config.patch_size, factor)
    video = _wan_lengths(model, arguments)
    return {"history": history, **video} if history else video


def _hunyuan_video_lengths(model: nn.Module, arguments: Mapping[str, Any]) -> dict[str, int]:
    config: Any = model.config
    patch_size = (config.patch_size_t, config.patch_size, config.patch_size)
    return {
        "image": _patches(arguments["hidden_states"], patch_size),
        "text": arguments["encoder_hidden_states"].shape[1],
    }


_IMAGE, _TEXT, _AUDIO, _JOINT = (TokenDim(segment, 1) for segment in ("image", "text", "audio", JOINT))
_IMAGE_ROWS, _TEXT_ROWS, _JOINT_ROWS = (TokenDim(segment, 0) for segment in ("image", "text", JOINT))

FLUX = DenoiserSpec(
    lengths=_rows(text="encoder_hidden_states", image="hidden_states"),
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

FLUX_2 = replace(
    FLUX,
    refused={
        "kv_cache_mode": "its cache has keys of reference images that are whole on every rank; pass the images with each call"
    },
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
    lengths=_rows(text="encoder_hidden_states", image="hidden_states"),
    inputs={
        "": {"controlnet_block_samples": _IMAGE},
        "transformer_blocks.0": {"hidden_states": _IMAGE, "encoder_hidden_states": _TEXT},
        "transformer_blocks.*": {"encoder_hidden_states_mask": _TEXT, "modulate_index": _IMAGE},
    },
    outputs={"pos_embed": (_IMAGE_ROWS, _TEXT_ROWS)},
    attention=("transformer_blocks.*.attn",),
    not_empty=("image", "text"),
)

LTX = DenoiserSpec(
    lengths=_rows(image="hidden_states"),
    inputs={"": {"hidden_states": _IMAGE, "timestep": TokenDim("image", 1, ndim=2)}},
    outputs={"rope": (_IMAGE, _IMAGE)},
    attention=("transformer_blocks.*.attn1",),
    local=("transformer_blocks.*.attn2",),
)

_IMAGE_COORDS, _AUDIO_COORDS = {"coords": TokenDim("image", 2)}, {"coords": TokenDim("audio", 2)}

LTX_2 = DenoiserSpec(
    lengths=_rows(image="hidden_states", audio="audio_hidden_states"),
    inputs={
        "": {
            "hidden_states": _IMAGE,
            "audio_hidden_states": _AUDIO,
            "timestep": TokenDim("image", 1, ndim=2),
            "audio_timestep": TokenDim("audio", 1, ndim=2),
            "video_keyframes_mask": _IMAGE,
        },
        "rope": _IMAGE_COORDS,
        "cross_attn_rope": _IMAGE_COORDS,
        "audio_rope": _AUDIO_COORDS,
        "cross_attn_audio_rope": _AUDIO_COORDS,
    },
    calls={
        "transformer_blocks.*.attn1": (AttentionCall("image", "image"),),
        "transformer_blocks.*.audio_attn1": (AttentionCall("audio", "audio"),),
        "transformer_blocks.*.audio_to_video_attn": (AttentionCall("image", "audio"),),
        "transformer_blocks.*.video_to_audio_attn": (AttentionCall("audio", "image"),),
    },
    skip="all_perturbed",
    local=("transformer_blocks.*.attn2", "transformer_blocks.*.audio_attn2"),
    gather={"proj_out": _IMAGE, "audio_proj_out": _AUDIO},
    not_empty=("image", "audio"),
    refused={
        "video_self_attention_mask": "the model pads it to the keys of one rank; use a conditioning attention strength of 1"
    },
)

# the video and the history before it, which has its own timestep
HELIOS = DenoiserSpec(
    lengths=_helios_lengths,
    inputs={
        "blocks.0": {"hidden_states": _JOINT},
        "blocks.*": {"temb": _JOINT, "rotary_emb": _JOINT, "original_context_length": TokenCount("image")},
        "norm_out": {"temb": _JOINT, "original_context_length": TokenCount("image")},
    },
    attention=("blocks.*.attn1",),
    local=("blocks.*.attn2",),
)

# rows of text, video and audio in the order in which the pipeline packs them
MINIMAX_H3 = DenoiserSpec(
    lengths=lambda _, arguments: {"packed": arguments["position_ids"].shape[0]},
    inputs={
        "transformer_blocks.0": {"hidden_states": _JOINT},
        "transformer_blocks.*": {"adaln_indices": _JOINT_ROWS},
        "norm_out": {"timestep_indices": _JOINT_ROWS},
    },
    outputs={"rope": (_JOINT_ROWS, _JOINT_ROWS)},
    attention=("transformer_blocks.*.attn",),
    local=("token_refiner.refiner_blocks.*.attn",),
    gather={"proj_out": _JOINT, "audio_proj_out": _JOINT},
    not_empty=("packed",),
)

# text sees text, causally; the others, which have weights of their own, see both
COSMOS_3 = DenoiserSpec(
    lengths=lambda _, arguments: {
        "text": arguments["und_len"],
        "image": arguments["sequence_length"] - arguments["und_len"],
    },
    inputs={
        "layers.0": {"und_seq": _TEXT_ROWS, "gen_seq": _IMAGE_ROWS},
        "layers.*": {"rotary_emb": (_TEXT_ROWS, _TEXT_ROWS, _IMAGE_ROWS, _IMAGE_ROWS)},
    },
    calls={"layers.*.self_attn": (AttentionCall("text", "text"), AttentionCall("image", JOINT))},
    gather={"norm": _TEXT_ROWS, "norm_moe_gen": _IMAGE_ROWS},
    not_empty=("text", "image"),
)

HUNYUAN_VIDEO = DenoiserSpec(
    lengths=_hunyuan_video_lengths,
    inputs={
        "transformer_blocks.0": {"hidden_states": _IMAGE, "encoder_hidden_states": _TEXT},
        # of models that replace the tokens of the first frame
        "transformer_blocks.*": {"num_tokens": TokenCount("image")},
        "single_transformer_blocks.*": {"num_tokens": TokenCount("image")},
    },
    outputs={"rope": (_IMAGE_ROWS, _IMAGE_ROWS)},
    attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
    local=("context_embedder.token_refiner.refiner_blocks.*.attn",),
    not_empty=("image", "text"),
)

DENOISERS = {
    "FluxTransformer2DModel": FLUX,
    "Flux2Transformer2DModel": FLUX_2,
    "ChronoEditTransformer3DModel": WAN,
    "Cosmos3OmniTransformer": COSMOS_3,
    "HeliosTransformer3DModel": HELIOS,
    "LTXVideoTransformer3DModel": LTX,
    "LTX2VideoTransformer3DModel": LTX_2,
    "MiniMaxH3Transformer3DModel": MINIMAX_H3,
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
        f"transformer must be one of {', '.join(DENOISERS)}, got {type(model).__name__}; pass the transformer itself where "
        "something wraps it (DDP, PeftModel), or spec= with a DenoiserSpec that names its tokens"
    )
