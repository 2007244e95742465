"""The integers of a plan as the device tensors that kernels read.

Owns the making and caching of `ringattn.kernels.contract.Side` and `Gathered`. Refuses to know ranks, groups and how bytes move.

Note [One upload]
    The four tensors of a side are views of one int32 buffer, computed on the CPU and copied once, from pinned memory
    and without waiting for the device. Finished sides are kept, least recently used first out, under a budget of bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ringattn.kernels.contract import Gathered, Side
from ringattn.layout import Shard
from ringattn.schedule import Collection, RankPlan, Send, Visit, pack
from ringattn.visibility import Reading, Visibility

Runs = tuple[tuple[int, int, int, int], ...]

CACHE_BYTES = 128 * 1024 * 1024
"""Device bytes of sides that are kept for the next call."""

T = TypeVar("T", Side, Gathered, Tensor)

_ALIGNMENT = 32  # int32 elements: every view starts on a 128-byte line

_cache: OrderedDict[tuple[Any, ...], Side | Gathered | Tensor] = OrderedDict()


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


def stationary_side(
    shard: Shard, visibility: Visibility, device: torch.device | str, reading: Reading = "keys"
) -> Side:
    """The side of a rank's own rows, which stay.

    Args:
        shard: The rows.
        visibility: The mask.
        device: Where the kernels run.
        reading: What the rows see: "keys" when they are queries, "queries" when they are keys.
    """
    return _side(pack(shard), visibility, torch.device(device), reading)


def moving_side(visit: Visit, visibility: Visibility, device: torch.device | str, reading: Reading = "queries") -> Side:
    """The side of the rows that a visit brings, packed in its buffer.

    Args:
        visit: The visit.
        visibility: The mask.
        device: Where the kernels run.
        reading: What the rows see: "queries" when they are keys (moving="keys"), "keys" when they are queries.
    """
    return _side(visit.runs, visibility, torch.device(device), reading)


def gathered_sides(
    visits: RankPlan, collection: Collection, visibility: Visibility, device: torch.device | str
) -> Gathered:
    """The key sides of all visits of a rank, when they are computed in one launch.

    Args:
        visits: The rank's part of a plan in which keys move; its own shard is not empty.
        collection: Where the rows of each visit stand in far.
        visibility: The mask.
        device: Where the kernels run.
    """
    own = visits.visits[0]
    assert own is not None, "a rank without keys of its own visits one by one"
    sources = [(0, own.runs)]
    for fetch in collection.fetches:
        visit = visits.visits[fetch.step]
        assert visit is not None, "only rows that are visited are fetched"
        sources.append(
            (fetch.step, tuple((fetch.at + offset, rows, start, stride) for offset, rows, start, stride in visit.runs))
        )
    device = _placed(device)
    key = (tuple(sources), collection.far_rows, visibility, device)
    return _kept(key, lambda: _make_gathered(own.num_rows, sources, collection.far_rows, visibility, device))


def rows_that_return(readers: tuple[Send, ...], rows: int, device: torch.device | str) -> Tensor:
    """Which row of each reader's contribution belongs to each of this rank's rows, or -1: `readers rows` int32."""
    device = _placed(device)

    def make() -> Tensor:
        table = torch.full((len(readers), rows), -1, dtype=torch.int32)
        for line, reader in zip(table, readers, strict=True):
            packed = 0
            for offset, length in reader.rows:
                line[offset : offset + length] = torch.arange(packed, packed + length, dtype=torch.int32)
                packed += length
        return _uploaded([table], device)[0]

    return _kept((readers, rows, device), make)


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
    """Forgets every kept side, and so frees its device memory."""
    _cache.clear()


def _side(runs: Runs, visibility: Visibility, device: torch.device, reading: Reading) -> Side:
    device = _placed(device)
    return _kept((runs, visibility, device, reading), lambda: _make(runs, visibility, device, reading))


def _placed(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _kept(key: tuple[Any, ...], make: Callable[[], T]) -> T:
    """What was made for a key before, or is made now."""
    found = _cache.get(key)
    if found is None:
        # it outlives the call that makes it: it must hold ordinary tensors even when made under inference mode
        with torch.inference_mode(False):
            found = _cache[key] = make()
        held = sum(_bytes_of(kept) for kept in _cache.values())
        while held > CACHE_BYTES and len(_cache) > 1:
            held -= _bytes_of(_cache.popitem(last=False)[1])
    _cache.move_to_end(key)
    return cast(T, found)


def _make(runs: Runs, visibility: Visibility, device: torch.device, reading: Reading) -> Side:
    positions = _positions(runs)
    lo, hi = bounds_of(positions, visibility, reading)
    table = torch.tensor(runs, dtype=torch.int64, device="cpu").reshape(-1, 4)
    views = _uploaded([table, positions, lo, hi], device)
    return Side(*views, run_list=runs, lo_host=lo.to(torch.int32), hi_host=hi.to(torch.int32))


def _make_gathered(
    near_rows: int, sources: list[tuple[int, Runs]], far_rows: int, visibility: Visibility, device: torch.device
) -> Gathered:
    places, parts = [], []
    for step, runs in sources:
        positions = _positions(runs)
        first = runs[0][0] + (near_rows if step else 0)
        places.append(slice(first, first + positions.shape[0]))
        parts.append((positions, *bounds_of(positions, visibility, "queries")))
    batches = max(lo.shape[0] for _, lo, _ in parts)
    positions = torch.zeros(near_rows + far_rows, dtype=torch.int64, device="cpu")
    lo, hi = torch.zeros(2, batches, near_rows + far_rows, dtype=torch.int64, device="cpu")
    for place, part in zip(places, parts, strict=True):
        positions[place], lo[:, place], hi[:, place] = part
    tables = [torch.tensor(runs, dtype=torch.int64, device="cpu").reshape(-1, 4) for _, runs in sources]
    on_device = _uploaded([positions, lo, hi, *tables], device)
    sides = tuple(
        Side(
            table,
            on_device[0][place],
            on_device[1][:, place],
            on_device[2][:, place],
            run_list=runs,
            lo_host=lo[:, place].to(torch.int32),
            hi_host=hi[:, place].to(torch.int32),
        )
        for (_, runs), place, table in zip(sources, places, on_device[3:], strict=True)
    )
    return Gathered(sides, tuple(step for step, _ in sources), near_rows, far_rows, *on_device[:3])


def _positions(runs: Runs) -> Tensor:
    stretches = [torch.arange(start, start + stride * n, stride, device="cpu") for _, n, start, stride in runs]
    return torch.cat(stretches) if stretches else torch.empty(0, dtype=torch.int64, device="cpu")


def _uploaded(parts: list[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors as int32 on the device; Note [One upload]."""
    offsets = [0]
    for part in parts:
        offsets.append(-(-(offsets[-1] + part.numel()) // _ALIGNMENT) * _ALIGNMENT)
    # pinned memory is scarce: what is kept on the host is ordinary memory
    staging = torch.empty(offsets[-1], dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    for part, offset in zip(parts, offsets, strict=False):
        _view(staging, offset, part.shape).copy_(part)
    buffer = staging.to(device, non_blocking=True)
    return [_view(buffer, offset, part.shape) for part, offset in zip(parts, offsets, strict=False)]


def _view(buffer: Tensor, offset: int, shape: torch.Size) -> Tensor:
    return buffer[offset : offset + shape.numel()].view(shape)


def _bytes_of(kept: Side | Gathered | Tensor) -> int:
    return (kept if isinstance(kept, Tensor) else kept.positions).untyped_storage().nbytes()
