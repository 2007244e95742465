"""What the process of the engine and the process of HTTP say to each other: JSON, with its length in front, on one connection.

Owns the forms of jobs and events, and the frames around them. Refuses to know who sends them and when (front.py, desk.py), and
to unpickle anything.

Note [What is said]
    To the engine: {"submit": jobs}, {"cancel": name, "keep": ...}, {} as a sign of life, {"ready": true} once.
    From the engine: {"serve": settings} once, with the listening socket; then {"events": [...], "state": {...}} after a step, or
    one of both; {"refused": names, "as": kind, "message": ...} in place of their events; {"stop": true} at the end. Names of jobs
    are handed out by the side of HTTP, which so waits for no reply. Prompts travel as base64 of their bytes, which takes both
    sides about half the time of JSON's digits.
"""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import Sequence
from typing import Any

from ringattn.launch.serving.sampling import Logprob, Sampling
from ringattn.launch.serving.scheduling import Event, Job

HEAD = 8
"""Bytes of a message's length."""
DIGEST = 16
"""Bytes of a digest."""

Message = dict[str, Any]


def pack(message: Message) -> bytes:
    """A message as it travels."""
    data = json.dumps(message, separators=(",", ":")).encode()
    return len(data).to_bytes(HEAD, "little") + data


class Unpacker:
    """Messages out of bytes that come in any pieces.

    Example:
        >>> unpacker, data = Unpacker(), pack({"a": 1}) + pack({})
        >>> [unpacker.push(piece) for piece in (data[:3], data[3:-1], data[-1:])]
        [[], [{'a': 1}], [{}]]
    """

    def __init__(self) -> None:
        self._data = bytearray()

    def push(self, data: bytes) -> list[Message]:
        """The messages that are whole now."""
        self._data += data
        found, at = [], 0
        while len(self._data) - at >= HEAD:
            end = at + HEAD + int.from_bytes(self._data[at : at + HEAD], "little")
            if len(self._data) < end:
                break
            found.append(json.loads(self._data[at + HEAD : end]))
            at = end
        del self._data[:at]
        return found


def write_jobs(jobs: Sequence[Job]) -> list[Any]:
    """Jobs as JSON takes them. What the engine keeps about them does not travel; a prompt that several have travels once."""
    prompts: dict[int, int] = {}
    texts: list[list[str]] = []
    rows = []
    for job in jobs:
        if id(job.prompt) not in prompts:
            prompts[id(job.prompt)] = len(texts)
            texts.append([_write_bytes(array("I", job.prompt).tobytes()), _write_bytes(b"".join(job.digests))])
        stops, sampling = sorted(job.stops), job.sampling.write()
        rows.append([job.name, prompts[id(job.prompt)], job.max_tokens, sampling, stops, job.score_prompt])
    return [texts, rows]


def read_jobs(written: list[Any]) -> list[Job]:
    """The jobs that `write_jobs` wrote."""
    prompts = []
    for tokens, digests in written[0]:
        found = array("I")
        found.frombytes(base64.b64decode(tokens))
        data = base64.b64decode(digests)
        prompts.append((found.tolist(), [data[x : x + DIGEST] for x in range(0, len(data), DIGEST)]))
    jobs = []
    for name, place, max_tokens, sampling, stops, score_prompt in written[1]:
        tokens, digests = prompts[place]
        job = Job(name, tokens, max_tokens, stops=frozenset(stops), digests=digests, score_prompt=score_prompt)
        job.sampling = Sampling.read(sampling)
        jobs.append(job)
    return jobs


def write_events(events: Sequence[Event]) -> list[Any]:
    """Events as JSON takes them: rows, which end where nothing more is said. Most are a name and a token."""
    return [
        [event.name, event.token]
        if event.finish is None
        and event.failure is None
        and event.details is None
        and not (event.shared or event.scores)
        else _write_event(event)
        for event in events
    ]


def _write_event(event: Event) -> list[Any]:
    row = [event.name, event.token, event.finish, event.failure, event.shared]
    if event.details is not None or event.scores:
        row.append(None if event.details is None else _write_details(event.details))
        row += [list(map(_write_details, event.scores))] if event.scores else []
    return row


def read_events(written: Sequence[Any]) -> list[Event]:
    """The events that `write_events` wrote."""
    return [Event(*row) if len(row) == 2 else _read_event(*row) for row in written]


def _read_event(
    name: int, token: int | None, finish: str | None, failure: Any, shared: int, details: Any = None, scores: Any = ()
) -> Event:
    told = None if failure is None else (failure[0], failure[1])
    said = None if details is None else _read_details(details)
    return Event(name, token, finish, told, shared, said, tuple([_read_details(one) for one in scores]))


def _write_details(details: Logprob) -> list[Any]:
    return [details.logprob, details.top]


def _read_details(details: list[Any]) -> Logprob:
    logprob, top = details
    return Logprob(logprob, tuple([(token, value) for token, value in top]))


def _write_bytes(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
