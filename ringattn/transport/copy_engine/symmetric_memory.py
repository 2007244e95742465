"""Memory that every rank of a ring has at the same size and can reach on every other rank.

Note [Old memory]
    Memory is released only when no work can use it any more. A captured graph keeps the addresses it was captured with, so
    once a ring has been captured it keeps the buffers that it outgrows. To release a region makes torch wait for the device,
    which a capture forbids (the process would abort), and garbage may be collected at any time: a region that is collected
    during a capture is kept until one is made outside of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ringattn.transport.consensus import RankConsensus

_gone: list[tuple[Tensor, Any]] = []
"""Regions that were collected during a capture (Note [Old memory])."""

ALIGNMENT = 256
"""Bytes at a multiple of which the parts of a region begin."""


def aligned(num_bytes: int) -> int:
    """Round a number of bytes up to the beginning of the next part of a region."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, eq=False)
class Region:
    """One region of symmetric memory: this rank's bytes, the addresses here of all parts, and an object that keeps them alive."""

    local: Tensor
    addresses: tuple[int, ...]
    keeper: Any = None

    def __del__(self) -> None:
        if self.local.is_cuda and torch.cuda.is_current_stream_capturing():
            _gone.append((self.local, self.keeper))


class Memory(Protocol):
    """Source of a rank's regions."""

    device: torch.device

    def region(self, num_bytes: int, what: str) -> Region:
        """Return a zeroed region; all ranks make this call with the same size, else RuntimeError."""
        ...

    def barrier(self, what: str) -> None:
        """Wait until all work of this device has ended and all ranks have called this."""
        ...

    def pinned_ints(self, count: int) -> Tensor:
        """Return `count` int32 zeros in host memory that the device can write."""
        ...


@dataclass(eq=False)
class SymmetricMemory:
    """`Memory` of torch's symmetric memory, in a process group or a part with a name (`name_part`)."""

    group_name: str
    consensus: RankConsensus
    device: torch.device
    synchronize: Callable[[], None]

    def region(self, num_bytes: int, what: str) -> Region:  # noqa: D102
        from torch.distributed import _symmetric_memory as symmetric

        if not torch.cuda.is_current_stream_capturing():
            _gone.clear()
        self._compare(what, f"{num_bytes} bytes")
        with torch.cuda.device(self.device):
            local = symmetric.empty(num_bytes, dtype=torch.uint8, device=self.device)
            handle = symmetric.rendezvous(local, self.group_name)  # pyright: ignore[reportArgumentType]
            local.zero_()
        # torch may hand out a part of a larger mapping
        offset = local.data_ptr() - handle.buffer_ptrs[handle.rank]
        addresses = tuple(pointer + offset for pointer in handle.buffer_ptrs)
        self.barrier(f"{what} at {offset}")
        return Region(local, addresses, handle)

    def barrier(self, what: str) -> None:  # noqa: D102
        self.synchronize()
        self._compare(what, "ready")

    def pinned_ints(self, count: int) -> Tensor:  # noqa: D102
        return torch.zeros(count, dtype=torch.int32, pin_memory=True, device="cpu")

    def _compare(self, what: str, text: str) -> None:
        mine = f"{what}: {text}"
        texts = self.consensus.share("a buffer", mine)
        odd = {rank: theirs for rank, theirs in enumerate(texts) if theirs != mine}
        if odd:
            raise RuntimeError(
                f"all ranks of a ring must make the same buffers, got {mine!r} here and {odd} by ring rank; "
                "make the same calls in the same order everywhere"
            )
