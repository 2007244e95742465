"""axolotl's trainer on a ring makes the steps that it makes on one process.

axolotl is no dependency, and no stage of the tests installs it. docs/verl.md has the command that runs these.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

pytest.importorskip("axolotl")

from axolotl.core.trainers.base import AxolotlTrainer  # pyright: ignore[reportMissingImports]
from axolotl.core.training_args import AxolotlTrainingArguments  # pyright: ignore[reportMissingImports]
from axolotl.utils.dict import DictDefault  # pyright: ignore[reportMissingImports]

from ringattn.integrations.axolotl import RingPlugin
from tests.integrations.processes import assert_same, outcome, processes, settings
from tests.integrations.transformers.models import make
from tests.integrations.transformers.test_trainer_models import samples
from tests.support.pool import Pools


class Packed:
    """Collator of packed samples as axolotl's: positions restart, and the mask numbers the samples."""

    def __call__(self, batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        rows = [sample["input_ids"] for sample in batch]
        ids = torch.tensor([x for row in rows for x in row])[None]
        numbers = torch.tensor([i for i, row in enumerate(rows, 1) for _ in row])[None]
        positions = torch.tensor([i for row in rows for i in range(len(row))])[None]
        labels = torch.where(positions == 0, -100, ids)
        return {"input_ids": ids, "labels": labels, "position_ids": positions, "attention_mask": numbers}


def train(folder: str, ring: dict[str, Any], packed: bool) -> Any:
    """The outcome of the steps: of AxolotlTrainer without ring_size."""
    with processes() as world_size:
        cfg, plugin = DictDefault(ring), RingPlugin()
        size = ring.get("ring_size", 0)
        model = make("llama", "sdpa", torch.float32, use_cache=False)
        if size:
            plugin.pre_model_load(cfg)
            plugin.post_model_build(cfg, model)
        trainer_class = plugin.get_trainer_cls(cfg) if size else AxolotlTrainer
        start = {name: x.detach().clone() for name, x in model.named_parameters()}
        accumulate = 2 * max(size, 1) // world_size
        args = AxolotlTrainingArguments(**settings(folder, gradient_accumulation_steps=accumulate))

        def pad(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
            if packed:
                # sdpa keeps documents apart by positions where there is no mask
                made = Packed()(batch)
                return made if size else {name: x for name, x in made.items() if name != "attention_mask"}
            longest = max(len(x["input_ids"]) for x in batch)
            rows = [x["input_ids"] + [0] * (longest - len(x["input_ids"])) for x in batch]
            mask = torch.tensor([[1] * len(x["input_ids"]) + [0] * (longest - len(x["input_ids"])) for x in batch])
            ids = torch.tensor(rows)
            return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

        trainer = trainer_class(model=model, args=args, train_dataset=Dataset.from_list(samples()), data_collator=pad)
        trainer.axolotl_cfg = cfg
        trainer.train()
        return outcome(trainer, start)


@pytest.mark.parametrize("packed", [False, True])
def test_steps_on_a_ring_are_those_of_one_process(pool: Pools, tmp_path: Path, packed: bool) -> None:
    expected = train(str(tmp_path), {}, packed)
    ring = {"ring_size": 2, "ring_recompute": "selective", "ring_offload": True, "ring_mlp_rows": 5}
    for found in pool(2).run(train, str(tmp_path), ring, packed):
        assert_same(found, expected)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rl": "dpo"}, NotImplementedError, "a job on a ring must be supervised training .*got rl"),
        ({"context_parallel_size": 2}, ValueError, "context_parallel_size must be 1 with ring_size, got 2"),
    ],
)
def test_other_jobs_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        RingPlugin().pre_model_load(DictDefault({"ring_size": 2, **options}))


def test_axolotl_finds_the_plugin_and_its_options() -> None:
    from axolotl.integrations.base import load_plugin  # pyright: ignore[reportMissingImports]

    plugin = load_plugin("ringattn.integrations.axolotl.RingPlugin")
    assert type(plugin) is RingPlugin
    module, _, name = plugin.get_input_args().rpartition(".")
    assert module == "ringattn.integrations.axolotl"
    assert name == "RingArgs"
