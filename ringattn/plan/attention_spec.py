"""The options of one attention call, apart from its tensors.

Owns the record of shardings, mask and score options, its text form (a custom op takes strings, and a text can be compared
between ranks), and the integers that follow from it: ring plans and gather plans. Refuses to know groups, buffers, devices and
how anything is computed.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn.kernels.contract import GUARD, Score, accumulation_dtype
from ringattn.kernels.select import resolve_impl
from ringattn.plan.mask import Visibility
from ringattn.plan.options import (
    resolve_chunk_len,
    resolve_flag,
    resolve_lengths,
    resolve_prefix_len,
    resolve_real,
    resolve_window,
    resolve_word,
)
from ringattn.plan.ring_plan import Collection, Nodes, Plan, collect, make_plan
from ringattn.plan.sharding import Sharding

MOVEMENTS = ("auto", "keys", "queries")


class ScoreTensors(NamedTuple):
    """The optional tensors of a score; None: absent.

    Attributes:
        sinks: `h`, one more logit per head, in the denominator only.
        alibi_slopes: `h`.
        key_bias: `b t`, added to every score of a key.
        bias: `b h s n`, added to the score of a query row and a key.
    """

    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    key_bias: Tensor | None = None
    bias: Tensor | None = None


@dataclass(frozen=True)
class AttentionSpec:
    """The options of one attention call.

    Attributes:
        sharding: The query positions of every rank.
        kv_sharding: The key positions of every rank.
        visibility: The mask.
        softmax_scale: Factor on q . k.
        softcap: Bound of the soft cap; 0.0 for none.
        dropout_p: Probability of dropping an attention weight.
        impl: Kernel set: "auto", or a name that `kernels.select` knows.
        backward: Side that moves in a stepwise backward: "keys", "queries", or "auto" for the one of fewer bytes.
        deterministic: Gradients are the same bits from run to run.
        forward_only: There will be no backward (Note [Forward only] in device_tables.py).
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
    forward_only: bool = False
    _plans: dict[tuple[str, Nodes | None], Plan] = field(default_factory=dict, init=False, repr=False, compare=False)
    _collections: dict[tuple[Nodes | None, int], Collection] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @staticmethod
    def deserialize(text: str, rank: int) -> AttentionSpec:
        """Return the record that `serialize` wrote, seen from a rank; cached.

        Raises:
            ValueError: Options are inconsistent.
        """
        return _deserialize(text, rank)

    @property
    def rank(self) -> int:
        """The ring rank whose rows these shardings describe."""
        return self.sharding.rank

    def plan(self, moving: str, nodes: Nodes | None = None) -> Plan:
        """Return the ring plan in which keys or queries move, in one node or several."""
        plan = self._plans.get((moving, nodes))
        if plan is None:
            plan = make_plan(self.sharding.shards, self.kv_sharding.shards, self.visibility, moving, nodes)
            self._plans[moving, nodes] = plan
        return plan

    def collection(self, nodes: Nodes | None = None, outer: int = 0) -> Collection:
        """Return which rows this rank fetches and sends when all steps of an outer step are computed in one launch."""
        found = self._collections.get((nodes, outer))
        if found is None:
            found = self._collections[nodes, outer] = collect(self.plan("keys", nodes), self.rank, GUARD, outer, nodes)
        return found

    def score(self, dtype: torch.dtype, dropout_seed: int, tensors: ScoreTensors) -> Score:
        """Return the score that kernels compute; small tensors in the accumulation dtype of `dtype`, bias as it is."""
        wide = accumulation_dtype(dtype)
        sinks, alibi_slopes, key_bias, bias = tensors
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

    def features(self, tensors: ScoreTensors) -> frozenset[str]:
        """Return the features that a kernel set must have, by their names in `kernels.select.FEATURES`."""
        asked = {
            "softcap": self.softcap > 0,
            "dropout": self.dropout_p > 0,
            "sinks": tensors.sinks is not None,
            "alibi": tensors.alibi_slopes is not None,
            "key_bias": tensors.key_bias is not None,
            "bias": tensors.bias is not None,
            "per_batch_bounds": self.visibility.lengths is not None,
            "deterministic": self.deterministic,
        }
        return frozenset(name for name, is_asked in asked.items() if is_asked)

    def pairs(self, batch: int) -> int:
        """Return the visible (query, key) pairs that this rank computes in the forward, over all batch elements."""
        visits = self.plan("keys").ranks[self.rank].visits
        total = sum(visit.pairs for visit in visits if visit is not None)
        return total if self.visibility.lengths is not None else total * batch


def serialize(
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
    """Return the text of a call, equal on all ranks, which `AttentionSpec.deserialize` reads; options as in `ring_attention`.

    A dict literal: `torch.compile` traces formatting of constants, and the literal keeps tuples and floats as they are.

    Raises:
        ValueError: An option is of the wrong kind, or the shardings are those of different ranks or ring sizes.
    """
    if kv_sharding is not None and (kv_sharding.rank, kv_sharding.world_size) != (sharding.rank, sharding.world_size):
        raise ValueError(
            f"kv_sharding must be that of rank {sharding.rank} of {sharding.world_size}, like sharding, got one for rank "
            f"{kv_sharding.rank} of {kv_sharding.world_size}; make both with the same ring"
        )
    window, lengths = resolve_window(window), resolve_lengths(lengths)
    prefix_len, chunk_len = resolve_prefix_len(prefix_len), resolve_chunk_len(chunk_len)
    causal, deterministic = resolve_flag("causal", causal), resolve_flag("deterministic", deterministic)
    softmax_scale, softcap = resolve_real("softmax_scale", softmax_scale), resolve_real("softcap", softcap)
    dropout_p = resolve_real("dropout_p", dropout_p)
    impl, backward = resolve_impl(impl), resolve_word("backward", backward, MOVEMENTS)
    keys = None if kv_sharding is None else kv_sharding.text
    return (
        f"{{'sharding': {sharding.text}, 'kv_sharding': {keys}, 'causal': {causal}, 'window': {window}, "
        f"'prefix_len': {prefix_len}, 'chunk_len': {chunk_len}, 'lengths': {lengths}, 'softmax_scale': {softmax_scale}, "
        f"'softcap': {softcap}, 'dropout_p': {dropout_p}, 'impl': '{impl}', 'backward': '{backward}', "
        f"'deterministic': {deterministic}}}"
    )


def describe_record(record: Mapping[str, Any]) -> str:
    """A call in a few words, of what `parse` gives: what it is for, the sequence, and options that are no defaults.

    Example:
        >>> describe_record({"sharding": (8, "zigzag", 2, None, None), "kv_sharding": None, "causal": True, "softcap": 0.0})
        'ring_attention(8 tokens, zigzag, causal=True)'
    """
    seq_len, layout, _, documents, _ = record["sharding"]
    words = [f"{seq_len} tokens", layout]
    if documents is not None:
        words.append(f"{len(documents) - 1} documents")
    if record["kv_sharding"] is not None:
        words.append(f"{record['kv_sharding'][0]} keys")
    defaults = {"window": None, "prefix_len": 0, "chunk_len": None, "softcap": 0.0, "dropout_p": 0.0, "impl": "auto"}
    defaults |= {"causal": False, "backward": "auto", "deterministic": False}
    words += [f"{name}={record[name]}" for name in record if name in defaults and record[name] != defaults[name]]
    return f"ring_attention({', '.join(words)})"


@lru_cache(maxsize=4)
def parse(text: str) -> Mapping[str, Any]:
    """The record that `serialize` wrote, as plain Python values."""
    return ast.literal_eval(text)


@lru_cache(maxsize=512)
def _deserialize(text: str, rank: int) -> AttentionSpec:
    record = parse(text)
    sharding = Sharding.from_spec(record["sharding"], rank)
    kv_sharding = sharding if record["kv_sharding"] is None else Sharding.from_spec(record["kv_sharding"], rank)
    return AttentionSpec(
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
