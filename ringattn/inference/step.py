"""How one call of a model brings new tokens to a cache: who computes which rows, where they are kept, what they see.

Owns `Step`, which is made once per call and serves all layers. Refuses to know keys and values themselves (cache.py) and how
attention is computed (attention.py).

Note [Two modes]
    prefill: the rows of the new tokens are shared out. A rank computes the rows that it will keep, so their keys need not move to be
        kept. Requests stand one after another in one virtual sequence, each a document: its tokens of before, then the new ones; what is
        computed are rows of that sequence. A batch of equally long requests (`alike`) keeps its batch dimension instead.
    decode: each request brings the same few tokens, every rank computes them all, and whoever keeps a token writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ringattn.inference.pages import Block, Piece
from ringattn.kernels.decode import PageTable
from ringattn.layout import Run, Shard
from ringattn.sharding import Sharding, positions_of

if TYPE_CHECKING:
    from ringattn.inference.cache import PagedKVCache

MOST_DECODED = 16
"""New tokens per request up to which a step may be one of decoding."""


@dataclass(frozen=True, eq=False)
class Step:
    """One call of a model, seen from this rank (Note [Two modes]).

    Attributes:
        cache: What the new tokens are added to.
        mode: "prefill" or "decode".
        requests: Who brings tokens.
        counts: How many each.
        lengths: Tokens of each request after the step.
        firsts: The first token of each request that is seen.
        batch: The model's batch: 1 when requests are packed, else one per request.
        rows: Rows per batch element that this rank computes; may be 0.
        positions: `batch rows` int64 on the device: the place of each row in its request, which is what rotary embeddings want.
        taken: `rows` int64 on the device: which of the new tokens this rank computes, packed one request after another (for a batch: of each request).
        slots: `batch rows` int64 on the device: page * page_size + row where a row's keys are kept here; -1: on another rank.
        last_rows: Where the last new token of each request is among this rank's rows, as (batch element, row), or None on other ranks.
        sharding: prefill: who computes which rows of the virtual sequence.
        kv_sharding: prefill: who keeps which.
        kept_slots: prefill: `batch t` int64 on the device: where the keys of kv_sharding's rows of this rank are.
        table: decode: the blocks of this rank.
        met: Not empty once ranks have compared the step.
        calls: What was decided about calls with this step, by their options and shapes (attention.py).
    """

    cache: PagedKVCache
    mode: Literal["prefill", "decode"]
    requests: tuple[int, ...]
    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    firsts: tuple[int, ...]
    batch: int
    rows: int
    positions: Tensor
    taken: Tensor
    slots: Tensor
    last_rows: tuple[tuple[int, int] | None, ...]
    sharding: Sharding | None = None
    kv_sharding: Sharding | None = None
    kept_slots: Tensor | None = None
    table: PageTable | None = None
    met: list[bool] = field(default_factory=list, repr=False)
    calls: dict[object, Any] = field(default_factory=dict, repr=False)
    memo: dict[object, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @property
    def moved(self) -> tuple[str, ...]:
        """What went round the ring in each kind of call of this step so far: "keys" or "queries"; empty for decode."""
        return tuple(known.moves for known in self.calls.values() if hasattr(known, "moves"))

    def take(self, tokens: Tensor, dim: int = 1) -> Tensor:
        """This rank's rows of the new tokens.

        Args:
            tokens: All new tokens: of a packed prefill one request after another in `dim`; otherwise one request per batch element.
            dim: Where they are.
        """
        return tokens if self.mode == "decode" else tokens.index_select(dim, self.taken.to(tokens.device))

    @cached_property
    def seen_from(self) -> Tensor:
        """Decode: `batch rows` int32 on the device: the first token that each row may see."""
        firsts = torch.tensor(self.firsts, dtype=torch.int32).unsqueeze(1).expand(-1, self.rows)
        return firsts.to(self.positions.device)

    def bounds(self, causal: bool, window: tuple[int | None, int | None] | None) -> tuple[Tensor, Tensor]:
        """Decode: what each row sees, lo <= position < hi, as `batch rows` int32 on the device; kept for all layers that ask alike."""
        known = self.memo.get((causal, window))
        if known is None:
            here = self.positions.to(torch.int32)
            ends = torch.tensor(self.lengths, dtype=torch.int32, device=here.device).unsqueeze(1)
            left, right = (None, None) if window is None else window
            lo = self.seen_from if left is None else torch.maximum(self.seen_from, here - left)
            hi = torch.minimum(ends, here + 1) if causal else ends.expand_as(here)
            hi = hi if right is None else torch.minimum(hi, here + right + 1)
            known = lo.contiguous(), torch.maximum(lo, hi).contiguous()
            self.memo[causal, window] = known
        return known


def make_step(cache: PagedKVCache, requests: Sequence[int], counts: Sequence[int], pieces: Sequence[Sequence[Piece]], mode: Literal["prefill", "decode"], alike: bool) -> Step:
    """The step that brings tokens for which room was made.

    Args:
        cache: Where to.
        requests: Who brings tokens.
        counts: How many each.
        pieces: Where each request's new tokens go.
        mode: How they are computed.
        alike: prefill: the requests keep a batch dimension.
    """
    books, rank = cache.pages, cache.ring.rank
    lengths = tuple(map(books.length, requests))
    firsts = tuple(map(books.first, requests))
    blocks = [books.blocks(request) for request in requests]
    common = (cache, mode, tuple(requests), tuple(counts), lengths, firsts)
    if mode == "decode":
        return _decode_step(common, rank, counts[0], pieces, blocks)
    if alike:
        owners = {tuple((block.rank, block.start, block.length) for block in of_one) for of_one in blocks}
        if len(owners) > 1:
            raise NotImplementedError(
                f"a batch of {len(requests)} requests must be kept alike to be prefilled together, got requests that grew apart; prefill them one by one"
            )
    elif any(firsts):
        raise NotImplementedError(f"requests with padding in front must be alike, got firsts {firsts}; pack tokens without padding")
    documents = None if alike else tuple(accumulate(lengths, initial=0))
    places = (0,) * len(requests) if alike else tuple(accumulate(lengths[:-1], initial=0))
    chosen = range(1 if alike else len(requests))
    total = lengths[0] if alike else sum(lengths)
    world = range(cache.ring.world_size)
    computed = tuple(_merge([(places[i] + p.start, p.length) for i in chosen for p in pieces[i] if p.rank == r]) for r in world)
    kept = tuple(_merge([(places[i] + b.start, b.length) for i in chosen for b in blocks[i] if b.rank == r]) for r in world)
    device = cache.device
    sharding = Sharding(total, "part", computed, rank, documents, ring=cache.ring, device=device)
    kv_sharding = Sharding(total, "part", kept, rank, documents, ring=cache.ring, device=device)
    batch = len(requests) if alike else 1
    groups = [[i] for i in range(len(requests))] if alike else [list(range(len(requests)))]
    mine = [[(i, p) for i in group for p in pieces[i] if p.rank == rank] for group in groups]
    slots = _rows([[(p.page * cache.page_size + p.row, p.length) for _, p in group] for group in mine], device)
    positions = _rows([[(p.start, p.length) for _, p in group] for group in mine], device)
    taken_from = (0,) * len(requests) if alike else tuple(accumulate(counts[:-1], initial=0))
    before = [length - new for length, new in zip(lengths, counts, strict=True)]
    taken = _rows([[(taken_from[i] + p.start - before[i], p.length) for i, p in mine[0]]], device)[0]
    kept_slots = _rows([[(b.page * cache.page_size, b.length) for i in group for b in blocks[i] if b.rank == rank] for group in groups], device)
    return Step(
        *common,
        batch=batch,
        rows=sharding.shard_len,
        positions=positions,
        taken=taken,
        slots=slots,
        last_rows=_last_rows(mine, lengths, alike),
        sharding=sharding,
        kv_sharding=kv_sharding,
        kept_slots=kept_slots,
    )


def _decode_step(common: tuple, rank: int, new: int, pieces: Sequence[Sequence[Piece]], blocks: Sequence[tuple[Block, ...]]) -> Step:
    cache, lengths = common[0], common[4]
    batch, device, size = len(lengths), cache.device, cache.page_size
    positions = torch.tensor([[length - new + x for x in range(new)] for length in lengths])
    slots = torch.full((batch, new), -1, dtype=torch.int64)
    for i, of_one in enumerate(pieces):
        for piece in of_one:
            if piece.rank == rank:
                begin = piece.start - (lengths[i] - new)
                slots[i, begin : begin + piece.length] = piece.page * size + piece.row + torch.arange(piece.length)
    mine = [[block for block in of_one if block.rank == rank] for of_one in blocks]
    most = max(1, *map(len, mine)) if mine else 1
    table = torch.zeros(3, batch, most, dtype=torch.int32)
    for i, of_one in enumerate(mine):
        if of_one:
            table[:, i, : len(of_one)] = torch.tensor([(b.page, b.start, b.length) for b in of_one], dtype=torch.int32).T
    counts = torch.tensor(list(map(len, mine)), dtype=torch.int32)
    table = table.to(device)
    return Step(
        *common,
        batch=batch,
        rows=new,
        positions=positions.to(device),
        taken=torch.arange(new, device=device),
        slots=slots.to(device),
        last_rows=tuple((i, new - 1) for i in range(batch)),
        table=PageTable(table[0], table[1], table[2], counts.to(device)),
    )


def _last_rows(mine: Sequence[Sequence[tuple[int, Piece]]], lengths: Sequence[int], alike: bool) -> tuple[tuple[int, int] | None, ...]:
    found: list[tuple[int, int] | None] = [None] * len(lengths)
    for element, group in enumerate(mine):
        ends = accumulate(piece.length for _, piece in group)
        for (i, piece), end in zip(group, ends, strict=True):
            if piece.start + piece.length == lengths[i]:
                found[i] = (element if alike else 0, end - 1)
    return tuple(found)


def _merge(stretches: list[tuple[int, int]]) -> Shard:
    """Runs of ascending (start, length), those that touch joined."""
    runs: list[Run] = []
    for start, length in stretches:
        if runs and runs[-1].last + 1 == start:
            runs[-1] = Run(runs[-1].start, 1, runs[-1].length + length)
        else:
            runs.append(Run(start, 1, length))
    return tuple(runs)


def _rows(stretches: Sequence[Sequence[tuple[int, int]]], device: torch.device) -> Tensor:
    """The integers of (start, length) stretches, one row of stretches after another: `batch n` int64."""
    shards = [tuple(Run(start, 1, length) for start, length in row) for row in stretches]
    return torch.stack([positions_of(shard) for shard in shards]).to(device)
