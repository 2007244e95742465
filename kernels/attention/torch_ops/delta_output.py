"""The output that gives an operator its delta, in plain torch; `delta_output_triton` makes it on GPUs.

Note [Output for delta]
    Backward operators take o where `KernelSet.backward` has delta, and compute delta = rowsum(o * do) from it. Any o with this
    property gives the same gradients. So o = do * delta / |do|^2 serves, which includes the gradient of lse. Rounding it to the
    dtype of do changes delta by no more than rounding the true output does, since all terms of the sum have one sign.
    Where |do| is so small that this o has no room in the dtype (do is zero, and lse has a gradient), do is replaced by a
    constant c, a power of two with |delta| <= MOST * |c row|, and o by delta / (c d), whose first column makes up for the
    rounding of the others. That changes dv by p c: 2^-60 of delta, and 2^-15 in float16.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ringattn.kernels.runtime.optional_triton import import_optional


def limits(dtype: torch.dtype) -> tuple[float, float]:
    """Return the largest |delta| / |do| that has an o in a dtype, and the smallest constant in place of do."""
    info = torch.finfo(dtype)
    return min(info.max / 2, 2.0**60), max(info.smallest_normal * info.eps, 2.0**-120)


def output_for(do: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Return (o, do), `b s h dv` in the dtype of do, with rowsum(o * do) = delta `b h s` (Note [Output for delta])."""
    fast = import_optional(f"{__name__}_triton") if do.is_cuda else None
    if fast is not None:
        return fast.output_for(do, delta)
    d, (most, least) = do.shape[-1], limits(do.dtype)
    wanted = delta.transpose(1, 2)[..., None]
    norm = torch.linalg.vector_norm(do, dim=-1, keepdim=True, dtype=wanted.dtype)
    lost = wanted.abs() > most * norm
    ratio = torch.where(lost | (norm == 0), 0.0, wanted / norm / norm)
    c = (wanted.abs() / (most * math.sqrt(d))).log2().ceil().exp2().clamp(min=least)
    others = (wanted / c / d).to(do.dtype)
    o = torch.where(lost, others, (do * ratio).to(do.dtype))
    o[..., :1] = torch.where(lost, wanted / c - (d - 1) * others.to(wanted.dtype), o[..., :1].to(wanted.dtype))
    return o, torch.where(lost, c.to(do.dtype), do)
