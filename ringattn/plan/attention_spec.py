"""What one attention call is, apart from its tensors.

Owns the record of shardings, mask and score options, its text form (a custom op takes strings, and a text can be
compared between ranks), and what follows from it by integers alone: plans and sides. Refuses to know groups, buffers
and how anything is computed.

Note [Said once]
    The options of a layer are the same at every step, so what follows from them is kept where it is found without
    comparing long records: the text on the sharding, plans and the keys of sides on the call, which `decode` gives again
    for an equal text. Finding them costs the host a microsecond or two, however many documents there are.
"""

from __future__ import annotations

import ast
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ringattn.kernels.contract import GUARD, Gathered, Score, Side, accumulation_dtype
from ringattn.kernels.select import resolve_impl
from ringattn.plan.device_tables import Key, find, gathered_key, moving_key, returning_key, stationary_key
from ringattn.plan.mask import Reading, Visibility
from ringattn.plan.options import (
    resolve_chunk_len,
    resolve_flag,
    resolve_lengths,
    resolve_prefix_len,
    resolve_real,
    resolve_window,
    resolve_word,
)
from ringattn.plan.ring_plan import Collection, Nodes, Plan, RankPlan, Visit, collect, make_plan, moved_rows
from ringattn.plan.sharding import Sharding

MOVEMENTS = ("auto", "keys", "queries")

_STAYS = -1  # in place of a ring step


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
        backward: What the backward moves: "keys", "queries", or "auto" for what suits the schedule and moves fewer bytes.
        deterministic: Gradients are the same bits from run to run.
        forward_only: There will be no backward (Note [Forwards alone] in device_tables.py).
        memo: What others derived from the call and keep with it.
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
    _moved: dict[Nodes | None, tuple[int, int]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _keys: dict[tuple[str, int, torch.device], tuple[Visit | None, Key[Side]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _collections: dict[tuple[Nodes | None, int], Collection] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _gathered: dict[tuple[torch.device, Nodes | None, int], Key[Gathered]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _returning: dict[tuple[torch.device, Nodes | None, int], Key[Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    memo: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

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

    def plan(self, moving: str, nodes: Nodes | None = None) -> Plan:
        """The plan with keys or queries moving, in one node or several."""
        plan = self._plans.get((moving, nodes))
        if plan is None:
            plan = make_plan(self.sharding.shards, self.kv_sharding.shards, self.visibility, moving, nodes)
            self._plans[moving, nodes] = plan
        return plan

    def moved_rows(self, nodes: Nodes | None = None) -> tuple[int, int]:
        """Rows that the busiest rank moves when keys move, and when queries do."""
        moved = self._moved.get(nodes)
        if moved is None:
            moved = moved_rows(self.plan("keys", nodes)), moved_rows(self.plan("queries", nodes))
            self._moved[nodes] = moved
        return moved

    def visits(self, moving: str) -> RankPlan:
        """This rank's part of the plan."""
        return self.plan(moving).ranks[self.rank]

    def stationary(self, moving: str, device: torch.device) -> Side:
        """Tables of the side that stays: this rank's queries when keys move, and the other way round."""
        known = self._keys.get((moving, _STAYS, device))
        if known is None:
            shards = self.sharding.shards if moving == "keys" else self.kv_sharding.shards
            reading = "keys" if moving == "keys" else self._of_keys
            known = None, stationary_key(shards[self.rank], self.visibility, device, reading)
            self._keys[moving, _STAYS, device] = known
        return find(known[1])

    def moving(self, moving: str, visit: Visit, device: torch.device) -> Side:
        """Tables of the rows that a visit brings."""
        known = self._keys.get((moving, visit.step, device))
        if known is None or known[0] is not visit:
            reading = self._of_keys if moving == "keys" else "keys"
            known = visit, moving_key(visit, self.visibility, device, reading)
            self._keys[moving, visit.step, device] = known
        return find(known[1])

    @property
    def _of_keys(self) -> Reading | None:
        """What tables of keys say of them."""
        return None if self.forward_only else "queries"

    def collection(self, nodes: Nodes | None = None, outer: int = 0) -> Collection:
        """What this rank fetches, and who fetches from it, when all visits of an outer step are computed in one launch."""
        known = self._collections.get((nodes, outer))
        if known is None:
            known = self._collections[nodes, outer] = collect(self.plan("keys", nodes), self.rank, GUARD, outer, nodes)
        return known

    def gathered(self, device: torch.device, nodes: Nodes | None = None, outer: int = 0) -> Gathered:
        """Tables of the keys of these visits, likewise."""
        known = self._gathered.get((device, nodes, outer))
        if known is None:
            plan = self.plan("keys", nodes).ranks[self.rank]
            inner = plan.visits[outer * plan.local_size + 1 : (outer + 1) * plan.local_size]
            visits = (plan.held(outer), *inner)
            collection = self.collection(nodes, outer)
            known = gathered_key(visits, collection, self.visibility, device, forward_only=self.forward_only)
            self._gathered[device, nodes, outer] = known
        return find(known)

    def returning(self, device: torch.device, nodes: Nodes | None = None, outer: int = 0) -> Tensor:
        """Which row of each reader's contribution belongs to each row that this rank holds, or -1, likewise."""
        known = self._returning.get((device, nodes, outer))
        if known is None:
            held = self.plan("keys", nodes).ranks[self.rank].held(outer)
            known = returning_key(self.collection(nodes, outer).readers, held.num_rows, device)
            self._returning[device, nodes, outer] = known
        return find(known)

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
    Kept on the sharding (Note [Said once]), but for lengths, which belong to a batch.

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
    # in the words of the text, in which 1 is not True: options with equal words have equal texts
    mask = f"'window': {window}, 'prefix_len': {prefix_len}, 'chunk_len': {chunk_len}"
    # tracing must not see a table that changes
    keep = lengths is None and not torch.compiler.is_compiling()
    words = (keys, mask, causal, softmax_scale, softcap, dropout_p, impl, backward, deterministic)
    text = sharding.texts.get(words) if keep else None
    if text is None:
        text = (
            f"{{'sharding': {sharding.text}, 'kv_sharding': {keys}, 'causal': {causal}, {mask}, "
            f"'lengths': {lengths}, 'softmax_scale': {softmax_scale}, 'softcap': {softcap}, "
            f"'dropout_p': {dropout_p}, 'impl': '{impl}', 'backward': '{backward}', 'deterministic': {deterministic}}}"
        )
        if keep:
            sharding.texts[words] = text
    return text


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
