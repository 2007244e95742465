"""Estimates: what fits is ranked, what does not says by how much, and numbers follow from the shape."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from ringattn.launch.train.model import Transformer
from ringattn.sizing import PRESETS, MeshEstimate, Savings, attention_estimate, estimate, load_profile, load_shape
from ringattn.sizing.attention_launch import Heads
from ringattn.sizing.memory import CHUNK_ELEMENTS, training_memory
from ringattn.sizing.ring_time import RingCall
from ringattn.sizing.shapes import ModelShape
from ringattn.sizing.step import token_ms
from ringattn.training.log_probs import CHUNK_ELEMENTS as CHUNK_OF_THE_LOSS
from tests.support.short_mask import ShortMask
from tests.support.timing import assert_quick

LLAMA = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


def best_of(model: str, tokens: int, **options: Any) -> MeshEstimate:
    best = estimate(model, tokens, **options).best
    assert best is not None
    return best


def seconds_of(model: str, tokens: int, **options: Any) -> float:
    seconds = best_of(model, tokens, **options).seconds
    assert seconds is not None
    return seconds.total


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_of_the_training_job(tied):
    shape = ModelShape("x", 32, 3, 4, 2, 8, 48, 100, tied=tied)
    with torch.device("meta"):
        model = Transformer(shape)
    assert shape.parameters == sum(p.numel() for p in model.parameters())


def test_a_configuration_of_transformers_is_a_shape(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    shape = load_shape(tmp_path)
    assert shape.parameters == PRESETS["llama3-8b"].parameters
    assert load_shape(LLAMA).layers == 32
    experts = LLAMA | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "head_dim": 128}
    assert load_shape(experts).active_experts == 8
    layers = ["sliding_attention", "full_attention"] * 16
    assert load_shape(LLAMA | {"sliding_window": 4096, "layer_types": layers}).window_layers == 16


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama3-8b", 8.03),
        ("qwen3-8b", 8.19),
        ("llama3-70b", 70.6),
        ("llama3-405b", 405.9),
        ("qwen3-32b", 32.8),
        ("qwen3-235b-a22b", 235.1),
    ],
)
def test_presets_have_the_parameters_of_their_models(name, billions):
    assert PRESETS[name].parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_the_best_is_first_and_the_others_say_why_not():
    found = estimate("llama3-8b", 2**20, gpus=8)
    times = [x.seconds.total / x.sequences for x in found.candidates if x.seconds is not None]
    assert times == sorted(times)
    assert found.best is found.candidates[0]
    assert found.candidates[0].reason == ""
    assert all(x.reason for x in found.candidates[1:])
    capacity = load_profile("h200").memory_gib * 2**30
    beyond = [x for x in found.candidates if x.memory.total > capacity]
    assert beyond
    assert all(x.reason.startswith("out of memory by ") for x in beyond)


def test_nothing_is_best_where_nothing_fits():
    found = estimate("llama3-405b", 2**20, gpus=8, gpu="h100")
    assert found.best is None
    assert found.longest == 0


def test_the_longest_context_fits_and_little_more_does_not():
    longest = estimate("llama3-8b", 131072).longest
    assert estimate("llama3-8b", longest).best is not None
    assert estimate("llama3-8b", int(1.05 * longest)).best is None
    # positions are int32
    assert 2**30 < estimate(ModelShape("x", 8, 1, 1, 1, 8, 8, 8), 1024, gpus=64).longest < 2**31


def test_a_slower_network_never_makes_a_job_faster():
    rates = [best_of("llama3-8b", 2**19, gpus=32, link_gbps=x).tokens_per_s or 0.0 for x in (100.0, 25.0, 5.0)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] > 0


def test_twice_the_gpus_take_about_half_the_time_of_a_long_sequence():
    times = [seconds_of("llama3-8b", 2**21, gpus=n, batch=1) for n in (16, 32)]
    assert times[1] == pytest.approx(times[0] / 2, rel=0.15)


def test_a_mask_with_less_work_takes_less_time():
    whole, window = (seconds_of("llama3-8b", 2**18, gpus=8, window=x) for x in (None, 4096))
    assert window < whole / 2


def test_serving_gives_first_token_and_token():
    best = best_of("llama3-8b", 131072, gpus=2, gpus_per_node=2, mode="serve", batch=4)
    assert (best.token_ms or 0.0) > 0
    assert best.memory.kv_cache == 4 * 131072 * 2 * 32 * 8 * 128 * 2 / 2
    assert best.mesh.cp == 2


def test_a_thousand_gpus_are_planned_within_seconds():
    found = []
    assert_quick(lambda: found.append(estimate("llama3-70b", 2**20, gpus=1024)), 10)
    assert found[0].best is not None


def test_one_attention_is_estimated():
    call = RingCall(ShortMask(65536, 65536, causal=True), 4, Heads(1, 32, 8, 128))
    found = attention_estimate(call)
    assert found["backward_ms"] > found["forward_ms"] > 0
    assert found["forward_exposed_ms"] < found["forward_ms"]


def test_weights_beside_tensor_parallel_ranks_cross_nodes():
    """With 8 of them per node the ranks that shard the same part of the weights are on different nodes."""
    rates = [estimate("llama3-70b", 8192, gpus=64, batch=1, link_gbps=x).candidates for x in (400.0, 5.0)]
    exposed = [
        one.seconds.fsdp_exposed for found in rates for one in found if one.mesh.tp == 8 and one.seconds is not None
    ]
    assert exposed[-1] > 2 * exposed[0]


def test_rings_have_equally_many_ranks_on_each_of_their_nodes():
    found = estimate("llama3-8b", 2**17, gpus=24, gpus_per_node=8).candidates
    assert {(x.mesh.cp * x.mesh.tp, x.mesh.nodes) for x in found} == {(1, 1), (2, 1), (4, 1), (8, 1), (24, 3)}


@pytest.mark.parametrize(("gpu", "schedules"), [("h200", {"fused"}), ("a100", {"stepwise"})])
def test_a_ring_takes_the_schedule_of_its_kernels(gpu, schedules):
    found = estimate("llama3-8b", 2**16, gpus=4, gpus_per_node=4, gpu=gpu)
    assert {x.schedule for x in found.candidates} == schedules


def test_keys_that_are_saved_take_the_memory_of_the_rows_that_move():
    whole, window = (
        next(x for x in estimate("llama3-8b", 2**17, window=w, recompute="selective").candidates if x.mesh.cp == 8)
        for w in (None, 4096)
    )
    assert window.keep
    assert window.memory.activations < whole.memory.activations - 10 * 2**30 * whole.keep


def test_a_prompt_takes_less_time_where_layers_have_windows():
    mixed = LLAMA | {"sliding_window": 4096, "layer_types": ["sliding_attention", "full_attention"] * 16}
    whole, windowed = (estimate(x, 2**18, gpus=2, gpus_per_node=2, mode="serve").best for x in (LLAMA, mixed))
    assert whole is not None
    assert windowed is not None
    assert whole.seconds is not None
    assert windowed.seconds is not None
    assert windowed.seconds.attention < 0.6 * whole.seconds.attention


def test_experts_that_every_token_uses_are_counted():
    shape = ModelShape("x", 64, 2, 4, 4, 16, 32, 100, experts=8, active_experts=2, shared_experts=1)
    assert shape.mlp_width == 3 * 32
    assert shape.active_layer_parameters == shape.attention_parameters + 3 * 64 * 3 * 32
    # requests choose different experts
    assert token_ms(shape, 1024, 4, 1, load_profile("h200")) > token_ms(shape, 1024, 1, 1, load_profile("h200"))


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("gpus must be a multiple of gpus_per_node 8, got 12", {"gpus": 12}),
        ("tokens must be at least 1, got 0", {"tokens": 0}),
        ("mode must be one of train, serve, got 'x'", {"mode": "x"}),
        ("recompute must be one of none, selective, full", {"recompute": "some"}),
        ("link_gbps must be above 0", {"link_gbps": 0.0}),
        ("model must be one of llama3-8b, ", {"model": "nothing"}),
        ("gpu must be one of a100, ", {"gpu": "nothing"}),
        ("a configuration must have hidden_size", {"model": {"x": 1}}),
        ("must have num_hidden_layers above 0", {"model": LLAMA | {"num_hidden_layers": 0}}),
        ("offload must be at most the number of layers, 32, got 33", {"savings": Savings(offload=33)}),
        ("recompute must be selective or full with offload", {"savings": Savings(offload="all"), "recompute": "none"}),
        ("documents must be boundaries", {"documents": (0, 5)}),
        ("batch must be at least 1, got 0", {"batch": 0}),
        ("recompute must be left out when serving, got 'full'", {"mode": "serve", "recompute": "full"}),
        (
            "layer_types must be among .*, got linear_attention",
            {"model": LLAMA | {"layer_types": ["linear_attention"]}},
        ),
    ],
)
def test_impossible_jobs_are_refused(words, options):
    with pytest.raises(ValueError, match=words):
        estimate(**{"model": "llama3-8b", "tokens": 1024} | options)


@pytest.mark.parametrize(("name", "billions", "active"), [("deepseek-v3", 671, 37), ("glm-4.7-flash", 30, 3.5)])
def test_a_cache_of_latents_is_planned_by_their_bytes(name: str, billions: float, active: float) -> None:
    shape = load_shape(name)
    assert shape.parameters == pytest.approx(billions * 1e9, rel=0.01)
    assert shape.active_layer_parameters * shape.layers == pytest.approx(active * 1e9, rel=0.1)
    assert shape.kv_token_bytes == 1152 * shape.layers
    found = estimate(name, 2**20, gpus=16, gpus_per_node=8, gpu="b200", mode="serve").candidates[0]
    assert found.memory.kv_cache == 2**20 * 1152 * shape.layers / 16


# what bounds activations


def million(**savings: Any) -> MeshEstimate | None:
    """Qwen3-8B at 1,048,576 tokens on eight H100, with MLPs by 16,384 rows, on one ring."""
    found = estimate(
        "qwen3-8b", 2**20, gpu="h100", batch=1, recompute="selective", savings=Savings(mlp_rows=16384, **savings)
    )
    return next((one for one in found.candidates if str(one.mesh) == "dp=1,cp=8" and one.seconds is not None), None)


def test_a_million_tokens_of_an_8b_model_fit_eight_gpus_of_80_gb_with_offload_alone():
    assert million() is None
    assert million(offload="all", chunked_loss=False) is None
    fewest, every = million(offload="auto"), million(offload="all")
    assert fewest is not None
    assert every is not None
    for one in (fewest, every):
        assert one.seconds is not None
        assert one.seconds.total < 285
        assert one.seconds.offload_exposed == 0
    layers = fewest.savings.offload
    assert isinstance(layers, int)
    assert 0 < layers < 36
    assert million(offload=layers - 1) is None
    # the residual stream, o and lse of 131,072 rows
    assert every.host_bytes == 36 * 131072 * (4096 * 2 + 32 * (128 * 2 + 4))
    assert every.memory.total < fewest.memory.total


def test_a_slow_host_is_waited_for():
    fast, slow = (
        estimate(
            *("qwen3-8b", 131072),
            gpus=2,
            batch=1,
            gpu=replace(load_profile("h200"), host_gbps=rate),
            recompute="full",
            savings=Savings("all"),
        ).best
        for rate in (20.0, 0.02)
    )
    assert fast is not None
    assert slow is not None
    assert fast.seconds is not None
    assert slow.seconds is not None
    assert fast.seconds.offload_exposed == 0
    # out and back
    assert slow.seconds.offload_exposed == pytest.approx(2 * slow.host_bytes / 0.02e9, rel=0.2)


def test_chunks_of_mlps_and_of_the_loss_hold_their_rows():
    shape, tokens = PRESETS["qwen3-8b"], 131072
    call = RingCall(ShortMask(tokens, tokens, causal=True), 1, Heads(1, 32, 8, 128))

    def peak(**savings: Any) -> float:
        return training_memory(shape, tokens, call, shards=8, recompute="full", savings=Savings(**savings)).total

    # six tensors of the MLP's width and its result, and 12 bytes of each logit
    assert peak(mlp_rows=65536) - peak(mlp_rows=32768) == 32768 * (6 * shape.mlp_width + shape.dim) * 2
    assert peak(chunked_loss=False) - peak() > 10 * tokens * shape.vocab_size
    assert CHUNK_ELEMENTS == CHUNK_OF_THE_LOSS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": "some"}, "offload must be a number of layers"),
        ({"offload": -1}, "offload must be a number of layers"),
        ({"mlp_rows": 0}, "mlp_rows must be at least 1, got 0"),
    ],
)
def test_savings_that_mean_nothing_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=f"^{message}"):
        Savings(**options)


def test_nothing_is_saved_when_serving():
    with pytest.raises(ValueError, match=r"^savings must be left out when serving"):
        estimate("llama3-8b", 4096, mode="serve", savings=Savings("all"))
