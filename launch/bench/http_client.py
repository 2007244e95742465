"""A client of OpenAI-compatible servers that asks for streamed completions and takes the time of each token.

Each request has a connection of its own, and the clock starts when aiohttp is about to write the request to it: looking up the
name, connecting and TLS are not in the time to the first token. A token has the time at which `iter_any` of aiohttp returns it,
one turn of the event loop after its reading: on a busy core 0.1 ms late with one stream, and 1.0 ms (p95 1.6 to 2.4) with 32
whose tokens come at the same moment. 19,900 tokens per second took 21 to 23 us of a core per token; `server` reports how busy the
client was. `return_token_ids` gives each token a chunk, even one that is no text yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
import urllib.parse
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp  # an optional package


_read = json.JSONDecoder().raw_decode  # json.loads looks for the encoding first, and for blanks


@dataclass
class Answer:
    """Answer to one prompt, a stream of completions.

    Attributes:
        status: Of HTTP; 0 while there is none.
        failure: Reason why this is no answer; empty while it is one.
        began: Seconds on the clock of `time.perf_counter`, like `ended` and `times`.
        times: Of each token.
        cached: Tokens of the prompt that the server had cached.
        done: Nothing follows in the stream.
    """

    status: int = 0
    failure: str = ""
    began: float = 0.0
    ended: float = 0.0
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    done: bool = False
    _rest: bytes = b""

    @property
    def good(self) -> bool:
        """Return whether it has ended, with all tokens."""
        return self.ended > 0 and not self.failure

    @property
    def first_s(self) -> float:
        """Return the seconds to the first token."""
        return self.times[0] - self.began

    @property
    def per_token_s(self) -> float | None:
        """Return the mean seconds of the later tokens; None where there are none."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1) if len(self.times) > 1 else None

    @property
    def gaps_s(self) -> list[float]:
        """Return the seconds from each token to the next."""
        return [later - earlier for earlier, later in itertools.pairwise(self.times)]

    def feed(self, data: bytes, now: float) -> None:
        """Parse a part of the stream that came at time `now`; raise ValueError for an event that is no completion."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for event in (line[5:].strip() for line in lines if line.startswith(b"data:")):
            if event == b"[DONE]":
                self.done = True
                continue
            try:
                chunk, end = _read(text := event.decode())
                if end < len(text):
                    raise ValueError("more than one value")
                self._take(chunk, now)
            except (ValueError, TypeError, AttributeError) as error:
                start = event[:60].decode("utf-8", "replace")
                raise ValueError(f"an answer must be a stream of completions, got {start!r}") from error

    def _take(self, chunk: dict[str, Any], now: float) -> None:
        if "error" in chunk:
            self.failure = message_of(chunk)
        for choice in chunk.get("choices") or ():
            if ids := choice.get("token_ids"):
                self.tokens += ids
                self.times += [now] * len(ids)
            elif choice.get("text") and not self.tokens:
                self.failure = "chunks must have token_ids (return_token_ids), got text alone"
        details = (chunk.get("usage") or {}).get("prompt_tokens_details") or {}
        self.cached = details.get("cached_tokens") or self.cached


def message_of(content: Any) -> str:
    """Return the message of an error in OpenAI's format; anything else as it is, shortened.

    Example:
        >>> message_of({"error": {"message": "no room", "type": "x"}}), message_of("Bad Gateway")
        ('no room', 'Bad Gateway')
    """
    if isinstance(content, dict) and isinstance(error := content.get("error"), dict) and error.get("message"):
        content = error["message"]
    return str(content)[:300]


class ServerClient:
    """Client of one server; connections are open within `async with`.

    Args:
        url: Such as "http://127.0.0.1:8000"; a "/v1" at its end is removed.
        key: Bearer token; None for none.
        timeout_s: Seconds in which an answer must have ended.

    Raises:
        ValueError: The URL is none of HTTP, or has a user in it.
    """

    def __init__(self, url: str, key: str | None = None, timeout_s: float = 600.0) -> None:
        parts = urllib.parse.urlsplit(url)
        if "@" in parts.netloc:
            raise ValueError("url must name no user, got one; a key is given by itself")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url must be such as http://127.0.0.1:8000, got {url!r}")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        self.timeout_s = timeout_s
        self._key = key
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> ServerClient:
        import aiohttp

        async def begin(_: Any, context: Any, __: Any) -> None:
            if (answer := context.trace_request_ctx) is not None:
                answer.began = answer.began or time.perf_counter()

        trace = aiohttp.TraceConfig()
        trace.on_request_chunk_sent.append(begin)  # called before the only part of the body is sent
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),  # no request waits for a connection
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity", **headers},  # a compressor may hold back tokens
            timeout=aiohttp.ClientTimeout(total=self.timeout_s),
            trace_configs=[trace],
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, path: str) -> tuple[int, Any]:
        """Return status and content of a path, as JSON or text; raise OSError if no answer in HTTP comes in time."""
        async with self._answered("GET", path) as response:
            return response.status, _content(await response.read())

    async def ask(self, model: str, prompt: Sequence[int], tokens: int, answer: Answer | None = None) -> Answer:
        """Return the greedy answer of `tokens` tokens to a prompt, in `answer` if given; a failure is in it, not raised."""
        answer = Answer() if answer is None else answer
        body = {"model": model, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "stream": True}
        body |= {"stream_options": {"include_usage": True}, "ignore_eos": True, "return_token_ids": True}
        try:
            async with self._answered("POST", "/v1/completions", json.dumps(body).encode(), answer) as response:
                answer.status = response.status
                if response.status == 200:
                    async for data in response.content.iter_any():
                        answer.feed(data, time.perf_counter())
                    if not answer.failure and (not answer.done or len(answer.tokens) != tokens):
                        ends = "" if answer.done else ", and no [DONE]"
                        answer.failure = (
                            f"an answer must have the {tokens} tokens asked for, got {len(answer.tokens)}{ends}"
                        )
                else:
                    answer.failure = f"status {response.status}: {message_of(_content(await response.read()))}"
        except TimeoutError:
            answer.failure = f"an answer must end within {self.timeout_s:g} s, got {len(answer.tokens)} tokens"
        except (OSError, ValueError) as error:
            answer.failure = str(error)
        answer.ended = time.perf_counter()
        return answer

    @contextlib.asynccontextmanager
    async def _answered(
        self, method: str, path: str, body: bytes | None = None, answer: Answer | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the response once its head has come; errors until it has been read are OSErrors."""
        import aiohttp

        request = self._session.request(
            method,
            self.url + path,
            data=body,
            headers={} if body is None else {"Content-Type": "application/json"},
            allow_redirects=False,
            trace_request_ctx=answer,
        )
        try:
            async with request as response:
                yield response
        except asyncio.TimeoutError:  # another one than Python's own before 3.11
            raise TimeoutError(f"{path} must be answered within {self.timeout_s:g} s") from None
        except aiohttp.ClientError as error:
            raise OSError(f"{type(error).__name__}: {error}") from error


def _content(data: bytes) -> Any:
    text = data.decode("utf-8", "replace")
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return text
