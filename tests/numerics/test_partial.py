"""The laws of the partial: monoid, empties, gradients, agreement with the dense softmax."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringattn.numerics.partial import Partial, finalize, merge, reduce_partials

INF = float("inf")
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def scores(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, scale: float = 4.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale).to(dtype)


def random_partial(rows: int, d: int, dtype: torch.dtype, seed: int) -> Partial:
    p = Partial.from_scores(scores(rows, 5, seed=seed), scores(5, d, seed=seed + 100))
    return Partial(p.m.to(dtype), p.l.to(dtype), p.o.to(dtype))


def dense(s: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The definition; empty rows by convention."""
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - torch.where(lse == -INF, 0.0, lse).unsqueeze(-1))
    return p @ v, lse


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[x.element_size()])


def assert_same_bits(a: Partial, b: Partial) -> None:
    for name in ("m", "l", "o"):
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype
        assert torch.equal(bits(x), bits(y)), name


def assert_close(a: Partial, b: Partial, ulps: float = 8) -> None:
    eps = torch.finfo(a.m.dtype).eps
    for name in ("m", "l", "o"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=ulps * eps, atol=ulps * eps * 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_identity_is_two_sided_to_the_bit(dtype: torch.dtype) -> None:
    p = random_partial(7, 3, dtype, seed=1)
    p.o[0, 0] = -0.0
    e = Partial.identity((7,), 3, dtype)
    assert_same_bits(merge(p, e), p)
    assert_same_bits(merge(e, p), p)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_empties_stay_empty(dtype: torch.dtype) -> None:
    e = Partial.identity((2, 3), 4, dtype)
    assert_same_bits(merge(e, e), e)
    o, lse = finalize(merge(e, e))
    assert torch.equal(o, torch.zeros(2, 3, 4, dtype=dtype))
    assert torch.equal(lse, torch.full((2, 3), -INF, dtype=dtype))


def test_no_keys_at_all_give_the_identity() -> None:
    p = Partial.from_scores(torch.empty(2, 3, 0), torch.empty(2, 0, 5))
    assert_same_bits(p, Partial.identity((2, 3), 5))
    assert_same_bits(Partial.from_scores(torch.full((4,), -INF), torch.ones(4, 2)), Partial.identity((), 2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_is_commutative(dtype: torch.dtype) -> None:
    a, b = random_partial(6, 4, dtype, 2), random_partial(6, 4, dtype, 3)
    assert_same_bits(merge(a, b), merge(b, a))


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_is_associative_up_to_rounding(dtype: torch.dtype) -> None:
    a, b, c = (random_partial(6, 4, dtype, seed) for seed in (4, 5, 6))
    assert_close(merge(merge(a, b), c), merge(a, merge(b, c)))


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 24), max_size=7),
    order=st.randoms(use_true_random=False),
    hidden=st.sets(st.integers(0, 23)),
    scale=st.sampled_from([0.0, 1.0, 40.0, 700.0]),
    how=st.sampled_from(["tree", "sequential"]),
)
def test_any_cut_in_any_order_gives_the_dense_answer(cuts, order, hidden, scale, how) -> None:
    s, v = scores(3, 24, seed=7, scale=scale), scores(24, 2, seed=8)
    s[:, sorted(hidden)] = -INF
    edges = [0, *sorted(cuts), 24]
    parts = [Partial.from_scores(s[:, i:j], v[i:j]) for i, j in itertools.pairwise(edges)]
    order.shuffle(parts)
    o, lse = finalize(reduce_partials(parts, how))
    o_ref, lse_ref = dense(s, v)
    torch.testing.assert_close(o, o_ref, rtol=1e-13, atol=1e-12)
    torch.testing.assert_close(lse, lse_ref, rtol=1e-14, atol=1e-12)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5, 8, 13])
def test_tree_and_sequential_agree(num_parts: int) -> None:
    parts = [random_partial(4, 3, torch.float32, seed) for seed in range(num_parts)]
    assert_close(reduce_partials(parts, "tree"), reduce_partials(parts, "sequential"), ulps=16)


def test_the_tree_merges_neighbours_in_order() -> None:
    parts = [random_partial(4, 3, torch.float32, seed) for seed in range(5)]
    a, b, c, d, e = parts
    assert_same_bits(reduce_partials(parts, "tree"), merge(merge(merge(a, b), merge(c, d)), e))


def test_a_sink_is_the_partial_sink_one_zero() -> None:
    s, v, sink = scores(3, 9), scores(9, 2), torch.tensor([0.5, -INF, 30.0], dtype=torch.float64)
    start = Partial(sink, (sink > -INF).double(), torch.zeros(3, 2, dtype=torch.float64))
    o, lse = finalize(merge(start, Partial.from_scores(s, v)))
    o_ref, lse_ref = dense(torch.cat([s, sink[:, None]], 1), torch.cat([v, torch.zeros_like(v[:1])]))
    torch.testing.assert_close(o, o_ref)
    torch.testing.assert_close(lse, lse_ref)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_scores_keep_fp32_statistics(dtype: torch.dtype) -> None:
    s, v = scores(5, 300, dtype=dtype), scores(300, 2, seed=1, dtype=dtype)
    p = Partial.from_scores(s, v)
    assert p.m.dtype == p.l.dtype == p.o.dtype == torch.float32
    o_ref, _ = dense(s.double(), v.double())
    torch.testing.assert_close(finalize(p)[0].double(), o_ref, rtol=2e-5, atol=2e-5)


def test_the_error_does_not_grow_with_the_number_of_parts() -> None:
    s, v = scores(16, 4096, dtype=torch.float32), scores(4096, 8, seed=1, dtype=torch.float32)
    o_ref, lse_ref = dense(s.double(), v.double())
    budget_o = 2 * (torch.softmax(s, -1) @ v - o_ref).abs().max() + torch.finfo(torch.float32).eps * o_ref.abs().max()
    budget_lse = torch.finfo(torch.float32).eps * lse_ref.abs().max() * 2
    for world_size, how in itertools.product([1, 2, 8, 64], ["tree", "sequential"]):
        parts = [Partial.from_scores(a, b) for a, b in zip(s.chunk(world_size, 1), v.chunk(world_size), strict=True)]
        o, lse = finalize(reduce_partials(parts, how))
        assert (o - o_ref).abs().max() <= budget_o, (world_size, how)
        assert (lse - lse_ref).abs().max() <= budget_lse, (world_size, how)


def test_underflow_of_the_rescaling_factor_is_harmless() -> None:
    a = Partial.from_scores(torch.tensor([0.0, 1.0]), torch.ones(2, 1))
    b = Partial.from_scores(torch.tensor([500.0]), torch.full((1, 1), 3.0))
    assert math.exp(-499.0) > 0  # fp64 would still see it, fp32 does not
    assert_same_bits(merge(a, b), b)


@pytest.mark.parametrize("how", ["tree", "sequential"])
def test_gradients_equal_those_of_the_dense_formula(how: str) -> None:
    s, v = scores(3, 10).requires_grad_(), scores(10, 2, seed=1).requires_grad_()
    go, glse = scores(3, 2, seed=2), scores(3, seed=3)
    hide = torch.zeros(3, 10, dtype=torch.bool)
    hide[0] = True  # row 0 sees nothing
    hide[1, :5] = True
    masked = s.masked_fill(hide, -INF)

    o_ref, lse_ref = torch.softmax(masked[1:], -1) @ v, torch.logsumexp(masked[1:], -1)
    want = torch.autograd.grad([o_ref, lse_ref], [s, v], [go[1:], glse[1:]], retain_graph=True)
    parts = [Partial.from_scores(masked[:, i : i + 3], v[i : i + 3]) for i in range(0, 10, 3)]
    got = torch.autograd.grad(finalize(reduce_partials(parts, how)), [s, v], [go, glse])
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)
    assert torch.equal(got[0][0], torch.zeros(10, dtype=torch.float64))


def test_gradcheck_of_the_raw_partial() -> None:
    def raw(s: Tensor, v: Tensor, sink: Tensor) -> tuple[Tensor, ...]:
        zero = torch.zeros(2, 3, dtype=torch.float64)
        parts = [Partial(sink, torch.ones_like(sink), zero), Partial.from_scores(s[:, :4], v[:4])]
        p = reduce_partials([*parts, Partial.from_scores(s[:, 4:], v[4:]), Partial.identity((2,), 3, torch.float64)])
        return p.m, p.l, p.o, *finalize(p)

    leaves = [x.requires_grad_() for x in (scores(2, 7), scores(7, 3, seed=1), scores(2, seed=2))]
    assert torch.autograd.gradcheck(raw, leaves)
    assert torch.autograd.gradgradcheck(lambda *x: raw(*x)[3:], leaves)


@pytest.mark.parametrize("pattern", list(itertools.product([False, True], repeat=4)))
def test_no_combination_of_minus_inf_makes_a_nan(pattern: tuple[bool, ...]) -> None:
    s, v = scores(1, 4).requires_grad_(), scores(4, 2, seed=1).requires_grad_()
    masked = s.masked_fill(torch.tensor([pattern]), -INF)
    parts = [Partial.from_scores(masked[:, i : i + 1], v[i : i + 1]) for i in range(4)]
    for order in itertools.permutations(parts):
        for how in ("tree", "sequential"):
            p = reduce_partials(order, how)
            o, lse = finalize(p)
            assert not any(x.isnan().any() for x in (p.m, p.l, p.o, o, lse))
            grads = torch.autograd.grad([o, lse], [s, v], [torch.ones_like(o), torch.ones_like(lse)], retain_graph=True)
            assert all(g.isfinite().all() for g in grads)
            assert (grads[0][masked == -INF] == 0).all()


def test_plus_inf_and_nan_scores_show_in_their_own_row_only() -> None:
    s, v = scores(3, 6), scores(6, 2, seed=1)
    s[0, 4], s[2, 1] = INF, float("nan")
    o, lse = finalize(merge(Partial.from_scores(s[:, :3], v[:3]), Partial.from_scores(s[:, 3:], v[3:])))
    assert o[[0, 2]].isnan().all()
    assert lse[[0, 2]].isnan().all()
    torch.testing.assert_close(o[1], torch.softmax(s[1], -1) @ v)


@pytest.mark.parametrize("empty_first", [True, False])
def test_what_an_empty_side_holds_reaches_no_gradient(empty_first: bool) -> None:
    def leaves(m: float, total: float, *o: float) -> Partial:
        return Partial(*(torch.tensor(x, dtype=torch.float64).requires_grad_() for x in ([m], [total], [o])))

    empty, other = leaves(-math.inf, 0.0, math.nan, math.inf), leaves(0.5, 2.0, 3.0, 4.0)
    merged = merge(empty, other) if empty_first else merge(other, empty)
    outputs = finalize(merged)
    grads = torch.autograd.grad([x.sum() for x in outputs], [empty.m, empty.l, empty.o, other.m, other.l, other.o])
    alone = torch.autograd.grad([x.sum() for x in finalize(other)], [other.m, other.l, other.o])
    assert all((grad == 0).all() for grad in grads[:3])
    assert all(torch.equal(*pair) for pair in zip(grads[3:], alone, strict=True))


def test_vmap_and_compile_see_no_data_dependent_branch() -> None:
    def attend(s: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        parts = [Partial.from_scores(s[..., :4], v[..., :4, :]), Partial.from_scores(s[..., 4:], v[..., 4:, :])]
        return finalize(reduce_partials([*parts, Partial.identity(s.shape[:-1], v.shape[-1], s.dtype)]))

    s, v = scores(5, 9), scores(5, 9, 2, seed=1)
    s[2] = -INF
    want = [torch.stack(x) for x in zip(*(attend(s[i], v[i]) for i in range(5)), strict=True)]
    compiled = torch.compile(lambda s, v: attend(s.unsqueeze(-2), v), fullgraph=True, backend="aot_eager")
    for got in (torch.vmap(attend)(s, v), [x.squeeze(1) for x in compiled(s, v)]):
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y)


def test_refusals_say_what_to_do() -> None:
    p = random_partial(4, 3, torch.float32, 0)
    with pytest.raises(ValueError, match="l must"):
        Partial(p.m, p.l[:3], p.o)
    with pytest.raises(ValueError, match="put the value dim last"):
        Partial(p.m, p.l, p.o.T)
    with pytest.raises(ValueError, match="one floating dtype"):
        Partial(p.m, p.l, p.o.double())
    with pytest.raises(ValueError, match="b must"):
        merge(p, random_partial(4, 3, torch.float64, 0))
    with pytest.raises(ValueError, match="b must"):
        merge(p, random_partial(4, 2, torch.float32, 0))
    with pytest.raises(ValueError, match="s must"):
        Partial.from_scores(torch.ones(3), torch.ones(3, 1).double())
    with pytest.raises(ValueError, match="one score per value row"):
        Partial.from_scores(torch.ones(3), torch.ones(4, 1))
    with pytest.raises(ValueError, match="at least one partial"):
        reduce_partials([])
    with pytest.raises(ValueError, match="how must"):
        reduce_partials([p], how="ring")
