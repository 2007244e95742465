"""Sampling of tokens from logits, in plain torch.

Applies penalties, biases, temperature, top-k, top-p, min-p, seeds and logprobs. Legend: b rows,
vocab.

Note [Order of options]
    logit_bias, then repetition_penalty, then frequency_penalty and presence_penalty change the logits, also where the largest is
    taken. Temperature, top_k, top_p and min_p follow where a token is drawn; each sees what the one before it left. This is the
    order of transformers, which has no frequency_penalty and presence_penalty; these have vLLM's meaning and place. Logprobs are
    those of the model: of the logits before all options.

Note [Weights]
    With m the largest logit of a row, the weight of a token with logit x is 2^((x - m) log2(e) / temperature), as a multiple of
    2^-40: an integer, rounded to nearest. Integers are added up without rounding, so sums do not depend on the order of adding: a
    row gives the same token whatever is computed beside it. A token less than 2^-41 as likely as the likeliest has weight 0 and is
    never drawn; so has a logit of -inf.

Note [Truncation]
    top_k keeps the k largest logits. With W the sum of the weights that are left, top_p keeps x >= t, where t is the largest logit
    such that the weights from there on come to at least top_p W. min_p keeps weights of at least min_p times the largest one. The
    likeliest token is always in, and so are tokens exactly as likely as the last one that top_k or top_p keeps.

Note [Draws]
    With K the sum of the weights that are in, and a number u in [0, 1), the token is the first one in the order of the vocabulary
    up to which the weights come to more than floor(u K); u K is rounded to fp64. The number is a hash of the request's seed and of
    how many tokens were drawn for it before. So what a seed gives depends on the request alone, not on those computed beside it.

Note [Asynchronous sampling]
    The next step may be computed from tokens that only the device knows. So what is chosen is enqueued behind the logits, on the
    way there and back through pinned memory, and read later. Tokens of an answer are counted for penalties on the device, too.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgspec
import torch
from torch import Tensor

from ringattn.launch.serve.messages import Logprob, SamplingOptions

MIN_TEMPERATURE = 1e-6
"""Temperatures below it choose the same, and might be 0 in fp32."""

ONE = 2.0**40
"""The weight of the likeliest token."""

LOG2E = 1.0 / math.log(2.0)

MAX_SCALE = 2.0**100
"""Upper bound of the factor of logit differences, and inverse of the lower bound: 0 times infinity is NaN."""

MAX_LOGITS = 2**22
"""Logits of a row: their weights come to less than 2^63."""

IN_PROMPT = 2**30
"""Added to a token's count in the answer where the prompt has it, too."""


@dataclass
class Sampling:
    """Sampling options and state of one request (Note [Order of options]). It serves one answer.

    Attributes:
        temperature: Logits are divided by it; 0 takes the largest.
        top_p: Only the likeliest tokens that together have this probability.
        seed: Of the request's draws; None for a random one.
        logprobs: How many of the likeliest tokens to name beside the chosen one; None for no logprobs.
        top_k: Only so many of the likeliest tokens; 0 for all.
        min_p: Only tokens that have at least this share of the likeliest token's probability.
        repetition_penalty: Positive logits of tokens in the prompt or the answer are divided by it, others multiplied.
        presence_penalty: Subtracted from logits of tokens that the answer has.
        frequency_penalty: Subtracted from logits as often as the answer has the token.
        logit_bias: Tokens, each once, and what is added to their logits.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        seed = secrets.token_hex() if self.seed is None else hex(self.seed)
        self._hash = hashlib.blake2b(seed.encode(), digest_size=8)
        self._drawn = 0
        # on the device, from the first token on
        self._counts: Tensor | None = None
        self._biases: tuple[Tensor, Tensor] | None = None

    @property
    def penalized(self) -> bool:
        """Whether tokens must be counted."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def cuts(self) -> bool:
        """Whether tokens must be sorted."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)

    def draw(self) -> float:
        """The next number in [0, 1) (Note [Draws])."""
        numbered = self._hash.copy()
        numbered.update(self._drawn.to_bytes(8, "little"))
        self._drawn += 1
        return (int.from_bytes(numbered.digest(), "little") >> 11) * 2.0**-53

    def counts(self, prompt: Sequence[int], x: Tensor) -> Tensor:
        """Return the count of each token in the answer, and IN_PROMPT more where the prompt has it: `vocab` int32.

        Args:
            prompt: Its tokens.
            x: `b vocab`: on the same device.
        """
        if self._counts is None:
            self._counts = torch.zeros(x.shape[1], dtype=torch.int32, device=x.device)
            known = [token for token in set(prompt) if token < x.shape[1]]
            self._counts.index_fill_(0, to_device(known, torch.int64, x.device), IN_PROMPT)
        return self._counts

    def count(self, counts: Tensor) -> None:
        """Takes the counts with one more token."""
        self._counts = counts

    def biases(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of `logit_bias` and what is added to their logits, on the device of x, `b vocab`."""
        if self._biases is None:
            known = [(token, bias) for token, bias in self.logit_bias if token < x.shape[1]]
            tokens = to_device([token for token, _ in known], torch.int64, x.device)
            self._biases = tokens, to_device([bias for _, bias in known], torch.float32, x.device)
        return self._biases

    def options(self) -> SamplingOptions:
        """The options as they are sent."""
        options: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        options["seed"] = None if self.seed is None else hex(self.seed)
        return SamplingOptions(**options)

    @classmethod
    def of(cls, options: SamplingOptions) -> Sampling:
        """The sampling of options that were sent, before it has drawn anything."""
        known: dict[str, Any] = msgspec.structs.asdict(options)
        known["seed"] = None if options.seed is None else int(options.seed, 16)
        return cls(**known)


@dataclass(frozen=True)
class SampledTokens:
    """Sampled tokens, enqueued on the device; nothing was waited for.

    Attributes:
        tokens: `b` int64; -1 where the largest logit is no finite number.
        said: Logprobs of the rows that want any, as `score` gives them; None when no row does.
        how: For each row.
        scores: Logprobs of tokens of prompts, as `score` gives them, one tensor per prompt.
    """

    tokens: Tensor
    said: Tensor | None
    how: tuple[Sampling, ...]
    scores: tuple[Tensor, ...] = ()

    def on_host(self) -> SampledTokens:
        """The same where the host can read it, once the current stream has come there."""
        said = None if self.said is None else _to_host(self.said)
        return SampledTokens(_to_host(self.tokens), said, self.how, tuple(map(_to_host, self.scores)))

    def read(self) -> list[tuple[int | None, Logprob | None]]:
        """For each row the token, None where there is none, and its logprob where that is wanted."""
        found: list[tuple[int | None, Logprob | None]] = []
        said = iter([] if self.said is None else self.said.tolist())
        for token, one in zip(self.tokens.tolist(), self.how, strict=True):
            logprob = None if one.logprobs is None else _read_logprob(next(said), one.logprobs)
            found.append((token, logprob) if token >= 0 else (None, None))
        return found

    def read_scores(self) -> list[tuple[Logprob, ...] | None]:
        """The logprobs of tokens of prompts, by prompt; None where one is no number."""
        found: list[tuple[Logprob, ...] | None] = []
        for one in self.scores:
            told = tuple([_read_logprob(row, one.shape[1] // 2) for row in one.tolist()])
            found.append(None if any(math.isnan(token.logprob) for token in told) else told)
        return found


def sample_tokens(logits: Tensor, how: Sequence[Sampling], prompts: Sequence[Sequence[int]]) -> SampledTokens:
    """Sample a token for every row, without waiting for the device.

    Args:
        logits: `b vocab`.
        how: For each row; called once for each token of an answer, in order.
        prompts: For each row the tokens before the answer.
    """
    device = logits.device
    counted = [row for row, one in enumerate(how) if one.penalized]
    x = logits
    if counted or any(one.logit_bias for one in how):
        x = logits.to(torch.float32, copy=True)
        _add_biases_(x, how)
    at = counts = None
    if counted:
        at = to_device(counted, torch.int64, device)
        counts = torch.stack([how[row].counts(prompts[row], x) for row in counted])
        options = [
            (how[row].repetition_penalty, how[row].frequency_penalty, how[row].presence_penalty) for row in counted
        ]
        x[at] = penalize(x[at], counts, to_device(options, torch.float32, device))
    settings = cut = None
    if any(one.temperature > 0 for one in how):
        settings = to_device([_draw_settings(one) for one in how], torch.float64, device)
        sorted_out = [row for row, one in enumerate(how) if one.cuts]
        cut = to_device(sorted_out, torch.int64, device) if sorted_out else None
    tokens = draw(x, settings, cut)
    if at is not None and counts is not None:
        counts.scatter_add_(1, tokens[at].clamp(min=0)[:, None], torch.ones_like(counts[:, :1]))
        for row, one in zip(counted, counts, strict=True):
            how[row].count(one)
    wanting = [row for row, one in enumerate(how) if one.logprobs is not None]
    if not wanting:
        return SampledTokens(tokens, None, tuple(how))
    asked = tokens
    if len(wanting) < len(how):
        rows = to_device(wanting, torch.int64, device)
        logits, asked = logits[rows], tokens[rows]
    return SampledTokens(tokens, score(logits, asked, max(how[row].logprobs or 0 for row in wanting)), tuple(how))


def draw(logits: Tensor, settings: Tensor | None = None, cut: Tensor | None = None) -> Tensor:
    """A token for every row; nothing is waited for.

    Args:
        logits: `b vocab`, after penalties and biases.
        settings: `b 5` fp64, of each row temperature (0 takes the largest logit, the first of equals), top_k, top_p, min_p, and the
            number u in [0, 1) (Note [Draws]); None takes the largest everywhere.
        cut: Rows that have a top_k or a top_p, int64: the others are not sorted. None: no row has.

    Returns:
        `b` int64; -1 for a row whose largest logit is no finite number, or that holds a NaN.

    Raises:
        ValueError: Rows hold no logit, or more than MAX_LOGITS.

    Example:
        >>> logits = torch.tensor([[1.0, 3.0, 2.0]])
        >>> settings = [torch.tensor([[1.0, 0, 0.9, 0.0, u]], dtype=torch.float64) for u in (0.0, 0.73, 0.74)]
        >>> [int(draw(logits, one, torch.tensor([0]))) for one in settings]
        [1, 1, 2]
    """
    if not 1 <= logits.shape[1] <= MAX_LOGITS:
        raise ValueError(
            f"vocab must be between 1 and {MAX_LOGITS}, got {logits.shape[1]}; give each row at least one logit"
        )
    largest, tokens = logits.max(-1, keepdim=True)
    finite = largest.isfinite()
    if settings is not None:
        temperature, _, _, min_p, number = settings.unsqueeze(-1).unbind(1)
        drawn = temperature > 0
        x = torch.where(finite, logits, 0.0).float()
        weights = token_weights(x, torch.where(finite, largest, 0.0), torch.where(drawn, temperature, 1.0))
        if cut is not None:
            weights[cut] = weights[cut].masked_fill(x[cut] < _threshold_logit(x[cut], weights[cut], settings[cut]), 0)
        weights.masked_fill_(weights < (min_p * ONE).ceil().long(), 0)
        sums = weights.cumsum(-1)
        num_kept_prefixes = sums[:, -1:]
        goal = (number * num_kept_prefixes.double()).long().minimum(num_kept_prefixes - 1)
        tokens = torch.where(drawn, (sums <= goal).sum(-1, keepdim=True), tokens)
    return torch.where(finite, tokens, -1).squeeze(1)


def token_weights(x: Tensor, largest: Tensor, temperature: Tensor) -> Tensor:
    """The weights of tokens (Note [Weights]), int64.

    Args:
        x: `b vocab` fp32.
        largest: `b 1`.
        temperature: `b 1` fp64.
    """
    scale = (LOG2E / temperature).float().clamp(1 / MAX_SCALE, MAX_SCALE)
    # in fp32 the vector units of a CPU and its scalar ones differ, and where a token stands says which compute its weight
    likely = torch.exp2(((x - largest) * scale).double()).float()
    return (likely * ONE + 0.5).long()


def _threshold_logit(x: Tensor, weights: Tensor, settings: Tensor) -> Tensor:
    """The smallest logit that top_k and top_p keep, `b 1` (Note [Truncation])."""
    _, top_k, top_p, _, _ = settings.unsqueeze(-1).unbind(1)
    values, names = x.sort(dim=-1, descending=True)
    k = torch.where(top_k > 0, top_k, x.shape[1]).clamp(max=x.shape[1]).long()
    sums = weights.gather(1, names).masked_fill(values < values.gather(1, k - 1), 0).cumsum(-1)
    total = sums[:, -1:]
    need = (top_p * total.double()).ceil().long().clamp(min=1).minimum(total)
    return values.gather(1, (sums < need).sum(-1, keepdim=True))


def penalize(x: Tensor, counts: Tensor, options: Tensor) -> Tensor:
    """Logits after penalties (Note [Order of options]).

    Args:
        x: `b vocab` fp32.
        counts: `b vocab` int32: how often the answer has a token, and IN_PROMPT more where the prompt has it.
        options: `b 3` fp32, of each row repetition, frequency and presence penalty.
    """
    repetition, frequency, presence = options.unsqueeze(-1).unbind(1)
    x = torch.where(counts > 0, torch.where(x > 0, x / repetition, x * repetition), x)
    times = counts % IN_PROMPT
    return x - frequency * times - presence * (times > 0)


def score(logits: Tensor, tokens: Tensor, most: int) -> Tensor:
    """Logprobs of tokens, and of the likeliest ones beside them.

    Args:
        logits: `b vocab`.
        tokens: `b` int64; below 0 for none.
        most: How many of the likeliest.

    Returns:
        Of each row the token's logprob, those of the likeliest, and these tokens: `b (1 + 2 most)` fp64.
    """
    x = logits.float()
    own = x.gather(1, tokens.clamp(min=0)[:, None])
    values, names = x.topk(min(most, x.shape[1]))
    found = torch.cat([own, values], dim=1) - x.logsumexp(-1, keepdim=True)
    return torch.cat([found.double(), names.double()], dim=1)


def _read_logprob(row: Sequence[float], most: int) -> Logprob:
    """A row of `score`."""
    own, *top = row
    found, names = top[: len(top) // 2], top[len(top) // 2 :]
    return Logprob(own, tuple(zip(map(int, names), found, strict=True))[:most])


def _draw_settings(one: Sampling) -> tuple[float, ...]:
    """Return the row of `draw`'s settings for the next token; draws a number if the request has a temperature."""
    if one.temperature <= 0:
        return 0.0, 0.0, 1.0, 0.0, 0.0
    return max(one.temperature, MIN_TEMPERATURE), one.top_k, one.top_p, one.min_p, one.draw()


def _add_biases_(x: Tensor, how: Sequence[Sampling]) -> None:
    """Add the biases of requests to logits, in place."""
    found = []
    for row, one in enumerate(how):
        if one.logit_bias:
            tokens, biases = one.biases(x)
            found.append((tokens + row * x.shape[1], biases))
    if found:
        slots, biases = map(torch.cat, zip(*found, strict=True))
        x.view(-1).index_add_(0, slots, biases)


def to_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on a device, in stream order."""
    found = torch.tensor(values, dtype=dtype)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found


def _to_host(x: Tensor) -> Tensor:
    """A copy that the host can read once the current stream has come there."""
    return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda).copy_(x, non_blocking=True)
