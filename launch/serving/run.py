"""One rank of the server: what it loads, what it does, and how it ends.

Owns signals and the one way out when something fails. Refuses to know how ranks are started (serve.py), and how requests are
scheduled and answered.

Note [How it ends]
    On SIGTERM or SIGINT rank 0 takes no more requests, sends those that wait away, lets those that run end, for --grace seconds
    at most, tells the other ranks to end, and everybody leaves with 0. The others ignore both signals: they end when rank 0 says
    so or is gone. When a rank or the process of HTTP is lost, or anything fails in a step, every rank says what it knows and leaves
    with 1; requests under way get an error. Nothing waits for ever: collectives give up after --timeout, each rank holds a
    connection whose end is noticed at once (watch.py), and so does the process of HTTP (front.py), which ends by rank 0's word or
    with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from ringattn.launch.changing import change_model
from ringattn.launch.distributed import Rank, Refusal, join_ranks
from ringattn.launch.serving.channel import Channel
from ringattn.launch.serving.collector import settle
from ringattn.launch.serving.config import ENDED, LOOPBACK, Limits, ServeArgs
from ringattn.launch.serving.engine import Engine, follow
from ringattn.launch.serving.front import Front, HttpProcess, listen
from ringattn.launch.serving.models import Served, describe, load, make_cache, share_weights
from ringattn.launch.serving.replica import Replica
from ringattn.launch.serving.scheduling import Scheduler
from ringattn.launch.serving.watch import Watch
from ringattn.launch.session import Session, machine
from ringattn.ring import Ring

FAREWELL_S = 1.0
"""Seconds in which answers about a failure may leave before the process does."""


PARTING_S = 10.0
"""Seconds in which the process of HTTP must have ended when it was told to."""


class Ending:
    """The one way out when something fails: everybody is told, then the process leaves.

    Args:
        rank: This rank.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._once = threading.Lock()
        self.engine: Engine | None = None
        self.process: HttpProcess | None = None

    def __call__(self, why: str) -> None:
        """Says why, fails all requests, and leaves with code 1, however the main thread is busy; the first call counts."""
        if not self._once.acquire(blocking=False):
            time.sleep(60)  # the thread that was first is about to end the process
        print(f"error: rank {self._rank.index}: {why}", file=sys.stderr, flush=True)
        if self.engine is not None:
            self.engine.fail(f"the server is going down: {why}")
            time.sleep(FAREWELL_S)
        if self.process is not None:
            self.process.kill()  # with it the port is free
        os._exit(1)


def run_rank(args: ServeArgs) -> int:
    """One rank of the server.

    Returns:
        Its exit code: 0 when it was told to stop. A failure ends the process.
    """
    stops: list[int] = []
    serving = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        if not serving.is_set():
            os._exit(128 + number)  # nothing has begun that could end well
        stops.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with join_ranks(args.device, args.timeout) as rank, contextlib.ExitStack() as stack:
            ending = Ending(rank)
            channel = Channel(rank, args.timeout)
            stack.callback(channel.close)
            try:
                probe = _listen(args, rank, channel)  # a model may take minutes to read
                if probe is not None:
                    probe.close()
                    ending.process = HttpProcess()
                    stack.callback(ending.process.kill)
                served, replica, cache = _prepare(args, rank)
                listening = _listen(args, rank, channel)
                settle()
                watch = Watch(rank, channel, ending, args.timeout)
                serving.set()
                if listening is None:
                    follow(replica, channel)
                    watch.close()
                else:
                    _lead(args, rank, channel, watch, served, replica, listening, cache, ending, stops)
            except Refusal:
                raise  # on every rank alike
            except Exception as error:
                # a broken connection is an effect: the watch, which knows the cause, may come first
                time.sleep(0 if rank.world_size == 1 else 2 * FAREWELL_S)
                traceback.print_exc()
                if rank.orphaned:
                    ending("what started the ranks is gone, and with it the store through which they meet")
                ending(f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def _prepare(args: ServeArgs, rank: Rank) -> tuple[Served, Replica, str]:
    """The model of this rank, what computes its steps, and what the cache holds in words."""
    if args.nproc not in (None, rank.world_size):
        raise Refusal(
            f"nproc must be the number of ranks that torchrun started, got {args.nproc} and {rank.world_size}; leave it out"
        )
    ring = Ring(timeout=datetime.timedelta(seconds=args.timeout))
    problem, served = "", None
    try:
        served = load(
            args.model, name=args.name, dtype=args.dtype, device=rank.device, seed=args.seed, max_len=args.max_len
        )
    except (Refusal, ValueError, OSError, ImportError) as error:
        problem = f"{args.model} cannot be served: {error}" if not isinstance(error, Refusal) else str(error)
    try:
        shown = dataclasses.asdict(dataclasses.replace(args, api_key=None))
        ring.assert_equal_across_ranks("flags and model", problem or f"{shown} {served.facts if served else ''}")
    except ValueError as error:
        raise Refusal(str(error)) from None
    if served is None:
        raise Refusal(problem)
    if served.drawn:
        share_weights(served.model, rank)
    if rank.device.type == "cuda":
        for line in change_model(served.model, ring, fused=args.fuse, split=args.split).said:
            if rank.first:
                print(line, flush=True)
    cache = make_cache(served.model, ring, gib=args.cache_gib, page_size=args.page_size, kv_dtype=args.kv_dtype)
    replica = Replica(served.model, cache, args.max_running, None if args.graphs else False)
    for line in replica.prepare(served.length):
        if rank.first:
            print(line, flush=True)
    return served, replica, describe(cache)


def _listen(args: ServeArgs, rank: Rank, channel: Channel) -> socket.socket | None:
    """Rank 0's socket, which listens, and nobody answers yet; None on the others.

    Raises:
        Refusal: The address cannot be had; on every rank.
    """
    refusal, listening = "", None
    if rank.first:
        try:
            listening = listen(args.host, args.port)
        except OSError as error:
            refusal = (
                f"host and port must be free to listen on, got {args.host} and {args.port}: {error.strerror or error}; "
                "pass another --port, or --port 0 for any"
            )
        channel.send({"refusal": refusal})
    elif rank.world_size > 1:
        refusal = channel.receive()["refusal"]
    if refusal:
        raise Refusal(refusal)
    return listening


def _lead(
    args: ServeArgs,
    rank: Rank,
    channel: Channel,
    watch: Watch,
    served: Served,
    replica: Replica,
    listening: socket.socket,
    cache: str,
    ending: Ending,
    stops: list[int],
) -> None:
    """Rank 0: serves until it is told to stop."""
    process = ending.process
    assert process is not None, "rank 0 has started it"
    scheduler = Scheduler(
        replica.books,
        chunk=args.chunk,
        most_running=args.max_running,
        most_waiting=args.queue,
        keep=args.keep_prefixes,
        pieces=replica.pieces,
        rows=replica.rows,
    )
    engine = Engine(replica, scheduler, channel.send, time_limit_s=args.time_limit)
    ending.engine = engine
    limits = Limits(
        body=int(args.max_body_mib * 2**20),
        length=args.max_len or served.length,
        max_tokens=args.max_tokens,
        default_tokens=args.default_tokens,
    )
    hosts = LOOPBACK if args.host in LOOPBACK else None
    where = f"http://{f'[{args.host}]' if ':' in args.host else args.host}:{listening.getsockname()[1]}"
    settings = {
        "model": served.name,
        "tokenizer": served.tokenizer.recipe(),
        "limits": dataclasses.asdict(limits),
        "room": dataclasses.asdict(scheduler.room),
        "state": engine.state(),
        "key": args.api_key,
        "hosts": hosts,
        "about": _about(args, rank, served, replica),
        "connections": args.max_connections,
    }
    process.serve(listening, settings)
    front = Front(engine, process.connection, process.name, ending, args.timeout)
    front.wait_until_ready()
    print(f"cache: {cache}", flush=True)
    print(f"serving {served.name} at {where} (a page to look at) and {where}/v1 (the interface)", flush=True)
    if rank.backend != "none" and ENDED not in os.environ:
        print(
            f"to end it: kill {os.getpid()} (torchrun that is told to end reports the signal as an error)", flush=True
        )
    over = _stop_on_signals(engine, args.grace, stops, rank)
    engine.run()
    over.set()
    watch.expect_end()
    channel.send({"stop": True})
    front.stop()
    process.wait(PARTING_S)
    watch.close()
    if path := os.environ.get(ENDED):
        Path(path).touch()
    print("stopped", flush=True)


def _about(args: ServeArgs, rank: Rank, served: Served, replica: Replica) -> dict[str, Any]:
    """What speeds of this server depend on: where it runs, what it serves, and the flags that say how; no paths, no key."""
    backend = None if rank.backend == "none" else rank.backend
    line = machine(Session(rank.index, rank.world_size, rank.device, backend))
    names = (
        "kv_dtype",
        "page_size",
        "chunk",
        "max_running",
        "queue",
        "max_connections",
        "keep_prefixes",
        "fuse",
        "split",
    )
    return {
        **{name: value for name, value in line.items() if name not in ("command", "date")},
        "kind": type(served.model).__name__,
        "parameters": sum(x.numel() for x in served.model.parameters()),
        "dtype": str(served.model.dtype).removeprefix("torch."),
        "vocab_size": served.tokenizer.vocab_size,
        "graphs": replica.graphs,
        "flags": {name: getattr(args, name) for name in names},
    }


def _stop_on_signals(engine: Engine, grace_s: float, stops: list[int], rank: Rank) -> threading.Event:
    """Stops an engine when a signal has come, or the launcher has gone; until the event is set."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.1):
            if engine.closed:
                return  # it is going down already
            if stops or rank.orphaned:
                why = signal.Signals(stops[0]).name if stops else "the end of its launcher"
                print(f"stopping after {why}: running requests have {grace_s:g} s to end", flush=True)
                engine.stop(grace_s)
                return

    threading.Thread(target=look, daemon=True, name="signals").start()
    return over
