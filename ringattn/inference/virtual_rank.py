"""A ring as one of its virtual ranks sees it, for pools and batches that are as those of a process of its own."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from ringattn.ring import Ring
from ringattn.transport.base import RingContext


class VirtualRank:
    """In place of a ring: the ranks are its virtual ranks, and this one is `hosted[index]`.

    The process compares calls and publishes errors, once for all of its virtual ranks: here nothing is compared. Attributes are
    those of `Ring`.
    """

    is_virtual = False

    def __init__(self, ring: Ring, index: int, device: torch.device) -> None:
        self.name, self.impl = ring.name, ring.impl
        self.rank, self.world_size, self.virtual_size = ring.hosted[index], ring.virtual_size, ring.virtual_size
        self._place = ring, index, device

    @property
    def context(self) -> RingContext:
        """The place of the virtual rank in its ring, once the transport is decided."""
        ring, index, device = self._place
        return ring.contexts(device)[index]

    def propagate_errors(self) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()
