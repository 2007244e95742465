"""Packing keys and values into one buffer in one Triton launch; `kernels.kv.pack` has the torch version.

Owns the kernel and its launcher. Runs on CUDA and ROCm devices, and on CPU tensors in the Triton interpreter.
"""

# pyright: reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.kv.pack import Cleared
from ringattn.kernels.runtime import bound_launch

BYTES = 16384
"""What one program copies of each tensor: enough in flight to keep memory busy, few enough rows to fill the device."""
ZEROS = 4096
"""Numbers of the remote buffer that one program clears."""


@triton.jit(do_not_specialize=["rows", "programs", "num_flags", "pieces"])
def _pack_kernel(
    slot_ptr, k_ptr, v_ptr, flags, error, remote, pad_rows, rows, programs, num_flags, pieces,
    slot_sb, slot_st, slot_sh, k_sb, k_st, k_sh, v_sb, v_st, v_sh, remote_sb, remote_st,
    HK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, COLS_V: tl.constexpr,
    FLAGS: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """One program owns ROWS of the t * hk rows of one batch element, of k and of v.

    Example: HK = 2, D = DV = 4: row 5 is token 2, head 1; its k goes to columns 0 .. 3 of the slot, its v to 4 .. 7.

    The first one clears flags and error. Programs from `programs` on have no rows; each clears a piece of ZEROS numbers of a
    stretch of the remote buffer, which has `pieces` of them.
    """
    b = tl.program_id(1).to(tl.int64)
    if flags is not None:
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            w = tl.arange(0, FLAGS)
            tl.store(flags + w, tl.zeros([FLAGS], tl.int32), mask=w < num_flags)
            tl.store(error, 0)
        if tl.program_id(0) >= programs:
            i = tl.program_id(0) - programs
            pad = i // pieces
            first = tl.load(pad_rows + 2 * pad).to(tl.int64)
            end = tl.load(pad_rows + 2 * pad + 1).to(tl.int64)
            z = (i % pieces).to(tl.int64) * ZEROS + tl.arange(0, ZEROS)
            nothing = tl.zeros([ZEROS], remote.dtype.element_ty)
            tl.store(remote + b * remote_sb + first * remote_st + z, nothing, mask=z < (end - first) * remote_st)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = r < rows
    t = (r // HK).to(tl.int64)
    h = (r % HK).to(tl.int64)
    to = slot_ptr + b * slot_sb + t * slot_st + h * slot_sh
    c = tl.arange(0, COLS)
    mask = ok[:, None] & (c < D)[None, :]
    x = tl.load((k_ptr + b * k_sb + t * k_st + h * k_sh)[:, None] + c[None, :], mask=mask)
    c_v = tl.arange(0, COLS_V)
    mask_v = ok[:, None] & (c_v < DV)[None, :]
    y = tl.load((v_ptr + b * v_sb + t * v_st + h * v_sh)[:, None] + c_v[None, :], mask=mask_v)
    tl.store(to[:, None] + c[None, :], x, mask=mask)
    tl.store(to[:, None] + (D + c_v)[None, :], y, mask=mask_v)


def pack(slot: Tensor, k: Tensor, v: Tensor, cleared: Cleared | None = None) -> None:
    """Take the arguments of `kernels.kv.pack.pack`; `cleared` needs rows to pack."""
    b, t, hk, d = k.shape
    dv = v.shape[-1]
    rows = t * hk
    if not b * rows:
        assert cleared is None, "cleared needs rows to pack"
        return
    cols, cols_v = triton.next_power_of_2(d), triton.next_power_of_2(dv)
    block = max(1, min(triton.next_power_of_2(rows), BYTES // (max(cols, cols_v) * k.element_size())))
    programs, num_flags, more, pieces = -(-rows // block), 0, 0, 1
    flags = error = remote = pad_rows = None
    if cleared is not None:
        # one kernel, whether rows of the remote buffer are cleared or not: else one of both would be compiled in the middle of
        # a training
        flags, error, remote, pad_rows = cleared.flags, cleared.error, cleared.remote, cleared.pad_rows
        num_flags, pieces = flags.numel(), -(-cleared.longest * remote.stride(1) // ZEROS)
        more = pad_rows.shape[0] * pieces * cleared.stretches
    bound_launch.launch(
        _pack_kernel,
        (programs + more, b),
        (
            slot, k, v, flags, error, remote, pad_rows, rows, programs, num_flags, pieces,
            *slot.stride()[:3], *k.stride()[:3], *v.stride()[:3], *((0, 0) if remote is None else remote.stride()[:2]),
        ),
        {
            "HK": hk, "D": d, "DV": dv, "ROWS": block, "COLS": cols, "COLS_V": cols_v,
            "FLAGS": triton.next_power_of_2(max(num_flags, 1)), "ZEROS": ZEROS,
        },
        num_warps=4,
    )  # fmt: skip
