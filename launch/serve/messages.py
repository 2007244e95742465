"""Messages between the processes of the server: the HTTP process, rank 0 with the engine, and the other ranks.

Every message is a msgspec struct, encoded as msgpack and checked against its type when it is decoded; nothing is unpickled. The
sockets between rank 0 and the HTTP process are made here, those between ranks in rank_channel.py.
"""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

from ringattn.launch.serve.config import ServeArgs
from ringattn.launch.serve.sampling import Logprob, Sampling

BEAT_S = 1.0  # seconds between heartbeats of a process, and between messages to idle ranks, whose waits have a timeout
LINGER_MS = 5000  # milliseconds in which a message that was sent may leave after its socket was closed
UNAVAILABLE, TIME_LIMIT, NOT_FINITE, GRAMMAR = "unavailable", "time_limit", "not_finite", "invalid_grammar"
"""Codes of failures: of the server, of a request that took too long, whose logits are NaN, or whose grammar is too complex."""
RETRY_MS = 10  # milliseconds between attempts to connect to a receiver that is not there yet


class Event(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A new token of an answer, its end, or both."""

    request_id: int
    token: int | None = None
    finish: str | None = None  # reason for the end of the answer: "stop" or "length"
    failure: tuple[int, str, str] | None = None  # HTTP status, message and code of the error, if there is no answer
    num_cached: int = 0  # tokens of the prompt that were in the cache already
    details: Logprob | None = None  # logprobs of the token, if requested
    # logprobs of the prompt's next tokens, from its second one on; then there is neither token nor end
    scores: tuple[Logprob, ...] = ()

    @property
    def last(self) -> bool:
        """Whether no event of the request follows."""
        return self.finish is not None or self.failure is not None


# to the engine


class Prompt(msgspec.Struct, array_like=True):
    """Tokens of a prompt, and the digests of its pages (`prefix_digests`)."""

    tokens: list[int]
    digests: list[bytes]


class NewRequest(msgspec.Struct, array_like=True):
    """A request for one answer (see `scheduler.Request`); `prompt` is an index into the prompts of the message."""

    id: int
    prompt: int
    max_tokens: int
    stops: list[int]
    sampling: Sampling
    score_prompt: bool


class Submit(msgspec.Struct, tag=True):
    """New requests. A prompt that several requests have is sent once."""

    prompts: list[Prompt]
    requests: list[NewRequest]
    arrived: float = 0.0  # when they came, on the monotonic clock of the machine; 0: just now
    grammar: str = ""  # that their answers follow (`Grammar.text`); "" for none


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
    """The first message: all that the HTTP process needs to begin."""

    model: str
    tokenizer: dict[str, Any]  # argument of `make_tokenizer`
    args: ServeArgs
    length: int  # maximum tokens of a prompt and its answer
    state: dict[str, Any]
    about: dict[str, Any] = {}  # description of the server for /state
    defaults: dict[str, int | float] = {}  # options of requests that leave them out


class StepOutput(msgspec.Struct, tag=True, omit_defaults=True):
    """Events of one step, and the engine's state if it is new."""

    events: list[Event] = []
    state: dict[str, Any] | None = None


class Stop(msgspec.Struct, tag=True):
    """No message follows: the receiver finishes its work and exits."""


ToHttp = Settings | StepOutput | Stop


# between ranks


class StepCommand(msgspec.Struct, tag=True, omit_defaults=True):
    """A step that all ranks compute."""

    # changes of the page allocator before the step: ("add_request", cache_id, reserved), ("fork", cache_id, parent, length,
    # reserved), ("reserve", cache_id, reserved), ("place", cache_id, ranks, lengths), ("truncate", cache_id, length, reserved),
    # ("free", cache_id): a method of the allocator, the request, and the other arguments
    changes: list[tuple[Any, ...]] = []
    # pages that are copied to host memory before the step: (rank, page, slot), and then pages that are copied back: (rank, slot,
    # page), of which the next step may be the first to read
    saves: list[tuple[int, int, int]] = []
    loads: list[tuple[int, int, int]] = []
    # ids in the cache of the requests that compute tokens; empty when there is nothing to compute
    cache_ids: list[int] = []
    counts: list[int] = []  # number of tokens of each
    tokens: list[int] = []  # those tokens, one request after another
    # for each token its index among those that the previous step samples (Note [Asynchronous steps] of scheduler.py), and -1 if
    # `tokens` has it. Empty if it has all.
    from_previous: list[int] = []
    # indices of the requests that get a token from this step: all but those in the middle of their prompt
    wanted: list[int] = []
    decodes: bool = False  # whether each request computes its last token; else they compute parts of prompts
    packed: bool = False  # whether these are computed like decoding (Note [Short prompts] of scheduler.py)
    # whether some compute their last token, and others parts of prompts, in single rows (same Note)
    mixed: bool = False
    # indices of the requests whose rows all give logits; only if decodes, packed and mixed are False
    scored: list[int] = []


ToRank = StepCommand | Heartbeat | Stop


encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_http = msgspec.msgpack.Decoder(ToHttp).decode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode


def receive_at(folder: str, receiver: str) -> zmq.Socket[bytes]:
    """Return the socket in a folder at which a receiver, "engine" or "http", receives."""
    pull = zmq.Context.instance().socket(zmq.PULL)
    pull.bind(f"ipc://{folder}/{receiver}")
    return pull


def send_to(folder: str, receiver: str, most_queued: int = 0) -> zmq.Socket[bytes]:
    """Return a socket that sends to a receiver; at most `most_queued` messages wait for the receiver, 0 for any number."""
    push = zmq.Context.instance().socket(zmq.PUSH)
    push.linger, push.sndhwm, push.reconnect_ivl = LINGER_MS, most_queued, RETRY_MS
    push.connect(f"ipc://{folder}/{receiver}")
    return push


def poller(*sockets: Any) -> zmq.Poller:
    """Return a poller that waits until one of some sockets can be read."""
    found = zmq.Poller()
    for one in sockets:
        found.register(one, zmq.POLLIN)
    return found
