"""Merge of a stack of partials in a fixed order, in plain torch; `merge_triton` does it on GPUs.

With M = max_p m_p:  l = sum_p l_p e^(m_p - M),  o = sum_p o_p e^(m_p - M), summed in the order p = 0, 1, ..., so that the result
does not depend on the device's schedule. Empty partials (-inf, 0, anything) contribute nothing; a row whose partials are all
empty stays empty. `m` is in natural log units, or in log2 units as in kernels (e is then 2); lse is natural log either way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringattn.kernels.constants import LN2


def merge_stack(
    m: Tensor,
    l: Tensor,  # noqa: E741
    o: Tensor,
    *,
    log2: bool = False,
    finish: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """Merges P partials of the same rows.

    Args:
        m: `p r`, the maxima.
        l: `p r`, the sums.
        o: `p r dv`, the weighted values, not normalised; any strides with a contiguous last dim.
        log2: m is in log2 units instead of natural log.

    Returns:
        (m `r`, l `r`, o `r dv`), or with finish (o `r dv`, lse `r`), where an empty row has o = 0 and lse = -inf.
    """
    exp = torch.exp2 if log2 else torch.exp
    top = m.amax(0)
    shift = torch.where(top == float("-inf"), 0.0, top)
    total, acc = torch.zeros_like(l[0]), torch.zeros_like(o[0])
    for m_p, l_p, o_p in zip(m, l, o, strict=True):
        scale = exp(m_p - shift)
        total = total + l_p * scale
        acc = acc + torch.where((m_p == float("-inf")).unsqueeze(-1), 0.0, o_p * scale.unsqueeze(-1))
    if not finish:
        return top, total, acc
    divisor = torch.where(total == 0, 1.0, total)
    lse = top * (LN2 if log2 else 1.0) + torch.log(divisor)
    return (acc / divisor.unsqueeze(-1)).to(out_dtype or o.dtype), torch.where(total == 0, float("-inf"), lse)
