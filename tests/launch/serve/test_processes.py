"""The two processes of the server: messages are received as sent, neither process waits for the other or outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.launch.common.distributed import Session
from ringattn.launch.serve import engine_server, run
from ringattn.launch.serve.config import ServeArgs
from ringattn.launch.serve.engine_server import EngineServer, HttpProcess, bind, requests_of
from ringattn.launch.serve.http import app
from ringattn.launch.serve.http.body_reader import NEAR_BYTES
from ringattn.launch.serve.http.engine_client import ENGINE_GONE
from ringattn.launch.serve.http.fields import RequestError
from ringattn.launch.serve.messages import (
    Cancel,
    Event,
    NewRequest,
    Prompt,
    Ready,
    Settings,
    StepOutput,
    Stop,
    Submit,
    decode_to_engine,
    decode_to_http,
    encode,
    receive_at,
    send_to,
)
from ringattn.launch.serve.prefix_cache import prefix_digests
from ringattn.launch.serve.sampling import Logprob, Sampling
from ringattn.launch.serve.scheduler import Scheduler
from ringattn.launch.serve.tokenizer import ByteTokenizer, make_tokenizer
from tests.launch.serve.test_http import going_on
from tests.launch.serve.test_server import FLAGS, Process
from tests.support.serving import FakeRunner, FakeServer, Link, make_engine, text_of
from tests.support.timing import HANGS_S, wait_for

# what travels

numbers = st.floats(allow_nan=False)
counts = st.integers(1, 2**63 - 1)
samplings = st.builds(
    Sampling,
    st.floats(0, 2),
    st.floats(0, 1, exclude_min=True),
    st.none() | st.integers() | st.just(10**4300 - 1) | st.just(-(10**5000)),
    st.none() | st.integers(0, 20),
    st.integers(0, 2**31),
    st.floats(0, 1),
    st.floats(0.01, 100),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.lists(st.tuples(st.integers(0, 2**31), st.floats(-100, 100))).map(tuple),
    st.integers(0, 2**31),
    st.lists(st.integers(0, 2**31)).map(tuple),
)
details = st.builds(Logprob, numbers, st.lists(st.tuples(st.integers(0, 2**31), numbers)).map(tuple))
events = st.builds(
    Event,
    counts,
    st.none() | st.integers(0, 2**31),
    st.none() | st.sampled_from(["stop", "length"]),
    st.none() | st.tuples(st.integers(400, 599), st.text(), st.text()),
    st.integers(0, 2**63 - 1),
    st.none() | details,
    st.lists(details).map(tuple),
)


@settings(deadline=None, max_examples=30)
@given(st.lists(events), st.none() | st.just({"closed": None, "pages": {"free": [1, 2]}, "uptime_s": 0.5}))
def test_messages_to_http_are_received_as_sent(sent, state):
    message = StepOutput(sent, state)
    assert decode_to_http(encode(message)) == message


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=1), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), counts, samplings, st.frozensets(st.integers(0, 2**31))), min_size=1),
    st.integers(1, 8),
)
def test_requests_are_received_as_sent_and_draw_the_same_numbers(prompts, asked, size):
    sent = Submit(
        [Prompt(prompt, prefix_digests(prompt, size)) for prompt in prompts],
        [
            NewRequest(name, x % len(prompts), most, sorted(stops), sampling, x % 2 == 0)
            for name, (x, most, sampling, stops) in enumerate(asked, 1)
        ],
    )
    message = decode_to_engine(encode(sent))
    assert message == sent
    assert isinstance(message, Submit)
    for one, other in zip(sent.requests, requests_of(message), strict=True):
        prompt = sent.prompts[one.prompt]
        assert (other.id, other.prompt, other.digests) == (one.id, prompt.tokens, prompt.digests)
        assert (other.max_tokens, other.stops, other.score_prompt) == (one.max_tokens, {*one.stops}, one.score_prompt)
        assert other.sampling is not None
        assert other.sampling == one.sampling
        assert one.sampling.seed is None or other.sampling.draw() == one.sampling.draw()


def test_sockets_have_a_short_path_where_temporary_files_do_not(tmp_path, monkeypatch):
    """Regression: a TMPDIR of 100 characters ended in "File name too long"."""
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    process = HttpProcess(bind("127.0.0.1", 0))
    try:
        with receive_at(process.folder, "engine"):
            assert stat.S_IMODE(os.stat(process.folder).st_mode) == 0o700
    finally:
        process.kill()
    assert not os.path.exists(process.folder)


def test_a_tokenizer_is_rebuilt_from_its_recipe():
    made = make_tokenizer(json.loads(json.dumps(ByteTokenizer(300).recipe)))
    assert isinstance(made, ByteTokenizer)
    assert made.vocab_size == 300


# nobody waits


@contextlib.contextmanager
def quiet_http(lost: list[str], timeout_s: float) -> Iterator[tuple[EngineServer, Link]]:
    """An engine's side of a connection whose other side is the test."""
    runner = FakeRunner()
    engine = make_engine(runner, Scheduler(runner.allocator, chunk=8, max_running=4))
    with contextlib.closing(Link()) as link:
        server = link.server(engine, "the other", lost.append, timeout_s)
        yield server, link
        server.stop()


def test_unread_messages_are_sent_later_in_order_and_the_sender_never_waits():
    # now and then one that no socket takes whole
    sent = [Event(x, failure=(503, "y" * (2**20 if x % 500 == 499 else x * 7919 % 5000), "")) for x in range(3000)]
    lost: list[str] = []
    with quiet_http(lost, HANGS_S) as (server, link):
        for event in sent:  # a send that waited would do so without end
            server._deliver([event], None)
        server.stop()
        with receive_at(link.folder, "http") as pull:
            found = []
            while not isinstance(message := decode_to_http(pull.recv()), Stop):
                assert isinstance(message, StepOutput)
                found += message.events
    assert found == sent
    assert not lost


def test_unread_messages_are_bounded_and_dropped_after_the_end(monkeypatch):
    monkeypatch.setattr(engine_server, "MAX_QUEUED", 100)
    lost: list[str] = []
    with quiet_http(lost, HANGS_S) as (server, _):
        for x in range(200):
            server._deliver([Event(x, 65)], None)
            assert bool(lost) == (x >= 100)
    assert lost == ["the other must receive what it is sent, got 100 messages that it has left unread"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "the other is gone"),
        (encode(Ready()), "the other has sent no heartbeat for 0.2 s"),
        (encode(Cancel(1, keep=None)), "the other must send messages that are understood, got ValidationError: "),  # type: ignore[arg-type]
        (b"{", "the other must send messages that are understood, got ValidationError: "),
        (b"", "the other must send messages that are understood, got DecodeError: "),
    ],
)
def test_an_http_process_that_is_gone_silent_or_invalid_is_lost(data, message):
    lost: list[str] = []
    with quiet_http(lost, 0.2) as (_, link), send_to(link.folder, "engine") as push:
        if data is None:
            link.http.close()
        else:
            push.send(data)
        wait_for(lambda: lost)
    assert len(lost) == 1
    assert lost[0].startswith(message)


def test_open_and_new_requests_get_a_503_when_the_engine_is_gone():
    with FakeServer(FakeRunner(pages=400, step_s=0.02)) as served:
        body = {"prompt": going_on("e", 300), "max_tokens": 300, "temperature": 0}
        with (
            ThreadPoolExecutor(1) as threads,
            httpx.stream("POST", f"{served.url}/v1/completions", json={**body, "stream": True}) as stream,
        ):
            lines = stream.iter_lines()
            next(lines)
            whole = threads.submit(httpx.post, f"{served.url}/v1/completions", json=body)
            served.state_when(lambda state: state["running"] == 2)
            served.link.engine.shutdown(socket.SHUT_RDWR)
            told = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            assert told[-1]["error"]["message"] == ENGINE_GONE
            assert whole.result().status_code == 503
        for answer in (httpx.get(f"{served.url}/health"), httpx.post(f"{served.url}/v1/completions", json=body)):
            assert answer.status_code == 503
            assert "its engine is gone" in answer.text
        assert served.lost == ["the fake is gone"]


def test_requests_around_the_engines_stop_are_refused():
    async def cross(link: Link) -> list[Any]:
        client = link.client(8, {"closed": None})
        await client.open()
        early: list[Any] = []
        late: list[Any] = []
        client.submit([1, 2], b"", early.append)
        client.handle(StepOutput(state={"closed": "the server is shutting down"}))
        client.handle(StepOutput([Event(1, 65, "stop")]))
        client.handle(Stop())
        with pytest.raises(RequestError) as refused:
            client.submit([3], b"", late.append)
        client.close()
        return [*early, len(early) - 2, refused.value, len(late)]

    with contextlib.closing(Link()) as link:
        event, early, none, late, nothing = asyncio.run(cross(link))
    assert event == Event(1, 65, "stop")
    assert (str(early), early.status, none) == ("the server is shutting down", 503, 0)
    assert (str(late), late.status, nothing) == ("the server is shutting down", 503, 0)


@pytest.mark.parametrize("sent", [b"{", b'{"prompt": "a"}'])
def test_requests_that_are_read_when_the_server_ends_get_its_reason(monkeypatch, sent):
    monkeypatch.setattr(app, "END_S", 0.2)
    tokenizer, ended = ByteTokenizer(), threading.Event()
    monkeypatch.setattr(tokenizer, "encode", lambda *_: ended.wait(HANGS_S))  # of a whole body
    with contextlib.ExitStack() as stack:
        # the connection outlives the server
        connection = socket.socket()
        stack.enter_context(connection)
        stack.callback(ended.set)
        with FakeServer(FakeRunner(pages=8), tokenizer=tokenizer) as served:
            connection.connect(("127.0.0.1", served.port))
            head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {max(len(sent), 9)}\r\nExpect: 100-continue"
            connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n".encode())
            assert connection.recv(1000).startswith(b"HTTP/1.1 100")  # it reads the body
            connection.sendall(sent)
            served.engine.fail("the server is going down: rank 1 is gone")
        connection.settimeout(HANGS_S)
        head, _, body = b"".join(iter(lambda: connection.recv(1000), b"")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503")
    error = json.loads(body)["error"]
    assert (error["code"], error["message"]) == ("unavailable", "the server is going down: rank 1 is gone")


def test_a_state_that_was_read_before_a_failure_does_not_hide_its_reason():
    engine = make_engine(runner := FakeRunner(pages=8), Scheduler(runner.allocator, chunk=64, max_running=4))
    told: list[Any] = []
    engine.deliver = lambda _, state: told.append(state and state["closed"])
    engine.stop(0.0)
    state = engine._update_state()
    engine.fail("the server is going down: rank 1 is gone")
    engine._deliver([], state)
    assert told == ["the server is going down: rank 1 is gone"] * 2


# two processes


LONG = "x" * NEAR_BYTES  # of a body that another process reads


class Apart:
    """An engine with a fake model in this process, and HTTP in another, which takes four requests."""

    def __init__(self) -> None:
        bound = bind("127.0.0.1", 0)
        self.port = bound.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = HttpProcess(bound)
        self.servers: list[EngineServer] = []
        self.other = psutil.Process(self.process._process.pid)
        self.runner = FakeRunner(pages=8, step_s=0.01)  # 64 tokens
        scheduler = Scheduler(self.runner.allocator, chunk=64, max_running=64)
        self.engine = make_engine(self.runner, scheduler)
        self.thread = threading.Thread(target=self.engine.run, daemon=True)

    @property
    def settings(self) -> Settings:
        recipe = ByteTokenizer().recipe
        args = ServeArgs("fake", max_running=2, queue=2, page_size=4, max_connections=50)
        return Settings("fake", recipe, args, 64, self.engine.state())

    def ask(self, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json={"temperature": 0, **body})

    def state_when(self, so: Any) -> None:
        wait_for(lambda: so(self.engine.state()), self.engine.state)


@pytest.fixture(scope="module")
def others() -> Iterator[tuple[Apart, Apart]]:
    """Two of them, which start at the same time."""
    others = Apart(), Apart()
    yield others
    for one in others:
        # a test that failed has left a server, for which the end of the process would be that of this one
        for server in one.servers:
            server.stop()
        one.process.kill()


def test_an_engine_that_is_killed_takes_the_process_of_http_with_it_and_the_port_is_free(others):
    apart, _ = others
    apart.process.listen()
    # another process is the engine, and this one its way of saying something
    link = apart.process.link
    assert not link.get_inheritable()
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    engine = subprocess.Popen(sleep, pass_fds=[link.fileno()])
    link.close()
    push = send_to(apart.process.folder, "http")
    push.send(encode(apart.settings))
    with ThreadPoolExecutor(1) as threads, receive_at(apart.process.folder, "engine") as pull:
        assert httpx.get(f"{apart.url}/health").status_code == 200
        asked = threads.submit(apart.ask, prompt="a", max_tokens=9, user=LONG)
        while not isinstance(decode_to_engine(pull.recv()), Submit):
            pass
        assert not asked.done()
        assert apart.other.is_running()
        [reader] = [one for one in apart.other.children() if "spawn_main" in str(one.cmdline())]
        reader.suspend()  # as one that reads: it does not see that nobody waits
        engine.kill()
        engine.wait()
        assert (asked.result().status_code, asked.result().json()["error"]["message"]) == (503, ENGINE_GONE)
    apart.process._process.wait(HANGS_S)
    assert apart.process._process.returncode == 1
    wait_for(lambda: not reader.is_running() or reader.status() == psutil.STATUS_ZOMBIE)
    assert not os.path.exists(apart.process.folder)
    push.close()
    with bind("127.0.0.1", apart.port) as free:
        free.listen()


def test_a_stalled_http_process_stops_no_step_and_a_killed_one_ends_the_server(others, monkeypatch, capfd):
    _, apart = others
    codes: list[int] = []
    monkeypatch.setattr(run.os, "_exit", codes.append)
    fatal_exit = run.FatalExit(Session(0, 1, torch.device("cpu"), None, os.getppid()))
    fatal_exit.engine, fatal_exit.process = apart.engine, apart.process
    process = apart.process
    process.listen()
    apart.servers.append(EngineServer(apart.engine, process.folder, process.link, process.name, fatal_exit, HANGS_S))
    apart.servers[0].start(apart.settings)
    apart.thread.start()

    answer = apart.ask(prompt=going_on("a", 9), max_tokens=9, logprobs=2).json()["choices"][0]
    assert answer["text"] == text_of(going_on("a", 9), 9)
    assert len(answer["logprobs"]["top_logprobs"][8]) == 2
    large = apart.ask(prompt="a", max_tokens=64)
    assert (large.status_code, large.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "must fit into 64 tokens, got 1 + 64 = 65" in large.json()["error"]["message"]

    # signals to all processes of a terminal are neither for this one nor for those that it starts
    assert apart.ask(prompt="a", max_tokens=1, user=LONG).status_code == 200
    for one in (apart.other, *apart.other.children()):
        for number in (signal.SIGINT, signal.SIGTERM):
            one.send_signal(number)
    assert apart.ask(prompt="a", max_tokens=1, user=LONG).status_code == 200
    prompt = going_on("f", 50)

    def ask_three() -> list[Future[httpx.Response]]:
        """Submit three requests at once: one runs, two wait."""
        asked = [threads.submit(apart.ask, prompt=prompt, max_tokens=50) for _ in range(3)]
        apart.state_when(lambda state: (state["running"], state["waiting"]) == (1, 2))
        return asked

    with ThreadPoolExecutor(4) as threads:
        apart.runner.step_s = 0.2  # none ends before all have come
        asked = ask_three()
        late = apart.ask(prompt=prompt, max_tokens=50, n=2)
        assert (late.status_code, late.headers["retry-after"]) == (429, "1")
        assert late.json()["error"]["message"].startswith("at most 4 requests may be open, got 2 more beside 3")
        apart.runner.step_s = 0.01
        apart.other.suspend()
        apart.state_when(lambda state: not (state["running"] or state["waiting"]))
        apart.other.resume()
        assert [one.result().json()["choices"][0]["text"] for one in asked] == [text_of(prompt, 50)] * 3

        apart.runner.step_s = 0.2  # none ends before all have come
        asked = ask_three()
        apart.engine.stop(HANGS_S)
        apart.runner.step_s = 0.01
        late = apart.ask(prompt=prompt, max_tokens=5)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "unavailable")
        wait_for(lambda: httpx.get(f"{apart.url}/health").status_code == 503)  # with the end of a step
        assert sorted(one.result().status_code for one in asked) == [200, 503, 503]
    # nobody was cancelled by what was refused
    assert "ringattn_cancelled_total 0.0" in httpx.get(f"{apart.url}/metrics").text
    apart.thread.join(HANGS_S)
    assert not apart.thread.is_alive()

    apart.other.kill()
    wait_for(lambda: codes)
    assert codes == [1]
    assert f"error: rank 0: the HTTP process (process {apart.other.pid}) is gone" in capfd.readouterr().err


def test_answers_of_failed_requests_are_sent_before_a_server_that_lost_a_rank_ends(monkeypatch):
    """Regression: the HTTP process had one second, and was killed if it was slow."""
    done: list[str] = []
    monkeypatch.setattr(run.os, "_exit", lambda code: done.append(f"exit {code}"))
    fatal_exit: Any = run.FatalExit(Session(0, 1, torch.device("cpu"), None, os.getppid()))
    fatal_exit.engine = SimpleNamespace(fail=done.append)
    fatal_exit.server = SimpleNamespace(stop=lambda: done.append("stop"))
    fatal_exit.process = SimpleNamespace(wait=lambda seconds: done.append(f"wait {seconds:g}"))
    fatal_exit("rank 1 is gone")
    assert done == ["the server is going down: rank 1 is gone", "stop", "wait 10", "exit 1"]


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Process, Process]]:
    """Two whole servers, each of which will lose one of its processes."""
    servers = Process(*FLAGS, "--nproc", "1"), Process(*FLAGS, "--nproc", "1")
    yield servers
    for server in servers:
        server.close()


def open_stream(server: Process, seen: list[Any]) -> threading.Thread:
    """Start a request whose answer will not end, and append its chunks to `seen`."""

    def stream() -> None:
        body = {"prompt": "abc", "max_tokens": 2000, "temperature": 1, "stream": True, "ignore_eos": True}
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer,
        ):
            seen.extend(json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {"))

    thread = threading.Thread(target=stream)
    thread.start()
    server.state_when(lambda state: state["totals"]["steps"]["decode"] > 3)
    return thread


@pytest.mark.dist
@pytest.mark.slow
def test_a_killed_process_of_http_takes_the_server_down(pair):
    server, _ = pair
    server.wait_until_ready()
    (other,) = psutil.Process(server.process.pid).children()
    thread = open_stream(server, [])
    other.kill()
    assert server.wait() == 1, server.said
    thread.join(HANGS_S)
    assert f"error: rank 0: the HTTP process (process {other.pid}) is gone" in server.said


@pytest.mark.dist
@pytest.mark.slow
def test_a_killed_engine_leaves_no_process_behind_and_its_port_is_free(pair):
    _, server = pair
    port = int(server.wait_until_ready().rpartition(":")[2])
    (other,) = psutil.Process(server.process.pid).children()
    seen: list[Any] = []
    thread = open_stream(server, seen)
    server.process.kill()
    other.wait(HANGS_S)
    thread.join(HANGS_S)
    with bind("127.0.0.1", port) as free:
        free.listen()
    assert seen[-1]["error"]["message"] == ENGINE_GONE
