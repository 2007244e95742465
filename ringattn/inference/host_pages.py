"""Copies of pages of a KV cache in the host memory of one rank: keys, values, latents and scales of all layers, bit by bit.

Note [Copies beside steps]
    Two lanes of work run beside each other: that of steps, and one for copies. Pages that are saved are gathered into a buffer
    between two steps, which is one small kernel, and copied to host memory beside the steps. So the next step may overwrite them,
    and waits for no bus. Pages that are loaded are copied to a buffer beside the steps, and go from there to their places before
    the next step but one. Each direction has two buffers. The host waits until the last copy of a buffer is done before it uses
    it again, so copies that no step waits for cannot pile up before the next one.
"""

from __future__ import annotations

import contextlib
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ringattn.inference.batch_metadata import to_device
from ringattn.inference.kv_pool import KVPool

T = TypeVar("T")


class Event(Protocol):
    """End of the work in a lane so far."""

    def synchronize(self) -> None:
        """Wait on the host until it is reached."""


class Lanes:
    """The two lanes of a CPU, where all work is done at once."""

    def run(self, work: Callable[[], None], *, beside: bool) -> None:
        """Run work in the lane of steps, or in the one beside it."""
        del beside
        work()

    def mark(self, *, beside: bool) -> Event:
        """Return an event behind the work in a lane so far."""
        del beside
        return _Done()

    def wait(self, event: Event, *, beside: bool) -> None:
        """Let later work in a lane wait for an event."""


class _Done:
    def synchronize(self) -> None:
        """Return: it is reached."""


class CudaLanes(Lanes):
    """The current stream of a GPU, and one beside it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._beside = device, torch.cuda.Stream(device)

    def run(self, work: Callable[[], None], *, beside: bool) -> None:
        """See `Lanes.run`."""
        with torch.cuda.stream(self._beside) if beside else contextlib.nullcontext():
            work()

    def mark(self, *, beside: bool) -> Event:
        """See `Lanes.mark`."""
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream(beside))
        return event

    def wait(self, event: Event, *, beside: bool) -> None:
        """See `Lanes.wait`."""
        assert isinstance(event, torch.cuda.Event), "events come from `mark`"
        self._stream(beside).wait_event(event)

    def _stream(self, beside: bool) -> torch.cuda.Stream:
        return self._beside if beside else torch.cuda.current_stream(self._device)


@dataclass
class _Buffer:
    """Pages on their way: for each tensor of the cache `pages layers hk page_size ...`."""

    parts: list[Tensor]
    copied: Event  # behind the last copy between the buffer and host memory
    used: Event  # behind the last kernels that read or wrote it between steps


class HostPages:
    """Host memory for pages of one rank of a cache (Note [Copies beside steps]); pinned where pages are on a GPU.

    Args:
        pool: The pages on the device.
        slots: Pages that host memory holds.
        most: Pages of a buffer: more at a time take several.
        lanes: Lanes of work; None: those of the device.

    Raises:
        RuntimeError: The memory cannot be pinned.
    """

    def __init__(self, pool: KVPool, slots: int, most: int, lanes: Lanes | None = None) -> None:
        on_gpu = pool.device.type == "cuda"
        self._lanes = lanes or (CudaLanes(pool.device) if on_gpu else Lanes())
        self._device, self._most = pool.device, most
        # torch does not index fp8 everywhere
        self._pools = [x.view(torch.uint8) if x.itemsize == 1 else x for x in pool.stored]
        with torch.inference_mode(False):
            self._host = [_pages_like(x, slots, torch.device("cpu")) for x in self._pools]
            self._saved, self._loaded = self._buffers(), self._buffers()
        if on_gpu:
            for x in self._host:
                _pin_(x)
        self._arriving: tuple[_Buffer, list[int]] | None = None  # pages in a buffer that are not in their places yet

    def move(self, saves: Sequence[tuple[int, int]], loads: Sequence[tuple[int, int]]) -> None:
        """Copy pages to slots of host memory, then slots to pages, behind the steps before this call and before later ones.

        Args:
            saves: (page, slot); the last one counts where a slot occurs twice.
            loads: (slot, page). Steps may read these pages from the next call on, which may have nothing to copy.
        """
        self._place()
        pages = {slot: page for page, slot in saves}
        for some in _parts(list(pages), self._most):
            self._save([pages[slot] for slot in some], list(some))
        for some in _parts(loads, self._most):
            self._place()
            self._load([slot for slot, _ in some], [page for _, page in some])

    def _save(self, pages: list[int], slots: list[int]) -> None:
        buffer = self._next(self._saved)
        at = self._upload(pages)

        def gather() -> None:
            for part, pool in zip(buffer.parts, self._pools, strict=True):
                part[: len(pages)].copy_(pool.index_select(1, at).transpose(0, 1))

        def copy() -> None:
            for part, host in zip(buffer.parts, self._host, strict=True):
                for place, slot in enumerate(slots):
                    host[slot].copy_(part[place], non_blocking=True)

        self._lanes.run(gather, beside=False)
        buffer.used = self._lanes.mark(beside=False)
        self._copy_beside(buffer, copy)

    def _load(self, slots: list[int], pages: list[int]) -> None:
        buffer = self._next(self._loaded)

        def copy() -> None:
            for part, host in zip(buffer.parts, self._host, strict=True):
                for place, slot in enumerate(slots):
                    part[place].copy_(host[slot], non_blocking=True)

        self._copy_beside(buffer, copy)
        self._arriving = buffer, pages

    def _place(self) -> None:
        """Write the pages that were loaded last to their places."""
        if self._arriving is None:
            return
        (buffer, pages), self._arriving = self._arriving, None
        at = self._upload(pages)

        def scatter() -> None:
            for part, pool in zip(buffer.parts, self._pools, strict=True):
                pool.index_copy_(1, at, part[: len(pages)].transpose(0, 1))

        self._lanes.wait(buffer.copied, beside=False)
        self._lanes.run(scatter, beside=False)
        buffer.used = self._lanes.mark(beside=False)

    def _copy_beside(self, buffer: _Buffer, copy: Callable[[], None]) -> None:
        self._lanes.wait(buffer.used, beside=True)
        self._lanes.run(copy, beside=True)
        buffer.copied = self._lanes.mark(beside=True)

    def _next(self, buffers: list[_Buffer]) -> _Buffer:
        """Return the buffer that was used longest ago, when its copy is done."""
        buffers.append(buffers.pop(0))
        buffers[-1].copied.synchronize()
        return buffers[-1]

    def _buffers(self) -> list[_Buffer]:
        parts = ([_pages_like(x, self._most, self._device) for x in self._pools] for _ in range(2))
        return [_Buffer(part, _Done(), self._lanes.mark(beside=False)) for part in parts]

    def _upload(self, pages: list[int]) -> Tensor:
        return to_device(array("i", pages), self._device).long()


def _pages_like(pool: Tensor, pages: int, device: torch.device) -> Tensor:
    """Return memory for pages of a tensor `layers pages ...`, each in one piece: `pages layers ...`."""
    layers, _, *page = pool.shape
    return torch.empty(pages, layers, *page, dtype=pool.dtype, device=device)


def _pin_(x: Tensor) -> None:
    """Pin the memory of a tensor; torch's pinned tensors would take the next power of two bytes."""
    cudart: Any = torch.cuda.cudart()
    if code := int(cudart.cudaHostRegister(x.data_ptr(), x.nbytes, 0)):
        raise RuntimeError(
            f"{x.nbytes} bytes of host memory must be pinnable, got CUDA error {code}; use less, or raise the limit (ulimit -l)"
        )
    weakref.finalize(x, cudart.cudaHostUnregister, x.data_ptr())


def _parts(moves: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    return (moves[i : i + most] for i in range(0, len(moves), most))
