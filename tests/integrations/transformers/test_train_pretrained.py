"""The training job with models of transformers: the same loss as the model's own, on any number of ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from ringattn.launch.common.distributed import Refusal
from ringattn.launch.train.__main__ import check, run_rank
from ringattn.launch.train.config import PRESETS, TrainConfig
from ringattn.launch.train.data import load_corpus
from ringattn.launch.train.metrics import read_rows
from ringattn.launch.train.parallel import Parallel, make_parallel, single_process_group
from ringattn.launch.train.pretrained import build_causal_lm, load_tokenizer
from ringattn.launch.train.trainer import Recipe, Trainer

CPU = torch.device("cpu")
COMMON = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 300,
    "max_position_embeddings": 256,
}
CONFIGS = {
    "llama": {"model_type": "llama", **COMMON},
    "qwen3": {"model_type": "qwen3", **COMMON, "tie_word_embeddings": True},
    "gemma2": {
        "model_type": "gemma2",
        **COMMON,
        "sliding_window": 9,
        "final_logit_softcapping": 2.0,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "granite": {"model_type": "granite", **COMMON, "logits_scaling": 0.25},
    "gptj": {"model_type": "gptj", "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "vocab_size": 300},
}


def write_config(folder: Path, name: str = "llama", **changes: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIGS[name], **changes}))
    return str(folder / "config.json")


@pytest.fixture(scope="module")
def alone() -> Iterator[Parallel]:
    """This process as the only rank."""
    with single_process_group(CPU):
        yield make_parallel(CPU)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_loss_is_the_one_that_the_model_computes(alone, tmp_path, name):
    path = write_config(tmp_path, name)
    windows = torch.randint(300, (2, 34), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), attn_implementation="eager")
    wanted = model(input_ids=windows, labels=windows).loss
    wanted.backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    bounded = Recipe(recompute="selective", offload="all", mlp_rows=5)
    for recipe in (*(Recipe(recompute=x) for x in ("none", "selective", "full")), bounded):
        trainer = Trainer(lambda: build_causal_lm(path, 3, CPU), recipe, alone)
        result = trainer.step(windows, 0.0)
        assert result.loss == pytest.approx(wanted.item(), rel=2e-6)
        assert result.grad_norm == pytest.approx(norm.item(), rel=2e-5)


class CountRings(TorchDispatchMode):
    """Counts the calls of this package's operators."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += getattr(func, "namespace", None) == "ringattn"
        return func(*args, **(kwargs or {}))


def test_selective_recomputation_runs_no_ring_twice(alone, tmp_path):
    path, counts = write_config(tmp_path), {}
    offloaded = Recipe(recompute="selective", offload=1)
    for recipe in (*(Recipe(recompute=x) for x in ("none", "selective", "full")), offloaded):
        trainer = Trainer(lambda: build_causal_lm(path, 0, CPU), recipe, alone)
        with CountRings() as calls:
            trainer.step(torch.zeros(1, 17, dtype=torch.int64), 0.0)
        counts[recipe.recompute, recipe.offload] = calls.count
    assert 0 < counts["none", 0] == counts["selective", 0] == counts["selective", 1] < counts["full", 0]


def run_quietly(out: Path, **flags: Any) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert run_rank(dataclasses.replace(PRESETS["tiny"], device="cpu", out=str(out), **{"steps": 4, **flags})) == 0
    return said.getvalue()


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in read_rows(out / "log.jsonl") if "loss" in row]


def text_folder(folder: Path) -> str:
    folder.mkdir()
    for index in range(300):
        (folder / f"{index}").write_text("one two three four five " * (index % 7 + 1))
    return str(folder)


@pytest.mark.slow
def test_packed_documents_train_the_same_on_one_and_on_two_ranks(pool, tmp_path):
    flags = {"model": write_config(tmp_path / "model", "gemma2"), "data": text_folder(tmp_path / "text"), "pack": True}
    said, _ = pool(2).run(run_quietly, tmp_path / "two", **flags, recompute="selective", accumulate=2)
    assert "equal within rounding" in said
    run_quietly(tmp_path / "one", **flags)
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "two"), rel=1e-5)


def test_weights_and_tokenizer_of_a_folder_are_used(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: index for index, word in enumerate(["<end>", "<unknown>", "one", "two", "three", "four", "five"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = str(Path(write_config(tmp_path / "model", vocab_size=7)).parent)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    model.save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(path)

    corpus = load_corpus(text_folder(tmp_path / "text")).encoded(load_tokenizer(path), path)
    assert corpus.separator == 0
    assert int((corpus.text == 0).sum()) == 299
    assert set(corpus.text.tolist()) == {0, 2, 3, 4, 5, 6}
    held = build_causal_lm(path, 0, CPU, vocabulary=7).model.state_dict()
    assert all(torch.equal(held[name], value) for name, value in model.state_dict().items())

    write_config(tmp_path / "model", vocab_size=7, num_hidden_layers=3)
    with pytest.raises(Refusal, match=r"all weights of LlamaForCausalLM, got .* without 9 of them, .* would be random"):
        build_causal_lm(path, 0, CPU, vocabulary=7)
    write_config(tmp_path / "model", vocab_size=7)

    said = run_quietly(tmp_path / "out", model=path, data=str(tmp_path / "text"), pack=True, temperature=0.0)
    assert "nats per token" in said
    assert set((tmp_path / "out" / "sample.txt").read_text().replace("<end>", " ").split()) <= set(words)


def test_inexact_training_is_refused(tmp_path):
    with pytest.raises(Refusal, match=r"model must be a config.json or a folder with one, got absent"):
        check(TrainConfig(model="absent", device="cpu"))
    with pytest.raises(Refusal, match="the model must have at least 256 tokens, got a vocab_size of 100"):
        build_causal_lm(write_config(tmp_path, vocab_size=100), 0, CPU)
    transformed = write_config(tmp_path, model_type="bert", is_decoder=True)
    with pytest.raises(Refusal, match=r"^logits must be those of a linear head"):
        build_causal_lm(transformed, 0, CPU)
    unknown = write_config(tmp_path, model_type="unknown to transformers")
    with pytest.raises(
        Refusal, match=r"model must be a configuration that transformers can read, got .*unknown to transformers"
    ):
        build_causal_lm(unknown, 0, CPU)
    long = {"model": write_config(tmp_path), "data": text_folder(tmp_path / "text"), "seq_len": 100_000}
    with pytest.raises(Refusal, match="data must hold at least 200002 tokens for a context of 100000"):
        run_quietly(tmp_path / "out", **long)


def test_a_run_does_not_continue_with_other_layers_of_the_same_name(tmp_path):
    flags = {
        "model": write_config(tmp_path / "model"),
        "data": text_folder(tmp_path / "text"),
        "checkpoint_interval": 1,
    }
    run_quietly(tmp_path / "out", **flags, steps=1)
    write_config(tmp_path / "model", num_hidden_layers=1)
    with pytest.raises(Refusal, match=r"must be that of the checkpoint, got another one \(num_hidden_layers 2 -> 1\)"):
        run_quietly(tmp_path / "out", **flags, steps=2)
    write_config(tmp_path / "model")
    assert "continuing from step 1" in run_quietly(tmp_path / "out", **flags, steps=2)
