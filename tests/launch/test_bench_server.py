"""`bench server`: tokens and times are the server's, a load is as large as it says, and nothing that fails or differs is hidden."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import random
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ringattn.launch.bench import __main__ as bench
from ringattn.launch.bench import server as server_bench
from ringattn.launch.bench.http_client import Answer, ServerClient
from ringattn.launch.bench.rows import Rows
from ringattn.launch.bench.server import Bench, Load, ServerFlags, Target, holds, run_load
from ringattn.launch.common.distributed import Refusal
from ringattn.launch.common.session import Session
from tests.support.serving import VOCAB, FakeRunner, FakeServer, follow

SAYS = {"vocab_size": VOCAB, "world_size": 2, "device": "cpu", "gpus": [], "cpu": "x", "dtype": "float32", "torch": "2"}
ABOUT = {**SAYS, "graphs": 0, "parameters": 1, "flags": {"max_running": 64}}
WORDS = ["--contexts", "12", "40", "--repeats", "2", "--clients", "1", "3", "--prompt-lengths", "5", "20"]
WORDS += ["--tokens", "6", "--requests", "4", "--sample", "3", "--most-clients", "2", "--timeout-s", "100"]


@contextmanager
def serving(runner: FakeRunner | None = None, **how: Any) -> Iterator[FakeServer]:
    with FakeServer(runner or FakeRunner(pages=2000), about=ABOUT, **how) as served:
        yield served


def going_on(prompt: list[int], count: int) -> list[int]:
    """What follows a prompt for so many tokens, the end of an answer or not."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(follow(tokens))
    return tokens[len(prompt) :]


def run_bench(url: str, out: Path, *words: str) -> tuple[int, list[dict[str, Any]]]:
    """The command's exit code and rows."""
    code = bench.main(["server", "--url", url, *WORDS, *words, "--out", str(out)])
    path = out / "server.json"
    return code, json.loads(path.read_text())["rows"] if path.exists() else []


def ask(url: str, prompt: list[int], tokens: int, timeout_s: float = 100.0) -> Answer:
    """One answer, from a client of its own."""

    async def run() -> Answer:
        async with ServerClient(url, timeout_s=timeout_s) as client:
            return await client.ask("fake", prompt, tokens)

    return asyncio.run(run())


# one request


def test_tokens_are_the_servers_and_their_times_are_its_steps():
    prompt = list(range(40, 60))
    with serving(FakeRunner(step_s=0.03, ahead=False)) as served:
        first = ask(served.url, prompt, 8)
        again = ask(served.url, prompt, 8)
    assert first.good, first.failure
    assert first.tokens == again.tokens == going_on(prompt, 8)
    assert (first.cached, again.cached) == (0, len(prompt) - 1)
    assert len(first.times) == 8
    # a step for the prompt, and one for each later token
    assert 0.03 <= first.first_s < 3
    mean = first.per_token_s
    assert mean is not None
    assert 0.03 <= mean < 3
    assert sum(first.gaps_s) == pytest.approx(7 * mean)
    assert first.began < first.times[0] < first.times[-1] <= first.ended


def test_looking_up_the_server_is_not_in_the_time_to_the_first_token(monkeypatch: pytest.MonkeyPatch):
    look_up = socket.getaddrinfo

    def slowly(*args: Any, **how: Any) -> Any:
        time.sleep(1.5)
        return look_up(*args, **how)

    monkeypatch.setattr(socket, "getaddrinfo", slowly)
    with serving() as served:
        asked = time.perf_counter()
        answer = ask(served.url.replace("127.0.0.1", "localhost"), [5, 6, 7], 2)
    assert answer.good, answer.failure
    assert answer.began - asked > 1.5
    assert answer.first_s < 1.5


def test_no_request_waits_in_the_client_for_another():
    count = 120  # aiohttp has 100 connections at a time unless it is told otherwise

    async def run() -> list[Answer]:
        all_here, here = asyncio.Event(), 0

        async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal here
            await reader.readuntil(b"\r\n\r\n")
            here += 1
            if here == count:
                all_here.set()
            await all_here.wait()
            writer.write(said(503, b"full"))
            writer.close()

        server = await asyncio.start_server(refuse, "127.0.0.1", 0, backlog=count)
        async with server, ServerClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None, 10) as client:
            return await asyncio.gather(*(client.ask("fake", [1], 1) for _ in range(count)))

    assert {answer.failure for answer in asyncio.run(run())} == {"status 503: full"}


STREAM = b'data: {"choices": [{"text": "a\xc3\x9f", "token_ids": [5]}]}\n\n'
STREAM += b'data: {"choices": [{"text": "", "token_ids": [6, 7]}]}\r\n\r\n'
STREAM += b'data: {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 3}}}\n\ndata: [DONE]\n\n'


def test_a_stream_is_the_same_in_whatever_pieces_its_bytes_come():
    for size in (*range(1, 40), len(STREAM)):
        answer = Answer()
        for x in range(0, len(STREAM), size):
            answer.feed(STREAM[x : x + size], float(x))
        assert answer.done
        assert (answer.tokens, answer.cached, answer.failure) == ([5, 6, 7], 3, "")
        assert answer.times[1] == answer.times[2] >= answer.times[0]


def said(status: int, body: bytes, kind: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s" % (status, kind, len(body), body)


FAILURES = {
    "status 503: no room": said(503, b'{"error": {"message": "no room", "type": "x"}}'),
    "status 502: Bad Gateway": said(502, b"Bad Gateway", b"text/html"),
    "went wrong": said(
        200, b'data: {"choices": [{"token_ids": [1]}]}\n\ndata: {"error": {"message": "went wrong"}}\n\n'
    ),
    "3 tokens asked for, got 1, and no": said(200, b'data: {"choices": [{"token_ids": [1]}]}\n\n'),
    "3 tokens asked for, got 1$": said(200, b'data: {"choices": [{"token_ids": [1]}]}\n\ndata: [DONE]\n\n'),
    "must have token_ids": said(200, b'data: {"choices": [{"text": "abc"}]}\n\ndata: [DONE]\n\n'),
    "a stream of completions, got '...x": said(200, b'data: [["x"]]\n\n'),
    "must be a stream of completions, got 'no JSON'": said(200, b"data: no JSON\n\n"),
    "status 307": b"HTTP/1.1 307 X\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n",
    "ClientResponseError": b"SSH-2.0-OpenSSH\r\n\r\n",
    "ServerDisconnectedError": b"",
    "ClientPayloadError": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n12",
    "an answer must end within 0.5 s, got 0 tokens": None,
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failed_answer_has_its_reason(failure: str):
    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(10_000)
            if (whole := FAILURES[failure]) is not None:
                self.request.sendall(whole)
            else:
                over.wait(5)

    over = threading.Event()
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        timeout_s = 0.5 if FAILURES[failure] is None else 100.0
        answer = ask(f"http://127.0.0.1:{server.server_address[1]}", [1, 2], 3, timeout_s)
        over.set()
        server.shutdown()
    assert not answer.good
    with pytest.raises(AssertionError, match=failure):
        raise AssertionError(answer.failure)


def test_a_request_that_is_given_up_at_any_moment_leaves_nothing_behind(caplog: pytest.LogCaptureFixture):
    async def leave(url: str) -> int:
        async with ServerClient(url) as client:
            for turns in (*range(30), 40, 80, 160):
                task = asyncio.ensure_future(client.ask("fake", list(range(9)), 2000))
                for _ in range(turns):
                    await asyncio.sleep(0 if turns < 30 else 1e-4)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await asyncio.sleep(0.2)
            gc.collect()
            return len(asyncio.all_tasks()) - 1

    with serving(FakeRunner(pages=2000, step_s=0.001)) as served:
        assert asyncio.run(leave(served.url)) == 0
        served.state_when(lambda _: not served.engine._open)
        served.assert_idle()
    gc.collect()
    assert not caplog.records, "such as an exception that nobody retrieved"


# numbers


def test_only_the_window_counts_for_speeds_and_only_what_it_measured_for_times():
    def answered(began: float, *times: float, ended: float = 0.0, failure: str = "", status: int = 200) -> Answer:
        return Answer(status, failure, began, ended, list(times), [1] * len(times), cached=2)

    before = answered(0.0, 9.0, 10.0, 11.0, 12.0, ended=12.0)  # began before the window, ends in it
    first = answered(12.0, 12.5, 13.5, ended=13.5)
    second = answered(12.0, 13.0, 16.0, ended=16.0)
    failed = answered(13.5, ended=14.0, failure="status 429: full", status=429)
    cut = answered(16.0, 17.0, 21.0)
    load = Load(10.0, 20.0, [before, first, second, failed, cut], [first, second, failed], busy_s=2.5)
    row = load.row()
    assert row["tokens_per_s"] == pytest.approx((2 + 2 + 2 + 1) / 10)
    assert row["requests_per_s"] == pytest.approx(3 / 10)
    assert (row["answers"], row["failed"], row["statuses"]) == (2, 1, {"200": 3, "429": 1})
    assert (row["ttft_ms"], row["tpot_ms"]) == (pytest.approx(750.0), pytest.approx(2000.0))
    assert row["tpot_p95_ms"] == pytest.approx(2900.0)
    assert row["gap_p99_ms"] == pytest.approx(2980.0)
    assert (row["cached_tokens"], row["client_busy_percent"]) == (8, pytest.approx(25.0))


def test_a_latency_is_held_by_complete_loads_within_it():
    assert not holds({"failed": 1, "tpot_p95_ms": 1.0}, 20.0)
    assert not holds({"failed": 0, "tpot_p95_ms": None}, 20.0)
    assert holds({"failed": 0, "tpot_p95_ms": 20.0}, 20.0)
    assert not holds({"failed": 0, "tpot_p95_ms": 20.1}, 20.0)


# loads


@pytest.mark.parametrize("clients", [1, 5])
def test_a_load_has_all_its_clients_under_way_and_never_more(clients: int):
    args, target = ServerFlags(tokens=6, requests=4, prompt_lengths=(3, 9)), Target("fake", None, VOCAB, {})

    async def run(url: str) -> Load:
        async with ServerClient(url) as client:
            rows = Rows(Session(0, 1, torch.device("cpu"), None), lambda _: None, {})
            made = Bench(args, client, target, random.Random(0), rows)
            return await run_load(made, clients, 3 * clients)

    with serving(FakeRunner(pages=2000, step_s=0.002)) as served:
        load = asyncio.run(run(served.url))
        # what was under way at the end is given up, once the server has noticed
        time.sleep(0.1)
        served.state_when(lambda _: not served.engine._open)
        served.assert_idle()
    assert len(load.measured) == 3 * clients
    assert all(answer.good and answer.began >= load.opened for answer in load.measured)
    assert max(answer.ended for answer in load.measured) <= load.closed
    for moment in (answer.times[2] for answer in load.measured):
        running_step = sum(0 < one.began < moment and not 0 < one.ended < moment for one in load.asked)
        assert running_step <= clients
    # between an answer and the next question of the same client is next to nothing
    spent = sum(min(one.ended or load.closed, load.closed) - max(one.began, load.opened) for one in load.asked
                if (one.ended or math.inf) > load.opened and 0 < one.began < load.closed)  # fmt: skip
    assert 0.5 < spent / (clients * (load.closed - load.opened)) <= 1 + 1e-9
    assert len({tuple(answer.tokens) for answer in load.measured}) > 1, "prompts differ"


def test_every_part_has_its_rows_and_their_numbers_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with serving(FakeRunner(pages=2000, step_s=0.001, ahead=False)) as served:
        code, rows = run_bench(served.url, tmp_path, "--latency-ms", "60000")
    said = capsys.readouterr()
    assert code == 0, said.err
    check, *others = rows
    assert (check["part"], check["prompts"], check["differ"], check["failed"]) == ("check", 3, 0, 0)
    assert [(row["part"], row.get("context", row["clients"])) for row in others] == [
        ("alone", 12), ("alone", 40), ("load", 1), ("load", 3), ("latency", 1), ("latency", 2),
    ]  # fmt: skip
    for row in others:
        assert row["failed"] == row["cached_tokens"] == 0
        assert row["world_size"] == 2
        assert 1 <= row["tpot_ms"] <= row["tpot_p95_ms"]
        assert 1 <= row["ttft_ms"] <= row["ttft_p95_ms"]
        if row["part"] != "alone":
            assert row["answers"] == max(4, 2 * row["clients"])
            assert row["requests_per_s"] <= row["tokens_per_s"]
            # each client has at most a token per mean time
            assert row["tokens_per_s"] <= 3 * 1000 * row["clients"] / row["tpot_ms"]
    assert [row["largest"] for row in others[-2:]] == [False, True]
    # the load of one client was measured once
    assert others[2]["seconds"] == others[4]["seconds"]
    assert all(f"bench server: {part}" in said.out for part in ("check", "alone", "load", "latency"))
    content = json.loads((tmp_path / "server.json").read_text())
    assert content["machine"]["flags"] == {"max_running": 64}
    assert content["machine"]["model"] == "fake"
    assert content["client"]["torch"] == torch.__version__


def test_a_prompt_asked_again_is_in_the_servers_cache_and_a_new_one_never(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    alone = ("--parts", "alone", "--contexts", "40", "--seed", "3")
    with serving() as served:
        _, rows = run_bench(served.url, tmp_path, *alone)
        assert rows[1]["cached_tokens"] == 0
        _, rows = run_bench(served.url, tmp_path, *alone[:-2], "--reuse")
        assert rows[1]["cached_tokens"] == 2 * 39
        assert "should have been new" not in capsys.readouterr().out
        # a seed that the server has met: its first tokens come too soon, and that is said
        _, rows = run_bench(served.url, tmp_path, *alone)
        assert rows[1]["cached_tokens"] == 3 * 39
        assert "the server had 117 tokens of prompts that should have been new" in capsys.readouterr().out


# nothing is hidden


class WrongBesideOthers(FakeRunner):
    """A model whose third and later new tokens are others in a batch than alone."""

    def run(self, plan: Any) -> torch.Tensor:
        logits = super().run(plan)
        if len(plan.requests) > 1 and plan.decodes:
            for row, request in enumerate(plan.requests):
                if len(request.tokens) >= len(request.prompt) + 2:
                    logits[row] = logits[row].roll(1)
        return logits


def test_answers_that_differ_among_others_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with serving(WrongBesideOthers(pages=2000, step_s=0.05)) as served:
        code, rows = run_bench(served.url, tmp_path, "--parts", "alone", "--contexts", "8")
    assert code == 0
    # one that comes before the others, or stays behind, may be alone at some tokens
    assert len(rows[0]["first_differences"]) == rows[0]["differ"] >= 1
    assert all(2 <= place < 6 for place in rows[0]["first_differences"])
    assert f"{rows[0]['differ']} answers differ among others" in capsys.readouterr().out


def test_failed_answers_are_counted_and_make_the_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ("--parts", "load", "--clients", "12", "--sample", "1")
    with serving(FakeRunner(pages=2000, step_s=0.05), running=4, waiting=2) as served:
        code, rows = run_bench(served.url, tmp_path, *words)
    assert code == 1
    check, load = rows
    assert check["failed"] == check["statuses"]["429"] > 0
    assert load["failed"] == load["statuses"]["429"] > 0
    assert check["statuses"]["200"] == 12 - check["failed"]
    errors = capsys.readouterr().err
    assert f"error: check, 12 clients: {check['failed']} failed" in errors
    assert "status 429: " in errors


def test_a_prompt_that_does_not_fit_has_a_row_with_the_reason(tmp_path: Path):
    with serving(length=40) as served:
        code, rows = run_bench(served.url, tmp_path, "--parts", "alone")
        assert [row.get("refused") for row in rows[1:]] == [
            None,
            "left out: 40 + 6 tokens do not fit into the 40 of the server",
        ]
        assert code == 0
        code, _ = run_bench(served.url, tmp_path, "--prompt-lengths", "5", "35")
    assert code == 1


def test_a_server_that_cannot_be_measured_is_named_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def error(url: str, *words: str) -> str:
        code, rows = run_bench(url, tmp_path, *words)
        assert (code, rows) == (1, [])
        return capsys.readouterr().err

    with serving(api_key="secret") as served:
        assert "must be asked with a key" in error(served.url)
        assert "must be asked with a key" in error(served.url, "--api-key", "other")
        assert "model must be one of fake, got else" in error(served.url, "--api-key", "secret", "--model", "else")
    assert "url must be that of a running server" in error(served.url)
    assert "url must be such as" in error("127.0.0.1:8000")
    assert "url must name no user, got one" in error("http://user:word@127.0.0.1:8000")
    with FakeServer(FakeRunner()) as quiet:
        assert "pass --vocab-size" in error(quiet.url)
        code, rows = run_bench(quiet.url, tmp_path, "--vocab-size", "256", "--parts", "alone")
    assert code == 0, "a server that says nothing of itself is measured, too"
    assert rows[1]["world_size"] is None


@pytest.mark.parametrize(
    ("models", "state", "said"),
    [
        ({"data": ["x"]}, {}, "/v1/models must name a model, got status 200: {'data': ['x']}"),
        ({"data": {"id": "x"}}, {}, "/v1/models must name a model"),
        ({"data": [{}]}, {}, "/v1/models must name a model"),
        (
            {"data": [{"id": "m"}]},
            {"server": "nginx"},
            "the size of the vocabulary must be known, got none from http://other",
        ),
        (
            {"data": [{"id": "m"}]},
            {"server": {"vocab_size": 9}},
            "the size of the vocabulary must be known, got none from http://other",
        ),
    ],
)
def test_unexpected_json_of_another_server_is_an_error_with_a_reason(models: Any, state: Any, said: str):
    class Other:
        url = "http://other"

        async def get(self, path: str) -> tuple[int, Any]:
            return 200, models if path == "/v1/models" else state

    client: Any = Other()
    with pytest.raises(Refusal) as caught:
        asyncio.run(server_bench.query_server(client, server_bench.ServerFlags(model="m")))
    assert said in str(caught.value)


def test_without_aiohttp_the_error_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run_bench("http://127.0.0.1:1", tmp_path) == (1, [])
    assert "bench server needs aiohttp; install it with: pip install 'ringattn[launch]'" in capsys.readouterr().err


def test_no_key_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    with serving(api_key="open-sesame") as served:
        words = ["server", "--url", f"{served.url}/v1/", *WORDS, "--parts", "alone", "--out", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", ["bench.py", *words, "--api-key", "open-sesame"])
        assert bench.main() == 0
        path = tmp_path / "server.json"
        assert "--api-key ..." in path.read_text()
        monkeypatch.setenv(server_bench.KEY, "open-sesame")
        monkeypatch.setattr(sys, "argv", ["bench.py", *words])
        assert bench.main() == 0
    assert "open-sesame" not in path.read_text() + capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--clients", "0"], "clients must be at least 1"),
        (["--prompt-lengths", "9", "3"], "the fewest and the most tokens"),
        (["--latency-ms", "0"], "latency_ms must be above 0"),
    ],
)
def test_impossible_numbers_are_refused(words: list[str], message: str):
    with pytest.raises((ValueError, SystemExit)) as caught:
        bench.main(["server", *words])
    assert isinstance(caught.value, SystemExit) or message in str(caught.value)
