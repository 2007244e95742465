"""Comparison of batches and results between the ranks of a cache.

Note [When ranks compare]
    Every rank runs the page allocator by itself, so a rank that was called differently would go on with other numbers unnoticed.
    Ranks therefore compare a digest of a batch (requests, new tokens, and owners of the tokens they see) in one short message,
    before its first layer stores or sends anything:
    - for every prefill, whatever the number of layers;
    - for decode batches when their requests change, and else every COMPARED batches: a comparison takes a fraction of a
      millisecond, which is little beside a chunk of a prompt but not beside a token;
    - for static batches every COMPARED batches: in a server requests change with almost every batch, one rank sends the changes
      to all, and a comparison takes a third of the host time of a batch.
    Each rank samples tokens by itself, from logits that are the same bits. Ranks record their tokens, and a digest of all records
    since the last comparison is sent with the next one: a rank that sampled another token is found after COMPARED + 1 batches at
    the latest, or when the program ends (`check_recorded`).
    After a failed call ranks would remember different batches and records. The number of failed calls is equal on all ranks
    (`Ring.failures`): when it changes, all discard what they remember, and compare the next batch.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from ringattn.ring import Ring

COMPARED = 16
"""Decode batches with the same requests, or static batches, after which ranks compare again."""


class ConsistencyChecker:
    """Comparisons between the ranks of one cache."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._kinds: set[str] = set()
        self._initialized: set[torch.device] = set()
        self._decoding: object = None
        self._since_compared = 0
        self._records: list[tuple[str, tuple[Tensor, ...]]] = []
        self._failures = ring.failures

    def check_batch(self, step: Any, kind: str, device: torch.device) -> None:
        """Compare a batch and a kind of call between the ranks, as far as they have not been compared.

        Every rank calls it when a batch meets a kind of call for the first time. A difference, or an error of another rank, raises
        ValueError on every rank.

        Args:
            step: The batch, a `ForwardBatch`.
            kind: Text of everything else that must be equal on all ranks.
            device: Device of the rows.
        """
        if self._ring.world_size == 1:
            return
        self._discard_after_failure()
        same = self._is_known(step)
        if not same or kind not in self._kinds:
            self._ring.assert_equal_across_ranks(
                "attend: a step and its options", f"{step.describe()}, {kind}{self._take_records()}"
            )
        step.compared = True
        self._kinds.add(kind)
        if device not in self._initialized:
            self._ring.init_transport(device)
            self._initialized.add(device)

    def record(self, text: str, *tensors: Tensor) -> None:
        """Record a text and small tensors of integers that must be equal on all ranks, until they compare; tensors are copied."""
        if self._ring.world_size > 1:
            self._discard_after_failure()
            self._records.append((text, tuple(x.detach().clone() for x in tensors)))

    def discard(self) -> None:
        """Discard all records: a call has failed, perhaps on this rank alone."""
        self._records.clear()

    def check_recorded(self, what: str) -> None:
        """Compare what was recorded since ranks last compared, if anything; every rank calls it, and names what has ended."""
        self._discard_after_failure()
        if self._records:
            self._ring.assert_equal_across_ranks(what, self._take_records().removeprefix(", "))

    def _discard_after_failure(self) -> None:
        if self._failures != self._ring.failures:
            self._failures, self._decoding = self._ring.failures, None
            self._records.clear()

    def _take_records(self) -> str:
        """Return a digest of what was recorded since the last comparison, and discard it."""
        if not self._records:
            return ""
        records, self._records = self._records, []
        words = repr([(words, [tuple(x.shape) for x in tensors]) for words, tensors in records])
        digest = blake2b(words.encode(), digest_size=8)
        numbers = [x.flatten().long() for _, tensors in records for x in tensors]
        if numbers:
            # mostly from one device: read at once
            digest.update(repr(torch.cat([x.to(numbers[0].device) for x in numbers]).tolist()).encode())
        return f", tokens and options of {len(records)} calls, digest {digest.hexdigest()}"

    def _is_known(self, step: Any) -> bool:
        """Return whether the batch need not be compared (Note [When ranks compare])."""
        if step.compared:
            return True
        if step.mode == "prefill":
            return False
        who = (step.requests, step.counts)
        interval = COMPARED if self._decoding == who or step.compares_rarely else 0
        if self._decoding is None or self._since_compared >= interval:
            self._decoding, self._since_compared = who, 0
            return False
        self._since_compared += 1
        return True
