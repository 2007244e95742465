"""Floating-point operations of a call, visible pairs only, for torch's counter.

Registered when the first ring is made, not at import: torch's counter imports triton where it is installed.
"""

from __future__ import annotations

from typing import Any

import torch

from ringattn.plan.attention_spec import AttentionSpec
from ringattn.ring_registry import get_ring


def register_flops() -> None:
    """Register the operators with `torch.utils.flop_counter`; a counter made later counts them."""
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    if torch.ops.ringattn.forward in flop_registry:
        return
    register_flop_formula(torch.ops.ringattn.forward)(_forward_flops)
    register_flop_formula(torch.ops.ringattn.backward)(_backward_flops)
    register_flop_formula(torch.ops.ringattn.latent_forward)(_latent_forward_flops)
    register_flop_formula(torch.ops.ringattn.latent_backward)(_latent_backward_flops)


def _forward_flops(q_shape: Any, k_shape: Any, v_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Two products per visible pair and head: 2 * (d + dv). Counts this rank's pairs only."""
    del k_shape, out_shape, kwargs
    ring, text = args[-2:]
    return 2 * _pairs(ring, text, q_shape[0]) * q_shape[2] * (q_shape[3] + v_shape[3])


def _backward_flops(
    do_shape: Any, dlse_shape: Any, q_shape: Any, k_shape: Any, v_shape: Any, *args: Any, **kwargs: Any
) -> int:
    """Five products per visible pair and head: three of width d, two of width dv."""
    del do_shape, dlse_shape, k_shape, kwargs
    ring, text = args[-3:-1]
    return 2 * _pairs(ring, text, q_shape[0]) * q_shape[2] * (3 * q_shape[3] + 2 * v_shape[3])


def _pairs(ring: str, text: str, batch: int) -> int:
    return sum(AttentionSpec.deserialize(text, rank).pairs(batch) for rank in get_ring(ring).hosted)


def _latent_forward_flops(
    q_shape: Any, rows_shape: Any, k_up_shape: Any, v_up_shape: Any, *args: Any, **kwargs: Any
) -> int:
    """The attention, without the products that expand latents: how many there are is the ring's choice."""
    del rows_shape, k_up_shape
    return _forward_flops(q_shape, None, (0, 0, 0, v_up_shape[1]), *args, **kwargs)


def _latent_backward_flops(
    do_shape: Any,
    dlse_shape: Any,
    q_shape: Any,
    rows_shape: Any,
    k_up_shape: Any,
    v_up_shape: Any,
    *args: Any,
    **kwargs: Any,
) -> int:
    """See `_latent_forward_flops`."""
    del rows_shape, k_up_shape
    return _backward_flops(do_shape, dlse_shape, q_shape, None, (0, 0, 0, v_up_shape[1]), *args, **kwargs)
