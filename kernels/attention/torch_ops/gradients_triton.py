"""Sum of the gradients that an operator returns into a buffer of another dtype, in one Triton launch.

torch's own `+=` and `copy_` fall short of the speed of memory where they convert between dtypes.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
# (powers of two may be constants of kernels)

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.attention.arguments import padded, strides
from ringattn.kernels.runtime import bound_launch

NUMBERS = 4096
"""Numbers that a program holds."""


@triton.jit
def _add_rows_kernel(
    found_ptr, target_ptr, found_sb, found_ss, found_sh, target_sb, target_ss, target_sh, s, h, rows, d,
    ROWS: tl.constexpr, D: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Add ROWS rows of (b, s, h), in this order, to those of target, or write them."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = r < rows
    # divided in 32 bits, which hold the number of rows, and multiplied by strides in 64
    b, x, head = (r // (s * h)).to(tl.int64), (r // h % s).to(tl.int64), r % h
    c = tl.arange(0, D)
    inside = ok[:, None] & (c < d)[None, :]
    at = (b * target_sb + x * target_ss + head * target_sh)[:, None] + c[None, :]
    found_at = (b * found_sb + x * found_ss + head * found_sh)[:, None] + c[None, :]
    total = tl.load(found_ptr + found_at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(target_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(target_ptr + at, total.to(target_ptr.dtype.element_ty), mask=inside)


def add_rows(found: Tensor, target: Tensor, *, accumulate: bool) -> None:
    """Add found `b s h d` to target of the same shape, or write it; both with a contiguous last dim."""
    b, s, h, d = found.shape
    width = padded(d)
    held = max(1, NUMBERS // width)
    if found.numel():
        bound_launch.launch(
            _add_rows_kernel,
            (-(-b * s * h // held),),
            (found, target, *strides(found), *strides(target), s, h, b * s * h, d),
            {"ROWS": held, "D": width, "ADD": accumulate},
            num_warps=4,
        )
