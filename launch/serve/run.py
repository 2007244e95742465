"""One rank of the server: loads the model, computes steps until the server ends, and handles signals and failures.

Ranks are started by __main__.py.

On SIGTERM or SIGINT rank 0 accepts no more requests, rejects waiting ones, waits up to --grace seconds for running ones, and
sends Stop to the other ranks; all exit with 0. The others ignore both signals: they end when rank 0 sends Stop or is gone. When a
rank or the HTTP process is lost, or a step fails, every rank prints the cause it knows and exits with 1; open requests get an
error. Every wait has a timeout: collectives give up after --timeout, each rank holds a connection whose end is noticed at once
(rank_channel.py), and so does the HTTP process (engine_server.py), which ends with the message Stop, or with rank 0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from ringattn.launch.common.distributed import Refusal, Session, init_ranks
from ringattn.launch.common.model_optimization import optimize_model
from ringattn.launch.common.planned_memory import least_gpu_bytes
from ringattn.launch.common.session import machine
from ringattn.launch.serve.config import (
    ENDED,
    RANDOM_TOKENS,
    ServeArgs,
    check_host_memory,
    freeze_gc,
    raise_file_limit,
)
from ringattn.launch.serve.engine import Engine, worker_loop
from ringattn.launch.serve.engine_server import EngineServer, HttpProcess, bind
from ringattn.launch.serve.grammar import make_compiler
from ringattn.launch.serve.http.chat_format import chat_format
from ringattn.launch.serve.kept_prefixes import KeptPrefixes
from ringattn.launch.serve.messages import Settings, Stop
from ringattn.launch.serve.model_runner import ModelRunner
from ringattn.launch.serve.models import (
    ServedModel,
    broadcast_weights,
    check_memory,
    describe_cache,
    load_model,
    make_cache,
    resolve_weights,
)
from ringattn.launch.serve.rank_channel import RankChannel, RankLiveness
from ringattn.launch.serve.scheduler import Scheduler
from ringattn.ring import Ring

CAUSE_S = 2.0  # seconds in which RankLiveness finds the cause of a failure
HTTP_EXIT_S = 10.0  # seconds in which the HTTP process must exit after Stop
SHOWN_FLAGS = (
    "kv_dtype host_cache_gib page_size chunk max_running queue max_connections keep_prefixes fuse split".split()
)
"""Flags on which speeds depend, shown by /state."""


class FatalExit:
    """Ends the process after a fatal failure: prints the cause, fails all requests, waits for their answers, and exits."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._once = threading.Lock()
        self.engine: Engine | None = None
        self.server: EngineServer | None = None
        self.process: HttpProcess | None = None

    def __call__(self, why: str) -> None:
        """Print the cause, fail all requests, and exit with code 1, in any thread; only the first call counts."""
        if not self._once.acquire(blocking=False):
            time.sleep(60)  # the thread that was first is about to end the process
        print(f"error: rank {self._session.rank}: {why}", file=sys.stderr, flush=True)
        if self.engine is not None:
            self.engine.fail(f"the server is going down: {why}")
        if self.server is not None:
            self.server.stop()
        if self.process is not None:
            self.process.wait(0 if self.server is None else HTTP_EXIT_S)
        os._exit(1)


def run_rank(args: ServeArgs) -> int:
    """Run one rank of the server; return 0 after an orderly shutdown. A failure ends the process."""
    stops: list[int] = []
    serving = threading.Event()

    def on_signal(number: int, _: FrameType | None) -> None:
        if not serving.is_set():
            os._exit(128 + number)  # nothing is open that could be ended in order
        stops.append(number)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with init_ranks(args.device, args.timeout) as session, contextlib.ExitStack() as stack:
            fatal_exit = FatalExit(session)
            channel = RankChannel(session, args.timeout)
            stack.callback(channel.close)

            def start_http() -> None:
                raise_file_limit(args.max_connections)
                with _refuse_taken_port(args):
                    bound = bind(args.host, args.port)
                fatal_exit.process = HttpProcess(bound)
                stack.callback(fatal_exit.process.kill)

            def listen() -> None:
                assert fatal_exit.process is not None, "rank 0 has started it"
                with _refuse_taken_port(args):
                    fatal_exit.process.listen()

            try:
                session.lead(start_http)
                served, model_runner = _prepare(args, session)  # which may take minutes
                session.lead(listen)
                freeze_gc()
                liveness = RankLiveness(session, fatal_exit, args.timeout)
                serving.set()
                if not session.first:
                    worker_loop(model_runner, channel)
                    liveness.close()
                else:
                    _serve(args, session, channel, liveness, served, model_runner, fatal_exit, stops)
            except Refusal:
                raise  # on every rank alike
            except Exception as error:
                # a broken connection is an effect: wait for RankLiveness, which knows the cause
                time.sleep(0 if session.world_size == 1 else CAUSE_S)
                traceback.print_exc()
                if session.orphaned:
                    fatal_exit("the launcher of the ranks is gone, and with it their rendezvous store")
                fatal_exit(f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def _prepare(args: ServeArgs, session: Session) -> tuple[ServedModel, ModelRunner]:
    session.check_count(args.nproc)
    ring = Ring(timeout=datetime.timedelta(seconds=args.timeout))
    problem, served, whole = "", None, least_gpu_bytes(session)
    try:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", session.world_size))
        check_host_memory(args, ranks, session.device.type == "cpu")
        args = resolve_weights(args, session.device, session.world_size, whole)
        planned = "" if whole is None else check_memory(args, session.device, session.world_size, whole)
        if planned:
            session.say(planned)
        served = load_model(args, session.device, session.rank, session.world_size)
        chat_format(args, served.tokenizer)
    except Refusal as error:
        problem = str(error)
    except (ValueError, OSError, ImportError) as error:
        problem = f"{args.model} cannot be served: {error}"
    try:
        flags = dataclasses.asdict(dataclasses.replace(args, api_key=None))
        ring.assert_equal_across_ranks("flags and model", problem or f"{flags} {served.facts if served else ''}")
    except ValueError as error:
        raise Refusal(str(error)) from None
    if problem or served is None:
        raise Refusal(problem)
    if served.random_weights:
        session.say(f"{args.model}: random weights of seed {args.seed}, so answers make no sense")
        if served.plan is None:
            broadcast_weights(served.model, session)
    if served.plan is not None:
        session.say(_use_slices(served.plan, ring))
    for line in served.notes:
        session.say(line)
    if session.device.type == "cuda":
        for line in optimize_model(served.model, ring, fused=args.fuse, split=args.split and not served.plan).messages:
            session.say(line)
    if served.length is not None and args.max_len is not None and args.max_len > served.length:
        session.say(
            f"warning: --max-len {args.max_len} exceeds the {served.length} positions of the model's config, beyond which "
            "answers may make no sense"
        )
    cache = make_cache(served.model, ring, gib=args.cache_gib, page_size=args.page_size, kv_dtype=args.kv_dtype)
    host_bytes = int(args.host_cache_gib * 2**30)
    if 0 < host_bytes < cache.allocator.page_bytes:
        raise Refusal(
            f"host_cache_gib must hold a page of {cache.allocator.page_bytes} bytes, got {args.host_cache_gib:g} GiB; "
            "pass a larger --host-cache-gib, or 0"
        )
    model_runner = ModelRunner(served.model, cache, args.max_running, None if args.graphs else False, host_bytes)
    for line in model_runner.prepare(served.length):
        session.say(line)
    return served, model_runner


def _use_slices(plan: Any, ring: Ring) -> str:
    """Let a model whose weights are sliced compute, and return a line to print."""
    from ringattn.integrations.transformers.sharded_weights.shard import use_slices

    try:
        stored = use_slices(plan, ring)
    except NotImplementedError as error:
        raise Refusal(f"{error} (--weights whole)") from None
    return f"weights: sharded over {ring.world_size} ranks, {stored / 2**30:.2f} GiB on each"


@contextlib.contextmanager
def _refuse_taken_port(args: ServeArgs) -> Iterator[None]:
    try:
        yield
    except OSError as why:
        raise Refusal(
            f"host and port must be free to listen on, got {args.host} and {args.port}: {why.strerror or why}; "
            "pass another --port, or --port 0 for any"
        ) from None


def _serve(
    args: ServeArgs,
    session: Session,
    channel: RankChannel,
    liveness: RankLiveness,
    served: ServedModel,
    model_runner: ModelRunner,
    fatal_exit: FatalExit,
    stops: list[int],
) -> None:
    """Serve on rank 0 until a signal arrives."""
    process = fatal_exit.process
    assert process is not None, "rank 0 has started it"
    scheduler = Scheduler(
        model_runner.allocator,
        chunk=args.chunk,
        max_running=args.max_running,
        keep=args.keep_prefixes,
        pieces=model_runner.graph_runner.most_pieces,
        rows=model_runner.graph_runner.most_rows,
        kept=KeptPrefixes(model_runner.allocator, model_runner.host_slots, model_runner.moves),
    )
    engine = Engine(model_runner, scheduler, channel.broadcast, time_limit_s=args.time_limit)
    fatal_exit.engine = engine
    where = f"http://{f'[{args.host}]' if ':' in args.host else args.host}:{process.port}"
    tokens = model_runner.cache.capacity_tokens
    length = min(args.max_len or served.length or tokens, tokens)
    if served.random_weights and args.default_tokens is None:
        args = dataclasses.replace(args, default_tokens=RANDOM_TOKENS)
    about = _server_info(args, session, served, model_runner)
    recipe, defaults = served.tokenizer.recipe, served.defaults
    link, compiler = (process.folder, process.link, process.name), make_compiler(served.tokenizer)
    server = fatal_exit.server = EngineServer(engine, *link, fatal_exit, args.timeout, compiler)
    server.start(Settings(served.name, recipe, args, length, engine.state(), about, defaults))
    print(f"cache: {describe_cache(model_runner.cache)}", flush=True)
    if model_runner.host_slots:
        print(f"host memory: {model_runner.host_slots} pages of each rank", flush=True)
    unbounded = args.default_tokens is None and args.max_tokens is None
    if unbounded and (fit := tokens // length) < args.max_running:
        print(
            f"a chat without max_tokens may fill the rest of {length} tokens; the cache holds {fit} times as many, and more such "
            "chats at a time preempt each other; --default-tokens bounds them"
        )
    if defaults:
        print(f"requests that leave them out get {defaults}, by generation_config.json")
    print(f"serving {served.name} at {where} (a page to look at) and {where}/v1 (the interface)", flush=True)
    if session.backend is not None and ENDED not in os.environ:
        print(
            f"to end it: kill {os.getpid()} (torchrun that is told to end reports the signal as an error)", flush=True
        )
    ended = threading.Event()

    def stop_on_signals() -> None:
        while not ended.wait(0.1) and not engine.closed:
            if stops or session.orphaned:
                liveness.confirm()
                why = signal.Signals(stops[0]).name if stops else "the end of its launcher"
                print(f"stopping after {why}: running requests have {args.grace:g} s to end", flush=True)
                engine.stop(args.grace)

    threading.Thread(target=stop_on_signals, daemon=True, name="signals").start()
    engine.run()
    ended.set()
    liveness.expect_end()
    channel.broadcast(Stop())
    server.stop()
    process.wait(HTTP_EXIT_S)
    liveness.close()
    if path := os.environ.get(ENDED):
        Path(path).touch()
    print("stopped", flush=True)


def _server_info(args: ServeArgs, session: Session, served: ServedModel, model_runner: ModelRunner) -> dict[str, Any]:
    """Return the machine, the model and the flags on which speeds depend; no paths, no key."""
    return {
        **{name: value for name, value in machine(session).items() if name not in ("command", "date")},
        "kind": type(served.model).__name__,
        "parameters": served.parameters,
        "dtype": str(served.model.dtype).removeprefix("torch."),
        "vocab_size": served.tokenizer.vocab_size,
        "defaults": served.defaults,
        "graphs": model_runner.graph_runner.captured,
        "flags": {name: getattr(args, name) for name in SHOWN_FLAGS}
        | {"weights": "whole" if served.plan is None else "sharded"},
    }
