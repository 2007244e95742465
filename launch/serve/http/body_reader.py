"""Validates and tokenizes the bodies of requests: short ones in the HTTP process, others in processes of their own.

Note [Long bodies]
    Reading JSON holds the interpreter's lock to its end, seconds for 32 MiB of small lists, in which no stream gets a token. So a
    body of more than `NEAR_BYTES` goes to another process, as bytes. What comes back is bounded by the model's context, and takes
    milliseconds to unpickle: tokens as arrays, and of the other fields those that answers depend on.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from ringattn.launch.serve.config import freeze_gc
from ringattn.launch.serve.grammar import Grammar, GrammarError
from ringattn.launch.serve.http.api import MAX_SCORES, Chat, Completion, read_body
from ringattn.launch.serve.http.chat_format import chat_format
from ringattn.launch.serve.http.fields import RequestError, answer_grammar, ascii_only
from ringattn.launch.serve.messages import GRAMMAR, UNAVAILABLE, Settings
from ringattn.launch.serve.prefix_cache import prefix_digests
from ringattn.launch.serve.tokenizer import Tokenizer, make_tokenizer

NEAR_BYTES = 2**20  # most bytes of a body that is read in the HTTP process
MAX_ANSWERS = 1024  # answers of one request: prompts times choices
COMPLETION_TOKENS = 16  # new tokens of a completion that does not say how many: OpenAI's default

_READ = "prompt messages chat_template_kwargs response_format structured_outputs metadata user".split()
_READ += ["safety_identifier", "prompt_cache_key"]
"""Fields of any length of which an answer needs no more than `ReadBody` has."""


class ReadPrompt(NamedTuple):
    """A prompt: its tokens (uint32), the digests of its pages, its maximum of new tokens, and its text if that is echoed."""

    tokens: array[int]
    digests: list[bytes]
    max_tokens: int
    echo: str


@dataclass(frozen=True)
class ReadBody:
    """A body that was validated and tokenized.

    Attributes:
        body: Without the fields of `_READ`.
        opened: Whether the prompt of a chat has begun the reasoning.
        grammar: Of the answers; None for any text.
        format_field: The field that asks for the grammar.
    """

    body: Chat | Completion
    prompts: list[ReadPrompt]
    opened: bool
    grammar: Grammar | None
    format_field: str


def scores_prompt(body: Chat | Completion) -> bool:
    """Return whether logprobs of the prompt are wanted, which is echoed."""
    return isinstance(body, Completion) and body.echo and body.logprobs is not None


def refused_format(error: GrammarError, field: str) -> RequestError:
    """Return the error of a request whose field asks for a grammar that does not compile."""
    what = f"the format of the answer must compile, got: {ascii_only(str(error))}"
    return RequestError(400, what[:500], field, GRAMMAR)


class BodyReader:
    """Reads bodies for one model.

    Attributes:
        names: Of the model.
        format: Of its answers to chats.
    """

    def __init__(self, tokenizer: Tokenizer, settings: Settings) -> None:
        self.names = settings.args.served_model_name or (settings.model,)
        self.format = chat_format(settings.args, tokenizer)
        self._tokenizer, self._args, self._max_length = tokenizer, settings.args, settings.length
        self._defaults = settings.defaults

    def check_model(self, name: str | None) -> None:
        """Raise RequestError for the name of another model."""
        if name not in (None, *self.names):
            what = f"model must be {' or '.join(map(repr, self.names))}, got {ascii_only(name)[:200]!r}"
            raise RequestError(404, what, "model", "model_not_found")

    def read(self, kind: type[Chat] | type[Completion], data: bytes | bytearray) -> ReadBody:
        """Return what a body asks for; raise RequestError, ChatTemplateError or TextTooLongError."""
        body = read_body(kind, data)
        self.check_model(body.model)
        body = body.model_copy(update={k: v for k, v in self._defaults.items() if k not in body.model_fields_set})
        texts: Sequence[str | list[int]]
        if isinstance(body, Chat):
            tokens = self._chat_tokens(body)
            texts, opened = [tokens], self.format.opens_reasoning(self._tokenizer, tokens)
            grammar = self.format.grammar(body, opened)
        else:
            texts, opened = body.prompts(), False
            grammar = None if body.answer_part is None else answer_grammar(body.answer_part)
        field = body.format_field
        if grammar is not None:
            body.check_free()
            try:
                grammar.check_size()
            except GrammarError as error:
                raise refused_format(error, field) from None
        body.check_tokens(self._tokenizer.vocab_size)
        most_answers = min(MAX_ANSWERS, self._args.max_requests)
        if len(texts) * body.n > most_answers:
            what = f"a request must ask for at most {most_answers} answers, got {len(texts)} prompts times {body.n}"
            raise RequestError(400, what, "n")
        prompts = [self._prompt(body, text, len(texts)) for text in texts]
        rest = body.model_copy(update=dict.fromkeys(type(body).model_fields.keys() & _READ))
        return ReadBody(rest, prompts, opened, grammar, field)

    def _chat_tokens(self, body: Chat) -> list[int]:
        """Return the prompt of a chat."""
        if body.uses_tools and self.format.tools == "none":
            what = "tools are not supported by the chat template of this model, as far as the server knows"
            raise RequestError(400, f"{what}; leave them out, or start it with --tool-format", "tools")
        options = dict(body.chat_template_kwargs)
        if body.reasoning_effort is not None and "reasoning_effort" in self._tokenizer.template:
            options.setdefault("reasoning_effort", body.reasoning_effort)
        elif body.reasoning_effort not in (None, "none", "medium"):  # both are defaults of OpenAI's models
            what = "reasoning_effort is not supported by the chat template of this model"
            raise RequestError(
                400, f"{what}, got {ascii_only(body.reasoning_effort)!r}; leave it out", "reasoning_effort"
            )
        count = len(body.messages)
        if count > self._max_length:  # each has a token at least; a template takes 50 us for one
            what = f"messages must fit into {self._max_length} tokens, got {count} messages"
            raise RequestError(400, what, "messages", "context_length_exceeded")
        tools = None if body.tool_choice == "none" else [one.model_dump(exclude_unset=True) for one in body.tools]
        messages = [message.template_message() for message in body.messages]
        return self._tokenizer.chat(messages, self._max_length, tools, **options)

    def _prompt(self, body: Chat | Completion, text: str | list[int], count: int) -> ReadPrompt:
        """Return one of `count` prompts of a body."""
        tokenizer, args = self._tokenizer, self._args
        tokens = tokenizer.encode(text, self._max_length) if isinstance(text, str) else text
        self._check_prompt(tokens, "messages" if isinstance(body, Chat) else "prompt")
        if isinstance(body, Chat):
            asked = body.max_completion_tokens or body.max_tokens
        elif (asked := body.max_tokens) is None:
            asked = min(COMPLETION_TOKENS, args.max_tokens or COMPLETION_TOKENS)
        most = self._check_length(len(tokens), 1 if asked == 0 else asked)
        if body.wanted_logprobs is not None:
            # each token has its own and the likeliest ones
            rows = MAX_SCORES // (1 + body.wanted_logprobs) // (count * body.n) - scores_prompt(body) * len(tokens)
            if asked is None:
                most = min(most, max(1, rows))
            if most > rows:
                what = f"prompts times n times tokens times (logprobs + 1) must be at most {MAX_SCORES}"
                what = f"{what}, so {max(0, rows)} new tokens, got {most}; ask for less of them"
                raise RequestError(400, what, "logprobs")
        if body.min_tokens > most:
            what = f"min_tokens must be at most max_tokens, got {body.min_tokens} and {most}"
            raise RequestError(400, what, "min_tokens")
        digests = prefix_digests(tokens, args.page_size) if args.keep_prefixes else []
        echo = ""
        if isinstance(body, Completion) and body.echo:
            echo = text if isinstance(text, str) else tokenizer.decode(tokens)
        return ReadPrompt(array("I", tokens), digests, most, echo)

    def _check_prompt(self, tokens: list[int], field: str) -> None:
        if not tokens:
            raise RequestError(400, f"{field} must have at least one token, got none", field)
        vocab_size = self._tokenizer.vocab_size
        if not (0 <= min(tokens) and max(tokens) < vocab_size):
            what = f"tokens must be from 0 to {vocab_size - 1}, got {min(tokens)} to {max(tokens)}"
            raise RequestError(400, what, field)

    def _check_length(self, prompt: int, asked: int | None) -> int:
        """Return the maximum of new tokens; raise RequestError for more than the model, the cache or the limit allow."""
        whole, args = self._max_length, self._args
        if asked is None:
            asked = max(1, min(args.default_tokens or whole, args.max_tokens or whole, whole - prompt))
        if args.max_tokens is not None and asked > args.max_tokens:
            raise RequestError(400, f"max_tokens must be at most {args.max_tokens}, got {asked}", "max_tokens")
        if prompt + asked > whole:
            what = f"prompt and max_tokens must fit into {whole} tokens, got {prompt} + {asked} = {prompt + asked}"
            raise RequestError(400, what, "max_tokens", "context_length_exceeded")
        return asked


class FarReader(threading.local):
    """Reads bodies as `BodyReader` does, in a process for each thread that asks; it begins at the first, and ends with this one."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._pipe: Connection[Any, Any] | None = None

    def read(self, kind: type[Chat] | type[Completion], data: bytes | bytearray) -> ReadBody:
        """Return what a body asks for; see `BodyReader.read`."""
        try:
            if self._pipe is None:
                spawn = multiprocessing.get_context("spawn")
                self._pipe, theirs = spawn.Pipe()
                with theirs:
                    spawn.Process(target=_read_bodies, args=(theirs, self._settings), daemon=True).start()
            self._pipe.send(kind)
            self._pipe.send_bytes(data)
            found = self._pipe.recv()
        except (EOFError, OSError):
            self._pipe = None
            what = "the process that reads long bodies has ended; send a shorter one, or try again"
            raise RequestError(503, what, code=UNAVAILABLE) from None
        if isinstance(found, Exception):
            raise found
        return found


def _read_bodies(pipe: Connection[Any, Any], settings: Settings) -> None:
    """Read bodies for a `FarReader` until it is gone."""
    reader = BodyReader(make_tokenizer(settings.tokenizer), settings)
    freeze_gc()
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send(_result(reader, pipe.recv(), pipe.recv_bytes()))


def _result(reader: BodyReader, kind: type[Chat] | type[Completion], data: bytes) -> ReadBody | Exception:
    try:
        return reader.read(kind, data)
    except Exception as error:
        return error.with_traceback(None)
