"""Attention problems that benches measure: masks, lengths, inputs, and the FLOPs they stand for.

Note [FLOPs]
    Forward: 4 * b * h * d * pairs (two matrix products, a multiplication and an addition each), backward 2.5 times that
    (five products), forward and backward 3.5 times. Where v has dv columns, three of the seven products have dv in place of d,
    one of them in the forward. `pairs` counts the visible (query, key) pairs only. A rank's share is
    the total over the number of ranks, whatever the layout gives it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ringattn import masks
from ringattn.launch.check.attention import DTYPES
from ringattn.launch.common.session import Session
from ringattn.launch.train.metrics import mfu, peak_flops
from ringattn.masks import Mask
from ringattn.plan.layouts import make_shards
from ringattn.plan.mask import MaskUnion, short_mask
from ringattn.plan.ring_plan import make_plan, moved_rows

MaskName = Literal[
    "full", "causal", "window", "documents", "varlen", "tree", "sinks", "spans", "blocks_50", "blocks_12"
]
PACKED: tuple[MaskName, ...] = ("documents", "varlen")
UNIONS: tuple[MaskName, ...] = ("tree", "sinks", "spans", "blocks_50", "blocks_12")
"""Masks of several intervals, or of blocks."""
SHARES: dict[MaskName, float] = {"blocks_50": 0.5, "blocks_12": 0.125}
"""Visible part of the blocks below the diagonal."""
LENGTHS = {
    (0, 10): 30254,
    (11, 50): 391188,
    (51, 100): 699596,
    (101, 200): 1377757,
    (201, 500): 3794735,
    (501, 1024): 3316785,
    (1025, 2048): 2106566,
    (2049, 4096): 988525,
    (4097, 8192): 410002,
    (8193, 16384): 173574,
    (16385, 32768): 115007,
    (32769, 65536): 18428,
    (65537, 131072): 22513,
    (131073, 196608): 18284,
}
"""Documents of a training set by their tokens, by ranges: doc_length_distribution.csv of MagiAttention's benchmark."""
ANSWERS, IMAGES, IMAGE_TOKENS, SINKS, BLOCK = 16, 16, 576, 4, 128
DTypeName = Literal["bf16", "fp16", "fp32", "fp64"]
FACTORS = {"forward": 1.0, "backward": 2.5, "both": 3.5}
"""FLOPs of a direction as multiples of the forward's (Note [FLOPs])."""


@dataclass(frozen=True)
class Problem:
    """One attention that all implementations compute.

    Attributes:
        mask: Window, documents and varlen are causal, too. varlen: documents of the lengths LENGTHS, as MagiAttention's benchmark
            of context parallelism packs them. tree: a prompt of half the tokens and ANSWERS answers of equal length; sinks:
            the window and SINKS first tokens; spans: causal, but IMAGES images of IMAGE_TOKENS see all of themselves; blocks_50 and
            blocks_12: a random part of the causal blocks of BLOCK tokens, the diagonal among them.
        window: Tokens to the left under the window mask.
        document: Tokens of each document, under varlen of the longest; 0 for documents as `pack_documents` draws them.
        v_head_dim: None: head_dim.
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
    v_head_dim: int | None = None

    @property
    def head_dims(self) -> tuple[int, int]:
        """Head dims of q and k, and of v."""
        return self.head_dim, self.v_head_dim or self.head_dim

    @property
    def documents(self) -> tuple[int, ...] | None:
        """Boundaries of packed documents, if the mask has any."""
        if self.mask == "varlen":
            return sample_documents(self.seq_len, self.document)
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
        if self.mask in UNIONS:
            return {"mask": self.union}
        return {"causal": True} | ({"window": (self.window, 0)} if self.mask == "window" else {})

    @property
    def union(self) -> Mask:
        """The mask as an expression, if it is one of UNIONS."""
        n = self.seq_len
        if self.mask == "tree":
            answer = n // 2 // ANSWERS
            return masks.tree([None] + [0] * ANSWERS, [n - ANSWERS * answer] + [answer] * ANSWERS)
        if self.mask == "sinks":
            return masks.causal() & (masks.sinks(SINKS) | masks.window(self.window))
        if self.mask == "spans":
            return masks.causal() | masks.spans(self.images)
        return masks.causal() & masks.blocks(self.block_table, BLOCK)

    @property
    def images(self) -> tuple[tuple[int, int], ...]:
        """First token and end of each image, at equal distances."""
        length = min(IMAGE_TOKENS, self.seq_len // IMAGES)
        return tuple((a, a + length) for a in (self.seq_len * k // IMAGES for k in range(IMAGES)))

    @property
    def block_table(self) -> Tensor:
        """Blocks of queries x blocks of keys, bool on the CPU; always the same."""
        blocks = -(-self.seq_len // BLOCK)
        drawn = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(0)) < SHARES[self.mask]
        return (drawn | torch.eye(blocks, dtype=torch.bool)).tril()

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs of one batch element."""
        return mask_of(self).pairs(0, self.seq_len)

    @property
    def flops(self) -> int:
        """Forward FLOPs (Note [FLOPs])."""
        return 2 * self.batch * self.heads * sum(self.head_dims) * self.pairs

    @property
    def backward_flops(self) -> int:
        """Backward FLOPs (Note [FLOPs])."""
        d, dv = self.head_dims
        return 2 * self.batch * self.heads * (3 * d + 2 * dv) * self.pairs


def pack_documents(seq_len: int) -> tuple[int, ...]:
    """Boundaries of documents as packed training data has them: many short, a few long, 1850 tokens on average; always the same."""
    draw, ends = random.Random(0), [0]
    while ends[-1] < seq_len:
        ends.append(min(seq_len, ends[-1] + 1 + int(draw.lognormvariate(math.log(900), 1.2))))
    return tuple(ends)


def sample_documents(seq_len: int, longest: int) -> tuple[int, ...]:
    """Boundaries of documents drawn from LENGTHS, each as long as the middle of its range; always the same.

    Longer ones are cut into pieces of `longest` tokens and a rest, which are drawn like documents of their own.
    """
    pieces = collections.Counter[int]()
    for bounds, count in LENGTHS.items():
        whole, rest = divmod(sum(bounds) // 2, longest)
        pieces.update({longest: whole * count, rest: count})
    del pieces[0]
    draw, ends = random.Random(0), [0]
    while ends[-1] < seq_len:
        [length] = draw.choices(list(pieces), list(pieces.values()))
        ends.append(min(seq_len, ends[-1] + length))
    return tuple(ends)


def visible_rows(problem: Problem, start: int, stop: int, device: torch.device) -> Tensor:
    """Return the mask of the queries start .. stop - 1 over all keys, from its definition: boolean `1 s n`."""
    i = torch.arange(start, stop, device=device)[:, None]
    j = torch.arange(problem.seq_len, device=device)
    return mask_rule(problem, device)(i, j).expand(1, stop - start, problem.seq_len)


def mask_rule(problem: Problem, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the definition of a mask as a function of positions of queries and keys, which knows no terms."""
    n, left, name = problem.seq_len, problem.window, problem.mask
    if problem.documents:
        ends = torch.tensor(problem.documents[1:], device=device)
        owner = torch.bucketize(torch.arange(n, device=device), ends, right=True)
        return lambda i, j: (i >= j) & (owner[i] == owner[j])
    if name == "tree":
        answer = n // 2 // ANSWERS
        prompt = n - ANSWERS * answer
        node = (torch.arange(n, device=device) - prompt).div(answer, rounding_mode="floor").clamp(min=-1)
        return lambda i, j: (i >= j) & ((j < prompt) | (node[i] == node[j]))
    if name == "spans":
        image = -torch.arange(1, n + 1, device=device)  # tokens of no image are alone
        for number, (start, stop) in enumerate(problem.images):
            image[start:stop] = number
        return lambda i, j: (i >= j) | (image[i] == image[j])
    if name in SHARES:
        table = problem.block_table.to(device)
        return lambda i, j: (i >= j) & table[i // BLOCK, j // BLOCK]
    return {
        "full": lambda i, j: (i >= 0) & (j >= 0),
        "causal": lambda i, j: i >= j,
        "window": lambda i, j: (i >= j) & (i - j <= left),
        "sinks": lambda i, j: (i >= j) & ((j < SINKS) | (i - j <= left)),
    }[name]


def same_work(problem: Problem, world_size: int) -> Problem:
    """Return the shortest problem under the same mask with at least a rank's share of the pairs."""
    low, high = 1, problem.seq_len
    while low < high:
        middle = (low + high) // 2
        if dataclasses.replace(problem, seq_len=middle).pairs * world_size >= problem.pairs:
            high = middle
        else:
            low = middle + 1
    return dataclasses.replace(problem, seq_len=low)


def mask_of(problem: Problem) -> MaskUnion:
    """Return the mask of a problem."""
    if problem.mask in UNIONS:
        return MaskUnion(problem.seq_len, problem.seq_len, problem.union, None)
    return short_mask(problem.seq_len, documents=problem.documents, **problem.options)


def resolve_layouts(layouts: Sequence[str], problem: Problem, world_size: int) -> tuple[str, ...]:
    """Return layouts, "best" being balanced for documents, zigzag, or under a window the one of two that moves fewer rows.

    Example:
        >>> resolve_layouts(("zigzag", "best"), Problem("window", 4096, 1, 1, 1, 16, "bf16", window=7), 4)
        ('zigzag', 'contiguous')
    """

    def rows(layout: str) -> int:
        shards = make_shards(layout, problem.seq_len, world_size, mask)
        return moved_rows(make_plan(shards, shards, mask, "keys"))

    best, mask = "balanced" if problem.documents else "zigzag", mask_of(problem)
    if "best" in layouts and problem.mask == "window":
        best = min(("contiguous", "zigzag"), key=rows)
    return tuple(dict.fromkeys(best if one == "best" else one for one in layouts))


def draw_inputs(problem: Problem, rows: int, device: torch.device, seed: int = 0) -> list[Tensor]:
    """Draw q, k, v and do of `rows` tokens, `b s h d`; the first three require gradients."""
    generator = torch.Generator(device).manual_seed(seed)
    drawn = []
    d, dv = problem.head_dims
    for heads, width in ((problem.heads, d), (problem.kv_heads, d), (problem.kv_heads, dv), (problem.heads, dv)):
        shape = (problem.batch, rows, heads, width)
        x = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(DTYPES[problem.dtype])
        drawn.append(x.requires_grad_(len(drawn) < 3))
    return drawn


class Inputs:
    """Tensors of a problem, drawn once and kept in each memory layout that an implementation takes."""

    def __init__(self, problem: Problem, device: torch.device) -> None:
        self.problem, self.device = problem, device
        self._tensors: dict[str, list[Tensor]] = {}

    def take(self, layout: str) -> list[Tensor]:
        """Return q, k, v and do as "bshd", "bhsd", or "thd" (batch elements one after the other)."""
        if layout not in self._tensors:
            if layout == "bshd":
                self._tensors[layout] = draw_inputs(self.problem, self.problem.seq_len, self.device)
            else:
                drawn = [x.detach() for x in self.take("bshd")]
                same = [x.transpose(1, 2).contiguous() if layout == "bhsd" else x.flatten(0, 1) for x in drawn]
                self._tensors[layout] = [x.requires_grad_(index < 3) for index, x in enumerate(same)]
        return self._tensors[layout]


def teraflops(flops: float, ms: float) -> float:
    """10^12 operations per second."""
    return flops / ms / 1e9


def own_stream(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context with a stream of its own: graphs cannot be captured from the default stream."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else contextlib.nullcontext()


def free_memory() -> None:
    """Free the memory of one measurement before the next begins."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def mfu_percent(flops: float, seconds: float, session: Session, dtype: torch.dtype) -> float | None:
    """Return the share of the datasheet's FLOP/s that all ranks reach; None on a device without one."""
    device = torch.cuda.get_device_name(session.device) if session.device.type == "cuda" else "CPU"
    share = mfu(flops, seconds, session.world_size, peak_flops(device, dtype))
    return None if share is None else 100 * share


class PeakMemory:
    """Peak memory of a rank from here on, in torch's allocator and outside; earlier allocations count unless subtracted."""

    def __init__(self, session: Session, *, subtract_allocated: bool = False) -> None:
        self._session, self._device = session, session.device
        if self._device.type == "cuda":
            self._before = torch.cuda.memory_allocated(self._device) if subtract_allocated else 0
            self._outside = self._outside_torch()
            self.reset()

    def _outside_torch(self) -> int:
        """Return the bytes in use outside of torch's allocator, such as memory that ranks map into each other."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free - torch.cuda.memory_reserved(self._device)

    def reset(self) -> None:
        """Forget the peak so far; on GPUs."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def gib(self) -> float | None:
        """Return the peak of the rank that holds most; None on a CPU. Collective."""
        if self._device.type != "cuda":
            return None
        peak = torch.cuda.max_memory_allocated(self._device) - self._before
        peak += max(0, self._outside_torch() - self._outside)
        return self._session.maximum([peak / 2**30])[0]
