"""Interface of the attention kernel sets: the types that they are given and the formula that they compute.

Shape legend: `b` batch, `s` query rows, `t` key rows, `h` query heads, `hk` key/value heads (`hk` divides `h`),
`d` head_dim of q and k, `dv` head_dim of v, `n` tokens of the whole key sequence, `r` runs.

A kernel call is one ring step: the query rows of one rank against one buffer of keys. Row `x` of q sits at the global
position `rows.positions[x]` and sees the keys whose global position p satisfies `rows.lo[b, x] <= p < rows.hi[b, x]`.
The same relation is given for keys: key row `y` is seen by the queries at global positions
`keys.lo[b, y] <= i < keys.hi[b, y]`. So forward and dq loop over keys, while dk and dv loop over queries.

Note [Terms]
    A mask may be a union of several *terms*: intervals of which no two share a pair, each monotone like the one interval
    above. `RowMetadata.terms` counts them. Bounds then have `terms * batches` lines: line `term * batches + b` holds the
    bounds of one term, with batches 1 where all batch elements agree. A pair is visible when one term shows it.
    A term may be cut by a table of blocks (`BlockPatterns`): it then shows a pair inside its interval only if the entry of
    the pair's blocks is true.

Note [Score]
    s   = softmax_scale * (q . k)
    s   = softcap * tanh(s / softcap)                        when softcap > 0
    s  -= alibi_slopes[h] * |i - j|                          i, j: global positions
    s  += key_bias[b, y]                                     y: row of the key buffer
    s  += bias[b, h, x, j]                                   x: row of q, j: global key position
    p   = exp(s - lse) on visible pairs, 0 elsewhere
    o   = sum_j keep(b, h, i, j) / (1 - dropout_p) * p * v   keep: Note [Dropout]
    A sink is one more logit `sinks[h]` in the denominator only: the partial (sink, 1, 0) that a first ring step starts from.

Note [Dropout]
    keep(b, h, i, j) is a pure function of the seed and of global indices, so the mask is the same at any world size, in
    any kernel and in the backward. With philox = Philox-2x32-10 (Salmon et al., "Parallel random numbers: as easy as
    1, 2, 3", SC 2011; multiplier 0xD256D193, Weyl constant 0x9E3779B9) and H query heads:
    key = philox(counter=(b * H + h, seed >> 32), key=seed & 0xFFFFFFFF)[0]
    keep iff philox(counter=(i, j), key=key)[0] >= floor(dropout_p * 2^32)

Note [Softmax state]
    Between ring steps the state of a query row is the partial (m, l, acc) of the online softmax, fp32 (fp64 for fp64 inputs):
    m = max s * log2(e), l = sum 2^(s*log2(e) - m), acc = sum 2^(s*log2(e) - m) v. The identity is (-inf, 0, 0).
    A kernel may let m lag behind the maximum by up to 8: partials merge for any reference point, and fp32 has room for 2^8.
    The last step normalises: o = acc / l and lse = ln(2) * m + ln(l); a row that saw nothing has o = 0, lse = -inf.

Note [Fused call]
    A fused call computes all ring steps of a rank in one launch. Its keys lie in two places: `local_kv` is the rank's own k
    and v, and `remote_kv` is one buffer with the rows of all other owners. A *source* is the rows of one owner: source 0 is
    local, source s is the owner at ring step s. In the remote buffer the rows of a source are contiguous, in the order of its
    metadata, and begin at a multiple of PAD_ROWS. At least PAD_ROWS rows of zeros follow them, so a block of up to PAD_ROWS
    rows that begins in a source reads finite numbers only. A source may have no rows.
    A bias of keys is one table: the local rows, then the remote rows, like their positions.
    The remote buffer is filled while the kernel runs. Key heads come in `groups` equal groups: flags[g, s] becomes 1 once the
    rows of source s for the heads of group g have arrived. They arrive in the order of (g, s); local rows need no flag. A
    negative flag says that its rows will never arrive, and no later flag becomes 1. A kernel that reads a negative flag, or
    waits longer than `timeout_ns`, sets the error word, continues, and writes NaN to every output from then on. So it never
    hangs, and never returns a number that could be taken for a result.
    In the backward the gradients of each source leave the kernel in fp32, and their owner adds them up. grad_buffers[s] is the
    address of a contiguous `b grad_buffer_rows hk (d + dv)` region, in this or another device's memory. The kernel writes dk
    (first d columns) and dv (the others) of row x of the source there, x counted from the source's first row. If a gradient of
    key_bias is wanted, bias_grad_buffers[s] is the address of a contiguous `b hk grad_buffer_rows` region for the sums of
    each key head. Every row of every source is written, zeros included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class BlockPatterns:
    """Tables that cut terms by blocks of positions (Note [Terms]); compared and hashed by identity.

    Attributes:
        tables: `p x y` int32 on the device, 1 where visible: entry [., i, j] is of the own positions from i * block_size on
            and of the other side's positions from j * block_size on.
        tables_host: The content of `tables` on the CPU.
        of_term: For each term the index of its table, or -1: it is not cut.
        of_term_table: The same, int32 on the device.
        block_size: Positions of a block, on both sides.
    """

    tables: Tensor
    tables_host: Tensor
    of_term: tuple[int, ...]
    of_term_table: Tensor
    block_size: int


@dataclass(frozen=True, eq=False)
class RowMetadata:
    """The rows of one side (queries, or keys) of a step: their positions, and their bounds on the other side.

    Compared and hashed by identity. What a kernel set derives from two sides is kept in `derived` of one of them.

    Attributes:
        runs: `r 4` int32 on the device: (offset, length, start, stride). Rows offset .. offset + length - 1 of the buffer
            sit at global positions start + stride * i. Runs cover every row of the buffer once, in row order; positions
            ascend over the whole buffer.
        positions: `s` int32 on the device: the global position of each row.
        lo: `b s` or `1 s` int32: first visible global position of the other side; not decreasing along rows. With several
            terms `terms*b s` or `terms*1 s` (Note [Terms]).
        hi: Like lo: one past the last; lo <= hi; not decreasing along rows. lo == hi: sees nothing.
        run_list: The content of `runs` as Python integers, for kernels that plan on the host.
        lo_host: The content of `lo` on the CPU, for the same use.
        hi_host: The content of `hi` on the CPU, for the same use.
        terms: Terms of the mask, at least 1.
        patterns: Tables that cut terms by blocks; None: no term is cut.
        derived: By the other side and a key of the kernel set: work plans, lists of launches. Both sides may be dropped.
    """

    runs: Tensor
    positions: Tensor
    lo: Tensor
    hi: Tensor
    run_list: tuple[tuple[int, int, int, int], ...]
    lo_host: Tensor
    hi_host: Tensor
    terms: int = 1
    patterns: BlockPatterns | None = None
    derived: WeakKeyDictionary[Any, dict[Any, Any]] = field(default_factory=WeakKeyDictionary, repr=False)


@dataclass(frozen=True)
class Score:
    """Options of the score (Note [Score]); None and 0.0 mean absent.

    Attributes:
        softmax_scale: Factor on q . k.
        softcap: Bound of the soft cap, in score units; 0.0 for none.
        dropout_p: Probability of dropping one attention weight.
        dropout_seed: 64-bit seed of the counter-based mask.
        sinks: `h` fp32.
        alibi_slopes: `h` fp32.
        key_bias: `b t` fp32, rows of this step's key buffer; of a fused call `b local_rows+remote_rows`.
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
class SoftmaxState:
    """The running partial of every query row (Note [Softmax state]).

    Attributes:
        m: `b h s`, log2 units.
        l: `b h s`.
        acc: `b s h dv`.
        held: A list where a kernel set may keep partials between the steps of a call that ends with a last step, instead of
            merging each at once; m, l and acc then are without them. None: every step writes the carry.
    """

    m: Tensor
    l: Tensor  # noqa: E741
    acc: Tensor
    held: list[Any] | None = None


@dataclass(frozen=True)
class Grads:
    """Gradients that a backward writes, in the accumulation dtype (fp32, or fp64 for fp64 inputs); None: not wanted.

    `accumulate_rows` / `accumulate_keys` say whether a step adds to what is there or overwrites it (every element is
    then written, zeros included, so the buffer may be uninitialised). Buffers for dq, dk and dv that are only overwritten may
    have the dtype of the inputs instead. A fused call overwrites all, and sends the gradients of keys to their owners
    (`Returns`): it has neither dk, dv nor dkey_bias here.

    Attributes:
        dq: `b s h d`; rows.
        dk: `b t hk d`; keys.
        dv: `b t hk dv`; keys.
        dkey_bias: `b t`; keys.
        dalibi: `b h s`, one partial sum per query row (the caller sums b and s); rows.
        dbias: `b h s n`, dense. Each step writes only its own visible pairs; the caller zeroes it once.
        accumulate_rows: Add to dq and dalibi instead of overwriting.
        accumulate_keys: Add to dk, dv and dkey_bias instead of overwriting.
        held: A list, one for all steps of a call, where a kernel set may keep what steps add to dq until one is `last`; None: every
            step writes dq.
        last: No further step of the call adds to dq.
    """

    dq: Tensor
    dk: Tensor | None = None
    dv: Tensor | None = None
    dkey_bias: Tensor | None = None
    dalibi: Tensor | None = None
    dbias: Tensor | None = None
    accumulate_rows: bool = False
    accumulate_keys: bool = False
    held: list[Any] | None = None
    last: bool = True


PAD_ROWS = 128
"""Rows of zeros behind every source of a fused call, and what its first row is a multiple of."""


@dataclass(frozen=True, eq=False)
class GatheredKeys:
    """The key sides of a fused call (Note [Fused call]); compared and hashed by identity, like `RowMetadata`.

    Attributes:
        sides: One per source, local rows first. Offsets of its runs count rows of the local buffer; those of the others count
            rows of the remote buffer. Positions ascend within a side, not from side to side.
        steps: The ring step of each side, ascending, the first one 0: the second index of its flag. Steps at which nothing
            is visible are left out.
        local_rows: Rows of the local buffer.
        remote_rows: Rows of the remote buffer, pad rows included; 0 when there are no others.
        positions: `local_rows + remote_rows` int32 on the device: as `RowMetadata.positions`, row x of the local buffer at x
            and row x of the remote buffer at local_rows + x, so that one pointer serves all sources; pad rows hold zeros. Those
            of the sides are views of it.
        lo: `terms*b|terms*1 local_rows+remote_rows` int32, in the same order; terms and patterns are those of each side.
        hi: Like lo.
        derived: See `RowMetadata`.
    """

    sides: tuple[RowMetadata, ...]
    steps: tuple[int, ...]
    local_rows: int
    remote_rows: int
    positions: Tensor
    lo: Tensor
    hi: Tensor
    derived: WeakKeyDictionary[Any, dict[Any, Any]] = field(default_factory=WeakKeyDictionary, repr=False)


@dataclass(frozen=True)
class ReadyFlags:
    """Flags of the rows of the remote buffer that have arrived (Note [Fused call]).

    Attributes:
        flags: `groups steps` int32, on the device, contiguous; column 0 is not waited for.
        error: `1` int32, on the device, because kernels read it at the end of each tile; 0 until one has timed out.
        timeout_ns: Nanoseconds a kernel waits for one flag.
    """

    flags: Tensor
    error: Tensor
    timeout_ns: int

    @property
    def groups(self) -> int:
        """Groups of key heads."""
        return self.flags.shape[0]


class Step(NamedTuple):
    """The forward of one ring step, or of a fused call.

    Attributes:
        q: `b s h d`; any strides with a contiguous last dim.
        k: `b t hk d`, strides as of q; of a fused call, this rank's own keys.
        v: `b t hk dv`, as k.
        rows: The query side.
        keys: The key side; of a fused call, all key sides.
        score: Options of the score; without bias in a fused call.
        o: `b s h dv`, q's dtype (of a fused call, or fp32): written when last.
        lse: `b h s`, natural log, accumulation dtype: written when last.
        carry: Running partial, updated in place; None only when first and last.
        first: Start from the identity (or from the sinks) instead of reading the carry, which may be uninitialised.
        last: Normalise into `o` and `lse` and leave the carry alone; otherwise write the carry.
        sm_margin: Multiprocessors to leave to what runs beside it, where programs would stay on all of them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    rows: RowMetadata
    keys: RowMetadata | GatheredKeys
    score: Score
    o: Tensor
    lse: Tensor
    carry: SoftmaxState | None = None
    first: bool = True
    last: bool = True
    sm_margin: int = 0


class BackwardStep(NamedTuple):
    """The backward of one ring step, or of a fused call: its inputs.

    Attributes:
        do: `b s h dv`, contiguous last dim.
        q: See `Step`; also k, v, rows, keys, score and sm_margin.
        lse: `b h s`, natural log, contiguous last dim: of the finished rows, over all ring steps.
        delta: `b h s`, contiguous last dim, from `KernelSet.delta`; where o is given it is made here, and written, unless
            delta_made.
        o: `b s h dv`, contiguous last dim, of the finished rows; None: delta is given.
        dlse: `b h s`, contiguous last dim, the gradient of lse, with o; None: zero.
        delta_made: delta was made from this o and dlse, which are for kernels that take them in its place.
    """

    do: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    delta: Tensor
    rows: RowMetadata
    keys: RowMetadata | GatheredKeys
    score: Score
    o: Tensor | None = None
    dlse: Tensor | None = None
    delta_made: bool = False
    sm_margin: int = 0


class Arrivals(NamedTuple):
    """The remote rows of a fused call (Note [Fused call]).

    Attributes:
        k: `b remote_rows hk d`, a view of one `b remote_rows hk (d + dv)` buffer.
        v: `b remote_rows hk dv`, likewise a view of it.
        ready_flags: None when all remote rows have arrived.
    """

    k: Tensor
    v: Tensor
    ready_flags: ReadyFlags | None


class Returns(NamedTuple):
    """Regions to which a fused backward sends dk, dv and dkey_bias of every source (Note [Fused call]).

    Attributes:
        grad_buffers: int64, on the device: the address of the region of each of `keys.sides`, in their order; multiples of 16.
        rows: Rows of a region, the same for all.
        bias_grad_buffers: Like grad_buffers, of the regions of dkey_bias. None: not wanted.
    """

    grad_buffers: Tensor
    rows: int
    bias_grad_buffers: Tensor | None = None


class CallShape(NamedTuple):
    """All that a kernel set is bound to: what is the same at each call of a kind.

    Attributes:
        heads: Query heads.
        score: Options of the score; which of its tensors are present counts, not their content.
        deterministic: Gradients are summed in a fixed order: the same bits from run to run.
        faster: Of a set of several backends those to try first, forward and backward, equal on all ranks; None: its own order.
    """

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    score: Score
    deterministic: bool = False
    faster: tuple[str, str] | None = None

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, score: Score, *, deterministic: bool = False) -> CallShape:
        """Return the shape of a call with q `b s h d`, k `b t hk d` and v `b t hk dv`."""
        return cls(q.device, q.dtype, q.shape[2], k.shape[2], q.shape[3], v.shape[3], score, deterministic)


@dataclass(eq=False)
class KernelSet:
    """One implementation of attention, bound to a `CallShape`: what follows from that is found when it is made.

    The registry refuses a shape that a set does not serve, before it is bound. The fused functions are for sets whose `can_fuse`
    is True.

    Attributes:
        choose_faster: Returns `CallShape.faster` for a device, a dtype, head_dim and v_head_dim, by what is known or can be
            measured here and now (None: not now); None in a set without a choice.
    """

    choose_faster: ClassVar[Callable[[torch.device, torch.dtype, int, int], tuple[str, str] | None] | None] = None

    call: CallShape

    def can_capture(self) -> bool:
        """Return whether a CUDA graph of the launches of this set may replace further calls."""
        return False

    def can_fuse(self) -> bool:
        """Return whether the fused functions serve this call; other calls go step by step."""
        return False

    def forward(self, step: Step) -> None:
        """Attend to one buffer of keys."""
        raise NotImplementedError("a kernel set has this function")

    def delta(self, o: Tensor, do: Tensor, dlse: Tensor | None, out: Tensor | None = None) -> Tensor:
        """rowsum(o * do) - dlse, in out if given: `b h s` in the accumulation dtype; o, do `b s h dv`, dlse `b h s`."""
        raise NotImplementedError("a kernel set has this function")

    def backward(self, step: BackwardStep, grads: Grads) -> None:
        """Gradients of one ring step. With ds = p * (dp - delta): dq = scale * ds k, dk = scale * ds^T q, dv = p^T do."""
        raise NotImplementedError("a kernel set has this function")

    def forward_fused(self, step: Step, arrivals: Arrivals) -> None:
        """Compute the finished attention of q over all sources, in one launch."""
        raise NotImplementedError("a kernel set has this function")

    def backward_fused(self, step: BackwardStep, arrivals: Arrivals, returns: Returns, grads: Grads) -> None:
        """Compute dq and dalibi of this rank's queries, and send dk, dv and dkey_bias of every source to their owners."""
        raise NotImplementedError("a kernel set has this function")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of partials, lse and gradient accumulators: fp64 for fp64 inputs, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


ACCUMULATION_DTYPES = {x: accumulation_dtype(x) for x in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}
"""`accumulation_dtype` of the dtypes that are served."""
