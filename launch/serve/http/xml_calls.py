"""Calls of tools in XML, one element for each argument, as Qwen3-Coder and GLM 4.5 write them: their reader, and their grammar.

Arguments have no quotes there: the tool's JSON schema tells whether a text is a string or JSON of another type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ringattn.launch.serve.grammar import TEXT, Grammar
from ringattn.launch.serve.http.detokenizer import partial_match
from ringattn.launch.serve.http.fields import RequestError, Tool

TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
MAX_HEAD = 256  # characters in which a call must have named its function
TYPES = frozenset(("string", "integer", "number", "boolean", "null", "object", "array"))
_OF_PYTHON = {"True": "true", "False": "false", "None": "null"}  # chat templates show such values to a model
_ALTERNATIVES = ("anyOf", "oneOf")
_FOLLOWED = {
    "type",
    "enum",
    "const",
    "minLength",
    "maxLength",
    "title",
    "description",
    "default",
    "examples",
    *_ALTERNATIVES,
}
"""Keywords of a string's schema that a grammar of raw text can follow, or that bind nothing."""


class XmlForm(NamedTuple):
    """Tags of a call.

    Attributes:
        head: Pattern of the text that names the function.
        head_end: Character after it.
        key, value: What stands before and after the name of an argument, and its value.
        end: After the arguments.
        line: Text between two elements.
        pad: White space around a value that is no part of it.
    """

    head: re.Pattern[str]
    head_end: str
    key: tuple[str, str]
    value: tuple[str, str]
    end: str
    line: str
    pad: str


FORMS = {
    "qwen3_coder": XmlForm(
        re.compile(r"\s*<function=([\w.:-]{1,128})"),
        ">",
        ("<parameter=", ">"),
        ("", "</parameter>"),
        "</function>",
        '"\\n"',
        "\n",
    ),
    # GLM 4.7 has no lines
    "glm45": XmlForm(
        re.compile(r"\s*([\w.:-]{1,128})\s*"),
        "<",
        ("<arg_key>", "</arg_key>"),
        ("<arg_value>", "</arg_value>"),
        END_TOOL_CALL,
        '"\\n"?',
        "",
    ),
}


class XmlCallReader:
    """Reads a call in XML; see `CallReader`, whose attributes it has.

    Args:
        form: Its tags.
        schemas: Schema of the arguments by the name of a function.

    Example:
        >>> call = XmlCallReader(FORMS["glm45"], {"f": {"properties": {"a": {"type": "integer"}}}})
        >>> call.push("f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</"), call.name, call.take_arguments()
        ('', 'f', '{"a": 1')
        >>> call.push("arg_key><arg_value>x</arg_value></tool_call> and"), call.ended, call.take_arguments()
        ('</tool_call> and', True, ', "b": "x"}')
    """

    def __init__(self, form: XmlForm, schemas: Mapping[str, Any]) -> None:
        self.text, self.name, self.invalid, self.ended, self.opened = "", None, False, False, False
        self._form, self._schemas = form, schemas
        self._at, self._arguments = 0, ""  # what was read, and the JSON of it that was not taken
        self._steps = self._read()

    @property
    def has_arguments(self) -> bool:
        """Whether arguments may come: the name is known."""
        return self.name is not None

    def push(self, piece: str) -> str:
        """Add a piece; return what comes after the call."""
        self.text += piece
        next(self._steps, None)
        if not (self.ended or self.invalid):
            return ""
        rest, self.text = self.text[self._at :], self.text[: self._at]
        return rest

    def take_arguments(self) -> str:
        """Return the JSON of the arguments since the last call."""
        taken, self._arguments = self._arguments, ""
        return taken

    def _read(self) -> Iterator[None]:
        """Read the call, and yield where more text is needed."""
        form = self._form
        while (place := self.text.find(form.head_end)) < 0 and len(self.text) < MAX_HEAD:
            yield
        found = form.head.fullmatch(self.text, 0, max(place, 0))
        if found is None:
            self.invalid = True
            return
        name, self._at = found[1], place + (form.head_end != "<")
        self.name = name
        before = "{"
        while True:
            _, mark = yield from self._until(form.key[0], form.end, END_TOOL_CALL)
            if mark != form.key[0]:
                break
            key, _ = yield from self._until(form.key[1])
            yield from self._until(form.value[0])
            self._arguments += f"{before}{json.dumps(key.strip(), ensure_ascii=False)}: "
            before = ", "
            yield from self._read_value(_types_of(self._schemas.get(name), key.strip()))
        self._arguments += "{}" if before == "{" else "}"
        if mark == END_TOOL_CALL:
            self._at -= len(mark)
        self.ended = True

    def _until(self, *marks: str) -> Generator[None, None, tuple[str, str]]:
        """Read to the end of the first of some marks; return the text before it, and which it is."""
        while True:
            found = [(place, mark) for mark in marks if (place := self.text.find(mark, self._at)) >= 0]
            if found:
                place, mark = min(found)
                text, self._at = self.text[self._at : place], place + len(mark)
                return text, mark
            yield

    def _read_value(self, types: frozenset[str]) -> Iterator[None]:
        end, pad = self._form.value[1], self._form.pad
        if types != {"string"}:
            text, _ = yield from self._until(end)
            self._arguments += _to_json(text.removeprefix(pad).removesuffix(pad), types)
            return
        # a string as it is written: a call that writes a long file is no silence
        self._arguments += '"'
        while len(self.text) == self._at:
            yield
        self._at += bool(pad) and self.text.startswith(pad, self._at)
        while (place := self.text.find(end, self._at)) < 0:
            certain = self.text[self._at : self._at + partial_match(end, self.text[self._at :])].removesuffix(pad)
            self._add_string(certain)
            yield
        self._add_string(self.text[self._at : place].removesuffix(pad))
        self._at, self._arguments = place + len(end), self._arguments + '"'

    def _add_string(self, text: str) -> None:
        self._at += len(text)
        self._arguments += json.dumps(text, ensure_ascii=False)[1:-1]


def _types_of(schema: Any, key: str) -> frozenset[str]:
    """Return the types that an argument may have, by the schema of all arguments."""
    schema = schema if isinstance(schema, dict) else {}
    properties = schema.get("properties")
    known = isinstance(properties, dict) and key in properties
    return allowed_types(properties[key] if known else schema.get("additionalProperties"), schema, {})


def allowed_types(schema: Any, root: Any, seen: dict[str, frozenset[str]]) -> frozenset[str]:
    """Return the JSON types that a schema allows; all where it does not tell.

    Args:
        schema: Any JSON.
        root: What its references are relative to.
        seen: Types of references so far, which may refer to themselves.
    """
    if not isinstance(schema, dict):
        return TYPES
    found = TYPES
    if isinstance(kind := schema.get("type"), (str, list)):
        found &= frozenset([kind] if isinstance(kind, str) else map(str, kind))
    if isinstance(reference := schema.get("$ref"), str):
        if reference not in seen:
            seen[reference] = frozenset()
            seen[reference] = allowed_types(_resolve(reference, root), root, seen)
        found &= seen[reference] or TYPES
    values = [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    if values:
        found &= frozenset(map(_type_of, values))
    for name in _ALTERNATIVES:
        if options := _list(schema.get(name)):
            found &= frozenset[str]().union(*(allowed_types(one, root, seen) for one in options))
    for one in _list(schema.get("allOf")):
        found &= allowed_types(one, root, seen)
    return found or TYPES


def _resolve(reference: str, root: Any) -> Any:
    """Return what a reference within a schema points to; None for others."""
    if not reference.startswith("#"):
        return None
    for name in reference.split("/")[1:]:
        root = root.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _type_of(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _to_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value: the text where it is JSON of such a type, else a string."""
    value = text.strip()
    if "string" not in types:
        value = _OF_PYTHON.get(value, value)
    try:
        kind = _type_of(json.loads(value, parse_constant=_refuse))
    except (ValueError, RecursionError):
        kind = "string"
    if kind != "string" and ("string" not in types or kind in types or (kind == "integer" and "number" in types)):
        return value
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def add_calls(grammar: Grammar, tools: Sequence[Tool], form: XmlForm, mark: Callable[[str], str]) -> None:
    """Add the rule `call` of calls of tools to a grammar, with its parts; arguments come in the order of their schema.

    Args:
        grammar: To which rules are added.
        tools: Which may be called.
        form: How.
        mark: Returns a tag in Lark's syntax: a token where it is a special one.

    Raises:
        RequestError: The schema of a function with `strict` has a keyword for raw text that a grammar cannot follow.
    """
    for i, tool in enumerate(tools):
        function, parts = tool.function, list[str]()
        properties = function.parameters.get("properties")
        required = _list(function.parameters.get("required"))
        extra = function.parameters.get("additionalProperties", True)
        # without a list of arguments there may be any
        named: dict[str | None, Any] = dict(properties) if isinstance(properties, dict) else {None: extra}
        named |= {name: extra for name in required if isinstance(name, str) and name not in named}
        if extra is False:
            named.pop(None, None)
        for j, (key, schema) in enumerate(named.items()):
            rule = f"argument{i}_{j}"
            _add_argument(grammar, rule, key, schema, tool, form, mark)
            parts.append(rule if key in required else f"{rule}*" if key is None else f"{rule}?")
        begin = json.dumps(f"<function={function.name}>" if form.pad else function.name)
        end = json.dumps(form.end) if form.pad else ""
        grammar.rules.append(f"call{i}: {begin} {form.line} {' '.join(parts)} {end}")
    grammar.rules.append("call: " + " | ".join(f"call{i}" for i in range(len(tools))))


def _add_argument(
    grammar: Grammar, rule: str, key: str | None, schema: Any, tool: Tool, form: XmlForm, mark: Callable[[str], str]
) -> None:
    """Add the rule of an argument; its name is any where `key` is None."""
    if key is not None and (not key.strip() == key or not key or re.search("[<>\n]", key)):
        what = f"parameters of {tool.function.name} must have names without spaces around them, lines, < and >"
        raise RequestError(400, f"{what}, got {json.dumps(key)[:100]}; rename it", "tools")
    root, end = tool.function.parameters, mark(form.value[1])
    name = "/[a-zA-Z0-9_.-]{1,64}/" if key is None else json.dumps(key)
    before = (
        f"{mark(form.key[0])} {name} {mark(form.key[1])} {form.line} {mark(form.value[0]) if form.value[0] else ''}"
    )
    if "string" not in allowed_types(schema, root, {}):
        kind = "json" if tool.function.strict else "json_lenient"
        grammar.parts[f"{rule}_json"] = (
            kind,
            {name: root[name] for name in ("$defs", "definitions") if name in root} | schema,
        )
        value = f"@{rule}_json {json.dumps(form.pad) if form.pad else ''} {end}"
    else:
        try:
            texts = set(_raw_texts(schema, root, tool.function.strict, "\\n" if form.pad else "", set()))
        except ValueError as error:
            what = f"strict must be left out of {tool.function.name}, whose calls are XML, for {error} of {key}"
            raise RequestError(400, f"{what}; or leave the keyword out, and give it one type", "tools") from None
        pattern = TEXT[1:-1]
        if pattern not in texts:
            pattern = "|".join(sorted(texts))
        # a token ends any text; a tag ends it where it comes first
        ends = f": /{pattern}/ {end}" if end.startswith("<[") else f"[suffix={end}]: /{pattern}/"
        grammar.rules.append(f"{rule}_text{ends}")
        value = f"{rule}_text"
    grammar.rules.append(f"{rule}: {before} {value} {form.line}")


def _raw_texts(schema: Any, root: Any, strict: bool, pad: str, seen: set[str]) -> Iterator[str]:
    """Yield patterns of a value that may be a string, without quotes and before `pad`; `seen` are references that have theirs.

    Raises:
        ValueError: strict, and this is a keyword that a pattern cannot follow, or a type that is none of text.
    """
    schema = schema if isinstance(schema, dict) else {}
    if isinstance(reference := schema.get("$ref"), str):
        if reference not in seen:
            seen.add(reference)
            yield from _raw_texts(_resolve(reference, root), root, strict, pad, seen)
        return
    if strict and (unknown := sorted(schema.keys() - _FOLLOWED)):
        raise ValueError(unknown[0])
    values = [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    if values:
        yield from (_escaped(x if isinstance(x, str) else json.dumps(x)) + pad for x in values)
        return
    if options := [one for name in _ALTERNATIVES for one in _list(schema.get(name))]:
        for one in options:
            yield from _raw_texts(one, root, strict, pad, seen)
        return
    for kind in sorted(allowed_types(schema, root, {})):
        if kind == "string":
            text = _bounded(schema.get("minLength"), schema.get("maxLength"))
            yield text if text == TEXT[1:-1] or not pad else f"{text}({pad})?"
        elif kind in ("boolean", "null"):
            yield f"null{pad}" if kind == "null" else f"(true|false){pad}"
        elif strict:
            raise ValueError(f"type {kind} beside string")
        else:
            yield TEXT[1:-1]


def _bounded(least: Any, most: Any) -> str:
    """Return the pattern of a text of so many characters; a bounded one does not end with a line, which may be padding."""
    least, most = (x if isinstance(x, int) else None for x in (least, most))
    if not least and most is None:
        return TEXT[1:-1]
    if most == 0:
        return ""
    upper = "" if most is None else most - 1
    return f"((.|\\n){{{max(0, (least or 1) - 1)},{upper}}}[^\\n]){'' if least else '?'}"


def _escaped(text: str) -> str:
    """Return a text as a pattern between slashes."""
    return "".join(x if x.isalnum() or x in " _" else "\\n" if x == "\n" else f"\\x{{{ord(x):x}}}" for x in text)
