"""Launches of the emulator whose programs keep pace however little they stream, or split tiles however little that saves.

The emulator runs programs one after the other: each waits in vain, leaves, and counts all its epochs at once.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
from torch import Tensor

from ringattn.kernels.attention.hopper import tile_scheduler
from ringattn.kernels.attention.hopper.tile_scheduler import Shape, WorkPlan, schedule_tiles


def keep_pace_always(monkeypatch: pytest.MonkeyPatch, launcher: types.ModuleType) -> list[tuple[Tensor, int]]:
    """Epochs of two blocks in every launch of a module; gives the boards of launches to come, and how many programs each has."""
    from triton.experimental.gluon import language as gl

    from ringattn.kernels.attention.hopper import primitives, progress_barrier

    for module in (progress_barrier, primitives):
        monkeypatch.setattr(module, "EPOCH", gl.constexpr(2))
    monkeypatch.setattr(progress_barrier, "L2_BYTES", 0)
    boards: list[tuple[Tensor, int]] = []
    progress_board = progress_barrier.progress_board

    def noted(plan: Any, *rest: Any) -> Any:
        found = progress_board(plan, *rest)
        if found[0] is not None:
            boards.append((found[0], plan.programs))
        return found

    monkeypatch.setattr(launcher, "progress_board", noted)
    return boards


def split_always(monkeypatch: pytest.MonkeyPatch, launcher: types.ModuleType) -> list[WorkPlan]:
    """Seven programs in every launch of a module, whose tiles are split at the least gain; gives the plans of launches to come."""
    for name in ("OVERHEAD", "EPILOGUE", "MERGE"):
        monkeypatch.setattr(tile_scheduler, name, 0)
    monkeypatch.setattr(tile_scheduler, "MIN_PART", 1)
    plans: list[WorkPlan] = []

    def noted(rows: Any, keys: Any, shape: Shape) -> WorkPlan:
        plans.append(schedule_tiles(rows, keys, shape._replace(programs=7)))
        return plans[-1]

    monkeypatch.setattr(launcher, "schedule_tiles", noted)
    return plans
