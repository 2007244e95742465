"""What one attention call is, apart from its tensors.

Owns the record of shardings, mask and score options, its text form (a custom op takes strings, and a text can be
compared between ranks), and what follows from it by integers alone: plans and sides. Refuses to know groups, buffers
and how anything is computed.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ringattn.kernels.contract import GUARD, Gathered, Score, Side, accumulation_dtype
from ringattn.schedule import Collection, Plan, RankPlan, Visit, collect, make_plan
from ringattn.sharding import Sharding
from ringattn.tables import gathered_sides, moving_side, stationary_side
from ringattn.visibility import Visibility

MOVEMENTS = ("auto", "keys", "queries")


@dataclass(frozen=True)
class Call:
    """One attention call.

    Attributes:
        sharding: Who holds which query positions.
        kv_sharding: Who holds which key positions.
        visibility: The mask.
        softmax_scale: Factor on q . k.
        softcap: Bound of the soft cap; 0.0 for none.
        dropout_p: Probability of dropping an attention weight.
        impl: Which kernel set: auto, or a name that `kernels.select` knows.
        backward: What the backward moves: "keys", "queries", or "auto" for whichever moves fewer bytes.
        deterministic: Gradients are the same bits from run to run.
    """

    sharding: Sharding
    kv_sharding: Sharding
    visibility: Visibility
    softmax_scale: float
    softcap: float
    dropout_p: float
    impl: str
    backward: str
    deterministic: bool

    @staticmethod
    def decode(text: str, rank: int) -> Call:
        """The call that `describe` made a text of, seen from a rank; cached.

        Raises:
            ValueError: Options are inconsistent.
        """
        return _decode(text, rank)

    @property
    def rank(self) -> int:
        """The ring rank whose rows these shardings describe."""
        return self.sharding.rank

    def plan(self, moving: str) -> Plan:
        """The plan with keys or queries moving."""
        return make_plan(self.sharding.shards, self.kv_sharding.shards, self.visibility, moving)

    def visits(self, moving: str) -> RankPlan:
        """This rank's part of the plan."""
        return self.plan(moving).ranks[self.rank]

    def stationary(self, moving: str, device: torch.device) -> Side:
        """Tables of the side that stays: this rank's queries when keys move, and the other way round."""
        shards = self.sharding.shards if moving == "keys" else self.kv_sharding.shards
        return stationary_side(
            shards[self.rank], self.visibility, device, reading="keys" if moving == "keys" else "queries"
        )

    def moving(self, moving: str, visit: Visit, device: torch.device) -> Side:
        """Tables of the rows that a visit brings."""
        return moving_side(visit, self.visibility, device, reading="queries" if moving == "keys" else "keys")

    def collection(self) -> Collection:
        """What this rank fetches, and who fetches from it, when all visits are computed in one launch."""
        return collect(self.plan("keys"), self.rank, GUARD)

    def gathered(self, device: torch.device) -> Gathered:
        """Tables of the keys of all visits, likewise."""
        return gathered_sides(self.visits("keys"), self.collection(), self.visibility, device)

    def score(
        self,
        dtype: torch.dtype,
        dropout_seed: int,
        *,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        key_bias: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Score:
        """How scores are made; small options in the accumulation dtype of `dtype`, bias as it is."""
        wide = accumulation_dtype(dtype)
        return Score(
            self.softmax_scale,
            self.softcap,
            self.dropout_p,
            dropout_seed,
            sinks=None if sinks is None else sinks.to(wide),
            alibi_slopes=None if alibi_slopes is None else alibi_slopes.to(wide),
            key_bias=None if key_bias is None else key_bias.to(wide),
            bias=bias,
        )

    def features(
        self,
        *,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        key_bias: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> frozenset[str]:
        """What the call asks of a kernel set, in the words of `kernels.select.FEATURES`."""
        asked = {
            "softcap": self.softcap > 0,
            "dropout": self.dropout_p > 0,
            "sinks": sinks is not None,
            "alibi": alibi_slopes is not None,
            "key_bias": key_bias is not None,
            "bias": bias is not None,
            "per_batch_bounds": self.visibility.lengths is not None,
            "deterministic": self.deterministic,
        }
        return frozenset(name for name, is_asked in asked.items() if is_asked)

    def pairs(self, batch: int) -> int:
        """Visible (query, key) pairs that this rank computes in the forward, over all batch elements."""
        total = sum(visit.pairs for visit in self.visits("keys").visits if visit is not None)
        return total if self.visibility.lengths is not None else total * batch


def describe(
    sharding: Sharding,
    kv_sharding: Sharding | None = None,
    *,
    softmax_scale: float,
    causal: bool = False,
    window: int | Sequence[int | None] | None = None,
    prefix_len: int = 0,
    chunk_len: int | None = None,
    lengths: Sequence[Sequence[int]] | Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    impl: str = "auto",
    backward: str = "auto",
    deterministic: bool = False,
) -> str:
    """The text of a call, equal on all ranks, which `Call.decode` reads; options as in `ring_attention`.

    A dict literal: `torch.compile` traces formatting of constants, and the literal keeps tuples and floats as they are.
    """
    window = (window - 1, 0) if isinstance(window, int) else window if window is None else tuple(window)
    if lengths is not None:
        rows = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        lengths = tuple((int(start), int(stop)) for start, stop in rows)
    keys = None if kv_sharding is None else kv_sharding.text
    return (
        f"{{'sharding': {sharding.text}, 'kv_sharding': {keys}, 'causal': {bool(causal)}, 'window': {window}, "
        f"'prefix_len': {prefix_len}, 'chunk_len': {chunk_len}, 'lengths': {lengths}, "
        f"'softmax_scale': {float(softmax_scale)}, 'softcap': {float(softcap)}, 'dropout_p': {float(dropout_p)}, "
        f"'impl': '{impl}', 'backward': '{backward}', 'deterministic': {bool(deterministic)}}}"
    )


def parse(text: str) -> dict[str, Any]:
    """The record that `describe` wrote, as plain Python values."""
    return ast.literal_eval(text)


@lru_cache(maxsize=512)
def _decode(text: str, rank: int) -> Call:
    record = parse(text)
    sharding = Sharding.from_spec(record["sharding"], rank)
    kv_sharding = sharding if record["kv_sharding"] is None else Sharding.from_spec(record["kv_sharding"], rank)
    return Call(
        sharding,
        kv_sharding,
        Visibility(
            seq_len=sharding.seq_len,
            kv_len=kv_sharding.seq_len,
            causal=record["causal"],
            window=record["window"],
            documents=sharding.documents,
            prefix_len=record["prefix_len"],
            chunk_len=record["chunk_len"],
            lengths=record["lengths"],
        ),
        softmax_scale=record["softmax_scale"],
        softcap=record["softcap"],
        dropout_p=record["dropout_p"],
        impl=record["impl"],
        backward=record["backward"],
        deterministic=record["deterministic"],
    )
