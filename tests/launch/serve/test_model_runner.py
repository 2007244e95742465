"""Steps that are started before the tokens of the one before are known: answers on two ranks are those of each prompt alone."""

from __future__ import annotations

import math
import os
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringattn.launch.common.distributed import Session
from ringattn.launch.serve.config import TINY, ServeArgs
from ringattn.launch.serve.engine import Engine, worker_loop
from ringattn.launch.serve.messages import Event, Stop
from ringattn.launch.serve.model_runner import ModelRunner, PendingStep
from ringattn.launch.serve.models import load_model, make_cache
from ringattn.launch.serve.rank_channel import RankChannel
from ringattn.launch.serve.sampling import Sampling
from ringattn.launch.serve.scheduler import AnswerRequest, ScheduledStep, Scheduler
from ringattn.ring import Ring
from tests.support.pool import Pools

CPU = torch.device("cpu")
SPOILT = 65
"""A token of no request of `requests`."""
Answers = dict[int, tuple[list[int], Any]]
SCORED = 5
"""The request that wants the logprobs of its prompt."""


class _Later:
    """A step that is not ended until `wait` is called."""

    def __init__(self, step: PendingStep) -> None:
        self._step, self.ended = step, False

    def wait(self) -> Any:
        self.ended = True
        return self._step.wait()


class _Ahead:
    """A model runner whose steps seem to take a while, as on a GPU.

    Attributes:
        carried: Tokens that a step took from the one before.
    """

    ahead = True

    def __init__(self, model_runner: ModelRunner) -> None:
        self._model_runner, self.allocator, self.from_previous = model_runner, model_runner.allocator, 0
        self.move_pages = model_runner.move_pages

    def start(self, plan: ScheduledStep) -> Any:
        self.from_previous += sum(place >= 0 for place in plan.from_previous)
        return _Later(self._model_runner.start(plan))


def requests() -> list[AnswerRequest]:
    """Requests with every option, greedy and sampled, of which some end by a token."""
    draw = random.Random(3)
    found = []
    for name in range(9):
        prompt = [draw.randrange(97, 123) for _ in range(draw.choice([3, 20, 70]))]
        how = Sampling(
            0.8 * (name % 3 == 1),
            0.9,
            seed=name,
            logprobs=2 if name % 4 == 0 or name == SCORED else None,
            top_k=20 * (name % 2),
            min_p=0.02 * (name % 3 == 1),
            repetition_penalty=1.0 + 0.3 * (name % 4 == 2),
            frequency_penalty=0.5 * (name % 4 == 3),
            presence_penalty=0.4 * (name % 5 == 0),
            logit_bias=((97 + name, 2.0),) if name % 2 else (),
        )
        stops = frozenset(draw.sample(range(97, 123), 4 * (name % 2)))
        most = draw.choice([1, 5, 12])
        found.append(AnswerRequest(name, prompt, most, sampling=how, stops=stops, score_prompt=name == SCORED))
    return found


def spoilt_requests() -> list[AnswerRequest]:
    """Prompts with a token whose embedding is not a number, of lengths that share tiles and steps with those of `requests`."""
    return [AnswerRequest(100 + n, [98] * n + [SPOILT] + [99] * 4, 3, sampling=Sampling(0.0)) for n in (2, 30, 63)]


def scores_of(prompt: list[int]) -> Tensor:
    """Logprobs of a prompt's tokens, from the second one on, by one process with torch's own attention."""
    model = load_model(ServeArgs(TINY), CPU).model
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        found = model(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
    return found[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]


def serve(ahead: bool, spoil: bool = False) -> tuple[Answers, list[float], int, list[int]]:
    """Answers and scores of rank 0, tokens that were taken from the previous step, and pages that are free in the end."""
    every = requests()
    if spoil:
        every[1:1], every[4:4], every[7:7] = ([request] for request in spoilt_requests())
    rank = Session(dist.get_rank(), dist.get_world_size(), CPU, "gloo", os.getppid())
    ring, channel = Ring(), RankChannel(rank, 30.0)
    served = load_model(ServeArgs(TINY), CPU)
    served.model.get_input_embeddings().register_forward_hook(
        lambda _, ids, x: x.masked_fill((ids[0] == SPOILT)[..., None], math.nan)
    )
    cache = make_cache(served.model, ring, gib=0.01, page_size=4, kv_dtype="auto")
    model_runner = ModelRunner(served.model, cache, 4, False)
    runner: Any = _Ahead(model_runner) if ahead else model_runner
    answers: Answers = {}
    scores: list[float] = []
    if rank.first:
        scheduler = Scheduler(cache.allocator, chunk=64, max_running=4, keep=False)
        engine = Engine(runner, scheduler, channel.broadcast, time_limit_s=60.0)

        def deliver(events: list[Event], state: Any) -> None:
            del state
            for event in events:
                tokens, _ = answers.setdefault(event.request_id, ([], None))
                assert not event.scores or (event.request_id, tokens) == (SCORED, [])
                scores.extend(one.logprob for one in event.scores)
                if event.token is not None:
                    tokens.append(event.token)
                said = [event.details.logprob, *event.details.top] if event.details else None
                failure = event.failure and event.failure[1]
                answers[event.request_id] = tokens, event.finish or failure or said
                if sum(isinstance(end, str) for _, end in answers.values()) == len(every):
                    engine.stop(0.0)

        engine.deliver = deliver
        engine.submit(every)
        engine.run()
        channel.broadcast(Stop())
    else:
        worker_loop(runner, channel)
    channel.close()
    return answers, scores, getattr(runner, "from_previous", 0), list(cache.allocator.free_pages)


def alone() -> Answers:
    """Answer of each request by itself, step by step, on one rank without replays."""
    served = load_model(ServeArgs(TINY), CPU)
    cache = make_cache(served.model, Ring(), gib=0.01, page_size=4, kv_dtype="auto")
    model_runner = ModelRunner(served.model, cache, 4, False)
    answers: Answers = {}
    for request in requests():
        scheduler = Scheduler(cache.allocator, chunk=16, max_running=1, keep=False)
        scheduler.add([request])
        tokens: list[int] = []
        while (plan := scheduler.plan()) and plan.cache_ids:
            sampled: Any = model_runner.start(plan).wait()
            for event in scheduler.record(plan, sampled.read(), sampled.read_scores()):
                tokens += [] if event.token is None else [event.token]
                answers[request.id] = tokens, event.finish
        assert cache.allocator.requests == ()
    return answers


def test_a_step_ahead_answers_as_each_prompt_alone_and_the_same_on_all_ranks(pool: Pools):
    expected, scored = alone(), scores_of(requests()[SCORED].prompt)
    assert len(scored) > 60, "more than one step of the test brings it"
    assert {finish for _, finish in expected.values()} == {"stop", "length"}
    for ahead in (False, True):
        (answers, scores, from_previous, free), (*_, carried_there, free_there) = pool(2).run(serve, ahead)
        assert answers == expected
        torch.testing.assert_close(torch.tensor(scores), scored, rtol=1e-4, atol=1e-4)
        assert free == free_there
        assert len(set(free)) == 1, "all pages of both ranks have come back"
        assert from_previous == carried_there
        # nearly all tokens but the first of a request that waited are carried
        assert from_previous > 20 if ahead else from_previous == 0, from_previous


@pytest.mark.parametrize("world_size", [1, 2])
def test_nan_logits_do_not_change_requests_beside_them(pool: Pools, world_size: int):
    answers, _, _, free = pool(world_size).run(serve, False, True)[0]
    for request in spoilt_requests():
        tokens, failure = answers.pop(request.id)
        assert not tokens
        assert "are not numbers" in failure
    assert answers == alone()
    assert len(set(free)) == 1, "all pages have come back"


class _Waits:
    """A ring, an event and a cache in one, which record their calls."""

    device, ring = CPU, property(lambda self: self)

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def synchronize(self, device: torch.device | None = None, *, events: Any = None, what: str = "synchronize") -> None:
        """Wait as a ring does for events; as an event does without a device."""
        if device is None:
            self.asked.append(what)
            return
        assert (device, events.begun, events.ended) == (CPU, self, self)
        self.asked.append((what, events.lasted_s))
        events.lasted_s = 0.25


def test_waits_for_replays_have_a_timeout_and_waits_for_long_prompts_do_not():
    model_runner: Any = ModelRunner.__new__(ModelRunner)
    waits: Any = _Waits()
    model_runner.cache, model_runner.typical_s = waits, {}
    for kind in ((True, False, False, 3), (False, False, False, 12), (True, False, False, 3), (False, True, False, 9)):
        PendingStep(model_runner, kind, None, waits, waits, f"{kind[3]}").wait()
    assert waits.asked == [("3", 0.0), "synchronize", ("3", 0.25), ("9", 0.0)]
    PendingStep(model_runner, (True, False, False, 3), None, None, None, "it has ended").wait()
    assert len(waits.asked) == 4


def test_values_of_a_failed_exchange_are_valid_tokens_for_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """All bits are set then: as an index of the embedding that is an error of the device, which hides the one with a reason."""
    served = load_model(ServeArgs(TINY), CPU)
    cache = make_cache(served.model, Ring(), gib=0.01, page_size=4, kv_dtype="auto")
    model_runner = ModelRunner(served.model, cache, 4, False)
    scheduler = Scheduler(cache.allocator, chunk=16, max_running=1, keep=False)
    scheduler.add(requests()[:1])
    monkeypatch.setattr(model_runner, "_exchange", lambda _, count: torch.full((count,), -1))
    plan = scheduler.plan()
    assert plan is not None
    assert plan.wanted
    model_runner.start(plan)
    assert model_runner._previous.tolist() == [0] * len(plan.wanted)
