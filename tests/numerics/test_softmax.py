"""online_softmax and online_logsumexp on the eager kernels: formulas, blocks, strides, gradients, registrations."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad

import ringattn.numerics.partial
import ringattn.numerics.softmax
from ringattn.kernels.interface import accumulation_dtype
from ringattn.numerics.softmax import online_logsumexp, online_softmax

INF = float("inf")
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
OPS = torch.ops.ringattn


def logits(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, scale: float = 4.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale).to(dtype)


def budget(low: Tensor, exact: Tensor, largest: Tensor | float = 1.0) -> Tensor:
    """Twice the error of torch's own result in that dtype, and two accumulation roundings of the largest term."""
    band = 2 * torch.finfo(accumulation_dtype(low.dtype)).eps * largest
    return 2 * (low.double() - exact).abs().max() + band


@pytest.mark.parametrize("block_size", [None, 1, 7, 64, 100, 1000])
@pytest.mark.parametrize("dtype", FLOATS)
def test_softmax_and_logsumexp_are_inside_the_budget(dtype: torch.dtype, block_size: int | None) -> None:
    x = logits(3, 517, dtype=dtype)
    y, lse = online_softmax(x, block_size=block_size), online_logsumexp(x, block_size=block_size)
    exact, exact_lse = torch.softmax(x.double(), -1), torch.logsumexp(x.double(), -1)
    assert y.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (y.double() - exact).abs().max() <= budget(torch.softmax(x, -1), exact)
    assert (lse.double() - exact_lse).abs().max() <= budget(
        torch.logsumexp(x.to(lse.dtype), -1), exact_lse, exact_lse.abs().max()
    )


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 70),
    block_size=st.integers(1, 80),
    dim=st.integers(-3, 2),
    permutation=st.permutations(range(3)),
    hidden=st.sets(st.integers(0, 69)),
    scale=st.sampled_from([0.0, 1.0, 30.0, 1e4]),
)
def test_any_block_dim_and_strides_give_the_definition(n, block_size, dim, permutation, hidden, scale) -> None:
    shape = [2, 3, 2]
    shape[dim] = n
    where = [0, 0, 0]
    for place, source in enumerate(permutation):
        where[source] = place
    x = logits(*(shape[i] for i in permutation), scale=scale).permute(where)
    assert list(x.shape) == shape
    keep = [i for i in range(n) if i not in hidden] or [0]
    x.index_fill_(dim, torch.tensor([i for i in range(n) if i not in keep], dtype=torch.long), -INF)
    y = online_softmax(x, dim, block_size=block_size)
    assert y.stride() == torch.empty_like(x).stride()
    torch.testing.assert_close(y, torch.softmax(x, dim), rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(online_logsumexp(x, dim, block_size=block_size), torch.logsumexp(x, dim))


def test_a_row_of_minus_inf_is_zero_and_has_no_gradient() -> None:
    x = logits(3, 9, dtype=torch.float32)
    x[1] = -INF
    x[2, 3:] = -INF
    x.requires_grad_()
    y, lse = online_softmax(x, block_size=4), online_logsumexp(x, block_size=4)
    assert torch.equal(y[1], torch.zeros(9))
    assert lse[1] == -INF
    for out in (y, lse):
        (dx,) = torch.autograd.grad(out, x, torch.ones_like(out))
        assert dx.isfinite().all()
        assert torch.equal(dx[1], torch.zeros(9))
        assert torch.equal(dx[2, 3:], torch.zeros(6))


def test_plus_inf_and_nan_stay_in_their_row() -> None:
    x = logits(3, 9)
    x[0, 8], x[1, 0] = INF, float("nan")
    y, lse = online_softmax(x, block_size=4), online_logsumexp(x, block_size=4)
    assert y[:2].isnan().all()
    assert lse[:2].isnan().all()
    torch.testing.assert_close(y[2], torch.softmax(x[2], -1))


def test_rows_without_logits_and_tensors_without_rows() -> None:
    assert online_softmax(torch.empty(3, 0)).shape == (3, 0)
    assert torch.equal(online_logsumexp(torch.empty(3, 0)), torch.full((3,), -INF))
    assert online_softmax(torch.empty(0, 5)).shape == (0, 5)
    assert online_logsumexp(torch.empty(0, 5)).shape == (0,)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_first_and_second_derivatives(dim: int) -> None:
    x = logits(2, 4, 3, scale=1.0).requires_grad_()
    for op in (online_softmax, online_logsumexp):
        assert torch.autograd.gradcheck(lambda x, op=op: op(x, dim, block_size=3), x)
        assert torch.autograd.gradgradcheck(lambda x, op=op: op(x, dim, block_size=3), x)


@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients_are_inside_the_budget(dtype: torch.dtype) -> None:
    x = logits(4, 300, dtype=dtype, scale=2.0).requires_grad_()
    dy, g = logits(4, 300, seed=1, dtype=dtype), logits(4, seed=2, dtype=dtype)

    def grads(y: Tensor, lse: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad([y], x, [dy.to(y.dtype)]) + torch.autograd.grad([lse], x, [g.to(lse.dtype)])

    got = grads(online_softmax(x, block_size=64), online_logsumexp(x, block_size=64), x)
    low = grads(torch.softmax(x, -1), torch.logsumexp(x, -1), x)
    xd = x.detach().double().requires_grad_()
    for a, b, exact in zip(got, low, grads(torch.softmax(xd, -1), torch.logsumexp(xd, -1), xd), strict=True):
        assert a.dtype == dtype
        assert (a.double() - exact).abs().max() <= budget(b, exact, dy.abs().max())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("strided", [False, True])
def test_opcheck_passes_for_both_directions(dtype: torch.dtype, strided: bool) -> None:
    x = logits(3, 5, 2, dtype=dtype)
    x = (x.transpose(0, 2) if strided else x).requires_grad_()
    how = (1, 2, "eager")
    y, lse = OPS.online_softmax(x, *how).detach(), OPS.online_logsumexp(x, *how).detach()
    for leaf in (y, lse):
        leaf.requires_grad_()
    dy, g = torch.randn_like(y).requires_grad_(), torch.randn_like(lse).requires_grad_()
    torch.library.opcheck(OPS.online_softmax, (x, *how))
    torch.library.opcheck(OPS.online_softmax_backward, (dy, y, *how))
    torch.library.opcheck(OPS.online_logsumexp, (x, *how))
    torch.library.opcheck(OPS.online_logsumexp_backward, (g, x, lse, *how))


def test_compile_sees_one_graph_forward_and_backward() -> None:
    x = logits(4, 50, dtype=torch.float32).requires_grad_()

    def loss(x: Tensor) -> Tensor:
        return (online_softmax(x, block_size=16) ** 2).sum() + online_logsumexp(x, block_size=16).sum()

    (want,) = torch.autograd.grad(loss(x), x)
    (got,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), x)
    torch.testing.assert_close(got, want)


def test_refusals_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, 4)
    for op in (online_softmax, online_logsumexp):
        with pytest.raises(ValueError, match="x must"):
            op(x.long())
        with pytest.raises(ValueError, match="x must"):
            op(x.to(torch.float8_e4m3fn))
        with pytest.raises(ValueError, match="x must"):
            op(torch.tensor(1.0))
        with pytest.raises(ValueError, match="dim must"):
            op(x, 2)
        with pytest.raises(ValueError, match="impl must"):
            op(x, impl="cuda")
        with pytest.raises(ValueError, match="block_size must"):
            op(x, block_size=0)
        with pytest.raises(NotImplementedError, match="x must"):
            torch.func.jvp(op, (x,), (x,))
        with pytest.raises(NotImplementedError, match="got a tangent"), forward_ad.dual_level():
            op(forward_ad.make_dual(x, x))
        with pytest.raises(ValueError, match="block_size must"):
            op(x, block_size=3, impl="portable")
        with pytest.raises(ValueError, match=r"x is fp64|triton is not installed"):
            op(x.double(), impl="portable")
        with monkeypatch.context() as patch:
            patch.setattr(ringattn.numerics.softmax, "_has_triton", lambda: False)
            with pytest.raises(ValueError, match="got 'portable'; triton is not installed"):
                op(x, impl="portable")


@pytest.mark.parametrize("n", [1, 5, 4096, 8192, 8193, 32768, 65537, 1 << 20, (1 << 31) + 5])
def test_every_launch_covers_the_row_with_whole_tiles(n: int) -> None:
    triton_softmax = pytest.importorskip("ringattn.kernels.softmax.softmax_triton")
    for outer, inner, unit, itemsize, block in itertools.product(
        [1, 3], [1, 7, 4096], [True, False], [2, 4], [None, 16, 1024]
    ):
        how = triton_softmax.choose_launch(
            outer, n, inner, unit_columns=unit, itemsize=itemsize, num_sms=132, block_size=block
        )
        assert all(x & (x - 1) == 0 for x in (how.rows, how.lanes, how.vec, how.warps))
        assert 1 <= how.warps <= 16
        assert how.rows * how.tile <= 16384
        assert block is None or how.tile <= block
        share, splits = triton_softmax._share(n, how)
        assert share % how.tile == 0
        assert (splits - 1) * share < n <= splits * share
        assert splits <= 1024
