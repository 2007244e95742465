"""The two processes of the server: what they say survives the way, neither waits for the other, and neither outlives the other."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.launch.distributed import Rank
from ringattn.launch.serving import front, run
from ringattn.launch.serving.api import Refused
from ringattn.launch.serving.config import Limits
from ringattn.launch.serving.desk import GONE, Desk
from ringattn.launch.serving.engine import Engine
from ringattn.launch.serving.front import Front, HttpProcess, Outbox, listen
from ringattn.launch.serving.prefixes import chain
from ringattn.launch.serving.sampling import Logprob, Sampling
from ringattn.launch.serving.scheduling import Event, Job, Room, Scheduler
from ringattn.launch.serving.text import Bytes, make_tokenizer
from ringattn.launch.serving.wire import Unpacker, pack, read_events, read_jobs, write_events, write_jobs
from tests.serving import FakeRunner, Served, text_of
from tests.test_serve_http import going_on
from tests.test_serve_run import FLAGS, Process

# what travels

numbers = st.floats(allow_nan=False)
samplings = st.builds(
    Sampling,
    st.floats(0, 2),
    st.floats(0, 1, exclude_min=True),
    st.none() | st.integers() | st.just(10**4300 - 1) | st.just(-(10**5000)),
    st.none() | st.integers(0, 20),
)
details = st.builds(Logprob, numbers, st.lists(st.tuples(st.integers(0, 2**31), numbers)).map(tuple))
events = st.builds(
    Event,
    st.integers(1),
    st.none() | st.integers(0, 2**31),
    st.none() | st.sampled_from(["stop", "length"]),
    st.none() | st.tuples(st.integers(400, 599), st.text()),
    st.integers(0),
    st.none() | details,
)


def travel(message: dict[str, Any], cuts: random.Random) -> dict[str, Any]:
    """A message that comes between two others, in pieces."""
    data, unpacker, found = pack({}) + pack(message) + pack({"ready": True}), Unpacker(), []
    while data:
        length = cuts.randrange(1, len(data) + 1)
        found += unpacker.push(data[:length])
        data = data[length:]
    assert (found[0], found[2], len(found)) == ({}, {"ready": True}, 3)
    return found[1]


@settings(deadline=None, max_examples=30)
@given(st.lists(events), st.randoms())
def test_events_survive_the_way(sent, cuts):
    assert read_events(travel({"events": write_events(sent)}, cuts)["events"]) == sent


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=1), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1), samplings, st.frozensets(st.integers(0))), min_size=1),
    st.integers(1, 8),
    st.randoms(),
)
def test_jobs_survive_the_way_and_draw_as_they_would_have(prompts, asked, size, cuts):
    digests = [chain(prompt, size) for prompt in prompts]
    sent = [
        Job(name, prompts[x % len(prompts)], most, sampling=how, stops=stops, digests=digests[x % len(prompts)])
        for name, (x, most, how, stops) in enumerate(asked, 1)
    ]
    found = read_jobs(travel({"submit": write_jobs(sent)}, cuts)["submit"])
    for one, other in zip(sent, found, strict=True):
        for name in ("name", "prompt", "max_tokens", "stops", "digests"):
            assert getattr(one, name) == getattr(other, name)
        drawn = [how.draws.random() for how in (one.sampling, other.sampling)]
        assert one.sampling.seed is None or drawn[0] == drawn[1]
        names = ("temperature", "top_p", "seed", "logprobs")
        assert all(getattr(one.sampling, name) == getattr(other.sampling, name) for name in names)


def test_a_tokenizer_is_made_again_from_its_recipe():
    assert isinstance(make_tokenizer(json.loads(json.dumps(Bytes().recipe()))), Bytes)


# nobody waits


def test_what_is_not_taken_at_once_is_sent_later_in_order_and_the_sender_never_waits():
    mine, theirs = socket.socketpair()
    with theirs:
        outbox = Outbox(mine, lambda _: pytest.fail("256 MiB do not wait"))
        # now and then one that no socket takes whole
        sent = [{"x": x, "pad": "y" * (2**20 if x % 500 == 499 else x * 7919 % 5000)} for x in range(3000)]
        began = time.monotonic()
        for message in sent:
            outbox.send(pack(message))
        assert time.monotonic() - began < 2.0
        outbox.close()
        mine.close()
        theirs.settimeout(10)
        unpacker, found = Unpacker(), []
        while data := theirs.recv(2**16):
            found += unpacker.push(data)
    assert found == sent


def test_what_waits_is_bounded_and_what_comes_after_the_end_is_nobodys(monkeypatch):
    monkeypatch.setattr(front, "MOST_BEHIND", 2**20)
    mine, theirs = socket.socketpair()
    with mine, theirs:
        full: list[int] = []
        outbox = Outbox(mine, full.append)
        for _ in range(40):
            outbox.send(b"x" * 2**16)
        assert len(full) == 1
        assert 2**20 < full[0] <= 2**20 + 2**16


def quiet_front(lost: list[str], patience_s: float) -> socket.socket:
    """The other end of a front."""
    runner = FakeRunner()
    engine = Engine(
        runner, Scheduler(runner.allocator, chunk=8, most_running=4, most_waiting=4), print, time_limit_s=9.0
    )
    mine, theirs = socket.socketpair()
    Front(engine, mine, "the other", lost.append, patience_s)
    return theirs


def wait_for(what: Any, patience_s: float = 10.0) -> None:
    deadline = time.monotonic() + patience_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("say", "message"),
    [
        (lambda end: end.close(), "the other is gone"),
        (lambda end: end.send(pack({"ready": True})), "the other has given no sign of life for 0.2 s"),
        (lambda end: end.send(pack({"cancel": 1})), "the other cannot be understood: KeyError: 'keep'"),
        (lambda end: end.send(b"\x01\0\0\0\0\0\0\0{"), "the other cannot be understood: JSONDecodeError"),
    ],
)
def test_a_side_of_http_that_is_gone_silent_or_odd_is_lost(say, message):
    lost: list[str] = []
    with contextlib.closing(quiet_front(lost, 0.2)) as theirs:
        say(theirs)
        wait_for(lambda: lost)
    assert len(lost) == 1
    assert lost[0].startswith(message)


def test_when_the_engine_is_gone_answers_that_are_open_and_that_are_asked_for_get_a_503():
    served = Served(FakeRunner(pages=400, step_s=0.02))
    try:
        body = {"prompt": going_on("e", 300), "max_tokens": 300, "temperature": 0}
        with (
            ThreadPoolExecutor(1) as threads,
            httpx.stream("POST", f"{served.url}/v1/completions", json={**body, "stream": True}, timeout=30) as stream,
        ):
            lines = stream.iter_lines()
            next(lines)
            whole = threads.submit(httpx.post, f"{served.url}/v1/completions", json=body, timeout=30)
            served.state_when(lambda state: state["running"] == 2)
            served.front._connection.shutdown(socket.SHUT_RDWR)
            told = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            assert told[-1]["error"]["message"] == GONE
            assert whole.result().status_code == 503
        for answer in (httpx.get(f"{served.url}/health"), httpx.post(f"{served.url}/v1/completions", json=body)):
            assert answer.status_code == 503
            assert "its engine is gone" in answer.text
        assert served.lost == ["the fake is gone"]
    finally:
        served.close()


def test_who_is_refused_because_the_engine_is_closed_knows_it_before_the_next_state():
    mine, theirs = socket.socketpair()
    with mine, theirs:
        desk = Desk(mine, Room(64, 4, 4, 4, True), {"closed": None, "queued": 3})
        desk.check()
        desk._take({"refused": [1], "as": "Closed", "message": "the server is shutting down"})
        assert desk.closed == "the server is shutting down"
        with pytest.raises(Refused, match="shutting down"):
            desk.check()


def test_a_request_that_crosses_the_engines_last_word_is_refused_and_one_that_comes_later_too():
    mine, theirs = socket.socketpair()

    async def cross() -> list[Any]:
        desk = Desk(mine, Room(64, 4, 4, 4, True), {"closed": "the server is shutting down", "queued": 0})
        await desk.open()
        early: list[Any] = []
        late: list[Any] = []
        desk.submit([1, 2], pack({}), early.append)
        desk._take({"events": write_events([Event(1, 65, "stop")]), "stop": True})
        desk.submit([3], pack({}), late.append)
        desk._transport.close()
        return [*early, len(early) - 2, *late, len(late) - 1]

    with theirs:
        event, early, none, late, nothing = asyncio.run(cross())
    assert event == Event(1, 65, "stop")
    assert (str(early), early.status, none) == ("the server is shutting down", 503, 0)
    assert (str(late), late.status, nothing) == ("the server is shutting down", 503, 0)


def test_a_full_queue_is_refused_by_what_the_engine_has_said_last():
    mine, theirs = socket.socketpair()
    with mine, theirs:
        desk = Desk(mine, Room(64, 4, 4, 4, True), {"closed": None, "queued": 3})
        desk._take({"state": {"closed": None, "queued": 4}})
        with pytest.raises(Refused, match="at most 4 requests may wait, got 1 more beside 4") as caught:
            desk.check()
        assert caught.value.status == 429


# two processes


class Apart:
    """An engine with a fake model in this process, and HTTP in another, which is told of more room than there is."""

    def __init__(self) -> None:
        self.process = HttpProcess()
        self.fronts: list[Front] = []
        self.other = psutil.Process(self.process._process.pid)
        self.runner = FakeRunner(pages=8, step_s=0.01)  # 64 tokens
        scheduler = Scheduler(self.runner.allocator, chunk=64, most_running=64, most_waiting=2)
        self.engine = Engine(self.runner, scheduler, lambda _: None, time_limit_s=60.0)
        self.thread = threading.Thread(target=self.engine.run, daemon=True)

    def serve(self) -> None:
        room = dataclasses.replace(self.engine.scheduler.room, capacity=10**6, queue=10**6)
        listening = listen("127.0.0.1", 0)
        self.port = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process.serve(
            listening,
            {
                "model": "fake",
                "tokenizer": Bytes().recipe(),
                "limits": dataclasses.asdict(Limits()),
                "room": dataclasses.asdict(room),
                "state": self.engine.state(),
                "key": None,
                "hosts": None,
                "about": {},
                "connections": 50,
            },
        )

    def ask(self, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json={"temperature": 0, **body}, timeout=30)

    def state_when(self, so: Any) -> None:
        wait_for(lambda: so(self.engine.state()))


@pytest.fixture(scope="module")
def others() -> Iterator[tuple[Apart, Apart]]:
    """They start side by side."""
    others = Apart(), Apart()
    yield others
    for one in others:
        # a test that failed has left a front, for which the end of the process would be that of this one
        for front_of in one.fronts:
            front_of.stop()
        one.process.kill()


def test_an_engine_that_is_killed_takes_the_process_of_http_with_it_and_the_port_is_free(others):
    apart, _ = others
    apart.serve()
    # somebody else is the engine
    connection = apart.process.connection
    assert not connection.get_inheritable()
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    engine = subprocess.Popen(sleep, pass_fds=[connection.fileno()])
    connection.close()
    with ThreadPoolExecutor(1) as threads:
        assert httpx.get(f"{apart.url}/health", timeout=30).status_code == 200
        asked = threads.submit(apart.ask, prompt="a", max_tokens=9)
        time.sleep(0.5)
        assert not asked.done()
        assert apart.other.is_running()
        engine.kill()
        engine.wait()
        assert (asked.result().status_code, asked.result().json()["error"]["message"]) == (503, GONE)
    apart.process.wait(10.0)
    assert apart.process._process.returncode == 1
    listen("127.0.0.1", apart.port).close()


def test_statuses_come_through_a_stall_stops_no_step_and_a_killed_process_of_http_ends_the_server(
    others, monkeypatch, capfd
):
    _, apart = others
    codes: list[int] = []
    monkeypatch.setattr(run, "FAREWELL_S", 0.01)
    monkeypatch.setattr(run.os, "_exit", codes.append)
    ending = run.Ending(Rank(0, 1, torch.device("cpu"), "none", os.getppid()))
    ending.engine, ending.process = apart.engine, apart.process
    apart.serve()
    apart.fronts.append(Front(apart.engine, apart.process.connection, apart.process.name, ending, 60.0))
    apart.fronts[0].wait_until_ready()
    apart.thread.start()

    answer = apart.ask(prompt=going_on("a", 9), max_tokens=9, logprobs=2).json()["choices"][0]
    assert answer["text"] == text_of(going_on("a", 9), 9)
    assert len(answer["logprobs"]["top_logprobs"][8]) == 2
    large = apart.ask(prompt="a", max_tokens=64)
    assert (large.status_code, large.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "must fit into the cache of 64 tokens on 2 ranks, got 1 + 64 = 65" in large.json()["error"]["message"]

    # signals to all processes of a terminal are not for this one
    for number in (signal.SIGINT, signal.SIGTERM):
        apart.other.send_signal(number)
    prompt = going_on("f", 50)

    def ask_three() -> list[Future[httpx.Response]]:
        """At once: one that runs, and two that wait."""
        asked = [threads.submit(apart.ask, prompt=prompt, max_tokens=50) for _ in range(3)]
        apart.state_when(lambda state: (state["running"], state["waiting"]) == (1, 2))
        return asked

    with ThreadPoolExecutor(4) as threads:
        apart.runner.step_s = 0.2  # none ends before all have come
        asked = ask_three()
        late = apart.ask(prompt=prompt, max_tokens=50, n=2)
        assert (late.status_code, late.headers["retry-after"]) == (429, "1")
        assert late.json()["error"]["message"].startswith("at most 2 requests may wait, got 2 more beside 2")
        apart.runner.step_s = 0.01
        apart.other.suspend()
        apart.state_when(lambda state: not (state["running"] or state["waiting"]))
        apart.other.resume()
        assert [one.result().json()["choices"][0]["text"] for one in asked] == [text_of(prompt, 50)] * 3

        apart.runner.step_s = 0.2  # none ends before all have come
        asked = ask_three()
        apart.engine.stop(30.0)
        apart.runner.step_s = 0.01
        late = apart.ask(prompt=prompt, max_tokens=5)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "unavailable")
        assert httpx.get(f"{apart.url}/health").status_code == 503
        assert sorted(one.result().status_code for one in asked) == [200, 503, 503]
    # nobody was cancelled by what was refused
    assert "ringattn_cancelled_total 0.0" in httpx.get(f"{apart.url}/metrics").text
    apart.thread.join(10)
    assert not apart.thread.is_alive()

    apart.other.kill()
    wait_for(lambda: codes)
    assert codes == [1]
    assert f"error: rank 0: the HTTP process (process {apart.other.pid}) is gone" in capfd.readouterr().err


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Process, Process]]:
    """Two whole servers, which will lose one of their processes."""
    servers = Process(*FLAGS, "--nproc", "1"), Process(*FLAGS, "--nproc", "1")
    yield servers
    for server in servers:
        server.close()


def open_stream(server: Process, seen: list[Any]) -> threading.Thread:
    """A request whose answer will not end, once it has begun; what comes of it goes into `seen`."""

    def stream() -> None:
        body = {"prompt": "abc", "max_tokens": 2000, "temperature": 1, "stream": True, "ignore_eos": True}
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer,
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
    assert server.wait(20) == 1, server.said
    thread.join(10)
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
    other.wait(10)
    thread.join(10)
    listen("127.0.0.1", port).close()
    assert seen[-1]["error"]["message"] == GONE
