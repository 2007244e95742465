"""Operations in stream order that need no SM: writes of and waits for semaphores, and copies between devices.

A wait for a word is invisible to CUDA's own scheduling, and streams may share a hardware queue. So a write of a word that
another stream of this process waits for is enqueued before the wait: sharing a queue then costs time, never
a deadlock. Inside a capture the same dependencies are expressed by events too, since a graph keeps only those; its branches
share queues as well, in the order in which they were captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

MAX_PITCH = 2**31 - 1
"""Most bytes between two rows of a copy."""


class Write(NamedTuple):
    """Store `value` at `address` once all earlier work of the stream is visible to every device."""

    address: int
    value: int


class Write64(NamedTuple):
    """Store two neighbouring words at once, at the price of one: `value` at `address`, a multiple of 8, and `upper` behind it."""

    address: int
    value: int
    upper: int


class Wait(NamedTuple):
    """Wait until the word at `address` equals `value`."""

    address: int
    value: int


class Copy(NamedTuple):
    """Copy `rows` rows of `width` bytes; pitches are bytes from row to row."""

    target: int
    source: int
    width: int
    rows: int = 1
    target_pitch: int = 0
    source_pitch: int = 0


Op = Write | Write64 | Wait | Copy
Program = Any
"""A constant list of operations, prepared by `Streams.compile` and enqueued many times."""


class Streams(Protocol):
    """Streams of a device: `main()` is the caller's; `copy_stream`, `flag_stream` and `read_stream` belong to the ring."""

    copy_stream: int
    flag_stream: int
    read_stream: int

    def main(self) -> int:
        """Return the caller's current stream."""
        ...

    def capturing(self) -> bool:
        """Return whether the caller's stream is being captured into a graph."""
        ...

    def compile(self, ops: Sequence[Op]) -> Program:
        """Prepare a list of operations. A program with copies is launched in captures only, or outside of them only."""
        ...

    def launch(self, program: Program, stream: int) -> None:
        """Enqueue a program; from its second time on as one graph where that saves driver calls."""
        ...

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Enqueue one copy between addresses."""
        ...

    def order(self, first: int, then: int) -> None:
        """Order work that is enqueued later on stream `then` behind the work that is on stream `first` now, by an event."""
        ...

    def call(self, work: Callable[[], object]) -> None:
        """Enqueue torch work on the caller's stream."""
        ...

    def wait_until_idle(self, seconds: float) -> bool:
        """Wait until the caller's stream has nothing to do; False: it still has after so many seconds."""
        ...

    def record(self, work: Callable[[], object]) -> Program:
        """Record the work that a function enqueues, on the caller's stream and beside it, as one program; nothing runs yet.

        Meanwhile `capturing` is true. Memory that the work frees again belongs to all programs that are recorded here, so these
        must be ordered on the device.
        """
        ...

    def rescue(self, ops: Sequence[Op]) -> None:
        """Execute operations at once, whatever other streams wait for, from any thread, also while another thread captures."""
        ...

    def fill(self, address: int, num_bytes: int) -> None:
        """Set all bits at once, as `rescue`: NaN in every floating dtype. `num_bytes` is a multiple of 4."""
        ...

    def synchronize(self) -> None:
        """Wait until all work of this device has ended."""
        ...
