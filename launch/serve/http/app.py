"""HTTP application: routes, limits, keys, streams, and cancellation when a client disconnects.

Bodies and answers are defined in api.py, tokens come from engine_client.py, and process.py is the process. Nothing that a
request sends is executed or unpickled.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import re
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ringattn.launch.serve.config import Limits
from ringattn.launch.serve.http.api import (
    COMPLETION_TOKENS,
    Chat,
    Choice,
    Completion,
    RequestError,
    ResponseWriter,
    StreamLines,
    ascii_only,
    read_body,
    sse_line,
)
from ringattn.launch.serve.http.connections import limit_connections
from ringattn.launch.serve.http.engine_client import EngineClient, OpenRequests
from ringattn.launch.serve.http.metrics import CONTENT_TYPE, Metrics
from ringattn.launch.serve.messages import Event
from ringattn.launch.serve.prefix_cache import prefix_digests
from ringattn.launch.serve.scheduler import Request
from ringattn.launch.serve.tokenizer import ChatTemplateError, Tokenizer

PAGE = Path(__file__).with_name("page.html")
REQUEST_ID = re.compile(rb"[!-~]{1,200}")
"""A request id that a client may choose: it comes back in the answer."""

ONCE = ("host", "authorization", "x-request-id")
"""Headers that may be sent once: of two, a proxy in front and this server may each obey another one."""

OPEN_PATHS = ("/", "/health")
"""Paths that need no key: the page by itself shows nothing."""

BODY_S = 60.0
"""Seconds in which a body must have come."""

MAX_ANSWERS = 1024
"""Answers of one request: prompts times choices."""


@dataclass(frozen=True)
class PreparedRequest:
    """A validated and tokenized request.

    Attributes:
        body: Of the request.
        prompts: Their tokens.
        choices: Its answers, in the order of the prompts.
        request_ids: Of its answers.
        encoded: The requests, by `EngineClient.encode_requests`.
    """

    body: Chat | Completion
    prompts: list[list[int]]
    choices: list[Choice]
    request_ids: list[int]
    encoded: bytes


class CancellableResponse(Response):
    """Answers a request, or cancels it when the client disconnects.

    Args:
        work: Sends the answer; what it raises before the first byte becomes an error answer.
    """

    def __init__(self, work: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the work beside a listener for the disconnect."""
        listener = asyncio.ensure_future(_wait_until_gone(receive))
        work = asyncio.ensure_future(self._work(scope, receive, send))
        try:
            await asyncio.wait({listener, work}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (listener, work):
                task.cancel()
            await asyncio.gather(listener, work, return_exceptions=True)
        error = None if work.cancelled() else work.exception()
        if isinstance(error, RequestError):
            await error_response(error)(scope, receive, send)
        elif error is not None:
            raise error


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def error_response(error: RequestError) -> JSONResponse:
    """Return the response of an error."""
    headers = {}
    if error.status == 429:
        headers["Retry-After"] = "1"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error.body(), error.status, headers)


async def read_bytes(http_request: HttpRequest, limit: int) -> bytes:
    """Read the body of a request.

    Args:
        http_request: The request.
        limit: Bytes at most.

    Raises:
        RequestError: The body is larger, comes too slowly, or is not JSON by its type.
    """
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
    except (TimeoutError, asyncio.TimeoutError):  # two kinds before Python 3.11
        raise RequestError(408, f"the body must come within {BODY_S:g} s, got {size} bytes until then") from None
    except ClientDisconnect:
        raise RequestError(499, "the client went away") from None
    if size > limit:
        raise RequestError(413, f"the body must have at most {limit} bytes, got {size} or more", code="body_too_large")
    return bytes(data)


class HeaderMiddleware:
    """Middleware that checks headers first, counts answers, and gives each a request id.

    Args:
        app: The application.
        key: Expected bearer token; None for none.
        hosts: Allowed values of `Host`; None for any. This refuses pages of other sites whose name resolves to this machine.
        metrics: Where answers are counted.
        paths: Those that are counted by name.
    """

    def __init__(
        self, app: ASGIApp, key: str | None, hosts: Sequence[str] | None, metrics: Metrics, paths: Sequence[str]
    ) -> None:
        self._app, self._hosts, self._metrics, self._paths = app, hosts, metrics, frozenset(paths)
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"

        headers = dict(scope["headers"])
        error = self._check(scope, headers)
        given = headers.get(b"x-request-id", b"")
        # a refused one is not sent back
        name = given if REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}".encode()

        async def mark(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.responses.labels(path, message["status"]).inc()
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", name)]}
            await send(message)

        await (self._app if error is None else error_response(error))(scope, receive, mark)

    def _check(self, scope: Scope, headers: Mapping[bytes, bytes]) -> RequestError | None:
        names = [name for name, _ in scope["headers"]]
        for once in ONCE:
            if (count := names.count(once.encode())) > 1:
                return RequestError(400, f"{once} must be sent once, got {count} headers; leave out all but one", once)
        given = headers.get(b"x-request-id")
        if given is not None and not REQUEST_ID.fullmatch(given):
            shown = ascii_only(given.decode("latin-1"))[:100]
            what = f"x-request-id must be 1 to 200 printable ASCII characters without spaces, got {shown!r}"
            return RequestError(400, f"{what}; leave it out to get one", "x-request-id")
        if self._hosts is not None:
            host = headers.get(b"host", b"").decode("latin-1")
            name = re.sub(r":\d*$", "", host).strip("[]").lower()
            if name not in self._hosts:
                return RequestError(
                    403, f"Host must be one of {', '.join(self._hosts)}, got {ascii_only(host)[:100]!r}; see --host"
                )
        if self._key is not None and scope["path"] not in OPEN_PATHS:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._key):
                return RequestError(
                    401, "Authorization must be 'Bearer KEY' with the server's key", code="invalid_api_key"
                )
        return None


def make_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    model: str,
    limits: Limits,
    *,
    key: str | None = None,
    hosts: Sequence[str] | None = None,
    about: Mapping[str, Any] | None = None,
) -> ASGIApp:
    """Build the application.

    Args:
        client: Of the engine.
        tokenizer: Of the model.
        model: The name under which it is served.
        limits: Of requests.
        key: Expected bearer token; None for none.
        hosts: The names by which the server may be called; None for any.
        about: Machine, model and flags of the server, for /state.
    """
    metrics = Metrics(client.state)
    # one thread: tokenizers are not safe in several, and a long prompt must not stop the event loop
    tokenizer_thread = ThreadPoolExecutor(1, "tokenizer")
    began = int(time.time())

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await client.open()
        yield
        client.close()
        tokenizer_thread.shutdown(wait=False, cancel_futures=True)

    # no pages that load scripts from elsewhere
    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(RequestError)
    async def refused(_: HttpRequest, error: RequestError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def missing(http_request: HttpRequest, error: HTTPException) -> Response:
        answer = error_response(
            RequestError(error.status_code, f"{ascii_only(http_request.url.path)[:200]}: {error.detail}")
        )
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(Exception)
    async def broken(_: HttpRequest, error: Exception) -> Response:
        return error_response(RequestError(500, f"the server has failed at this request: {type(error).__name__}"))

    def model_card() -> dict[str, Any]:
        room = client.capacity.tokens
        length = room if limits.length is None else min(room, limits.length)
        return {"id": model, "object": "model", "created": began, "owned_by": "ringattn", "max_model_len": length}

    @app.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [model_card()]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Any:
        check_model(name)
        return model_card()

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        closed = client.closed
        return JSONResponse({"status": closed or "ok"}, 503 if closed else 200)

    @app.get("/metrics")
    async def numbers() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/state")
    async def state() -> Any:
        return {"model": model, "server": dict(about or {}), **client.state()}

    page, policy = read_page()

    @app.api_route("/", methods=["GET", "HEAD"])
    async def root() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"})

    def check_model(name: str | None) -> None:
        if name is not None and name != model:
            raise RequestError(
                404, f"model must be {model!r}, got {ascii_only(name)[:200]!r}", "model", "model_not_found"
            )

    def prepare_request(kind: type[Chat] | type[Completion], data: bytes) -> PreparedRequest:
        """Validate and tokenize a body; runs in the tokenizer's thread."""
        body = read_body(kind, data)
        check_model(body.model)
        try:
            return tokenize(body)
        except (ChatTemplateError, UnicodeEncodeError) as error:
            raise RequestError(400, ascii_only(str(error))[:500], "messages" if kind is Chat else "prompt") from None

    def tokenize(body: Chat | Completion) -> PreparedRequest:
        wanted: list[str | list[int]]
        if isinstance(body, Chat):
            wanted = [tokenizer.chat([message.template_message() for message in body.messages])]
            asked = body.max_completion_tokens or body.max_tokens
        else:
            wanted = body.prompts()
            asked = body.max_tokens
            if asked is None:
                asked = min(COMPLETION_TOKENS, limits.max_tokens or COMPLETION_TOKENS)
        body.check_tokens(tokenizer.vocab_size)
        silent = asked == 0
        score_prompt = isinstance(body, Completion) and body.echo and body.logprobs is not None
        if len(wanted) * body.choices > (
            most := min(MAX_ANSWERS, client.capacity.max_running + client.capacity.max_waiting)
        ):
            raise RequestError(
                400,
                f"a request must ask for at most {most} answers, got {len(wanted)} prompts times {body.choices}",
                "n",
            )
        prompts, choices, requests = [], [], []
        for number, prompt in enumerate(wanted):
            tokens = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            field = "messages" if isinstance(body, Chat) else "prompt"
            if not tokens:
                raise RequestError(400, f"{field} must have at least one token, got none", field)
            if not (0 <= min(tokens) and max(tokens) < tokenizer.vocab_size):
                raise RequestError(
                    400,
                    f"tokens must be from 0 to {tokenizer.vocab_size - 1}, got {min(tokens)} to {max(tokens)}",
                    field,
                )
            echo = ""
            if isinstance(body, Completion) and body.echo:
                echo = prompt if isinstance(prompt, str) else tokenizer.decode(tokens)
            most = _check_length(len(tokens), 1 if silent else asked)
            digests = prefix_digests(tokens, client.capacity.page_size) if client.capacity.keep_prefixes else []
            prompts.append(tokens)
            for number_of_prompt in range(body.choices):
                index = number * body.choices + number_of_prompt
                choices.append(Choice(index, tokens, tokenizer, body.stops, echo, score_prompt, silent))
                request = Request(0, tokens, most, sampling=body.sampling(number_of_prompt), digests=digests)
                request.stops = frozenset(body.stop_token_ids) | (frozenset() if body.ignore_eos else tokenizer.stops)
                request.score_prompt = score_prompt
                requests.append(request)
        return PreparedRequest(body, prompts, choices, *client.encode_requests(requests))

    def _check_length(prompt: int, asked: int | None) -> int:
        """Return the new tokens of an answer; refuse more than the model, the cache or the limit allow."""
        whole = model_card()["max_model_len"]
        if asked is None:
            asked = max(1, min(limits.default_tokens, limits.max_tokens or whole, whole - prompt))
        if limits.max_tokens is not None and asked > limits.max_tokens:
            raise RequestError(400, f"max_tokens must be at most {limits.max_tokens}, got {asked}", "max_tokens")
        if prompt + asked > whole:
            what = f"prompt and max_tokens must fit into {whole} tokens, got {prompt} + {asked} = {prompt + asked}"
            raise RequestError(400, what, "max_tokens", "context_length_exceeded")
        return asked

    async def answer(http_request: HttpRequest, kind: type[Chat] | type[Completion]) -> Response:
        client.check()  # before a body is read that could not be answered
        data = await read_bytes(http_request, limits.body)
        arrived = time.monotonic()  # the tokenizer's time is its client's, too, and the wait for it
        asked = await asyncio.get_running_loop().run_in_executor(tokenizer_thread, prepare_request, kind, data)
        body, prompts, choices = asked.body, asked.prompts, asked.choices
        with_usage = bool(body.stream_options and body.stream_options.include_usage)
        with_ids = bool(body.return_token_ids)
        writer = ResponseWriter(kind is Chat, model, tokenizer, with_usage, with_ids)

        def push(place: int, event: Event) -> bool:
            choices[place].push(event)
            return choices[place].finish is not None

        async def whole(scope: Scope, receive: Receive, send: Send) -> None:
            with OpenRequests(client, metrics, asked.request_ids, asked.encoded, push, arrived) as answers:
                await answers.wait_all()
            await JSONResponse(writer.whole(prompts, choices))(scope, receive, send)

        async def streamed(_: Scope, __: Receive, send: Send) -> None:
            started, lines = False, StreamLines(writer, choices, with_ids)

            async def say(data: bytes, more: bool = True) -> None:
                nonlocal started
                if not started:
                    # only now, so that whatever fails before any token still has a status of its own
                    started = True
                    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": data, "more_body": more})

            with OpenRequests(client, metrics, asked.request_ids, asked.encoded, lines.push, arrived) as answers:
                try:
                    while await answers.wait_any():
                        if data := lines.take():
                            await say(data)
                except RequestError as error:
                    data = lines.take()
                    if not (started or data):
                        raise
                    await say(data + sse_line(error.body()), more=False)
                    return
            # the last lines leave with the end: a write costs more than a line
            fatal_exit = writer.usage(prompts, choices) if with_usage else b""
            await say(lines.take() + fatal_exit + b"data: [DONE]\n\n", more=False)

        return CancellableResponse(streamed if body.stream else whole)

    @app.post("/v1/completions")
    async def completions(http_request: HttpRequest) -> Response:
        return await answer(http_request, Completion)

    @app.post("/v1/chat/completions")
    async def chat(http_request: HttpRequest) -> Response:
        return await answer(http_request, Chat)

    paths = ("/", "/health", "/metrics", "/state", "/v1/models", "/v1/completions", "/v1/chat/completions")
    return HeaderMiddleware(app, key, hosts, metrics, paths)


def read_page() -> tuple[str, str]:
    """Return the page, and a policy that allows its own script and style and requests to this server only."""
    text = PAGE.read_text(encoding="utf-8")

    def hashed(tag: str) -> str:
        bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        return " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'" for body in bodies
        )

    policy = f"default-src 'none'; connect-src 'self'; img-src data:; script-src {hashed('script')}; style-src {hashed('style')}"
    return text, f"{policy}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


class HttpServer:
    """Serves an application in a thread.

    Args:
        listening: The socket to accept connections from; closed at the end.
        connections: Open ones at most; others get status 503.

    Attributes:
        port: That of the socket.
    """

    def __init__(self, listening: socket.socket, connections: int) -> None:
        self._socket, self._connections = listening, connections
        self.port: int = listening.getsockname()[1]
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def start(self, app: ASGIApp, timeout_s: float = 30.0) -> None:
        """Start to serve an application; return when it answers.

        Raises:
            RuntimeError: It does not start in time.
        """
        config = uvicorn.Config(
            app,
            http=limit_connections(AutoHTTPProtocol, self._connections),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=3,
            server_header=False,
            ws="none",
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True, name="http")
        self._thread.start()
        deadline = time.monotonic() + timeout_s
        while not self._server.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise RuntimeError(
                    f"the HTTP server must start within {timeout_s:g} s, got nothing; its message is above"
                )
            time.sleep(0.01)

    @property
    def alive(self) -> bool:
        """Whether it still serves."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Wait for open answers, and stop."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(timeout_s)
        self._socket.close()
