"""The Triton merge of a stack of partials equals the eager one."""

import itertools

import pytest
import torch

from ringattn.kernels.partials import merge as eager

INF = float("inf")


@pytest.mark.parametrize(("parts", "dv", "log2"), list(itertools.product([1, 2, 5], [1, 40, 128], [False, True])))
def test_the_kernel_equals_the_eager_merge(parts: int, dv: int, log2: bool) -> None:
    from ringattn.kernels.partials import merge_triton

    generator = torch.Generator().manual_seed(parts)
    m = torch.randn(21, parts, generator=generator).T * 20  # strides that are not contiguous
    l = torch.rand(parts, 21, generator=generator) + 1  # noqa: E741
    o = torch.randn(parts, 21, 2, dv, generator=generator)[:, :, 1]
    for x, nothing in ((m, -INF), (l, 0.0), (o, 0.0)):
        x[:, 0], x[1:, 4] = nothing, nothing  # an empty row, and one that only the first part has seen
    for finish, out_dtype in [(False, None), (True, None), (True, torch.float16)]:
        want = eager.merge_stack(m, l, o, log2=log2, finish=finish, out_dtype=out_dtype)
        got = tuple(map(torch.empty_like, want))
        acc, top, total = (*got, None) if finish else (got[2], got[0], got[1])
        merge_triton.merge_into(m, l, o, top, total, acc, log2=log2, finish=finish)
        for x, y in zip(got, want, strict=True):
            eps = torch.finfo(x.dtype).eps
            torch.testing.assert_close(x, y, rtol=4 * eps, atol=4 * parts * eps)
