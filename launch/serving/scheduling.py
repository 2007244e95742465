"""Which requests run, and what each step of the model does: continuous batching.

Owns the queue, admission to the cache, the sharing of prefixes, and the next step. Refuses to know how a step is computed, how
tokens are chosen and who is told (engine.py), and processes. Integers only, so it is tested without a model.

Note [Policy]
    Admission is in order of arrival. A request is let in when the cache has room for its prompt and every token it may still ask
    for, so what was let in always ends. It begins with the longest prefix that another request has computed, which is forked
    and not computed again; a request whose prefix is just being computed waits for it, and lets others pass. Prefixes of
    requests that have ended are kept until their room is needed, and go in the order of their last use.

    A step brings prompts or decodes, or both (Note [Short prompts]). Where they cannot come together they take turns: between two
    tokens of an answer there is at most one chunk of prompts. A chunk has at most `chunk` tokens, of one long prompt or of many
    short ones: half of it, or more where the others leave some, belongs to the prompt that waits longest, and the rest to those
    that are closest to their end.
    So a long prompt stalls neither answers nor short prompts, and is not starved by them. A decoding step brings one token of
    every request that is past its prompt.

Note [Who waits]
    A queue bounds those who wait beyond what can run. A request is counted when it comes, which may be in the middle of a step,
    and with many others: then it waits only if somebody before it does, if no place is left among those that run at a time, or if
    the cache has not as many pages as it needs by itself. The cache has what running requests do not need, each counted as if it
    shared nothing, and no less than what is neither used nor promised; kept prefixes are no obstacle. That is cautious where
    prefixes are shared: who was counted as one that waits may be let in by the next step, after which all are counted anew.
    However old a count is, there are never more requests than may run and may wait together.

Note [Short prompts]
    Where prompts of a few hundred tokens can be computed like decoding (`pieces`), a step of them takes not much longer than one
    that decodes, and a step around the ring two to ten times as long. So a prompt with no more to compute than PACKED_STEPS
    such steps bring is computed that way, however many of its kind there are, and takes turns with chunks of longer ones. Every
    piece reads all that its request has, so one with few new tokens and a long past counts as long from MOST_KEYS on.
    Where there are steps of single rows (`rows`), short prompts come together with the tokens of all answers: most of what a step
    of decoding takes is reading the weights, which serve the rows of prompts, too. In such a step every row of a prompt reads all
    that is before it, and an answer is read by one program per head: so prompts and answers must be no longer than MIXED_LENGTH,
    and the rows of prompts read no more than MIXED_KEYS together. What must not come together takes turns, as above.

Note [Steps ahead]
    A step may be planned before the tokens of the one before it are known: where they go is. Such a token is `carried`: the plan
    says which of the tokens that are being chosen it is. Whoever turns out to have ended with its last token, by a stop token or
    because nobody wants more, was then in one step too many, whose token is dropped, and whose key is cropped before the prefix
    is kept. What an ended request had is free at once, though a step that is under way still writes there: steps are computed
    in the order of their plans.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from ringattn.inference.forward_batch import MAX_DECODE_TOKENS as PIECE
from ringattn.inference.page_allocator import PageAllocator
from ringattn.launch.serving.prefixes import Digest, Prefixes, chain

PACKED_STEPS = 4
"""Packed steps that a prompt may take; beyond them a chunk around the ring is sooner done."""
MOST_KEYS = 2**20
"""Keys on a rank that the pieces of a packed step may read together: 4 GiB of each layer for 8 key heads of 128 in bf16."""
MIXED_LENGTH = 8192
"""Tokens, on all ranks, of the longest request of a mixed step: half of them, on one of two ranks, are 2 MiB to read for one
program, some 40 us by count."""
MIXED_KEYS = 2**18
"""Keys on a rank that the rows of prompts of a mixed step may read together: a fourth of MOST_KEYS, because every row reads."""
MOST_KEPT = 1024
"""Prefixes of ended requests that are kept at most: each costs some bookkeeping."""


class NeverFits(ValueError):
    """A request is larger than anything this server can hold; the message has the numbers."""


class QueueFull(RuntimeError):
    """There are too many requests already; the message has the numbers."""


@dataclass(frozen=True)
class Room:
    """What a scheduler can take, for those who ask it from afar.

    Attributes:
        capacity: Tokens that the cache of all ranks holds.
        running: Requests that run at a time.
        queue: Requests that wait behind them (Note [Who waits]).
        page_size: Tokens of a page, and so of the stretches of `Job.digests`.
        keep: Whether these are used.
    """

    capacity: int
    running: int
    queue: int
    page_size: int
    keep: bool

    def check_queue(self, jobs: int, waiting: int) -> None:
        """Refuses jobs that would wait, and for which the queue has no room.

        Args:
            jobs: How many.
            waiting: How many wait already.

        Raises:
            QueueFull: They are too many.
        """
        if waiting + jobs > self.queue:
            raise QueueFull(
                f"at most {self.queue} requests may wait, got {jobs} more beside {waiting}; try again later"
            )


@dataclass(frozen=True)
class Line:
    """Who can be let in at once, and who waits behind them (Note [Who waits]).

    Attributes:
        room: What the scheduler can take.
        places: Requests more that can be let in.
        pages: That the cache has for them.
        waiting: Requests that wait behind those.

    Example:
        >>> line = Line(Room(capacity=64, running=4, queue=1, page_size=4, keep=True), places=4, pages=16)
        >>> jobs = [Job(name, [1] * 20, 4) for name in range(3)]  # 6 pages each
        >>> line.after(jobs).waiting
        1
    """

    room: Room
    places: int
    pages: int
    waiting: int = 0

    def after(self, jobs: Iterable[Job]) -> Line:
        """The line when jobs have come to its end, in their order."""
        places, pages, waiting = self.places, self.pages, self.waiting
        for job in jobs:
            need = _pages(job.reserve, self.room.page_size)
            if waiting or not places or need > pages:
                waiting += 1
            else:
                places, pages = places - 1, pages - need
        return Line(self.room, places, pages, waiting)

    def admit(self, jobs: Iterable[Job]) -> Line:
        """As `after`, for jobs that may be refused: all of them, or none.

        Raises:
            QueueFull: The queue has no room for those of them that would wait.
        """
        after = self.after(jobs)
        self.room.check_queue(after.waiting - self.waiting, self.waiting)
        return after


@dataclass
class Job:
    """One request for one answer.

    Attributes:
        name: By which the engine knows it; whoever makes it gives each another one.
        prompt: Its tokens, at least one.
        max_tokens: New tokens it may ask for, at least one.
        deadline: Seconds on the clock of the scheduler after which it fails.
        sampling: How its tokens are chosen; not looked at here.
        stops: Tokens that end the answer, and are not part of it.
        digests: The chain of the prompt.
        arrived: When it came.
        tokens: The prompt and the answer so far.
        request: Its name in the cache, once it was let in.
        done: Tokens that are in the cache, or in a step that was planned.
        shared: Tokens of the prompt that were there already.
        pages: That it may come to, shared ones among them, once it was let in.
        coming: Tokens that are being chosen: of steps that were planned and not recorded.
        place: Of the last of them, among those that its step chooses.
    """

    name: int
    prompt: list[int]
    max_tokens: int
    deadline: float = float("inf")
    sampling: Any = None
    stops: frozenset[int] = frozenset()
    digests: list[Digest] = field(default_factory=list)
    arrived: float = 0.0
    tokens: list[int] = field(default_factory=list)
    request: int = -1
    done: int = 0
    shared: int = 0
    pages: int = 0
    coming: int = 0
    place: int = -1

    @property
    def reserve(self) -> int:
        """Tokens it may grow to."""
        return len(self.prompt) + self.max_tokens

    @property
    def prefilled(self) -> bool:
        """Whether its whole prompt is in the cache."""
        return self.done >= len(self.prompt)

    @property
    def goes_on(self) -> bool:
        """Whether there may be a token after those that are being chosen."""
        return len(self.tokens) + self.coming < self.reserve


class Event(NamedTuple):
    """What happened to a job.

    Attributes:
        name: Which one.
        token: A new token of the answer.
        finish: Why the answer has ended: "stop" or "length".
        failure: An HTTP status and a sentence, when there is no answer.
        shared: Tokens of the prompt that were in the cache already.
        details: What the sampler says about the token.
    """

    name: int
    token: int | None = None
    finish: str | None = None
    failure: tuple[int, str] | None = None
    shared: int = 0
    details: Any = None

    @property
    def last(self) -> bool:
        """Whether nothing follows."""
        return self.finish is not None or self.failure is not None


@dataclass
class Plan:
    """One step, as every rank makes it.

    Attributes:
        changes: What happens to the books before it: ("add_request", request, reserve), ("fork", request, parent, length, reserve),
            ("truncate", request, length, reserve) or ("free", request); `request` is the name that the books give or know.
        requests: Who brings tokens; none when there is nothing to compute.
        counts: How many each.
        tokens: Those tokens, one request after another.
        carried: Of each token its place among those that the step before chooses (Note [Steps ahead]), and -1 where `tokens` has
            it. Left out where it has all.
        wanted: Places of those who get a token from this step: all but those in the middle of their prompt.
        decodes: Whether each brings the token it got last; else they bring parts of prompts.
        packed: Whether these are computed like decoding (Note [Short prompts]).
        mixed: Whether some bring the token they got last, and others parts of prompts, in single rows (likewise).
        jobs: Rank 0 only: whose they are.
        answers: Rank 0 only: how many of them, the first ones, bring the token they got last.
    """

    changes: list[tuple[Any, ...]] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    carried: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    decodes: bool = False
    packed: bool = False
    mixed: bool = False
    jobs: list[Job] = field(default_factory=list)
    answers: int = 0

    def message(self) -> dict[str, Any]:
        """What the other ranks need of it, as JSON takes it."""
        names = ("changes", "requests", "counts", "tokens", "carried", "wanted", "decodes", "packed", "mixed")
        return {name: getattr(self, name) for name in names}


def apply_changes(allocator: PageAllocator, changes: Iterable[Sequence[Any]]) -> None:
    """Does to these books what was done to those of rank 0.

    Raises:
        RuntimeError: They name a request differently: they had diverged.
    """
    for what, request, *rest in changes:
        if what in ("free", "truncate"):
            getattr(allocator, what)(request, *rest)
            continue
        named = allocator.add_request(*rest) if what == "add_request" else allocator.fork(*rest)
        if named != request:
            raise RuntimeError(
                f"all ranks must name requests alike, got {named} here and {request} on rank 0; this is a bug"
            )


class Scheduler:
    """Decides every step (Note [Policy]).

    Args:
        allocator: The books of rank 0's cache.
        chunk: Tokens of prompts per step.
        most_running: Requests that are in the cache at a time.
        most_waiting: Requests that wait behind them at a time (Note [Who waits]).
        keep: Whether prefixes are shared, and kept when their requests have ended.
        pieces: Pieces of PIECE tokens that a packed step has room for; 0: there are no such steps (Note [Short prompts]).
        rows: Tokens that a mixed step has room for; 0: there are no such steps (likewise).
    """

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        chunk: int,
        most_running: int,
        most_waiting: int,
        keep: bool = True,
        pieces: int = 0,
        rows: int = 0,
    ) -> None:
        self.allocator, self.chunk, self.keep, self.pieces, self.rows = allocator, chunk, keep, pieces, rows
        self.most_running = most_running
        self.room = Room(
            allocator.pages * allocator.world_size * allocator.page_size,
            most_running,
            most_waiting,
            allocator.page_size,
            keep,
        )
        self.waiting: deque[Job] = deque()
        self.running: dict[int, Job] = {}
        self.prefill_tokens = self.decode_tokens = self.shared_tokens = 0
        self._ready = Prefixes(allocator.page_size)  # by request of the cache
        self._coming = Prefixes(allocator.page_size)  # by name of a job: prompts that are being computed
        self._kept: OrderedDict[int, list[int]] = (
            OrderedDict()
        )  # request of the cache -> its tokens, least recently used first
        self._of_request: dict[int, Job] = {}
        self._changes: list[tuple[Any, ...]] = []
        self._taken = 0  # pages that running requests may come to
        self._line: Line | None = None  # until something changes: most steps change nothing
        self._left = 0  # how often a request has left
        self._blocked: tuple[int, int] | None = None  # the job for which there was no room, and what had left by then
        self._decoded = self._packed = False

    @property
    def capacity(self) -> int:
        """Tokens that the cache of all ranks holds."""
        return self.room.capacity

    @property
    def kept(self) -> int:
        """How many prefixes of ended requests are kept."""
        return len(self._kept)

    def check(self, prompt: int, max_tokens: int) -> None:
        """Refuses what could never be let in.

        Args:
            prompt: Tokens of the prompt.
            max_tokens: New tokens asked for.

        Raises:
            NeverFits: The cache of all ranks is smaller.
        """
        if _pages(prompt + max_tokens, self.allocator.page_size) * self.allocator.page_size > self.capacity:
            raise NeverFits(
                f"prompt and max_tokens must fit into the cache of {self.capacity} tokens on {self.allocator.world_size} ranks, "
                f"got {prompt} + {max_tokens} = {prompt + max_tokens}; ask for less, or start the server with more cache"
            )

    def check_together(self, jobs: Sequence[Job]) -> None:
        """Refuses what could never come together.

        Raises:
            NeverFits: One is larger than the cache, or an empty server could not take them all at once.
        """
        for job in jobs:
            self.check(len(job.prompt), job.max_tokens)
        whole = self.allocator.pages * self.allocator.world_size
        waiting = Line(self.room, self.most_running, whole).after(jobs).waiting
        if waiting > self.room.queue:
            raise NeverFits(
                f"of answers that are asked for at once at most {self.room.queue} may wait for room, got {waiting} of "
                f"{len(jobs)} behind those that the cache of {self.capacity} tokens holds; ask for fewer, or for less"
            )

    def line(self) -> Line:
        """Who can be let in at once, and who waits behind them."""
        if self._line is None:
            places = self.most_running - len(self.running)
            if not places or (self.waiting and self._blocked == (self.waiting[0].name, self._left)):
                self._line = Line(self.room, 0, 0, len(self.waiting))
            else:
                pages = max(self.allocator.pages * self.allocator.world_size - self._taken, self.allocator.available)
                self._line = Line(self.room, places, pages).after(self.waiting)
        return self._line

    def add(self, jobs: Sequence[Job]) -> None:
        """Lets jobs wait, all of them or none; whether the queue has room for them is asked before (`Line.admit`).

        Raises:
            NeverFits: As `check`.
        """
        for job in jobs:
            self.check(len(job.prompt), job.max_tokens)
        for job in jobs:
            self._line = None
            job.tokens = list(job.prompt)
            if self.keep and not job.digests:
                job.digests = chain(job.prompt, self.allocator.page_size)
            self.waiting.append(job)

    def end(self, name: int, keep: bool = False) -> bool:
        """Takes a job out, wherever it is; its pages are free at once.

        Args:
            name: Which one.
            keep: Whether its prefix may serve others.

        Returns:
            Whether it was still here.
        """
        job = self.running.get(name)
        if job is not None:
            self._leave(job, keep)
            return True
        for job in self.waiting:
            if job.name == name:
                self._line = None
                self.waiting.remove(job)
                return True
        return False

    def overdue(self, now: float) -> list[Event]:
        """Takes out the jobs whose time is over."""
        late = [job for job in (*self.running.values(), *self.waiting) if job.deadline <= now]
        events = []
        for job in late:
            where = "waited for room" if job.request < 0 else "ran"
            limit = job.deadline - job.arrived
            message = f"the request {where} until its time of {limit:.0f} s was over; ask for less, or try later"
            events.append(Event(job.name, failure=(503, message)))
            self.end(job.name, keep=True)
        return events

    def plan(self) -> Plan | None:
        """The next step; None when there is nothing to do.

        The books have been changed when it returns, and the tokens count as brought: compute it, then call `record`. One more
        may be planned in between (Note [Steps ahead]).
        """
        self._admit()
        prompts: list[Job] = []
        answers: list[Job] = []
        for job in self.running.values():
            prompt = len(job.prompt)
            if job.done < prompt:
                prompts.append(job)
            elif len(job.tokens) + job.coming < prompt + job.max_tokens:
                answers.append(job)
        plan = Plan(changes=self._changes)
        self._changes = []
        short, long = self._by_length(prompts)
        along = self._share_beside(answers, short)
        if answers and not (self._decoded and (long or (short and not along))):
            self._decoded = True
            plan.decodes, plan.mixed = not along, bool(along)
            self._packed = self._packed or plan.mixed
            self._bring_answers(plan, answers)
            shares = along
            self.decode_tokens += len(answers)
            self.prefill_tokens += sum(share for _, share in along)
        elif prompts:
            self._decoded = False
            # both kinds take turns
            self._packed = plan.packed = bool(short) and not (self._packed and long)
            if plan.packed:
                pieces = max(1, min(self.pieces, self.chunk // PIECE))
                shares = self._share(self._together(short), pieces * PIECE, PIECE)
            else:
                shares = self._share(long, self.chunk, 1)
            self.prefill_tokens += sum(share for _, share in shares)
        elif plan.changes:
            return plan
        else:
            return None
        for job, share in shares:
            plan.requests.append(job.request)
            plan.counts.append(share)
            plan.jobs.append(job)
            plan.tokens += job.tokens[job.done : job.done + share]
            if plan.answers:
                plan.carried += [-1] * share
            job.done += share
            if job.prefilled:
                job.coming, job.place = job.coming + 1, len(plan.wanted)
                plan.wanted.append(len(plan.jobs) - 1)
        if max(plan.carried, default=-1) < 0:
            plan.carried = []
        return plan

    def _bring_answers(self, plan: Plan, answers: list[Job]) -> None:
        """Begins a step with the next token of each answer."""
        plan.answers, plan.jobs = len(answers), list(answers)
        plan.requests = [job.request for job in answers]
        plan.counts = [1] * len(answers)
        plan.wanted = list(range(len(answers)))
        for place, job in enumerate(answers):
            known = job.done < len(job.tokens)
            plan.tokens.append(job.tokens[job.done] if known else 0)
            plan.carried.append(-1 if known else job.place)
            job.done += 1
            job.coming += 1
            job.place = place

    @property
    def long_next(self) -> bool:
        """Whether the next step may be one around the ring, as far as can be told without planning it."""
        if not self._decoded and any(job.prefilled and job.goes_on for job in self.running.values()):
            return False
        coming = [job for job in self.running.values() if not job.prefilled]
        return bool(self._by_length(coming)[1]) or (
            len(self.running) < self.most_running and bool(self._by_length(list(self.waiting))[1])
        )

    def record(self, plan: Plan, chosen: Mapping[int, tuple[int | None, Any]]) -> list[Event]:
        """Takes the tokens that a step gave.

        Args:
            plan: The step.
            chosen: By name of a job: its token, or None when the model gave no numbers, and what is to be said about it. Jobs
                that have been ended since may be missing.

        Returns:
            What happened, in the order of the plan.
        """
        events = []
        for job in [plan.jobs[place] for place in plan.wanted]:
            if job.name not in self.running:
                continue
            job.coming -= 1
            if len(job.tokens) == len(job.prompt):
                self._coming.drop(job.name)
            token, details = chosen[job.name]
            if token is None:
                message = (
                    "the model's scores for the next token are not numbers: its dtype may be too narrow for this prompt"
                )
                events.append(Event(job.name, failure=(500, message)))
                self._leave(job, keep=False)
                continue
            finish = None
            if token in job.stops:
                finish, shown = "stop", None
            else:
                shown = token
                job.tokens.append(token)
                if len(job.tokens) >= len(job.prompt) + job.max_tokens:
                    finish = "length"
            events.append(Event(job.name, shown, finish, None, job.shared, None if shown is None else details))
            if finish:
                self._leave(job, keep=True)
        if self.keep:
            for job in plan.jobs[plan.answers :]:
                if job.name in self.running:
                    brought = min(job.done, len(job.prompt))
                    self._ready.add(job.request, job.digests[: brought // self.allocator.page_size])
        return events

    def pages(self) -> dict[str, list[int]]:
        """Pages of each rank: those of running requests, those of kept prefixes alone, and free ones."""
        running = [len(pages) for pages in self._pages_of(self._of_request)]
        free = list(self.allocator.free_pages)
        kept = [self.allocator.pages - f - r for f, r in zip(free, running, strict=True)]
        return {"running": running, "kept": kept, "free": free}

    def _by_length(self, prompts: list[Job]) -> tuple[list[Job], list[Job]]:
        """Those whose rest is computed in packed steps, and the others (Note [Short prompts])."""
        short, long = [], []
        for job in prompts:
            pieces = _pages(len(job.prompt) - job.done, PIECE)
            few = pieces <= PACKED_STEPS * self.pieces and self._keys(job) <= MOST_KEYS * self.allocator.world_size
            (short if few else long).append(job)
        return short, long

    def _share_beside(self, answers: list[Job], short: list[Job]) -> list[tuple[Job, int]]:
        """How many tokens of short prompts come together with a token of each answer; none where that must not be."""
        left = min(self.rows - len(answers), self.chunk)
        if not (answers and short) or left <= 0 or max(len(job.tokens) for job in answers) >= MIXED_LENGTH:
            return []
        prompts, keys = [], 0
        for job in short:
            keys += min(len(job.prompt) - job.done, left) * len(job.prompt)
            if len(job.prompt) > MIXED_LENGTH or keys > MIXED_KEYS * self.allocator.world_size:
                break
            prompts.append(job)
        return self._share(prompts, left, 1) if prompts else []

    def _keys(self, job: Job) -> int:
        """Keys that the pieces of a prompt read in one step, on all ranks."""
        return min(_pages(len(job.prompt) - job.done, PIECE), self.pieces) * len(job.prompt)

    def _together(self, short: list[Job]) -> list[Job]:
        """As many short prompts as may share a step, the oldest first."""
        sums = accumulate(map(self._keys, short))
        return [
            job
            for job, keys in zip(short, sums, strict=True)
            if job is short[0] or keys <= MOST_KEYS * self.allocator.world_size
        ]

    def _share(self, prompts: list[Job], left: int, grain: int) -> list[tuple[Job, int]]:
        """How many tokens each prompt brings to this step: an entry for each that brings any.

        Args:
            prompts: Those that may, the oldest first.
            left: Tokens that the step has room for; a multiple of grain.
            grain: Each takes a multiple of so many.
        """
        shares: dict[int, int] = {}

        def give(job: Job, most: int) -> None:
            nonlocal left
            had = shares.get(job.name, 0)
            missing = len(job.prompt) - job.done - had
            share = min(missing, most)
            if share < missing:
                # whole pages, so that few are left with a gap
                over = (job.done + had + share) % self.allocator.page_size
                share = share - over if share > over else share
            if share > 0:
                shares[job.name] = had + share
                left -= (_pages(had + share, grain) - _pages(had, grain)) * grain

        oldest, *others = prompts
        give(oldest, left if not others else max(1, left // 2))
        for job in sorted(others, key=lambda job: len(job.prompt) - job.done):
            give(job, left)
        give(oldest, left + -shares.get(oldest.name, 0) % grain)
        return [(job, shares[job.name]) for job in prompts if job.name in shares]

    def _admit(self) -> None:
        """Lets in whom there is room for, in order of arrival, but those who wait for a prefix."""
        passed: list[Job] = []
        while self.waiting and len(self.running) < self.most_running:
            job = self.waiting[0]
            if self._blocked == (job.name, self._left):
                break
            parent, length = self._longest(job)
            if self.keep and self._coming.find(job.digests)[1] > length:
                passed.append(self.waiting.popleft())
                continue
            if not self._let_in(job, parent, length):
                self._blocked, self._line = (job.name, self._left), None
                break
            self.waiting.popleft()
        self.waiting.extendleft(reversed(passed))

    def _let_in(self, job: Job, parent: int | None, length: int) -> bool:
        """Lets a job in as a fork or, where only that has room, afresh; False when there is no room."""
        size = self.allocator.page_size
        users = set(self._of_request)
        if parent is not None and self._make_room(_pages(job.reserve - length, size), users | {parent}):
            job.request = self._change("fork", parent, length, job.reserve)
            if parent in self._kept:
                self._kept.move_to_end(parent)
        elif (parent is None or parent in self._kept) and self._make_room(_pages(job.reserve, size), users):
            length = 0
            job.request = self._change("add_request", job.reserve)
        else:
            return False
        job.done = job.shared = length
        job.pages = _pages(length, size) + _pages(job.reserve - length, size)
        self._taken += job.pages
        self.shared_tokens += length
        self.running[job.name] = self._of_request[job.request] = job
        if self.keep:
            self._coming.add(job.name, job.digests)
            self._ready.add(job.request, job.digests[: length // size])
        return True

    def _make_room(self, pages: int, spared: set[int]) -> bool:
        """Lets go of kept prefixes, longest unused first, until so many pages can be promised; of none when that is in vain."""
        if self.allocator.available >= pages:
            return True
        owed = sum(self.allocator.free_pages) - self.allocator.available
        if self.allocator.pages * self.allocator.world_size - sum(map(len, self._pages_of(spared))) - owed < pages:
            return False
        for request in [request for request in self._kept if request not in spared]:
            self._forget(request)
            if self.allocator.available >= pages:
                return True
        raise AssertionError("letting go of all prefixes must make the room that was counted")

    def _longest(self, job: Job) -> tuple[int | None, int]:
        """Whose prefix to begin with, and how much of it; the prompt's last token is always computed: its logits are wanted."""
        found, length = self._ready.find(job.digests) if self.keep else (None, 0)
        if not isinstance(found, int):
            return None, 0
        theirs = self._kept[found] if found in self._kept else self._of_request[found].tokens
        most = min(len(job.prompt) - 1, self.allocator.length(found), len(theirs))
        while length < most and theirs[length] == job.prompt[length]:
            length += 1
        return found, min(length, most)

    def _leave(self, job: Job, keep: bool) -> None:
        """Takes a running job out, and keeps its prefix if that is worth it."""
        length = min(self.allocator.length(job.request), len(job.tokens))
        self._coming.drop(job.name)
        del self.running[job.name], self._of_request[job.request]
        self._left += 1
        self._taken -= job.pages
        if not (self.keep and keep and length >= self.allocator.page_size):
            self._ready.drop(job.request)
            self._change("free", job.request)
            return
        self._change("truncate", job.request, length, length)  # what it had reserved beyond that is given back
        self._kept[job.request] = job.tokens[:length]
        known = job.digests[: length // self.allocator.page_size]
        self._ready.add(job.request, chain(self._kept[job.request], self.allocator.page_size, known))
        if len(self._kept) > MOST_KEPT:
            self._forget(next(iter(self._kept)))

    def _forget(self, request: int) -> None:
        """Lets go of a kept prefix."""
        del self._kept[request]
        self._ready.drop(request)
        self._change("free", request)

    def _change(self, what: str, *rest: int) -> int:
        """Changes the books, and notes it for the other ranks."""
        self._line = None
        if what in ("free", "truncate"):
            getattr(self.allocator, what)(*rest)
            self._changes.append((what, *rest))
            return rest[0]
        request = self.allocator.add_request(*rest) if what == "add_request" else self.allocator.fork(*rest)
        self._changes.append((what, request, *rest))
        return request

    def _pages_of(self, requests: Iterable[int]) -> list[set[int]]:
        """Pages of requests, by rank, each once."""
        ranks = range(self.allocator.world_size)
        return [set().union(*(self.allocator.table(request, rank).pages for request in requests)) for rank in ranks]


def _pages(tokens: int, size: int) -> int:
    return -(-tokens // size)
