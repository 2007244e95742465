"""Dropout of calls that are not given a seed: the seed, and the mask of columns that are no keys of a kernel.

Both are operators, so that torch.compile traces them without breaking the graph.

Note [Seeds]
    A seed is drawn from torch's default CPU generator, which activation checkpointing saves and restores. Ranks whose
    generators are in the same state draw the same seed, and then the mask is that of one process, at any world size. Where
    they differ, each rank drops weights of its own query rows by its own seed; the gradients are exact as long as keys move
    in the backward, because then the same rank computes a row's weights again. So keys move in the backward of a call with
    dropout, unless backward="queries". Calls that draw a seed pass backward="keys", and their seeds are not compared. Other
    calls must have the same seed on all ranks (Note [Call marks] of transport/call_order.py); with backward="queries" every
    new seed is compared before the call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringattn.kernels.attention.dropout import keep_mask

_LIBRARY = torch.library.Library("ringattn", "FRAGMENT")
_LIBRARY.define(
    "draw_seed(Tensor like) -> SymInt", tags=(torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag)
)
_LIBRARY.define(
    "kept_columns(Tensor positions, SymInt seed, SymInt batch, SymInt heads, SymInt first, SymInt columns, float p) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def draw_seed(like: Tensor) -> int:
    """Draw a dropout seed from torch's default CPU generator (Note [Seeds]); the compiler needs a tensor to see a device."""
    return torch.ops.ringattn.draw_seed.default(like)


def kept_columns(
    positions: Tensor, seed: int, batch: int, heads: int, first: int, columns: int, dropout_p: float
) -> Tensor:
    """Return the weights of some columns that dropout keeps, as the kernels decide it: bool `b h s c`.

    `positions` are those of the rows, `s`; `first` is the global index of the first column. Columns that are no keys come
    after all keys.
    """
    return torch.ops.ringattn.kept_columns.default(positions, seed, batch, heads, first, columns, dropout_p)


def _draw(like: Tensor) -> int:
    del like
    return int(torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device="cpu"))


def _fake_draw(like: Tensor) -> torch.SymInt:
    del like
    return torch.library.get_ctx().new_dynamic_size()


def _kept(positions: Tensor, seed: int, batch: int, heads: int, first: int, columns: int, p: float) -> Tensor:
    def axis(num: int, dim: int) -> Tensor:
        return torch.arange(num, device=positions.device).view([-1 if d == dim else 1 for d in range(4)])

    rows, keys = positions.view(1, 1, -1, 1), axis(columns, 3) + first
    return keep_mask(seed, axis(batch, 0), axis(heads, 1), rows, keys, heads, p)


def _fake_kept(positions: Tensor, seed: int, batch: int, heads: int, first: int, columns: int, p: float) -> Tensor:
    del seed, first, p
    return positions.new_empty(batch, heads, positions.shape[0], columns, dtype=torch.bool)


_LIBRARY.impl("draw_seed", _draw, "CompositeExplicitAutograd")
_LIBRARY.impl("kept_columns", _kept, "CompositeExplicitAutograd")
torch.library.register_fake("ringattn::draw_seed", _fake_draw, lib=_LIBRARY)
torch.library.register_fake("ringattn::kept_columns", _fake_kept, lib=_LIBRARY)
