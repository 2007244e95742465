"""The whole ring as one custom operator: forward, backward, fakes and gradients.

Owns what is saved and what is handed back. One operator per direction, because communication cannot be traced through:
`torch.compile` sees two opaque calls, selective checkpointing can keep the one that is expensive, and FLOP counters see
the visible pairs. Groups travel by name (Note [Names] in ring.py).

Note [Operators by hand]
    PyTorch's decorators for operators would say the same in fewer lines, and cost the host more per call: they ask each time
    whether outputs alias inputs, which ours never do, and carry arguments through general containers. So the operators are
    defined with their schemas, and what autograd does with them is one `torch.autograd.Function`.

Note [The short way]
    A dispatcher takes a call apart and puts it together again, twice forward and once backward, for whoever wants to see
    operators: compilers, modes, subclasses of Tensor, functional transforms, profilers. Where nobody looks, the bodies are called
    as the functions that they are, with the same autograd around them. Nobody can tell from results which way was taken.

Note [Beside the operators]
    Keys that a forward keeps for its backward (`Ring(save_gathered_kv=True)`) are no result of the operator: they pass beside it,
    in the thread that runs it. Autograd saves them like any tensor, so they go when the backward has run, `retain_graph` keeps
    them, and a checkpoint that forgets them brings them again as it recomputes. Where something else may answer for the operator
    (a compiler, selective checkpointing) its body may run once, twice or never: nothing is kept there, and the backward gathers.

Note [Beside compiled graphs]
    `torch.compile(mode="reduce-overhead")` captures CUDA graphs by itself. It makes its eager first run inside the memory pool
    of its graphs, and takes whatever outlives that run for a leak. What a ring makes at first sight does outlive it: tables,
    buffers, programs. And whether all ranks capture the same call is for the caller to say, not for a compiler's heuristics.
    So both operators carry the tag by which the compiler leaves them out: it cuts its graph there, captures what lies
    between, and calls the ring as eager code does. A capture by hand, `torch.cuda.graph`, asks no tags and has the ring inside.
"""

from __future__ import annotations

import threading
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ringattn.dispatch import resolve, ring_of, run_backward, run_forward
from ringattn.kernels.interface import accumulation_dtype
from ringattn.plan.attention_spec import ScoreTensors
from ringattn.schedule.stepwise_backward import WantedGrads
from ringattn.tensor_checks import has_tangent

_PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None)})
"""What has no ideas of its own about operators."""
_HARMLESS = ("torch.utils.flop_counter",)
"""Where dispatch modes are defined that run every operator once, as it is."""

_LIBRARY = torch.library.Library("ringattn", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)  # Note [Beside compiled graphs]
_OPTIONS = (
    "Tensor? sinks, Tensor? alibi_slopes, Tensor? key_bias, Tensor? bias, SymInt dropout_seed, str ring, str call"
)
_LIBRARY.define(f"forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)", tags=_TAGS)
_LIBRARY.define(
    f"backward(Tensor? do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, {_OPTIONS}, bool[] wanted) "
    "-> Tensor[]",
    tags=_TAGS,
)

ring_attention_op = torch.ops.ringattn.forward.default
ring_attention_backward_op = torch.ops.ringattn.backward.default


class _Aside(threading.local):
    """What passes beside an operator (Note [Beside the operators]).

    Attributes:
        keep: A forward keeps the keys of others, where it can.
        kept: What it kept, or what a backward is given.
        made: The number of a forward that has run, as a call of its ring; 0: none has.
        forward: That of the forward whose backward runs; 0: unknown.
    """

    keep: bool = False
    kept: Tensor | None = None
    made: int = 0
    forward: int = 0


_aside = _Aside()


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    key_bias: Tensor | None,
    bias: Tensor | None,
    dropout_seed: int,
    ring: str,
    call: str,
) -> tuple[Tensor, Tensor]:
    """O `b s h dv` and lse `b h s` of this rank's rows; arguments as in `ring_attention`, ring and call as text."""
    args = (q, k, v, sinks, alibi_slopes, key_bias, bias, dropout_seed, ring, call)
    if torch.is_autocast_enabled(q.device.type):
        with torch.autocast(q.device.type, enabled=False):
            return _forward(*args)
    tensors = ScoreTensors(sinks, alibi_slopes, key_bias, bias)
    here, plan, score, _aside.made = resolve(q, k, v, tensors, dropout_seed, ring, call)
    o, lse, _aside.kept = run_forward(_rows(q), _rows(k), _rows(v), score, plan, here.context, keep=_aside.keep)
    return o, lse


def _backward(
    do: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    key_bias: Tensor | None,
    bias: Tensor | None,
    dropout_seed: int,
    ring: str,
    call: str,
    wanted: list[bool],
) -> list[Tensor]:
    """dq, dk, dv and those of dsinks, dalibi_slopes, dkey_bias, dbias that are wanted, each in its tensor's dtype."""
    tensors = ScoreTensors(sinks, alibi_slopes, key_bias, bias)
    if torch.is_autocast_enabled(q.device.type):
        with torch.autocast(q.device.type, enabled=False):
            return _backward(do, dlse, q, k, v, o, lse, *tensors, dropout_seed, ring, call, wanted)
    here, plan, score, _ = resolve(q, k, v, tensors, dropout_seed, ring, call, _aside.forward)
    do = torch.zeros_like(o) if do is None else _rows(_as(do, o))
    grads = run_backward(
        do,
        dlse,
        _rows(q),
        _rows(k),
        _rows(v),
        o,
        lse,
        score,
        plan,
        here.context,
        WantedGrads(*wanted),
        saved=_aside.kept,
    )
    found = (grads.dsinks, grads.dalibi, grads.dkey_bias, grads.dbias)
    result = [_as(grads.dq, q), _as(grads.dk, k), _as(grads.dv, v)]
    for grad, option in zip(found, tensors, strict=True):
        if grad is not None and option is not None:
            result.append(_as(grad, option))
    return result


def _as(x: Tensor, like: Tensor) -> Tensor:
    """X in the dtype of another tensor."""
    return x if x.dtype == like.dtype else x.to(like.dtype)


def _rows(x: Tensor) -> Tensor:
    """X with a contiguous last dimension, which is all that kernels ask of strides."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    key_bias: Tensor | None,
    bias: Tensor | None,
    dropout_seed: int,
    ring: str,
    call: str,
) -> tuple[Tensor, Tensor]:
    del k, sinks, alibi_slopes, key_bias, bias, dropout_seed, ring, call
    b, s, h, _ = q.shape
    return q.new_empty(b, s, h, v.shape[-1]), q.new_empty(b, h, s, dtype=accumulation_dtype(q.dtype))


def _fake_backward(
    do: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    key_bias: Tensor | None,
    bias: Tensor | None,
    dropout_seed: int,
    ring: str,
    call: str,
    wanted: list[bool],
) -> list[Tensor]:
    del do, dlse, o, lse, dropout_seed, ring, call
    options = (sinks, alibi_slopes, key_bias, bias)
    kept = [x for x, want in zip(options, wanted, strict=True) if want and x is not None]
    return [x.new_empty(x.shape) for x in (q, k, v, *kept)]


def attend(*args: Any) -> tuple[Tensor, Tensor]:
    """The forward operator, of its arguments and with its gradients, by the shortest way (Note [The short way])."""
    return _differentiably(None, *args) if _is_unseen(args[:7]) else ring_attention_op(*args)


def _is_unseen(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether nobody would notice operators on these tensors."""
    return not torch.compiler.is_compiling() and not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or not _PLAIN.issuperset(map(type, tensors))
        or torch._C._are_functorch_transforms_active()
        or _profiler_enabled()
        or torch._C._is_tracing()
    )


class _Attention(torch.autograd.Function):
    """What autograd does with a call of the forward operator."""

    @staticmethod
    def forward(ctx: Any, keys: Any, *args: Any) -> tuple[Tensor, Tensor]:
        """Keys of the dispatcher; None: the short way."""
        *tensors, ctx.dropout_seed, ctx.ring, ctx.call = args
        # the graph keeps the ring alive until it is used up
        ctx.living_ring = ring_of(ctx.ring)
        _aside.keep, _aside.made = ctx.living_ring.save_gathered_kv and _runs_as_it_is(), 0
        try:
            o, lse = _below_autograd(keys, *args)
            kept, ctx.number = _aside.kept, _aside.made
        finally:
            _aside.keep, _aside.kept = False, None
        ctx.save_for_backward(*tensors, o, lse, kept)
        ctx.wanted = [tensor is not None and tensor.requires_grad for tensor in tensors[3:]]
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        do, dlse = grads
        if _is_batch(do) or _is_batch(dlse):
            _refuse(
                ctx.ring,
                "ring attention must be given one gradient at a time, got a batch of them (vmap, is_grads_batched=True or "
                "jacobian(vectorize=True)); loop over them with retain_graph=True, or use attention_reference",
            )
        q, k, v, *options, o, lse, _aside.kept = ctx.saved_tensors
        _aside.forward = ctx.number
        run = _short_backward if _is_unseen((do, dlse, q, k, v, o, lse, *options)) else ring_attention_backward_op
        run = _Gradients.apply if torch.is_grad_enabled() else run
        args = (do, dlse, q, k, v, o, lse, *options, ctx.dropout_seed, ctx.ring, ctx.call, ctx.wanted)
        try:
            dq, dk, dv, *others = run(*args)
        finally:
            _aside.kept, _aside.forward = None, 0
        rest = iter(others)
        return None, dq, dk, dv, *(next(rest) if want else None for want in ctx.wanted), None, None, None


class _Gradients(torch.autograd.Function):
    """What autograd does with gradients that are differentiated themselves: it refuses."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        *_, ring, _, _ = args
        ctx.living_ring = ring_of(ring)
        return tuple(ring_attention_backward_op(*args))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        del grads
        _refuse(
            ctx.living_ring.name,
            "ring attention must be differentiated once, got a gradient of its gradients; use attention_reference for it",
        )


def _is_batch(grad: Tensor | None) -> bool:
    """Whether a gradient stands for several: autograd makes batches of one kind, torch.func of another."""
    return grad is not None and (is_legacy_batchedtensor(grad) or is_batchedtensor(grad))


def _runs_as_it_is() -> bool:
    """Whether calling the operator runs its body, once, here and now."""
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
        return ring_attention_op.redispatch(keys & torch._C._after_autograd_keyset, *args)


def _differentiably(keys: Any, *args: Any) -> tuple[Tensor, Tensor]:
    """The forward operator as autograd sees it; without keys of the dispatcher, the short way."""
    if forward_ad._current_level >= 0 and has_tangent(*args[:7]):
        _refuse(
            args[8],
            "ring attention must be differentiated backward, got a tangent (torch.func.jvp or forward_ad); use "
            "attention_reference for it",
        )
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in args[:7]):
        if torch._C._are_functorch_transforms_active():
            _refuse(
                args[8],
                "ring attention must be differentiated by autograd, got a gradient of torch.func; call "
                "torch.autograd.grad or backward(), or use attention_reference",
            )
        return _Attention.apply(keys, *args)
    return _below_autograd(keys, *args)


def _refuse(ring: str, why: str) -> NoReturn:
    """Refuses a derivative, on every rank."""
    error = NotImplementedError(why)
    # while a graph is traced nothing is said to others: they trace the same
    if not torch.compiler.is_compiling():
        ring_of(ring).raise_on_all_ranks(error)
    raise error


_LIBRARY.impl("forward", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("backward", _backward, "CompositeExplicitAutograd")
_LIBRARY.impl("forward", _differentiably, "Autograd", with_keyset=True)
torch.library.register_fake("ringattn::forward", _fake_forward, lib=_LIBRARY)
torch.library.register_fake("ringattn::backward", _fake_backward, lib=_LIBRARY)
