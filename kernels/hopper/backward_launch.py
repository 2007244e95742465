"""From tensors to launches of the fused backward.

Owns descriptors, strides, workspaces and compile-time switches. Refuses to know the mathematics of the kernels and
anything of a ring, but that keys may have several owners. Never waits for the device. Allocates row statistics, an fp32 dq
unless the bulk copy engine can add to the one it is given, and partial results of split tiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringattn.kernels import launch_triton
from ringattn.kernels.contract import Gathered, Grads, Score, Side
from ringattn.kernels.hopper import backward
from ringattn.kernels.hopper.arguments import LOG2E, microseconds, pair, per_batch, scale_and_cap
from ringattn.kernels.hopper.around_launch import (
    Away,
    BiasHomes,
    KeyBias,
    KeyParts,
    RowSums,
    Source,
    added,
    clear_homes,
    finish,
    padded,
    prepare,
    sent,
    strides,
)
from ringattn.kernels.hopper.backward_configs import BackwardConfig, choose_backward, is_for_pair, padded_dims
from ringattn.kernels.hopper.launching import (
    addressable,
    describable,
    layout_of,
    multiprocessors,
    numbers_of,
    places,
    rows_of,
    workspace,
)
from ringattn.kernels.hopper.pace import board_of
from ringattn.kernels.hopper.plan import Shape, Sides, make_plan
from ringattn.kernels.portable.launch import launch_delta

__all__ = ["Away", "launch_backward", "launch_delta", "launch_gathered", "launch_keys", "prefers_pair"]

TILE = 128  # keys
MAX_HEAD_DIM = 128
TINIEST_SCALE = 1e-6  # lse over a smaller softmax_scale may overflow
HIDDEN = -1.0e30


@dataclass(frozen=True)
class _Out:
    """Where gradients go: those of `Grads`, but no dk and dv where they go home."""

    dq: Tensor
    dk: Tensor | None
    dv: Tensor | None
    dkey_bias: Tensor | None
    dalibi: Tensor | None
    accumulate_rows: bool
    accumulate_keys: bool


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
    source: Source | None = None,
) -> None:
    """`KernelSet.backward`, with a configuration of the caller's choice in place of the table's.

    dq and dalibi are sums whose order changes from run to run.
    """
    _check(q, v, score)
    how: dict[str, Any] = {"want_rows": True, "source": source}
    _launch(do, q, k, v, lse, delta, rows, keys, score, _out_of(grads), config, None, **how)


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
    source: Source | None = None,
) -> None:
    """dk, dv and dkey_bias alone, in a fixed order of sums; dq and dalibi are left as they are."""
    _check(q, v, score)
    how: dict[str, Any] = {"want_rows": False, "source": source}
    _launch(do, q, k, v, lse, delta, rows, keys, score, _out_of(grads), config, None, **how)


def launch_gathered(
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
    want_rows: bool,
    spare: int = 0,
    source: Source | None = None,
    config: BackwardConfig | None = None,
) -> None:
    """`GatheringKernelSet.backward_gathered` by one kernel over the keys of all sources.

    dk, dv and dkey_bias go home, in a fixed order of sums. dq and dalibi are sums whose order changes from run to run; without
    `want_rows` they are left as they are.
    """
    _check(q, near[1], score)
    out = _Out(dq, None, None, None, dalibi, accumulate_rows=False, accumulate_keys=False)
    how: dict[str, Any] = {"want_rows": want_rows, "spare": spare, "source": source}
    _launch(do, q, *near, lse, delta, rows, keys, score, out, config, away, **how)


def _launch(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    rows: Side,
    keys: Sides,
    score: Score,
    out: _Out,
    config: BackwardConfig | None,
    away: Away | None,
    *,
    want_rows: bool,
    spare: int = 0,
    source: Source | None = None,
) -> None:
    batch, s, h, d = q.shape
    t, hk, dv = v.shape[1:]
    padded_d, padded_dv = padded_dims(d, dv)
    plain = _is_plain(score)
    config = config or choose_backward(d, dv, plain, _terms(score), rows=want_rows)
    lengths = [side.lo_host.shape[1] for side in keys.sides] if isinstance(keys, Gathered) else [t]
    arrivals = None if away is None else away.arrivals
    plan = shape = None
    if batch * s * sum(lengths) * h > 0:
        groups = 1 if arrivals is None else arrivals.groups
        shape = _shape(q, hk, dv, lengths, config, groups, spare, every_tile=not out.accumulate_keys)
        plan = make_plan(keys, rows, shape)
    if plan is None or shape is None or plan.programs == 0:
        _write_zeros(out, want_rows=want_rows)
        if source is not None and delta.numel():
            prepare(lse, delta, do, source, None, padded_d, LOG2E, math.inf)
        if away is not None:
            clear_homes(away.homes, away.home_rows, lengths, batch, hk * (d + dv))
            if away.bias_homes is not None:
                clear_homes(away.bias_homes, away.home_rows, lengths, batch * hk, 1)
        return

    board, epochs = board_of(plan, shape, (d + dv) * q.element_size() + 4 * d * want_rows, q)
    do, q = addressable(do), addressable(q)
    near, far = places((k, v), None if away is None else away.far)
    # sums that may turn out to be lost are finished by a kernel that knows
    direct = out.dq.dtype == torch.float32 and describable(out.dq) and arrivals is None
    total = None
    if want_rows:
        total = out.dq if direct else workspace(q, batch, s, h, d)
    zeroed = None if direct and out.accumulate_rows else total
    factor, empty = (-1 / score.softmax_scale, HIDDEN) if plain else (LOG2E, math.inf)
    start_s, start_dp = prepare(lse, delta, do, source, zeroed, padded_d, factor, empty)
    parts = workspace(q, plan.slots, TILE * (padded_d + padded_dv)) if plan.slots else None
    key_bias = None
    if out.dkey_bias is not None:
        key_bias = KeyBias(out.dkey_bias, hk, plan, TILE, add=out.accumulate_keys)
    elif away is not None and away.bias_homes is not None:
        key_bias = BiasHomes(away.bias_homes, away.home_rows, hk, plan, TILE, start_s)
    # the kernel asks at run time whether a tile was split: what it would then write to must be a pointer of its kind
    parts_out = start_s if parts is None else parts
    dalibi = out.dalibi if want_rows else None
    if dalibi is not None and not out.accumulate_rows:
        dalibi.zero_()
    block, columns = config.block, padded_d * config.block // 128
    sums = [x for x in (out.dk, out.dv) if x is not None]
    unit = 8 if all(x % 8 == 0 for total_of in sums for x in total_of.stride()[:3]) else 1
    staged = (
        config.staged and want_rows and away is None and all(x.dtype == torch.float32 and describable(x) for x in sums)
    )
    sums_strides = [x // unit for total_of in sums for x in strides(total_of)] or [None] * 6
    args = (
        plan.work, plan.segments, plan.starts, None if away is None else plan.tiles,
        rows_of(q, block, padded_d), rows_of(do, block, padded_dv),
        rows_of(near[0], TILE, padded_d), rows_of(near[1], TILE, padded_dv),
        *((None, None) if far is None else (rows_of(far[0], TILE, padded_d), rows_of(far[1], TILE, padded_dv))),
        numbers_of(start_s, block), numbers_of(start_dp, block), None if total is None else rows_of(total, 64, columns),
        *([rows_of(x, 64, columns) for x in sums] if staged else (None, None)),
        out.dk, out.dv, None if away is None else away.homes,
        *((None, None) if arrivals is None else (arrivals.flags, arrivals.error)), board, parts_out,
        *((None, None) if key_bias is None else (key_bias.per_head, key_bias.parts)), dalibi, keys.positions, keys.lo, keys.hi,
        score.alibi_slopes, score.key_bias,
        *sums_strides,
        per_batch(keys.lo), per_batch(keys.hi), per_batch(score.key_bias), *pair(dalibi),
        hk, h // hk, t, s, padded(s),
        *((None, None) if away is None or not isinstance(keys, Gathered) else (keys.near_rows, away.home_rows)),
        *((None,) * 3 if arrivals is None else (arrivals.flags.shape[1], hk // arrivals.groups, microseconds(arrivals))),
        epochs,
        *scale_and_cap(score), score.softmax_scale,
    )  # fmt: skip
    constants = {
        "D": padded_d, "DV": padded_dv, "D_WIDTH": d, "DV_WIDTH": dv, "BM": block,
        "PLAIN": plain, "SOFTCAP": score.softcap > 0,
        "ADD": out.accumulate_keys, "WANT_DQ": want_rows, "SCALE_DQ": direct, "PIN": config.pin and plain,
        "NEAR": config.near, "UNIT": unit,
        "DS_LAYOUT": layout_of((TILE, block), q.dtype),
    }  # fmt: skip
    launch_triton.launch(backward.backward_kernel, (plan.programs,), args, constants, num_warps=4, maxnreg=168)
    of_rows: RowSums | None = None
    if total is not None and not direct:
        error = None if arrivals is None else arrivals.error
        of_rows = RowSums(total, out.dq, dalibi, error, padded_d, score.softmax_scale, out.accumulate_rows)
    of_keys: KeyParts | None = None
    if parts is not None and away is not None:
        of_keys = sent(plan, parts, TILE, away.homes, away.home_rows, hk, (padded_d, padded_dv), (d, dv))
    elif parts is not None and out.dk is not None and out.dv is not None:
        of_keys = added(plan, parts, TILE, out.dk, out.dv, (padded_d, padded_dv), add=out.accumulate_keys)
    finish(of_keys, of_rows)
    if key_bias is not None:
        key_bias.finish()


def prefers_pair(q: Tensor, v: Tensor, score: Score, *, wants_terms: bool) -> bool:
    """Whether the keys half and the rows kernel should make what one kernel could.

    Args:
        q: `b s h d`.
        v: `b t hk dv`.
        score: How scores are made.
        wants_terms: Whether a gradient of slopes or key bias is wanted.
    """
    return is_for_pair(q.shape[-1], v.shape[-1], _terms(score), wants_terms)


def _out_of(grads: Grads) -> _Out:
    return _Out(
        grads.dq,
        grads.dk,
        grads.dv,
        grads.dkey_bias,
        grads.dalibi,
        accumulate_rows=grads.accumulate_rows,
        accumulate_keys=grads.accumulate_keys,
    )


def _shape(
    q: Tensor,
    hk: int,
    dv: int,
    lengths: list[int],
    config: BackwardConfig,
    groups: int,
    spare: int,
    *,
    every_tile: bool,
) -> Shape:
    batch, s, h, d = q.shape
    tiles = batch * hk * sum(-(-rows_of_source // TILE) for rows_of_source in lengths)
    return Shape(
        batch=batch,
        heads=hk,
        tile=TILE,
        block=config.block,
        programs=max(1, multiprocessors(q.device) - spare) if config.persistent else tiles,
        streamed_bytes=h // hk * s * ((d + dv) * q.element_size() + d * 4),
        repeats=h // hk,
        align=4,
        every_tile=every_tile,
        split=config.persistent,
        groups=groups,
    )


def _write_zeros(out: _Out, *, want_rows: bool) -> None:
    """What is owed by a visit in which nothing is seen."""
    owed: list[Tensor | None] = []
    if want_rows and not out.accumulate_rows:
        owed += [out.dq, out.dalibi]
    if not out.accumulate_keys:
        owed += [out.dk, out.dv, out.dkey_bias]
    for x in owed:
        if x is not None:
            x.zero_()


def _check(q: Tensor, v: Tensor, score: Score) -> None:
    d, dv = q.shape[-1], v.shape[-1]
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
