"""The options of one attention call, apart from its tensors.

Owns the record of shardings, mask and score options, its text form (a custom op takes strings, and a text can be compared
between ranks), and the integers that follow from it: ring plans and gather plans.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn.kernels.interface import PAD_ROWS, Score, accumulation_dtype
from ringattn.kernels.registry import resolve_impl
from ringattn.plan.expressions import check_mask, from_spec
from ringattn.plan.mask import MaskUnion, ShortForms, fold_mask
from ringattn.plan.options import resolve_options
from ringattn.plan.ring_plan import GatherPlan, Nodes, RingPlan, make_gather_plan, make_plan
from ringattn.plan.sharding import Sharding


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
        softcap: 0.0 for none.
        impl: Kernel set: "auto", or a name that `kernels.registry` knows.
        backward: Side that moves in a stepwise backward: "keys", "queries", or "auto" for the one of fewer bytes.
        latents: Of latent attention: columns of latent rows, those of them that make values, and the rank that expands them:
            "owner", "reader" or "auto".
        text: The text of the call (`serialize`), where it has one.
        rank: The ring rank whose rows these shardings describe.
    """

    sharding: Sharding
    kv_sharding: Sharding
    mask: MaskUnion
    softmax_scale: float
    softcap: float
    dropout_p: float
    impl: str
    backward: str
    deterministic: bool
    latents: tuple[int, int, str] | None = None
    forward_only: bool = False
    text: str = ""
    rank: int = field(init=False)
    _plans: dict[tuple[str, Nodes | None], RingPlan] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _gather_plans: dict[tuple[Nodes | None, int], GatherPlan] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def deserialize(cls, text: str, rank: int, processes: int | None = None) -> AttentionSpec:
        """Return the record that `serialize` wrote, seen from a rank; with processes from one that hosts several virtual ranks."""
        record = parse(text)
        sharding = Sharding.from_spec(json.loads(record["sharding"]), rank, processes=processes)
        keys = record["kv_sharding"]
        kv_sharding = sharding if keys is None else Sharding.from_spec(json.loads(keys), rank, processes=processes)
        mask = None if record["mask"] is None else from_spec(record["mask"])
        return cls.of(sharding, kv_sharding, {**record, "mask": mask}, text)

    @classmethod
    def resolve(cls, sharding: Sharding, kv_sharding: Sharding | None, options: Mapping[str, Any]) -> AttentionSpec:
        """Return the record of options as users give them."""
        record = resolve_call(options)
        return cls.of(sharding, kv_sharding or sharding, record, write_call(sharding, kv_sharding, record))

    @classmethod
    def of(cls, sharding: Sharding, kv_sharding: Sharding, record: Mapping[str, Any], text: str) -> AttentionSpec:
        """Return the record of resolved options (`resolve_call`), whose short forms of a mask become one."""
        given = record["mask"]
        if given is None:
            given = fold_mask(**{name: record[name] for name in _SHORT_FORMS})
        mask = MaskUnion(sharding.seq_len, kv_sharding.seq_len, given, sharding.documents)
        others = {name: record[name] for name in ("softmax_scale", *_OF_SCORE)}
        return cls(sharding.detached, kv_sharding.detached, mask, **others, text=text)

    def __post_init__(self) -> None:
        """Compute what is read most."""
        object.__setattr__(self, "rank", self.sharding.rank)

    def of_ranks(self) -> list[AttentionSpec]:
        """Return the record of each rank that the process is: of its virtual ranks, where there are several."""
        sides = zip(self.sharding.hosted, self.kv_sharding.hosted, strict=True)
        return [replace(self, sharding=rows, kv_sharding=keys) for rows, keys in sides] or [self]

    def plan(self, moving: str, nodes: Nodes | None = None) -> RingPlan:
        """Return the ring plan in which keys or queries move, in one node or several."""
        plan = self._plans.get((moving, nodes))
        if plan is None:
            plan = make_plan(self.sharding.shards, self.kv_sharding.shards, self.mask, moving, nodes)
            self._plans[moving, nodes] = plan
        return plan

    def gather_plan(self, nodes: Nodes | None = None, node_step: int = 0) -> GatherPlan:
        """Return the rows that this rank receives and sends when all steps of a node step are computed in one launch."""
        found = self._gather_plans.get((nodes, node_step))
        if found is None:
            plan = self.plan("keys", nodes)
            found = make_gather_plan(plan, self.rank, PAD_ROWS, node_step, nodes)
            self._gather_plans[nodes, node_step] = found
        return found

    def score(self, dtype: torch.dtype, dropout_seed: int, tensors: ScoreTensors) -> Score:
        """Return the score that kernels compute; small tensors in the accumulation dtype of `dtype`, bias as it is."""
        small = [None if x is None else x.to(accumulation_dtype(dtype)) for x in tensors[:3]]
        return Score(self.softmax_scale, self.softcap, self.dropout_p, dropout_seed, *small, bias=tensors.bias)

    def features(self, tensors: ScoreTensors) -> frozenset[str]:
        """Return the features that a kernel set must have, by their names in `kernels.registry.FEATURES`."""
        asked = {
            "softcap": self.softcap > 0,
            "dropout": self.dropout_p > 0,
            **{name: x is not None for name, x in zip(("sinks", "alibi", "key_bias", "bias"), tensors, strict=True)},
            "per_batch_bounds": self.mask.is_per_batch,
            "terms": self.mask.is_union,
            "block_pattern": self.mask.has_pattern,
            "deterministic": self.deterministic,
        }
        return frozenset(name for name, is_asked in asked.items() if is_asked)

    def pairs(self, batch: int) -> int:
        """Return the visible (query, key) pairs that this rank computes in the forward, over all batch elements."""
        ring_steps = self.plan("keys").ranks[self.rank].ring_steps
        total = sum(ring_step.pairs for ring_step in ring_steps if ring_step is not None)
        return total if self.mask.is_per_batch else total * batch


_SHORT_FORMS = tuple(ShortForms.__annotations__)
_OF_MASK = {"causal": False, "window": None, "prefix_len": 0, "chunk_len": None, "lengths": None, "mask": None}
_OF_SCORE = {
    "softcap": 0.0, "dropout_p": 0.0, "impl": "auto", "backward": "auto", "deterministic": False, "latents": None,
}  # fmt: skip
_DEFAULTS: dict[str, Any] = _OF_MASK | _OF_SCORE


def serialize(sharding: Sharding, kv_sharding: Sharding | None = None, *, softmax_scale: float, **options: Any) -> str:
    """Return the text of a call, equal on all ranks, which `AttentionSpec.deserialize` reads; options as in `ring_attention`.

    A dict literal: `torch.compile` traces formatting of constants, and the literal keeps tuples and floats as they are.
    """
    return write_call(sharding, kv_sharding, resolve_call({"softmax_scale": softmax_scale, **options}))


def resolve_call(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a call as Python's own values, those that are not given by their defaults."""
    given = {**_DEFAULTS, **options}
    if given["mask"] is not None:
        check_mask(given["mask"])
        if any(given[name] is not None and given[name] is not False and given[name] != 0 for name in _SHORT_FORMS):
            raise ValueError(
                "mask must come without causal, window, prefix_len, chunk_len and lengths, got both; intersect them: "
                "mask=mask & masks.causal()"
            )
    return resolve_options(given) | {"impl": resolve_impl(given["impl"])}


def write_call(sharding: Sharding, kv_sharding: Sharding | None, record: Mapping[str, Any]) -> str:
    """Return the text of a call with resolved options."""
    here, there = ((x.rank, x.world_size, len(x.virtual_shards)) for x in (sharding, kv_sharding or sharding))
    if here != there:
        raise ValueError(
            f"kv_sharding must have the rank, ranks and virtual ranks of sharding, {here}, got {there}; make both with one ring"
        )
    keys = None if kv_sharding is None else kv_sharding.text
    mask = None if record["mask"] is None else record["mask"].text
    return (
        f"{{'sharding': {sharding.text}, 'kv_sharding': {keys}, 'causal': {record['causal']}, 'window': {record['window']}, "
        f"'prefix_len': {record['prefix_len']}, 'chunk_len': {record['chunk_len']}, 'lengths': {record['lengths']}, "
        f"'mask': {mask}, 'softmax_scale': {record['softmax_scale']}, 'softcap': {record['softcap']}, "
        f"'dropout_p': {record['dropout_p']}, 'impl': '{record['impl']}', 'backward': '{record['backward']}', "
        f"'deterministic': {record['deterministic']}, 'latents': {record['latents']}}}"
    )


def describe_record(record: Mapping[str, Any]) -> str:
    """Return a short text of a parsed call: the sequence, and options that differ from their defaults.

    Example:
        >>> record = {"sharding": '[8, "zigzag", 2, null, null]', "kv_sharding": None, "causal": True, "softcap": 0.0}
        >>> describe_record(record)
        'ring_attention(8 tokens, zigzag, causal=True)'
    """
    seq_len, layout, _, documents, _ = json.loads(record["sharding"])
    words = [f"{seq_len} tokens", layout]
    if documents is not None:
        words.append(f"{len(documents) - 1} documents")
    if record["kv_sharding"] is not None:
        words.append(f"{json.loads(record['kv_sharding'])[0]} keys")
    # a list of lengths is too long for a message
    named = [name for name in record if name in _DEFAULTS and name != "lengths"]
    words += [f"{name}={record[name]}" for name in named if record[name] != _DEFAULTS[name]]
    return f"ring_attention({', '.join(words)})"


def parse(text: str) -> Mapping[str, Any]:
    """Return the record that `serialize` wrote, as plain Python values."""
    return ast.literal_eval(text)
