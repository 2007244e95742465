"""Answers to completions and chats: receives a request, has it read, submits it, and writes its answer.

Bodies and answers are defined in api.py, bodies are read by body_reader.py, tokens come from engine_client.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ringattn.launch.serve.grammar import Grammar, GrammarError, make_compiler
from ringattn.launch.serve.http.api import (
    Chat,
    Completion,
    CompletionChoice,
    ResponseWriter,
    sse_line,
)
from ringattn.launch.serve.http.body_reader import NEAR_BYTES, BodyReader, FarReader, refused_format, scores_prompt
from ringattn.launch.serve.http.engine_client import KEEP_ALIVE_S, EngineClient, OpenRequests
from ringattn.launch.serve.http.fields import RequestError, ascii_only
from ringattn.launch.serve.http.metrics import Metrics
from ringattn.launch.serve.messages import GRAMMAR, NOT_FINITE, TIME_LIMIT, NewRequest, Prompt, Settings, Submit, encode
from ringattn.launch.serve.tokenizer import ChatTemplateError, TextTooLongError, Tokenizer

T = TypeVar("T")

BODY_S = 60.0  # seconds in which a body must have come
SHORT_BYTES = 2**16  # bytes of a body that is tokenized beside long ones, and does not count as waiting
LONG_THREADS = 2  # threads that tokenize long bodies
WAITING_BODIES = 2
"""Bodies of the largest size, or more smaller ones as long together, that may be received and tokenized at a time."""
KEEP_ALIVE = b": keep-alive\n\n"  # comment in a stream
GRAMMAR_THREADS = 2  # threads that compile grammars
GRAMMAR_S = 20.0  # seconds in which a grammar must compile, its wait for those before it included


@dataclass(frozen=True)
class Prepared:
    """A request that was tokenized.

    Attributes:
        streams: Whether its answer is a stream.
        writer: Of the answer.
        ids: Of its requests.
        submit: The message for the engine.
        encoded: The message as bytes, if it is complete.
        grammar: Of its answers, which is compiled before the message is complete.
        format_field: The field that asks for the grammar.
    """

    streams: bool
    writer: ResponseWriter
    ids: list[int]
    submit: Submit
    encoded: bytes
    grammar: Grammar | None
    format_field: str


class CancellableResponse(Response):
    """Calls `work`, which answers a request, and cancels it when the client disconnects; its RequestError becomes the answer."""

    def __init__(self, work: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the work beside a task that waits for the disconnect."""
        disconnect = asyncio.ensure_future(_wait_for_disconnect(receive))
        work = asyncio.ensure_future(self._work(scope, receive, send))
        try:
            await asyncio.wait({disconnect, work}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (disconnect, work):
                task.cancel()
            await asyncio.gather(disconnect, work, return_exceptions=True)
        error = None if work.cancelled() else work.exception()
        if isinstance(error, RequestError):
            await error_response(error)(scope, receive, send)
        elif error is not None:
            raise error


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def error_response(error: RequestError) -> JSONResponse:
    """Return the response of an error."""
    headers = {429: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}.get(error.status, {})
    # OpenAI's clients repeat a request after a 500 or 503, and this one would fail again
    headers |= {"x-should-retry": "false"} if error.code in (TIME_LIMIT, NOT_FINITE) else {}
    return JSONResponse(error.body(), error.status, headers)


class Body:
    """The body of a request of at most `limit` bytes, one of `bodies` until its release; `long` of them count in WAITING_BODIES."""

    def __init__(self, bodies: set[Body], limit: int) -> None:
        self.data, self.long, self._size, self._full = bytearray(), 0, 0, False
        self._bodies, self._limit, self._most = bodies, limit, WAITING_BODIES * limit
        bodies.add(self)

    async def read(self, http_request: HttpRequest) -> None:
        """Receive the body; raise RequestError if it or those that wait are too long, it comes too slowly, or is not JSON."""
        kind = http_request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # forms of other sites, which browsers send without asking, cannot have this type
            raise RequestError(415, f"Content-Type must be application/json, got {ascii_only(kind)[:100] or 'none'}")
        encoding = ", ".join(http_request.headers.getlist("content-encoding")).strip().lower()
        if encoding not in ("", "identity"):
            what = f"Content-Encoding must be identity, got {ascii_only(encoding)[:100]}; send the body as it is"
            raise RequestError(415, what)
        try:
            await asyncio.wait_for(self._receive(http_request), BODY_S)
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            what = f"the body must come within {BODY_S:g} s, got {self._size} bytes until then"
            raise RequestError(408, what) from None
        except ClientDisconnect:
            raise RequestError(499, "the client went away") from None
        if self._size > self._limit:
            what = f"the body must have at most {self._limit} bytes, got {self._size} or more"
            raise RequestError(413, what, code="body_too_large")
        if self._full:
            what = f"bodies that wait must have at most {self._most} bytes together, got {self._size} more"
            raise RequestError(429, f"{what}; try again later", code="queue_full")

    async def _receive(self, http_request: HttpRequest) -> None:
        async for piece in http_request.stream():
            self._size += len(piece)
            if self._size > 4 * self._limit:
                break  # a client that goes on is cut off
            self.long = max(0, self._size - SHORT_BYTES)
            self.data += piece
            self._full = self._full or self._size > self._limit or sum(x.long for x in self._bodies.copy()) > self._most
            if self._full:
                self.release()  # a client that still writes does not read why its body is refused: the rest is dropped

    def release(self, *_: object) -> None:
        """Drop the body, which counts no more; in any thread."""
        self.long, self.data = 0, bytearray()
        self._bodies.discard(self)


class CompletionHandler:
    """Answers completions and chats with one model."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, settings: Settings, metrics: Metrics) -> None:
        self.client, self.model, self.metrics = client, settings.model, metrics
        self.reader, self._far_reader = BodyReader(tokenizer, settings), FarReader(settings)
        self._compiler = make_compiler(tokenizer)
        self._tokenizer, self._args, self._max_length = tokenizer, settings.args, settings.length
        self._compiling = ThreadPoolExecutor(GRAMMAR_THREADS, "grammars")
        # threads: a long prompt must stop neither the event loop nor short prompts
        self._short, self._long = ThreadPoolExecutor(1, "short"), ThreadPoolExecutor(LONG_THREADS, "long")
        self._max_body = int(self._args.max_body_mib * 2**20)
        self._bodies: set[Body] = set()
        self._began = int(time.time())

    def close(self) -> None:
        """Tokenize no more requests."""
        for threads in (self._short, self._long, self._compiling):
            threads.shutdown(wait=False, cancel_futures=True)

    def model_card(self, name: str) -> dict[str, Any]:
        """Return the model as /v1/models shows it by one of its names."""
        card = {"id": name, "object": "model", "created": self._began, "owned_by": "ringattn"}
        return {**card, "max_model_len": self._max_length}

    async def answer(self, http_request: HttpRequest, kind: type[Chat] | type[Completion]) -> Response:
        """Submit a request, and return the response that will write its answer."""
        self.client.check()  # before a body is read that could not be answered
        body = Body(self._bodies, self._max_body)
        try:
            await body.read(http_request)
        except BaseException:
            body.release()
            raise
        arrived = time.monotonic()  # a client waits for the tokenizer, too
        threads = self._long if body.long else self._short
        prepare = threads.submit(self._prepare, kind, body.data, arrived)
        # also if nobody waits for it by then
        prepare.add_done_callback(body.release)

        async def work(scope: Scope, receive: Receive, send: Send) -> None:
            ready = await self._tokenized(prepare, "messages" if kind is Chat else "prompt")
            streams, writer = ready.streams, ready.writer
            encoded = ready.encoded if ready.grammar is None else await self._compiled(ready, ready.grammar)
            take = writer.push if streams else writer.record
            with OpenRequests(self.client, self.metrics, ready.ids, encoded, take, arrived, each=streams) as requests:
                # the last lines leave with the end: a write costs more than a line
                end = await _stream(requests, writer, send) if streams else None
                if end is None:
                    await requests.wait()
            if end is None:
                await Response(writer.whole(), media_type="application/json")(scope, receive, send)
            else:
                await send({"type": "http.response.body", "body": end})

        return CancellableResponse(work)

    async def _tokenized(self, prepare: Future[Prepared], field: str) -> Prepared:
        """Wait for the tokenizer; raise RequestError when the time of the request is over, or its body is refused."""
        what = f"the request waited for the tokenizer until its time of {self._args.time_limit:.0f} s was over"
        try:
            return await _in_time(prepare, self._args.time_limit, f"{what}; ask for less, or try later")
        except ChatTemplateError as error:
            raise RequestError(400, ascii_only(str(error))[:500], error.field) from None
        except TextTooLongError as error:
            what = f"{field} must fit into {self._max_length} tokens, got {error} or more"
            raise RequestError(400, what, field, "context_length_exceeded") from None

    async def _compiled(self, ready: Prepared, grammar: Grammar) -> bytes:
        """Return the message for the engine with a grammar; raise RequestError if that does not compile, in time."""
        compiler = self._compiler
        if isinstance(compiler, str):
            raise RequestError(400, f"a required format or call {compiler}", ready.format_field, GRAMMAR)

        def compile_and_encode() -> bytes:
            ready.submit.grammar = grammar.text()
            compiler.compile(ready.submit.grammar)
            return encode(ready.submit)

        what = f"the format of the answer must compile in {GRAMMAR_S:g} s, its wait for others included"
        try:
            compiled = self._compiling.submit(compile_and_encode)
            return await _in_time(compiled, GRAMMAR_S, f"{what}; ask for a simpler one, or try later")
        except GrammarError as error:
            raise refused_format(error, ready.format_field) from None

    def _prepare(self, kind: type[Chat] | type[Completion], data: bytes | bytearray, arrived: float) -> Prepared:
        """Read a body and make its message for the engine, in a thread."""
        reader = self.reader if len(data) <= NEAR_BYTES else self._far_reader  # Note [Long bodies]
        read = reader.read(kind, data)
        body, tokenizer, score_prompt = read.body, self._tokenizer, scores_prompt(read.body)
        stops = sorted({*body.stop_token_ids, *(() if body.ignore_eos else tokenizer.stops)})
        prompts, choices, requests = [], [], []
        for given in read.prompts:
            tokens = given.tokens.tolist()
            for choice in range(body.n):
                options = given.echo, score_prompt, body.max_tokens == 0, body.min_tokens
                parser = self.reader.format.parser(body, read.opened) if isinstance(body, Chat) else None
                choices.append(CompletionChoice(len(choices), tokens, tokenizer, body.stop, *options, parser))
                request_id, sampling = next(self.client.ids), body.sampling(choice, stops)
                request = NewRequest(request_id, len(prompts), given.max_tokens, stops, sampling, score_prompt)
                requests.append(request)
            prompts.append(Prompt(tokens, given.digests))
        writer = ResponseWriter(
            isinstance(body, Chat),
            self.model,
            tokenizer,
            [prompt.tokens for prompt in prompts],
            choices,
            with_usage=body.stream_options.include_usage,
            continuous_usage=body.stream_options.continuous_usage_stats,
            with_ids=body.return_token_ids,
        )
        ids, submit = [request.id for request in requests], Submit(prompts, requests, arrived)
        encoded = encode(submit) if read.grammar is None else b""
        return Prepared(body.stream, writer, ids, submit, encoded, read.grammar, read.format_field)


async def _in_time(work: Future[T], seconds: float, late: str) -> T:
    """Return what a thread returns; raise RequestError, with `late`, if it takes longer."""
    waited = asyncio.wrap_future(work)
    waited.add_done_callback(lambda one: one.cancelled() or one.exception())  # which nobody may wait for by then
    try:
        # not wait_for, which before Python 3.12 loses a cancellation that comes with the result
        done, _ = await asyncio.wait({waited}, timeout=seconds)
    finally:
        waited.cancel()
    if not done:
        raise RequestError(503, late, code=TIME_LIMIT)
    return waited.result()


async def _stream(requests: OpenRequests, writer: ResponseWriter, send: Send) -> bytes:
    """Write a stream from its headers on, which leave at once, and return its last lines; a failure is one of them."""
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    written = time.monotonic()
    try:
        while await requests.wait():
            data = writer.take()
            if not data and time.monotonic() - written >= KEEP_ALIVE_S:
                data = KEEP_ALIVE
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                written = time.monotonic()
    except RequestError as error:
        return writer.take() + sse_line(error.body())
    return writer.end()
