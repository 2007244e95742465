"""How long a call keeps the host: what Python, torch and the driver take before a call returns.

Owns what is timed of the host and how. Refuses to know how fast the device is.

Note [Host time]
    The time between calling and having returned, by the host's clock, with an idle device at the start: nothing is queued,
    so nobody waits for room in a queue. The median of many calls; the slowest rank counts. Shards are so short that the
    device keeps up. Autograd runs backwards of a GPU in a thread of its own. Where the time of one goes is read off by hooks in
    that thread: until the backward begins, its body, and until the caller has its gradients. In a chain of layers that thread
    is awake after the first: `layer` is the time of one of many, as in a training. On a CPU there is neither such a thread
    nor a device: the time of the computation itself is in it, so only differences between two versions on equal problems
    mean something there.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import ringattn
from ringattn.launch.bench.workloads import DTypeName, MaskName, Problem, draw_inputs
from ringattn.launch.runtime.session import Session


@dataclass(frozen=True)
class Host:
    """All ranks: host time of a forward, and of a forward and backward.

    Attributes:
        tokens: Tokens per GPU; few, so that the device keeps up.
        mask: What is visible.
        heads: Query heads.
        kv_heads: Key/value heads.
        head_dim: Of q, k and v.
        batch: Batch elements.
        dtype: Of q, k and v.
        impl: Kernels: "auto", or the name of a kernel set.
        keep: Keys of the forward are kept for the backward (`Ring(save_gathered_kv=True)`).
        layers: Of the chain.
        calls: Calls that are timed; the median counts.
        device: GPUs where there are any, or the CPU.
        out: Folder for the JSON.
    """

    tokens: int = 512
    mask: MaskName = "causal"
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    batch: int = 1
    dtype: DTypeName = "bf16"
    impl: str = "auto"
    keep: bool = False
    layers: int = 8
    calls: int = 200
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path = Path("runs/bench")

    def problem(self, world_size: int) -> Problem:
        """What the ring computes."""
        n = self.tokens * world_size
        return Problem(self.mask, n, self.batch, self.heads, self.kv_heads, self.head_dim, self.dtype, window=n)


def host_us(call: Callable[[], Any], session: Session, calls: int = 200) -> float:
    """Microseconds until a call returns (Note [Host time]); every rank makes the same calls.

    Args:
        call: What is timed; called a few times before, so that what is made at first sight is there.
        session: The ranks.
        calls: How many are timed.
    """
    taken = []
    for i in range(calls + 10):
        if session.device.type == "cuda":
            torch.cuda.synchronize(session.device)
        started = time.perf_counter()
        call()
        if i >= 10:
            taken.append(1e6 * (time.perf_counter() - started))
    return session.maximum([statistics.median(taken)])[0]


def split_us(forward: Callable[[], Any], leaves: tuple[Any, ...], do: Any, session: Session, calls: int) -> list[float]:
    """Microseconds of a backward until its body begins, of the body, and until its caller goes on; medians of this rank.

    Args:
        forward: What is differentiated.
        leaves: With respect to what.
        do: The gradient of its result.
        session: The ranks.
        calls: How many are timed.
    """
    taken: list[list[float]] = []
    marks: list[float] = []
    for i in range(calls + 10):
        o = forward()
        node = o.grad_fn
        node.register_prehook(lambda _: marks.append(time.perf_counter()))
        node.register_hook(lambda *_: marks.append(time.perf_counter()))
        if session.device.type == "cuda":
            torch.cuda.synchronize(session.device)
        marks[:] = [time.perf_counter()]
        torch.autograd.grad(o, leaves, do)
        marks.append(time.perf_counter())
        if i >= 10:
            taken.append([1e6 * (stop - start) for start, stop in itertools.pairwise(marks)])
    return [statistics.median(column) for column in zip(*taken, strict=True)]


def bench_host(args: Host, session: Session) -> list[dict[str, Any]]:
    """One row: microseconds of a forward without and with gradients wanted, of a backward, of both, and of a layer of many.

    The backward is also split (`split_us`), in autograd's own thread and in the caller's; its operator is also called directly.
    """
    problem = args.problem(session.world_size)
    ring = ringattn.Ring(save_gathered_kv=args.keep)
    sharding = ring.sharding(problem.seq_len, documents=problem.documents)
    q, k, v, do = draw_inputs(problem, sharding.shard_len, session.device)

    def forward() -> torch.Tensor:
        return ringattn.ring_attention(q, k, v, sharding, impl=args.impl, **problem.options)

    def inference() -> None:
        with torch.no_grad():
            forward()

    def both() -> None:
        torch.autograd.grad(forward(), (q, k, v), do)

    def both_in_one_thread() -> None:
        # autograd runs backwards of a GPU in a thread of its own, whose core has none of what the forward left in its caches
        with torch.autograd.set_multithreading_enabled(False):
            both()

    answer = forward()  # torch 2.11 lets go of what was saved when the answer goes
    held: Any = answer.grad_fn
    *saved, o, lse, _ = held.saved_tensors
    where = held.dropout_seed, held.ring, held.call

    def operator() -> None:
        with torch.no_grad():
            torch.ops.ringattn.backward.default(do, None, *saved[:3], o, lse, *saved[3:], *where, held.wanted)

    leaves = [[x.detach().requires_grad_() for x in (q, k, v)] for _ in range(args.layers)]

    def chain() -> None:
        # one backward over all: nothing is added up between layers
        found = [ringattn.ring_attention(*three, sharding, impl=args.impl, **problem.options) for three in leaves]  # pyright: ignore[reportArgumentType, reportCallIssue]
        torch.autograd.grad(found, [x for three in leaves for x in three], [do] * args.layers)

    def chain_in_one_thread() -> None:
        with torch.autograd.set_multithreading_enabled(False):
            chain()

    calls = {
        "inference": inference,
        "forward": forward,
        "both": both,
        "both_in_one_thread": both_in_one_thread,
        "backward_operator": operator,
    }
    row = {"bench": "host", "world_size": session.world_size, "keep": args.keep, **dataclasses.asdict(problem)}
    row |= {f"{name}_us": host_us(call, session, args.calls) for name, call in calls.items()}
    for name, call in {"layer": chain, "layer_in_one_thread": chain_in_one_thread}.items():
        row[f"{name}_us"] = host_us(call, session, args.calls // 4 + 1) / args.layers
    for name, threads in {"split": True, "split_in_one_thread": False}.items():
        with torch.autograd.set_multithreading_enabled(threads):
            row[f"{name}_us"] = split_us(forward, (q, k, v), do, session, args.calls)
    return [row]
