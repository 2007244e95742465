"""Keys and values of one rank side by side in one buffer, as they are sent; by Triton on a GPU, by torch elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ringattn.kernels.runtime.optional_triton import import_optional


@dataclass(frozen=True, eq=False)
class Cleared:
    """Memory that the packing launch also sets to zero: a launch or a word in stream order for each would take longer.

    Attributes:
        flags: int32, contiguous.
        error: One int32.
        remote: `b rows hk width`, contiguous.
        pad_rows: `n 2` int32 on the device: first and one past the last row of each stretch of the remote buffer.
    """

    flags: Tensor
    error: Tensor
    remote: Tensor
    pad_rows: Tensor
    longest: int
    stretches: bool


def pack(slot: Tensor, k: Tensor, v: Tensor, cleared: Cleared | None = None) -> None:
    """Copies k and v into the columns of slot.

    Args:
        slot: `b t hk (d + dv)`, any strides with a contiguous last dim; written.
        k: `b t hk d`, in the same form.
        v: `b t hk dv`, in the same form.
    """
    fast = import_optional("ringattn.kernels.kv.pack_triton") if slot.is_cuda else None
    if fast is not None:
        fast.pack(slot, k, v, cleared)
        return
    if cleared is not None:
        cleared.flags.zero_()
        cleared.error.zero_()
        if cleared.stretches:
            for start, end in cleared.pad_rows.tolist():
                cleared.remote[:, start:end] = 0
    slot[..., : k.shape[-1]].copy_(k)
    slot[..., k.shape[-1] :].copy_(v)
