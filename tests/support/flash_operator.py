"""torch's flash operators in plain torch, with the windows and variable lengths as FlashAttention-2 reads them, for CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def flash_operator(name: str) -> Any:
    """Return the stand-in for `_flash_attention_forward` or `_flash_attention_backward`."""
    return {"_flash_attention_forward": _forward, "_flash_attention_backward": _backward}[name]


def _visible(s: int, t: int, most: int, causal: bool, left: int | None, right: int | None) -> Tensor:
    """The mask `s t` of a window that is aligned to the last row and key; most is the longest key sequence of the call."""
    left, right = (-1 if side is None or side >= most else side for side in (left, right))
    right = 0 if causal else right
    if left >= 0 or right > 0:
        # an unbounded side of a window is as many keys as there are
        left, right = (most if side < 0 else side for side in (left, right))
    at = torch.arange(t) - (torch.arange(s)[:, None] + t - s)
    return ((left < 0) | (at >= -left)) & ((right < 0) | (at <= right))


def _segments(cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, s: int, t: int) -> Iterator[tuple[slice, slice]]:
    rows, keys = ([0, n] if x is None else x.tolist() for x, n in ((cum_seq_q, s), (cum_seq_k, t)))
    for first, end, start, stop in zip(rows, rows[1:], keys, keys[1:], strict=False):
        yield slice(first, end), slice(start, stop)


def _scores(q: Tensor, k: Tensor, scale: float, visible: Tensor) -> Tensor:
    """`b h s t`, -inf where hidden."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    s = torch.einsum("bshd,bthd->bhst", q, k) * scale
    return s.masked_fill(~visible, -torch.inf)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float, window_size_left: int | None,
    window_size_right: int | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert not dropout_p
    assert not return_debug_mask
    packed = cum_seq_q is not None
    q, k, v = (x[None] if packed else x for x in (query, key, value))
    o, lse = torch.full_like(q, torch.nan), torch.full((q.shape[0], q.shape[2], q.shape[1]), torch.nan)
    longest = [0, 0]
    for rows, keys in _segments(cum_seq_q, cum_seq_k, q.shape[1], k.shape[1]):
        s, t = rows.stop - rows.start, keys.stop - keys.start
        longest = [max(longest[0], s), max(longest[1], t)]
        visible = _visible(s, t, max_k, is_causal, window_size_left, window_size_right)
        assert visible.any(1).all(), "every row of a call sees a key"
        scores = _scores(q[:, rows].float(), k[:, keys].float(), scale, visible)
        values = v[:, keys].float().repeat_interleave(q.shape[2] // v.shape[2], 2)
        o[:, rows] = torch.einsum("bhst,bthd->bshd", scores.softmax(-1), values).to(o.dtype)
        lse[:, :, rows] = scores.logsumexp(-1)
    assert longest == [max_q, max_k], "the longest rows and keys"
    found = (o[0], lse[0]) if packed else (o, lse)
    return (*found, torch.empty(0), torch.empty(0), torch.empty(0))


def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Tensor, unused: Tensor,
    *, scale: float, window_size_left: int | None, window_size_right: int | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert not dropout_p
    assert max_q > 0
    del rng_state, unused
    packed = cum_seq_q is not None
    do, q, k, v, o = (x[None].float() if packed else x.float() for x in (grad_out, query, key, value, out))
    lse, groups = logsumexp[None] if packed else logsumexp, q.shape[2] // k.shape[2]
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for rows, keys in _segments(cum_seq_q, cum_seq_k, q.shape[1], k.shape[1]):
        s, t = rows.stop - rows.start, keys.stop - keys.start
        visible = _visible(s, t, max_k, is_causal, window_size_left, window_size_right)
        p = torch.exp(_scores(q[:, rows], k[:, keys], scale, visible) - lse[:, :, rows, None])
        wide_k, wide_v = (x[:, keys].repeat_interleave(groups, 2) for x in (k, v))
        delta = (do[:, rows] * o[:, rows]).sum(-1).transpose(1, 2)[..., None]
        ds = p * (torch.einsum("bshd,bthd->bhst", do[:, rows], wide_v) - delta) * scale
        dq[:, rows] = torch.einsum("bhst,bthd->bshd", ds, wide_k)
        dk[:, keys] = torch.einsum("bhst,bshd->bthd", ds, q[:, rows]).unflatten(2, (-1, groups)).sum(3)
        dv[:, keys] = torch.einsum("bhst,bshd->bthd", p, do[:, rows]).unflatten(2, (-1, groups)).sum(3)
    return tuple((x[0] if packed else x).to(query.dtype) for x in (dq, dk, dv))
