"""The sharding of one batch's sequence: cutting tensors, assembling them, and the positions of the rows."""

from __future__ import annotations

import json
import operator
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from math import gcd
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from ringattn.plan.expressions import Mask
from ringattn.plan.layouts import LAYOUTS, PART, Run, Shard, check_sizes, make_shards, shard_len
from ringattn.plan.mask import MaskUnion, check_documents, short_mask
from ringattn.plan.options import resolve_balance, resolve_documents, resolve_integer, resolve_segments
from ringattn.ring_registry import RINGS
from ringattn.tensor_checks import BatchDigest, check_tensor, digest_bits, is_readable

SAME_SEQUENCE = (
    "give all ranks of a ring the same sequence: use a sampler over data-parallel groups, not over all ranks"
)
"""Correction of inputs that differ between ranks."""


class SupportsAllGather(Protocol):
    """The part of a `Ring` that a sharding uses; see its methods."""

    name: str
    impl: str
    rank: int
    world_size: int
    virtual_size: int
    is_virtual: bool
    check_inputs: bool

    def gather(self, x: Tensor, dim: int, lengths: Sequence[int]) -> list[Tensor]: ...  # noqa: D102
    def all_to_all(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor: ...  # noqa: D102
    def propagate_errors(self) -> AbstractContextManager[None]: ...  # noqa: D102
    def raise_on_all_ranks(self, error: Exception) -> NoReturn: ...  # noqa: D102
    def assert_equal_across_ranks(self, what: str, text: str, doing: str = "", fix: str = "") -> None: ...  # noqa: D102
    def assert_equal_once(self, what: str, text: str, doing: str = "") -> None: ...  # noqa: D102


class Sharding:
    """Positions of one batch's sequence that each rank holds. Immutable; equal when the content is equal.

    The sharding belongs to the batch and the mask to the layer: one sharding serves layers with different masks.

    Args:
        seq_len: Tokens of the whole sequence.
        layout: The name of the layout; "part" for shards that hold only some of the positions.
        shards: Every rank's shard; together they hold every position once ("part": at most once). In a ring of virtual ranks
            (`Ring(virtual_size=)`) every virtual rank's.
        rank: This rank, a process.
        documents: Cumulative boundaries (0, ..., seq_len) of packed documents; None: one document.
        ring: The ring that made it; needed by `unshard` among several ranks, and by attention.
        processes: Processes that share the virtual ranks, consecutive ones each; None: those of the ring, or one per shard.
        device: Device of `positions`; None: the CPU.

    Attributes:
        shards: Every process's shard: its virtual ranks' shards, one after another.
        virtual_shards: Every virtual rank's shard, as given.
        hosted: The virtual ranks of a process with several, each as the sharding of a ring with a process per shard; else empty.
        shard_lens: Rows of every rank's shard.
        shard_len: Rows of this rank's shard; may be 0.
        is_whole: This rank has all rows, in their order: the ring has one rank.
        text: `spec` as JSON in a Python literal: equal on all ranks, and read within milliseconds however long it is.
        detached: The same without the ring.
        calls: The records of attention calls with this sharding, by their options as given (`dispatch.call_text`).
        ring_name: The name of the ring that made it; None: it was made without one.
        padding: Rows at the end of the sequence that `unshard` leaves out (`with_padding`).
        batch: The digest of the batch that it was made for (`for_batch`); None: of no batch.

    Raises:
        ValueError: The shards do not hold every position exactly once, an argument is out of range, or the ring is another
            rank, or of another size. Other ranks of the ring find it when they compare their next call.

    Example:
        >>> from ringattn.plan.layouts import zigzag
        >>> sharding = Sharding(8, "zigzag", zigzag(8, 2), rank=0)
        >>> sharding.positions.tolist(), sharding.shard_lens
        ([0, 1, 6, 7], (4, 4))
        >>> sharding.shard(torch.arange(80, 88), dim=0).tolist()
        [80, 81, 86, 87]
    """

    def __init__(
        self,
        seq_len: int,
        layout: str,
        shards: Sequence[Shard],
        rank: int,
        documents: Sequence[int] | None = None,
        *,
        ring: SupportsAllGather | None = None,
        processes: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if processes is None:
            processes = len(shards) if ring is None else ring.world_size
        with _propagate_errors(ring):
            check_sizes(seq_len, len(shards))
            if layout not in (*LAYOUTS, PART):
                raise ValueError(
                    f"layout must be one of {', '.join(LAYOUTS)}, {PART}, got {layout!r}; 'zigzag' suits causal masks"
                )
            if not 0 <= rank < processes:
                raise ValueError(
                    f"rank must be from 0 to {processes - 1}, got {rank}; give one shard per rank of the ring"
                )
            if ring is not None and (rank, len(shards)) != (ring.rank, ring.virtual_size):
                raise ValueError(
                    f"the sharding must be that of rank {ring.rank} of {ring.virtual_size}, as its ring is here, got one for rank "
                    f"{rank} of {len(shards)}; make it with ring.sharding(...)"
                )
            if documents is not None:
                check_documents(tuple(documents), seq_len)
            _check_partition(tuple(shards), seq_len, whole=layout != PART)
        self.seq_len = seq_len
        self.layout = layout
        self.virtual_shards = tuple(shards)
        each = len(shards) // processes
        self.shards = tuple(sum(shards[first : first + each], ()) for first in range(0, len(shards), each))
        self.rank = rank
        self.documents = None if documents is None else tuple(documents)
        self._ring = ring
        self.ring_name = None if ring is None else ring.name
        self.batch: BatchDigest | None = None
        self.padding = 0
        self.device = torch.device("cpu" if device is None else device)
        self.world_size = len(self.shards)
        self.is_whole = len(shards) == 1
        # not cached_property, whose lock torch.compile does not trace
        self.shard_lens = tuple(shard_len(shard) for shard in self.shards)
        self.shard_len = self.shard_lens[rank]
        self.text = repr(json.dumps(self.spec))
        self.calls: dict[Hashable, Any] = {}
        self.hosted: tuple[Sharding, ...] = tuple(
            Sharding(seq_len, layout, shards, virtual, documents)
            for virtual in (range(rank * each, (rank + 1) * each) if each > 1 else ())
        )
        # what is kept of a call must not keep its ring
        self.detached = self if ring is None else self._with(_ring=None, ring_name=None)
        self._exchanges: dict[str, tuple[Tensor, list[int], list[int], Tensor]] = {}

    def _with(self, **changes: Any) -> Sharding:
        found = object.__new__(Sharding)
        found.__dict__.update(self.__dict__, **changes)
        found.__dict__.setdefault("detached", found)
        return found

    def with_padding(self, rows: int) -> Sharding:
        """Return this sharding with so many rows at the end of the sequence that `unshard` leaves out."""
        return self._with(padding=rows)

    def for_batch(self, *tensors: Tensor) -> Sharding:
        """Return this sharding with a digest of a batch, which ranks compare beside the attention calls that get it.

        The digest is part of the comparison that each call makes (Note [Call marks] of call_order.py), so every batch is compared,
        and no message is added. Where gloo moves rows, all ranks raise before a number is computed; elsewhere a difference
        is found in one of calls 1, 2, 4, ..., and every 1024th, and on a GPU a batch later. `torch.compile` of a function that is
        given the sharding leaves it out. The worker of a DataLoader may call it: the digest is pickled with the sharding.

        Args:
            tensors: The whole tokens and labels of the batch, the same on every rank. Of floating point ones the first four
                numbers of each row count.

        Raises:
            TypeError: One is no tensor.
            NotImplementedError: One is a DTensor, or another tensor with a meaning of its own.

        Example:
            >>> from ringattn.plan.layouts import contiguous
            >>> sharding, tokens = Sharding(4, "contiguous", contiguous(4, 2), 0), torch.arange(4)
            >>> sharding.for_batch(tokens) == sharding, sharding.for_batch(tokens).batch is None
            (True, False)
        """
        with _propagate_errors(self._ring):
            for i, x in enumerate(tensors):
                check_tensor(f"tensors[{i}]", x)
        if self.world_size == 1 or not tensors or not all(map(is_readable, tensors)):
            return self
        return self._with(batch=BatchDigest(tensors))

    @property
    def ring(self) -> SupportsAllGather:
        """The ring that made this sharding.

        Raises:
            RuntimeError: It was made without one.
        """
        if self._ring is None:
            raise RuntimeError(
                "a sharding must be made by a ring to attend with it, got one without; use Ring.sharding"
            )
        return self._ring

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__:
            raise AttributeError(f"{name} of a sharding must stay as it is, got a new value; make another sharding")
        super().__setattr__(name, value)

    @cached_property
    def positions(self) -> Tensor:
        """The global position of each of this rank's rows: `s` int64, on `device`; ascending inside each virtual rank.

        They count over the whole sequence, not from 0 on each rank: rotary embeddings and learned positions of a shard take them.
        `document_positions` count from the start of each packed document.

        Example:
            >>> from ringattn import Ring
            >>> sharding = Ring().sharding(4)
            >>> frequencies = 10_000.0 ** (-torch.arange(0, 64, 2) / 64)  # of head_dim 64
            >>> angles = sharding.positions[:, None] * frequencies  # s d/2, for rotary embeddings of q and k
            >>> angles[:, 0].tolist()
            [0.0, 1.0, 2.0, 3.0]
        """
        # they outlive the call that makes them: ordinary tensors even when made under inference mode
        with torch.inference_mode(False):
            return positions_of(self.shards[self.rank]).to(self.device)

    @property
    def document_positions(self) -> Tensor:
        """The position of each of this rank's rows inside its document, `s` int64; `positions` where there are no documents."""
        return self.positions if self.documents is None else positions_in_documents(self.positions, self.documents)

    def check_positions(self, position_ids: Tensor) -> None:
        """Raise unless position ids are those of this rank's rows; a trace or a capture checks the shape only.

        Args:
            position_ids: `s`, `b s` or with more dims before the rows, integers: `positions` or `document_positions` in each row.

        Raises:
            ValueError: They are others, as positions that count from 0 on each rank. Where one rank alone has them, other ranks
                of the ring find it when they compare their next call.
            TypeError: position_ids is no tensor.

        Example:
            >>> from ringattn.plan.layouts import zigzag
            >>> Sharding(8, "zigzag", zigzag(8, 2), rank=0).check_positions(torch.tensor([[0, 1, 6, 7]]))
        """
        with _propagate_errors(self._ring):
            self._check_rows("position_ids", position_ids, -1, "shard_len", "the positions of this rank's rows")
            if not is_readable(position_ids):
                return
            allowed = [x.to(position_ids.device) for x in (self.positions, self.document_positions)]
            if not any(bool((position_ids == x).all()) for x in allowed):
                raise ValueError(
                    f"position_ids must be the positions of this rank's {self.shard_len} rows, "
                    f"{shorten(self.positions)}, or those inside documents, got {shorten(position_ids.flatten())}; pass "
                    "sharding.positions"
                )

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's rows of a whole tensor, as a new contiguous tensor; differentiable.

        Args:
            x: The whole tensor, seq_len long in `dim`; the same on every rank.
            dim: The sequence dimension; negative counts from the end.

        Raises:
            ValueError: x does not have seq_len rows in `dim`; other ranks of the ring find it when they compare their next call.
                With `Ring(check_inputs=True)`: ranks have different tensors; raised on every rank, each of which calls this.
            TypeError: x is no tensor, or dim no integer.
            NotImplementedError: x is a DTensor, or another tensor with a meaning of its own.
        """
        return self.cut(x, self._check_whole("shard", "x", x, dim))

    def shift_labels(self, labels: Tensor, ignore_index: int = -100, dim: int = 1) -> Tensor:
        """Return this rank's rows of labels in which each row has the next token: shifted before the sequence is cut.

        The next token of a shard's last row is on another rank, so that labels can not be shifted afterwards. The last row of each
        document, or of the sequence, gets `ignore_index`. A loss of these labels compares row i of the logits with label i.

        Args:
            labels: Whole labels, one per token as token ids are, seq_len long in `dim`; integers, the same on every rank.
            ignore_index: Label of rows that have no next token.
            dim: The sequence dimension; negative counts from the end.

        Returns:
            shard_len rows in `dim`, contiguous.

        Raises:
            ValueError: See `shard`; or labels are no integers, or their dtype does not hold ignore_index.
            TypeError: labels is no tensor, or dim or ignore_index no integer.
            NotImplementedError: See `shard`.

        Example:
            >>> from ringattn.plan.layouts import zigzag
            >>> sharding = Sharding(8, "zigzag", zigzag(8, 2), 0, documents=(0, 2, 8))
            >>> sharding.shift_labels(torch.arange(80, 88), dim=0).tolist()  # rows 0, 1, 6 and 7
            [81, -100, 87, -100]
        """
        with _propagate_errors(self._ring):
            check_tensor("labels", labels)
            ignore_index = resolve_integer("ignore_index", ignore_index)
            if labels.dtype == torch.bool or labels.is_floating_point() or labels.is_complex():
                raise ValueError(f"labels must be integers, got {labels.dtype}; pass token ids")
            bounds = torch.iinfo(labels.dtype)
            if not bounds.min <= ignore_index <= bounds.max:
                raise ValueError(
                    f"ignore_index must be from {bounds.min} to {bounds.max} for labels of {labels.dtype}, got {ignore_index}; "
                    "pass labels.long()"
                )
        dim = self._check_whole("shift_labels", "labels", labels, dim)
        ends = sorted({end - 1 for end in self.documents or (0, self.seq_len) if end})
        shifted = labels.roll(-1, dim)
        return self.cut(shifted.index_fill_(dim, torch.tensor(ends, device=labels.device), ignore_index), dim)

    def _check_whole(self, doing: str, name: str, x: Tensor, dim: int) -> int:
        """Return dim, counted from the front, of a whole tensor, which ranks compare if their ring checks inputs."""
        with _propagate_errors(self._ring):
            dim = self._check_rows(name, x, dim, "seq_len", "the whole sequence, or name its dim")
            ring = self._ring
            if ring is None or self.world_size == 1 or not ring.check_inputs:
                return dim
            # a worker of a DataLoader has no place in the order of comparisons
            if is_readable(x) and get_worker_info() is None:
                text = f"{list(x.shape)} to cut in dim {dim}, {x.dtype}, digest {int(digest_bits(x)) % 2**64:016x}"
                ring.assert_equal_across_ranks(
                    f"{name} of Sharding.{doing}", text, f"Sharding.{doing}({text})", SAME_SEQUENCE
                )
        return dim

    def cut(self, x: Tensor, dim: int) -> Tensor:
        """Return `shard` of a tensor that was checked; dim counts from the front."""
        parts = [_run_of(x, dim, run) for run in self.shards[self.rank]] or [x.narrow(dim, 0, 0)]
        # cat copies even a single part: a view would keep the whole sequence in memory
        return torch.cat(parts, dim).contiguous()

    def cut_whole(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's rows of a tensor that has those of the whole sequence in dim, and any other as it is.

        For masks, which callers may give whole: dim is negative and counts from the end; without comparison between ranks.

        Raises:
            ValueError: One process holds all rows of several virtual ranks, which are in another order than the sequence.
        """
        if x.dim() < -dim or x.shape[dim] != self.seq_len:
            return x
        if self.shard_len == self.seq_len and not self.hosted:
            return x  # other ranks have no rows
        if self.shard_len == self.seq_len:
            raise ValueError(
                f"a mask of {self.seq_len} rows must be whole or this rank's, got one where they cannot be told apart: one process "
                "has all virtual ranks; pass bias=sharding.shard(mask, -2) to ring_attention, or a mask of ringattn.masks"
            )
        return self.cut(x, x.dim() + dim)

    def unshard(self, x_local: Tensor, dim: int = 1) -> Tensor:
        """Return the whole tensor from every rank's rows; the inverse of `shard`. Every rank must call it.

        Args:
            x_local: This rank's rows, shard_len long in `dim`.
            dim: The sequence dimension; negative counts from the end.

        Raises:
            ValueError: x_local does not have shard_len rows in `dim`, or ranks have different tensors; raised on every rank where
                a tensor of this kind is the first.
            RuntimeError: The ring has several ranks and this sharding was made without one.
            TypeError: See `shard`; also NotImplementedError.
        """
        with _propagate_errors(self._ring):
            dim = self._check_rows("x_local", x_local, dim, "shard_len", "this rank's rows, or name their dim")
            ring = self._ring_to("unshard")
        parts = [x_local]
        if ring is not None:
            self._compare(ring, "unshard", x_local, dim, self.shard_lens)
            parts = ring.gather(x_local, dim, self.shard_lens)
        whole = self.assemble(parts, dim)
        return whole.narrow(dim, 0, self.seq_len - self.padding) if self.padding else whole

    def reshard(self, x_local: Tensor, other: Sharding, dim: int = 1) -> Tensor:
        """Return this rank's rows under another sharding of the same sequence: one all-to-all. Every rank must call it.

        Differentiable. Rows whose rank is the same under both shardings do not leave it.

        Args:
            x_local: This rank's rows, shard_len long in `dim`.
            other: Sharding of the same sequence over the same ring, in any layout.
            dim: The sequence dimension; negative counts from the end.

        Returns:
            This rank's rows under `other`, `other.shard_len` long in `dim`, contiguous.

        Raises:
            ValueError: x_local does not have shard_len rows in `dim`, the shardings are of different sequences or rings, or ranks
                have different tensors; raised on every rank where a tensor of this kind is the first.
            RuntimeError: The ring has several ranks and this sharding was made without one.
            TypeError: See `shard`, also NotImplementedError; or other is no sharding.

        Example:
            >>> from ringattn import Ring
            >>> ring = Ring()
            >>> ring.sharding(4, "zigzag").reshard(torch.arange(4), ring.sharding(4, "contiguous"), dim=0).tolist()
            [0, 1, 2, 3]
        """
        with _propagate_errors(self._ring):
            check_sharding(other, "other")
            here, there = (self.seq_len, self.ring_name), (other.seq_len, other.ring_name)
            if here != there or PART in (self.layout, other.layout):
                raise ValueError(
                    f"other must be a sharding of the same {self.seq_len} tokens over the same ring, got {other!r}; make both "
                    "with ring.sharding of one ring"
                )
            dim = self._check_rows("x_local", x_local, dim, "shard_len", "this rank's rows, or name their dim")
            ring = self._ring_to("reshard")
        exchange = self._exchanges.get(other.text)
        if exchange is None:
            exchange = self._exchanges[other.text] = _exchange_plan(self.shards, other.shards, self.rank)
        take, sends, receives, place = exchange
        rows = x_local.movedim(dim, 0).index_select(0, take.to(x_local.device))
        if ring is not None:
            self._compare(ring, "reshard", x_local, dim, "rows", f", {self.text} {other.text}")
            rows = ring.all_to_all(rows, sends, receives)
        return rows.index_select(0, place.to(x_local.device)).movedim(0, dim).contiguous()

    def _ring_to(self, doing: str) -> SupportsAllGather | None:
        """Return the ring for a method that reaches other ranks, None where there are none; refuse a sharding without."""
        if self.world_size == 1:
            return None
        if self._ring is None:
            raise RuntimeError(
                f"{doing} must reach the other {self.world_size - 1} ranks, got a sharding without a ring; "
                "make it with Ring.sharding, or pass all parts to assemble"
            )
        return self._ring

    @staticmethod
    def _compare(ring: SupportsAllGather, doing: str, x: Tensor, dim: int, rows: object, more: str = "") -> None:
        """Compare the tensors of all ranks, by shape with `rows` in place of their number, dtype, device and gradient."""
        if torch.compiler.is_compiling():  # a trace has no other ranks
            return
        call = f"{[*x.shape[:dim], rows, *x.shape[dim + 1 :]]}, {x.dtype} {x.device.type}"
        text = f"{call} with gradients: {torch.is_grad_enabled() and x.requires_grad}{more}"
        ring.assert_equal_once(f"a tensor to {doing}", text, f"Sharding.{doing}({call})")

    def _check_rows(self, name: str, x: Tensor, dim: int, wanted: str, instead: str) -> int:
        """Return dim, counted from the front; refuse a tensor with another number of rows there than an attribute says."""
        check_tensor(name, x)
        dim, rows = _resolve_dim(x, dim), getattr(self, wanted)
        if x.shape[dim] != rows:
            raise ValueError(
                f"{name} must have {wanted} {rows} in dim {dim}, got {x.shape[dim]} (shape {tuple(x.shape)}); pass {instead}"
            )
        return dim

    def assemble(self, parts: Sequence[Tensor], dim: int = 1) -> Tensor:
        """Return the whole tensor from the local tensors of all ranks, in rank order; pure and differentiable.

        Args:
            parts: One tensor per rank, shard_lens[r] long in `dim`, alike otherwise.
            dim: The sequence dimension; negative counts from the end.

        Raises:
            ValueError: There is not one part per rank, or a part has the wrong length.
            TypeError: parts is no sequence of tensors.
            NotImplementedError: A part is a DTensor, or another tensor with a meaning of its own.
        """
        if not isinstance(parts, Sequence):
            raise TypeError(f"parts must be a sequence of tensors, got {type(parts).__name__}; pass one per rank")
        for rank, part in enumerate(parts):
            check_tensor(f"parts[{rank}]", part)
        if len(parts) != self.world_size:
            raise ValueError(
                f"parts must have one tensor per rank, {self.world_size}, got {len(parts)}; pass all ranks'"
            )
        dim = _resolve_dim(parts[self.rank], dim)
        lengths = tuple(part.shape[dim] for part in parts)
        if lengths != self.shard_lens:
            raise ValueError(
                f"parts must have the lengths {self.shard_lens} in dim {dim}, got {lengths}; pass them in rank order"
            )
        return self.concatenate(parts, dim)

    def concatenate(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Return `assemble` of tensors that were checked; dim counts from the front."""
        if all(run.stride == 1 for shard in self.shards for run in shard):
            pieces = [
                (run.start, piece)
                for part, shard in zip(parts, self.shards, strict=True)
                for run, piece in zip(shard, part.split([run.length for run in shard], dim), strict=False)
            ]
            # a trace sorts no symbols
            return torch.cat([piece for _, piece in sorted(pieces, key=lambda item: operator.index(item[0]))], dim)
        order = torch.cat([positions_of(shard) for shard in self.shards]).argsort()
        return torch.cat(list(parts), dim).index_select(dim, order.to(parts[0].device))

    @cached_property
    def spec(self) -> tuple[Any, ...]:
        """The content as nested tuples of primitives (JSON-able, hashable); `from_spec` makes an equal sharding of it.

        (seq_len, layout, virtual ranks, documents, shards): shards is None where the layout's name says it all. The rank is
        not part of it, nor how many processes there are: all have the same text.
        """
        shards, size = None, len(self.virtual_shards)
        if self.layout in ("balanced", "segments", PART) or self.virtual_shards != make_shards(
            self.layout, self.seq_len, size
        ):
            shards = tuple(tuple((run.start, run.stride, run.length) for run in shard) for shard in self.virtual_shards)
        return self.seq_len, self.layout, size, self.documents, shards

    @classmethod
    def from_spec(
        cls,
        spec: Sequence[Any],
        rank: int,
        *,
        ring: SupportsAllGather | None = None,
        processes: int | None = None,
        device: torch.device | str | None = None,
    ) -> Sharding:
        """Return the sharding that `spec` of any rank describes, seen from a rank; lists serve as well as tuples (JSON).

        Raises:
            ValueError: See `Sharding`.
        """
        with _propagate_errors(ring):
            seq_len, layout, world_size, documents, runs = spec
            if runs is None:
                shards = make_shards(layout, seq_len, world_size)
            else:
                shards = tuple(tuple(Run(*run) for run in shard) for shard in runs)
        return cls(seq_len, layout, shards, rank, documents, ring=ring, processes=processes, device=device)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Sharding) and self._identity == other._identity)

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[int, int, str]:
        return self.rank, self.world_size, self.text

    def __reduce__(self) -> tuple[Any, ...]:
        # a ring has connections and is found by its name: workers of a DataLoader send shardings to the process that holds it,
        # other ranks of the ring get their own view, and a process that does not hold it gets a sharding without
        ring = None if self._ring is None else self._ring.name
        kept = {"batch": self.batch, "padding": self.padding}
        return _restore, (self.spec, self.rank, ring, self.device, self.world_size, kept)

    def __repr__(self) -> str:
        documents = "" if self.documents is None else f", {len(self.documents) - 1} documents"
        return (
            f"Sharding({self.seq_len} tokens, {self.layout}, rank {self.rank} of {self.world_size}, "
            f"{self.shard_len} rows{documents})"
        )


def _propagate_errors(ring: SupportsAllGather | None) -> AbstractContextManager[None]:
    """Raise the errors of a block on the other ranks of a ring too, if there is one."""
    return nullcontext() if ring is None else ring.propagate_errors()


def _restore(
    spec: Sequence[Any], rank: int, ring: str | None, device: torch.device, processes: int, kept: dict[str, Any]
) -> Sharding:
    found: SupportsAllGather | None = None if ring is None else RINGS.get(ring)
    # perhaps a ring of another job
    if found is None or (found.world_size, found.virtual_size) != (processes, spec[2]):
        restored = Sharding.from_spec(spec, rank, processes=processes, device=device)
    else:
        restored = Sharding.from_spec(spec, found.rank, ring=found, device=device)
    return restored._with(**kept)


def check_sharding(x: object, name: str = "sharding") -> None:
    """Refuse anything but a sharding."""
    if not isinstance(x, Sharding):
        raise TypeError(f"{name} must be what ring.sharding(seq_len) gives, got {type(x).__name__}")


def resolve_shards(
    seq_len: int,
    layout: str,
    documents: Sequence[int] | Tensor | None,
    balance: Mapping[str, Any] | Mask | None,
    segments: Sequence[int] | None,
    world_size: int,
) -> tuple[int, tuple[int, ...] | None, tuple[Shard, ...]]:
    """Length, documents and shards of a sequence, of what users give `Ring.sharding`."""
    seq_len, documents = resolve_integer("seq_len", seq_len), resolve_documents(documents)
    if balance is not None and layout != "balanced":
        raise ValueError(f"balance must be given with layout='balanced' only, got layout={layout!r}; leave it out")
    if isinstance(balance, Mask):
        mask = MaskUnion(seq_len, seq_len, balance, documents)
    else:
        mask = short_mask(seq_len, documents=documents, **resolve_balance(balance))
    return seq_len, documents, make_shards(layout, seq_len, world_size, mask, resolve_segments(segments))


def positions_of(shard: Shard) -> Tensor:
    """The global position of each row of a shard: `s` int64, ascending, on the CPU."""
    if not shard:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    return torch.cat([torch.arange(run.start, run.last + 1, run.stride, device="cpu") for run in shard])


def positions_in_documents(positions: Tensor, documents: Sequence[int]) -> Tensor:
    """Positions of a sequence as counted from the start of their document; boundaries are cumulative, as `Sharding.documents`."""
    edges = torch.tensor(documents, device=positions.device)
    # the last bound at or before a position starts its document; empty documents repeat a bound
    return positions - edges[torch.searchsorted(edges, positions, right=True) - 1]


def shorten(positions: Tensor) -> str:
    """Return a text of at most six of the positions `s`, for messages."""
    shown = positions.tolist()
    return str(shown) if len(shown) <= 6 else f"[{', '.join(map(str, shown[:4]))}, ..., {shown[-1]}]"


def _exchange_plan(
    before: tuple[Shard, ...], after: tuple[Shard, ...], rank: int
) -> tuple[Tensor, list[int], list[int], Tensor]:
    """Rows in the order in which a rank sends them, counts to and from each rank, and where received rows go.

    The i-th row under `after` is row place[i] of those received.
    """
    old, new = ([positions_of(shard) for shard in shards] for shards in (before, after))
    owners = torch.empty(sum(len(held) for held in old), dtype=torch.int64, device="cpu")
    old_owners = torch.empty_like(owners)
    for r, (held, wanted) in enumerate(zip(old, new, strict=True)):
        old_owners[held] = r
        owners[wanted] = r
    take = owners[old[rank]].argsort(stable=True)
    sources = old_owners[new[rank]].argsort(stable=True)
    sends = owners[old[rank]].bincount(minlength=len(before)).tolist()
    receives = old_owners[new[rank]].bincount(minlength=len(before)).tolist()
    return take, sends, receives, sources.argsort()


def _run_of(x: Tensor, dim: int, run: Run) -> Tensor:
    rows = x.narrow(dim, run.start, run.stride * (run.length - 1) + 1)
    return rows if run.stride == 1 else rows[(slice(None),) * dim + (slice(None, None, run.stride),)]


def _resolve_dim(x: Tensor, dim: int) -> int:
    dim = resolve_integer("dim", dim)
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(
            f"dim must be from {-x.ndim} to {x.ndim - 1}, got {dim}; the tensor has shape {tuple(x.shape)}"
        )
    return dim % x.ndim


def _check_partition(shards: tuple[Shard, ...], seq_len: int, *, whole: bool) -> None:
    for rank, shard in enumerate(shards):
        end = 0
        for run in shard:
            if run.length < 1 or run.stride < 1 or run.start < end or run.last >= seq_len:
                raise ValueError(
                    f"shards must hold ascending, non-empty runs below {seq_len}, got {run} on rank {rank}; "
                    "make them with ringattn.plan.layouts.make_shards"
                )
            end = run.last + 1
    held = sum(shard_len(shard) for shard in shards)
    if (whole and held != seq_len) or not _is_disjoint(shards):
        raise ValueError(
            f"shards must hold each of {seq_len} positions once, got {held} rows; "
            "make them with ringattn.plan.layouts.make_shards"
        )


def _is_disjoint(shards: tuple[Shard, ...]) -> bool:
    runs = [run for shard in shards for run in shard]
    # runs whose positions have different remainders are disjoint: of striped shards none are compared
    divisor = gcd(*(run.stride for run in runs if run.length > 1)) or 1
    active: list[Run] = []
    for run in sorted(runs, key=lambda run: (run.start % divisor, run.start)):
        remainder = run.start % divisor
        active = [other for other in active if other.last >= run.start and other.start % divisor == remainder]
        if any(_meet(other, run) for other in active):
            return False
        active.append(run)
    return True


def _meet(a: Run, b: Run) -> bool:
    """Return whether two runs, of which b starts later, hold a common position (Chinese remainder theorem)."""
    shared = gcd(a.stride, b.stride)
    steps, rest = divmod(a.start - b.start, shared)
    period = a.stride // shared
    first = b.start + b.stride * (steps * pow(b.stride // shared, -1, period) % period)
    return not rest and first <= min(a.last, b.last)
