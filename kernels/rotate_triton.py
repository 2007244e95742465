"""Rotary embeddings of few rows, q and k in one launch.

Owns the launch. Refuses to know what the rotation is for (rotate.py says what it is).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.runtime.record_triton import Tape, recorded

NUMBERS = 1024
"""Of a program: some heads of one row."""
WARPS = 4


@triton.jit
def _half(x, heads, lanes, stride, many, HALF: tl.constexpr, WHICH: tl.constexpr):
    at = heads[:, None] * stride + WHICH * HALF + lanes[None, :]
    return tl.load(x + at, mask=(heads < many)[:, None], other=0.0).to(tl.float32)


@triton.jit
def _angles(x, lanes, HALF: tl.constexpr, WHICH: tl.constexpr):
    return tl.load(x + WHICH * HALF + lanes).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["h", "hk", "blocks"])
def _rotate_kernel(
    q, k, cos, sin, q_out, k_out, q_row, q_head, k_row, k_head, cos_row, sin_row, h, hk, blocks,
    HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Program (i, j) turns heads j * HEADS .. j * HEADS + HEADS - 1 of row i of q; from j = blocks on, those of k.

    Example: 3 heads of q, 1 of k and HEADS 2 make blocks 2; program (0, 1) turns the third head of q, program (0, 2) the head of k.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes, heads = tl.arange(0, HALF), tl.arange(0, HEADS)
    if block < blocks:
        x, stride, many, out = q + row * q_row, q_head, h, q_out + row * h * 2 * HALF
        heads += block * HEADS
    else:
        x, stride, many, out = k + row * k_row, k_head, hk, k_out + row * hk * 2 * HALF
        heads += (block - blocks) * HEADS
    one, two = _half(x, heads, lanes, stride, many, HALF, 0), _half(x, heads, lanes, stride, many, HALF, 1)
    c, s = cos + row * cos_row, sin + row * sin_row
    first = one * _angles(c, lanes, HALF, 0) - two * _angles(s, lanes, HALF, 0)
    second = two * _angles(c, lanes, HALF, 1) + one * _angles(s, lanes, HALF, 1)
    to = out + heads[:, None] * (2 * HALF) + lanes[None, :]
    tl.store(to, first.to(q_out.dtype.element_ty), mask=(heads < many)[:, None])
    tl.store(to + HALF, second.to(q_out.dtype.element_ty), mask=(heads < many)[:, None])


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As `kernels.rotate.rotate`."""
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    if len(q):
        _launch(q, k, cos, sin, q_out, k_out)
    return q_out, k_out


@recorded
def _launch(tape: Tape, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_out: Tensor, k_out: Tensor) -> None:
    (n, h, d), hk = q.shape, k.shape[1]
    heads = max(1, min(NUMBERS // d, 1 << (h - 1).bit_length()))
    blocks = -(-h // heads)
    tape.launch(
        _rotate_kernel,
        (n, blocks + -(-hk // heads)),
        (
            q, k, cos, sin, q_out, k_out, q.stride(0), q.stride(1), k.stride(0), k.stride(1), cos.stride(0), sin.stride(0),
            h, hk, blocks,
        ),
        {"HALF": d // 2, "HEADS": heads},
        num_warps=WARPS,
    )  # fmt: skip
