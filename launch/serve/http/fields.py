"""Fields of requests that tools and formats of answers have, and what all fields of requests share."""

from __future__ import annotations

import itertools
import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import from_json

from ringattn.launch.serve.grammar import Grammar

MAX_TOOLS = 128
MAX_ALTERNATIVES = 1024  # texts of a choice

_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "service_unavailable_error"}


class RequestError(Exception):
    """An error that a request gets instead of an answer: HTTP status, message, the field that it is about, and OpenAI's code."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how another process makes a copy."""
        return type(self), (self.status, self.message, self.param, self.code)

    def body(self) -> dict[str, Any]:
        """Return the body in OpenAI's format."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def ascii_only(text: str) -> str:
    """Return a text that every client can decode."""
    return text.encode("ascii", "backslashreplace").decode()


def _integral(value: Any) -> Any:
    """Return a float without a fraction, which some clients send for an integer, as one."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_integral)]
Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_.:-]{1,128}$")]


class Strict(BaseModel):
    """Fields of which none is accepted and ignored."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    neutral: ClassVar[dict[str, Any]] = {}
    """Fields that are not served, and their values that ask for nothing, which clients send unasked."""

    refused: ClassVar[dict[str, Any]] = {}
    """Fields that are not served, and what to do instead."""

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, fields: Any) -> Any:
        """Drop fields that ask for nothing: null ones, which some clients send for absent ones, and those of `neutral`."""
        if not isinstance(fields, dict):
            return fields
        neutral = cls.neutral
        kept = {
            name: value
            for name, value in fields.items()
            if value is not None and (name not in neutral or value not in neutral[name])
        }
        for name in kept.keys() & cls.refused.keys():
            what = f"{name} {'are' if name.endswith('s') else 'is'} not supported; {cls.refused[name]}"
            raise RequestError(400, what, name, "unsupported_parameter")
        # with one field more than there are, one is unknown, and refused; an error for each of many would take memory
        return dict(itertools.islice(kept.items(), len(cls.model_fields) + 1))


class Function(Strict):
    """A function that an answer may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False  # whether arguments follow `parameters`, also where the model decides to call


class Tool(Strict):
    """A tool: a function."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """The name of a function."""

    name: Name


class NamedTool(Strict):
    """A tool by its name."""

    type: Literal["function"] = "function"
    function: NamedFunction


class CalledFunction(Strict):
    """A call that an answer has made; `arguments` are JSON."""

    name: Name
    arguments: str = "{}"


class ToolCall(Strict):
    """A call of an answer, which a client sends back."""

    neutral: ClassVar[dict[str, Any]] = {"index": tuple(range(MAX_TOOLS))}  # of the parts of a stream

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def template_call(self) -> dict[str, Any]:
        """Return the call for a chat template, which writes the arguments as JSON by itself."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            what = f"arguments of a call must be a JSON object, got {ascii_only(self.function.arguments)[:100]}"
            raise RequestError(400, what, "messages")
        named = {} if self.id is None else {"id": self.id}
        return {**named, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class JsonSchema(Strict):
    """The schema of an answer."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | bool = Field({"type": "object"}, alias="schema")
    strict: bool = False  # the schema always holds


class ResponseFormat(Strict):
    """OpenAI's field for the format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise RequestError(
                400, "response_format must have json_schema where its type is json_schema, only", "response_format"
            )
        return self


class StructuredOutputs(Strict):
    """vLLM's field for the format of an answer: one of these."""

    neutral: ClassVar[dict[str, Any]] = {
        "disable_fallback": (False, True),
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
    }
    refused: ClassVar[dict[str, Any]] = {
        "whitespace_pattern": "white space between parts of JSON is bounded by the server; leave it out",
        "structural_tag": "pass tools with tool_choice, or a grammar",
    }

    json_: dict[str, Any] | str | bool | None = Field(None, alias="json")  # a schema, or its JSON
    regex: str | None = None  # of the whole answer
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_ALTERNATIVES)] | None = None
    grammar: str | None = None  # in the syntax of Lark or GBNF
    json_object: bool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> StructuredOutputs:
        if len(self.model_fields_set) != 1 or self.json_object is False:
            what = f"structured_outputs must have one of {', '.join(x.rstrip('_') for x in type(self).model_fields)}"
            raise RequestError(
                400, f"{what}, got {len(self.model_fields_set)}; leave out the others", "structured_outputs"
            )
        return self

    def part(self) -> tuple[str, Any]:
        """Return kind and definition of the part of a grammar."""
        if self.json_ is not None:
            schema = self.json_
            if isinstance(schema, str):
                try:
                    schema = from_json(schema)  # at most 200 levels, as in a body
                except ValueError as error:
                    what = f"json must be a schema, or its JSON, got: {ascii_only(str(error))[:200]}"
                    raise RequestError(400, what, "structured_outputs") from None
            return "json", schema
        if self.json_object:
            return "json", {"type": "object"}
        name = "regex" if self.regex is not None else "choice" if self.choice is not None else "grammar"
        return name, getattr(self, name)


def answer_part(response_format: ResponseFormat | None, structured: StructuredOutputs | None) -> tuple[str, Any] | None:
    """Return kind and definition of the grammar of an answer; None for any text."""
    if structured is not None:
        if response_format is not None and response_format.type != "text":
            raise RequestError(400, "response_format must be left out beside structured_outputs", "response_format")
        return structured.part()
    if response_format is None or response_format.type == "text":
        return None
    schema = response_format.json_schema
    return "json", {"type": "object"} if schema is None else schema.schema_


def answer_grammar(part: tuple[str, Any]) -> Grammar:
    """Return the grammar of an answer that is nothing but a part."""
    return Grammar(["start: @answer"], {"answer": part})
