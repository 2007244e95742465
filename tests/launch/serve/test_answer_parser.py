"""Parsers of answers: content, reasoning and calls, of every format and however the text is cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from ringattn.launch.serve.config import ServeArgs
from ringattn.launch.serve.http.answer_parser import AnswerParser, CallReader, HarmonyParser, TextParser
from ringattn.launch.serve.http.chat_format import chat_format
from tests.support.serving import Letters

SCHEMAS = {
    "f": {
        "properties": {
            "i": {"type": "integer"},
            "b": {"type": "boolean"},
            "o": {"$ref": "#/$defs/o"},
            "s": {"type": "string"},
            "n": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "$defs": {"o": {"type": "object", "properties": {"o": {"$ref": "#/$defs/o"}}}},
    },
    "g": {"additionalProperties": {"type": "string"}},
}


def parser(name: str, **options: Any) -> AnswerParser:
    options = {"most_calls": 9, **options}
    if name == "harmony":
        return HarmonyParser({}, **options)
    return TextParser({}, **{"thinks": True, "opened": False, "call_format": name, "schemas": SCHEMAS, **options})


def joined(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together from a stream."""
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for kind in ("content", "reasoning_content"):
            if kind in delta:
                message[kind] = message.get(kind, "") + delta[kind]
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    message.setdefault("content", None if calls else "")
    return message | ({"tool_calls": calls} if calls else {})


def read(name: str, text: str, seed: int | None = None, **options: Any) -> dict[str, Any]:
    """The message of a text, in one piece or cut at random; calls as name and arguments."""
    found, deltas = parser(name, **options), []
    cuts = random.Random(seed)
    while text and not found.done:
        size = len(text) if seed is None else cuts.choice([1, 1, 2, 5, 20])
        deltas += found.push(text[:size])
        text = text[size:]
    deltas += found.end()
    message = found.message()
    assert joined(deltas) == message
    if "tool_calls" in message:
        assert len({call["id"] for call in message["tool_calls"]}) == len(message["tool_calls"])
        message["tool_calls"] = [tuple(call["function"].values()) for call in message["tool_calls"]]
    return message


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "}</tool_call>\\"{", "b": [1, {"c": 2}]}}\n</tool_call>'
ARGUMENTS = '{"a": "}</tool_call>\\"{", "b": [1, {"c": 2}]}'
ANALYSIS = "<|channel|>analysis<|message|>hm\n\nwell<|end|><|start|>assistant"

READ: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("hermes", "plain text\n", {}, {"content": "plain text\n"}),
    ("hermes", " a < b <tool", {}, {"content": " a < b <tool"}),
    ("hermes", "", {}, {"content": ""}),
    ("hermes", f"Let me see.\n\n{CALL}\n", {}, {"content": "Let me see.", "tool_calls": [("f", ARGUMENTS)]}),
    ("hermes", f"{CALL}\n{CALL}", {}, {"content": None, "tool_calls": [("f", ARGUMENTS)] * 2}),
    ("hermes", f"{CALL}\n{CALL}", {"most_calls": 1}, {"content": None, "tool_calls": [("f", ARGUMENTS)]}),
    ("hermes", f"{CALL} and", {}, {"content": "and", "tool_calls": [("f", ARGUMENTS)]}),
    ("hermes", CALL, {"most_calls": 0}, {"content": CALL}),
    # the arguments first, in a string, or missing
    (
        "hermes",
        '<tool_call>{"arguments": {"a": 1} , "name":"g"}</tool_call>',
        {},
        {"content": None, "tool_calls": [("g", '{"a": 1}')]},
    ),
    (
        "hermes",
        '<tool_call>{"name": "g", "arguments": "{\\"a\\": 1}"}</tool_call>',
        {},
        {"content": None, "tool_calls": [("g", '{"a": 1}')]},
    ),
    ("hermes", '<tool_call>{"name": "g"}</tool_call>', {}, {"content": None, "tool_calls": [("g", "{}")]}),
    # what is no call is content
    ("hermes", "<tool_call>f(1)</tool_call>", {}, {"content": "<tool_call>f(1)</tool_call>"}),
    ("hermes", '<tool_call>{"a": 1}', {}, {"content": '<tool_call>{"a": 1}'}),
    ("hermes", '<tool_call>{"name": "f', {}, {"content": '<tool_call>{"name": "f'}),
    # an end in the middle of a call
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": ',
        {},
        {"content": None, "tool_calls": [("f", '{"a":')]},
    ),
    ("hermes", "<think>\nhm </b>\n</think>\n\nyes", {}, {"content": "yes", "reasoning_content": "hm </b>"}),
    ("hermes", "\n<think>hm</think> ", {}, {"content": "", "reasoning_content": "hm"}),
    ("hermes", "<think>hm", {}, {"content": "", "reasoning_content": "hm"}),
    ("hermes", "<thin", {}, {"content": "<thin"}),
    ("hermes", "a<think>b</think>", {}, {"content": "a<think>b</think>"}),
    ("hermes", "hm</think>yes", {"opened": True}, {"content": "yes", "reasoning_content": "hm"}),
    ("hermes", "<think>hm</think>yes", {"reasoning": False}, {"content": "yes"}),
    ("hermes", "<think>hm</think>yes", {"thinks": False}, {"content": "<think>hm</think>yes"}),
    (
        "hermes",
        f"<think>{CALL}</think>{CALL}",
        {},
        {"content": None, "reasoning_content": CALL, "tool_calls": [("f", ARGUMENTS)]},
    ),
    (
        "llama",
        '{"name": "f", "parameters": {"a": "é"}}',
        {},
        {"content": None, "tool_calls": [("f", '{"a": "é"}')]},
    ),
    (
        "llama",
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": 1}}',
        {},
        {"content": None, "tool_calls": [("f", "{}"), ("g", '{"b": 1}')]},
    ),
    ("llama", '{"a": {"name": "f"}}', {}, {"content": '{"a": {"name": "f"}}'}),
    ("llama", "Hi {you}", {}, {"content": "Hi {you}"}),
    ("llama", '{"name": "f", "parameters": {}}', {"most_calls": 0}, {"content": '{"name": "f", "parameters": {}}'}),
    ("harmony", "<|channel|>final<|message|>yes", {}, {"content": "yes"}),
    (
        "harmony",
        ANALYSIS + "<|channel|>final<|message|>yes<|return|>",
        {},
        {"content": "yes", "reasoning_content": "hm\n\nwell"},
    ),
    (
        "harmony",
        ANALYSIS + '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
        {},
        {"content": None, "reasoning_content": "hm\n\nwell", "tool_calls": [("f", '{"a": 1}')]},
    ),
    (
        "harmony",
        '<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.g<|channel|>commentary json<|message|>{"b',
        {},
        {"content": "I look.", "tool_calls": [("g", '{"b')]},
    ),
    ("harmony", ANALYSIS + "<|channel|>final<|message|>a", {"reasoning": False}, {"content": "a"}),
    ("harmony", "no channel", {}, {"content": "no channel"}),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>{}", {"most_calls": 0}, {"content": "{}"}),
]


def xml(name: str, *arguments: tuple[str, str], lines: bool = True) -> dict[str, str]:
    """A call as Qwen3-Coder and as GLM write it, with lines as GLM 4.5 or without as 4.7."""
    line = "\n" * lines
    qwen = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments]
    glm = [f"<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>{line}" for key, value in arguments]
    return {
        "qwen3_coder": f"<tool_call>\n<function={name}>\n{''.join(qwen)}</function>\n</tool_call>",
        "glm45": f"<tool_call>{name}{line}{''.join(glm)}</tool_call>",
    }


# arguments as they are written, and their JSON
TYPED: list[tuple[str, list[tuple[str, str]], str]] = [
    ("f", [("i", "12"), ("b", "true"), ("o", '{"a": ["</b>"]}')], '{"i": 12, "b": true, "o": {"a": ["</b>"]}}'),
    ("f", [("b", "False"), ("i", "many"), ("i", "1" * 5000)], '{"b": false, "i": "many", "i": "' + "1" * 5000 + '"}'),
    ("f", [("s", "12"), ("n", "12"), ("n", "null")], '{"s": "12", "n": "12", "n": null}'),
    (
        "f",
        [("s", '\n if a < b:\n\t"é\\" \n'), ("s", "")],
        json.dumps({"s": '\n if a < b:\n\t"é\\" \n'}, ensure_ascii=False)[:-1] + ', "s": ""}',
    ),
    ("g", [("x", "12"), ("y y", "{}")], '{"x": "12", "y y": "{}"}'),
    ("other", [("x", "12"), ("y", "text"), ("z", "NaN")], '{"x": 12, "y": "text", "z": "NaN"}'),
    ("f", [], "{}"),
]
for name, arguments, found in TYPED:
    for lines in (True, False):
        READ += [
            (form, call, {}, {"content": None, "tool_calls": [(name, found)]})
            for form, call in xml(name, *arguments, lines=lines).items()
        ]
for form in xml(""):
    one, two = (xml(name, ("s", "x"))[form] for name in "fg")
    thought = f"<think>{one}</think>\n\nSo:\n{one}\n{two}"
    both = [("f", '{"s": "x"}'), ("g", '{"s": "x"}')]
    READ += [
        (form, thought, {}, {"content": "So:", "reasoning_content": one, "tool_calls": both}),
        (form, one + two, {"most_calls": 1}, {"content": None, "tool_calls": both[:1]}),
        (form, one, {"most_calls": 0}, {"content": one}),
        (form, "<tool_call>f(1)</tool_call>", {}, {"content": "<tool_call>f(1)</tool_call>"}),
        (form, '<tool_call>{"name": "f"}', {}, {"content": '<tool_call>{"name": "f"}'}),
        (form, one[: one.index("x") + 1], {}, {"content": None, "tool_calls": [("f", '{"s": "x')]}),
    ]
READ += [
    # what models leave out
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=s>a</parameter></tool_call> and",
        {},
        {"content": "and", "tool_calls": [("f", '{"s": "a"}')]},
    ),
    ("qwen3_coder", "<tool_call>\n<function", {}, {"content": "<tool_call>\n<function"}),
]


@pytest.mark.parametrize(("name", "text", "options", "message"), READ)
def test_a_message_does_not_depend_on_how_its_text_is_cut(name, text, options, message):
    assert read(name, text, **options) == message
    for seed in range(8):
        assert read(name, text, seed, **options) == message


@pytest.mark.parametrize(
    ("name", "begin"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "'),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\n"),
        ("glm45", "<tool_call>f\n<arg_key>s</arg_key><arg_value>"),
    ],
)
def test_arguments_come_as_they_are_written(name, begin):
    """A call that writes a long file is no silence."""
    found = parser(name)
    found.push(begin)
    for piece in ("one", "two", "three"):
        assert found.push(piece) == [{"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}]


def test_a_reader_of_calls_takes_any_json():
    numbers = random.Random(0)

    def value(depth: int) -> Any:
        kind = numbers.randrange(6 if depth else 4)
        if kind == 0:
            return numbers.choice(['"', "\\", "{}[]", "a\nb", "", "name", "é"])
        if kind < 4:
            return numbers.choice([None, True, 1.5, -3])
        return [value(depth - 1) for _ in range(3)] if kind == 4 else {f"k{i}": value(depth - 1) for i in range(3)}

    for _ in range(200):
        arguments = {"name": value(1), "arguments": value(2), "x": value(3)}
        items = [("name", "f"), ("arguments", arguments), ("id", value(2))]
        numbers.shuffle(items)
        text, reader, got = json.dumps(dict(items), indent=numbers.choice([None, 2])), CallReader(), ""
        for letter in text:
            assert not reader.push(letter)
            got += reader.take_arguments()
        assert (reader.ended, reader.name, json.loads(got)) == (True, "f", arguments)
        assert reader.push("rest") == "rest"


TEMPLATES = [
    ("{{ tools }}<tool_call>\n{{ x }}</tool_call>", "hermes", "none"),
    ("<tool_call>{% if '</think>' in content %}", "hermes", "think"),
    ("<tool_call>\n<function={{ name }}>\n<parameter={{ key }}>", "qwen3_coder", "none"),
    ("<think>{{ x }}</think><tool_call>{{ name }}<arg_key>", "glm45", "think"),
    ("<tool_call>\n<function=name>", "none", "none"),
    ("<seed:tool_call>\n<function=name>\n<parameter=key>", "none", "none"),
    ("Environment: ipython {{ '<|python_tag|>' }}", "llama", "none"),
    ('ipython {"name": function name, "parameters": {}}', "llama", "none"),
    ("[func_name1(params_name1=params_value1)]", "none", "none"),
    ("<|start|>assistant<|channel|>analysis<|message|>", "none", "none"),  # without the special tokens
    ("", "none", "none"),
]


@pytest.mark.parametrize(("template", "tools", "reasoning"), TEMPLATES)
def test_the_chat_template_tells_the_format_unless_a_flag_does(template, tools, reasoning):
    tokenizer: Any = Letters()
    tokenizer.template = template
    found = chat_format(ServeArgs("fake"), tokenizer)
    assert (found.tools, found.reasoning) == (tools, reasoning)
    fixed = chat_format(ServeArgs("fake", tool_format="llama", reasoning_format="none"), tokenizer)
    assert (fixed.tools, fixed.reasoning) == ("llama", "none")
    with pytest.raises(ValueError, match="tool_format must be one whose special tokens the tokenizer has"):
        chat_format(ServeArgs("fake", tool_format="harmony"), tokenizer)
    tokenizer.added_texts = dict(enumerate(("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"), 1))
    assert chat_format(ServeArgs("fake", tool_format="harmony"), tokenizer).reasoning == "harmony"
    assert (chat_format(ServeArgs("fake"), tokenizer).tools == "harmony") == ("<|channel|>" in template)
