"""Answers to completions and chats: reads, validates and tokenizes a request, submits it, and writes its answer.

Bodies and answers are defined in api.py, tokens come from engine_client.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ringattn.launch.serve.http.api import (
    Chat,
    Choice,
    Completion,
    RequestError,
    ResponseWriter,
    ascii_only,
    read_body,
    sse_line,
)
from ringattn.launch.serve.http.engine_client import EngineClient, OpenRequests
from ringattn.launch.serve.http.metrics import Metrics
from ringattn.launch.serve.messages import NOT_FINITE, TIME_LIMIT, NewRequest, Prompt, Settings, Submit, encode
from ringattn.launch.serve.prefix_cache import prefix_digests
from ringattn.launch.serve.tokenizer import ChatTemplateError, Tokenizer

BODY_S = 60.0
"""Seconds in which a body must have come."""
MAX_ANSWERS = 1024
"""Answers of one request: prompts times choices."""
COMPLETION_TOKENS = 16
"""New tokens of a completion that does not say how many: OpenAI's default."""


class CancellableResponse(Response):
    """Answers a request, or cancels it when the client disconnects.

    Args:
        work: Sends the answer; a RequestError before the first byte becomes an error answer.
    """

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


async def read_bytes(http_request: HttpRequest, limit: int) -> bytes:
    """Return the body of a request; raise RequestError if it has more bytes than the limit, comes too slowly, or is not JSON."""
    kind = http_request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # forms of other sites, which browsers send without asking, cannot have this type
        raise RequestError(415, f"Content-Type must be application/json, got {ascii_only(kind)[:100] or 'none'}")
    encoding = ", ".join(http_request.headers.getlist("content-encoding")).strip().lower()
    if encoding not in ("", "identity"):
        raise RequestError(
            415, f"Content-Encoding must be identity, got {ascii_only(encoding)[:100]}; send the body as it is"
        )
    data, size = bytearray(), 0

    async def read() -> None:
        nonlocal size
        async for piece in http_request.stream():
            size += len(piece)
            if size <= limit:
                data.extend(piece)
            elif size > 4 * limit:
                break  # a client that goes on is cut off

    try:
        await asyncio.wait_for(read(), BODY_S)
    except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
        raise RequestError(408, f"the body must come within {BODY_S:g} s, got {size} bytes until then") from None
    except ClientDisconnect:
        raise RequestError(499, "the client went away") from None
    if size > limit:
        raise RequestError(413, f"the body must have at most {limit} bytes, got {size} or more", code="body_too_large")
    return bytes(data)


class CompletionHandler:
    """Answers completions and chats with one model."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, settings: Settings, metrics: Metrics) -> None:
        self.client, self.model, self.metrics = client, settings.model, metrics
        self.names = settings.args.served_model_name or (settings.model,)
        self._tokenizer, self._args, self._max_length = tokenizer, settings.args, settings.length
        self._defaults = settings.defaults
        # one thread: tokenizers are not safe in several, and a long prompt must not stop the event loop
        self._tokenizer_thread = ThreadPoolExecutor(1, "tokenizer")
        self._began = int(time.time())

    def close(self) -> None:
        """Tokenize no more requests."""
        self._tokenizer_thread.shutdown(wait=False, cancel_futures=True)

    def model_card(self, name: str) -> dict[str, Any]:
        """Return the model as /v1/models shows it by one of its names."""
        card = {"id": name, "object": "model", "created": self._began, "owned_by": "ringattn"}
        return {**card, "max_model_len": self._max_length}

    def check_model(self, name: str | None) -> None:
        """Raise RequestError for the name of another model."""
        if name not in (None, *self.names):
            raise RequestError(
                404,
                f"model must be {' or '.join(map(repr, self.names))}, got {ascii_only(name)[:200]!r}",
                "model",
                "model_not_found",
            )

    async def answer(self, http_request: HttpRequest, kind: type[Chat] | type[Completion]) -> Response:
        """Submit a request, and return the response that will write its answer."""
        self.client.check()  # before a body is read that could not be answered
        data = await read_bytes(http_request, int(self._args.max_body_mib * 2**20))
        arrived = time.monotonic()  # a client waits for the tokenizer, too
        prepare = asyncio.get_running_loop().run_in_executor(self._tokenizer_thread, self._prepare, kind, data)
        streams, writer, ids, encoded = await prepare

        def submit() -> OpenRequests:
            take = writer.push if streams else writer.record
            return OpenRequests(self.client, self.metrics, ids, encoded, take, arrived, each=streams)

        async def whole(scope: Scope, receive: Receive, send: Send) -> None:
            with submit() as requests:
                await requests.wait()
            await JSONResponse(writer.whole())(scope, receive, send)

        async def stream(_: Scope, __: Receive, send: Send) -> None:
            started = False

            async def write(data: bytes, more: bool = True) -> None:
                nonlocal started
                if not started:
                    # a failure before the first token has a status of its own
                    started = True
                    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": data, "more_body": more})

            with submit() as requests:
                try:
                    while await requests.wait():
                        if data := writer.take():
                            await write(data)
                except RequestError as error:
                    data = writer.take()
                    if not (started or data):
                        raise
                    await write(data + sse_line(error.body()), more=False)
                    return
            # the last lines leave with the end: a write costs more than a line
            await write(writer.end(), more=False)

        return CancellableResponse(stream if streams else whole)

    def _prepare(
        self, kind: type[Chat] | type[Completion], data: bytes
    ) -> tuple[bool, ResponseWriter, list[int], bytes]:
        """Validate and tokenize a body, in the tokenizer's thread.

        Return whether the answer is a stream, its writer, the ids of its requests, and the message for the engine.
        """
        body = read_body(kind, data)
        self.check_model(body.model)
        body = body.model_copy(update={k: v for k, v in self._defaults.items() if k not in body.model_fields_set})
        tokenizer, args = self._tokenizer, self._args
        texts: list[str | list[int]]
        if isinstance(body, Chat):
            try:
                messages = [message.template_message() for message in body.messages]
                texts = [tokenizer.chat(messages, **body.chat_template_kwargs)]
            except ChatTemplateError as error:
                raise RequestError(400, ascii_only(str(error))[:500], "messages") from None
            asked, echo, score_prompt = body.max_completion_tokens or body.max_tokens, False, False
        else:
            texts, asked, echo = body.prompts(), body.max_tokens, body.echo
            score_prompt = echo and body.logprobs is not None
            if asked is None:
                asked = min(COMPLETION_TOKENS, args.max_tokens or COMPLETION_TOKENS)
        body.check_tokens(tokenizer.vocab_size)
        most_answers = min(MAX_ANSWERS, args.max_requests)
        if len(texts) * body.n > most_answers:
            what = f"a request must ask for at most {most_answers} answers, got {len(texts)} prompts times {body.n}"
            raise RequestError(400, what, "n")
        stops = sorted({*body.stop_token_ids, *(() if body.ignore_eos else tokenizer.stops)})
        prompts, choices, requests = [], [], []
        for text in texts:
            tokens = tokenizer.encode(text) if isinstance(text, str) else text
            self._check_prompt(tokens, "messages" if isinstance(body, Chat) else "prompt")
            most = self._check_length(len(tokens), 1 if asked == 0 else asked)
            digests = prefix_digests(tokens, args.page_size) if args.keep_prefixes else []
            echoed = (text if isinstance(text, str) else tokenizer.decode(tokens)) if echo else ""
            for choice in range(body.n):
                choices.append(Choice(len(choices), tokens, tokenizer, body.stop, echoed, score_prompt, asked == 0))
                request_id, sampling = next(self.client.ids), body.sampling(choice)
                requests.append(NewRequest(request_id, len(prompts), most, stops, sampling, score_prompt))
            prompts.append(Prompt(tokens, digests))
        writer = ResponseWriter(
            isinstance(body, Chat),
            self.model,
            tokenizer,
            [prompt.tokens for prompt in prompts],
            choices,
            with_usage=bool(body.stream_options and body.stream_options.include_usage),
            with_ids=body.return_token_ids,
        )
        ids = [request.id for request in requests]
        return body.stream, writer, ids, encode(Submit(prompts, requests))

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
