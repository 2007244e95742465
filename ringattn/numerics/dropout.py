"""Dropout of calls that are not given a seed: where the seed comes from, and the mask of columns that no kernel sees.

Owns two operators, so that torch.compile traces both without breaking the graph. Refuses to know attention.

Note [Seeds]
    A seed is drawn from torch's default CPU generator, which activation checkpointing saves and restores: what is recomputed
    draws the same one. Ranks whose generators are in the same state draw the same seed, and then the mask is that of one
    process, at any world size. Where they differ, each rank drops weights of its own query rows by its own seed: an honest
    mask too, and the gradients are exact as long as keys move in the backward, because then a row's weights are made
    again by the rank that made them. So keys move in the backward of a call with dropout, unless it says backward="queries". Calls
    that draw a seed say backward="keys", and their seeds are not compared. Other calls must have the same seed on all ranks
    (Note [Call marks] of transport/call_order.py); with backward="queries" every new seed is compared before the call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringattn.kernels.dropout import keep_mask

_LIBRARY = torch.library.Library("ringattn", "FRAGMENT")
_LIBRARY.define(
    "draw_seed(Tensor like) -> SymInt", tags=(torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag)
)
_LIBRARY.define(
    "kept_columns(Tensor positions, SymInt seed, SymInt batch, SymInt heads, SymInt first, SymInt columns, float p) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def draw_seed(like: Tensor) -> int:
    """A dropout seed from torch's default CPU generator (Note [Seeds]).

    Args:
        like: Any tensor of the call; its values do not matter. The compiler asks operators for a device.
    """
    return torch.ops.ringattn.draw_seed.default(like)


def kept_columns(
    positions: Tensor, seed: int, batch: int, heads: int, first: int, columns: int, dropout_p: float
) -> Tensor:
    """Which weights of some columns dropout keeps, as the kernels decide it: bool `b h s c`.

    Args:
        positions: Global positions of the rows, `s`.
        seed: Seed of the mask.
        batch: Batch elements b.
        heads: Query heads h.
        first: Global index of the first column. Columns that are no keys stand behind all keys.
        columns: Number of columns c.
        dropout_p: Probability of dropping a weight.
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
