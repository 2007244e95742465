"""Which keys a query sees: always one interval of global positions.

Owns the meaning of causal, window, documents, prefix_len, chunk_len and lengths, and both readings of it: the keys of a
query and the queries of a key. Refuses to know layouts, ranks and devices. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Visibility:
    """The mask of one attention call (definitions: design contract).

    Attributes:
        seq_len: Queries in the whole sequence.
        kv_len: Keys in the whole sequence (equals seq_len unless cross attention).
        causal: Keys j <= i.
        window: (left, right): i - left <= j <= i + right; None on a side means unbounded; None: no window.
        documents: Cumulative boundaries (0, ..., seq_len); i and j in the same one. Empty documents are allowed.
        prefix_len: With causal: keys j < prefix_len are visible to every row too.
        chunk_len: i // chunk_len == j // chunk_len.
        lengths: One (start, stop) per batch element: rows and keys outside see nothing and are seen by nobody.
    """

    seq_len: int
    kv_len: int
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    documents: tuple[int, ...] | None = None
    prefix_len: int = 0
    chunk_len: int | None = None
    lengths: tuple[tuple[int, int], ...] | None = None

    def keys_of(self, i: int, b: int = 0) -> tuple[int, int]:
        """The keys [lo, hi) visible to query i of batch element b; lo <= hi, neither decreases with i."""
        raise NotImplementedError

    def queries_of(self, j: int, b: int = 0) -> tuple[int, int]:
        """The queries [lo, hi) that see key j of batch element b; lo <= hi, neither decreases with j."""
        raise NotImplementedError
