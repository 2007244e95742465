"""Integer tables that many calls read: their upload to the device, and a cache of them under a budget of bytes.

Tables are computed on the CPU, laid side by side as int32 in pinned memory, and copied in one piece without waiting for the
device; the tensors of a table are views of one buffer. The copy is in the stream of the first call that needs the table; a later
call may be in another stream, so `wait_for_uploads` makes that stream wait for uploads of others that have not ended.

Tables are dropped least recently used first; their memory is free when all streams have read them. A CUDA graph reads its tables at
every replay, so tables found in a capture are kept for good. torch gives the memory of a dropped table to the next request in the
stream that uploaded it, while another stream may still read it. So `protect_from_reuse` marks all tables of the device as read by
the current stream. With one stream nothing is marked. A capture marks nothing, because tables of graphs are kept; nor do streams
that are not torch's, which may be gone by then.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ringattn.kernels.interface import BlockPatterns

ALIGNMENT = 32
"""int32 elements: every table starts on a 128-byte line."""

_under_way: dict[tuple[torch.device, int], torch.cuda.Event] = {}
"""Behind the last upload of a stream, by device and stream."""
_tables: dict[int, weakref.ref[Tensor]] = {}
"""The first table of every buffer, which lives as long as the others."""
_readers: defaultdict[torch.device, dict[int, torch.cuda.Stream]] = defaultdict(dict)
"""Streams that read tables, by device."""


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
    stream = torch.cuda.current_stream(device)
    uploaded = torch.cuda.Event()
    uploaded.record(stream)
    _under_way[device, stream.cuda_stream] = uploaded


def _views(buffer: Tensor, offsets: Sequence[int], tables: Sequence[Tensor]) -> list[Tensor]:
    return [
        buffer[start : start + table.numel()].view(table.shape) for start, table in zip(offsets, tables, strict=False)
    ]


CACHE_BYTES = 128 * 1024 * 1024
"""Device bytes of sides that are kept for the next call."""

T = TypeVar("T")

_cache: OrderedDict[Key[Any], Any] = OrderedDict()
_held = 0  # bytes of these
_lock = threading.RLock()
"""Held where these change: a look at them moves them, too, and threads of several rings look at once."""
_captured: dict[Key[Any], Any] = {}


class Key(Generic[T]):
    """Key of a table: device, facts that decide the content, and `make`; hashed once, because masks may be long to hash."""

    __slots__ = ("_hash", "device", "facts", "make", "stream")

    def __init__(
        self, device: torch.device | str, facts: tuple[Hashable, ...], make: Callable[[torch.device], T]
    ) -> None:
        place = torch.device(device)
        if place.type == "cuda" and place.index is None:
            place = torch.device("cuda", torch.cuda.current_device())
        self.device, self.facts, self.make = place, facts, make
        self.stream: int | None = None
        self._hash: int | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self.device, self.facts))
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Key)
            and hash(self) == hash(other)
            and (self.device, self.facts) == (other.device, other.facts)
        )


def find(key: Key[T]) -> T:
    """The table of a key, made at first sight and kept under the budget."""
    wait_for_uploads(key.device)
    with _lock:
        found = _cache.get(key)
        if found is not None:
            _cache.move_to_end(key)
    capturing = False
    if key.device.type == "cuda":
        capturing = torch.cuda.is_current_stream_capturing()
        if torch._C._cuda_getCurrentRawStream(key.device.index) != key.stream:
            key.stream = protect_from_reuse(key.device)
    if found is None:
        if capturing:
            raise RuntimeError(
                "the tables of a call must be on the device before it is captured, got a first call during a capture; "
                "make the call once outside it"
            )
        # it outlives the call that makes it: it must hold ordinary tensors even when made under inference mode
        with torch.inference_mode(False):
            found = key.make(key.device)
        _keep(key, found)
    if capturing:
        _captured[key] = found
    return found


def _keep(key: Key[T], made: T) -> None:
    """Puts a new table in the place of an equal one, if another thread has made that, and lets go of the oldest."""
    global _held
    with _lock:
        before = _cache.pop(key, None)
        _held += _bytes_of(made) - (0 if before is None else _bytes_of(before))
        _cache[key] = made
        while _held > CACHE_BYTES and len(_cache) > 1:
            _held -= _bytes_of(_cache.popitem(last=False)[1])


def clear() -> None:
    """Forgets every kept side, and so frees its device memory. CUDA graphs that read them must not be replayed any more."""
    global _held
    with _lock:
        _cache.clear()
        _held = 0
    _captured.clear()


def _bytes_of(kept: Any) -> int:
    if isinstance(kept, BlockPatterns):
        kept = kept.tables
    return (kept if isinstance(kept, Tensor) else kept.positions).untyped_storage().nbytes()
