"""What a ring of two levels needs of its transports: who shares a node, and a slow link that can be made slower.

Owns the grouping of ranks by host and the throttle. Refuses to know plans, and how the transports below move bytes.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Sequence

import torch

from ringattn.plan.ring_plan import Nodes
from ringattn.transport.base import Message, Transport, Work


def group_by_host(hosts: Sequence[str]) -> Nodes:
    """Ranks that share a host share a node, in the order in which hosts appear.

    Args:
        hosts: Every rank's host.

    Raises:
        ValueError: Hosts have unequal numbers of ranks.

    Example:
        >>> group_by_host(["a", "a", "b", "b"])
        ((0, 1), (2, 3))
    """
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    sizes = {host: len(ranks) for host, ranks in nodes.items()}
    if len(set(sizes.values())) != 1:
        raise ValueError(
            f"nodes='auto' must find equally many ring ranks on every host, got {sizes}; pass nodes=1 for a ring of one level"
        )
    return tuple(tuple(ranks) for ranks in nodes.values())


class WithinNode(Transport):
    """A transport that serves one level of a ring of two: visits come one by one, never gathered.

    Args:
        transport: What moves bytes within the node.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def post(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> Work:
        """See `Transport.post`."""
        return self._transport.post(sends, receives, what)

    def reserve(self, num_bytes: int, replies: int = 0) -> None:
        """See `Transport.reserve`."""
        self._transport.reserve(num_bytes, replies)


class Throttled(Transport):
    """A link that is not faster than a given rate: a measuring aid, so that one machine can stand for several.

    A transfer is complete when the transport below says so, and not before its bytes would have passed a link of that
    rate in each direction, one transfer after another. The time begins when the inputs of a transfer are ready. No SM
    is spent on waiting: on CUDA a stream of its own sleeps in a host function; on a CPU the wait sleeps.

    Args:
        transport: What moves the bytes.
        gbps: Gigabits per second in each direction.

    Raises:
        ValueError: The rate is not a positive number.
    """

    def __init__(self, transport: Transport, gbps: float) -> None:
        if not (gbps > 0 and math.isfinite(gbps)):
            raise ValueError(f"outer_gbps must be a positive number of gigabits per second, got {gbps}; or None")
        self._transport = transport
        self._seconds_per_byte = 8 / (gbps * 1e9)
        self._free_at = 0.0
        self._stream: torch.cuda.Stream | None = None

    def post(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> Work:
        """See `Transport.post`."""
        messages = [*sends, *receives]
        if not any(x.numel() for _, x in messages):
            return self._transport.post(sends, receives, what)
        seconds = max(_bytes(sends), _bytes(receives)) * self._seconds_per_byte
        device = messages[0][1].device
        if device.type == "cuda":
            passed = self._sleep_on_stream(device, seconds)
        else:
            self._free_at = max(self._free_at, time.monotonic()) + seconds
            passed = _Alarm(self._free_at).wait
        return _Later(self._transport.post(sends, receives, what), passed)

    def reserve(self, num_bytes: int, replies: int = 0) -> None:
        """See `Transport.reserve`."""
        self._transport.reserve(num_bytes, replies)

    def _sleep_on_stream(self, device: torch.device, seconds: float) -> Callable[[], None]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        _sleep(self._stream, seconds)
        event = self._stream.record_event()
        return lambda: torch.cuda.current_stream(device).wait_event(event)


class _Alarm:
    def __init__(self, at: float) -> None:
        self._at = at

    def wait(self) -> None:
        time.sleep(max(0.0, self._at - time.monotonic()))


class _Later:
    """A transfer that is over when it is over and the time of the link has passed."""

    def __init__(self, transfer: Work, passed: Callable[[], None]) -> None:
        self._transfer = transfer
        self._passed = passed

    def wait(self) -> None:
        self._transfer.wait()
        self._passed()


def _bytes(messages: Sequence[Message]) -> int:
    return sum(x.numel() * x.element_size() for _, x in messages)


def _sleep(stream: torch.cuda.Stream, seconds: float) -> None:
    """Lets a stream sleep: the C library's usleep, called by the driver, with no SM and no interpreter involved."""
    driver, usleep = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(None).usleep
    left = round(seconds * 1e6)
    while left > 0:
        # usleep takes less than a second
        part = min(left, 999_999)
        status = driver.cuLaunchHostFunc(
            ctypes.c_void_p(stream.cuda_stream), ctypes.cast(usleep, ctypes.c_void_p), ctypes.c_void_p(part)
        )
        if status:
            raise RuntimeError(f"a stream must be able to sleep, got CUDA driver error {status}; pass outer_gbps=None")
        left -= part
