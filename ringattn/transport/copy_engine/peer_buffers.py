"""Memory whose rows wait for peers: in front the words by which ranks say to each other what is there, and behind them the rows.

Owns where every such word and row lies on every rank, and how a word is said and taken. Refuses to know when that is done (the
constant programs of kv_gather.py, grad_return.py and send_recv.py), and how memory is mapped (symmetric_memory.py).

Note [Binary semaphores]
    A signal between two ranks is one 32-bit word in the memory of the rank that waits: the other side writes 1, the waiter
    waits for 1 and writes 0. There are no counters, so a program of waits, copies and writes is a constant: it is built once
    and enqueued again and again, also by a graph that somebody captured, any number of times and in any order with other
    calls, as long as all ranks do the same. Each place where rows wait for a peer has two words per pair of ranks:
    `ready` (at the reader: "the rows are there") and `reusable` (at the writer: "they have been read"). `reusable` begins as 1.
    Far has a `ready` per group of heads and, in place of `reusable`, `turn` (at the owner: "it is your turn at this far"). Between
    calls it is the turn of the nearest owner, the member before the reader: there `turn` is 1, and elsewhere 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ringattn.transport.copy_engine.streams import Op, Wait, Write
from ringattn.transport.copy_engine.symmetric_memory import Memory, Region, aligned

MOST_GROUPS = 8
"""Groups of heads of a gather."""
PAYLOAD_ALIGNMENT = 16
"""Bytes that tensors behind one another begin at a multiple of."""


class PeerBuffer:
    """A region whose rows wait for peers: `ready` and `reusable` words for every pair, then the rows. All ranks make it together.

    Args:
        memory: Where regions come from.
        members: The ranks that share it, in the order of a region's addresses.
        num_bytes: Of the rows of one rank.
        what: Its name, for ranks that do not come.
        reusable: Of whom this rank has nothing to wait for when the station begins; None: of all.
    """

    groups = 1
    """`ready` words of a pair."""

    def __init__(
        self, memory: Memory, members: Sequence[int], num_bytes: int, what: str, reusable: Sequence[int] | None = None
    ) -> None:
        ranks = self._ranks = len(members)
        self._place = {rank: place for place, rank in enumerate(members)}
        self._header = aligned(4 * ranks * (self.groups + 1))
        self.num_bytes = num_bytes
        self.region: Region = memory.region(self._header + aligned(num_bytes), what)
        # nobody reads what was never written
        flags = self.region.local[: 4 * ranks * (self.groups + 1)].view(torch.int32)[ranks * self.groups :]
        for of in members if reusable is None else reusable:
            flags[self._place[of]] = 1
        memory.barrier(f"{what} begins")

    def ready(self, at: int, of: int, group: int = 0) -> int:
        """Address of the word by which rank `of` tells rank `at` that its rows are there."""
        return self.region.addresses[self._place[at]] + 4 * (group * self._ranks + self._place[of])

    def reusable(self, at: int, of: int) -> int:
        """Address of the word by which rank `of` tells rank `at` that it has read its rows."""
        return self.region.addresses[self._place[at]] + 4 * (self.groups * self._ranks + self._place[of])

    def rows(self, at: int) -> int:
        """Address of the rows of rank `at`."""
        return self.region.addresses[self._place[at]] + self._header

    def poison(self) -> None:
        """Sets all bits of this rank's rows."""
        self.region.local[self._header :].fill_(255)

    def view(self, shape: Sequence[int], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """This rank's rows, from a byte offset on."""
        return view_bytes(self.region.local[self._header + offset :], shape, dtype)


class RemoteKVBuffer(PeerBuffer):
    """Where peers write rows of theirs for one kernel: behind the rows stands the table of a bias of keys.

    Takes the arguments of `PeerBuffer`, but this rank for `reusable`.
    """

    groups = MOST_GROUPS

    def __init__(self, rank: int, memory: Memory, members: Sequence[int], num_bytes: int, what: str) -> None:
        # Note [Binary semaphores]: it is the turn of this rank where it is the nearest
        super().__init__(memory, members, num_bytes, what, reusable=[members[(members.index(rank) + 1) % len(members)]])

    def turn(self, at: int, of: int) -> int:
        """Address of the word by which rank `at` is told that it is its turn at the far of rank `of`."""
        return self.reusable(at, of)


def signal(addresses: Sequence[int]) -> list[Op]:
    """Writes 1 to each address."""
    return [Write(address, 1) for address in addresses]


def wait_and_reset(word: int) -> list[Op]:
    """Waits until a word is said, and takes it back."""
    return [Wait(word, 1), Write(word, 0)]


def padded(num_bytes: int) -> int:
    """So many bytes and what lies between them and the next tensor."""
    return -(-num_bytes // PAYLOAD_ALIGNMENT) * PAYLOAD_ALIGNMENT


def view_bytes(flat: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The first bytes of a plain buffer as a tensor."""
    return flat[: math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
