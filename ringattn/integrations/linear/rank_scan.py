"""States across ranks: the exclusive scan over the runs of all ranks, and the rows before each run.

Each run's (decay, state) pair is gathered to all ranks, and every rank composes those of the runs before its own, in the order
of the sequence. Pairs do not depend on the length of the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringattn.integrations.linear.segments import Chain
from ringattn.plan.sharding import Sharding


class _Keep(torch.autograd.Function):
    """Return x; its backward also runs that of `other`, whose gradient is zero.

    A rank that needs none of the gathered rows must take part in the collective of their backward all the same.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        ctx.shape, ctx.dtype, ctx.device = other.shape, other.dtype, other.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.zeros(ctx.shape, dtype=ctx.dtype, device=ctx.device)


def keep_in_graph(x: Tensor, other: Tensor | None) -> Tensor:
    """Return x, in whose backward every rank runs the collective that made `other`."""
    kept: Any = _Keep.apply
    return x if other is None else kept(x, other)


def scan_ranks(
    decays: Sequence[Tensor], states: Sequence[Tensor], zero: Tensor, width: int, chain: Chain, sharding: Sharding
) -> tuple[list[Tensor], Tensor | None]:
    """Return the state before each run of this rank, and the gathered pairs for `keep_in_graph`. Every rank calls it.

    decays, `b h d d` with width d or `b h 1 1` with width 1, and states, `b h d e`, are those of the runs of this rank. zero is a
    state of zeros, `b h d e`; of a rank without rows it is tied to the graph of its inputs.
    """
    b, heads, d, e = zero.shape
    if not chain.communicates:
        return [zero for _ in chain.runs], None
    pairs = [torch.cat([a.flatten(2), s.flatten(2)], 2) for a, s in zip(decays, states, strict=True)]
    size = width * width + d * e
    # no rows: the tie makes this rank run the collective of the backward
    mine = torch.stack(pairs) if pairs else zero.new_zeros(0, b, heads, size) + zero.sum()
    gathered = _gather(mine, chain, sharding)
    found, state = dict[int, Tensor](), zero
    last = max(chain.mine, default=-1)
    for place, index in enumerate(chain.order[: last + 1]):
        if place in chain.mine:
            found[place] = state
        if place < last:
            a, s = gathered[index].split([width * width, size - width * width], 2)
            a, s = a.unflatten(2, (width, width)), s.unflatten(2, (d, e))
            state = (a @ state if width > 1 else a * state) + s
    return [found[place] for place in chain.mine], gathered


def rows_before(x: Tensor, count: int, chain: Chain, sharding: Sharding) -> tuple[Tensor, Tensor | None]:
    """Return the `count` rows before each run of this rank's rows `b s c`, as `b (runs count) c`, and the gathered rows.

    There are zeros before a document. The gathered rows are for `keep_in_graph`, None when nothing was. Every rank calls it.
    """
    b, _, width = x.shape
    if not count or not chain.communicates:
        return x.new_zeros(b, len(chain.runs) * count, width), None
    tails = list[Tensor]()
    for run in chain.runs:
        first, stop = run.segments
        begin, end = chain.segments[first].start, chain.segments[stop - 1].start + chain.segments[stop - 1].length
        tail = x[:, max(begin, end - count) : end]
        # a short run is filled up from the left with rows that `lengths` tells apart
        tails.append(torch.nn.functional.pad(tail, (0, 0, count - tail.shape[1], 0)))
    mine = torch.stack(tails) if tails else x.new_zeros(0, b, count, width) + x.sum()
    gathered = _gather(mine, chain, sharding)
    lengths = [run.length for shard in sharding.shards for run in shard]
    before = list[Tensor]()
    for run, place in zip(chain.runs, chain.mine, strict=True):
        rows, missing = list[Tensor](), min(count, run.preceding)
        before.append(x.new_zeros(b, count - missing, width))
        for index in reversed(chain.order[:place]):
            taken = min(missing, lengths[index])
            rows.insert(0, gathered[index][:, count - taken :])
            missing -= taken
            if not missing:
                break
        before += rows
    return torch.cat(before, 1) if before else x.new_zeros(b, 0, width), gathered


def _gather(mine: Tensor, chain: Chain, sharding: Sharding) -> Tensor:
    """Return all ranks' runs, concatenated in rank order."""
    if sharding.world_size == 1:
        return mine
    return torch.cat(sharding.ring.gather(mine, 0, chain.counts))
