"""From tensors to launches of the backward for head dims beyond 128: keys by `wide.py`, rows by `rows.py`.

Owns descriptors, strides and workspaces of the wide keys kernel. Refuses to know what the kernels compute. Always
deterministic. Never waits for the device; allocates row statistics and partial results of split tiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ringattn.kernels.contract import Grads, Score, Side
from ringattn.kernels.hopper.arguments import LOG2E, per_batch, scale_and_cap
from ringattn.kernels.hopper.around_launch import KeyBias, add_parts, padded, prepare, strides
from ringattn.kernels.hopper.configs import columns_of
from ringattn.kernels.hopper.launching import addressable, layout_of, multiprocessors, numbers_of, rows_of
from ringattn.kernels.hopper.plan import Shape, make_plan
from ringattn.kernels.hopper.rows_launch import RowsConfig, check, launch_rows
from ringattn.kernels.hopper.wide import wide_keys_kernel
from ringattn.kernels.record_triton import Tape, recorded

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
) -> None:
    """`KernelSet.backward` for head dims up to 256, the same bits from run to run."""
    launch_wide_keys(do, q, k, v, lse, delta, rows, keys, score, grads, config=keys_config)
    launch_rows(do, q, k, v, lse, delta, rows, keys, score, grads, config=rows_config)


@recorded
def launch_wide_keys(
    tape: Tape,
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
        tape: Given by `recorded`.
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
        tape.keep(plan)
    if plan is None or plan.programs == 0:
        if not grads.accumulate_keys:
            for x in (grads.dk, grads.dv, grads.dkey_bias):
                if x is not None:
                    tape.call(Tensor.zero_, x)
        return

    columns, v_columns = columns_of(d), columns_of(dv)
    do, q, k, v = (addressable(tape, x) for x in (do, q, k, v))
    lse2, minus_delta = prepare(tape, lse, delta, None, columns, LOG2E, math.inf)
    parts = tape.room(plan.slots, TILE * (columns + v_columns)) if plan.slots else None
    add = grads.accumulate_keys
    key_bias = None if grads.dkey_bias is None else KeyBias(tape, grads.dkey_bias, hk, plan, TILE, add=add)
    scale, cap = scale_and_cap(score)
    sums_strides = (*strides(grads.dk), *strides(grads.dv))
    unit = 8 if all(x % 8 == 0 for x in sums_strides) else 1
    tape.launch(
        wide_keys_kernel,
        (plan.programs,),
        (
            plan.work, plan.segments, plan.starts,
            rows_of(q, BLOCK, columns), rows_of(do, BLOCK, v_columns), rows_of(k, TILE, columns), rows_of(v, TILE, v_columns),
            numbers_of(lse2, BLOCK), numbers_of(minus_delta, BLOCK), grads.dk, grads.dv,
            # lse2 stands in for the workspace of a plan that splits nothing: it is not touched
            lse2 if parts is None else parts, *((None, None) if key_bias is None else (key_bias.per_head, key_bias.parts)),
            keys.positions, keys.lo, keys.hi, score.alibi_slopes, score.key_bias,
            *(x // unit for x in sums_strides),
            per_batch(keys.lo), per_batch(keys.hi), per_batch(score.key_bias),
            hk, h // hk, t, padded(s), scale, cap, score.softmax_scale,
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
        },
        num_warps=4,
        maxnreg=168,
    )  # fmt: skip
    if parts is not None:
        add_parts(tape, plan, parts, TILE, grads.dk, grads.dv, (columns, v_columns), add=add)
    if key_bias is not None:
        key_bias.finish()
