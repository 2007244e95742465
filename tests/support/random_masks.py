"""Random masks and layouts, and the definition of visibility one pair at a time: the oracle of the integer tests."""

from __future__ import annotations

import math
import random
from itertools import pairwise

from hypothesis import strategies as st

from ringattn.plan.layouts import Run, Shard, balanced, contiguous, segmented, striped, zigzag
from ringattn.plan.mask import MaskAxis
from tests.support.short_mask import ShortMask


def is_visible(mask: ShortMask, i: int, j: int, b: int = 0) -> bool:
    """Whether query i sees key j, straight from the definitions; knows nothing of intervals."""
    if mask.causal and not (j <= i or j < mask.prefix_len):
        return False
    left, right = mask.window or (None, None)
    if (left is not None and j < i - left) or (right is not None and j > i + right):
        return False
    if mask.documents is not None:
        stretches = [range(a, e) for a, e in pairwise(mask.documents)]
        if not any(i in stretch and j in stretch for stretch in stretches):
            return False
    if mask.chunk_len is not None:
        begin = 0
        if mask.chunks_restart:
            begin = max([0, *(a for a in mask.documents or () if a <= i)])
            begin = begin if mask.lengths is None else max(begin, mask.lengths[b][0])
        if (i - begin) // mask.chunk_len != (j - begin) // mask.chunk_len:
            return False
    if mask.lengths is not None:
        start, stop = mask.lengths[b]
        return start <= i < stop and start <= j < stop
    return True


def seen(mask: ShortMask, axis: MaskAxis, x: int, b: int = 0) -> tuple[int, int]:
    """The interval [lo, hi) of the one term of a mask that a row sees."""
    [term] = mask.intervals(axis, mask.variant_of[b])
    lower, upper = term.bounds
    return lower.at(x), upper.at(x)


def visible_times(mask: ShortMask, i: int, j: int) -> int:
    """In how many batch elements query i sees key j."""
    return sum(is_visible(mask, i, j, b) for b in range(mask.batch_size))


def positions(shard: Shard) -> list[int]:
    """The positions of a shard's rows, in row order."""
    return [run.start + run.stride * i for run in shard for i in range(run.length)]


def boundaries(seq_len: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Documents that divide seq_len tokens, empty ones included."""
    inner = st.lists(st.integers(0, seq_len), max_size=6).map(sorted)
    return inner.map(lambda cuts: (0, *cuts, seq_len))


@st.composite
def masks(draw: st.DrawFn, max_len: int = 32, cross: bool = True) -> ShortMask:
    """Any mask of up to max_len tokens a side, with all features and their intersections."""
    seq_len = draw(st.integers(1, max_len))
    kv_len = draw(st.integers(1, max_len)) if cross and draw(st.booleans()) else seq_len
    same = seq_len == kv_len
    # sums of some of these and a position are no integers of 64 bits
    wide = st.sampled_from([2**31 - 1, 2**63 - 2, 2**70])
    side = st.none() | st.integers(0, 12) | wide
    causal = draw(st.booleans())
    stretch = st.tuples(st.integers(0, seq_len), st.integers(0, seq_len)).map(lambda pair: (min(pair), max(pair)))
    return ShortMask(
        seq_len,
        kv_len,
        causal=causal,
        window=draw(st.none() | st.tuples(side, side)),
        documents=draw(st.none() | boundaries(seq_len)) if same else None,
        prefix_len=draw(st.integers(0, max_len + 4) | wide) if causal else 0,
        chunk_len=draw(st.none() | st.integers(1, 20) | wide),
        lengths=draw(st.none() | st.lists(stretch, min_size=1, max_size=3).map(tuple)) if same else None,
        chunks_restart=draw(st.booleans()),
    )


@st.composite
def layouts(draw: st.DrawFn, seq_len: int, world_size: int) -> tuple[Shard, ...]:
    """Any layout of seq_len tokens; balanced ones by random weights, so that any assignment of chunks occurs."""
    name = draw(st.sampled_from(["contiguous", "striped", "zigzag", "balanced", "segments"]))
    if name == "segments":
        edges = sorted({0, seq_len, *draw(st.lists(st.integers(0, seq_len), max_size=3))})
        return segmented([b - a for a, b in pairwise(edges)], world_size)
    if name != "balanced":
        return {"contiguous": contiguous, "striped": striped, "zigzag": zigzag}[name](seq_len, world_size)
    rng = random.Random(draw(st.integers(0, 2**16)))
    weights = [rng.randint(0, 9) for _ in range(seq_len)]
    chunks = draw(st.integers(1, 4))
    return balanced(seq_len, world_size, lambda a, b: sum(weights[a:b]), chunks_per_rank=chunks, min_chunk_len=1)


@st.composite
def runs(draw: st.DrawFn, limit: int) -> Run:
    """Any run of positions below limit."""
    start = draw(st.integers(0, limit - 1))
    stride = draw(st.integers(1, 9))
    return Run(start, stride, draw(st.integers(1, (limit - 1 - start) // stride + 1)))


@st.composite
def run_shards(draw: st.DrawFn, limit: int) -> Shard:
    """Any shard: ascending runs of any strides, more mixed than a layout makes them."""
    shard, begin = [], 0
    while begin < limit and len(shard) < 4:
        run = draw(runs(limit - begin))
        shard.append(Run(begin + run.start, run.stride, run.length))
        begin = shard[-1].last + 1
    return tuple(shard)


def log_normal_documents(seq_len: int, mean: int, sigma: float, seed: int) -> tuple[int, ...]:
    """Packed documents with log-normal lengths, as in text corpora; the last one is cut at seq_len."""
    rng, edges = random.Random(seed), [0]
    while edges[-1] < seq_len:
        length = max(1, round(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)))
        edges.append(min(seq_len, edges[-1] + length))
    return tuple(edges)


def few_long_documents(seq_len: int, seed: int) -> tuple[int, ...]:
    """Packed documents: many of up to 800 tokens, and one in 250 about an eighth of the sequence long."""
    rng, edges = random.Random(seed), [0]
    while edges[-1] < seq_len:
        is_long = rng.random() < 1 / 250
        length = int(seq_len / 8 * rng.uniform(0.5, 1.5)) if is_long else rng.randint(20, 800)
        edges.append(min(seq_len, edges[-1] + length))
    return tuple(edges)
