"""Steps that are started before the tokens of the one before are known: answers on two ranks are those of each prompt alone."""

from __future__ import annotations

import math
import os
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringattn.launch.distributed import Rank
from ringattn.launch.serving.channel import Channel
from ringattn.launch.serving.config import TINY
from ringattn.launch.serving.engine import Engine, follow
from ringattn.launch.serving.models import load, make_cache
from ringattn.launch.serving.replica import Computing, Replica
from ringattn.launch.serving.sampling import Sampling
from ringattn.launch.serving.scheduling import Event, Job, Plan, Scheduler
from ringattn.ring import Ring
from tests.pool import Pools

CPU = torch.device("cpu")
SPOILT = 65
"""A token of no job of `jobs`."""
Answers = dict[int, tuple[list[int], Any]]


class _Later:
    """A step that seems to be under way until somebody waits for it."""

    def __init__(self, step: Computing) -> None:
        self._step, self.ended = step, False

    def wait(self) -> None:
        self.ended = True
        self._step.wait()

    def read(self) -> Any:
        self.wait()
        return self._step.read()


class _Ahead:
    """A replica whose steps seem to take a while, as on a GPU.

    Attributes:
        carried: Tokens that a step took from the one before.
    """

    ahead = True

    def __init__(self, replica: Replica) -> None:
        self._replica, self.books, self.carried = replica, replica.books, 0

    def start(self, plan: Plan) -> Any:
        self.carried += sum(place >= 0 for place in plan.carried)
        return _Later(self._replica.start(plan))


def jobs() -> list[Job]:
    """Greedy ones and drawn ones, some with logprobs, of which some end by a token."""
    draw = random.Random(3)
    found = []
    for name in range(9):
        prompt = [draw.randrange(97, 123) for _ in range(draw.choice([3, 20, 70]))]
        how = Sampling(0.8 * (name % 3 == 1), 0.9, seed=name, logprobs=2 if name % 4 == 0 else None)
        stops = frozenset(draw.sample(range(97, 123), 4 * (name % 2)))
        found.append(Job(name, prompt, draw.choice([1, 5, 12]), sampling=how, stops=stops))
    return found


def spoilt_jobs() -> list[Job]:
    """Prompts with a token whose embedding is not a number, of lengths that share tiles and steps with those of `jobs`."""
    return [Job(100 + n, [98] * n + [SPOILT] + [99] * 4, 3, sampling=Sampling(0.0)) for n in (2, 30, 63)]


def serve(ahead: bool, spoil: bool = False) -> tuple[Answers, int, list[int]]:
    """What all jobs were answered on rank 0, tokens that were carried, and pages that are free in the end."""
    every = jobs()
    if spoil:
        every[1:1], every[4:4], every[7:7] = ([job] for job in spoilt_jobs())
    rank = Rank(dist.get_rank(), dist.get_world_size(), CPU, "gloo", os.getppid())
    ring, channel = Ring(), Channel(rank, 30.0)
    served = load(TINY, name=None, dtype="auto", device=CPU, seed=0)
    served.model.get_input_embeddings().register_forward_hook(
        lambda _, ids, x: x.masked_fill((ids[0] == SPOILT)[..., None], math.nan)
    )
    cache = make_cache(served.model, ring, gib=0.01, page_size=4, kv_dtype="auto")
    replica = Replica(served.model, cache, 4, False)
    runner: Any = _Ahead(replica) if ahead else replica
    answers: Answers = {}
    if rank.first:
        scheduler = Scheduler(cache.pages, chunk=64, most_running=4, most_waiting=20, keep=False)
        engine = Engine(runner, scheduler, channel.send, time_limit_s=60.0)

        def deliver(events: list[Event], state: Any) -> None:
            del state
            for event in events:
                tokens, _ = answers.setdefault(event.name, ([], None))
                if event.token is not None:
                    tokens.append(event.token)
                said = [event.details.logprob, *event.details.top] if event.details else None
                answers[event.name] = tokens, event.finish or (event.failure[1] if event.failure else said)
                if sum(isinstance(end, str) for _, end in answers.values()) == len(every):
                    engine.stop(0.0)

        engine.deliver = deliver
        engine.submit(every)
        engine.run()
        channel.send({"stop": True})
    else:
        follow(runner, channel)
    channel.close()
    return answers, getattr(runner, "carried", 0), list(cache.pages.free)


def alone() -> Answers:
    """What each job gets by itself, step by step, on one rank without replays."""
    served = load(TINY, name=None, dtype="auto", device=CPU, seed=0)
    cache = make_cache(served.model, Ring(), gib=0.01, page_size=4, kv_dtype="auto")
    replica = Replica(served.model, cache, 4, False)
    answers: Answers = {}
    for job in jobs():
        scheduler = Scheduler(cache.pages, chunk=16, most_running=1, most_waiting=1, keep=False)
        scheduler.add([job])
        tokens: list[int] = []
        while (plan := scheduler.plan()) and plan.requests:
            chosen = replica.start(plan).read()
            for event in scheduler.record(plan, dict.fromkeys([job.name], chosen[0] if chosen else None)):  # pyright: ignore[reportArgumentType]
                tokens += [] if event.token is None else [event.token]
                answers[job.name] = tokens, event.finish
        assert cache.pages.requests == ()
    return answers


def test_a_step_ahead_answers_as_each_prompt_alone_and_the_same_on_all_ranks(pool: Pools):
    expected = alone()
    assert {finish for _, finish in expected.values()} == {"stop", "length"}
    for ahead in (False, True):
        (answers, carried, free), (_, carried_there, free_there) = pool(2).run(serve, ahead)
        assert answers == expected
        assert free == free_there
        assert len(set(free)) == 1, "all pages of both ranks have come back"
        assert carried == carried_there
        # nearly all tokens but the first of a request that waited are carried
        assert carried > 20 if ahead else carried == 0, carried


@pytest.mark.parametrize("world_size", [1, 2])
def test_requests_go_on_beside_those_whose_scores_are_no_numbers(pool: Pools, world_size: int):
    answers, _, free = pool(world_size).run(serve, False, True)[0]
    for job in spoilt_jobs():
        tokens, failure = answers.pop(job.name)
        assert not tokens
        assert "are not numbers" in failure
    assert answers == alone()
    assert len(set(free)) == 1, "all pages have come back"


class _Waits:
    """A ring, an event and a cache in one, which note who is asked to wait."""

    device, ring = CPU, property(lambda self: self)

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def wait(self, device: torch.device, *, marks: Any, what: str) -> None:
        assert (device, marks.begun, marks.ended) == (CPU, self, self)
        self.asked.append((what, marks.lasted_s))
        marks.lasted_s = 0.25

    def synchronize(self) -> None:
        self.asked.append("synchronize")


def test_what_may_be_a_replay_is_waited_for_in_a_wait_that_ends_and_a_long_prompt_as_long_as_it_takes():
    replica: Any = Replica.__new__(Replica)
    waits: Any = _Waits()
    replica._cache, replica._usual = waits, {}
    for kind in ((True, False, False, 3), (False, False, False, 12), (True, False, False, 3), (False, True, False, 9)):
        Computing(replica, kind, None, waits, waits, f"{kind[3]}").wait()
    assert waits.asked == [("3", 0.0), "synchronize", ("3", 0.25), ("9", 0.0)]
    Computing(replica, (True, False, False, 3), None, None, None, "it has ended").wait()
    assert len(waits.asked) == 4


def test_what_a_failed_exchange_leaves_is_a_token_to_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """All bits are set then: as an index of the embedding that is an error of the device, which hides the one with a reason."""
    served = load(TINY, name=None, dtype="auto", device=CPU, seed=0)
    cache = make_cache(served.model, Ring(), gib=0.01, page_size=4, kv_dtype="auto")
    replica = Replica(served.model, cache, 4, False)
    scheduler = Scheduler(cache.pages, chunk=16, most_running=1, most_waiting=1, keep=False)
    scheduler.add(jobs()[:1])
    monkeypatch.setattr(
        type(cache.ring.partial_reducer(CPU)),
        "all_gather_columns",
        lambda self, x, out: out.view(torch.int64).fill_(-1),
    )
    plan = scheduler.plan()
    assert plan is not None
    assert plan.wanted
    replica.start(plan)
    assert replica._chosen.tolist() == [0] * len(plan.wanted)
