"""Rows of keys and values into pages and out of them, in plain torch; `pages_triton` does it on GPUs.

Shape legend: `b` batch, `s` rows of each; `hk` key/value heads; `d` head_dim of k, `dv` of v; `pages` of the pool.
A pool is k `pages hk page_size d` and v `pages hk page_size dv`. Slot i is row i % page_size of page i // page_size, for all
heads. A row with slot -1 is not stored. A pool of latents has a view for v, k[..., :r] (Note [Latents] of
kernels/decode/dispatch.py).

Note [fp8 rows]
    A pool in float8_e4m3fn has a scale for every row of every head of k, and of v: `pages hk page_size` fp32. With a = max |x|
    over the row, scale = max(a / 448, 2^-100) and the row is x / scale in fp32, rounded to nearest even: 448 is the largest
    finite e4m3, so nothing overflows, and a row of zeros stays one. Reads return e4m3 * scale, in fp32, rounded to the dtype
    that is asked for. e4m3 has three bits of mantissa: a number of at least 2^-6 * scale is off by at most 2^-4 of itself, a
    smaller one by at most 2^-10 * scale. A row with a NaN or an infinity is NaN wherever it is read: its scale is. Latents have
    one scale for a row of k.

Note [Values that are not finite]
    Requests share tiles of kernels. A tile hides a score by selecting -inf, so NaN in q or k of one request cannot reach another.
    But it multiplies hidden values by weights of 0, and 0 * NaN is NaN. So a row of v with a NaN or an infinity is kept as zeros,
    and the row of k beside it as NaN: tokens that see it become NaN, all others are what they are beside a healthy request.
    A row of latents with a NaN or an infinity anywhere is kept as zeros in its r columns and NaN in the rotary ones. Its scale in
    fp8 is finite, because it is that of the values.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ringattn.kernels.runtime.optional_triton import import_optional

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest finite number of e4m3."""
SMALLEST_SCALE = 2.0**-100
"""Lower bound of the scale of a row, so that it can be divided by."""


class Pool(NamedTuple):
    """Pages of keys and values.

    Attributes:
        k: `pages hk page_size d`, the dtype of its rows, or float8_e4m3fn with k_scale; contiguous.
        v: `pages hk page_size dv`, in the same form; of latents `k[..., :dv]` with hk = 1 and dv < d.
        k_scale: `pages hk page_size` fp32, contiguous. With fp8 only (Note [fp8 rows]).
        v_scale: Scales of v, as k_scale; of latents k_scale itself.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def latent(self) -> bool:
        """Whether v is columns of k."""
        return are_latents(self.k, self.v)


def put(pool: Pool, k: Tensor, v: Tensor, slots: Tensor, contained: tuple[Tensor, Tensor] | None = None) -> None:
    """Write rows to their slots (Note [Values that are not finite]).

    On a GPU it is one launch, which depends on shapes alone: a CUDA graph that captured it reads new slots at each replay.

    Args:
        pool: Written.
        k: `b s hk d`, any strides with a contiguous last dim.
        v: `b s hk dv`, in the same form; of latents `k[..., :dv]`.
        slots: `b s` int64, contiguous; -1: the row is not stored. No slot twice.
        contained: Tensors like k and v that get all rows as well, as pages have them but for rounding to fp8; contiguous, but that
            the second is columns of the first for latents.

    Raises:
        ValueError: The pool is of latents, and v has all columns or several heads, or v or contained is not alike.
    """
    if not slots.numel():
        return
    _check_latents(pool, {"v": (k, v)} | ({} if contained is None else {"contained": contained}))
    fast = import_optional("ringattn.kernels.kv.pages_triton") if pool.k.is_cuda else None
    if fast is not None:
        fast.put(pool, k, v, slots, contained)
        return
    k, v = contain(k, v)
    if contained is not None:
        contained[0].copy_(k)
        contained[1].copy_(v)
    here = slots >= 0
    page, row = _places(pool.k, slots[here])
    for kept, x, scale in _sides(pool, k, v):
        rows = x[here]
        if scale is not None:
            rows, scale[page, :, row] = quantise(rows, latent=pool.latent)
        # indexing supports bytes better than fp8
        _bits(kept)[page, :, row] = _bits(rows)


def take(pool: Pool, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Read rows from slots, as `put` left them.

    Args:
        slots: `b s` int64, contiguous, none of them -1.
        k: `b s hk d`, any strides with a contiguous last dim; written.
        v: `b s hk dv`, in the same form; of latents `k[..., :dv]`.

    Raises:
        ValueError: See `put`.
    """
    if not slots.numel():
        return
    _check_latents(pool, {"v": (k, v)})
    fast = import_optional("ringattn.kernels.kv.pages_triton") if pool.k.is_cuda else None
    if fast is not None:
        fast.take(pool, slots, k, v)
        return
    page, row = _places(pool.k, slots)
    for kept, x, scale in _sides(pool, k, v):
        rows = _bits(kept)[page, :, row].view(kept.dtype)
        x.copy_(rows if scale is None else dequantise(rows, scale[page, :, row], x.dtype))


def contain(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows `... d` of keys and `... dv` of values, made safe (Note [Values that are not finite]).

    Values that are the first columns of the keys, not all of them, are latents, and stay so.

    Example:
        >>> k, v = contain(torch.ones(3, 1), torch.tensor([[1.0], [math.inf], [math.nan]]))
        >>> k.tolist(), v.tolist()
        ([[1.0], [nan], [nan]], [[1.0], [0.0], [0.0]])
    """
    if are_latents(k, v) and v.shape[-1] < k.shape[-1]:
        bad = ~k.isfinite().all(-1, keepdim=True)
        k = k.masked_fill(bad, math.nan)
        v = k[..., : v.shape[-1]]
        return k, v.masked_fill_(bad, 0)
    bad = ~v.isfinite().all(-1, keepdim=True)
    return k.masked_fill(bad, math.nan), v.masked_fill(bad, 0)


def are_latents(k: Tensor, v: Tensor) -> bool:
    """Return whether v is the first columns of k (Note [Latents] of kernels/decode/dispatch.py)."""
    return k.data_ptr() == v.data_ptr() and k.stride() == v.stride() and k.dtype == v.dtype


def quantise(x: Tensor, *, latent: bool = False) -> tuple[Tensor, Tensor]:
    """Return rows `... d` as float8_e4m3fn, and their scales `...` fp32 (Note [fp8 rows]); of latents from `contain`: finite ones.

    Example:
        >>> rows, scale = quantise(torch.tensor([[448.0, -7.0, 1.1, 0.0]]))
        >>> dequantise(rows, scale, torch.float32).tolist()
        [[448.0, -7.0, 1.125, 0.0]]
    """
    x = x.float()
    sizes = x.abs().nan_to_num(nan=0.0) if latent else x.abs()
    scale = (sizes.amax(-1) / LARGEST).clamp(min=SMALLEST_SCALE)
    return (x / scale.unsqueeze(-1)).to(FP8), scale


def dequantise(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of fp8 in a wider dtype (Note [fp8 rows])."""
    return (x.float() * scale.unsqueeze(-1)).to(dtype)


def _sides(pool: Pool, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """(pages, rows, scales) of k and of v; of k alone where v is columns of it."""
    return [(pool.k, k, pool.k_scale), (pool.v, v, pool.v_scale)][: 1 if pool.latent else 2]


def _check_latents(pool: Pool, rows: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Raise where rows of latents are not views as the columns of their pool are."""
    if not pool.latent:
        return
    heads, d, dv = pool.k.shape[1], pool.k.shape[-1], pool.v.shape[-1]
    if heads != 1 or not dv < d:
        raise ValueError(
            f"pool.k must have one head and columns beside those of pool.v, its view, got {heads} heads and {d - dv} columns; "
            "keep keys and values in two tensors"
        )
    for name, (k, v) in rows.items():
        if not are_latents(k, v):
            raise ValueError(
                f"{name} must be columns of k as pool.v is of pool.k, got another tensor; pass k[..., :{dv}]"
            )


def _places(pool: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    size = pool.shape[2]
    return slots // size, slots % size


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype == FP8 else x
