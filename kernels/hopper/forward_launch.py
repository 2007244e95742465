"""From tensors to launches of the Hopper forward.

Owns the choice of packing and configuration, descriptors, strides and the workspace of split tiles. Refuses to know the
mathematics of the kernels and anything of a ring. Never waits for the device, and allocates nothing but that workspace and
copies of tensors that the copy engine cannot address.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ringattn.kernels.contract import Carry, Score, Side
from ringattn.kernels.hopper import finish, forward
from ringattn.kernels.hopper.arguments import pair, per_batch, scale_and_cap
from ringattn.kernels.hopper.configs import MAX_HEAD_DIM, ForwardConfig, choose_forward, columns_of
from ringattn.kernels.hopper.launching import addressable, describable, groups_of, launch, multiprocessors, on, rows_of
from ringattn.kernels.hopper.plan import Shape, make_plan

DTYPES = (torch.float16, torch.bfloat16)
MAX_PACK = 64  # heads in the rows of one warpgroup

# what @triton.jit makes of a function has a type that says neither [grid] nor that constants are plain values
_finish: Any = finish.finish_kernel


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
    batch, s, h, d = q.shape
    t, hk, dv = v.shape[1:]
    _check(q, d, dv, score)
    if batch * s * h == 0 or not (first or last or t):
        return
    if t == 0:
        # nothing to multiply: the identity, the sinks or the carry become the result
        from ringattn.kernels.portable.launch import launch_forward as visit_nothing

        visit_nothing(q, k, v, rows, keys, score, carry=carry, first=first, last=last, o=o, lse=lse)
        return
    plain = is_plain(score)
    if config is None:
        config = choose_forward(d, dv, plain)
    tile = 64 * config.consumers
    if pack is None:
        pack = choose_pack(s, h // hk, tile)
    shape = Shape(
        batch=batch,
        heads=h // pack,
        tile=tile // pack,
        block=config.block_n,
        programs=multiprocessors(q.device),
        streamed_bytes=t * (d + dv) * k.element_size() * hk * pack // h,
        every_tile=first or last,
    )
    plan = make_plan(rows, keys, shape)
    if plan.work.shape[0] == 0:
        return
    columns, v_columns = columns_of(d), columns_of(dv)
    q, k, v = _described(q), _described(k), _described(v)
    store = config.store and last and o.dtype == q.dtype and columns == v_columns and describable(o)
    queries, outputs = (
        rows_of(x, 64, columns) if pack == 1 else groups_of(x, 64 // pack, pack, columns)
        for x in (q, o if store else q)
    )
    # absent tensors of the carry and of the workspace are never touched; lse is a pointer of their kind
    state = (carry.m, carry.l, carry.acc) if carry is not None else (lse, lse, lse)
    parts = _workspace(plan.slots, tile, v_columns, q.device) if plan.slots else (lse, lse, lse)
    o_unit = _unit(o, 8)
    acc_unit = 1 if carry is None else _unit(carry.acc, 4)
    acc_strides = (0, 0, 0) if carry is None else _strides(carry.acc, acc_unit)
    pairs = (*pair(lse), *pair(state[0]), *pair(state[1]))
    with on(q.device):
        launch(
            forward.forward_kernel,
            plan.programs,
            (
                queries, rows_of(k, config.block_n, columns), rows_of(v, config.block_n, v_columns),
                outputs if store else None, plan.work, plan.segments, plan.starts, o, lse, *state, *parts,
                rows.positions, rows.lo, rows.hi, score.sinks, score.alibi_slopes, score.key_bias,
                *_strides(o, o_unit), *acc_strides, *pairs, per_batch(rows.lo), per_batch(rows.hi), per_batch(score.key_bias),
                h // pack, h // hk // pack, s, t, *scale_and_cap(score),
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
            _finish[(plan.splits.shape[0], tile // chunk)](
                plan.splits, *parts, o, lse, *state, score.sinks,
                *_strides(o, 1), *((0, 0, 0) if carry is None else _strides(carry.acc, 1)), *pairs, h // pack, s,
                TILE=tile, CHUNK=chunk, DV=v_columns, DV_WIDTH=dv, PACK=pack, FIRST=first, LAST=last, num_warps=4,
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
    return absent and not score.softcap > 0 and score.softmax_scale > 0


def _check(q: Tensor, d: int, dv: int, score: Score) -> None:
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
    missing = -x.shape[-1] % 8
    return addressable(torch.nn.functional.pad(x, (0, missing)) if missing else x)


def _workspace(slots: int, tile: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(m, l, acc) of the parts of split tiles."""
    m, l = torch.empty((2, slots, tile), dtype=torch.float32, device=device)  # noqa: E741
    return m, l, torch.empty((slots, tile, columns), dtype=torch.float32, device=device)


def _unit(x: Tensor, widest: int) -> int:
    """The largest power of two up to `widest` that divides all strides: how many elements one store may take."""
    whole = math.gcd(
        widest, *(stride for stride, length in zip(x.stride()[:-1], x.shape[:-1], strict=True) if length > 1)
    )
    return whole if x.data_ptr() % (whole * x.element_size()) == 0 else 1


def _strides(x: Tensor, unit: int) -> tuple[int, int, int]:
    return x.stride(0) // unit, x.stride(1) // unit, x.stride(2) // unit
