"""The Triton merge of a partial into a carry equals the eager one."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from ringattn.kernels.attention.torch_ops import carry as eager
from tests.support.carries import empty_state, partial_of, scores_of


@pytest.mark.parametrize(("dv", "dtype"), list(itertools.product([40, 128], [torch.float32, torch.float16])))
def test_the_kernel_equals_the_eager_merge(dv: int, dtype: torch.dtype) -> None:
    from ringattn.kernels.attention.torch_ops import rows_triton

    scores, values = scores_of(2, 13, 3, 6, dv)
    parts = [partial_of(scores[..., some], values[:, some]) for some in (slice(0, 2), slice(2, 6))]
    # heads before rows, as cuDNN may return them, and statistics with a stride
    parts = [
        (o.to(dtype).transpose(1, 2).contiguous().transpose(1, 2), lse.float().mT.contiguous().mT) for o, lse in parts
    ]
    outputs = []
    for merge in (rows_triton.merge, eager.merge):
        begun, carry = (empty_state(2, 13, 3, dv, torch.float32) for _ in range(2))
        merge(eager.of_sinks(torch.tensor([0.5, -math.inf, 1.0]), begun.acc, begun.m), parts[0], begun)
        merge(None, parts[0], carry)
        carry.m[:, :, 4], carry.l[:, :, 4] = -math.inf, 0.0  # a row that has seen nothing so far
        carry.acc[:, 4] = 0.0
        held = [x.clone() for x in (carry.m, carry.l, carry.acc)]
        ends = [(torch.full((2, 13, 3, dv), math.nan, dtype=dtype), torch.full((2, 3, 13), math.nan)) for _ in range(2)]
        for partial, end in zip((parts[1], None), ends, strict=True):
            merge(carry, partial, end)
        assert all(torch.equal(x, y) for x, y in zip(held, (carry.m, carry.l, carry.acc), strict=True)), "carry is read"
        merge(carry, parts[1], carry)
        outputs.append((*ends[0], *ends[1], carry.m, carry.l, carry.acc, begun.m, begun.l, begun.acc))
    for x, y in zip(*outputs, strict=True):
        eps = torch.finfo(x.dtype).eps
        torch.testing.assert_close(x, y, rtol=4 * eps, atol=8 * eps)


@pytest.mark.parametrize("begun", [False, True])
def test_partials_of_some_rows_are_merged_at_once_as_one_after_the_other(begun: bool) -> None:
    from ringattn.kernels.attention.torch_ops import rows_triton

    scores, values = scores_of(2, 13, 3, 8, 40)
    cuts, spans = (slice(0, 2), slice(2, 4), slice(4, 7)), [(0, 13), (5, 13), (3, 9)]
    parts = []
    for some, (first, end) in zip(cuts, spans, strict=True):
        o, lse = partial_of(scores[:, :, first:end, some], values[:, some])
        parts.append(((o.half().contiguous(), lse.float().contiguous()), (first, end)))
    outputs = []
    for merge in (rows_triton.merge_parts, eager.merge_parts):
        carry = empty_state(2, 13, 3, 40, torch.float32)
        before = partial_of(scores[..., 7:], values[:, 7:])
        eager.merge(None, (before[0].half(), before[1].float()), carry)
        given = carry if begun else None
        end = torch.full((2, 13, 3, 40), math.nan).half(), torch.full((2, 3, 13), math.nan)
        merge(given, parts, end)
        merge(given, parts[:2], carry)
        merge(given, parts[1:2], carry)
        outputs.append((*end, carry.m, carry.l, carry.acc))
    for x, y in zip(*outputs, strict=True):
        eps = torch.finfo(x.dtype).eps
        torch.testing.assert_close(x, y, rtol=8 * eps, atol=8 * eps)
