"""The dropout mask of Note [Dropout] in interface.py, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIER = 0xD256D193
_WEYL = 0x9E3779B9
_WORD = 0xFFFFFFFF


def _multiply_u32(x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32-bit words of _MULTIPLIER * x for int64 x in [0, 2^32)."""
    # the product needs 64 unsigned bits; halves of the multiplier keep every intermediate below 2^49
    low = x * (_MULTIPLIER & 0xFFFF)
    middle = x * (_MULTIPLIER >> 16) + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(counter: tuple[Tensor, Tensor], key: Tensor) -> tuple[Tensor, Tensor]:
    """Philox-2x32-10 (Salmon et al., SC 2011): two random 32-bit words per counter.

    Args:
        counter: Two int64 tensors of 32-bit words; they and `key` broadcast.
        key: int64 tensor of 32-bit words.
    """
    x, y = counter
    for _ in range(10):
        high, low = _multiply_u32(x)
        x, y = high ^ key ^ y, low
        key = (key + _WEYL) & _WORD
    return x, y


def keep_mask(
    seed: int, b_index: Tensor, h_index: Tensor, i: Tensor, j: Tensor, num_heads: int, dropout_p: float
) -> Tensor:
    """Mask of the attention weights that survive dropout: the same answer on every device and at any world size."""
    stream = b_index.long() * num_heads + h_index.long()
    high = torch.full_like(stream, (seed >> 32) & _WORD)
    key, _ = philox((stream, high), torch.full_like(stream, seed & _WORD))
    word, _ = philox((i.long(), j.long()), key)
    return word >= int(dropout_p * 2**32)
