"""Asks an OpenAI-compatible server for streamed answers, and notes when each token came.

Owns one request: HTTP/1.1 as a client speaks it, the events of a stream, and what counts as a failure. Refuses to know how many
requests there are, and what is made of their times (`bench_server`). Standard library only.

Note [A client of its own]
    Who measures must cost less than what is measured. 32 streams of 100 tokens per second each took 125 us of a core per token
    in a general HTTP client (httpx), and take 30 here, in the same run: what it takes to receive some bytes, cut them and read
    their JSON, in one callback of the event loop. With the former, 64 fast streams are more than a core can do: tokens would wait
    for the client, and its times be taken for the server's. `bench_server` says beside each speed how busy the client was.

Note [What is timed]
    The connection stands and the request is put together before the clock starts; each request has a connection of its own. Times
    are those at which bytes came to this process. A token that the server holds back, because it is no text by itself yet,
    would be missing from a stream of texts: `return_token_ids` gives each token a chunk, and its number.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

MOST_HEAD = 2**16
"""Bytes of an answer's status and headers, at most."""


@dataclass
class Answer:
    """What came back for one prompt.

    Attributes:
        wanted: Tokens that were asked for.
        status: Of HTTP; 0 while there is none.
        failure: Why this is no answer; empty while it is one.
        began: When it was asked, seconds on the clock of `time.perf_counter`.
        ended: When all had come; likewise.
        times: When each token came; likewise.
        tokens: Which they were.
        cached: How many tokens of the prompt the server says it had.
    """

    wanted: int
    status: int = 0
    failure: str = ""
    began: float = 0.0
    ended: float = 0.0
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cached: int = 0

    @property
    def good(self) -> bool:
        """Whether it has ended, with all tokens."""
        return self.ended > 0 and not self.failure

    @property
    def first_s(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.began

    @property
    def per_token_s(self) -> float | None:
        """The mean of the seconds that the later tokens took; None where there are none."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1) if len(self.times) > 1 else None

    @property
    def gaps_s(self) -> list[float]:
        """Seconds from each token to the next."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


class Reply:
    r"""An answer of HTTP/1.1 as its bytes come, in pieces of any size.

    Attributes:
        status: 0 until the head has come.
        ended: Whether all of it has come.

    Example:
        >>> reply = Reply()
        >>> reply.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nab"), reply.status
        (b'ab', 200)
        >>> reply.feed(b"c\r\n0\r\n\r\n"), reply.ended
        (b'c', True)
    """

    def __init__(self) -> None:
        self.status = 0
        self.ended = False
        self._held = bytearray()
        self._chunked = False
        self._left: int | None = None  # of a chunk, or of the body; None: it goes on to the end of the connection

    def feed(self, data: bytes) -> bytes:
        """What some bytes add to the body.

        Raises:
            ValueError: They are not HTTP.
        """
        self._held += data
        if not self.status:
            end = self._held.find(b"\r\n\r\n", 0, MOST_HEAD)
            if end < 0:
                if len(self._held) >= MOST_HEAD:
                    raise ValueError(f"the head of an answer must have less than {MOST_HEAD} bytes, got more")
                return b""
            self._read_head(bytes(self._held[:end]).decode("latin-1"))
            del self._held[: end + 4]
        body = bytearray()
        while self._held and not self.ended:
            if not self._chunked or self._left:
                count = len(self._held) if self._left is None else self._left
                piece = self._held[:count]
                del self._held[:count]
                body += piece
                if self._left is not None:
                    self._left -= len(piece)
                    self.ended = not (self._left or self._chunked)
                continue
            end = self._held.find(b"\r\n")
            if end < 0:
                break
            size = bytes(self._held[:end]).partition(b";")[0]
            del self._held[: end + 2]
            if size:  # nothing stands on the line behind a chunk
                self._left = int(size, 16)
                self.ended = self._left == 0
        return bytes(body)

    def close(self) -> None:
        """The connection has ended.

        Raises:
            ValueError: Something was still to come.
        """
        if not self.ended and (not self.status or self._chunked or self._left is not None):
            raise ValueError("the connection must stand until the answer has ended, got its end before")
        self.ended = True

    def _read_head(self, head: str) -> None:
        first, *lines = head.split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise ValueError(f"an answer must begin with HTTP/1.1 and a status, got {first[:60]!r}")
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._chunked = "chunked" in fields.get("transfer-encoding", "").lower()
        if not self._chunked and "content-length" in fields:
            self._left = int(fields["content-length"])
            self.ended = self._left == 0
        self.status = int(rest[:3])


class Events:
    """The tokens of a stream of completions.

    Args:
        answer: Where they go.

    Attributes:
        done: Whether the server has said that nothing follows.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer, self._rest, self.done = answer, b"", False

    def feed(self, data: bytes, now: float) -> None:
        """Takes a part of the stream that came at a time.

        Raises:
            ValueError: An event is not JSON.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            event = line[5:].strip()
            if event == b"[DONE]":
                self.done = True
            else:
                self._take(json.loads(event), now)

    def _take(self, chunk: dict[str, Any], now: float) -> None:
        answer = self._answer
        if "error" in chunk:
            answer.failure = message_of(chunk)
        for choice in chunk.get("choices") or ():
            if ids := choice.get("token_ids"):
                answer.tokens += ids
                answer.times += [now] * len(ids)
            elif choice.get("text") and not answer.tokens:
                answer.failure = "chunks must have token_ids (return_token_ids), got text alone"
        details = (chunk.get("usage") or {}).get("prompt_tokens_details") or {}
        answer.cached = details.get("cached_tokens") or answer.cached


def message_of(content: Any) -> str:
    """What an error of OpenAI's format says; anything else as it is, shortened.

    Example:
        >>> message_of({"error": {"message": "no room", "type": "x"}}), message_of("Bad Gateway")
        ('no room', 'Bad Gateway')
    """
    if isinstance(content, dict) and isinstance(error := content.get("error"), dict) and error.get("message"):
        content = error["message"]
    return str(content)[:300]


class _Exchange(asyncio.Protocol):
    """One request's connection.

    Args:
        take: Gets the reply, what its body has more, and when that came.

    Attributes:
        over: Done when the answer has ended, or can not.
    """

    def __init__(self, take: Callable[[Reply, bytes, float], None]) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._take, self._reply = take, Reply()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "a connection of TCP"
        self._transport = transport
        if self.over.done():
            transport.abort()

    def give_up(self) -> None:
        """Ends the connection, or sees to it that it ends as soon as it stands."""
        self.over.cancel()
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        try:
            body = self._reply.feed(data)
            if body or self._reply.ended:
                self._take(self._reply, body, now)
        except (ValueError, TypeError, AttributeError) as error:
            self._end(ValueError(f"an answer must be a stream of completions in HTTP, got: {error}"))
        if self._reply.ended:
            self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        try:
            self._reply.close()
        except ValueError as error:
            self._end(exc or error)
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if not self.over.done():
            self.over.set_exception(error) if error else self.over.set_result(None)


class ServerClient:
    """Asks one server.

    Args:
        url: Where it is: "http://127.0.0.1:8000"; "/v1" at its end is understood.
        key: What it wants as a bearer token; None for none.
        timeout_s: Seconds in which an answer must have ended.

    Raises:
        ValueError: The URL is none of HTTP.
    """

    def __init__(self, url: str, key: str | None = None, timeout_s: float = 600.0) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url must be such as http://127.0.0.1:8000, got {url!r}")
        self.secure = parts.scheme == "https"
        self.host, self.port = parts.hostname, parts.port or (443 if self.secure else 80)
        self.timeout_s = timeout_s
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        headers = {"Host": parts.netloc.rpartition("@")[2], "Connection": "close", "Accept": "*/*"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())

    async def get(self, path: str) -> tuple[int, Any]:
        """Status and content of a path: JSON where it is that, else text.

        Raises:
            OSError: The server can not be reached, or does not answer in time.
            ValueError: What comes is not HTTP.
        """
        status, whole = 0, bytearray()

        def take(reply: Reply, body: bytes, _: float) -> None:
            nonlocal status, whole
            status = reply.status
            whole += body

        try:
            await asyncio.wait_for(self._exchange(self._request("GET", path), take, lambda: None), self.timeout_s)
        except (TimeoutError, asyncio.TimeoutError):  # two kinds before Python 3.11
            raise OSError(f"{path} must be answered within {self.timeout_s:g} s, got nothing") from None
        return status, _content(whole)

    async def ask(self, model: str, prompt: Sequence[int], tokens: int, answer: Answer | None = None) -> Answer:
        """The greedy answer to a prompt; a failure is told in it, not raised.

        Args:
            model: The model's name.
            prompt: Its tokens.
            tokens: Tokens to ask for; it gets as many, whichever they are.
            answer: Where it goes, for those who look at it before its end.
        """
        answer = Answer(tokens) if answer is None else answer
        body = {"model": model, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "stream": True}
        body |= {"stream_options": {"include_usage": True}, "ignore_eos": True, "return_token_ids": True}
        request = self._request("POST", "/v1/completions", json.dumps(body).encode())
        events, refusal = Events(answer), bytearray()

        def begin() -> None:
            answer.began = time.perf_counter()

        def take(reply: Reply, body: bytes, now: float) -> None:
            answer.status = reply.status
            if reply.status == 200:
                events.feed(body, now)
            else:
                refusal.extend(body)

        try:
            await asyncio.wait_for(self._exchange(request, take, begin), self.timeout_s)
            if answer.status != 200:
                answer.failure = f"status {answer.status}: {message_of(_content(refusal))}"
            elif not answer.failure and (not events.done or len(answer.tokens) != tokens):
                ends = "" if events.done else ", and no [DONE]"
                answer.failure = f"an answer must have the {tokens} tokens asked for, got {len(answer.tokens)}{ends}"
        except (TimeoutError, asyncio.TimeoutError):
            answer.failure = f"an answer must end within {self.timeout_s:g} s, got {len(answer.tokens)} tokens"
        except (OSError, ValueError) as error:
            answer.failure = f"{type(error).__name__}: {error}"
        answer.ended = time.perf_counter()
        return answer

    def _request(self, method: str, path: str, body: bytes = b"") -> bytes:
        kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if method == "POST" else ""
        return f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}{kind}\r\n".encode() + body

    async def _exchange(
        self, request: bytes, take: Callable[[Reply, bytes, float], None], begin: Callable[[], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        exchange = _Exchange(take)
        try:
            transport, _ = await loop.create_connection(
                lambda: exchange, self.host, self.port, ssl=True if self.secure else None
            )
            begin()
            transport.write(request)
            await exchange.over
        finally:
            exchange.give_up()


def _content(data: bytes | bytearray) -> Any:
    text = data.decode("utf-8", "replace")
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return text
