"""Position ids: whether they match the sharding, which packed documents they describe, and RoPE scaling limits."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ringattn.integrations.transformers.masks import RingMask, read_boundaries
from ringattn.plan.sharding import Sharding, positions_in_documents, positions_of, shorten

_UNPADDED = RingMask()
_ORIGINAL = "original_max_position_embeddings"


def max_learned_positions(model: Any) -> int | None:
    """Return the length of a learned position embedding; None when the model has none.

    Beyond it a model raises IndexError on the rank that has the row. On a GPU that process cannot go on.
    """
    # Trainer takes any module; a config then belongs to a part, if there is one
    configs = (getattr(part, "config", None) for part in model.modules())
    config = next((one for one in configs if isinstance(one, PretrainedConfig)), None)
    most = None if config is None else getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    for name, part in model.named_modules():
        leaf = name.rpartition(".")[2]
        if most is not None and isinstance(part, nn.Embedding) and ("position" in leaf or leaf == "wpe"):
            # OPT and similar models have two more rows than positions; image towers have their own embeddings
            if 0 <= part.num_embeddings - most <= 2:
                return most if part.padding_idx is None else most - part.padding_idx - 1
    return None


class _LastRead:
    """Results for the last tensor that was read, by mask: reading values from a GPU makes the host wait.

    All layers of a forward, and their recomputation, pass the same tensor. Results are kept per mask, of which a forward makes one
    per kind of layer; masks without padding are equal. A tensor made in inference mode does not record writes, so its results
    serve one forward: layers that have the very same mask and whose numbers grow.
    """

    def __init__(self) -> None:
        self._tensor: weakref.ref[Tensor] | None = None
        self._version: float = -1
        self._results: weakref.WeakKeyDictionary[RingMask, Any] = weakref.WeakKeyDictionary()

    def of(
        self, tensor: Tensor, mask: RingMask | None, layer: int | None
    ) -> tuple[weakref.WeakKeyDictionary[RingMask, Any], RingMask]:
        """Return the results that are still valid for a tensor, to which new ones are added, and the key of a mask."""
        same = self._tensor is not None and self._tensor() is tensor
        if tensor.is_inference():
            now = math.inf if layer is None else layer
            same = same and self._version < now < math.inf
            # without a mask nothing identifies the forward: a result under a new key is dropped at once
            key = RingMask() if mask is None else mask
        else:
            now = tensor._version
            same = same and self._version == now
            key = _UNPADDED if mask is None or mask.padding is None else mask
        self._version = now
        if not same:
            self._tensor, self._results = weakref.ref(tensor), weakref.WeakKeyDictionary()
        return self._results, key


_checked = _LastRead()
_packed = _LastRead()


def check_positions(
    position_ids: Tensor,
    sharding: Sharding,
    mask: RingMask | None,
    layer: int | None = None,
    first_position: int = 0,
    rope_limits: tuple[tuple[str, int], ...] = (),
) -> None:
    """Raise when position ids `b s` or `1 s` are not those of this rank's rows; under torch.compile only shapes are checked.

    Positions may count from the start of the sequence, of each document, or of each row's first token after padding, or from
    `first_position`, the first of the model's own numbering. Positions of padding are not checked.
    """
    if position_ids.dim() != 2:
        raise NotImplementedError(
            f"position_ids must be 2-dimensional, batch x rows, got shape {tuple(position_ids.shape)}; "
            "several positions per token (images, video) are not supported"
        )
    if position_ids.shape[1] != sharding.shard_len:
        raise ValueError(
            f"position_ids must have this rank's {sharding.shard_len} rows of {sharding.seq_len}, got "
            f"{position_ids.shape[1]}; pass the batch through shard_batch"
        )
    if torch.compiler.is_compiling():
        return
    results, key = _checked.of(position_ids, mask, layer)
    found = results.get(key)
    if found is not None and found[0] is sharding and found[1:] == (first_position, rope_limits):
        return
    here = position_ids.detach().to("cpu", torch.int64)
    padding = None if mask is None else mask.padding
    if first_position and not _match(here, sharding, padding, first_position) and _match(here, sharding, padding):
        raise ValueError(
            f"position_ids must begin at {first_position} for this model (padding_idx + 1), got positions that count from 0; "
            "give the batch position_ids as the model makes them, and pass it through shard_batch"
        )
    if not _match(here, sharding, padding):
        raise ValueError(
            f"position_ids must be the global positions of this rank's rows, {shorten(sharding.positions)}, or count from the "
            f"start of their document or first token, got {shorten(here[0])} on rank {sharding.rank} of {sharding.world_size}; "
            "pass the whole batch through shard_batch"
        )
    if rope_limits:
        check_rope_scaling(rope_limits, rank_end_positions(sharding, int(here.max())))
    results[key] = sharding, first_position, rope_limits


def _match(here: Tensor, sharding: Sharding, padding: Tensor | None, first_position: int = 0) -> bool:
    positions = sharding.positions.cpu()
    bases = [positions]
    if sharding.documents is not None:
        bases.append(positions_in_documents(positions, sharding.documents))
    padding = torch.ones(1, sharding.seq_len, dtype=torch.bool, device="cpu") if padding is None else padding.cpu()
    begins, held = padding.int().argmax(-1), sharding.cut(padding, 1)
    for base in bases if len(positions) else ():
        offset, there = torch.broadcast_tensors(here - base, held)
        start = offset.gather(1, there.int().argmax(-1, keepdim=True))
        known = (start[:, 0] >= first_position) | (start[:, 0] == first_position - begins)
        if bool((~there | ((offset == start) & known[:, None])).all()):
            return True
    return not len(positions)


def read_documents(
    position_ids: Tensor, mask: RingMask | None = None, layer: int | None = None
) -> tuple[int, ...] | None:
    """Return the cumulative boundaries of documents, where positions `b n` do not go on by one; None for one document."""
    results, key = _packed.of(position_ids, mask, layer)
    if key in results:
        return results[key]
    results[key] = read_boundaries(position_ids.diff(dim=-1) != 1)
    return results[key]


def read_cumulative(cu_seq_lens_q: Tensor | None, cu_seq_lens_k: Tensor | None, seq_len: int) -> tuple[int, ...] | None:
    """Return the boundaries of documents given as cumulative lengths, which must be equal and span the sequence, if any."""
    if cu_seq_lens_q is None and cu_seq_lens_k is None:
        return None
    if cu_seq_lens_q is None or cu_seq_lens_k is None or not torch.equal(cu_seq_lens_q, cu_seq_lens_k):
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k must be equal, got different ones; pass the same documents")
    found = tuple(int(x) for x in cu_seq_lens_q.tolist())
    if len(found) < 2 or found[0] != 0 or found[-1] != seq_len:
        raise ValueError(
            f"cu_seq_lens must go from 0 to the {seq_len} tokens of the sequence, got {found}; "
            "pass the cumulative lengths of all documents"
        )
    return found


def rope_scaling_limits(config: Any) -> tuple[tuple[str, int], ...]:
    """Return (rope_type, length) for each kind of layer whose RoPE frequencies change beyond that length."""
    return tuple(_limits_of(_rope_scaling(config), config))


def use_long_factors(config: Any) -> Any:
    """Let a model with rope_type 'longrope' rotate sequences of every length by its long factors; return its config.

    transformers takes the short factors up to `original_max_position_embeddings`, and the long ones for calls beyond, so keys in
    a cache would be rotated by both. A model of this config takes the long ones always: beyond that length it computes what it
    computes without, and up to it other numbers. Change the config before the model is made.

    Args:
        config: Of a model; changed in place. Without 'longrope' nothing changes.

    Example:
        >>> config = AutoConfig.from_pretrained("microsoft/Phi-3-mini-128k-instruct")  # doctest: +SKIP
        >>> model = AutoModelForCausalLM.from_pretrained(name, config=use_long_factors(config))  # doctest: +SKIP
    """
    text = config.get_text_config(decoder=True)
    scaling, most = _rope_scaling(text), text.max_position_embeddings
    kinds = [kind for kind, one in scaling.items() if isinstance(one, dict)]
    for kind, one in [(kind, scaling[kind]) for kind in kinds] or [(None, scaling)]:
        if one.get("rope_type", one.get("type")) != "longrope":
            continue
        # by the ratio of the two lengths, which ends here
        layer = {} if kind is None else {"layer_type": kind}
        one["attention_factor"] = ROPE_INIT_FUNCTIONS["longrope"](text, torch.device("cpu"), **layer)[1]
        one["short_factor"] = list(one["long_factor"])
        for owner in (one, vars(text)):
            if owner.get(_ORIGINAL) is not None:
                owner[_ORIGINAL] = most
    return config


def has_sections(config: Any) -> bool:
    """Return whether a model has several positions per token (M-RoPE), for text, time, height and width."""
    return "mrope_section" in _rope_scaling(config)


def _rope_scaling(config: Any) -> dict[str, Any]:
    scaling = getattr(config, "rope_parameters", None)  # of 5.x
    scaling = getattr(config, "rope_scaling", None) if scaling is None else scaling
    return scaling if isinstance(scaling, dict) else {}


def _limits_of(scaling: dict[str, Any], config: Any) -> Iterator[tuple[str, int]]:
    for per_layer_kind in scaling.values():
        if isinstance(per_layer_kind, dict):
            yield from _limits_of(per_layer_kind, config)
    kind = scaling.get("rope_type", scaling.get("type")) or ""
    if kind == "longrope" and scaling.get("short_factor") != scaling.get("long_factor"):
        of_config = getattr(config, _ORIGINAL, None)
        yield kind, scaling.get(_ORIGINAL) or of_config or config.max_position_embeddings
    elif "dynamic" in kind:
        yield kind, config.max_position_embeddings


def rank_end_positions(sharding: Sharding, last: int | None = None) -> list[int]:
    """Return one past the last position of each rank that has rows.

    `last`, the last position of this rank, shows where positions count from; None: from the start of each document.
    """
    mine = sharding.rank
    in_sequence = [max([0, *[run.last + 1 for run in shard]]) for shard in sharding.shards]
    found = [ends for ends in (_ends_in_documents(sharding), in_sequence) if ends is not None]
    chosen = found[0] if last is None else next((ends for ends in found if ends[mine] == last + 1), found[-1])
    shift = 0 if last is None else last + 1 - chosen[mine]
    return [end + shift for end in chosen if end]


def _ends_in_documents(sharding: Sharding) -> list[int] | None:
    if sharding.documents is None:
        return None
    if torch.compiler.is_compiling():
        # positions cannot be read: any rank may hold the end of the longest document, or none
        lengths = [stop - start for start, stop in zip(sharding.documents[:-1], sharding.documents[1:], strict=True)]
        return [max(lengths)] + [1] * (len(sharding.shards) - 1)
    inside = (positions_in_documents(positions_of(shard), sharding.documents) for shard in sharding.shards)
    return [int(positions.max()) + 1 if len(positions) else 0 for positions in inside]


def check_rope_scaling(rope_limits: Iterable[tuple[str, int]], ends: Iterable[int]) -> None:
    """Raise when ranks or requests of one call would rotate with frequencies that one process would not use.

    Models with rope_type 'longrope' or 'dynamic' choose frequencies by the last position of a call, which for a rank is that of
    its own rows. 'longrope' has one set of frequencies up to a length and another one beyond it, so all `ends` must be on the same
    side; those of 'dynamic' depend on the exact length beyond the trained one.
    """
    lengths = sorted(set(ends))
    for kind, limit in rope_limits:
        if len(lengths) < 2 or lengths[-1] <= limit or (kind == "longrope" and lengths[0] > limit):
            continue
        instead = "" if kind != "longrope" else f", or longer ones, of which all have positions beyond {limit}"
        raise NotImplementedError(
            f"rows of all ranks and requests must end by position {limit} where rope_type is {kind!r}, whose frequencies depend on "
            f"the last position of a call, got some that end at {lengths[0]} and at {lengths[-1]}; use shorter "
            f"sequences{instead}, or one process and one request at a time"
        )
