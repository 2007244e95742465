"""What requests may say and what answers look like: the parts of OpenAI's interface that are served.

Owns bodies, their refusals, and the objects of answers, chunks and errors. Refuses to know HTTP (http.py) and the engine.
Nothing is accepted and ignored: a field that is not served may only have the value that means nothing.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import to_json

from ringattn.inference.block_table import MAX_REQUEST_TOKENS
from ringattn.launch.serving.sampling import Logprob, Sampling
from ringattn.launch.serving.scheduling import Event
from ringattn.launch.serving.text import REPLACEMENT, Pieces, Stops, Tokenizer, text_alone

MOST_CHOICES = 128
MOST_STOPS = 16
MOST_LOGPROBS = 20
COMPLETION_TOKENS = 16
"""New tokens of a completion that does not say how many: OpenAI's default."""

_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "service_unavailable_error"}


class Refused(Exception):
    """A request gets an error instead of an answer.

    Args:
        status: Of HTTP.
        message: For the user.
        param: The field that it is about.
        code: A word for programs.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """In OpenAI's format."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, said: Any) -> Any:
        """Clients that write down what they do not say write null."""
        return {name: value for name, value in said.items() if value is not None} if isinstance(said, dict) else said


class StreamOptions(_Strict):
    """Of a stream: whether its last chunk has the usage."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class _Body(_Strict):
    """What both kinds of request may say."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1, le=MAX_REQUEST_TOKENS)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # says nothing about the answer
    metadata: dict[str, str] | None = None  # likewise
    ignore_eos: bool = False  # goes on to max_tokens, for measurements; like the next, not OpenAI's, named as elsewhere
    return_token_ids: bool | None = None  # says the answer's tokens as numbers, those without text of their own too
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    @field_validator("presence_penalty", "frequency_penalty", "logit_bias")
    @classmethod
    def _nothing(cls, value: Any) -> Any:
        if value:
            raise ValueError(f"must be left out, got {value}: it is not supported")
        return value

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        strings = [value] if isinstance(value, str) else value or []
        if len(strings) > MOST_STOPS or not all(0 < len(string) <= 1000 for string in strings):
            raise ValueError(f"must be at most {MOST_STOPS} strings of 1 to 1000 characters")
        return value

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def choices(self) -> int:
        """Answers per prompt."""
        return self.n or 1

    def wanted_logprobs(self) -> int | None:
        """How many of the likeliest tokens to name; None for no logprobs."""
        raise NotImplementedError("each kind of request says this in its own way")

    def sampling(self, choice: int) -> Sampling:
        """How the tokens of a choice are chosen: each of several has a seed of its own."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=None if self.seed is None else self.seed + choice,
            logprobs=self.wanted_logprobs(),
        )


class Completion(_Body):
    """The body of /v1/completions."""

    prompt: Any
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    best_of: int | None = None
    suffix: str | None = None

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, value: str | None) -> str | None:
        if value:
            raise ValueError("must be left out: inserting text is not supported")
        return value

    def wanted_logprobs(self) -> int | None:
        """See `_Body`."""
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """The prompts: each a text or tokens.

        Raises:
            Refused: They are something else, or none.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt, list) and prompt:
            if all(type(x) is int for x in prompt):
                return [prompt]
            if all(isinstance(x, str) for x in prompt):
                return prompt
            if all(isinstance(x, list) and x and all(type(y) is int for y in x) for x in prompt):
                return prompt
        raise Refused(
            400, "prompt must be a string, a list of strings, tokens, or lists of tokens; none may be empty", "prompt"
        )


class TextPart(_Strict):
    """A part of a message: text only."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """A message of a chat. Fields that answers have, and that clients send back, may be there with nothing in them."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    refusal: None = None
    tool_calls: list[Any] | None = Field(None, max_length=0)
    function_call: None = None
    audio: None = None
    annotations: None = None

    def plain(self) -> dict[str, str]:
        """As a chat template takes it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class TextFormat(_Strict):
    """The only format of answers."""

    type: Literal["text"]


class Chat(_Body):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_REQUEST_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    response_format: TextFormat | None = None
    tools: list[Any] | None = Field(None, max_length=0)
    tool_choice: Literal["none"] | None = None

    def wanted_logprobs(self) -> int | None:
        """See `_Body`."""
        return (self.top_logprobs or 0) if self.logprobs else None


def read_body(kind: type[_Body], data: bytes) -> Any:
    """A request's body.

    Args:
        kind: `Completion` or `Chat`.
        data: As it came.

    Raises:
        Refused: It is not JSON, or says what is not served.
    """
    try:
        content = json.loads(data, parse_constant=_no_constant)
    except RecursionError:
        raise Refused(400, "the body must be JSON, got one that is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        raise Refused(400, f"the body must be JSON, got: {ascii_only(str(error))}", code="invalid_json") from None
    if not isinstance(content, dict):
        raise Refused(400, f"the body must be a JSON object, got {type(content).__name__}", code="invalid_json")
    try:
        body = kind.model_validate(content)
    except ValidationError as error:
        # where one of two forms may be said, that which was meant fails further in
        first = max(error.errors(include_url=False, include_input=False), key=lambda one: len(one["loc"]))
        where = ascii_only(".".join(map(str, first["loc"])))[:100]
        if first["type"] == "extra_forbidden":
            raise Refused(
                400, f"{where} must be left out: it is not supported", where, "unsupported_parameter"
            ) from None
        what = ascii_only(first["msg"].removeprefix("Value error, "))
        raise Refused(400, f"{where}: {what}"[:500], where) from None
    if body.stream_options is not None and not body.stream:
        raise Refused(400, "stream_options must be left out when stream is not true", "stream_options")
    if isinstance(body, Completion) and body.best_of not in (None, body.choices):
        raise Refused(400, f"best_of must be left out or equal n, got {body.best_of}", "best_of")
    if isinstance(body, Completion) and body.echo and body.logprobs is not None:
        raise Refused(400, "echo must be left out when logprobs are wanted: those of a prompt are not kept", "echo")
    if isinstance(body, Chat) and body.top_logprobs is not None and not body.logprobs:
        raise Refused(400, "top_logprobs must be left out when logprobs is not true", "top_logprobs")
    if isinstance(body, Chat) and None not in (body.max_tokens, body.max_completion_tokens):
        raise Refused(400, "max_tokens must be left out beside max_completion_tokens", "max_tokens")
    return body


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def ascii_only(text: str) -> str:
    """A text that every client can decode: what a request said may not be text at all."""
    return text.encode("ascii", "backslashreplace").decode()


@dataclass
class Choice:
    """One answer as it grows.

    Args:
        index: Its place among the answers to a request.
        prompt: The tokens of its prompt.
        tokenizer: Of the model.
        stops: Strings that end it.
        echo: Text that comes before it.

    Attributes:
        finish: Why it has ended; None while it has not.
        length: Characters of its tokens so far, with those that may yet begin a stop string.
        shared: How many of its prompt's were in the cache.
        ids: Its tokens.
        logprobs: Of its tokens: (token, its text, what the model thought, where it begins in the text).
    """

    index: int
    prompt: Sequence[int]
    tokenizer: Tokenizer
    stops: Sequence[str]
    echo: str = ""
    finish: str | None = None
    length: int = 0
    shared: int = 0
    ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, Logprob, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._pieces = Pieces(self.tokenizer.decode, self.prompt)
        self._stops = Stops(self.stops)
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self._texts)

    def push(self, event: Event) -> str:
        """What an event adds to the text.

        Raises:
            Refused: The event is a failure.
        """
        if event.failure is not None:
            status, message = event.failure
            raise Refused(status, message, code="unavailable" if status == 503 else None)
        self.shared = event.shared
        piece = ""
        if event.token is not None:
            self.ids.append(event.token)
            if event.details is not None:
                self.logprobs.append((event.token, event.details, self.length))
            piece = self._cut(self._pieces.push(event.token))
        if event.finish is not None:
            piece += self._cut(self._pieces.rest())
            piece += self._stops.rest()
        if piece:
            self._texts.append(piece)
        if self._stops.found:
            self.finish = "stop"
        elif event.finish is not None:
            self.finish = event.finish
        return piece

    def _cut(self, piece: str) -> str:
        """What of some more text certainly comes before any stop string."""
        self.length += len(piece)
        return self._stops.push(piece)


def usage(prompts: Sequence[Sequence[int]], choices: Sequence[Choice]) -> dict[str, Any]:
    """How many tokens a request took; prompts count once, whatever n is."""
    prompt, generated = sum(map(len, prompts)), sum(len(choice.ids) for choice in choices)
    per_prompt = len(choices) // max(1, len(prompts))
    cached = sum(choice.shared for choice in choices[::per_prompt])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def line(chunk: dict[str, Any]) -> bytes:
    """An object as a stream sends it."""
    return b"data: " + to_json(chunk) + b"\n\n"


class Writer:
    """The objects of one answer, and the lines of a stream.

    Args:
        chat: Whether it answers a chat.
        model: The model's name.
        tokenizer: For the texts of single tokens.
        with_usage: Whether chunks have the field `usage`.
        with_ids: Whether answers and pieces have the field `token_ids`.
    """

    def __init__(
        self, chat: bool, model: str, tokenizer: Tokenizer, with_usage: bool = False, with_ids: bool = False
    ) -> None:
        self._chat, self._with_usage, self._with_ids = chat, with_usage, with_ids
        self._decode = tokenizer.decode
        name = ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex
        self._common = {"id": name, "created": int(time.time()), "model": model}
        self._forms: dict[int, tuple[bytes, ...]] = {}

    def whole(self, prompts: Sequence[Sequence[int]], choices: Sequence[Choice]) -> dict[str, Any]:
        """The answer at once."""
        made = []
        for choice in choices:
            said = self._logprobs(choice, 0)
            body: dict[str, Any] = (
                {"message": {"role": "assistant", "content": choice.text}}
                if self._chat
                else {"text": choice.echo + choice.text}
            )
            body |= {"token_ids": choice.ids} if self._with_ids else {}
            made.append({"index": choice.index, **body, "logprobs": said, "finish_reason": choice.finish})
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._common, "object": kind, "choices": made, "usage": usage(prompts, choices)}

    def opening(self, choice: Choice) -> bytes:
        """The first line of a choice, before any token; may be none."""
        if self._chat:
            return line(self._chunk(choice.index, {"delta": {"role": "assistant", "content": ""}}, None, None))
        return line(self._chunk(choice.index, {"text": choice.echo}, None, None)) if choice.echo else b""

    def piece(self, choice: Choice, text: str, said: int) -> bytes:
        """A line with some text; of the answer's tokens `said` have been sent before."""
        form = self._forms.get(choice.index) or self._form(choice.index)
        ids = to_json(choice.ids[said:]) if self._with_ids else b""
        logprobs = to_json(self._logprobs(choice, said)) if choice.logprobs else b"null"
        return form[0] + to_json(text) + form[1] + ids + form[2] + logprobs + form[3]

    def closing(self, choice: Choice) -> bytes:
        """The last line of a choice."""
        body: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        return line(self._chunk(choice.index, body, None, choice.finish))

    def usage(self, prompts: Sequence[Sequence[int]], choices: Sequence[Choice]) -> bytes:
        """The line with the usage, after all choices."""
        chunk = {**self._common, "object": self._kind, "choices": [], "usage": usage(prompts, choices)}
        return line(chunk)

    def _form(self, index: int) -> tuple[bytes, ...]:
        """What stands before, between and after the text, the tokens and the logprobs in all pieces of a choice."""
        text, ids, logprobs = marks = [f"{self._common['id']} {x}" for x in range(3)]
        body: dict[str, Any] = {"delta": {"content": text}} if self._chat else {"text": text}
        body |= {"token_ids": ids} if self._with_ids else {}
        rest, form = line(self._chunk(index, body, logprobs, None)), []
        for mark in marks:
            before, found, after = rest.partition(to_json(mark))
            form.append(before if found else b"")
            rest = after if found else before
        self._forms[index] = (*form, rest)
        return self._forms[index]

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _chunk(self, index: int, body: dict[str, Any], logprobs: Any, finish: str | None) -> dict[str, Any]:
        choice = {"index": index, **body, "logprobs": logprobs, "finish_reason": finish}
        chunk = {**self._common, "object": self._kind, "choices": [choice]}
        return {**chunk, "usage": None} if self._with_usage else chunk

    def _logprobs(self, choice: Choice, said: int) -> dict[str, Any] | None:
        rows = choice.logprobs[said:]
        if not rows:
            return None
        if self._chat:
            content = []
            for token, found, _ in rows:
                top = [self._entry(one, value) for one, value in found.top]
                content.append({**self._entry(token, found.logprob), "top_logprobs": top})
            return {"content": content, "refusal": None}
        return {
            "tokens": [self._text(token) for token, _, _ in rows],
            "token_logprobs": [_number(found.logprob) for _, found, _ in rows],
            "top_logprobs": [self._by_text(found.top) for _, found, _ in rows],
            "text_offset": [len(choice.echo) + offset for _, _, offset in rows],
        }

    def _by_text(self, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """The likeliest tokens by their texts; of several with one text the likeliest."""
        said: dict[str, float] = {}
        for token, value in top:
            said.setdefault(self._text(token), _number(value))
        return said

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        # a part of a character has bytes that its text does not say
        known = None if REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": _number(logprob), "bytes": known}

    def _text(self, token: int) -> str:
        return text_alone(self._decode, token)


class Lines:
    """The lines that events make of choices, until they are taken: all that follow, where a client does not read.

    Args:
        writer: Of the answer.
        choices: In the order of their places.
        with_ids: Whether a token without text has a line too.
    """

    def __init__(self, writer: Writer, choices: Sequence[Choice], with_ids: bool) -> None:
        self._writer, self._choices, self._with_ids = writer, choices, with_ids
        self._opened: set[int] = set()
        self._lines: list[bytes] = []

    def push(self, place: int, event: Event) -> bool:
        """Takes what happened to a choice; returns whether it has ended.

        Raises:
            Refused: The event is a failure.
        """
        choice = self._choices[place]
        said = len(choice.ids)
        piece = choice.push(event)
        if place not in self._opened:
            self._opened.add(place)
            self._lines += filter(None, [self._writer.opening(choice)])
        if piece or (len(choice.ids) > said and (self._with_ids or choice.logprobs)):
            self._lines.append(self._writer.piece(choice, piece, said))
        if choice.finish is None:
            return False
        self._lines.append(self._writer.closing(choice))
        return True

    def take(self) -> bytes:
        """Those that have been made since the last call."""
        lines, self._lines = self._lines, []
        return lines[0] if len(lines) == 1 else b"".join(lines)


def _number(logprob: float) -> float:
    """What JSON can say: OpenAI's stand-in for minus infinity."""
    return logprob if math.isfinite(logprob) else -9999.0
