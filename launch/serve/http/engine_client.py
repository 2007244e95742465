"""The engine as the HTTP process sees it: sends requests to it, and passes on what happens to them.

Owns the ids of requests, which event belongs to which answer, and the last known state of the engine. Routes are in http.py; the
other ends of the sockets in engine_server.py.

Note [One turn for a step]
    A step brings a token for each of many answers. The text and the line of each are made in the turn of the event loop
    that receives the step; the tasks of the answers are woken by it and only write, one after the other, in the next. A write to
    a socket wakes the process that reads there, and code that runs after it is slower: with 15 us of Python for each, 64 writes one
    after the other took 5 to 6 us of a core each, and 9 to 10 where the Python stood between them (uvloop, 230 bytes each over
    loopback, 2 cores of a virtual machine).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from ringattn.launch.serve.http.api import Refused
from ringattn.launch.serve.http.metrics import Metrics
from ringattn.launch.serve.messages import (
    Cancel,
    Capacity,
    Event,
    Heartbeat,
    NewRequest,
    Prompt,
    Ready,
    Rejected,
    StepOutput,
    Stop,
    Submit,
    ToHttp,
    decode_to_http,
    encode,
)
from ringattn.launch.serve.scheduler import Job, QueueFull, check_queue

BEAT_S = 1.0
"""Seconds between heartbeats."""

GONE = "the server is going down: its engine is gone"

_REFUSALS = {
    "NeverFits": (400, "max_tokens", "context_length_exceeded"),
    "QueueFull": (429, None, "queue_full"),
    "Closed": (503, None, "unavailable"),
}
"""Status, field and code of OpenAI's errors for the engine's exceptions."""


def refusal_of(kind: str, message: str) -> Refused:
    """Returns the error that a client gets when the engine has raised an exception of this name."""
    status, param, code = _REFUSALS[kind]
    return Refused(status, message, param, code)


class EngineClient:
    """Sends requests to the engine, and passes on its events.

    All methods are called in the event loop's thread, except where it says otherwise.

    Args:
        pull: Receives from an `EngineServer`.
        push: Sends to it.
        link: Ends with the engine's process.
        capacity: Of the engine.
        state: Of the engine, at first.

    Attributes:
        over: Set when the engine has sent Stop, or is gone.
        told: Whether it has sent Stop.
    """

    def __init__(
        self,
        pull: zmq.Socket[bytes],
        push: zmq.Socket[bytes],
        link: socket.socket,
        capacity: Capacity,
        state: dict[str, Any],
    ) -> None:
        self.capacity, self.over, self.told = capacity, threading.Event(), False
        self._pull, self._push, self._link, self._state = pull, push, link, state
        self._descriptor: Any = pull.fd
        self._closed: str | None = None
        self._names = itertools.count(1)
        self._open: dict[int, Callable[[Event | Refused], object]] = {}
        self._loop: asyncio.AbstractEventLoop

    async def open(self) -> None:
        """Begins to receive from the engine, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._receive)
        self._loop.add_reader(self._link, self._lose)
        self._loop.call_soon(self._receive)  # ZeroMQ's descriptor tells of changes only
        self._beat()

    def close(self) -> None:
        """Receives and sends nothing more."""
        self._end()
        self._loop.remove_reader(self._descriptor)
        self._loop.remove_reader(self._link)
        self._pull.close()
        self._push.close()

    def send_ready(self) -> None:
        """Tells the engine that clients are answered. In any thread."""
        self._loop.call_soon_threadsafe(self._send, encode(Ready()))

    @property
    def closed(self) -> str | None:
        """Why the engine takes no requests; None while it does."""
        return self._closed or self._state["closed"]

    def state(self) -> dict[str, Any]:
        """Returns the last known state of the engine."""
        return self._state

    def check(self) -> None:
        """Refuses early what the engine would refuse by its last known state.

        Raises:
            Refused: It is closed, or its queue is full.
        """
        if self.closed:
            raise refusal_of("Closed", self.closed)
        try:
            check_queue(self.capacity, 1, self._state["queued"])
        except QueueFull as error:
            raise refusal_of("QueueFull", str(error)) from None

    def pack(self, jobs: Sequence[Job]) -> tuple[list[int], bytes]:
        """Gives requests their ids, and encodes them for `submit`. In any thread: long prompts take a while."""
        for job in jobs:
            job.name = next(self._names)
        return [job.name for job in jobs], encode(submit_of(jobs))

    def submit(self, names: Sequence[int], packed: bytes, put: Callable[[Event | Refused], object]) -> None:
        """Sends requests to the engine.

        Args:
            names: Ids of the requests.
            packed: The requests, encoded by `pack`.
            put: Called with what happens to them, which must not raise; a refusal is of all of them.
        """
        if self.over.is_set():
            put(refusal_of("Closed", self.closed or GONE))
        self._open.update(dict.fromkeys(names, put))
        self._send(packed)

    def cancel(self, name: int, keep: bool = False) -> None:
        """Ends a request before its end; `keep` as in `Engine.cancel`."""
        self._send(encode(Cancel(name, keep)))

    def forget(self, names: Sequence[int]) -> None:
        """Drops events of these requests from now on."""
        for name in names:
            del self._open[name]

    def handle(self, message: ToHttp) -> None:
        """Passes on a message of the engine."""
        if isinstance(message, StepOutput):
            if message.state is not None:
                self._state = message.state
            for event in message.events:
                if (put := self._open.get(event.name)) is not None:
                    put(event)
        elif isinstance(message, Rejected):
            if message.kind == "Closed":
                self._closed = message.reason
            if (put := self._open.get(message.names[0])) is not None:
                put(refusal_of(message.kind, message.reason))
        elif isinstance(message, Stop):
            self.told = True
            self._end()

    def _receive(self) -> None:
        """Handles all messages that have come."""
        while not self._pull.closed:
            try:
                data = self._pull.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.handle(decode_to_http(data))

    def _lose(self) -> None:
        """The engine is gone; what it has sent before counts."""
        self._loop.remove_reader(self._link)
        self._receive()
        self._end()

    def _end(self) -> None:
        """Refuses requests that have not ended by now, or that the engine will not receive any more."""
        if not self.over.is_set():
            self._closed = self.closed or GONE
            for put in set(self._open.values()):
                put(refusal_of("Closed", self._closed))
            self.over.set()

    def _send(self, data: bytes) -> None:
        if not (self.over.is_set() or self._push.closed):
            with contextlib.suppress(zmq.Again):
                self._push.send(data, zmq.NOBLOCK)

    def _beat(self) -> None:
        if not self.over.is_set():
            self._send(encode(Heartbeat()))
            self._loop.call_later(BEAT_S, self._beat)


def submit_of(jobs: Sequence[Job]) -> Submit:
    """Returns the message for some requests."""
    indices: dict[int, int] = {}
    prompts, requests = [], []
    for job in jobs:
        if id(job.prompt) not in indices:
            indices[id(job.prompt)] = len(prompts)
            prompts.append(Prompt(job.prompt, job.digests))
        options, stops = job.sampling.options(), sorted(job.stops)
        requests.append(NewRequest(job.name, indices[id(job.prompt)], job.max_tokens, stops, options, job.score_prompt))
    return Submit(prompts, requests)


@dataclass(slots=True)
class _Job:
    """A job that has not ended.

    Attributes:
        place: Among those of its request.
        tokens: That have come.
        first: When the first did.
        latest: When the last did.
    """

    place: int
    tokens: int = 0
    first: float = 0.0
    latest: float = 0.0


class Answers:
    """What happens to some jobs, until all have ended; those that have not at the end of the context are cancelled.

    Args:
        client: Sends them.
        metrics: What is observed on the way.
        names: Of the jobs.
        packed: The jobs, as the client encoded them.
        take: Called with the place of a job among them and what happened to it (Note [One turn for a step]); returns whether
            nobody wants more of it. What it raises, `some` and `all` raise.
        arrived: When the request did, by the monotonic clock.
    """

    def __init__(
        self,
        client: EngineClient,
        metrics: Metrics,
        names: Sequence[int],
        packed: bytes,
        take: Callable[[int, Event], bool],
        arrived: float,
    ) -> None:
        self._client, self._metrics, self._names, self._take = client, metrics, names, take
        self._left = {name: _Job(place) for place, name in enumerate(names)}
        self._began = arrived
        self._error: Exception | None = None
        self._new = self._for_all = False
        self._waiting: asyncio.Future[None] | None = None
        client.submit(names, packed, self._put)

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.forget(self._names)
        for name in self._left:
            self._metrics.cancelled.inc()
            self._client.cancel(name)

    async def some(self) -> bool:
        """Returns when something has happened since the last call: whether more can.

        Raises:
            Refused: The engine does not take the jobs, or one has failed.
        """
        if not self._new:
            await self._sleep(for_all=False)
        self._new = False
        return self._going_on()

    async def all(self) -> None:
        """Returns when all have ended.

        Raises:
            Refused: As `some`.
        """
        if self._going_on():
            await self._sleep(for_all=True)
            self._going_on()

    def _going_on(self) -> bool:
        if self._error is not None:
            raise self._error
        return bool(self._left)

    async def _sleep(self, for_all: bool) -> None:
        self._for_all, self._waiting = for_all, asyncio.get_running_loop().create_future()
        await self._waiting

    def _put(self, what: Event | Refused) -> None:
        """Takes what has happened, in the client's turn."""
        if self._error is not None or not self._left:
            return
        try:
            if isinstance(what, Refused):
                self._left.clear()
                raise what
            job = self._left.get(what.name)
            if job is None:
                return  # what comes after a stop string is nobody's
            if what.token is not None:
                job.latest = time.monotonic()
                if not job.tokens:
                    job.first = job.latest
                    self._metrics.first_token.observe(job.first - self._began)
                job.tokens += 1
            if what.last:
                self._end(what.name, job)
            if self._take(job.place, what) and not what.last:
                self._end(what.name, job)
                self._client.cancel(what.name, keep=True)
        except Exception as error:  # of this request, not of those beside it
            self._error = error
        self._new = True
        if self._waiting is not None and not (self._for_all and self._left and self._error is None):
            if not self._waiting.done():  # its task may be about to end
                self._waiting.set_result(None)
            self._waiting = None

    def _end(self, name: int, job: _Job) -> None:
        del self._left[name]
        self._metrics.latency.observe(time.monotonic() - self._began)
        if job.tokens > 1:
            self._metrics.per_token.observe((job.latest - job.first) / (job.tokens - 1))
