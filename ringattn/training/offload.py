"""Activations that wait in host memory for their backward, copied by a side stream.

Note [Order of copies]
    One side stream makes all copies, so a host buffer that a copy still reads is not overwritten by a later one. A copy out begins
    when the compute stream has made the tensor, and the device memory is given back when the compute stream has waited for the
    copy: at the next checkpointed layer, a whole layer later. A copy back is into memory that the compute stream has allocated,
    begins when that memory is free, and the compute stream waits for it where the tensor is used. So no memory is ever freed
    while a copy uses it, and nothing depends on `Tensor.record_stream`. The backward of a layer starts the copies of the layer
    before it, which then have the time of a whole layer.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

CHUNK_BYTES = 8 << 20
"""Bytes of a host buffer; all are equal, so each serves any tensor. A power of two, to which torch rounds pinned memory."""
CHUNKS_AT_ONCE = 16
"""Host buffers that are allocated together."""


class Copier(Protocol):
    """Copies between a device and the host, in order."""

    def allocate(self, num_bytes: int) -> Tensor:
        """Return host memory for copies, `num_bytes` uint8."""
        ...

    def copy(self, pairs: list[tuple[Tensor, Tensor]]) -> Any:
        """Enqueue copies (to, source) after the work enqueued so far; return their event."""
        ...

    def wait(self, event: Any) -> None:
        """Let work that is enqueued from now on wait for an event."""
        ...


class HostCopier:
    """Copies of a device without streams: done when `copy` returns."""

    def allocate(self, num_bytes: int) -> Tensor:
        """Return host memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def copy(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Copy."""
        for to, source in pairs:
            to.copy_(source)

    def wait(self, event: None) -> None:
        """Do nothing."""


class StreamCopier:
    """Copies of a GPU on a side stream, from and to pinned memory (Note [Order of copies])."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def allocate(self, num_bytes: int) -> Tensor:
        """Return pinned host memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, pairs: list[tuple[Tensor, Tensor]]) -> torch.cuda.Event:
        """Enqueue copies behind the work of the current stream; return their event."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            return event

    def wait(self, event: torch.cuda.Event) -> None:
        """Let the current stream wait for an event."""
        torch.cuda.current_stream(self._device).wait_event(event)


class _HostMemory:
    """Host buffers of one copier, which are used again."""

    def __init__(self, copier: Copier) -> None:
        self.copier, self.num_bytes = copier, 0
        self._free: list[Tensor] = []

    def take(self, num_bytes: int) -> list[Tensor]:
        """Return buffers for so many bytes."""
        count = -(-num_bytes // CHUNK_BYTES)
        while len(self._free) < count:
            new = self.copier.allocate(CHUNKS_AT_ONCE * CHUNK_BYTES)
            self.num_bytes += new.numel()
            self._free += new.split(CHUNK_BYTES)
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give(self, chunks: list[Tensor]) -> None:
        """Take buffers back."""
        self._free += chunks


class Saved:
    """A tensor that waits for its backward: on the device, in host memory, or on the way."""

    def __init__(self, x: Tensor, group: SavedGroup, memory: _HostMemory | None) -> None:
        self._group, self._memory = group, memory
        self._source: Tensor | None = x  # on the device, until the copy out is done; for good without host memory
        self._back: Tensor | None = None
        self._taken = False
        self._chunks: list[Tensor] = []
        self._version = x._version
        if memory is None:
            return
        # the columns in the order in which they lie, so that strides come back as they were
        self._order = sorted(range(x.dim()), key=lambda i: (-x.stride(i), i))
        if not x.permute(self._order).is_contiguous():
            self._order = list(range(x.dim()))
        rows = x.permute(self._order).contiguous()
        self._shape, self._like = rows.shape, (x.dtype, x.device)
        self._chunks = memory.take(rows.numel() * rows.element_size())
        self._source = x if rows.data_ptr() == x.data_ptr() else rows
        self._version = self._source._version
        self._event = memory.copier.copy(
            [(to[: len(part)], part) for to, part in zip(self._chunks, _bytes(rows), strict=False)]
        )

    def release(self) -> None:
        """Give the memory on the device back, once the copy out is done."""
        if self._memory is not None and self._source is not None:
            self._check(self._source)
            self._memory.copier.wait(self._event)
            self._source = None

    def fetch(self) -> None:
        """Start the copy back, unless the tensor is there or has been used."""
        if self._source is None and self._back is None and not self._taken:
            self._start()

    def get(self) -> Tensor:
        """Return the tensor; start the copies of its group and of the one before."""
        if self._source is not None:
            self._group.fetch_before()
            self._check(self._source)
            return self._source
        if self._back is None:
            self._group.fetch()
        if self._back is None:  # used before: a second backward
            self._start()
        self._group.fetch_before()
        assert self._memory is not None, "what has no host memory stays on the device"
        assert self._back is not None, "the copy was started"
        self._memory.copier.wait(self._event)
        x, self._back, self._taken = self._back, None, True
        return x

    def _start(self) -> None:
        assert self._memory is not None, "what has no host memory stays on the device"
        dtype, device = self._like
        rows = torch.empty(self._shape, dtype=dtype, device=device)
        parts = zip(self._chunks, _bytes(rows), strict=False)
        self._event = self._memory.copier.copy([(part, source[: len(part)]) for source, part in parts])
        self._back = rows.permute([self._order.index(i) for i in range(rows.dim())])

    def _check(self, x: Tensor) -> None:
        if x._version != self._version:
            raise RuntimeError(
                "an activation that waits for its backward must stay as it is, got one that was changed in place while it was "
                "copied to host memory; change a clone of it, or leave its layer out of offload"
            )

    def __del__(self) -> None:
        if self._memory is None:
            return
        if self._source is not None or self._back is not None:
            self._memory.copier.wait(self._event)
        self._memory.give(self._chunks)


class SavedGroup:
    """Tensors that one call of a layer saves for its backward."""

    def __init__(self, offloader: Offloader, before: SavedGroup | None, moves: bool) -> None:
        self._offloader, self._moves = offloader, moves
        self._before = None if before is None else weakref.ref(before)
        self._tensors: list[weakref.ref[Saved]] = []

    def save(self, x: Tensor) -> Saved:
        """Start the copy of a tensor to host memory, or keep it on the device."""
        saved = Saved(x, self, self._offloader.memory_for(x) if self._moves else None)
        self._tensors.append(weakref.ref(saved))
        return saved

    def saved(self) -> list[Saved]:
        """Return those of its tensors that are still wanted."""
        return [x for ref in self._tensors if (x := ref()) is not None]

    def fetch(self) -> None:
        """Start the copies back of its tensors."""
        for x in self.saved():
            x.fetch()

    def fetch_before(self) -> None:
        """Start the copies back of the group before this one, which the backward needs next; once."""
        before, self._before = None if self._before is None else self._before(), None
        if before is not None:
            before.fetch()


class Offloader:
    """Moves what layers save for their backward to host memory and back (Note [Order of copies])."""

    def __init__(self) -> None:
        self._memories: dict[torch.device, _HostMemory] = {}
        self._last: weakref.ref[SavedGroup] | None = None

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that are allocated; kept for later steps."""
        return sum(x.num_bytes for x in self._memories.values())

    def begin(self, *, moves: bool = True) -> SavedGroup:
        """Return the group of a call that begins; its tensors move to host memory, or stay."""
        last = None if self._last is None else self._last()
        if last is not None:
            for x in last.saved():
                x.release()
        group = SavedGroup(self, last, moves)
        self._last = weakref.ref(group)
        return group

    def make_copier(self, device: torch.device) -> Copier:
        """Make the copier of a device."""
        return StreamCopier(device) if device.type == "cuda" else HostCopier()

    def memory_for(self, x: Tensor) -> _HostMemory:
        """Return the host memory of the device of a tensor."""
        if type(x) is not Tensor:
            raise NotImplementedError(
                f"activations that are offloaded must be plain tensors, got a {type(x).__name__}; leave layers whose inputs are "
                "sharded or subclassed tensors out of offload"
            )
        if x.device not in self._memories:
            self._memories[x.device] = _HostMemory(self.make_copier(x.device))
        return self._memories[x.device]


def _bytes(rows: Tensor) -> tuple[Tensor, ...]:
    return rows.view(-1).view(torch.uint8).split(CHUNK_BYTES) if rows.numel() else ()
