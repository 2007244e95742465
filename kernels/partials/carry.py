"""Merge of a normalised partial (o, lse) into the carry (m, l, acc) of its rows, in plain torch; `carry_triton` does it on GPUs.

An operator that normalises gives o and lse of some keys, which are the partial (lse, 1, o). With M = max(m, lse):

    l = l 2^(m - M) + 2^(lse - M)        acc = acc 2^(m - M) + o 2^(lse - M)        m = M

where m and lse are in log2 units, as in kernels. An empty carry (-inf, 0, anything) contributes nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ringattn.kernels.interface import SoftmaxState
from ringattn.kernels.runtime.optional_triton import import_optional

LOG2E = math.log2(math.e)


def start(carry: SoftmaxState, sinks: Tensor | None) -> None:
    """Write the carry that nothing was merged into: empty, or the sinks `h` in natural log units."""
    carry.acc.zero_()
    if sinks is None:
        carry.m.fill_(-math.inf)
        carry.l.zero_()
    else:
        carry.m.copy_((sinks.to(carry.m.dtype) * LOG2E)[:, None])
        torch.gt(carry.m, -math.inf, out=carry.l)


def add_partial(carry: SoftmaxState | None, o: Tensor, lse: Tensor, out: SoftmaxState | tuple[Tensor, Tensor]) -> None:
    """Merge a partial into a carry.

    Args:
        carry: m and l `b h s`, acc `b s h dv`; None: empty.
        o: `b s h dv`, normalised, any floating dtype.
        lse: `b h s`, natural log, the dtype of m.
        out: Where the merged carry goes, which may be `carry`; or o and lse, where the finished rows go.
    """
    if carry is None and isinstance(out, tuple):
        out[0].copy_(o)
        out[1].copy_(lse)
        return
    fast = (
        import_optional("ringattn.kernels.partials.carry_triton") if o.is_cuda and lse.dtype == torch.float32 else None
    )
    if fast is not None:
        fast.add_partial(carry, o, lse, out)
        return
    m = lse * LOG2E
    l, acc = torch.gt(m, -math.inf).to(m.dtype), o.to(m.dtype)  # noqa: E741
    if carry is not None:
        top = torch.maximum(carry.m, m)
        shift = top.masked_fill(top == -math.inf, 0.0)
        kept, added = torch.exp2(carry.m - shift), torch.exp2(m - shift)
        l = carry.l * kept + added  # noqa: E741
        acc = carry.acc * _per_row(kept) + acc * _per_row(added)
        m = top
    merged = SoftmaxState(m, l, acc)
    if isinstance(out, tuple):
        finish(merged, *out)
    else:
        for target, x in zip((out.m, out.l, out.acc), (m, l, acc), strict=True):
            target.copy_(x)


def finish(carry: SoftmaxState, o: Tensor, lse: Tensor) -> None:
    """Normalise a carry into o `b s h dv` and lse `b h s`; a row that has seen nothing is 0 and -inf."""
    m = carry.m.masked_fill(carry.m == -math.inf, 0.0)
    lse.copy_(m / LOG2E + carry.l.log())
    o.copy_(carry.acc / _per_row(carry.l.masked_fill(carry.l == 0, 1.0)))


def _per_row(x: Tensor) -> Tensor:
    """`b h s` -> `b s h 1`."""
    return x.transpose(1, 2)[..., None]
