"""The portable kernel set: `KernelSet` of interface.py in plain Triton, for any GPU Triton serves and for its interpreter.

Owns grids, strides and compile-time switches. Everything is computed in fp32 from fp16, bf16 or fp32 operands; the backward
is deterministic. Never waits for the device, and allocates nothing beyond delta, lse in log2 units, copies of tensors whose
rows lie too far apart and, with a key bias that wants a gradient, one sum per key head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ringattn.kernels.attention.arguments import (
    LOG2E,
    bound_strides,
    is_dot_only,
    padded,
    pair,
    per_batch,
    scale_and_cap,
    strides,
)
from ringattn.kernels.attention.portable import configs
from ringattn.kernels.attention.portable.backward import delta_kernel, keys_kernel, rows_kernel
from ringattn.kernels.attention.portable.forward import forward_kernel
from ringattn.kernels.interface import BackwardStep, CallShape, Grads, KernelSet, RowMetadata, Score, Step
from ringattn.kernels.runtime import bound_launch

# the type of a @triton.jit function knows neither [grid] nor plain values for constants
_forward: Any = forward_kernel
_keys: Any = keys_kernel
_rows: Any = rows_kernel

L2_BYTES = 32 * 2**20  # of the level-two cache, what one sweep of heads may stream
FARTHEST = 2**24  # elements from row to row: a tile has up to 128 rows, whose offsets are counted in 32 bits


class PortableKernels(KernelSet):
    """`KernelSet` in plain Triton.

    Attributes:
        configs: The shape of each launch; a measurement may put others in their place.
    """

    def __init__(self, call: CallShape) -> None:
        super().__init__(call)
        kind, d, dv = configs.kind_of(call.device), call.head_dim, call.v_head_dim
        self.configs = configs.choose(kind, call.dtype.itemsize, max(padded(d), padded(dv)), is_dot_only(call.score))
        # three TF32 products where tensor cores have them keep 21 bits
        self._precision = "tf32x3" if call.dtype == torch.float32 and kind.startswith("sm") else "ieee"

    def delta(self, o: Tensor, do: Tensor, dlse: Tensor | None, out: Tensor | None = None) -> Tensor:
        """`KernelSet.delta`."""
        return portable_delta(o, do, dlse, out)

    def forward(self, step: Step) -> None:
        """`KernelSet.forward`."""
        q, k, v, rows, keys, score, o, lse, carry, first, last, _ = step
        assert isinstance(keys, RowMetadata), "fused calls are not served"
        batch, s, h, d = q.shape
        t, hk, dv = v.shape[1:]
        q, k, v = _compact(q), _compact(k), _compact(v)
        if batch * s * h == 0 or not (first or last or t):
            return
        config = self.configs["forward"]
        tma = config.tma and _describable(k) and _describable(v)
        if config.tma and not tma:
            config = configs.without_tma(config)
        tiles = -(-s // config.block_m)
        per_head = t * (d + dv) * k.element_size() * hk // h
        carry_m, carry_l, carry_acc = (carry.m, carry.l, carry.acc) if carry is not None else (None, None, None)
        with torch.cuda.device_of(q):
            _forward[(tiles * batch * h,)](
                q, _streamed(k, config.block_n, tma), _streamed(v, config.block_n, tma), o, lse, carry_m, carry_l, carry_acc,
                rows.positions, rows.lo, rows.hi, keys.runs, score.sinks, score.alibi_slopes, score.key_bias, score.bias,
                *strides(q), *strides(k), *strides(v), *strides(o), *strides(carry_acc),
                *pair(lse), *pair(carry_m), *pair(carry_l), *bound_strides(rows)[:2], per_batch(score.key_bias),
                *_bias_strides(score.bias),
                batch * h, h, h // hk, s, len(keys.run_list) * rows.terms if t else 0, tiles, _sweep(per_head, batch * h),
                *scale_and_cap(score), *_dropout(score), *_cuts(rows),
                BLOCK_M=config.block_m, BLOCK_N=config.block_n, D=padded(d), D_WIDTH=d, DV=padded(dv), DV_WIDTH=dv,
                FIRST=first, LAST=last, DOT_ONLY=is_dot_only(score), SOFTCAP=score.softcap > 0, DROPOUT=score.dropout_p > 0,
                TMA=tma, SAME_STRIDE=k.stride(1) == v.stride(1), PRECISION=self._precision, num_warps=config.num_warps, num_stages=config.num_stages,
            )  # fmt: skip

    def backward(self, step: BackwardStep, grads: Grads) -> None:
        """`KernelSet.backward`."""
        do, q, k, v, lse, delta, rows, keys, score, o, dlse, delta_made, _ = step
        assert isinstance(keys, RowMetadata), "fused calls are not served"
        assert grads.dk is not None, "a step writes dk and dv"
        assert grads.dv is not None, "a step writes dk and dv"
        if o is not None and not delta_made:
            portable_delta(o, do, dlse, delta)
        batch, s, h, d = q.shape
        t, hk, dv = v.shape[1:]
        do, q, k, v = _compact(do), _compact(q), _compact(k), _compact(v)
        if batch * t * hk and (batch * s * h or not grads.accumulate_keys):
            config = self.configs["keys"]
            # coordinates of a descriptor have 32 bits
            tma = config.tma and _describable(q) and _describable(do) and batch * h * (s + 3) < 2**31
            # times log2(e) once here, not once per tile of keys
            lse2, each_delta = lse.contiguous() * LOG2E, delta.contiguous()
            if tma:
                # bulk loads begin at multiples of 16 bytes, so every head does
                lse2, each_delta = (_padded_rows(x) for x in (lse2, each_delta))
            tiles = -(-t // config.block_n)
            per_head = s * (d + dv) * q.element_size()
            partial = None
            if grads.dkey_bias is not None:
                partial = torch.empty((batch, hk, t), dtype=torch.float32, device=q.device)
                if grads.accumulate_keys:
                    partial.zero_()  # tiles that see nothing return at once
            with torch.cuda.device_of(q):
                _keys[(tiles * batch * hk,)](
                    _streamed(do, config.block_m, tma), _streamed(q, config.block_m, tma), k, v,
                    _listed(lse2, config.block_m, tma), _listed(each_delta, config.block_m, tma), grads.dk, grads.dv,
                    partial, keys.positions, keys.lo, keys.hi, rows.runs, score.alibi_slopes, score.key_bias, score.bias,
                    *strides(do), *strides(q), *strides(k), *strides(v), *strides(grads.dk), *strides(grads.dv),
                    lse2.shape[2], *bound_strides(keys)[:2], per_batch(score.key_bias), *_bias_strides(score.bias),
                    batch * hk, hk, h // hk, t, len(rows.run_list) * keys.terms if s else 0, tiles, _sweep(per_head, batch * hk),
                    score.softmax_scale, *scale_and_cap(score), *_dropout(score), *_cuts(keys),
                    BLOCK_M=config.block_m, BLOCK_N=config.block_n, D=padded(d), D_WIDTH=d, DV=padded(dv), DV_WIDTH=dv,
                    ADD=grads.accumulate_keys, SOFTCAP=score.softcap > 0, DROPOUT=score.dropout_p > 0, TMA=tma,
                    SAME_STRIDE=q.stride(1) == do.stride(1), PRECISION=self._precision, num_warps=config.num_warps, num_stages=config.num_stages,
                )  # fmt: skip
            if grads.dkey_bias is not None and partial is not None:
                if grads.accumulate_keys:
                    grads.dkey_bias.add_(partial.sum(1))
                else:
                    torch.sum(partial, 1, out=grads.dkey_bias)
        if batch * s * h and (t or not grads.accumulate_rows):
            config = self.configs["rows"]
            tma = config.tma and _describable(k) and _describable(v)
            tiles = -(-s // config.block_m)
            per_head = t * (d + dv) * k.element_size() * hk // h
            with torch.cuda.device_of(q):
                _rows[(tiles * batch * h,)](
                    do, q, _streamed(k, config.block_n, tma), _streamed(v, config.block_n, tma), lse, delta, grads.dq, grads.dalibi,
                    grads.dbias, rows.positions, rows.lo, rows.hi, keys.runs, score.alibi_slopes, score.key_bias, score.bias,
                    *strides(do), *strides(q), *strides(k), *strides(v), *strides(grads.dq),
                    *pair(lse), *pair(delta), *pair(grads.dalibi), *bound_strides(rows)[:2], per_batch(score.key_bias),
                    *_bias_strides(score.bias), *_bias_strides(grads.dbias),
                    batch * h, h, h // hk, s, len(keys.run_list) * rows.terms if t else 0, tiles, _sweep(per_head, batch * h),
                    score.softmax_scale, *scale_and_cap(score), *_dropout(score), *_cuts(rows),
                    BLOCK_M=config.block_m, BLOCK_N=config.block_n, D=padded(d), D_WIDTH=d, DV=padded(dv), DV_WIDTH=dv,
                    ADD=grads.accumulate_rows, SOFTCAP=score.softcap > 0, DROPOUT=score.dropout_p > 0, TMA=tma,
                    SAME_STRIDE=k.stride(1) == v.stride(1), PRECISION=self._precision, num_warps=config.num_warps, num_stages=config.num_stages,
                )  # fmt: skip


def portable_delta(o: Tensor, do: Tensor, dlse: Tensor | None, out: Tensor | None = None) -> Tensor:
    """`KernelSet.delta`."""
    (batch, s, h, dv), do = o.shape, _compact(do)
    found = torch.empty((batch, h, s), dtype=torch.float32, device=o.device) if out is None else out
    block_m = 64
    if found.numel():
        bound_launch.launch(
            delta_kernel,
            (-(-s // block_m) * batch * h,),
            (o, do, dlse, found, *strides(o), *strides(do), *pair(dlse), h, s),
            {"BLOCK_M": block_m, "DV": padded(dv), "DV_WIDTH": dv},
            num_warps=4,
        )
    return found


def _compact(x: Tensor) -> Tensor:
    """The tensor itself, or a copy of one whose rows lie too far apart."""
    return x if x.stride(1) <= FARTHEST else x.contiguous()


def _dropout(score: Score) -> tuple[int, int, int, float]:
    """The kernels' `seed_low`, `seed_high`, `drop_threshold` (32 bits each, as signed integers) and `drop_factor`."""
    if score.dropout_p >= 1:
        return 0, 0, -1, 0.0
    seed = score.dropout_seed
    threshold = math.floor(score.dropout_p * 2**32)
    return _signed(seed), _signed(seed >> 32), _signed(threshold), 1 / (1 - score.dropout_p)


def _cuts(side: RowMetadata) -> tuple[Any, ...]:
    """The kernels' `term_count` to `block_size`; None where absent."""
    if side.terms == 1 and side.patterns is None:
        return (None,) * 8
    _, _, *strides = bound_strides(side)
    patterns = side.patterns
    if patterns is None:
        return side.terms, *strides, *(None,) * 5
    _, length, width = patterns.tables.shape
    return side.terms, *strides, patterns.tables, patterns.of_term_table, length * width, width, patterns.block_size


def _signed(word: int) -> int:
    return (word & 0xFFFFFFFF) - ((word & 0x80000000) << 1)


def _sweep(bytes_per_head: int, heads: int) -> int:
    return max(1, min(heads, L2_BYTES // max(1, bytes_per_head)))


def _describable(x: Tensor) -> bool:
    """Return whether the tensor memory accelerator can address it: 16-byte aligned base and strides, not expanded."""
    size = x.element_size()
    aligned = all(stride > 0 and stride * size % 16 == 0 for stride in x.stride()[:-1])
    return aligned and x.data_ptr() % 16 == 0 and x.numel() > 0


def _streamed(x: Tensor, block: int, tma: bool) -> Any:
    """Argument that the kernel streams: the tensor, or a descriptor over `b h s d` with tiles of `block` rows."""
    if not tma:
        return x
    batch, s, h, d = x.shape
    steps = [x.stride(0), x.stride(2), x.stride(1), 1]
    return TensorDescriptor(x, [batch, h, s, d], steps, [1, 1, block, padded(d)])


def _padded_rows(x: Tensor) -> Tensor:
    """`b h s` with s rounded up to a multiple of 4 and a base that a descriptor takes."""
    missing = -x.shape[2] % 4
    return torch.nn.functional.pad(x, (0, missing)) if missing else x if x.data_ptr() % 16 == 0 else x.clone()


def _listed(x: Tensor, block: int, tma: bool) -> Any:
    """A contiguous tensor, or a descriptor over it as one list with tiles of `block` numbers."""
    return TensorDescriptor(x, [x.numel()], [1], [block]) if tma else x


def _bias_strides(x: Tensor | None) -> tuple[int, int, int, int]:
    return (0, 0, 0, 0) if x is None else (x.stride(0), x.stride(1), x.stride(2), x.stride(3))
