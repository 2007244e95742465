"""Tile loops of all portable kernels: the tiles of a program, those that need a mask, and loads of rows.

Note [Tile ranges]
    Along a run, global positions ascend, so the part that a tile of stationary rows sees is described by four numbers in
    local row indices: [any_lo, any_hi) is seen by some row, [full_lo, full_hi) by all of them. They come from four
    reductions over the bounds of the rows (once per program) and a clamped division per run, because that division is
    monotone. Tiles start at any_lo; a tile inside the full region needs no mask, the few others at either end do:

        any_lo        full_lo              full_hi       any_hi
          |  head tiles  |    full tiles      |  tail tiles |

    A mask of several terms (Note [Terms] of interface.py) is met run by run, and term by term within a run; `cuts` holds how
    many there are and the tables that cut them. In a term with a table all tiles are masked, and those without a visible pair are
    left out.

    Full tiles are one loop. Head and tail tiles are one loop, which jumps over the full ones, so that the masked code
    exists once; it comes first, so that its registers are free during the other.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
from collections import namedtuple

import triton
import triton.language as tl

Rows = namedtuple("Rows", "row0 rows exists positions")
"""The stationary rows of a program, of `rows` in all."""
Run = namedtuple("Run", "begin first end tiles full_first full_end origin stride lo hi table")
"""What they see of a run: its first row, the range of rows, tiles, those in full, the law of positions, bounds, and table or -1."""
Cuts = namedtuple("Cuts", "terms lo_st hi_st tables of_term table_size table_width block_size")
"""Arguments of kernels about several terms; None where absent."""
RUNTIME = (
    "lse_sb", "lse_sh", "m_sb", "m_sh", "l_sb", "l_sh", "delta_sb", "delta_sh", "dalibi_sb", "dalibi_sh", "lo_sb", "hi_sb",
    "key_bias_sb", "queries", "heads", "rows", "num_runs", "tiles", "sweep", "seed_low", "seed_high", "drop_threshold", "term_count",
    "lo_st", "hi_st", "table_size", "table_width", "block_size",
)  # fmt: skip
"""Integers that no kernel is specialised on."""

FAR = tl.constexpr(2**31 - 1)  # beyond every position


@triton.jit
def swizzle(tiles, heads, sweep):
    """(tile, head) of this program: all tiles of `sweep` heads come before the next heads, heads change fastest.

    A sweep is as many heads as keep what they stream in the L2 cache.
    """
    pid = tl.program_id(0)
    section = pid // (sweep * tiles)
    first = section * sweep
    width = tl.minimum(sweep, heads - first)
    rest = pid - first * tiles
    return rest // width, first + rest % width


@triton.jit
def load_bounds(lo, hi, row, end, ROWS: tl.constexpr):
    """(lo, hi) of rows row .. row + ROWS - 1; rows from `end` on see nothing.

    Tiles that need a mask load them again: held through the full tiles they would cost registers.
    """
    x = row + tl.arange(0, ROWS)
    return tl.load(lo + x, mask=x < end, other=0), tl.load(hi + x, mask=x < end, other=0)


@triton.jit
def reduce_bounds(lo, hi, exists):
    """(any_lo, any_hi, full_lo, full_hi) of a tile of rows, in global positions.

    Rows that see nothing do not widen `any`, and empty `full`; rows that do not exist touch neither.
    """
    sees = exists & (lo < hi)
    any_lo = tl.min(tl.where(sees, lo, FAR), 0)
    any_hi = tl.max(tl.where(sees, hi, 0), 0)
    full_lo = tl.max(tl.where(exists, lo, 0), 0)
    full_hi = tl.min(tl.where(exists, hi, FAR), 0)
    return any_lo, any_hi, full_lo, full_hi


@triton.jit
def visible_pairs(run, own, other, inside, cuts, ROWS: tl.constexpr):
    """Mask of a tile; `other`: positions of what streams past, `inside`: which of it exists."""
    lo, hi = load_bounds(run.lo, run.hi, own.row0, own.rows, ROWS)
    visible = (other[None, :] >= lo[:, None]) & (other[None, :] < hi[:, None]) & inside[None, :]
    return cut_pairs(visible, run, own, other, cuts)


@triton.jit
def cut_pairs(visible, run, own, other, cuts):
    """The visible pairs that the table of a term shows."""
    if cuts.tables is not None:
        line = run.table * cuts.table_size + (own.positions[:, None] // cuts.block_size) * cuts.table_width
        at = cuts.tables + (line + other[None, :] // cuts.block_size)
        visible &= tl.load(at, mask=visible & (run.table >= 0), other=1) != 0
    return visible


@triton.jit
def shows(run, own, other, inside, cuts, ROWS: tl.constexpr):
    """Return whether a tile has a visible pair."""
    found = True
    if cuts.tables is not None:
        visible = visible_pairs(run, own, other, inside, cuts, ROWS)
        found = tl.max(tl.max(visible.to(tl.int32), 1), 0) > 0
    return found


@triton.jit
def first_row_from(position, length, start, stride):
    """The first row of the run at or after a global position; `length` if there is none."""
    distance = tl.minimum(tl.maximum(position - start, 0), length * stride)
    return (distance + stride - 1) // stride


@triton.jit
def run_of(i, runs, lo_ptr, hi_ptr, own, seen, cuts, ROWS: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr = 1):
    """Part i of the work of a tile: with one term, run i under the bounds that are given; Note [Tile ranges].

    Rows are rows of the buffer; row x sits at global position origin + stride * x. Tiles start at a multiple of ALIGN, so the
    first tile may begin with rows that are hidden, or even before the run.
    """
    any_lo, any_hi, full_lo, full_hi = seen
    r = i
    table = -1
    if cuts.terms is not None:
        r = i // cuts.terms
        term = i % cuts.terms
        lo_ptr += term.to(tl.int64) * cuts.lo_st
        hi_ptr += term.to(tl.int64) * cuts.hi_st
        lo, hi = load_bounds(lo_ptr, hi_ptr, own.row0, own.rows, ROWS)
        any_lo, any_hi, full_lo, full_hi = reduce_bounds(lo, hi, own.exists)
        if cuts.tables is not None:
            table = tl.load(cuts.of_term + term)
            full_lo = tl.where(table < 0, full_lo, FAR)
            full_hi = tl.where(table < 0, full_hi, 0)
    offset = tl.load(runs + 4 * r)
    length = tl.load(runs + 4 * r + 1)
    start = tl.load(runs + 4 * r + 2)
    stride = tl.load(runs + 4 * r + 3)
    first = first_row_from(any_lo, length, start, stride)
    end = first_row_from(any_hi, length, start, stride)
    full_first = first_row_from(full_lo, length, start, stride)
    full_end = first_row_from(full_hi, length, start, stride)
    seen_here = end > first
    first -= (first + offset) % ALIGN
    count = tl.where(seen_here, (end - first + BLOCK - 1) // BLOCK, 0)
    head = tl.minimum(tl.maximum(full_first - first + BLOCK - 1, 0) // BLOCK, count)
    tail = tl.maximum(tl.minimum(tl.maximum(full_end - first, 0) // BLOCK, count), head)
    origin = start - stride * offset
    return Run(offset, first + offset, end + offset, count, head, tail, origin, stride, lo_ptr, hi_ptr, table)


@triton.jit
def masked_row(run, j, BLOCK: tl.constexpr):
    """First row of the masked tile number j, of which there are run.full_first + run.tiles - run.full_end."""
    return run.first + tl.where(j < run.full_first, j, j - run.full_first + run.full_end) * BLOCK


@triton.jit
def head_of(x, b, h, sb, sh, TMA: tl.constexpr):
    """Where a head begins; under TMA the descriptor, which serves all heads."""
    base = x
    if not TMA:
        base = x + b * sb + h * sh
    return base


@triton.jit
def bias_rows(bias, b, h, row, sb, sh, ss, ROWS: tl.constexpr):
    """Where rows row .. row + ROWS - 1 of a head begin in a bias or its gradient, `ROWS 1`; None where it is absent."""
    base = None
    if bias is not None:
        base = (bias + b * sb + h * sh + row.to(tl.int64) * ss) + (tl.arange(0, ROWS).to(tl.int64) * ss)[:, None]
    return base


@triton.jit
def load_rows(
    src, b, h, row, end, stride, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr, GUARD: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Rows row .. row + ROWS - 1 as ROWS x COLS; columns from WIDTH on, and under GUARD rows from `end` on, are zero.

    `src` points at row 0 of one head, or is a descriptor over `b h s d` under TMA (which ends at the end of the buffer).
    """
    if TMA:
        tile = tl.reshape(src.load([b, h, row, 0]), [ROWS, COLS])
    else:
        x = tl.arange(0, ROWS)[:, None]
        c = tl.arange(0, COLS)[None, :]
        ptrs = src + tl.cast(row, tl.int64) * stride + (x * stride + c)
        if GUARD and WIDTH == COLS:
            tile = tl.load(ptrs, mask=x < end - row, other=0.0)
        elif GUARD:
            tile = tl.load(ptrs, mask=(x < end - row) & (c < WIDTH), other=0.0)
        elif WIDTH == COLS:
            tile = tl.load(ptrs)
        else:
            tile = tl.load(ptrs, mask=c < WIDTH, other=0.0)
    return tile


@triton.jit
def store_rows(
    dst, tile, row, end, stride, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr
):
    """Writes (or under ADD adds) the rows before `end` and the columns before WIDTH of a tile."""
    x = tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, COLS)[None, :]
    ptrs = dst + tl.cast(row, tl.int64) * stride + (x * stride + c)
    mask = (x < end - row) & (c < WIDTH)
    if ADD:
        tile += tl.load(ptrs, mask=mask, other=0.0)
    tl.store(ptrs, tile.to(dst.dtype.element_ty), mask=mask)
