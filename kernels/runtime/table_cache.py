"""Cache of device tables that many calls read, under a budget of bytes.

The tensors of a table are views of one int32 buffer (host_to_device.py). Tables are dropped least recently used first; their memory
is free when all streams have read them. A CUDA graph reads its tables at every replay, so tables found in a capture are kept for
good.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ringattn.kernels.interface import BlockPatterns
from ringattn.kernels.runtime.host_to_device import protect_from_reuse, wait_for_uploads

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
        self._hash = hash((place, facts))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Key)
            and self._hash == other._hash
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
