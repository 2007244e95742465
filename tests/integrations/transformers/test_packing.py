"""Packed documents, batches and collators: what each rank gets, and that the documents stay apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, DataCollatorWithFlattening

from ringattn import Ring
from ringattn.integrations.transformers import RingCollator, register, replace_recurrent_layers, shard_batch
from ringattn.integrations.transformers.masks import RingMask
from ringattn.integrations.transformers.positions import check_positions, read_documents
from ringattn.plan.layouts import contiguous
from ringattn.plan.sharding import Sharding
from ringattn.sizing import place
from tests.integrations.transformers.models import CONFIGS, make, tokens
from tests.integrations.transformers.test_models import alone, assert_equal, on_ranks
from tests.support.pool import Pools

LENGTHS = (5, 11, 1, 8)


def samples() -> list[dict[str, list[int]]]:
    """Documents of which the last has a label that counts for nothing."""
    found = [{"input_ids": tokens(length, seed=length)[0].tolist()} for length in LENGTHS]
    for sample in found:
        sample["labels"] = list(sample["input_ids"])
    found[-1]["labels"][3] = -100
    return found


@pytest.mark.parametrize("layout", ["zigzag", "balanced", "striped"])
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_gradients_of_packed_documents_equal_one_process(pool: Pools, kind: str, told: bool, layout: str) -> None:
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=told)(samples())
    plain = DataCollatorWithFlattening()(samples())
    assert_equal(pool(2).run(on_ranks, kind, batch, layout, {})[0], alone(kind, plain))


def rows_of_documents(lengths: list[tuple[int, ...]]) -> dict[str, Tensor]:
    """A batch whose rows have documents of these lengths; those of a flattened batch are all in one row."""
    rows = [[tokens(length, seed=length)[0] for length in row] for row in lengths]
    labels = [torch.cat([torch.cat([x.new_full((1,), -100), x[1:]]) for x in row]) for row in rows]
    positions = [torch.cat([torch.arange(len(x)) for x in row]) for row in rows]
    found = {"input_ids": [torch.cat(row) for row in rows], "labels": labels, "position_ids": positions}
    return {name: torch.stack(x) for name, x in found.items()}


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_rows_with_different_documents_learn_as_one_row_of_all(pool: Pools, layout: str) -> None:
    lengths = [(5, 8), (11, 2), (13,)]
    flat = rows_of_documents([tuple(x for row in lengths for x in row)])
    expected = alone("llama", flat)
    assert_equal(pool(2).run(on_ranks, "llama", rows_of_documents(lengths), layout, {})[0], expected)


def test_rows_that_seem_to_go_on_in_the_next_one_stay_apart() -> None:
    positions = torch.tensor([[0, 1, 2, 0], [1, 2, 3, 4]])
    part = shard_batch({"input_ids": tokens(4, rows=2), "position_ids": positions}, Ring())
    assert part["sharding"].documents == (0, 3, 4, 8)


def placed_on_ranks() -> tuple[int, int, list[int], torch.Tensor]:
    """The rows and document ends of this rank, and its logits, of a batch whose documents are placed."""
    ring = Ring()
    part = RingCollator(DataCollatorWithFlattening(), ring, pack=True)(samples())
    sharding = part["sharding"]
    with torch.no_grad():
        logits = make("llama", "ringattn")(**part).logits[0]
    return sharding.shard_len, ring.rank, sharding.positions.tolist(), logits


def test_a_collator_places_documents_over_ranks(pool: Pools) -> None:
    found = pool(2).run(placed_on_ranks)
    model = make("llama", "ringattn")
    with torch.no_grad():
        expected = torch.cat([model(input_ids=torch.tensor([x["input_ids"]])).logits[0] for x in samples()])
    assert sorted(p for _, _, positions, _ in found for p in positions) == list(range(sum(LENGTHS)))
    for _, _, positions, logits in found:
        torch.testing.assert_close(logits, expected[positions], rtol=1e-5, atol=1e-5)


def test_a_placement_of_other_documents_is_refused() -> None:
    batch = DataCollatorWithFlattening()(samples())
    other = place([5, 11, 9], cp=1).sequences[0]
    with pytest.raises(ValueError, match="packed must place the 25 tokens and the documents of the batch on 1 ranks"):
        shard_batch({**batch, "packed": other}, Ring())
    mine = place(LENGTHS, cp=1, keep_order=True).sequences[0]
    assert shard_batch({**batch, "packed": mine}, Ring())["sharding"].documents == (0, 5, 16, 17, 25)


# GPT-2 of 4.57 passes no positions to attention
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("told", [False, True])
def test_packed_documents_stay_apart_without_a_sharding(kind: str, told: bool) -> None:
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=told)(samples())
    plain = DataCollatorWithFlattening()(samples())
    assert_equal(alone(kind, batch, "ringattn"), alone(kind, plain))


def test_chunks_of_packed_documents_are_refused_where_layers_pass_no_positions() -> None:
    with pytest.raises(NotImplementedError, match="chunked attention must go without packed documents"):
        make("llama4", "ringattn")(**DataCollatorWithFlattening()(samples()), use_cache=False)


def test_packed_documents_are_each_alone_in_the_model() -> None:
    """An independent reference: documents one by one."""
    model = make("llama", "ringattn")
    batch = shard_batch(DataCollatorWithFlattening()(samples()), Ring())
    assert batch["sharding"].documents == (0, 5, 16, 17, 25)
    with torch.no_grad():
        packed = model(**batch).logits[0]
        single = [model(input_ids=torch.tensor([x["input_ids"]])).logits[0] for x in samples()]
    torch.testing.assert_close(packed, torch.cat(single), rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_positions_that_were_written_in_place_are_read_again() -> None:
    """Tensors made in inference mode do not count what is written to them."""
    model, ids = make("llama", "ringattn").eval(), tokens(12)
    whole = torch.arange(12)[None]
    positions = whole % 6
    apart = model(ids, position_ids=positions, use_cache=False).logits
    expected = model(ids, position_ids=whole, use_cache=False).logits
    model(ids, position_ids=positions, use_cache=False)
    positions.copy_(whole)
    assert model(ids, position_ids=positions, use_cache=False).logits.equal(expected)
    assert not apart.allclose(expected)


@pytest.mark.parametrize(
    ("kind", "layers"), [("llama", {}), ("gemma2", {"layer_types": ["sliding_attention", "full_attention"] * 2})]
)
def test_positions_made_in_inference_mode_are_read_once_for_each_kind_of_layer(
    kind: str, layers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = make(kind, "ringattn", num_hidden_layers=4, **layers).eval(), tokens(12)
    with torch.inference_mode():
        told = torch.arange(12)[None] % 6
        read, diff = [], Tensor.diff
        monkeypatch.setattr(Tensor, "diff", lambda x, *given, **named: (read.append(x), diff(x, *given, **named))[1])
        for forward in (1, 2):
            model(ids, position_ids=told, use_cache=False)
            assert sum(x is told for x in read) == forward * (2 if layers else 1)


def test_positions_that_were_read_in_one_forward_are_not_trusted_in_another() -> None:
    """Each forward has masks of its own, whatever its layers."""
    masks = RingMask(), RingMask()
    with torch.inference_mode():
        told = torch.arange(6)[None]
        assert read_documents(told, masks[0], 0) is None
        told.remainder_(3)
        assert read_documents(told, masks[0], 0) == (0, 3, 6)
        told.copy_(torch.arange(6))
        assert read_documents(told, masks[1], 1) is None
        told.remainder_(3)
        for layer, mask in ((None, masks[1]), (2, None), (3, None)):
            assert read_documents(told, mask, layer) == (0, 3, 6)
            told.copy_(torch.arange(6))
            assert read_documents(told, mask, layer and layer + 1) is None
            told.remainder_(3)


def test_positions_are_checked_again_for_other_padding() -> None:
    """The same tensor of positions may count from the first token of one batch and not of the next."""
    sharding = Sharding(8, "contiguous", contiguous(8, 2), 0)
    counted = torch.tensor([[1, 0, 1, 2]])
    left = RingMask(torch.tensor([[False] + [True] * 7]), ((1, 8),), given=True)
    check_positions(counted, sharding, left)
    check_positions(counted, sharding, left)
    for other in (RingMask(), RingMask(torch.tensor([[True] * 7 + [False]]), ((0, 7),), given=True)):
        with pytest.raises(ValueError, match="position_ids must be the global positions of this rank's rows"):
            check_positions(counted, sharding, other)


def parts(batch: dict[str, Any], layout: str, options: dict[str, Any]) -> dict[str, Any]:
    return shard_batch(batch, Ring(), layout, **options)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize("length", [2, 5, 22])
def test_the_parts_of_a_batch_are_the_batch(pool: Pools, layout: str, length: int) -> None:
    ids = tokens(length, rows=2)
    batch = {
        "input_ids": ids,
        "labels": ids.masked_fill(ids < 20, -100),
        "position_ids": torch.arange(length)[None],
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": ids % 2,
    }
    ranks = pool(2).run(parts, batch, layout, {})
    sharding = ranks[0]["sharding"]
    shifted = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    wholes = {"input_ids": ids, "labels": shifted, "shift_labels": shifted, "token_type_ids": ids % 2}
    for name, whole in {**wholes, "position_ids": batch["position_ids"]}.items():
        assert torch.equal(sharding.assemble([part[name] for part in ranks], dim=1), whole), name
    for part in ranks:
        assert torch.equal(part["attention_mask"], batch["attention_mask"])
        assert part["use_cache"] is False
        assert part["num_items_in_batch"] == max(1, int(shifted.ne(-100).sum())) / 2


def test_labels_are_shifted_once_however_they_come() -> None:
    ids = tokens(6)
    shifted = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    for batch in ({"labels": ids}, {"shift_labels": shifted}, {"labels": ids, "shift_labels": shifted}):
        part = shard_batch({"input_ids": ids, **batch}, Ring())
        assert torch.equal(part["labels"], shifted)
        assert torch.equal(part["shift_labels"], shifted)
    part = shard_batch({"input_ids": ids, "labels": ids}, Ring(), shift_labels=False)
    assert torch.equal(part["labels"], ids)
    assert "shift_labels" not in part


def test_the_first_label_of_a_document_is_not_predicted() -> None:
    part = shard_batch(DataCollatorWithFlattening()(samples()), Ring())
    ends = torch.tensor(LENGTHS).cumsum(0) - 1
    assert (part["labels"][0, ends] == -100).all()
    assert part["num_items_in_batch"] == sum(LENGTHS) - len(LENGTHS) - 1


def test_positions_restart_when_only_lengths_of_documents_are_given() -> None:
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_position_ids=False)(samples())
    part = shard_batch(batch, Ring())
    assert part["position_ids"][0].tolist() == [i for length in LENGTHS for i in range(length)]
    assert not {name for name in part if name.startswith(("cu_seq", "max_length"))}


def test_a_rank_without_labels_has_a_loss_of_zero(pool: Pools) -> None:
    ids = tokens(16)
    labels = ids.clone()
    labels[:, 5:] = -100
    batch = {"input_ids": ids, "labels": labels}
    found = pool(2).run(on_ranks, "llama", batch, "contiguous", {})
    assert_equal(found[0], alone("llama", batch))


def stack(features: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([x[name] for x in features]) for name in features[0]}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collator_shards_batches_of_another_one_here_or_in_workers(workers: int) -> None:
    ring = Ring()
    data: Any = [{"input_ids": tokens(9, seed=seed)[0]} for seed in range(4)]
    loader = DataLoader(data, batch_size=2, collate_fn=RingCollator(stack, ring), num_workers=workers)
    found = list(loader)
    assert [part["sharding"].ring for part in found] == [ring, ring]
    assert torch.equal(torch.cat([part["input_ids"] for part in found]), torch.stack([x["input_ids"] for x in data]))
    make("llama", "ringattn")(**found[0])


def disagree() -> str:
    with pytest.raises(ValueError, match="the tokens and labels of a batch must be the same on all ranks") as caught:
        shard_batch({"input_ids": tokens(8, seed=dist.get_rank())}, Ring())
    return str(caught.value)


def test_ranks_that_read_different_samples_raise(pool: Pools) -> None:
    for text in pool(2).run(disagree):
        assert "got input_ids [1, 8] " in text
        assert "ring ranks [1] differ" in text


_LINEAR = {f"linear_{name}_head_dim": 8 for name in ("key", "value")} | {
    f"linear_num_{x}_heads": 2 for x in ("key", "value")
}
FAMILIES: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 24},
    "biogpt": {},
    "bert": {"is_decoder": True},
    "afmoe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 1,
    },
    "olmo_hybrid": {**_LINEAR, "layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_text": {**_LINEAR, "layer_types": ["linear_attention", "full_attention"]},
}
"""Families in which transformers itself lets packed documents of restarting positions see each other."""


def make_family(kind: str, implementation: str) -> Any:
    register()
    sizes = {name: x for name, x in CONFIGS["qwen3"].items() if name != "model_type"}
    sizes |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout"), 0.0)
    config = AutoConfig.for_model(kind, **{**sizes, "activation_dropout": 0.0, **FAMILIES[kind]})
    config._experts_implementation = "eager"  # the others compute in single precision
    torch.manual_seed(5)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).double()
    if implementation == "ringattn" and set(FAMILIES[kind]) & {"linear_key_head_dim", "mamba_num_heads"}:
        replace_recurrent_layers(model)
    return model.eval()


@torch.no_grad()
def pack_family(kind: str, ids: Tensor, positions: Tensor) -> Tensor:
    part = shard_batch({"input_ids": ids, "position_ids": positions}, Ring())
    return part["sharding"].unshard(make_family(kind, "ringattn")(**part).logits)


@pytest.mark.skipif(not transformers.__version__.startswith("5."), reason="4.x does not have all of them")
@pytest.mark.parametrize(
    "kind", [x if x in ("opt", "olmo_hybrid") else pytest.param(x, marks=pytest.mark.slow) for x in FAMILIES]
)
def test_packed_documents_give_what_each_gives_alone(pool: Pools, kind: str) -> None:
    ids, lengths = tokens(45), (17, 28)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    model = make_family(kind, "eager")
    with torch.no_grad():
        each = torch.cat([model(x, use_cache=False).logits for x in ids.split(lengths, 1)], 1)
        together = model(ids, position_ids=positions, use_cache=False).logits
    size = each.abs().max()
    assert (together - each).abs().max() > 1e-3 * size, "transformers keeps them apart: move the family to test_models"
    for found in pool(2).run(pack_family, kind, ids, positions):
        # gated delta rule and RoPE are computed in single precision
        assert (found - each).abs().max() < 2e-5 * size
