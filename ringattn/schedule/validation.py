"""Validation of a call's tensors against each other and its options, before any communication.

Masks check themselves (`fold_mask`, `MaskUnion`), kernels are chosen in `kernels.registry`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ringattn.plan.attention_spec import AttentionSpec, ScoreTensors
from ringattn.plan.expressions import Lengths
from ringattn.tensor_checks import check_tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SOFTCAPS = {torch.float16: 2.0**13, torch.bfloat16: 2.0**16, torch.float32: 2.0**100, torch.float64: 2.0**100}
"""The widest soft cap by dtype. In half precision kernels take a tanh that is rounded by 2**-24, which makes a score wrong by
softcap times that: up to here less than one rounding of the dtype. Wider dtypes only need a number to multiply with."""


def check_tensors(needed: Mapping[str, Tensor], options: Mapping[str, Tensor | None]) -> None:
    """Raise unless all given tensors are plain (`check_tensor`) and have numbers; options that are None were not given."""
    given = [(name, x) for name, x in options.items() if x is not None]
    for name, x in (*needed.items(), *given):
        check_tensor(name, x)
        if x.is_meta:
            raise ValueError(f"{name} must have numbers, got a meta tensor; make it real")


def check_dims(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless each of them is `b s h d`."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} must be 4-dimensional, `batch rows heads head_dim`, got shape {tuple(x.shape)}")


def check_latents(q: Tensor, latents: Tensor, rotary_keys: Tensor, k_up: Tensor, v_up: Tensor, rows: int) -> None:
    """Raise ValueError unless the tensors of latent attention fit each other and the rows of a shard; see `latent_attention`."""
    given = {"latents": latents, "rotary_keys": rotary_keys, "k_up": k_up, "v_up": v_up}
    for name, x, dims in (("q", q, 4), *((name, x, 3) for name, x in given.items())):
        if x.dim() != dims:
            raise ValueError(f"{name} must have {dims} dimensions, got shape {tuple(x.shape)}; see latent_attention")
    for name, x in given.items():
        if (x.dtype, x.device) != (q.dtype, q.device):
            raise ValueError(f"{name} must be {q.dtype} on {q.device} like q, got {x.dtype} on {x.device}; convert it")
    (b, _, h, d), (hk, dn, r), dr = q.shape, k_up.shape, rotary_keys.shape[2]
    for name, shape in (("latents", (b, rows, r)), ("rotary_keys", (b, rows, dr)), ("v_up", (hk, v_up.shape[1], r))):
        if tuple(given[name].shape) != shape:
            raise ValueError(
                f"{name} must have shape {shape} beside q {tuple(q.shape)} and k_up {tuple(k_up.shape)}, got "
                f"{tuple(given[name].shape)}; pass this rank's rows, and weights with one latent width"
            )
    if d != dn + dr:
        raise ValueError(f"q must have head_dim {dn + dr}: {dn} of k_up and {dr} of rotary_keys, got {d}")
    if hk == 0 or h % hk:
        raise ValueError(f"q must have a multiple of the {hk} heads of k_up, got {h}")
    if r == 0 or v_up.shape[1] == 0:
        raise ValueError(f"latents and v_up must have columns, got {r} of latents and {v_up.shape[1]} of values")


def expand_bias(bias: Tensor, q: Tensor, kv_len: int, name: str = "bias") -> Tensor:
    """Return a bias as `b h s n`, without a copy; unchanged where q, which is refused later, has other dims."""
    if q.dim() != 4:
        return bias
    b, s, h, _ = q.shape
    wanted = (b, h, s, kv_len)
    sizes = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    if len(sizes) != 4 or any(x not in (1, y) for x, y in zip(sizes, wanted, strict=True)):
        raise ValueError(
            f"{name} must be broadcastable to {wanted} (this rank's query rows x all keys), got {tuple(bias.shape)}; "
            f"cut a whole one with sharding.shard({name}, dim=-2)"
        )
    return bias.expand(wanted)


def check_call(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, tensors: ScoreTensors) -> None:
    """Raise ValueError or NotImplementedError when the tensors, bias after expansion, do not fit each other or the call."""
    given = {name: x for name, x in tensors._asdict().items() if x is not None}
    check_dims(q, k, v)
    if q.dtype not in DTYPES:
        raise ValueError(f"q must be float16, bfloat16, float32 or float64, got {q.dtype}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ValueError(f"{name} must have the dtype of q, {q.dtype}, got {x.dtype}; convert it first")
    for name, x in (("k", k), ("v", v), *given.items()):
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")
    for name, x in given.items():
        if not x.is_floating_point():
            raise ValueError(
                f"{name} must be floating point, got {x.dtype}; convert it, a bool mask to 0 where it shows and -inf elsewhere"
            )
    _check_rows(q, k, spec)
    _check_shapes(q, k, v)
    b, s, h, _ = q.shape
    wanted = {
        "sinks": ((h,), "one logit per query head"),
        "alibi_slopes": ((h,), "one slope per query head"),
        "key_bias": ((b, k.shape[1]), "this rank's keys"),
        "bias": ((b, h, s, spec.kv_sharding.seq_len), "this rank's query rows x all keys"),
    }
    for name, x in given.items():
        shape, meaning = wanted[name]
        if tuple(x.shape) != shape:
            raise ValueError(f"{name} must have shape {shape} ({meaning}), got {tuple(x.shape)}")
    _check_options(spec, q.dtype, b, tensors.bias is not None)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    b, _, h, d = q.shape
    if k.shape[0] != b or v.shape[0] != b:
        raise ValueError(f"k and v must have batch {b} like q, got {k.shape[0]} and {v.shape[0]}")
    if k.shape[-1] != d:
        raise ValueError(f"k must have head_dim {d} like q, got {k.shape[-1]}")
    if v.shape[1:3] != k.shape[1:3]:
        raise ValueError(f"v must have rows and heads {tuple(k.shape[1:3])} like k, got {tuple(v.shape[1:3])}")
    if h == 0 or k.shape[2] == 0 or h % k.shape[2]:
        raise ValueError(f"the number of query heads must be a multiple of the key heads, got {h} and {k.shape[2]}")
    if d == 0 or v.shape[-1] == 0:
        raise ValueError(f"head_dim must be at least 1, got {d} for q and {v.shape[-1]} for v")


def _check_rows(q: Tensor, k: Tensor, spec: AttentionSpec) -> None:
    for name, sharding, x in (("q", spec.sharding, q), ("k", spec.kv_sharding, k)):
        if x.shape[1] != sharding.shard_len:
            raise ValueError(
                f"{name} must have the {sharding.shard_len} rows that rank {sharding.rank} holds of {sharding.seq_len}, got "
                f"{x.shape[1]}; pass this rank's rows, as sharding.shard(x, dim=1) gives them"
            )
    if spec.kv_sharding.documents not in (None, spec.sharding.documents):
        raise ValueError(
            "kv_sharding must have no documents, or those of sharding, which alone are part of the mask, got others; make it "
            "without documents=, and hide pairs across documents by bias"
        )


def check_softcap(softcap: float, dtype: torch.dtype) -> None:
    """Raise ValueError when a finite soft cap is below 0, or so wide or tight that kernels would lose the scores."""
    if softcap < 0:
        raise ValueError(f"softcap must be at least 0 (0 for none), got {softcap}")
    widest = SOFTCAPS[dtype]
    if softcap and not 2.0**-100 <= softcap <= widest:
        raise ValueError(
            f"softcap must be from {2.0**-100:.3g} to {widest:.5g} for {dtype}, got {softcap:.5g}: scores would lose their digits; "
            "leave out a cap that is never reached (0.0 is none), or pass float32"
        )


def _check_options(spec: AttentionSpec, dtype: torch.dtype, batch: int, has_bias: bool) -> None:
    check_softcap(spec.softcap, dtype)
    if not 0 <= spec.dropout_p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {spec.dropout_p}")
    if spec.mask.is_per_batch and spec.mask.batch_size != batch:
        by_lengths = any(isinstance(part, Lengths) for part in spec.mask.parts)
        what = "lengths must have one (start, stop)" if by_lengths else "mask must have one part"
        raise ValueError(f"{what} per batch element, {batch}, got {spec.mask.batch_size}")
    if has_bias and spec.backward == "queries":
        raise NotImplementedError(
            "backward='queries' must go without bias, whose rows cannot leave their rank; use backward='keys' or 'auto'"
        )
