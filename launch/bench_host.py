"""How long a call keeps the host: what Python, torch and the driver take before a call returns.

Owns what is timed of the host and how. Refuses to know how fast the device is.

Note [Host time]
    The time between calling and having returned, by the host's clock, with an idle device at the start: nothing is queued,
    so nobody waits for room in a queue. The median of many calls; the slowest rank counts. Shards are so short that the
    device keeps up. On a CPU there is no device: the time of the computation itself is in it, so only differences between
    two versions on equal problems mean something there.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import ringattn
from ringattn.launch.problems import DTypeName, MaskName, Problem, draw_inputs
from ringattn.launch.session import Session


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


def bench_host(args: Host, session: Session) -> list[dict[str, Any]]:
    """One row: microseconds of a forward without and with gradients wanted, and of a forward and backward."""
    problem = args.problem(session.world_size)
    ring = ringattn.Ring()
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

    calls = {"inference": inference, "forward": forward, "both": both, "both_in_one_thread": both_in_one_thread}
    row = {"bench": "host", "world_size": session.world_size, **dataclasses.asdict(problem)}
    return [row | {f"{name}_us": host_us(call, session, args.calls) for name, call in calls.items()}]
