"""Refusal of jobs that a GPU cannot hold, by the memory that the planner expects, before anything is allocated."""

from __future__ import annotations

import torch

from ringattn.launch.common.distributed import Refusal, Session
from ringattn.sizing import Memory, Profile

ERROR = 0.05
"""Relative error of planned peaks, to which tests/sizing/test_committed_rows.py holds them."""
RESERVE = Profile.reserve_gib * 2**30
"""Bytes that libraries take outside of tensors."""


def least_gpu_bytes(session: Session) -> int | None:
    """Return the memory of the smallest GPU of all ranks in bytes; None on CPUs. A collective."""
    if session.device.type != "cuda":
        return None
    return min(session.gather(torch.cuda.mem_get_info(session.device)[1]))


def check_fits(planned: Memory, whole: int, remedy: str, *, refuse: bool = True) -> str:
    """Return the plan of a rank in words; where it is above the `whole` bytes of its GPU, with `remedy`, what to change.

    With `refuse`, a plan that is above by more than its error is a Refusal.
    """
    text = f"planned memory {planned.total / 2**30:.1f} of {whole / 2**30:.1f} GiB per GPU"
    if planned.total <= whole:
        return text
    parts = ", ".join(f"{name} {gib:.1f}" for name, gib in planned.gib().items() if gib >= 0.05)
    if refuse and planned.total > (1 + ERROR) * whole:
        raise Refusal(
            f"a rank must fit into {whole / 2**30:.1f} GiB of a GPU, got a plan of {planned.total / 2**30:.1f} GiB ({parts}); "
            f"{remedy}"
        )
    return f"warning: {text} ({parts}): it may run out of memory; {remedy}"
