"""The whole server on two CPU processes with the tiny model: texts beside one process, load, signals, and ranks that are killed."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch
import transformers

from ringattn.launch.bench import __main__ as bench
from ringattn.launch.common.distributed import Refusal, Session
from ringattn.launch.serve import run
from ringattn.launch.serve.__main__ import main
from ringattn.launch.serve.config import KEY, TINY, ServeArgs, check_host_memory, parse, raise_file_limit
from ringattn.launch.serve.messages import Heartbeat, StepCommand, ToRank
from ringattn.launch.serve.models import load_model
from ringattn.launch.serve.rank_channel import RankChannel
from ringattn.launch.serve.tokenizer import ByteTokenizer
from tests.launch.serve.test_models import _tokenizer
from tests.support.timing import HANGS_S, wait_for
from tests.test_docs import blocks
from tests.test_docs import run as run_block

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.dist

SURE = 1e-3
"""Lead of the largest logit by which a token is decided, far more than rounding errors."""


class Process:
    """A server that was started as a command.

    Args:
        flags: Its flags.
        start: What runs a module.
    """

    def __init__(self, *flags: str, start: Sequence[str] = (sys.executable,)) -> None:
        command = [*start, "-m", "ringattn.launch.serve", "--device", "cpu", "--port", "0", *flags]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    @property
    def said(self) -> str:
        return "".join(self.lines)

    def wait_until_ready(self, timeout_s: float = 240.0) -> str:
        deadline = time.monotonic() + timeout_s
        while not (found := re.search(r"serving \S+ at (http://\S+) ", self.said)):
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.05)
        self.url = found[1]
        return self.url

    def rank(self, index: int) -> psutil.Process:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(child for child in children if child.environ().get("RANK") == str(index))

    def wait(self) -> int:
        try:
            code = self.process.wait(HANGS_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the server must have ended, got\n{self.said}") from None
        self._reader.join(HANGS_S)
        return code

    def state(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/state").json()

    def state_when(self, so: Any) -> dict[str, Any]:
        return wait_for(lambda: state if so(state := self.state()) else None, self.state)

    def close(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (*psutil.Process(self.process.pid).children(recursive=True), self.process):
                process.kill()
        self.process.wait(HANGS_S)


FLAGS = (
    "--model tiny --page-size 16 --cache-gib 0.002 --chunk 256 --max-running 32 --queue 500 --max-body-mib 0.1".split()
)
FLAGS += ["--grace", "90"]  # for busy machines


@pytest.fixture(scope="module")
def doomed() -> Iterator[Process]:
    """A server with the flags of the page, which will lose a rank; it starts at the same time as the other."""
    process = Process("--model", "tiny")
    yield process
    process.close()


@pytest.fixture(scope="module")
def server(doomed: Process) -> Iterator[Process]:
    process = Process(*FLAGS)
    process.wait_until_ready()
    yield process
    process.close()


@cache
def _model() -> Any:
    served = load_model(ServeArgs(TINY), torch.device("cpu"))
    served.model.set_attn_implementation("sdpa")
    return served.model


@cache
def _alone(prompt: str, most: int) -> tuple[int, ...]:
    """The tokens that one process with torch's own attention gives, as far as they are decided (SURE)."""
    tokens = torch.tensor([list(prompt.encode())])
    found: list[int] = []
    with torch.no_grad():
        past, new = None, tokens
        while len(found) < most:
            out = _model()(input_ids=new, past_key_values=past, use_cache=True)
            past = out.past_key_values
            (first, second), names = (x.tolist() for x in out.logits[0, -1].topk(2))
            if first - second < SURE:
                break
            found.append(names[0])
            new = torch.tensor([names[:1]])
    return tuple(found)


def ask_for(prompt: str, most: int) -> tuple[dict[str, Any], str]:
    """A request that stays on decided tokens, and the text it must get."""
    tokens = _alone(prompt, most)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": len(tokens), "temperature": 0, "ignore_eos": True}
    return body, ByteTokenizer().decode(tokens)


def prompts(count: int, longest: int) -> list[str]:
    """Prompts of mixed lengths, some of which begin alike."""
    draw = random.Random(0)
    words = ["ring", "page", "shard", "key", "value", "merge", "exact", "step"]
    stems = [" ".join(draw.choices(words, k=40)) for _ in range(3)]
    made = []
    for x in range(count):
        length = draw.choice([3, 10, 40, 150, longest])
        text = f"{x} " + " ".join(draw.choices(words, k=length))
        made.append((draw.choice(stems) + text if x % 2 else text)[:length])
    return made


def test_greedy_text_is_that_of_one_process(server):
    for prompt in ("hello", "a prompt of some length " * 20):
        body, text = ask_for(prompt, 24)
        assert len(text) >= 8, "the tokens of this prompt are decided"
        answer = httpx.post(f"{server.url}/v1/completions", json=body)
        assert answer.json()["choices"][0]["text"] == text
    messages: Any = [{"role": "user", "content": "hi"}]
    body, text = ask_for("user: hi\nassistant: ", 10)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        how: Any = {"model": "tiny", "messages": messages, "max_tokens": body["max_tokens"], "temperature": 0}
        whole = client.chat.completions.create(**how, extra_body={"ignore_eos": True})
        assert whole.choices[0].message.content == text
        stream = client.chat.completions.create(**how, stream=True, extra_body={"ignore_eos": True})
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text


def test_options_and_scores_of_a_prompt_go_through_two_processes_and_two_ranks(server):
    """Logprobs of a prompt and of an answer are those of one process with torch's own attention."""
    prompt, most = "the exact ring of keys " * 20, 6
    punished = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2, "logit_bias": {"122": 3}}
    body = {
        "prompt": prompt,
        "max_tokens": most,
        "seed": 3,
        "temperature": 0.7,
        "top_k": 5,
        "min_p": 0.01,
        "ignore_eos": True,
    }
    asked = {**body, **punished, "echo": True, "logprobs": 1, "return_token_ids": True}
    one, other = (httpx.post(f"{server.url}/v1/completions", json=asked).json()["choices"][0] for _ in range(2))
    assert one["token_ids"] == other["token_ids"]
    tokens = [*prompt.encode(), *one["token_ids"]]
    with torch.no_grad():
        expected = _model()(input_ids=torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    found = one["logprobs"]["token_logprobs"]
    assert (found[0], len(found)) == (None, len(prompt) + most)
    wanted = expected.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found[1:]), wanted, rtol=1e-4, atol=1e-4)


def test_two_ranks_follow_a_format_beside_answers_without_one(server):
    pytest.importorskip("llguidance")
    asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 60, "seed": 1}
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 22]}}}
    schema |= {"required": ["ok", "n"], "additionalProperties": False}
    formats = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    formats["logit_bias"] = dict.fromkeys(map(str, b" \t\r\n"), -100)
    bodies = [{**asked, **formats}, {**asked, "ignore_eos": True}, {**asked, "structured_outputs": {"choice": ["a b"]}}]
    url = f"{server.url}/v1/chat/completions"
    with ThreadPoolExecutor(3) as threads:
        said = [one.json() for one in threads.map(lambda body: httpx.post(url, json=body), bodies)]
    first, free, last = (one["choices"][0]["message"]["content"] for one in said)
    found = json.loads(first)
    assert (type(found["ok"]), found["n"] in (1, 22)) == (bool, True)
    assert said[1]["usage"]["completion_tokens"] == 60, free
    assert last == "a b"


@pytest.mark.skipif(int(transformers.__version__[0]) < 5, reason="4.57 expands latents before its cache")
def test_a_checkpoint_with_latents_is_served_from_sharded_weights_with_kept_prefixes(tmp_path: Path) -> None:
    from tests.integrations.transformers.test_latent_models import LATENT, ROTARY, make

    model = make("glm4_moe_lite", "eager", vocab_size=len(_tokenizer())).eval()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path)
    _tokenizer().save_pretrained(tmp_path)
    flags = "--weights sharded --page-size 4 --cache-gib 0.002 --chunk 16"
    process = Process("--model", str(tmp_path), *flags.split())
    try:
        url = process.wait_until_ready()
        assert "weights: sharded over 2 ranks, 0.00 GiB on each" in process.said
        long = [3 + x * 7 % 50 for x in range(60)]
        for prompt in (long[:9], long, [*long, 5, 6, 7], long[:40]):
            with torch.no_grad():
                ids = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0].tolist()
            body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            answer = httpx.post(f"{url}/v1/completions", json=body).json()
            assert answer["choices"][0]["token_ids"] == ids[len(prompt) :]
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        assert f"ringattn_cache_bytes_per_token {2 * 4.0 * (LATENT + ROTARY)}" in lines
        state = process.state()
        assert state["totals"]["shared_tokens"] > 60
        assert state["server"]["flags"]["weights"] == "sharded"
        assert state["server"]["parameters"] == sum(x.numel() for x in model.parameters())
    finally:
        process.close()


def test_the_state_has_the_machine_and_the_flags(server):
    about = server.state()["server"]
    assert (about["world_size"], about["device"], about["backend"]) == (2, "cpu", "gloo")
    assert (about["vocab_size"], about["dtype"], about["graphs"]) == (257, "float32", 0)
    assert (about["flags"]["max_running"], about["flags"]["chunk"], about["flags"]["page_size"]) == (32, 256, 16)
    assert about["torch"] == torch.__version__
    # no command line: it may hold paths, and a key
    assert not {"command", "api_key", "model", "host"} & {*about, *about["flags"]}


def load_and_check(server: Process, count: int, distinct: Sequence[str], most: int) -> None:
    """Send many requests at once, some invalid, some cancelled: all others get the text of one process, and all pages are freed."""
    wanted = [ask_for(prompt, 2 + x % most) for x, prompt in enumerate(distinct)]
    room = server.state()["pages_per_rank"] * 2 * 16
    client = httpx.Client(base_url=server.url, limits=httpx.Limits(max_connections=count))
    kinds: list[str] = []

    def ask(x: int) -> None:
        body, text = wanted[x % len(wanted)]
        if x % 20 == 3:
            answer = client.post(
                "/v1/completions", content=b'{"prompt": [[', headers={"Content-Type": "application/json"}
            )
            assert answer.status_code == 400
            kinds.append("malformed")
        elif x % 20 == 7:
            answer = client.post("/v1/completions", json={**body, "prompt": "x" * 300, "max_tokens": room})
            assert answer.status_code == 400
            assert f"must fit into {room} tokens" in answer.json()["error"]["message"]
            kinds.append("oversize")
        elif x % 20 == 11:
            assert client.post("/v1/completions", json={**body, "prompt": "x" * 200_000}).status_code == 413
            kinds.append("too large")
        elif x % 20 == 13:
            with client.stream("POST", "/v1/completions", json={**body, "max_tokens": 200, "stream": True}) as stream:
                next(stream.iter_lines())
            kinds.append("left")
        elif x % 2:
            answer = client.post("/v1/completions", json={**body, "stream": True})
            assert answer.status_code == 200, answer.text
            *events, end = [line for line in answer.text.splitlines() if line.startswith("data: ")]
            assert end == "data: [DONE]"
            events = [json.loads(event[6:]) for event in events]
            assert "".join(event["choices"][0]["text"] for event in events) == text
            kinds.append("streamed")
        else:
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == text
            kinds.append("whole")

    with client, ThreadPoolExecutor(count) as threads:
        list(threads.map(ask, range(count)))
    assert len(kinds) == count
    assert set(kinds) == {"malformed", "oversize", "too large", "left", "streamed", "whole"}
    state = server.state_when(lambda state: not (state["running"] or state["waiting"]))
    assert state["pages"]["running"] == [0, 0]
    assert state["totals"]["shared_tokens"] > 0
    # a request of the whole cache is let in only when every page has come back
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "z" * (room - 1), "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    state = server.state_when(lambda state: not state["running"])
    assert state["kept_prefixes"] == 1


def test_many_at_once_get_their_answers_alone_and_all_pages_are_freed(server):
    load_and_check(server, 200, prompts(24, 400), 12)


def test_the_bench_finds_equal_answers_alone_and_beside_others(server, tmp_path, capsys):
    words = "--contexts 300 --repeats 2 --clients 1 6 --prompt-lengths 20 60 --tokens 8 --requests 4 --sample 3"
    words += " --most-clients 2 --latency-ms 60000 --seed 1"
    assert bench.main(["server", "--url", server.url, *words.split(), "--out", str(tmp_path)]) == 0, capsys.readouterr()
    content = json.loads((tmp_path / "server.json").read_text())
    assert content["machine"]["flags"] == server.state()["server"]["flags"]
    assert (content["machine"]["world_size"], content["machine"]["model"]) == (2, "tiny")
    check, alone, *loads = content["rows"]
    assert (check["clients"], check["differ"], check["failed"]) == (6, 0, 0)
    assert [(row["part"], row["clients"], row["answers"]) for row in loads] == [
        ("load", 1, 4), ("load", 6, 12), ("latency", 1, 4), ("latency", 2, 4),
    ]  # fmt: skip
    for row in (alone, *loads):
        assert row["failed"] == row["cached_tokens"] == 0
        assert 0 < row["tpot_ms"] <= row["tpot_p95_ms"] < 60000 > row["ttft_ms"] > 0


@pytest.mark.slow
def test_longer_loads(server):
    for _ in range(2):
        load_and_check(server, 400, prompts(80, 1500), 40)


def test_the_client_of_the_page_prints_what_it_shows(doomed):
    (_, code, shown), _ = blocks("serve_in_ten_minutes.md")
    url = doomed.wait_until_ready()
    assert run_block(code.replace("http://127.0.0.1:8000", url), "client.py", {"__name__": "__main__"}) == shown


def test_a_killed_rank_takes_the_server_down_and_is_named(doomed, server):
    url = doomed.wait_until_ready()
    victim = doomed.rank(1)
    seen: dict[str, Any] = {}

    def stream() -> None:
        body = {"prompt": "abc", "max_tokens": 2000, "temperature": 1, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as answer:
            seen["stream"] = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]

    def whole() -> None:
        body = {"prompt": "abcd", "max_tokens": 2000, "temperature": 1, "ignore_eos": True}
        seen["whole"] = httpx.post(f"{url}/v1/completions", json=body)

    threads = [threading.Thread(target=one) for one in (stream, whole)]
    for thread in threads:
        thread.start()
    doomed.state_when(lambda state: state["running"] == 2 and state["totals"]["steps"]["decode"] > 3)
    victim.kill()
    code = doomed.wait()  # far below --timeout
    for thread in threads:
        thread.join(HANGS_S)
    assert code == 1, doomed.said
    assert f"rank 1 (process {victim.pid}) is gone" in doomed.said
    assert f"the run ended because rank 1 (process {victim.pid}) was killed by SIGKILL" in doomed.said
    assert "the same command starts the server again" in doomed.said
    error = seen["stream"][-1]["error"]
    assert f"rank 1 (process {victim.pid}) is gone" in error["message"]
    assert seen["whole"].status_code == 503
    assert f"rank 1 (process {victim.pid}) is gone" in seen["whole"].json()["error"]["message"]


def test_sigterm_lets_answers_end_and_leaves_with_0(server):
    # the last test of this server; a busy server's state may be 0.2 s old, so an answer must last longer
    body = {"prompt": "abc", "max_tokens": 100, "temperature": 1, "ignore_eos": True}
    (other,) = server.rank(0).children()
    assert "launch.serve.http.process" in " ".join(other.cmdline())
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(httpx.post, f"{server.url}/v1/completions", json=body)
        server.state_when(lambda state: state["running"] == 1)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0, server.said
        assert answer.result().status_code == 200
        assert answer.result().json()["usage"]["completion_tokens"] == 100
    assert "stopping after SIGTERM: running requests have 90 s to end" in server.said
    assert server.lines[-1].startswith("stopped")
    assert not other.is_running()


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_under_torchrun_the_exit_code_tells_an_orderly_end(number: signal.Signals) -> None:
    server = Process(*FLAGS, start=TORCHRUN)
    try:
        server.wait_until_ready()
        first, second = server.rank(0), server.rank(1)
        assert f"to end it: kill {first.pid} " in server.said
        (first if number == signal.SIGTERM else second).send_signal(number)
        code = server.wait()
        if number == signal.SIGTERM:
            assert code == 0, server.said
            assert "Traceback" not in server.said
            assert server.lines[-1].startswith("stopped")
        else:
            assert code != 0, server.said
            assert f"rank 1 (process {second.pid}) is gone" in server.said
    finally:
        server.close()


def _receive(messages: list[ToRank]) -> list[ToRank]:
    import torch.distributed as dist

    rank = Session(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "gloo", os.getppid())
    channel = RankChannel(rank, 30.0)
    received = []
    for message in messages:
        if rank.first:
            channel.broadcast(message)
            received.append(message)
        else:
            received.append(channel.receive())
    channel.close()
    return received


def test_objects_from_before_the_start_are_not_garbage_collected() -> None:
    mine = [object()]
    assert any(x is mine for x in gc.get_objects())
    try:
        run.freeze_gc()
        assert not any(x is mine for x in gc.get_objects())
        later = [object()]
        assert any(x is later for x in gc.get_objects())
    finally:
        gc.unfreeze()


def test_messages_of_any_length_are_received_whole(pool):
    change = ("fork", 2, 1, 16, 2**40)
    messages = [Heartbeat(), StepCommand(), StepCommand(changes=[change], tokens=list(range(10)), decodes=True)]
    messages += [StepCommand(tokens=list(range(count))) for count in (3000, 100_000)]
    assert pool(2).run(_receive, messages) == [messages, messages]


# refusals that start nothing


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--page-size", "0"], "page_size must be at least 1, got 0"),
        (["--grace", "-1"], "grace must be at least 0, got -1"),
        (["--port", "70000"], "port must be from 0 to 65535, got 70000"),
        (["--seed", str(2**64)], f"seed must be from -2**63 to 2**64 - 1, got {2**64}"),
        (["--cache-gib", "0"], "cache_gib must be above 0, got 0"),
        (["--device", "tpu"], "invalid choice"),
        (["--api-key", ""], "api_key must have characters and no spaces around them, got an empty one"),
        (["--api-key", "a "], "api_key must have characters and no spaces around them, got one with spaces at an end"),
    ],
)
def test_flags_that_cannot_be_obeyed_are_refused(flags, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--model", "tiny", *flags])
    assert caught.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_package_that_is_missing_is_refused_before_work_begins(capsys, monkeypatch):
    for name in ("fastapi", "uvicorn"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["--model", "tiny", "--device", "cpu"]) == 1
    said = capsys.readouterr().err
    assert "serve needs fastapi and uvicorn; install it with: pip install 'ringattn[serve]'" in said


def test_a_model_that_is_not_there_is_refused(capsys):
    assert main(["--model", "no/such/folder", "--device", "cpu"]) == 1
    assert "model must be 'tiny', a config.json or a folder with one, got no/such/folder" in capsys.readouterr().err


def test_a_port_that_is_taken_and_a_cache_without_a_page_are_refused(capsys, monkeypatch):
    import socket

    from ringattn.launch.serve import run

    with socket.create_server(("127.0.0.1", 0)) as taken, monkeypatch.context() as patch:
        patch.setattr(run, "load_model", None)  # the port is refused before a model is read
        flags = ["--model", "tiny", "--device", "cpu", "--nproc", "1", "--port", str(taken.getsockname()[1])]
        assert main(flags) == 1
    assert "host and port must be free to listen on" in capsys.readouterr().err
    for wrong, message in (
        (["--cache-gib", "1e-9"], "memory must hold a page of 64 tokens at least"),
        (["--tool-format", "harmony"], "tool_format must be one whose special tokens the tokenizer has"),
    ):
        assert main([*flags, *wrong]) == 1
        said = capsys.readouterr().err
        assert message in said
        assert "Traceback" not in said


def test_a_cache_in_host_memory_is_at_most_that():
    check_host_memory(ServeArgs("tiny", cache_gib=1e9), 2, on_cpu=False)
    for args, name in (
        (ServeArgs("tiny", cache_gib=1e9), "cache_gib"),
        (ServeArgs("tiny", host_cache_gib=1e9), "host_cache_gib"),
    ):
        with pytest.raises(Refusal, match=f"^{name} must be at most .* for 2 ranks"):
            check_host_memory(args, 2, on_cpu=True)


def test_a_full_disk_is_not_taken_for_a_port_in_use(monkeypatch):
    def fail(_: object) -> None:
        raise OSError(28, "No space left on device")

    def end(_: object, why: str) -> None:
        raise RuntimeError(why)

    monkeypatch.setattr(run, "HttpProcess", fail)
    monkeypatch.setattr(run.FatalExit, "__call__", end)
    with pytest.raises(RuntimeError, match="No space left on device"):
        main(["--model", "tiny", "--device", "cpu", "--nproc", "1", "--port", "0"])


def test_a_process_may_open_a_file_for_each_connection_that_is_allowed(monkeypatch):
    limits, found = (1024, 4096), []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: found.append(new))
    raise_file_limit(512)
    assert found == []
    raise_file_limit(4096 - 320)
    assert found == [(4096, 4096)]
    with pytest.raises(
        Refusal, match=r"max_connections must be at most 3776 where a process may open 4096 files, got 3777"
    ):
        raise_file_limit(4096 - 319)
    limits = (1024, resource.RLIM_INFINITY)
    raise_file_limit(10**5)
    assert found[1:] == [(10**5 + 320, resource.RLIM_INFINITY)]


def test_the_key_comes_from_the_environment(monkeypatch, capsys):
    monkeypatch.setenv(KEY, "secret")
    assert parse(["--model", "tiny"], "serve", "").api_key == "secret"
    assert parse(["--model", "tiny", "--api-key", "other"], "serve", "").api_key == "other"
    for wrong in ("secret\n", ""):
        monkeypatch.setenv(KEY, wrong)
        assert main(["--model", "tiny", "--device", "cpu"]) == 1
        assert "api_key must have characters and no spaces around them" in capsys.readouterr().err
    monkeypatch.delenv(KEY)
    assert parse(["--model", "tiny"], "serve", "") == ServeArgs(model="tiny")
