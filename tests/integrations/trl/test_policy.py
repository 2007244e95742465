"""GRPO and RLOO on a ring make the steps that TRL makes on one process, from the same rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer  # pyright: ignore[reportPrivateImportUsage]

from ringattn.integrations.transformers import register
from ringattn.integrations.trl import RingGRPOTrainer, RingRLOOTrainer
from tests.integrations.model_table import ModelRow, refused, works
from tests.integrations.processes import assert_same, enable_fsdp, outcome, processes, settings
from tests.integrations.trainer_rows import ROWS
from tests.integrations.transformers.models import VOCAB, make
from tests.integrations.trl.tiny import text, tokenizer
from tests.support.pool import Pools

STACKS: dict[str, tuple[Any, Any, Any]] = {
    "RingGRPOTrainer": (GRPOTrainer, RingGRPOTrainer, GRPOConfig),
    "RingRLOOTrainer": (RLOOTrainer, RingRLOOTrainer, RLOOConfig),
}
GRPO = "RingGRPOTrainer"
FSDP = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 2}}


def prompts(first: int = 0) -> Dataset:
    """Prompts of different lengths."""
    return Dataset.from_list([{"prompt": text(4 + i % 5, first + i)} for i in range(12)])


def reward(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """The share of low tokens; nothing for some lengths."""
    return [None if len(x) % 7 == 6 else sum(t < VOCAB / 3 for t in x) / len(x) for x in completion_ids]


def length(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """How near a rollout is to five tokens."""
    return [-abs(len(x) - 5) / 10 for x in completion_ids]


def fixed(given: list[str], trainer: Any) -> dict[str, Any]:
    """Rollouts that depend on the prompts, and on the step, alone; the ranks of a ring would have other ones."""
    ids = [trainer.processing_class(x)["input_ids"] for x in given]
    draw = torch.Generator().manual_seed(trainer.state.global_step)
    lengths = torch.randint(3, 11, (len(ids),), generator=draw).tolist()
    answers = [torch.randint(3, VOCAB, (n,), generator=draw).tolist() for n in lengths]
    torch.rand(3)  # draws on this rank alone
    return {"prompt_ids": ids, "completion_ids": answers, "logprobs": [[0.0] * n for n in lengths]}


def build(folder: str, stack: str, cp: int, replicas: int = 1, **options: Any) -> Any:
    """A trainer of TRL with cp 0, one of ours otherwise."""
    theirs, ours, config = STACKS[stack]
    more: dict[str, Any] = {x: options.pop(x) for x in ("rollout_func", "peft_config", "tools") if x in options}
    chosen = {
        "num_generations": 4,
        "max_completion_length": 10,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": 4,
        "bf16": False,
        "gradient_checkpointing": False,
        **options,
    }
    args = config(**settings(folder, **{"gradient_accumulation_steps": 2 // replicas, **chosen}))
    if options.get("fsdp") and cp:
        enable_fsdp(args)
    more |= {"context_parallel_size": cp} if cp else {}
    register()
    # the reference is read from where the policy is from
    model = AutoModelForCausalLM.from_pretrained(
        f"{folder}/policy", attn_implementation="ringattn" if cp else "sdpa", dtype=torch.float32
    )
    return (ours if cp else theirs)(
        model,
        reward_funcs=[reward, length],
        args=args,
        train_dataset=prompts(),
        eval_dataset=prompts(50).select(range(4)) if "eval_strategy" in options else None,
        processing_class=tokenizer(),
        **more,
    )


def train(folder: str, stack: str, cp: int, checkpoint: str | None = None, **options: Any) -> Any:
    """The outcome of the steps."""
    with processes() as world_size:
        trainer = build(folder, stack, cp, replicas=world_size // max(cp, 1), **options)
        start = {name: x.detach().clone() for name, x in trainer.model.named_parameters()}
        trainer.train(resume_from_checkpoint=checkpoint)
        history, moved = outcome(trainer, start)
        # TRL logs None where nothing was scored
        return [{name: -1.0 if x is None else x for name, x in row.items()} for row in history], moved


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder with a policy whose rollouts differ."""
    model = make("llama", "sdpa", torch.float32)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    model.save_pretrained(tmp_path / "policy")
    return str(tmp_path)


LORA = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}
CASES: list[tuple[str, dict[str, Any]]] = [
    # at the usual learning rate, 0.1, its loss grows to 1e12, and roundings to 1e-4 of it
    (GRPO, {"rollout_func": fixed, "beta": 0.1, "num_iterations": 2, "epsilon_high": 0.28, "learning_rate": 0.01}),
    (
        GRPO,
        {"beta": 0.05, "importance_sampling_level": "sequence", "loss_type": "grpo", "scale_rewards": "batch", **LORA},
    ),
    (
        GRPO,
        {"top_entropy_quantile": 0.5, "mask_truncated_completions": True, "eval_strategy": "steps", "eval_steps": 2},
    ),
    ("RingRLOOTrainer", {"beta": 0.1, "num_iterations": 2, "normalize_advantages": True}),
]


@pytest.mark.models
@pytest.mark.parametrize(
    ("row", "options"),
    [(row, options) for stack, options in CASES for row in works(ROWS, stack)],
    ids=lambda x: x.stack if isinstance(x, ModelRow) else "-".join(x),
)
def test_steps_on_two_ranks_equal_one_process(pool: Pools, folder: str, row: ModelRow, options: dict[str, Any]) -> None:
    alone = train(folder, row.stack, 0, **options)
    for found in pool(2).run(train, folder, row.stack, 2, **options):
        assert_same(found, alone)


@pytest.mark.models
def test_two_rings_share_the_groups_of_a_batch_and_the_weights_of_fsdp(pool: Pools, folder: str) -> None:
    """A group of four rollouts is on two rings of two ranks, and FSDP2 shards over all four."""
    options = {"per_device_train_batch_size": 2, "scale_rewards": "batch", "rollout_func": by_place, "beta": 0.1}
    alone = train(folder, GRPO, 0, **options)
    for history, moved in pool(4).run(train, folder, GRPO, 2, **options, **FSDP):
        # metrics of a batch are means over two batches on one process
        assert_same((kept(history), moved), (kept(alone[0]), alone[1]))


def by_place(given: list[str], trainer: Any) -> dict[str, Any]:
    """Rollouts that depend on the places of prompts in all rings, and on the step."""
    found: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
    for i, prompt in enumerate(given, trainer.accelerator.process_index * len(given)):
        ids = trainer.processing_class(prompt)["input_ids"]
        draw = torch.Generator().manual_seed(i + 100 * trainer.state.global_step)
        answer = torch.randint(3, VOCAB, (4 + i % 3,), generator=draw).tolist()
        found["prompt_ids"].append(ids)
        found["completion_ids"].append(answer)
        found["logprobs"].append([0.0] * len(answer))
    return found


def kept(history: Any) -> Any:
    return [{name: row[name] for name in ("loss", "grad_norm", "step", "reward") if name in row} for row in history]


@pytest.mark.models
def test_a_run_goes_on_with_another_number_of_ranks(pool: Pools, folder: str) -> None:
    options = {"rollout_func": fixed, "beta": 0.1, "lr_scheduler_type": "constant", "learning_rate": 0.02}
    alone = train(folder, GRPO, 0, **options)
    pool(2).run(train, folder, GRPO, 2, **options, save_strategy="steps", save_steps=2, max_steps=2)
    for cp in (3, 1):
        for history, moved in pool(cp).run(train, folder, GRPO, cp, f"{folder}/checkpoint-2", **options):
            # the last row has the mean over a run; rollouts are shuffled by the generator, which is in a file per process
            assert_same((kept(history[-3:-1]), moved), (kept(alone[0][-3:-1]), alone[1]))


def refusal(folder: str, options: dict[str, Any]) -> str:
    with processes(), pytest.raises((NotImplementedError, ValueError)) as raised:
        build(folder, GRPO, 2, **options)
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize("row", refused(ROWS, GRPO), ids=str)
def test_options_are_refused_on_every_rank(pool: Pools, folder: str, row: ModelRow) -> None:
    for told in pool(2).run(refusal, folder, {row.kind: [print] if row.kind == "tools" else True}):
        assert told.startswith(f"NotImplementedError: {row.refusal}")


@pytest.mark.parametrize(
    ("named", "options"),
    [
        ("num_generations", {"per_device_train_batch_size": 3, "num_generations": 4}),
        ("num_generations_eval", {"per_device_eval_batch_size": 2, "eval_strategy": "steps", "eval_steps": 3}),
    ],
)
def test_groups_that_a_ring_does_not_hold_whole_are_refused(
    pool: Pools, folder: str, named: str, options: dict[str, Any]
) -> None:
    """TRL's own check counts the ranks of a ring as if they had other rollouts."""
    for told in pool(2).run(refusal, folder, options):
        assert told.startswith(f"ValueError: {named} must divide the rollouts of a batch")


def failing(given: list[str], trainer: Any) -> Any:
    raise OSError(f"no server for {len(given)} prompts of {type(trainer).__name__}")


def failure(folder: str) -> str:
    with processes(), pytest.raises((OSError, ValueError)) as raised:
        train(folder, GRPO, 2, rollout_func=failing)
    return str(raised.value)


def test_a_rollout_that_fails_on_the_first_rank_raises_on_all(pool: Pools, folder: str) -> None:
    for told in pool(2).run(failure, folder):
        assert "no server for 8 prompts" in told


@pytest.mark.models
def test_rings_that_gather_weights_wait_for_each_others_answers(pool: Pools, folder: str) -> None:
    """With FSDP2 all ranks must make as many calls of the model, and answers of two rings end at different tokens."""
    options = {"per_device_train_batch_size": 2, "num_generations": 2, "max_steps": 3}
    options |= {"generation_kwargs": {"eos_token_id": list(range(2, VOCAB // 2))}}
    whole = pool(4).run(train, folder, GRPO, 2, **options)[0]
    assert len({row["completions/mean_length"] for row in whole[0][:-1]}) > 1
    for found in pool(4).run(train, folder, GRPO, 2, **options, **FSDP):
        assert_same(found, whole)


def train_offloaded(folder: str) -> Any:
    """The outcome of steps with FSDP, whose weights are said to be elsewhere between calls, as CPU offload has them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "device", torch.device("meta"))
        return train(folder, GRPO, 2, **FSDP)


@pytest.mark.models
def test_sharded_weights_generate_what_whole_ones_do(pool: Pools, folder: str) -> None:
    alone = train(folder, GRPO, 0)
    for found in pool(2).run(train_offloaded, folder):
        assert_same(found, alone)
