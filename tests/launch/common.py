"""Helpers for tests of several commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringattn.kernels.attention.eager import EagerKernels
from ringattn.kernels.interface import Step
from ringattn.plan.layouts import make_shards
from ringattn.plan.sharding import Sharding
from tests.support.short_mask import ShortMask

ROOT = Path(__file__).parents[2]


TINY = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--dtype", "fp32"]


def _off_by_a_little(forward: Callable[[EagerKernels, Step], None]) -> Callable[[EagerKernels, Step], None]:
    def wrong(kernels: EagerKernels, step: Step) -> None:
        forward(kernels, step)
        step.o.mul_(1.001)

    return wrong


class FakeRing:
    """Ring of ranks that do not exist, for its shardings."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def sharding(self, seq_len: int, layout: str, documents: Any = None, balance: Any = None) -> Any:
        options: dict[str, Any] = balance or {"causal": True}
        mask = ShortMask(seq_len, seq_len, documents=documents, **options)
        return Sharding(seq_len, layout, make_shards(layout, seq_len, self.world_size, mask), 0, documents)
