"""Rank 0's side of the HTTP process: starts it, receives requests for the engine, and sends events to it.

HTTP costs more per token (text, JSON, a write to a socket) than planning and sampling do, and threads of one interpreter take
turns. So rank 0 starts one more process, before the model is read, with the listening socket, the tokenizer and all clients.

Messages travel over two ZeroMQ pipes (PUSH to PULL) in a folder that only this user may enter; a send never waits. Beside them
the processes share a pair of connected sockets on which nothing is sent: the operating system closes it when either process ends.
The HTTP process then answers open requests with an error and exits, and with it the port is free. Rank 0 takes the server down
when the HTTP process is gone, sends no heartbeat, or leaves more than MAX_QUEUED messages unread. Signals of a terminal or a
launcher, which come to both, are for rank 0 alone: the HTTP process is started with them blocked, and ends with the message Stop.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import zmq

from ringattn.launch.serve import messages
from ringattn.launch.serve.engine import Engine
from ringattn.launch.serve.grammar import GrammarCompiler, GrammarError
from ringattn.launch.serve.scheduler import AnswerRequest

MODULE = "ringattn.launch.serve.http.process"
SIGNALS = (signal.SIGTERM, signal.SIGINT)
BACKLOG = 2048  # connections that wait to be accepted
UNREAD_S = 30.0  # seconds in which a client takes nothing of what is sent, after which the system ends its connection
MAX_QUEUED = 2**15
"""Maximum of messages that wait for the HTTP process; one has the tokens of a step, half a KiB for 64 answers."""
START_S = 60.0  # seconds that the HTTP process may take at least to be ready: it loads tokenizers and packages
COMPILE_THREADS = 2  # threads that compile grammars
CHECK_S = 1.0  # seconds between checks for heartbeats that are missing
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def bind(host: str, port: int) -> socket.socket:
    """Return a socket with an address (port 0 for any that is free), which does not listen yet; raise OSError if it is taken."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # its connections inherit it
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNREAD_S))
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


class HttpProcess:
    """The process that will serve HTTP to clients of `bound`, which does not listen yet; it begins to load packages."""

    def __init__(self, bound: socket.socket) -> None:
        self._bound, self.port = bound, bound.getsockname()[1]
        # for this user only. The path of a socket has a maximal length, which a long TMPDIR exceeds
        long = len(os.fsencode(tempfile.gettempdir())) + len("/ringattn-xxxxxxxx/engine") > zmq.IPC_PATH_MAX_LEN
        self.folder = tempfile.mkdtemp(prefix="ringattn-", dir="/tmp" if long else None)
        self.link, theirs = socket.socketpair()  # closed with the process
        environment = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
        # the same code as here, and no GPU
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
        descriptors = (bound.fileno(), theirs.fileno())
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # which it inherits
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, *map(str, descriptors), self.folder],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=descriptors,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self.name = f"the HTTP process (process {self._process.pid})"

    def listen(self) -> None:
        """Let clients connect, though none is answered yet; raise OSError if another process listens at the address by now."""
        self._bound.listen(BACKLOG)
        self._bound.close()

    def wait(self, timeout_s: float) -> None:
        """Wait for its end, and kill it after the timeout."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """End it at once, if it has not ended."""
        self._process.kill()
        self._process.wait()
        self._bound.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class EngineServer:
    """Receives requests for an engine from an `EngineClient`, and sends it their events.

    Args:
        link: Socket that closes with the other process.
        lost: Called, in a thread, with a message when the other process is gone or silent.
        timeout_s: Seconds without a heartbeat after which it counts as lost, once it is ready.
        compiler: Of the grammars of requests; the reason for none, for which the other process refuses them.
    """

    def __init__(
        self,
        engine: Engine,
        folder: str,
        link: socket.socket,
        name: str,
        lost: Callable[[str], None],
        timeout_s: float,
        compiler: GrammarCompiler | str = "",
    ) -> None:
        self._engine, self._link, self._name, self._lost = engine, link, name, lost
        self._timeout, self._start_timeout = timeout_s, max(timeout_s, START_S)
        self._ready, self._closing = threading.Event(), threading.Event()
        self._lock = threading.Lock()  # a socket is used by one thread at a time
        self._compiler = compiler
        self._compile_threads = ThreadPoolExecutor(COMPILE_THREADS, "grammars")  # which start with the first grammar
        self._compiling: set[int] = set()  # requests whose grammar is being compiled
        self._compiling_lock = threading.Lock()
        self._push = messages.send_to(folder, "http", MAX_QUEUED)
        self._pull = messages.receive_at(folder, "engine")
        engine.deliver = self._deliver
        threading.Thread(target=self._receive, daemon=True, name="engine_server").start()

    def start(self, settings: messages.Settings) -> None:
        """Send the settings, and return when clients are answered; raise RuntimeError if they are not, in time."""
        self._send(settings)
        if not self._ready.wait(self._start_timeout):
            raise RuntimeError(
                f"{self._name} must be ready within {self._start_timeout:g} s, got nothing; its message is above"
            )

    def stop(self) -> None:
        """Send Stop: the other process lets open answers end, and exits."""
        self._send(messages.Stop())
        self._closing.set()
        with self._lock:
            self._push.close()

    def _deliver(self, events: Sequence[messages.Event], state: dict[str, Any] | None) -> None:
        self._send(messages.StepOutput(list(events), state))

    def _send(self, message: messages.ToHttp) -> None:
        """Send a message without waiting, in any thread."""
        data = messages.encode(message)
        try:
            with self._lock:
                if not self._push.closed:
                    self._push.send(data, zmq.NOBLOCK)
        except zmq.Again:
            self._lose(f"must receive what it is sent, got {MAX_QUEUED} messages that it has left unread")

    def _receive(self) -> None:
        poller = messages.poller(self._pull, self._link)
        last_message, problem = time.monotonic(), None
        while problem is None and not self._closing.is_set():
            timeout = self._timeout if self._ready.is_set() else self._start_timeout
            ready = dict(poller.poll(int(1000 * min(CHECK_S, timeout))))
            now = time.monotonic()
            if self._pull in ready:
                last_message = now
                try:
                    self._handle(self._pull.recv())
                except Exception as error:  # this thread must not end silently
                    problem = f"must send messages that are understood, got {type(error).__name__}: {error}"
            elif self._link.fileno() in ready:
                problem = "is gone"
            elif now - last_message > timeout:
                problem = f"has sent no heartbeat for {timeout:g} s"
        self._pull.close()
        if problem is not None:
            self._lose(problem)

    def _handle(self, data: bytes) -> None:
        message = messages.decode_to_engine(data)
        if isinstance(message, messages.Submit) and message.grammar:
            with self._compiling_lock:
                self._compiling.update(new.id for new in message.requests)
            self._compile_threads.submit(self._submit_compiled, message)
        elif isinstance(message, messages.Submit):
            self._engine.submit(requests_of(message))
        elif isinstance(message, messages.Cancel):
            with self._compiling_lock:
                if message.request_id in self._compiling:
                    self._compiling.discard(message.request_id)
                else:
                    self._engine.cancel(message.request_id, message.keep)
        elif isinstance(message, messages.Ready):
            self._ready.set()

    def _submit_compiled(self, message: messages.Submit) -> None:
        """Compile the grammar of requests, in a thread, and submit those that were not cancelled meanwhile."""
        assert not isinstance(self._compiler, str), "the HTTP process refuses grammars where there is no compiler"
        requests = requests_of(message)
        try:
            grammar = self._compiler.compile(message.grammar)
            for request in requests:
                assert request.sampling is not None, "a request over HTTP has options"
                request.sampling.grammar = grammar.copy()
            failure = None
        except GrammarError as error:
            failure = 400, f"the grammar must compile, got {error}", messages.GRAMMAR
        with self._compiling_lock:
            requests = [request for request in requests if request.id in self._compiling]
            self._compiling.difference_update(request.id for request in requests)
            if failure is None:
                self._engine.submit(requests)
        if failure is not None:
            self._deliver([messages.Event(request.id, failure=failure) for request in requests], None)

    def _lose(self, problem: str) -> None:
        if not self._closing.is_set():
            self._closing.set()
            self._lost(f"{self._name} {problem}")


def requests_of(message: messages.Submit) -> list[AnswerRequest]:
    """Return the requests of a message as the scheduler takes them."""
    return [
        AnswerRequest(
            new.id,
            message.prompts[new.prompt].tokens,
            new.max_tokens,
            sampling=new.sampling,
            stops=frozenset(new.stops),
            digests=message.prompts[new.prompt].digests,
            score_prompt=new.score_prompt,
            arrived=message.arrived,
        )
        for new in message.requests
    ]
