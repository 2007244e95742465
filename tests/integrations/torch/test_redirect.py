"""A model that calls torch's scaled_dot_product_attention attends around the ring without changes to its code."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ringattn import Ring, checkpoint_contexts, redirect_sdpa, replace_multihead_attention, use_sharding
from tests.support.pool import Pools

FP64 = torch.float64


class Attention(nn.Module):
    """Self-attention as vision transformers write it; fused=False attends by products, as models without SDPA do."""

    def __init__(self, fused: bool = True) -> None:
        super().__init__()
        self.qkv, self.proj, self.fused = nn.Linear(16, 48, dtype=FP64), nn.Linear(16, 16, dtype=FP64), fused

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            x = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0)
        else:
            x = (q @ k.mT).softmax(-1) @ v
        return self.proj(x.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """Patches, a class token that is put in front of them, blocks, and the class token's features."""

    def __init__(self, fused: bool = True, checkpointed: bool = False) -> None:
        super().__init__()
        self.patches, self.head = nn.Linear(5, 16, dtype=FP64), nn.Linear(16, 3, dtype=FP64)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 16, dtype=FP64))
        self.blocks = nn.Sequential(Attention(fused), Attention(fused))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), self.patches(x)], 1)
        if self.checkpointed:
            x = checkpoint(self.blocks, x, use_reentrant=False, context_fn=checkpoint_contexts)  # pyright: ignore[reportAssignmentType]
        else:
            x = self.blocks(x)
        return self.head(x)


def make(**options: bool) -> Transformer:
    torch.manual_seed(0)
    return Transformer(**options)


def images() -> Tensor:
    return torch.randn(2, 10, 5, generator=torch.Generator().manual_seed(1), dtype=FP64)


def results(model: Transformer) -> dict[str, Tensor]:
    o = model(images())
    o.square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"o": o.detach(), **grads}


def put_on_ring(model: Transformer) -> Ring:
    """Cut what goes into the blocks, and put together what comes out: the hooks of the page."""
    ring = Ring()
    sharding = ring.sharding(11, "contiguous")
    redirect_sdpa(model.blocks)
    model.blocks.register_forward_pre_hook(lambda _, args: (sharding.shard(args[0]),))
    model.blocks.register_forward_hook(lambda *called: sharding.unshard(called[2]))  # pyright: ignore[reportArgumentType]
    return ring


def on_ring(checkpointed: bool) -> dict[str, Tensor]:
    model = make(checkpointed=checkpointed)
    ring = put_on_ring(model)
    with use_sharding(ring.sharding(11, "contiguous")):
        o = model(images())
    o.square().sum().backward()
    grads = {name: ring.sum(p.grad) / ring.world_size for name, p in model.named_parameters() if p.grad is not None}
    return {"o": o.detach(), **grads}


@pytest.mark.parametrize(("world_size", "checkpointed"), [(2, False), (2, True), (3, False)])
def test_a_redirected_model_on_ranks_equals_one_process(pool: Pools, world_size: int, checkpointed: bool) -> None:
    expected = results(make())
    for found in pool(world_size).run(on_ring, checkpointed):
        torch.testing.assert_close(found, expected)


def test_without_a_sharding_one_process_runs_as_before() -> None:
    model = make()
    redirect_sdpa(model)
    torch.testing.assert_close(results(model), results(make()), rtol=0, atol=0)


def test_copies_of_a_redirected_model_have_their_own_weights() -> None:
    model = make()
    redirect_sdpa(model.blocks)
    other: Any = copy.deepcopy(model)
    nn.init.zeros_(other.blocks[1].proj.weight)
    nn.init.zeros_(other.blocks[1].proj.bias)
    x = torch.ones(1, 3, 16, dtype=FP64)
    with use_sharding(Ring().sharding(3)):
        assert not other.blocks(x).any()
        assert model.blocks(x).any()


class Multihead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True, dtype=FP64)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def test_what_the_error_names_is_a_call_of_a_redirected_module() -> None:
    model, x = Multihead(), torch.randn(1, 3, 16, dtype=FP64)
    exact = model(x)
    redirect_sdpa(model)
    replace_multihead_attention(model)
    with use_sharding(Ring().sharding(3)):
        torch.testing.assert_close(model(x), exact)


def test_models_that_attend_in_another_way_are_refused() -> None:
    x = torch.ones(1, 3, 16, dtype=FP64)
    with use_sharding(Ring().sharding(3)):
        for model, error, message in (
            (Attention(fused=False), RuntimeError, "got no call"),
            (Multihead(), NotImplementedError, r"use replace_multihead_attention"),
            (Multihead().eval(), NotImplementedError, r"use replace_multihead_attention"),
        ):
            redirect_sdpa(model)
            with pytest.raises(error, match=message):
                model(x)
    # outside of the module, torch's function is its own
    q = torch.ones(1, 1, 4, 8)
    assert F.scaled_dot_product_attention(q, q, q).shape == q.shape


def test_a_second_redirection_and_what_is_no_module_are_refused() -> None:
    model = make()
    redirect_sdpa(model.blocks)
    with pytest.raises(ValueError, match="model must not be redirected yet, got 'blocks'"):
        redirect_sdpa(model)
    with pytest.raises(TypeError, match="model must be a module"):
        redirect_sdpa(F.scaled_dot_product_attention)  # pyright: ignore[reportArgumentType]


def test_a_compiled_model_breaks_its_graph_there_and_computes_the_same() -> None:
    model = make()
    redirect_sdpa(model.blocks)
    with use_sharding(Ring().sharding(11, "contiguous")):
        torch.testing.assert_close(torch.compile(model, backend="eager")(images()), model(images()))


def without_sharding() -> str:
    model = make()
    redirect_sdpa(model)
    with pytest.raises(RuntimeError) as caught:
        model(images())
    return str(caught.value)


def test_ranks_without_a_sharding_are_refused(pool: Pools) -> None:
    assert all("must know the sharding of its rows" in found for found in pool(2).run(without_sharding))
