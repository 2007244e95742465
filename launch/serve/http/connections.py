"""Limits of connections: how many may be open, and how long each may take to send the head of its next request.

Wraps uvicorn's protocol, which handles requests. uvicorn's own limits are checked when a request has come, so a connection that
sends none, or a part of one, would stay open without end. Here the time to the next head is limited, from the begin of a connection
and from the end of each answer.

A connection beyond the limit gets an answer as soon as its first bytes show what it asks for: that of /health, because a full
server must not look like a dead one, or else status 503. It is closed in two steps, because a connection that is closed while the
client still writes is reset, answer and all.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from ringattn.launch.serve.config import MAX_CLOSING
from ringattn.launch.serve.http.fields import RequestError

HEAD_S = 60.0
"""Seconds in which the head of the next request must have come; uvicorn closes connections without any byte of it earlier."""
FAREWELL_S = 5.0
"""Seconds for the request of a connection beyond the limit, and then for reading the answer; most close at once."""

Health = Callable[[], tuple[int, dict[str, str]]]


def limit_connections(kind: Any, most: int, health: Health, root: str = "") -> type[asyncio.Protocol]:
    """Return a subclass of uvicorn's protocol `kind` for `most` connections; `health` answers /health, also below `root`."""
    accepted: set[asyncio.Protocol] = set()
    beyond: dict[asyncio.Protocol, Any] = {}  # in the order in which they came, with their transports
    probe = re.compile(rb"(GET|HEAD) (%b)?/health[ ?]" % re.escape(root.encode()))
    too_many = RequestError(
        503, f"at most {most} connections may be open, got one more; try again later", code="too_many_connections"
    )

    class LimitedProtocol(kind):
        """One connection."""

        begun: bytes | None = b""  # first bytes of a connection beyond the limit, until it is answered
        timer: Any = None

        def connection_made(self, transport: Any) -> None:
            """Accept the connection, or wait for its first bytes."""
            if len(accepted) < most:
                accepted.add(self)
                super().connection_made(transport)
                self._await_head()
                return
            if len(beyond) >= MAX_CLOSING:
                beyond.pop(next(iter(beyond))).close()
            beyond[self] = transport
            self._set_timer(FAREWELL_S, self._answer_last, b"")

        def data_received(self, data: bytes) -> None:
            """Pass on what an accepted connection sends; answer one beyond the limit, and drop the rest."""
            if self.transport is not None:
                super().data_received(data)
            elif self.begun is not None:
                self.begun += data
                if b"\n" in self.begun or len(self.begun) >= len(f"HEAD {root}/health "):
                    self._answer_last(self.begun)

        def on_response_complete(self) -> None:
            """Limit the time to the next request."""
            super().on_response_complete()
            self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            """Free the place of the connection."""
            accepted.discard(self)
            beyond.pop(self, None)
            self.timer.cancel()
            if self.transport is not None:
                super().connection_lost(exc)

        def _answer_last(self, begun: bytes) -> None:
            """Answer a connection beyond the limit, and close it."""
            self.begun, transport, asked = None, beyond.get(self), probe.match(begun)
            if transport is None or transport.is_closing():
                return
            status, content = health() if asked else (too_many.status, too_many.body())
            body = json.dumps(content)
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            retry = "\r\nRetry-After: 1" if status == 503 else ""
            body = "" if asked and asked[1] == b"HEAD" else body
            transport.write(f"{head}{retry}\r\nConnection: close\r\n\r\n{body}".encode())
            transport.write_eof()
            self._set_timer(FAREWELL_S, transport.abort)

        def _await_head(self) -> None:
            self._set_timer(HEAD_S, self._end_wait, self.transport.get_write_buffer_size())

        def _end_wait(self, unread: int) -> None:
            """Close the connection, unless a request is in work, or its client still reads the last answer."""
            if self.cycle is None or self.cycle.response_complete:
                if self.transport.get_write_buffer_size() < unread:
                    self._await_head()
                else:
                    self.transport.abort()

        def _set_timer(self, seconds: float, call: Any, *args: Any) -> None:
            if self.timer is not None:
                self.timer.cancel()
            self.timer = asyncio.get_running_loop().call_later(seconds, call, *args)

    return LimitedProtocol
