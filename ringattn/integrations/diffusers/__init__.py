"""Ring attention for the transformers of diffusers pipelines: `enable_ring(pipe.transformer, ring)`.

Owns the specs of supported models and the hooks that apply them. Refuses to patch diffusers: its `HookRegistry` and `ModelHook`
wrap modules, and a `torch.overrides.TorchFunctionMode` redirects their calls of scaled_dot_product_attention.

    enable_ring(pipe.transformer, ring)                      once, after weights and adapters are loaded
    image = pipe(prompt, generator=generator).images[0]      on all ranks, from equal seeds; the same image on each
"""

from ringattn.integrations.diffusers.denoisers import JOINT, AttentionCall, DenoiserSpec, TokenCount, TokenDim
from ringattn.integrations.diffusers.enable import checkpoint, disable_ring, enable_ring

__all__ = [
    "JOINT",
    "AttentionCall",
    "DenoiserSpec",
    "TokenCount",
    "TokenDim",
    "checkpoint",
    "disable_ring",
    "enable_ring",
]
