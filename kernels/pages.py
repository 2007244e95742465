"""Rows of keys and values on their way into pages and out of them, in plain torch; `pages_triton` has the same for GPUs.

Owns the layout of a page, the fp8 format of its rows, and the choice between the two implementations. Refuses to know who keeps
which rows, and how attention reads pages.

Shape legend: `b` batch, `s` rows of each; `hk` key/value heads; `d` head_dim of k, `dv` of v; `pages` of the pool.

Note [Slots]
    A pool is k `pages hk page_size d` and v `pages hk page_size dv`. Slot i is row i % page_size of page i // page_size, for all
    heads. Rows go to slots and come from slots; a row with slot -1 goes nowhere.

Note [fp8 rows]
    A pool in float8_e4m3fn has a scale for every row of every head of k, and of v: `pages hk page_size` fp32. With a = max |x|
    over the row, scale = max(a / 448, 2^-100) and the row is x / scale in fp32, rounded to nearest even: 448 is the largest
    finite e4m3, so nothing overflows, and a row of zeros stays one. What is read is e4m3 * scale, in fp32, rounded to the
    dtype that is asked for. e4m3 has three bits of mantissa: a number of at least 2^-6 * scale is off by at most 2^-4 of
    itself, a smaller one by at most 2^-10 * scale. A row with a NaN or an infinity is NaN wherever it is read.

Note [Values that are not finite]
    Requests share tiles of kernels. A tile hides a score by selecting -inf, so NaN in q or k of one request cannot reach another.
    But it multiplies hidden values by weights of 0, and 0 * NaN is NaN. So a row of v with a NaN or an infinity is kept as zeros,
    and the row of k beside it as NaN: tokens that see it become NaN, all others are what they are beside a healthy request.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ringattn.kernels.twin import find_twin

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest finite number of e4m3."""
SMALLEST_SCALE = 2.0**-100
"""What the scale of a row is at least, so that it can be divided by."""


def put(
    pool_k: Tensor,
    pool_v: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    contained: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Writes rows to their slots, those of values that are not finite as Note [Values that are not finite] says.

    On a GPU it is one launch, which depends on shapes alone: captured in a CUDA graph it serves whatever slots hold later.

    Args:
        pool_k: `pages hk page_size d`, k's dtype, or float8_e4m3fn with k_scale; contiguous; written.
        pool_v: `pages hk page_size dv`, likewise.
        k: `b s hk d`, any strides with a contiguous last dim.
        v: `b s hk dv`, likewise.
        slots: `b s` int64, contiguous; -1: the row goes nowhere. No slot twice.
        k_scale: `pages hk page_size` fp32, contiguous; written. With fp8 only (Note [fp8 rows]).
        v_scale: Scales of v, as k_scale.
        contained: Contiguous tensors like k and v, which get all rows as well, as pages have them but for rounding to fp8.
    """
    if not slots.numel():
        return
    fast = find_twin("ringattn.kernels.pages_triton") if pool_k.is_cuda else None
    if fast is not None:
        fast.put(pool_k, pool_v, k, v, slots, k_scale, v_scale, contained)
        return
    put_eager(pool_k, pool_v, k, v, slots, k_scale, v_scale, contained)


def take(
    pool_k: Tensor,
    pool_v: Tensor,
    slots: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Reads rows from slots.

    Args:
        pool_k: As `put` left it.
        pool_v: Likewise.
        slots: `b s` int64, contiguous, none of them -1.
        k: `b s hk d`, any strides with a contiguous last dim; written.
        v: `b s hk dv`, likewise.
        k_scale: With fp8.
        v_scale: With fp8.
    """
    if not slots.numel():
        return
    fast = find_twin("ringattn.kernels.pages_triton") if pool_k.is_cuda else None
    if fast is not None:
        fast.take(pool_k, pool_v, slots, k, v, k_scale, v_scale)
        return
    take_eager(pool_k, pool_v, slots, k, v, k_scale, v_scale)


def put_eager(
    pool_k: Tensor,
    pool_v: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    contained: tuple[Tensor, Tensor] | None = None,
) -> None:
    """`put` in plain torch."""
    k, v = contain(k, v)
    if contained is not None:
        contained[0].copy_(k)
        contained[1].copy_(v)
    here = slots >= 0
    page, row = _places(pool_k, slots[here])
    for pool, x, scale in ((pool_k, k, k_scale), (pool_v, v, v_scale)):
        rows = x[here]
        if scale is not None:
            rows, scale[page, :, row] = quantise(rows)
        # indexing knows bytes better than fp8
        _bits(pool)[page, :, row] = _bits(rows)


def take_eager(
    pool_k: Tensor,
    pool_v: Tensor,
    slots: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """`take` in plain torch."""
    page, row = _places(pool_k, slots)
    for pool, x, scale in ((pool_k, k, k_scale), (pool_v, v, v_scale)):
        rows = _bits(pool)[page, :, row].view(pool.dtype)
        x.copy_(rows if scale is None else dequantise(rows, scale[page, :, row], x.dtype))


def contain(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of keys and values as Note [Values that are not finite] says.

    Args:
        k: `... d`.
        v: `... dv`.

    Example:
        >>> k, v = contain(torch.ones(3, 1), torch.tensor([[1.0], [math.inf], [math.nan]]))
        >>> k.tolist(), v.tolist()
        ([[1.0], [nan], [nan]], [[1.0], [0.0], [0.0]])
    """
    bad = ~v.isfinite().all(-1, keepdim=True)
    return k.masked_fill(bad, math.nan), v.masked_fill(bad, 0)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in fp8 (Note [fp8 rows]).

    Args:
        x: `... d`.

    Returns:
        `... d` float8_e4m3fn, and the scales `...` fp32.

    Example:
        >>> rows, scale = quantise(torch.tensor([[448.0, -7.0, 1.1, 0.0]]))
        >>> dequantise(rows, scale, torch.float32).tolist()
        [[448.0, -7.0, 1.125, 0.0]]
    """
    x = x.float()
    scale = (x.abs().amax(-1) / LARGEST).clamp(min=SMALLEST_SCALE)
    return (x / scale.unsqueeze(-1)).to(FP8), scale


def dequantise(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows in a wider dtype (Note [fp8 rows]).

    Args:
        x: `... d` float8_e4m3fn.
        scale: `...` fp32.
        dtype: Of the result.
    """
    return (x.float() * scale.unsqueeze(-1)).to(dtype)


def _places(pool: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    size = pool.shape[2]
    return slots // size, slots % size


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype == FP8 else x
