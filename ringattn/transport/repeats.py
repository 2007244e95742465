"""Calls that come again with the same tensors, each as one graph.

Owns the table of calls by what they are given, when one is recorded, and what lives as long as its graph. Refuses to know what a
call enqueues, and how a graph is made.

Note [Repeats]
    A short call keeps the host longer than the device: half a dozen calls of the driver, each after what it takes to find out
    what to enqueue. The steps of a training take their memory from an allocator that does the same each time, so a layer's
    tensors come back to the same addresses, and with them all that its call enqueues is the same to the bit. So a call that has
    come twice is captured the third time, as a caller could capture it (`Ring` in a CUDA graph), and launched as one graph
    whenever it comes again. Between ranks the same words are said: whether a rank repeats a call or enqueues it anew is
    its own affair. What a call changes on the host (whose turn it is at homecomings, which guard rows of far are zero) decides
    which of its graphs is launched, and is changed by each launch.
    A graph says addresses. So it goes when any buffer grows, or one is lent, and keeps alive what it reads: tables, programs, and
    the rooms of launches (`Lease`), which all calls of a ring share, since they are ordered on the device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ringattn.kernels.contract import Lease
from ringattn.transport.streams import Program

REPEATS = 512
"""Calls that a ring remembers."""
FREE = 256
"""Graphs that a ring makes without asking whether earlier ones were worth it."""
WORTH = 4
"""Launches of a graph that repay what it takes to make it."""
SEEN = 2
"""Times that a call is enqueued piece by piece before it is recorded."""


@dataclass(eq=False)
class Repeat:
    """A call with certain tensors.

    Attributes:
        held: What its key names by identity.
        seen: How often it has come, at most SEEN.
        whole: It can be recorded, as far as is known.
        turns: It takes a turn at homecomings.
        layout: What it leaves in far.
        graphs: What it comes down to, by whether guard rows are cleared, and by the turn; and what lives as long.
    """

    held: tuple[Any, ...]
    seen: int = 0
    whole: bool = True
    turns: bool = False
    layout: object = None
    graphs: dict[tuple[bool, int], tuple[Program, list[Any]]] = field(default_factory=dict)


class Repeats:
    """Those of one ring.

    Attributes:
        lease: What recorded launches take rooms of.
        recorded: Graphs that were made.
        launched: How often graphs were launched.
    """

    def __init__(self) -> None:
        self.lease = Lease()
        self.recorded = self.launched = 0
        self._known: OrderedDict[Hashable, Repeat] = OrderedDict()

    def find(
        self, key: tuple[Hashable, ...], given: Sequence[Tensor], made: Sequence[Tensor], held: tuple[Any, ...]
    ) -> Repeat:
        """What is known of a call: takes arguments of `Gatherer.repeat`."""
        facts: list[Hashable] = [*key, *[x.data_ptr() for x in made]]
        for x in given:
            facts += (x.data_ptr(), x.shape, x.stride(), x.dtype)
        key = tuple(facts)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Repeat(held)
            if len(self._known) > REPEATS:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
        return found

    def repay(self) -> bool:
        """Whether making one more graph is likely to: memory may come back a few times and then never again."""
        return self.recorded < FREE + self.launched // WORTH

    def forget(self) -> None:
        """All calls are new again."""
        self._known.clear()
