"""Online softmax and log-sum-exp of rows of any length, in plain torch: for CPUs and fp64; `softmax_triton` runs on GPUs.

One pass over a row x in blocks keeps a running maximum m and a running sum l, two numbers however long the row is:
    m' = max(m, max(block))     l' = l e^(m - m') + sum e^(block - m')
starting from (-inf, 0) (Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", algorithm 3). A second pass
writes y = e^(x - m) / l. That is 2MN reads and MN writes; lse = m + ln l needs MN reads only.
Statistics are fp32 (fp64 for fp64 rows). A row that is -inf throughout has y = 0, lse = -inf and gradient 0, like an attention row
that sees nothing. A row that holds +inf or NaN is NaN throughout, and so is its lse.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringattn.kernels.interface import accumulation_dtype

DEFAULT_BLOCK = 4096


def _blocks(n: int, block_size: int | None) -> list[slice]:
    block = block_size or DEFAULT_BLOCK
    return [slice(i, min(i + block, n)) for i in range(0, n, block)]


def _stats(rows: Tensor, block_size: int | None) -> tuple[Tensor, Tensor]:
    acc = accumulation_dtype(rows.dtype)
    m = torch.full(rows.shape[:-1], float("-inf"), dtype=acc, device=rows.device)
    l = torch.zeros_like(m)  # noqa: E741
    for block in _blocks(rows.shape[-1], block_size):
        x = rows[..., block].to(acc)
        m_new = torch.maximum(m, x.amax(-1))
        shift = torch.where(m_new == float("-inf"), 0.0, m_new)
        l = l * torch.exp(m - shift) + torch.exp(x - shift.unsqueeze(-1)).sum(-1)  # noqa: E741
        m = m_new
    return m, l


def softmax(x: Tensor, dim: int, block_size: int | None = None) -> Tensor:
    """Softmax along dim."""
    y = torch.empty_like(x)
    rows, out = x.movedim(dim, -1), y.movedim(dim, -1)
    m, l = _stats(rows, block_size)  # noqa: E741
    shift = torch.where(m == float("-inf"), 0.0, m).unsqueeze(-1)
    divisor = torch.where(l == 0, 1.0, l).unsqueeze(-1)
    for block in _blocks(rows.shape[-1], block_size):
        out[..., block] = (torch.exp(rows[..., block].to(m.dtype) - shift) / divisor).to(y.dtype)
    return y


def logsumexp(x: Tensor, dim: int, block_size: int | None = None) -> Tensor:
    """Log-sum-exp along dim, natural log, in the accumulation dtype: x's shape without dim, contiguous."""
    m, l = _stats(x.movedim(dim, -1), block_size)  # noqa: E741
    return (m + torch.log(l)).contiguous()


def softmax_backward(dy: Tensor, y: Tensor, dim: int, block_size: int | None = None) -> Tensor:
    """Returns dx = y * (dy - sum(y * dy)), with the strides of y: one pass for the sum, one to write."""
    dx = torch.empty_like(y)
    grads, probs, out = dy.movedim(dim, -1), y.movedim(dim, -1), dx.movedim(dim, -1)
    acc = accumulation_dtype(y.dtype)
    dot = torch.zeros(probs.shape[:-1], dtype=acc, device=y.device)
    for block in _blocks(probs.shape[-1], block_size):
        dot += (probs[..., block].to(acc) * grads[..., block].to(acc)).sum(-1)
    for block in _blocks(probs.shape[-1], block_size):
        out[..., block] = (probs[..., block].to(acc) * (grads[..., block].to(acc) - dot.unsqueeze(-1))).to(y.dtype)
    return dx


def logsumexp_backward(g: Tensor, x: Tensor, lse: Tensor, dim: int, block_size: int | None = None) -> Tensor:
    """Returns dx = g * exp(x - lse), with the strides of x; g and lse lack dim. Empty rows get 0."""
    dx = torch.empty_like(x)
    rows, out = x.movedim(dim, -1), dx.movedim(dim, -1)
    shift = torch.where(lse == float("-inf"), 0.0, lse).unsqueeze(-1)
    factor = torch.where(lse == float("-inf"), 0.0, g).unsqueeze(-1)
    for block in _blocks(rows.shape[-1], block_size):
        out[..., block] = (factor * torch.exp(rows[..., block].to(lse.dtype) - shift)).to(x.dtype)
    return dx
