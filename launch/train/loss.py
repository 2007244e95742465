"""Cross entropy of hidden rows against a vocabulary, without the logits of all rows at once.

Logits of 100,000 rows over a vocabulary of 128,256 are 51 GB in fp32, and as much again for their gradient. So both passes go
chunk by chunk: the forward keeps lse = ln sum_j exp(x . w_j) per row; the backward computes the logits of a chunk again and turns
them into (softmax - one_hot) in place. Nothing is approximated; the gradient of the weight is added up over chunks in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IGNORED = -100
"""Target of a row that predicts nothing."""

CHUNK_ELEMENTS = 1 << 27
"""Logits at a time: 512 MiB in fp32."""


def cross_entropy_sum(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float = 0.0, chunk_elements: int = CHUNK_ELEMENTS
) -> Tensor:
    """The sum over rows of -ln softmax(hidden @ weight.T)[target], a scalar in fp32; differentiable once.

    `hidden` is `... dim`, `weight` is `vocab dim`, `targets` are `...` int64 or IGNORED. With a softcap, logits become
    `softcap * tanh(logit / softcap)` first. At most `chunk_elements` logits exist at a time, or those of one row.
    """
    total: Tensor = _CrossEntropySum.apply(hidden.flatten(0, -2), weight, targets.flatten(), softcap, chunk_elements)  # type: ignore[assignment]
    return total


def _logits(rows: Tensor, weight: Tensor, softcap: float) -> Tensor:
    logits = (rows @ weight.T).float()
    return logits.div_(softcap).tanh_().mul_(softcap) if softcap else logits


class _CrossEntropySum(torch.autograd.Function):
    """`cross_entropy_sum` of `r dim` rows."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float, chunk_elements: int
    ) -> Tensor:
        ctx.softcap, ctx.rows = softcap, max(1, chunk_elements // weight.shape[0])
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        lse = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        for rows, wanted, to in zip(hidden.split(ctx.rows), targets.split(ctx.rows), lse.split(ctx.rows), strict=True):
            logits = _logits(rows, weight, softcap)
            torch.logsumexp(logits, -1, out=to)
            counts = wanted != IGNORED
            picked = logits.gather(-1, wanted.clamp(min=0)[:, None])[:, 0]
            total += torch.where(counts, to - picked, 0.0).sum()
        ctx.save_for_backward(hidden, weight, targets, lse)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, targets, lse = ctx.saved_tensors
        dhidden = torch.empty_like(hidden)
        dweight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        pieces = (x.split(ctx.rows) for x in (hidden, targets, lse, dhidden))
        for rows, wanted, row_lse, to in zip(*pieces, strict=True):
            logits = _logits(rows, weight, ctx.softcap)
            slope = 1 - (logits / ctx.softcap).square_() if ctx.softcap else None
            dlogits = logits.sub_(row_lse[:, None]).exp_()
            counts = wanted != IGNORED
            dlogits.scatter_add_(-1, wanted.clamp(min=0)[:, None], -torch.ones_like(row_lse)[:, None])
            dlogits.mul_((counts * grad)[:, None])
            if slope is not None:
                dlogits.mul_(slope)
            lowered = dlogits.to(hidden.dtype)
            torch.mm(lowered, weight, out=to)
            dweight += lowered.T @ rows
        return dhidden, dweight.to(weight.dtype), None, None, None
