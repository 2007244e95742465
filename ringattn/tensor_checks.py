"""Plain tensors, and those that are more: DTensors, and tensors that a tangent follows.

Owns how they are told apart and what is said about DTensors. Refuses to know process groups, and so the type itself: importing
it costs as much as importing torch.
"""

from __future__ import annotations

from torch import Tensor
from torch.autograd import forward_ad


def is_distributed(x: Tensor | None) -> bool:
    """Whether x is a DTensor, of which each rank holds a part or a copy."""
    # of the type: torch.compile does not see this method on an instance
    return x is not None and type(x) is not Tensor and hasattr(type(x), "to_local")


def check_plain(name: str, x: Tensor | None) -> None:
    """Refuses a DTensor: its shape is that of the whole tensor, and a call is about the rows that are here.

    Args:
        name: What to call it.
        x: The tensor.

    Raises:
        NotImplementedError: It is a DTensor.
    """
    if is_distributed(x):
        raise NotImplementedError(
            f"{name} must be a plain tensor, got a DTensor; wrap the call in "
            f"torch.distributed.tensor.experimental.local_map, or pass {name}.to_local()"
        )


def has_tangent(*tensors: Tensor | None) -> bool:
    """Whether forward-mode differentiation follows any of these, whose tangents an operator would lose without a word."""
    if forward_ad._current_level < 0:
        return False
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)
