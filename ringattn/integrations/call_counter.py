"""The number of calls of layers that work over sharded rows: a model whose call adds none did not use the ring."""

from __future__ import annotations

import torch

_num_calls = [0]


def num_sharded_calls() -> int:
    """Return how often a layer that works over sharded rows was called outside of compiled code."""
    return _num_calls[0]


def count_sharded_call() -> None:
    """Count a call of such a layer, outside of compiled code."""
    if not torch.compiler.is_compiling():
        _num_calls[0] += 1
