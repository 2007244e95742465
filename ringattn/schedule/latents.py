"""Keys and values as latent rows: expanded where kernels need them, their gradients projected back.

Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1) makes the keys and values of all heads from one row of c
columns per token: r of the latent, then those of the rotary key, which all heads share. Here k = rows k_up^T and
v = rows[..., :r] v_up^T: k_up has the identity where the rotary key is copied, so one matrix product makes whole keys. A
product with 1 is exact, and so are sums with zeros.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ringattn.kernels.interface import PAD_ROWS, RowMetadata, accumulation_dtype
from ringattn.transport.base import Buffers

EXPANDED_BYTES = 2**30
"""Bytes of keys and values that are expanded at a time: large enough for products and launches, and no part of a long shard's."""


class Latents(NamedTuple):
    """Latent rows of this rank and the weights that expand them.

    Attributes:
        rows: `b t c`, contiguous.
        k_up: `hk d c`, contiguous.
        v_up: `hk dv r`, contiguous; r <= c.
    """

    rows: Tensor
    k_up: Tensor
    v_up: Tensor

    def stand_ins(self) -> tuple[Tensor, Tensor]:
        """Return tensors with the shapes of k `b t hk d` and v `b t hk dv`, and with the memory of one number."""
        one = self.rows.new_empty(1)
        return tuple(one.expand(*self.rows.shape[:2], *up.shape[:2]) for up in self[1:])  # pyright: ignore[reportReturnType]

    def rows_at_once(self) -> int:
        """Return how many rows of each batch element are expanded at a time."""
        columns = sum(up.shape[0] * up.shape[1] for up in self[1:])
        rows = EXPANDED_BYTES // max(1, self.rows.shape[0] * columns * self.rows.element_size())
        return max(1, rows // PAD_ROWS) * PAD_ROWS

    def expand(self, rows: Tensor, buffers: Buffers) -> tuple[Tensor, Tensor]:
        """Return k `b t hk d` and v `b t hk dv` of rows `b t c`; valid until the next call."""
        made = []
        for name, up in (("expanded k", self.k_up), ("expanded v", self.v_up)):
            out = buffers.take(name, (*rows.shape[:2], *up.shape[:2]), rows.dtype, rows.device)
            # flattening a slice of a batch copies it: latents are few bytes beside what they become
            given, weight = rows.flatten(0, 1)[:, : up.shape[2]], up.flatten(0, 1)
            torch.mm(given, weight.T, out=out.view(-1, weight.shape[0]))
            made.append(out)
        return made[0], made[1]


def with_rotary(k_up: Tensor, dr: int) -> Tensor:
    """Return `Latents.k_up`, `hk (dn + dr) (r + dr)`, of k_up `hk dn r` and dr rotary columns."""
    if dr == 0:
        return k_up
    hk, _, r = k_up.shape
    copied = torch.eye(dr, dtype=k_up.dtype, device=k_up.device)
    copied = torch.nn.functional.pad(copied, (r, 0)).expand(hk, dr, r + dr)
    return torch.cat([torch.nn.functional.pad(k_up, (0, dr)), copied], 1)


class LatentGrads:
    """Gradients of `Latents`, in the accumulation dtype.

    Attributes:
        k_up: `hk d c`, the sum over all rows that were projected; also v_up, `hk dv r`.
    """

    def __init__(self, latents: Latents) -> None:
        self._latents = latents
        wide = accumulation_dtype(latents.rows.dtype)
        self.k_up, self.v_up = (torch.zeros(up.shape, dtype=wide, device=up.device) for up in latents[1:])

    def shares(self) -> list[Tensor]:
        """Return k_up and v_up after rounding to the dtype of rows, as a rank of its own returns them."""
        return [x.copy_(x.to(self._latents.rows.dtype)) for x in (self.k_up, self.v_up)]

    def project(self, dk: Tensor, dv: Tensor, rows: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Return the gradient of rows `b t c`, this rank's by default, and add to those of the weights.

        dk and dv are rounded to the dtype of rows before the products.
        """
        rows, wide = self._latents.rows if rows is None else rows, self.k_up.dtype
        flat = rows.flatten(0, 1)
        out = torch.zeros(rows.shape, dtype=wide, device=rows.device) if out is None else out.zero_()
        for x, up, total in ((dk, self._latents.k_up, self.k_up), (dv, self._latents.v_up, self.v_up)):
            grad, r = x.to(rows.dtype).flatten(0, 1).flatten(1), up.shape[2]
            total.flatten(0, 1).add_(_product(grad.T, flat[:, :r], wide))
            out[..., :r].add_(_product(grad, up.flatten(0, 1), wide).view(out[..., :r].shape))
        return out


def pieces(keys: RowMetadata, rows: int) -> list[tuple[slice, RowMetadata]]:
    """Return the stretches of at most `rows` rows of a key side, each with its metadata; kept with the side."""
    total = keys.positions.shape[0]
    if total <= rows:
        return [(slice(0, total), keys)]
    found = keys.derived.setdefault(keys, {})
    if rows not in found:
        found[rows] = [(slice(at, at + rows), _piece(keys, at, min(at + rows, total))) for at in range(0, total, rows)]
    return found[rows]


def _piece(keys: RowMetadata, begin: int, end: int) -> RowMetadata:
    cut = [
        (max(begin - at, 0), min(end - at, length), at, start, stride) for at, length, start, stride in keys.run_list
    ]
    runs = tuple((at + a - begin, b - a, start + stride * a, stride) for a, b, at, start, stride in cut if a < b)
    return replace(
        keys,
        runs=torch.tensor(runs, dtype=torch.int32, device="cpu").to(keys.runs.device),
        run_list=runs,
        positions=keys.positions[begin:end],
        **{name: getattr(keys, name)[:, begin:end].contiguous() for name in ("lo", "hi", "lo_host", "hi_host")},
        derived=WeakKeyDictionary(),
    )


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix product with sums and result in dtype."""
    if a.dtype == dtype:
        return a @ b
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)
