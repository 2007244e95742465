"""Sampling of tokens from logits, in plain torch: penalties, biases, masks, temperature, top-k, top-p, min-p, seeds, logprobs.

Legend: b rows, vocab.

Note [Reproducible draws]
    A row gives the same token whatever is computed beside it. With m the largest logit of a row, the weight of a token with
    logit x is 2^((x - m) log2(e) / temperature) as a multiple of 2^-40: an integer, whose sums do not depend on their order.

    top_k keeps the k largest logits. With W the sum of the weights that are left, top_p keeps x >= t, where t is the largest
    logit such that the weights from there on come to at least top_p W. min_p keeps weights of at least min_p times the largest
    one. The likeliest token is always kept, and so are tokens exactly as likely as the last one that top_k or top_p keeps.

    With K the sum of the weights that are kept, and a number u in [0, 1), the sampled token is the first one in the order of
    the vocabulary up to which the weights come to more than floor(u K); u K is rounded to fp64. The number is a hash of the
    request's seed and of how many tokens were drawn for it before.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from ringattn.kernels.constants import LOG2E
from ringattn.launch.serve.grammar import TokenGrammar

MIN_TEMPERATURE = 1e-6  # temperatures below it choose the same, and might be 0 in fp32
ONE = 2.0**40  # the weight of the likeliest token
MAX_SCALE = 2.0**100
"""Upper bound of the factor of logit differences, and inverse of the lower bound: 0 times infinity is NaN."""
MAX_LOGITS = 2**22  # logits of a row: their weights come to less than 2^63
IN_PROMPT = 2**30  # added to a token's count in the answer if the prompt contains it


class Logprob(msgspec.Struct, array_like=True, frozen=True):
    """Log probability of a token, and the likeliest tokens with theirs, likeliest first; natural log, at temperature 1."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class Sampling(msgspec.Struct, array_like=True, dict=True):
    """Sampling options of one answer, and its state: the numbers drawn and the tokens counted so far.

    logit_bias, then repetition_penalty, then frequency_penalty and presence_penalty change the logits, also at temperature 0;
    the mask of `grammar` follows.
    Temperature, top_k, top_p and min_p follow if a token is drawn; each sees the tokens that the one before it kept. This is the
    order of transformers, with vLLM's meaning and place of frequency_penalty and presence_penalty.
    """

    temperature: float = 1.0  # divisor of the logits; 0 takes the largest
    top_p: float = 1.0
    # seed of the draws; None for a random one. An integer becomes a string: msgpack has none beyond 64 bits.
    seed: int | str | None = None
    logprobs: int | None = None  # number of likeliest tokens to report beside the sampled one; None for no logprobs
    top_k: int = 0  # 0 for all tokens
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # tokens, each once, and what is added to their logits
    min_tokens: int = 0  # tokens of an answer among which none of `stops` is sampled
    stops: tuple[int, ...] = ()  # tokens that end an answer

    def __post_init__(self) -> None:
        if isinstance(self.seed, int):
            self.seed = hex(self.seed)
        self._hash = hashlib.blake2b((self.seed or secrets.token_hex()).encode(), digest_size=8)
        self._num_drawn = self._num_sampled = 0
        self.grammar: TokenGrammar | None = None  # of the answer; its mask is that of the next token
        # on the device, from the first token on
        self.counted: Tensor | None = None
        self._biases: tuple[Tensor, Tensor] | None = None

    @property
    def penalized(self) -> bool:
        """Whether tokens must be counted."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def biased(self) -> bool:
        """Whether something is added to logits: `logit_bias`, or minus infinity to `stops`."""
        return bool(self.logit_bias) or self._num_sampled < self.min_tokens

    @property
    def truncated(self) -> bool:
        """Whether tokens must be sorted."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)

    def draw(self) -> float:
        """Return the next number in [0, 1) (Note [Reproducible draws])."""
        numbered = self._hash.copy()
        numbered.update(self._num_drawn.to_bytes(8, "little"))
        self._num_drawn += 1
        return (int.from_bytes(numbered.digest(), "little") >> 11) * 2.0**-53

    def draw_settings(self) -> tuple[float, ...]:
        """Return the row of `draw`'s settings for the next token."""
        if self.temperature <= 0:
            return 0.0, 0.0, 1.0, 0.0, 0.0
        return max(self.temperature, MIN_TEMPERATURE), self.top_k, self.top_p, self.min_p, self.draw()

    def counts(self, prompt: Sequence[int], x: Tensor) -> Tensor:
        """Return the count of each token in the answer, and IN_PROMPT more if the prompt has it: `vocab` int32, where x is."""
        if self.counted is None:
            self.counted = torch.zeros(x.shape[1], dtype=torch.int32, device=x.device)
            known = [token for token in set(prompt) if token < x.shape[1]]
            self.counted.index_fill_(0, to_device(known, torch.int64, x.device), IN_PROMPT)
        return self.counted

    def biases(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens and what is added to their logits for the next token, on the device of x, `b vocab`."""
        if self._num_sampled == self.min_tokens:
            self._biases = None  # without `stops` from now on
        self._num_sampled += 1
        if self._biases is None:
            banned = self.stops if self._num_sampled <= self.min_tokens else ()
            pairs = *self.logit_bias, *((token, -math.inf) for token in banned)
            known = [(token, bias) for token, bias in pairs if token < x.shape[1]]
            tokens = to_device([token for token, _ in known], torch.int64, x.device)
            self._biases = tokens, to_device([bias for _, bias in known], torch.float32, x.device)
        return self._biases


@dataclass(frozen=True)
class SampledTokens:
    """Sampled tokens on the device, -1 where the largest logit is not finite, and what `score` returns for rows and for prompts."""

    tokens: Tensor
    logprobs: Tensor | None
    samplings: tuple[Sampling, ...]
    scores: tuple[Tensor, ...] = ()

    def on_host(self) -> SampledTokens:
        """Return a copy that the host can read once the current stream has come there."""
        logprobs = None if self.logprobs is None else _to_host(self.logprobs)
        return SampledTokens(_to_host(self.tokens), logprobs, self.samplings, tuple(map(_to_host, self.scores)))

    def read(self) -> list[tuple[int | None, Logprob | None]]:
        """Return the token of each row, None where there is none, and its logprob where that is wanted."""
        found: list[tuple[int | None, Logprob | None]] = []
        rows = iter([] if self.logprobs is None else self.logprobs.tolist())
        for token, sampling in zip(self.tokens.tolist(), self.samplings, strict=True):
            logprob = None if sampling.logprobs is None else _read_logprob(next(rows), sampling.logprobs)
            found.append((token, logprob) if token >= 0 else (None, None))
        return found

    def read_scores(self) -> list[tuple[Logprob, ...] | None]:
        """Return the logprobs of prompt tokens, by prompt; None where one is NaN."""
        found: list[tuple[Logprob, ...] | None] = []
        for scores in self.scores:
            read = tuple([_read_logprob(row, scores.shape[1] // 2) for row in scores.tolist()])
            found.append(None if any(math.isnan(token.logprob) for token in read) else read)
        return found


def sample_tokens(logits: Tensor, samplings: Sequence[Sampling], prompts: Sequence[Sequence[int]]) -> SampledTokens:
    """Sample a token for every row of logits, `b vocab`, without waiting for the device; call it once per token of an answer."""
    device = logits.device
    counted = [row for row, sampling in enumerate(samplings) if sampling.penalized]
    x = logits
    masked = [row for row, sampling in enumerate(samplings) if sampling.grammar is not None]
    if counted or masked or any(sampling.biased for sampling in samplings):
        x = logits.to(torch.float32, copy=True)
        _add_biases_(x, samplings)
    at = counts = None
    if counted:
        at = to_device(counted, torch.int64, device)
        counts = torch.stack([samplings[row].counts(prompts[row], x) for row in counted])
        options = [(one.repetition_penalty, one.frequency_penalty, one.presence_penalty) for one in samplings]
        x[at] = penalize(x[at], counts, to_device([options[row] for row in counted], torch.float32, device))
    if masked:
        masks = [one.grammar.mask for one in samplings if one.grammar is not None]
        mask_(x, to_device(masked, torch.int64, device), _upload(torch.stack(masks), device))
    settings = truncated = None
    if any(sampling.temperature > 0 for sampling in samplings):
        settings = to_device([sampling.draw_settings() for sampling in samplings], torch.float64, device)
        rows = [row for row, sampling in enumerate(samplings) if sampling.truncated]
        truncated = to_device(rows, torch.int64, device) if rows else None
    tokens = draw(x, settings, truncated)
    if at is not None and counts is not None:
        counts.scatter_add_(1, tokens[at].clamp(min=0)[:, None], torch.ones_like(counts[:, :1]))
        for row, one in zip(counted, counts, strict=True):
            samplings[row].counted = one
    wanting = [row for row, sampling in enumerate(samplings) if sampling.logprobs is not None]
    if not wanting:
        return SampledTokens(tokens, None, tuple(samplings))
    scored = tokens
    if len(wanting) < len(samplings):
        rows = to_device(wanting, torch.int64, device)
        logits, scored = logits[rows], tokens[rows]
    logprobs = score(logits, scored, max(samplings[row].logprobs or 0 for row in wanting))
    return SampledTokens(tokens, logprobs, tuple(samplings))


def draw(logits: Tensor, settings: Tensor | None = None, truncated: Tensor | None = None) -> Tensor:
    """Return a token for every row of logits, `b vocab`; -1 for a row whose largest logit is not finite.

    Args:
        logits: After penalties and biases.
        settings: `b 5` fp64, of each row temperature (0 takes the largest logit, the first of equals), top_k, top_p, min_p, and the
            number u (Note [Reproducible draws]); None takes the largest everywhere.
        truncated: Rows that have a top_k or a top_p, int64: the others are not sorted. None: no row has.

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
    # isfinite() takes four kernels
    finite = largest.abs() < math.inf
    if settings is not None:
        temperature, _, _, min_p, number = settings.unsqueeze(-1).unbind(1)
        drawn = temperature > 0
        x = torch.where(finite, logits, 0.0).float()
        weights = token_weights(x, torch.where(finite, largest, 0.0), torch.where(drawn, temperature, 1.0))
        if truncated is not None:
            rows, kept = x[truncated], weights[truncated]
            weights[truncated] = kept.masked_fill(rows < _threshold_logit(rows, kept, settings[truncated]), 0)
        weights.masked_fill_(weights < (min_p * ONE).ceil().long(), 0)
        sums = weights.cumsum(-1)
        total = sums[:, -1:]
        goal = (number * total.double()).long().minimum(total - 1)
        tokens = torch.where(drawn, (sums <= goal).sum(-1, keepdim=True), tokens)
    return torch.where(finite, tokens, -1).squeeze(1)


def token_weights(x: Tensor, largest: Tensor, temperature: Tensor) -> Tensor:
    """Return the weights of tokens (Note [Reproducible draws]), int64; x `b vocab` fp32, largest `b 1`, temperature `b 1` fp64."""
    scale = (LOG2E / temperature).float().clamp(1 / MAX_SCALE, MAX_SCALE)
    # the fp32 exponentials of a CPU's vector and scalar units differ, and a token's place in the row decides which computes it
    likely = torch.exp2(((x - largest) * scale).double()).float()
    return (likely * ONE + 0.5).long()


def _threshold_logit(x: Tensor, weights: Tensor, settings: Tensor) -> Tensor:
    """Return the smallest logit that top_k and top_p keep, `b 1`."""
    _, top_k, top_p, _, _ = settings.unsqueeze(-1).unbind(1)
    values, names = x.sort(dim=-1, descending=True)
    k = torch.where(top_k > 0, top_k, x.shape[1]).clamp(max=x.shape[1]).long()
    sums = weights.gather(1, names).masked_fill(values < values.gather(1, k - 1), 0).cumsum(-1)
    total = sums[:, -1:]
    need = (top_p * total.double()).ceil().long().clamp(min=1).minimum(total)
    return values.gather(1, (sums < need).sum(-1, keepdim=True))


def penalize(x: Tensor, counts: Tensor, options: Tensor) -> Tensor:
    """Return logits, `b vocab` fp32, after repetition, frequency and presence penalty, `b 3`; counts as of `Sampling.counts`."""
    repetition, frequency, presence = options.unsqueeze(-1).unbind(1)
    x = torch.where(counts > 0, torch.where(x > 0, x / repetition, x * repetition), x)
    times = counts % IN_PROMPT
    return x - frequency * times - presence * (times > 0)


def mask_(x: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Set the logits of tokens without a bit to minus infinity, in rows of x, `b vocab`.

    Args:
        x: Logits.
        rows: Rows that have a mask, `r` int64.
        masks: Their bits, `r ceil(vocab / 8)` uint8, the first token in the lowest bit.
    """
    bits = masks[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=x.device) & 1
    x[rows] = x[rows].masked_fill(bits.flatten(1)[:, : x.shape[1]] == 0, -math.inf)


def score(logits: Tensor, tokens: Tensor, most: int) -> Tensor:
    """Return of each row the logprob of its token, those of the `most` likeliest, and these tokens: `b (1 + 2 most)` fp64."""
    x = logits.float()
    own = x.gather(1, tokens.clamp(min=0)[:, None])
    values, names = x.topk(min(most, x.shape[1]))
    found = torch.cat([own, values], dim=1) - x.logsumexp(-1, keepdim=True)
    return torch.cat([found.double(), names.double()], dim=1)


def _read_logprob(row: Sequence[float], most: int) -> Logprob:
    own, *top = row
    found, names = top[: len(top) // 2], top[len(top) // 2 :]
    return Logprob(own, tuple(zip(map(int, names), found, strict=True))[:most])


def _add_biases_(x: Tensor, samplings: Sequence[Sampling]) -> None:
    found = []
    for row, sampling in enumerate(samplings):
        if sampling.biased:
            tokens, biases = sampling.biases(x)
            found.append((tokens + row * x.shape[1], biases))
    if found:
        slots, biases = map(torch.cat, zip(*found, strict=True))
        x.view(-1).index_add_(0, slots, biases)


def to_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers on a device, in stream order."""
    return _upload(torch.tensor(values, dtype=dtype), device)


def _upload(x: Tensor, device: torch.device) -> Tensor:
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


def _to_host(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda).copy_(x, non_blocking=True)
