"""Trainers whose checkpoints wait in host memory and whose MLPs run by chunks make the steps of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DataCollatorWithFlattening, Trainer
from transformers import TrainingArguments as Arguments

from ringattn.integrations.transformers.trainer import RingTrainer
from tests.integrations.processes import assert_same, enable_fsdp, outcome, processes, settings
from tests.integrations.transformers.models import make
from tests.integrations.transformers.test_trainer_models import FSDP, OF_FIVE, samples
from tests.support.pool import Pools

BOUNDED: dict[str, Any] = {"recompute": "selective", "offload": True, "mlp_rows": 5, "chunked_loss": True}


def build(folder: str, cp: int, more: dict[str, Any], **options: Any) -> Any:
    """Trainer with cp 0, RingTrainer otherwise."""
    model = make("llama", "ringattn" if cp else "sdpa", torch.float32, use_cache=False)
    args = Arguments(**settings(folder, **options))
    if options.get("fsdp"):
        enable_fsdp(args)
    more = {"context_parallel_size": cp, **more} if cp else {}
    data = {"data_collator": DataCollatorWithFlattening(), "train_dataset": samples(), "eval_dataset": samples()}
    return (RingTrainer if cp else Trainer)(model=model, args=args, **data, **more)


def train(folder: str, cp: int, more: dict[str, Any], **options: Any) -> Any:
    """The outcome of the steps, and the bytes of host memory."""
    with processes() as world_size:
        accumulate = 2 * max(cp, 1) // world_size
        trainer = build(folder, cp, more, gradient_accumulation_steps=accumulate, **options)
        start = {name: x.detach().clone() for name, x in trainer.model.named_parameters()}
        trainer.train()
        host = trainer.offloader.host_bytes if getattr(trainer, "offloader", None) else 0
        return outcome(trainer, start), host


@pytest.mark.parametrize(
    ("ranks", "more", "options"),
    [
        (2, BOUNDED, {}),
        (2, {"offload": 1}, {"gradient_checkpointing": True}),
        pytest.param(4, BOUNDED, FSDP, marks=OF_FIVE),
    ],
    ids=["all", "offload", "fsdp"],
)
def test_a_trainer_that_saves_memory_makes_the_steps_of_one_process(
    pool: Pools, tmp_path: Path, ranks: int, more: dict[str, Any], options: dict[str, Any]
) -> None:
    expected, _ = train(str(tmp_path), 0, {})
    for found, host_bytes in pool(ranks).run(train, str(tmp_path), 2, more, **options):
        assert_same(found, expected)
        assert host_bytes > 0


def test_offload_with_gradient_checkpointing_checkpoints_each_layer_once(tmp_path: Path) -> None:
    runs: list[int] = []
    with processes():
        trainer = build(str(tmp_path), 1, {"offload": True}, gradient_checkpointing=True, max_steps=1)
        for layer in trainer.model.model.layers:
            layer.mlp.register_forward_pre_hook(lambda *_: runs.append(1))
        trainer.train()
        assert trainer.args.gradient_checkpointing is False
    # two micro-batches, forward and second run
    assert len(runs) == 2 * 2 * len(trainer.model.model.layers)


@pytest.mark.parametrize(
    ("more", "options", "message"),
    [
        ({"offload": True}, {}, r"^offload must come with recompute"),
        ({"mlp_rows": 4}, {"torch_compile": True}, r"^recompute, offload and mlp_rows .* without torch_compile"),
        ({"recompute": "ful"}, {}, r"^recompute must be one of"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    tmp_path: Path, more: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message), processes():
        build(str(tmp_path), 1, more, **options)
