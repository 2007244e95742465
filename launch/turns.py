"""How long things take, side by side: contenders take turns, and a time is the median over rounds.

Owns clocks, rounds and CUDA graphs of calls. Refuses to know what is timed.

Note [Times]
    One time is the median over rounds; in a round every contender has one turn, several calls back to back between two
    CUDA events, so that a machine that slows down slows all of them. Clocks follow the power that was drawn in the last
    tens of milliseconds: a turn on a GPU therefore begins with calls that are not timed, and rounds go in shuffled order, so
    that nobody always follows the one who leaves the chip cool. With ranks, a round is as slow as its slowest rank. On a CPU
    a clock takes the place of the events.

Note [Graphs]
    Calls back to back still show the host wherever it is slower than the device. So the same calls are captured, where
    they can be, into one CUDA graph that holds several of them, and its replays take turns like everybody else: time
    without a host. What cannot be captured keeps its plain time, and the reason is kept with it.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ringattn.launch.session import Session

Timing = Literal["calls", "graph", "both"]
TURN_MS = 40.0
"""What the timed part of a turn should last on a GPU: many short calls, or one long one."""
WARM_MS = 40.0
"""What comes before it untimed."""
LONG_MS = 100.0
"""A call beyond this hides its host; it is not timed both ways."""


@dataclass
class Time:
    """What one contender took.

    Attributes:
        calls_ms: Milliseconds per plain call.
        graph_ms: Milliseconds per call inside a replayed CUDA graph (Note [Graphs]).
        graph_refused: Why there is no graph, if one was wanted.
        refused: Why there is no time at all.
        rounds: Rounds the medians are taken over.
    """

    calls_ms: float | None = None
    graph_ms: float | None = None
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
    stop.synchronize()
    return start.elapsed_time(stop) / calls


def capture(call: Callable[[], Any], calls: int) -> Callable[[], None]:
    """One CUDA graph of `calls` calls, as something to call.

    The current stream is captured, so it must not be the default one, and what `call` differentiates must have been
    computed on it: autograd runs a backward on the stream of its forward.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def take_turns(calls: dict[str, Callable[[], Any]], session: Session, rounds: int) -> dict[str, float]:
    """Milliseconds per plain call of every contender (Note [Times]); the same on every rank."""
    turns = {(name, "calls"): _plan(call, session) for name, call in calls.items()}
    return {name: ms for (name, _), ms in _run(turns, session, rounds).items()}


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
                turns[name, "graph"] = _Turn(graph, 1, turn.repeats, -(-turn.warm // turn.repeats), turn.expected_ms)
            except Exception as error:
                found[name].graph_refused = reason(error)
        wanted = timing == "calls" or (timing == "both" and turn.expected_ms <= LONG_MS * (turn.repeats + turn.warm))
        if wanted or (name, "graph") not in turns:
            turns[name, "calls"] = turn
    expected = sum(turn.expected_ms for turn in turns.values())
    rounds = max(min(rounds, 3), min(rounds, int(1e3 * seconds / expected))) if expected else rounds
    for (name, how), ms in _run(turns, session, rounds).items():
        setattr(found[name], f"{how}_ms", ms)
        found[name].rounds = rounds
    return found


def _plan(call: Callable[[], Any], session: Session) -> _Turn:
    call()
    session.barrier()
    once = session.maximum([clock(call, 1, session.device)])[0]
    gpu = session.device.type == "cuda"
    repeats, warm = (max(1, min(100, math.ceil(ms / once))) if gpu else n for ms, n in ((TURN_MS, 1), (WARM_MS, 0)))
    return _Turn(call, repeats, 1, warm, (repeats + warm) * once)


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
