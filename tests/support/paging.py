"""Rows for tests of put and take: strided tensors, slots in no order, pools whose bits are compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringattn.kernels.kv.pages import FP8, Pool

Put = Callable[..., None]
Take = Callable[..., None]


@dataclass(frozen=True)
class Case:
    """Sizes of a call.

    Attributes:
        dtype: Of rows.
        kv_dtype: Of the pool.
        latent: v is the first columns of k.
    """

    b: int
    s: int
    hk: int
    d: int
    dv: int
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    pages: int = 9
    latent: bool = False

    @property
    def is_quantised(self) -> bool:
        return self.kv_dtype == FP8

    def pool(self, device: torch.device | str = "cpu") -> list[Tensor | None]:
        """K, v and, with fp8, their scales, zero as a cache makes them."""
        shape = (self.pages, self.hk, self.page_size)
        scales = [torch.zeros(shape, device=device) if self.is_quantised else None for _ in range(2)]
        kept = [torch.zeros(*shape, dim, dtype=self.kv_dtype, device=device) for dim in (self.d, self.dv)]
        return [*self.paired(*kept), *self.paired(*scales, scales=True)]

    def paired(self, k: Any, v: Any, *, scales: bool = False) -> tuple[Any, Any]:
        """Return k and v, where v is columns of k for latents, and their scales one tensor."""
        return (k, v) if not self.latent else (k, k if scales else k[..., : self.dv])

    def rows(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """K with padded rows and v with heads before rows: strides of a model's projections."""
        generator = torch.Generator().manual_seed(self.s + self.d)
        k = torch.randn(self.b, self.s, self.hk, self.d + 3, generator=generator) * 5
        v = torch.randn(self.b, self.hk, self.s, self.dv, generator=generator)
        # rows of zeros, of one large number, of numbers that are subnormal in fp8
        k[0, 0, 0] = 0
        v[:, :, :, 0] *= 1e4
        k[..., -4:] *= 1e-4
        k, v = k.to(self.dtype).to(device), v.to(self.dtype).to(device)
        return self.paired(k[..., : self.d], v.transpose(1, 2))

    def slots(self, device: torch.device | str = "cpu") -> Tensor:
        """Different slots in no order; a third of the rows are kept elsewhere."""
        generator = torch.Generator().manual_seed(self.b)
        slots = torch.randperm(self.pages * self.page_size, generator=generator)[: self.b * self.s]
        slots[torch.rand(len(slots), generator=generator) < 1 / 3] = -1
        return slots.view(self.b, self.s).to(device)


CASES = [
    Case(2, 5, 3, 8, 8, 4, torch.float32, torch.float32),
    Case(1, 7, 1, 40, 24, 5, torch.bfloat16, torch.bfloat16),
    Case(8, 1, 2, 64, 128, 16, torch.float16, torch.float16),
    Case(2, 5, 3, 8, 8, 4, torch.float32, FP8),
    Case(1, 7, 1, 40, 24, 5, torch.bfloat16, FP8),
    Case(3, 9, 2, 128, 64, 16, torch.float16, FP8),
    Case(2, 5, 1, 24, 16, 4, torch.float32, torch.float32, latent=True),
    Case(1, 7, 1, 72, 64, 5, torch.bfloat16, FP8, latent=True),
    Case(3, 9, 1, 576, 512, 16, torch.float16, FP8, latent=True),
]


def bits(x: Tensor | None) -> Tensor | None:
    """What `torch.equal` compares NaN and fp8 by."""
    return None if x is None else x.contiguous().view(torch.uint8)


def expected_pool(case: Case) -> list[Tensor | None]:
    """Row by row and head by head what a pool holds: the definition, in Python."""
    pool = case.pool()
    for x, kept, scale in list(zip(case.rows(), pool[:2], pool[2:], strict=True))[: 2 - case.latent]:
        assert kept is not None
        for row, slot in zip(x.flatten(0, 1), case.slots().flatten().tolist(), strict=True):
            if slot < 0:
                continue
            page, at = divmod(slot, case.page_size)
            for head in range(case.hk):
                y = row[head].float()
                if scale is not None:
                    largest = max(abs(value) for value in y.tolist())
                    factor = torch.tensor(max(largest / 448, 2.0**-100))
                    scale[page, head, at], y = factor, y / factor
                kept[page, head, at] = y.to(kept.dtype)
    return pool


def assert_put(put: Put, case: Case, device: torch.device | str = "cpu") -> None:
    """Holds an implementation to the definition, to the bit."""
    pool = case.pool(device)
    k, v = case.rows(device)
    contained = case.paired(*(torch.full(x.shape, math.nan, dtype=x.dtype, device=device) for x in (k, v)))
    put(Pool(*pool), k, v, case.slots(device), contained)  # pyright: ignore[reportArgumentType]
    for found, wanted in zip(contained, case.rows(), strict=True):
        assert torch.equal(found.cpu(), wanted)
    for found, wanted in zip(pool, expected_pool(case), strict=True):
        if wanted is not None:
            assert found is not None
            assert torch.equal(bits(found.cpu()), bits(wanted))  # pyright: ignore[reportArgumentType]


def assert_take(take: Take, case: Case, device: torch.device | str = "cpu") -> None:
    """Holds an implementation to indexing, to the bit; rows that nobody asked for are NaN."""
    pool = expected_pool(case)
    slots = torch.where(case.slots() < 0, 0, case.slots())
    kept = torch.zeros(case.pages * case.page_size, dtype=torch.bool)
    kept[slots.flatten()] = True
    page, row = slots // case.page_size, slots % case.page_size
    wanted = []
    for x, scale in zip(pool[:2], pool[2:], strict=True):
        assert x is not None
        y = x.float()[page, :, row]
        wanted.append((y if scale is None else y * scale[page, :, row].unsqueeze(-1)).to(case.dtype))
        unread = ~kept.view(case.pages, 1, case.page_size, 1).expand(x.shape)
        x.copy_(torch.where(unread, math.nan, x.float()).to(x.dtype))
    k = torch.full((case.b, case.s, case.hk, case.d + 1), math.nan, dtype=case.dtype, device=device)[..., : case.d]
    v = torch.full((case.b, case.hk, case.s, case.dv), math.nan, dtype=case.dtype, device=device).transpose(1, 2)
    k, v = case.paired(k, v)
    there = [None if x is None else x.to(device) for x in pool]
    there = [*case.paired(*there[:2]), *case.paired(*there[2:], scales=True)]
    take(Pool(*there), slots.to(device), k, v)
    assert torch.equal(k.cpu(), wanted[0])
    assert torch.equal(v.cpu(), wanted[1])
