"""The attention function of transformers layers, as a call of ring attention.

Legend: b batch, s rows of this rank, n tokens of the whole sequence, h query heads, hk key heads, d and dv head dims.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ringattn.api import latent_attention, ring_attention
from ringattn.inference import ForwardBatch, latent_attend
from ringattn.inference import attend as attend_step
from ringattn.integrations.transformers.latents import expand, hands_latents_on, up_projections
from ringattn.integrations.transformers.masks import RingMask
from ringattn.integrations.transformers.model_forward import (
    PrefillRows,
    attended_before,
    new_tokens,
    prefill_rows,
    untraced,
)
from ringattn.integrations.transformers.positions import (
    check_positions,
    check_rope_scaling,
    rank_end_positions,
    read_cumulative,
    read_documents,
    rope_scaling_limits,
)
from ringattn.integrations.transformers.support import check_supported, first_learned_position, is_tower
from ringattn.integrations.transformers.trees import check_tree, check_window
from ringattn.plan import expressions as masks
from ringattn.plan.expressions import Mask, Tree
from ringattn.plan.sharding import Sharding, positions_of
from ringattn.ring import Ring, default_world_size

NOT_PASSED = "not passed"
"""Default of position ids: the model does not pass them to attention; None when it passes them and has none."""

Positions: TypeAlias = Tensor | str | None
Cumulative: TypeAlias = tuple[Tensor | None, Tensor | None]
Window: TypeAlias = tuple[int, int] | None
Lengths: TypeAlias = tuple[tuple[int, int], ...] | None

_ring_of_one = functools.cache(Ring)


def _not_traced_with_step(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Let torch.compile trace calls without a step only: with one, attention communicates, and compiled layers break here."""
    not_traced: Callable[..., Any] = untraced(attend)

    @functools.wraps(attend)
    def call(*args: Any, step: ForwardBatch | None = None, **kwargs: Any) -> Any:
        return attend(*args, **kwargs) if step is None else not_traced(*args, step=step, **kwargs)

    return call


@_not_traced_with_step
def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: RingMask | Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sharding: Sharding | None = None,
    step: ForwardBatch | None = None,
    position_ids: Tensor | str | None = NOT_PASSED,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    deterministic: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    tree: Tree | None = None,
    recurrence: object = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention function of the name "ringattn", called by the layers of transformers models.

    Args:
        module: The layer; its `is_causal` is the default of is_causal.
        query: `b h s d`, this rank's rows, with rotary embeddings applied.
        key: `b hk s d`; of a layer that hands latents on (latents.py) latents `b 1 s r`.
        value: `b hk s dv`; of such a layer rotary keys `b 1 s dr`.
        attention_mask: As returned by `describe_mask`.
        dropout: Probability of dropping an attention weight. Ranks with equal seeds of torch's CPU generator drop what one process
            drops.
        scaling: Factor on q.k; default d ** -0.5.
        sharding: Rows held by each rank; the keyword `sharding` of the model's call. None: all rows are here.
        step: New tokens of a cache; the keyword `step` of the model's call.
        position_ids: `b s` or `1 s`; checked against the sharding.
        is_causal: Whether rows see earlier ones only.
        sliding_window: w: the last w keys; in bidirectional layers the w - 1 to each side.
        softcap: Bound of the soft cap.
        s_aux: `h`: sinks.
        deterministic: Whether gradients must be bitwise repeatable.
        cu_seq_lens_q: Cumulative lengths of packed documents; only without a sharding, which has its own.
        cu_seq_lens_k: The same.
        tree: The tokens are nodes of this tree; only with a sharding.
        recurrence: Present where the model's recurrent layers work over sharded rows (`replace_recurrent_layers`).
        others: Other keywords of the model's call; refused unless they do not change attention.

    Returns:
        `b s h dv` and None.
    """
    if is_tower(module):
        options = {"dropout": dropout, "scaling": scaling}
        return _attend_whole(module, (query, key, value), attention_mask, is_causal, **options), None
    weights = None
    if hands_latents_on(module):
        keeps_latents = step.cache.latent is not None if isinstance(step, ForwardBatch) else _is_shared(sharding)
        weights = up_projections(module) if keeps_latents else None
        if weights is None:
            key, value = expand(module, key, value)
    owner = step.cache if isinstance(step, ForwardBatch) else sharding if isinstance(sharding, Sharding) else None
    lengths = key_bias = tokens = shown = None
    # an error raised here on one rank is raised on the others too
    with nullcontext() if owner is None else owner.ring.propagate_errors():
        check_supported(others, "attention")
        if tree is not None and (sharding is None or step is not None):
            raise ValueError(
                "tree must come with a sharding and without a step, got another call; pass the batch through shard_batch(tree=...)"
            )
        if sharding is not None:
            check_supported(others, "sharded attention")
        mask = _check_mask(attention_mask)
        causal = _resolve_causal(module, is_causal, mask)
        if step is not None:
            _check_step(step, module, query, key, mask, causal, dropout, sharding, (cu_seq_lens_q, cu_seq_lens_k))
            if step.sharding is not None and (limits := rope_scaling_limits(getattr(module, "config", None))):
                check_rope_scaling(limits, [*rank_end_positions(step.sharding), *step.lengths])
        elif sharding is None:
            rows = query.shape[2], key.shape[2]
            sharding = _unsharded(module, rows, mask, position_ids, (cu_seq_lens_q, cu_seq_lens_k))
        elif cu_seq_lens_q is not None or cu_seq_lens_k is not None:
            raise ValueError(
                "cu_seq_lens must be left out when there is a sharding, which has the documents; pass the whole batch through "
                "shard_batch"
            )
        else:
            _check_sharded(module, position_ids, sharding, mask, tree, recurrence is not None)
        packed = sharding is not None and sharding.documents is not None
        window, chunk_len = _resolve_window(mask, causal, sliding_window, packed=packed)
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            query = _apply_temperature(module, query, sharding if step is None else _positions(step))
        if sharding is not None:
            lengths, key_bias, tokens = _resolve_padding(mask, query, sharding, chunk_len)
            shown = _resolve_union(mask, causal, window, chunk_len, lengths, tree, sharding.seq_len)
            if shown is not None:
                causal, window, lengths = False, None, None
    if step is not None:
        prefill = _replicated_prefill()
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        # a rank without rows computes one padding row (model_forward.py)
        q, k, v = (x[:, : step.rows] if prefill is None else prefill.own(x) for x in (q, k, v))
        layer: Any = module.layer_idx
        how: dict[str, Any] = {"window": window, "chunk_len": chunk_len, "sinks": s_aux, "softcap": softcap or 0.0}
        how["softmax_scale"] = scaling
        if weights is None:
            out = attend_step(step, layer, q, k, v, **how)
        else:
            out = latent_attend(step, layer, q, k[:, :, 0], v[:, :, 0], *weights, **how)
        if prefill is not None:
            return prefill.all_rows(out), None
        missing = query.shape[2] - step.rows
        return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, missing)) if missing else out, None
    assert sharding is not None, "a call without a step has a sharding"
    seed = None
    if dropout:
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                f"dropout must be 0 under torch.compile, got {dropout}; set attention_dropout=0.0"
            )
        seed = int(torch.randint(2**31, (), device="cpu"))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    given: Any = (q, k, v) if weights is None else (q, k[:, :, 0], v[:, :, 0], *weights)
    run: Any = ring_attention if weights is None else latent_attention
    out = run(
        *given,
        sharding=sharding,
        causal=causal,
        window=window,
        chunk_len=chunk_len,
        lengths=lengths,
        mask=shown,
        softmax_scale=scaling,
        softcap=softcap or 0.0,
        sinks=s_aux,
        key_bias=key_bias,
        dropout_p=dropout,
        dropout_seed=seed,
        deterministic=bool(deterministic),
        # the owner of the query then draws the dropout in both directions, so ranks may differ in their seeds
        backward="keys" if dropout else "auto",
    )
    if tokens is not None:
        out = out.masked_fill(~tokens[:, :, None, None], 0.0)
    return out, None


def _replicated_prefill() -> PrefillRows | None:
    """Return the rows of a prefill that every rank computes but for attention; None in other calls."""
    rows = prefill_rows()
    return rows if rows is not None and rows.replicated else None


def _positions(step: ForwardBatch) -> Tensor:
    """Return the positions `b s` or `1 s` of the rows that the layer was given."""
    prefill = _replicated_prefill()
    return step.positions if prefill is None or prefill.positions is None else prefill.positions


def _attend_whole(
    module: nn.Module, qkv: tuple[Tensor, ...], mask: RingMask | Tensor | None, is_causal: bool | None, **options: Any
) -> Tensor:
    """Return what torch's attention gives to a layer of an image encoder, whose rows are whole on every rank."""
    if isinstance(mask, RingMask):
        if mask.padding is not None or mask.local_size is not None or mask.overlay:
            raise NotImplementedError(
                "the mask of an image encoder must be None or a tensor, got padding, a window or blocks in "
                f"{type(module).__name__}; make the model with attn_implementation={{'text_config': 'ringattn'}}"
            )
        mask, is_causal = None, bool(mask.causal) if is_causal is None else is_causal
    sdpa = AttentionInterface()["sdpa"]
    return sdpa(module, *qkv, mask, is_causal=is_causal, **options)[0]


def _is_shared(sharding: Sharding | None) -> bool:
    return isinstance(sharding, Sharding) and sharding.world_size > 1


def _check_mask(attention_mask: RingMask | Tensor | None) -> RingMask | None:
    if attention_mask is None or isinstance(attention_mask, RingMask):
        return attention_mask
    shape = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
    raise NotImplementedError(
        f"the mask of attention must come from ringattn's mask function, got {shape}; give the model a 2-dimensional "
        "attention_mask, or none. A model that makes its own masks is not supported"
    )


def _resolve_causal(module: nn.Module, is_causal: bool | None, mask: RingMask | None) -> bool:
    wanted = is_causal if is_causal is not None else getattr(module, "is_causal", None)
    found = None if mask is None else mask.causal
    if mask is not None and mask.overlay:
        raise NotImplementedError(
            f"the mask must be causal, bidirectional, a window or chunks, got {mask.overlay}; "
            "use attn_implementation='sdpa' for this model"
        )
    if mask is not None and is_causal is False and getattr(module, "is_causal", False):
        # causal layers of GPT-2 and others pass False to say that the mask, where there is one, has the order
        if found is None:
            raise NotImplementedError(
                f"the mask of {type(module).__name__} must say whether it is causal, as the layer leaves this to it, got one of "
                "unknown order; use attn_implementation='sdpa' for this model"
            )
        return found
    if wanted is not None and found is not None and bool(wanted) != found:
        raise NotImplementedError(
            f"the mask must be {'causal' if wanted else 'bidirectional'} as {type(module).__name__} says, got one that is not; "
            "use attn_implementation='sdpa' for this model"
        )
    if wanted is not None:
        return bool(wanted)
    return True if found is None else found


def _unsharded(
    module: nn.Module, lengths: tuple[int, int], mask: RingMask | None, position_ids: Positions, cu_seq_lens: Cumulative
) -> Sharding:
    """Return the sharding of a sequence that is whole on this rank."""
    ranks = default_world_size()
    if ranks > 1:
        raise RuntimeError(
            f"a model must be called with a sharding among {ranks} ranks, got none; call it with shard_batch(batch, ring), or "
            "generate with a RingCache, or pass sharding=Ring(group_of_this_rank_alone).sharding(seq_len) when every rank has "
            f"whole sequences. If it was, the parent of {type(module).__name__} does not pass keywords on (as in StableLM "
            "and Nemotron): run this model on one process, with attn_implementation='sdpa'"
        )
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "a compiled model must be called with a sharding, got none; call it with shard_batch(batch, ring)"
        )
    rows, keys = lengths
    if keys != rows:
        raise NotImplementedError(
            f"queries and keys must be of the same rows, got {rows} and {keys}: decoding with a cache of transformers, and "
            "cross attention, are not supported; generate with a RingCache, or use model.set_attn_implementation('sdpa')"
        )
    documents = read_cumulative(*cu_seq_lens, rows)
    if documents is None and isinstance(position_ids, Tensor):
        # as in transformers, where an attention mask means that nothing is packed
        if mask is None or not (mask.given or mask.causal is False):
            documents = read_documents(position_ids, mask, _layer_index(module))
    elif documents is None and position_ids is NOT_PASSED and mask is not None:
        documents = mask.documents
    return _ring_of_one().sharding(rows, "contiguous", documents)


def _check_sharded(
    module: nn.Module,
    position_ids: Positions,
    sharding: Sharding,
    mask: RingMask | None,
    tree: Tree | None,
    recurrent: bool,
) -> None:
    if not isinstance(sharding, Sharding):
        raise ValueError(
            f"sharding must be a ringattn.Sharding, got {type(sharding).__name__}; pass ring.sharding(seq_len), or use shard_batch"
        )
    if mask is not None and mask.padding is not None and mask.padding.shape[1] != sharding.seq_len:
        raise ValueError(
            f"attention_mask must be of the whole sequence, {sharding.seq_len} tokens, got {mask.padding.shape[1]}; "
            "do not shard it, as shard_batch does not"
        )
    if tree is not None:
        check_tree(tree, position_ids, sharding)
    if sharding.world_size == 1:
        return
    config = getattr(module, "config", None)
    check_supported(config, "recurrent model" if recurrent else "model")
    check_supported(module, "layer")
    if position_ids is None:
        raise ValueError(
            "position_ids must be given to a model whose rows are sharded, got none; pass the batch through shard_batch"
        )
    limits, first_position = rope_scaling_limits(config), first_learned_position(module)
    if position_ids is NOT_PASSED:
        check_supported(module, "unchecked positions")
    if tree is None and isinstance(position_ids, Tensor):
        check_positions(position_ids, sharding, mask, _layer_index(module), first_position, limits)
    if limits and (position_ids is NOT_PASSED or torch.compiler.is_compiling()):
        check_rope_scaling(limits, rank_end_positions(sharding))


def _resolve_union(
    mask: RingMask | None,
    causal: bool,
    window: Window,
    chunk_len: int | None,
    lengths: Lengths,
    tree: Tree | None,
    tokens: int,
) -> Mask | None:
    """Return the mask of a layer that is more than one interval, or whose spans see all of themselves; None for others."""
    if tree is not None:
        if not causal or chunk_len is not None or lengths is not None:
            raise NotImplementedError(
                "a tree must go with causal layers without chunks and padding, got another; run the answers one by one"
            )
        check_window(tree, window)
        return tree
    if mask is None or mask.spans is None:
        return None
    if mask.span_tokens != tokens:
        raise NotImplementedError(
            f"spans that see all of themselves must be of the whole sequence, {tokens} tokens, got {mask.span_tokens}; pass the "
            "batch with its images through shard_batch"
        )
    if chunk_len is not None:
        raise NotImplementedError("spans that see all of themselves must go without chunked attention; use 'sdpa'")
    order = masks.causal() if causal else masks.window(None, None)
    near = masks.window(None, None) if window is None else masks.window(window[0], None if causal else window[1])
    united = [
        (order | masks.spans(spans)) & near if mask.cut_spans else (order & near) | masks.spans(spans)
        for spans in mask.spans
    ]
    found = united[0] if len(united) == 1 else masks.per_batch(united)
    if lengths is not None:
        found = masks.lengths(lengths * (1 if len(lengths) > 1 else len(united))) & found
    return found


def _layer_index(module: nn.Module) -> int | None:
    layer = getattr(module, "layer_idx", None)
    return layer if isinstance(layer, int) else None


def _check_step(
    step: ForwardBatch,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: RingMask | None,
    causal: bool,
    dropout: float,
    sharding: Sharding | None,
    cu_seq_lens: Cumulative,
) -> None:
    if not isinstance(step, ForwardBatch):
        raise ValueError(
            f"step must be a ForwardBatch, got {type(step).__name__}; pass what PagedKVCache.extend returned"
        )
    if sharding is not None or any(x is not None for x in cu_seq_lens):
        raise ValueError(
            "sharding and cu_seq_lens must be left out of a call with a step, which has the rows of each rank and request"
        )
    if mask is not None and mask.spans is not None:
        raise NotImplementedError(
            "the mask must be causal, a window or chunks in a call with a cache, got spans of tokens that see each other, as those "
            "of images; generate on one process with attn_implementation='sdpa'"
        )
    if mask is not None and mask.padding is not None:
        raise ValueError(
            "attention_mask must be left out of a call with a step; pass the padding as `first` of PagedKVCache.add_request"
        )
    if not causal:
        raise NotImplementedError(
            f"layers with a cache must be causal, got {type(module).__name__}, which is not; use shard_batch for encoders"
        )
    if dropout:
        raise ValueError(f"dropout must be 0 in a call with a step, got {dropout}; call model.eval()")
    if _layer_index(module) is None:
        raise NotImplementedError(
            f"a layer must have a layer_idx to find its keys in a cache, got {type(module).__name__} without; "
            "use attn_implementation='sdpa' for this model"
        )
    if not torch.compiler.is_compiling() and attended_before(module.layer_idx):  # pyright: ignore[reportArgumentType]
        raise NotImplementedError(
            f"a layer with a cache must attend once in a call, got {type(module).__name__} that does so twice, whose second keys "
            "would overwrite the first; generate on one process with attn_implementation='sdpa'"
        )
    check_supported(module, "layer")
    rows = tuple(query.shape[::2][:2])
    expected = max(step.rows, min(1, query.shape[2])) if _replicated_prefill() is None else new_tokens(step)
    if key.shape[2] != query.shape[2] or rows != (step.batch, expected):
        raise ValueError(
            f"a call with a step must have its batch and this rank's rows, {(step.batch, step.rows)}, got {rows} queries and "
            f"{key.shape[2]} keys each; pass step.take(tokens), with use_cache=False, or use run_step"
        )


def _apply_temperature(layer: Any, query: Tensor, rows: Any) -> Tensor:
    """Scale queries `b h s d` of Llama 4 for their positions `b s` or `1 s`, or those of a sharding.

    Layers without rotary embeddings scale a query by a factor of its position, which they count from 0 in each call, whatever
    position_ids the model was given. So their factor is divided out, and that of the true position is applied.
    """
    positions = positions_of(rows.shards[rows.rank])[None] if isinstance(rows, Sharding) else rows
    if positions.shape[1] != query.shape[2]:
        return query  # the padding row of a rank without rows
    counted = torch.arange(query.shape[2], device=query.device)
    wanted, was = (
        torch.log1p(torch.floor((place.float() + 1.0) / layer.floor_scale)) * layer.attn_scale + 1.0
        for place in (positions.to(query.device), counted)
    )
    return (query * (wanted / was)[:, None, :, None]).to(query.dtype)


def _resolve_window(
    mask: RingMask | None, causal: bool, sliding_window: int | None, *, packed: bool
) -> tuple[Window, int | None]:
    """Return (window, chunk_len) from the layer and the mask."""
    size = None if mask is None else mask.local_size
    if size is not None and sliding_window is None and mask is not None and mask.chunked is not False:
        if mask.chunked is None:
            raise NotImplementedError(
                f"sliding_window and attention_chunk_size must differ in the config, got {size} for both, which leaves open what a "
                "layer means; use attn_implementation='sdpa'"
            )
        if packed:
            raise NotImplementedError(
                "chunked attention must go without packed documents, got some, whose chunks would start over in each; unpack them"
            )
        return None, size
    if mask is not None and size is None and sliding_window is not None:
        raise NotImplementedError(
            f"a layer with sliding_window={sliding_window} must have a mask with a window, got one without; "
            "use attn_implementation='sdpa' for this model"
        )
    left = size if sliding_window is None else sliding_window
    if left is None:
        return None, None
    if causal:
        return (left - 1, 0), None
    reach = left - 1 if mask is None or mask.window is None else mask.window
    return (reach, reach), None


def _resolve_padding(
    mask: RingMask | None, query: Tensor, sharding: Sharding, chunk_len: int | None
) -> tuple[Lengths, Tensor | None, Tensor | None]:
    """Return (lengths, key_bias `b s`, tokens `b s`): padding as lengths, or as a bias and the rows that are tokens."""
    if mask is None or mask.padding is None:
        return None, None, None
    if chunk_len is not None and mask.lengths is None:
        raise NotImplementedError("chunked attention must go without holes in attention_mask; pad on the right")
    if chunk_len is not None and any(start for start, _ in mask.lengths or ()):
        raise NotImplementedError(
            "chunked attention must go without padding on the left, where chunks would start later; pad on the right"
        )
    # lengths are constants of compiled code, which would be recompiled for every batch
    if mask.lengths is not None and not torch.compiler.is_compiling():
        return mask.lengths, None, None
    tokens = sharding.shard(mask.padding, dim=1)
    key_bias = torch.zeros(tokens.shape, dtype=torch.float32, device=query.device).masked_fill(~tokens, float("-inf"))
    return None, key_bias, tokens
