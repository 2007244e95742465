"""From tensors to launches of the Hopper kernels: the forward, dk and dv (fused with dq or alone), and dq alone.

Owns the choice of kernels and configurations, arguments, workspaces and compile-time switches. Never waits for the device.
Allocates workspaces and copies of tensors that the bulk copy engine cannot address. The two kernels that make dk and dv differ
in their tiles, a few arguments and their switches; all else of their launch is `launch_dkv`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn.kernels.attention.arguments import (
    LOG2E,
    RAISED_BITS,
    bound_strides,
    is_dot_only,
    pair,
    per_batch,
    scale_and_cap,
    strides,
)
from ringattn.kernels.attention.hopper import configs
from ringattn.kernels.attention.hopper.backward import backward_kernel
from ringattn.kernels.attention.hopper.backward_dkv_wide import backward_dkv_wide_kernel
from ringattn.kernels.attention.hopper.backward_dq import add_parts_kernel, backward_dq_kernel
from ringattn.kernels.attention.hopper.backward_pre_post import clear_grad_buffer_kernel, finish_kernel, prepare_kernel
from ringattn.kernels.attention.hopper.descriptors import Descriptors, multiprocessors, store_unit, workspace
from ringattn.kernels.attention.hopper.forward import forward_kernel
from ringattn.kernels.attention.hopper.forward_combine import combine_kernel
from ringattn.kernels.attention.hopper.progress_barrier import progress_board
from ringattn.kernels.attention.hopper.tile_scheduler import L2_BYTES, Shape, WorkPlan, fill_programs, schedule_tiles
from ringattn.kernels.interface import PAD_ROWS, Arrivals, BackwardStep, CallShape, GatheredKeys, Grads, Returns, Step
from ringattn.kernels.runtime import bound_launch

MAX_PACK = 64  # heads in the rows of one warpgroup
TINIEST_SCALE = 1e-6  # lse over a smaller softmax_scale may overflow
HIDDEN = -1.0e30
DQ_TILE = 128  # rows
CHUNK = 16  # rows of a program that adds up the parts of a split tile of rows
CARRY_COLUMNS = 64  # of a carry that have shared memory of their own
ROWS = 32  # of a program before or after the kernels of dk and dv
ORDER_US = 60_000_000  # that a program waits for its turn to add dq, besides the time for remote rows, before it traps


class BoundCall:
    """The choices of a call that do not change: kernels, the shapes of their launches, descriptors.

    Attributes:
        forward: The shape of the forward launch; dq: of the launch of dq alone; dkv: of that of dk and dv, by whether it makes dq,
            too. A measurement may put others in their place.
        pack: Heads that share a tile; None: by `choose_pack`.
        in_turns: Under `deterministic`, one kernel makes dq, dk and dv and adds dq in turns (Note [Order of sums] of backward.py),
            else the pair makes them; None: by `_waits_little`.
        programs: Programs that run side by side on the device.
    """

    def __init__(self, call: CallShape) -> None:
        d, dv = call.head_dim, call.v_head_dim
        self.dims, self.group, self.deterministic = (d, dv), call.heads // call.kv_heads, call.deterministic
        self.programs, self.descriptors = multiprocessors(call.device), Descriptors()
        score = call.score
        self.dot_only = is_dot_only(score)
        self.extras = (score.softcap > 0) + (score.alibi_slopes is not None) + (score.key_bias is not None)
        self.forward_columns, self.forward = configs.choose_forward(d, dv, self.dot_only)
        self.pack: int | None = None
        self.in_turns: bool | None = None
        self.is_plain = is_dot_only(score, TINIEST_SCALE)
        self.dkv = {
            want_dq: configs.choose_dkv(d, dv, self.is_plain, self.extras, want_dq=want_dq) for want_dq in (False, True)
        }
        self.dq = configs.choose_dq(
            configs.columns_of(d, configs.PANELS), configs.columns_of(dv, configs.PANELS), self.extras
        )

    def needs_pair(self, wants_extra_grads: bool) -> bool:
        """Return whether two kernels make the gradients: one dk and dv, one dq, both in a fixed order."""
        wide = max(self.dims) > configs.FUSED_MAX_HEAD_DIM
        # dalibi is added in any order
        unordered = self.deterministic and wants_extra_grads
        return wide or unordered or configs.is_for_pair(*self.dims, self.extras, wants_extra_grads)


def launch_forward(bound: BoundCall, step: Step, arrivals: Arrivals | None) -> None:
    """One launch, and one that adds up split tiles; arrivals: the remote rows of a fused call."""
    q, k, v, rows, keys, score, o, lse, carry, first, last, sm_margin = step
    flags, error, *flag_numbers = _waits_of(arrivals, k.shape[2])
    remote_kv, local_rows, streamed_rows = None, None, k.shape[1]
    if arrivals is not None and isinstance(keys, GatheredKeys):
        remote_kv = arrivals[:2]
        local_rows = None if score.key_bias is None else keys.local_rows
        streamed_rows = keys.local_rows + keys.remote_rows
    batch, s, h, d = q.shape
    t, hk, dv = v.shape[1:]
    keys_in_all = t if score.key_bias is None else score.key_bias.shape[1]
    descriptors, (columns, v_columns), config = bound.descriptors, bound.forward_columns, bound.forward
    if rows.patterns is not None and config.consumers == 3:
        config = replace(config, consumers=2)  # 192 rows straddle blocks of 128
    panel, v_panel = configs.PANELS[columns], configs.PANELS[v_columns]
    assert config.block_n <= PAD_ROWS, "a block that begins in a source ends before the next one"
    tile = 64 * config.consumers
    pack = bound.pack or choose_pack(s, bound.group, tile)
    shape = Shape(
        batch=batch,
        heads=h // pack,
        tile=tile // pack,
        block=config.block_n,
        programs=max(1, bound.programs - sm_margin),
        streamed_bytes=streamed_rows * (d + dv) * k.element_size() * hk * pack // h,
        every_tile=first or last,
        groups=1 if flags is None else flags.shape[0],
    )
    plan = schedule_tiles(rows, keys, shape)
    if plan.work.shape[0] == 0:
        return
    board, epochs = progress_board(plan, shape, (d + dv) * k.element_size(), q.device, bound.programs)
    q, k, v = (
        descriptors.addressable(x) if x.shape[-1] % 8 == 0 else torch.nn.functional.pad(x, (0, -x.shape[-1] % 8))
        for x in (q, k, v)
    )
    store = (
        config.store
        and last
        and o.dtype == q.dtype
        and dv <= columns
        and v_panel % panel == 0
        and descriptors.describable(o)
    )
    acc = None if carry is None or (first and last) else carry.acc
    # the carry passes through shared memory where columns beyond CARRY_COLUMNS fit into the q tile
    tiled = acc is not None and config.store and panel == columns == v_columns <= 128 and descriptors.describable(acc)
    queries, outputs, carries = (
        None
        if x is None
        else descriptors.rows(x, 64, width)
        if pack == 1
        else descriptors.groups(x, 64 // pack, pack, width)
        for x, width in ((q, panel), (o if store else None, panel), (acc if tiled else None, CARRY_COLUMNS))
    )
    # absent tensors of the carry and of the workspace are never touched; lse is a pointer of their kind
    state = (carry.m, carry.l, carry.acc) if carry is not None else (lse, lse, lse)
    parts = (lse, lse, lse)
    if plan.slots:
        m, l = workspace(q, plan.slots, tile), workspace(q, plan.slots, tile)  # noqa: E741
        parts = (m, l, workspace(q, plan.slots, tile, v_columns))
    o_unit, acc_unit = store_unit(o, 8), 1 if acc is None else store_unit(acc, 4)
    lo_sb, hi_sb, lo_st, hi_st = bound_strides(rows)
    pairs = (*pair(lse), *pair(state[0]), *pair(state[1]))
    bound_launch.launch(
        forward_kernel,
        (plan.programs,),
        (
            queries, *descriptors.kv_rows((k, v), config.block_n, (panel, v_panel)),
            outputs, carries, plan.work, plan.segments, plan.starts, o, lse, *state, *parts,
            rows.positions, rows.lo, rows.hi, score.sinks, score.alibi_slopes, score.key_bias,
            *descriptors.kv_rows(remote_kv, config.block_n, (panel, v_panel)), flags, error, board,
            *strides(o, o_unit), *strides(acc, acc_unit), *pairs, lo_sb, hi_sb,
            per_batch(score.key_bias),
            h // pack, h // hk // pack, s, keys_in_all, *flag_numbers, local_rows, epochs, lo_st, hi_st, *scale_and_cap(score),
        ),
        {
            "CONSUMERS": config.consumers, "BLOCK_N": config.block_n, "STAGES": config.stages, "D": columns,
            "DV": v_columns, "PANELS": columns // panel, "V_PANELS": v_columns // v_panel, "DV_WIDTH": dv, "PACK": pack,
            "O_UNIT": o_unit, "ACC_UNIT": acc_unit, "FIRST": first, "LAST": last, "DOT_ONLY": bound.dot_only,
            "SOFTCAP": score.softcap > 0, "Q_STAGES": 2 if config.early else 1,
            "EARLY": config.early, "STORE": store, "AHEAD": config.ahead, "LAZY": config.lazy,
        },
        num_warps=4,
        maxnreg=config.maxnreg,
    )  # fmt: skip
    if plan.slots:
        bound_launch.launch(
            combine_kernel,
            (plan.splits.shape[0], tile // CHUNK),
            (
                plan.splits, *parts, o, lse, *state, score.sinks, error, *strides(o), *strides(acc), *pairs, h // pack, s,
            ),
            {
                "TILE": tile, "CHUNK": CHUNK, "DV": v_columns, "COLUMNS": 1 << (v_columns - 1).bit_length(), "DV_WIDTH": dv,
                "PACK": pack, "FIRST": first, "LAST": last,
            },
            num_warps=4,
        )  # fmt: skip


def choose_pack(s: int, group: int, tile: int) -> int:
    """Number of neighbouring heads that share a tile: one, unless more save at least an eighth of the tiles."""
    powers = [1 << i for i in range(MAX_PACK.bit_length()) if group % (1 << i) == 0 and tile % (1 << i) == 0]
    tiles = {pack: -(-s * pack // tile) / pack for pack in powers}  # per head
    best = min(powers, key=lambda pack: (tiles[pack], pack))
    return best if tiles[best] <= 0.875 * tiles[1] else 1


def launch_backward(
    bound: BoundCall, x: BackwardStep, out: Grads, arrivals: Arrivals | None = None, returns: Returns | None = None
) -> None:
    """All gradients of a call; arrivals and returns are those of a fused one.

    One kernel makes them, whose dq and dalibi are sums in an order that changes from run to run, or under `deterministic` in a
    fixed one (Note [Order of sums] of backward.py). Or a pair does, one that makes dk and dv and one that makes dq, in a fixed
    order: beyond a head_dim of 128, where it suits the score better (`is_for_pair` of configs.py), and where `deterministic` would
    let tiles wait long for their turn.
    """
    remote_bias = returns is not None and returns.bias_grad_buffers is not None
    two = bound.needs_pair(out.dalibi is not None or out.dkey_bias is not None or remote_bias)
    if bound.deterministic and not two:
        two = not (_waits_little(bound, x, out, arrivals) if bound.in_turns is None else bound.in_turns)
    launch_dkv(bound, x, out, arrivals, returns, want_dq=not two)
    if two:
        launch_dq(bound, x, out, arrivals)


def _waits_little(bound: BoundCall, x: BackwardStep, out: Grads, arrivals: Arrivals | None) -> bool:
    """Return whether tiles that take turns are soon done: they fill the device, and no heads of a group meet a window.

    There the masked blocks of a tile, for which its neighbour waits, come head by head.
    """
    plan, shape = _tiles_of_keys(bound, x, out, arrivals, want_dq=True)
    return plan is None or (fill_programs(plan.programs, shape.programs) and (plan.shares_ends or bound.group == 1))


def _tiles_of_keys(
    bound: BoundCall, x: BackwardStep, out: Grads, arrivals: Arrivals | None, *, want_dq: bool
) -> tuple[WorkPlan | None, Shape]:
    """The plan of `launch_dkv`, None where there is no work, and its parameters."""
    config, (batch, s, h, d), (hk, dv) = bound.dkv[want_dq], x.q.shape, x.v.shape[2:]
    ordered, size = want_dq and bound.deterministic, x.q.element_size()
    shape = Shape(
        batch=batch,
        heads=hk,
        tile=config.tile,
        block=config.block,
        programs=max(1, bound.programs - x.sm_margin),
        streamed_bytes=h // hk * s * ((d + dv) * size + (0 if isinstance(config, configs.WideDkvConfig) else 4 * d)),
        repeats=h // hk,
        align=config.block if ordered else 4,  # bulk loads begin at multiples of 16 bytes
        ordered=ordered,
        every_tile=not out.accumulate_keys,
        groups=1 if arrivals is None or arrivals.ready_flags is None else arrivals.ready_flags.groups,
    )
    if batch * s * sum(key_rows(x)) * h == 0:
        return None, shape
    plan = schedule_tiles(x.keys, x.rows, shape)
    return (plan if plan.programs else None), shape


def launch_dkv(
    bound: BoundCall,
    x: BackwardStep,
    out: Grads,
    arrivals: Arrivals | None = None,
    returns: Returns | None = None,
    *,
    want_dq: bool = False,
) -> None:
    """Makes dk, dv and dkey_bias in a fixed order of sums, and under `want_dq` dq and dalibi in the same launch.

    Args:
        out: Where gradients go; without `want_dq`, dq and dalibi are left as they are.
    """
    do, q, k, v, score, descriptors = x.do, x.q, x.k, x.v, x.score, bound.descriptors
    batch, s, h, d = q.shape
    t, hk, dv = v.shape[1:]
    flags, error, heads_per_group, steps, timeout_us = _waits_of(arrivals, hk)
    config = bound.dkv[want_dq]
    is_wide = isinstance(config, configs.WideDkvConfig)
    assert not (is_wide and want_dq), "the kernel for wide heads makes no dq"
    dot_only = not is_wide and bound.is_plain
    tile, block = config.tile, config.block
    columns = configs.padded_dims(d, dv)
    if is_wide:
        columns = configs.columns_of(d, configs.WIDE_COLUMNS), configs.columns_of(dv, configs.WIDE_COLUMNS)
    panels = configs.PANELS[columns[0]], configs.PANELS[columns[1]]
    plan, shape = _tiles_of_keys(bound, x, out, arrivals, want_dq=want_dq)
    if plan is None:
        _write_zeros(x, out, returns, columns[0], want_dq=want_dq)
        return

    board, epochs = progress_board(plan, shape, (d + dv) * q.element_size() + 4 * d * want_dq, q.device, bound.programs)
    do, q = descriptors.addressable(do), descriptors.addressable(q)
    local_kv, remote_kv = descriptors.addressable_kv((k, v), None if arrivals is None else arrivals[:2])
    # sums that may turn out to be lost are finished by a kernel that knows
    direct = out.dq.dtype == torch.float32 and descriptors.describable(out.dq) and flags is None
    total = (out.dq if direct else workspace(q, batch, s, h, d)) if want_dq else None
    zeroed = None if direct and out.accumulate_rows else total
    factor, empty = (-1 / score.softmax_scale, HIDDEN) if dot_only else (LOG2E, math.inf)
    raised = RAISED_BITS if is_wide and q.dtype == torch.float16 else 0
    start_s, start_dp = _prepare(x, zeroed, columns[0], factor, raised, empty)
    parts = workspace(q, plan.slots, tile * sum(columns)) if plan.slots else None
    bias = _bias_sums(x, out, returns, plan, tile, start_s)
    dalibi = out.dalibi if want_dq else None
    if dalibi is not None and not out.accumulate_rows:
        dalibi.zero_()
    sums = [total_of for total_of in (out.dk, out.dv) if total_of is not None]
    sums_strides = [stride for total_of in sums for stride in strides(total_of)]
    unit = 8 if all(stride % 8 == 0 for stride in sums_strides) else 1
    grad_buffers, grad_buffer_rows = (None, None) if returns is None else (returns.grad_buffers, returns.rows)
    local_rows = x.keys.local_rows if isinstance(x.keys, GatheredKeys) else None
    lo_sb, hi_sb, lo_st, hi_st = bound_strides(x.keys)
    # what only the kernel with dq is given: tiles of its sums, dalibi, the rows of q, and the order of blocks
    of_tiles: tuple[Any, ...] = ()
    of_dalibi: tuple[Any, ...] = ()
    of_rows: tuple[int, ...] = ()
    of_order: tuple[Any, ...] = ()
    if not is_wide:
        # rounded sums of a whole tile leave through the buffer of dq and the copy engine
        staged = want_dq and returns is None and not out.accumulate_keys
        staged = staged and all(total_of.dtype == q.dtype and descriptors.describable(total_of) for total_of in sums)
        of_tiles = (
            None if total is None else descriptors.rows(total, 64, columns[0] * block // 128),
            *([descriptors.rows(*of) for of in zip(sums, (64, 64), columns, strict=True)] if staged else (None, None)),
        )
        of_dalibi, of_rows = (dalibi,), (s,)
        of_order = (int(plan.shares_ends and shape.streamed_bytes > L2_BYTES), None, None, None)
        if want_dq and bound.deterministic:
            counters = torch.zeros(1 + batch * h * -(-s // block), dtype=torch.int32, device=q.device)
            of_order = (1, plan.turns, counters, min(ORDER_US + (timeout_us or 0), 2**31 - 1))
    bound_launch.launch(
        backward_dkv_wide_kernel if is_wide else backward_kernel,
        (plan.programs,),
        (
            plan.work, plan.segments, plan.starts, None if returns is None else plan.tiles,
            descriptors.rows(q, block, panels[0]), descriptors.rows(do, block, panels[1]),
            *descriptors.kv_rows(local_kv, tile, panels), *descriptors.kv_rows(remote_kv, tile, panels),
            descriptors.numbers(start_s, block), descriptors.numbers(start_dp, block), *of_tiles,
            out.dk, out.dv, grad_buffers, flags, error, board,
            # a kernel asks at run time whether a tile was split: what it would then write to must be a pointer of its kind
            start_s if parts is None else parts, *((None, None) if bias is None else bias[:2]), *of_dalibi,
            x.keys.positions, x.keys.lo, x.keys.hi, score.alibi_slopes, score.key_bias,
            *([stride // unit for stride in sums_strides] or [None] * 6),
            lo_sb, hi_sb, per_batch(score.key_bias), *(pair(dalibi) if of_dalibi else ()),
            hk, h // hk, t, *of_rows, padded_rows(s), local_rows, grad_buffer_rows,
            steps, heads_per_group, timeout_us,
            epochs, lo_st, hi_st, *of_order, *scale_and_cap(score), score.softmax_scale,
        ),
        _switches_of_dkv(bound, x, out, columns, unit, want_dq=want_dq, direct=direct, fused=returns is not None),
        num_warps=4,
        maxnreg=168,
    )  # fmt: skip
    row_sums = None
    if total is not None and not direct:
        row_sums = RowSums(total, out.dq, dalibi, error, columns[0], score.softmax_scale, out.accumulate_rows)
    key_sums = None
    if parts is not None:
        target = (out.dk, out.dv, None, None, *sums_strides, hk, t)
        if returns is not None:
            buffer_strides = (returns.rows * hk * (d + dv), hk * (d + dv), d + dv)
            target = (None, None, plan.split_tiles, returns.grad_buffers, *buffer_strides, *buffer_strides, hk, 0)
        key_sums = KeySums(plan, parts, tile, columns, (d, dv), target, out.accumulate_keys)
    finish_sums(key_sums, row_sums)
    if bias is not None:
        bias[2]()


def _write_zeros(x: BackwardStep, out: Grads, returns: Returns | None, columns: int, *, want_dq: bool) -> None:
    """The gradients of a launch without a visible pair, and delta where it is made here."""
    if want_dq and not out.accumulate_rows:
        _zero(out.dq, out.dalibi)
    if not out.accumulate_keys:
        _zero(out.dk, out.dv, out.dkey_bias)
    if x.o is not None and not x.delta_made and x.delta.numel():
        _prepare(x, None, columns, LOG2E, 0, math.inf)
    if returns is not None:
        batch, _, hk, d = x.k.shape
        _clear_grad_buffers(returns.grad_buffers, returns.rows, key_rows(x), batch, hk * (d + x.v.shape[3]))
        if returns.bias_grad_buffers is not None:
            _clear_grad_buffers(returns.bias_grad_buffers, returns.rows, key_rows(x), batch * hk, 1)


def _switches_of_dkv(
    bound: BoundCall,
    x: BackwardStep,
    out: Grads,
    columns: tuple[int, int],
    unit: int,
    *,
    want_dq: bool,
    direct: bool,
    fused: bool,
) -> dict[str, Any]:
    """The compile-time arguments of the kernel that makes dk and dv: those of both kernels, then its own."""
    d, dv = bound.dims
    config, descriptors = bound.dkv[want_dq], bound.descriptors
    both = {
        "D": columns[0], "DV": columns[1], "D_WIDTH": d, "DV_WIDTH": dv, "SOFTCAP": x.score.softcap > 0,
        "ADD": out.accumulate_keys, "UNIT": unit,
    }  # fmt: skip
    layout = descriptors.layout((config.tile, config.block), x.q.dtype)
    if isinstance(config, configs.WideDkvConfig):
        own: dict[str, Any] = {"STAGES": config.stages, "HELD": config.held, "P_LAYOUT": layout}
        return both | own | {"GRAD_LAYOUT": descriptors.layout((config.tile, 32), torch.float32)}
    plain = bound.is_plain
    return both | {
        "BM": config.block, "DOT_ONLY": plain, "WANT_DQ": want_dq, "SCALE_DQ": direct,
        # bounds of keys are read behind the loops without a mask, through which what finds them stays in registers
        "LATE_ADDRESSES": config.late_addresses or (want_dq and bound.deterministic), "DS_LAYOUT": layout,
        "HELD": config.held if plain else 0, "SCORED": configs.scored_columns(d, columns[0]),
        "V_SCORED": configs.scored_columns(dv, columns[1]),
        # elsewhere the words would make loops without a mask spill
        "MASK_BITS": plain and config.block == 128 and want_dq and not fused,
    }  # fmt: skip


def launch_dq(bound: BoundCall, x: BackwardStep, out: Grads, arrivals: Arrivals | None = None) -> None:
    """Makes dq and dalibi of keys that are all there, the same bits from run to run; other gradients are left alone."""
    q, score, dq, dalibi, add = x.q, x.score, out.dq, out.dalibi, out.accumulate_rows
    descriptors, config = bound.descriptors, bound.dq
    batch, s, h, d = q.shape
    hk, dv = x.v.shape[2:]
    _, error, *_ = _waits_of(arrivals, hk)
    t = sum(key_rows(x))
    if batch * s * h == 0:
        return
    if t == 0:
        if not add:
            _zero(dq, dalibi)
        return
    local_rows = x.keys.local_rows if isinstance(x.keys, GatheredKeys) and score.key_bias is not None else None
    columns = configs.columns_of(d, configs.PANELS), configs.columns_of(dv, configs.PANELS)
    panels = configs.PANELS[columns[0]], configs.PANELS[columns[1]]
    do, q = descriptors.addressable(x.do), descriptors.addressable(q)
    local_kv, remote_kv = descriptors.addressable_kv((x.k, x.v), None if arrivals is None else arrivals[:2])
    shape = Shape(
        batch=batch,
        heads=h,
        tile=DQ_TILE,
        block=config.block,
        programs=max(1, bound.programs - x.sm_margin),
        streamed_bytes=t * (d + dv) * q.element_size() * hk // h,
        every_tile=not add,
    )
    plan = schedule_tiles(x.rows, x.keys, shape)
    if plan.programs == 0:
        return
    board, epochs = progress_board(plan, shape, (d + dv) * q.element_size(), q.device, bound.programs)
    lo_sb, hi_sb, lo_st, hi_st = bound_strides(x.rows)
    part = dalibi_part = None
    if plan.slots:
        part = workspace(q, plan.slots, DQ_TILE, columns[0])
        if dalibi is not None:
            dalibi_part = workspace(q, plan.slots, DQ_TILE)
    dq_strides = strides(dq)
    unit = 2 if all(stride % 2 == 0 for stride in dq_strides) else 1
    bound_launch.launch(
        backward_dq_kernel,
        (plan.programs,),
        (
            plan.work, plan.starts, plan.segments,
            descriptors.rows(q, DQ_TILE // 2, panels[0]), descriptors.rows(do, DQ_TILE // 2, panels[1]),
            *descriptors.kv_rows(local_kv, config.block, panels), *descriptors.kv_rows(remote_kv, config.block, panels),
            x.lse, x.delta, dq, dalibi, error, board,
            # lse stands in for the workspace of a plan that splits nothing: it is not touched
            x.lse if part is None else part, dalibi if dalibi_part is None else dalibi_part,
            x.rows.positions, x.rows.lo, x.rows.hi, score.alibi_slopes, score.key_bias,
            *pair(x.lse), *pair(x.delta), *strides(dq, unit), *pair(dalibi),
            lo_sb, hi_sb, per_batch(score.key_bias),
            h, h // hk, s, t if score.key_bias is None else score.key_bias.shape[1], local_rows, epochs,
            lo_st, hi_st, score.softmax_scale, *scale_and_cap(score),
        ),
        {
            "SOFTCAP": score.softcap > 0, "ADD": add, "UNIT": unit, "D": columns[0], "D_WIDTH": d,
            "DV": columns[1], "BLOCK": config.block, "K_STAGES": config.k_stages, "V_STAGES": config.v_stages,
            "LATE": config.late,
        },
        num_warps=4,
        maxnreg=168,
    )  # fmt: skip
    if plan.slots:
        bound_launch.launch(
            add_parts_kernel,
            (DQ_TILE // CHUNK, plan.splits.shape[0]),
            (
                plan.splits, part, dalibi_part, dq, dalibi, *dq_strides, *pair(dalibi), h, s, score.softmax_scale,
            ),
            {"ADD": add, "D": columns[0], "D_WIDTH": d, "CHUNK": CHUNK},
            num_warps=4,
        )  # fmt: skip


class RowSums(NamedTuple):
    """dq before it is scaled: scale * total, both `b s h d`, is written to dq, or added; NaN, like dalibi, where `error` is set."""

    total: Tensor
    dq: Tensor
    dalibi: Tensor | None
    error: Tensor | None
    columns: int
    scale: float
    add: bool


class KeySums(NamedTuple):
    """Partial results of split tiles of keys, and where their sums belong.

    Attributes:
        parts: fp32, a line per slot.
        target: dk and dv; lines of sources and addresses of regions, by which a fused call finds them; strides of batch, row
            and head of both; heads, and rows.
    """

    plan: WorkPlan
    parts: Tensor
    tile: int
    columns: tuple[int, int]
    widths: tuple[int, int]
    target: tuple[object, ...]
    add: bool = False


def finish_sums(keys: KeySums | None, rows: RowSums | None = None) -> None:
    """One launch that adds up split tiles of keys and scales dq, if there is anything to do."""
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
    bound_launch.launch(
        finish_kernel,
        (key_programs + row_programs,),
        (*of_keys, *of_rows),
        {
            "TILE": tile, "ROWS": ROWS, "COLUMNS": columns[0], "WIDTH": widths[0], "V_COLUMNS": columns[1], "V_WIDTH": widths[1],
            "ADD_KEYS": keys is not None and keys.add, "ADD_ROWS": rows is not None and rows.add,
        },
        num_warps=4,
    )  # fmt: skip


def _bias_sums(
    x: BackwardStep, out: Grads, returns: Returns | None, plan: WorkPlan, tile: int, beside: Tensor
) -> tuple[Tensor, Tensor, Callable[[], None]] | None:
    """Return (sums of each key head, sums of split tiles, finish) of dkey_bias; None: it is not wanted.

    The first is `b hk t` fp32, or the addresses of the regions of a fused call, where owners add up the heads. Where no tile is
    split, `beside`, an fp32 tensor of the launch, stands for the second.
    """
    batch, t, heads, _ = x.k.shape
    if out.dkey_bias is not None:
        # where gradients are accumulated, tiles that see nothing are left out
        make = torch.zeros if out.accumulate_keys else torch.empty
        per_head = make((batch, heads, t), dtype=torch.float32, device=x.k.device)
        target = (per_head, None, None, None, *(heads * t, 1, t), 0, 0, 0, heads, t)
    elif returns is not None and returns.bias_grad_buffers is not None:
        per_head = returns.bias_grad_buffers
        buffer_strides = (heads * returns.rows, 1, returns.rows)
        target = (None, None, plan.split_tiles, per_head, *buffer_strides, 0, 0, 0, heads, 0)
    else:
        return None
    parts = workspace(beside, plan.slots, tile) if plan.slots else beside
    split = KeySums(plan, parts, tile, (1, 0), (1, 0), target) if plan.slots else None

    def finish() -> None:
        finish_sums(split)
        if out.dkey_bias is not None and out.accumulate_keys:
            out.dkey_bias.add_(per_head.sum(1))
        elif out.dkey_bias is not None:
            torch.sum(per_head, 1, out=out.dkey_bias)

    return per_head, parts, finish


def _prepare(
    x: BackwardStep, zeroed: Tensor | None, columns: int, factor: float, raised: float, empty: float
) -> tuple[Tensor, Tensor]:
    """(lse * factor - raised, -delta) as `b h padded_rows`, `empty` where a row saw nothing; `zeroed`, `b s h d`, becomes zero.

    delta is given, or written where there is an o; do is read only then.
    """
    lse, delta, o = x.lse, x.delta, None if x.delta_made else x.o
    dlse = None if o is None else x.dlse
    batch, h, s = lse.shape
    do, v_width = (None, columns) if o is None else (x.do, o.shape[-1])
    rows_of_head = padded_rows(s)
    start_s, start_dp = workspace(lse, batch, h, rows_of_head), workspace(lse, batch, h, rows_of_head)
    width = columns if zeroed is None else zeroed.shape[-1]
    bound_launch.launch(
        prepare_kernel,
        (-(-rows_of_head // ROWS) * batch * h,),
        (
            lse, delta, o, do, dlse, start_s, start_dp, zeroed, *pair(lse), *pair(delta), *strides(o), *strides(do),
            *pair(dlse), *strides(zeroed), h, s, rows_of_head, factor, float(raised), empty,
        ),
        {"ROWS": ROWS, "COLUMNS": columns, "WIDTH": width, "V_COLUMNS": 1 << (v_width - 1).bit_length(), "V_WIDTH": v_width},
        num_warps=4,
    )  # fmt: skip
    return start_s, start_dp


def padded_rows(rows: int) -> int:
    """Rows of a head of row statistics: bulk loads begin at multiples of 16 bytes, so every head does."""
    return rows + -rows % 4


def _clear_grad_buffers(
    grad_buffers: Tensor, grad_buffer_rows: int, lengths: Sequence[int], batch: int, width: int
) -> None:
    """Zeros in the first rows, `lengths`, of every region."""
    columns = 1 << (width - 1).bit_length()
    per_program = max(1, 4096 // columns)
    for side, length in enumerate(lengths):
        if batch * length * width:
            bound_launch.launch(
                clear_grad_buffer_kernel,
                (-(-length // per_program) * batch,),
                (grad_buffers, side, length, grad_buffer_rows * width, width),
                {"ROWS": per_program, "COLUMNS": columns, "WIDTH": width},
                num_warps=4,
            )


def _zero(*sums: Tensor | None) -> None:
    for x in sums:
        if x is not None:
            x.zero_()


def _waits_of(
    arrivals: Arrivals | None, key_heads: int
) -> tuple[Tensor | None, Tensor | None, int | None, int | None, int | None]:
    """Flags, error, key heads of a group, steps of the flags, microseconds that a kernel waits; None where it does not wait."""
    if arrivals is None or (ready := arrivals.ready_flags) is None:
        return None, None, None, None, None
    # an integer of more than 32 bits is another kernel
    timeout_us = min(max(ready.timeout_ns // 1000, 1), 2**31 - 1)
    return ready.flags, ready.error, key_heads // ready.groups, ready.flags.shape[1], timeout_us


def key_rows(x: BackwardStep) -> list[int]:
    """Return the rows of each source of keys."""
    if isinstance(x.keys, GatheredKeys):
        return [side.lo_host.shape[1] for side in x.keys.sides]
    return [x.v.shape[1]]
