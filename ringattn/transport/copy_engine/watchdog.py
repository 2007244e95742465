"""Watchdog of a ring: a thread that detects a ring without progress, reports it, and ends its waits with NaN results.

While a ring is healthy the thread calls nothing of CUDA, so that it disturbs neither captures nor speed.

Note [Recovery]
    A ring has failed when it waits and nothing has moved for the ring's timeout. All enqueued work must then end, and leave no
    number that looks like a result. Waits are ended by writing their words; three words of the device keep this in step:
    - `gate`: passed before a flag is raised, an outbox left, or saved rows are complete. Closed at once, here and on every peer,
      because rows that arrive from now on may be of another call, or overwritten: so a peer that is merely slow fails as well.
    - `error`: the error word of the kernels, which read it at the end of each tile. Set at once, here and on every peer, after
      the gates and before any wait for a buffer is ended. So a tile that has read overwritten rows ends in NaN.
    - `proceed`: passed by the caller's stream before each gather and behind each join with other streams or ranks. Closed at once.
    The caller's stream reports its place. While a kernel may be waiting for rows, its flags are made negative and the gate
    stays closed: it ends, in NaN. Everywhere else the other streams run through first, and the gate is closed behind them. Then,
    before the caller's stream may pass a join whose data never arrived, the memory that it would read is set to NaN: this rank's
    own contribution to its gradients, and the buffers that posts receive into. Then it may take one step. So every join finds
    either the data that was sent or NaN. A kernel that has not ended after another timeout, because it cannot start yet, shares the
    device's queues with the other streams: they run through, with the error word set once more.
    The start of the next call resets the error word and lowers all flags; none rises again behind the closed gate. Flags of saved
    rows are made negative before any wait ends. The process group ends a transfer between nodes (`BETWEEN_NODES`).
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ringattn.transport.copy_engine.streams import Streams, Write

# words in host memory; all are written by streams, QUIET by both sides. Neighbouring words are often written together
PLACE, QUIET, COPY, COPY_AT, FLAG, FLAG_AT = range(6)
HOST_INTS = 16

# the place of the caller's stream: the low bits of PLACE. The others are the number of its program
# ELSEWHERE may wait before a gather, once the ring has failed, for `proceed` alone
# BETWEEN_NODES waits for a transfer between nodes, which no semaphore ends
ELSEWHERE, STARTING, KERNEL, JOINING, RECEIVING, FETCHING, BETWEEN_NODES = range(7)
PLACES = 8

# words of the device; POSTED is the first of POSTS. Kernels read ERROR: it is as aligned as what allocators give
GATE, PROCEED, START, DONE, ERROR, FLAG_START, FLAG_DONE, POSTED = range(8)
POSTS = 4
DEVICE_INTS = POSTED + POSTS

NUMBERED = 4096
"""Most programs that the message of a failure can name."""


@dataclass
class ProgramInfo:
    """The waits of a program, for the message of a failure.

    Attributes:
        peers: The ranks that the caller's stream waits for.
        since: The first ring step that it waits for; 0: rows that an earlier call may still read. None: `what` names it.
        stops: (ring step, peer) of each wait of the other stream, in order; `waiting` are the words in front of the peer.
    """

    what: str
    peers: tuple[int, ...] = ()
    since: int | None = 0
    stops: tuple[tuple[int | None, int], ...] = ()
    waiting: str = "waiting for"


@dataclass
class RecoveryAddresses:
    """Every address that recovery must write; code that makes memory adds to it.

    Attributes:
        reusable: Semaphores that the caller's stream waits for before it writes; grad_return: before it reads contributions.
        ready: Semaphores that the other streams wait for before they read rows or raise a flag; turn: before they push.
        flags: (address, number of words) that kernels wait for; raised: of flags that stay raised while the ring is healthy.
        local_grads: (address, bytes) of this rank's contributions; received: of the tensors that posts receive into.
        kept: Memory that captured graphs use.
    """

    gates: set[int] = field(default_factory=set)
    errors: set[int] = field(default_factory=set)
    reusable: set[int] = field(default_factory=set)
    ready: set[int] = field(default_factory=set)
    turn: set[int] = field(default_factory=set)
    grad_return: set[int] = field(default_factory=set)
    flags: set[tuple[int, int]] = field(default_factory=set)
    raised: set[tuple[int, int]] = field(default_factory=set)
    local_grads: set[tuple[int, int]] = field(default_factory=set)
    received: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)


class Watchdog:
    """The watchdog of one ring: reads `progress`, `HOST_INTS` int32 in host memory, and writes the device's words at `control`.

    Attributes:
        infos: The waits of programs, by the number that they write into `PLACE`, `COPY` and `FLAG`.
    """

    def __init__(
        self, rank: int, name: str, progress: Tensor, control: tuple[int, ...], streams: Streams, timeout: float
    ) -> None:
        self._rank = rank
        self._name = name
        self._progress = progress.numpy()
        self._pinned = progress  # the array's memory
        self._control = control
        self._streams = streams
        self._timeout = timeout
        self._seen: tuple[int, ...] = ()
        self._since = 0.0
        self._stepping = False
        self._stuck_since: float | None = None
        self._stopped = False
        self._lock = threading.Lock()
        self.failure: str | None = None
        self.recovery = RecoveryAddresses()
        self.infos: dict[int, ProgramInfo] = {}
        self._numbers = 0

    @property
    def interval(self) -> float:
        """Seconds until the next poll."""
        return 0.002 if self.failure else min(0.5, self._timeout / 8)

    def start(self) -> None:
        """Start the thread, which ends after `stop` once nothing is in flight."""
        threading.Thread(target=self._look, daemon=True, name="ringattn watch").start()

    def stop(self) -> None:
        """End the thread once nothing is in flight: a ring that is dropped may still have work enqueued."""
        self._stopped = True

    def check(self) -> None:
        """Raise RuntimeError if the ring has failed; the message names this rank, the step and the peers."""
        if self.failure is not None:
            raise RuntimeError(self.failure)

    def number(self, info: ProgramInfo) -> int:
        """Return a number for programs that report their progress; the oldest one may be forgotten."""
        self._numbers += 1
        self.infos[self._numbers] = info
        if len(self.infos) > NUMBERED:
            self.infos.pop(next(iter(self.infos)), None)
        return self._numbers

    def poll(self, now: float) -> None:
        """Poll once, at a time in seconds."""
        with self._lock:
            if self.failure is not None:
                self._unblock_streams(now)
                return
            progress = self._progress
            seen = tuple(int(progress[i]) for i in (PLACE, FLAG, FLAG_AT, COPY, COPY_AT))
            waiting = self._is_copying() or seen[0] % PLACES not in (ELSEWHERE, KERNEL)
            if not waiting or not progress[QUIET] or seen != self._seen:
                self._seen, self._since = seen, now
                progress[QUIET] = 1
            elif now - self._since > self._timeout:
                # no wait ends before the next poll: a stream that passes `proceed` now has reported its place by then
                self._fail(seen, f"nothing has moved for {self._timeout:g} s")

    def _is_copying(self) -> bool:
        """Return whether another stream than the caller's has work in flight."""
        return bool(self._progress[COPY] or self._progress[FLAG])

    def _describe(self, seen: tuple[int, ...]) -> str:
        """Return the call without progress, and the ranks that it waits for."""
        place, flag_stream, flag_at, copy_stream, copy_at = seen
        # a wait between nodes is the reason for waits of the other streams, if there are any
        progress_by_stream = () if place % PLACES == BETWEEN_NODES else ((flag_stream, flag_at), (copy_stream, copy_at))
        beside = [(info, at) for number, at in progress_by_stream if (info := self.infos.get(number)) is not None]
        # missing rows are named before rows that peers have not read
        for info, at in beside:
            if at < len(info.stops):
                step, peer = info.stops[at]
                return f"{info.what}: {'' if step is None else f'ring step {step}, '}{info.waiting} ring rank {peer}"
        info = beside[0][0] if beside else self.infos.get(place // PLACES)
        if info is None:
            return "a call"
        if not info.peers:
            return info.what
        since = "" if info.since is None else f"from ring step {info.since} on, "
        return f"{info.what}: {since}waiting for ring ranks {list(info.peers)}"

    def _fail(self, seen: tuple[int, ...], why: str) -> None:
        text = (
            f"ring rank {self._rank} of ring {self._name!r}: {self._describe(seen)}: {why}; look for an earlier error on the "
            "ranks named (results since then are NaN, and this ring can not be used any more)"
        )
        # first: a driver that is stuck as well never returns from what follows
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
        # all of it, in this order, before the failure is published
        with self._recording_failure():
            gates = (self._control[GATE], *self.recovery.gates)
            errors = (self._control[ERROR], *self.recovery.errors)
            raised = [address + 4 * i for address, count in list(self.recovery.raised) for i in range(count)]
            closed = [Write(word, 0) for word in (self._control[PROCEED], *gates)]
            negative = [Write(address, -1) for address in raised]
            self._streams.rescue([*closed, *negative, *(Write(word, 1) for word in errors)])
        self.failure = text

    def _unblock_streams(self, now: float) -> None:
        """Take one step of Note [Recovery]."""
        here, gate, proceed = self.recovery, self._control[GATE], self._control[PROCEED]
        with self._recording_failure():
            if self._stepping:
                # semaphores that no stream waited for must not end a later wait
                self._stepping = False
                self._streams.rescue([Write(proceed, 0), *(Write(word, 0) for word in list(here.grad_return))])
            place = int(self._progress[PLACE]) % PLACES
            if place != KERNEL:
                self._stuck_since = None
            elif self._stuck_since is None:
                self._stuck_since = now
            if place == KERNEL and now - (self._stuck_since or now) <= self._timeout:
                flags = [(address + 4 * i) for address, count in list(here.flags) for i in range(count)]
                self._streams.rescue([Write(address, -1) for address in flags])
                return
            if self._is_copying():
                # packing in front of a kernel that has yet to start may have reset the error word
                opened = (self._control[ERROR], *list(here.ready), *list(here.turn), gate)
                self._streams.rescue([Write(word, 1) for word in opened])
                return
            self._streams.rescue([Write(gate, 0)])
            if place in (KERNEL, BETWEEN_NODES) or self._is_copying():
                return  # it has more to do, or no semaphore ends its wait
            if place == RECEIVING:
                for address, num_bytes in list(here.local_grads):
                    self._streams.fill(address, num_bytes)
            if place in (JOINING, RECEIVING, FETCHING):
                for address, num_bytes in list(here.received):
                    self._streams.fill(address, num_bytes)
            waits = {STARTING: here.reusable, RECEIVING: here.grad_return}.get(place, set())
            self._stepping = True
            self._streams.rescue([*(Write(word, 1) for word in list(waits)), Write(proceed, 1)])

    @contextlib.contextmanager
    def _recording_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # the device itself has failed, and its waits end
            self.failure = self.failure or f"ring rank {self._rank}: the device of ring {self._name!r} failed ({error})"

    def _look(self) -> None:
        while True:
            time.sleep(self.interval)
            self.poll(time.monotonic())
            if self._stopped and not self._is_copying() and self._progress[PLACE] % PLACES == ELSEWHERE:
                return
