"""Collectives of rows whose number differs by rank: all-gather and reduce-scatter, each the gradient of the other, and all-to-all.

They are operators, so that `torch.compile` sees a call where it cannot trace communication.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn.transport.process_group import all_gather_single, resolve_group

_LIBRARY = torch.library.Library("ringattn", "FRAGMENT")
# Note [Beside compiled graphs] of autograd.py
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)


def gather_rows(x: Tensor, dim: int, lengths: Sequence[int], rank: int, group: str) -> list[Tensor]:
    """Do `Ring.gather`."""
    whole = torch.ops.ringattn.gather_rows.default(x, dim, list(lengths), rank, group)
    return list(whole.split(list(lengths), dim))


def exchange_rows(x: Tensor, sends: Sequence[int], receives: Sequence[int], rank: int, group: str) -> Tensor:
    """Do `Ring.all_to_all`."""
    return torch.ops.ringattn.exchange_rows.default(x, list(sends), list(receives), rank, group)


def post_gather(x: Tensor, out: Tensor, rank: int, group: str) -> Callable[[], object]:
    """Do `Ring.post_gather`."""
    # bytes, which every backend moves
    into, mine = (y.view(-1).view(torch.uint8) for y in (out, x))
    work = all_gather_single(into, mine, group=resolve_group(group, (rank, len(out))), async_op=True)
    assert work is not None, "this process is in the group"
    return work.wait


def _gather(x: Tensor, dim: int, lengths: Sequence[int], rank: int, group: str) -> Tensor:
    """Return all ranks' tensors, concatenated in rank order; each is padded to the longest for the transfer."""
    shape = list(x.shape)
    shape[dim] = max(lengths)
    padded = x.new_zeros(shape)
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    parts = [torch.empty_like(padded) for _ in lengths]
    # bytes, which every backend moves
    *into, mine = (part.view(-1).view(torch.uint8) for part in (*parts, padded))
    dist.all_gather(into, mine, group=resolve_group(group, (rank, len(lengths))))
    return torch.cat([part.narrow(dim, 0, length) for part, length in zip(parts, lengths, strict=True)], dim)


def _reduce(x: Tensor, dim: int, lengths: Sequence[int], rank: int, group: str) -> Tensor:
    """Return this rank's part of the sum of all ranks' tensors."""
    whole = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(whole, group=resolve_group(group, (rank, len(lengths))))
    return whole.split(list(lengths), dim)[rank].clone()


def _exchange(x: Tensor, sends: Sequence[int], receives: Sequence[int], rank: int, group: str) -> Tensor:
    """Return the rows received; bytes move, which every backend can."""
    out = x.new_empty([sum(receives), *x.shape[1:]])
    width = math.prod(x.shape[1:])
    into, rows = (y.view(y.shape[0], width).view(torch.uint8) for y in (out, x.contiguous()))
    members = resolve_group(group, (rank, len(sends)))
    dist.all_to_all_single(into, rows, list(receives), list(sends), group=members)
    return out


def _fake_gather(x: Tensor, dim: int, lengths: Sequence[int], *_: object) -> Tensor:
    return x.new_empty([*x.shape[:dim], sum(lengths), *x.shape[dim + 1 :]])


def _fake_reduce(x: Tensor, dim: int, lengths: Sequence[int], rank: int, *_: object) -> Tensor:
    return x.new_empty([*x.shape[:dim], lengths[rank], *x.shape[dim + 1 :]])


def _fake_exchange(x: Tensor, sends: Sequence[int], receives: Sequence[int], *_: object) -> Tensor:
    del sends
    return x.new_empty([sum(receives), *x.shape[1:]])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.options = inputs[1:]


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.ringattn.reduce_rows.default(grad, *ctx.options), None, None, None, None


def _reduce_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.ringattn.gather_rows.default(grad, *ctx.options), None, None, None, None


def _exchange_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    sends, receives, rank, group = ctx.options
    return torch.ops.ringattn.exchange_rows.default(grad, receives, sends, rank, group), None, None, None, None


for _name, _options, _run, _fake, _backward in (
    ("gather_rows", "int dim, SymInt[] lengths", _gather, _fake_gather, _gather_backward),
    ("reduce_rows", "int dim, SymInt[] lengths", _reduce, _fake_reduce, _reduce_backward),
    ("exchange_rows", "SymInt[] sends, SymInt[] receives", _exchange, _fake_exchange, _exchange_backward),
):
    _LIBRARY.define(f"{_name}(Tensor x, {_options}, int rank, str group) -> Tensor", tags=_TAGS)
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ringattn::{_name}", _fake, lib=_LIBRARY)
    torch.library.register_autograd(f"ringattn::{_name}", _backward, setup_context=_remember, lib=_LIBRARY)
