"""What transformers would have drawn a mask of, as a few words.

Owns the mask function of the name "ringattn" and the record it returns, which transformers hands to attention untouched. Refuses
to draw a mask: transformers numbers the rows of a shard 0, 1, 2, ..., so what it draws of them would be wrong.

Note [Probing a mask function]
    Models compose mask functions of causal, window, chunk and packing parts, and some add parts of their own (blocks of image
    tokens that see each other). A composed function does not say what it is made of. Asked about neighbours it shows whether
    any row sees the one after it: no causal part lets it, and blocks do. transformers itself does not tell a shard from packed
    documents, and may hide any two rows from each other that are not neighbours in the sequence; so a pair that is hidden
    says nothing, and a pair that is visible says something.

Note [Parts by name]
    An answer is a value on the device, and waiting for it is an error while a CUDA graph is captured; a graph that is replayed
    would not ask again either. So a function that transformers made of its own causal part, windows and chunks is known by
    the names of its parts, which say all there is to say and are the same in every replay. Only others are asked, in every
    forward; a forward that is captured refuses them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

_UNTOUCHED = "a model must hand its mask to transformers' attention interface untouched"
_INSTEAD = "it computes attention itself: use attn_implementation='eager' or 'sdpa' for this model"


@dataclass(frozen=True, eq=False)
class RingMask:
    """A mask in words; one per forward and kind of layer, shared by the layers.

    Attributes:
        padding: `b n` bool, True where there is a token, for the whole sequence; None when nothing is padded.
        lengths: (start, stop) of the tokens of each batch element; None without padding, when padding has holes, and under
            `torch.compile`, where values must not be read.
        given: Whether the model was given an attention mask; transformers then takes restarting positions for no sign of packing.
        causal: Whether rows see earlier ones only; None when the function does not say.
        window: What a row reaches in a bidirectional window, in tokens to each side; None when the function does not say.
        local_size: Of a sliding window or of chunks, in tokens; None for neither.
        chunked: Whether local_size is that of chunks; None when the config says both.
        overlay: What the model added to the mask, in words for a message; empty for nothing.
    """

    padding: Tensor | None = None
    lengths: tuple[tuple[int, int], ...] | None = None
    given: bool = False
    causal: bool | None = None
    window: int | None = None
    local_size: int | None = None
    chunked: bool | None = False
    overlay: str = ""

    def __getattr__(self, name: str) -> NoReturn:
        """Refused: a model that asks for more computes attention itself, with what it takes for a tensor."""
        raise AttributeError(f"{_UNTOUCHED}, got one that reads its {name!r}; {_INSTEAD}")

    def __getitem__(self, index: Any) -> NoReturn:
        """Refused likewise."""
        raise NotImplementedError(f"{_UNTOUCHED}, got one that takes a part of it; {_INSTEAD}")

    def __radd__(self, scores: Any) -> NoReturn:
        """Refused likewise."""
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
    """The mask function of the name "ringattn": describes instead of drawing.

    Args:
        batch_size: Batch elements.
        mask_function: transformers' function of (batch, head, query, key) indices of this rank's rows.
        attention_mask: `b n`, true where there is a token, for the whole sequence.
        local_size: Of a sliding window or of chunks, in tokens.
        config: The model's.
        others: Sizes and offsets, which must be those of a call without a cache, and hints for other implementations.

    Returns:
        The description.

    Raises:
        NotImplementedError: The mask has a form that is not supported; the message says which.
    """
    if attention_mask is not None and attention_mask.dim() != 2:
        raise NotImplementedError(
            f"attention_mask must be 2-dimensional, batch x whole sequence, got shape {tuple(attention_mask.shape)}; "
            "ringattn draws causal, window and padding masks itself"
        )
    _refuse_caches(attention_mask, others)
    bidirectional = "allow_is_bidirectional_skip" in others
    padding, lengths = _read_padding(attention_mask)
    causal, overlay = (False, "") if bidirectional else (None, "")
    window = None
    if bool(others.get("use_vmap")) and bidirectional:
        overlay = "a mask of its own over a bidirectional one"
    elif bidirectional:
        window = _reach(mask_function, local_size)
    else:
        causal, overlay = _read_order(mask_function, batch_size, attention_mask, others)
    chunk = getattr(config, "attention_chunk_size", None)
    chunked: bool | None = local_size is not None and chunk == local_size
    if chunked and getattr(config, "sliding_window", None) == local_size:
        chunked = None
    return RingMask(padding, lengths, attention_mask is not None, causal, window, local_size, chunked, overlay)


def _refuse_caches(attention_mask: Tensor | None, others: dict[str, Any]) -> None:
    """Refuses keys that a cache of transformers made room for; a RingCache, and calls without a cache, speak of new tokens only."""
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
    if attention_mask is None:
        return None, None
    padding = attention_mask.to(torch.bool)
    if torch.compiler.is_compiling():
        return padding, None
    lengths = _stretches(padding)
    whole = (0, padding.shape[1])
    if lengths is not None and all(stretch == whole for stretch in lengths):
        return None, None
    return padding, lengths


def _stretches(padding: Tensor) -> tuple[tuple[int, int], ...] | None:
    """The (start, stop) of the tokens of each row; None when a row has a hole."""
    count = padding.sum(-1)
    first = padding.int().argmax(-1)
    end = padding.shape[-1] - padding.flip(-1).int().argmax(-1)
    rows = torch.stack([first, end, count], -1).tolist()
    if any(count and stop - start != count for start, stop, count in rows):
        return None
    return tuple((start, stop) if count else (0, 0) for start, stop, count in rows)


def _read_order(
    mask_function: Callable[..., Any] | None, batch_size: int, attention_mask: Tensor | None, others: dict[str, Any]
) -> tuple[bool | None, str]:
    """Whether a mask that started causal still is, and what was added to it (Note [Probing a mask function])."""
    added = bool(others.get("use_vmap"))
    if mask_function is not None and not torch.compiler.is_compiling() and _is_plain(mask_function):
        return True, ""
    if torch.compiler.is_compiling():
        # values must not be read
        return (None, "a mask of its own over a causal one") if added else (True, "")
    where = others.get("cache_position")
    device = others.get("device", "cpu") if where is None else where.device
    rows = int(others["q_length"]) if "q_length" in others else 0 if where is None else int(where.shape[0])
    if mask_function is None or rows < 2:
        return None, "a mask of its own over a causal one" if added else ""
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
    if added:
        return None, "a mask of its own over a causal one"
    # with an attention mask nothing was taken for packing, so neighbours were not hidden
    return (True if attention_mask is not None or "use_vmap" in others else None), ""


def _is_plain(mask_function: Callable[..., Any]) -> bool:
    """Whether a function is transformers' causal one, in a window or in chunks or not (Note [Parts by name])."""
    if getattr(mask_function, "__module__", None) != "transformers.masking_utils":
        return False
    name = mask_function.__qualname__.partition(".")[0]
    if name != "and_masks":
        return name == "causal_mask_function"
    window, *rest = inspect.getclosurevars(mask_function).nonlocals.get("mask_functions", (None,))
    maker = getattr(window, "__qualname__", "").partition(".")[0]
    own = getattr(window, "__module__", None) == "transformers.masking_utils"
    return own and maker in ("sliding_window_overlay", "chunked_overlay") and len(rest) == 1 and _is_plain(rest[0])


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _reach(mask_function: Callable[..., Any] | None, local_size: int | None) -> int | None:
    """How far a row of a bidirectional window sees; models disagree whether its size counts the last one."""
    if local_size is None or mask_function is None or torch.compiler.is_compiling():
        return None
    zero = torch.zeros((), dtype=torch.long, device="cpu")
    return local_size if bool(mask_function(zero, zero, zero + local_size, zero)) else local_size - 1
