"""How long things take, side by side: contenders take turns, and a time is the median over rounds.

Owns clocks, rounds and CUDA graphs of calls. Refuses to know what is timed.

Note [Times]
    One time is the median over rounds; in a round every contender has one turn, several calls back to back between two
    CUDA events, so that a machine that slows down slows all of them. Clocks follow the power that was drawn in the last
    tens of milliseconds: a turn on a GPU therefore begins with calls that are not timed (a call much longer than that needs
    none), and rounds go in shuffled order, so that nobody always follows the one who leaves the chip cool. With ranks, a
    round is as slow as its slowest rank. On a CPU a clock takes the place of the events.

Note [Graphs]
    Calls back to back still show the host wherever it is slower than the device. So the same calls are captured, where
    they can be, into one CUDA graph that holds several of them, and its replays take turns like everybody else: time
    without a host. What cannot be captured keeps its plain time, and the reason is kept with it.

Note [Host time]
    What a call costs its host is the time until it returns while the device has room in its queue: short bursts of calls,
    each taken alone, after the device has come to rest. The median over all of them, on the rank where it is largest.
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

from ringattn.launch.runtime.session import Session
from ringattn.transport.timeout import EventPair, record_events, wait_until_done

Timing = Literal["calls", "graph", "both"]
TURN_MS = 40.0
"""What the timed part of a turn should last on a GPU: many short calls, or one long one."""
WARM_MS = 40.0
"""What comes before it untimed."""
LONG_MS = 100.0
"""A call beyond this hides its host; it is not timed both ways."""
BURST, BURSTS = 4, 6
"""Calls that are enqueued without a pause, and how often, to find the host's time (Note [Host time])."""
SURE_S = 600.0
"""Seconds after which calls of a turn do not end any more."""
INSIDE = 10
"""Calls of several ranks that one graph holds at most."""


@dataclass
class Time:
    """What one contender took.

    Attributes:
        calls_ms: Milliseconds per plain call.
        graph_ms: Milliseconds per call inside a replayed CUDA graph (Note [Graphs]).
        graph_refused: Why there is no graph, if one was wanted.
        refused: Why there is no time at all.
        host_us: Microseconds until a plain call returns (Note [Host time]).
        rounds: Rounds the medians are taken over.
    """

    calls_ms: float | None = None
    graph_ms: float | None = None
    host_us: float | None = None
    graph_refused: str | None = None
    refused: str | None = None
    rounds: int = 0


@dataclass
class _Turn:
    call: Callable[[], Any]
    repeats: int
    inside: int
    warm: int
    expected_ms: float
    once_ms: float


def reason(error: BaseException) -> str:
    """What an exception says, short enough for a row."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]


def clock(call: Callable[[], Any], calls: int, device: torch.device) -> float:
    """Milliseconds per call, over `calls` calls back to back."""
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - started) * 1e3 / calls
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        call()
    stop.record()
    settle(EventPair(start, stop))
    return start.elapsed_time(stop) / calls


def settle(events: EventPair, patience_s: float = SURE_S) -> None:
    """Waits for the device, in a way that ends: a replay whose peer has died is known to no watchdog.

    Args:
        events: Of what is waited for.
        patience_s: Seconds from its beginning.

    Raises:
        RuntimeError: It has not ended in time.
    """
    if not wait_until_done(events, patience_s):
        raise RuntimeError(
            f"calls that are timed must end within {patience_s:g} s, got some that did not; look for an error on another rank"
        )


def capture(call: Callable[[], Any], calls: int) -> Callable[[], None]:
    """One CUDA graph of `calls` calls, as something to call.

    The current stream is captured, so it must not be the default one, and what `call` differentiates must have been
    computed on it: autograd runs a backward on the stream of its forward.
    """
    graph = _record(call, calls)
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def _record(call: Callable[[], Any], calls: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    return graph


def capture_together(
    call: Callable[[], Any], calls: int, session: Session
) -> tuple[Callable[[], None] | None, str | None]:
    """`capture` on every rank, or on none.

    Returns:
        The replay, or None and the reason, the same on every rank.
    """
    graph, why = None, None
    session.barrier()
    try:
        if session.device.type != "cuda":
            raise NotImplementedError("graphs need a GPU")
        graph = _record(call, calls)
    except Exception as error:
        why = reason(error)
    said = {rank: one for rank, one in enumerate(session.gather(why)) if one is not None}
    if said or graph is None:
        return None, "; ".join(sorted(set(said.values())))
    graph.replay()
    settle(record_events(session.device))
    session.barrier()
    return graph.replay, None


def host_us(call: Callable[[], Any], session: Session) -> float:
    """Microseconds until a call returns (Note [Host time])."""
    found = []
    for _ in range(BURSTS):
        session.barrier()
        for _ in range(BURST):
            began = time.perf_counter()
            call()
            found.append((time.perf_counter() - began) * 1e6)
    return session.maximum([statistics.median(found)])[0]


def time_together(
    calls: dict[str, Callable[[], Any]],
    session: Session,
    rounds: int,
    seconds: float = math.inf,
    captured: Collection[str] = (),
) -> dict[str, Time]:
    """Times calls that several ranks make together (Note [Times]); the same answer on every rank.

    A call that raises on one rank ends the run: the others may be waiting for it.

    Args:
        calls: The contenders.
        session: The ranks.
        rounds: Rounds; fewer, but three at least, where they would take more than `seconds`.
        seconds: What all rounds together should take.
        captured: Those that are also replayed from a CUDA graph, where one can be made, and whose host is timed.
    """
    found = {name: Time() for name in calls}
    turns: dict[tuple[str, str], _Turn] = {}
    for name, call in calls.items():
        turn = turns[name, "calls"] = _plan(call, session)
        if name in captured and turn.once_ms <= LONG_MS:
            found[name].host_us = host_us(call, session)
            inside = min(INSIDE, turn.repeats)
            graph, found[name].graph_refused = capture_together(call, inside, session)
            if graph is not None:
                repeats, warm = (-(-count // inside) for count in (turn.repeats, turn.warm))
                turns[name, "graph"] = _Turn(graph, repeats, inside, warm, turn.expected_ms, turn.once_ms)
    expected = sum(turn.expected_ms for turn in turns.values())
    rounds = _fitting(rounds, expected, seconds)
    for (name, how), ms in _run(turns, session, rounds).items():
        setattr(found[name], f"{how}_ms", ms)
        found[name].rounds = rounds
    return found


def time_calls(
    calls: dict[str, Callable[[], Any]], session: Session, rounds: int, timing: Timing, seconds: float = math.inf
) -> dict[str, Time]:
    """Times every contender, as plain calls and as graphs; what raises is said in its `Time` and stops nobody else.

    Args:
        calls: The contenders.
        session: One rank: an exception on one of several would leave the others waiting.
        rounds: Rounds; fewer, but three at least, where they would take more than `seconds`.
        timing: Plain calls, graphs where they can be made and plain calls elsewhere, or both for calls up to LONG_MS.
        seconds: What all rounds together should take.
    """
    found = {name: Time() for name in calls}
    turns: dict[tuple[str, str], _Turn] = {}
    for name, call in calls.items():
        try:
            turn = _plan(call, session)
            if session.device.type == "cuda":
                _refuse_other_streams(call, session.device)
        except Exception as error:
            found[name].refused = reason(error)
            continue
        if timing != "calls":
            try:
                if session.device.type != "cuda":
                    raise NotImplementedError("graphs need a GPU")
                graph = capture(call, turn.repeats)
                warm = -(-turn.warm // turn.repeats)
                turns[name, "graph"] = _Turn(graph, 1, turn.repeats, warm, turn.expected_ms, turn.once_ms)
            except Exception as error:
                found[name].graph_refused = reason(error)
        wanted = timing == "calls" or (timing == "both" and turn.expected_ms <= LONG_MS * (turn.repeats + turn.warm))
        if wanted or (name, "graph") not in turns:
            turns[name, "calls"] = turn
    expected = sum(turn.expected_ms for turn in turns.values())
    rounds = _fitting(rounds, expected, seconds)
    for (name, how), ms in _run(turns, session, rounds).items():
        setattr(found[name], f"{how}_ms", ms)
        found[name].rounds = rounds
    return found


def _fitting(rounds: int, each_ms: float, seconds: float) -> int:
    """Rounds of so many milliseconds that fit, but three, or all where they are fewer."""
    return rounds if rounds * each_ms <= 1e3 * seconds else max(min(rounds, 3), int(1e3 * seconds / each_ms))


def _plan(call: Callable[[], Any], session: Session) -> _Turn:
    call()
    session.barrier()
    once = session.maximum([clock(call, 1, session.device)])[0]
    gpu = session.device.type == "cuda"
    repeats, warm = (max(1, min(100, math.ceil(ms / once))) if gpu else n for ms, n in ((TURN_MS, 1), (WARM_MS, 0)))
    if once > LONG_MS:
        warm = 0
    return _Turn(call, repeats, 1, warm, (repeats + warm) * once, once)


def _refuse_other_streams(call: Callable[[], Any], device: torch.device) -> None:
    """Raises when the device is busy well after the events of a call say that it is done (thrice: hosts may pause)."""
    for _ in range(3):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        ms = clock(call, 1, device)
        torch.cuda.synchronize(device)
        if (time.perf_counter() - began) * 1e3 - ms <= max(0.5 * ms, 0.5):
            return
    raise RuntimeError("its work must run on the current stream, got work elsewhere; it cannot be timed here")


def _run(turns: dict[tuple[str, str], _Turn], session: Session, rounds: int) -> dict[tuple[str, str], float]:
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
    return {key: statistics.median(session.maximum(found)) for key, found in times.items()}
