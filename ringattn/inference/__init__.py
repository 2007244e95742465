"""Inference over contexts that no single device can hold: a sharded, paged cache of keys and values, prefill and decode."""

from ringattn.inference.attention import attend, latent_attend
from ringattn.inference.forward_batch import ForwardBatch
from ringattn.inference.kv_cache import PagedKVCache
from ringattn.inference.page_allocator import CacheFull
from ringattn.inference.static_batch import StaticBatch

__all__ = ["CacheFull", "ForwardBatch", "PagedKVCache", "StaticBatch", "attend", "latent_attend"]
