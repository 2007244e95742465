"""Several ranks on one GPU: whether they may share it, how many do, and the SMs that each of them may use."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from ringattn.kernels.constants import COMM_SMS

SHARE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""What torch reads: 1 lets several ranks have one GPU, in whose memory they then reach each other."""


def may_share_gpus() -> bool:
    """Return whether several ranks may have one GPU: for trying a ring on one GPU, never for speed."""
    return os.environ.get(SHARE) == "1"


def ranks_per_gpu() -> int:
    """Return the most ranks of a job that may have one GPU of this host, in any ring; 1 unless they may share it."""
    if not may_share_gpus() or not dist.is_initialized():
        return 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or dist.get_world_size()
    return -(-ranks // max(torch.cuda.device_count(), 1))


def sm_margin_of(device: torch.device, ranks: int) -> int:
    """Return the SMs that the kernels of a rank leave free on a GPU that so many ranks have (`KVGather.sm_margin`).

    Kernels that wait for a peer keep their SMs: those of all ranks must fit at once, each with `COMM_SMS`.
    """
    if ranks == 1 or device.type != "cuda":
        return 0
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count - max(1, count // ranks - COMM_SMS)
