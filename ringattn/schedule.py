"""The plan: who visits whom, which rows move, and where they land. Pure integers.

Owns the ring order and what is skipped. Refuses to know tensors, groups, devices and how bytes move.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringattn.layout import Shard
from ringattn.visibility import Visibility

Rows = tuple[tuple[int, int], ...]
"""Row ranges of a shard, as (offset, length): ascending, disjoint, never empty."""


@dataclass(frozen=True)
class Visit:
    """One stationary shard meets the rows of one moving shard.

    Attributes:
        step: Ring step, 0 .. world_size - 1; owner == (rank - step) % world_size.
        owner: The rank whose moving rows are visited.
        rows: The owner's rows that are needed here (per run: from the first to the last needed row).
        runs: The same rows as a packed buffer: (offset in the buffer, length, start, stride) each.
        pairs: Visible (query, key) pairs of this visit, summed over batch elements when the mask has lengths.
    """

    step: int
    owner: int
    rows: Rows
    runs: tuple[tuple[int, int, int, int], ...]
    pairs: int

    @property
    def num_rows(self) -> int:
        """Rows that move."""
        return sum(length for _, length in self.rows)


@dataclass(frozen=True)
class Send:
    """What `peer` fetches from this rank at `step` (peer == (rank + step) % world_size)."""

    step: int
    peer: int
    rows: Rows


@dataclass(frozen=True)
class RankPlan:
    """One rank's part. `visits[s]` and `sends[s]` belong to step s; None where nothing is visible. sends[0] is None."""

    rank: int
    visits: tuple[Visit | None, ...]
    sends: tuple[Send | None, ...]


@dataclass(frozen=True)
class Plan:
    """Every rank's part. `moving` says which side travels: "keys" (forward, dk/dv go home) or "queries" (dq goes home)."""

    moving: str
    ranks: tuple[RankPlan, ...]


def make_plan(q_shards: tuple[Shard, ...], kv_shards: tuple[Shard, ...], visibility: Visibility, moving: str) -> Plan:
    """The plan of one mask over one pair of shardings; cached on its arguments."""
    raise NotImplementedError
