"""Computation of a step on one rank: from a plan to sampled tokens.

On GPUs a step is started before the host knows the tokens of the previous one (Note [Asynchronous steps] of scheduler.py). They
stay on the device: rank 0 samples them, one exchange gives them to all ranks, and the next step takes those that its plan marks in
`from_previous`. The host reads them later. That wait has a timeout if the step may have been a replay of a CUDA graph.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ringattn.inference import PagedKVCache
from ringattn.inference.forward_batch import MAX_DECODE_TOKENS
from ringattn.inference.host_pages import HostPages
from ringattn.launch.serve.messages import StepCommand
from ringattn.launch.serve.sampling import SampledTokens, Sampling, sample_tokens, score, to_device
from ringattn.launch.serve.scheduler import ScheduledStep
from ringattn.transport.timeout import EventPair

if TYPE_CHECKING:
    from ringattn.integrations.transformers.cuda_graph_runner import GraphCapturer

WARM_UP_PROMPTS = (
    *((0, 24), (0, 56), (0, 120), (0, 520), (0, 1024)),
    *((1024, 350), (8192, 12), (8192, 50), (8192, 200), (8192, 550), (8192, 4096)),
)
"""Prompts that are computed before the first request: cached tokens on each rank, and new ones. They select how kernels pack heads
into tiles, whether keys or queries are exchanged, and how pages are read."""
PACKED_PIECES = (2, 4, 8, 16, 32)
"""Pieces of 16 rows of the graphs for short prompts: products of 512 rows take not much longer than reading the weights."""
MIXED_ROWS = (64, 128, 192)
"""Rows of prompts, beside those of the answers, of the graphs for both together: more would take long, and delay answers."""

MOVED_BYTES = 2**25
"""Bytes of each rank that a step copies to and from host memory at most: about 1 ms of a bus, less than most steps."""

StepKind = tuple[bool, bool, bool, int]
"""Key of steps that take about as long: decodes, packed, mixed, and the bit length of the number of tokens."""


class ModelRunner:
    """Computes the steps of one rank.

    Args:
        most: Maximum of requests that decode together.
        host_bytes: Bytes of host memory of each rank for pages that are evicted.
        graphs: Whether steps of decoding and of short prompts are replayed from CUDA graphs: None: if possible; False: never;
            or the capturer.
    """

    def __init__(
        self,
        model: Any,
        cache: PagedKVCache,
        most: int,
        graphs: bool | GraphCapturer | None = None,
        host_bytes: int = 0,
    ) -> None:
        from ringattn.integrations.transformers.cuda_graph_runner import CUDAGraphRunner, batch_sizes, select_capturer

        self._model, self.cache = model, cache
        self.allocator = cache.allocator
        sizes, rows = batch_sizes(most), [most + more for more in MIXED_ROWS]
        self.graph_runner = CUDAGraphRunner(
            model,
            cache,
            select_capturer(graphs, model, cache),
            batches=sizes,
            pieces=PACKED_PIECES,
            rows=rows,
            max_graphs=len(sizes) + len(PACKED_PIECES) + len(rows),
            awaited=False,
        )
        page_bytes = cache.allocator.page_bytes
        self.host_slots, self.moves = host_bytes // page_bytes, max(1, MOVED_BYTES // page_bytes)
        with cache.ring.propagate_errors():
            self._host = HostPages(cache, self.host_slots, self.moves) if self.host_slots else None
        # whether `start` returns before a step is computed, so that another one may be started
        self.ahead = cache.device.type == "cuda"
        # tokens of the last step, on every rank
        self._previous = torch.empty(0, dtype=torch.int64, device=cache.device)
        self._allocate_outputs(most)
        self.typical_s: dict[StepKind, float] = {}  # seconds that waits for steps of a kind took
        self._steps = 0

    def prepare(self, longest: int | None = None) -> list[str]:
        """Compute prompts of up to `longest` tokens, and capture graphs, before the first request; return lines to print."""
        began, lines, runner = time.monotonic(), [], self.graph_runner
        runner.prepare()
        if runner.captured:
            tokens = MAX_DECODE_TOKENS * runner.most_pieces
            short = f", and prompts in parts of up to {tokens} tokens" if tokens else ""
            lines.append(f"decoding{short}: {runner.captured} CUDA graphs captured in {time.monotonic() - began:.1f} s")
        began = time.monotonic()
        steps = self._warm_up_prefill(longest)
        return [*lines, f"prompts around the ring: {steps} steps computed in {time.monotonic() - began:.1f} s"]

    def _warm_up_prefill(self, longest: int | None) -> int:
        """Compute WARM_UP_PROMPTS; return the number of steps."""
        from ringattn.integrations.transformers import run_step

        cache, ranks, steps, logits = self.cache, self.cache.ring.world_size, 0, None
        room = min(cache.capacity_tokens, longest or cache.capacity_tokens)
        for past, new in WARM_UP_PROMPTS:
            # nothing is compiled for CPUs, where a past takes time
            packed = not past and ranks * new <= MAX_DECODE_TOKENS * self.graph_runner.most_pieces
            if packed or (past and cache.device.type == "cpu") or ranks * (past + new) > room:
                continue
            cache_id = cache.add_request(ranks * (past + new))
            if past:
                # unwritten pages are zeros, which serve as well
                cache.allocator.assign([cache_id], [ranks * past])
            step = cache.extend([cache_id], [ranks * new], mode="prefill")
            logits = run_step(self._model, step, torch.zeros(ranks * new, dtype=torch.int64), wanted=[0])
            steps += 1
            cache.free(cache_id)
        if logits is not None and cache.ring.rank == 0:
            # all options, so that no request waits until the kernels of torch are loaded
            sample_tokens(logits, [Sampling(1.0, 0.9, 0, 1, 5, 0.1, 1.1, 0.1, 0.1, ((0, 1.0),))], [[0]])
        return steps

    def move_pages(self, plan: StepCommand) -> None:
        """Enqueue a step's copies to and from host memory, before the step; all ranks call it for each command."""
        if self._host is not None:
            rank = self.cache.ring.rank
            saves, loads = ([move[1:] for move in moves if move[0] == rank] for moves in (plan.saves, plan.loads))
            self._host.move(saves, loads)

    def start(self, plan: StepCommand) -> PendingStep:
        """Enqueue a step and the sampling of its tokens; all ranks call it, rank 0 with a `ScheduledStep`."""
        begun = self._record_event()
        tokens = self._tokens(plan)
        logits, scored = self._compute_scored(plan, tokens) if plan.scored else (self._compute_wanted(plan, tokens), [])
        sampled, count = None, len(plan.wanted)
        if self.cache.ring.rank == 0:
            assert isinstance(plan, ScheduledStep), "rank 0 has the requests"
            requests = [plan.requests[place] for place in plan.wanted]
            samplings = [request.sampling or Sampling() for request in requests]
            sampled = sample_tokens(logits, samplings, [request.prompt for request in requests])
            sampled = replace(sampled, scores=tuple(self._score(plan, scored)))
        # a token that is not finite ends its request, and a failed exchange the server: both must be tokens until then
        self._previous = self._exchange(None if sampled is None else sampled.tokens, count).clamp(min=0)
        sampled = None if sampled is None else sampled.on_host()
        self._steps += 1
        kind = plan.decodes, plan.packed, plan.mixed, len(plan.tokens).bit_length()
        what = f"step {self._steps} ({len(plan.cache_ids)} requests, {len(plan.tokens)} new tokens)"
        return PendingStep(self, kind, sampled, begun, self._record_event(), what)

    def _exchange(self, sampled: Tensor | None, count: int) -> Tensor:
        """Return the sampled tokens of rank 0 on every rank."""
        if sampled is not None and self.cache.ring.world_size == 1:
            return sampled
        if count > self._local_tokens.shape[0]:
            self._allocate_outputs(2 * count)
        if sampled is not None:
            self._local_tokens[:count].copy_(sampled)
        # the exchange of attention, whose columns of rank 0 are used: always of one size, so that ranks compare it once
        self.cache.ring.partial_reducer(self.cache.device).all_gather_columns(*self._bits)
        return self._all[:count]

    def _allocate_outputs(self, tokens: int) -> None:
        """Allocate the sampled tokens of a step, of this rank and of all."""
        new = partial(torch.zeros, dtype=torch.int64, device=self.cache.device)
        self._local_tokens, self._all = new(tokens), new(self.cache.ring.world_size * tokens)
        self._bits = self._local_tokens.view(torch.float32)[None], self._all.view(torch.float32)[None]

    def _compute_scored(self, plan: StepCommand, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the logits `wanted vocab` of a step, and `rows vocab` of each request whose rows all give logits."""
        from ringattn.integrations.transformers.model_forward import forward_step

        step = self.cache.extend(plan.cache_ids, plan.counts, mode="prefill")
        ends = list(accumulate(plan.counts, initial=0))
        rows = {place: range(ends[place + 1] - 1, ends[place + 1]) for place in plan.wanted}
        rows |= {place: range(ends[place], ends[place + 1]) for place in plan.scored}
        rows = dict(sorted(rows.items()))
        with torch.no_grad():
            out = forward_step(self._model, step, {"input_ids": tokens[None]}, step.positions, [*chain(*rows.values())])
        parts = dict(zip(rows, out.logits[0].split(list(map(len, rows.values()))), strict=True))
        wanted = [parts[place][-1:] for place in plan.wanted]
        return torch.cat([out.logits[0, :0], *wanted]), [parts[place] for place in plan.scored]

    def _score(self, plan: ScheduledStep, scored: Sequence[Tensor]) -> list[Tensor]:
        """Return the logprobs of prompt tokens on rank 0, one prompt after another: each may take much memory."""
        found = []
        for place, targets, logits in zip(plan.scored, plan.targets, scored, strict=True):
            tokens, sampling = self._upload(targets), plan.requests[place].sampling
            found.append(score(logits[: len(tokens)], tokens, (sampling and sampling.logprobs) or 0))
        return found

    def _compute_wanted(self, plan: StepCommand, tokens: Tensor) -> Tensor:
        """Return the logits `wanted vocab` of a step, which the next one may overwrite."""
        from ringattn.integrations.transformers import run_step

        if plan.decodes:
            return self.graph_runner.run(plan.cache_ids, tokens[:, None]).logits[:, -1]
        if plan.packed or plan.mixed:
            piece = 1 if plan.mixed else MAX_DECODE_TOKENS
            logits = self.graph_runner.run_mixed(plan.cache_ids, plan.counts, tokens, piece=piece)
            if logits is not None:
                return logits if len(plan.wanted) == len(logits) else logits[self._upload(plan.wanted)]
        step = self.cache.extend(plan.cache_ids, plan.counts)
        if step.mode == "decode":
            tokens = tokens.view(len(plan.cache_ids), -1)
        return run_step(self._model, step, tokens, wanted=plan.wanted)

    def _tokens(self, plan: StepCommand) -> Tensor:
        """Return the new tokens of a step, on the device if any of them is only there."""
        if not plan.from_previous:
            return torch.tensor(plan.tokens)
        count = self._previous.shape[0]
        if plan.from_previous == list(range(count)):
            return self._previous
        slots = [count + i if place < 0 else place for i, place in enumerate(plan.from_previous)]
        known, at = self._upload([plan.tokens, slots])
        return torch.cat([self._previous, known])[at]

    def _record_event(self) -> torch.cuda.Event | None:
        """Record an event behind the work enqueued so far; None on CPUs, where it is done."""
        if self.cache.device.type != "cuda":
            return None
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self.cache.device))
        return event

    def _upload(self, numbers: Sequence[Any]) -> Tensor:
        return to_device(numbers, torch.int64, self.cache.device)


@dataclass
class PendingStep:
    """A step that was started."""

    model_runner: ModelRunner
    kind: StepKind
    sampled: SampledTokens | None  # the sampled tokens on rank 0; None elsewhere
    begun: torch.cuda.Event | None  # event before the step; None on CPUs
    end: torch.cuda.Event | None  # event after the step; None on CPUs, where it is done at once
    what: str  # the step in messages

    @property
    def ended(self) -> bool:
        """Whether it has been computed; does not wait."""
        return self.end is None or self.end.query()

    def wait(self) -> SampledTokens | None:
        """Wait for its end; return the sampled tokens on rank 0, or raise RuntimeError if a rank is late (`Ring.synchronize`)."""
        runner = self.model_runner
        if self.end is not None and any(self.kind[:3]):
            events = EventPair(self.begun, self.end, runner.typical_s.get(self.kind, 0.0))
            runner.cache.ring.synchronize(runner.cache.device, events=events, what=self.what)
            runner.typical_s[self.kind] = events.lasted_s
        elif self.end is not None:
            self.end.synchronize()  # prefill around the ring has the timeouts of plain calls
        return self.sampled
