"""A graph of a call that comes again launches what the call itself would launch."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ringattn.kernels.attention.hopper.api import HopperKernels
from ringattn.kernels.comm import grad_reduce_triton
from ringattn.kernels.kv import pack_triton
from ringattn.kernels.runtime import bound_launch, table_cache
from ringattn.kernels.runtime.table_cache import find
from ringattn.plan.attention_spec import AttentionSpec, ScoreTensors, serialize
from ringattn.plan.layouts import make_shards
from ringattn.plan.sharding import Sharding
from ringattn.schedule import execution_plan, fused
from ringattn.schedule.execution_plan import BackwardCall, ExecutionPlan, ForwardCall, WantedGrads, make_execution_plan
from ringattn.schedule.fused import fused_backward, fused_forward
from ringattn.transport.base import RingContext
from ringattn.transport.copy_engine import graph_cache
from ringattn.transport.copy_engine import transport as copy_engine
from ringattn.transport.copy_engine.kv_gather import GatherPrograms
from ringattn.transport.copy_engine.streams import Op
from ringattn.transport.copy_engine.symmetric_memory import Region
from ringattn.transport.copy_engine.transport import CopyEngineTransport

ADDRESS = 2**24
"""Integers of launches from here on are addresses: strides and sizes are smaller here."""

Launch = tuple[str, tuple[int, ...], list[Any]]


class Idle:
    """Streams of a device that does nothing. A graph is the launches in it.

    Attributes:
        seen: What is launched.
        recorded: Graphs that were made.
        busy: The caller's stream has something to do all the same.
    """

    copy_stream, flag_stream, read_stream = 2, 3, 4
    seen: list[Launch]

    def __init__(self) -> None:
        self.recorded = 0
        self.busy = self._recording = False

    def main(self) -> int:
        return 1

    def capturing(self) -> bool:
        return self._recording

    def compile(self, ops: Sequence[Op]) -> list[Op]:
        return list(ops)

    def launch(self, program: list[Op] | tuple[Launch, ...], stream: int) -> None:
        if isinstance(program, tuple):
            self.seen += program

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        pass

    def order(self, first: int, then: int) -> None:
        pass

    def call(self, work: Callable[[], object]) -> None:
        work()

    def wait_until_idle(self, seconds: float) -> bool:
        return not self.busy

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

    def barrier(self, what: str) -> None:
        pass

    def pinned_ints(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """What launchers hand to the driver: kernel, grid and arguments. Nothing runs."""
    seen: list[Launch] = []

    def launch(kernel: Any, grid: Any, args: Any, constants: dict[str, Any], **options: int) -> bound_launch.Bound:
        def run(x: int, y: int, z: int, stream: int, *flat: Any) -> None:
            assert stream == 1
            seen.append((kernel.fn.__name__, (x, y, z), list(flat)))

        bound = bound_launch.Bound(None, (*constants.values(), *options.values()), run=run)
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

    def encode(bound: bound_launch.Bound, number: int, descriptor: Any) -> list[Any]:
        del bound
        shape, strides, block = (tuple(getattr(descriptor, name)) for name in ("shape", "strides", "block_shape"))
        return [descriptor.base.data_ptr(), number, shape, strides, block]

    held: list[Any] = []

    def holding(make: Callable[..., Any]) -> Callable[..., Any]:
        """Nothing is freed, or an address would be two tensors."""
        return lambda *args, **kwargs: (held.append(make(*args, **kwargs)), held[-1])[1]

    for name in ("empty", "empty_like", "clone"):
        monkeypatch.setattr(torch, name, holding(getattr(torch, name)))
    monkeypatch.setattr(Tensor, "clone", holding(Tensor.clone))
    monkeypatch.setattr(Idle, "seen", seen, raising=False)
    monkeypatch.setattr(bound_launch, "launch", launch)
    monkeypatch.setattr(bound_launch.Bound, "encode", encode)
    monkeypatch.setattr(copy_engine, "pack", pack_triton.pack)
    for name in ("reduce_kv_grads", "reduce_key_bias_grads"):
        monkeypatch.setattr(fused, name, getattr(grad_reduce_triton, f"{name}_on_gpu"))
    yield seen
    held.clear()


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


class FakeRing:
    """Rank 1 of a ring whose other ranks are not there."""

    def __init__(self, case: Case, ranks: int = 3) -> None:
        self.case = case
        shards = make_shards("zigzag", case.n, ranks)
        sharding = Sharding(case.n, "zigzag", shards, 1, case.documents)
        text = serialize(sharding, softmax_scale=case.scale, **case.mask, **case.options)
        self.spec = AttentionSpec.deserialize(text, 1)
        self.transport = CopyEngineTransport(1, range(ranks), "ring", Idle(), Alone(ranks), 10.0)
        self.context = RingContext(1, ranks, self.transport, budget=2**40)
        self.plan: ExecutionPlan | None = None

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
        tensors = ScoreTensors(**extras)
        # one plan for all calls, as `dispatch.resolve` finds it
        self.plan = self.plan or make_execution_plan(self.spec, q, k, v, tensors, HopperKernels, self.context)
        here = self.spec.score(q.dtype, 0, tensors), self.plan, self.context
        o, lse, kept = fused_forward(ForwardCall(q, k, v, *here), keep=self.case.keep)
        assert (kept is not None) == self.case.keep
        wanted = WantedGrads(alibi_slopes="alibi_slopes" in extras, key_bias="key_bias" in extras)
        grads = fused_backward(BackwardCall(do, None, q, k, v, o, lse, *here, wanted), saved=kept)
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


def ranges(ring: FakeRing, inputs: list[dict[str, Tensor]]) -> list[tuple[int, int]]:
    """Where memory lies that a call is given or its ring holds."""
    transport = ring.transport
    tensors = [x for one in inputs for x in one.values()]
    tensors += [transport._control.local, transport._slot, transport._flags, transport._local_grads, transport._error]
    tensors += [station.region.local for station in transport._peer_buffers()]
    storages = [x.untyped_storage() for x in tensors]
    return [(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages]


@pytest.fixture
def steady(launches: list[Launch], monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """An allocator that gives each call the memory of the one before; what begins a call."""
    pool: dict[Any, list[Tensor]] = {}
    taken: dict[Any, int] = {}

    def pooling(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            x = make(*args, **kwargs)
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


def called_often(case: Case, steady: Callable[[], None]) -> tuple[FakeRing, dict[str, Tensor]]:
    """A ring whose calls over these inputs are graphs, where they may be."""
    ring = FakeRing(case)
    inputs = ring.inputs()
    for _ in range(6):
        steady()
        ring.both(inputs)
    return ring, inputs


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_graph_launches_the_work_of_its_call(
    launches: list[Launch], steady: Callable[[], None], monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    ring = FakeRing(case)
    inputs = ring.inputs()

    def run() -> tuple[list[Any], list[int]]:
        launches.clear()
        steady()
        return named(launches, ring.both(inputs))

    with monkeypatch.context() as plain:
        plain.setattr(HopperKernels, "can_capture", lambda self: False)
        for _ in range(4):
            run()
        expected = [run(), run()]
    streams: Any = ring.transport.streams
    assert not streams.recorded
    found = [run() for _ in range(8)]
    # keys that are kept have memory of their own each time, and a bias is no part of the key of a graph
    pieces = case.keep or "key_bias" in case.features
    assert streams.recorded == (0 if pieces else 3), "one of the forward, one of the backward for each turn"
    held = ranges(ring, [inputs])
    for i, (launched, addresses) in enumerate(found):
        wanted, others = expected[i % 2]
        assert launched == wanted
        for x, y in zip(addresses, others, strict=True):
            assert x == y or not any(start <= z < end for z in (x, y) for start, end in held)
    if not pieces:
        assert found[4:6] == found[6:8], "also rooms are where they were"


def test_tensors_that_graphs_read_live_as_long_as_they_do(launches: list[Launch], steady: Callable[[], None]) -> None:
    ring, _ = called_often(Case(), steady)
    assert ring.plan is not None
    sides = weakref.ref(find(ring.plan.tables.stationary))
    table_cache.clear()
    gc.disable()
    try:
        assert sides() is not None
        del ring
        assert sides() is None
    finally:
        gc.enable()


def test_a_listener_of_launches_gets_all(
    launches: list[Launch], steady: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = FakeRing(Case())
    inputs, asked = ring.inputs(), list[int]()
    forward = HopperKernels.forward_fused
    monkeypatch.setattr(HopperKernels, "forward_fused", lambda *args: (asked.append(1), forward(*args)))
    # the plan and its memory are made while a hook listens
    for heard, expected in ((True, 4), (False, 3), (True, 4), (False, 0)):
        monkeypatch.setattr(bound_launch, "is_hooked", lambda heard=heard: heard)
        asked.clear()
        for _ in range(4):
            steady()
            ring.both(inputs)
        assert len(asked) == expected


@pytest.mark.parametrize("long", [False, True])
def test_only_brief_calls_become_graphs(
    launches: list[Launch], steady: Callable[[], None], monkeypatch: pytest.MonkeyPatch, long: bool
) -> None:
    monkeypatch.setattr(execution_plan, "SHORT_SECONDS", 0.0 if long else 1.0)
    ring, _ = called_often(Case(), steady)
    streams: Any = ring.transport.streams
    assert streams.recorded == (0 if long else 3)


@pytest.mark.parametrize("change", ["call", "strides", "slopes", "presence"])
def test_another_call_over_the_same_memory_is_another_graph(
    launches: list[Launch], steady: Callable[[], None], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """What a key leaves out would be launched as it was."""
    case = Case(kv_heads=4, features=("alibi_slopes",))
    differs = {"call": {"scale": 0.25}, "presence": {"features": ("sinks",)}}.get(change, {})
    first, other = FakeRing(case), FakeRing(dataclasses.replace(case, **differs))
    other.transport, other.context = first.transport, first.context
    mine = first.inputs()
    theirs = dict(mine)
    if change == "strides":
        b, t, h, d = mine["q"].shape
        theirs["q"] = mine["q"].view(b, h, t, d).transpose(1, 2)
    elif change == "slopes":
        theirs["alibi_slopes"] = torch.ones(4)
    elif change == "presence":
        theirs["sinks"] = theirs.pop("alibi_slopes")

    def run(ring: FakeRing, inputs: dict[str, Tensor]) -> list[Launch]:
        launches.clear()
        steady()
        ring.both(inputs)
        return list(launches)

    with monkeypatch.context() as plain:
        plain.setattr(HopperKernels, "can_capture", lambda self: False)
        for _ in range(4):
            run(first, mine)
            run(other, theirs)
        expected = [named(run(*one), [])[0] for one in ((first, mine), (other, theirs))]
    for _ in range(5):
        assert [named(run(*one), [])[0] for one in ((first, mine), (other, theirs))] == expected
    streams: Any = first.transport.streams
    assert streams.recorded == 4  # backwards that take turns have the same turn each time


def test_graphs_keep_tables_and_programs(launches: list[Launch], steady: Callable[[], None]) -> None:
    """A table that is dropped elsewhere stays alive in a graph."""
    ring, _ = called_often(Case(heads=8, kv_heads=8, dims=(128, 128)), steady)
    assert ring.plan is not None
    assert ring.plan.fused_forward is not None
    tables = ring.plan.fused_forward.tables
    tables_of = find(tables.rows), find(tables.keys[0]), find(tables.returning[0])
    assert ring.transport._kept is None
    held = [kept for one in ring.transport._graphs._calls.values() for _, kept in one.graphs.values()]
    assert len(held) == 3
    for several in held:
        flat = [x for part in several for x in (part if isinstance(part, tuple) else (part,))]
        assert all(any(x is table for x in flat) for table in tables_of[:2])
        assert any(isinstance(x, GatherPrograms) for x in flat)
    returning = [
        any(x is tables_of[2] for part in several if isinstance(part, tuple) for x in part) for several in held
    ]
    assert sorted(returning) == [False, True, True]


def test_calls_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_cache, "CAPACITY", 3)
    known, x = graph_cache.GraphCache(), torch.zeros(1)
    first, second = (known.find((i,), (x,), ()) for i in range(2))
    assert known.find((0,), (x,), ()) is first
    for i in range(2, 4):
        known.find((i,), (x,), ())
    assert known.find((0,), (x,), ()) is first, "the one that was used last stays"
    assert known.find((1,), (x,), ()) is not second


def test_a_call_is_captured_on_an_idle_stream_only() -> None:
    known, x, streams = graph_cache.GraphCache(), torch.zeros(1), Idle()
    call = known.find((0,), (x,), ())
    for _ in range(graph_cache.SEEN):
        call.count()
    streams.seen, streams.busy = [], True
    assert known.graph(call, None, streams, lambda: None) is None
    assert (streams.recorded, call.can_capture) == (0, True)
    streams.busy = False
    assert known.graph(call, None, streams, lambda: None) is not None
    assert streams.recorded == known.launched == 1


def test_a_profiler_sees_a_graph_under_the_name_of_its_call(launches: list[Launch], steady: Callable[[], None]) -> None:
    ring, inputs = called_often(Case(), steady)
    before = ring.transport.graph_launches
    with torch.profiler.profile() as found:
        steady()
        ring.both(inputs)
    assert ring.transport.graph_launches == before + 2
    names = [event.name for event in found.events() or ()]
    for way in ("forward", "backward"):
        assert names.count(f"ring {way}: all ring steps in one launch") == 1
