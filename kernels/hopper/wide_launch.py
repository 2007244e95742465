"""From tensors to launches of the backward for head dims beyond 128: keys by `wide.py`, rows by `rows.py`.

Owns descriptors, strides and workspaces of the wide keys kernel. Refuses to know what the kernels compute. Always
deterministic. Never waits for the device; allocates row statistics and partial results of split tiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringattn.kernels import launch_triton
from ringattn.kernels.contract import Gathered, Grads, Score, Side
from ringattn.kernels.hopper.arguments import LOG2E, microseconds, per_batch, scale_and_cap
from ringattn.kernels.hopper.around_launch import (
    Away,
    BiasHomes,
    KeyBias,
    Source,
    added,
    clear_homes,
    finish,
    padded,
    prepare,
    sent,
    strides,
)
from ringattn.kernels.hopper.configs import columns_of
from ringattn.kernels.hopper.launching import (
    addressable,
    layout_of,
    multiprocessors,
    numbers_of,
    places,
    rows_of,
    workspace,
)
from ringattn.kernels.hopper.pace import board_of
from ringattn.kernels.hopper.plan import Shape, Sides, make_plan
from ringattn.kernels.hopper.rows_launch import RowsConfig, check, launch_rows, launch_rows_gathered
from ringattn.kernels.hopper.wide import wide_keys_kernel

TILE = 64  # keys
BLOCK = 64  # queries


@dataclass(frozen=True)
class WideConfig:
    """Switches of the wide keys kernel.

    Attributes:
        ahead: dP of the next block is made beside dk of this one, so that it is there when the weights come.
        split: Tiles may be split among programs.
    """

    ahead: bool = True
    split: bool = True


def launch_wide(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    rows: Side,
    keys: Side,
    score: Score,
    grads: Grads,
    *,
    keys_config: WideConfig | None = None,
    rows_config: RowsConfig | None = None,
    source: Source | None = None,
) -> None:
    """`KernelSet.backward` for head dims up to 256, the same bits from run to run."""
    launch_wide_keys(do, q, k, v, lse, delta, rows, keys, score, grads, config=keys_config, source=source)
    launch_rows(do, q, k, v, lse, delta, rows, keys, score, grads, config=rows_config)


def launch_wide_gathered(
    do: Tensor,
    q: Tensor,
    near: tuple[Tensor, Tensor],
    lse: Tensor,
    delta: Tensor,
    rows: Side,
    keys: Gathered,
    score: Score,
    away: Away,
    *,
    dq: Tensor,
    dalibi: Tensor | None,
    spare: int = 0,
    source: Source | None = None,
) -> None:
    """`GatheringKernelSet.backward_gathered` for head dims up to 256, likewise."""
    launch_wide_keys_gathered(do, q, near, lse, delta, rows, keys, score, away, spare=spare, source=source)
    error = None if away.arrivals is None else away.arrivals.error
    launch_rows_gathered(do, q, near, away.far, lse, delta, rows, keys, score, error, dq=dq, dalibi=dalibi, spare=spare)


def launch_wide_keys(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    rows: Side,
    keys: Side,
    score: Score,
    grads: Grads,
    *,
    config: WideConfig | None = None,
    source: Source | None = None,
) -> None:
    """Makes dk, dv and dkey_bias of one visit in a fixed order of sums; dq and dalibi are left as they are.

    Args:
        do: As in `KernelSet.backward`.
        q: Likewise; fp16 or bf16, head_dim a multiple of 8 up to 256.
        k: Likewise.
        v: Likewise.
        lse: `b h s`, natural log; contiguous last dim.
        delta: `b h s`; contiguous last dim; written where there is a source.
        rows: The query side.
        keys: The key side.
        score: Without bias and dropout.
        grads: Only dk, dv and dkey_bias are touched; dk and dv in the dtype of k unless they are added to.
        config: In place of the default.
        source: What delta is made of; None: it is given.

    Raises:
        NotImplementedError: A dtype, head_dim or score that these kernels do not take.
    """
    sums = (grads.dk, grads.dv)
    _launch(
        do,
        q,
        (k, v),
        lse,
        delta,
        rows,
        keys,
        score,
        sums,
        grads.dkey_bias,
        None,
        config,
        add=grads.accumulate_keys,
        source=source,
    )


def launch_wide_keys_gathered(
    do: Tensor,
    q: Tensor,
    near: tuple[Tensor, Tensor],
    lse: Tensor,
    delta: Tensor,
    rows: Side,
    keys: Gathered,
    score: Score,
    away: Away,
    *,
    config: WideConfig | None = None,
    spare: int = 0,
    source: Source | None = None,
) -> None:
    """Dk, dv and dkey_bias of all sources in one launch, sent home; arguments as `launch_gathered` of the fused backward."""
    how: dict[str, Any] = {"add": False, "spare": spare, "source": source}
    _launch(do, q, near, lse, delta, rows, keys, score, (None, None), None, away, config, **how)


def _launch(
    do: Tensor,
    q: Tensor,
    near: tuple[Tensor, Tensor],
    lse: Tensor,
    delta: Tensor,
    rows: Side,
    keys: Sides,
    score: Score,
    sums: tuple[Tensor | None, Tensor | None],
    dkey_bias: Tensor | None,
    away: Away | None,
    config: WideConfig | None,
    *,
    add: bool,
    spare: int = 0,
    source: Source | None = None,
) -> None:
    batch, s, h, d = q.shape
    t, hk, dv = near[1].shape[1:]
    check(q, d, dv, score)
    config = config or WideConfig()
    lengths = [side.lo_host.shape[1] for side in keys.sides] if isinstance(keys, Gathered) else [t]
    arrivals = None if away is None else away.arrivals
    plan = shape = None
    if batch * s * sum(lengths) * h > 0:
        shape = Shape(
            batch=batch,
            heads=hk,
            tile=TILE,
            block=BLOCK,
            programs=max(1, multiprocessors(q.device) - spare),
            streamed_bytes=h // hk * s * (d + dv) * q.element_size(),
            repeats=h // hk,
            align=4,  # bulk loads begin at multiples of 16 bytes
            every_tile=not add,
            split=config.split,
            groups=1 if arrivals is None else arrivals.groups,
        )
        plan = make_plan(keys, rows, shape)
    if plan is None or shape is None or plan.programs == 0:
        for x in () if add else (*sums, dkey_bias):
            if x is not None:
                x.zero_()
        if source is not None and delta.numel():
            prepare(lse, delta, do, source, None, columns_of(d), LOG2E, math.inf)
        if away is not None:
            clear_homes(away.homes, away.home_rows, lengths, batch, hk * (d + dv))
            if away.bias_homes is not None:
                clear_homes(away.bias_homes, away.home_rows, lengths, batch * hk, 1)
        return

    board, epochs = board_of(plan, shape, (d + dv) * q.element_size(), q)
    columns, v_columns = columns_of(d), columns_of(dv)
    do, q = addressable(do), addressable(q)
    near, far = places(near, None if away is None else away.far)
    lse2, minus_delta = prepare(lse, delta, do, source, None, columns, LOG2E, math.inf)
    parts = workspace(q, plan.slots, TILE * (columns + v_columns)) if plan.slots else None
    key_bias = None
    if dkey_bias is not None:
        key_bias = KeyBias(dkey_bias, hk, plan, TILE, add=add)
    elif away is not None and away.bias_homes is not None:
        key_bias = BiasHomes(away.bias_homes, away.home_rows, hk, plan, TILE, lse2)
    sums_strides = [x for total in sums if total is not None for x in strides(total)]
    unit = 8 if all(x % 8 == 0 for x in sums_strides) else 1
    far_tiles = (None, None) if far is None else (rows_of(far[0], TILE, columns), rows_of(far[1], TILE, v_columns))
    launch_triton.launch(
        wide_keys_kernel,
        (plan.programs,),
        (
            plan.work, plan.segments, plan.starts, None if away is None else plan.tiles,
            rows_of(q, BLOCK, columns), rows_of(do, BLOCK, v_columns),
            rows_of(near[0], TILE, columns), rows_of(near[1], TILE, v_columns), *far_tiles,
            numbers_of(lse2, BLOCK), numbers_of(minus_delta, BLOCK), *sums, None if away is None else away.homes,
            *((None, None) if arrivals is None else (arrivals.flags, arrivals.error)), board,
            # lse2 stands in for the workspace of a plan that splits nothing: it is not touched
            lse2 if parts is None else parts, *((None, None) if key_bias is None else (key_bias.per_head, key_bias.parts)),
            keys.positions, keys.lo, keys.hi, score.alibi_slopes, score.key_bias,
            *([x // unit for x in sums_strides] or [None] * 6),
            per_batch(keys.lo), per_batch(keys.hi), per_batch(score.key_bias),
            hk, h // hk, t, padded(s),
            *((None, None) if away is None or not isinstance(keys, Gathered) else (keys.near_rows, away.home_rows)),
            *((None,) * 3 if arrivals is None else (arrivals.flags.shape[1], hk // arrivals.groups, microseconds(arrivals))),
            epochs, *scale_and_cap(score), score.softmax_scale,
        ),
        {
            "D": columns,
            "DV": v_columns,
            "D_WIDTH": d,
            "DV_WIDTH": dv,
            "SOFTCAP": score.softcap > 0,
            "AHEAD": config.ahead,
            "ADD": add,
            "UNIT": unit,
            "P_LAYOUT": layout_of((TILE, BLOCK), q.dtype),
            "HOME_LAYOUT": layout_of((TILE, 32), torch.float32),
        },
        num_warps=4,
        maxnreg=168,
    )  # fmt: skip
    dk_out, dv_out = sums
    if parts is not None and away is not None:
        finish(sent(plan, parts, TILE, away.homes, away.home_rows, hk, (columns, v_columns), (d, dv)))
    elif parts is not None and dk_out is not None and dv_out is not None:
        finish(added(plan, parts, TILE, dk_out, dv_out, (columns, v_columns), add=add))
    if key_bias is not None:
        key_bias.finish()
