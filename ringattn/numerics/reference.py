"""Reference attention: dense, whole, differentiable by plain autograd. Every test compares with it.

It holds `n x n` tensors, and shares no code with the intervals, the kernels or the ring that it judges, except for the
counter-based dropout mask.

Shape legend: `b` batch, `s` queries, `t` keys, `h` query heads, `hk` key/value heads (`hk` divides `h`), `d` head_dim
of q and k, `dv` head_dim of v.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from ringattn.kernels.attention.dropout import keep_mask
from ringattn.kernels.interface import Score, accumulation_dtype
from ringattn.plan import options as plan_options
from ringattn.plan.expressions import Mask
from ringattn.tensor_checks import check_tensor

if TYPE_CHECKING:
    from typing_extensions import Unpack


def visible_pairs(
    seq_len: int,
    kv_len: int | None = None,
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    documents: Sequence[int] | None = None,
    prefix_len: int = 0,
    chunk_len: int | None = None,
    lengths: Sequence[tuple[int, int]] | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the visible pairs, decided one by one by the definitions: boolean `b s t`, or `1 s t` without lengths.

    Options are those of `attention_reference`.

    Example:
        >>> visible_pairs(4, causal=True, window=(1, None))[0].int().tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    """
    if prefix_len and not causal:
        raise ValueError(f"prefix_len must be 0 without causal, got {prefix_len}; pass causal=True or drop prefix_len")
    kv_len = seq_len if kv_len is None else kv_len
    longest = max(seq_len, kv_len)  # what is wider is no integer of a tensor
    i = torch.arange(seq_len, device=device)[:, None]
    j = torch.arange(kv_len, device=device)[None, :]
    visible = torch.ones(1, seq_len, kv_len, dtype=torch.bool, device=device)
    if causal:
        visible = visible & ((j <= i) | (j < min(prefix_len, longest)))
    if window is not None:
        left, right = (window - 1, 0) if isinstance(window, int) else window
        if left is not None:
            visible = visible & (i - j <= min(left, longest))
        if right is not None:
            visible = visible & (j - i <= min(right, longest))
    if documents is not None:
        if list(documents) != sorted(documents) or (documents[0], documents[-1]) != (0, seq_len):
            raise ValueError(f"documents must be boundaries from 0 to {seq_len}, ascending, got {list(documents)}")
        together = torch.zeros_like(visible)
        for start, stop in itertools.pairwise(documents):
            together = together | ((start <= i) & (i < stop) & (start <= j) & (j < stop))
        visible = visible & together
    if chunk_len is not None:
        chunk_len = min(chunk_len, longest)
        visible = visible & (i // chunk_len == j // chunk_len)
    if lengths is not None:
        inside = [(start <= i) & (i < stop) & (start <= j) & (j < stop) for start, stop in lengths]
        visible = visible & torch.stack(inside)
    return visible


def mask_pairs(
    mask: Mask, seq_len: int, kv_len: int, documents: tuple[int, ...] | None, device: torch.device
) -> Tensor:
    """Return the visible pairs of a mask by its definition, boolean `b s t`, or `1 s t` where batch elements agree."""
    i, j = torch.arange(seq_len, device=device)[:, None], torch.arange(kv_len, device=device)
    elements = range(mask.batch_size or 1)
    return torch.stack([mask.visible(i, j, b=b, documents=documents).expand(seq_len, kv_len) for b in elements])


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    *,
    q_positions: Tensor,
    k_positions: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return o and lse of any rows over any keys under a mask, boolean `b s t` or `1 s t`.

    Matmuls take and give the dtype of the inputs, as one device running plain torch would; scores are then softmaxed in
    fp32 (fp64 for fp64 inputs). Options are those of `attention_reference`; alibi_slopes may be `b h s`, one per row.
    """
    b, _, h, d = q.shape
    hk = k.shape[2]
    stat_dtype = accumulation_dtype(q.dtype)
    if options.get("softmax_scale") is None:
        options["softmax_scale"] = d**-0.5
    score = Score(**options)
    with torch.autocast(q.device.type, enabled=False):
        k = k.repeat_interleave(h // hk, dim=2)
        v = v.repeat_interleave(h // hk, dim=2)
        s = (torch.einsum("bshd,bthd->bhst", q, k) * score.softmax_scale).to(stat_dtype)
        if score.softcap:
            s = score.softcap * torch.tanh(s / score.softcap)
        if score.alibi_slopes is not None:
            distance = (q_positions.long()[:, None] - k_positions.long()[None, :]).abs().to(stat_dtype)
            slopes = score.alibi_slopes.to(stat_dtype)
            s = s - (slopes.view(1, h, 1, 1) if slopes.dim() == 1 else slopes[..., None]) * distance
        if score.key_bias is not None:
            s = s + score.key_bias.to(stat_dtype)[:, None, None, :]
        if score.bias is not None:
            s = s + score.bias.to(stat_dtype)
        s = s.masked_fill(~visible[:, None], -math.inf)

        # the sink is one more column whose value is never read; with it every row has at least one
        sink = s.new_full((h,), -math.inf) if score.sinks is None else score.sinks.to(stat_dtype)
        s = torch.cat([s, sink.view(1, h, 1, 1).expand(b, h, s.shape[2], 1)], dim=3)
        m = s.detach().amax(3, keepdim=True)
        weight = torch.exp(s - m.masked_fill(m == -math.inf, 0.0))
        total = weight.sum(3, keepdim=True)
        empty = total == 0
        total = total.masked_fill(empty, 1.0)
        lse = (m.masked_fill(empty, 0.0) + total.log()).masked_fill(empty, -math.inf).squeeze(3)
        p = (weight / total)[..., :-1]
        if score.dropout_p:
            keep = keep_mask(
                score.dropout_seed,
                torch.arange(b, device=q.device)[:, None, None, None],
                torch.arange(h, device=q.device)[:, None, None],
                q_positions[:, None],
                k_positions,
                h,
                score.dropout_p,
            )
            p = torch.where(keep, p / (1 - score.dropout_p), 0.0)
        return torch.einsum("bhst,bthd->bshd", p.to(v.dtype), v), lse


class _Options(plan_options.MaskOptions, plan_options.ScoreOptions, total=False):
    documents: Sequence[int] | None
    mask: Mask | None
    dropout_seed: int


@overload
def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[_Options]
) -> Tensor: ...
@overload
def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[_Options]
) -> tuple[Tensor, Tensor]: ...
def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: int | Sequence[int | None] | None = None,
    documents: Sequence[int] | None = None,
    prefix_len: int = 0,
    chunk_len: int | None = None,
    lengths: Sequence[Sequence[int]] | Tensor | None = None,
    mask: Mask | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    key_bias: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention by its definition, over a whole sequence on one device.

    Query i and key j sit at global positions i and j; keys may belong to another, longer or shorter sequence. Memory
    grows as `s x t`. Exact for fp64 inputs; for 16-bit inputs it is the ordinary low-precision computation.

    Args:
        q: Queries, `b s h d`, any float dtype.
        k: Keys, `b t hk d`.
        v: Values, `b t hk dv`.
        causal: Keys `j <= i` are visible.
        window: (left, right): `i - left <= j <= i + right`; None on a side means unbounded; an int w is (w - 1, 0).
        documents: Boundaries `[0, ..., s]` of packed documents; i and j lie in the same one.
        prefix_len: With causal, the keys `j < prefix_len` are visible to every row too.
        chunk_len: `i // chunk_len == j // chunk_len`.
        lengths: (start, stop) per batch element: rows and keys outside see nothing and are seen by nobody.
        mask: A mask of `ringattn.masks`, intersected with the others; its sinks belong to `documents`.
        softmax_scale: Factor on q . k; None: `d ** -0.5`.
        softcap: The score becomes `softcap * tanh(score / softcap)`; 0.0 for none.
        sinks: One more logit per head in the denominator only, `h`.
        alibi_slopes: `- slope * |i - j|` is added to the score, `h`.
        key_bias: Added to the scores of a key, `b t`.
        bias: Added to the scores, broadcast to `b h s t`.
        dropout_p: Probability of dropping one attention weight.
        dropout_seed: 64-bit seed of the dropout mask.
        return_lse: Return the log-sum-exp of each row too.

    Returns:
        o `b s h dv` in q's dtype; with return_lse also lse `b h s`, natural log, fp32 (fp64 for fp64 inputs). A row
        that sees nothing (and has no sink) has o = 0, lse = -inf and gradients 0.

    Raises:
        ValueError: prefix_len is given without causal, documents do not divide the sequence, a tensor has other than 4 dims, or
            an option is of another kind.
        TypeError: A tensor is something else, or what counts is no integer.
        NotImplementedError: A tensor has a meaning of its own, such as a masked one.

    Example:
        >>> q = k = torch.zeros(1, 2, 1, 4)
        >>> v = torch.tensor([1.0, 3.0]).view(1, 2, 1, 1)
        >>> attention_reference(q, k, v, causal=True).flatten().tolist()
        [1.0, 2.0]
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} must be 4-dimensional, `batch rows heads head_dim`, got shape {tuple(x.shape)}")
    for name, x in (("sinks", sinks), ("alibi_slopes", alibi_slopes), ("key_bias", key_bias), ("bias", bias)):
        if x is not None:
            check_tensor(name, x)
    s, t = q.shape[1], k.shape[1]
    visible = visible_pairs(
        s,
        t,
        causal=plan_options.resolve_flag("causal", causal),
        window=plan_options.resolve_window(window),
        documents=plan_options.resolve_documents(documents),
        prefix_len=plan_options.resolve_width("prefix_len", prefix_len),
        chunk_len=plan_options.resolve_chunk_len(chunk_len),
        lengths=plan_options.resolve_lengths(lengths),
        device=q.device,
    )
    if mask is not None:
        visible = visible & mask_pairs(mask, s, t, plan_options.resolve_documents(documents), q.device)
    dropout_p = plan_options.resolve_real("dropout_p", dropout_p)
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}; 0.0 drops nothing")
    o, lse = dense_attention(
        q,
        k,
        v,
        visible,
        q_positions=torch.arange(s, device=q.device),
        k_positions=torch.arange(t, device=q.device),
        softmax_scale=softmax_scale,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        key_bias=key_bias,
        bias=bias,
        dropout_p=dropout_p,
        dropout_seed=plan_options.resolve_integer("dropout_seed", dropout_seed),
    )
    return (o, lse) if return_lse else o
