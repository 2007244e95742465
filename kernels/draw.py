"""A token for every row of logits: the largest, or one that is drawn. Plain torch; `draw_triton` has the same for GPUs.

Owns what a temperature, a top-p and a drawn number make of a row, and the choice between the two implementations. Refuses to know
whose logits they are, and where drawn numbers come from.

Shape legend: `b` rows, `vocab` logits of each.

Note [Weights]
    With m the largest logit of a row, the weight of a token with logit x is 2^((x - m) log2(e) / temperature) in fp32, as a
    multiple of 2^-40: an integer, rounded to nearest. Integers are added up without rounding, so sums of them do not depend on
    who adds what, and in which order: a row gives the same token whatever is computed beside it, and however it is cut. A token
    less than 2^-41 as likely as the likeliest has weight 0 and is never drawn; so has a logit of -inf.

Note [Nucleus]
    With W the sum of all weights, the tokens that may be drawn are those with x >= t, where t is the largest logit of the row such
    that their weights come to at least top_p W, and to at least 1: the likeliest is in, and so are tokens exactly as likely as
    the last one that is in. At top_p 1 it is all that have a weight.

Note [Drawing]
    With K the sum of the weights that are in, and the drawn number u in [0, 1), the token is the first one in the order of the
    vocabulary up to which those that are in come to more than floor(u K). K is at most vocab 2^40; u K is rounded to fp64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ringattn.kernels.runtime.optional_triton import import_optional

LOG2E = 1.0 / math.log(2.0)
ONE = 2.0**40
"""The weight of the likeliest token."""
SCALES = 2.0**-100, 2.0**100
"""What differences of logits are multiplied by at least and at most: 0 times infinity would be no number."""
MOST = 2**22
"""Logits of a row: their weights come to less than 2^63."""


def draw(logits: Tensor, how: Tensor | None, lse: Tensor | None = None) -> Tensor:
    """A token for every row; nothing is waited for.

    On a GPU with Triton it is one launch.

    Args:
        logits: `b vocab`, fp16, bf16 or fp32 (other dtypes are read as fp32).
        how: `b 3` fp64, contiguous, of each row temperature (0 takes the largest logit, the first of equals), top_p, and the
            drawn number u in [0, 1) (Note [Nucleus], Note [Drawing]); None takes the largest everywhere.
        lse: `b` fp32; written: ln sum e^x of each row, any number where the token is -1. None: nobody asks.

    Returns:
        `b` int64; -1 for a row whose largest logit is no finite number, or that holds a NaN.

    Raises:
        ValueError: Rows hold no logit, or more than MOST.

    Example:
        >>> logits = torch.tensor([[1.0, 3.0, 2.0]])
        >>> [int(draw(logits, torch.tensor([[1.0, 0.9, u]], dtype=torch.float64))) for u in (0.0, 0.73, 0.74)]
        [1, 1, 2]
    """
    if not 1 <= logits.shape[1] <= MOST:
        raise ValueError(f"vocab must be between 1 and {MOST}, got {logits.shape[1]}; give each row at least one logit")
    fast = import_optional("ringattn.kernels.draw_triton") if logits.is_cuda else None
    if fast is not None:
        return fast.draw(logits, how, lse)
    return draw_eager(logits, how, lse)


def draw_eager(logits: Tensor, how: Tensor | None, lse: Tensor | None = None) -> Tensor:
    """`draw` in plain torch."""
    x = logits.float()
    largest, tokens = x.max(-1, keepdim=True)
    finite = largest.isfinite()
    if lse is not None:
        lse.copy_(x.logsumexp(-1))
    if how is not None:
        temperature, top_p, number = how.unsqueeze(-1).unbind(1)
        drawn = temperature > 0
        x = torch.where(finite, x, 0.0)
        weights = weigh(x, torch.where(finite, largest, 0.0), torch.where(drawn, temperature, 1.0))
        values, names = x.sort(dim=-1, descending=True)
        sums = weights.gather(1, names).cumsum(-1)
        total = sums[:, -1:]
        need = (top_p * total.double()).ceil().long().clamp(min=1).minimum(total)
        threshold = values.gather(1, (sums < need).sum(-1, keepdim=True))
        sums = weights.masked_fill(x < threshold, 0).cumsum(-1)
        kept = sums[:, -1:]
        goal = (number * kept.double()).long().minimum(kept - 1)
        tokens = torch.where(drawn, (sums <= goal).sum(-1, keepdim=True), tokens)
    return torch.where(finite, tokens, -1).squeeze(1)


def weigh(x: Tensor, largest: Tensor, temperature: Tensor) -> Tensor:
    """The weights of tokens (Note [Weights]), int64.

    Args:
        x: `b vocab` fp32.
        largest: `b 1` fp32.
        temperature: `b 1` fp64.
    """
    scale = (LOG2E / temperature).float().clamp(*SCALES)
    # in fp32 the vector units of a CPU and its scalar ones differ, and where a token stands says which compute its weight
    likely = torch.exp2(((x - largest) * scale).double()).float()
    return (likely * ONE + 0.5).long()
