"""Which rank holds which positions of a sequence.

Owns `Run` and the layouts (contiguous, striped, zigzag, balanced) as pure integer functions. Refuses to know tensors,
groups and masks (balanced is told the work of a stretch of queries, not why). Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Run:
    """Positions `start + stride * i` for `0 <= i < length`."""

    start: int
    stride: int
    length: int


Shard = tuple[Run, ...]
