"""Nobody waits for ever: a thread that sees a ring standing still, says so, and lets what waits end in NaN.

Owns the words in host memory that streams write as they go, the decision that a ring has failed, and the way out. Refuses to
know how rows move. While a ring is healthy the thread reads and writes host memory and calls nothing of CUDA, so that it
disturbs neither captures nor speed.

Note [The way out]
    A ring has failed when it waits and nothing has moved for the ring's timeout.
    What is enqueued must then come to an end, and no number it leaves may look like a result. Waits are let go by writing
    their words; three words of the device keep this in step:
    - `gate`: nothing says here that rows are there but behind it: a flag is raised, and an outbox left, once it is open.
      Closed at once, here and on every peer: what comes from now on may be of another call, or overwritten, so a peer that
      is merely slow fails as well.
    - `error`: the error word of the kernels. Set at once, here and on every peer, behind the gates.
    - `proceed`: the caller's stream passes it before each gather and behind each join with other streams or other ranks. Closed
      at once.
    The caller's stream writes its `place` as it goes. While a kernel may be waiting for rows, its flags are made negative and
    the gate stays closed: it ends, in NaN. Everywhere else the streams beside it are let run through first, and the gate is
    closed behind them. Then, before the caller's stream may pass a join whose data never came, what it would read is set to
    NaN: this rank's own contribution to its gradients, and the buffers that posts receive into. Then it may take one step. So
    the gate is never open while a kernel waits, and every join finds either what was sent or NaN.

Note [A push that was let go]
    A push waits for room at a reader that may be slow, not dead: its kernel of the call before may still read the rows that
    are about to be overwritten. By then the reader's gate has been closed and its error word set, in this order, and each was
    visible everywhere before the next and before any wait for room was let go. A kernel looks at the error word at the end of
    each tile. So a tile that has read a row of the wrong call ends in NaN, and one that ended before has read none.
    The error word is reset by the start of the reader's next call. That loses nothing: the kernel of the call before has ended,
    and the gate is closed. What a gate has let through was there before it was closed,
    and the start lowers every flag: none rises again, the next kernel that reads rows of others waits for one, and this
    reader fails as well. Opened again it is by its own watch alone, while no kernel waits. If the word is set behind the
    start, the kernel ends in NaN for nothing. A call that reads nothing of others is right. A copy of rows to keep ends in
    front of the gate: if they were overwritten, it is closed, and the join behind it is passed once the flags of what is kept
    are negative.

    A transfer between nodes (`BETWEEN_NODES`) is not released by semaphores: the process group ends it, within its own timeout. The
    watchdog says which one it was, and lets the ranks of the node fail with this one.
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

# words in host memory; all are written by streams, QUIET by both sides. Neighbours are often written together
PLACE, QUIET, COPY, COPY_AT, FLAG, FLAG_AT = range(6)
HOST_INTS = 16

# where the caller's stream is: the low bits of PLACE. The others name the course it is on
# ELSEWHERE may wait before a gather, once the ring has failed: it is let go like all who wait for nothing but that
# CROSSING waits for a transfer between nodes, which no word lets go
ELSEWHERE, STARTING, KERNEL, JOINING, RECEIVING, FETCHING, BETWEEN_NODES = range(7)
PLACES = 8

# words of the device; POSTED is the first of POSTS. Kernels read ERROR: it is as aligned as what allocators give
GATE, PROCEED, START, DONE, ERROR, FLAG_START, FLAG_DONE, POSTED = range(8)
POSTS = 4
DEVICE_INTS = POSTED + POSTS

NUMBERED = 4096
"""Courses that the message of a failure can name."""


@dataclass
class ProgramInfo:
    """What a program waits for, for the message of a failure.

    Attributes:
        what: The call.
        peers: Whom the caller's stream waits for.
        since: The first ring step of what it waits for; 0: of rows that an earlier call may still read. None: `what` says it.
        stops: (ring step, peer) of each wait of a stream beside the caller's, in order.
        waiting: What for, in front of the peer.
    """

    what: str
    peers: tuple[int, ...] = ()
    since: int | None = 0
    stops: tuple[tuple[int | None, int], ...] = ()
    waiting: str = "waiting for"


@dataclass
class RecoveryAddresses:
    """Every address that the way out must know; whoever makes memory adds to it.

    Attributes:
        gates: Of the peers.
        errors: Likewise, the error words of kernels.
        reusable: Words that the caller's stream waits for before it writes.
        ready: Words that the streams beside it wait for before they read rows or say that they are there.
        turn: Words that the side stream waits for before it pushes.
        grad_return: Words that the caller's stream waits for before it reads contributions.
        flags: (address, number of words) that kernels wait for.
        raised: Likewise, of flags that are raised as long as the ring is healthy.
        local_grads: (address, bytes) of this rank's contributions.
        received: What posts receive into, by (address, bytes).
        kept: Alive for as long as the ring: memory that captured graphs use.
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
    """Looks at one ring.

    Args:
        rank: This rank.
        name: The ring's name.
        progress: `HOST_INTS` int32 in host memory that the device can write.
        control: Addresses of the words of this device, by `GATE` ...
        streams: The way to the device.
        timeout: Seconds that a ring may stand still.

    Attributes:
        failure: Why the ring has failed; None while it is healthy.
        recovery: What the way out must know.
        infos: What programs wait for, by the number that they write into `PLACE`, `COPY` and `FLAG`.
    """

    def __init__(
        self, rank: int, name: str, progress: Tensor, control: tuple[int, ...], streams: Streams, timeout: float
    ) -> None:
        self._rank = rank
        self._name = name
        self._progress = progress.numpy()
        self._keep = progress
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
        """Seconds until the next look."""
        return 0.002 if self.failure else min(0.5, self._timeout / 8)

    def start(self) -> None:
        """Begins to look, in a thread that ends when it is told to retire and nothing is under way."""
        threading.Thread(target=self._look, daemon=True, name="ringattn watch").start()

    def stop(self) -> None:
        """Tells the thread to end once nothing is under way: a ring that is dropped may still have work enqueued."""
        self._stopped = True

    def check(self) -> None:
        """Raises if the ring has failed.

        Raises:
            RuntimeError: It has; the message names this rank, the step and the peers.
        """
        if self.failure is not None:
            raise RuntimeError(self.failure)

    def number(self, info: ProgramInfo) -> int:
        """The number by which programs say that they are on a course; the oldest one may be forgotten."""
        self._numbers += 1
        self.infos[self._numbers] = info
        if len(self.infos) > NUMBERED:
            self.infos.pop(next(iter(self.infos)), None)
        return self._numbers

    def poll(self, now: float) -> None:
        """One look.

        Args:
            now: The time, in seconds.
        """
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
                # nobody is let go before the next look: whoever passes `proceed` at this moment has written its place by then
                self._fail(seen, f"nothing has moved for {self._timeout:g} s")

    def _is_copying(self) -> bool:
        """Whether a stream beside the caller's is under way."""
        return bool(self._progress[COPY] or self._progress[FLAG])

    def _describe(self, seen: tuple[int, ...]) -> str:
        """Which call stands still, and whom it waits for."""
        place, flag_stream, herald_at, copy_stream, side_at = seen
        # who waits for another node is not waited for by its own streams, but for a reason
        progress_by_stream = (
            () if place % PLACES == BETWEEN_NODES else ((flag_stream, herald_at), (copy_stream, side_at))
        )
        beside = [(info, at) for number, at in progress_by_stream if (info := self.infos.get(number)) is not None]
        # what others do not bring comes before what they do not take
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
        # all of it, in this order, before anybody is told that there is a failure to get out of
        with self._recording_failure():
            gates = (self._control[GATE], *self.recovery.gates)
            errors = (self._control[ERROR], *self.recovery.errors)
            raised = [address + 4 * i for address, count in list(self.recovery.raised) for i in range(count)]
            closed = [Write(word, 0) for word in (self._control[PROCEED], *gates)]
            negative = [Write(address, -1) for address in raised]
            self._streams.rescue([*closed, *negative, *(Write(word, 1) for word in errors)])
        self.failure = text
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def _unblock_streams(self, now: float) -> None:
        """One step of the way out (Note [The way out])."""
        here, gate, proceed = self.recovery, self._control[GATE], self._control[PROCEED]
        with self._recording_failure():
            if self._stepping:
                # words that were let go and found nobody waiting must not let anybody go later
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
                self._streams.rescue([Write(word, 1) for word in (*list(here.ready), *list(here.turn), gate)])
                return
            self._streams.rescue([Write(gate, 0)])
            if place in (KERNEL, BETWEEN_NODES) or self._is_copying():
                return  # it had more to do, or nothing here lets it go
            if place == RECEIVING:
                for address, num_bytes in list(here.local_grads):
                    self._streams.fill(address, num_bytes)
            if place in (JOINING, RECEIVING, FETCHING):
                for address, num_bytes in list(here.received):
                    self._streams.fill(address, num_bytes)
            let_go = {STARTING: here.reusable, RECEIVING: here.grad_return}.get(place, set())
            self._stepping = True
            self._streams.rescue([*(Write(word, 1) for word in list(let_go)), Write(proceed, 1)])

    @contextlib.contextmanager
    def _recording_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # the device itself has failed: its waits end with it
            self.failure = self.failure or f"ring rank {self._rank}: the device of ring {self._name!r} failed ({error})"

    def _look(self) -> None:
        while True:
            time.sleep(self.interval)
            self.poll(time.monotonic())
            if self._stopped and not self._is_copying() and self._progress[PLACE] % PLACES == ELSEWHERE:
                return
