"""Connections of the other ranks to rank 0, over ZeroMQ: one for step commands, and one by which lost ranks are detected.

Rank 0 has a ROUTER socket and every other rank a DEALER: commands reach each rank in order, and a send to a rank that is gone
raises (ROUTER_MANDATORY). Rank 0 accepts only ranks that name themselves with the secret that it sends through the process group;
other messages are dropped.

The second connection has a thread of its own. The operating system closes it when a process ends, however it ends, and both ends
exchange heartbeats, so that a process which hangs, or a host that is gone, is found too. A collective that waits for a dead rank
may notice late, or, on a GPU, not at all.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable

import zmq

from ringattn.launch.common.distributed import Session
from ringattn.launch.serve.messages import BEAT_S, Heartbeat, ToRank, decode_to_rank, encode, poller

MAX_MESSAGE = 1024
"""Bytes of a message to rank 0, which gets process ids and heartbeats; the connection that sends more is closed."""
LINGER_MS = 2000  # milliseconds in which a message that was sent may leave after its socket was closed
CONFIRM_S = 3.0  # seconds in which a rank that lives is heard: three heartbeats
CLOSING_S = 0.1  # seconds after which a thread of `RankLiveness` ends at the latest when its rank has ended

_HEARTBEAT = encode(Heartbeat())


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
    """Messages from rank 0 to all other ranks; a wait for one, or for a receiver, raises RuntimeError after `timeout_s`.

    Every rank makes one, and calls `broadcast` (rank 0) or `receive` (the others) equally often.
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


class RankLiveness:
    """A connection of every other rank to rank 0, and a thread on each rank that waits for its end.

    Every rank makes one; it returns when all are connected.

    Args:
        lost: Called, in the thread, with a message that names the rank which is gone or silent.
        timeout_s: Seconds without a heartbeat after which a rank counts as lost, and in which all must connect.
    """

    def __init__(self, session: Session, lost: Callable[[str], None], timeout_s: float) -> None:
        self._lost, self._timeout = lost, timeout_s
        self._closing = threading.Event()
        self._expected = threading.Event()
        self._thread: threading.Thread | None = None
        self._heard: dict[bytes, float] = {}  # on rank 0: time of the last message of each rank that is not lost
        if session.world_size == 1:
            return
        self._thread = threading.Thread(
            target=self._watch_ranks if session.first else self._watch_rank_0,
            args=accept_ranks(session, timeout_s) if session.first else connect_to_rank_0(session),
            daemon=True,
            name="rank_liveness",
        )
        self._thread.start()

    def expect_end(self) -> None:
        """Declare that ranks which end from now on are not lost. Rank 0 calls it before it sends Stop."""
        self._expected.set()

    def confirm(self) -> None:
        """Wait on rank 0 until every other rank has been heard since this call, or its loss was told; CONFIRM_S at most.

        A launcher that has lost a rank ends the others by a signal, which may come before the loss is noticed here.
        """
        began = time.monotonic()
        while min([*self._heard.values()], default=math.inf) <= began > time.monotonic() - CONFIRM_S:
            time.sleep(CLOSING_S)

    def close(self, timeout_s: float = 10.0) -> None:
        """End the thread; rank 0 waits at most timeout_s until the others have ended theirs, to which its end would be a loss."""
        self._expected.set()
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _watch_ranks(self, router: zmq.Socket[bytes], connected: dict[bytes, str]) -> None:
        """Receive heartbeats on rank 0, and send some, which raises if a rank is gone."""
        ended = router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        events = poller(router, ended)
        self._heard = dict.fromkeys(connected, time.monotonic())
        next_beat = 0.0
        while connected:
            ready = dict(events.poll(int(1000 * BEAT_S)))
            now = time.monotonic()
            while router.poll(0):
                self._heard[router.recv_multipart()[0]] = now
            if ended not in ready and now < next_beat:
                continue
            while ended.poll(0):
                ended.recv_multipart()
            next_beat = now + BEAT_S
            for identity, name in list(connected.items()):
                problem = None
                if now - self._heard[identity] > self._timeout:
                    problem = f"has sent no heartbeat for {self._timeout:g} s"
                try:
                    router.send_multipart([identity, _HEARTBEAT], zmq.NOBLOCK)
                except zmq.Again:
                    pass  # it does not receive; its own heartbeats decide
                except zmq.ZMQError:
                    problem = "is gone"
                if problem is not None:
                    del connected[identity]
                    self._lose(f"{name} {problem}")
                    del self._heard[identity]
        router.disable_monitor()
        router.close()

    def _watch_rank_0(self, dealer: zmq.Socket[bytes], ended: zmq.Socket[bytes]) -> None:
        """Send heartbeats on any other rank, and wait for the end of rank 0."""
        events = poller(dealer, ended)
        next_beat, last_message = 0.0, time.monotonic()
        while not self._closing.is_set():
            ready = dict(events.poll(int(1000 * CLOSING_S)))
            now = time.monotonic()
            problem = "is gone" if ended in ready else None
            if dealer in ready:
                dealer.recv()
                last_message = now
            elif now - last_message > self._timeout:
                problem = f"has sent no heartbeat for {self._timeout:g} s"
            if problem is not None:
                self._lose(f"rank 0 {problem}")
                break
            if now >= next_beat:
                next_beat = now + BEAT_S
                with contextlib.suppress(zmq.Again):
                    dealer.send(_HEARTBEAT, zmq.NOBLOCK)
        close_dealer(dealer)

    def _lose(self, message: str) -> None:
        if not self._expected.is_set():
            self._lost(message)
