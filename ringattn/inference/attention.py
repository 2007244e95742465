"""Attention of new tokens over a cache: one function for prefill and decode.

Owns what a layer of a model calls. Refuses to know transformers, and how partial results are computed and travel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringattn.api import ring_attention
from ringattn.inference.step import Step
from ringattn.kernels.contract import Score
from ringattn.kernels.decode import decode, num_splits, parts_len


def attend(
    step: Step,
    layer: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Keeps the keys of new tokens and attends with their queries over all that their requests have.

    Every rank makes the same call for the same step. Options mean what they mean in `ring_attention`.

    Args:
        step: What `PagedKVCache.extend` returned.
        layer: Which layer of the cache.
        q: `batch rows h d`, rotary embeddings applied.
        k: `batch rows hk d`, likewise.
        v: `batch rows hk dv`.
        causal: Tokens see earlier ones only.
        window: As in `ring_attention`.
        softmax_scale: Factor on q.k; default d ** -0.5.
        softcap: Bound of the soft cap; 0.0 for none.
        sinks: `h`.
        alibi_slopes: `h`.

    Returns:
        `batch rows h dv`. In decode every rank has the same bits.
    """
    cache = step.cache
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    window = (window - 1, 0) if isinstance(window, int) else window
    cache.put(layer, step, k, v)
    if step.mode == "decode":
        return _decode(step, layer, q, causal, window, Score(scale, softcap, alibi_slopes=alibi_slopes), sinks)
    assert step.sharding is not None and step.kept_slots is not None
    keys, values = cache.take(layer, step.kept_slots)
    lengths = None
    if any(step.firsts):
        lengths = [(first, step.lengths[0]) for first in step.firsts]
    return ring_attention(
        q, keys, values, step.sharding, kv_sharding=step.kv_sharding, causal=causal, window=window, lengths=lengths,
        softmax_scale=scale, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes,
    )  # fmt: skip


def _decode(step: Step, layer: int, q: Tensor, causal: bool, window: tuple[int | None, int | None] | None, score: Score, sinks: Tensor | None) -> Tensor:
    cache, table = step.cache, step.table
    assert table is not None
    b, s, h, _ = q.shape
    dv = cache.v_head_dim
    splits = num_splits(b, s, h, cache.kv_heads, table.pages.shape[1], cache.page_size, q.device)
    parts = torch.empty(splits, parts_len(b * s * h, dv), dtype=torch.float32, device=q.device)
    lo, hi = step.bounds(causal, window)
    decode(q, cache.k[layer], cache.v[layer], table, lo, hi, step.positions.to(torch.int32), score, parts)
    o = torch.empty(b, s, h, dv, dtype=q.dtype, device=q.device)
    lse = torch.empty(b, h, s, dtype=torch.float32, device=q.device)
    cache.ring.exchange(q.device).finish(parts, b, s, h, dv, sinks, o, lse)
    return o
