"""The integers of a plan as the device tensors that kernels read.

Makes `RowMetadata` and `GatheredKeys` (kernels/interface.py), which kernels/runtime/table_cache.py keeps.

Note [Forward only]
    A forward needs the positions of keys, and the positions and bounds of queries. Only a backward needs the bounds of keys,
    which are most of the cost of these tables. So a call without a backward (`AttentionSpec.forward_only`) leaves them out: the
    axis of its keys is None, and their lo and hi have no columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringattn.kernels.interface import BlockPatterns, GatheredKeys, RowMetadata
from ringattn.kernels.runtime.table_cache import Key, find, upload
from ringattn.plan.attention_spec import AttentionSpec
from ringattn.plan.block_pattern import BlockPattern
from ringattn.plan.intervals import PiecewiseBound
from ringattn.plan.layouts import Shard
from ringattn.plan.mask import MaskAxis, MaskUnion
from ringattn.plan.ring_plan import GatherPlan, Nodes, RingPlan, RingStep, Send, pack

Runs = tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, eq=False)
class StepTables:
    """Keys of the tables of a stepwise loop, which `find` turns into tables; moving is None where nothing is visible."""

    stationary: Key[RowMetadata]
    moving: tuple[Key[RowMetadata] | None, ...]
    nothing: Key[RowMetadata]


@dataclass(frozen=True, eq=False)
class FusedTables:
    """Keys of the tables of fused launches, one per node step, which `find` turns into tables."""

    rows: Key[RowMetadata]
    keys: tuple[Key[GatheredKeys], ...]
    returning: tuple[Key[Tensor], ...]


def step_tables(
    spec: AttentionSpec, moving: str, device: torch.device, nodes: Nodes | None = None, plan: RingPlan | None = None
) -> StepTables:
    """Return the keys of the tables of a stepwise loop in which "keys" or "queries" move."""
    of_keys: MaskAxis | None = None if spec.forward_only else "queries"
    shards, stays, moves = (
        (spec.sharding.shards, "keys", of_keys) if moving == "keys" else (spec.kv_sharding.shards, of_keys, "keys")
    )
    ring_steps = (plan or spec.plan(moving, nodes)).ranks[spec.rank].ring_steps
    moving_keys = [step and side_key(step.runs, spec.mask, device, moves) for step in ring_steps]
    stationary = side_key(pack(shards[spec.rank]), spec.mask, device, stays)
    return StepTables(stationary, tuple(moving_keys), side_key((), spec.mask, device, moves))


def sides_of(tables: StepTables, moving: str) -> list[tuple[RowMetadata, RowMetadata]]:
    """Return (query side, key side) of each ring step at which something is visible."""
    stays, moves = find(tables.stationary), [find(key) for key in tables.moving if key is not None]
    return [(stays, side) if moving == "keys" else (side, stays) for side in moves]


def fused_tables(spec: AttentionSpec, device: torch.device, nodes: Nodes | None = None) -> FusedTables:
    """Return the keys of the tables of fused launches."""
    plan = spec.plan("keys", nodes).ranks[spec.rank]
    keys, returning = list[Key[GatheredKeys]](), list[Key[Tensor]]()
    for node_step in range(len(plan.remote_shards)):
        ring_steps, gather_plan = plan.node_steps(node_step), spec.gather_plan(nodes, node_step)
        keys.append(gathered_key(ring_steps, gather_plan, spec.mask, device, forward_only=spec.forward_only))
        returning.append(returning_key(gather_plan.sends, plan.held(node_step).num_rows, device))
    rows = side_key(pack(spec.sharding.shards[spec.rank]), spec.mask, device, "keys")
    return FusedTables(rows, tuple(keys), tuple(returning))


def side_key(runs: Runs, mask: MaskUnion, device: torch.device | str, axis: MaskAxis | None) -> Key[RowMetadata]:
    """Return the key of the table of rows that are packed by runs; axis None: Note [Forward only]."""
    rows = sum(length for _, length, _, _ in runs)
    return Key(device, (runs, mask, axis), lambda place: _make(rows, [(0, runs)], 0, mask, place, axis).sides[0])


def stationary_side(shard: Shard, mask: MaskUnion, device: torch.device | str, axis: MaskAxis = "keys") -> RowMetadata:
    """Return the table of all rows of a shard."""
    return find(side_key(pack(shard), mask, device, axis))


def gathered_key(
    ring_steps: Sequence[RingStep | None],
    gather_plan: GatherPlan,
    mask: MaskUnion,
    device: torch.device | str,
    *,
    forward_only: bool = False,
) -> Key[GatheredKeys]:
    """Return the key of the tables of all ring steps of a rank, by inner step, when they are computed in one launch."""
    axis: MaskAxis | None = None if forward_only else "queries"
    own = ring_steps[0]
    assert own is not None, "a rank without keys of its own goes step by step"
    local_rows, sources = own.num_rows, [(0, own.runs)]
    for recv in gather_plan.recvs:
        ring_step = ring_steps[recv.step]
        assert ring_step is not None, "only rows that are used are received"
        runs = tuple((recv.at + offset, rows, start, stride) for offset, rows, start, stride in ring_step.runs)
        sources.append((recv.step, runs))
    return Key(
        device,
        (tuple(sources), gather_plan.remote_rows, mask, forward_only),
        lambda place: _make(local_rows, sources, gather_plan.remote_rows, mask, place, axis),
    )


def returning_key(sends: tuple[Send, ...], rows: int, device: torch.device | str) -> Key[Tensor]:
    """Return the key of `sends rows` int32: the row of each reader's contribution that belongs to each own row, or -1."""

    def make(place: torch.device) -> Tensor:
        table = torch.full((len(sends), rows), -1, dtype=torch.int32, device="cpu")
        for line, reader in zip(table, sends, strict=True):
            packed = 0
            for offset, length in reader.rows:
                line[offset : offset + length] = torch.arange(packed, packed + length, dtype=torch.int32, device="cpu")
                packed += length
        return upload([table], place)[0]

    return Key(device, (sends, rows), make)


def bounds_of(positions: Tensor, mask: MaskUnion, axis: MaskAxis | None) -> tuple[Tensor, Tensor]:
    """Return lo and hi, `terms*b s`, of rows at positions `s` int64; b is 1 when all batch elements share one mask.

    With axis None they are `1 0` (Note [Forward only]).
    """
    if axis is None:
        nothing = positions.new_empty(1, 0)
        return nothing, nothing
    found = dict[int, Tensor]()
    for variant in mask.variants:
        bounds = [bound for term in mask.intervals(axis, variant) for bound in term.bounds]
        found[variant] = torch.stack([_evaluate(bound, positions) for bound in bounds]).unflatten(0, (-1, 2))
    # terms 2 b s
    lines = torch.stack([found[b] for b in mask.variant_of], 2)
    return lines[:, 0].flatten(0, 1), lines[:, 1].flatten(0, 1)


def _evaluate(bound: PiecewiseBound, positions: Tensor) -> Tensor:
    starts, values, slopes = (
        torch.tensor(x, dtype=torch.int64, device=positions.device)
        for x in (bound.starts[:-1], bound.values, bound.slopes)
    )
    k = torch.searchsorted(starts, positions, right=True) - 1
    return values[k] + slopes[k] * (positions - starts[k])


def _cuts(mask: MaskUnion, device: torch.device, axis: MaskAxis | None) -> tuple[int, BlockPatterns | None]:
    """Return the number of terms and the tables that cut them; without bounds (Note [Forward only]) there is one."""
    if axis is None or not mask.is_union:
        return 1, None
    patterns = [term.pattern for term in mask.intervals(axis, 0)]
    cut = any(pattern is not None for pattern in patterns)
    return len(patterns), find(_patterns_key(tuple(patterns), device)) if cut else None


def _patterns_key(patterns: tuple[BlockPattern | None, ...], device: torch.device) -> Key[BlockPatterns]:
    tables = list(dict.fromkeys(pattern for pattern in patterns if pattern is not None))

    def make(place: torch.device) -> BlockPatterns:
        host = torch.tensor([table.rows() for table in tables], dtype=torch.int32, device="cpu")
        of_term = tuple(-1 if pattern is None else tables.index(pattern) for pattern in patterns)
        on_device = upload([host, torch.tensor(of_term, device="cpu")], place)
        return BlockPatterns(on_device[0], host, of_term, on_device[1], tables[0].block_size)

    return Key(device, patterns, make)


def _make(
    local_rows: int,
    sources: Sequence[tuple[int, Runs]],
    remote_rows: int,
    mask: MaskUnion,
    device: torch.device,
    axis: MaskAxis | None,
) -> GatheredKeys:
    """Return the tables of rows of several (ring step, runs), those of step 0 first, and of all of them together."""
    places, parts = [], []
    dtype = torch.int32 if axis is None else torch.int64
    for step, runs in sources:
        positions = _positions(runs, dtype)
        first = runs[0][0] + local_rows if step else 0
        places.append(slice(first, first + positions.shape[0]))
        parts.append((positions, *bounds_of(positions, mask, axis)))
    batches = max(lo.shape[0] for _, lo, _ in parts)
    positions = torch.zeros(local_rows + remote_rows, dtype=dtype, device="cpu")
    columns = 0 if axis is None else local_rows + remote_rows
    lo, hi = torch.zeros(2, batches, columns, dtype=torch.int64, device="cpu")
    for place, part in zip(places, parts, strict=True):
        positions[place] = part[0]
        if columns:
            lo[:, place], hi[:, place] = part[1:]
    tables = [torch.tensor(runs, dtype=torch.int64, device="cpu").reshape(-1, 4) for _, runs in sources]
    on_device = upload([positions, lo, hi, *tables], device)
    whole = on_device[:3]
    terms, patterns = _cuts(mask, device, axis)
    sides = []
    for (_, runs), place, table in zip(sources, places, on_device[3:], strict=True):
        host = [x[:, place].to(torch.int32) for x in (lo, hi)]
        views = [x[..., place] for x in whole]
        sides.append(RowMetadata(table, views[0], views[1], views[2], runs, host[0], host[1], terms, patterns))
    positions, lo, hi = whole
    return GatheredKeys(tuple(sides), tuple(step for step, _ in sources), local_rows, remote_rows, positions, lo, hi)


def _positions(runs: Runs, dtype: torch.dtype) -> Tensor:
    """Return the positions of rows that are packed in the order of their runs."""
    stretches = [
        torch.arange(start, start + stride * n, stride, dtype=dtype, device="cpu") for _, n, start, stride in runs
    ]
    return torch.cat(stretches) if stretches else torch.empty(0, dtype=dtype, device="cpu")
