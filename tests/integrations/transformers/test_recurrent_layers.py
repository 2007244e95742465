"""Models with recurrent layers on a ring equal one process: gated delta rule and Mamba-2, beside attention or alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, Trainer

from ringattn import Ring
from ringattn.integrations.transformers import RingCollator, register, replace_recurrent_layers, shard_batch
from ringattn.integrations.transformers.trainer import RingTrainer
from ringattn.masks import tree
from tests.integrations.model_table import ModelRow, refused, works
from tests.integrations.recurrent_rows import ROWS
from tests.integrations.transformers.models import VOCAB, gradients, learn, tokens
from tests.integrations.transformers.test_models import _padded, assert_equal
from tests.integrations.transformers.test_trainer import Samples, arguments, processes
from tests.support.pool import Pools

FIVE = transformers.__version__.startswith("5.")
SERVED_BY_FOUR = ("qwen3_next",)
"""The others of 4.57 make their own masks, or do not pass keywords on to their layers."""

_COMMON = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 12,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_DELTA = {
    **_COMMON,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS = {
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_MAMBA_ALONE = {
    "hidden_size": 24,
    "vocab_size": VOCAB,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_DELTA, **_EXPERTS},
    "qwen3_5_text": {**_DELTA, "head_dim": 8},
    "qwen3_5_moe_text": {**_DELTA, **_EXPERTS},
    "olmo_hybrid": {**_DELTA, "linear_allow_neg_eigval": True},
    "mamba2": {
        **_MAMBA_ALONE,
        "residual_in_fp32": False,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 12,
        "state_size": 8,
        "expand": 2,
    },
    "bamba": {**_COMMON, **_MAMBA, "attn_layer_indices": [1], "z_loss_coefficient": 0.0},
    "zamba2": {
        **_COMMON,
        "num_key_value_heads": 4,
        "n_mamba_heads": 4,
        "mamba_d_state": 8,
        "mamba_ngroups": 2,
        "mamba_expand": 2,
        "mamba_headdim": 12,
        "attention_head_dim": 12,
        "chunk_size": 16,
        "layers_block_type": ["mamba", "hybrid"],
        "num_mem_blocks": 1,
        "use_mem_rope": True,
        "adapter_rank": 4,
    },
    "falcon_h1": {
        **_COMMON,
        **_MAMBA,
        "mamba_d_ssm": 48,
        "mamba_rms_norm": False,
        "ssm_in_multiplier": 1.5,
        "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
    },
    "nemotron_h": {
        **_MAMBA_ALONE,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "layers_block_type": ["mamba", "attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 12,
        "ssm_state_size": 8,
    },
    "granitemoehybrid": {
        **_COMMON,
        **_MAMBA,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 32,
    },
    "jamba": {**_COMMON, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "use_mamba_kernels": False},
    "lfm2": {**_COMMON, "layer_types": ["conv", "full_attention"]},
    "mamba": {"hidden_size": 24, "num_hidden_layers": 2, "vocab_size": VOCAB, "state_size": 4},
}

SINGLE = ("qwen3_next", "qwen3_5_moe_text", "mamba2")
"""These compute experts, or all but the weights, in single precision."""

SERVED = [row for row in works(ROWS, "shard_batch") if FIVE or row.kind in SERVED_BY_FOUR]


def make(kind: str, implementation: str, **changes: Any) -> Any:
    """A model of a kind, in train mode; its weights depend on the kind alone."""
    register()
    config = AutoConfig.for_model(kind, **{**CONFIGS[kind], **changes})
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                # states that last for tens of tokens, so that they cross several ranks
                parameter.copy_(torch.linspace(-3.0, -1.0, parameter.numel()).view_as(parameter))
            elif parameter.dim() > 1:
                # larger than the usual start, so that layers matter beside the residual stream
                parameter.mul_(8)
    return (model if kind in SINGLE else model.double()).train()


def on_ranks(
    kind: str, batch: dict[str, Any], layout: str, checkpointing: bool | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the ring, averaged over its ranks as DDP does."""
    ring = Ring()
    model = make(kind, "ringattn")
    assert replace_recurrent_layers(model)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    loss = learn(model, shard_batch(batch, ring, layout))
    grads = gradients(model)
    for x in (loss, *grads.values()):
        dist.all_reduce(x)
        x /= ring.world_size
    return loss, grads


def alone(kind: str, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the model of transformers in one process."""
    model = make(kind, "eager" if kind == "mamba2" else "sdpa")
    return learn(model, {**batch, "use_cache": False}), gradients(model)


@pytest.mark.parametrize("row", SERVED, ids=str)
def test_ranks_equal_one_process(pool: Pools, row: ModelRow) -> None:
    ids = tokens(37, rows=2)
    batch = {"input_ids": ids, "labels": ids}
    expected = alone(row.kind, batch)
    for world_size, layout in [(1, "contiguous"), (2, "zigzag"), (4, "contiguous")]:
        for found in pool(world_size).run(on_ranks, row.kind, batch, layout):
            assert_equal(found, expected)


EACH = ("qwen3_next", "bamba") if FIVE else SERVED_BY_FOUR
"""One model of each recurrence beside attention."""

ALSO_ALONE = (*EACH, *(["mamba2"] if FIVE else []))
"""The same, and one without attention."""


@pytest.mark.parametrize("layout", ["striped", "balanced", "zigzag"])
@pytest.mark.parametrize("kind", EACH)
def test_every_layout_is_the_same_model(pool: Pools, kind: str, layout: str) -> None:
    ids = tokens(23)
    batch = {"input_ids": ids, "labels": ids}
    assert_equal(pool(3).run(on_ranks, kind, batch, layout)[0], alone(kind, batch))


@pytest.mark.parametrize("side", ["left", "right", "hole"])
@pytest.mark.parametrize("kind", ALSO_ALONE)
def test_padding_changes_no_output_and_no_gradient(pool: Pools, kind: str, side: str) -> None:
    batch = _padded(side)
    assert_equal(pool(2).run(on_ranks, kind, batch, "zigzag")[0], alone(kind, batch))


@pytest.mark.parametrize("kind", ALSO_ALONE)
def test_packed_documents_do_not_see_each_other(pool: Pools, kind: str) -> None:
    lengths = [3, 17, 1, 12]
    ids = tokens(sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    labels = ids.masked_fill(positions == 0, -100)
    # one process has each document in a call of its own
    model = make(kind, "eager" if kind == "mamba2" else "sdpa")
    parts = [x for x in ids.split(lengths, 1) if x.shape[1] > 1]
    count = int((labels != -100).sum())
    loss = sum(
        learn(model, {"input_ids": x, "labels": x, "use_cache": False, "num_items_in_batch": count}) for x in parts
    )
    assert isinstance(loss, Tensor), "there are documents"
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions}
    for found in pool(2).run(on_ranks, kind, batch, "zigzag"):
        assert_equal(found, (loss, gradients(model)))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", [*ALSO_ALONE, *(["falcon_h1"] if FIVE else [])])
def test_checkpointing_changes_nothing(pool: Pools, kind: str, reentrant: bool) -> None:
    ids = tokens(21)
    batch = {"input_ids": ids, "labels": ids}
    assert_equal(pool(2).run(on_ranks, kind, batch, "zigzag", reentrant)[0], alone(kind, batch))


def with_wrapper(kind: str, batch: dict[str, Any], wrapper: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of a compiled model, or of one that FSDP2 shards, averaged over ranks."""
    ring = Ring()
    model = make(kind, "ringattn")
    replace_recurrent_layers(model)
    if wrapper == "fsdp":
        mesh = init_device_mesh("cpu", (ring.world_size,))
        for layer in model.base_model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    called: Any = torch.compile(model, backend="aot_eager") if wrapper == "compile" else model
    loss = learn(called, shard_batch(batch, ring))
    grads: dict[str, Any] = gradients(model)
    if wrapper == "fsdp":
        grads = {name: grad.full_tensor() for name, grad in grads.items()}
    for x in (loss, *(grads.values() if wrapper == "compile" else ())):
        dist.all_reduce(x)
        x /= ring.world_size
    return loss, grads


@pytest.mark.skipif(not FIVE, reason="once is enough")
@pytest.mark.parametrize(
    ("kind", "wrapper"),
    [
        ("bamba", "fsdp"),
        ("mamba2", "fsdp"),
        ("mamba2", "compile"),
        pytest.param("qwen3_next", "compile", marks=pytest.mark.slow),
    ],
)
def test_fsdp_and_compiled_models_equal_one_process(pool: Pools, kind: str, wrapper: str) -> None:
    ids = tokens(37)
    batch = {"input_ids": ids, "labels": ids}
    for found in pool(2).run(with_wrapper, kind, batch, wrapper):
        assert_equal(found, alone(kind, batch))


def collate(features: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """A batch of one sample, whose first label is not counted: 4.57 counts labels before they are shifted."""
    batch = {name: torch.tensor([values]) for name, values in features[0].items()}
    batch["labels"][:, 0] = -100
    return batch


def trained(folder: str, kind: str, implementation: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters of a Trainer, or of a RingTrainer on all ranks."""
    model = make(kind, implementation, use_cache=False).float()
    ringed = implementation == "ringattn"
    if ringed:
        replace_recurrent_layers(model)
    options: dict[str, Any] = {"per_device_train_batch_size": 1, "max_steps": 3, "eval_strategy": "no"}
    with processes():
        trainer = (RingTrainer if ringed else Trainer)(
            model=model,
            args=arguments(folder, **options, learning_rate=0.01),
            data_collator=RingCollator(collate, Ring()) if ringed else collate,
            train_dataset=Samples(),
        )
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, {name: x.detach().clone() for name, x in model.named_parameters()}


@pytest.mark.parametrize("kind", [EACH[-1], *(["mamba2"] if FIVE else [])])
def test_trainer_on_a_ring_trains_as_in_one_process(pool: Pools, tmp_path: Path, kind: str) -> None:
    losses, parameters = trained(str(tmp_path), kind, "eager" if kind == "mamba2" else "sdpa")
    start = dict(make(kind, "eager").named_parameters())
    assert len(losses) == 3
    for found, weights in pool(2).run(trained, str(tmp_path), kind, "ringattn"):
        assert found == pytest.approx(losses, abs=1e-4)
        for name, x in parameters.items():
            moved = (x - start[name]).norm()
            assert (weights[name] - x).norm() <= 1e-3 * moved, name


def classify(batch: dict[str, Any], implementation: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of a model whose head chooses the last token of each sequence."""
    register()
    config = AutoConfig.for_model("qwen3_next", **CONFIGS["qwen3_next"], num_labels=3)
    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation=implementation).train()
    if implementation == "ringattn":
        replace_recurrent_layers(model)
        batch = shard_batch(batch, Ring(), pooling=True)
    loss = learn(model, {**batch, "use_cache": False})
    grads = gradients(model)
    if implementation == "ringattn":
        for x in (loss, *grads.values()):
            dist.all_reduce(x)
            x /= dist.get_world_size()
    return loss, grads


def test_a_head_that_chooses_a_row_chooses_behind_recurrent_layers(pool: Pools) -> None:
    batch = {"input_ids": tokens(23, rows=2), "labels": torch.tensor([2, 0])}
    for found in pool(2).run(classify, batch, "ringattn"):
        assert_equal(found, classify(batch, "sdpa"))


def half_precision(kind: str, batch: dict[str, Any], mixed: bool) -> Tensor:
    """Loss of a model in bf16, or in fp32 under autocast, averaged over ranks."""
    ring = Ring()
    model = make(kind, "ringattn").to(torch.float32 if mixed else torch.bfloat16)
    replace_recurrent_layers(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        loss = learn(model, shard_batch(batch, ring))
    assert all(grad.isfinite().all() for grad in gradients(model).values())
    return ring.sum(loss) / ring.world_size


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("kind", EACH)
def test_bf16_rounds_as_in_one_process(pool: Pools, kind: str, mixed: bool) -> None:
    ids = tokens(37)
    batch = {"input_ids": ids, "labels": ids}
    exact, _ = alone(kind, batch)
    model = make(kind, "sdpa").to(torch.float32 if mixed else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        rounded = learn(model, {**batch, "use_cache": False})
    for found in pool(2).run(half_precision, kind, batch, mixed):
        # twice the error of one process, plus one rounding
        assert abs(found - exact) <= 2 * abs(rounded - exact) + torch.finfo(torch.bfloat16).eps * exact


@pytest.mark.parametrize("row", SERVED, ids=str)
def test_calls_without_a_sharding_and_names_of_weights_stay_as_they_were(row: ModelRow) -> None:
    ids = tokens(12)
    model = make(row.kind, "ringattn")
    before, names = learn(model, {"input_ids": ids, "labels": ids, "use_cache": False}), list(model.state_dict())
    replaced = replace_recurrent_layers(model)
    hooks = [len(part._forward_pre_hooks) for part in model.modules()]
    assert replace_recurrent_layers(model) == replaced
    assert [len(part._forward_pre_hooks) for part in model.modules()] == hooks
    for one in (model, copy.deepcopy(model)):
        assert torch.equal(learn(one, {"input_ids": ids, "labels": ids, "use_cache": False}), before)
        assert list(one.state_dict()) == names


def copied(kind: str) -> tuple[Tensor, Tensor]:
    """Loss of a model and of its copy."""
    ids = tokens(15)
    model = make(kind, "ringattn")
    replace_recurrent_layers(model)
    part = shard_batch({"input_ids": ids, "labels": ids}, Ring())
    return learn(model, part), learn(copy.deepcopy(model), part)


@pytest.mark.parametrize("kind", ALSO_ALONE)
def test_a_copy_works_over_shards_too(pool: Pools, kind: str) -> None:
    for first, second in pool(2).run(copied, kind):
        assert torch.equal(first, second)


@pytest.mark.skipif(not FIVE, reason="these are not on the attention interface in 4.57")
@pytest.mark.parametrize("row", refused(ROWS, "shard_batch"), ids=str)
def test_other_recurrent_layers_are_refused(row: ModelRow) -> None:
    with pytest.raises(ValueError, match=row.refusal):
        replace_recurrent_layers(make(row.kind, "eager"))


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(
        ValueError, match="a model must have recurrent layers of a kind that ringattn knows, got Linear"
    ):
        replace_recurrent_layers(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="kernels must be one of auto, fla, torch"):
        replace_recurrent_layers(make("qwen3_next", "ringattn"), kernels="triton")
    model = make("qwen3_next", "ringattn")
    model.model.layers[1].short = torch.nn.Conv1d(24, 24, 3, groups=24, padding=2)
    with pytest.raises(NotImplementedError, match=r"got model\.layers\.1\.short of Qwen3NextForCausalLM"):
        replace_recurrent_layers(model)
    model = make("qwen3_next", "ringattn", hidden_act="gelu")
    with pytest.raises(NotImplementedError, match="a recurrent layer must have the activation 'silu', got 'gelu'"):
        replace_recurrent_layers(model)


@pytest.mark.skipif(FIVE, reason="5.x passes keywords on")
def test_models_of_4_that_pass_no_keywords_on_are_refused() -> None:
    for kind in ("zamba2", "mamba2"):
        with pytest.raises(NotImplementedError, match="a model must pass keywords on to its layers"):
            replace_recurrent_layers(make(kind, "eager"))
    ids = tokens(9)
    for kind in ("bamba", "falcon_h1", "granitemoehybrid"):
        model = make(kind, "ringattn")
        replace_recurrent_layers(model)
        with pytest.raises(NotImplementedError, match="the mask of attention must come from ringattn's mask function"):
            model(**shard_batch({"input_ids": ids, "labels": ids}, Ring()))


def call_wrongly(how: str) -> str:
    """The error of a call."""
    ids = tokens(12)
    batch = {"input_ids": ids, "labels": ids}
    model = make("mamba2" if how == "no attention" else EACH[-1], "ringattn")
    if how in ("not replaced", "no attention"):
        batch = shard_batch(batch, Ring())
    else:
        replace_recurrent_layers(model)
    if how == "z loss":
        model.z_loss_coefficient = 0.1
        batch = shard_batch(batch, Ring())
    if how == "tree":
        batch = shard_batch(batch, Ring(), tree=tree([None], [12]))
    if how == "step":
        batch = {"input_ids": ids, "step": object()}
    if how == "cache":
        batch = shard_batch(batch, Ring()) | {"use_cache": True}
    try:
        model(**batch)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "match"),
    [
        (
            "not replaced",
            "call ringattn.integrations.transformers.replace_recurrent_layers(model) first",
        ),
        pytest.param(
            "no attention",
            "call ringattn.integrations.transformers.replace_recurrent_layers(model) first",
            marks=pytest.mark.skipif(not FIVE, reason="Mamba-2 of 4.57 takes no sharding"),
        ),
        ("no sharding", "a model with recurrent layers must be called with a sharding among 2 ranks, got none"),
        ("z loss", "z_loss_coefficient must be 0 where ranks share a sequence, got 0.1"),
        ("tree", "tree must be left out for a model with recurrent layers"),
        ("step", "step must be left out of a call of a model with recurrent layers"),
        ("cache", "a cache must be left out where ranks share a sequence"),
    ],
)
def test_wrong_calls_are_refused_on_every_rank(pool: Pools, how: str, match: str) -> None:
    for found in pool(2).run(call_wrongly, how):
        assert match in found
