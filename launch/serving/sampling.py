"""How a token is chosen from logits.

Owns temperature, top-p, seeds and logprobs. Refuses to know whose logits they are. Legend: b rows, vocab.

Note [Draws]
    A request draws one number per token from a generator of its own, and the token is where that number falls among the
    probabilities, largest first. So what a seed gives depends on the request alone, not on those computed beside it.

Note [Nothing is waited for]
    The next step may be computed from tokens that only the device knows. So what is chosen is enqueued behind the logits, on the
    way there and back through pinned memory, and read later.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True)
class Chosen:
    """Tokens that are being chosen: all of it is enqueued, and nothing was waited for.

    Attributes:
        tokens: `b` int64; -1 where the largest logit is no finite number.
        said: Logprobs of the rows that want any: of each the chosen token's, then those of the likeliest tokens, then these
            tokens, as float64 `rows (1 + 2 most)`; None when no row does.
        how: For each row.
    """

    tokens: Tensor
    said: Tensor | None
    how: tuple[Sampling, ...]

    def on_host(self) -> Chosen:
        """The same where the host can read it, once the current stream has come there."""
        return Chosen(_to_host(self.tokens), None if self.said is None else _to_host(self.said), self.how)

    def read(self) -> list[tuple[int | None, Logprob | None]]:
        """For each row the token, None where there is none, and its logprob where that is wanted."""
        found: list[tuple[int | None, Logprob | None]] = []
        said = iter([] if self.said is None else self.said.tolist())
        for token, one in zip(self.tokens.tolist(), self.how, strict=True):
            logprob = None
            if one.logprobs is not None:
                own, *top = next(said)
                most = len(top) // 2
                names = map(int, top[most:])
                logprob = Logprob(own, tuple(zip(names, top[:most], strict=True))[: one.logprobs])
            found.append((token, logprob) if token >= 0 else (None, None))
        return found


def choose(logits: Tensor, how: Sequence[Sampling]) -> Chosen:
    """Chooses a token for every row, without waiting for the device.

    Args:
        logits: `b vocab`.
        how: For each row.
    """
    logits = logits.float()
    largest, tokens = logits.max(-1)
    drawn = [row for row, one in enumerate(how) if one.temperature > 0]
    if drawn:
        at = to_device(drawn, torch.int64, logits.device)
        tokens[at] = _draw(logits[at], [how[row] for row in drawn])
    tokens = torch.where(largest.isfinite(), tokens, -1)
    wanting = [row for row, one in enumerate(how) if one.logprobs is not None]
    said = None
    if wanting:
        at = to_device(wanting, torch.int64, logits.device)
        most = max(how[row].logprobs or 0 for row in wanting)
        logprobs = logits[at].log_softmax(-1)
        own = logprobs.gather(1, tokens[at].clamp(min=0)[:, None])
        values, names = logprobs.topk(min(most, logprobs.shape[1]))
        said = torch.cat([own.double(), values.double(), names.double()], dim=1)
    return Chosen(tokens, said, tuple(how))


def _draw(logits: Tensor, how: Sequence[Sampling]) -> Tensor:
    """One token per row (Note [Draws]): `b` int64."""
    numbers = [(max(one.temperature, COLDEST), one.top_p, one.draws.random()) for one in how]
    temperature, top_p, drawn = to_device(numbers, torch.float32, logits.device).unsqueeze(-1).unbind(1)
    # the largest first: no temperature, however low, overflows
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature
    probabilities, names = scaled.softmax(-1).sort(stable=True, dim=-1, descending=True)
    sums = probabilities.cumsum(-1)
    # a token is in while those before it have less than top_p, so the first always is
    kept = probabilities.masked_fill(sums - probabilities >= top_p, 0.0)
    sums = kept.cumsum(-1)
    place = (sums <= drawn * sums[:, -1:]).sum(-1, keepdim=True)
    # rounding may carry the goal past the last token that is in
    place = torch.minimum(place, (kept > 0).sum(-1, keepdim=True) - 1).clamp(min=0)
    return names.gather(1, place).squeeze(1)


def to_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on a device, in stream order."""
    found = torch.tensor(values, dtype=dtype)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found


def _to_host(x: Tensor) -> Tensor:
    """A copy that the host can read once the current stream has come there."""
    return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda).copy_(x, non_blocking=True)
