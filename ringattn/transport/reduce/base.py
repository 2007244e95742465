"""Reducers: every rank passes its share, and all get the same result. The calls of their methods, and their checks.

A rank merges its own splits into one packed partial (Note [Packed parts] of the kernels) and sends it to all ranks; each then
merges the partials of ranks 0, 1, ..., P - 1, in this order, and normalises. A sum adds in the same order, in fp32, and rounds
once. So all ranks hold the same bits. The first call of each kind (sizes, dtypes, sinks or none) is compared between ranks, and
must be made outside of a capture; later ones communicate no host data.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn.kernels.partials.packed import finish_parts, merge_parts, size
from ringattn.transport.base import SelectedTransport
from ringattn.transport.consensus import RankConsensus
from ringattn.transport.process_group import all_gather_single, resolve_group
from ringattn.transport.timeout import BoundedWait

SHARED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of sums and columns."""
LARGEST = 2**30
"""Most numbers of a result: kernels count them in 32 bits."""
MOST_PARTS = 3
"""Most parts of columns in one call: queries, keys and values."""


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
        """The call in words."""
        return f"b {self.b}, s {self.s}, h {self.h}, dv {self.dv}"

    @property
    def kind(self) -> str:
        """The part of the call that must be equal on all ranks."""
        return f"{self.what}, {self.o.dtype}, {'no sinks' if self.sinks is None else 'sinks'}, {self.o.device.type}"

    @property
    def out(self) -> Tensor:
        """The written tensor that tells device and size."""
        return self.o

    @property
    def rows(self) -> int:
        """Rows of a partial."""
        return self.b * self.s * self.h

    @property
    def send_numel(self) -> int:
        """The size of a rank's share, in fp32 numbers."""
        return size(self.rows, self.dv)

    def check(self) -> None:
        """Raise ValueError unless the tensors fit."""
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


class ShareCall(NamedTuple):
    """A call of `PartialReducer.all_reduce`, or of `all_gather_columns`, which concatenates the columns of `ranks` ranks.

    Attributes:
        overlap: x and out share memory.
        ranks: Ranks whose columns are concatenated; 0: a sum.
        widths: Columns of each part of x; empty: x is one part.
    """

    x: Tensor
    out: Tensor
    overlap: bool
    ranks: int
    widths: tuple[int, ...] = ()

    @property
    def what(self) -> str:
        """The call in words."""
        parts = f" in parts {self.widths}" if self.widths else ""
        return f"{'columns' if self.ranks else 'addends'} {tuple(self.x.shape)}{parts}"

    @property
    def kind(self) -> str:
        """The part of the call that must be equal on all ranks."""
        dtypes = f"{self.x.dtype}" if self.ranks else f"{self.x.dtype} to {self.out.dtype}"
        return f"{self.what}, {dtypes}, {self.out.device.type}"

    @property
    def send_numel(self) -> int:
        """The size of a rank's share, in fp32 numbers."""
        return -(-self.x.numel() * self.x.element_size() // 4)

    def check(self) -> None:
        """Raise ValueError unless x and out fit."""
        x, out = self.x, self.out
        if not self.ranks and out.shape != x.shape:
            raise ValueError(f"out must have the shape of x, {tuple(x.shape)}, got {tuple(out.shape)}; make it like x")
        if self.ranks and x.dim() != 2:
            raise ValueError(f"x must have shape `rows width`, got {tuple(x.shape)}; flatten its rows")
        if self.widths and (len(self.widths) > MOST_PARTS or min(self.widths) < 1 or sum(self.widths) != x.shape[1]):
            raise ValueError(
                f"widths must be at most {MOST_PARTS} positive integers whose sum is the {x.shape[1]} columns of x, got "
                f"{self.widths}; exchange other parts in calls of their own"
            )
        if self.ranks and tuple(out.shape) != self._shape:
            raise ValueError(
                f"out must have shape {self._shape}, the columns of {self.ranks} ranks, got {tuple(out.shape)}; make it of rows "
                "and world_size * width, in one dim where x has parts"
            )
        if self.ranks and out.dtype != x.dtype:
            raise ValueError(f"out must have the dtype of x, {x.dtype}, got {out.dtype}; columns are not cast")
        for name, given in (("x", x), ("out", out)):
            if given.dtype not in SHARED:
                raise ValueError(f"{name} must be fp32, bf16 or fp16, got {given.dtype}; cast it")
            if not given.is_contiguous():
                raise ValueError(f"{name} must be contiguous, got strides {given.stride()}; pass a contiguous tensor")
        if out.device != x.device:
            raise ValueError(f"out must be on the device of x, {x.device}, got {out.device}; move it there")
        if out.numel() > LARGEST:
            raise ValueError(f"out must have at most {LARGEST} numbers, got {out.numel()}; exchange its rows in pieces")
        if self.overlap:
            raise ValueError("out must share no memory with x, got tensors that overlap; write into another tensor")

    @property
    def _shape(self) -> tuple[int, ...]:
        rows, width = self.x.shape
        return (rows * self.ranks * width,) if self.widths else (rows, self.ranks * width)


Call = MergeCall | ShareCall


class PartialReducer:
    """Reduction of partials, sums and concatenation of columns across the ranks of a ring; base class of all reducers.

    A reducer implements `_stack`, or runs the three kinds of calls in another way.

    Args:
        choice: The name of the reducer, and the reason for it.
        consensus: Compares calls between ranks; None: there are no other processes.
        world_size: Ranks of the ring.

    Attributes:
        capturable: Calls, but for the first of a kind, may be captured in a CUDA graph.
    """

    capturable: bool = False

    def __init__(self, choice: SelectedTransport, consensus: RankConsensus | None, world_size: int) -> None:
        self.choice = choice
        self._world_size = world_size
        self._consensus = consensus
        self._known: set[Hashable] = set()
        self._agreed: set[str] = set()

    def __str__(self) -> str:
        return str(self.choice)

    def merge_partials(
        self, splits: Tensor, b: int, s: int, h: int, dv: int, sinks: Tensor | None, o: Tensor, lse: Tensor
    ) -> None:
        """Merge the partials of all ranks and normalise; returns at once, in stream order on CUDA.

        Args:
            splits: `p, b * s * h * (dv + 2)` fp32, p >= 1: this rank's packed partials, merged in their order. May be
                overwritten by work that is enqueued later.
            b: Batch elements.
            s: Query tokens of each.
            h: Query heads.
            dv: Head dim of the values.
            sinks: `h` fp32, natural log, the same on all ranks; None for none.
            o: `b s h dv`, contiguous, the dtype of the queries; written, the same bits on every rank.
            lse: `b h s` fp32, contiguous, natural log; written, the same bits on every rank.

        Raises:
            ValueError: A shape, dtype or device does not fit, here or on another rank, or ranks make different calls; at the
                first call of a kind it is raised on every rank, before any transfer.
            RuntimeError: A rank did not come in time, now or in an earlier call (results since then are NaN); the message
                names it. Or a first call of a kind was captured.
        """
        call = MergeCall(splits, b, s, h, dv, sinks, o, lse)
        if self._admit(call):
            self._run_merge(call)

    def all_reduce(self, x: Tensor, out: Tensor) -> None:
        """Add the tensors of all ranks, in rank order, in fp32, and round once; raises and returns as `merge_partials`.

        Args:
            x: Any shape, contiguous, fp32, bf16 or fp16: this rank's addends. Shape and dtype are the same on all ranks.
            out: The shape of x, contiguous, fp32, bf16 or fp16; written, the same bits on every rank. Shares no memory with x.
        """
        call = ShareCall(x, out, _overlap(x, out), 0)
        if self._admit(call):
            self._run_sum(call)

    def all_gather_columns(self, x: Tensor, out: Tensor, widths: tuple[int, ...] = ()) -> None:
        """Concatenate the columns of all ranks, in rank order, bit for bit; raises and returns as `merge_partials`.

        Args:
            x: `rows width`, contiguous, fp32, bf16 or fp16: this rank's columns. Shape and dtype are the same on all ranks.
            out: `rows, world_size * width`, contiguous, the dtype of x; written. Shares no memory with x.
            widths: Columns of up to 3 parts of x, each of which is concatenated by itself: out has one dim then, in which matrices
                `rows, world_size * widths[i]` follow one another. Empty: x is one part.
        """
        call = ShareCall(x, out, _overlap(x, out), self._world_size, widths)
        if self._admit(call):
            self._run_columns(call)

    def check(self) -> None:
        """Raise RuntimeError if a call has failed: for results of graphs, whose replays pass no host call."""

    def close(self) -> None:
        """Release all memory; every rank calls it, when its calls are over."""

    def _admit(self, call: Call) -> bool:
        """Raise unless a call fits, here and, at the first of its kind, on all ranks; return whether it has anything to do."""
        facts = [(x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else x for x in call]
        key = (type(call), *facts)
        if key in self._known:
            return call.out.numel() > 0
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
        return call.out.numel() > 0

    def _stack(self, mine: Tensor, what: str) -> Tensor:
        """Return all ranks' shares, `world_size, *mine.shape`, in rank order; `what` names them in messages."""
        raise NotImplementedError(f"a reducer must implement _stack, got {type(self).__name__}; define it")

    def _run_merge(self, call: MergeCall) -> None:
        mine = call.splits[0]
        if len(call.splits) > 1 or not mine.is_contiguous():
            mine = torch.empty(call.send_numel, dtype=torch.float32, device=mine.device)
            merge_parts(call.splits, mine, call.rows, call.dv)
        finish_parts(self._stack(mine, call.what), call.rows, call.dv, call.sinks, call.o, call.lse)

    def _run_sum(self, call: ShareCall) -> None:
        first, *others = self._stack(call.x, call.what)
        for other in others:
            first = first.float() + other
        call.out.copy_(first)

    def _run_columns(self, call: ShareCall) -> None:
        rows, width = call.x.shape
        widths = call.widths or (width,)
        parts = call.out.view(-1).split([rows * call.ranks * one for one in widths])
        stacks = self._stack(call.x, call.what).transpose(0, 1).split(widths, 2)
        for part, stack in zip(parts, stacks, strict=True):
            part.view(stack.shape).copy_(stack)


class LocalReducer(PartialReducer):
    """The reducer of a ring of one rank."""

    capturable = True

    def __init__(self) -> None:
        super().__init__(SelectedTransport("alone", "one rank: every key is here already"), None, 1)

    def _run_merge(self, call: MergeCall) -> None:
        finish_parts(call.splits, call.rows, call.dv, call.sinks, call.o, call.lse)

    def _stack(self, mine: Tensor, what: str) -> Tensor:
        del what
        return mine[None]


class ProcessGroupReducer(PartialReducer):
    """Reducer with one collective of the process group per call: NCCL between GPUs, gloo between CPU processes."""

    def __init__(self, consensus: RankConsensus, bounded_wait: BoundedWait, why: str) -> None:
        super().__init__(SelectedTransport("group", why), consensus, consensus.world_size)
        self._group_name, self._rank = consensus.group_name, consensus.rank
        self._bounded_wait = bounded_wait
        # gloo's collectives run on the host
        self.capturable = "cuda:nccl" in dist.get_backend_config(resolve_group(self._group_name))

    def check(self) -> None:  # noqa: D102
        self._bounded_wait.check()

    def _stack(self, mine: Tensor, what: str) -> Tensor:
        self.check()
        # not kept from call to call: a graph that captured this has memory of its own
        stack = mine.new_empty((self._world_size, *mine.shape))
        try:
            # bytes, which every backend moves
            parts = [x.view(-1).view(torch.uint8) for x in (stack, mine)]
            all_gather_single(*parts, group=resolve_group(self._group_name, (self._rank, self._world_size)))
        except RuntimeError as error:
            peers = [peer for peer in range(self._world_size) if peer != self._rank]
            raise RuntimeError(
                f"ring rank {self._rank}: an exchange of {what}: the collective with ring ranks {peers} failed or timed out; look "
                f"for an earlier error on those ranks ({error})"
            ) from error
        return stack


def _overlap(x: Tensor, out: Tensor) -> bool:
    """Return whether contiguous tensors share memory; others are refused anyway."""
    begin, other = x.data_ptr(), out.data_ptr()
    return begin < other + out.nbytes and other < begin + x.nbytes
