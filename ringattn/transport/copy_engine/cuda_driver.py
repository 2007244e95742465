"""`Streams` on a CUDA device, by calls of the CUDA driver.

The driver is called through ctypes, with arguments that were prepared before: one call then costs the host 2 microseconds, a third
of the time of a general binding.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from ctypes import byref, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_ulonglong, c_void_p
from dataclasses import dataclass
from typing import Any

import torch

from ringattn.transport.copy_engine.streams import Copy, Op, Wait, Write, Write64
from ringattn.transport.timeout import record_events, wait_until_done

BATCH = 200
"""Operations of one driver call; the driver takes fewer than 256."""
WORTH_A_GRAPH = 5
"""Driver calls from which on a launch of a graph costs the host less."""


class _Word(ctypes.Structure):
    """An entry of a batch: the union CUstreamBatchMemOpParams for one word of 32 bits."""

    _fields_ = (
        ("operation", c_uint32),
        ("address", c_uint64),
        ("value", c_uint64),
        ("flags", c_uint32),
        ("alias", c_uint64),
        ("rest", c_uint64),
    )


_SIDE = (
    ("x", c_size_t),
    ("y", c_size_t),
    ("kind", c_uint32),
    ("host", c_void_p),
    ("device", c_uint64),
    ("array", c_void_p),
    ("pitch", c_size_t),
)


class _Block(ctypes.Structure):
    """CUDA_MEMCPY2D: a copy of rows."""

    _fields_ = (
        *((f"source_{name}", kind) for name, kind in _SIDE),
        *((f"target_{name}", kind) for name, kind in _SIDE),
        ("width", c_size_t),
        ("height", c_size_t),
    )


_WAIT, _WRITE, _WRITE_64 = 1, 2, 5  # operations of an entry
_EQUAL = 1  # flag of a wait; that of a write is 0: a fence comes before it
_DEVICE_MEMORY = 2
_WORDS_OF_64 = 122  # attribute of a device: writes of 64 bits
_THREAD_LOCAL, _RELAXED = 1, 2  # modes of a capture
_NON_BLOCKING = 1
_NO_TIMING = 2

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuStreamBatchMemOp_v2": (c_void_p, c_uint, c_void_p, c_uint),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemcpy2DAsync_v2": (c_void_p, c_void_p),
    "cuMemsetD32Async": (c_uint64, c_uint, c_size_t, c_void_p),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuGraphInstantiateWithFlags": (c_void_p, c_void_p, c_ulonglong),
    "cuGraphDestroy": (c_void_p,),
    "cuGraphExecDestroy": (c_void_p,),
    "cuEventCreate": (c_void_p, c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventDestroy_v2": (c_void_p,),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDeviceGetAttribute": (c_void_p, c_int, c_int),
    "cuCtxGetStreamPriorityRange": (c_void_p, c_void_p),
    "cuStreamCreateWithPriority": (c_void_p, c_uint, c_int),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuStreamBeginCapture_v2": (c_void_p, c_uint),
    "cuStreamEndCapture": (c_void_p, c_void_p),
    "cuThreadExchangeStreamCaptureMode": (c_void_p,),
    "cuGetErrorName": (c_int, c_void_p),
}


def load_driver() -> ctypes.CDLL:
    """Return the CUDA driver, with the argument types of its functions; RuntimeError where it is missing or too old.

    The interpreter lock is released during each call: one may block while the watchdog of a ring must act.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        for name, arguments in _SIGNATURES.items():
            function = getattr(driver, name)
            function.argtypes, function.restype = arguments, c_int
    except (OSError, AttributeError) as error:
        raise RuntimeError(
            f"the CUDA driver must be of CUDA 12 or later, got {error}; install a newer driver"
        ) from error
    return driver


def _refuse(driver: ctypes.CDLL, status: int, doing: str) -> None:
    name = ctypes.c_char_p()
    driver.cuGetErrorName(status, byref(name))
    text = name.value.decode() if name.value else "an unknown error"
    raise RuntimeError(
        f"the CUDA driver must {doing}, got {text} ({status}); look for an earlier error of this process"
    )


def _entries(op: Write | Write64 | Wait, pairs: bool) -> list[_Word]:
    """Return the batch entries of an operation; pairs: the device writes 64 bits at once."""
    if isinstance(op, Write64):
        if pairs:
            return [_Word(_WRITE_64, op.address, (op.upper & 0xFFFFFFFF) << 32 | op.value & 0xFFFFFFFF, 0)]
        # `value` is written last, because readers act upon it
        halves = Write(op.address + 4, op.upper), Write(op.address, op.value)
        return [entry for word in halves for entry in _entries(word, pairs)]
    waits = isinstance(op, Wait)
    return [_Word(_WAIT if waits else _WRITE, op.address, op.value & 0xFFFFFFFF, _EQUAL if waits else 0)]


@dataclass(eq=False, slots=True)
class _Calls:
    """A program of the CUDA driver: calls that take the stream, and the graph they became."""

    calls: list[Callable[[int], None]]
    until_graph: int  # launches until it becomes one; negative: it stays as it is
    graph: _Graph | None = None


class CudaStreams:
    """`Streams` on a CUDA device; raises RuntimeError where the driver is missing or too old."""

    def __init__(self, device: torch.device) -> None:
        self._cu = load_driver()
        self._do = functools.partial(_do, self._cu)
        self._device = device
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        low, high = c_int(), c_int()
        self._do("say its priorities", self._cu.cuCtxGetStreamPriorityRange, byref(low), byref(high))
        lowest, highest = low.value, high.value
        # torch reuses its streams: one that a caller waits on could not run a rescue
        self.copy_stream: int = self._own_stream(min(highest + 1, lowest))
        self.flag_stream: int = self._own_stream(min(highest + 1, lowest))
        self.read_stream: int = self._own_stream(lowest)
        self._capture_stream = self._own_stream(lowest)
        self._rescue_stream = self._own_stream(highest)
        self._pairs = self._writes_pairs()
        event = c_void_p()
        self._do("make an event", self._cu.cuEventCreate, byref(event), _NO_TIMING)
        self._event = event.value
        self._pool: torch.cuda.MemPool | None = None  # of temporary tensors of recorded work

    def main(self) -> int:  # noqa: D102
        return torch._C._cuda_getCurrentRawStream(self._index)

    def capturing(self) -> bool:  # noqa: D102
        return torch.cuda.is_current_stream_capturing()

    def compile(self, ops: Sequence[Op]) -> _Calls:  # noqa: D102
        calls: list[Callable[[int], None]] = []
        entries: list[_Word] = []
        copies = False
        for op in ops:
            if isinstance(op, Copy):
                copies = True
                self._flush(entries, calls)
                calls.append(self._copy(op))
            else:
                entries += _entries(op, self._pairs)
                if len(entries) >= BATCH:
                    self._flush(entries, calls)
        self._flush(entries, calls)
        becomes_a_graph = copies and len(calls) >= WORTH_A_GRAPH and not self.capturing()
        return _Calls(calls, 1 if becomes_a_graph else -1)

    def launch(self, program: _Calls, stream: int) -> None:  # noqa: D102
        if program.until_graph == 0:
            program.graph = _Graph(
                self._cu, self._capture_stream, lambda: [call(self._capture_stream) for call in program.calls]
            )
        program.until_graph -= 1
        if program.graph is not None:
            status = self._cu.cuGraphLaunch(program.graph.handle, stream)
            if status:
                _refuse(self._cu, status, "launch a graph")
            return
        for call in program.calls:
            call(stream)

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:  # noqa: D102
        status = self._cu.cuMemcpyAsync(target, source, num_bytes, stream)
        if status:
            _refuse(self._cu, status, "enqueue a copy")

    def order(self, first: int, then: int) -> None:  # noqa: D102
        self._do("record an event", self._cu.cuEventRecord, self._event, first)
        self._do("wait for an event", self._cu.cuStreamWaitEvent, then, self._event, 0)

    def call(self, work: Callable[[], object]) -> None:  # noqa: D102
        work()

    def wait_until_idle(self, seconds: float) -> bool:  # noqa: D102
        return wait_until_done(record_events(self._device), seconds)

    def record(self, work: Callable[[], object]) -> _Calls:  # noqa: D102
        recorded = _Calls([], -1)
        if self._pool is None:
            self._pool = torch.cuda.MemPool()
        capture_stream = torch.cuda.ExternalStream(self._capture_stream, device=self._device)
        with torch.cuda.use_mem_pool(self._pool, self._index), torch.cuda.stream(capture_stream):
            # torch may have to get memory meanwhile
            recorded.graph = _Graph(self._cu, self._capture_stream, work, _RELAXED)
        return recorded

    def rescue(self, ops: Sequence[Op]) -> None:  # noqa: D102
        with _relaxed(self._cu, self._index):
            for call in self.compile(ops).calls:
                call(self._rescue_stream)
            self._do("finish a rescue", self._cu.cuStreamSynchronize, self._rescue_stream)

    def fill(self, address: int, num_bytes: int) -> None:  # noqa: D102
        with _relaxed(self._cu, self._index):
            self._do("fill memory", self._cu.cuMemsetD32Async, address, 0xFFFFFFFF, num_bytes // 4, self._rescue_stream)
            self._do("finish a rescue", self._cu.cuStreamSynchronize, self._rescue_stream)

    def time_copy(self, target: int, source: int, num_bytes: int) -> float:
        """Return the seconds of a copy on an idle device; the best of three, after a warm-up."""
        stream = torch.cuda.ExternalStream(self.copy_stream, self._device)
        times = []
        for _ in range(4):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            self.copy(target, source, num_bytes, self.copy_stream)
            end.record(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3)
        return min(times[1:])

    def synchronize(self) -> None:  # noqa: D102
        torch.cuda.synchronize(self._device)

    def __del__(self) -> None:
        # the driver lets what is in flight finish
        names = ("copy_stream", "flag_stream", "read_stream", "_capture_stream", "_rescue_stream")
        for stream in (getattr(self, name, None) for name in names):
            if stream is not None:
                self._cu.cuStreamDestroy_v2(stream)
        if getattr(self, "_event", None) is not None:
            self._cu.cuEventDestroy_v2(self._event)

    def _writes_pairs(self) -> bool:
        """Return whether the device says that it writes 64 bits at once; others get two writes."""
        here, can = c_int(), c_int()
        if self._cu.cuDeviceGet(byref(here), self._index):
            return False
        return not self._cu.cuDeviceGetAttribute(byref(can), _WORDS_OF_64, here.value) and bool(can.value)

    def _own_stream(self, priority: int) -> int:
        stream = c_void_p()
        self._do("make a stream", self._cu.cuStreamCreateWithPriority, byref(stream), _NON_BLOCKING, priority)
        return stream.value or 0

    def _flush(self, entries: list[_Word], calls: list[Callable[[int], None]]) -> None:
        if not entries:
            return
        driver, count = self._cu, len(entries)
        enqueue, batch = driver.cuStreamBatchMemOp_v2, (_Word * count)(*entries)
        address = ctypes.addressof(batch)
        entries.clear()

        def call(stream: int, batch: Any = batch) -> None:
            del batch  # kept alive by the default
            status = enqueue(stream, count, address, 0)
            if status:
                _refuse(driver, status, "enqueue memory operations")

        calls.append(call)

    def _copy(self, op: Copy) -> Callable[[int], None]:
        if op.rows == 1:
            return lambda stream: self.copy(op.target, op.source, op.width, stream)
        block = _Block(
            source_kind=_DEVICE_MEMORY,
            source_device=op.source,
            source_pitch=op.source_pitch,
            target_kind=_DEVICE_MEMORY,
            target_device=op.target,
            target_pitch=op.target_pitch,
            width=op.width,
            height=op.rows,
        )
        return lambda stream: self._do("enqueue a copy of rows", self._cu.cuMemcpy2DAsync_v2, byref(block), stream)


def _do(driver: ctypes.CDLL, doing: str, function: Callable[..., int], *args: Any) -> None:
    status = function(*args)
    if status:
        _refuse(driver, status, doing)


class _Graph:
    """Work on a stream, captured once; destroyed with the last reference (work in flight ends first)."""

    def __init__(
        self, driver: ctypes.CDLL, capture_stream: int, work: Callable[[], object], mode: int = _THREAD_LOCAL
    ) -> None:
        self._cu = driver
        self.handle: int | None = None
        graph, ready = c_void_p(), c_void_p()
        _do(driver, "begin a capture", driver.cuStreamBeginCapture_v2, capture_stream, mode)
        try:
            work()
        except BaseException:
            if not driver.cuStreamEndCapture(capture_stream, byref(graph)):
                driver.cuGraphDestroy(graph)
            raise
        _do(driver, "end a capture", driver.cuStreamEndCapture, capture_stream, byref(graph))
        made = driver.cuGraphInstantiateWithFlags(byref(ready), graph, 0)
        driver.cuGraphDestroy(graph)
        if made:
            _refuse(driver, made, "make a graph")
        self.handle = ready.value

    def __del__(self) -> None:
        if self.handle is not None:
            self._cu.cuGraphExecDestroy(self.handle)


@contextlib.contextmanager
def _relaxed(driver: ctypes.CDLL, index: int) -> Iterator[None]:
    """Let driver calls of this thread neither disturb a capture of another one nor depend on a device being current."""
    mode = c_int(_RELAXED)
    _do(driver, "relax a thread", driver.cuThreadExchangeStreamCaptureMode, byref(mode))
    torch.cuda.set_device(index)
    try:
        yield
    finally:
        _do(driver, "relax a thread", driver.cuThreadExchangeStreamCaptureMode, byref(mode))
