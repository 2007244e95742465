"""In place of CUDA graphs, where there are none: a recorder that makes a call again, over the same tensors."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ringattn.transport.timeout import EventPair


class Reruns:
    """Makes a recorded call again; its result lies at one address, and is NaN until the first replay.

    Args:
        stuck: Replays give other numbers, as those of a graph do that holds a number of its first call.
        fails: The how manieth recording fails, from 1.
    """

    def __init__(self, stuck: bool = False, fails: int | None = None) -> None:
        self.stuck, self.fails = stuck, fails
        self.records = self.replays = 0
        self.shapes: list[tuple[int, ...]] = []

    def capture(self, call: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], EventPair | None]]:
        self.records += 1
        out = call().clone()
        if self.records == self.fails:
            from ringattn.integrations.transformers.cuda_graph_runner import CaptureError

            raise CaptureError("the model looks at numbers")
        self.shapes.append(tuple(out.shape[:2]))
        out.fill_(math.nan)

        def replay() -> EventPair | None:
            self.replays += 1
            # also what is wrong takes part in exchanges
            found = call()
            out.copy_(torch.ones_like(found) if self.stuck else found)
            return self.events()

        return out, replay

    def events(self) -> EventPair | None:
        """Where a replay begins and ends: it is over."""
        return None


class Passed:
    """A mark that the device has passed, or never will."""

    def __init__(self, passed: bool) -> None:
        self.passed = passed

    def query(self) -> bool:
        return self.passed


class Hung(Reruns):
    """Replays of which one begins and does not end, as when a rank has died.

    Args:
        good: How many end.
    """

    def __init__(self, good: int = 0) -> None:
        super().__init__()
        self.good = good

    def events(self) -> EventPair:
        return EventPair(Passed(True), Passed(self.replays <= self.good))
