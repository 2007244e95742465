"""The engine as the HTTP process sees it: sends requests to it, and passes on what happens to them.

Owns the ids of requests, which event belongs to which answer, and the last known state of the engine. Routes are in app.py; the
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

from ringattn.launch.serve.http.api import RequestError
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
from ringattn.launch.serve.scheduler import QueueFull, Request, check_queue

BEAT_S = 1.0
"""Seconds between heartbeats."""

ENGINE_GONE = "the server is going down: its engine is gone"

_REFUSALS = {
    "NeverFits": (400, "max_tokens", "context_length_exceeded"),
    "QueueFull": (429, None, "queue_full"),
    "Closed": (503, None, "unavailable"),
}
"""Status, field and code of OpenAI's errors for the engine's exceptions."""


def error_of(kind: str, message: str) -> RequestError:
    """Returns the error that a client gets when the engine has raised an exception of this name."""
    status, param, code = _REFUSALS[kind]
    return RequestError(status, message, param, code)


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
        ended: Set when the engine has sent Stop, or is gone.
        stopped: Whether it has sent Stop.
    """

    def __init__(
        self,
        pull: zmq.Socket[bytes],
        push: zmq.Socket[bytes],
        link: socket.socket,
        capacity: Capacity,
        state: dict[str, Any],
    ) -> None:
        self.capacity, self.ended, self.stopped = capacity, threading.Event(), False
        self._pull, self._push, self._link, self._state = pull, push, link, state
        self._descriptor: Any = pull.fd
        self._closed: str | None = None
        self._ids = itertools.count(1)
        self._callbacks: dict[int, Callable[[Event | RequestError], object]] = {}
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
            RequestError: It is closed, or its queue is full.
        """
        if self.closed:
            raise error_of("Closed", self.closed)
        try:
            check_queue(self.capacity, 1, self._state["queued"])
        except QueueFull as error:
            raise error_of("QueueFull", str(error)) from None

    def encode_requests(self, requests: Sequence[Request]) -> tuple[list[int], bytes]:
        """Gives requests their ids, and encodes them for `submit`. In any thread: long prompts take a while."""
        for request in requests:
            request.id = next(self._ids)
        return [request.id for request in requests], encode(submit_of(requests))

    def submit(
        self, request_ids: Sequence[int], encoded: bytes, on_event: Callable[[Event | RequestError], object]
    ) -> None:
        """Sends requests to the engine.

        Args:
            request_ids: Of the requests.
            encoded: The requests, by `encode_requests`.
            on_event: Called with each event, and must not raise; an error is that of all requests.
        """
        if self.ended.is_set():
            on_event(error_of("Closed", self.closed or ENGINE_GONE))
        self._callbacks.update(dict.fromkeys(request_ids, on_event))
        self._send(encoded)

    def cancel(self, request_id: int, keep: bool = False) -> None:
        """Ends a request before its end; `keep` as in `Engine.cancel`."""
        self._send(encode(Cancel(request_id, keep)))

    def close_requests(self, request_ids: Sequence[int]) -> None:
        """Drops events of these requests from now on."""
        for request_id in request_ids:
            del self._callbacks[request_id]

    def handle(self, message: ToHttp) -> None:
        """Passes on a message of the engine."""
        if isinstance(message, StepOutput):
            if message.state is not None:
                self._state = message.state
            for event in message.events:
                if (on_event := self._callbacks.get(event.request_id)) is not None:
                    on_event(event)
        elif isinstance(message, Rejected):
            if message.kind == "Closed":
                self._closed = message.reason
            if (on_event := self._callbacks.get(message.request_ids[0])) is not None:
                on_event(error_of(message.kind, message.reason))
        elif isinstance(message, Stop):
            self.stopped = True
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
        if not self.ended.is_set():
            self._closed = self.closed or ENGINE_GONE
            for on_event in set(self._callbacks.values()):
                on_event(error_of("Closed", self._closed))
            self.ended.set()

    def _send(self, data: bytes) -> None:
        if not (self.ended.is_set() or self._push.closed):
            with contextlib.suppress(zmq.Again):
                self._push.send(data, zmq.NOBLOCK)

    def _beat(self) -> None:
        if not self.ended.is_set():
            self._send(encode(Heartbeat()))
            self._loop.call_later(BEAT_S, self._beat)


def submit_of(requests: Sequence[Request]) -> Submit:
    """Returns the message for some requests."""
    indices: dict[int, int] = {}
    prompts, sent = [], []
    for request in requests:
        if id(request.prompt) not in indices:
            indices[id(request.prompt)] = len(prompts)
            prompts.append(Prompt(request.prompt, request.digests))
        options, stops = request.sampling.options(), sorted(request.stops)
        sent.append(
            NewRequest(
                request.id, indices[id(request.prompt)], request.max_tokens, stops, options, request.score_prompt
            )
        )
    return Submit(prompts, sent)


@dataclass(slots=True)
class _OpenRequest:
    """A request that has not ended.

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


class OpenRequests:
    """Events of some requests until all have ended; at the end of the context the others are cancelled.

    Args:
        client: Sends them.
        metrics: Observed here.
        request_ids: Of the requests.
        encoded: The requests, by `EngineClient.encode_requests`.
        take: Called with the place of a request among them and an event of it (Note [One turn for a step]); returns whether
            it is finished. What it raises, `wait_any` and `wait_all` raise.
        arrived: When the request did, by the monotonic clock.
    """

    def __init__(
        self,
        client: EngineClient,
        metrics: Metrics,
        request_ids: Sequence[int],
        encoded: bytes,
        take: Callable[[int, Event], bool],
        arrived: float,
    ) -> None:
        self._client, self._metrics, self._ids, self._take = client, metrics, request_ids, take
        self._unfinished = {request_id: _OpenRequest(place) for place, request_id in enumerate(request_ids)}
        self._began = arrived
        self._error: Exception | None = None
        self._new = self._for_all = False
        self._waiter: asyncio.Future[None] | None = None
        client.submit(request_ids, encoded, self._on_event)

    def __enter__(self) -> OpenRequests:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close_requests(self._ids)
        for request_id in self._unfinished:
            self._metrics.cancelled.inc()
            self._client.cancel(request_id)

    async def wait_any(self) -> bool:
        """Wait for an event since the last call; return whether more can follow.

        Raises:
            RequestError: The engine does not take the requests, or one has failed.
        """
        if not self._new:
            await self._wait(for_all=False)
        self._new = False
        return self._any_unfinished()

    async def wait_all(self) -> None:
        """Returns when all have ended.

        Raises:
            RequestError: As `wait_any`.
        """
        if self._any_unfinished():
            await self._wait(for_all=True)
            self._any_unfinished()

    def _any_unfinished(self) -> bool:
        if self._error is not None:
            raise self._error
        return bool(self._unfinished)

    async def _wait(self, for_all: bool) -> None:
        self._for_all, self._waiter = for_all, asyncio.get_running_loop().create_future()
        await self._waiter

    def _on_event(self, what: Event | RequestError) -> None:
        """Handle an event, in the turn of the event loop that received it."""
        if self._error is not None or not self._unfinished:
            return
        try:
            if isinstance(what, RequestError):
                self._unfinished.clear()
                raise what
            request = self._unfinished.get(what.request_id)
            if request is None:
                return  # events after a stop string are dropped
            if what.token is not None:
                request.latest = time.monotonic()
                if not request.tokens:
                    request.first = request.latest
                    self._metrics.first_token.observe(request.first - self._began)
                request.tokens += 1
            if what.last:
                self._end(what.request_id, request)
            if self._take(request.place, what) and not what.last:
                self._end(what.request_id, request)
                self._client.cancel(what.request_id, keep=True)
        except Exception as error:  # of this request, not of those beside it
            self._error = error
        self._new = True
        if self._waiter is not None and not (self._for_all and self._unfinished and self._error is None):
            if not self._waiter.done():  # its task may be about to end
                self._waiter.set_result(None)
            self._waiter = None

    def _end(self, request_id: int, request: _OpenRequest) -> None:
        del self._unfinished[request_id]
        self._metrics.latency.observe(time.monotonic() - self._began)
        if request.tokens > 1:
            self._metrics.per_token.observe((request.latest - request.first) / (request.tokens - 1))
