"""A transformer on a ring refuses, on every rank, input and features that would give another result than one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.hooks.first_block_cache import FirstBlockCacheConfig
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from diffusers.models.attention_dispatch import attention_backend
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ringattn import Ring
from ringattn.integrations.diffusers import DenoiserSpec, TokenCount, TokenDim, disable_ring, enable_ring
from ringattn.integrations.diffusers.denoisers import FLUX, WAN
from ringattn.integrations.diffusers.hooks import RingAttentionMode, cut
from ringattn.plan.layouts import contiguous
from ringattn.plan.sharding import Sharding
from tests.integrations.diffusers.denoisers import CASES, Denoiser, run
from tests.integrations.diffusers_rows import ROWS
from tests.integrations.model_table import ModelRow, refused
from tests.support.pool import Pools


def on_ring(case: Denoiser = CASES["flux"]) -> tuple[Any, dict[str, Any]]:
    model = case.make()
    enable_ring(model, Ring())
    return model, case.arguments()


def test_what_is_no_transformer_or_no_ring_is_refused() -> None:
    with pytest.raises(TypeError, match="ring must"):
        enable_ring(nn.Linear(1, 1), 2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="transformer must"):
        enable_ring("flux", Ring())  # pyright: ignore[reportArgumentType]
    with pytest.raises(NotImplementedError, match="transformer must"):
        enable_ring(nn.Linear(1, 1), Ring())
    with pytest.raises(
        NotImplementedError, match="ring must have one virtual rank per process, got virtual_size=2 on 1"
    ):
        enable_ring(CASES["flux"].make(), Ring(virtual_size=2))


def test_a_second_ring_is_refused() -> None:
    model, _ = on_ring()
    with pytest.raises(ValueError, match="transformer must"):
        enable_ring(model, Ring())


def add_lora(model: Any) -> Any:
    from peft import LoraConfig

    model.add_adapter(LoraConfig(r=2, target_modules=["proj_out"]))
    return model.double()


@pytest.mark.parametrize("change", [copy.deepcopy, add_lora])
def test_a_transformer_with_another_last_module_is_refused_until_it_is_put_on_a_ring_again(
    change: Callable[[Any], Any],
) -> None:
    """A copy would run the weights of the original, and adapters around the last module would not gather its output."""
    model, sample = on_ring()
    expected = model(**sample).sample
    changed = change(model)
    with pytest.raises(RuntimeError, match=r"must keep its modules, got another proj_out .* call disable_ring"):
        changed(**sample)
    disable_ring(changed)
    enable_ring(changed, Ring())
    assert torch.equal(changed(**sample).sample, expected)


def test_the_transformer_inside_a_compiled_one_is_put_on_the_ring() -> None:
    model = CASES["flux"].make()
    compiled: Any = torch.compile(model, backend="eager")
    enable_ring(compiled, Ring())
    with pytest.raises(ValueError, match="must not be on a ring yet"):
        enable_ring(model, Ring())
    disable_ring(compiled)
    enable_ring(model, Ring())


def test_the_share_of_a_rank_is_known_without_reading_tensors() -> None:
    """One number for all tokens stays whole, as a timestep; numbers of first tokens are counted while torch.compile traces."""
    segments = {"image": Sharding(5, "contiguous", contiguous(5, 2), 1)}
    first = torch.compile(lambda x, n: x[: cut(n, TokenCount("image"), segments)], backend="eager", fullgraph=True)
    assert [len(first(torch.ones(4), n)) for n in (2, 4, 5)] == [0, 1, 2]
    assert [cut(torch.ones(2, n), TokenDim("image", 1), segments).shape[1] for n in (1, 5)] == [1, 2]


def set_context_parallel(model: Any) -> None:
    """What `enable_parallelism` leaves on GPUs."""
    model._parallel_config = ParallelConfig(context_parallel_config=ContextParallelConfig(ring_degree=2))


FEATURES: dict[str, Callable[[Any, dict[str, Any]], object]] = {
    "cache": lambda model, _: model.enable_cache(FirstBlockCacheConfig()),
    "ip_adapter": lambda model, _: setattr(model, "encoder_hid_proj", nn.Linear(8, 8)),
    "parallelism": lambda model, _: set_context_parallel(model),
    "query_mask": lambda _, sample: sample.update(
        joint_attention_kwargs={"attention_mask": torch.ones(2, 1, 14, 14, dtype=torch.bool)}
    ),
    "checkpoint": lambda model, _: model.enable_gradient_checkpointing(),
    "flux2_cache": lambda _, sample: sample.update(kv_cache_mode="extract", num_ref_tokens=2),
    "ltx2_mask": lambda _, sample: sample.update(video_self_attention_mask=torch.ones(2, 9, 9)),
}


@pytest.mark.parametrize("row", refused(ROWS, "enable_ring"), ids=str)
def test_a_feature_that_needs_whole_tokens_is_refused(row: ModelRow) -> None:
    model, sample = on_ring(CASES.get(row.kind.split("_")[0], CASES["flux"]))
    FEATURES[row.kind](model, sample)
    with pytest.raises((NotImplementedError, RuntimeError), match=row.refusal):
        run(model, sample)


def test_features_are_refused_before_a_model_is_on_a_ring() -> None:
    model = CASES["flux"].make()
    model.enable_cache(FirstBlockCacheConfig())
    with pytest.raises(NotImplementedError, match="the cache of a transformer must be off on a ring"):
        enable_ring(model, Ring())


def test_another_attention_backend_is_refused() -> None:
    model, sample = on_ring()
    with torch.no_grad(), attention_backend("flex"):
        with pytest.raises(RuntimeError, match=r"must make 1 call\(s\) of torch's .*, got 0; call transformer\.set"):
            model(**sample)


def test_diffusers_refuses_names_of_other_backends() -> None:
    """The reason for redirecting calls: `ModelMixin.set_attention_backend` takes members of `AttentionBackendName` only."""
    [row] = refused(ROWS, "diffusers")
    with pytest.raises(ValueError, match=row.refusal):
        CASES["flux"].make().set_attention_backend("ringattn")


def test_dropout_and_a_second_call_of_attention_are_refused() -> None:
    x = torch.randn(1, 2, 4, 8)
    sharding = Ring().sharding(4)
    with RingAttentionMode([(sharding, sharding)]):
        with pytest.raises(NotImplementedError, match="dropout_p must"):
            F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        with pytest.raises(RuntimeError, match=r"1 call\(s\) of .*, got more"):
            F.scaled_dot_product_attention(x, x, x)


def test_rows_that_were_not_cut_are_refused() -> None:
    x = torch.randn(1, 2, 4, 8)
    sharding = Ring().sharding(3)
    with (
        RingAttentionMode([(sharding, sharding)]),
        pytest.raises(ValueError, match=r"must have the \(3, 3\) rows of this rank, got \(4, 4\)"),
    ):
        F.scaled_dot_product_attention(x, x, x)


def test_a_block_alone_is_refused() -> None:
    model, sample = on_ring(CASES["wan"])
    with pytest.raises(RuntimeError, match="must run inside its forward, got a block alone"):
        model.rope(sample["hidden_states"])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (replace(FLUX, attention=("blocks.*.attn",)), r"must name modules .* got 'blocks.\*.attn', which Flux"),
        (replace(FLUX, attention=("transformer_blocks.*.attn",)), "must name every attention module, got Flux"),
        (replace(WAN, gather={"head": TokenDim("image", 1)}), "must name modules of the transformer, got 'blocks"),
    ],
)
def test_a_spec_that_does_not_fit_the_model_is_refused(spec: DenoiserSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        enable_ring(CASES["flux"].make(), Ring(), spec=spec)


def refused_on_ranks(kind: str) -> str:
    """The message that a rank of two gets."""
    ring = Ring()
    case = {"short text": Denoiser("QwenImageTransformer2DModel", text=1)}.get(kind, CASES["flux"])
    model, sample = case.make(), case.arguments()
    try:
        enable_ring(model, ring)
        if kind == "other noise":
            sample["hidden_states"] += ring.rank
        if kind == "other text" and ring.rank:
            sample["encoder_hidden_states"] = sample["encoder_hidden_states"][:, :3]
        model(**sample)
    except (ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def arguments_that_may_differ(case: Denoiser) -> list[str]:
    """Tensors that may differ between ranks in a later forward, of a size that was there before, without the error."""
    ring = Ring()
    model, sample = on_ring(case)
    accepted = []
    with torch.no_grad():
        model(**sample)
        leaves, tree = tree_flatten(sample)
        for i, x in enumerate(leaves):
            if isinstance(x, Tensor):
                try:
                    model(**tree_unflatten([*leaves[:i], x + ring.rank, *leaves[i + 1 :]], tree))
                    accepted.append(f"leaf {i}")
                except ValueError as error:
                    accepted += [] if "must be the same on all ranks of a ring" in str(error) else [str(error)]
    return accepted


@pytest.mark.parametrize("name", {case.model: name for name, case in CASES.items() if not case.lora}.values())
def test_ranks_with_different_arguments_are_refused_in_every_forward(pool: Pools, name: str) -> None:
    assert pool(2).run(arguments_that_may_differ, CASES[name]) == [[], []]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("other noise", "pass generator= with one seed on all ranks"),
        ("other text", "pass generator= with one seed on all ranks"),
        ("short text", "NotImplementedError: text must have at least 2 tokens, one per rank, got 1"),
    ],
)
def test_every_rank_refuses(pool: Pools, kind: str, message: str) -> None:
    assert all(message in found for found in pool(2).run(refused_on_ranks, kind))
