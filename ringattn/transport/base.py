"""The protocol between the ring's loops and whatever moves bytes.

Owns two calls, post and wait, and the buffers that receive. Refuses to know shapes of attention, plans and gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

Parcel = tuple[int, Tensor]
"""(ring rank of the peer, contiguous tensor)."""


class Pending(Protocol):
    """Sends and receives that are under way."""

    def wait(self) -> None:
        """Returns when received tensors may be read and sent ones overwritten (in stream order on CUDA).

        Raises:
            RuntimeError: The transfer failed or timed out; the message names the rank, the step and the peers.
        """
        ...


class Transport(Protocol):
    """Moves tensors between the ranks of one ring."""

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel], what: str) -> Pending:
        """Starts one group of transfers and returns at once.

        Between two ranks, the n-th send of a group meets the n-th receive of the same group on the other side. Empty
        tensors are not moved.

        Args:
            sends: What goes out; must not change until the wait returns.
            receives: Where incoming bytes land.
            what: Names the ring step in errors and traces.
        """
        ...


class Done:
    """Nothing was under way."""

    def wait(self) -> None:
        """Returns."""


class NoTransport:
    """The transport of a ring of one rank: there is nobody to talk to."""

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel], what: str) -> Pending:
        """Accepts only empty groups."""
        assert len(sends) + len(receives) == 0, f"a ring of one rank has no peers, yet {what} wants to move tensors"
        return Done()


class Buffers:
    """Flat buffers that are reused across steps and calls, one per name, dtype, device and stream; they only grow.

    On CUDA, reuse is ordered by the stream: a buffer is handed out again only to work that is enqueued later.
    """

    def __init__(self) -> None:
        self._flat: dict[tuple[str, torch.dtype, torch.device, int], Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised contiguous tensor; valid until the same name is taken again.

        Args:
            name: Which buffer.
            shape: Shape of the view that is returned.
            dtype: Its dtype.
            device: Its device.
        """
        stream = torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0
        key = (name, dtype, device, stream)
        size = math.prod(shape)
        flat = self._flat.get(key)
        if flat is None or flat.numel() < size:
            flat = self._flat[key] = torch.empty(size, dtype=dtype, device=device)
        return flat[:size].view(tuple(shape))

    def num_bytes(self) -> int:
        """Bytes held now."""
        return sum(flat.numel() * flat.element_size() for flat in self._flat.values())

    def clear(self) -> None:
        """Lets go of all buffers."""
        self._flat.clear()


@dataclass(frozen=True)
class Seat:
    """One rank's place at the ring, which is all that the loops know of it."""

    rank: int
    world_size: int
    transport: Transport
    buffers: Buffers = field(default_factory=Buffers)
