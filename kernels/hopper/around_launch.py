"""From tensors to launches of what runs before and after the kernels by keys: row statistics, sums of split tiles.

Owns what the fused backward and the wide one have in common. Refuses to know the kernels between.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ringattn.kernels import launch_triton
from ringattn.kernels.contract import Arrivals
from ringattn.kernels.hopper import around
from ringattn.kernels.hopper.arguments import pair
from ringattn.kernels.hopper.launching import workspace
from ringattn.kernels.hopper.plan import WorkPlan

ROWS = 32  # of a program

Strides = tuple[int, int, int]


@dataclass(frozen=True)
class Away:
    """What a gathered visit has beside the keys of this rank (Note [Gathered visit] of the contract).

    Attributes:
        far: k and v of the other owners.
        arrivals: None when all of far is there.
        homes: Addresses of the regions of dk and dv.
        home_rows: Rows of a region.
        bias_homes: Addresses of the regions of dkey_bias; None: it is not wanted.
    """

    far: tuple[Tensor, Tensor]
    arrivals: Arrivals | None
    homes: Tensor
    home_rows: int
    bias_homes: Tensor | None = None


@dataclass(frozen=True)
class Source:
    """What delta is made of where it is not given: rowsum(o * do) - dlse.

    Attributes:
        o: `b s h dv`, contiguous last dim.
        dlse: `b h s`, contiguous last dim; None: zero.
    """

    o: Tensor
    dlse: Tensor | None


def prepare(
    lse: Tensor,
    delta: Tensor,
    do: Tensor,
    source: Source | None,
    zeroed: Tensor | None,
    columns: int,
    factor: float,
    empty: float,
) -> tuple[Tensor, Tensor]:
    """(lse * factor, -delta) as `b h padded_rows`, `empty` where a row saw nothing; `zeroed`, `b s h d`, becomes zero.

    delta is given, or written where there is a source; do, `b s h dv`, is looked at only then.
    """
    batch, h, s = lse.shape
    o, dlse = (None, None) if source is None else (source.o, source.dlse)
    made_of = None if source is None else do
    v_width = columns if o is None else o.shape[-1]
    padded_rows = padded(s)
    start_s, start_dp = workspace(lse, batch, h, padded_rows), workspace(lse, batch, h, padded_rows)
    width = columns if zeroed is None else zeroed.shape[-1]
    launch_triton.launch(
        around.prepare_kernel,
        (-(-padded_rows // ROWS) * batch * h,),
        (
            lse, delta, o, made_of, dlse, start_s, start_dp, zeroed, *pair(lse), *pair(delta), *strides(o), *strides(made_of),
            *pair(dlse), *strides(zeroed), h, s, padded_rows, factor, empty,
        ),
        {"ROWS": ROWS, "COLUMNS": columns, "WIDTH": width, "V_COLUMNS": 1 << (v_width - 1).bit_length(), "V_WIDTH": v_width},
        num_warps=4,
    )  # fmt: skip
    return start_s, start_dp


def padded(rows: int) -> int:
    """Rows of a head of row statistics: bulk loads begin at multiples of 16 bytes, so every head does."""
    return rows + -rows % 4


@dataclass(frozen=True)
class RowSums:
    """dq in fp32 before it is scaled.

    Attributes:
        total: `b s h d` fp32.
        dq: Likewise, in any dtype: scale * total is written to it, or added.
        dalibi: NaN, like dq, where `error` is set.
        error: The error word of a gathered visit.
        columns: Of a row, padded.
        scale: softmax_scale.
        add: To what is in dq.
    """

    total: Tensor
    dq: Tensor
    dalibi: Tensor | None
    error: Tensor | None
    columns: int
    scale: float
    add: bool


@dataclass(frozen=True)
class KeyParts:
    """Partial results of split tiles of keys, and where their sums belong.

    Attributes:
        plan: Of the kernel that left them.
        parts: fp32, a line per slot.
        tile: Keys of a tile.
        columns: Of a row of dk and of dv in a slot.
        widths: Of them in the sums.
        target: dk and dv, or what is finished in their place; lines of sources and addresses of regions, by which a gathered
            visit finds them; their strides of batch, row and head; heads, and rows.
        add: To what is there.
    """

    plan: WorkPlan
    parts: Tensor
    tile: int
    columns: tuple[int, int]
    widths: tuple[int, int]
    target: tuple[object, ...]
    add: bool = False


def finish(keys: KeyParts | None, rows: RowSums | None = None) -> None:
    """One launch of what is left to do with sums, if anything is."""
    if keys is None and rows is None:
        return
    of_keys: tuple[object, ...] = (None,) * 6 + (0,) * 9
    of_rows: tuple[object, ...] = (None,) * 4 + (0,) * 10 + (0.0,)
    key_programs, row_programs, tile, columns, widths = 0, 0, ROWS, (1, 0), (1, 0)
    if rows is not None:
        batch, s, h, d = rows.dq.shape
        row_programs, columns, widths = -(-s // ROWS) * batch * h, (rows.columns, 0), (d, 0)
        of_rows = (
            rows.total, rows.dq, rows.dalibi, rows.error, *strides(rows.total), *strides(rows.dq), *pair(rows.dalibi), h, s,
            rows.scale,
        )  # fmt: skip
    if keys is not None:
        key_programs, tile = keys.plan.splits.shape[0] * (keys.tile // ROWS), keys.tile
        assert rows is None or (columns[0], widths[0]) == (keys.columns[0], keys.widths[0]), "dk is as wide as dq"
        columns, widths = keys.columns, keys.widths
        *places, heads, length = keys.target
        of_keys = (keys.plan.splits, keys.parts, *places, key_programs, heads, length)
    launch_triton.launch(
        around.finish_kernel,
        (key_programs + row_programs,),
        (*of_keys, *of_rows),
        {
            "TILE": tile, "ROWS": ROWS, "COLUMNS": columns[0], "WIDTH": widths[0], "V_COLUMNS": columns[1], "V_WIDTH": widths[1],
            "ADD_KEYS": keys is not None and keys.add, "ADD_ROWS": rows is not None and rows.add,
        },
        num_warps=4,
    )  # fmt: skip


def added(
    plan: WorkPlan, parts: Tensor, tile: int, dk: Tensor, dv: Tensor, columns: tuple[int, int], *, add: bool
) -> KeyParts:
    """Parts of dk and dv, which slots hold padded to `columns`."""
    _, rows, heads, _ = dk.shape
    target = (dk, dv, None, None, *strides(dk), *strides(dv), heads, rows)
    return KeyParts(plan, parts, tile, columns, (dk.shape[-1], dv.shape[-1]), target, add)


def sent(
    plan: WorkPlan,
    parts: Tensor,
    tile: int,
    homes: Tensor,
    home_rows: int,
    heads: int,
    columns: tuple[int, int],
    widths: tuple[int, int],
) -> KeyParts:
    """Parts that are added up where they are at home."""
    width = sum(widths)
    of_home = (home_rows * heads * width, heads * width, width)
    return KeyParts(
        plan, parts, tile, columns, widths, (None, None, plan.split_tiles, homes, *of_home, *of_home, heads, 0)
    )


class KeyBias:
    """What the kernel by keys leaves of dkey_bias, per key head.

    Args:
        out: dkey_bias, `b t`.
        heads: Key heads.
        plan: Of the kernel.
        tile: Keys of a tile.
        add: To what is in out.
    """

    def __init__(self, out: Tensor, heads: int, plan: WorkPlan, tile: int, *, add: bool) -> None:
        self._out, self._plan, self._tile, self._add = out, plan, tile, add
        # where something is added, tiles that see nothing are left out
        make = torch.zeros if add else torch.empty
        self.per_head = make((out.shape[0], heads, out.shape[1]), dtype=torch.float32, device=out.device)
        self._parts = workspace(out, plan.slots, tile) if plan.slots else None

    @property
    def parts(self) -> Tensor:
        """Partial results of split tiles; where there are none, another tensor of their kind, which is not touched."""
        return self.per_head if self._parts is None else self._parts

    def finish(self) -> None:
        """Adds everything up."""
        if self._parts is not None:
            _, heads, rows = self.per_head.shape
            per_head = (heads * rows, 1, rows)
            args = (self.per_head, None, None, None, *per_head, 0, 0, 0, heads, rows)
            finish(KeyParts(self._plan, self._parts, self._tile, (1, 0), (1, 0), args))
        if self._add:
            self._out.add_(self.per_head.sum(1))
        else:
            torch.sum(self.per_head, 1, out=self._out)


class BiasHomes:
    """What a gathered kernel by keys sends home of dkey_bias, likewise.

    Args:
        homes: Addresses of the regions, `b hk home_rows` each.
        home_rows: Rows of a region.
        heads: Key heads.
        plan: Of the kernel.
        tile: Keys of a tile.
        other: An fp32 tensor of the launch.
    """

    def __init__(self, homes: Tensor, home_rows: int, heads: int, plan: WorkPlan, tile: int, other: Tensor) -> None:
        self._home_rows, self._heads, self._plan, self._tile = home_rows, heads, plan, tile
        self.per_head = homes
        self.parts = workspace(other, plan.slots, tile) if plan.slots else other

    def finish(self) -> None:
        """Adds up the partial results of split tiles where they are at home."""
        if self._plan.slots:
            of_home = (self._heads * self._home_rows, 1, self._home_rows)
            args = (None, None, self._plan.split_tiles, self.per_head, *of_home, 0, 0, 0, self._heads, 0)
            finish(KeyParts(self._plan, self.parts, self._tile, (1, 0), (1, 0), args))


def clear_homes(homes: Tensor, home_rows: int, lengths: list[int], batch: int, width: int) -> None:
    """Zeros in the first rows, `lengths`, of every region."""
    columns = 1 << (width - 1).bit_length()
    per_program = max(1, 4096 // columns)
    for side, rows in enumerate(lengths):
        if batch * rows * width:
            launch_triton.launch(
                around.clear_home_kernel,
                (-(-rows // per_program) * batch,),
                (homes, side, rows, home_rows * width, width),
                {"ROWS": per_program, "COLUMNS": columns, "WIDTH": width},
                num_warps=4,
            )


def strides(x: Tensor | None) -> Strides:
    """Those of batch, row and head of a `b s h d` tensor; zeros where it is absent."""
    return (0, 0, 0) if x is None else (x.stride(0), x.stride(1), x.stride(2))
