"""The integers of a plan as the device tensors that kernels read.

Owns the making and caching of `ringattn.kernels.contract.Side`. Refuses to know ranks, groups and how bytes move.

Note [One upload]
    The four tensors of a side are views of one int32 buffer, computed on the CPU and copied once, from pinned memory
    and without waiting for the device. Finished sides are kept, least recently used first out, under a budget of bytes.
    A CUDA graph reads the sides it was captured with at every replay, and nobody says when it is gone: these are kept
    for good.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from ringattn.kernels.contract import Side
from ringattn.layout import Shard
from ringattn.schedule import Visit, pack
from ringattn.visibility import Reading, Visibility

Runs = tuple[tuple[int, int, int, int], ...]

CACHE_BYTES = 128 * 1024 * 1024
"""Device bytes of sides that are kept for the next call."""

_ALIGNMENT = 32  # int32 elements: every view starts on a 128-byte line


class _Tensors:
    """The algebra of `Visibility.interval` on int64 tensors (one operand at least is a tensor)."""

    @staticmethod
    def minimum(x: Tensor, y: Tensor | int) -> Tensor:
        return x.clamp(max=y) if isinstance(y, int) else torch.minimum(x, y)

    @staticmethod
    def maximum(x: Tensor, y: Tensor | int) -> Tensor:
        return x.clamp(min=y) if isinstance(y, int) else torch.maximum(x, y)

    @staticmethod
    def document(documents: tuple[int, ...], x: Tensor) -> tuple[Tensor, Tensor]:
        edges = torch.tensor(documents, dtype=torch.int64, device=x.device)
        k = torch.searchsorted(edges, x, right=True)
        return edges[k - 1], edges[k]


_TENSORS = _Tensors()

_cache: OrderedDict[SideKey, Side] = OrderedDict()
_captured: dict[SideKey, Side] = {}


class SideKey:
    """What a side is made of; hashed once, because masks of many documents are long to hash.

    Attributes:
        runs: The rows, as `Side.run_list`.
        visibility: The mask.
        device: Where the kernels run.
        reading: What the rows see.
    """

    __slots__ = ("_hash", "device", "reading", "runs", "visibility")

    def __init__(self, runs: Runs, visibility: Visibility, device: torch.device | str, reading: Reading) -> None:
        place = torch.device(device)
        if place.type == "cuda" and place.index is None:
            place = torch.device("cuda", torch.cuda.current_device())
        self.runs, self.visibility, self.device = runs, visibility, place
        self.reading: Reading = reading
        self._hash = hash((runs, visibility, place, reading))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, SideKey)
            and self._hash == other._hash
            and (self.runs, self.visibility, self.device, self.reading)
            == (other.runs, other.visibility, other.device, other.reading)
        )


def stationary_key(
    shard: Shard, visibility: Visibility, device: torch.device | str, reading: Reading = "keys"
) -> SideKey:
    """The key of the side of a rank's own rows, which stay.

    Args:
        shard: The rows.
        visibility: The mask.
        device: Where the kernels run.
        reading: What the rows see: "keys" when they are queries, "queries" when they are keys.
    """
    return SideKey(pack(shard), visibility, device, reading)


def moving_key(
    visit: Visit, visibility: Visibility, device: torch.device | str, reading: Reading = "queries"
) -> SideKey:
    """The key of the side of the rows that a visit brings, packed in its buffer.

    Args:
        visit: The visit.
        visibility: The mask.
        device: Where the kernels run.
        reading: What the rows see: "queries" when they are keys (moving="keys"), "keys" when they are queries.
    """
    return SideKey(visit.runs, visibility, device, reading)


def stationary_side(
    shard: Shard, visibility: Visibility, device: torch.device | str, reading: Reading = "keys"
) -> Side:
    """The side of `stationary_key`."""
    return find_side(stationary_key(shard, visibility, device, reading))


def moving_side(visit: Visit, visibility: Visibility, device: torch.device | str, reading: Reading = "queries") -> Side:
    """The side of `moving_key`."""
    return find_side(moving_key(visit, visibility, device, reading))


def find_side(key: SideKey) -> Side:
    """The side of a key, made at first sight and kept under the budget.

    Raises:
        RuntimeError: A CUDA graph is being captured and the side is not there yet.
    """
    side = _cache.get(key)
    capturing = key.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if side is None:
        if capturing:
            raise RuntimeError(
                "the tables of a call must be on the device before it is captured, got a first call during a capture; "
                "make the call once outside it"
            )
        # a side outlives the call that makes it: it must be an ordinary tensor even when made under inference mode
        with torch.inference_mode(False):
            side = _cache[key] = _make(key.runs, key.visibility, key.device, key.reading)
        held = sum(_bytes_of(kept) for kept in _cache.values())
        while held > CACHE_BYTES and len(_cache) > 1:
            held -= _bytes_of(_cache.popitem(last=False)[1])
    _cache.move_to_end(key)
    if capturing:
        _captured[key] = side
    return side


def bounds_of(positions: Tensor, visibility: Visibility, reading: Reading) -> tuple[Tensor, Tensor]:
    """The intervals of `Visibility.interval` for a whole tensor of positions.

    Args:
        positions: `s` int64, global positions of the rows.
        visibility: The mask.
        reading: "keys" when the rows are queries, "queries" when they are keys.

    Returns:
        lo and hi, `b s` int64; b is 1 when all batch elements share one mask.
    """
    extent = None
    if visibility.lengths is not None:
        lengths = torch.tensor(visibility.lengths, dtype=torch.int64, device=positions.device)
        extent = (lengths[:, :1], lengths[:, 1:])
    lo, hi = visibility.interval(positions[None], reading, extent, _TENSORS)
    return lo, hi


def clear() -> None:
    """Forgets every kept side, and so frees its device memory. CUDA graphs that read them must not be replayed any more."""
    _cache.clear()
    _captured.clear()


def _make(runs: Runs, visibility: Visibility, device: torch.device, reading: Reading) -> Side:
    stretches = [torch.arange(start, start + stride * n, stride, device="cpu") for _, n, start, stride in runs]
    positions = torch.cat(stretches) if stretches else torch.empty(0, dtype=torch.int64, device="cpu")
    lo, hi = bounds_of(positions, visibility, reading)
    table = torch.tensor(runs, dtype=torch.int64, device="cpu").reshape(-1, 4)

    parts = (table, positions, lo, hi)
    offsets = [0]
    for part in parts:
        offsets.append(-(-(offsets[-1] + part.numel()) // _ALIGNMENT) * _ALIGNMENT)
    staging = torch.empty(offsets[-1], dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    for part, offset in zip(parts, offsets, strict=False):
        _view(staging, offset, part.shape).copy_(part)
    buffer = staging.to(device, non_blocking=True)
    views = [_view(buffer, offset, part.shape) for part, offset in zip(parts, offsets, strict=False)]
    # staging may be pinned, which is scarce: what is kept on the host is ordinary memory
    return Side(*views, run_list=runs, lo_host=lo.to(torch.int32), hi_host=hi.to(torch.int32))


def _view(buffer: Tensor, offset: int, shape: torch.Size) -> Tensor:
    return buffer[offset : offset + shape.numel()].view(shape)


def _bytes_of(side: Side) -> int:
    return side.runs.untyped_storage().nbytes()
