"""The engine as the HTTP process sees it: sends requests to it, and passes on their events.

Owns the ids of requests, which event belongs to which answer, and the last known state of the engine. The other ends of the sockets
are in engine_server.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from ringattn.launch.serve import messages
from ringattn.launch.serve.http.fields import RequestError
from ringattn.launch.serve.http.metrics import Metrics

KEEP_ALIVE_S = 15.0
"""Seconds after which a stream without tokens gets a comment: proxies cut off answers that are silent for a minute."""

ENGINE_GONE = "the server is going down: its engine is gone"


class EngineClient:
    """Sends requests to the engine, and passes on its events; `link` is a socket that closes with the engine's process.

    All methods are called in the event loop's thread, unless they say otherwise.
    """

    def __init__(
        self,
        pull: zmq.Socket[bytes],
        push: zmq.Socket[bytes],
        link: socket.socket,
        max_requests: int,
        state: dict[str, Any],
    ) -> None:
        self.max_requests = max_requests
        self.ids = itertools.count(1)  # new ids of requests; in any thread
        self.stopped = False  # whether the engine has sent Stop
        self.ended = False  # whether it has sent Stop, or is gone
        self._pull, self._push, self._link, self._state = pull, push, link, state
        self._descriptor: Any = pull.fd
        self._closed: str | None = None
        self._callbacks: dict[int, Callable[[messages.Event | RequestError], object]] = {}
        self._loop: asyncio.AbstractEventLoop

    async def open(self) -> None:
        """Begin to receive from the engine, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._receive)
        self._loop.add_reader(self._link, self._lose)
        self._loop.call_soon(self._receive)  # ZeroMQ's descriptor signals changes only
        self._beat()

    def close(self) -> None:
        """Stop to receive and send."""
        self._end()
        self._loop.remove_reader(self._descriptor)
        self._loop.remove_reader(self._link)
        self._pull.close()
        self._push.close()

    def send_ready(self) -> None:
        """Send the engine that clients are answered."""
        self._send(messages.encode(messages.Ready()))

    @property
    def closed(self) -> str | None:
        """The reason why the engine takes no requests; None while it does."""
        return self._closed or self._state["closed"]

    def health(self) -> tuple[int, dict[str, str]]:
        """Return status and body of the answer to /health."""
        return (503 if self.closed else 200), {"status": self.closed or "ok"}

    def state(self) -> dict[str, Any]:
        """Return the last known state of the engine."""
        return self._state

    def check(self, new: int = 1) -> None:
        """Raise RequestError if the engine, by its last known state, is closed, or would have too many requests with new ones."""
        if self.closed:
            raise RequestError(503, self.closed, code=messages.UNAVAILABLE)
        most, before = self.max_requests, len(self._callbacks)
        if before + new > most:
            what = f"at most {most} requests may be open, got {new} more beside {before}; try again later"
            raise RequestError(429, what, code="queue_full")

    def submit(
        self, request_ids: Sequence[int], encoded: bytes, on_event: Callable[[messages.Event | RequestError], object]
    ) -> None:
        """Send requests, encoded as `Submit`; on_event gets each event, or an error of all, and must not raise. See `check`."""
        self.check(len(request_ids))
        self._callbacks.update(dict.fromkeys(request_ids, on_event))
        self._send(encoded)

    def cancel(self, request_id: int, keep: bool = False) -> None:
        """End a request before its end; `keep` as in `Engine.cancel`."""
        self._send(messages.encode(messages.Cancel(request_id, keep)))

    def close_requests(self, request_ids: Sequence[int]) -> None:
        """Drop events of these requests from now on."""
        for request_id in request_ids:
            del self._callbacks[request_id]

    def handle(self, message: messages.ToHttp) -> None:
        """Pass on a message of the engine."""
        if isinstance(message, messages.StepOutput):
            if message.state is not None:
                self._state = message.state
            for event in message.events:
                if (on_event := self._callbacks.get(event.request_id)) is not None:
                    on_event(event)
        elif isinstance(message, messages.Stop):
            self.stopped = True
            self._end()

    def _receive(self) -> None:
        while not self._pull.closed:
            try:
                data = self._pull.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.handle(messages.decode_to_http(data))

    def _lose(self) -> None:
        """Handle the end of the engine; what it has sent before counts."""
        self._loop.remove_reader(self._link)
        self._receive()
        self._end()

    def _end(self) -> None:
        """Refuse requests that have not ended by now, or that the engine will not receive any more."""
        if not self.ended:
            self._closed = self.closed or ENGINE_GONE
            for on_event in set(self._callbacks.values()):
                on_event(RequestError(503, self._closed, code=messages.UNAVAILABLE))
            self.ended = True

    def _send(self, data: bytes) -> None:
        if not (self.ended or self._push.closed):
            with contextlib.suppress(zmq.Again):
                self._push.send(data, zmq.NOBLOCK)

    def _beat(self) -> None:
        if not self.ended:
            self._send(messages.encode(messages.Heartbeat()))
            self._loop.call_later(messages.BEAT_S, self._beat)


@dataclass(slots=True)
class _OpenRequest:
    """A request that has not ended: its place, and how many tokens have come, with the times of the first and the last."""

    place: int
    tokens: int = 0
    first: float = 0.0
    latest: float = 0.0


class OpenRequests:
    """Events of some requests until all have ended; at the end of the context the others are cancelled."""

    def __init__(
        self,
        client: EngineClient,
        metrics: Metrics,
        request_ids: Sequence[int],
        encoded: bytes,
        # called with the place of a request and an event of it; returns whether it is finished. `wait` raises its exceptions
        take: Callable[[int, messages.Event], bool],
        arrived: float,  # time of the requests' arrival, on the monotonic clock
        each: bool,  # whether `wait` returns for each event, and each KEEP_ALIVE_S, and not only when all requests have ended
    ) -> None:
        self._client, self._metrics, self._ids, self._take = client, metrics, request_ids, take
        self._began, self._each, self._wake = arrived, each, asyncio.Event()
        self._unfinished = {request_id: _OpenRequest(place) for place, request_id in enumerate(request_ids)}
        self._error: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None
        client.submit(request_ids, encoded, self._on_event)
        if each:
            self._keep_alive()

    def __enter__(self) -> OpenRequests:
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._client.close_requests(self._ids)
        for request_id in self._unfinished:
            self._metrics.cancelled.inc()
            self._metrics.finished.labels("cancelled").inc()
            self._client.cancel(request_id)

    async def wait(self) -> bool:
        """Wait for an event (see `each`), and return whether more can follow; raise RequestError if a request has failed."""
        await self._wake.wait()
        self._wake.clear()
        if self._error is not None:
            raise self._error
        return bool(self._unfinished)

    def _keep_alive(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(KEEP_ALIVE_S, self._keep_alive)
        self._wake.set()

    def _on_event(self, event: messages.Event | RequestError) -> None:
        """Handle an event, in the turn of the event loop that received it.

        The tasks of the answers only write, in the next turn, one after the other: a write to a socket wakes the process that reads
        there, and code that runs between two writes is slower.
        """
        if self._error is not None or not self._unfinished:
            return
        try:
            if isinstance(event, RequestError):
                self._metrics.finished.labels("error").inc(len(self._unfinished))
                self._unfinished.clear()
                raise event
            request = self._unfinished.get(event.request_id)
            if request is None:
                return  # events after a stop string are dropped
            if event.token is not None:
                request.latest = time.monotonic()
                if not request.tokens:
                    request.first = request.latest
                    self._metrics.first_token.observe(request.first - self._began)
                request.tokens += 1
            if event.last:
                self._end(event.request_id, request, event.finish or "error")
            if self._take(request.place, event) and not event.last:
                self._end(event.request_id, request, "stop")
                self._client.cancel(event.request_id, keep=True)
        except Exception as error:  # of this request, not of those beside it
            self._error = error
        if self._each or self._error is not None or not self._unfinished:
            self._wake.set()

    def _end(self, request_id: int, request: _OpenRequest, reason: str) -> None:
        del self._unfinished[request_id]
        self._metrics.finished.labels(reason).inc()
        self._metrics.latency.observe(time.monotonic() - self._began)
        if request.tokens > 1:
            self._metrics.per_token.observe((request.latest - request.first) / (request.tokens - 1))
