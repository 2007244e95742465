"""Connections of every rank to rank 0, over TCP.

Owns how ranks find each other, and that nobody else connects in their place. Refuses to know what a connection is for (channel.py,
watch.py).
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ringattn.launch.runtime.distributed import Rank


@dataclass(frozen=True)
class Link:
    """A connection to a rank.

    Attributes:
        rank: Which one.
        process: Its process.
        connection: To it.
    """

    rank: int
    process: int
    connection: socket.socket


def accept_ranks(rank: Rank, announce: Callable[[dict[str, Any]], object], patience_s: float) -> list[Link]:
    """Rank 0: waits until all others have connected.

    Args:
        rank: This rank.
        announce: Tells them what `connect` takes.
        patience_s: Seconds in which they must.

    Returns:
        A connection to each, in rank order.

    Raises:
        RuntimeError: One did not connect in time.
    """
    here = os.environ.get("LOCAL_WORLD_SIZE") == str(rank.world_size)
    host = "127.0.0.1" if here else os.environ.get("MASTER_ADDR", "127.0.0.1")
    links: dict[int, Link] = {}
    with socket.create_server((host, 0), backlog=rank.world_size) as server:
        secret = secrets.token_hex(16)
        announce({"host": host, "port": server.getsockname()[1], "secret": secret})
        server.settimeout(patience_s)
        while missing := sorted(set(range(1, rank.world_size)) - set(links)):
            try:
                connection, _ = server.accept()
            except TimeoutError:
                raise RuntimeError(
                    f"ranks {missing} must connect to rank 0, got nothing from them in {patience_s:g} s"
                ) from None
            hello = _read_hello(connection)
            if hello is None or not hmac.compare_digest(str(hello.get("secret")), secret):
                connection.close()  # a stranger
                continue
            links[hello["rank"]] = Link(hello["rank"], hello["process"], _made_prompt(connection))
    return [links[other] for other in sorted(links)]


def connect(rank: Rank, where: dict[str, Any], patience_s: float) -> socket.socket:
    """Every other rank: connects to rank 0.

    Args:
        rank: This rank.
        where: What rank 0 has announced.
        patience_s: Seconds in which that must be done.
    """
    connection = socket.create_connection((where["host"], where["port"]), timeout=patience_s)
    hello = {"rank": rank.index, "process": os.getpid(), "secret": where["secret"]}
    connection.sendall(json.dumps(hello).encode() + b"\n")
    return _made_prompt(connection)


def _made_prompt(connection: socket.socket) -> socket.socket:
    """The connection, which sends small messages at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _read_hello(connection: socket.socket) -> dict | None:
    """The first line of a connection; None when it is not one of ours."""
    connection.settimeout(5.0)
    data = b""
    try:
        while not data.endswith(b"\n") and len(data) < 1024:
            more = connection.recv(1024)
            if not more:
                return None
            data += more
        hello = json.loads(data)
    except (OSError, ValueError):
        return None
    return hello if isinstance(hello, dict) else None
