"""Sampling of tokens from logits, against probabilities in fp64 and against transformers' processors of logits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringattn.launch.serve import sampling
from ringattn.launch.serve.sampling import MIN_TEMPERATURE, Sampling, sample_tokens

INF = float("inf")
LAST = 1 - 2.0**-53
"""The largest number below 1."""
EPS = 2e-6
"""Error of probabilities in fp32 at a boundary."""


Rows = Sequence[tuple[float, float, float]]
"""(temperature, top_p, number) of rows."""


def draw(x: Tensor, rows: Rows | None) -> Tensor:
    """The tokens of rows, each of which is sorted."""
    if rows is None:
        return sampling.draw(x)
    settings = [(temperature, 0, top_p, 0, number) for temperature, top_p, number in rows]
    return sampling.draw(x, torch.tensor(settings, dtype=torch.float64), torch.arange(len(rows)))


def how(*rows: tuple[float, float, float]) -> Rows:
    return rows


def draw_logits(seed: int, b: int, vocab: int, scale: float, *, ties: bool = False, masked: float = 0.0) -> Tensor:
    """Logits `b vocab`, fp32; with ties of few different values; some -inf, but not all of a row."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(b, vocab, generator=generator) * scale
    if ties:
        x = (x * 2).round() / 2
    hidden = torch.rand(b, vocab, generator=generator) < masked
    hidden[torch.arange(b), torch.randint(vocab, (b,), generator=generator)] = False
    return x.masked_fill(hidden, -INF)


def sorted_out(x: Tensor, temperature: float, top_p: float) -> list[tuple[int, float]]:
    """Kept tokens, in the order of the vocabulary, and the sum of probabilities up to each."""
    p = ((x.double() - x.double().max()) / temperature).exp()
    p /= p.sum()
    total, least = 0.0, INF
    for i in sorted(range(len(p)), key=lambda i: -float(x[i])):
        if total >= top_p and float(x[i]) < least:
            break
        total, least = total + float(p[i]), float(x[i])
    inside = [i for i in range(len(p)) if float(x[i]) >= least]
    sums, far = [], 0.0
    for i in inside:
        far += float(p[i]) / total
        sums.append((i, far))
    return sums


def wanted(x: Tensor, temperature: float, top_p: float, number: float) -> set[int]:
    """The tokens that a number falls on; several where it, or top_p, is next to a boundary."""
    found = set()
    for p in {max(0.0, top_p - EPS), top_p, top_p + EPS}:
        before = 0.0
        for token, far in sorted_out(x, temperature, p):
            if far > before and before <= number + EPS and far > number - EPS:
                found.add(token)
            before = far
    return found


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.integers(1, 80),
    scale=st.sampled_from([0.0, 0.1, 1.0, 5.0]),
    ties=st.booleans(),
    masked=st.sampled_from([0.0, 0.5]),
    temperature=st.sampled_from([MIN_TEMPERATURE, 0.1, 0.7, 1.0, 2.0, 100.0]),
    top_p=st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1e-30, 0.5, 0.9, 1.0])),
    number=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, LAST])),
)
def test_tokens_are_those_of_probabilities_sorted_in_fp64(
    seed, vocab, scale, ties, masked, temperature, top_p, number
) -> None:
    x = draw_logits(seed, 1, vocab, scale, ties=ties, masked=masked)
    assert int(draw(x, how((temperature, top_p, number)))) in wanted(x[0], temperature, top_p, number)


def test_most_numbers_leave_no_choice() -> None:
    """The tolerance of the test above near boundaries is seldom used."""
    x = draw_logits(0, 1, 60, 2.0)[0]
    assert sum(len(wanted(x, 1.0, 0.9, i / 200)) == 1 for i in range(200)) >= 198


def test_tokens_as_likely_as_the_last_kept_one_are_kept() -> None:
    x = torch.tensor([[2.0, 5.0, 2.0, 1.0, 2.0]]).expand(100, 5)
    for top_p, inside in ((0.0, {1}), (1e-30, {1}), (0.5, {1}), (0.87, {0, 1, 2, 4}), (0.95, {0, 1, 2, 4})):
        tokens = draw(x, how(*((1.0, top_p, i / 100) for i in range(100))))
        assert set(tokens.tolist()) == inside, top_p


BINARY = 1.0 / math.log(2.0)
"""The temperature at which a logit is the logarithm of the weight to base 2, without rounding."""


def exact_rows() -> tuple[Tensor, Rows, list[int]]:
    """Logits, settings and tokens where sums and boundaries are equal, not near.

    128 tokens of weight 1, then as many of 1/2, and so on to 1/128, twice: the sum is 256.
    """
    levels = -torch.arange(9.0).clamp(max=7).repeat_interleave(128)
    flat = torch.where(torch.arange(1152) < 1024, 0.0, -INF)
    rows, settings_, tokens = [], [], []
    for level in (1, 2, 5):
        rows.append(levels)
        settings_.append((BINARY, 1 - 2.0**-level, LAST))
        tokens.append(128 * level - 1)
    for token in (0, 1, 31, 80, 160, 1023):
        rows.append(flat)
        settings_.append((BINARY, 1.0, token / 1024))
        tokens.append(token)
    return torch.stack(rows), how(*settings_), tokens


def test_a_sum_equal_to_the_bound_is_enough() -> None:
    x, settings_, tokens = exact_rows()
    assert draw(x, settings_).tolist() == tokens


def test_the_ends_of_the_interval_give_the_first_and_the_last_kept_token() -> None:
    x = draw_logits(1, 20, 50, 1.0, masked=0.3)
    for temperature, top_p in ((1.0, 1.0), (0.5, 0.9), (100.0, 1.0)):
        for row in x:
            inside = [token for token, _ in sorted_out(row, temperature, top_p)]
            inside = [token for token in inside if row[token] > -INF]
            ends = draw(row.expand(2, -1), how((temperature, top_p, 0.0), (temperature, top_p, LAST)))
            assert ends.tolist() == [inside[0], inside[-1]]


@pytest.mark.parametrize("temperature", [MIN_TEMPERATURE, 1.0, 100.0, 1e300])
def test_masked_tokens_are_never_drawn(temperature: float) -> None:
    x = torch.full((64, 33), -INF)
    x[:, 5::7] = draw_logits(3, 64, 4, 1.0)
    for top_p in (0.0, 0.9, 1.0):
        tokens = draw(x, how(*((temperature, top_p, i / 64 if i else LAST) for i in range(64))))
        assert x.gather(1, tokens[:, None]).isfinite().all()
    if temperature >= 100:
        counts = draw(x, how(*((temperature, 1.0, i / 64) for i in range(64)))).bincount()
        assert all(12 <= count <= 20 for count in counts[5::7])


def test_a_row_alone_is_the_row_in_a_batch() -> None:
    x = draw_logits(4, 40, 3000, 2.0)
    settings = torch.rand(40, 5, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    settings[::5, 0] = 0.0
    settings[:, 1] = torch.arange(40) % 7 * 30
    settings[:, 3] *= 0.1
    all_rows = torch.arange(40)
    together = sampling.draw(x, settings, all_rows)
    alone = [int(sampling.draw(x[i : i + 1], settings[i : i + 1], all_rows[:1])) for i in range(40)]
    assert alone == together.tolist()
    order = torch.randperm(40, generator=torch.Generator().manual_seed(6))
    assert torch.equal(sampling.draw(x[order], settings[order], all_rows), together[order])
    # nobody sees whether rows without top_k and top_p are sorted beside others
    settings[::2, 1], settings[::2, 2] = 0, 1.0
    wide = sampling.draw(x, settings, all_rows)
    assert torch.equal(sampling.draw(x, settings, all_rows[1::2]), wide)


def test_the_order_of_adding_changes_no_kept_token() -> None:
    x = draw_logits(7, 1, 5000, 1.0)
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(8))
    one = torch.tensor([[1.0]], dtype=torch.float64)
    largest = x.max(-1, keepdim=True).values
    weights = sampling.token_weights(x, largest, one)
    assert torch.equal(sampling.token_weights(x[:, order], largest, one), weights[:, order])
    assert int(weights.sum()) == sum(weights[0].tolist())
    assert int(weights.max()) == 2**40


def test_rows_without_a_temperature_take_the_first_of_the_largest() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, -0.0, -1.0, 0.0], [-INF, -INF, -5.0, -5.0]])
    for settings_ in (None, how(*[(0.0, 1.0, 0.9)] * 3)):
        assert draw(x, settings_).tolist() == [1, 0, 2]
    assert draw(x, how((0.0, 1.0, 0.9), (1.0, 1.0, 0.9), (0.0, 0.5, 0.0))).tolist() == [1, 3, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_that_has_no_largest_number_gives_no_token(dtype: torch.dtype) -> None:
    nan = math.nan
    x = torch.tensor([[1.0, 2.0], [1.0, nan], [nan, 1.0], [INF, 0.0], [-INF, -INF], [-INF, 1.0]]).to(dtype)
    for temperature in (0.0, MIN_TEMPERATURE, 1.0):
        assert draw(x, how(*[(temperature, 0.9, 0.5)] * 6)).tolist() == [1, -1, -1, -1, -1, 1]
    assert draw(x[:, :1], how(*[(1.0, 0.9, LAST)] * 6)).tolist() == [0, 0, -1, -1, -1, -1]


def test_rows_that_cannot_be_added_up_are_refused() -> None:
    with pytest.raises(ValueError, match=r"vocab must be between 1 and 4194304, got 0; give each row"):
        draw(torch.zeros(2, 0), None)
    with pytest.raises(ValueError, match=r"got 4194305"):
        draw(torch.zeros(1, 1).expand(1, sampling.MAX_LOGITS + 1), None)
    assert draw(torch.zeros(0, 5), None).tolist() == []


# options


VOCAB = 60


def options(draw_: Any) -> dict[str, Any]:
    """Some of the options of a request; others are left out."""
    some = {
        "temperature": st.sampled_from([0.3, 1.0, 1.7]),
        "top_k": st.sampled_from([1, 3, 10, 59, 60, 1000]),
        "top_p": st.sampled_from([0.05, 0.5, 0.9, 0.999]),
        "min_p": st.sampled_from([0.01, 0.2, 1.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.2, 3.0]),
        "presence_penalty": st.sampled_from([-1.5, 0.7]),
        "frequency_penalty": st.sampled_from([-0.4, 0.3]),
        "logit_bias": st.sampled_from([((3, 4.5),), ((0, -100.0), (59, 2.5))]),
    }
    return draw_(st.fixed_dictionaries({}, optional=some))


def processed(x: Tensor, prompt: list[int], answer: list[int], **said: Any) -> Tensor:
    """Probabilities of a next token by transformers' processors, in its order, and by vLLM's formulas where it has none."""
    from transformers import LogitsProcessorList
    from transformers.generation import logits_process as of

    x, tokens = x.double()[None], torch.tensor([prompt + answer])
    bias: Any = {(token,): float(value) for token, value in said.get("logit_bias", ())}
    first = LogitsProcessorList([of.SequenceBiasLogitsProcessor(bias)] if bias else [])
    if "repetition_penalty" in said:
        first.append(of.RepetitionPenaltyLogitsProcessor(said["repetition_penalty"]))
    x = first(tokens, x)  # type: ignore[arg-type]
    times = torch.tensor([answer.count(token) for token in range(VOCAB)])
    x = x - said.get("frequency_penalty", 0.0) * times - said.get("presence_penalty", 0.0) * (times > 0)
    last = LogitsProcessorList([of.TemperatureLogitsWarper(said.get("temperature", 1.0))])
    if "top_k" in said:
        last.append(of.TopKLogitsWarper(said["top_k"]))
    if "top_p" in said:
        last.append(of.TopPLogitsWarper(said["top_p"]))
    if "min_p" in said:
        last.append(of.MinPLogitsWarper(said["min_p"]))
    return last(tokens, x)[0].softmax(-1)  # type: ignore[arg-type]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), seed=st.integers(0, 10**6), prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20))
def test_options_are_those_of_transformers_and_vllm(data: Any, seed: int, prompt: list[int]) -> None:
    """Each token of an answer lies where its number falls among transformers' probabilities."""
    said = options(data.draw)
    one, twin, answer = Sampling(**said, seed=seed), Sampling(seed=seed), []
    for x in draw_logits(seed, 8, VOCAB, 2.0):
        p, number = processed(x, prompt, answer, **said), twin.draw()
        (token,) = sample_tokens(x[None], [one], [prompt]).tokens.tolist()
        sums = p.cumsum(-1)
        assert p[token] > 0
        assert sums[token] > number - EPS
        assert sums[token] - p[token] <= number + EPS
        answer.append(token)


def test_each_option_of_the_test_above_changes_what_is_drawn() -> None:
    x, prompt = draw_logits(11, 1, VOCAB, 2.0)[0], list(range(0, VOCAB, 2))
    answer = [int(token) for token in x.topk(5).indices.repeat_interleave(2)]
    plain = processed(x, prompt, answer)
    for said in (
        {"temperature": 0.3}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}, {"repetition_penalty": 1.2},
        {"presence_penalty": 0.7}, {"frequency_penalty": -0.4}, {"logit_bias": ((3, 4.5),)},
    ):  # fmt: skip
        assert (processed(x, prompt, answer, **said) - plain).abs().max() > 0.01, said


def test_the_largest_is_taken_after_penalties_and_biases() -> None:
    x = torch.tensor([[3.0, 2.5, 2.0, -1.0]])
    greedy = Sampling(0, frequency_penalty=0.3)
    assert [sample_tokens(x, [greedy], [[0]]).tokens.item() for _ in range(6)] == [0, 0, 1, 0, 1, 0]
    assert sample_tokens(x, [Sampling(0, repetition_penalty=2.0)], [[0, 1]]).tokens.tolist() == [2]
    assert sample_tokens(-x, [Sampling(0, repetition_penalty=2.0)], [[3]]).tokens.tolist() == [3]
    assert sample_tokens(-x, [Sampling(0, repetition_penalty=0.1)], [[2]]).tokens.tolist() == [3]
    once = Sampling(0, presence_penalty=0.6)
    assert [sample_tokens(x, [once], [[0]]).tokens.item() for _ in range(4)] == [0, 1, 0, 0]
    assert sample_tokens(x, [Sampling(0, logit_bias=((3, 5.0), (0, -1.0)))], [[0]]).tokens.tolist() == [3]
    # top_k, top_p and min_p leave the largest
    assert sample_tokens(x, [Sampling(0, 0.1, top_k=1, min_p=1.0)], [[0]]).tokens.tolist() == [0]


def test_no_stop_token_is_sampled_among_min_tokens() -> None:
    x = torch.tensor([[0.0, 9.0, 1.0, 8.0]]).expand(3, -1)
    biased = Sampling(0, min_tokens=1, stops=(1,), logit_bias=((3, -2.0),), repetition_penalty=1.5)
    samplings = [Sampling(0, min_tokens=2, stops=(1, 3, 99)), biased, Sampling(0, stops=(1,))]
    steps = [sample_tokens(x, samplings, [[], [], []]).tokens.tolist() for _ in range(3)]
    assert list(map(list, zip(*steps, strict=True))) == [[2, 2, 1], [3, 1, 1], [1, 1, 1]]


def test_requests_with_options_answer_alone_as_beside_others() -> None:
    """Penalties stay with their request while rows of the batch change."""
    generator = torch.Generator().manual_seed(12)
    logits = [torch.randn(6, 50, generator=generator) * 2 for _ in range(12)]
    prompts = [[x, 2 * x] for x in range(6)]

    def samplings() -> list[Sampling]:
        return [
            Sampling(1.5, seed=0, frequency_penalty=0.9, logit_bias=((7, 3.0),)),
            Sampling(0),
            Sampling(0, repetition_penalty=1.8),
            Sampling(1.0, 0.9, seed=3, top_k=7, min_p=0.05),
            Sampling(0.7, seed=4, presence_penalty=1.3, repetition_penalty=1.1),
            Sampling(1.0, seed=5, logprobs=2),
        ]

    alone: dict[int, list[int]] = {}
    for row, one in enumerate(samplings()):
        alone[row] = [int(sample_tokens(x[row : row + 1], [one], [prompts[row]]).tokens) for x in logits[row:]]
    together, hows = {row: [] for row in range(6)}, samplings()
    for step, x in enumerate(logits):
        # one more request with each step, in another order each time
        rows = sorted(range(min(6, step + 1)), key=lambda row: (row * 5 + step) % 7)
        tokens = sample_tokens(x[rows], [hows[row] for row in rows], [prompts[row] for row in rows]).tokens.tolist()
        for row, token in zip(rows, tokens, strict=True):
            together[row].append(token)
    assert together == alone
    assert len(set(map(tuple, alone.values()))) == 6


def test_numbers_are_those_of_the_seed_and_evenly_spread() -> None:
    one = [Sampling(seed=5).draw() for _ in range(3)]
    assert len(set(one)) == 1
    how_ = Sampling(seed=5)
    numbers = [how_.draw() for _ in range(4000)]
    assert numbers[0] == one[0]
    counts = Counter(int(number * 10) for number in numbers)
    assert sorted(counts) == list(range(10))
    assert all(abs(count - 400) < 5 * math.sqrt(400 * 0.9) for count in counts.values()), counts
    assert Sampling().draw() != Sampling().draw()
    assert Sampling(seed=-5).draw() != one[0]


def test_options_survive_encoding_and_ignore_tokens_without_logits() -> None:
    sent = Sampling(0.5, 0.9, -(10**30), 3, 7, 0.1, 1.5, -0.5, 0.25, ((3, 1.5), (70, -100.0)))
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Sampling)
    assert found == sent
    assert found.draw() == sent.draw()
    # an output head may have fewer tokens than the embedding
    assert sample_tokens(torch.zeros(1, 50), [found], [[1, 60]]).tokens.shape == (1,)


@pytest.mark.parametrize("vocab", [8, 61, 300])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_no_token_outside_of_a_mask_is_sampled_and_rows_without_one_stay(vocab, temperature):
    """After biases and penalties; logprobs stay the model's own."""

    class Mask:
        def __init__(self, allowed: set[int]) -> None:
            data = [sum(1 << bit for bit in range(8) if 8 * byte + bit in allowed) for byte in range(-(-vocab // 8))]
            self.mask = torch.tensor(data, dtype=torch.uint8)

    x = draw_logits(vocab, 4, vocab, 3.0)
    sets = [{vocab - 1}, {0, 3, vocab // 2}, None, {5}]
    for seed in range(20):
        rows = [Sampling(temperature, seed=seed, logprobs=1, logit_bias=((1, 100.0),)) for _ in sets]
        rows[1].repetition_penalty = 1.3
        for row, allowed in zip(rows, sets, strict=True):
            grammar: Any = None if allowed is None else Mask(allowed)
            row.grammar = grammar
        found = sample_tokens(x, rows, [[3]] * 4).on_host().read()
        assert [token for token, _ in found[::2]] == [vocab - 1, 1]
        assert found[1][0] in sets[1]
        assert found[3][0] == 5
        for place, (token, logprob) in enumerate(found):
            assert logprob is not None
            assert logprob.logprob == pytest.approx(float(x[place].log_softmax(-1)[token]), abs=1e-5)
