"""Gathered visits from the eager kernels: what the loops of `ringattn.schedule.fused` are tested with where there is no GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import math

import torch
from torch import Tensor

from ringattn.kernels.attention import eager
from ringattn.kernels.comm.grad_reduce import reduce_key_bias_grads as reduce_key_bias_grads
from ringattn.kernels.comm.grad_reduce import reduce_kv_grads as reduce_kv_grads
from ringattn.kernels.interface import GatheredKeys, Grads, ReadyFlags, RowMetadata, Score, SoftmaxState


def can_capture() -> bool:
    return True


def can_fuse(head_dim: int, v_head_dim: int, score: Score) -> bool:
    return score.bias is None


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
) -> None:
    assert ready_flags is not None
    assert bool(ready_flags.flags.all())
    carry = SoftmaxState(torch.empty_like(lse), torch.empty_like(lse), torch.empty_like(o, dtype=lse.dtype))
    for number, side in enumerate(keys.sides):
        k, v = _source(local_kv, remote_kv, side, number)
        first, last = number == 0, number == len(keys.sides) - 1
        here = _score(score, keys, side, number)
        eager.forward(q, k, v, rows, _at_zero(side), here, carry=carry, first=first, last=last, o=o, lse=lse)


def backward_fused(
    do: Tensor,
    q: Tensor,
    local_kv: tuple[Tensor, Tensor],
    remote_kv: tuple[Tensor, Tensor],
    lse: Tensor,
    delta: Tensor,
    rows: RowMetadata,
    keys: GatheredKeys,
    score: Score,
    ready_flags: ReadyFlags | None,
    grad_buffers: Tensor,
    grad_buffer_rows: int,
    *,
    dq: Tensor,
    dalibi: Tensor | None,
    bias_grad_buffers: Tensor | None,
    deterministic: bool,
    sm_margin: int = 0,
    o: Tensor | None = None,
    dlse: Tensor | None = None,
) -> None:
    assert ready_flags is not None
    assert bool(ready_flags.flags.all())
    if o is not None:
        eager.delta(o, do, dlse, delta)
    total = torch.empty_like(dq, dtype=lse.dtype)
    for number, (side, address) in enumerate(zip(keys.sides, grad_buffers.tolist(), strict=True)):
        k, v = _source(local_kv, remote_kv, side, number)
        b, t, hk, d = k.shape
        home = _region(address, (b, grad_buffer_rows, hk, d + v.shape[-1]))[:, :t]
        grads = Grads(
            dq=total,
            dk=torch.empty_like(k, dtype=lse.dtype),
            dv=torch.empty_like(v, dtype=lse.dtype),
            dkey_bias=None if bias_grad_buffers is None else torch.empty(b, t, dtype=lse.dtype),
            dalibi=dalibi,
            accumulate_rows=number > 0,
            deterministic=deterministic,
        )
        here = _score(score, keys, side, number)
        eager.backward(do, q, k, v, lse, delta, rows, _at_zero(side), here, grads)
        home.copy_(torch.cat((grads.dk, grads.dv), -1))
        if bias_grad_buffers is not None and grads.dkey_bias is not None:
            # the sum over heads stands with the first head
            region = _region(int(bias_grad_buffers[number]), (b, hk, grad_buffer_rows))[..., :t]
            region.zero_()
            region[:, 0] = grads.dkey_bias
    dq.copy_(total)


def _score(score: Score, keys: GatheredKeys, side: RowMetadata, number: int) -> Score:
    """With the bias of one source."""
    if score.key_bias is None:
        return score
    assert score.key_bias.shape[1] == keys.local_rows + keys.remote_rows
    first = side.run_list[0][0] + (keys.local_rows if number else 0)
    return dataclasses.replace(score, key_bias=score.key_bias[:, first : first + side.positions.shape[0]])


def _source(
    local_kv: tuple[Tensor, Tensor], remote_kv: tuple[Tensor, Tensor], side: RowMetadata, number: int
) -> tuple[Tensor, Tensor]:
    if number == 0:
        return local_kv
    at, rows = side.run_list[0][0], side.positions.shape[0]
    return remote_kv[0][:, at : at + rows], remote_kv[1][:, at : at + rows]


def _at_zero(side: RowMetadata) -> RowMetadata:
    """The same rows as a buffer of their own."""
    at = side.run_list[0][0] if side.run_list else 0
    runs = tuple((offset - at, *run) for offset, *run in side.run_list)
    table = torch.tensor(runs, dtype=torch.int32).view(-1, 4)
    return RowMetadata(table, side.positions, side.lo, side.hi, runs, side.lo_host, side.hi_host)  # pyright: ignore


def _region(address: int, shape: tuple[int, ...]) -> Tensor:
    memory = (ctypes.c_float * math.prod(shape)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.float32).view(shape)
