"""A fake model for the tests of the server: its answer is a function of all tokens, which it stores in real pages."""

from __future__ import annotations

import hashlib
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import uvicorn
from torch import Tensor

from ringattn.inference.page_allocator import PageAllocator
from ringattn.launch.serve.config import ServeArgs
from ringattn.launch.serve.engine import Engine
from ringattn.launch.serve.engine_server import BACKLOG, EngineServer, bind
from ringattn.launch.serve.grammar import make_compiler
from ringattn.launch.serve.http.app import make_app, server_config
from ringattn.launch.serve.http.engine_client import EngineClient
from ringattn.launch.serve.messages import Settings, decode_to_http, encode, receive_at, send_to
from ringattn.launch.serve.sampling import SampledTokens, Sampling, sample_tokens, score
from ringattn.launch.serve.scheduler import ScheduledStep, Scheduler
from ringattn.launch.serve.tokenizer import ChatTemplateError, check_text
from tests.support.page_spans import blocks_of, page_spans
from tests.support.timing import HANGS_S, wait_for

VOCAB = 256
STOP = 0


def follow(tokens: Sequence[int]) -> int:
    """Return the next token: a printable one, or now and then STOP."""
    digest = hashlib.sha256(bytes(token % 251 for token in tokens)).digest()
    return STOP if digest[0] == 0 else 32 + digest[1] % 95


def scores_after(tokens: Sequence[int]) -> Tensor:
    """Return the logits of the next token."""
    logits = torch.zeros(VOCAB)
    logits[follow(tokens)] = 10.0
    return logits


def answer(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Return the answer to a request alone."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens and (token := follow(tokens)) != STOP:
        tokens.append(token)
    return tokens[len(prompt) :]


class FakeStep:
    """A step of a `FakeRunner`.

    Attributes:
        ends: Time at which its device will have computed it; None: at the first `wait`.
    """

    def __init__(self, chosen: SampledTokens, ends: float | None) -> None:
        self._chosen, self.ends = chosen, ends

    @property
    def ended(self) -> bool:
        return self.ends is not None and time.monotonic() >= self.ends

    def wait(self) -> SampledTokens:
        if self.ends is None:
            self.ends = time.monotonic()
        time.sleep(max(0.0, self.ends - time.monotonic()))
        return self._chosen


class FakeRunner:
    """Runner that stores each token in the page and row that the allocator assigns, and reads it back from there.

    Args:
        step_s: Seconds that its device needs for a step.
        ahead: Whether `start` returns before; without step_s such steps end at the first `wait`.
    """

    def __init__(
        self, world_size: int = 2, pages: int = 64, page_size: int = 4, step_s: float = 0.0, ahead: bool = True
    ) -> None:
        self.allocator = PageAllocator(world_size, pages, page_size)
        self.memory = [[[-1] * page_size for _ in range(pages)] for _ in range(world_size)]
        self.host: list[dict[int, list[int]]] = [{} for _ in range(world_size)]
        self.moved = [0, 0]  # most pages of a rank that a step has copied to host memory, and from there
        self._arriving: list[tuple[int, int, list[int]]] = []
        self.step_s = step_s
        self.ahead = ahead
        self.steps: list[tuple[int, ...]] = []
        self.from_previous = 0
        self._chosen: list[int] = []
        self._last: FakeStep | None = None
        self._before: FakeStep | None = None

    def start(self, plan: Any) -> FakeStep:
        assert self._before is None or self._before.ended, "two steps are under way"
        for i, place in enumerate(plan.from_previous):
            if place >= 0:
                plan.tokens[i] = self._chosen[place]
                self.from_previous += 1
        logits = self.run(plan)
        # the other ranks have no requests
        every, wanted = (plan.requests, plan.wanted) if isinstance(plan, ScheduledStep) else ([], [])
        samplings = [every[place].sampling or Sampling(0) for place in wanted]
        chosen = sample_tokens(logits[: len(samplings)], samplings, [every[place].prompt for place in wanted])
        scores = []
        for place, targets in zip(plan.scored, plan.targets, strict=True) if isinstance(plan, ScheduledStep) else ():
            request, tokens = every[place], torch.tensor(targets)
            ends = range(request.num_computed - plan.counts[place] + 1, request.num_computed + 1)
            rows = torch.stack([scores_after(request.prompt[:end]) for end in ends])
            scores.append(score(rows[: len(targets)], tokens, (request.sampling and request.sampling.logprobs) or 0))
        chosen = replace(chosen, scores=tuple(scores))
        # what other ranks get from rank 0 is the same
        self._chosen = chosen.tokens.clamp(min=0).tolist() if samplings else logits.argmax(-1).tolist()
        now = time.monotonic()
        busy_until = now if self._last is None or self._last.ends is None else max(now, self._last.ends)
        ends = busy_until + self.step_s if self.step_s or not self.ahead else None
        self._before, self._last = self._last, FakeStep(chosen, ends)
        if not self.ahead:
            self._last.wait()
        return self._last

    def move_pages(self, plan: Any) -> None:
        """Copy pages as `HostPages` does: those that are loaded reach their places at the next call."""
        for rank, page, rows in self._arriving:
            self.memory[rank][page] = rows
        for rank, page, slot in plan.saves:
            self.host[rank][slot] = list(self.memory[rank][page])
        self._arriving = [(rank, page, list(self.host[rank][slot])) for rank, slot, page in plan.loads]
        for kind, moves in enumerate((plan.saves, plan.loads)):
            most = max(Counter(rank for rank, *_ in moves).values(), default=0)
            self.moved[kind] = max(self.moved[kind], most)

    def run(self, plan: Any) -> Tensor:
        self.steps.append(tuple(plan.counts))
        assert not (plan.packed and plan.decodes)
        at = 0
        decode = set(plan.counts) == {1}
        before = [self.allocator.length(cache_id) for cache_id in plan.cache_ids]
        self.allocator.assign(plan.cache_ids, plan.counts, one_by_one=decode)
        for cache_id, length in zip(plan.cache_ids, before, strict=True):
            for piece in page_spans(self.allocator, cache_id, length):
                page = self.memory[piece.rank][piece.page]
                page[piece.row : piece.row + piece.length] = plan.tokens[at : at + piece.length]
                at += piece.length
        logits = torch.empty(len(plan.wanted), VOCAB)
        for row, place in enumerate(plan.wanted):
            tokens: list[int] = []
            for block in blocks_of(self.allocator, plan.cache_ids[place]):
                tokens += self.memory[block.rank][block.page][: block.length]
            logits[row] = scores_after(tokens)
        return logits


def make_engine(runner: Any, scheduler: Scheduler, time_limit_s: float = HANGS_S) -> Engine:
    """Return an engine with a fake runner and no other ranks."""
    return Engine(runner, scheduler, lambda _: None, time_limit_s=time_limit_s)


class Letters:
    """A tokenizer for `FakeRunner`: a token is a character, STOP ends an answer.

    Attributes:
        template: Of chats, as far as the server reads formats in it.
        added_texts: Texts of tokens that `decode` leaves out.
        recipe: Of a tokenizer for another process, which is the same for ASCII.
    """

    stops = frozenset([STOP])
    vocab_size = VOCAB
    template = ""
    added_texts: Mapping[int, str] = {}
    recipe: Mapping[str, Any] = {"vocab_size": VOCAB}

    def encode(self, text: str, most: int | None = None) -> list[int]:
        check_text(text, most, 2)  # an umlaut
        return list(text.encode("latin-1"))

    def chat(
        self, messages: Sequence[dict[str, Any]], most: int | None = None, tools: Any = None, /, **options: Any
    ) -> list[int]:
        if messages[0]["content"] == "refuse":
            raise ChatTemplateError("the template refuses")
        lines = [f"<{message['role']}>{message['content']}" for message in messages]
        return self.encode("".join([*lines, "<assistant>", *options]), most)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("latin-1")

    def token_bytes(self, token: int) -> bytes | None:
        return bytes([token]).decode("latin-1").encode()


def text_of(prompt: str, max_tokens: int) -> str:
    """Return the text of the answer to a prompt alone."""
    return Letters().decode(answer(Letters().encode(prompt), max_tokens))


class Link:
    """The sockets between an engine and the HTTP process, in one process.

    Attributes:
        folder: Of the sockets.
        engine: The engine's end of the socket that ends with a process.
        http: The other end.
        tokenizer: Of the model.
    """

    def __init__(self, tokenizer: Any = None) -> None:
        self.tokenizer: Any = tokenizer or Letters()
        self._folder = tempfile.TemporaryDirectory(prefix="ringattn-")
        self.folder = self._folder.name
        self.engine, self.http = socket.socketpair()

    def client(self, max_requests: int, state: dict[str, Any]) -> EngineClient:
        pull, push = receive_at(self.folder, "http"), send_to(self.folder, "engine")
        return EngineClient(pull, push, self.http, max_requests, state)

    def server(self, engine: Engine, name: str, lost: Callable[[str], None], timeout_s: float) -> EngineServer:
        return EngineServer(engine, self.folder, self.engine, name, lost, timeout_s, make_compiler(self.tokenizer))

    def close(self) -> None:
        self.engine.close()
        self.http.close()
        self._folder.cleanup()


class FakeServer:
    """The whole server in this process, both of its processes as threads, with a fake model.

    Attributes:
        lost: Messages of the engine's side about the loss of the HTTP process.
    """

    def __init__(
        self,
        runner: FakeRunner,
        *,
        running: int = 64,
        waiting: int = 1000,
        time_limit_s: float = HANGS_S,
        length: int | None = None,
        connections: int = 1000,
        host: str = "0.0.0.0",
        about: dict[str, Any] | None = None,
        defaults: dict[str, int | float] | None = None,
        timeout_s: float = HANGS_S,
        tokenizer: Any = None,
        **flags: Any,
    ) -> None:
        scheduler = Scheduler(runner.allocator, chunk=64, max_running=running)
        self.runner = runner
        self.engine = make_engine(runner, scheduler, time_limit_s)
        self.link = Link(tokenizer)
        self.lost: list[str] = []
        self.engine_server = self.link.server(self.engine, "the fake", self.lost.append, timeout_s)
        allocator, state = runner.allocator, self.engine.state()
        sizes = {"max_running": running, "queue": waiting, "max_connections": connections, "time_limit": time_limit_s}
        args = ServeArgs("fake", host=host, page_size=allocator.page_size, **sizes, **flags)
        tokens = allocator.pages * allocator.world_size * allocator.page_size
        client = self.link.client(args.max_requests, state)
        settings = Settings(
            "fake",
            dict(self.link.tokenizer.recipe),
            args,
            min(length or tokens, tokens),
            state,
            about or {},
            defaults or {},
        )
        settings = decode_to_http(encode(settings))  # as the HTTP process gets them
        assert isinstance(settings, Settings)
        listening = bind("127.0.0.1", 0)
        listening.listen(BACKLOG)
        self.port: int = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._http = uvicorn.Server(server_config(make_app(client, self.link.tokenizer, settings), args, client))
        self._http_thread = threading.Thread(target=self._http.run, args=([listening],), daemon=True)
        self._http_thread.start()
        while not self._http.started:
            assert self._http_thread.is_alive()
            time.sleep(0.01)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.engine.run()
        except RuntimeError as error:
            self.engine.fail(str(error))

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *failure: object) -> None:
        self.engine.stop(0.0)
        self.thread.join(HANGS_S)
        self.engine_server.stop()
        self._http.should_exit = True
        self._http_thread.join(HANGS_S)
        self.link.close()

    def state_when(self, so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the state as soon as it fulfils a condition."""
        return wait_for(lambda: state if so(state := self.engine.state()) else None, self.engine.state)

    def assert_idle(self) -> None:
        """Assert that nothing runs or waits, and every page is free or holds a kept prefix."""
        state = self.state_when(lambda state: not (state["running"] or state["waiting"]))
        assert state["pages"]["running"] == [0] * state["ranks"]
        wait_for(lambda: not self.engine._open)  # emptied just after the state is new
