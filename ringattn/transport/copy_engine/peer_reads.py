"""Tensors that never change, in memory that all ranks of a host reach: each rank copies those of its peers, without SMs.

No flags are needed: after one barrier every rank may read at any time. A read begins when the caller's stream has come to it, and
the caller's stream waits before it uses the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ringattn.transport.copy_engine.peer_buffers import padded, view_bytes
from ringattn.transport.copy_engine.streams import Op, Program, Streams
from ringattn.transport.copy_engine.symmetric_memory import Memory, Region


class PeerReads:
    """One rank's tensors that all ranks may read, and its reads."""

    def __init__(self, streams: Streams, memory: Memory) -> None:
        self._streams, self._memory = streams, memory
        self._regions: list[Region] = []  # peers read them as long as this lives

    @torch.inference_mode(False)
    def share(self, tensors: Sequence[Tensor], what: str) -> list[tuple[Tensor, tuple[int, ...]]]:
        """Copy tensors into a region, and return each copy with the addresses here of those of all ranks; see `Memory.region`.

        Tensors whose bytes are a multiple of 16 lie one behind the other.
        """
        ends = [0]
        for x in tensors:
            ends.append(ends[-1] + padded(x.nbytes))
        region = self._memory.region(ends[-1], what)
        self._regions.append(region)
        found = []
        for x, first in zip(tensors, ends, strict=False):
            mine = view_bytes(region.local[first:], x.shape, x.dtype)
            mine.copy_(x)
            found.append((mine, tuple(address + first for address in region.addresses)))
        return found

    def begin(self, what: str) -> None:
        """Wait until all ranks have shared their tensors; from then on they must not change."""
        self._memory.barrier(f"{what} begin")

    def compile(self, copies: Sequence[Op]) -> Program:
        """Prepare copies that are enqueued many times."""
        return self._streams.compile(copies)

    def start(self, program: Program) -> Callable[[], None]:
        """Enqueue copies behind the present work of the caller's stream; return a function that lets its stream wait for them."""
        streams = self._streams
        streams.order(streams.main(), streams.read_stream)
        streams.launch(program, streams.read_stream)
        return lambda: streams.order(streams.read_stream, streams.main())
