"""Tokens that are drawn from logits, against probabilities that are sorted and added up in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringattn.kernels import draw as drawing
from ringattn.kernels.draw import draw

INF = float("inf")
LAST = 1 - 2.0**-53
"""The largest number below 1."""
COLDEST = 1e-6
EPS = 2e-6
"""By how much probabilities in fp32 may miss a boundary."""


def how(*rows: tuple[float, float, float]) -> Tensor:
    """(temperature, top_p, number) of rows, as `draw` takes them."""
    return torch.tensor(rows, dtype=torch.float64)


def draw_logits(seed: int, b: int, vocab: int, scale: float, *, ties: bool = False, masked: float = 0.0) -> Tensor:
    """Logits `b vocab`, fp32; with ties of few different values; some -inf, but not all of a row."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(b, vocab, generator=generator) * scale
    if ties:
        x = (x * 2).round() / 2
    hidden = torch.rand(b, vocab, generator=generator) < masked
    hidden[torch.arange(b), torch.randint(vocab, (b,), generator=generator)] = False
    return x.masked_fill(hidden, -INF)


def sorted_out(x: Tensor, temperature: float, top_p: float) -> list[tuple[int, float]]:
    """The tokens that are in, in the order of the vocabulary, and the sum of probabilities up to each."""
    p = ((x.double() - x.double().max()) / temperature).exp()
    p /= p.sum()
    total, least = 0.0, INF
    for i in sorted(range(len(p)), key=lambda i: -float(x[i])):
        if total >= top_p and float(x[i]) < least:
            break
        total, least = total + float(p[i]), float(x[i])
    inside = [i for i in range(len(p)) if float(x[i]) >= least]
    sums, far = [], 0.0
    for i in inside:
        far += float(p[i]) / total
        sums.append((i, far))
    return sums


def wanted(x: Tensor, temperature: float, top_p: float, number: float) -> set[int]:
    """The tokens that a number falls on; several where it, or top_p, is next to a boundary."""
    found = set()
    for p in {max(0.0, top_p - EPS), top_p, top_p + EPS}:
        before = 0.0
        for token, far in sorted_out(x, temperature, p):
            if far > before and before <= number + EPS and far > number - EPS:
                found.add(token)
            before = far
    return found


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.integers(1, 80),
    scale=st.sampled_from([0.0, 0.1, 1.0, 5.0]),
    ties=st.booleans(),
    masked=st.sampled_from([0.0, 0.5]),
    temperature=st.sampled_from([COLDEST, 0.1, 0.7, 1.0, 2.0, 100.0]),
    top_p=st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1e-30, 0.5, 0.9, 1.0])),
    number=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, LAST])),
)
def test_tokens_are_those_of_probabilities_sorted_in_fp64(
    seed, vocab, scale, ties, masked, temperature, top_p, number
) -> None:
    x = draw_logits(seed, 1, vocab, scale, ties=ties, masked=masked)
    assert int(draw(x, how((temperature, top_p, number)))) in wanted(x[0], temperature, top_p, number)


def test_most_numbers_leave_no_choice() -> None:
    """What the test above allows near boundaries is the exception."""
    x = draw_logits(0, 1, 60, 2.0)[0]
    assert sum(len(wanted(x, 1.0, 0.9, i / 200)) == 1 for i in range(200)) >= 198


def test_tokens_as_likely_as_the_last_one_that_is_in_are_in() -> None:
    x = torch.tensor([[2.0, 5.0, 2.0, 1.0, 2.0]]).expand(100, 5)
    for top_p, inside in ((0.0, {1}), (1e-30, {1}), (0.5, {1}), (0.87, {0, 1, 2, 4}), (0.95, {0, 1, 2, 4})):
        tokens = draw(x, how(*((1.0, top_p, i / 100) for i in range(100))))
        assert set(tokens.tolist()) == inside, top_p


BINARY = 1.0 / math.log(2.0)
"""The temperature at which a logit is the logarithm of the weight to base 2, without rounding."""


def exact_rows() -> tuple[Tensor, Tensor, list[int]]:
    """Logits, settings and tokens where sums and boundaries are equal, not near.

    128 tokens of weight 1, then as many of 1/2, and so on to 1/128, twice: the sum is 256.
    """
    levels = -torch.arange(9.0).clamp(max=7).repeat_interleave(128)
    flat = torch.where(torch.arange(1152) < 1024, 0.0, -INF)
    rows, settings_, tokens = [], [], []
    for level in (1, 2, 5):
        rows.append(levels)
        settings_.append((BINARY, 1 - 2.0**-level, LAST))
        tokens.append(128 * level - 1)
    for token in (0, 1, 31, 80, 160, 1023):
        rows.append(flat)
        settings_.append((BINARY, 1.0, token / 1024))
        tokens.append(token)
    return torch.stack(rows), how(*settings_), tokens


def test_a_sum_that_just_comes_to_what_is_needed_is_enough() -> None:
    x, settings_, tokens = exact_rows()
    assert draw(x, settings_).tolist() == tokens


def test_the_ends_of_the_interval_fall_on_the_first_and_the_last_token_that_are_in() -> None:
    x = draw_logits(1, 20, 50, 1.0, masked=0.3)
    for temperature, top_p in ((1.0, 1.0), (0.5, 0.9), (100.0, 1.0)):
        for row in x:
            inside = [token for token, _ in sorted_out(row, temperature, top_p)]
            inside = [token for token in inside if row[token] > -INF]
            ends = draw(row.expand(2, -1), how((temperature, top_p, 0.0), (temperature, top_p, LAST)))
            assert ends.tolist() == [inside[0], inside[-1]]


@pytest.mark.parametrize("temperature", [COLDEST, 1.0, 100.0, 1e300])
def test_masked_tokens_are_never_drawn(temperature: float) -> None:
    x = torch.full((64, 33), -INF)
    x[:, 5::7] = draw_logits(3, 64, 4, 1.0)
    for top_p in (0.0, 0.9, 1.0):
        tokens = draw(x, how(*((temperature, top_p, i / 64 if i else LAST) for i in range(64))))
        assert x.gather(1, tokens[:, None]).isfinite().all()
    if temperature >= 100:
        counts = draw(x, how(*((temperature, 1.0, i / 64) for i in range(64)))).bincount()
        assert all(12 <= count <= 20 for count in counts[5::7])


def test_a_row_alone_is_the_row_in_a_batch() -> None:
    x = draw_logits(4, 40, 3000, 2.0)
    rows = torch.rand(40, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    rows[::5, 0] = 0.0
    together = draw(x, rows)
    assert [int(draw(x[i : i + 1], rows[i : i + 1])) for i in range(40)] == together.tolist()
    order = torch.randperm(40, generator=torch.Generator().manual_seed(6))
    assert torch.equal(draw(x[order], rows[order]), together[order])


def test_no_order_of_adding_changes_what_is_in() -> None:
    x = draw_logits(7, 1, 5000, 1.0)
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(8))
    one = torch.tensor([[1.0]], dtype=torch.float64)
    largest = x.max(-1, keepdim=True).values
    weights = drawing.weigh(x, largest, one)
    assert torch.equal(drawing.weigh(x[:, order], largest, one), weights[:, order])
    assert int(weights.sum()) == sum(weights[0].tolist())
    assert int(weights.max()) == 2**40


def test_rows_without_a_temperature_take_the_first_of_the_largest() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, -0.0, -1.0, 0.0], [-INF, -INF, -5.0, -5.0]])
    for settings_ in (None, how(*[(0.0, 1.0, 0.9)] * 3)):
        assert draw(x, settings_).tolist() == [1, 0, 2]
    assert draw(x, how((0.0, 1.0, 0.9), (1.0, 1.0, 0.9), (0.0, 0.5, 0.0))).tolist() == [1, 3, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_that_has_no_largest_number_gives_no_token(dtype: torch.dtype) -> None:
    nan = math.nan
    x = torch.tensor([[1.0, 2.0], [1.0, nan], [nan, 1.0], [INF, 0.0], [-INF, -INF], [-INF, 1.0]]).to(dtype)
    for temperature in (0.0, COLDEST, 1.0):
        assert draw(x, how(*[(temperature, 0.9, 0.5)] * 6)).tolist() == [1, -1, -1, -1, -1, 1]
    assert draw(x[:, :1], how(*[(1.0, 0.9, LAST)] * 6)).tolist() == [0, 0, -1, -1, -1, -1]


@pytest.mark.parametrize("vocab", [1, 7, 1000])
def test_the_log_of_the_sum_is_that_of_all_logits(vocab: int) -> None:
    x, lse = draw_logits(9, 5, vocab, 3.0, masked=0.2), torch.full((5,), math.nan)
    draw(x, None, lse)
    torch.testing.assert_close(lse.double(), x.double().logsumexp(-1), rtol=1e-6, atol=1e-6)


def test_rows_that_cannot_be_added_up_are_refused() -> None:
    with pytest.raises(ValueError, match=r"vocab must be between 1 and 4194304, got 0; give each row"):
        draw(torch.zeros(2, 0), None)
    with pytest.raises(ValueError, match=r"got 4194305"):
        draw(torch.zeros(1, 1).expand(1, drawing.MOST + 1), None)
    assert draw(torch.zeros(0, 5), None).tolist() == []
