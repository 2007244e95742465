"""Batch of new tokens of one call of a model: the rows of each rank, where keys are stored, and what rows see.

Note [Two modes]
    prefill: rows of the new tokens are split between ranks. A rank computes the rows that it will store, so their keys are
        not sent to be stored. Requests follow one another in one virtual sequence, each a document: its cached tokens, then
        the new ones; the rows computed are rows of that sequence. A batch of requests of the same length keeps its batch
        dimension instead.
    decode: each request brings the same few tokens, every rank computes them all, and one rank stores each of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import accumulate
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ringattn.inference.batch_metadata import BatchMetadata, PackedBlocks, to_device
from ringattn.inference.block_table import BlockTable, RankSpan
from ringattn.inference.kv_pool import KVPool
from ringattn.inference.page_allocator import PageAllocator
from ringattn.kernels.decode.dispatch import PageTable
from ringattn.plan.expressions import Causal, Mask
from ringattn.plan.layouts import Run, Shard
from ringattn.plan.mask import fold_mask
from ringattn.plan.options import resolve_integer
from ringattn.plan.sharding import Sharding, positions_of
from ringattn.tensor_checks import check_tensor

MAX_DECODE_TOKENS = 16
"""Maximum number of new tokens per request in a decode batch."""
_UPLOADED = frozenset(
    {Causal(), *(fold_mask(causal=True, window=window) for window in (None, (None, None), (None, 0)))}
)
"""Masks whose bounds come with the upload of a batch."""


@dataclass(eq=False)
class ForwardBatch:
    """One call of a model, seen from this rank (Note [Two modes]).

    Attributes:
        cache: Cache that the new tokens are added to.
        mode: "prefill" or "decode".
        requests: Requests that bring tokens.
        counts: New tokens of each request.
        lengths: Tokens of each request, the new ones included.
        firsts: First token of each request that is not padding.
        batch: The model's batch: 1 when requests are packed, else one per request.
        rows: Rows per batch element that this rank computes; may be 0.
        positions: `batch rows` int64 on the device: position of each row in its request, for rotary embeddings.
        taken: `rows` int64 on the device: which of the new tokens this rank computes, packed one request after another (for a
            batch: of each request).
        slots: `batch rows` int64 on the device: page * page_size + row where a row's keys are stored here; -1: on another rank.
        last_rows: Where the last new token of each request is among this rank's rows, as (batch element, row), or None on other
            ranks.
        sharding: prefill: rows of the virtual sequence that each rank computes.
        kv_sharding: prefill: rows that each rank stores.
        kv_slots: prefill: `batch t` int64 on the device: slots of this rank's rows of kv_sharding.
        table: decode: blocks of this rank.
        positions32: decode: `tiles` int32 on the device: positions.
        starts: decode: `tiles` int32 on the device: the first token that each row may see.
        ends: decode: `tiles` int32 on the device: tokens of the row's request.
        causal_ends: decode: `tiles` int32 on the device: where a causal mask ends: one past the row, at least starts.
        known: `PageAllocator.changes` when the batch was last found to be current.
        compared: Ranks have compared the batch, as far as they do (consistency.py).
        calls: Resolved calls by options and shapes, one per kind (attention.py); its layers share what `once` finds.
        ranks: The batch of each virtual rank of this process, whose rows follow one another here; in decode each has all. Empty
            where the ring has no virtual ranks.
        pieces: decode: number of pieces and rows of each, if requests are packed (Note [Pieces] of static_batch.py); else None.
    """

    cache: KVPool
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
    kv_slots: Tensor | None = None
    table: PageTable | None = None
    positions32: Tensor | None = None
    starts: Tensor | None = None
    ends: Tensor | None = None
    causal_ends: Tensor | None = None
    found_bounds: dict[Mask, list[tuple[Tensor, Tensor]]] = field(default_factory=dict, repr=False)
    current_bounds: set[Mask] = field(default_factory=set, repr=False)
    known: int = -1
    compared: bool = False
    calls: dict[object, Any] = field(default_factory=dict, repr=False)
    shared: dict[Hashable, Tensor | None] = field(default_factory=dict, repr=False)
    pieces: tuple[int, int] | None = None
    ranks: tuple[ForwardBatch, ...] = field(default=(), repr=False)

    compares_rarely: ClassVar[bool] = False
    """Whether ranks compare such batches only from time to time, also when their requests change (consistency.py)."""

    @property
    def tiles(self) -> tuple[int, int]:
        """Decode: shape of tables and bounds, as kernels take the rows: `batch rows`, or pieces."""
        return self.pieces or (self.batch, self.rows)

    @property
    def comm_modes(self) -> tuple[str, ...]:
        """Tensors sent in each kind of call of this step so far: "keys" or "queries"; empty for decode."""
        return tuple(known.comm_mode for known in self.calls.values() if known.comm_mode)

    @property
    def kv_accesses(self) -> tuple[str, ...]:
        """Access to cached rows of each kind of call of this step so far: "copies" or "pages"; empty for decode."""
        return tuple(known.kv_access for known in self.calls.values() if known.kv_access)

    def take(self, tokens: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's rows of all new tokens; in decode all of them.

        Args:
            tokens: All new tokens: for a packed prefill one request after another in `dim`, else one request per batch element.
            dim: Dimension of the tokens.

        Raises:
            ValueError: There are more or fewer tokens in `dim`, or the tensor is not dense.
            TypeError: tokens is not a tensor, or dim no integer.
            NotImplementedError: The tensor is of a subclass with its own meaning.
        """
        with self.cache.ring.propagate_errors():
            check_tensor("tokens", tokens)
            if self.mode == "decode":
                return tokens
            dim, new = resolve_integer("dim", dim), sum(self.counts if self.batch == 1 else self.counts[:1])
            if not -tokens.dim() <= dim < tokens.dim() or tokens.shape[dim] != new:
                raise ValueError(
                    f"tokens must be the {new} new tokens of the batch in dim {dim}, got shape {tuple(tokens.shape)}; "
                    "pass those that extend was told of, and no others"
                )
        return tokens.index_select(dim, self.taken.to(tokens.device))

    def taken_by_rank(self) -> list[Tensor]:
        """Return which of the new tokens each rank computes in a prefill, as `taken`, on the CPU."""
        if self.sharding is None:
            raise ValueError("taken_by_rank must be of a prefill, got decode; there every rank has all rows")
        begins = torch.tensor((0,) if self.sharding.documents is None else self.sharding.documents[:-1], device="cpu")
        counts = self.counts[: len(begins)]
        # a token's place among the new ones, less its place in the virtual sequence
        befores = [length - new for length, new in zip(self.lengths, counts, strict=False)]
        shifts = (
            torch.tensor([*accumulate(counts[:-1], initial=0)], device="cpu")
            - torch.tensor(befores, device="cpu")
            - begins
        )
        places = [positions_of(shard) for shard in self.sharding.shards]
        return [place + shifts[torch.searchsorted(begins, place, right=True) - 1] for place in places]

    def put(self, layer: int, k: Tensor, v: Tensor, *, contain: bool = False) -> tuple[Tensor, Tensor]:
        """Write the rows that are stored on this rank; on a GPU in stream order, and capturable in a CUDA graph.

        If a row of v has a NaN or an infinity, the cache stores zeros for it, and NaN for its row of k. So tokens that see it
        become NaN, and other requests are unaffected.

        Args:
            layer: Layer of the cache.
            k: `batch rows hk d`.
            v: `batch rows hk dv`.
            contain: Return copies of k and v in which such rows are changed as in the cache, instead of k and v.

        Raises:
            ValueError: The layer or a shape, dtype or device does not fit the cache, or a request of the batch was freed or
                truncated since. Other ranks raise it at their next comparison.
            TypeError: An argument is not a tensor, or the layer no integer.
            NotImplementedError: A tensor is of a subclass with its own meaning.
        """
        try:
            self.check_rows(layer, k, v)
        except Exception as error:
            # rows differ by rank, so other ranks may not raise
            self.cache.ring.raise_on_all_ranks(error)
        return self.cache.put_rows(layer, self.slots, k, v, contain=contain)

    def check_rows(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Check rows that `put` writes, and that the batch is still current; raise what `put` raises, here only."""
        self._check_current()
        self.cache.check_rows(layer, (self.batch, self.rows), k, v)

    def describe(self) -> str:
        """Return a text that is equal on two ranks if the batch is: numbers for people, and a digest of the rest."""
        if self.sharding is not None and self.kv_sharding is not None:
            owners = f"{self.sharding.text} {self.kv_sharding.text}"
        else:
            owners = [one.spans for one in self.cache.allocator.get_requests(self.requests)]
        facts = repr((self.requests, self.counts, self.lengths, self.firsts, owners))
        few = (
            f"requests {self.requests} with {self.counts} new tokens"
            if len(self.requests) <= 8
            else f"{len(self.requests)} requests"
        )
        return f"{self.mode} of {few}, digest {blake2b(facts.encode(), digest_size=8).hexdigest()}"

    def bounds(self, mask: Mask) -> list[tuple[Tensor, Tensor]]:
        """Decode: `Mask.bounds` of the new rows, `tiles` int32; computed once for all layers."""
        if self.starts is None:
            raise ValueError("bounds must be of decode, got prefill; extend with mode='decode'")
        if mask in _UPLOADED:
            assert self.causal_ends is not None, "only decode has bounds"
            return [(self.starts, self.causal_ends)]
        if mask not in self.found_bounds:
            # a static batch writes them again outside of inference mode
            with torch.inference_mode(False):
                self.found_bounds[mask] = [
                    (torch.empty_like(lo), torch.empty_like(hi)) for lo, hi in self._bounds(mask)
                ]
        if mask not in self.current_bounds:
            self._write_bounds(mask)
            # nothing runs in a capture
            if not (self.slots.is_cuda and torch.cuda.is_current_stream_capturing()):
                self.current_bounds.add(mask)
        return self.found_bounds[mask]

    @contextmanager
    def one_call(self) -> Iterator[None]:
        """Let the layers of one call of a model share results inside (`once`)."""
        yield

    def once(self, key: Hashable, find: Callable[[], Tensor | None]) -> Tensor | None:
        """Decode: compute what does not differ between layers at the first of them; None where layers of a call are not known."""
        if key not in self.shared:
            self.shared[key] = find()
        return self.shared[key]

    def _check_current(self) -> None:
        allocator = self.cache.allocator
        if self.known == allocator.changes:
            return
        here = set(allocator.requests)
        for request, length in zip(self.requests, self.lengths, strict=True):
            gone = "was freed" if request not in here else ""
            if not gone and (one := allocator.find(request)).moved_at > self.known and one.kept < length:
                gone = f"was truncated to {one.length} tokens" if one.length < length else "has other tokens"
            if gone:
                raise ValueError(
                    f"the requests of a step must be as long as it made them, got request {request} of {length} tokens, "
                    f"which {gone} since; extend again"
                )
        self.known = allocator.changes

    def _bounds(self, mask: Mask) -> list[tuple[Tensor, Tensor]]:
        found = mask.bounds(self.positions32, self.starts, self.ends)
        assert found is not None, "masks without bounds are evaluated on the host"
        return found

    def _write_bounds(self, mask: Mask) -> None:
        for targets, bounds in zip(self.found_bounds[mask], self._bounds(mask), strict=True):
            for target, bound in zip(targets, bounds, strict=True):
                target.copy_(bound)


def make_forward_batch(
    cache: KVPool, requests: Sequence[int], counts: Sequence[int], mode: Literal["prefill", "decode"], same_length: bool
) -> ForwardBatch:
    """Make the batch of new tokens whose pages were assigned; same_length: requests of a prefill keep a batch dimension."""
    if cache.ranks:
        return _batch_of_process(
            cache, [make_forward_batch(one, requests, counts, mode, same_length) for one in cache.ranks]
        )
    allocator = cache.allocator
    here = allocator.get_requests(requests)
    lengths, firsts = tuple(one.length for one in here), tuple(one.first for one in here)
    common = (cache, mode, tuple(requests), tuple(counts), lengths, firsts)
    if mode == "decode":
        shape = (len(requests), counts[0])
        # kernels need at least one column
        max_blocks = max(1, *[len(one.tables[cache.ring.rank]) for one in here])
        metadata = BatchMetadata(
            *shape, max_blocks, page_size=allocator.page_size, rank=cache.ring.rank, device=cache.device
        )
        metadata.write(here, counts, [1] * len(here), allocator.changes)
        last = tuple((i, counts[0] - 1) for i in range(len(requests)))
        return ForwardBatch(*common, *shape, **metadata.tensors(shape), last_rows=last, known=allocator.changes)
    return _prefill_step(common, same_length)


def _batch_of_process(cache: KVPool, ranks: Sequence[ForwardBatch]) -> ForwardBatch:
    """Return the batch of a process from those of its virtual ranks."""
    first, ring, each = ranks[0], cache.ring, cache.allocator.pages * cache.page_size

    def in_process(slots: Sequence[Tensor | None]) -> list[Tensor]:
        return [torch.where(x < 0, x, x + i * each) for i, x in enumerate(slots) if x is not None]

    slots = in_process([one.slots for one in ranks])
    common: dict[str, Any] = {"cache": cache, "ranks": tuple(ranks), "calls": {}}
    if first.mode == "decode":
        # one rank stores a token, and others have -1
        return replace(first, slots=torch.stack(slots).amax(0), table=None, **common)
    sharding, kv_sharding = (
        x and Sharding(x.seq_len, x.layout, x.virtual_shards, ring.rank, x.documents, ring=ring, device=cache.device)
        for x in (first.sharding, first.kv_sharding)
    )
    befores = accumulate([one.rows for one in ranks], initial=0)
    lasts = [
        [last and (last[0], before + last[1]) for last in one.last_rows]
        for one, before in zip(ranks, befores, strict=False)
    ]
    return replace(
        first,
        rows=sum(one.rows for one in ranks),
        positions=torch.cat([one.positions for one in ranks], 1),
        taken=torch.cat([one.taken for one in ranks]),
        slots=torch.cat(slots, 1),
        last_rows=tuple(next(filter(None, found), None) for found in zip(*lasts, strict=True)),
        sharding=sharding,
        kv_sharding=kv_sharding,
        kv_slots=torch.cat(in_process([one.kv_slots for one in ranks]), 1),
        **common,
    )


def _prefill_step(common: tuple, same_length: bool) -> ForwardBatch:
    cache, _, requests, counts, lengths, _ = common
    allocator, rank, world = cache.allocator, cache.ring.rank, range(cache.ring.world_size)
    befores = [length - new for length, new in zip(lengths, counts, strict=True)]
    batch = len(requests) if same_length else 1
    documents = None if same_length else tuple(accumulate(lengths, initial=0))
    # where a request begins in the virtual sequence, and its new tokens among all new ones
    origins = (0,) * batch if documents is None else documents[:-1]
    firsts_new = (0,) * batch if same_length else tuple(accumulate(counts[:-1], initial=0))
    total = lengths[0] if same_length else sum(lengths)
    # requests of one batch are on the same ranks
    distinct = range(1 if same_length else len(requests))
    new = [(i, span) for i in distinct for span in allocator.rank_spans(requests[i], befores[i])]
    kept = [(i, span) for i in distinct for span in allocator.rank_spans(requests[i])]
    sharding, kv_sharding = (
        Sharding(total, "part", _shards(found, origins, world), rank, documents, ring=cache.ring, device=cache.device)
        for found in (new, kept)
    )
    tables = [allocator.table(request, rank) for request in requests]
    added = [_since(table, before) for table, before in zip(tables, befores, strict=True)]
    shifts = [first - before for first, before in zip(firsts_new, befores, strict=True)]
    ours = PackedBlocks.of([table for table, _ in added], [skipped for _, skipped in added], shifts)
    held = PackedBlocks.of(tables)
    ints = to_device(ours.ints + held.ints, cache.device)
    pages, starts, row, skipped, shift = ours.expand(ints, sharding.shard_len * batch)
    held_pages, _, held_row = held.expand(ints[len(ours.ints) :], kv_sharding.shard_len * batch)
    positions = (starts + row).view(batch, sharding.shard_len)
    slots = (pages * cache.page_size + skipped + row).view(batch, sharding.shard_len)
    taken = (starts + row + shift)[: sharding.shard_len]
    kv_slots = (held_pages * cache.page_size + held_row).view(batch, kv_sharding.shard_len)
    return ForwardBatch(
        *common,
        batch=batch,
        rows=sharding.shard_len,
        positions=positions,
        taken=taken,
        slots=slots,
        last_rows=_last_rows(allocator, requests, befores, rank, same_length),
        sharding=sharding,
        kv_sharding=kv_sharding,
        kv_slots=kv_slots,
        known=allocator.changes,
    )


def _last_rows(
    allocator: PageAllocator, requests: Sequence[int], befores: Sequence[int], rank: int, same_length: bool
) -> tuple[tuple[int, int] | None, ...]:
    found: list[tuple[int, int] | None] = []
    row = 0
    for i, (request, before) in enumerate(zip(requests, befores, strict=True)):
        spans = allocator.rank_spans(request, before)
        here = sum(span.stop - span.start for span in spans if span.rank == rank)
        row = here if same_length else row + here
        found.append((i if same_length else 0, row - 1) if spans[-1].rank == rank else None)
    return tuple(found)


def _shards(found: Sequence[tuple[int, RankSpan]], origins: Sequence[int], world: range) -> tuple[Shard, ...]:
    """Return every rank's runs of the virtual sequence; runs that touch are one."""
    shards: list[list[Run]] = [[] for _ in world]
    for i, (rank, start, stop) in found:
        runs, begin = shards[rank], origins[i] + start
        if runs and runs[-1].last + 1 == begin:
            runs[-1] = Run(runs[-1].start, 1, runs[-1].length + stop - start)
        else:
            runs.append(Run(begin, 1, stop - start))
    return tuple(map(tuple, shards))


def _since(table: BlockTable, before: int) -> tuple[BlockTable, int]:
    """Return the blocks of a request from a token on, and how many rows of the first page are before it."""
    begin = bisect_right(table.starts, before)
    if begin and table.starts[begin - 1] + table.lengths[begin - 1] > before:
        begin -= 1
    part = BlockTable(table.pages[begin:], table.starts[begin:], table.lengths[begin:])
    skipped = max(0, before - part.starts[0]) if part else 0
    if skipped:
        part.starts[0] += skipped
        part.lengths[0] -= skipped
    return part, skipped
