"""Mixes of document lengths, by which placements are measured."""

from __future__ import annotations

import math
import random

K = 1024
MIXES: dict[str, tuple[tuple[int, int, float], ...]] = {
    # "real-world varlen seqlen distribution" of the benchmarks of MagiAttention (exps/attn/run_benchmark.py): a long tail
    "long-tail": (
        (1, 2 * K, 0.16),
        (2 * K, 4 * K, 0.05),
        (4 * K, 8 * K, 0.04),
        (8 * K, 16 * K, 0.06),
        (16 * K, 32 * K, 0.08),
        (32 * K, 64 * K, 0.21),
        (64 * K, 128 * K, 0.4),
        (128 * K, 256 * K, 0.2),
        (256 * K, 512 * K, 0.05),
        (512 * K, 1024 * K, 0.04),
        (1024 * K, 2048 * K, 0.01),
        (2048 * K, 4096 * K, 0.01),
    ),
    # the simple distribution of its benchmark of kernels (exps/attn): many short documents
    "short": ((1, K, 0.4), (K, 2 * K, 0.3), (2 * K, 4 * K, 0.2), (4 * K, 8 * K, 0.1)),
    # lognormal with a mean of 1,850 tokens, as `bench ring --masks documents` packs them
    "lognormal": (),
}
"""Buckets of lengths, with weights, by the name of the mix."""


def draw(mix: str, count: int, *, longest: int, seed: int = 0) -> list[int]:
    """Return the lengths of documents of a mix, none longer than `longest`: longer ones are drawn again.

    Example:
        >>> draw("short", 3, longest=4096)
        [3770, 989, 1853]
    """
    source, found = random.Random(seed), list[int]()
    buckets = MIXES[mix]
    while len(found) < count:
        if buckets:
            low, high, _ = source.choices(buckets, weights=[weight for *_, weight in buckets])[0]
            length = source.randrange(low, high)
        else:
            length = 1 + int(source.lognormvariate(math.log(900), 1.2))
        if length <= longest:
            found.append(length)
    return found
