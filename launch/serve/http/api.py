"""Bodies of requests and answers: the parts of OpenAI's interface that are served.

Owns validation of bodies, and the objects of answers, chunks and errors. HTTP itself is in app.py.
Nothing is accepted and ignored: a field that is not served may only have a value that asks for nothing.
"""

from __future__ import annotations

import json
import math
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import to_json

from ringattn.inference.block_table import MAX_REQUEST_TOKENS
from ringattn.launch.serve.http.detokenizer import Detokenizer, StopStrings, text_alone
from ringattn.launch.serve.messages import Event, Logprob
from ringattn.launch.serve.sampling import Sampling
from ringattn.launch.serve.tokenizer import REPLACEMENT, Tokenizer

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_NAMED = 1024
"""Tokens that `logit_bias` or `stop_token_ids` may name."""
COMPLETION_TOKENS = 16
"""New tokens of a completion that does not say how many: OpenAI's default."""

TOKEN = re.compile("0|[1-9][0-9]{0,8}")

_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "service_unavailable_error"}


class RequestError(Exception):
    """An error that a request gets instead of an answer.

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
        """Drop null fields, which some clients send for absent ones."""
        return {name: value for name, value in said.items() if value is not None} if isinstance(said, dict) else said


class StreamOptions(_Strict):
    """Of a stream: whether its last chunk has the usage."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class _Body(_Strict):
    """Fields of both kinds of request."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1, le=MAX_REQUEST_TOKENS)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # what says nothing about the answer, and the values of others that ask for nothing: clients send them unasked
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    parallel_tool_calls: bool | None = None  # of no tools
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    reasoning_effort: Literal["none", "medium"] | None = None  # both are defaults of OpenAI's models
    verbosity: Literal["medium"] | None = None
    ignore_eos: bool = False  # goes on to max_tokens, for measurements; not OpenAI's, as is the next
    return_token_ids: bool | None = None  # says the answer's tokens as numbers, those without text of their own too
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, float] = Field({}, max_length=MAX_NAMED)
    # not OpenAI's, named as vLLM has them
    top_k: int = Field(0, ge=-1, le=MAX_REQUEST_TOKENS)  # 0 and -1: all
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    stop_token_ids: list[int] = Field([], max_length=MAX_NAMED)

    @field_validator("logit_bias")
    @classmethod
    def _biases(cls, value: dict[str, float]) -> dict[str, float]:
        for token, bias in value.items():
            if not TOKEN.fullmatch(token) or not -100 <= bias <= 100:
                raise ValueError(
                    f"must have tokens, as digits, with numbers from -100 to 100, got {token[:20]!r}: {bias}"
                )
        return value

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        strings = [value] if isinstance(value, str) else value or []
        if len(strings) > MAX_STOPS or not all(0 < len(string) <= 1000 for string in strings):
            raise ValueError(f"must be at most {MAX_STOPS} strings of 1 to 1000 characters")
        return value

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def biases(self) -> dict[int, float]:
        """Biases of logits by token."""
        return {int(token): bias for token, bias in self.logit_bias.items()}

    @property
    def choices(self) -> int:
        """Answers per prompt."""
        return self.n or 1

    def wanted_logprobs(self) -> int | None:
        """Number of likeliest tokens to return; None for no logprobs."""
        raise NotImplementedError("each kind of request says this in its own way")

    def sampling(self, choice: int) -> Sampling:
        """Return the sampling of a choice; each of several has its own seed."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=None if self.seed is None else self.seed + choice,
            logprobs=self.wanted_logprobs(),
            top_k=max(0, self.top_k),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple(self.biases.items()),
        )

    def check_tokens(self, vocab_size: int) -> None:
        """Refuses tokens that the model does not have.

        Raises:
            RequestError: `logit_bias` or `stop_token_ids` names one.
        """
        for name, tokens in (("logit_bias", self.biases), ("stop_token_ids", self.stop_token_ids)):
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise RequestError(400, f"{name}: tokens must be from 0 to {vocab_size - 1}, got {token}", name)


class Completion(_Body):
    """The body of /v1/completions."""

    prompt: Any
    max_tokens: int | None = Field(None, ge=0, le=MAX_REQUEST_TOKENS)  # 0: the prompt alone, with echo
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
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
            RequestError: They are something else, or none.
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
        raise RequestError(
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

    def template_message(self) -> dict[str, str]:
        """Return the message for a chat template."""
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
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
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
        RequestError: It is not JSON, or says what is not served.
    """
    try:
        content = json.loads(data, parse_constant=_no_constant)
    except RecursionError:
        raise RequestError(
            400, "the body must be JSON, got one that is nested too deeply", code="invalid_json"
        ) from None
    except ValueError as error:
        raise RequestError(400, f"the body must be JSON, got: {ascii_only(str(error))}", code="invalid_json") from None
    if not isinstance(content, dict):
        raise RequestError(400, f"the body must be a JSON object, got {type(content).__name__}", code="invalid_json")
    try:
        body = kind.model_validate(content)
    except ValidationError as error:
        # where one of two forms may be said, that which was meant fails further in
        first = max(error.errors(include_url=False, include_input=False), key=lambda one: len(one["loc"]))
        where = ascii_only(".".join(map(str, first["loc"])))[:100]
        if first["type"] == "extra_forbidden":
            raise RequestError(
                400, f"{where} must be left out: it is not supported", where, "unsupported_parameter"
            ) from None
        what = ascii_only(first["msg"].removeprefix("Value error, "))
        raise RequestError(400, f"{where}: {what}"[:500], where) from None
    if body.stream_options is not None and not body.stream:
        raise RequestError(400, "stream_options must be left out when stream is not true", "stream_options")
    if isinstance(body, Completion) and body.best_of not in (None, body.choices):
        raise RequestError(400, f"best_of must be left out or equal n, got {body.best_of}", "best_of")
    if isinstance(body, Completion) and body.max_tokens == 0 and not body.echo:
        raise RequestError(400, "max_tokens: must be at least 1 when echo is not true, got 0", "max_tokens")
    if isinstance(body, Chat) and body.top_logprobs is not None and not body.logprobs:
        raise RequestError(400, "top_logprobs must be left out when logprobs is not true", "top_logprobs")
    if isinstance(body, Chat) and None not in (body.max_tokens, body.max_completion_tokens):
        raise RequestError(400, "max_tokens must be left out beside max_completion_tokens", "max_tokens")
    return body


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def ascii_only(text: str) -> str:
    """Return a text that every client can decode."""
    return text.encode("ascii", "backslashreplace").decode()


Said = tuple[int, Logprob | None, int]
"""A token, what the model thought of it, and where it begins in the text."""


@dataclass
class Choice:
    """State of one answer.

    Args:
        index: Its place among the answers to a request.
        prompt: The tokens of its prompt.
        tokenizer: Of the model.
        stops: Strings that end it.
        echo: Text that comes before it.
        score_prompt: Whether logprobs of the prompt come, which is echoed.
        silent: Whether it has no tokens: only its prompt is wanted.

    Attributes:
        finish: Why it has ended; None while it has not.
        length: Characters of its tokens so far, with those that may yet begin a stop string.
        num_cached: Tokens of its prompt that were in the cache.
        ids: Its tokens.
        logprobs: Of its tokens: (token, its logprobs, where it begins in the text with the echo).
        echoed: The same of its prompt's, whose first one has none.
    """

    index: int
    prompt: Sequence[int]
    tokenizer: Tokenizer
    stops: Sequence[str]
    echo: str = ""
    score_prompt: bool = False
    silent: bool = False
    finish: str | None = None
    length: int = 0
    num_cached: int = 0
    ids: list[int] = field(default_factory=list)
    logprobs: list[Said] = field(default_factory=list)
    echoed: list[Said] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.tokenizer.decode, self.prompt)
        self._stops = StopStrings(self.stops)
        self._texts: list[str] = []
        self._prompt_detokenizer, self._echoed_length = Detokenizer(self.tokenizer.decode), 0
        if self.score_prompt:
            self._echo(None)

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self._texts)

    def push(self, event: Event) -> str:
        """Add an event; return the text that it adds.

        Raises:
            RequestError: The event is a failure.
        """
        if event.failure is not None:
            status, message = event.failure
            raise RequestError(status, message, code="unavailable" if status == 503 else None)
        self.num_cached = event.num_cached
        for one in event.scores:
            self._echo(one)
        if self.silent:
            self.finish = "length" if event.token is not None or event.finish is not None else None
            return ""
        piece = ""
        if event.token is not None:
            self.ids.append(event.token)
            if event.details is not None:
                self.logprobs.append((event.token, event.details, len(self.echo) + self.length))
            piece = self._stop_deadline(self._detokenizer.push(event.token))
        if event.finish is not None:
            piece += self._stop_deadline(self._detokenizer.rest())
            piece += self._stops.rest()
        if piece:
            self._texts.append(piece)
        if self._stops.found:
            self.finish = "stop"
        elif event.finish is not None:
            self.finish = event.finish
        return piece

    def _echo(self, said: Logprob | None) -> None:
        """Add the logprobs of the prompt's next token."""
        token = self.prompt[len(self.echoed)]
        self.echoed.append((token, said, self._echoed_length))
        self._echoed_length += len(self._prompt_detokenizer.push(token))

    def _stop_deadline(self, piece: str) -> str:
        """Return the part of some more text that certainly comes before any stop string."""
        self.length += len(piece)
        return self._stops.push(piece)


def usage(prompts: Sequence[Sequence[int]], choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the token counts of a request; prompts count once, whatever n is."""
    prompt, generated = sum(map(len, prompts)), sum(len(choice.ids) for choice in choices)
    per_prompt = len(choices) // max(1, len(prompts))
    cached = sum(choice.num_cached for choice in choices[::per_prompt])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def sse_line(chunk: dict[str, Any]) -> bytes:
    """An object as a stream sends it."""
    return b"data: " + to_json(chunk) + b"\n\n"


class ResponseWriter:
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
            said = self._logprobs(choice.echoed + choice.logprobs)
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
            return sse_line(self._chunk(choice.index, {"delta": {"role": "assistant", "content": ""}}, None, None))
        said = self._logprobs(choice.echoed)
        return sse_line(self._chunk(choice.index, {"text": choice.echo}, said, None)) if choice.echo or said else b""

    def piece(self, choice: Choice, text: str, said: int) -> bytes:
        """A line with some text; of the answer's tokens `said` have been sent before."""
        form = self._forms.get(choice.index) or self._form(choice.index)
        ids = to_json(choice.ids[said:]) if self._with_ids else b""
        logprobs = to_json(self._logprobs(choice.logprobs[said:])) if choice.logprobs else b"null"
        return form[0] + to_json(text) + form[1] + ids + form[2] + logprobs + form[3]

    def closing(self, choice: Choice) -> bytes:
        """The last line of a choice."""
        body: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        return sse_line(self._chunk(choice.index, body, None, choice.finish))

    def usage(self, prompts: Sequence[Sequence[int]], choices: Sequence[Choice]) -> bytes:
        """The line with the usage, after all choices."""
        chunk = {**self._common, "object": self._kind, "choices": [], "usage": usage(prompts, choices)}
        return sse_line(chunk)

    def _form(self, index: int) -> tuple[bytes, ...]:
        """Return the constant parts around the text, the tokens and the logprobs in all pieces of a choice."""
        text, ids, logprobs = events = [f"{self._common['id']} {x}" for x in range(3)]
        body: dict[str, Any] = {"delta": {"content": text}} if self._chat else {"text": text}
        body |= {"token_ids": ids} if self._with_ids else {}
        rest, form = sse_line(self._chunk(index, body, logprobs, None)), []
        for mark in events:
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

    def _logprobs(self, rows: Sequence[Said]) -> dict[str, Any] | None:
        if not rows:
            return None
        if self._chat:
            content = []
            for token, found, _ in rows:
                assert found is not None, "a chat echoes nothing"
                top = [self._entry(one, value) for one, value in found.top]
                content.append({**self._entry(token, found.logprob), "top_logprobs": top})
            return {"content": content, "refusal": None}
        return {
            "tokens": [self._text(token) for token, _, _ in rows],
            "token_logprobs": [None if found is None else _number(found.logprob) for _, found, _ in rows],
            "top_logprobs": [None if found is None else self._by_text(found.top) for _, found, _ in rows],
            "text_offset": [offset for _, _, offset in rows],
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


class StreamLines:
    """Lines of a stream that were not sent yet; they accumulate where a client does not read.

    Args:
        writer: Of the answer.
        choices: In the order of their places.
        with_ids: Whether a token without text has a line too.
    """

    def __init__(self, writer: ResponseWriter, choices: Sequence[Choice], with_ids: bool) -> None:
        self._writer, self._choices, self._with_ids = writer, choices, with_ids
        self._opened: set[int] = set()
        self._lines: list[bytes] = []

    def push(self, place: int, event: Event) -> bool:
        """Takes what happened to a choice; returns whether it has ended.

        Raises:
            RequestError: The event is a failure.
        """
        choice = self._choices[place]
        said = len(choice.ids)
        piece = choice.push(event)
        if event.scores:
            return False  # said with the echo
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
    """Return a number of JSON: OpenAI's value in place of minus infinity."""
    return logprob if math.isfinite(logprob) else -9999.0
