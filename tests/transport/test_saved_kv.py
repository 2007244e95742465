"""Keys that a forward keeps for its backward: the same bits, half the gathers, and memory that goes when autograd lets go.

Ranks are threads over the simulated transport, with rings, operators and autograd as users have them.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from ringattn import Ring, autograd, ring_attention, simulate_ring
from ringattn.schedule.execution_plan import ForwardCall
from ringattn.transport.base import RingContext
from ringattn.transport.lockstep import LockstepTransport, run_ranks
from tests.support.pool import Pools

PLENTY = 2**40
RANKS = 3


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many gathers there were of each direction, over all ranks."""
    counted: Counter[str] = Counter()
    gather = LockstepTransport.gather

    def counting(self: LockstepTransport, *args: Any, **kwargs: Any) -> Any:
        counted[args[-1]] += 1
        return gather(self, *args, **kwargs)

    monkeypatch.setattr(LockstepTransport, "gather", counting)
    return counted


def on_all_ranks(body: Callable[[Ring], Any], *, keep: bool) -> list[Any]:
    """The results of `body`, whose ring is one of several ranks."""
    rings = []

    def run(context: RingContext) -> Any:
        ring = Ring(impl="eager", save_gathered_kv=keep)
        ring.rank, ring.context, ring.hosted = context.rank, context, range(context.rank, context.rank + 1)
        ring.world_size = ring.virtual_size = context.world_size
        rings.append(ring)
        return body(ring)

    return run_ranks(RANKS, run, budget=PLENTY)


def leaves(ring: Ring, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 * seed + ring.rank)
    return [torch.randn(2, 20, heads, 16, generator=generator).requires_grad_() for heads in (4, 2, 2)]


def attend(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ring_attention(q, k, v, ring.sharding(20 * RANKS), causal=True)


def one_layer(ring: Ring) -> list[Tensor]:
    x = leaves(ring)
    return list(torch.autograd.grad(attend(ring, *x).square().sum(), x))


def two_layers(ring: Ring) -> list[Tensor]:
    """Backwards run in the opposite order; the second layer's keys are the first one's output."""
    q, k, v = leaves(ring)
    first = attend(ring, q, k, v)
    o = attend(ring, q, first[:, :, :2], first[:, :, 2:])
    return [o, *torch.autograd.grad(o.square().sum(), (q, k, v))]


def twice(ring: Ring) -> list[Tensor]:
    """One graph differentiated twice."""
    x = leaves(ring)
    o = attend(ring, *x)
    return [*torch.autograd.grad(o.sum(), x, retain_graph=True), *torch.autograd.grad(o.square().sum(), x)]


def unused(ring: Ring) -> list[Tensor]:
    """A layer whose result nobody differentiates, between two that are."""
    x = leaves(ring)
    first = attend(ring, *x)
    attend(ring, *leaves(ring, 1))
    return list(torch.autograd.grad((first + attend(ring, *x)).square().sum(), x))


def checkpointed(ring: Ring) -> list[Tensor]:
    """Two layers that are computed again for their backward."""
    q, k, v = leaves(ring)
    first = checkpoint(attend, ring, q, k, v, use_reentrant=False)
    assert isinstance(first, Tensor)
    o = checkpoint(attend, ring, q, first[:, :, :2], first[:, :, 2:], use_reentrant=False)
    assert isinstance(o, Tensor)
    return list(torch.autograd.grad(o.square().sum(), (q, k, v)))


def selectively(policy: CheckpointPolicy) -> Callable[[Ring], list[Tensor]]:
    def choose(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return policy if op is autograd.ring_attention_op else CheckpointPolicy.PREFER_RECOMPUTE

    def body(ring: Ring) -> list[Tensor]:
        x = leaves(ring)
        contexts = lambda: create_selective_checkpoint_contexts(choose)  # noqa: E731
        o = checkpoint(attend, ring, *x, use_reentrant=False, context_fn=contexts)
        assert isinstance(o, Tensor)
        return list(torch.autograd.grad(o.square().sum(), x))

    return body


def counted_on_rank_0(ring: Ring) -> list[Tensor]:
    """One rank counts what all do."""
    if ring.rank:
        return one_layer(ring)
    with FlopCounterMode(display=False) as counter:
        found = one_layer(ring)
    assert counter.get_total_flops() > 0
    return found


def differentiated_with_a_graph(ring: Ring) -> list[Tensor]:
    x = leaves(ring)
    return [grad.detach() for grad in torch.autograd.grad(attend(ring, *x).square().sum(), x, create_graph=True)]


@pytest.mark.parametrize(
    ("body", "forwards", "backwards"),
    [
        (one_layer, 1, 0),
        (two_layers, 2, 0),
        (twice, 1, 0),
        (unused, 3, 0),
        (checkpointed, 4, 0),
        # the operator may be answered for by what was saved of it: nothing is kept
        (selectively(CheckpointPolicy.MUST_SAVE), 1, 1),
        (selectively(CheckpointPolicy.MUST_RECOMPUTE), 2, 1),
        (counted_on_rank_0, 1, 0),
        (differentiated_with_a_graph, 1, 0),
    ],
)
def test_kept_keys_give_the_bits_of_a_backward_that_gathers(
    gathers: Counter[str], body: Callable[[Ring], list[Tensor]], forwards: int, backwards: int
) -> None:
    kept = on_all_ranks(body, keep=True)
    assert gathers == Counter(forward=RANKS * forwards, backward=RANKS * backwards)
    again = on_all_ranks(body, keep=False)
    assert gathers["backward"] > RANKS * backwards
    for mine, other in zip(kept, again, strict=True):
        for x, y in zip(mine, other, strict=True):
            assert torch.equal(x, y)
            assert x.abs().sum() > 0


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize("mask", [{"causal": True}, {}, {"causal": True, "window": 7}])
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_simulated_ring_keeps_them_too(
    gathers: Counter[str], layout: str, mask: dict[str, Any], world_size: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(2, 61, heads, 16, generator=generator) for heads in (4, 2, 2, 4))
    args: dict[str, Any] = {"layout": layout, "do": do, "memory_budget": PLENTY, **mask}
    kept = simulate_ring(q, k, v, world_size, save_gathered_kv=True, **args)
    assert gathers == Counter(forward=world_size)
    again = simulate_ring(q, k, v, world_size, **args)
    assert gathers == Counter(forward=2 * world_size, backward=world_size)
    assert kept.grads is not None
    assert again.grads is not None
    for name in "qkv":
        assert torch.equal(kept.grads[name], again.grads[name])


@pytest.mark.parametrize("options", [{"memory_budget": 0}, {"backward": "queries"}], ids=["no budget", "queries move"])
def test_calls_that_cannot_save_gathered_kv_do_not(gathers: Counter[str], options: dict[str, Any]) -> None:
    q, k, v, do = (torch.randn(1, 24, heads, 16) for heads in (4, 2, 2, 4))
    args: dict[str, Any] = {"do": do, "memory_budget": PLENTY, **options}
    kept, plain = (simulate_ring(q, k, v, 2, save_gathered_kv=keep, **args) for keep in (True, False))
    assert kept.grads is not None
    assert plain.grads is not None
    assert all(torch.equal(kept.grads[name], plain.grads[name]) for name in "qkv")
    assert not gathers["backward"]


def test_nothing_is_kept_longer_than_the_graph(gathers: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    born: dict[int, list[weakref.ref[Tensor]]] = {rank: [] for rank in range(RANKS)}
    forward = autograd.run_forward

    def noting(call: ForwardCall, *, keep: bool) -> Any:
        o, lse, kept = forward(call, keep=keep)
        if kept is not None:
            born[call.context.rank].append(weakref.ref(kept))
        return o, lse, kept

    monkeypatch.setattr(autograd, "run_forward", noting)

    def body(ring: Ring) -> list[int]:
        def alive() -> int:
            return sum(x() is not None for x in born[ring.rank])

        x = leaves(ring)
        with torch.no_grad():
            attend(ring, *x)
        found = [alive()]
        o = attend(ring, *x)
        found.append(alive())
        torch.autograd.grad(o.sum(), x)
        found.append(alive())
        o = attend(ring, *x)
        found.append(alive())
        del o
        found.append(alive())
        return found

    assert on_all_ranks(body, keep=True) == [[0, 1, 0, 1, 0]] * RANKS
    assert gathers["backward"] == 0


def differing() -> str:
    ring = Ring(save_gathered_kv=True)
    x = torch.randn(1, 8, 2, 16, requires_grad=True)
    o = ring_attention(x, x, x, ring.sharding(16), causal=True)
    torch.autograd.grad(o.sum(), x)
    other = Ring(save_gathered_kv=ring.rank == 0)
    try:
        ring_attention(x, x, x, other.sharding(16), causal=True)
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_that_would_keep_and_ranks_that_would_not_refuse_alike(pool: Pools) -> None:
    for said in pool(2).run(differing):
        assert "save_gathered_kv" in said
