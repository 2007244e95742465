"""Timing of calls in turns: the median over rounds, as plain calls and as replays of CUDA graphs.

Note [Times]
    A time is the median over rounds. In a round every call has one turn: several calls back to back between two CUDA events,
    so that a machine that slows down slows all of them. A turn on a GPU begins with untimed calls, because clocks follow the
    power drawn in the last tens of milliseconds, and a training step finds work in the queue of its device. Rounds are
    shuffled, so that no call always runs on the chip that another left cool. A round is as slow as its slowest rank. On a CPU
    the host's clock replaces the events.
    Plain calls show the host where it is slower than the device. A CUDA graph of several calls takes turns, too: its time
    has no host in it. A call that cannot be captured keeps its plain time, and the reason is reported.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ringattn.launch.common.session import Session
from ringattn.transport.timeout import EventPair, record_events, wait_until_done

Timing = Literal["calls", "graph", "both"]
TURN_MS = 40.0
"""Target length of the timed part of a turn on a GPU, and of the untimed part before it."""
LONG_MS = 100.0
"""Calls beyond this hide their host, behind an untimed one: they are not timed in both ways."""
BURST, BURSTS = 4, 6
"""Calls that are enqueued without a pause to time the host, and how often that is done."""
HANG_S = 600.0
"""Seconds after which the calls of a turn are taken to hang."""
CALLS_PER_GRAPH = 10
"""Limit of the calls of several ranks in one graph."""


@dataclass
class Time:
    """Times of one plain call, of one inside a replayed CUDA graph, and of the host until a plain call returns.

    Attributes:
        graph_refused: Reason for having no graph, if one was wanted.
        refused: Reason for having no time at all.
    """

    calls_ms: float | None = None
    graph_ms: float | None = None
    host_us: float | None = None
    graph_refused: str | None = None
    refused: str | None = None
    rounds: int = 0

    @property
    def eager_ms(self) -> float:
        """Milliseconds of a plain call."""
        assert self.calls_ms is not None, "plain calls are always timed"
        return self.calls_ms

    @property
    def best_ms(self) -> float:
        """Milliseconds of a call in a graph where there is one, else of a plain one."""
        return self.eager_ms if self.graph_ms is None else self.graph_ms


@dataclass
class _Turn:
    """`repeats` timed runs of `call`, each of `inside` calls, after `warm` untimed ones."""

    call: Callable[[], Any]
    repeats: int
    inside: int
    warm: int
    once_ms: float

    @property
    def expected_ms(self) -> float:
        return (self.repeats + self.warm) * self.inside * self.once_ms


def reason(error: BaseException) -> str:
    """Return the type and first line of an exception, short enough for a row."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]


def clock(call: Callable[[], Any], calls: int, device: torch.device) -> float:
    """Return the milliseconds per call, over `calls` calls back to back."""
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - started) * 1e3 / calls
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    stop.record()
    wait_for_events(EventPair(start, stop))
    return start.elapsed_time(stop) / calls


def wait_for_events(events: EventPair, timeout_s: float = HANG_S) -> None:
    """Wait for the device, and raise after a timeout: no watchdog covers a replay whose peer has died."""
    if not wait_until_done(events, timeout_s):
        raise RuntimeError(
            f"calls that are timed must end within {timeout_s:g} s, got some that did not; look for an error on another rank"
        )


def capture_together(
    call: Callable[[], Any], calls: int, session: Session
) -> tuple[Callable[[], None] | None, str | None]:
    """Capture one CUDA graph of `calls` calls on every rank, or on none.

    The current stream is captured, so it must not be the default one, and tensors that `call` differentiates must have
    been computed on it: autograd runs a backward on the stream of its forward. Returns the replay, or None and the reason, the
    same on every rank.
    """
    graph, why = None, None
    session.barrier()
    try:
        if session.device.type != "cuda":
            raise NotImplementedError("graphs need a GPU")
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            for _ in range(calls):
                call()
    except Exception as error:
        why = reason(error)
    reasons = {one for one in session.gather(why) if one is not None}
    if reasons or graph is None:
        return None, "; ".join(sorted(reasons))
    graph.replay()
    wait_for_events(record_events(session.device))
    session.barrier()
    return graph.replay, None


def host_us(call: Callable[[], Any], session: Session, bursts: int = BURSTS, burst: int = BURST) -> float:
    """Return the microseconds until a call returns while the device has room in its queue.

    The median over `bursts` times `burst` calls back to back, each burst on an idle device, on the slowest rank.
    """
    taken = []
    for _ in range(bursts):
        session.barrier()
        for _ in range(burst):
            began = time.perf_counter()
            call()
            taken.append((time.perf_counter() - began) * 1e6)
    return session.maximum([statistics.median(taken)])[0]


def time_together(
    calls: dict[str, Callable[[], Any]],
    session: Session,
    rounds: int,
    seconds: float = math.inf,
    captured: Collection[str] = (),
) -> dict[str, Time]:
    """Time calls that several ranks make together (Note [Times]); the same answer on every rank.

    A call that raises on one rank ends the run: the others may be waiting for it. There are `rounds` rounds, or fewer, but at
    least three, where they would take more than `seconds` together. Of the calls named in `captured` up to LONG_MS, graph and
    host are timed, too.
    """
    found, turns = {name: Time() for name in calls}, dict[tuple[str, str], _Turn]()
    for name, call in calls.items():
        turn = turns[name, "calls"] = _plan(call, session)
        if name in captured and turn.once_ms <= LONG_MS:
            found[name].host_us = host_us(call, session)
            _add_graph(turns, name, session, turn, found[name])
    return _run(turns, session, rounds, seconds, found)


def time_calls(
    calls: dict[str, Callable[[], Any]], session: Session, rounds: int, timing: Timing, seconds: float = math.inf
) -> dict[str, Time]:
    """Time calls of a single rank like `time_together`; an exception becomes the reason of its call and stops no other.

    `timing` is plain calls; graphs where they can be captured and plain calls elsewhere; or both for calls up to LONG_MS.
    """
    found, turns = {name: Time() for name in calls}, dict[tuple[str, str], _Turn]()
    for name, call in calls.items():
        try:
            turn = _plan(call, session)
            if session.device.type == "cuda":
                _check_stream(call, session.device)
        except Exception as error:
            found[name].refused = reason(error)
            continue
        if timing != "calls":
            _add_graph(turns, name, session, turn, found[name])
        if timing == "calls" or (timing == "both" and turn.once_ms <= LONG_MS) or found[name].graph_refused is not None:
            turns[name, "calls"] = turn
    return _run(turns, session, rounds, seconds, found)


def _plan(call: Callable[[], Any], session: Session) -> _Turn:
    call()
    session.barrier()
    once = session.maximum([clock(call, 1, session.device)])[0]
    on_gpu = session.device.type == "cuda"
    repeats = max(1, min(100, math.ceil(TURN_MS / once))) if on_gpu else 1
    return _Turn(call, repeats, 1, repeats if on_gpu else 0, once)


def _add_graph(turns: dict[tuple[str, str], _Turn], name: str, session: Session, turn: _Turn, found: Time) -> None:
    inside = turn.repeats if session.world_size == 1 else min(CALLS_PER_GRAPH, turn.repeats)
    graph, found.graph_refused = capture_together(turn.call, inside, session)
    if graph is not None:
        repeats, warm = (-(-count // inside) for count in (turn.repeats, turn.warm))
        turns[name, "graph"] = _Turn(graph, repeats, inside, warm, turn.once_ms)


def _check_stream(call: Callable[[], Any], device: torch.device) -> None:
    """Raise if the device is busy long after the events of a call have ended (three times: hosts may pause)."""
    for _ in range(3):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        ms = clock(call, 1, device)
        torch.cuda.synchronize(device)
        if (time.perf_counter() - began) * 1e3 - ms <= max(0.5 * ms, 0.5):
            return
    raise RuntimeError("its work must run on the current stream, got work elsewhere; it cannot be timed here")


def _run(
    turns: dict[tuple[str, str], _Turn], session: Session, rounds: int, seconds: float, found: dict[str, Time]
) -> dict[str, Time]:
    expected_ms = sum(turn.expected_ms for turn in turns.values())
    if rounds * expected_ms > 1e3 * seconds:
        rounds = max(min(rounds, 3), int(1e3 * seconds / expected_ms))
    times: dict[tuple[str, str], list[float]] = {key: [] for key in turns}
    order = list(turns)
    for number in range(rounds):
        random.Random(number).shuffle(order)  # alike on every rank
        for key in order:
            turn = turns[key]
            session.barrier()
            for _ in range(turn.warm):
                turn.call()
            times[key].append(clock(turn.call, turn.repeats, session.device) / turn.inside)
    for (name, how), taken in times.items():
        setattr(found[name], f"{how}_ms", statistics.median(session.maximum(taken)))
        found[name].rounds = rounds
    return found
