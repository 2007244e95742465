"""Exchange between ranks in one launch per rank: store the own share at every rank, wait, make the result of all shares.

The kernels merge and normalise packed parts; or they sum addends, or lay columns side by side.

Shape legend: `p` ranks, `g` programs, which are as many in every launch, on every rank.

Note [Mailboxes]
    Every rank has a *control* of int64 words: flags `g p`, epochs `g`, and one word `failed`; and a *mailbox* of two halves of
    p slots, each of which holds the share of one rank: a packed part (Note [Packed parts] of kernels.partials.packed), or plain
    numbers, from the beginning of the slot. `table`, on the device, has the addresses of all mailboxes, of all controls, and of
    `errors`, one int32 per rank in host memory. Program i owns some rows. In its n-th launch it merges the splits of these rows,
    stores the result into slot [n % 2][me] of every rank, its own included, and sets flag [i][me] of every rank to n; it waits
    until its own flags [i] are all n at least, then merges the slots of its rows in the order of the ranks. Programs without
    rows do the same, so all count alike, and a captured graph may be replayed at any time. Both kernels count in the same words,
    so they may follow each other in any order.

    A store of launch n + 2 never meets a reader of launch n. When rank A stores in launch n + 2, its launch n + 1 has ended, so
    each of its programs has seen flag n + 1 of each rank B, which a program of B's launch n + 1 set; so B's launch n had ended.

    Every program stores and sets its flags before it waits, and waits for the programs of its own number alone. Programs start
    in the order of their numbers, so the lowest one that has not ended can end. A program that waits longer than `timeout_us`,
    or reads a negative flag, gives up: it writes to `errors` which rank it waited for (1: timeout; 2: that rank has failed), sets
    `failed` and its flags at all ranks to -1, and writes NaN. A program that finds `failed` set stores no share, does not wait,
    and writes NaN. So a slow rank reads whole shares, or fails too.

    All threads of a program store shares, some announce them: the threads meet at a barrier, then a store that releases at the
    scope of the system makes the shares visible to the threads that acquire the flag, on any device. Those meet the others at a
    barrier before any of them reads a share, from L2, where stores of peers arrive.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.partials.merge_triton import normalise, together
from ringattn.kernels.partials.packed_triton import first_of, merge_tile, store_finished
from ringattn.kernels.runtime import bound_launch

PROGRAMS = 128
"""Programs of every launch: a row each for 4 tokens of 32 heads, and about as many as a device has SMs."""
WARPS = 4
TILE = 1024
"""Numbers of acc that a program holds at most."""
MAX_RANKS = 32 * WARPS
"""Threads of a program: each sets and awaits the flag of one rank."""
WORD = 8
"""Bytes of a word of the control."""
WIDE = 16
"""Bytes of the widest load and store of a thread: a unit of `share`, where it divides what is side by side."""
UNITS = 512
"""Units that a program of `share` holds of a rank at most: 64 bytes per thread."""
AT_ONCE = 8
"""Ranks whose shares a program of `share` loads before it uses the first: all of a host, in half of its registers."""


def control_size(ranks: int) -> int:
    """Words of a control.

    Example:
        >>> control_size(2)
        385
    """
    return PROGRAMS * (ranks + 1) + 1


@triton.constexpr_function
def _meeting(ranks):
    return f"""{{
        .reg .pred p, mine, bad;
        .reg .b32 t, n, code;
        .reg .b64 v, own, there, at, began, now;
        mov.u32 t, %tid.x;
        setp.lt.u32 mine, t, {ranks};
        mul.wide.u32 at, t, 8;
        add.s64 there, $1, at;
        @mine ld.global.b64 there, [there];
        add.s64 there, there, $3;
        setp.ne.s64 bad, $5, 0;
        barrier.red.or.pred bad, 0, bad;
        selp.b64 v, -1, $4, bad;
        @mine st.release.sys.global.b64 [there], v;
        add.s64 own, $2, at;
        mov.u64 began, %globaltimer;
        mov.b32 n, 0;
        @!mine bra SEEN;
        @bad bra SEEN;
        POLL:
        ld.acquire.sys.global.b64 v, [own];
        setp.lt.s64 p, v, 0;
        @p bra REFUSED;
        setp.ge.s64 p, v, $4;
        @p bra SEEN;
        add.u32 n, n, 1;
        and.b32 code, n, 63;
        setp.ne.u32 p, code, 0;
        @p bra POLL;
        ld.relaxed.sys.global.b64 v, [$6];
        setp.ne.s64 bad, v, 0;
        @bad bra SEEN;
        mov.u64 now, %globaltimer;
        sub.s64 now, now, began;
        setp.le.s64 p, now, $8;
        @p bra POLL;
        mov.b32 code, 1;
        bra TELL;
        REFUSED:
        mov.b32 code, 2;
        TELL:
        mul.wide.u32 at, t, 4;
        add.s64 at, $7, at;
        st.relaxed.sys.global.b32 [at], code;
        mov.b64 v, -1;
        st.relaxed.sys.global.b64 [$6], v;
        setp.eq.u32 bad, t, t;
        SEEN:
        barrier.red.or.pred bad, 0, bad;
        and.pred p, mine, bad;
        mov.b64 v, -1;
        @p st.relaxed.sys.global.b64 [there], v;
        selp.b32 $0, 0, 1, bad;
    }}"""


@triton.jit
def meet(controls, flags, offset, epoch, word, failed, errors, timeout_us, RANKS: tl.constexpr):
    """Sets this program's flag at every rank, and waits for those of all ranks; Note [Mailboxes].

    Args are where the addresses of the controls stand, this program's own flags, the offset in bytes of its flag in a control,
    the number of this launch, what was found in `failed`, where that is, the address of `errors`, and nanoseconds. Returns 1,
    or 0 for a rank that did not come; the same to all threads.
    """
    asm: tl.constexpr = _meeting(RANKS)
    return tl.inline_asm_elementwise(
        asm,
        "=r,l,l,l,l,l,l,l,l",
        [controls, flags, offset, epoch, word, failed, errors, timeout_us],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def begin(table, me, RANKS: tl.constexpr, PROGRAMS: tl.constexpr):
    """Values of this program of rank `me` in its control (Note [Mailboxes]).

    Returns where its flags, its epoch and `failed` stand, what `failed` is, the number of this launch, and the address of
    `errors`.
    """
    g = tl.program_id(0)
    control = tl.load(table + RANKS + me).to(tl.pointer_type(tl.int64))
    errors = tl.load(table + 2 * RANKS)
    epochs = control + PROGRAMS * RANKS + g
    failed = control + PROGRAMS * (RANKS + 1)
    return control + g * RANKS, epochs, failed, tl.load(failed), tl.load(epochs) + 1, errors


@triton.jit(do_not_specialize=["splits", "me", "rows", "heads", "queries", "timeout_us"])
def _one_shot_kernel(
    stack, sinks, o, lse, table, splits, split_stride, me, rows, heads, queries, dv, slot, timeout_us,
    RANKS: tl.constexpr, PROGRAMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Program i owns rows i * ROWS .. i * ROWS + ROWS - 1, and so on in steps of PROGRAMS * ROWS.

    Example: 2 ranks hold (m, l, acc) = (3, 1, 4) and (3, 1, 8) of the only row; program 0 of each finds both in its mailbox:
    o = 12 / 2 = 6. The other 127 programs exchange flags.
    """
    g = tl.program_id(0)
    me = me.to(tl.int64)
    flags, epochs, failed, word, epoch, errors = begin(table, me, RANKS, PROGRAMS)
    half = (epoch % 2) * RANKS * slot
    c = tl.arange(0, COLUMNS)
    columns = (c < dv)[None, :]
    nothing = tl.full([ROWS], float("-inf"), tl.float32)
    for x in range(g * ROWS, rows, PROGRAMS * ROWS):
        r = x + tl.arange(0, ROWS).to(tl.int64)
        row_ok = r < rows
        ok = row_ok[:, None] & columns
        top, total, acc = merge_tile(stack, splits, split_stride, rows, dv, nothing, r, c, row_ok, ok, "", TOGETHER)
        row_ok &= word == 0
        ok &= word == 0
        for rank in tl.static_range(RANKS):
            box = tl.multiple_of(tl.load(table + rank).to(tl.pointer_type(tl.float32)), 16) + half + me * slot
            m_at = box + rows.to(tl.int64) * dv + r
            tl.store(box + (r * dv)[:, None] + c[None, :], acc, mask=ok)
            tl.store(m_at, top, mask=row_ok)
            tl.store(m_at + rows, total, mask=row_ok)
    there = meet(
        table + RANKS, flags, (g * RANKS + me) * 8, epoch, word, failed, errors, timeout_us.to(tl.int64) * 1000, RANKS
    )  # fmt: skip
    box = tl.multiple_of(tl.load(table + me).to(tl.pointer_type(tl.float32)), 16) + half
    for x in range(g * ROWS, rows, PROGRAMS * ROWS):
        r = x + tl.arange(0, ROWS).to(tl.int64)
        row_ok = r < rows
        ok = row_ok[:, None] & columns
        first = first_of(sinks, r, heads, row_ok)
        top, total, acc = merge_tile(
            box, RANKS, slot, rows, dv, first, r, c, row_ok, ok, ".cg", RANKS if RANKS < 8 else 8
        )
        values, logs = normalise(top, total, acc, True)
        values = tl.where(there == 1, values, float("nan"))
        logs = tl.where(there == 1, logs, float("nan"))
        store_finished(o, lse, values, logs, heads, queries, dv, r, c, row_ok, ok)
    tl.store(epochs, epoch)


def one_shot(
    stack: Tensor,
    sinks: Tensor | None,
    o: Tensor,
    lse: Tensor,
    table: Tensor,
    *,
    rank: int,
    ranks: int,
    slot: int,
    timeout_us: int,
) -> None:
    """One exchange of parts; every rank launches it alike, in the order of one stream.

    Args:
        stack: `splits, b * s * h * (dv + 2)` fp32: this rank's parts.
        sinks: `h` fp32, or None.
        o: `b s h dv`, contiguous; written.
        lse: `b h s` fp32, contiguous; written.
        table: int64 `2 * ranks + 1` (Note [Mailboxes]).
        slot: Numbers of a slot, at least b * s * h * (dv + 2); a multiple of 16. Mailboxes begin at multiples of 16 bytes.
        timeout_us: Microseconds for which a program waits.
    """
    assert ranks <= MAX_RANKS, "a thread per rank sets and waits for flags"
    b, heads, queries = lse.shape
    rows, dv = b * heads * queries, o.shape[-1]
    columns = triton.next_power_of_2(max(dv, 1))
    per_program = max(1, min(TILE // columns, triton.next_power_of_2(-(-rows // PROGRAMS))))
    constants = {
        "RANKS": ranks, "PROGRAMS": PROGRAMS, "ROWS": per_program, "COLUMNS": columns,
        "TOGETHER": together(stack.shape[0], per_program * columns, WARPS),
    }  # fmt: skip
    height, height_stride = stack.shape[0], stack.stride(0)
    args = (stack, sinks, o, lse, table, height, height_stride, rank, rows, heads, queries, dv, slot, timeout_us)
    bound_launch.launch(_one_shot_kernel, (PROGRAMS,), args, constants, num_warps=WARPS, num_stages=1)


@triton.jit(do_not_specialize=["me", "units", "first_end", "second_end", "line", "timeout_us"])
def _share_kernel(
    x, out, table, me, units, first_end, second_end, line, slot, timeout_us,
    RANKS: tl.constexpr, PROGRAMS: tl.constexpr, UNIT: tl.constexpr, UNITS: tl.constexpr, ADDS: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """Program i owns units i * UNITS .. i * UNITS + UNITS - 1 of UNIT numbers, and so on in steps of PROGRAMS * UNITS.

    Unit u of rank r is the r-th addend of unit u of out; or, `line` being the units of a row of x, it is laid down as unit
    u // line * (RANKS * line) + r * line + u % line of out. Rows have up to three parts, which end at units first_end, second_end
    and line, and each is laid down so by itself, behind those before it.

    Example: 2 ranks hold [[1, 2], [3, 4]] and [[5, 6], [7, 8]]; with units of 1 number, the third of rank 1 is 7, it goes to
    1 * 4 + 1 * 2 + 0 = 6, and out is [[1, 2, 5, 6], [3, 4, 7, 8]]. The sum is [[6, 8], [10, 12]].
    """
    g = tl.program_id(0)
    me = me.to(tl.int64)
    slot = slot.to(tl.int64)
    flags, epochs, failed, word, epoch, errors = begin(table, me, RANKS, PROGRAMS)
    half = (epoch % 2) * RANKS * slot
    boxes = ()
    for rank in tl.static_range(RANKS):
        box = (tl.load(table + rank) + 4 * (half + me * slot)).to(x.dtype)
        boxes = boxes + (tl.multiple_of(box, 16),)  # noqa: RUF005 (Triton unpacks nothing)
    numbers = tl.arange(0, UNIT)[None, :]
    for first in range(g * UNITS, units, PROGRAMS * UNITS):
        u = first + tl.arange(0, UNITS)[:, None]
        at = u * UNIT + numbers
        values = tl.load(x + at, mask=u < units)
        for rank in tl.static_range(RANKS):
            tl.store(boxes[rank] + at, values, mask=(u < units) & (word == 0))
    there = meet(
        table + RANKS, flags, (g * RANKS + me) * 8, epoch, word, failed, errors, timeout_us.to(tl.int64) * 1000, RANKS
    )  # fmt: skip
    mailbox = tl.load(table + me) + 4 * half
    # columns are bits; all of them set are NaN in every dtype
    Bits: tl.constexpr = tl.pointer_type(tl.int32 if x.dtype.element_ty.primitive_bitwidth == 32 else tl.int16)
    for first in range(g * UNITS, units, PROGRAMS * UNITS):
        u = first + tl.arange(0, UNITS)[:, None]
        at = u * UNIT + numbers
        ok = u < units
        if ADDS:
            to = at
        else:
            row, c = u // line, u % line
            start = tl.where(c < first_end, 0, tl.where(c < second_end, first_end, second_end))
            width = tl.where(c < first_end, first_end, tl.where(c < second_end, second_end, line)) - start
            to = ((units // line * start + row * width) * RANKS + c - start) * UNIT + numbers
        for base in tl.static_range(0, RANKS, TOGETHER):
            asked = ()
            for i in tl.static_range(TOGETHER):
                if base + i < RANKS:
                    begun = (mailbox + 4 * (base + i) * slot).to(x.dtype if ADDS else Bits)
                    brought = tl.load(tl.multiple_of(begun, 16) + at, mask=ok, cache_modifier=".cg")
                    asked = asked + (brought,)  # noqa: RUF005 (Triton unpacks nothing)
            for i in tl.static_range(TOGETHER):
                if base + i < RANKS:
                    if not ADDS:
                        column = (base + i) * width * UNIT
                        tl.store(out.to(Bits) + column + to, tl.where(there == 1, asked[i], -1), mask=ok)
                    elif base + i == 0:
                        total = asked[i].to(tl.float32)
                    else:
                        total += asked[i].to(tl.float32)
        if ADDS:
            total = tl.where(there == 1, total, float("nan"))
            tl.store(out + to, total.to(out.dtype.element_ty), mask=ok)
    tl.store(epochs, epoch)


def share(
    x: Tensor,
    out: Tensor,
    table: Tensor,
    *,
    adds: bool,
    widths: tuple[int, ...],
    rank: int,
    ranks: int,
    slot: int,
    timeout_us: int,
) -> None:
    """One exchange of numbers as they are; every rank launches it alike, in the order of one stream.

    Args:
        x: This rank's numbers, contiguous; `rows width` where columns are laid side by side.
        out: The shape of x, any floating dtype; or `rows, ranks * width`, the dtype of x. Contiguous, at most 2**30 numbers, no
            memory of x; written.
        adds: Sum all ranks' numbers in fp32, in the order of the ranks, and round once; else lay columns side by side.
        widths: Columns of up to three parts of x, each of which is laid down by itself; empty: x is one part.
    """
    assert ranks <= MAX_RANKS, "a thread per rank sets and waits for flags"
    width = x.numel() if adds else x.shape[-1]
    unit = math.gcd(width, *widths, WIDE // x.element_size())
    units = x.numel() // unit
    per_program = max(32 * WARPS, min(UNITS, triton.next_power_of_2(-(-units // PROGRAMS))))
    constants = {
        "RANKS": ranks, "PROGRAMS": PROGRAMS, "UNIT": unit, "UNITS": per_program, "ADDS": adds, "TOGETHER": min(ranks, AT_ONCE),
    }  # fmt: skip
    ends = [sum(widths[: i + 1]) // unit if widths else width // unit for i in range(2)]
    args = (x, out, table, rank, units, *ends, width // unit, slot, timeout_us)
    bound_launch.launch(_share_kernel, (PROGRAMS,), args, constants, num_warps=WARPS, num_stages=1)
