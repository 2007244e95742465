"""Messages between the processes of the server: the HTTP process, rank 0 with the engine, and the other ranks.

Defines every message as a msgspec struct, its encoding (msgpack, checked against the type when it is decoded), and the sockets
between rank 0 and the HTTP process, which engine_server.py and engine_client.py use. The sockets between ranks are in
rank_channel.py. Nothing is unpickled.
"""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

from ringattn.launch.serve.config import Limits


class Logprob(msgspec.Struct, array_like=True, frozen=True):
    """Log probabilities of a chosen token and of the likeliest ones.

    Attributes:
        logprob: Natural log of the token's probability at temperature 1.
        top: The likeliest tokens and theirs, likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


class Capacity(msgspec.Struct, frozen=True):
    """Tokens and requests that the engine can hold.

    Attributes:
        tokens: That the cache of all ranks holds.
        max_running: Requests that run at a time.
        max_waiting: Requests that wait behind them (Note [Waiting requests] of scheduler.py).
        page_size: Tokens of a page, and of a block of `Request.digests`.
        keep_prefixes: Whether prefixes are shared, for which the digests are needed.
    """

    tokens: int
    max_running: int
    max_waiting: int
    page_size: int
    keep_prefixes: bool


class Event(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A new token of an answer, its end, or both.

    Attributes:
        request_id: Of the request.
        token: A new token of the answer.
        finish: Why the answer has ended: "stop" or "length".
        failure: An HTTP status and a sentence, when there is no answer.
        num_cached: Tokens of the prompt that were in the cache already.
        details: Log probabilities of the token, where they were asked for.
        scores: The same of the prompt's next tokens, from its second one on; then there is neither token nor end.
    """

    request_id: int
    token: int | None = None
    finish: str | None = None
    failure: tuple[int, str] | None = None
    num_cached: int = 0
    details: Logprob | None = None
    scores: tuple[Logprob, ...] = ()

    @property
    def last(self) -> bool:
        """Whether no event of the request follows."""
        return self.finish is not None or self.failure is not None


LINGER_MS = 5000
"""Milliseconds in which a message that was sent may leave after its socket was closed."""
RETRY_MS = 10
"""Milliseconds between attempts to connect to a receiver that is not there yet."""


# to the engine


class Prompt(msgspec.Struct, array_like=True):
    """Tokens of a prompt, and the digests of its pages (`prefix_digests`)."""

    tokens: list[int]
    digests: list[bytes]


class SamplingOptions(msgspec.Struct, array_like=True):
    """Options of `Sampling`, which says what they mean.

    Attributes:
        seed: In hexadecimal: msgpack has no integers beyond 64 bits.
    """

    temperature: float
    top_p: float
    seed: str | None
    logprobs: int | None
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]


class NewRequest(msgspec.Struct, array_like=True):
    """A request for one answer.

    Attributes:
        id: Unique.
        prompt: Index among the prompts of the message.
        max_tokens: New tokens at most.
        stops: Tokens that end the answer.
        sampling: Of its tokens.
        score_prompt: Whether logprobs of the prompt's tokens are wanted.
    """

    id: int
    prompt: int
    max_tokens: int
    stops: list[int]
    sampling: SamplingOptions
    score_prompt: bool


class Submit(msgspec.Struct, tag=True):
    """New requests, all of which are accepted or none. A prompt that several requests have is sent once."""

    prompts: list[Prompt]
    requests: list[NewRequest]


class Cancel(msgspec.Struct, tag=True):
    """Ends a request before its end; see `Engine.cancel`."""

    request_id: int
    keep: bool


class Ready(msgspec.Struct, tag=True):
    """Clients are answered from now on."""


class Heartbeat(msgspec.Struct, tag=True):
    """The sender is alive."""


ToEngine = Submit | Cancel | Ready | Heartbeat


# to the HTTP process


class Settings(msgspec.Struct, tag=True):
    """The first message: all that the HTTP process needs to begin.

    Attributes:
        model: The name under which the model is served.
        tokenizer: See `make_tokenizer`.
        limits: Of requests.
        capacity: Of the engine.
        state: Of the engine, at first.
        key: What clients must send as a bearer token; None for none.
        hosts: The names by which the server may be called; None for any.
        about: What /state says of the server itself.
        connections: Open ones at most.
    """

    model: str
    tokenizer: dict[str, Any]
    limits: Limits
    capacity: Capacity
    state: dict[str, Any]
    key: str | None
    hosts: tuple[str, ...] | None
    about: dict[str, Any]
    connections: int


class StepOutput(msgspec.Struct, tag=True, omit_defaults=True):
    """Events of one step, and the engine's state where it is new."""

    events: list[Event] = []
    state: dict[str, Any] | None = None


class Rejected(msgspec.Struct, tag=True):
    """The engine does not accept the requests of a `Submit`.

    Attributes:
        request_ids: Of the requests.
        kind: Name of the exception that the engine raised.
        reason: Its message.
    """

    request_ids: list[int]
    kind: str
    reason: str


class Stop(msgspec.Struct, tag=True):
    """No message follows: the receiver lets what is under way end, and ends."""


ToHttp = Settings | StepOutput | Rejected | Stop


# from rank 0 to the other ranks


class RankAddress(msgspec.Struct, tag=True):
    """Address at which rank 0 accepts other ranks, and the secret that identifies them."""

    host: str
    port: int
    secret: str


class PortResult(msgspec.Struct, tag=True):
    """Whether rank 0 has the port that clients connect to: an error message, empty when it has."""

    error: str


class StepCommand(msgspec.Struct, tag=True, omit_defaults=True):
    """A step that all ranks compute; the fields are those of `Plan`."""

    changes: list[tuple[Any, ...]] = []
    cache_ids: list[int] = []
    counts: list[int] = []
    tokens: list[int] = []
    from_previous: list[int] = []
    wanted: list[int] = []
    decodes: bool = False
    packed: bool = False
    mixed: bool = False
    scored: list[int] = []


ToRank = RankAddress | PortResult | StepCommand | Heartbeat | Stop


# from the other ranks to rank 0


class Hello(msgspec.Struct):
    """The first message of a connection: which rank this is, and its process id."""

    rank: int
    process: int


_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """Returns the bytes of a message."""
    return _encoder.encode(message)


decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_http = msgspec.msgpack.Decoder(ToHttp).decode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_hello = msgspec.msgpack.Decoder(Hello).decode


def to_engine_address(folder: str) -> str:
    """Return the address at which the engine receives."""
    return f"ipc://{folder}/engine"


def to_http_address(folder: str) -> str:
    """Return the address at which the HTTP process receives."""
    return f"ipc://{folder}/http"


def receive_at(address: str) -> zmq.Socket[bytes]:
    """Returns a socket that receives what is sent to an address."""
    pull = zmq.Context.instance().socket(zmq.PULL)
    pull.bind(address)
    return pull


def send_to(address: str, most_queued: int = 0) -> zmq.Socket[bytes]:
    """Returns a socket that sends to an address, whether its receiver is there yet or not.

    Args:
        address: The receiver's.
        most_queued: Messages that wait for the receiver at most; 0 for any number.
    """
    push = zmq.Context.instance().socket(zmq.PUSH)
    push.linger, push.sndhwm, push.reconnect_ivl = LINGER_MS, most_queued, RETRY_MS
    push.connect(address)
    return push
