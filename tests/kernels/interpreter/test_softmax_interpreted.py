"""The Triton softmax kernels against fp64, run by the interpreter: every launch shape, both directions."""

import pytest
import torch
from torch import Tensor

from ringattn.numerics.softmax import online_logsumexp, online_softmax

INF = float("inf")
CASES = [  # shape, dim, block_size; blocks of many rows, whole rows, shares, rows side by side, odd tails
    ((3, 10), -1, None),
    ((9, 1000), -1, None),
    ((2, 9001), -1, 1024),
    ((4, 100), -1, 16),
    ((1, 20000), -1, None),
    ((1, 70000), -1, None),
    ((5, 7), 0, None),
    ((300, 70), 0, None),
    ((2, 77, 130), 1, 16),
    ((2, 300, 5), 1, None),
]


def logits(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 4).to(dtype)


def assert_inside_budget(got: Tensor, low: Tensor, exact: Tensor, largest: Tensor | float) -> None:
    """Twice the error of torch in that dtype, and two fp32 roundings of the largest term."""
    band = 2 * torch.finfo(torch.float32).eps * largest
    assert (got.double() - exact).abs().max() <= 2 * (low.double() - exact).abs().max() + band


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("shape", "dim", "block_size", "dtype"),
    [(*case, torch.float32) for case in CASES] + [(*case, torch.float16) for case in CASES[1::3]],
)
def test_kernels_are_inside_the_budget_forward_and_backward(shape, dim, block_size, dtype) -> None:
    x = logits(*shape, dtype=dtype).requires_grad_()
    exact_x = x.detach().double().requires_grad_()
    dy, g = logits(*shape, seed=1, dtype=dtype), logits(*shape, seed=2).select(dim, 0)
    runs = []
    for softmax, logsumexp, leaf in (
        (torch.softmax, torch.logsumexp, exact_x),
        (torch.softmax, torch.logsumexp, x),
        (
            lambda x, dim: online_softmax(x, dim, block_size=block_size, impl="portable"),
            lambda x, dim: online_logsumexp(x, dim, block_size=block_size, impl="portable"),
            x,
        ),
    ):
        y, lse = softmax(leaf, dim), logsumexp(leaf, dim)
        dx = torch.autograd.grad(y, leaf, dy.to(y.dtype))[0]
        runs.append((y.detach(), lse.detach(), dx, torch.autograd.grad(lse, leaf, g.to(lse.dtype))[0]))
    largest = (1.0, runs[0][1].abs().max(), dy.abs().max(), g.abs().max())
    for exact, low, got, term in zip(*runs, largest, strict=True):
        assert got.isfinite().all()
        assert_inside_budget(got, low, exact, term)


@pytest.mark.parametrize("block_size", [None, 8])
def test_rows_of_minus_inf_plus_inf_and_nan(block_size: int | None) -> None:
    x = logits(5, 75)
    x[0] = -INF
    x[1, 30], x[2, 74] = INF, float("nan")
    x[3, 5:] = -INF
    x.requires_grad_()
    y = online_softmax(x, block_size=block_size, impl="portable")
    lse = online_logsumexp(x, block_size=block_size, impl="portable")
    assert torch.equal(y[0], torch.zeros(75))
    assert lse[0] == -INF
    assert y[1:3].isnan().all()
    assert lse[1:3].isnan().all()
    torch.testing.assert_close(y[3:], torch.softmax(x[3:], -1))
    torch.testing.assert_close(lse[3:], torch.logsumexp(x[3:], -1))
    for out in (y, lse):
        (dx,) = torch.autograd.grad(out, x, torch.ones_like(out))
        assert torch.equal(dx[0], torch.zeros(75))
        assert dx[3:].isfinite().all()
        assert torch.equal(dx[3, 5:], torch.zeros(70))


def test_strides_that_are_no_view_and_expanded_gradients() -> None:
    x = logits(4, 6, 5, 3).permute(3, 1, 0, 2)[:, ::2]  # rows of dim 1 do not merge into one stride
    for dim in range(4):
        leaf = x.detach().requires_grad_()
        y = online_softmax(leaf, dim, impl="portable")
        assert y.stride() == torch.empty_like(x).stride()
        torch.testing.assert_close(y, torch.softmax(x, dim))
        online_logsumexp(leaf, dim, impl="portable").sum().backward()  # the incoming gradient has stride 0
        torch.testing.assert_close(leaf.grad, torch.softmax(x, dim))


@pytest.mark.parametrize("splits", [2, 5])
def test_shares_merge_to_the_whole_row(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from ringattn.kernels.softmax import softmax_triton

    x = logits(3, 700)
    whole = softmax_triton.Launch(rows=1, lanes=8, vec=4, splits=1, warps=1)
    shared = softmax_triton.Launch(rows=1, lanes=8, vec=4, splits=splits, warps=1)
    for op in (softmax_triton.softmax, softmax_triton.logsumexp):
        found = []
        for how in (shared, whole):
            monkeypatch.setattr(softmax_triton, "choose_launch", lambda *_, how=how, **__: how)
            found.append(op(x, -1))
        torch.testing.assert_close(*found, rtol=1e-6, atol=1e-8)


def test_auto_does_not_choose_the_interpreter() -> None:
    from ringattn.kernels.softmax import eager
    from ringattn.numerics import softmax as public

    assert public._implementation(torch.ones(2, 2), None, "auto") is eager
