"""Compiled and joined parts: the same numbers within rounding, and all or nothing on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ringattn.integrations.transformers.fusing import CannotFuse, fuse
from ringattn.ring import Ring
from tests.pool import Pools
from tests.transformers.models import CONFIGS, make

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 60}


def small(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **options)).eval()


@torch.no_grad()
@pytest.mark.parametrize(("kind", "norms"), [("llama", 2), ("qwen3", 4), ("gemma2", 4)])
def test_a_model_with_fused_parts_gives_the_same(kind: str, norms: int):
    model, ids = small(kind), torch.arange(14).view(2, 7)
    expected = model(ids).logits
    calls = []

    def backend(graph: Any, inputs: Any) -> Any:
        del inputs

        def run(*arguments: Any) -> Any:
            calls.append(1)
            return graph.forward(*arguments)

        return run

    compiled = 2 * (norms + 2) + 1  # an MLP and a rotation in each layer, and the last norm
    assert fuse(model, Ring(), backend=backend) == compiled + 2 * 3
    calls.clear()
    torch.testing.assert_close(model(ids).logits, expected)
    assert len(calls) == compiled


@torch.no_grad()
@pytest.mark.parametrize("kind", ["mistral", "gemma3", "gpt_oss", "llama4", "phi3", "glm", "starcoder2"])
def test_every_kind_of_model_can_be_fused(kind: str):
    """Rotations by half as many angles as a head has, of a part of each head, of complex numbers; products that are one already."""
    torch._dynamo.reset()
    if kind in CONFIGS:
        model, ids = make(kind, "eager", torch.float32, head_dim=32).eval(), torch.arange(14).view(2, 7)
    else:
        model, ids = small(kind, pad_token_id=0, eos_token_id=2), torch.arange(14).view(2, 7)
    expected = model(ids).logits
    assert fuse(model, Ring(), backend="eager") > 2
    torch.testing.assert_close(model(ids).logits, expected)


def _wrong(graph: Any, inputs: Any) -> Any:
    del inputs
    return lambda *arguments: tuple(x * 1.01 if x.is_floating_point() else x for x in graph.forward(*arguments))


def _failing(graph: Any, inputs: Any) -> Any:
    raise OSError("no compiler")


@torch.no_grad()
@pytest.mark.parametrize(
    ("backend", "why"), [(_wrong, "(MLP|Norm|Attention) fused differs by"), (_failing, "no compiler")]
)
def test_parts_that_are_wrong_or_do_not_compile_stay_as_they_were(backend: Any, why: str):
    model, ids = small("llama"), torch.arange(14).view(2, 7)
    expected = model(ids).logits
    with pytest.raises(CannotFuse, match=why):
        fuse(model, Ring(), backend=backend)
    assert model(ids).logits.equal(expected)
    assert not any("forward" in vars(part) for part in model.modules())


def _fuse_on(fault: str) -> tuple[str, bool]:
    """What a rank is told whose neighbour fails, or gets other bits."""
    torch._dynamo.reset()
    model = small("llama")

    def backend(graph: Any, inputs: Any) -> Any:
        del inputs
        if dist.get_rank() == 1 and fault == "fails":
            raise OSError("no compiler")
        if dist.get_rank() == 1 and fault == "bits":
            return lambda *arguments: tuple(x + 1e-7 * x for x in graph.forward(*arguments))
        return graph.forward

    try:
        fuse(model, Ring(), backend=backend)
    except CannotFuse as error:
        return str(error), any("forward" in vars(part) for part in model.modules())
    return "", True


def test_a_rank_that_fails_or_gets_other_bits_stops_all(pool: Pools):
    assert pool(2).run(_fuse_on, "none") == [("", True)] * 2
    here, there = pool(2).run(_fuse_on, "fails")
    assert here == ("another rank could not", False)
    assert "no compiler" in there[0]
    for said, fused in pool(2).run(_fuse_on, "bits"):
        assert "what fused parts give" in said
        assert not fused


class _TwoMLP(nn.Module):
    """Takes more than rows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x) * gate)


def test_parts_that_take_more_than_rows_or_have_other_weights_are_left_alone():
    packed = small("llama").model.layers[0].mlp
    packed.up_proj.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)
    assert fuse(nn.ModuleList([_TwoMLP(), nn.LayerNorm(4), nn.RMSNorm(4), packed]), Ring(), backend="eager") == 0


class _BrokenNorm(nn.Module):
    """Does not take rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(3, 3)


def test_a_part_that_can_not_be_tried_is_no_crash():
    with pytest.raises(CannotFuse, match="shape"):
        fuse(nn.ModuleList([_BrokenNorm()]), Ring(), backend="eager")
