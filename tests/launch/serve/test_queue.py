"""The queue bounds the requests that wait beyond those that can run, whenever and however many at once they come."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.launch.serve import engine
from ringattn.launch.serve.http.api import RequestError
from ringattn.launch.serve.http.engine_client import EngineClient
from ringattn.launch.serve.messages import Event, StepOutput
from ringattn.launch.serve.scheduler import NeverFits, QueueFull, Request, Scheduler
from tests.support.serving import STOP, FakeRunner, FakeStep, Link, answer, make_engine


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

    def __init__(self, slots: int, queue: int, *, pages: int = 1000, keep: bool = False, ahead: bool = False) -> None:
        self.runner = Hooked(pages, ahead)
        self.scheduler = Scheduler(
            self.runner.allocator, chunk=64, max_running=slots, max_waiting=queue, keep=keep, pieces=2
        )
        self.engine = make_engine(self.runner, self.scheduler, 1e6)
        self.engine.deliver = self._take
        self.accepted: dict[int, Request] = {}
        self.ended: dict[int, Event] = {}
        self.states: list[dict] = []
        self.names = iter(range(1, 10**6))

    def _take(self, events: list[Event], state: dict | None) -> None:
        self.ended.update((event.request_id, event) for event in events if event.last)
        self.states += [] if state is None else [state]

    @property
    def here(self) -> int:
        """Number of requests that were accepted and have not ended."""
        return len(self.accepted) - len(self.ended)

    def ask(self, prompt: int = 4, max_tokens: int = 4, answers: int = 1) -> bool:
        """Submit requests; return whether they are accepted."""
        text = [1 + next(self.names) % 250] * prompt
        requests = [Request(next(self.names), text, max_tokens, stops=frozenset([STOP])) for _ in range(answers)]
        try:
            self.engine.submit(requests)
        except QueueFull:
            return False
        self.accepted.update((request.id, request) for request in requests)
        return True

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


def status_of(client: EngineClient) -> int:
    """Status that a client would get before its request is read."""
    try:
        client.check()
    except RequestError as error:
        return error.status
    return 200


def test_an_idle_server_accepts_running_plus_waiting_requests_and_no_more():
    for slots, queue in ((1, 1), (4, 2), (3, 5)):
        bench = Bench(slots, queue)
        assert [bench.ask() for _ in range(2 * (slots + queue))] == [True] * (slots + queue) + [False] * (slots + queue)
        bench.run()


def test_requests_without_pages_wait_although_slots_are_free():
    bench = Bench(64, 2, pages=8)  # 16 pages of 4
    assert [bench.ask(20, 20) for _ in range(4)] == [True, True, True, False]  # 10 pages each
    # in order: nobody small overtakes who waits
    assert not bench.ask(1, 1)
    bench.run()


def test_a_removed_request_makes_room():
    bench = Bench(1, 2)
    bench.scheduler.add([Request(name, [name] * 4, 4) for name in (1, 2, 3)])
    bench.scheduler.plan()
    assert bench.scheduler.admission_queue().waiting == 2
    bench.scheduler.remove(3)
    assert bench.scheduler.admission_queue().waiting == 1
    bench.scheduler.remove(1)
    assert (bench.scheduler.admission_queue().waiting, bench.scheduler.admission_queue().slots) == (
        0,
        0,
    )  # the second one's


def test_requests_during_a_step_are_refused_from_the_first_that_may_not_wait():
    bench = Bench(3, 2)
    assert bench.ask(max_tokens=30)
    seen: list[list[bool]] = []

    def flood() -> None:
        if len(seen) < 5:
            seen.append([bench.ask(max_tokens=30) for _ in range(50)])

    # each while one step is computed: nobody has counted anew, and no state was said in between
    bench.runner.during = flood
    bench.run()
    assert seen == [[True] * 4 + [False] * 46] + [[False] * 50] * 4


def test_the_slot_is_free_when_the_end_of_a_request_is_delivered():
    bench = Bench(1, 1)
    assert bench.ask(4, 3)
    assert bench.ask(4, 3)
    asked: list[bool] = []
    take = bench.engine.deliver

    def ask_again(events: list[Event], state: dict | None) -> None:
        take(events, state)
        asked.extend(bench.ask(4, 3) for event in events if event.last and len(asked) < 20)

    bench.engine.deliver = ask_again
    bench.run()
    assert asked == [True] * 20


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 2**32),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([6, 12, 500]),
    st.booleans(),
    st.booleans(),
)
def test_the_queue_limit_holds_and_no_request_with_room_is_refused(seed, slots, queue, pages, keep, ahead):
    draws = random.Random(seed)
    bench = Bench(slots, queue, pages=pages, keep=keep, ahead=ahead)
    left = 60

    def flood() -> None:
        nonlocal left
        line, bench.scheduler._admission_queue = bench.scheduler.admission_queue(), None
        assert bench.scheduler.admission_queue() == line
        if not keep:
            # what was counted as let in was let in: who is left does wait
            assert len(bench.scheduler.waiting) <= queue
        for _ in range(min(left, draws.choice([0, 0, 1, 9]))):
            left -= 1
            before = bench.here
            answers = draws.choice([1, 1, 2])
            taken = bench.ask(draws.randrange(1, 13), draws.randrange(1, 9), answers)
            assert bench.here <= slots + queue
            # an answer that has ended may still count until the step is over
            if pages == 500 and before + answers <= slots + queue:
                assert taken

    bench.runner.during = flood
    bench.ask()
    bench.run()


def test_kept_prefixes_leave_all_pages_to_new_requests():
    bench = Bench(3, 1, pages=32, keep=True)  # 64 pages of 4
    asked = [[bench.ask(40, 20) for _ in range(5)]]  # 15 pages each
    kept: list[int] = []
    take = bench.engine.deliver

    def ask_again(events: list[Event], state: dict | None) -> None:
        take(events, state)
        if not bench.here and len(asked) < 4:
            kept.append(len(bench.scheduler.kept_prefixes))
            asked.append([bench.ask(40, 20) for _ in range(5)])

    bench.engine.deliver = ask_again
    bench.run()
    assert asked == [[True] * 4 + [False]] * 4
    assert min(kept) > 1


def test_requests_that_an_empty_server_could_not_accept_together_are_refused():
    bench = Bench(4, 2, pages=8)
    whole = [Request(name, [1] * 40, 20) for name in range(4)]  # 15 of 16 pages each: one runs, two may wait
    with pytest.raises(
        NeverFits, match="at most 2 may wait for room, got 3 of 4 behind those that the cache of 64 tokens"
    ):
        bench.engine.submit(whole)
    assert bench.ask(40, 20, answers=3)
    bench.run()


def test_a_busy_engine_delivers_at_once_that_its_queue_has_room(monkeypatch):
    monkeypatch.setattr(engine, "STATE_S", 0.0)
    bench = Bench(1, 1)
    bench.ask(4, 2)
    bench.ask(4, 40)
    with contextlib.closing(Link()) as link:
        client = link.client(bench.scheduler.capacity, bench.engine.state())
        assert status_of(client) == 200
        seen: list[tuple[int, int]] = []
        take = bench.engine.deliver

        def look(events: list[Event], state: dict | None) -> None:
            take(events, state)
            if state is not None:
                client.handle(StepOutput(state=state))
            if len(bench.ended) < 3:
                seen.append((status_of(client), bench.engine._admission_queue.waiting))
                if seen[-1][0] == 429:
                    monkeypatch.setattr(engine, "STATE_S", float("inf"))
                else:
                    bench.ask(4, 20)

        bench.engine.deliver = look
        bench.run()
    # whom the client refuses by what it has heard last, the engine would refuse, too
    assert set(seen) >= {(200, 0), (429, 1)}
    assert (429, 0) not in seen
