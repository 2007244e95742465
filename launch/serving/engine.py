"""The loop that turns requests into tokens, on rank 0 and on the ranks that follow it.

Owns the order of events in a step, who is told what, stopping, and the numbers that say how it goes. Refuses to know what a step
brings (scheduling.py), how it is computed (a `Runner`), and HTTP.

Note [Threads]
    The loop runs in the main thread of every rank. `submit`, `cancel`, `stop`, `fail` and `state` may be called from any
    thread; what happens to requests is delivered by a callback, once per step and together with the state where that is new, in
    the loop's thread, or, when all fails, in the thread that says so. Nothing else of weight runs beside the loop: HTTP and
    tokenizers have a process of their own (front.py), because threads of one interpreter take turns.

Note [A step ahead]
    Where steps are enqueued (`Runner.ahead`), the next one is planned, told and started while one is under way, and only then are
    the tokens of that one read, recorded and delivered: the device finds its next work there when it ends. A step that has ended
    already, because the host is slower than the device, is read first: its plan would know more, and clients wait. So is one
    before a step around the ring, which takes long to start. At most one step is under way when another one is started, on every
    rank.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ringattn.inference.page_allocator import PageAllocator
from ringattn.launch.serving.channel import Channel
from ringattn.launch.serving.sampling import Logprob
from ringattn.launch.serving.scheduling import Event, Job, Plan, Scheduler, apply_changes

BEAT_S = 1.0
"""Seconds between messages to ranks that have nothing to do: each of their waits is bounded."""

STATE_S = 0.2
"""Seconds for which a busy server's state may be old."""

WINDOW_S = 5.0
"""Seconds over which speeds are averaged."""


class Closed(RuntimeError):
    """The server takes no requests: it is stopping, or has lost a rank."""


class Computing(Protocol):
    """A step that was started."""

    @property
    def ended(self) -> bool:
        """Whether it has been computed; waits for nothing."""
        ...

    def wait(self) -> None:
        """Waits for its end."""
        ...

    def read(self) -> list[tuple[int | None, Logprob | None]]:
        """Waits, and says what was chosen for each request that gets a token, on rank 0: a token, None where there is none."""
        ...


class Runner(Protocol):
    """What computes steps, on every rank alike.

    Attributes:
        allocator: Of the cache.
        ahead: Whether `start` returns before a step is computed.
    """

    allocator: PageAllocator
    ahead: bool

    def start(self, plan: Plan) -> Computing:
        """Starts a step; at most one that was started before is not read."""
        ...


@dataclass
class _UnderWay:
    plan: Plan
    step: Computing
    began: float


class Engine:
    """Rank 0's loop.

    Args:
        runner: What computes steps here.
        scheduler: Over the runner's books.
        tell: Tells the other ranks.
        time_limit_s: Seconds that a request may take from its arrival.

    Attributes:
        deliver: Called with what has happened to requests and with the state, None where that is not new. Set it before requests
            come.
    """

    def __init__(
        self, runner: Runner, scheduler: Scheduler, tell: Callable[[dict[str, Any]], None], *, time_limit_s: float
    ) -> None:
        self.runner, self.scheduler, self.tell, self.time_limit_s = runner, scheduler, tell, time_limit_s
        self.deliver: Callable[[list[Event], dict[str, Any] | None], None] = lambda *_: None
        self._wake = threading.Condition()
        self._submitted: list[Job] = []
        self._line = scheduler.line()  # with those that were submitted at its end
        self._cancelled: list[tuple[int, bool]] = []
        self._open: set[int] = set()
        self._closed: str | None = None
        self._cut: float | None = None  # when running requests are cut
        self._began = time.monotonic()
        self._steps = {"prefill": 0, "decode": 0}
        self._seconds = {"prefill": 0.0, "decode": 0.0}
        self._ended = 0.0  # when the last step had
        self._generated = 0
        self._recent: deque[tuple[float, int, int]] = deque()
        self._published = 0.0
        self._state: dict[str, Any] = {}
        self._publish()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Puts jobs into the queue, all of them or none.

        Args:
            jobs: With names that no other job has had.

        Raises:
            NeverFits: One is larger than the cache, or an empty server could not take them all.
            QueueFull: The queue has no room for those of them that would wait.
            Closed: The server is stopping, or has failed.
        """
        self.scheduler.check_together(jobs)
        with self._wake:
            if self._closed is not None:
                raise Closed(self._closed)
            self._line = self._line.admit(jobs)
            for job in jobs:
                job.arrived = time.monotonic()
                job.deadline = job.arrived + self.time_limit_s
                self._submitted.append(job)
                self._open.add(job.name)
            self._wake.notify()

    def cancel(self, name: int, keep: bool = False) -> None:
        """Ends a job before its end; nothing is delivered about it any more.

        Args:
            name: Which one; one that has ended already is no error.
            keep: Whether what it computed may serve others: it was answered as far as anybody wants.
        """
        with self._wake:
            if name in self._open:
                self._open.discard(name)
                self._cancelled.append((name, keep))
                self._wake.notify()

    def stop(self, grace_s: float) -> None:
        """Takes no more requests, fails those that wait, and ends the loop when those that run have ended.

        Args:
            grace_s: Seconds after which they are cut.
        """
        # this may be called by a signal handler, in the middle of anything: it waits for nobody
        if self._cut is None:
            self._closed = self._closed or "the server is shutting down"
            self._cut = time.monotonic() + grace_s
        if self._wake.acquire(blocking=False):
            self._wake.notify()
            self._wake.release()

    def fail(self, why: str) -> None:
        """Fails all requests and takes no more: the loop cannot go on."""
        with self._wake:
            self._closed = why
            failed = [Event(name, failure=(503, why)) for name in sorted(self._open)]
            self._open.clear()
            self._state = {**self._state, "closed": why}
        self.deliver(failed, self._state)

    @property
    def closed(self) -> str | None:
        """Why no requests are taken; None while they are."""
        return self._closed

    def state(self) -> dict[str, Any]:
        """Numbers that say how it goes, at most STATE_S old."""
        return self._state

    def run(self) -> None:
        """Makes steps until `stop` was called and all has ended (Note [A step ahead])."""
        before: _UnderWay | None = None
        while True:
            events = self._take()
            if before is not None and (before.step.ended or self.scheduler.long_next):
                events += self._end(before)
                before = None
            plan = self.scheduler.plan()
            started = None if plan is None else self._start(plan)
            for step in (before, None if self.runner.ahead else started):
                if step is not None:
                    events += self._end(step)
            busy = plan is not None or before is not None
            before = started if self.runner.ahead else None
            # before anybody hears that a request has ended, and asks for another one
            self._count()
            self._deliver(events, self._publish(now_or_soon=not busy))
            if busy:
                continue
            if self._cut is not None and not self._submitted:
                break
            with self._wake:
                if not (self._submitted or self._cancelled or self._cut is not None):
                    self._wake.wait(BEAT_S)
            self.tell({})

    def _count(self) -> None:
        """Counts anew who waits: what has ended since the last time has made room; what has come was counted as it came."""
        with self._wake:
            self._line = self.scheduler.line().after(self._submitted)

    def _take(self) -> list[Event]:
        """What has come since the last step: requests, cancellations, the time, the end."""
        with self._wake:
            submitted, self._submitted = self._submitted, []
            cancelled, self._cancelled = self._cancelled, []
        self.scheduler.add(submitted)
        for name, keep in cancelled:
            self.scheduler.end(name, keep)
        events = self.scheduler.overdue(time.monotonic())
        if self._cut is not None:
            out = list(self.scheduler.waiting)
            if time.monotonic() >= self._cut:
                out += self.scheduler.running.values()
            for job in out:
                self.scheduler.end(job.name)
                events.append(Event(job.name, failure=(503, "the server is shutting down")))
        return events

    def _start(self, plan: Plan) -> _UnderWay | None:
        """Tells the other ranks, and starts what is to be computed; None when there is nothing."""
        self.tell(plan.message())
        if not plan.requests:
            return None
        began = time.monotonic()
        return _UnderWay(plan, self.runner.start(plan), began)

    def _end(self, under_way: _UnderWay) -> list[Event]:
        """Waits for a step and takes its tokens."""
        plan = under_way.plan
        jobs = [plan.jobs[place] for place in plan.wanted]
        chosen: list[tuple[int | None, Logprob | None]] = []
        if jobs:
            chosen = under_way.step.read()
        else:
            under_way.step.wait()
        ended = time.monotonic()
        kind = "decode" if plan.answers else "prefill"
        self._steps[kind] += 1
        # steps overlap: a second counts for the one that is under way the longest
        self._seconds[kind] += ended - max(under_way.began, self._ended)
        self._ended = ended
        self._generated += len(jobs)
        self._recent.append((ended, len(plan.tokens) - plan.answers, len(jobs)))
        return self.scheduler.record(plan, {job.name: one for job, one in zip(jobs, chosen, strict=True)})

    def _deliver(self, events: list[Event], state: dict[str, Any] | None) -> None:
        with self._wake:
            events = [event for event in events if event.name in self._open]
            self._open.difference_update(event.name for event in events if event.last)
        if events or state is not None:
            self.deliver(events, state)

    def _publish(self, now_or_soon: bool = True) -> dict[str, Any] | None:
        """Makes the state anew and returns it; that of a busy engine only when it is old, or has closed or has room since."""
        now, closed = time.monotonic(), self._closed
        waiting, queue = self._line.waiting, self.scheduler.room.queue
        old = now_or_soon or now - self._published >= STATE_S
        if not old and self._state["closed"] == closed and not (waiting < queue <= self._state["queued"]):
            return None
        self._published = now
        while self._recent and self._recent[0][0] < now - WINDOW_S:
            self._recent.popleft()
        scheduler = self.scheduler
        window = min(WINDOW_S, max(now - self._began, 1e-3))
        prompts = [job for job in scheduler.running.values() if not job.prefilled]
        self._state = {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "queued": waiting,
            "prefilling": [
                {"request": job.name, "done": job.done, "shared": job.shared, "total": len(job.prompt)}
                for job in prompts
            ],
            "ranks": scheduler.allocator.world_size,
            "page_size": scheduler.allocator.page_size,
            "pages_per_rank": scheduler.allocator.pages,
            "pages": scheduler.pages(),
            "kept_prefixes": scheduler.kept,
            "tokens_per_second": {
                "prompt": round(sum(one[1] for one in self._recent) / window, 1),
                "generated": round(sum(one[2] for one in self._recent) / window, 1),
            },
            "totals": {
                "prompt_tokens": scheduler.prefill_tokens,
                "shared_tokens": scheduler.shared_tokens,
                "generated_tokens": self._generated,
                "steps": dict(self._steps),
                "seconds": {kind: round(seconds, 3) for kind, seconds in self._seconds.items()},
            },
            "uptime_s": round(now - self._began, 1),
            "closed": closed,
        }
        return self._state


def follow(runner: Runner, channel: Channel) -> None:
    """The loop of every other rank: makes the steps that rank 0 plans, until it says stop."""
    before: Computing | None = None
    while True:
        message = channel.receive()
        if message.get("stop"):
            break
        started = None
        if message:
            plan = Plan(**message)
            apply_changes(runner.allocator, plan.changes)
            if plan.requests:
                started = runner.start(plan)
        if before is not None:
            before.wait()
        before = started
    if before is not None:
        before.wait()
