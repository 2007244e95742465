"""Jobs of torchtitan on a ring make the steps of its own attention on one rank, or are refused by the name of an option."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("torchtitan")

from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # pyright: ignore[reportMissingImports]
from torchtitan.models.llama3.config_registry import (  # pyright: ignore[reportMissingImports]
    llama3_debugmodel,
    llama3_debugmodel_varlen_attn,
)

from ringattn import Ring
from ringattn.integrations.torchtitan import RingAttention, attention, with_ring
from tests.support.scripts import run_script
from tests.test_docs import blocks, run

JOB = Path(__file__).with_name("job.py")


def steps(ranks: int, *arguments: str) -> list[tuple[list[float], list[float]]]:
    """Losses and norms of gradients of five steps, as each rank prints them in its last line."""
    lines = [line for line in run_script(JOB, *arguments, ranks=ranks).splitlines() if line.startswith("[[")]
    assert len(lines) == ranks
    return [json.loads(line) for line in lines]


@pytest.mark.models
@pytest.mark.dist
@pytest.mark.parametrize(
    ("model", "ranks"), [("llama3_debugmodel", 2), ("llama3_debugmodel", 4), ("qwen3_debugmodel", 2)]
)
def test_a_job_on_a_ring_makes_the_steps_of_one_rank(model: str, ranks: int) -> None:
    (expected,) = steps(1, model, "own")
    for found in steps(ranks, model, "ring", f"parallelism.context_parallel_degree={ranks}"):
        for numbers, wanted in zip(found, expected, strict=True):
            assert len(wanted) == 5
            assert numbers == pytest.approx(wanted, rel=1e-5)


def test_the_config_on_the_page_attends_around_a_ring() -> None:
    space: dict[str, Any] = {"__name__": "my_configs"}
    for title, code, _ in blocks("torchtitan.md"):
        run(code, title, space)
    for layer in space["llama3_8b_ring"]().model_spec.model.layers:
        assert isinstance(layer.attention.inner_attention, RingAttention.Config)


def test_windows_of_varlen_attention_are_kept() -> None:
    config = llama3_debugmodel_varlen_attn()
    layers = config.model_spec.model.layers
    layers[0].attention.inner_attention = dataclasses.replace(layers[0].attention.inner_attention, window_size=(15, 0))
    windows = [layer.attention.inner_attention.window for layer in with_ring(config).model_spec.model.layers]
    assert windows == [(15, 0)] + [(None, 0)] * (len(layers) - 1)


def test_rows_are_one_sequence_of_documents() -> None:
    sharding = attention.shard_rows(Ring(), "zigzag", torch.tensor([[3, 4, 0, 1], [0, 1, 2, 3]]))
    assert sharding.documents == (0, 2, 4, 8)
    assert sharding.positions.tolist() == list(range(8))


GOOD = {
    "training": TrainingConfig(disable_cuda_graphs=True),
    "parallelism": ParallelismConfig(spmd_backend="full_dtensor"),
    "compile_config": CompileConfig(),
}


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ({"training": TrainingConfig()}, "disable_cuda_graphs"),
        ({"parallelism": ParallelismConfig(spmd_backend="partial_dtensor")}, "spmd_backend"),
        (
            {"parallelism": ParallelismConfig(spmd_backend="full_dtensor", context_parallel_load_balancer="ptrr")},
            "load_balancer",
        ),
        ({"compile_config": CompileConfig(enable=True)}, "compile.components"),
    ],
)
def test_options_that_cannot_be_served_are_refused_by_name(option: dict[str, Any], name: str) -> None:
    parallelize = with_ring(llama3_debugmodel()).model_spec.parallelize_fn
    with pytest.raises(NotImplementedError, match=name):
        parallelize(nn.Identity(), parallel_dims=None, ac_config=None, dump_folder="", **GOOD | option)


def test_configs_that_cannot_be_served_are_refused() -> None:
    config = llama3_debugmodel()
    config.model_spec = dataclasses.replace(config.model_spec, name="gpt_oss")
    with pytest.raises(NotImplementedError, match="model_spec must be of"):
        with_ring(config)
    with pytest.raises(NotImplementedError, match="inner_attention"):
        with_ring(with_ring(llama3_debugmodel()))
    config.model_spec = None
    with pytest.raises(ValueError, match="model_spec"):
        with_ring(config)


def test_a_batch_without_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="positions"):
        attention._BatchSharding(Ring(), "zigzag")(nn.Identity(), (), {})
