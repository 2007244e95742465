"""A running server, asked over HTTP: times of one request, times and tokens of many at once, and how many hold a latency.

Owns what is measured, and the rows. Refuses to know how a request is asked (`http_client`), what serves, and how rows are shown.
Answers are compared before anything is timed; what fails or differs is counted in the rows, and failures are in the exit code.

Note [Numbers of an answer]
    ttft: from the request to its first token (Note [What is timed] of `http_client`), with the queue, the prompt and the network.
    tpot: the mean time of an answer's later tokens; median and p95 are over answers. gap: from one token to the next; p95 and p99
    are over all tokens, so a stall behind somebody's prompt is seen there first.

Note [A load]
    Each of N clients asks for its next answer when it has the last one: a closed loop. Its first answer is of a random length and
    not measured, or all would ask at the same moments for ever. When every client has had it the window opens; it closes
    when as many answers as are wanted have begun and ended in it. Tokens/s and requests/s are those of the window, of all clients;
    ttft, tpot and gaps those of the measured answers. What is under way then is cut off.

Note [New prompts]
    Tokens are drawn at random, so no prompt begins like another, and a server that keeps prefixes finds none. A second run with
    the same seed would ask for the same ones again: so a seed is drawn where none is given. How many tokens of prompts the server
    says it had is in every row (`cached_tokens`); a warning says so where there should have been none.

Note [What is compared]
    Some prompts are answered alone, then again all at once, among as many as `--clients` has at most. Greedy answers are the same
    but where the two largest scores differ by less than rounding, which batches may change. So a difference is counted and shown,
    with the token at which it begins, and does not end the run. A server that keeps prefixes takes the prompts' keys from the
    first time; one with `--no-keep-prefixes` computes them again.
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import os
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ringattn.launch.bench.http_client import Answer, ServerClient, message_of
from ringattn.launch.runtime.session import Keep, check_numbers
from ringattn.launch.serve.config import KEY

WARM_TOKENS = 2
"""Tokens of an answer that only warms."""
BUSY_PERCENT = 70.0
"""A client that is busier than this is said to be: its own delays begin to be in the times."""


class CannotBench(RuntimeError):
    """The server can not be measured; the message says why, and what to do."""


@dataclass(frozen=True)
class Server:
    """A running server: what it takes over HTTP, for one client and for many.

    Attributes:
        url: Where it is; any that speaks OpenAI's completions with `ignore_eos` and `return_token_ids`.
        api_key: What it wants as a bearer token; better given by the environment variable RINGATTN_API_KEY.
        model: The model to ask; by default the first that the server names.
        parts: "alone": one request at a time; "load": so many clients at once; "latency": the most clients whose tokens hold a
            latency.
        contexts: "alone": tokens of prompts.
        repeats: "alone": answers that are timed of each.
        clients: "load": how many at once.
        prompt_lengths: "load", "latency": tokens of prompts, drawn from the first to the second.
        tokens: New tokens of an answer.
        requests: "load", "latency": answers that are timed at least; each client has two on average, too.
        latency_ms: "latency": what the 95th percentile of the time per output token may be.
        most_clients: "latency": more are not tried; nor are more than the server says it computes at a time.
        sample: Prompts whose answers are compared, alone and beside others.
        reuse: "alone": ask the same prompt again and again, so that a server that keeps prefixes has it.
        vocab_size: Tokens are drawn below it; by default what the server says.
        seed: Of prompts and lengths; drawn when it is left out.
        timeout_s: Seconds in which an answer must have ended.
        out: Folder for the JSON.
        name: Of the file.
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
        """Refuses numbers that mean nothing."""
        check_numbers(self)
        if self.prompt_lengths[0] > self.prompt_lengths[1]:
            raise ValueError(f"prompt_lengths must be the fewest and the most tokens, got {self.prompt_lengths}")
        for name, value in (("latency_ms", self.latency_ms), ("timeout_s", self.timeout_s)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0, got {value}")


def without_key(command: str) -> str:
    """A command line that may be kept.

    Example:
        >>> without_key("bench server --api-key abc --url u"), without_key("bench server --api_key=abc")
        ('bench server --api-key ... --url u', 'bench server --api_key=...')
    """
    words = command.split(" ")
    for place, word in enumerate(words):
        name, equals, _ = word.partition("=")
        if name.replace("_", "-") == "--api-key":
            words[place] = f"{name}=..." if equals else word
            if not equals and place + 1 < len(words):
                words[place + 1] = "..."
    return " ".join(words)


def quantile(values: Iterable[float], share: float) -> float | None:
    """The value that a share of all lie below, between the two next to it in proportion; None of none.

    Example:
        >>> quantile([4.0, 1.0, 2.0], 0.5), quantile([0.0, 10.0], 0.95), quantile([], 0.5)
        (2.0, 9.5, None)
    """
    ordered = sorted(values)
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def numbers_of(answers: Sequence[Answer]) -> dict[str, float | None]:
    """Times of good answers in milliseconds (Note [Numbers of an answer])."""
    gaps = [gap for answer in answers for gap in answer.gaps_s]
    firsts = [answer.first_s for answer in answers]
    means = [mean for answer in answers if (mean := answer.per_token_s) is not None]
    found = {
        "ttft_ms": quantile(firsts, 0.5),
        "ttft_p95_ms": quantile(firsts, 0.95),
        "tpot_ms": quantile(means, 0.5),
        "tpot_p95_ms": quantile(means, 0.95),
        "gap_p95_ms": quantile(gaps, 0.95),
        "gap_p99_ms": quantile(gaps, 0.99),
    }
    return {name: None if value is None else 1e3 * value for name, value in found.items()}


def doubling(most: int) -> list[int]:
    """1, 2, 4, ... and no more than that.

    Example:
        >>> doubling(12), doubling(1)
        ([1, 2, 4, 8], [1])
    """
    return [2**x for x in range(most.bit_length())]


def holds(row: dict[str, Any], latency_ms: float) -> bool:
    """Whether all answers of a load came, and the 95th percentile of their times per token is within a latency."""
    value = row.get("tpot_p95_ms")
    return not row["failed"] and value is not None and value <= latency_ms


def mark_largest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Says of each row of a latency whether it has the most clients that hold it, with nobody below who does not.

    Example:
        >>> rows = [{"clients": n, "within": n in (1, 2, 8)} for n in (1, 2, 4, 8)]
        >>> [row["clients"] for row in mark_largest(rows) if row["largest"]]
        [2]
    """
    ordered = sorted(rows, key=lambda row: row["clients"])
    misses = next((place for place, row in enumerate(ordered) if not row["within"]), len(ordered))
    return [row | {"largest": place == misses - 1} for place, row in enumerate(ordered)]


@dataclass
class Target:
    """What the server says of itself.

    Attributes:
        model: What it serves.
        length: Tokens of a prompt and its answer at most; None where it does not say.
        vocab_size: Tokens are below it.
        about: What it runs on, as `/state` of ours says it; empty elsewhere.
    """

    model: str
    length: int | None
    vocab_size: int
    about: dict[str, Any]

    @property
    def most_running(self) -> int | None:
        """Requests that it computes at a time, if it says so."""
        return (self.about.get("flags") or {}).get("max_running")


def _object(said: Any) -> dict[str, Any]:
    """What another server may have said with JSON of its own: an object, or one without anything."""
    return said if isinstance(said, dict) else {}


async def meet(client: ServerClient, args: Server) -> Target:
    """Asks the server who it is.

    Raises:
        CannotBench: It does not answer, wants a key, or does not say what must be known.
    """
    where = client.url
    try:
        status, models = await client.get("/v1/models")
        state = await client.get("/state")
    except (OSError, ValueError) as error:
        raise CannotBench(
            f"url must be that of a running server, got {where}: {error}; "
            "start one with: python -m ringattn.launch.serve --model PATH"
        ) from None
    if status == 401:
        raise CannotBench(f"{where} wants a key: {message_of(models)}; set {KEY}, or pass --api-key")
    listed = _object(models).get("data") if status == 200 else None
    cards = [one for one in listed if isinstance(_object(one).get("id"), str)] if isinstance(listed, list) else []
    if not cards:
        raise CannotBench(f"{where}/v1/models must name a model, got status {status}: {message_of(models)}")
    card = cards[0] if args.model is None else next((one for one in cards if one["id"] == args.model), None)
    if card is None:
        names = ", ".join(one["id"] for one in cards)
        raise CannotBench(f"model must be one of {names}, got {args.model}")
    told = _object(_object(state[1]).get("server")) if state[0] == 200 else {}
    about = told if told.keys() >= {"vocab_size", "gpus", "flags"} else {}  # what others say there is their own
    vocab = args.vocab_size or about.get("vocab_size")
    if vocab is None:
        raise CannotBench(f"{where} does not say how many tokens its vocabulary has; pass --vocab-size")
    return Target(card["id"], card.get("max_model_len"), vocab, about)


class Prompts:
    """Random prompts (Note [New prompts]).

    Args:
        seed: Of all of them.
        vocab_size: Tokens are below it.
        lengths: How many tokens those have whose length is drawn: from the first to the second.
    """

    def __init__(self, seed: int, vocab_size: int, lengths: tuple[int, int]) -> None:
        self._random, self._tokens, self._lengths = random.Random(seed), range(vocab_size), lengths

    def of(self, length: int) -> list[int]:
        """A prompt of so many tokens."""
        return self._random.choices(self._tokens, k=length)

    def any(self) -> list[int]:
        """A prompt of a drawn length."""
        return self.of(self._random.randint(*self._lengths))

    def count(self, most: int) -> int:
        """A number from 1 to `most`."""
        return self._random.randint(1, most)


@dataclass
class Load:
    """What came of a load (Note [A load]).

    Attributes:
        opened: When the window opened.
        closed: When it closed.
        asked: All answers, those that were cut off too.
        measured: Those that began and ended in the window.
        busy_s: Seconds in which this process computed, of the window.
    """

    opened: float = math.inf
    closed: float = math.inf
    asked: list[Answer] = field(default_factory=list)
    measured: list[Answer] = field(default_factory=list)
    busy_s: float = 0.0

    def row(self) -> dict[str, Any]:
        """Its numbers."""
        good = [answer for answer in self.measured if answer.good]
        ended = [answer for answer in self.asked if answer.ended]
        failures = Counter(answer.failure for answer in ended if answer.failure)
        seconds = max(self.closed - self.opened, 1e-9)
        tokens = sum(self.opened < one <= self.closed for answer in self.asked for one in answer.times)
        return {
            "answers": len(good),
            "seconds": seconds,
            "requests_per_s": sum(a.good and self.opened < a.ended <= self.closed for a in ended) / seconds,
            "tokens_per_s": tokens / seconds,
            **numbers_of(good),
            "failed": sum(failures.values()),
            "statuses": {str(status): n for status, n in sorted(Counter(a.status for a in ended).items())},
            "failures": dict(failures.most_common(3)),
            "cached_tokens": sum(answer.cached for answer in ended),
            "client_busy_percent": 100 * self.busy_s / seconds,
        }


async def run_load(bench: Bench, clients: int, wanted: int) -> Load:
    """Lets so many clients ask, until as many answers as are wanted were measured (Note [A load])."""
    load, warm, busy = Load(), 0, 0.0

    async def ask(tokens: int) -> Answer:
        answer = Answer(tokens)
        load.asked.append(answer)
        return await bench.client.ask(bench.target.model, bench.prompts.any(), tokens, answer)

    async def work() -> None:
        nonlocal warm, busy
        await ask(bench.prompts.count(bench.args.tokens))
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
    """What all measurements share.

    Attributes:
        args: What is asked for.
        client: Who asks.
        target: Who answers.
        prompts: Where prompts come from.
        keep: Who gets the rows.
        rows: So far.
    """

    args: Server
    client: ServerClient
    target: Target
    prompts: Prompts
    keep: Keep
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, row: dict[str, Any]) -> None:
        """Completes a row, says it and keeps it."""
        shared = {"bench": "server", "model": self.target.model, "world_size": self.target.about.get("world_size")}
        self.rows.append({**shared, "tokens": self.args.tokens, **row})
        print(f"  {describe_row(self.rows[-1])}", flush=True)
        for line in warnings_of(self.rows[-1]):
            print(f"  warning: {line}", flush=True)
        self.keep(self.rows)

    async def ask(self, prompt: Sequence[int], tokens: int) -> Answer:
        """One answer."""
        return await self.client.ask(self.target.model, prompt, tokens)


def describe_row(row: dict[str, Any]) -> str:
    """A row for people who wait."""
    many = "" if row.get("clients") == 1 else "s"
    where = {
        "check": "{prompts} prompts, alone and among {clients}",
        "alone": "alone, {context} tokens of prompt",
        "load": f"{{clients}} client{many}",
        "latency": f"{{clients}} client{many}, {{latency_ms:g}} ms",
    }[row["part"]].format(**row)
    forms = {
        "differ": "{} differ",
        "requests_per_s": "{:.2f} requests/s",
        "tokens_per_s": "{:.0f} tokens/s",
        "ttft_ms": "first token {:.1f} ms",
        "ttft_p95_ms": "(p95 {:.1f})",
        "tpot_ms": "later ones {:.2f} ms",
        "tpot_p95_ms": "(p95 {:.2f})",
        "refused": "{}",
    }
    said = [form.format(row[name]) for name, form in forms.items() if row.get(name) is not None]
    said += [f"within: {'yes' if row['within'] else 'no'}"] if "within" in row else []
    said += [f"{row['failed']} failed"] if row.get("failed") else []
    return f"{where}: {', '.join(said).replace(', (', ' (')}"


def warnings_of(row: dict[str, Any]) -> Iterator[str]:
    """What is to be known before the numbers of a row are believed."""
    if row["part"] == "check":
        if row["differ"]:
            at = ", ".join(str(place) for place in row["first_differences"])
            yield f"{row['differ']} answers differ beside others, from tokens {at} on: by rounding, or wrong"
        return
    if row.get("cached_tokens") and not row.get("reuse"):
        yield (
            f"the server had {row['cached_tokens']} tokens of prompts that should have been new: first tokens came too "
            "soon; start it again, or leave --seed out"
        )
    if (row.get("client_busy_percent") or 0) > BUSY_PERCENT:
        yield f"this client was busy for {row['client_busy_percent']:.0f}% of the time: its own delays are in the times"


async def compare(bench: Bench) -> None:
    """A row: whether prompts get beside others what they get alone (Note [What is compared]).

    Raises:
        CannotBench: One of them was not answered.
    """
    args = bench.args
    clients = max(*args.clients, args.sample)
    prompts = [bench.prompts.any() for _ in range(args.sample)]
    alone = []
    for prompt in prompts:
        alone.append(await bench.ask(prompt, args.tokens))
        if not alone[-1].good:
            raise CannotBench(f"the first prompts must be answered, got: {alone[-1].failure}")
    others = [bench.prompts.any() for _ in range(clients - args.sample)]
    together = await asyncio.gather(*(bench.ask(prompt, args.tokens) for prompt in [*prompts, *others]))
    pairs = [(one, two) for one, two in zip(alone, together, strict=False) if two.good]
    failed = [answer for answer in together if not answer.good]
    differ = [first_difference(one.tokens, two.tokens) for one, two in pairs if one.tokens != two.tokens]
    bench.add(
        {
            "part": "check",
            "clients": clients,
            "prompts": args.sample,
            "differ": len(differ),
            "first_differences": sorted(differ),
            "failed": len(failed),
            "statuses": {str(status): n for status, n in sorted(Counter(a.status for a in together).items())},
            "failures": dict(Counter(answer.failure for answer in failed).most_common(3)),
            "cached_tokens": sum(two.cached for _, two in pairs),
        }
    )


def first_difference(one: Sequence[int], two: Sequence[int]) -> int:
    """Where two lists of tokens begin to differ.

    Example:
        >>> first_difference([1, 2, 3], [1, 2, 4]), first_difference([1], [1, 2])
        (2, 1)
    """
    return next((x for x, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


async def measure_alone(bench: Bench, context: int) -> None:
    """A row: one request at a time, after prompts of a length."""
    args, target = bench.args, bench.target
    row: dict[str, Any] = {"part": "alone", "clients": 1, "context": context, "reuse": args.reuse, "failed": 0}
    if target.length is not None and context + args.tokens > target.length:
        what = f"{context} + {args.tokens} tokens do not fit into the {target.length} that the server takes"
        bench.add(row | {"refused": f"left out: {what}"})
        return
    prompt = bench.prompts.of(context)
    answers = [await bench.ask(prompt, min(WARM_TOKENS, args.tokens))]
    busy, began = time.process_time(), time.perf_counter()
    while len(answers) <= args.repeats and not answers[-1].failure:
        answers.append(await bench.ask(prompt if args.reuse else bench.prompts.of(context), args.tokens))
    seconds = time.perf_counter() - began
    good = [answer for answer in answers[1:] if answer.good]
    failures = Counter(answer.failure for answer in answers if answer.failure)
    found = numbers_of(good)
    row |= {
        "answers": len(good),
        **found,
        "prompt_tokens_per_s": None if found["ttft_ms"] is None else 1e3 * context / found["ttft_ms"],
        "failed": sum(failures.values()),
        "statuses": {str(status): n for status, n in sorted(Counter(a.status for a in answers).items())},
        "failures": dict(failures),
        "cached_tokens": sum(answer.cached for answer in answers),
        "client_busy_percent": 100 * (time.process_time() - busy) / max(seconds, 1e-9),
    }
    bench.add(row)


async def measure_load(bench: Bench, clients: int) -> dict[str, Any]:
    """The numbers of so many clients."""
    load = await run_load(bench, clients, max(bench.args.requests, 2 * clients))
    return {"clients": clients, "prompt_lengths": list(bench.args.prompt_lengths), **load.row()}


async def measure_latency(bench: Bench, known: dict[int, dict[str, Any]]) -> None:
    """Rows by clients: doubled until tokens take too long; the most that hold the latency are marked.

    Args:
        bench: What is asked for.
        known: Loads that were measured already, by clients.
    """
    args = bench.args
    most = min(args.most_clients, bench.target.most_running or args.most_clients)
    rows: list[dict[str, Any]] = []
    for clients in doubling(most):
        row = known.get(clients) or await measure_load(bench, clients)
        rows.append({"part": "latency", "latency_ms": args.latency_ms, **row, "within": holds(row, args.latency_ms)})
        if not rows[-1]["within"]:
            break
    for row in mark_largest(rows):
        bench.add(row)


async def measure(args: Server, client: ServerClient, target: Target, seed: int, keep: Keep) -> list[dict[str, Any]]:
    """Compares answers, then measures the parts that are asked for.

    Returns:
        The rows.

    Raises:
        CannotBench: The server does not answer the first prompts.
    """
    lengths = args.prompt_lengths
    if target.length is not None and lengths[1] + args.tokens > target.length:
        raise CannotBench(
            f"prompt_lengths and tokens must fit into the {target.length} tokens that the server takes, got {lengths[1]} + "
            f"{args.tokens}; pass other --prompt-lengths or --tokens"
        )
    bench = Bench(args, client, target, Prompts(seed, target.vocab_size, lengths), keep)
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
    return bench.rows


def bench_server(args: Server, client_line: dict[str, Any], keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measures a running server.

    Args:
        args: What.
        client_line: What this process runs on.
        keep: Called with all that is known after each measurement: a run that is cut off keeps what it has.

    Returns:
        What is kept: machine (the server's where it says so; the command is this one), client, seed and rows.

    Raises:
        CannotBench: The server can not be measured, or aiohttp is not installed.
    """
    if importlib.util.find_spec("aiohttp") is None:
        raise CannotBench("bench server needs aiohttp; install it with: pip install 'ringattn[launch]'")
    key = args.api_key or os.environ.get(KEY) or None
    try:
        client = ServerClient(args.url, key, args.timeout_s)
    except ValueError as error:
        raise CannotBench(str(error)) from None
    seed = secrets.randbits(32) if args.seed is None else args.seed

    async def run() -> dict[str, Any]:
        async with client:
            return await run_all(await meet(client, args))

    async def run_all(target: Target) -> dict[str, Any]:
        command = without_key(client_line["command"])
        told = {"model": target.model, "max_model_len": target.length, "vocab_size": target.vocab_size}
        machine = {**(target.about or client_line), **told, "command": command, "date": client_line["date"]}
        content: dict[str, Any] = {
            "machine": machine,
            "client": client_line | {"command": command},
            "seed": seed,
            "rows": [],
        }

        def keep_rows(rows: list[dict[str, Any]]) -> None:
            content["rows"] = rows
            keep(content)

        print(f"{target.model} at {args.url}, {describe_target(target)}; seed {seed}", flush=True)
        await measure(args, client, target, seed, keep_rows)
        return content

    return asyncio.run(run())


def describe_target(target: Target) -> str:
    """What answers, in a few words."""
    about = target.about
    if not about:
        return "which says nothing of what it runs on"
    gpus, flags = about["gpus"], about["flags"]
    device = f"{len(gpus)} x {gpus[0]}" if about["device"] == "cuda" else about["cpu"]
    words = [f"{about['world_size']} rank(s)", device, about["dtype"], f"torch {about['torch']}"]
    words += [f"commit {about['commit']}"] if about.get("commit") else []
    return ", ".join([*words, f"{about['graphs']} graphs", *(f"{name} {value}" for name, value in flags.items())])


def red_rows(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What failed, in words: one line per row with failures."""
    lines = []
    for row in rows:
        if row.get("failed"):
            first, count = next(iter(row["failures"].items()))
            lines.append(f"{describe_row(row).partition(':')[0]}: {row['failed']} failed, {count} x {first}")
    return lines
