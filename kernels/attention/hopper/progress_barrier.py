"""Barrier that bounds how far the programs of a long launch drift apart.

Owns the choice of launches whose programs wait for each other, and the board on which they count. Refuses to know what they
compute.

Note [Pace]
    Programs that work on one head stream the same rows, and each row is read from memory once as long as they are at
    about the same place: whoever comes later finds it in the level-two cache. The plan keeps them together (Note
    [Assignment] of tile_scheduler.py), but nothing in it makes up for a program that is half a percent slower than the
    others. Over seconds it falls behind by more than the cache holds, every program reads the rows for itself, and 132
    of them want more than the memory gives. So the producers of long launches count the blocks that they load, and
    every EPOCH blocks each adds one to the place of that epoch on a board, and goes on once all have ended the epoch
    before. Two epochs of 64 blocks are 8 MiB. Dealing is static, so nothing is lost by waiting for the slowest: the
    launch ends with it in any case. Waiting decides no number. Who waits 20 ms, because a program has no multiprocessor
    yet or the keys of another rank are late, waits no more until the launch ends; who leaves ends all its epochs at
    once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringattn.kernels.attention.hopper.descriptors import multiprocessors
from ringattn.kernels.attention.hopper.primitives import EPOCH
from ringattn.kernels.attention.hopper.tile_scheduler import L2_BYTES, Shape, WorkPlan


def progress_board(plan: WorkPlan, shape: Shape, row_bytes: int, beside: Tensor) -> tuple[Tensor | None, int | None]:
    """(board, epochs) of a launch; None for both where nobody waits.

    Args:
        plan: Of the launch.
        shape: What the plan was made for.
        row_bytes: What one streamed row of one head moves.
        beside: A tensor of the launch, for its device.
    """
    streamed = plan.deepest * shape.block * row_bytes
    epochs = plan.longest // int(EPOCH)
    if streamed < L2_BYTES or epochs < 2 or not 1 < plan.programs <= multiprocessors(beside.device):
        return None, None
    return torch.zeros(epochs, dtype=torch.int32, device=beside.device), epochs
