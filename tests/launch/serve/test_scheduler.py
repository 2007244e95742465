"""The scheduler: admission, contents of steps, shared prefixes, and that all pages are freed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.inference.page_allocator import PageAllocator
from ringattn.launch.serve import scheduler as scheduler_module
from ringattn.launch.serve.messages import Event, decode_to_rank, encode
from ringattn.launch.serve.prefix_cache import PrefixIndex, prefix_digests
from ringattn.launch.serve.scheduler import AnswerRequest, ScheduledStep, Scheduler, apply_changes
from tests.support.serving import STOP, FakeRunner, FakeStep, answer, scores_after


def request(name: int, prompt: Sequence[int], max_tokens: int = 5, deadline: float = float("inf")) -> AnswerRequest:
    return AnswerRequest(name, list(prompt), max_tokens, deadline, stops=frozenset([STOP]))


class Bench:
    """A scheduler with a fake model, and the page allocator of another rank that follows it."""

    def __init__(
        self,
        pages: int = 64,
        page_size: int = 4,
        chunk: int = 16,
        running: int = 64,
        keep: bool = True,
        pieces: int = 0,
        ahead: bool = False,
        rows: int = 0,
    ) -> None:
        self.runner = FakeRunner(2, pages, page_size)
        self.ahead = ahead
        self.before: tuple[ScheduledStep, FakeStep] | None = None
        self.other = FakeRunner(2, pages, page_size, ahead=False)
        self.scheduler = Scheduler(
            self.runner.allocator,
            chunk=chunk,
            max_running=running,
            keep=keep,
            pieces=pieces,
            rows=rows,
        )
        self.answers: dict[int, list[int]] = {}
        self.scores: dict[int, list[float]] = {}
        self.ended: dict[int, Event] = {}
        self.plans: list[ScheduledStep] = []

    def step(self) -> bool:
        """Run the next step; with `ahead` it is started before the previous one is read."""
        plan = self.scheduler.plan()
        before, self.before = self.before, None
        started = None
        if plan is not None:
            self.plans.append(plan)
            pieces = sum(-(-count // 16) for count in plan.counts)
            assert not plan.packed or pieces <= self.scheduler.pieces
            assert plan.decodes + plan.packed + plan.mixed <= 1
            assert not plan.mixed or (sum(plan.counts) <= self.scheduler.rows and 0 < plan.answers < len(plan.requests))
            assert len(plan.from_previous) in (0, len(plan.tokens))
            apply_changes(self.other.allocator, plan.changes)
            self.runner.move_pages(plan)
            self.other.move_pages(decode_to_rank(encode(plan)))
            if plan.cache_ids:
                received: Any = decode_to_rank(encode(plan))
                started = plan, self.runner.start(plan)
                self.other.start(received)
                assert self.other._chosen == self.runner._chosen
                assert self.other.memory == self.runner.memory
        if self.ahead:
            started, self.before = before, started
        if started is not None:
            self.record(*started)
        return plan is not None or before is not None

    def record(self, plan: ScheduledStep, step: FakeStep) -> None:
        """Read and record a step."""
        sampled = step.wait()
        for event in self.scheduler.record(plan, sampled.read(), sampled.read_scores()):
            self.scores.setdefault(event.request_id, []).extend(one.logprob for one in event.scores)
            if event.token is not None:
                self.answers.setdefault(event.request_id, []).append(event.token)
            if event.last:
                assert event.request_id not in self.ended
                self.ended[event.request_id] = event

    def drain(self) -> None:
        while self.step():
            pass
        assert not self.scheduler.waiting
        assert not self.scheduler.running

    def assert_all_pages_come_back(self) -> None:
        self.scheduler.add(
            [request(10**6, [1] * (2 * self.runner.allocator.pages * self.runner.allocator.page_size - 1), 1)]
        )  # as large as the cache
        self.drain()
        self.scheduler.kept.evict(2 * self.runner.allocator.pages, urgent=True)
        self.step()
        for runner in (self.runner, self.other):
            assert runner.allocator.free_pages == (runner.allocator.pages,) * 2
            assert runner.allocator.requests == ()


@settings(deadline=None, max_examples=30)
@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([1, 7, 16, 64]),
    st.booleans(),
    st.sampled_from([0, 1, 2]),
    st.booleans(),
    st.sampled_from([0, 3, 30]),
)
def test_every_request_gets_its_answer_alone_and_all_pages_are_freed(seed, page_size, chunk, keep, pieces, ahead, rows):
    draw = random.Random(seed)
    bench = Bench(
        pages=48 // page_size + 8,
        page_size=page_size,
        chunk=chunk,
        running=draw.choice([1, 3, 64]),
        keep=keep,
        pieces=pieces,
        ahead=ahead,
        rows=rows,
    )
    wanted, cancelled, scored = {}, set(), {}
    stems = [[draw.randrange(1, 250) for _ in range(20)] for _ in range(3)]
    for name in range(draw.randrange(1, 25)):
        prompt = draw.choice(stems)[: draw.randrange(0, 20)] + [
            draw.randrange(1, 250) for _ in range(draw.randrange(1, 8))
        ]
        max_tokens = draw.randrange(1, 12)
        wanted[name] = answer(prompt, max_tokens)
        bench.scheduler.add([request(name, prompt, max_tokens)])
        bench.scheduler.waiting[-1].score_prompt = draw.random() < 0.2
        scored |= {name: prompt} if bench.scheduler.waiting[-1].score_prompt else {}
        for _ in range(draw.choice([0, 0, 1, 5])):
            bench.step()
        if draw.random() < 0.2:
            victim = draw.randrange(name + 1)
            if bench.scheduler.remove(victim, keep=draw.random() < 0.5):
                cancelled.add(victim)
    bench.drain()
    for name, tokens in wanted.items():
        if name in cancelled:
            assert bench.answers.get(name, []) == tokens[: len(bench.answers.get(name, []))]
        else:
            assert bench.answers.get(name, []) == tokens
            assert bench.ended[name].finish in ("stop", "length")
            expected = likelihoods(scored[name]) if name in scored else []
            assert bench.scores[name] == pytest.approx(expected, abs=1e-5)
    bench.assert_all_pages_come_back()


def test_short_prompts_are_packed_and_take_turns_with_answers_and_long_ones():
    bench = Bench(pages=800, page_size=4, chunk=100, pieces=4)
    short, long = [7] * 40, list(range(1, 251)) * 4
    bench.scheduler.add([request(0, [3], 60), request(1, long)])
    bench.step()
    bench.scheduler.add([request(2 + name, [name + 10, *short], 3) for name in range(3)])
    bench.drain()
    kinds = ["packed" if plan.packed else "decodes" if plan.decodes else "ring" for plan in bench.plans if plan.counts]
    assert kinds[:8] == ["packed", "decodes", "ring", "decodes", "packed", "decodes", "ring", "decodes"]
    # 41 tokens each are 3 pieces: one whole prompt and a piece of the next, which begins anew behind whole pages
    packed = [plan.counts for plan in bench.plans if plan.packed]
    assert packed[:3] == [[1], [32, 32], [9, 9, 32]]
    # what is left of a long prompt is short
    assert sum(plan.counts[0] for plan in bench.plans if plan.counts and not plan.decodes and not plan.packed) == 800
    assert max(sum(plan.counts) for plan in bench.plans if not plan.packed) <= 100


def kind_of(plan: ScheduledStep) -> str:
    return "mixed" if plan.mixed else "packed" if plan.packed else "decodes" if plan.decodes else "ring"


def test_short_prompts_come_with_the_tokens_of_answers_and_long_ones_take_turns_with_both():
    bench = Bench(pages=800, page_size=4, chunk=100, pieces=4, rows=40, ahead=True)
    short, long = [7] * 40, list(range(1, 251)) * 4
    bench.scheduler.add([request(0, [3], 60), request(1, long)])
    bench.step()
    bench.scheduler.add([request(2 + name, [name + 10, *short], 3) for name in range(3)])
    bench.drain()
    plans = [plan for plan in bench.plans if plan.counts]
    kinds = [kind_of(plan) for plan in plans]
    assert kinds[:6] == ["packed", "mixed", "ring", "mixed", "ring", "mixed"]
    # a token of the answer and 39 of prompts: half for the oldest, in whole pages
    assert plans[1].counts == [1, 16, 20, 3]
    assert plans[3].counts[0] == 1
    assert all(sum(plan.counts) <= 40 for plan in plans if plan.mixed)
    # nothing waits: a token of the first answer is in every second step at least
    talks = [any(request.id == 0 for request in plan.requests) for plan in plans[: kinds.index("decodes")]]
    assert all(x or y for x, y in itertools.pairwise(talks))
    assert bench.runner.from_previous > 10
    bench.assert_all_pages_come_back()


@pytest.mark.parametrize(("constant", "value"), [("MIXED_LENGTH", 35), ("MIXED_KEYS", 200)])
def test_prompts_that_would_make_a_mixed_step_long_take_turns(monkeypatch, constant, value):
    monkeypatch.setattr(scheduler_module, constant, value)
    bench = Bench(pages=800, page_size=4, chunk=100, pieces=4, rows=64)
    talker = next([1, 2, x] for x in range(3, 99) if len(answer([1, 2, x], 60)) == 60)
    bench.scheduler.add([request(0, talker, 60)])
    bench.step()
    for prompt in ([9] * 40, [8] * 10):
        bench.scheduler.add([request(len(prompt), prompt, 1)])
        bench.step()
        bench.step()
    # 40 tokens are too long, or 1,600 keys too many; 10 are not
    assert [kind_of(plan) for plan in bench.plans] == ["packed", "decodes", "packed", "mixed", "decodes"]
    for _ in range(40):
        bench.step()
    bench.scheduler.add([request(3, [7] * 10, 1)])
    bench.step()
    # nor may the answer be too long
    assert kind_of(bench.plans[-1]) == ("packed" if constant == "MIXED_LENGTH" else "mixed")


def test_a_few_tokens_with_a_long_past_are_not_packed(monkeypatch):
    monkeypatch.setattr(scheduler_module, "MAX_KEYS", 600)
    bench = Bench(pages=800, page_size=4, chunk=100, pieces=4)
    past = [x % 250 + 1 for x in range(600)]
    for name, tokens in enumerate((past, [*past, *[9] * 40], [*past[:250], *[9] * 40], past[1:20])):
        bench.scheduler.add([request(name, tokens, 1)])
        bench.drain()
    kinds = [(sum(plan.counts), plan.packed) for plan in bench.plans if plan.counts]
    assert (40, False) in kinds, "3 pieces of 640 tokens on 2 ranks"
    assert (40, True) in kinds
    assert kinds[-1] == (19, True)


def test_short_prompts_whose_pieces_read_too_much_together_come_one_after_another(monkeypatch):
    monkeypatch.setattr(scheduler_module, "MAX_KEYS", 50)
    bench = Bench(pages=800, page_size=4, chunk=100, pieces=4)
    bench.scheduler.add([request(name, [name + 1] * 30, 1) for name in range(3)])
    bench.drain()
    assert [plan.counts for plan in bench.plans if plan.packed] == [[30], [30], [30]]


def likelihoods(prompt: Sequence[int]) -> list[float]:
    """Logprobs of the fake model for the tokens of a prompt, from the second one on."""
    rows = [scores_after(prompt[:end]).log_softmax(-1) for end in range(1, len(prompt))]
    return [float(row[token]) for row, token in zip(rows, prompt[1:], strict=True)]


def test_a_prompt_that_is_scored_is_computed_whole_in_short_steps_and_serves_others():
    bench = Bench(pages=400, page_size=4, chunk=1000, pieces=2, rows=30)
    prompt = [x * 37 % 250 + 1 for x in range(600)]
    bench.scheduler.add([request(0, prompt)])
    bench.drain()
    steps = len(bench.plans)
    scored = AnswerRequest(1, prompt, 5, stops=frozenset([STOP]), score_prompt=True)
    bench.scheduler.add([scored, request(2, [9] * 500), request(3, [8, 7])])
    bench.drain()
    assert bench.ended[1].num_cached == 0
    shares = [plan.counts[plan.scored[0]] for plan in bench.plans[steps:] if plan.scored]
    assert (sum(shares), max(shares)) == (600, scheduler_module.SCORED)
    assert bench.scores[1] == pytest.approx(likelihoods(prompt), abs=1e-5)
    assert (bench.scores[2], bench.scores[3]) == ([], [])
    bench.scheduler.add([request(4, prompt)])
    bench.drain()
    assert bench.ended[4].num_cached > 500
    bench.assert_all_pages_come_back()


def test_a_prefix_is_computed_once():
    bench = Bench(page_size=4, chunk=64)
    system = list(range(1, 33))
    bench.scheduler.add([request(name, [*system, 100 + name, 7]) for name in range(8)])
    bench.drain()
    assert bench.scheduler.prefill_tokens == 32 + 8 * 2
    assert bench.scheduler.shared_tokens == 7 * 32
    assert [bench.ended[name].num_cached for name in range(8)] == [0] + [32] * 7
    before = bench.scheduler.prefill_tokens
    bench.scheduler.add([request(9, [*system, 100, 7, *bench.answers[0], 9])])  # the next turn of the first one
    bench.drain()
    assert bench.scheduler.prefill_tokens - before <= 2  # the last token of an answer was never brought, and one is new


def test_the_last_token_of_a_known_prompt_is_computed_again():
    bench = Bench(page_size=4)
    bench.scheduler.add([request(0, range(1, 9))])
    bench.drain()
    bench.scheduler.add([request(1, range(1, 9))])
    bench.drain()
    assert bench.ended[1].num_cached == 7
    assert bench.answers[1] == bench.answers[0] == answer(range(1, 9), 5)


def test_kept_prefixes_are_evicted_in_the_order_of_their_last_use_and_from_their_ends():
    bench = Bench(pages=12, page_size=4)  # 24 pages in all
    prompts = [[10 * name + 1] * 27 for name in range(3)]  # 7 pages each, and an answer of one token
    for name, prompt in enumerate(prompts):
        bench.scheduler.add([request(name, prompt, 1)])
        bench.drain()
    assert len(bench.scheduler.kept.tokens) == 3
    bench.scheduler.add([request(3, prompts[0], 1)])  # used again
    bench.drain()
    bench.scheduler.add([request(4, [99] * 28, 1)])  # of 7 pages 2 are free: it needs 5 of another prefix
    bench.drain()
    # another use of the first one takes a sixth page
    for name, num_cached in ((5, 26), (6, 4)):
        bench.scheduler.add([request(name, prompts[name - 5], 1)])
        bench.drain()
        assert bench.ended[name].num_cached == num_cached


def test_long_prompts_stall_neither_answers_nor_short_prompts():
    bench = Bench(pages=400, page_size=4, chunk=32)
    talker = next([1, 2, x] for x in range(3, 99) if len(answer([1, 2, x], 60)) == 60)
    bench.scheduler.add([request(0, talker, 60)])
    bench.step()
    bench.scheduler.add([request(1, [5] * 1000, 1)])
    bench.step()
    bench.scheduler.add([request(name, [name] * 6, 2) for name in range(2, 8)])
    seen = len(bench.plans)
    while len(bench.ended) < 8:
        bench.step()
    talks = [any(request.id == 0 for request in plan.requests) for plan in bench.plans[:-1]]
    assert all(x or y for x, y in itertools.pairwise(talks)), "two chunks between two tokens of an answer"
    order = list(bench.ended)
    assert order.index(1) > max(order.index(name) for name in range(2, 8))
    assert all(sum(plan.counts) <= 32 for plan in bench.plans if set(plan.counts) != {1})
    # six short prompts of 6 tokens share half of each chunk of 32: three chunks bring them all
    first = next(i for i, plan in enumerate(bench.plans) if any(request.id == 7 for request in plan.requests))
    assert first - seen <= 6
    # and the long one got at least half of each chunk: 1000 / 16 chunks at most
    assert sum(any(request.id == 1 for request in plan.requests) for plan in bench.plans) <= 1000 / 16 + 1


def test_a_prompt_that_delays_no_answer_gets_a_chunk_of_each_rank():
    bench = Bench(pages=400, page_size=4, chunk=32)
    bench.scheduler.add([request(1, [5] * 640, 1)])
    while not bench.ended:
        bench.step()
    assert [sum(plan.counts) for plan in bench.plans if plan.counts] == [64] * 10


def test_a_request_may_be_as_large_as_the_cache():
    bench = Bench(pages=4, page_size=4)
    bench.scheduler.add([request(1, [1] * 30, 2)])
    bench.drain()
    assert len(bench.answers[1]) == 2


def test_a_fork_that_does_not_fit_is_admitted_without_prefix():
    bench = Bench(pages=2, page_size=8)  # 4 pages
    bench.scheduler.add([request(0, [1] * 12, 1)])  # leaves a page and a half
    bench.drain()
    bench.scheduler.add([request(1, [1] * 11 + [2] * 20, 1)])  # 4 pages; as a fork of 11 tokens it would need 2 + 3
    bench.drain()
    assert bench.answers[1] == answer([1] * 11 + [2] * 20, 1)
    assert bench.ended[1].num_cached == 0


def test_running_and_waiting_requests_fail_at_their_deadline():
    bench = Bench(pages=4, page_size=4)
    bench.scheduler.add([request(0, [1] * 20, 8, deadline=10.0), request(1, [2] * 20, 8, deadline=10.0)])
    bench.step()
    assert bench.scheduler.remove_expired(9.9) == []
    events = bench.scheduler.remove_expired(10.0)
    assert [(event.request_id, event.failure and event.failure[0]) for event in events] == [(0, 503), (1, 503)]
    bench.drain()
    bench.assert_all_pages_come_back()


def test_page_allocators_that_diverge_are_an_error():
    allocator = PageAllocator(1, 4, 4)
    allocator.add_request(4)
    with pytest.raises(RuntimeError, match="got 1 here and 0 on rank 0"):
        apply_changes(allocator, [("add_request", 0, 4)])


@given(st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=8), st.lists(st.integers(0, 2), max_size=12))
def test_the_index_finds_the_longest_prefix(known, prompt):
    index = PrefixIndex(2)
    for name, tokens in enumerate(known):
        index.add(name, prefix_digests(tokens, 2))
    for name in range(0, len(known), 3):
        index.drop(name)

    def common(tokens: list[int]) -> int:
        n = 0
        while n + 2 <= min(len(tokens), len(prompt)) and tokens[n : n + 2] == prompt[n : n + 2]:
            n += 2
        return n

    left = {name: common(tokens) for name, tokens in enumerate(known) if name % 3}
    owner: Any
    owner, length = index.find(prefix_digests(prompt, 2))
    assert length == max(left.values(), default=0)
    assert owner is None if length == 0 else left[owner] == length
