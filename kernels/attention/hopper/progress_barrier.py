"""Barrier that bounds how far the programs of a long launch drift apart.

Programs of one head stream the same rows, which are read from memory once as long as the programs are at about the same place
and the rows are in the level-two cache. A program that is half a percent slower falls behind by more than the cache holds
within seconds; then every program reads the rows for itself, and memory becomes the bound. So the producers of long launches
count their blocks: every EPOCH blocks each adds one to a place on a board, and continues once all have ended the epoch before
(two epochs of 64 blocks are 8 MiB). A producer that waits 20 ms, because another program has no multiprocessor yet or remote
keys are late, waits no more until the launch ends; one that ends adds all its epochs at once. No result depends on waiting.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringattn.kernels.attention.hopper.primitives import EPOCH
from ringattn.kernels.attention.hopper.tile_scheduler import L2_BYTES, Shape, WorkPlan


def progress_board(
    plan: WorkPlan, shape: Shape, row_bytes: int, device: torch.device, most_programs: int
) -> tuple[Tensor | None, int | None]:
    """(board, epochs) of a launch; None for both where no program waits. most_programs: those that run side by side."""
    streamed = plan.deepest * shape.block * row_bytes
    epochs = plan.longest // int(EPOCH)
    if streamed < L2_BYTES or epochs < 2 or not 1 < plan.programs <= most_programs:
        return None, None
    return torch.zeros(epochs, dtype=torch.int32, device=device), epochs
