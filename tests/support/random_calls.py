"""Random attention calls on whole sequences, which simulated and real rings are then given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ringattn import attention_reference, ring_attention_with_lse, simulate_ring


@dataclass(frozen=True)
class Attention:
    """One call on whole tensors: `tensors` and `options` as attention_reference takes them."""

    seq_len: int = 33
    kv_len: int | None = None
    batch: int = 1
    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 16
    v_head_dim: int = 16
    dtype: torch.dtype = torch.float32
    features: tuple[str, ...] = ()
    mask: dict[str, Any] = field(default_factory=dict)
    documents: tuple[int, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def tensors(self) -> dict[str, Tensor]:
        """q, k, v and the tensors of the features, in this dtype (small ones in fp32 or fp64)."""
        g = torch.Generator().manual_seed(self.seed)

        def rand(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

        b, n, m, h = self.batch, self.seq_len, self.kv_len or self.seq_len, self.num_heads
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        found = {
            "q": rand(b, n, h, self.head_dim),
            "k": rand(b, m, self.num_kv_heads, self.head_dim),
            "v": rand(b, m, self.num_kv_heads, self.v_head_dim),
        }
        makers = {
            "sinks": lambda: rand(h, dtype=wide),
            "alibi_slopes": lambda: rand(h, dtype=wide).abs() * 0.2,
            "key_bias": lambda: rand(b, m, dtype=wide),
            "bias": lambda: rand(1, h, n, m, dtype=wide),
        }
        return found | {name: makers[name]() for name in self.features}

    def cotangents(self) -> tuple[Tensor, Tensor]:
        """Random do `b n h dv` and dlse `b h n`."""
        g = torch.Generator().manual_seed(self.seed + 1)
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        do = torch.randn(self.batch, self.seq_len, self.num_heads, self.v_head_dim, generator=g, dtype=torch.float64)
        dlse = torch.randn(self.batch, self.num_heads, self.seq_len, generator=g, dtype=torch.float64)
        return do.to(self.dtype), dlse.to(wide)

    def on_ring(self, tensors: dict[str, Tensor], sharding: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return ring_attention_with_lse(sharding=sharding, **tensors, **options)

    def on_simulated_ring(self, tensors: dict[str, Tensor], **options: Any) -> Any:
        return simulate_ring(**tensors, **options)

    def reference(self, tensors: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
        return attention_reference(**tensors, return_lse=True, **options)
