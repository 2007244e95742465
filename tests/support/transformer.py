"""A small decoder-only transformer as training code writes it, for tests of what surrounds the ring.

Owns the model and its one-process gradients, by `attention_reference`. Refuses to know meshes and compilers.

Shapes: tokens `b s`; x `b s e`; q `b s h d`, k and v `b s hk d`, where h and hk are what this rank has of the heads.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ringattn import Sharding, attention_reference, ring_attention

VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 23, 32, 4, 2, 8
IGNORED = -100


def keep_the_ring(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Selective checkpointing: what the ring gave is kept, everything else is computed again."""
    keep = op is torch.ops.ringattn.forward.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "full": {"use_reentrant": False},
    "selective": {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, keep_the_ring)},
}


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """x `b s h d`, rotated by its global positions `s`."""
    half = x.shape[-1] // 2
    frequencies = 100.0 ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
    angles = positions.to(x.dtype)[:, None, None] * frequencies
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)


class Attention(nn.Module):
    """Projections, RoPE and ring attention; `attention_reference` where there is no sharding."""

    def __init__(self, sinks: bool = False) -> None:
        super().__init__()
        self.wq = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.wk = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.wv = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.wo = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.sinks = nn.Parameter(torch.randn(HEADS)) if sinks else None

    def forward(self, x: Tensor, positions: Tensor, sharding: Sharding | None, options: dict[str, Any]) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (w(x).view(b, s, -1, HEAD_DIM) for w in (self.wq, self.wk, self.wv))
        q, k = rope(q, positions), rope(k, positions)
        if self.sinks is not None:
            options = {**options, "sinks": self.sinks}
        o = (
            attention_reference(q, k, v, **options)
            if sharding is None
            else ring_attention(q, k, v, sharding, **options)
        )
        return self.wo(o.reshape(b, s, -1))


class Block(nn.Module):
    """Norm, attention, norm, MLP."""

    def __init__(self, sinks: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention(sinks)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor, sharding: Sharding | None, options: dict[str, Any]) -> Tensor:
        x = x + self.attention(self.norm1(x), positions, sharding, options)
        return x + self.down(silu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Embedding, two blocks, norm, logits.

    Args:
        recompute: A key of CHECKPOINTS, or None.
        sinks: Whether each head has one.
    """

    def __init__(self, recompute: str | None = None, sinks: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(sinks) for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.recompute = recompute

    def forward(self, tokens: Tensor, positions: Tensor, sharding: Sharding | None) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.recompute is None:
                x = block(x, positions, sharding, {"causal": True})
            else:
                x = checkpoint(block, x, positions, sharding, {"causal": True}, **CHECKPOINTS[self.recompute])
                assert isinstance(x, Tensor)
        return self.head(self.norm(x))


def make_transformer(dtype: torch.dtype = torch.float64, **options: Any) -> Transformer:
    """The same weights wherever it is called."""
    torch.manual_seed(7)
    return Transformer(**options).to(dtype)


def make_batch(seed: int, batch: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels `b n`; some labels are IGNORED, more of them in later rows."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (batch, seq_len), generator=g)
    labels = torch.randint(VOCABULARY, (batch, seq_len), generator=g)
    dropped = torch.rand(batch, seq_len, generator=g) < torch.linspace(0.1, 0.7, batch)[:, None]
    return tokens, labels.masked_fill(dropped, IGNORED)


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum over the labels that count."""
    return cross_entropy(logits.flatten(0, 1).double(), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def one_process(batches: list[tuple[Tensor, Tensor]], **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean loss over all tokens of all batches, and the gradient of every parameter."""
    model = make_transformer(**options)
    count = sum(int((labels != IGNORED).sum()) for _, labels in batches)
    total = torch.zeros((), dtype=torch.float64)
    for tokens, labels in batches:
        loss = loss_sum(model(tokens, torch.arange(tokens.shape[1]), None), labels) / count
        loss.backward()
        total += loss.detach()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class Operators(TorchDispatchMode):
    """Counts calls of the ring's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = self.backwards = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.forwards += func is torch.ops.ringattn.forward.default
        self.backwards += func is torch.ops.ringattn.backward.default
        return func(*args, **(kwargs or {}))
