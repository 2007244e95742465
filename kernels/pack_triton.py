"""Packing keys and values into one buffer in one Triton launch; `kernels.pack` says what and has the torch version.

Owns the kernel and its launcher. Runs on CUDA and ROCm devices, and on CPU tensors in the Triton interpreter.
"""

# pyright: reportArgumentType=false
# (powers of two may be constants of kernels, says Triton)

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels import launch_triton
from ringattn.kernels.pack import Cleared

BYTES = 16384
"""What one program copies of each tensor: enough in flight to keep memory busy, few enough rows to fill the device."""
ZEROS = 4096
"""Numbers of far that one program clears."""


@triton.jit(do_not_specialize=["rows", "programs", "words", "pieces"])
def _pack_kernel(
    slot_ptr, k_ptr, v_ptr, flags, error, far, guards, rows, programs, words, pieces,
    slot_sb, slot_st, slot_sh, k_sb, k_st, k_sh, v_sb, v_st, v_sh, far_sb, far_st,
    HK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, COLS_V: tl.constexpr,
    WORDS: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """One program owns ROWS of the t * hk rows of one batch element, of k and of v.

    Example: HK = 2, D = DV = 4: row 5 is token 2, head 1; its k goes to columns 0 .. 3 of the slot, its v to 4 .. 7.

    The first one clears flags and error. Programs from `programs` on have no rows; each clears a piece of ZEROS numbers of a
    stretch of far, which has `pieces` of them.
    """
    b = tl.program_id(1).to(tl.int64)
    if flags is not None:
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            w = tl.arange(0, WORDS)
            tl.store(flags + w, tl.zeros([WORDS], tl.int32), mask=w < words)
            tl.store(error, 0)
        if tl.program_id(0) >= programs:
            i = tl.program_id(0) - programs
            guard = i // pieces
            first = tl.load(guards + 2 * guard).to(tl.int64)
            end = tl.load(guards + 2 * guard + 1).to(tl.int64)
            z = (i % pieces).to(tl.int64) * ZEROS + tl.arange(0, ZEROS)
            nothing = tl.zeros([ZEROS], far.dtype.element_ty)
            tl.store(far + b * far_sb + first * far_st + z, nothing, mask=z < (end - first) * far_st)
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
    """Takes the arguments of `kernels.pack.pack`; what is cleared wants rows to pack."""
    b, t, hk, d = k.shape
    dv = v.shape[-1]
    rows = t * hk
    if not b * rows:
        assert cleared is None, "what is cleared wants rows to pack"
        return
    cols, cols_v = triton.next_power_of_2(d), triton.next_power_of_2(dv)
    block = max(1, min(triton.next_power_of_2(rows), BYTES // (max(cols, cols_v) * k.element_size())))
    programs, words, more, pieces = -(-rows // block), 0, 0, 1
    flags = error = far = guards = None
    if cleared is not None:
        # one kernel, whether rows of far are cleared or not: else one of both would be compiled in the middle of a training
        flags, error, far, guards = cleared.flags, cleared.error, cleared.far, cleared.guards
        words, pieces = flags.numel(), -(-cleared.longest * far.stride(1) // ZEROS)
        more = guards.shape[0] * pieces * cleared.stretches
    launch_triton.launch(
        _pack_kernel,
        (programs + more, b),
        (
            slot, k, v, flags, error, far, guards, rows, programs, words, pieces,
            *slot.stride()[:3], *k.stride()[:3], *v.stride()[:3], *((0, 0) if far is None else far.stride()[:2]),
        ),
        {
            "HK": hk, "D": d, "DV": dv, "ROWS": block, "COLS": cols, "COLS_V": cols_v,
            "WORDS": triton.next_power_of_2(max(words, 1)), "ZEROS": ZEROS,
        },
        num_warps=4,
    )  # fmt: skip
