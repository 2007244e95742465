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

from ringattn.kernels.contract import Grads, Score, Side
from ringattn.kernels.hopper import around
from ringattn.kernels.hopper.arguments import LOG2E, per_batch, scale_and_cap
from ringattn.kernels.hopper.configs import columns_of
from ringattn.kernels.hopper.launching import addressable, launch, layout_of, multiprocessors, numbers_of, on, rows_of
from ringattn.kernels.hopper.plan import Shape, WorkPlan, make_plan
from ringattn.kernels.hopper.rows_launch import RowsConfig, check, launch_rows
from ringattn.kernels.hopper.wide import wide_keys_kernel

_prepare: Any = around.prepare_kernel
_finish_keys: Any = around.finish_keys_kernel

TILE = 64  # keys
BLOCK = 64  # queries
ROWS = 32  # of a program of the small kernels


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
) -> None:
    """`KernelSet.backward` for head dims up to 256, the same bits from run to run."""
    launch_wide_keys(do, q, k, v, lse, delta, rows, keys, score, grads, config=keys_config)
    launch_rows(do, q, k, v, lse, delta, rows, keys, score, grads, config=rows_config)


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
) -> None:
    """Makes dk, dv and dkey_bias of one visit in a fixed order of sums; dq and dalibi are left as they are.

    Args:
        do: As in `KernelSet.backward`.
        q: Likewise; fp16 or bf16, head_dim a multiple of 8 up to 256.
        k: Likewise.
        v: Likewise.
        lse: `b h s`, natural log; contiguous last dim.
        delta: `b h s`; contiguous last dim.
        rows: The query side.
        keys: The key side.
        score: Without bias and dropout.
        grads: Only dk, dv and dkey_bias are touched; dk and dv in the dtype of k unless they are added to.
        config: In place of the default.

    Raises:
        NotImplementedError: A dtype, head_dim or score that these kernels do not take.
    """
    batch, s, h, d = q.shape
    t, hk, dv = v.shape[1:]
    check(q, d, dv, score)
    config = config or WideConfig()
    plan = None
    if batch * s * t * h > 0:
        shape = Shape(
            batch=batch,
            heads=hk,
            tile=TILE,
            block=BLOCK,
            programs=multiprocessors(q.device),
            streamed_bytes=h // hk * s * (d + dv) * q.element_size(),
            repeats=h // hk,
            align=4,  # bulk loads begin at multiples of 16 bytes
            every_tile=not grads.accumulate_keys,
            split=config.split,
        )
        plan = make_plan(keys, rows, shape)
    if plan is None or plan.programs == 0:
        if not grads.accumulate_keys:
            for x in (grads.dk, grads.dv, grads.dkey_bias):
                if x is not None:
                    x.zero_()
        return

    columns, v_columns = columns_of(d), columns_of(dv)
    do, q, k, v = (addressable(x) for x in (do, q, k, v))
    padded_rows = s + -s % 4
    lse2, minus_delta = (torch.empty((batch, h, padded_rows), dtype=torch.float32, device=q.device) for _ in range(2))
    parts = dkey_bias = dkey_bias_parts = None
    size = TILE * (columns + v_columns)
    if plan.slots:
        parts = torch.empty((plan.slots, size), dtype=torch.float32, device=q.device)
    if grads.dkey_bias is not None:
        empty = torch.zeros if grads.accumulate_keys else torch.empty  # tiles that see nothing are then left out
        dkey_bias = empty((batch, hk, t), dtype=torch.float32, device=q.device)
        if plan.slots:
            dkey_bias_parts = torch.empty((plan.slots, TILE), dtype=torch.float32, device=q.device)
    scale, cap = scale_and_cap(score)
    dk_strides, dv_strides = grads.dk.stride()[:3], grads.dv.stride()[:3]
    unit = 8 if all(x % 8 == 0 for x in (*dk_strides, *dv_strides)) else 1
    with on(q.device):
        _prepare[(-(-padded_rows // ROWS), batch * h)](
            lse, delta, lse2, minus_delta, None, *lse.stride()[:2], *delta.stride()[:2], 0, 0, 0, h, s, padded_rows,
            LOG2E, math.inf, ROWS=ROWS, COLUMNS=columns, WIDTH=d, num_warps=4,
        )  # fmt: skip
        launch(
            wide_keys_kernel,
            plan.programs,
            (
                plan.work, plan.segments, plan.starts,
                rows_of(q, BLOCK, columns), rows_of(do, BLOCK, v_columns), rows_of(k, TILE, columns), rows_of(v, TILE, v_columns),
                numbers_of(lse2, BLOCK), numbers_of(minus_delta, BLOCK), grads.dk, grads.dv,
                # lse2 stands in for the workspace of a plan that splits nothing: it is not touched
                lse2 if parts is None else parts, dkey_bias, dkey_bias if dkey_bias_parts is None else dkey_bias_parts,
                keys.positions, keys.lo, keys.hi, score.alibi_slopes, score.key_bias,
                *(x // unit for x in dk_strides), *(x // unit for x in dv_strides),
                per_batch(keys.lo), per_batch(keys.hi), per_batch(score.key_bias),
                hk, h // hk, t, padded_rows, scale, cap, score.softmax_scale,
            ),
            {
                "D": columns,
                "DV": v_columns,
                "D_WIDTH": d,
                "DV_WIDTH": dv,
                "SOFTCAP": score.softcap > 0,
                "AHEAD": config.ahead,
                "ADD": grads.accumulate_keys,
                "UNIT": unit,
                "P_LAYOUT": layout_of((TILE, BLOCK), q.dtype),
            },
            num_warps=4,
            maxnreg=168,
        )  # fmt: skip
        if parts is not None:
            _add_parts(plan, parts, 0, size, grads.dk, columns, d, grads.accumulate_keys)
            _add_parts(plan, parts, TILE * columns, size, grads.dv, v_columns, dv, grads.accumulate_keys)
            if dkey_bias is not None and dkey_bias_parts is not None:
                _add_parts(plan, dkey_bias_parts, 0, TILE, dkey_bias.transpose(1, 2)[..., None], 1, 1, False)
    if grads.dkey_bias is not None and dkey_bias is not None:
        if grads.accumulate_keys:
            grads.dkey_bias.add_(dkey_bias.sum(1))
        else:
            torch.sum(dkey_bias, 1, out=grads.dkey_bias)


def _add_parts(
    plan: WorkPlan, parts: Tensor, at: int, size: int, out: Tensor, columns: int, width: int, add: bool
) -> None:
    """Adds up the partial results of split tiles into `b t hk width`."""
    _finish_keys[(plan.splits.shape[0], TILE // ROWS)](
        plan.splits, parts, out, *out.stride()[:3], out.shape[2], out.shape[1],
        AT=at, SIZE=size, ROWS=ROWS, COLUMNS=columns, WIDTH=width, ADD=add, num_warps=4,
    )  # fmt: skip
