"""Scheduling of requests, and the contents of each step: continuous batching. Integers only, so it is tested without a model.

Note [Scheduling policy]
    Requests start in the order of their arrival, as soon as pages are available for the prompt, and for the next HEADROOM tokens of
    each answer. An answer takes a page whenever it has filled one. A request starts with a fork of the longest computed prefix; if
    its prefix is still being computed, it waits, and later ones may pass. Prefixes of finished requests are kept until their pages
    are needed; the least recently used go first, each from its end.

    If no page is left for an answer, the youngest request is preempted: its whole pages become a kept prefix, and it waits again,
    in the place of its arrival. Later it computes what is no longer kept, as a prompt, and goes on. Two requests cannot preempt
    each other, and the oldest one is never preempted: it gets every page if it must, so it ends, and then another is the oldest.
    The youngest has also computed least, so that least is computed again (Note [Victims]).

    Younger requests may pass one that waits for pages, where they fit. They may run for PASSING_STEPS steps in which it would fit
    without them. Then they are preempted, the youngest first, until it fits.

    A step computes prompts, or decodes, or both (Note [Short prompts]); otherwise they alternate, and between two tokens of an
    answer there is at most one chunk of prompts. Where no answer waits, a step has a chunk for each rank: a chunk divided among
    ranks leaves each too few rows to be fast. Half of a step, or more if the others leave some, belongs to the oldest prompt,
    and the rest to those closest to their end: a long prompt stalls neither answers nor short prompts, nor do they starve it.

Note [Short prompts]
    A packed step computes prompts like decoding, in `pieces`, and takes little longer than decoding; a step around the ring
    takes two to ten times as long. So a prompt whose rest fits into PACKED_STEPS such steps is computed that way. Every piece
    reads all keys of its request: a prompt with a long past counts as long from MAX_KEYS on.

    A mixed step computes short prompts, in single `rows`, with the tokens of all answers, because reading the weights takes
    most of a decoding step. Every row of a prompt reads all keys before it, and an answer is read by one program per head, so
    MIXED_LENGTH and MIXED_KEYS bound them; requests beyond these limits alternate.

Note [Victims]
    Tokens that were computed again on average, in 12 simulations of 80 requests of about 150 + 550 tokens in a cache for 7,000
    (the slow test in tests/launch/serve/test_admission.py); each policy preempts only requests that are younger than the one that
    needs a page, or that one itself.

        HEADROOM      youngest  fewest tokens  most tokens
        0 tokens        32,237         40,178       41,893
        128 tokens       4,968          5,080        7,251

Note [Asynchronous steps]
    On GPUs (`ModelRunner.ahead`) the next step is planned, broadcast and started before the tokens of the running one are read,
    recorded and delivered. The plan refers to such a token by its index among those that the previous step samples
    (`from_previous`). A request that turns out to have ended was in one step too many: its token is dropped, and its key is
    truncated before the prefix is kept. Its pages are free at once, although a running step still writes there: steps are
    computed in the order of their plans. At most one step runs when another one is started. A request that is preempted while a
    token of it is being sampled keeps that token, and may start again when it is known.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, count
from typing import Any

from ringattn.inference.forward_batch import MAX_DECODE_TOKENS as PIECE
from ringattn.inference.page_allocator import PageAllocator
from ringattn.launch.serve.kept_prefixes import KeptPrefixes
from ringattn.launch.serve.messages import NOT_FINITE, TIME_LIMIT, Event, StepCommand
from ringattn.launch.serve.prefix_cache import Digest, HostBlock, PrefixIndex, prefix_digests
from ringattn.launch.serve.sampling import Logprob, Sampling

PACKED_STEPS = 4  # packed steps that a prompt may take; beyond them a chunk around the ring is faster
MAX_KEYS = 2**20
"""Keys on a rank that the pieces of a packed step may read together: 4 GiB of each layer for 8 key heads of 128 in bf16."""
MIXED_LENGTH = 8192
"""Tokens, on all ranks, of the longest request of a mixed step: half of them are 2 MiB to read for one program, some 40 us."""
MIXED_KEYS = 2**18
"""Keys on a rank that the rows of prompts of a mixed step may read together: a fourth of MAX_KEYS, because every row reads."""
PASSING_STEPS = 256  # steps that younger requests may delay one that waits for pages: some seconds, or a short answer
HEADROOM = 128
"""Tokens of each answer for which pages are left when a request starts beside others: fewer lead to many preemptions."""
SCORED = 256
"""Tokens that a prompt brings to a step if logits of all of them are wanted: 128 MiB of a vocabulary of 2**17 in fp32."""


@dataclass
class AnswerRequest:
    """Request for one answer."""

    id: int
    prompt: list[int]
    max_tokens: int
    deadline: float = float("inf")  # time, on the clock of the scheduler, after which it fails
    sampling: Sampling | None = None
    stops: frozenset[int] = frozenset()
    digests: list[Digest] = field(default_factory=list)  # of the prompt (`prefix_digests`)
    # whether the logprobs of the prompt's tokens are wanted. Then all of it is computed, in steps around the ring: these give
    # the logits of all rows, a cached prefix has none.
    score_prompt: bool = False
    arrived: float = 0.0  # time at which it came; 0: when the engine gets it
    # whether its next token has to wait for the mask of its grammar (Note [Grammars] of grammar.py)
    waits: bool = False
    tokens: list[int] = field(default_factory=list)  # the prompt and the answer so far
    order: int = -1  # its place among all requests by arrival
    cache_id: int = -1  # -1 while it waits
    prefill_length: int = 0  # tokens that it computes as a prompt: after a preemption also the answer so far
    reserved: int = 0  # tokens that pages are reserved for
    num_computed: int = 0  # tokens that are in the cache, or in a step that was planned
    num_cached: int = 0  # tokens of the prompt that were in the cache at its first admission
    num_scored: int = 0  # tokens of a scored prompt after which the logprobs of the next one are known
    preempted: int = 0  # how often it was preempted
    kept_id: int = -1  # cache id of the prefix that was kept then, while it waits
    ended: bool = False  # whether it is neither running nor waiting any more
    loads: list[HostBlock] = field(default_factory=list)  # pages that it still takes from host memory
    unrecorded: int = 0  # steps with tokens of it that were planned and not recorded
    pending: int = 0  # tokens that are being sampled: of these steps
    output_index: int = -1  # index of the last of them among the tokens that its step samples

    @property
    def constrained(self) -> bool:
        """Whether a grammar decides which tokens may be sampled."""
        return self.sampling is not None and self.sampling.grammar is not None

    @property
    def max_length(self) -> int:
        """Length of the prompt and all tokens that may be generated."""
        return len(self.prompt) + self.max_tokens

    @property
    def missing(self) -> int:
        """Tokens to compute as a prompt that are neither in the cache nor in a step that was planned."""
        return max(0, self.prefill_length - self.num_computed)

    @property
    def has_more(self) -> bool:
        """Whether there may be a token after those that are being sampled."""
        return len(self.tokens) + self.pending < self.max_length


class ScheduledStep(StepCommand, tag=StepCommand.__name__, dict=True):
    """A step as rank 0 plans it; the other ranks get it as a StepCommand, without these attributes."""

    def __post_init__(self) -> None:
        self.requests: list[AnswerRequest] = []
        self.answers = 0  # the number of requests, the first ones, that compute their last token
        # for each scored request the tokens after its rows, without the one after the prompt
        self.targets: list[list[int]] = []

    def add_answers(self, answers: list[AnswerRequest]) -> None:
        """Add the next token of each answer; one that is not known yet comes from the previous step."""
        self.answers, self.requests = len(answers), list(answers)
        self.cache_ids = [request.cache_id for request in answers]
        self.counts, self.wanted = [1] * len(answers), list(range(len(answers)))
        for place, request in enumerate(answers):
            known = request.num_computed < len(request.tokens)
            self.tokens.append(request.tokens[request.num_computed] if known else 0)
            self.from_previous.append(-1 if known else request.output_index)
            request.num_computed += 1
            request.unrecorded += 1
            request.pending += 1
            request.output_index = place
            request.waits = request.constrained

    def add_prompt(self, request: AnswerRequest, count: int) -> None:
        """Add the next tokens of a prompt."""
        start = request.num_computed
        self.cache_ids.append(request.cache_id)
        self.counts.append(count)
        self.requests.append(request)
        self.tokens += request.tokens[start : start + count]
        self.from_previous += [-1] * count
        scores = request.score_prompt and start >= request.num_scored  # rows before it were scored before a preemption
        if scores and (targets := request.prompt[start + 1 : start + count + 1]):
            self.scored.append(len(self.requests) - 1)
            self.targets.append(targets)
        request.num_computed += count
        request.unrecorded += 1
        if not request.missing:
            request.pending, request.output_index = request.pending + 1, len(self.wanted)
            request.waits = request.constrained
            self.wanted.append(len(self.requests) - 1)


def apply_changes(allocator: PageAllocator, changes: Iterable[Sequence[Any]]) -> None:
    """Apply the changes of rank 0's page allocator to that of this rank; raise RuntimeError if the two have diverged."""
    for what, cache_id, *rest in changes:
        if what in ("free", "truncate", "reserve", "place"):
            getattr(allocator, what)(cache_id, *rest)
        elif (named := getattr(allocator, what)(*rest)) != cache_id:
            raise RuntimeError(
                f"page allocators of all ranks must give a request the same id, got {named} here and {cache_id} on rank 0; "
                "this is a bug"
            )


class Scheduler:
    """Plans every step (Note [Scheduling policy])."""

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        chunk: int,  # tokens of prompts in a step around the ring that delays answers; others have as many for each rank
        max_running: int,
        keep: bool = True,  # whether prefixes are shared, and kept when their requests have ended
        pieces: int = 0,  # pieces of PIECE tokens that a packed step has room for; 0: there are no such steps
        rows: int = 0,  # tokens that a mixed step has room for; 0: there are no such steps
        kept: KeptPrefixes | None = None,  # of this allocator; None: without host memory
    ) -> None:
        self.allocator, self.chunk, self.keep, self.pieces, self.rows = allocator, chunk, keep, pieces, rows
        self.max_running = max_running
        self.kept = kept or KeptPrefixes(allocator)
        self._all_pages = allocator.pages * allocator.world_size
        self.waiting: list[AnswerRequest] = []  # the oldest first, and so are running ones
        self.running: dict[int, AnswerRequest] = {}
        self.prefill_tokens = self.shared_tokens = self.host_tokens = self.preemptions = 0
        self.admitted: list[AnswerRequest] = []  # for the first time, since its reader has cleared it
        self._computing = PrefixIndex(allocator.page_size)  # by request id: prompts that are being computed
        self._by_cache_id: dict[int, AnswerRequest] = {}
        self._orders = count()
        # how often pages, a place, or the end of a prompt or of an older request may have let others start
        self._releases = 0
        self._refused: dict[int, tuple[int, _Refusal]] = {}  # requests that could not start: _releases then, and why
        self._used: list[set[int]] | None = None  # pages of running requests by rank, while requests are admitted
        # a request that waits for pages, and steps that younger ones have delayed it
        self._delay: tuple[int, int] = (-1, 0)
        self._fits_beside_older = (-1, 0, False)  # the same request, _releases then, and whether younger ones delay it
        self._decoded = self._packed = False

    def add(self, requests: Sequence[AnswerRequest]) -> None:
        """Add requests to the queue; ValueError if one is larger than the cache."""
        for request in requests:
            if (pages := _pages(request.max_length, self.allocator.page_size)) > self._all_pages:
                raise ValueError(
                    f"prompt and max_tokens must fit into the {self._all_pages} pages of the cache, got {request.max_length} "
                    f"tokens, which need {pages}; ask for less"
                )
            request.tokens, request.prefill_length = list(request.prompt), len(request.prompt)
            request.order = next(self._orders)
            if self.keep and not request.digests:
                request.digests = prefix_digests(request.prompt, self.allocator.page_size)
            self.waiting.append(request)

    def remove(self, request_id: int, keep: bool = False) -> bool:
        """Remove a request, whose prefix may serve others (`keep`), and return whether it was found; its pages are free at once."""
        waiting = (request for request in self.waiting if request.id == request_id)
        if (request := self.running.get(request_id) or next(waiting, None)) is None:
            return False
        self._remove(request, keep)
        return True

    def remove_expired(self, now: float) -> list[Event]:
        """Remove the requests whose deadline has passed."""
        events = []
        for request in [request for request in (*self.running.values(), *self.waiting) if request.deadline <= now]:
            where = "waited for room" if request.cache_id < 0 else "ran"
            limit = request.deadline - request.arrived
            message = f"the request {where} until its time of {limit:.0f} s was over; ask for less, or try later"
            events.append(Event(request.id, failure=(503, message, TIME_LIMIT)))
            self.remove(request.id, keep=True)
        return events

    def plan(self) -> ScheduledStep | None:
        """Return the next step; None when there is nothing to do.

        The tokens count as computed when it returns: run the step, then call `record`. One more may be planned in between.
        """
        self._reserve_next()
        self._admit()
        prompts, answers, loading = [], [], []
        for request in self.running.values():
            # `missing` and `has_more`, whose calls would take longer than the rest of the loop
            if request.loads:
                loading.append(request)
            elif request.waits:
                continue
            elif request.num_computed < request.prefill_length:
                prompts.append(request)
            elif len(request.tokens) + request.pending < len(request.prompt) + request.max_tokens:
                answers.append(request)
        short, long = self._split_by_length(prompts)
        mixed = self._split_mixed(answers, short)
        loads = [load for request in loading for load in self._load(request)]
        changes, saves = self.kept.take_changes()
        plan = ScheduledStep(changes=changes, saves=saves, loads=loads)
        if answers and not (self._decoded and (long or (short and not mixed))):
            self._decoded = True
            plan.decodes, plan.mixed = not mixed, bool(mixed)
            self._packed = self._packed or plan.mixed
            plan.add_answers(answers)
            shares = mixed
        elif prompts:
            self._decoded = False
            # both kinds alternate
            self._packed = plan.packed = bool(short) and not (self._packed and long)
            if plan.packed:
                pieces = max(1, min(self.pieces, self.chunk // PIECE))
                shares = self._split_step(self._fit_packed(short), pieces * PIECE, PIECE)
            else:
                shares = self._split_step(long, self.chunk if answers else self.chunk * self.allocator.world_size, 1)
        else:
            return plan if plan.changes or plan.saves or plan.loads else None
        for request, share in shares:
            plan.add_prompt(request, share)
        self.prefill_tokens += len(plan.tokens) - plan.answers
        if max(plan.from_previous) < 0:
            plan.from_previous = []
        return plan

    @property
    def may_prefill_next(self) -> bool:
        """Whether the next step may be prefill around the ring, as far as is known without planning it."""
        running = self.running.values()
        if not self._decoded and any(not (one.missing or one.waits) and one.has_more for one in running):
            return False
        candidates = [one for one in running if one.missing and not one.loads and not one.waits]
        if len(running) < self.max_running:
            candidates += self.waiting
        return bool(self._split_by_length(candidates)[1])

    def record(
        self,
        plan: ScheduledStep,
        chosen: Sequence[tuple[int | None, Logprob | None]],
        scores: Sequence[tuple[Logprob, ...] | None] = (),
    ) -> list[Event]:
        """Record the tokens that a step has sampled, and return the events in the order of the plan.

        Args:
            chosen: For each of `plan.wanted` its token, None when the logits are not finite, and its logprobs.
            scores: Logprobs of `plan.targets`; None when the logits are not finite.
        """
        events = []
        for request in plan.requests:
            request.unrecorded -= 1
        for place, logprobs in zip(plan.scored, scores, strict=True):
            if (request := plan.requests[place]).ended:
                continue
            if logprobs is None:
                events.append(self._fail(request))
                continue
            request.num_scored += plan.counts[place]
            events.append(Event(request.id, num_cached=request.num_cached, scores=logprobs))
        for place, (token, details) in zip(plan.wanted, chosen, strict=True):
            if (request := plan.requests[place]).ended:
                continue
            request.pending -= 1
            if len(request.tokens) == request.prefill_length:
                self._computing.drop(request.id)
                self._releases += 1
            if token is None:
                events.append(self._fail(request))
                continue
            finish = None
            if token in request.stops:
                finish, token, details = "stop", None, None
            else:
                request.tokens.append(token)
                if len(request.tokens) >= len(request.prompt) + request.max_tokens:
                    finish = "length"
            events.append(Event(request.id, token, finish, None, request.num_cached, details))
            if finish:
                self._remove(request, keep=True)
        if self.keep and len(plan.requests) > plan.answers:
            # a part of a prompt is enough for those that wait for no more of it
            self._refused = {name: why for name, why in self._refused.items() if why[1] is not _Refusal.PREFIX}
            for request in plan.requests[plan.answers :]:
                if request.id in self.running:
                    computed = min(request.num_computed, request.prefill_length)
                    self.kept.index.add(request.cache_id, request.digests[: computed // self.allocator.page_size])
        return events

    def _fail(self, request: AnswerRequest) -> Event:
        self._remove(request, keep=False)
        message = "the model's scores for the next token are not numbers: its dtype may be too narrow for this prompt"
        return Event(request.id, failure=(500, message, NOT_FINITE))

    def pages(self) -> dict[str, list[int]]:
        """Return the pages of each rank: of running requests, of kept prefixes only, and free ones."""
        running = [len(pages) for pages in self.kept.pages_of(self._by_cache_id)]
        free = list(self.allocator.free_pages)
        kept = [self.allocator.pages - f - r for f, r in zip(free, running, strict=True)]
        return {"running": running, "kept": kept, "free": free}

    def _split_by_length(self, prompts: Iterable[AnswerRequest]) -> tuple[list[AnswerRequest], list[AnswerRequest]]:
        """Split prompts into those whose rest is computed in packed steps, and the others (Note [Short prompts])."""
        short, long = [], []
        for request in prompts:
            pieces = _pages(request.missing, PIECE)
            few = pieces <= PACKED_STEPS * self.pieces and self._keys(request) <= MAX_KEYS * self.allocator.world_size
            (short if few and not request.score_prompt else long).append(request)
        return short, long

    def _split_mixed(self, answers: list[AnswerRequest], short: list[AnswerRequest]) -> list[tuple[AnswerRequest, int]]:
        """Return the tokens of short prompts that share a step with a token of each answer; empty if none may."""
        left = min(self.rows - len(answers), self.chunk)
        if not (answers and short) or left <= 0 or max(len(request.tokens) for request in answers) >= MIXED_LENGTH:
            return []
        prompts, keys = [], 0
        for request in short:
            keys += min(request.missing, left) * request.prefill_length
            if request.prefill_length > MIXED_LENGTH or keys > MIXED_KEYS * self.allocator.world_size:
                break
            prompts.append(request)
        return self._split_step(prompts, left, 1) if prompts else []

    def _keys(self, request: AnswerRequest) -> int:
        """Return the keys that the pieces of a prompt read in one step, on all ranks."""
        return min(_pages(request.missing, PIECE), self.pieces) * request.prefill_length

    def _fit_packed(self, short: list[AnswerRequest]) -> list[AnswerRequest]:
        """Return as many short prompts as may share a step, the oldest first."""
        most, sums = MAX_KEYS * self.allocator.world_size, accumulate(map(self._keys, short))
        return [request for request, keys in zip(short, sums, strict=True) if request is short[0] or keys <= most]

    def _split_step(self, prompts: list[AnswerRequest], left: int, granularity: int) -> list[tuple[AnswerRequest, int]]:
        """Divide a step with room for `left` tokens among prompts, the oldest first, each a multiple of granularity."""
        shares: dict[int, int] = {}

        def assign(request: AnswerRequest, most: int) -> None:
            nonlocal left
            had = shares.get(request.id, 0)
            missing = request.missing - had
            share = min(missing, most)
            if request.score_prompt:
                # up to where it was scored before a preemption, in a step without scores
                again = request.num_scored - request.num_computed
                share = min(share, (again if again > 0 else SCORED) - had)
            if share < missing:
                # whole pages, so that few stay partly empty
                over = (request.num_computed + had + share) % self.allocator.page_size
                share = share - over if share > over else share
            if share > 0:
                shares[request.id] = had + share
                left -= (_pages(had + share, granularity) - _pages(had, granularity)) * granularity

        oldest, *others = prompts
        assign(oldest, max(1, left // 2) if others else left)
        for request in sorted(others, key=lambda request: request.missing):
            assign(request, left)
        assign(oldest, left + -shares.get(oldest.id, 0) % granularity)
        return [(request, shares[request.id]) for request in prompts if request.id in shares]

    def _reserve_next(self) -> None:
        """Reserve a page for the next token of each answer that has filled its last one; preempt the youngest without one."""
        for request in list(self.running.values()):
            if request.num_computed < request.reserved or request.missing or not request.has_more:
                continue
            while request.cache_id >= 0 and not self.kept.evict(1, urgent=True):
                self._preempt(self._victim(request))
            if request.cache_id >= 0:
                self._reserve(request, request.num_computed + self.allocator.page_size)

    def _victim(self, request: AnswerRequest) -> AnswerRequest:
        """Return the request that is preempted for another one: the youngest, which may be that one (Note [Victims])."""
        del request
        return next(reversed(self.running.values()))

    def _reserve(self, request: AnswerRequest, tokens: int) -> None:
        request.reserved = min(tokens, request.max_length)
        self.kept.apply("reserve", request.cache_id, request.reserved)

    def _admit(self) -> None:
        """Admit requests for which there are pages, the oldest first (Note [Scheduling policy])."""
        self.kept.trim()
        self._used = None
        first: AnswerRequest | None = None  # the oldest one without pages
        for request in self.waiting[: self.max_running]:
            if len(self.running) >= self.max_running:
                first = first or request
                break
            known, result = self._refused.get(request.id, (-1, None))
            if known != self._releases:
                result = self._try(request, first is not None)
            if result is _Refusal.EVICTS:
                break
            if result is _Refusal.PAGES:
                first = first or request
        if first is not None and self._count_delay(first):
            self._admit()  # an older one may have waited for a prefix that is no longer being computed

    def _try(self, request: AnswerRequest, passing: bool) -> _Refusal | None:
        """Start a waiting request, or return why not; passing: older ones wait, and their kept prefixes stay."""
        if request.unrecorded:
            return _Refusal.PAGES
        size = self.allocator.page_size
        request.prefill_length = len(request.tokens)
        if self.keep and len(request.digests) < len(request.tokens) // size:
            request.digests = prefix_digests(request.tokens, size, request.digests)
        result = _Refusal.PAGES
        if self._is_being_computed(request):
            result = _Refusal.PREFIX
        elif (start := self._find_start(request, self.running.values(), passing)) is not None:
            result = self._start(request, start, passing)
        if result in (_Refusal.PAGES, _Refusal.PREFIX):
            self._refused[request.id] = self._releases, result
        return result

    def _is_being_computed(self, request: AnswerRequest) -> bool:
        """Return whether a running request computes a longer prefix of another one than there is."""
        if not self.keep or request.score_prompt:
            return False
        return self._computing.find(request.digests)[1] > self._find_prefix(request)[1]

    def _find_start(self, request: AnswerRequest, beside: Iterable[AnswerRequest], passing: bool) -> _Start | None:
        """Find a prefix with which a request fits beside some running ones, and can end when all others are preempted."""
        beside, size = list(beside), self.allocator.page_size
        used = self._used_pages(beside, passing)
        unused = [self.allocator.pages - len(pages) for pages in used]
        rest = [one.max_length - one.reserved for one in beside] + [request.max_tokens] * bool(beside)
        left = sum(unused) - self.allocator.owed_pages([one.cache_id for one in beside])
        left -= sum(_pages(min(HEADROOM, tokens), size) for tokens in rest)
        for start in self._prefixes(request):
            held = [set()] * len(used) if start.parent is None else self.kept.first_pages(start.parent, start.length)
            new = [len(pages - others) for pages, others in zip(held, used, strict=True)]
            start.keep_fitting([there - pages for there, pages in zip(unused, new, strict=True)])
            total = sum(map(len, held)) + len(start.blocks) + _pages(request.max_length - start.end, size)
            if sum(new) + start.pages(request, size) <= left and total <= self._all_pages:
                return start
        return None

    def _used_pages(self, beside: list[AnswerRequest], passing: bool) -> list[set[int]]:
        """Return the pages that a request cannot get beside some running ones."""
        waiting = {one.kept_id for one in self.waiting} & self.kept.tokens.keys() if passing else ()
        if passing or len(beside) < len(self.running):
            return self.kept.pages_of([*(one.cache_id for one in beside), *waiting])
        if self._used is None:
            self._used = self.kept.pages_of(self._by_cache_id)
        return self._used

    def _prefixes(self, request: AnswerRequest) -> Iterator[_Start]:
        """Yield the prefixes with which a request may start: the longest one, that without host memory, and none."""
        parent, length = self._find_prefix(request)
        if self.kept.host is not None and self.keep and not request.score_prompt:
            # the pages in host memory may begin before the end of those in the cache, at whole pages
            begins = sorted({length, length - length % self.allocator.page_size, 0}, reverse=True)
            found = [(begin, self.kept.host.find(request.tokens, request.digests, begin)) for begin in begins]
            starts = (_Start(parent if begin else None, begin, blocks) for begin, blocks in found)
            start = max(starts, key=lambda start: start.end)
            if start.end > length:
                yield start
        if parent is not None:
            yield _Start(parent, length, [])
        yield _Start(None, 0, [])

    def _start(self, request: AnswerRequest, start: _Start, passing: bool) -> _Refusal | None:
        """Start a request with a prefix, as soon as its pages are evicted from others."""
        kept, size, ranks = self.kept, self.allocator.page_size, range(self.allocator.world_size)
        by_rank = [sum(block.rank == rank for block in start.blocks) for rank in ranks]
        spared = {one.kept_id: len(one.tokens) for one in self.waiting if passing}
        if start.parent is not None:
            spared.setdefault(start.parent, start.length)
            kept.use(start.parent)
        kept.hold(start.blocks)
        if not kept.evict(start.pages(request, size), spared, by_rank):
            kept.release(start.blocks)
            return _Refusal.EVICTS
        kept.release(start.keep_fitting(self.allocator.free_pages))
        if start.parent is None:
            request.cache_id = kept.apply("add_request", 1)
        else:
            request.cache_id = kept.apply("fork", start.parent, start.length, start.length)
        if start.blocks:
            places = [block.rank for block in start.blocks], [block.length for block in start.blocks]
            kept.apply("place", request.cache_id, *places)
        self._reserve(request, start.end + _pages(len(request.tokens) - start.end, size) * size)
        request.num_computed, request.loads, request.kept_id = start.end, start.blocks, -1
        if not request.preempted:
            request.num_cached = start.end
            self.shared_tokens += start.end
            self.admitted.append(request)
        self.host_tokens += start.end - start.length
        self._refused.pop(request.id, None)
        self._forget_waiting(request)
        self._used = None
        youngest = next(reversed(self.running.values()), request)
        self.running[request.id] = self._by_cache_id[request.cache_id] = request
        if youngest.order > request.order:
            self.running = {one.id: one for one in sorted(self.running.values(), key=_order)}
        if self.keep:
            self._computing.add(request.id, request.digests)
            kept.index.add(request.cache_id, request.digests[: start.length // size])
        return None

    def _load(self, request: AnswerRequest) -> list[tuple[int, int, int]]:
        """Return the pages that a request takes from host memory in this step: rank, slot and page."""
        taken = self.kept.take_loads(request.loads)
        if not request.loads:
            size = self.allocator.page_size
            self.kept.index.add(request.cache_id, request.digests[: request.num_computed // size])
        tables = [self.allocator.table(request.cache_id, block.rank) for block in taken]
        return [
            (block.rank, block.slot, table.pages[bisect_left(table.starts, block.start)])
            for block, table in zip(taken, tables, strict=True)
        ]

    def _count_delay(self, first: AnswerRequest) -> bool:
        """Count a step if younger requests delay the oldest waiting one; preempt them, and return True, if that was too often."""
        younger = [one for one in self.running.values() if one.order > first.order]
        older = list(self.running.values())[: len(self.running) - len(younger)]
        name, steps = self._delay
        steps = steps if name == first.id else 0
        self._delay = first.id, steps
        if first.unrecorded or not younger:
            return False
        # older ones only take more pages until one of them ends
        now = first.id, self._releases
        if now != self._fits_beside_older[:2] or steps >= PASSING_STEPS:
            self._fits_beside_older = *now, self._find_start(first, older, False) is not None
        if not self._fits_beside_older[2]:
            return False
        if steps < PASSING_STEPS:
            self._delay = first.id, steps + 1
            return False
        while younger:
            self._preempt(younger.pop())
            if self._try(first, False) is not _Refusal.PAGES:
                break
        return True

    def _preempt(self, request: AnswerRequest) -> None:
        """Let a running request wait again, with its whole pages kept as a prefix."""
        self.preemptions += 1
        request.preempted += 1
        cache_id = request.cache_id
        length = self._release(request, self.keep, self.allocator.page_size)
        request.kept_id = cache_id if length else -1
        request.num_computed = 0
        insort(self.waiting, request, key=_order)

    def _find_prefix(self, request: AnswerRequest) -> tuple[int | None, int]:
        """Find the longest usable prefix: its cache id and length. The last token is always computed, for its logits."""
        most = request.num_scored if request.score_prompt else len(request.tokens) - 1
        found, length = self.kept.index.find(request.digests) if self.keep and most else (None, 0)
        if not isinstance(found, int):
            return None, 0
        tokens = self.kept.tokens[found] if found in self.kept.tokens else self._by_cache_id[found].tokens
        most = min(most, len(request.tokens) - 1, self._computed_length(found), len(tokens))
        while length < most and tokens[length] == request.tokens[length]:
            length += 1
        return found, min(length, most)

    def _computed_length(self, cache_id: int) -> int:
        """Return the tokens of a request whose keys are in its pages, or will be after the steps that were planned."""
        request = self._by_cache_id.get(cache_id)
        loads = request.loads if request is not None else ()
        return min([self.allocator.length(cache_id), *(block.start for block in loads)])

    def _remove(self, request: AnswerRequest, keep: bool) -> None:
        """Remove a request, and keep its prefix or not."""
        request.ended = True
        self._refused.pop(request.id, None)
        if request.cache_id >= 0:
            self._release(request, self.keep and keep, 1)
            return
        self._forget_waiting(request)
        self._releases += 1
        if not keep and request.kept_id in self.kept.tokens:
            self.kept.free(request.kept_id)

    def _release(self, request: AnswerRequest, keep: bool, multiple: int) -> int:
        """Take a request out of the running ones; return the tokens that are kept, a multiple of so many, at least a page."""
        length = min(self._computed_length(request.cache_id), len(request.tokens)) if keep else 0
        self._computing.drop(request.id)
        self.kept.release(request.loads)
        del self.running[request.id], self._by_cache_id[request.cache_id]
        length = self.kept.keep(request.cache_id, request.tokens[: length // multiple * multiple], request.digests)
        request.cache_id, request.loads, self._used = -1, [], None
        self._releases += 1
        return length

    def _forget_waiting(self, request: AnswerRequest) -> None:
        del self.waiting[bisect_left(self.waiting, request.order, key=_order)]


class _Refusal(Enum):
    """Reason why a request does not start."""

    PREFIX = "a prefix of it is being computed"
    PAGES = "pages, or a place among the running ones, are missing"
    EVICTS = "its pages are being copied to host memory"


@dataclass
class _Start:
    """Prefix with which a request starts: tokens of a request in the cache, then pages in host memory."""

    parent: int | None
    length: int  # tokens of the parent
    blocks: list[HostBlock]

    @property
    def end(self) -> int:
        """Tokens that need not be computed."""
        return self.length + sum(block.length for block in self.blocks)

    def pages(self, request: AnswerRequest, size: int) -> int:
        """Return the pages that must be available."""
        return len(self.blocks) + _pages(len(request.tokens) - self.end, size)

    def keep_fitting(self, capacity: Sequence[int]) -> list[HostBlock]:
        """Leave out the pages in host memory from the first one on that its rank has no page for, and return them."""
        left = list(capacity)
        for place, block in enumerate(self.blocks):
            if left[block.rank] <= 0:
                out = self.blocks[place:]
                del self.blocks[place:]
                return out
            left[block.rank] -= 1
        return []


def _order(request: AnswerRequest) -> int:
    return request.order


def _pages(tokens: int, size: int) -> int:
    return -(-tokens // size)
