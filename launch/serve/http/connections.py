"""How many connections the server holds open, and what it says to one more.

Owns their count, and the end of those that ask nothing. Refuses to know requests: those are uvicorn's protocol, which is given.

Note [Not by uvicorn]
    uvicorn's own limit counts connections too, but looks at it when a request has come: connections that send none are not bounded,
    and each holds a file of the process. Here one too many is answered and closed as it comes, before a byte is read. It is
    closed in two steps, because a connection that is closed while the client still writes is reset, answer and all.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from ringattn.launch.serve.config import MOST_LEAVING
from ringattn.launch.serve.http.api import Refused

SILENT_S = 60.0
"""Seconds in which the first request of a connection must have come."""
FAREWELL_S = 5.0
"""Seconds in which a client may read why it is turned away; most close at once when they have."""


def bound_connections(kind: Any, most: int) -> type[asyncio.Protocol]:
    """A protocol of which a server holds so many open at most; others get status 503.

    Args:
        kind: uvicorn's protocol.
        most: How many.
    """
    here: set[asyncio.Protocol] = set()
    leaving: dict[asyncio.Protocol, Any] = {}  # in the order in which they came, with their transports
    answer = _answer(most)

    class Bounded(kind):
        """One connection."""

        turned_away = False

        def connection_made(self, transport: Any) -> None:
            """Takes it, or answers and closes it."""
            if len(here) < most:
                here.add(self)
                super().connection_made(transport)
                self._silence = asyncio.get_running_loop().call_later(SILENT_S, self._close_if_silent)
                return
            self.turned_away = True
            if len(leaving) >= MOST_LEAVING:
                leaving.pop(next(iter(leaving))).close()
            leaving[self] = transport
            transport.write(answer)
            transport.write_eof()
            asyncio.get_running_loop().call_later(FAREWELL_S, transport.close)

        def data_received(self, data: bytes) -> None:
            """What comes is read by the protocol, or by nobody."""
            if not self.turned_away:
                super().data_received(data)

        def connection_lost(self, exc: Exception | None) -> None:
            """Its place is free."""
            here.discard(self)
            leaving.pop(self, None)
            if not self.turned_away:
                self._silence.cancel()
                super().connection_lost(exc)

        def _close_if_silent(self) -> None:
            if self.cycle is None:
                self.transport.close()

    return Bounded


def _answer(most: int) -> bytes:
    error = Refused(
        503, f"at most {most} connections may be open, got one more; try again later", code="too_many_connections"
    )
    body = json.dumps(error.body()).encode()
    head = (
        f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Retry-After: 1\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
