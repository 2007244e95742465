"""Memory for the keys and values of one rank, in pages, and the checks of rows that are written to it.

All pages are allocated when the cache is made, one tensor for k and one for v, and are zero. Attention reads only the rows that
block tables name, so rows of freed requests, NaN included, do not matter. In a layer a page of one head is contiguous.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, TypedDict, cast

import torch
from torch import Tensor

from ringattn.inference.consistency import ConsistencyChecker
from ringattn.inference.page_allocator import PageAllocator
from ringattn.inference.virtual_rank import VirtualRank
from ringattn.kernels.decode.dispatch import select_decode_kernel
from ringattn.kernels.kv import pages as rows
from ringattn.kernels.registry import SelectedKernels
from ringattn.plan.options import resolve_integer, resolve_size
from ringattn.ring import Ring, check_ring
from ringattn.tensor_checks import check_tensor

if TYPE_CHECKING:
    from typing_extensions import Unpack

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DEFAULT_SHARE = 0.7
"""Share of the free memory of the fullest GPU that a cache takes if neither pages nor memory are given."""


class RowSizes(TypedDict, total=False):
    """Sizes of the rows of a cache, as in `PagedKVCache`."""

    kv_heads: int
    head_dim: int
    v_head_dim: int | None
    latent: tuple[int, int] | None


class KVPool:
    """Keys and values of one rank, in pages, with the page allocator of all ranks; arguments as in `PagedKVCache`.

    A cache of latents has one head with head_dim r + dr and v_head_dim r: v is k[..., :r], a view (Note [Latents] of
    kernels/decode/dispatch.py), and v_scale is k_scale.

    Attributes:
        ranks: In a ring of virtual ranks the pool of each of this process's: the pages that a process of its own would have, which
            are a part of these, with the allocator of all. Else empty.
        latent: Of a cache of latents: columns of a latent, and of its rotary key.
        consistency: Comparisons between ranks.
        reserved_bytes: Bytes of the ring's buffers that prefills have reserved, by kind.
        v_head_dim: Head dim of the values.
        dtype: Dtype of keys and values as attention gets and reads them.
        kv_dtype: Dtype that pages are stored in.
        bytes_per_token: Bytes of all layers, k and v, and scales.
        stored: The tensors that hold memory.
        k: `layers pages hk page_size d`; the pages of one virtual rank after another.
        v: `layers pages hk page_size dv`.
        k_scale: With fp8: `layers pages hk page_size` fp32, else None.
        v_scale: With fp8: `layers pages hk page_size` fp32, else None.
    """

    def __init__(
        self,
        ring: Ring,
        *,
        layers: int,
        dtype: torch.dtype,
        pages: int | None = None,
        memory: int | None = None,
        page_size: int = 64,
        kv_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **row: Unpack[RowSizes],
    ) -> None:
        check_ring(ring)
        self.ring, self.dtype, self.kv_dtype = ring, dtype, dtype if kv_dtype is None else kv_dtype
        with ring.propagate_errors():
            self.device = device = _resolve_device(device)
            self.latent = row.get("latent")
            self.kv_heads, self.head_dim, self.v_head_dim = _resolve_row(row)
            self.layers = layers = resolve_size("layers", layers)
            self.page_size = page_size = resolve_size("page_size", page_size)
            pages = None if pages is None else resolve_size("pages", pages)
            memory = None if memory is None else resolve_size("memory", memory)
            self._check_memory(pages, memory)
            # a row of latents is stored once
            dims = (self.head_dim,) if self.latent else (self.head_dim, self.v_head_dim)
            scale = torch.float32.itemsize if self.is_quantised else 0
            self.bytes_per_token = layers * self.kv_heads * sum(dim * self.kv_dtype.itemsize + scale for dim in dims)
            sizes = (layers, self.kv_heads, self.head_dim, self.v_head_dim, self.latent)
            sizes = (*sizes, dtype, self.kv_dtype, page_size, pages, memory, ring.virtual_size)
        ring.assert_equal_across_ranks("a cache of keys and values", " ".join(map(str, (*sizes, device.type))))
        least, where = None, "that are free on the fullest GPU of the ring"
        if device.type == "cuda":
            # memory that torch has cached is free as well
            torch.cuda.empty_cache()
            least = ring.all_reduce_min(torch.cuda.mem_get_info(device)[0])
        elif device.type == "cpu" and hasattr(os, "sysconf"):  # not on Windows
            # allocating would succeed, and writing would end the process
            least = ring.all_reduce_min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
            where = "of memory on the smallest machine of the ring"
        page_bytes = page_size * self.bytes_per_token
        if pages is None:
            size = memory if memory is not None else int(DEFAULT_SHARE * (least or 0))
            pages = size // page_bytes
            if pages < 1:
                raise ValueError(
                    f"memory must hold a page of {page_size} tokens at least, {page_bytes} bytes, got {size} on each rank; "
                    "give more memory or use smaller pages"
                )
        hosted = len(ring.hosted)
        needed = hosted * pages * page_bytes
        if least is not None and needed > least:
            raise ValueError(
                f"{hosted * pages} pages of {page_size} tokens need {needed} bytes on each rank, got {least} {where}; "
                f"use at most {least // page_bytes // hosted} pages, or "
                "kv_dtype=torch.float8_e4m3fn"
            )
        self.allocator = PageAllocator(ring.virtual_size, pages, page_size, page_bytes)
        self.consistency = ConsistencyChecker(ring)
        self.reserved_bytes: dict[str, tuple[int, ...]] = {}
        shape = (layers, hosted * pages, self.kv_heads, page_size)
        # rows are written in inference mode and outside of it
        with ring.propagate_errors(), torch.inference_mode(False):
            pools = [torch.zeros(*shape, dim, dtype=self.kv_dtype, device=device) for dim in dims]
            scales = [torch.zeros(shape, dtype=torch.float32, device=device) if scale else None for _ in dims]
            self.k, self.v = pools[0], pools[0][..., : self.v_head_dim] if self.latent else pools[1]
            self.k_scale, self.v_scale = scales[0], scales[-1]
            self.stored = tuple(x for x in (*pools, *scales) if x is not None)
            self.ranks: tuple[KVPool, ...] = ()
            if ring.is_virtual:
                self.ranks = tuple(self._of_rank(i) for i in range(hosted))

    def _of_rank(self, index: int) -> KVPool:
        """Return the pool of a virtual rank of this process."""
        found, first = copy.copy(self), index * self.allocator.pages
        mine = slice(first, first + self.allocator.pages)
        found.k, found.v = self.k[:, mine], self.v[:, mine]
        if self.k_scale is not None and self.v_scale is not None:
            found.k_scale, found.v_scale = self.k_scale[:, mine], self.v_scale[:, mine]
        found.ring, found.reserved_bytes = cast("Ring", VirtualRank(self.ring, index, self.device)), {}
        return found

    @property
    def is_quantised(self) -> bool:
        """Whether rows are stored in fp8."""
        return self.kv_dtype == rows.FP8

    def decode_kernel(self, dtype: torch.dtype) -> SelectedKernels[ModuleType]:
        """Return the decode kernel of these pages for queries of a dtype; raises what `select_decode_kernel` raises."""
        sizes = self.head_dim, self.v_head_dim, self.page_size
        return select_decode_kernel(self.device, dtype, self.kv_dtype, *sizes, latent=bool(self.latent))

    def check_rows(self, layer: int, shape: tuple[int, int], k: Tensor, v: Tensor) -> None:
        """Check rows of shape (batch, rows) that are to be written to a layer."""
        self._check_layer(layer)
        for name, x, dim in (("k", k, self.head_dim), ("v", v, self.v_head_dim)):
            self._check_tensor(name, x, (*shape, self.kv_heads, dim))
        if self.latent and not rows.are_latents(k, v):
            raise ValueError(
                f"v must be k[..., :{self.v_head_dim}] of a cache of latents, got another tensor; pass the view"
            )

    def put_rows(
        self, layer: int, slots: Tensor, k: Tensor, v: Tensor, *, contain: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Write rows that were checked to slots, which are page * page_size + row or -1; see `ForwardBatch.put`."""
        k, v = k.detach(), v.detach()
        contained = None
        if contain:
            contained = self._rows(k.shape[:2])
        rows.put(rows.Pool(self.k[layer], self.v[layer], *self.scales(layer)), k, v, slots, contained)
        return contained or (k, v)

    def take(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Read rows of a layer in `dtype`, at slots `batch t` of page * page_size + row: k `batch t hk d` and v `batch t hk dv`."""
        k, v = self._rows(slots.shape)
        rows.take(rows.Pool(self.k[layer], self.v[layer], *self.scales(layer)), slots.contiguous(), k, v)
        return k, v

    def _rows(self, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return new rows of k and v for a shape (batch, rows)."""
        k = torch.empty(*shape, self.kv_heads, self.head_dim, dtype=self.dtype, device=self.device)
        if self.latent:
            return k, k[..., : self.v_head_dim]
        return k, torch.empty(*shape, self.kv_heads, self.v_head_dim, dtype=self.dtype, device=self.device)

    def scales(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """Scales of a layer's keys and values: `pages hk page_size` fp32 each with fp8, else None."""
        if self.k_scale is None or self.v_scale is None:
            return None, None
        return self.k_scale[layer], self.v_scale[layer]

    def _check_memory(self, pages: int | None, memory: int | None) -> None:
        if pages is not None and memory is not None:
            raise ValueError(
                f"pages and memory must not both be given, got {pages} and {memory}; leave one of them out"
            )
        if pages is None and memory is None and (self.device.type != "cuda" or self.ring.is_virtual):
            where = "for virtual ranks" if self.ring.is_virtual else f"on {self.device.type}"
            raise ValueError(f"pages or memory must be given {where}, got neither; give one of them")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be float16, bfloat16, float32 or float64, got {self.dtype}; give the model's")
        if self.kv_dtype not in (self.dtype, rows.FP8):
            raise NotImplementedError(
                f"kv_dtype must be dtype, {self.dtype}, or torch.float8_e4m3fn, got {self.kv_dtype}; leave it out"
            )
        if self.is_quantised and self.dtype == torch.float64:
            raise NotImplementedError("kv_dtype must be float64 too with dtype float64, got float8_e4m3fn; use float32")

    def _check_layer(self, layer: int) -> None:
        if not 0 <= resolve_integer("layer", layer) < self.layers:
            raise ValueError(f"layer must be from 0 to {self.layers - 1}, got {layer}; make the cache for all layers")

    def _check_tensor(self, name: str, x: Tensor, shape: tuple[int, ...]) -> None:
        if type(x) is Tensor and tuple(x.shape) == shape and x.dtype == self.dtype and x.device == self.device:
            if x.stride(-1) == 1 or shape[-1] == 1 or not x.numel():
                return
            raise ValueError(f"{name} must have a contiguous last dim, got strides {x.stride()}; make it contiguous")
        check_tensor(name, x)
        if tuple(x.shape) != shape:
            raise ValueError(
                f"{name} must have shape {shape}, `batch rows heads head_dim` of the step: pass this rank's rows "
                f"(step.take), got {tuple(x.shape)}"
            )
        if x.dtype != self.dtype:
            raise ValueError(f"{name} must have the dtype of the cache, {self.dtype}, got {x.dtype}; convert it first")
        if x.device != self.device:
            raise ValueError(f"{name} must be on the device of the cache, {self.device}, got {x.device}; move it there")


def _resolve_device(device: torch.device | str | None) -> torch.device:
    """Return the device of a cache as tensors have it: a GPU with its index, the CPU without."""
    usable = torch.cuda.device_count()
    try:
        found = torch.device(("cuda" if usable else "cpu") if device is None else device)
    except (RuntimeError, TypeError):
        found = torch.device("meta")
    if found.type == "cuda" and (found.index or 0) < usable:
        return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)
    if found.type != "cpu":
        raise ValueError(f"device must be 'cpu' or one of {usable} GPUs, got {device!r}; leave it out for the default")
    return torch.device("cpu")


def _resolve_row(row: RowSizes) -> tuple[int, int, int]:
    """Return kv_heads, head_dim and v_head_dim of the rows of a cache."""
    if unknown := row.keys() - RowSizes.__annotations__.keys():
        raise TypeError(f"arguments must be those of PagedKVCache, got {sorted(unknown)}; leave them out")
    latent = row.get("latent")
    heads = {name: row.get(name) for name in ("kv_heads", "head_dim", "v_head_dim")}
    if latent is None:
        kv_heads, head_dim, v_head_dim = heads.values()
        if kv_heads is None or head_dim is None:
            raise TypeError(f"kv_heads and head_dim, or latent, must be given, got {row}; give the model's")
        heads["v_head_dim"] = head_dim if v_head_dim is None else v_head_dim
        kv_heads, head_dim, v_head_dim = (resolve_size(name, x) for name, x in heads.items())
        return kv_heads, head_dim, v_head_dim
    if given := [name for name, x in heads.items() if x is not None]:
        raise ValueError(f"{' and '.join(given)} must be left out with latent, which has one head, got {row}")
    if type(latent) is not tuple or len(latent) != 2 or not all(type(x) is int and x > 0 for x in latent):
        raise ValueError(
            f"latent must be (r, dr), columns of a latent and of its rotary key, at least 1 each, got {latent!r}; give "
            "kv_lora_rank and qk_rope_head_dim"
        )
    return 1, sum(latent), latent[0]
