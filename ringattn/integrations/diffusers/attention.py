"""Calls of `scaled_dot_product_attention` inside an attention module, redirected to ring attention.

Legend: b batch, s rows of this rank, n tokens of the whole sequence, h heads, d head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ringattn.api import ring_attention
from ringattn.plan.sharding import Sharding

_ONE_CALL = (
    "an attention module on a ring must call torch's scaled_dot_product_attention once, got {}; call "
    "transformer.set_attention_backend('native'), use neither IP adapters nor enable_parallelism, or disable_ring(transformer)"
)


class RingAttentionMode(TorchFunctionMode):
    """Redirection of torch's scaled_dot_product_attention to ring attention inside a `with` statement.

    Args:
        sharding: Positions held by each rank, of queries and keys.
    """

    def __init__(self, sharding: Sharding) -> None:
        super().__init__()
        self.sharding = sharding
        self.num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, or ring attention in place of scaled_dot_product_attention."""
        del types
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.num_calls += 1
        return self._attend(*args, **(kwargs or {}))

    def check_num_calls(self) -> None:
        """Refuse modules that did not call scaled_dot_product_attention."""
        if self.num_calls != 1:
            with self.sharding.ring.propagate_errors():
                raise RuntimeError(_ONE_CALL.format("no call"))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return ring attention of `b h s d` rows; the signature is that of torch's function."""
        del enable_gqa  # key heads that divide query heads need no flag here
        sharding = self.sharding
        with sharding.ring.propagate_errors():
            if self.num_calls > 1:
                raise RuntimeError(_ONE_CALL.format("a second call"))
            if dropout_p:
                raise NotImplementedError(f"dropout_p must be 0 on a ring, got {dropout_p}; train without it")
            rows = query.shape[2], key.shape[2]
            if rows != (sharding.shard_len, sharding.shard_len):
                raise ValueError(
                    f"queries and keys must have the {sharding.shard_len} rows of this rank, got {rows}; name every argument "
                    "that holds tokens in the DenoiserSpec"
                )
            key_bias = None if attn_mask is None else make_key_bias(attn_mask, query, sharding)
        o = ring_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            sharding,
            causal=is_causal,
            softmax_scale=scale,
            key_bias=key_bias,
        )
        return o.transpose(1, 2)


def make_key_bias(mask: Tensor, query: Tensor, sharding: Sharding) -> Tensor:
    """Return a mask of keys as the number that is added to the scores of each key of this rank, `b s`.

    Args:
        mask: Of all keys or of this rank's, `b 1 1 n` or `b 1 1 s`; b may be 1. Bool: True takes part. Floating point: added.
        query: `b h s d`.
        sharding: Positions held by each rank.

    Raises:
        NotImplementedError: The mask differs between queries or heads.
    """
    sizes = tuple(mask.shape)
    wanted = (1, query.shape[0]), (1,), (1,), (sharding.seq_len, sharding.shard_len)
    if len(sizes) != 4 or any(size not in some for size, some in zip(sizes, wanted, strict=True)):
        raise NotImplementedError(
            f"attn_mask must be a mask of keys, (batch, 1, 1, {sharding.seq_len}), or of this rank's {sharding.shard_len} keys, "
            f"got {sizes}; pass attn_mask[:, :1, :1] of a mask of padded text, or disable_ring(transformer)"
        )
    if sizes[3] != sharding.shard_len:
        mask = sharding.shard(mask, 3)
    if mask.dtype == torch.bool:
        zeros = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
        mask = zeros.masked_fill(mask.logical_not(), float("-inf"))
    return mask[:, 0, 0].expand(query.shape[0], -1)
