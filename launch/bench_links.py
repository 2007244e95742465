"""What links cost: one ring by the channels NCCL may use, and rings of two levels by how keys move within and between nodes.

Owns which rings are compared and what is shown. Refuses to print a speed of a ring whose bits were not checked.

    torchrun --nproc_per_node 4 -m ringattn.launch.bench_links

Note [The same bits]
    Before anything is timed, every ring computes a short call, forward and backward, with both movements of the backward,
    and every rank compares its rows with a simulated ring of the same levels: same plans, loops and kernels, in this
    process. They must be equal to the bit.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

import ringattn
from ringattn.launch.check import PLENTY
from ringattn.launch.problems import DTypeName, Problem, draw_inputs, same_work, teraflops
from ringattn.launch.rings import ScheduleName, check_nodes, check_schedules, make_ring, shown_name
from ringattn.launch.session import Keep, Session, describe, keeper, machine, open_session, parse, table


@dataclass(frozen=True)
class Links:
    """Times causal zigzag attention over rings with different links.

    Attributes:
        tokens: Tokens per GPU.
        heads: Query heads.
        kv_heads: Key/value heads.
        head_dim: Of q, k and v.
        dtype: Of q, k and v.
        ctas: Thread blocks that NCCL may use in a ring of one level; 0: the group's own communicator.
        nodes: Nodes of the rings of two levels; 1 for none.
        gbps: Gigabits per second between these nodes; 0: as fast as it goes.
        within: How keys move within nodes: "auto" as users get it; "gathered": a launch per outer step, "staged": step by
            step, both over a copy engine; "process_group": step by step over NCCL or gloo.
        outer_ctas: Thread blocks that NCCL may use in rings of two levels.
        impl: Kernels: "auto", or the name of a kernel set.
        rounds: Rounds in which the rings take turns; the median counts.
        calls: Calls per turn.
        device: GPUs where there are any, or the CPU.
        out: Where rows are written as JSON.
    """

    tokens: tuple[int, ...] = (4096, 16384)
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: DTypeName = "bf16"
    ctas: tuple[int, ...] = (0, 2, 4, 8, 16)
    nodes: int = 2
    gbps: tuple[float, ...] = (0.0, 400.0, 100.0)
    within: tuple[ScheduleName, ...] = ("auto",)
    outer_ctas: int = 4
    impl: str = "auto"
    rounds: int = 5
    calls: int = 5
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path = Path("runs/bench")


@dataclass(frozen=True)
class Link:
    """One ring.

    Attributes:
        name: Shown in the table.
        ring: The ring.
        nodes: Its nodes.
    """

    name: str
    ring: ringattn.Ring
    nodes: int


def open_links(args: Links, session: Session) -> list[Link]:
    """The rings that are compared, and first one of this rank alone: what it does costs no communication."""
    group, _ = dist.new_subgroups(group_size=1)
    assert isinstance(group, dist.ProcessGroup), "this rank belongs to the group made for it"
    links = [Link("alone", ringattn.Ring(group, impl=args.impl), 1)]
    for ctas in args.ctas:
        ring = ringattn.Ring(impl=args.impl, transport="process_group", nccl_max_ctas=ctas or None)
        links.append(Link(f"one ring, {ctas or 'all'} ctas", ring, 1))
    for gbps, within in itertools.product(args.gbps, args.within) if args.nodes > 1 else ():
        limits: dict[str, Any] = {"nccl_max_ctas": args.outer_ctas or None, "outer_gbps": gbps or None}
        ring = make_ring(within, impl=args.impl, nodes=args.nodes, **limits)
        shape = f"{args.nodes} x {session.world_size // args.nodes}"
        if len(args.within) > 1 or within != "auto":
            shape += f" {shown_name(within, session)}"
        links.append(Link(f"{shape}, {f'{gbps:g} Gb/s' if gbps else 'no limit'}", ring, args.nodes))
    return links


def differs(link: Link, args: Links, session: Session) -> list[str]:
    """What this rank computes otherwise than the simulated ring (Note [The same bits])."""
    world_size = link.ring.world_size
    n = 61 * session.world_size + 5
    problem = Problem("causal", n, 1, args.heads, args.kv_heads, args.head_dim, args.dtype, n)
    torch.manual_seed(0)
    q, k, v, do = draw_inputs(problem, n, session.device)
    for x in (q, k, v, do):
        dist.broadcast(x.detach(), 0)
    sharding = link.ring.sharding(n)
    link.ring.init_transport(session.device)
    gathers = link.ring.context.transport.kv_gather() is not None and link.ring.context.budget > 0
    found = []
    for moving in ("keys", "queries"):
        options: dict[str, Any] = {"causal": True, "backward": moving, "deterministic": True}
        expected = ringattn.simulate_ring(
            q.detach(),
            k.detach(),
            v.detach(),
            world_size,
            nodes=link.nodes,
            do=do.detach(),
            impl=args.impl,
            memory_budget=PLENTY if gathers else 0,
            **options,
        )
        mine = [sharding.shard(x.detach(), 1).requires_grad_() for x in (q, k, v)]
        o = ringattn.ring_attention(mine[0], mine[1], mine[2], sharding, **options)
        grads = torch.autograd.grad(o, mine, sharding.shard(do.detach(), 1))
        assert expected.grads is not None, "a cotangent was given"
        wanted = {"o": expected.o, "dq": expected.grads["q"], "dk": expected.grads["k"], "dv": expected.grads["v"]}
        for (name, whole), x in zip(wanted.items(), (o, *grads), strict=True):
            if not torch.equal(sharding.shard(whole, 1), x):
                found.append(f"{link.name}: {name} with {moving} moving, rank {session.rank}")
    return found


def prepare(link: Link, problem: Problem, session: Session) -> dict[str, Callable[[], Any]]:
    """The forward, and forward and backward, on this rank's rows."""
    sharding = link.ring.sharding(problem.seq_len)
    q, k, v, do = draw_inputs(problem, sharding.shard_len, session.device)

    def forward() -> Tensor:
        return ringattn.ring_attention(q, k, v, sharding, **problem.options)

    return {"forward": forward, "both": lambda: torch.autograd.grad(forward(), (q, k, v), do)}


def clock(call: Callable[[], Any], calls: int, session: Session) -> float:
    """Milliseconds per call on the slowest rank."""
    call()
    session.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    if session.device.type == "cuda":
        torch.cuda.synchronize(session.device)
    return session.maximum([(time.perf_counter() - started) * 1e3 / calls])[0]


def measure(args: Links, links: Sequence[Link], session: Session, keep: Keep) -> list[dict[str, Any]]:
    """A row per length and ring.

    Args:
        args: What.
        links: The rings.
        session: The ranks.
        keep: Who gets the rows.
    """
    rows = []
    for tokens in args.tokens:
        whole = Problem(
            "causal", tokens * session.world_size, 1, args.heads, args.kv_heads, args.head_dim, args.dtype, 0
        )
        share = same_work(whole, session.world_size)
        calls: dict[tuple[str, str], Callable[[], Any]] = {}
        for link in links:
            problem = share if link.ring.world_size == 1 else whole
            for what, call in prepare(link, problem, session).items():
                calls[link.name, what] = call
        times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
        for _ in range(args.rounds):
            for key, call in calls.items():
                times[key].append(clock(call, args.calls, session))
        for link in links:
            row: dict[str, Any] = {"link": link.name, "tokens_per_rank": tokens, **dataclasses.asdict(whole)}
            for what, factor in (("forward", 1.0), ("both", 3.5)):
                flops, ms = factor * whole.flops / session.world_size, statistics.median(times[link.name, what])
                if link.ring.world_size == 1:
                    ms *= whole.pairs / session.world_size / share.pairs
                row |= {f"{what}_ms": ms, f"{what}_tflops": teraflops(flops, ms)}
            rows.append(row)
        keep(rows)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 1 when a ring is wrong, and then no speed is shown."""
    args: Links = parse(Links, arguments, "bench_links", (Links.__doc__ or "").split("\n")[0])
    with open_session(args.device) as session:
        if session.world_size == 1:
            session.say("links join ranks; start several: torchrun --nproc_per_node 4 -m ringattn.launch.bench_links")
            return 2
        check_nodes(args.nodes, session.world_size)
        line = machine(session)
        session.say(describe(line))
        check_schedules(args.within if args.nodes > 1 else (), session, nodes=args.nodes)
        links = open_links(args, session)
        red = [one for link in links for one in differs(link, args, session)]
        everywhere = [one for rank in session.gather(red) for one in rank]
        if everywhere:
            session.say("red: not the bits of the simulated ring: " + "; ".join(everywhere))
            return 1
        session.say(f"green: {len(links)} rings give the bits of the simulated ring, both movements")
        rows = measure(args, links, session, keeper(args.out / "links.json", session, line))
        if session.rank == 0:
            names = ("forward_ms", "forward_tflops", "both_ms", "both_tflops")
            shown = [[row["tokens_per_rank"], row["link"], *(f"{row[name]:.3f}" for name in names)] for row in rows]
            table(
                "links, causal zigzag", ["tokens per rank", "ring", *(name.replace("_", " ") for name in names)], shown
            )
        for link in links:
            link.ring.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
