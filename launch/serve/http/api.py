"""Bodies of requests and answers: the parts of OpenAI's interface that are served.

Nothing is accepted and ignored: a field that is not served may only have a value that asks for nothing.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from ringattn.inference.block_table import MAX_REQUEST_TOKENS
from ringattn.launch.serve.http.answer_parser import AnswerParser
from ringattn.launch.serve.http.detokenizer import Detokenizer, StopStrings, text_alone
from ringattn.launch.serve.http.fields import (
    MAX_TOOLS,
    Int,
    NamedTool,
    RequestError,
    ResponseFormat,
    Strict,
    StructuredOutputs,
    Tool,
    ToolCall,
    answer_part,
    ascii_only,
)
from ringattn.launch.serve.messages import Event
from ringattn.launch.serve.sampling import Logprob, Sampling
from ringattn.launch.serve.tokenizer import REPLACEMENT, Tokenizer

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_SCORES = 2**20  # maximum of logprobs of an answer, all choices together: some 70 MiB of JSON
MAX_TOOL_BYTES = 2**20  # of parameters, as JSON: a chat template takes seconds for more
MAX_NAMED = 1024  # maximum of tokens in `logit_bias` or `stop_token_ids`

FIELD = re.compile("(?!(str|int|float|bool|NamedTool)$)\\w+")

_SAMPLING = "temperature top_p min_p repetition_penalty presence_penalty frequency_penalty min_tokens".split()
"""Fields that `Sampling` has as they are."""

_to_json = msgspec.json.Encoder().encode


def _check_few(value: Any) -> Any:
    """Refuse a dict before its entries are read, each of which may add an error."""
    if isinstance(value, dict) and len(value) > MAX_NAMED:
        raise ValueError(f"must have at most {MAX_NAMED} entries, got {len(value)}")
    return value


FEW = BeforeValidator(_check_few)
Count = Annotated[Int, Field(ge=1, le=MAX_REQUEST_TOKENS)]
Token = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,8})$")]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]


class StreamOptions(Strict):
    """Options of a stream: whether its last chunk, and whether each chunk, has the usage."""

    neutral: ClassVar[dict[str, Any]] = {"include_obfuscation": (False,)}

    include_usage: bool = False
    continuous_usage_stats: bool = False


class _Body(Strict):
    """Fields of both kinds of request."""

    neutral: ClassVar[dict[str, Any]] = {
        "store": (False,),
        "service_tier": ("auto", "default"),
        "verbosity": ("medium",),
        # defaults of vLLM
        "use_beam_search": (False,),
        "length_penalty": (1,),
        "early_stopping": (False,),
        "include_stop_str_in_output": (False,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "bad_words": ([],),
        "return_tokens_as_token_ids": (False,),
        "priority": (0,),
    }

    refused: ClassVar[dict[str, Any]] = {
        **dict.fromkeys(
            ("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
            'pass structured_outputs, such as {"json": ...}, {"regex": ...}, {"choice": ...} or {"grammar": ...}',
        ),
        **dict.fromkeys(
            ("regex", "ebnf", "json_schema"),
            'pass structured_outputs, such as {"regex": ...}, {"grammar": ...} or {"json": ...}',
        ),
        **dict.fromkeys(
            ("lora_path", "lora_request"),
            "adapters are merged when the server starts: start one with --adapter for each adapter",
        ),
        **dict.fromkeys(
            ("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_request_id"),
            "prefill and decode share the ranks of one server; send the whole request to it",
        ),
        "mm_processor_kwargs": "only text is served",
    }

    model: str | None = None
    max_tokens: Count | None = None
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    n: Int = Field(1, ge=1, le=MAX_CHOICES)
    seed: Int | None = None
    stop: Annotated[list[Stop], BeforeValidator(lambda x: [x] if isinstance(x, str) else x)] = Field(
        [], max_length=MAX_STOPS
    )
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[dict[Token, Annotated[float, Field(ge=-100, le=100)]], FEW] = Field({})
    # fields that say nothing about the answer
    user: str | None = None
    metadata: Annotated[dict[str, str], FEW] = Field({})
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # not OpenAI's, with vLLM's names
    ignore_eos: bool = False
    return_token_ids: bool = False
    min_tokens: Int = Field(0, ge=0, le=MAX_REQUEST_TOKENS)
    top_k: Int = Field(0, ge=-1, le=MAX_REQUEST_TOKENS)  # 0 and -1: all
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    stop_token_ids: list[Int] = Field([], max_length=MAX_NAMED)
    # the format of answers: OpenAI's field, and vLLM's
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def answer_part(self) -> tuple[str, Any] | None:
        """Kind and definition of the grammar of the answer (`Grammar.parts`); None for any text."""
        return answer_part(self.response_format, self.structured_outputs)

    @property
    def format_field(self) -> str:
        """The field that asks for a grammar, if one does."""
        if self.structured_outputs is not None:
            return "structured_outputs"
        return "tools" if self.answer_part is None else "response_format"

    def check_free(self) -> None:
        """Raise RequestError for options that contradict a grammar, which decides where an answer ends."""
        for name, value in (("ignore_eos", self.ignore_eos), ("min_tokens", self.min_tokens)):
            if value:
                what = f"{name} must be left out where a format or a call is required, got {value}"
                raise RequestError(400, what, name)

    @model_validator(mode="after")
    def _check_stream(self) -> _Body:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise RequestError(400, "stream_options must be left out when stream is not true", "stream_options")
        return self

    logprobs: Any = None  # a number of tokens; of chats a flag

    @property
    def wanted_logprobs(self) -> int | None:
        """Number of likeliest tokens to return; None for no logprobs."""
        return self.logprobs

    def sampling(self, choice: int, stops: Sequence[int] = ()) -> Sampling:
        """Return the sampling of a choice, which `stops` may end; each of several has its own seed."""
        return Sampling(
            **{name: getattr(self, name) for name in _SAMPLING},
            seed=None if self.seed is None else self.seed + choice,
            logprobs=self.wanted_logprobs,
            top_k=max(0, self.top_k),
            logit_bias=tuple((int(token), bias) for token, bias in self.logit_bias.items()),
            stops=tuple(stops) if self.min_tokens else (),
        )

    def check_tokens(self, vocab_size: int) -> None:
        """Raise RequestError if `logit_bias` or `stop_token_ids` names a token that the model does not have."""
        for name, tokens in (("logit_bias", map(int, self.logit_bias)), ("stop_token_ids", self.stop_token_ids)):
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise RequestError(400, f"{name}: tokens must be from 0 to {vocab_size - 1}, got {token}", name)


class Completion(_Body):
    """The body of /v1/completions."""

    neutral: ClassVar[dict[str, Any]] = {
        **_Body.neutral,
        "suffix": ("",),
        "add_special_tokens": (True,),
        "reasoning_effort": ("none", "medium"),  # both are defaults of OpenAI's models
        "parallel_tool_calls": (True, False),  # of no tools
    }

    prompt: Any
    max_tokens: Int | None = Field(None, ge=0, le=MAX_REQUEST_TOKENS)  # 0: the prompt alone, with echo
    echo: bool = False
    logprobs: Int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: Int | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> Completion:
        if self.best_of not in (None, self.n):
            raise RequestError(400, f"best_of must be left out or equal n, got {self.best_of}", "best_of")
        if self.max_tokens == 0 and not self.echo:
            raise RequestError(400, "max_tokens: must be at least 1 when echo is not true, got 0", "max_tokens")
        return self

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each a text or tokens; raise RequestError if they are something else, or none."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt, list) and prompt:
            kinds = {type(x) for x in prompt}
            if kinds == {int}:
                return [prompt]
            if kinds == {str} or (kinds == {list} and all({type(y) for y in x} == {int} for x in prompt)):
                return prompt
        what = "prompt must be a string, a list of strings, tokens, or lists of tokens; none may be empty"
        raise RequestError(400, what, "prompt")


class TextPart(Strict):
    """A part of a message: text only."""

    neutral: ClassVar[dict[str, Any]] = {"type": ("text",), "annotations": ([],)}

    text: str


class Message(Strict):
    """A message of a chat. Fields of answers, which clients send back, may be there with nothing in them."""

    neutral: ClassVar[dict[str, Any]] = {"type": ("text",), "annotations": ([],), "refusal": ("",)}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] = ""
    # for the chat template
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of it
    tool_calls: list[ToolCall] = Field([], max_length=MAX_TOOLS)
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_kind(cls, fields: Any) -> Any:
        """Name what is asked for and not served."""
        if not isinstance(fields, dict):
            return fields
        if fields.get("tool_calls") and fields.get("role") != "assistant":
            raise ValueError("tool_calls must be of an assistant; leave them out of other messages")
        if (fields.get("tool_call_id") is not None) != (fields.get("role") == "tool"):
            raise ValueError("tool_call_id must be there where role is 'tool', only")
        parts = fields.get("content")
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and (kind := part.get("type", "text")) != "text":
                what = f"content must be text, got a part of type {str(kind)[:50]!r}; only text is supported"
                raise ValueError(f"{what}: leave it out, or describe it in words")
        if parts is None and fields.get("role") != "assistant":
            raise ValueError("content must be text, got none; only that of an assistant may be null")
        return fields

    def template_message(self) -> dict[str, Any]:
        """Return the message for a chat template."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        thought = self.reasoning_content or self.reasoning
        further: dict[str, Any] = {"name": self.name, "reasoning_content": thought}
        # the name in the template of GPT-OSS, which takes one of two texts beside a call
        further["thinking"] = None if content and self.tool_calls else thought
        further["tool_call_id"] = self.tool_call_id
        further["tool_calls"] = [call.template_call() for call in self.tool_calls] or None
        return message | {name: value for name, value in further.items() if value is not None}


class Chat(_Body):
    """The body of /v1/chat/completions."""

    neutral: ClassVar[dict[str, Any]] = {
        **_Body.neutral,
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "documents": ([],),
        "best_of": (1,),
        "echo": (False,),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "add_special_tokens": (False,),
    }
    refused: ClassVar[dict[str, Any]] = {
        **_Body.refused,
        "functions": "pass them as tools",
        "function_call": "pass tool_choice",
    }

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: dict[str, Any] = Field({})  # vLLM's name for variables of the chat template
    tools: list[Tool] = Field([], max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: Annotated[str, Field(max_length=50)] | None = None
    include_reasoning: bool = True  # vLLM's name

    @model_validator(mode="after")
    def _check_fields(self) -> Chat:
        if self.top_logprobs and not self.logprobs:
            raise RequestError(400, "top_logprobs must be left out when logprobs is not true", "top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise RequestError(400, "max_tokens must be left out beside max_completion_tokens", "max_tokens")
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        if (size := len(_to_json([tool.function.parameters for tool in self.tools]))) > MAX_TOOL_BYTES:
            raise RequestError(
                400, f"tools must have at most {MAX_TOOL_BYTES} bytes of parameters, got {size}", "tools"
            )
        names = [tool.function.name for tool in self.tools]
        if twice := [name for name in names if names.count(name) > 1]:
            raise RequestError(400, f"tools must have different names, got {twice[0]!r} twice", "tools")
        wanted = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        if wanted is not None and wanted not in names:
            raise RequestError(400, f"tool_choice must name one of tools, got {wanted!r}", "tool_choice")
        if self.tool_choice == "required" and not names:
            raise RequestError(400, "tool_choice must be 'auto' or 'none' without tools, got 'required'", "tool_choice")
        if self.must_call and self.answer_part is not None:
            what = "response_format must be left out where tool_choice requires a call, which has its own format"
            raise RequestError(400, what, "response_format")

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a call."""
        return self.tool_choice not in ("none", "auto")

    @property
    def uses_tools(self) -> bool:
        """Whether there are tools to call, or messages with calls or their results."""
        called = bool(self.tools) and self.tool_choice != "none"
        return called or any(one.tool_calls or one.role == "tool" for one in self.messages)

    @property
    def wanted_logprobs(self) -> int | None:
        """Number of likeliest tokens to return; None for no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None


def read_body(kind: type[Chat] | type[Completion], data: bytes | bytearray) -> Chat | Completion:
    """Return the body of a request; raise RequestError if it is not JSON, or asks for what is not served."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        # of two forms that a field may have, the one that was meant fails further in
        first = max(error.errors(include_url=False), key=lambda one: len(one["loc"]))
        # without the names of forms and types
        names = [str(name) for name in first["loc"] if not isinstance(name, str) or FIELD.fullmatch(name)]
        where = ascii_only(".".join(names))[:100]
        what = ascii_only(first["msg"].removeprefix("Value error, "))
        if not where:
            kind_of_body = "JSON" if first["type"] == "json_invalid" else "a JSON object"
            message = f"the body must be {kind_of_body}, got: {what.removeprefix('Invalid JSON: ')}"
            raise RequestError(400, message[:500], code="invalid_json") from None
        # the beginning alone: one call for all of it would stop every thread
        given = ascii_only("".join(itertools.islice(json.JSONEncoder().iterencode(first["input"]), 50)))[:50]
        if first["type"] == "extra_forbidden":
            verb = "are" if names[-1].endswith("s") else "is"
            message = f"{where} {verb} not supported, got {given}; leave it out"
            raise RequestError(400, message, where, "unsupported_parameter") from None
        shown = "" if first["type"] in ("missing", "too_long", "too_short", "value_error") else f", got {given}"
        raise RequestError(400, f"{where}: {what[:400]}{shown}", where) from None


ScoredToken = tuple[int, int, Logprob | None]  # a token, where it begins in the text, and its logprobs


@dataclass
class CompletionChoice:
    """State of one answer."""

    index: int
    prompt: Sequence[int]
    tokenizer: Tokenizer
    stops: Sequence[str]
    echo: str = ""
    score_prompt: bool = False  # whether logprobs of the prompt come, which is echoed
    silent: bool = False  # whether it has no tokens: only its prompt is wanted
    min_tokens: int = 0  # tokens in whose text no stop string is looked for
    parser: AnswerParser | None = None  # of its text, where that may be more than content
    finish: str | None = None
    length: int = 0  # characters of its tokens so far, with those that may yet begin a stop string
    num_cached: int = 0
    ids: list[int] = field(default_factory=list)
    # tokens with logprobs since the writer took them: of the prompt, whose first one has none, and of the answer
    scored: list[ScoredToken] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.tokenizer.decode, self.prompt)
        self._stops = StopStrings(self.stops)
        self._texts: list[str] = []
        self._prompt_tokens = self._with_offsets(self.prompt)
        if self.score_prompt:
            self.scored.append((*next(self._prompt_tokens), None))

    @property
    def text(self) -> str:
        """All of its text so far."""
        return "".join(self._texts)

    def push(self, event: Event) -> str:
        """Add an event; return the text that it adds, or raise RequestError if it is a failure."""
        if event.failure is not None:
            status, message, code = event.failure
            raise RequestError(status, message, code=code)
        self.num_cached = event.num_cached
        self.scored += ((*next(self._prompt_tokens), logprob) for logprob in event.scores)
        if self.silent:
            self.finish = "length" if event.token is not None or event.finish is not None else None
            return ""
        piece = ""
        if event.token is not None:
            self.ids.append(event.token)
            if event.details is not None:
                self.scored.append((event.token, len(self.echo) + self.length, event.details))
            piece = self._before_stops(self._text_of(event.token))
        if event.finish is not None:
            piece += self._before_stops(self._detokenizer.rest()) + self._stops.rest()
        self._texts.append(piece)
        self.finish = "stop" if self._stops.found else event.finish
        return piece

    def parse(self, piece: str) -> list[dict[str, Any]]:
        """Return the parts of a message that a piece of the text adds, as a stream has them (`AnswerParser`)."""
        if self.parser is None:
            return [{"content": piece}] if piece else []
        deltas = self.parser.push(piece)
        if self.parser.done:
            self.finish = self.finish or "stop"
        if self.finish is not None:
            deltas += self.parser.end()
            if self.finish == "stop" and self.parser.calls:
                self.finish = "tool_calls"
        return deltas

    def message(self) -> dict[str, Any]:
        """Return the message of an answer that has ended."""
        return {"content": self.text} if self.parser is None else self.parser.message()

    def _text_of(self, token: int) -> str:
        """Return the text that is certain after a token; that of a special one where it means something to the parser."""
        mark = None if self.parser is None else self.parser.marks.get(token)
        return self._detokenizer.push(token) if mark is None else self._detokenizer.rest() + mark

    def _with_offsets(self, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield each token, and where it begins in their text."""
        detokenizer, length = Detokenizer(self.tokenizer.decode), 0
        for token in tokens:
            yield token, length
            length += len(detokenizer.push(token))

    def _before_stops(self, piece: str) -> str:
        """Return the part of some more text that certainly comes before any stop string."""
        self.length += len(piece)
        return self._stops.push(piece) if len(self.ids) > self.min_tokens else piece


def sse_line(chunk: dict[str, Any]) -> bytes:
    """Return an object as a stream sends it."""
    return b"data: " + _to_json(chunk) + b"\n\n"


class ResponseWriter:
    """The answer to one request: at once, or as the lines of a stream, which accumulate while a client does not read."""

    def __init__(
        self,
        chat: bool,
        model: str,
        tokenizer: Tokenizer,
        prompts: Sequence[Sequence[int]],
        choices: Sequence[CompletionChoice],  # the same number for each prompt, in order
        *,
        with_usage: bool = False,  # whether a stream ends with the usage
        continuous_usage: bool = False,  # whether each chunk has the usage so far
        with_ids: bool = False,  # whether answers and chunks have the field `token_ids`, and tokens without text a chunk
    ) -> None:
        self._chat, self._tokenizer, self._prompts, self._choices = chat, tokenizer, prompts, choices
        self._with_usage, self._continuous_usage, self._with_ids = with_usage, continuous_usage, with_ids
        name = ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex
        self._common = {"id": name, "created": int(time.time()), "model": model}
        self._chunk = {**self._common, "object": "chat.completion.chunk" if chat else "text_completion"}
        self._chunk |= {"usage": None} if with_usage else {}
        self._opened: set[int] = set()
        self._lines: list[bytes] = []
        # JSON of the logprobs of each choice, in the columns of its format
        names = ("content",) if chat else ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        self._columns: list[dict[str, list[bytes]]] = [{name: [] for name in names} for _ in choices]
        for place in range(len(choices)):
            self._encode(place)

    def record(self, place: int, event: Event) -> bool:
        """Add an event of a choice; return whether the choice has ended, or raise RequestError if it has failed."""
        choice = self._choices[place]
        piece = choice.push(event)
        if self._chat:
            choice.parse(piece)
        self._encode(place)
        return choice.finish is not None

    def whole(self) -> bytes:
        """Return the JSON of the answer at once."""
        choices = []
        for place, choice in enumerate(self._choices):
            body: dict[str, Any] = {"text": choice.echo + choice.text}
            if self._chat:
                body = {"message": {"role": "assistant", **choice.message()}}
            body |= {"token_ids": choice.ids} if self._with_ids else {}
            logprobs = self._take_logprobs(place)
            choices.append({"index": choice.index, **body, "logprobs": logprobs, "finish_reason": choice.finish})
        kind = "chat.completion" if self._chat else "text_completion"
        return _to_json({**self._common, "object": kind, "choices": choices, "usage": self._usage()})

    def push(self, place: int, event: Event) -> bool:
        """Add an event of a choice, and its lines; see `record`."""
        choice = self._choices[place]
        known = len(choice.ids)
        piece = choice.push(event)
        if event.scores:
            self._encode(place)
            return False  # they come with the echo
        if place not in self._opened:
            self._opened.add(place)
            if self._chat:
                self._add(place, {"delta": {"role": "assistant", "content": ""}})
            elif choice.echo or choice.score_prompt:
                self._add(place, {"text": choice.echo})
        scored = bool(choice.scored)
        self._encode(place)
        bodies: list[dict[str, Any]] = [{"text": piece}] if piece else []
        if self._chat:
            bodies = [{"delta": delta} for delta in choice.parse(piece)]
        if not bodies and (scored or (len(choice.ids) > known and self._with_ids)):
            bodies = [{"delta": {"content": ""}} if self._chat else {"text": ""}]
        for i, body in enumerate(bodies):
            # tokens and logprobs belong to the first part that they bring
            self._add(place, {**body, "token_ids": [] if i else choice.ids[known:]} if self._with_ids else body)
        if choice.finish is None:
            return False
        self._add(place, {"delta": {}} if self._chat else {"text": ""}, finish=choice.finish)
        return True

    def take(self) -> bytes:
        """Return the lines since the last call."""
        data = b"".join(self._lines)
        self._lines.clear()
        return data

    def end(self) -> bytes:
        """Return the last lines of the stream."""
        usage = sse_line({**self._chunk, "choices": [], "usage": self._usage()}) if self._with_usage else b""
        return self.take() + usage + b"data: [DONE]\n\n"

    def _add(self, place: int, body: dict[str, Any], finish: str | None = None) -> None:
        rest = {"logprobs": self._take_logprobs(place), "finish_reason": finish}
        usage = {"usage": self._usage()} if self._continuous_usage else {}
        self._lines.append(
            sse_line({**self._chunk, "choices": [{"index": self._choices[place].index, **body, **rest}], **usage})
        )

    def _usage(self) -> dict[str, Any]:
        """Return the token counts; prompts count once, whatever n is."""
        prompt, generated = sum(map(len, self._prompts)), sum(len(choice.ids) for choice in self._choices)
        per_prompt = len(self._choices) // len(self._prompts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": sum(one.num_cached for one in self._choices[::per_prompt])},
        }

    def _encode(self, place: int) -> None:
        """Encode logprobs as they come: those of a long answer, or of many, would stop the event loop at its end."""
        columns, choice = self._columns[place], self._choices[place]
        for token, offset, found in choice.scored:
            if self._chat:
                assert found is not None, "a chat echoes nothing"
                top = [self._entry(one, value) for one, value in found.top]
                columns["content"].append(_to_json({**self._entry(token, found.logprob), "top_logprobs": top}))
                continue
            columns["tokens"].append(_to_json(self._text(token)))
            columns["token_logprobs"].append(_to_json(None if found is None else _number(found.logprob)))
            columns["top_logprobs"].append(_to_json(None if found is None else self._by_text(found.top)))
            columns["text_offset"].append(_to_json(offset))
        choice.scored.clear()

    def _take_logprobs(self, place: int) -> dict[str, Any] | None:
        """Return the logprobs of a choice since the last call; None without any."""
        columns = self._columns[place]
        if not next(iter(columns.values())):
            return None
        taken: dict[str, Any] = {name: msgspec.Raw(b"[" + b",".join(column) + b"]") for name, column in columns.items()}
        for column in columns.values():
            column.clear()
        return taken | ({"refusal": None} if self._chat else {})

    def _by_text(self, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Return the likeliest tokens by their texts; of several with one text the likeliest."""
        found: dict[str, float] = {}
        for token, value in top:
            found.setdefault(self._text(token), _number(value))
        return found

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, raw = self._text_and_bytes(token)
        return {"token": text, "logprob": _number(logprob), "bytes": None if raw is None else list(raw)}

    def _text(self, token: int) -> str:
        return self._text_and_bytes(token)[0]

    def _text_and_bytes(self, token: int) -> tuple[str, bytes | None]:
        """Return a token's text, for a part of a character `bytes:` and its bytes as OpenAI writes them, and its bytes if known."""
        text = text_alone(self._tokenizer.decode, token)
        if REPLACEMENT not in text:
            return text, text.encode()
        raw = self._tokenizer.token_bytes(token)
        whole = raw is None or raw == text.encode()
        return text if whole else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw or ()), raw


def _number(logprob: float) -> float:
    """Return a number of JSON: OpenAI's value in place of minus infinity."""
    return logprob if math.isfinite(logprob) else -9999.0
