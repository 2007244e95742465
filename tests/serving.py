"""A model for the tests of the server that answers with a function of all tokens it was given, and keeps them in honest books."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ringattn.inference.page_allocator import PageAllocator
from ringattn.launch.serving.config import Limits
from ringattn.launch.serving.desk import Desk
from ringattn.launch.serving.engine import Engine
from ringattn.launch.serving.front import Front, listen
from ringattn.launch.serving.http import Server, make_app
from ringattn.launch.serving.sampling import Chosen, Logprob, Sampling, choose
from ringattn.launch.serving.scheduling import Plan, Scheduler
from ringattn.launch.serving.text import NoTemplate

VOCAB = 256
STOP = 0


def follow(tokens: Sequence[int]) -> int:
    """The token that follows: one of the printable ones, or now and then STOP."""
    digest = hashlib.sha256(bytes(token % 251 for token in tokens)).digest()
    return STOP if digest[0] == 0 else 32 + digest[1] % 95


def answer(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What a request gets alone."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens and (token := follow(tokens)) != STOP:
        tokens.append(token)
    return tokens[len(prompt) :]


class FakeStep:
    """A step of a `FakeRunner`.

    Attributes:
        ends: When its device will have computed it; None: when somebody waits for it.
    """

    def __init__(self, chosen: Chosen, ends: float | None) -> None:
        self._chosen, self.ends = chosen, ends

    @property
    def ended(self) -> bool:
        return self.ends is not None and time.monotonic() >= self.ends

    def wait(self) -> None:
        if self.ends is None:
            self.ends = time.monotonic()
        time.sleep(max(0.0, self.ends - time.monotonic()))

    def read(self) -> list[tuple[int | None, Logprob | None]]:
        self.wait()
        return self._chosen.read()


class FakeRunner:
    """Keeps each token in the page and row where the books put it, and reads it back from there.

    Args:
        step_s: What its device needs for a step.
        ahead: Whether `start` returns before; without step_s such steps end when somebody waits for them, and not before.
    """

    def __init__(
        self, world_size: int = 2, pages: int = 64, page_size: int = 4, step_s: float = 0.0, ahead: bool = True
    ) -> None:
        self.allocator = PageAllocator(world_size, pages, page_size)
        self.memory = [[[-1] * page_size for _ in range(pages)] for _ in range(world_size)]
        self.step_s = step_s
        self.ahead = ahead
        self.steps: list[tuple[int, ...]] = []
        self.carried = 0
        self._chosen: list[int] = []
        self._last: FakeStep | None = None
        self._before: FakeStep | None = None

    def start(self, plan: Plan) -> FakeStep:
        assert self._before is None or self._before.ended, "two steps are under way"
        for i, place in enumerate(plan.carried):
            if place >= 0:
                plan.tokens[i] = self._chosen[place]
                self.carried += 1
        logits = self.run(plan)
        how = [plan.jobs[place].sampling or Sampling(0) for place in plan.wanted] if plan.jobs else []
        chosen = choose(logits if how else logits[:0], how)
        # what other ranks get from rank 0 is the same
        self._chosen = chosen.tokens.clamp(min=0).tolist() if how else logits.argmax(-1).tolist()
        now = time.monotonic()
        busy_until = now if self._last is None or self._last.ends is None else max(now, self._last.ends)
        ends = busy_until + self.step_s if self.step_s or not self.ahead else None
        self._before, self._last = self._last, FakeStep(chosen, ends)
        if not self.ahead:
            self._last.wait()
        return self._last

    def run(self, plan: Plan) -> Tensor:
        self.steps.append(tuple(plan.counts))
        assert not (plan.packed and plan.decodes)
        at = 0
        decode = set(plan.counts) == {1}
        before = [self.allocator.length(request) for request in plan.requests]
        self.allocator.assign(plan.requests, plan.counts, one_by_one=decode)
        for request, length in zip(plan.requests, before, strict=True):
            for piece in self.allocator.page_spans(request, length):
                page = self.memory[piece.rank][piece.page]
                page[piece.row : piece.row + piece.length] = plan.tokens[at : at + piece.length]
                at += piece.length
        logits = torch.zeros(len(plan.wanted), VOCAB)
        for row, place in enumerate(plan.wanted):
            tokens: list[int] = []
            for block in self.allocator.blocks(plan.requests[place]):
                tokens += self.memory[block.rank][block.page][: block.length]
            logits[row, follow(tokens)] = 10.0
        return logits


class Letters:
    """A tokenizer for `FakeRunner`: a token is a character, STOP ends an answer."""

    stops = frozenset([STOP])
    vocab_size = VOCAB

    def encode(self, text: str) -> list[int]:
        return list(text.encode("latin-1"))

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        if messages[0]["content"] == "refuse":
            raise NoTemplate("the template refuses")
        return self.encode("".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>")

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("latin-1")

    def recipe(self) -> dict[str, Any]:
        raise AssertionError("this one is known to one process")


def text_of(prompt: str, max_tokens: int) -> str:
    """The text that a prompt gets alone."""
    return Letters().decode(answer(Letters().encode(prompt), max_tokens))


class Served:
    """The whole server in this process, both of its processes as threads, with a fake model.

    Attributes:
        lost: What the engine's side has said about the loss of the other.
    """

    def __init__(
        self,
        runner: FakeRunner,
        *,
        running: int = 64,
        waiting: int = 1000,
        time_limit_s: float = 60.0,
        limits: Limits | None = None,
        key: str | None = None,
        hosts: Sequence[str] | None = None,
        connections: int = 1000,
        about: dict[str, Any] | None = None,
        patience_s: float = 60.0,
    ) -> None:
        scheduler = Scheduler(runner.allocator, chunk=64, most_running=running, most_waiting=waiting)
        self.runner = runner
        self.engine = Engine(runner, scheduler, lambda _: None, time_limit_s=time_limit_s)
        mine, theirs = socket.socketpair()
        self.lost: list[str] = []
        self.front = Front(self.engine, mine, "the fake", self.lost.append, patience_s)
        desk = Desk(theirs, scheduler.room, self.engine.state())
        app = make_app(desk, Letters(), "fake", limits or Limits(), key=key, hosts=hosts, about=about)
        self.server = Server(listen("127.0.0.1", 0), connections)
        self.server.start(app)
        self.url = f"http://127.0.0.1:{self.server.port}"
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.engine.run()
        except RuntimeError as error:
            self.engine.fail(str(error))

    def close(self) -> None:
        self.engine.stop(0.0)
        self.thread.join(10)
        self.front.stop()
        self.server.stop()

    def state_when(self, so: Callable[[dict[str, Any]], bool], patience_s: float = 10.0) -> dict[str, Any]:
        """The state as soon as something is so."""
        deadline = time.monotonic() + patience_s
        while not so(state := self.engine.state()):
            assert time.monotonic() < deadline, state
            time.sleep(0.01)
        return state

    def assert_idle(self) -> None:
        """Nothing runs or waits, and every page is free or holds a prefix that is kept."""
        state = self.state_when(lambda state: not (state["running"] or state["waiting"]))
        assert state["pages"]["running"] == [0] * state["ranks"]
        assert not self.engine._open
