"""Trainers of TRL on a ring make the steps that they make on one process: all that they log, and the weights."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, PromptTuningConfig
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.utils.import_utils import is_liger_kernel_available
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer  # pyright: ignore[reportPrivateImportUsage]

from ringattn.integrations.transformers import register
from ringattn.integrations.trl import RingDPOTrainer, RingRewardTrainer, RingSFTTrainer
from tests.integrations.model_table import ModelRow, refused, works
from tests.integrations.processes import History, assert_same, enable_fsdp, outcome, processes, settings
from tests.integrations.trainer_rows import ROWS
from tests.integrations.transformers.models import CONFIGS, make
from tests.integrations.trl.tiny import completions, margins, preferences, tokenizer
from tests.support.pool import Pools
from tests.support.scripts import run_on_ranks

STACKS: dict[str, tuple[Any, Any, Any]] = {
    "RingSFTTrainer": (SFTTrainer, RingSFTTrainer, SFTConfig),
    "RingDPOTrainer": (DPOTrainer, RingDPOTrainer, DPOConfig),
    "RingRewardTrainer": (RewardTrainer, RingRewardTrainer, RewardConfig),
}
FIVE = transformers.__version__.startswith("5.")
SMOOTHED = pytest.mark.skipif(not FIVE, reason="4.57 sums the smoothed losses of batches")
FSDP = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 2}}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 3}
ADAPTERS = {
    "lora": LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
}


def model(stack: str, kind: str, implementation: str) -> Any:
    if stack != "RingRewardTrainer":
        return make(kind, implementation, torch.float32)
    register()
    config = AutoConfig.for_model(**CONFIGS[kind], num_labels=1)
    torch.manual_seed(5)
    return AutoModelForSequenceClassification.from_config(config, attn_implementation=implementation)


def build(
    folder: str,
    stack: str,
    kind: str,
    cp: int,
    adapter: str = "",
    replicas: int = 1,
    bounded: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A trainer of TRL with cp 0, one of ours otherwise, with arguments that bound its memory."""
    theirs, ours, config = STACKS[stack]
    chosen = {"max_length": 64, "bf16": False, "gradient_checkpointing": False, **options}
    args = config(**settings(folder, gradient_accumulation_steps=2 // replicas, **chosen))
    if options.get("fsdp") and cp:
        enable_fsdp(args)
    implementation = "ringattn" if cp else "eager" if kind == "gpt_oss" else "sdpa"
    data = {"RingSFTTrainer": completions, "RingRewardTrainer": margins}.get(stack, preferences)
    more: dict[str, Any] = {"context_parallel_size": cp, **(bounded or {})} if cp else {}
    if stack == "RingDPOTrainer" and not adapter:
        more["ref_model"] = model(stack, kind, implementation)
    return (ours if cp else theirs)(
        model(stack, kind, implementation),
        args=args,
        train_dataset=data(),
        eval_dataset=data(7) if "eval_strategy" in options else None,
        processing_class=tokenizer(),
        peft_config=ADAPTERS.get(adapter),
        **more,
    )


def train(folder: str, stack: str, kind: str, cp: int, **options: Any) -> Any:
    """The outcome of the steps."""
    if kind == "gpt_oss":
        options["router_aux_loss_coef"] = 0.0
    with processes() as world_size:
        trainer = build(folder, stack, kind, cp, replicas=world_size // max(cp, 1), **options)
        start = {name: x.detach().clone() for name, x in trainer.model.named_parameters()}
        trainer.train()
        return outcome(trainer, start)


@functools.cache
def expected(stack: str, kind: str) -> Any:
    return train("unused", stack, kind, 0)


TRAINED = [
    row for stack in STACKS for row in works(ROWS, stack) if row.test.startswith("tests/integrations/trl/test_trl")
]
WIDE = [(4, 4), (4, 2)]
CASES = [
    (row, 2, 2) for row in TRAINED if FIVE or row.kind != "gemma3"
]  # TRL does not find the layers of Gemma 3 of 4.57
CASES += [(row, *ranks) for row in TRAINED if row.kind == "llama" for ranks in (WIDE if FIVE else WIDE[:1])]


@pytest.mark.models
@pytest.mark.parametrize(("row", "ranks", "cp"), CASES, ids=lambda x: getattr(x, "stack", "") + str(x))
def test_steps_equal_one_process(pool: Pools, tmp_path: Path, row: ModelRow, ranks: int, cp: int) -> None:
    """On four ranks with a context parallel size of two, FSDP2 shards over all four."""
    options = FSDP if cp < ranks else {}
    alone = expected(row.stack, row.kind)
    for found in pool(ranks).run(train, str(tmp_path), row.stack, row.kind, cp, **options):
        if cp < ranks:
            # TRL averages its metrics over batches, of which two rings have half as many, twice as large
            found, alone = ((kept(history), moved) for history, moved in (found, alone))
        assert_same(found, alone)


def kept(history: History) -> History:
    return [{name: row[name] for name in ("loss", "grad_norm", "step") if name in row} for row in history]


def test_checkpoints_in_host_memory_and_mlps_by_chunks_change_no_step(pool: Pools, tmp_path: Path) -> None:
    options = {"adapter": "lora", "gradient_checkpointing": True}
    alone = train(str(tmp_path), "RingSFTTrainer", "llama", 0, **options)
    bounded = {"offload": True, "mlp_rows": 5}
    for found in pool(2).run(train, str(tmp_path), "RingSFTTrainer", "llama", 2, bounded=bounded, **options):
        assert_same(found, alone)


@pytest.mark.models
@pytest.mark.parametrize(
    ("stack", "options"),
    [
        ("RingSFTTrainer", {"adapter": "lora", "gradient_checkpointing": True, **EVALUATED}),
        ("RingSFTTrainer", {"packing": True, "max_length": 20, "loss_type": "dft"}),
        pytest.param(
            "RingSFTTrainer",
            {"label_smoothing_factor": 0.1, "completion_only_loss": False, **EVALUATED},
            marks=SMOOTHED,
        ),
        ("RingDPOTrainer", {"adapter": "lora", "loss_type": ["sigmoid", "ipo"], "ld_alpha": 0.5, **EVALUATED}),
        ("RingRewardTrainer", {"adapter": "lora", "center_rewards_coefficient": 0.1, **EVALUATED}),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_options_change_steps_as_on_one_process(
    pool: Pools, tmp_path: Path, stack: str, options: dict[str, Any]
) -> None:
    alone = train(str(tmp_path), stack, "llama", 0, **options)
    for found in pool(2).run(train, str(tmp_path), stack, "llama", 2, **options):
        assert_same(found, alone)


def attention_of_a_path(folder: str) -> str:
    """The attention of a model that TRL has made from its folder."""
    with processes():
        if dist.get_rank() == 0:
            make("llama", "sdpa", torch.float32).save_pretrained(folder)
        dist.barrier()
        args = SFTConfig(**settings(folder, bf16=False, gradient_checkpointing=False))
        options: dict[str, Any] = {"train_dataset": completions(), "processing_class": tokenizer()}
        made: Any = RingSFTTrainer(folder, args=args, context_parallel_size=2, **options).model
        return made.config._attn_implementation


def test_a_model_that_is_given_as_a_path_attends_around_the_ring(pool: Pools, tmp_path: Path) -> None:
    assert pool(2).run(attention_of_a_path, str(tmp_path)) == ["ringattn", "ringattn"]


def refusal(folder: str, stack: str, kind: str) -> str:
    options: dict[str, Any] = {
        "router": {},
        "prompt": {"adapter": "prompt"},
    }[kind]
    with processes(), pytest.raises(NotImplementedError) as raised:
        build(folder, stack, "gpt_oss" if kind == "router" else "llama", 2, **options)
    return str(raised.value)


@pytest.mark.parametrize("row", [row for stack in STACKS for row in refused(ROWS, stack)], ids=str)
def test_what_is_refused_is_refused_on_every_rank(pool: Pools, tmp_path: Path, row: ModelRow) -> None:
    for told in pool(2).run(refusal, str(tmp_path), row.stack, row.kind):
        assert told.startswith(row.refusal)


@pytest.mark.models
def test_the_example_learns_on_two_ranks_what_one_process_learns() -> None:
    printed = run_on_ranks("trl_sft")
    assert "2 process(es)" in printed
    losses = printed.splitlines()[-1].rpartition(": ")[2].split()
    assert [float(x) for x in losses] == pytest.approx([6.3899, 6.3225, 6.2775, 6.2597], abs=2e-4)


def evaluation(folder: str, stack: str, cp: int) -> dict[str, float]:
    """Loss and metrics of seven samples, the second time."""
    with processes():
        trainer = build(folder, stack, "llama", cp, per_device_eval_batch_size=2, eval_strategy="steps")
        trainer.evaluate()
        found = trainer.evaluate()
        return {name: x for name, x in found.items() if "_per_second" not in name and "time" not in name}


@pytest.mark.filterwarnings("ignore:samples to evaluate should be full batches")
@pytest.mark.parametrize("stack", STACKS)
def test_samples_that_rings_cannot_share_evenly_are_evaluated_as_on_one_process(
    pool: Pools, tmp_path: Path, stack: str
) -> None:
    wanted = evaluation(str(tmp_path), stack, 0)
    for found in pool(4).run(evaluation, str(tmp_path), stack, 2):
        if stack == "RingSFTTrainer":  # its metrics are means of batches, of which two rings have half as many
            found, wanted = ({"eval_loss": x["eval_loss"]} for x in (found, wanted))
        assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.skipif(not is_liger_kernel_available(), reason="needs liger-kernel, on CPUs with TRITON_INTERPRET=1")
def test_layers_of_liger_on_a_ring_make_the_steps_of_one_process(pool: Pools, tmp_path: Path) -> None:
    alone = train(str(tmp_path), "RingSFTTrainer", "llama", 0, **EVALUATED)
    # the interpreter does not run these, to which it passes numbers of Python
    liger = {"use_liger_kernel": True, "liger_kernel_config": {"rms_norm": False, "swiglu": False}}
    for found in pool(2).run(train, str(tmp_path), "RingSFTTrainer", "llama", 2, **EVALUATED, **liger):
        assert_same(found, alone)


def refused_liger(folder: str) -> str:
    with processes(), pytest.raises(NotImplementedError, match="use_liger_kernel must come with") as refused:
        build(folder, "RingRewardTrainer", "llama", 2, use_liger_kernel=True)
    return str(refused.value)


@pytest.mark.skipif(not FIVE, reason="4.57 asks for liger-kernel itself, and earlier")
def test_liger_is_refused_where_the_loss_reads_other_outputs(pool: Pools, tmp_path: Path) -> None:
    assert all("got it with RingRewardTrainer" in told for told in pool(2).run(refused_liger, str(tmp_path)))
