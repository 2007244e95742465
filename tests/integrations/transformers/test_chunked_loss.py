"""A loss by chunks is the model's own, in value and gradient, and nothing computes the logits of all rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, DataCollatorWithFlattening, Trainer
from transformers import TrainingArguments as Arguments

from ringattn import Ring
from ringattn.integrations.transformers import register, shard_batch
from ringattn.integrations.transformers.chunked_loss import enable_chunked_loss
from ringattn.integrations.transformers.trainer import RingTrainer
from tests.integrations.processes import assert_same, enable_fsdp, outcome, processes, settings
from tests.integrations.transformers.models import make, tokens
from tests.integrations.transformers.test_trainer_models import FSDP, OF_FIVE, pad, samples
from tests.support.pool import Pools

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 61}
HEADS: dict[str, dict[str, Any]] = {
    "llama": {},
    "granite": {"logits_scaling": 0.25, "num_key_value_heads": 2},
    "cohere": {"logit_scale": 4.0, "num_key_value_heads": 2},
    "gemma2": {"final_logit_softcapping": 2.0, "num_key_value_heads": 2, "head_dim": 8},
    "phi": {},
}
"""Heads without anything, divided, multiplied, capped, and with a bias."""


def language_model(kind: str, implementation: str) -> Any:
    register()
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **SIZES, **HEADS[kind])
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        # logits of random weights are so small that scales and caps would hardly matter
        model.get_output_embeddings().weight.mul_(40)
    return model


def no_logits(model: nn.Module) -> None:
    """Let a model raise when its head is called."""
    head: Any = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    head.register_forward_hook(lambda *_: pytest.fail("logits of all rows were computed"))


def on_ranks(kind: str) -> tuple[float, dict[str, Tensor]]:
    """The loss, and the gradients as DDP averages them, of a padded batch on a ring."""
    model, ring = language_model(kind, "ringattn"), Ring(dist.group.WORLD)
    enable_chunked_loss(model)
    no_logits(model)
    loss = model(**shard_batch(padded(), ring), chunked_loss=True).loss
    loss.backward()
    for x in (loss.detach(), *(p.grad for p in model.parameters())):
        dist.all_reduce(x)
    size = ring.world_size
    return loss.item() / size, {name: p.grad / size for name, p in model.named_parameters()}


def padded() -> dict[str, Tensor]:
    ids = torch.cat([tokens(14, seed=seed) for seed in (1, 2)])
    labels = ids.clone()
    labels[0, 9:] = labels[1, :4] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("kind", HEADS)
def test_the_loss_and_gradients_of_chunks_are_those_of_the_model(pool: Pools, kind: str) -> None:
    model = language_model(kind, "eager")
    wanted = model(**padded()).loss
    wanted.backward()
    for found, gradients in pool(2).run(on_ranks, kind):
        assert found == pytest.approx(wanted.item(), rel=1e-5)
        for name, p in model.named_parameters():
            assert p.grad is not None
            assert (gradients[name] - p.grad).norm() <= 1e-5 * p.grad.norm(), name


def test_calls_without_the_keyword_and_without_a_count_are_as_before() -> None:
    model = language_model("gemma2", "eager")
    wanted = model(**padded())
    enable_chunked_loss(model)
    assert torch.equal(model(**padded()).logits, wanted.logits)
    found = model(**padded(), chunked_loss=True)
    assert found.logits is None
    torch.testing.assert_close(found.loss, wanted.loss)


def train(folder: str, cp: int, **options: Any) -> Any:
    """The outcome of the steps of packed documents, and of evaluations: of Trainer with cp 0, of RingTrainer otherwise."""
    with processes() as world_size:
        model = make("llama", "ringattn" if cp else "sdpa", torch.float32, use_cache=False)
        start = {name: x.detach().clone() for name, x in model.named_parameters()}
        chosen = {"eval_strategy": "steps", "eval_steps": 3, "prediction_loss_only": True, **options}
        chosen["gradient_accumulation_steps"] = 2 * max(cp, 1) // world_size
        args = Arguments(**settings(folder, **chosen))
        if options.get("fsdp"):
            enable_fsdp(args)
        more: dict[str, Any] = {"context_parallel_size": cp, "chunked_loss": True} if cp else {}
        data = {"data_collator": DataCollatorWithFlattening(), "train_dataset": samples(), "eval_dataset": samples()}
        trainer = (RingTrainer if cp else Trainer)(model=model, args=args, **data, **more)
        if cp:
            no_logits(model)
        trainer.train()
        return outcome(trainer, start)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(2, {}), pytest.param(4, {**FSDP, "eval_strategy": "no"}, marks=OF_FIVE)],
    ids=["plain", "fsdp"],
)
def test_a_trainer_makes_the_steps_of_one_process_without_logits(
    pool: Pools, tmp_path: Path, ranks: int, options: dict[str, Any]
) -> None:
    expected = train(str(tmp_path), 0, **{name: x for name, x in options.items() if name == "eval_strategy"})
    for found in pool(ranks).run(train, str(tmp_path), 2, **options):
        assert_same(found, expected)


def test_heads_and_losses_that_are_others_are_refused() -> None:
    masked = AutoModelForMaskedLM.from_config(AutoConfig.for_model("bert", **SIZES))
    with pytest.raises(NotImplementedError, match=r"^the loss of a model must be that of the next token"):
        enable_chunked_loss(masked)
    transformed = AutoModelForCausalLM.from_config(AutoConfig.for_model("bert", **SIZES, is_decoder=True))
    with pytest.raises(NotImplementedError, match=r"^logits must be those of a linear head"):
        enable_chunked_loss(transformed)
    adapted = get_peft_model(language_model("llama", "eager"), LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(NotImplementedError, match=r"^logits must be those of a linear head"):
        enable_chunked_loss(adapted)


def test_a_call_without_labels_and_a_head_with_a_later_adapter_are_refused() -> None:
    model = language_model("llama", "eager")
    enable_chunked_loss(model)
    with pytest.raises(ValueError, match=r"^chunked_loss must come with labels"):
        model(input_ids=padded()["input_ids"], chunked_loss=True)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(ValueError, match="a linear head without adapters"):
        adapted(**padded(), chunked_loss=True)


@pytest.mark.parametrize("unfit", [{"label_smoothing_factor": 0.1}, {"pooling": True}, {"torch_compile": True}])
def test_a_trainer_that_needs_logits_refuses_to_leave_them_out(tmp_path: Path, unfit: dict[str, Any]) -> None:
    args = Arguments(**settings(str(tmp_path), **{k: x for k, x in unfit.items() if k != "pooling"}))
    options = {k: x for k, x in unfit.items() if k == "pooling"}
    with pytest.raises(ValueError, match=f"^chunked_loss .*{next(iter(unfit))}"), processes():
        RingTrainer(
            model=make("llama", "ringattn", torch.float32),
            args=args,
            data_collator=pad,
            train_dataset=samples(),
            context_parallel_size=1,
            chunked_loss=True,
            **options,
        )
