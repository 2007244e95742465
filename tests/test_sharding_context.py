"""The current sharding: found below its `with`, by recomputation too, and never where it would be the wrong one."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ringattn import (
    Ring,
    RingMultiheadAttention,
    checkpoint_contexts,
    ring_attention,
    scaled_dot_product_attention,
    sharding_context,
    use_sharding,
)
from ringattn.sharding_context import find_sharding, resolve_sharding
from tests.support.pool import Pools


def test_the_innermost_counts_and_the_outer_comes_back() -> None:
    ring = Ring()
    a, b = ring.sharding(4), ring.sharding(5)
    assert find_sharding() is None
    with use_sharding(a):
        assert find_sharding() == (a, None)
        with use_sharding(b, a):
            assert find_sharding() == (b, a)
        assert find_sharding() == (a, None)
        with pytest.raises(KeyError), use_sharding(b):
            raise KeyError
        assert find_sharding() == (a, None)
    assert find_sharding() is None


def test_explicit_shardings_win() -> None:
    ring = Ring()
    a, b, c = (ring.sharding(n) for n in (4, 5, 6))
    assert resolve_sharding(None, None) is None
    with use_sharding(a, b):
        assert resolve_sharding(None, None) == (a, b)
        assert resolve_sharding(c, None) == (c, None)
        assert resolve_sharding(None, c) == (a, c)
        assert resolve_sharding(b, c) == (b, c)


def test_a_thread_has_its_own() -> None:
    found: list[Any] = []
    with use_sharding(Ring().sharding(4)):
        thread = threading.Thread(target=lambda: found.append(find_sharding()))
        thread.start()
        thread.join()
    assert found == [None]


def test_old_compilers_never_read_the_sharding_of_another_thread() -> None:
    shared, ring = sharding_context._Traced(), Ring()
    mine, other = (sharding_context._Entry(ring.sharding(n), None, -1) for n in (4, 5))
    inside, leave = threading.Event(), threading.Event()

    def ring_step() -> None:
        with shared.shown(other):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=ring_step)
    with shared.shown(mine):
        assert shared.entry is mine
        thread.start()
        inside.wait(10)
        assert shared.entry is sharding_context._AMBIGUOUS
    assert shared.entry is other
    leave.set()
    thread.join()
    assert shared.entry is None


def attend(x: Tensor) -> Tensor:
    return scaled_dot_product_attention(x.sin(), x, x, is_causal=True).cos()


def test_recomputation_finds_the_sharding_of_its_forward() -> None:
    ring = Ring()
    a, b = ring.sharding(6, documents=(0, 2, 6)), ring.sharding(6)
    grads = []
    for again in (False, True):
        x = torch.ones(1, 2, 6, 8).cumsum(2).requires_grad_()
        with use_sharding(a):
            if again:
                o = checkpoint(attend, x, use_reentrant=False, context_fn=checkpoint_contexts)
            else:
                o = attend(x)
        assert isinstance(o, Tensor)
        with use_sharding(b):  # of equal shape: what it would find without help
            o.sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)


@pytest.mark.parametrize("inside", [False, True])
def test_recomputation_without_help_is_refused(inside: bool) -> None:
    ring = Ring()
    x = torch.randn(1, 2, 6, 8, requires_grad=True)
    with use_sharding(ring.sharding(6)):
        o = checkpoint(attend, x, use_reentrant=False)
        assert isinstance(o, Tensor)
        if inside:
            with pytest.raises(RuntimeError, match=r"context_fn=ringattn\.checkpoint_contexts"):
                o.sum().backward()
    if not inside:
        with pytest.raises(RuntimeError, match=r"context_fn=ringattn\.checkpoint_contexts"):
            o.sum().backward()


def test_models_that_never_had_a_sharding_are_recomputed_without(monkeypatch: pytest.MonkeyPatch) -> None:
    module = RingMultiheadAttention(8, 2)
    options: dict[str, Any]
    for used, options in ((False, {}), (True, {"context_fn": checkpoint_contexts})):
        monkeypatch.setattr("ringattn.sharding_context._used", used)
        x = torch.randn(5, 1, 8, requires_grad=True)
        (expected,) = torch.autograd.grad(module(x, x, x)[0].sum(), x)
        o = checkpoint(lambda x: module(x, x, x)[0], x, use_reentrant=False, **options)
        assert isinstance(o, Tensor)
        o.sum().backward()
        torch.testing.assert_close(x.grad, expected, rtol=0, atol=0)
    o = checkpoint(lambda x: module(x, x, x)[0], x, use_reentrant=False)
    assert isinstance(o, Tensor)
    with pytest.raises(RuntimeError, match=r"context_fn=ringattn\.checkpoint_contexts"):
        o.sum().backward()


def test_a_sharding_set_inside_the_checkpoint_needs_no_help() -> None:
    sharding = Ring().sharding(6)

    def block(x: Tensor) -> Tensor:
        with use_sharding(sharding):
            return attend(x)

    x = torch.randn(1, 2, 6, 8, requires_grad=True)
    o = checkpoint(block, x, use_reentrant=False)
    assert isinstance(o, Tensor)
    o.sum().backward()
    expected = torch.autograd.grad(block(x).sum(), x)[0]
    torch.testing.assert_close(x.grad, expected, rtol=0, atol=0)


def test_checkpoints_without_a_sharding_are_left_alone() -> None:
    x = torch.randn(3, requires_grad=True)
    o = checkpoint(torch.sin, x, use_reentrant=False, context_fn=checkpoint_contexts)
    assert isinstance(o, Tensor)
    o.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_compiled_calls_compile_once_for_each_sharding() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend  # workers import this file, and need no compiler

    torch._dynamo.reset()
    ring = Ring()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    x = torch.randn(1, 2, 6, 8)
    # all of one shape: only the guard on what is current tells them apart
    texts = [None, (0, 2, 6), (0, 5, 6)]
    for documents in (*texts, *texts):
        with use_sharding(ring.sharding(6)), use_sharding(ring.sharding(6, documents=documents)):
            torch.testing.assert_close(compiled(x), attend(x))
    assert counter.frame_count == 3


def test_a_with_inside_of_compiled_code_counts_too() -> None:
    torch._dynamo.reset()
    ring = Ring()
    a, b = ring.sharding(6), ring.sharding(6, documents=(0, 3, 6))

    def both(x: Tensor) -> Tensor:
        with use_sharding(a):
            first = attend(x)
            with use_sharding(b):
                second = attend(x)
        return first + 2 * second

    x = torch.randn(1, 2, 6, 8)
    torch.testing.assert_close(torch.compile(both, fullgraph=True, backend="eager")(x), both(x))
    assert find_sharding() is None


def test_compiled_code_without_a_sharding_refuses() -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match="must know the sharding of its rows"):
        torch.compile(attend, backend="eager")(torch.randn(1, 2, 6, 8))


def test_a_compiled_layer_is_recomputed_with_its_own_sharding() -> None:
    torch._dynamo.reset()
    ring = Ring()
    linear = nn.Linear(8, 8)
    compiled = torch.compile(lambda x: attend(linear(x)), backend="aot_eager")
    x = torch.randn(1, 2, 6, 8, requires_grad=True)
    with use_sharding(ring.sharding(6, documents=(0, 3, 6))):
        expected = torch.autograd.grad(attend(linear(x)).sum(), x)[0]
        o = checkpoint(compiled, x, use_reentrant=False, context_fn=checkpoint_contexts)
    assert isinstance(o, Tensor)
    with use_sharding(ring.sharding(6)):
        o.sum().backward()
    torch.testing.assert_close(x.grad, expected)


def checkpoint_on_ranks() -> None:
    ring = Ring()
    sharding = ring.sharding(9)
    x = sharding.shard(torch.randn(1, 9, 2, 8)).requires_grad_()
    (expected,) = torch.autograd.grad(ring_attention(x, x, x, sharding).square().sum(), x)
    run = partial(checkpoint, use_reentrant=False, context_fn=checkpoint_contexts)
    with use_sharding(sharding):
        y = x.transpose(1, 2)
        o = run(scaled_dot_product_attention, y, y, y)
    assert isinstance(o, Tensor)
    o.square().sum().backward()
    torch.testing.assert_close(x.grad, expected)


def test_checkpoints_on_ranks(pool: Pools) -> None:
    pool(2).run(checkpoint_on_ranks)
