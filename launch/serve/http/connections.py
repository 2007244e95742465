"""Limit of open connections: one too many gets status 503, and idle ones are closed.

Wraps uvicorn's protocol, which handles requests. uvicorn's own limit is checked when a request has come: connections that send none
are not bounded, and each holds a file of the process. Here one too many is answered and closed as it comes, before a byte is read.
It is closed in two steps, because a connection that is closed while the client still writes is reset, answer and all.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from ringattn.launch.serve.config import MAX_CLOSING
from ringattn.launch.serve.http.api import RequestError

IDLE_S = 60.0
"""Seconds in which the first request of a connection must have come."""
FAREWELL_S = 5.0
"""Seconds in which a rejected client may read the answer; most close at once."""


def limit_connections(kind: Any, most: int) -> type[asyncio.Protocol]:
    """Return a subclass of uvicorn's protocol `kind` that accepts at most `most` connections; others get status 503."""
    accepted: set[asyncio.Protocol] = set()
    closing: dict[asyncio.Protocol, Any] = {}  # in the order in which they came, with their transports
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

        rejected = False

        def connection_made(self, transport: Any) -> None:
            """Accept the connection, or answer and close it."""
            if len(accepted) < most:
                accepted.add(self)
                super().connection_made(transport)
                self._idle_timer = asyncio.get_running_loop().call_later(IDLE_S, self._close_if_idle)
                return
            self.rejected = True
            if len(closing) >= MAX_CLOSING:
                closing.pop(next(iter(closing))).close()
            closing[self] = transport
            transport.write(answer)
            transport.write_eof()
            asyncio.get_running_loop().call_later(FAREWELL_S, transport.close)

        def data_received(self, data: bytes) -> None:
            """Pass data to the protocol of an accepted connection."""
            if not self.rejected:
                super().data_received(data)

        def connection_lost(self, exc: Exception | None) -> None:
            """Free the place of the connection."""
            accepted.discard(self)
            closing.pop(self, None)
            if not self.rejected:
                self._idle_timer.cancel()
                super().connection_lost(exc)

        def _close_if_idle(self) -> None:
            if self.cycle is None:
                self.transport.close()

    return LimitedProtocol
