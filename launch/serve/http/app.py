"""HTTP application: routes, and checks of headers and keys.

Nothing that a request sends is executed or unpickled.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import logging
import re
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ringattn.launch.serve.config import LOOPBACK, ServeArgs
from ringattn.launch.serve.http.api import Chat, Completion
from ringattn.launch.serve.http.completions import CompletionHandler, error_response
from ringattn.launch.serve.http.connections import limit_connections
from ringattn.launch.serve.http.engine_client import EngineClient
from ringattn.launch.serve.http.fields import RequestError, ascii_only
from ringattn.launch.serve.http.metrics import CONTENT_TYPE, Metrics
from ringattn.launch.serve.messages import UNAVAILABLE, Settings
from ringattn.launch.serve.tokenizer import Tokenizer

PAGE = Path(__file__).with_name("page.html")
REQUEST_ID = re.compile(rb"[!-~]{1,200}")  # a request id that a client may choose: it comes back in the answer
SINGLE_HEADERS = ("host", "authorization", "x-request-id")
"""Headers that may be sent once: of two, a proxy in front and this server may each obey another one."""
REFUSED_PATHS = {
    **dict.fromkeys(
        ("/v1/embeddings", "/v1/rerank", "/v1/score", "/pooling"),
        "embeddings and scores of texts are not served; use a server for embedding models",
    ),
    **dict.fromkeys(
        ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
        "adapters are merged when the server starts; start one with --adapter for each adapter",
    ),
    "/v1/responses": "only completions and chats are served; send /v1/chat/completions",
}
"""Paths that users of other servers may ask for, and what to do instead."""
END_S = 3  # seconds in which requests that are not with the engine must have been read when it ends
OPEN_PATHS = ("/", "/health")  # paths that need no key: the page by itself shows nothing


async def _on_error(http_request: HttpRequest, error: Exception) -> Response:
    if isinstance(error, RequestError):
        return error_response(error)
    if not isinstance(error, HTTPException):
        return error_response(RequestError(500, f"the server has failed at this request: {type(error).__name__}"))
    path = ascii_only(http_request.url.path)[:200]
    response = error_response(RequestError(error.status_code, f"{path}: {error.detail}"))
    response.headers.update(error.headers or {})
    return response


class HeaderMiddleware:
    """Middleware that checks headers first, counts answers, and gives each a request id.

    Args:
        args: Flags of access. A refused `Host` keeps out pages of other sites whose name resolves to this machine.
        paths: Paths that are counted by name.
        closed: Returns the reason why the server has ended or will; requests that its end cuts off get it.
    """

    def __init__(
        self, app: ASGIApp, args: ServeArgs, metrics: Metrics, paths: Sequence[str], closed: Callable[[], str | None]
    ) -> None:
        self._closed = closed
        self._app, self._metrics, self._paths, self._root = app, metrics, frozenset(paths), args.root_path
        self._key = None if args.api_key is None else args.api_key.encode()
        self._open = OPEN_PATHS if args.metrics_key else (*OPEN_PATHS, "/metrics")
        every = "*" in args.allowed_host or not (args.host in LOOPBACK or args.allowed_host)
        self._hosts = None if every else (*LOOPBACK, *(host.lower() for host in args.allowed_host))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check and pass on one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(self._root)  # some proxies remove it, others do not
        headers = dict(scope["headers"])
        error = self._check(scope, path, headers)
        scope = {**scope, "root_path": self._root, "path": self._root + path}
        path = path if path in self._paths else "other"
        given = headers.get(b"x-request-id", b"")
        # a refused one is not sent back
        request_id = given if REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}".encode()

        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            started = True
            if message["type"] == "http.response.start":
                self._metrics.responses.labels(path, message["status"]).inc()
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", request_id)]}
            await send(message)

        try:
            await (self._app if error is None else error_response(error))(scope, receive, send_with_id)
        except asyncio.CancelledError:  # by uvicorn, END_S after the end of the engine
            if started or (why := self._closed()) is None:
                raise
            await error_response(RequestError(503, why, code=UNAVAILABLE))(scope, receive, send_with_id)

    def _check(self, scope: Scope, path: str, headers: Mapping[bytes, bytes]) -> RequestError | None:
        names = [name for name, _ in scope["headers"]]
        for name in SINGLE_HEADERS:
            if (count := names.count(name.encode())) > 1:
                return RequestError(400, f"{name} must be sent once, got {count} headers; leave out all but one", name)
        given = headers.get(b"x-request-id")
        if given is not None and not REQUEST_ID.fullmatch(given):
            shown = ascii_only(given.decode("latin-1"))[:100]
            what = f"x-request-id must be 1 to 200 printable ASCII characters without spaces, got {shown!r}"
            return RequestError(400, f"{what}; leave it out to get one", "x-request-id")
        host = headers.get(b"host", b"").decode("latin-1")
        if self._hosts is not None and re.sub(r":\d*$", "", host).strip("[]").lower() not in self._hosts:
            what = f"Host must be one of {', '.join(self._hosts)}, got {ascii_only(host)[:100]!r}; see --allowed-host"
            return RequestError(403, what)
        if self._key is not None and path not in self._open:
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
                what = "Authorization must be 'Bearer KEY' with the server's key"
                return RequestError(401, what, code="invalid_api_key")
        return None


def make_app(client: EngineClient, tokenizer: Tokenizer, settings: Settings) -> ASGIApp:
    """Return the application."""
    metrics = Metrics(client.state, settings.model)
    handler = CompletionHandler(client, tokenizer, settings, metrics)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await client.open()
        yield
        client.close()
        handler.close()

    app = FastAPI(
        lifespan=lifespan,
        exception_handlers=dict.fromkeys((RequestError, HTTPException, Exception), _on_error),
        # no pages that load scripts from elsewhere
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    page, policy = read_page()
    page_headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"}

    @app.get("/v1/models")
    async def list_models() -> Any:
        return {"object": "list", "data": [handler.model_card(name) for name in handler.reader.names]}

    @app.get("/v1/models/{name:path}")
    async def show_model(name: str) -> Any:
        handler.reader.check_model(name)
        return handler.model_card(name)

    @app.post("/v1/completions")
    async def complete(http_request: HttpRequest) -> Response:
        return await handler.answer(http_request, Completion)

    @app.post("/v1/chat/completions")
    async def chat(http_request: HttpRequest) -> Response:
        return await handler.answer(http_request, Chat)

    def refuse(path: str) -> Any:
        async def refused() -> Response:
            raise RequestError(400, f"{path}: {REFUSED_PATHS[path]}", code="unsupported_path")

        return refused

    for path in REFUSED_PATHS:
        app.post(path)(refuse(path))

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def show_health() -> Response:
        status, body = client.health()
        return JSONResponse(body, status)

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/state")
    async def show_state() -> Any:
        return {"model": handler.model, "server": settings.about, **client.state()}

    @app.api_route("/", methods=["GET", "HEAD"])
    async def show_page() -> Response:
        return HTMLResponse(page, headers=page_headers)

    paths = [path for route in app.routes if "{" not in (path := getattr(route, "path", "{"))]
    checked = HeaderMiddleware(app, settings.args, metrics, paths, lambda: client.closed)
    if not settings.args.allowed_origin:
        return checked
    # outside of the checks: a browser asks without the key first, and pages must be able to read refusals
    return CORSMiddleware(
        checked,
        allow_origins=settings.args.allowed_origin,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["x-request-id"],
    )


def read_page() -> tuple[str, str]:
    """Return the page, and a policy that allows its own script and style and requests to this server only."""
    text = PAGE.read_text(encoding="utf-8")

    def hashes(tag: str) -> str:
        bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in bodies]
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    policy = f"default-src 'none'; connect-src 'self'; img-src data:; script-src {hashes('script')}; style-src {hashes('style')}"
    return text, f"{policy}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def server_config(app: ASGIApp, args: ServeArgs, client: EngineClient) -> uvicorn.Config:
    """Return how uvicorn serves an application."""
    config = uvicorn.Config(
        app,
        http=limit_connections(AutoHTTPProtocol, args.max_connections, client.health, args.root_path),
        log_level=args.log_level,
        access_log=args.access_log,
        timeout_graceful_shutdown=END_S,
        server_header=False,
        ws="none",
    )
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)  # the level is that of other messages
    return config
