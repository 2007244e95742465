"""Tiny denoisers and calls of them, on one process and on ranks.

Workers import this file, so it imports no model before a call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import diffusers
import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from ringattn import Ring
from ringattn.integrations.diffusers import checkpoint, enable_ring

SIZES: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
"""Of all models; head_dim 16 is 4 + 6 + 6 for three rotary axes."""


@dataclass(frozen=True)
class Denoiser:
    """A model, by its class and config, and the lengths of one call.

    Attributes:
        model: Class name in diffusers.
        text: Tokens of the text.
        size: Frames, height and width of the latents, in patches.
        config: Keyword arguments of the model beside SIZES.
        options: Keywords for the function that makes the call's arguments.
        batch: Samples.
        lora: Whether its matrices have LoRA adapters, the only parameters that are then trained.
    """

    model: str
    text: int = 5
    size: tuple[int, int, int] = (1, 3, 3)
    config: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 2
    lora: bool = False

    def make(self) -> Any:
        torch.manual_seed(0)
        config = {name: x for name, x in {**SIZES, **MODELS[self.model][1], **self.config}.items() if x is not None}
        model = getattr(diffusers, self.model)(**config)
        if self.lora:
            from peft import LoraConfig

            targets = ["to_q", "to_k", "to_v", "proj_out", "x_embedder"]
            model.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
        model = model.double()
        for parameter in model.parameters():  # layers that begin at zero would hide what is in front of them
            nn.init.normal_(parameter, std=0.2)
        return model

    def arguments(self) -> dict[str, Any]:
        torch.manual_seed(1)
        found = MODELS[self.model][0](self, **self.options)
        return tree_map(lambda x: x.double() if is_float(x) else x, found)


def is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _flux(case: Denoiser, *, controlnet: bool = False, mask: bool = False, ids_ndim: int = 2) -> dict[str, Any]:
    image = case.size[1] * case.size[2]
    ids = torch.zeros(image, 3)
    ids[:, 1], ids[:, 2] = torch.arange(image) // case.size[2], torch.arange(image) % case.size[2]
    found: dict[str, Any] = {
        "hidden_states": torch.randn(case.batch, image, 4),
        "encoder_hidden_states": torch.randn(case.batch, case.text, 8),
        "pooled_projections": torch.randn(case.batch, 8),
        "timestep": torch.rand(case.batch),
        "img_ids": ids if ids_ndim == 2 else ids[None],
        "txt_ids": torch.zeros(case.text, 3) if ids_ndim == 2 else torch.zeros(1, case.text, 3),
        "guidance": torch.rand(case.batch),
    }
    if controlnet:
        found |= {
            name: [torch.randn(case.batch, image, 32)]
            for name in ("controlnet_block_samples", "controlnet_single_block_samples")
        }
    if mask:
        padded = padding(case.batch, case.text)
        joint = torch.cat([padded, torch.ones(case.batch, image, dtype=torch.bool)], 1)
        found["joint_attention_kwargs"] = {"attention_mask": joint[:, None, None]}
    return found


def _flux2(case: Denoiser) -> dict[str, Any]:
    found = _flux(case)
    del found["pooled_projections"]
    ids = [torch.cat([found[name], torch.zeros(len(found[name]), 1)], 1) for name in ("img_ids", "txt_ids")]
    ids[1][:, 3] = torch.arange(case.text)
    return found | {"img_ids": ids[0][None], "txt_ids": ids[1][None]}


def _ltx(case: Denoiser, *, per_token: bool = False) -> dict[str, Any]:
    frames, height, width = case.size
    rows = frames * height * width
    return {
        "hidden_states": torch.randn(case.batch, rows, 4),
        "encoder_hidden_states": torch.randn(case.batch, case.text, 8),
        "encoder_attention_mask": padding(case.batch, case.text).long(),
        "timestep": torch.rand(case.batch, rows) if per_token else torch.rand(case.batch),
        "num_frames": frames,
        "height": height,
        "width": width,
    }


def _ltx_2(case: Denoiser, *, audio: int = 4, per_token: bool = False, **others: Any) -> dict[str, Any]:
    video = _ltx(case, per_token=per_token)
    of_audio = {
        "audio_hidden_states": torch.randn(case.batch, audio, 3),
        "audio_encoder_hidden_states": torch.randn(case.batch, case.text, 8),
        "audio_encoder_attention_mask": video["encoder_attention_mask"],
        "audio_timestep": torch.rand(case.batch, audio) if per_token else torch.rand(case.batch),
        "audio_num_frames": audio,
    }
    return video | of_audio | {"sigma": torch.rand(case.batch)} | others


def _helios(case: Denoiser, *, history: Mapping[str, int] | None = None) -> dict[str, Any]:
    found = _wan(case)
    start, (_, height, width) = 0, case.size
    for name, frames in (history or {}).items():
        found[f"latents_history_{name}"] = torch.randn(case.batch, 4, frames, 2 * height, 2 * width)
        found[f"indices_latents_history_{name}"] = torch.arange(start, start + frames).expand(case.batch, -1)
        start += frames
    return found | {"indices_hidden_states": torch.arange(start, start + case.size[0]).expand(case.batch, -1)}


def _minimax_h3(case: Denoiser, *, audio: int = 4) -> dict[str, Any]:
    video = prod(case.size)
    tags = torch.cat([torch.full((n,), tag) for n, tag in ((case.text, 1), (video, 0), (audio, 2))])
    rows = {tag: (tags == tag).nonzero()[:, 0] for tag in range(3)}
    return {
        "hidden_states": torch.randn(case.batch, video, 4),
        "audio_hidden_states": torch.randn(case.batch, audio, 3),
        "encoder_hidden_states": torch.randn(case.batch, case.text, 8),
        "timestep": torch.rand(2),
        "timestep_indices": torch.arange(len(tags)) % 2,
        "token_tags": tags,
        "position_ids": torch.randint(9, (len(tags), 3)),
        "video_indices": rows[0],
        "audio_indices": rows[2],
        "text_indices": rows[1],
    }


def _cosmos_3(case: Denoiser, *, sound: int = 4, action: int = 2) -> dict[str, Any]:
    """A conditioned frame and noisy ones, sound, and actions of which the first is conditioned."""
    (frames, height, width), start = case.size, case.text
    found: dict[str, Any] = {
        "input_ids": torch.randint(9, (start,)),
        "text_indexes": torch.arange(start),
        "und_len": start,
        "vision_tokens": [torch.randn(1, 1, frames, 2 * height, 2 * width)],
        "sound_tokens": [torch.randn(3, sound)],
        "action_tokens": [torch.randn(action, 3)],
        "action_domain_ids": [torch.tensor(1)],
    }
    for name, shape, known in (("vision", case.size, 1), ("sound", (sound, 1, 1), 0), ("action", (action, 1, 1), 1)):
        rows = torch.arange(start, start + prod(shape))
        noisy = rows[known * prod(shape[1:]) :]
        found[f"{name}_token_shapes"] = [shape]
        found[f"{name}_sequence_indexes"] = rows
        found[f"{name}_mse_loss_indexes"] = noisy
        found[f"{name}_timesteps"] = 900 * torch.rand(len(noisy))
        found[f"{name}_noisy_frame_indexes"] = [torch.arange(known, shape[0])]
        start += len(rows)
    return found | {"position_ids": torch.arange(start).expand(3, -1), "sequence_length": start}


def _wan(case: Denoiser, *, per_token: bool = False, image: int = 0) -> dict[str, Any]:
    frames, height, width = case.size
    found: dict[str, Any] = {
        "hidden_states": torch.randn(case.batch, 4, frames, 2 * height, 2 * width),
        "encoder_hidden_states": torch.randn(case.batch, 512 if image else case.text, 8),
        "timestep": torch.rand(case.batch, frames * height * width) if per_token else torch.rand(case.batch),
    }
    if image:
        found["encoder_hidden_states_image"] = torch.randn(case.batch, image, 8)
    return found


def _qwen_image(case: Denoiser, *, mask: bool = False, condition: bool = False) -> dict[str, Any]:
    shapes = [case.size, (1, 1, 2)] if condition else [case.size]
    image = sum(f * h * w for f, h, w in shapes)
    found: dict[str, Any] = {
        "hidden_states": torch.randn(case.batch, image, 4),
        "encoder_hidden_states": torch.randn(case.batch, case.text, 8),
        "timestep": torch.rand(case.batch),
        "img_shapes": [shapes] * case.batch,
    }
    if mask:
        found["encoder_hidden_states_mask"] = padding(case.batch, case.text).long()
    return found


def _hunyuan_video(case: Denoiser) -> dict[str, Any]:
    frames, height, width = case.size
    return {
        "hidden_states": torch.randn(case.batch, 4, frames, 2 * height, 2 * width),
        "encoder_hidden_states": torch.randn(case.batch, case.text, 8),
        "encoder_attention_mask": padding(case.batch, case.text).long(),
        "pooled_projections": torch.randn(case.batch, 8),
        "timestep": torch.rand(case.batch),
        "guidance": torch.rand(case.batch),
    }


def padding(batch: int, text: int) -> Tensor:
    """The first sample has text of full length, and each next one a token less: `b s` bool."""
    return torch.arange(text) < torch.tensor([max(1, text - i) for i in range(batch)])[:, None]


_FLUX = {"in_channels": 4, **dict.fromkeys(("num_layers", "num_single_layers"), 1), "joint_attention_dim": 8}
_WAN = {"in_channels": 4, "out_channels": 4, "text_dim": 8, "freq_dim": 8, "ffn_dim": 16}
_LTX = {"in_channels": 4, "out_channels": 4, "cross_attention_dim": 32, "caption_channels": 8}

MODELS: dict[str, tuple[Callable[..., dict[str, Any]], dict[str, Any]]] = {
    "FluxTransformer2DModel": (
        _flux,
        {
            **_FLUX,
            "pooled_projection_dim": 8,
            "guidance_embeds": True,
            "axes_dims_rope": (4, 6, 6),
        },
    ),
    "Flux2Transformer2DModel": (
        _flux2,
        {**_FLUX, "timestep_guidance_channels": 8, "axes_dims_rope": (4, 4, 4, 4)},
    ),
    "ChronoEditTransformer3DModel": (_wan, _WAN),
    "LTXVideoTransformer3DModel": (_ltx, _LTX),
    "LTX2VideoTransformer3DModel": (
        _ltx_2,
        {
            **_LTX,
            "audio_in_channels": 3,
            "audio_out_channels": 3,
            "audio_num_attention_heads": 2,
            "audio_attention_head_dim": 8,
            "audio_cross_attention_dim": 16,
        },
    ),
    "HeliosTransformer3DModel": (_helios, {**_WAN, "rope_dim": (4, 6, 6)}),
    "MiniMaxH3Transformer3DModel": (
        _minimax_h3,
        {
            **dict.fromkeys(("text_dim", "freq_dim", "time_embed_hidden_dim", "time_embed_dim"), 8),
            "hidden_size": 16,
            "num_refiner_layers": 1,
            "ffn_dim": 16,
            "in_channels": 1,
            "audio_in_channels": 3,
            "rope_freq_dim": 2,
        },
    ),
    "Cosmos3OmniTransformer": (
        _cosmos_3,
        {
            **dict.fromkeys(("attention_head_dim", "num_layers")),
            **dict.fromkeys(("head_dim", "hidden_size", "intermediate_size"), 16),
            **dict.fromkeys(("action_gen", "sound_gen"), True),
            **dict.fromkeys(("action_dim", "sound_dim"), 3),
            "num_hidden_layers": 2,
            "num_key_value_heads": 1,
            "latent_channel": 1,
            "patch_latent_dim": 4,
            "rope_axes_dim": (4, 2, 2),
            "vocab_size": 9,
            "num_embodiment_domains": 2,
        },
    ),
    "WanTransformer3DModel": (_wan, _WAN),
    "QwenImageTransformer2DModel": (
        _qwen_image,
        {"in_channels": 4, "out_channels": 1, "joint_attention_dim": 8, "axes_dims_rope": (4, 6, 6)},
    ),
    "HunyuanVideoTransformer3DModel": (
        _hunyuan_video,
        {
            **dict.fromkeys(("in_channels", "out_channels"), 4),
            **dict.fromkeys(("num_layers", "num_single_layers", "num_refiner_layers"), 1),
            **dict.fromkeys(("text_embed_dim", "pooled_projection_dim"), 8),
            "mlp_ratio": 2.0,
            "rope_axes_dim": (4, 6, 6),
        },
    ),
}
"""The function that makes the arguments of a model, and its config; None takes a size of all models out."""

CASES = {
    "flux": Denoiser("FluxTransformer2DModel"),
    "flux_controlnet": Denoiser("FluxTransformer2DModel", options={"controlnet": True, "ids_ndim": 3}),
    "flux_mask": Denoiser("FluxTransformer2DModel", text=6, options={"mask": True}),
    "flux_short_text": Denoiser("FluxTransformer2DModel", text=1, size=(1, 2, 2)),
    "flux_lora": Denoiser("FluxTransformer2DModel", text=4, size=(1, 1, 7), lora=True),
    "flux2": Denoiser("Flux2Transformer2DModel"),
    "chronoedit": Denoiser(
        "ChronoEditTransformer3DModel",
        size=(2, 1, 5),
        config={"image_dim": 8, "added_kv_proj_dim": 32},
        options={"image": 3},
        batch=1,
    ),
    "ltx": Denoiser("LTXVideoTransformer3DModel", size=(3, 1, 3)),
    "ltx_timesteps": Denoiser("LTXVideoTransformer3DModel", size=(1, 1, 7), options={"per_token": True}),
    "ltx2": Denoiser("LTX2VideoTransformer3DModel", size=(3, 1, 3), config={"num_layers": 1}),
    "ltx2_3": Denoiser(
        "LTX2VideoTransformer3DModel",
        size=(2, 1, 4),
        config={
            **dict.fromkeys(("gated_attn", "cross_attn_mod", "audio_gated_attn", "audio_cross_attn_mod"), True),
            "rope_type": "split",
            "perturbed_attn": True,
        },
        options={"per_token": True, "use_cross_timestep": True, "spatio_temporal_guidance_blocks": [1]},
    ),
    "helios": Denoiser("HeliosTransformer3DModel", size=(2, 1, 3)),
    "helios_history": Denoiser(
        "HeliosTransformer3DModel",
        size=(1, 3, 3),
        config={"is_amplify_history": True},
        options={"history": {"long": 4, "mid": 2, "short": 2}},
    ),
    "minimax_h3": Denoiser("MiniMaxH3Transformer3DModel", size=(2, 1, 3)),
    "cosmos3": Denoiser("Cosmos3OmniTransformer", size=(3, 1, 3)),
    "wan": Denoiser("WanTransformer3DModel", size=(3, 1, 3)),
    "wan_timesteps": Denoiser("WanTransformer3DModel", size=(2, 2, 2), options={"per_token": True}),
    "wan_image": Denoiser(
        "WanTransformer3DModel",
        size=(1, 1, 5),
        config={"image_dim": 8, "added_kv_proj_dim": 32},
        options={"image": 3},
        batch=1,
    ),
    "qwen_image": Denoiser("QwenImageTransformer2DModel", size=(1, 2, 5)),
    "qwen_image_mask": Denoiser("QwenImageTransformer2DModel", options={"mask": True}),
    "qwen_image_edit": Denoiser(
        "QwenImageTransformer2DModel", config={"zero_cond_t": True}, options={"mask": True, "condition": True}
    ),
    "hunyuan_video": Denoiser("HunyuanVideoTransformer3DModel", size=(2, 1, 3)),
    "hunyuan_video_image": Denoiser(
        "HunyuanVideoTransformer3DModel", text=6, size=(3, 1, 3), config={"image_condition_type": "token_replace"}
    ),
}

Results = dict[str, Tensor]


def run(model: nn.Module, arguments: dict[str, Any]) -> Results:
    """The outputs, and the gradients of inputs and parameters for fixed random cotangents."""
    arguments = copy.deepcopy(arguments)
    inputs = {f"input {keystr(path)}": x for path, x in tree_flatten_with_path(arguments)[0] if is_float(x)}
    for x in inputs.values():
        x.requires_grad_()
    outputs: list[Tensor] = [x for x in tree_leaves(model(**arguments, return_dict=False)) if is_float(x)]
    generator = torch.Generator().manual_seed(2)
    cotangents = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in outputs]
    torch.autograd.backward(outputs, cotangents)
    grads = {f"d {name}": x.grad for name, x in (*inputs.items(), *model.named_parameters())}
    found = {f"output {i}": x.detach() for i, x in enumerate(outputs)}
    return found | {name: grad for name, grad in grads.items() if grad is not None}


def run_on_ranks(case: Denoiser, *, checkpointed: bool = False, compiled: bool = False) -> Results:
    """The output of a rank, and the mean over ranks of gradients."""
    ring, model = Ring(), case.make()
    enable_ring(model, ring)
    if compiled:
        model.compile_repeated_blocks(backend="aot_eager")
    if checkpointed:
        model.enable_gradient_checkpointing(checkpoint)
    found = run(model, case.arguments())
    return {k: x if k.startswith("output") else ring.sum(x.contiguous()) / ring.world_size for k, x in found.items()}
