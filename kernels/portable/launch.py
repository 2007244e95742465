"""From tensors to kernel launches.

Owns grids, strides and compile-time switches. Refuses to know the mathematics of the kernels and anything of a ring. Never
waits for the device, and allocates nothing beyond delta, lse in log2 units, copies of tensors whose rows lie too far apart
and, with a key bias that wants a gradient, one sum per key head.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ringattn.kernels import launch_triton
from ringattn.kernels.contract import Carry, Grads, Score, Side
from ringattn.kernels.portable import backward, configs, forward
from ringattn.kernels.portable.configs import Config

# what @triton.jit makes of a function has a type that says neither [grid] nor that constants are plain values
_forward: Any = forward.forward_kernel
_delta: Any = backward.delta_kernel
_keys: Any = backward.keys_kernel
_rows: Any = backward.rows_kernel

LOG2E = math.log2(math.e)
L2_BYTES = 32 * 2**20  # of the level-two cache, what one sweep of heads may stream
MAX_HEAD_DIM = 256
FARTHEST = 2**24  # elements from row to row: a tile has up to 128 rows, whose offsets are counted in 32 bits
LEAST_SCALE = 1e-30  # a smaller softmax_scale may be 0 in fp32, which makes NaN of a hidden pair: -inf times 0
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Side,
    keys: Side,
    score: Score,
    *,
    carry: Carry | None,
    first: bool,
    last: bool,
    o: Tensor,
    lse: Tensor,
    config: Config | None = None,
) -> None:
    """`KernelSet.forward`, with a configuration of the caller's choice in place of the table's."""
    batch, s, h, d = q.shape
    t, hk, dv = v.shape[1:]
    _check(q, d, dv)
    q, k, v = _near(q), _near(k), _near(v)
    if batch * s * h == 0 or not (first or last or t):
        return
    kind = configs.kind_of(q.device)
    cap = _scale_and_cap(score)
    plain = _is_plain(score)
    if config is None:
        config = configs.choose(kind, q.element_size(), max(_padded(d), _padded(dv)), "forward", plain)
    tma = config.tma and _describable(k) and _describable(v)
    if config.tma and not tma:
        config = configs.without_tma(config)
    tiles = -(-s // config.block_m)
    per_head = t * (d + dv) * k.element_size() * hk // h
    dropout = _dropout(score)
    carry_m, carry_l, carry_acc = (carry.m, carry.l, carry.acc) if carry is not None else (None, None, None)
    with _device(q):
        _forward[(tiles * batch * h,)](
            q, _streamed(k, config.block_n, tma), _streamed(v, config.block_n, tma), o, lse, carry_m, carry_l, carry_acc,
            rows.positions, rows.lo, rows.hi, keys.runs, score.sinks, score.alibi_slopes, score.key_bias, score.bias,
            *_strides(q), *_strides(k), *_strides(v), *_strides(o), *_strides(carry_acc),
            *_pair(lse), *_pair(carry_m), *_pair(carry_l), _batch(rows.lo), _batch(rows.hi), _batch(score.key_bias),
            *_bias_strides(score.bias),
            batch * h, h, h // hk, s, len(keys.run_list) if t else 0, tiles, _sweep(per_head, batch * h), *cap, *dropout,
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, D=_padded(d), D_WIDTH=d, DV=_padded(dv), DV_WIDTH=dv,
            FIRST=first, LAST=last, PLAIN=plain, SOFTCAP=score.softcap > 0, DROPOUT=score.dropout_p > 0, SKEW=config.skew,
            TMA=tma, SAME_STRIDE=_same_stride(k, v), PRECISION=_precision(q, kind), **_options(config),
        )  # fmt: skip


def launch_delta(o: Tensor, do: Tensor, dlse: Tensor | None, out: Tensor | None = None) -> Tensor:
    """`KernelSet.delta`."""
    batch, s, h, _ = o.shape
    delta = torch.empty((batch, h, s), dtype=torch.float32, device=o.device) if out is None else out
    if delta.numel() == 0:
        return delta
    _fill_delta(o, _near(do), dlse, delta)
    return delta


def _fill_delta(o: Tensor, do: Tensor, dlse: Tensor | None, delta: Tensor) -> None:
    batch, s, h, dv = o.shape
    block_m = 64
    launch_triton.launch(
        _delta,
        (-(-s // block_m) * batch * h,),
        (o, do, dlse, delta, *_strides(o), *_strides(do), *_pair(dlse), h, s),
        {"BLOCK_M": block_m, "DV": _padded(dv), "DV_WIDTH": dv},
        num_warps=4,
    )


def launch_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    rows: Side,
    keys: Side,
    score: Score,
    grads: Grads,
    *,
    keys_config: Config | None = None,
    rows_config: Config | None = None,
) -> None:
    """`KernelSet.backward`, with configurations of the caller's choice in place of the table's."""
    _check(q, q.shape[3], v.shape[3])
    do, q, k, v = _near(do), _near(q), _near(k), _near(v)
    _launch_keys(do, q, k, v, lse, delta, rows, keys, score, grads, keys_config)
    _launch_rows(do, q, k, v, lse, delta, rows, keys, score, grads, rows_config)


def _launch_keys(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    rows: Side,
    keys: Side,
    score: Score,
    grads: Grads,
    config: Config | None,
) -> None:
    batch, s, h, d = q.shape
    t, hk, dv = v.shape[1:]
    if batch * t * hk == 0 or (grads.accumulate_keys and batch * s * h == 0):
        return
    kind = configs.kind_of(q.device)
    if config is None:
        config = configs.choose(kind, q.element_size(), max(_padded(d), _padded(dv)), "keys", _is_plain(score))
    # coordinates of a descriptor have 32 bits
    tma = config.tma and _describable(q) and _describable(do) and batch * h * (s + 3) < 2**31
    # times log2(e) once here, not once per tile of keys
    lse2, delta = lse.contiguous() * LOG2E, delta.contiguous()
    if tma:
        # bulk loads begin at multiples of 16 bytes, so every head does
        lse2, delta = (_padded_rows(x, 4) for x in (lse2, delta))
    tiles = -(-t // config.block_n)
    per_head = s * (d + dv) * q.element_size()
    partial = None
    if grads.dkey_bias is not None:
        partial = torch.empty((batch, hk, t), dtype=torch.float32, device=q.device)
        if grads.accumulate_keys:
            partial.zero_()  # tiles that see nothing return at once
    with _device(q):
        _keys[(tiles * batch * hk,)](
            _streamed(do, config.block_m, tma), _streamed(q, config.block_m, tma), k, v,
            _listed(lse2, config.block_m, tma), _listed(delta, config.block_m, tma), grads.dk, grads.dv,
            partial, keys.positions, keys.lo, keys.hi, rows.runs, score.alibi_slopes, score.key_bias, score.bias,
            *_strides(do), *_strides(q), *_strides(k), *_strides(v), *_strides(grads.dk), *_strides(grads.dv),
            lse2.shape[2], _batch(keys.lo), _batch(keys.hi), _batch(score.key_bias), *_bias_strides(score.bias),
            batch * hk, hk, h // hk, t, len(rows.run_list) if s else 0, tiles, _sweep(per_head, batch * hk),
            score.softmax_scale, *_scale_and_cap(score), *_dropout(score),
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, D=_padded(d), D_WIDTH=d, DV=_padded(dv), DV_WIDTH=dv,
            ADD=grads.accumulate_keys, SOFTCAP=score.softcap > 0, DROPOUT=score.dropout_p > 0, TMA=tma,
            SAME_STRIDE=_same_stride(q, do), PRECISION=_precision(q, kind), **_options(config),
        )  # fmt: skip
    if grads.dkey_bias is not None and partial is not None:
        if grads.accumulate_keys:
            grads.dkey_bias.add_(partial.sum(1))
        else:
            torch.sum(partial, 1, out=grads.dkey_bias)


def _launch_rows(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    rows: Side,
    keys: Side,
    score: Score,
    grads: Grads,
    config: Config | None,
) -> None:
    batch, s, h, d = q.shape
    t, hk, dv = v.shape[1:]
    if batch * s * h == 0 or (grads.accumulate_rows and t == 0):
        return
    kind = configs.kind_of(q.device)
    if config is None:
        config = configs.choose(kind, q.element_size(), max(_padded(d), _padded(dv)), "rows", _is_plain(score))
    tma = config.tma and _describable(k) and _describable(v)
    tiles = -(-s // config.block_m)
    per_head = t * (d + dv) * k.element_size() * hk // h
    with _device(q):
        _rows[(tiles * batch * h,)](
            do, q, _streamed(k, config.block_n, tma), _streamed(v, config.block_n, tma), lse, delta, grads.dq, grads.dalibi,
            grads.dbias, rows.positions, rows.lo, rows.hi, keys.runs, score.alibi_slopes, score.key_bias, score.bias,
            *_strides(do), *_strides(q), *_strides(k), *_strides(v), *_strides(grads.dq),
            *_pair(lse), *_pair(delta), *_pair(grads.dalibi), _batch(rows.lo), _batch(rows.hi), _batch(score.key_bias),
            *_bias_strides(score.bias), *_bias_strides(grads.dbias),
            batch * h, h, h // hk, s, len(keys.run_list) if t else 0, tiles, _sweep(per_head, batch * h),
            score.softmax_scale, *_scale_and_cap(score), *_dropout(score),
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, D=_padded(d), D_WIDTH=d, DV=_padded(dv), DV_WIDTH=dv,
            ADD=grads.accumulate_rows, SOFTCAP=score.softcap > 0, DROPOUT=score.dropout_p > 0, TMA=tma,
            SAME_STRIDE=_same_stride(k, v), PRECISION=_precision(q, kind), **_options(config),
        )  # fmt: skip


def _check(q: Tensor, d: int, dv: int) -> None:
    if q.dtype not in DTYPES:
        raise NotImplementedError(
            f"the portable kernels take float16, bfloat16 or float32, got {q.dtype}; use the eager kernels"
        )
    if max(d, dv) > MAX_HEAD_DIM:
        raise NotImplementedError(
            f"the portable kernels take head_dim up to {MAX_HEAD_DIM}, got {max(d, dv)}; use the eager kernels"
        )


def _near(x: Tensor) -> Tensor:
    """The tensor itself, or a copy of one whose rows lie too far apart."""
    return x if x.stride(1) <= FARTHEST else x.contiguous()


def _padded(head_dim: int) -> int:
    return max(16, 1 << (head_dim - 1).bit_length())


def _is_plain(score: Score) -> bool:
    """Whether the score is q . k times a positive scale."""
    absent = score.alibi_slopes is None and score.key_bias is None and score.bias is None
    return absent and not score.softcap > 0 and score.dropout_p == 0 and score.softmax_scale >= LEAST_SCALE


def _scale_and_cap(score: Score) -> tuple[float, float]:
    """The kernels' `scale` and `cap`."""
    if score.softcap > 0:
        return score.softmax_scale / score.softcap, score.softcap * LOG2E
    return score.softmax_scale * LOG2E, 0.0


def _dropout(score: Score) -> tuple[int, int, int, float]:
    """The kernels' `seed_low`, `seed_high`, `drop_threshold` (32 bits each, as signed integers) and `drop_factor`."""
    if score.dropout_p >= 1:
        return 0, 0, -1, 0.0
    seed = score.dropout_seed
    threshold = math.floor(score.dropout_p * 2**32)
    return _signed(seed), _signed(seed >> 32), _signed(threshold), 1 / (1 - score.dropout_p)


def _signed(word: int) -> int:
    return (word & 0xFFFFFFFF) - ((word & 0x80000000) << 1)


def _precision(q: Tensor, kind: str) -> str:
    """How products of fp32 are made: three TF32 products where tensor cores have them, which keeps 21 bits."""
    return "tf32x3" if q.dtype == torch.float32 and kind.startswith("sm") else "ieee"


def _options(config: Config) -> dict[str, Any]:
    options: dict[str, Any] = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.maxnreg is not None:
        options["maxnreg"] = config.maxnreg
    return options


def _sweep(bytes_per_head: int, heads: int) -> int:
    return max(1, min(heads, L2_BYTES // max(1, bytes_per_head)))


def _describable(x: Tensor) -> bool:
    """Whether the tensor memory accelerator can address it: 16-byte aligned base and strides, nothing expanded."""
    size = x.element_size()
    aligned = all(stride > 0 and stride * size % 16 == 0 for stride in x.stride()[:-1])
    return aligned and x.data_ptr() % 16 == 0 and x.numel() > 0


def _streamed(x: Tensor, block: int, tma: bool) -> Any:
    """What the kernel walks: the tensor, or a descriptor over `b h s d` with tiles of `block` rows."""
    if not tma:
        return x
    batch, s, h, d = x.shape
    shape, strides = [batch, h, s, d], [x.stride(0), x.stride(2), x.stride(1), 1]
    return TensorDescriptor(x, shape, strides, [1, 1, block, _padded(d)])


def _padded_rows(x: Tensor, multiple: int) -> Tensor:
    """`b h s` with s rounded up and a base that a descriptor takes."""
    missing = -x.shape[2] % multiple
    return torch.nn.functional.pad(x, (0, missing)) if missing else x if x.data_ptr() % 16 == 0 else x.clone()


def _listed(x: Tensor, block: int, tma: bool) -> Any:
    """A contiguous tensor, or a descriptor over it as one list with tiles of `block` numbers."""
    return TensorDescriptor(x, [x.numel()], [1], [block]) if tma else x


def _same_stride(x: Tensor, y: Tensor) -> bool:
    return x.stride(1) == y.stride(1)


def _strides(x: Tensor | None) -> tuple[int, int, int]:
    return (0, 0, 0) if x is None else (x.stride(0), x.stride(1), x.stride(2))


def _pair(x: Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else (x.stride(0), x.stride(1))


def _batch(x: Tensor | None) -> int:
    return 0 if x is None or x.shape[0] == 1 else x.stride(0)


def _bias_strides(x: Tensor | None) -> tuple[int, int, int, int]:
    return (0, 0, 0, 0) if x is None else (x.stride(0), x.stride(1), x.stride(2), x.stride(3))


def _device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    if not x.is_cuda or torch.cuda.current_device() == x.device.index:
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)
