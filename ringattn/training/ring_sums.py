"""Sums over sequences whose tokens are on several ranks: per row of the batch, per packed document, and means over all.

Legend: b batch, s rows of this rank, k documents of a packed row.

Note [Gradients of sums over the ring]
    Every rank has the same sum, and computes the same loss from it. In the backward a rank receives the sum of all ranks'
    gradients: with R ranks, R times the gradient of the loss for its own rows. DDP and FSDP average gradients of parameters over
    ranks, and that mean is the gradient of one process. So average gradients over the ranks of a ring, and leave the loss as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringattn.plan.sharding import Sharding, check_sharding
from ringattn.ring import Ring
from ringattn.sharding_context import resolve_sharding


def sum_over_ring(x: Tensor, ring: Ring | Sharding) -> Tensor:
    """Return the sum of all ranks' x, added in rank order: the same bits on every rank; differentiable.

    Args:
        x: Of one shape and dtype on all ranks, each of which calls this.
        ring: The ranks, or a sharding over them.
    """
    if ring.world_size == 1:
        return x
    members: Any = ring.ring if isinstance(ring, Sharding) else ring
    return torch.cat(members.gather(x[None], 0, [1] * ring.world_size)).sum(0)


def mean_over_ring(loss_sum: Tensor, count: Tensor | float, ring: Ring | Sharding | None = None) -> Tensor:
    """Return a loss of the whole sequence: the sum of all ranks' sums, divided by the sum of their counts.

    A loss that each rank divides by its own count is wrong as soon as counts differ. Average gradients over the ranks of the
    ring, as DDP and FSDP do (Note [Gradients of sums over the ring]).

    Args:
        loss_sum: Scalar, the sum over this rank's rows.
        count: Number of rows, or of weights, that this rank has added; 0 where it has none.
        ring: The ranks, or a sharding over them; default the sharding of `use_sharding`.

    Returns:
        A scalar in the dtype of loss_sum, the same on every rank; 0 where no rank counts anything.

    Raises:
        ValueError: loss_sum or count is not a scalar; or there is no ring.

    Example:
        >>> from ringattn import Ring, mean_over_ring
        >>> mean_over_ring(torch.tensor(6.0), 4, Ring()).item()
        1.5
    """
    if ring is None:
        current = resolve_sharding(None, None)
        if current is None:
            raise ValueError("ring must be a Ring or a Sharding, got None outside of use_sharding; pass the sharding")
        ring = current[0]
    counted = torch.as_tensor(count, device=loss_sum.device)
    if loss_sum.dim() or counted.dim():
        shapes = f"{tuple(loss_sum.shape)} and {tuple(counted.shape)}"
        raise ValueError(
            f"loss_sum and count must be scalars, got shapes {shapes}; add over the rows of this rank first"
        )
    # counts beyond 2^24 are no fp32 numbers
    total, whole = sum_over_ring(torch.stack([loss_sum.double(), counted.double()]), ring).unbind()
    return (total / torch.where(whole == 0, 1, whole)).to(loss_sum.dtype)


def sequence_sums(x: Tensor, sharding: Sharding) -> Tensor:
    """Return sums over whole sequences, the same on every rank: one per row of the batch, or per packed document.

    Differentiable, by Note [Gradients of sums over the ring].

    Args:
        x: `b s`, a number for each of this rank's rows, as log-probabilities that are masked with 0.
        sharding: The sharding of the rows, with `documents` where they are packed.

    Returns:
        `b`, or `b k` with k documents; fp32 (fp64 for fp64 numbers).

    Raises:
        ValueError: x is not `b s` with this rank's rows.

    Example:
        >>> from ringattn import Ring
        >>> sequence_sums(torch.ones(1, 5), Ring().sharding(5, documents=(0, 2, 5))).tolist()
        [[2.0, 3.0]]
    """
    check_sharding(sharding)
    if x.dim() != 2 or x.shape[1] != sharding.shard_len:
        raise ValueError(
            f"x must be b x {sharding.shard_len}, this rank's rows, got shape {tuple(x.shape)}; pass a number for each row"
        )
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if sharding.documents is None:
        return sum_over_ring(x.sum(1), sharding)
    sums = x.new_zeros(x.shape[0], len(sharding.documents) - 1)
    return sum_over_ring(sums.index_add(1, _document_index(sharding, x.device), x), sharding)


def for_rows(values: Tensor, sharding: Sharding) -> Tensor:
    """Return for each of this rank's rows the value of its sequence: the way back from `sequence_sums`.

    Args:
        values: `b`, or `b k` for packed documents.
        sharding: The sharding of the rows.

    Returns:
        `b 1`, which broadcasts over rows, or `b s`.

    Raises:
        ValueError: values do not have the shape of the sequences.

    Example:
        >>> from ringattn import Ring
        >>> for_rows(torch.tensor([[7, 8]]), Ring().sharding(5, documents=(0, 2, 5))).tolist()
        [[7, 7, 8, 8, 8]]
    """
    check_sharding(sharding)
    documents = sharding.documents
    if documents is None and values.dim() == 1:
        return values[:, None]
    if documents is None or values.dim() != 2 or values.shape[1] != len(documents) - 1:
        wanted = "b" if documents is None else f"b x {len(documents) - 1}"
        raise ValueError(f"values must be {wanted}, one per sequence, got shape {tuple(values.shape)}")
    return values[:, _document_index(sharding, values.device)]


def _document_index(sharding: Sharding, device: torch.device) -> Tensor:
    """Return the document `s` of each of this rank's rows."""
    ends = torch.tensor(sharding.documents, device=device)[1:]
    return torch.searchsorted(ends, sharding.positions.to(device), right=True)
