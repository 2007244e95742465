"""The server over HTTP, with a fake model: OpenAI's client, errors, limits, keys, streams, disconnects, many at once."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import pickle
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError

from ringattn.launch.serve import engine_server
from ringattn.launch.serve.config import ServeArgs
from ringattn.launch.serve.http import api, body_reader, completions, connections
from ringattn.launch.serve.http.api import Chat, Completion, read_body
from ringattn.launch.serve.http.body_reader import BodyReader
from ringattn.launch.serve.http.fields import RequestError
from ringattn.launch.serve.messages import Settings
from ringattn.launch.serve.tokenizer import ByteTokenizer
from tests.support import serving
from tests.support.serving import STOP, VOCAB, FakeRunner, FakeServer, Letters, answer, follow, text_of
from tests.support.timing import HANGS_S, wait_for


def ending(stem: str, least: int, most: int) -> str:
    """A prompt whose answer ends by itself after `least` to `most` tokens."""
    for x in range(10**6):
        length = len(answer(Letters().encode(f"{stem}{x}"), most + 1))
        if least <= length <= most:
            return f"{stem}{x}"
    raise AssertionError("none found")


def going_on(stem: str, least: int) -> str:
    """A prompt whose answer does not end for some tokens."""
    return next(f"{stem}{x}" for x in range(10**6) if len(answer(Letters().encode(f"{stem}{x}"), least)) == least)


@pytest.fixture(scope="module")
def served() -> Iterator[FakeServer]:
    with FakeServer(FakeRunner(pages=2000), max_body_mib=20_000 / 2**20, length=3000, default_tokens=20) as served:
        yield served


@pytest.fixture(autouse=True)
def all_pages_come_back(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "served" in request.fixturenames:
        request.getfixturevalue("served").assert_idle()


@pytest.fixture(scope="module")
def client(served: FakeServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def http(served: FakeServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url) as client:
        yield client


# answers


def test_completions_of_every_form_of_prompt(client):
    prompts = ["one", "two", "three"]
    wanted = [text_of(prompt, 7) for prompt in prompts]
    one = client.completions.create(model="fake", prompt="one", max_tokens=7, temperature=0)
    assert [choice.text for choice in one.choices] == wanted[:1]
    assert one.object == "text_completion"
    assert one.model == "fake"
    many = client.completions.create(model="fake", prompt=prompts, max_tokens=7, temperature=0)
    assert [choice.text for choice in many.choices] == wanted
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    tokens = client.completions.create(
        model="fake", prompt=[list(p.encode()) for p in prompts], max_tokens=7, temperature=0
    )
    assert [choice.text for choice in tokens.choices] == wanted
    assert tokens.usage.prompt_tokens == sum(map(len, prompts))
    assert tokens.usage.completion_tokens == sum(map(len, wanted))
    single = client.completions.create(model="fake", prompt=list(b"one"), max_tokens=7, temperature=0)
    assert single.choices[0].text == wanted[0]


def test_finish_reason_is_stop_or_length(client):
    prompt = ending("end", 2, 30)
    text = text_of(prompt, 31)
    whole = client.completions.create(model="fake", prompt=prompt, max_tokens=31, temperature=0).choices[0]
    assert (whole.text, whole.finish_reason) == (text, "stop")
    cut = client.completions.create(model="fake", prompt=prompt, max_tokens=len(text), temperature=0).choices[0]
    assert (cut.text, cut.finish_reason) == (text, "length")
    on = client.completions.create(
        model="fake", prompt=prompt, max_tokens=len(text) + 1, temperature=0, extra_body={"ignore_eos": True}
    ).choices[0]
    assert (on.text, on.finish_reason) == (text + chr(STOP), "length")


def test_default_number_of_tokens_is_at_most_max_tokens():
    with FakeServer(FakeRunner(), max_tokens=5) as served:
        url, prompt = f"{served.url}/v1", going_on("m", 5)
        for path, body in (
            ("completions", {"prompt": prompt}),
            ("chat/completions", {"messages": [{"role": "user", "content": "m"}]}),
        ):
            found = httpx.post(f"{url}/{path}", json={**body, "ignore_eos": True}).json()
            assert found["usage"]["completion_tokens"] == 5, found


def test_a_chat_that_says_no_number_of_tokens_gets_the_rest_of_the_context():
    with FakeServer(FakeRunner(pages=400), length=1000) as served:
        body = {"messages": [{"role": "user", "content": "m"}], "ignore_eos": True}
        usage = httpx.post(f"{served.url}/v1/chat/completions", json=body).json()["usage"]
        assert usage["total_tokens"] == 1000


def test_options_left_out_are_those_of_the_checkpoint():
    with FakeServer(FakeRunner(), defaults={"temperature": 2.0}) as served:

        def text(**options: Any) -> str:
            body = {"prompt": going_on("d", 8), "max_tokens": 8, "seed": 5, **options}
            return httpx.post(f"{served.url}/v1/completions", json=body).json()["choices"][0]["text"]

        assert text() == text(temperature=2) == text(temperature=None) != text(temperature=0)
        assert text(temperature=0) == text_of(going_on("d", 8), 8)
    with FakeServer(FakeRunner(), defaults={"temperature": 2.0, "top_k": 1}) as served:
        assert text() == text_of(going_on("d", 8), 8) != text(top_k=0)


def test_a_model_may_have_several_names():
    with FakeServer(FakeRunner(), served_model_name=("fake", "gpt-4o")) as served:
        for name in ("fake", "gpt-4o"):
            found = httpx.post(f"{served.url}/v1/completions", json={"model": name, "prompt": "a"})
            assert found.json()["model"] == "fake"
            assert httpx.get(f"{served.url}/v1/models/{name}").json()["id"] == name
        assert [one["id"] for one in httpx.get(f"{served.url}/v1/models").json()["data"]] == ["fake", "gpt-4o"]
        missing = httpx.post(f"{served.url}/v1/completions", json={"model": "other", "prompt": "a"})
        assert missing.status_code == 404
    with pytest.raises(ValueError, match="served_model_name"):
        ServeArgs("tiny", name="a", served_model_name=("b",))


def test_chat_template_kwargs_go_to_the_template(http):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    lengths = [
        http.post("/v1/chat/completions", json=body | more).json()["usage"]["prompt_tokens"]
        for more in ({}, {"chat_template_kwargs": {"think": True}})
    ]
    assert lengths[1] - lengths[0] == len("think")


def test_a_stop_string_cuts_the_answer_and_is_not_part_of_it(client):
    prompt = going_on("stop", 40)
    text = text_of(prompt, 40)
    stop = next(text[x : x + 2] for x in range(20, 30) if text.index(text[x : x + 2]) == x)
    for stops in (stop, ["never there", stop]):
        found = client.completions.create(model="fake", prompt=prompt, max_tokens=40, temperature=0, stop=stops)
        assert found.choices[0].text == text[: text.index(stop)]
        assert found.choices[0].finish_reason == "stop"
        assert found.usage.completion_tokens == text.index(stop) + 2
        stream = client.completions.create(
            model="fake", prompt=prompt, max_tokens=40, temperature=0, stop=stops, stream=True
        )
        assert "".join(chunk.choices[0].text for chunk in stream) == text[: text.index(stop)]


def test_a_chat_goes_through_the_template(client):
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    wanted = text_of("<system>be<user>hi<assistant>", 9)
    found = client.chat.completions.create(model="fake", messages=messages, max_completion_tokens=9, temperature=0)
    assert found.object == "chat.completion"
    assert found.choices[0].message.content == wanted
    assert found.choices[0].message.role == "assistant"
    assert found.usage.prompt_tokens == len("<system>be<user>hi<assistant>")
    # the answer can be sent back as it came
    again = [*messages, found.choices[0].message.model_dump(exclude_unset=True), {"role": "user", "content": "more"}]
    assert client.chat.completions.create(model="fake", messages=again, max_tokens=3).usage.completion_tokens >= 1
    default = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": going_on("x", 3)}], temperature=0
    )
    assert default.usage.completion_tokens <= 20


def test_streams_have_the_content_of_whole_answers(client):
    messages: Any = [{"role": "user", "content": "stream"}]
    for n in (1, 3):
        how: Any = {"model": "fake", "messages": messages, "max_tokens": 12, "seed": 5, "n": n}
        whole = client.chat.completions.create(**how)
        chunks = list(client.chat.completions.create(**how, stream=True, stream_options={"include_usage": True}))
        assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
        assert len({chunk.id for chunk in chunks}) == 1
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert all(chunk.usage is None for chunk in chunks[:-1])
        for choice in whole.choices:
            mine = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == choice.index]
            assert mine[0].delta.role == "assistant"
            assert "".join(one.delta.content or "" for one in mine) == choice.message.content
            assert [one.finish_reason for one in mine] == [None] * (len(mine) - 1) + [choice.finish_reason]
    stream = client.completions.create(model="fake", prompt="abc", max_tokens=12, temperature=0, stream=True)
    texts = [chunk.choices[0].text for chunk in stream]
    assert "".join(texts) == text_of("abc", 12)
    assert len(texts) > 5, "an answer comes piece by piece"


def test_the_lines_of_a_stream(http):
    body = {"prompt": "abc", "max_tokens": 3, "temperature": 0, "stream": True}
    answer = http.post("/v1/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: "))["choices"] for event in events[:-2])


def test_every_token_id_has_a_chunk_with_or_without_text(http):
    tokens = answer(prompt := list(going_on("ids", 6).encode()), 6)
    text = Letters().decode(tokens)
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "stop": text[:3] + "\x01", "return_token_ids": True}
    whole = http.post("/v1/completions", json=body).json()["choices"][0]
    assert (whole["token_ids"], whole["text"]) == (tokens, text)
    events = http.post("/v1/completions", json={**body, "stream": True}).text.split("\n\n")[:-2]
    chunks = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert [chunk.get("token_ids") for chunk in chunks] == [*([token] for token in tokens), None]
    assert [chunk["text"] for chunk in chunks] == ["", "", "", text[:4], text[4], text[5], ""]
    assert "token_ids" not in http.post("/v1/completions", json={**body, "return_token_ids": False}).text
    chat = {"messages": [{"role": "user", "content": "ids"}], "max_tokens": 4, "temperature": 0}
    said = http.post("/v1/chat/completions", json={**chat, "return_token_ids": True}).json()["choices"][0]
    assert Letters().decode(said["token_ids"]) == said["message"]["content"]


def test_echo_repeats_the_prompt(client):
    found = client.completions.create(model="fake", prompt="abc", max_tokens=4, temperature=0, echo=True)
    assert found.choices[0].text == "abc" + text_of("abc", 4)
    stream = client.completions.create(
        model="fake", prompt=list(b"abc"), max_tokens=4, temperature=0, echo=True, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == "abc" + text_of("abc", 4)


def read_chunks(answer: httpx.Response) -> list[dict[str, Any]]:
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-2]]


@pytest.mark.parametrize("length", [1, 2, 30, 700])
def test_echo_with_logprobs_has_the_logprobs_of_the_prompt(http, length):
    prompt = (going_on("e", 5) * length)[:length]
    body = {"prompt": prompt, "max_tokens": 5, "temperature": 0, "echo": True, "logprobs": 2, "ignore_eos": True}
    # a prefix that is there already has no scores
    (whole,) = [http.post("/v1/completions", json=body).json()["choices"][0] for _ in range(2)][1:]
    said, text = whole["logprobs"], whole["text"]
    assert said["tokens"] == list(text)
    assert text.startswith(prompt)
    assert len(text) == length + 5
    assert said["text_offset"] == list(range(length + 5))
    assert said["token_logprobs"][0] is said["top_logprobs"][0] is None
    tokens = Letters().encode(text)
    lse = math.log(math.exp(10) + VOCAB - 1)
    for place in range(1, len(tokens)):
        likely = follow(tokens[:place])
        assert said["token_logprobs"][place] == pytest.approx(10 * (tokens[place] == likely) - lse, abs=1e-4)
        top = said["top_logprobs"][place]
        assert len(top) == 2
        assert max(top, key=lambda one: top[one]) == chr(likely)
    chunks = read_chunks(http.post("/v1/completions", json={**body, "stream": True}))
    assert "".join(chunk["text"] for chunk in chunks) == text
    parts = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
    assert parts[0]["tokens"] == list(prompt)
    assert {name: [one for part in parts for one in part[name]] for name in said} == said


def test_echo_with_zero_tokens_returns_the_prompt_alone(http):
    prompt = "how likely is this"
    body = {"prompt": [prompt, "and this"], "max_tokens": 0, "echo": True, "logprobs": 0}
    answer = http.post("/v1/completions", json=body).json()
    first, second = answer["choices"]
    assert (first["text"], second["text"]) == (prompt, "and this")
    assert len(first["logprobs"]["token_logprobs"]) == len(prompt)
    assert [first["finish_reason"], answer["usage"]["completion_tokens"]] == ["length", 0]
    chunks = read_chunks(http.post("/v1/completions", json={**body, "prompt": prompt, "stream": True}))
    assert [chunk["text"] for chunk in chunks] == [prompt, ""]
    assert chunks[0]["logprobs"] == first["logprobs"]
    assert chunks[1]["finish_reason"] == "length"
    plain = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 0, "echo": True}).json()["choices"][0]
    assert (plain["text"], plain["logprobs"]) == (prompt, None)


def test_nan_logprobs_of_a_prompt_fail_only_its_request():
    class Poisoned(FakeRunner):
        def start(self, plan):
            step = super().start(plan)
            for place, scores in zip(plan.scored, step._chosen.scores, strict=True):
                if plan.requests[place].prompt[0] == ord("!"):
                    scores[0, 0] = math.nan
            return step

    with FakeServer(Poisoned()) as served:
        body = {"max_tokens": 2, "echo": True, "logprobs": 1, "temperature": 0}
        statuses = [
            httpx.post(f"{served.url}/v1/completions", json={**body, "prompt": prompt}).status_code
            for prompt in ("good", "!bad", "good")
        ]
        assert statuses == [200, 500, 200]
        served.assert_idle()


def test_options_of_vllm_have_their_meaning(http):
    """The fake model gives one token 10 more than all others."""
    prompt = going_on("options", 8)
    tokens = answer(Letters().encode(prompt), 8)
    other = next(x for x in range(32, 127) if x not in tokens)

    def ask(path: str = "completions", **how: Any) -> tuple[str, str]:
        body = {"prompt": prompt} if path == "completions" else {"messages": [{"role": "user", "content": "x"}]}
        said = http.post(f"/v1/{path}", json={**body, "max_tokens": 8, "ignore_eos": True, **how})
        assert said.status_code == 200, said.text
        choice = said.json()["choices"][0]
        return choice.get("text") or choice["message"]["content"], choice["finish_reason"]

    text = Letters().decode(tokens)
    hot: Any = {"temperature": 2.0, "seed": 1}
    assert ask(**hot)[0] != text
    cuts: list[dict[str, Any]] = [{"top_k": 1}, {"min_p": 0.5}, {"top_p": 0.01}]
    for how in cuts:
        assert ask(**hot, **how) == (text, "length")
    assert ask(**hot, top_k=0, min_p=0) == ask(**hot, top_k=-1) == ask(**hot)
    for path in ("completions", "chat/completions"):
        found = ask(path, temperature=0, logit_bias={str(other): 100, str(tokens[0]): -1})
        assert found == (chr(other) * 8, "length")
        # another token follows as soon as the penalty makes one likelier
        punished = ask(path, temperature=0, logit_bias={str(other): 11}, frequency_penalty=1.5)[0]
        assert punished[0] == chr(other) != punished[1]
    many = {"temperature": 0, "logit_bias": {str(other): 10.5, str(tokens[0]): 0.4}}
    assert ask(**many)[0] == chr(other) * 8
    assert ask(**many, presence_penalty=0.3)[0][1] != chr(other)
    # tokens of the prompt are punished, too
    third = next(x for x in range(other + 1, 127) if chr(x) not in prompt)
    told = {"prompt": prompt + chr(other), "temperature": 0, "logit_bias": {str(other): 40, str(third): 35}}
    assert ask(**told)[0] == chr(other) * 8
    assert ask(**told, repetition_penalty=2)[0][:2] == chr(third) + chr(other)
    at = next(x for x in range(2, 8) if tokens[x] not in tokens[:x])
    assert ask(temperature=0, stop_token_ids=[tokens[at], 1]) == (text[:at], "stop")


def test_an_answer_has_at_least_min_tokens(http):
    """Neither a stop token nor a stop string ends it before."""
    ends = ending("min", 2, 6)
    length = len(answer(Letters().encode(ends), 9))
    body = {"prompt": ends, "max_tokens": 12, "temperature": 0}

    def ask(**how: Any) -> tuple[int, str]:
        said = http.post("/v1/completions", json={**body, **how}).json()
        return said["usage"]["completion_tokens"], said["choices"][0]["text"]

    assert ask()[0] == length
    assert ask(min_tokens=length) == ask()
    more, text = ask(min_tokens=9)
    assert 9 <= more <= 12
    assert text.startswith(ask()[1])
    assert ask(min_tokens=9, temperature=2, top_k=3, seed=1)[0] >= 9
    at = ask(min_tokens=12)[1]
    assert ask(min_tokens=12, stop=[at[1]]) == (12, at)
    assert ask(min_tokens=4, stop=list(set(at))[:16])[0] in (5, *range(6, 13))


def test_logprobs_name_the_likeliest_tokens(client):
    found = client.completions.create(model="fake", prompt=going_on("l", 5), max_tokens=5, temperature=0, logprobs=2)
    said, text = found.choices[0].logprobs, found.choices[0].text
    assert said.tokens == list(text)
    assert said.text_offset == [0, 1, 2, 3, 4]
    assert all(max(top.values()) == value for top, value in zip(said.top_logprobs, said.token_logprobs, strict=True))
    messages: Any = [{"role": "user", "content": going_on("l", 5)}]
    how: Any = {
        "model": "fake",
        "messages": messages,
        "max_tokens": 5,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
    }
    chat = client.chat.completions.create(**how)
    entries = chat.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == chat.choices[0].message.content
    assert all(len(entry.top_logprobs) == 3 and entry.top_logprobs[0].token == entry.token for entry in entries)
    parts = [chunk.choices[0].logprobs for chunk in client.chat.completions.create(**how, stream=True)]
    assert [entry for part in parts if part for entry in part.content] == entries


def test_text_offsets_do_not_depend_on_text_held_for_a_stop_string(http):
    prompt = going_on("o", 9)
    text = text_of(prompt, 9)
    body = {"prompt": prompt, "max_tokens": 9, "temperature": 0, "logprobs": 0, "stop": [f"{text[2:6]}\0", text[7:]]}
    whole = http.post("/v1/completions", json=body).json()["choices"][0]
    assert (whole["text"], whole["logprobs"]["text_offset"]) == (text[:7], list(range(9)))
    with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    said = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [offset for one in said if one for offset in one["text_offset"]] == list(range(9))


def test_the_same_seed_gives_the_same_text_and_others_do_not(client):
    def ask(**how: Any) -> list[str]:
        found = client.completions.create(
            model="fake", prompt=["s"], max_tokens=30, extra_body={"ignore_eos": True}, **how
        )
        return [choice.text for choice in found.choices]

    assert ask(seed=1, temperature=2) == ask(seed=1, temperature=2) != ask(seed=2, temperature=2)
    assert ask(seed=1, temperature=2, n=3)[1:] == ask(seed=2, temperature=2, n=2)
    assert ask(temperature=2) != ask(temperature=2)
    assert ask(temperature=2, top_p=1e-6) == ask(temperature=0)


def test_models_and_health(client, http):
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").max_model_len == 3000
    with pytest.raises(openai.NotFoundError, match="model must be 'fake', got 'other'"):
        client.models.retrieve("other")
    assert http.get("/health").json() == {"status": "ok"}


def test_metrics_and_state_agree(http):
    http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3, "ignore_eos": True})
    state = http.get("/state").json()
    assert state["model"] == "fake"
    assert state["totals"]["generated_tokens"] > 0
    lines = http.get("/metrics").text.splitlines()
    numbers = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}
    assert numbers['ringattn_tokens_total{kind="generated"}'] >= state["totals"]["generated_tokens"]
    assert (
        numbers['ringattn_cache_pages{rank="0",use="free"}'] + numbers['ringattn_cache_pages{rank="0",use="kept"}']
        == 2000
    )
    assert numbers['ringattn_requests_total{path="/v1/completions",status="200"}'] >= 1
    assert numbers["ringattn_time_to_first_token_seconds_count"] >= 1
    assert numbers['ringattn_model_info{model="fake"}'] == 1


def test_metrics_of_the_cache_the_queue_and_the_ends_of_answers():
    with FakeServer(FakeRunner(pages=100, page_size=4, step_s=0.2), running=1) as served:
        url = f"{served.url}/v1/completions"

        def numbers() -> dict[str, float]:
            lines = httpx.get(f"{served.url}/metrics").text.splitlines()
            return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}

        prompt = going_on("q", 40)
        with ThreadPoolExecutor(2) as threads:
            body = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
            two = [threads.submit(httpx.post, url, json=body) for _ in range(2)]
            served.state_when(lambda state: (state["running"], state["waiting"]) == (1, 1))
            assert numbers()["ringattn_cache_usage_ratio"] > 0
            served.runner.step_s = 0.01
            assert [one.result().status_code for one in two] == [200, 200]
        text = two[0].result().json()["choices"][0]["text"]
        httpx.post(url, json={**body, "stop": text[10]})
        with httpx.stream("POST", url, json={**body, "max_tokens": 300, "stream": True}) as stream:
            next(stream.iter_lines())
        served.assert_idle()
        served.engine.time_limit_s = 1.0
        httpx.post(url, json={**body, "max_tokens": 300})
        served.assert_idle()
        found = numbers()
    assert found["ringattn_cache_usage_ratio"] == 0
    assert found["ringattn_queue_seconds_count"] == 5
    assert 0.2 < found["ringattn_queue_seconds_sum"]  # the second of two
    reasons = [
        found[f'ringattn_finished_total{{reason="{name}"}}'] for name in ("length", "stop", "error", "cancelled")
    ]
    assert reasons == [2, 1, 1, 1]


def test_histograms_hold_the_first_token_and_the_mean_of_the_later_ones():
    with FakeServer(FakeRunner(step_s=0.03, ahead=False)) as served:
        httpx.post(f"{served.url}/v1/completions", json={"prompt": "abc", "max_tokens": 5, "ignore_eos": True})
        lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    numbers = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}
    # a step is 0.03 s: the prompt's gives the first token, four later ones have one each
    for name, less, more in (("time_to_first_token", "0.025", "10.0"), ("time_per_output_token", "0.025", "2.5")):
        buckets = [numbers[f'ringattn_{name}_seconds_bucket{{le="{le}"}}'] for le in (less, more, "+Inf")]
        assert (*buckets, numbers[f"ringattn_{name}_seconds_count"]) == (0, 1, 1, 1)
        assert 0.03 <= numbers[f"ringattn_{name}_seconds_sum"] < 10
    assert numbers["ringattn_request_seconds_sum"] >= 5 * 0.03


@pytest.mark.parametrize("stream", [False, True])
def test_histograms_count_from_the_arrival_and_not_from_the_end_of_the_tokenizer(monkeypatch, stream):
    """The time of the tokenizer, and of long prompts before, is part of the latency."""
    encode = Letters.encode
    monkeypatch.setattr(Letters, "encode", lambda *args: (time.sleep(0.5), encode(*args))[1])
    with FakeServer(FakeRunner()) as served:
        body = {"prompt": "abc", "max_tokens": 3, "ignore_eos": True, "stream": stream}
        httpx.post(f"{served.url}/v1/completions", json=body)
        lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    numbers = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}
    for name in ("time_to_first_token", "request"):
        assert 0.5 <= numbers[f"ringattn_{name}_seconds_sum"] < 10
    assert numbers["ringattn_time_per_output_token_seconds_sum"] < 0.5


# refusals

BAD = [
    (b"", "must be JSON"),
    (b"{", "must be JSON"),
    (b"\xff\xfe", "must be JSON"),
    (b"[1]", "must be a JSON object, got: Input should be"),
    (b"[" * 5000, "must be JSON, got: recursion limit exceeded"),
    (b'{"prompt": "a", "temperature": NaN}', "temperature: Input should be a finite number"),
    (b'{"prompt": "a", "temperature": 1e999}', "temperature: "),
    (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "must be JSON|max_tokens"),
    (b'{"prompt": "a", "max_tokens": ' + b"9" * 4300 + b"}", "max_tokens: Input should be less than or equal to"),
    ({"max_tokens": 3}, "prompt: Field required"),
    ({"prompt": ""}, "prompt must have at least one token"),
    ({"prompt": []}, "none may be empty"),
    ({"prompt": [[]]}, "none may be empty"),
    ({"prompt": ["a", 1]}, "prompt must be a string"),
    ({"prompt": {"a": 1}}, "prompt must be a string"),
    ({"prompt": [True]}, "prompt must be a string"),
    ({"prompt": [256]}, "tokens must be from 0 to 255, got 256 to 256"),
    ({"prompt": [-1]}, "tokens must be from 0 to 255, got -1 to -1"),
    ({"prompt": "\ud800"}, "must be JSON, got: unexpected end of hex escape"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens: "),
    ({"prompt": "a", "max_tokens": "5"}, 'max_tokens: Input should be a valid integer, got "5"'),
    ({"prompt": "a", "max_tokens": True}, "max_tokens: "),
    ({"prompt": "a", "max_tokens": 3000}, r"must fit into 3000 tokens, got 1 \+ 3000 = 3001"),
    ({"prompt": "a", "temperature": -1}, "temperature: "),
    ({"prompt": "a", "top_p": 0}, "top_p: "),
    ({"prompt": "a", "n": 0}, "n: "),
    ({"prompt": ["a"] * 1000, "n": 100}, "at most 1024 answers, got 1000 prompts times 100"),
    ({"prompt": "a", "stop": [""]}, "stop.0: String should have at least 1 character"),
    ({"prompt": "a", "stop": ["x"] * 17}, "stop: List should have at most 16 items"),
    ({"prompt": "a", "stop": ["x", 5]}, r"stop.1: Input should be a valid string"),
    ({"prompt": "a", "logprobs": 100}, "logprobs: "),
    ({"prompt": "a", "logprobs": -1}, "logprobs: "),
    ({"prompt": "a", "stop_token_ids": ["5"]}, "stop_token_ids.0: Input should be a valid integer"),
    ({"prompt": "a", "suffix": "x"}, "suffix is not supported"),
    ({"prompt": "a", "best_of": 2}, "best_of must be left out or equal n"),
    *(
        ({"prompt": "a", name: value}, rf"{name}(\.\S+)?: ")
        for name, value in (
            ("presence_penalty", 2.1),
            ("presence_penalty", "1"),
            ("frequency_penalty", -2.1),
            ("repetition_penalty", 0),
            ("repetition_penalty", -1.0),
            ("repetition_penalty", 101),
            ("top_k", -2),
            ("top_k", 1.5),
            ("top_k", 10**400),
            ("top_k", True),
            ("min_p", -0.1),
            ("min_p", 1.1),
            ("logit_bias", {"1": 101}),
            ("logit_bias", {"1": -100.5}),
            ("logit_bias", {"256": 1}),
            ("logit_bias", {"-1": 1}),
            ("logit_bias", {"01": 1}),
            ("logit_bias", {"x": 1}),
            ("logit_bias", [1]),
            ("logit_bias", {str(x): 1 for x in range(1025)}),
            ("stop_token_ids", [256]),
            ("stop_token_ids", [-1]),
            ("stop_token_ids", 5),
            ("stop_token_ids", [1] * 1025),
        )
    ),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options must be left out"),
    ({"prompt": "a", "__class__": "x"}, "__class__ is not supported"),
    ({"prompt": "a", "\ud800": "x"}, "must be JSON, got: unexpected end of hex escape"),
]


@pytest.mark.parametrize(("body", "message"), BAD, ids=lambda x: str(x)[:40] if isinstance(x, (bytes, dict)) else "")
def test_malformed_bodies_get_a_400_that_says_why(http, body, message):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = http.post("/v1/completions", content=data, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert "_penalty" not in message or error["param"] == error["message"].partition(":")[0]
    assert re.search(message, error["message"]), error["message"]


MANY: dict[str, tuple[type[Chat] | type[Completion], dict[str, Any]]] = {
    "messages": (Chat, {"messages": [1] * 2000}),
    "messages.0.content.0": (Chat, {"messages": [{"role": "user", "content": [1] * 2000}]}),
    "metadata": (Completion, {"prompt": "a", "metadata": {str(i): 1 for i in range(2000)}}),
    "logit_bias": (Completion, {"prompt": "a", "logit_bias": {f"x{i}": 1 for i in range(2000)}}),
    "x0": (Completion, {"prompt": "a", **{f"x{i}": 1 for i in range(2000)}}),
}


@pytest.mark.parametrize("where", list(MANY))
def test_a_body_with_many_faults_takes_the_memory_of_few(where):
    kind, body = MANY[where]
    with pytest.raises(ValidationError) as many:
        kind.model_validate_json(json.dumps(body))
    assert many.value.error_count() < 50
    with pytest.raises(RequestError, match=re.escape(where)):
        read_body(kind, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "messages: Field required"),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0: content must be text, got none"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0: content must be text, got a part of type 'image_url'",
        ),
        ({"messages": [{"role": "user", "content": "x", "names": "n"}]}, "messages.0.names are not supported"),
        ({"messages": [{"role": "user", "content": "refuse"}]}, "the template refuses"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "tools.0.type: Field required"),
        (
            {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema"}},
            "response_format must have json_schema where its type is json_schema",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 3}, "top_logprobs must be left out"),
        (
            {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "max_completion_tokens": 4},
            "max_tokens must be left out",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "functions": [{}]}, "functions are not supported"),
        (
            {"messages": [{"role": "user", "content": "x"}], "tool_choice": {"type": "auto"}},
            "tool_choice.type: Input should be 'function', got \"auto\"",
        ),
    ],
)
def test_malformed_chats_get_a_400_that_says_why(http, body, message):
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


def test_null_fields_are_absent_and_an_answer_can_be_sent_back(http):
    body = {"prompt": "a", "max_tokens": 2, "temperature": 0}
    nulls = dict.fromkeys(("echo", "n", "stop", "logprobs", "stream", "stream_options", "suffix", "reasoning_effort"))
    said, plain = (http.post("/v1/completions", json=x).json()["choices"] for x in ({**body, **nulls}, body))
    assert said == plain
    told = {"role": "assistant", "content": "b", "tool_calls": [], "refusal": None}
    asked = {"role": "user", "name": None, "content": [{"type": "text", "text": "c", "cache_control": None}]}
    chat = {
        "messages": [told, asked],
        "max_tokens": 2,
        "functions": None,
        "response_format": {"type": "text"},
    }
    chat |= {"stream": True, "stream_options": {"include_usage": None}}
    answer = http.post("/v1/chat/completions", json=chat)
    assert answer.status_code == 200, answer.text


HARMLESS = {
    "user": "u",
    "metadata": {"a": "b"},
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "parallel_tool_calls": True,
    "store": False,
    "service_tier": "auto",
    "reasoning_effort": "none",
    "verbosity": "medium",
}


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_fields_that_ask_for_nothing_change_nothing_and_their_other_values_are_refused(http, path):
    body = {"prompt": "a"} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    body |= {"max_tokens": 3, "temperature": 0}
    said, plain = (http.post(f"/v1/{path}", json=x).json()["choices"] for x in ({**body, **HARMLESS}, body))
    assert said == plain
    others = {"store": True, "service_tier": "flex", "reasoning_effort": "high", "verbosity": "low", "user": 5}
    for name, value in others.items():
        answer = http.post(f"/v1/{path}", json={**body, name: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


def test_clients_of_openai_see_their_own_exceptions(client):
    with pytest.raises(openai.BadRequestError, match=r"got 1 \+ 5000 = 5001") as caught:
        client.completions.create(model="fake", prompt="a", max_tokens=5000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", prompt="a")


def test_bodies_over_the_limit_get_a_413(http):
    answer = http.post("/v1/completions", json={"prompt": "x" * 30_000})
    assert answer.status_code == 413
    assert "at most 20000 bytes" in answer.json()["error"]["message"]

    def pieces() -> Iterator[bytes]:  # without Content-Length
        for _ in range(30):
            yield b"x" * 1000

    answer = http.post("/v1/completions", content=pieces(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 413


def test_other_paths_methods_and_types(http):
    assert http.get("/nothing").status_code == 404
    assert http.get("/nothing").json()["error"]["type"] == "invalid_request_error"
    assert http.get("/v1/completions").status_code == 405
    assert http.post("/v1/completions", data={"prompt": "a"}).status_code == 415
    assert http.get("/docs").status_code == 404
    assert (http.head("/health").status_code, http.head("/health").content) == (200, b"")
    assert http.head("/").status_code == 200


def sent(served: FakeServer, *headers: str, body: bytes = b"") -> bytes:
    """The whole answer to a request with these headers, one line each: clients send none twice."""
    method = "POST /v1/completions" if body else "GET /v1/models"
    lines = [f"{method} HTTP/1.1", *headers, f"Content-Length: {len(body)}", "Connection: close", "", ""]
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall("\r\n".join(lines).encode("latin-1") + body)
        return read_all(connection)


@pytest.mark.parametrize("name", ["Host", "Authorization", "X-Request-Id"])
def test_headers_that_decide_access_may_be_sent_once(served, name):
    value = "Bearer x" if name == "Authorization" else "x"
    once = sorted({"Host: x", f"{name}: {value}"})
    assert sent(served, *once).startswith(b"HTTP/1.1 200 ")
    # of two, the last one counted, whatever a proxy in front had made of the first
    head, _, body = sent(served, *once, f"{name.lower()}: {value}").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    error = json.loads(body)["error"]
    assert (error["param"], error["type"]) == (name.lower(), "invalid_request_error")
    assert error["message"].startswith(f"{name.lower()} must be sent once, got 2 headers")


def test_a_body_in_an_encoding_that_is_not_served_gets_a_415(served):
    body = json.dumps({"prompt": "a", "max_tokens": 1, "temperature": 0}).encode()
    plain = ("Host: x", "Content-Type: application/json")
    for said, status in (("identity", 200), ("gzip", 415), ("br", 415), ("identity, gzip", 415)):
        head, _, answer = sent(served, *plain, f"Content-Encoding: {said}", body=body).partition(b"\r\n\r\n")
        assert head.startswith(f"HTTP/1.1 {status} ".encode()), said
        if status == 415:
            assert f"Content-Encoding must be identity, got {said}" in json.loads(answer)["error"]["message"]
    twice = sent(served, *plain, "Content-Encoding: identity", "Content-Encoding: gzip", body=body)
    assert twice.startswith(b"HTTP/1.1 415 ")


def test_an_answer_has_the_request_id_of_its_request_or_a_new_one(served, client, http):
    asked: dict[str, Any] = {"model": "fake", "prompt": "a", "max_tokens": 1, "temperature": 0}
    made = {client.completions.create(**asked)._request_id for _ in range(2)}
    assert len(made) == 2, made
    assert all(re.fullmatch("req-[0-9a-f]{32}", name) for name in made)
    mine = {"X-Request-Id": "trace/7:a"}
    assert client.completions.create(**asked, extra_headers=mine)._request_id == "trace/7:a"
    for path, status in (("/health", 200), ("/nothing", 404), ("/v1/completions", 405)):
        answer = http.get(path, headers=mine)
        assert (answer.status_code, answer.headers["x-request-id"]) == (status, "trace/7:a")
    stream = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "stream": True}, headers=mine)
    assert stream.headers.get_list("x-request-id") == ["trace/7:a"]
    for name in ("", "a b", "x" * 201, "ä"):
        head, _, body = sent(served, "Host: x", f"X-Request-Id: {name}").partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["param"] == "x-request-id"
        assert re.search(rb"x-request-id: req-[0-9a-f]{32}", head), head


@contextlib.contextmanager
def slow_tokenizer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Long texts are tokenized when the context ends."""
    encode, go_on = Letters.encode, threading.Event()

    def wait(self: Letters, text: str, most: int | None = None) -> list[int]:
        assert len(text) < completions.SHORT_BYTES or go_on.wait(2 * HANGS_S)
        return encode(self, text, most)

    monkeypatch.setattr(Letters, "encode", wait)
    try:
        yield
    finally:
        go_on.set()


def test_long_prompts_delay_no_short_ones_and_too_many_get_a_429(monkeypatch):
    """Regression: one thread tokenized everything, and any number of bodies waited for it."""
    with FakeServer(FakeRunner(), max_body_mib=0.125) as served, ThreadPoolExecutor(8) as threads:
        url, body = f"{served.url}/v1/completions", {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
        long = {**body, "prompt": "a" * 100_000}
        with slow_tokenizer(monkeypatch):
            # 34.5 KB of each count, and 262 KB may wait
            asked = [threads.submit(httpx.post, url, json=long) for _ in range(8)]
            refused = next(as_completed(asked)).result()
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert "must have at most 262144 bytes together" in refused.json()["error"]["message"]
            assert httpx.post(url, json={**body, "prompt": "hi"}).status_code == 200
        # their tokens do not fit
        assert sorted(one.result().status_code for one in asked) == [400] * 7 + [429]
        assert httpx.post(url, json=long).status_code == 400
        served.assert_idle()


def test_a_long_body_is_read_in_another_process_and_answered_like_a_short_one(monkeypatch):
    """Regression: JSON of 30 MiB held the interpreter's lock for up to 4 s, in which streams got no token."""
    read_here, others = [], set(multiprocessing.active_children())

    def read(kind: Any, data: bytes) -> Any:
        read_here.append(len(data))
        return read_body(kind, data)

    monkeypatch.setattr(body_reader, "read_body", read)
    monkeypatch.setattr(completions, "NEAR_BYTES", 4000)
    monkeypatch.setattr(completions, "LONG_THREADS", 1)
    said = [{"role": "user", "content": "hi"}]
    fake = FakeServer(FakeRunner(), length=100, tokenizer=ByteTokenizer())
    with fake as served, httpx.Client(base_url=served.url, timeout=HANGS_S) as http:

        def answer_to(path: str, body: dict[str, Any], length: int) -> tuple[int, Any]:
            data = json.dumps(body).ljust(length)
            found = http.post(f"/v1/{path}", content=data, headers={"Content-Type": "application/json"})
            return found.status_code, found.json().get("choices") or found.json()

        for path, body, status in (
            ("completions", {"prompt": [[1, 2, 3], [4]], "logprobs": 1, "echo": True, "n": 2}, 200),
            ("completions", {"prompt": "hi", "max_tokens": 3}, 200),
            ("chat/completions", {"messages": said, "top_p": 2}, 400),
            ("completions", {"prompt": "x" * 300}, 400),
            ("completions", {"prompt": "x", "structured_outputs": {"json": "[" * 900 + "]" * 900}}, 400),
        ):
            short, long = (answer_to(path, {**body, "temperature": 0}, length) for length in (0, 2**17))
            assert short == long
            assert short[0] == status
        assert max(read_here) <= 4000
        [process] = set(multiprocessing.active_children()) - others
        process.kill()
        process.join()
        status, answer = answer_to("completions", {"prompt": "x"}, 2**17)
        assert (status, answer["error"]["code"]) == (503, "unavailable")
        assert answer_to("completions", {"prompt": "x"}, 0)[0] == 200


def test_what_is_read_of_a_body_is_no_longer_than_its_tokens():
    """It is unpickled in one go, which holds the interpreter's lock."""
    long = {"x": "y" * 10**6}
    settings = Settings("fake", {}, ServeArgs("fake", page_size=64), 10**5, {})
    reader = BodyReader(ByteTokenizer(), settings)
    dropped = {"user": long["x"], "metadata": long, "safety_identifier": long["x"], "prompt_cache_key": long["x"]}
    part = {"type": "json_schema", "json_schema": {"schema": {"enum": ["z"]}, "description": long["x"]}}
    for kind, prompt in (
        (Completion, {"prompt": "x" * 50_000}),
        (Chat, {"messages": [{"role": "user", "content": "x" * 50_000}]}),
    ):
        read = reader.read(kind, json.dumps({**prompt, **dropped, "response_format": part}).encode())
        assert len(pickle.dumps(read)) < 300_000
    with pytest.raises(RequestError, match="at most 131072 bytes"):
        reader.read(Completion, json.dumps({"prompt": "x", "structured_outputs": {"json": long}}).encode())


def test_the_wait_for_the_tokenizer_counts_in_the_time_limit(monkeypatch):
    with FakeServer(FakeRunner(), time_limit_s=0.5) as served, slow_tokenizer(monkeypatch):
        answer = httpx.post(f"{served.url}/v1/completions", json={"prompt": "a" * 100_000})
        assert answer.status_code == 503
        assert "waited for the tokenizer until its time of" in answer.json()["error"]["message"]
        assert answer.headers["x-should-retry"] == "false"


def test_a_text_that_can_not_fit_is_refused_before_it_is_tokenized(http):
    chat = {"messages": [{"role": "user", "content": "x" * 7000}]}
    for path, body, name in (("completions", {"prompt": "x" * 7000}, "prompt"), ("chat/completions", chat, "messages")):
        answer = http.post(f"/v1/{path}", json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", name)
        assert re.search(f"{name} must fit into 3000 tokens, got 35.. or more", error["message"])


def test_more_messages_than_tokens_and_long_schemas_never_reach_the_template(monkeypatch):
    """The template would take seconds of a thread that tokenizes long bodies for all."""
    monkeypatch.setattr(Letters, "chat", None)
    monkeypatch.setattr(api, "MAX_TOOL_BYTES", 1000)
    function = {"name": "f", "parameters": {"enum": ["x" * 1000]}}
    said = [{"role": "user", "content": "x"}]
    many, long = {"messages": said * 101}, {"messages": said, "tools": [{"type": "function", "function": function}]}
    with FakeServer(FakeRunner(), length=100) as served:
        errors = [httpx.post(f"{served.url}/v1/chat/completions", json=body).json()["error"] for body in (many, long)]
    assert [error["param"] for error in errors] == ["messages", "tools"]
    assert errors[0]["code"] == "context_length_exceeded"
    assert "must have at most 1000 bytes" in errors[1]["message"]


def test_a_full_queue_gets_a_429_and_a_stopping_server_a_503():
    with FakeServer(FakeRunner(pages=8, step_s=0.2), running=1, waiting=2) as served:
        prompt = going_on("f", 50)
        many = httpx.post(f"{served.url}/v1/completions", json={"prompt": "a", "max_tokens": 1, "n": 4})
        assert (many.status_code, many.json()["error"]["param"]) == (400, "n")
        assert "at most 3 answers" in many.json()["error"]["message"]  # one runs and two wait
        with ThreadPoolExecutor(8) as threads:
            body = {"prompt": prompt, "max_tokens": 50, "temperature": 0}  # fills the cache of 64 tokens
            # at once: one that runs, and two that wait
            asked = [threads.submit(httpx.post, f"{served.url}/v1/completions", json=body) for _ in range(3)]
            served.state_when(lambda state: state["waiting"] == 2)
            refused = httpx.post(f"{served.url}/v1/completions", json=body)
            assert refused.status_code == 429
            assert "at most 3 requests may be open" in refused.json()["error"]["message"]
            assert refused.headers["retry-after"] == "1"
            served.engine.stop(HANGS_S)
            served.runner.step_s = 0.01
            # HTTP hears of it with the end of a step
            wait_for(lambda: httpx.get(f"{served.url}/health").status_code == 503)
            refused = httpx.post(f"{served.url}/v1/completions", json=body)
            assert refused.status_code == 503
            codes = sorted(one.result().status_code for one in asked)
            assert codes == [200, 503, 503]  # the one that ran has ended, those that waited were sent away
            done = next(one.result().json() for one in asked if one.result().status_code == 200)
            assert done["choices"][0]["text"] == text_of(prompt, 50)
        served.thread.join(HANGS_S)
        assert not served.thread.is_alive()


def test_a_request_that_takes_too_long_gets_a_503():
    with FakeServer(FakeRunner(pages=200, step_s=0.02), time_limit_s=0.3) as served:
        body = {"prompt": going_on("t", 300), "max_tokens": 300, "temperature": 0}
        answer = httpx.post(f"{served.url}/v1/completions", json=body)
        assert answer.status_code == 503
        assert "until its time of 0 s was over" in answer.json()["error"]["message"]
        # Regression: clients sent the heavy request twice more
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=2) as client:
            steps = len(served.runner.steps)
            with pytest.raises(openai.InternalServerError):
                client.completions.create(model="fake", **body)
            assert len(served.runner.steps) - steps < 40
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
            stream = client.completions.create(model="fake", stream=True, **body)
            with pytest.raises(openai.APIError, match="its time of"):
                list(stream)
        served.assert_idle()


def test_a_failed_step_fails_waiting_and_new_requests():
    class Breaking(FakeRunner):
        def run(self, plan):
            if len(self.steps) == 5:
                raise RuntimeError("rank 1 is gone")
            return super().run(plan)

    with FakeServer(Breaking()) as served:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
            how: Any = {"model": "fake", "prompt": going_on("b", 40), "max_tokens": 40, "temperature": 0}
            stream, seen = client.completions.create(**how, stream=True), []
            with pytest.raises(openai.APIError, match="rank 1 is gone"):
                seen.extend(chunk.choices[0].text for chunk in stream)
            # the fifth token was under way when the sixth step broke
            assert "".join(seen) == text_of(how["prompt"], 4)
            with pytest.raises(openai.InternalServerError, match="rank 1 is gone"):
                client.completions.create(**how)


def test_nan_logits_fail_only_their_request():
    class Poisoned(FakeRunner):
        def run(self, plan):
            logits = super().run(plan)
            for row, place in enumerate(plan.wanted):
                if plan.requests[place].prompt[0] == ord("!"):
                    logits[row] = float("nan")
            return logits

    with FakeServer(Poisoned(step_s=0.01)) as served:
        good = {"prompt": going_on("n", 30), "max_tokens": 30, "temperature": 0}
        with ThreadPoolExecutor(2) as threads:
            answers = list(
                threads.map(
                    lambda body: httpx.post(f"{served.url}/v1/completions", json=body), (good, {"prompt": "!bad"})
                )
            )
        assert [answer.status_code for answer in answers] == [200, 500]
        assert "are not numbers" in answers[1].json()["error"]["message"]
        assert answers[1].headers["x-should-retry"] == "false"
        assert answers[0].json()["choices"][0]["text"] == text_of(good["prompt"], 30)
        served.assert_idle()


# clients that go away


def test_pages_are_freed_when_a_client_closes_a_stream():
    with FakeServer(FakeRunner(pages=400, step_s=0.01)) as served:
        body = {"prompt": going_on("g", 600), "max_tokens": 600, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body) as stream:
            lines = stream.iter_lines()  # which closes the stream when it is let go of
            next(lines)
            served.state_when(lambda state: state["running"] == 1)
        state = served.state_when(lambda state: state["running"] == 0)
        assert len(served.runner.steps) < 600
        assert state["pages"]["free"] == [400, 400]


@pytest.mark.parametrize("stream", [False, True])
def test_pages_are_freed_when_a_client_disconnects_before_its_answer(stream):
    with FakeServer(FakeRunner(pages=400, step_s=0.05)) as served:
        body = json.dumps(
            {"prompt": going_on("h", 600), "max_tokens": 600, "temperature": 0, "stream": stream}
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            connection.sendall(head.encode() + body)
            served.state_when(lambda state: state["running"] == 1)
        state = served.state_when(lambda state: state["running"] == 0)
        assert len(served.runner.steps) < 600
        assert state["pages"]["free"] == [400, 400]


@pytest.mark.skipif(
    not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no limit for data that nobody takes"
)
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_never_reads_is_disconnected(monkeypatch, stream):
    """Regression: its connection stayed for ever."""

    def bind_with_a_small_buffer(host: str, port: int) -> socket.socket:
        bound = engine_server.bind(host, port)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return bound

    monkeypatch.setattr(engine_server, "UNREAD_S", 1.0)
    monkeypatch.setattr(serving, "bind", bind_with_a_small_buffer)
    with FakeServer(FakeRunner(pages=2000)) as served:
        body = json.dumps({"prompt": "a" * 6000, "echo": True, "n": 64, "max_tokens": 1, "stream": stream}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", served.port))
            client.sendall(f"{head}\r\n\r\n".encode() + body)
            wait_for(lambda: served.runner.steps and not served._http.server_state.connections)
        served.assert_idle()


def test_half_a_request_is_dropped_when_its_client_disconnects(served):
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        )
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(b"\x00\xff not http\r\n\r\n")
    assert httpx.get(f"{served.url}/health").status_code == 200


# keys and hosts


def test_all_paths_but_the_page_and_health_need_the_key():
    with FakeServer(FakeRunner(), api_key="sécret") as served:
        for path in ("/v1/models", "/state", "/metrics"):
            assert httpx.get(served.url + path).status_code == 401
            assert httpx.get(served.url + path, headers={"Authorization": "Bearer wrong"}).status_code == 401
            assert httpx.get(served.url + path, headers={b"Authorization": "Bearer sécret".encode()}).status_code == 200
        assert httpx.get(f"{served.url}/health").status_code == 200
        assert httpx.get(served.url).status_code == 200
        with (
            openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.completions.create(model="fake", prompt="a")


def test_requests_with_another_host_name_are_refused():
    with FakeServer(FakeRunner(), host="localhost") as served:
        assert httpx.get(f"{served.url}/v1/models").status_code == 200
        assert httpx.get(f"{served.url}/v1/models", headers={"Host": "localhost:80"}).status_code == 200
        assert httpx.get(f"{served.url}/v1/models", headers={"Host": "[::1]:80"}).status_code == 200
        refused = httpx.get(f"{served.url}/v1/models", headers={"Host": "evil.example"})
        assert refused.status_code == 403


def test_allowed_hosts_are_those_of_this_machine_and_of_the_flag():
    url = "{}/v1/models".format
    for hosts, host, status in (
        (("Chat.example",), "chat.example:443", 200),
        (("chat.example",), "localhost", 200),
        (("chat.example",), "evil.example", 403),
        (("*",), "evil.example", 200),
    ):
        with FakeServer(FakeRunner(), host="127.0.0.1", allowed_host=hosts) as served:
            assert httpx.get(url(served.url), headers={"Host": host}).status_code == status
    with FakeServer(FakeRunner(), host="0.0.0.0", allowed_host=("chat.example",)) as served:
        assert httpx.get(url(served.url), headers={"Host": "evil.example"}).status_code == 403


def test_pages_of_allowed_origins_may_use_the_server_and_see_its_refusals():
    origin = {"Origin": "https://chat.example"}
    asked = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    with FakeServer(FakeRunner(), api_key="secret", allowed_origin=("https://chat.example",)) as served:
        url = f"{served.url}/v1/chat/completions"
        assert httpx.options(url, headers=asked).headers["access-control-allow-origin"] == "https://chat.example"
        refused = httpx.post(url, headers=origin, json={})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://chat.example")
        assert httpx.options(url, headers=asked | {"Origin": "https://evil.example"}).status_code == 400
    with FakeServer(FakeRunner()) as served:
        assert "access-control-allow-origin" not in httpx.get(f"{served.url}/v1/models", headers=origin).headers


def test_a_path_of_a_proxy_is_there_whether_the_proxy_removes_it_or_not():
    with FakeServer(FakeRunner(), root_path="/llm", api_key="secret") as served:
        for root in ("", "/llm"):
            assert httpx.get(f"{served.url}{root}/health").status_code == 200
            assert httpx.get(f"{served.url}{root}/").status_code == 200
            assert httpx.get(f"{served.url}{root}/v1/models").status_code == 401
            key = {"Authorization": "Bearer secret"}
            assert httpx.get(f"{served.url}{root}/v1/models", headers=key).status_code == 200
        assert httpx.get(f"{served.url}/llm/llm/health").status_code == 401
        metrics = httpx.get(f"{served.url}/llm/metrics", headers=key).text
        assert 'ringattn_requests_total{path="/health",status="200"} 2.0' in metrics
    for root in ("llm", "/llm/"):
        with pytest.raises(ValueError, match="root_path"):
            ServeArgs("tiny", root_path=root)


def test_metrics_need_no_key_if_asked():
    with FakeServer(FakeRunner(), api_key="secret", metrics_key=False) as served:
        assert httpx.get(f"{served.url}/metrics").status_code == 200
        assert httpx.get(f"{served.url}/state").status_code == 401


@pytest.mark.parametrize("logs", [True, False])
def test_each_request_has_a_line_in_the_access_log(capfd, logs):
    with FakeServer(FakeRunner(), access_log=logs) as served:
        httpx.get(f"{served.url}/v1/models")
    assert ('"GET /v1/models HTTP/1.1" 200' in capfd.readouterr().out) == logs


# many at once


def test_two_hundred_at_once_get_their_answers_alone(served):
    prompts = [f"{'common prefix of many ' * (x % 3)}{x % 40} {'y' * (x * 7 % 90)}" for x in range(200)]
    ends: list[str] = []
    client = httpx.Client(base_url=served.url, limits=httpx.Limits(max_connections=200))

    def ask(x: int) -> None:
        body = {"prompt": prompts[x], "max_tokens": 1 + x % 23, "temperature": 0, "stream": x % 2 == 0}
        if x % 10 == 0:  # leaves in mid-stream
            with client.stream("POST", "/v1/completions", json=body) as stream:
                next(stream.iter_lines())
            ends.append("left")
            return
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        if body["stream"]:
            events = [event.removeprefix("data: ") for event in answer.text.split("\n\n")[:-2]]
            text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
        else:
            text = answer.json()["choices"][0]["text"]
        assert text == text_of(prompts[x], 1 + x % 23)
        ends.append("answered")

    with client, ThreadPoolExecutor(200) as threads:
        list(threads.map(ask, range(200)))
    assert sorted(set(ends)) == ["answered", "left"]
    assert len(ends) == 200
    served.assert_idle()


def read_all(connection: socket.socket) -> bytes:
    connection.settimeout(HANGS_S)
    data = b""
    while more := connection.recv(4096):
        data += more
    return data


def write_slowly(connection: socket.socket) -> None:
    for _ in range(20):
        connection.sendall(b"x")
        time.sleep(0.01)


ASK = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def test_one_connection_too_many_gets_503_and_a_closed_one_makes_room(monkeypatch):
    monkeypatch.setattr(connections, "FAREWELL_S", 1.0)
    with FakeServer(FakeRunner(step_s=0.05), connections=3) as served:
        place = ("127.0.0.1", served.port)
        body = {"prompt": going_on("many", 60), "max_tokens": 60, "temperature": 0, "stream": True}
        with httpx.Client(base_url=served.url) as client:
            # one that streams, two that say nothing
            with client.stream("POST", "/v1/completions", json=body) as stream:
                lines = stream.iter_lines()
                next(lines)
                silent = [socket.create_connection(place) for _ in range(2)]
                for said in [ASK * 100] * 4 + [b"", b"GET"]:
                    with socket.create_connection(place) as late:
                        late.sendall(said)
                        head, _, said = read_all(late).partition(b"\r\n\r\n")
                        assert head.startswith(b"HTTP/1.1 503 ")
                        assert json.loads(said)["error"]["message"].startswith("at most 3 connections may be open")
                silent.pop().close()
                wait_for(lambda: httpx.get(f"{served.url}/v1/models").status_code == 200)
                # the stream was not disturbed
                assert sum(line.startswith("data: ") for line in lines) >= 60
            silent.pop().close()
        served.assert_idle()


def test_all_of_many_connections_too_many_get_503():
    """Regression: beyond 64 at the same time, rejected clients got no answer."""
    with FakeServer(FakeRunner(), connections=10) as served:
        with contextlib.ExitStack() as stack:
            place = ("127.0.0.1", served.port)
            many = [stack.enter_context(socket.create_connection(place)) for _ in range(10 + 200)]
            for connection in many:
                connection.sendall(ASK)
            statuses: Counter[bytes] = Counter()
            for connection in many:
                connection.settimeout(HANGS_S)
                statuses[connection.recv(4096)[:12]] += 1
        assert statuses == {b"HTTP/1.1 200": 10, b"HTTP/1.1 503": 200}


def test_a_full_server_answers_health_and_nothing_after_it():
    with FakeServer(FakeRunner(), connections=2) as served, contextlib.ExitStack() as stack:
        place = ("127.0.0.1", served.port)
        # all places are taken, and more connections wait
        for _ in range(6):
            stack.enter_context(socket.create_connection(place))
        for pieces in ([HEALTH], [HEALTH + ASK * 10], [b"HEAD /health?x HTTP", b"/1.1\r\nHost: x\r\n\r\n"]):
            with socket.create_connection(place) as probe:
                for piece in pieces:
                    probe.sendall(piece)
                    time.sleep(0.01)
                said = read_all(probe)
                assert said.startswith(b"HTTP/1.1 200 ")
                assert said.count(b"HTTP/1.1 ") == 1
                assert b"\r\nConnection: close\r\n" in said
                assert said.endswith(b"\r\n\r\n" if pieces[0].startswith(b"HEAD") else b'{"status": "ok"}')


def test_a_full_server_answers_health_below_its_root_path_and_while_it_stops():
    with FakeServer(FakeRunner(step_s=0.1), connections=1, root_path="/llm") as served:
        place = ("127.0.0.1", served.port)
        body = {"prompt": going_on("s", 200), "max_tokens": 200, "temperature": 0, "stream": True}

        def status(path: bytes) -> bytes:
            with socket.create_connection(place) as probe:
                probe.sendall(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path)
                return read_all(probe)[9:12]

        with httpx.stream("POST", f"{served.url}/v1/completions", json=body) as stream:
            next(lines := stream.iter_lines())
            asked = [b"/llm/health", b"/health", b"/llm/llm/health", b"/other/health", b"/"]
            assert [status(path) for path in asked] == [b"200", b"200", b"503", b"503", b"503"]
            served.engine.stop(HANGS_S)
            next(lines)
            wait_for(lambda: status(b"/llm/health") == b"503")


def test_too_many_rejected_connections_close_the_oldest_first(monkeypatch):
    monkeypatch.setattr(connections, "MAX_CLOSING", 2)
    monkeypatch.setattr(connections, "FAREWELL_S", HANGS_S)
    with FakeServer(FakeRunner(), connections=1) as served:
        place = ("127.0.0.1", served.port)
        with socket.create_connection(place), contextlib.ExitStack() as stack:
            late = []
            for _ in range(4):
                late.append(stack.enter_context(socket.create_connection(place)))
                late[-1].settimeout(HANGS_S)
                late[-1].sendall(ASK)
                assert late[-1].recv(4096).startswith(b"HTTP/1.1 503 ")
            # closed on the server's side: what is sent is answered by a reset, after at most one more try
            with pytest.raises((BrokenPipeError, ConnectionResetError)):
                wait_for(lambda: write_slowly(late[0]))
            write_slowly(late[3])


BEGUN = {
    "nothing": b"",
    "a part of the first head": b"GET /health HTT",
    "a byte after an answer": HEALTH + b"G",
    "a part of a head after a refusal": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\nGET / HTTP/1.1\r\nX",
    "a body that never ends": b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nx",
}


@pytest.mark.parametrize("begun", BEGUN.values(), ids=BEGUN)
def test_a_connection_is_closed_when_its_next_head_does_not_come(monkeypatch, begun):
    """Regression: one byte after an answer kept a connection open without end."""
    monkeypatch.setattr(connections, "HEAD_S", 1.0)
    with FakeServer(FakeRunner(step_s=0.02)) as served:
        with socket.create_connection(("127.0.0.1", served.port)) as silent:
            for byte in begun.partition(b"\r\n\r\n"):
                silent.sendall(byte)
                time.sleep(0.05)
            body = {"prompt": going_on("long", 40), "max_tokens": 40, "temperature": 0}
            assert httpx.post(f"{served.url}/v1/completions", json=body).status_code == 200
            silent.settimeout(HANGS_S)
            with contextlib.suppress(ConnectionResetError):
                while silent.recv(4096):
                    pass
