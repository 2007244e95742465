"""The public functions `ring_attention` and `ring_attention_with_lse`: resolve options, describe the call, run the operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from operator import index
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ringattn.autograd import attend, expand_in_order, side
from ringattn.dispatch import call_text
from ringattn.plan.attention_spec import ScoreTensors
from ringattn.plan.expressions import Mask
from ringattn.plan.options import EXPANDS, MaskOptions, ScoreOptions, resolve_integer, resolve_real, resolve_word
from ringattn.plan.sharding import Sharding, check_sharding
from ringattn.schedule.latents import with_rotary
from ringattn.schedule.validation import check_latents, check_tensors, expand_bias

if TYPE_CHECKING:
    from typing_extensions import Unpack

_AUTOCAST = ("cpu", "cuda", "hip", "xpu")
"""Devices with autocast. A constant, because torch.compile of torch 2.11 does not trace `torch.amp.is_autocast_available`."""


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sharding: Sharding,
    *,
    kv_sharding: Sharding | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    prefix_len: int = 0,
    chunk_len: int | None = None,
    lengths: Sequence[Sequence[int]] | Tensor | None = None,
    mask: Mask | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    key_bias: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    deterministic: bool = False,
    impl: str | None = None,
    backward: str = "auto",
) -> Tensor:
    """Exact attention over a sequence sharded around a ring of ranks.

    Each rank passes the rows it holds and receives the output of its own query rows over the keys of *all* ranks. Equals
    `attention_reference` on the whole sequence up to rounding; softmax statistics, sums over ring steps and gradient
    accumulators are fp32 (fp64 for fp64 inputs). A row that sees nothing gives 0 and has zero gradients. All ranks must
    make the same call; the first call of each signature is compared between them.

    Positions are global: query i, key j. Score: `softmax_scale * q.k`, then `softcap * tanh(score / softcap)`, then
    ALiBi `- slope * |i - j|`, then key_bias, then bias. All masks are intersected.

    Args:
        q: Queries of this rank, `b s h d`, fp16, bf16, fp32 or fp64.
        k: Keys of this rank, `b t hk d`, q's dtype; hk divides h (grouped-query attention). t is s without kv_sharding.
        v: Values of this rank, `b t hk dv`, q's dtype.
        sharding: The positions of each rank, from `ring.sharding`; its documents are part of the mask.
        kv_sharding: For cross attention: the sharding of the keys' own sequence; it may have no other documents than sharding.
        causal: Keys j <= i.
        window: (left, right): i - left <= j <= i + right, None for unbounded on a side. An int w is (w - 1, 0):
            the last w keys, as sliding-window models count.
        prefix_len: With causal: keys j < prefix_len are visible to every row too. Beside a window give (left, None): a right
            side of 0, and so an int, hides them.
        chunk_len: i // chunk_len == j // chunk_len.
        lengths: (start, stop) per batch element: rows and keys outside it see nothing and are not seen.
        mask: A mask of `ringattn.masks`, alone: causal, window, prefix_len, chunk_len and lengths are short forms of one. It is
            intersected with the documents of the sharding.
        softmax_scale: Factor on q.k; default d ** -0.5.
        softcap: Bound of the soft cap; 0.0 for none. At most 2**13 in fp16, and 2**16 in bf16.
        sinks: `h`, floating point: one more logit per head, in the denominator only.
        alibi_slopes: `h`, floating point (Press et al. 2022, "Train Short, Test Long").
        key_bias: `b t`, floating point, added to every score of a key; this rank's keys.
        bias: Broadcastable to `b h s n`, floating point: this rank's query rows x all n keys by global position.
        dropout_p: Probability of dropping an attention weight.
        dropout_seed: 64-bit seed of the mask; needed when dropout_p > 0, and equal on all ranks. The mask is a function of
            the seed and global indices, so it is the same at any world size. Seeds are compared between ranks, except with
            backward="keys".
        deterministic: Demand bitwise repeatable gradients. The eager and portable kernels always give them; the Hopper
            kernels then compute two products more, and those of torch need `torch.use_deterministic_algorithms(True)`. The
            forward always repeats.
        impl: Kernel set: "auto", "hopper", "torch", "portable", "eager"; default: the ring's.
        backward: The side that a stepwise backward moves: "keys", "queries", or "auto" for the one with fewer bytes, and
            keys with dropout. A fused backward moves keys; "queries" makes the backward stepwise.

    Returns:
        `b s h dv`, this rank's rows, q's dtype. Under autocast q, k and v, and so the output, have autocast's dtype.

    Raises:
        ValueError: A shape, dtype, device or option is inconsistent, here or between ranks; raised on every rank before
            any shard moves.
        TypeError: The sharding or a tensor is something else, or what counts is no integer.
        NotImplementedError: Meaningful but not supported; the message names the alternative.
        RuntimeError: A transfer failed or timed out, now or in an earlier call whose results are then NaN; the message names
            the rank, the step and the peers.

    Gradients flow to q, k, v, sinks, alibi_slopes, key_bias and bias. Those of sinks and alibi_slopes are this rank's
    share, as for any replicated parameter: sum them over ranks.

    The method is blockwise attention over a ring (Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise Transformers
    for Near-Infinite Context") with the online softmax (Milakov and Gimelshein 2018).

    Example:
        >>> from ringattn import Ring
        >>> sharding = Ring().sharding(seq_len=5)
        >>> q = k = v = torch.ones(1, 5, 1, 16)
        >>> ring_attention(q, k, v, sharding, causal=True).shape
        torch.Size([1, 5, 1, 16])
    """
    options = {
        "causal": causal,
        "window": window,
        "prefix_len": prefix_len,
        "chunk_len": chunk_len,
        "lengths": lengths,
        "mask": mask,
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        "dropout_p": dropout_p,
        "deterministic": deterministic,
        "impl": impl,
        "backward": backward,
    }
    tensors = ScoreTensors(sinks, alibi_slopes, key_bias, bias)
    return _attend(q, {"k": k, "v": v}, sharding, kv_sharding, tensors, dropout_seed, options)[0]


class AttentionOptions(MaskOptions, ScoreOptions, total=False):
    """Keywords of `ring_attention`."""

    kv_sharding: Sharding | None
    mask: Mask | None
    dropout_seed: int | None
    deterministic: bool
    impl: str | None
    backward: str


def ring_attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, sharding: Sharding, **options: Unpack[AttentionOptions]
) -> tuple[Tensor, Tensor]:
    """`ring_attention` that also returns lse, which is differentiable.

    Takes the arguments of `ring_attention` and raises what it raises.

    Returns:
        o `b s h dv` in q's dtype, and lse `b h s`: natural log of the sum of exponentials over all visible keys (and
        the sink), fp32 (fp64 for fp64 inputs); -inf on rows that see nothing.
    """
    return _attend(q, {"k": k, "v": v}, sharding, *_resolve_keywords(options))


def latent_attention(
    q: Tensor,
    latents: Tensor,
    rotary_keys: Tensor,
    k_up: Tensor,
    v_up: Tensor,
    sharding: Sharding,
    *,
    expand: str = "auto",
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """Multi-head latent attention over a sequence sharded around a ring of ranks.

    Keys and values of all heads are made from latents: head i has keys `[latents @ k_up[i].T, rotary_keys]` and values
    `latents @ v_up[i].T`. Equals `ring_attention` with these keys and values up to rounding. Only latents and rotary keys travel
    between ranks, and their gradients return, so a token takes r + dr numbers in place of h (dn + dr + dv).

    Args:
        q: Queries of this rank, `b s h (dn + dr)`: columns for k_up first, then those for rotary_keys, rotated.
        latents: `b t r`, this rank's rows, normalised as the model does.
        rotary_keys: `b t dr`, this rank's rows, rotated; all heads share them. dr may be 0.
        k_up: `hk dn r`, equal on all ranks; hk divides h, and is h in models.
        v_up: `hk dv r`, equal on all ranks. With the weight of transformers' `kv_b_proj`:
            `k_up, v_up = kv_b_proj.weight.view(h, dn + dv, r).split([dn, dv], dim=1)`.
        sharding: The positions of each rank, from `ring.sharding`.
        expand: The rank that expands a row to keys and values. "reader": each rank expands the rows that reach it, and latents
            travel step by step. "owner": each rank expands its own rows, and keys and values travel. "auto": the owner where one
            launch can gather the keys of a host's ranks, and in a ring of one rank; else the reader.
        **options: Keywords of `ring_attention`.

    Returns:
        `b s h dv`, this rank's rows, q's dtype.

    Raises:
        ValueError: As `ring_attention`, or shapes do not fit each other; raised on every rank before any row moves.
        TypeError: As `ring_attention`, or an option is unknown.
        NotImplementedError: As `ring_attention`.
        RuntimeError: As `ring_attention`.

    Gradients flow to q, latents, rotary_keys, k_up and v_up, and to the tensors among the options. Those of k_up and v_up are this
    rank's share, as for any replicated parameter: sum them over ranks. Softmax and sums over ring steps are fp32; the gradients of
    a shard's keys and values are rounded to q's dtype before they are multiplied back to latents, as after `ring_attention`.

    The method is that of DeepSeek-V2 (DeepSeek-AI 2024, section 2.1), with the expansion as the formula has it.

    Example:
        >>> from ringattn import Ring
        >>> sharding = Ring().sharding(seq_len=5)
        >>> q, latents, rotary_keys = torch.ones(1, 5, 2, 12), torch.ones(1, 5, 16), torch.ones(1, 5, 4)
        >>> k_up, v_up = torch.ones(2, 8, 16), torch.ones(2, 6, 16)
        >>> latent_attention(q, latents, rotary_keys, k_up, v_up, sharding, causal=True).shape
        torch.Size([1, 5, 2, 6])
    """
    return latent_attention_with_lse(q, latents, rotary_keys, k_up, v_up, sharding, expand=expand, **options)[0]


def latent_attention_with_lse(
    q: Tensor,
    latents: Tensor,
    rotary_keys: Tensor,
    k_up: Tensor,
    v_up: Tensor,
    sharding: Sharding,
    *,
    expand: str = "auto",
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]:
    """`latent_attention` that also returns lse, which is differentiable.

    Takes the arguments of `latent_attention` and raises what it raises.

    Returns:
        o `b s h dv` in q's dtype, and lse `b h s` as of `ring_attention_with_lse`.
    """
    keys = {"latents": latents, "rotary_keys": rotary_keys, "k_up": k_up, "v_up": v_up}
    kv_sharding, tensors, seed, given = _resolve_keywords(options)
    return _attend(q, keys, sharding, kv_sharding, tensors, seed, {**given, "latents": expand})


_DEFAULTS = {
    name: parameter.default
    for name, parameter in signature(ring_attention).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}


def _resolve_keywords(options: Mapping[str, Any]) -> tuple[Sharding | None, ScoreTensors, int | None, dict[str, Any]]:
    """Return kv_sharding, tensors, seed and the other options of keywords of `ring_attention`, which has their defaults."""
    unknown = options.keys() - _DEFAULTS.keys()
    if unknown:
        raise TypeError(f"options must be keywords of ring_attention, got {sorted(unknown)}; leave them out")
    given = {**_DEFAULTS, **options}
    tensors = ScoreTensors(*(given.pop(name) for name in ScoreTensors._fields))
    return given.pop("kv_sharding"), tensors, given.pop("dropout_seed"), given


def _attend(
    q: Tensor,
    keys: dict[str, Tensor],
    sharding: Sharding,
    kv_sharding: Sharding | None,
    tensors: ScoreTensors,
    dropout_seed: int | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Run a call of `ring_attention_with_lse` or, with the tensors of latents for keys, of `latent_attention_with_lse`."""
    try:
        if type(sharding) is not Sharding:
            check_sharding(sharding)
        if kv_sharding is not None:
            check_sharding(kv_sharding, "kv_sharding")
        needed = (q, *keys.values())
        if not all(map(_is_dense_or_none, (*needed, *tensors))) or any(x is None for x in needed):
            check_tensors({"q": q, **keys}, tensors._asdict())
        kind = q.device.type
        if kind in _AUTOCAST and torch.is_autocast_enabled(kind):
            lower = torch.get_autocast_dtype(kind)
            needed = [x.to(lower) if x.is_floating_point() and x.dtype != torch.float64 else x for x in needed]
        if tensors.bias is not None:
            bias = expand_bias(tensors.bias, needed[0], (kv_sharding or sharding).seq_len)
            if bias.requires_grad and torch.is_grad_enabled() and sharding.ring.is_virtual:
                bias = expand_in_order(tensors.bias, bias.shape, sharding)
            tensors = tensors._replace(bias=bias)
        if "latents" in options:
            q, *given = needed
            check_latents(q, *given, rows=(kv_sharding or sharding).shard_len)
            needed = q, *packed_latents(*given)
            columns = index(needed[1].shape[2]), index(needed[3].shape[2])
            options["latents"] = (*columns, resolve_word("expand", options["latents"], EXPANDS))
        if type(options["dropout_p"]) is not float:
            options["dropout_p"] = resolve_real("dropout_p", options["dropout_p"])
        dropout_p = options["dropout_p"]
        if dropout_p and dropout_seed is None:
            raise ValueError(
                f"dropout_seed must be given when dropout_p is {dropout_p}; pass one integer per call, the same on all ranks"
            )
        # a q without features has no scale, and is refused where tensors are checked
        d = q.shape[-1] if q.dim() else 0
        if options["softmax_scale"] is None:
            options["softmax_scale"] = d**-0.5 if d else 1.0
        # a seed may be a symbol of a trace, which has no truth
        seed = 0 if dropout_seed is None else dropout_seed
        if type(seed) is not int and not isinstance(seed, torch.SymInt):
            seed = resolve_integer("dropout_seed", seed)
        if _is_true(seed < -(2**63)) or _is_true(seed >= 2**63):
            if _is_true(seed < 0) or _is_true(seed >= 2**64):
                raise ValueError(f"dropout_seed must have 64 bits, got {seed}; take it modulo 2**64")
            seed -= 2**64  # the same bits: operators take signed integers
        call = call_text(sharding, kv_sharding, options)
    except Exception as error:
        # published to the other ranks, except in a trace, which has no other ranks
        if isinstance(sharding, Sharding) and not torch.compiler.is_compiling():
            sharding.ring.raise_on_all_ranks(error)
        raise
    # the property raises where there is no ring
    ring = sharding.ring_name or sharding.ring.name
    # a trace would keep the digest of its batch
    if not torch.compiler.is_compiling():
        side.batch = sharding.batch
    return attend(*needed, *tensors, seed, ring, call)


def packed_latents(latents: Tensor, rotary_keys: Tensor, k_up: Tensor, v_up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return latent rows and the weights that make keys and values of them (`schedule/latents.py`)."""
    dr = rotary_keys.shape[2]
    return torch.cat([latents, rotary_keys], 2) if dr else latents, with_rotary(k_up, dr), v_up


def _is_true(condition: bool | torch.SymBool) -> bool:
    """Return whether a condition is true; False for one about a seed that is drawn in a trace, which has 63 bits."""
    if not torch.compiler.is_compiling():
        return condition is True
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # imports sympy

    return guard_or_false(condition)


def _is_dense_or_none(x: Tensor | None) -> bool:
    """Return whether a tensor is None, or is one of the usual ones that `check_tensors` accepts."""
    if x is None:
        return True
    is_usual = (type(x) is Tensor or type(x) is torch.nn.Parameter) and x.layout is torch.strided
    return is_usual and not (x.is_nested or x.is_quantized or x.is_meta)
