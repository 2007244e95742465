"""One exchange of partials: every rank brings what its own keys say about the same rows, and leaves with the same answer.

Owns the protocol and the exchanges that need no memory of their own: of one rank alone, over the process group, and of ranks
that are simulated. Refuses to know keys, pages and requests.

Note [One exchange]
    A rank merges the partials of its own splits into one packed part (Note [Packed parts] of the kernels) and sends it to all
    ranks; each then merges the parts of ranks 0, 1, ..., P - 1, in this order, and normalises. So all ranks hold the same bits,
    and go on alike with what follows from them. How many splits a rank has is its own affair.
    All ranks make the same exchanges in the same order. The first of each kind (sizes, dtype, sinks or none) is compared and
    must come outside of a capture; later ones cost the host no word to anybody.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn.kernels.parts import finish_parts, merge_parts, size
from ringattn.transport.base import Seat
from ringattn.transport.choose import Choice
from ringattn.transport.patience import Patience
from ringattn.transport.process_group import Agreement, resolve_group

# the younger name of the same collective, where torch has it (2.13) and warns of the older one
_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Exchange(Protocol):
    """Makes one answer of all ranks' partials (Note [One exchange]).

    Attributes:
        choice: Which one it is, and why.
    """

    choice: Choice

    @property
    def capturable(self) -> bool:
        """Whether calls, but for the first of a kind, may be captured in a CUDA graph."""
        ...

    def finish(
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

    def check(self) -> None:
        """Raises if an exchange has failed: for results of graphs, whose replays pass no host call, once they are over.

        Raises:
            RuntimeError: As in `finish`.
        """
        ...

    def close(self) -> None:
        """Lets go of memory; every rank calls it, when its exchanges are over."""
        ...


class Terms:
    """What calls must keep to: checked once per kind, here and between the ranks.

    Args:
        agreement: How ranks compare; None: there is nobody to compare with.
    """

    def __init__(self, agreement: Agreement | None) -> None:
        self._agreement = agreement
        self._known: set[Hashable] = set()
        self._agreed: set[str] = set()

    def meet(
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
        """Refuses what does not fit.

        Args:
            splits: As in `Exchange.finish`, like the others.
            b: Likewise.
            s: Likewise.
            h: Likewise.
            dv: Likewise.
            sinks: Likewise.
            o: Likewise.
            lse: Likewise.

        Raises:
            ValueError: It does not fit, here or on another rank.
            RuntimeError: The first of its kind, captured.
        """
        facts = tuple(
            [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in (splits, sinks, o, lse)]
        )
        key = (b, s, h, dv, facts)
        if key in self._known:
            return
        kind = f"b {b}, s {s}, h {h}, dv {dv}, {o.dtype}, {'no sinks' if sinks is None else 'sinks'}, {o.device.type}"
        new = kind not in self._agreed
        try:
            _check(splits, b, s, h, dv, sinks, o, lse)
        except ValueError as error:
            if new and self._agreement is not None:
                self._agreement.refuse(error)
            raise
        if new:
            if o.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"an exchange must be made once before it is captured, got its first call ({kind}) in a capture; "
                    "make the same call once before capturing it"
                )
            if self._agreement is not None:
                self._agreement.agree("an exchange", kind)
            self._agreed.add(kind)
        self._known.add(key)


def _check(splits: Tensor, b: int, s: int, h: int, dv: int, sinks: Tensor | None, o: Tensor, lse: Tensor) -> None:
    width = size(b * s * h, dv)
    if splits.dim() != 2 or splits.shape[0] < 1 or splits.shape[1] != width or splits.dtype != torch.float32:
        raise ValueError(
            f"splits must be fp32 of shape (at least 1, {width}), which is b * s * h * (dv + 2), got {splits.dtype} of shape "
            f"{tuple(splits.shape)}; stack packed parts of b {b}, s {s}, h {h}, dv {dv}"
        )
    if splits.stride(1) != 1 and width > 1:
        raise ValueError(f"splits must have a contiguous last dim, got strides {splits.stride()}; call .contiguous()")
    wanted = {"o": (o, (b, s, h, dv)), "lse": (lse, (b, h, s))} | ({} if sinks is None else {"sinks": (sinks, (h,))})
    for name, (x, shape) in wanted.items():
        if tuple(x.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(x.shape)}; make it of b, s, h and dv")
        if not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {x.stride()}; pass a contiguous tensor")
        if x.device != splits.device:
            raise ValueError(f"{name} must be on the device of splits, {splits.device}, got {x.device}; move it there")
        if name != "o" and x.dtype != torch.float32:
            raise ValueError(f"{name} must be torch.float32, got {x.dtype}; cast it")
    if not o.dtype.is_floating_point:
        raise ValueError(f"o must have a floating dtype, got {o.dtype}; give it that of the queries")


class _Unheld:
    """What exchanges without memory of their own have in common: calls are checked, and nothing is held.

    Args:
        choice: Which one it is, and why.
        agreement: How ranks compare; None: there is nobody to compare with, or nobody that could be missing.
    """

    def __init__(self, choice: Choice, agreement: Agreement | None) -> None:
        self.choice = choice
        self._terms = Terms(agreement)

    def __str__(self) -> str:
        return str(self.choice)

    @property
    def capturable(self) -> bool:
        """See `Exchange.capturable`."""
        return False

    def finish(
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
        """See `Exchange.finish`."""
        self._terms.meet(splits, b, s, h, dv, sinks, o, lse)
        if o.numel():
            self._exchange(splits, b, s, h, dv, sinks, o, lse)

    def _exchange(
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
        """What `finish` does with a call that is right and not empty."""
        raise NotImplementedError(f"an exchange must say how it is made, got {type(self).__name__}; define _exchange")

    def check(self) -> None:
        """Whatever fails says so itself."""

    def close(self) -> None:
        """Nothing is held."""


class AloneExchange(_Unheld):
    """The exchange of a ring of one rank: its own parts are all there are."""

    def __init__(self) -> None:
        super().__init__(Choice("alone", "one rank: every key is here already"), None)

    @property
    def capturable(self) -> bool:
        """See `Exchange.capturable`."""
        return True

    def _exchange(
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
        finish_parts(splits, b * s * h, dv, sinks, o, lse)


class GroupExchange(_Unheld):
    """One collective of the process group per exchange: NCCL between GPUs, gloo between CPU processes.

    Args:
        group_name: Name of the process group.
        rank: This ring rank.
        world_size: Ranks of the ring.
        agreement: How ranks compare.
        patience: Of the ring's host: when it has given up, so has the exchange.
        why: One clause.
    """

    def __init__(
        self, group_name: str, rank: int, world_size: int, agreement: Agreement, patience: Patience, why: str
    ) -> None:
        super().__init__(Choice("group", why), agreement)
        self._group_name = group_name
        self._rank = rank
        self._world_size = world_size
        self._patience = patience

    def check(self) -> None:
        """See `Exchange.check`."""
        self._patience.check()

    @property
    def capturable(self) -> bool:
        """See `Exchange.capturable`: gloo's collectives pass through the host."""
        return "cuda:nccl" in dist.get_backend_config(resolve_group(self._group_name))

    def _exchange(
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
        self.check()
        rows = b * s * h
        mine = splits[0]
        if len(splits) > 1 or not mine.is_contiguous():
            mine = torch.empty(size(rows, dv), dtype=torch.float32, device=splits.device)
            merge_parts(splits, mine, rows, dv)
        # not kept from call to call: a graph that captured this has memory of its own
        stack = torch.empty((self._world_size, size(rows, dv)), dtype=torch.float32, device=splits.device)
        try:
            _gather(stack.view(-1), mine, group=resolve_group(self._group_name))
        except RuntimeError as error:
            peers = [peer for peer in range(self._world_size) if peer != self._rank]
            raise RuntimeError(
                f"ring rank {self._rank}: an exchange of b {b}, s {s}, h {h}, dv {dv}: the collective with ring ranks {peers} "
                f"failed or timed out; look for an earlier error on those ranks ({error})"
            ) from error
        finish_parts(stack, rows, dv, sinks, o, lse)


class SimulatedExchange(_Unheld):
    """The exchange of one of `run_ranks`: parts travel as mail, one post per peer.

    Args:
        seat: The place of this rank.
    """

    def __init__(self, seat: Seat) -> None:
        super().__init__(Choice("simulated", "all ranks are in one process"), None)
        self._seat = seat

    def _exchange(
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
        rows, seat = b * s * h, self._seat
        stack = splits.new_empty(seat.world_size, size(rows, dv))
        merge_parts(splits, stack[seat.rank], rows, dv)
        for step in range(1, seat.world_size):
            to, owner = (seat.rank + step) % seat.world_size, (seat.rank - step) % seat.world_size
            what = f"exchange, step {step}"
            seat.transport.post([(to, stack[seat.rank])], [(owner, stack[owner])], what).wait()
        finish_parts(stack, rows, dv, sinks, o, lse)
