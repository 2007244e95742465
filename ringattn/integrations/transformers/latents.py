"""Layers of multi-head latent attention hand their latents on to attention.

Since transformers 5, such layers have a method `expand_kv`, which makes keys and values of all heads just before attention. With
`attn_implementation="ringattn"` it returns the latents themselves, and the attention function expands them: with a sharding by
`latent_attention`, with a step of a latent cache by `latent_attend`, and otherwise by the layer's own method, as before. Layers
whose up-projection is no plain `nn.Linear` (adapters, quantised weights) are expanded by their own method, too.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def hand_latents_on(module: nn.Module, attention: str) -> None:
    """Replace `expand_kv` of the module's class, if it has one, for layers with this attention; once per class."""
    own = getattr(type(module), "expand_kv", None)
    if own is None or hasattr(own, "__wrapped__"):
        return

    @functools.wraps(own)
    def expand_kv(self: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        return (kv_nope, k_rot) if self.config._attn_implementation == attention else own(self, kv_nope, k_rot)

    type(module).expand_kv = expand_kv  # pyright: ignore[reportAttributeAccessIssue]


def hands_latents_on(module: nn.Module) -> bool:
    """Return whether a layer's attention is given latents `b 1 s r` and rotary keys `b 1 s dr` in place of keys and values."""
    return hasattr(getattr(type(module), "expand_kv", None), "__wrapped__")


def expand(module: Any, latents: Tensor, rotary_keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys `b h s (dn + dr)` and values `b h s dv` by the layer's own method."""
    return type(module).expand_kv.__wrapped__(module, latents, rotary_keys)


def up_projections(module: Any) -> tuple[Tensor, Tensor] | None:
    """Return k_up `h dn r` and v_up `h dv r` of a layer, views of its weight; None where only the layer can expand."""
    projection = module.kv_b_proj
    plain = type(projection) is nn.Linear and projection.bias is None and type(projection.weight) is nn.Parameter
    hooked = projection._forward_hooks or projection._forward_pre_hooks or hasattr(projection, "_hf_hook")
    if not plain or hooked:  # hooks may load the weight, those of accelerate too
        return None
    r, dn, _, dv = (getattr(module, name) for name in _SIZES)
    k_up, v_up = projection.weight.view(-1, dn + dv, r).split([dn, dv], 1)
    return k_up, v_up


def latent_sizes(model: nn.Module) -> tuple[int, int] | None:
    """Return the columns of latents and of rotary keys where every attention of a model hands them on; None for others."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "kv_b_proj")]
    if not layers or any(not hands_latents_on(x) or up_projections(x) is None for x in layers):
        return None
    found = {(x.kv_lora_rank, x.qk_rope_head_dim) for x in layers}
    return found.pop() if len(found) == 1 else None
