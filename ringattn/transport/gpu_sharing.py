"""Several ranks on one GPU: whether they may share it, how many do, and the SMs that each of them may use."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from ringattn.transport.base import COMM_SMS

SHARE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""What torch reads: 1 lets several ranks have one GPU, in whose memory they then reach each other."""


def may_share_gpus() -> bool:
    """Whether several ranks may have one GPU: to try what needs several where there is one, never for speed."""
    return os.environ.get(SHARE) == "1"


def ranks_per_gpu() -> int:
    """How many ranks of a job may have one GPU of this host, whatever ring they are in; 1 unless they may share it."""
    if not may_share_gpus() or not dist.is_initialized():
        return 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or dist.get_world_size()
    return -(-ranks // max(torch.cuda.device_count(), 1))


def sm_margin_of(device: torch.device, ranks: int) -> int:
    """Multiprocessors that the kernels of a rank leave free on a GPU that so many ranks have (`KVGather.sm_margin`).

    Kernels that wait for a peer do not let go of theirs: those of all ranks must fit at once, each with `COMM_SMS`.
    """
    if ranks == 1 or device.type != "cuda":
        return 0
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count - max(1, count // ranks - COMM_SMS)
