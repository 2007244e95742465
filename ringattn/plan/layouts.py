"""Assignment of the positions of a sequence to ranks, as pure integer functions.

Every layout returns one shard per rank. The runs of a shard are sorted and do not interleave, so positions ascend over
its rows; no run is empty; a rank that holds nothing has the empty shard `()`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

LAYOUTS = ("contiguous", "striped", "zigzag", "balanced", "segments")
TOLERANCE = 1.02
"""Greatest work of a rank over the mean at which a balanced layout stops to cut finer."""
PART = "part"
"""Name of shards that are made by hand and hold only some positions of a sequence."""
MAX_SEQ_LEN = 2**31 - 1
"""Tokens of the longest sequence: positions are int32 in kernels."""


@dataclass(frozen=True, order=True)
class Run:
    """Positions `start + stride * i` for `0 <= i < length`.

    Attributes:
        last: The greatest position (start - stride when the run is empty).
    """

    start: int
    stride: int
    length: int
    last: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Compute what is read most."""
        object.__setattr__(self, "last", self.start + self.stride * (self.length - 1))

    def position(self, i: int) -> int:
        """The position of row i of the run."""
        return self.start + self.stride * i


Shard = tuple[Run, ...]


def shard_len(shard: Shard) -> int:
    """Rows of a shard."""
    return sum(run.length for run in shard)


def contiguous(seq_len: int, world_size: int) -> tuple[Shard, ...]:
    """One stretch per rank, in rank order; lengths differ by one at most.

    Example:
        >>> contiguous(5, 2)
        ((Run(start=0, stride=1, length=3),), (Run(start=3, stride=1, length=2),))
    """
    check_sizes(seq_len, world_size)
    return tuple(_merge([stretch]) for stretch in pairwise(_edges(seq_len, world_size)))


def striped(seq_len: int, world_size: int) -> tuple[Shard, ...]:
    """Rank r holds the positions r, r + world_size, r + 2 * world_size, ...

    Example:
        >>> striped(5, 2)
        ((Run(start=0, stride=2, length=3),), (Run(start=1, stride=2, length=2),))
    """
    check_sizes(seq_len, world_size)
    lengths = [max(0, -((r - seq_len) // world_size)) for r in range(world_size)]
    # a single row has no stride: 1 keeps equal shards equal
    return tuple(
        (Run(r, world_size if length > 1 else 1, length),) if length else () for r, length in enumerate(lengths)
    )


def zigzag(seq_len: int, world_size: int) -> tuple[Shard, ...]:
    """Rank r holds chunks r and 2 * world_size - 1 - r of 2 * world_size equal ones: equal work under a causal mask.

    Shard lengths differ by one at most, whatever the sequence length.

    Example:
        >>> zigzag(8, 2)
        ((Run(start=0, stride=1, length=2), Run(start=6, stride=1, length=2)), (Run(start=2, stride=1, length=4),))
    """
    check_sizes(seq_len, world_size)
    edges = _edges(seq_len, 2 * world_size)
    return tuple(_merge([(edges[c], edges[c + 1]) for c in (r, 2 * world_size - 1 - r)]) for r in range(world_size))


def balanced(
    seq_len: int,
    world_size: int,
    work: Callable[[int, int], int],
    *,
    chunks_per_rank: int = 1,
    min_chunk_len: int = 128,
) -> tuple[Shard, ...]:
    """Equal chunks, assigned so that every rank has the same work, and the same number of chunks up to one.

    Starts from `chunks_per_rank` chunks per rank and doubles until the greatest work of a rank is within TOLERANCE of
    the mean, or chunks would be shorter than `min_chunk_len`; the best assignment seen is returned. So a mask that is
    already even keeps one stretch per rank (and moves only its halo), a causal mask becomes a zigzag, and packed
    documents get chunks as coarse as their lengths allow. The same arguments give the same shards on every rank.

    Example:
        >>> balanced(8, 2, lambda a, b: sum(i + 1 for i in range(a, b)), min_chunk_len=1)
        ((Run(start=0, stride=1, length=2), Run(start=6, stride=1, length=2)), (Run(start=2, stride=1, length=4),))
    """
    check_sizes(seq_len, world_size)
    chunks_per_rank = min(chunks_per_rank, max(1, seq_len // world_size))
    best, best_load = None, 0
    while True:
        edges = _edges(seq_len, world_size * chunks_per_rank)
        weights = [work(a, b) if a < b else 0 for a, b in pairwise(edges)]
        goal = int(TOLERANCE * sum(weights) / world_size)
        assigned = _assign(weights, world_size, goal)
        load = max(sum(weights[c] for c in chunks) for chunks in assigned)
        if best is None or load < best_load:
            best, best_load = [[(edges[c], edges[c + 1]) for c in sorted(chunks)] for chunks in assigned], load
        chunks_per_rank *= 2
        if load <= goal or seq_len < world_size * chunks_per_rank * min_chunk_len:
            # ranks in order of their first position: what a window needs then comes from the rank before
            return tuple(_merge(chunks) for chunks in sorted(best))


def segmented(lengths: Sequence[int], world_size: int) -> tuple[Shard, ...]:
    """Rank r holds stretch r of every segment, each split as `contiguous` splits it alone.

    For sequences joined from parts whose rows are computed apart between attention calls, as the text and the image of a
    diffusion transformer: every rank has its share of both.

    Args:
        lengths: Tokens of each segment, in the order in which they are joined.
        world_size: Number of ranks.

    Example:
        >>> segmented((3, 5), 2)[0]
        (Run(start=0, stride=1, length=2), Run(start=3, stride=1, length=3))
    """
    for length in (min(lengths, default=0), sum(lengths)):
        check_sizes(length, world_size)
    starts = [0, *accumulate(lengths)]
    edges = [[start + e for e in _edges(n, world_size)] for start, n in zip(starts, lengths, strict=False)]
    return tuple(_merge([(e[r], e[r + 1]) for e in edges]) for r in range(world_size))


def make_shards(
    layout: str, seq_len: int, world_size: int, mask: Any = None, segments: Sequence[int] | None = None
) -> tuple[Shard, ...]:
    """The shards of a layout given by name.

    Args:
        layout: "contiguous", "striped", "zigzag", "balanced" or "segments".
        seq_len: Tokens of the whole sequence.
        world_size: Number of ranks.
        mask: The mask whose `work` "balanced" equalises; the other layouts do not look at it.
        segments: Tokens of each segment of "segments", seq_len in total; the other layouts have none.
    """
    if (segments is not None) != (layout == "segments"):
        raise ValueError(
            f"segments must be given with layout='segments' and only then, got layout={layout!r} and segments={segments}; "
            "pass the length of each segment, or another layout"
        )
    if segments is not None:
        if sum(segments) != seq_len or min(segments, default=0) < 1:
            raise ValueError(
                f"segments must be lengths of at least 1 token that sum to seq_len {seq_len}, got {tuple(segments)}, which "
                f"sum to {sum(segments)}; leave out empty segments"
            )
        return segmented(segments, world_size)
    if layout == "balanced":
        if mask is None:
            raise ValueError("layout 'balanced' must be given the mask to balance, got none; use 'zigzag' without one")
        return balanced(seq_len, world_size, mask.work)
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}; 'zigzag' suits causal masks")
    return {"contiguous": contiguous, "striped": striped, "zigzag": zigzag}[layout](seq_len, world_size)


def check_sizes(seq_len: int, world_size: int) -> None:
    """Refuse sequences without tokens or with positions beyond int32, and rings without ranks."""
    if not 1 <= seq_len <= MAX_SEQ_LEN:
        raise ValueError(
            f"seq_len must be from 1 to {MAX_SEQ_LEN}, got {seq_len}; give the length of the whole sequence, and cut longer ones"
        )
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}; give the number of ranks of the ring")


def _edges(seq_len: int, count: int) -> list[int]:
    # the first chunks are one longer: then zigzag's pairs, first with last, differ by one token at most
    length, longer = divmod(seq_len, count)
    return [c * length + min(c, longer) for c in range(count + 1)]


def _merge(stretches: list[tuple[int, int]]) -> Shard:
    merged: list[tuple[int, int]] = []
    for a, b in sorted(stretches):
        if a == b:
            continue
        if merged and merged[-1][1] == a:
            a = merged.pop()[0]
        merged.append((a, b))
    return tuple(Run(a, 1, b - a) for a, b in merged)


def _assign(weights: list[int], world_size: int, goal: int) -> list[list[int]]:
    """Chunks per rank: the same number each, loads as equal as exchanges of two chunks can make them."""
    order = sorted(range(len(weights)), key=lambda c: (-weights[c], c))
    assigned: list[list[int]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    # longest first, one round of chunks at a time, so that counts stay equal: the heaviest goes to the lightest rank
    for begin in range(0, len(order), world_size):
        lightest = sorted(range(world_size), key=lambda r: (loads[r], r))
        for rank, c in zip(lightest, order[begin : begin + world_size], strict=False):
            assigned[rank].append(c)
            loads[rank] += weights[c]
    while max(loads) > goal and _exchange(weights, assigned, loads, loads.index(max(loads))):
        pass
    return assigned


def _exchange(weights: list[int], assigned: list[list[int]], loads: list[int], heavy: int) -> bool:
    """Swap one chunk of the heaviest rank so that the heavier of the two gets lightest; False when nothing helps."""
    found: tuple[int, int, int, int] | None = None
    mine = sorted(assigned[heavy], key=lambda c: (weights[c], c))
    for other in range(len(loads)):
        surplus = loads[heavy] - loads[other]
        if other == heavy or surplus <= 1:
            continue
        theirs = sorted(assigned[other], key=lambda c: (weights[c], c))
        values = [weights[c] for c in theirs]
        for c in mine:
            # the ideal partner is lighter by half the surplus; its neighbours in weight are the only candidates
            at = bisect_left(values, weights[c] - surplus / 2)
            for k in (at - 1, at):
                if 0 <= k < len(theirs) and 0 < (moved := weights[c] - values[k]) < surplus:
                    peak = max(loads[heavy] - moved, loads[other] + moved)
                    if found is None or peak < found[0]:
                        found = (peak, other, c, theirs[k])
    if found is None:
        return False
    _, other, mine_out, theirs_out = found
    moved = weights[mine_out] - weights[theirs_out]
    assigned[heavy][assigned[heavy].index(mine_out)] = theirs_out
    assigned[other][assigned[other].index(theirs_out)] = mine_out
    loads[heavy] -= moved
    loads[other] += moved
    return True
