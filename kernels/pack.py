"""Keys and values of one rank side by side in one buffer, which is how they travel.

Owns the copy, what is set to zero in the same launch, and who does it: Triton on a GPU where it is installed, torch elsewhere.
Refuses to know who reads the buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ringattn.kernels.twin import find_twin


@dataclass(frozen=True, eq=False)
class Cleared:
    """What a launch that packs sets to zero beside: a launch or a word in stream order for each would take longer.

    Attributes:
        flags: int32, contiguous.
        error: One int32.
        far: `b rows hk width`, contiguous.
        guards: `n 2` int32 on the device: first and one past the last row of each stretch of far.
        longest: Rows of the longest of them.
        stretches: Whether they are cleared; flags and the error are in any case.
    """

    flags: Tensor
    error: Tensor
    far: Tensor
    guards: Tensor
    longest: int
    stretches: bool


def pack(slot: Tensor, k: Tensor, v: Tensor, cleared: Cleared | None = None) -> None:
    """Copies k and v into the columns of slot.

    Args:
        slot: `b t hk (d + dv)`, any strides with a contiguous last dim; written.
        k: `b t hk d`, likewise.
        v: `b t hk dv`, likewise.
        cleared: What else is written.
    """
    fast = find_twin("ringattn.kernels.pack_triton") if slot.is_cuda else None
    if fast is not None:
        fast.pack(slot, k, v, cleared)
        return
    if cleared is not None:
        cleared.flags.zero_()
        cleared.error.zero_()
        if cleared.stretches:
            for start, end in cleared.guards.tolist():
                cleared.far[:, start:end] = 0
    slot[..., : k.shape[-1]].copy_(k)
    slot[..., k.shape[-1] :].copy_(v)
