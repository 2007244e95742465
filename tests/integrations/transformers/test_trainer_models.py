"""RingTrainer makes the steps that one process makes: loss, norm of gradients, weights, with the options that people set."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    DataCollatorWithFlattening,
    EvalPrediction,
    LlamaForTokenClassification,
    Trainer,
    TrainingArguments,
)
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils.import_utils import is_liger_kernel_available

from ringattn.integrations.transformers import register
from ringattn.integrations.transformers.trainer import RingTrainer
from tests.integrations.model_table import ModelRow, works
from tests.integrations.processes import assert_same, enable_fsdp, outcome, processes, settings
from tests.integrations.trainer_rows import ROWS
from tests.integrations.transformers.models import CONFIGS, make, tokens
from tests.support.pool import Pools

FIVE = transformers.__version__.startswith("5.")
OF_FIVE = pytest.mark.skipif(
    not FIVE, reason="accelerate wants a GPU for FSDP of 4.57, which sums smoothed losses of batches"
)
FSDP = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 2}}
SMOOTHED = {"label_smoothing_factor": 0.1, "include_num_input_tokens_seen": "all"}
SMOOTHED |= {"train_sampling_strategy": "group_by_length"} if FIVE else {"group_by_length": True}


def samples(length: int | None = None) -> Any:
    """Twelve documents, by default of different lengths; most labels of some count for nothing."""
    rows = []
    for index in range(12):
        ids = tokens(length or 6 + 5 * index % 13, seed=index)[0].tolist()
        labels = [-100 if index % 3 == 0 and i > 4 else x for i, x in enumerate(ids)]
        # what is not predicted counts on 4.57 too
        rows.append({"input_ids": ids, "labels": [-100, *labels[1:]]})
    return rows


def pad(batch: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """A batch of one sample per row."""
    fills = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    rows = [{**sample, "attention_mask": [1] * len(sample["input_ids"])} for sample in batch]
    most = max(len(row["input_ids"]) for row in rows)
    return {
        name: torch.tensor([row[name] + [fill] * (most - len(row[name])) for row in rows])
        for name, fill in fills.items()
    }


def accuracy(found: EvalPrediction) -> dict[str, float]:
    """Which depends on the order of samples and tokens, and on how often each is there."""
    logits: Any = found.predictions
    labels: Any = found.label_ids
    logits, labels = logits[:, :-1], labels[:, 1:]
    seen = labels != -100
    right = (logits.argmax(-1) == labels) & seen
    places = np.arange(labels.size).reshape(labels.shape)
    return {
        "accuracy": right.sum() / seen.sum(),
        "places": (places * seen).sum() / 1e4,
        "sum": logits[seen].sum() / 1e3,
    }


class Stream(IterableDataset[Any]):
    """The samples, without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(samples())


def train(
    folder: str, kind: str, cp: int, checkpoint: str | None = None, streamed: bool = False, **options: Any
) -> Any:
    """The outcome of the steps: of Trainer with cp 0, of RingTrainer otherwise."""
    chosen = "sdpa" if kind != "gpt_oss" else "eager"
    with processes() as world_size:
        replicas = world_size // max(cp, 1)
        args = TrainingArguments(**settings(folder, gradient_accumulation_steps=2 // replicas, **options))
        if options.get("fsdp") and world_size > 1:
            enable_fsdp(args)
        model = make(kind, "ringattn" if cp else chosen, torch.float32, use_cache=False)
        start = {name: x.detach().clone() for name, x in model.named_parameters()}
        more: dict[str, Any] = {"context_parallel_size": cp} if cp else {}
        trainer = (RingTrainer if cp else Trainer)(
            model=model,
            args=args,
            # transformers lets packed documents of these see each other
            data_collator=pad
            if kind in ("gpt_oss", "modernbert") or options.get("eval_strategy")
            else DataCollatorWithFlattening(),
            # compiled code is made again for each length
            train_dataset=Stream() if streamed else samples(9 if options.get("torch_compile") else None),
            eval_dataset=samples(),
            compute_metrics=accuracy if options.get("eval_strategy") else None,
            **more,
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        return outcome(trainer, start)


@functools.cache
def expected(kind: str, *options: tuple[str, Any]) -> Any:
    return train("unused", kind, 0, **dict(options))


@pytest.mark.models
@pytest.mark.parametrize("row", [row for row in works(ROWS, "RingTrainer") if row.kind in CONFIGS], ids=str)
@pytest.mark.parametrize(("ranks", "cp"), [(1, 1), (2, 2), (4, 4), pytest.param(4, 2, marks=OF_FIVE)])
def test_steps_equal_one_process(pool: Pools, tmp_path: Path, row: ModelRow, ranks: int, cp: int) -> None:
    """On four ranks with a context parallel size of two, FSDP2 shards over all four."""
    if row.kind == "modernbert" and not FIVE:
        pytest.skip("4.x computes its attention itself")
    options = FSDP if cp < ranks else {}
    found = pool(ranks).run(train, str(tmp_path), row.kind, cp, **options)
    for mine in found:
        assert_same(mine, expected(row.kind))


def test_a_run_that_is_resumed_makes_the_steps_of_one_that_went_on(pool: Pools, tmp_path: Path) -> None:
    options: dict[str, Any] = {"include_num_input_tokens_seen": "all", "save_strategy": "steps", "save_steps": 4}
    history, moved = train(str(tmp_path / "alone"), "llama", 0, **options)
    pool(2).run(train, str(tmp_path), "llama", 2, **options)
    resumed = pool(2).run(train, str(tmp_path), "llama", 2, checkpoint=str(tmp_path / "checkpoint-4"), **options)
    for found, reached in resumed:
        # the mean loss of a resumed run is that of its own steps
        assert_same((found[:-1], reached), (history[:-1], moved))


def weights(folder: str, precision: str, cp: int) -> dict[str, Tensor]:
    return train(folder, "llama", cp, bf16=precision == "bf16")[1]


def test_bf16_on_two_ranks_is_as_near_to_fp32_as_on_one(pool: Pools, tmp_path: Path) -> None:
    exact, alone = (weights(str(tmp_path), precision, 0) for precision in ("fp32", "bf16"))
    for found in pool(2).run(weights, str(tmp_path), "bf16", 2):
        for name, x in exact.items():
            assert 0 < (found[name] - x).norm() <= 2 * (alone[name] - x).norm(), name


@pytest.mark.models
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({**SMOOTHED, "gradient_checkpointing": True}, marks=OF_FIVE),
        {"torch_compile": True, "torch_compile_backend": "eager"},
        # with steps behind the last one that is logged
        {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 5, "logging_steps": 4},
    ],
    ids=["smoothed", "compiled", "evaluated"],
)
def test_options_change_steps_as_on_one_process(pool: Pools, tmp_path: Path, options: dict[str, Any]) -> None:
    alone = train(str(tmp_path), "llama", 0, **options)
    for mine in pool(2).run(train, str(tmp_path), "llama", 2, **options):
        assert_same(mine, alone)


def test_noise_of_embeddings_is_that_of_whole_sequences(pool: Pools, tmp_path: Path) -> None:
    """Rows of a rank would get more of it, by the root of the ranks, and both ranks the same."""
    options = {"neftune_noise_alpha": 20.0, "max_steps": 3}
    alone = train(str(tmp_path), "llama", 0, **options)
    for mine in pool(2).run(train, str(tmp_path), "llama", 2, **options):
        assert_same(mine, alone)


@pytest.mark.parametrize("ranks", [2, 4])
def test_rings_of_two_ranks_read_streams_as_one_process_does(pool: Pools, tmp_path: Path, ranks: int) -> None:
    alone = train(str(tmp_path), "llama", 0, streamed=True, max_steps=4)
    for history, moved in pool(ranks).run(train, str(tmp_path), "llama", 2, streamed=True, max_steps=4):
        # without a length, epochs are counted by the samples that each process has read
        mine, theirs = (
            [{k: x for k, x in row.items() if k != "epoch"} for row in rows] for rows in (history, alone[0])
        )
        assert_same((mine, moved), (theirs, alone[1]))


def fused(self: Any, labels: Any = None, shift_labels: Any = None, skip_logits: Any = None, **kwargs: Any) -> Any:
    """As the forward that Liger gives a model (`lce_forward` of liger-kernel 0.8.5), with torch's operations."""
    rows, count = self.model(**kwargs)[0], kwargs.get("num_items_in_batch")
    if not (self.training if skip_logits is None else skip_logits):
        logits = self.lm_head(rows)
        loss = self.loss_function(logits, labels, self.config.vocab_size, shift_labels=shift_labels, **kwargs)
        return CausalLMOutput(loss=loss, logits=logits)
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    flat = (rows.flatten(0, 1) @ self.lm_head.weight.T, shift_labels.flatten())
    reduction = "mean" if count is None else "sum"
    return CausalLMOutput(loss=torch.nn.functional.cross_entropy(*flat, reduction=reduction) / (count or 1))


def train_fused(folder: str, cp: int, **options: Any) -> Any:
    def apply(model: Any, _: Any) -> None:
        model.forward = MethodType(fused, model)

    with pytest.MonkeyPatch.context() as patch:
        if not is_liger_kernel_available():
            patch.setattr(transformers.trainer, "apply_liger_kernel", apply)
        # the interpreter does not run these, to which it passes numbers of Python
        kernels = {"rms_norm": False, "swiglu": False}
        return train(folder, "llama", cp, use_liger_kernel=True, liger_kernel_config=kernels, **options)


@pytest.mark.skipif(not FIVE and not is_liger_kernel_available(), reason="4.57 has no place for a stand-in")
def test_a_loss_without_logits_on_a_ring_is_that_of_one_process(pool: Pools, tmp_path: Path) -> None:
    """With a stand-in for Liger's forward, or with liger-kernel where it is installed: on CPUs with TRITON_INTERPRET=1."""
    options = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 2, "prediction_loss_only": True}
    alone = train(str(tmp_path), "llama", 0, **options)
    for mine in pool(2).run(train_fused, str(tmp_path), 2, **options):
        assert_same(mine, alone)


def label_texts(batch: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """A batch of one sample per row, with a class each."""
    return {**pad(batch), "labels": torch.tensor([sum(sample["input_ids"]) % 3 for sample in batch])}


def right(found: EvalPrediction) -> dict[str, float]:
    scores: Any = found.predictions
    return {"right": (scores.argmax(-1) == found.label_ids).mean(), "classes": scores.sum()}


def classify(folder: str, cp: int, **options: Any) -> Any:
    """The outcome of the steps of a head that chooses the last token of each row."""
    with processes():
        register()
        config = AutoConfig.for_model(**CONFIGS["llama"], num_labels=3)
        torch.manual_seed(5)
        chosen = "ringattn" if cp else "sdpa"
        model = AutoModelForSequenceClassification.from_config(config, attn_implementation=chosen)
        start = {name: x.detach().clone() for name, x in model.named_parameters()}
        more: dict[str, Any] = {"context_parallel_size": cp, "pooling": True} if cp else {}
        trainer = (RingTrainer if cp else Trainer)(
            model=model,
            args=TrainingArguments(**settings(folder, eval_strategy="steps", eval_steps=3, **options)),
            data_collator=label_texts,
            train_dataset=samples(),
            eval_dataset=samples()[:5],  # pyright: ignore[reportArgumentType]
            compute_metrics=right,
            **more,
        )
        trainer.train()
        return outcome(trainer, start)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_heads_that_choose_rows_make_the_steps_of_one_process(pool: Pools, tmp_path: Path, smoothing: float) -> None:
    options = {"label_smoothing_factor": smoothing}
    alone = classify(str(tmp_path), 0, **options)
    for found in pool(2).run(classify, str(tmp_path), 2, **options):
        assert_same(found, alone)


class Tagger(RingTrainer):
    """As on the page of trainers."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        training = "sharding" not in inputs  # evaluations pass the rows of this rank
        part = self.shard(inputs) if training else dict(inputs)
        labels, count = part.pop("labels"), part.pop("num_items_in_batch")
        if training and num_items_in_batch is not None:  # labels of a step, counted by each rank of a ring
            count = num_items_in_batch / self.ring.world_size / self.args.world_size
        outputs = model(**part)
        loss = torch.nn.functional.cross_entropy(outputs.logits.mT, labels, reduction="sum") / count
        return (loss, outputs) if return_outputs else loss


def train_tagger(folder: str, cp: int) -> Any:
    """The outcome of a token classifier, whose losses are means over all labels of a step."""
    with processes() as world_size:
        config = AutoConfig.for_model(**CONFIGS["llama"], num_labels=3, classifier_dropout=0.0, use_cache=False)
        register()
        torch.manual_seed(5)
        model = LlamaForTokenClassification._from_config(config, attn_implementation="ringattn")
        rows = [{**row, "labels": [x if x < 0 else x % 3 for x in row["labels"]]} for row in samples()]
        chosen = {"gradient_accumulation_steps": 2 * cp // world_size, "eval_strategy": "steps", "max_steps": 2}
        trainer = Tagger(
            model=model,
            args=TrainingArguments(**settings(folder, **chosen)),
            data_collator=pad,
            train_dataset=rows,
            eval_dataset=rows[:5],
            context_parallel_size=cp,
        )
        start = {name: x.detach().clone() for name, x in model.named_parameters()}
        trainer.train()
        return outcome(trainer, start)


def test_a_loss_of_the_rows_of_a_rank_makes_the_steps_of_one_process(pool: Pools, tmp_path: Path) -> None:
    expected = train_tagger(str(tmp_path), 1)
    for found in pool(2).run(train_tagger, str(tmp_path), 2):
        assert_same(found, expected)
