"""How a token is chosen from logits.

Owns temperature, top-p, seeds and logprobs. Refuses to know whose logits they are. Legend: b rows, vocab.

Note [Draws]
    A request draws one number per token from a generator of its own, and the token is where that number falls among the
    probabilities, largest first. So what a seed gives depends on the request alone, not on those computed beside it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

COLDEST = 1e-6
"""Temperatures below it choose the same, and might be 0 in fp32."""


@dataclass
class Sampling:
    """How the tokens of one request are chosen.

    Attributes:
        temperature: Logits are divided by it; 0 takes the largest.
        top_p: Only the likeliest tokens that together have this probability.
        seed: Of the request's draws; None for one that nobody knows.
        logprobs: How many of the likeliest tokens to name beside the chosen one; None for no logprobs.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    draws: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.draws = random.Random(self.seed)


@dataclass(frozen=True)
class Logprob:
    """What a model thought of a chosen token.

    Attributes:
        logprob: Natural log of the token's probability at temperature 1.
        top: The likeliest tokens and theirs, likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


def sample(logits: Tensor, how: Sequence[Sampling]) -> list[tuple[int | None, Logprob | None]]:
    """Chooses a token for every row.

    Args:
        logits: `b vocab`.
        how: For each row.

    Returns:
        For each row the token, None where the largest logit is no finite number, and its logprob where that is wanted.
    """
    logits = logits.float()
    largest, chosen = logits.max(-1)
    drawn = [row for row, one in enumerate(how) if one.temperature > 0]
    if drawn:
        at = torch.tensor(drawn, device=logits.device)
        chosen[at] = _draw(logits[at], [how[row] for row in drawn])
    # one transfer for all rows
    tokens = torch.where(largest.isfinite(), chosen, -1).tolist()
    found: list[tuple[int | None, Logprob | None]] = []
    for row, (token, one) in enumerate(zip(tokens, how, strict=True)):
        said = None
        if one.logprobs is not None and token >= 0:
            logprobs = logits[row].log_softmax(-1)
            values, names = logprobs.topk(min(one.logprobs, logprobs.numel()))
            said = Logprob(float(logprobs[token]), tuple(zip(names.tolist(), values.tolist(), strict=True)))
        found.append((token if token >= 0 else None, said))
    return found


def _draw(logits: Tensor, how: Sequence[Sampling]) -> Tensor:
    """One token per row (Note [Draws]): `b` int64."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits.device).unsqueeze(1)

    # the largest first: no temperature, however low, overflows
    scaled = (logits - logits.amax(-1, keepdim=True)) / column([max(one.temperature, COLDEST) for one in how])
    probabilities, names = scaled.softmax(-1).sort(stable=True, dim=-1, descending=True)
    sums = probabilities.cumsum(-1)
    # a token is in while those before it have less than top_p, so the first always is
    kept = probabilities.masked_fill(sums - probabilities >= column([one.top_p for one in how]), 0.0)
    sums = kept.cumsum(-1)
    goal = column([one.draws.random() for one in how]) * sums[:, -1:]
    place = (sums <= goal).sum(-1, keepdim=True)
    # rounding may carry the goal past the last token that is in
    place = torch.minimum(place, (kept > 0).sum(-1, keepdim=True) - 1).clamp(min=0)
    return names.gather(1, place).squeeze(1)
