"""What a transformers layer passes to attention, as a call of ring attention.

Owns the attention function of the name "ringattn", and every refusal of what such a layer may pass. Refuses to know where
batches come from (batch.py).

Legend: b batch, s rows of this rank, n tokens of the whole sequence, h query heads, hk key heads, d and dv head dims.

Note [Tempered queries]
    Layers of Llama 4 without rotary embeddings make a query longer the further back its place: by a factor of it that is 1 for
    the first floor_scale - 1 tokens. They count places themselves, the rows of the call from 0 on, whatever positions the model
    was given. So what they multiplied by is taken back, and what belongs to a row's place is put there. Calls of fewer rows than
    floor_scale (8192 in the models there are) were multiplied by 1, and get the bits of one process.
"""

from __future__ import annotations

import functools
import inspect
import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ringattn.api import ring_attention
from ringattn.inference import Step
from ringattn.inference import attend as attend_step
from ringattn.integrations.transformers.masks import RingMask
from ringattn.integrations.transformers.positions import check_positions, read_cumulative, read_documents
from ringattn.integrations.transformers.rotations import check_rotation, find_ends, find_turns
from ringattn.integrations.transformers.steps import attends_again
from ringattn.plan.sharding import Sharding, positions_of
from ringattn.ring import Ring, default_world_size

UNSAID = "unsaid"
"""In place of position ids that a model does not pass; None are those that it passes without having any."""

IGNORED = frozenset(
    {
        "cache_position",
        "labels",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "shift_labels",
    }
)
"""Keywords that reach attention because models hand on what they are given, and that say nothing about attention."""

OF_ATTENTION = frozenset(
    {"attention", "chunked_attention", "dense", "full_attention", "mlp", "moe", "sliding_attention", "sparse"}
)
"""Kinds of layers, as configs name them, in which tokens meet in attention or not at all."""

NUMBERING = "create_position_ids_from_input_ids"
"""What RoBERTa and its kin call the function that numbers tokens behind `padding_idx`."""

_alone: list[Ring] = []
_calls = [0]


def calls_so_far() -> int:
    """How often `attend` was called outside of compiled code."""
    return _calls[0]


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
    step: Step | None = None,
    position_ids: Tensor | str | None = UNSAID,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    deterministic: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function of the name "ringattn", which layers of transformers models call.

    Args:
        module: The layer; its `is_causal` is the default of is_causal.
        query: `b h s d`, this rank's rows, with their positions applied.
        key: `b hk s d`.
        value: `b hk s dv`.
        attention_mask: What `describe_mask` returned.
        dropout: Probability of dropping an attention weight. Its seed comes from torch's generator of the CPU: ranks with equal
            seeds drop what one process drops.
        scaling: Factor on q.k; default d ** -0.5.
        sharding: Who holds which rows: the keyword `sharding` that the model was called with. None: all rows are here.
        step: What a cache said of the new tokens: the keyword `step` that the model was called with. Their keys are kept in
            the cache, and they see what is there (`ringattn.inference.attend`).
        position_ids: `b s` or `1 s`; checked against the sharding.
        is_causal: Whether rows see earlier ones only.
        sliding_window: w: the last w keys; in bidirectional layers the w - 1 to each side.
        softcap: Bound of the soft cap.
        s_aux: `h`: sinks.
        deterministic: Demand bitwise repeatable gradients.
        cu_seq_lens_q: Cumulative lengths of packed documents; without a sharding only, which knows its own.
        cu_seq_lens_k: The same.
        others: What else the model was called with; refused unless it has nothing to say about attention.

    Returns:
        `b s h dv` and None.

    Raises:
        ValueError: Positions, padding or documents do not fit the sharding.
        NotImplementedError: The model passes something that is not supported, or has layers of other kinds; the message names it.
        RuntimeError: There are several ranks and no sharding.
    """
    if not torch.compiler.is_compiling():
        _calls[0] += 1
    ring = step.cache.ring if isinstance(step, Step) else sharding.ring if isinstance(sharding, Sharding) else None
    lengths = key_bias = tokens = None
    # what is refused here on one rank, others hear of
    with nullcontext() if ring is None else ring.propagate_errors():
        _refuse_others(others, sharding)
        mask = _check_mask(attention_mask)
        causal = _resolve_causal(module, is_causal, mask)
        if step is not None:
            _check_step(step, module, query, key, mask, causal, dropout, sharding, (cu_seq_lens_q, cu_seq_lens_k))
            if step.sharding is not None and (turns := find_turns(getattr(module, "config", None))):
                check_rotation(turns, [*find_ends(step.sharding), *step.lengths])
            window, chunk_len = _resolve_window(mask, causal, sliding_window, packed=False)
            if _is_tempered(module):
                query = _temper(module, query, step.positions)
        else:
            if sharding is None:
                sharding = _whole(module, query, key, mask, position_ids, cu_seq_lens_q, cu_seq_lens_k)
            else:
                if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
                    raise ValueError(
                        "cu_seq_lens must be left out when there is a sharding, which knows the documents; "
                        "pass the whole batch through shard_batch"
                    )
                _check_sharded(module, position_ids, sharding, mask)
                if sharding.world_size > 1:
                    _check_router(module, others)
                if _is_tempered(module):
                    query = _temper(module, query, positions_of(sharding.shards[sharding.rank])[None])
            packed = sharding.documents is not None
            window, chunk_len = _resolve_window(mask, causal, sliding_window, packed=packed)
            lengths, key_bias, tokens = _resolve_padding(mask, query, sharding, chunk_len)
    if step is not None:
        return _attend_with_cache(step, module, query, key, value, window, chunk_len, scaling, softcap, s_aux), None
    assert sharding is not None, "a call without a step has a sharding"
    seed = None
    if dropout:
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                f"dropout must be 0 under torch.compile, got {dropout}; set attention_dropout=0.0"
            )
        seed = int(torch.randint(2**31, (), device="cpu"))
    out = ring_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        sharding,
        causal=causal,
        window=window,
        chunk_len=chunk_len,
        lengths=lengths,
        softmax_scale=scaling,
        softcap=softcap or 0.0,
        sinks=s_aux,
        key_bias=key_bias,
        dropout_p=dropout,
        dropout_seed=seed,
        deterministic=bool(deterministic),
        # whoever drops then is the owner of the query, forward and backward: right even when ranks differ in their seeds
        backward="keys" if dropout else "auto",
    )
    if tokens is not None:
        out = out.masked_fill(~tokens[:, :, None, None], 0.0)
    return out, None


def check_layers(config: Any) -> None:
    """Refuses models in some of whose layers tokens meet otherwise than in attention, where rows are split or keys kept.

    Such layers (recurrent ones, convolutions) would see the rows of a call as a sequence of its own.
    """
    others: list[str] = sorted(set(getattr(config, "layer_types", None) or ()) - OF_ATTENTION)
    # MobileBERT embeds tokens with their neighbours, ESM scales their embeddings by how many of all are masked
    others += [name for name in ("trigram_input", "token_dropout") if getattr(config, name, False)]
    if others:
        raise NotImplementedError(
            f"tokens must meet in layers of attention only where ranks share them or a RingCache keeps them, got {others} layers "
            f"in the config of {config.model_type}; run this model on one process, without a RingCache"
        )


def _refuse_others(others: dict[str, Any], sharding: Sharding | None) -> None:
    for name, value in others.items():
        if value is None or value is False or name in IGNORED:
            continue
        if name == "use_cache":
            if sharding is not None:
                raise NotImplementedError(
                    "use_cache must be False when there is a sharding, whose keys are kept nowhere; pass use_cache=False, as "
                    "shard_batch does. To generate, use RingCache"
                )
        elif name == "output_attentions":
            raise NotImplementedError(
                "output_attentions must be False: ring attention never has the weights; use attn_implementation='eager'"
            )
        else:
            raise NotImplementedError(
                f"{name} must be left out: ring attention does not know it; use attn_implementation='eager' for this model"
            )


def _check_mask(attention_mask: RingMask | Tensor | None) -> RingMask | None:
    if attention_mask is None or isinstance(attention_mask, RingMask):
        return attention_mask
    shape = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
    raise NotImplementedError(
        f"the mask of attention must come from ringattn's mask function, got {shape}; give the model a 2-dimensional "
        "attention_mask, or none. A model that draws its masks itself is not supported"
    )


def _resolve_causal(module: nn.Module, is_causal: bool | None, mask: RingMask | None) -> bool:
    wanted = is_causal if is_causal is not None else getattr(module, "is_causal", None)
    found = None if mask is None else mask.causal
    if mask is not None and mask.overlay:
        raise NotImplementedError(
            f"the mask must be causal, bidirectional, a window or chunks, got {mask.overlay}; "
            "use attn_implementation='sdpa' for this model"
        )
    if wanted is not None and found is not None and bool(wanted) != found:
        raise NotImplementedError(
            f"the mask must be {'causal' if wanted else 'bidirectional'} as {type(module).__name__} says, got one that is not; "
            "use attn_implementation='sdpa' for this model"
        )
    if wanted is not None:
        return bool(wanted)
    return True if found is None else found


def _whole(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: RingMask | None,
    position_ids: Tensor | str | None,
    cu_seq_lens_q: Tensor | None,
    cu_seq_lens_k: Tensor | None,
) -> Sharding:
    """The sharding of a sequence that is all here."""
    ranks = default_world_size()
    if ranks > 1:
        raise RuntimeError(
            f"a model must be called with a sharding among {ranks} ranks, got none; call it with shard_batch(batch, ring), or "
            "generate with a RingCache, or pass sharding=Ring(group_of_this_rank_alone).sharding(seq_len) when every rank has "
            f"whole sequences. Was it called so, then what {type(module).__name__} is a part of hands no keywords on (as StableLM "
            "and Nemotron do): run this model on one process, with attn_implementation='sdpa'"
        )
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "a compiled model must be called with a sharding, got none; call it with shard_batch(batch, ring)"
        )
    rows = query.shape[2]
    if key.shape[2] != rows:
        raise NotImplementedError(
            f"queries and keys must be of the same rows, got {rows} and {key.shape[2]}: decoding with a cache of transformers, and "
            "cross attention, are not supported; generate with a RingCache, or use model.set_attn_implementation('sdpa')"
        )
    documents = None
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        if cu_seq_lens_q is None or cu_seq_lens_k is None or not torch.equal(cu_seq_lens_q, cu_seq_lens_k):
            raise ValueError(
                "cu_seq_lens_q and cu_seq_lens_k must be equal, got different ones; pass the same documents"
            )
        documents = read_cumulative(cu_seq_lens_q, rows)
    elif isinstance(position_ids, Tensor) and (mask is None or not (mask.given or mask.causal is False)):
        # as transformers reads them, which takes an attention mask for a sign that nothing is packed
        documents = read_documents(position_ids, mask, _number(module))
    if not _alone:
        _alone.append(Ring())
    return _alone[0].sharding(rows, "contiguous", documents)


def _check_sharded(
    module: nn.Module, position_ids: Tensor | str | None, sharding: Sharding, mask: RingMask | None
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
    if sharding.world_size == 1:
        return
    check_layers(getattr(module, "config", None))
    _check_told(module, "where ranks share a sequence, got one with {}, which numbers the rows of each rank by itself")
    if position_ids is None:
        raise ValueError(
            "position_ids must be given to a model whose rows are sharded, got none; pass the batch through shard_batch"
        )
    turns, begin = find_turns(getattr(module, "config", None)), _begin(module)
    if position_ids is UNSAID and begin:
        raise NotImplementedError(
            f"a model that counts positions from {begin} (padding_idx + 1) must hand them to its attention, to be checked, got "
            f"one with {type(module).__name__}, which does not; run this model on one process"
        )
    if isinstance(position_ids, Tensor):
        check_positions(position_ids, sharding, mask, _number(module), begin, turns)
    if turns and (position_ids is UNSAID or torch.compiler.is_compiling()):
        check_rotation(turns, find_ends(sharding))


def _check_router(module: nn.Module, others: dict[str, Any]) -> None:
    """Refuses a loss that is no mean over tokens, of which each rank would compute that of its own."""
    config = getattr(module, "config", None)
    if others.get("output_router_logits", getattr(config, "output_router_logits", False)):
        raise NotImplementedError(
            "output_router_logits must be False where ranks share a sequence, got True: the loss that balances experts would be "
            "of each rank's tokens alone; leave it out, and set model.config.output_router_logits = False"
        )


def _check_told(module: nn.Module, where: str) -> None:
    """Refuses a model that can not be told where its rows are."""
    if not torch.compiler.is_compiling() and not _takes_positions(type(module)):
        raise NotImplementedError(
            f"a model must take position_ids {where.format(type(module).__name__)}; run this model on one process, with "
            "attn_implementation='sdpa' to generate"
        )


@functools.cache
def _takes_positions(kind: type[nn.Module]) -> bool:
    """Whether a model in the file of a kind of layer is told positions; True where there is no model."""
    home = vars(sys.modules[kind.__module__]).values() if kind.__module__ in sys.modules else ()
    models = [
        x for x in home if isinstance(x, type) and issubclass(x, PreTrainedModel) and x.__module__ == kind.__module__
    ]
    return not models or any("position_ids" in inspect.signature(model.forward).parameters for model in models)


def _begin(module: nn.Module) -> int:
    """Where a model counts positions from: padding_idx + 1 where it is of RoBERTa's kin."""
    config = getattr(module, "config", None)
    padding = getattr(config, "pad_token_id", None)
    if torch.compiler.is_compiling() or padding is None or not _counts_behind_padding(type(module)):
        return 0
    return padding + 1 if getattr(config, "position_embedding_type", "absolute") == "absolute" else 0


@functools.cache
def _counts_behind_padding(kind: type[nn.Module]) -> bool:
    """Whether the file of a kind of layer has what numbers tokens from padding_idx + 1 on."""
    home = vars(sys.modules[kind.__module__]) if kind.__module__ in sys.modules else {}
    parts = [x for x in home.values() if isinstance(x, type) and x.__module__ == kind.__module__]
    return NUMBERING in home or any(NUMBERING in vars(part) for part in parts)


def _number(module: nn.Module) -> int | None:
    layer = getattr(module, "layer_idx", None)
    return layer if isinstance(layer, int) else None


def _check_step(
    step: Step,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: RingMask | None,
    causal: bool,
    dropout: float,
    sharding: Sharding | None,
    cu_seq_lens: tuple[Tensor | None, Tensor | None],
) -> None:
    if not isinstance(step, Step):
        raise ValueError(
            f"step must be a ringattn.inference.Step, got {type(step).__name__}; pass what PagedKVCache.extend returned"
        )
    if sharding is not None or any(x is not None for x in cu_seq_lens):
        raise ValueError(
            "sharding and cu_seq_lens must be left out of a call with a step, which says who has which rows of which request"
        )
    if mask is not None and mask.padding is not None:
        raise ValueError(
            "attention_mask must be left out of a call with a step; say where a request's tokens begin when it joins the cache"
        )
    if not causal:
        raise NotImplementedError(
            f"layers that keep keys in a cache must be causal, got {type(module).__name__}, which is not; "
            "use shard_batch for encoders"
        )
    if dropout:
        raise ValueError(f"dropout must be 0 in a call with a step, got {dropout}; call model.eval()")
    if _number(module) is None:
        raise NotImplementedError(
            f"a layer must have a layer_idx to find its keys in a cache, got {type(module).__name__} without; "
            "use attn_implementation='sdpa' for this model"
        )
    if not torch.compiler.is_compiling() and attends_again(module.layer_idx):  # pyright: ignore[reportArgumentType]
        raise NotImplementedError(
            f"a layer must attend once in a call whose keys a cache keeps, got {type(module).__name__} that does so twice, whose "
            "second values would be kept in place of the first ones; generate on one process with attn_implementation='sdpa'"
        )
    _check_told(module, "where a cache keeps its keys, got one with {}, which numbers the rows of each call by itself")
    rows = tuple(query.shape[::2][:2])
    if key.shape[2] != query.shape[2] or rows != (step.batch, max(step.rows, min(1, query.shape[2]))):
        raise ValueError(
            f"a call with a step must have its batch and this rank's rows, {(step.batch, step.rows)}, got {rows} queries and "
            f"{key.shape[2]} keys each; pass step.take(tokens), with use_cache=False, or use run_step"
        )


def _attend_with_cache(
    step: Step,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: tuple[int, int] | None,
    chunk_len: int | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    # a rank without rows brings one that nobody sees (Note [A row for nobody] in steps.py)
    q, k, v = (x.transpose(1, 2)[:, : step.rows] for x in (query, key, value))
    layer: Any = module.layer_idx
    options: dict[str, Any] = {"window": window, "chunk_len": chunk_len, "sinks": sinks}
    out = attend_step(step, layer, q, k, v, softmax_scale=scaling, softcap=softcap or 0.0, **options)
    missing = query.shape[2] - step.rows
    return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, missing)) if missing else out


def _is_tempered(module: nn.Module) -> bool:
    return bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", True)


def _temper(layer: Any, query: Tensor, positions: Tensor) -> Tensor:
    """Queries `b h s d` of a layer, tempered for their places `b s` or `1 s` (Note [Tempered queries])."""
    if positions.shape[1] != query.shape[2]:
        # a row for nobody
        return query
    counted = torch.arange(query.shape[2], device=query.device)
    wanted, was = (
        torch.log1p(torch.floor((place.float() + 1.0) / layer.floor_scale)) * layer.attn_scale + 1.0
        for place in (positions.to(query.device), counted)
    )
    return (query * (wanted / was)[:, None, :, None]).to(query.dtype)


def _resolve_window(
    mask: RingMask | None, causal: bool, sliding_window: int | None, *, packed: bool
) -> tuple[tuple[int, int] | None, int | None]:
    """(window, chunk_len) of what the layer and the mask function say."""
    size = None if mask is None else mask.local_size
    if size is not None and sliding_window is None and mask is not None and mask.chunked is not False:
        if mask.chunked is None:
            raise NotImplementedError(
                f"sliding_window and attention_chunk_size must differ in the config, got {size} for both, which leaves open what a "
                "layer means; use attn_implementation='sdpa'"
            )
        if packed:
            raise NotImplementedError(
                "chunked attention must go without packed documents, whose chunks would start over in each; unpack them"
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
) -> tuple[tuple[tuple[int, int], ...] | None, Tensor | None, Tensor | None]:
    """(lengths, key_bias `b s`, tokens `b s`): padding as lengths, or as a bias and the rows that are tokens."""
    if mask is None or mask.padding is None:
        return None, None, None
    if chunk_len is not None and mask.lengths is None:
        raise NotImplementedError("chunked attention must go without holes in attention_mask; pad on the right")
    if chunk_len is not None and any(start for start, _ in mask.lengths or ()):
        raise NotImplementedError(
            "chunked attention must go without padding on the left, where chunks would start later; pad on the right"
        )
    # lengths would be constants of compiled code, which would be compiled again for every batch
    if mask.lengths is not None and not torch.compiler.is_compiling():
        return mask.lengths, None, None
    tokens = sharding.shard(mask.padding, dim=1)
    key_bias = torch.zeros(tokens.shape, dtype=torch.float32, device=query.device).masked_fill(~tokens, float("-inf"))
    return None, key_bias, tokens
