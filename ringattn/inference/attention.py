"""Attention of new tokens over a cache: one function for prefill and decode.

All layers of a model make the same few kinds of calls with a batch. A kind is checked, compared between ranks and resolved at the
first layer; later layers find it in `ForwardBatch.calls`. Resolved calls do not refer to the batch, so its memory is freed with it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypedDict

import torch
from torch import Tensor

from ringattn.dispatch import cat_rows
from ringattn.inference import prefill
from ringattn.inference.forward_batch import ForwardBatch
from ringattn.inference.latent_weights import UpWeights, key_heads
from ringattn.inference.paged_prefill import KV_ACCESS_MODES, resolve_kv_access
from ringattn.inference.static_batch import StaticBatch
from ringattn.kernels.decode import dispatch
from ringattn.kernels.interface import Score, accumulation_dtype
from ringattn.kernels.partials.packed import finish_parts, merge_parts
from ringattn.kernels.registry import select_kernels
from ringattn.plan import expressions as masks
from ringattn.plan.attention_spec import AttentionSpec, ScoreTensors
from ringattn.plan.intervals import MOST_TERMS, Term, empty, merged
from ringattn.plan.mask import MaskUnion, fold_mask, restarting_chunks
from ringattn.plan.options import resolve_chunk_len, resolve_flag, resolve_real, resolve_window, resolve_word
from ringattn.schedule.execution_plan import make_execution_plan
from ringattn.schedule.validation import check_latents, check_softcap
from ringattn.tensor_checks import check_tensor

if TYPE_CHECKING:
    from typing_extensions import Unpack

_OF_ROWS = ("q", "k", "v", "latents", "rotary_keys")
"""Tensors with this rank's rows."""


class AttendOptions(TypedDict, total=False):
    """Keywords of `attend`."""

    causal: bool
    window: int | tuple[int | None, int | None] | None
    softmax_scale: float | None
    softcap: float
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    chunk_len: int | None
    mask: masks.Mask | None
    comm_mode: str
    kv_access: str


class _Given(NamedTuple):
    """Tensors of `attend`."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    alibi_slopes: Tensor | None

    @property
    def up(self) -> None:
        """Weights that expand latents."""

    def check(self, step: ForwardBatch) -> None:
        if step.cache.latent is not None:
            raise ValueError(
                f"attend must be given a cache of keys and values, got one of latents {step.cache.latent}; use latent_attend"
            )

    def stored(self) -> tuple[Tensor, Tensor]:
        """Return the rows that the cache stores."""
        return self.k, self.v


class _LatentGiven(NamedTuple):
    """Tensors of `latent_attend`; methods as of `_Given`."""

    q: Tensor
    latents: Tensor
    rotary_keys: Tensor
    k_up: Tensor
    v_up: Tensor
    sinks: Tensor | None
    alibi_slopes: Tensor | None

    @property
    def up(self) -> UpWeights:
        return UpWeights(self.k_up, self.v_up)

    def check(self, step: ForwardBatch) -> None:
        latent = step.cache.latent
        if latent is None:
            raise ValueError(
                "latent_attend must be given a cache of latents, got one of keys and values; make it with "
                "PagedKVCache(latent=(r, dr)), or use attend"
            )
        check_latents(*self[:5], rows=step.rows)
        for name, x, columns in zip(("latents", "rotary_keys"), self[1:3], latent, strict=True):
            if x.shape[2] != columns:
                raise ValueError(
                    f"{name} must have the {columns} columns of the cache, got {x.shape[2]}; make it with others"
                )

    def stored(self) -> tuple[Tensor, Tensor]:
        rows = torch.cat(self[1:3], 2).unsqueeze(2)
        return rows, rows[..., : self.latents.shape[2]]


class _Options(NamedTuple):
    mask: masks.Mask
    softmax_scale: float | None
    softcap: float
    comm_mode: str
    kv_access: str

    @property
    def has_bounds(self) -> bool:
        """Whether the mask is evaluated on the device, row by row."""
        return self.mask.bounds(None, None, None) is not None

    @property
    def left(self) -> int | None:
        """Keys before a row that it may see; None: all."""
        parts = self.mask.parts if isinstance(self.mask, masks.Intersection) else (self.mask,)
        found = [x.left for x in parts if isinstance(x, masks.Window) and x.left is not None]
        found += [x.length for x in parts if isinstance(x, masks.Chunks)]
        return min(found, default=None)

    def scale(self, q: Tensor) -> float:
        return q.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale


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
    mask: masks.Mask | None = None,
    comm_mode: str = "auto",
    kv_access: str = "auto",
) -> Tensor:
    """Store the keys of new tokens and attend with their queries to all tokens of their requests.

    Every rank makes the same call for the same batch: with this rank's rows of the new tokens in prefill, with all of them in
    decode. Options are those of `ring_attention`, with positions in the request; tokens of different requests do not see each
    other. For inference only: results have no graph.

    Args:
        step: As returned by `PagedKVCache.extend`.
        layer: Layer of the cache.
        q: `batch rows h d`, rotary embeddings applied.
        k: `batch rows hk d`, rotary embeddings applied.
        v: `batch rows hk dv`.
        causal: Whether tokens see earlier ones only.
        window: See `ring_attention`.
        softmax_scale: Factor on q.k; default d ** -0.5.
        softcap: Bound of the soft cap; 0.0 for none. At most 2**13 in fp16, and 2**16 in bf16.
        sinks: `h`.
        alibi_slopes: `h`.
        chunk_len: Size of chunks, within which tokens see each other; counted from the first token that is not padding.
        mask: A mask of `ringattn.masks` in place of causal, window and chunk_len, relative to the request; `per_batch` has one
            for each. Decode reads only the pages that it shows. A `tree` whose first node is what the request has cached shows
            speculative tokens their ancestors. Chunks, prefixes and sinks are counted from the first token that is not padding.
            Other masks than an intersection of causal, window, chunks and `sinks(n) | window(w)` need batches of
            `PagedKVCache.extend` without padding, and in prefill one request or same_length; decode takes no `blocks`.
        comm_mode: What is sent around the ring in prefill: "keys", "queries", or "auto" for whichever is fewer bytes.
        kv_access: How a prefill reads stored keys: "copies" of all pages in one piece, for the kernels of training; "pages" in
            place, with the decode kernel; or "auto" for whichever is faster (Note [In place or copied] of paged_prefill.py). Keys
            that are sent are copied, so "pages" sends queries. Decode always reads pages.

    Returns:
        `batch rows h dv`, q's dtype. In decode every rank has the same bits.

    Raises:
        ValueError: A shape, dtype, device or option is inconsistent, something requires gradients, the batch is out of date, or
            ranks differ. Nothing is stored or sent then. It is raised on every rank wherever ranks compare (Note [When ranks
            compare] of consistency.py); elsewhere the others time out.
        TypeError: An argument is not a tensor, the layer no integer, or the step no batch.
        NotImplementedError: No kernel supports the call, or a tensor is of a subclass with its own meaning.
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
    given = _Given(q, k, v, sinks, alibi_slopes)
    return _resolve(step, layer, given, causal, window, softmax_scale, softcap, chunk_len, mask, comm_mode, kv_access)


def latent_attend(
    step: ForwardBatch,
    layer: int,
    q: Tensor,
    latents: Tensor,
    rotary_keys: Tensor,
    k_up: Tensor,
    v_up: Tensor,
    **options: Unpack[AttendOptions],
) -> Tensor:
    """Store the latents of new tokens and attend with their queries to all tokens of their requests.

    `attend` for multi-head latent attention, over a cache that was made with `latent=(r, dr)`. Equals `attend` with the keys and
    values that `latent_attention` defines, up to rounding. Decode, and a prefill that reads pages in place, multiply queries by
    k_up, attend to rows of latents, and multiply the result by v_up. Other prefills expand rows to keys and values, a part of them
    at a time (Note [Expanded or absorbed] of latent_weights.py).

    Args:
        step: As returned by `PagedKVCache.extend`.
        layer: Layer of the cache.
        q: `batch rows h (dn + dr)`: columns for k_up first, then those for rotary_keys, rotated.
        latents: `batch rows r`, normalised as the model does.
        rotary_keys: `batch rows dr`, rotated; all heads share them.
        k_up: `hk dn r`, equal on all ranks; hk divides h, and is h in models.
        v_up: `hk dv r`, equal on all ranks.
        **options: Keywords of `attend`; softmax_scale is (dn + dr) ** -0.5 by default.

    Returns:
        `batch rows h dv`, q's dtype. In decode every rank has the same bits.

    Raises:
        ValueError: As `attend`, shapes do not fit each other or the cache, or the cache stores keys and values.
        TypeError: As `attend`, or an option is unknown.
        NotImplementedError: As `attend`.
        RuntimeError: As `attend`.

    Example:
        >>> from ringattn import Ring
        >>> from ringattn.inference import PagedKVCache
        >>> sizes = {"layers": 1, "latent": (16, 4), "pages": 2, "page_size": 16}
        >>> cache = PagedKVCache(Ring(), dtype=torch.float32, device="cpu", **sizes)
        >>> step = cache.extend([cache.add_request(reserve=20)], [20])
        >>> q, latents, rotary_keys = torch.ones(1, 20, 2, 12), torch.ones(1, 20, 16), torch.ones(1, 20, 4)
        >>> k_up, v_up = torch.ones(2, 8, 16), torch.ones(2, 6, 16)
        >>> latent_attend(step, 0, *map(step.take, (q, latents, rotary_keys)), k_up, v_up).shape
        torch.Size([1, 20, 2, 6])
        >>> cache.bytes_per_token
        80
    """
    if unknown := options.keys() - AttendOptions.__annotations__.keys():
        error = TypeError(f"options must be keywords of attend, got {sorted(unknown)}; leave them out")
        step.cache.ring.raise_on_all_ranks(error)
    found = {**_DEFAULTS, **options}
    given = _LatentGiven(q, latents, rotary_keys, k_up, v_up, found.pop("sinks"), found.pop("alibi_slopes"))
    return _resolve(step, layer, given, **found)


_DEFAULTS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in signature(attend).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}
for _entry in (attend, latent_attend):
    _entry._torchdynamo_disable = True  # pyright: ignore[reportFunctionMemberAccess]


def _resolve(
    step: ForwardBatch,
    layer: int,
    given: _Given | _LatentGiven,
    causal: bool,
    window: int | tuple[int | None, int | None] | None,
    softmax_scale: float | None,
    softcap: float,
    chunk_len: int | None,
    mask: masks.Mask | None,
    comm_mode: str,
    kv_access: str,
) -> Tensor:
    """Resolve the options of a call, and run it."""
    if not isinstance(step, ForwardBatch):
        raise TypeError(f"step must be a batch of PagedKVCache.extend, got {type(step).__name__}; pass what it returns")
    run = _beside_compilers() if "torch._dynamo" in sys.modules else _attend
    try:
        for name, x in zip(given._fields, given, strict=True):
            if x is not None or name not in ("sinks", "alibi_slopes"):
                check_tensor(name, x)
        scale = None if softmax_scale is None else resolve_real("softmax_scale", softmax_scale)
        softcap, causal = resolve_real("softcap", softcap), resolve_flag("causal", causal)
        window, chunk_len = resolve_window(window), resolve_chunk_len(chunk_len)
        if mask is None:
            mask = fold_mask(causal=causal, window=window, chunk_len=chunk_len)
        elif window is not None or chunk_len is not None:
            raise ValueError("mask must come without window and chunk_len, got both; intersect it with masks.window")
        comm_mode = resolve_word("comm_mode", comm_mode, prefill.COMM_MODES)
        kv_access = resolve_word("kv_access", kv_access, KV_ACCESS_MODES)
        options = _Options(masks.check_mask(mask), scale, softcap, comm_mode, kv_access)
    except Exception as error:
        step.cache.ring.raise_on_all_ranks(error)
    return run(step, layer, given, options)


@functools.cache  # not at import: it imports the compiler
def _beside_compilers() -> Callable[..., Tensor]:
    """Return `_attend`, hidden from torch.compile."""
    hidden: Any = torch.compiler.disable(_attend)
    return hidden


def _attend(step: ForwardBatch, layer: int, given: _Given | _LatentGiven, options: _Options) -> Tensor:
    q, up, tensors = given.q, given.up, ScoreTensors(given.sinks, given.alibi_slopes)
    key = (*options, *[None if x is None else (x.shape, x.dtype, x.device) for x in given])
    known = step.calls.get(key)
    if known is None:
        try:
            _check_gradients(given)
            given.check(step)
            step.check_rows(layer, *given.stored())
            spec = _check_call(step, options, q, tensors, up)
        except Exception as error:
            step.cache.ring.raise_on_all_ranks(error)
        step.cache.consistency.check_batch(step, _kind(options, given), q.device)
        known = (
            _Decode(options, options.scale(q), None if options.has_bounds else _decode_bounds(step, options.mask))
            if spec is None
            else _plan_ranks(step, spec, options, q, tensors, up)
            if step.ranks
            else _plan_prefill(step, spec, options, q, tensors, up)
        )
        step.calls[key] = known
    else:
        _check_gradients(given)
    with torch.no_grad():
        k, v = step.put(layer, *given.stored(), contain=known.contains)
        return _run(known, step, layer, prefill.NewRows(q, k, v, tensors, up))


def _run(known: _Decode | prefill.Prefill, step: ForwardBatch, layer: int, rows: prefill.NewRows) -> Tensor:
    """Return o of the rows of a resolved call."""
    if known.ranks:
        return _run_ranks(known.ranks, step, layer, rows)
    # pages are read as they are, copies of latents are expanded
    pages = None if known.kv_access == "copies" else rows.up
    o = known.attend(step, layer, rows if pages is None else rows._replace(q=pages.absorb(rows.q)))
    return o if pages is None else pages.project(o)


def _run_ranks(calls: Sequence[prefill.Prefill], step: ForwardBatch, layer: int, rows: prefill.NewRows) -> Tensor:
    """Return o `b s h dv` of the rows of all virtual ranks of this process."""
    lens = [one.rows for one in step.ranks]
    parts = list(zip(*(x.split(lens, 1) for x in rows[:3]), strict=True))

    def run(i: int) -> Tensor:
        q, k, v = parts[i]
        # the bits of a product of latents may depend on where in memory they begin
        k = k if rows.up is None or len(parts) == 1 else k.clone()
        return _run(calls[i], step.ranks[i], layer, rows._replace(q=q, k=k, v=v))

    return cat_rows(step.cache.ring.run_ranks(rows.q.device, run), 1)


def _plan_ranks(
    step: ForwardBatch, spec: AttentionSpec, options: _Options, q: Tensor, tensors: ScoreTensors, up: UpWeights | None
) -> prefill.Prefill:
    calls = tuple(
        _plan_prefill(
            one, replace(spec, sharding=one.sharding, kv_sharding=one.kv_sharding), options, part, tensors, up
        )
        for one, part in zip(step.ranks, q.split([one.rows for one in step.ranks], 1), strict=True)
    )
    return replace(calls[0], ranks=calls)


def _plan_prefill(
    step: ForwardBatch, spec: AttentionSpec, options: _Options, q: Tensor, tensors: ScoreTensors, up: UpWeights | None
) -> prefill.Prefill:
    cache, several, fresh = step.cache, step.cache.ring.world_size > 1, step.lengths == step.counts
    features, (hk, *dims) = spec.features(tensors) | {"prefill"}, key_heads(cache, up)
    kernels = select_kernels(q.device, q.dtype, *dims, impl=spec.impl, features=features).kernels
    kv_access = "copies"
    if options.has_bounds and (options.comm_mode != "keys" or not several):
        kv_access = resolve_kv_access(options.kv_access, step, q, up, options.left, fresh)
    wanted = "queries" if several and options.kv_access == "pages" else options.comm_mode
    comm_mode = prefill.resolve_comm_mode(wanted, step, spec, q, up, fresh, kv_access)
    if several and comm_mode == "keys":
        kv_access = "copies"
    send_queries = comm_mode == "queries" and (several or kv_access == "copies")
    query_plan = prefill.plan_queries(spec, q.device) if send_queries else None
    paged_rows = (
        prefill.find_paged_rows(step, spec, query_plan, q.shape[2], options.mask) if kv_access == "pages" else None
    )
    # the plan depends on shapes of keys and values
    assert step.kv_slots is not None, "a prefill has slots of stored keys"
    k, v = (torch.empty(*step.kv_slots.shape, hk, d, dtype=q.dtype, device="meta") for d in dims)
    plan = make_execution_plan(spec, q, k, v, tensors, kernels, cache.ring.context)
    return prefill.Prefill(plan, comm_mode, kv_access, fresh, query_plan, paged_rows, prefill.growth_limit(step))


@dataclass(frozen=True, eq=False)
class _Decode:
    """A resolved decode call.

    Attributes:
        scale: Factor on q.k.
        terms: Of a mask that the options name as a whole: per interval lo and hi of the rows, `tiles` int32, and the longest
            stretch of positions that the rows of a request see in it; else None.
    """

    options: _Options
    scale: float
    terms: list[tuple[Tensor, Tensor, int]] | None
    contains: ClassVar[bool] = False  # pages are read
    comm_mode: ClassVar[str] = ""
    kv_access: ClassVar[str] = ""
    ranks: ClassVar[tuple[prefill.Prefill, ...]] = ()

    def attend(self, step: ForwardBatch, layer: int, rows: prefill.NewRows) -> Tensor:
        """Return o `batch rows h dv`, the same bits on all ranks; the keys are in the cache, and q is for them."""
        q, tensors = rows.q, rows.tensors
        cache, wide = step.cache, accumulation_dtype(q.dtype)
        (b, s), h, dv = step.tiles, q.shape[2], step.cache.v_head_dim
        q = q if q.stride(-1) == 1 else q.contiguous()
        if step.pieces is not None:
            q = q[0].unflatten(0, (b, s))
        stacks = [self._partials(one, layer, q, tensors) for one in step.ranks or (step,)]
        sinks = None if tensors.sinks is None else tensors.sinks.to(wide)
        o = torch.empty(b, s, h, dv, dtype=q.dtype, device=q.device)
        lse = torch.empty(b, h, s, dtype=wide, device=q.device)
        if wide == torch.float32 and not step.ranks:
            cache.ring.partial_reducer(q.device).merge_partials(stacks[0], b, s, h, dv, sinks, o, lse)
            return o.view(step.batch, step.rows, h, dv)
        # reducers are for fp32 and one part per process
        mine = stacks[0].new_empty(len(stacks), dispatch.parts_len(b * s * h, dv))
        for stack, part in zip(stacks, mine, strict=True):
            merge_parts(stack, part, b * s * h, dv)
        stack = torch.cat(cache.ring.gather(mine, 0, (len(stacks),) * cache.ring.world_size))
        finish_parts(stack, b * s * h, dv, sinks, o, lse)
        return o.view(step.batch, step.rows, h, dv)

    def _partials(self, step: ForwardBatch, layer: int, q: Tensor, tensors: ScoreTensors) -> Tensor:
        """Return the stack of packed parts of rows q `b s h d` over the keys of one rank."""
        cache, table, positions = step.cache, step.table, step.positions32
        assert table is not None, "decode has a table"
        assert positions is not None, "decode has int32 positions"
        wide = accumulation_dtype(q.dtype)
        (b, s), h = step.tiles, q.shape[2]
        dv, rows = cache.v_head_dim, b * s * h
        slopes = None if tensors.alibi_slopes is None else tensors.alibi_slopes.to(wide)
        score = Score(self.scale, self.options.softcap, alibi_slopes=slopes)
        blocks, width = table.pages.shape[1], max(cache.head_dim, dv)
        shape, packed = (b, s, h, cache.kv_heads, blocks, cache.page_size), step.pieces is not None
        sizes = {"head_dim": width, "kv_dtype": cache.kv_dtype, "same_length": packed, "latent": bool(cache.latent)}
        split = functools.partial(dispatch.num_splits, **sizes)
        # partials of disjoint keys: the stack holds those of all terms
        if self.terms is not None:
            terms = [
                (lo, hi, split(*shape[:4], min(blocks, longest // cache.page_size + 2), shape[5], q.device))
                for lo, hi, longest in self.terms
            ]
        else:
            splits = split(*shape, q.device)
            terms = [(lo, hi, splits) for lo, hi in step.bounds(self.options.mask)]
        stack = torch.empty(
            sum(splits for _, _, splits in terms), dispatch.parts_len(rows, dv), dtype=wide, device=q.device
        )
        pools, scales = (cache.k[layer], cache.v[layer]), cache.scales(layer)
        parts = stack.split([splits for _, _, splits in terms])
        for i, (lo, hi, splits) in enumerate(terms):
            call = dispatch.DecodeCall(q, *pools, table, lo, hi, positions, score, *scales)
            key = self.options, i, tuple(q.shape), q.dtype, splits
            dispatch.decode(
                call, parts[i], split_plan=step.once(key, functools.partial(dispatch.plan_splits, call, splits))
            )
        return stack


def _check_call(
    step: ForwardBatch, options: _Options, q: Tensor, tensors: ScoreTensors, up: UpWeights | None
) -> AttentionSpec | None:
    """Check everything but rows that are stored; return the spec of a prefill, None for decode."""
    hk, *dims = key_heads(step.cache, up)
    _check_tensors(step, q, tensors, hk, dims[0])
    _check_options(options, q.dtype)
    cache, sharding, kv_sharding = step.cache, step.sharding, step.kv_sharding
    total = max(1, sum(step.lengths)) if sharding is None else sharding.seq_len
    if not options.has_bounds:
        _check_mask(step, options.mask, options.kv_access)
    mask = MaskUnion(total, total, _mask_of_batch(step, options.mask, total), sharding and sharding.documents)
    if step.mode == "decode" or options.kv_access != "copies":
        cache.decode_kernel(q.dtype)
    if sharding is None or kv_sharding is None:
        return None
    expand = "auto" if step.lengths == step.counts else "reader"
    spec = AttentionSpec(
        sharding,
        kv_sharding,
        mask,
        softmax_scale=options.scale(q),
        softcap=options.softcap,
        dropout_p=0.0,
        impl=cache.ring.impl,
        backward="auto",
        deterministic=bool(step.ranks),  # as in training, so that the same kernels are chosen
        latents=None if up is None else (cache.head_dim, cache.v_head_dim, expand),
        forward_only=True,
    )
    select_kernels(q.device, q.dtype, *dims, impl=spec.impl, features=spec.features(tensors) | {"prefill"})
    return spec


def _check_mask(step: ForwardBatch, mask: masks.Mask, kv_access: str) -> None:
    """Raise where a mask that causal, window and sinks cannot say is not served."""
    requests, what = len(step.requests), "mask must be `causal() & (sinks(n) | window(w))` or a part of it in"
    if isinstance(step, StaticBatch):
        raise NotImplementedError(f"{what} a static batch, got {mask!r}; use PagedKVCache.extend")
    if any(step.firsts):
        raise NotImplementedError(f"{what} requests with padding, got {mask!r}; add the requests without padding")
    if mask.batch_size not in (None, requests):
        raise ValueError(
            f"mask must be one, or one per request, {requests}, got {mask.batch_size}; pass another per_batch"
        )
    if step.mode == "prefill" and step.batch == 1 < requests:
        raise NotImplementedError(f"{what} a prefill of several requests, got {mask!r}; extend them one by one")
    if step.mode == "prefill" and kv_access == "pages":
        raise NotImplementedError(f'{what} a prefill with kv_access="pages", got {mask!r}; use kv_access="copies"')
    if step.mode == "decode" and any(term.pattern for i in range(requests) for term in _intervals_of(step, mask, i)):
        raise NotImplementedError(f'decode takes no masks.blocks, got {mask!r}; use extend(mode="prefill")')


def _intervals_of(step: ForwardBatch, mask: masks.Mask, i: int) -> list[Term]:
    """Return the intervals that the tokens of one request see, at least one."""
    length = step.lengths[i]
    terms = merged(mask.intervals(masks.Frame(length, length, i))) or [empty(length, None)]
    if len(terms) > MOST_TERMS:
        raise NotImplementedError(
            f"mask must have at most {MOST_TERMS} intervals per query, got {len(terms)} of {mask!r}; pass a flatter tree"
        )
    return terms


def _decode_bounds(step: ForwardBatch, mask: masks.Mask) -> list[tuple[Tensor, Tensor, int]]:
    """Return `_Decode.terms` of the new rows of a step."""
    found = []
    for i, length in enumerate(step.lengths):
        rows = range(length - step.rows, length)
        bounds = zip(*(term.bounds for term in _intervals_of(step, mask, i)), strict=True)
        lines = [[[side.at(row) for row in rows] for side in sides] for sides in bounds]
        found.append(torch.tensor(lines, dtype=torch.int64, device="cpu"))
    most = max(x.shape[1] for x in found)
    lo, hi = torch.stack([torch.nn.functional.pad(x, (0, 0, 0, most - x.shape[1])) for x in found], 2)
    sees = lo < hi
    longest = (torch.where(sees, hi, 0).amax(2) - torch.where(sees, lo, 2**31).amin(2)).amax(1).clamp(min=0)
    on_device = torch.stack((lo, hi)).to(step.positions.device, torch.int32)
    return [(on_device[0, k], on_device[1, k], width) for k, width in enumerate(longest.tolist())]


def _mask_of_batch(step: ForwardBatch, mask: masks.Mask, total: int) -> masks.Mask:
    """Return a mask that is relative to requests, or to the first token of each batch element, over all tokens of a batch."""
    if step.sharding is None or mask.bounds(None, None, None) is None:
        return mask
    documents, stop = step.sharding.documents, step.lengths[0]
    lengths = tuple((min(first, stop), stop) for first in step.firsts) if any(step.firsts) else None

    def relative(part: masks.Mask) -> masks.Mask:
        if isinstance(part, masks.Chunks):
            return restarting_chunks(total, part.length, documents, lengths)
        if isinstance(part, masks.Prefix):
            part = masks.sinks(part.length)  # of each request: a prefix is of all tokens of the batch
            edges = [masks.documents(sorted({0, first, stop, total})) for first, stop in lengths or ()]
            return part if lengths is None else masks.per_batch([edge & part for edge in edges])
        combined = isinstance(part, (masks.Intersection, masks.Union))
        return type(part)(tuple(map(relative, part.parts))) if combined else part

    return relative(mask) if lengths is None else relative(mask) & masks.Lengths(lengths)


def _kind(options: _Options, given: _Given | _LatentGiven) -> str:
    """Return a text of all that must be equal on all ranks; rows may differ."""
    shapes = [
        None
        if x is None
        else f"{[n for i, n in enumerate(x.shape) if i != 1 or name not in _OF_ROWS]} {x.dtype} {x.device.type}"
        for name, x in zip(given._fields, given, strict=True)
    ]
    return f"{options} of {shapes}"


def _check_gradients(given: _Given | _LatentGiven) -> None:
    if torch.is_grad_enabled():
        for name, x in zip(given._fields, given, strict=True):
            if x is not None and x.requires_grad:
                raise ValueError(
                    f"{name} must not require gradients, which a cache does not serve, got requires_grad=True; "
                    "call the model under torch.inference_mode() or torch.no_grad(), or train with ring_attention"
                )


def _check_tensors(step: ForwardBatch, q: Tensor, tensors: ScoreTensors, hk: int, d: int) -> None:
    cache, per_head = step.cache, (("sinks", tensors.sinks), ("alibi_slopes", tensors.alibi_slopes))
    for name, x in (("q", q), *per_head):
        if x is not None and x.device != cache.device:
            raise ValueError(
                f"{name} must be on the device of the cache, {cache.device}, got {x.device}; move it there"
            )
    if q.dim() != 4 or (q.shape[0], q.shape[1], q.shape[3]) != (step.batch, step.rows, d):
        raise ValueError(
            f"q must have shape `{step.batch} {step.rows} h {d}`, `batch rows heads head_dim` of the step: pass this "
            f"rank's rows (step.take), got {tuple(q.shape)}"
        )
    if q.dtype != cache.dtype:
        raise ValueError(f"q must have the dtype of the cache, {cache.dtype}, got {q.dtype}; convert it first")
    h = q.shape[2]
    if h == 0 or h % hk:
        raise ValueError(f"the number of query heads must be a multiple of the cache's {hk} key heads, got {h}")
    for name, x in per_head:
        if x is not None and (tuple(x.shape) != (h,) or not x.is_floating_point()):
            raise ValueError(
                f"{name} must be floating point of shape ({h},), one per query head, got {x.dtype} {tuple(x.shape)}"
            )


def _check_options(options: _Options, dtype: torch.dtype) -> None:
    check_softcap(options.softcap, dtype)
    if options.kv_access == "pages" and options.comm_mode == "keys":
        raise ValueError(
            "comm_mode must be 'queries' or 'auto' with kv_access='pages', got 'keys', which are copied "
            "before they are sent; leave comm_mode out"
        )
