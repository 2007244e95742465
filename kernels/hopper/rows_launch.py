"""How the dq kernel is called: which tiles and stages a head_dim gets, and how a visit becomes its arguments.

Owns configurations of the dq kernel. Refuses to know the keys half of the backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ringattn.kernels import launch_triton
from ringattn.kernels.contract import Gathered, Grads, Score, Side
from ringattn.kernels.hopper import launching
from ringattn.kernels.hopper.arguments import per_batch, scale_and_cap
from ringattn.kernels.hopper.configs import columns_of
from ringattn.kernels.hopper.pace import board_of
from ringattn.kernels.hopper.plan import Shape, Sides, make_plan
from ringattn.kernels.hopper.rows import add_parts_kernel, rows_kernel

TILE = 128  # rows of a tile
MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class RowsConfig:
    """Switches of the dq kernel.

    Attributes:
        block: Keys per step.
        k_stages: Blocks of K in flight.
        v_stages: Blocks of V in flight.
        start: dP starts from -delta instead of having delta subtracted.
        split: Tiles may be split among programs.
    """

    block: int
    k_stages: int
    v_stages: int
    start: bool = False
    split: bool = True


def choose(columns: int, score: Score) -> RowsConfig:
    """The configuration for head_dims padded to `columns` at most.

    Scores with a soft cap or terms of their own hold more numbers per pair: smaller blocks keep them in registers.
    """
    terms = (score.softcap > 0) + (score.alibi_slopes is not None) + (score.key_bias is not None)
    if columns <= 64:
        return RowsConfig(64, 3, 3) if terms else RowsConfig(128, 3, 3)
    if columns <= 128:
        return RowsConfig(32, 3, 3) if terms == 3 else RowsConfig(64, 3, 3) if terms else RowsConfig(128, 2, 2)
    return RowsConfig(32, 3, 2) if terms else RowsConfig(64, 2, 1)


def launch_rows(
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
    config: RowsConfig | None = None,
) -> None:
    """Makes dq and dalibi of one visit, the same bits from run to run; other gradients are left alone.

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
        grads: Only dq and dalibi are touched; dq in the dtype of q unless it is added to.
        config: In place of the table's.

    Raises:
        NotImplementedError: A dtype, head_dim or score that these kernels do not take.
    """
    out = (grads.dq, grads.dalibi)
    _launch(do, q, (k, v), None, lse, delta, rows, keys, score, out, None, config, accumulate=grads.accumulate_rows)


def launch_rows_gathered(
    do: Tensor,
    q: Tensor,
    near: tuple[Tensor, Tensor],
    far: tuple[Tensor, Tensor],
    lse: Tensor,
    delta: Tensor,
    rows: Side,
    keys: Gathered,
    score: Score,
    error: Tensor | None,
    *,
    dq: Tensor,
    dalibi: Tensor | None,
    spare: int = 0,
    config: RowsConfig | None = None,
) -> None:
    """Dq and dalibi of a gathered visit all of whose keys are there, the same bits from run to run.

    Args:
        do: As in `GatheringKernelSet.backward_gathered`, like the others.
        q: Likewise.
        near: Likewise.
        far: Likewise.
        lse: Likewise.
        delta: Likewise.
        rows: Likewise.
        keys: Likewise.
        score: Likewise.
        error: The error word of the kernel that waited for far: where it is set the results are NaN.
        dq: Likewise.
        dalibi: Likewise.
        spare: Likewise.
        config: In place of the table's.
    """
    out = dq, dalibi
    _launch(do, q, near, far, lse, delta, rows, keys, score, out, error, config, accumulate=False, spare=spare)


def _launch(
    do: Tensor,
    q: Tensor,
    near: tuple[Tensor, Tensor],
    far: tuple[Tensor, Tensor] | None,
    lse: Tensor,
    delta: Tensor,
    rows: Side,
    keys: Sides,
    score: Score,
    out: tuple[Tensor, Tensor | None],
    error: Tensor | None,
    config: RowsConfig | None,
    *,
    accumulate: bool,
    spare: int = 0,
) -> None:
    dq, dalibi = out
    batch, s, h, d = q.shape
    t, hk, dv = near[1].shape[1:]
    if isinstance(keys, Gathered):
        t = sum(side.lo_host.shape[1] for side in keys.sides)
    check(q, d, dv, score)
    if batch * s * h == 0:
        return
    if t == 0:
        if not accumulate:
            for x in (dq, dalibi):
                if x is not None:
                    x.zero_()
        return
    near_rows = None
    if isinstance(keys, Gathered) and score.key_bias is not None:
        near_rows = keys.near_rows
    columns, v_columns = columns_of(d), columns_of(dv)
    config = config or choose(max(columns, v_columns), score)
    do, q = launching.addressable(do), launching.addressable(q)
    near, far = launching.places(near, far)
    shape = Shape(
        batch=batch,
        heads=h,
        tile=TILE,
        block=config.block,
        programs=max(1, launching.multiprocessors(q.device) - spare),
        streamed_bytes=t * (d + dv) * q.element_size() * hk // h,
        every_tile=not accumulate,
        split=config.split,
    )
    plan = make_plan(rows, keys, shape)
    if plan.programs == 0:
        return
    board, epochs = board_of(plan, shape, (d + dv) * q.element_size(), q)
    part = dalibi_part = None
    if plan.slots:
        part = launching.workspace(q, plan.slots, TILE, columns)
        if dalibi is not None:
            dalibi_part = launching.workspace(q, plan.slots, TILE)
    q_tile, do_tile = launching.rows_of(q, TILE // 2, columns), launching.rows_of(do, TILE // 2, v_columns)
    tiles = [
        None if x is None else launching.rows_of(x, config.block, width)
        for place in (near, far or (None, None))
        for x, width in zip(place, (columns, v_columns), strict=True)
    ]
    dq_strides = dq.stride()[:3]
    unit = 2 if all(stride % 2 == 0 for stride in dq_strides) else 1
    dalibi_strides = dalibi.stride()[:2] if dalibi is not None else (0, 0)
    scale, cap = scale_and_cap(score)
    launch_triton.launch(
        rows_kernel,
        (plan.programs,),
        (
            plan.work, plan.starts, plan.segments, q_tile, do_tile, *tiles, lse, delta, dq, dalibi, error, board,
            # lse stands in for the workspace of a plan that splits nothing: it is not touched
            part if part is not None else lse, dalibi_part if dalibi_part is not None else dalibi,
            rows.positions, rows.lo, rows.hi, score.alibi_slopes, score.key_bias,
            *lse.stride()[:2], *delta.stride()[:2], *(stride // unit for stride in dq_strides), *dalibi_strides,
            per_batch(rows.lo), per_batch(rows.hi), per_batch(score.key_bias),
            h, h // hk, s, t if score.key_bias is None else score.key_bias.shape[1], near_rows, epochs,
            score.softmax_scale, scale, cap,
        ),
        {
            "SOFTCAP": score.softcap > 0,
            "START": config.start,
            "ADD": accumulate,
            "UNIT": unit,
            "D": columns,
            "D_WIDTH": d,
            "DV": v_columns,
            "BLOCK": config.block,
            "K_STAGES": config.k_stages,
            "V_STAGES": config.v_stages,
        },
        num_warps=4,
        maxnreg=168,
    )  # fmt: skip
    if plan.slots:
        chunk = 16
        launch_triton.launch(
            add_parts_kernel,
            (TILE // chunk, plan.splits.shape[0]),
            (
                plan.splits, part, dalibi_part, dq, dalibi, *dq_strides, *dalibi_strides, h, s, score.softmax_scale,
            ),
            {"ADD": accumulate, "D": columns, "D_WIDTH": d, "CHUNK": chunk},
            num_warps=4,
        )  # fmt: skip


def check(q: Tensor, d: int, dv: int, score: Score) -> None:
    """Refuses what the dq kernel and the wide keys kernel do not compute.

    Raises:
        NotImplementedError: The dtype is not fp16 or bf16, a head_dim is beyond 256 or no multiple of 8, or the score has a
            dense bias or dropout.
    """
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise NotImplementedError(
            f"the Hopper kernels take float16 or bfloat16, got {q.dtype}; use the portable kernels"
        )
    if max(d, dv) > MAX_HEAD_DIM or d % 8 or dv % 8:
        raise NotImplementedError(
            f"the Hopper kernels take head dims up to {MAX_HEAD_DIM} in steps of 8, got {d} and {dv}; use the portable kernels"
        )
    if score.bias is not None or score.dropout_p > 0:
        raise NotImplementedError("the Hopper kernels take neither bias nor dropout; use the portable kernels")
