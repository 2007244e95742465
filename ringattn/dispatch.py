"""What is decided about a call at first sight, and found again at each later one.

Owns the table of calls that were checked, agreed upon between the ranks, and given kernels. Refuses to know how anything
is computed, and what travels.

Note [Prepared calls]
    Whether a call is right, what it means and which kernels serve it depends on its text, on the ring, and on a few facts
    about its tensors: shapes, dtypes, devices and whether they require gradients, never on values. So all of it is decided
    once, and a later call with the same facts is found by one look into a table. A call that was refused is not there: it is
    checked, and refused, again.
    The table says nothing of what other ranks agreed upon (`Ring.refusals` does), so forgetting an entry is harmless.
    A ring that was closed has nothing left of what its calls prepared, and prepares them again.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from ringattn.kernels.contract import KernelSet, Score
from ringattn.kernels.select import pick
from ringattn.plan.attention_spec import Call, parse
from ringattn.ring import Ring
from ringattn.ring_registry import find_ring
from ringattn.schedule.validation import check_call
from ringattn.transport.call_order import FORWARD, CallMark

CAPACITY = 1024
"""Calls that are kept; beyond it all are forgotten, and prepared again as they come."""

_prepared: dict[Hashable, Prepared] = {}


@dataclass(frozen=True, eq=False)
class Prepared:
    """What is known of a call.

    Attributes:
        call: The decoded text.
        kernels: What computes visits.
        score: How scores are made, where that needs no tensor and no seed.
        mark: For the comparison of the order of calls.
        shares_seed: Ranks must have equal dropout seeds (Note [Seeds] in dropout.py).
    """

    call: Call
    kernels: KernelSet
    score: Score | None
    mark: CallMark
    shares_seed: bool


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    key_bias: Tensor | None,
    bias: Tensor | None,
    dropout_seed: int,
    ring: str,
    text: str,
    forward: int = FORWARD,
) -> tuple[Ring, Call, KernelSet, Score, int]:
    """The ring, the decoded call, its kernels, score and number; every refusal happens here, on every rank.

    Args:
        q: `b s h d`.
        k: `b t hk d`.
        v: `b t hk dv`.
        sinks: `h`.
        alibi_slopes: `h`.
        key_bias: `b t`.
        bias: `b h s n`.
        dropout_seed: Seed of the mask.
        ring: The name of the ring.
        text: The call as `describe` wrote it.
        forward: See `CallOrder.begin`.

    Raises:
        ValueError: As `ring_attention` does.
        NotImplementedError: Likewise.
        RuntimeError: The ring is gone.
    """
    here: Ring = find_ring(ring)
    facts = (
        ring, here.closings, text, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
        q.requires_grad, k.requires_grad, v.requires_grad,
        *(
            (x.shape, x.dtype, x.device, x.requires_grad) if x is not None else None
            for x in (sinks, alibi_slopes, key_bias, bias)
        ),
    )  # fmt: skip
    known = _prepared.get(facts)
    extras = {"sinks": sinks, "alibi_slopes": alibi_slopes, "key_bias": key_bias, "bias": bias}
    if known is None:
        tensors = (q, k, v, *extras.values())
        with here.shared_refusals():
            record = parse(text)
        shares_seed = record["dropout_p"] > 0 and record["backward"] != "keys"
        with here.refusals(text, tensors, dropout_seed if shares_seed else 0):
            call = Call.decode(text, here.rank)
            check_call(q, k, v, call, **extras)
            features = call.features(**extras)
            choice = pick(q.device, q.dtype, q.shape[-1], v.shape[-1], impl=call.impl, features=features)
        plain = call.dropout_p == 0 and all(x is None for x in extras.values())
        score = call.score(q.dtype, 0) if plain else None
        known = Prepared(call, choice.kernels, score, here.mark_call(text, tensors), shares_seed)
        if len(_prepared) >= CAPACITY:
            _prepared.clear()
        _prepared[facts] = known
    score = known.score
    if score is None:
        score = known.call.score(q.dtype, dropout_seed, **extras)
    if known.shares_seed and known.call.backward == "queries":
        here.agree_once("dropout_seed", str(dropout_seed))
    number = here.begin_call(known.mark, dropout_seed if known.shares_seed else 0, forward, q.device)
    return here, known.call, known.kernels, score, number
