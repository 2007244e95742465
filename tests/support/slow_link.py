"""A slow link between the nodes of a ring, so that one host can stand for several in checks and measurements."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ringattn.ring import Ring
from ringattn.transport.base import Message, Transport, Work


def slow_down(ring: Ring, gbps: float) -> Ring:
    """Limit the link between the nodes of a ring that has made no call yet to `gbps` gigabits per second; return the ring.

    Raises:
        ValueError: The ring has one node, or the rate is not a positive number.
    """
    between = ring.context.between_nodes
    if between is None:
        raise ValueError(
            f"the ring must have several nodes to have a link between them, got one; leave gbps={gbps} out"
        )
    ring.context = replace(ring.context, between_nodes=Throttled(between, gbps))
    return ring


class Throttled:
    """A transport no faster than a given rate.

    A transfer is complete when the transport below has completed it, and not before its bytes would have passed a link of
    that rate, one transfer after another. Its time begins when its inputs are ready. No SM is spent on waiting: on CUDA a
    stream sleeps in a host function; on a CPU the wait sleeps.

    Raises:
        ValueError: The rate is not a positive number.
    """

    def __init__(self, transport: Transport, gbps: float) -> None:
        if not (gbps > 0 and math.isfinite(gbps)):
            raise ValueError(
                f"gbps must be a positive number of gigabits per second, got {gbps}; leave it out for the full speed"
            )
        self._transport = transport
        self._seconds_per_byte = 8 / (gbps * 1e9)
        self._free_at = 0.0
        self._stream: torch.cuda.Stream | None = None

    def post(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> Work:
        """See `Transport.post`."""
        messages = [*sends, *receives]
        if not any(x.numel() for _, x in messages):
            return self._transport.post(sends, receives, what)
        seconds = max(_num_bytes(sends), _num_bytes(receives)) * self._seconds_per_byte
        device = messages[0][1].device
        if device.type == "cuda":
            wait_for_link = self._sleep_on_stream(device, seconds)
        else:
            free_at = self._free_at = max(self._free_at, time.monotonic()) + seconds

            def wait_for_link() -> None:
                time.sleep(max(0.0, free_at - time.monotonic()))

        return _ThrottledWork(self._transport.post(sends, receives, what), wait_for_link)

    def reserve(self, num_bytes: int, grad_bytes: int = 0) -> None:
        """See `Transport.reserve`."""
        self._transport.reserve(num_bytes, grad_bytes)

    def kv_gather(self) -> None:
        """Return None: a slow link is crossed transfer by transfer."""
        return

    def _sleep_on_stream(self, device: torch.device, seconds: float) -> Callable[[], None]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        _sleep(self._stream, seconds)
        event = self._stream.record_event()
        return lambda: torch.cuda.current_stream(device).wait_event(event)


@dataclass(frozen=True)
class _ThrottledWork:
    work: Work
    wait_for_link: Callable[[], None]

    def wait(self) -> None:
        self.work.wait()
        self.wait_for_link()


def _num_bytes(messages: Sequence[Message]) -> int:
    return sum(x.numel() * x.element_size() for _, x in messages)


def _sleep(stream: torch.cuda.Stream, seconds: float) -> None:
    """Let a stream sleep: the driver calls the C library's usleep, with no SM and no interpreter involved."""
    driver, usleep = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(None).usleep
    left = round(seconds * 1e6)
    while left > 0:
        # usleep takes less than a second
        part = min(left, 999_999)
        status = driver.cuLaunchHostFunc(
            ctypes.c_void_p(stream.cuda_stream), ctypes.cast(usleep, ctypes.c_void_p), ctypes.c_void_p(part)
        )
        if status:
            raise RuntimeError(f"a stream must be able to sleep, got CUDA driver error {status}; leave the rate out")
        left -= part
