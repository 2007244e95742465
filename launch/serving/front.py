"""HTTP has a process of its own: how rank 0 starts it, speaks with it, and notices that it is gone.

Owns that process, and the engine's end of the connection to it. Refuses to know HTTP, and how requests are computed.

Note [Two processes]
    What HTTP costs per token (text, JSON, a write to a socket) is more than planning and sampling cost, and threads of one
    interpreter take turns. So rank 0 starts one more process, which never touches a GPU and is no rank: it has the listening
    socket, the tokenizer and all clients. It is started before the model is read, so that both are ready together.

Note [Ends of the two]
    The operating system closes the connection when either process ends, however it ends. The process of HTTP then answers what is
    open with an error and leaves, and with it the port is free. Rank 0 takes the server down when that process is gone, when it
    gives no sign of life for as long as ranks wait for each other, or when it leaves more than MOST_BEHIND unread. Signals of a
    terminal or a launcher, which come to both, are for rank 0 alone: the other is started with them blocked, and ends by its word.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ringattn.launch.serving.engine import Closed, Engine
from ringattn.launch.serving.scheduling import Event, NeverFits, QueueFull
from ringattn.launch.serving.wire import Message, Unpacker, pack, read_jobs, write_events

MODULE = "ringattn.launch.serving.http_process"
SIGNALS = (signal.SIGTERM, signal.SIGINT)
MOST_BEHIND = 256 * 2**20
"""Bytes that wait for the process of HTTP at most; 64 answers of one step are 2 KiB."""
START_S = 60.0
"""Seconds that the process of HTTP may take to be ready at least: it loads what it needs."""
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def listen(host: str, port: int) -> socket.socket:
    """A socket that clients may connect to, answered or not.

    Args:
        host: The address to listen on.
        port: The port; 0 for any that is free.

    Raises:
        OSError: The address is taken, or not of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


class HttpProcess:
    """The process that will serve HTTP; it begins to load what it needs.

    Attributes:
        connection: To it.
        name: What it is called in messages.
    """

    def __init__(self) -> None:
        self.connection, theirs = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
        # the same code as here, and no GPU
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # which it inherits
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self.name = f"the HTTP process (process {self._process.pid})"

    def serve(self, listening: socket.socket, settings: Message) -> None:
        """Hands it the socket, which is closed here, and what it needs to know (http_process.py)."""
        data = pack({"serve": settings})
        with listening, contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its end is noticed by a `Front`
            sent = socket.send_fds(self.connection, [data], [listening.fileno()])
            self.connection.sendall(data[sent:])

    def wait(self, patience_s: float) -> None:
        """Waits for its end, and ends it when that does not come."""
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Ends it at once, if it has not ended."""
        self._process.kill()
        self._process.wait()


class Front:
    """An engine's end of the connection to who serves HTTP: takes what comes from there to it, and what it delivers there.

    Args:
        engine: Its `deliver` is set.
        connection: The other end is a `Desk`.
        name: What the other side is called in messages.
        lost: Called, in a thread, with a sentence when the other side is gone or silent.
        patience_s: Seconds without a sign of life after which it counts as lost, once it was ready.
    """

    def __init__(
        self, engine: Engine, connection: socket.socket, name: str, lost: Callable[[str], None], patience_s: float
    ) -> None:
        self._engine, self._connection, self._name, self._lost = engine, connection, name, lost
        self._patience, self._start_patience = patience_s, max(patience_s, START_S)
        self._ready, self._closing = threading.Event(), threading.Event()
        connection.settimeout(self._start_patience)
        self._outbox = Outbox(connection, self._fall_behind)
        engine.deliver = self._deliver
        threading.Thread(target=self._read, daemon=True, name="front").start()

    def wait_until_ready(self) -> None:
        """Returns when clients are answered.

        Raises:
            RuntimeError: They are not, in time.
        """
        if not self._ready.wait(self._start_patience):
            raise RuntimeError(
                f"{self._name} must be ready within {self._start_patience:g} s, got nothing; its message is above"
            )

    def stop(self) -> None:
        """Tells the other side to let answers that are under way end, and to end."""
        self._closing.set()
        self._outbox.send(pack({"stop": True}))
        self._outbox.close()

    def _deliver(self, events: Sequence[Event], state: dict[str, Any] | None) -> None:
        message: Message = {}
        if events:
            message["events"] = write_events(events)
        if state is not None:
            message["state"] = state
        self._outbox.send(pack(message))

    def _read(self) -> None:
        unpacker, how = Unpacker(), "is gone"
        try:
            while data := self._connection.recv(2**20):
                for message in unpacker.push(data):
                    self._take(message)
        except TimeoutError:
            how = f"has given no sign of life for {self._connection.gettimeout():g} s"
        except OSError:
            pass
        except Exception as error:  # nothing may end this thread without a word
            how = f"cannot be understood: {type(error).__name__}: {error}"
        self._lose(how)

    def _take(self, message: Message) -> None:
        if "submit" in message:
            jobs = read_jobs(message["submit"])
            try:
                self._engine.submit(jobs)
            except (NeverFits, QueueFull, Closed) as error:
                refused = {"refused": [job.name for job in jobs], "as": type(error).__name__, "message": str(error)}
                self._outbox.send(pack(refused))
        elif "cancel" in message:
            self._engine.cancel(message["cancel"], message["keep"])
        elif "ready" in message:
            self._connection.settimeout(self._patience)
            self._ready.set()

    def _fall_behind(self, size: int) -> None:
        self._lose(f"must take what it is sent, got {size / 2**20:.0f} MiB that it has left unread")

    def _lose(self, how: str) -> None:
        if not self._closing.is_set():
            self._closing.set()
            self._lost(f"{self._name} {how}")


class Outbox:
    """Sends without ever waiting: what a connection does not take at once is sent by a thread, in order.

    Args:
        connection: Where to; its other end notices what is lost.
        full: Called with the bytes that wait when they are more than MOST_BEHIND, which are not kept.
    """

    def __init__(self, connection: socket.socket, full: Callable[[int], None]) -> None:
        self._socket = connection.dup()
        self._socket.setblocking(False)
        self._full = full
        self._change = threading.Condition()
        self._behind: deque[bytes] = deque()
        self._size = 0
        self._over = False
        threading.Thread(target=self._catch_up, daemon=True, name="outbox").start()

    def send(self, data: bytes) -> None:
        """Sends some bytes, now or soon."""
        with self._change:
            if self._over:
                return
            self._behind.append(data)
            self._size += len(data)
            if len(self._behind) == 1:
                self._try()
            if self._behind:
                self._change.notify()
            size = self._size
            if size > MOST_BEHIND:
                self._end()
        if size > MOST_BEHIND:
            self._full(size)

    def close(self) -> None:
        """Nothing more is sent than what waits."""
        with self._change:
            self._over = True
            self._change.notify()

    def _try(self) -> None:
        """Sends what can be sent of the first that waits."""
        try:
            sent = self._socket.send(self._behind[0])
        except BlockingIOError:
            return
        except OSError:
            self._end()
            return
        self._size -= sent
        rest = self._behind.popleft()[sent:]
        if rest:
            self._behind.appendleft(rest)

    def _end(self) -> None:
        self._over = True
        self._behind.clear()
        self._change.notify()

    def _catch_up(self) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLOUT)
        while True:
            with self._change:
                self._change.wait_for(lambda: self._behind or self._over)
                if not self._behind:
                    self._socket.close()
                    return
            poller.poll(1000)
            with self._change:
                if self._behind:
                    self._try()
