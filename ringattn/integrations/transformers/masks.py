"""The mask function of transformers, which returns a description instead of a tensor.

It makes no mask tensor, because transformers numbers the rows of a shard 0, 1, 2, ..., so its masks of them would be wrong.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor

_UNTOUCHED = "a model must pass its mask to transformers' attention interface unchanged"
_INSTEAD = "it computes attention itself: use attn_implementation='eager' or 'sdpa' for this model"


@dataclass(frozen=True, eq=False)
class RingMask:
    """Description of a mask; one per forward and kind of layer, shared by the layers.

    Attributes:
        padding: `b n` bool, True where there is a token, for the whole sequence; None when nothing is padded.
        lengths: (start, stop) of the tokens of each batch element; None without padding, when padding has holes, and under
            `torch.compile`, where values must not be read.
        given: Whether the model was given an attention mask; restarting positions then do not mean packing in transformers.
        causal: Whether rows see earlier ones only; None when unknown.
        window: Tokens to each side that a row sees in a bidirectional window; None when unknown.
        local_size: Size of a sliding window or of chunks, in tokens; None for neither.
        chunked: Whether local_size is that of chunks; None when the config allows both.
        spans: (start, stop) of the spans of each batch element that see all of themselves besides, as images; None for none.
        span_tokens: Tokens of the sequence in which spans lie.
        cut_spans: Whether the window hides what a span would show further back.
        packed: `b n`, the number of each row's document, where transformers found packed ones; that of a shard means nothing.
        overlay: Part that the model added to the mask, for a message; empty for none.
    """

    padding: Tensor | None = None
    lengths: tuple[tuple[int, int], ...] | None = None
    given: bool = False
    causal: bool | None = None
    window: int | None = None
    local_size: int | None = None
    chunked: bool | None = False
    spans: tuple[tuple[tuple[int, int], ...], ...] | None = None
    span_tokens: int = 0
    cut_spans: bool = False
    packed: Tensor | None = None
    overlay: str = ""

    @cached_property
    def documents(self) -> tuple[int, ...] | None:
        """Cumulative boundaries of packed documents; None for one document."""
        return None if self.packed is None else read_boundaries(self.packed.diff(dim=-1) != 0)

    def __getattr__(self, name: str) -> NoReturn:
        """Raise: the model computes attention itself, with a mask tensor."""
        raise AttributeError(f"{_UNTOUCHED}, got one that reads its {name!r}; {_INSTEAD}")

    def __getitem__(self, index: Any) -> NoReturn:
        """Raise: the model slices the mask."""
        raise NotImplementedError(f"{_UNTOUCHED}, got one that takes a part of it; {_INSTEAD}")

    def __radd__(self, scores: Any) -> NoReturn:
        """Raise: the model adds the mask to scores."""
        raise NotImplementedError(f"{_UNTOUCHED}, got one that adds it to scores; {_INSTEAD}")


def describe_mask(
    batch_size: int,
    *,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    config: Any = None,
    **others: Any,
) -> RingMask:
    """Describe a mask: the mask function of the name "ringattn".

    Args:
        batch_size: Batch elements.
        mask_function: transformers' function of (batch, head, query, key) indices of this rank's rows.
        attention_mask: `b n`, true where there is a token, for the whole sequence.
        local_size: Size of a sliding window or of chunks, in tokens.
        config: The model's config.
        others: Sizes and offsets, which must be those of a call without a cache, and hints for other implementations.

    Raises:
        NotImplementedError: The mask has a form that is not supported, or there are keys of a cache of transformers.
    """
    if attention_mask is not None and attention_mask.dim() != 2:
        raise NotImplementedError(
            f"attention_mask must be 2-dimensional, batch x whole sequence, got shape {tuple(attention_mask.shape)}; "
            "ringattn makes causal, window and padding masks itself"
        )
    _refuse_caches(attention_mask, others)
    padding, lengths = _read_padding(attention_mask)
    window = spans = packed = cutting = None
    span_tokens = 0
    if "allow_is_bidirectional_skip" in others:
        causal, overlay = False, "a mask of its own over a bidirectional one" if others.get("use_vmap") else ""
        window = None if overlay else _reach(mask_function, local_size)
    else:
        if not torch.compiler.is_compiling():
            mask_function, spans, span_tokens, cutting = _read_spans(mask_function)
            mask_function, packed = _read_packed(mask_function)
            local_size = local_size or cutting
        causal, overlay = _read_order(mask_function, batch_size, others)
    chunk = getattr(config, "attention_chunk_size", None)
    chunked: bool | None = local_size is not None and chunk == local_size
    if chunked and getattr(config, "sliding_window", None) == local_size:
        chunked = None
    given, cut_spans = attention_mask is not None, cutting is not None
    return RingMask(
        padding, lengths, given, causal, window, local_size, chunked, spans, span_tokens, cut_spans, packed, overlay
    )


def _refuse_caches(attention_mask: Tensor | None, others: dict[str, Any]) -> None:
    """Raise when there are keys of a cache of transformers; a RingCache, and calls without a cache, have new tokens only."""
    keys, where = others.get("kv_length"), others.get("cache_position")
    rows = others.get("q_length", None if where is None else where.shape[0])
    if torch.compiler.is_compiling() or not isinstance(keys, int) or rows is None:
        return
    # a shard goes with the mask of the whole sequence
    if keys != rows and (attention_mask is None or keys != attention_mask.shape[-1]):
        raise NotImplementedError(
            f"queries and keys must be of the same rows, got {int(rows)} and {keys}: decoding with a cache of transformers is not "
            "supported; generate with a RingCache, or use model.set_attn_implementation('sdpa')"
        )


def _read_padding(attention_mask: Tensor | None) -> tuple[Tensor | None, tuple[tuple[int, int], ...] | None]:
    """Return the mask as bool, None without padding, and the (start, stop) of each row's tokens; None if a row has a hole."""
    if attention_mask is None:
        return None, None
    padding = attention_mask.to(torch.bool)
    if torch.compiler.is_compiling():
        return padding, None
    first = padding.int().argmax(-1)
    end = padding.shape[-1] - padding.flip(-1).int().argmax(-1)
    rows = torch.stack([first, end, padding.sum(-1)], -1).tolist()
    if any(count and stop - start != count for start, stop, count in rows):
        return padding, None
    lengths = tuple((start, stop) if count else (0, 0) for start, stop, count in rows)
    is_whole = all(span == (0, padding.shape[1]) for span in lengths)
    return (None, None) if is_whole else (padding, lengths)


def _read_spans(
    mask_function: Callable[..., Any] | None,
) -> tuple[Callable[..., Any] | None, tuple[tuple[tuple[int, int], ...], ...] | None, int, int | None]:
    """Return a mask function without blocks that see all of themselves, their spans, the tokens, and the window that cuts them.

    transformers' overlay is recognised by name, as in `_is_composed_by_transformers`: `inside | blocks`, and
    `(causal | blocks) & window`, where the window cuts the blocks. Blocks of which one is in two places are left to it.
    """
    left_to_it = mask_function, None, 0, None
    parts, cutting = _parts(mask_function, "and_masks"), None
    if len(parts) == 2 and _is_named(parts[1], "sliding_window_overlay"):
        mask_function, cutting = parts[0], _closure(parts[1])["sliding_window"]
    parts = _parts(mask_function, "or_masks")
    if len(parts) != 2 or not _is_named(parts[1], "blockwise_overlay"):
        return left_to_it
    blocks: Tensor = _closure(parts[1])["block_sequence_ids"].cpu()
    found = []
    for row in blocks.tolist():
        edges = [0, *(i for i in range(1, len(row)) if row[i] != row[i - 1]), len(row)]
        spans = [(row[a], a, b) for a, b in pairwise(edges) if a < b and row[a] >= 0]
        if len({name for name, _, _ in spans}) < len(spans):
            return left_to_it
        found.append(tuple((a, b) for _, a, b in spans))
    return parts[0], tuple(found) if any(found) else None, blocks.shape[-1], cutting


def _read_packed(mask_function: Callable[..., Any] | None) -> tuple[Callable[..., Any] | None, Tensor | None]:
    """Return a mask function without the part that hides other packed documents, and the document of each row.

    It is `function & packed` in 4.57, and `packed & function of positions` in 5.x.
    """
    parts = _parts(mask_function, "and_masks")
    hides = [_is_named(part, "packed_sequence_mask_function") for part in parts]
    if len(parts) != 2 or sum(hides) != 1:
        return mask_function, None
    packed, function = (parts[hides.index(side)] for side in (True, False))
    if _is_named(function, "remap_positions_for_packed_sequence"):
        function = _closure(function)["mask_function"]
    return function, _closure(packed)["packed_sequence_mask"]


def read_boundaries(starts: Tensor) -> tuple[int, ...] | None:
    """Return the cumulative boundaries of documents, where `b (n - 1)` says which rows begin one; None for one document.

    Raises:
        NotImplementedError: Batch elements have different documents.
    """
    if bool((starts != starts[:1]).any()):
        raise NotImplementedError(
            f"documents must be the same in each of {len(starts)} batch elements, got some that begin at different places; "
            "pack all documents into one row, as DataCollatorWithFlattening does"
        )
    inner = (starts[0].nonzero()[:, 0] + 1).tolist()
    return (0, *inner, starts.shape[1] + 1) if inner else None


def _closure(function: Any) -> Mapping[str, Any]:
    return inspect.getclosurevars(function).nonlocals


def _parts(mask_function: Callable[..., Any] | None, name: str) -> tuple[Callable[..., Any], ...]:
    """Return the functions of which one of transformers' makers composed a mask function; none of another."""
    return _closure(mask_function).get("mask_functions", ()) if _is_named(mask_function, name) else ()


def _is_named(function: Any, *names: str) -> bool:
    """Return whether a function is one of transformers' mask functions, or made by one of their makers."""
    is_theirs = getattr(function, "__module__", None) == "transformers.masking_utils"
    return is_theirs and function.__qualname__.partition(".")[0] in names


def _read_order(
    mask_function: Callable[..., Any] | None, batch_size: int, others: dict[str, Any]
) -> tuple[bool | None, str]:
    """Return whether a mask without packing is causal, and what the model added to it.

    Models compose mask functions of causal, window and chunk parts, and some add parts of their own (blocks of image tokens that
    see each other). Functions that transformers composed of its own parts are recognised by name, which works while a CUDA graph
    is captured. Others are evaluated at neighbouring rows: a causal mask hides the next row, blocks show it.
    """
    added = "a mask of its own over a causal one" if others.get("use_vmap") else ""
    if torch.compiler.is_compiling():
        # values must not be read
        return None if added else True, added
    if _is_composed_by_transformers(mask_function):
        return True, ""
    where = others.get("cache_position")
    device = others.get("device", "cpu") if where is None else where.device
    rows = int(others["q_length"]) if "q_length" in others else 0 if where is None else int(where.shape[0])
    if mask_function is None or rows < 2:
        return None, added
    if _is_captured(torch.device(device)):
        return None, "a mask of its own, which cannot be read while a CUDA graph is captured"
    element = torch.arange(batch_size, device=device)[:, None]
    head = torch.zeros((), dtype=torch.long, device=device)
    before = torch.arange(rows - 1, device=device)
    ahead = torch.as_tensor(mask_function(element, head, before, before + 1), device=device)
    back = torch.as_tensor(mask_function(element, head, before + 1, before), device=device)
    ahead, back = torch.broadcast_tensors(ahead, back)
    sees_ahead, symmetric = torch.stack([ahead.any(), (ahead == back).all()]).tolist()
    if sees_ahead:
        return False, "" if symmetric else "blocks of tokens that see each other over a causal mask"
    return None if added else True, added


def _is_composed_by_transformers(mask_function: Callable[..., Any] | None) -> bool:
    """Return whether a function is transformers' causal one, with or without a window or chunks."""
    parts = _parts(mask_function, "and_masks")
    windowed = len(parts) == 2 and _is_named(parts[0], "sliding_window_overlay", "chunked_overlay")
    return _is_named(mask_function, "causal_mask_function") or (windowed and _is_composed_by_transformers(parts[1]))


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _reach(mask_function: Callable[..., Any] | None, local_size: int | None) -> int | None:
    """Return the tokens to each side that a bidirectional window shows; models differ in whether its size counts the last one."""
    if local_size is None or mask_function is None or torch.compiler.is_compiling():
        return None
    zero = torch.zeros((), dtype=torch.long, device="cpu")
    return local_size if bool(mask_function(zero, zero, zero + local_size, zero)) else local_size - 1
