"""Whole weights of a layer for prefill of many rows: gathered into one of two buffers while the layer before it computes.

Note [Two buffers]
    Layer i is gathered into buffer i mod 2. When the first module of layer i is called, it waits for its own gather and posts that
    of layer i + 1, whose buffer layer i - 1 has read before: on a GPU a side stream waits for the current one, and transfers while
    the layer computes. Weights that are sliced along their first dim arrive where they are read. Others arrive in a staging buffer
    of at most STAGING bytes, piece by piece, and are copied to their columns on the side stream. Nothing of it is captured.

Note [Slices that peers read]
    With `PeerReads` a layer's slices live in one region of symmetric memory. Each rank copies those of all ranks to their columns,
    without staging and SMs, beginning with the next rank's, so that ranks read from different peers. Slices do not change: one
    barrier after loading is the whole protocol between ranks. A rank may end early, because memory lives as long as a peer maps it.
    Nothing waits for a peer, so the watchdog has nothing to observe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

from ringattn.integrations.transformers.sharded_weights.plan import Slot
from ringattn.ring import Ring
from ringattn.transport.copy_engine.peer_reads import PeerReads
from ringattn.transport.copy_engine.streams import Copy, Program

STAGING = 2**28
"""Most bytes of all ranks' slices that arrive at a time where they must be copied to their columns."""
ALIGNED = 256
"""Bytes of which the place of a weight in a buffer is a multiple."""


class LayerGather:
    """Gathers the sliced weights of layers.

    Args:
        layers: The weights of each layer, sliced.
        ring: The ranks that hold the slices.
        reads: Where given, slices move into memory that all ranks reach, and are read by copy engine; else they are all-gathered.

    Attributes:
        active: A call of the model that reads gathered weights is running.
        gathered: Number of layers that were gathered so far.
    """

    def __init__(self, layers: list[list[Slot]], ring: Ring, reads: PeerReads | None = None) -> None:
        self._layers, self._ring, self._reads = layers, ring, reads
        self._device = layers[0][0].weight.device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        offsets, self.buffer_bytes = [], 0
        for slots in layers:
            ends = [0]
            for slot in slots:
                size = prod(self._received(slot)) * slot.weight.element_size()
                ends.append(ends[-1] + -(-size // ALIGNED) * ALIGNED)
            offsets.append(ends[:-1])
            self.buffer_bytes = max(self.buffer_bytes, ends[-1])
        self._offsets = offsets
        self._buffers: list[Tensor] = []
        self._pending: dict[int, list[Callable[[], None]]] = {}
        self._posted: dict[int, torch.cuda.Event | None] = {}
        self._entered = -1
        self.active, self.gathered = False, 0
        self._programs: dict[int, Program] = {}
        self._addresses = [] if reads is None else self._share(reads)

    def _share(self, reads: PeerReads) -> list[list[tuple[int, ...]]]:
        """Move the slices into memory that all ranks reach, and return the addresses by layer, slot and rank."""
        found: list[list[tuple[int, ...]]] = []
        for number, slots in enumerate(self._layers):
            addresses: list[tuple[int, ...]] = []
            shared = reads.share([slot.weight.data for slot in slots], f"slices of layer {number}")
            for slot, (mine, of_ranks) in zip(slots, shared, strict=True):
                slot.weight.data = mine
                addresses.append(of_ranks)
            found.append(addresses)
            if self._device.type == "cuda":
                # for the next region, which torch's allocator does not make
                torch.cuda.empty_cache()
        reads.begin("slices")
        return found

    def allocate(self) -> None:
        """Allocate the buffers, once: before a cache takes the memory that is left."""
        if not self._buffers:
            self._buffers = [
                torch.empty(self.buffer_bytes, dtype=torch.uint8, device=self._device)
                for _ in range(min(2, len(self._layers)))
            ]

    @contextmanager
    def gather_ahead(self) -> Iterator[None]:
        """Gather layers ahead inside, which is one call of the model."""
        self.allocate()
        self._drain()
        self.active = True
        try:
            self._post(0)
            yield
        finally:
            self.active = False
            self._drain()

    def whole(self, layer: int, index: int) -> Tensor:
        """Return a whole weight of a layer, valid until the layer after the next is posted."""
        self._enter(layer)
        slot, received = self._layers[layer][index], self._target(layer, index)
        return received.narrow(0, 0, slot.slice.columns) if _in_place(slot) else received

    def _enter(self, layer: int) -> None:
        if self._entered == layer:
            return
        self._entered = layer
        if layer not in self._posted:
            self._post(layer)
        self._finish(layer)
        if layer + 1 < len(self._layers):
            self._post(layer + 1)

    def _received(self, slot: Slot) -> tuple[int, ...]:
        """Return the shape in which a weight is received: with all padding where that is at its end, else without any."""
        sliced = slot.weight.shape
        if _in_place(slot):
            return (self._ring.world_size * sliced[0], *sliced[1:])
        return slot.slice.whole_shape(sliced)

    def _target(self, layer: int, index: int) -> Tensor:
        slot, first = self._layers[layer][index], self._offsets[layer][index]
        shape = self._received(slot)
        size = prod(shape) * slot.weight.element_size()
        return self._buffers[layer % 2][first : first + size].view(slot.weight.dtype).view(shape)

    def _post(self, layer: int) -> None:
        """Begin to gather a layer; every rank posts the same ones in the same order."""
        self.gathered += 1
        if self._reads is not None:
            if layer not in self._programs:
                self._programs[layer] = self._reads.compile(self._copies(layer))
            self._pending[layer] = [self._reads.start(self._programs[layer])]
            self._posted[layer] = None
            return
        if self._stream is None:
            self._pending[layer] = [
                step for index in range(len(self._layers[layer])) for step in self._transfers(layer, index)
            ]
            self._posted[layer] = None
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for index in range(len(self._layers[layer])):
                for finish in self._transfers(layer, index):
                    finish()
            event = torch.cuda.Event()
            event.record(self._stream)
        self._posted[layer] = event

    def _copies(self, layer: int) -> list[Copy]:
        """Return the copies of all ranks' slices into the whole weights of a layer."""
        ranks, mine = self._ring.world_size, self._ring.rank
        return [
            copy
            for rank in ((mine + turn) % ranks for turn in range(1, ranks + 1))
            for index, (slot, of_ranks) in enumerate(zip(self._layers[layer], self._addresses[layer], strict=True))
            for copy in slot.slice.copies(slot.weight, rank, of_ranks[rank], self._target(layer, index).data_ptr())
        ]

    def _transfers(self, layer: int, index: int) -> Iterator[Callable[[], None]]:
        """Begin the transfers of a weight, and yield for each a function that ends it in the current stream."""
        slot, target = self._layers[layer][index], self._target(layer, index)
        mine, ranks = slot.weight.data, self._ring.world_size
        if _in_place(slot):
            wait = self._ring.post_gather(mine, target.view(ranks, *mine.shape))
            yield lambda: _end(wait)
            return
        rows = max(1, STAGING * mine.shape[0] // (ranks * mine.nbytes))
        if slot.slice.dim == 0:
            rows = mine.shape[0]  # parts along the first dim come whole
        for first in range(0, mine.shape[0], rows):
            piece = mine[first : first + rows]
            stack = piece.new_empty(ranks, *piece.shape)
            wait = self._ring.post_gather(piece, stack)
            into = target if slot.slice.dim == 0 else target[first : first + rows]
            yield lambda wait=wait, stack=stack, into=into: _end(wait, slot, stack, into)

    def _finish(self, layer: int) -> None:
        """Let the current stream wait for a layer."""
        for step in self._pending.pop(layer, ()):
            step()
        if (event := self._posted.pop(layer)) is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def _drain(self) -> None:
        """Wait for layers that were posted and not read: a call ended early."""
        for layer in list(self._posted):
            self._finish(layer)
        self._entered = -1


def _in_place(slot: Slot) -> bool:
    """Return whether slices of all ranks one behind the other are the whole weight."""
    return slot.slice.dim == 0 and slot.slice.parts == 1


def _end(
    wait: Callable[[], object], slot: Slot | None = None, stack: Tensor | None = None, into: Tensor | None = None
) -> None:
    wait()
    if slot is not None and stack is not None and into is not None:
        slot.slice.write(stack, into)
