"""Formats of answers and calls of tools over HTTP: what grammars allow, who waits for them, and what is refused."""

from __future__ import annotations

import itertools
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from torch import Tensor

from ringattn.launch.serve import scheduler
from ringattn.launch.serve.config import ServeArgs
from ringattn.launch.serve.grammar import NEEDED, Grammar, GrammarCompiler, GrammarError, TokenGrammar
from ringattn.launch.serve.http.api import Chat
from ringattn.launch.serve.http.chat_format import chat_format
from ringattn.launch.serve.model_runner import ModelRunner
from ringattn.launch.serve.models import load_model, make_cache
from ringattn.launch.serve.sampling import mask_
from ringattn.launch.serve.tokenizer import PretrainedTokenizer
from ringattn.ring import Ring
from tests.launch.serve.test_http import going_on, read_chunks
from tests.launch.serve.test_models import CONFIG, _tokenizer
from tests.support.serving import STOP, VOCAB, FakeRunner, FakeServer, Letters
from tests.support.timing import wait_for

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "bb"]},
        "size": {"type": "integer", "minimum": -5, "maximum": 99},
        "flags": {"type": "array", "items": {"$ref": "#/$defs/flag"}, "minItems": 1, "maxItems": 3},
        "name": {"type": "string", "maxLength": 8},
    },
    "required": ["kind", "size", "flags"],
    "additionalProperties": False,
    "$defs": {"flag": {"type": "boolean"}},
}


def assert_valid(text: str) -> None:
    """Assert that a text is JSON of SCHEMA."""
    found = json.loads(text)
    assert {"kind", "size", "flags"} <= found.keys() <= SCHEMA["properties"].keys()
    assert found["kind"] in ("a", "bb")
    assert type(found["size"]) is int
    assert -5 <= found["size"] <= 99
    assert 1 <= len(found["flags"]) <= 3
    assert all(type(flag) is bool for flag in found["flags"])
    assert len(found.get("name", "")) <= 8


class Noise(FakeRunner):
    """Runner whose logits are noise: what its answers have in common is their grammar."""

    def run(self, plan: Any) -> Tensor:
        logits = torch.randn(super().run(plan).shape[0], VOCAB)
        logits[:, [*b" \t\r\n"]] -= 2  # which may stand nearly everywhere in JSON
        return logits


class Script(FakeRunner):
    """Runner whose answers are one text."""

    def __init__(self, answer: list[int]) -> None:
        super().__init__(pages=1000)
        self.answer = answer

    def run(self, plan: Any) -> Tensor:
        rows, logits = super().run(plan), torch.zeros(len(plan.wanted), VOCAB)
        for row, place in zip(range(len(rows)), plan.wanted, strict=True):
            request = plan.requests[place]
            at = self.allocator.length(plan.cache_ids[place]) - len(request.prompt)
            logits[row, self.answer[at] if at < len(self.answer) else STOP] = 10.0
        return logits


class Marked(Letters):
    """Letters with special tokens, and a template that reads tools."""

    added_texts: Mapping[int, str] = dict(
        enumerate(("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<t>"), 1)
    )
    template = "tools"

    def decode(self, tokens: Any) -> str:
        return super().decode([token for token in tokens if token not in self.added_texts])

    def token_bytes(self, token: int) -> bytes | None:
        return None if token in self.added_texts else super().token_bytes(token)

    def tokens(self, text: str) -> list[int]:
        """Tokens of a text with those of special tokens."""
        ids = {mark: token for token, mark in self.added_texts.items()}
        return [
            token
            for part in re.split("(" + "|".join(map(re.escape, ids)) + ")", text)
            for token in ([ids[part]] if part in ids else self.encode(part))
        ]


def function(name: str, parameters: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    told = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **told, **more}}


TOOLS = [function("look", SCHEMA), function("stop", {"type": "object", "additionalProperties": False})]
MESSAGES = [{"role": "user", "content": "x"}]


def post(served: FakeServer, path: str = "chat/completions", **body: Any) -> httpx.Response:
    asked = {"messages": MESSAGES} if path == "chat/completions" else {"prompt": "x"}
    body = {**asked, "max_tokens": 900, **body}
    return httpx.post(f"{served.url}/v1/{path}", json=body)


@pytest.fixture(scope="module", params=[True, False], ids=["ahead", "in turn"])
def noise(request: pytest.FixtureRequest) -> Iterator[FakeServer]:
    runner = Noise(pages=4000, ahead=request.param)
    with FakeServer(runner, tokenizer=Marked(), tool_format="hermes") as served:
        yield served
        served.assert_idle()


# formats

ROWS = "start: row+\nrow: /[a-c]/ row? /[x-z]/"
FORMATS: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}}, assert_valid),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, assert_valid),
    ({"structured_outputs": {"choice": ["red", 'a "b"', "grün"]}}, lambda x: ["red", 'a "b"', "grün"].index(x)),
    ({"structured_outputs": {"regex": "[0-9]{3}/[a-c]{1,5}"}}, lambda x: re.fullmatch("[0-9]{3}/[a-c]{1,5}", x)[0]),  # type: ignore[index]
    ({"structured_outputs": {"grammar": 'root ::= "a" [0-9] "c"'}}, lambda x: re.fullmatch("a[0-9]c", x)[0]),  # type: ignore[index]
]


@pytest.mark.parametrize(("options", "check"), FORMATS, ids=[str(options)[:40] for options, _ in FORMATS])
def test_answers_follow_their_format_whatever_the_model_would_say(noise, options, check):
    path = "chat/completions" if noise.runner.ahead else "completions"
    found = post(noise, path, **options, n=3)
    assert found.status_code == 200, found.text
    for choice in found.json()["choices"]:
        assert choice["finish_reason"] == "stop"
        check(choice["message"]["content"] if "chat" in path else choice["text"])
    parts = read_chunks(post(noise, path, **options, stream=True))
    check("".join((part["delta"].get("content") or "") if "chat" in path else part["text"] for part in parts))


def test_any_object_is_json(noise):
    found = post(noise, response_format={"type": "json_object"}, logit_bias={str(b'"'[0]): 9, str(b"}"[0]): 9})
    choice = found.json()["choices"][0]
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    else:
        assert choice["message"]["content"].lstrip()[0] == "{"


def test_a_model_with_random_weights_and_many_tokens_writes_json_of_its_schema(tmp_path: Path):
    """Tokens of several letters, at every temperature; two formats and an answer without one share steps."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = tmp_path / "random"
    torch.manual_seed(1)
    config = AutoConfig.for_model("qwen3", vocab_size=len(_tokenizer()) + 5, eos_token_id=[0, 7], **CONFIG)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    _tokenizer().save_pretrained(path)
    model = load_model(ServeArgs(str(path)), torch.device("cpu"))
    cache = make_cache(model.model, Ring(), gib=0.004, page_size=4, kv_dtype="auto")
    runner: Any = ModelRunner(model.model, cache, 8, False)
    with FakeServer(runner, tokenizer=model.tokenizer, length=512) as served, ThreadPoolExecutor(8) as threads:
        asked = {"messages": MESSAGES, "max_tokens": 400}
        structured = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
        decode = model.tokenizer.decode
        asked["logit_bias"] = {str(x): -20 for x in range(len(_tokenizer())) if not decode([x]).strip()}  # to be quick
        bodies = [{**asked, **structured, "temperature": t, "seed": seed} for t, seed in ((0.5, 0), (2, 1))]
        bodies += [{**asked, "structured_outputs": {"choice": ["the ring", "straße"]}}]
        bodies += [{"messages": MESSAGES, "max_tokens": 30, "ignore_eos": True}]
        url = f"{served.url}/v1/chat/completions"
        answers = list(threads.map(lambda body: httpx.post(url, json=body).json(), bodies))
    texts = [one["choices"][0]["message"]["content"] for one in answers]
    for text in texts[:2]:
        assert_valid(text)
    assert texts[2] in ("the ring", "straße")
    assert answers[3]["usage"]["completion_tokens"] == 30


# who waits


def test_a_slow_grammar_delays_no_other_answer(monkeypatch):
    """Others get all their tokens while the mask of its next token is computed."""
    go_on, waits = threading.Event(), threading.Event()
    advance = TokenGrammar.advance

    def blocked(self: TokenGrammar, token: int) -> None:
        waits.set()
        assert go_on.wait(60)
        advance(self, token)

    monkeypatch.setattr(TokenGrammar, "advance", blocked)
    with FakeServer(FakeRunner(pages=1000)) as served, ThreadPoolExecutor(1) as threads:
        try:
            slow = threads.submit(post, served, structured_outputs={"choice": ["red", "blue"]})
            assert waits.wait(60)
            beside = post(served, "completions", prompt=going_on("n", 50), max_tokens=50, temperature=0)
            assert beside.json()["usage"]["completion_tokens"] == 50
            assert not slow.done()
        finally:
            go_on.set()
        assert slow.result().json()["choices"][0]["message"]["content"] in ("red", "blue")
        served.assert_idle()


def test_an_answer_with_a_grammar_keeps_the_server_until_its_end(monkeypatch):
    """A server that is told to stop waits for it even while only its mask is computed."""
    begun, advance = threading.Event(), TokenGrammar.advance

    def slow(self: TokenGrammar, token: int) -> None:
        begun.set()
        time.sleep(0.02)
        advance(self, token)

    monkeypatch.setattr(TokenGrammar, "advance", slow)
    with FakeServer(FakeRunner(pages=1000)) as served, ThreadPoolExecutor(1) as threads:
        found = threads.submit(post, served, structured_outputs={"choice": ["some longer text"]})
        assert begun.wait(60)
        served.engine.stop(60.0)
        assert found.result().json()["choices"][0]["message"]["content"] == "some longer text"


def test_preempted_answers_with_grammars_go_on(monkeypatch):
    """Pages for two and a half answers are shared by six; each is written by its grammar to the end."""
    monkeypatch.setattr(scheduler, "HEADROOM", 0)
    texts = [f"answer {place} that is long enough to fill some pages" for place in range(6)]
    with FakeServer(FakeRunner(pages=20, step_s=0.01)) as served, ThreadPoolExecutor(6) as threads:
        found = threads.map(lambda text: post(served, max_tokens=60, structured_outputs={"choice": [text]}), texts)
        assert [one.json()["choices"][0]["message"]["content"] for one in found] == texts
        assert served.engine.scheduler.preemptions > 0
        served.assert_idle()


def test_a_grammar_that_becomes_too_complex_fails_its_answer_alone(monkeypatch):
    counts, advance = itertools.count(), TokenGrammar.advance

    def limited(self: TokenGrammar, token: int) -> None:
        if next(counts) == 3:
            raise GrammarError("too many items")
        advance(self, token)

    monkeypatch.setattr(TokenGrammar, "advance", limited)
    with FakeServer(FakeRunner(pages=1000)) as served:
        failed = post(served, structured_outputs={"choice": ["some longer text"]})
        assert failed.status_code == 400
        assert "within its limits, got too many items; ask for a simpler one" in failed.text
        assert failed.json()["error"]["code"] == "invalid_grammar"
        served.assert_idle()
        assert post(served, structured_outputs={"choice": ["some"]}).json()["choices"][0]["finish_reason"] == "stop"


def test_a_request_that_is_cancelled_while_its_grammar_compiles_is_never_computed(monkeypatch):
    begun, go_on, compile_ = threading.Event(), threading.Event(), GrammarCompiler.compile
    names: list[str] = []

    def blocked(self: GrammarCompiler, text: str) -> TokenGrammar:
        names.append(threading.current_thread().name)
        if len(names) == 2:  # the first is the HTTP process
            begun.set()
            assert go_on.wait(60)
        return compile_(self, text)

    monkeypatch.setattr(GrammarCompiler, "compile", blocked)
    with FakeServer(FakeRunner(pages=1000)) as served:
        try:
            body = {"messages": MESSAGES, "structured_outputs": {"choice": ["a"]}}
            data = json.dumps(body).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
            with socket.create_connection(("127.0.0.1", served.port)) as client:
                client.sendall(f"{head}\r\n\r\n".encode() + data)
                assert begun.wait(60)
            wait_for(lambda: not served.engine_server._compiling, lambda: "the cancellation has not come")
        finally:
            go_on.set()
        post(served, structured_outputs={"choice": ["b"]})  # after it
        assert served.state_when(lambda state: not state["running"])["totals"]["admitted"] == 1


# refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"structured_outputs": {"regex": "[0-9"}}, "invalid regex"),
        ({"structured_outputs": {"json": {"type": "objet"}}}, "Invalid type: objet"),
        ({"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        ({"structured_outputs": {"json": "{"}}, "json must be a schema, or its JSON, got: EOF while"),
        ({"structured_outputs": {"grammar": "start: foo"}}, "unknown name"),
        ({"structured_outputs": {"grammar": "root ::= ("}}, "must compile"),
        ({"structured_outputs": {"regex": "x" * 2**17}}, "must have at most 131072 bytes"),
        (
            {"structured_outputs": {"json": {"properties": {f"p{i}": {"type": "null"} for i in range(5000)}}}},
            "must compile, got: ",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "z"}}}, "must name one of tools"),
        ({"tools": [TOOLS[0]] * 2}, "tools must have different names, got 'look' twice"),
        ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "ignore_eos must be left out"),
        ({"tools": [function("f", strict=True)], "min_tokens": 5}, "min_tokens must be left out"),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format must be left out where tool_choice requires a call",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "["}}]}
                ]
            },
            "arguments of a call must be a JSON object, got [",
        ),
    ],
)
def test_formats_that_can_not_be_followed_get_a_400_in_bounded_time(noise, options, message):
    found = post(noise, **options)  # which waits for HANGS_S at most
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert message in error["message"]
    assert error["param"] in options
    noise.assert_idle()


def test_a_server_without_llguidance_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with FakeServer(FakeRunner(pages=1000), tokenizer=Marked(), tool_format="hermes") as served:
        refused: list[dict[str, Any]] = [
            {"structured_outputs": {"regex": "a"}},
            {"tools": TOOLS, "tool_choice": "required"},
        ]
        for options in refused:
            found = post(served, **options)
            assert found.status_code == 400
            assert NEEDED in found.json()["error"]["message"]
        assert post(served, tools=TOOLS, max_tokens=3).status_code == 200


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/load_lora_adapter", "/v1/responses"])
def test_services_of_other_servers_are_refused_with_what_to_do(noise, path):
    found = httpx.post(f"{noise.url}{path}", json={"input": "x"})
    assert found.status_code == 400
    assert re.search(f"{path}: .*; (use|start|send) ", found.json()["error"]["message"])


# tools


def calls_of(choice: dict[str, Any]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in choice["message"]["tool_calls"]]


@pytest.mark.parametrize("tool_format", ["hermes", "qwen3_coder", "glm45", "llama", "harmony"])
def test_required_calls_are_calls_of_the_tools_whatever_the_model_would_say(tool_format):
    """The parser of a format reads what its grammar writes."""
    no_thoughts = {"2": -100} if tool_format != "harmony" else {"5": 100, "4": 5}
    with FakeServer(Noise(pages=8000), tokenizer=Marked(), tool_format=tool_format) as served:
        options: dict[str, Any] = {"tools": TOOLS, "logit_bias": no_thoughts, "n": 4, "max_tokens": 2500}
        for choice in post(served, **options, tool_choice="required").json()["choices"]:
            assert choice["finish_reason"] == "tool_calls", choice
            assert choice["message"]["content"] is None
            for name, arguments in calls_of(choice):
                assert_valid(arguments) if name == "look" else json.loads(arguments)
        named = {"type": "function", "function": {"name": "look"}}
        for choice in post(served, **options, tool_choice=named).json()["choices"]:
            [(name, arguments)] = calls_of(choice)
            assert name == "look"
            assert_valid(arguments)
        one = post(served, **options, tool_choice="required", parallel_tool_calls=False).json()["choices"]
        assert {len(calls_of(choice)) for choice in one} == {1}
        served.assert_idle()


XML_TOOL = function(
    "write",
    {
        "type": "object",
        "properties": {
            "text": {"type": "string", "minLength": 2, "maxLength": 4},
            "kind": {"$ref": "#/$defs/kind"},
            "maybe": {"anyOf": [{"enum": ["x/y", 'a"\n']}, {"type": "null"}]},
            "size": {"type": "integer", "minimum": 3, "maximum": 5},
        },
        "required": ["text", "maybe"],
        "$defs": {"kind": {"type": "array", "items": {"$ref": "#/$defs/one"}, "maxItems": 2}, "one": {"type": "null"}},
    },
    strict=True,
)


class GlmTokens(Marked):
    """The tags of a form of XML are special tokens."""

    added_texts: Mapping[int, str] = dict(
        enumerate(("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"), 1)
    )


@pytest.mark.parametrize("tool_format", ["qwen3_coder", "glm45"])
def test_grammars_of_xml_follow_schemas_of_texts_without_quotes(tool_format):
    with FakeServer(Noise(pages=8000), tokenizer=Marked(), tool_format=tool_format) as served:
        choices = post(served, tools=[XML_TOOL], tool_choice="required", n=8, max_tokens=3000, seed=1).json()["choices"]
        for choice in choices:
            for name, text in calls_of(choice):
                found = json.loads(text)
                assert (name, {"text", "maybe"} <= found.keys() <= {"text", "kind", "maybe", "size"}) == ("write", True)
                assert 2 <= len(found["text"]) <= 4
                assert found["maybe"] in ("x/y", 'a"\n', None)
                assert found.get("size", 3) in (3, 4, 5)
                assert found.get("kind", []) in ([], [None], [None, None])
        free = function("any", {"type": "object"})
        [choice] = post(served, tools=[free], tool_choice="required", max_tokens=150, seed=2).json()["choices"]
        assert calls_of(choice)[0][0] == "any"
        refused: list[tuple[dict[str, Any], str]] = [
            (
                {"s": {"type": "string", "pattern": "^a"}},
                "strict must be left out of f, whose calls are XML, for pattern of s",
            ),
            ({"s": {"type": ["string", "object"]}}, "for type object beside string of s"),
            ({"a<b": {"type": "integer"}}, "parameters of f must have names without spaces around them"),
        ]
        for properties, message in refused:
            found = post(served, tools=[function("f", {"properties": properties}, strict=True)])
            assert found.status_code == 400
            assert message in found.json()["error"]["message"]
        served.assert_idle()


def test_tags_that_are_special_tokens_are_these_tokens_in_grammars_and_answers():
    tokenizer = GlmTokens()
    script = "<tool_call>write<arg_key>text</arg_key><arg_value>a<b</arg_value>"
    script += "<arg_key>maybe</arg_key><arg_value>x/y</arg_value></tool_call>"
    with FakeServer(Script(tokenizer.tokens(script)), tokenizer=tokenizer, tool_format="glm45") as served:
        for choice in ("auto", "required"):
            [found] = post(served, tools=[XML_TOOL], tool_choice=choice, temperature=0).json()["choices"]
            assert calls_of(found) == [("write", '{"text": "a<b", "maybe": "x/y"}')]


def test_marks_that_a_vocabulary_adds_are_tokens_of_grammars_special_or_not(tmp_path: Path):
    """As `<tool_call>` and `<think>` of Qwen, which are not special."""
    tokenizer = _tokenizer()
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    tokenizer.save_pretrained(tmp_path)
    served = PretrainedTokenizer(tmp_path, frozenset(), len(tokenizer))
    body = Chat.model_validate({"messages": MESSAGES, "tools": [function("stop")], "tool_choice": "required"})
    form = chat_format(ServeArgs("tiny", tool_format="hermes"), served)
    grammar = form.grammar(body, False)
    assert grammar is not None
    state = GrammarCompiler(served).compile(grammar.text())
    call = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    tokens = served.encode(f"<think>so</think>\n\n{call}\n{call}")
    assert set(tokens) >= set(range(len(tokenizer) - 4, len(tokenizer)))
    for token in tokens:
        assert state.mask[token // 8] >> token % 8 & 1, served.decode([token])
        state.advance(token)


def test_formats_need_not_have_a_model_with_the_tokens_of_its_tokenizer(tmp_path: Path):
    """A padding token may be added to the tokenizer alone, and a model may have rows, and ends, that no text has."""
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(tmp_path)
    r, end, size = tokenizer.convert_tokens_to_ids("r"), tokenizer.eos_token_id, len(tokenizer)
    for vocab, stops in ((size - 9, [end]), (size + 9, [end, size + 3])):
        served = PretrainedTokenizer(tmp_path, frozenset(stops), vocab)
        state = GrammarCompiler(served).compile(Grammar(['start: "r"']).text())
        logits = torch.zeros(2, vocab)
        mask_(logits, torch.tensor([0]), state.mask[None])
        state.advance(r)
        mask_(logits, torch.tensor([1]), state.mask[None])
        assert logits.isfinite().nonzero()[:, 1].tolist() == [r, end]


CALLS = {
    "qwen3_coder": "I look.\n<tool_call>\n<function=look>\n<parameter=size>\n1\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=stop>\n</function>\n</tool_call>",
    "glm45": "I look.\n<tool_call>look\n<arg_key>size</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n"
    "<tool_call>stop\n</tool_call>",
    "hermes": 'I look.\n<tool_call>\n{"name": "look", "arguments": {"size": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
    "llama": '{"name": "look", "parameters": {"size": 1}}; {"name": "stop", "parameters": {}}',
    "harmony": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"size": 1}',
}


@pytest.mark.parametrize("tool_format", list(CALLS))
def test_clients_of_openai_get_calls_at_once_and_in_streams(tool_format):
    tokenizer = Marked()
    wanted = [("look", '{"size": 1}'), ("stop", "{}")][: 1 if tool_format == "harmony" else 2]
    said = None if tool_format == "llama" else "I look."
    with (
        FakeServer(
            Script(tokenizer.tokens(CALLS[tool_format])), tokenizer=tokenizer, tool_format=tool_format
        ) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
    ):
        asked: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "tools": TOOLS, "temperature": 0}
        whole = client.chat.completions.create(**asked, max_tokens=500).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content == said
        assert getattr(whole.message, "reasoning_content", None) == ("hm" if tool_format == "harmony" else None)
        assert [(one.function.name, one.function.arguments) for one in whole.message.tool_calls] == wanted
        with client.chat.completions.stream(**asked, max_tokens=500) as stream:
            streamed = stream.get_final_completion().choices[0]
        assert (streamed.finish_reason, streamed.message.content or None) == ("tool_calls", said)
        assert [(one.function.name, one.function.arguments) for one in streamed.message.tool_calls or ()] == wanted
        # the answer and the results are sent back
        told = [whole.message.model_dump(exclude_none=True)]
        told += [{"role": "tool", "tool_call_id": one.id, "content": "42"} for one in whole.message.tool_calls]
        assert client.chat.completions.create(**{**asked, "messages": [*MESSAGES, *told]}, max_tokens=5).choices
        first = client.chat.completions.create(**asked, parallel_tool_calls=False, max_tokens=500).choices[0]
        assert (first.finish_reason, len(first.message.tool_calls)) == ("tool_calls", 1)
        none = client.chat.completions.create(**asked, tool_choice="none", max_tokens=500).choices[0]
        assert (none.finish_reason, none.message.tool_calls) == ("stop", None)
        cut = client.chat.completions.create(**asked, max_tokens=len(tokenizer.tokens(CALLS[tool_format])) - 3)
        assert cut.choices[0].finish_reason == "length"


def test_tools_that_are_strict_bind_the_calls_that_a_model_decides_to_make():
    script = 'Well, <tool_call>\n{"name": "look", "arguments": {"wrong": 1}}\n</tool_call> so.'
    tokenizer, strict = Marked(), [function("look", SCHEMA, strict=True)]
    with FakeServer(Script(tokenizer.tokens(script)), tokenizer=tokenizer, tool_format="hermes") as served:
        loose = post(served, tools=TOOLS, temperature=0).json()["choices"][0]
        assert calls_of(loose) == [("look", '{"wrong": 1}')]
        bound = post(served, tools=strict, temperature=0, logit_bias=dict.fromkeys(("9", "10", "13", "32"), -9)).json()
        assert bound["choices"][0]["message"]["content"].startswith("Well,")
        for _, arguments in calls_of(bound["choices"][0]):
            assert_valid(arguments)


def test_an_answer_may_be_a_format_or_a_call():
    tokenizer = Marked()
    form: dict[str, Any] = {"structured_outputs": {"choice": ["yes", "no"]}}
    for script, calls in (("yes", 0), (CALLS["hermes"].removeprefix("I look.\n"), 2)):
        with FakeServer(Script(tokenizer.tokens(script)), tokenizer=tokenizer, tool_format="hermes") as served:
            message = post(served, tools=[function("look"), TOOLS[1]], temperature=0, **form).json()["choices"][0][
                "message"
            ]
            assert len(message.get("tool_calls", ())) == calls
            assert message["content"] == (None if calls else "yes")


@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_is_apart_and_comes_before_a_format(opened):
    """Also where the template has begun it."""

    class Thinker(Marked):
        template = "<think></think>"

        def chat(self, messages: Any, most: Any = None, tools: Any = None, /, **options: Any) -> list[int]:
            return self.encode("a: <think>\n" if opened else "a: ")

    script = ("" if opened else "<think>\n") + 'so "yes"\n</think>\n\n{"kind": "a", "size": 1, "flags": [true]}'
    with FakeServer(Script(Thinker().encode(script)), tokenizer=Thinker()) as served:
        asked: list[dict[str, Any]] = [{}, {"structured_outputs": {"json": SCHEMA}}]
        for options in asked:
            message = post(served, temperature=0, **options).json()["choices"][0]["message"]
            assert message["reasoning_content"] == 'so "yes"'
            assert_valid(message["content"])
            deltas = [one["delta"] for one in read_chunks(post(served, temperature=0, stream=True, **options))]
            assert "".join(one.get("reasoning_content", "") for one in deltas) == 'so "yes"'
            assert_valid("".join(one.get("content", "") for one in deltas))
        assert "reasoning_content" not in post(served, include_reasoning=False).json()["choices"][0]["message"]
    with FakeServer(Script(Thinker().encode(script)), tokenizer=Thinker(), reasoning_format="none") as served:
        assert post(served, temperature=0).json()["choices"][0]["message"]["content"] == script
