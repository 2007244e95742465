"""The eager merge against attention over all keys at once."""

from __future__ import annotations

import math

import pytest
import torch

from ringattn.kernels.attention.torch_ops.carry import LOG2E, merge, of_sinks
from tests.support.carries import empty_state, partial_of, scores_of


@pytest.mark.parametrize("sinks", [False, True])
def test_partials_merged_one_by_one_are_attention_over_all_keys(sinks: bool) -> None:
    scores, values = scores_of(2, 5, 3, 12, 8)
    sink = torch.tensor([0.3, -math.inf, 2.0], dtype=torch.float64) if sinks else None
    carry, o = empty_state(2, 5, 3, 8, torch.float64), torch.full((2, 5, 3, 8), math.nan).double()
    lse = torch.full((2, 3, 5), 9.0).double()
    begun = None if sink is None else of_sinks(sink, o, lse)
    for part in (slice(0, 4), slice(4, 5)):
        merge(begun, partial_of(scores[..., part], values[:, part]), carry)
        begun = carry
    merge(carry, partial_of(scores[..., 5:], values[:, 5:]), (o, lse))
    with_sink = scores if sink is None else torch.cat((scores, sink[:, None, None].expand(2, 3, 5, 1)), -1)
    torch.testing.assert_close(lse, with_sink.logsumexp(-1))
    p = torch.exp(scores - lse[..., None])
    torch.testing.assert_close(o, torch.einsum("bhst,bthd->bshd", p, values))


def test_the_first_partial_of_an_empty_carry_is_written_as_it_is() -> None:
    scores, values = scores_of(1, 4, 2, 3, 8)
    part = partial_of(scores, values)
    fresh, begun = (empty_state(1, 4, 2, 8, torch.float64) for _ in range(2))
    merge(None, part, fresh)
    merge(None, None, begun)
    merge(begun, part, begun)
    for x, y in zip((fresh.m, fresh.l, fresh.acc), (begun.m, begun.l, begun.acc), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
    torch.testing.assert_close(fresh.m, part[1] * LOG2E)


def test_an_empty_partial_changes_nothing_and_finishes_a_carry() -> None:
    scores, values = scores_of(1, 4, 2, 3, 8)
    part, carry, copied = partial_of(scores, values), *(empty_state(1, 4, 2, 8, torch.float64) for _ in range(2))
    merge(None, part, carry)
    merge(carry, None, copied)
    for x, y in zip((copied.m, copied.l, copied.acc), (carry.m, carry.l, carry.acc), strict=True):
        assert torch.equal(x, y)
    o, lse = torch.full((1, 4, 2, 8), math.nan).double(), torch.full((1, 2, 4), math.nan).double()
    merge(carry, None, (o, lse))
    torch.testing.assert_close((o, lse), part)


@pytest.mark.parametrize("begun", [False, True])
def test_rows_that_have_seen_nothing_are_zero(begun: bool) -> None:
    carry = empty_state(1, 3, 2, 8, torch.float32)
    merge(None, None, carry)
    o, lse = torch.ones(1, 3, 2, 8), torch.ones(1, 2, 3)
    merge(carry if begun else None, None, (o, lse))
    assert torch.equal(o, torch.zeros_like(o))
    assert torch.equal(lse, torch.full_like(lse, -math.inf))
