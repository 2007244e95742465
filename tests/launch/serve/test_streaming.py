"""From steps to clients: a line is the JSON of its chunk, a stream gets one write per step, and no client delays another."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.launch.serve.config import ServeArgs
from ringattn.launch.serve.http import api, completions, engine_client
from ringattn.launch.serve.http.api import CompletionChoice, ResponseWriter
from ringattn.launch.serve.http.app import make_app
from ringattn.launch.serve.messages import Event, Settings, StepOutput, Stop
from ringattn.launch.serve.sampling import Logprob
from ringattn.launch.serve.tokenizer import REPLACEMENT, ByteTokenizer
from tests.support.serving import Letters, Link

# lines

letters = st.text(st.characters(codec="utf-8"), max_size=8)


@settings(deadline=None, max_examples=60)
@given(st.booleans(), st.booleans(), st.booleans(), st.booleans(), letters, st.lists(letters, max_size=6))
def test_a_line_is_the_json_of_its_chunk(chat, with_usage, with_ids, with_logprobs, model, words):
    class Said:
        """Each token is one of the words."""

        stops, vocab_size = frozenset([0]), len(words)

        def decode(self, tokens: Sequence[int]) -> str:
            return "".join(words[token] for token in tokens)

        def token_bytes(self, token: int) -> None:
            return None

    tokenizer: Any = Said()
    choice = CompletionChoice(3, [], tokenizer, [])
    choices = [choice]
    lines = ResponseWriter(chat, model, tokenizer, [[]], choices, with_usage=with_usage, with_ids=with_ids)
    said, offset = "", 0
    for token, word in enumerate(words):
        before, held = said, choice.length
        details = Logprob(-0.25 if token else float("-inf"), ((token, -0.25),)) if with_logprobs else None
        assert not lines.push(0, Event(7, token, details=details))
        sent = [json.loads(one.removeprefix(b"data: ")) for one in lines.take().split(b"\n\n")[:-1]]
        piece = choice.text[held:]
        said = before + piece
        if chat and not token:
            assert sent.pop(0)["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        if not (piece or with_ids or with_logprobs):
            assert sent == []
            continue
        (chunk,) = sent
        common = {"id": chunk["id"], "created": chunk["created"], "model": model}
        common["object"] = "chat.completion.chunk" if chat else "text_completion"
        body: dict[str, Any] = {"delta": {"content": piece}} if chat else {"text": piece}
        body |= {"token_ids": [token]} if with_ids else {}
        value = -0.25 if token else -9999.0
        logprobs: Any = None
        if with_logprobs and chat:
            entry = {"token": word, "logprob": value, "bytes": None if REPLACEMENT in word else list(word.encode())}
            logprobs = {"content": [{**entry, "top_logprobs": [{**entry, "logprob": -0.25}]}], "refusal": None}
        elif with_logprobs:
            logprobs = {"tokens": [word], "token_logprobs": [value], "top_logprobs": [{word: -0.25}]}
            logprobs["text_offset"] = [offset]
        offset = choice.length
        made = {**common, "choices": [{"index": 3, **body, "logprobs": logprobs, "finish_reason": None}]}
        assert chunk == (made | {"usage": None} if with_usage else made)


def test_tokens_of_a_part_of_a_character_have_their_bytes():
    """Regression: they had none, and all shared one key of `top_logprobs`."""
    choice = CompletionChoice(0, [], ByteTokenizer(), [])
    for token in "aß".encode():
        choice.push(Event(1, token, details=Logprob(-0.5, ((token, -0.5),))))
    (answer,) = json.loads(ResponseWriter(True, "bytes", ByteTokenizer(), [[1]], [choice]).whole())["choices"]
    said = answer["logprobs"]["content"]
    assert [(entry["token"], entry["bytes"]) for entry in said] == [
        ("a", [97]),
        (r"bytes:\xc3", [0xC3]),
        (r"bytes:\x9f", [0x9F]),
    ]
    assert [entry["top_logprobs"][0]["bytes"] for entry in said] == [[97], [0xC3], [0x9F]]
    assert bytes(byte for entry in said for byte in entry["bytes"]).decode() == "aß"


def test_of_tokens_with_one_text_the_likeliest_is_reported():
    tokenizer = ByteTokenizer(300)  # tokens above 256 have no text
    choice = CompletionChoice(0, [], tokenizer, [])
    top = ((0xC3, -0.1), (0x61, -3.0), (0xE2, -5.0), (270, -6.0), (271, -7.0))
    choice.push(Event(1, 0xC3, details=Logprob(-0.1, top)))
    (answer,) = json.loads(ResponseWriter(False, "bytes", tokenizer, [[1]], [choice]).whole())["choices"]
    wanted = [(r"bytes:\xc3", -0.1), ("a", -3.0), (r"bytes:\xe2", -5.0), ("", -6.0)]
    assert list(answer["logprobs"]["top_logprobs"][0].items()) == wanted


@pytest.mark.parametrize("chat", [False, True])
def test_logprobs_are_encoded_as_they_come_and_not_at_the_end(monkeypatch, chat):
    """Regression: the end of 128 answers of 500 tokens with 20 logprobs each stopped the event loop for seconds."""
    choices = [CompletionChoice(place, [97, 98], ByteTokenizer(), [], score_prompt=not chat) for place in range(2)]
    writer = ResponseWriter(chat, "bytes", ByteTokenizer(), [[97, 98]], choices)
    logprob = Logprob(-0.5, ((99, -0.5), (100, -1.0)))
    for place in range(2):
        if not chat:
            writer.record(place, Event(1, scores=(logprob,)))
        for _ in range(3):
            writer.record(place, Event(1, 99, details=logprob))
    monkeypatch.setattr(api, "text_alone", lambda *_: pytest.fail("a logprob is encoded at the end"))
    for answer in json.loads(writer.whole())["choices"]:
        if chat:
            assert [len(entry["top_logprobs"]) for entry in answer["logprobs"]["content"]] == [2] * 3
        else:
            assert answer["logprobs"]["tokens"] == list("abccc")
            assert answer["logprobs"]["text_offset"] == [0, 1, 0, 1, 2]


# steps


class Steps:
    """The app with clients in this process, and an engine whose steps are made by hand."""

    def __init__(self, tokenizer: Any = None) -> None:
        self.link = Link()
        args, state = ServeArgs("fake", host="0.0.0.0", keep_prefixes=False), {"closed": None}
        self.client = self.link.client(args.max_requests, state)
        tokenizer = Letters() if tokenizer is None else tokenizer
        self.app = make_app(self.client, tokenizer, Settings("fake", {}, args, 10**6, state))

    async def ask(self, send: Callable[[Any], Awaitable[None]], **body: Any) -> tuple[asyncio.Task[None], list[int]]:
        """Start a request; return its task and the ids of its requests once they are submitted."""
        data = json.dumps({"prompt": "abc", "max_tokens": 500, **body}).encode()
        asked = iter([{"type": "http.request", "body": data, "more_body": False}])
        over = asyncio.Event()

        async def receive() -> Any:
            for one in asked:
                return one
            await over.wait()
            return {"type": "http.disconnect"}

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions"}
        scope |= {"headers": [(b"content-type", b"application/json")], "query_string": b"", "root_path": ""}
        scope |= {"http_version": "1.1", "scheme": "http", "server": ("here", 1), "client": ("here", 2)}
        known = set(self.client._callbacks)
        task = asyncio.ensure_future(self.app(scope, receive, send))
        while not (names := sorted(set(self.client._callbacks) - known)):
            await asyncio.sleep(0.001)
        return task, names

    def step(self, *events: Event) -> None:
        self.client.handle(StepOutput(list(events)))

    def run(self, what: Callable[[], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            await self.client.open()
            try:
                return await what()
            finally:
                self.client.close()

        with contextlib.closing(self.link):
            return asyncio.run(asyncio.wait_for(run(), 20))


def collected() -> tuple[list[Any], Callable[[Any], Awaitable[None]]]:
    """Messages of an answer, and the function that sends them."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    return sent, send


def body_of(sent: list[Any]) -> list[bytes]:
    return [one["body"] for one in sent if one["type"] == "http.response.body"]


def texts_of(data: bytes, index: int = 0) -> str:
    chunks = [json.loads(one.removeprefix(b"data: ")) for one in data.split(b"\n\n") if one.startswith(b"data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("choices", [1, 4])
def test_a_step_is_one_write_of_a_stream_and_the_last_brings_the_end(choices):
    steps = Steps()

    async def what() -> list[bytes]:
        sent, send = collected()

        task, names = await steps.ask(send, stream=True, n=choices, stream_options={"include_usage": True})
        for x in range(6):
            assert len(body_of(sent)) == x
            steps.step(*(Event(name, ord("a") + x, "length" if x == 5 else None) for name in names))
            await turns()
        await task
        return body_of(sent)

    bodies = steps.run(what)
    assert len(bodies) == 6
    assert all(body.count(b"data: ") == choices for body in bodies[:5])
    assert bodies[5].count(b'"finish_reason":"length"') == choices
    assert bodies[5].endswith(b"data: [DONE]\n\n")
    assert [texts_of(b"".join(bodies), index) for index in range(choices)] == ["abcdef"] * choices


def test_a_stream_begins_before_its_first_token_and_is_never_silent(monkeypatch):
    """Regression: proxies cut off streams whose prompt took a minute."""
    monkeypatch.setattr(engine_client, "KEEP_ALIVE_S", 0.05)
    monkeypatch.setattr(completions, "KEEP_ALIVE_S", 0.05)
    steps = Steps()

    async def what() -> tuple[list[Any], list[bytes]]:
        sent, send = collected()
        task, (name,) = await steps.ask(send, stream=True)
        await turns()
        begun = list(sent)
        await asyncio.sleep(0.3)
        silent = body_of(sent)
        steps.step(Event(name, 97, "length"))
        await task
        return begun, [*silent, b"", *body_of(sent)[len(silent) :]]

    begun, bodies = steps.run(what)
    assert [(one["type"], one["status"]) for one in begun] == [("http.response.start", 200)]
    assert set(bodies[: bodies.index(b"")]) == {b": keep-alive\n\n"}
    assert 1 <= bodies.index(b"") <= 6
    assert texts_of(b"".join(bodies)) == "a"


def test_a_failure_before_the_first_token_is_an_event_of_its_stream():
    steps = Steps()

    async def what() -> list[Any]:
        sent, send = collected()
        task, (name,) = await steps.ask(send, stream=True)
        await turns()
        steps.step(Event(name, failure=(500, "no numbers", "not_finite")))
        await task
        return sent

    start, end = steps.run(what)
    assert start["status"] == 200
    error = json.loads(end["body"].removeprefix(b"data: "))["error"]
    assert (error["message"], error["code"]) == ("no numbers", "not_finite")
    assert not end.get("more_body")


def test_a_client_that_does_not_read_gets_all_later_and_delays_no_other():
    steps = Steps()

    async def what() -> tuple[list[Any], list[Any]]:
        reads, slow = asyncio.Event(), []
        quick, send = collected()

        async def send_slow(message: Any) -> None:
            slow.append(message)
            if len(slow) > 2:
                await reads.wait()

        one, (stuck,) = await steps.ask(send_slow, stream=True)
        other, (going,) = await steps.ask(send, stream=True)
        for x in range(500):
            last = "length" if x == 499 else None
            steps.step(Event(stuck, 97 + x % 26, last), Event(going, 97 + x % 26, last))
            await turns()
        await other
        assert not one.done()
        assert len(body_of(slow)) == 2  # the third write has not begun
        reads.set()
        await one
        return slow, quick

    slow, quick = steps.run(what)
    wanted = "".join(chr(97 + x % 26) for x in range(500))
    assert texts_of(b"".join(body_of(slow))) == texts_of(b"".join(body_of(quick))) == wanted
    assert len(body_of(slow)) == 3
    assert len(body_of(quick)) == 500


def test_an_exception_of_the_tokenizer_fails_only_its_answer():
    class Breaking(Letters):
        def decode(self, tokens: Sequence[int]) -> str:
            if 33 in tokens:
                raise KeyError("no such token")
            return super().decode(tokens)

    steps = Steps(Breaking())

    async def what() -> tuple[BaseException | None, bytes]:
        good, send = collected()

        async def nobody(_: Any) -> None:
            pass

        broken, (bad,) = await steps.ask(nobody, stream=True)
        other, (name,) = await steps.ask(send, stream=True)
        for token in (40, 33, 41):
            steps.step(Event(bad, token), Event(name, 65))
            await turns()
        steps.step(Event(name, 66, "stop"))
        await other
        await asyncio.wait([broken])
        return broken.exception(), b"".join(body_of(good))

    error, said = steps.run(what)
    assert isinstance(error, KeyError)
    assert texts_of(said) == "AAAB"


def test_an_answer_ended_by_a_stop_string_is_cancelled_once():
    steps = Steps()

    async def what() -> tuple[list[Any], str]:
        sent, send = collected()

        task, (name, other) = await steps.ask(send, stream=True, n=2, stop=["bc"])
        said: list[Any] = []
        steps.client.cancel = lambda *what, **how: said.append((what, how))
        # all of it in one turn, as when this process was behind
        steps.step(*(Event(name, token) for token in b"abcdef"), *(Event(other, token) for token in b"xyz"))
        steps.step(Event(name, 103, "length"), Event(other, 33, "length"))
        await task
        data = b"".join(body_of(sent))
        assert said == [((name,), {"keep": True})]
        return [texts_of(data, index) for index in (0, 1)], data.decode()

    texts, data = steps.run(what)
    assert texts == ["a", "xyz!"]
    assert data.count('"finish_reason":"stop"') == data.count('"finish_reason":"length"') == 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_ended_before_the_engine_did_is_no_error(stream):
    steps = Steps()

    async def what() -> list[Any]:
        sent, send = collected()

        task, (name,) = await steps.ask(send, stream=stream)
        steps.step(Event(name, 97))
        await turns()
        steps.step(Event(name, 98, "length"), Event(name, 99, "length"))
        steps.client.handle(Stop())
        await task
        return sent

    sent = steps.run(what)
    assert sent[0]["status"] == 200
    data = b"".join(body_of(sent))
    assert b"error" not in data
    assert (texts_of(data) if stream else json.loads(data)["choices"][0]["text"]) == "ab"
