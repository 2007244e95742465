"""Rows chosen from a sharded sequence, and heads that choose them, equal those of one process."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification
from transformers.models.llama.modeling_llama import LlamaModel, LlamaPreTrainedModel

from ringattn import Ring
from ringattn.integrations.transformers import last_positions, model_hooks, register, shard_batch, take_rows
from tests.integrations.heads_rows import ROWS
from tests.integrations.model_table import ModelRow, refused, works
from tests.integrations.transformers.models import CONFIGS, VOCAB, gradients, make, tokens
from tests.support.pool import Pools

FIVE = transformers.__version__.startswith("5.")


def take_on_ranks(x: Tensor, positions: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Rows of a sharded tensor, and the mean over ranks of gradients of a loss that every rank computes."""
    ring = Ring()
    sharding = ring.sharding(x.shape[1], layout)
    mine = sharding.shard(x).requires_grad_()
    rows = take_rows(mine, sharding, positions)
    rows.square().sum().backward()
    assert mine.grad is not None
    grad = sharding.unshard(mine.grad) / ring.world_size
    return rows.detach(), grad


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize(("world_size", "length"), [(1, 5), (2, 13), (4, 3)])  # the last leaves a rank without rows
def test_rows_and_their_gradients_come_from_the_rank_that_holds_them(
    pool: Pools, layout: str, world_size: int, length: int
) -> None:
    x = torch.randn(2, length, 3, dtype=torch.float64)
    for positions in (torch.tensor([length - 1, 0]), torch.tensor([[0, 1, 1], [length - 1, 2, 0]])):
        whole = x.clone().requires_grad_()
        expected = whole[torch.arange(2)[:, None], positions.view(2, -1)].view(*positions.shape, 3)
        expected.square().sum().backward()
        for rows, grad in pool(world_size).run(take_on_ranks, x, positions, layout):
            assert torch.equal(rows, expected.detach())
            torch.testing.assert_close(grad, whole.grad)


@pytest.mark.parametrize(
    ("x", "positions", "match"),
    [
        (torch.ones(2, 5, 3), torch.tensor([0, 1]), "x must have this rank's 6 rows in dim 1"),
        (torch.ones(2, 6, 3), torch.tensor([0]), "positions must be integers, 2 or 2 x k"),
        (torch.ones(2, 6, 3), torch.tensor([0.0, 1.0]), "positions must be integers"),
        (torch.ones(2, 6, 3), torch.tensor([0, 6]), "positions must be from 0 to 5"),
        (torch.ones(2, 6, 3), torch.tensor([0, -1]), "positions must be from 0 to 5"),
    ],
)
def test_rows_that_do_not_fit_are_refused(x: Tensor, positions: Tensor, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        take_rows(x, Ring().sharding(6), positions)


def refuse_on_one_rank() -> str:
    """The error of every rank when the positions of one are out of range."""
    sharding = Ring().sharding(6)
    try:
        take_rows(torch.ones(1, 3, 2), sharding, torch.tensor([6 if dist.get_rank() == 1 else 0]))
    except ValueError as error:
        return str(error)
    return ""


def test_a_position_that_one_rank_refuses_is_refused_on_all(pool: Pools) -> None:
    for found in pool(2).run(refuse_on_one_rank):
        assert "positions must be from 0 to 5, got [[6]]" in found


def test_last_positions_are_those_of_the_last_tokens() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0]])
    assert last_positions(mask).tolist() == [3, 1, 2]


CLASSIFIERS: dict[str, dict[str, Any]] = {
    "llama": CONFIGS["llama"],
    "qwen3": CONFIGS["qwen3"],
    "gemma3_text": CONFIGS["gemma3"],
}
if FIVE:  # these attend by themselves in 4.x, or do not pass keywords on
    CLASSIFIERS |= {
        "gpt2": {"n_embd": 24, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "n_positions": 64, "pad_token_id": 0},
        "bert": CONFIGS["bert"],
        "distilbert": {"dim": 24, "hidden_dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": VOCAB},
        "modernbert": {**CONFIGS["modernbert"], "classifier_pooling": "mean"},
        "roberta": {**CONFIGS["bert"], "model_type": "roberta"},
    }


LAST_OR_MEAN = ("llama", "qwen3", "gemma3_text", "gpt2", "modernbert")
"""Kinds that choose the last token, or take the mean of all."""


def make_head(kind: str, attention: str) -> Any:
    """A model that classifies sequences, without dropout; its weights depend on the kind alone."""
    register()
    settings = {name: value for name, value in CLASSIFIERS[kind].items() if name != "model_type"}
    config = AutoConfig.for_model(kind, **settings, num_labels=3)
    for name in vars(config):
        if "dropout" in name or name.endswith("pdrop"):
            setattr(config, name, 0.0)
    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation=attention)
    return model.double().train()


def padded(side: str) -> dict[str, Tensor]:
    """Three sequences of 23 tokens with padding on a side, and a label for each."""
    ids = tokens(23, rows=3)
    mask = torch.ones_like(ids)
    lengths = (23, 14, 5)
    for row, length in enumerate(lengths):
        mask[row, slice(length, None) if side == "right" else slice(0, 23 - length)] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "labels": torch.tensor([2, 0, 1])}


def classify(kind: str, batch: dict[str, Tensor], layout: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, logits and gradients of a ring, averaged over its ranks as DDP does."""
    ring = Ring()
    model = make_head(kind, "ringattn")
    out = model(**shard_batch(batch, ring, layout, pooling=True))
    out.loss.backward()
    grads = gradients(model)
    for x in grads.values():
        dist.all_reduce(x)
        x /= ring.world_size
    return out.loss.detach(), out.logits.detach(), grads


@pytest.mark.parametrize(
    ("kind", "side"),
    # the first row, which other encoders choose, must be a token: attention gives zeros to padding
    [
        (row.kind, side)
        for row in works(ROWS, "shard_batch")
        for side in ("right", "left")
        if row.kind in CLASSIFIERS and (side == "right" or row.kind in LAST_OR_MEAN)
    ],
)
def test_classification_on_a_ring_equals_one_process(pool: Pools, kind: str, side: str) -> None:
    batch = padded(side)
    if kind == "roberta":
        batch["position_ids"] = torch.arange(1, 24)[None]  # RoBERTa counts from padding_idx + 1
    world_size = 4 if kind in ("llama", "bert") and side == "right" else 2
    model = make_head(kind, "sdpa")
    expected = model(**batch)
    expected.loss.backward()
    layout = "zigzag" if kind in ("llama", "gpt2") else "contiguous"
    for loss, logits, grads in pool(world_size).run(classify, kind, batch, layout):
        torch.testing.assert_close(loss, expected.loss.detach(), rtol=2e-6, atol=0)
        torch.testing.assert_close(logits, expected.logits.detach(), rtol=1e-5, atol=1e-6)
        least = 1e-3 * max(float(grad.norm()) for grad in gradients(model).values())
        for name, grad in gradients(model).items():
            error = float((grads[name] - grad).norm()) / max(float(grad.norm()), least)
            assert error < 5e-5, f"{name}: relative error {error:.1e}"


def pool_rows(kind: str, batch: dict[str, Tensor]) -> Tensor:
    """The pooled output of an encoder on a ring."""
    model = base_of(kind, "ringattn")
    return model(**shard_batch(batch, Ring(), "contiguous", shift_labels=False)).pooler_output.detach()


def base_of(kind: str, attention: str) -> Any:
    """An encoder with a pooler, without a head."""
    register()
    config = AutoConfig.for_model(kind, **{k: v for k, v in CLASSIFIERS[kind].items() if k != "model_type"})
    torch.manual_seed(5)
    return AutoModel.from_config(config, attn_implementation=attention).double().eval()


@pytest.mark.skipif(not FIVE, reason="BERT of 4.x attends by itself")
def test_a_pooler_chooses_from_the_whole_sequence(pool: Pools) -> None:
    batch = padded("right")
    del batch["labels"]
    expected = base_of("bert", "sdpa")(**batch).pooler_output
    for found in pool(2).run(pool_rows, "bert", batch):
        torch.testing.assert_close(found, expected.detach())


class LastRow(LlamaPreTrainedModel):
    """A head of a user's own that returns the score of the last row of each sequence."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = LlamaModel(config)
        self.head = torch.nn.Linear(config.hidden_size, 1)

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Tensor:
        return self.head(self.model(input_ids, **kwargs).last_hidden_state[:, -1])


def own_head(pooling: bool | None) -> Any:
    """The scores of a head of a user's own on a ring, or the error."""
    register()
    config = AutoConfig.for_model("llama", **{k: v for k, v in CONFIGS["llama"].items() if k != "model_type"})
    config._attn_implementation = "ringattn"
    torch.manual_seed(5)
    model = LastRow(config).eval()
    if pooling is None:
        model.set_attn_implementation("eager")
        return model(tokens(11, rows=2), use_cache=False).detach()
    try:
        return model(**shard_batch({"input_ids": tokens(11, rows=2)}, Ring(), pooling=pooling)).detach()
    except NotImplementedError as error:
        return str(error)


def test_a_head_of_the_users_own_chooses_the_right_row_or_is_refused(pool: Pools) -> None:
    expected = own_head(None)
    for found in pool(2).run(own_head, True):
        torch.testing.assert_close(found, expected)
    for found in pool(2).run(own_head, False):
        assert "from LastRow, which chooses among them; pass pooling=True to shard_batch" in found


UNAWARE: dict[str, dict[str, Any]] = {
    "deberta": {**CONFIGS["bert"], "model_type": "deberta"},
    "deberta-v2": {**CONFIGS["bert"], "model_type": "deberta-v2"},
    "xlm": {"emb_dim": 24, "n_layers": 2, "n_heads": 4, "vocab_size": VOCAB, "n_words": VOCAB},
    "openai-gpt": {"n_embd": 24, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB},
    "mamba": {"hidden_size": 24, "num_hidden_layers": 2, "vocab_size": VOCAB, "state_size": 4},
}


def call_unaware(kind: str, attention: str, **entries: Tensor) -> str:
    """The error of a model that does not attend with ringattn, in a call with these entries of a batch, too."""
    register()
    settings = {k: v for k, v in (UNAWARE | CLASSIFIERS)[kind].items() if k != "model_type"}
    model = AutoModel.from_config(AutoConfig.for_model(kind, **settings), attn_implementation=attention)
    try:
        model(**shard_batch({"input_ids": tokens(12), **entries}, Ring()))
    except (RuntimeError, NotImplementedError, TypeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("row", refused(ROWS, "shard_batch"), ids=str)
def test_models_that_attend_by_themselves_are_refused_on_every_rank(pool: Pools, row: ModelRow) -> None:
    for found in pool(2).run(call_unaware, row.kind, "ringattn"):
        assert re.search(row.refusal, found)


@pytest.mark.parametrize("padded", [False, True])
def test_a_model_with_another_attention_is_refused_on_every_rank(pool: Pools, padded: bool) -> None:
    """Before it runs: torch found that the mask of the whole sequence does not fit the rows of a rank."""
    entries = {"attention_mask": torch.arange(12)[None].lt(9).long()} if padded else {}
    for found in pool(2).run(call_unaware, "llama", "sdpa", **entries):
        assert "must attend with ringattn, got LlamaModel, which did not; make it with attn_implementation" in found


def test_models_that_were_made_before_are_watched_and_copies_are_watched_once() -> None:
    register()
    model = make("llama", "sdpa")
    for part in (model, model.model):
        assert (len(part._forward_pre_hooks), len(part._forward_hooks)) == (1, 1)
        del part._watched_by_ringattn
        part._forward_pre_hooks.clear()
        part._forward_hooks.clear()
    model_hooks._watch_existing()
    model_hooks._watch_existing()
    twin = copy.deepcopy(model)
    twin.extra = torch.nn.Linear(1, 1)
    for part in (model, model.model, twin, twin.model):
        assert (len(part._forward_pre_hooks), len(part._forward_hooks)) == (1, 1)


def average(logits: Tensor, labels: Tensor, shift_labels: Tensor, **_: Any) -> Tensor:
    """A loss that does not look at num_items_in_batch."""
    del labels
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten())


def average_labels(return_dict: bool) -> str:
    model = make("llama", "ringattn")
    model.loss_function = average
    try:
        model(**shard_batch({"input_ids": tokens(12), "labels": tokens(12)}, Ring()), return_dict=return_dict)
    except NotImplementedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("return_dict", [True, False])
def test_a_loss_that_is_averaged_over_the_labels_of_a_shard_is_refused(pool: Pools, return_dict: bool) -> None:
    for told in pool(2).run(average_labels, return_dict):
        assert "the loss must be divided by num_items_in_batch where ranks share a sequence, got that of Llama" in told


def train_head(kind: str, options: dict[str, Any], length: int) -> str:
    """The error of a call with labels, or the loss."""
    sizes = {
        "d_model": 16,
        "decoder_layers": 1,
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 16,
        "vocab_size": VOCAB,
    }
    register()
    if kind == "whisper":
        config = AutoConfig.for_model(kind, **sizes, pad_token_id=0)
        model: Any = transformers.WhisperForCausalLM._from_config(config, attn_implementation="ringattn")
    elif kind == "token":
        config = AutoConfig.for_model(**CONFIGS["llama"], num_labels=VOCAB)
        model = transformers.LlamaForTokenClassification._from_config(config, attn_implementation="ringattn")
    else:
        model = make(kind, "ringattn")
    ids = tokens(length)
    try:
        return str(float(model(**shard_batch({"input_ids": ids, "labels": ids}, Ring(), **options)).loss.detach()))
    except (NotImplementedError, ValueError) as error:
        return str(error)


@pytest.mark.skipif(not FIVE, reason="encoders of 4.x do not ask for attention by name")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["modernbert", "bert", "token"])
def test_heads_that_predict_in_place_refuse_shifted_labels(pool: Pools, kind: str, ranks: int) -> None:
    for found in pool(ranks).run(train_head, kind, {}, 12):
        assert found.startswith("shift_labels must be False for ")


@pytest.mark.parametrize("ranks", [1, 2])
def test_heads_of_the_next_token_refuse_labels_that_are_not_shifted(pool: Pools, ranks: int) -> None:
    """A model would shift those of a shard, and the first label counts though nothing predicts it."""
    for found in pool(ranks).run(train_head, "llama", {"shift_labels": False}, 12):
        assert found.startswith("shift_labels must be True for LlamaForCausalLM")


@pytest.mark.skipif(not FIVE, reason="these of 4.x do not ask for attention by name, or take no keywords")
@pytest.mark.parametrize(
    ("kind", "options", "length"),
    [("whisper", {}, 45), ("bert", {"shift_labels": False}, 12)],  # each rank has as many labels
)
def test_losses_that_average_are_refused_whatever_the_counts(
    pool: Pools, kind: str, options: dict[str, Any], length: int
) -> None:
    """Whisper's decoder does not shift labels either, so its loss was another one, too."""
    for found in pool(2).run(train_head, kind, options, length):
        assert found.startswith(
            "the loss must be divided by num_items_in_batch where ranks share a sequence, got that of"
        )


def call_wrongly(name: str) -> str:
    """The error of a call whose head would choose among the rows of a rank."""
    kwargs: dict[str, Any] = {}
    model = make_head("llama", "ringattn")
    if name == "logits_to_keep":
        model, kwargs = make("llama", "ringattn"), {"logits_to_keep": 1}
    batch: dict[str, Any] = {"input_ids": tokens(12)}
    if name == "num_items_in_batch":  # as a Trainer passes it
        batch |= {"labels": torch.tensor([1]), "num_items_in_batch": torch.tensor(2)}
    try:
        model(**shard_batch(batch, Ring(), pooling=name == "num_items_in_batch"), **kwargs)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("head", "got LlamaForSequenceClassification with the rows of a rank; pass pooling=True"),
        ("logits_to_keep", "logits_to_keep must be left out where ranks share a sequence, got 1"),
        ("num_items_in_batch", "num_items_in_batch must be left out of a call with one label per sequence"),
    ],
)
def test_heads_that_would_be_wrong_are_refused_before_the_forward(pool: Pools, name: str, match: str) -> None:
    for found in pool(2).run(call_wrongly, name):
        assert match in found


@pytest.mark.parametrize(
    ("labels", "pooling", "match"),
    [
        (torch.zeros(2, 6, dtype=torch.long), True, "labels must be one per sequence, 2 or 2 x classes"),
        (torch.zeros(3, dtype=torch.long), True, "labels must be one per sequence"),
        (torch.zeros(2, dtype=torch.long), False, "labels must have the shape of the tokens, .* pooling=True"),
    ],
)
def test_labels_that_do_not_fit_the_head_are_refused(labels: Tensor, pooling: bool, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        shard_batch({"input_ids": tokens(6, rows=2), "labels": labels}, Ring(), pooling=pooling)
