"""The integers of a plan as the device tensors that kernels read.

Owns the making and caching of `ringattn.kernels.contract.Side` and `Gathered`. Refuses to know ranks, groups and how bytes move.

Note [Forward only]
    A forward asks of keys where they sit, and of queries what they see. What sees a key is asked by backwards, and costs most of
    what these tables cost. So a call that will have no backward (`AttentionSpec.forward_only`) leaves it out: lo and hi of its keys
    have no columns.

Note [Kept sides]
    The four tensors of a side are views of one int32 buffer (Note [One upload] of kernels/upload.py). Finished sides are kept,
    least recently used first out, under a budget of bytes; their memory goes when all streams have read them (Note [Whose
    memory] there). A CUDA graph reads the sides it was captured with at every replay, and nobody says when it is gone: these are
    kept for good.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ringattn.kernels.contract import Gathered, Side
from ringattn.kernels.upload import join, meet, upload
from ringattn.plan.attention_spec import AttentionSpec
from ringattn.plan.layouts import Shard
from ringattn.plan.mask import Reading, Visibility
from ringattn.plan.ring_plan import Collection, Nodes, Send, Visit, pack

Runs = tuple[tuple[int, int, int, int], ...]

CACHE_BYTES = 128 * 1024 * 1024
"""Device bytes of sides that are kept for the next call."""

T = TypeVar("T")


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

_cache: OrderedDict[Key[Any], Any] = OrderedDict()
_held = 0  # bytes of these
_lock = threading.RLock()
"""Held where these change: a look at them moves them, too, and threads of several rings look at once."""
_captured: dict[Key[Any], Any] = {}


class Key(Generic[T]):
    """What a table is made of; hashed once, because masks of many documents are long to hash.

    Attributes:
        device: Where the kernels run.
        facts: All that decides the content.
        make: Makes the table at first sight.
        stream: Of a GPU: the last that has met it.
    """

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


class AttentionTables:
    """The device tables of one call on one device.

    Keys of tables are made at first sight and kept with the call, because masks of many documents are long to hash; the tables
    themselves are found in the cache of all calls (`find`).

    Args:
        spec: The call.
        device: Where the kernels run.
    """

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        self._spec = spec
        self._device = device
        self._of_keys: Reading | None = None if spec.forward_only else "queries"
        self._stationary: dict[str, Key[Side]] = {}
        self._moving: dict[tuple[str, int], tuple[Visit, Key[Side]]] = {}
        self._gathered: dict[tuple[Nodes | None, int], Key[Gathered]] = {}
        self._returning: dict[tuple[Nodes | None, int], Key[Tensor]] = {}

    def stationary(self, moving: str) -> Side:
        """Return the table of the side that stays: this rank's queries when keys move, and the other way round."""
        key = self._stationary.get(moving)
        if key is None:
            spec = self._spec
            shards = spec.sharding.shards if moving == "keys" else spec.kv_sharding.shards
            reading = "keys" if moving == "keys" else self._of_keys
            key = self._stationary[moving] = stationary_key(shards[spec.rank], spec.visibility, self._device, reading)
        return find(key)

    def moving(self, moving: str, visit: Visit) -> Side:
        """Return the table of the rows that a ring step brings."""
        known = self._moving.get((moving, visit.step))
        if known is None or known[0] is not visit:
            reading = self._of_keys if moving == "keys" else "keys"
            known = visit, moving_key(visit, self._spec.visibility, self._device, reading)
            self._moving[moving, visit.step] = known
        return find(known[1])

    def gathered(self, nodes: Nodes | None = None, outer: int = 0) -> Gathered:
        """Return the tables of all keys of an outer step that is computed in one launch."""
        key = self._gathered.get((nodes, outer))
        if key is None:
            spec = self._spec
            plan = spec.plan("keys", nodes).ranks[spec.rank]
            inner = plan.visits[outer * plan.local_size + 1 : (outer + 1) * plan.local_size]
            collection = spec.collection(nodes, outer)
            key = self._gathered[nodes, outer] = gathered_key(
                (plan.held(outer), *inner), collection, spec.visibility, self._device, forward_only=spec.forward_only
            )
        return find(key)

    def returning(self, nodes: Nodes | None = None, outer: int = 0) -> Tensor:
        """Return which row of each reader's contribution belongs to each row that this rank holds, or -1."""
        key = self._returning.get((nodes, outer))
        if key is None:
            held = self._spec.plan("keys", nodes).ranks[self._spec.rank].held(outer)
            readers = self._spec.collection(nodes, outer).readers
            key = self._returning[nodes, outer] = returning_key(readers, held.num_rows, self._device)
        return find(key)


def stationary_key(
    shard: Shard, visibility: Visibility, device: torch.device | str, reading: Reading | None = "keys"
) -> Key[Side]:
    """The key of the side of a rank's own rows, which stay.

    Args:
        shard: The rows.
        visibility: The mask.
        device: Where the kernels run.
        reading: What the rows see: "keys" when they are queries, "queries" when they are keys; None: Note [Forward only].
    """
    return _side_key(pack(shard), visibility, device, reading)


def moving_key(
    visit: Visit, visibility: Visibility, device: torch.device | str, reading: Reading | None = "queries"
) -> Key[Side]:
    """The key of the side of the rows that a visit brings, packed in its buffer.

    Args:
        visit: The visit.
        visibility: The mask.
        device: Where the kernels run.
        reading: What the rows see: "queries" when they are keys (moving="keys"), "keys" when they are queries; None:
            Note [Forward only].
    """
    return _side_key(visit.runs, visibility, device, reading)


def stationary_side(
    shard: Shard, visibility: Visibility, device: torch.device | str, reading: Reading = "keys"
) -> Side:
    """The side of `stationary_key`."""
    return find(stationary_key(shard, visibility, device, reading))


def moving_side(visit: Visit, visibility: Visibility, device: torch.device | str, reading: Reading = "queries") -> Side:
    """The side of `moving_key`."""
    return find(moving_key(visit, visibility, device, reading))


def find(key: Key[T]) -> T:
    """The table of a key, made at first sight and kept under the budget.

    Raises:
        RuntimeError: A CUDA graph is being captured and the table is not there yet.
    """
    join(key.device)
    with _lock:
        found = _cache.get(key)
        if found is not None:
            _cache.move_to_end(key)
    capturing = False
    if key.device.type == "cuda":
        capturing = torch.cuda.is_current_stream_capturing()
        if torch._C._cuda_getCurrentRawStream(key.device.index) != key.stream:
            key.stream = meet(key.device)
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


def gathered_key(
    visits: Sequence[Visit | None],
    collection: Collection,
    visibility: Visibility,
    device: torch.device | str,
    *,
    forward_only: bool = False,
) -> Key[Gathered]:
    """The key of the sides of all visits of a rank, when they are computed in one launch.

    Args:
        visits: The rank's visits by inner step; at step 0 those rows that are in place.
        collection: Where the rows of each visit stand in far.
        visibility: The mask.
        device: Where the kernels run.
        forward_only: Note [Forward only].
    """
    own = visits[0]
    assert own is not None, "a rank without keys of its own visits one by one"
    near_rows, sources = own.num_rows, [(0, own.runs)]
    for fetch in collection.fetches:
        visit = visits[fetch.step]
        assert visit is not None, "only rows that are visited are fetched"
        sources.append(
            (fetch.step, tuple((fetch.at + offset, rows, start, stride) for offset, rows, start, stride in visit.runs))
        )
    return Key(
        device,
        (tuple(sources), collection.far_rows, visibility, forward_only),
        lambda place: _make_gathered(near_rows, sources, collection.far_rows, visibility, place, forward_only),
    )


def returning_key(readers: tuple[Send, ...], rows: int, device: torch.device | str) -> Key[Tensor]:
    """The key of `readers rows` int32: which row of each reader's contribution belongs to each own row, or -1."""

    def make(place: torch.device) -> Tensor:
        table = torch.full((len(readers), rows), -1, dtype=torch.int32, device="cpu")
        for line, reader in zip(table, readers, strict=True):
            packed = 0
            for offset, length in reader.rows:
                line[offset : offset + length] = torch.arange(packed, packed + length, dtype=torch.int32, device="cpu")
                packed += length
        return upload([table], place)[0]

    return Key(device, (readers, rows), make)


def bounds_of(positions: Tensor, visibility: Visibility, reading: Reading | None) -> tuple[Tensor, Tensor]:
    """The intervals of `Visibility.interval` for a whole tensor of positions.

    Args:
        positions: `s` int64, global positions of the rows.
        visibility: The mask.
        reading: "keys" when the rows are queries, "queries" when they are keys; None: Note [Forward only].

    Returns:
        lo and hi, `b s` int64; b is 1 when all batch elements share one mask. `1 0` where nobody asks.
    """
    if reading is None:
        nothing = positions.new_empty(1, 0)
        return nothing, nothing
    extent = None
    if visibility.lengths is not None:
        lengths = torch.tensor(visibility.lengths, dtype=torch.int64, device=positions.device)
        extent = (lengths[:, :1], lengths[:, 1:])
    lo, hi = visibility.interval(positions[None], reading, extent, _TENSORS)
    return lo, hi


def clear() -> None:
    """Forgets every kept side, and so frees its device memory. CUDA graphs that read them must not be replayed any more."""
    global _held
    with _lock:
        _cache.clear()
        _held = 0
    _captured.clear()


def _side_key(runs: Runs, visibility: Visibility, device: torch.device | str, reading: Reading | None) -> Key[Side]:
    return Key(device, (runs, visibility, reading), lambda place: _make(runs, visibility, place, reading))


def _make(runs: Runs, visibility: Visibility, device: torch.device, reading: Reading | None) -> Side:
    positions = _positions(runs, torch.int32 if reading is None else torch.int64)
    lo, hi = bounds_of(positions, visibility, reading)
    table = torch.tensor(runs, dtype=torch.int64, device="cpu").reshape(-1, 4)
    views = upload([table, positions, lo, hi], device)
    return Side(*views, run_list=runs, lo_host=lo.to(torch.int32), hi_host=hi.to(torch.int32))


def _make_gathered(
    near_rows: int,
    sources: list[tuple[int, Runs]],
    far_rows: int,
    visibility: Visibility,
    device: torch.device,
    forward_only: bool,
) -> Gathered:
    places, parts = [], []
    dtype = torch.int32 if forward_only else torch.int64
    for step, runs in sources:
        positions = _positions(runs, dtype)
        first = runs[0][0] + near_rows if step else 0
        places.append(slice(first, first + positions.shape[0]))
        parts.append((positions, *bounds_of(positions, visibility, None if forward_only else "queries")))
    batches = max(lo.shape[0] for _, lo, _ in parts)
    positions = torch.zeros(near_rows + far_rows, dtype=dtype, device="cpu")
    asked = 0 if forward_only else near_rows + far_rows
    lo, hi = torch.zeros(2, batches, asked, dtype=torch.int64, device="cpu")
    for place, part in zip(places, parts, strict=True):
        positions[place] = part[0]
        if asked:
            lo[:, place], hi[:, place] = part[1:]
    tables = [torch.tensor(runs, dtype=torch.int64, device="cpu").reshape(-1, 4) for _, runs in sources]
    on_device = upload([positions, lo, hi, *tables], device)
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


def _positions(runs: Runs, dtype: torch.dtype) -> Tensor:
    """Positions of rows that are packed in the order of their runs."""
    stretches = [
        torch.arange(start, start + stride * n, stride, dtype=dtype, device="cpu") for _, n, start, stride in runs
    ]
    return torch.cat(stretches) if stretches else torch.empty(0, dtype=dtype, device="cpu")


def _bytes_of(kept: Any) -> int:
    return (kept if isinstance(kept, Tensor) else kept.positions).untyped_storage().nbytes()
