"""From tensors to launches of the Hopper kernels: the forward, dk and dv (fused with dq or alone), and dq alone.

Owns the choice of kernels and configurations, arguments, workspaces and compile-time switches. Never waits for the device.
Allocates workspaces and copies of tensors that the bulk copy engine cannot address. The two kernels that make dk and dv differ
in their tiles, a few arguments and their switches; all else of their launch is `launch_dkv`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
from ringattn.kernels.attention.hopper.backward import backward_kernel
from ringattn.kernels.attention.hopper.backward_dkv_wide import backward_dkv_wide_kernel
from ringattn.kernels.attention.hopper.backward_dq import add_parts_kernel, backward_dq_kernel
from ringattn.kernels.attention.hopper.backward_pre_post import clear_grad_buffer_kernel, finish_kernel, prepare_kernel
from ringattn.kernels.attention.hopper.configs import (
    FUSED_MAX_HEAD_DIM,
    MAX_HEAD_DIM,
    PANELS,
    WIDE_COLUMNS,
    DkvConfig,
    DqConfig,
    ForwardConfig,
    WideDkvConfig,
    choose_dkv,
    choose_dq,
    choose_forward,
    columns_of,
    is_for_pair,
    padded_dims,
    scored_columns,
)
from ringattn.kernels.attention.hopper.descriptors import (
    addressable,
    addressable_kv,
    describable,
    groups_of,
    kv_rows_of,
    layout_of,
    multiprocessors,
    numbers_of,
    rows_of,
    store_unit,
    timeout_us_of,
    workspace,
)
from ringattn.kernels.attention.hopper.forward import forward_kernel
from ringattn.kernels.attention.hopper.forward_combine import combine_kernel
from ringattn.kernels.attention.hopper.progress_barrier import progress_board
from ringattn.kernels.attention.hopper.tile_scheduler import L2_BYTES, AnyRows, Shape, WorkPlan, make_plan
from ringattn.kernels.attention.portable import api as portable
from ringattn.kernels.interface import PAD_ROWS, GatheredKeys, Grads, ReadyFlags, RowMetadata, Score, SoftmaxState
from ringattn.kernels.runtime import bound_launch

DTYPES = (torch.float16, torch.bfloat16)
MAX_PACK = 64  # heads in the rows of one warpgroup
TINIEST_SCALE = 1e-6  # lse over a smaller softmax_scale may overflow
HIDDEN = -1.0e30
DQ_TILE = 128  # rows
CHUNK = 16  # rows of a program that adds up the parts of a split tile of rows
CARRY_COLUMNS = 64  # of a carry that have shared memory of their own
ROWS = 32  # of a program before or after the kernels of dk and dv

_ABSENT = (None,) * 8


@dataclass(frozen=True, eq=False)
class RemoteGradArgs:
    """Keys of other owners, and where their gradients go (Note [Fused call] of interface.py).

    Attributes:
        grad_buffers: Addresses of the regions of dk and dv.
        bias_grad_buffers: Addresses of the regions of dkey_bias; None: it is not wanted.
    """

    remote_kv: tuple[Tensor, Tensor]
    ready_flags: ReadyFlags | None
    grad_buffers: Tensor
    grad_buffer_rows: int
    bias_grad_buffers: Tensor | None = None


@dataclass(frozen=True, eq=False)
class BackwardInputs:
    """Tensors that every backward kernel reads; see `KernelSet.backward`.

    Attributes:
        do: `b s h dv`.
        q: `b s h d`.
        k: `b t hk d`.
        v: `b t hk dv`.
        lse: `b h s`, natural log; contiguous last dim.
        delta: `b h s`; contiguous last dim. Written where `o` is given.
        o: Makes delta = rowsum(o * do) - dlse; None: delta is given.
        dlse: `b h s`, contiguous last dim; None: zero.
        remote: Of a fused call; None: of one step.
    """

    do: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    delta: Tensor
    rows: RowMetadata
    keys: AnyRows
    score: Score
    o: Tensor | None = None
    dlse: Tensor | None = None
    remote: RemoteGradArgs | None = None
    sm_margin: int = 0

    @property
    def ready_flags(self) -> ReadyFlags | None:
        """Flags of remote rows; None: all rows are there."""
        return None if self.remote is None else self.remote.ready_flags

    @property
    def error(self) -> Tensor | None:
        """The error word of kernels that wait; where it is set, results are NaN."""
        return None if self.ready_flags is None else self.ready_flags.error

    @property
    def key_rows(self) -> list[int]:
        """Rows of each source of keys."""
        if isinstance(self.keys, GatheredKeys):
            return [side.lo_host.shape[1] for side in self.keys.sides]
        return [self.v.shape[1]]


@dataclass(frozen=True, eq=False)
class GradOutputs:
    """Tensors that gradients are written to: as in `Grads`, but no dk and dv in a fused call, which sends them to their owners."""

    dq: Tensor
    dk: Tensor | None = None
    dv: Tensor | None = None
    dkey_bias: Tensor | None = None
    dalibi: Tensor | None = None
    accumulate_rows: bool = False
    accumulate_keys: bool = False

    @classmethod
    def of(cls, grads: Grads) -> GradOutputs:
        """Those of one step."""
        rows, keys = grads.accumulate_rows, grads.accumulate_keys
        return cls(grads.dq, grads.dk, grads.dv, grads.dkey_bias, grads.dalibi, rows, keys)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: RowMetadata,
    keys: RowMetadata,
    score: Score,
    *,
    carry: SoftmaxState | None,
    first: bool,
    last: bool,
    o: Tensor,
    lse: Tensor,
    sm_margin: int = 0,
    config: ForwardConfig | None = None,
    pack: int | None = None,
) -> None:
    """`KernelSet.forward`, with a configuration and packing of the caller's choice in place of the table's."""
    _check(q, v, score)
    t = k.shape[1]
    if q.numel() == 0 or not (first or last or t):
        return
    if t == 0:
        # nothing is multiplied: the identity, the sinks or the carry become the result
        portable.forward(q, k, v, rows, keys, score, carry=carry, first=first, last=last, o=o, lse=lse)
        return
    _launch_forward(q, k, v, rows, keys, _ABSENT, score, t, carry, first, last, o, lse, config, pack, sm_margin)


def forward_fused(
    q: Tensor,
    local_kv: tuple[Tensor, Tensor],
    remote_kv: tuple[Tensor, Tensor],
    rows: RowMetadata,
    keys: GatheredKeys,
    score: Score,
    ready_flags: ReadyFlags | None,
    *,
    o: Tensor,
    lse: Tensor,
    sm_margin: int = 0,
    config: ForwardConfig | None = None,
    pack: int | None = None,
) -> None:
    """`FusedKernelSet.forward_fused`, with a configuration and packing of the caller's choice."""
    batch, s, h, d = q.shape
    (k, v), hk = local_kv, local_kv[0].shape[2]
    _check(q, v, score)
    assert can_fuse(d, v.shape[-1], score), "a fused call must satisfy can_fuse"
    if batch * s * h == 0:
        return
    if len(keys.sides) == 1:
        options: dict[str, Any] = {"sm_margin": sm_margin, "config": config, "pack": pack}
        alone = keys.sides[0]
        forward(q, k, v, rows, alone, score, carry=None, first=True, last=True, o=o, lse=lse, **options)
        return
    if k.shape[1] == 0:
        # hidden blocks are read from the local buffer: one row of zeros stands for none
        k, v = (x.new_zeros(batch, 1, *x.shape[2:]) for x in local_kv)
    # a copy of the remote buffer would be made before it is filled
    assert all(describable(x) for x in remote_kv), "rows of the remote buffer are whole words of 16 bytes"
    if ready_flags is not None:
        assert ready_flags.flags.is_contiguous(), "flags stand in rows of one step each"
    local_rows = None if score.key_bias is None else keys.local_rows
    fused = (*remote_kv, *_flags_of(ready_flags), *_waits_of(ready_flags, hk), local_rows)
    streamed = keys.local_rows + keys.remote_rows
    _launch_forward(q, k, v, rows, keys, fused, score, streamed, None, True, True, o, lse, config, pack, sm_margin)


def can_fuse(head_dim: int, v_head_dim: int, score: Score) -> bool:
    """`FusedKernelSet.can_fuse`: the copy engine reads whole words of the remote buffer."""
    return score.bias is None and max(head_dim, v_head_dim) <= MAX_HEAD_DIM and head_dim % 8 == v_head_dim % 8 == 0


def _launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: RowMetadata,
    keys: AnyRows,
    fused: tuple[Any, ...],
    score: Score,
    streamed_rows: int,
    carry: SoftmaxState | None,
    first: bool,
    last: bool,
    o: Tensor,
    lse: Tensor,
    config: ForwardConfig | None,
    pack: int | None,
    sm_margin: int,
) -> None:
    """One launch, and one that adds up split tiles.

    fused: k and v of the remote buffer, flags, error, key heads and steps of the flags, timeout, and where remote rows begin in
        a bias of
    keys; None where absent.
    """
    batch, s, h, d = q.shape
    t, hk, dv = v.shape[1:]
    remote_kv, (flags, error, *flag_numbers, local_rows) = fused[:2], fused[2:]
    keys_in_all = t if score.key_bias is None else score.key_bias.shape[1]
    dot_only = is_dot_only(score)
    (columns, v_columns), chosen = choose_forward(d, dv, dot_only, patterned=rows.patterns is not None)
    config = config or chosen
    panel, v_panel = PANELS[columns], PANELS[v_columns]
    assert config.block_n <= PAD_ROWS, "a block that begins in a source ends before the next one"
    tile = 64 * config.consumers
    pack = pack or choose_pack(s, h // hk, tile)
    shape = Shape(
        batch=batch,
        heads=h // pack,
        tile=tile // pack,
        block=config.block_n,
        programs=max(1, multiprocessors(q.device) - sm_margin),
        streamed_bytes=streamed_rows * (d + dv) * k.element_size() * hk * pack // h,
        every_tile=first or last,
        groups=1 if flags is None else flags.shape[0],
    )
    plan = make_plan(rows, keys, shape)
    if plan.work.shape[0] == 0:
        return
    board, epochs = progress_board(plan, shape, (d + dv) * k.element_size(), q)
    q, k, v = (
        addressable(x) if x.shape[-1] % 8 == 0 else torch.nn.functional.pad(x, (0, -x.shape[-1] % 8)) for x in (q, k, v)
    )
    store = config.store and last and o.dtype == q.dtype and dv <= columns and v_panel % panel == 0 and describable(o)
    acc = None if carry is None or (first and last) else carry.acc
    # the carry passes through shared memory where columns beyond CARRY_COLUMNS fit into the q tile
    tiled = acc is not None and config.store and panel == columns == v_columns <= 128 and describable(acc)
    queries, outputs, carries = (
        None if x is None else rows_of(x, 64, width) if pack == 1 else groups_of(x, 64 // pack, pack, width)
        for x, width in ((q, panel), (o if store else None, panel), (acc if tiled else None, CARRY_COLUMNS))
    )
    # absent tensors of the carry and of the workspace are never touched; lse is a pointer of their kind
    state = (carry.m, carry.l, carry.acc) if carry is not None else (lse, lse, lse)
    parts = (lse, lse, lse)
    if plan.slots:
        m, l = workspace(q, plan.slots, tile), workspace(q, plan.slots, tile)  # noqa: E741
        parts = (m, l, workspace(q, plan.slots, tile, v_columns))
    o_unit, acc_unit = store_unit(o, 8), 1 if acc is None else store_unit(acc, 4)
    (lo_sb, lo_st), (hi_sb, hi_st) = bound_strides(rows.lo, rows), bound_strides(rows.hi, rows)
    pairs = (*pair(lse), *pair(state[0]), *pair(state[1]))
    bound_launch.launch(
        forward_kernel,
        (plan.programs,),
        (
            queries, *kv_rows_of((k, v), config.block_n, (panel, v_panel)),
            outputs, carries, plan.work, plan.segments, plan.starts, o, lse, *state, *parts,
            rows.positions, rows.lo, rows.hi, score.sinks, score.alibi_slopes, score.key_bias,
            *kv_rows_of(None if remote_kv[0] is None else remote_kv, config.block_n, (panel, v_panel)), flags, error, board,
            *strides(o, o_unit), *strides(acc, acc_unit), *pairs, lo_sb, hi_sb,
            per_batch(score.key_bias),
            h // pack, h // hk // pack, s, keys_in_all, *flag_numbers, local_rows, epochs, lo_st, hi_st, *scale_and_cap(score),
        ),
        {
            "CONSUMERS": config.consumers, "BLOCK_N": config.block_n, "STAGES": config.stages, "D": columns,
            "DV": v_columns, "PANELS": columns // panel, "V_PANELS": v_columns // v_panel, "DV_WIDTH": dv, "PACK": pack,
            "O_UNIT": o_unit, "ACC_UNIT": acc_unit, "FIRST": first, "LAST": last, "DOT_ONLY": dot_only,
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


@functools.lru_cache
def choose_pack(s: int, group: int, tile: int) -> int:
    """Number of neighbouring heads that share a tile: one, unless more save at least an eighth of the tiles."""
    powers = [1 << i for i in range(MAX_PACK.bit_length()) if group % (1 << i) == 0 and tile % (1 << i) == 0]
    tiles = {pack: -(-s * pack // tile) / pack for pack in powers}  # per head
    best = min(powers, key=lambda pack: (tiles[pack], pack))
    return best if tiles[best] <= 0.875 * tiles[1] else 1


def launch_backward(x: BackwardInputs, out: GradOutputs, *, deterministic: bool) -> None:
    """All gradients of a call.

    One kernel makes them, whose dq and dalibi are sums in an order that changes from run to run; or a pair does, one that makes
    dk and dv and one that makes dq, in a fixed order: beyond a head_dim of 128, where `deterministic` asks for it, and where it
    suits the score better (`is_for_pair` of configs.py).
    """
    d, dv = x.q.shape[-1], x.v.shape[-1]
    remote_bias = x.remote is not None and x.remote.bias_grad_buffers is not None
    wants_extra_grads = out.dalibi is not None or out.dkey_bias is not None or remote_bias
    two = deterministic or max(d, dv) > FUSED_MAX_HEAD_DIM or is_for_pair(d, dv, _extras(x.score), wants_extra_grads)
    launch_dkv(x, out, want_dq=not two)
    if two:
        launch_dq(x, out)


def launch_dkv(
    x: BackwardInputs,
    out: GradOutputs,
    *,
    want_dq: bool = False,
    config: DkvConfig | WideDkvConfig | None = None,
) -> None:
    """Makes dk, dv and dkey_bias in a fixed order of sums, and under `want_dq` dq and dalibi in the same launch.

    Args:
        out: Where gradients go; without `want_dq`, dq and dalibi are left as they are.
    """
    do, q, k, v, score, remote, ready_flags = x.do, x.q, x.k, x.v, x.score, x.remote, x.ready_flags
    batch, s, h, d = q.shape
    t, hk, dv = v.shape[1:]
    _check(q, x.v, score, 8)
    config = config or choose_dkv(d, dv, is_dot_only(score, TINIEST_SCALE), _extras(score), want_dq=want_dq)
    is_wide = isinstance(config, WideDkvConfig)
    assert not (is_wide and want_dq), "the kernel for wide heads makes no dq"
    dot_only = not is_wide and is_dot_only(score, TINIEST_SCALE)
    tile, block = config.tile, config.block
    columns = (columns_of(d, WIDE_COLUMNS), columns_of(dv, WIDE_COLUMNS)) if is_wide else padded_dims(d, dv)
    panels = PANELS[columns[0]], PANELS[columns[1]]
    lengths = x.key_rows
    plan = shape = None
    if batch * s * sum(lengths) * h > 0:
        size = q.element_size()
        tiles = batch * hk * sum(-(-length // tile) for length in lengths)
        shape = Shape(
            batch=batch,
            heads=hk,
            tile=tile,
            block=block,
            programs=max(1, multiprocessors(q.device) - x.sm_margin) if config.persistent else tiles,
            streamed_bytes=h // hk * s * ((d + dv) * size + (0 if is_wide else 4 * d)),
            repeats=h // hk,
            align=4,  # bulk loads begin at multiples of 16 bytes
            every_tile=not out.accumulate_keys,
            split=config.split,
            groups=1 if ready_flags is None else ready_flags.groups,
        )
        plan = make_plan(x.keys, x.rows, shape)
    if plan is None or shape is None or plan.programs == 0:
        _write_zeros(out, want_dq=want_dq)
        if x.o is not None and x.delta.numel():
            _prepare(x, None, columns[0], LOG2E, 0, math.inf)
        if remote is not None:
            _clear_grad_buffers(remote.grad_buffers, remote.grad_buffer_rows, lengths, batch, hk * (d + dv))
            if remote.bias_grad_buffers is not None:
                _clear_grad_buffers(remote.bias_grad_buffers, remote.grad_buffer_rows, lengths, batch * hk, 1)
        return

    board, epochs = progress_board(plan, shape, (d + dv) * q.element_size() + 4 * d * want_dq, q)
    do, q = addressable(do), addressable(q)
    local_kv, remote_kv = addressable_kv((k, v), None if remote is None else remote.remote_kv)
    # sums that may turn out to be lost are finished by a kernel that knows
    direct = out.dq.dtype == torch.float32 and describable(out.dq) and ready_flags is None
    total = (out.dq if direct else workspace(q, batch, s, h, d)) if want_dq else None
    zeroed = None if direct and out.accumulate_rows else total
    factor, empty = (-1 / score.softmax_scale, HIDDEN) if dot_only else (LOG2E, math.inf)
    raised = RAISED_BITS if is_wide and q.dtype == torch.float16 else 0
    start_s, start_dp = _prepare(x, zeroed, columns[0], factor, raised, empty)
    parts = workspace(q, plan.slots, tile * sum(columns)) if plan.slots else None
    bias = _bias_sums(x, out, plan, tile, start_s)
    dalibi = out.dalibi if want_dq else None
    if dalibi is not None and not out.accumulate_rows:
        dalibi.zero_()
    sums = [total_of for total_of in (out.dk, out.dv) if total_of is not None]
    sums_strides = [stride for total_of in sums for stride in strides(total_of)]
    unit = 8 if all(stride % 8 == 0 for stride in sums_strides) else 1
    grad_buffers, grad_buffer_rows = (None, None) if remote is None else (remote.grad_buffers, remote.grad_buffer_rows)
    local_rows = x.keys.local_rows if isinstance(x.keys, GatheredKeys) else None
    heads_per_group, steps, timeout_us = _waits_of(ready_flags, hk)
    (lo_sb, lo_st), (hi_sb, hi_st) = bound_strides(x.keys.lo, x.keys), bound_strides(x.keys.hi, x.keys)
    # what only the kernel with dq is given: tiles of its sums, dalibi, and the rows of q
    of_tiles: tuple[Any, ...] = ()
    of_dalibi: tuple[Any, ...] = ()
    of_rows: tuple[int, ...] = ()
    of_order: tuple[int, ...] = ()
    if isinstance(config, DkvConfig):
        # rounded sums of a whole tile leave through the buffer of dq and the copy engine
        staged = want_dq and remote is None and not out.accumulate_keys
        staged = staged and all(total_of.dtype == q.dtype and describable(total_of) for total_of in sums)
        half = columns[0] * block // 128
        of_tiles = (
            None if total is None else rows_of(total, 64, half),
            *([rows_of(*of) for of in zip(sums, (64, 64), columns, strict=True)] if staged else (None, None)),
        )
        of_dalibi, of_rows = (dalibi,), (s,)
        of_order = (int(plan.shares_ends and shape.streamed_bytes > L2_BYTES),)
        kernel = backward_kernel
        switches: dict[str, Any] = {
            "BM": block, "DOT_ONLY": dot_only, "WANT_DQ": want_dq, "SCALE_DQ": direct,
            "LATE_ADDRESSES": config.late_addresses, "DS_LAYOUT": layout_of((tile, block), q.dtype),
            "HELD": config.held if dot_only else 0, "SCORED": scored_columns(d, columns[0]),
            "V_SCORED": scored_columns(dv, columns[1]),
            # elsewhere the words would make loops without a mask spill
            "MASK_BITS": dot_only and block == 128 and want_dq and remote is None,
        }  # fmt: skip
    else:
        kernel = backward_dkv_wide_kernel
        switches = {
            "STAGES": config.stages, "HELD": config.held,
            "P_LAYOUT": layout_of((tile, block), q.dtype), "GRAD_LAYOUT": layout_of((tile, 32), torch.float32),
        }  # fmt: skip
    bound_launch.launch(
        kernel,
        (plan.programs,),
        (
            plan.work, plan.segments, plan.starts, None if remote is None else plan.tiles,
            rows_of(q, block, panels[0]), rows_of(do, block, panels[1]),
            *kv_rows_of(local_kv, tile, panels), *kv_rows_of(remote_kv, tile, panels),
            numbers_of(start_s, block), numbers_of(start_dp, block), *of_tiles,
            out.dk, out.dv, grad_buffers, *_flags_of(ready_flags), board,
            # a kernel asks at run time whether a tile was split: what it would then write to must be a pointer of its kind
            start_s if parts is None else parts, *((None, None) if bias is None else bias[:2]), *of_dalibi,
            x.keys.positions, x.keys.lo, x.keys.hi, score.alibi_slopes, score.key_bias,
            *([stride // unit for stride in sums_strides] or [None] * 6),
            lo_sb, hi_sb, per_batch(score.key_bias), *(pair(dalibi) if of_dalibi else ()),
            hk, h // hk, t, *of_rows, padded_rows(s), local_rows, grad_buffer_rows,
            steps, heads_per_group, timeout_us,
            epochs, lo_st, hi_st, *of_order, *scale_and_cap(score), score.softmax_scale,
        ),
        {
            "D": columns[0], "DV": columns[1], "D_WIDTH": d, "DV_WIDTH": dv, "SOFTCAP": score.softcap > 0,
            "ADD": out.accumulate_keys, "UNIT": unit, **switches,
        },
        num_warps=4,
        maxnreg=168,
    )  # fmt: skip
    row_sums = None
    if total is not None and not direct:
        row_sums = RowSums(total, out.dq, dalibi, x.error, columns[0], score.softmax_scale, out.accumulate_rows)
    key_sums = None
    if parts is not None and remote is not None:
        width = d + dv
        buffer_strides = (remote.grad_buffer_rows * hk * width, hk * width, width)
        target = (None, None, plan.split_tiles, remote.grad_buffers, *buffer_strides, *buffer_strides, hk, 0)
        key_sums = KeySums(plan, parts, tile, columns, (d, dv), target)
    elif parts is not None:
        target = (out.dk, out.dv, None, None, *sums_strides, hk, t)
        key_sums = KeySums(plan, parts, tile, columns, (d, dv), target, out.accumulate_keys)
    finish_sums(key_sums, row_sums)
    if bias is not None:
        bias[2]()


def launch_dq(x: BackwardInputs, out: GradOutputs, *, config: DqConfig | None = None) -> None:
    """Makes dq and dalibi of keys that are all there, the same bits from run to run; other gradients are left alone."""
    q, score, dq, dalibi, add = x.q, x.score, out.dq, out.dalibi, out.accumulate_rows
    batch, s, h, d = q.shape
    hk, dv = x.v.shape[2:]
    t = sum(x.key_rows)
    _check(q, x.v, score, 8)
    if batch * s * h == 0:
        return
    if t == 0:
        if not add:
            for total in (dq, dalibi):
                if total is not None:
                    total.zero_()
        return
    local_rows = x.keys.local_rows if isinstance(x.keys, GatheredKeys) and score.key_bias is not None else None
    columns = columns_of(d, PANELS), columns_of(dv, PANELS)
    panels = PANELS[columns[0]], PANELS[columns[1]]
    config = config or choose_dq(max(columns), _extras(score))
    do, q = addressable(x.do), addressable(q)
    local_kv, remote_kv = addressable_kv((x.k, x.v), None if x.remote is None else x.remote.remote_kv)
    shape = Shape(
        batch=batch,
        heads=h,
        tile=DQ_TILE,
        block=config.block,
        programs=max(1, multiprocessors(q.device) - x.sm_margin),
        streamed_bytes=t * (d + dv) * q.element_size() * hk // h,
        every_tile=not add,
        split=config.split,
    )
    plan = make_plan(x.rows, x.keys, shape)
    if plan.programs == 0:
        return
    board, epochs = progress_board(plan, shape, (d + dv) * q.element_size(), q)
    (lo_sb, lo_st), (hi_sb, hi_st) = bound_strides(x.rows.lo, x.rows), bound_strides(x.rows.hi, x.rows)
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
            rows_of(q, DQ_TILE // 2, panels[0]), rows_of(do, DQ_TILE // 2, panels[1]),
            *kv_rows_of(local_kv, config.block, panels), *kv_rows_of(remote_kv, config.block, panels),
            x.lse, x.delta, dq, dalibi, x.error, board,
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


@dataclass(frozen=True, eq=False)
class RowSums:
    """dq in fp32 before it is scaled.

    Attributes:
        total: `b s h d` fp32.
        dq: `b s h d` in any dtype: scale * total is written to it, or added.
        dalibi: NaN, like dq, where `error` is set.
    """

    total: Tensor
    dq: Tensor
    dalibi: Tensor | None
    error: Tensor | None
    columns: int
    scale: float
    add: bool


@dataclass(frozen=True, eq=False)
class KeySums:
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
    x: BackwardInputs, out: GradOutputs, plan: WorkPlan, tile: int, beside: Tensor
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
    elif x.remote is not None and x.remote.bias_grad_buffers is not None:
        per_head, grad_buffer_rows = x.remote.bias_grad_buffers, x.remote.grad_buffer_rows
        buffer_strides = (heads * grad_buffer_rows, 1, grad_buffer_rows)
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
    x: BackwardInputs, zeroed: Tensor | None, columns: int, factor: float, raised: float, empty: float
) -> tuple[Tensor, Tensor]:
    """(lse * factor - raised, -delta) as `b h padded_rows`, `empty` where a row saw nothing; `zeroed`, `b s h d`, becomes zero.

    delta is given, or written where there is an o; do is read only then.
    """
    lse, delta, o, dlse = x.lse, x.delta, x.o, None if x.o is None else x.dlse
    batch, h, s = lse.shape
    do = None if o is None else x.do
    v_width = columns if o is None else o.shape[-1]
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


def _write_zeros(out: GradOutputs, *, want_dq: bool) -> None:
    """Writes the gradients of a call in which nothing is seen."""
    owed: list[Tensor | None] = []
    if want_dq and not out.accumulate_rows:
        owed += [out.dq, out.dalibi]
    if not out.accumulate_keys:
        owed += [out.dk, out.dv, out.dkey_bias]
    for x in owed:
        if x is not None:
            x.zero_()


def _flags_of(ready_flags: ReadyFlags | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if ready_flags is None else (ready_flags.flags, ready_flags.error)


def _waits_of(ready_flags: ReadyFlags | None, key_heads: int) -> tuple[int | None, int | None, int | None]:
    """Key heads of a group, steps of the flags, and microseconds that a kernel waits; None where nothing is waited for."""
    if ready_flags is None:
        return None, None, None
    return key_heads // ready_flags.groups, ready_flags.flags.shape[1], timeout_us_of(ready_flags)


def _extras(score: Score) -> int:
    return (score.softcap > 0) + (score.alibi_slopes is not None) + (score.key_bias is not None)


def _check(q: Tensor, v: Tensor, score: Score, multiple: int = 1) -> None:
    d, dv = q.shape[-1], v.shape[-1]
    if q.dtype not in DTYPES:
        raise NotImplementedError(
            f"q must be float16 or bfloat16 for the hopper kernels, got {str(q.dtype).removeprefix('torch.')}; "
            'use impl="portable" or "auto"'
        )
    if max(d, dv) > MAX_HEAD_DIM or d % multiple or dv % multiple:
        kind = f" and multiples of {multiple}" if multiple > 1 else ""
        raise NotImplementedError(
            f"head dims must be at most {MAX_HEAD_DIM}{kind} for the hopper kernels, got {d} and {dv}; "
            'use impl="portable" or "auto"'
        )
    if score.bias is not None or score.dropout_p > 0:
        what = "bias" if score.bias is not None else "dropout"
        raise NotImplementedError(f'the hopper kernels take no {what}, got one; use impl="portable" or "auto"')
