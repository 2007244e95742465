"""The one-shot exchange, host and protocol, in any interleaving of all programs of all ranks: nothing is torn, stale or stuck.

The kernel is a model of it: programs that store row by row, set flags, wait and read, in any order that a device could choose.
What the kernel itself stores and reads is held to the same in tests/kernels/interpreter;
what a device makes of it, in tests/gpu/test_reduce.py.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from typing import Protocol

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ringattn.kernels.comm import one_shot_triton
from ringattn.kernels.partials import packed
from ringattn.transport.copy_engine.watchdog import Watchdog
from ringattn.transport.reduce.one_shot import OneShotReducer
from tests.kernels.contract.test_packed import Sizes
from tests.support.device_bytes import reducer_bytes
from tests.support.fake_streams import MAIN, FakeMemory, FakeStreams, Item, Recording, World, always
from tests.transport.test_reduce import DTYPES, add, assert_bits, cut, draw, draw_shares, lay, simulate

PROGRAMS = 3


def word(address: int) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(address)


def numbers(address: int, count: int) -> Tensor:
    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)


class Kernel:
    """One launch on one rank."""

    def __init__(
        self, world: World, programs: list[Iterator[Callable[[], bool]]], requeue: Callable[[Item], None]
    ) -> None:
        self._world = world
        self._requeue = requeue
        self._programs = {i: (program, always) for i, program in enumerate(programs)}

    def item(self) -> Item:
        return Item(lambda: any(ready() for _, ready in self._programs.values()), self._step, "one-shot exchange")

    def _step(self) -> None:
        chosen = self._world.random.choice([i for i, (_, ready) in self._programs.items() if ready()])
        program = self._programs[chosen][0]
        ready = next(program, None)
        if ready is None:
            del self._programs[chosen]
        else:
            self._programs[chosen] = (program, ready)
        if self._programs:
            self._requeue(self.item())


class Work(Protocol):
    """What a program does with its rows of a launch, in three parts; what another program does meanwhile shows."""

    rows: int

    def store(self, row: int, slot: int) -> None: ...

    def read(self, slots: list[int]) -> None: ...

    def write(self, row: int) -> None: ...


class Finishing:
    """Of `one_shot`."""

    def __init__(self, splits: Tensor, sinks: Tensor | None, o: Tensor, lse: Tensor) -> None:
        self.sinks, self.o, self.lse = sinks, o, lse
        self.rows, self.dv = o.shape[:3].numel(), o.shape[3]
        self.part = torch.empty(packed.size(self.rows, self.dv))
        packed.merge_parts(splits, self.part, self.rows, self.dv)

    def store(self, row: int, slot: int) -> None:
        target = packed.views(numbers(slot, len(self.part)), self.rows, self.dv)
        for x, y in zip(target, packed.views(self.part, self.rows, self.dv), strict=True):
            x[row] = y[row]

    def read(self, slots: list[int]) -> None:
        stack = torch.stack([numbers(slot, len(self.part)) for slot in slots])
        self.whole = torch.empty_like(self.o), torch.empty_like(self.lse)
        packed.finish_parts(stack, self.rows, self.dv, self.sinks, *self.whole)

    def write(self, row: int) -> None:
        _, s, h, _ = self.o.shape
        i, j, k = row // (s * h), row // h % s, row % h
        self.o[i, j, k] = self.whole[0][i, j, k]
        self.lse[i, k, j] = self.whole[1][i, k, j]


class Sharing:
    """Of `share`; a row is a number of x."""

    def __init__(self, x: Tensor, out: Tensor, adds: bool, widths: tuple[int, ...]) -> None:
        self.x, self.out, self.adds, self.rows = x.view(-1), out.view(-1), adds, x.numel()
        self.shape, self.widths = x.shape, widths

    def _slot(self, address: int) -> Tensor:
        return numbers(address, -(-self.x.nbytes // 4)).view(self.x.dtype)

    def store(self, row: int, slot: int) -> None:
        self._slot(slot)[row] = self.x[row]

    def read(self, slots: list[int]) -> None:
        self.shares = [self._slot(slot).clone() for slot in slots]
        if not self.adds:
            # where each number of each rank goes
            numbers = torch.arange(len(self.shares) * self.rows).view(-1, *self.shape)
            self.places = lay(list(numbers), self.widths).flatten().argsort().view(-1, self.rows)

    def write(self, row: int) -> None:
        if self.adds:
            self.out[row] = add([share[row] for share in self.shares], self.out.dtype)
            return
        for places, share in zip(self.places, self.shares, strict=True):
            self.out[places[row]] = share[row]


class Ranks:
    """All ranks of one ring on fake devices."""

    def __init__(self, ranks: int, seed: int, monkeypatch: pytest.MonkeyPatch, halves: int = 2) -> None:
        self.world = World(ranks, seed)
        self.ranks = ranks
        self.halves = halves
        self.streams = [FakeStreams(self.world, rank) for rank in range(ranks)]
        self.watches: dict[int, Watchdog] = {}
        monkeypatch.setattr(one_shot_triton, "PROGRAMS", PROGRAMS)
        monkeypatch.setattr(one_shot_triton, "one_shot", self.launch)
        monkeypatch.setattr(one_shot_triton, "share", self.share)
        monkeypatch.setattr("ringattn.transport.reduce.one_shot.SMALLEST", 16)
        ends: dict[int, OneShotReducer] = {}

        def make(rank: int) -> None:
            streams, memory = self.streams[rank], FakeMemory(self.world, rank)
            control = memory.region(256, "words").addresses[rank]
            self.watches[rank] = watchdog = Watchdog(
                rank, "ring", memory.pinned_ints(16), tuple(control + 4 * i for i in range(9)), streams, 10.0
            )
            ends[rank] = OneShotReducer(rank, ranks, "ring", streams, memory, None, watchdog, 10.0, "a test")

        self.world.hosts(make)
        self.ends = [ends[rank] for rank in range(ranks)]

    def launch(
        self, splits: Tensor, sinks: Tensor | None, o: Tensor, lse: Tensor, table: Tensor, **launch: int
    ) -> None:
        """In place of the kernel's launcher."""
        self._launch(lambda: Finishing(splits, sinks, o, lse), table, **launch)

    def share(
        self, x: Tensor, out: Tensor, table: Tensor, *, adds: bool, widths: tuple[int, ...], **launch: int
    ) -> None:
        """In place of the other kernel's launcher."""
        self._launch(lambda: Sharing(x, out, adds, widths), table, **launch)

    def _launch(
        self, begin: Callable[[], Work], table: Tensor, *, rank: int, ranks: int, slot: int, timeout_us: int
    ) -> None:
        assert (ranks, timeout_us) == (self.ranks, 10_000_000)
        streams = self.streams[rank]

        def make() -> Item:
            programs = [self._program(g, begin, table.tolist(), rank, slot) for g in range(PROGRAMS)]
            return Kernel(self.world, programs, streams._queue(MAIN).appendleft).item()

        streams.enqueue(MAIN, make)

    def _program(
        self, g: int, begin: Callable[[], Work], table: list[int], me: int, slot: int
    ) -> Iterator[Callable[[], bool]]:
        ranks = self.ranks
        boxes, controls = table[:ranks], table[ranks : 2 * ranks]
        count = word(controls[me] + 8 * (PROGRAMS * ranks + g))
        epoch = count.value + 1
        half = epoch % self.halves * ranks * slot
        work = begin()
        mine = range(g, work.rows, PROGRAMS)
        for rank in range(ranks):
            for row in mine:
                work.store(row, boxes[rank] + 4 * (half + me * slot))
                yield always
        for rank in range(ranks):
            word(controls[rank] + 8 * (g * ranks + me)).value = epoch
            yield always
        for rank in range(ranks):
            flag = word(controls[me] + 8 * (g * ranks + rank))
            yield lambda flag=flag: flag.value >= epoch
            assert flag.value <= epoch + 1, "a flag is never more than one launch ahead"
        work.read([boxes[me] + 4 * (half + rank * slot) for rank in range(ranks)])
        for row in mine:
            yield always
            work.write(row)
        count.value = epoch


SIZES: list[Sizes] = [(1, 1, 2, 3), (2, 2, 2, 3), (1, 1, 1, 1), (1, 2, 3, 8), (2, 3, 2, 8)]


SHAPES = [(1, 5), (3, 7), (2, 16)]
Calls = list[tuple[int, list[list[Tensor]]]]


def run_call(
    together: Ranks, make: Callable[[int], tuple[list[Tensor], list[Tensor], Callable[..., None]]]
) -> list[list[Tensor]]:
    """One exchange, without waiting for it: what every rank will find. What it brought is gone once its stream has passed.

    Args:
        together: The ranks.
        make: What a rank brings, what it finds, and the call, of both.
    """
    calls = [make(rank) for rank in range(together.ranks)]

    def call(rank: int) -> None:
        brought, out, reducer = calls[rank]
        copies = [x.clone() for x in brought]
        reducer(*copies, *out)
        together.streams[rank].call(lambda: [x.fill_(math.nan) for x in copies])

    together.world.hosts(call)
    return [out for _, out, _ in calls]


def run_calls(together: Ranks, seeds: range) -> Calls:
    """Exchanges of partials one after the other without waiting for any: what every rank will find, by seed."""
    found: Calls = []
    for seed in seeds:
        sizes = SIZES[seed % len(SIZES)]
        splits, sinks, _, _ = draw(seed, together.ranks, sizes, sinks=bool(seed % 2))

        def make(rank: int, splits=splits, sinks=sinks, sizes: Sizes = sizes):
            b, s, h, dv = sizes
            finish = together.ends[rank].merge_partials
            out = [torch.full((b, s, h, dv), math.nan), torch.full((b, h, s), math.nan)]
            return [splits[rank]], out, lambda x, o, lse: finish(x, *sizes, sinks, o, lse)

        found.append((seed, run_call(together, make)))
    return found


def run_shares(together: Ranks, seeds: range) -> Calls:
    """Likewise sums and columns, one of each per seed."""
    found: Calls = []
    for seed in seeds:
        shares, to = draw_shares(seed, together.ranks, SHAPES[seed % 3], DTYPES[seed // 3 % 3]), DTYPES[seed // 2 % 3]

        def add_up(rank: int, shares=shares, to=to):
            return [shares[rank]], [torch.full_like(shares[rank], math.nan, dtype=to)], together.ends[rank].all_reduce

        def concatenate(rank: int, shares=shares, seed=seed):
            gather, widths = together.ends[rank].all_gather_columns, cut(shares[0].shape[1], seed)
            return [shares[rank]], [torch.full_like(lay(shares, widths), math.nan)], lambda x, y: gather(x, y, widths)

        outs = zip(run_call(together, add_up), run_call(together, concatenate), strict=True)
        found.append((seed, [summed + laid for summed, laid in outs]))
    return found


def assert_shares(together: Ranks, found: Calls) -> None:
    for seed, outs in found:
        shares, to = draw_shares(seed, together.ranks, SHAPES[seed % 3], DTYPES[seed // 3 % 3]), DTYPES[seed // 2 % 3]
        for summed, laid in outs:
            assert_bits(summed, add(shares, to))
            assert_bits(laid, lay(shares, cut(shares[0].shape[1], seed)))


def assert_answers(together: Ranks, found: Calls) -> None:
    for seed, outs in found:
        sizes = SIZES[seed % len(SIZES)]
        splits, sinks, _, _ = draw(seed, together.ranks, sizes, sinks=bool(seed % 2))
        wanted = simulate(together.ranks, splits, sizes, sinks, torch.float32)
        for rank, out in enumerate(outs):
            for x, y in zip(out, wanted, strict=True):
                assert torch.equal(x, y), f"rank {rank}, exchange {seed}"


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_every_exchange_finds_whole_parts_of_its_own(ranks: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    together = Ranks(ranks, seed, monkeypatch)
    found = run_calls(together, range(100 * seed, 100 * seed + 12))
    together.world.drain()
    assert_answers(together, found)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_partials_sums_and_columns_take_turns_in_the_same_mailboxes(
    ranks: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = Ranks(ranks, seed, monkeypatch)
    answers, shares = [], []
    for turn in range(18 * seed, 18 * seed + 6):
        shares += run_shares(together, range(turn, turn + 1))
        answers += run_calls(together, range(turn, turn + 1 + turn % 2))
    together.world.drain()
    assert_answers(together, answers)
    assert_shares(together, shares)


def test_with_one_half_parts_of_two_exchanges_would_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        for seed in range(10):
            together = Ranks(3, seed, monkeypatch, halves=1)
            found = run_calls(together, range(12))
            together.world.drain()
            assert_answers(together, found)

    with pytest.raises(AssertionError, match=r"rank \d, exchange \d"):
        run()


def capture(together: Ranks, call: Callable[[int], None]) -> list[Recording]:
    recordings = [Recording() for _ in together.ends]

    def one(rank: int) -> None:
        together.streams[rank].recording = recordings[rank]
        call(rank)
        together.streams[rank].recording = None

    together.world.hosts(one)
    return recordings


def replay(together: Ranks, recordings: list[Recording], inputs: list[Tensor], fresh: list[Tensor]) -> None:
    def one(rank: int) -> None:
        together.streams[rank].call(lambda: inputs[rank].copy_(fresh[rank]))
        together.streams[rank].replay(recordings[rank])

    together.world.hosts(one)
    together.world.drain()


@pytest.mark.parametrize("seed", range(4))
def test_graphs_go_on_with_the_mailboxes_they_were_captured_with(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    together = Ranks(2, seed, monkeypatch)
    sizes = SIZES[0]
    inputs = [torch.full_like(x, math.nan) for x in draw(0, 2, sizes, sinks=False)[0]]
    outs = [[torch.full((1, 1, 2, 3), math.nan), torch.full((1, 2, 1), math.nan)] for _ in range(2)]
    run_calls(together, range(1))
    merge = lambda rank: together.ends[rank].merge_partials(inputs[rank], *sizes, None, *outs[rank])  # noqa: E731
    recordings = capture(together, merge)
    grown = reducer_bytes(together.ends[0])
    for turn in range(1, 6):
        # others, of other sizes, which make the mailboxes grow once
        found = run_calls(together, range(turn, turn + 2))
        splits, _, _, _ = draw(0, 2, sizes, sinks=False)
        fresh = [x.flip(0) * turn if turn % 2 else x.clone() for x in splits]
        for x in fresh:
            packed.views(x, 2, 3)[1].abs_()
        replay(together, recordings, inputs, fresh)
        assert_answers(together, found)
        wanted = simulate(2, fresh, sizes, None, torch.float32)
        for out in outs:
            assert all(torch.equal(x, y) for x, y in zip(out, wanted, strict=True))
    assert reducer_bytes(together.ends[0]) > grown


@pytest.mark.parametrize("seed", range(4))
def test_sums_and_columns_of_graphs_keep_their_mailboxes_too(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    together, shape = Ranks(2, seed, monkeypatch), (2, 3)
    dtype = DTYPES[seed % 3]
    inputs = [torch.full(shape, math.nan, dtype=dtype) for _ in range(2)]
    outs = [[torch.full(shape, math.nan), torch.full((2, 6), math.nan, dtype=dtype)] for _ in range(2)]

    def layer(rank: int) -> None:
        together.ends[rank].all_reduce(inputs[rank], outs[rank][0])
        together.ends[rank].all_gather_columns(inputs[rank], outs[rank][1])

    together.world.hosts(layer)
    recordings = capture(together, layer)
    grown = reducer_bytes(together.ends[0])
    for turn in range(1, 6):
        answers, others = run_calls(together, range(turn, turn + 2)), run_shares(together, range(turn, turn + 1))
        fresh = draw_shares(turn, 2, shape, dtype)
        replay(together, recordings, inputs, fresh)
        assert_answers(together, answers)
        assert_shares(together, others)
        for summed, laid in outs:
            assert_bits(summed, add(fresh, torch.float32))
            assert_bits(laid, torch.cat(fresh, 1))
    assert reducer_bytes(together.ends[0]) > grown


def test_a_mailbox_has_room_for_bytes_whatever_the_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    together = Ranks(2, 0, monkeypatch)
    empty = reducer_bytes(together.ends[0])
    # halves, ranks, bytes
    for count, dtype, slot in (
        (32, torch.bfloat16, 16),
        (16, torch.float32, 16),
        (33, torch.float16, 32),
        (33, torch.float32, 64),
    ):
        shares = draw_shares(0, 2, (1, count), dtype)
        for found in run_call(
            together, lambda rank, x=shares: ([x[rank]], [torch.empty_like(x[rank])], together.ends[rank].all_reduce)
        ):
            together.world.drain()
            assert_bits(found[0], add(shares, dtype))
        assert reducer_bytes(together.ends[0]) - empty == 2 * 2 * 4 * slot


def test_nothing_is_launched_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    together = Ranks(1, 0, monkeypatch)
    monkeypatch.setattr(together.ends[0], "_run_sum", None)
    monkeypatch.setattr(together.ends[0], "_run_columns", None)
    together.ends[0].all_reduce(torch.empty(0, 4), torch.empty(0, 4))
    together.ends[0].all_gather_columns(torch.empty(3, 0), torch.empty(3, 0))


def finish_one(end: OneShotReducer) -> None:
    part = torch.zeros(1, packed.size(2, 3))
    end.merge_partials(part, 1, 1, 2, 3, None, torch.empty(1, 1, 2, 3), torch.empty(1, 2, 1))


def test_a_missing_rank_is_named_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    together = Ranks(3, 0, monkeypatch)
    end = together.ends[1]
    end.check()
    end._errors[2], end._errors[0] = 1, 2
    for call in (end.check, lambda: finish_one(end)):
        with pytest.raises(
            RuntimeError,
            match=r"ring rank 1 of ring 'ring': an exchange: ring ranks \[2\] did not come within 10 s, and ring "
            r"ranks \[0\] have failed; look for an earlier error",
        ):
            call()


def test_a_failed_ring_lets_kernels_that_wait_go(monkeypatch: pytest.MonkeyPatch) -> None:
    together = Ranks(2, 0, monkeypatch)
    end, watchdog = together.ends[0], together.watches[0]
    assert end._control is not None
    words = end._control.local.view(torch.int64)
    last = one_shot_triton.control_size(2) - 1
    assert words[last] == 0
    watchdog._fail((0, 0, 0, 0, 0), "a test")
    assert words[last] != 0
    with pytest.raises(RuntimeError, match="a test"):
        finish_one(end)


def test_a_closed_reducer_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    together = Ranks(2, 0, monkeypatch)
    run_calls(together, range(2))
    together.world.hosts(lambda rank: together.ends[rank].close())
    assert not together.watches[0].recovery.raised
    assert reducer_bytes(together.ends[0]) == 0
    with pytest.raises(RuntimeError, match="after its ring was closed"):
        finish_one(together.ends[0])


def test_exchanges_of_two_streams_are_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    together = Ranks(1, 0, monkeypatch)
    end, streams = together.ends[0], together.streams[0]
    ordered: list[tuple[int, int]] = []
    monkeypatch.setattr(streams, "order", lambda first, then: ordered.append((first, then)))
    monkeypatch.setattr(one_shot_triton, "one_shot", lambda *args, **kwargs: None)
    for stream in (MAIN, 7, 7, MAIN):
        streams.stream = stream
        finish_one(end)
    assert ordered == [(MAIN, 7), (7, MAIN)]
