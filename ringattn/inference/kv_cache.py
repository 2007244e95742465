"""Cache of keys and values of many requests, spread over the ranks of a ring in pages.

Owns the life of requests, and how a call of the model gets room for its new tokens. Refuses to know which tokens lie in which
pages (page_allocator.py), memory (kv_pool.py), and how attention reads it (attention.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from types import TracebackType
from typing import Literal, SupportsIndex

import torch
from torch import Tensor

from ringattn.inference.forward_batch import MAX_DECODE_TOKENS, ForwardBatch, make_forward_batch
from ringattn.inference.kv_pool import KVPool
from ringattn.inference.page_allocator import CacheFull
from ringattn.inference.static_batch import StaticBatch
from ringattn.ring import Ring


class PagedKVCache(KVPool):
    """A cache of keys and values whose pages lie on all ranks of a ring.

    Every rank makes the same cache and the same calls in the same order; each keeps the tokens that fall to it, and all know who
    keeps what, without a message. A request joins with the length that it may grow to; what cannot fit is refused before work
    begins.

    Args:
        ring: The ranks.
        layers: Layers of the model.
        kv_heads: Key heads.
        head_dim: Of the keys.
        v_head_dim: Of the values; default head_dim.
        dtype: Of keys and values as attention gets and reads them.
        pages: Pages of each rank.
        memory: Bytes that the pages of each rank may take, in place of `pages`. Neither: seven tenths of the memory that is
            free on the fullest GPU of the ring; on CPUs one of them must be given.
        page_size: Tokens of a page.
        kv_dtype: What keys and values are kept in: None for dtype, or torch.float8_e4m3fn, half the bytes of bf16: every row
            of a head is then scaled by its largest element and rounded to three bits of mantissa (Note [fp8 rows] in
            kernels/kv/pages.py), which changes results.
        device: Where; default the current GPU, or the CPU where there is none.

    Raises:
        ValueError: A size is out of range, a dtype is not served, there is not enough memory for the pages, or not memory
            enough for a page; or another rank says so, or makes another cache. Raised on every rank.

    Example:
        >>> cache = PagedKVCache(Ring(), layers=1, kv_heads=1, head_dim=16, dtype=torch.float32, pages=4, page_size=4, device="cpu")
        >>> cache.bytes_per_token, cache.capacity_tokens
        (128, 16)
        >>> request = cache.add_request(reserve=10)
        >>> step = cache.extend([request], [7])
        >>> step.mode, step.rows, step.positions.tolist()
        ('decode', 7, [[0, 1, 2, 3, 4, 5, 6]])
        >>> cache.free_pages, cache.used_pages
        ((2,), (2,))
    """

    def __init__(
        self,
        ring: Ring,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: torch.dtype,
        pages: int | None = None,
        memory: int | None = None,
        page_size: int = 64,
        kv_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            ring,
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            dtype=dtype,
            pages=pages,
            memory=memory,
            page_size=page_size,
            kv_dtype=kv_dtype,
            device=device,
        )
        self._refusals = _Refusals(ring)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the pages of all ranks hold together."""
        return self.allocator.world_size * self.allocator.pages * self.page_size

    @property
    def free_pages(self) -> tuple[int, ...]:
        """Pages of each rank that hold nothing; some may be promised."""
        return self.allocator.free_pages

    @property
    def used_pages(self) -> tuple[int, ...]:
        """Pages of each rank that hold something."""
        return tuple(self.allocator.pages - free for free in self.allocator.free_pages)

    def add_request(self, reserve: int, first: int = 0) -> int:
        """Add a request; see `PageAllocator.add_request`."""
        with self._refusals:
            return self.allocator.add_request(index(reserve), index(first))

    def add_batch(self, reserve: int, firsts: Sequence[int]) -> list[int]:
        """Add requests that grow on the same ranks; see `PageAllocator.add_batch`."""
        with self._refusals:
            return self.allocator.add_batch(index(reserve), [index(first) for first in firsts])

    def fork(self, request: int, length: int | None = None, reserve: int | None = None) -> int:
        """Add a request that shares the beginning of another one; see `PageAllocator.fork`."""
        with self._refusals:
            return self.allocator.fork(index(request), _whole(length), _whole(reserve))

    def truncate(self, request: int, length: int, reserve: int | None = None) -> None:
        """Remove a request's last tokens; see `PageAllocator.truncate`."""
        with self._refusals:
            self.allocator.truncate(index(request), index(length), _whole(reserve))

    def free(self, request: int) -> None:
        """Free a request; see `PageAllocator.free`."""
        with self._refusals:
            self.allocator.free(request)

    def length(self, request: int) -> int:
        """Tokens of a request."""
        return self.allocator.length(request)

    def reorder(self, requests: Sequence[int], index: Sequence[int]) -> None:
        """Replace request i of a batch by request index[i], for beam search; see `PageAllocator.reorder`.

        Of each request that changes at most one page is copied, in stream order.
        """
        with self._refusals:
            moves = [move for move in self.allocator.reorder(requests, index) if move.rank == self.ring.rank]
        if not moves:
            return
        source, target = (
            torch.tensor([getattr(move, name) for move in moves], device=self.device) for name in ("source", "target")
        )
        for pool in (self.k, self.v, self.k_scale, self.v_scale):
            if pool is not None:
                bits = pool.view(torch.uint8) if self.is_quantised and pool.dtype == self.kv_dtype else pool
                # read as a whole before anything is written
                bits[:, target] = bits[:, source]

    def extend(
        self,
        requests: Sequence[int],
        counts: Sequence[int],
        *,
        mode: Literal["auto", "prefill", "decode"] = "auto",
        same_length: bool = False,
        into: StaticBatch | None = None,
    ) -> ForwardBatch:
        """Assign pages to new tokens and return the batch of the call of the model that computes them.

        A call that raises has changed nothing.

        Args:
            requests: Which ones, each once.
            counts: New tokens of each.
            mode: "prefill", "decode", or "auto": decode when all bring the same number, at most 16, or into is packed.
            same_length: The requests are one batch of equal lengths: prefill keeps the batch dimension instead of packing them, and
                decode keeps them on the same ranks, as far as there is room, so that they can be prefilled again.
            into: A static step in which the new tokens are said, in stream order, instead of in a new step; mode "decode". One
                that is packed takes any numbers of them for which it has pieces.

        Returns:
            The step: `into` where it was given.

        Raises:
            ValueError: As `PageAllocator.assign`; or decode with unequal or too many new tokens, or what `into` has no room for.
            NotImplementedError: Prefill of requests that cannot be computed together; the message names the alternative.
            CacheFull: As `PageAllocator.assign`.
        """
        with self._refusals:
            step = self._extend(requests, counts, mode, same_length, into)
        if into is not None:
            # a graph that is replayed compares nothing
            self.consistency.check_batch(into, "a static step", self.device)
        return step

    def _extend(
        self, requests: Sequence[int], counts: Sequence[int], mode: str, same_length: bool, into: StaticBatch | None
    ) -> ForwardBatch:
        """`extend`, before ranks compare."""
        # of a tensor's numbers each rank would keep its own device's
        requests, counts = list(map(index, requests)), list(map(index, counts))
        packed = into is not None and into.pieces is not None
        few = packed or (len(set(counts)) == 1 and 1 <= counts[0] <= MAX_DECODE_TOKENS)
        if mode not in ("auto", "prefill", "decode"):
            raise ValueError(f"mode must be 'auto', 'prefill' or 'decode', got {mode!r}; leave it out for 'auto'")
        if mode == "decode" and not few:
            raise ValueError(
                f"decode must bring the same number of new tokens for each request, at most {MAX_DECODE_TOKENS}, got "
                f"{list(counts)}; use mode='prefill'"
            )
        if mode == "auto":
            mode = "decode" if few else "prefill"
        found = []
        if into is not None:
            if into.cache is not self:
                raise ValueError(
                    "into must be a static step of this cache, got one of another; make it with static_step"
                )
            if mode != "decode":
                raise ValueError(
                    f"into must be left out of a prefill, got it with {list(counts)} new tokens; prefill without"
                )
            found = into.check(requests, counts)
        if packed:
            # many rows of a request, which later steps of it find as if a prefill had brought them
            self.allocator.assign(requests, counts)
        else:
            self._place(requests, counts, mode, same_length)
        if into is not None:
            into.refill(requests, found, counts)
            return into
        return make_forward_batch(self, requests, counts, mode, same_length and mode == "prefill")

    def static_batch(
        self, batch: int, new: int = 1, *, max_tokens: int, max_blocks: int | None = None, packed: bool = False
    ) -> StaticBatch:
        """A step of decoding for CUDA graphs: its tensors keep their addresses and shapes, and `extend(..., into=it)` refills them.

        Capture a model's forward with it after a warm-up, then for each token extend into it and replay. Rows of the batch
        beyond the requests that were given see nothing and are kept nowhere; their outputs are zeros of attention.

        Args:
            batch: Requests at most; packed: pieces.
            new: New tokens of each request, 1 to 16; packed: rows of a piece.
            max_tokens: The longest request, its new tokens included.
            max_blocks: Blocks of one request that a rank may have; fewer take less memory and less to plan for. None: all that
                max_tokens may need, were they on one rank. Requests that were forked may have more blocks than pages full.
            packed: Requests bring different numbers of tokens, for instance short prompts, cut into pieces of `new` rows. The model
                gets all rows in one sequence, `1 (batch new)`: `StaticBatch.arrange` puts tokens there, and `last_rows` finds the
                last ones.

        Raises:
            ValueError: A number is out of range.
        """
        numbers = {"batch": batch, "max_tokens": max_tokens, "max_blocks": 1 if max_blocks is None else max_blocks}
        # it may be said anew outside of inference mode
        with self._refusals, torch.inference_mode(False):
            for name, value in numbers.items():
                if value < 1:
                    raise ValueError(f"{name} must be at least 1, got {value}; give the most that a step has to serve")
            if not 1 <= new <= MAX_DECODE_TOKENS:
                raise ValueError(f"new must be from 1 to {MAX_DECODE_TOKENS}, got {new}; more new tokens are a prefill")
            most = -(-max_tokens // self.page_size) + 1 if max_blocks is None else max_blocks
            return StaticBatch.make(self, batch, new, max_tokens, most, packed)

    def put(
        self, layer: int, step: ForwardBatch, k: Tensor, v: Tensor, *, contain: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Write the rows of a step that are stored on this rank; on a GPU in stream order, and capturable in a CUDA graph.

        If a row of v has a NaN or an infinity, the cache stores zeros for it, and NaN for its row of k. So tokens that see it
        become NaN, and other requests are unaffected.

        Args:
            layer: Layer of the cache.
            step: The step, made by this cache.
            k: `batch rows hk d`.
            v: `batch rows hk dv`.
            contain: Return copies of k and v in which such rows are changed as in the cache.

        Returns:
            K and v as given, or with `contain` the copies.

        Raises:
            ValueError: The layer or a shape, dtype or device does not fit the cache, or a request of the step is gone.
        """
        if step.cache is not self:
            self.ring.raise_on_all_ranks(
                ValueError("step must be made by this cache, got one of another cache; make it with extend")
            )
        return step.put(layer, k, v, contain=contain)

    def _place(self, requests: Sequence[int], counts: Sequence[int], mode: str, same_length: bool) -> None:
        """Check that the tokens can be computed together, and assign pages."""
        same_length = same_length and len(requests) > 1
        if mode == "decode":
            # nothing of this step asks for it: batches that grew apart, or find no room alike, decode as well
            if same_length and self.allocator.have_same_placement(requests):
                try:
                    self.allocator.assign(requests, counts, same_length=True, one_by_one=True)
                    return
                except CacheFull:
                    pass
            self.allocator.assign(requests, counts, one_by_one=True)
            return
        firsts = [self.allocator.first(request) for request in requests]
        if same_length and len(set(requests)) == len(requests) and not self.allocator.have_same_placement(requests):
            raise NotImplementedError(
                f"a batch of {len(requests)} requests must be kept alike to be prefilled together, got lengths "
                f"{[self.allocator.length(request) for request in requests]} that grew apart; prefill them one by one"
            )
        if not same_length and len(requests) > 1 and any(firsts):
            raise NotImplementedError(
                f"requests with padding in front must be alike, got firsts {firsts}; pack tokens without padding"
            )
        self.allocator.assign(requests, counts, same_length=same_length)


class _Refusals:
    """Lets other ranks know of what is raised inside; but not that the cache is full, which is an answer and no mistake.

    It changes nothing, and equal books give it alike. So programs catch it to let a request wait: on all ranks, again and again,
    or on the one that plans for all of them.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, CacheFull):
            self._ring.propagate_errors().__exit__(kind, error, trace)


def _whole(number: SupportsIndex | None) -> int | None:
    return None if number is None else index(number)
