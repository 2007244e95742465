"""What a ring launches from its third call on, without asking any launcher, is what launchers launch."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ringattn.kernels import homes_triton, launch_triton, pack_triton, record_triton
from ringattn.kernels.contract import Lease, Reels
from ringattn.kernels.hopper import api as hopper
from ringattn.plan import device_tables
from ringattn.plan.attention_spec import AttentionSpec, serialize
from ringattn.plan.layouts import make_shards
from ringattn.plan.sharding import Sharding
from ringattn.schedule import fused
from ringattn.transport import copy_engine, repeats
from ringattn.transport.base import Seat
from ringattn.transport.copy_engine import CopyEngineTransport
from ringattn.transport.streams import Op
from ringattn.transport.symmetric import Region

ADDRESS = 2**24
"""Integers of launches from here on are addresses: strides and sizes are smaller here."""

Launch = tuple[str, tuple[int, ...], list[Any]]


class Idle:
    """Streams of a device that does nothing. A graph is the launches in it.

    Attributes:
        seen: What is launched.
        recorded: Graphs that were made.
    """

    side, herald = 2, 3
    seen: list[Launch]

    def __init__(self) -> None:
        self.recorded = 0
        self._recording = False

    def main(self) -> int:
        return 1

    def capturing(self) -> bool:
        return self._recording

    def compile(self, ops: Sequence[Op]) -> list[Op]:
        return list(ops)

    def launch(self, program: list[Op] | tuple[Launch, ...], lane: int) -> None:
        if isinstance(program, tuple):
            self.seen += program

    def copy(self, target: int, source: int, num_bytes: int, lane: int) -> None:
        pass

    def order(self, first: int, then: int) -> None:
        pass

    def call(self, work: Callable[[], object]) -> None:
        work()

    def record(self, work: Callable[[], object]) -> tuple[Launch, ...]:
        before, self._recording = len(self.seen), True
        work()
        self._recording = False
        self.recorded += 1
        graph = tuple(self.seen[before:])
        del self.seen[before:]
        return graph

    def rescue(self, ops: Sequence[Op]) -> None:
        pass

    def fill(self, address: int, num_bytes: int) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Alone:
    """Memory of one rank whose peers nobody looks at."""

    device = torch.device("cpu")

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def region(self, num_bytes: int, what: str) -> Region:
        del what
        local = torch.zeros(num_bytes, dtype=torch.uint8)
        return Region(local, (local.data_ptr(),) * self.ranks)

    def meet(self, what: str) -> None:
        pass

    def host_words(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """What launchers hand to the driver: kernel, grid and arguments. Nothing runs."""
    seen: list[Launch] = []

    def launch(kernel: Any, grid: Any, args: Any, constants: dict[str, Any], **options: int) -> launch_triton.Bound:
        def run(x: int, y: int, z: int, stream: int, *flat: Any) -> None:
            assert stream == 1
            seen.append((kernel.fn.__name__, (x, y, z), list(flat)))

        bound = launch_triton.Bound(None, (*constants.values(), *options.values()), run=run)
        # a call that is recorded launches as well
        flat, number = list[Any](), 0
        for x in args:
            if hasattr(x, "template"):
                flat += bound.encoding(number, x.template, x.base.data_ptr())
                number += 1
            elif isinstance(x, tuple):
                flat.append(tuple(part.data_ptr() for part in x))
            else:
                flat.append(x.data_ptr() if isinstance(x, Tensor) else x)
        run(*(*grid, 1, 1)[:3], 1, *flat, *bound.tail)
        return bound

    def encode(bound: launch_triton.Bound, number: int, descriptor: Any) -> list[Any]:
        del bound
        shape, strides, block = (tuple(getattr(descriptor, name)) for name in ("shape", "strides", "block_shape"))
        return [descriptor.base.data_ptr(), number, shape, strides, block]

    held: list[Any] = []

    def holding(make: Callable[..., Any]) -> Callable[..., Any]:
        """Nothing is freed, or an address would be two tensors."""
        return lambda *args, **kwargs: (held.append(make(*args, **kwargs)), held[-1])[1]

    active = SimpleNamespace(get_current_stream=lambda _: 1)
    for name in ("empty", "empty_like", "clone"):
        monkeypatch.setattr(torch, name, holding(getattr(torch, name)))
    monkeypatch.setattr(Tensor, "clone", holding(Tensor.clone))
    monkeypatch.setattr(Idle, "seen", seen, raising=False)
    monkeypatch.setattr(launch_triton, "launch", launch)
    monkeypatch.setattr(launch_triton.Bound, "encode", encode)
    monkeypatch.setattr(record_triton, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(copy_engine, "pack", pack_triton.pack)
    monkeypatch.setattr(hopper, "plain_homes", homes_triton)
    record_triton.forget()
    yield seen
    held.clear()
    record_triton.forget()


@dataclasses.dataclass(frozen=True)
class Case:
    """One kind of call on rank 1 of 3."""

    heads: int = 4
    kv_heads: int = 2
    dims: tuple[int, int] = (64, 64)
    mask: dict[str, Any] = dataclasses.field(default_factory=lambda: {"causal": True})
    documents: tuple[int, ...] | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    features: tuple[str, ...] = ()
    keep: bool = False
    odd: bool = False
    """Rows that the bulk copy engine cannot address, so that they are copied first."""
    scale: float = 0.125

    n = 3 * 160


CASES = {
    "causal": Case(),
    "one head per key head": Case(kv_heads=4, dims=(128, 128)),
    "many heads, in groups": Case(heads=64, kv_heads=16, dims=(128, 128)),
    "wide": Case(dims=(256, 256)),
    "two widths": Case(dims=(64, 128)),
    "deterministic": Case(options={"deterministic": True}),
    "soft cap": Case(options={"softcap": 20.0}),
    "sinks": Case(features=("sinks",)),
    "slopes": Case(features=("alibi_slopes",)),
    "bias of keys": Case(features=("key_bias",)),
    "everything": Case(features=("sinks", "alibi_slopes", "key_bias"), options={"softcap": 9.0, "deterministic": True}),
    "window": Case(mask={"causal": True, "window": 50}),
    "documents": Case(documents=(0, 7, 300, 480)),
    "kept keys": Case(keep=True),
    "copied first": Case(odd=True),
}


class Ring:
    """Rank 1 of a ring whose other ranks are not there."""

    def __init__(self, case: Case, ranks: int = 3) -> None:
        self.case = case
        shards = make_shards("zigzag", case.n, ranks)
        sharding = Sharding(case.n, "zigzag", shards, 1, case.documents)
        self.call = AttentionSpec.deserialize(
            serialize(sharding, softmax_scale=case.scale, **case.mask, **case.options), 1
        )
        self.transport = CopyEngineTransport(1, range(ranks), "ring", Idle(), Alone(ranks), 10.0, watched=False)
        self.seat = Seat(1, ranks, self.transport, budget=2**40)

    def inputs(self) -> dict[str, Tensor]:
        """Those of one call; every call has its own."""
        case = self.case
        d, dv = case.dims
        sizes = {"q": (case.heads, d), "k": (case.kv_heads, d), "v": (case.kv_heads, dv), "do": (case.heads, dv)}
        found = {
            name: torch.zeros(1, case.n // 3, h, w + case.odd, dtype=torch.bfloat16)[..., :w]
            for name, (h, w) in sizes.items()
        }
        more = {"sinks": (case.heads,), "alibi_slopes": (case.heads,), "key_bias": (1, case.n // 3)}
        return found | {name: torch.zeros(more[name]) for name in case.features}

    def both(self, inputs: dict[str, Tensor]) -> list[Tensor]:
        """A forward and a backward; what they give."""
        q, k, v, do = (inputs[name] for name in ("q", "k", "v", "do"))
        extras = {name: inputs[name] for name in self.case.features}
        score = self.call.score(q.dtype, 0, **extras)
        kernels: Any = hopper
        here = score, self.call, kernels, self.seat
        o, lse, kept = fused.forward(q, k, v, *here, keep=self.case.keep)
        assert (kept is not None) == self.case.keep
        wanted = {"want_alibi": "alibi_slopes" in extras, "want_key_bias": "key_bias" in extras}
        grads = fused.backward(do, None, q, k, v, o, lse, *here, kept=kept, **wanted)
        return [o, lse, grads.dq, grads.dk, grads.dv]


def named(launches: list[Launch], results: list[Tensor]) -> tuple[list[Any], list[int]]:
    """Launches with a number in place of each address, in the order in which they first appear, and the addresses.

    Results come first: a launch that writes elsewhere has other numbers.
    """
    numbers = {x.data_ptr(): i for i, x in enumerate(results)}

    def name(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(name, x))
        if isinstance(x, int) and x >= ADDRESS:
            return "address", numbers.setdefault(x, len(numbers))
        return x

    return [(kernel, grid, [name(x) for x in flat]) for kernel, grid, flat in launches], list(numbers)


def ranges(ring: Ring, inputs: list[dict[str, Tensor]]) -> list[tuple[int, int]]:
    """Where memory lies that a call is given or its ring holds."""
    transport = ring.transport
    tensors = [x for one in inputs for x in one.values()]
    tensors += [transport._control.local, transport._slot, transport._flags, transport._own, transport._error]
    tensors += [station.region.local for station in transport._stations()]
    storages = [x.untyped_storage() for x in tensors]
    return [(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages]


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_calls_are_played_back_with_their_own_addresses(
    launches: list[Launch], monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    ring = Ring(case)
    inputs = [ring.inputs() for _ in range(6)]
    looked: list[object] = []
    look = record_triton._Call.look
    monkeypatch.setattr(record_triton._Call, "look", lambda call, values: (looked.append(call), look(call, values))[1])

    def run(one: dict[str, Tensor]) -> tuple[list[Any], list[int]]:
        launches.clear()
        looked.clear()
        results = ring.both(one)
        return named(launches, results)

    def run_all() -> list[tuple[list[Any], list[int]]]:
        return [run(one) for one in inputs]

    with monkeypatch.context() as plain:
        plain.setattr(hopper, "replay", None)
        run_all()  # the first calls of a kind compile and record
        expected = run_all()
        assert looked
    heard, found = run_all(), run_all()
    assert bool(looked) == ("key_bias" in case.features), "launchers were asked"
    held = ranges(ring, inputs)
    for (launched, addresses), (wanted, others) in zip(heard + found, expected * 2, strict=True):
        assert launched == wanted
        assert len(launched) >= 4
        for x, y in zip(addresses, others, strict=True):
            # what is not made for the call is at its place
            assert x == y or not any(start <= z < end for z in (x, y) for start, end in held)


@pytest.mark.parametrize("seed", range(4))
def test_calls_of_many_kinds_on_one_ring(launches: list[Launch], monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    draw, replay = random.Random(seed), hopper.replay
    rings = [Ring(case) for case in draw.sample(list(CASES.values()), 5)]
    for ring in rings:
        ring.transport, ring.seat = rings[0].transport, rings[0].seat

    def run(ring: Ring, one: dict[str, Tensor], *, played: bool) -> tuple[list[Any], list[int]]:
        monkeypatch.setattr(hopper, "replay", replay if played else None)
        launches.clear()
        return named(launches, ring.both(one))

    for ring in rings:  # kernels are compiled, and memory has grown
        run(ring, ring.inputs(), played=False)
    for _ in range(30):
        before, ring = draw.choices(rings, k=2)
        others, one = before.inputs(), ring.inputs()
        for _ in range(draw.choice((0, 0, 1, 2))):
            run(ring, ring.inputs(), played=True)
        if draw.random() < 0.1:
            device_tables.clear()
        runs = []
        for played in (False, False, True, True):  # each of both twice: homecomings take turns
            run(before, others, played=played)
            runs.append(run(ring, one, played=played))
        expected, found = runs[1], runs[3]
        assert found[0] == expected[0]
        for x, y in zip(found[1], expected[1], strict=True):
            assert x == y or not any(start <= z < end for z in (x, y) for start, end in ranges(ring, [one]))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: torch.zeros(1, 160, 4, 128, dtype=torch.bfloat16)[..., :64],
        lambda x: torch.zeros(1, 4, 160, 64, dtype=torch.bfloat16).transpose(1, 2),
        lambda x: torch.zeros(160 * 4 * 64 + 4, dtype=torch.bfloat16)[4:].view(1, 160, 4, 64),
    ],
    ids=["strides", "order", "alignment"],
)
def test_another_kind_of_tensor_is_another_call(launches: list[Launch], change: Callable[[Tensor], Tensor]) -> None:
    ring = Ring(Case())
    for _ in range(4):
        ring.both(ring.inputs())
    one = ring.inputs()
    one["q"] = change(one["q"])
    results = []
    for again in range(4):
        launches.clear()
        made = ring.both(one)
        if again > 1:
            results.append((made, named(list(launches), made)[0]))
    record_triton.forget()
    fresh = Ring(Case())
    for _ in range(4):
        launches.clear()
        results.append((made := fresh.both(one), named(list(launches), made)[0]))
    assert results[0][1] == results[1][1] == results[-1][1]


def test_one_tensor_in_two_places_is_not_mistaken(launches: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring(Case(kv_heads=4, dims=(64, 64)))
    for _ in range(6):
        ring.both(ring.inputs())
    one = ring.inputs()
    one["k"] = one["v"] = one["q"]
    found = []
    for _ in range(4):
        launches.clear()
        found.append((made := ring.both(one), named(list(launches), made)[0]))
    with monkeypatch.context() as plain:
        plain.setattr(hopper, "replay", None)
        for _ in range(2):
            launches.clear()
            found.append((made := ring.both(one), named(list(launches), made)[0]))
    assert len(found[-1][1]) > 4
    assert all(launched == found[-1][1] for _, launched in found[2:])


def test_reels_go_with_the_ring_at_once(launches: list[Launch]) -> None:
    ring = Ring(Case())
    for _ in range(6):
        ring.both(ring.inputs())
    reels = [weakref.ref(x) for x in reels_of(ring)]
    assert len(reels) == 3
    gc.collect()
    gc.disable()
    try:
        ring.transport._let_go()
        assert not any(one() for one in reels), "memory would wait for a collection"
    finally:
        gc.enable()


def reels_of(ring: Ring) -> list[Reels]:
    """Of its gather, and of the two homecomings that take turns."""
    programs = [
        one for made in ring.transport._courses.values() for one in (made if isinstance(made, tuple) else [made])
    ]
    return [one.reels for one in programs if one.reels]


def test_reels_go_with_their_tables(launches: list[Launch]) -> None:
    ring = Ring(Case())
    for _ in range(6):
        ring.both(ring.inputs())
    reels = reels_of(ring)
    assert min(map(len, reels)) == 2, "packing and forward; backward and sum, twice"
    device_tables.clear()
    gc.collect()
    assert sorted(map(len, reels)) == [1, 1, 1], "what reads no side stays"
    for _ in range(2):
        ring.both(ring.inputs())
    assert min(map(len, reels)) == 2


@record_triton.recorded
def with_rooms(tape: record_triton.Tape, x: Tensor, size: int) -> None:
    """A launcher of one tensor, with two rooms."""
    kernel: Any = SimpleNamespace(fn=with_rooms)
    tape.launch(kernel, (1,), (x, tape.room(size), tape.room(2 * size), size), {}, num_warps=4)


def of_two(x: Tensor, y: Tensor) -> None:
    with_rooms(x, 100)
    with_rooms(y, 300)


def test_rooms_of_two_launchers_are_apart(launches: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    reels, x, y = Reels(), torch.zeros(8), torch.zeros(8)
    made, empty = list[Tensor](), torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: (made.append(empty(*args, **kwargs)), made[-1])[1])
    for _ in range(3):
        launches.clear()
        record_triton.replay(reels, (), lambda: of_two(x, y), given=(x, y))
    assert [flat[0] for _, _, flat in launches] == [x.data_ptr(), y.data_ptr()]
    rooms = [(flat[i], flat[i] + 4 * i * flat[3]) for _, _, flat in launches for i in (1, 2)]
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(sorted(rooms)))
    begin = made[-1].data_ptr()
    assert all(begin <= start and end <= begin + made[-1].nbytes for start, end in rooms)


@record_triton.recorded
def with_parts(
    tape: record_triton.Tape,
    x: Tensor,
    first: tuple[Tensor, ...],
    second: tuple[Tensor, ...] = (),
    *,
    a: int = 0,
    b: int = 0,
) -> None:
    """A launcher of tuples, and of numbers by name."""
    kernel: Any = SimpleNamespace(fn=with_parts)
    tape.launch(kernel, (1,), (x, first, *((second,) if second else ()), a, b), {}, num_warps=4)


def test_calls_that_are_put_together_otherwise_are_other_calls(launches: list[Launch]) -> None:
    x, y, z, w = (torch.zeros(8) for _ in range(4))
    for _ in range(2):
        for first, second, options in (
            ((y, z), (w,), {}),
            ((y,), (z, w), {}),
            ((y,), (z,), {"a": 1}),
            ((y,), (z,), {"b": 1}),
        ):
            launches.clear()
            with_parts(x, first, second, **options)
            expected = [x.data_ptr(), *(tuple(one.data_ptr() for one in group) for group in (first, second))]
            assert launches[0][2][:5] == [*expected, options.get("a", 0), options.get("b", 0)]


def test_a_tuple_may_hold_what_changes_beside_what_does_not(launches: list[Launch]) -> None:
    reels, kept = Reels(), torch.zeros(8)
    for _ in range(4):
        x, y = torch.zeros(8), torch.zeros(8)
        launches.clear()
        record_triton.replay(reels, (), lambda x=x, y=y: with_parts(x, (y, kept)), given=(x, y), kept=(kept,))
        assert launches[0][2][:2] == [x.data_ptr(), (y.data_ptr(), kept.data_ptr())]
    assert len(reels) == 1


class Held:
    """What launchers compare by identity."""


BASE, HELD = torch.zeros(8), Held()


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.zeros(8).half()},
        {"x": torch.zeros(9)},
        {"x": torch.zeros(16)[::2]},
        {"x": torch.zeros(9)[1:]},
        {"key": (1,)},
        {"kept": (torch.zeros(1),)},
        {"held": (Held(),)},
    ],
    ids=["dtype", "shape", "strides", "alignment", "key", "kept", "held"],
)
def test_a_reel_is_played_for_what_it_was_made_of(launches: list[Launch], change: dict[str, Any]) -> None:
    reels, asked = Reels(), list[Tensor]()
    usual = {"x": BASE, "key": (0,), "kept": (torch.zeros(1),), "held": (HELD,)}

    def run(x: Tensor, key: tuple[int, ...], **others: Any) -> None:
        record_triton.replay(reels, key, lambda: (asked.append(x), with_rooms(x, 100)), given=(x,), **others)

    for arguments in (usual, usual, usual | change, usual, usual | change):
        run(**arguments)
    assert len(asked) == 2


def test_a_call_on_another_device_is_another_call(launches: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(8)
    monkeypatch.setattr(record_triton, "_on", lambda _: contextlib.nullcontext())
    record_triton.forget()
    for index in (0, 0, 1, 1):
        monkeypatch.setattr(Tensor, "get_device", lambda _, index=index: index)
        with_rooms(x, 100)
    assert sum(map(len, record_triton._records)) == 2


def test_a_call_that_no_tape_holds_is_never_played_back(launches: list[Launch]) -> None:
    reels, x, y = Reels(), torch.zeros(8), torch.zeros(8)

    def run() -> None:
        with_parts(x, (x,))
        with_rooms(y, 100)

    for _ in range(3):
        launches.clear()
        record_triton.replay(reels, (), run, given=(x, y))
        assert [kernel for kernel, _, _ in launches] == ["with_parts", "with_rooms"]
    assert not reels


def test_what_is_kept_is_bounded(launches: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_triton, "REELS", 3)
    monkeypatch.setattr(record_triton, "CAPACITY", 2)
    record_triton.forget()
    reels, x = Reels(), torch.zeros(8)
    for size in range(1, 9):
        record_triton.replay(reels, (size,), lambda size=size: with_rooms(x, size), given=(x,))
        assert 1 <= len(reels) <= 3
        assert 1 <= sum(map(len, record_triton._records)) <= 2


def test_a_tensor_that_two_launchers_are_given_is_not_taken_for_two(launches: list[Launch]) -> None:
    reels, x, y = Reels(), torch.zeros(8), torch.zeros(8)
    for one, other in ((x, x), (x, y), (y, x), (x, y)):
        launches.clear()
        record_triton.replay(reels, (), lambda one=one, other=other: of_two(one, other), given=(one, other))
        assert [flat[0] for _, _, flat in launches] == [one.data_ptr(), other.data_ptr()]


def test_a_tensor_that_is_not_named_is_never_played_back(launches: list[Launch]) -> None:
    reels, slot = Reels(), torch.zeros(1, 8, 2, 16)
    k, v = torch.zeros(2, 1, 8, 2, 8).unbind()
    for kept in ((), (slot,)):
        for _ in range(3):
            record_triton.replay(reels, ("pack",), lambda: pack_triton.pack(slot, k, v), given=(k, v), kept=kept)
        assert len(reels) == len(kept)


def test_a_failed_call_leaves_nobody_listening(launches: list[Launch]) -> None:
    def fail() -> None:
        raise ValueError("refused")

    reels = Reels()
    with pytest.raises(ValueError, match="refused"):
        record_triton.replay(reels, (), fail, given=(torch.zeros(1),))
    assert record_triton._ear.heard is None
    assert not reels


def test_a_profiler_that_hears_of_launches_hears_of_these(
    launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    reels, slot = Reels(), torch.zeros(1, 8, 2, 16)
    k, v = torch.zeros(2, 1, 8, 2, 8).unbind()
    publicly: list[Any] = []

    def pack() -> None:
        record_triton.replay(reels, ("pack",), lambda: pack_triton.pack(slot, k, v), given=(k, v), kept=(slot,))

    pack()
    pack()
    assert len(launches) == 2
    monkeypatch.setattr(launch_triton, "is_hooked", lambda: True)
    monkeypatch.setattr(launch_triton, "launch", lambda kernel, grid, args, *_, **__: publicly.append(args))
    pack()
    assert len(launches) == 2
    assert all(x is y for x, y in zip(publicly[0], (slot, k, v), strict=False))


@pytest.mark.parametrize("why", ["a profiler hears of launches", "only the public way is known"])
def test_one_call_goes_the_public_way_where_it_must(
    launches: list[Launch], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    x, publicly = torch.zeros(8), list[Any]()
    bound = launch_triton.Bound(None, ())
    if why.startswith("only"):
        monkeypatch.setattr(
            launch_triton, "launch", lambda kernel, grid, args, *_, **__: (publicly.append(args), bound)[1]
        )
    with_rooms(x, 100)
    if not why.startswith("only"):
        monkeypatch.setattr(launch_triton, "is_hooked", lambda: True)
        monkeypatch.setattr(launch_triton, "launch", lambda kernel, grid, args, *_, **__: publicly.append(args))
    publicly.clear()
    for _ in range(2):
        with_rooms(x, 100)
    assert [args[0] is x and args[3] == 100 for args in publicly] == [True, True]


@pytest.fixture
def steady(launches: list[Launch], monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """An allocator that gives each call the memory of the one before; what begins a call. Rooms of launches are new each time."""
    pool: dict[Any, list[Tensor]] = {}
    taken: dict[Any, int] = {}

    def pooling(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            x = make(*args, **kwargs)
            if x.dtype == torch.uint8:
                return x
            key = x.shape, x.stride(), x.dtype
            found, number = pool.setdefault(key, []), taken.get(key, 0)
            taken[key] = number + 1
            if number == len(found):
                found.append(x)
            return found[number]

        return made

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, pooling(getattr(torch, name)))
    return taken.clear


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_graph_launches_what_its_call_did(
    launches: list[Launch], steady: Callable[[], None], monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    ring = Ring(case)
    inputs = ring.inputs()

    def run() -> tuple[list[Any], list[int]]:
        launches.clear()
        steady()
        return named(launches, ring.both(inputs))

    with monkeypatch.context() as plain:
        plain.setattr(hopper, "leased", None)
        for _ in range(4):
            run()
        expected = [run(), run()]
    streams: Any = ring.transport.streams
    assert not streams.recorded
    found = [run() for _ in range(8)]
    # keys that are kept have memory of their own each time, a bias and rows that are copied go through torch
    pieces = case.keep or case.odd or "key_bias" in case.features
    assert streams.recorded == (0 if pieces else 3), "one of the forward, one of the backward for each turn"
    held = ranges(ring, [inputs])
    for i, (launched, addresses) in enumerate(found):
        wanted, others = expected[i % 2]
        assert launched == wanted
        for x, y in zip(addresses, others, strict=True):
            assert x == y or not any(start <= z < end for z in (x, y) for start, end in held)
    if not pieces:
        assert found[4:6] == found[6:8], "also rooms are where they were"


def test_what_graphs_read_lives_as_long_as_they_do(launches: list[Launch], steady: Callable[[], None]) -> None:
    ring = Ring(Case())
    inputs = ring.inputs()
    for _ in range(6):
        steady()
        ring.both(inputs)
    sides = weakref.ref(ring.call.stationary("keys", inputs["q"].device))
    device_tables.clear()
    ring.call._keys.clear()
    gc.disable()
    try:
        assert sides() is not None
        del ring
        assert sides() is None
    finally:
        gc.enable()


def test_who_hears_of_launches_hears_of_all(
    launches: list[Launch], steady: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = Ring(Case())
    inputs, asked = ring.inputs(), list[int]()
    forward = hopper.forward_gathered
    monkeypatch.setattr(hopper, "replay", None)
    monkeypatch.setattr(hopper, "forward_gathered", lambda *args, **kwargs: (asked.append(1), forward(*args, **kwargs)))
    for heard, expected in ((False, 4), (True, 4), (False, 0)):  # the first call makes memory
        monkeypatch.setattr(hopper, "is_heard", lambda heard=heard: heard)
        asked.clear()
        for _ in range(4):
            steady()
            ring.both(inputs)
        assert len(asked) == expected


@pytest.mark.parametrize("long", [False, True])
def test_only_brief_calls_become_graphs(
    launches: list[Launch], steady: Callable[[], None], monkeypatch: pytest.MonkeyPatch, long: bool
) -> None:
    monkeypatch.setattr(fused, "BRIEF", 0.0 if long else 1.0)
    ring = Ring(Case())
    inputs = ring.inputs()
    for _ in range(6):
        steady()
        ring.both(inputs)
    streams: Any = ring.transport.streams
    assert streams.recorded == (0 if long else 3)


@pytest.mark.parametrize("change", ["call", "strides", "slopes", "presence"])
def test_another_call_over_the_same_memory_is_another_graph(
    launches: list[Launch], steady: Callable[[], None], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """What a key leaves out would be launched as it was."""
    case = Case(kv_heads=4, features=("alibi_slopes",))
    differs = {"call": {"scale": 0.25}, "presence": {"features": ("sinks",)}}.get(change, {})
    first, other = Ring(case), Ring(dataclasses.replace(case, **differs))
    other.transport, other.seat = first.transport, first.seat
    mine = first.inputs()
    theirs = dict(mine)
    if change == "strides":
        b, t, h, d = mine["q"].shape
        theirs["q"] = mine["q"].view(b, h, t, d).transpose(1, 2)
    elif change == "slopes":
        theirs["alibi_slopes"] = torch.ones(4)
    elif change == "presence":
        theirs["sinks"] = theirs.pop("alibi_slopes")

    def run(ring: Ring, inputs: dict[str, Tensor]) -> list[Launch]:
        launches.clear()
        steady()
        ring.both(inputs)
        return list(launches)

    with monkeypatch.context() as plain:
        plain.setattr(hopper, "leased", None)
        for _ in range(4):
            run(first, mine)
            run(other, theirs)
        expected = [named(run(*one), [])[0] for one in ((first, mine), (other, theirs))]
    for _ in range(5):
        assert [named(run(*one), [])[0] for one in ((first, mine), (other, theirs))] == expected
    streams: Any = first.transport.streams
    assert streams.recorded == 4  # backwards that take turns have the same turn each time


def test_a_room_that_is_outgrown_stays_where_graphs_know_it(launches: list[Launch]) -> None:
    lease, device = Lease(), torch.device("cpu")
    lease.begin()
    first, second = lease.room(100, device), lease.room(10, device)
    lease.begin()
    assert lease.room(100, device) is first
    assert lease.room(10, device) is second
    lease.begin()
    big = lease.room(101, device)
    assert big.numel() == 150
    assert first.data_ptr() != big.data_ptr()
    assert [id(x) for x in lease.rooms] == [id(first), id(second), id(big)]
    lease.begin()
    assert lease.room(1, device) is big


def test_graphs_keep_tables_rooms_and_records(launches: list[Launch], steady: Callable[[], None]) -> None:
    """Whoever forgets them elsewhere does not take them from a graph."""
    ring = Ring(Case(heads=8, kv_heads=8, dims=(128, 128)))
    inputs, device = ring.inputs(), torch.device("cpu")
    for _ in range(6):
        launches.clear()
        steady()
        ring.both(inputs)
    rooms = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in ring.transport._repeats.lease.rooms]
    addresses = {x for _, _, flat in launches for x in flat if isinstance(x, int) and x >= ADDRESS}
    assert any(start <= x < end for start, end in rooms for x in addresses), "launches use rooms that stay"
    call = ring.call
    tables_of = call.stationary("keys", device), call.gathered(device), call.returning(device)
    assert ring.transport._repeats.lease.held == []
    held = [kept for one in ring.transport._repeats._known.values() for _, kept in one.graphs.values()]
    assert len(held) == 3
    for several in held:
        flat = [x for part in several for x in (part if isinstance(part, tuple) else (part,))]
        assert all(any(x is table for x in flat) for table in tables_of[:2])
        assert any(isinstance(x, record_triton.Tape | record_triton.Reel) for x in flat)
    returning = [
        any(x is tables_of[2] for part in several if isinstance(part, tuple) for x in part) for several in held
    ]
    assert sorted(returning) == [False, True, True]


def test_a_lease_says_what_cannot_be_repeated(launches: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, lease = torch.zeros(8), torch.zeros(8), Lease()

    @record_triton.recorded
    def makes(tape: record_triton.Tape, x: Tensor, *, anew: bool) -> None:
        tape.call(torch.clone if anew else Tensor.zero_, x)

    def whole(call: Callable[[], None]) -> bool:
        lease.begin()
        with record_triton.leased(lease):
            call()
        lease.end()
        return lease.whole

    for _ in range(2):  # as a launcher runs, and as its tape is played
        assert whole(lambda: makes(x, anew=False))
        assert not whole(lambda: makes(x, anew=True))
        assert whole(lambda: of_two(x, y))
        assert not whole(lambda: with_parts(x, (x,))), "a tape does not know which of the two a hole is for"
    monkeypatch.setattr(launch_triton, "is_hooked", lambda: True)
    lease.begin()
    with record_triton.leased(lease):
        makes(x, anew=False)
    assert not lease.whole, "launches that somebody hears of go another way"


def test_a_lease_keeps_what_a_launcher_has_made(launches: list[Launch]) -> None:
    lease, x = Lease(), torch.zeros(8)
    lease.begin()
    with record_triton.leased(lease):
        with_rooms(x, 100)
    held = lease.end()
    assert any(isinstance(one, record_triton.Tape) for one in held)
    rooms = [one for one in held if isinstance(one, Tensor)]
    (_, _, flat), *_ = launches
    assert {flat[1], flat[2]} == {room.data_ptr() for room in rooms}


def test_calls_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "REPEATS", 3)
    known, x = repeats.Repeats(), torch.zeros(1)
    first, second = (known.find((i,), (x,), (), ()) for i in range(2))
    assert known.find((0,), (x,), (), ()) is first
    for i in range(2, 4):
        known.find((i,), (x,), (), ())
    assert known.find((0,), (x,), (), ()) is first, "the one that was used last stays"
    assert known.find((1,), (x,), (), ()) is not second


def test_a_profiler_sees_a_graph_under_the_name_of_its_call(launches: list[Launch], steady: Callable[[], None]) -> None:
    ring = Ring(Case())
    inputs = ring.inputs()
    for _ in range(6):
        steady()
        ring.both(inputs)
    before = ring.transport.repeated
    with torch.profiler.profile() as found:
        steady()
        ring.both(inputs)
    assert ring.transport.repeated == before + 2
    names = [event.name for event in found.events() or ()]
    for way in ("forward", "backward"):
        assert names.count(f"ring {way}: all visits in one launch") == 1
