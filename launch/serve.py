"""An OpenAI-compatible server whose contexts are sharded over the ranks of a ring.

    python -m ringattn.launch.serve --model PATH               starts its own ranks: one per GPU, or two on the CPU
    torchrun --nproc_per_node 4 -m ringattn.launch.serve --model PATH

Owns the command: its flags, its processes, signals, and its exit code. Refuses to know how requests are answered (serving/).

Note [How it ends]
    On SIGTERM or SIGINT rank 0 takes no more requests, sends those that wait away, lets those that run end, for --grace seconds
    at most, tells the other ranks to end, and everybody leaves with 0. The others ignore both signals: they end when rank 0 says
    so or is gone. When a rank is lost, or anything fails in a step, every rank says what it knows and leaves with 1; requests
    under way get an error. Nothing waits for ever: collectives give up after --timeout, and each rank holds a connection whose
    end is noticed at once (watch.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.util
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal

from ringattn.launch.distributed import (
    REFUSED,
    Rank,
    Refusal,
    default_ranks,
    is_rank,
    join_ranks,
    launch_ranks,
    resolve_device,
)
from ringattn.launch.serving.channel import Channel
from ringattn.launch.serving.engine import Engine, follow
from ringattn.launch.serving.models import Replica, Served, check_model, describe, load, make_cache
from ringattn.launch.serving.scheduling import Scheduler
from ringattn.launch.serving.watch import Watch
from ringattn.ring import Ring

if TYPE_CHECKING:
    from ringattn.launch.serving.http import Server

MODULE = "ringattn.launch.serve"
DESCRIPTION = """Serves a language model over an OpenAI-compatible HTTP interface, the cache of its contexts sharded over all ranks.

Starts its own ranks (one per GPU, or two on the CPU) unless torchrun did: torchrun --nproc_per_node 4 -m ringattn.launch.serve
The page at / is a chat and shows what the server does."""

KEY = "RINGATTN_API_KEY"
"""The environment variable of the key, which a command line would show to everybody on the machine."""

PACKAGES = ("tyro", "transformers", "fastapi", "uvicorn", "prometheus_client")

ENDED = "RINGATTN_SERVE_ENDED"
"""The environment variable that names a file which rank 0 makes when it has ended as it should."""

MOST_GRACE_S = 25.0
"""What launchers kill after 30 s must have ended before."""

FAREWELL_S = 1.0
"""Seconds in which answers about a failure may leave before the process does."""


@dataclass(frozen=True)
class ServeArgs:
    """Flags of the server.

    Attributes:
        model: A folder of transformers (config, weights as safetensors, tokenizer), a config.json (random weights, and bytes for
            tokens where no tokenizer lies beside it), or tiny, which needs no files and talks nonsense.
        name: By which requests call the model; default the folder's name.
        host: The address to listen on; only this machine reaches the default.
        port: The port; 0 for any that is free.
        api_key: What requests must send as a bearer token; better given by the environment variable RINGATTN_API_KEY.
        nproc: Ranks to start; by default one per GPU, or two where there are none. Under torchrun, leave it out.
        device: auto takes GPUs where there are any.
        dtype: auto is the config's on GPUs, float32 on CPUs.
        seed: Of random weights.
        cache_gib: GiB per rank for keys and values; by default most of what a GPU has left, or 0.25 on CPUs.
        page_size: Tokens of a page.
        chunk: Tokens of prompts per step.
        max_running: Requests that are computed at a time.
        queue: Requests that may wait for room; more get status 429.
        max_len: Tokens of a prompt and its answer; by default what the model's config says, and always what the cache holds.
        max_tokens: New tokens that a request may ask for; by default all that fit.
        default_tokens: New tokens of an answer to a chat that does not say how many.
        max_body_mib: MiB of a request; more gets status 413.
        time_limit: Seconds that a request may take, waiting included; then it gets status 503.
        keep_prefixes: Whether beginnings of requests are kept for later ones that begin alike.
        grace: Seconds that running requests get to end when the server is told to stop.
        timeout: Seconds after which ranks that wait for each other give up.
    """

    model: str
    name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    nproc: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    seed: int = 0
    cache_gib: float | None = None
    page_size: int = 64
    chunk: int = 4096
    max_running: int = 64
    queue: int = 256
    max_len: int | None = None
    max_tokens: int | None = None
    default_tokens: int = 512
    max_body_mib: float = 32.0
    time_limit: float = 600.0
    keep_prefixes: bool = True
    grace: float = 10.0
    timeout: float = 300.0

    def __post_init__(self) -> None:
        for name in ("nproc", "page_size", "chunk", "max_running", "queue", "max_len", "max_tokens", "default_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}; pass another --{name.replace('_', '-')}")
        for name in ("cache_gib", "max_body_mib", "time_limit", "timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be above 0, got {value}; pass another --{name.replace('_', '-')}")
        if not 0 <= self.grace <= MOST_GRACE_S:
            raise ValueError(f"grace must be from 0 to {MOST_GRACE_S:g} s, got {self.grace}; launchers kill after 30 s")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port must be from 0 to 65535, got {self.port}; pass another --port")


def parse(arguments: Sequence[str]) -> ServeArgs:
    """The flags.

    Raises:
        ValueError: One is out of range.
    """
    import tyro

    args = tyro.cli(ServeArgs, args=list(arguments), prog=f"python -m {MODULE}", description=DESCRIPTION)
    if args.api_key is None and os.environ.get(KEY):
        return dataclasses.replace(args, api_key=os.environ[KEY])
    return args


class Ending:
    """The one way out when something fails: everybody is told, then the process leaves.

    Args:
        rank: This rank.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._once = threading.Lock()
        self.engine: Engine | None = None

    def __call__(self, why: str) -> None:
        """Says why, fails all requests, and leaves with code 1, however the main thread is busy; the first call counts."""
        if not self._once.acquire(blocking=False):
            time.sleep(60)  # the thread that was first is about to end the process
        print(f"error: rank {self._rank.index}: {why}", file=sys.stderr, flush=True)
        if self.engine is not None:
            self.engine.fail(f"the server is going down: {why}")
            time.sleep(FAREWELL_S)
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
                served, replica, cache = _prepare(args, rank)
                server = _listen(args, rank, channel)
                watch = Watch(rank, channel, ending, args.timeout)
                serving.set()
                if server is None:
                    follow(replica, channel)
                    watch.close()
                else:
                    _lead(args, rank, channel, watch, served, replica, server, cache, ending, stops)
            except Refusal:
                raise  # on every rank alike
            except Exception as error:
                # a broken connection is an effect: the watch, which knows the cause, may come first
                time.sleep(0 if rank.world_size == 1 else 2 * FAREWELL_S)
                traceback.print_exc()
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
        served = load(args.model, name=args.name, dtype=args.dtype, device=rank.device, seed=args.seed)
    except (Refusal, ValueError, OSError, ImportError) as error:
        problem = f"{args.model} cannot be served: {error}" if not isinstance(error, Refusal) else str(error)
    try:
        shown = dataclasses.asdict(dataclasses.replace(args, api_key=None))
        ring.agree("flags and model", problem or f"{shown} {served.facts if served else ''}")
    except ValueError as error:
        raise Refusal(str(error)) from None
    if served is None:
        raise Refusal(problem)
    cache = make_cache(served.model, ring, gib=args.cache_gib, page_size=args.page_size)
    return served, Replica(served.model, cache), describe(cache)


def _listen(args: ServeArgs, rank: Rank, channel: Channel) -> Server | None:
    """Rank 0's HTTP server, which listens and does not answer yet; None on the others.

    Raises:
        Refusal: The address cannot be had; on every rank.
    """
    from ringattn.launch.serving.http import Server

    refusal, server = "", None
    if rank.first:
        try:
            server = Server(args.host, args.port)
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
    return server


def _lead(
    args: ServeArgs,
    rank: Rank,
    channel: Channel,
    watch: Watch,
    served: Served,
    replica: Replica,
    server: Server,
    cache: str,
    ending: Ending,
    stops: list[int],
) -> None:
    """Rank 0: serves until it is told to stop."""
    from ringattn.launch.serving.http import LOOPBACK, Limits, make_app

    scheduler = Scheduler(
        replica.books,
        chunk=args.chunk,
        most_running=args.max_running,
        most_waiting=args.queue,
        keep=args.keep_prefixes,
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
    server.start(make_app(engine, served.tokenizer, served.name, limits, key=args.api_key, hosts=hosts))
    where = f"http://{f'[{args.host}]' if ':' in args.host else args.host}:{server.port}"
    print(f"cache: {cache}", flush=True)
    print(f"serving {served.name} at {where} (a page to look at) and {where}/v1 (the interface)", flush=True)
    over = _stop_on_signals(engine, args.grace, stops, rank)
    engine.run()
    over.set()
    watch.expect_end()
    channel.send({"stop": True})
    server.stop()
    watch.close()
    if path := os.environ.get(ENDED):
        Path(path).touch()
    print("stopped", flush=True)


def _stop_on_signals(engine: Engine, grace_s: float, stops: list[int], rank: Rank) -> threading.Event:
    """Stops an engine when a signal has come, or the launcher has gone; until the event is set."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.1):
            if stops or rank.orphaned:
                why = signal.Signals(stops[0]).name if stops else "the end of its launcher"
                print(f"stopping after {why}: running requests have {grace_s:g} s to end", flush=True)
                engine.stop(grace_s)
                return

    threading.Thread(target=look, daemon=True, name="signals").start()
    return over


def main(arguments: Sequence[str] | None = None) -> int:
    """Starts the ranks of the server, or is one of them.

    Args:
        arguments: The command line; by default this process's.

    Returns:
        The exit code: 0 when it was told to stop.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr, flush=True)
    try:
        missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
        if missing:
            raise Refusal(f"{', '.join(missing)} must be installed to serve, got none; pip install 'ringattn[serve]'")
        try:
            args = parse(arguments)
            check_model(args.model)
            if is_rank():
                return run_rank(args)
            nproc = args.nproc or default_ranks(args.device)
            resolve_device(args.device, 0, nproc)
        except ValueError as error:
            raise Refusal(str(error)) from None
        return run_rank(args) if nproc == 1 else _launch(arguments, nproc)
    except Refusal as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        return REFUSED if is_rank() else 1


def _launch(arguments: Sequence[str], nproc: int) -> int:
    with tempfile.TemporaryDirectory(prefix="ringattn-") as folder:
        ended = Path(folder, "ended")
        os.environ[ENDED] = str(ended)
        code = launch_ranks(MODULE, arguments, nproc, hint="start the server again")
        del os.environ[ENDED]
        # a signal is how a server ends: what counts is whether it ended well
        return 0 if ended.exists() and code in (0, 128 + signal.SIGTERM, 128 + signal.SIGINT) else code or 1


if __name__ == "__main__":
    sys.exit(main())
