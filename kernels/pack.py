"""Keys and values of one rank side by side in one buffer, which is how they travel.

Owns the copy and who does it: Triton on a GPU where it is installed, torch elsewhere. Refuses to know who reads the buffer.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import Tensor


def pack(slot: Tensor, k: Tensor, v: Tensor) -> None:
    """Copies k and v into the columns of slot.

    Args:
        slot: `b t hk (d + dv)`, any strides with a contiguous last dim; written.
        k: `b t hk d`, likewise.
        v: `b t hk dv`, likewise.
    """
    fast = _triton_pack() if slot.is_cuda else None
    if fast is not None:
        fast(slot, k, v)
        return
    slot[..., : k.shape[-1]].copy_(k)
    slot[..., k.shape[-1] :].copy_(v)


@lru_cache(maxsize=1)
def _triton_pack() -> Any:
    try:
        from ringattn.kernels.pack_triton import pack as fast
    except ImportError:
        return None
    return fast
