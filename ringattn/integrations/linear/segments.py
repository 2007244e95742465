"""Segments of a rank's rows: the stretches over which a recurrence runs without a break. Integers only.

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
    """Consecutive positions of one document, held by one rank.

    Attributes:
        start: The first of its local rows.
        length: Rows, at least 1.
        continues: Whether its document begins in an earlier run, so that its state does not start from zero.
    """

    start: int
    length: int
    continues: bool


@dataclass(frozen=True)
class Run:
    """A run of one rank, as a link in the chain of all ranks' runs.

    Attributes:
        segments: Indices of the rank's segments in it, first and one past the last.
        preceding: Rows of the document of its first segment that are in earlier runs.
        passes: Whether the state from before reaches its end: it is one segment, which continues.
    """

    segments: tuple[int, int]
    preceding: int
    passes: bool


@dataclass(frozen=True)
class Chain:
    """The runs of all ranks in the order of the sequence, and this rank's part of them.

    Attributes:
        segments: Segments of this rank, in the order of its rows.
        runs: Runs of this rank, in the order of its rows.
        counts: Number of runs of each rank.
        order: Places of all runs, in the order of the sequence, among the runs of all ranks concatenated in rank order.
        mine: Places in `order` of this rank's runs.
        communicates: Whether any segment of any rank continues; else no state crosses runs.
    """

    segments: tuple[Segment, ...]
    runs: tuple[Run, ...]
    counts: tuple[int, ...]
    order: tuple[int, ...]
    mine: tuple[int, ...]
    communicates: bool

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
        tuple(place for place, i in enumerate(order) if everywhere[i][1] == rank),
        any(start not in begins for start, _ in everywhere),
    )


@dataclass(frozen=True)
class ChunkRows:
    """Rows of segments, cut into chunks of equal length; the last chunk of a segment is filled up with rows of zeros.

    Attributes:
        index: Row of each place, `c*i` int64; one past the last row: a row of zeros. None: the rows as they are.
        inverse: Place of each row, `s` int64; None: the places as they are.
        stops: One past the last chunk of each segment.
        chunk_len: Rows of a chunk, i.
    """

    index: Tensor | None
    inverse: Tensor | None
    stops: tuple[int, ...]
    chunk_len: int

    def split(self, x: Tensor) -> Tensor:
        """Return rows `b s ...` as chunks `b c i ...`."""
        if self.index is not None:
            x = torch.nn.functional.pad(x, [0, 0] * (x.dim() - 2) + [0, 1]).index_select(1, self.index)
        return x.unflatten(1, (-1, self.chunk_len))

    def concatenate(self, x: Tensor) -> Tensor:
        """Return chunks `b c i ...` as rows `b s ...`."""
        x = x.flatten(1, 2)
        return x if self.inverse is None else x.index_select(1, self.inverse)


@lru_cache(maxsize=64)
def chunk_rows(lengths: tuple[int, ...], chunk_len: int, device: torch.device) -> ChunkRows:
    """Return how the rows of segments of these lengths are cut into chunks."""
    stops, index, row = list[int](), list[Tensor](), 0
    for length in lengths:
        chunks = -(-length // chunk_len)
        places = torch.arange(row, row + chunks * chunk_len, device="cpu")
        index.append(places.masked_fill(places >= row + length, sum(lengths)))
        stops.append((stops[-1] if stops else 0) + chunks)
        row += length
    if all(length % chunk_len == 0 for length in lengths):
        return ChunkRows(None, None, tuple(stops), chunk_len)
    whole = torch.cat(index)
    inverse = (whole < row).nonzero()[:, 0]
    # results of a call outlive it: ordinary tensors even when made under inference mode
    with torch.inference_mode(False):
        return ChunkRows(whole.to(device), inverse.to(device), tuple(stops), chunk_len)
