"""One rank's part of every step: from a plan to tokens that are being chosen.

Owns how a step is computed, what is recorded before the first request, and where tokens are between two steps. Refuses to know who
asked for them (scheduling.py), and how a token is chosen from logits (sampling.py).

Note [Tokens that stay]
    With many requests the host needs nearly as long for a step as a GPU does: it plans, tells the other ranks, lays out tables,
    launches, and says what has come. So on GPUs a step is started before the tokens of the one before it are known to the host.
    They are on the device: rank 0 chooses them, all ranks get them by one exchange, and the next step takes from there what its
    plan calls `carried`. The exchange is the one that attention makes, and lays all ranks' columns side by side, of which those of
    rank 0 count: two columns of bits make a token. It is always of one size, so that ranks compare it once.
    The host reads them later, when the device has come there. That wait ends where the step may have been a replay (Note [A
    replay that does not end] of decoding.py). Steps around the ring take as long as they take, and are bounded by what bounds
    plain calls. No rank starts more than one step before the last one has ended.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ringattn.inference import PagedKVCache
from ringattn.inference.step import MOST_DECODED
from ringattn.launch.serving.sampling import Chosen, Logprob, Sampling, choose, to_device
from ringattn.launch.serving.scheduling import Plan
from ringattn.transport.timeout import EventPair

if TYPE_CHECKING:
    from ringattn.integrations.transformers.decoding import Recorder

TRIED = ((0, 24), (0, 56), (0, 120), (0, 520), (0, 1024), (1024, 350), (8192, 12), (8192, 50), (8192, 200), (8192, 550))
"""Prompts that are computed before the first request: tokens on each rank that are there already, and new ones. From them follow
how kernels pack heads into tiles, what moves, and how pages are read."""


PIECES = (2, 4, 8, 16, 32)
"""Pieces of 16 rows of the graphs for short prompts: products of 512 rows take not much longer than reading the weights."""
ROWS = (64, 192, 448)
"""Rows of prompts, beside those of the answers, of the graphs for both together."""


class Replica:
    """One rank's part of every step.

    Args:
        model: As loaded.
        cache: As made for it.
        most: Requests that decode together at most.
        graphs: Whether steps of decoding and of short prompts are replayed from CUDA graphs: None: where that can be; False: never;
            or what records them.

    Attributes:
        books: Of the cache.
        ahead: Whether `start` returns before a step is computed, so that another one may be started (Note [Tokens that stay]).
    """

    def __init__(self, model: Any, cache: PagedKVCache, most: int, graphs: bool | Recorder | None = None) -> None:
        from ringattn.integrations.transformers.decoding import Decoding, batch_sizes, choose_recorder

        self._model, self._cache = model, cache
        self.books = cache.pages
        sizes = batch_sizes(most)
        recorder = choose_recorder(graphs, model, cache)
        rows = [most + more for more in ROWS]
        most_shapes = len(sizes) + len(PIECES) + len(rows)
        self._decoding = Decoding(
            model, cache, recorder, batches=sizes, pieces=PIECES, rows=rows, most=most_shapes, awaited=False
        )
        self.ahead = cache.device.type == "cuda"
        self._chosen = torch.empty(0, dtype=torch.int64, device=cache.device)  # by the last step, on every rank
        self._room(most)
        self._usual: dict[tuple[bool, bool, bool, int], float] = {}  # seconds that waits for steps of a kind took
        self._steps = 0

    @property
    def graphs(self) -> int:
        """CUDA graphs that steps are replayed from."""
        return self._decoding.recorded

    @property
    def pieces(self) -> int:
        """Pieces of short prompts that a step may bring as `Plan.packed`; 0: none."""
        return self._decoding.most_pieces

    @property
    def rows(self) -> int:
        """Tokens that a step may bring as `Plan.mixed`; 0: there are none."""
        return self._decoding.most_rows

    def prepare(self, longest: int | None = None) -> list[str]:
        """Computes prompts of several lengths and captures what can be captured, so that no request waits for a compiler.

        Args:
            longest: Tokens that the model takes; None: no bound.

        Returns:
            How that went, a line each.
        """
        began, said = time.monotonic(), []
        self._decoding.prepare()
        if self.graphs:
            short = f", and prompts in parts of up to {MOST_DECODED * self.pieces} tokens" * bool(self.pieces)
            said.append(f"decoding{short}: {self.graphs} CUDA graphs captured in {time.monotonic() - began:.1f} s")
        began = time.monotonic()
        tried = self._try_prompts(longest)
        said.append(f"prompts around the ring: {tried} steps computed in {time.monotonic() - began:.1f} s")
        return said

    def _try_prompts(self, longest: int | None) -> int:
        """Steps with the numbers of tokens on which kernels depend; how many there were."""
        from ringattn.integrations.transformers import run_step

        cache, ranks, tried, logits = self._cache, self._cache.ring.world_size, 0, None
        room = min(cache.capacity_tokens, longest or cache.capacity_tokens)
        for past, new in TRIED:
            # nothing is compiled for CPUs, where a past takes time
            needless = (past and cache.device.type == "cpu") or (not past and ranks * new <= MOST_DECODED * self.pieces)
            if needless or ranks * (past + new) > room:
                continue
            request = cache.join(ranks * (past + new))
            if past:
                # what nobody has written yet is zero, and as good as anything
                cache.pages.place([request], [ranks * past])
            step = cache.extend([request], [ranks * new], mode="prefill")
            logits = run_step(self._model, step, torch.zeros(ranks * new, dtype=torch.int64), wanted=[0])
            tried += 1
            cache.leave(request)
        if logits is not None and cache.ring.rank == 0:
            _try_choices(logits)
        return tried

    def start(self, plan: Plan) -> Computing:
        """Enqueues a step and the choice of its tokens; every rank calls it alike.

        Args:
            plan: With jobs on rank 0, whose samplings it asks for, and without elsewhere.
        """
        device, ring = self._cache.device, self._cache.ring
        begun = self._mark()
        logits = self._compute(plan)
        chosen, count = None, len(plan.wanted)
        if count > self._mine.shape[0]:
            self._room(2 * count)
        if ring.rank == 0:
            chosen = choose(logits, [plan.jobs[place].sampling for place in plan.wanted])
            self._mine[:count].copy_(chosen.tokens)
            chosen = chosen.on_host()
        ring.partial_reducer(device).all_gather_columns(*self._bits)
        # what is no number ends its request, and what a failed exchange leaves ends the server: both must be tokens until then
        self._chosen = self._all[:count].clamp(min=0)
        self._steps += 1
        kind = plan.decodes, plan.packed, plan.mixed, len(plan.tokens).bit_length()
        what = f"step {self._steps} ({len(plan.requests)} requests, {len(plan.tokens)} new tokens)"
        return Computing(self, kind, chosen, begun, self._mark(), what)

    def _room(self, tokens: int) -> None:
        """Makes room for what is chosen in a step, on this rank and by all."""
        new = partial(torch.zeros, dtype=torch.int64, device=self._cache.device)
        self._mine, self._all = new(tokens), new(self._cache.ring.world_size * tokens)
        self._bits = [x.view(torch.float32)[None] for x in (self._mine, self._all)]

    def wait_until_done(self, step: Computing) -> None:
        """See `Computing.wait`."""
        if step.end is None:
            return
        if not any(step.kind[:3]):
            step.end.synchronize()
            return
        events = EventPair(step.begun, step.end, self._usual.get(step.kind, 0.0))
        self._cache.ring.synchronize(self._cache.device, events=events, what=step.what)
        self._usual[step.kind] = events.lasted_s

    def _compute(self, plan: Plan) -> Tensor:
        """The logits `wanted vocab` of a step, which the next one may overwrite."""
        from ringattn.integrations.transformers import run_step

        tokens = self._tokens(plan)
        if plan.decodes:
            return self._decoding.run(plan.requests, tokens[:, None]).logits[:, -1]
        if plan.packed or plan.mixed:
            piece = 1 if plan.mixed else MOST_DECODED
            logits = self._decoding.run_packed(plan.requests, plan.counts, tokens, piece=piece)
            if logits is not None:
                return self._rows(logits, plan.wanted)
        step = self._cache.extend(plan.requests, plan.counts)
        if step.mode == "decode":
            tokens = tokens.view(len(plan.requests), -1)
        return run_step(self._model, step, tokens, wanted=plan.wanted)

    def _tokens(self, plan: Plan) -> Tensor:
        """The new tokens of a step, on the device where it takes any from there."""
        if not plan.carried:
            return torch.tensor(plan.tokens)
        count = self._chosen.shape[0]
        if plan.carried == list(range(count)):
            return self._chosen
        places = [count + i if place < 0 else place for i, place in enumerate(plan.carried)]
        said, at = self._upload([plan.tokens, places])
        return torch.cat([self._chosen, said])[at]

    def _mark(self) -> torch.cuda.Event | None:
        """Where the device will have come to what was enqueued until now; None where that is now."""
        if self._cache.device.type != "cuda":
            return None
        mark = torch.cuda.Event(blocking=True)
        mark.record(torch.cuda.current_stream(self._cache.device))
        return mark

    def _rows(self, logits: Tensor, wanted: Sequence[int]) -> Tensor:
        return logits if len(wanted) == len(logits) else logits[self._upload(wanted)]

    def _upload(self, numbers: Sequence[Any]) -> Tensor:
        """Integers on the device, in stream order."""
        return to_device(numbers, torch.int64, self._cache.device)


@dataclass
class Computing:
    """A step that was started.

    Attributes:
        replica: By whom.
        kind: What steps that take about as long have in common: whether they decode, are packed, are mixed, and how many rows
            they have, as a power of two.
        choice: The tokens that are being chosen; None where they are not known to the host: on all ranks but the first.
        begun: Where the device comes to it.
        end: Where the device has computed it; None, like begun, where that was when it was started.
        what: For messages.
    """

    replica: Replica
    kind: tuple[bool, bool, bool, int]
    choice: Chosen | None
    begun: torch.cuda.Event | None
    end: torch.cuda.Event | None
    what: str

    @property
    def ended(self) -> bool:
        """Whether it has been computed; asks nobody, waits for nothing."""
        return self.end is None or self.end.query()

    def wait(self) -> None:
        """Waits for its end.

        Raises:
            RuntimeError: A rank did not come in time; see `Ring.synchronize`.
        """
        self.replica.wait_until_done(self)

    def read(self) -> list[tuple[int | None, Logprob | None]]:
        """What was chosen for each who wanted a token, on rank 0; waits for it."""
        self.wait()
        assert self.choice is not None, "rank 0 chooses"
        return self.choice.read()


def _try_choices(logits: Tensor) -> None:
    """Chooses tokens in every way for which something else is compiled: some drawn or none, with logprobs or without."""
    for temperature in (0.0, 1.0):
        for logprobs in (None, 1):
            choose(logits, [Sampling(temperature, 0.9, seed=0, logprobs=logprobs)])
