"""Integer tables that many calls read, copied to the device once.

Tables are computed on the CPU, laid side by side as int32 in pinned memory, and copied in one piece without waiting for the
device. The copy is in the stream of the first call that needs the table; a later call may be in another stream, so
`wait_for_uploads` makes that stream wait for uploads of others that have not ended.

torch gives the memory of a dropped table to the next request in the stream that uploaded it, while another stream may still read
it. So `protect_from_reuse` marks all tables of the device as read by the current stream. With one stream nothing is marked. A
capture marks nothing, because tables of graphs are kept; nor do streams that are not torch's, which may be gone by then.
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
"""Streams that read tables, by device."""
_lock = threading.Lock()


def upload(tables: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The tables as int32 on a device: views of one buffer."""
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
    """Make the current stream of a device wait for uploads of other streams; to be called before tables are read."""
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
    """Keep tables of a device until its current stream has read them; to be called before they are read in another stream.

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
    """Keep a new table until all streams that read others have read it."""
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
