"""Integer tables that many calls read, brought to the device once.

Owns the copy, and that no stream reads a table before it is there. Refuses to know what is in tables, and how long they are kept.

Note [One upload]
    Tables are computed on the CPU, laid side by side as int32 in pinned memory, and copied in one piece without waiting for the
    device.

Note [Other streams]
    The copy stands in the stream of the call that was first to need the table. A later call finds the table made, and may be in
    another stream, whose work the device may begin before that copy. So whoever finds tables joins: the stream waits, on the
    device, for what other streams have yet to upload. What is over is forgotten, so that joining costs nothing as a rule. A
    capture begins when the device has nothing left to do, and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 32
"""int32 elements: every table starts on a 128-byte line."""

_under_way: dict[tuple[torch.device, int], torch.cuda.Event] = {}
"""Behind the last upload of a stream, by device and stream."""


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
    if device.type == "cuda":
        _note(buffer.device)
    return _views(buffer, offsets, tables)


def join(device: torch.device) -> None:
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
