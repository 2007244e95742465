"""The merge of the parts of split tiles of the forward, in plain Triton.

Parts are merged in the order of their slots; the carry or the sinks join once, first.
"""

# pyright: reportGeneralTypeIssues=false, reportOptionalOperand=false, reportOptionalMemberAccess=false
import triton
import triton.language as tl

from ringattn.kernels import constants

LOG2E = tl.constexpr(constants.LOG2E)
LN2 = tl.constexpr(constants.LN2)


@triton.jit
def _merge(m_i, l_i, acc, m, l, part):  # noqa: E741
    """The merge of two partials; merging two empty ones is empty."""
    top = tl.maximum(m_i, m)
    shift = tl.where(top == float("-inf"), 0.0, top)
    mine = tl.exp2(m_i - shift)
    other = tl.exp2(m - shift)
    return top, l_i * mine + l * other, acc * mine[:, None] + part * other[:, None]


@triton.jit(
    do_not_specialize=["acc_sb", "acc_ss", "acc_sh", "lse_sb", "lse_sh", "m_sb", "m_sh", "l_sb", "l_sh", "heads", "rows"]
)  # fmt: skip
def combine_kernel(
    splits, part_m, part_l, part_acc, o, lse, carry_m, carry_l, carry_acc, sinks, error,
    o_sb, o_ss, o_sh, acc_sb, acc_ss, acc_sh, lse_sb, lse_sh, m_sb, m_sh, l_sb, l_sh, heads, rows,
    TILE: tl.constexpr, CHUNK: tl.constexpr, DV: tl.constexpr, COLUMNS: tl.constexpr, DV_WIDTH: tl.constexpr,
    PACK: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Program (i, j) owns rows j * CHUNK .. of split tile i; `splits` is that of the work plan.

    Rows of part_acc have DV columns; COLUMNS is the power of two that holds them.

    What was waited for in vain (`error`; None: nothing was) makes all of it not a number.
    """
    entry = splits + tl.program_id(0) * 4
    head = tl.load(entry)
    row = tl.load(entry + 1)
    slot = tl.load(entry + 2)
    parts = tl.load(entry + 3)
    b = (head // heads).to(tl.int64)
    r = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    x = (row + r // PACK).to(tl.int64)
    h = ((head % heads) * PACK + r % PACK).to(tl.int64)
    c = tl.arange(0, COLUMNS)[None, :]
    exists = x < rows
    inside = exists[:, None] & (c < DV_WIDTH)
    acc_ptrs = carry_acc + (b * acc_sb + x * acc_ss + h * acc_sh)[:, None] + c
    m_ptrs = carry_m + b * m_sb + h * m_sh + x
    l_ptrs = carry_l + b * l_sb + h * l_sh + x
    if FIRST:
        acc = tl.zeros([CHUNK, COLUMNS], tl.float32)
        m_i = tl.full([CHUNK], float("-inf"), tl.float32)
        l_i = tl.zeros([CHUNK], tl.float32)
        if sinks is not None:
            m_i = tl.load(sinks + h) * LOG2E
            l_i += 1.0
    else:
        m_i = tl.load(m_ptrs, mask=exists, other=float("-inf"))
        l_i = tl.load(l_ptrs, mask=exists, other=0.0)
        acc = tl.load(acc_ptrs, mask=inside, other=0.0)
    at = slot.to(tl.int64) * TILE + r
    for _ in range(0, parts):
        part = tl.load(part_acc + (at * DV)[:, None] + c, mask=None if COLUMNS == DV else c < DV)
        m_i, l_i, acc = _merge(m_i, l_i, acc, tl.load(part_m + at), tl.load(part_l + at), part)
        at += TILE
    if LAST:
        divisor = tl.where(l_i > 0.0, l_i, 1.0)
        found = tl.where(l_i > 0.0, (m_i + tl.log2(divisor)) * LN2, float("-inf"))
        if error is not None:
            in_vain = tl.load(error) != 0
            divisor = tl.where(in_vain, float("nan"), divisor)
            found = tl.where(in_vain, float("nan"), found)
        tl.store(lse + b * lse_sb + h * lse_sh + x, found, mask=exists)
        o_ptrs = o + (b * o_sb + x * o_ss + h * o_sh)[:, None] + c
        tl.store(o_ptrs, (acc / divisor[:, None]).to(o.dtype.element_ty), mask=inside)
    else:
        tl.store(m_ptrs, m_i, mask=exists)
        tl.store(l_ptrs, l_i, mask=exists)
        tl.store(acc_ptrs, acc, mask=inside)
