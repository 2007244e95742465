"""Placement of packed documents over data-parallel rings: short ones whole on one rank, long ones over several.

A rank's work is its visible pairs and, for everything but attention, its tokens: `pairs_per_token` pairs cost as much as a token.
Documents that stay on one rank move no keys; a document over k ranks is cut into 2 k chunks in zigzag, so all k have equal work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate

import torch

from ringattn.plan.layouts import MAX_SEQ_LEN, Run, Shard, shard_len, zigzag
from ringattn.plan.mask import short_mask
from ringattn.plan.ring_plan import RingPlan, make_plan
from ringattn.plan.sharding import Sharding, SupportsAllGather

PAIRS_PER_TOKEN = 26_000
"""Pairs of attention that cost as much as a token's matrix products: with 218 million parameters a layer and 32 heads of 128."""
FINEST = 1 / 64
"""Smallest share of a rank's work at which a document is still cut."""


@dataclass(frozen=True)
class PackedSequence:
    """The documents of one ring in a batch, as one packed sequence and its shards.

    Attributes:
        indices: Indices of the documents in the lengths, in the order in which they are packed.
        documents: Boundaries (0, ..., seq_len).
        shards: Every rank's shard.
        window: Tokens that each token sees; None: all before it.
    """

    indices: tuple[int, ...]
    documents: tuple[int, ...]
    shards: tuple[Shard, ...]
    window: int | None = None

    @property
    def seq_len(self) -> int:
        """Tokens of the sequence."""
        return self.documents[-1]

    def sharding(self, ring: SupportsAllGather, device: torch.device | str | None = None) -> Sharding:
        """Return the sharding of this sequence on a ring, for `ring_attention`, `shard_batch` and the training job."""
        return Sharding(self.seq_len, "balanced", self.shards, ring.rank, self.documents, ring=ring, device=device)

    @cached_property
    def pairs(self) -> tuple[int, ...]:
        """Visible pairs of every rank, by the plan."""
        return tuple(sum(step.pairs for step in part.ring_steps if step is not None) for part in self._plan.ranks)

    @cached_property
    def rows_moved(self) -> int:
        """Rows of keys that ranks receive from each other, over all ranks, by the plan."""
        return sum(part.received_rows for part in self._plan.ranks)

    @cached_property
    def _plan(self) -> RingPlan:
        window = None if self.window is None else (self.window - 1, 0)
        mask = short_mask(self.seq_len, causal=True, documents=self.documents, window=window)
        return make_plan(self.shards, self.shards, mask, "keys")


@dataclass(frozen=True)
class PackedBatch:
    """One batch over all ranks: a sequence per data-parallel ring; see `pack`.

    Attributes:
        sequences: The documents of each ring.
        pairs_per_token: Visible pairs of attention that cost as much as all else of a token.
    """

    sequences: tuple[PackedSequence, ...]
    pairs_per_token: float = PAIRS_PER_TOKEN

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Work of every rank in pairs, by the plan."""
        return tuple(
            pairs + self.pairs_per_token * shard_len(shard)
            for sequence in self.sequences
            for pairs, shard in zip(sequence.pairs, sequence.shards, strict=True)
        )

    @property
    def imbalance(self) -> float:
        """Largest work of a rank over the mean: 1.0 when all ranks finish together."""
        return max(self.work) * len(self.work) / sum(self.work)

    @property
    def rows_moved(self) -> int:
        """Rows of keys that ranks receive from each other."""
        return sum(sequence.rows_moved for sequence in self.sequences)


def pack(
    lengths: Sequence[int],
    *,
    tokens: int,
    cp: int,
    dp: int = 1,
    pairs_per_token: float = PAIRS_PER_TOKEN,
    tolerance: float = 1.02,
) -> list[PackedBatch]:
    """Return batches of documents, in their order, with the placement of each batch over dp rings of cp ranks.

    A batch takes documents while they fit into `tokens` tokens; each document is in one batch, whole.

    Args:
        lengths: Tokens of every document.
        tokens: Tokens of a batch, over all ranks.
        cp: Ranks of a ring.
        dp: Rings.
        pairs_per_token: Visible pairs of attention that cost as much as all else of a token.
        tolerance: Largest work of a rank over the mean that is good enough; less moves more rows.

    Raises:
        ValueError: A number is out of range, or a document is longer than a batch.

    Example:
        >>> batches = pack([6, 2, 2, 2, 2, 2], tokens=16, cp=2, pairs_per_token=0)
        >>> [batch.sequences[0].shards for batch in batches][0][0][0]
        Run(start=0, stride=1, length=2)
    """
    if not 1 <= tokens <= MAX_SEQ_LEN:
        raise ValueError(f"tokens must be from 1 to {MAX_SEQ_LEN}, got {tokens}; give the tokens of a batch")
    found: list[list[int]] = [[]]
    room = tokens
    for index, length in enumerate(lengths):
        if not 0 < length <= tokens:
            raise ValueError(
                f"lengths must be from 1 to tokens {tokens}, got {length} at index {index}; cut longer documents before"
            )
        if length > room:
            found.append([])
            room = tokens
        found[-1].append(index)
        room -= length
    place_batch = partial(place, cp=cp, dp=dp, pairs_per_token=pairs_per_token, tolerance=tolerance)
    return [place_batch([lengths[index] for index in batch], indices=batch) for batch in found if batch]


def place(
    lengths: Sequence[int],
    *,
    cp: int,
    dp: int = 1,
    pairs_per_token: float = PAIRS_PER_TOKEN,
    tolerance: float = 1.02,
    window: int | None = None,
    indices: Sequence[int] | None = None,
    keep_order: bool = False,
) -> PackedBatch:
    """Return the placement of one batch's documents over dp rings of cp ranks.

    Documents that are cut are those with the most work; the fewest are cut with which the work is within the tolerance.

    Args:
        lengths: Tokens of the documents of a batch.
        cp: Ranks of a ring.
        dp: Rings.
        pairs_per_token: See `pack`; also tolerance.
        window: Tokens that each token sees; None: all before it.
        indices: Their indices in a longer list; None: from 0 on.
        keep_order: Documents of a ring are packed in their order, not by rank.

    Raises:
        ValueError: A number is out of range.

    Example:
        >>> place([4, 1, 1, 1, 1], cp=2, pairs_per_token=0).imbalance
        1.0
    """
    for name, number in (("cp", cp), ("dp", dp), ("lengths", min(lengths, default=0))):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}; give a positive number")
    if tolerance < 1 or pairs_per_token < 0:
        raise ValueError(
            f"tolerance must be at least 1 and pairs_per_token at least 0, got {tolerance} and {pairs_per_token}; "
            "1.02 and 26000 are usual"
        )
    work = [_pairs(length, window) + pairs_per_token * length for length in lengths]
    mean = sum(work) / (dp * cp)
    best: list[list[tuple[int, tuple[int, ...]]]] = []
    best_load = float("inf")
    share = 1.0
    while True:
        placed, loads = _assign(work, lengths, dp, cp, share * mean)
        load = max(loads) / mean
        if load < best_load:
            best, best_load = placed, load
        if best_load <= tolerance or share <= FINEST:
            break
        share /= 2
    names = list(range(len(lengths))) if indices is None else list(indices)
    sequences = (_sequence(group, lengths, names, cp, keep_order=keep_order) for group in best)
    return PackedBatch(tuple(replace(one, window=window) for one in sequences), pairs_per_token)


def _pairs(length: int, window: int | None) -> int:
    """Return the visible pairs of a document under a causal mask."""
    seen = length if window is None else min(window, length)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def _assign(
    work: Sequence[float], lengths: Sequence[int], dp: int, cp: int, largest: float
) -> tuple[list[list[tuple[int, tuple[int, ...]]]], list[float]]:
    """Return per ring the documents and the ranks of each, and the load of every rank; more work than `largest` is cut."""
    loads = [[0.0] * cp for _ in range(dp)]
    placed: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(dp)]
    rest = sum(work)
    mean = rest / (dp * cp)
    for index in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        group = min(range(dp), key=lambda g: (sum(loads[g]), g))
        load = loads[group]
        # no more ranks than rows of the document for two chunks each
        ranks = min(cp, max(1, lengths[index] // 2), -(-int(work[index]) // max(1, int(largest))))
        order = sorted(range(cp), key=lambda r: (load[r], r))
        if ranks > 1:
            # as many ranks as level the loads best
            ranks = min(
                range(ranks, min(cp, max(1, lengths[index] // 2)) + 1),
                key=lambda k: (max(load[r] + work[index] / k for r in order[:k]) > mean, k),
            )
        chosen = tuple(sorted(order[:ranks]))
        for rank in chosen:
            load[rank] += work[index] / ranks
        placed[group].append((index, chosen))
    return placed, [load for group in loads for load in group]


def _sequence(
    placed: Sequence[tuple[int, tuple[int, ...]]],
    lengths: Sequence[int],
    names: Sequence[int],
    cp: int,
    *,
    keep_order: bool,
) -> PackedSequence:
    """Return the packed sequence of a ring: cut documents first, then those of each rank, which then form one run."""
    order = sorted(placed, key=lambda one: one[0] if keep_order else (len(one[1]) == 1, one[1], one[0]))
    bounds = (0, *accumulate(lengths[index] for index, _ in order))
    runs: list[list[Run]] = [[] for _ in range(cp)]
    for start, (index, ranks) in zip(bounds, order, strict=False):
        for rank, shard in zip(ranks, zigzag(lengths[index], len(ranks)), strict=True):
            for run in shard:
                _append(runs[rank], Run(start + run.start, 1, run.length))
    return PackedSequence(tuple(names[index] for index, _ in order), bounds, tuple(tuple(shard) for shard in runs))


def _append(runs: list[Run], run: Run) -> None:
    """Append a run, joined with the last one where they touch."""
    if runs and runs[-1].last + 1 == run.start:
        run = Run(runs[-1].start, 1, runs.pop().length + run.length)
    runs.append(run)


def compare(lengths: Sequence[int], *, tokens: int, world_size: int) -> Iterator[tuple[PackedBatch, PackedBatch]]:
    """Yield each batch as `pack` places it on one ring of all ranks, and with every document over all ranks (fixed cp = world)."""
    for batch in pack(lengths, tokens=tokens, cp=world_size):
        names, ranks = batch.sequences[0].indices, tuple(range(world_size))
        fixed = [(index, ranks) for index in range(len(names))]
        chosen = [lengths[name] for name in names]
        yield batch, PackedBatch((_sequence(fixed, chosen, names, world_size, keep_order=True),))
