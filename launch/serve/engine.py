"""Engine loop of rank 0, which turns requests into tokens, and the loop of the other ranks.

Owns the order of events in a step, delivery of events, shutdown, and the state of the server. The loop runs in the main thread of
every rank; `submit`, `cancel`, `stop`, `fail` and `state` may be called from any thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ringattn.launch.serve.grammar import GrammarError
from ringattn.launch.serve.messages import BEAT_S, GRAMMAR, UNAVAILABLE, Event, Heartbeat, StepCommand, Stop, ToRank
from ringattn.launch.serve.model_runner import ModelRunner, PendingStep
from ringattn.launch.serve.rank_channel import RankChannel
from ringattn.launch.serve.scheduler import AnswerRequest, ScheduledStep, Scheduler, apply_changes

STATE_S = 0.2  # maximum age of a busy server's state in seconds
WINDOW_S = 5.0  # seconds over which speeds are averaged
MASK_THREADS = 2  # threads that compute the masks of grammars


@dataclass
class _RunningStep:
    plan: ScheduledStep
    step: PendingStep
    began: float


class Engine:
    """Engine of rank 0."""

    def __init__(
        self, runner: ModelRunner, scheduler: Scheduler, broadcast: Callable[[ToRank], None], *, time_limit_s: float
    ) -> None:
        self.runner, self.scheduler, self.broadcast, self.time_limit_s = runner, scheduler, broadcast, time_limit_s
        # called once per step, in the thread of the loop, with events and with the state, None if that is not new; after a
        # failure in the thread that reports it
        self.deliver: Callable[[list[Event], dict[str, Any] | None], None] = lambda *_: None
        self._wake = threading.Condition()
        self._submitted: list[AnswerRequest] = []
        self._cancelled: list[tuple[int, bool]] = []
        self._failed: list[Event] = []  # failures of running requests, which the loop has not handled
        self._resumed = False  # whether a request that waited for its mask goes on
        self._mask_threads = ThreadPoolExecutor(MASK_THREADS, "masks")  # which start with the first grammar
        self._open: set[int] = set()
        self.closed: str | None = None  # reason why no requests are accepted
        self._stop_deadline: float | None = None  # when running requests are ended
        self._began = time.monotonic()
        self._steps = {"prefill": 0, "decode": 0}
        self._seconds = {"prefill": 0.0, "decode": 0.0}
        self._ended = 0.0  # when the last step had
        self._generated = 0
        self._admitted, self._queue_seconds = 0, 0.0
        self._recent: deque[tuple[float, int, int]] = deque()
        self._published = 0.0
        self._state: dict[str, Any] = {}
        self._update_state()

    def submit(self, requests: Sequence[AnswerRequest]) -> None:
        """Add requests, whose ids are new, to the queue; they fail if the server is stopping, or has lost a rank."""
        with self._wake:
            closed = self.closed
            for request in requests if closed is None else ():
                request.arrived = request.arrived or time.monotonic()
                request.deadline = request.arrived + self.time_limit_s
                self._submitted.append(request)
                self._open.add(request.id)
            self._wake.notify()
        if closed is not None:
            self.deliver([Event(request.id, failure=(503, closed, UNAVAILABLE)) for request in requests], None)

    def cancel(self, request_id: int, keep: bool = False) -> None:
        """End a request without further events; keep: whether its prefix may serve others."""
        with self._wake:
            if request_id in self._open:
                self._open.discard(request_id)
                self._cancelled.append((request_id, keep))
                self._wake.notify()

    def stop(self, grace_s: float) -> None:
        """Accept no more requests, fail waiting ones, and end the loop when the running ones end, after grace_s at the latest."""
        with self._wake:
            if self._stop_deadline is None:
                self.closed = self.closed or "the server is shutting down"
                self._stop_deadline = time.monotonic() + grace_s
            self._wake.notify()

    def fail(self, why: str) -> None:
        """Fail all requests and accept no more: the loop cannot continue."""
        with self._wake:
            self.closed = why
            failed = [Event(request_id, failure=(503, why, UNAVAILABLE)) for request_id in sorted(self._open)]
            self._open.clear()
            self._state = {**self._state, "closed": why}
            self.deliver(failed, self._state)

    def state(self) -> dict[str, Any]:
        """Return the state, at most STATE_S old."""
        return self._state

    def run(self) -> None:
        """Run steps until `stop` was called and all requests have ended (Note [Asynchronous steps] of scheduler.py)."""
        before: _RunningStep | None = None
        while True:
            events = self._take()
            # the next plan knows the tokens of a step that was read, and a step around the ring takes long to start
            if before is not None and (before.step.ended or self.scheduler.may_prefill_next):
                events += self._end(before)
                before = None
            plan = self.scheduler.plan()
            self._count_admitted()
            started = None if plan is None else self._start(plan)
            for step in (before, None if self.runner.ahead else started):
                if step is not None:
                    events += self._end(step)
            busy = plan is not None or before is not None
            before = started if self.runner.ahead else None
            running = bool(self.scheduler.running)  # without a step all of them wait for masks
            # with the end of the last answer comes the state after it
            self._deliver(events, self._update_state(force=not running))
            if busy:
                continue
            stopping = self._stop_deadline is not None and not running
            if stopping and not self._submitted:
                break
            with self._wake:
                if not (self._submitted or self._cancelled or self._failed or self._resumed or stopping):
                    self._wake.wait(BEAT_S)
            self.broadcast(Heartbeat())
        self._mask_threads.shutdown(wait=False)

    def _take(self) -> list[Event]:
        """Handle requests, cancellations, deadlines and the shutdown since the last step."""
        with self._wake:
            submitted, self._submitted = self._submitted, []
            cancelled, self._cancelled = self._cancelled, []
            events, self._failed = self._failed, []
            self._resumed = False
        self.scheduler.add(submitted)
        for request_id, keep in (*cancelled, *((event.request_id, True) for event in events)):
            self.scheduler.remove(request_id, keep)
        events += self.scheduler.remove_expired(time.monotonic())
        if self._stop_deadline is not None:
            # one that was preempted has begun its answer
            out = [request for request in self.scheduler.waiting if not request.preempted]
            if time.monotonic() >= self._stop_deadline:
                out = [*self.scheduler.waiting, *self.scheduler.running.values()]
            for request in out:
                self.scheduler.remove(request.id)
                events.append(Event(request.id, failure=(503, "the server is shutting down", UNAVAILABLE)))
        return events

    def _count_admitted(self) -> None:
        """Add up the time that new running requests have waited."""
        now = time.monotonic()
        self._admitted += len(self.scheduler.admitted)
        self._queue_seconds += sum(now - request.arrived for request in self.scheduler.admitted)
        self.scheduler.admitted.clear()

    def _start(self, plan: ScheduledStep) -> _RunningStep | None:
        """Broadcast a step and start it; return None when there is nothing to compute."""
        self.broadcast(plan)
        self.runner.move_pages(plan)
        if not plan.cache_ids:
            return None
        began = time.monotonic()
        return _RunningStep(plan, self.runner.start(plan), began)

    def _end(self, running: _RunningStep) -> list[Event]:
        """Wait for a step and record its tokens."""
        plan, sampled = running.plan, running.step.wait()
        assert sampled is not None, "rank 0 samples"
        chosen, scores = sampled.read(), sampled.read_scores()
        ended = time.monotonic()
        kind = "decode" if plan.answers else "prefill"
        self._steps[kind] += 1
        # steps overlap: a second counts for the one that is under way the longest
        self._seconds[kind] += ended - max(running.began, self._ended)
        self._ended = ended
        self._generated += len(chosen)
        self._recent.append((ended, len(plan.tokens) - plan.answers, len(chosen)))
        events = self.scheduler.record(plan, chosen, scores)
        requests = {request.id: request for request in plan.requests}
        for event in events:
            request = requests[event.request_id]
            # a preempted one too: its token was kept
            if request.constrained and not request.ended and event.token is not None:
                self._mask_threads.submit(self._advance, request, event.token)
        return events

    def _advance(self, request: AnswerRequest, token: int) -> None:
        """Compute the mask of an answer after one more token, in a thread (Note [Grammars] of grammar.py)."""
        assert request.sampling is not None, "it has a grammar"
        assert request.sampling.grammar is not None, "it has a grammar"
        failure = None
        try:
            request.sampling.grammar.advance(token)
        except GrammarError as error:
            what = f"the grammar must allow a next token within its limits, got {error}; ask for a simpler one"
            failure = Event(request.id, failure=(400, what, GRAMMAR))
        with self._wake:
            if failure is None:
                request.waits, self._resumed = False, True
            elif request.id in self._open:
                self._failed.append(failure)
            self._wake.notify()

    def _deliver(self, events: list[Event], state: dict[str, Any] | None) -> None:
        with self._wake:
            events = [event for event in events if event.request_id in self._open]
            self._open.difference_update(event.request_id for event in events if event.last)
            if state is not None:
                state["closed"] = self.closed  # it may have failed since the state was read
            if events or state is not None:
                self.deliver(events, state)  # in the lock: nothing may follow what `fail` delivers

    def _update_state(self, force: bool = True) -> dict[str, Any] | None:
        """Update the state and return it; None while a busy engine's state is recent and still open."""
        now, closed, scheduler = time.monotonic(), self.closed, self.scheduler
        if not force and now - self._published < STATE_S and self._state["closed"] == closed:
            return None
        self._published = now
        while self._recent and self._recent[0][0] < now - WINDOW_S:
            self._recent.popleft()
        window = min(WINDOW_S, max(now - self._began, 1e-3))
        prompt, generated = (round(sum(one[kind] for one in self._recent) / window, 1) for kind in (1, 2))
        self._state = {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "prefilling": [
                {"request": one.id, "done": one.num_computed, "shared": one.num_cached, "total": one.prefill_length}
                for one in scheduler.running.values()
                if one.missing
            ],
            "ranks": scheduler.allocator.world_size,
            "page_size": scheduler.allocator.page_size,
            "bytes_per_token": scheduler.allocator.page_bytes // scheduler.allocator.page_size,
            "pages_per_rank": scheduler.allocator.pages,
            "pages": scheduler.pages(),
            "kept_prefixes": len(scheduler.kept.tokens),
            "host": self._host_state(),
            "tokens_per_second": {"prompt": prompt, "generated": generated},
            "totals": {
                "prompt_tokens": scheduler.prefill_tokens,
                "shared_tokens": scheduler.shared_tokens,
                "host_tokens": scheduler.host_tokens,
                "preemptions": scheduler.preemptions,
                "generated_tokens": self._generated,
                "admitted": self._admitted,
                "queue_seconds": round(self._queue_seconds, 3),
                "steps": dict(self._steps),
                "seconds": {kind: round(seconds, 3) for kind, seconds in self._seconds.items()},
            },
            "uptime_s": round(now - self._began, 1),
            "closed": closed,
        }
        return self._state

    def _host_state(self) -> dict[str, Any]:
        """Return the pages in host memory of each rank, and the bytes copied there and back so far, on all ranks."""
        kept = self.scheduler.kept
        size = self.scheduler.allocator.page_bytes
        return {
            "pages_per_rank": 0 if kept.host is None else kept.host.slots,
            "used": [0] * self.scheduler.allocator.world_size if kept.host is None else kept.host.used,
            "saved_bytes": kept.saved_pages * size,
            "loaded_bytes": kept.loaded_pages * size,
        }


def worker_loop(runner: ModelRunner, channel: RankChannel) -> None:
    """Compute the steps that rank 0 plans, on every other rank, until it sends Stop."""
    before: PendingStep | None = None
    while not isinstance(message := channel.receive(), Stop):
        started = None
        if isinstance(message, StepCommand):
            apply_changes(runner.allocator, message.changes)
            runner.move_pages(message)
            if message.cache_ids:
                started = runner.start(message)
        if before is not None:
            before.wait()
        before = started
    if before is not None:
        before.wait()
