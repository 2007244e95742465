"""Memory that peers read or write: semaphores in front, and rows behind them.

A signal between two ranks is one 32-bit word in the memory of the rank that waits: the other side writes 1, the waiter
waits for 1 and writes 0. There are no counters, so a program of waits, copies and writes is a constant: it is built once
and enqueued again and again, also by a captured graph, any number of times and in any order with other calls, as long as
all ranks do the same. Each peer buffer has two semaphores per pair of ranks: `ready` (at the reader: "the rows are
written") and `reusable` (at the writer: "they have been read"), which begins as 1. The remote KV buffer has a `ready` per
group of heads and, in place of `reusable`, `turn` (at the owner: "you may write to this remote buffer"). Between calls the
nearest owner, the member before the reader, has the turn: there `turn` is 1, and elsewhere 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ringattn.transport.copy_engine.streams import Op, Wait, Write
from ringattn.transport.copy_engine.symmetric_memory import Memory, Region, aligned

MOST_GROUPS = 8
"""Most groups of heads of a gather."""
PAYLOAD_ALIGNMENT = 16
"""Bytes at a multiple of which each tensor begins."""


class PeerBuffer:
    """A region of `ready` and `reusable` semaphores for every pair of members, then num_bytes of rows. All ranks make it together.

    `reusable` begins as 1 for the given ranks; None: for all.
    """

    groups = 1
    """`ready` semaphores of a pair."""

    def __init__(
        self, memory: Memory, members: Sequence[int], num_bytes: int, what: str, reusable: Sequence[int] | None = None
    ) -> None:
        ranks = self._ranks = len(members)
        self._place = {rank: place for place, rank in enumerate(members)}
        self._header = aligned(4 * ranks * (self.groups + 1))
        self.num_bytes = num_bytes
        self.region: Region = memory.region(self._header + aligned(num_bytes), what)
        # no rank reads rows that were never written
        flags = self.region.local[: 4 * ranks * (self.groups + 1)].view(torch.int32)[ranks * self.groups :]
        for of in members if reusable is None else reusable:
            flags[self._place[of]] = 1
        memory.barrier(f"{what} begins")

    def ready(self, at: int, of: int, group: int = 0) -> int:
        """Return the address of the semaphore by which rank `of` signals to rank `at` that its rows are written."""
        return self.region.addresses[self._place[at]] + 4 * (group * self._ranks + self._place[of])

    def reusable(self, at: int, of: int) -> int:
        """Return the address of the semaphore by which rank `of` signals to rank `at` that it has read its rows."""
        return self.region.addresses[self._place[at]] + 4 * (self.groups * self._ranks + self._place[of])

    def rows(self, at: int) -> int:
        """Return the address of the rows of rank `at`."""
        return self.region.addresses[self._place[at]] + self._header

    def view(self, shape: Sequence[int], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """Return this rank's rows as a tensor, from a byte offset on."""
        return view_bytes(self.region.local[self._header + offset :], shape, dtype)


class RemoteKVBuffer(PeerBuffer):
    """A buffer that peers write rows into for one kernel; behind the rows is the table of key_bias."""

    groups = MOST_GROUPS

    def __init__(self, rank: int, memory: Memory, members: Sequence[int], num_bytes: int, what: str) -> None:
        # this rank has the turn where it is the nearest owner
        super().__init__(memory, members, num_bytes, what, reusable=[members[(members.index(rank) + 1) % len(members)]])

    def turn(self, at: int, of: int) -> int:
        """Return the address of the semaphore that gives rank `at` its turn at the remote buffer of rank `of`."""
        return self.reusable(at, of)


def signal(addresses: Sequence[int]) -> list[Op]:
    """Write 1 to each address."""
    return [Write(address, 1) for address in addresses]


def wait_and_reset(word: int) -> list[Op]:
    """Wait until a semaphore is 1, and write 0."""
    return [Wait(word, 1), Write(word, 0)]


def padded(num_bytes: int) -> int:
    """Round a number of bytes up to the beginning of the next tensor."""
    return -(-num_bytes // PAYLOAD_ALIGNMENT) * PAYLOAD_ALIGNMENT


def view_bytes(flat: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the first bytes of a plain buffer as a tensor."""
    return flat[: math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
