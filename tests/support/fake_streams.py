"""The devices of all ranks in one process: streams are queues, and a scheduler runs any operation that could run next.

Owns the two lower layers of the copy engine on CPU tensors. Every rank's memory is memory of this process, so a peer's
address is the address. Copies go row by row, so that a rank that overwrites too early is found out. When nothing can run and
something is left, the protocol has a deadlock, and the test fails.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ringattn.transport.copy_engine.streams import Copy, Op, Wait, Write, Write64
from ringattn.transport.copy_engine.symmetric_memory import Region

MAIN, COPY, FLAG, READ, OTHER = range(1, 6)
"""Lanes of a rank; the last is nobody's."""


def read(address: int) -> int:
    return ctypes.c_int32.from_address(address).value


def write(address: int, value: int) -> None:
    ctypes.c_int32.from_address(address).value = value


@dataclass
class Item:
    """One operation: it may run when `ready`, and `run` does it."""

    ready: Callable[[], bool]
    run: Callable[[], object]
    what: str


def always() -> bool:
    return True


class World:
    """All queues, and who runs next."""

    def __init__(self, ranks: int, seed: int) -> None:
        self.ranks = ranks
        self.random = random.Random(seed)
        self.queues: dict[tuple[int, int], deque[Item]] = defaultdict(deque)
        self.regions: list[tuple[int, str, list[Tensor]]] = []
        self.dead: set[int] = set()
        self.shared = False
        """All lanes of a rank are one queue of the device."""
        self.asleep: set[tuple[int, int]] = set()
        """Lanes of ranks that stand still: none of their operations runs."""
        self.baton = threading.Condition()
        self._lanes = OTHER
        self._running = 0
        self._met = [0] * ranks
        self._meeting: dict[int, Callable[[], bool]] = {}
        # who is slow now: without it all ranks advance alike
        self._slow: tuple[int, int] | None = None

    def new_stream(self) -> int:
        self._lanes += 1
        return self._lanes

    def step(self) -> bool:
        """Runs one operation; False when nothing can run."""
        heads = [
            (key, queue)
            for key, queue in self.queues.items()
            if queue and key[0] not in self.dead and key not in self.asleep and queue[0].ready()
        ]
        if not heads:
            return False
        if self.random.random() < 0.02:
            self._slow = self.random.choice(list(self.queues))
        preferred = [queue for key, queue in heads if key != self._slow] or [queue for _, queue in heads]
        queue = self.random.choice(preferred)
        for _ in range(self.random.choice((1, 1, 2, 8))):
            queue.popleft().run()
            if not queue or not queue[0].ready():
                break
        return True

    def some_steps(self, most: int) -> None:
        for _ in range(self.random.randrange(most)):
            if not self.step():
                return

    def busy(self, rank: int | None = None) -> bool:
        return any(queue for key, queue in self.queues.items() if rank is None or key[0] == rank)

    def hosts(self, call: Callable[[int], None]) -> None:
        """One call of every rank's host, in any order, with the devices at work meanwhile; one thread runs at a time."""
        errors: list[BaseException] = []

        def host(rank: int) -> None:
            with self.baton:
                try:
                    self.some_steps(40)
                    call(rank)
                except BaseException as error:  # the caller's thread raises it
                    errors.append(error)
                self._running -= 1
                self.baton.notify_all()

        order = [rank for rank in range(self.ranks) if rank not in self.dead]
        self.random.shuffle(order)
        self._running = len(order)
        threads = [threading.Thread(target=host, args=(rank,)) for rank in order]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def barrier(self, rank: int) -> None:
        """Every rank's host comes here, and its device has nothing left to do."""
        self._met[rank] += 1
        self._block(rank, lambda: min(self._met) >= self._met[rank] and not self.busy(rank))

    def finish(self, rank: int) -> None:
        """A host waits for its device; other hosts go on."""
        self._block(rank, lambda: not self.busy(rank))

    def _block(self, rank: int, may_leave: Callable[[], bool]) -> None:
        self._running -= 1
        self._meeting[rank] = may_leave
        self.baton.notify_all()
        while not may_leave():
            if self._running > 0 or any(other() for other in self._meeting.values()):
                self.baton.wait()
            elif self._step_of(rank):
                self.baton.notify_all()
            else:
                self._running = 0
                self._meeting.pop(rank)
                self.baton.notify_all()
                raise AssertionError(f"deadlock: rank {rank} waits for the others, who have come {self._met} times")
        self._running += 1
        self._meeting.pop(rank)

    def _step_of(self, rank: int) -> bool:
        """One step by a host that waits; whoever waits with it must not wait for ever when an operation raises."""
        try:
            return self.step()
        except BaseException:
            self._running += 1
            self._meeting.pop(rank)
            raise

    def drain(self, rank: int | None = None) -> None:
        while self.busy(rank):
            assert self.step(), "deadlock: " + "; ".join(
                f"rank {key[0]} lane {key[1]} at {queue[0].what}" for key, queue in self.queues.items() if queue
            )


@dataclass
class Recording:
    """What a capture kept: (lane, item), and the lanes that took part."""

    items: list[tuple[int, Callable[[], Item]]] = field(default_factory=list)
    joined: set[int] = field(default_factory=set)


class FakeStreams:
    """`Streams` of one rank."""

    copy_stream = COPY
    flag_stream = FLAG
    read_stream = READ

    def __init__(self, world: World, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.recording: Recording | None = None
        self.launches = 0
        self.stream = MAIN

    def main(self) -> int:
        return self.stream

    def capturing(self) -> bool:
        return self.recording is not None

    def compile(self, ops: Sequence[Op]) -> list[Op]:
        return list(ops)

    def wait_until_idle(self, seconds: float) -> bool:
        return True

    def record(self, work: Callable[[], object]) -> Recording:
        assert self.recording is None, "a capture begins in no other one"
        self.recording = recording = Recording()
        try:
            work()
        finally:
            self.recording = None
        return recording

    def launch(self, program: list[Op] | Recording, stream: int) -> None:
        self.launches += 1
        if isinstance(program, Recording):
            assert stream == self.stream, "what was recorded on the caller's stream goes there"
            self.replay(program)
            return
        for op in program:
            for make in _items(op):
                self.enqueue(stream, make)

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        self.launch([Copy(target, source, num_bytes)], stream)

    def order(self, first: int, then: int) -> None:
        if self.recording is not None:
            self.recording.items.append((first, lambda: Item(always, lambda: None, f"order {then}")))
            self.recording.joined |= {first} if then == self.stream else set()
            return
        self._order(first, then)

    def _order(self, first: int, then: int) -> None:
        reached: list[bool] = []
        self._queue(first).append(Item(always, lambda: reached.append(True), "event"))
        self._queue(then).append(Item(lambda: bool(reached), lambda: None, "wait for an event"))

    def call(self, work: Callable[[], object]) -> None:
        self.enqueue(self.stream, lambda: Item(always, work, "torch work"))

    def enqueue(self, stream: int, make: Callable[[], Item]) -> None:
        if self.recording is not None:
            assert stream in (self.stream, COPY, FLAG)
            self.recording.items.append((stream, make))
            self.recording.joined.discard(stream)
        else:
            self._queue(stream).append(make())

    def replay(self, recording: Recording) -> None:
        """Enqueues what was captured: lanes beside the caller's become ones of the graph's own, ordered by events alone."""
        beside = COPY, FLAG
        lanes = {self.stream: self.stream} | {stream: self.world.new_stream() for stream in beside}
        started: set[int] = {self.stream}
        for stream, make in recording.items:
            item = make()
            if item.what.startswith("order "):
                then = int(item.what.split()[1])
                self._order(lanes[stream], lanes[then])
                started.add(then)
                continue
            assert stream in started, "a stream must be forked inside the capture"
            self._queue(lanes[stream]).append(item)
        for stream in beside:
            assert stream not in started or stream in recording.joined, "a stream must be joined inside the capture"

    def rescue(self, ops: Sequence[Op]) -> None:
        for op in ops:
            for make in _items(op):
                item = make()
                assert item.ready(), "a rescue must not wait"
                item.run()

    def fill(self, address: int, num_bytes: int) -> None:
        ctypes.memset(address, 0xFF, num_bytes)

    def synchronize(self) -> None:
        self.world.finish(self.rank)

    def _queue(self, stream: int) -> deque[Item]:
        return self.world.queues[self.rank, MAIN if self.world.shared else stream]


class FakeMemory:
    """`Memory` of one rank. The n-th region of every rank is made when the first rank asks for it; members reach each other's."""

    device = torch.device("cpu")

    def __init__(self, world: World, rank: int, members: Sequence[int] | None = None) -> None:
        self._world = world
        self._rank = rank
        self._members = range(world.ranks) if members is None else members
        self._asked = 0

    def region(self, num_bytes: int, what: str) -> Region:
        made = self._world.regions
        if self._asked == len(made):
            parts = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(self._world.ranks)]
            made.append((num_bytes, what, parts))
        size, name, parts = made[self._asked]
        assert (size, name) == (num_bytes, what), "all ranks must make the same regions in the same order"
        self._asked += 1
        return Region(parts[self._rank], tuple(parts[peer].data_ptr() for peer in self._members))

    def barrier(self, what: str) -> None:
        del what
        self._world.barrier(self._rank)

    def pinned_ints(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32)


def _items(op: Op) -> list[Callable[[], Item]]:
    if isinstance(op, Wait):
        return [lambda: Item(lambda: read(op.address) == op.value, lambda: None, f"wait {op.address:x} == {op.value}")]
    if isinstance(op, Write):
        return [lambda: Item(always, lambda: write(op.address, op.value), "write")]
    if isinstance(op, Write64):

        def both() -> None:
            write(op.address, op.value)
            write(op.address + 4, op.upper)

        assert op.address % 8 == 0
        return [lambda: Item(always, both, "write two")]
    assert isinstance(op, Copy)

    def row(i: int) -> Callable[[], Item]:
        target, source = op.target + i * op.target_pitch, op.source + i * op.source_pitch
        return lambda: Item(always, lambda: ctypes.memmove(target, source, op.width), "copy")

    return [row(i) for i in range(op.rows)]
