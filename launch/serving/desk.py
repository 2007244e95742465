"""The engine as the process of HTTP sees it: who takes requests there, and brings back what happens to them.

Owns names of jobs, which event belongs to which answer, and what is known of the engine. Refuses to know HTTP (http.py), and what
is done with requests on the other side (front.py).
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from ringattn.launch.serving.api import Refused
from ringattn.launch.serving.metrics import Metrics
from ringattn.launch.serving.scheduling import Event, Job, QueueFull, Room
from ringattn.launch.serving.wire import Message, Unpacker, pack, read_events, write_jobs

BEAT_S = 1.0
"""Seconds between signs of life."""

GONE = "the server is going down: its engine is gone"

_REFUSALS = {
    "NeverFits": (400, "max_tokens", "context_length_exceeded"),
    "QueueFull": (429, None, "queue_full"),
    "Closed": (503, None, "unavailable"),
}
"""What the engine's exceptions are in OpenAI's words: status, field and code."""


def refusal_of(kind: str, message: str) -> Refused:
    """What a client is told when the engine has raised an exception of this name."""
    status, param, code = _REFUSALS[kind]
    return Refused(status, message, param, code)


class Desk(asyncio.Protocol):
    """This process's end of the connection to the engine.

    All is called in the event loop's thread, except where it says otherwise.

    Args:
        connection: The other end is a `Front`.
        room: What the engine can take.
        state: Its state at first.

    Attributes:
        over: Set when there is nothing to serve any more: the engine has said so, or is gone.
        told: Whether it has said so.
    """

    def __init__(self, connection: socket.socket, room: Room, state: dict[str, Any]) -> None:
        self.room, self.over, self.told = room, threading.Event(), False
        self._connection, self._state = connection, state
        self._closed: str | None = None
        self._names = itertools.count(1)
        self._open: dict[int, asyncio.Queue[Event | Refused]] = {}
        self._unpacker = Unpacker()
        self._loop: asyncio.AbstractEventLoop
        self._transport: asyncio.WriteTransport

    async def open(self) -> None:
        """Begins to listen to the engine, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        await self._loop.create_unix_connection(lambda: self, sock=self._connection)
        self._beat()

    def say_ready(self) -> None:
        """Tells the engine that clients are answered. In any thread."""
        self._loop.call_soon_threadsafe(self._say, pack({"ready": True}))

    @property
    def closed(self) -> str | None:
        """Why the engine takes no requests; None while it does."""
        return self._closed or self._state["closed"]

    def state(self) -> dict[str, Any]:
        """What the engine has said last about how it goes."""
        return self._state

    def check(self) -> None:
        """Refuses early what the engine would refuse by what it has said last.

        Raises:
            Refused: It is closed, or its queue is full.
        """
        if self.closed:
            raise refusal_of("Closed", self.closed)
        try:
            self.room.check_queue(1, self._state["waiting"])
        except QueueFull as error:
            raise refusal_of("QueueFull", str(error)) from None

    def pack(self, jobs: Sequence[Job]) -> tuple[list[int], bytes]:
        """Names jobs, and writes them as `submit` takes them. In any thread: long prompts take a while."""
        for job in jobs:
            job.name = next(self._names)
        return [job.name for job in jobs], pack({"submit": write_jobs(jobs)})

    def submit(self, names: Sequence[int], packed: bytes) -> asyncio.Queue[Event | Refused]:
        """Sends jobs to the engine.

        Returns:
            Where what happens to them comes; a refusal is of all of them.
        """
        queue: asyncio.Queue[Event | Refused] = asyncio.Queue()
        if self.over.is_set():
            queue.put_nowait(refusal_of("Closed", self.closed or GONE))
        self._open.update(dict.fromkeys(names, queue))
        self._say(packed)
        return queue

    def cancel(self, name: int, keep: bool = False) -> None:
        """Ends a job before its end; `keep` as the engine's."""
        self._say(pack({"cancel": name, "keep": keep}))

    def forget(self, names: Sequence[int]) -> None:
        """Nobody waits for these jobs any more."""
        for name in names:
            del self._open[name]

    def connection_made(self, transport: Any) -> None:
        """Of asyncio."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Of asyncio: the engine has said something."""
        for message in self._unpacker.push(data):
            self._take(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """Of asyncio: the engine is gone. What it had not said is an error."""
        del exc
        self._end()

    def _take(self, message: Message) -> None:
        if "state" in message:
            self._state = message["state"]
        for event in read_events(message.get("events", [])):
            if event.name in self._open:
                self._open[event.name].put_nowait(event)
        if "refused" in message:
            if message["as"] == "Closed":
                self._closed = message["message"]
            queue = self._open.get(message["refused"][0])
            if queue is not None:
                queue.put_nowait(refusal_of(message["as"], message["message"]))
        if "stop" in message:
            self.told = True
            self._end()

    def _end(self) -> None:
        """Nothing more will be said: jobs that have not ended by now, or that crossed the last word, are refused."""
        if not self.over.is_set():
            self._closed = self.closed or GONE
            for queue in {id(queue): queue for queue in self._open.values()}.values():
                queue.put_nowait(refusal_of("Closed", self._closed))
            self.over.set()

    def _say(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def _beat(self) -> None:
        if not self._transport.is_closing():
            self._say(pack({}))
            self._loop.call_later(BEAT_S, self._beat)


class Answers:
    """What happens to some jobs, until all have ended; those that have not at the end of the context are cancelled.

    Iterating gives the place of a job among them and an event, and raises `Refused` when the engine does not take them.

    Args:
        desk: Who takes them.
        metrics: What is observed on the way.
        names: Of the jobs.
        packed: The jobs, as the desk wrote them.
    """

    def __init__(self, desk: Desk, metrics: Metrics, names: Sequence[int], packed: bytes) -> None:
        self._desk, self._metrics, self._names = desk, metrics, names
        self._queue = desk.submit(names, packed)
        self._places = {name: place for place, name in enumerate(names)}
        self._left = set(names)
        self._began = time.monotonic()
        self._tokens: dict[int, tuple[float, float, int]] = {}  # of each job: when the first came, the last, how many

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *_: object) -> None:
        self._desk.forget(self._names)
        for name in self._left:
            self._metrics.cancelled.inc()
            self._desk.cancel(name)

    def __aiter__(self) -> Answers:
        return self

    async def __anext__(self) -> tuple[int, Event]:
        while self._left:
            event = await self._queue.get()
            if isinstance(event, Refused):
                self._left.clear()
                raise event
            if event.name not in self._left:
                continue  # what comes after a stop string is nobody's
            self._observe(event)
            if event.last:
                self._end(event.name)
            return self._places[event.name], event
        raise StopAsyncIteration

    @property
    def more(self) -> bool:
        """Whether something has come that was not taken yet."""
        return not self._queue.empty()

    def stop(self, place: int) -> None:
        """Ends a job that has been answered, if it goes on."""
        name = self._names[place]
        if name in self._left:
            self._end(name)
            self._desk.cancel(name, keep=True)

    def _observe(self, event: Event) -> None:
        if event.token is None:
            return
        now = time.monotonic()
        first, _, count = self._tokens.get(event.name, (now, now, 0))
        if not count:
            self._metrics.first_token.observe(now - self._began)
        self._tokens[event.name] = (first, now, count + 1)

    def _end(self, name: int) -> None:
        self._left.discard(name)
        self._metrics.latency.observe(time.monotonic() - self._began)
        first, last, count = self._tokens.get(name, (0.0, 0.0, 0))
        if count > 1:
            self._metrics.per_token.observe((last - first) / (count - 1))
