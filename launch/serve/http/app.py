"""HTTP application: routes, and checks of headers and keys.

Nothing that a request sends is executed or unpickled.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import logging
import re
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ringattn.launch.serve.config import LOOPBACK, ServeArgs
from ringattn.launch.serve.http.api import Chat, Completion, RequestError, ascii_only
from ringattn.launch.serve.http.completions import CompletionHandler, error_response
from ringattn.launch.serve.http.connections import limit_connections
from ringattn.launch.serve.http.engine_client import EngineClient
from ringattn.launch.serve.http.metrics import CONTENT_TYPE, Metrics
from ringattn.launch.serve.messages import Settings
from ringattn.launch.serve.tokenizer import Tokenizer

PAGE = Path(__file__).with_name("page.html")
REQUEST_ID = re.compile(rb"[!-~]{1,200}")
"""A request id that a client may choose: it comes back in the answer."""
SINGLE_HEADERS = ("host", "authorization", "x-request-id")
"""Headers that may be sent once: of two, a proxy in front and this server may each obey another one."""
OPEN_PATHS = ("/", "/health")
"""Paths that need no key: the page by itself shows nothing."""

router = APIRouter()


def _handler(http_request: HttpRequest) -> CompletionHandler:
    return http_request.app.state.handler


@router.get("/v1/models")
async def list_models(http_request: HttpRequest) -> Any:
    """Return the one model, by each of its names."""
    handler = _handler(http_request)
    return {"object": "list", "data": [handler.model_card(name) for name in handler.names]}


@router.get("/v1/models/{name:path}")
async def show_model(http_request: HttpRequest, name: str) -> Any:
    """Return the model, if it has this name."""
    _handler(http_request).check_model(name)
    return _handler(http_request).model_card(name)


@router.post("/v1/completions")
async def complete(http_request: HttpRequest) -> Response:
    """Answer a completion."""
    return await _handler(http_request).answer(http_request, Completion)


@router.post("/v1/chat/completions")
async def chat(http_request: HttpRequest) -> Response:
    """Answer a chat."""
    return await _handler(http_request).answer(http_request, Chat)


@router.api_route("/health", methods=["GET", "HEAD"])
async def show_health(http_request: HttpRequest) -> Response:
    """Return 503 once the server is stopping."""
    closed = _handler(http_request).client.closed
    return JSONResponse({"status": closed or "ok"}, 503 if closed else 200)


@router.get("/metrics")
async def show_metrics(http_request: HttpRequest) -> Response:
    """Return the metrics for Prometheus."""
    return Response(_handler(http_request).metrics.text(), media_type=CONTENT_TYPE)


@router.get("/state")
async def show_state(http_request: HttpRequest) -> Any:
    """Return the state of the engine, and a description of the server."""
    handler = _handler(http_request)
    return {"model": handler.model, "server": http_request.app.state.about, **handler.client.state()}


@router.api_route("/", methods=["GET", "HEAD"])
async def show_page(http_request: HttpRequest) -> Response:
    """Return the page with the chat and the state."""
    page, policy = http_request.app.state.page
    return HTMLResponse(page, headers={"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"})


async def _on_request_error(_: HttpRequest, error: Any) -> Response:
    return error_response(error)


async def _on_http_error(http_request: HttpRequest, error: Any) -> Response:
    path = ascii_only(http_request.url.path)[:200]
    response = error_response(RequestError(error.status_code, f"{path}: {error.detail}"))
    response.headers.update(error.headers or {})
    return response


async def _on_exception(_: HttpRequest, error: Exception) -> Response:
    return error_response(RequestError(500, f"the server has failed at this request: {type(error).__name__}"))


class HeaderMiddleware:
    """Middleware that checks headers first, counts answers, and gives each a request id.

    Args:
        args: Flags of access. A refused `Host` keeps out pages of other sites whose name resolves to this machine.
        paths: Paths that are counted by name.
    """

    def __init__(self, app: ASGIApp, args: ServeArgs, metrics: Metrics, paths: Sequence[str]) -> None:
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

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.responses.labels(path, message["status"]).inc()
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", request_id)]}
            await send(message)

        await (self._app if error is None else error_response(error))(scope, receive, send_with_id)

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
        exception_handlers={RequestError: _on_request_error, HTTPException: _on_http_error, Exception: _on_exception},
        # no pages that load scripts from elsewhere
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.state.handler, app.state.about, app.state.page = handler, settings.about, read_page()
    app.include_router(router)
    paths = [path for route in router.routes if "{" not in (path := getattr(route, "path", "{"))]
    checked = HeaderMiddleware(app, settings.args, metrics, paths)
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


def server_config(
    app: ASGIApp, connections: int, log_level: str = "warning", access_log: bool = False
) -> uvicorn.Config:
    """Return how uvicorn serves an application, to at most so many connections."""
    config = uvicorn.Config(
        app,
        http=limit_connections(AutoHTTPProtocol, connections),
        log_level=log_level,
        access_log=access_log,
        timeout_graceful_shutdown=3,
        server_header=False,
        ws="none",
    )
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)  # the level is that of other messages
    return config
