"""How the fused backward is shaped: one table, so that a measured choice is a changed number.

Owns block sizes and schedules of the backward. Refuses to know tensors and kernels.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BackwardConfig:
    """The shape of one launch.

    Attributes:
        block: Query rows of a block, 64 or 128.
        pin: Start values get registers of their own before the first product, so that both products are in flight at once.
        persistent: As many programs as multiprocessors, which take several tiles each; else one tile per program.
    """

    block: int
    pin: bool = False
    persistent: bool = True


# (padded head_dim, padded v_head_dim) -> the launch
BACKWARD: dict[tuple[int, int], BackwardConfig] = {
    (64, 64): BackwardConfig(block=128),
    (128, 64): BackwardConfig(block=64),
    (128, 128): BackwardConfig(block=64),
}


def padded_dims(head_dim: int, v_head_dim: int) -> tuple[int, int]:
    """What the kernel makes of two head dims of up to 128; a narrow q beside a wide v is treated as wide."""
    dv = 64 if v_head_dim <= 64 else 128
    return (64 if head_dim <= 64 and dv == 64 else 128), dv
