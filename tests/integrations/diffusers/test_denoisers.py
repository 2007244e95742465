"""The transformers of diffusion pipelines compute on a ring what they compute on one process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ringattn import Ring
from ringattn.integrations.diffusers import DenoiserSpec, TokenDim, checkpoint, disable_ring, enable_ring
from tests.integrations.diffusers.denoisers import CASES, Denoiser, Results, run, run_on_ranks
from tests.integrations.diffusers_rows import ROWS
from tests.integrations.model_table import ModelRow, works
from tests.support.pool import Pools

BOUND = 32 * torch.finfo(torch.float32).eps
"""Relative to the largest number of a tensor: diffusers casts timesteps, rotary embeddings and norms to fp32 in fp64 models too."""
FLUX = CASES["flux"]


@cache
def one_process(name: str) -> Results:
    return run(CASES[name].make(), CASES[name].arguments())


def assert_equal_up_to_rounding(found: Results, expected: Results) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        # gradients of key biases are zero but for a rounding in fp64
        assert (found[name] - x).abs().max() <= BOUND * x.abs().max() + 1e-14, name


@pytest.mark.parametrize("world_size", [3, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
@pytest.mark.parametrize("row", works(ROWS, "enable_ring"), ids=str)
def test_output_and_all_gradients_equal_one_process(pool: Pools, row: ModelRow, world_size: int) -> None:
    for found in pool(world_size).run(run_on_ranks, CASES[row.kind]):
        assert_equal_up_to_rounding(found, one_process(row.kind))


@pytest.mark.parametrize(
    "name",
    ["flux", "wan", "qwen_image_edit", "hunyuan_video_image", "ltx2_3", "helios_history", "minimax_h3", "cosmos3"],
)
def test_gradient_checkpointing_changes_nothing(pool: Pools, name: str) -> None:
    for found in pool(2).run(run_on_ranks, CASES[name], checkpointed=True):
        assert_equal_up_to_rounding(found, one_process(name))


def test_compiled_blocks_compute_the_same(pool: Pools) -> None:
    for found in pool(2).run(run_on_ranks, FLUX, compiled=True):
        assert_equal_up_to_rounding(found, one_process("flux"))


def two_lengths(on_ring: bool, checkpointed: bool) -> Results:
    """Forwards of 5 + 9, 4 + 10 and 5 + 9 tokens, then the backward of all."""
    model, ring = FLUX.make(), Ring() if on_ring else None
    if ring is not None:
        enable_ring(model, ring)
    if checkpointed:
        model.enable_gradient_checkpointing(checkpoint if on_ring else None)
    cases = (FLUX, Denoiser(FLUX.model, text=4, size=(1, 2, 5)), FLUX)
    torch.stack(
        [model(**sample).sample.square().sum() for sample in (case.arguments() for case in cases)]
    ).sum().backward()
    grads: Results = {name: parameter.grad for name, parameter in model.named_parameters()}
    return grads if ring is None else {name: ring.sum(x) / ring.world_size for name, x in grads.items()}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_forwards_of_several_lengths_may_precede_a_backward(pool: Pools, world_size: int, checkpointed: bool) -> None:
    for found in pool(world_size).run(two_lengths, True, checkpointed):
        assert_equal_up_to_rounding(found, two_lengths(False, checkpointed))


def guided(name: str, on_ring: bool) -> list[Tensor]:
    """Outputs by classifier-free guidance: a prompt and a shorter one."""
    case = CASES[name]
    model = case.make()
    if on_ring:
        enable_ring(model, Ring())
    with torch.no_grad():
        prompt, other = (
            tree_leaves(model(**replace(case, text=n).arguments(), return_dict=False)) for n in (case.text, 3)
        )
        return [y + 3 * (x - y) for x, y in zip(prompt, other, strict=True) if x is not None]


@pytest.mark.parametrize("name", ["flux", "ltx2", "helios_history", "minimax_h3", "cosmos3"])
def test_prompts_of_other_lengths_guide_as_on_one_process(pool: Pools, name: str) -> None:
    for found in pool(3).run(guided, name, True):
        for x, y in zip(found, guided(name, False), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=BOUND * float(y.abs().max()))


def sharded_by_fsdp() -> Results:
    """Gradients of parameters that FSDP2 shards over the ranks of the ring."""
    model = FLUX.make()
    enable_ring(model, Ring())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in (*model.transformer_blocks, *model.single_transformer_blocks):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return {name: x.full_tensor() for name, x in run(model, FLUX.arguments()).items() if isinstance(x, DTensor)}


def test_gradients_that_fsdp_averages_equal_one_process(pool: Pools) -> None:
    for found in pool(2).run(sharded_by_fsdp):
        expected = {name: x for name, x in one_process("flux").items() if name in found}
        assert len(found) > 60
        assert_equal_up_to_rounding(found, expected)


def on_and_off() -> list[torch.Tensor]:
    model, sample = FLUX.make(), FLUX.arguments()
    outputs = []
    with torch.no_grad():
        for _ in range(2):
            enable_ring(model, Ring())
            outputs.append(model(**sample).sample)
            disable_ring(model)
            outputs.append(model(**sample).sample)
    return outputs


def test_a_transformer_that_left_its_ring_runs_as_before(pool: Pools) -> None:
    with torch.no_grad():
        expected = FLUX.make()(**FLUX.arguments()).sample
    for on, off, again, *_ in pool(2).run(on_and_off):
        assert torch.equal(off, expected)
        assert torch.equal(on, again)
        torch.testing.assert_close(on, expected)


class Attention(nn.Module):
    """Self-attention of rows `b s d` with a mask of keys, `b 1 1 n` of all keys."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, mask).transpose(1, 2).flatten(2)


class OwnModel(nn.Module):
    """Joint attention over image and audio and text, in this order."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = Attention(), nn.Linear(8, 3).double()

    def forward(self, pixels: Tensor, audio: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        joint = self.attention(torch.cat([pixels, audio, text], 1), mask)
        return self.head(joint[:, : pixels.shape[1]])


OWN_SPEC = DenoiserSpec(
    lengths=lambda _, x: {
        "image": x["pixels"].shape[1],
        "audio": x["audio"].shape[1],
        "text": x["text"].shape[1],
    },
    inputs={"": {"pixels": TokenDim("image", 1), "audio": TokenDim("audio", 1), "text": TokenDim("text", 1)}},
    attention=("attention",),
    gather={"head": TokenDim("image", 1)},
)


def own_model(on_ring: bool) -> Tensor:
    torch.manual_seed(0)
    model = OwnModel()
    if on_ring:
        enable_ring(model, Ring(), spec=OWN_SPEC)
    x = [torch.randn(2, n, 8, dtype=torch.float64) for n in (7, 5, 3)]
    mask = torch.randn(2, 1, 1, 15, dtype=torch.float64).masked_fill(torch.arange(15) % 4 == 3, float("-inf"))
    return model(*x, mask).detach()


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_model_of_ones_own_runs_by_its_spec(pool: Pools, world_size: int) -> None:
    for found in pool(world_size).run(own_model, True):
        torch.testing.assert_close(found, own_model(False))


def test_one_gathered_output_may_be_named_with_its_segment() -> None:
    spec = DenoiserSpec(lambda *_: {"text": 3}, {}, gather="norm_out", gathered="text")
    assert spec.outputs_gathered == {"norm_out": TokenDim("text", 1)}
