"""merge_stack, eager, against the partial's own reduction."""

import itertools

import pytest
import torch
from torch import Tensor

from ringattn.kernels.contract import accumulation_dtype
from ringattn.kernels.merge import LN2, merge_stack
from ringattn.numerics.partial import Partial, finalize, reduce_partials

INF = float("inf")


def stack(parts: int, rows: int, dv: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Partials of random keys, with an empty row, a row with one part that is not empty, and a wide range of scores."""
    generator = torch.Generator().manual_seed(parts)
    s = torch.randn(parts, rows, 6, generator=generator, dtype=torch.float64) * 20
    s[:, 0] = -INF
    s[1:, rows // 2] = -INF
    p = Partial.from_scores(s, torch.randn(parts, 6, dv, generator=generator, dtype=torch.float64))
    return p.m.to(dtype), p.l.to(dtype), p.o.to(dtype)


@pytest.mark.parametrize(("parts", "log2"), list(itertools.product([1, 2, 5], [False, True])))
def test_a_stack_merges_like_its_partials_one_by_one(parts: int, log2: bool) -> None:
    m, l, o = stack(parts, 7, 3)  # noqa: E741
    want = reduce_partials([Partial(*row) for row in zip(m, l, o, strict=True)], how="sequential")
    units = m / LN2 if log2 else m
    top, total, acc = merge_stack(units, l, o, log2=log2)
    torch.testing.assert_close(top * (LN2 if log2 else 1), want.m, rtol=1e-12, atol=0)
    torch.testing.assert_close(total, want.l, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(acc, want.o, rtol=1e-12, atol=1e-14)
    for got, ref in zip(merge_stack(units, l, o, log2=log2, finish=True), finalize(want), strict=True):
        torch.testing.assert_close(got, ref, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16])
def test_empty_rows_stay_empty_and_finish_as_zero(out_dtype: torch.dtype | None) -> None:
    m, l, o = stack(3, 4, 2, torch.float32)  # noqa: E741
    top, total, acc = merge_stack(m, l, o)
    assert top[0] == -INF
    assert total[0] == 0
    assert torch.equal(acc[0], torch.zeros(2))
    out, lse = merge_stack(m, l, o, finish=True, out_dtype=out_dtype)
    assert out.dtype == (out_dtype or torch.float32)
    assert lse.dtype == accumulation_dtype(out.dtype)
    assert torch.equal(out[0], torch.zeros(2, dtype=out.dtype))
    assert lse[0] == -INF
    assert out.isfinite().all()


def test_one_part_is_returned_to_the_bit() -> None:
    for got, want in zip(merge_stack(*stack(1, 6, 4, torch.float32)), stack(1, 6, 4, torch.float32), strict=True):
        assert torch.equal(got, want[0])
