"""From tensors to launches of the Hopper forward.

Owns the choice of packing and configuration, descriptors, strides and the workspace of split tiles. Refuses to know the
mathematics of the kernels and, of a ring, all but that keys may lie in two places. Never waits for the device, and allocates
nothing but that workspace and copies of tensors that the copy engine cannot address.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ringattn.kernels import launch_triton
from ringattn.kernels.contract import GUARD, Arrivals, Carry, Gathered, Score, Side
from ringattn.kernels.hopper import finish, forward
from ringattn.kernels.hopper.arguments import microseconds, pair, per_batch, scale_and_cap
from ringattn.kernels.hopper.configs import MAX_HEAD_DIM, ForwardConfig, choose_forward, columns_of
from ringattn.kernels.hopper.launching import addressable, describable, groups_of, multiprocessors, rows_of, workspace
from ringattn.kernels.hopper.pace import board_of
from ringattn.kernels.hopper.plan import Shape, make_plan

DTYPES = (torch.float16, torch.bfloat16)
MAX_PACK = 64  # heads in the rows of one warpgroup
LEAST_SCALE = 1e-30  # a smaller softmax_scale may be 0 in fp32, which makes NaN of a hidden pair: -inf times 0

_ABSENT = (None,) * 8


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Side,
    keys: Side,
    score: Score,
    *,
    carry: Carry | None,
    first: bool,
    last: bool,
    o: Tensor,
    lse: Tensor,
    config: ForwardConfig | None = None,
    pack: int | None = None,
) -> None:
    """`KernelSet.forward`, with a configuration and packing of the caller's choice in place of the table's."""
    _check(q, v, score)
    _visit(q, k, v, rows, keys, score, carry, first, last, o, lse, config, pack)


def launch_forward_gathered(
    q: Tensor,
    near: tuple[Tensor, Tensor],
    far: tuple[Tensor, Tensor],
    rows: Side,
    keys: Gathered,
    score: Score,
    arrivals: Arrivals | None,
    *,
    o: Tensor,
    lse: Tensor,
    spare: int = 0,
    config: ForwardConfig | None = None,
    pack: int | None = None,
) -> None:
    """`GatheringKernelSet.forward_gathered`, likewise."""
    batch, s, h, d = q.shape
    (k, v), hk = near, near[0].shape[2]
    _check(q, v, score)
    assert can_gather(d, v.shape[-1], score), "the caller asks first whether visits of this kind are gathered"
    if batch * s * h == 0:
        return
    if len(keys.sides) == 1:
        _visit(q, k, v, rows, keys.sides[0], score, None, True, True, o, lse, config, pack, spare)
        return
    if k.shape[1] == 0:
        # hidden blocks are read from near: one row of zeros stands for none
        k, v = (x.new_zeros(batch, 1, *x.shape[2:]) for x in near)
    # a copy of far would be made before it is filled
    assert all(describable(x) for x in far), "rows of far are whole words of 16 bytes"
    waits = (None,) * 5
    if arrivals is not None:
        flags = arrivals.flags
        assert flags.is_contiguous(), "flags stand in rows of one step each"
        waits = (flags, arrivals.error, hk // flags.shape[0], flags.shape[1], microseconds(arrivals))
    streamed = keys.near_rows + keys.far_rows
    near_rows = None if score.key_bias is None else keys.near_rows
    gathered = (*far, *waits, near_rows)
    _launch(q, k, v, rows, keys, gathered, score, streamed, None, True, True, o, lse, config, pack, spare)


def can_gather(head_dim: int, v_head_dim: int, score: Score) -> bool:
    """`GatheringKernelSet.gathers`: the copy engine reads whole words of far."""
    return score.bias is None and max(head_dim, v_head_dim) <= MAX_HEAD_DIM and head_dim % 8 == v_head_dim % 8 == 0


def _visit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Side,
    keys: Side,
    score: Score,
    carry: Carry | None,
    first: bool,
    last: bool,
    o: Tensor,
    lse: Tensor,
    config: ForwardConfig | None,
    pack: int | None,
    spare: int = 0,
) -> None:
    t = k.shape[1]
    if q.numel() == 0 or not (first or last or t):
        return
    if t > 0:
        _launch(q, k, v, rows, keys, _ABSENT, score, t, carry, first, last, o, lse, config, pack, spare)
        return
    # nothing is multiplied: the identity, the sinks or the carry become the result
    from ringattn.kernels.portable.launch import launch_forward as visit_nothing

    visit_nothing(q, k, v, rows, keys, score, carry=carry, first=first, last=last, o=o, lse=lse)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Side,
    keys: Side | Gathered,
    gathered: tuple[Any, ...],
    score: Score,
    streamed_rows: int,
    carry: Carry | None,
    first: bool,
    last: bool,
    o: Tensor,
    lse: Tensor,
    config: ForwardConfig | None,
    pack: int | None,
    spare: int,
) -> None:
    """One launch, and one that adds up split tiles.

    gathered: k and v of far, flags, error, key heads and steps of the flags, patience, and where far begins in a bias of
    keys; None where absent.
    """
    batch, s, h, d = q.shape
    t, hk, dv = v.shape[1:]
    far, (flags, error, *flag_numbers, near_rows) = gathered[:2], gathered[2:]
    keys_in_all = t if score.key_bias is None else score.key_bias.shape[1]
    plain = is_plain(score)
    if config is None:
        config = choose_forward(d, dv, plain)
    assert config.block_n <= GUARD, "a block that begins in a source ends before the next one"
    tile = 64 * config.consumers
    if pack is None:
        pack = choose_pack(s, h // hk, tile)
    shape = Shape(
        batch=batch,
        heads=h // pack,
        tile=tile // pack,
        block=config.block_n,
        programs=max(1, multiprocessors(q.device) - spare),
        streamed_bytes=streamed_rows * (d + dv) * k.element_size() * hk * pack // h,
        every_tile=first or last,
    )
    plan = make_plan(rows, keys, shape)
    if plan.work.shape[0] == 0:
        return
    board, epochs = board_of(plan, shape, (d + dv) * k.element_size(), q)
    columns, v_columns = columns_of(d), columns_of(dv)
    q, k, v = _described(q), _described(k), _described(v)
    k_far, v_far = (
        None if x is None else rows_of(x, config.block_n, wide)
        for x, wide in zip(far, (columns, v_columns), strict=True)
    )
    store = config.store and last and o.dtype == q.dtype and columns == v_columns and describable(o)
    queries, outputs = (
        rows_of(x, 64, columns) if pack == 1 else groups_of(x, 64 // pack, pack, columns)
        for x in (q, o if store else q)
    )
    # absent tensors of the carry and of the workspace are never touched; lse is a pointer of their kind
    state = (carry.m, carry.l, carry.acc) if carry is not None else (lse, lse, lse)
    parts = _parts(q, plan.slots, tile, v_columns) if plan.slots else (lse, lse, lse)
    o_unit = _unit(o, 8)
    acc_unit = 1 if carry is None else _unit(carry.acc, 4)
    acc_strides = (0, 0, 0) if carry is None else _strides(carry.acc, acc_unit)
    pairs = (*pair(lse), *pair(state[0]), *pair(state[1]))
    launch_triton.launch(
        forward.forward_kernel,
        (plan.programs,),
        (
            queries, rows_of(k, config.block_n, columns), rows_of(v, config.block_n, v_columns),
            outputs if store else None, plan.work, plan.segments, plan.starts, o, lse, *state, *parts,
            rows.positions, rows.lo, rows.hi, score.sinks, score.alibi_slopes, score.key_bias,
            k_far, v_far, flags, error, board,
            *_strides(o, o_unit), *acc_strides, *pairs, per_batch(rows.lo), per_batch(rows.hi), per_batch(score.key_bias),
            h // pack, h // hk // pack, s, keys_in_all, *flag_numbers, near_rows, epochs, *scale_and_cap(score),
        ),
        {
            "CONSUMERS": config.consumers, "BLOCK_N": config.block_n, "STAGES": config.stages, "D": columns,
            "DV": v_columns, "DV_WIDTH": dv, "PACK": pack, "O_UNIT": o_unit, "ACC_UNIT": acc_unit, "FIRST": first,
            "LAST": last, "PLAIN": plain, "SOFTCAP": score.softcap > 0, "NAMED": config.named,
            "Q_STAGES": 2 if config.early else 1, "TURN": config.turn, "EARLY": config.early, "HELD": config.held,
            "STORE": store, "AHEAD": config.ahead, "LAZY": config.lazy,
        },
        num_warps=4,
        maxnreg=config.maxnreg,
    )  # fmt: skip
    if plan.slots:
        chunk = 16
        launch_triton.launch(
            finish.finish_kernel,
            (plan.splits.shape[0], tile // chunk),
            (
                plan.splits, *parts, o, lse, *state, score.sinks, error,
                *_strides(o, 1), *((0, 0, 0) if carry is None else _strides(carry.acc, 1)), *pairs, h // pack, s,
            ),
            {
                "TILE": tile, "CHUNK": chunk, "DV": v_columns, "DV_WIDTH": dv, "PACK": pack, "FIRST": first, "LAST": last,
            },
            num_warps=4,
        )  # fmt: skip


def choose_pack(s: int, group: int, tile: int) -> int:
    """How many neighbouring heads share a tile: one, unless more save at least an eighth of the tiles.

    Args:
        s: Query rows.
        group: Query heads per key head.
        tile: Rows of a tile.
    """
    powers = [1 << i for i in range(MAX_PACK.bit_length()) if group % (1 << i) == 0 and tile % (1 << i) == 0]
    tiles = {pack: -(-s * pack // tile) / pack for pack in powers}  # per head
    best = min(powers, key=lambda pack: (tiles[pack], pack))
    return best if tiles[best] <= 0.875 * tiles[1] else 1


def is_plain(score: Score) -> bool:
    """Whether the score is q . k times a positive scale."""
    absent = score.alibi_slopes is None and score.key_bias is None
    return absent and not score.softcap > 0 and score.softmax_scale >= LEAST_SCALE


def _check(q: Tensor, v: Tensor, score: Score) -> None:
    d, dv = q.shape[-1], v.shape[-1]
    if q.dtype not in DTYPES:
        raise NotImplementedError(
            f"the hopper kernels take float16 or bfloat16, got {str(q.dtype).removeprefix('torch.')}; "
            'use impl="portable" or "auto"'
        )
    if max(d, dv) > MAX_HEAD_DIM:
        raise NotImplementedError(
            f'the hopper kernels take head_dim up to {MAX_HEAD_DIM}, got {max(d, dv)}; use impl="eager" or "auto"'
        )
    if score.bias is not None or score.dropout_p > 0:
        what = "bias" if score.bias is not None else "dropout"
        raise NotImplementedError(f'the hopper kernels take no {what}, got one; use impl="portable" or "auto"')


def _described(x: Tensor) -> Tensor:
    """The tensor itself where the copy engine can address it, or a copy; rows are whole words of 16 bytes."""
    return addressable(x) if x.shape[-1] % 8 == 0 else torch.nn.functional.pad(x, (0, -x.shape[-1] % 8))


def _parts(beside: Tensor, slots: int, tile: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """(m, l, acc) of the parts of split tiles."""
    return workspace(beside, slots, tile), workspace(beside, slots, tile), workspace(beside, slots, tile, columns)


def _unit(x: Tensor, widest: int) -> int:
    """The largest power of two up to `widest` that divides all strides: how many elements one store may take."""
    whole = math.gcd(
        widest, *(stride for stride, length in zip(x.stride()[:-1], x.shape[:-1], strict=True) if length > 1)
    )
    return whole if x.data_ptr() % (whole * x.element_size()) == 0 else 1


def _strides(x: Tensor, unit: int) -> tuple[int, int, int]:
    return x.stride(0) // unit, x.stride(1) // unit, x.stride(2) // unit
