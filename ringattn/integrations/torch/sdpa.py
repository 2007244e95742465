"""Ring attention under the name and the arguments of `torch.nn.functional.scaled_dot_product_attention`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringattn.api import ring_attention
from ringattn.numerics.dropout import draw_seed
from ringattn.plan.expressions import Mask
from ringattn.plan.options import resolve_flag, resolve_real
from ringattn.plan.sharding import Sharding
from ringattn.schedule.validation import expand_bias
from ringattn.sharding_context import resolve_sharding
from ringattn.tensor_checks import check_tensor, is_causal_bias


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | Mask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    sharding: Sharding | None = None,
    kv_sharding: Sharding | None = None,
) -> Tensor:
    """Attention of this rank's query rows to the keys of all ranks, called like torch's function of this name.

    Rows that a mask leaves without keys give 0 and have zero gradients, where torch's give NaN or 0 by backend.

    Args:
        query: Queries of this rank, `b h s d`.
        key: Keys of this rank, `b hk s d`.
        value: Values of this rank, `b hk s dv`.
        attn_mask: This rank's query rows x *all* keys by global position, broadcastable to `b h s n`. Bool: True takes part.
            Floating point: added to the scores. A whole mask is cut; `sharding.shard(mask, dim=-2)` cuts it once for all
            layers. Or torch's `causal_upper_left(s, n)` or `causal_lower_right(s, n)` of the whole sequences, s queries and n
            keys, or a mask of `ringattn.masks`; neither is materialised.
        dropout_p: Probability of dropping a weight, always applied. The seed is drawn from torch's default CPU generator: ranks
            with equal seeds drop what one process drops, others by their own. The gradients are exact either way.
        is_causal: Key j is visible to query i when j <= i, by global position; never materialised. Of two sequences
            of different length the beginnings are aligned.
        scale: Factor on q . k; default d ** -0.5.
        enable_gqa: Allows key heads that divide query heads.
        sharding: Positions held by each rank; default the current sharding (`use_sharding`).
        kv_sharding: The sharding of the keys, where they belong to another sequence; default the current one's, or `sharding`.

    Returns:
        `b h s dv`, this rank's rows, query's dtype.

    Raises:
        RuntimeError: There is no sharding, or attn_mask comes with is_causal.
        ValueError: Shapes do not fit; and what `ring_attention` raises.
        TypeError: An argument is not a tensor.
        NotImplementedError: A tensor is of a subclass with its own meaning, or a lower right causal mask leaves rows without keys.

    Example:
        >>> from ringattn import Ring
        >>> x = torch.ones(1, 2, 5, 16)
        >>> scaled_dot_product_attention(x, x, x, is_causal=True, sharding=Ring().sharding(5)).shape
        torch.Size([1, 2, 5, 16])
    """
    found = resolve_sharding(sharding, kv_sharding)
    if found is None:
        raise RuntimeError(
            "scaled_dot_product_attention must know the sharding of its rows, got none; pass sharding=, or call it inside "
            "`with ringattn.use_sharding(sharding):`"
        )
    sharding, kv_sharding = found
    keys = sharding if kv_sharding is None else kv_sharding
    # an error on one rank is raised on the others too
    with sharding.ring.propagate_errors():
        is_causal, enable_gqa = resolve_flag("is_causal", is_causal), resolve_flag("enable_gqa", enable_gqa)
        dropout_p = resolve_real("dropout_p", dropout_p)
        _check_heads(query, key, value, enable_gqa)
        if attn_mask is not None and is_causal:
            raise RuntimeError(
                "attn_mask must be None when is_causal=True, got both; put the causal mask into attn_mask, or drop it"
            )
        bias, window, mask = None, None, None
        if isinstance(attn_mask, Mask):
            mask = attn_mask
        elif is_causal_bias(attn_mask):
            is_causal, window = _resolve_causal_bias(attn_mask, sharding.seq_len, keys.seq_len)
        elif attn_mask is not None:
            check_tensor("attn_mask", attn_mask)
            attn_mask = sharding.cut_whole(attn_mask, -2)
            _check_mask(attn_mask, query, keys.seq_len)
            bias = attn_mask
            if attn_mask.dtype == torch.bool:
                bias = torch.zeros(attn_mask.shape, dtype=query.dtype, device=attn_mask.device)
                bias = bias.masked_fill(attn_mask.logical_not(), float("-inf"))
    o = ring_attention(
        *(x.transpose(1, 2) for x in (query, key, value)),
        sharding=sharding,
        kv_sharding=kv_sharding,
        causal=is_causal,
        window=window,
        mask=mask,
        softmax_scale=scale,
        bias=bias,
        dropout_p=dropout_p,
        dropout_seed=draw_seed(query) if dropout_p else None,
        backward="keys" if dropout_p else "auto",
    )
    return o.transpose(1, 2)


def _resolve_causal_bias(mask: Any, seq_len: int, kv_len: int) -> tuple[bool, tuple[None, int] | None]:
    """Return the causal flag and the window of a `CausalBias` of the whole sequences."""
    from torch.nn.attention.bias import CausalVariant

    sizes = mask.seq_len_q, mask.seq_len_kv
    if sizes != (seq_len, kv_len):
        raise ValueError(
            f"attn_mask must be a causal bias of the whole sequences, {(seq_len, kv_len)}, got one of {sizes}; make it of "
            "sharding.seq_len and kv_sharding.seq_len"
        )
    if mask.variant == CausalVariant.UPPER_LEFT or seq_len == kv_len:
        return True, None
    if kv_len < seq_len:
        raise NotImplementedError(
            f"attn_mask must be a lower right causal bias of at least as many keys as queries, got {sizes}, whose first rows "
            "see nothing; pass sharding.shard(mask, dim=-2) of a bool mask"
        )
    return False, (None, kv_len - seq_len)


def _check_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} must be 4-dimensional, `b h s d`, got shape {tuple(x.shape)}; unsqueeze it")
    if not enable_gqa and (key.shape[1] != query.shape[1] or value.shape[1] != query.shape[1]):
        raise ValueError(
            f"key and value must have the {query.shape[1]} heads of query, got {key.shape[1]} and {value.shape[1]}; "
            "pass enable_gqa=True where they are shared by groups of query heads"
        )


def _check_mask(mask: Tensor, query: Tensor, kv_len: int) -> None:
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise RuntimeError(
            f"Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype: {mask.dtype} "
            f"and query.dtype: {query.dtype} instead."
        )
    expand_bias(mask, query.transpose(1, 2), kv_len, "attn_mask")
