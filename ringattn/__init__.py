"""Exact attention over sequences that no single device can hold.

Importing this package touches no device, imports no kernel compiler and takes no process group.
"""

from typing import TYPE_CHECKING

from ringattn import masks
from ringattn.api import latent_attention, latent_attention_with_lse, ring_attention, ring_attention_with_lse
from ringattn.integrations.torch.multihead_attention import RingMultiheadAttention, replace_multihead_attention
from ringattn.integrations.torch.redirect import redirect_sdpa
from ringattn.integrations.torch.sdpa import scaled_dot_product_attention
from ringattn.numerics.partial import Partial, finalize, merge, reduce_partials
from ringattn.numerics.reference import attention_reference
from ringattn.numerics.softmax import online_logsumexp, online_softmax
from ringattn.plan.sharding import Sharding
from ringattn.ring import Ring
from ringattn.sharding_context import checkpoint_contexts, use_sharding
from ringattn.simulate import simulate_ring
from ringattn.training import mean_over_ring

__all__ = [
    "Partial",
    "Ring",
    "RingMultiheadAttention",
    "Sharding",
    "attention_reference",
    "checkpoint_contexts",
    "finalize",
    "latent_attention",
    "latent_attention_with_lse",
    "masks",
    "mean_over_ring",
    "merge",
    "online_logsumexp",
    "online_softmax",
    "redirect_sdpa",
    "reduce_partials",
    "replace_multihead_attention",
    "ring_attention",
    "ring_attention_with_lse",
    "scaled_dot_product_attention",
    "simulate_ring",
    "use_sharding",
]

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        """`__version__`, from the metadata of the installed package, read when somebody asks: that takes a while."""
        if name == "__version__":
            from importlib import metadata

            try:
                return metadata.version("ringattn")
            except metadata.PackageNotFoundError:
                pass
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
