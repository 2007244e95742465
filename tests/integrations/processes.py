"""Trainers of several kinds, run on the ranks of a pool as torchrun would run them, and their comparison."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch import Tensor
from transformers import Trainer, TrainingArguments

History = list[dict[str, float]]


@contextlib.contextmanager
def processes() -> Iterator[int]:
    """Inside, accelerate finds the process's place as it does under torchrun; how many there are."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    places = {"RANK": dist.get_rank() if world_size > 1 else 0, "WORLD_SIZE": world_size, "MASTER_PORT": 1}
    places |= {"LOCAL_RANK": places["RANK"], "LOCAL_WORLD_SIZE": world_size}
    names = {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in places.items()}}
    before = dict(os.environ)
    os.environ |= names if world_size > 1 else {}
    try:
        yield world_size
    finally:
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()
        # trainers set variables for accelerate
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ |= before


def settings(folder: str, **options: Any) -> dict[str, Any]:
    """Arguments of six steps, in two epochs, whose gradients are clipped, on a CPU."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "learning_rate": 0.1,
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
        **options,
    }


def enable_fsdp(args: TrainingArguments) -> None:
    """Let accelerate shard on CPU ranks, which it does on GPUs only; call it before a trainer is made."""
    assert args.device.type == "cpu"
    PartialState().distributed_type = DistributedType.MULTI_GPU


def outcome(trainer: Trainer, start: dict[str, Tensor]) -> tuple[History, dict[str, Tensor]]:
    """The numbers that were logged, and how far each parameter has moved from the start, on every rank."""
    state: dict[str, Any] = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.is_fsdp_enabled:
        received: list[Any] = [state]
        dist.broadcast_object_list(received)
        (state,) = received
    left_out = ("runtime", "per_second", "flos", "time")
    history = [{k: v for k, v in row.items() if not any(x in k for x in left_out)} for row in trainer.state.log_history]
    state = {name.replace("_orig_mod.", "").removeprefix("module."): x for name, x in state.items()}
    moved = {name: state[name].detach().double() - x.detach().double() for name, x in start.items()}
    return history, {name: x.clone() for name, x in moved.items()}


def assert_same(found: Any, expected: Any, tolerance: float = 1e-4) -> None:
    """Compare logged numbers, and movements of parameters relative to themselves."""
    (history, moved), (expected_history, expected_moved) = found, expected
    names, expected_names = ([sorted(row) for row in rows] for rows in (history, expected_history))
    assert names == expected_names, (names, expected_names)
    for mine, theirs in zip(history, expected_history, strict=True):
        # some releases round what they log to four digits
        differing = {
            k: (x, theirs[k]) for k, x in mine.items() if x != pytest.approx(theirs[k], rel=tolerance, abs=tolerance)
        }
        assert not differing, (theirs, differing)
    assert sum(bool(x.norm() > 0) for x in expected_moved.values()) > 1
    for name, x in expected_moved.items():
        assert (moved[name] - x).norm() <= 10 * tolerance * x.norm(), name
