"""Who starts, who waits and who is preempted, on the scheduler alone: no answer is lost, repeated or starved, whatever comes."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.inference.page_allocator import PageAllocator
from ringattn.launch.serve import kept_prefixes
from ringattn.launch.serve import scheduler as scheduler_module
from ringattn.launch.serve.kept_prefixes import KeptPrefixes
from ringattn.launch.serve.messages import Event, decode_to_rank, encode
from ringattn.launch.serve.sampling import Sampling
from ringattn.launch.serve.scheduler import AnswerRequest, ScheduledStep, Scheduler, apply_changes
from tests.launch.serve.test_http import going_on
from tests.support.serving import FakeRunner, FakeServer, FakeStep, answer, make_engine, scores_after, text_of


class Server:
    """A scheduler with a fake model on two ranks, of which the second follows by commands; a step may be started ahead.

    Attributes:
        answers: Tokens of each request, as they are streamed.
        ended: The last event of each.
        delays: Steps in which a request waited although it would have fitted without younger ones.
    """

    def __init__(
        self, pages: int, *, page_size: int = 4, ahead: bool = False, slots: int = 0, moves: int = 1, **how: Any
    ) -> None:
        self.runner, self.other = FakeRunner(2, pages, page_size), FakeRunner(2, pages, page_size, ahead=False)
        self.ahead, self.before = ahead, None
        self.kept = KeptPrefixes(self.runner.allocator, slots, moves)
        how = {"chunk": 16, "max_running": 64, **how}
        self.scheduler = Scheduler(self.runner.allocator, kept=self.kept, **how)
        self.answers: dict[int, list[int]] = {}
        self.scores: dict[int, list[float]] = {}
        self.ended: dict[int, Event] = {}
        self.delays: dict[int, int] = {}
        self.computed = 0

    def ask(self, name: int, prompt: Sequence[int], max_tokens: int, **how: Any) -> AnswerRequest:
        """Add a request."""
        request = AnswerRequest(name, list(prompt), max_tokens, **how)
        self.scheduler.add([request])
        return request

    def step(self) -> bool:
        """Plan, start and record a step; return whether there was anything to do."""
        plan = self.scheduler.plan()
        before, self.before = self.before, None
        started = None
        if plan is not None:
            self._count_delay()
            command: Any = decode_to_rank(encode(plan))
            apply_changes(self.other.allocator, command.changes)
            for runner, message in ((self.runner, plan), (self.other, command)):
                runner.move_pages(message)
                if plan.cache_ids:
                    step = runner.start(message)
                    started = (plan, step) if runner is self.runner else started
            self.other._chosen = self.runner._chosen  # rank 0 samples
            self.computed += len(plan.tokens)
            assert self.other.memory == self.runner.memory
            assert self.other.allocator.free_pages == self.runner.allocator.free_pages
        if self.ahead:
            started, self.before = before, started
        if started is not None:
            self._record(*started)
        return plan is not None or before is not None

    def drain(self, most: int = 20_000) -> None:
        """Run until nothing is left; fail if that does not end."""
        while self.step():
            most -= 1
            assert most > 0, "steps without an end"
        assert not self.scheduler.waiting
        assert not self.scheduler.running

    def _count_delay(self) -> None:
        scheduler = self.scheduler
        if scheduler.waiting:
            first = scheduler.waiting[0]
            older = [one for one in scheduler.running.values() if one.order < first.order]
            waits = first.unrecorded or scheduler._is_being_computed(first) or len(older) == len(scheduler.running)
            if not waits and scheduler._find_start(first, older, False) is not None:
                self.delays[first.id] = self.delays.get(first.id, 0) + 1

    def _record(self, plan: ScheduledStep, step: FakeStep) -> None:
        sampled = step.wait()
        for event in self.scheduler.record(plan, sampled.read(), sampled.read_scores()):
            assert event.request_id not in self.ended, "nothing follows the end"
            self.scores.setdefault(event.request_id, []).extend(one.logprob for one in event.scores)
            if event.token is not None:
                self.answers.setdefault(event.request_id, []).append(event.token)
            if event.last:
                self.ended[event.request_id] = event

    def assert_all_pages_come_back(self) -> None:
        self.kept.evict(10**6, urgent=True)
        self.step()
        for runner in (self.runner, self.other):
            assert runner.allocator.requests == ()
            assert runner.allocator.free_pages == (runner.allocator.pages,) * 2


def likelihoods(prompt: Sequence[int]) -> list[float]:
    """Logprobs of the fake model for the tokens of a prompt, from the second one on."""
    rows = [scores_after(prompt[:end]).log_softmax(-1) for end in range(1, len(prompt))]
    return [float(row[token]) for row, token in zip(rows, prompt[1:], strict=True)]


def sampling(seed: int) -> Sampling:
    """Options of which each depends on the tokens, or the draws, so far."""
    return Sampling(8.0, 0.9, seed=seed, repetition_penalty=1.3, frequency_penalty=0.5, min_tokens=2, stops=(0,))


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    page_size=st.sampled_from([1, 3, 8]),
    room=st.integers(1, 40),
    ahead=st.booleans(),
    keep=st.booleans(),
    steps=st.sampled_from([(0, 0), (2, 0), (2, 30)]),
    host=st.sampled_from([(0, 1), (0, 1), (3, 1), (40, 1), (40, 3)]),
    patience=st.sampled_from([0, 3, 256]),
    headroom=st.sampled_from([0, 0, 4, 128]),
)
def test_every_answer_comes_whole_and_once_whatever_arrives(
    seed, page_size, room, ahead, keep, steps, host, patience, headroom
):
    draw = random.Random(seed)
    pages = -(-room // page_size) + 1
    most = 2 * pages * page_size
    slots, moves = host if keep else (0, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler_module, "PASSING_STEPS", patience)
        patch.setattr(scheduler_module, "HEADROOM", headroom)
        patch.setattr(kept_prefixes, "MAX_KEPT", draw.choice([2, 1024]))
        server = Server(
            pages, page_size=page_size, ahead=ahead, keep=keep, chunk=draw.choice([1, 7, 16]), slots=slots, moves=moves,
            max_running=draw.choice([1, 3, 64]), pieces=steps[0], rows=steps[1],
        )  # fmt: skip
        stems = [[draw.randrange(1, 250) for _ in range(most)] for _ in range(3)]
        asked, cancelled = {}, set()
        for name in range(draw.randrange(1, 20)):
            length = draw.randrange(1, most)
            shared = draw.randrange(length)
            prompt = draw.choice(stems)[:shared] + [draw.randrange(1, 250) for _ in range(length - shared)]
            max_tokens = draw.randrange(1, most - length + 1)
            how = draw.choice(["greedy", "greedy", "scored", "sampled"])
            request = server.ask(
                name, prompt, max_tokens, score_prompt=how == "scored", stops=frozenset([0]),
                sampling=sampling(name) if how == "sampled" else None,
            )  # fmt: skip
            asked[name] = request, how
            for _ in range(draw.choice([0, 0, 1, 5, 20])):
                server.step()
            if draw.random() < 0.1:
                victim = draw.randrange(name + 1)
                if server.scheduler.remove(victim, keep=draw.random() < 0.5):
                    cancelled.add(victim)
        server.drain()
        moved = max(server.runner.moved)
        server.assert_all_pages_come_back()
    assert max(server.delays.values(), default=0) <= patience + 2 * pages * (slots > 0)
    assert moved <= moves + len(asked)
    for name, (request, how) in asked.items():
        expected = drawn_alone(request) if how == "sampled" else answer(request.prompt, request.max_tokens)
        found = server.answers.get(name, [])
        if name in cancelled:
            assert found == expected[: len(found)]
            continue
        assert found == expected
        assert server.ended[name].finish in ("stop", "length")
        scores = likelihoods(request.prompt) if how == "scored" else []
        assert server.scores[name] == pytest.approx(scores, abs=1e-5)


def drawn_alone(request: AnswerRequest) -> list[int]:
    """Return the sampled answer to a request alone, in a cache with room for all of it."""
    server = Server(200)
    seed = int(request.sampling.seed, 16) if request.sampling and isinstance(request.sampling.seed, str) else 0
    server.ask(request.id, request.prompt, request.max_tokens, stops=request.stops, sampling=sampling(seed))
    server.drain()
    return server.answers.get(request.id, [])


@pytest.mark.parametrize("ahead", [False, True])
def test_small_requests_pass_one_that_waits_for_pages(ahead):
    server = Server(16, ahead=ahead)  # 32 pages of 4
    prompts = [[1] * 60, [2] * 100, [3, 4], [5, 6]]
    for name, (prompt, tokens) in enumerate(zip(prompts, (30, 20, 2, 2), strict=True)):
        server.ask(name, prompt, tokens)
    server.drain()
    assert server.scheduler.preemptions == 0
    assert list(server.ended) == [2, 3, 0, 1], "the small ones have ended before the large one could begin"
    assert [len(server.answers[name]) for name in range(4)] == [30, 20, 2, 2]


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 2**32), st.integers(0, 20), st.booleans())
def test_a_large_request_starts_in_time_whatever_small_ones_keep_coming(seed, patience, ahead):
    draw = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler_module, "PASSING_STEPS", patience)
        server = Server(12, ahead=ahead)  # 24 pages of 4
        server.ask(0, [1] * 30, 4)
        server.step()
        server.ask(1, [2] * 90, 4)
        began, step = None, 0
        for step in range(60 + patience):
            server.ask(2 + step, [draw.randrange(1, 250) for _ in range(draw.randrange(1, 12))], draw.randrange(1, 40))
            server.step()
            if began is None and 0 in server.ended:
                began = step
            if server.scheduler.running and 1 in server.scheduler.running:
                break
        assert 1 in server.scheduler.running
        # the oldest has ended, and steps are counted from then on; with `ahead` its pages come back a step later
        assert began is not None
        assert step <= began + patience + 2
        assert server.delays.get(1, 0) <= patience
        server.drain()
        assert len(server.ended) == 3 + step


def test_requests_that_passed_are_preempted_only_when_that_lets_the_older_one_start(monkeypatch):
    monkeypatch.setattr(scheduler_module, "PASSING_STEPS", 3)
    monkeypatch.setattr(scheduler_module, "HEADROOM", 0)
    server = Server(12)
    server.ask(0, [1] * 60, 36, stops=frozenset())
    server.ask(1, [2] * 80, 8)
    server.ask(2, [3] * 4, 30, stops=frozenset())
    for _ in range(18):
        server.step()
    assert 2 in server.scheduler.running, "the oldest holds too many pages: nothing is won"
    assert server.scheduler.preemptions == 0
    server.drain()
    assert server.delays == {}
    assert len(server.ended) == 3


def test_a_preempted_request_computes_again_what_is_no_longer_kept_and_nothing_else(monkeypatch):
    monkeypatch.setattr(scheduler_module, "HEADROOM", 0)
    for pages, again in ((60, 0), (8, None)):
        server = Server(pages)
        first, second = server.ask(0, [1] * 20, 40), server.ask(1, [2] * 20, 40)
        while len(server.ended) < 2:
            server.step()
            if pages == 60 and len(second.tokens) == 35 and not second.preempted:
                server.scheduler._preempt(second)
        assert second.preempted == 1
        assert not first.preempted
        once = 2 * (20 + 39)
        if again == 0:
            # whole pages are kept: of 34 tokens in the cache 32
            assert server.computed == once + 2
        else:
            assert once + 2 < server.computed <= once + 40
        assert server.ended[1].num_cached == 0, "as it was admitted first"
        assert [server.answers[name] for name in range(2)] == [answer(one.prompt, 40) for one in (first, second)]


def test_the_oldest_request_is_never_preempted_and_gets_the_whole_cache(monkeypatch):
    monkeypatch.setattr(scheduler_module, "HEADROOM", 0)
    server = Server(8)  # 64 tokens
    requests = [server.ask(name, [name + 1], 63, stops=frozenset()) for name in range(5)]
    server.drain()
    assert requests[0].preempted == 0
    assert sum(one.preempted for one in requests) >= 4
    assert sorted(server.ended, key=lambda name: requests[name].order) == list(server.ended), "in the order of arrival"


def test_a_token_that_is_being_sampled_when_its_request_is_preempted_is_kept():
    server = Server(40, ahead=True)
    request = server.ask(0, [1, 2, 3, 4, 5], 30, stops=frozenset())
    for _ in range(6):
        server.step()
    assert request.pending == 1
    known = len(request.tokens)
    server.scheduler._preempt(request)
    server.step()
    assert len(request.tokens) == known + 1
    server.drain()
    assert len(server.answers[0]) == 30
    assert server.computed == 5 + 29 + 2, "a page less three tokens is computed again"


def test_a_request_larger_than_the_cache_is_refused_at_once():
    server = Server(4)  # 32 tokens
    with pytest.raises(ValueError, match="must fit into the 8 pages of the cache, got 33 tokens, which need 9"):
        server.ask(0, [1] * 30, 3)
    server.ask(1, [1] * 30, 2)
    server.drain()
    assert len(server.answers[1]) == 2


def test_an_evicted_prefix_comes_back_from_host_memory_and_is_not_computed_again():
    for slots in (0, 40):
        server = Server(12, slots=slots)  # 24 pages of 4
        text, other = [x % 250 + 1 for x in range(60)], [7] * 90
        for name, prompt in enumerate((text, other, [*text, 9, 9, 9])):
            server.ask(name, prompt, 2)
            server.drain()
        assert server.ended[0].num_cached == server.ended[1].num_cached == 0
        assert [server.answers[name] for name in (0, 2)] == [answer(text, 2), answer([*text, 9, 9, 9], 2)]
        # the answer's first token belongs to no whole page
        assert server.ended[2].num_cached == (60 if slots else 4), "one page was left in the cache"
        assert server.scheduler.host_tokens == (56 if slots else 0)
        assert server.kept.loaded_pages == (14 if slots else 0)
        assert max(server.runner.moved) == (1 if slots else 0)


def test_answers_go_on_while_pages_are_moved_and_a_step_moves_no_more_than_its_share():
    server = Server(40, slots=200, moves=2)  # 80 pages of 4
    text = [x % 250 + 1 for x in range(160)]
    server.ask(0, text, 1)
    server.drain()
    talker = server.ask(1, [3] * 4, 60, stops=frozenset())
    server.step()
    server.ask(2, [5] * 250, 1)
    server.ask(3, [*text, 6], 1)
    grown = []
    while server.scheduler.running and 1 in server.scheduler.running:
        had = len(talker.tokens)
        server.step()
        grown.append(len(talker.tokens) - had)
    assert all(map(sum, itertools.pairwise(grown))), "a token in two steps at least"
    server.drain()
    assert server.kept.saved_pages >= 20
    assert server.kept.loaded_pages >= 20
    assert server.ended[3].num_cached >= 156
    assert max(server.runner.moved) <= 2 + 1, "an answer's next page does not wait"


def test_host_memory_keeps_what_was_used_last_and_the_beginning_of_a_prefix_longest():
    server = Server(12, slots=10)
    texts = [[10 * name + x % 7 + 1 for x in range(40)] for name in range(3)]
    for name, text in enumerate([*texts, [99] * 94]):
        server.ask(name, text, 1)
        server.drain()
    assert server.kept.host is not None
    assert max(server.kept.host.used) <= 10
    cached = {}
    for name in (2, 0):
        server.ask(10 + name, [*texts[name], 9], 1)
        server.drain()
        cached[name] = server.ended[10 + name].num_cached
    # 20 pages for three times 10: the first one was evicted first
    assert cached == {2: 40, 0: 0}


def test_a_failed_request_leaves_no_prefix_although_it_was_preempted(monkeypatch):
    server = Server(40, ahead=True)
    request = server.ask(0, [1] * 20, 30)
    for _ in range(4):
        server.step()
    server.scheduler._preempt(request)
    assert len(server.kept.tokens) == 1
    server.scheduler._fail(request)
    assert not server.kept.tokens
    server.before = None
    server.drain()
    server.assert_all_pages_come_back()


class Counting:
    """A scheduler without a model, which counts steps and tokens."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.allocator, self.computed = PageAllocator(2, pages, page_size), 0
        self.scheduler = Scheduler(self.allocator, chunk=512, max_running=32)

    def step(self) -> bool:
        plan = self.scheduler.plan()
        if plan is not None and plan.cache_ids:
            self.allocator.assign(plan.cache_ids, plan.counts, one_by_one=plan.decodes)
            self.computed += len(plan.tokens)
            self.scheduler.record(plan, [(1, None)] * len(plan.wanted))
        return plan is not None


def computed_again(seed: int) -> int:
    """Tokens that 80 requests of about 150 + 550 tokens compute twice in a cache for 7,000."""
    draw, server = random.Random(seed), Counting(7000 // 16 // 2, 16)
    needed = 0
    for name in range(80):
        prompt, most = (int(min(3000, draw.lognormvariate(*how))) + 1 for how in ((4.5, 1.0), (6, 0.8)))
        needed += prompt + most - 1
        server.scheduler.add([AnswerRequest(name, [draw.randrange(1, 30000) for _ in range(prompt)], most)])
        for _ in range(draw.randrange(20)):
            server.step()
    while server.step():
        pass
    return server.computed - needed


@pytest.mark.slow
def test_the_youngest_is_the_victim_that_computes_least_again(monkeypatch):
    def shortest(scheduler: Scheduler, request: AnswerRequest) -> AnswerRequest:
        return min(younger(scheduler, request), key=lambda one: (one.num_computed, -one.order))

    def longest(scheduler: Scheduler, request: AnswerRequest) -> AnswerRequest:
        return max(younger(scheduler, request), key=lambda one: (one.num_computed, one.order))

    def younger(scheduler: Scheduler, request: AnswerRequest) -> list[AnswerRequest]:
        return [one for one in scheduler.running.values() if one.order > request.order] or [request]

    monkeypatch.setattr(scheduler_module, "HEADROOM", 0)
    again = {}
    for policy in (Scheduler._victim, shortest, longest):
        monkeypatch.setattr(Scheduler, "_victim", policy)
        again[policy.__name__] = sum(map(computed_again, range(6)))
    assert min(again, key=again.__getitem__) == "_victim", again


def test_a_server_that_stops_lets_preempted_answers_end(monkeypatch):
    monkeypatch.setattr(scheduler_module, "HEADROOM", 0)
    runner = FakeRunner(pages=8)  # 64 tokens
    scheduler = Scheduler(runner.allocator, chunk=16, max_running=8)
    engine, ended = make_engine(runner, scheduler), {}

    def deliver(events: list[Event], state: Any) -> None:
        del state
        ended.update((event.request_id, event) for event in events if event.last)
        if scheduler.preemptions and engine.closed is None:
            assert [one.id for one in scheduler.waiting] == [1, 2]
            engine.stop(1e6)

    engine.deliver = deliver
    engine.submit([AnswerRequest(0, [1] * 4, 50), AnswerRequest(1, [2] * 4, 50), AnswerRequest(2, [3] * 60, 4)])
    engine.run()
    assert {name: event.finish for name, event in ended.items()} == {0: "length", 1: "length", 2: None}
    assert ended[2].failure is not None


def test_a_preempted_answer_is_streamed_without_a_gap_or_a_repetition_and_counted(monkeypatch):
    monkeypatch.setattr(scheduler_module, "HEADROOM", 0)
    prompts = [going_on(letter, 40) for letter in "ab"]
    with FakeServer(FakeRunner(pages=8)) as served:  # 64 tokens
        body = {"max_tokens": 40, "ignore_eos": True, "temperature": 0, "stream": True, "prompt": prompts}
        texts = ["", ""]  # both prompts in one call, so that they run side by side
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body) as lines:
            for line in lines.iter_lines():
                for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                    texts[choice["index"]] += choice["text"]
        assert texts == [text_of(prompt, 40) for prompt in prompts]
        served.assert_idle()
        metrics = httpx.get(f"{served.url}/metrics").text
        assert served.engine.scheduler.preemptions > 0
    lines = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line[0] != "#")
    assert float(lines["ringattn_preemptions_total"]) == served.engine.scheduler.preemptions
    assert float(lines["ringattn_requests_waiting"]) == 0
    assert float(lines['ringattn_host_bytes_total{direction="loaded"}']) == 0
    assert (
        sum(float(lines[f'ringattn_cache_pages{{rank="0",use="{use}"}}']) for use in ("running", "kept", "free")) == 8
    )
