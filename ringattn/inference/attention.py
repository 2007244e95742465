"""Attention of new tokens over a cache: one function for prefill and decode.

Owns what a layer of a model calls, and every refusal of it. Refuses to know transformers, and how partial results are computed
and travel.

Note [Once per kind]
    All layers of a model make the same few kinds of calls with a step: options, shapes and dtypes. What follows from a kind
    (whether it is right, that all ranks mean the same, which kernels serve it, what moves) is decided at the first layer and
    kept with the step; a later layer looks it up. A step lives for one call of the model, so nothing has to be forgotten; what is
    kept does not hold the step, whose memory on the device is free as soon as nobody has it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ringattn.inference.forward_batch import ForwardBatch
from ringattn.inference.paged_prefill import KV_ACCESS_MODES, resolve_kv_access
from ringattn.inference.prefill import (
    COMM_MODES,
    Prefill,
    find_paged_rows,
    growth_limit,
    plan_queries,
    resolve_comm_mode,
)
from ringattn.kernels.decode.dispatch import decode, num_splits, parts_len, plan_splits, select_decode_kernel
from ringattn.kernels.interface import Score, accumulation_dtype
from ringattn.kernels.partials.merge import merge_stack
from ringattn.kernels.partials.packed import finish_parts, views
from ringattn.kernels.registry import select_kernels
from ringattn.plan.attention_spec import AttentionSpec, ScoreTensors
from ringattn.plan.mask import AttentionMask
from ringattn.plan.options import resolve_flag, resolve_real, resolve_window
from ringattn.schedule.execution_plan import make_execution_plan
from ringattn.schedule.validation import check_softcap
from ringattn.tensor_checks import check_tensor

Window = tuple[int | None, int | None] | None
Given = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
"""q, k, v, sinks and alibi_slopes."""
_TENSORS = ("q", "k", "v", "sinks", "alibi_slopes")
Wanted = tuple[bool, Any, float | None, float, int | None, str, str]
"""causal, window, softmax_scale, softcap, chunk_len and moves."""


def attend(
    step: ForwardBatch,
    layer: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    chunk_len: int | None = None,
    comm_mode: str = "auto",
    kv_access: str = "auto",
) -> Tensor:
    """Keeps the keys of new tokens and attends with their queries over all that their requests have.

    Every rank makes the same call for the same step: with this rank's rows of the new tokens in prefill, with all of them in
    decode. Options mean what they mean in `ring_attention`, positions being those of tokens in their request; tokens of different
    requests do not see each other. Serves inference only: results have no graph.

    Args:
        step: What `PagedKVCache.extend` returned.
        layer: Which layer of the cache.
        q: `batch rows h d`, rotary embeddings applied.
        k: `batch rows hk d`, likewise.
        v: `batch rows hk dv`.
        causal: Tokens see earlier ones only.
        window: As in `ring_attention`.
        softmax_scale: Factor on q.k; default d ** -0.5.
        softcap: Bound of the soft cap; 0.0 for none. At most 2**13 in fp16, and 2**16 in bf16.
        sinks: `h`.
        alibi_slopes: `h`.
        chunk_len: Tokens see those of their own chunk of so many tokens. Chunks are counted from the first token of the request
            that is seen.
        comm_mode: What goes round the ring in prefill: "keys", "queries", or "auto" for whichever is fewer bytes.
        kv_access: How a prefill reads what is kept: "copies" of all pages in one piece, for the kernels of training; "pages" where
            they lie, with the kernel of decoding; or "auto" for whichever is faster by its counts (Note [In place or copied] of
            paged_prefill.py). Keys that move are copied, so "pages" makes queries move. Decode always reads pages.

    Returns:
        `batch rows h dv`, q's dtype. In decode every rank has the same bits.

    Raises:
        ValueError: A shape, dtype, device or option is inconsistent; something requires gradients; the step is out of date; or
            ranks differ. Nothing is kept or moved then. It is raised on every rank wherever ranks compare: at the first layer of
            a prefill, and of a decode by other requests than before (of a static step: soon after; Note [When ranks compare] of
            consistency.py). Elsewhere the others find that this rank does not come.
        TypeError: A tensor is something else.
        NotImplementedError: No kernel serves the call, or a tensor has a meaning of its own.
        RuntimeError: A transfer failed or timed out.

    Example:
        >>> from ringattn import Ring
        >>> from ringattn.inference import PagedKVCache
        >>> sizes = {"layers": 1, "kv_heads": 1, "head_dim": 16, "pages": 2, "page_size": 16}
        >>> cache = PagedKVCache(Ring(), dtype=torch.float32, device="cpu", **sizes)
        >>> step = cache.extend([cache.add_request(reserve=20)], [20])
        >>> x = torch.ones(1, 20, 1, 16)
        >>> attend(step, 0, step.take(x), step.take(x), step.take(x)).shape
        torch.Size([1, 20, 1, 16])
    """
    run = _beside_compilers() if "torch._dynamo" in sys.modules else _attend
    given = (q, k, v, sinks, alibi_slopes)
    try:
        for name, x in zip(_TENSORS, given, strict=True):
            if x is not None or name in "qkv":
                check_tensor(name, x)
        scale = None if softmax_scale is None else resolve_real("softmax_scale", softmax_scale)
        softcap, causal = resolve_real("softcap", softcap), resolve_flag("causal", causal)
        options = (causal, resolve_window(window), scale, softcap, chunk_len, comm_mode, kv_access)
    except Exception as error:
        step.cache.ring.raise_on_all_ranks(error)
    return run(step, layer, given, options)


attend._torchdynamo_disable = True  # pyright: ignore[reportFunctionMemberAccess]


_hidden: list[Callable[..., Tensor]] = []


def _beside_compilers() -> Callable[..., Tensor]:
    """`_attend`, which a compiler leaves alone; asking for it imports the compiler."""
    if not _hidden:
        _hidden.append(torch.compiler.disable(_attend))  # pyright: ignore[reportArgumentType]
    return _hidden[0]


def _attend(step: ForwardBatch, layer: int, given: Given, wanted: Wanted) -> Tensor:
    """`attend` of q, k, v, sinks and alibi_slopes, as options say."""
    q, k, v, sinks, alibi_slopes = given
    key = (*wanted, *map(_facts, given))
    known = step.calls.get(key)
    if known is None:
        try:
            _check_gradients(given)
            step.check_rows(layer, k, v)
            options = _Options(*wanted)
            found = _decide(step, options, q, sinks, alibi_slopes)
        except Exception as error:
            step.cache.ring.raise_on_all_ranks(error)
        step.cache.consistency.check_batch(step, _kind(options, given), q.device)
        known = step.calls[key] = found.ready(step, q)
    else:
        _check_gradients(given)
    with torch.no_grad():
        k, v = step.put(layer, k, v, contain=known.contains)
        return known.attend(step, layer, q, k, v, sinks, alibi_slopes)


@dataclass(frozen=True)
class _Options:
    causal: bool
    window: Window
    softmax_scale: float | None
    softcap: float
    chunk_len: int | None
    comm_mode: str
    kv_access: str

    def scale(self, q: Tensor) -> float:
        return q.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale


@dataclass(frozen=True, eq=False)
class _Prefill:
    """A prefill that is right, before ranks have agreed on it."""

    spec: AttentionSpec
    options: _Options
    tensors: ScoreTensors

    def ready(self, step: ForwardBatch, q: Tensor) -> Prefill:
        spec, options, cache, several = self.spec, self.options, step.cache, step.cache.ring.world_size > 1
        features = spec.features(self.tensors)
        kernels = select_kernels(
            q.device, q.dtype, q.shape[-1], cache.v_head_dim, impl=spec.impl, features=features
        ).kernels
        fresh = step.lengths == step.counts
        wanted = "queries" if several and options.kv_access == "pages" else options.comm_mode
        comm_mode = resolve_comm_mode(wanted, step, spec, q, fresh)
        left = None if options.window is None else options.window[0]
        if options.chunk_len is not None:
            left = options.chunk_len if left is None else min(left, options.chunk_len)
        kv_access = (
            "copies" if several and comm_mode == "keys" else resolve_kv_access(options.kv_access, step, q, left, fresh)
        )
        query_plan = (
            plan_queries(spec, q.device) if comm_mode == "queries" and (several or kv_access == "copies") else None
        )
        paged_rows = find_paged_rows(step, spec, query_plan, q.shape[2]) if kv_access == "pages" else None
        # shapes of keys and values; how many rows there are is no matter
        k, v = (
            torch.empty(q.shape[0], 0, cache.kv_heads, d, dtype=q.dtype, device="meta")
            for d in (cache.head_dim, cache.v_head_dim)
        )
        plan = make_execution_plan(spec, q, k, v, self.tensors, kernels, cache.ring.context)
        return Prefill(plan, comm_mode, kv_access, fresh, query_plan, paged_rows, growth_limit(step))


@dataclass(frozen=True, eq=False)
class _Decode:
    """A decode that is right."""

    options: _Options
    contains: ClassVar[bool] = False  # pages are read

    def ready(self, step: ForwardBatch, q: Tensor) -> _Decode:
        del step, q
        return self

    def attend(
        self,
        step: ForwardBatch,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        alibi_slopes: Tensor | None,
    ) -> Tensor:
        """O `batch rows h dv`, the same bits on all ranks; the keys are in the cache."""
        del k, v
        cache, table, positions = step.cache, step.table, step.positions32
        assert table is not None, "a step of decoding has a table"
        assert positions is not None, "a step of decoding has positions of 32 bits"
        wide = accumulation_dtype(q.dtype)
        (b, s), h = step.tiles, q.shape[2]
        dv, rows = cache.v_head_dim, b * s * h
        q = q if q.stride(-1) == 1 else q.contiguous()
        if step.pieces is not None:
            q = q[0].unflatten(0, (b, s))
        slopes = None if alibi_slopes is None else alibi_slopes.to(wide)
        sinks = None if sinks is None else sinks.to(wide)
        score = Score(self.options.scale(q), self.options.softcap, alibi_slopes=slopes)
        blocks, width = table.pages.shape[1], max(cache.head_dim, dv)
        splits = num_splits(
            b,
            s,
            h,
            cache.kv_heads,
            blocks,
            cache.page_size,
            q.device,
            head_dim=width,
            kv_dtype=cache.kv_dtype,
            same_length=step.pieces is not None,
        )
        parts = torch.empty(splits, parts_len(rows, dv), dtype=wide, device=q.device)
        lo, hi = step.bounds(self.options.causal, self.options.window, self.options.chunk_len)
        k_scale, v_scale = cache.scales(layer)
        pools = cache.k[layer], cache.v[layer]
        split_plan = step.once(
            (self.options, tuple(q.shape), q.dtype, splits), lambda: plan_splits(q, *pools, table, lo, hi, splits)
        )
        decode(
            q, *pools, table, lo, hi, positions, score, parts, k_scale=k_scale, v_scale=v_scale, split_plan=split_plan
        )
        o = torch.empty(b, s, h, dv, dtype=q.dtype, device=q.device)
        lse = torch.empty(b, h, s, dtype=wide, device=q.device)
        if wide == torch.float32:
            cache.ring.partial_reducer(q.device).merge_partials(parts, b, s, h, dv, sinks, o, lse)
            return o.view(step.batch, step.rows, h, dv)
        # exchanges are of fp32
        mine = torch.empty_like(parts[:1])
        for target, x in zip(views(mine[0], rows, dv), merge_stack(*views(parts, rows, dv), log2=True), strict=True):
            target.copy_(x)
        stack = torch.cat(cache.ring.gather(mine, 0, (1,) * cache.ring.world_size))
        finish_parts(stack, rows, dv, sinks, o, lse)
        return o.view(step.batch, step.rows, h, dv)


def _decide(
    step: ForwardBatch,
    options: _Options,
    q: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
) -> _Prefill | _Decode:
    """Refuses what is wrong, and says what the call is."""
    _check_tensors(step, q, sinks, alibi_slopes)
    _check_options(options, q.dtype)
    cache = step.cache
    total = max(1, sum(step.lengths)) if step.sharding is None else step.sharding.seq_len
    lengths = (
        tuple((first, step.lengths[0]) for first in step.firsts)
        if step.sharding is not None and any(step.firsts)
        else None
    )
    documents = None if step.sharding is None else step.sharding.documents
    mask = AttentionMask(
        total,
        total,
        causal=options.causal,
        window=options.window,
        documents=documents,
        chunk_len=options.chunk_len,
        lengths=lengths,
        chunks_restart=True,
    )
    if step.mode == "decode":
        select_decode_kernel(q.device, q.dtype, cache.kv_dtype, q.shape[-1], cache.v_head_dim, cache.page_size)
        return _Decode(options)
    assert step.sharding is not None, "a step of prefill has shardings"
    assert step.kv_sharding is not None, "a step of prefill has shardings"
    spec = AttentionSpec(
        step.sharding,
        step.kv_sharding,
        mask,
        softmax_scale=options.scale(q),
        softcap=options.softcap,
        dropout_p=0.0,
        impl=cache.ring.impl,
        backward="auto",
        deterministic=False,
        forward_only=True,
    )
    tensors = ScoreTensors(sinks, alibi_slopes)
    select_kernels(q.device, q.dtype, q.shape[-1], cache.v_head_dim, impl=spec.impl, features=spec.features(tensors))
    if options.kv_access != "copies":
        select_decode_kernel(q.device, q.dtype, cache.kv_dtype, q.shape[-1], cache.v_head_dim, cache.page_size)
    return _Prefill(spec, options, tensors)


def _facts(x: Tensor | None) -> Any:
    return None if x is None else (x.shape, x.dtype, x.device)


def _kind(options: _Options, given: Given) -> str:
    """Return a text of all that must be equal on all ranks; rows may differ."""
    shapes = [
        None
        if x is None
        else f"{[n for i, n in enumerate(x.shape) if (i, x.dim()) != (1, 4)]} {x.dtype} {x.device.type}"
        for x in given
    ]
    return f"{options} of {shapes}"


def _check_gradients(given: Given) -> None:
    if torch.is_grad_enabled():
        for name, x in zip(_TENSORS, given, strict=True):
            if x is not None and x.requires_grad:
                raise ValueError(
                    f"{name} must not require gradients, which a cache does not serve, got requires_grad=True; "
                    "call the model under torch.inference_mode() or torch.no_grad(), or train with ring_attention"
                )


def _check_tensors(step: ForwardBatch, q: Tensor, sinks: Tensor | None, alibi_slopes: Tensor | None) -> None:
    """Check the tensors that the cache does not check."""
    cache = step.cache
    for name, x in (("q", q), ("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if x is None:
            continue
        if x.device != cache.device:
            raise ValueError(
                f"{name} must be on the device of the cache, {cache.device}, got {x.device}; move it there"
            )
    if q.dim() != 4 or (q.shape[0], q.shape[1], q.shape[3]) != (step.batch, step.rows, cache.head_dim):
        raise ValueError(
            f"q must have shape `{step.batch} {step.rows} h {cache.head_dim}`, `batch rows heads head_dim` of the step: pass this "
            f"rank's rows (step.take), got {tuple(q.shape)}"
        )
    if q.dtype != cache.dtype:
        raise ValueError(f"q must have the dtype of the cache, {cache.dtype}, got {q.dtype}; convert it first")
    h = q.shape[2]
    if h == 0 or h % cache.kv_heads:
        raise ValueError(
            f"the number of query heads must be a multiple of the cache's {cache.kv_heads} key heads, got {h}"
        )
    for name, x in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if x is not None and (tuple(x.shape) != (h,) or not x.is_floating_point()):
            raise ValueError(
                f"{name} must be floating point of shape ({h},), one per query head, got {x.dtype} {tuple(x.shape)}"
            )


def _check_options(options: _Options, dtype: torch.dtype) -> None:
    check_softcap(options.softcap, dtype)
    if options.comm_mode not in COMM_MODES:
        raise ValueError(
            f"comm_mode must be one of {', '.join(COMM_MODES)}, got {options.comm_mode!r}; 'auto' takes what is fewer bytes"
        )
    if options.kv_access not in KV_ACCESS_MODES:
        raise ValueError(
            f"kv_access must be one of {', '.join(KV_ACCESS_MODES)}, got {options.kv_access!r}; 'auto' takes what is faster"
        )
    if options.kv_access == "pages" and options.comm_mode == "keys":
        raise ValueError(
            "comm_mode must be 'queries' or 'auto' with kv_access='pages', got 'keys', which are copied "
            "before they are sent; leave comm_mode out"
        )
