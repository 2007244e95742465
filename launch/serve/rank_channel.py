"""Step commands from rank 0 to the other ranks, over ZeroMQ, and how ranks connect to rank 0.

Rank 0 has a ROUTER socket and every other rank a DEALER: commands reach each rank in order, and a send to a rank that is gone
raises (ROUTER_MANDATORY). Rank 0 accepts only ranks that name themselves with the secret that it sends through the process group;
other messages are dropped.
"""

from __future__ import annotations

import os
import secrets
import socket
import time

import zmq

from ringattn.launch.common.distributed import Session
from ringattn.launch.serve.messages import ToRank, decode_to_rank, encode, poller

MAX_MESSAGE = 1024
"""Bytes of a message to rank 0, which gets process ids and heartbeats; the connection that sends more is closed."""
LINGER_MS = 2000
"""Milliseconds in which a message that was sent may leave after its socket was closed."""


def accept_ranks(session: Session, timeout_s: float) -> tuple[zmq.Socket[bytes], dict[bytes, str]]:
    """Wait on rank 0 until all other ranks have connected; return a ROUTER socket, and the names of ranks by identity.

    The others call `connect_to_rank_0`. Raises RuntimeError if a rank did not connect in time.
    """
    local = os.environ.get("LOCAL_WORLD_SIZE") == str(session.world_size)
    host = "127.0.0.1" if local else os.environ.get("MASTER_ADDR", "127.0.0.1")
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.linger, router.router_mandatory, router.maxmsgsize = LINGER_MS, True, MAX_MESSAGE
    port = router.bind_to_random_port(f"tcp://{socket.gethostbyname(host)}")
    secret = secrets.token_hex(16)
    expected = {_identity(secret, index): index for index in range(1, session.world_size)}
    session.broadcast((host, port, secret))
    names: dict[bytes, str] = {}
    deadline = time.monotonic() + timeout_s
    while missing := [index for identity, index in expected.items() if identity not in names]:
        if not router.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            router.close()
            raise RuntimeError(f"ranks {missing} must connect to rank 0 within {timeout_s:g} s, got nothing from them")
        identity, *frames = router.recv_multipart()
        if identity in expected:
            names[identity] = f"rank {expected[identity]} (process {int(frames[0])})"
    return router, names


def connect_to_rank_0(session: Session) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """Connect another rank to rank 0; return a DEALER socket, and one that can be read when the connection has ended."""
    host, port, secret = session.broadcast(None)
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.linger, dealer.routing_id = LINGER_MS, _identity(secret, session.rank)
    ended = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    dealer.connect(f"tcp://{host}:{port}")
    dealer.send(str(os.getpid()).encode())
    return dealer, ended


def close_dealer(dealer: zmq.Socket[bytes]) -> None:
    """Close both sockets of `connect_to_rank_0`."""
    dealer.disable_monitor()
    dealer.close()


def _identity(secret: str, index: int) -> bytes:
    return f"{secret}/{index}".encode()


class RankChannel:
    """Messages from rank 0 to all other ranks.

    Every rank makes one, and calls `broadcast` (rank 0) or `receive` (the others) equally often.

    A wait for a message, or for a receiver, raises RuntimeError after `timeout_s`.
    """

    def __init__(self, session: Session, timeout_s: float) -> None:
        self._session, self._timeout = session, timeout_s
        self._names: dict[bytes, str] = {}
        self._socket: zmq.Socket[bytes] | None = None
        if session.world_size == 1:
            return
        if session.first:
            self._socket, self._names = accept_ranks(session, timeout_s)
            self._socket.sndtimeo = int(1000 * timeout_s)
        else:
            self._socket, ended = connect_to_rank_0(session)
            self._poller = poller(self._socket, ended)

    def broadcast(self, message: ToRank) -> None:
        """Send a message to all other ranks, on rank 0; raise RuntimeError if one is gone, or does not receive."""
        if self._socket is None:
            return
        data = encode(message)
        for identity, name in self._names.items():
            try:
                self._socket.send_multipart([identity, data])
            except zmq.Again:
                raise RuntimeError(
                    f"{name} must receive a message within {self._timeout:g} s, got none received"
                ) from None
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                raise RuntimeError(f"{name} is gone") from None

    def receive(self) -> ToRank:
        """Return the next message of rank 0, on any other rank; raise RuntimeError if it is gone, or sends nothing in time."""
        assert self._socket is not None, "there is a rank 0 beside this one"
        if not self._poller.poll(int(1000 * self._timeout)):
            raise RuntimeError(f"rank 0 must send a message within {self._timeout:g} s, got none")
        try:  # what was sent before the end is still there after it
            return decode_to_rank(self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            raise RuntimeError("rank 0 is gone") from None

    def close(self) -> None:
        """Close the connections."""
        if self._socket is not None:
            self._socket.close() if self._session.first else close_dealer(self._socket)
            self._socket, self._names = None, {}
