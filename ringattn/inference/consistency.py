"""Comparison of batches and results between the ranks of a cache.

Owns when ranks compare, and what. Refuses to know what a batch does with its rows (forward_batch.py) and how texts are exchanged
(ring.py).

Note [When ranks compare]
    Every rank runs the page allocator by itself, so a rank that was called differently would go on with other numbers unnoticed.
    Ranks therefore compare a digest of a batch (requests, new tokens, and owners of the tokens they see) in one short message,
    before its first layer stores or sends anything:
    - for every prefill, whatever the number of layers;
    - for decode batches when their requests change, and else every COMPARED batches: a comparison takes a fraction of a
      millisecond, which is little beside a chunk of a prompt but not beside a token;
    - for static batches, also of short prompts, every COMPARED batches: in a server with many clients requests change with
      almost every batch, one rank sends the changes to all, and a comparison takes a third of the host time of a batch.
    Options, heads and dtypes of layers are compared once per kind, in the same message if it comes in time.

Note [Recorded results]
    Each rank samples tokens by itself, from logits that are the same bits. To find a rank that sampled another token, ranks
    record their tokens; a digest of all records since the last comparison is sent with the next one, without a message of
    its own. A difference is an error on every rank after COMPARED + 1 batches at the latest, or when the program ends
    (`check_recorded`). Tensors are copied when they are recorded and read at the comparison, all at once.

Note [After a refusal]
    A rank that refuses a call does not compare, and the others learn of it there. From then on ranks would remember different
    batches and records, so one of them would compare where another does not. The number of failed calls is equal on all ranks
    (`Ring.failures`): when it changes, all discard what they remember, and compare the next batch.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from ringattn.ring import Ring

COMPARED = 16
"""Steps of decoding by the same requests, or static ones, after which ranks compare again."""


class Comparable(Protocol):
    """A batch that ranks compare.

    Attributes:
        mode: "prefill" or "decode".
        requests: Requests that bring tokens.
        counts: New tokens of each request.
        compared: Ranks have compared the batch.
        compares_rarely: Ranks need not compare a decode batch whenever its requests change.
    """

    mode: Literal["prefill", "decode"]
    requests: tuple[int, ...]
    counts: tuple[int, ...]
    compared: bool
    compares_rarely: ClassVar[bool]

    def describe(self) -> str:
        """Return a text that is equal on two ranks if the batch is."""
        ...


class ConsistencyChecker:
    """Comparisons between the ranks of one cache.

    Args:
        ring: The ranks.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._kinds: set[str] = set()
        self._initialized: set[torch.device] = set()
        self._decoding: object = None
        self._since_compared = 0
        self._records: list[tuple[str, tuple[Tensor, ...]]] = []
        self._failures = ring.failures

    def check_batch(self, step: Comparable, kind: str, device: torch.device) -> None:
        """Compares a step and a kind of call between the ranks, as far as they have not been compared.

        Every rank calls it when a step meets a kind of call for the first time.

        Args:
            step: The step.
            kind: What else must be the same on all ranks.
            device: Where rows are.

        Raises:
            ValueError: They differ, or another rank has refused its call; raised on every rank.
            RuntimeError: A rank did not come within the ring's timeout.
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
        """Keeps what must be the same on all ranks until they compare (Note [Recorded results]).

        Args:
            text: Any text.
            tensors: Small ones of integers; they may change afterwards.
        """
        if self._ring.world_size > 1:
            self._discard_after_failure()
            self._records.append((text, tuple(x.detach().clone() for x in tensors)))

    def discard(self) -> None:
        """Drops what was noted: a call has failed, perhaps on this rank alone."""
        self._records.clear()

    def check_recorded(self, what: str) -> None:
        """Compares what was noted since ranks last compared, if anything was; every rank calls it.

        Args:
            what: What has come to an end, for the message.

        Raises:
            ValueError: It differs; raised on every rank.
            RuntimeError: A rank did not come within the ring's timeout.
        """
        self._discard_after_failure()
        if self._records:
            self._ring.assert_equal_across_ranks(what, self._take_records().removeprefix(", "))

    def _discard_after_failure(self) -> None:
        """Forgets what was compared and noted before a call failed (Note [After a refusal])."""
        if self._failures != self._ring.failures:
            self._failures, self._decoding = self._ring.failures, None
            self._records.clear()

    def _take_records(self) -> str:
        """Return a digest of what was recorded since the last comparison, and discard it."""
        if not self._records:
            return ""
        noted, self._records = self._records, []
        words = repr([(words, [tuple(x.shape) for x in tensors]) for words, tensors in noted])
        digest = blake2b(words.encode(), digest_size=8)
        numbers = [x.flatten().long() for _, tensors in noted for x in tensors]
        if numbers:
            # mostly from one device: read at once
            digest.update(repr(torch.cat([x.to(numbers[0].device) for x in numbers]).tolist()).encode())
        return f", tokens and options of {len(noted)} calls, digest {digest.hexdigest()}"

    def _is_known(self, step: Comparable) -> bool:
        """Whether the step needs no comparing (Note [When ranks compare])."""
        if step.compared:
            return True
        if step.mode == "prefill":
            return False
        who = (step.requests, step.counts)
        patience = COMPARED if self._decoding == who or step.compares_rarely else 0
        if self._decoding is None or self._since_compared >= patience:
            self._decoding, self._since_compared = who, 0
            return False
        self._since_compared += 1
        return True
