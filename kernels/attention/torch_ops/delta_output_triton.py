"""The output that gives an operator its delta, in one Triton launch; `delta_output` has the formula."""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
# (powers of two may be constants of kernels)

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.attention.arguments import padded, strides
from ringattn.kernels.attention.torch_ops.delta_output import limits
from ringattn.kernels.runtime import bound_launch

NUMBERS = 2048
"""Numbers of do that a program holds."""


@triton.jit
def _output_for_kernel(
    do_ptr, delta_ptr, o_ptr, used_ptr, do_sb, do_ss, do_sh, s, h, rows, d, most, least, root,
    ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Make ROWS rows of (b, s, h), in this order; o and the do to use (None: the given) are contiguous, and so is delta `b h s`."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = r < rows
    # divided in 32 bits, which hold the number of rows, and multiplied by strides in 64
    b, x, head = (r // (s * h)).to(tl.int64), (r // h % s).to(tl.int64), r % h
    c = tl.arange(0, D)
    inside = ok[:, None] & (c < d)[None, :]
    given = tl.load(do_ptr + (b * do_sb + x * do_ss + head * do_sh)[:, None] + c[None, :], mask=inside, other=0.0)
    do = given.to(tl.float32)
    wanted = tl.load(delta_ptr + (b * h + head) * s + x, mask=ok, other=0.0)
    # taken relative to the largest element: a square may have no room in fp32
    top = tl.max(tl.abs(do), 1)
    safe = tl.where(top > 0, top, 1.0)
    near = do / safe[:, None]
    norm = safe * tl.sqrt(tl.sum(near * near, 1))
    lost = tl.abs(wanted) > most * norm
    ratio = tl.where(lost | (norm == 0), 0.0, wanted / norm / norm)
    o = do * ratio[:, None]
    at = (r.to(tl.int64) * d)[:, None] + c[None, :]
    if used_ptr is not None:
        constant = tl.maximum(tl.exp2(tl.ceil(tl.log2(tl.abs(wanted) / (most * root)))), least)
        others = (wanted / constant / d).to(o_ptr.dtype.element_ty)
        first = wanted / constant - (d - 1) * others.to(tl.float32)
        o = tl.where(lost[:, None], tl.where((c == 0)[None, :], first[:, None], others.to(tl.float32)[:, None]), o)
        used = tl.where(lost[:, None], constant[:, None], do)
        tl.store(used_ptr + at, used.to(o_ptr.dtype.element_ty), mask=inside)
    tl.store(o_ptr + at, o.to(o_ptr.dtype.element_ty), mask=inside)


def output_for(do: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """`kernels.attention.torch_ops.delta_output.output_for` for fp32 delta."""
    b, s, h, d = do.shape
    o = torch.empty(do.shape, dtype=do.dtype, device=do.device)
    used = None if do.dtype == torch.float16 else torch.empty_like(o)
    width, (most, least) = padded(d), limits(do.dtype)
    held = max(1, NUMBERS // width)
    if do.numel():
        bound_launch.launch(
            _output_for_kernel,
            (-(-b * s * h // held),),
            (do, delta.contiguous(), o, used, *strides(do), s, h, b * s * h, d, most, least, math.sqrt(d)),
            {"ROWS": held, "D": width},
            num_warps=4,
        )
    return o, do if used is None else used
