"""The whole ring as one custom operator: forward, backward, fakes and gradients.

One operator per direction, because communication cannot be traced through: `torch.compile` sees two opaque calls, selective
checkpointing can keep the one that is expensive, and FLOP counters see the visible pairs. Groups are passed by name (Note
[Names] in ring.py). PyTorch's decorators for operators cost the host more per call: they check each time whether outputs alias
inputs, and pass arguments through general containers. So the operators are defined with their schemas and one
`torch.autograd.Function`.

Note [Beside compiled graphs]
    `torch.compile(mode="reduce-overhead")` captures CUDA graphs. In its eager first run, memory that outlives the run counts as
    a leak, as tables, buffers and programs of a ring do. And whether all ranks capture the same call is the caller's decision.
    So the operators carry the tag by which the compiler cuts its graph there and captures the code between. A capture by
    `torch.cuda.graph` ignores tags and has the ring inside.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ringattn.dispatch import resolve, ring_of, run_backward, run_forward, virtual_backward, virtual_forward
from ringattn.kernels.interface import accumulation_dtype
from ringattn.plan.attention_spec import ScoreTensors
from ringattn.plan.sharding import Sharding
from ringattn.schedule.execution_plan import BackwardCall, ForwardCall, WantedGrads
from ringattn.schedule.latents import Latents
from ringattn.tensor_checks import BatchDigest, has_tangent

_PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None)})
"""Types that do not override operators."""
_HARMLESS = ("torch.utils.flop_counter",)
"""Modules of dispatch modes that run every operator once, as it is."""

_LIBRARY = torch.library.Library("ringattn", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)  # Note [Beside compiled graphs]
_OPTIONS = (
    "Tensor? sinks, Tensor? alibi_slopes, Tensor? key_bias, Tensor? bias, SymInt dropout_seed, str ring, str call"
)
for _name, _keys in (("", "Tensor k, Tensor v"), ("latent_", "Tensor rows, Tensor k_up, Tensor v_up")):
    _LIBRARY.define(f"{_name}forward(Tensor q, {_keys}, {_OPTIONS}) -> (Tensor, Tensor)", tags=_TAGS)
    _LIBRARY.define(
        f"{_name}backward(Tensor? do, Tensor? dlse, Tensor q, {_keys}, Tensor o, Tensor lse, {_OPTIONS}, bool[] wanted) "
        "-> Tensor[]",
        tags=_TAGS,
    )

ring_attention_op = torch.ops.ringattn.forward.default
ring_attention_backward_op = torch.ops.ringattn.backward.default


class _SideValues(threading.local):
    """Values that pass beside the operator, per thread: they are no results of it.

    Gathered K/V that a forward saves (`Ring(save_gathered_kv=True)`) are saved by autograd like any tensor: they go when the
    backward has run, `retain_graph` keeps them, and recomputation of a checkpoint brings them again. Where the body of the
    operator may run once, twice or never (a compiler, selective checkpointing) nothing is saved, and the backward gathers.

    Attributes:
        save: The forward saves the gathered K/V, where it can.
        saved: The K/V that a forward saved, or that a backward is given.
        number: The number of the forward that has run, as a call of its ring; 0: none has.
        forward: The number of the forward whose backward runs; 0: unknown.
        batch: The digest of the batch that the next forwards are computed for, in compiled code too; None: of none.
    """

    save: bool = False
    saved: Tensor | None = None
    number: int = 0
    forward: int = 0
    batch: BatchDigest | None = None


side = _SideValues()
_num_forwards = [0]


def num_forwards() -> int:
    """Return how many forwards of ring attention this process has begun, in compiled code too."""
    return _num_forwards[0]


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    """Return o `b s h dv` and lse `b h s` of this rank's rows; arguments as the schemas name them, ring and call as text."""
    q, *keys, sinks, alibi_slopes, key_bias, bias, dropout_seed, ring, call = args
    if torch.is_autocast_enabled(q.device.type):
        with torch.autocast(q.device.type, enabled=False):
            return _forward(*args)
    _num_forwards[0] += 1
    tensors = ScoreTensors(sinks, alibi_slopes, key_bias, bias)
    k, v, latents = _keys_of(keys)
    here, plan, score, side.number = resolve(
        q, k, v, tensors, dropout_seed, ring, call, latents=latents, batch=side.batch
    )
    forward = ForwardCall(_rows(q), _rows(k), _rows(v), score, plan, here.context, latents)
    if plan.hosted:
        return virtual_forward(here, forward)
    o, lse, side.saved = run_forward(forward, keep=side.save)
    return o, lse


def _backward(do: Tensor | None, dlse: Tensor | None, *args: Any) -> list[Tensor]:
    """Return gradients of q, of the keys' tensors, and of the options that are wanted, in their tensors' dtypes."""
    q, *keys, o, lse, sinks, alibi_slopes, key_bias, bias, dropout_seed, ring, call, wanted = args
    if torch.is_autocast_enabled(q.device.type):
        with torch.autocast(q.device.type, enabled=False):
            return _backward(do, dlse, *args)
    tensors = ScoreTensors(sinks, alibi_slopes, key_bias, bias)
    k, v, latents = _keys_of(keys)
    here, plan, score, _ = resolve(q, k, v, tensors, dropout_seed, ring, call, side.forward, latents)
    do = torch.zeros_like(o) if do is None else _rows(_cast(do, o))
    rows = _rows(q), _rows(k), _rows(v)
    backward = BackwardCall(do, dlse, *rows, o, lse, score, plan, here.context, WantedGrads(*wanted), latents)
    grads = virtual_backward(here, backward) if plan.hosted else run_backward(backward, saved=side.saved)
    made = (grads.dk, grads.dv) if grads.latents is None else (grads.dk, grads.latents.k_up, grads.latents.v_up)
    found = (grads.dsinks, grads.dalibi, grads.dkey_bias, grads.dbias)
    result = [_cast(grad, x) for grad, x in zip((grads.dq, *made), (q, *keys), strict=True)]
    for grad, option in zip(found, tensors, strict=True):
        if grad is not None and option is not None:
            result.append(_cast(grad, option))
    return result


def _keys_of(keys: list[Tensor]) -> tuple[Tensor, Tensor, Latents | None]:
    """Return k and v, or stand-ins for them and the latents (rows, k_up, v_up) that they are made of."""
    if len(keys) == 2:
        return keys[0], keys[1], None
    latents = Latents(*(x.contiguous() for x in keys))
    return *latents.stand_ins(), latents


def _cast(x: Tensor, like: Tensor) -> Tensor:
    return x if x.dtype == like.dtype else x.to(like.dtype)


def _rows(x: Tensor) -> Tensor:
    """Return x with a contiguous last dimension, which is all that kernels require of strides."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _fake_forward(q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    *keys, _sinks, _alibi_slopes, _key_bias, _bias, _seed, _ring, _call = args
    b, s, h, _ = q.shape
    columns = keys[1].shape[-1] if len(keys) == 2 else keys[2].shape[1]
    return q.new_empty(b, s, h, columns), q.new_empty(b, h, s, dtype=accumulation_dtype(q.dtype))


def _fake_backward(_do: Tensor | None, _dlse: Tensor | None, *args: Any) -> list[Tensor]:
    q, *keys, _o, _lse, sinks, alibi_slopes, key_bias, bias, _seed, _ring, _call, wanted = args
    options = zip((sinks, alibi_slopes, key_bias, bias), wanted, strict=True)
    return [x.new_empty(x.shape) for x in (q, *keys, *(x for x, want in options if want and x is not None))]


def attend(*args: Any) -> tuple[Tensor, Tensor]:
    """Run the forward operator with its gradients.

    The dispatcher repacks the arguments three times per call for compilers, modes, subclasses of Tensor, functional transforms and
    profilers. Where none is active, the body is called as a function, with the same autograd around it.
    """
    return _differentiably(None, *args) if _is_unseen(args[:-3]) else _operators(args)[0](*args)


def _operators(args: Sequence[Any]) -> tuple[Any, Any]:
    """Return the operators of both directions for the arguments of a forward: of latents there is one tensor more."""
    return _OPERATORS[len(args)]


def _is_unseen(tensors: tuple[Tensor | None, ...]) -> bool:
    """Return whether no mode, transform, subclass or profiler would see operators on these tensors."""
    return not torch.compiler.is_compiling() and not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or not _PLAIN.issuperset(map(type, tensors))
        or torch._C._are_functorch_transforms_active()
        or _profiler_enabled()
        or torch._C._is_tracing()
    )


class _Attention(torch.autograd.Function):
    """Autograd of the forward operator."""

    @staticmethod
    def forward(ctx: Any, keys: Any, *args: Any) -> tuple[Tensor, Tensor]:
        """Run the forward; without keys of the dispatcher, as a function."""
        *tensors, ctx.dropout_seed, ctx.ring_name, ctx.call = args
        # the graph keeps the ring alive until it is used up
        ctx.ring = ring_of(ctx.ring_name)
        side.save, side.number = ctx.ring.save_gathered_kv and _runs_as_it_is(), 0
        try:
            o, lse = _below_autograd(keys, *args)
            saved, ctx.number = side.saved, side.number
        finally:
            side.save, side.saved = False, None
        ctx.save_for_backward(*tensors, o, lse, saved)
        ctx.wanted = [tensor is not None and tensor.requires_grad for tensor in tensors[-4:]]
        ctx.operator = _operators(args)[1]
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        do, dlse = grads
        if _is_batch(do) or _is_batch(dlse):
            _refuse(
                ctx.ring_name,
                "ring attention must be given one gradient at a time, got a batch of them (vmap, is_grads_batched=True or "
                "jacobian(vectorize=True)); loop over them with retain_graph=True, or use attention_reference",
            )
        *tensors, o, lse, side.saved = ctx.saved_tensors
        side.forward = ctx.number
        given, options = tensors[:-4], tensors[-4:]
        run = _short_backward if _is_unseen((do, dlse, *given, o, lse, *options)) else ctx.operator
        args = (do, dlse, *given, o, lse, *options, ctx.dropout_seed, ctx.ring_name, ctx.call, ctx.wanted)
        if torch.is_grad_enabled():
            run, args = _Gradients.apply, (ctx.operator, *args)
        try:
            made = run(*args)
        finally:
            side.saved, side.forward = None, 0
        rest = iter(made[len(given) :])
        options = (next(rest) if want else None for want in ctx.wanted)
        return None, *made[: len(given)], *options, None, None, None


class _Gradients(torch.autograd.Function):
    """Autograd of the backward operator: raises."""

    @staticmethod
    def forward(ctx: Any, operator: Any, *args: Any) -> tuple[Tensor, ...]:
        *_, ring, _, _ = args
        ctx.ring = ring_of(ring)
        return tuple(operator(*args))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        del grads
        _refuse(
            ctx.ring.name,
            "ring attention must be differentiated once, got a gradient of its gradients; use attention_reference for it",
        )


class _ExpandBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: Tensor, wanted: torch.Size, sharding: Sharding, is_shared: bool) -> Tensor:
        ctx.sizes, ctx.sharding, ctx.is_shared = bias.shape, sharding, is_shared
        return bias.expand(wanted)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ranks = ctx.sharding.hosted or (ctx.sharding,)
        parts = [sum_expanded(x, ctx.sizes, ctx.is_shared) for x in grad.split([rank.shard_len for rank in ranks], 2)]
        return ctx.sharding.ring.ordered_sum(parts) if ctx.is_shared else torch.cat(parts, -2), None, None, None


def expand_in_order(bias: Tensor, wanted: torch.Size, sharding: Sharding) -> Tensor:
    """Return a bias as `b h s n`; its gradient is summed by virtual rank, and that of shared rows then in their order.

    Whether a process with one row has a shared one the others know, if they have more or fewer.
    """
    ring: Any = sharding.ring
    is_shared = bias.shape[-2:-1] in ((), (1,))
    if bias.dim() > 1 and 1 in sharding.shard_lens:
        is_shared = ring.all_reduce_min(2 if is_shared and sharding.shard_len == 1 else is_shared) == 1
    if bias.shape == wanted and not is_shared:
        return bias
    return _ExpandBias.apply(bias, wanted, sharding, is_shared)  # pyright: ignore[reportReturnType]


def sum_expanded(grad: Tensor, sizes: torch.Size, is_shared: bool) -> Tensor:
    """Return the gradient of a bias of some sizes by one rank's rows of the expanded one, `b h s n`; is_shared: rows are one.

    The bits of a sum depend on shape and strides, so each virtual rank has its own.
    """
    return grad.contiguous().sum_to_size(sizes if is_shared else (*sizes[:-2], grad.shape[2], sizes[-1]))


def _is_batch(grad: Tensor | None) -> bool:
    """Return whether a gradient stands for several: autograd makes batches of one kind, torch.func of another."""
    return grad is not None and (is_legacy_batchedtensor(grad) or is_batchedtensor(grad))


def _runs_as_it_is() -> bool:
    """Return whether calling the operator runs its body, once, here and now."""
    if torch.compiler.is_compiling():
        return False
    if not torch._C._len_torch_dispatch_stack():
        return True
    return all(type(mode).__module__ in _HARMLESS for mode in _get_current_dispatch_mode_stack())


def _short_backward(*args: Any) -> list[Tensor]:
    with torch._C._AutoDispatchBelowAutograd():
        return _backward(*args)


def _below_autograd(keys: Any, *args: Any) -> tuple[Tensor, Tensor]:
    with torch._C._AutoDispatchBelowAutograd():
        if keys is None:
            return _forward(*args)
        return _operators(args)[0].redispatch(keys & torch._C._after_autograd_keyset, *args)


def _differentiably(keys: Any, *args: Any) -> tuple[Tensor, Tensor]:
    """Run the forward operator as autograd sees it; without keys of the dispatcher, as a function."""
    tensors, ring = args[:-3], args[-2]
    if forward_ad._current_level >= 0 and has_tangent(*tensors):
        _refuse(
            ring,
            "ring attention must be differentiated backward, got a tangent (torch.func.jvp or forward_ad); use "
            "attention_reference for it",
        )
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        if torch._C._are_functorch_transforms_active():
            _refuse(
                ring,
                "ring attention must be differentiated by autograd, got a gradient of torch.func; call "
                "torch.autograd.grad or backward(), or use attention_reference",
            )
        return _Attention.apply(keys, *args)
    return _below_autograd(keys, *args)


def _refuse(ring: str, why: str) -> NoReturn:
    """Raise NotImplementedError for a derivative, on every rank."""
    error = NotImplementedError(why)
    # nothing is published while a graph is traced: the other ranks trace the same
    if not torch.compiler.is_compiling():
        ring_of(ring).raise_on_all_ranks(error)
    raise error


for _name in ("", "latent_"):
    _LIBRARY.impl(f"{_name}forward", _forward, "CompositeExplicitAutograd")
    _LIBRARY.impl(f"{_name}backward", _backward, "CompositeExplicitAutograd")
    _LIBRARY.impl(f"{_name}forward", _differentiably, "Autograd", with_keyset=True)
    torch.library.register_fake(f"ringattn::{_name}forward", _fake_forward, lib=_LIBRARY)
    torch.library.register_fake(f"ringattn::{_name}backward", _fake_backward, lib=_LIBRARY)
_OPERATORS = {
    len(forward._schema.arguments): (forward, backward)
    for forward, backward in (
        (ring_attention_op, ring_attention_backward_op),
        (torch.ops.ringattn.latent_forward.default, torch.ops.ringattn.latent_backward.default),
    )
}
