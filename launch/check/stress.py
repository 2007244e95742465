"""Stress test of one ring: shapes, masks, heads and directions alternate without a pause, and every answer stays right.

All ranks draw the same sequence from one seed. A few calls are made like the layers of a model: forwards in order, then their
backwards in reverse. The host waits for the device only at the next check, after a random number of calls, so buffers and
semaphores of one call are in use when the next begins. Some calls are repeated with the same tensors, as in the steps of a
training, which makes the ring launch them as a graph.

Before the sequence every case is solved once with a pause and compared with the reference; a deterministic case must also
equal the simulated ring to the bit. In the sequence o, lse and deterministic gradients must have the bits of this calm
answer; other gradients must be inside the error budget. `check --soak N` runs it.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

import ringattn
from ringattn.launch.check import attention
from ringattn.launch.check.attention import Case, CheckArgs, Standard
from ringattn.launch.check.poison import poison_buffers
from ringattn.launch.common.session import Session

DELAY_MS = 20.0
"""The longest pause of a host with --delay."""
REPEATS = 5
"""Times that a call is repeated before the one whose answer is kept until the next check."""
MAX_RED = 20
"""Wrong answers after which the run stops."""


@dataclass(frozen=True)
class Prepared:
    """A case that was solved with a pause, `calm`: o, lse, dq, dk and dv of this rank; the case has one layout.

    Attributes:
        deterministic: Gradients repeat to the bit.
    """

    case: Case
    leaves: tuple[Tensor, ...]
    cotangents: list[Tensor]
    sharding: ringattn.Sharding
    calm: dict[str, Tensor]
    standard: Standard
    deterministic: bool


@dataclass
class Tally:
    """Counts and wrong answers of one rank.

    Attributes:
        equal_to_simulation: Cases whose calm answer was required to equal the simulated ring, and did.
        repeated: Forwards and backwards that the ring launched as one graph.
    """

    calls: int = 0
    backwards: int = 0
    checks: int = 0
    cases: int = 0
    equal_to_simulation: int = 0
    poisoned: int = 0
    repeated: int = 0
    red: list[str] = field(default_factory=list)
    prepare_s: float = 0.0
    seconds: float = 0.0


def soak_cases(world_size: int, device: str) -> Iterator[Case]:
    """Small problems of few kernels: one dtype and head dim, every layout, kinds of mask, head groups, odd lengths."""
    gpu = device == "cuda"
    dtype, d = ("bf16", 128) if gpu else ("fp32", 16)
    lengths = itertools.cycle((1021, 257, 128 * world_size, 1, 509, 1536) if gpu else (37, 64, 16 * world_size, 1, 23))
    groups = itertools.cycle(((4, 4), (8, 2), (4, 1), (6, 2), (8, 8)))
    moving = itertools.cycle(("auto", "keys", "queries"))
    names = ("causal", "full", "causal window", "documents", "prefix", "documents and window", "lengths", "band")
    for index, (name, layout) in enumerate(itertools.product(names, attention.LAYOUTS)):
        if (index + index // len(attention.LAYOUTS)) % 2:
            continue
        n, (heads, kv_heads) = next(lengths), next(groups)
        # the windows of the masks need a few tokens
        n = max(n, 8) if name != "causal" else n
        sizes = {"dtype": dtype, "heads": heads, "kv_heads": kv_heads, "head_dim": d, "v_head_dim": d}
        options = ("deterministic",) if index % 4 < 2 else ()
        yield attention.masked(name, n, backward=next(moving), options=options, layouts=(layout,), **sizes)


def attend(one: Prepared, args: CheckArgs) -> dict[str, Tensor]:
    """The forward of a case on this rank: o and lse."""
    options = attention.ring_options(one.case, args)
    o, lse = ringattn.ring_attention_with_lse(*one.leaves, one.sharding, **options)  # pyright: ignore[reportCallIssue]
    return {"o": o, "lse": lse}


def finish(one: Prepared, forward: dict[str, Tensor], backward: bool) -> dict[str, Tensor]:
    """The answer of a case on this rank, with the gradients if there is a backward."""
    found = {name: x.detach() for name, x in forward.items()}
    if backward:
        grads = torch.autograd.grad(list(forward.values()), one.leaves, one.cotangents)
        found |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
    return found


def prepare(case: Case, ring: ringattn.Ring, args: CheckArgs, session: Session, tally: Tally) -> Prepared:
    """Solve a case with a pause and compare the answer with the reference."""
    layout = case.layouts[0]
    inputs = attention.draw(case, args.seed, session.device)
    standard = attention.make_standard(case, inputs, args.seed)
    sharding = ring.sharding(case.seq_len, layout=layout, documents=case.documents)

    def local(name: str, x: Tensor) -> Tensor:
        return sharding.shard(x, dim=sharded_dim(name)).contiguous()

    leaves = tuple(local(name, inputs[name]).requires_grad_() for name in ("q", "k", "v"))
    cotangents = [local(name, inputs[name]) for name in ("do", "dlse")]
    repeats = attention.ring_options(case, args)["deterministic"]
    one = Prepared(case, leaves, cotangents, sharding, {}, standard, repeats)
    one.calm.update(finish(one, attend(one, args), True))
    for name, x in one.calm.items():
        if not (ratio := ratio_of(one, name, x)) <= 1:
            tally.red.append(f"{_title(case)}: calm {name} is {ratio:.3g} x its budget")
    if one.deterministic:
        place = ring.contexts(session.device)[0]
        gathers = place.transport.kv_gather() is not None and place.budget > 0
        budget = attention.LARGE_BUDGET if gathers else 0
        whole, _ = attention.solve_simulated(case, layout, place.world_size, inputs, args, budget)
        wrong = [name for name, x in one.calm.items() if not torch.equal(x, local(name, whole[name]))]
        tally.equal_to_simulation += not wrong
        if wrong:
            tally.red.append(f"{_title(case)}: {', '.join(wrong)} must have the bits of the simulated ring, got others")
    return one


def ratio_of(one: Prepared, name: str, x: Tensor) -> float:
    """The part of its budget that a whole tensor uses up. A collective."""
    exact, budget = one.standard[name]
    return budget.ratio(one.sharding.unshard(x, dim=sharded_dim(name)), exact)


def sharded_dim(name: str) -> int:
    """The dim of a tensor of which every rank has some rows."""
    dim = attention.sequence_dim(name)
    assert dim is not None, f"{name} is sharded"
    return dim


def _title(case: Case) -> str:
    flag = ", deterministic" if "deterministic" in case.options else ""
    return f"{case.name} ({case.dtype} {case.shape}, {case.layouts[0]}, {case.backward} move{flag})"


def soak(args: CheckArgs, session: Session) -> Tally:
    """Make `args.soak` calls on one ring; every rank keeps its own wrong answers."""
    ring, tally, began = attention.open_rings(session, args)[0][0], Tally(), time.perf_counter()
    ready = [
        prepare(case, ring, args, session, tally)
        for case in soak_cases(session.world_size, session.device.type)
        if args.only in case.name and attention.unserved(case, args, session.device) is None
    ]
    tally.cases = len(ready)
    session.barrier()
    tally.prepare_s = time.perf_counter() - began
    if ready:
        _run(args, session, ring, ready, tally)
        session.barrier()
        tally.seconds = time.perf_counter() - began - tally.prepare_s
    return tally


def _run(args: CheckArgs, session: Session, ring: ringattn.Ring, ready: Sequence[Prepared], tally: Tally) -> None:
    # every rank draws the same from the first; pauses differ by rank
    chooser, pauses = random.Random(args.seed), random.Random(args.seed + 7919 * (session.rank + 1))
    waiting: list[tuple[int, Prepared, dict[str, Tensor]]] = []
    same: list[tuple[str, Tensor]] = []
    until_check = chooser.randint(1, 24)

    def pause() -> None:
        if args.delay and pauses.random() < 0.5:
            time.sleep(pauses.uniform(0, DELAY_MS) / 1e3)

    while tally.calls < args.soak:
        layers = []
        for _ in range(chooser.choice((1, 1, 2, 3))):
            if tally.calls == args.soak:
                break
            one, backward = chooser.choice(ready), chooser.random() < 0.75
            pause()
            for _ in range(min(chooser.choice((0, 0, 0, REPEATS)), args.soak - tally.calls - 1)):
                # compared on the device at once, so that the allocator returns the same memory to the next
                found = finish(one, attend(one, args), backward)
                waiting.append((tally.calls, one, _compare_bits(tally.calls, one, found, same)))
                del found
                tally.calls += 1
                tally.backwards += backward
            layers.append((tally.calls, one, backward, attend(one, args)))
            tally.calls += 1
            if args.poison and chooser.random() < 0.3:
                poison_buffers(ring, session.device)
                tally.poisoned += 1
        for number, one, backward, forward in reversed(layers):
            if backward:
                pause()
                tally.backwards += 1
            waiting.append((number, one, finish(one, forward, backward)))
        if len(waiting) >= until_check:
            _compare(waiting, same, tally)
            waiting, same, until_check = [], [], chooser.randint(1, 24)
            # all ranks stop together
            if session.maximum([float(len(tally.red))])[0] >= MAX_RED:
                return
    _compare(waiting, same, tally)
    tally.repeated = ring.context.transport.graph_launches


def _compare_bits(
    number: int, one: Prepared, found: dict[str, Tensor], same: list[tuple[str, Tensor]]
) -> dict[str, Tensor]:
    """Compare bits on the device, into `same`; return the tensors that need to be inside the budget only."""
    rest = {}
    for name, x in found.items():
        if name in ("o", "lse") or one.deterministic:
            same.append((f"call {number}, {_title(one.case)}: {name}", (x == one.calm[name]).all()))
        else:
            rest[name] = x
    return rest


def _compare(
    waiting: Sequence[tuple[int, Prepared, dict[str, Tensor]]], same: list[tuple[str, Tensor]], tally: Tally
) -> None:
    tally.checks += 1
    for number, one, found in waiting:
        for name, x in _compare_bits(number, one, found, same).items():
            if not (ratio := ratio_of(one, name, x)) <= 1:
                tally.red.append(f"call {number}, {_title(one.case)}: {name} is {ratio:.3g} x its budget")
    if same:
        equal = torch.stack([verdict for _, verdict in same]).tolist()
        wrong = [where for (where, _), is_equal in zip(same, equal, strict=True) if not is_equal]
        tally.red += [f"{where} must have the bits of the calm answer, got others" for where in wrong]
