"""Trainer on a ring: the same loss curve and the same parameters as one process, with only what it reads changed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate.data_loader import BatchSamplerShard
from accelerate.utils import ParallelismConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, Dataset, IterableDataset
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from ringattn import Ring
from ringattn.integrations.transformers import RingCollator, register
from ringattn.integrations.transformers.trainer import RingTrainer
from tests.integrations.processes import processes
from tests.integrations.transformers.models import make, tokens
from tests.support.pool import Pools

FIVE = transformers.__version__.startswith("5.")


class Samples(Dataset[dict[str, list[int]]]):
    """Eleven documents of different lengths; most labels of some count for nothing."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        ids = tokens(6 + 5 * index % 13, seed=index)[0].tolist()
        labels = [-100 if index % 3 == 0 and i > 4 else x for i, x in enumerate(ids)]
        return {"input_ids": ids, "labels": labels}


def arguments(folder: str, **options: Any) -> TrainingArguments:
    settings = {
        "output_dir": folder,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 0.3,
        "optim": "sgd",
        "logging_steps": 1,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
        "prediction_loss_only": True,
        "remove_unused_columns": False,
    }
    return TrainingArguments(**{**settings, **options})


def train(
    folder: str, cp: int, implementation: str, **options: Any
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """The losses that are logged, and the parameters at the end."""
    with processes() as world_size:
        ring = Ring()
        if world_size > 1:
            ring = Ring(init_device_mesh("cpu", (world_size // cp, cp), mesh_dim_names=("dp", "cp"))["cp"])
        collator = DataCollatorWithFlattening()
        ringed = implementation == "ringattn"
        trainer = (RingTrainer if ringed else Trainer)(
            # with a cache, which 4.57 makes in training too, transformers does not see that documents are packed
            model=make("llama", implementation, torch.float32, use_cache=False),
            args=arguments(folder, **options),
            data_collator=RingCollator(collator, ring) if ringed else collator,
            train_dataset=Samples(),
            eval_dataset=Samples(),
        )
        trainer.train()
    assert trainer.model is not None
    kept = ("loss", "eval_loss", "grad_norm", "epoch")
    history = [{name: row[name] for name in kept if name in row} for row in trainer.state.log_history[:-1]]
    return history, {name: x.detach().clone() for name, x in trainer.model.named_parameters()}


def assert_same(found: tuple[list[dict[str, float]], dict[str, Tensor]], expected: Any) -> None:
    assert len(expected[0]) >= 6
    assert [row.keys() for row in found[0]] == [row.keys() for row in expected[0]]
    for mine, theirs in zip(found[0], expected[0], strict=True):
        # the history is rounded to four digits
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-4)
    start = dict(make("llama", "sdpa", torch.float32).named_parameters())
    for name, x in expected[1].items():
        moved = (x - start[name]).norm()
        assert moved > 0, name
        assert (found[1][name] - x).norm() < 1e-4 * moved, name


def test_two_ranks_that_recompute_train_as_one_process_does(pool: Pools, tmp_path: Path) -> None:
    folder = str(tmp_path)
    expected = train(folder, 1, "sdpa")
    for found in pool(2).run(train, folder, 2, "ringattn", gradient_checkpointing=True):
        assert_same(found, expected)


def test_two_rings_of_two_train_as_one_process_on_twice_the_batch(pool: Pools, tmp_path: Path) -> None:
    # twelve samples would be even: the last batches are filled up from the first ones, as accelerate does for any two replicas
    options = {"max_steps": 2, "num_train_epochs": 1, "eval_strategy": "no"}
    expected = train(str(tmp_path), 1, "sdpa", **{**options, "gradient_accumulation_steps": 2})
    found = pool(4).run(train, str(tmp_path), 2, "ringattn", **{**options, "gradient_accumulation_steps": 1})
    assert [row["loss"] for row in found[0][0]] == pytest.approx([row["loss"] for row in expected[0]], abs=1e-4)
    for name, x in expected[1].items():
        for _, parameters in found:
            torch.testing.assert_close(parameters[name], x, rtol=1e-4, atol=1e-5)


def build(
    folder: str,
    collator: Any = None,
    implementation: str = "ringattn",
    data: Any = None,
    model: Any = None,
    **options: Any,
) -> RingTrainer:
    extras = {name: options.pop(name) for name in ("compute_metrics", "compute_loss_func") if name in options}
    collator = RingCollator(DataCollatorWithFlattening(), Ring()) if collator is None else collator
    return RingTrainer(
        model=make("llama", implementation, torch.float32) if model is None else model,
        args=arguments(folder, **options),
        data_collator=collator,
        train_dataset=data or Samples(),
        eval_dataset=Samples(),
        **extras,
    )


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"average_tokens_across_devices": False}, "average_tokens_across_devices must"),
        ({"compute_loss_func": len}, "compute_loss_func must"),
    ],
)
def test_options_that_would_see_a_shard_are_refused(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=match):
        build(str(tmp_path), **options)


def construct(folder: str, **options: Any) -> RingTrainer:
    """A trainer with the arguments of Trainer alone."""
    given = {name: options.pop(name) for name in ("ring", "context_parallel_size", "data_collator") if name in options}
    args = arguments(folder, eval_strategy="no", **options)
    return RingTrainer(make("llama", "ringattn", torch.float32), args, **given)


def test_a_trainer_gets_its_ring_from_one_argument(tmp_path: Path) -> None:
    ring = Ring()
    with pytest.raises(ValueError, match="RingTrainer must get its ring from one argument, got none"):
        construct(str(tmp_path))
    with pytest.raises(ValueError, match="got ring and a RingCollator"):
        construct(str(tmp_path), ring=ring, data_collator=RingCollator(DataCollatorWithFlattening(), ring))
    with pytest.raises(ValueError, match="context_parallel_size must"):
        construct(str(tmp_path), context_parallel_size=2)
    assert construct(str(tmp_path), context_parallel_size=1).ring.world_size == 1
    assert construct(str(tmp_path), ring=ring).ring is ring


def test_context_parallelism_of_accelerate_is_refused_with_the_argument_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "parallelism_config must"
    with pytest.raises(NotImplementedError, match=told):
        construct(str(tmp_path), context_parallel_size=1, parallelism_config=ParallelismConfig(cp_size=2))
    # as `accelerate launch` passes it on
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    with pytest.raises(NotImplementedError, match=told):
        construct(str(tmp_path), context_parallel_size=1)
    monkeypatch.delenv("PARALLELISM_CONFIG_CP_SIZE")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "4")
    with pytest.raises(NotImplementedError, match="must leave tp_size at 1, got 4: layers would be split"):
        construct(str(tmp_path), context_parallel_size=1)


def test_a_model_that_does_not_attend_around_the_ring_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="must attend with ringattn, got LlamaForCausalLM, which did not"):
        build(str(tmp_path), implementation="sdpa").train()


def test_a_model_with_the_name_and_its_own_attention_gets_another_message(tmp_path: Path) -> None:
    register()
    config = transformers.OpenAIGPTConfig(vocab_size=61, n_positions=64, n_embd=16, n_layer=1, n_head=2)
    model = transformers.OpenAIGPTLMHeadModel._from_config(config, attn_implementation="ringattn")
    with pytest.raises(RuntimeError, match="got OpenAIGPTLMHeadModel, which takes the name and attends by itself"):
        build(str(tmp_path), model=model).train()


class Wrapped(nn.Module):
    """A model that is a part of a module without a config, which Trainer takes too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **kwargs: Any) -> Any:
        return self.model(**kwargs)


def test_a_module_without_a_config_that_does_not_attend_around_the_ring_is_refused(tmp_path: Path) -> None:
    register()
    config = transformers.AutoConfig.for_model("gpt2", n_positions=64, n_embd=16, n_layer=1, n_head=2, vocab_size=300)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with pytest.raises(RuntimeError, match="must attend with ringattn, got Wrapped, which did not"):
        build(str(tmp_path), model=Wrapped(model), max_steps=3).train()


@pytest.mark.parametrize("wraps", [False, True], ids=["model", "part"])
@pytest.mark.parametrize("positions", [18, 17])
def test_sequences_beyond_the_positions_that_a_model_learned_are_refused(
    tmp_path: Path, positions: int, wraps: bool
) -> None:
    """The longest of the samples has 18 tokens, and others stand in front of it."""
    register()
    sizes = {"n_positions": positions, "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 300}
    config = transformers.AutoConfig.for_model("gpt2", **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="ringattn")
    trainer = build(str(tmp_path), model=Wrapped(model) if wraps else model, max_steps=3)
    name = "Wrapped" if wraps else "GPT2LMHeadModel"
    refused = pytest.raises(
        ValueError, match=rf"at most 17 tokens, the positions that {name} has learned, got one of 18"
    )
    with refused if positions == 17 else contextlib.nullcontext():
        trainer.train()


def drawn(folder: str, cp: int) -> list[float]:
    """Random numbers that a worker of the DataLoader draws when it begins."""
    with processes() as world_size:
        ring = Ring()
        if world_size > 1:
            ring = Ring(init_device_mesh("cpu", (world_size // cp, cp), mesh_dim_names=("dp", "cp"))["cp"])
        trainer = build(folder, RingCollator(DataCollatorWithFlattening(), ring), dataloader_num_workers=1)
        begin = trainer.get_train_dataloader().worker_init_fn
        assert begin is not None
        torch.manual_seed(0)
        begin(0)
        return torch.rand(4).tolist()


def test_workers_of_a_ring_draw_the_same(pool: Pools, tmp_path: Path) -> None:
    """Each rank would cut its rows out of another random crop, which nobody compares in workers."""
    alone = drawn(str(tmp_path), 1)
    assert pool(2).run(drawn, str(tmp_path), 2) == [alone, alone]
    first, second, third, fourth = pool(4).run(drawn, str(tmp_path), 2)
    assert first == second == alone
    assert third == fourth != alone


def average(logits: Tensor, labels: Tensor, shift_labels: Tensor | None = None, **_: Any) -> Tensor:
    """A loss that does not look at num_items_in_batch."""
    labels = labels if shift_labels is None else shift_labels
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def average_labels(folder: str, training: bool) -> str:
    with processes():
        trainer = build(folder)
        model: Any = trainer.model
        model.loss_function = average
        try:
            return str(trainer.train().metrics if training else trainer.evaluate())
        except NotImplementedError as error:
            return str(error)


@pytest.mark.parametrize("training", [True, False])
def test_a_loss_that_is_averaged_over_the_labels_of_a_shard_is_refused(
    pool: Pools, tmp_path: Path, training: bool
) -> None:
    """It was taken for a share of the loss: twice as large, and wrong where ranks have different numbers of labels."""
    assert "loss" in average_labels(str(tmp_path), training), "one rank has all labels"
    for told in pool(2).run(average_labels, str(tmp_path), training):
        assert told.startswith(
            "the loss must be divided by num_items_in_batch where ranks share a sequence, got that of Llama"
        )


def build_shared(folder: str, name: str, value: Any) -> str:
    with processes():
        try:
            return repr(getattr(build(folder, **{name: value}).args, name))
        except NotImplementedError as error:
            return str(error)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param("train_sampling_strategy", "batch_rebalance", marks=pytest.mark.skipif(not FIVE, reason="of 5.x")),
        ("eval_use_gather_object", True),
    ],
)
def test_options_that_would_see_a_shard_as_a_batch_are_refused(
    pool: Pools, tmp_path: Path, name: str, value: Any
) -> None:
    assert build_shared(str(tmp_path), name, value) == repr(value), "one rank has the whole batch"
    for told in pool(2).run(build_shared, str(tmp_path), name, value):
        assert told.startswith(f"{name} must be ")
        assert "where ranks share a sequence" in told


class Stream(IterableDataset[Any]):
    """Samples without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter([Samples()[0]])


def refused_streams(folder: str) -> list[str]:
    """Errors of a stream that one process would read for all, and of one that two rings would evaluate."""
    with processes() as world_size:
        ring = Ring(init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "cp"))["cp"])
        more: dict[str, Any] = {"ring": ring, "train_dataset": Stream(), "eval_dataset": Stream()}
        told = []
        for options in ({"eval_strategy": "steps"}, {"eval_strategy": "no", "dispatch": True}):
            dispatch = {"dispatch_batches": options.pop("dispatch", False)}
            args = arguments(folder, max_steps=1, eval_steps=1, accelerator_config=dispatch, **options)
            with pytest.raises(NotImplementedError) as raised:
                RingTrainer(make("llama", "ringattn", torch.float32), args, **more).train()
            told.append(str(raised.value))
        return told


def test_streams_that_rings_cannot_read_are_refused_by_name(pool: Pools, tmp_path: Path) -> None:
    for evaluated, dispatched in pool(4).run(refused_streams, str(tmp_path)):
        assert "samples to evaluate must have a length where several rings share them" in evaluated
        assert "dispatch_batches must be left out" in dispatched


def build_alone(folder: str) -> str:
    """Errors of a rank where rank 1 alone passes an unsupported option."""
    wrong: dict[str, Any] = {"compute_loss_func": len} if dist.get_rank() else {}
    with processes():
        try:
            build(folder, **wrong)
        except (ValueError, NotImplementedError) as error:
            return str(error)
    return ""


def test_an_option_that_one_rank_alone_is_refused_is_an_error_on_all(pool: Pools, tmp_path: Path) -> None:
    """The others would wait for it where models are wrapped."""
    for told in pool(2).run(build_alone, str(tmp_path)):
        assert "compute_loss_func must be left out" in told


def whole_rows(batch: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Tokens without labels, one sample per row."""
    most = max(len(sample["input_ids"]) for sample in batch)
    ids = [sample["input_ids"] + [0] * (most - len(sample["input_ids"])) for sample in batch]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(ids).ne(0)}


def predict(folder: str, kind: str, labelled: bool) -> tuple[dict[str, float], list[Any], Any]:
    """The loss, the outputs and the labels of samples, of different lengths in rows of a batch."""
    with processes():
        collator = RingCollator(DataCollatorWithFlattening() if labelled else whole_rows, Ring())
        model = make(kind, "ringattn", torch.float32)
        found = build(folder, collator, model=model, prediction_loss_only=False).predict(Samples())
        losses = {name: x for name, x in (found.metrics or {}).items() if name.endswith("_loss")}
        return losses, tree_leaves(found.predictions), found.label_ids


@pytest.mark.parametrize(("kind", "labelled"), [("llama", True), ("llama", False), ("mixtral", True)])
def test_predictions_are_those_of_one_process(pool: Pools, tmp_path: Path, kind: str, labelled: bool) -> None:
    """Outputs of mixtral are the loss that balances experts, logits, and those of routers."""
    losses, outputs, labels = predict(str(tmp_path), kind, labelled)
    assert [x.shape[-1] for x in outputs if x.ndim > 1] == {"llama": [61], "mixtral": [61, 4, 4]}[kind]
    assert bool(losses) == (labels is not None) == labelled
    for mine, found, wanted in pool(2).run(predict, str(tmp_path), kind, labelled):
        assert mine == pytest.approx(losses, rel=1e-4)
        assert not labelled or (wanted == labels).all()
        for x, alone in zip(map(torch.tensor, found), map(torch.tensor, outputs), strict=True):
            # rows that are padded are not those of any token
            torch.testing.assert_close(x[alone != -100], alone[alone != -100])


def train_unlabelled(folder: str) -> tuple[float, bool]:
    """The loss that is logged without any label, and whether a parameter has moved."""
    with processes():
        data = [{**sample, "labels": [-100] * len(sample["labels"])} for sample in map(Samples().__getitem__, range(4))]
        trainer = build(folder, data=data, max_steps=1, eval_strategy="no")
        start = [x.detach().clone() for x in trainer.model.parameters()]  # pyright: ignore[reportOptionalMemberAccess]
        trainer.train()
        moved = zip(start, trainer.model.parameters(), strict=True)  # pyright: ignore[reportOptionalMemberAccess]
        return trainer.state.log_history[0]["loss"], any(not torch.equal(x, y) for x, y in moved)


def test_a_first_step_without_labels_changes_nothing(pool: Pools, tmp_path: Path) -> None:
    """As on one process: Trainer logs a loss of 0 for the NaN of no labels, and gradients are 0."""
    assert [(float(loss), moved) for loss, moved in pool(2).run(train_unlabelled, str(tmp_path))] == [(0.0, False)] * 2


def evaluate_unlabelled(folder: str) -> list[float]:
    """Losses of samples, and of the same after one without labels, by batches of one."""
    with processes():
        data = [*map(Samples().__getitem__, range(3))]
        empty = {**data[0], "labels": [-100] * len(data[0]["labels"])}
        trainer = build(folder, data=data, per_device_eval_batch_size=1)
        return [trainer.evaluate(samples)["eval_loss"] for samples in (data, [empty, *data])]  # pyright: ignore[reportArgumentType]


def test_batches_without_labels_do_not_count_in_evaluations(pool: Pools, tmp_path: Path) -> None:
    """As on one process, where their loss is no number, which Trainer leaves out; that of 4.57 does not."""
    expected = evaluate_unlabelled(str(tmp_path))
    assert math.isnan(expected[1]) or expected[0] == pytest.approx(expected[1])
    for found in pool(2).run(evaluate_unlabelled, str(tmp_path)):
        assert found == pytest.approx(expected, rel=1e-4, nan_ok=True)


class _Place:
    """A ring as far as its place among processes goes."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size


def test_samples_that_rings_cannot_share_evenly_are_refused() -> None:
    from torch.utils.data import DataLoader

    from ringattn.integrations.accelerate.context_parallel import share_batches

    ring: Any = _Place(1, 2)
    with pytest.raises(ValueError, match="a ring must be of consecutive processes"):
        share_batches(DataLoader(Samples()), ring, 4, 2)
    dealt = DataLoader(Samples(), batch_sampler=BatchSamplerShard(BatchSampler(range(11), 2, False), 4, 1))
    with pytest.raises(
        ValueError, match="samples to evaluate must be full batches for each of 2 rings, got 11 in batches of 2"
    ):
        share_batches(dealt, ring, 4, 1, uneven="refuse")


def padded_rows(batch: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Tokens and labels, one sample per row."""
    whole = whole_rows(batch)
    return {**whole, "labels": whole["input_ids"].masked_fill(~whole["attention_mask"], -100)}


def evaluate_on_rings(folder: str, cp: int, batch: int) -> tuple[float, Any]:
    """The loss and the labels of eleven samples, in batches of so many on each ring."""
    with processes() as world_size:
        ring = Ring()
        if world_size > 1:
            ring = Ring(init_device_mesh("cpu", (world_size // cp, cp), mesh_dim_names=("dp", "cp"))["cp"])
        options = {"prediction_loss_only": False, "per_device_eval_batch_size": batch, "eval_strategy": "no"}
        trainer = build(folder, RingCollator(padded_rows, ring), **options)
        found = trainer.predict(Samples())
        assert trainer.evaluate()["eval_loss"] == pytest.approx((found.metrics or {})["test_loss"])
        return (found.metrics or {})["test_loss"], (found.label_ids, found.predictions)


@pytest.mark.parametrize("batch", [2, 8, 11])  # a ring has a batch less, a shorter one, or none
def test_samples_that_rings_cannot_share_evenly_are_evaluated_as_on_one_process(
    pool: Pools, tmp_path: Path, batch: int
) -> None:
    loss, (labels, logits) = evaluate_on_rings(str(tmp_path), 1, batch)
    for found, (wanted, others) in pool(4).run(evaluate_on_rings, str(tmp_path), 2, batch):
        assert found == pytest.approx(loss, rel=1e-5)
        assert (wanted == labels).all()
        seen = torch.tensor(labels) != -100
        torch.testing.assert_close(torch.tensor(others)[seen], torch.tensor(logits)[seen], rtol=1e-4, atol=1e-4)


def build_without_the_name(folder: str) -> str:
    with processes(), pytest.raises(RuntimeError, match="must attend with ringattn, got LlamaModel") as raised:
        build(folder, implementation="sdpa")
    return str(raised.value)


def test_a_model_with_another_attention_is_refused_when_its_trainer_is_made(pool: Pools, tmp_path: Path) -> None:
    for told in pool(2).run(build_without_the_name, str(tmp_path)):
        assert "after ringattn.integrations.transformers.register()" in told
