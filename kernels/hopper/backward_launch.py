"""From tensors to launches of the fused backward.

Owns descriptors, strides, workspaces and compile-time switches. Refuses to know the mathematics of the kernels and
anything of a ring. Never waits for the device. Allocates row statistics, an fp32 dq unless the bulk copy engine can add to
the one it is given, and partial results of split tiles.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ringattn.kernels.contract import Grads, Score, Side
from ringattn.kernels.hopper import around, backward
from ringattn.kernels.hopper.arguments import LOG2E, pair, per_batch, scale_and_cap
from ringattn.kernels.hopper.backward_configs import BackwardConfig, choose_backward, is_for_pair, padded_dims
from ringattn.kernels.hopper.launching import (
    addressable,
    describable,
    launch,
    layout_of,
    multiprocessors,
    numbers_of,
    on,
    rows_of,
)
from ringattn.kernels.hopper.plan import Shape, WorkPlan, make_plan
from ringattn.kernels.portable.launch import launch_delta

__all__ = ["launch_backward", "launch_delta", "launch_keys", "prefers_pair"]

_prepare: Any = around.prepare_kernel
_finish_rows: Any = around.finish_rows_kernel
_finish_keys: Any = around.finish_keys_kernel

TILE = 128  # keys
MAX_HEAD_DIM = 128
TINIEST_SCALE = 1e-6  # lse over a smaller softmax_scale may overflow
HIDDEN = -1.0e30
ROWS = 32  # of a program of the small kernels


def launch_backward(
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
    config: BackwardConfig | None = None,
) -> None:
    """`KernelSet.backward`, with a configuration of the caller's choice in place of the table's.

    dq and dalibi are sums whose order changes from run to run.
    """
    _launch(do, q, k, v, lse, delta, rows, keys, score, grads, config, want_rows=True)


def launch_keys(
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
    config: BackwardConfig | None = None,
) -> None:
    """dk, dv and dkey_bias alone, in a fixed order of sums; dq and dalibi are left as they are."""
    _launch(do, q, k, v, lse, delta, rows, keys, score, grads, config, want_rows=False)


def _launch(
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
    config: BackwardConfig | None,
    *,
    want_rows: bool,
) -> None:
    batch, s, h, d = q.shape
    t, hk, dv = v.shape[1:]
    _check(q, d, dv, score)
    padded_d, padded_dv = padded_dims(d, dv)
    plain = _is_plain(score)
    config = config or choose_backward(d, dv, plain, _terms(score), rows=want_rows)
    plan = None
    if batch * s * t * h > 0:
        plan = _plan(q, v, rows, keys, grads, config)
    if plan is None or plan.programs == 0:
        _write_zeros(grads, want_rows=want_rows)
        return

    do, q, k, v = (addressable(x) for x in (do, q, k, v))
    padded_rows = s + -s % 4  # bulk loads begin at multiples of 16 bytes, so every head does
    start_s, start_dp = (torch.empty((batch, h, padded_rows), dtype=torch.float32, device=q.device) for _ in range(2))
    direct = grads.dq.dtype == torch.float32 and describable(grads.dq)
    total = None
    if want_rows:
        total = grads.dq if direct else torch.empty((batch, s, h, d), dtype=torch.float32, device=q.device)
    zeroed = None if direct and grads.accumulate_rows else total
    parts = dkey_bias = dkey_bias_parts = None
    if plan.slots:
        size = TILE * (padded_d + padded_dv)
        parts = torch.empty((plan.slots, size), dtype=torch.float32, device=q.device)
    if grads.dkey_bias is not None:
        empty = torch.zeros if grads.accumulate_keys else torch.empty  # tiles that see nothing are then left out
        dkey_bias = empty((batch, hk, t), dtype=torch.float32, device=q.device)
        if plan.slots:
            dkey_bias_parts = torch.empty((plan.slots, TILE), dtype=torch.float32, device=q.device)
    # the kernel asks at run time whether a tile was split: what it would then write to must be a pointer of its kind
    parts_out = start_s if parts is None else parts
    dkey_bias_parts_out = dkey_bias if dkey_bias_parts is None else dkey_bias_parts
    dalibi = grads.dalibi if want_rows else None
    if dalibi is not None and not grads.accumulate_rows:
        dalibi.zero_()
    block, columns = config.block, padded_d * config.block // 128
    unit = 8 if all(x % 8 == 0 for out in (grads.dk, grads.dv) for x in out.stride()[:3]) else 1
    staged = (
        config.staged and want_rows and all(x.dtype == torch.float32 and describable(x) for x in (grads.dk, grads.dv))
    )
    args = (
        plan.work, plan.segments, plan.starts,
        rows_of(q, block, padded_d), rows_of(do, block, padded_dv), rows_of(k, TILE, padded_d), rows_of(v, TILE, padded_dv),
        numbers_of(start_s, block), numbers_of(start_dp, block), None if total is None else rows_of(total, 64, columns),
        *(rows_of(x, 64, columns) if staged else None for x in (grads.dk, grads.dv)),
        grads.dk, grads.dv, parts_out, dkey_bias, dkey_bias_parts_out, dalibi, keys.positions, keys.lo, keys.hi,
        score.alibi_slopes, score.key_bias,
        *(x // unit for x in _strides(grads.dk)), *(x // unit for x in _strides(grads.dv)),
        per_batch(keys.lo), per_batch(keys.hi), per_batch(score.key_bias), *pair(dalibi),
        hk, h // hk, t, s, padded_rows, *scale_and_cap(score), score.softmax_scale,
    )  # fmt: skip
    constants = {
        "D": padded_d, "DV": padded_dv, "D_WIDTH": d, "DV_WIDTH": dv, "BM": block,
        "PLAIN": plain, "SOFTCAP": score.softcap > 0,
        "ADD": grads.accumulate_keys, "WANT_DQ": want_rows, "SCALE_DQ": direct, "PIN": config.pin and plain,
        "NEAR": config.near, "UNIT": unit,
        "DS_LAYOUT": layout_of((TILE, block), q.dtype),
    }  # fmt: skip
    with on(q.device):
        _prepare[(-(-padded_rows // ROWS), batch * h)](
            lse, delta, start_s, start_dp, zeroed, *pair(lse), *pair(delta), *_strides(zeroed), h, s, padded_rows,
            -1 / score.softmax_scale if plain else LOG2E, HIDDEN if plain else math.inf,
            ROWS=ROWS, COLUMNS=padded_d, WIDTH=d, num_warps=4,
        )  # fmt: skip
        launch(backward.backward_kernel, plan.programs, args, constants, num_warps=4, maxnreg=168)
        if total is not None and not direct:
            _finish_rows[(-(-s // ROWS), batch * h)](
                total, grads.dq, *_strides(total), *_strides(grads.dq), h, s, score.softmax_scale,
                ROWS=ROWS, COLUMNS=padded_d, WIDTH=d, ADD=grads.accumulate_rows, num_warps=4,
            )  # fmt: skip
        if plan.slots:
            assert parts is not None
            size = TILE * (padded_d + padded_dv)
            _add_parts(plan, parts, 0, size, grads.dk, padded_d, d, grads.accumulate_keys)
            _add_parts(plan, parts, TILE * padded_d, size, grads.dv, padded_dv, dv, grads.accumulate_keys)
            if dkey_bias is not None and dkey_bias_parts is not None:
                _add_parts(plan, dkey_bias_parts, 0, TILE, dkey_bias.transpose(1, 2)[..., None], 1, 1, False)
    if grads.dkey_bias is not None and dkey_bias is not None:
        if grads.accumulate_keys:
            grads.dkey_bias.add_(dkey_bias.sum(1))
        else:
            torch.sum(dkey_bias, 1, out=grads.dkey_bias)


def prefers_pair(q: Tensor, v: Tensor, score: Score, grads: Grads) -> bool:
    """Whether `launch_keys` and the rows kernel should make what `launch_backward` could."""
    wants_terms = grads.dalibi is not None or grads.dkey_bias is not None
    return is_for_pair(q.shape[-1], v.shape[-1], _terms(score), wants_terms)


def _plan(q: Tensor, v: Tensor, rows: Side, keys: Side, grads: Grads, config: BackwardConfig) -> WorkPlan:
    batch, s, h, d = q.shape
    t, hk, dv = v.shape[1:]
    programs = multiprocessors(q.device) if config.persistent else batch * hk * -(-t // TILE)
    shape = Shape(
        batch=batch,
        heads=hk,
        tile=TILE,
        block=config.block,
        programs=programs,
        streamed_bytes=h // hk * s * ((d + dv) * q.element_size() + d * 4),
        repeats=h // hk,
        align=4,
        every_tile=not grads.accumulate_keys,
        split=config.persistent,
    )
    return make_plan(keys, rows, shape)


def _add_parts(
    plan: WorkPlan, parts: Tensor, at: int, size: int, out: Tensor, columns: int, width: int, add: bool
) -> None:
    """Adds up the partial results of split tiles into `b t hk width`."""
    _finish_keys[(plan.splits.shape[0], TILE // ROWS)](
        plan.splits, parts, out, *_strides(out), out.shape[2], out.shape[1],
        AT=at, SIZE=size, ROWS=ROWS, COLUMNS=columns, WIDTH=width, ADD=add, num_warps=4,
    )  # fmt: skip


def _write_zeros(grads: Grads, *, want_rows: bool) -> None:
    """What is owed by a visit in which nothing is seen."""
    owed: list[Tensor | None] = []
    if want_rows and not grads.accumulate_rows:
        owed += [grads.dq, grads.dalibi]
    if not grads.accumulate_keys:
        owed += [grads.dk, grads.dv, grads.dkey_bias]
    for x in owed:
        if x is not None:
            x.zero_()


def _check(q: Tensor, d: int, dv: int, score: Score) -> None:
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise NotImplementedError(
            f"the Hopper kernels take float16 or bfloat16, got {q.dtype}; use the portable kernels"
        )
    if max(d, dv) > MAX_HEAD_DIM or d % 8 or dv % 8:
        raise NotImplementedError(
            f"the fused Hopper backward takes head dims up to {MAX_HEAD_DIM} in steps of 8, got {d} and {dv}; "
            "use the portable kernels"
        )
    if score.bias is not None or score.dropout_p > 0:
        raise NotImplementedError("the Hopper kernels take neither bias nor dropout; use the portable kernels")


def _is_plain(score: Score) -> bool:
    """Whether the score is q . k times a positive scale."""
    return (
        score.alibi_slopes is None
        and score.key_bias is None
        and not score.softcap > 0
        and score.softmax_scale >= TINIEST_SCALE
    )


def _terms(score: Score) -> int:
    return (score.softcap > 0) + (score.alibi_slopes is not None) + (score.key_bias is not None)


def _strides(x: Tensor | None) -> tuple[int, int, int]:
    return (0, 0, 0) if x is None else (x.stride(0), x.stride(1), x.stride(2))
