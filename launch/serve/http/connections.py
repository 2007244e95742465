"""Limits of connections: how many may be open, and how long each may take to send the head of its next request.

Wraps uvicorn's protocol, which handles requests. uvicorn's own limits are checked when a request has come, so a connection that
sends none, or a part of one, would stay open without end. Here the time to the next head is limited, from the begin of a connection
and from the end of each answer.

Beyond the limit of connections a request for /health is answered: a full server must not look like a dead one. Others get status
503 as soon as their first bytes show that they ask for something else. They are closed in two steps, because a connection that is
closed while the client still writes is reset, answer and all.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ringattn.launch.serve.config import MAX_CLOSING
from ringattn.launch.serve.http.api import RequestError

HEAD_S = 60.0
"""Seconds in which the head of the next request must have come; uvicorn closes connections without any byte of it earlier."""
FAREWELL_S = 5.0
"""Seconds for the request of a connection beyond the limit, and then for reading the answer; most close at once."""
HEALTH = re.compile(rb"(GET|HEAD) /health[ ?]")
HEALTH_BYTES = len(b"HEAD /health ")
"""Bytes after which a request is for /health or not; every request has more."""


def limit_connections(kind: Any, most: int) -> type[asyncio.Protocol]:
    """Return a subclass of uvicorn's protocol `kind` that accepts at most `most` connections; others get /health or status 503."""
    accepted: set[asyncio.Protocol] = set()
    beyond: dict[asyncio.Protocol, Any] = {}  # in the order in which they came, with their transports
    error = RequestError(
        503, f"at most {most} connections may be open, got one more; try again later", code="too_many_connections"
    )
    body = json.dumps(error.body())
    answer = (
        f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"Retry-After: 1\r\nConnection: close\r\n\r\n{body}"
    ).encode()

    class LimitedProtocol(kind):
        """One connection."""

        begun = b""
        """First bytes of a connection beyond the limit, until they show its request."""
        timer: Any = None

        def connection_made(self, transport: Any) -> None:
            """Accept the connection, or wait for its first bytes."""
            if len(accepted) < most:
                accepted.add(self)
                super().connection_made(transport)
                self._await_head(HEAD_S)
                return
            if len(beyond) >= MAX_CLOSING:
                beyond.pop(next(iter(beyond))).close()
            beyond[self] = transport
            self._set_timer(FAREWELL_S, self._reject)

        def data_received(self, data: bytes) -> None:
            """Pass on what an accepted connection sends, or one beyond the limit that asks for /health; drop the rest."""
            if self.transport is not None:
                super().data_received(data)
            elif self.begun is not None:
                self.begun += data
                if HEALTH.match(self.begun):
                    super().connection_made(beyond[self])
                    self.app = _closing(self.app)
                    self._await_head(FAREWELL_S)
                    super().data_received(self.begun)
                elif len(self.begun) >= HEALTH_BYTES:
                    self._reject()

        def on_response_complete(self) -> None:
            """Limit the time to the next request."""
            super().on_response_complete()
            self._await_head(HEAD_S)

        def connection_lost(self, exc: Exception | None) -> None:
            """Free the place of the connection."""
            accepted.discard(self)
            beyond.pop(self, None)
            self.timer.cancel()
            if self.transport is not None:
                super().connection_lost(exc)

        def _reject(self) -> None:
            self.begun = None
            transport = beyond.get(self)
            if transport is not None and not transport.is_closing():
                transport.write(answer)
                transport.write_eof()
                self._set_timer(FAREWELL_S, transport.abort)

        def _await_head(self, seconds: float) -> None:
            self._set_timer(seconds, self._end_wait, seconds, self.transport.get_write_buffer_size())

        def _end_wait(self, seconds: float, unread: int) -> None:
            """Close the connection, unless a request is in work, or its client still reads the last answer."""
            if self.cycle is None or self.cycle.response_complete:
                if self.transport.get_write_buffer_size() < unread:
                    self._await_head(seconds)
                else:
                    self.transport.abort()

        def _set_timer(self, seconds: float, call: Any, *args: Any) -> None:
            if self.timer is not None:
                self.timer.cancel()
            self.timer = asyncio.get_running_loop().call_later(seconds, call, *args)

    return LimitedProtocol


def _closing(app: ASGIApp) -> ASGIApp:
    """Return an application whose answers end their connections."""

    async def closing(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        await app(scope, receive, send_closing)

    return closing
