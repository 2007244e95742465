"""`nn.MultiheadAttention` whose sequence is sharded around a ring: torch's arguments and masks, for a shard.

Shape legend: `b` batch, `s` this rank's query rows, `t` this rank's keys, `n` all keys, `e` embed_dim, `h` heads.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringattn.api import ring_attention_with_lse
from ringattn.kernels.interface import accumulation_dtype
from ringattn.numerics.dropout import draw_seed, kept_columns
from ringattn.numerics.partial import Partial, finalize, merge
from ringattn.plan.expressions import Mask
from ringattn.plan.options import resolve_flag
from ringattn.plan.sharding import Sharding, positions_of
from ringattn.ring import Ring, default_world_size
from ringattn.ring_registry import get_ring
from ringattn.sharding_context import resolve_sharding
from ringattn.tensor_checks import check_tensor

MAX_WHOLE_SHARDINGS = 1024
"""Shardings of whole sequences that are cached; beyond it all are dropped, and made again when needed."""


class _RingReference:
    """Reference from modules to a ring: copies of a module share the ring, and pickled modules lose it."""

    def __init__(self, ring: Ring | None) -> None:
        self.ring = ring

    def __deepcopy__(self, memo: dict[int, Any]) -> _RingReference:
        return self

    def __reduce__(self) -> tuple[type[_RingReference], tuple[None]]:
        return _RingReference, (None,)


def _do_nothing(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Hook that keeps torch's encoder layers from computing attention themselves, from the parameters of their `self_attn`."""


class RingMultiheadAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` over a sequence sharded around a ring of ranks.

    Constructed, called and stored like `nn.MultiheadAttention`, with the same parameters under the same names. query, key
    and value are this rank's rows, and each row attends to the keys of all ranks. All ranks hold the same parameters;
    their gradients are this rank's share, as for any replicated parameter: sum them over ranks. Without any sharding, and
    in a ring of one rank, the input is the whole sequence.

    Differences to torch: `is_causal=True` without attn_mask means causal by global position, and nothing is materialised. Rows
    whose keys are all masked give the output projection of 0, where torch may give NaN. is_causal hides no column that add_bias_kv
    or add_zero_attn appends. Refused: sequences without rows, and dropout of 1.

    Args:
        embed_dim: See `nn.MultiheadAttention` for all arguments but ring.
        num_heads: Parallel heads.
        dropout: Probability of dropping an attention weight, in training. The seed is drawn from torch's default CPU generator:
            ranks with equal seeds drop what one process drops, others by their own. The gradients are exact either way.
        bias: Biases of the projections.
        add_bias_kv: One more key and value, learned.
        add_zero_attn: One more key and value, zero.
        kdim: Features of key.
        vdim: Features of value.
        batch_first: `b s e` instead of `s b e`.
        device: Of the parameters.
        dtype: Of the parameters.
        ring: The only ring whose shardings are accepted; None: any. Input without a sharding needs a ring of one rank. Copies of
            the module share it; it is not stored with it.

    Attributes:
        max_weights: Maximum number of attention weights that a rank may return with `need_weights`.

    Raises:
        ValueError: As in `nn.MultiheadAttention`.
        AssertionError: As in `nn.MultiheadAttention`.
        TypeError: The ring is something else.

    Example:
        >>> from ringattn import Ring
        >>> sharding = Ring().sharding(5)
        >>> attention = RingMultiheadAttention(32, 4, batch_first=True)
        >>> x = torch.ones(1, sharding.shard_len, 32)
        >>> attention(x, x, x, is_causal=True, need_weights=False, sharding=sharding)[0].shape
        torch.Size([1, 5, 32])
    """

    max_weights: int = 2**28
    _ring: _RingReference

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        ring: Ring | None = None,
    ) -> None:
        _check_ring(ring)
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        _set_ring(self, ring)

    @property
    def ring(self) -> Ring | None:
        """The ring that was given, if any."""
        return self._ring.ring

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | Mask | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        sharding: Sharding | None = None,
        kv_sharding: Sharding | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of this rank's rows to the keys of all ranks.

        Args:
            query: `s b e`, `b s e` with batch_first, or `s e`: this rank's rows.
            key: This rank's keys, of t rows and kdim features.
            value: This rank's values, of t rows and vdim features.
            key_padding_mask: `b t`, or `t` for unbatched input: this rank's keys, or all n. Bool: True is ignored. Floating point:
                added. They are sent with the keys, and never made dense.
            need_weights: Return the weights of this rank's rows over all keys; gathers the keys of all ranks, so it is the same
                on all of them. Long sequences need False.
            attn_mask: `s n` or `(b h) s n`: this rank's rows x *all* keys by global position. Bool: True is ignored. Floating
                point: added. A whole mask is cut; `sharding.shard(mask, dim=-2)` cuts it once for all layers. Or a mask of
                `ringattn.masks`, which is never made dense.
            average_attn_weights: Average the weights over heads.
            is_causal: With attn_mask: torch's hint; without weights and padding mask the causal mask then replaces attn_mask, which
                is not read. Without attn_mask: causal by global position.
            sharding: Positions held by each rank; default the current sharding (`use_sharding`).
            kv_sharding: The sharding of keys of another sequence; default `sharding`, or, when key is not the same tensor as
                query, that of the current sharding.

        Returns:
            The output, shaped like query, and the weights or None: `b s n`, or `b h s n` without averaging, each without b
            for unbatched input. Columns of add_bias_kv and add_zero_attn stand behind the n keys.

        Raises:
            AssertionError: As in `nn.MultiheadAttention`, with its messages.
            RuntimeError: As in `nn.MultiheadAttention`; and there is no sharding among several ranks.
            TypeError: An argument is not a tensor.
            NotImplementedError: A tensor is of a subclass with its own meaning, or nested input is not that of self-attention.
            ValueError: Weights are too many, or the sharding belongs to another ring; see also `ring_attention`.
        """
        if isinstance(query, Tensor) and query.is_nested:
            is_self_attention = key is query and value is query and not need_weights and kv_sharding is None
            masked = key_padding_mask is not None or attn_mask is not None
            return self._attend_nested(query, is_self_attention, masked, is_causal, sharding), None
        with self._propagate_errors(sharding):
            found = resolve_sharding(sharding, kv_sharding)
        with self._propagate_errors(None if found is None else found[0]):
            for name, x in (("query", query), ("key", key), ("value", value)):
                check_tensor(name, x)
            need_weights, is_causal = resolve_flag("need_weights", need_weights), resolve_flag("is_causal", is_causal)
            mask, attn_mask = (attn_mask, None) if isinstance(attn_mask, Mask) else (None, attn_mask)
            if mask is not None and is_causal:
                raise ValueError(f"is_causal must be False beside {mask!r}, got True; intersect it with masks.causal()")
            row_dim = 1 if self.batch_first and query.dim() == 3 else 0
            sharding, kv_sharding = self._find_shardings(query, key, row_dim, found, kv_sharding is not None)
        keys = sharding if kv_sharding is None else kv_sharding
        # an error on one rank is raised on the others too
        with sharding.ring.propagate_errors():
            key_bias, bias, causal = self._resolve_masks(
                query, key, value, key_padding_mask, need_weights, attn_mask, is_causal, sharding, keys
            )
            q, k, v = (self._by_head(x, query.dim()) for x in self._project(query, key, value))
            for name, x in (("key_padding_mask", key_bias), ("attn_mask", bias)):
                if x is not None and x.dtype not in (torch.float32, query.dtype, q.dtype):
                    raise RuntimeError(
                        f"Expected {name} dtype to be bool or float or to match query dtype, but got {name}.dtype: {x.dtype} "
                        f"and query.dtype: {query.dtype} instead."
                    )
        if not torch.compiler.is_compiling():
            # weights need one more collective
            sharding.ring.assert_equal_once("need_weights", f"{need_weights}")
        b, s, h, _ = q.shape
        wide = accumulation_dtype(q.dtype)
        dropout_p = self.dropout if self.training else 0.0
        seed = draw_seed(q) if dropout_p else None
        sinks = torch.zeros(h, dtype=wide, device=q.device) if self.add_zero_attn else None
        o, lse = ring_attention_with_lse(
            *(q, k, v, sharding),
            kv_sharding=kv_sharding,
            causal=causal,
            mask=mask,
            key_bias=key_bias,
            bias=bias,
            sinks=sinks,
            dropout_p=dropout_p,
            dropout_seed=seed,
            backward="keys" if dropout_p else "auto",
        )

        def drop(x: Tensor, column: int, count: int) -> Tensor:
            if seed is None:
                return x
            kept = kept_columns(_positions(sharding, q), seed, b, h, column, count, dropout_p)
            return x * (kept.to(wide) / (1 - dropout_p))

        weights = None
        if self.bias_k is not None or need_weights:
            with torch.autocast(q.device.type, enabled=False):
                added = []  # logits of the added columns, b h s
                if self.bias_k is not None and self.bias_v is not None:
                    bias_key, bias_value = (x.to(wide).view(h, -1) for x in (self.bias_k, self.bias_v))
                    added.append(torch.einsum("bshd,hd->bhs", q.to(wide), bias_key) * q.shape[-1] ** -0.5)
                    bias_value = drop(bias_value[:, None].expand(b, h, s, -1), keys.seq_len, 1)
                    o, lse = _with_column(o, lse, added[0], bias_value)
                if need_weights:
                    if self.add_zero_attn:
                        added.append(lse.new_zeros(b, h, s))
                    weights = _weights(q, k, lse, added, sharding, keys, key_bias, bias, causal, mask)
                    weights = drop(weights, 0, keys.seq_len + len(added))
                    weights = (weights.mean(1) if average_attn_weights else weights).to(q.dtype)
                    weights = weights.squeeze(0) if query.dim() == 2 else weights
        rows = o.flatten(2)  # b s e
        if query.dim() == 2:
            rows = rows.squeeze(0)
        elif not self.batch_first:
            rows = rows.transpose(0, 1)
        return F.linear(rows, self.out_proj.weight, self.out_proj.bias), weights

    def _propagate_errors(self, sharding: Sharding | None) -> AbstractContextManager[None]:
        """Raise errors on the other ranks too, where the ring is known."""
        ring = self._ring.ring
        if ring is None and isinstance(sharding, Sharding):
            ring = sharding.ring
        return nullcontext() if ring is None else ring.propagate_errors()

    def _find_shardings(
        self, query: Tensor, key: Tensor, dim: int, found: tuple[Sharding, Sharding | None] | None, given: bool
    ) -> tuple[Sharding, Sharding | None]:
        """Return the sharding of the rows, and that of the keys where it is another one; given: by the caller."""
        if found is None:
            found = self._find_whole(query.shape[dim], key.shape[dim])
        rows, keys = found
        if keys is not None and not given and key is query:
            keys = None  # self-attention below a sharding for cross attention
        ring = self._ring.ring
        if ring is not None:
            for x in (rows,) if keys is None else (rows, keys):
                if x.ring.name != ring.name:
                    raise ValueError(
                        f"the sharding must be made by the ring of this module, {ring.name!r}, got one of {x.ring.name!r}; "
                        "make it with that ring, or make the module with ring=None"
                    )
        return rows, keys

    def _find_whole(self, rows: int, keys: int) -> tuple[Sharding, Sharding | None]:
        """Return shardings of sequences that are whole on this rank."""
        ring = self._ring.ring
        if (default_world_size() if ring is None else ring.world_size) > 1:
            raise RuntimeError(
                "attention over several ranks must know the sharding of its rows, got none; pass sharding=, or call the model "
                "inside `with ringattn.use_sharding(sharding):`"
            )
        name = "" if ring is None else ring.name
        # as text: torch.compile formats a length only when it is one number, not any
        q_size, k_size = f"{int(rows)}", f"{int(keys)}"
        _make_whole_shardings(name, q_size, k_size)
        return _whole_shardings[name, q_size], None if q_size == k_size else _whole_shardings[name, k_size]

    def _resolve_masks(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        is_causal: bool,
        sharding: Sharding,
        keys: Sharding,
    ) -> tuple[Tensor | None, Tensor | None, bool]:
        """Return the padding as bias of keys `b t`, the mask as bias of scores `b h s n`, and whether the call is causal.

        Checks what torch checks, in its order and with its messages.
        """
        for name, x in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if x is not None:
                check_tensor(name, x)
        key_padding_mask = None if key_padding_mask is None else keys.cut_whole(key_padding_mask, -1)
        attn_mask = None if attn_mask is None else sharding.cut_whole(attn_mask, -2)
        batched = F._mha_shape_check(  # pyright: ignore[reportAttributeAccessIssue]
            query, key, value, key_padding_mask, None, self.num_heads
        )
        if attn_mask is not None and attn_mask.dim() not in (2, 3):
            kind = "batched (3-D)" if batched else "unbatched (2-D)"
            raise AssertionError(
                f"For {kind} `query`, expected `attn_mask` to be `None`, 2-D or 3-D but found {attn_mask.dim()}-D tensor instead"
            )
        canonical: Any = F._canonical_mask
        other = F._none_or_dtype(attn_mask)
        key_bias = canonical(key_padding_mask, "key_padding_mask", other, "attn_mask", query.dtype)
        causal = is_causal and attn_mask is None
        if is_causal and key_padding_mask is None and not need_weights:
            causal, attn_mask = True, None
        bias = canonical(attn_mask, "attn_mask", None, "", query.dtype, check_other=False)
        if query.shape[-1] != self.embed_dim:
            raise AssertionError(f"was expecting embedding dimension of {self.embed_dim}, but got {query.shape[-1]}")
        if not self._qkv_same_embed_dim:
            if key.shape[:-1] != value.shape[:-1]:
                raise AssertionError(
                    f"key's sequence and batch dims {key.shape[:-1]} do not match value's {value.shape[:-1]}"
                )
        elif key.shape != value.shape:
            raise AssertionError(f"key shape {key.shape} does not match value shape {value.shape}")
        if not batched:
            b, s, t = 1, query.shape[0], key.shape[0]
            key_bias = None if key_bias is None else key_bias.unsqueeze(0)
        else:
            row_dim = 1 if self.batch_first else 0
            b, s, t = query.shape[1 - row_dim], query.shape[row_dim], key.shape[row_dim]
        h, n = self.num_heads, keys.seq_len
        if bias is not None:
            wanted = (s, n) if bias.dim() == 2 else (b * h, s, n)
            if tuple(bias.shape) != wanted:
                raise RuntimeError(f"The shape of the {bias.dim()}D attn_mask is {bias.shape}, but should be {wanted}.")
            bias = bias if bias.dim() == 2 else bias.unflatten(0, (b, h))
        added = (self.bias_k is not None) + self.add_zero_attn
        if key_bias is not None:
            # torch has already added its columns
            for dim, size, more in ((0, b, 0), (1, t, added)):
                if key_bias.shape[dim] != size:
                    raise AssertionError(
                        f"Expected key_padded_mask.shape[{dim}] to be {size + more}, but got {key_bias.shape[dim] + more}"
                    )
        count = b * h * max(sharding.shard_lens) * (n + added)
        # an exported program is of any batch
        if need_weights and not torch.compiler.is_exporting() and count > self.max_weights:
            raise ValueError(
                f"need_weights must be False for a rank with {count} attention weights, more than max_weights, "
                f"{self.max_weights}; pass need_weights=False, or raise RingMultiheadAttention.max_weights"
            )
        return key_bias, bias, causal

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Return q, k and v of e features each, from one product where the inputs are one tensor."""
        e, bias = self.embed_dim, self.in_proj_bias
        biases = (None, None, None) if bias is None else bias.chunk(3)
        if not self._qkv_same_embed_dim:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
            assert all(x is not None for x in weights), "separate projections have a weight each"
            return F._in_projection(query, key, value, *weights, *biases)  # pyright: ignore[reportAttributeAccessIssue]
        weight = self.in_proj_weight
        if value is not key:
            triples = zip((query, key, value), weight.chunk(3), biases, strict=True)
            return tuple(F.linear(x, w, b) for x, w, b in triples)
        if key is query:
            return F.linear(query, weight, bias).chunk(3, -1)
        (w_q, w_kv), (b_q, b_kv) = weight.split((e, 2 * e)), (None, None) if bias is None else bias.split((e, 2 * e))
        return F.linear(query, w_q, b_q), *F.linear(key, w_kv, b_kv).chunk(2, -1)

    def _by_head(self, x: Tensor, ndim: int) -> Tensor:
        """Split projected rows into heads, `b s h d`, as a view."""
        x = x.unflatten(-1, (self.num_heads, self.head_dim))
        if ndim == 2:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _attend_nested(
        self, query: Tensor, is_self_attention: bool, masked: bool, is_causal: bool, sharding: Sharding | None
    ) -> Tensor:
        """Pad nested self-attention, in which `nn.TransformerEncoder` leaves out this rank's padded rows, and call `forward`."""
        with self._propagate_errors(sharding):
            found = resolve_sharding(sharding, None)
        with self._propagate_errors(None if found is None else found[0]):
            if not is_self_attention or not self.batch_first:
                raise NotImplementedError(
                    "nested input must be that of self-attention with batch_first=True and need_weights=False, got other; "
                    "pass padded tensors with key_padding_mask"
                )
            if masked:
                raise AssertionError("nested input must come without masks, got one; pass padded tensors with it")
            lengths = [x.shape[0] for x in query.unbind()]
            rows = max(lengths) if found is None else found[0].shard_len
            x = query.to_padded_tensor(0.0, (len(lengths), rows, query.size(-1)))
        padding = torch.arange(rows, device=x.device) >= torch.tensor(lengths, device=x.device)[:, None]
        o = self(x, x, x, padding, need_weights=False, is_causal=is_causal, sharding=sharding)[0]
        parts = [row[:length] for row, length in zip(o, lengths, strict=True)]
        if query.layout is torch.jagged:
            # nested tensors can only be added to those with the very same offsets
            offsets = query.offsets()  # pyright: ignore[reportAttributeAccessIssue]
            return torch.nested.nested_tensor_from_jagged(torch.cat(parts), offsets)
        return torch.nested.as_nested_tensor(parts)


def replace_multihead_attention(model: nn.Module, ring: Ring | None = None) -> list[str]:
    """Make every `nn.MultiheadAttention` in a model a `RingMultiheadAttention`, in place.

    The modules stay the same objects, with their parameters, hooks and modes, so optimizers and references stay valid. Call it
    before wrappers that change classes (`fully_shard`) or trace (`torch.compile`). Existing `RingMultiheadAttention` gets the
    ring. Nothing is converted when an error is raised.

    Args:
        model: The model; may itself be a `nn.MultiheadAttention`.
        ring: See `RingMultiheadAttention`.

    Returns:
        Qualified names of the converted modules, in the order of `model.named_modules()`; "" is the model itself.

    Raises:
        NotImplementedError: The model has a subclass of `nn.MultiheadAttention` with its own forward.
        TypeError: The ring or the model has another type.

    Example:
        >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, batch_first=True), 2)
        >>> replace_multihead_attention(model)
        ['layers.0.self_attn', 'layers.1.self_attn']
    """
    _check_ring(ring)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {type(model).__name__}; pass the model itself")
    found = {name: module for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)}
    foreign = {
        name: type(module).__name__
        for name, module in found.items()
        if not isinstance(module, RingMultiheadAttention) and type(module) is not nn.MultiheadAttention
    }
    if foreign:
        raise NotImplementedError(
            f"attention must be exactly nn.MultiheadAttention to be replaced, got subclasses of it: {foreign}; replace "
            "attention before those are made of it, or convert them by hand"
        )
    converted = []
    for name, module in found.items():
        if not isinstance(module, RingMultiheadAttention):
            module.__class__ = RingMultiheadAttention
            converted.append(name)
        elif ring is None:
            continue
        _set_ring(module, ring)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            # it would compare a whole padding mask with this rank's rows
            module.use_nested_tensor = False
    return converted


def _check_ring(ring: object) -> None:
    if ring is not None and not isinstance(ring, Ring):
        raise TypeError(f"ring must be a Ring or None, got {type(ring).__name__}; calls are given shardings")


def _set_ring(module: nn.MultiheadAttention, ring: Ring | None) -> None:
    assert isinstance(module, RingMultiheadAttention), "only ring attention has a ring"
    module._ring = _RingReference(ring)
    if _do_nothing not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_do_nothing)


_ring_of_one = functools.cache(Ring)  # for modules without a ring, in a single process


_whole_shardings: dict[tuple[str, str], Sharding] = {}


def _make_whole_shardings(ring: str, *sizes: str) -> None:
    """Make `_whole_shardings` for sequences on one rank; an empty name is the ring of this process alone."""
    missing = [size for size in sizes if (ring, size) not in _whole_shardings]
    if missing and len(_whole_shardings) + len(sizes) > MAX_WHOLE_SHARDINGS:
        missing = sizes
        _whole_shardings.clear()
    for size in missing:
        whole = get_ring(ring) if ring else _ring_of_one()
        _whole_shardings[ring, size] = whole.sharding(int(size), "contiguous")


# what torch.compiler.assume_constant_result marks, which would import the compiler: a trace runs it, then reads the table
_make_whole_shardings._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _positions(sharding: Sharding, like: Tensor) -> Tensor:
    """Global positions of this rank's rows, `s`, on a tensor's device."""
    compiling = torch.compiler.is_compiling()  # which does not trace the lock of a cached property
    here = positions_of(sharding.shards[sharding.rank]) if compiling else sharding.positions
    return here.to(like.device)


def _with_column(o: Tensor, lse: Tensor, logit: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Merge one more key per row into finished attention: o and value `b s h d` and `b h s d`, lse and logit `b h s`.

    Columns of add_bias_kv and add_zero_attn belong to no position, every row sees them, and no mask hides them. So the bias key is
    a partial that is merged after the ring, and the zero key, whose logit and value are 0, is a sink.
    """
    before = Partial(m=lse, l=(lse > float("-inf")).to(lse.dtype), o=o.transpose(1, 2).to(lse.dtype))
    column = Partial(m=logit, l=torch.ones_like(logit), o=value)
    merged, lse = finalize(merge(before, column))
    return merged.transpose(1, 2).to(o.dtype), lse


def _weights(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    added: list[Tensor],
    sharding: Sharding,
    keys: Sharding,
    key_bias: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    mask: Mask | None,
) -> Tensor:
    """Return the weights of this rank's rows over all keys and the added columns: `b h s (n + added)`, lse's dtype."""
    wide = lse.dtype
    s = torch.einsum("bshd,bnhd->bhsn", q.to(wide), keys.unshard(k, 1).to(wide)) * q.shape[-1] ** -0.5
    if key_bias is not None:
        s = s + keys.unshard(key_bias, 1)[:, None, None].to(wide)
    if bias is not None:
        s = s + bias.to(wide)
    i, j = _positions(sharding, q)[:, None], torch.arange(keys.seq_len, device=q.device)
    if causal:
        s = s.masked_fill(j > i, float("-inf"))
    if mask is not None:
        visible = [mask.visible(i, j, b=b, documents=sharding.documents) for b in range(mask.batch_size or 1)]
        s = s.masked_fill(~torch.stack([x.expand(s.shape[-2:]) for x in visible])[:, None], float("-inf"))
    if sharding.documents is not None:
        starts = torch.tensor(sharding.documents, device=q.device)
        # index of the document, empty ones included
        i, j = torch.bucketize(i, starts, right=True), torch.bucketize(j, starts, right=True)
        s = s.masked_fill(i != j, float("-inf"))
    s = torch.cat([s, *(x[..., None] for x in added)], -1)
    # a row without keys: exp(-inf - 0) is the 0 that is wanted
    return torch.exp(s - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
