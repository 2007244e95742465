"""KTO and ORPO on a ring, and references that are computed before training, make the steps of one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, load_from_disk
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer  # pyright: ignore[reportPrivateImportUsage]
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from ringattn.integrations.trl import RingDPOTrainer, RingKTOTrainer, RingORPOTrainer
from tests.integrations.model_table import ModelRow, works
from tests.integrations.processes import assert_same, outcome, processes, settings
from tests.integrations.trainer_rows import ROWS
from tests.integrations.transformers.models import make
from tests.integrations.trl.tiny import preferences, text, tokenizer
from tests.support.pool import Pools

STACKS: dict[str, tuple[Any, Any, Any]] = {
    "RingDPOTrainer": (DPOTrainer, RingDPOTrainer, DPOConfig),
    "RingKTOTrainer": (KTOTrainer, RingKTOTrainer, KTOConfig),
    "RingORPOTrainer": (ORPOTrainer, RingORPOTrainer, ORPOConfig),
}


def judged(count: int = 12) -> Dataset:
    """Prompts with completions that are good or bad."""
    return Dataset.from_list(
        [
            {"prompt": text(3 + i % 4, i), "completion": " " + text(4 + 5 * i % 13, 100 + i), "label": i % 3 > 0}
            for i in range(count)
        ]
    )


def train(
    folder: str,
    stack: str,
    cp: int,
    *,
    lora: bool = False,
    without: str = "",
    judged_only: bool = False,
    **options: Any,
) -> Any:
    """The outcome of the steps: of TRL's trainer with cp 0, of ours otherwise; or what eleven samples are evaluated to."""
    theirs, ours, config = STACKS[stack]
    chosen = {"max_length": 64, "bf16": False, "gradient_checkpointing": False, **options}
    with processes():
        implementation = "ringattn" if cp else "sdpa"
        data: Any = judged() if stack == "RingKTOTrainer" else preferences()
        if (stored := Path(folder) / f"data{cp}").exists():
            # TRL hands the numbers of references from rank to rank in a file beside the data
            data = load_from_disk(stored)
        model = make("llama", implementation, torch.float32)
        start: dict[str, Any] = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if lora else None}
        if stack != "RingORPOTrainer" and not lora:
            start["ref_model"] = make("llama", implementation, torch.float32)
            with torch.no_grad():
                start["ref_model"].get_output_embeddings().weight.mul_(2)
        trainer = (ours if cp else theirs)(
            model,
            args=config(**settings(folder, **chosen)),
            train_dataset=data,
            eval_dataset=data.select(range(11 if judged_only else 12)) if "eval_strategy" in options else None,
            processing_class=tokenizer(),
            **start,
            **({"context_parallel_size": cp} if cp else {}),
        )
        if judged_only:
            return {name: x for name, x in trainer.evaluate().items() if not re.search("per_second|time|logits", name)}
        before = {name: x.detach().clone() for name, x in trainer.model.named_parameters()}
        trainer.train()
        history, moved = outcome(trainer, before)
        return [{k: x for k, x in row.items() if not without or without not in k} for row in history], moved


EVALUATED = {"eval_strategy": "steps", "eval_steps": 3}
# ORPOTrainer averages logits of padding, too; the sign of a difference of equal numbers is that of its rounding
CASES: list[tuple[str, dict[str, Any]]] = [
    ("RingKTOTrainer", {}),
    ("RingKTOTrainer", {"loss_type": "apo_zero_unpaired", "lora": True, **EVALUATED}),
    ("RingKTOTrainer", {"precompute_ref_log_probs": True, "per_device_train_batch_size": 3}),
    ("RingORPOTrainer", {"without": "logits/"}),
    ("RingORPOTrainer", {"lora": True, "without": "logits/", **EVALUATED}),
    ("RingDPOTrainer", {"precompute_ref_log_probs": True, **EVALUATED}),
    ("RingDPOTrainer", {"precompute_ref_log_probs": True, "lora": True, "without": "accuracies"}),
]


@pytest.mark.models
@pytest.mark.parametrize(
    ("row", "options"),
    [(row, options) for stack, options in CASES for row in works(ROWS, stack) if "test_preferences" in row.test],
    ids=lambda x: x.stack if isinstance(x, ModelRow) else "-".join(x) or "plain",
)
def test_steps_on_two_ranks_equal_one_process(
    pool: Pools, tmp_path: Path, row: ModelRow, options: dict[str, Any]
) -> None:
    stack = row.stack
    for cp in (0, 2):
        (judged() if stack == "RingKTOTrainer" else preferences()).save_to_disk(tmp_path / f"data{cp}")
    alone = train(str(tmp_path), stack, 0, **options)
    for found in pool(2).run(train, str(tmp_path), stack, 2, **options):
        assert_same(found, alone)


@pytest.mark.filterwarnings("ignore:samples to evaluate should be full batches")
@pytest.mark.models
@pytest.mark.parametrize("stack", ["RingKTOTrainer", "RingORPOTrainer"])
def test_samples_that_rings_cannot_share_evenly_are_evaluated_as_on_one_process(
    pool: Pools, tmp_path: Path, stack: str
) -> None:
    options = {"eval_strategy": "steps", "judged_only": True}
    wanted = train(str(tmp_path), stack, 0, **options)
    for found in pool(4).run(train, str(tmp_path), stack, 2, **options):
        assert found == pytest.approx(wanted, rel=1e-5)


def refusal(folder: str) -> str:
    with pytest.raises(ValueError, match="save_to_disk") as raised:
        train(folder, "RingDPOTrainer", 2, precompute_ref_log_probs=True)
    return str(raised.value)


def test_references_of_a_dataset_in_memory_are_refused_on_every_rank(pool: Pools, tmp_path: Path) -> None:
    assert all("a dataset must be on disk" in told for told in pool(2).run(refusal, str(tmp_path)))
