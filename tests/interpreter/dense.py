"""The contract read literally, on whole matrices in fp64: the oracle of the interpreter tests."""

import math

import torch
from torch import Tensor

from ringattn.kernels.contract import Score, Side

Runs = tuple[tuple[int, int, int, int], ...]


def positions_of(runs: Runs) -> Tensor:
    """Global positions of the rows of a buffer."""
    parts = [start + stride * torch.arange(length) for _, length, start, stride in runs]
    return torch.cat([torch.zeros(0, dtype=torch.long), *parts])


def bounds(visible: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The first visible position and one past the last, of each row of `b rows n`; rows that see nothing keep the order."""
    n = visible.shape[-1]
    if n == 0:
        nothing = torch.zeros(len(visible), len(positions), dtype=torch.int32)
        return nothing, nothing
    at = torch.arange(n)
    lo = torch.where(visible, at, n).amin(-1)
    hi = torch.where(visible, at + 1, 0).amax(-1)
    empty = lo >= hi
    # a row that sees nothing gets the last bound before it, so that bounds do not decrease
    lo = torch.where(empty, 0, lo).cummax(-1).values
    hi = torch.where(empty, lo, hi).cummax(-1).values
    lo = torch.where(empty, hi, lo).cummax(-1).values
    return lo[:, positions].int(), hi[:, positions].int()


def side(runs: Runs, lo: Tensor, hi: Tensor, positions: Tensor) -> Side:
    table = torch.tensor(runs, dtype=torch.int32).reshape(-1, 4)
    return Side(table, positions.int(), lo, hi, runs)


def keep_mask(seed: int, dropout_p: float, b: int, h: int, num_heads: int, i: Tensor, j: Tensor) -> Tensor:
    """Note [Dropout] in Python integers held in int64 tensors."""

    def philox(c0: Tensor, c1: Tensor, key: Tensor) -> Tensor:
        for _ in range(10):
            low16, high16 = 0xD256D193 & 0xFFFF, 0xD256D193 >> 16
            a, c = c0 & 0xFFFF, c0 >> 16  # schoolbook halves: the product has 64 bits, int64 has 63
            carry = (a * low16 >> 16) + (a * high16 & 0xFFFF) + (c * low16 & 0xFFFF)
            high = (c * high16) + (a * high16 >> 16) + (c * low16 >> 16) + (carry >> 16)
            low = (carry & 0xFFFF) << 16 | (a * low16 & 0xFFFF)
            c0, c1 = high ^ key ^ c1, low
            key = (key + 0x9E3779B9) & 0xFFFFFFFF
        return c0

    word = torch.tensor
    key = philox(word(b * num_heads + h), word(seed >> 32 & 0xFFFFFFFF), word(seed & 0xFFFFFFFF))
    return philox(i[:, None], j[None, :], key) >= math.floor(dropout_p * 2**32)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_pos: Tensor,
    k_pos: Tensor,
    lo: Tensor,
    hi: Tensor,
    score: Score,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """o `b s h dv` and lse `b h s`; differentiable in q, k, v and in the tensors of the score."""
    batch, s, h, _ = q.shape
    group = h // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bshd,bthd->bhst", q, k) * score.softmax_scale
    if score.softcap > 0:
        scores = score.softcap * torch.tanh(scores / score.softcap)
    if score.alibi_slopes is not None:
        scores = scores - score.alibi_slopes[:, None, None] * (q_pos[:, None] - k_pos[None, :]).abs()
    if score.key_bias is not None:
        scores = scores + score.key_bias[:, None, None, :]
    if score.bias is not None:
        scores = scores + score.bias[..., k_pos]
    visible = (k_pos >= lo[:, :, None]) & (k_pos < hi[:, :, None])  # b s t
    scores = torch.where(visible[:, None], scores, float("-inf"))
    logits = scores
    if sinks is not None:
        logits = torch.cat([scores, sinks[None, :, None, None].expand(batch, h, s, 1)], -1)
    top = logits.detach().amax(-1) if logits.shape[-1] else torch.full((batch, h, s), float("-inf"), dtype=q.dtype)
    total = torch.exp(logits - torch.where(top == float("-inf"), 0.0, top)[..., None]).sum(-1)
    alive = total > 0
    lse = torch.where(alive, torch.log(torch.where(alive, total, 1.0)) + torch.where(alive, top, 0.0), float("-inf"))
    p = torch.where(visible[:, None], torch.exp(scores - torch.where(alive, lse, 0.0)[..., None]), 0.0)
    if score.dropout_p > 0:
        keep = torch.stack(
            [
                torch.stack([keep_mask(score.dropout_seed, score.dropout_p, b, n, h, q_pos, k_pos) for n in range(h)])
                for b in range(batch)
            ]
        )
        p = p * keep / (1 - score.dropout_p)
    return torch.einsum("bhst,bthd->bshd", p, v), lse
