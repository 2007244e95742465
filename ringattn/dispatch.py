"""Resolution of a call into an `ExecutionPlan`, once, and the schedule that runs it.

Validation, kernels and schedule depend on the call's text, the ring, and the shapes, dtypes, devices and requires_grad of its
tensors, never on values. So a call is resolved once and later found by one look into a table. A call that was refused is not
in the table: it is checked again. Agreement between ranks is recorded elsewhere (`Ring.consistent_call`), so dropping an
entry is harmless. Closing a ring, or deciding its transport, begins a new generation, whose calls are resolved again.

In a ring of virtual ranks (`Ring(virtual_size=)`) the rows of a process are cut by virtual rank. Each runs the plan and the loop of
a process of its own, in turns, and the results are put one after another. Sums over rows, which each rank returns as its share,
are added in the order of virtual ranks over all processes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ringattn.kernels.interface import KernelSet, RowMetadata, Score
from ringattn.kernels.registry import select_kernels
from ringattn.plan.attention_spec import AttentionSpec, ScoreTensors, serialize
from ringattn.plan.device_tables import sides_of, step_tables
from ringattn.plan.expressions import Mask
from ringattn.plan.ring_plan import Nodes
from ringattn.plan.sharding import Sharding
from ringattn.ring import Ring
from ringattn.ring_registry import RINGS, get_ring
from ringattn.schedule.execution_plan import (
    BackwardCall,
    ExecutionPlan,
    ForwardCall,
    Gradients,
    make_execution_plan,
    resolve_moving,
)
from ringattn.schedule.fused import fused_backward, fused_forward
from ringattn.schedule.fused_hierarchical import hierarchical_backward, hierarchical_forward
from ringattn.schedule.latents import LatentGrads, Latents
from ringattn.schedule.local import local_backward, local_forward
from ringattn.schedule.stepwise_backward import stepwise_backward
from ringattn.schedule.stepwise_forward import stepwise_forward
from ringattn.schedule.validation import check_call
from ringattn.tensor_checks import BatchDigest
from ringattn.transport.base import RingContext
from ringattn.transport.call_order import FORWARD

CAPACITY = 1024
"""Resolved calls that are kept; beyond it all are dropped, and resolved again as they come."""

_VALUES = frozenset({int, float, bool, str, type(None)})
"""Types of options by whose value a text can be found."""

_RankCall = tuple[Tensor, Tensor, Tensor, ScoreTensors]

_plans: dict[Hashable, ExecutionPlan] = {}
_specs: WeakValueDictionary[tuple[str, int, int], AttentionSpec] = WeakValueDictionary()
"""Records of calls by text, rank and number of processes, as long as their sharding is there."""


def call_text(sharding: Sharding, kv_sharding: Sharding | None, options: Mapping[str, Any]) -> str:
    """Return the text of a call (`serialize`), whose record the sharding keeps, except with `lengths`; impl None is the ring's."""
    values = tuple(options.values())
    # tracing must not see a table that changes
    if torch.compiler.is_compiling() or not all(map(is_value, values)):
        return serialize(sharding, kv_sharding, **_as_ring_wants(sharding, options))
    # 1 equals True and 1.0: options of other types have other texts
    key = (None if kv_sharding is None else kv_sharding.text, values, tuple(map(type, values)))
    spec = sharding.calls.get(key)
    if spec is None:
        spec = AttentionSpec.resolve(sharding, kv_sharding, _as_ring_wants(sharding, options))
        sharding.calls[key] = _specs[spec.text, spec.rank, sharding.world_size] = spec
    return spec.text


def _as_ring_wants(sharding: Sharding, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options with the ring's kernels in place of impl None, and deterministic where it has virtual ranks."""
    given = options.get("impl", "auto") is not None
    if given and sharding.ring_name is None:
        return options
    tracing = torch.compiler.is_compiling()
    ring = sharding.ring if tracing else ring_of(sharding.ring_name or sharding.ring.name)
    options = options if given else {**options, "impl": ring.impl}
    return {**options, "deterministic": True} if ring.is_virtual else options


def resolve(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: ScoreTensors,
    dropout_seed: int,
    ring: str,
    text: str,
    forward: int = FORWARD,
    latents: Latents | None = None,
    batch: BatchDigest | None = None,
) -> tuple[Ring, ExecutionPlan, Score, int]:
    """Return the ring, the plan, the score and the number of a call; every refusal happens here, on every rank.

    text is the call as `serialize` wrote it; forward is the number of the forward whose backward it is, 0 where that is unknown,
    FORWARD in a forward. With latents k and v are stand-ins. batch is the digest of the batch, if the call has one.
    """
    here = ring_of(ring)
    given = (q, k, v, *tensors) if latents is None else (q, *latents, *tensors)
    facts = (ring, here.generation, text, *map(_fact, given))
    plan = _plans.get(facts)
    if plan is None:
        spec = _specs.get((text, here.rank, here.world_size))
        if spec is None:
            with here.propagate_errors():
                spec = AttentionSpec.deserialize(text, here.rank, here.world_size)
        shares_seed = spec.dropout_p > 0 and spec.backward != "keys"
        with here.consistent_call(text, given, dropout_seed if shares_seed else 0) as agreement:
            check_call(q, k, v, spec, tensors)
            specs = spec.of_ranks() if here.is_virtual else [spec]
            calls: list[_RankCall] = [
                (*qkv, tensors._replace(key_bias=key_bias, bias=bias))
                for *qkv, key_bias, bias, _ in _cut(specs, q, k, v, tensors.key_bias, tensors.bias)
            ]
            kernels = [_select(call, one, here.nodes) for call, one in zip(calls, specs, strict=True)]
            offers = (_choose_faster(chosen, q, v) for chosen in kernels)
            agreement.faster = next((offer for offer in offers if offer is not None), None)
        # the first call of a ring decides its transport, which begins a generation
        facts = (ring, here.generation, *facts[2:])
        contexts = here.contexts(q.device) if here.is_virtual else (here.context,)
        plans = [
            make_execution_plan(one, *call, chosen, context, agreement.faster)
            for one, call, chosen, context in zip(specs, calls, kernels, contexts, strict=True)
        ]
        plan = replace(
            plans[0],
            mark=None if here.call_order is None else here.mark_call(text, given),
            shares_seed=shares_seed,
            hosted=tuple(plans) if here.is_virtual else (),
        )
        plan = _keep(facts, plan)
    if plan.shares_seed and plan.spec.backward == "queries":
        here.assert_equal_once("dropout_seed", str(dropout_seed))
    number = 0
    if here.call_order is not None and plan.mark is not None:
        seed = dropout_seed if plan.shares_seed else 0
        number = here.call_order.begin(plan.mark, seed, forward, q.device, batch)
    return here, plan, _score(plan, q, dropout_seed, tensors), number


def resolve_simulated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: ScoreTensors,
    dropout_seed: int,
    context: RingContext,
    text: str,
    latents: Latents | None = None,
) -> tuple[ExecutionPlan, Score]:
    """Return the plan and the score of a call of one simulated rank; takes arguments of `resolve`."""
    place = ("simulated", context.rank, context.world_size, context.nodes, context.budget)
    given = (q, k, v, *tensors) if latents is None else (q, *latents, *tensors)
    facts = (place, text, *map(_fact, given))
    plan = _plans.get(facts)
    if plan is None:
        spec = _specs.get((text, context.rank, context.world_size)) or AttentionSpec.deserialize(text, context.rank)
        check_call(q, k, v, spec, tensors)
        kernels = _select((q, k, v, tensors), spec, context.nodes)
        faster = _choose_faster(kernels, q, v)
        plan = _keep(facts, make_execution_plan(spec, q, k, v, tensors, kernels, context, faster))
    return plan, _score(plan, q, dropout_seed, tensors)


def run_forward(call: ForwardCall, *, keep: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return o, lse, and the saved K/V (Note [Saved K/V] in fused.py), by the schedule of the plan.

    keep: Save the gathered K/V for the backward, where both directions are fused; the same on all ranks.
    """
    latents = call.latents
    if latents is not None and call.plan.expands_at_owner:
        k, v = latents.expand(latents.rows, call.context.buffers)
        return run_forward(call._replace(k=k, v=v, latents=None), keep=keep)
    if call.context.world_size == 1 and latents is None:
        return *local_forward(call), None
    if call.plan.fused_forward is None:
        return *stepwise_forward(call), None
    if call.context.nodes is not None:
        return *hierarchical_forward(call), None
    return fused_forward(call, keep=keep)


def run_backward(call: BackwardCall, *, saved: Tensor | None = None) -> Gradients:
    """Return the gradients of `run_forward` by the schedule of the plan; dlse may be anything on rows that saw nothing."""
    if call.dlse is not None:
        call = call._replace(dlse=call.dlse.masked_fill(call.lse == float("-inf"), 0.0))
    latents = call.latents
    if latents is not None and call.plan.expands_at_owner:
        k, v = latents.expand(latents.rows, call.context.buffers)
        grads, latent_grads = run_backward(call._replace(k=k, v=v, latents=None), saved=saved), LatentGrads(latents)
        return replace(grads, dk=latent_grads.project(grads.dk, grads.dv), latents=latent_grads)
    if call.context.world_size == 1 and latents is None:
        return local_backward(call)
    if call.plan.fused_backward is None:
        return stepwise_backward(call)
    if call.context.nodes is not None:
        return hierarchical_backward(call)
    return fused_backward(call, saved=saved)


def virtual_forward(ring: Ring, call: ForwardCall) -> tuple[Tensor, Tensor]:
    """Return o and lse of the rows of all virtual ranks of this process."""
    parts = _parts(ring, call)
    found = ring.run_ranks(call.q.device, lambda i: run_forward(parts[i])[:2])
    return cat_rows([o for o, _ in found], 1), cat_rows([lse for _, lse in found], 2)


def virtual_backward(ring: Ring, call: BackwardCall) -> Gradients:
    """Return the gradients of `virtual_forward`; shares of sums over rows are their total on rank 0, and zeros elsewhere."""
    parts = _parts(ring, call)
    lens = [plan.spec.sharding.shard_len for plan in call.plan.hosted]
    rows: Any = [_split(x, lens, dim) for x, dim in ((call.do, 1), (call.dlse, 2), (call.o, 1), (call.lse, 2))]

    def run(i: int) -> Gradients:
        (do, dlse, o, lse), (q, k, v, score, plan, context, latents) = (x[i] for x in rows), parts[i]
        return run_backward(BackwardCall(do, dlse, q, k, v, o, lse, score, plan, context, call.wanted, latents))

    found = ring.run_ranks(call.q.device, run)
    shares = [_shares(grads) for grads in found]
    if shares[0]:
        flat = ring.ordered_sum([torch.cat([x.flatten() for x in share]) for share in shares])
        for x, total in zip(shares[0], flat.split([x.numel() for x in shares[0]]), strict=True):
            x.copy_(total.view(x.shape))
    rounded, wide = call.q.dtype, call.plan.wide
    joined = {"dq": (1, rounded), "dk": (1, rounded), "dv": (1, rounded), "dkey_bias": (1, wide), "dbias": (2, wide)}
    made = {name: cat_rows([getattr(x, name) for x in found], *how) for name, how in joined.items()}
    return replace(found[0], **made)


def _shares(grads: Gradients) -> list[Tensor]:
    """Return the gradients that are sums over rows."""
    found = [grads.dsinks, grads.dalibi]
    if grads.latents is not None:
        found += grads.latents.shares()
    return [x for x in found if x is not None]


def _parts(ring: Ring, call: ForwardCall | BackwardCall) -> list[ForwardCall]:
    """Return the forward of each virtual rank of this process."""
    plans, score, latents = call.plan.hosted, call.score, call.latents
    rows = None if latents is None else latents.rows
    cut = _cut([plan.spec for plan in plans], call.q, call.k, call.v, score.key_bias, score.bias, rows)
    found = []
    for plan, context, (q, k, v, key_bias, bias, own) in zip(plans, ring.contexts(call.q.device), cut, strict=True):
        # the bits of a product may depend on where in memory its rows begin
        given = None if latents is None else latents._replace(rows=own if own is rows else own.clone())
        found.append(ForwardCall(q, k, v, replace(score, key_bias=key_bias, bias=bias), plan, context, given))
    return found


def _cut(
    specs: Sequence[AttentionSpec],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_bias: Tensor | None,
    bias: Tensor | None,
    latents: Tensor | None = None,
) -> list[tuple[Any, ...]]:
    """Return the tensors of each rank that this process is: the rows of its virtual ranks, where there are several."""
    lens, key_lens = [x.sharding.shard_len for x in specs], [x.kv_sharding.shard_len for x in specs]
    columns = (q, lens, 1), (k, key_lens, 1), (v, key_lens, 1), (key_bias, key_lens, 1), (bias, lens, 2)
    return list(zip(*(_split(*column) for column in (*columns, (latents, key_lens, 1))), strict=True))


def _split(x: Tensor | None, lens: list[int], dim: int) -> Sequence[Tensor | None]:
    return [x] * len(lens) if x is None or len(lens) == 1 else x.split(lens, dim)


def cat_rows(parts: list[Any], dim: int, dtype: torch.dtype | None = None) -> Any:
    """Return the rows of the virtual ranks of a process, or None, one after another; copying several rounds to dtype."""
    if len(parts) == 1 or parts[0] is None:
        return parts[0]
    return torch.cat(parts, dim, out=parts[0].new_empty(0, dtype=dtype))


def ring_of(name: str) -> Ring:
    """Return the live ring of a name, or raise RuntimeError."""
    return RINGS.get(name) or get_ring(name)


def _fact(x: Tensor | None) -> Hashable:
    """Return all of a tensor that decides a call."""
    return None if x is None else (x.shape, x.dtype, x.device, x.requires_grad)


def _select(call: _RankCall, spec: AttentionSpec, nodes: Nodes | None) -> type[KernelSet]:
    q, k, v, tensors = call

    def steps() -> list[tuple[RowMetadata, RowMetadata]]:
        moving = resolve_moving(spec, q, k, v, has_bias=tensors.bias is not None, nodes=nodes)
        return [pair for side in {"keys", moving} for pair in sides_of(step_tables(spec, side, q.device, nodes), side)]

    features, dims = spec.features(tensors), (q.shape[-1], v.shape[-1])
    return select_kernels(q.device, q.dtype, *dims, impl=spec.impl, features=features, steps=steps).kernels


def _choose_faster(kernels: type[KernelSet], q: Tensor, v: Tensor) -> tuple[str, str] | None:
    choose = kernels.choose_faster
    return None if choose is None else choose(q.device, q.dtype, q.shape[-1], v.shape[-1])


def _score(plan: ExecutionPlan, q: Tensor, dropout_seed: int, tensors: ScoreTensors) -> Score:
    return plan.spec.score(q.dtype, dropout_seed, tensors) if plan.score is None else plan.score


def _keep(facts: Hashable, plan: ExecutionPlan) -> ExecutionPlan:
    if len(_plans) >= CAPACITY:
        _plans.clear()
    _plans[facts] = plan
    return plan


def is_value(x: Any) -> bool:
    """Return whether an option has a type whose value, with the type, can be a key."""
    if type(x) is tuple:
        return all(y is None or type(y) in (int, str) for y in x)
    return type(x) in _VALUES or isinstance(x, Mask)
