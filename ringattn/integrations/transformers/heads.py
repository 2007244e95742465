"""Rows of a sharded tensor by their global positions, for heads that choose a row: last token, first token, end of a document.

Legend: b batch, s rows of this rank, n tokens of the whole sequence, k chosen rows of each batch element.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringattn.plan.sharding import Sharding, check_sharding


def take_rows(x: Tensor, sharding: Sharding, positions: Tensor) -> Tensor:
    """Return the rows at some global positions of a tensor that is sharded over the ranks; every rank must call it.

    Every rank gets the same rows and may compute a whole loss from them. Gradients are summed over ranks, so their mean over the
    ranks, which DDP and FSDP take, is that of one process.

    Args:
        x: This rank's rows, `b s ...`.
        sharding: The sharding of the rows: `shard_batch(...)["sharding"]`.
        positions: Global positions, `b` or `b k`, integers from 0 to n - 1; the same on every rank. `last_positions` returns those
            of last tokens.

    Returns:
        The rows, `b ...` or `b k ...`.

    Raises:
        ValueError: A shape does not fit, a position is out of range, or ranks take other rows; raised on every rank where a call of
            this kind is the first.
        RuntimeError: The ring has several ranks and the sharding was made without one.

    Example:
        >>> from ringattn import Ring
        >>> hidden = torch.arange(6.0).view(1, 6, 1)
        >>> take_rows(hidden, Ring().sharding(6), torch.tensor([5])).tolist()
        [[5.0]]
    """
    check_sharding(sharding)
    ring = sharding.ring
    with ring.propagate_errors():
        b, s = x.shape[:2] if x.dim() > 1 else (0, -1)
        if s != sharding.shard_len:
            raise ValueError(
                f"x must have this rank's {sharding.shard_len} rows in dim 1, got shape {tuple(x.shape)}; pass an output of the "
                "model as it is"
            )
        if positions.dim() not in (1, 2) or positions.shape[0] != b or positions.is_floating_point():
            raise ValueError(
                f"positions must be integers, {b} or {b} x k for a batch of {b}, got {positions.dtype} of shape "
                f"{tuple(positions.shape)}; pass a position for each row of the batch"
            )
        places = positions.to(x.device).view(b, -1)
        if not torch.compiler.is_compiling() and bool(((places < 0) | (places >= sharding.seq_len)).any()):
            raise ValueError(
                f"positions must be from 0 to {sharding.seq_len - 1}, got {places.tolist()}; count from the start of the sequence"
            )
    if not torch.compiler.is_compiling():  # a trace has no other ranks
        shape = [b, sharding.shard_lens, *x.shape[2:]]
        text = f"{tuple(positions.shape)} rows of {shape} {x.dtype} {x.device.type}, with gradients: {x.requires_grad}"
        ring.assert_equal_once("rows to take", text, f"take_rows({text})")
    here = sharding.positions.to(x.device)
    index = torch.searchsorted(here, places)
    held = torch.nn.functional.pad(here, (0, 1), value=-1)[index] == places
    # a row of zeros stands for those of other ranks, also where this rank has no rows at all
    rows = torch.cat([x, x.new_zeros(b, 1, *x.shape[2:])], 1)
    mine = rows[torch.arange(b, device=x.device)[:, None], index.where(held, s)]
    if sharding.world_size > 1:
        # one rank has a row, the others zeros: the sum is exact
        mine = torch.cat(ring.gather(mine[None], 0, [1] * sharding.world_size)).sum(0)
    return mine.view(b, *positions.shape[1:], *x.shape[2:])


def last_positions(attention_mask: Tensor) -> Tensor:
    """Return the position of the last token of each row of a mask of the whole sequence, `b n`: `b` int64.

    Example:
        >>> last_positions(torch.tensor([[1, 1, 0], [0, 1, 1]])).tolist()
        [1, 2]
    """
    places = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    return (places * attention_mask.ne(0)).argmax(-1)
