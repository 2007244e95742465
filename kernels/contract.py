"""What every kernel set computes: the types it is given and the formula it obeys.

Owns the interface between the ring and the kernels. Knows nothing of ranks, groups or transports, and computes nothing.

Shape legend: `b` batch, `s` query rows, `t` key rows, `h` query heads, `hk` key/value heads (`hk` divides `h`),
`d` head_dim of q and k, `dv` head_dim of v, `n` tokens of the whole key sequence, `r` runs.

Note [One visit]
    A kernel call is one *visit*: the query rows of one rank against one buffer of keys. Row `x` of q sits at the global
    position `rows.positions[x]` and sees the keys whose global position p satisfies `rows.lo[b, x] <= p < rows.hi[b, x]`.
    The same relation read from the other side: key row `y` is seen by the queries at global positions
    `keys.lo[b, y] <= i < keys.hi[b, y]`. Both readings are given, so that forward and dq walk keys while dk and dv walk queries.

Note [Score]
    s   = softmax_scale * (q . k)
    s   = softcap * tanh(s / softcap)                        when softcap > 0
    s  -= alibi_slopes[h] * |i - j|                          i, j: global positions
    s  += key_bias[b, y]                                     y: row of the key buffer
    s  += bias[b, h, x, j]                                   x: row of q, j: global key position
    p   = exp(s - lse) on visible pairs, 0 elsewhere
    o   = sum_j keep(b, h, i, j) / (1 - dropout_p) * p * v   keep: Note [Dropout]
    A sink is one more logit `sinks[h]` in the denominator only: the partial (sink, 1, 0) that a first visit starts from.

Note [Dropout]
    keep(b, h, i, j) is a pure function of the seed and of global indices, so the mask is the same at any world size, in
    any kernel and in the backward. With philox = Philox-2x32-10 (Salmon et al., "Parallel random numbers: as easy as
    1, 2, 3", SC 2011; multiplier 0xD256D193, Weyl constant 0x9E3779B9) and H query heads:
    key = philox(counter=(b * H + h, seed >> 32), key=seed & 0xFFFFFFFF)[0]
    keep iff philox(counter=(i, j), key=key)[0] >= floor(dropout_p * 2^32)

Note [Carry]
    Between visits the state of a query row is the partial (m, l, acc) of the online softmax, fp32 (fp64 for fp64 inputs):
    m = max s * log2(e), l = sum 2^(s*log2(e) - m), acc = sum 2^(s*log2(e) - m) v. The identity is (-inf, 0, 0).
    A kernel may let m lag behind the maximum by up to 8: partials merge for any reference point, and 2^8 leaves room.
    The last visit normalises: o = acc / l and lse = ln(2) * m + ln(l); a row that saw nothing has o = 0, lse = -inf.

Note [Gathered visit]
    A gathered visit is all visits of a rank in one launch. Its keys lie in two places: `near`, the rank's own k and v, and
    `far`, one buffer with the rows of all other owners. A *source* is an owner's rows; source 0 is near, source s the owner
    at ring step s. The rows of a source stand together in far, in the order of its side, and begin at a multiple of GUARD;
    behind them lie at least GUARD rows of zeros that belong to nobody, so that a block of up to GUARD rows that begins in
    a source meets finite numbers only. Where the sides say so, a source has no rows at all.
    A bias of keys stands in one table of near's rows and far's, as their positions do.
    far fills while the kernel runs. Key heads come in `groups` equal groups: flags[g, s] becomes 1 once the rows of source s
    for the heads of group g are there; they come in the order of (g, s), and near needs no flag. A flag that becomes
    negative says that its rows will never come, and no later flag becomes 1. A kernel that meets one, or waits longer than
    `patience`, sets the error word, goes on, and makes every output that it writes from then on NaN: it never hangs and never
    returns a number that could be taken for a result.
    In the backward each source's gradients leave the kernel in fp32 and are added up by their owner: homes[s] is the
    address of a contiguous `b home_rows hk (d + dv)` region, in this or another device's memory, where the kernel writes
    dk (first d columns) and dv (the others) of row x of the source, x counted from the source's first row. Where a gradient
    of key_bias is wanted, bias_homes[s] is the address of a contiguous `b hk home_rows` region for what each key head adds to
    it. Every row of every source is written, zeros included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Side:
    """The rows of one side (queries, or keys) of a visit: where they sit and what they see on the other side.

    Compared and hashed by identity, so that a kernel set may keep what it derives from a side as long as the side lives.

    Attributes:
        runs: `r 4` int32 on the device: (offset, length, start, stride). Rows offset .. offset + length - 1 of the buffer
            sit at global positions start + stride * i. Runs cover every row of the buffer once, in row order; positions
            ascend over the whole buffer.
        positions: `s` int32 on the device: the global position of each row.
        lo: `b s` or `1 s` int32: first visible global position of the other side; not decreasing along rows.
        hi: `b s` or `1 s` int32: one past the last; lo <= hi; not decreasing along rows. lo == hi: sees nothing.
        run_list: The content of `runs` as Python integers, for kernels that plan on the host.
        lo_host: The content of `lo` on the CPU, likewise.
        hi_host: The content of `hi` on the CPU, likewise.
    """

    runs: Tensor
    positions: Tensor
    lo: Tensor
    hi: Tensor
    run_list: tuple[tuple[int, int, int, int], ...]
    lo_host: Tensor
    hi_host: Tensor


@dataclass(frozen=True)
class Score:
    """How a score is made from q . k (Note [Score]); None and 0.0 mean absent.

    Attributes:
        softmax_scale: Factor on q . k.
        softcap: Bound of the soft cap, in score units; 0.0 for none.
        dropout_p: Probability of dropping one attention weight.
        dropout_seed: 64-bit seed of the counter-based mask.
        sinks: `h` fp32.
        alibi_slopes: `h` fp32.
        key_bias: `b t` fp32, rows of this visit's key buffer; of a gathered visit `b near_rows+far_rows`.
        bias: `b h s n` (expanded: strides may be 0), fp32 or q's dtype, columns by global key position.
    """

    softmax_scale: float
    softcap: float = 0.0
    dropout_p: float = 0.0
    dropout_seed: int = 0
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    key_bias: Tensor | None = None
    bias: Tensor | None = None


@dataclass(frozen=True)
class Carry:
    """The running partial of every query row (Note [Carry]).

    Attributes:
        m: `b h s`, log2 units.
        l: `b h s`.
        acc: `b s h dv`.
    """

    m: Tensor
    l: Tensor  # noqa: E741
    acc: Tensor


@dataclass(frozen=True)
class Grads:
    """Where a backward visit puts what it finds, all in the accumulation dtype (fp32, or fp64 for fp64 inputs).

    `accumulate_rows` / `accumulate_keys` say whether the visit adds to what is there or overwrites it (every element is
    then written, zeros included, so the buffer may be uninitialised). None: not wanted. Buffers for dq, dk and dv that are
    only overwritten may have the dtype of the inputs instead.

    Attributes:
        dq: `b s h d`; rows.
        dk: `b t hk d`; keys.
        dv: `b t hk dv`; keys.
        dkey_bias: `b t`; keys.
        dalibi: `b h s`, one partial sum per query row (the caller sums b and s); rows.
        dbias: `b h s n`, dense. Each visit writes only its own visible pairs; the caller zeroes it once.
        accumulate_rows: Add to dq and dalibi instead of overwriting.
        accumulate_keys: Add to dk, dv and dkey_bias instead of overwriting.
        deterministic: Sum in a fixed order: the same bits from run to run. A kernel set that always does may ignore it.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dkey_bias: Tensor | None = None
    dalibi: Tensor | None = None
    dbias: Tensor | None = None
    accumulate_rows: bool = field(default=False)
    accumulate_keys: bool = field(default=False)
    deterministic: bool = field(default=False)


GUARD = 128
"""Rows of zeros behind every source of a gathered visit, and what its first row is a multiple of."""


@dataclass(frozen=True, eq=False)
class Gathered:
    """The key sides of a gathered visit (Note [Gathered visit]); compared and hashed by identity, like `Side`.

    Attributes:
        sides: One per source, near first. Offsets of near's runs count rows of near; those of the others count rows of far.
            Positions ascend within a side, not from side to side.
        steps: The ring step of each side, ascending, the first one 0: the second index of its flag. Steps at which nothing
            is visible are left out.
        near_rows: Rows of near.
        far_rows: Rows of far, guards included; 0 when near is alone.
        positions: `near_rows + far_rows` int32 on the device: as `Side.positions`, row x of near at x and row x of far at
            near_rows + x, so that one pointer serves all sources; guards hold zeros. Those of the sides are views of it.
        lo: `b|1 near_rows+far_rows` int32, likewise.
        hi: `b|1 near_rows+far_rows` int32, likewise.
    """

    sides: tuple[Side, ...]
    steps: tuple[int, ...]
    near_rows: int
    far_rows: int
    positions: Tensor
    lo: Tensor
    hi: Tensor


@dataclass(frozen=True)
class Arrivals:
    """How a kernel knows that rows of far are there (Note [Gathered visit]).

    Attributes:
        flags: `groups steps` int32, on the device, contiguous; nobody waits for column 0.
        error: `1` int32, on the device, because kernels read it at the end of each tile; 0 until one has waited in vain.
        patience: Nanoseconds a kernel waits for one flag.
    """

    flags: Tensor
    error: Tensor
    patience: int

    @property
    def groups(self) -> int:
        """Groups of key heads."""
        return self.flags.shape[0]


class KernelSet(Protocol):
    """One way to compute visits. A kernel set is a module with these functions; it holds no state."""

    def forward(
        self,
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
    ) -> None:
        """Visits one buffer of keys.

        Args:
            q: `b s h d`; any strides with a contiguous last dim.
            k: `b t hk d`, likewise.
            v: `b t hk dv`, likewise.
            rows: The query side.
            keys: The key side.
            score: How scores are made.
            carry: Running partial, updated in place; None only when first and last.
            first: Start from the identity (or from the sinks) instead of reading the carry, which may be uninitialised.
            last: Normalise into `o` and `lse` and leave the carry alone; otherwise write the carry.
            o: `b s h dv`, q's dtype: written when last.
            lse: `b h s`, natural log, accumulation dtype: written when last.
        """
        ...

    def delta(self, o: Tensor, do: Tensor, dlse: Tensor | None, out: Tensor | None = None) -> Tensor:
        """rowsum(o * do) - dlse, in out if given: `b h s` in the accumulation dtype; o, do `b s h dv`, dlse `b h s`."""
        ...

    def backward(
        self,
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
        o: Tensor | None = None,
        dlse: Tensor | None = None,
    ) -> None:
        """Gradients of one visit. With ds = p * (dp - delta): dq = scale * ds k, dk = scale * ds^T q, dv = p^T do.

        Args:
            do: `b s h dv`, contiguous last dim.
            q: As in forward.
            k: As in forward.
            v: As in forward.
            lse: `b h s`, natural log: of the finished rows, over all visits.
            delta: `b h s`, from `delta`; where o is given it is made here, and written.
            rows: The query side.
            keys: The key side.
            score: How scores are made.
            grads: Where results go.
            o: `b s h dv`, contiguous last dim; None: delta is given.
            dlse: `b h s`, contiguous last dim, the gradient of lse, with o; None: zero.
        """
        ...


class GatheringKernelSet(KernelSet, Protocol):
    """A kernel set that can also compute all visits of a rank in one launch (Note [Gathered visit])."""

    def can_capture(self) -> bool:
        """Whether a CUDA graph of what the functions of this set enqueue may be launched in place of calling them again."""
        ...

    def gathers(self, head_dim: int, v_head_dim: int, score: Score) -> bool:
        """Whether `forward_gathered` and `backward_gathered` serve such a call; what they refuse goes visit by visit."""
        ...

    def forward_gathered(
        self,
        q: Tensor,
        near: tuple[Tensor, Tensor],
        far: tuple[Tensor, Tensor],
        rows: Side,
        keys: Gathered,
        score: Score,
        arrivals: Arrivals | None,
        *,
        o: Tensor,
        lse: Tensor,
        spare: int = 0,
    ) -> None:
        """The finished attention of q over all sources.

        Args:
            q: `b s h d`; any strides with a contiguous last dim.
            near: k `b t hk d` and v `b t hk dv` of this rank, likewise.
            far: k `b far_rows hk d` and v `b far_rows hk dv`: views of one `b far_rows hk (d + dv)` buffer.
            rows: The query side.
            keys: The key sides.
            score: How scores are made; bias is absent.
            arrivals: None when all of far is there.
            o: `b s h dv`, q's dtype or fp32; written.
            lse: `b h s`, natural log, fp32; written.
            spare: Multiprocessors to leave to what runs beside it, where programs would stay on all of them.
        """
        ...

    def backward_gathered(
        self,
        do: Tensor,
        q: Tensor,
        near: tuple[Tensor, Tensor],
        far: tuple[Tensor, Tensor],
        lse: Tensor,
        delta: Tensor,
        rows: Side,
        keys: Gathered,
        score: Score,
        arrivals: Arrivals | None,
        homes: Tensor,
        home_rows: int,
        *,
        dq: Tensor,
        dalibi: Tensor | None,
        bias_homes: Tensor | None,
        deterministic: bool,
        spare: int = 0,
        o: Tensor | None = None,
        dlse: Tensor | None = None,
    ) -> None:
        """Dq of this rank's queries, and every source's dk, dv and dkey_bias sent home.

        Args:
            do: `b s h dv`, contiguous last dim.
            q: As in `forward_gathered`, like the next five.
            near: Likewise.
            far: Likewise.
            lse: `b h s`, natural log.
            delta: `b h s`, from `delta`; where o is given it is made here, and written.
            rows: The query side; `keys.sides` hold what every key row is seen by.
            keys: The key sides.
            score: Likewise.
            arrivals: Likewise.
            homes: int64, on the device: the address of the region of each of `keys.sides`, in their order.
            home_rows: Rows of a region, the same for all.
            dq: `b s h d`, q's dtype or fp32; overwritten.
            dalibi: `b h s` fp32, one partial sum per query row; overwritten. None: not wanted.
            bias_homes: Like homes, of the regions of dkey_bias. None: not wanted.
            deterministic: Sum in a fixed order.
            spare: As in `forward_gathered`.
            o: As in `backward`.
            dlse: Likewise.
        """
        ...

    def add_homes(self, dk: Tensor, dv: Tensor, own: Tensor, parts: Sequence[Tensor], rows: Tensor) -> None:
        """Dk and dv of this rank's keys: its own contribution and, in order, those that came home.

        Args:
            dk: `b t hk d`, contiguous, any floating dtype; written.
            dv: `b t hk dv`, likewise.
            own: `b home_rows hk (d + dv)` fp32: row x belongs to key row x.
            parts: Like own, one per rank that visited, in ring order.
            rows: int32 `parts t` on the device: the row of a part that belongs to a key row, or -1.
        """
        ...

    def add_bias_homes(self, dkey_bias: Tensor, own: Tensor, parts: Sequence[Tensor], rows: Tensor) -> None:
        """Dkey_bias of this rank's keys, likewise, and over all key heads.

        Args:
            dkey_bias: `b t` fp32, contiguous; written.
            own: `b hk home_rows` fp32: row x belongs to key row x.
            parts: Like own, one per rank that visited, in ring order.
            rows: As in `add_homes`.
        """
        ...


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of partials, lse and gradient accumulators: fp64 for fp64 inputs, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
