"""Check that all ranks of a ring make the same calls in the same order.

Note [Call marks]
    Two calls may both have been compared before, and move messages of equal sizes. A rank that makes them in another order would
    compute with rows of another call. So every call has a mark: a hash of its text, its tensors without row counts, its
    dropout seed where ranks must agree on it, the digest of its batch where it has one (`Sharding.for_batch`), and in a backward
    the number of its forward.
    - Where gloo moves rows, each rank sends its mark to all ranks beside the first rows of the call, and compares marks before
      it reads these rows. All ranks raise before a wrong number is computed.
    - NCCL and the copy engine move rows without the host. There ranks compare a hash of their marks through the store in calls
      1, 2, 4, ..., and in every COMPARED-th call. All ranks raise after the fact, naming the first call that differs.
    Calls that differ in the values of their tensors only have equal marks in the forward. Their backwards differ.
    A digest that was computed on a GPU is read one batch later, when its work has long been done: nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, NoReturn

import torch

from ringattn.plan.sharding import SAME_SEQUENCE
from ringattn.tensor_checks import BatchDigest
from ringattn.transport.consensus import RankConsensus, raise_calls
from ringattn.transport.process_group import ProcessGroupTransport

COMPARED = 1024
"""Calls between two comparisons of marks that do not travel with rows."""
FORWARD = -1
"""In place of the number of a forward, in the forward itself."""


class CallMark(NamedTuple):
    """The part of a mark that is equal in every call of a signature: a hash, and the call in words."""

    digest: int
    words: str


class _Made(NamedTuple):
    call: CallMark
    seed: int
    forward: int
    batch: BatchDigest | None

    def mark(self) -> int:
        # hashes of integers do not depend on the process
        return hash((self.call.digest, self.seed, self.forward, 0 if self.batch is None else self.batch.number()))


@dataclass(eq=False)
class CallOrder:
    """The calls of one rank, and their comparison with those of the other ranks (Note [Call marks])."""

    consensus: RankConsensus
    link: ProcessGroupTransport
    count: int = 0
    _made: list[_Made] = field(default_factory=list)
    _late: tuple[BatchDigest | None, BatchDigest | None] = (None, None)  # of the batch before, and of the newest

    def begin(
        self, call: CallMark, seed: int, forward: int, device: torch.device, batch: BatchDigest | None = None
    ) -> int:
        """Mark a call that is about to move rows, and return its number, from 1; ValueError on every rank where calls differ.

        seed is 0 where seeds may differ between ranks; forward is the number of the forward whose backward it is, 0 where that is
        unknown, FORWARD in a forward; batch is the digest of the batch, if the call has one.
        """
        self.count += 1
        made = _Made(call, seed, forward, batch if batch is None or not batch.is_late else self._one_earlier(batch))
        if self.link.sends_marks(device):
            self.link.send_mark(made.mark(), partial(self._differ, made, self.count))
            return self.count
        self._made.append(made)
        if self.count % min(COMPARED, 1 << (self.count - 1).bit_length()) == 0:
            self._compare()
        return self.count

    def _one_earlier(self, batch: BatchDigest) -> BatchDigest | None:
        before, newest = self._late
        if batch is not newest:
            before, self._late = newest, (newest, batch)
        return before

    def _compare(self) -> None:
        made, self._made = self._made, []
        marks = [one.mark() for one in made]
        if len(set(self.consensus.share("a check of the calls so far", hash(tuple(marks))))) == 1:
            return
        found = self.consensus.share("the marks of the calls so far", marks)
        first = next(i for i, column in enumerate(zip(*found, strict=False)) if len(set(column)) > 1)
        self._differ(made[first], self.count - len(made) + 1 + first)

    def _differ(self, made: _Made, number: int) -> NoReturn:
        words = made.call.words + (f" with dropout_seed={made.seed}" if made.seed else "")
        if made.forward != FORWARD:
            words = f"the backward of call {made.forward}, {words}"
        batch = "none" if made.batch is None else f"{made.batch.number() % 2**64:016x}"
        found = self.consensus.share("this call", [words, batch])
        at = f"call {number} of the ring"
        with self.consensus.counting_failures():
            if len({call for call, _ in found}) > 1:
                raise_calls([call for call, _ in found], at)
            digests = " and ".join(f"{digest} on ring rank {rank}" for rank, (_, digest) in enumerate(found))
            raise ValueError(
                f"the batch must be the same on all ranks of a ring, got tokens and labels with digests {digests} as {at}; "
                + SAME_SEQUENCE
            )
