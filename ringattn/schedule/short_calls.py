"""Short calls: the device may finish before the host has enqueued them, so they are replayed as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from torch import Tensor

from ringattn.kernels.interface import Score
from ringattn.schedule.execution_plan import ExecutionPlan
from ringattn.transport.base import Transport


def enqueue_or_replay(
    transport: Transport,
    plan: ExecutionPlan,
    is_short: bool,
    key: tuple[Hashable, ...],
    score: Score,
    given: tuple[Tensor, ...],
    made: tuple[Tensor, ...],
    enqueue: Callable[[], object],
) -> None:
    """Enqueue one direction of a call, or replay it as a graph where it is short and its kernels and options allow it."""
    # biases are no part of the key, and a seed is another one each time
    varies = score.key_bias is not None or score.bias is not None or score.dropout_p > 0
    if not is_short or varies or not plan.kernels.can_capture():
        enqueue()
        return
    key = (*key, id(plan), score.sinks is None, score.alibi_slopes is None)
    given += present(score.sinks) + present(score.alibi_slopes)
    transport.replay_or_enqueue(key, given, made, enqueue, (plan,))


def present(x: Tensor | None) -> tuple[Tensor, ...]:
    """Return the tensor as a tuple; empty where there is none."""
    return () if x is None else (x,)
