"""Decoder-only transformer with ring attention: RoPE, grouped queries, RMSNorm, SwiGLU.

Shape legend: `b` batch, `s` tokens of this rank's shard, `h` query heads, `hk` key/value heads, `d` head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

import ringattn
from ringattn.sizing.shapes import ModelShape
from ringattn.training import cross_entropy_sum

ROPE_THETA = 500_000.0  # base of the frequencies of rotary embedding


def rope_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, `s d/2` fp32 each.

    Frequency i is `theta ** (-2 i / d)` (Su et al., "RoFormer", equation 15). Angles are made in fp64: at position
    1,000,000 an fp32 angle is wrong by hundredths of a radian.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = positions.to(torch.float64)[:, None] * theta**-exponents
    return angles.cos().float(), angles.sin().float()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (x[i], x[i + d/2]) of `b s h d` by the angle of their position; keeps the dtype."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]  # s 1 d/2
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention over the whole sequence, from the rows of one shard."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.attend: Callable[..., Tensor] = ringattn.ring_attention
        self.q = nn.Linear(shape.dim, shape.heads * shape.head_dim, bias=False)
        self.k = nn.Linear(shape.dim, shape.kv_heads * shape.head_dim, bias=False)
        self.v = nn.Linear(shape.dim, shape.kv_heads * shape.head_dim, bias=False)
        self.out = nn.Linear(shape.heads * shape.head_dim, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sharding: Any) -> Tensor:
        """Rows `b s dim` to rows `b s dim`."""
        heads, kv_heads, d = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        q = apply_rope(rearrange(self.q(x), "b s (h d) -> b s h d", h=heads, d=d), cos, sin)
        k = apply_rope(rearrange(self.k(x), "b s (hk d) -> b s hk d", hk=kv_heads, d=d), cos, sin)
        v = rearrange(self.v(x), "b s (hk d) -> b s hk d", hk=kv_heads, d=d)
        o = self.attend(q, k, v, sharding, causal=True, window=self.shape.window)
        return self.out(rearrange(o, "b s h d -> b s (h d)"))


class Mlp(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer, "GLU Variants Improve Transformer", equation 6)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.mlp_dim, bias=False)
        self.up = nn.Linear(shape.dim, shape.mlp_dim, bias=False)
        self.down = nn.Linear(shape.mlp_dim, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rows `b s dim` to rows `b s dim`, each by itself."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and SwiGLU, each normalised before and added to the residual stream."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, eps=1e-6)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.dim, eps=1e-6)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sharding: Any) -> Tensor:
        """Rows `b s dim` to rows `b s dim`."""
        x = x + self.attention(self.attention_norm(x), cos, sin, sharding)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """Model from tokens of one shard to the logits of the tokens after them, or to their loss."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim, eps=1e-6)
        self.head = nn.Linear(shape.dim, shape.vocab_size, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight

    @torch.no_grad()
    def initialise_(self, seed: int) -> None:
        """Fill the parameters from a seed: the same at any rank and world size.

        Matrices are normal with variance 1 / fan_in; the two that end a residual branch are smaller by
        sqrt(2 * layers), so that the stream does not grow with depth. Embeddings have standard deviation 0.02.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            std = 0.02 if name in ("embedding.weight", "head.weight") else parameter.shape[1] ** -0.5
            if name.endswith(("attention.out.weight", "mlp.down.weight")):
                std /= math.sqrt(2 * self.shape.layers)
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))

    def forward(self, tokens: Tensor, sharding: Any, targets: Tensor | None = None) -> Tensor:
        """Return the logits `b s vocab_size` of this rank's rows, each predicting the token after its global position.

        With targets, the token after each row or `IGNORED`, return the sum of their losses, natural log, fp32. `sharding`
        gives the positions for RoPE, which begin at 0 in each document.
        """
        positions = sharding.document_positions.to(tokens.device)
        cos, sin = rope_tables(positions, self.shape.head_dim, ROPE_THETA)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin, sharding)
        x = self.norm(x)
        return self.head(x) if targets is None else cross_entropy_sum(x, self.head.weight, targets)
