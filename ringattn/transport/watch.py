"""Nobody waits for ever: a thread that sees a ring standing still, says so, and lets what waits end in NaN.

Owns the words in host memory that streams write as they go, the decision that a ring has failed, and the way out. Refuses to
know how rows move. While a ring is healthy the thread reads and writes host memory and calls nothing of CUDA, so that it
disturbs neither captures nor speed.

Note [The way out]
    A ring has failed when it waits and nothing has moved for the ring's timeout.
    What is enqueued must then come to an end, and no number it leaves may look like a result. Waits are let go by writing
    their words; two words of the device keep this in step:
    - `gate`: the side stream passes it after a pull and before it says that rows are there. Closed at once, here and on
      every peer: a peer that is merely slow must not take rows that this rank is about to overwrite, so it fails as well.
    - `proceed`: the caller's stream passes it behind each join with the side stream or with other ranks. Closed at once.
    The caller's stream writes its `place` as it goes. While a kernel may be waiting for rows, its flags are made negative and
    the gate stays closed: it ends, in NaN. Everywhere else the side stream is let run through first, and the gate is closed
    behind it. Then, before the caller's stream may pass a join whose data never came, what it would read is set to NaN: this
    rank's own contribution to its gradients, and the buffers that posts receive into. Then it may take one step. So the gate
    is never open while a kernel waits, and every join finds either what was sent or NaN.

    A transfer between nodes (`CROSSING`) is not let go by words: the process group ends it, within its own timeout. The watch says
    which one it was, and lets the ranks of the node fail with this one.
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

from ringattn.transport.streams import Streams, Write

# words in host memory; all are written by streams, QUIET by both sides
PLACE, SIDE, SIDE_AT, QUIET = range(4)
HOST_WORDS = 16

# where the caller's stream is: the low bits of PLACE. The others name the course it is on
# ENTERING waits for peers too, but a kernel comes next whose rows are already on their way
# CROSSING waits for a transfer between nodes, which no word lets go
ELSEWHERE, STARTING, KERNEL, JOINING, RECEIVING, FETCHING, ENTERING, CROSSING = range(8)
PLACES = 8

GATE, PROCEED, START, DONE, POSTED = range(5)  # words of the device; POSTED is the first of POSTS
POSTS = 4
DEVICE_WORDS = POSTED + POSTS


@dataclass
class Course:
    """What a program waits for, for the message of a failure.

    Attributes:
        what: The call.
        peers: Whom the caller's stream waits for.
        since: The first ring step of what it waits for; 0: of rows that an earlier call may still read. None: `what` says it.
        stops: (ring step, peer) of each pull of the side stream, in order.
    """

    what: str
    peers: tuple[int, ...] = ()
    since: int | None = 0
    stops: tuple[tuple[int | None, int], ...] = ()


@dataclass
class Territory:
    """Every address that the way out must know; whoever makes memory adds to it.

    Attributes:
        gates: Of the peers.
        free: Words that the caller's stream waits for before it writes.
        full: Words that the side stream waits for before it pulls.
        home: Words that the caller's stream waits for before it reads contributions.
        flags: (address, number of words) that kernels wait for.
        raised: Likewise, of flags that are raised as long as the ring is healthy.
        own: (address, bytes) of this rank's contributions.
        received: What posts receive into, by (address, bytes).
        kept: Alive for as long as the ring: memory that captured graphs use.
    """

    gates: set[int] = field(default_factory=set)
    free: set[int] = field(default_factory=set)
    full: set[int] = field(default_factory=set)
    home: set[int] = field(default_factory=set)
    flags: set[tuple[int, int]] = field(default_factory=set)
    raised: set[tuple[int, int]] = field(default_factory=set)
    own: set[tuple[int, int]] = field(default_factory=set)
    received: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)


class Watch:
    """Looks at one ring.

    Args:
        rank: This rank.
        name: The ring's name.
        words: `HOST_WORDS` int32 in host memory that the device can write.
        control: Addresses of the words of this device, by `GATE` ...
        streams: The way to the device.
        timeout: Seconds that a ring may stand still.

    Attributes:
        failure: Why the ring has failed; None while it is healthy.
        territory: What the way out must know.
        courses: What programs wait for, by the number that they write into `PLACE` and `SIDE`.
    """

    def __init__(
        self, rank: int, name: str, words: Tensor, control: tuple[int, ...], streams: Streams, timeout: float
    ) -> None:
        self._rank = rank
        self._name = name
        self._words = words.numpy()
        self._keep = words
        self._control = control
        self._streams = streams
        self._timeout = timeout
        self._seen: tuple[int, ...] = ()
        self._since = 0.0
        self._stepping = False
        self._stuck_since: float | None = None
        self._retired = False
        self._lock = threading.Lock()
        self.failure: str | None = None
        self.territory = Territory()
        self.courses: dict[int, Course] = {}

    @property
    def interval(self) -> float:
        """Seconds until the next look."""
        return 0.002 if self.failure else min(0.5, self._timeout / 8)

    def start(self) -> None:
        """Begins to look, in a thread that ends when it is told to retire and nothing is under way."""
        threading.Thread(target=self._look, daemon=True, name="ringattn watch").start()

    def retire(self) -> None:
        """Tells the thread to end once nothing is under way: a ring that is dropped may still have work enqueued."""
        self._retired = True

    def check(self) -> None:
        """Raises if the ring has failed.

        Raises:
            RuntimeError: It has; the message names this rank, the step and the peers.
        """
        if self.failure is not None:
            raise RuntimeError(self.failure)

    def poll(self, now: float) -> None:
        """One look.

        Args:
            now: The time, in seconds.
        """
        with self._lock:
            if self.failure is not None:
                self._let_out(now)
                return
            words = self._words
            seen = (int(words[PLACE]), int(words[SIDE]), int(words[SIDE_AT]))
            waiting = seen[1] != 0 or seen[0] % PLACES not in (ELSEWHERE, KERNEL)
            if not waiting or not words[QUIET] or seen != self._seen:
                self._seen, self._since = seen, now
                words[QUIET] = 1
            elif now - self._since > self._timeout:
                self._fail(seen, f"nothing has moved for {self._timeout:g} s", now)

    def _fail(self, seen: tuple[int, ...], why: str, now: float) -> None:
        place, side, side_at = seen
        if place % PLACES == CROSSING:
            side = 0  # what pulls waits for this
        course = self.courses.get(side) if side else self.courses.get(place // PLACES)
        about = "a call"
        if course is not None:
            about = course.what
            stop = course.stops[side_at] if side and side_at < len(course.stops) else None
            if stop is not None:
                step = "" if stop[0] is None else f"ring step {stop[0]}, "
                about += f": {step}waiting for ring rank {stop[1]}"
            elif course.peers:
                since = "" if course.since is None else f"from ring step {course.since} on, "
                about += f": {since}waiting for ring ranks {list(course.peers)}"
        text = (
            f"ring rank {self._rank} of ring {self._name!r}: {about}: {why}; look for an earlier error on the ranks named "
            "(results since then are NaN, and this ring can not be used any more)"
        )
        # both closed before anybody is told that there is a failure to get out of
        with self._last_resort():
            gates = (self._control[GATE], *self.territory.gates)
            raised = [address + 4 * i for address, count in list(self.territory.raised) for i in range(count)]
            closed = [Write(word, 0) for word in (self._control[PROCEED], *gates)]
            self._streams.rescue([*closed, *(Write(address, -1) for address in raised)])
        self.failure = text
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
        self._let_out(now)

    def _let_out(self, now: float) -> None:
        """One step of the way out (Note [The way out])."""
        here, gate, proceed = self.territory, self._control[GATE], self._control[PROCEED]
        with self._last_resort():
            if self._stepping:
                # words that were let go and found nobody waiting must not let anybody go later
                self._stepping = False
                self._streams.rescue([Write(proceed, 0), *(Write(word, 0) for word in list(here.home))])
            place = int(self._words[PLACE]) % PLACES
            if place != KERNEL:
                self._stuck_since = None
            elif self._stuck_since is None:
                self._stuck_since = now
            if place == KERNEL and now - (self._stuck_since or now) <= self._timeout:
                flags = [(address + 4 * i) for address, count in list(here.flags) for i in range(count)]
                self._streams.rescue([Write(address, -1) for address in flags])
                return
            if self._words[SIDE] and place != ENTERING:
                self._streams.rescue([Write(word, 1) for word in (*list(here.full), gate)])
                return
            self._streams.rescue([Write(gate, 0)])
            if place in (ELSEWHERE, KERNEL, CROSSING) or (self._words[SIDE] and place != ENTERING):
                return  # it had more to do, or nothing here lets it go
            if place == RECEIVING:
                for address, num_bytes in list(here.own):
                    self._streams.fill(address, num_bytes)
            if place in (JOINING, FETCHING):
                for address, num_bytes in list(here.received):
                    self._streams.fill(address, num_bytes)
            let_go = {STARTING: here.free, ENTERING: here.free, RECEIVING: here.home}.get(place, set())
            self._stepping = True
            self._streams.rescue([*(Write(word, 1) for word in list(let_go)), Write(proceed, 1)])

    @contextlib.contextmanager
    def _last_resort(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # the device itself has failed: its waits end with it
            self.failure = self.failure or f"ring rank {self._rank}: the device of ring {self._name!r} failed ({error})"

    def _look(self) -> None:
        while True:
            time.sleep(self.interval)
            self.poll(time.monotonic())
            if self._retired and not self._words[SIDE] and self._words[PLACE] % PLACES == ELSEWHERE:
                return
