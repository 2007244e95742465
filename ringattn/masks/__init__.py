"""Masks to compose: `ring_attention(..., mask=masks.causal() & (masks.sinks(4) | masks.window(4095)))`."""

from ringattn.masks.flex import from_block_mask
from ringattn.plan.expressions import (
    Mask,
    blocks,
    causal,
    chunks,
    documents,
    global_tokens,
    lengths,
    per_batch,
    prefix,
    sinks,
    spans,
    tree,
    window,
)

__all__ = [
    "Mask",
    "blocks",
    "causal",
    "chunks",
    "documents",
    "from_block_mask",
    "global_tokens",
    "lengths",
    "per_batch",
    "prefix",
    "sinks",
    "spans",
    "tree",
    "window",
]
