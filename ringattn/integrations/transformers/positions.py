"""Whether positions that reach attention are those of the sharding, and which documents they tell of.

Owns reading position ids. Refuses to correct them.

Note [Read once]
    Reading values from a GPU makes the host wait, so what was found of a tensor is kept as long as the tensor lives: all layers
    of a forward, and their recomputation, pass the same one. It is kept by mask, of which a forward makes one per kind of layer;
    those without padding are alike. A tensor made in inference mode does not say that it was written to, so what was found of it
    serves one forward: layers that have the very same mask and whose numbers grow. Under `torch.compile` values cannot be read:
    shapes are checked.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from ringattn.integrations.transformers.masks import RingMask
from ringattn.integrations.transformers.rotations import check_rotation, find_ends
from ringattn.plan.sharding import Sharding

_UNPADDED = RingMask()


def find_table(model: Any) -> int | None:
    """Positions that a model can count where it learned an embedding of each; None: there is no such table.

    Beyond it a model raises IndexError, on the rank that has the row; on a GPU its process can do nothing more then.
    """
    # Trainer takes any module, and a config is then that of a part, if there is one
    configs = (getattr(part, "config", None) for part in model.modules())
    config = next((one for one in configs if isinstance(one, PretrainedConfig)), None)
    most = None if config is None else getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    for name, part in model.named_modules():
        leaf = name.rpartition(".")[2]
        if most is not None and isinstance(part, nn.Embedding) and ("position" in leaf or leaf == "wpe"):
            # OPT and its kin have two rows more than they count; towers for images have tables of their own
            if 0 <= part.num_embeddings - most <= 2:
                return most if part.padding_idx is None else most - part.padding_idx - 1
    return None


class _Last:
    """What was found of the last tensor, by mask (Note [Read once])."""

    def __init__(self) -> None:
        self._tensor: weakref.ref[Tensor] | None = None
        self._seen: float = -1
        self._found: weakref.WeakKeyDictionary[RingMask, Any] = weakref.WeakKeyDictionary()

    def of(self, tensor: Tensor, layer: int | None) -> weakref.WeakKeyDictionary[RingMask, Any]:
        """What is still true of a tensor; what is found now is added to it."""
        same = self._tensor is not None and self._tensor() is tensor
        if tensor.is_inference():
            now = math.inf if layer is None else layer
            same = same and self._seen < now < math.inf
        else:
            now = tensor._version
            same = same and self._seen == now
        self._seen = now
        if not same:
            self._tensor, self._found = weakref.ref(tensor), weakref.WeakKeyDictionary()
        return self._found


_checked = _Last()
_packed = _Last()


def _key(tensor: Tensor, mask: RingMask | None) -> RingMask:
    if tensor.is_inference():
        # without a mask nobody says which forward this is: what is kept by a new one is gone at once
        return RingMask() if mask is None else mask
    return _UNPADDED if mask is None or mask.padding is None else mask


def check_positions(
    position_ids: Tensor,
    sharding: Sharding,
    mask: RingMask | None,
    layer: int | None = None,
    begin: int = 0,
    turns: tuple[tuple[str, int], ...] = (),
) -> None:
    """Refuses position ids that are not those of this rank's rows.

    They may count from the start of the sequence, of each document, or of each row's first token after padding; counts that start
    above 0, as some encoders number, are right too. Positions of padding are not looked at.

    Args:
        position_ids: `b s` or `1 s`.
        sharding: Who holds which positions.
        mask: Tells where padding is.
        layer: The number of the layer that asks; None when it has none.
        begin: Where the model counts from.
        turns: Where its rotary embeddings take other frequencies (`rotations.find_turns`).

    Raises:
        ValueError: They are not.
        NotImplementedError: They have several dimensions per token, or ranks would rotate by different frequencies.
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
    known, key = _checked.of(position_ids, layer), _key(position_ids, mask)
    found = known.get(key)
    if found is not None and found[0] is sharding and found[1:] == (begin, turns):
        return
    here = position_ids.detach().to("cpu", torch.int64)
    padding = None if mask is None else mask.padding
    if begin and not _fit(here, sharding, padding, begin) and _fit(here, sharding, padding):
        raise ValueError(
            f"position_ids must begin at {begin} for this model (padding_idx + 1), got positions that count from 0; give the batch "
            "position_ids as the model makes them, and pass it through shard_batch"
        )
    if not _fit(here, sharding, padding):
        raise ValueError(
            f"position_ids must be the global positions of this rank's rows, {_ends(sharding.positions)}, or count from the "
            f"start of their document or first token, got {_ends(here[0])} on rank {sharding.rank} of {sharding.world_size}; "
            "pass the whole batch through shard_batch (a model that is given none numbers the rows of a shard from 0)"
        )
    if turns:
        check_rotation(turns, find_ends(sharding, int(here.max())))
    known[key] = sharding, begin, turns


def _fit(here: Tensor, sharding: Sharding, padding: Tensor | None, begin: int = 0) -> bool:
    positions = sharding.positions.cpu()
    bases = [positions]
    if sharding.documents is not None:
        edges = torch.tensor(sharding.documents, device="cpu")
        bases.append(positions - edges[torch.searchsorted(edges, positions, right=True) - 1])
    begins = torch.zeros(1, dtype=torch.int64, device="cpu")
    held = torch.ones(1, len(positions), dtype=torch.bool, device="cpu")
    if padding is not None:
        padding = padding.cpu()
        begins = padding.int().argmax(-1)
        held = sharding.shard(padding, dim=1)
        if here.shape[0] == 1:
            here = here.expand(held.shape[0], -1)
    far = torch.iinfo(torch.int64).max
    for base in bases:
        offset = here - base
        least = offset.masked_fill(~held, far).amin(-1) if len(positions) else torch.zeros(1, device="cpu")
        most = offset.masked_fill(~held, -far).amax(-1) if len(positions) else torch.zeros(1, device="cpu")
        empty = ~held.any(-1)
        if bool((empty | ((least == most) & ((least >= begin) | (least == begin - begins)))).all()):
            return True
    return False


def _ends(positions: Tensor) -> str:
    shown = positions.tolist()
    return str(shown) if len(shown) <= 6 else f"[{', '.join(map(str, shown[:4]))}, ..., {shown[-1]}]"


def read_documents(
    position_ids: Tensor, mask: RingMask | None = None, layer: int | None = None
) -> tuple[int, ...] | None:
    """The cumulative boundaries of documents, where positions do not go on by one; None for one document.

    Args:
        position_ids: `b n`, of the whole sequence.
        mask: The layer's.
        layer: The number of the layer that asks; None when it has none.

    Raises:
        NotImplementedError: Batch elements have different documents.
    """
    known, key = _packed.of(position_ids, layer), _key(position_ids, mask)
    if key in known:
        return known[key]
    starts = position_ids.diff(dim=-1) != 1
    if bool((starts != starts[:1]).any()):
        raise NotImplementedError(
            f"documents must be the same in each of {len(starts)} batch elements, got position_ids that restart at different "
            "places; pack all documents into one row, as DataCollatorWithFlattening does"
        )
    inner = (starts[0].nonzero()[:, 0] + 1).tolist()
    found = (0, *inner, position_ids.shape[1]) if inner else None
    known[key] = found
    return found


def read_cumulative(cu_seq_lens: Tensor, seq_len: int) -> tuple[int, ...]:
    """The documents that cumulative lengths tell of.

    Raises:
        ValueError: They do not bound the sequence.
    """
    found = tuple(int(x) for x in cu_seq_lens.tolist())
    if len(found) < 2 or found[0] != 0 or found[-1] != seq_len:
        raise ValueError(
            f"cu_seq_lens must go from 0 to the {seq_len} tokens of the sequence, got {found}; "
            "pass the cumulative lengths of all documents"
        )
    return found
