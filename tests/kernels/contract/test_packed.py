"""Packed partials against attention over all keys at once, in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringattn.kernels.partials import packed
from ringattn.kernels.partials.packed import LOG2E

INF = float("inf")
Sizes = tuple[int, int, int, int]
"""(b, s, h, dv)"""


def draw_parts(
    seed: int, count: int, b: int, s: int, h: int, dv: int, seen: float = 0.7
) -> tuple[Tensor, Tensor, Tensor]:
    """A stack of packed parts of random keys, and the scores `count b s h keys` and values `count keys dv` that they are of.

    Rows see each key with probability `seen`; some see none, in one part or in all.
    """
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(count, b, s, h, 5, generator=generator, dtype=torch.float64) * 8
    scores[torch.rand(scores.shape, generator=generator) > seen] = -INF
    scores[:, :, 0, 0] = -INF
    scores[torch.rand(count, generator=generator) > seen] = -INF
    values = torch.randn(count, 5, dv, generator=generator, dtype=torch.float64)
    rows = b * s * h
    stack = torch.full((count, packed.size(rows, dv)), math.nan)
    m, l, acc = packed.views(stack, rows, dv)  # noqa: E741
    top = scores.amax(-1) * LOG2E
    p = torch.exp2(scores * LOG2E - torch.where(top == -INF, 0.0, top).unsqueeze(-1))
    m.copy_(top.view(count, rows))
    l.copy_(p.sum(-1).view(count, rows))
    acc.copy_((p @ values[:, None, None]).view(count, rows, dv))
    return stack, scores, values


def attend(scores: Tensor, values: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """O `b s h dv` and lse `b h s` over the keys of all parts, fp64."""
    logits = scores.permute(1, 2, 3, 0, 4).flatten(3)
    if sinks is not None:
        logits = torch.cat((logits, sinks.double().view(1, 1, -1, 1).expand(*logits.shape[:3], 1)), -1)
    lse = torch.logsumexp(logits, -1)
    p = torch.exp(logits - torch.where(lse == -INF, 0.0, lse).unsqueeze(-1))
    return p[..., : values[..., 0].numel()] @ values.flatten(0, 1), lse.transpose(1, 2)


def finish(stack: Tensor, sizes: Sizes, sinks: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    """What the plain function makes of a stack."""
    b, s, h, dv = sizes
    o, lse = torch.full((b, s, h, dv), math.nan, dtype=dtype), torch.full((b, h, s), math.nan)
    packed.finish_parts(stack, b * s * h, dv, sinks, o, lse)
    return [o, lse]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    sizes=st.tuples(
        st.integers(1, 6), st.integers(1, 2), st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 5, 8])
    ),
    with_sinks=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_parts_of_keys_finish_as_attention_over_all_keys(seed, sizes, with_sinks, dtype) -> None:
    stack, scores, values = draw_parts(seed, *sizes)
    sinks = torch.randn(sizes[3], generator=torch.Generator().manual_seed(seed)) * 4 if with_sinks else None
    want = attend(scores, values, sinks)
    rtol = 2 * torch.finfo(dtype).eps + 1e-5
    for x, y in zip(finish(stack, sizes[1:], sinks, dtype), want, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=rtol, atol=1e-5)


def test_merging_in_two_stages_is_merging_at_once() -> None:
    sizes = (2, 3, 4, 8)
    rows, dv = 24, 8
    stack, scores, values = draw_parts(3, 6, *sizes)
    halves = torch.full((2, stack.shape[1]), math.nan)
    for half, splits in zip(halves, stack.split(3), strict=True):
        packed.merge_parts(splits, half, rows, dv)
    for x, y in zip(finish(halves, sizes, None, torch.float32), attend(scores, values, None), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)


def test_the_identity_changes_no_bit() -> None:
    sizes = (1, 2, 3, 4)
    rows, dv = 6, 4
    stack, _, _ = draw_parts(0, 2, *sizes)
    nothing = torch.full((3, stack.shape[1]), math.nan)
    packed.clear(nothing, rows, dv)
    assert [x.unique().tolist() for x in packed.views(nothing, rows, dv)] == [[-INF], [0.0], [0.0]]
    padded = torch.cat((nothing[:1], stack[:1], nothing[1:2], stack[1:], nothing[2:]))
    for sinks in (None, torch.tensor([0.0, 3.0, -INF])):
        for x, y in zip(
            finish(stack, sizes, sinks, torch.float32), finish(padded, sizes, sinks, torch.float32), strict=True
        ):
            assert torch.equal(x, y)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_rows_without_keys_are_zero(with_sinks: bool) -> None:
    nothing = torch.empty(2, packed.size(6, 4))
    packed.clear(nothing, 6, 4)
    sinks = torch.tensor([0.5, -2.0, 7.0]) if with_sinks else None
    o, lse = finish(nothing, (1, 2, 3, 4), sinks, torch.float16)
    assert torch.equal(o, torch.zeros(1, 2, 3, 4, dtype=torch.float16))
    expected = torch.full((3,), -INF) if sinks is None else sinks
    torch.testing.assert_close(lse, expected.view(1, 3, 1).expand(1, 3, 2), rtol=1e-6, atol=0)
