"""The output that gives an operator its delta, in plain torch; `rows_triton` makes it on GPUs.

Note [Output for delta]
    Backward operators take o where `KernelSet.backward` has delta, and compute delta = rowsum(o * do) from it. Any o with this
    property gives the same gradients. So o = do * delta / |do|^2 serves, which includes the gradient of lse. Rounding it to the
    dtype of do changes delta by no more than rounding the true output does, since all terms of the sum have one sign.
    Where |do| is so small that this o has no room in the dtype (do is zero, and lse has a gradient), do is replaced by a
    constant c, a power of two with |delta| <= MOST * |c row|, and o by delta / (c d), whose first column makes up for the
    rounding of the others. That changes dp by c times the sum of v, and dv by p c: 2^-60 of delta.
    float16 has no such c: dp would be off by 2^-15 of delta for each unit of v, and by more where c is the smallest number. There
    such a row has o = 0 instead, and `rest_for` gives its delta to a call of its own, in which v is zero. dp is then zero as well,
    whatever do is, and dq and dk of the two calls are added.
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
    """Return (o, do), `b s h dv` in the dtype of do, with rowsum(o * do) = delta `b h s` (Note [Output for delta]).

    In float16 do stays as it is, and o of some rows is 0: see `rest_for`.
    """
    fast = import_optional("ringattn.kernels.attention.torch_ops.rows_triton") if do.is_cuda else None
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
    if do.dtype == torch.float16:
        return o.masked_fill(lost, 0.0), do
    o[..., :1] = torch.where(lost, wanted / c - (d - 1) * others.to(wanted.dtype), o[..., :1].to(wanted.dtype))
    return o, torch.where(lost, c.to(do.dtype), do)


def rest_for(o: Tensor, do: Tensor, delta: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return (o, do) of the call that adds what `output_for` left out, in which v is zero; None: nothing is left.

    Waits for the device, unless a graph is captured there.
    """
    if do.dtype != torch.float16:
        return None
    wanted = delta.transpose(1, 2)[..., None]
    # beside a larger do, o is 0 where delta is too small to matter
    done = (o != 0).any(-1, keepdim=True) | (wanted.abs() <= do.abs().amax(-1, keepdim=True))
    rest = wanted.masked_fill(done, 0.0)
    capturing = do.is_cuda and torch.cuda.is_current_stream_capturing()
    if not (capturing or bool(rest.any())):
        return None
    # o in [1, 2), its rounding in the second column
    c = rest.abs().log2().floor().exp2().clamp(2.0**-24, 2.0**15)
    rest_o = torch.zeros_like(do, memory_format=torch.contiguous_format)
    rest_o[..., :1] = rest / c
    rest_o[..., 1:2] = rest / c - rest_o[..., :1]
    return rest_o, c.to(do.dtype).expand(do.shape).contiguous()
