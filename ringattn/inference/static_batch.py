"""Decode batch with fixed addresses, for CUDA graphs: new tokens are written in place.

A captured CUDA graph reads the addresses that it was captured with, so a replay computes whatever `extend(..., into=batch)` wrote
last, in stream order.

Note [Pieces]
    A short prompt can be decoded: every rank computes all of its rows, attends over the keys that it stores, and one reduction
    merges the partials. Block tables alone tell which rank stores what, so one graph serves all prompts that fit, while a prefill
    is planned and launched anew each time. Every rank then computes all matrix products, which takes no longer than reading the
    weights as long as rows are a few hundred. A packed batch has a number of pieces of `new` rows. Each request's new tokens are
    cut into pieces, each with all blocks of its request; surplus rows of a last piece see nothing and are not stored. The model
    gets the rows of all pieces in one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import ClassVar

from torch import Tensor

from ringattn.inference.batch_metadata import BatchMetadata
from ringattn.inference.block_table import CachedRequest
from ringattn.inference.forward_batch import ForwardBatch
from ringattn.inference.kv_pool import KVPool
from ringattn.tensor_checks import check_tensor


class StaticBatch(ForwardBatch):
    """Decode batch whose tensors keep their addresses and shapes; made by `PagedKVCache.static_batch`.

    Attributes:
        max_tokens: Maximum length of a request.
        max_blocks: Maximum number of blocks of a request on one rank.
    """

    compares_rarely: ClassVar[bool] = True
    max_tokens: int
    max_blocks: int
    _metadata: BatchMetadata
    _rows: list[int]  # of each request
    _in_call: bool = False

    @classmethod
    def make(cls, cache: KVPool, batch: int, new: int, max_tokens: int, max_blocks: int, packed: bool) -> StaticBatch:
        """Make a batch without requests, of so many requests or pieces with `new` tokens each."""
        metadata = BatchMetadata(
            batch, new, max_blocks, page_size=cache.page_size, rank=cache.ring.rank, device=cache.device
        )
        shape, pieces = ((1, batch * new), (batch, new)) if packed else ((batch, new), None)
        step = cls(cache, "decode", (), (), (), (), *shape, **metadata.tensors(shape), last_rows=(), pieces=pieces)
        step.max_tokens, step.max_blocks, step._metadata = max_tokens, max_blocks, metadata
        step._rows = []
        step.slots.fill_(-1)
        return step

    def check(self, requests: Sequence[int], counts: Sequence[int]) -> list[CachedRequest]:
        """Check that new tokens fit, before pages are assigned, and look up the requests."""
        allocator, (batch, new) = self.cache.allocator, self.tiles
        if self.pieces is not None:
            if min(counts, default=1) < 1 or sum(-(-count // new) for count in counts) > batch:
                raise ValueError(
                    f"a packed batch must be given new tokens that fit into {batch} pieces of {new}, each request's in "
                    f"pieces of its own, got {list(counts)}; bring fewer at a time, or extend without into"
                )
        elif len(requests) > batch or counts.count(new) != len(counts):
            raise ValueError(
                f"a static batch must be given at most {batch} requests with {new} new tokens each, got "
                f"{len(requests)} with {list(counts)}; make one of another shape, or extend without into"
            )
        found = allocator.get_requests(requests)
        most = max(counts, default=0)
        longest = max([one.length for one in found], default=0) + most
        if longest <= self.max_tokens and allocator.max_blocks_after(requests, most) <= self.max_blocks:
            return found
        for one, count in zip(found, counts, strict=False):
            length, most = one.length + count, allocator.max_blocks_after([one.name], count)
            if length > self.max_tokens or most > self.max_blocks:
                raise ValueError(
                    f"a static batch must be given requests of at most {self.max_tokens} tokens in {self.max_blocks} "
                    f"blocks of each rank, got request {one.name} with {length} in up to {most}; make one with more "
                    "max_tokens or max_blocks, or extend without into"
                )
        return found

    def refill(self, requests: Sequence[int], found: Sequence[CachedRequest], counts: Sequence[int]) -> None:
        """Write new tokens in place, whose pages were assigned to `found`, the requests that `check` returned."""
        allocator, new, counts = self.cache.allocator, self.tiles[1], tuple(counts)
        if counts != self.counts:
            self.counts = counts
            self._rows = [-(-count // new) for count in counts]
            ends = accumulate(self._rows)
            lasts = [(end - 1) * new + (count - 1) % new for end, count in zip(ends, counts, strict=True)]
            self.last_rows = tuple([(0, last) if self.pieces else divmod(last, new) for last in lasts])
        self.requests, self.firsts = tuple(requests), tuple([one.first for one in found])
        self.lengths = tuple([one.length for one in found])
        self.known, self.compared = allocator.changes, False
        self._metadata.write(found, counts, self._rows, allocator.changes)
        # now, so that a graph captured later need not compute them
        for mask in self.found_bounds:
            self._write_bounds(mask)
        self.current_bounds = set(self.found_bounds)

    def arrange(self, tokens: Tensor) -> Tensor:
        """Lay out all current tokens, one request after another, as the model's input `batch rows` on the CPU, padded by 0."""
        check_tensor("tokens", tokens)
        new = self.tiles[1]
        if tokens.numel() != sum(self.counts):
            raise ValueError(
                f"tokens must be the {sum(self.counts)} new ones of the batch, got {tokens.numel()}; pass one for each"
            )
        found = tokens.new_zeros(self.batch * self.rows, device="cpu")
        at = 0
        for part in tokens.flatten().cpu().split(self.counts):
            found[at : at + len(part)] = part
            at += -(-len(part) // new) * new
        return found.view(self.batch, self.rows)

    @contextmanager
    def one_call(self) -> Iterator[None]:
        """Share between layers within this call only: replays run a captured call again, with other tokens."""
        self.shared, self._in_call = {}, True
        try:
            yield
        finally:
            self.shared, self._in_call = {}, False

    def once(self, key: Hashable, find: Callable[[], Tensor | None]) -> Tensor | None:
        """See `ForwardBatch.once`; outside of `one_call` nothing is shared."""
        return super().once(key, find) if self._in_call else None
