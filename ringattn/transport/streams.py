"""Work in stream order that needs no SM: words that are written and waited for, and copies between devices.

Owns the calls to the CUDA driver, the streams beside the caller's own, and turning constant lists of operations into
graphs. Refuses to know what a word or a byte means. The driver is reached through cuda-bindings, which comes with torch's
CUDA wheel and is imported when a ring first needs it.

Note [Order of enqueueing]
    A wait for a word is invisible to CUDA's own scheduling, and streams may share a hardware queue. So whatever writes a
    word that another stream of this process waits for is enqueued before the wait: sharing a queue then costs time, never
    a deadlock. Inside a capture the same dependencies are expressed by events too, since a graph keeps only those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

BATCH = 200
"""Operations of one driver call; the driver takes fewer than 256."""
MAX_PITCH = 2**31 - 1
"""Bytes between two rows of a copy, at most."""
WORTH_A_GRAPH = 3
"""Driver calls from which on a launch of a graph costs the host less."""


class Write(NamedTuple):
    """`value` is stored at `address` once all earlier work of the stream is visible to every device."""

    address: int
    value: int


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


Op = Write | Wait | Copy


Program = Any
"""A constant list of operations, made ready by `Streams.compile` and enqueued many times."""


class Streams(Protocol):
    """What the copy engine asks of a device. A lane is a stream: `main()` is the caller's, `side` the ring's own."""

    side: int

    def main(self) -> int:
        """The caller's current stream."""
        ...

    def capturing(self) -> bool:
        """Whether the caller's stream is being captured into a graph."""
        ...

    def compile(self, ops: Sequence[Op]) -> Program:
        """Makes a list of operations ready."""
        ...

    def launch(self, program: Program, lane: int) -> None:
        """Enqueues a program; from its second time on as one graph where that saves calls."""
        ...

    def order(self, first: int, then: int) -> None:
        """Work enqueued later on lane `then` runs after what is on lane `first` now; CUDA sees it."""
        ...

    def call(self, work: Callable[[], object]) -> None:
        """Enqueues torch work on the caller's stream."""
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


class DriverError(RuntimeError):
    """The CUDA driver refused."""


def import_driver() -> Any:
    """The driver's module of cuda-bindings.

    Raises:
        ImportError: It is not installed.
    """
    from cuda.bindings import driver  # pyright: ignore[reportMissingImports]

    return driver


class _Calls:
    """A program of the CUDA driver: calls that take the stream, and the graph they became."""

    __slots__ = ("calls", "graph", "launched")

    def __init__(self, calls: list[Callable[[int], None]]) -> None:
        self.calls = calls
        self.graph: Any = None
        self.launched = False


class CudaStreams:
    """`Streams` on a CUDA device.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._cu = import_driver()
        self._device = device
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        ends = self._cu.cuCtxGetStreamPriorityRange()
        lowest, highest = self._checked(ends, "say its priorities"), ends[2]
        # torch hands out its streams in turn: one that a caller waits on would be no rescue
        self.side: int = self._own_stream(min(highest + 1, lowest))
        self._scribe = self._own_stream(lowest)
        self._rescue = self._own_stream(highest)
        self._event = self._checked(
            self._cu.cuEventCreate(int(self._cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)), "make an event"
        )

    def main(self) -> int:
        """See `Streams.main`."""
        return torch._C._cuda_getCurrentRawStream(self._index)

    def capturing(self) -> bool:
        """See `Streams.capturing`."""
        return torch.cuda.is_current_stream_capturing()

    def compile(self, ops: Sequence[Op]) -> _Calls:
        """See `Streams.compile`."""
        calls: list[Callable[[int], None]] = []
        words: list[Any] = []
        for op in ops:
            if isinstance(op, Copy):
                self._flush(words, calls)
                calls.append(self._copy(op))
            else:
                words.append(self._word(op))
                if len(words) == BATCH:
                    self._flush(words, calls)
        self._flush(words, calls)
        return _Calls(calls)

    def launch(self, program: _Calls, lane: int) -> None:
        """See `Streams.launch`."""
        if program.graph is not None and not self.capturing():
            self._done(self._cu.cuGraphLaunch(program.graph.handle, lane), "launch a graph")
            return
        if program.launched and len(program.calls) >= WORTH_A_GRAPH and not self.capturing():
            program.graph = _Graph(self._cu, self._scribe, program.calls)
            self._done(self._cu.cuGraphLaunch(program.graph.handle, lane), "launch a graph")
            return
        program.launched = True
        for call in program.calls:
            call(lane)

    def order(self, first: int, then: int) -> None:
        """See `Streams.order`."""
        self._done(self._cu.cuEventRecord(self._event, first), "record an event")
        self._done(self._cu.cuStreamWaitEvent(then, self._event, 0), "wait for an event")

    def call(self, work: Callable[[], object]) -> None:
        """See `Streams.call`."""
        work()

    def rescue(self, ops: Sequence[Op]) -> None:
        """See `Streams.rescue`."""
        with _Relaxed(self._cu, self._index):
            for call in self.compile(ops).calls:
                call(self._rescue)
            self._done(self._cu.cuStreamSynchronize(self._rescue), "finish a rescue")

    def fill(self, address: int, num_bytes: int) -> None:
        """See `Streams.fill`."""
        with _Relaxed(self._cu, self._index):
            self._done(self._cu.cuMemsetD32Async(address, 0xFFFFFFFF, num_bytes // 4, self._rescue), "fill memory")
            self._done(self._cu.cuStreamSynchronize(self._rescue), "finish a rescue")

    def synchronize(self) -> None:
        """See `Streams.synchronize`."""
        torch.cuda.synchronize(self._device)

    def __del__(self) -> None:
        # the driver lets what is in flight finish
        for stream in (getattr(self, name, None) for name in ("side", "_scribe", "_rescue")):
            if stream is not None:
                self._cu.cuStreamDestroy(stream)
        if getattr(self, "_event", None) is not None:
            self._cu.cuEventDestroy(self._event)

    def _own_stream(self, priority: int) -> int:
        flags = int(self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
        return int(self._checked(self._cu.cuStreamCreateWithPriority(flags, priority), "make a stream"))

    def _word(self, op: Write | Wait) -> Any:
        cu = self._cu
        entry = cu.CUstreamBatchMemOpParams()
        if isinstance(op, Wait):
            entry.waitValue.operation = cu.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32
            entry.waitValue.address = op.address
            entry.waitValue.value = op.value & 0xFFFFFFFF
            entry.waitValue.flags = int(cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
        else:
            entry.writeValue.operation = cu.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32
            entry.writeValue.address = op.address
            entry.writeValue.value = op.value & 0xFFFFFFFF
            entry.writeValue.flags = 0  # a fence comes before the write
        return entry

    def _flush(self, words: list[Any], calls: list[Callable[[int], None]]) -> None:
        if not words:
            return
        cu, batch, count = self._cu, tuple(words), len(words)
        words.clear()

        def call(lane: int) -> None:
            self._done(cu.cuStreamBatchMemOp(lane, count, batch, 0), "enqueue memory operations")

        calls.append(call)

    def _copy(self, op: Copy) -> Callable[[int], None]:
        cu = self._cu
        if op.rows == 1:
            target, source = cu.CUdeviceptr(op.target), cu.CUdeviceptr(op.source)
            return lambda lane: self._done(cu.cuMemcpyAsync(target, source, op.width, lane), "enqueue a copy")
        block = cu.CUDA_MEMCPY2D()
        block.srcMemoryType = block.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
        block.srcDevice, block.srcPitch = op.source, op.source_pitch
        block.dstDevice, block.dstPitch = op.target, op.target_pitch
        block.WidthInBytes, block.Height = op.width, op.rows
        return lambda lane: self._done(cu.cuMemcpy2DAsync(block, lane), "enqueue a copy of rows")

    def _done(self, result: tuple[Any, ...], doing: str) -> None:
        if result[0] != 0:
            raise DriverError(
                f"the CUDA driver must {doing}, got {result[0]!r}; look for an earlier error of this process"
            )

    def _checked(self, result: tuple[Any, ...], doing: str) -> Any:
        self._done(result, doing)
        return result[1]


class _Graph:
    """Driver calls captured once; destroyed with the last reference (work in flight is let finish)."""

    def __init__(self, cu: Any, scribe: int, calls: Sequence[Callable[[int], None]]) -> None:
        self._cu = cu
        self.handle: Any = None
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        _succeed(cu.cuStreamBeginCapture(scribe, mode), "begin a capture")
        try:
            for call in calls:
                call(scribe)
        finally:
            ended = cu.cuStreamEndCapture(scribe)
        _succeed(ended, "end a capture")
        made = cu.cuGraphInstantiate(ended[1], 0)
        cu.cuGraphDestroy(ended[1])
        _succeed(made, "make a graph")
        self.handle = made[1]

    def __del__(self) -> None:
        if self.handle is not None:
            self._cu.cuGraphExecDestroy(self.handle)


def _succeed(result: tuple[Any, ...], doing: str) -> None:
    if result[0] != 0:
        raise DriverError(f"the CUDA driver must {doing}, got {result[0]!r}; look for an earlier error of this process")


class _Relaxed:
    """Driver calls of this thread that neither disturb a capture of another one nor depend on a device being current."""

    def __init__(self, cu: Any, index: int) -> None:
        self._cu = cu
        self._index = index
        self._mode: Any = None

    def __enter__(self) -> None:
        relaxed = self._cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        result = self._cu.cuThreadExchangeStreamCaptureMode(relaxed)
        _succeed(result, "relax a thread")
        self._mode = result[1]
        torch.cuda.set_device(self._index)

    def __exit__(self, *_: object) -> None:
        self._cu.cuThreadExchangeStreamCaptureMode(self._mode)
