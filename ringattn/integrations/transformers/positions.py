"""Whether positions that reach attention are those of the sharding, and which documents they tell of.

Owns reading position ids. Refuses to correct them.

Note [Read once]
    Reading values from a GPU makes the host wait, so what was found of a tensor is kept as long as the tensor lives: all layers
    of a forward, and their recomputation, pass the same one. A tensor made in inference mode does not say that it was written
    to, so it is read every time. Under `torch.compile` values cannot be read: shapes are checked.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ringattn.integrations.transformers.masks import RingMask
from ringattn.sharding import Sharding


class _Last:
    """What was found last, for one tensor and one other thing."""

    def __init__(self) -> None:
        self._tensor: weakref.ref[Tensor] | None = None
        self._about: Any = None
        self._version = -1
        self.found: Any = None

    def knows(self, tensor: Tensor, about: Any) -> bool:
        same = self._tensor is not None and self._tensor() is tensor and self._about is about
        return same and self._version == tensor._version

    def keep(self, tensor: Tensor, about: Any, found: Any) -> None:
        if not tensor.is_inference():
            self._tensor, self._about, self.found = weakref.ref(tensor), about, found
            self._version = tensor._version


_checked = _Last()
_packed = _Last()


def check_positions(position_ids: Tensor, sharding: Sharding, mask: RingMask | None) -> None:
    """Refuses position ids that are not those of this rank's rows.

    They may count from the start of the sequence, of each document, or of each row's first token after padding; counts that start
    above 0, as some encoders number, are right too. Positions of padding are not looked at.

    Args:
        position_ids: `b s` or `1 s`.
        sharding: Who holds which positions.
        mask: Tells where padding is.

    Raises:
        ValueError: They are not.
        NotImplementedError: They have several dimensions per token.
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
    if torch.compiler.is_compiling() or _checked.knows(position_ids, sharding):
        return
    here = position_ids.detach().to("cpu", torch.int64)
    if not _fit(here, sharding, None if mask is None else mask.padding):
        raise ValueError(
            f"position_ids must be the global positions of this rank's rows, {_ends(sharding.positions)}, or count from the "
            f"start of their document or first token, got {_ends(here[0])} on rank {sharding.rank} of {sharding.world_size}; "
            "pass the whole batch through shard_batch (a model that is given none numbers the rows of a shard from 0)"
        )
    _checked.keep(position_ids, sharding, None)


def _fit(here: Tensor, sharding: Sharding, padding: Tensor | None) -> bool:
    positions = sharding.positions.cpu()
    bases = [positions]
    if sharding.documents is not None:
        edges = torch.tensor(sharding.documents)
        bases.append(positions - edges[torch.searchsorted(edges, positions, right=True) - 1])
    begins = torch.zeros(1, dtype=torch.int64)
    held = torch.ones(1, len(positions), dtype=torch.bool)
    if padding is not None:
        padding = padding.cpu()
        begins = padding.int().argmax(-1)
        held = sharding.shard(padding, dim=1)
        if here.shape[0] == 1:
            here = here.expand(held.shape[0], -1)
    far = torch.iinfo(torch.int64).max
    for base in bases:
        offset = here - base
        least = offset.masked_fill(~held, far).amin(-1) if len(positions) else torch.zeros(1)
        most = offset.masked_fill(~held, -far).amax(-1) if len(positions) else torch.zeros(1)
        empty = ~held.any(-1)
        if bool((empty | ((least == most) & ((least >= 0) | (least == -begins)))).all()):
            return True
    return False


def _ends(positions: Tensor) -> str:
    shown = positions.tolist()
    return str(shown) if len(shown) <= 6 else f"[{', '.join(map(str, shown[:4]))}, ..., {shown[-1]}]"


def read_documents(position_ids: Tensor) -> tuple[int, ...] | None:
    """The cumulative boundaries of documents, where positions do not go on by one; None for one document.

    Args:
        position_ids: `b n`, of the whole sequence.

    Raises:
        NotImplementedError: Batch elements have different documents.
    """
    if _packed.knows(position_ids, None):
        return _packed.found
    starts = position_ids.diff(dim=-1) != 1
    if bool((starts != starts[:1]).any()):
        raise NotImplementedError(
            f"documents must be the same in each of {len(starts)} batch elements, got position_ids that restart at different "
            "places; pack all documents into one row, as DataCollatorWithFlattening does"
        )
    inner = (starts[0].nonzero()[:, 0] + 1).tolist()
    found = (0, *inner, position_ids.shape[1]) if inner else None
    _packed.keep(position_ids, None, found)
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
