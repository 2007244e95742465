"""Segments of a rank's rows: the stretches over which a recurrence runs without a break.

A run of a shard is cut where a document begins. The state of a segment starts from zero where its document begins, and else from
the last state of the run before, which may be on another rank.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ringattn.plan.layouts import PART, Shard
from ringattn.plan.sharding import Sharding


@dataclass(frozen=True)
class Segment:
    """Consecutive positions of one document, held by one rank."""

    start: int  # the first of its local rows
    length: int  # at least 1
    continues: bool  # whether its document begins in an earlier run, so that its state does not start from zero


@dataclass(frozen=True)
class Run:
    """A run of one rank, as a link in the chain of all ranks' runs."""

    segments: tuple[int, int]  # indices of the rank's segments in it, first and one past the last
    preceding: int  # rows of the document of its first segment that are in earlier runs
    passes: bool  # whether the state from before reaches its end: it is one segment, which continues


@dataclass(frozen=True)
class Chain:
    """The runs of all ranks in the order of the sequence, and this rank's part of them."""

    segments: tuple[Segment, ...]  # of this rank, in the order of its rows
    runs: tuple[Run, ...]  # of this rank, in the order of its rows
    counts: tuple[int, ...]  # runs of each rank
    order: tuple[int, ...]  # places of all runs, in the order of the sequence, among those of all ranks in rank order
    mine: tuple[int, ...]  # places in `order` of this rank's runs, in the order of its rows
    communicates: bool  # whether any segment of any rank continues; else no state crosses runs

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each segment."""
        return tuple(segment.length for segment in self.segments)


def chain_of(sharding: Sharding) -> Chain:
    """Return the chain of a sharding's runs.

    Raises:
        ValueError: The layout has strides, or does not hold the whole sequence.
    """
    if sharding.layout == PART or any(run.stride != 1 for shard in sharding.shards for run in shard):
        raise ValueError(
            f"the layout of a recurrence must give each rank stretches of the sequence, got {sharding.layout!r}; use "
            "'contiguous', 'zigzag' or 'balanced', or move rows with sharding.reshard"
        )
    return _chain(sharding.shards, sharding.documents or (0,), sharding.rank)


@lru_cache(maxsize=64)
def _chain(shards: tuple[Shard, ...], documents: tuple[int, ...], rank: int) -> Chain:
    begins = set(documents)
    segments, runs, row = list[Segment](), list[Run](), 0
    for run in shards[rank]:
        end = run.start + run.length
        edges = [run.start, *sorted(x for x in begins if run.start < x < end), end]
        first = len(segments)
        for a, b in itertools.pairwise(edges):
            segments.append(Segment(row, b - a, a not in begins))
            row += b - a
        preceding = run.start - max(x for x in begins if x <= run.start)
        runs.append(Run((first, len(segments)), preceding, len(edges) == 2 and preceding > 0))
    everywhere = [(run.start, r) for r, shard in enumerate(shards) for run in shard]
    order = sorted(range(len(everywhere)), key=lambda i: everywhere[i])
    return Chain(
        tuple(segments),
        tuple(runs),
        tuple(map(len, shards)),
        tuple(order),
        tuple(order.index(i) for i, (_, r) in enumerate(everywhere) if r == rank),
        any(start not in begins for start, _ in everywhere),
    )


def split_chunks(x: Tensor, lengths: tuple[int, ...], chunk_len: int) -> Tensor:
    """Return rows `b s ...` of segments as chunks `b c i ...`; the last chunk of a segment is filled up with rows of zeros."""
    parts = list[Tensor]()
    for part in x.split(lengths, 1):
        missing = -part.shape[1] % chunk_len
        parts += [part, x.new_zeros(x.shape[0], missing, *x.shape[2:])] if missing else [part]
    return torch.cat(parts, 1).unflatten(1, (-1, chunk_len))


def concatenate_chunks(x: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Return chunks `b c i ...` of segments as rows `b s ...`."""
    filled = [-(-length // x.shape[2]) * x.shape[2] for length in lengths]
    parts = x.flatten(1, 2).split(filled, 1)
    return torch.cat([part[:, :length] for part, length in zip(parts, lengths, strict=True)], 1)
