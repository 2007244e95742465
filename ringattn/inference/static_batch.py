"""Decode batch with fixed addresses, for CUDA graphs: new tokens are written in place.

Owns `StaticBatch` and its refusals. Refuses to know how integers lie in an upload (batch_metadata.py), and how a batch is made
that is used once (forward_batch.py).

Note [Fixed addresses]
    A captured CUDA graph reads the addresses that it was captured with. A `StaticBatch` has tensors of fixed addresses and
    shapes; new tokens are written in place (`PagedKVCache.extend(..., into=step)`), in stream order, and a graph that was
    captured with the batch then serves them. Rows that no request fills see nothing and are not stored.

Note [Pieces]
    A short prompt can be decoded: every rank computes all of its rows, attends over the keys that it stores, and one reduction
    merges the partials. Block tables alone say which rank stores what, so one graph serves all prompts that fit, while a prefill
    is planned and launched anew each time. Matrix products are computed P times, which takes no longer than reading the
    weights as long as rows are a few hundred. A packed batch has a number of pieces of `new` rows. Each request's new tokens are
    cut into pieces, each with all blocks of its request; surplus rows of a last piece see nothing and are not stored. The model
    gets the rows of all pieces in one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from ringattn.inference.batch_metadata import BatchMetadata
from ringattn.inference.block_table import Request
from ringattn.inference.forward_batch import ForwardBatch, Mask
from ringattn.inference.kv_pool import KVPool
from ringattn.inference.page_allocator import PageAllocator


class StaticBatch(ForwardBatch):
    """A step of decoding whose tensors stay where they are (Note [Fixed addresses]); made by `PagedKVCache.static_batch`.

    Attributes:
        max_tokens: The longest request that it serves.
        max_blocks: Blocks of a request on one rank that it has room for.
    """

    compares_rarely: ClassVar[bool] = True
    max_tokens: int
    max_blocks: int
    _metadata: BatchMetadata
    _rows: list[int]  # of each request
    _begins: list[int]  # the first row of each request, and one past the last one
    _found: dict[Mask, tuple[Tensor, Tensor]]
    _fresh: set[Mask]
    _in_call: bool = False

    @classmethod
    def make(cls, cache: KVPool, batch: int, new: int, max_tokens: int, max_blocks: int, packed: bool) -> StaticBatch:
        """A step without requests.

        Args:
            cache: Whose.
            batch: Requests at most, or pieces.
            new: New tokens of each.
            max_tokens: See the class.
            max_blocks: See the class.
            packed: Requests are cut into pieces (Note [Pieces]).
        """
        metadata = BatchMetadata(
            batch, new, max_blocks, page_size=cache.page_size, rank=cache.ring.rank, device=cache.device
        )
        shape, pieces = ((1, batch * new), (batch, new)) if packed else ((batch, new), None)
        step = cls(cache, "decode", (), (), (), (), *shape, **metadata.tensors(shape), last_rows=(), pieces=pieces)
        step.max_tokens, step.max_blocks, step._metadata = max_tokens, max_blocks, metadata
        step._rows, step._begins, step._found, step._fresh = [], [0], {}, set()
        step.slots.fill_(-1)
        return step

    def check(self, requests: Sequence[int], counts: Sequence[int]) -> list[Request]:
        """Refuses what does not fit, before room is made for it; returns what the books say of the requests."""
        allocator, (batch, new) = self.cache.allocator, self.tiles
        if self.pieces is not None:
            if min(counts, default=1) < 1 or sum(-(-count // new) for count in counts) > batch:
                raise ValueError(
                    f"a packed step must be given new tokens that fit into {batch} pieces of {new}, each request's in "
                    f"pieces of its own, got {list(counts)}; bring fewer at a time, or extend without into"
                )
        elif len(requests) > batch or counts.count(new) != len(counts):
            raise ValueError(
                f"a static step must be given at most {batch} requests with {new} new tokens each, got "
                f"{len(requests)} with {list(counts)}; make one of another shape, or extend without into"
            )
        found = allocator.get_requests(requests)
        most = max(counts, default=0)
        longest = max([one.length for one in found], default=0) + most
        if longest <= self.max_tokens and _max_blocks_after(allocator, found, most) <= self.max_blocks:
            return found
        for one, count in zip(found, counts, strict=False):
            length, most = one.length + count, _max_blocks_after(allocator, [one], count)
            if length > self.max_tokens or most > self.max_blocks:
                raise ValueError(
                    f"a static step must be given requests of at most {self.max_tokens} tokens in {self.max_blocks} "
                    f"blocks of each rank, got request {one.name} with {length} in up to {most}; make one with more "
                    "max_tokens or max_blocks, or extend without into"
                )
        return found

    def refill(self, requests: Sequence[int], here: Sequence[Request], counts: Sequence[int]) -> None:
        """Says the next tokens, for which room was made, in place; here: what `check` returned."""
        allocator, new = self.cache.allocator, self.tiles[1]
        said = tuple(counts)
        if said != self.counts:
            self.counts = said
            self._rows = [-(-count // new) for count in said]
            self._begins = list(accumulate(self._rows, initial=0))
            lasts = [(end - 1) * new + (count - 1) % new for end, count in zip(self._begins[1:], said, strict=True)]
            self.last_rows = tuple([(0, last) if self.pieces else divmod(last, new) for last in lasts])
        self.requests, self.firsts = tuple(requests), tuple([one.first for one in here])
        self.lengths = tuple([one.length for one in here])
        self.known, self.compared = allocator.changes, False
        self._metadata.write(here, said, self._rows, allocator.changes)
        for mask, found in self._found.items():
            self._find_bounds(mask, *found)
        self._fresh = set(self._found)

    def arrange(self, tokens: Tensor) -> Tensor:
        """The new tokens where the model is to find them: `batch rows` on the CPU, 0 where there is none.

        Args:
            tokens: All new tokens that were said last, one request after another.
        """
        new = self.tiles[1]
        found = tokens.new_zeros(self.batch * self.rows, device="cpu")
        at = 0
        for part in tokens.flatten().cpu().split(self.counts):
            found[at : at + len(part)] = part
            at += -(-len(part) // new) * new
        return found.view(self.batch, self.rows)

    @contextmanager
    def one_call(self) -> Iterator[None]:
        """As `ForwardBatch.one_call`, for this call alone: tokens change in place, and replays run a captured call again."""
        self.shared, self._in_call = {}, True
        try:
            yield
        finally:
            self.shared, self._in_call = {}, False

    def once(self, key: Hashable, find: Callable[[], Tensor | None]) -> Tensor | None:
        """As `ForwardBatch.once`, inside of `one_call` alone."""
        return super().once(key, find) if self._in_call else None

    def bounds(
        self, causal: bool, window: tuple[int | None, int | None] | None, chunk_len: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `ForwardBatch.bounds`, at fixed addresses.

        What was asked for once is worked out again whenever the step is said anew, so a graph that is captured afterwards need
        not do it. A graph that is captured before does it by itself.
        """
        mask = (causal, window, chunk_len)
        known = self._said_bounds(mask)
        if known is not None:
            return known
        known = self._found.get(mask)
        if known is None:
            known = self._found[mask] = self._empty_bounds()
        if mask not in self._fresh:
            self._find_bounds(mask, *known)
            # nothing runs in a capture
            if not (known[0].is_cuda and torch.cuda.is_current_stream_capturing()):
                self._fresh.add(mask)
        return known


def max_blocks_after(allocator: PageAllocator, requests: Sequence[int], new: int) -> int:
    """Blocks that one of some requests may have on one rank when each has got `new` more tokens; the same on every rank."""
    return _max_blocks_after(allocator, allocator.get_requests(requests), new)


def _max_blocks_after(allocator: PageAllocator, requests: Sequence[Request], new: int) -> int:
    return max([one.max_blocks_after for one in requests], default=0) + -(-new // allocator.page_size)
