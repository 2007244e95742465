"""Ranks that make calls in another order, or with other dropout seeds, raise on every rank."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import Ring, ring_attention
from ringattn.tensor_checks import BatchDigest
from ringattn.transport.call_order import FORWARD, CallMark, CallOrder
from ringattn.transport.consensus import RankConsensus
from ringattn.transport.process_group import ProcessGroupTransport
from tests.support.pool import Pools

CALL = r"ring_attention\(12 tokens, zigzag{}\), digest [0-9a-f]{{6}}"
CPU = torch.device("cpu")
CAUSAL, WINDOW = CALL.format(r", causal=True"), CALL.format(r", causal=True, window=\(2, 0\)")


def attend(ring: Ring, **options: Any) -> Tensor:
    sharding = ring.sharding(12)
    x = torch.ones(1, sharding.shard_len, 2, 16, requires_grad=True)
    return ring_attention(x, x, x, sharding, **{"causal": True, **options})


def attempt(call: Any) -> str:
    """The error of a call, or nothing."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def call_in_another_order(kind: str) -> tuple[str, str]:
    """The error of a rank where rank 1 makes two calls that all ranks know in another order, and of the same call later."""
    ring = Ring(timeout=timedelta(seconds=20))
    calls = [lambda: attend(ring), lambda: attend(ring, window=3)]
    for call in calls:
        call().sum().backward()
    if kind == "backward":
        made = [attend(ring), attend(ring)]
        calls = [lambda: made[0].sum().backward(), lambda: made[1].sum().backward()]

    def both() -> None:
        for call in reversed(calls) if ring.rank == 1 else calls:
            call()

    return attempt(both), attempt(lambda: attend(ring))


@pytest.mark.parametrize(
    ("kind", "usual", "other", "number"),
    [
        ("forward", CAUSAL, WINDOW, 5),
        ("backward", f"the backward of call 5, {CAUSAL}", f"the backward of call 6, {CAUSAL}", 7),
    ],
)
def test_calls_of_equal_size_in_another_order_are_refused(
    pool: Pools, kind: str, usual: str, other: str, number: int
) -> None:
    message = (
        rf"all ranks must make the same calls in the same order, got {usual} on ring ranks \[0, 2\] and {other} on ring ranks "
        rf"\[1\] as call {number} of the ring"
    )
    for said, after in pool(3).run(call_in_another_order, kind):
        assert re.match(message, said), said
        assert after == ""


class Silent(ProcessGroupTransport):
    """Moves no marks, as NCCL."""

    def sends_marks(self, device: torch.device) -> bool:
        del device
        return False


def mark_in_another_order(kind: str) -> tuple[int, str]:
    """How many calls a rank makes before it raises, and the error, where marks do not travel with rows."""
    ring = Ring(timeout=timedelta(seconds=20))
    consensus = ring._consensus
    assert isinstance(consensus, RankConsensus)
    order = CallOrder(consensus, Silent("", ring.rank, ring.world_size))
    wrong = ring.rank == 1
    for number in range(1, 10_000):
        call, seed = (number, 0) if number % 2 else (2, 7)
        if kind == "order" and wrong and number in (1029, 1030):
            call = 2059 - number
        if kind == "seed" and wrong and number == 6:
            seed = 8
        said = attempt(lambda call=call, seed=seed: order.begin(CallMark(call, f"call {call}"), seed, FORWARD, CPU))
        if said:
            return number, said
    return 0, ""


@pytest.mark.parametrize(
    ("kind", "number", "message"),
    [
        (
            "seed",
            8,
            "call 2 with dropout_seed=7 on ring ranks [0, 2] and call 2 with dropout_seed=8 on ring ranks [1] as call 6",
        ),
        ("order", 2048, "call 1029 on ring ranks [0, 2] and call 1030 on ring ranks [1] as call 1029 of the ring"),
    ],
)
def test_ranks_that_cannot_send_marks_compare_them_later(pool: Pools, kind: str, number: int, message: str) -> None:
    for found, said in pool(3).run(mark_in_another_order, kind):
        assert found == number
        assert f"all ranks must make the same calls in the same order, got {message}" in said


def attend_with_other_seeds(backward: str, known: bool) -> str:
    ring = Ring(timeout=timedelta(seconds=20))
    if known:
        attend(ring, dropout_p=0.5, dropout_seed=1, backward=backward).sum().backward()
    return attempt(lambda: attend(ring, dropout_p=0.5, dropout_seed=2 + ring.rank, backward=backward))


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("backward", ["auto", "queries"])
def test_dropout_seeds_that_differ_are_refused(pool: Pools, backward: str, known: bool) -> None:
    for said in pool(2).run(attend_with_other_seeds, backward, known):
        assert "dropout_seed" in said
        assert "2" in said
        assert "3 on ring rank 1" in said or "dropout_seed=3 on ring ranks [1]" in said


class OnItsWay(BatchDigest):
    """The digest of a batch of a GPU, which may be read when the next batch has come."""

    def __init__(self, number: int, newest: list[BatchDigest]) -> None:
        self.is_late, self._late_number, self._newest = True, number, newest

    def number(self) -> int:
        assert self._newest[-1] is not self, "the host would wait for the GPU"
        return self._late_number


def mark_batches_of_a_gpu() -> tuple[int, str]:
    """How many calls a rank makes, two for each batch, before it raises because rank 1 has had another third batch."""
    ring = Ring(timeout=timedelta(seconds=60))
    consensus = ring._consensus
    assert isinstance(consensus, RankConsensus)
    order = CallOrder(consensus, Silent("", ring.rank, ring.world_size))
    batches: list[BatchDigest] = []
    for number in range(1, 100):
        if number % 2:
            batches.append(OnItsWay(-1 if number == 5 and ring.rank else number, batches))
        said = attempt(lambda: order.begin(CallMark(1, "a call"), 0, FORWARD, CPU, batches[-1]))
        if said:
            return number, said
    return 0, ""


def test_batches_of_a_gpu_are_compared_without_waiting_for_it(pool: Pools) -> None:
    for found, said in pool(2).run(mark_batches_of_a_gpu):
        assert found == 8
        assert "the batch must be the same on all ranks of a ring" in said
        assert "as call 7 of the ring; give all ranks of a ring the same sequence" in said


def attend_to_batches(number: int) -> list[str]:
    """Errors of calls with a sharding of one object, of whose batches rank 1 has had another one."""
    ring = Ring(timeout=timedelta(seconds=60))
    sharding, errors = ring.sharding(8), []
    for step in range(3):
        tokens = torch.arange(8) + (step == number and ring.rank)
        x = torch.ones(1, sharding.shard_len, 1, 16)
        errors.append(attempt(lambda: ring_attention(x, x, x, sharding.for_batch(tokens))))  # noqa: B023
    return errors


def test_the_batch_of_a_loop_of_ones_own_is_compared(pool: Pools) -> None:
    for first, second, third in pool(2).run(attend_to_batches, 1):
        assert first == third == ""
        assert "the batch must be the same on all ranks of a ring" in second
