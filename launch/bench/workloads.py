"""What is computed when attention is measured: masks, lengths, inputs, and how many operations they stand for.

Owns the measured problems and the formula of FLOPs. Refuses to know who computes them, and how time is taken.

Note [FLOPs]
    Forward: 4 * b * h * d * pairs (two matrix products, a multiplication and an addition each), backward 2.5 times that
    (five products), forward and backward 3.5 times. `pairs` counts the (query, key) pairs the mask lets through and
    nothing else. A rank's share is the total over the number of ranks, whatever the layout gives it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ringattn.launch.check.attention import DTYPES

MaskName = Literal["full", "causal", "window", "documents"]
DTypeName = Literal["bf16", "fp16", "fp32", "fp64"]
FACTORS = {"forward": 1.0, "backward": 2.5, "both": 3.5}
"""FLOPs of a direction as multiples of the forward's (Note [FLOPs])."""


@dataclass(frozen=True)
class Problem:
    """One attention: what everybody who is timed computes.

    Attributes:
        mask: One of the four kinds; window and documents are causal too.
        seq_len: Tokens of the whole sequence.
        batch: Batch elements.
        heads: Query heads.
        kv_heads: Key/value heads.
        head_dim: Of q, k and v.
        dtype: Of q, k and v.
        window: Tokens to the left under the window mask.
        document: Tokens of each document; 0 for documents as `pack_documents` draws them.
    """

    mask: MaskName
    seq_len: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: DTypeName
    window: int
    document: int = 0

    @property
    def documents(self) -> tuple[int, ...] | None:
        """Boundaries of packed documents, if the mask has any."""
        if self.mask != "documents":
            return None
        if self.document:
            return (*range(0, self.seq_len, self.document), self.seq_len)
        return pack_documents(self.seq_len)

    @property
    def options(self) -> dict[str, Any]:
        """The mask as keywords of `ring_attention` (documents belong to the sharding)."""
        if self.mask == "full":
            return {}
        return {"causal": True} | ({"window": (self.window, 0)} if self.mask == "window" else {})

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs of one batch element."""
        return visible_pairs(self.mask, self.seq_len, self.window, self.documents)

    @property
    def flops(self) -> int:
        """Forward FLOPs (Note [FLOPs])."""
        return 4 * self.batch * self.heads * self.head_dim * self.pairs


def pack_documents(seq_len: int) -> tuple[int, ...]:
    """Boundaries of documents as packed training data has them: many short, a few long, 1850 tokens on average.

    Always the same documents; the last one is cut where the sequence ends.
    """
    draw, ends = random.Random(0), [0]
    while ends[-1] < seq_len:
        ends.append(min(seq_len, ends[-1] + 1 + int(draw.lognormvariate(math.log(900), 1.2))))
    return tuple(ends)


def visible_pairs(mask: MaskName, seq_len: int, window: int, documents: Sequence[int] | None = None) -> int:
    """Counts the (query, key) pairs a mask lets through.

    Args:
        mask: "full", or one of "causal", "window" and "documents", which are all causal.
        seq_len: Tokens.
        window: Under "window": a query at i sees keys i - window .. i.
        documents: Under "documents": their cumulative boundaries.

    Returns:
        The count.

    Example:
        >>> visible_pairs("causal", 4, 0)
        10
        >>> visible_pairs("window", 4, 1)
        7
    """
    if mask == "full":
        return seq_len * seq_len
    cuts = documents if mask == "documents" and documents is not None else (0, seq_len)
    reach = window + 1 if mask == "window" else seq_len
    lengths = [stop - start for start, stop in itertools.pairwise(cuts)]
    return sum(min(n, reach) * (min(n, reach) + 1) // 2 + max(0, n - reach) * reach for n in lengths)


def visible_rows(problem: Problem, start: int, stop: int, device: torch.device) -> Tensor:
    """The mask of the queries start .. stop - 1 over all keys, straight from its definition: boolean `1 s n`."""
    i = torch.arange(start, stop, device=device)[:, None]
    j = torch.arange(problem.seq_len, device=device)[None, :]
    visible = torch.ones(stop - start, problem.seq_len, dtype=torch.bool, device=device)
    if problem.mask != "full":
        visible &= j <= i
    if problem.mask == "window":
        visible &= i - problem.window <= j
    if problem.documents is not None:
        owner = document_of(problem, device)
        visible &= owner[start:stop, None] == owner[None, :]
    return visible[None]


def document_of(problem: Problem, device: torch.device) -> Tensor:
    """The number of the document each position lies in: `n` int64."""
    ends = torch.tensor((problem.documents or (0, problem.seq_len))[1:], device=device)
    return torch.bucketize(torch.arange(problem.seq_len, device=device), ends, right=True)


def same_work(problem: Problem, world_size: int) -> Problem:
    """The shortest problem under the same mask with at least a rank's share of the pairs."""
    low, high = 1, problem.seq_len
    while low < high:
        middle = (low + high) // 2
        if dataclasses.replace(problem, seq_len=middle).pairs * world_size >= problem.pairs:
            high = middle
        else:
            low = middle + 1
    return dataclasses.replace(problem, seq_len=low)


def draw_inputs(problem: Problem, rows: int, device: torch.device, seed: int = 0) -> list[Tensor]:
    """q, k, v and do of `rows` tokens, `b s h d`; the first three require gradients."""
    generator = torch.Generator(device).manual_seed(seed)
    drawn = []
    for heads in (problem.heads, problem.kv_heads, problem.kv_heads, problem.heads):
        shape = (problem.batch, rows, heads, problem.head_dim)
        x = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(DTYPES[problem.dtype])
        drawn.append(x.requires_grad_(len(drawn) < 3))
    return drawn


def teraflops(flops: float, ms: float) -> float:
    """10^12 operations per second."""
    return flops / ms / 1e9
