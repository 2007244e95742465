"""Notices at once that a rank is gone.

Owns one connection from every rank to rank 0, which the operating system closes when a process ends, however it ends. Refuses
to know what ranks do. A collective that waits for a dead rank may notice late, or, on a GPU, not at all.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from ringattn.launch.runtime.distributed import Rank
from ringattn.launch.serving.channel import Channel
from ringattn.launch.serving.links import accept_ranks, connect

BEAT_S = 1.0
"""Seconds between signs of life."""


class Watch:
    """Connections to rank 0, and a thread for each that waits for its end.

    Every rank makes it; it returns when all are connected.

    Args:
        rank: This rank.
        channel: To tell the others where rank 0 listens.
        lost: Called, in a thread, with a sentence that names the rank which is gone or silent.
        patience_s: Seconds without a sign of life after which a rank counts as lost, and in which all must connect.

    Raises:
        RuntimeError: A rank did not connect in time.
    """

    def __init__(self, rank: Rank, channel: Channel, lost: Callable[[str], None], patience_s: float) -> None:
        self._lost, self._patience = lost, patience_s
        self._closing = threading.Event()
        self._first = rank.first
        self._watched: list[tuple[socket.socket, threading.Thread]] = []
        if rank.world_size == 1:
            return
        if rank.first:
            for link in accept_ranks(rank, channel.send, patience_s):
                self._start(self._wait, link.connection, link.rank, link.process)
        else:
            self._start(self._beat, connect(rank, channel.receive(), patience_s))

    def expect_end(self) -> None:
        """Ranks that go from now on are not lost. Rank 0 calls it before it tells the others to go."""
        self._closing.set()

    def close(self, patience_s: float = 10.0) -> None:
        """Ends the watching; rank 0 waits for the others to have done so, lest they miss it.

        Args:
            patience_s: Seconds it waits at most.
        """
        self._closing.set()
        for connection, thread in self._watched:
            if not self._first:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # wakes its thread
            thread.join(patience_s)
            connection.close()

    def _start(self, body: Callable[..., None], connection: socket.socket, *arguments: int) -> None:
        thread = threading.Thread(target=body, args=(connection, *arguments), daemon=True, name="watch")
        self._watched.append((connection, thread))
        thread.start()

    def _wait(self, connection: socket.socket, rank: int, process: int) -> None:
        """On rank 0: reads the signs of life of one rank until there are none."""
        connection.settimeout(self._patience)
        how = "is gone"
        try:
            while connection.recv(64):
                pass
        except TimeoutError:
            how = f"has given no sign of life for {self._patience:g} s"
        except OSError:
            pass
        if not self._closing.is_set():
            self._lost(f"rank {rank} (process {process}) {how}")

    def _beat(self, connection: socket.socket) -> None:
        """On other ranks: gives signs of life, and waits for the end of rank 0."""
        connection.settimeout(BEAT_S)
        while True:
            try:
                if not connection.recv(64):
                    break
            except TimeoutError:
                try:
                    connection.sendall(b".")
                except OSError:
                    break
            except OSError:
                break
        if not self._closing.is_set():
            self._lost("rank 0 is gone")
