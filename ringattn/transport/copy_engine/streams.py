"""Operations in stream order that need no SM: semaphores that are written and waited for, and copies between devices.

Owns the operations, and the protocol of a device that enqueues them. Refuses to know the meaning of a word or a byte, and how a
device is called (cuda_driver.py).

Note [Order of enqueueing]
    A wait for a word is invisible to CUDA's own scheduling, and streams may share a hardware queue. So whatever writes a
    word that another stream of this process waits for is enqueued before the wait: sharing a queue then costs time, never
    a deadlock. Inside a capture the same dependencies are expressed by events too, since a graph keeps only those; its branches
    share queues as well, in the order in which they were captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

MAX_PITCH = 2**31 - 1
"""Bytes between two rows of a copy, at most."""


class Write(NamedTuple):
    """`value` is stored at `address` once all earlier work of the stream is visible to every device."""

    address: int
    value: int


class Write64(NamedTuple):
    """Two neighbouring words at once, which costs as much as one: `value` at `address`, a multiple of 8, and `upper` behind it."""

    address: int
    value: int
    upper: int


class Wait(NamedTuple):
    """The stream goes on once the word at `address` equals `value`."""

    address: int
    value: int


class Copy(NamedTuple):
    """`rows` rows of `width` bytes; pitches are bytes from row to row."""

    target: int
    source: int
    width: int
    rows: int = 1
    target_pitch: int = 0
    source_pitch: int = 0


Op = Write | Write64 | Wait | Copy


Program = Any
"""A constant list of operations, made ready by `Streams.compile` and enqueued many times."""


class Streams(Protocol):
    """Streams of a device: `main()` is the caller's; `copy_stream` and `flag_stream` belong to the ring."""

    copy_stream: int
    flag_stream: int

    def main(self) -> int:
        """The caller's current stream."""
        ...

    def capturing(self) -> bool:
        """Whether the caller's stream is being captured into a graph."""
        ...

    def compile(self, ops: Sequence[Op]) -> Program:
        """Makes a list of operations ready. What holds copies is launched in captures only, or outside of them only."""
        ...

    def launch(self, program: Program, stream: int) -> None:
        """Enqueues a program; from its second time on as one graph where that saves calls."""
        ...

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Enqueues one copy between addresses."""
        ...

    def order(self, first: int, then: int) -> None:
        """Work enqueued later on lane `then` runs after what is on lane `first` now; CUDA sees it."""
        ...

    def call(self, work: Callable[[], object]) -> None:
        """Enqueues torch work on the caller's stream."""
        ...

    def record(self, work: Callable[[], object]) -> Program:
        """What work enqueues on the caller's stream, and beside it, as one program for that stream; nothing of it happens yet.

        While it is recorded, `capturing` says so. Memory that work frees again belongs to all programs that are recorded here,
        so these must be ordered on the device.
        """
        ...

    def graph_bytes(self) -> int:
        """Bytes of device memory that recorded programs use beside the tensors that they were given."""
        ...

    def rescue(self, ops: Sequence[Op]) -> None:
        """Does it at once, whatever other streams wait for, from any thread, also while another thread captures."""
        ...

    def fill(self, address: int, num_bytes: int) -> None:
        """Likewise sets all bits: NaN in every floating dtype. `num_bytes` is a multiple of 4."""
        ...

    def synchronize(self) -> None:
        """Returns when nothing of this device's work is left."""
        ...
