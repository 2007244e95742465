"""Scheduling of requests, and the contents of each step: continuous batching. Integers only, so it is tested without a model.

Note [Scheduling policy]
    Requests are admitted in order of arrival, when the cache has pages for the prompt and for all tokens that may follow: every
    admitted request can finish. It starts with a fork of the longest computed prefix; if its prefix is still being computed, it
    waits, and later ones may pass. Prefixes of finished requests are kept until their pages are needed; the least recently used
    go first.

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

Note [Asynchronous steps]
    On GPUs (`ModelRunner.ahead`) the next step is planned, broadcast and started before the tokens of the running one are read,
    recorded and delivered. The plan refers to such a token by its index among those that the previous step samples
    (`from_previous`). A request that turns out to have ended was in one step too many: its token is dropped, and its key is
    truncated before the prefix is kept. Its pages are free at once, although a running step still writes there: steps are
    computed in the order of their plans. At most one step runs when another one is started.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from ringattn.inference.forward_batch import MAX_DECODE_TOKENS as PIECE
from ringattn.inference.page_allocator import PageAllocator
from ringattn.launch.serve.messages import NOT_FINITE, TIME_LIMIT, Event, StepCommand
from ringattn.launch.serve.prefix_cache import Digest, PrefixIndex, prefix_digests
from ringattn.launch.serve.sampling import Logprob, Sampling

PACKED_STEPS = 4  # packed steps that a prompt may take; beyond them a chunk around the ring is faster
MAX_KEYS = 2**20
"""Keys on a rank that the pieces of a packed step may read together: 4 GiB of each layer for 8 key heads of 128 in bf16."""
MIXED_LENGTH = 8192
"""Tokens, on all ranks, of the longest request of a mixed step: half of them are 2 MiB to read for one program, some 40 us."""
MIXED_KEYS = 2**18
"""Keys on a rank that the rows of prompts of a mixed step may read together: a fourth of MAX_KEYS, because every row reads."""
MAX_KEPT = 1024  # maximum of kept prefixes of finished requests: each costs some bookkeeping
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
    tokens: list[int] = field(default_factory=list)  # the prompt and the answer so far
    cache_id: int = -1
    num_computed: int = 0  # tokens that are in the cache, or in a step that was planned
    num_cached: int = 0  # tokens of the prompt that were in the cache at its admission
    pending: int = 0  # tokens that are being sampled: of steps that were planned and not recorded
    output_index: int = -1  # index of the last of them among the tokens that its step samples

    @property
    def max_length(self) -> int:
        """Length of the prompt and all tokens that may be generated."""
        return len(self.prompt) + self.max_tokens

    @property
    def missing(self) -> int:
        """Tokens of the prompt that are neither in the cache nor in a step that was planned."""
        return max(0, len(self.prompt) - self.num_computed)

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
            request.pending += 1
            request.output_index = place

    def add_prompt(self, request: AnswerRequest, count: int) -> None:
        """Add the next tokens of a prompt."""
        start = request.num_computed
        self.cache_ids.append(request.cache_id)
        self.counts.append(count)
        self.requests.append(request)
        self.tokens += request.tokens[start : start + count]
        self.from_previous += [-1] * count
        if request.score_prompt and (targets := request.prompt[start + 1 : start + count + 1]):
            self.scored.append(len(self.requests) - 1)
            self.targets.append(targets)
        request.num_computed += count
        if not request.missing:
            request.pending, request.output_index = request.pending + 1, len(self.wanted)
            self.wanted.append(len(self.requests) - 1)


def apply_changes(allocator: PageAllocator, changes: Iterable[Sequence[Any]]) -> None:
    """Apply the changes of rank 0's page allocator to that of this rank; raise RuntimeError if the two have diverged."""
    for what, cache_id, *rest in changes:
        if what in ("free", "truncate"):
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
    ) -> None:
        self.allocator, self.chunk, self.keep, self.pieces, self.rows = allocator, chunk, keep, pieces, rows
        self.max_running = max_running
        self._all_pages = allocator.pages * allocator.world_size
        self.waiting: deque[AnswerRequest] = deque()
        self.running: dict[int, AnswerRequest] = {}
        self.kept_prefixes: dict[int, list[int]] = {}  # cache id -> its tokens, least recently used first
        self.prefill_tokens = self.shared_tokens = 0
        self.admitted: list[AnswerRequest] = []  # since its reader has cleared it
        self._computed = PrefixIndex(allocator.page_size)  # by cache id
        self._computing = PrefixIndex(allocator.page_size)  # by request id: prompts that are being computed
        self._by_cache_id: dict[int, AnswerRequest] = {}
        self._changes: list[tuple[Any, ...]] = []
        self._num_removed = 0  # requests that were removed so far
        self._blocked: tuple[int, int] | None = None  # the request without enough pages, and _num_removed then
        self._decoded = self._packed = False

    def add(self, requests: Sequence[AnswerRequest]) -> None:
        """Add requests to the queue; each fits into the cache by itself."""
        for request in requests:
            request.tokens = list(request.prompt)
            if self.keep and not request.digests:
                request.digests = prefix_digests(request.prompt, self.allocator.page_size)
            self.waiting.append(request)

    def remove(self, request_id: int, keep: bool = False) -> bool:
        """Remove a request, whose prefix may serve others (`keep`), and return whether it was found; its pages are free at once."""
        if (request := self.running.get(request_id)) is not None:
            self._remove(request, keep)
            return True
        for request in self.waiting:
            if request.id == request_id:
                self.waiting.remove(request)
                return True
        return False

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
        self._admit()
        prompts, answers = [], []
        for request in self.running.values():
            # `missing` and `has_more`, whose calls would take longer than the rest of the loop
            prompt = len(request.prompt)
            if request.num_computed < prompt:
                prompts.append(request)
            elif len(request.tokens) + request.pending < prompt + request.max_tokens:
                answers.append(request)
        short, long = self._split_by_length(prompts)
        mixed = self._split_mixed(answers, short)
        plan = ScheduledStep(changes=self._changes)
        self._changes = []
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
            return plan if plan.changes else None
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
        if not self._decoded and any(not request.missing and request.has_more for request in running):
            return False
        candidates = [request for request in running if request.missing]
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
        for place, logprobs in zip(plan.scored, scores, strict=True):
            if (request := plan.requests[place]).id not in self.running:
                continue
            scored = None if logprobs is None else Event(request.id, num_cached=request.num_cached, scores=logprobs)
            events.append(scored or self._fail(request))
        for place, (token, details) in zip(plan.wanted, chosen, strict=True):
            if (request := plan.requests[place]).id not in self.running:
                continue
            request.pending -= 1
            if len(request.tokens) == len(request.prompt):
                self._computing.drop(request.id)
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
        if self.keep:
            for request in plan.requests[plan.answers :]:
                if request.id in self.running:
                    computed = min(request.num_computed, len(request.prompt))
                    self._computed.add(request.cache_id, request.digests[: computed // self.allocator.page_size])
        return events

    def _fail(self, request: AnswerRequest) -> Event:
        self._remove(request, keep=False)
        message = "the model's scores for the next token are not numbers: its dtype may be too narrow for this prompt"
        return Event(request.id, failure=(500, message, NOT_FINITE))

    def pages(self) -> dict[str, list[int]]:
        """Return the pages of each rank: of running requests, of kept prefixes only, and free ones."""
        running = [len(pages) for pages in self._pages_of(self._by_cache_id)]
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
            keys += min(request.missing, left) * len(request.prompt)
            if len(request.prompt) > MIXED_LENGTH or keys > MIXED_KEYS * self.allocator.world_size:
                break
            prompts.append(request)
        return self._split_step(prompts, left, 1) if prompts else []

    def _keys(self, request: AnswerRequest) -> int:
        """Return the keys that the pieces of a prompt read in one step, on all ranks."""
        return min(_pages(request.missing, PIECE), self.pieces) * len(request.prompt)

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
            share = min(missing, most, SCORED - had) if request.score_prompt else min(missing, most)
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

    def _admit(self) -> None:
        """Admit requests for which there are pages, in order of arrival, except those that wait for a prefix."""
        passed: list[AnswerRequest] = []
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting[0]
            if self._blocked == (request.id, self._num_removed):
                break
            parent, length = self._find_prefix(request)
            if self.keep and not request.score_prompt and self._computing.find(request.digests)[1] > length:
                passed.append(self.waiting.popleft())
                continue
            if not self._start(request, parent, length):
                self._blocked = (request.id, self._num_removed)
                break
            self.waiting.popleft()
        self.waiting.extendleft(reversed(passed))

    def _start(self, request: AnswerRequest, parent: int | None, length: int) -> bool:
        """Start a request as a fork or, if only that fits, without a prefix; return False when neither fits."""
        size, whole = self.allocator.page_size, request.max_length
        users = set(self._by_cache_id)
        if parent is not None and self._evict_prefixes(_pages(whole - length, size), users | {parent}):
            request.cache_id = self._apply("fork", parent, length, whole)
            if parent in self.kept_prefixes:
                self.kept_prefixes[parent] = self.kept_prefixes.pop(parent)  # the most recently used
        elif (parent is None or parent in self.kept_prefixes) and self._evict_prefixes(_pages(whole, size), users):
            length = 0
            request.cache_id = self._apply("add_request", whole)
        else:
            return False
        request.num_computed = request.num_cached = length
        self.shared_tokens += length
        self.admitted.append(request)
        self.running[request.id] = self._by_cache_id[request.cache_id] = request
        if self.keep:
            self._computing.add(request.id, request.digests)
            self._computed.add(request.cache_id, request.digests[: length // size])
        return True

    def _evict_prefixes(self, pages: int, spared: set[int]) -> bool:
        """Evict kept prefixes, least recently used first, until enough pages are available; none if that cannot succeed."""
        if self.allocator.available >= pages:
            return True
        owed = sum(self.allocator.free_pages) - self.allocator.available
        if self._all_pages - sum(map(len, self._pages_of(spared))) - owed < pages:
            return False
        for cache_id in [cache_id for cache_id in self.kept_prefixes if cache_id not in spared]:
            self._free_prefix(cache_id)
            if self.allocator.available >= pages:
                return True
        raise AssertionError("evicting all prefixes must free the pages that were counted")

    def _find_prefix(self, request: AnswerRequest) -> tuple[int | None, int]:
        """Find the longest usable prefix: its cache id and length. The last token is always computed, for its logits."""
        found, length = self._computed.find(request.digests) if self.keep and not request.score_prompt else (None, 0)
        if not isinstance(found, int):
            return None, 0
        tokens = self.kept_prefixes[found] if found in self.kept_prefixes else self._by_cache_id[found].tokens
        most = min(len(request.prompt) - 1, self.allocator.length(found), len(tokens))
        while length < most and tokens[length] == request.prompt[length]:
            length += 1
        return found, min(length, most)

    def _remove(self, request: AnswerRequest, keep: bool) -> None:
        """Remove a running request, and keep its prefix if it has a whole page."""
        size = self.allocator.page_size
        length = min(self.allocator.length(request.cache_id), len(request.tokens))
        self._computing.drop(request.id)
        del self.running[request.id], self._by_cache_id[request.cache_id]
        self._num_removed += 1
        if not (self.keep and keep and length >= size):
            self._computed.drop(request.cache_id)
            self._apply("free", request.cache_id)
            return
        self._apply("truncate", request.cache_id, length, length)  # frees what it had reserved beyond
        tokens = self.kept_prefixes[request.cache_id] = request.tokens[:length]
        self._computed.add(request.cache_id, prefix_digests(tokens, size, request.digests[: length // size]))
        if len(self.kept_prefixes) > MAX_KEPT:
            self._free_prefix(next(iter(self.kept_prefixes)))

    def _free_prefix(self, cache_id: int) -> None:
        del self.kept_prefixes[cache_id]
        self._computed.drop(cache_id)
        self._apply("free", cache_id)

    def _apply(self, what: str, *rest: int) -> int:
        """Change the page allocator, record the change for the other ranks, and return the cache id."""
        result = getattr(self.allocator, what)(*rest)
        if what in ("free", "truncate"):
            self._changes.append((what, *rest))
            return rest[0]
        self._changes.append((what, result, *rest))
        return result

    def _pages_of(self, cache_ids: Iterable[int]) -> list[set[int]]:
        """Return the pages of requests by rank, each once."""
        ranks = range(self.allocator.world_size)
        return [set().union(*(self.allocator.table(cache_id, rank).pages for cache_id in cache_ids)) for rank in ranks]


def _pages(tokens: int, size: int) -> int:
    return -(-tokens // size)
