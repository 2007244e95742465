"""That all ranks mean the same: what they compare before keys are kept and rows move.

Owns when ranks compare, and what. Refuses to know what a step does with its rows (step.py) and how texts travel (ring.py).

Note [Same books]
    Every rank keeps the books of a cache by itself, so a rank that was called differently would go on with other numbers and
    nobody would notice. So ranks compare a digest of a step (whose tokens it brings, and who keeps which of those they see) in
    one short message, before its first layer does anything:
    - for every prefill, whatever the number of layers;
    - for steps of decoding when who decodes changes, and else every COMPARED steps: a comparison costs a fraction of a
      millisecond, which is little beside a chunk of a prompt but not beside a token;
    - for static steps, short prompts among them, every COMPARED steps whoever decodes: in a server with many clients somebody
      comes or goes with almost every step, all ranks are told so by one, and a comparison takes the host a third of a step.
    What belongs to layers (options, heads, dtypes) is compared once per kind, in the same message where it comes in time.

Note [Words that travel along]
    A program on every rank chooses tokens by itself, of logits that are the same bits, and a rank that chose another one would go
    on with it. So it notes what it brings, and a digest of all that was noted since travels along with the next comparison, for
    which no message more is sent: what differs is an error on every rank after COMPARED + 1 steps at the latest, or when the
    program says that it has come to an end (`compare`). Tensors are kept as they are until then, and read all at once.

Note [After a refusal]
    A rank that refuses does not come to compare, and the others hear of it there: from then on they would remember different
    steps and words, so one of them would compare where another does not. What all have alike is that a call has failed
    (`Ring.failures`): then all forget, and compare the next step.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ringattn.inference.static import StaticStep
from ringattn.ring import Ring

if TYPE_CHECKING:
    from ringattn.inference.step import Step

COMPARED = 16
"""Steps of decoding by the same requests, or static ones, after which ranks compare again."""


class Accord:
    """What the ranks of one cache have agreed upon.

    Args:
        ring: The ranks.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._kinds: set[str] = set()
        self._settled: set[torch.device] = set()
        self._decoding: object = None
        self._decoded = 0
        self._noted: list[tuple[str, tuple[Tensor, ...]]] = []
        self._failures = ring.failures

    def meet(self, step: Step, kind: str, device: torch.device) -> None:
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
        self._start_anew()
        same = self._is_known(step)
        if not same or kind not in self._kinds:
            self._ring.assert_equal_across_ranks(
                "attend: a step and its options", f"{_described(step)}, {kind}{self._take_notes()}"
            )
        step.met = True
        self._kinds.add(kind)
        if device not in self._settled:
            self._ring.init_transport(device)
            self._settled.add(device)

    def note(self, words: str, *tensors: Tensor) -> None:
        """Keeps what must be the same on all ranks until they compare (Note [Words that travel along]).

        Args:
            words: Any.
            tensors: Small ones of integers; they may change afterwards.
        """
        if self._ring.world_size > 1:
            self._start_anew()
            self._noted.append((words, tuple(x.detach().clone() for x in tensors)))

    def forget(self) -> None:
        """Drops what was noted: a call has failed, perhaps on this rank alone."""
        self._noted.clear()

    def compare(self, what: str) -> None:
        """Compares what was noted since ranks last compared, if anything was; every rank calls it.

        Args:
            what: What has come to an end, for the message.

        Raises:
            ValueError: It differs; raised on every rank.
            RuntimeError: A rank did not come within the ring's timeout.
        """
        self._start_anew()
        if self._noted:
            self._ring.assert_equal_across_ranks(what, self._take_notes().removeprefix(", "))

    def _start_anew(self) -> None:
        """Forgets what was compared and noted before a call failed (Note [After a refusal])."""
        if self._failures != self._ring.failures:
            self._failures, self._decoding = self._ring.failures, None
            self._noted.clear()

    def _take_notes(self) -> str:
        """What was noted, as words for a comparison."""
        if not self._noted:
            return ""
        noted, self._noted = self._noted, []
        words = repr([(words, [tuple(x.shape) for x in tensors]) for words, tensors in noted])
        digest = blake2b(words.encode(), digest_size=8)
        numbers = [x.flatten().long() for _, tensors in noted for x in tensors]
        if numbers:
            # mostly from one device: read at once
            digest.update(repr(torch.cat([x.to(numbers[0].device) for x in numbers]).tolist()).encode())
        return f", tokens and options of {len(noted)} calls, digest {digest.hexdigest()}"

    def _is_known(self, step: Step) -> bool:
        """Whether the step needs no comparing (Note [Same books])."""
        if step.met:
            return True
        if step.mode == "prefill":
            return False
        who = (step.requests, step.counts)
        patience = COMPARED if self._decoding == who or isinstance(step, StaticStep) else 0
        if self._decoding is None or self._decoded >= patience:
            self._decoding, self._decoded = who, 0
            return False
        self._decoded += 1
        return True


def _described(step: Step) -> str:
    """A step in words: what people can compare, and a digest of the rest."""
    if step.sharding is not None and step.kv_sharding is not None:
        owners = f"{step.sharding.text} {step.kv_sharding.text}"
    else:
        owners = [one.stretches for one in step.cache.pages.look(step.requests)]
    facts = repr((step.requests, step.counts, step.lengths, step.firsts, owners))
    few = (
        f"requests {step.requests} with {step.counts} new tokens"
        if len(step.requests) <= 8
        else f"{len(step.requests)} requests"
    )
    return f"{step.mode} of {few}, digest {blake2b(facts.encode(), digest_size=8).hexdigest()}"
