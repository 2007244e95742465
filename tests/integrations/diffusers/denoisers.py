"""Tiny denoisers and calls of them, on one process and on ranks.

Workers import this file, so it imports no model before a call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

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
        config = {**SIZES, **CONFIGS[self.model], **self.config}
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
        found = ARGUMENTS[self.model](self, **self.options)
        return {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in found.items()}


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
            name: [torch.randn(case.batch, image, 32).double()]
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


CONFIGS: dict[str, dict[str, Any]] = {
    "FluxTransformer2DModel": {
        "in_channels": 4,
        "num_layers": 1,
        "num_single_layers": 1,
        "joint_attention_dim": 8,
        "pooled_projection_dim": 8,
        "guidance_embeds": True,
        "axes_dims_rope": (4, 6, 6),
    },
    "Flux2Transformer2DModel": {
        "in_channels": 4,
        "num_layers": 1,
        "num_single_layers": 1,
        "joint_attention_dim": 8,
        "timestep_guidance_channels": 8,
        "axes_dims_rope": (4, 4, 4, 4),
    },
    "ChronoEditTransformer3DModel": {"in_channels": 4, "out_channels": 4, "text_dim": 8, "freq_dim": 8, "ffn_dim": 16},
    "LTXVideoTransformer3DModel": {
        "in_channels": 4,
        "out_channels": 4,
        "cross_attention_dim": 32,
        "caption_channels": 8,
    },
    "WanTransformer3DModel": {"in_channels": 4, "out_channels": 4, "text_dim": 8, "freq_dim": 8, "ffn_dim": 16},
    "QwenImageTransformer2DModel": {
        "in_channels": 4,
        "out_channels": 1,
        "joint_attention_dim": 8,
        "axes_dims_rope": (4, 6, 6),
    },
    "HunyuanVideoTransformer3DModel": {
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 1,
        "num_single_layers": 1,
        "num_refiner_layers": 1,
        "mlp_ratio": 2.0,
        "text_embed_dim": 8,
        "pooled_projection_dim": 8,
        "rope_axes_dim": (4, 6, 6),
    },
}
ARGUMENTS: dict[str, Callable[..., dict[str, Any]]] = {
    "FluxTransformer2DModel": _flux,
    "Flux2Transformer2DModel": _flux2,
    "ChronoEditTransformer3DModel": _wan,
    "LTXVideoTransformer3DModel": _ltx,
    "WanTransformer3DModel": _wan,
    "QwenImageTransformer2DModel": _qwen_image,
    "HunyuanVideoTransformer3DModel": _hunyuan_video,
}

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
    """The output, and the gradients of inputs and parameters for a fixed random cotangent."""
    arguments = copy.deepcopy(arguments)
    leaves = {k: x.requires_grad_() for k, x in arguments.items() if isinstance(x, Tensor) and x.is_floating_point()}
    output = model(**arguments, return_dict=False)[0]
    (
        output * torch.randn(output.shape, generator=torch.Generator().manual_seed(2), dtype=output.dtype)
    ).sum().backward()
    grads = {f"d {name}": x.grad for name, x in (*leaves.items(), *model.named_parameters())}
    return {"output": output.detach()} | {name: grad for name, grad in grads.items() if grad is not None}


def run_on_ranks(case: Denoiser, *, checkpointed: bool = False, compiled: bool = False) -> Results:
    """The output of a rank, and the mean over ranks of gradients."""
    ring, model = Ring(), case.make()
    enable_ring(model, ring)
    if compiled:
        model.compile_repeated_blocks(backend="aot_eager")
    if checkpointed:
        model.enable_gradient_checkpointing(checkpoint)
    found = run(model, case.arguments())
    return {k: x if k == "output" else ring.sum(x.contiguous()) / ring.world_size for k, x in found.items()}
