"""Rows of several tensors as one message, and contributions added where they belong.

Owns row ranges on tensors and the layout of messages. Refuses to know why rows move.

Note [One message]
    What travels together travels as one contiguous buffer of bytes: the rows of each tensor in turn, contiguous, every
    one from a multiple of 16 bytes. Both ends compute the layout from the number of rows, so nothing is said about it on
    the way, and received parts are views. Tensors that lie in memory like this already are sent from where they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringattn.plan.ring_plan import Rows
from ringattn.transport.base import Buffers

Moving = Sequence[tuple[Tensor, int]]
"""What travels together: (tensor, its row dimension)."""

_ALIGNMENT = 16


@dataclass(frozen=True)
class Bundle:
    """Several tensors in one message.

    Attributes:
        message: The bytes.
        parts: Views of it, one per tensor.
    """

    message: Tensor
    parts: list[Tensor]


def make_bundle(moving: Moving, rows: int, buffers: Buffers, name: str) -> Bundle:
    """Uninitialised room for some rows of each tensor.

    Args:
        moving: Tensors of which shapes, dtypes and the device are taken.
        rows: How many rows of each.
        buffers: Where the bytes live.
        name: Which buffer.
    """
    shapes = [_sized(x, dim, rows) for x, dim in moving]
    offsets, size = _layout(moving, shapes)
    message = buffers.take(name, (size,), torch.uint8, moving[0][0].device)
    parts = [
        message[offset : offset + math.prod(shape) * x.element_size()].view(x.dtype).view(shape)
        for (x, _), shape, offset in zip(moving, shapes, offsets, strict=True)
    ]
    return Bundle(message, parts)


def message_bytes(moving: Moving, rows: int) -> int:
    """Bytes of a message with that many rows of each tensor."""
    return _layout(moving, [_sized(x, dim, rows) for x, dim in moving])[1]


def in_place(moving: Moving) -> Tensor | None:
    """The message that the whole tensors are already, as they lie in memory; None where they do not lie like one."""
    offsets, size = _layout(moving, [list(x.shape) for x, _ in moving])
    first = moving[0][0]
    storage = first.untyped_storage()
    begin = first.storage_offset() * first.element_size()
    for (x, _), offset in zip(moving, offsets, strict=True):
        at = x.storage_offset() * x.element_size()
        if not x.is_contiguous() or x.untyped_storage().data_ptr() != storage.data_ptr() or at != begin + offset:
            return None
    return torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage, begin, (size,), (1,))


def pack_(moving: Moving, rows: Rows, bundle: Bundle) -> None:
    """Copies the row ranges of each tensor into a bundle of as many rows."""
    lengths = [length for _, length in rows]
    for (x, dim), part in zip(moving, bundle.parts, strict=True):
        for source, target in zip(slices(x, dim, rows), part.split(lengths, dim), strict=True):
            target.copy_(source)


def add_rows_(x: Tensor, dim: int, rows: Rows, packed: Tensor) -> None:
    """x[rows] += packed, along dim."""
    lengths = [length for _, length in rows]
    for target, part in zip(slices(x, dim, rows), packed.split(lengths, dim), strict=True):
        target.add_(part)


def slices(x: Tensor, dim: int, rows: Rows) -> list[Tensor]:
    """Views of the row ranges along dim."""
    return [x.narrow(dim, offset, length) for offset, length in rows]


def _sized(x: Tensor, dim: int, rows: int) -> list[int]:
    shape = list(x.shape)
    shape[dim] = rows
    return shape


def _layout(moving: Moving, shapes: list[list[int]]) -> tuple[list[int], int]:
    """Where each tensor begins in the message, and the size of the message, in bytes."""
    offsets, end = [], 0
    for (x, _), shape in zip(moving, shapes, strict=True):
        offsets.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        end = offsets[-1] + math.prod(shape) * x.element_size()
    return offsets, end
