"""Checks that tensors are plain: their numbers mean themselves, and no tangent follows them.

The types of other tensors are imported when one is seen: importing them costs as much as importing torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_causal_bias(x: object) -> bool:
    """Return whether x is torch's `CausalBias`: a tensor of uninitialised memory whose type is a mask."""
    if type(x) is Tensor or not isinstance(x, Tensor):
        return False
    from torch.nn.attention.bias import CausalBias

    return isinstance(x, CausalBias)


def check_tensor(name: str, x: Any) -> None:
    """Raise TypeError, ValueError or NotImplementedError unless x is a plain tensor, of that name in messages.

    Parameters, and subclasses of Tensor that mean their numbers, are plain.
    """
    kind = type(x)
    if kind is not Tensor and kind is not torch.nn.Parameter:
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {kind.__name__}; convert it first")
        _check_subclass(name, x)
    if x.is_nested:
        raise ValueError(f"{name} must be a dense tensor, got a nested one; pad it with to_padded_tensor")
    if x.layout is not torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got layout {x.layout}; pass {name}.to_dense()")
    if x.is_quantized:
        raise ValueError(f"{name} must be a dense tensor, got a quantized one; pass {name}.dequantize()")


def _check_subclass(name: str, x: Tensor) -> None:
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.masked import MaskedTensor

    # of the type: torch.compile does not see this method on an instance
    if hasattr(type(x), "to_local"):
        raise NotImplementedError(
            f"{name} must be a plain tensor, got a DTensor; wrap the call in "
            f"torch.distributed.tensor.experimental.local_map, or pass {name}.to_local()"
        )
    if is_causal_bias(x):
        raise NotImplementedError(
            f"{name} must be a plain tensor, got a CausalBias; scaled_dot_product_attention takes it as attn_mask, and "
            "ring_attention takes causal=True or window= instead"
        )
    if isinstance(x, MaskedTensor):
        raise NotImplementedError(f"{name} must be a plain tensor, got a MaskedTensor; pass {name}.to_tensor(value)")
    if isinstance(x, FakeTensor) and detect_fake_mode() is None:
        raise NotImplementedError(
            f"{name} must have numbers, got a FakeTensor outside of tracing; call inside of its FakeTensorMode"
        )


def has_tangent(*tensors: Tensor | None) -> bool:
    """Return whether forward-mode differentiation follows any of these; an operator would drop their tangents."""
    if forward_ad._current_level < 0:
        return False
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)
