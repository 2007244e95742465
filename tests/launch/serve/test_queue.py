"""Requests may come before the engine runs and while a step is computed; a limit bounds those that are open."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.launch.serve.http.fields import RequestError
from ringattn.launch.serve.messages import Event
from ringattn.launch.serve.scheduler import AnswerRequest, Scheduler
from tests.support.serving import STOP, FakeRunner, FakeServer, FakeStep, Link, answer, make_engine


class Hooked(FakeRunner):
    """A runner that calls `during` when a step is started, in the middle of the engine's loop, without threads and times."""

    def __init__(self, pages: int, ahead: bool = False) -> None:
        super().__init__(2, pages, 4, ahead=ahead)
        self.during: Callable[[], object] = lambda: None

    def start(self, plan: Any) -> FakeStep:
        self.during()
        return super().start(plan)


class Bench:
    """An engine without a thread: requests come before it runs, or while a step is computed."""

    def __init__(self, slots: int, *, pages: int = 1000, keep: bool = False, ahead: bool = False) -> None:
        self.runner = Hooked(pages, ahead)
        self.scheduler = Scheduler(self.runner.allocator, chunk=64, max_running=slots, keep=keep, pieces=2)
        self.engine = make_engine(self.runner, self.scheduler, 1e6)
        self.engine.deliver = self._take
        self.accepted: dict[int, AnswerRequest] = {}
        self.ended: dict[int, Event] = {}
        self.names = iter(range(1, 10**6))

    def _take(self, events: list[Event], _: dict | None) -> None:
        self.ended.update((event.request_id, event) for event in events if event.last)

    @property
    def here(self) -> int:
        """Number of requests that were accepted and have not ended."""
        return len(self.accepted) - len(self.ended)

    def ask(self, prompt: int = 4, max_tokens: int = 4, answers: int = 1) -> None:
        """Submit requests."""
        text = [1 + next(self.names) % 250] * prompt
        requests = [AnswerRequest(next(self.names), text, max_tokens, stops=frozenset([STOP])) for _ in range(answers)]
        self.accepted.update((request.id, request) for request in requests)
        self.engine.submit(requests)

    def run(self) -> None:
        """Run until all accepted requests have ended, without failure."""
        deliver = self.engine.deliver

        def stop_after(events: list[Event], state: dict | None) -> None:
            deliver(events, state)
            if not self.here:
                self.engine.stop(1e6)

        self.engine.deliver = stop_after
        self.engine.run()
        assert set(self.ended) == set(self.accepted)
        assert not [event for event in self.ended.values() if event.failure]
        for request in self.accepted.values():
            whole = answer(request.prompt, request.max_tokens)
            assert request.tokens[len(request.prompt) :][: len(whole)] == whole


@pytest.mark.parametrize("ahead", [False, True])
def test_the_end_of_the_last_answer_comes_with_the_state_after_it(ahead):
    bench = Bench(4, ahead=ahead)
    bench.ask(answers=2)
    seen: list[tuple[bool, int | None]] = []

    def take(events: list[Event], state: dict | None) -> None:
        seen.append((any(event.last for event in events), None if state is None else state["running"]))
        bench._take(events, state)

    bench.engine.deliver = take
    bench.run()
    assert [running for last, running in seen if last][-1] == 0


def test_requests_without_pages_wait_although_slots_are_free():
    bench = Bench(64, pages=8)  # 16 pages of 4
    for _ in range(3):
        bench.ask(20, 20)  # 10 pages each
    seen: list[tuple[int, int]] = []
    bench.runner.during = lambda: seen.append((len(bench.scheduler.running), len(bench.scheduler.waiting)))
    bench.run()
    assert (seen[0], max(running for running, _ in seen)) == ((1, 2), 1)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.integers(1, 4), st.sampled_from([6, 12, 500]), st.booleans(), st.booleans())
def test_requests_that_come_during_steps_are_all_answered(seed, slots, pages, keep, ahead):
    draws = random.Random(seed)
    bench = Bench(slots, pages=pages, keep=keep, ahead=ahead)
    left = 60

    def flood() -> None:
        nonlocal left
        assert len(bench.scheduler.running) <= slots
        for _ in range(min(left, draws.choice([0, 0, 1, 9]))):
            left -= 1
            bench.ask(draws.randrange(1, 13), draws.randrange(1, 9), draws.choice([1, 1, 2]))

    bench.runner.during = flood
    bench.ask()
    bench.run()


def test_kept_prefixes_leave_all_pages_to_new_requests():
    bench = Bench(3, pages=32, keep=True)  # 64 pages of 4
    kept: list[int] = []
    most: list[int] = []
    take = bench.engine.deliver

    def ask() -> None:
        for _ in range(4):
            bench.ask(40, 20)  # 15 pages each

    def ask_again(events: list[Event], state: dict | None) -> None:
        take(events, state)
        if not bench.here and len(kept) < 3:
            kept.append(len(bench.scheduler.kept.tokens))
            ask()

    bench.engine.deliver = ask_again
    bench.runner.during = lambda: most.append(len(bench.scheduler.running))
    ask()
    bench.run()
    assert (len(kept), len(bench.ended), max(most)) == (3, 16, 3)
    assert min(kept) > 1


def test_requests_beyond_the_limit_are_refused_until_others_have_ended():
    with contextlib.closing(Link()) as link:
        client = link.client(4, {"closed": None})
        client.check(4)
        client.submit([1, 2, 3], b"", lambda _: None)
        client.check()
        for refused in (lambda: client.check(2), lambda: client.submit([4, 5], b"", lambda _: None)):
            with pytest.raises(RequestError, match="at most 4 requests may be open, got 2 more beside 3") as caught:
                refused()
            assert caught.value.status == 429
        client.close_requests([2])
        client.submit([4, 5], b"", lambda _: None)
        with pytest.raises(RequestError, match="got 1 more beside 4"):
            client.check()


def test_a_client_that_has_its_answer_may_ask_again_at_once():
    with FakeServer(FakeRunner(), running=1, waiting=1) as served, httpx.Client() as http:
        body = {"prompt": "a", "max_tokens": 3, "n": 2}
        for stream in (True, False):
            answers = [http.post(f"{served.url}/v1/completions", json={**body, "stream": stream}) for _ in range(20)]
            assert {one.status_code for one in answers} == {200}


def test_the_time_limit_counts_from_the_arrival():
    bench = Bench(1)
    waited = AnswerRequest(1, [5], 4, arrived=time.monotonic() - 50.0)
    bench.engine.submit([waited, fresh := AnswerRequest(2, [5], 4)])
    assert waited.deadline == waited.arrived + 1e6
    assert fresh.deadline - waited.deadline > 49.0
