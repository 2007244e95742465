"""Exact attention over sequences that no single device can hold.

Importing this package touches no device, imports no kernel compiler and takes no process group.
"""

from typing import TYPE_CHECKING

from ringattn.api import ring_attention, ring_attention_with_lse
from ringattn.current import checkpoint_contexts, use_sharding
from ringattn.nn import RingMultiheadAttention, replace_multihead_attention
from ringattn.partial import Partial, finalize, merge, reduce_partials
from ringattn.reference import attention_reference
from ringattn.ring import Ring
from ringattn.sdpa import scaled_dot_product_attention
from ringattn.sharding import Sharding
from ringattn.simulate import simulate_ring
from ringattn.softmax import online_logsumexp, online_softmax

__all__ = [
    "Partial",
    "Ring",
    "RingMultiheadAttention",
    "Sharding",
    "attention_reference",
    "checkpoint_contexts",
    "finalize",
    "merge",
    "online_logsumexp",
    "online_softmax",
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
