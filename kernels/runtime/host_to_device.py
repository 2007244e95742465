"""Integer tables that many calls read, brought to the device once.

Owns the copy, and that no stream reads a table before it is there or after it is gone. Refuses to know what is in tables, and how
long they are kept.

Note [One upload]
    Tables are computed on the CPU, laid side by side as int32 in pinned memory, and copied in one piece without waiting for the
    device.

Note [Other streams]
    The copy stands in the stream of the call that was first to need the table. A later call finds the table made, and may be in
    another stream, whose work the device may begin before that copy. So whoever finds tables joins: the stream waits, on the
    device, for what other streams have yet to upload. What is over is forgotten, so that joining costs nothing as a rule. A
    capture begins when the device has nothing left to do, and waits for nothing.

Note [Whose memory]
    torch gives the memory of a table that is dropped to the next who asks in the stream that uploaded it, and another stream may
    still be reading. So whoever finds tables meets them: all tables of the device are marked as read by its stream, and their
    memory waits for what that stream holds when they are dropped. With one stream nothing is marked. A capture marks nothing:
    what a graph reads is kept. Nor do streams that are not torch's: they may be gone by then.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 32
"""int32 elements: every table starts on a 128-byte line."""

_under_way: dict[tuple[torch.device, int], torch.cuda.Event] = {}
"""Behind the last upload of a stream, by device and stream."""
_tables: dict[int, weakref.ref[Tensor]] = {}
"""The first table of every buffer, which lives as long as the others."""
_readers: defaultdict[torch.device, dict[int, torch.cuda.Stream]] = defaultdict(dict)
"""Streams that have met tables, by device (Note [Whose memory])."""
_lock = threading.Lock()


def upload(tables: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The tables as int32 on a device: views of one buffer.

    Args:
        tables: Of integers that fit, on the CPU.
        device: The device.
    """
    offsets = [0]
    for table in tables:
        offsets.append(-(-(offsets[-1] + table.numel()) // ALIGNMENT) * ALIGNMENT)
    # pinned memory is scarce: what is kept on the host is ordinary memory
    staging = torch.empty(offsets[-1], dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    for table, part in zip(tables, _views(staging, offsets, tables), strict=True):
        part.copy_(table)
    buffer = staging.to(device, non_blocking=True)
    views = _views(buffer, offsets, tables)
    if device.type == "cuda":
        _note(buffer.device)
        _mark(views[0])
    return views


def wait_for_uploads(device: torch.device) -> None:
    """Lets the current stream of a device wait for what other streams upload; to be called before tables are read.

    Args:
        device: Where the tables are (Note [Other streams]).
    """
    if not _under_way or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return
    here = torch.cuda.current_stream(device)
    for (place, stream), uploaded in list(_under_way.items()):
        if place != here.device:
            continue
        if uploaded.query():
            # unless the stream has uploaded more by now
            if _under_way.get((place, stream)) is uploaded:
                _under_way.pop((place, stream), None)
        elif stream != here.cuda_stream:
            here.wait_event(uploaded)


def protect_from_reuse(device: torch.device) -> int | None:
    """Lets tables of a device live until its current stream has read them; to be called before they are read in another stream.

    Args:
        device: Where the tables are (Note [Whose memory]).

    Returns:
        The stream, as `torch._C._cuda_getCurrentRawStream` has it, which need not meet them again; None: it must.
    """
    if torch.cuda.is_current_stream_capturing():
        return None
    stream = torch.cuda.current_stream(device)
    if stream.stream_id and stream.stream_id == stream.cuda_stream:  # how torch numbers those that are not its own
        return None
    with _lock:
        if stream.cuda_stream not in _readers[device]:
            _readers[device][stream.cuda_stream] = stream
            for known in list(_tables.values()):
                table = known()
                if table is not None and table.device == device:
                    table.record_stream(stream)
    return stream.cuda_stream


def _mark(table: Tensor) -> None:
    """Lets a new table live until those who have met others have read it."""
    here = id(table)
    with _lock:
        for stream in _readers[table.device].values():
            table.record_stream(stream)
        _tables[here] = weakref.ref(table, lambda _: _tables.pop(here, None))


def _note(device: torch.device) -> None:
    """Remembers that the current stream has uploaded something."""
    stream = torch.cuda.current_stream(device)
    uploaded = torch.cuda.Event()
    uploaded.record(stream)
    _under_way[device, stream.cuda_stream] = uploaded


def _views(buffer: Tensor, offsets: Sequence[int], tables: Sequence[Tensor]) -> list[Tensor]:
    return [
        buffer[start : start + table.numel()].view(table.shape) for start, table in zip(offsets, tables, strict=False)
    ]
