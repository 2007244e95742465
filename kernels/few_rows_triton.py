"""Products of few rows with weights that are each read once, in one launch.

Owns how weights are dealt to programs, and how they are read. Refuses to know models, and for which rows torch is faster
(few_rows.py).

Note [Reading weights]
    A product of few rows takes as long as reading its weight does. A program owns some columns of the result, that is rows of
    the weight, and reads them whole, several blocks ahead: a multiprocessor must have asked for some 64 KiB at any time to get
    its share of the bandwidth. Rows of x are read again by every program, from L2. The weight is the left side of each product,
    because tensor cores take at least 16 rows there and 8 on the right.

Note [One wave]
    Programs of one launch begin together, and those that come after them find a device that is half empty. So columns are dealt in
    pieces of 64 where that makes about a program for each multiprocessor or several for all, and of 32 where it makes fewer.

Note [Tried]
    One H200, bf16, 1 and 16 rows, weights of 32 to 64 MiB, each read once. Launches that begin while the one before them
    waits, as an exchange does, and ask L2 for the first 8 to 32 MiB of their weight meanwhile (`griddepcontrol`,
    `cp.async.bulk.prefetch.L2`) were 1 to 6 us slower than launches that begin when it is over; with nothing asked for 0 to 3.
    (A script that is not kept.)
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
# (powers of two may be constants of kernels, says Triton)

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.attention.portable.configs import kind_of
from ringattn.kernels.runtime.record_triton import Tape, recorded

KINDS = {"sm80", "sm90", "sm100"}
"""Kinds of devices with room for the blocks of a program: 164 KiB of shared memory or more."""
PROGRAMS = 96
"""Programs that have all of the bandwidth, with pieces of 64 columns."""


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(y)) / 2 is sigmoid(2 y)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        tl.static_assert(ACTIVATION == "relu")
        x = tl.maximum(x, 0.0)
    return x


@triton.jit(do_not_specialize=["rows"])
def _few_rows_kernel(
    x, weight, other, bias, other_bias, out, rows, columns, inner, stride, other_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Program i owns columns i * COLUMNS .. i * COLUMNS + COLUMNS - 1 of the result.

    Example: x is [[1, 2]], weight [[3, 4], [5, 6]], other [[1, 0], [0, 1]] and the activation relu; the program of column 1 finds
    17 and 2, and stores 34.
    """
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # rows beyond the last are the last once more
    at = tl.minimum(c, columns - 1).to(tl.int64)
    mine = weight + at * stride
    if ACTIVATION != "":
        others = other + at * other_stride
    r, k = tl.arange(0, ROWS), tl.arange(0, INNER)
    there = (r < rows)[None, :]
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    more = tl.zeros([COLUMNS, ROWS], tl.float32)
    for i in tl.range(0, inner, INNER, num_stages=STAGES):
        block = tl.load(mine[:, None] + (i + k)[None, :])
        if ACTIVATION != "":
            second = tl.load(others[:, None] + (i + k)[None, :])
        brought = tl.load(x + r[None, :] * inner + (i + k)[:, None], mask=there, other=0.0)
        acc = tl.dot(block, brought, acc)
        if ACTIVATION != "":
            more = tl.dot(second, brought, more)
    if bias is not None:
        acc += tl.load(bias + at).to(tl.float32)[:, None]
    if ACTIVATION != "":
        if other_bias is not None:
            more += tl.load(other_bias + at).to(tl.float32)[:, None]
        acc = _activate(acc, ACTIVATION) * more
    there &= (c < columns)[:, None]
    tl.store(out + r[None, :] * columns + c[:, None], acc.to(out.dtype.element_ty), mask=there)


@dataclass(frozen=True)
class Shape:
    """How a product is cut.

    Attributes:
        rows: Of x in a block, at least as many as there are.
        columns: Of the result of a program.
        inner: Numbers of a row that are multiplied at once.
        stages: Blocks that are asked for before they are needed.
        warps: Of a program.
    """

    rows: int
    columns: int
    inner: int
    stages: int
    warps: int = 4


@functools.lru_cache(maxsize=256)
def shape_of(rows: int, columns: int, inner: int, *, gated: bool) -> Shape:
    """How products are cut.

    Args:
        rows: Of x.
        columns: Of the result.
        inner: Numbers of a row, a multiple of `few_rows.STEP`.
        gated: There are two weights.

    Example:
        >>> shape_of(3, 14336, 4096, gated=False), shape_of(3, 4096, 4096, gated=False)
        (Shape(rows=16, columns=64, inner=128, stages=5, warps=4), Shape(rows=16, columns=32, inner=256, stages=5, warps=4))
    """
    block = max(16, triton.next_power_of_2(rows))
    if gated:
        return Shape(block, 64, 64, 5)
    if columns >= 64 * PROGRAMS or block > 16:
        return Shape(block, 64, 128, 5 if block == 16 else 4)
    return Shape(block, 32, 128 if inner % 256 else 256, 5)


def serves(device: torch.device) -> bool:
    """Whether programs have the room that they need on a device."""
    return kind_of(device) in KINDS


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    shape: Shape | None = None,
) -> Tensor:
    """As `few_rows.multiply`; `shape` overrides `shape_of`."""
    out = torch.empty(len(x), len(weight), dtype=dtype, device=x.device)
    shape = shape or shape_of(len(x), *weight.shape, gated=False)
    _launch(x, weight, None, bias, None, out, "", shape)
    return out


def gate(
    x: Tensor,
    weight: Tensor,
    other: Tensor,
    activation: str,
    bias: Tensor | None,
    other_bias: Tensor | None,
    shape: Shape | None = None,
) -> Tensor:
    """As `few_rows.gate`; likewise."""
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    shape = shape or shape_of(len(x), *weight.shape, gated=True)
    _launch(x, weight, other, bias, other_bias, out, activation, shape)
    return out


@recorded
def _launch(
    tape: Tape,
    x: Tensor,
    weight: Tensor,
    other: Tensor | None,
    bias: Tensor | None,
    other_bias: Tensor | None,
    out: Tensor,
    activation: str,
    shape: Shape,
) -> None:
    rows, (columns, inner) = len(x), weight.shape
    assert inner % shape.inner == 0, "rows are multiplied in whole blocks"
    tape.launch(
        _few_rows_kernel,
        (triton.cdiv(columns, shape.columns),),
        (
            x, weight, other, bias, other_bias, out, rows, columns, inner, weight.stride(0),
            0 if other is None else other.stride(0),
        ),
        {
            "ROWS": shape.rows, "COLUMNS": shape.columns, "INNER": shape.inner, "STAGES": shape.stages,
            "ACTIVATION": activation,
        },
        num_warps=shape.warps,
    )  # fmt: skip
