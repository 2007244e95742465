"""Keys and values of many requests, spread over the ranks of a ring in pages.

Owns the memory of this rank's pages: how large it is, how it is laid out, and every refusal of rows that do not belong there.
Refuses to know who keeps what (pages.py), how rows are copied (kernels/pages.py) and how attention reads them (attention.py).

Note [Memory]
    All pages are allocated when the cache is made, for k and for v in one piece each, a layer after another, and are zero. A row
    that was never written is therefore zero. Attention takes rows that blocks name and no others: what a request that has left
    wrote into a page, NaN included, takes no part in the next one's. NaN of a request that is there stays with it, too (Note
    [Values that are not finite] of kernels/pages.py).
    Within a layer a page of one head is contiguous: that is what decode streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from types import TracebackType
from typing import Literal, SupportsIndex

import torch
from torch import Tensor

from ringattn.inference.accord import Accord
from ringattn.inference.pages import CacheFull, Pages
from ringattn.inference.static import StaticStep
from ringattn.inference.step import MOST_DECODED, Step, make_step
from ringattn.kernels import pages as rows
from ringattn.ring import Ring
from ringattn.tensor_checks import check_plain

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DEFAULT_SHARE = 0.7
"""The part of the memory that is free on the fullest GPU which a cache takes when it is told neither pages nor memory."""


class PagedKVCache:
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
            kernels/pages.py), which changes results.
        device: Where; default the current GPU, or the CPU where there is none.

    Attributes:
        ring: As given.
        pages: The books.
        accord: What the ranks have compared.
        room: Bytes of the ring's buffers that prefills have asked for (Note [Room ahead] of prefill.py).
        page_size: As given.
        device: Where it is.
        dtype: As given.
        kv_dtype: What k and v are kept in.
        bytes_per_token: Of all layers, k and v, and scales.
        k: `layers pages hk page_size d`.
        v: `layers pages hk page_size dv`.
        k_scale: With fp8: `layers pages hk page_size` fp32, else None.
        v_scale: Likewise.

    Raises:
        ValueError: A size is out of range, a dtype is not served, there is not enough memory for the pages, or not memory
            enough for a page; or another rank says so, or makes another cache. Raised on every rank.

    Example:
        >>> cache = PagedKVCache(Ring(), layers=1, kv_heads=1, head_dim=16, dtype=torch.float32, pages=4, page_size=4, device="cpu")
        >>> cache.bytes_per_token, cache.capacity_tokens
        (128, 16)
        >>> request = cache.join(reserve=10)
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
        with ring.propagate_errors():
            if device is None:
                device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
            device = torch.device(device)
            if device.type == "cuda" and device.index is None:
                device = torch.device("cuda", torch.cuda.current_device())
        self.ring, self.page_size, self.device = ring, page_size, device
        self._refusals = _Refusals(ring)
        self.layers, self.kv_heads, self.dtype = layers, kv_heads, dtype
        self.head_dim, self.v_head_dim = head_dim, head_dim if v_head_dim is None else v_head_dim
        self.kv_dtype = dtype if kv_dtype is None else kv_dtype
        with ring.propagate_errors():
            self._check_sizes(pages, memory)
            scales = 2 * torch.float32.itemsize if self.is_quantised else 0
            row = (self.head_dim + self.v_head_dim) * self.kv_dtype.itemsize + scales
            self.bytes_per_token = layers * kv_heads * row
            wanted = (
                layers,
                kv_heads,
                self.head_dim,
                self.v_head_dim,
                dtype,
                self.kv_dtype,
                page_size,
                pages,
                memory,
                device.type,
            )
        ring.assert_equal_across_ranks("a cache of keys and values", " ".join(map(str, wanted)))
        least = None
        if device.type == "cuda":
            # what torch keeps for later is free as well
            torch.cuda.empty_cache()
            least = ring.all_reduce_min(torch.cuda.mem_get_info(device)[0])
        page_bytes = page_size * self.bytes_per_token
        if pages is None:
            room = memory if memory is not None else int(DEFAULT_SHARE * (least or 0))
            pages = room // page_bytes
            if pages < 1:
                raise ValueError(
                    f"memory must hold a page of {page_size} tokens at least, {page_bytes} bytes, got {room} on each rank; "
                    "give more memory or use smaller pages"
                )
        needed = pages * page_bytes
        if least is not None and needed > least:
            raise ValueError(
                f"{pages} pages of {page_size} tokens need {needed} bytes on each rank, got {least} that are free on the "
                f"fullest GPU of the ring; use at most {least // page_bytes} pages, or kv_dtype=torch.float8_e4m3fn"
            )
        self.pages = Pages(ring.world_size, pages, page_size, page_bytes)
        self.accord = Accord(ring)
        self.room: dict[str, tuple[int, ...]] = {}
        shape = (layers, pages, kv_heads, page_size)
        # rows are written inside of inference mode and outside
        with ring.propagate_errors(), torch.inference_mode(False):
            self.k = torch.zeros(*shape, self.head_dim, dtype=self.kv_dtype, device=device)
            self.v = torch.zeros(*shape, self.v_head_dim, dtype=self.kv_dtype, device=device)
            self.k_scale = torch.zeros(shape, dtype=torch.float32, device=device) if self.is_quantised else None
            self.v_scale = torch.zeros(shape, dtype=torch.float32, device=device) if self.is_quantised else None

    @property
    def is_quantised(self) -> bool:
        """Whether rows are kept in fp8."""
        return self.kv_dtype == rows.FP8

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the pages of all ranks hold together."""
        return self.pages.world_size * self.pages.pages * self.page_size

    @property
    def free_pages(self) -> tuple[int, ...]:
        """Pages of each rank that hold nothing; some may be promised."""
        return self.pages.free

    @property
    def used_pages(self) -> tuple[int, ...]:
        """Pages of each rank that hold something."""
        return tuple(self.pages.pages - free for free in self.pages.free)

    def join(self, reserve: int, first: int = 0) -> int:
        """Lets a request in; see `Pages.join`."""
        with self._refusals:
            return self.pages.join(index(reserve), index(first))

    def join_alike(self, reserve: int, firsts: Sequence[int]) -> list[int]:
        """Lets a batch in whose requests are to grow alike; see `Pages.join_alike`."""
        with self._refusals:
            return self.pages.join_alike(index(reserve), [index(first) for first in firsts])

    def fork(self, request: int, length: int | None = None, reserve: int | None = None) -> int:
        """Lets a request in that shares the beginning of another one; see `Pages.fork`."""
        with self._refusals:
            return self.pages.fork(index(request), _whole(length), _whole(reserve))

    def crop(self, request: int, length: int, reserve: int | None = None) -> None:
        """Forgets a request's last tokens; see `Pages.crop`."""
        with self._refusals:
            self.pages.crop(index(request), index(length), _whole(reserve))

    def leave(self, request: int) -> None:
        """Lets a request go; see `Pages.leave`."""
        with self._refusals:
            self.pages.leave(request)

    def length(self, request: int) -> int:
        """Tokens of a request."""
        return self.pages.length(request)

    def reorder(self, requests: Sequence[int], index: Sequence[int]) -> None:
        """Makes request i of a batch what request index[i] of it was, as beam search wants; see `Pages.reorder`.

        Of each request that changes at most one page is copied, in stream order.
        """
        with self._refusals:
            moves = [move for move in self.pages.reorder(requests, index) if move.rank == self.ring.rank]
        if not moves:
            return
        source, target = (
            torch.tensor([getattr(move, name) for move in moves], device=self.device) for name in ("source", "target")
        )
        for pool in (self.k, self.v, self.k_scale, self.v_scale):
            if pool is not None:
                bits = pool.view(torch.uint8) if pool.dtype == rows.FP8 else pool
                # read as a whole before anything is written
                bits[:, target] = bits[:, source]

    def extend(
        self,
        requests: Sequence[int],
        counts: Sequence[int],
        *,
        mode: Literal["auto", "prefill", "decode"] = "auto",
        alike: bool = False,
        into: StaticStep | None = None,
    ) -> Step:
        """Makes room for new tokens, and says how the call of the model that brings them goes.

        A call that raises has changed nothing.

        Args:
            requests: Which ones, each once.
            counts: New tokens of each.
            mode: "prefill", "decode", or "auto": decode when all bring the same number, at most 16, or into is packed.
            alike: The requests are one batch of equal lengths: prefill keeps the batch dimension instead of packing them, and
                decode keeps them on the same ranks, as far as there is room, so that they can be prefilled again.
            into: A static step in which the new tokens are said, in stream order, instead of in a new step; mode "decode". One
                that is packed takes any numbers of them for which it has pieces.

        Returns:
            The step: `into` where it was given.

        Raises:
            ValueError: As `Pages.place`; or decode with unequal or too many new tokens, or what `into` has no room for.
            NotImplementedError: Prefill of requests that cannot be computed together; the message names the alternative.
            CacheFull: As `Pages.place`.
        """
        with self._refusals:
            step = self._extend(requests, counts, mode, alike, into)
        if into is not None:
            # a graph that is replayed compares nothing
            self.accord.meet(into, "a static step", self.device)
        return step

    def _extend(
        self, requests: Sequence[int], counts: Sequence[int], mode: str, alike: bool, into: StaticStep | None
    ) -> Step:
        """`extend`, before ranks compare."""
        # of a tensor's numbers each rank would keep its own device's
        requests, counts = list(map(index, requests)), list(map(index, counts))
        packed = into is not None and into.pieces is not None
        few = packed or (len(set(counts)) == 1 and 1 <= counts[0] <= MOST_DECODED)
        if mode not in ("auto", "prefill", "decode"):
            raise ValueError(f"mode must be 'auto', 'prefill' or 'decode', got {mode!r}; leave it out for 'auto'")
        if mode == "decode" and not few:
            raise ValueError(
                f"decode must bring the same number of new tokens for each request, at most {MOST_DECODED}, got "
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
            self.pages.place(requests, counts)
        else:
            self._place(requests, counts, mode, alike)
        if into is not None:
            into.refill(requests, found, counts)
            return into
        return make_step(self, requests, counts, mode, alike and mode == "prefill")

    def static_step(
        self, batch: int, new: int = 1, *, max_tokens: int, max_blocks: int | None = None, packed: bool = False
    ) -> StaticStep:
        """A step of decoding for CUDA graphs: its tensors keep their addresses and shapes, and `extend(..., into=it)` refills them.

        Capture a model's forward with it after a warm-up, then for each token extend into it and replay. Rows of the batch
        beyond the requests that were given see nothing and are kept nowhere; their outputs are zeros of attention.

        Args:
            batch: Requests at most; packed: pieces.
            new: New tokens of each request, 1 to 16; packed: rows of a piece.
            max_tokens: The longest request, its new tokens included.
            max_blocks: Blocks of one request that a rank may have; fewer take less memory and less to plan for. None: all that
                max_tokens may need, were they on one rank. Requests that were forked may have more blocks than pages full.
            packed: Requests bring different numbers of tokens, short prompts for instance, cut into pieces of `new` rows; the model
                gets all rows in one line, `1 (batch new)`, where `StaticStep.lay` puts tokens and `last_rows` finds the last ones.

        Raises:
            ValueError: A number is out of range.
        """
        numbers = {"batch": batch, "max_tokens": max_tokens, "max_blocks": 1 if max_blocks is None else max_blocks}
        # it may be said anew outside of inference mode
        with self._refusals, torch.inference_mode(False):
            for name, value in numbers.items():
                if value < 1:
                    raise ValueError(f"{name} must be at least 1, got {value}; give the most that a step has to serve")
            if not 1 <= new <= MOST_DECODED:
                raise ValueError(f"new must be from 1 to {MOST_DECODED}, got {new}; more new tokens are a prefill")
            most = -(-max_tokens // self.page_size) + 1 if max_blocks is None else max_blocks
            return StaticStep.make(self, batch, new, max_tokens, most, packed)

    def put(self, layer: int, step: Step, k: Tensor, v: Tensor, *, contain: bool = False) -> tuple[Tensor, Tensor]:
        """Keeps the rows of a step that fall to this rank; on a GPU in stream order, and capturable in a CUDA graph.

        A row of v with a NaN or an infinity is kept as zeros, and its row of k as NaN: so tokens that see it become NaN, and
        requests that do not see it are untouched.

        Args:
            layer: Of which layer.
            step: Whose rows.
            k: `batch rows hk d`.
            v: `batch rows hk dv`.
            contain: Return copies of k and v with such rows changed as the cache keeps them.

        Returns:
            K and v as given, or with `contain` the copies.

        Raises:
            ValueError: The layer or a shape, dtype or device does not fit the cache, or a request of the step is gone.
        """
        try:
            self.check(layer, step, k, v)
        except (ValueError, NotImplementedError) as error:
            # rows differ by rank, so perhaps nobody else refuses
            self.ring.raise_on_all_ranks(error)
        k, v = k.detach(), v.detach()
        contained = (
            (torch.empty(k.shape, dtype=k.dtype, device=k.device), torch.empty(v.shape, dtype=v.dtype, device=v.device))
            if contain
            else None
        )
        rows.put(self.k[layer], self.v[layer], k, v, step.slots, *self.scales(layer), contained)
        return contained or (k, v)

    def check(self, layer: int, step: Step, k: Tensor, v: Tensor) -> None:
        """Refuses what `put` does, on this rank.

        Args:
            layer: As there, like the others.
            step: Likewise.
            k: Likewise.
            v: Likewise.

        Raises:
            ValueError: As there.
        """
        self._check_layer(layer)
        self._check_step(step)
        self._check_rows(step, k, v)

    def take(self, layer: int, slots: Tensor, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Rows that are kept here, in `dtype`.

        Args:
            layer: Of which layer.
            slots: `batch t`: page * page_size + row, none -1.
            out: Where to write them; None: new tensors.

        Returns:
            K `batch t hk d` and v `batch t hk dv`.

        Raises:
            ValueError: The layer, or the shape, dtype or device of slots or out does not fit.
        """
        try:
            self._check_layer(layer)
            if slots.dim() != 2 or slots.dtype != torch.int64 or slots.device != self.device:
                raise ValueError(
                    f"slots must be `batch t` int64 on {self.device}, got {tuple(slots.shape)} {slots.dtype} on "
                    f"{slots.device}; pass step.kept_slots"
                )
            shapes = [(*slots.shape, self.kv_heads, dim) for dim in (self.head_dim, self.v_head_dim)]
            if out is None:
                out = (
                    torch.empty(shapes[0], dtype=self.dtype, device=self.device),
                    torch.empty(shapes[1], dtype=self.dtype, device=self.device),
                )
            for name, x, shape in zip(("k", "v"), out, shapes, strict=True):
                self._check_tensor(f"out {name}", x, shape, "the slots")
        except (ValueError, NotImplementedError) as error:
            self.ring.raise_on_all_ranks(error)
        rows.take(self.k[layer], self.v[layer], slots.contiguous(), *out, *self.scales(layer))
        return out

    def scales(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """The scales of a layer's keys and values: `pages hk page_size` fp32 each with fp8, else None."""
        if self.k_scale is None or self.v_scale is None:
            return None, None
        return self.k_scale[layer], self.v_scale[layer]

    def _place(self, requests: Sequence[int], counts: Sequence[int], mode: str, alike: bool) -> None:
        """Makes room, having made sure that a step can be made of it."""
        alike = alike and len(requests) > 1
        if mode == "decode":
            # nothing of this step asks for it: batches that grew apart, or find no room alike, decode as well
            if alike and self.pages.are_alike(requests):
                try:
                    self.pages.place(requests, counts, alike=True, one_by_one=True)
                    return
                except CacheFull:
                    pass
            self.pages.place(requests, counts, one_by_one=True)
            return
        firsts = [self.pages.first(request) for request in requests]
        if alike and len(set(requests)) == len(requests) and not self.pages.are_alike(requests):
            raise NotImplementedError(
                f"a batch of {len(requests)} requests must be kept alike to be prefilled together, got lengths "
                f"{[self.pages.length(request) for request in requests]} that grew apart; prefill them one by one"
            )
        if not alike and len(requests) > 1 and any(firsts):
            raise NotImplementedError(
                f"requests with padding in front must be alike, got firsts {firsts}; pack tokens without padding"
            )
        self.pages.place(requests, counts, alike=alike)

    def _check_sizes(self, pages: int | None, memory: int | None) -> None:
        sizes = {
            "layers": self.layers, "kv_heads": self.kv_heads, "head_dim": self.head_dim, "v_head_dim": self.v_head_dim,
            "page_size": self.page_size, "pages": 1 if pages is None else pages, "memory": 1 if memory is None else memory,
        }  # fmt: skip
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(
                    f"{name} must be at least 1, got {value}; give the sizes of the model and of the cache"
                )
        if pages is not None and memory is not None:
            raise ValueError(
                f"pages and memory must not both be given, got {pages} and {memory}; leave one of them out"
            )
        if pages is None and memory is None and self.device.type != "cuda":
            raise ValueError(f"pages or memory must be given on {self.device.type}, got neither; give one of them")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be float16, bfloat16, float32 or float64, got {self.dtype}; give the model's")
        if self.kv_dtype not in (self.dtype, rows.FP8):
            raise NotImplementedError(
                f"kv_dtype must be dtype, {self.dtype}, or torch.float8_e4m3fn, got {self.kv_dtype}; leave it out"
            )
        if self.is_quantised and self.dtype == torch.float64:
            raise NotImplementedError("kv_dtype must be float64 too with dtype float64, got float8_e4m3fn; use float32")

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.layers:
            raise ValueError(f"layer must be from 0 to {self.layers - 1}, got {layer}; make the cache for all layers")

    def _check_step(self, step: Step) -> None:
        if step.cache is not self:
            raise ValueError("step must be made by this cache, got one of another cache; make it with extend")
        books = self.pages
        if step.known == books.changes:
            return
        here = set(books.requests)
        for request, length in zip(step.requests, step.lengths, strict=True):
            there = books.stayed(request, step.known) if request in here else None
            if there is None or there < length:
                gone = "has left" if there is None else f"was cropped to {there} tokens"
                if there is not None and books.length(request) > there:
                    gone = f"has had others behind the first {there}"
                raise ValueError(
                    f"the requests of a step must be as long as it made them, got request {request} of {length} tokens, "
                    f"which {gone} since; extend again"
                )
        step.known = books.changes

    def _check_rows(self, step: Step, k: Tensor, v: Tensor) -> None:
        for name, x, dim in (("k", k, self.head_dim), ("v", v, self.v_head_dim)):
            self._check_tensor(
                name, x, (step.batch, step.rows, self.kv_heads, dim), "the step: pass this rank's rows (step.take)"
            )

    def _check_tensor(self, name: str, x: Tensor, shape: tuple[int, ...], what: str) -> None:
        if tuple(x.shape) == shape and x.dtype == self.dtype and x.device == self.device and type(x) is Tensor:
            if x.stride(-1) == 1 or shape[-1] == 1 or not x.numel():
                return
            raise ValueError(f"{name} must have a contiguous last dim, got strides {x.stride()}; make it contiguous")
        check_plain(name, x)
        if tuple(x.shape) != shape:
            raise ValueError(
                f"{name} must have shape {shape}, `batch rows heads head_dim` of {what}, got {tuple(x.shape)}"
            )
        if x.dtype != self.dtype:
            raise ValueError(f"{name} must have the dtype of the cache, {self.dtype}, got {x.dtype}; convert it first")
        if x.device != self.device:
            raise ValueError(f"{name} must be on the device of the cache, {self.device}, got {x.device}; move it there")


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
