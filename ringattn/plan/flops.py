"""Floating-point operations of a call, visible pairs only, for torch's counter.

Registered when the first ring is made, not at import: torch's counter imports triton where it is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ringattn.plan.attention_spec import AttentionSpec
from ringattn.ring_registry import get_ring


def register_flops() -> None:
    """Register the operators with `torch.utils.flop_counter`; a counter made later counts them."""
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    if torch.ops.ringattn.forward not in flop_registry:
        register_flop_formula([torch.ops.ringattn.forward, torch.ops.ringattn.latent_forward])(_forward_flops)
        register_flop_formula([torch.ops.ringattn.backward, torch.ops.ringattn.latent_backward])(_backward_flops)


def _forward_flops(q_shape: Any, *args: Any, **kwargs: Any) -> int:
    """Two products per visible pair and head: 2 * (d + dv). Counts this rank's pairs only.

    Of latent attention without the products that expand latents: how many there are is the ring's choice.
    """
    del kwargs
    *keys, _sinks, _alibi_slopes, _key_bias, _bias, _seed, ring, text = args
    return 2 * _pairs(ring, text, q_shape) * (q_shape[3] + _columns(keys))


def _backward_flops(do_shape: Any, dlse_shape: Any, q_shape: Any, *args: Any, **kwargs: Any) -> int:
    """Five products per visible pair and head: three of width d, two of width dv. See `_forward_flops`."""
    del do_shape, dlse_shape, kwargs
    *keys, _o, _lse, _sinks, _alibi_slopes, _key_bias, _bias, _seed, ring, text, _wanted = args
    return 2 * _pairs(ring, text, q_shape) * (3 * q_shape[3] + 2 * _columns(keys))


def _columns(keys: Sequence[Any]) -> int:
    """Return dv of the shapes of k and v, or of latent rows, k_up and v_up."""
    return keys[1][3] if len(keys) == 2 else keys[2][1]


def _pairs(ring: str, text: str, q_shape: Any) -> int:
    """Return the visible pairs of this process, over batch elements and heads."""
    ranks = get_ring(ring).hosted
    return q_shape[2] * sum(AttentionSpec.deserialize(text, rank).pairs(q_shape[0]) for rank in ranks)
