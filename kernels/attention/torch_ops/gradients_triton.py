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

NUMBERS = 2048
"""Numbers that a program holds."""


@triton.jit
def _add_rows_kernel(
    found_ptr, target_ptr, found_sb, found_ss, found_sh, target_sb, target_ss, target_sh, h, rows, d,
    ROWS: tl.constexpr, D: tl.constexpr, ADD: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Add ROWS rows of (s, h), in this order, of a batch element to those of target, or write them.

    EVEN: rows of (s, h) lie at equal distances in both, found_sh and target_sh, so no division tells where they are.
    """
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b = tl.program_id(1).to(tl.int64)
    # numbers of one store, for loads too: wider loads of a narrower dtype pass through shared memory on their way to it
    c = tl.max_contiguous(tl.arange(0, D), 128 // target_ptr.dtype.element_ty.primitive_bitwidth)
    inside = (r < rows)[:, None] & (c < d)[None, :]
    if EVEN:
        found_at, at = r.to(tl.int64) * found_sh, r.to(tl.int64) * target_sh
    else:
        x, head = (r // h).to(tl.int64), r % h
        found_at, at = x * found_ss + head * found_sh, x * target_ss + head * target_sh
    found_at, at = found_at[:, None] + c[None, :], at[:, None] + c[None, :]
    total = tl.load(found_ptr + b * found_sb + found_at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(target_ptr + b * target_sb + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(target_ptr + b * target_sb + at, total.to(target_ptr.dtype.element_ty), mask=inside)


def add_rows(found: Tensor, target: Tensor, *, accumulate: bool) -> None:
    """Add found `b s h d` to target of the same shape, or write it; both with a contiguous last dim."""
    b, s, h, d = found.shape
    width = padded(d)
    held = max(1, NUMBERS // width)
    even = all(s == 1 or x.stride(1) == h * x.stride(2) for x in (found, target))
    if found.numel():
        bound_launch.launch(
            _add_rows_kernel,
            (-(-s * h // held), b),
            (found, target, *strides(found), *strides(target), h, s * h, d),
            {"ROWS": held, "D": width, "ADD": accumulate, "EVEN": even},
            num_warps=4,
        )
