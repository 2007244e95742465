"""The mask of a call that gives short forms of one: causal, window, documents, prefix_len, chunk_len and lengths.

Owns their meaning, as an expression of masks, and refuses fields that define no mask. Every short form bounds the visible positions
from below, from above, or both, and no bound decreases with the row. So the expression compiles to one term (Note [Mask terms]).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from operator import gt

from ringattn.plan.expressions import (
    Causal,
    Chunks,
    Documents,
    Intersection,
    Lengths,
    Mask,
    PerBatch,
    Prefix,
    Window,
    check_chunks,
)
from ringattn.plan.layouts import MAX_SEQ_LEN
from ringattn.plan.mask_union import MaskAxis as MaskAxis
from ringattn.plan.mask_union import MaskUnion


@dataclass(frozen=True, eq=False)
class AttentionMask(MaskUnion):
    """The mask of one attention call.

    Query i sees key j when all of these hold: causal implies `j <= i` or `j < prefix_len`;
    `i - left <= j <= i + right`; i and j lie in the same document; `i // chunk_len == j // chunk_len`, where chunks_restart
    with i and j counted from the beginning of their document or from start, whichever is later; both lie in the batch
    element's [start, stop).

    Widths that reach beyond either sequence are kept as those that just do: sums with positions then fit any integer.

    Attributes:
        window: (left, right): i - left <= j <= i + right; None on a side means unbounded; None: no window.

    Example:
        >>> AttentionMask(8, 8, causal=True, documents=(0, 3, 8)).pairs(0, 8)
        21
    """

    seq_len: int
    kv_len: int
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    documents: tuple[int, ...] | None = None
    prefix_len: int = 0
    chunk_len: int | None = None
    lengths: tuple[tuple[int, int], ...] | None = None
    chunks_restart: bool = False

    def __post_init__(self) -> None:
        """Refuse fields that define no mask."""
        widths = {"window": self.window or (), "prefix_len": (self.prefix_len,), "chunk_len": (self.chunk_len,)}
        for name, numbers in widths.items():
            if any(x is not None and type(x) is not int for x in numbers):
                raise ValueError(f"{name} must be of integers, got {getattr(self, name)!r}; convert it first")
        if not 1 <= min(self.seq_len, self.kv_len) <= max(self.seq_len, self.kv_len) <= MAX_SEQ_LEN:
            raise ValueError(
                f"seq_len and kv_len must be from 1 to {MAX_SEQ_LEN}, got {self.seq_len} and {self.kv_len}; "
                "give the lengths of the whole sequences"
            )
        if self.window is not None and len(self.window) != 2:
            raise ValueError(f"window must be (left, right), got {self.window}; None on a side means unbounded")
        if any(side is not None and side < 0 for side in self.window or ()):
            raise ValueError(f"window must have sides of at least 0 or None, got {self.window}; None means unbounded")
        if self.documents is not None:
            if self.seq_len != self.kv_len:
                raise ValueError(
                    f"documents must divide one sequence, got {self.seq_len} queries and {self.kv_len} keys; "
                    "cross attention between sequences of different lengths takes no documents"
                )
            check_documents(self.documents, self.seq_len)
        if self.prefix_len < 0:
            raise ValueError(f"prefix_len must be at least 0, got {self.prefix_len}; 0 means no prefix")
        if self.prefix_len and not self.causal:
            raise ValueError(
                f"prefix_len must come with causal=True, got prefix_len={self.prefix_len} without; "
                "every key is visible already"
            )
        if self.chunk_len is not None and self.chunk_len < 1:
            raise ValueError(f"chunk_len must be at least 1 or None, got {self.chunk_len}; None means no chunks")
        if self.lengths is not None:
            _check_lengths(self.lengths, self.seq_len, self.kv_len)
        longest = max(self.seq_len, self.kv_len)
        if self.chunk_len is not None:
            check_chunks(self.seq_len, self.chunk_len)
        if self.window is not None:
            window = tuple(None if side is None else min(side, longest) for side in self.window)
            object.__setattr__(self, "window", window)
        if self.chunk_len is not None:
            object.__setattr__(self, "chunk_len", min(self.chunk_len, longest))
        object.__setattr__(self, "prefix_len", min(self.prefix_len, longest))

    def __reduce__(self) -> tuple[type[AttentionMask], tuple[object, ...]]:
        # copies have the fields alone: the hash of None, and so the cached one, differs from process to process
        return AttentionMask, tuple(getattr(self, field.name) for field in fields(self))

    @cached_property
    def expression(self) -> Mask:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The mask as an expression."""
        parts: list[Mask] = []
        if self.causal:
            parts.append(Causal() | Prefix(self.prefix_len) if self.prefix_len else Causal())
        if self.window is not None:
            parts.append(Window(*self.window))
        restarts = self.chunks_restart and (self.documents is not None or self.lengths is not None)
        if self.chunk_len is not None and not restarts and self.seq_len == self.kv_len:
            # documents compile faster where chunks are thousands
            parts.append(Documents((*range(0, self.seq_len, self.chunk_len), self.seq_len)))
        elif self.chunk_len is not None and not restarts:
            parts.append(Chunks(self.chunk_len))
        elif self.chunk_len is not None:
            starts = [start for start, _ in self.lengths or ((0, 0),)]
            chunked = tuple(Documents(self._restarting_chunks(self.chunk_len, start)) for start in starts)
            parts.append(chunked[0] if self.lengths is None else PerBatch(chunked))
        if self.lengths is not None:
            parts.append(Lengths(self.lengths))
        if self.documents is not None:
            parts.append(Documents(self.documents))
        return Intersection(tuple(parts or [Window(None, None)]))

    def _restarting_chunks(self, chunk_len: int, start: int) -> tuple[int, ...]:
        """Return the boundaries of chunks that are counted from the beginning of each document, or from start."""
        edges = {0, self.seq_len}
        for a, e in pairwise(self.documents or (0, self.seq_len)):
            edges.update((a, *range(max(a, start), e, chunk_len)))
        return tuple(sorted(edges))

    def variant(self, b: int) -> int:
        """See `MaskUnion.variant`: elements of equal lengths are alike."""
        return 0 if self.lengths is None else self.lengths.index(self.lengths[b])


def check_documents(documents: tuple[int, ...], seq_len: int) -> None:
    """Refuse boundaries that do not divide seq_len tokens."""
    if len(documents) < 2 or documents[0] != 0 or documents[-1] != seq_len:
        shown = f"{documents[0]}, ..., {documents[-1]}" if documents else "nothing"
        raise ValueError(
            f"documents must be boundaries that start at 0 and end at seq_len {seq_len}, got {shown}; "
            "pass cumulative lengths, and count padding as a document of its own"
        )
    decreasing = list(map(gt, documents, documents[1:]))
    if any(decreasing):
        k = decreasing.index(True)
        raise ValueError(
            f"documents must not decrease, got {documents[k]} then {documents[k + 1]} at index {k}; pass cumulative lengths"
        )


def _check_lengths(lengths: tuple[tuple[int, int], ...], seq_len: int, kv_len: int) -> None:
    if seq_len != kv_len:
        raise ValueError(
            f"lengths must bound one sequence, got {seq_len} queries and {kv_len} keys; "
            "mask padded keys of cross attention with key_bias"
        )
    if not lengths:
        raise ValueError("lengths must have one (start, stop) per batch element, got none; None means no padding")
    for b, (start, stop) in enumerate(lengths):
        if not 0 <= start <= stop <= seq_len:
            raise ValueError(
                f"lengths must be 0 <= start <= stop <= seq_len {seq_len}, got ({start}, {stop}) for element {b}; "
                "give positions of the padded sequence"
            )
