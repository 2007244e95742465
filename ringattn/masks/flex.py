"""Masks of FlexAttention as masks of this library."""

from __future__ import annotations

from typing import Any

import torch

from ringattn.plan.expressions import Mask, blocks, per_batch


def from_block_mask(block_mask: Any, inside: Mask | None = None) -> Mask:
    """Return the mask of a `BlockMask` of `torch.nn.attention.flex_attention`.

    Full blocks are visible as they are. Partial blocks need their mask function, which is code that cannot be read: `inside` is
    the same rule as a mask, and the result is `blocks(partial or full) & inside`. Every entry of every block is compared
    with the block mask's own function, so a rule that differs is refused.

    Args:
        block_mask: One pattern for all heads, square blocks. Batch elements may differ.
        inside: The rule of partial blocks, such as `masks.causal()`; None: there are none.

    Raises:
        NotImplementedError: Heads have patterns of their own, or blocks are not square.
        TypeError: It is no block mask.
        ValueError: There are partial blocks and no rule, or the rule shows other pairs than the block mask.
    """
    from torch.nn.attention import flex_attention  # imports the compiler

    if not isinstance(block_mask, flex_attention.BlockMask):
        raise TypeError(
            f"block_mask must be a BlockMask of flex_attention, got {type(block_mask).__name__}; make it with create_block_mask"
        )
    batch, heads, seq_len, kv_len = block_mask.shape
    rows_of_block, keys_of_block = block_mask.BLOCK_SIZE
    if heads != 1:
        raise NotImplementedError(f"block_mask must have one pattern for all heads, got {heads}; call once per head")
    if rows_of_block != keys_of_block:
        raise NotImplementedError(
            f"block_mask must have square blocks, got {rows_of_block} x {keys_of_block}; create it with BLOCK_SIZE={keys_of_block}"
        )
    partial = _dense(block_mask.kv_num_blocks, block_mask.kv_indices, block_mask)
    full = torch.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _dense(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, block_mask)
    if inside is None and bool(partial.any()):
        raise ValueError(
            f"inside must be the rule of the {int(partial.sum())} partial blocks, got none; "
            "pass it as a mask, such as masks.causal()"
        )
    found = []
    for b in range(batch):
        shown = blocks((partial | full)[b], rows_of_block)
        mask = shown if inside is None else shown & inside
        _compare(mask, block_mask, b, seq_len, kv_len)
        found.append(mask)
    return found[0] if batch == 1 else per_batch(found)


def _dense(numbers: torch.Tensor, indices: torch.Tensor, block_mask: Any) -> torch.Tensor:
    """Return the flags `b rows columns` of listed blocks."""
    _, _, seq_len, kv_len = block_mask.shape
    rows, columns = (-(-n // size) for n, size in zip((seq_len, kv_len), block_mask.BLOCK_SIZE, strict=True))
    numbers, indices = numbers[:, 0, :rows].cpu(), indices[:, 0, :rows].cpu()
    listed = torch.arange(indices.shape[-1], device="cpu") < numbers[..., None]
    flags = torch.zeros(*numbers.shape, columns, dtype=torch.bool, device="cpu")
    b, row, place = listed.nonzero(as_tuple=True)
    flags[b, row, indices[b, row, place].long()] = True
    return flags


def _compare(mask: Mask, block_mask: Any, b: int, seq_len: int, kv_len: int) -> None:
    """Refuse a mask that shows other pairs than the block mask, block row by block row."""
    step = block_mask.BLOCK_SIZE[0]
    j = torch.arange(kv_len, device="cpu")
    zero = torch.tensor(0, device="cpu")
    for begin in range(0, seq_len, step):
        i = torch.arange(begin, min(begin + step, seq_len), device="cpu")[:, None]
        wanted = block_mask.mask_mod(torch.tensor(b, device="cpu"), zero, i, j).expand(i.shape[0], kv_len)
        differing = (mask.visible(i, j, b=b) != wanted).nonzero()
        if differing.numel():
            row, column = differing[0].tolist()
            raise ValueError(
                f"inside must show what the block mask shows, got another answer for query {begin + row} and key {column}; "
                "pass the rule of its mask function"
            )
