"""Recurrences over a sharded sequence equal those of one process, row by row, in outputs and all gradients."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ringattn.integrations.linear.ops
from ringattn import Ring
from ringattn.integrations.linear import causal_conv1d, gated_delta_rule, mamba2_scan
from ringattn.plan.sharding import Sharding
from tests.support.linear_reference import causal_conv1d_reference, gated_delta_rule_reference, mamba2_reference
from tests.support.pool import Pools

Inputs = dict[str, Tensor]
KEY_HEADS, HEADS, D, E, TAPS = 2, 4, 5, 6, 4


DECAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "mild": lambda x: x.abs() / 8,
    "none": torch.zeros_like,
    # products of two underflow
    "strong": lambda x: 50 + 50 * x.abs(),
    # rows behind one that forgets all must not lose their own decays beside it
    "mixed": lambda x: torch.where(x > 1.5, 1e4, x.abs() / 100),
}
"""Negative logarithms of decays, of random numbers."""


def inputs_of(op: str, n: int, dtype: torch.dtype = torch.float64, decays: str = "mild", batch: int = 2) -> Inputs:
    """Random inputs of an operation for a whole sequence."""
    torch.manual_seed(n)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    rows = batch, n
    unit = torch.nn.functional.normalize
    found = {
        "delta": lambda: {
            "q": random(*rows, KEY_HEADS, D),
            "k": unit(random(*rows, KEY_HEADS, D), dim=-1),
            "v": random(*rows, HEADS, E),
            "g": -DECAYS[decays](random(*rows, HEADS)),
            "beta": random(*rows, HEADS).sigmoid(),
        },
        "mamba": lambda: {
            "x": random(*rows, HEADS, E),
            "dt": DECAYS[decays](random(*rows, HEADS)),
            "a": -random(HEADS).exp(),
            "b": random(*rows, KEY_HEADS, D),
            "c": random(*rows, KEY_HEADS, D),
            "d": random(HEADS),
        },
        "conv": lambda: {"x": random(*rows, E), "weight": random(E, TAPS), "bias": random(E)},
    }[op]()
    return {name: x.to(dtype) for name, x in found.items()}


OPS: dict[str, Callable[..., Tensor]] = {
    "delta": lambda sharding, **x: gated_delta_rule(**x, sharding=sharding, scale=1.0),
    "mamba": lambda sharding, **x: mamba2_scan(**x, sharding=sharding),
    "conv": lambda sharding, **x: causal_conv1d(**x, sharding=sharding),
}
REFERENCES: dict[str, Callable[..., Tensor]] = {
    "delta": gated_delta_rule_reference,
    "mamba": mamba2_reference,
    "conv": causal_conv1d_reference,
}
SHARED = ("a", "d", "weight", "bias")  # the same on every rank: their gradients are summed


def of_one_process(
    op: str, n: int, documents: tuple[int, ...] | None, dtype: torch.dtype = torch.float64, decays: str = "mild"
) -> tuple[Tensor, Inputs]:
    """Output and gradients of the definition."""
    whole = {name: x.requires_grad_() for name, x in inputs_of(op, n, dtype, decays).items()}
    y = REFERENCES[op](**whole, documents=documents or (0,))
    y.backward(cotangent(y).to(dtype))
    return y.detach(), {name: grad(x) for name, x in whole.items()}


def cotangent(y: Tensor) -> Tensor:
    """A fixed random cotangent."""
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def grad(x: Tensor) -> Tensor:
    """The gradient of a leaf."""
    assert x.grad is not None, "every input has a gradient"
    return x.grad


def on_ranks(
    op: str,
    n: int,
    layout: str,
    documents: tuple[int, ...] | None,
    dtype: torch.dtype,
    decays: str = "mild",
    virtual_size: int | None = None,
) -> tuple[Tensor, Inputs]:
    """Whole output and gradients, gathered from all ranks."""
    ring = Ring(virtual_size=virtual_size)
    sharding = ring.sharding(n, layout, documents)
    mine = {
        name: (x if name in SHARED else sharding.shard(x)).requires_grad_()
        for name, x in inputs_of(op, n, dtype, decays).items()
    }
    y = OPS[op](sharding, **mine)
    whole = sharding.unshard(y.detach().double())
    y.backward(sharding.shard(cotangent(whole)).to(dtype))
    grads = {
        name: ring.sum(grad(x).double().contiguous()) if name in SHARED else sharding.unshard(grad(x).double())
        for name, x in mine.items()
    }
    return whole, grads


@pytest.mark.rings
@pytest.mark.parametrize("op", list(OPS))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("n", "layout", "documents"),
    [
        (150, "contiguous", None),
        (131, "zigzag", None),
        (77, "zigzag", (0, 5, 30, 31, 77)),
        (9, "zigzag", None),
        (3, "contiguous", None),
        (140, "contiguous", (0, 70, 140)),
        # documents that begin in the last rows of a run: fewer rows than a convolution reaches back to
        (40, "contiguous", (0, 19, 40)),
        (17, "zigzag", (0, 5, 17)),
    ],
)
def test_ranks_equal_the_definition(
    pool: Pools, op: str, world_size: int, n: int, layout: str, documents: tuple[int, ...] | None
) -> None:
    expected, gradients = of_one_process(op, n, documents)
    for y, grads in pool(world_size).run(on_ranks, op, n, layout, documents, torch.float64):
        torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
        for name, x in gradients.items():
            torch.testing.assert_close(
                grads[name], x, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("op", list(OPS))
@pytest.mark.parametrize("processes", [1, 2])
def test_virtual_ranks_equal_the_definition(pool: Pools, op: str, processes: int) -> None:
    expected, gradients = of_one_process(op, 77, (0, 5, 30, 31, 77))
    given = (op, 77, "zigzag", (0, 5, 30, 31, 77), torch.float64, "mild", 4)
    for y, grads in pool(processes).run(on_ranks, *given):
        torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
        for name, x in gradients.items():
            torch.testing.assert_close(grads[name], x, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.parametrize("op", ["delta", "mamba"])
def test_outputs_and_gradients_are_in_the_error_budget(pool: Pools, op: str, decays: str) -> None:
    n = 200
    truth = of_one_process(op, n, None, decays=decays)
    rounded = of_one_process(op, n, None, torch.float32, decays)
    for ring in (pool(1), pool(2)):
        y, grads = ring.run(on_ranks, op, n, "zigzag", None, torch.float32, decays)[0]
        for name, found, row_by_row, exact in [
            ("y", y, rounded[0], truth[0]),
            *((name, grads[name], rounded[1][name], x) for name, x in truth[1].items()),
        ]:
            size = float(exact.square().mean().sqrt())
            error, allowed = (float((x.double() - exact).square().mean().sqrt()) for x in (found, row_by_row))
            # eight times the error of the definition in single precision, plus one rounding
            assert error <= 8 * allowed + size * torch.finfo(torch.float32).eps, (name, error, allowed)


@pytest.mark.parametrize("op", ["delta", "mamba"])
def test_autocast_does_not_round_states(op: str) -> None:
    sharding = Ring().sharding(70, "contiguous")
    inputs = inputs_of(op, 70, torch.float32)
    expected = OPS[op](sharding, **inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(OPS[op](sharding, **inputs), expected)


def test_examples() -> None:
    assert doctest.testmod(ringattn.integrations.linear.ops).failed == 0


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"q": torch.ones(1, 4, 1, 3)}, "q must be `batch rows heads width` with this rank's 5 rows"),
        ({"k": torch.ones(1, 5, 1, 2)}, "q and k must have one shape"),
        (
            {"v": torch.ones(1, 5, 3, 2), "q": torch.ones(1, 5, 2, 3), "k": torch.ones(1, 5, 2, 3)},
            "multiple of their heads",
        ),
        ({"g": torch.ones(1, 5, 2)}, r"g must have shape \(1, 5, 1\)"),
        ({"beta": torch.ones(1, 5, 1, dtype=torch.int64)}, "beta must be numbers"),
        ({"kernels": "cuda"}, "kernels must be one of auto, fla, torch"),
        ({"kernels": "fla"}, "kernels='fla' must get fp16 or bf16 on a GPU"),
    ],
)
def test_inconsistent_calls_are_refused(change: dict[str, Any], match: str) -> None:
    x, one = torch.ones(1, 5, 1, 3), torch.ones(1, 5, 1)
    call = {"q": x, "k": x, "v": x, "g": -one, "beta": one, "sharding": Ring().sharding(5, "contiguous")}
    with pytest.raises((ValueError, NotImplementedError), match=match):
        gated_delta_rule(**{**call, **change})


def test_weights_that_do_not_fit_are_refused() -> None:
    sharding = Ring().sharding(5, "contiguous")
    x, one = torch.ones(1, 5, 2, 3), torch.ones(1, 5, 2)
    with pytest.raises(ValueError, match=r"weight must be `channels taps` with 2 channels, got shape \(3, 4\)"):
        causal_conv1d(one, torch.ones(3, 4), None, sharding)
    with pytest.raises(ValueError, match=r"bias must have shape \(2,\), got \(3,\)"):
        causal_conv1d(one, torch.ones(2, 4), torch.ones(3), sharding)
    with pytest.raises(ValueError, match="activation must be 'silu' or None, got 'gelu'"):
        causal_conv1d(one, torch.ones(2, 4), None, sharding, activation="gelu")
    with pytest.raises(ValueError, match=r"d must have shape \(2,\), got \(3,\)"):
        mamba2_scan(x, one, -torch.ones(2), x, x, sharding, d=torch.ones(3))


def test_shards_with_strides_are_refused() -> None:
    from ringattn.plan.layouts import striped

    sharding = Sharding(8, "striped", striped(8, 2), 0)
    with pytest.raises(ValueError, match="the layout of a recurrence must give each rank stretches of the sequence"):
        causal_conv1d(torch.ones(1, 4, 2), torch.ones(2, 2), None, sharding)


def differing_call() -> None:
    ring = Ring()
    sharding = ring.sharding(6, "contiguous")
    dtype = torch.float64 if ring.rank else torch.float32
    causal_conv1d(torch.ones(1, sharding.shard_len, 2, dtype=dtype), torch.ones(2, 2), None, sharding)


def test_ranks_with_different_calls_raise(pool: Pools) -> None:
    with pytest.raises(ValueError, match="a call of causal_conv1d"):
        pool(2).run(differing_call)


def resharded(n: int, before: str, after: str) -> tuple[bool, bool]:
    """Whether rows moved to their places, and gradients back to theirs."""
    ring = Ring()
    old, new = ring.sharding(n, before), ring.sharding(n, after)
    whole = torch.randn(2, n, 3, generator=torch.Generator().manual_seed(0))
    x = old.shard(whole).requires_grad_()
    y = old.reshard(x, new)
    y.backward(new.shard(2 * whole))
    assert x.grad is not None, "a leaf"
    return torch.equal(y, new.shard(whole)), torch.equal(x.grad, old.shard(2 * whole))


@pytest.mark.rings
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("n", [2, 23, 64])
@pytest.mark.parametrize(
    ("before", "after"), [("zigzag", "contiguous"), ("contiguous", "striped"), ("striped", "zigzag")]
)
def test_reshard_moves_each_row_to_its_place_and_its_gradient_back(
    pool: Pools, world_size: int, n: int, before: str, after: str
) -> None:
    assert pool(world_size).run(resharded, n, before, after) == [(True, True)] * world_size


def test_reshard_refuses_another_sequence() -> None:
    ring = Ring()
    with pytest.raises(ValueError, match="other must be a sharding of the same 4 tokens"):
        ring.sharding(4).reshard(torch.ones(1, 4), ring.sharding(5))
    with pytest.raises(ValueError, match="x_local must have shard_len 4"):
        ring.sharding(4).reshard(torch.ones(1, 3), ring.sharding(4))
    with pytest.raises(TypeError, match="other must be what ring"):
        ring.sharding(4).reshard(torch.ones(1, 4), 4)  # pyright: ignore[reportArgumentType]
