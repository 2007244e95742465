"""Speed of a running server over HTTP: of single requests, of many clients, and the clients that it serves within a latency.

Answers are compared before anything is timed. Rows count failures and differences; failures make the exit code 1.

Note [Measured loads]
    ttft: from the request to its first token, with the queue, the prompt and the network (not the connection, see
    `http_client`). tpot: the mean time of an answer's later tokens; median and p95 are over answers. gap: from one token to the
    next; p95 and p99 are over all tokens, so a stall behind another request's prompt is seen there first.
    Each of N clients asks for its next answer when it has the last one: a closed loop. Its first answer has a random length and
    is not measured, so that clients do not ask in step. When every client has had it the window opens; it closes when the wanted
    number of answers have begun and ended in it. Tokens/s and requests/s are of the window, of all clients; ttft, tpot and gaps of
    the measured answers. Requests under way at its end are cancelled.
    Prompts are random tokens, so a server that keeps prefixes finds none. The same seed draws the same prompts again: so a seed
    is drawn where none is given, and a warning reports cached tokens of prompts that should have been new.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from ringattn.launch.bench.http_client import Answer, ServerClient, message_of
from ringattn.launch.bench.rows import Rows
from ringattn.launch.common.distributed import Refusal, check_installed
from ringattn.launch.common.session import Keep, Session, check_numbers
from ringattn.launch.serve.config import KEY

WARMUP_TOKENS = 2
"""Tokens of an answer that is not timed."""
BUSY_PERCENT = 70.0
"""A client busier than this gets a warning: its own delays begin to be in the times."""


@dataclass(frozen=True)
class ServerFlags:
    """A running server: its speed over HTTP, for one client and for many.

    Attributes:
        url: Of any server with OpenAI's completions, `ignore_eos` and `return_token_ids`.
        api_key: Bearer token; better given by the environment variable RINGATTN_API_KEY.
        model: The model to ask; by default the first that the server names.
        parts: "alone": one request at a time; "load": several clients at once; "latency": the most clients whose tokens hold a
            latency.
        contexts: "alone": tokens of prompts.
        repeats: "alone": answers that are timed of each.
        clients: "load": clients at once.
        prompt_lengths: "load", "latency": fewest and most tokens of prompts.
        tokens: New tokens of an answer.
        requests: "load", "latency": answers that are timed at least; each client has two on average, too.
        latency_ms: "latency": limit of the 95th percentile of the time per output token.
        most_clients: "latency": more are not tried; nor are more than the server computes at a time.
        sample: Prompts whose answers are compared, alone and among others.
        reuse: "alone": ask the same prompt again and again, so that a server that keeps prefixes has it.
        vocab_size: Tokens are drawn below it; by default the server's.
        seed: Of prompts and lengths; drawn when it is left out.
        timeout_s: Seconds in which an answer must have ended.
        out: Folder for the JSON.
        name: Of the JSON.
    """

    url: str = "http://127.0.0.1:8000"
    api_key: str | None = None
    model: str | None = None
    parts: tuple[Literal["alone", "load", "latency"], ...] = ("alone", "load", "latency")
    contexts: tuple[int, ...] = (128, 32768)
    repeats: int = 5
    clients: tuple[int, ...] = (1, 8, 32, 64)
    prompt_lengths: tuple[int, int] = (64, 256)
    tokens: int = 128
    requests: int = 32
    latency_ms: float = 20.0
    most_clients: int = 256
    sample: int = 8
    reuse: bool = False
    vocab_size: int | None = None
    seed: int | None = None
    timeout_s: float = 600.0
    out: Path = Path("runs/bench")
    name: str = "server"

    def __post_init__(self) -> None:
        """Raise for numbers that mean nothing."""
        check_numbers(self)
        if self.prompt_lengths[0] > self.prompt_lengths[1]:
            raise ValueError(f"prompt_lengths must be the fewest and the most tokens, got {self.prompt_lengths}")


def without_key(command: str) -> str:
    """Return a command line without the key.

    Example:
        >>> without_key("bench server --api-key abc --url u"), without_key("bench server --api_key=abc")
        ('bench server --api-key ... --url u', 'bench server --api_key=...')
    """
    return re.sub(r"(--api[-_]key[ =])(?:'[^']*'|\S)+", r"\1...", command)


def numbers_of(answers: Sequence[Answer]) -> dict[str, float | None]:
    """Return the times of good answers in milliseconds (Note [Measured loads])."""
    seconds = {
        "ttft": [answer.first_s for answer in answers],
        "tpot": [mean for answer in answers if (mean := answer.per_token_s) is not None],
        "gap": [gap for answer in answers for gap in answer.gaps_s],
    }

    def quantile(taken: Sequence[float], percent: int) -> float | None:
        return 1e3 * torch.tensor(taken, dtype=torch.float64).quantile(percent / 100).item() if taken else None

    wanted = (("ttft", 50), ("ttft", 95), ("tpot", 50), ("tpot", 95), ("gap", 95), ("gap", 99))
    return {
        f"{name}_ms" if percent == 50 else f"{name}_p{percent}_ms": quantile(seconds[name], percent)
        for name, percent in wanted
    }


def holds(row: dict[str, Any], latency_ms: float) -> bool:
    """Return whether all answers of a load came, and the 95th percentile of their times per token is within a latency."""
    value = row.get("tpot_p95_ms")
    return not row["failed"] and value is not None and value <= latency_ms


@dataclass
class Target:
    """The server under test.

    Attributes:
        length: Most tokens of a prompt and its answer; None if unknown.
        about: The machine and flags of ours, from `/state`; empty for other servers.
    """

    model: str
    length: int | None
    vocab_size: int
    about: dict[str, Any]


def _object(content: Any) -> dict[str, Any]:
    """Return JSON of another server if it is an object, or an empty one."""
    return content if isinstance(content, dict) else {}


async def query_server(client: ServerClient, args: ServerFlags) -> Target:
    """Return the model, limits and flags of a server; raise Refusal if it does not report what must be known."""
    where = client.url
    try:
        status, models = await client.get("/v1/models")
        state = await client.get("/state")
    except (OSError, ValueError) as error:
        raise Refusal(
            f"url must be that of a running server, got {where}: {error}; "
            "start one with: python -m ringattn.launch.serve --model PATH"
        ) from None
    if status == 401:
        raise Refusal(f"{where} must be asked with a key: {message_of(models)}; set {KEY}, or pass --api-key")
    listed = _object(models).get("data") if status == 200 else None
    cards = [one for one in listed if isinstance(_object(one).get("id"), str)] if isinstance(listed, list) else []
    if not cards:
        raise Refusal(f"{where}/v1/models must name a model, got status {status}: {message_of(models)}")
    card = cards[0] if args.model is None else next((one for one in cards if one["id"] == args.model), None)
    if card is None:
        names = ", ".join(one["id"] for one in cards)
        raise Refusal(f"model must be one of {names}, got {args.model}")
    info = _object(_object(state[1]).get("server")) if state[0] == 200 else {}
    about = info if info.keys() >= {"vocab_size", "gpus", "flags"} else {}  # other servers have a state of their own
    vocab = args.vocab_size or about.get("vocab_size")
    if vocab is None:
        raise Refusal(f"the size of the vocabulary must be known, got none from {where}; pass --vocab-size")
    return Target(card["id"], card.get("max_model_len"), vocab, about)


@dataclass
class Load:
    """Answers of a load (Note [Measured loads]), whose window is from `opened` to `closed`.

    Attributes:
        asked: All answers, those that were cancelled too.
        measured: Those that began and ended in the window.
        busy_s: Seconds of the window in which this process computed.
    """

    opened: float = math.inf
    closed: float = math.inf
    asked: list[Answer] = field(default_factory=list)
    measured: list[Answer] = field(default_factory=list)
    busy_s: float = 0.0

    def row(self) -> dict[str, Any]:
        """Return its numbers."""
        good = [answer for answer in self.measured if answer.good]
        ended = [answer for answer in self.asked if answer.ended]
        seconds = max(self.closed - self.opened, 1e-9)
        tokens = sum(self.opened < one <= self.closed for answer in self.asked for one in answer.times)
        return {
            "answers": len(good),
            "seconds": seconds,
            "requests_per_s": sum(a.good and self.opened < a.ended <= self.closed for a in ended) / seconds,
            "tokens_per_s": tokens / seconds,
            **numbers_of(good),
            **counted(ended),
            "client_busy_percent": 100 * self.busy_s / seconds,
        }


async def run_load(bench: Bench, clients: int, wanted: int) -> Load:
    """Let so many clients ask, until `wanted` answers were measured (Note [Measured loads])."""
    load, warm, busy = Load(), 0, 0.0

    async def ask(tokens: int) -> Answer:
        load.asked.append(Answer())
        return await bench.ask(bench.draw(), tokens, load.asked[-1])

    async def work() -> None:
        nonlocal warm, busy
        await ask(bench.random.randint(1, bench.args.tokens))
        warm += 1
        if warm == clients:
            load.opened, busy = time.perf_counter(), time.process_time()
        while math.isinf(load.closed):
            answer = await ask(bench.args.tokens)
            # one that got no connection has not begun, and counts all the same
            is_new = answer.began >= load.opened or (not answer.began and answer.ended >= load.opened)
            if is_new and math.isinf(load.closed):
                load.measured.append(answer)
                if len(load.measured) == wanted:
                    load.closed, load.busy_s = time.perf_counter(), time.process_time() - busy

    tasks = [asyncio.ensure_future(work()) for _ in range(clients)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            raise end
    return load


@dataclass
class Bench:
    """State of a run."""

    args: ServerFlags
    client: ServerClient
    target: Target
    random: random.Random
    rows: Rows

    def add(self, row: dict[str, Any]) -> None:
        """Add a row and print its warnings."""
        self.rows.add(row)
        lines, cached, busy = [], row.get("cached_tokens"), row.get("client_busy_percent") or 0
        if row.get("differ"):
            at = ", ".join(map(str, row["first_differences"]))
            lines.append(f"{row['differ']} answers differ among others, from tokens {at} on: by rounding, or wrong")
        if cached and row["part"] != "check" and not row.get("reuse"):
            lines.append(
                f"the server had {cached} tokens of prompts that should have been new: first tokens came too soon; "
                "restart it, or leave --seed out"
            )
        if busy > BUSY_PERCENT:
            lines.append(f"this client was busy for {busy:.0f}% of the time: its own delays are in the times")
        for line in lines:
            print(f"  warning: {line}", flush=True)

    def draw(self, length: int | None = None) -> list[int]:
        """Draw a prompt of so many tokens; None: of one of the lengths of `--prompt-lengths`."""
        count = length or self.random.randint(*self.args.prompt_lengths)
        return self.random.choices(range(self.target.vocab_size), k=count)

    async def ask(self, prompt: Sequence[int], tokens: int, answer: Answer | None = None) -> Answer:
        """Return one answer, in `answer` if given."""
        return await self.client.ask(self.target.model, prompt, tokens, answer)


def counted(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return how many answers failed, by status and by reason, and how many tokens of prompts were cached."""
    failures = Counter(answer.failure for answer in answers if answer.failure)
    return {
        "failed": sum(failures.values()),
        "statuses": {str(status): n for status, n in sorted(Counter(answer.status for answer in answers).items())},
        "failures": dict(failures.most_common(3)),
        "cached_tokens": sum(answer.cached for answer in answers),
    }


async def compare(bench: Bench) -> None:
    """Row of answers that differ among others from those alone, token by token.

    Greedy answers are the same unless the two largest scores differ by less than rounding, which batches may change: so a
    difference is counted and does not end the run. A server that keeps prefixes has the prompts' keys from the first time.
    """
    args = bench.args
    clients = max(*args.clients, args.sample)
    prompts = [bench.draw() for _ in range(args.sample)]
    alone = []
    for prompt in prompts:
        alone.append(await bench.ask(prompt, args.tokens))
        if not alone[-1].good:
            raise Refusal(f"the first prompts must be answered, got: {alone[-1].failure}")
    others = [bench.draw() for _ in range(clients - args.sample)]
    together = await asyncio.gather(*(bench.ask(prompt, args.tokens) for prompt in [*prompts, *others]))
    pairs = [(one, two) for one, two in zip(alone, together, strict=False) if two.good]
    differ = sorted(first_difference(one.tokens, two.tokens) for one, two in pairs if one.tokens != two.tokens)
    row = {"part": "check", "clients": clients, "prompts": args.sample, "differ": len(differ)}
    cached = {"cached_tokens": sum(two.cached for _, two in pairs)}
    bench.add(row | {"first_differences": differ, **counted(together), **cached})


def first_difference(one: Sequence[int], two: Sequence[int]) -> int:
    """Return the index where two lists of tokens begin to differ.

    Example:
        >>> first_difference([1, 2, 3], [1, 2, 4]), first_difference([1], [1, 2])
        (2, 1)
    """
    return next((x for x, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


async def measure_alone(bench: Bench, context: int) -> None:
    """Row of one request at a time, after prompts of a length."""
    args, target = bench.args, bench.target
    row: dict[str, Any] = {"part": "alone", "clients": 1, "context": context, "reuse": args.reuse, "failed": 0}
    if target.length is not None and context + args.tokens > target.length:
        what = f"{context} + {args.tokens} tokens do not fit into the {target.length} of the server"
        bench.add(row | {"refused": f"left out: {what}"})
        return
    prompt = bench.draw(context)
    answers = [await bench.ask(prompt, min(WARMUP_TOKENS, args.tokens))]
    busy, began = time.process_time(), time.perf_counter()
    while len(answers) <= args.repeats and not answers[-1].failure:
        answers.append(await bench.ask(prompt if args.reuse else bench.draw(context), args.tokens))
    busy, seconds = time.process_time() - busy, time.perf_counter() - began
    good = [answer for answer in answers[1:] if answer.good]
    row |= {"answers": len(good), **numbers_of(good), **counted(answers)}
    row["prompt_tokens_per_s"] = None if row["ttft_ms"] is None else 1e3 * context / row["ttft_ms"]
    bench.add(row | {"client_busy_percent": 100 * busy / max(seconds, 1e-9)})


async def measure_load(bench: Bench, clients: int) -> dict[str, Any]:
    """Return the numbers of so many clients."""
    load = await run_load(bench, clients, max(bench.args.requests, 2 * clients))
    return {"clients": clients, "prompt_lengths": list(bench.args.prompt_lengths), **load.row()}


async def measure_latency(bench: Bench, known: dict[int, dict[str, Any]]) -> None:
    """Rows by clients: doubled until tokens take too long; the most that hold the latency are marked.

    `known` are loads that were measured already, by clients.
    """
    args = bench.args
    running = (bench.target.about.get("flags") or {}).get("max_running")
    most = min(args.most_clients, running or args.most_clients)
    rows: list[dict[str, Any]] = []
    for clients in (2**x for x in range(most.bit_length())):
        row = known.get(clients) or await measure_load(bench, clients)
        rows.append({"part": "latency", "latency_ms": args.latency_ms, **row, "within": holds(row, args.latency_ms)})
        if not rows[-1]["within"]:
            break
    held = [row["clients"] for row in rows if row["within"]]
    for row in rows:
        bench.add(row | {"largest": row["clients"] == max(held, default=None)})


async def measure(bench: Bench) -> None:
    """Compare answers, then measure the parts that are asked for."""
    args, length = bench.args, bench.target.length
    if length is not None and args.prompt_lengths[1] + args.tokens > length:
        raise Refusal(
            f"prompt_lengths and tokens must fit into the {length} tokens of the server, got {args.prompt_lengths[1]} + "
            f"{args.tokens}; pass other --prompt-lengths or --tokens"
        )
    await compare(bench)
    if "alone" in args.parts:
        for context in args.contexts:
            await measure_alone(bench, context)
    known: dict[int, dict[str, Any]] = {}
    if "load" in args.parts:
        for clients in args.clients:
            known[clients] = await measure_load(bench, clients)
            bench.add({"part": "load", **known[clients]})
    if "latency" in args.parts:
        await measure_latency(bench, known)


def bench_server(args: ServerFlags, session: Session, head: dict[str, Any], keep: Keep) -> list[dict[str, Any]]:
    """Return the rows of a running server.

    `head`, of the JSON, has the machine line of this process, which becomes that of the client, and gets that of the server if
    it is known (the command is this one), and the seed.
    """
    check_installed(["aiohttp"], "bench server", "launch")
    try:
        client = ServerClient(args.url, args.api_key or os.environ.get(KEY) or None, args.timeout_s)
    except ValueError as error:
        raise Refusal(str(error)) from None
    seed = secrets.randbits(32) if args.seed is None else args.seed
    line = head["machine"] | {"command": without_key(head["machine"]["command"])}

    async def run() -> list[dict[str, Any]]:
        async with client:
            target = await query_server(client, args)
            facts = {"model": target.model, "max_model_len": target.length, "vocab_size": target.vocab_size}
            facts |= {"command": line["command"], "date": line["date"]}
            head.update(machine={**(target.about or line), **facts}, client=line, seed=seed)
            common = {"bench": "server", "model": target.model, "world_size": target.about.get("world_size")}
            rows = Rows(session, keep, {**common, "tokens": args.tokens})
            print(f"{target.model} at {args.url}, {describe_target(target)}; seed {seed}", flush=True)
            await measure(Bench(args, client, target, random.Random(seed), rows))
            return rows.rows

    return asyncio.run(run())


def describe_target(target: Target) -> str:
    """Return the server's machine and flags as text."""
    about = target.about
    if not about:
        return "machine unknown"
    gpus, flags = about["gpus"], about["flags"]
    device = f"{len(gpus)} x {gpus[0]}" if about["device"] == "cuda" else about["cpu"]
    words = [f"{about['world_size']} rank(s)", device, about["dtype"], f"torch {about['torch']}"]
    words += [f"commit {about['commit']}"] if about.get("commit") else []
    return ", ".join([*words, f"{about['graphs']} graphs", *(f"{name} {value}" for name, value in flags.items())])
