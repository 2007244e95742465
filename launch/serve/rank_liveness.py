"""Detection of lost ranks while the server runs.

Every other rank has one more connection to rank 0, on a thread of its own. The operating system closes it when a process ends,
however it ends, and both ends exchange heartbeats, so that a process which hangs, or a host that is gone, is found too. A
collective that waits for a dead rank may notice late, or, on a GPU, not at all.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import zmq

from ringattn.launch.common.distributed import Session
from ringattn.launch.serve.messages import Heartbeat, encode, poller
from ringattn.launch.serve.rank_channel import accept_ranks, close_dealer, connect_to_rank_0

BEAT_S = 1.0
"""Seconds between heartbeats."""
CLOSING_S = 0.1
"""Seconds after which a thread ends at the latest when its rank has ended."""

_HEARTBEAT = encode(Heartbeat())


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
        if session.world_size == 1:
            return
        if session.first:
            router, names = accept_ranks(session, timeout_s)
            self._start(lambda: self._watch_ranks(router, names))
        else:
            dealer, ended = connect_to_rank_0(session)
            self._start(lambda: self._watch_rank_0(dealer, ended))

    def expect_end(self) -> None:
        """Declare that ranks which end from now on are not lost. Rank 0 calls it before it sends Stop."""
        self._expected.set()

    def close(self, timeout_s: float = 10.0) -> None:
        """End the thread; rank 0 waits at most timeout_s until the others have ended theirs, to which its end would be a loss."""
        self._expected.set()
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _start(self, body: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=body, daemon=True, name="rank_liveness")
        self._thread.start()

    def _watch_ranks(self, router: zmq.Socket[bytes], connected: dict[bytes, str]) -> None:
        """Receive heartbeats on rank 0, and send some, which raises if a rank is gone."""
        ended = router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        events = poller(router, ended)
        last_message = dict.fromkeys(connected, time.monotonic())
        next_beat = 0.0
        while connected:
            ready = dict(events.poll(int(1000 * BEAT_S)))
            now = time.monotonic()
            while router.poll(0):
                last_message[router.recv_multipart()[0]] = now
            if ended not in ready and now < next_beat:
                continue
            while ended.poll(0):
                ended.recv_multipart()
            next_beat = now + BEAT_S
            for identity, name in list(connected.items()):
                problem = None
                if now - last_message[identity] > self._timeout:
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
