"""Note [Score] and Note [Dropout] of interface.py inside kernels.

Operands broadcast to the tile, so the same code serves tiles of queries x keys and of keys x queries.
"""

# pyright: reportGeneralTypeIssues=false
from collections import namedtuple

import triton
import triton.language as tl

from ringattn.kernels import constants

Score = namedtuple("Score", "scale cap slope key_bias bias bias_stride dropout_key drop_threshold drop_factor")

LOG2E = tl.constexpr(constants.LOG2E)
LN2 = tl.constexpr(constants.LN2)


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    """Hyperbolic tangent; PRECISE adds a short series near zero, where 1 - 2 / (1 + e^2x) cancels."""
    t = 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))
    if PRECISE:
        x2 = x * x
        series = x * (1.0 - x2 * (0.33333333 - x2 * (0.13333333 - x2 * 0.05396825)))
        t = tl.where(x2 < 0.02, series, t)
    return t


@triton.jit
def score(qk, q_pos, k_pos, slope, key_bias, bias, scale, cap, SOFTCAP: tl.constexpr, PRECISE: tl.constexpr):
    """(score in log2 units, its tanh) of a tile of q . k; the tanh means something only under SOFTCAP."""
    t = qk
    s = qk * scale
    if SOFTCAP:
        t = tanh(s, PRECISE)
        s = t * cap
    if slope is not None:
        s -= (slope * LOG2E) * tl.abs(q_pos - k_pos).to(tl.float32)
    if key_bias is not None:
        s += key_bias * LOG2E
    if bias is not None:
        s += bias.to(tl.float32) * LOG2E
    return s, t


@triton.jit
def score_of_keys(qk, k_pos, y, inside, own, score_, SOFTCAP: tl.constexpr, PRECISE: tl.constexpr):
    """`score` of a tile of queries x keys; y: rows of the keys, `inside`: which of them exist."""
    key_bias = None
    bias = None
    if score_.key_bias is not None:
        key_bias = tl.load(score_.key_bias + y, mask=inside, other=0.0)[None, :]
    if score_.bias is not None:
        columns = (k_pos.to(tl.int64) * score_.bias_stride)[None, :]
        bias = tl.load(score_.bias + columns, mask=own.exists[:, None] & inside[None, :], other=0.0)
    return score(
        qk, own.positions[:, None], k_pos[None, :], score_.slope, key_bias, bias, score_.scale, score_.cap, SOFTCAP, PRECISE
    )  # fmt: skip


@triton.jit
def philox(c0, c1, key):
    """First word of Philox-2x32-10 on 32-bit unsigned counters (c0, c1)."""
    multiplier = tl.full([], 0xD256D193, tl.uint32)
    weyl = tl.full([], 0x9E3779B9, tl.uint32)
    for _ in tl.static_range(10):
        high = tl.umulhi(c0, tl.zeros_like(c0) + multiplier)
        low = c0 * multiplier
        c0 = high ^ key ^ c1
        c1 = low
        key = key + weyl
    return c0


@triton.jit
def dropout_key(head, seed_low, seed_high):
    """Key of one (batch, head) from the 64-bit seed; `head` is b * H + h."""
    return philox(head.to(tl.uint32), seed_high.to(tl.uint32), seed_low.to(tl.uint32))


@triton.jit
def kept(key, q_pos, k_pos, threshold):
    """Mask of the pairs of global positions that survive dropout."""
    return philox(q_pos.to(tl.uint32), k_pos.to(tl.uint32), key) >= threshold.to(tl.uint32)
