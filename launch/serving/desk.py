"""The engine as the process of HTTP sees it: who takes requests there, and brings back what happens to them.

Owns names of jobs, which event belongs to which answer, and what is known of the engine. Refuses to know HTTP (http.py), and what
is done with requests on the other side (front.py).

Note [One turn for a step]
    A step brings a token for each of many answers. What each becomes, its text and its line, is made in the turn of the event loop
    that reads the step; the tasks of the answers are woken by it and only write, one after the other, in the next. A write to
    a socket wakes who reads there, and what is computed after it is slower: with 15 us of Python for each, 64 writes one after the
    other took 5 to 6 us of a core each, and 9 to 10 where the Python stood between them (uvloop, 230 bytes each over loopback, 2
    cores of a virtual machine).
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
        self._open: dict[int, Callable[[Event | Refused], object]] = {}
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
            self.room.check_queue(1, self._state["queued"])
        except QueueFull as error:
            raise refusal_of("QueueFull", str(error)) from None

    def pack(self, jobs: Sequence[Job]) -> tuple[list[int], bytes]:
        """Names jobs, and writes them as `submit` takes them. In any thread: long prompts take a while."""
        for job in jobs:
            job.name = next(self._names)
        return [job.name for job in jobs], pack({"submit": write_jobs(jobs)})

    def submit(self, names: Sequence[int], packed: bytes, put: Callable[[Event | Refused], object]) -> None:
        """Sends jobs to the engine.

        Args:
            names: Of the jobs.
            packed: The jobs, as `pack` wrote them.
            put: Called with what happens to them, which must not raise; a refusal is of all of them.
        """
        if self.over.is_set():
            put(refusal_of("Closed", self.closed or GONE))
        self._open.update(dict.fromkeys(names, put))
        self._say(packed)

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
        for event in read_events(message.get("events", ())):
            if (put := self._open.get(event.name)) is not None:
                put(event)
        if "refused" in message:
            if message["as"] == "Closed":
                self._closed = message["message"]
            if (put := self._open.get(message["refused"][0])) is not None:
                put(refusal_of(message["as"], message["message"]))
        if "stop" in message:
            self.told = True
            self._end()

    def _end(self) -> None:
        """Nothing more will be said: jobs that have not ended by now, or that crossed the last word, are refused."""
        if not self.over.is_set():
            self._closed = self.closed or GONE
            for put in set(self._open.values()):
                put(refusal_of("Closed", self._closed))
            self.over.set()

    def _say(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def _beat(self) -> None:
        if not self._transport.is_closing():
            self._say(pack({}))
            self._loop.call_later(BEAT_S, self._beat)


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
        desk: Who takes them.
        metrics: What is observed on the way.
        names: Of the jobs.
        packed: The jobs, as the desk wrote them.
        take: Called with the place of a job among them and what happened to it (Note [One turn for a step]); returns whether
            nobody wants more of it. What it raises, `some` and `all` raise.
        arrived: When the request did, by the monotonic clock.
    """

    def __init__(
        self,
        desk: Desk,
        metrics: Metrics,
        names: Sequence[int],
        packed: bytes,
        take: Callable[[int, Event], bool],
        arrived: float,
    ) -> None:
        self._desk, self._metrics, self._names, self._take = desk, metrics, names, take
        self._left = {name: _Job(place) for place, name in enumerate(names)}
        self._began = arrived
        self._error: Exception | None = None
        self._new = self._for_all = False
        self._waiting: asyncio.Future[None] | None = None
        desk.submit(names, packed, self._put)

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *_: object) -> None:
        self._desk.forget(self._names)
        for name in self._left:
            self._metrics.cancelled.inc()
            self._desk.cancel(name)

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
        """Takes what has happened, in the desk's turn."""
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
                self._desk.cancel(what.name, keep=True)
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
