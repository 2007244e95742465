"""One ring, many calls: shapes, masks, heads and directions alternate without a pause, and every answer stays right.

Owns the bounded set of cases, the random sequence of calls, and what is said of a wrong one. Refuses to know how a ring
moves bytes, and how a case is solved and judged (`check`). `check --soak N` runs it.

Note [What is soaked]
    All ranks draw the same sequence from one seed. A few calls are made like the layers of a model: forwards in order, then
    the backwards of those that have one, in reverse. Nobody waits for the device until the next check, which comes after a
    random number of calls; so buffers, slots and flags of one call meet those of the next while they are in use.
    Some calls are made a few times with the same tensors, and their answers looked at on the device at once: their memory comes
    back, as in the steps of a training, and with it what a ring does for calls that come again.

Note [What is compared]
    Before the sequence every case is solved once, calmly, and held against the definition inside its error budget; a case that
    asks for deterministic gradients must also equal the simulated ring of the same schedule to the bit. In
    the sequence o and lse must have the bits of the calm answer, and so must the gradients of deterministic cases; others
    must stay inside the budget.
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
from ringattn.launch.check import attention as check
from ringattn.launch.check.attention import Case, CheckArgs, Standard
from ringattn.launch.check.poison import poison_buffers
from ringattn.launch.runtime.session import Session

DELAY_MS = 20.0
"""The longest pause of a host with --delay."""
AGAIN = 5
"""Times that a call comes before the one whose answer is kept until the next check, where it comes again."""
ENOUGH = 20
"""Wrong answers after which there is no point in going on."""


@dataclass(frozen=True)
class Prepared:
    """A case that was solved calmly.

    Attributes:
        case: The case; its only layout is the one to use.
        leaves: q, k and v of this rank, which require gradients.
        cotangents: do and dlse of this rank.
        sharding: Who holds which positions.
        calm: o, lse, dq, dk and dv of this rank.
        standard: The definition and budget of the whole tensors.
    """

    case: Case
    leaves: tuple[Tensor, Tensor, Tensor]
    cotangents: list[Tensor]
    sharding: ringattn.Sharding
    calm: dict[str, Tensor]
    standard: Standard

    @property
    def deterministic(self) -> bool:
        """Whether gradients repeat to the bit."""
        return "deterministic" in self.case.options


@dataclass
class Tally:
    """What a rank found.

    Attributes:
        calls: Forwards made.
        backwards: Those that had a backward.
        checks: Times it waited for the device.
        cases: Distinct cases.
        equal_to_simulation: Cases whose calm answer was required to equal the simulated ring, and did.
        poisoned: Times the ring's buffers were filled with NaN.
        repeated: Forwards and backwards that the ring launched as one graph, since they had come before with the same memory.
        red: What was wrong.
        prepare_s: Seconds until the first call of the sequence.
        seconds: Seconds of the sequence.
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
    for index, (name, layout) in enumerate(itertools.product(names, check.LAYOUTS)):
        if (index + index // len(check.LAYOUTS)) % 2:
            continue
        n, (heads, kv_heads) = next(lengths), next(groups)
        # window arithmetic of the masks wants some room
        n = max(n, 8) if name != "causal" else n
        yield check.masked(
            name,
            n,
            dtype=dtype,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=d,
            v_head_dim=d,
            backward=next(moving),
            options=("deterministic",) if index % 4 < 2 else (),
            layouts=(layout,),
        )


def attend(one: Prepared, impl: str) -> tuple[Tensor, Tensor]:
    """The forward of a case on this rank."""
    case = one.case
    return ringattn.ring_attention_with_lse(
        *one.leaves,
        one.sharding,
        **case.mask,
        backward=case.backward,
        deterministic=one.deterministic,
        impl=impl,
    )


def differentiate(one: Prepared, o: Tensor, lse: Tensor) -> dict[str, Tensor]:
    """The backward of a case on this rank."""
    grads = torch.autograd.grad([o, lse], one.leaves, one.cotangents)
    return dict(zip(("dq", "dk", "dv"), grads, strict=True))


def prepare(case: Case, ring: ringattn.Ring, args: CheckArgs, session: Session, tally: Tally) -> Prepared:
    """Solves a case calmly and judges the answer (Note [What is compared])."""
    layout = case.layouts[0]
    inputs = check.draw(case, args.seed, session.device)
    standard = check.make_standard(case, inputs, args.seed)
    sharding = ring.sharding(case.seq_len, layout=layout, documents=case.documents)

    def local(name: str, x: Tensor) -> Tensor:
        return sharding.shard(x, dim=check.SEQUENCE_DIM[name.removeprefix("d")]).contiguous()

    leaves = tuple(local(name, inputs[name]).requires_grad_() for name in ("q", "k", "v"))
    cotangents = [local(name, inputs[name]) for name in ("do", "dlse")]
    one = Prepared(case, leaves, cotangents, sharding, {}, standard)  # pyright: ignore[reportArgumentType]
    o, lse = attend(one, args.impl)
    one.calm.update({"o": o.detach(), "lse": lse.detach(), **differentiate(one, o, lse)})
    for name, x in one.calm.items():
        ratio = ratio_of(one, name, x)
        if not ratio <= 1:
            tally.red.append(f"{_title(case)}: calm {name} is {ratio:.3g} x its budget")
    if one.deterministic:
        gathers = ring.context.transport.kv_gather() is not None and ring.context.budget > 0
        budget = check.PLENTY if gathers else 0
        whole, _ = check.solve_simulated(case, layout, ring.world_size, inputs, args, budget)
        wrong = [name for name, x in one.calm.items() if not torch.equal(x, local(name, whole[name]))]
        tally.equal_to_simulation += not wrong
        if wrong:
            tally.red.append(f"{_title(case)}: {', '.join(wrong)} must have the bits of the simulated ring, got others")
    return one


def ratio_of(one: Prepared, name: str, x: Tensor) -> float:
    """The part of its budget that a tensor uses up, whole; all ranks ask together."""
    whole = one.sharding.unshard(x, dim=check.SEQUENCE_DIM[name.removeprefix("d")])
    exact, budget = one.standard[name]
    return budget.ratio(whole, exact)


def _title(case: Case) -> str:
    flag = ", deterministic" if "deterministic" in case.options else ""
    return f"{case.name} ({case.dtype} {case.shape}, {case.layouts[0]}, {case.backward} move{flag})"


def soak(args: CheckArgs, session: Session) -> Tally:
    """Makes `args.soak` calls on one ring; every rank finds its own reds."""
    ring, tally, began = check.open_ring(session, args), Tally(), time.perf_counter()
    cases = [
        case
        for case in soak_cases(session.world_size, session.device.type)
        if args.only in case.name and check.unserved(case, args, session.device) is None
    ]
    ready = [prepare(case, ring, args, session, tally) for case in cases]
    tally.cases = len(ready)
    session.barrier()
    tally.prepare_s = time.perf_counter() - began
    if ready:
        _run(args, session, ring, ready, tally)
        session.barrier()
        tally.seconds = time.perf_counter() - began - tally.prepare_s
    return tally


def _run(args: CheckArgs, session: Session, ring: ringattn.Ring, ready: Sequence[Prepared], tally: Tally) -> None:
    # the first is drawn from alike on every rank; pauses are each rank's own
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
            for _ in range(min(chooser.choice((0, 0, 0, AGAIN)), args.soak - tally.calls - 1)):
                o, lse = attend(one, args.impl)
                found = {"o": o.detach(), "lse": lse.detach()}
                if backward:
                    found |= differentiate(one, o, lse)
                waiting.append((tally.calls, one, _look(tally.calls, one, found, same)))
                del o, lse, found
                tally.calls += 1
                tally.backwards += backward
            o, lse = attend(one, args.impl)
            layers.append((tally.calls, one, backward, o, lse))
            tally.calls += 1
            if args.poison and chooser.random() < 0.3:
                poison_buffers(ring)
                tally.poisoned += 1
        for number, one, backward, o, lse in reversed(layers):
            found = {"o": o.detach(), "lse": lse.detach()}
            if backward:
                pause()
                found |= differentiate(one, o, lse)
                tally.backwards += 1
            waiting.append((number, one, found))
        if len(waiting) >= until_check:
            _compare(waiting, same, tally)
            waiting, same, until_check = [], [], chooser.randint(1, 24)
            # all ranks stop together
            if session.maximum([float(len(tally.red))])[0] >= ENOUGH:
                return
    _compare(waiting, same, tally)
    tally.repeated = ring.context.transport.graph_launches


def _look(number: int, one: Prepared, found: dict[str, Tensor], same: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Compares bits on the device, into `same`; returns what must be inside the budget instead."""
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
        for name, x in _look(number, one, found, same).items():
            if not (ratio := ratio_of(one, name, x)) <= 1:
                tally.red.append(f"call {number}, {_title(one.case)}: {name} is {ratio:.3g} x its budget")
    if same:
        verdicts = torch.stack([verdict for _, verdict in same]).tolist()
        tally.red += [
            f"{where} must have the bits of the calm answer, got others"
            for (where, _), verdict in zip(same, verdicts, strict=True)
            if not verdict
        ]
