"""Paged KV cache of many requests, sharded over the ranks of a ring: requests are added, extended, forked and freed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import torch

from ringattn.inference.block_table import MAX_REQUEST_TOKENS
from ringattn.inference.forward_batch import MAX_DECODE_TOKENS, ForwardBatch, make_forward_batch
from ringattn.inference.kv_pool import KVPool
from ringattn.inference.page_allocator import CacheFull, PageAllocator
from ringattn.inference.static_batch import StaticBatch
from ringattn.plan.options import resolve_flag, resolve_integer, resolve_integers, resolve_size, resolve_word

_MODES = ("auto", "prefill", "decode")
P = ParamSpec("P")
R = TypeVar("R")


def _collective(method: Callable[Concatenate[PageAllocator, P], R]) -> Callable[Concatenate[PagedKVCache, P], R]:
    """Return a method of the allocator as one of the cache, whose errors are raised on the other ranks too."""
    allocate: Callable[..., R] = method
    takes = signature(method)
    optional = {name for name, one in takes.parameters.items() if one.default is None}

    def resolve(name: str, x: Any) -> Any:
        return None if x is None and name in optional else resolve_integer(name, x)

    @functools.wraps(method)
    def call(self: PagedKVCache, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._propagate_errors():
            given = takes.bind(self.allocator, *args, **kwargs).arguments
            allocator = given.pop("self")
            return allocate(allocator, **{name: resolve(name, x) for name, x in given.items()})

    return call


class PagedKVCache(KVPool):
    """KV cache whose pages are on all ranks of a ring.

    Every rank makes the same cache and the same calls in the same order. Each rank stores a part of the tokens, and every rank
    knows the owner of each without a message. A request reserves its maximum length when it is added, so that an accepted request
    always fits.

    Args:
        ring: The ranks.
        layers: Layers of the model.
        kv_heads: Key heads.
        head_dim: Head dim of the keys.
        v_head_dim: Head dim of the values; default head_dim.
        latent: (r, dr), in place of kv_heads, head_dim and v_head_dim: one row of r + dr columns per token, a latent and its
            rotary key, for `latent_attend`.
        dtype: Dtype of keys and values as attention gets and reads them.
        pages: Pages of each rank; in a ring of virtual ranks of each of them, so that tokens have the same places for every number
            of processes.
        memory: Bytes for the pages of each rank, or virtual rank, in place of `pages`. Default: 70% of the memory that is free on
            the fullest GPU of the ring; on CPUs, and for virtual ranks, one of them must be given.
        page_size: Tokens of a page.
        kv_dtype: Dtype that pages are stored in: None for dtype, or torch.float8_e4m3fn, half the bytes of bf16: every row of a
            head is then scaled by its largest element and rounded to three bits of mantissa (Note [fp8 rows] in
            kernels/kv/pages.py), which changes results.
        device: Device of the pages; default the current GPU, or the CPU where there is none.

    Raises:
        ValueError: A size is out of range, latent comes with sizes of heads, a dtype is not supported, memory is missing, or
            another rank raises or makes another cache. Raised on every rank.
        TypeError: A size is missing or no integer, or an argument is unknown.
        NotImplementedError: kv_dtype is neither dtype nor float8_e4m3fn, or that with float64.

    Example:
        >>> from ringattn import Ring
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

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the pages of all ranks hold together."""
        return self.allocator.world_size * self.allocator.pages * self.page_size

    @property
    def free_pages(self) -> tuple[int, ...]:
        """Pages of each rank, or virtual rank, that store nothing; some may be reserved."""
        return self.allocator.free_pages

    @property
    def used_pages(self) -> tuple[int, ...]:
        """Pages of each rank, or virtual rank, that store something."""
        return tuple(self.allocator.pages - free for free in self.allocator.free_pages)

    add_request = _collective(PageAllocator.add_request)
    fork = _collective(PageAllocator.fork)
    set_padding = _collective(PageAllocator.set_padding)
    truncate = _collective(PageAllocator.truncate)
    free = _collective(PageAllocator.free)

    def add_batch(self, reserve: int, firsts: Iterable[int]) -> list[int]:
        """Add requests that are extended together, `firsts` may be a tensor; see `PageAllocator.add_batch`."""
        with self._propagate_errors():
            return self.allocator.add_batch(resolve_integer("reserve", reserve), resolve_integers("firsts", firsts))

    def length(self, request: int) -> int:
        """Tokens of a request."""
        return self.allocator.length(resolve_integer("request", request))

    def reorder(self, requests: Sequence[int], index: Sequence[int]) -> None:
        """Replace request i of a batch by request index[i], for beam search; copies at most one page per request, in stream order.

        The requests must have been added by `add_batch`, always extended and truncated together, and not truncated to within
        a page that they share since an earlier call.

        Raises:
            ValueError: A request is unknown, was not extended with the others or shares a page in part with them, or index does not
                name one for each.
            TypeError: A number is no integer.
        """
        with self._propagate_errors():
            requests, index = resolve_integers("requests", requests), resolve_integers("index", index)
            here, pages = self.ring.hosted, self.allocator.pages
            moves = [move for move in self.allocator.reorder(requests, index) if move.rank in here]
        if not moves:
            return
        source, target = (
            torch.tensor([getattr(x, name) + here.index(x.rank) * pages for x in moves], device=self.device)
            for name in ("source", "target")
        )
        for pool in self.stored:
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
        """Assign pages to new tokens and return the batch of the model call that computes them.

        A call that raises has changed nothing.

        Args:
            requests: The requests, each once.
            counts: New tokens of each.
            mode: "prefill", "decode", or "auto": decode when all bring the same number, at most 16, or into is packed.
            same_length: The requests are one batch of equal lengths: prefill keeps the batch dimension instead of packing them, and
                decode keeps them on the same ranks, as far as pages are free there, so that they can be prefilled again.
            into: Static batch that the new tokens are written to, in stream order, instead of a new batch; mode "decode". A packed
                one takes any numbers of tokens that fit into its pieces.

        Raises:
            ValueError: A request is unknown, occurs twice, or would exceed its reservation; decode has unequal or too many new
                tokens; or `into` is too small.
            TypeError: A request or count is no integer, or `into` no static batch.
            NotImplementedError: Prefill of requests that cannot be computed together; the message names the alternative.
            CacheFull: With same_length: ranks do not have a free page for each of the requests.
        """
        with self._propagate_errors():
            requests, counts = resolve_integers("requests", requests), resolve_integers("counts", counts)
            resolve_word("mode", mode, _MODES)
            same_length = resolve_flag("same_length", same_length)
            if into is not None and not isinstance(into, StaticBatch):
                raise TypeError(f"into must be a StaticBatch, got {type(into).__name__}; make it with static_batch")
            packed = into is not None and into.pieces is not None
            few = packed or (len(set(counts)) == 1 and 1 <= counts[0] <= MAX_DECODE_TOKENS)
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
                        "into must be a static batch of this cache, got one of another; make it with static_batch"
                    )
                if mode != "decode":
                    raise ValueError(
                        f"into must be left out of a prefill, got it with {list(counts)} new tokens; prefill without"
                    )
                found = into.check(requests, counts)
            if packed:
                # rows of a request are assigned as in a prefill
                self.allocator.assign(requests, counts)
            else:
                self._place(requests, counts, mode, same_length)
            if into is None:
                return make_forward_batch(self, requests, counts, mode, same_length and mode == "prefill")
            into.refill(requests, found, counts)
        # the replay of a graph does not compare
        self.consistency.check_batch(into, "a static step", self.device)
        return into

    def static_batch(
        self, batch: int, new: int = 1, *, max_tokens: int, max_blocks: int | None = None, packed: bool = False
    ) -> StaticBatch:
        """Make a decode batch with fixed addresses for CUDA graphs; `extend(..., into=it)` writes new tokens to it.

        Capture a model's forward with it after a warm-up, then for each token extend into it and replay. Rows beyond the given
        requests see nothing and are not stored; their attention output is zero.

        Args:
            batch: Requests at most; packed: pieces.
            new: New tokens of each request, 1 to 16; packed: rows of a piece.
            max_tokens: Maximum length of a request, its new tokens included.
            max_blocks: Blocks of one request that a rank may have; fewer take less memory. None: as many as max_tokens need on one
                rank. Forked requests may have more blocks than full pages.
            packed: Requests bring different numbers of tokens, for instance short prompts, cut into pieces of `new` rows. The model
                gets all rows in one sequence, `1 (batch new)`: `StaticBatch.arrange` puts tokens there, and `last_rows` finds the
                last ones.

        Raises:
            ValueError: A number is out of range.
            TypeError: A number is no integer.
            NotImplementedError: The ring has virtual ranks.
        """
        if self.ring.is_virtual:
            error = "a static batch must be of a ring without virtual ranks, which decode without graphs, got"
            self.ring.raise_on_all_ranks(
                NotImplementedError(f"{error} virtual_size={self.ring.virtual_size}; use extend without into")
            )
        # it may be written outside of inference mode
        with self._propagate_errors(), torch.inference_mode(False):
            new, packed = resolve_size("new", new, MAX_DECODE_TOKENS), resolve_flag("packed", packed)
            batch = resolve_size("batch", batch, MAX_REQUEST_TOKENS)
            max_tokens = resolve_size("max_tokens", max_tokens, MAX_REQUEST_TOKENS)
            if max_blocks is None:
                max_blocks = -(-max_tokens // self.page_size) + 1
            max_blocks = resolve_size("max_blocks", max_blocks, MAX_REQUEST_TOKENS)
            return StaticBatch.make(self, batch, new, max_tokens, max_blocks, packed)

    def _place(self, requests: Sequence[int], counts: Sequence[int], mode: str, same_length: bool) -> None:
        """Check that the tokens can be computed together, and assign pages."""
        same_length = same_length and len(requests) > 1
        if mode == "decode":
            # same_length is a preference here: batches whose placement differs, or for which pages are missing, decode as well
            if same_length and self.allocator.have_same_placement(requests):
                try:
                    self.allocator.assign(requests, counts, same_length=True, one_by_one=True)
                    return
                except CacheFull:
                    pass
            self.allocator.assign(requests, counts, one_by_one=True)
            return
        found = self.allocator.get_requests(requests)
        firsts, total = [one.first for one in found], sum(one.length for one in found) + sum(counts)
        if not same_length and total > MAX_REQUEST_TOKENS:
            raise ValueError(
                f"requests must have at most {MAX_REQUEST_TOKENS} tokens together, got {total}; prefill them in several calls"
            )
        if same_length and len(set(requests)) == len(requests) and not self.allocator.have_same_placement(requests):
            raise NotImplementedError(
                f"a batch of {len(requests)} requests must have equal lengths on the same ranks to be prefilled together, got "
                f"lengths {[self.allocator.length(request) for request in requests]}; prefill them one by one"
            )
        if not same_length and len(requests) > 1 and any(firsts):
            raise NotImplementedError(
                f"requests with padding in front must be prefilled with same_length, got firsts {firsts}; pack tokens "
                "without padding"
            )
        self.allocator.assign(requests, counts, same_length=same_length)

    @contextmanager
    def _propagate_errors(self) -> Iterator[None]:
        """Raise errors on the other ranks too, except CacheFull, after which callers retry, perhaps on one rank only."""
        try:
            yield
        except CacheFull:
            raise
        except BaseException:
            with self.ring.propagate_errors():
                raise
