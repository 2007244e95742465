"""Cache of CUDA graphs of whole calls: a call that comes again with the same tensors is launched as one graph.

Note [Graph cache]
    A short call keeps the host busy longer than the device: it makes half a dozen driver calls. Training steps allocate the
    same sizes in the same order, so the tensors of a layer come back to the same addresses, and the call enqueues the same
    work, bit for bit. So a call that has come SEEN times is captured the next time, and launched as one graph whenever it comes
    again. The semaphores are the same either way, so each rank decides for itself whether it captures a call.
    Two states of the host change from call to call: which buffers of gradients are next, and which padding rows of the remote
    buffer are zero. They select one of the graphs of a call, and each launch updates them.
    A capture takes memory, for which the driver may wait for work in flight. Behind a rank that is lost this work never ends, and
    the watchdog would wait for the driver too. So a capture begins when the stream is idle, or not at all this time.
    A graph holds addresses, so the cache is emptied when a buffer grows or `kv_buffer` makes one. A graph keeps its tables and
    programs alive. Temporary tensors of a captured call live in a memory pool of the ring's graphs (`Streams.record`), which
    share it because all calls of a ring are ordered on the device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ringattn.transport.copy_engine.streams import Program, Streams

CAPACITY = 512
"""Most calls of a ring in the cache."""
FREE = 256
"""Graphs that a ring captures whatever the use of earlier ones."""
WORTH = 4
"""Launches of a graph that repay its capture."""
SEEN = 2
"""Times that a call is enqueued operation by operation before it is captured."""
IDLE_S = 1.0
"""Most seconds that a capture waits for an idle stream."""


@dataclass(eq=False)
class CachedCall:
    """A call with certain tensors, seen at most SEEN times.

    Attributes:
        takes_turn: It uses the next buffers of gradients.
        layout: The layout that it leaves in the remote buffer.
        graphs: Its graphs, by whether padding rows are cleared and by the turn, each with the objects that it keeps alive.
    """

    seen: int = 0
    can_capture: bool = True
    takes_turn: bool = False
    layout: object = None
    graphs: dict[Hashable, tuple[Program, list[Any]]] = field(default_factory=dict)

    def count(self) -> None:
        """Count a call that was enqueued piece by piece."""
        self.seen = min(self.seen + 1, SEEN)


class GraphCache:
    """The cached calls of one ring."""

    def __init__(self) -> None:
        self.captured = self.launched = 0
        self._calls: OrderedDict[Hashable, CachedCall] = OrderedDict()

    def find(self, key: tuple[Hashable, ...], given: Sequence[Tensor], made: Sequence[Tensor]) -> CachedCall:
        """Return the entry of a call, new at its first time; takes arguments of `Transport.replay_or_enqueue`."""
        facts: list[Hashable] = [*key, *[x.data_ptr() for x in made]]
        for x in given:
            facts += (x.data_ptr(), x.shape, x.stride(), x.dtype)
        key = tuple(facts)
        found = self._calls.get(key)
        if found is None:
            found = self._calls[key] = CachedCall()
            if len(self._calls) > CAPACITY:
                self._calls.popitem(last=False)
        else:
            self._calls.move_to_end(key)
        return found

    def graph(
        self,
        call: CachedCall,
        which: Hashable,
        streams: Streams,
        enqueue: Callable[[], object],
        kept: list[Any] | None = None,
    ) -> Program | None:
        """Return a graph of a call, found or captured now, for a launch; None: enqueue the call piece by piece.

        Args:
            call: From `find`.
            which: The state on the host that the graph depends on.
            streams: Captures.
            enqueue: See `find`; captured, it does nothing yet.
            kept: Objects that the graph keeps alive; enqueue may add to it.
        """
        if call.seen < SEEN or not call.can_capture:
            return None
        found = call.graphs.get(which)
        if found is None:
            # addresses may come back a few times and then never again
            if self.captured >= FREE + self.launched // WORTH or not streams.wait_until_idle(IDLE_S):
                return None
            kept = [] if kept is None else kept
            call.can_capture = False
            try:
                program = streams.record(lambda: kept.append(enqueue()))
            except RuntimeError:
                return None  # piece by piece the call may succeed, or raise the error again
            call.can_capture = True
            found = call.graphs[which] = program, kept
            self.captured += 1
        self.launched += 1
        return found[0]

    def clear(self) -> None:
        """Empty the cache."""
        self._calls.clear()
