"""Latent attention over a cache: rows of latents are expanded to keys and values, or queries are absorbed.

Note [Expanded or absorbed]
    A key of one head has dn + dr columns and its value dv, made from a row of r + dr (Note [Latents] of decode/dispatch.py). Of n
    new rows with h heads each key costs
        expanded: 2 h (dn + dr + dv) FLOP per row, for the kernels of training, and once its expansion,
                  E = 2 h ((dn + dr) (r + dr) + dv r), which includes products with the identity
        absorbed: 2 h (2 r + dr) per row, for the decode kernel, which reads pages in place
    With the slowness of the decode kernel (Note [In place or copied] of paged_prefill.py) absorbed is less while
        n (SLOWNESS (2 r + dr) - (dn + dr + dv)) 2 h <= E,   for DeepSeek V3 (512, 64, 128, 128) up to 124 rows of a request.
    Decode is always absorbed. A prefill without cached rows is expanded, by the rank that `latent_attention` chooses. Otherwise it
    is expanded where rows are attended to, a piece at a time: latents travel, or queries do. In bytes on the busiest rank
        keys are sent:     per key (r + dr) e + E / FLOPS_PER_SENT_BYTE, because every receiving rank expands it
        queries are sent:  per row h (d e + (dv + 2) a), expanded; absorbed with d = r + dr and dv = r
    For bf16 and V3's shape these are 1152 + 26,500 and 115,700 on 128 heads: queries are sent below N / T = 0.24.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ringattn.inference.kv_pool import KVPool
from ringattn.schedule.latents import Latents, with_rotary


class UpWeights(NamedTuple):
    """Weights of a layer that expand latents, as given to `latent_attend`.

    Attributes:
        k_up: `hk dn r`.
        v_up: `hk dv r`.
    """

    k_up: Tensor
    v_up: Tensor

    def expansion_flops(self, dr: int) -> int:
        """Return the FLOP of the expansion of a row with dr rotary columns."""
        (hk, dn, r), dv = self.k_up.shape, self.v_up.shape[1]
        return 2 * hk * ((dn + dr) * (r + dr) + dv * r)

    def latents(self, rows: Tensor) -> Latents:
        """Return rows `b t 1 (r + dr)`, contiguous, with what expands them."""
        k_up = with_rotary(self.k_up, rows.shape[3] - self.k_up.shape[2])
        return Latents(rows.squeeze(2), k_up.contiguous(), self.v_up.contiguous())

    def absorb(self, q: Tensor) -> Tensor:
        """Return q `b s h (dn + dr)` as queries of rows of latents, `b s h (r + dr)`."""
        _, dn, r = self.k_up.shape
        made = q.new_empty(*q.shape[:3], r + q.shape[3] - dn)
        made[..., r:] = q[..., dn:]
        _multiply(q[..., :dn], self.k_up, made[..., :r])
        return made

    def project(self, o: Tensor) -> Tensor:
        """Return sums of latents `b s h r` as sums of values, `b s h dv`."""
        made = o.new_empty(*o.shape[:3], self.v_up.shape[1])
        _multiply(o, self.v_up.mT, made)
        return made


def key_heads(cache: KVPool, up: UpWeights | None) -> tuple[int, int, int]:
    """Return hk, d and dv of the keys and values that the kernels of training get."""
    if up is None:
        return cache.kv_heads, cache.head_dim, cache.v_head_dim
    hk, dn, _ = up.k_up.shape
    return hk, dn + cache.head_dim - cache.v_head_dim, up.v_up.shape[1]


def _multiply(x: Tensor, weights: Tensor, out: Tensor) -> None:
    """Multiply heads of x `b s h m` by weights `hk m n`, into out `b s h n`; h / hk heads share one."""
    h, hk = x.shape[2], weights.shape[0]
    weights = weights if h == hk else weights.repeat_interleave(h // hk, 0)
    # with out= autocast changes nothing
    torch.bmm(x.flatten(0, 1).transpose(0, 1), weights, out=out.flatten(0, 1).transpose(0, 1))
