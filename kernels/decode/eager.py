"""Decode in plain torch, request by request: the definition, for CPUs, tests and all calls that the kernels refuse."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ringattn.kernels.constants import LOG2E
from ringattn.kernels.decode.dispatch import DecodeCall, check_decode
from ringattn.kernels.interface import Score, accumulation_dtype
from ringattn.kernels.partials.packed import views


def decode(call: DecodeCall, parts: Tensor, *, split_plan: Tensor | None = None) -> None:
    """`kernels.decode.dispatch.decode`; each request's blocks are divided evenly among the splits."""
    del split_plan
    check_decode(call, parts)
    q, k, v, table, lo, hi, positions, score, k_scale, v_scale = call
    b, s, h, _ = q.shape
    splits, page_size, dv = parts.shape[0], *v.shape[2:]
    m, l, acc = (x.unflatten(1, (b, s, h)) for x in views(parts, b * s * h, dv))  # noqa: E741
    # counts are read on a CPU only: elsewhere that would wait for the device
    counts = table.counts.tolist() if q.device.type == "cpu" else [table.pages.shape[1]] * b
    for i, count in enumerate(counts):
        exists = torch.arange(count, device=q.device) < table.counts[i]
        pages = torch.where(exists, table.pages[i, :count], 0)
        row = torch.arange(page_size, device=q.device)
        inside = exists[:, None] & (row < table.lengths[i, :count, None])  # blocks page_size
        keys = _gathered(k, k_scale, pages, q.dtype).flatten(1, 2)  # hk t d
        values = _gathered(v, v_scale, pages, q.dtype).masked_fill(~inside[None, :, :, None], 0.0).flatten(1, 2)
        where = (table.starts[i, :count, None] + row).flatten()
        scores = _scores(q[i], keys, positions[i], where, score)  # s h t
        visible = inside.flatten() & (where >= lo[i, :, None]) & (where < hi[i, :, None])
        scores = scores.masked_fill(~visible[:, None], -math.inf)
        share = max(1, -(-count // splits) * page_size)
        for split in range(splits):
            mine = slice(split * share, (split + 1) * share)
            m[split, i], l[split, i], acc[split, i] = _partial(scores[..., mine], values[:, mine])


def plan_splits(call: DecodeCall, splits: int) -> None:
    """`kernels.decode.dispatch.plan_splits`: there is nothing to find."""
    del call, splits


def _gathered(pool: Tensor, scale: Tensor | None, pages: Tensor, dtype: torch.dtype) -> Tensor:
    """`hk blocks page_size d` of the pages, in the dtype of sums."""
    x = pool[pages].to(accumulation_dtype(dtype))
    if scale is not None:
        x = x * scale[pages].unsqueeze(-1)
    return x.transpose(0, 1)


def _scores(q: Tensor, keys: Tensor, positions: Tensor, where: Tensor, score: Score) -> Tensor:
    """Note [Score] in log2 units, `s h t`, of q `s h d` and keys `hk t d`."""
    grouped = q.to(keys.dtype).unflatten(1, (keys.shape[0], -1))
    x = torch.einsum("skgd,ktd->skgt", grouped, keys).flatten(1, 2) * score.softmax_scale
    if score.softcap > 0:
        x = score.softcap * torch.tanh(x / score.softcap)
    if score.alibi_slopes is not None:
        distance = (positions[:, None] - where).abs()[:, None]
        x = x - score.alibi_slopes.to(x.dtype)[:, None] * distance
    return x * LOG2E


def _partial(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(m, l, acc) of scores `s h t` in log2 units and values `hk t dv`."""
    if scores.shape[-1] == 0:
        nothing = scores.new_zeros(scores.shape[:-1])
        return nothing - math.inf, nothing, scores.new_zeros((*scores.shape[:-1], values.shape[-1]))
    m = scores.amax(-1)
    p = torch.exp2(scores - torch.where(m == -math.inf, 0.0, m).unsqueeze(-1))
    weighted = torch.einsum("skgt,ktd->skgd", p.unflatten(1, (values.shape[0], -1)), values)
    return m, p.sum(-1), weighted.flatten(1, 2)
