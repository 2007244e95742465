"""How a token is chosen from logits.

Owns temperature, top-p, seeds and logprobs. Refuses to know whose logits they are. Legend: b rows, vocab.

Note [Draws]
    A request draws one number per token from a generator of its own, and the token is where that number falls among the
    probabilities of the tokens that are in, in the order of the vocabulary. Probabilities are integers there (Note [Weights] of
    `kernels.draw`), whose sums no order of adding changes. So what a seed gives depends on the request alone, not on those
    computed beside it.

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

from ringattn.kernels.draw import draw
from ringattn.launch.serving.messages import Logprob

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
        # of an integer, Python's generator takes the absolute value
        self.draws = random.Random(hex(self.seed) if self.seed is not None and self.seed < 0 else self.seed)


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
    settings = None
    if any(one.temperature > 0 for one in how):
        settings = to_device([_settings(one) for one in how], torch.float64, logits.device)
    wanting = [row for row, one in enumerate(how) if one.logprobs is not None]
    if not wanting:
        return Chosen(draw(logits, settings), None, tuple(how))
    lse = torch.empty(len(how), dtype=torch.float32, device=logits.device)
    tokens = draw(logits, settings, lse)
    asked = tokens
    if len(wanting) < len(how):
        at = to_device(wanting, torch.int64, logits.device)
        logits, lse, asked = logits[at], lse[at], tokens[at]
    most = max(how[row].logprobs or 0 for row in wanting)
    own = logits.gather(1, asked.clamp(min=0)[:, None])
    values, names = logits.topk(min(most, logits.shape[1]))
    said = torch.cat([(torch.cat([own, values], dim=1).float() - lse[:, None]).double(), names.double()], dim=1)
    return Chosen(tokens, said, tuple(how))


def _settings(one: Sampling) -> tuple[float, float, float]:
    """What `draw` is to know of the next token of a request, which draws for it if it has a temperature."""
    if one.temperature <= 0:
        return 0.0, 1.0, 0.0
    return max(one.temperature, COLDEST), one.top_p, one.draws.random()


def to_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on a device, in stream order."""
    found = torch.tensor(values, dtype=dtype)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found


def _to_host(x: Tensor) -> Tensor:
    """A copy that the host can read once the current stream has come there."""
    return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda).copy_(x, non_blocking=True)
