"""One exchange: every rank brings its share, and all leave with the same answer.

Owns the protocol (partials that are finished, addends that are summed, columns that are laid side by side), what a call must
keep to, and the exchanges that need no memory of their own: of one rank alone, over the process group, and of ranks that are
simulated. Refuses to know keys, pages and requests, and whose weights made a sum.

Note [One exchange]
    A rank merges the partials of its own splits into one packed part (Note [Packed parts] of the kernels) and sends it to all
    ranks; each then merges the parts of ranks 0, 1, ..., P - 1, in this order, and normalises. So all ranks hold the same bits,
    and go on alike with what follows from them. How many splits a rank has is its own affair.
    A sum goes likewise: every rank adds the addends of ranks 0, 1, ..., P - 1 in this order, in fp32, and rounds once. Columns
    are moved as they are.
    All ranks make the same exchanges in the same order. The first of each kind (sizes, dtypes, sinks or none) is compared and
    must come outside of a capture; later ones cost the host no word to anybody.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ringattn.kernels.partials.packed import size
from ringattn.transport.base import Choice
from ringattn.transport.consensus import RankConsensus

SHARED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of what is summed or laid side by side."""
LARGEST = 2**30
"""Numbers of a sum, or of all ranks' columns together, at most: kernels count them in 32 bits."""


class PartialReducer(Protocol):
    """Makes one answer of what all ranks bring (Note [One exchange]).

    Attributes:
        choice: Which one it is, and why.
    """

    choice: Choice

    @property
    def capturable(self) -> bool:
        """Whether calls, but for the first of a kind, may be captured in a CUDA graph."""
        ...

    def merge_partials(
        self,
        splits: Tensor,
        b: int,
        s: int,
        h: int,
        dv: int,
        sinks: Tensor | None,
        o: Tensor,
        lse: Tensor,
    ) -> None:
        """Merges the partials of all ranks and normalises; returns at once, in stream order on CUDA.

        Args:
            splits: `p, b * s * h * (dv + 2)` fp32, p >= 1: this rank's packed parts, merged in their order. May be overwritten
                by work that is enqueued later.
            b: Batch elements.
            s: Query tokens of each.
            h: Query heads.
            dv: Head dim of the values.
            sinks: `h` fp32, natural log, the same on all ranks; None for none.
            o: `b s h dv`, contiguous, the dtype of the queries; written, the same bits on every rank.
            lse: `b h s` fp32, contiguous, natural log; written likewise.

        Raises:
            ValueError: A shape, dtype or device does not fit, here or on another rank, or ranks make different exchanges; at the
                first call of a kind it is raised on every rank, before the first byte moves.
            RuntimeError: A rank did not come in time, now or in an earlier exchange (results since then are NaN); the message
                names it. Or a first call of a kind was captured.
        """
        ...

    def all_reduce(self, x: Tensor, out: Tensor) -> None:
        """Adds what all ranks bring, in the order of the ranks, in fp32, and rounds once; returns as `merge_partials` does.

        Args:
            x: Any shape, contiguous, fp32, bf16 or fp16: this rank's addends. Shape and dtype are the same on all ranks.
            out: The shape of x, contiguous, fp32, bf16 or fp16; written, the same bits on every rank. Shares no memory with x.

        Raises:
            ValueError: As in `merge_partials`.
            RuntimeError: As in `merge_partials`.
        """
        ...

    def all_gather_columns(self, x: Tensor, out: Tensor) -> None:
        """Lays all ranks' columns side by side: columns r * width .. (r + 1) * width - 1 of out are x of rank r, bit for bit.

        Args:
            x: `rows width`, contiguous, fp32, bf16 or fp16: this rank's columns. Shape and dtype are the same on all ranks.
            out: `rows, world_size * width`, contiguous, the dtype of x; written. Shares no memory with x.

        Raises:
            ValueError: As in `merge_partials`.
            RuntimeError: As in `merge_partials`.
        """
        ...

    def check(self) -> None:
        """Raises if an exchange has failed: for results of graphs, whose replays pass no host call, once they are over.

        Raises:
            RuntimeError: As in `merge_partials`.
        """
        ...

    def close(self) -> None:
        """Lets go of memory; every rank calls it, when its exchanges are over."""
        ...


class MergeCall(NamedTuple):
    """A call of `PartialReducer.merge_partials`."""

    splits: Tensor
    b: int
    s: int
    h: int
    dv: int
    sinks: Tensor | None
    o: Tensor
    lse: Tensor

    @property
    def what(self) -> str:
        """What is exchanged, for messages."""
        return f"b {self.b}, s {self.s}, h {self.h}, dv {self.dv}"

    @property
    def kind(self) -> str:
        """What must be the same on all ranks."""
        return f"{self.what}, {self.o.dtype}, {'no sinks' if self.sinks is None else 'sinks'}, {self.o.device.type}"

    @property
    def out(self) -> Tensor:
        """What is written."""
        return self.o

    @property
    def rows(self) -> int:
        """Rows of a part."""
        return self.b * self.s * self.h

    @property
    def send_numel(self) -> int:
        """What a rank sends, in fp32 numbers."""
        return size(self.rows, self.dv)

    def check(self) -> None:
        """Refuses what does not fit, as `PartialReducer.merge_partials` says."""
        splits, b, s, h, dv, sinks, o, lse = self
        width = self.send_numel
        if splits.dim() != 2 or splits.shape[0] < 1 or splits.shape[1] != width or splits.dtype != torch.float32:
            raise ValueError(
                f"splits must be fp32 of shape (at least 1, {width}), which is b * s * h * (dv + 2), got {splits.dtype} of shape "
                f"{tuple(splits.shape)}; stack packed parts of b {b}, s {s}, h {h}, dv {dv}"
            )
        if splits.stride(1) != 1 and width > 1:
            raise ValueError(
                f"splits must have a contiguous last dim, got strides {splits.stride()}; call .contiguous()"
            )
        wanted = {"o": (o, (b, s, h, dv)), "lse": (lse, (b, h, s))} | (
            {} if sinks is None else {"sinks": (sinks, (h,))}
        )
        for name, (x, shape) in wanted.items():
            if tuple(x.shape) != shape:
                raise ValueError(f"{name} must have shape {shape}, got {tuple(x.shape)}; make it of b, s, h and dv")
            if not x.is_contiguous():
                raise ValueError(f"{name} must be contiguous, got strides {x.stride()}; pass a contiguous tensor")
            if x.device != splits.device:
                raise ValueError(
                    f"{name} must be on the device of splits, {splits.device}, got {x.device}; move it there"
                )
            if name != "o" and x.dtype != torch.float32:
                raise ValueError(f"{name} must be torch.float32, got {x.dtype}; cast it")
        if not o.dtype.is_floating_point:
            raise ValueError(f"o must have a floating dtype, got {o.dtype}; give it that of the queries")


class SumCall(NamedTuple):
    """A call of `PartialReducer.all_reduce`.

    Attributes:
        overlap: x and out share memory.
    """

    x: Tensor
    out: Tensor
    overlap: bool

    @property
    def what(self) -> str:
        """What is exchanged, for messages."""
        return f"addends {tuple(self.x.shape)}"

    @property
    def kind(self) -> str:
        """What must be the same on all ranks."""
        return f"{self.what}, {self.x.dtype} to {self.out.dtype}, {self.out.device.type}"

    @property
    def send_numel(self) -> int:
        """What a rank sends, in fp32 numbers."""
        return _send_numel(self.x)

    def check(self) -> None:
        """Refuses what does not fit, as `PartialReducer.all_reduce` says."""
        if self.out.shape != self.x.shape:
            raise ValueError(
                f"out must have the shape of x, {tuple(self.x.shape)}, got {tuple(self.out.shape)}; make it like x"
            )
        _check_shared(self.x, self.out, overlap=self.overlap)


class ColumnsCall(NamedTuple):
    """A call of `PartialReducer.all_gather_columns`.

    Attributes:
        overlap: x and out share memory.
        ranks: Whose columns there are.
    """

    x: Tensor
    out: Tensor
    overlap: bool
    ranks: int

    @property
    def what(self) -> str:
        """What is exchanged, for messages."""
        return f"columns {tuple(self.x.shape)}"

    @property
    def kind(self) -> str:
        """What must be the same on all ranks."""
        return f"{self.what}, {self.x.dtype}, {self.out.device.type}"

    @property
    def send_numel(self) -> int:
        """What a rank sends, in fp32 numbers."""
        return _send_numel(self.x)

    def check(self) -> None:
        """Refuses what does not fit, as `PartialReducer.all_gather_columns` says."""
        if self.x.dim() != 2:
            raise ValueError(f"x must have shape `rows width`, got {tuple(self.x.shape)}; flatten its rows")
        shape = self.x.shape[0], self.ranks * self.x.shape[1]
        if tuple(self.out.shape) != shape:
            raise ValueError(
                f"out must have shape {shape}, the columns of {self.ranks} ranks, got {tuple(self.out.shape)}; make it of rows and "
                "world_size * width"
            )
        if self.out.dtype != self.x.dtype:
            raise ValueError(
                f"out must have the dtype of x, {self.x.dtype}, got {self.out.dtype}; columns are not cast"
            )
        _check_shared(self.x, self.out, overlap=self.overlap)


def _send_numel(x: Tensor) -> int:
    return -(-x.numel() * x.element_size() // 4)


def _overlap(x: Tensor, out: Tensor) -> bool:
    """Of contiguous tensors: others are refused anyway."""
    begin, other = x.data_ptr(), out.data_ptr()
    return begin < other + out.nbytes and other < begin + x.nbytes


def _check_shared(x: Tensor, out: Tensor, *, overlap: bool) -> None:
    for name, given in (("x", x), ("out", out)):
        if given.dtype not in SHARED:
            raise ValueError(f"{name} must be fp32, bf16 or fp16, got {given.dtype}; cast it")
        if not given.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {given.stride()}; pass a contiguous tensor")
    if out.device != x.device:
        raise ValueError(f"out must be on the device of x, {x.device}, got {out.device}; move it there")
    if out.numel() > LARGEST:
        raise ValueError(f"out must have at most {LARGEST} numbers, got {out.numel()}; exchange its rows in pieces")
    if overlap:
        raise ValueError("out must share no memory with x, got tensors that overlap; write into another tensor")


Call = MergeCall | SumCall | ColumnsCall


class CallChecker:
    """What calls must keep to: checked once per kind, here and between the ranks.

    Args:
        consensus: How ranks compare; None: there is nobody to compare with.
    """

    def __init__(self, consensus: RankConsensus | None) -> None:
        self._consensus = consensus
        self._known: set[Hashable] = set()
        self._agreed: set[str] = set()

    def barrier(self, call: Call) -> None:
        """Refuses what does not fit.

        Args:
            call: What a rank is about to do.

        Raises:
            ValueError: It does not fit, here or on another rank.
            RuntimeError: The first of its kind, captured.
        """
        facts = [(x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else x for x in call]
        key = (type(call), *facts)
        if key in self._known:
            return
        kind = call.kind
        new = kind not in self._agreed
        try:
            call.check()
        except ValueError as error:
            if new and self._consensus is not None:
                self._consensus.raise_on_all_ranks(error)
            raise
        if new:
            if call.out.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"an exchange must be made once before it is captured, got its first call ({kind}) in a capture; "
                    "make the same call once before capturing it"
                )
            if self._consensus is not None:
                self._consensus.assert_equal_across_ranks("an exchange", kind)
            self._agreed.add(kind)
        self._known.add(key)


class ReducerBase:
    """The three operations as calls that are first admitted; what exchanges inherit.

    Args:
        choice: Which one it is, and why.
        consensus: How ranks compare; None: there is nobody to compare with, or nobody that could be missing.
        world_size: Ranks of the ring.
    """

    def __init__(self, choice: Choice, consensus: RankConsensus | None, world_size: int) -> None:
        self.choice = choice
        self._world_size = world_size
        self._checker = CallChecker(consensus)

    def __str__(self) -> str:
        return str(self.choice)

    def merge_partials(
        self,
        splits: Tensor,
        b: int,
        s: int,
        h: int,
        dv: int,
        sinks: Tensor | None,
        o: Tensor,
        lse: Tensor,
    ) -> None:
        """See `PartialReducer.merge_partials`."""
        call = MergeCall(splits, b, s, h, dv, sinks, o, lse)
        if self._admit(call):
            self._run_merge(call)

    def all_reduce(self, x: Tensor, out: Tensor) -> None:
        """See `PartialReducer.all_reduce`."""
        call = SumCall(x, out, _overlap(x, out))
        if self._admit(call):
            self._run_sum(call)

    def all_gather_columns(self, x: Tensor, out: Tensor) -> None:
        """See `PartialReducer.all_gather_columns`."""
        call = ColumnsCall(x, out, _overlap(x, out), self._world_size)
        if self._admit(call):
            self._run_columns(call)

    def _admit(self, call: Call) -> bool:
        """Refuses what can not be exchanged; False when there is nothing to exchange."""
        self._checker.barrier(call)
        return call.out.numel() > 0

    def _run_merge(self, call: MergeCall) -> None:
        """What `merge_partials` does with a call that is right and not empty."""
        raise NotImplementedError(f"an exchange must say how it is made, got {type(self).__name__}; define _run_finish")

    def _run_sum(self, call: SumCall) -> None:
        """What `all_reduce` does with such a call."""
        raise NotImplementedError(f"an exchange must say how it is made, got {type(self).__name__}; define _run_sum")

    def _run_columns(self, call: ColumnsCall) -> None:
        """What `all_gather_columns` does with such a call."""
        raise NotImplementedError(f"an exchange must say how it is made, got {type(self).__name__}; define _run_gather")
