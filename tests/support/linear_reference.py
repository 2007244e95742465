"""The recurrences row by row, over a whole sequence in one process: the definitions that tests compare with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gated_delta_rule_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, documents: Sequence[int] = (0,)
) -> Tensor:
    """Return the gated delta rule of a whole sequence; shapes as of `gated_delta_rule`, with scale 1, and starts of documents."""
    return _recur(q, k, v, g, beta, documents)


def mamba2_reference(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, documents: Sequence[int] = (0,)
) -> Tensor:
    """Return the scan of Mamba-2 of a whole sequence; shapes as of `mamba2_scan`, and starts of documents."""
    return _recur(c, b, x * dt[..., None], dt * a, None, documents) + d[:, None] * x


def causal_conv1d_reference(x: Tensor, weight: Tensor, bias: Tensor, documents: Sequence[int] = (0,)) -> Tensor:
    """Return a causal depthwise convolution of a whole sequence; shapes as of `causal_conv1d`, and starts of documents."""
    rows = list[Tensor]()
    for t in range(x.shape[1]):
        first = max(start for start in documents if start <= t)
        taps = range(weight.shape[1])
        seen = [weight[:, -1 - i] * x[:, t - i] for i in taps if t - i >= first]
        rows.append(bias + torch.stack(seen).sum(0))
    return torch.stack(rows, 1)


def _recur(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, documents: Sequence[int]) -> Tensor:
    share = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(share, 2) for x in (q, k))
    zero = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])  # b h d e
    state, rows = zero, list[Tensor]()
    for t in range(v.shape[1]):
        state = zero if t in documents else g[:, t, :, None, None].exp() * state
        new = v[:, t]
        if beta is not None:
            new = beta[:, t, :, None] * (new - torch.einsum("bhde,bhd->bhe", state, k[:, t]))
        state = state + k[:, t, :, :, None] * new[:, :, None]
        rows.append(torch.einsum("bhde,bhd->bhe", state, q[:, t]))
    return torch.stack(rows, 1)
