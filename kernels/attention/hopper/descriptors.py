"""Descriptors of the bulk copy engine (TMA) and workspaces: the hardware's conditions on addresses and strides."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import cast

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ringattn.kernels.runtime.bound_launch import WORD, Template

CAPACITY = 1024
"""Templates of descriptors that a call keeps; beyond it all are dropped, and made again when needed."""

_DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.int16: gl.int16,
}


class Descriptors:
    """Descriptors of the tensors of one bound call, checked and made at the first sight of a shape, strides and block."""

    def __init__(self) -> None:
        self._templates: dict[Hashable, Template] = {}
        self._describable: dict[Hashable, bool] = {}
        self._layouts: dict[Hashable, gl.NVMMASharedLayout] = {}

    def layout(self, block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
        """The shared-memory layout of a block that products read."""
        found = self._layouts.get((block, dtype))
        if found is None:
            found = self._layouts[block, dtype] = layout_of(block, dtype)
        return found

    def describable(self, x: Tensor) -> bool:
        """Return whether the bulk copy engine can address a tensor: aligned base and strides, not expanded, not empty."""
        facts = x.shape, x.stride(), x.dtype
        found = self._describable.get(facts)
        if found is None:
            found = self._describable[facts] = _is_describable(x)
        return found and x.data_ptr() % WORD == 0

    def addressable(self, x: Tensor) -> Tensor:
        """The tensor itself, or a contiguous copy of one that the bulk copy engine cannot address."""
        return x if self.describable(x) else x.clone(memory_format=torch.contiguous_format)

    def addressable_kv(
        self, local_kv: tuple[Tensor, Tensor], remote_kv: tuple[Tensor, Tensor] | None
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
        """K and V of local and remote rows as the engine can address them; one without rows stands for the other, untouched."""
        if remote_kv is None:
            return (self.addressable(local_kv[0]), self.addressable(local_kv[1])), None
        local_kv, remote_kv = (
            (local_kv if local_kv[0].numel() else remote_kv),
            (remote_kv if remote_kv[0].numel() else local_kv),
        )
        local_kv, remote_kv = ((self.addressable(k), self.addressable(v)) for k, v in (local_kv, remote_kv))
        return local_kv, remote_kv

    def rows(self, x: Tensor, rows: int, columns: int) -> TensorDescriptor:
        """A `b s h d` tensor in tiles of `rows` rows of one head, as blocks [1, 1, rows, columns] at (b, h, row, 0).

        Rows and columns beyond the tensor read as zero and are not written.
        """

        def make() -> TensorDescriptor:
            b, s, h, d = x.shape
            sb, ss, sh, _ = _aligned_strides(x)
            block = [1, 1, rows, columns]
            return TensorDescriptor(x, [b, h, s, d], [sb, sh, ss, 1], block, layout_of(tuple(block), x.dtype))

        return self._described(x, (rows, columns), make)

    def kv_rows(
        self, kv: tuple[Tensor, Tensor] | None, rows: int, columns: tuple[int, int]
    ) -> tuple[TensorDescriptor | None, ...]:
        """`rows` of k and of v, each with its own columns; None for both where they are absent."""
        return (None, None) if kv is None else (self.rows(kv[0], rows, columns[0]), self.rows(kv[1], rows, columns[1]))

    def groups(self, x: Tensor, rows: int, group: int, columns: int) -> TensorDescriptor:
        """A `b s h d` tensor in tiles of `rows` rows of `group` neighbouring heads: blocks [1, rows, 1, group, columns].

        The block at (b, row, head group, 0, 0) holds the heads of a row next to each other.
        """

        def make() -> TensorDescriptor:
            b, s, h, d = x.shape
            sb, ss, sh, _ = _aligned_strides(x)
            block = [1, rows, 1, group, columns]
            shape, strides = [b, s, h // group, group, d], [sb, ss, group * sh, sh, 1]
            return TensorDescriptor(x, shape, strides, block, layout_of(tuple(block), x.dtype))

        return self._described(x, (rows, group, columns), make)

    def numbers(self, x: Tensor, block: int) -> TensorDescriptor:
        """A contiguous tensor as one list, in blocks of `block` numbers; loads begin at multiples of 16 bytes."""

        def make() -> TensorDescriptor:
            return TensorDescriptor(x, [x.numel()], [1], [block], layout_of((block,), x.dtype))

        return self._described(x, (block,), make)

    def _described(self, x: Tensor, block: tuple[int, ...], make: Callable[[], TensorDescriptor]) -> TensorDescriptor:
        facts = (x.shape, x.stride(), x.dtype, block)
        template = self._templates.get(facts)
        if template is None:
            if len(self._templates) >= CAPACITY:
                self._templates.clear()
            template = self._templates[facts] = Template(make())
        return template.over(x)


def layout_of(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """The shared-memory layout of a block that products read."""
    return cast(gl.NVMMASharedLayout, gl.NVMMASharedLayout.get_default_for(list(block), _DTYPES[dtype]))


def workspace(beside: Tensor, *shape: int) -> Tensor:
    """An uninitialised fp32 tensor on the device of another one, for what one launch leaves to the next."""
    return torch.empty(shape, dtype=torch.float32, device=beside.device)


def multiprocessors(device: torch.device) -> int:
    """Number of programs that run side by side; on a CPU, where kernels are emulated, a few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def store_unit(x: Tensor, widest: int) -> int:
    """The largest power of two up to `widest` that divides all strides: how many elements one store may take."""
    whole = math.gcd(
        widest, *(stride for stride, length in zip(x.stride()[:-1], x.shape[:-1], strict=True) if length > 1)
    )
    return whole if x.data_ptr() % (whole * x.element_size()) == 0 else 1


def _is_describable(x: Tensor) -> bool:
    size = x.element_size()
    aligned = all(
        stride > 0 and stride * size % WORD == 0
        for stride, length in zip(x.stride()[:-1], x.shape[:-1], strict=True)
        if length > 1
    )
    return aligned and x.stride(-1) == 1 and 0 not in x.shape


def _aligned_strides(x: Tensor) -> list[int]:
    # the stride of a dimension of length 1 means nothing, but a descriptor wants it aligned
    size = x.element_size()
    return [
        stride if length > 1 else max(WORD // size, x.shape[-1])
        for stride, length in zip(x.stride(), x.shape, strict=True)
    ]
