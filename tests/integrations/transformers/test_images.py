"""Models with images on a ring: loss and gradients, of the image encoder too, equal those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText

from ringattn import Ring
from ringattn.integrations.transformers import RingCache, register, shard_batch
from tests.integrations.images_rows import ROWS
from tests.integrations.model_table import ModelRow, refused, works
from tests.integrations.transformers.test_models import assert_equal
from tests.support.pool import Pools

FIVE = transformers.__version__.startswith("5.")
IMAGE, VIDEO, BEGIN, END = 50, 51, 52, 53
"""Tokens: rows of an image or video, and its two ends."""

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 61,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SECTIONS = {"rope_type": "default", "mrope_section": [1, 1, 2]}
MROPE = {"rope_parameters": {**_SECTIONS, "rope_theta": 10000.0}} if FIVE else {"rope_scaling": _SECTIONS}
PATCHES = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "depth": 2, "num_heads": 2}
SPECIAL = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
}
TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        **SPECIAL,
        "text_config": {"model_type": "qwen2_vl_text", **TEXT, **MROPE},
        "vision_config": {**PATCHES, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
    },
    "qwen2_5_vl": {
        **SPECIAL,
        "text_config": {"model_type": "qwen2_5_vl_text", **TEXT, **MROPE},
        "vision_config": {
            **PATCHES,
            "hidden_size": 16,
            "intermediate_size": 16,
            "out_hidden_size": 32,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
    },
    "qwen3_vl": {
        **SPECIAL,
        "text_config": {"model_type": "qwen3_vl_text", **TEXT, **MROPE},
        "vision_config": {
            **PATCHES,
            "hidden_size": 16,
            "intermediate_size": 16,
            "out_hidden_size": 32,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
    },
    "llava": {
        "image_token_index": IMAGE,
        "image_seq_length": 4,
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "clip_vision_model", **TOWER, "image_size": 8, "patch_size": 4},
        "vision_feature_layer": -1,
    },
    "gemma3": {
        "image_token_id": IMAGE,
        "mm_tokens_per_image": 4,
        "text_config": {
            "model_type": "gemma3_text",
            **TEXT,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "vision_config": {"model_type": "siglip_vision_model", **TOWER, "image_size": 16, "patch_size": 4},
    },
}
OWN_LOSS = () if FIVE else ("qwen3_vl", "gemma3")
"""These do not pass shifted labels to their loss in 4.x."""
WITHOUT_POSITIONS = OWN_LOSS
"""generate() of 4.x gives these no positions."""
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def make(kind: str, attention: str) -> Any:
    """A tiny model in train mode; its weights depend on the kind alone."""
    register()
    config = AutoConfig.for_model(kind, **CONFIGS[kind])
    torch.manual_seed(5)
    model: Any = AutoModelForImageTextToText.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # attention is then far from an average
                if not parameter.any():
                    parameter.normal_(std=0.03)  # Gemma 3 projects images by zeros at first
    return model.float().train()


def with_images(kind: str, padding: str = "") -> dict[str, Tensor]:
    """Two sequences with an image of 8 tokens (Qwen; 4 for others) in the first, and one of 4 tokens in each."""
    generator = torch.Generator().manual_seed(1)
    first = 8 if kind in QWEN else 4
    rows = [
        [5, 6, BEGIN, *[IMAGE] * first, END, 7, 8, 9, BEGIN, *[IMAGE] * 4, END, 11, 12, 13, 14, 15],
        [21, BEGIN, *[IMAGE] * 4, END, 22, 23, 24, 25],
    ]
    if not padding:
        rows = rows[:1]
    longest = max(map(len, rows))
    blank = {"left": lambda x: [0] * (longest - len(x)) + x, "right": lambda x: x + [0] * (longest - len(x))}
    ids = torch.tensor([blank[padding](row) if padding else row for row in rows])
    batch = {"input_ids": ids, "labels": ids.masked_fill((ids == 0) | (ids == IMAGE), -100)}
    if padding:
        batch["attention_mask"] = ids.ne(0).long()
    if kind in QWEN:
        grid = torch.tensor([[1, 4, 8], [1, 4, 4], [1, 4, 4]][: len(rows) + 1])
        batch["image_grid_thw"] = grid
        batch["pixel_values"] = torch.randn(int(grid.prod(-1).sum()), 3 * 2 * 4 * 4, generator=generator)
        if FIVE:
            batch["mm_token_type_ids"] = ids.eq(IMAGE).int()
    else:
        size = CONFIGS[kind]["vision_config"]["image_size"]
        batch["pixel_values"] = torch.randn(len(rows) + 1, 3, size, size, generator=generator)
        if kind == "gemma3":
            batch["token_type_ids"] = ids.eq(IMAGE).long()
    return batch


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    """The gradient of each parameter; zeros where a rank has none."""
    return {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in model.named_parameters()}


def learn(
    kind: str, batch: dict[str, Any], layout: str, checkpointing: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of a ring, averaged over its ranks as DDP does."""
    ring = Ring()
    model = make(kind, "ringattn")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    part = shard_batch(batch, ring, layout)
    loss = model(**part).loss
    loss.backward()
    loss, grads = loss.detach(), grads_of(model)
    for x in (loss, *grads.values()):
        dist.all_reduce(x)
        x /= ring.world_size
    return loss, grads


def alone(kind: str, batch: dict[str, Any], attention: str = "sdpa") -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one process."""
    model = make(kind, attention)
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.detach(), grads_of(model)


@pytest.mark.parametrize("padding", ["", "left", "right"])
@pytest.mark.parametrize("kind", [row.kind for row in works(ROWS, "shard_batch") if row.kind not in OWN_LOSS])
def test_images_on_a_ring_give_the_gradients_of_one_process(pool: Pools, kind: str, padding: str) -> None:
    batch = with_images(kind, padding)
    expected = alone(kind, batch)
    tower = [name for name in expected[1] if "visual" in name or "vision" in name]
    assert any(expected[1][name].abs().sum() > 0 for name in tower), "images reach the loss"
    for world_size in (1, 2, 4) if not padding else (2,):
        layout = "contiguous" if world_size == 4 else "zigzag"
        for found in pool(world_size).run(learn, kind, batch, layout, world_size == 4):
            assert_equal(found, expected)


def text_alone(rows: int = 2) -> dict[str, Tensor]:
    """Sequences without images."""
    ids = torch.randint(3, 49, (rows, 21), generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("kind", CONFIGS)
def test_text_without_images_learns_as_on_one_process(pool: Pools, kind: str) -> None:
    batch = text_alone()
    if kind in OWN_LOSS:
        for found in pool(2).run(refusal, kind, batch):
            assert "the loss must be divided by num_items_in_batch" in found
        return
    expected = alone(kind, batch)
    for found in pool(2).run(learn, kind, batch, "zigzag"):
        assert_equal(found, expected)


def with_video() -> dict[str, Tensor]:
    """A sequence with a video of two frames, of 4 tokens each."""
    ids = torch.tensor([[5, 6, BEGIN, *[VIDEO] * 8, END, 7, 8, 9, 10, 11]])
    generator = torch.Generator().manual_seed(1)
    batch = {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == VIDEO, -100),
        "video_grid_thw": torch.tensor([[2, 4, 4]]),
        "pixel_values_videos": torch.randn(32, 3 * 2 * 4 * 4, generator=generator),
        "second_per_grid_ts": torch.tensor([1.0]),
    }
    if FIVE:
        batch["mm_token_type_ids"] = ids.eq(VIDEO).int() * 2
    return batch


def test_a_video_on_a_ring_gives_the_gradients_of_one_process(pool: Pools) -> None:
    expected = alone("qwen2_5_vl", with_video())
    for found in pool(2).run(learn, "qwen2_5_vl", with_video(), "zigzag"):
        assert_equal(found, expected)


def refusal(kind: str, batch: dict[str, Any]) -> str:
    """The error of a ring."""
    try:
        learn(kind, batch, "zigzag")
    except (NotImplementedError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.skipif(FIVE, reason="5.x says which tokens belong to an image")
def test_tokens_of_an_image_that_see_each_other_are_refused(pool: Pools) -> None:
    # its loss is refused before; without labels the mask is
    batch = {name: x for name, x in with_images("gemma3").items() if name != "labels"}
    for found in pool(2).run(refusal, "gemma3", batch):
        assert "got blocks of tokens that see each other over a causal mask" in found


def other_images_on_one_rank(batch: dict[str, Any]) -> str:
    """The error of every rank when one has other images."""
    if dist.get_rank() == 1:
        batch["pixel_values"] = batch["pixel_values"] + 1
    return refusal("llava", batch)


def test_images_that_differ_between_ranks_are_refused(pool: Pools) -> None:
    for found in pool(2).run(other_images_on_one_rank, with_images("llava")):
        assert "the tokens and labels of a batch must be the same on all ranks" in found


@pytest.mark.parametrize(
    ("shape", "images"), [((5, 1, 26), False), ((2, 1, 26), True), ((3, 1, 25), True), ((3, 2, 26), True)]
)
def test_positions_that_do_not_fit_the_tokens_are_refused(shape: tuple[int, ...], images: bool) -> None:
    batch = with_images("qwen2_vl")
    if not images:
        batch = {"input_ids": batch["input_ids"]}
    with pytest.raises(ValueError, match=r"position_ids must have shape .*\(3, 1, 26\) or \(4, 1, 26\)"):
        shard_batch({**batch, "position_ids": torch.zeros(shape, dtype=torch.long)}, Ring())


@pytest.mark.parametrize("rows", [3, 4])
def test_positions_of_several_dimensions_may_be_given(pool: Pools, rows: int) -> None:
    batch = with_images("qwen2_5_vl")
    n = batch["input_ids"].shape[1]
    # text, then time, height and width of a picture; any positions do
    sections = torch.stack([torch.arange(n), torch.arange(n) // 2, torch.arange(n) // 3])[:, None]
    text = torch.arange(n)[None, None]
    batch["position_ids"] = sections if rows == 3 else torch.cat([text, sections])
    expected = alone("qwen2_5_vl", batch)
    for found in pool(2).run(learn, "qwen2_5_vl", batch, "zigzag"):
        assert_equal(found, expected)


@pytest.mark.parametrize("rows", [3, 4])
@pytest.mark.parametrize("padding", ["", "left", "documents"])
def test_text_may_have_positions_of_several_dimensions(pool: Pools, rows: int, padding: str) -> None:
    batch = text_alone(1 if padding == "documents" else 2)
    n = batch["input_ids"].shape[1]
    positions = torch.arange(n)[None].expand(len(batch["input_ids"]), n)
    if padding == "documents":
        positions = positions % 11
    expected = alone("qwen2_5_vl", {**batch, "position_ids": positions.expand(4, *positions.shape)})
    if padding == "left":
        mask = torch.ones_like(positions)
        mask[1, :5] = 0
        batch |= {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}
        positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
        expected = alone("qwen2_5_vl", batch)
    several = positions.expand(rows, *positions.shape).clone()
    if padding == "left":
        several[0, 1, :5] = 7  # padding is not compared
    for found in pool(2).run(learn, "qwen2_5_vl", {**batch, "position_ids": several}, "zigzag"):
        assert_equal(found, expected)


@pytest.mark.parametrize("rows", [3, 4])
def test_embeddings_may_come_with_the_positions_of_their_images(pool: Pools, rows: int) -> None:
    batch: dict[str, Tensor] = text_alone(1)
    n = batch["input_ids"].shape[1]
    embeds = torch.randn(1, n, TEXT["hidden_size"], generator=torch.Generator().manual_seed(3))
    sections = torch.stack([torch.arange(n), torch.arange(n) // 2, torch.arange(n) // 3])[:, None]
    positions = sections if rows == 3 else torch.cat([torch.arange(n)[None, None], sections])
    batch = {"inputs_embeds": embeds, "labels": batch["labels"], "position_ids": positions}
    expected = alone("qwen2_5_vl", batch)
    for found in pool(2).run(learn, "qwen2_5_vl", batch, "zigzag"):
        assert_equal(found, expected)


OPTIONS: list[dict[str, Any]] = [{}, {"num_beams": 2}, *([{"prefill_chunk_size": 7}] if FIVE else [])]
"""Options of generate; 4.x cannot give images in chunks."""


def prompt(kind: str, padding: str) -> dict[str, Tensor]:
    """A batch without what training needs."""
    batch = with_images(kind, padding)
    del batch["labels"]
    return batch


def answer(kind: str, batch: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """Tokens that a ring generates after a prompt with images."""
    model = make(kind, "ringattn").eval()
    with RingCache(model, Ring(), max_tokens=80, batch=4) as cache:
        return turns(model, batch, {**options, "past_key_values": cache})


def turns(model: Any, batch: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """Generate 12 tokens."""
    return model.generate(**batch, max_new_tokens=12, eos_token_id=-1, pad_token_id=0, **options)


@pytest.mark.models
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", [row.kind for row in works(ROWS, "RingCache") if row.kind not in WITHOUT_POSITIONS])
def test_generation_after_images_equals_one_process(pool: Pools, kind: str, options: dict[str, Any]) -> None:
    options = {"do_sample": False, **options}
    if options.get("num_beams", 1) == 1:
        batch = prompt(kind, "")
        other = {**batch, "pixel_values": -batch["pixel_values"]}
        answers = [turns(make(kind, "sdpa").eval(), one, options) for one in (batch, other)]
        assert not torch.equal(*answers), "the answer depends on the images"
    # the first of such chunks of a shorter sequence is all padding, which is refused
    paddings = {"": (1, 2, 4)} if "prefill_chunk_size" in options else {"": (1, 4), "left": (2,)}
    for padding, world_sizes in paddings.items():
        batch = prompt(kind, padding)
        expected = turns(make(kind, "sdpa").eval(), batch, options)
        for world_size in world_sizes if "num_beams" not in options else world_sizes[-1:]:
            for found in pool(world_size).run(answer, kind, batch, options):
                assert torch.equal(found, expected)


def two_turns(kind: str, cache: Any, batch: dict[str, Any], more: Tensor) -> Tensor:
    """Tokens of a second turn, of text, after a first one with images."""
    model = make(kind, "sdpa" if cache is None else "ringattn").eval()
    options = {"max_new_tokens": 5, "eos_token_id": -1, "pad_token_id": 0, "do_sample": False}
    if cache is None:
        first = model.generate(**batch, **options, return_dict_in_generate=True)
        ids, cache = first.sequences, first.past_key_values
        return continue_text(model, ids, more, batch, {**options, "past_key_values": cache})
    with RingCache(model, Ring(), max_tokens=80) as held:
        ids = model.generate(**batch, **options, past_key_values=held)
        return continue_text(model, ids, more, batch, {**options, "past_key_values": held})


def continue_text(model: Any, ids: Tensor, more: Tensor, batch: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """Generate after a conversation and more text."""
    ids = torch.cat([ids, more], 1)
    types = {}
    if "mm_token_type_ids" in batch:
        types["mm_token_type_ids"] = ids.eq(IMAGE).int()
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **types, **options)


@pytest.mark.skipif(not FIVE, reason="positions of a second turn differ in 4.x")
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "llava"])
def test_text_after_an_answer_about_images_equals_one_process(pool: Pools, kind: str) -> None:
    batch, more = prompt(kind, ""), torch.tensor([[31, 32, 33, 34, 35, 36, 37]])
    expected = two_turns(kind, None, batch, more)
    for found in pool(2).run(two_turns, kind, True, batch, more):
        assert torch.equal(found, expected)


def cache_refusal(kind: str, batch: dict[str, Any]) -> str:
    """The error of generation on a ring."""
    try:
        answer(kind, batch, {"do_sample": False})
    except NotImplementedError as error:
        return str(error)
    return ""


@pytest.mark.skipif(not FIVE, reason="4.x says of no mask which tokens belong to an image")
@pytest.mark.parametrize("row", refused(ROWS, "RingCache"), ids=str)
def test_a_cache_refuses_tokens_of_an_image_that_see_each_other(pool: Pools, row: ModelRow) -> None:
    for found in pool(2).run(cache_refusal, row.kind, prompt(row.kind, "")):
        assert row.refusal in found
