"""Masks of short forms that remember them, for definitions that are independent of expressions."""

from __future__ import annotations

from ringattn.plan.expressions import Mask
from ringattn.plan.mask import MaskUnion, fold_mask, restarting_chunks

Window = tuple[int | None, int | None]


class ShortMask(MaskUnion):
    """The mask of short forms, with these as attributes; under chunks_restart as inference counts chunks."""

    def __init__(
        self,
        seq_len: int,
        kv_len: int,
        causal: bool = False,
        window: Window | None = None,
        documents: tuple[int, ...] | None = None,
        prefix_len: int = 0,
        chunk_len: int | None = None,
        lengths: tuple[tuple[int, int], ...] | None = None,
        chunks_restart: bool = False,
    ) -> None:
        self.causal, self.window, self.prefix_len, self.lengths = causal, window, prefix_len, lengths
        self.chunk_len, self.chunks_restart = chunk_len, chunks_restart
        chunks = None if chunks_restart else chunk_len
        mask: Mask = fold_mask(causal=causal, window=window, prefix_len=prefix_len, chunk_len=chunks, lengths=lengths)
        if chunks_restart and chunk_len is not None:
            mask = mask & restarting_chunks(seq_len, chunk_len, documents, lengths)
        super().__init__(seq_len, kv_len, mask, documents)
